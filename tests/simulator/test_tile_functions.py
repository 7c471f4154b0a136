# SPDX-License-Identifier: Apache-2.0
"""Tile functions of nki.language against NumPy: operators called on tiles, reductions, compositions, movement."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparse_mla.errors import KernelError
from sparse_mla.simulator import language as nl

from .kit import BF16, get, launch, put, random
from .reference import ALL, cast, same, widen


def apply(body: Any, *arrays: Any, **options: Any) -> Any:
    def kernel(xs: Any) -> Any:
        return get(body([put(x) for x in xs]))

    return launch(kernel, arrays, **options).value


BINARY = ["add", "subtract", "multiply", "maximum", "minimum", "equal", "not_equal", "less", "less_equal", "greater",
          "greater_equal", "logical_and", "logical_or", "logical_xor"]  # fmt: skip


@pytest.mark.parametrize("op", BINARY)
def test_binary_operators_on_tiles_and_numbers(op: str) -> None:
    x, y = np.round(random((8, 12), seed=1) * 2), np.round(random((8, 12), seed=2) * 2)
    meaning = getattr(np, op)
    function = getattr(nl, op)
    same(apply(lambda t: function(t[0], t[1]), x, y), meaning(x, y).astype(np.float32))
    same(apply(lambda t: function(t[0], 1.0), x), meaning(x, np.float32(1)).astype(np.float32))
    same(apply(lambda t: function(1.0, t[0]), x), meaning(np.float32(1), x).astype(np.float32))
    out = apply(lambda t: function(t[0], t[1], dtype=nl.bfloat16), x, y)
    same(out, meaning(x, y).astype(np.float32).astype(BF16))


def test_free_dims_broadcast_and_partitions_do_not() -> None:
    x, y = random((8, 1, 5), seed=1), random((8, 4, 1), seed=2)
    same(apply(lambda t: nl.multiply(t[0], t[1]), x, y), x * y)
    with pytest.raises(KernelError, match="partitions are never broadcast"):
        apply(lambda t: nl.add(t[0], t[1]), random((8, 4)), random((1, 4)))


@pytest.mark.parametrize("op", ["exp", "tanh", "square", "sqrt", "abs", "sign", "floor", "ceil", "trunc", "negative",
                                "cos", "tan", "sin", "reciprocal", "log"])  # fmt: skip
def test_unary_operators(op: str) -> None:
    x = random((8, 12)) * 4
    x = np.abs(x) + 0.1 if op in ("sqrt", "log") else x
    meaning = {"reciprocal": lambda v: 1 / v}.get(op) or getattr(np, op)
    out = apply(lambda t: getattr(nl, op)(t[0]), x.astype(np.float32))
    assert np.allclose(out, meaning(x.astype(np.float64)), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("op", ["bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift"])
def test_bit_operators(op: str) -> None:
    x, y = random((8, 12), np.int32, 1), random((8, 12), np.int32, 2) % 8
    same(apply(lambda t: getattr(nl, op)(t[0], t[1]), x, y), getattr(np, op)(x, y))
    same(apply(lambda t: getattr(nl, op)(t[0], 3), x), getattr(np, op)(x, np.int32(3)))
    same(apply(lambda t: nl.invert(t[0]), x), ~x)


@pytest.mark.parametrize("axis", [1, 2, -1, (1, 2)])
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("op", ["sum", "max", "min", "prod", "mean", "var"])
def test_reductions(op: str, keepdims: bool, axis: Any) -> None:
    x = random((8, 3, 5))
    out = apply(lambda t: getattr(nl, op)(t[0], axis, keepdims=keepdims), x)
    wanted = getattr(np, op)(x.astype(np.float64), axis=axis, keepdims=keepdims)
    assert out.shape == (wanted.shape if wanted.ndim > 1 else (8, 1))  # tiles keep a free axis
    assert np.allclose(out.reshape(wanted.shape), wanted, rtol=1e-5, atol=1e-6)
    with pytest.raises(KernelError, match="free axes"):
        apply(lambda t: getattr(nl, op)(t[0], 0), x)


def test_all_and_where() -> None:
    x, y = random((8, 6), seed=1), random((8, 6), seed=2)
    mask = (random((8, 6), seed=3) > 0).astype(np.uint8)
    same(apply(lambda t: nl.where(t[0], t[1], t[2]), mask, x, y), np.where(mask, x, y))
    same(apply(lambda t: nl.where(t[0], t[1], -2.0), mask, x), np.where(mask, x, np.float32(-2)))
    same(apply(lambda t: nl.all(t[0], 1), mask), mask.all(axis=1, keepdims=True).astype(np.uint8))

    def from_hbm(m: Any, x: Any) -> None:
        nl.where(put(m), x, 0.0)

    with pytest.raises(KernelError, match=r"nl\.where: x must be in SBUF or PSUM"):
        launch(from_hbm, mask, x)


def test_softmax_and_rms_norm() -> None:
    x, w = random((16, 40), scale=5.0), random((16, 40), seed=1)
    wide = x.astype(np.float64)
    e = np.exp(wide - wide.max(axis=1, keepdims=True))
    assert np.allclose(apply(lambda t: nl.softmax(t[0], -1), x), e / e.sum(axis=1, keepdims=True), rtol=1e-5, atol=1e-7)
    norm = wide / np.sqrt((wide**2).sum(axis=1, keepdims=True) / 40 + 1e-6) * w
    assert np.allclose(apply(lambda t: nl.rms_norm(t[0], t[1], 1, 40), x, w), norm, rtol=1e-5, atol=1e-6)


def test_matmul_and_transpose() -> None:
    x, y = random((32, 48)), random((48, 20), seed=1)
    assert np.allclose(apply(lambda t: nl.matmul(t[0], t[1]), x, y), x @ y, rtol=1e-4, atol=1e-5)
    assert np.allclose(
        apply(lambda t: nl.matmul(t[0], t[1], transpose_x=True), np.ascontiguousarray(x.T), y),
        x @ y,
        rtol=1e-4,
        atol=1e-5,
    )
    same(apply(lambda t: nl.transpose(t[0]), x), x.T.copy())
    same(apply(lambda t: nl.transpose(t[0], dtype=nl.bfloat16), x), x.T.astype(BF16).copy())


def test_broadcast_to() -> None:
    x = random((1, 1, 6))
    same(apply(lambda t: nl.broadcast_to(t[0], (32, 4, 6)), x), np.broadcast_to(x, (32, 4, 6)).copy())
    y = random((8, 1))
    same(apply(lambda t: nl.broadcast_to(t[0], (8, 5)), y), np.broadcast_to(y, (8, 5)).copy())
    with pytest.raises(KernelError, match="one partition"):
        apply(lambda t: nl.broadcast_to(t[0], (8, 5)), random((2, 5)))


@pytest.mark.parametrize("name", ALL)
def test_filled_tensors(name: str) -> None:
    def kernel() -> Any:
        a, b, c = nl.zeros((4, 3), name), nl.ones((4, 3), name), nl.full((4, 3), 5, name)
        like = nl.zeros_like(b)
        out = nl.ones((4, 3), name, nl.shared_hbm)
        assert nl.empty_like(a).shape == (4, 3)
        return get(a), get(b), get(c), get(like), out

    for out, value in zip(launch(kernel).outputs, (0, 1, 5, 0, 1), strict=True):
        same(out, np.full((4, 3), value, ALL[name]))


def test_load_and_store_and_constants() -> None:
    table = random((8, 6))

    def kernel(x: Any) -> Any:
        out = nl.ndarray((8, 6), nl.bfloat16, nl.shared_hbm)
        nl.store(out, nl.add(nl.load(x, dtype=nl.float32), nl.load(nl.shared_constant(table))))
        turned = nl.load_transpose2d(x)
        eye = nl.shared_identity_matrix(8, dtype=nl.float32)
        return out, get(turned), get(eye)

    x = random((8, 6), BF16, 1)
    out, turned, eye = launch(kernel, x).outputs
    same(out, cast(widen(x) + table, BF16))
    same(turned, x.T.copy())
    same(eye, np.eye(8, dtype=np.float32))


def test_gather_flattened_and_expand_dims() -> None:
    x, at = random((8, 10)), np.random.default_rng(1).integers(0, 10, (8, 4)).astype(np.uint32)
    same(apply(lambda t: nl.gather_flattened(t[0], t[1]), x, at), np.take_along_axis(x, at.astype(np.int64), axis=1))
    same(apply(lambda t: nl.expand_dims(t[0], -1), x), x[..., None])
    with pytest.raises(KernelError, match="axis must be"):
        apply(lambda t: nl.gather_flattened(t[0], t[1], axis=2), x, at)


def test_random_tiles_follow_their_seed() -> None:
    def kernel(seed: Any) -> Any:
        nl.random_seed(put(seed))
        a = nl.rand((8, 64), nl.float32)
        nl.random_seed(put(seed))
        return get(a), get(nl.rand((8, 64), nl.float32)), get(nl.dropout(a, 1.0))

    a, b, c = launch(kernel, np.array([[3]], np.uint32)).outputs
    same(a, b)
    assert ((a >= 0) & (a < 1)).all()
    assert (c == 0).all()


def test_operators_that_do_not_lower_say_so() -> None:
    def kernel(x: Any) -> Any:
        return get(nl.divide(put(x), 4.0))

    x = random((4, 4))
    result = launch(kernel, x)
    same(result.value, x / np.float32(4))
    assert any("does not lower" in w.message for w in result.warnings)
    with pytest.raises(KernelError, match="does not lower"):
        launch(kernel, x, strict=True)


def test_tiles_must_be_on_chip() -> None:
    for body, words in (
        (lambda x: nl.add(x, 1.0), "nl.load it first"), (lambda x: nl.exp(3.0), "must be a tile"),
        (lambda x: nl.add(nl.load(x)), "y is missing"),
        (lambda x: nl.exp(nl.load(x), mask=1), "unexpected arguments mask"),
    ):  # fmt: skip
        with pytest.raises(KernelError, match=words):
            launch(lambda x, b=body: b(x), random((4, 4)))
