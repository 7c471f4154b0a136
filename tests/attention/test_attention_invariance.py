# SPDX-License-Identifier: Apache-2.0
"""What must not matter does not matter: chunking, batching, how a token came, rejected drafts, forks, and whatever
memory held before.

Bit for bit on the reference backend. Elsewhere the order of a softmax's sums differs between prefill and decode, which
moves an output by
a rounding and, through a near tie, now and then a selection; there the bound is `LOOSE`, over the whole output of one
layer of each kind.
"""

import functools
import random
from functools import partial

import attention_oracle as oracle
import pytest
import torch
from attention_driver import BACKENDS, SMALL, Run, hidden_rows

from sparse_mla.attention import AttentionWeights, KVPool, Shard, StepMetadata, V41Attention, linear
from sparse_mla.attention.linear import quantize_activations, rms_norm
from sparse_mla.caches import gather_records
from sparse_mla.dispatch import presence
from sparse_mla.testing.timing import num_threads

LOOSE = 4e-3
SAME = [name for name in BACKENDS if name != "simulated"]  # the simulator runs the stage tests


def assert_same(found, expected, backend, what=""):
    if backend == "reference":
        assert torch.equal(found, expected), f"{what}: error {oracle.error(found, expected):.3g}"
    else:
        assert oracle.error(found, expected) <= LOOSE, what


def visible_state(run, sequence):
    """Every byte a later step may read: windows, entries, index keys, and the open group of each compressor."""
    length, pool = sequence.length, run.pool
    state = {}
    for layer in pool.layers:
        back = 128 if pool.topology[layer].kind == "draft" else 127
        positions = torch.arange(max(0, length - back), length)
        state["window", layer] = gather_records(pool.window(layer), sequence.slot * pool.ring + positions % pool.ring)
    for source in pool.sources:
        plan = pool.topology[source]
        page = 128 // plan.ratio
        entry = torch.arange(length // plan.ratio)
        slots = torch.tensor(sequence.blocks, dtype=torch.int64)[entry // page] * page + entry % page
        state["main", source] = gather_records(pool.main(source), slots)
        state["index", source] = gather_records(pool.index(source), slots)
        if plan.has_compressor_state:
            rows = torch.arange(length - length % plan.ratio, length)
            data = pool.compressor(source).data
            state["compressor", source] = data[sequence.slot, rows % data.shape[1]].clone()
    return state


def assert_same_state(run, sequence, other, twin, backend):
    a, b = visible_state(run, sequence), visible_state(other, twin)
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].shape == b[key].shape, key
        if backend == "reference":
            assert torch.equal(a[key], b[key]), key
        elif a[key].numel() and key[0] != "compressor":
            assert float((a[key] == b[key]).float().mean()) > 0.9, key


@functools.cache
def one_shot(backend, count):
    """A prompt in one step; the run is only looked at afterwards, so tests may share it."""
    run = Run(backend=backend)
    s = run.pool.allocate()
    return run, s, run.prefill([s], hidden_rows(SMALL, count, 1), [count])


CHUNKS = {
    "ones and odds": [1, 2, 3, 9, 1, 40, 94],
    "blocks": [64, 64, 22],
    "across a block": [127, 1, 1, 21],
    "longer than the ring at once": [139, 11],
}


@pytest.mark.parametrize("backend", SAME)
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS.keys())
def test_any_chunking_gives_the_same_caches_and_outputs(backend, chunks):
    whole, s, expected = one_shot(backend, 150)
    run = Run(backend=backend)
    t = run.pool.allocate()
    rows = hidden_rows(SMALL, 150, 1).split(chunks)
    found = torch.cat([run.prefill([t], part, [part.shape[0]]) for part in rows])
    assert_same(found, expected, backend)
    assert_same_state(run, t, whole, s, backend)


@pytest.mark.parametrize("backend", SAME)
@pytest.mark.parametrize("steps", [[1] * 13, [6, 6, 1], [2, 5, 6]], ids=["single", "six", "ragged"])
def test_decode_after_prefill_equals_prefill_of_the_longer_prompt(backend, steps):
    """Exactly: prefill attends to the quantized and cast-back values that decode reads, so nothing about the step's
    kind remains.
    """
    count = 137 + sum(steps)
    whole, s, expected = one_shot(backend, count)
    run = Run(backend=backend)
    t = run.pool.allocate()
    hidden = hidden_rows(SMALL, count, 1)
    parts, done = [run.prefill([t], hidden[:137], [137])], 137
    for rows in steps:
        parts.append(run.decode([t], hidden[done : done + rows], [rows]))
        done += rows
    assert_same(torch.cat(parts), expected, backend)
    assert_same_state(run, t, whole, s, backend)


@pytest.mark.parametrize("backend", SAME)
def test_order_and_composition_of_a_batch_do_not_matter(backend):
    lengths, extra = {"a": 140, "b": 7, "c": 61}, {"a": (1, 6), "b": (6, 2), "c": (3, 1)}
    hidden = {name: hidden_rows(SMALL, 160, ord(name)) for name in lengths}

    def live(names):
        run = Run(backend=backend)
        s = {name: run.pool.allocate() for name in names}
        outputs = {name: [] for name in names}
        done = dict.fromkeys(names, 0)

        def step(kind, counts):
            order = list(counts)
            rows = torch.cat([hidden[n][done[n] : done[n] + counts[n]] for n in order])
            out = getattr(run, kind)([s[n] for n in order], rows, [counts[n] for n in order])
            for n, part in zip(order, out.split([counts[n] for n in order]), strict=True):
                outputs[n].append(part)
                done[n] += counts[n]

        step("prefill", {n: lengths[n] for n in names})
        for turn in range(2):
            step("decode", {n: extra[n][turn] for n in names})
        return run, s, {n: torch.cat(parts) for n, parts in outputs.items()}

    together = live(["a", "b", "c"])
    for names in (["c", "a", "b"], ["b"], ["a", "c"]):
        run, s, outputs = live(names)
        for n in names:
            assert_same(outputs[n], together[2][n], backend, f"{n} in {names}")
            assert_same_state(run, s[n], together[0], together[1][n], backend)


@pytest.mark.parametrize(("backend", "most"), [*((name, 5) for name in SAME), (SAME[0], 8)])
def test_verify_then_reject_leaves_no_trace(backend, most):
    """Random drafts and acceptances, a draft pass in front of each, against a run that never saw a rejected token."""
    rng = random.Random(5)
    run, pure = (Run(backend=backend, rows_per_step=max(6, 1 + most)) for _ in range(2))
    s, t = run.pool.allocate(), pure.pool.allocate()
    hidden, done = hidden_rows(SMALL, 240, 1), 131
    run.prefill([s], hidden[:done], [done])
    pure.prefill([t], hidden[:done], [done])
    rejected = 0
    for turn in range(10):
        noise = hidden_rows(SMALL, 5, 100 + turn)
        assert_same(run.draft([s], noise), pure.draft([t], noise), backend, "draft")
        drafts = rng.randint(0, most)
        accepted = rng.randint(0, drafts)
        rows = hidden[done : done + 1 + drafts].clone()
        # what the target model will not accept
        rows[1 + accepted :] = hidden_rows(SMALL, drafts - accepted, 200 + turn) * 8
        found = run.decode([s], rows, [1 + drafts])[: 1 + accepted]
        run.pool.reject(s, drafts - accepted)
        expected = pure.decode([t], hidden[done : done + 1 + accepted], [1 + accepted])
        assert_same(found, expected, backend, f"turn {turn}")
        done += 1 + accepted
        rejected += drafts - accepted
        assert s.length == t.length == done
        assert_same_state(run, s, pure, t, backend)
    assert rejected > 8
    run.pool.free(s)
    assert run.pool.bytes_used == 0


@pytest.mark.parametrize("backend", SAME)
@pytest.mark.parametrize("at", [128, 139])
def test_a_fork_shares_and_never_leaks(backend, at):
    """Both branches continue, with a rejection across the fork point, as if each had lived alone."""
    stem, left, right = hidden_rows(SMALL, at, 1), hidden_rows(SMALL, 20, 2), hidden_rows(SMALL, 20, 3)
    run = Run(backend=backend)
    a = run.pool.allocate()
    run.prefill([a], stem, [at])
    b = run.pool.fork(a)
    assert run.pool.blocks_free == run.pool.num_blocks - len(a.blocks)

    def continue_alone(branch, turned_back):
        alone = Run(backend=backend)
        t = alone.pool.allocate()
        alone.prefill([t], stem, [at])
        if turned_back:
            alone.pool.reject(t, 2)
            alone.decode([t], branch[18:], [2])
        first = alone.decode([t], branch[:6], [6])
        return alone, t, torch.cat((first, alone.prefill([t], branch[6:18], [12])))

    run.pool.reject(a, 2)  # a turns back into tokens b still has
    run.decode([a], left[18:], [2])
    both = run.decode([b, a], torch.cat((right[:6], left[:6])), [6, 6])
    rest = run.prefill([a, b], torch.cat((left[6:18], right[6:18])), [12, 12])
    for sequence, branch, turned_back, found in (
        (a, left, True, torch.cat((both[6:], rest[:12]))),
        (b, right, False, torch.cat((both[:6], rest[12:]))),
    ):
        alone, t, expected = continue_alone(branch, turned_back)
        assert_same(found, expected, backend)
        assert_same_state(run, sequence, alone, t, backend)
    run.pool.free(a)
    run.pool.free(b)
    assert run.pool.bytes_used == 0


@pytest.mark.parametrize("backend", SAME)
def test_old_bytes_of_recycled_blocks_and_slots_are_never_seen(backend):
    """Memory full of NaN patterns, and memory another sequence left behind, give the bits of fresh memory."""

    def script(run):
        a, b = run.pool.allocate(), run.pool.allocate()
        outputs = [run.prefill([a, b], hidden_rows(SMALL, 133, 1), [130, 3])]
        outputs.append(run.draft([a, b], hidden_rows(SMALL, 10, 2)))
        outputs.append(run.decode([a, b], hidden_rows(SMALL, 9, 3), [6, 3]))
        run.pool.reject(a, 4)
        outputs.append(run.decode([b, a], hidden_rows(SMALL, 2, 4), [1, 1]))
        run.pool.free(a)
        run.pool.free(b)
        return torch.cat(outputs)

    expected = script(Run(backend=backend))
    poisoned = Run(backend=backend)
    for byte in (0xFF, 0x7F):
        poisoned.pool.data.fill_(byte)
        poisoned.pool.rings.fill_(byte)
        for source in (2,):
            poisoned.pool.compressor(source).data.fill_(float("nan"))
        assert torch.equal(script(poisoned), expected)
    assert torch.equal(script(poisoned), expected)  # right behind itself
    assert poisoned.pool.bytes_used == 0


@pytest.mark.parametrize("backend", SAME)
def test_padding_sequences_change_nothing(backend):
    hidden = hidden_rows(SMALL, 60, 1)
    plain, padded = Run(backend=backend), Run(backend=backend)
    s, t = plain.pool.allocate(), padded.pool.allocate()
    plain.prefill([s], hidden[:50], [50])
    padded.prefill([t], hidden[:50], [50])
    expected = plain.decode([s], hidden[50:53], [3])
    found = padded.decode([None, t, None], torch.cat((hidden[:2], hidden[50:53], hidden[:1])), [2, 3, 1])
    assert torch.equal(found[2:5], expected)
    assert_same_state(plain, s, padded, t, "reference")
    step = StepMetadata.decode(padded.pool, [None], [2])
    for layer in padded.main:
        assert not bool(padded.attention.forward(hidden[:2], layer, step, padded.pool).any())


# --- the building blocks ---------------------------------------------------------------------------------------------


PRODUCTS = [
    "reference",
    pytest.param("native", marks=pytest.mark.skipif(bool(presence("native")), reason="the extension was not built")),
]


@pytest.mark.parametrize("backend", PRODUCTS)
@pytest.mark.parametrize(
    ("k", "n"), [(5120, 128), (4096, 40), (1280, 200), (128, 512), (64, 1024), (512, 128), (128, 4)]
)
def test_a_row_does_not_depend_on_how_many_come_with_it(k, n, backend):
    project = partial(linear.project, backend=backend)
    generator = torch.Generator().manual_seed(k + n)
    weight = (torch.randn(n, k, generator=generator) * k**-0.5).to(torch.bfloat16)
    x = torch.randn(64, k, generator=generator).to(torch.bfloat16)
    x[7] *= 1000
    scale = torch.randn(k, generator=generator)
    for dtype in (torch.bfloat16, torch.float32):
        full = project(x, weight, out_dtype=dtype)
        for count in range(1, 65):
            assert torch.equal(project(x[:count], weight, out_dtype=dtype), full[:count])
            assert torch.equal(project(x[64 - count :], weight, out_dtype=dtype), full[64 - count :])
    normed = rms_norm(x, scale, 1e-20)
    for count in range(1, 65):
        assert torch.equal(rms_norm(x[:count], scale, 1e-20), normed[:count])
        assert torch.equal(rms_norm(x[64 - count :], scale, 1e-20), normed[64 - count :])
    assert oracle.error(full, oracle.linear(x, weight)) < 1e-6


@pytest.mark.parametrize("backend", PRODUCTS)
def test_long_inputs_are_projected_in_pieces_with_the_same_bits(backend):
    project = partial(linear.project, backend=backend)
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    x = torch.randn(5001, 64, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    full = project(x, weight)
    for start, stop in ((0, 1), (2047, 2050), (4096, 5001)):
        assert torch.equal(project(x[start:stop], weight), full[start:stop])
    assert project(x[:0], weight).shape == (0, 40)
    assert torch.equal(project(x[:, ::2], weight[:, ::2]), project(x[:, ::2].contiguous(), weight[:, ::2].contiguous()))


@pytest.mark.skipif(bool(presence("native")), reason="the extension was not built")
def test_the_native_product_is_the_one_taken_and_threads_move_no_bit(monkeypatch):
    x, weight = torch.randn(70, 1100).to(torch.bfloat16), torch.randn(150, 1100).to(torch.bfloat16)
    full = linear.project(x, weight, out_dtype=torch.float32, backend="native")
    for count in (1, 2, 3):
        with num_threads(count):
            assert torch.equal(linear.project(x, weight, out_dtype=torch.float32, backend="auto"), full)
    odd = [t[:, :37].contiguous() for t in (x, weight[:5])]
    full = linear.project(*odd, backend="native")
    for row in range(70):
        assert torch.equal(linear.project(odd[0][row : row + 1], odd[1], backend="native"), full[row : row + 1])
    calls = []
    monkeypatch.setattr("sparse_mla.backends.native_linear.project", lambda *given: calls.append(given))
    linear.project(x, weight)
    linear.project(x, weight, backend="native")
    assert len(calls) == 2
    linear.project(x, weight, backend="reference")
    assert len(calls) == 2


def test_rows_of_zeros_stay_finite():
    assert not bool(rms_norm(torch.zeros(3, 512, dtype=torch.bfloat16), torch.ones(512), 1e-20).any())


def test_activation_rounding_is_the_record_quantizer_s():
    x = torch.randn(9, 1280, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    assert torch.equal(quantize_activations(x).double(), oracle.rounded_activations(x))


# --- tensor parallelism ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "index_heads"), [(2, "shard"), pytest.param(4, "replicate", marks=pytest.mark.full), (8, "replicate")]
)
def test_ranks_add_up_to_the_whole(size, index_heads):
    """Ranks run in threads; `reduce` is a sum between barriers, in a fixed order."""
    import threading
    from dataclasses import replace

    config = replace(SMALL, num_attention_heads=8, o_groups=4)
    layers, count = (0, 2, 20, 24), 50
    hidden = hidden_rows(config, count, 1)

    class Sum:
        def __init__(self):
            self.barrier, self.parts = threading.Barrier(size), [None] * size

        def of(self, rank):
            def reduce(tensor):
                self.parts[rank] = tensor.float()
                self.barrier.wait(60)
                total = torch.stack(self.parts).sum(0).to(tensor.dtype)
                self.barrier.wait(60)
                return total

            return reduce

    def outputs(weights, reduce=None):
        pool = KVPool(config, num_blocks=4, num_sequences=1, layers=layers)
        attention = V41Attention(config, weights, backend="reference", reduce=reduce)
        s, found = pool.allocate(), []
        for build, rows in (("prefill", slice(0, 40)), ("decode", slice(40, 46)), ("decode", slice(46, 50))):
            step = getattr(StepMetadata, build)(pool, [s], [rows.stop - rows.start])
            found.append([attention.forward(hidden[rows], layer, step, pool) for layer in pool.layers])
            step.commit()
        return [torch.cat(parts) for parts in zip(*found, strict=True)]

    whole = outputs(AttentionWeights.random(config, seed=0))
    summed, results, failures = Sum(), [None] * size, []

    def work(rank):
        try:
            shard = Shard(rank, size, index_heads)
            results[rank] = outputs(AttentionWeights.random(config, seed=0, shard=shard), summed.of(rank))
        except BaseException as failure:  # the other ranks must not wait for this one
            failures.append(failure)
            summed.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    for layer, expected in zip(layers, whole, strict=True):
        number = layers.index(layer)
        assert all(torch.equal(r[number], results[0][number]) for r in results)  # every rank has the same sum
        assert oracle.error(results[0][number], expected) < 2e-2


def test_a_shard_without_a_reduction_is_refused():
    from sparse_mla.errors import ArgumentError

    with pytest.raises(ArgumentError, match="reduce"):
        V41Attention(SMALL, AttentionWeights.random(SMALL, shard=Shard(0, 2)))
