# SPDX-License-Identifier: Apache-2.0
"""The block pool: exact accounting, refusal before anything changes, sharing that never leaks."""

import random
from dataclasses import replace

import pytest
import torch

from sparse_mla.attention.config import V41Config
from sparse_mla.attention.pool import KVPool
from sparse_mla.errors import ArgumentError, PoolFullError, ShapeError, SlotRangeError, StateError
from sparse_mla.formats import BF16, INDEX_FP8, V41_FP8

TINY = V41Config.tiny()


def pool(**options):
    options = {"num_blocks": 8, "num_sequences": 3, "layers": [0, 2, 20, 40], **options}
    return KVPool(TINY, **options)


def snapshot(p):
    """Everything an operation may change."""
    return (
        p.bytes_used,
        p.blocks_free,
        p.slots_free,
        [p.references(b) for b in range(p.num_blocks)],
        [(s.slot, tuple(s.blocks), s.length, s.written, s.state) for s in p.sequences],
        p.data.clone(),
        p.rings.clone(),
    )


def assert_unchanged(p, before):
    after = snapshot(p)
    assert after[:5] == before[:5]
    assert torch.equal(after[5], before[5])
    assert torch.equal(after[6], before[6])


def grow(p, sequence, tokens):
    p.reserve([sequence], [tokens])
    sequence.length += tokens
    sequence.written = max(sequence.written, sequence.length)


def test_the_geometry_is_the_published_one():
    p = KVPool(V41Config.v41_flash(), num_blocks=1, num_sequences=1)
    assert p.ring == 134
    assert p.block_bytes == 114048  # 3 ratio-2 sources and one of ratio 1, FP4, rounded to whole records
    assert p.bytes_per_token == 890.0
    assert p.compressor(2).data.shape == (1, 7, 2, 512)
    assert p.main(2).page_size == 64
    assert p.main(20).page_size == 128
    assert p.slot_bytes == 43 * 134 * 528 + 3 * 7 * 2 * 512 * 4
    fp8 = KVPool(V41Config.v41_flash(), num_blocks=1, num_sequences=1, main_format=V41_FP8)
    assert fp8.block_bytes == 194304


def test_the_regions_of_a_block_do_not_overlap():
    p = pool(layers=None, num_blocks=2, num_sequences=2)
    seen = torch.zeros_like(p.data, dtype=torch.int32)
    for source in p.sources:
        for cache in (p.index(source), p.main(source)):
            cache.pages().fill_(1)
            seen += p.data
            p.data.zero_()
    assert int(seen.max()) == 1
    for number, layer in enumerate(p.layers):
        p.window(layer).pages().fill_(number + 1)
    for number, layer in enumerate(p.layers):
        assert bool((p.window(layer).pages() == number + 1).all())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"ring": 132}, "ring must be at least 133"),
        ({"layers": [0, 2], "ring": 132}, "ring must be at least 133"),
        ({"layers": [0, 2], "ring": 127, "rows_per_step": 1}, "at least 128"),
        ({"layers": [0], "ring": 134, "rows_per_step": 8}, "at least 135"),
        ({"ring": True}, "ring"),
        ({"compressor_ring": 6}, "compressor_ring must be at least 7"),
        ({"num_sequences": 0}, "num_sequences"),
        ({"num_blocks": -1}, "num_blocks"),
        ({"rows_per_step": 0}, "rows_per_step"),
        ({"main_format": "INDEX_FP4"}, "main_format"),
        ({"index_format": V41_FP8}, "index_format"),
        ({"layers": [43]}, "layer must be"),
    ],
)
def test_a_pool_that_could_go_wrong_is_an_error_at_construction(options, text):
    with pytest.raises(ArgumentError, match=text):
        pool(**options)


def test_default_rings_fit_the_rows_of_a_step():
    for rows in (1, 2, 6, 9):
        p = pool(rows_per_step=rows)
        assert p.ring == 128 + max(rows, 5)
        assert p.compressor(2).ring == 2 + rows - 1
    assert pool(main_format=BF16, index_format=INDEX_FP8).main(2).record_bytes == 1024


def test_layers_and_sources_of_another_pool_are_errors():
    p = pool(layers=[2])
    for call in (lambda: p.window(0), lambda: p.main(20), lambda: p.index(20), lambda: p.compressor(20)):
        with pytest.raises(ArgumentError, match="pool"):
            call()


def test_accounting_is_exact_and_freeing_returns_to_zero():
    p = pool()
    assert p.bytes_used == 0
    a, b = p.allocate(), p.allocate(200)
    assert (p.blocks_free, p.slots_free) == (6, 1)
    grow(p, a, 129)
    assert p.bytes_used == 4 * p.block_bytes + 2 * p.slot_bytes
    c = p.fork(a)
    assert p.bytes_used == 4 * p.block_bytes + 3 * p.slot_bytes  # a fork shares every block
    p.free(a)
    assert p.bytes_used == 4 * p.block_bytes + 2 * p.slot_bytes
    p.free(c)
    p.free(b)
    assert p.bytes_used == 0
    assert p.blocks_free == 8
    assert p.slots_free == 3
    assert p.sequences == ()


def test_a_full_pool_refuses_before_anything_changes():
    p = pool(num_blocks=3)
    a, b = p.allocate(), p.allocate()
    grow(p, a, 256)
    before = snapshot(p)
    with pytest.raises(PoolFullError, match="2 blocks are needed and 1 of 3"):
        p.reserve([b, a], [128, 128])
    assert_unchanged(p, before)
    with pytest.raises(PoolFullError):
        p.allocate(256)
    assert_unchanged(p, before)
    p.allocate()
    before = snapshot(p)
    with pytest.raises(PoolFullError, match="state slot"):
        p.allocate()
    with pytest.raises(PoolFullError, match="state slot"):
        p.fork(a)
    assert_unchanged(p, before)


def test_a_shared_block_is_copied_by_the_first_who_writes_and_owned_by_the_last():
    p = pool()
    a = p.allocate()
    grow(p, a, 200)
    p.data[a.blocks[1]].fill_(7)
    b = p.fork(a)
    assert a.blocks == b.blocks
    shared = list(a.blocks)
    p.reserve([b], [1])  # token 200 lies in the second block
    assert b.blocks[0] == shared[0]
    assert b.blocks[1] != shared[1]
    assert bool((p.data[b.blocks[1]] == 7).all())
    assert [p.references(x) for x in (*shared, b.blocks[1])] == [2, 1, 1]
    before = p.blocks_free
    p.reserve([a], [1])  # the last holder writes in place
    assert a.blocks == shared
    assert p.blocks_free == before


def test_two_holders_writing_in_one_step_need_one_copy():
    p = pool(num_blocks=3)
    a = p.allocate()
    grow(p, a, 200)
    b = p.fork(a)
    p.reserve([a, b], [1, 1])  # one block is free and one copy is enough
    assert a.blocks[1] != b.blocks[1]
    assert p.blocks_free == 0


def test_a_copy_that_does_not_fit_is_refused_before_anything_changes():
    p = pool(num_blocks=2)
    a = p.allocate()
    grow(p, a, 200)
    b = p.fork(a)
    before = snapshot(p)
    with pytest.raises(PoolFullError):
        p.reserve([b], [1])
    assert_unchanged(p, before)


def test_a_rejection_across_a_shared_full_block_does_not_leak():
    p = pool()
    a = p.allocate()
    grow(p, a, 256)
    b = p.fork(a)
    p.reject(a, 3)
    p.reserve([a], [3])  # rewrites the end of a block that b still holds in full
    assert a.blocks[1] != b.blocks[1]
    assert a.blocks[0] == b.blocks[0]


def test_fork_copies_rings_and_compressor_state():
    p = pool()
    a = p.allocate()
    p.rings[a.slot] = torch.randint(0, 256, p.rings[a.slot].shape, dtype=torch.uint8)
    p.compressor(2).data[a.slot].normal_()
    b = p.fork(a)
    assert torch.equal(p.rings[a.slot], p.rings[b.slot])
    assert torch.equal(p.compressor(2).data[a.slot], p.compressor(2).data[b.slot])
    p.rings[b.slot].fill_(1)
    assert not bool((p.rings[a.slot] == 1).all())


def test_rejection_is_bounded_by_what_the_rings_still_hold():
    p = pool()
    a = p.allocate()
    grow(p, a, 300)
    assert p.rollback_budget == 6
    p.reject(a, 2)
    p.reject(a, 4)
    before = snapshot(p)
    with pytest.raises(SlotRangeError, match="within 6 tokens"):
        p.reject(a, 1)
    assert_unchanged(p, before)
    grow(p, a, 2)  # the highest position written stays where it was
    with pytest.raises(SlotRangeError):
        p.reject(a, 3)
    p.reject(a, 2)
    with pytest.raises(SlotRangeError, match="length"):
        p.reject(a, 1000)


def test_rejection_releases_blocks_behind_the_new_end():
    p = pool()
    a = p.allocate()
    grow(p, a, 258)
    assert p.blocks_free == 5
    p.reject(a, 2)
    assert p.blocks_free == 6
    assert len(a.blocks) == 2


def test_a_reservation_survives_a_rejection():
    p = pool()
    a = p.allocate(300)
    grow(p, a, 6)
    p.reject(a, 5)
    assert len(a.blocks) == 3
    assert p.blocks_free == 5


def test_misuse_is_a_clear_error_and_changes_nothing():
    p, other = pool(), pool()
    a, stranger = p.allocate(), other.allocate()
    freed = p.allocate()
    p.free(freed)
    before = snapshot(p)
    for sequences, rows, error in (
        ([freed], [1], StateError),
        ([stranger], [1], StateError),
        ([a, a], [1, 1], StateError),
        ([a], [1, 2], ShapeError),
        ([a], [TINY.max_position_embeddings + 1], SlotRangeError),
        (["a"], [1], ArgumentError),
    ):
        with pytest.raises(error):
            p.reserve(sequences, rows)
    for call in (lambda: p.free(freed), lambda: p.free(stranger), lambda: p.fork(freed), lambda: p.reject(freed, 0)):
        with pytest.raises(StateError):
            call()
    with pytest.raises(SlotRangeError):
        p.allocate(TINY.max_position_embeddings + 1)
    assert_unchanged(p, before)


def test_a_long_random_life_keeps_the_books():
    """Against a model of the pool: every block's reference count, the free counts, and who shares with whom."""
    rng = random.Random(3)
    config = replace(TINY, max_position_embeddings=1200)
    p = KVPool(config, num_blocks=12, num_sequences=5, layers=[0, 2, 20])
    live, refused = [], 0
    for _ in range(3000):
        action = rng.choice(("allocate", "grow", "grow", "grow", "fork", "reject", "free"))
        try:
            if action == "allocate":
                live.append(p.allocate(rng.choice((0, 0, 130))))
            elif action == "free" and live:
                p.free(live.pop(rng.randrange(len(live))))
            elif action == "fork" and live:
                live.append(p.fork(rng.choice(live)))
            elif action == "grow" and live:
                chosen = rng.sample(live, rng.randint(1, len(live)))
                rows = [rng.choice((1, 6, 127, 128, 300)) for _ in chosen]
                p.reserve(chosen, rows)
                for sequence, count in zip(chosen, rows, strict=True):
                    first = sequence.length // 128
                    sequence.length += count
                    sequence.written = max(sequence.written, sequence.length)
                    # what is about to be written belongs to nobody else
                    assert all(p.references(b) == 1 for b in sequence.blocks[first:])
            elif action == "reject" and live:
                p.reject(rng.choice(live), rng.randint(0, 8))
        except (PoolFullError, SlotRangeError):
            refused += 1
        held = [b for s in live for b in s.blocks]
        assert [p.references(b) for b in range(12)] == [held.count(b) for b in range(12)]
        assert p.blocks_free == 12 - len(set(held))
        assert p.slots_free == 5 - len(live)
        assert p.bytes_used == len(set(held)) * p.block_bytes + len(live) * p.slot_bytes
        assert all(s.length <= len(s.blocks) * 128 for s in live)
        assert len({s.slot for s in live}) == len(live)
    assert refused > 100  # the pool was full often enough to matter
    for sequence in live:
        p.free(sequence)
    assert p.bytes_used == 0
