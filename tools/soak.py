# SPDX-License-Identifier: Apache-2.0
"""Random shapes and strides for as long as asked, every buffer between guard pages, and a watch on memory.

    python tools/soak.py [--minutes 30] [--calls 1000000] [--seed N]

1. Drawn cases of every operator run on every backend present, in ordinary memory and beside guard pages; bits must not
   depend on which, and native must be as close to the reference as its tolerance says.
2. `--calls` calls of cheap operators; resident memory must not grow by more than 16 MiB after the first tenth.
A fault ends the process; the last line on standard error names the case, and the seed repeats it.
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import resource
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import guarded  # noqa: E402 - lies beside the tests
from sparse_mla import V41_FP8, allocate, load_records, merge_partials, rope, rope_table, store_records, topk  # noqa: E402
from sparse_mla.dispatch import presence  # noqa: E402
from sparse_mla.testing.cases import ALL_CASES  # noqa: E402
from sparse_mla.testing.check import implementations, run_case  # noqa: E402

GROWTH_LIMIT = 16 << 20
# What may be drawn anew in a case; every value is legal beside every other.
DRAWS: dict[str, dict[str, tuple[Any, ...]]] = {
    "sparse_decode": {
        "b": (1, 2, 3, 5),
        "s_q": (1, 2, 6),
        "h_q": (1, 2, 3, 7, 8, 16, 17, 64),
        "strided": (True, False),
    },
    "sparse_prefill": {"s_q": (1, 3, 9), "s_kv": (1, 5, 130, 257), "h_q": (1, 3, 8, 33), "topk": (1, 7, 64, 100)},
    "merge_partials": {"parts": (1, 2, 5), "b": (1, 3), "s_q": (1, 4), "h_q": (1, 8, 11), "empty": (0.0, 0.5, 1.0)},
    "index_logits": {"b": (1, 2, 5), "heads": (1, 3, 32), "context": (1, 7, 64, 65, 130, 200)},
    "index_topk": {"b": (1, 3), "heads": (1, 4, 32), "context": (1, 63, 200), "k": (1, 7, 64, 300)},
    "topk": {"rows": (1, 3, 8), "n": (1, 2, 63, 64, 65, 1000), "k": (1, 2, 64, 999), "strided": (True, False)},
    "candidate_blocks": {"rows": (1, 3), "n": (1, 7, 8, 9, 500), "block_size": (8, 16), "topk_blocks": (1, 5, 2048)},
    "softmax_pool": {"groups": (0, 1, 5, 33), "ratio": (1, 2, 3, 128), "dim": (1, 31, 512), "strided": (True, False)},
    "rope": {},
    "compress": {},
    "store_records": {"n": (1, 2, 37), "dtype": (torch.bfloat16, torch.float32)},
    "load_records": {"shape": ((1,), (40,), (3, 5)), "skipped": (0.0, 0.5, 1.0)},
}


def drawn_case(source: random.Random) -> Any:
    """A stored case of a random operator with some of its sizes drawn anew, or None when they do not fit together."""
    op = source.choice(sorted(DRAWS))
    base = source.choice([c for c in ALL_CASES if c.op == op and not c.is_bench_only and c.flops <= 60_000_000])
    changes = {name: source.choice(values) for name, values in DRAWS[op].items() if source.random() < 0.5}
    case = replace(base, **changes, name=f"{base.name}~{source.getrandbits(32):08x}")
    width = getattr(case, "width", None)
    if width is not None:  # the result must have a column for every key
        case = replace(case, width=max(width, case.context))
    try:
        if case.flops > 100_000_000 or case.nbytes > 50_000_000:
            return None
        case.build()
    except Exception:  # sizes that this case's builder cannot combine; nothing of the library ran
        return None
    return case


def random_shapes(seconds: float, seed: int, backends: list[str]) -> tuple[Counter[str], list[str]]:
    source, done, failures = random.Random(seed), Counter[str](), []
    stop = time.monotonic() + seconds
    while time.monotonic() < stop:
        case = drawn_case(source)
        if case is None:
            continue
        torch.set_num_threads(source.choice((1, 2, 3)))
        sys.stderr.write(f"{case} {case!r}\n")
        for backend in backends:
            try:
                problem = guarded.run_guarded(case, backend)
            except Exception as error:
                problem = f"{case!r} on {backend}: {error!r}"
            failures += [problem] if problem else []
        for implementation in implementations(case.op, "native"):
            outcome = run_case(implementation, case)
            if outcome.state == "failed":
                failures.append(f"{case!r}: {'; '.join(outcome.reasons)}")
        done[case.op] += 1
        if len(failures) > 20:
            break
    return done, failures


def resident_bytes() -> int:
    with open("/proc/self/statm") as stream:
        return int(stream.read().split()[1]) * resource.getpagesize()


def memory_watch(calls: int) -> tuple[int, float]:
    """(bytes of growth after the first tenth, seconds) of that many calls of cheap operators."""
    cache = allocate(V41_FP8, 1, 4)
    x, slots = torch.randn(1, 512), torch.tensor([2])
    logits = torch.randn(1, 8)
    parts = [torch.randn(1, 1, 512) for _ in range(2)]
    lses = [torch.zeros(1, 1) for _ in range(2)]
    table, head, place = rope_table(8, 10000.0), torch.randn(1, 64), torch.tensor([3])
    cheap = (
        lambda: store_records(x, cache, slots),
        lambda: load_records(cache, slots),
        lambda: topk(logits, 3),
        lambda: merge_partials(parts, lses),
        lambda: rope(head, place, table),
    )
    began = time.monotonic()
    start = 0
    for number in range(calls):
        if number == calls // 10:
            start = resident_bytes()
        cheap[number % len(cheap)]()
    return resident_bytes() - start, time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=None)
    args = parser.parse_args()
    faulthandler.enable()
    seed = random.SystemRandom().getrandbits(32) if args.seed is None else args.seed
    backends = [name for name in ("reference", "native") if not presence(name)]
    print(f"seed {seed}, backends {', '.join(backends)}", flush=True)
    done, failures = random_shapes(60 * args.minutes, seed, backends)
    print(f"{sum(done.values()):,} drawn cases between guard pages: " + ", ".join(f"{o} {n}" for o, n in done.items()))
    growth, seconds = memory_watch(args.calls)
    grown = growth > GROWTH_LIMIT
    print(
        f"{args.calls:,} cheap calls in {seconds:.0f} s ({1e6 * seconds / max(1, args.calls):.1f} us each): "
        f"resident memory grew by {growth / 1024:.0f} KiB, limit {GROWTH_LIMIT >> 10} KiB"
    )
    for failure in failures:
        print(failure)
    print(f"{len(failures) + grown} findings")
    return 1 if failures or grown else 0


if __name__ == "__main__":
    sys.exit(main())
