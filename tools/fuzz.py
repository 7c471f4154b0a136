# SPDX-License-Identifier: Apache-2.0
"""Coverage-guided fuzzing of everything that takes bytes from outside: tests/fuzz/targets.py under atheris.

    python tools/fuzz.py [--minutes 10] [--only NAME] [--jobs 2]

Each target gets its share of the time in a process of its own, with 2 GiB of memory and 60 seconds per input as limits.
New inputs go to build/fuzz/<target>; a crash stops with its input stored there and the exit status 1. A finding becomes
a test by copying that file to tests/fuzz/corpus/<target>/.
"""

from __future__ import annotations

import argparse
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
    """(name, exit status, executions, inputs kept, last lines) of one target's process."""
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
        return name, 1, 0, len(list(found.iterdir())), f"{name} did not end within {seconds + 300} s"
    output = done.stdout + done.stderr
    runs = re.search(r"number_of_executed_units: (\d+)", output)
    return name, done.returncode, int(runs[1]) if runs else 0, len(list(found.iterdir())), output[-3000:]


def fuzz_one(name: str, flags: list[str]) -> None:
    """The process of one target: instrument the package, then hand over to libFuzzer, which ends the process."""
    import atheris

    sys.path.insert(0, str(FUZZ))
    with atheris.instrument_imports(include=["sparse_mla"]):
        from targets import TARGETS
    import torch

    torch.set_num_threads(1)
    TARGETS[name](b"")  # loads what is loaded on first use, which is no slow input
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
    for name, status, runs, kept, tail in results:
        print(f"{name:<12} {runs:>10,} inputs  {kept:>5} kept  {'ok' if status == 0 else 'FAILED'}")
        if status:
            failed += 1
            print(tail)
    total = sum(result[2] for result in results)
    print(f"{total:,} inputs to {len(names)} targets in {time.monotonic() - began:.0f} s, {failed} findings")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
