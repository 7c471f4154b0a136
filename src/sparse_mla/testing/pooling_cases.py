# SPDX-License-Identifier: Apache-2.0
"""Cases of `softmax_pool`, `compress` and `rope`.

The oracle of `compress` knows every token a sequence ever had, and pools by position; it has no ring. What the ring
must not lose is thereby tested, and what must not be read is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..formats import HEAD_DIM
from ..ops.compress import CompressorState
from ..ops.rope import YarnConfig, rope_table
from . import numeric
from .case import FULL, POISON, Case, Problem, clamped_randn, pairs

__all__ = ["COMPRESS_CASES", "POOL_CASES", "ROPE_CASES", "CompressCase", "PoolCase", "RopeCase"]

ROPE_DIM = 64


def pool(score: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
    """[..., R, D] twice -> [..., D] float64, from the definition; rows of score -inf do not count."""
    score, latent = score.double(), latent.double()
    weights = torch.softmax(score, dim=-2)
    product = torch.where(score == -torch.inf, 0.0, weights * latent)
    return torch.where((score == -torch.inf).all(dim=-2), 0.0, product.sum(dim=-2))


FEW_ROUNDINGS = 2


def judge_pooled(actual: torch.Tensor, expected: torch.Tensor, ratio: float) -> list[str]:
    """Bits for an implementation that promises them, else one step of bfloat16 (or 2e-6 in float32) and upstream's
    bound. That bound was made for large results: in a small one a single rounding that falls the other way exceeds it,
    so one or two may."""
    if ratio == 0 and actual.dtype == expected.dtype:
        return numeric.equal("rows", actual, expected)
    if actual.dtype == torch.bfloat16:
        # Rows that cancel may leave a tiny value whose last bit is worth more than an absolute 1e-6.
        tiny = (actual.double() - expected.double()).abs() < 1e-6
        rounded = expected.to(torch.bfloat16)
        reasons = numeric.within_ulp("rows", torch.where(tiny, rounded, actual), expected)
        if reasons or ((actual != rounded) & ~tiny).sum() <= FEW_ROUNDINGS:
            return reasons
        return numeric.within_diff("rows", actual, rounded, numeric.POOL_DIFF)
    return numeric.by_element("rows", actual, expected, numeric.Rule(1e-6, 2e-6, numeric.POOL_DIFF))


# --- softmax_pool ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PoolCase(Case):
    """groups of R rows of D channels."""

    op: ClassVar[str] = "softmax_pool"

    groups: int = 5
    ratio: int = 2
    dim: int = HEAD_DIM
    spread: float = 1.0  # of the scores
    left_out: float = 0.0  # share of scores that are -inf; their latents are NaN
    out_dtype: torch.dtype = torch.bfloat16
    strided: bool = False  # score and latent are halves of one [N, R, 2 D] tensor

    def build(self, poison: int = POISON) -> Problem:
        g = self.generator()
        both = torch.randn(self.groups, self.ratio, 2, self.dim, generator=g)
        both[:, :, 0] *= self.spread
        score, latent = both[:, :, 0], both[:, :, 1]
        out = torch.rand(score.shape, generator=g) < self.left_out
        score[out], latent[out] = -torch.inf, torch.nan
        if not self.strided:
            score, latent = score.contiguous(), latent.contiguous()
        return Problem({"score": score, "latent": latent, "out_dtype": self.out_dtype}, {})

    def oracle(self, problem: Problem) -> Any:
        return pool(problem.arguments["score"], problem.arguments["latent"])

    def compare(self, actual: Any, expected: Any, plain: Any, ratio: float) -> list[str]:
        wrong = (
            [] if actual.dtype == self.out_dtype or actual.dtype == torch.float64 else [f"rows: dtype {actual.dtype}"]
        )
        return wrong + judge_pooled(actual, expected, ratio)

    @property
    def flops(self) -> int:
        return 6 * self.groups * self.ratio * self.dim

    @property
    def nbytes(self) -> int:
        return self.groups * self.dim * (8 * self.ratio + self.out_dtype.itemsize)


def _pool() -> Iterator[PoolCase]:
    for ratio in (1, 2, 3, 4, 8, 128):
        yield PoolCase(name=f"ratio-{ratio}", ratio=ratio)
    yield PoolCase(name="wide-scores", spread=60.0, ratio=4)
    yield PoolCase(name="left-out-rows", tags=("ugly",), left_out=0.4, ratio=4)
    yield PoolCase(name="all-left-out", tags=("ugly",), left_out=2.0)
    yield PoolCase(name="no-groups", tags=("ugly",), groups=0)
    yield PoolCase(name="one-channel", tags=("ugly",), dim=1, ratio=3)
    yield PoolCase(name="odd-channels", tags=("ugly",), dim=77, ratio=2)
    yield PoolCase(name="strided", tags=("ugly",), strided=True)
    yield PoolCase(name="float32-out", out_dtype=torch.float32, ratio=2)
    yield PoolCase(name="v41-flash", tags=("production",), groups=64, ratio=2)
    yield PoolCase(name="v41-flash-4096", tags=("production", FULL), groups=4096, ratio=2)


POOL_CASES: tuple[PoolCase, ...] = tuple(_pool())


# --- compress --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CompressCase(Case):
    """One step: `rows[i]` new tokens of a sequence that has `history[i]` already; a row count of -1 is a padding row
    (decode)."""

    op: ClassVar[str] = "compress"
    writes: ClassVar[bool] = True

    prefill: bool = False
    history: tuple[int, ...] = (10, 3)
    rows: tuple[int, ...] = (1, 1)
    ratio: int = 2
    max_rows: int = 6
    extra_ring: int = 0
    dim: int = HEAD_DIM
    out_dtype: torch.dtype = torch.bfloat16
    integers: torch.dtype = torch.int32

    def build(self, poison: int = POISON) -> Problem:
        g = self.generator()
        ring, count = self.ratio + self.max_rows - 1 + self.extra_ring, len(self.rows)
        data = torch.full((count + 1, ring, 2, self.dim), poison, dtype=torch.uint8)
        data = data.repeat_interleave(4, -1).view(torch.float32)  # 0xFFFFFFFF is NaN
        slots = torch.randperm(count + 1, generator=g)[:count].tolist()
        streams, new, after = [], [], data.clone()
        state_slots, context_lens, bounds = [], [], [0]
        for slot, past, rows in zip(slots, self.history, self.rows, strict=True):
            padding = rows < 0
            n = 1 if padding else rows
            stream = torch.randn(past + n, 2, self.dim, generator=g)
            streams.append(stream)
            for position in range(max(0, past - ring), past):
                data[slot, position % ring] = stream[position]
            after[slot] = data[slot]
            if not padding:
                for position in range(max(past, past + n - ring), past + n):
                    after[slot, position % ring] = stream[position]
            new.append(stream[past:])
            bounds.append(bounds[-1] + n)
            if self.prefill:
                state_slots.append(slot)
                context_lens.append(past + n)
            else:
                state_slots += [-1 if padding else slot] * n
                context_lens += [past + j + 1 for j in range(n)]
        rows_now = torch.cat(new) if new else torch.empty(0, 2, self.dim)
        arguments: dict[str, Any] = {
            "score": rows_now[:, 0],
            "latent": rows_now[:, 1],
            "state": CompressorState.of(data, self.ratio, max_rows=self.max_rows),
            "state_slots": torch.tensor(state_slots, dtype=self.integers),
            "context_lens": torch.tensor(context_lens, dtype=self.integers),
            "out_dtype": self.out_dtype,
        }
        if self.prefill:
            arguments["cu_seqlens_q"] = torch.tensor(bounds, dtype=self.integers)
        return Problem(arguments, {"streams": streams, "state": after})

    def call(self, problem: Problem, backend: str | None = None) -> Any:
        return *super().call(problem, backend), problem.arguments["state"].data

    def oracle(self, problem: Problem) -> Any:
        rows, closes, positions, sequences = [], [], [], []

        def put(stream: torch.Tensor, first: int | None, sequence: int) -> None:
            group = None if first is None else stream[first : first + self.ratio]
            rows.append(torch.zeros(self.dim).double() if group is None else pool(group[:, 0], group[:, 1]))
            closes.append(first is not None)
            positions.append(first or 0)
            sequences.append(sequence)

        row = 0
        for i, stream in enumerate(problem.truth["streams"]):
            past, n = self.history[i], self.rows[i]
            if self.prefill:
                groups = range(past // self.ratio, (past + n) // self.ratio)
                for c in groups:
                    put(stream, c * self.ratio, i)
                if not groups:
                    put(stream, None, i)
                continue
            for j in range(max(n, 1)):
                length = past + j + 1
                ends = n > 0 and length % self.ratio == 0
                put(stream, length - self.ratio if ends else None, row if n > 0 else -1)
                row += 1
        if self.prefill:
            unused = len(self.rows) + sum(self.rows) // self.ratio - len(rows)
            for _ in range(unused):
                put(torch.empty(0), None, -1)
        stacked = torch.stack(rows) if rows else torch.empty(0, self.dim).double()
        ints = [torch.tensor(values, dtype=torch.int32) for values in (positions, sequences)]
        return stacked, torch.tensor(closes, dtype=torch.bool), *ints, problem.truth["state"]

    def compare(self, actual: Any, expected: Any, plain: Any, ratio: float) -> list[str]:
        reasons = judge_pooled(actual[0], expected[0], ratio)
        for name, a, e in zip(("closes", "positions", "sequences", "state"), actual[1:], expected[1:], strict=True):
            reasons += numeric.equal(name, a, e)
        return reasons

    def selected(self, result: Any, problem: Problem) -> tuple[torch.Tensor, ...]:
        return tuple(result[:-1])  # the state keeps the filling of its unused slots

    @property
    def flops(self) -> int:
        return 6 * sum(max(n, 1) for n in self.rows) * self.dim

    @property
    def nbytes(self) -> int:
        rows = sum(max(n, 1) for n in self.rows)
        return rows * self.dim * (8 + 8 + self.out_dtype.itemsize // self.ratio)


def _compress() -> Iterator[CompressCase]:
    ugly = ("ugly",)
    yield CompressCase(name="decode-one-row")
    yield CompressCase(name="decode-verify-6", rows=(6, 6, 6, 6), history=(0, 1, 7, 100))
    yield CompressCase(name="decode-mixed-rows", rows=(1, 3, 6, 2, 5), history=(5, 6, 7, 8, 9))
    yield CompressCase(name="decode-padding", tags=ugly, rows=(2, -1, 1, -1), history=(3, 4, 7, 9))
    yield CompressCase(name="decode-all-padding", tags=ugly, rows=(-1, -1, -1), history=(1, 2, 3))
    yield CompressCase(name="decode-first-token", tags=ugly, rows=(1, 2), history=(0, 0))
    yield CompressCase(name="decode-no-rows", tags=ugly, rows=(), history=())
    yield CompressCase(name="decode-wider-ring", rows=(6, 1), history=(11, 12), extra_ring=9)
    yield CompressCase(name="decode-int64", rows=(2, 2), history=(4, 5), integers=torch.int64)
    for ratio in (1, 3, 4, 8):
        yield CompressCase(name=f"decode-ratio-{ratio}", ratio=ratio, rows=(6, 4, 1), history=(2 * ratio - 1, 13, 30))
        yield CompressCase(
            name=f"prefill-ratio-{ratio}", ratio=ratio, prefill=True, rows=(17, 1, 40), history=(0, 5, 11)
        )
    yield CompressCase(name="prefill-fresh", prefill=True, rows=(12, 1, 64), history=(0, 0, 0))
    yield CompressCase(name="prefill-continued", prefill=True, rows=(5, 9, 2), history=(7, 128, 3))
    yield CompressCase(name="prefill-nothing-closes", tags=ugly, prefill=True, rows=(1, 1), history=(0, 2))
    yield CompressCase(name="prefill-no-new-rows", tags=ugly, prefill=True, rows=(0, 3), history=(4, 2))
    yield CompressCase(name="float32-out", rows=(4, 4), history=(1, 2), out_dtype=torch.float32)
    yield CompressCase(name="v41-flash-verify", tags=("production",), rows=(6,) * 16, history=tuple(range(1000, 1016)))
    yield CompressCase(name="v41-flash-chunk", tags=("production",), prefill=True, rows=(512,), history=(1024,))


COMPRESS_CASES: tuple[CompressCase, ...] = tuple(_compress())


# --- rope ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RopeCase(Case):
    """n rows of h heads of d elements; the last 64 turn."""

    op: ClassVar[str] = "rope"

    shape: tuple[int, ...] = (5, 8, HEAD_DIM)
    position_dims: int = 1
    max_pos: int = 4096
    theta: float = 10000.0
    yarn: bool = False
    inverse: bool = False
    dtype: torch.dtype = torch.bfloat16
    integers: torch.dtype = torch.int32

    def build(self, poison: int = POISON) -> Problem:
        g = self.generator()
        x = clamped_randn(g, *self.shape).to(self.dtype)
        if self.dtype == torch.float32:
            x = x + torch.randn(self.shape, generator=g) * 1e-3
        positions = torch.randint(0, self.max_pos, self.shape[: self.position_dims], generator=g, dtype=self.integers)
        if positions.numel() > 1:
            positions.view(-1)[0], positions.view(-1)[-1] = 0, self.max_pos - 1
        table = rope_table(self.max_pos, self.theta, YarnConfig() if self.yarn else None)
        return Problem({"x": x, "positions": positions, "table": table, "inverse": self.inverse}, {})

    def oracle(self, problem: Problem) -> Any:
        """The pair as a complex number, turned in float64."""
        x, positions, table = (problem.arguments[name] for name in ("x", "positions", "table"))
        row = table.double()[positions.long()]
        turn = torch.complex(row[..., : ROPE_DIM // 2], row[..., ROPE_DIM // 2 :])
        turn = turn.conj() if self.inverse else turn
        turn = turn.reshape(*positions.shape, *[1] * (x.dim() - positions.dim() - 1), ROPE_DIM // 2)
        pairs_of = torch.view_as_complex(x[..., -ROPE_DIM:].double().reshape(*x.shape[:-1], ROPE_DIM // 2, 2))
        out = x.double()
        out[..., -ROPE_DIM:] = torch.view_as_real(pairs_of * turn).flatten(-2)
        return out

    def compare(self, actual: Any, expected: Any, plain: Any, ratio: float) -> list[str]:
        if ratio == 0 and expected.dtype == actual.dtype:
            return numeric.equal("out", actual, expected)
        if actual.dtype == torch.bfloat16:
            # Cancellation in a pair may leave a tiny value whose last bit is worth more than an absolute 1e-6.
            tiny = (actual.double() - expected.double()).abs() < 1e-6
            return numeric.within_ulp("out", torch.where(tiny, expected.to(torch.bfloat16), actual), expected)
        return numeric.by_element("out", actual, expected, numeric.Rule(1e-6, 1e-6, 1e-12))

    @property
    def flops(self) -> int:
        return 3 * ROPE_DIM * torch.Size(self.shape[:-1]).numel()

    @property
    def nbytes(self) -> int:
        return 2 * torch.Size(self.shape).numel() * self.dtype.itemsize


def _rope() -> Iterator[RopeCase]:
    axes = {
        "shape": ((3, HEAD_DIM), (5, 8, HEAD_DIM), (7, 1, 128), (2, 3, 4, HEAD_DIM), (6, 2, 64), (1, 64, HEAD_DIM)),
        "inverse": (False, True),
        "yarn": (False, True),
        "dtype": (torch.bfloat16, torch.float32),
        "integers": (torch.int32, torch.int64),
    }
    for a in pairs(axes):
        shape = "x".join(map(str, a["shape"]))
        options = [("inverse" if a["inverse"] else "forward"), *(["yarn"] if a["yarn"] else [])]
        kinds = [str(a["dtype"]).removeprefix("torch."), str(a["integers"]).removeprefix("torch.")]
        yield RopeCase(name="-".join([shape, *options, *kinds]), theta=160000.0 if a["yarn"] else 10000.0, **a)
    yield RopeCase(name="position-per-head", shape=(4, 6, HEAD_DIM), position_dims=2)
    yield RopeCase(name="no-rows", tags=("ugly",), shape=(0, 8, HEAD_DIM))
    yield RopeCase(
        name="v41-flash-131072",
        tags=("production",),
        shape=(6, 64, HEAD_DIM),
        max_pos=131072,
        yarn=True,
        theta=160000.0,
    )
    yield RopeCase(name="v41-flash-4096", tags=("production", FULL), shape=(4096, 64, HEAD_DIM), max_pos=65536)


ROPE_CASES: tuple[RopeCase, ...] = tuple(_rope())
