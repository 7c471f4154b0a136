# SPDX-License-Identifier: Apache-2.0
"""Estimated cost of the attention launches on Trainium: the table behind `sparse-mla bench --backend simulated --cost`.

Every row runs one launch through the simulator and asks its cost model. `estimated_us` is the kernel's body at the
model's nominal constants; `boundary_us`, what one kernel inside a compiled graph costs besides, stands apart. Nothing
here was measured on a device.

    family    fused: records gathered and decoded by the kernel; bf16_rows: gathered and decoded by torch first;
              dense: a chunk of one sequence over all 4,096 slots of its caches, decoded by torch once, with a mask
    variant   native: e4m3 read by the engines (caches of the 224 cap); integer: any e4m3 code; none without e4m3
    traffic   kv_traffic_bytes counts what the keys cost in HBM: each graph node reads its inputs and writes its
    outputs once
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import config
from ..caches import KVScope, PagedCache
from ..formats import BF16, HEAD_DIM, V41_FP4, V41_FP8, RecordFormat
from ..kernels import launch
from ..kernels.attention import GROUPS_AT_ONCE
from ..simulator import SimulatorParams, run
from ..simulator.launch import Run

__all__ = [
    "HEADS",
    "KEYS",
    "LNC",
    "ROWS",
    "CostPoint",
    "CostRow",
    "cost_page",
    "cost_plan",
    "estimate_row",
    "run_costs",
    "write_costs",
]

ROWS = (1, 6, 128)
HEADS = (1, 8, 64, 128)
LNC = (1, 2)
KEYS: dict[str, tuple[tuple[RecordFormat, int], ...]] = {
    "128_fp8+512_fp4": ((V41_FP8, 128), (V41_FP4, 512)),
    "640_fp8": ((V41_FP8, 640),),
    "640_bf16": ((BF16, 640),),
}
PAGE = 64
PAGES = 64
BF16_BYTES = 2 * HEAD_DIM
DENSE_ROWS = 128  # chunks of a prompt, where a dense pass may win
# correctness is the tests' business; this wants the records
PARAMS = SimulatorParams(checks=False, show_warnings=False)


class CostPoint(NamedTuple):
    """One launch to estimate."""

    family: str
    variant: str
    keys: str
    rows: int
    heads: int
    lnc: int


class CostRow(NamedTuple):
    """One line of the table; the field names are those of the JSONL."""

    op: str
    family: str
    variant: str
    keys: str
    rows: int
    heads: int
    lnc: int
    estimated_us: float
    boundary_us: float
    hbm_read_bytes: int
    hbm_written_bytes: int
    descriptors: int
    busy_us: dict[str, float]
    bound_by: str
    kv_traffic_bytes: int
    target: str

    def as_dict(self) -> dict[str, Any]:
        return self._asdict()


def cost_plan(
    rows: tuple[int, ...] = ROWS, heads: tuple[int, ...] = HEADS, lnc: tuple[int, ...] = LNC
) -> list[CostPoint]:
    """All rows of the table, the quick ones first."""
    return [
        CostPoint(family, variant, keys, n, h, cores)
        for n in rows
        for keys in KEYS
        for family, variant in _ways(keys, n)
        for h in heads
        for cores in lnc
    ]


def _ways(keys: str, rows: int) -> tuple[tuple[str, str], ...]:
    if keys == "640_bf16":
        return (("bf16_rows", "none"),)
    ways = (("fused", "native"), ("fused", "integer"), ("bf16_rows", "native"))
    return (*ways, ("dense", "native")) if rows >= DENSE_ROWS and keys == "640_fp8" else ways


def estimate_row(point: CostPoint) -> tuple[CostRow, Run]:
    """Estimate one launch; also the run, whose trace can be saved."""
    from ..ops.sparse_decode import SPARSE_DECODE

    strategy = {"fused": "fused", "dense": "dense_mask"}.get(point.family, "row_gather")
    if point.keys == "640_bf16":
        strategy = "fused"  # rows of a bfloat16 cache are gathered by the kernel itself
    implementation = next(
        i for i in SPARSE_DECODE.implementations if i.backend == "simulated" and i.strategy == strategy
    )
    arguments = _arguments(point)
    runs: list[Run] = []

    def execute(kernel: Any, cores: int, given: dict[str, Any]) -> Any:
        result = run(kernel, grid=cores, params=PARAMS, **given)
        runs.append(result)
        return result.value

    before = launch.EXECUTORS["simulated"]
    launch.EXECUTORS["simulated"] = execute
    try:
        with config.override(NEURON_LOGICAL_NC_CONFIG=point.lnc):
            call = SPARSE_DECODE.call_type.check(**arguments, one_sequence=point.family == "dense")
            implementation.run(call)  # whether its rule would choose it or not
    finally:
        launch.EXECUTORS["simulated"] = before
    (made,) = runs
    estimate = made.estimate
    slowest = max(estimate.busy_us, key=lambda busy: max(busy.values(), default=0.0))
    row = CostRow(
        "sparse_decode",
        point.family,
        point.variant,
        point.keys,
        point.rows,
        point.heads,
        point.lnc,
        round(estimate.total_us, 2),
        estimate.boundary_us,
        estimate.hbm_read_bytes,
        estimate.hbm_written_bytes,
        estimate.descriptors,
        {engine: round(us, 2) for engine, us in slowest.items()},
        estimate.bound_by,
        kv_traffic(point),
        estimate.target,
    )
    return row, made


def kv_traffic(point: CostPoint) -> int:
    """HBM bytes that carry keys through the graph of one launch. Torch decodes padded rows too, the kernel skips
    them."""
    rows = point.rows if point.family == "fused" else launch.power_of_two(point.rows)
    total = 0
    if point.family == "dense":
        (fmt, _), slots = KEYS[point.keys][0], PAGES * PAGE
        lanes = 32 if point.heads <= 32 else 64 if point.heads <= 64 else 128
        passes = -(-(-(-point.rows // point.lnc) * lanes // 128) // GROUPS_AT_ONCE) * point.lnc
        return slots * (fmt.record_bytes + BF16_BYTES + passes * BF16_BYTES)
    for fmt, topk in KEYS[point.keys]:
        keys = rows * topk
        if point.family == "fused" or fmt is BF16:
            total += keys * fmt.record_bytes  # the kernel's gather reads each record once
        else:
            gathered = 3 * fmt.record_bytes  # gather reads and writes, decode reads
            total += keys * (gathered + 2 * BF16_BYTES)  # decode writes bf16 rows, the kernel reads them
    return total


def _arguments(point: CostPoint) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    scopes = []
    for fmt, topk in KEYS[point.keys]:
        data = torch.zeros((PAGES, PAGE, 1, fmt.record_bytes), dtype=torch.uint8)
        cache = PagedCache(data, fmt, PAGE, e4m3_max=224 if point.variant == "native" else 448)
        shape = (point.rows, 1, topk)
        scopes.append(KVScope(cache, torch.randint(0, PAGES * PAGE, shape, generator=generator, dtype=torch.int32)))
    q = torch.zeros((point.rows, 1, point.heads, HEAD_DIM), dtype=torch.bfloat16)
    return {"q": q, "scopes": scopes}


def run_costs(points: list[CostPoint], on_row: Callable[[CostPoint], None] | None = None) -> Iterator[CostRow]:
    """Estimate every point."""
    for point in points:
        if on_row is not None:
            on_row(point)
        yield estimate_row(point)[0]


def write_costs(path: Path, rows: list[CostRow]) -> None:
    """One JSON object per line."""
    path.write_text("".join(json.dumps(row.as_dict()) + "\n" for row in rows))


# --- the page --------------------------------------------------------------------------------------------------------

Line = dict[str, Any]  # of the JSONL
NOT_RUN = "not run"
# what is wanted, rows, keys, limit in us: native, two cores, every head count
TARGETS = (
    ("640 FP8, 128 rows", 128, "640_fp8", 800.0),
    ("128 FP8 + 512 FP4, 128 rows", 128, "128_fp8+512_fp4", 900.0),
    ("640 FP8, 6 rows", 6, "640_fp8", 50.0),
    ("128 FP8 + 512 FP4, 6 rows", 6, "128_fp8+512_fp4", 50.0),
    ("640 FP8, 1 row", 1, "640_fp8", 27.0),
    ("128 FP8 + 512 FP4, 1 row", 1, "128_fp8+512_fp4", 27.0),
)
INTEGER_LIMIT = 1.6  # times native
TRAFFIC_LIMIT = 0.25  # of the bf16 rows' key traffic
SCORE_CONTEXTS = (8192, 32768)  # keys
SCORE_FORMATS = ("index_fp4", "index_fp8")
SCORE_LIMITS = (("lanes32", "32-bit lanes", 2.6), ("lanes16", "16-bit lanes", 3.3))  # ns per FP4 key and core


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *lines)])


def _met(worst: float, limit: float) -> str:
    return "yes" if worst <= limit else "NO"


def cost_page(lines: Sequence[Line]) -> str:
    """Markdown of the lines of a cost file: targets, attention, what bounds it, the other operators. A launch that the
    file does not hold reads "not run"."""
    found = {CostPoint(*(line[name] for name in CostPoint._fields)): line for line in lines if "decode" in line["op"]}
    ways = {(p.family, p.variant, p.keys, p.rows, p.lnc): None for p in cost_plan(lnc=(2, 1))}
    times, bounds = [], []
    for family, variant, keys, rows, lnc in sorted(ways, key=lambda way: (-way[4], way[3])):
        mine = [found.get(CostPoint(family, variant, keys, rows, h, lnc)) for h in HEADS]
        name = [keys, family, variant, str(rows), str(lnc)]
        times.append([*name, *[NOT_RUN if line is None else f"{line['estimated_us']:.1f}" for line in mine]])
        line = found.get(CostPoint(family, variant, keys, rows, 64, lnc))
        if line is None:
            bounds.append([*name, *[NOT_RUN] * 6])
            continue
        sizes = [f"{line[field] / 1e6:.2f}" for field in ("hbm_read_bytes", "hbm_written_bytes", "kv_traffic_bytes")]
        bounds.append([*name, line["bound_by"], f"{line['boundary_us']:.0f}", *sizes, f"{line['descriptors']:,}"])
    name = ["keys", "family", "variant", "rows", "lnc"]
    parts = [
        "### Targets",
        _table(("target", "limit", "worst found", "met"), _targets(found, lines)),
        "### Attention, microseconds of the kernel's body by number of heads",
        _table((*name, *[f"{h} heads" if h > 1 else "1 head" for h in HEADS]), times),
        "### What bounds it, 64 heads",
        _table((*name, "bound by", "boundary us", "HBM read MB", "written MB", "KV traffic MB", "descriptors"), bounds),
        "### Scores, nanoseconds per key and core, 32 heads",
        _table(
            (
                "format",
                "variant",
                "tokens",
                "lnc",
                "a further key",
                *[f"all of {n:,} keys" for n in SCORE_CONTEXTS],
            ),
            [
                [fmt, variant, str(tokens), str(lnc), f"{further:.2f}", *[f"{ns:.2f}" for ns in whole]]
                for (fmt, variant, tokens, lnc), (further, *whole) in _per_key(lines).items()
            ],
        ),
        "### Scores, selection, pooling",
        _table(
            ("operator", "on", "variant", "rows", "lnc", "us", "boundary us", "bound by", "HBM read MB", "descriptors"),
            [
                [
                    *[str(line[field]) for field in ("op", "keys", "variant", "rows", "lnc")],
                    f"{line['estimated_us']:.1f}",
                    f"{line['boundary_us']:.0f}",
                    line["bound_by"],
                    f"{line['hbm_read_bytes'] / 1e6:.2f}",
                    f"{line['descriptors']:,}",
                ]
                for line in lines
                if "decode" not in line["op"]
            ],
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _per_key(lines: Sequence[Line]) -> dict[tuple[str, str, int, int], tuple[float, ...]]:
    """(format, variant, tokens, lnc) -> nanoseconds per key and core: of a further key, and of whole calls."""
    us = {(line["keys"], line["variant"], line["rows"], line["lnc"]): float(line["estimated_us"]) for line in lines}
    ways = {(fmt, *way[1:]): None for way in us for fmt in SCORE_FORMATS if way[0].endswith(f"_{fmt}")}
    found: dict[tuple[str, str, int, int], tuple[float, ...]] = {}
    for fmt, variant, tokens, lnc in ways:
        each = [us.get((f"{n}_{fmt}", variant, tokens, lnc)) for n in SCORE_CONTEXTS]
        if None not in each:
            few, many = [float(value or 0.0) * 1e3 * lnc for value in each]
            further = (many - few) / (SCORE_CONTEXTS[1] - SCORE_CONTEXTS[0])
            found[fmt, variant, tokens, lnc] = (further, few / SCORE_CONTEXTS[0], many / SCORE_CONTEXTS[1])
    return found


def _targets(found: dict[CostPoint, Line], lines: Sequence[Line]) -> list[list[str]]:
    def us(variant: str, keys: str, rows: int, heads: int) -> float | None:
        line = found.get(CostPoint("fused", variant, keys, rows, heads, 2))
        return None if line is None else float(line["estimated_us"])

    made = []
    for what, rows, keys, limit in TARGETS:
        each = [us("native", keys, rows, h) for h in HEADS]
        known = [value for value in each if value is not None]
        said = [f"{max(known):.1f} us", _met(max(known), limit)] if len(known) == len(HEADS) else [NOT_RUN, NOT_RUN]
        made.append([f"{what}, native, two cores, all heads", f"{limit:.0f} us", *said])
    pairs = [(us("integer", k, n, h), us("native", k, n, h)) for k in list(KEYS)[:2] for n in ROWS for h in HEADS]
    ratios = [a / b for a, b in pairs if a is not None and b is not None]
    if ratios:
        share = "" if len(ratios) == len(pairs) else f", {len(ratios)} of {len(pairs)} run"
        worst = f"{max(ratios):.2f} x{share}"
        made.append(
            ["integer variant against native, two cores", f"{INTEGER_LIMIT} x", worst, _met(max(ratios), INTEGER_LIMIT)]
        )
    for keys in list(KEYS)[:2]:
        fused, rows = [kv_traffic(CostPoint(f, "native", keys, 128, 64, 2)) for f in ("fused", "bf16_rows")]
        made.append(
            [
                f"KV traffic, {keys}, fused against bf16 rows",
                "1/4",
                f"1/{rows / fused:.1f}",
                _met(fused / rows, TRAFFIC_LIMIT),
            ]
        )
    each_key = _per_key(lines)
    for variant, words, limit in SCORE_LIMITS:
        mine = [value for way, value in each_key.items() if way[1] == variant]
        if mine:
            further, whole = max(value[0] for value in mine), max(value[-1] for value in mine)
            what = f"FP4 scores, {words}, 32 heads, up to 4 tokens: a further key on one core"
            found_ns = f"{further:.2f} ns; {whole:.2f} of a whole call with {SCORE_CONTEXTS[-1]:,} keys"
            made.append([what, f"{limit} ns", found_ns, _met(further, limit)])
    return made


if __name__ == "__main__":  # python -m sparse_mla.testing.neuron_cost cost.jsonl
    sys.stdout.write(cost_page([json.loads(text) for text in Path(sys.argv[1]).read_text().splitlines()]))
