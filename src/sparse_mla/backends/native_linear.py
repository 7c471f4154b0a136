# SPDX-License-Identifier: Apache-2.0
"""The attention layer's projection in C++. Not an operator of its own: `attention.linear.project` calls it."""

from __future__ import annotations

import torch

from .. import _native  # type: ignore[attr-defined]
from ..memory import with_huge_pages
from .native import _plan, _rows

__all__ = ["project"]


def project(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """x [T, k] @ weight [n, k].T, both bfloat16, summed in float32 and rounded once to bfloat16 or float32."""
    x, weight = _rows(x), _rows(weight)
    (rows, k), n = x.shape, weight.shape[0]
    out = with_huge_pages(torch.empty((rows, n), dtype=out_dtype))
    target, threads = _plan()
    _native.project(
        target,
        threads,
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        weight.stride(0),
        rows,
        n,
        k,
        out.data_ptr(),
        out_dtype == torch.float32,
    )
    return out
