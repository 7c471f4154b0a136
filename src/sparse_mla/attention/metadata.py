# SPDX-License-Identifier: Apache-2.0
"""What a step needs to know about every row, worked out once and shared by all layers.

    prefill   any number of new tokens for each sequence, behind any history: whole prompts, or chunks of them
    decode    1 to `rows_per_step` rows for each sequence; more than one is the verification of draft tokens
    draft     one block of draft tokens for each sequence, for the draft layers: every row sees the whole block

A row at position p sees the window p - 127 .. p, and the compressed entries c < (p + 1) // R: an entry is visible once
its last token is, and never to the tokens inside it before that. Decode and draft rows address caches by slot. Prefill
rows address one gathered buffer

    history of every sequence (up to 127 tokens)  |  the step's own tokens  |  compressed entries of every sequence

because what a chunk overwrites in the window rings is still inside its first rows' windows.

Index arithmetic is int64 and stored as int32, which is what operators take. `None` in the place of a sequence is
padding: its rows are stored nowhere, see nothing, and come out as zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from ..errors import ArgumentError, ShapeError, SlotRangeError, StateError
from .config import BLOCK_TOKENS
from .pool import KVPool, KVSequence

__all__ = ["PADDING_QUERY", "CompressedStep", "StepMetadata"]

PADDING_QUERY = 998244353  # the engines' mark of a padding request, in place of its number
DRAFT_INDEX_ALIGN = 64  # columns of a draft list are a multiple of it
StepKind = Literal["prefill", "decode", "draft"]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class CompressedStep:
    """A step, in the compressed entries of one ratio. N: output rows of the compressor (decode: the step's rows)."""

    ratio: int
    page: int  # entries per block
    lens: torch.Tensor  # [T] entries each row sees, (position + 1) // ratio
    store_slots: torch.Tensor  # [N] where a closed entry goes, -1 where nothing closes
    rope_positions: torch.Tensor  # [N] first token of the entry, 0 where nothing closes
    dense_offsets: torch.Tensor | None  # [T] decode: the row's first entry in the expanded, flattened block table
    gather_slots: (
        torch.Tensor | None
    )  # [S] prefill: slots of all entries of all sequences; each sequence has at least one row, -1 if none
    gather_starts: torch.Tensor | None  # [T] prefill: where the row's sequence begins in the gathered entries


@dataclass(frozen=True, eq=False)
class StepMetadata:
    """One step. T rows, s sequences, the rows of a sequence consecutive and in order. Made by `prefill`, `decode` or
    `draft`.
    """

    kind: StepKind
    pool: KVPool
    sequences: tuple[KVSequence | None, ...]
    num_rows: tuple[int, ...]
    starts: tuple[int, ...]  # tokens of each sequence before the step
    cu_seqlens: torch.Tensor  # [s + 1] first row of each sequence, then T
    sequence_slots: torch.Tensor  # [s] state slots, -1 for padding
    sequence_lens: torch.Tensor  # [s] tokens including the step's
    row_slots: torch.Tensor  # [T] state slot of each row
    positions: torch.Tensor  # [T]
    context_lens: torch.Tensor  # [T] position + 1, 0 for padding
    query_indices: torch.Tensor  # [T] number of the row's sequence, PADDING_QUERY for padding
    window_lens: torch.Tensor  # [T] tokens of the row's window
    window_store_slots: (
        torch.Tensor
    )  # [T] where the row's window record goes; prefill stores only the last `ring` of a sequence
    window_index: torch.Tensor  # [T, width] decode and draft: slots; prefill: rows of the gathered buffer. -1 fills
    block_table: torch.Tensor  # [s, W] blocks of each sequence, -1 past its own
    row_sequences: torch.Tensor  # [T] number of the row's sequence
    compressed: dict[int, CompressedStep]
    history_slots: torch.Tensor | None  # [H] prefill: ring slots of the history part of the buffer
    lists: dict[int, torch.Tensor] = field(
        default_factory=dict
    )  # index source -> logical entries, written by that layer
    candidates: dict[int, torch.Tensor] = field(default_factory=dict)  # candidate source -> blocks
    gathered: dict[int, torch.Tensor] = field(default_factory=dict)  # prefill: kv source -> its decoded entries

    @property
    def total_rows(self) -> int:
        return int(self.positions.shape[0])

    @property
    def buffer_tokens(self) -> int:
        """Prefill: rows of the gathered buffer before the compressed part."""
        return self.total_rows + (0 if self.history_slots is None else int(self.history_slots.shape[0]))

    @property
    def row_block_tables(self) -> torch.Tensor:
        """[T, W] the block table of each row's sequence."""
        return self.block_table[self.row_sequences.to(torch.int64)]

    def slots_of(self, entries: torch.Tensor, ratio: int) -> torch.Tensor:
        """Compressed entries [T, k] (-1 is empty) to cache slots of that ratio."""
        page = self.compressed[ratio].page
        wanted = entries.clamp(min=0)
        block = self.block_table[self.row_sequences.to(torch.int64)[:, None], (wanted // page).to(torch.int64)]
        return torch.where(entries >= 0, block * page + wanted % page, torch.full_like(entries, -1))

    def require_current(self, op: str, pool: KVPool) -> None:
        """Raise StateError unless the pool and every sequence are as they were when the step was made."""
        if pool is not self.pool:
            raise StateError(f"{op}: step must be made for this pool, got one of another.")
        for sequence, start in zip(self.sequences, self.starts, strict=True):
            if sequence is None:
                continue
            pool.require_live(op, sequence)
            if sequence.length != start:
                raise StateError(
                    f"{op}: step must be of the sequence's present, got one made at {start} tokens for a sequence of "
                    f"{sequence.length}; "
                    "make a new step."
                )

    def commit(self) -> None:
        """Count the step's tokens as part of their sequences. Called once, when all layers have run; a draft block is
        not counted.
        """
        for sequence, rows in zip(self.sequences, self.num_rows, strict=True):
            if sequence is None:
                continue
            if self.kind == "draft":
                sequence.draft_written = max(sequence.draft_written, sequence.length + rows)
            else:
                sequence.length += rows
                sequence.written = max(sequence.written, sequence.length)

    # --- the three kinds ---------------------------------------------------------------------------------------------

    @classmethod
    def prefill(cls, pool: KVPool, sequences: Sequence[KVSequence], num_rows: Sequence[int]) -> StepMetadata:
        """The next `num_rows[i]` tokens of each sequence. Reserves their blocks.

        Raises:
            ShapeError, ArgumentError: lists of different lengths, no sequence, fewer than one row.
            SlotRangeError: a sequence longer than the model's maximum.
            PoolFullError, StateError: as `KVPool.reserve`. Nothing has changed then.
        """
        op = "StepMetadata.prefill"
        rows = _row_counts(op, sequences, num_rows, None)
        if any(s is None for s in sequences):
            raise ArgumentError(f"{op}: sequences must not be None, got padding; a prefill has none.")
        pool.reserve(list(sequences), rows, op)
        base = _Rows(pool, list(sequences), rows)
        window, ring = pool.config.sliding_window, pool.ring
        history = np.minimum(base.start, window - 1)  # [s] tokens the first row of each sequence may still see
        history_begin = np.cumsum(history) - history
        where = np.repeat(np.arange(len(rows)), history)
        position = np.arange(int(history.sum())) - history_begin[where] + (base.start - history)[where]
        history_slots = base.slot[where] * ring + position % ring

        first = np.maximum(base.position - window + 1, 0)
        seen = first[:, None] + np.arange(window)[None, :]  # [T, window] positions
        owner, start = base.owner[:, None], base.start[base.owner][:, None]
        in_history = history_begin[owner] + seen - (start - history[owner])
        in_step = history.sum() + base.cu[owner] + seen - start
        index = np.where(seen > base.position[:, None], -1, np.where(seen < start, in_history, in_step))
        last = base.position >= base.total[base.owner] - ring
        store = np.where(last, base.slot[base.owner] * ring + base.position % ring, -1)
        compressed = {ratio: _compressed_prefill(base, ratio) for ratio in _ratios(pool)}
        return base.build("prefill", store, index, compressed, history_slots)

    @classmethod
    def decode(
        cls,
        pool: KVPool,
        sequences: Sequence[KVSequence | None],
        num_rows: Sequence[int],
        *,
        table_width: int | None = None,
    ) -> StepMetadata:
        """One to `rows_per_step` rows of each sequence: the last accepted token, then drafts to verify. Reserves their
        blocks.

        Args:
            table_width: columns of the block table. Default: the most blocks of a sequence.
        Raises: as `prefill`; ArgumentError also for more rows than the pool's rings allow.
        """
        op = "StepMetadata.decode"
        rows = _row_counts(op, sequences, num_rows, pool.rows_per_step)
        live = [(s, n) for s, n in zip(sequences, rows, strict=True) if s is not None]
        pool.reserve([s for s, _ in live], [n for _, n in live], op)
        base = _Rows(pool, list(sequences), rows, table_width)
        window, ring = pool.config.sliding_window, pool.ring
        first = np.maximum(base.position - window + 1, 0)
        seen = first[:, None] + np.arange(window)[None, :]
        slot = base.slot[base.owner]
        index = np.where(seen > base.position[:, None], -1, slot[:, None] * ring + seen % ring)
        store = slot * ring + base.position % ring
        compressed = {ratio: _compressed_decode(base, ratio) for ratio in _ratios(pool)}
        return base.build("decode", store, index, compressed, None)

    @classmethod
    def draft(cls, pool: KVPool, sequences: Sequence[KVSequence | None]) -> StepMetadata:
        """The draft block behind each sequence: the next `draft_block_size` positions, which all see each other and 128
        tokens before.

        Nothing is reserved and no length changes: the block lives in the draft layers' rings, where the next step
        overwrites it.
        """
        op = "StepMetadata.draft"
        if not pool.has_drafts:
            raise ArgumentError(f"{op}: pool must hold the draft layers, got one for layers {list(pool.layers)}.")
        block, window, ring = pool.config.draft_block_size, pool.config.sliding_window, pool.ring
        rows = _row_counts(op, sequences, [block] * len(sequences), None)
        for sequence in sequences:
            if sequence is None:
                continue
            pool.require_live(op, sequence)
            if sequence.length + block > pool.max_tokens:
                raise SlotRangeError(
                    f"{op}: a draft block must end within {pool.max_tokens} tokens (max_position_embeddings), got "
                    f"{sequence.length + block}."
                )
        if len({id(s) for s in sequences if s is not None}) != sum(s is not None for s in sequences):
            raise StateError(f"{op}: a sequence must appear once in a step, got one twice.")
        base = _Rows(pool, list(sequences), rows)
        width = -(-(window + block) // DRAFT_INDEX_ALIGN) * DRAFT_INDEX_ALIGN
        seen = base.start[base.owner][:, None] - window + np.arange(width)[None, :]
        slot = base.slot[base.owner]
        inside = (seen >= 0) & (np.arange(width) < window + block)[None, :]
        index = np.where(inside, slot[:, None] * ring + seen % ring, -1)
        return base.build("draft", slot * ring + base.position % ring, index, {}, None)


class _Rows:
    """Rows of a step as int64 arrays, and the common part of the three kinds."""

    def __init__(
        self, pool: KVPool, sequences: list[KVSequence | None], rows: list[int], table_width: int | None = None
    ) -> None:
        self.pool = pool
        self.sequences = sequences
        self.rows = rows
        self.live = np.array([s is not None for s in sequences], dtype=bool)
        self.start: Ints = np.array([0 if s is None else s.length for s in sequences], dtype=np.int64)
        self.slot: Ints = np.array([-1 if s is None else s.slot for s in sequences], dtype=np.int64)
        count = np.array(rows, dtype=np.int64)
        self.total: Ints = np.where(self.live, self.start + count, 0)
        self.cu: Ints = np.concatenate(([0], np.cumsum(count)))
        self.owner: Ints = np.repeat(np.arange(len(rows)), count)
        offset = np.arange(int(self.cu[-1])) - self.cu[self.owner]
        self.position: Ints = np.where(self.live[self.owner], self.start[self.owner] + offset, 0)
        blocks = [[] if s is None else s.blocks for s in sequences]
        needed = max((len(b) for b in blocks), default=0)
        width = max(1, needed) if table_width is None else table_width
        if width < needed:
            raise ArgumentError(
                f"StepMetadata: table_width must be at least {needed}, the blocks of the longest sequence, got {width}."
            )
        self.table: Ints = np.full((len(rows), width), -1, dtype=np.int64)
        for number, own in enumerate(blocks):
            self.table[number, : len(own)] = own

    def build(
        self,
        kind: StepKind,
        store: Ints,
        index: Ints,
        compressed: dict[int, CompressedStep],
        history_slots: Ints | None,
    ) -> StepMetadata:
        live = self.live[self.owner]
        tensor = self.tensor
        return StepMetadata(
            kind=kind,
            pool=self.pool,
            sequences=tuple(self.sequences),
            num_rows=tuple(self.rows),
            starts=tuple(self.start.tolist()),
            cu_seqlens=tensor(self.cu),
            sequence_slots=tensor(self.slot),
            sequence_lens=tensor(self.total),
            row_slots=tensor(self.slot[self.owner]),
            positions=tensor(self.position),
            context_lens=tensor(np.where(live, self.position + 1, 0)),
            query_indices=tensor(np.where(live, self.owner, PADDING_QUERY)),
            window_lens=tensor((np.where(live[:, None], index, -1) >= 0).sum(axis=1)),
            window_store_slots=tensor(np.where(live, store, -1)),
            window_index=tensor(np.where(live[:, None], index, -1)),
            block_table=tensor(self.table),
            row_sequences=tensor(self.owner),
            compressed=compressed,
            history_slots=None if history_slots is None else tensor(history_slots),
        )

    def tensor(self, values: Ints) -> torch.Tensor:
        if values.size and (values.max() >= 1 << 31 or values.min() < -1):
            raise SlotRangeError(
                f"StepMetadata: slots and positions must fit int32, got {int(values.max())}; the pool is too large."
            )
        return torch.from_numpy(values.astype(np.int32)).to(self.pool.device)

    def visible(self, ratio: int) -> Ints:
        """[T] compressed entries each row sees: those whose last token is at or before the row."""
        return np.where(self.live[self.owner], (self.position + 1) // ratio, 0)

    def slots(self, owner: Ints, entry: Ints, page: int) -> Ints:
        """Cache slots of compressed entries of sequences `owner`."""
        return self.table[owner, entry // page] * page + entry % page


def _compressed_decode(base: _Rows, ratio: int) -> CompressedStep:
    page = BLOCK_TOKENS // ratio
    closes = base.live[base.owner] & ((base.position + 1) % ratio == 0)
    entry = base.position // ratio
    slots = base.slots(base.owner, np.where(closes, entry, 0), page)
    rows = np.arange(len(base.owner))
    return CompressedStep(
        ratio=ratio,
        page=page,
        lens=base.tensor(base.visible(ratio)),
        store_slots=base.tensor(np.where(closes, slots, -1)),
        rope_positions=base.tensor(np.where(closes, entry * ratio, 0)),
        dense_offsets=base.tensor(rows * base.table.shape[1] * page),
        gather_slots=None,
        gather_starts=None,
    )


def _compressed_prefill(base: _Rows, ratio: int) -> CompressedStep:
    page = BLOCK_TOKENS // ratio
    before, after = base.start // ratio, base.total // ratio
    closed = after - before
    owned = np.maximum(closed, 1)  # a sequence that closes nothing still owns one row, stored nowhere
    owner = np.repeat(np.arange(len(owned)), owned)
    number = np.arange(int(owned.sum())) - (np.cumsum(owned) - owned)[owner]
    real = number < closed[owner]
    entry = np.where(real, before[owner] + number, 0)
    store = np.where(real, base.slots(owner, entry, page), -1)

    gathered = np.maximum(after, 1)
    begin = np.cumsum(gathered) - gathered
    who = np.repeat(np.arange(len(gathered)), gathered)
    which = np.arange(int(gathered.sum())) - begin[who]
    exists = which < after[who]
    gather = np.where(exists, base.slots(who, np.where(exists, which, 0), page), -1)
    return CompressedStep(
        ratio=ratio,
        page=page,
        lens=base.tensor(base.visible(ratio)),
        store_slots=base.tensor(store),
        rope_positions=base.tensor(np.where(real, entry * ratio, 0)),
        dense_offsets=None,
        gather_slots=base.tensor(gather),
        gather_starts=base.tensor(begin[base.owner]),
    )


def _ratios(pool: KVPool) -> list[int]:
    return sorted({pool.topology[source].ratio for source in pool.sources})


def _row_counts(
    op: str, sequences: Sequence[KVSequence | None], num_rows: Sequence[int], most: int | None
) -> list[int]:
    if len(sequences) == 0:
        raise ArgumentError(f"{op}: sequences must hold at least one sequence, got none.")
    if len(sequences) != len(num_rows):
        raise ShapeError(
            f"{op}: num_rows must have one entry per sequence, got {len(num_rows)} for {len(sequences)} sequences."
        )
    rows = []
    for count in num_rows:
        if not isinstance(count, (int, np.integer)) or isinstance(count, bool) or count < 1:
            raise ArgumentError(f"{op}: num_rows must be integers of at least 1, got {count!r}.")
        if most is not None and count > most:
            raise ArgumentError(
                f"{op}: num_rows must be at most {most}, the pool's rows_per_step, got {count}; its rings are too "
                "short for more."
            )
        rows.append(int(count))
    return rows
