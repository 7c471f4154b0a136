# SPDX-License-Identifier: Apache-2.0
"""Launches of `topk`: the host side around the kernel of `selection.py`.

One kernel call serves all rows, whatever their number. What may not be selected is NaN when it enters; the kernel
returns, for each segment of a row, the chosen columns in ascending order, and the segments are joined here by their
counts.
"""

from __future__ import annotations

import torch

from ..dispatch import EXACT, Limits
from ..ops.sparse_decode import checks_on
from ..ops.topk import TOPK, TopkCall, check_bounds, raise_nan
from . import launch
from .selection import SEGMENTS, SPAN, P, select_columns

__all__ = ["MAX_COLUMNS", "NEGATIVE_INFINITY", "bfloat16_refusal", "select_rows"]

MAX_WIDTH = 256  # columns of a partition in one block: a segment of 16 * 256 columns is listed at once
MAX_COLUMNS = 1 << 24  # column numbers stay exact in float32
NEGATIVE_INFINITY = -32640.0  # the code of -inf
LOWEST_FINITE = NEGATIVE_INFINITY + 1.0


def bfloat16_refusal(x: torch.Tensor, columns: int) -> list[str]:
    """Why the kernel cannot select among these values."""
    found = []
    if x.dtype != torch.bfloat16:
        got = str(x.dtype).removeprefix("torch.")
        found.append(f"logits must be bfloat16, got {got}; the threshold is found over 16-bit codes")
    if columns >= MAX_COLUMNS:
        found.append(f"at most {MAX_COLUMNS - 1} columns, got {columns}")
    return found


def select_rows(values: torch.Tensor, k: int, lowest: float, block: int, backend: str) -> torch.Tensor:
    """int32 [rows, k] columns (or blocks of `block` columns) of the largest values, ascending, then -1.

    values: [rows, n] bf16, NaN where nothing may be selected."""
    rows, n = values.shape
    per_column = max(block, 1)
    columns = -(-n // per_column)
    width = min(MAX_WIDTH, launch.power_of_two(-(-columns // P)))
    blocks = -(-columns // (P * width))
    padded = launch.power_of_two(rows)
    values = launch.pad_to(values, blocks * P * width * per_column, 1, torch.nan if block == 0 else -torch.inf)
    values = launch.pad_to(values, padded, 0, torch.nan if block == 0 else -torch.inf)
    lists, counts = launch.call_kernel(
        backend,
        select_columns,
        logits=values.reshape(padded, blocks, P, width * per_column).contiguous(),
        k=k,
        width=width,
        lowest=lowest,
        block=block,
    )
    segments = blocks * SEGMENTS
    kept = lists.shape[1]
    lists = lists.reshape(padded, segments * kept)
    counts = counts.reshape(padded, segments)
    ends = counts.cumsum(dim=1, dtype=torch.int32)
    starts = ends - counts
    place = torch.arange(k, dtype=torch.int32, device=values.device).expand(padded, k)
    segment = torch.zeros_like(place)
    for s in range(segments - 1):  # the segment of a place: how many end at or before it
        segment = segment + (place >= ends[:, s : s + 1]).int()
    row = torch.arange(padded, dtype=torch.int32, device=values.device).unsqueeze(1)
    inside = (place - starts[row, segment]).clamp(0, kept - 1)
    picks = lists[row, segment * kept + inside] + segment * (SPAN * width)
    return torch.where(place < ends[:, -1:], picks, -1)[:rows]


def _rule(call: TopkCall) -> list[str]:
    return bfloat16_refusal(call.logits, call.logits.shape[1])


def _check(call: TopkCall) -> None:
    if not launch.checks_now(checks_on()):
        return
    n = call.logits.shape[1]
    check_bounds("topk", "begin", call.begin, n, "n")
    check_bounds("topk", "end", call.end, n, "n")
    if call.on_nan == "raise":
        inside = _inside(call)
        for row in (call.logits.isnan() & inside).any(dim=1).nonzero()[:, 0].tolist():
            first = 0 if call.begin is None else int(call.begin[row])
            last = n if call.end is None else int(call.end[row])
            raise_nan("topk", call.logits[row, first:last], row, first)


def _inside(call: TopkCall) -> torch.Tensor:
    """bool [rows or 1, n]: the columns between begin and end."""
    column = torch.arange(call.logits.shape[1], dtype=torch.int32, device=call.device).unsqueeze(0)
    inside = column >= 0
    if call.begin is not None:
        inside = inside & (column >= call.begin.unsqueeze(1))
    if call.end is not None:
        inside = inside & (column < call.end.unsqueeze(1))
    return inside


@TOPK.impl("neuron", "simulated", limits=Limits(out_dtypes=None), tolerance=EXACT, rule=_rule)
def _launch(call: TopkCall, backend: str) -> torch.Tensor:
    """Inside a graph, and with SPARSE_MLA_CHECKS=0, a NaN is never selected and never an error."""
    _check(call)
    rows, n = call.logits.shape
    if rows == 0 or n == 0:
        return torch.full((rows, call.k), -1, dtype=torch.int32, device=call.device)
    values = call.logits
    if call.begin is not None or call.end is not None:
        values = torch.where(_inside(call), values, torch.nan)
    lowest = LOWEST_FINITE if call.on_neg_inf == "skip" else NEGATIVE_INFINITY
    return select_rows(values, call.k, lowest, 0, backend)
