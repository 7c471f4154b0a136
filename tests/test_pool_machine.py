# SPDX-License-Identifier: Apache-2.0
"""The pool and the compressor driven by random programs, against plain-Python models of what they promise."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sparse_mla import compress
from sparse_mla.attention.config import BLOCK_TOKENS, V41Config
from sparse_mla.attention.pool import KVPool
from sparse_mla.dispatch import presence
from sparse_mla.errors import PoolFullError, SlotRangeError, StateError
from sparse_mla.ops.compress import CompressorState

QUICK = settings(
    deadline=None,
    max_examples=25,
    stateful_step_count=30,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
LONG = settings(QUICK, max_examples=400, stateful_step_count=60)
CONFIG = replace(V41Config.tiny(), max_position_embeddings=700)


class PoolMachine(RuleBasedStateMachine):
    """Sequences as lists of token stamps. Each token's stamp is written into its entry of a block; a sequence must read
    its own stamps whatever the others do, and the books must add up after every step.
    """

    blocks, slots = 7, 4

    @initialize()
    def start(self) -> None:
        self.pool = KVPool(CONFIG, num_blocks=self.blocks, num_sequences=self.slots, rows_per_step=3, layers=[2])
        self.cache = self.pool.index(2)  # ratio 2: 64 entries per block, one per two tokens
        self.live: list[dict] = []
        self.stamp = 1

    def pick(self, data) -> dict:
        return data.draw(st.sampled_from(self.live))

    def held(self) -> set[int]:
        return {block for one in self.live for block in one["sequence"].blocks}

    def refused(self, call, *kinds) -> bool:
        """Run; when it raises one of `kinds`, the books must be as they were."""
        before = self.books()
        try:
            call()
        except kinds:
            assert self.books() == before
            return True
        return False

    def books(self):
        pool = self.pool
        return (
            pool.blocks_free,
            pool.slots_free,
            pool.bytes_used,
            [pool.references(b) for b in range(pool.num_blocks)],
            [(s.slot, list(s.blocks), s.length, s.written, s.state) for s in pool.sequences],
        )

    def has_room(self, one: dict, rows: int) -> bool:
        """The model's own count of what `rows` more tokens take: new blocks, and copies of shared ones."""
        sequence = one["sequence"]
        needed = math.ceil((len(one["tokens"]) + rows) / BLOCK_TOKENS)
        new = max(0, needed - len(sequence.blocks))
        touched = range(len(one["tokens"]) // BLOCK_TOKENS, min(needed, len(sequence.blocks)))
        copies = sum(1 for i in touched if sum(sequence.blocks[i] in o["sequence"].blocks for o in self.live) > 1)
        return new + copies <= self.pool.num_blocks - len(self.held())

    @rule(tokens=st.integers(0, 3 * BLOCK_TOKENS))
    def allocate(self, tokens: int) -> None:
        needed = math.ceil(tokens / BLOCK_TOKENS)
        fits = len(self.live) < self.slots and needed <= self.blocks - len(self.held())
        made = []
        refused = self.refused(lambda: made.append(self.pool.allocate(tokens)), PoolFullError)
        assert refused != fits
        if fits:
            self.live.append({"sequence": made[0], "tokens": [], "reserved": needed, "written": 0})

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data) -> None:
        one = self.pick(data)
        made = []
        refused = self.refused(lambda: made.append(self.pool.fork(one["sequence"])), PoolFullError)
        assert refused == (len(self.live) == self.slots)
        if made:
            twin = {"sequence": made[0], "tokens": list(one["tokens"]), "reserved": 0, "written": one["written"]}
            self.live.append(twin)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), rows=st.integers(0, 2 * BLOCK_TOKENS + 5))
    def append(self, data, rows: int) -> None:
        one = self.pick(data)
        sequence, old = one["sequence"], len(one["tokens"])
        if old + rows > CONFIG.max_position_embeddings:
            assert self.refused(lambda: self.pool.reserve([sequence], [rows]), SlotRangeError)
            return
        fits = self.has_room(one, rows)
        assert self.refused(lambda: self.pool.reserve([sequence], [rows]), PoolFullError) != fits
        if not fits:
            return
        one["tokens"] += range(self.stamp, self.stamp + rows)
        self.stamp += rows
        self.write(one, old)
        sequence.length = len(one["tokens"])
        one["written"] = sequence.written = max(sequence.written, sequence.length)

    def write(self, one: dict, start: int) -> None:
        """Write the entries of the tokens from `start` on, as a step does: entry c when token 2c + 1 is there."""
        for token in range(start, len(one["tokens"])):
            if token % 2:
                page, offset = divmod(token // 2, self.cache.page_size)
                stamp = one["tokens"][token].to_bytes(4, "little")
                data = self.cache.parts()[0][0]
                data[one["sequence"].blocks[page], offset, :4] = torch.tensor(list(stamp), dtype=torch.uint8)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=st.integers(0, 8))
    def reject(self, data, tokens: int) -> None:
        one = self.pick(data)
        length = len(one["tokens"]) - tokens
        allowed = length >= 0 and (tokens == 0 or one["written"] - length <= self.pool.rollback_budget)
        refused = self.refused(lambda: self.pool.reject(one["sequence"], tokens), SlotRangeError)
        assert refused != allowed
        if allowed:
            del one["tokens"][length:]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data) -> None:
        one = self.pick(data)
        self.live.remove(one)
        self.pool.free(one["sequence"])
        assert self.refused(lambda: self.pool.free(one["sequence"]), StateError)
        assert self.refused(lambda: self.pool.reserve([one["sequence"]], [1]), StateError)

    @precondition(lambda self: len(self.live) >= 2)
    @rule(rows=st.integers(1, BLOCK_TOKENS))
    def append_all_or_nothing(self, rows: int) -> None:
        """A step of every sequence at once: refused as a whole, or room for all."""
        sequences = [one["sequence"] for one in self.live]
        if any(len(one["tokens"]) + rows > CONFIG.max_position_embeddings for one in self.live):
            return
        if self.refused(lambda: self.pool.reserve(sequences, [rows] * len(sequences)), PoolFullError):
            return
        for one in self.live:
            old = len(one["tokens"])
            one["tokens"] += range(self.stamp, self.stamp + rows)
            self.stamp += rows
            self.write(one, old)
            one["sequence"].length = len(one["tokens"])
            one["written"] = one["sequence"].written = max(one["sequence"].written, len(one["tokens"]))

    @invariant()
    def books_add_up(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool, counts = self.pool, [0] * self.blocks
        for one in self.live:
            sequence = one["sequence"]
            assert sequence.length == len(one["tokens"])
            assert len(set(sequence.blocks)) == len(sequence.blocks)
            assert len(sequence.blocks) >= math.ceil(len(one["tokens"]) / BLOCK_TOKENS)
            for block in sequence.blocks:
                counts[block] += 1
        assert counts == [pool.references(b) for b in range(self.blocks)]
        assert pool.blocks_free == counts.count(0)
        assert pool.slots_free == self.slots - len(self.live)
        assert len({one["sequence"].slot for one in self.live}) == len(self.live)
        used = sum(1 for c in counts if c) * pool.block_bytes + len(self.live) * pool.slot_bytes
        assert pool.bytes_used == used
        assert {s.slot for s in pool.sequences} == {one["sequence"].slot for one in self.live}

    @invariant()
    def everybody_reads_their_own(self) -> None:
        if not hasattr(self, "pool"):
            return
        data = self.cache.parts()[0][0]
        for one in self.live:
            entries = len(one["tokens"]) // 2
            if not entries:
                continue
            place = torch.arange(entries)
            blocks = torch.tensor(one["sequence"].blocks)[place // self.cache.page_size]
            raw = data[blocks, place % self.cache.page_size, :4].to(torch.int64)
            read = (raw << torch.tensor([0, 8, 16, 24])).sum(1).tolist()
            assert read == one["tokens"][1::2][:entries]


class CompressorMachine(RuleBasedStateMachine):
    """Sequences as the rows they accepted. Whatever was drafted, rejected, exported and restored, a group's pooled row
    is the softmax pooling of its accepted rows.
    """

    backend = "reference"
    slots, ratio, most, dim = 3, 3, 4, 8

    @initialize()
    def start(self) -> None:
        self.state = CompressorState.allocate(self.slots, self.ratio, max_rows=self.most, dim=self.dim)
        self.rows: list[list[torch.Tensor]] = [[] for _ in range(self.slots)]  # [2, dim] each: score, latent
        self.highest = [0] * self.slots  # one past the last position ever written
        self.saved: list[tuple[torch.Tensor, list[torch.Tensor], int]] = []
        self.random = torch.Generator().manual_seed(1)

    def fresh(self, count: int) -> list[torch.Tensor]:
        return list(torch.randn(count, 2, self.dim, generator=self.random))

    def expected(self, rows: list[torch.Tensor], group: int) -> torch.Tensor:
        part = torch.stack(rows[group * self.ratio : (group + 1) * self.ratio]).double()
        weight = torch.softmax(part[:, 0], dim=0)
        return (weight * part[:, 1]).sum(0)

    def check(self, found, owners: list[int]) -> None:
        """Every group that closed, by its owner's rows. owners: the slot of sequence number i."""
        for row in range(found.rows.shape[0]):
            if not bool(found.closes[row]):
                assert not found.rows[row].any()
                continue
            group = int(found.positions[row]) // self.ratio
            wanted = self.expected(self.rows[owners[int(found.sequences[row])]], group)
            assert torch.allclose(found.rows[row].double(), wanted, rtol=1e-5, atol=1e-6)

    @rule(data=st.data())
    def decode(self, data) -> None:
        """A verification step: some slots, up to `most` rows each, of which the model keeps a drawn number."""
        chosen = data.draw(st.lists(st.integers(0, self.slots - 1), unique=True, min_size=1, max_size=self.slots))
        score, latent, slots, lens, owners, accepted = [], [], [], [], [], {}
        for slot in chosen:
            count = data.draw(st.integers(1, self.most))
            new = self.fresh(count)
            accepted[slot] = data.draw(st.integers(1, count))
            for i, row in enumerate(new):
                score.append(row[0])
                latent.append(row[1])
                slots.append(slot)
                lens.append(len(self.rows[slot]) + i + 1)
                owners.append(slot)
            self.rows[slot] = self.rows[slot] + new
            self.highest[slot] = max(self.highest[slot], len(self.rows[slot]))
        found = compress(
            torch.stack(score),
            torch.stack(latent),
            self.state,
            torch.tensor(slots, dtype=torch.int32),
            torch.tensor(lens, dtype=torch.int32),
            out_dtype=torch.float32,
            backend=self.backend,
        )
        assert int(found.closes.sum()) == sum(length % self.ratio == 0 for length in lens)
        self.check(found, owners)
        for slot in chosen:  # reject: the length moves back, nothing else
            rejected = slots.count(slot) - accepted[slot]
            if rejected:
                del self.rows[slot][-rejected:]

    @rule(slot=st.integers(0, 2), count=st.integers(0, 11))
    def prefill(self, slot: int, count: int) -> None:
        new = self.fresh(count)
        before = len(self.rows[slot])
        self.rows[slot] = self.rows[slot] + new
        self.highest[slot] = max(self.highest[slot], len(self.rows[slot]))
        stacked = torch.stack(new) if new else torch.zeros(0, 2, self.dim)
        found = compress(
            stacked[:, 0].contiguous(),
            stacked[:, 1].contiguous(),
            self.state,
            torch.tensor([slot], dtype=torch.int32),
            torch.tensor([len(self.rows[slot])], dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32),
            out_dtype=torch.float32,
            backend=self.backend,
        )
        assert int(found.closes.sum()) == len(self.rows[slot]) // self.ratio - before // self.ratio
        self.check(found, [slot])

    @rule(slot=st.integers(0, 2))
    def export(self, slot: int) -> None:
        self.saved = [*self.saved[-3:], (self.state.export(slot), list(self.rows[slot]), self.highest[slot])]

    @precondition(lambda self: self.saved)
    @rule(data=st.data(), slot=st.integers(0, 2))
    def restore(self, data, slot: int) -> None:
        snapshot, rows, highest = data.draw(st.sampled_from(self.saved))
        self.state.restore(slot, snapshot)
        self.rows[slot], self.highest[slot] = list(rows), highest

    @rule(slot=st.integers(0, 2))
    def recycle(self, slot: int) -> None:
        """A new sequence in an old slot: nothing is cleared."""
        self.rows[slot], self.highest[slot] = [], 0

    @rule(slot=st.integers(0, 2))
    def too_many_rows(self, slot: int) -> None:
        """One row more than the state was made for is refused, and the state is as it was."""
        before, count = self.state.data.clone(), self.most + 1
        lens = torch.arange(len(self.rows[slot]) + 1, len(self.rows[slot]) + count + 1, dtype=torch.int32)
        x = torch.ones(count, self.dim)
        with pytest.raises(StateError):
            compress(x, x, self.state, torch.full((count,), slot, dtype=torch.int32), lens, backend=self.backend)
        assert torch.equal(self.state.data, before)


class NativeCompressorMachine(CompressorMachine):
    backend = "native"


def case(machine, profile):
    made = type(f"{machine.__name__}Test", (machine.TestCase,), {})
    made.settings = profile
    return made


class TestPool(case(PoolMachine, QUICK)):
    pass


class TestCompressor(case(CompressorMachine, QUICK)):
    pass


@pytest.mark.skipif(bool(presence("native")), reason=f"native: {presence('native')}")
class TestNativeCompressor(case(NativeCompressorMachine, QUICK)):
    pass


@pytest.mark.full
class TestPoolLong(case(PoolMachine, LONG)):
    pass


@pytest.mark.full
class TestCompressorLong(case(CompressorMachine, LONG)):
    pass
