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
from collections.abc import Callable, Iterator
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
