# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""Softmax pooling of R rows per channel: kernel and launch.

Positions lie on partitions, (R, D) on the free axis. Two rows have a form of their own: w = sigmoid(s0 - s1),
out = l1 + w (l0 - l1), four passes of Vector instead of about eleven per channel; the two agree to float32 rounding.
The launch makes scores finite first: the largest finite numbers do what infinities mean, -inf a row left out and +inf
an equal share.
"""

from __future__ import annotations

import torch

from ..dispatch import Limits, Tolerance
from ..ops.softmax_pool import POOL_DTYPES, SOFTMAX_POOL, SoftmaxPoolCall
from . import launch
from .nki import nisa, nki, nl
from .weighted_scores import P, core_share

__all__ = ["POOL_STEP", "pool_channels", "softmax_pool_kernel"]

POOL_STEP = Tolerance("one_step", 2.0, "exp and the order of sums are the engines' own; one step of bfloat16")
CHANNEL_FLOATS = 4096  # rows * channels of one instruction: 16 KiB of a partition
LARGEST = torch.finfo(torch.float32).max


def load_part(src, first, count, ratio, start, width):
    """[count positions, ratio, width] fp32 of channels start .. of src [n, ratio, d]."""
    d = src.shape[2]
    tile = nl.ndarray(shape=(P, ratio, width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(
        dst=tile[0:count, :, :],
        src=src.ap(pattern=[[ratio * d, count], [d, ratio], [1, width]], offset=first * ratio * d + start),
    )
    return tile


def pool_two(score, latent, count, width, out_dtype):
    """[count, width] of two rows."""
    shape = (P, width)
    difference = nl.ndarray(shape=shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(
        dst=difference[0:count, :],
        data1=score[0:count, 0, :],
        data2=score[0:count, 1, :],
        op=nl.subtract,
        engine=nisa.engine.vector,
    )
    weight = nl.ndarray(shape=shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=weight[0:count, :], op=nl.sigmoid, data=difference[0:count, :])
    step = nl.ndarray(shape=shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(
        dst=step[0:count, :],
        data1=latent[0:count, 0, :],
        data2=latent[0:count, 1, :],
        op=nl.subtract,
        engine=nisa.engine.vector,
    )
    share = nl.ndarray(shape=shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(
        dst=share[0:count, :],
        data1=weight[0:count, :],
        data2=step[0:count, :],
        op=nl.multiply,
        engine=nisa.engine.vector,
    )
    out = nl.ndarray(shape=shape, dtype=out_dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(
        dst=out[0:count, :],
        data1=share[0:count, :],
        data2=latent[0:count, 1, :],
        op=nl.add,
        engine=nisa.engine.vector,
    )
    return out


def pool_many(score, latent, count, ratio, width, out_dtype):
    """[count, width] of any number of rows: subtract the maximum, exponentiate, sum, divide once."""
    shape = (P, width)
    peak = nl.ndarray(shape=shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(
        dst=peak[0:count, :].expand_dim(2),
        op=nl.maximum,
        data=score[0:count, :, :].permute((0, 2, 1)),
        axis=2,
        keepdims=True,
    )
    shifted = nl.ndarray(shape=(P, ratio, width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(
        dst=shifted[0:count, :, :],
        data1=score[0:count, :, :],
        data2=peak[0:count, :].expand_dim(1).broadcast(1, ratio),
        op=nl.subtract,
        engine=nisa.engine.vector,
    )
    weight = nl.ndarray(shape=(P, ratio, width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=weight[0:count, :, :], op=nl.exp, data=shifted[0:count, :, :])
    share = nl.ndarray(shape=(P, ratio, width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(
        dst=share[0:count, :, :],
        data1=weight[0:count, :, :],
        data2=latent[0:count, :, :],
        op=nl.multiply,
        engine=nisa.engine.vector,
    )
    total = nl.ndarray(shape=shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(
        dst=total[0:count, :].expand_dim(2),
        op=nl.add,
        data=weight[0:count, :, :].permute((0, 2, 1)),
        axis=2,
        keepdims=True,
    )
    sums = nl.ndarray(shape=shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(
        dst=sums[0:count, :].expand_dim(2),
        op=nl.add,
        data=share[0:count, :, :].permute((0, 2, 1)),
        axis=2,
        keepdims=True,
    )
    inverse = nl.ndarray(shape=shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=inverse[0:count, :], data=total[0:count, :])
    out = nl.ndarray(shape=shape, dtype=out_dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(
        dst=out[0:count, :],
        data1=sums[0:count, :],
        data2=inverse[0:count, :],
        op=nl.multiply,
        engine=nisa.engine.vector,
    )
    return out


@nki.jit
def softmax_pool_kernel(latent, score, out_fp32=True, two_rows=True):
    """out[n, d] = sum over r of latent[n, r, d] * softmax(score[n, :, d])_r.

    Args:
        latent, score: [n, r, d] fp32, r >= 2, finite scores.
        out_fp32: False: one rounding to bf16.
        two_rows: r = 2 uses the form of its own.
    Returns: [n, d].
    """
    n, ratio, d = latent.shape
    out_dtype = nl.float32 if out_fp32 else nl.bfloat16
    out = nl.ndarray(shape=(n, d), dtype=out_dtype, buffer=nl.shared_hbm, name="pooled")
    tiles = (n + P - 1) // P
    first_tile, stop_tile = core_share(items=tiles)
    step = max(1, min(d, CHANNEL_FLOATS // ratio))
    for tile in range(first_tile, stop_tile):
        first = tile * P
        count = min(P, n - first)
        for start in range(0, d, step):
            width = min(step, d - start)
            scores = load_part(src=score, first=first, count=count, ratio=ratio, start=start, width=width)
            latents = load_part(src=latent, first=first, count=count, ratio=ratio, start=start, width=width)
            if ratio == 2 and two_rows:
                result = pool_two(score=scores, latent=latents, count=count, width=width, out_dtype=out_dtype)
            else:
                result = pool_many(
                    score=scores, latent=latents, count=count, ratio=ratio, width=width, out_dtype=out_dtype
                )
            nisa.dma_copy(dst=out[first : first + count, start : start + width], src=result[0:count, :])
    return out


def pool_channels(score: torch.Tensor, latent: torch.Tensor, out_dtype: torch.dtype, backend: str) -> torch.Tensor:
    """[n, d] in out_dtype of [n, r, d] fp32 twice, any r >= 1, with the operator's rules for infinite scores."""
    n, ratio, _ = score.shape
    left_out = score == -torch.inf
    if ratio == 1:
        kept = torch.where(left_out[:, 0], 0.0, latent[:, 0])
        return torch.where(score[:, 0] == score[:, 0], kept, torch.nan).to(out_dtype)
    unknown = (score != score).any(dim=1)
    score = torch.where(score == score, score.clamp(-LARGEST, LARGEST), 0.0)
    latent = torch.where(left_out, 0.0, latent)
    padded = launch.power_of_two(n)
    out = launch.call_kernel(
        backend,
        softmax_pool_kernel,
        latent=launch.pad_to(latent, padded, 0, 0.0).contiguous(),
        score=launch.pad_to(score, padded, 0, 0.0).contiguous(),
        out_fp32=out_dtype == torch.float32,
    )
    return torch.where(unknown, torch.nan, out[:n])


@SOFTMAX_POOL.impl("neuron", "simulated", limits=Limits(out_dtypes=POOL_DTYPES), tolerance=POOL_STEP)
def _launch(call: SoftmaxPoolCall, backend: str) -> torch.Tensor:
    if call.num_rows == 0:
        return call.score.new_empty((0, call.score.shape[2]), dtype=call.out_dtype)
    return pool_channels(call.score, call.latent, call.out_dtype, backend)
