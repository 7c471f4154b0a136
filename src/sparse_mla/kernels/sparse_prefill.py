# SPDX-License-Identifier: Apache-2.0
"""Launch of sparse prefill attention: the bfloat16-row kernel over the gathered buffer itself.

The keys are rows of one table already, so the kernel gathers them by index on the device; indices outside the table are
padding, which the gather skips. Statistics come from the same launch.
"""

from __future__ import annotations

from typing import Any

import torch

from ..dispatch import WITHIN_2X_BF16, Limits
from ..ops.sparse_prefill import SPARSE_PREFILL, SparsePrefillCall, check_lengths
from . import launch
from .attention import gathered_attn_idx
from .launch import CHUNK, EMPTY_UNIT
from .sparse_decode import MAX_HEADS, MAX_LAUNCH_ROWS, attention_operands, finish_attention, softmax_of

__all__: list[str] = []


def _empty(call: SparsePrefillCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Results of a call without rows or without keys."""
    out = call.q.new_zeros(call.q.shape, dtype=call.out_dtype)
    stat = call.q.new_zeros(call.q.shape[:2], dtype=torch.float32)
    return out, stat - torch.inf, stat + torch.inf


@SPARSE_PREFILL.impl(
    "neuron",
    "simulated",
    strategy="row_table",
    limits=Limits(max_heads=MAX_HEADS),
    tolerance=WITHIN_2X_BF16,
)
def _launch(call: SparsePrefillCall, backend: str) -> Any:
    if launch.checks_now(call.checks):
        check_lengths("sparse_prefill", call.topk_length)
    rows, heads, _ = call.q.shape
    keys, topk = call.kv.shape[0], call.topk
    if rows == 0 or keys == 0:
        return _empty(call)
    softmax = softmax_of(call.softmax_scale, call.attn_sink, call.q, heads)
    listed = call.indices.reshape(rows, topk)
    valid = (listed >= 0) & (listed < keys)
    if call.topk_length is not None:
        column = torch.arange(topk, dtype=torch.int32, device=listed.device)
        valid = valid & (column < call.topk_length.unsqueeze(1))
    width = -(-topk // CHUNK) * CHUNK
    idx = launch.pad_to(torch.where(valid, listed, EMPTY_UNIT), width, 1, EMPTY_UNIT)
    valid = launch.pad_to(valid, width, 1, False)
    table = launch.pad_to(call.kv.squeeze(1), max(2, keys), 0, 0.0).contiguous()
    results = []
    for start, count, padded in launch.blocks_of_rows(rows, MAX_LAUNCH_ROWS):
        part = slice(start, start + count)
        q, bias = attention_operands(call.q[part], softmax, valid[part], padded)
        out, lse, top = launch.call_kernel(
            backend,
            gathered_attn_idx,
            q=q,
            kv_table=table,
            idx=launch.columns(launch.pad_to(idx[part], padded, 0, EMPTY_UNIT)),
            bias=bias,
            sink=softmax.sink,
            with_lse=True,
            with_max=True,
            exact_bias=False,
            is_columns=True,
            out_fp32=call.out_dtype == torch.float32,
            active=count,
        )
        results.append(finish_attention(out, (lse, top), valid[part], call.attn_sink, heads))
    out, lse, top = [torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*results, strict=True)]
    return out, top, lse
