# SPDX-License-Identifier: Apache-2.0
"""`compress` and its state: golden steps, chunking, several sequences, drafts with rollback, padding, export and
restore, bad input.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from sparse_mla.errors import ArgumentError, DTypeError, ShapeError, SlotRangeError, StateError
from sparse_mla.ops.compress import COMPRESS, CompressCall, CompressorState, compress
from sparse_mla.ops.softmax_pool import softmax_pool

VECTORS = json.loads((Path(__file__).parent / "data" / "vectors" / "compress.json").read_text())
BACKENDS = sorted({i.backend for i in COMPRESS.candidates("auto")})
DIM = 8


def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


class Sequence(NamedTuple):
    """All rows a sequence will ever feed the compressor."""

    score: torch.Tensor
    latent: torch.Tensor

    @classmethod
    def random(cls, length: int, seed: int = 0, dim: int = DIM) -> Sequence:
        g = torch.Generator().manual_seed(seed)
        return cls(torch.randn(length, dim, generator=g) * 3, torch.randn(length, dim, generator=g))

    def groups(self, ratio: int, backend: str | None = None) -> torch.Tensor:
        """Every closed group, pooled at once by the same backend, float32."""
        count = self.score.shape[0] // ratio
        shape = (count, ratio, self.score.shape[1])
        score, latent = (t[: count * ratio].reshape(shape) for t in self)
        return softmax_pool(score, latent, out_dtype=torch.float32, backend=backend)


def decode(state, sequence, slot, start, stop, *, backend=None):
    """One decode step of positions start .. stop - 1 of one sequence."""
    rows = stop - start
    return compress(
        sequence.score[start:stop],
        sequence.latent[start:stop],
        state,
        torch.full((rows,), slot, dtype=torch.int32),
        torch.arange(start + 1, stop + 1, dtype=torch.int32),
        out_dtype=torch.float32,
        backend=backend,
    )


def prefill(state, parts, *, num_out=None, backend=None):
    """One prefill step of parts (sequence, slot, start, stop)."""
    cu = [0]
    for _, _, start, stop in parts:
        cu.append(cu[-1] + stop - start)
    return compress(
        torch.cat([s.score[a:b] for s, _, a, b in parts]),
        torch.cat([s.latent[a:b] for s, _, a, b in parts]),
        state,
        ints(*[slot for _, slot, _, _ in parts]),
        ints(*[stop for _, _, _, stop in parts]),
        cu_seqlens_q=ints(*cu),
        num_out=num_out,
        out_dtype=torch.float32,
        backend=backend,
    )


def check_groups(result, sequence, ratio, *, sequence_number=None, backend=None):
    """Every row that closes equals its group pooled at once; every other row is 0. Returns the entries that closed."""
    expected = sequence.groups(ratio, backend)
    entries = []
    for row in range(result.rows.shape[0]):
        if sequence_number is not None and int(result.sequences[row]) != sequence_number:
            continue
        position = int(result.positions[row])
        if bool(result.closes[row]):
            assert position % ratio == 0
            assert torch.equal(result.rows[row], expected[position // ratio])
            entries.append(position // ratio)
        else:
            assert position == 0
            assert not result.rows[row].any()
    return entries


@pytest.mark.parametrize("backend", BACKENDS)
def test_golden_steps(backend):
    """Prefill of two sequences, prefill with history, decode, six rows with three closings, and a rollback; rows as
    bfloat16 and state bit for bit."""
    ratio = VECTORS["R"]
    state = CompressorState.of(torch.zeros(VECTORS["slots"], VECTORS["ring"], 2, VECTORS["D"]), ratio)
    kinds = []
    for step in VECTORS["steps"]:
        score, latent = torch.tensor(step["score"]), torch.tensor(step["latent"])
        kinds.append(step["op"])
        if step["op"] == "prefill":
            slots, new, total = zip(*step["seqs_slot_qlen_klen"], strict=True)
            cu = torch.tensor([0, *new]).cumsum(0).to(torch.int32)
            num_out = sum(max(1, k // ratio - (k - n) // ratio) for n, k in zip(new, total, strict=True))
            got = compress(
                score, latent, state, ints(*slots), ints(*total), cu_seqlens_q=cu, num_out=num_out, backend=backend
            )
        else:
            slots, lens = zip(*step["tokens_slot_contextlen"], strict=True)
            got = compress(score, latent, state, ints(*slots), ints(*lens), backend=backend)
            assert got.closes.tolist() == [n % ratio == 0 for n in lens]
            assert got.positions.tolist() == [n - ratio if n % ratio == 0 else 0 for n in lens]
        assert got.rows.dtype == torch.bfloat16
        assert bytes(got.rows.view(torch.uint8).flatten().tolist()).hex() == step["expected_rows_bf16le"]
        assert torch.equal(state.data, torch.tensor(step["state_after"]))
    assert kinds == ["prefill", "prefill", "decode", "decode", "decode"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 7])
def test_any_chunking_gives_the_groups_of_one_pass(ratio, backend):
    sequence = Sequence.random(6 * ratio + 3, ratio)
    length = sequence.score.shape[0]
    for chunk in (1, 2, 3, ratio, ratio + 1, length):
        state = CompressorState.allocate(3, ratio, max_rows=2, dim=DIM)
        entries = []
        for start in range(0, length, chunk):
            got = prefill(state, [(sequence, 1, start, min(start + chunk, length))], backend=backend)
            entries += check_groups(got, sequence, ratio, sequence_number=0, backend=backend)
        assert entries == list(range(length // ratio))
        assert not state.data[[0, 2]].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_decode_continues_prefill(ratio, backend):
    sequence = Sequence.random(40, 9)
    for prompt in range(0, 2 * ratio + 2):
        state = CompressorState.allocate(2, ratio, max_rows=6, dim=DIM)
        entries = check_groups(
            prefill(state, [(sequence, 0, 0, prompt)], backend=backend), sequence, ratio, backend=backend
        )
        position = prompt
        for rows in (1, 6, 2, 5, 6):
            got = decode(state, sequence, 0, position, position + rows, backend=backend)
            entries += check_groups(got, sequence, ratio, backend=backend)
            position += rows
        assert entries == list(range(position // ratio))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 128])
@pytest.mark.parametrize("drafts", range(1, 9))
def test_rejected_drafts_leave_no_trace(drafts, ratio, backend):
    """Verify 1 + drafts rows, keep any number of them, none included, and continue: rows equal one pass over what was
    kept.
    """
    prefixes = range(2 * ratio + 2) if ratio < 128 else (0, 1, 126, 127, 128, 200)
    accepted_counts = range(drafts + 2) if ratio < 128 else (0, 1, drafts + 1)
    for prefix in prefixes:
        for accepted in accepted_counts:
            state = CompressorState.allocate(1, ratio, max_rows=drafts + 1, dim=2)
            truth = Sequence.random(prefix + accepted + 2 * min(ratio, 4) + drafts, 1, dim=2)
            wrong = Sequence.random(prefix + drafts + 1, 2, dim=2)
            kept = prefix + accepted
            draft = Sequence(*[torch.cat([t[:kept], w[kept:]]) for t, w in zip(truth, wrong, strict=True)])
            if prefix:
                prefill(state, [(truth, 0, 0, prefix)], backend=backend)
            decode(state, draft, 0, prefix, prefix + drafts + 1, backend=backend)
            for start in range(kept, truth.score.shape[0] - drafts, drafts + 1):
                check_groups(
                    decode(state, truth, 0, start, start + drafts + 1, backend=backend), truth, ratio, backend=backend
                )


def test_the_smallest_ring_is_needed():
    """One row less than ratio + rows - 1, and a rejected step has overwritten a row that the next group needs."""
    ratio, drafts, prefix = 4, 5, 7
    truth, wrong = Sequence.random(prefix + 8, 1), Sequence.random(prefix + drafts + 1, 2)
    draft = Sequence(*[torch.cat([t[:prefix], w[prefix:]]) for t, w in zip(truth, wrong, strict=True)])
    outcomes = []
    for ring in (ratio + drafts, ratio + drafts - 1):
        # max_rows understated on purpose, which lets the short ring through; then rows one by one
        state = CompressorState.of(torch.zeros(1, ring, 2, DIM), ratio, max_rows=1)
        prefill(state, [(truth, 0, 0, prefix)])
        for position in range(prefix, prefix + drafts + 1):
            decode(state, draft, 0, position, position + 1)
        closing = decode(state, truth, 0, prefix, prefix + 1)
        outcomes.append(torch.equal(closing.rows[0], truth.groups(ratio)[1]))
    assert outcomes == [True, False]


@pytest.mark.parametrize("ratio", [1, 2, 4, 128])
@pytest.mark.parametrize("max_rows", [1, 2, 6, 9])
def test_a_ring_too_short_for_the_drafts_is_refused(ratio, max_rows):
    ring = ratio + max_rows - 1
    assert CompressorState.allocate(2, ratio, max_rows=max_rows).ring == ring
    assert CompressorState.of(torch.zeros(2, ring, 2, DIM), ratio).max_rows == max_rows
    for short in range(max(1, ring - 2), ring):
        with pytest.raises(ArgumentError, match="ring must hold ratio"):
            CompressorState.of(torch.zeros(2, short, 2, DIM), ratio, max_rows=max_rows)
        crafted = CompressorState(torch.zeros(2, short, 2, DIM), ratio, max_rows)
        with pytest.raises(ArgumentError, match="compress: the state's ring"):
            compress(torch.zeros(1, DIM), torch.zeros(1, DIM), crafted, ints(0), ints(1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_rows_than_the_state_was_made_for_are_refused(backend):
    state = CompressorState.allocate(2, 2, max_rows=3, dim=DIM)
    sequence = Sequence.random(9)
    before = state.data.clone()
    with pytest.raises(StateError, match="at most 3 rows per sequence"):
        decode(state, sequence, 1, 0, 4, backend=backend)
    assert torch.equal(state.data, before)
    decode(state, sequence, 1, 0, 3, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ratio", [2, 3])
def test_one_varlen_batch_equals_the_sequences_one_by_one(ratio, backend):
    """Lengths 1 .. 2R + 1, the first full group among them, as prompts and then as one decode step each."""
    lengths = list(range(1, 2 * ratio + 2))
    together = CompressorState.allocate(len(lengths), ratio, max_rows=6, dim=DIM)
    sequences = [Sequence.random(n + 3, seed=n) for n in lengths]
    slots = list(reversed(range(len(lengths))))
    got = prefill(
        together, [(s, slot, 0, n) for s, slot, n in zip(sequences, slots, lengths, strict=True)], backend=backend
    )
    owned = [max(1, n // ratio) for n in lengths]
    assert got.sequences[: sum(owned)].tolist() == [i for i, count in enumerate(owned) for _ in range(count)]
    assert not (got.sequences[sum(owned) :] != -1).any()
    for i, (sequence, slot, n) in enumerate(zip(sequences, slots, lengths, strict=True)):
        alone = CompressorState.allocate(len(lengths), ratio, max_rows=6, dim=DIM)
        single = prefill(alone, [(sequence, slot, 0, n)], backend=backend)
        mine = got.sequences == i
        assert torch.equal(got.rows[mine], single.rows[: owned[i]])
        assert torch.equal(got.closes[mine], single.closes[: owned[i]])
        assert torch.equal(together.data[slot], alone.data[slot])
        assert check_groups(got, sequence, ratio, sequence_number=i, backend=backend) == list(range(n // ratio))
    rows = [(i, n, n + 1 + i % 3) for i, n in enumerate(lengths)]
    step = compress(
        torch.cat([sequences[i].score[a:b] for i, a, b in rows]),
        torch.cat([sequences[i].latent[a:b] for i, a, b in rows]),
        together,
        torch.tensor([slots[i] for i, a, b in rows for _ in range(a, b)]),
        torch.tensor([p + 1 for _, a, b in rows for p in range(a, b)]),
        out_dtype=torch.float32,
        backend=backend,
    )
    row = 0
    for i, a, b in rows:
        for position in range(a, b):
            assert bool(step.closes[row]) == ((position + 1) % ratio == 0)
            if step.closes[row]:
                assert torch.equal(step.rows[row], sequences[i].groups(ratio, backend)[position // ratio])
            row += 1


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_a_group_is_visible_only_after_its_last_token(ratio):
    """Query position p may see entries below (p + 1) // R: exactly those that have closed by then."""
    sequence, state, closed = Sequence.random(9 * ratio), CompressorState.allocate(1, ratio, max_rows=1, dim=DIM), 0
    counts = []
    for position in range(9 * ratio):
        closed += int(decode(state, sequence, 0, position, position + 1).closes.sum())
        assert closed == (position + 1) // ratio
        counts.append(closed)
    if ratio == 2:
        assert counts[:7] == [0, 1, 1, 2, 2, 3, 3]
    if ratio == 4:
        assert counts[:7] == [0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_rows_are_neither_stored_nor_pooled(backend):
    sequence = Sequence.random(8)
    state, plain = (CompressorState.allocate(2, 2, max_rows=3, dim=DIM) for _ in range(2))
    score, latent = (
        torch.cat([torch.full((1, DIM), float("nan")), t[:2], torch.full((2, DIM), float("nan"))]) for t in sequence
    )
    padded = compress(score, latent, state, ints(-1, 1, 1, -1, -1), ints(0, 1, 2, 2, -5), out_dtype=torch.float32,
                      backend=backend)  # fmt: skip
    alone = decode(plain, sequence, 1, 0, 2, backend=backend)
    assert torch.equal(state.data, plain.data)
    assert torch.equal(padded.rows[1:3], alone.rows)
    assert not padded.rows[[0, 3, 4]].any()
    assert padded.closes.tolist() == [False, False, True, False, False]
    assert padded.sequences.tolist() == [-1, 1, 2, -1, -1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_prefill_padding(backend):
    """Rows past the last sequence, a sequence without new rows, one without a slot, and spare output rows."""
    a, b = Sequence.random(9, 1), Sequence.random(6, 2)
    state = CompressorState.allocate(2, 2, dim=DIM)
    prefill(state, [(a, 1, 0, 3)], backend=backend)
    before = state.data.clone()
    tail = torch.full((3, DIM), float("nan"))
    got = compress(
        torch.cat([a.score[3:7], b.score[:5], tail]),
        torch.cat([a.latent[3:7], b.latent[:5], tail]),
        state,
        ints(1, 0, -1),
        ints(7, 0, 5),
        cu_seqlens_q=ints(0, 4, 4, 9),
        num_out=8,
        out_dtype=torch.float32,
        backend=backend,
    )
    assert got.sequences.tolist() == [0, 0, 1, 2, 2, -1, -1, -1]
    assert got.closes.tolist() == [True, True, False, True, True, False, False, False]
    assert got.positions.tolist() == [2, 4, 0, 0, 2, 0, 0, 0]
    assert check_groups(got, a, 2, sequence_number=0, backend=backend) == [1, 2]
    assert check_groups(got, b, 2, sequence_number=2, backend=backend) == [0, 1]
    assert torch.equal(state.data[0], before[0])
    assert not torch.equal(state.data[1], before[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_prefill_longer_than_the_ring_keeps_its_last_rows(backend):
    sequence = Sequence.random(50)
    state = CompressorState.allocate(1, 3, max_rows=4, dim=DIM)  # ring 6
    prefill(state, [(sequence, 0, 0, 50)], backend=backend)
    for position in range(44, 50):
        assert torch.equal(state.data[0, position % 6, 0], sequence.score[position])
        assert torch.equal(state.data[0, position % 6, 1], sequence.latent[position])


def test_an_exported_ring_continues_in_another_state():
    sequence = Sequence.random(30)
    first, second = (CompressorState.allocate(n, 3, max_rows=4, dim=DIM) for n in (2, 5))
    prefill(first, [(sequence, 1, 0, 13)])
    snapshot = first.export(1)
    first.data.fill_(float("nan"))  # the snapshot is a copy
    second.restore(4, snapshot)
    entries = check_groups(decode(second, sequence, 4, 13, 17), sequence, 3)
    entries += check_groups(prefill(second, [(sequence, 4, 17, 30)]), sequence, 3)
    assert entries == [4, 5, 6, 7, 8, 9][: len(entries)]
    assert len(entries) == 6
    for slot in (-1, 5):
        with pytest.raises(SlotRangeError, match="slot must be in"):
            second.export(slot)
        with pytest.raises(SlotRangeError, match="slot must be in"):
            second.restore(slot, snapshot)
    with pytest.raises(ShapeError, match="snapshot"):
        second.restore(0, snapshot[:-1])


def test_a_recycled_slot_needs_no_clearing():
    sequence = Sequence.random(12)
    state = CompressorState.of(torch.full((1, 7, 2, DIM), float("nan")), 2)
    entries = check_groups(prefill(state, [(sequence, 0, 0, 5)]), sequence, 2)
    entries += check_groups(decode(state, sequence, 0, 5, 11), sequence, 2)
    assert entries == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("backend", BACKENDS)
def test_state_may_be_a_strided_view(backend):
    sequence = Sequence.random(20)
    pool = torch.full((3, 2, 7, 2, DIM), 5.0)  # two layers' rings in each slot
    view, plain = CompressorState.of(pool[:, 1], 2), CompressorState.allocate(3, 2, dim=DIM)
    for state in (view, plain):
        prefill(state, [(sequence, 2, 0, 7)], backend=backend)
    for start in (7, 11):
        got, expected = (decode(s, sequence, 2, start, start + 4, backend=backend) for s in (view, plain))
        assert torch.equal(got.rows, expected.rows)
    assert torch.equal(pool[2, 1], plain.data[2])
    assert bool((pool[:, 0] == 5.0).all())
    assert bool((pool[:2, 1] == 5.0).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_limit_changes_nothing(backend):
    sequence = Sequence.random(4000, dim=64)
    results = []
    for limit in (None, 1 << 20):
        state = CompressorState.allocate(1, 2, dim=64)
        results.append(
            compress(
                sequence.score,
                sequence.latent,
                state,
                ints(0),
                ints(4000),
                cu_seqlens_q=ints(0, 4000),
                memory_limit=limit,
                backend=backend,
            )
        )
    assert torch.equal(results[0].rows, results[1].rows)


def test_autocast_changes_nothing():
    sequence = Sequence.random(12)
    outside, inside = (CompressorState.allocate(1, 2, dim=DIM) for _ in range(2))
    expected = prefill(outside, [(sequence, 0, 0, 12)])
    with torch.autocast("cpu", torch.bfloat16):
        got = prefill(inside, [(sequence, 0, 0, 12)])
    assert torch.equal(got.rows, expected.rows)
    assert torch.equal(inside.data, outside.data)


def test_compiles_without_breaks_and_passes_opcheck():
    sequence = Sequence.random(12)
    eager, compiled = (CompressorState.allocate(2, 2, dim=DIM) for _ in range(2))

    def step(state, score, latent, slots, lens):
        return compress(score, latent, state, slots, lens)

    traced = torch.compile(step, fullgraph=True, backend="aot_eager")
    for start in (0, 6):
        arguments = (sequence.score[start : start + 6], sequence.latent[start : start + 6])
        index = (torch.ones(6, dtype=torch.int32), torch.arange(start + 1, start + 7, dtype=torch.int32))
        expected, got = step(eager, *arguments, *index), traced(compiled, *arguments, *index)
        for a, b in zip(expected, got, strict=True):
            assert torch.equal(a, b)
        assert torch.equal(eager.data, compiled.data)
    operator = torch.ops.sparse_mla.compress_reference.default
    torch.library.opcheck(operator, CompressCall.check(*arguments, eager, *index).flat())
    call = CompressCall.check(*arguments, eager, ints(1), ints(6), cu_seqlens_q=ints(0, 6))
    torch.library.opcheck(operator, call.flat())


def good():
    return {
        "score": torch.zeros(3, DIM),
        "latent": torch.zeros(3, DIM),
        "state": CompressorState.allocate(2, 2, max_rows=6, dim=DIM),
        "state_slots": ints(0, 1, 1),
        "context_lens": ints(4, 7, 8),
    }


ONE = {"state_slots": ints(1), "context_lens": ints(3), "cu_seqlens_q": ints(0, 3)}  # a good prefill
BAD = {
    "score dtype": ({"score": torch.zeros(3, DIM).bfloat16()}, DTypeError, "score must be float32"),
    "score rank": ({"score": torch.zeros(3, 2, DIM)}, ShapeError, "score must be"),
    "latent rows": ({"latent": torch.zeros(2, DIM)}, ShapeError, "latent must be"),
    "channels differ from the state": (
        {"score": torch.zeros(3, 4), "latent": torch.zeros(3, 4)},
        ShapeError,
        "score must be",
    ),
    "bare state": ({"state": torch.zeros(2, 7, 2, DIM)}, ArgumentError, "CompressorState"),
    "state dtype": ({"state": CompressorState(torch.zeros(2, 7, 2, DIM).half(), 2, 6)}, DTypeError, "state.data"),
    "state planes": ({"state": CompressorState(torch.zeros(2, 7, 3, DIM), 2, 6)}, ShapeError, "state.data"),
    "slots per row": ({"state_slots": ints(0, 1)}, ShapeError, "state_slots"),
    "slots dtype": ({"state_slots": torch.zeros(3)}, DTypeError, "state_slots"),
    "lens per row": ({"context_lens": ints(0, 1)}, ShapeError, "context_lens"),
    "slot too large": ({"state_slots": ints(0, 2, 2)}, SlotRangeError, "got 2"),
    "slot too small": ({"state_slots": ints(0, -2, -2)}, SlotRangeError, "got -2"),
    "length zero": ({"context_lens": ints(0, 7, 8)}, SlotRangeError, "at least 1"),
    "rows not in order": ({"context_lens": ints(4, 8, 7)}, StateError, "growing by one"),
    "rows with a hole": ({"context_lens": ints(4, 7, 9)}, StateError, "growing by one"),
    "rows apart": ({"state_slots": ints(1, 0, 1)}, StateError, "consecutive"),
    "num_out in decode": ({"num_out": 5}, ArgumentError, "num_out"),
    "cu_seqlens length": (ONE | {"cu_seqlens_q": ints(0, 1, 3)}, ShapeError, "cu_seqlens_q"),
    "cu_seqlens start": (ONE | {"cu_seqlens_q": ints(1, 3)}, SlotRangeError, "cu_seqlens_q"),
    "cu_seqlens end": (ONE | {"cu_seqlens_q": ints(0, 4)}, SlotRangeError, "cu_seqlens_q"),
    "cu_seqlens falls": (
        {"state_slots": ints(0, 1), "context_lens": ints(3, 3), "cu_seqlens_q": ints(0, 3, 2)},
        SlotRangeError,
        "never fall",
    ),
    "fewer tokens than rows": (ONE | {"context_lens": ints(2)}, SlotRangeError, "context_lens"),
    "slot twice": (
        {"state_slots": ints(1, 1), "context_lens": ints(1, 2), "cu_seqlens_q": ints(0, 1, 3)},
        StateError,
        "once in a prefill",
    ),
    "history without a slot": (
        ONE | {"state_slots": ints(-1), "context_lens": ints(4)},
        StateError,
        "needs a state slot",
    ),
    "num_out below the sequences": (ONE | {"num_out": 0}, ArgumentError, "num_out"),
    "num_out below the groups": (ONE | {"context_lens": ints(4), "num_out": 1}, SlotRangeError, "at least 2"),
    "out dtype": ({"out_dtype": torch.float16}, ArgumentError, "out_dtype"),
    "grad": ({"score": torch.zeros(3, DIM, requires_grad=True)}, DTypeError, "require grad"),
    "device": ({"latent": torch.zeros(3, DIM, device="meta")}, ArgumentError, "must be on"),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_bad_input_leaves_the_state_alone(name):
    change, kind, text = BAD[name]
    compress(**good())
    compress(**(good() | ONE))
    arguments = good() | change
    state = arguments["state"].data if isinstance(arguments["state"], CompressorState) else arguments["state"]
    before = state.clone()
    with pytest.raises(kind, match=text) as caught:
        compress(**arguments)
    assert str(caught.value).startswith("compress: ")
    assert torch.equal(state, before)


@pytest.mark.parametrize(
    "build",
    [
        lambda: CompressorState.allocate(0, 2),
        lambda: CompressorState.allocate(1, 0),
        lambda: CompressorState.allocate(1, 2, max_rows=0),
        lambda: CompressorState.allocate(1, 2, dim=0),
        lambda: CompressorState.of(torch.zeros(1, 7, 2, DIM), 0),
        lambda: CompressorState.of(torch.zeros(1, 7, 2, DIM), 8),
        lambda: CompressorState.of(torch.zeros(1, 7, 2, DIM), 2, max_rows=0),
    ],
)
def test_bad_state_description(build):
    with pytest.raises(ArgumentError):
        build()
