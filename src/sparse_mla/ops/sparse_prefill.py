# SPDX-License-Identifier: Apache-2.0
"""Sparse prefill attention over gathered bfloat16 keys.

It differs from decode in three ways that callers rely on: keys are plain bfloat16 rows, every index outside them is
    padding (decode
knows only -1), and lengths are per query row. The softmax itself is decode's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..dispatch import EXACT, Limits, Op, opaque
from ..errors import ShapeError, SlotRangeError
from .sparse_decode import DEFAULT_SCALE, OUT_DTYPES, attend_rows, checks_on, config_memory_limit, key_chunk
from .validation import choice, memory_limit_bytes, same_device, tensor

__all__ = ["SPARSE_PREFILL", "PrefillOutput", "SparsePrefillCall", "sparse_prefill"]


class PrefillOutput(NamedTuple):
    """Attention result. out: as the queries, in `out_dtype`. max_logits, lse: float32 [s_q, h_q]; natural log, sink
    excluded.
    """

    out: torch.Tensor
    max_logits: torch.Tensor
    lse: torch.Tensor


class SparsePrefillCall(NamedTuple):
    """A validated call of `sparse_prefill`, defaults filled. s_q query rows, h_q heads, s_kv gathered keys."""

    q: torch.Tensor  # [s_q, h_q, 512] bfloat16
    kv: torch.Tensor  # [s_kv, 1, 512] bfloat16
    indices: torch.Tensor  # [s_q, 1, topk] int32
    softmax_scale: float
    attn_sink: torch.Tensor | None  # [h_q] float32
    topk_length: torch.Tensor | None  # [s_q] int32
    out_dtype: torch.dtype
    memory_limit: int
    checks: bool

    @classmethod
    def check(
        cls,
        q: torch.Tensor,
        kv: torch.Tensor,
        indices: torch.Tensor,
        *,
        softmax_scale: float | None = None,
        attn_sink: torch.Tensor | None = None,
        topk_length: torch.Tensor | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
        memory_limit: int | None = None,
    ) -> SparsePrefillCall:
        op = "sparse_prefill"
        sizes: dict[str, int] = {}
        tensor(op, "q", q, "s_q h_q 512", (torch.bfloat16,), sizes)
        if sizes["h_q"] < 1:
            raise ShapeError(f"{op}: q must have at least one head, got h_q = 0.")
        tensor(op, "kv", kv, "s_kv 1 512", (torch.bfloat16,), sizes)
        tensor(op, "indices", indices, "s_q 1 topk", (torch.int32,), sizes)
        if sizes["topk"] < 1:
            raise ShapeError(f"{op}: indices must have at least one column, got topk = 0; fill with -1.")
        if attn_sink is not None:
            tensor(op, "attn_sink", attn_sink, "h_q", (torch.float32,), sizes)
        if topk_length is not None:
            tensor(op, "topk_length", topk_length, "s_q", (torch.int32,), sizes)
        named = (("q", q), ("kv", kv), ("indices", indices), ("attn_sink", attn_sink), ("topk_length", topk_length))
        same_device(op, named)
        choice(op, "out_dtype", out_dtype, OUT_DTYPES)
        limit = memory_limit_bytes(op, memory_limit, config_memory_limit())
        scale = DEFAULT_SCALE if softmax_scale is None else float(softmax_scale)
        return cls(q, kv, indices, scale, attn_sink, topk_length, out_dtype, limit, checks_on())

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def num_rows(self) -> int:
        return self.q.shape[0]

    @property
    def num_heads(self) -> int:
        return self.q.shape[1]

    @property
    def topk(self) -> int:
        return self.indices.shape[2]

    @property
    def formats(self) -> tuple[str, ...]:
        return ("BF16",)

    def flat(self) -> tuple[Any, ...]:
        """The arguments of every backend's opaque operator, in the order of `SCHEMA`."""
        return (
            self.q,
            self.kv,
            self.indices,
            self.topk_length,
            self.softmax_scale,
            self.attn_sink,
            self.out_dtype,
            self.memory_limit,
            self.checks,
        )


SPARSE_PREFILL = Op("sparse_prefill", SparsePrefillCall)

SCHEMA = (
    "(Tensor q, Tensor kv, Tensor indices, Tensor? topk_length, float softmax_scale, Tensor? attn_sink, "
    "ScalarType out_dtype, int memory_limit, bool checks) -> (Tensor, Tensor, Tensor)"
)


def sparse_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    memory_limit: int | None = None,
    backend: str | None = None,
) -> PrefillOutput:
    """Attend each query to its selected rows of a gathered bfloat16 buffer (DeepSeek sparse attention, prefill).

        out[i] = sum_j softmax(scale * q[i] . kv[j])_j * kv[j]      over valid j, with the sink in the denominator

    Args:
        q: [s_q, h_q, 512] bfloat16. Queries after RoPE. Any h_q >= 1; zero rows are allowed.
        kv: [s_kv, 1, 512] bfloat16, any row stride. Keys and values are the same rows. s_kv may be 0.
        indices: [s_q, 1, topk] int32. An index below 0 or at or above s_kv is padding and never read; one listed twice
            counts twice.
        softmax_scale: multiplier of the logits before softmax. Default 512 ** -0.5.
        attn_sink: [h_q] float32 or None. -inf has no effect, +inf zeroes the head; it never enters lse or max_logits.
        topk_length: [s_q] int32 or None. Columns at or past it are ignored; above topk it acts as topk.
        out_dtype: bfloat16, float32, or float64 (reference only: the whole computation then runs in float64).
        memory_limit: bytes of scratch. Default SPARSE_MLA_MEMORY_LIMIT (1 GiB).
        backend: "auto", or a name listed by `sparse-mla info`. Default SPARSE_MLA_BACKEND.
    Returns:
        PrefillOutput(out [s_q, h_q, 512] out_dtype, max_logits [s_q, h_q] float32 (scaled; -inf for an empty row),
        lse [s_q, h_q] float32, natural log, sink excluded).
    Raises:
        ShapeError, DTypeError, ArgumentError: an argument is wrong; the message names it.
        SlotRangeError: a negative length (while SPARSE_MLA_CHECKS is 1).
        UnsupportedError: no backend accepts the call; lists each backend's reasons.
    Numerics: float32 logits and sums; native and Neuron round P to bfloat16 before P @ V. A query without a valid index
        gives out = 0, lse = +inf, max_logits = -inf. A row's bits do not depend on the other rows, nor on the number of
        threads, except on the reference backend, whose matrix products are the BLAS library's.
    Source: FlashMLA 1.0.0 `flash_mla_sparse_fwd`.
    """
    call = SparsePrefillCall.check(
        q,
        kv,
        indices,
        softmax_scale=softmax_scale,
        attn_sink=attn_sink,
        topk_length=topk_length,
        out_dtype=out_dtype,
        memory_limit=memory_limit,
    )
    out, max_logits, lse = SPARSE_PREFILL.run(call, backend)
    return PrefillOutput(out, max_logits, lse)


# --- reference -------------------------------------------------------------------------------------------------------


def fake_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    topk_length: torch.Tensor | None,
    softmax_scale: float,
    attn_sink: torch.Tensor | None,
    out_dtype: torch.dtype,
    memory_limit: int,
    checks: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shapes of (out, max_logits, lse) for the compiler."""
    out = q.new_empty(q.shape, dtype=out_dtype)
    return out, q.new_empty(q.shape[:2], dtype=torch.float32), q.new_empty(q.shape[:2], dtype=torch.float32)


def check_lengths(op: str, topk_length: torch.Tensor | None) -> None:
    """Raise SlotRangeError if a length is negative."""
    if topk_length is not None and topk_length.numel() > 0:
        lowest = int(topk_length.min())
        if lowest < 0:
            raise SlotRangeError(f"{op}: topk_length must be >= 0, got {lowest}.")


def _reference(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    topk_length: torch.Tensor | None,
    softmax_scale: float,
    attn_sink: torch.Tensor | None,
    out_dtype: torch.dtype,
    memory_limit: int,
    checks: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    h, d = q.shape[1:]
    if checks:
        check_lengths("sparse_prefill", topk_length)
    rows = kv[:, 0]
    math = torch.float64 if out_dtype == torch.float64 else torch.float32
    chunk = key_chunk(memory_limit, h, d, 8 if math == torch.float64 else 4)

    def keys_of_row(row: int) -> Any:
        selected = indices[row, 0]
        if topk_length is not None:
            selected = selected[: max(0, int(topk_length[row]))]
        selected = selected[(selected >= 0) & (selected < rows.shape[0])]
        for start in range(0, selected.numel(), chunk):
            yield rows.index_select(0, selected[start : start + chunk])

    with torch.autocast(q.device.type, enabled=False):
        out, lse, max_logits = attend_rows(q, keys_of_row, softmax_scale, attn_sink, math, out_dtype)
    return out, max_logits.float(), lse.float()


_operator = opaque("sparse_prefill", "reference", SCHEMA, _reference, fake_prefill)


@SPARSE_PREFILL.impl("reference", limits=Limits(out_dtypes=OUT_DTYPES), tolerance=EXACT)
def _run_reference(call: SparsePrefillCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _operator(*call.flat())
    return result
