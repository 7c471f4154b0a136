# SPDX-License-Identifier: Apache-2.0
"""Step metadata: the published vectors, and visibility against a brute-force statement of it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_mla.attention.config import V41Config
from sparse_mla.attention.metadata import PADDING_QUERY, StepMetadata
from sparse_mla.attention.pool import KVPool
from sparse_mla.errors import ArgumentError, PoolFullError, ShapeError, SlotRangeError, StateError

VECTORS = Path(__file__).parents[1] / "data" / "vectors"
TINY = V41Config.tiny()


def place(pool, slot, length, blocks):
    """A sequence at a given slot and in given blocks, as a long-running pool would have it."""
    sequence = pool.allocate()
    pool._sequences[slot] = pool._sequences.pop(sequence.slot)
    pool._free_slots = [s for s in range(pool.num_slots) if s not in pool._sequences]
    sequence.slot, sequence.length, sequence.written = slot, length, length
    sequence.blocks = list(blocks)
    for block in blocks:
        pool._references[block] = 1
        pool._free_blocks.remove(block)
    return sequence


def test_decode_metadata_equals_the_published_vectors():
    data = json.loads((VECTORS / "decode_metadata.json").read_text())
    pool = KVPool(TINY, num_blocks=12, num_sequences=4, layers=[0, 2, 20], ring=data["ring"])
    sequences = [place(pool, s["state"], s["sk"] - s["sq"], s["bt"]) for s in data["seqs"]]
    rows = [s["sq"] for s in data["seqs"]]
    step = StepMetadata.decode(pool, sequences, rows, table_width=data["max_num_blocks"])
    assert step.total_rows == len(data["rows"])
    one, two = step.compressed[1], step.compressed[2]
    for row in data["rows"]:
        t = row["row"]
        assert int(step.query_indices[t]) == row["seq"]
        assert int(step.positions[t]) == row["position"]
        assert int(step.context_lens[t]) == row["context_len"]
        assert int(one.lens[t]) == row["klen_r1"]
        assert int(two.lens[t]) == row["klen_r2"]
        offset, length = row["swa_offset_len"]
        index = step.window_index[t].tolist()
        assert int(step.window_lens[t]) == length
        assert index[0] == offset
        assert index[:3] + index[-3:] == row["swa_index_first3_last3"]
        assert sum(i for i in index if i >= 0) == row["swa_index_sum_of_valid"]
        assert int(step.window_store_slots[t]) == row["swa_store_slot"]
        for ratio, part in ((1, one), (2, two)):
            assert int(part.store_slots[t]) == row[f"store_slot_r{ratio}"]
            assert int(part.rope_positions[t]) == row[f"rope_pos_r{ratio}"]
            assert [int(part.dense_offsets[t]), int(part.lens[t])] == row[f"dense_offset_len_r{ratio}"]
        written = [b for b in row["block_table_row"] if b is not None]
        assert step.row_block_tables[t, : len(written)].tolist() == written


def test_entries_to_slots_equals_the_published_vectors():
    data = json.loads((VECTORS / "decode_metadata.json").read_text())
    for case in data["topk_index_to_slot"]:
        pool = KVPool(TINY, num_blocks=12, num_sequences=1, layers=[2, 20])
        sequence = place(pool, 0, 300, case["block_table"])
        step = StepMetadata.decode(pool, [sequence], [1])
        entries = torch.tensor([case["logical"]], dtype=torch.int32)
        assert step.slots_of(entries, 128 // case["entries_per_block"])[0].tolist() == case["slot"]


def test_draft_metadata_equals_the_published_vectors():
    data = json.loads((VECTORS / "dspark_draft.json").read_text())
    pool = KVPool(TINY, num_blocks=8, num_sequences=2, layers=[40], ring=data["ring"])
    sequences = [place(pool, r["state"], r["accepted_pos"] + 1, []) for r in data["requests"]]
    step = StepMetadata.draft(pool, sequences)
    block = data["draft_block"]
    for number, request in enumerate(data["requests"]):
        rows = slice(number * block, (number + 1) * block)
        assert step.positions[rows].tolist() == request["positions"]
        assert step.window_store_slots[rows].tolist() == request["store_slots"]
        assert all(index == request["kv_index_every_row"] for index in step.window_index[rows].tolist())


# --- visibility ------------------------------------------------------------------------------------------------------


def model(window, ratio, max_tokens=4096):
    """Three layers: a window layer, one kv source of the ratio, a draft layer."""
    return replace(
        TINY,
        num_hidden_layers=2,
        num_draft_layers=1,
        compress_ratios=(0, ratio, 0),
        kv_source_layer_ids=(1,),
        index_source_layer_ids=(1,),
        candidate_source_layer_id=None,
        draft_target_layer_ids=(1,),
        sliding_window=window,
        max_position_embeddings=max_tokens,
    )


class Ledger:
    """What every ring place and compressed slot holds, by replaying a step's own store lists: (sequence, position or
    entry).
    """

    def __init__(self, pool, ratio):
        self.pool, self.ratio = pool, ratio
        self.window, self.compressed = {}, {}

    def run(self, step, names):
        part = step.compressed[self.ratio]
        if step.kind == "prefill":  # what the rows read is gathered before the step stores
            held = [self.window.get(int(slot)) for slot in step.history_slots.tolist()]
            rows = [(names[s], p) for s, p in zip(step.row_sequences.tolist(), step.positions.tolist(), strict=True)]
            buffer = held + rows
        for t, slot in enumerate(step.window_store_slots.tolist()):
            if slot >= 0:
                self.window[slot] = (names[int(step.row_sequences[t])], int(step.positions[t]))
        owners = self.owners(step, part, names)
        for n, (slot, first) in enumerate(zip(part.store_slots.tolist(), part.rope_positions.tolist(), strict=True)):
            if slot >= 0:
                assert first % self.ratio == 0
                self.compressed[slot] = (owners[n], first // self.ratio)
        for t, position in enumerate(step.positions.tolist()):
            number = int(step.row_sequences[t])
            name = names[number]
            index = step.window_index[t].tolist()
            valid = [i for i in index if i >= 0]
            assert index[: len(valid)] == valid  # packed left
            seen = [buffer[i] if step.kind == "prefill" else self.window.get(i) for i in valid]
            first = max(0, position - self.pool.config.sliding_window + 1)
            assert seen == [(name, p) for p in range(first, position + 1)]  # exactly the window, in order
            visible = int(part.lens[t])
            for entry in range(visible):
                assert (entry + 1) * self.ratio - 1 <= position  # never an entry the row is inside of
            assert (visible + 1) * self.ratio - 1 > position  # never misses a closed one
            if step.kind == "prefill":
                begin = int(part.gather_starts[t])
                slots = part.gather_slots[begin : begin + visible].tolist()
            else:
                entries = torch.arange(max(visible, 1), dtype=torch.int32).expand(step.total_rows, -1)
                slots = step.slots_of(entries, self.ratio)[t, :visible].tolist()
            assert [self.compressed.get(slot) for slot in slots] == [(name, e) for e in range(visible)]

    def owners(self, step, part, names):
        if step.kind == "decode":
            return [names[s] for s in step.row_sequences.tolist()]
        owners = []
        for number, (start, rows) in enumerate(zip(step.starts, step.num_rows, strict=True)):
            closed = (start + rows) // self.ratio - start // self.ratio
            owners += [names[number]] * max(1, closed)
        assert len(owners) == part.store_slots.numel()
        return owners


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["prefill", "decode", "fork", "free"]), st.integers(0, 3), st.integers(1, 40), st.integers(0, 9)
    ),
    min_size=3,
    max_size=14,
)


@settings(max_examples=60, deadline=None)
@given(
    window=st.sampled_from([1, 5, 16, 128]),
    ratio=st.sampled_from([1, 2, 4, 8]),
    rows=st.sampled_from([1, 2, 6, 7, 9]),
    steps=STEPS,
)
def test_a_row_sees_exactly_its_window_and_every_closed_entry(window, ratio, rows, steps):
    """Random lives of up to three sequences: chunks of any size, ragged verifies, rejections, forks, recycled slots and
    blocks.
    """
    config = model(window, ratio)
    pool = KVPool(config, num_blocks=6, num_sequences=3, rows_per_step=rows)
    ledger, live, count = Ledger(pool, ratio), [], 0
    for action, which, amount, reject in steps:
        if action == "free" and live:
            pool.free(live.pop(which % len(live))[0])
        elif action == "fork" and live and pool.slots_free:
            parent, name = live[which % len(live)]
            twin, count = pool.fork(parent), count + 1
            live.append((twin, name))
            for place_ in range(pool.ring):  # the copy of the slot, in the ledger's terms
                held = ledger.window.get(parent.slot * pool.ring + place_)
                if held is not None:
                    ledger.window[twin.slot * pool.ring + place_] = held
        elif action == "prefill":
            if pool.slots_free:
                count += 1
                live.append((pool.allocate(), f"s{count}"))
            chosen = live[-2:] if amount % 2 else live[-1:]
            run(pool, ledger, chosen, StepMetadata.prefill, [amount + 3 * n for n in range(len(chosen))], 0)
        elif action == "decode" and live:
            counts = [1 + (amount + n) % rows for n in range(len(live))]
            run(pool, ledger, live, StepMetadata.decode, counts, reject)


def run(pool, ledger, chosen, build, counts, reject):
    before = {id(s): list(s.blocks) for s, _ in chosen}
    try:
        step = build(pool, [s for s, _ in chosen], counts)
    except PoolFullError:
        return
    for sequence, name in chosen:  # copied blocks carry their entries along
        for old, new in zip(before[id(sequence)], sequence.blocks, strict=False):
            page = 128 // ledger.ratio
            for offset in range(page if old != new else 0):
                held = ledger.compressed.get(old * page + offset)
                if held is not None:
                    ledger.compressed[new * page + offset] = held
        del name
    ledger.run(step, [name for _, name in chosen])
    step.commit()
    if build is StepMetadata.decode:
        for (sequence, _), rows in zip(chosen, counts, strict=True):
            pool.reject(sequence, min(reject % (rows + 1), rows))


@settings(max_examples=30, deadline=None)
@given(drafts=st.integers(0, 8), start=st.integers(0, 400), accepted=st.integers(0, 8))
def test_rings_sized_for_the_drafts_survive_any_rejection(drafts, start, accepted):
    """0 to 5 drafts with the default rings, 6 to 8 with rings made for them."""
    pool = KVPool(model(128, 2), num_blocks=8, num_sequences=1, rows_per_step=max(6, drafts + 1))
    assert drafts > 5 or (pool.ring, pool.compressor(1).ring) == (134, 7)
    ledger, sequence = Ledger(pool, 2), pool.allocate()
    if start:
        run(pool, ledger, [(sequence, "a")], StepMetadata.prefill, [start], 0)
    for _ in range(4):
        step = StepMetadata.decode(pool, [sequence], [1 + drafts])
        ledger.run(step, ["a"])
        step.commit()
        pool.reject(sequence, drafts - min(accepted, drafts))


@pytest.mark.parametrize("ratio", [1, 2, 4, 8])
def test_visible_counts_are_the_documented_ones(ratio):
    pool = KVPool(model(16, ratio), num_blocks=2, num_sequences=1)
    step = StepMetadata.prefill(pool, [pool.allocate()], [40])
    assert step.compressed[ratio].lens.tolist() == [(p + 1) // ratio for p in range(40)]


def test_a_prefill_stores_only_what_the_ring_can_keep():
    pool = KVPool(TINY, num_blocks=8, num_sequences=2, layers=[0])
    a, b = pool.allocate(), pool.allocate()
    step = StepMetadata.prefill(pool, [a, b], [300, 20])
    stored = step.window_store_slots
    assert int((stored[:300] >= 0).sum()) == 134
    assert bool((stored[300 - 134 : 300] >= 0).all())
    assert bool((stored[300:] >= 0).all())
    assert step.buffer_tokens == 320  # no history yet
    step.commit()
    step = StepMetadata.prefill(pool, [a, b], [1, 1])
    assert step.history_slots.numel() == 127 + 20


def test_padding_rows_see_and_store_nothing():
    pool = KVPool(TINY, num_blocks=8, num_sequences=2, layers=[0, 2, 20, 40])
    a = pool.allocate()
    for build in (lambda: StepMetadata.decode(pool, [None, a], [3, 2]), lambda: StepMetadata.draft(pool, [None, a])):
        step = build()
        padding = step.row_slots < 0
        assert step.query_indices[padding].unique().tolist() == [PADDING_QUERY]
        assert not bool((step.window_index[padding] >= 0).any())
        assert not bool((step.window_store_slots[padding] >= 0).any())
        assert not bool(step.positions[padding].any())
        for part in step.compressed.values():
            assert not bool(part.lens[padding].any())
            assert not bool((part.store_slots[padding] >= 0).any())
        assert bool((step.window_index[~padding] >= 0).any())


def test_mistakes_are_clear_errors_and_reserve_nothing():
    pool = KVPool(replace(TINY, max_position_embeddings=600), num_blocks=3, num_sequences=3, layers=[2, 40])
    bare = KVPool(TINY, num_blocks=3, num_sequences=3, layers=[2])
    a, b = pool.allocate(), pool.allocate()
    freed = pool.allocate()
    pool.free(freed)
    free = pool.blocks_free
    cases = [
        (lambda: StepMetadata.prefill(pool, [], []), ArgumentError, "at least one"),
        (lambda: StepMetadata.prefill(pool, [a, b], [1]), ShapeError, "one entry per sequence"),
        (lambda: StepMetadata.prefill(pool, [a], [0]), ArgumentError, "at least 1"),
        (lambda: StepMetadata.prefill(pool, [a], [2.0]), ArgumentError, "integers"),
        (lambda: StepMetadata.prefill(pool, [None], [1]), ArgumentError, "padding"),
        (lambda: StepMetadata.prefill(pool, [a, a], [1, 1]), StateError, "once"),
        (lambda: StepMetadata.prefill(pool, [freed], [1]), StateError, "freed"),
        (lambda: StepMetadata.prefill(pool, [a], [601]), SlotRangeError, "600"),
        (lambda: StepMetadata.prefill(pool, [a, b], [300, 129]), PoolFullError, "5 blocks"),
        (lambda: StepMetadata.decode(pool, [a], [7]), ArgumentError, "at most 6"),
        (lambda: StepMetadata.decode(pool, [a, b], [1]), ShapeError, "one entry"),
        (lambda: StepMetadata.draft(bare, [bare.allocate()]), ArgumentError, "draft layers"),
        (lambda: StepMetadata.draft(pool, [a, a]), StateError, "once"),
        (lambda: StepMetadata.draft(pool, [freed]), StateError, "freed"),
    ]
    for call, error, text in cases:
        with pytest.raises(error, match=text):
            call()
    a.length = 598
    with pytest.raises(SlotRangeError, match="600"):
        StepMetadata.draft(pool, [a])
    a.length = 0
    assert pool.blocks_free == free
    with pytest.raises(ArgumentError, match="table_width"):
        StepMetadata.decode(pool, [a], [1], table_width=0)


def test_a_stale_step_is_refused():
    pool = KVPool(TINY, num_blocks=3, num_sequences=2, layers=[2])
    a = pool.allocate()
    step = StepMetadata.prefill(pool, [a], [4])
    step.require_current("test", pool)
    step.commit()
    with pytest.raises(StateError, match="make a new step"):
        step.require_current("test", pool)
    step = StepMetadata.decode(pool, [a], [1])
    pool.free(a)
    with pytest.raises(StateError, match="freed"):
        step.require_current("test", pool)
    with pytest.raises(StateError, match="another"):
        step.require_current("test", KVPool(TINY, num_blocks=3, num_sequences=2, layers=[2]))
