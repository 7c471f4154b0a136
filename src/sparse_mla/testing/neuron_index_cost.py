# SPDX-License-Identifier: Apache-2.0
"""Estimated cost of index scores, selection and pooling on Trainium, in the rows of the attention table.

Each row runs one launch through the simulator and asks its cost model; nothing was measured on a device. `keys` says
what the launch works on.

    variant  of scores: lanes16 and lanes32, bits of e2m1 codes per bit operation; native, e4m3 read by the engines
             (caches of the 224 cap); integer, any e4m3 code. none elsewhere
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from .. import config
from ..caches import PagedCache
from ..dispatch import presence
from ..formats import HEAD_DIM, INDEX_DIM, INDEX_FP4, INDEX_FP8, RecordFormat, encode_query
from ..kernels import launch
from ..ops.index_logits import PagedKeys, index_logits
from ..ops.softmax_pool import softmax_pool
from ..ops.topk import topk
from ..simulator import run
from ..simulator.launch import Run
from .neuron_cost import PARAMS, SCORE_CONTEXTS, CostRow

__all__ = ["IndexPoint", "estimate_point", "index_cost_plan", "run_index_costs"]

PAGE = 64
INDEX_HEADS = 32
VARIANTS = (
    (INDEX_FP4.name, "lanes32"),
    (INDEX_FP4.name, "lanes16"),
    (INDEX_FP8.name, "native"),
    (INDEX_FP8.name, "integer"),
)


class IndexPoint(NamedTuple):
    """One launch to estimate."""

    op: str
    rows: int
    size: int  # keys of a context, columns of a row, or rows of a group
    lnc: int
    format: str = ""
    variant: str = "none"

    @property
    def keys(self) -> str:
        unit = {"index_logits": f"_{self.format.lower()}", "topk": "_columns", "softmax_pool": "_rows_a_group"}[self.op]
        return f"{self.size}{unit}"


def index_cost_plan() -> list[IndexPoint]:
    """The rows of the table."""
    scores = [
        IndexPoint("index_logits", rows, keys, lnc, fmt, variant)
        for fmt, variant in VARIANTS
        for rows in (1, 4)
        for keys in SCORE_CONTEXTS
        for lnc in (1, 2)
    ]
    columns = ((1, 32768), (6, 32768), (128, 32768), (1, 524288))  # rows, columns
    selection = [IndexPoint("topk", rows, n, lnc) for rows, n in columns for lnc in (1, 2)]
    pooling = [IndexPoint("softmax_pool", rows, ratio, 2) for rows in (6, 128, 1024) for ratio in (2, 8)]
    return [*scores, *selection, *pooling]


def _call(point: IndexPoint) -> Callable[[], Any]:
    generator = torch.Generator().manual_seed(0)
    if point.op == "index_logits":
        fmt: RecordFormat = INDEX_FP4 if point.format == INDEX_FP4.name else INDEX_FP8
        pages = point.size // PAGE
        data = torch.zeros((pages, PAGE * fmt.record_bytes), dtype=torch.uint8)
        cache = PagedCache(data, fmt, PAGE, e4m3_max=224 if point.variant == "native" else 448)
        table = torch.arange(pages, dtype=torch.int32).unsqueeze(0)
        lens = torch.full((1, point.rows), point.size, dtype=torch.int32)
        q = encode_query(torch.zeros((1, point.rows, INDEX_HEADS, INDEX_DIM), dtype=torch.bfloat16), fmt)
        weights = torch.ones((point.rows, INDEX_HEADS))
        return lambda: index_logits(q, PagedKeys(cache, table, lens), weights, backend="simulated")
    if point.op == "topk":
        logits = torch.randn((point.rows, point.size), generator=generator).bfloat16()
        return lambda: topk(logits, 512, backend="simulated")
    rows = torch.zeros((point.rows, point.size, HEAD_DIM))
    return lambda: softmax_pool(rows, rows, backend="simulated")


def estimate_point(point: IndexPoint) -> CostRow:
    """Estimate one launch."""
    presence("simulated")  # loads the backend
    runs: list[Run] = []

    def execute(kernel: Any, cores: int, given: dict[str, Any]) -> Any:
        result = run(kernel, grid=cores, params=PARAMS, **given)
        runs.append(result)
        return result.value

    call = _call(point)
    before = launch.EXECUTORS["simulated"]
    launch.EXECUTORS["simulated"] = execute
    try:
        lanes = 32 if point.variant == "lanes32" else 16
        with config.override(NEURON_LOGICAL_NC_CONFIG=point.lnc, SPARSE_MLA_NEURON_LANES=lanes):
            call()
    finally:
        launch.EXECUTORS["simulated"] = before
    estimates = [made.estimate for made in runs]
    busy: dict[str, float] = {}
    for each in estimates:
        slowest = max(each.busy_us, key=lambda core: max(core.values(), default=0.0))
        for engine, us in slowest.items():
            busy[engine] = round(busy.get(engine, 0.0) + us, 2)
    return CostRow(
        point.op,
        "fused" if point.op == "index_logits" else "kernel",
        point.variant,
        point.keys,
        point.rows,
        INDEX_HEADS if point.op == "index_logits" else 0,
        point.lnc,
        round(sum(e.total_us for e in estimates), 2),
        sum(e.boundary_us for e in estimates),
        sum(e.hbm_read_bytes for e in estimates),
        sum(e.hbm_written_bytes for e in estimates),
        sum(e.descriptors for e in estimates),
        busy,
        estimates[0].bound_by,
        0,
        estimates[0].target,
    )


def run_index_costs(points: list[IndexPoint], on_row: Callable[[IndexPoint], None] | None = None) -> Iterator[CostRow]:
    """Estimate every point."""
    for point in points:
        if on_row is not None:
            on_row(point)
        yield estimate_point(point)
