# SPDX-License-Identifier: Apache-2.0
"""Mistakes of the caller: each one clear error, and not a byte of the pool changes."""

from dataclasses import replace

import pytest
import torch
from attention_driver import SMALL, hidden_rows, weights_of

from sparse_mla.attention import AttentionStack, AttentionWeights, KVPool, StepMetadata, V41Attention, V41Config
from sparse_mla.errors import (
    ArgumentError,
    BackendUnavailableError,
    DTypeError,
    NonFiniteError,
    PoolFullError,
    ShapeError,
    SlotRangeError,
    SparseMlaError,
    StateError,
)

CONFIG = replace(SMALL, max_position_embeddings=600)
LAYERS = (0, 2, 3, 20, 24, 40)


def make(**options):
    pool = KVPool(CONFIG, **{"num_blocks": 4, "num_sequences": 3, "layers": LAYERS, **options})
    return pool, AttentionStack(AttentionWeights.random(CONFIG), pool, backend="reference")


def everything(pool):
    states = [pool.compressor(2).data.clone()]
    books = (pool.bytes_used, pool.blocks_free, [(s.slot, tuple(s.blocks), s.length, s.state) for s in pool.sequences])
    return books, [pool.data.clone(), pool.rings.clone(), *states]


def assert_untouched(pool, before):
    books, memory = everything(pool)
    assert books == before[0]
    assert all(torch.equal(a, b) for a, b in zip(memory, before[1], strict=True))


def test_a_bad_call_is_one_clear_error_and_leaves_the_pool_as_it_was():
    pool, stack = make()
    other, _ = make()
    a, freed, stranger = pool.allocate(), pool.allocate(), other.allocate()
    pool.free(freed)
    stack.prefill([a], [hidden_rows(CONFIG, 140)])
    rows = hidden_rows(CONFIG, 700)
    nan = rows[:1].clone()
    nan[0, 3] = float("nan")
    b = pool.allocate()
    cases = [
        (lambda: stack.prefill([a], [rows[:400]]), PoolFullError, "blocks are needed"),
        (lambda: stack.prefill([a, b], [rows[:200], rows[:300]]), PoolFullError, "nothing was changed"),
        (lambda: stack.prefill([a], [rows[:461]]), SlotRangeError, "600"),
        (lambda: stack.prefill([a], [rows[:10], rows[:10]]), ShapeError, "one tensor per sequence"),
        (lambda: stack.prefill([a, b], [rows[:10], rows[:0]]), ArgumentError, "at least one token"),
        (lambda: stack.prefill([a], [rows[:10]], chunk=0), ArgumentError, "chunk"),
        (lambda: stack.prefill([freed], [rows[:10]]), StateError, "freed"),
        (lambda: stack.prefill([stranger], [rows[:10]]), StateError, "another"),
        (lambda: stack.prefill([a], [rows[:10].float()]), DTypeError, "bfloat16"),
        (lambda: stack.prefill([a], [rows[:10, :64]]), ShapeError, "128"),
        (lambda: stack.prefill([a], [None]), DTypeError, "NoneType"),
        (lambda: stack.decode([a], nan), ArgumentError, "finite"),
        (lambda: stack.decode([a], rows[:7], [7]), ArgumentError, "at most 6"),
        (lambda: stack.decode([a], rows[:2]), ShapeError, r"\[1, 128\]"),
        (lambda: stack.decode([a, b], rows[:3], [3]), ShapeError, "one entry per sequence"),
        (lambda: stack.decode([a, a], rows[:2]), StateError, "once"),
        (lambda: stack.decode([freed], rows[:1]), StateError, "freed"),
        (lambda: stack.decode([], rows[:0]), ArgumentError, "at least one"),
        (lambda: stack.draft([a], rows[:4]), ShapeError, r"\[5, 128\]"),
        (lambda: stack.draft([freed], rows[:5]), StateError, "freed"),
        (lambda: stack.reject(a, 141), SlotRangeError, "length"),
        (lambda: stack.reject(a, 20), SlotRangeError, "overwritten"),
        (lambda: stack.reject(freed, 1), StateError, "freed"),
        (lambda: stack.free(freed), StateError, "twice"),
        (lambda: stack.free(stranger), StateError, "own"),
    ]
    before = everything(pool)
    for call, error, text in cases:
        with pytest.raises(error, match=text) as caught:
            call()
        assert isinstance(caught.value, SparseMlaError)
        assert "\n" not in str(caught.value)
        assert_untouched(pool, before)
    stack.decode([a], rows[:1])  # and everything still works


def test_a_layer_refuses_what_does_not_belong_to_it():
    pool, stack = make()
    layer = stack.attention
    a = pool.allocate()
    rows = hidden_rows(CONFIG, 5)
    prefill = StepMetadata.prefill(pool, [a], [5])
    tiny_pool = KVPool(V41Config.tiny(), num_blocks=4, num_sequences=3, layers=LAYERS)
    short, _ = make(layers=[0])
    short_step = StepMetadata.prefill(short, [short.allocate()], [5])
    draft = StepMetadata.draft(pool, [a])
    cases = [
        (lambda: layer.forward(rows, 3, prefill, pool), StateError, "layer 2, which has not run"),
        (lambda: layer.forward(rows, 24, prefill, pool), StateError, "layer 20, which has not run"),
        (lambda: layer.forward(rows, 40, prefill, pool), ArgumentError, "draft layers run in draft steps"),
        (lambda: layer.forward(rows, 0, draft, pool), ArgumentError, "draft step"),
        (lambda: layer.forward(rows[:4], 0, prefill, pool), ShapeError, r"\[5, 128\]"),
        (lambda: layer.forward(rows.float(), 0, prefill, pool), DTypeError, "bfloat16"),
        (lambda: layer.forward(rows, 43, prefill, pool), ArgumentError, "layer must be"),
        (lambda: layer.forward(rows, 0, prefill, tiny_pool), ArgumentError, "another model"),
        (lambda: layer.forward(rows, 0, short_step, pool), StateError, "another"),
        (lambda: layer.forward(rows, 2, short_step, short), ArgumentError, "not in this pool"),
        (lambda: layer.store_context(rows, 0, prefill, pool), ArgumentError, "draft layer"),
        (lambda: layer.store_context(rows, 40, draft, pool), ArgumentError, "draft step"),
        (lambda: V41Attention(CONFIG, stack.weights, linear="int8"), ArgumentError, "linear"),
        (lambda: V41Attention(CONFIG, weights_of(V41Config.tiny())), ArgumentError, "another model"),
    ]
    before = everything(pool)
    for call, error, text in cases:
        with pytest.raises(error, match=text):
            call()
        assert_untouched(pool, before)
    stack.decode([a], rows[:1])
    with pytest.raises(StateError, match="make a new step"):
        layer.forward(rows, 0, prefill, pool)
    absent = V41Attention(CONFIG, stack.weights, backend="neuron")
    with pytest.raises(BackendUnavailableError):
        absent.forward(rows[:1], 0, StepMetadata.decode(pool, [a], [1]), pool)


def test_an_infinity_inside_is_an_error_of_the_quantizer():
    pool, stack = make(layers=[0])
    a = pool.allocate()
    rows = hidden_rows(CONFIG, 3)
    rows[1, 5] = float("inf")
    step = StepMetadata.prefill(pool, [a], [3])
    with pytest.raises(NonFiniteError, match="finite"):
        stack.attention.forward(rows, 0, step, pool)


def test_a_step_that_fails_in_the_middle_damages_only_its_sequences(monkeypatch):
    import sparse_mla.attention.layer as module

    pool, stack = make()
    a, b = pool.allocate(), pool.allocate()
    rows = hidden_rows(CONFIG, 20)
    stack.prefill([a, b], [rows, rows])
    expected = stack.decode([b], rows[:1])
    stack.reject(b, 1)

    def fail(*args, **kwargs):
        raise RuntimeError("the device went away")

    with monkeypatch.context() as patch:
        patch.setattr(module, "sparse_decode", fail)
        with pytest.raises(RuntimeError, match="went away"):
            stack.decode([a], rows[:1])
    assert (a.length, a.state) == (20, "damaged")
    for call in (lambda: stack.decode([a], rows[:1]), lambda: pool.fork(a), lambda: stack.reject(a, 1)):
        with pytest.raises(StateError, match="free it and start again"):
            call()
    assert torch.equal(stack.decode([b], rows[:1]), expected)
    stack.free(a)
    stack.free(b)
    assert pool.bytes_used == 0
