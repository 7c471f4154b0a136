# SPDX-License-Identifier: Apache-2.0
"""Launch of `index_topk`: the scores of `index_logits` and the selection of `topk`, blocks of query rows at a time.

Both steps are the launches of those operators on the same shapes, so the answer is theirs, bit for bit. The logits of a
block of rows are materialised: scratch grows with the length of a row, and no more than that many rows at once are
scored as fit the limit.
"""

from __future__ import annotations

from typing import Any

import torch

from ..dispatch import EXACT, Limits
from ..ops.index_logits import INDEX_LOGITS, IndexInputs, IndexLogitsCall
from ..ops.index_topk import INDEX_TOPK, WORKSPACE, IndexTopkCall
from ..ops.topk import TOPK, TopkCall
from . import candidate_blocks as _candidate_blocks  # noqa: F401  its launch must be registered with this one
from . import index_logits as _index_logits  # noqa: F401
from . import launch
from . import topk as _topk  # noqa: F401

COLUMN_BYTES = 24  # of float32 scores, masks and bfloat16 logits per column of a row, before and after padding


def _columns(inputs: IndexInputs) -> int:
    """Columns of the logits: as many as there is room for keys, or the width."""
    if inputs.candidates is not None:
        return inputs.candidates.blocks.shape[1] * inputs.candidates.block_size
    if inputs.cache is not None and inputs.block_table is not None:
        room = inputs.block_table.shape[1] * inputs.cache.page_size
    else:
        room = inputs.keys.shape[0]
    return room if inputs.width is None else min(room, inputs.width)


def _scores_call(call: IndexTopkCall) -> IndexLogitsCall:
    inputs = call.inputs
    if inputs.candidates is None:
        inputs = inputs._replace(width=_columns(inputs))
    return IndexLogitsCall(inputs, call.logits_dtype, call.memory_limit, call.checks)


def _topk_call(call: IndexTopkCall, logits: torch.Tensor) -> TopkCall:
    return TopkCall(logits, call.k, None, None, call.on_nan, "skip")


def _rule_of(backend: str) -> Any:
    def rule(call: IndexTopkCall) -> list[str]:
        if call.logits_dtype != torch.bfloat16:
            got = str(call.logits_dtype).removeprefix("torch.")
            return [f"logits_dtype must be bfloat16, got {got}; the threshold is found over 16-bit codes"]
        scores = _scores_call(call)
        refused = [i.refusals(scores) for i in INDEX_LOGITS.implementations if i.backend == backend]
        return [] if [] in refused else [sentence for reasons in refused for sentence in reasons]

    return rule


def _row_blocks(call: IndexTopkCall) -> int:
    """Groups of rows (those that share a table row) scored at once."""
    inputs = call.inputs
    per_table = max(1, inputs.rows_per_table) if inputs.cache is not None else 1
    row = max(1, _columns(inputs)) * COLUMN_BYTES * per_table
    return max(1, call.memory_limit // row)


def _part(inputs: IndexInputs, first: int, stop: int) -> IndexInputs:
    """Query rows of table rows first .. stop - 1."""
    per_table = max(1, inputs.rows_per_table) if inputs.cache is not None else 1
    rows = slice(first * per_table, stop * per_table)
    candidates = inputs.candidates
    if candidates is not None:
        candidates = candidates._replace(blocks=candidates.blocks[rows])
    return inputs._replace(
        q=inputs.q[rows],
        q_sf=None if inputs.q_sf is None else inputs.q_sf[rows],
        weights=inputs.weights[rows],
        block_table=None if inputs.block_table is None else inputs.block_table[first:stop],
        starts=None if inputs.starts is None else inputs.starts[rows],
        ends=inputs.ends[rows],
        candidates=candidates,
    )


def _run(call: IndexTopkCall, backend: str) -> torch.Tensor:
    inputs = call.inputs
    if call.num_rows == 0 or _columns(inputs) == 0:
        return torch.full((call.num_rows, call.k), -1, dtype=torch.int32, device=call.device)
    per_table = max(1, inputs.rows_per_table) if inputs.cache is not None else 1
    tables = call.num_rows // per_table
    step = _row_blocks(call)
    parts = []
    for first in range(0, tables, step):
        scores = _scores_call(call._replace(inputs=_part(inputs, first, min(tables, first + step))))
        logits = INDEX_LOGITS.run(scores, backend)
        parts.append(_entries(scores.inputs, TOPK.run(_topk_call(call, logits), backend)))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _entries(inputs: IndexInputs, picks: torch.Tensor) -> torch.Tensor:
    """Compact columns back to the row's own keys."""
    if inputs.candidates is None:
        return picks
    blocks, size, origin = inputs.candidates
    row = torch.arange(picks.shape[0], dtype=torch.int32, device=picks.device).unsqueeze(1)
    column = picks.clamp(min=0)
    block = torch.div(column, size, rounding_mode="floor")
    entry = blocks[row, block] * size + column - block * size
    if origin == "keys" and inputs.starts is not None:
        entry = entry - inputs.starts.unsqueeze(1)
    return torch.where(picks >= 0, entry, -1)


def _workspace(call: IndexTopkCall) -> int:
    inputs = call.inputs
    per_table = max(1, inputs.rows_per_table) if inputs.cache is not None else 1
    rows = min(call.num_rows, _row_blocks(call) * per_table)
    return launch.power_of_two(rows) * _columns(inputs) * COLUMN_BYTES


for _backend in ("neuron", "simulated"):

    def _launch(call: IndexTopkCall, backend: str = _backend) -> torch.Tensor:
        return _run(call, backend)

    INDEX_TOPK.impl(_backend, limits=Limits(), tolerance=EXACT, rule=_rule_of(_backend))(_launch)
    WORKSPACE[_backend] = _workspace
