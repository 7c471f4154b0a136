# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding on the last 64 elements of a head, forward and conjugate, and its cos | sin table.

Pairs are interleaved: elements (2i, 2i+1) of the rope part turn by `position * inv_freq[i]`. The conjugate turns the
    attention
output back by the query position, because the values carry the rope of their key position.

The angle is the float32 product of a float32 position and a float32 frequency. Models were trained with that rounding:
    against
float64 the angle is off by 6e-3 at position 131071, so a "better" table would be a different model.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from ..dispatch import EXACT, Limits, Op, opaque
from ..errors import ArgumentError, ShapeError, SlotRangeError
from .sparse_decode import config_memory_limit
from .validation import memory_limit_bytes, same_device, shape_text, tensor

__all__ = ["ROPE", "ROPE_DIM", "RopeCall", "YarnConfig", "inverse_frequencies", "rope", "rope_table"]

ROPE_DIM = 64  # elements that turn, the last ones of a head
PAIRS = ROPE_DIM // 2


class YarnConfig(NamedTuple):
    """YaRN's stretch of the frequencies, with DeepSeek-V4.1's numbers. There is no correction of the attention
    scale.
    """

    factor: float = 16.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_max_position: int = 65536


def inverse_frequencies(theta: float, yarn: YarnConfig | None = None) -> torch.Tensor:
    """The 32 angular frequencies [32] float64: theta ** (-2i / 64), with YaRN the slow ones divided by its factor."""
    if not theta > 1.0:
        raise ArgumentError(f"inverse_frequencies: theta must be above 1, got {theta}.")
    base = torch.tensor([theta ** (-2.0 * i / ROPE_DIM) for i in range(PAIRS)], dtype=torch.float64)
    if yarn is None:
        return base
    if not (yarn.factor >= 1.0 and yarn.beta_fast > yarn.beta_slow > 0.0 and yarn.original_max_position >= 1):
        raise ArgumentError(
            "inverse_frequencies: yarn must have factor >= 1, beta_fast > beta_slow > 0 and original_max_position >= 1,"
            f" got {yarn}."
        )

    def pair_with_rotations(rotations: float) -> float:
        """The pair that makes this many turns over the original context."""
        turns = yarn.original_max_position / (2.0 * math.pi * rotations)
        return ROPE_DIM * math.log(turns) / (2.0 * math.log(theta))

    low = max(math.floor(pair_with_rotations(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_with_rotations(yarn.beta_slow)), ROPE_DIM - 1)
    ramp = torch.tensor(
        [min(max((i - low) / ((high - low) or 1e-3), 0.0), 1.0) for i in range(PAIRS)], dtype=torch.float64
    )
    return base / yarn.factor * ramp + base * (1.0 - ramp)


TABLE_CHUNK = 65536  # positions built at once; the float64 temporaries then stay below 64 MiB


def rope_table(
    max_pos: int, theta: float, yarn: YarnConfig | None = None, *, device: torch.device | str | None = None
) -> torch.Tensor:
    """The cos | sin table [max_pos, 64] float32: cosines of the 32 pairs, then their sines.

    The angle is float32(position) * float32(inv_freq), rounded to float32; its cosine and sine are the float32 numbers
    nearest to the exact ones, so the table is the same on every machine.
    """
    if max_pos < 1:
        raise ArgumentError(f"rope_table: max_pos must be at least 1, got {max_pos}.")
    frequency = inverse_frequencies(theta, yarn).to(torch.float32)
    table = torch.empty(max_pos, ROPE_DIM, dtype=torch.float32)
    for start in range(0, max_pos, TABLE_CHUNK):
        stop = min(start + TABLE_CHUNK, max_pos)
        position = torch.arange(start, stop, dtype=torch.float32)
        angle = (position[:, None] * frequency[None, :]).to(torch.float64)
        table[start:stop, :PAIRS] = torch.cos(angle)
        table[start:stop, PAIRS:] = torch.sin(angle)
    return table if device is None else table.to(device)


class RopeCall(NamedTuple):
    """A validated call of `rope`. n rows (positions), h heads that share a row's position, d elements per head."""

    x: torch.Tensor  # [..., d] bfloat16 or float32, d >= 64
    positions: torch.Tensor  # the leading dimensions of x, int32 or int64
    table: torch.Tensor  # [max_pos, 64] float32
    inverse: bool
    memory_limit: int

    @classmethod
    def check(
        cls,
        x: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
        *,
        inverse: bool = False,
        memory_limit: int | None = None,
    ) -> RopeCall:
        op = "rope"
        dims = x.dim() if isinstance(x, torch.Tensor) else 2
        if dims < 2:
            raise ShapeError(f"{op}: x must be [..., d] with at least two dimensions, got {shape_text(x)}.")
        tensor(op, "x", x, " ".join(["_"] * dims), (torch.bfloat16, torch.float32), {})
        if x.shape[-1] < ROPE_DIM:
            raise ShapeError(
                f"{op}: x must have at least {ROPE_DIM} elements in its last dimension, got {x.shape[-1]}."
            )
        lead = positions.dim() if isinstance(positions, torch.Tensor) else 1
        tensor(op, "positions", positions, " ".join(["_"] * lead), (torch.int32, torch.int64), {})
        if not 1 <= lead < dims or tuple(positions.shape) != tuple(x.shape[:lead]):
            raise ShapeError(
                f"{op}: positions must have the leading dimensions of x {shape_text(x)}, got {shape_text(positions)}; "
                "heads share a position."
            )
        tensor(op, "table", table, f"max_pos {ROPE_DIM}", (torch.float32,), {})
        same_device(op, (("x", x), ("positions", positions), ("table", table)))
        limit = memory_limit_bytes(op, memory_limit, config_memory_limit())
        return cls(x, positions, table, bool(inverse), limit)

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def out_dtype(self) -> torch.dtype:
        return self.x.dtype

    @property
    def num_rows(self) -> int:
        return self.positions.numel()

    @property
    def num_heads(self) -> int:
        return self.x.shape[self.positions.dim() : -1].numel()

    def flat(self) -> tuple[Any, ...]:
        """The arguments of every backend's opaque operator, in the order of `SCHEMA`: x [n, h, d], positions [n]."""
        n, h, d = self.num_rows, self.num_heads, self.x.shape[-1]
        return (
            self.x.reshape(n, h, d),
            self.positions.reshape(n),
            self.table,
            self.inverse,
            self.memory_limit,
        )


ROPE = Op("rope", RopeCall)

SCHEMA = "(Tensor x, Tensor positions, Tensor table, bool inverse, int memory_limit) -> Tensor"


def rope(
    x: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    *,
    inverse: bool = False,
    memory_limit: int | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Turn the last 64 elements of every head by its position (interleaved rotary embedding).

        out[2i] = x[2i] cos - x[2i+1] sin        out[2i+1] = x[2i] sin + x[2i+1] cos        inverse: sin -> -sin

    Args:
        x: [..., d] bfloat16 or float32, d >= 64. Elements before the last 64 are copied.
        positions: int32 or int64, the leading dimensions of x: [T] for [T, h, d], [T, h] for one position per head.
        table: [max_pos, 64] float32 from `rope_table`; cosines, then sines.
        inverse: turn back (conjugate), for the attention output.
        memory_limit: bytes of scratch. Default SPARSE_MLA_MEMORY_LIMIT (1 GiB).
        backend: "auto", or a name listed by `sparse-mla info`. Default SPARSE_MLA_BACKEND.
    Returns:
        A new contiguous tensor of x's shape and dtype.
    Raises:
        ShapeError, DTypeError, ArgumentError: an argument is wrong; the message names it.
        SlotRangeError: a position outside the table.
        UnsupportedError: no backend accepts the call; lists each backend's reasons.
    Numerics: float32, out[2i] = fma(x[2i], cos, -(x[2i+1] * sin)), out[2i+1] = fma(x[2i], sin, x[2i+1] * cos), exactly,
        then one rounding to x's dtype. Every backend with a fused multiply-add gives the same bits.
    Source: DeepInfer 0.1.0 rotary embedding; DeepSeek-V4.1 config.json `rope_scaling`.
    """
    call = RopeCall.check(x, positions, table, inverse=inverse, memory_limit=memory_limit)
    out: torch.Tensor = ROPE.run(call, backend)
    return out.reshape(x.shape)


# --- reference -------------------------------------------------------------------------------------------------------


def fake_rope(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


def fused_multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """float32 a * b + c with one rounding. The product is exact in float64; the sum is rounded to odd there (the
    rounding error, exact by TwoSum, moves an even last bit towards the true value), so the rounding to float32 sees on
    which side it lies."""
    product = a.to(torch.float64) * b.to(torch.float64)
    addend = c.to(torch.float64)
    total = product + addend
    shadow = total - product
    error = (product - (total - shadow)) + (addend - shadow)
    even = (total.view(torch.int64) & 1) == 0
    inexact = (error != 0) & torch.isfinite(total)
    odd = torch.nextafter(total, torch.where(error > 0, torch.inf, -torch.inf).to(torch.float64))
    return torch.where(inexact & even, odd, total).to(torch.float32)


def check_positions(op: str, positions: torch.Tensor, max_pos: int) -> None:
    """Raise SlotRangeError unless every position has a row in the table."""
    if positions.numel() == 0:
        return
    lowest, highest = int(positions.min()), int(positions.max())
    if lowest < 0 or highest >= max_pos:
        bad = lowest if lowest < 0 else highest
        raise SlotRangeError(f"{op}: positions must be in 0..{max_pos - 1}, the rows of the table, got {bad}.")


def _reference(
    x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, inverse: bool, memory_limit: int
) -> torch.Tensor:
    n, h, d = x.shape
    check_positions("rope", positions, table.shape[0])
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out[:, :, : d - ROPE_DIM] = x[:, :, : d - ROPE_DIM]
    chunk = max(1, memory_limit // (max(h, 1) * ROPE_DIM * 64))  # eight float64 temporaries of the rope part
    for start in range(0, n, chunk):
        stop = min(start + chunk, n)
        row = table[positions[start:stop].to(torch.int64)]  # [rows, 64]
        cos, sin = row[:, None, :PAIRS], row[:, None, PAIRS:]
        if inverse:
            sin = -sin
        pairs = x[start:stop, :, d - ROPE_DIM :].to(torch.float32)
        even, odd = pairs[:, :, 0::2], pairs[:, :, 1::2]
        turned = out[start:stop, :, d - ROPE_DIM :]
        turned[:, :, 0::2] = fused_multiply_add(even, cos, -(odd * sin)).to(x.dtype)
        turned[:, :, 1::2] = fused_multiply_add(even, sin, odd * cos).to(x.dtype)
    return out


_operator = opaque("rope", "reference", SCHEMA, _reference, fake_rope)


@ROPE.impl("reference", limits=Limits(out_dtypes=None), tolerance=EXACT)
def _run_reference(call: RopeCall) -> torch.Tensor:
    result: torch.Tensor = _operator(*call.flat())
    return result
