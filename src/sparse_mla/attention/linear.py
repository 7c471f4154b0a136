# SPDX-License-Identifier: Apache-2.0
"""The two row-wise building blocks between the operators: projection and RMSNorm.

A matrix product's bits depend on its shape: the same row, multiplied together with another number of rows, comes out
different in the last place, and behind a top-k that is another selection. Here every product has the same shape
whatever the step is: 8 rows, the last tile padded with zeros, and a fixed number of output columns, in float32. A row's
bits then depend on that row and the weight alone, so chunking, batching and verification cannot change them. Tiles
share each block of the weight while it is in the cache, which is what makes 8 rows affordable: two or three times the
rate of one product per tile over the whole weight. Where the native backend computes, its product keeps the same
promise in tiles of its own, at two to three times that rate, and without a float32 copy of the weights.
"""

from __future__ import annotations

from typing import Literal

import torch

from ..dispatch import default_backend, presence
from ..formats import E4M3FN, UE8M0, RecordFormat, decode, encode

__all__ = ["LINEAR_MODES", "TILE_ROWS", "LinearMode", "project", "quantize_activations", "rms_norm"]

LinearMode = Literal["bf16", "fp8"]
LINEAR_MODES: tuple[LinearMode, ...] = ("bf16", "fp8")
TILE_ROWS = 8
BLOCK_COLUMNS = 128  # output columns per product: their weights, 2.5 MiB of float32 for 5120 inputs, stay in the cache
CHUNK_ROWS = 2048  # rows held as float32 at once
ACTIVATION_GROUP = 32

_ACTIVATIONS: dict[int, RecordFormat] = {}


def project(
    x: torch.Tensor, weight: torch.Tensor, *, out_dtype: torch.dtype = torch.bfloat16, backend: str | None = None
) -> torch.Tensor:
    """x @ weight.T in float32, rounded once to `out_dtype`; a row's bits do not depend on the other rows.

    Args:
        x: [T, k] bfloat16, any row stride.
        weight: [n, k] bfloat16.
        out_dtype: bfloat16 or float32.
        backend: whose product: "native" in C++, the others in torch; "auto" the native one where it is present. None:
            SPARSE_MLA_BACKEND.
    Returns:
        [T, n] in out_dtype, contiguous.
    """
    chosen = default_backend() if backend is None else backend
    if chosen in ("auto", "native") and x.device.type == "cpu" and not presence("native"):
        from ..backends import native_linear  # only where the extension is

        return native_linear.project(x, weight, out_dtype)
    rows, k = x.shape
    n = weight.shape[0]
    out = torch.empty(rows, n, dtype=out_dtype, device=x.device)
    with torch.autocast(x.device.type, enabled=False):
        for start in range(0, rows, CHUNK_ROWS):
            part = x[start : start + CHUNK_ROWS]
            count = part.shape[0]
            tiles = -(-count // TILE_ROWS)
            padded = torch.zeros(tiles * TILE_ROWS, k, dtype=torch.float32, device=x.device)
            padded[:count] = part
            batch = padded.reshape(tiles, TILE_ROWS, k)
            for column in range(0, n, BLOCK_COLUMNS):
                block = weight[column : column + BLOCK_COLUMNS].to(torch.float32).t()
                product = torch.bmm(batch, block.expand(tiles, k, block.shape[1]))
                out[start : start + count, column : column + BLOCK_COLUMNS] = product.flatten(0, 1)[:count]
    return out


def quantize_activations(x: torch.Tensor, e4m3_max: int = 448) -> torch.Tensor:
    """x [T, k] bfloat16, rounded to e4m3 with one power-of-two scale per 32 elements, as bfloat16 again (which is
    exact).
    """
    k = x.shape[-1]
    if k not in _ACTIVATIONS:
        _ACTIVATIONS[k] = RecordFormat(f"ACTIVATIONS_{k}", E4M3FN, k, ACTIVATION_GROUP, UE8M0)
    return decode(encode(x, _ACTIVATIONS[k], e4m3_max=e4m3_max, op="quantize_activations"), _ACTIVATIONS[k])


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight over the last dimension, in float32, rounded once to bfloat16.

    The mean is a product of the squares with a column of ones, in the same fixed tiles as `project`, for the same
    reason.
    """
    values = x.to(torch.float32)
    rows, k = values.shape
    tiles = -(-rows // TILE_ROWS)
    squares = torch.zeros(tiles * TILE_ROWS, k, dtype=torch.float32, device=x.device)
    squares[:rows] = values * values
    with torch.autocast(x.device.type, enabled=False):
        ones = torch.ones(k, TILE_ROWS, dtype=torch.float32, device=x.device)
        total = torch.bmm(squares.reshape(tiles, TILE_ROWS, k), ones.expand(tiles, k, TILE_ROWS))
    mean = total.flatten(0, 1)[:rows, :1] / k
    return (values * torch.rsqrt(mean + eps) * weight).to(torch.bfloat16)
