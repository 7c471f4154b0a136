# SPDX-License-Identifier: Apache-2.0
"""How cost grows: with the context, the batch, the selected keys, the heads of one rank and the threads.

    sparse-mla bench --scaling                the tables of docs/performance.md, about four minutes on two quiet cores
    sparse-mla bench --scaling --quick        the same with small sizes
    sparse-mla bench --scaling --cpu-time     processor time of one thread: for a machine that others keep busy

A sweep is a list of bench cases that differ in one number. All points of a sweep, and the eager torch forms where they
fit, take turns round by round, so ratios between points hold on a machine whose speed drifts. Memory is measured apart:
each context in a process of its own, because a process that ran a larger call before hides what a smaller one takes.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ..dispatch import presence
from ..errors import ArgumentError
from ..formats import V41_FP4, V41_FP8
from ..info import cpu_target
from .attention_cases import DecodeCase, Scope
from .bench import Entry
from .case import Case
from .contestants import CONTESTANTS
from .index_cases import IndexTopkCase
from .pages import Pages
from .rotation import rotation
from .timing import Action, Roofs, Timing, best_rate, gather_roof, interleave, measure_roofs, num_threads

__all__ = ["Point", "ScalingRow", "Sweep", "markdown", "run_sweeps", "scratch_bytes", "sweeps", "write_scaling"]

ROWS = 6  # one sequence's token and its five drafts
INDEX_HEADS = 32
SELECTED = 512
TORCH_CONTEXT = 2**18  # beyond it the scores of all heads, which the torch form keeps, are gigabytes
DECODE_FORMS = ("torch_pair", "torch_cast", "sdpa_pair")


@dataclass(frozen=True, kw_only=True)
class Point:
    """One case of a sweep; `contestants` are the torch forms that fit it."""

    x: int
    case: Case
    threads: int
    contestants: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Cases that differ in one number. Ratios are to the first point."""

    name: str
    title: str
    axis: str  # what x counts, in the plural
    points: tuple[Point, ...]
    measures_memory: bool = False


@dataclass(frozen=True, kw_only=True)
class ScalingRow:
    """One line of the result. A roof that does not apply or cannot be measured is None; so is unmeasured memory."""

    sweep: str
    x: int
    op: str
    case: str
    backend: str
    cpu_target: str
    threads: int
    median_us: float
    spread: float
    ratio: float  # time over the time of the sweep's first point, the median over rounds
    best_torch: float | None  # how many times longer the fastest eager torch form takes
    pct_peak: float | None
    pct_gemm: float | None
    pct_stream: float | None
    pct_gather: float | None
    bound_by: str  # the nearest roof
    scratch_bytes: int | None = None  # growth of the resident memory during the first call of a fresh process
    scores_bytes: int | None = None  # what the scores alone would take, were they kept


# --- the sweeps ------------------------------------------------------------------------------------------------------


def decode_case(name: str, *, rows: int = ROWS, heads: int = 64, keys: int = 512) -> DecodeCase:
    """The window of 128 FP8 records and `keys` selected FP4 records: V4.1's mixture."""
    window = Scope(pages=Pages(format=V41_FP8, page_size=134), topk=128, empty=0.0)
    selected = Scope(pages=Pages(format=V41_FP4, page_size=64), topk=keys, empty=0.0)
    return DecodeCase(name=name, b=rows, h_q=heads, scopes=(window, selected))


def topk_case(name: str, *, context: int, sequences: int = 1, rows: int = ROWS) -> IndexTopkCase:
    return IndexTopkCase(name=name, b=sequences, n=rows, heads=INDEX_HEADS, context=context, k=SELECTED, lengths="full")


def sweeps(*, quick: bool = False, threads: int | None = None) -> list[Sweep]:
    """The sweeps of the tables. `threads`: of all but the thread sweep; default torch's."""
    count = threads or torch.get_num_threads()
    heads = (64, 8, 1) if quick else (64, 32, 16, 8, 4, 2, 1)
    keys = (128, 512, 2048) if quick else (64, 128, 256, 512, 1024, 2048)
    contexts = (2**12, 2**14, 2**16) if quick else tuple(2**n for n in range(12, 21))
    batches = (1, 4, 16) if quick else (1, 2, 4, 8, 16, 32, 64)
    sequences = (1, 4) if quick else (1, 2, 4, 8, 16)
    cores = _thread_counts(os.cpu_count() or 1)
    one_context = 2**14 if quick else 2**16

    def decodes(values: tuple[int, ...], stem: str, **fixed: int) -> tuple[Point, ...]:
        return tuple(
            Point(x=v, case=decode_case(f"{stem}-{v}", **fixed | {stem: v}), threads=count, contestants=DECODE_FORMS)
            for v in values
        )

    return [
        Sweep(
            name="context",
            title=f"index_topk as the context grows: {ROWS} rows, {INDEX_HEADS} index heads, FP4 keys, k = {SELECTED}",
            axis="keys of context",
            measures_memory=True,
            points=tuple(
                Point(
                    x=n,
                    case=topk_case(f"context-{n}", context=n),
                    threads=count,
                    contestants=("torch_pair",) if n <= TORCH_CONTEXT else (),
                )
                for n in contexts
            ),
        ),
        Sweep(
            name="batch",
            title="sparse_decode as the batch grows: 64 heads, 128 FP8 + 512 FP4 keys",
            axis="rows",
            points=decodes(batches, "rows"),
        ),
        Sweep(
            name="sequences",
            title=f"index_topk as sequences are added: one row each, {one_context:,} keys of context each",
            axis="sequences",
            points=tuple(
                Point(x=n, case=topk_case(f"of-{n}", context=one_context, sequences=n, rows=1), threads=count)
                for n in sequences
            ),
        ),
        Sweep(
            name="heads",
            title=f"sparse_decode as tensor parallelism takes heads away: {ROWS} rows, 128 FP8 + 512 FP4 keys",
            axis="heads",
            points=decodes(heads, "heads"),
        ),
        Sweep(
            name="keys",
            title=f"sparse_decode as more keys are selected: {ROWS} rows, 64 heads, 128 FP8 keys + FP4 keys",
            axis="selected keys",
            points=decodes(keys, "keys"),
        ),
        Sweep(
            name="decode-threads",
            title=f"sparse_decode on more threads: {ROWS} rows, 64 heads",
            axis="threads",
            points=tuple(Point(x=n, case=decode_case(f"threads-{n}"), threads=n) for n in cores),
        ),
        Sweep(
            name="index-threads",
            title=f"index_topk on more threads: {ROWS} rows, {one_context:,} keys of context",
            axis="threads",
            points=tuple(Point(x=n, case=topk_case(f"threads-{n}", context=one_context), threads=n) for n in cores),
        ),
    ]


def _thread_counts(cores: int) -> tuple[int, ...]:
    """1, 2, 4, ... and all of them."""
    return (*(2**i for i in range(cores.bit_length()) if 2**i < cores), cores)


# --- running them ----------------------------------------------------------------------------------------------------


def run_sweeps(
    chosen: Sequence[Sweep],
    *,
    backend: str | None = None,
    rounds: int = 7,
    min_seconds: float = 0.03,
    footprint_bytes: int = 256 << 20,
    roofs: Callable[..., Roofs] = measure_roofs,
    cpu_time: bool = False,
    on_sweep: Callable[[str], None] = lambda title: None,
) -> Iterator[ScalingRow]:
    """Measure sweeps under one backend: `native` when it is present, else `reference`. `footprint_bytes` is the size
    of a decode case's caches: several last-level caches, so that records come from memory. `cpu_time` counts the
    calling thread's processor time, for the roofs as well: every point must have one thread."""
    clock = time.thread_time if cpu_time else time.perf_counter
    if cpu_time and any(point.threads != 1 for sweep in chosen for point in sweep.points):
        raise ArgumentError("bench: threads must be 1 where processor time is counted, got a sweep with more.")
    name = backend or ("reference" if presence("native") else "native")
    measured: dict[int, Roofs] = {}
    for sweep in chosen:
        on_sweep(sweep.title)
        actions: dict[tuple[int, str], Action] = {}
        for number, point in enumerate(sweep.points):
            problems = rotation(point.case, footprint_bytes)
            actions[number, "ours"] = _threaded(point, _ours(point.case, problems, name))
            for form in point.contestants:
                made = CONTESTANTS[point.case.op][form](point.case, problems)
                actions[number, form] = _threaded(point, made)
        flat = {f"{number}/{form}": action for (number, form), action in actions.items()}
        with torch.inference_mode():
            taken = interleave(flat, rounds=rounds, min_seconds=min_seconds, clock=clock)
        del actions, flat
        gathers: dict[tuple[int, int], float] = {}
        for number, point in enumerate(sweep.points):
            if point.threads not in measured:
                measured[point.threads] = roofs(point.threads, clock=clock)
            record = Entry(case=point.case).record_bytes
            if record is not None and (record, point.threads) not in gathers:
                roof = gather_roof(record, footprint_bytes)
                gathers[record, point.threads] = best_rate(roof, point.threads, clock=clock)
            gather = None if record is None else gathers[record, point.threads]
            yield _row(sweep, number, taken, name, measured[point.threads], gather)


def _ours(case: Case, problems: Sequence[object], backend: str) -> Action:
    return lambda number: Case.call(case, problems[number % len(problems)], backend)  # type: ignore[arg-type]


def _threaded(point: Point, action: Action) -> Action:
    def run(number: int) -> object:
        with num_threads(point.threads):
            return action(number)

    return run


def _row(
    sweep: Sweep, number: int, taken: dict[str, Timing], backend: str, roofs: Roofs, gather: float | None
) -> ScalingRow:
    point = sweep.points[number]
    mine, first = taken[f"{number}/ours"], taken["0/ours"]
    forms = [mine.ratio_to(taken[f"{number}/{form}"]) for form in point.contestants]
    gbs = point.case.nbytes / mine.median_us / 1e3
    gflops = point.case.flops / mine.median_us / 1e3
    peak, gemm = _share(gflops, roofs.peak_gflops), _share(gflops, roofs.gemm_gflops)
    shares = {
        "arithmetic": peak or gemm,
        "streaming": _share(gbs, roofs.read_gbs) if gather is None else None,
        "gathering": _share(gbs, gather),
    }
    known = {roof: share for roof, share in shares.items() if share is not None}
    memory = scratch_bytes(point.case, backend, point.threads) if sweep.measures_memory else None
    scores = None
    if isinstance(point.case, IndexTopkCase):
        scores = point.case.b * point.case.n * point.case.context * torch.bfloat16.itemsize
    return ScalingRow(
        sweep=sweep.name,
        x=point.x,
        op=point.case.op,
        case=point.case.name,
        backend=backend,
        cpu_target=cpu_target() if backend == "native" else "",
        threads=point.threads,
        median_us=round(mine.median_us, 2),
        spread=round(mine.spread, 4),
        ratio=round(first.ratio_to(mine), 4),
        best_torch=round(min(forms), 3) if forms else None,
        pct_peak=peak,
        pct_gemm=gemm,
        pct_stream=shares["streaming"],
        pct_gather=shares["gathering"],
        bound_by=max(known, key=lambda roof: known[roof]) if known else "",
        scratch_bytes=memory,
        scores_bytes=scores,
    )


def _share(value: float, roof: float | None) -> float | None:
    return round(100 * value / roof, 2) if roof and value else None


# --- memory ----------------------------------------------------------------------------------------------------------


def scratch_bytes(case: Case, backend: str, threads: int) -> int | None:
    """By how much resident memory grows at most during the first call in a fresh process; the result is part of it.
    None where the kernel does not tell (it needs Linux's /proc)."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        return None
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_growth, case, backend, threads).result()


def _growth(case: Case, backend: str, threads: int) -> int:
    torch.set_num_threads(threads)
    # A tiny call of another operator first: starting threads is not what a call takes.
    warm = decode_case("warm", rows=2, heads=2, keys=16)
    Case.call(warm, rotation(warm, 1 << 20)[0], backend)
    problem = rotation(case, 1 << 20)[0]
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)  # freed memory that is still resident would hide growth
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark becomes the current size
    before = _status("VmRSS")
    Case.call(case, problem, backend)
    return max(0, _status("VmHWM") - before)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status has no {field}")


# --- results ---------------------------------------------------------------------------------------------------------


def write_scaling(rows: Iterable[ScalingRow], path: Path) -> None:
    """One JSON object per line."""
    path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))


def table(sweep: Sweep, rows: Iterable[ScalingRow]) -> tuple[list[str], list[list[str]]]:
    """(column heads, lines) of one sweep, as text; columns without a value in any line are left out."""
    mine = [row for row in rows if row.sweep == sweep.name]
    first = f"{mine[0].x:,}" if mine else ""
    per = "speed-up" if sweep.axis == "threads" else f"us per {_singular(sweep.axis)}"
    columns: list[tuple[str, Callable[[ScalingRow], str]]] = [
        (sweep.axis, lambda r: f"{r.x:,}"),
        ("median us", lambda r: significant(r.median_us)),
        ("+- %", lambda r: f"{100 * r.spread:.0f}"),
        (f"time, {first} = 1", lambda r: significant(r.ratio)),
        (per, lambda r: significant(1 / r.ratio if sweep.axis == "threads" else r.median_us / r.x)),
        ("best torch", lambda r: "" if r.best_torch is None else f"{r.best_torch:.2f}x"),
        ("% of peak", lambda r: _percent(r.pct_peak)),
        ("% of gemm", lambda r: _percent(r.pct_gemm)),
        ("% of stream", lambda r: _percent(r.pct_stream)),
        ("% of gather", lambda r: _percent(r.pct_gather)),
        ("scratch MiB", lambda r: _mebibytes(r.scratch_bytes)),
        ("scores MiB", lambda r: _mebibytes(r.scores_bytes) if sweep.measures_memory else ""),
    ]
    shown = [(head, cell) for head, cell in columns if any(cell(row) for row in mine)]
    return [head for head, _ in shown], [[cell(row) for _, cell in shown] for row in mine]


def markdown(chosen: Iterable[Sweep], rows: Sequence[ScalingRow]) -> str:
    """The tables as they stand in the documentation."""
    parts = []
    for sweep in chosen:
        heads, lines = table(sweep, rows)
        parts.append(f"### {sweep.title}\n")
        parts.append("| " + " | ".join(heads) + " |\n|" + "---:|" * len(heads))
        parts[-1] += "".join("\n| " + " | ".join(line) + " |" for line in lines) + "\n"
    return "\n".join(parts)


def significant(value: float) -> str:
    """Three digits, with thousands separated."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _singular(axis: str) -> str:
    return {"keys of context": "key", "rows": "row", "heads": "head", "sequences": "sequence"}.get(axis, "key")


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0f}"


def _mebibytes(count: int | None) -> str:
    return "" if count is None else f"{count / 2**20:.1f}"
