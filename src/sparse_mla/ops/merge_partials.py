# SPDX-License-Identifier: Apache-2.0
"""Combine attention over disjoint key sets: what context parallelism and split-KV need on top of (out, lse)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..dispatch import EXACT, Limits, Op, opaque
from ..errors import ArgumentError, DTypeError, ShapeError
from .sparse_decode import AttnOutput, config_memory_limit
from .validation import choice, memory_limit_bytes, same_device, shape_text, tensor

__all__ = ["MERGE_PARTIALS", "MergePartialsCall", "merge_partials"]

PART_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


class MergePartialsCall(NamedTuple):
    """A validated call of `merge_partials`. Every part has the same shape and dtype."""

    outs: tuple[torch.Tensor, ...]  # [b, s_q, h_q, d] or [s_q, h_q, d]
    lses: tuple[torch.Tensor, ...]  # [b, h_q, s_q] or [s_q, h_q], float32
    attn_sink: torch.Tensor | None  # [h_q] float32
    out_dtype: torch.dtype
    memory_limit: int

    @classmethod
    def check(
        cls,
        outs: Sequence[torch.Tensor] | torch.Tensor,
        lses: Sequence[torch.Tensor] | torch.Tensor,
        attn_sink: torch.Tensor | None = None,
        *,
        out_dtype: torch.dtype = torch.bfloat16,
        memory_limit: int | None = None,
    ) -> MergePartialsCall:
        op = "merge_partials"
        given_outs, given_lses = _parts(outs), _parts(lses)
        if len(given_outs) < 1 or len(given_outs) != len(given_lses):
            raise ArgumentError(
                f"{op}: outs and lses must list the same parts, at least one, got {len(given_outs)} and "
                f"{len(given_lses)}."
            )
        first = given_outs[0]
        dims = first.dim() if isinstance(first, torch.Tensor) else 4
        if dims not in (3, 4):
            raise ShapeError(f"{op}: outs[0] must be [b, s_q, h_q, d] or [s_q, h_q, d], got {shape_text(first)}.")
        sizes: dict[str, int] = {}
        for number, (out, lse) in enumerate(zip(given_outs, given_lses, strict=True)):
            tensor(op, f"outs[{number}]", out, "b s_q h_q d" if dims == 4 else "s_q h_q d", PART_DTYPES, sizes)
            if out.dtype != first.dtype:
                raise DTypeError(f"{op}: outs[{number}] must be {first.dtype} like outs[0], got {out.dtype}.")
            tensor(op, f"lses[{number}]", lse, "b h_q s_q" if dims == 4 else "s_q h_q", (torch.float32,), sizes)
            same_device(op, (("outs[0]", first), (f"outs[{number}]", out), (f"lses[{number}]", lse)))
        if sizes["h_q"] < 1 or sizes["d"] < 1:
            raise ShapeError(f"{op}: outs[0] must have at least one head and one element, got {shape_text(first)}.")
        if attn_sink is not None:
            tensor(op, "attn_sink", attn_sink, "h_q", (torch.float32,), sizes)
        same_device(op, (("outs[0]", first), ("attn_sink", attn_sink)))
        choice(op, "out_dtype", out_dtype, PART_DTYPES)
        limit = memory_limit_bytes(op, memory_limit, config_memory_limit())
        return cls(given_outs, given_lses, attn_sink, out_dtype, limit)

    @property
    def device(self) -> torch.device:
        return self.outs[0].device

    @property
    def num_rows(self) -> int:
        return self.outs[0].shape[:-2].numel()

    @property
    def num_heads(self) -> int:
        return self.outs[0].shape[-2]

    def flat(self) -> tuple[Any, ...]:
        """The arguments of every backend's opaque operator, in the order of `SCHEMA`: outs [n, h, d] and lses [n,
        h].
        """
        h, d = self.outs[0].shape[-2:]
        n = self.num_rows
        lses = [lse.transpose(1, 2) if lse.dim() == 3 else lse for lse in self.lses]
        return (
            [out.reshape(n, h, d) for out in self.outs],
            [lse.reshape(n, h) for lse in lses],
            self.attn_sink,
            self.out_dtype,
            self.memory_limit,
        )


def _parts(given: Sequence[torch.Tensor] | torch.Tensor) -> tuple[torch.Tensor, ...]:
    return given.unbind(0) if isinstance(given, torch.Tensor) and given.dim() > 0 else tuple(given)


MERGE_PARTIALS = Op("merge_partials", MergePartialsCall)

SCHEMA = "(Tensor[] outs, Tensor[] lses, Tensor? attn_sink, ScalarType out_dtype, int memory_limit) -> (Tensor, Tensor)"


def merge_partials(
    outs: Sequence[torch.Tensor] | torch.Tensor,
    lses: Sequence[torch.Tensor] | torch.Tensor,
    attn_sink: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    memory_limit: int | None = None,
    backend: str | None = None,
) -> AttnOutput:
    """Combine the attention of the same queries over disjoint key sets into attention over their union.

        lse = ln sum_i exp(lse_i)        out = sum_i exp(lse_i - lse) * out_i * 1 / (1 + exp(sink - lse))

    Args:
        outs: the parts, as `sparse_decode` [b, s_q, h_q, d] or `sparse_prefill` [s_q, h_q, d] returns them when called
            without a sink; a sequence or one stacked tensor. float32 parts (out_dtype=torch.float32 there) lose
            nothing.
        lses: float32 [b, h_q, s_q] or [s_q, h_q], natural log, of the same parts. +inf (or -inf) is an empty part: its
            out is not read, whatever it holds.
        attn_sink: [h_q] float32 or None, applied once, here. -inf has no effect, +inf zeroes the head; never in the
            lse.
        out_dtype: bfloat16, float32, or float64 (the sums then run in float64). Keep float32 when the result is merged
            again.
        memory_limit: bytes of scratch. Default SPARSE_MLA_MEMORY_LIMIT (1 GiB).
        backend: "auto", or a name listed by `sparse-mla info`. Default SPARSE_MLA_BACKEND.
    Returns:
        AttnOutput(out like a part in out_dtype, lse like a part's). A query empty in all parts gives out = 0, lse =
        +inf.
    Raises:
        ShapeError, DTypeError, ArgumentError: an argument is wrong; the message names it.
        UnsupportedError: no backend accepts the call; lists each backend's reasons.
    Numerics: float32, parts added in the order given; one rounding to out_dtype. A row's bits do not depend on the
        other rows.
    Source: FlashMLA 1.0.0 split-KV combine; natural log, as its interface returns it.
    """
    call = MergePartialsCall.check(outs, lses, attn_sink, out_dtype=out_dtype, memory_limit=memory_limit)
    out, lse = MERGE_PARTIALS.run(call, backend)
    shape = call.outs[0].shape
    if len(shape) == 3:
        return AttnOutput(out.reshape(shape), lse)
    return AttnOutput(out.reshape(shape), lse.reshape(shape[:-1]).transpose(1, 2))


# --- reference -------------------------------------------------------------------------------------------------------


def fake_merge(
    outs: list[torch.Tensor],
    lses: list[torch.Tensor],
    attn_sink: torch.Tensor | None,
    out_dtype: torch.dtype,
    memory_limit: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    return outs[0].new_empty(outs[0].shape, dtype=out_dtype), lses[0].new_empty(lses[0].shape)


def _reference(
    outs: list[torch.Tensor],
    lses: list[torch.Tensor],
    attn_sink: torch.Tensor | None,
    out_dtype: torch.dtype,
    memory_limit: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    n, h, d = outs[0].shape
    math = torch.float64 if torch.float64 in (out_dtype, outs[0].dtype) else torch.float32
    out = torch.empty(n, h, d, dtype=out_dtype, device=outs[0].device)
    merged = torch.empty(n, h, dtype=torch.float32, device=outs[0].device)
    infinity = float("inf")
    chunk = max(1, memory_limit // (h * (d + len(lses)) * 32))
    for start in range(0, n, chunk):
        stop = min(start + chunk, n)
        parts = torch.stack([lse[start:stop].to(math) for lse in lses])  # [parts, rows, h]
        empty = torch.isinf(parts)
        peak = torch.where(empty, -infinity, parts).amax(dim=0)  # -inf: every part is empty
        lonely = peak == -infinity
        weight = torch.where(empty, 0.0, torch.exp(parts - torch.where(lonely, 0.0, peak)))
        total = weight[0]
        for part in range(1, len(outs)):
            total = total + weight[part]
        factor = torch.where(lonely, 0.0, 1.0 / total)
        lse = torch.where(lonely, infinity, peak + torch.log(total))
        if attn_sink is not None:
            # Not torch.sigmoid: its last elements, past a whole vector, come from other code with other last bits, and
            # which rows and heads those are depends on the rest of the batch.
            factor = factor / (1.0 + torch.exp(attn_sink.to(math) - torch.where(lonely, 0.0, lse)))
        acc = torch.zeros(stop - start, h, d, dtype=math, device=out.device)
        for part, value in enumerate(outs):
            scaled = value[start:stop].to(math) * weight[part][:, :, None]
            acc = acc + torch.where(empty[part][:, :, None], 0.0, scaled)
        out[start:stop] = torch.where(lonely[:, :, None], 0.0, acc * factor[:, :, None])
        merged[start:stop] = lse
    return out, merged


_operator = opaque("merge_partials", "reference", SCHEMA, _reference, fake_merge)


@MERGE_PARTIALS.impl("reference", limits=Limits(out_dtypes=PART_DTYPES), tolerance=EXACT)
def _run_reference(call: MergePartialsCall) -> tuple[torch.Tensor, torch.Tensor]:
    result: tuple[torch.Tensor, torch.Tensor] = _operator(*call.flat())
    return result
