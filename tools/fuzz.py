# SPDX-License-Identifier: Apache-2.0
"""Coverage-guided fuzzing of everything that takes bytes from outside: tests/fuzz/targets.py under atheris.

    python tools/fuzz.py [--minutes 10] [--only NAME] [--jobs 2]

Each target gets its share of the time in a process of its own, with 2 GiB of memory and 60 seconds per input as limits.
New inputs go to build/fuzz/<target>; a crash stops with its input stored there and the exit status 1. A finding becomes
a test by copying that file to tests/fuzz/corpus/<target>/.
"""

from __future__ import annotations

import argparse
import inspect
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FUZZ = ROOT / "tests" / "fuzz"
WORK = ROOT / "build" / "fuzz"


def run_target(name: str, seconds: int) -> tuple[str, int, int, int, str]:
    """(name, exit status, executions, branches reached, last lines) of one target's process."""
    sys.path.insert(0, str(FUZZ))
    from targets import seeds

    found, crashes = WORK / name, WORK / f"{name}-crashes"
    found.mkdir(parents=True, exist_ok=True)
    crashes.mkdir(exist_ok=True)
    for number, data in enumerate(seeds(name)):
        (found / f"seed-{number}").write_bytes(data)
    corpus = [str(found)] + ([str(FUZZ / "corpus" / name)] if (FUZZ / "corpus" / name).is_dir() else [])
    flags = [
        f"-max_total_time={seconds}",
        "-timeout=60",
        "-rss_limit_mb=2048",
        "-max_len=16384",
        "-print_final_stats=1",
    ]
    flags.append(f"-artifact_prefix={crashes}/")
    command = [sys.executable, __file__, "--target", name, *flags, *corpus]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 300, check=False)
    except subprocess.TimeoutExpired:
        return name, 1, 0, 0, f"{name} did not end within {seconds + 300} s"
    output = done.stdout + done.stderr
    runs = re.search(r"number_of_executed_units: (\d+)", output)
    reached = [int(count) for count in re.findall(r"\bcov: (\d+)", output)]
    branches = reached[-1] if reached else 0
    status = done.returncode or int(not branches)  # without coverage nothing guides it
    return name, status, int(runs[1]) if runs else 0, branches, output[-3000:]


def instrument_package(package: str) -> int:
    """Let atheris see the branches of every function of the loaded modules; their number. Its import hook does not see
    through the loader of an editable install."""
    import atheris

    seen: set[int] = set()

    def visit(value: object, module: str) -> None:
        value = getattr(value, "__func__", getattr(value, "fget", value))  # methods and properties of a class
        if getattr(value, "__module__", None) != module or id(value) in seen:
            return
        seen.add(id(value))
        if inspect.isclass(value):
            for member in list(vars(value).values()):
                visit(member, module)
        elif inspect.isfunction(value):
            atheris.instrument_func(value)

    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(f"{package}."):
            for value in list(vars(module).values()):
                visit(value, name)
    return len(seen)


def fuzz_one(name: str, flags: list[str]) -> None:
    """The process of one target: instrument the package, then hand over to libFuzzer, which ends the process."""
    import atheris

    sys.path.insert(0, str(FUZZ))
    import torch
    from targets import TARGETS

    torch.set_num_threads(1)
    TARGETS[name](b"")  # loads what is loaded on first use, which is no slow input
    instrument_package("sparse_mla")
    instrument_package("targets")
    atheris.Setup([sys.argv[0], *flags], TARGETS[name])
    atheris.Fuzz()


def main() -> int:
    if len(sys.argv) > 2 and sys.argv[1] == "--target":
        fuzz_one(sys.argv[2], sys.argv[3:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="of all targets together, per job")
    parser.add_argument("--only", help="one target")
    parser.add_argument("--jobs", type=int, default=2, help="targets at once")
    args = parser.parse_args()
    try:
        import atheris  # noqa: F401
    except ModuleNotFoundError:
        print('fuzz: atheris is not installed; pip install -e ".[fuzz]" (Linux and macOS, CPython 3.11 to 3.13)')
        return 2
    sys.path.insert(0, str(FUZZ))
    from targets import TARGETS

    names = [args.only] if args.only else list(TARGETS)
    seconds = max(5, int(60 * args.minutes * args.jobs / len(names)))
    began = time.monotonic()
    with ThreadPoolExecutor(args.jobs) as pool:
        results = list(pool.map(lambda name: run_target(name, seconds), names))
    failed = 0
    for name, status, runs, branches, tail in results:
        print(f"{name:<12} {runs:>10,} inputs  {branches:>5} branches  {'ok' if status == 0 else 'FAILED'}")
        if status:
            failed += 1
            print(tail)
    total = sum(result[2] for result in results)
    print(f"{total:,} inputs to {len(names)} targets in {time.monotonic() - began:.0f} s, {failed} findings")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
