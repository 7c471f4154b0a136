# SPDX-License-Identifier: Apache-2.0
"""Softmax pooling of R rows per channel: the compressor's arithmetic, without its state (that is `compress`)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..dispatch import EXACT, Limits, Op, opaque
from ..errors import ShapeError
from .sparse_decode import config_memory_limit
from .validation import choice, memory_limit_bytes, same_device, shape_text, tensor

__all__ = ["SOFTMAX_POOL", "SoftmaxPoolCall", "pool_rows", "softmax_pool"]

POOL_DTYPES = (torch.bfloat16, torch.float32)


class SoftmaxPoolCall(NamedTuple):
    """A validated call of `softmax_pool`. N groups, R rows per group, D channels."""

    score: torch.Tensor  # [N, R, D] float32
    latent: torch.Tensor  # [N, R, D] float32
    out_dtype: torch.dtype
    memory_limit: int

    @classmethod
    def check(
        cls,
        score: torch.Tensor,
        latent: torch.Tensor,
        *,
        out_dtype: torch.dtype = torch.bfloat16,
        memory_limit: int | None = None,
    ) -> SoftmaxPoolCall:
        op = "softmax_pool"
        sizes: dict[str, int] = {}
        tensor(op, "score", score, "N R D", (torch.float32,), sizes)
        tensor(op, "latent", latent, "N R D", (torch.float32,), sizes)
        if sizes["R"] < 1 or sizes["D"] < 1:
            raise ShapeError(
                f"{op}: score must have at least one row per group and one channel, got {shape_text(score)}."
            )
        same_device(op, (("score", score), ("latent", latent)))
        choice(op, "out_dtype", out_dtype, POOL_DTYPES)
        return cls(score, latent, out_dtype, memory_limit_bytes(op, memory_limit, config_memory_limit()))

    @property
    def device(self) -> torch.device:
        return self.score.device

    @property
    def num_rows(self) -> int:
        return self.score.shape[0]

    def flat(self) -> tuple[Any, ...]:
        """The arguments of every backend's opaque operator, in the order of `SCHEMA`."""
        return (self.score, self.latent, self.out_dtype, self.memory_limit)


SOFTMAX_POOL = Op("softmax_pool", SoftmaxPoolCall)

SCHEMA = "(Tensor score, Tensor latent, ScalarType out_dtype, int memory_limit) -> Tensor"


def softmax_pool(
    score: torch.Tensor,
    latent: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    memory_limit: int | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Pool the R rows of each group into one, channel by channel, weighted by the softmax of their scores.

        out[n, d] = sum_r latent[n, r, d] * softmax(score[n, :, d])_r

    Args:
        score: [N, R, D] float32, R >= 1, any strides. A row whose score is -inf is left out, whatever its latent holds.
        latent: [N, R, D] float32.
        out_dtype: bfloat16 or float32.
        memory_limit: bytes of scratch. Default SPARSE_MLA_MEMORY_LIMIT (1 GiB).
        backend: "auto", or a name listed by `sparse-mla info`. Default SPARSE_MLA_BACKEND.
    Returns:
        [N, D] out_dtype, contiguous. R = 1 gives the latent.
    Raises:
        ShapeError, DTypeError, ArgumentError: an argument is wrong; the message names it.
        UnsupportedError: no backend accepts the call; lists each backend's reasons.
    Numerics: float32, the plain form: subtract the maximum, exponentiate, sum over r = 0, 1, ..., divide once, round
        once. If every score of a channel is -inf the result is 0. Rows with score +inf share the weight equally. NaN
        scores, and NaN or infinite latents of rows that are not left out, propagate.
    Source: DeepInfer 0.1.0 compressor; docs/formats.md.
    """
    call = SoftmaxPoolCall.check(score, latent, out_dtype=out_dtype, memory_limit=memory_limit)
    out: torch.Tensor = SOFTMAX_POOL.run(call, backend)
    return out


# --- reference -------------------------------------------------------------------------------------------------------


def fake_pool(score: torch.Tensor, latent: torch.Tensor, out_dtype: torch.dtype, memory_limit: int) -> torch.Tensor:
    return score.new_empty((score.shape[0], score.shape[2]), dtype=out_dtype)


def pool_rows(score: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
    """[n, R, D] float32 twice -> [n, D] float32. Elementwise along n and D, and r by r: no bit depends on the other
    groups.
    """
    score = score.contiguous()
    peak = score.amax(dim=1, keepdim=True)
    # -inf - (-inf) and +inf - (+inf) have no value; the limits do: nothing, and an equal share.
    shifted = torch.where(score == peak, torch.zeros_like(score), score - peak)
    left_out = score == float("-inf")
    weight = torch.where(left_out, torch.zeros_like(score), torch.exp(shifted))
    weight = torch.where(torch.isnan(peak), peak, weight)
    share = torch.where(left_out, torch.zeros_like(score), latent * weight)
    total, out = weight[:, 0], share[:, 0]
    for r in range(1, score.shape[1]):
        total = total + weight[:, r]
        out = out + share[:, r]
    return torch.where(total == 0, torch.zeros_like(out), out / total)


def pool_chunk(memory_limit: int, ratio: int, dim: int) -> int:
    """Groups pooled at once so that the eight float32 temporaries of `pool_rows` stay inside the limit."""
    return max(1, memory_limit // (ratio * dim * 32))


def _reference(score: torch.Tensor, latent: torch.Tensor, out_dtype: torch.dtype, memory_limit: int) -> torch.Tensor:
    n, ratio, dim = score.shape
    out = torch.empty(n, dim, dtype=out_dtype, device=score.device)
    chunk = pool_chunk(memory_limit, ratio, dim)
    for start in range(0, n, chunk):
        out[start : start + chunk] = pool_rows(score[start : start + chunk], latent[start : start + chunk])
    return out


_operator = opaque("softmax_pool", "reference", SCHEMA, _reference, fake_pool)


@SOFTMAX_POOL.impl("reference", limits=Limits(out_dtypes=POOL_DTYPES), tolerance=EXACT)
def _run_reference(call: SoftmaxPoolCall) -> torch.Tensor:
    result: torch.Tensor = _operator(*call.flat())
    return result
