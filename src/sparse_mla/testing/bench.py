# SPDX-License-Identifier: Apache-2.0
"""The one bench: this library's backends and the torch forms of `contestants.py`, timed in turns beside four roofs.

Each row of the plan is a case, a footprint and a number of threads. Each result is one JSON line:

    op, case, backend, cpu_target, threads, median_us, gflops, pct_peak, pct_gemm, pct_stream, pct_gather, ratio_vs

`ratio_vs` maps a contestant to how many times longer it takes; "best_torch" is the fastest torch form. Three roofs take
turns with the contestants: `peak` (register-only loop of the native target), `stream` (read; copy for operators that
write) and `gather` (random records of that size from the same footprint). `gemm` (torch's 2048^3) is measured once a
run. A roof that cannot be measured is null.

Later work adds rows to `PLAN`, contestants to `CONTESTANTS`, and nothing else. Times on a busy machine mean little;
compare ratios.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..dispatch import OPS, Implementation
from ..errors import ArgumentError, SparseMlaError
from ..formats import INDEX_FP4, INDEX_FP8, V41_FP4, V41_FP8
from ..info import cpu_target
from .attention_cases import DecodeCase, MergeCase, PrefillCase, Scope
from .case import Case, Problem
from .check import forced, implementations, validated_call
from .contestants import CONTESTANTS, is_torch
from .index_cases import IndexLogitsCase, IndexTopkCase, TopkCase
from .pages import Pages
from .pooling_cases import PoolCase, RopeCase
from .record_cases import LoadCase, StoreCase
from .rotation import HOT_BYTES, rotation
from .timing import (
    Action,
    Roof,
    Timing,
    best_rate,
    gather_roof,
    gemm_roof,
    interleave,
    num_threads,
    peak_roof,
    stream_roof,
)

__all__ = ["PLAN", "BenchRow", "Entry", "compare_baseline", "run_plan", "select_plan", "write_jsonl"]

COLD_BYTES = 577 << 20  # several times any last-level cache: records come from memory
# Operators that write about as much as they read: their stream roof is the copy.
WRITING_OPS = {"store_records", "load_records", "rope", "merge_partials", "softmax_pool", "topk"}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One row of the plan."""

    case: Case
    footprint: str = "cold"  # hot | cold: where the records of a cache lie
    threads: tuple[int, ...] = (1, 2)
    quick: bool = False  # part of --quick
    without: tuple[str, ...] = ()  # contestants that do not fit the case
    only: tuple[str, ...] = ()  # when not empty, the only contestants
    overhead: bool = False  # also the bare torch operator, eager and compiled: what validation and dispatch cost

    @property
    def name(self) -> str:
        hot = "-hot" if self.footprint == "hot" else ""
        return f"{self.case.name}{hot}"

    @property
    def footprint_bytes(self) -> int:
        return HOT_BYTES if self.footprint == "hot" else COLD_BYTES

    @property
    def record_bytes(self) -> int | None:
        """Bytes of the records a gather is made of, where the case gathers; the mean over its keys."""
        if isinstance(self.case, DecodeCase):
            total = sum(s.topk * s.pages.format.record_bytes for s in self.case.scopes)
            return max(s.pages.format.record_bytes for s in self.case.scopes if total)
        return self.case.pages.format.record_bytes if isinstance(self.case, LoadCase | StoreCase) else None


@dataclass(kw_only=True)
class BenchRow:
    """One line of the result."""

    op: str
    case: str
    backend: str
    cpu_target: str
    threads: int
    median_us: float
    spread: float
    gflops: float
    gbs: float
    pct_peak: float | None
    pct_gemm: float | None
    pct_stream: float | None
    pct_gather: float | None
    ratio_vs: dict[str, float] = field(default_factory=dict)
    roof_gemm_gflops: float = 0.0  # to tell a slower machine from slower code
    commit: str = ""

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.op, self.case, self.backend, self.threads


# --- the plan --------------------------------------------------------------------------------------------------------

VERIFY_ROWS = (1, 6, 64)


def _decode_case(rows: int, heads: int, kind: str) -> DecodeCase:
    window = Scope(pages=Pages(format=V41_FP8, page_size=134), topk=128, empty=0.0)
    compressed = Scope(pages=Pages(format=V41_FP4, page_size=64), topk=512, empty=0.0)
    eight = Scope(pages=Pages(format=V41_FP8, page_size=134), topk=640, empty=0.0)
    scopes = (window, compressed) if kind == "128fp8+512fp4" else (eight,)
    return DecodeCase(name=f"{kind}-{rows}x{heads}h", b=rows, h_q=heads, scopes=scopes)


def _plan() -> Iterator[Entry]:
    apart = ("rows_apart",)
    for heads in (64, 128, 16, 8, 1):
        for rows in VERIFY_ROWS:
            quick = (rows, heads) in ((6, 64), (1, 8))
            yield Entry(case=_decode_case(rows, heads, "128fp8+512fp4"), quick=quick, without=apart)
            if rows == 64:
                yield Entry(
                    case=_decode_case(rows, heads, "128fp8+512fp4"), footprint="hot", threads=(1,), without=apart
                )
    yield Entry(case=_decode_case(64, 64, "640fp8"), without=apart)
    shared = Scope(pages=Pages(format=V41_FP8, page_size=134), topk=128, order="window")
    compressed = Scope(pages=Pages(format=V41_FP4, page_size=64), topk=512, empty=0.0, order="selection")
    # Neighbouring rows share 127 of 128 and 80 % of 512 keys.
    for heads in (1, 8):
        verify = DecodeCase(name=f"verify-6-of-one-{heads}h", b=1, s_q=6, h_q=heads, scopes=(shared, compressed))
        yield Entry(case=verify, only=apart)
    single = (Scope(topk=1, empty=0.0), Scope(pages=compressed.pages, topk=1))
    one = DecodeCase(name="one-call", b=1, h_q=1, scopes=single)
    yield Entry(case=one, footprint="hot", threads=(1,), quick=True, only=("-",), overhead=True)
    for fmt in (INDEX_FP4, INDEX_FP8):
        kind = fmt.name.removeprefix("INDEX_").lower()
        for rows, heads in ((128, 32), (6, 32), (1, 64), (1, 32)):
            case = IndexLogitsCase(
                name=f"{kind}-{rows}x65536-{heads}h",
                b=1,
                n=rows,
                heads=heads,
                context=65536,
                format=fmt,
                lengths="full",
            )
            yield Entry(case=case, quick=rows == 1 and heads == 32 and fmt is INDEX_FP4)
    for rows, context in ((6, 2**20), (512, 2**18)):
        topk_case = IndexTopkCase(name=f"fp4-{rows}x{context}", b=1, n=rows, context=context, k=512, lengths="full")
        yield Entry(case=topk_case, only=("scores_alone",))
    yield Entry(case=TopkCase(name="relu-64x65536-k512", rows=64, n=65536, k=512, values="relu"), quick=True)
    for fmt in (V41_FP8, V41_FP4):
        kind = fmt.name.removeprefix("V41_").lower()
        store = StoreCase(name=f"{kind}-4096", pages=Pages(format=fmt), n=4096, skipped=0.0)
        yield Entry(case=store, quick=fmt is V41_FP8)
        # Into memory kept between calls, as the stream roof has it, and into new memory, beside a copy to new memory.
        load = LoadCase(name=f"{kind}-65536", pages=Pages(format=fmt), shape=(65536,), skipped=0.0)
        yield Entry(case=load)
        yield Entry(case=replace(load, name=f"{kind}-65536-into", into=True), without=("copy_to_new",))
    prefill = PrefillCase(name="4096x640-64h", s_q=4096, s_kv=8192, topk=640, h_q=64, empty=0.0)
    yield Entry(case=prefill, without=("compiled_bmm",))
    yield Entry(case=PoolCase(name="4096-of-2", groups=4096, ratio=2))
    yield Entry(case=RopeCase(name="4096x64h", shape=(4096, 64, 512), max_pos=65536))
    yield Entry(case=MergeCase(name="4x6x64h-of-4", b=4, s_q=6, h_q=64, parts=4))


PLAN: tuple[Entry, ...] = tuple(_plan())


def select_plan(op: str | None = None, name: str | None = None, *, quick: bool = False) -> list[Entry]:
    """Rows of one operator, whose name contains `name`, and for a quick look."""
    if op is not None and op not in OPS:
        raise ArgumentError(f"bench: op must be one of {', '.join(sorted(OPS))}, got {op!r}.")
    return [e for e in PLAN if op in (None, e.case.op) and (name is None or name in e.name) and (e.quick or not quick)]


# --- running it ------------------------------------------------------------------------------------------------------


def run_plan(
    entries: Iterable[Entry],
    *,
    backend: str | None = None,
    threads: tuple[int, ...] | None = None,
    compiled: bool = True,
    rounds: int = 7,
    min_seconds: float = 0.03,
    on_row: Callable[[str], None] = lambda name: None,
    on_skip: Callable[[str], None] = lambda sentence: None,
) -> Iterator[BenchRow]:
    """Measure the rows of a plan, each handed out as soon as it is known: a full plan takes half an hour.
    `compiled=False` leaves torch.compile out, which takes seconds per case."""
    gemm: dict[int, float] = {}  # Gflop/s by threads
    commit = _commit()
    for entry in entries:
        problems = rotation(entry.case, entry.footprint_bytes)
        counts = [n for n in entry.threads if n in (threads or entry.threads)]
        for count in counts:
            on_row(f"{entry.case.op} {entry.name} {count}t")
            if count not in gemm:
                gemm[count] = best_rate(gemm_roof(), count)
            roofs = _roofs(entry, count)
            if compiled:
                torch._dynamo.reset()  # else the contestants' few functions run into the limit of variants per function
            with num_threads(count):
                actions = _actions(entry, problems, backend, compiled, on_skip)
                if not any(name.startswith("@") for name in actions):
                    continue
                turns = actions | {name: roof.action for name, roof in roofs.items()}
                timings = interleave(turns, rounds=rounds, min_seconds=min_seconds)
            yield from _rows(entry, count, timings, roofs, gemm[count], commit)


def _roofs(entry: Entry, threads: int) -> dict[str, Roof]:
    """The limits of the machine that the case could run into."""
    roofs = {"roof_stream": stream_roof(copy=entry.case.op in WRITING_OPS)}
    peak = peak_roof(threads) if entry.case.flops else None
    if peak is not None:
        roofs["roof_peak"] = peak
    if entry.record_bytes is not None:
        roofs["roof_gather"] = gather_roof(entry.record_bytes, entry.footprint_bytes)
    return roofs


def _actions(
    entry: Entry, problems: list[Problem], backend: str | None, compiled: bool, on_skip: Callable[[str], None]
) -> dict[str, Action]:
    """Name -> action; our own implementations are named "@<implementation>"."""
    case = entry.case
    actions: dict[str, Action] = {}
    for implementation in implementations(case.op, backend):
        if implementation.backend == "simulated" or (implementation.backend == "reference" and backend is None):
            continue  # the simulator measures time in its own way; the reference is slow by design
        refusals = implementation.refusals(validated_call(case, problems[0].arguments))
        if refusals:
            on_skip(f"{case.op} {entry.name}: {implementation.name} refuses: {'; '.join(refusals)}")
            continue
        actions[f"@{implementation.name}"] = _ours(case, problems, implementation)
        if entry.overhead:
            actions |= _overhead(case, problems, implementation, compiled)
    for name, make in CONTESTANTS.get(case.op, {}).items():
        if (
            name in entry.without
            or (entry.only and name not in entry.only)
            or (name.startswith("compiled") and not compiled)
        ):
            continue
        try:
            action = make(case, problems)
            action(0)
        except (SparseMlaError, RuntimeError, MemoryError) as error:
            on_skip(f"{case.op} {entry.name}: contestant {name} cannot run: {str(error).splitlines()[0]}")
            continue
        actions[name] = action
    return actions


def _ours(case: Case, problems: list[Problem], implementation: Implementation) -> Action:
    """The public call, which validates and dispatches. Strategies of one backend are forced one by one."""
    alone = len([i for i in OPS[case.op].implementations if i.backend == implementation.backend]) == 1

    def action(number: int) -> object:
        problem = problems[number % len(problems)]
        if alone:
            return Case.call(case, problem, implementation.backend)
        with forced(implementation):
            return Case.call(case, problem, implementation.backend)

    return action


def _overhead(case: Case, problems: list[Problem], implementation: Implementation, compiled: bool) -> dict[str, Action]:
    operator: Any = getattr(torch.ops.sparse_mla, f"{case.op}_{implementation.backend}").default
    flat = [validated_call(case, problem.arguments).flat() for problem in problems]
    actions: dict[str, Action] = {"operator": lambda number: operator(*flat[number % len(flat)])}
    if compiled:
        run = torch.compile(lambda *arguments: operator(*arguments), dynamic=False)
        # One list only: another would be another graph.
        actions["operator_compiled"] = lambda number: run(*flat[0])
    return actions


def _rows(
    entry: Entry, threads: int, timings: dict[str, Timing], roofs: dict[str, Roof], gemm_gflops: float, commit: str
) -> Iterator[BenchRow]:
    case = entry.case
    work = {"roof_peak": case.flops, "roof_stream": case.nbytes, "roof_gather": case.nbytes}
    for name, timing in timings.items():
        if not name.startswith("@"):
            continue
        gflops = case.flops / timing.median_us / 1e3
        shares = {r: round(timing.share_of(timings[r], work[r], roof.work), 2) for r, roof in roofs.items()}
        others = {other: t for other, t in timings.items() if other != name and other not in roofs}
        ratios = {other: round(timing.ratio_to(t), 3) for other, t in others.items()}
        torch_forms = [ratio for other, ratio in ratios.items() if is_torch(other)]
        if torch_forms:
            ratios["best_torch"] = min(torch_forms)
        yield BenchRow(
            op=case.op,
            case=entry.name,
            backend=name.removeprefix("@"),
            cpu_target=cpu_target() if name.startswith("@native") else "",
            threads=threads,
            median_us=round(timing.median_us, 3),
            spread=round(timing.spread, 4),
            gflops=round(gflops, 3),
            gbs=round(case.nbytes / timing.median_us / 1e3, 3),
            pct_peak=shares.get("roof_peak"),
            pct_gemm=round(100 * gflops / gemm_gflops, 2) if case.flops else None,
            pct_stream=shares["roof_stream"],
            pct_gather=shares.get("roof_gather"),
            ratio_vs=ratios,
            roof_gemm_gflops=round(gemm_gflops, 2),
            commit=commit,
        )


def _commit() -> str:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
            cwd=Path(__file__).parent,
        )
    except OSError:
        return ""
    return done.stdout.strip()


# --- results ---------------------------------------------------------------------------------------------------------


def json_line(row: BenchRow) -> str:
    """The row as one line of the result file."""
    return json.dumps(asdict(row)) + "\n"


def write_jsonl(rows: Iterable[BenchRow], path: Path) -> None:
    """One JSON object per line."""
    path.write_text("".join(json_line(row) for row in rows))


def read_jsonl(path: Path) -> list[BenchRow]:
    """The rows of a file that `write_jsonl` wrote; ArgumentError when it is something else."""
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if line.strip():
            try:
                rows.append(BenchRow(**json.loads(line)))
            except (ValueError, TypeError) as error:
                raise ArgumentError(f"bench: line {number} of {path.name} must be a row of a bench: {error}.") from None
    return rows


LEAST_NOISE = 0.15  # an hour's drift of a quiet machine
SPREADS = 3.0


def compare_baseline(rows: Iterable[BenchRow], baseline: Path) -> list[str]:
    """Sentences about rows that became slower than noise explains. Both times are scaled by the gemm roof of their
    own run, so
    that a slower machine is no regression. Noise is three times the spreads of both measurements, 15 % at least."""
    before = {row.key: row for row in read_jsonl(baseline)}
    known = [(row, before[row.key]) for row in rows if row.key in before]
    if not known:
        raise ArgumentError(f"bench: {baseline.name} must hold rows of the same cases, got none in common.")
    regressions = []
    for row, old in known:
        machine = row.roof_gemm_gflops / old.roof_gemm_gflops if old.roof_gemm_gflops and row.roof_gemm_gflops else 1.0
        slowdown = row.median_us / old.median_us
        scaled = min(slowdown, slowdown * machine)  # slower only if it is so by both measures
        noise = max(LEAST_NOISE, SPREADS * (row.spread + old.spread))
        if scaled > 1 + noise:
            regressions.append(
                f"{row.op} {row.case} {row.backend} {row.threads}t: {old.median_us:.1f} -> {row.median_us:.1f} us, "
                f"{scaled:.2f} times slower, noise explains {1 + noise:.2f}"
            )
    return regressions
