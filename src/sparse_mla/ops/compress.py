# SPDX-License-Identifier: Apache-2.0
"""The compressor: softmax pooling of R consecutive tokens, with the ring of recent rows that carries it from step to
step.

Group c of a sequence covers tokens [cR, cR + R) and exists once token cR + R - 1 has been seen. The ring keeps the last
rows of each
sequence: position p lives at p % ring of its state slot, score at [..., 0, :], latent at [..., 1, :].

Rollback costs nothing: a rejected draft row is overwritten before it can be read, provided the rows of one step never
    overwrite a
row that an accepted prefix still needs. Those are the R - 1 rows before the step, so the ring must hold R + rows - 1. A
shorter ring gives wrong rows only after some rejections; therefore it is an error here, when the state is made and
again at each step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..dispatch import EXACT, Limits, Op, opaque
from ..errors import ArgumentError, ShapeError, SlotRangeError, StateError
from .softmax_pool import POOL_DTYPES, pool_chunk, pool_rows
from .sparse_decode import config_memory_limit
from .validation import choice, memory_limit_bytes, same_device, shape_text, tensor

__all__ = ["COMPRESS", "CompressCall", "CompressOutput", "CompressorState", "compress"]

SCORE, LATENT = 0, 1  # the two planes of a state row


class CompressorState(NamedTuple):
    """The rings of all sequences of one compressor. Made by `allocate`, or by `of` around memory the caller owns."""

    data: torch.Tensor  # [slots, ring, 2, D] float32, any strides; 0 is score, 1 is latent
    ratio: int  # R, rows per group
    max_rows: int  # rows of one sequence in one decode step: 1 + drafts

    @classmethod
    def allocate(
        cls, num_slots: int, ratio: int, *, max_rows: int = 6, dim: int = 512, device: torch.device | str | None = None
    ) -> CompressorState:
        """Zeroed state with the smallest legal ring, R + max_rows - 1."""
        for name, value in (("num_slots", num_slots), ("ratio", ratio), ("max_rows", max_rows), ("dim", dim)):
            if value < 1:
                raise ArgumentError(f"CompressorState: {name} must be at least 1, got {value}.")
        data = torch.zeros(num_slots, ratio + max_rows - 1, 2, dim, dtype=torch.float32, device=device)
        return cls(data, ratio, max_rows)

    @classmethod
    def of(cls, data: torch.Tensor, ratio: int, *, max_rows: int | None = None) -> CompressorState:
        """State over an existing [slots, ring, 2, D] tensor. `max_rows` defaults to what the ring allows, ring - R +
        1.
        """
        tensor("CompressorState", "data", data, "slots ring 2 D", (torch.float32,), {})
        if ratio < 1:
            raise ArgumentError(f"CompressorState: ratio must be at least 1, got {ratio}.")
        rows = data.shape[1] - ratio + 1 if max_rows is None else max_rows
        state = cls(data, ratio, rows)
        state.require_ring("CompressorState")
        return state

    @property
    def num_slots(self) -> int:
        return self.data.shape[0]

    @property
    def ring(self) -> int:
        return self.data.shape[1]

    @property
    def dim(self) -> int:
        return self.data.shape[3]

    def require_ring(self, op: str) -> None:
        """Raise ArgumentError unless the ring survives the rejection of a whole step."""
        needed = self.ratio + self.max_rows - 1
        if self.max_rows < 1 or self.ring < needed:
            raise ArgumentError(
                f"{op}: the state's ring must hold ratio + max_rows - 1 = {max(needed, self.ratio)} rows and max_rows "
                f"be at least 1, got a ring of {self.ring} for ratio {self.ratio} and max_rows {self.max_rows}; "
                "rejected drafts would overwrite rows that are still needed."
            )

    def export(self, slot: int) -> torch.Tensor:
        """A copy [ring, 2, D] of one sequence's ring, for a prefix cache or another worker."""
        return self.data[self._slot("export", slot)].clone(memory_format=torch.contiguous_format)

    def restore(self, slot: int, snapshot: torch.Tensor) -> None:
        """Put an exported ring into a slot. Positions keep their places, so the sequence continues where it was
        exported.
        """
        sizes = {"ring": self.ring, "D": self.dim}
        tensor("CompressorState.restore", "snapshot", snapshot, "ring 2 D", (torch.float32,), sizes)
        self.data[self._slot("restore", slot)] = snapshot

    def _slot(self, action: str, slot: int) -> int:
        if not 0 <= slot < self.num_slots:
            raise SlotRangeError(f"CompressorState.{action}: slot must be in 0..{self.num_slots - 1}, got {slot}.")
        return slot


class CompressOutput(NamedTuple):
    """What a step adds to the compressed cache. N output rows: the input rows in decode, `num_out` in prefill."""

    rows: torch.Tensor  # [N, D] pooled, in out_dtype; 0 where nothing closes
    closes: torch.Tensor  # [N] bool, the row completes a group
    positions: (
        torch.Tensor
    )  # [N] int32, first token cR of the group (the rope position; entry c = position // R); 0 elsewhere
    sequences: torch.Tensor  # [N] int32, index of the sequence (decode: the row) it belongs to; -1 for padding


class CompressCall(NamedTuple):
    """A validated call of `compress`. n input rows, s sequences (prefill only), D channels."""

    score: torch.Tensor  # [n, D] float32
    latent: torch.Tensor  # [n, D] float32
    state: CompressorState
    state_slots: torch.Tensor  # decode [n], prefill [s]; int32 or int64
    context_lens: torch.Tensor  # decode [n], prefill [s]; tokens of the sequence including this row / this chunk
    cu_seqlens_q: torch.Tensor | None  # [s + 1] prefill: first row of each sequence, then n
    num_out: int
    out_dtype: torch.dtype
    memory_limit: int

    @classmethod
    def check(
        cls,
        score: torch.Tensor,
        latent: torch.Tensor,
        state: CompressorState,
        state_slots: torch.Tensor,
        context_lens: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor | None = None,
        num_out: int | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
        memory_limit: int | None = None,
    ) -> CompressCall:
        op = "compress"
        if not isinstance(state, CompressorState):
            raise ArgumentError(f"{op}: state must be a CompressorState, got {type(state).__name__}.")
        sizes: dict[str, int] = {}
        tensor(op, "state.data", state.data, "slots ring 2 D", (torch.float32,), sizes)
        state.require_ring(op)
        tensor(op, "score", score, "n D", (torch.float32,), sizes)
        tensor(op, "latent", latent, "n D", (torch.float32,), sizes)
        if sizes["D"] < 1:
            raise ShapeError(f"{op}: score must have at least one channel, got {shape_text(score)}.")
        integers = (torch.int32, torch.int64)
        per = "n" if cu_seqlens_q is None else "s"
        tensor(op, "state_slots", state_slots, per, integers, sizes)
        tensor(op, "context_lens", context_lens, per, integers, sizes)
        if cu_seqlens_q is None:
            if num_out is not None and num_out != sizes["n"]:
                raise ArgumentError(f"{op}: num_out must be the number of rows {sizes['n']} in decode, got {num_out}.")
            wanted = sizes["n"]
        else:
            tensor(op, "cu_seqlens_q", cu_seqlens_q, "s_plus_1", integers, sizes)
            if sizes["s_plus_1"] != sizes["s"] + 1:
                raise ShapeError(
                    f"{op}: cu_seqlens_q must have one entry more than state_slots [{sizes['s']}], "
                    f"got {shape_text(cu_seqlens_q)}."
                )
            # max(1, groups closed) <= 1 + rows // R per sequence, whatever the lengths are
            wanted = sizes["s"] + sizes["n"] // state.ratio if num_out is None else num_out
            if wanted < sizes["s"]:
                raise ArgumentError(f"{op}: num_out must hold a row per sequence, {sizes['s']}, got {wanted}.")
        named = (
            ("score", score),
            ("latent", latent),
            ("state.data", state.data),
            ("state_slots", state_slots),
            ("context_lens", context_lens),
            ("cu_seqlens_q", cu_seqlens_q),
        )
        same_device(op, named)
        choice(op, "out_dtype", out_dtype, POOL_DTYPES)
        limit = memory_limit_bytes(op, memory_limit, config_memory_limit())
        return cls(score, latent, state, state_slots, context_lens, cu_seqlens_q, wanted, out_dtype, limit)

    @property
    def device(self) -> torch.device:
        return self.score.device

    @property
    def num_rows(self) -> int:
        return self.score.shape[0]

    def flat(self) -> tuple[Any, ...]:
        """The arguments of every backend's opaque operator, in the order of `SCHEMA`."""
        return (
            self.score,
            self.latent,
            self.state.data,
            self.state_slots,
            self.context_lens,
            self.cu_seqlens_q,
            self.state.ratio,
            self.state.max_rows,
            self.num_out,
            self.out_dtype,
            self.memory_limit,
        )


COMPRESS = Op("compress", CompressCall)

SCHEMA = (
    "(Tensor score, Tensor latent, Tensor(a!) state, Tensor state_slots, Tensor context_lens, Tensor? cu_seqlens_q, "
    "int ratio, int max_rows, SymInt num_out, ScalarType out_dtype, int memory_limit) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)


def compress(
    score: torch.Tensor,
    latent: torch.Tensor,
    state: CompressorState,
    state_slots: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    num_out: int | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    memory_limit: int | None = None,
    backend: str | None = None,
) -> CompressOutput:
    """Pool every group of R tokens that closes in this step, and remember the rows a later step needs.

    Decode (no cu_seqlens_q): all rows are stored first, then each row whose context_len is a multiple of R pools
        positions
    context_len - R .. context_len - 1 of its ring, so the rows of a step see each other and may close several groups.
    Prefill (cu_seqlens_q given): groups start in the ring where the sequence has a history and continue in the new
        rows; then the
    last min(new rows, ring) rows are stored.

    Args:
        score, latent: [n, D] float32, the rows of the step. The rows of one sequence are consecutive, in position
            order.
        state: a `CompressorState`; written in place.
        state_slots: int32 or int64. Decode [n]: the state slot of each row; -1 marks a padding row, which is neither
            stored nor pooled. Prefill [s]: one per sequence, each slot once; -1 is a sequence to pool but not to
            remember, without history.
        context_lens: tokens of the sequence up to and including this row (decode [n]) or this chunk (prefill [s]).
        cu_seqlens_q: [s + 1], prefill only: sequence i owns rows cu_seqlens_q[i] .. cu_seqlens_q[i + 1] - 1; the last
            entry is at most n, rows past it are padding.
        num_out: prefill only: output rows. Default s + n // R, which always suffices. Sequence i takes max(1, groups
            closed).
        out_dtype: bfloat16 or float32.
        memory_limit: bytes of scratch. Default SPARSE_MLA_MEMORY_LIMIT (1 GiB).
        backend: "auto", or a name listed by `sparse-mla info`. Default SPARSE_MLA_BACKEND.
    Returns:
        CompressOutput(rows, closes, positions, sequences). Rows that close nothing are 0 and must not be stored (slot
        -1).
    Raises:
        ShapeError, DTypeError, ArgumentError: an argument is wrong, or the ring is too short; the message names it.
        SlotRangeError: a state slot or a length out of range, or num_out too small.
        StateError: rows of a sequence not consecutive, more than state.max_rows of them in one step, or a slot used
            twice. All of these are raised before the state is written.
        UnsupportedError: no backend accepts the call; lists each backend's reasons.
    Numerics: those of `softmax_pool`. Rows and state do not depend on the other sequences of the step.
    Source: DeepInfer 0.1.0 compressor; docs/formats.md.
    """
    call = CompressCall.check(
        score,
        latent,
        state,
        state_slots,
        context_lens,
        cu_seqlens_q=cu_seqlens_q,
        num_out=num_out,
        out_dtype=out_dtype,
        memory_limit=memory_limit,
    )
    return CompressOutput(*COMPRESS.run(call, backend))


# --- reference -------------------------------------------------------------------------------------------------------


def fake_compress(
    score: torch.Tensor,
    latent: torch.Tensor,
    state: torch.Tensor,
    state_slots: torch.Tensor,
    context_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    ratio: int,
    max_rows: int,
    num_out: int,
    out_dtype: torch.dtype,
    memory_limit: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shapes of (rows, closes, positions, sequences) for the compiler."""
    return (
        score.new_empty((num_out, score.shape[1]), dtype=out_dtype),
        score.new_empty((num_out,), dtype=torch.bool),
        score.new_empty((num_out,), dtype=torch.int32),
        score.new_empty((num_out,), dtype=torch.int32),
    )


def check_decode_step(
    slots: torch.Tensor, context_lens: torch.Tensor, num_slots: int, ratio: int, max_rows: int
) -> None:
    """Raise unless each sequence's rows are consecutive, in order, at most max_rows, and inside the state. int64 [n]
    each.
    """
    op = "compress"
    if slots.numel() == 0:
        return
    if bool(((slots < -1) | (slots >= num_slots)).any()):
        bad = int(slots[(slots < -1) | (slots >= num_slots)][0])
        raise SlotRangeError(f"{op}: state_slots must be -1 or below {num_slots}, got {bad}.")
    live = slots >= 0
    if bool((live & (context_lens < 1)).any()):
        bad = int(context_lens[live & (context_lens < 1)][0])
        raise SlotRangeError(f"{op}: context_lens must be at least 1 for a row that is no padding, got {bad}.")
    same = (slots[1:] == slots[:-1]) & live[1:]
    if bool((same & (context_lens[1:] != context_lens[:-1] + 1)).any()):
        row = int((same & (context_lens[1:] != context_lens[:-1] + 1)).nonzero()[0, 0]) + 1
        raise StateError(
            f"{op}: rows of one sequence must have context_lens growing by one, got {int(context_lens[row - 1])} then "
            f"{int(context_lens[row])} in rows {row - 1} and {row} of state slot {int(slots[row])}."
        )
    starts = torch.ones_like(live)
    starts[1:] = ~same
    first_of_run = slots[starts & live]
    if torch.unique(first_of_run).numel() != first_of_run.numel():
        raise StateError(
            f"{op}: rows of one sequence must be consecutive, got a state slot in two separate runs of rows."
        )
    longest = int(torch.bincount(slots[live]).max()) if bool(live.any()) else 0
    if longest > max_rows:
        raise StateError(
            f"{op}: a step must have at most {max_rows} rows per sequence for this state (ratio {ratio}), got "
            f"{longest}; allocate it with a larger max_rows."
        )


def decode_step(
    score: torch.Tensor, latent: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, context_lens: torch.Tensor
) -> None:
    """Store each live row at (context_len - 1) % ring of its slot."""
    live = slots >= 0
    where = slots[live], (context_lens[live] - 1) % state.shape[1]
    state[where[0], where[1], SCORE] = score[live]
    state[where[0], where[1], LATENT] = latent[live]


class PrefillPlan(NamedTuple):
    """Where the rows of a prefill come from and go to; int64 throughout."""

    begin: torch.Tensor  # [s] first new row of each sequence
    length: torch.Tensor  # [s] new rows
    history: torch.Tensor  # [s] tokens before them
    sequence: torch.Tensor  # [num_out] owner of each output row, -1 for padding
    group: torch.Tensor  # [num_out] entry number c, -1 where nothing closes


def prefill_plan(
    slots: torch.Tensor,
    context_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    num_slots: int,
    num_rows: int,
    ratio: int,
    num_out: int,
) -> PrefillPlan:
    """Check the description of a prefill step and lay out its output rows."""
    op = "compress"
    begin, length = cu_seqlens_q[:-1], cu_seqlens_q[1:] - cu_seqlens_q[:-1]
    if bool((length < 0).any()) or int(cu_seqlens_q[0]) != 0 or int(cu_seqlens_q[-1]) > num_rows:
        raise SlotRangeError(
            f"{op}: cu_seqlens_q must start at 0, never fall, and end at or below the {num_rows} rows given, "
            f"got {cu_seqlens_q.tolist()}."
        )
    history = context_lens - length
    if bool((history < 0).any()):
        bad = int((history < 0).nonzero()[0, 0])
        raise SlotRangeError(
            f"{op}: context_lens[{bad}] must be at least the sequence's {int(length[bad])} new rows, "
            f"got {int(context_lens[bad])}."
        )
    if bool(((slots < -1) | (slots >= num_slots)).any()):
        bad = int(slots[(slots < -1) | (slots >= num_slots)][0])
        raise SlotRangeError(f"{op}: state_slots must be -1 or below {num_slots}, got {bad}.")
    live = slots[slots >= 0]
    if torch.unique(live).numel() != live.numel():
        raise StateError(f"{op}: each state slot must appear once in a prefill, got {slots.tolist()}.")
    first = history // ratio
    closed = context_lens // ratio - first
    if bool(((slots < 0) & (history % ratio != 0) & (closed > 0)).any()):
        raise StateError(f"{op}: a sequence that starts inside a group needs a state slot for its history, got -1.")
    owned = closed.clamp(min=1)
    total = int(owned.sum())
    if total > num_out:
        raise SlotRangeError(f"{op}: num_out must be at least {total}, the rows these sequences own, got {num_out}.")
    numbers = torch.arange(slots.numel(), device=slots.device)
    sequence = torch.full((num_out,), -1, dtype=torch.int64, device=slots.device)
    group = sequence.clone()
    sequence[:total] = torch.repeat_interleave(numbers, owned)
    owner = sequence[:total]
    nth = torch.arange(total, device=slots.device) - (owned.cumsum(0) - owned)[owner]
    group[:total] = torch.where(nth < closed[owner], first[owner] + nth, -1)
    return PrefillPlan(begin, length, history, sequence, group)


def _reference(
    score: torch.Tensor,
    latent: torch.Tensor,
    state: torch.Tensor,
    state_slots: torch.Tensor,
    context_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    ratio: int,
    max_rows: int,
    num_out: int,
    out_dtype: torch.dtype,
    memory_limit: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    slots, lens = state_slots.to(torch.int64), context_lens.to(torch.int64)
    ring, dim = state.shape[1], state.shape[3]
    rows = torch.zeros(num_out, dim, dtype=out_dtype, device=score.device)
    chunk = pool_chunk(memory_limit // 2, ratio, dim)  # half for the gathered rows
    within = torch.arange(ratio, device=score.device)
    if cu_seqlens_q is None:
        check_decode_step(slots, lens, state.shape[0], ratio, max_rows)
        decode_step(score, latent, state, slots, lens)
        closes = (slots >= 0) & (lens % ratio == 0)
        positions = torch.where(closes, lens - ratio, 0)
        sequences = torch.where(slots >= 0, torch.arange(num_out, device=score.device), -1)
        closing = closes.nonzero()[:, 0]
        for start in range(0, closing.numel(), chunk):
            part = closing[start : start + chunk]
            place = (positions[part][:, None] + within) % ring  # [m, R]
            kept = state[slots[part][:, None], place]  # [m, R, 2, D]
            rows[part] = pool_rows(kept[:, :, SCORE], kept[:, :, LATENT]).to(out_dtype)
        return rows, closes, positions.to(torch.int32), sequences.to(torch.int32)

    plan = prefill_plan(slots, lens, cu_seqlens_q.to(torch.int64), state.shape[0], score.shape[0], ratio, num_out)
    closes = plan.group >= 0
    positions = torch.where(closes, plan.group * ratio, 0)
    closing = closes.nonzero()[:, 0]
    for start in range(0, closing.numel(), chunk):
        part = closing[start : start + chunk]
        owner = plan.sequence[part]
        position = positions[part][:, None] + within  # [m, R]
        row = plan.begin[owner][:, None] + position - plan.history[owner][:, None]
        is_new = position >= plan.history[owner][:, None]
        row = torch.where(is_new, row, 0)
        pooled = []
        for plane, new in ((SCORE, score), (LATENT, latent)):
            old = state[slots[owner].clamp(min=0)[:, None], position % ring, plane]  # [m, R, D]
            pooled.append(torch.where(is_new[:, :, None], new[row], old))
        rows[part] = pool_rows(pooled[0], pooled[1]).to(out_dtype)
    for i in range(slots.numel()):
        slot, begin, length = int(slots[i]), int(plan.begin[i]), int(plan.length[i])
        kept_rows = min(length, ring)
        if slot < 0 or kept_rows == 0:
            continue
        last = torch.arange(length - kept_rows, length, device=score.device)
        place = (int(plan.history[i]) + last) % ring
        state[slot, place, SCORE] = score[begin + last]
        state[slot, place, LATENT] = latent[begin + last]
    return rows, closes, positions.to(torch.int32), plan.sequence.to(torch.int32)


_operator = opaque("compress", "reference", SCHEMA, _reference, fake_compress)


@COMPRESS.impl("reference", limits=Limits(out_dtypes=POOL_DTYPES), tolerance=EXACT)
def _run_reference(call: CompressCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] = _operator(*call.flat())
    return result
