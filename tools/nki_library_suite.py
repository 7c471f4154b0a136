#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run the integration tests of aws-neuron/nki-library on this project's simulator, and say what did not pass and why.

    pip install attrs scipy pytest-xdist pytest-html   # for the library's test harness, besides pytest and torch
    NKI_LIBRARY_DIR=<checkout of 2026-04-13, d2ad3a57> python tools/nki_library_suite.py core/cumsum core/max
    NKI_LIBRARY_DIR=... python tools/nki_library_suite.py --out results.jsonl --seconds 3600
    NKI_LIBRARY_DIR=... python tools/nki_library_suite.py --out results.jsonl --resume --seconds-per-test 120
    python tools/nki_library_suite.py --table results.jsonl        # the table again, without running anything

The library has a simulation mode that expects a simulator under names of its own; this file puts ours there, provides
the few functions of `neuron_dtypes` its tests use, and runs the tests with limits of time and memory: always
the cheapest kind of test next, and of a kind the smallest. Each test is a line in --out, so a run can be continued.
Nothing of the library is copied; its outputs go to a temporary directory.

The file is its own pytest plugin: the first half runs inside the library's pytest, the second half starts it.
"""

from __future__ import annotations

import argparse
import collections
import enum
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import types
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pluggy import HookimplMarker

hookimpl = HookimplMarker("pytest")

SNAPSHOT = "aws-neuron/nki-library at d2ad3a57 (2026-04-13)"
TESTS = Path("test/integration/nkilib")
RESTARTS = 20  # of a process that a test killed
FULL = 75  # exit code of a process that is to be replaced: tests leave memory behind, half of its limit is in use
SUITE = "NKI_SUITE"  # how the command hands its options to the plugin
UNTRIED = 4.0  # seconds that a kind of test is taken to cost before one of it ran
RUNNING = "ended the process that ran it"  # stands when nothing is written after it
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
        given, wanted = np.asarray(array), numpy_dtype(dtype)
        with np.errstate(all="ignore"):
            if given.dtype == np.float32 and wanted.itemsize == 1 and wanted.name.startswith("float8"):
                out = np.empty(given.shape, wanted)  # the simulator's own cast gives the same bits, faster
                dtypes.cast_into(out, given, dtypes.from_any(wanted))
                return out
            return given.astype(wanted)

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
    sys.modules["test.utils.kernel_tracer"] = tracer()
    generations = {"gen2": target.GEN2, "gen3": target.GEN3, "gen4": target.GEN4}
    # The harness names the generation of each test in this variable, right before it launches.
    target.from_environment = lambda: generations.get(os.environ.get("NKI_NC_VERSION", ""), target.GEN3)


def tracer() -> types.ModuleType:
    """Stands in for the harness' tracer of the tests that only trace: the compiler's front end is in no public package.

    Such a kernel asserts about shapes and views while it is traced, and the simulator runs the same statements.
    """
    import nki

    def trace_kernel(kernel_under_test: Any, **_: Any) -> None:
        settings = kernel_under_test.compiler_input
        os.environ["NKI_NC_VERSION"] = settings.platform_target.get_nc_gen()
        inputs = {name.removesuffix(".must_alias_input"): a for name, a in kernel_under_test.kernel_input.items()}
        nki.cpu_simulate(kernel_under_test.kernel_func)[settings.logical_nc_config](**inputs)

    made = types.ModuleType("test.utils.kernel_tracer")
    made.trace_kernel = trace_kernel  # type: ignore[attr-defined]
    return made


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


def several_devices(item: Any) -> str:
    """Why a test needs more than one device, before its inputs are made; or nothing."""
    if family_of(item.nodeid) == "experimental/collectives":
        return "the family runs on several devices"
    spec = getattr(item, "callspec", None)
    if spec is not None and any(getattr(value, "KVDP", 1) > 1 for value in spec.params.values()):
        return "its cache is spread over several devices"
    return ""


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


class TooSlow(BaseException):
    """The test's time is up."""


class Queue:
    """What runs next: the function whose last test was cheapest, and of it the smallest test that is left.

    Tests that were never tried go before those that earlier runs gave up on; a function whose tests are too slow three
    times in a row rests until the next run.
    """

    def __init__(self, items: list[Any], rows: dict[str, dict[str, Any]]) -> None:
        earlier = {name for name, row in rows.items() if row["state"] != "not run"}
        self.left: dict[str, list[Any]] = {}
        self.cost: dict[str, float] = {}
        self.slow: collections.Counter[str] = collections.Counter()
        for item in sorted(items, key=lambda item: (item.nodeid in earlier, size_of(item)), reverse=True):
            self.left.setdefault(self.name(item), []).append(item)
        for name in self.left:
            self.cost[name] = UNTRIED
        for test, row in rows.items():  # in the order of their ends: the last one tells most
            if (name := test.split("[")[0]) in self.left and row["state"] in ("passed", "failed", "too slow"):
                self.cost[name] = row.get("limit", 30.0) if row["state"] == "too slow" else row["seconds"]

    @staticmethod
    def name(item: Any) -> str:
        return str(item.nodeid.split("[")[0])

    def next(self) -> Any:
        ready = [name for name, items in self.left.items() if items and self.slow[name] < 3]
        if not ready:
            return None
        return self.left[min(ready, key=lambda name: self.cost[name])].pop()

    def done(self, item: Any, seconds: float, slow: bool) -> None:
        name = self.name(item)
        required = family_of(item.nodeid) in REQUIRED
        self.cost[name] = seconds / 4 if required else seconds
        self.slow[name] = self.slow[name] + 1 if slow else 0


class Suite:
    """The plugin: what runs and in which order, limits, and one JSON line per test."""

    def __init__(self) -> None:
        given = json.loads(os.environ[SUITE])
        self.limit, self.seconds = float(given["seconds_per_test"]), float(given["seconds"])
        self.shard, self.shards = given["shard"]
        self.resume, self.again = bool(given["resume"]), set(given["again"])
        self.path = Path(given["out"])
        self.expired = self.no_memory = False
        self.states: dict[str, str] = {}
        self.memory = int(given["gigabytes"] * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (self.memory, self.memory))

    def write(self, test: str, state: str, reason: str = "", seconds: float = 0.0) -> None:
        line = {"test": test, "state": state, "seconds": round(seconds, 2), "limit": self.limit, "reason": reason}
        with self.path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")

    def final(self, row: dict[str, Any] | None) -> bool:
        """Whether a test needs no further run."""
        if row is None or not self.resume or row["state"] in self.again:
            return False
        if row["state"] == "too slow":
            return bool(row.get("limit", 0.0) >= self.limit)
        return row["state"] != "not run"

    def pytest_sessionstart(self) -> None:
        """Keep the combinations that the library draws for its pairwise tests: it takes two minutes for all of them."""
        from test.utils import coverage_parametrized_tests as coverage

        draw, kept = coverage._create_all_pairs, self.path.with_suffix(".pairs")
        known = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}

        def pairs(values: list[list[Any]], accept: Any) -> list[Any]:
            inner = [cell.cell_contents for cell in getattr(accept, "__closure__", None) or ()]
            rule = [f"{f.__module__}.{f.__qualname__}" for f in inner if isinstance(f, types.FunctionType)]
            rule += [str(f) for f in inner if isinstance(f, enum.Enum)]
            key = f"{zlib.crc32(repr((values, rule)).encode()):08x} {' '.join(rule)}"
            if key not in known:
                places = [{id(value): i for i, value in enumerate(each)} for each in values]
                known[key] = [[at[id(x)] for at, x in zip(places, row, strict=True)] for row in draw(values, accept)]
                kept.write_text(json.dumps(known), encoding="utf-8")
            return [[v[i] for v, i in zip(values, row, strict=True)] for row in known[key]]

        coverage._create_all_pairs = pairs

    @hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self) -> None:
        import logging

        from test.utils import test_orchestrator  # type: ignore[import-not-found]

        harness = test_orchestrator.Orchestrator
        # The attribute exists only after a compilation, which simulation mode skips.
        harness._compiled_kernel = None
        # Files of the inputs, which the laboratory's runner reads and simulation does not.
        harness._Orchestrator__dump_kernel_inputs__ = lambda *_: {}
        logging.getLogger().setLevel("WARNING")

    def pytest_deselected(self, items: list[Any]) -> None:
        rows = load(self.path)
        if items and items[0].config.option.keyword:
            return  # -k left them out, or the library did: they keep the rows they have
        for item in items:
            if item.nodeid not in rows and self.shard == 0:
                self.write(item.nodeid, "needs trn3", "the library marks it as not for trn2")

    def pytest_collection_finish(self, session: Any) -> None:
        rows = load(self.path)
        collected = {item.nodeid for item in session.items}
        if self.shard == 0:
            for item in session.items:
                before = rows.get(item.nodeid, {"state": "not run"})
                if before["state"] == "not run" and (reason := several_devices(item)):
                    self.write(item.nodeid, "needs collectives", reason)
                elif item.nodeid not in rows:
                    self.write(item.nodeid, "not run", "not reached")
            if not session.config.option.keyword:
                # Combinations that the library drew in another run, whose draw depends on the files collected with
                # it: those that ran stay.
                files = {test.split("::")[0] for test in collected}
                for test, row in rows.items():
                    if test.split("::")[0] in files and test not in collected and row["state"] == "not run":
                        self.write(test, "gone")
        mine = [item for item in session.items if zlib.crc32(item.nodeid.encode()) % self.shards == self.shard]
        mine = [item for item in mine if not self.final(rows.get(item.nodeid)) and not several_devices(item)]
        self.queue = Queue(mine, rows)

    @hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: Any) -> bool:
        if session.config.option.collectonly:
            return True
        end = time.monotonic() + self.seconds
        item = self.queue.next()
        while item is not None:
            following = self.queue.next() if time.monotonic() < end else None
            started = time.process_time()
            self.write(item.nodeid, "too slow", RUNNING)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            self.queue.done(item, time.process_time() - started, self.states.get(item.nodeid) == "too slow")
            item = following
            if item is not None and resident() > self.memory / 2 and (gc.collect() or resident() > self.memory / 2):
                session.exitstatus = FULL
                pytest.exit("half of the memory is in use", returncode=FULL)
        return True

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
    def pytest_runtest_call(self) -> Any:
        self.expired = self.no_memory = False
        self.started = time.process_time()
        signal.signal(signal.SIGPROF, self.alarm)
        signal.setitimer(signal.ITIMER_PROF, self.limit)  # processor time: a busy machine changes nothing
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    @hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: Any) -> Any:
        error = call.excinfo.value if call.excinfo is not None else None
        while error is not None and call.when == "call":
            self.no_memory = self.no_memory or isinstance(error, MemoryError)
            error = error.__cause__ or error.__context__
        return (yield)

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
        seconds = time.process_time() - self.started if report.when == "call" else 0.0
        if state == "not run" and hasattr(report, "wasxfail"):
            state, reason = "excluded", f"the library expects it to fail {report.wasxfail}".strip()
        else:
            state, reason = classify(state, reason, self.expired, self.no_memory)
        self.states[report.nodeid] = state
        self.write(report.nodeid, state, reason, seconds)

    def pytest_collectreport(self, report: Any) -> None:
        if report.outcome == "failed" and self.shard == 0:
            state, reason = classify("failed", sentence(report), False, False)
            self.write(report.nodeid, state, f"collection: {reason}")


def sentence(report: Any) -> str:
    """The error of a report in one line."""
    crash = getattr(getattr(report, "longrepr", None), "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return (lines[0] if crash is not None and lines else lines[-1] if lines else "")[:400]


def classify(state: str, reason: str, expired: bool, no_memory: bool) -> tuple[str, str]:
    """(state, reason) of one test for the table."""
    if expired:
        return "too slow", "processor time limit of a test"
    if state != "passed" and (no_memory or re.search(r"Unable to allocate|can't allocate memory|bad_alloc", reason)):
        return "too slow", "memory limit of a test"
    if re.search(r"IndentationError|'Platforms' is not defined|No module named 'nkilib", reason):
        return "excluded", f"a file of the snapshot cannot be imported by anybody ({reason})"
    if "KeyError: 'mask_out_hbm'" in reason:
        return "excluded", "the test asks for an input by a name that it did not give it"
    if re.search(r"size of tensor a \(\d+\) must match the size of tensor b \(3\) at non-singleton", reason):
        return "excluded", "the test's reference wants a weight scale per column and gets the 3 of static quantisation"
    if state == "not run" and re.search(r"empty parameter set|only one comb|must match|must stay", reason):
        return "excluded", reason
    if state == "not run" and ("simulat" in reason.lower() or "large" in reason.lower()):
        return "too slow", "skipped as too large by the library's own simulation mode"
    if state in ("failed", "not run"):
        lower = reason.lower()
        if re.search(r"trn3|gen4|nc_matmul_mx|quantize_mx|activate2|exponential|platform", lower):
            return "needs trn3", reason
        if "collective" in lower or "perranklazy" in lower:  # inputs per rank: the test runs on several devices
            return "needs collectives", reason
    return ("excluded" if state == "not run" else state), reason  # what else is skipped, the library skips by itself


def pytest_configure(config: Any) -> None:
    """Entry of `-p nki_library_suite`."""
    config.pluginmanager.register(Suite(), "nki-library-suite")


if SUITE in os.environ:  # imported by pytest as a plugin: before the library's conftest
    sys.meta_path.append(_Absent())
    install()


# -- the command ------------------------------------------------------------------------------------------------------


def families(root: Path) -> list[str]:
    """Folders with test files, as `core/cumsum`."""
    found = {str(path.parent.relative_to(root / TESTS)) for path in (root / TESTS).rglob("test_*.py")}
    return sorted(found, key=lambda name: (name not in REQUIRED, name))


def run_shard(root: Path, chosen: list[str], k: str, options: dict[str, Any]) -> str:
    """Run one process's share of the tests; returns the end of pytest's output when it could not even start."""
    here = Path(__file__).resolve().parent
    files = [str(path) for family in chosen for path in sorted((root / TESTS / family).glob("test_*.py"))]
    end, killed = time.monotonic() + options["seconds"], 0
    while killed < RESTARTS and time.monotonic() < end:
        options = {**options, "seconds": end - time.monotonic()}
        with tempfile.TemporaryDirectory(prefix="nki-suite-") as scratch:
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(here), str(here.parent / "src"), str(root / "src"), str(root)]),
                "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0", "NEURON_PYTHONHASHSEED": "0",
                "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
                # Its simulation mode leaves out every test with 4096 or more in its name; here time and memory decide.
                "NKILIB_SIMULATION_RUN_ALL": "1",
                SUITE: json.dumps(options),
            }  # fmt: skip
            command = [
                sys.executable, "-m", "pytest", "-p", "nki_library_suite", "-p", "no:cacheprovider",
                "-p", "no:timeout", "-c", "test/pytest.ini", "-o", f"artifacts_dir={scratch}/artifacts",
                "--rootdir", ".", *files,
                "--test-mode", "simulation", "--output-directory", f"{scratch}/out", "--force-local-cleanup", "-q",
                "--no-header", "--continue-on-collection-errors", "--assert=plain", "-W", "ignore", "--tb=line",
                *(["-k", k] if k else []),
            ]  # fmt: skip
            done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
        if done.returncode not in (FULL, -signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT):
            break
        killed += done.returncode != FULL
        options = {**options, "resume": True, "again": []}  # go on behind the test that ended it
    return "" if done.returncode in (0, 1, 5, FULL) else (done.stdout + done.stderr)[-1500:]


def load(path: Path) -> dict[str, dict[str, Any]]:
    """The last line of each test, in the order of those lines."""
    rows: dict[str, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        rows.pop(row["test"], None)
        if row["state"] != "gone":
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

    def count(chosen: list[dict[str, Any]]) -> tuple[int, int, int]:
        """(passed, ran, all that need neither trn3 nor collectives)"""
        states = collections.Counter(row["state"] for row in chosen)
        ran = states["passed"] + states["failed"]
        return states["passed"], ran, ran + states["too slow"] + states["not run"]

    passed, ran, relevant = count(list(rows.values()))
    kernels = count([row for test, row in rows.items() if "[MODEL_" not in test])
    percent = [100 * a / b if b else 0.0 for a, b in ((passed, ran), (passed, relevant), (kernels[0], kernels[2]))]
    return (
        f"Of {relevant:,} tests that need neither trn3 nor collectives, {ran:,} ran in the time given and {passed:,} "
        f"of them passed: {percent[0]:.0f} % of those that ran, {percent[1]:.0f} % of all, {percent[2]:.0f} % of the "
        f"{kernels[2]:,} that are not the library's weekly runs with the sizes of whole models."
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
    parser.add_argument("--resume", action="store_true", help="skip tests of --out with a final state")
    parser.add_argument("--again", nargs="*", default=[], choices=STATES, help="states that --resume runs once more")
    parser.add_argument("--seconds-per-test", type=float, default=30.0, help="processor time")
    parser.add_argument("--seconds", type=float, default=3600.0, help="for all of it, by the clock")
    parser.add_argument("--gigabytes", type=float, default=6.0, help="memory of each process")
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
    shared = {
        "out": str(out), "seconds": options.seconds, "seconds_per_test": options.seconds_per_test,
        "gigabytes": options.gigabytes, "resume": options.resume, "again": options.again,
    }  # fmt: skip
    with ThreadPoolExecutor(options.processes) as pool:
        jobs = [
            pool.submit(run_shard, root, chosen, options.k, {**shared, "shard": (number, options.processes)})
            for number in range(options.processes)
        ]
        for job in jobs:
            if trouble := job.result():
                print(trouble, file=sys.stderr)
    rows = {test: row for test, row in load(out).items() if family_of(test) in chosen}
    print(f"{SNAPSHOT}, simulated (values only; nothing ran on a device)\n")
    print(markdown(rows))
    failed = [row for row in rows.values() if row["state"] == "failed"]
    for row in failed:
        print(f"FAILED {row['test']}: {row['reason']}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
