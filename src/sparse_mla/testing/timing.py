# SPDX-License-Identifier: Apache-2.0
"""How time is taken, and the four roofs of the machine, measured in the same run as what is compared with them.

Contestants take turns round by round, so a machine that slows down slows all of them; ratios are medians of the ratios
within a round. Absolute times drift by 15 % over an hour on a quiet machine and mean little on a busy one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import NamedTuple

import torch

from ..dispatch import backend_module, presence
from ..memory import with_huge_pages

__all__ = [
    "Roof",
    "Roofs",
    "Timing",
    "best_rate",
    "gather_roof",
    "gemm_roof",
    "interleave",
    "measure_roofs",
    "num_threads",
    "peak_roof",
    "product_dtype",
    "stream_roof",
]

Action = Callable[[int], object]  # called with a running number, to rotate inputs


LONG_SECONDS = 30.0  # of all rounds together; three rounds may take longer


class Timing(NamedTuple):
    """Microseconds per call of one contestant, one value per round."""

    rounds_us: tuple[float, ...]

    @property
    def median_us(self) -> float:
        return statistics.median(self.rounds_us)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, relative to the median: the noise of this measurement."""
        if len(self.rounds_us) < 3:
            return 0.0
        low, _, high = statistics.quantiles(self.rounds_us, n=4)
        return (high - low) / 2 / self.median_us

    def ratio_to(self, other: Timing) -> float:
        """How many times longer `other` takes: the median over rounds, each measured back to back."""
        return statistics.median(theirs / ours for ours, theirs in zip(self.rounds_us, other.rounds_us, strict=True))

    def share_of(self, roof: Timing, work: float, roof_work: float) -> float:
        """Percent of a roof's rate, `work` being done in a call of this and `roof_work` in one of the roof: the median
        over rounds, so that a machine that slows down lowers both."""
        return 100 * self.ratio_to(roof) * work / roof_work


def interleave(
    contestants: Mapping[str, Action],
    *,
    rounds: int = 7,
    min_seconds: float = 0.03,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time all contestants in turns. Each turn repeats the call until `min_seconds` have passed, at least once. Rounds
    of many seconds are fewer, three at least: such calls outlast most of what disturbs them.
    `time.thread_time` as clock leaves out what other programs take, and sees one thread only."""
    repeats, round_seconds = {}, 0.0
    for name, action in contestants.items():
        action(0)  # compiles, allocates, warms
        begin = clock()
        action(1)
        spent = max(clock() - begin, 1e-7)
        round_seconds += max(spent, min_seconds)
        repeats[name] = max(1, min(100_000, round(min_seconds / spent)))
    rounds = max(min(rounds, 3), min(rounds, round(LONG_SECONDS / max(round_seconds, 1e-7))))
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    number = 2
    for _ in range(rounds):
        for name, action in contestants.items():
            count = repeats[name]
            begin = clock()
            for i in range(number, number + count):
                action(i)
            taken[name].append((clock() - begin) / count * 1e6)
            number += count
    return {name: Timing(tuple(values)) for name, values in taken.items()}


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """torch's threads, which every backend follows, for the length of a `with` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Roof(NamedTuple):
    """A limit of the machine, as a contestant that takes turns with what is compared with it."""

    action: Action
    work: float  # floating point operations or bytes of one call


GEMM_SIZE = 2048
STREAM_BYTES = 1 << 28  # beyond any cache this library meets


@cache
def product_dtype() -> torch.dtype:
    """bfloat16 where torch multiplies matrices of it faster than float32 ones. On processors without such instructions
    it is a hundred times slower, and nobody would use it."""
    taken = {}
    for dtype in (torch.bfloat16, torch.float32):
        a = torch.randn(256, 256).to(dtype)
        torch.mm(a, a)
        begin = time.perf_counter()
        torch.mm(a, a)
        taken[dtype] = time.perf_counter() - begin
    return min(taken, key=lambda dtype: taken[dtype])


def peak_roof(threads: int) -> Roof | None:
    """The native target's widest dot or FMA in a loop over registers. None without the native extension."""
    native = None if presence("native") else backend_module("native")
    if native is None:
        return None
    loop: Callable[[int], float] = native.peak_flops
    return Roof(lambda _: loop(threads), loop(threads))


@lru_cache(maxsize=1)
def _stream() -> tuple[torch.Tensor, torch.Tensor]:
    source = with_huge_pages(torch.empty(STREAM_BYTES // 4, dtype=torch.float32)).fill_(1)
    return source, with_huge_pages(torch.empty_like(source)).fill_(0)


def stream_roof(*, copy: bool) -> Roof:
    """Memory read in order; or read and written, both counted."""
    source, target = _stream()
    if copy:
        return Roof(lambda _: target.copy_(source), 2 * STREAM_BYTES)
    return Roof(lambda _: source.sum(), STREAM_BYTES)


@lru_cache(maxsize=2)
def gather_roof(record_bytes: int, footprint_bytes: int) -> Roof:
    """Random records of that size from that much memory, written to a buffer that stays in the cache."""
    words = torch.int64 if record_bytes % 8 == 0 else torch.int32 if record_bytes % 4 == 0 else torch.uint8
    count = max(1, footprint_bytes // record_bytes)
    # Written to: memory that never was is one page of zeros, found in the cache.
    memory = with_huge_pages(torch.empty(count, record_bytes // words.itemsize, dtype=words)).fill_(1)
    chosen = [torch.randint(0, count, (4096,)) for _ in range(32)]
    buffer = torch.empty(4096, memory.shape[1], dtype=words)
    return Roof(lambda i: torch.index_select(memory, 0, chosen[i % 32], out=buffer), 4096 * record_bytes)


def gemm_roof() -> Roof:
    """torch's own matrix product, in bfloat16 (oneDNN) or in float32 where that is faster."""
    a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE).to(product_dtype()) for _ in range(2))
    return Roof(lambda _: torch.mm(a, b), 2 * GEMM_SIZE**3)


def best_rate(
    roof: Roof,
    threads: int,
    *,
    rounds: int = 5,
    min_seconds: float = 0.01,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Gflop/s or GB/s of a roof that takes no turns with anybody: the best of some rounds."""
    with num_threads(threads):
        taken = interleave({"roof": roof.action}, rounds=rounds, min_seconds=min_seconds, clock=clock)["roof"]
    return roof.work / min(taken.rounds_us) / 1e3


class Roofs(NamedTuple):
    """What this machine can do at most, at one thread count. None: not measurable here."""

    peak_gflops: float | None
    gemm_gflops: float
    read_gbs: float


def measure_roofs(threads: int, *, clock: Callable[[], float] = time.perf_counter) -> Roofs:
    """The roofs that do not depend on a case."""
    peak = peak_roof(threads)
    return Roofs(
        None if peak is None else best_rate(peak, threads, clock=clock),
        best_rate(gemm_roof(), threads, clock=clock),
        best_rate(stream_roof(copy=False), threads, clock=clock),
    )
