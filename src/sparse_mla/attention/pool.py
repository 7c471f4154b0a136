# SPDX-License-Identifier: Apache-2.0
"""The memory of a running model: one pool of cache blocks for all kv sources, and per sequence a window ring and
compressor rings.

    block   128 tokens: for every kv source its index keys, then its compressed records, one region behind the other
    slot    one sequence: for every layer the last `ring` tokens of its window, for every pooling source the last rows
            of its compressor

Sequences share blocks by reference. `fork` copies nothing but the slot; a block that two sequences hold is copied when
one of them is about to write into it, so a fork can neither see nor change what the other writes. Everything that can
fail for want of room fails before anything is written: `reserve` counts first, copies included.

Rejecting draft tokens only moves a length back. That is enough as long as what the rejected tokens overwrote in the
rings is older than anything still needed; `rollback_budget` is that distance, and going further back is an error
instead of a wrong answer later. Nothing is cleared when a block or a slot is handed on: no length reaches old bytes
before new ones are written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..caches import PagedCache, PoolLayout, Region, align, carve_regions, ceil_div
from ..errors import ArgumentError, PoolFullError, ShapeError, SlotRangeError, StateError
from ..formats import INDEX_FP4, V41_FP4, V41_FP8, RecordFormat, by_name
from ..memory import with_huge_pages
from ..ops.compress import CompressorState
from .config import BLOCK_TOKENS, HEAD_DIM, V41Config
from .topology import LayerTopology

__all__ = ["KVPool", "KVSequence"]

SLOT_ALIGN_BYTES = (
    1056  # lcm of 32 B and a 528-byte record: what readers ask of the distance between two sequences' rings
)


class KVSequence:
    """One sequence's place in a pool. `length` tokens are in the caches; everything else belongs to the pool."""

    def __init__(self, pool: KVPool, slot: int) -> None:
        self.pool = pool
        self.slot = slot
        self.blocks: list[int] = []
        self.reserved = 0  # blocks asked for at allocation, kept through rejections
        self.length = 0
        self.written = 0  # one past the highest position whose rings were ever written
        self.draft_written = 0  # the same for the draft layers' rings, which a draft block writes ahead
        self.state = "live"  # live | freed | damaged

    def __repr__(self) -> str:
        return f"KVSequence(slot {self.slot}, {self.length} tokens, blocks {self.blocks}, {self.state})"


class KVPool:
    """Caches of all layers for a fixed number of blocks and sequences.

    Args:
        config: the model.
        num_blocks: physical blocks of 128 tokens, shared by all sequences.
        num_sequences: sequences that may live at once (state slots).
        rows_per_step: most rows of one sequence in a decode step: 1 + draft tokens.
        layers: only these layers, with the sources they read. Default: all.
        main_format, window_format, index_format: records of the compressed caches, the window rings and the index keys.
        ring: tokens of a window ring. Default: window + max(rows_per_step, draft block), 134 for V4.1-Flash.
        compressor_ring: rows of a compressor ring. Default: ratio + rows_per_step - 1 of each source.
        e4m3_max: cap that records are encoded with, 448 or 224.
    Raises:
        ArgumentError: a ring too short for the rows of a step; a format in the wrong place; a size below 1.
    """

    def __init__(
        self,
        config: V41Config,
        *,
        num_blocks: int,
        num_sequences: int,
        rows_per_step: int = 6,
        layers: Iterable[int] | None = None,
        main_format: RecordFormat | str = V41_FP4,
        window_format: RecordFormat | str = V41_FP8,
        index_format: RecordFormat | str = INDEX_FP4,
        ring: int | None = None,
        compressor_ring: int | None = None,
        e4m3_max: int = 448,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, value, low in (
            ("num_blocks", num_blocks, 0),
            ("num_sequences", num_sequences, 1),
            ("rows_per_step", rows_per_step, 1),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ArgumentError(f"KVPool: {name} must be an integer of at least {low}, got {value!r}.")
        self.config = config
        self.topology = LayerTopology(config)
        self.layers = self.topology.closure(layers)
        self.rows_per_step = rows_per_step
        self.max_tokens = config.max_position_embeddings
        self.device = torch.device(device)
        plans = [self.topology[layer] for layer in self.layers]
        self.sources = tuple(p.layer for p in plans if p.owns_cache)
        self.has_drafts = any(p.kind == "draft" for p in plans)
        self.ring = self._ring(ring)
        main, window, index = by_name(main_format), by_name(window_format), by_name(index_format)
        if main.is_index or window.is_index or not index.is_index:
            raise ArgumentError(
                f"KVPool: main_format and window_format must hold main records and index_format index keys, "
                f"got {main.name}, {window.name} and {index.name}."
            )
        self.window_format, self.main_format, self.index_format = window, main, index
        self._allocate_blocks(num_blocks, main, index, e4m3_max)
        self._allocate_slots(num_sequences, window, compressor_ring, e4m3_max)
        self._references = [0] * num_blocks
        self._free_blocks = list(range(num_blocks - 1, -1, -1))
        self._free_slots = list(range(num_sequences - 1, -1, -1))
        self._sequences: dict[int, KVSequence] = {}

    def _ring(self, ring: int | None) -> int:
        window, rows = self.config.sliding_window, self.rows_per_step
        ahead = self.config.draft_block_size if self.has_drafts else 0
        if ring is None:
            return window + max(rows, ahead)
        needed = max(window - 1 + rows, window + ahead)
        if not isinstance(ring, int) or isinstance(ring, bool) or ring < needed:
            raise ArgumentError(
                f"KVPool: ring must be at least {needed} tokens for a window of {window}, {rows} rows a step"
                f"{f' and a draft block of {ahead}' if ahead else ''}, got {ring!r}; a draft would overwrite a "
                "position that is "
                "still inside an earlier row's window."
            )
        return ring

    def _allocate_blocks(self, num_blocks: int, main: RecordFormat, index: RecordFormat, e4m3_max: int) -> None:
        regions = []
        for source in self.sources:
            page = BLOCK_TOKENS // self.topology[source].ratio
            regions += [Region(f"index.{source}", index, page), Region(f"main.{source}", main, page)]
        self._layout = PoolLayout(regions, BLOCK_TOKENS) if regions else None
        self.block_bytes = self._layout.block_stride if self._layout else 0
        self.data = with_huge_pages(torch.zeros(num_blocks, self.block_bytes, dtype=torch.uint8, device=self.device))
        self._regions = carve_regions(self.data, self._layout, e4m3_max=e4m3_max) if self._layout else {}

    def _allocate_slots(
        self, num_sequences: int, window: RecordFormat, compressor_ring: int | None, e4m3_max: int
    ) -> None:
        per_layer = align(self.ring * window.record_bytes, SLOT_ALIGN_BYTES)
        stride = per_layer * len(self.layers)
        self.rings = with_huge_pages(torch.zeros(num_sequences, stride, dtype=torch.uint8, device=self.device))
        self._windows = {
            layer: PagedCache(self.rings, window, self.ring, e4m3_max=e4m3_max, region_offset=number * per_layer)
            for number, layer in enumerate(self.layers)
        }
        self._states: dict[int, CompressorState] = {}
        state_bytes = 0
        for source in self.sources:
            plan = self.topology[source]
            if not plan.has_compressor_state:
                continue
            rows = plan.ratio + self.rows_per_step - 1 if compressor_ring is None else compressor_ring
            if not isinstance(rows, int) or isinstance(rows, bool) or rows < plan.ratio + self.rows_per_step - 1:
                raise ArgumentError(
                    f"KVPool: compressor_ring must be at least {plan.ratio + self.rows_per_step - 1} rows for ratio "
                    f"{plan.ratio} and "
                    f"{self.rows_per_step} rows a step, got {rows!r}; rejected drafts would overwrite rows that are "
                    "still needed."
                )
            data = torch.zeros(num_sequences, rows, 2, HEAD_DIM, dtype=torch.float32, device=self.device)
            self._states[source] = CompressorState.of(data, plan.ratio, max_rows=self.rows_per_step)
            state_bytes += rows * 2 * HEAD_DIM * data.element_size()
        self.slot_bytes = stride + state_bytes
        self.num_slots = num_sequences

    # --- views -------------------------------------------------------------------------------------------------------

    def window(self, layer: int) -> PagedCache:
        """Window rings of a layer: block = state slot, offset = position % ring."""
        self._require_layer(layer)
        return self._windows[layer]

    def main(self, source: int) -> PagedCache:
        """Compressed records of a kv source."""
        self._require_source(source)
        return self._regions[f"main.{source}"]

    def index(self, source: int) -> PagedCache:
        """Index keys of a kv source, at the slots of its compressed records."""
        self._require_source(source)
        return self._regions[f"index.{source}"]

    def compressor(self, source: int) -> CompressorState:
        """Compressor rings of a pooling kv source (ratio above 1)."""
        self._require_source(source)
        return self._states[source]

    def _require_layer(self, layer: int) -> None:
        if layer not in self._windows:
            raise ArgumentError(
                f"KVPool: layer {layer} is not in this pool; it was made for layers {list(self.layers)}."
            )

    def _require_source(self, source: int) -> None:
        if source not in self.sources:
            raise ArgumentError(
                f"KVPool: layer {source} is no kv source of this pool; its sources are {list(self.sources)}."
            )

    # --- accounting --------------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        return len(self._references)

    @property
    def blocks_free(self) -> int:
        return len(self._free_blocks)

    @property
    def slots_free(self) -> int:
        return len(self._free_slots)

    @property
    def bytes_used(self) -> int:
        """Bytes of the blocks and slots that sequences hold; a shared block counts once."""
        return (self.num_blocks - self.blocks_free) * self.block_bytes + (
            self.num_slots - self.slots_free
        ) * self.slot_bytes

    @property
    def bytes_total(self) -> int:
        return self.num_blocks * self.block_bytes + self.num_slots * self.slot_bytes

    @property
    def bytes_per_token(self) -> float:
        """Cache bytes that grow with the context, per token, without a block's padding."""
        return self._layout.bytes_per_token if self._layout else 0.0

    @property
    def rollback_budget(self) -> int:
        """How far below the highest position ever written a sequence may be rejected."""
        budgets = [self.ring - self.config.sliding_window + (0 if self.has_drafts else 1)]
        budgets += [state.ring - state.ratio + 1 for state in self._states.values()]
        return min(budgets)

    def references(self, block: int) -> int:
        """How many sequences hold a block."""
        return self._references[block]

    @property
    def sequences(self) -> tuple[KVSequence, ...]:
        """All live sequences."""
        return tuple(self._sequences.values())

    # --- life of a sequence ------------------------------------------------------------------------------------------

    def allocate(self, num_tokens: int = 0) -> KVSequence:
        """A new empty sequence, with blocks for `num_tokens` if given. PoolFullError, and nothing taken, when there is
        no room.
        """
        if num_tokens < 0 or num_tokens > self.max_tokens:
            raise SlotRangeError(
                f"KVPool.allocate: num_tokens must be 0 to {self.max_tokens} (the model's maximum), got {num_tokens}."
            )
        needed = ceil_div(num_tokens, BLOCK_TOKENS)
        self._require_room("allocate", needed, slots=1)
        sequence = self._new_sequence()
        sequence.blocks = [self._take_block() for _ in range(needed)]
        sequence.reserved = needed
        return sequence

    def fork(self, sequence: KVSequence) -> KVSequence:
        """A second sequence with the same tokens. Blocks are shared until one of the two writes into them; the slot is
        copied now.
        """
        self.require_live("KVPool.fork", sequence)
        self._require_room("fork", 0, slots=1)
        twin = self._new_sequence()
        twin.length, twin.written, twin.draft_written = sequence.length, sequence.written, sequence.draft_written
        twin.blocks = sequence.blocks[: ceil_div(sequence.length, BLOCK_TOKENS)]
        for block in twin.blocks:
            self._references[block] += 1
        self.rings[twin.slot] = self.rings[sequence.slot]
        for state in self._states.values():
            state.restore(twin.slot, state.export(sequence.slot))
        return twin

    def free(self, sequence: KVSequence) -> None:
        """Give everything back. The sequence cannot be used afterwards; what it shares stays with the others."""
        if sequence.pool is not self or sequence.state == "freed":
            raise StateError(
                f"KVPool.free: the sequence must be one of this pool's own, got {sequence!r}; freed twice?"
            )
        for block in sequence.blocks:
            self._release_block(block)
        sequence.blocks = []
        sequence.state = "freed"
        del self._sequences[sequence.slot]
        self._free_slots.append(sequence.slot)

    def reject(self, sequence: KVSequence, num_tokens: int) -> None:
        """Take back the last `num_tokens`: they will be written again before they can be seen."""
        self.require_live("KVPool.reject", sequence)
        if not 0 <= num_tokens <= sequence.length:
            raise SlotRangeError(
                f"KVPool.reject: num_tokens must be 0 to {sequence.length}, the sequence's length, got {num_tokens}."
            )
        length = sequence.length - num_tokens
        highest = max(sequence.written, sequence.draft_written)
        if num_tokens and highest - length > self.rollback_budget:
            raise SlotRangeError(
                f"KVPool.reject: a sequence must stay within {self.rollback_budget} tokens of the highest position "
                f"written ({highest}), "
                f"got a length of {length}; what the rings held before has been overwritten."
            )
        sequence.length = length
        kept = max(ceil_div(length, BLOCK_TOKENS), sequence.reserved)
        for block in sequence.blocks[kept:]:
            self._release_block(block)
        del sequence.blocks[kept:]

    def reserve(self, sequences: Sequence[KVSequence], num_rows: Sequence[int], op: str = "KVPool.reserve") -> None:
        """Make room for that many more tokens of each sequence, all or nothing: new blocks, and copies of shared ones.

        Raises:
            StateError: a sequence that was freed, is of another pool, or appears twice.
            SlotRangeError: a sequence longer than the model's maximum.
            PoolFullError: not enough free blocks.
        """
        if len(sequences) != len(num_rows):
            raise ShapeError(
                f"{op}: num_rows must have one entry per sequence, got {len(num_rows)} for {len(sequences)}."
            )
        if len({id(s) for s in sequences}) != len(sequences):
            raise StateError(f"{op}: a sequence must appear once in a step, got one twice; put its rows together.")
        for sequence in sequences:
            self.require_live(op, sequence)
        copies: list[tuple[KVSequence, int]] = []
        shares = dict.fromkeys([b for s in sequences for b in s.blocks], 0)
        new = 0
        for sequence, rows in zip(sequences, num_rows, strict=True):
            total = sequence.length + rows
            if rows < 0 or total > self.max_tokens:
                raise SlotRangeError(
                    f"{op}: a sequence must have at most {self.max_tokens} tokens (max_position_embeddings), got "
                    f"{total} "
                    f"({sequence.length} and {rows} new ones)."
                )
            needed = ceil_div(total, BLOCK_TOKENS)
            new += max(0, needed - len(sequence.blocks))
            for number in range(sequence.length // BLOCK_TOKENS, min(needed, len(sequence.blocks))):
                block = sequence.blocks[number]
                if self._references[block] - shares[block] > 1:
                    shares[block] += 1
                    copies.append((sequence, number))
        self._require_room(op, new + len(copies))
        for sequence, number in copies:
            old, fresh = sequence.blocks[number], self._take_block()
            self.data[fresh] = self.data[old]
            sequence.blocks[number] = fresh
            self._release_block(old)
        for sequence, rows in zip(sequences, num_rows, strict=True):
            while len(sequence.blocks) * BLOCK_TOKENS < sequence.length + rows:
                sequence.blocks.append(self._take_block())

    def require_live(self, op: str, sequence: KVSequence) -> None:
        """Raise StateError unless the sequence is this pool's, not freed and not damaged."""
        if not isinstance(sequence, KVSequence):
            raise ArgumentError(f"{op}: sequences must be what KVPool.allocate returns, got {type(sequence).__name__}.")
        if sequence.pool is not self:
            raise StateError(f"{op}: a sequence must belong to this pool, got one of another.")
        if sequence.state != "live":
            cause = (
                "it was freed"
                if sequence.state == "freed"
                else "a step failed in the middle of writing it; free it and start again"
            )
            raise StateError(f"{op}: a sequence must be live, got one that is {sequence.state}; {cause}.")

    # --- blocks ------------------------------------------------------------------------------------------------------

    def _require_room(self, op: str, blocks: int, slots: int = 0) -> None:
        if blocks > self.blocks_free:
            raise PoolFullError(
                f"{op}: {blocks} blocks are needed and {self.blocks_free} of {self.num_blocks} are free; nothing "
                "was changed."
            )
        if slots > self.slots_free:
            raise PoolFullError(
                f"{op}: a state slot is needed and all {self.num_slots} are taken; nothing was changed."
            )

    def _new_sequence(self) -> KVSequence:
        sequence = KVSequence(self, self._free_slots.pop())
        self._sequences[sequence.slot] = sequence
        return sequence

    def _take_block(self) -> int:
        block = self._free_blocks.pop()
        self._references[block] = 1
        return block

    def _release_block(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free_blocks.append(block)
