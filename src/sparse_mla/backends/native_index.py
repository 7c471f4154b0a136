# SPDX-License-Identifier: Apache-2.0
"""The indexer on the native backend: scores, selection, and both in one pass.

What needs the values (lengths, table entries, candidate lists, NaN) the core checks and only says *whether*; the
reference's own check then finds out which, and words the error.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import _native  # type: ignore[attr-defined]
from ..dispatch import EXACT, Limits, Tolerance, opaque
from ..errors import NonFiniteError, SparseMlaError
from ..ops.candidate_blocks import CANDIDATE_BLOCKS, CandidateBlocksCall
from ..ops.candidate_blocks import SCHEMA as BLOCKS_SCHEMA
from ..ops.candidate_blocks import _fake as fake_blocks
from ..ops.index_logits import (
    INDEX_LOGITS,
    NUM_INPUTS,
    IndexInputs,
    IndexLogitsCall,
    check_values,
    empty_logits,
    logits_columns,
)
from ..ops.index_logits import SCHEMA as LOGITS_SCHEMA
from ..ops.index_logits import _fake as fake_logits
from ..ops.index_topk import INDEX_TOPK, WORKSPACE, IndexTopkCall
from ..ops.index_topk import SCHEMA as INDEX_TOPK_SCHEMA
from ..ops.index_topk import _fake as fake_index_topk
from ..ops.topk import SCHEMA as TOPK_SCHEMA
from ..ops.topk import TOPK, TopkCall, check_bounds, raise_nan
from ..ops.topk import _fake as fake_topk
from .native import KINDS, _address, _flat, _page_layout, _plan, _rows

__all__ = ["SCORES"]

NO_BOUND = 1 << 31  # keys of a row that no width bounds

SCORES = Tolerance(
    "within_2x_bf16",
    2.0,
    "float32 sums in the target's order over exactly decoded operands; FP4 products are exact where scales allow",
)


def _inputs(inputs: IndexInputs, score_float: bool, keep: list[torch.Tensor]) -> tuple[int, ...]:
    """The fields of the core's IndexParams, in order. Tensors made here go into `keep`: they must outlive the call."""

    def held(tensor: torch.Tensor) -> torch.Tensor:
        keep.append(tensor)
        return tensor

    q = held(_rows(inputs.q))
    if inputs.q_sf is None:
        sf_fields = (0, 0, 0)
    else:
        q_sf = inputs.q_sf if inputs.q_sf.dim() == 2 else _rows(inputs.q_sf)
        size = held(q_sf).element_size()
        sf_fields = (q_sf.data_ptr(), q_sf.stride(0) * size, q_sf.stride(1) * size)
    if inputs.cache is not None and inputs.block_table is not None:
        cache, table = inputs.cache, held(_rows(inputs.block_table))
        offset, layout = _page_layout(tuple(cache.data.shape), cache.data.stride(), cache.data.dtype, cache.geometry)
        kind, page_size, block_stride, data_step, scale_base, scale_step, num_slots = layout
        data = cache.data.data_ptr() + offset
        keys = (
            kind,
            data,
            data + scale_base,
            num_slots // page_size,
            page_size,
            block_stride,
            block_stride,
            data_step,
            scale_step,
        )
        table_fields = (table.data_ptr(), table.stride(0), table.shape[1], max(inputs.rows_per_table, 1))
    else:
        if inputs.keys_sf is None:
            raise SparseMlaError("index_logits: ragged keys without scales reached the native core; this is a bug.")
        data_rows, sf = held(_rows(inputs.keys)), inputs.keys_sf
        sf = held(sf if sf.dim() == 1 else _rows(sf))
        keys = (
            KINDS[inputs.format.name],
            data_rows.data_ptr(),
            sf.data_ptr(),
            1,
            data_rows.shape[0],
            0,
            0,
            data_rows.stride(0),
            sf.stride(0) * sf.element_size(),
        )
        table_fields = (0, 0, 0, 1)
    weights = inputs.weights
    ends, starts = held(inputs.ends.contiguous()), _flat(inputs.starts)
    if starts is not None:
        held(starts)
    candidates = inputs.candidates
    block_fields = (0, 0, 0, 1, 1)
    if candidates is not None:
        blocks = held(_rows(candidates.blocks))
        from_row = candidates.origin == "row"
        block_fields = (blocks.data_ptr(), blocks.stride(0), blocks.shape[1], candidates.block_size, int(from_row))
    return (
        *keys,
        q.data_ptr(),
        q.stride(0),
        q.stride(1),
        *sf_fields,
        weights.data_ptr(),
        int(weights.dtype == torch.float32),
        weights.stride(0),
        weights.stride(1),
        inputs.num_rows,
        inputs.num_heads,
        *table_fields,
        _address(starts),
        ends.data_ptr(),
        *block_fields,
        NO_BOUND if inputs.width is None else inputs.width,
        int(score_float),
    )


def _refused(op: str, inputs: IndexInputs) -> None:
    check_values(op, inputs)
    raise SparseMlaError(f"{op}: the native core refused inputs that the reference accepts; this is a bug.")


def _index_logits(*args: Any) -> torch.Tensor:
    inputs = IndexInputs.from_flat(*args[:NUM_INPUTS])
    out_dtype, _memory_limit, checks = args[NUM_INPUTS:]
    columns = logits_columns(inputs.candidates, inputs.width)
    out = empty_logits(inputs.q, inputs.num_rows, columns, out_dtype)
    keep: list[torch.Tensor] = []
    fields = _inputs(inputs, out_dtype == torch.float32, keep)
    target, threads = _plan()
    if not _native.index_logits(target, threads, checks, fields, out.data_ptr(), columns, out.stride(0)):
        _refused("index_logits", inputs)
    return out


def _index_topk(*args: Any) -> torch.Tensor:
    inputs = IndexInputs.from_flat(*args[:NUM_INPUTS])
    k, logits_dtype, raise_on_nan, _memory_limit, checks = args[NUM_INPUTS:]
    out = torch.empty((inputs.num_rows, k), dtype=torch.int32)
    keep: list[torch.Tensor] = []
    fields = _inputs(inputs, logits_dtype == torch.float32, keep)
    target, threads = _plan()
    found = _native.index_topk(target, threads, checks, fields, k, out.data_ptr(), raise_on_nan)
    if found is None:
        _refused("index_topk", inputs)
    elif raise_on_nan and found[0] >= 0:
        raise NonFiniteError(
            f"index_topk: scores must not be NaN, got NaN at row {found[0]}, column {found[1]}; "
            "on_nan='last' never selects it."
        )
    return out


def _topk(
    logits: torch.Tensor,
    k: int,
    begin: torch.Tensor | None,
    end: torch.Tensor | None,
    raise_on_nan: bool,
    skip_neg_inf: bool,
) -> torch.Tensor:
    rows, n = logits.shape
    logits, begin, end = _rows(logits), _flat(begin), _flat(end)
    out = torch.empty((rows, k), dtype=torch.int32)
    target, threads = _plan()
    nan_row = _native.topk(
        target,
        threads,
        logits.data_ptr(),
        logits.dtype == torch.float32,
        rows,
        n,
        logits.stride(0),
        k,
        _address(begin),
        _address(end),
        skip_neg_inf,
        out.data_ptr(),
    )
    if nan_row == -2:
        check_bounds("topk", "begin", begin, n, "n")
        check_bounds("topk", "end", end, n, "n")
        raise SparseMlaError("topk: the native core refused bounds that the reference accepts; this is a bug.")
    if nan_row >= 0 and raise_on_nan:
        first = 0 if begin is None else int(begin[nan_row])
        last = n if end is None else int(end[nan_row])
        raise_nan("topk", logits[nan_row, first:last], nan_row, first)
    return out


def _candidate_blocks(
    logits: torch.Tensor, lengths: torch.Tensor, block_size: int, k: int, raise_on_nan: bool
) -> torch.Tensor:
    rows, n = logits.shape
    logits, lengths = _rows(logits), lengths.contiguous()
    out = torch.empty((rows, k), dtype=torch.int32)
    target, threads = _plan()
    nan_row = _native.candidate_blocks(
        target,
        threads,
        logits.data_ptr(),
        logits.dtype == torch.float32,
        rows,
        n,
        logits.stride(0),
        lengths.data_ptr(),
        block_size,
        k,
        out.data_ptr(),
    )
    if nan_row == -2:
        check_bounds("candidate_blocks", "lengths", lengths, n, "n")
        raise SparseMlaError("candidate_blocks: the native core refused lengths the reference accepts; this is a bug.")
    if nan_row >= 0 and raise_on_nan:
        raise_nan("candidate_blocks", logits[nan_row, : int(lengths[nan_row])], nan_row, 0)
    return out


def _no_float64(call: TopkCall | CandidateBlocksCall) -> list[str]:
    return ["logits must be bfloat16 or float32, got float64"] if call.logits.dtype == torch.float64 else []


def _workspace(call: IndexTopkCall) -> int:
    target, threads = _plan()
    return int(_native.index_topk_scratch_bytes(target, call.num_rows, call.num_heads, call.k, threads))


def _register() -> None:
    logits = opaque("index_logits", "native", LOGITS_SCHEMA, _index_logits, fake_logits)
    fused = opaque("index_topk", "native", INDEX_TOPK_SCHEMA, _index_topk, fake_index_topk)
    select = opaque("topk", "native", TOPK_SCHEMA, _topk, fake_topk)
    blocks = opaque("candidate_blocks", "native", BLOCKS_SCHEMA, _candidate_blocks, fake_blocks)
    WORKSPACE["native"] = _workspace

    @INDEX_LOGITS.impl("native", limits=Limits(), tolerance=SCORES)
    def run_logits(call: IndexLogitsCall) -> Any:
        return logits(*call.flat())

    @INDEX_TOPK.impl("native", limits=Limits(), tolerance=SCORES)
    def run_fused(call: IndexTopkCall) -> Any:
        return fused(*call.flat())

    @TOPK.impl("native", limits=Limits(), tolerance=EXACT, rule=_no_float64)
    def run_select(call: TopkCall) -> Any:
        return select(*call.flat())

    @CANDIDATE_BLOCKS.impl("native", limits=Limits(), tolerance=EXACT, rule=_no_float64)
    def run_blocks(call: CandidateBlocksCall) -> Any:
        return blocks(*call.flat())


_register()
