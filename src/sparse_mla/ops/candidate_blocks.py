# SPDX-License-Identifier: Apache-2.0
"""Two-level selection: the blocks of compressed entries that later layers may choose from.

One layer scores everything and keeps its best blocks; the layers after it score only those. Their logits are then
*compact*: column c of a row is entry `blocks[c // block_size] * block_size + c % block_size`. Only the last block of
a row can be partial, it is always kept and comes last in ascending order, so compact columns have no gaps and one
length per row describes them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..dispatch import EXACT, Limits, Op, opaque
from ..errors import ArgumentError
from .topk import LOGIT_DTYPES, ON_NAN, check_bounds, check_k, raise_nan, select_largest
from .validation import choice, same_device, tensor

__all__ = [
    "BLOCK_SIZES",
    "CANDIDATE_BLOCKS",
    "DEFAULT_TOPK_BLOCKS",
    "CandidateBlocksCall",
    "candidate_blocks",
    "candidate_lengths",
    "candidate_mask",
    "compact_to_dense",
    "dense_to_compact",
]

BLOCK_SIZES = (8, 16)  # compressed entries per block
DEFAULT_TOPK_BLOCKS = 2048
LARGEST_SCORE = torch.finfo(torch.bfloat16).max  # a +inf logit must not outrank the last block, which is always kept


class CandidateBlocksCall(NamedTuple):
    """A validated call of `candidate_blocks`, k already clamped to the number of blocks. rows query rows, n columns."""

    logits: torch.Tensor  # [rows, n]
    lengths: torch.Tensor  # [rows] int32
    block_size: int
    k: int  # blocks kept per row
    on_nan: str

    @classmethod
    def check(
        cls,
        logits: torch.Tensor,
        lengths: torch.Tensor,
        *,
        block_size: int = 8,
        topk_blocks: int = DEFAULT_TOPK_BLOCKS,
        on_nan: str = "raise",
    ) -> CandidateBlocksCall:
        op = "candidate_blocks"
        sizes: dict[str, int] = {}
        tensor(op, "logits", logits, "rows n", LOGIT_DTYPES, sizes)
        tensor(op, "lengths", lengths, "rows", (torch.int32,), sizes)
        same_device(op, (("logits", logits), ("lengths", lengths)))
        choice(op, "block_size", block_size, BLOCK_SIZES)
        check_k(op, topk_blocks, "topk_blocks")
        choice(op, "on_nan", on_nan, ON_NAN)
        return cls(logits, lengths, block_size, min(topk_blocks, -(-logits.shape[1] // block_size)), on_nan)

    @property
    def device(self) -> torch.device:
        return self.logits.device

    @property
    def num_rows(self) -> int:
        return self.logits.shape[0]

    @property
    def topk(self) -> int:
        return self.k

    def flat(self) -> tuple[Any, ...]:
        """The arguments of every backend's opaque operator, in the order of `SCHEMA`."""
        return (self.logits, self.lengths, self.block_size, self.k, self.on_nan == "raise")


CANDIDATE_BLOCKS = Op("candidate_blocks", CandidateBlocksCall)

SCHEMA = "(Tensor logits, Tensor lengths, int block_size, int k, bool raise_on_nan) -> Tensor"


def candidate_blocks(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    *,
    block_size: int = 8,
    topk_blocks: int = DEFAULT_TOPK_BLOCKS,
    on_nan: str = "raise",
    backend: str | None = None,
) -> torch.Tensor:
    """Choose the blocks of each row that later layers may select from.

        score(block) = max of its valid logits, +inf for the last valid block;  the best blocks win, then the lower id

    Args:
        logits: [rows, n] bfloat16, float32 or float64, any row stride. Columns at or past the row's length are ignored.
        lengths: [rows] int32, valid columns per row; 0 is allowed.
        block_size: 8 or 16 columns per block, counted in the consumer's compressed entries.
        topk_blocks: blocks kept per row; clamped to the number of blocks n has room for.
        on_nan: a NaN among the valid logits is an error ("raise"), or counts as -inf ("last").
        backend: "auto", or a name listed by `sparse-mla info`. Default SPARSE_MLA_BACKEND.
    Returns:
        int32 [rows, min(topk_blocks, ceil(n / block_size))] block ids, ascending, -1 where the row has fewer blocks.
        All valid blocks are returned when they are few enough, whatever their scores.
    Raises:
        ShapeError, DTypeError, ArgumentError: an argument is wrong; the message names it.
        SlotRangeError: a length outside [0, n].
        NonFiniteError: a NaN under on_nan="raise".
        UnsupportedError: no backend accepts the call; lists each backend's reasons.
    Numerics: exact. +inf logits count as the largest finite bfloat16, so the last block stays in front of them.
    Source: DeepInfer's candidate selection of V4.1. Consumers use `index_logits(candidates=...)` or `candidate_mask`.
    """
    call = CandidateBlocksCall.check(logits, lengths, block_size=block_size, topk_blocks=topk_blocks, on_nan=on_nan)
    result: torch.Tensor = CANDIDATE_BLOCKS.run(call, backend)
    return result


# --- for consumers: plain traceable torch, no values read ------------------------------------------------------------


def candidate_lengths(blocks: torch.Tensor, lengths: torch.Tensor, block_size: int = 8) -> torch.Tensor:
    """int32 [rows]: valid compact columns of each row, the `end` of a top-k over compact logits."""
    _check_blocks("candidate_lengths", blocks, block_size, lengths=lengths)
    inside = (lengths[:, None] - blocks * block_size).clamp(0, block_size)
    return torch.where(blocks >= 0, inside, torch.zeros_like(inside)).sum(dim=1).to(torch.int32)


def candidate_mask(blocks: torch.Tensor, n: int, block_size: int = 8) -> torch.Tensor:
    """bool [rows, n]: True for the columns inside a row's candidate blocks. `topk` over `logits.masked_fill(~mask,
    -inf)` selects what the compact form selects."""
    _check_blocks("candidate_mask", blocks, block_size)
    num_blocks = -(-n // block_size)
    outside = (blocks < 0) | (blocks >= num_blocks)
    target = torch.where(outside, torch.full_like(blocks, num_blocks), blocks).to(torch.int64)
    chosen = torch.zeros((blocks.shape[0], num_blocks + 1), dtype=torch.bool, device=blocks.device)
    chosen = chosen.scatter(1, target, torch.ones_like(target, dtype=torch.bool))[:, :num_blocks]
    columns = chosen[:, :, None].expand(blocks.shape[0], num_blocks, block_size)
    return columns.reshape(blocks.shape[0], num_blocks * block_size)[:, :n]


def compact_to_dense(columns: torch.Tensor, blocks: torch.Tensor, block_size: int = 8) -> torch.Tensor:
    """int32 [rows, k]: the entries that compact columns stand for; -1 for a column that is -1, past the list or in no
    block."""
    _check_blocks("compact_to_dense", blocks, block_size, columns=columns)
    capacity = blocks.shape[1] * block_size
    if capacity == 0:
        return torch.full_like(columns, -1, dtype=torch.int32)
    usable = (columns >= 0) & (columns < capacity)
    column = torch.where(usable, columns, torch.zeros_like(columns))
    block = blocks.gather(1, (column // block_size).to(torch.int64))
    entry = block * block_size + column % block_size
    return torch.where(usable & (block >= 0), entry, torch.full_like(entry, -1)).to(torch.int32)


def dense_to_compact(entries: torch.Tensor, blocks: torch.Tensor, block_size: int = 8) -> torch.Tensor:
    """int32 [rows, k]: the compact column of each entry; -1 for one that is -1 or outside the row's candidate
    blocks."""
    _check_blocks("dense_to_compact", blocks, block_size, entries=entries)
    if blocks.shape[1] == 0:
        return torch.full_like(entries, -1, dtype=torch.int32)
    ascending = torch.where(blocks < 0, torch.full_like(blocks, torch.iinfo(torch.int32).max), blocks).contiguous()
    wanted = torch.where(entries < 0, torch.zeros_like(entries), entries)
    place = torch.searchsorted(ascending, (wanted // block_size).contiguous()).clamp(max=blocks.shape[1] - 1)
    found = (ascending.gather(1, place) == wanted // block_size) & (entries >= 0)
    column = place.to(torch.int32) * block_size + wanted % block_size
    return torch.where(found, column, torch.full_like(column, -1)).to(torch.int32)


def _check_blocks(op: str, blocks: torch.Tensor, block_size: int, **others: torch.Tensor) -> None:
    sizes: dict[str, int] = {}
    tensor(op, "blocks", blocks, "rows blocks", (torch.int32,), sizes)
    choice(op, "block_size", block_size, BLOCK_SIZES)
    for name, value in others.items():
        tensor(op, name, value, "rows" if name == "lengths" else "rows k", (torch.int32,), sizes)
        same_device(op, (("blocks", blocks), (name, value)))


def check_candidates(op: str, blocks: torch.Tensor) -> None:
    """Raise ArgumentError unless every row of `blocks` is strictly increasing ids, then only -1."""
    if blocks.numel() == 0:
        return
    following, before = blocks[:, 1:], blocks[:, :-1]
    bad = torch.zeros_like(blocks, dtype=torch.bool)
    bad[:, 1:] = (following != -1) & (following <= before) | (following >= 0) & (before < 0)
    bad |= blocks < -1
    if bool(bad.any()):
        row, column = bad.nonzero()[0].tolist()
        raise ArgumentError(
            f"{op}: candidates.blocks must be strictly increasing ids and then only -1 in every row, "
            f"got {int(blocks[row, column])} at [{row}, {column}]."
        )


# --- reference -------------------------------------------------------------------------------------------------------


def _reference(
    logits: torch.Tensor, lengths: torch.Tensor, block_size: int, k: int, raise_on_nan: bool
) -> torch.Tensor:
    rows, n = logits.shape
    check_bounds("candidate_blocks", "lengths", lengths, n, "n")
    out = torch.full((rows, k), -1, dtype=torch.int32, device=logits.device)
    for row, length in enumerate(lengths.tolist()):
        if length == 0:
            continue
        values = logits[row, :length]
        if raise_on_nan:
            raise_nan("candidate_blocks", values, row, 0)
        blocks = -(-length // block_size)
        padded = values.new_full((blocks * block_size,), float("-inf"))
        padded[:length] = torch.where(values.isnan(), padded[:length], values)
        scores = padded.reshape(blocks, block_size).amax(dim=1).clamp(max=LARGEST_SCORE)
        scores[-1] = float("inf")
        picks = select_largest(scores, k)
        out[row, : picks.numel()] = picks
    return out


def _fake(logits: torch.Tensor, lengths: torch.Tensor, block_size: int, k: int, raise_on_nan: bool) -> torch.Tensor:
    return logits.new_empty((logits.shape[0], k), dtype=torch.int32)


_operator = opaque("candidate_blocks", "reference", SCHEMA, _reference, _fake)


@CANDIDATE_BLOCKS.impl("reference", limits=Limits(out_dtypes=None), tolerance=EXACT)
def _run_reference(call: CandidateBlocksCall) -> torch.Tensor:
    result: torch.Tensor = _operator(*call.flat())
    return result
