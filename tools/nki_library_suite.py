#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run the integration tests of aws-neuron/nki-library on this project's simulator, and say what did not pass and why.

    pip install attrs scipy pytest-xdist pytest-html   # for the library's test harness, besides pytest and torch
    NKI_LIBRARY_DIR=<checkout of 2026-04-13, d2ad3a57> python tools/nki_library_suite.py core/cumsum core/max
    NKI_LIBRARY_DIR=... python tools/nki_library_suite.py --seconds-per-family 120 --out results.jsonl
    python tools/nki_library_suite.py --table results.jsonl        # the table again, without running anything

The library has a simulation mode that expects a simulator under names of its own; this file puts ours there, provides
the few functions of `neuron_dtypes` its tests use, and runs each family in a process: small shapes first, with limits
of processor time per test and per family. Nothing of the library is copied; its outputs go to a temporary directory.

The file is its own pytest plugin: the first half runs inside the library's pytest, the second half starts it.
"""

from __future__ import annotations

import argparse
import collections
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pluggy import HookimplMarker

hookimpl = HookimplMarker("pytest")

SNAPSHOT = "aws-neuron/nki-library at d2ad3a57 (2026-04-13)"
TESTS = Path("test/integration/nkilib")
RESULTS, TEST_SECONDS, FAMILY_SECONDS = "NKI_SUITE_RESULTS", "NKI_SUITE_TEST_SECONDS", "NKI_SUITE_FAMILY_SECONDS"
REQUIRED = (
    "core/cumsum", "core/max", "core/embeddings", "core/rmsnorm", "core/subkernels", "experimental/conv",
    "experimental/loss", "experimental/dynamic_shapes",
)  # fmt: skip
STATES = ("passed", "failed", "too slow", "not run", "needs trn3", "needs collectives", "excluded")


# -- inside the library's pytest --------------------------------------------------------------------------------------

# What the library's test harness imports for its laboratory and what no simulated test needs.
LABORATORY = (
    "boto3", "botocore", "fabric2", "paramiko", "aws_embedded_metrics", "plotext", "pytest_html", "pandas",
    "allpairspy", "file_classifier", "filelock",
)  # fmt: skip


# Modules of the harness that the public snapshot does not contain.
UNPUBLISHED = ("test.utils.scripts", "test.utils.perf_analysis_private")


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for laboratory packages that are not installed."""

    def __init__(self) -> None:
        self.names = {name for name in LABORATORY if importlib.util.find_spec(name) is None}

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname.split(".")[0] in self.names or fullname.startswith(UNPUBLISHED):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        from unittest.mock import MagicMock

        module = MagicMock(name=spec.name)
        module.__spec__, module.__path__, module.__name__, module.__file__ = spec, [], spec.name, "absent"
        for error in ("ClientError", "NoCredentialsError", "SSHException", "Timeout"):
            setattr(module, error, type(error, (Exception,), {}))
        return module

    def exec_module(self, module: Any) -> None:
        pass


def neuron_dtypes() -> types.ModuleType:
    """The functions of `neuron_dtypes` that the library's tests call, over ml_dtypes."""
    import ml_dtypes
    import numpy as np

    from sparse_mla.simulator import dtypes

    made = types.ModuleType("neuron_dtypes")

    def numpy_dtype(dtype: Any) -> Any:
        try:
            return np.dtype(dtype)
        except TypeError:
            return dtypes.from_any(dtype).np

    def static_cast(array: Any, dtype: Any) -> Any:
        with np.errstate(all="ignore"):
            return np.asarray(array).astype(numpy_dtype(dtype))

    def is_float_type(dtype: Any) -> bool:
        found = numpy_dtype(dtype)
        return np.issubdtype(found, np.floating) or found.kind == "V" or "float" in found.name

    for name in ("bfloat16", "float8_e4m3", "float8_e5m2", "float8_e4m3fn"):
        setattr(made, name, np.dtype(getattr(ml_dtypes, name)).type)
    for name in ("float8_e4m3fn_x4", "float8_e5m2_x4", "float4_e2m1fn_x4"):
        setattr(made, name, dtypes.ALL[name])
    given = {
        "static_cast": static_cast, "is_float_type": is_float_type, "finfo": ml_dtypes.finfo,
        "sizeinbytes": lambda dtype: numpy_dtype(dtype).itemsize,
    }  # fmt: skip
    for name, value in given.items():
        setattr(made, name, value)
    made.__getattr__ = lambda name: getattr(dtypes, name)  # type: ignore[method-assign]
    return made


def install() -> None:
    """Put the simulator where the library's simulation mode looks for one."""
    from sparse_mla import simulator
    from sparse_mla.simulator import compiler, constants, dtypes, isa, language, launch, target, tensor
    from sparse_mla.simulator import typing as typing_

    simulator.install(neuronxcc=True)
    launch.set_default_params(simulator.SimulatorParams(aws_compat=True, show_warnings=False, timing=False))
    nki = sys.modules["nki"]
    root = types.ModuleType("nki_cpu_simulator")
    root.__path__ = []  # type: ignore[attr-defined]
    root.nki = nki  # type: ignore[attr-defined]
    builtin = types.ModuleType("nki_cpu_simulator.nki.builtin")
    nki.builtin = builtin  # type: ignore[attr-defined]
    names = {
        "": nki, ".builtin": builtin, ".compiler": compiler, ".isa": isa, ".isa.constants": constants,
        ".language": language, ".language.dtypes": dtypes, ".tensor": tensor, ".typing": typing_,
    }  # fmt: skip
    sys.modules["nki_cpu_simulator"] = root
    sys.modules.update({f"nki_cpu_simulator.nki{name}": module for name, module in names.items()})
    sys.modules["neuron_dtypes"] = neuron_dtypes()
    generations = {"gen2": target.GEN2, "gen3": target.GEN3, "gen4": target.GEN4}
    # The harness names the generation of each test in this variable, right before it launches.
    target.from_environment = lambda: generations.get(os.environ.get("NKI_NC_VERSION", ""), target.GEN3)


def size_of(item: Any) -> float:
    """How large a test is: the product of its integer parameters."""
    size = 1.0

    def visit(value: Any, depth: int = 0) -> None:
        nonlocal size
        if isinstance(value, bool) or depth > 3:
            return
        if isinstance(value, int):
            size *= max(1, abs(value))
        elif isinstance(value, (tuple, list)):
            for each in value:
                visit(each, depth + 1)
        elif isinstance(value, dict):
            for each in value.values():
                visit(each, depth + 1)
        elif hasattr(value, "__dict__"):
            for each in vars(value).values():
                visit(each, depth + 1)

    spec = getattr(item, "callspec", None)
    if spec is not None:
        visit(spec.params)
    return size


class TooSlow(BaseException):
    """The test's time is up."""


class Suite:
    """The plugin: order, limits, and one JSON line per test."""

    def __init__(self) -> None:
        self.limit = float(os.environ[TEST_SECONDS])
        self.deadline = time.process_time() + float(os.environ[FAMILY_SECONDS])
        self.expired = False
        self.out = Path(os.environ[RESULTS]).open("a", encoding="utf-8")  # noqa: SIM115

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        import logging

        from test.utils import test_orchestrator  # type: ignore[import-not-found]

        # The attribute exists only after a compilation, which simulation mode skips.
        test_orchestrator.Orchestrator._compiled_kernel = None
        logging.getLogger().setLevel("WARNING")
        items.sort(key=size_of)

    def alarm(self, *_: Any) -> None:
        from sparse_mla.simulator import core

        self.expired = True
        machine = core.running()
        if machine is not None and machine.launch.limit >= 0:
            machine.launch.limit = -1  # the next instruction ends the launch, whichever thread runs it
            signal.setitimer(signal.ITIMER_PROF, 10)
        else:
            raise TooSlow

    @hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: Any) -> Any:
        import pytest

        self.expired = False
        if time.process_time() > self.deadline:
            pytest.skip("the family's time is up")
        signal.signal(signal.SIGPROF, self.alarm)
        signal.setitimer(signal.ITIMER_PROF, self.limit)  # processor time: a busy machine changes nothing
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        if report.when == "teardown" and report.outcome == "failed" and self.expired:
            return
        state, reason = report.outcome, ""
        if state == "skipped":
            reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
            state = "not run"
        elif state == "failed":
            reason = sentence(report)
        state, reason = classify(state, reason, self.expired)
        line = {"test": report.nodeid, "state": state, "seconds": round(report.duration, 2), "reason": reason}
        self.out.write(json.dumps(line) + "\n")
        self.out.flush()

    def pytest_collectreport(self, report: Any) -> None:
        if report.outcome == "failed":
            state, reason = classify("failed", sentence(report), False)
            line = {"test": report.nodeid, "state": state, "seconds": 0.0, "reason": f"collection: {reason}"}
            self.out.write(json.dumps(line) + "\n")
            self.out.flush()


def sentence(report: Any) -> str:
    """The error of a report in one line."""
    crash = getattr(getattr(report, "longrepr", None), "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return (lines[0] if crash is not None and lines else lines[-1] if lines else "")[:400]


def classify(state: str, reason: str, expired: bool) -> tuple[str, str]:
    """(state, reason) of one test for the table."""
    if expired:
        return "too slow", "time limit of a test"
    if state == "not run" and "time is up" in reason:
        return "not run", "time limit of the family"
    if re.search(r"IndentationError|'Platforms' is not defined|No module named 'nkilib", reason):
        return "excluded", f"a file of the snapshot cannot be imported by anybody ({reason})"
    if "nki.compiler.frontend" in reason:
        return "excluded", "the test traces with the compiler's front end instead of running"
    if state == "not run" and re.search(r"empty parameter set|only one comb|must match|must stay", reason):
        return "excluded", reason
    if state == "not run" and ("simulat" in reason.lower() or "large" in reason.lower()):
        return "too slow", "skipped as too large by the library's own simulation mode"
    if state in ("failed", "not run"):
        lower = reason.lower()
        if re.search(r"trn3|gen4|nc_matmul_mx|quantize_mx|activate2|exponential|platform", lower):
            return "needs trn3", reason
        if "nki.collectives" in lower or "collective" in lower:
            return "needs collectives", reason
    return state, reason


def pytest_configure(config: Any) -> None:
    """Entry of `-p nki_library_suite`."""
    config.pluginmanager.register(Suite(), "nki-library-suite")


if RESULTS in os.environ:  # imported by pytest as a plugin: before the library's conftest
    sys.meta_path.append(_Absent())
    install()


# -- the command ------------------------------------------------------------------------------------------------------


def families(root: Path) -> list[str]:
    """Folders with test files, as `core/cumsum`."""
    found = {str(path.parent.relative_to(root / TESTS)) for path in (root / TESTS).rglob("test_*.py")}
    return sorted(found, key=lambda name: (name not in REQUIRED, name))


def run_family(root: Path, family: str, results: Path, test_seconds: float, family_seconds: float, k: str) -> str:
    """Run one family in its own process; returns the end of pytest's output when it could not even start."""
    here = Path(__file__).resolve().parent
    with tempfile.TemporaryDirectory(prefix="nki-suite-") as scratch:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(here), str(here.parent / "src"), str(root / "src"), str(root)]),
            "PYTHONDONTWRITEBYTECODE": "1", "NEURON_PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
            RESULTS: str(results), TEST_SECONDS: str(test_seconds), FAMILY_SECONDS: str(family_seconds),
        }  # fmt: skip
        command = [
            sys.executable, "-m", "pytest", "-p", "nki_library_suite", "-p", "no:cacheprovider",
            "-p", "no:timeout", "-c", "test/pytest.ini", "-o", f"artifacts_dir={scratch}/artifacts", "--rootdir", ".",
            str(TESTS / family), "--test-mode", "simulation", "--output-directory", f"{scratch}/out", "-q",
            "--no-header", "--continue-on-collection-errors", "--assert=plain", "-W", "ignore", "--tb=line",
            *(["-k", k] if k else []),
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command, cwd=root, env=environment, capture_output=True, text=True, timeout=6 * family_seconds + 300
            )
        except subprocess.TimeoutExpired:
            return "stopped: the family did not end in time"
    return "" if done.returncode in (0, 1, 5) else (done.stdout + done.stderr)[-1500:]


def load(path: Path) -> dict[str, dict[str, Any]]:
    """The last line of each test."""
    rows: dict[str, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        rows[row["test"]] = row
    return rows


def family_of(test: str) -> str:
    return str(Path(test.split("::")[0]).parent.relative_to(TESTS))


def summary(rows: dict[str, dict[str, Any]]) -> list[tuple[str, collections.Counter[str], str]]:
    """Per family: counts per state, and the commonest reason for what did not pass."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    reasons: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for test, row in rows.items():
        family = family_of(test)
        counts[family][row["state"]] += 1
        if row["state"] != "passed" and row["reason"]:
            reasons[family][re.sub(r"[^\s(]*/(?=[\w.]+:\d+)", "", row["reason"])[:110]] += 1
    found = []
    for family in sorted(counts, key=lambda name: (name not in REQUIRED, name)):
        text = "; ".join(f"{n} x {reason}" for reason, n in reasons[family].most_common(2))
        found.append((family, counts[family], text))
    return found


def closing(rows: dict[str, dict[str, Any]]) -> str:
    """The sentence under the table."""
    count = collections.Counter(row["state"] for row in rows.values())
    ran = count["passed"] + count["failed"]
    relevant = ran + count["too slow"] + count["not run"]
    percent = 100 * count["passed"] / ran if ran else 0.0
    overall = 100 * count["passed"] / relevant if relevant else 0.0
    return (
        f"Of {relevant} tests that need neither trn3 nor collectives, {ran} ran in the time given and "
        f"{count['passed']} of them passed: {percent:.0f} % of those that ran, {overall:.0f} % of all."
    )


def markdown(rows: dict[str, dict[str, Any]]) -> str:
    """The table for the documentation."""
    lines = ["| family | " + " | ".join(STATES) + " | reasons |", "|---|" + "---:|" * len(STATES) + "---|"]
    for family, counts, text in summary(rows):
        cells = " | ".join(str(counts[state] or "") for state in STATES)
        lines.append(f"| {family} | {cells} | {text.replace('|', '/')} |")
    lines.append("\n" + closing(rows))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="as core/cumsum; default: all of them, the required ones first")
    parser.add_argument("--required", action="store_true", help=f"only {', '.join(REQUIRED)}")
    parser.add_argument("--out", type=Path, help="JSON lines, appended; default: a temporary file")
    parser.add_argument("--seconds-per-test", type=float, default=30.0)
    parser.add_argument("--seconds-per-family", type=float, default=300.0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("-k", default="", help="only tests that match, as pytest's -k")
    parser.add_argument("--table", type=Path, help="print the table of such a file and run nothing")
    parser.add_argument("--summary", type=Path, help="with --table: also write the table as JSON")
    options = parser.parse_args()
    if options.table:
        rows = load(options.table)
        print(markdown(rows))
        if options.summary:
            found = {"states": STATES, "families": summary(rows), "sentence": closing(rows)}
            options.summary.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return 0
    given = os.environ.get("NKI_LIBRARY_DIR")
    if not given or not (Path(given) / TESTS).is_dir():
        print(f"nki_library_suite: NKI_LIBRARY_DIR must name a checkout of {SNAPSHOT}, got {given!r}.", file=sys.stderr)
        return 2
    root = Path(given).resolve()
    chosen = options.families or (list(REQUIRED) if options.required else families(root))
    out = options.out or Path(tempfile.mkstemp(suffix=".jsonl")[1])
    out = out.resolve()
    out.touch()
    with ThreadPoolExecutor(options.processes) as pool:
        jobs = {
            family: pool.submit(
                run_family, root, family, out, options.seconds_per_test, options.seconds_per_family, options.k
            )
            for family in chosen
        }
        for family, job in jobs.items():
            trouble = job.result()
            if trouble:
                print(f"{family}: {trouble}", file=sys.stderr)
    rows = {test: row for test, row in load(out).items() if family_of(test) in chosen}
    print(f"{SNAPSHOT}, simulated (values only; nothing ran on a device)\n")
    print(markdown(rows))
    failed = [row for row in rows.values() if row["state"] == "failed"]
    for row in failed:
        print(f"FAILED {row['test']}: {row['reason']}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
