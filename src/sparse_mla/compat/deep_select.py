# SPDX-License-Identifier: Apache-2.0
"""DeepSelect's `topk` over this library's: upstream leaves the choice among equal values open, here the lower index
wins.

Accepts more than the original: any k, any row stride, `begin`, and `sorted` together with `sorted_index` is still
refused. Every column inside [begin, end) is a legal pick, -inf included, as upstream has it.
"""

from __future__ import annotations

import torch

from ..errors import ArgumentError, ShapeError, SparseMlaError
from ..ops.topk import selected_values
from ..ops.topk import topk as _topk
from . import renamed

__all__ = ["topk"]

_NAMES = {"logits": "input", "k must": "topk must", "on_nan='last'": "abort_when_nan_found=False"}


def topk(
    input: torch.Tensor,
    topk: int,
    sorted: bool = False,
    begin: torch.Tensor | None = None,
    end: torch.Tensor | None = None,
    indices_type: torch.dtype = torch.int64,
    sorted_index: bool = False,
    hint: None = None,
    output_idx: torch.Tensor | None = None,
    output_idx_offset: torch.Tensor | int | None = None,
    idx_oob_fill_value: int = 2147483647,
    value_oob_fill_value: float = float("-inf"),
    return_value: bool = True,
    abort_when_nan_found: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """(values or None, indices), both [rows, topk]: the best columns of each row of `input`.

    Order of the picks: ascending by index, or descending by value with `sorted`. Places that no column fills hold
    idx_oob_fill_value and value_oob_fill_value; output_idx_offset (one number, or one per row) is added to valid
    indices only. NaN is an error, or is never picked with abort_when_nan_found=False. `output_idx` receives the
    indices when given.
    """
    if sorted and sorted_index:
        raise ArgumentError("topk: sorted and sorted_index must not both be True, got both; they name two orders.")
    if hint is not None:
        raise ArgumentError(f"topk: hint must be None, got {type(hint).__name__}; hints are not supported.")
    if indices_type not in (torch.int32, torch.int64):
        raise ArgumentError(f"topk: indices_type must be int32 or int64, got {indices_type}.")
    try:
        picks = _topk(
            input, topk, end, begin=begin, on_nan="raise" if abort_when_nan_found else "last", on_neg_inf="last"
        )
    except SparseMlaError as error:
        raise renamed(error, _NAMES) from None
    values = selected_values(input, picks, value_oob_fill_value)
    if sorted:
        # Empty places sort last whatever their fill value is.
        key = selected_values(input, picks, float("-inf")).sub(0).masked_fill(picks < 0, float("-inf"))
        order = torch.sort(key, dim=1, descending=True, stable=True).indices
        picks, values = picks.gather(1, order), values.gather(1, order)
    indices = picks.to(indices_type)
    if output_idx_offset is not None:
        offset = output_idx_offset
        indices = indices + (offset[:, None] if isinstance(offset, torch.Tensor) and offset.dim() == 1 else offset)
    indices = torch.where(picks >= 0, indices, torch.full_like(indices, idx_oob_fill_value))
    if output_idx is not None:
        if output_idx.shape != indices.shape:
            raise ShapeError(f"topk: output_idx must be {list(indices.shape)}, got {list(output_idx.shape)}.")
        indices = output_idx.copy_(indices)
    return (values if return_value else None), indices
