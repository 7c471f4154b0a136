# SPDX-License-Identifier: Apache-2.0
"""Scalar engine: every activation function against float64 mathematics, scale and bias, and the sum registers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from sparse_mla.errors import KernelError, NotSimulatedError
from sparse_mla.simulator import isa as nisa
from sparse_mla.simulator import language as nl
from sparse_mla.simulator.operators import ACTIVATIONS

from .kit import BF16, checks_of, random
from .reference import ALL, cast, compute, one, run, same, samples, widen

Command = nisa.reduce_cmd


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _density(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _normal(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def _tanh_gelu(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _sigmoid_gelu_dx(x: float) -> float:
    s = _sigmoid(1.702 * x)
    return s + 1.702 * x * s * (1 - s)


MEANING: dict[str, Any] = {
    "copy": lambda x: x, "exp": math.exp, "relu": lambda x: max(x, 0.0), "square": lambda x: x * x,
    "sqrt": math.sqrt, "rsqrt": lambda x: 1 / math.sqrt(x), "reciprocal": lambda x: 1 / x, "log": math.log,
    "sigmoid": _sigmoid, "tanh": math.tanh, "silu": lambda x: x * _sigmoid(x),
    "silu_dx": lambda x: _sigmoid(x) * (1 + x * (1 - _sigmoid(x))), "gelu": lambda x: x * _normal(x),
    "gelu_dx": lambda x: _normal(x) + x * _density(x), "gelu_apprx_tanh": _tanh_gelu,
    "gelu_apprx_sigmoid": lambda x: x * _sigmoid(1.702 * x), "gelu_apprx_sigmoid_dx": _sigmoid_gelu_dx,
    "softplus": _softplus, "mish": lambda x: x * math.tanh(_softplus(x)), "erf": math.erf,
    "erf_dx": lambda x: 2 / math.sqrt(math.pi) * math.exp(-x * x), "sin": math.sin, "arctan": math.atan, "abs": abs,
    "sign": lambda x: math.copysign(1.0, x) if x else 0.0,
}  # fmt: skip
POSITIVE = {"sqrt", "rsqrt", "log"}
INPUTS = np.array(
    [0.0, 1e-3, -1e-3, 0.25, -0.25, 0.7, -0.7, 1.0, -1.0, 1.5, -1.5, 2.5, -2.5, 3.1, -3.1, 6.0, -6.0, 12.0, -12.0, 30.0,
     -30.0], np.float32,
).reshape(1, -1)  # fmt: skip


def inputs(op: str) -> Any:
    if op in POSITIVE:
        return np.abs(INPUTS) + np.float32(1e-3)
    if op == "reciprocal":
        return INPUTS[:, 1:]
    if op == "sin":
        return INPUTS[:, :15]
    if op == "arctan":
        return INPUTS[:, :11]
    return INPUTS


def test_every_documented_function_is_here() -> None:
    assert {a.name for a in ACTIVATIONS} == set(MEANING) | {"prelu"}


@pytest.mark.parametrize("op", MEANING)
def test_functions(op: str) -> None:
    x = inputs(op)
    result = run(lambda d, s: nisa.activation(d, getattr(nl, op), s), [x], [(x.shape, "float32")])
    expected = np.array([[MEANING[op](float(v)) for v in x[0]]])
    assert np.allclose(result.outputs[0], expected, rtol=2e-6, atol=2e-7), op
    assert 29 not in checks_of(result)


@pytest.mark.parametrize("op", ["exp", "sigmoid", "tanh", "silu", "gelu", "mish", "softplus", "relu", "erf"])
def test_functions_at_infinity(op: str) -> None:
    x = np.array([[np.inf, -np.inf, -1e30, 88.0, -104.0]], np.float32)
    out = one(lambda d, s: nisa.activation(d, getattr(nl, op), s), [x], x.shape, "float32")
    top, bottom = {"exp": (np.inf, 0), "sigmoid": (1, 0), "tanh": (1, -1), "erf": (1, -1)}.get(op, (np.inf, 0))
    assert out[0, 0] == top
    assert out[0, 1] == bottom
    assert out[0, 2] == bottom
    assert np.isfinite(out[0, 3:]).all()


@pytest.mark.parametrize(("op", "good", "bad"), [
    ("log", 2.0**64, 2.0**65), ("sqrt", 2.0**-116, 2.0**-117), ("rsqrt", 2.0**97, 2.0**98),
    ("reciprocal", -(2.0**-42), 2.0**-43),
    ("sin", 3.14, 3.15), ("arctan", -1.57, 1.58),
])  # fmt: skip
def test_inputs_outside_a_tables_range_are_warned(op: str, good: float, bad: float) -> None:
    for value, expected in ((good, False), (bad, True)):
        x = np.full((2, 2), value, np.float32)
        result = run(lambda d, s: nisa.activation(d, getattr(nl, op), s), [x], [(x.shape, "float32")])
        assert (29 in checks_of(result)) == expected
    assert any("lie outside" in w.message and "4 inputs" in w.message for w in result.warnings)


def test_sin_outside_its_range_is_wrong_as_documented() -> None:
    x = np.full((1, 1), 9.0, np.float32)
    assert abs(one(lambda d, s: nisa.activation(d, nl.sin, s), [x], (1, 1), "float32").item() - 27.65) < 0.01


def test_prelu_is_refused_by_name() -> None:
    with pytest.raises(NotSimulatedError, match="prelu"):
        one(lambda d, s: nisa.activation(d, nl.prelu, s), [random((2, 2))], (2, 2), "float32")


@pytest.mark.parametrize("target", ["float32", "bfloat16", "float8_e5m2", "int8"])
@pytest.mark.parametrize("source", ALL)
def test_every_type_goes_through_float32(source: str, target: str) -> None:
    x = samples(ALL[source], (8, 24))
    with np.errstate(all="ignore"):
        values = np.maximum(widen(x) * np.float32(0.75) + np.float32(-1.25), np.float32(0))
    out = one(lambda d, s: nisa.activation(d, nl.relu, s, bias=-1.25, scale=0.75), [x], x.shape, target)
    same(out, cast(values, ALL[target]))


@pytest.mark.parametrize("bias", ["float32", "bfloat16", "float8_e4m3", "int32", None])
@pytest.mark.parametrize("scale", ["tile", "constant"])
@pytest.mark.parametrize("buffers", [(nl.sbuf, nl.sbuf), (nl.psum, nl.sbuf), (nl.sbuf, nl.psum)])
def test_scale_and_bias_per_partition(scale: str, bias: str | None, buffers: Any) -> None:
    x, a = random((16, 3, 4), BF16), random((16, 1), seed=1)
    b = (np.arange(16).reshape(16, 1) / 4 - 2).astype(ALL[bias or "float32"])
    factor = a[:, :, None] if scale == "tile" else np.float32(0.5)
    values = widen(x) * factor + (widen(b)[:, :, None] if bias else 0)

    def body(d: Any, s: Any, p: Any, q: Any) -> None:
        nisa.activation(d, nl.square, s, bias=q if bias else None, scale=p if scale == "tile" else 0.5)

    out = compute(
        body, [x, a, b], [(x.shape, "float32")], buffers=[buffers[0], nl.sbuf, nl.sbuf], out_buffers=[buffers[1]]
    )[0]
    same(out, np.square(values))


def test_trn1_takes_no_constant_bias_and_no_tfloat32_bias() -> None:
    x, b = random((4, 4)), random((4, 1))
    with pytest.raises(KernelError, match="not a constant"):
        one(lambda d, s: nisa.activation(d, nl.copy, s, bias=1.0), [x], x.shape, "float32", gen=2)
    with pytest.raises(KernelError, match="tfloat32"):
        one(lambda d, s, q: nisa.activation(d, nl.copy, s, bias=q.view(nl.tfloat32)), [x, b], x.shape, "float32")


# -- the sum registers --------------------------------------------------------------------------------------------


def test_sums_run_across_calls() -> None:
    x, y = np.round(random((16, 8)) * 4) / 4, np.round(random((16, 5), seed=1) * 4) / 4
    x, y = x.astype(np.float32), y.astype(np.float32)

    def body(r0: Any, r1: Any, r2: Any, r3: Any, d: Any, e: Any, s: Any, t: Any) -> None:
        nisa.activation(d, nl.relu, s, reduce_op=nl.add, reduce_cmd=Command.reset_reduce)
        nisa.activation(e, nl.relu, t, reduce_op=nl.add, reduce_res=r0, reduce_cmd=Command.reduce)
        nisa.activation(d, nl.square, s, reduce_op=nl.add, reduce_res=r1)  # idle: reads, changes nothing
        nisa.activation(d, nl.copy, s, reduce_cmd=Command.reset)
        nisa.activation(e, nl.copy, t, reduce_op=nl.add, reduce_res=r2, reduce_cmd=Command.reduce)
        nisa.activation_reduce(d, nl.abs, s, nl.add, r3, scale=2.0)

    shapes = [((16, 1), "float32")] * 4 + [(x.shape, "bfloat16"), (y.shape, "float32")]
    r0, r1, r2, r3, _, _ = compute(body, [x, y], shapes)
    both = np.maximum(x, 0).sum(axis=1, keepdims=True) + np.maximum(y, 0).sum(axis=1, keepdims=True)
    same(r0, both)
    same(r1, both)
    same(r2, y.sum(axis=1, keepdims=True))
    same(r3, np.abs(2 * x).sum(axis=1, keepdims=True))


def test_sums_are_taken_before_the_result_is_narrowed() -> None:
    x = np.full((4, 64), 1 + 2.0**-10, np.float32)  # 1 in bfloat16
    _, total = compute(
        lambda d, r, s: nisa.activation_reduce(d, nl.copy, s, nl.add, r),
        [x],
        [(x.shape, "bfloat16"), ((4, 1), "float32")],
    )
    assert (total == 64 * (1 + 2.0**-10)).all()


def test_registers_belong_to_partitions_and_must_be_started() -> None:
    x = random((64, 8))

    def halves(low: Any, high: Any, scratch: Any, s: Any) -> None:
        for command in (Command.reset_reduce, Command.reduce):
            for half, out in ((slice(0, 32), low), (slice(32, 64), high)):
                nisa.activation(scratch[half], nl.copy, s[half], reduce_op=nl.add, reduce_res=out, reduce_cmd=command)

    low, high, _ = compute(halves, [x], [((32, 1), "float32"), ((32, 1), "float32"), (x.shape, "float32")])
    assert np.allclose(np.concatenate([low, high]), 2 * x.sum(axis=1, keepdims=True), rtol=1e-5, atol=1e-6)
    for command, result in ((Command.reduce, None), (Command.idle, True)):

        def body(d: Any, r: Any, s: Any, c: Any = command, read: Any = result) -> None:
            nisa.activation(d, nl.copy, s, reduce_op=nl.add, reduce_cmd=c, reduce_res=r if read else None)

        with pytest.raises(KernelError, match="begin with reset_reduce"):
            compute(body, [x], [(x.shape, "float32"), ((64, 1), "float32")])


def test_vector_registers_are_other_registers() -> None:
    x = random((8, 8))

    def body(d: Any, r: Any, s: Any) -> None:
        nisa.activation(d, nl.copy, s, reduce_op=nl.add, reduce_cmd=Command.reset_reduce)
        nisa.tensor_scalar_reduce(d, s, nl.multiply, 100.0, nl.add)
        nisa.activation(d, nl.copy, s, reduce_op=nl.add, reduce_cmd=Command.reduce, reduce_res=r)

    _, total = compute(body, [x], [(x.shape, "float32"), ((8, 1), "float32")])
    assert np.allclose(total, 2 * x.sum(axis=1, keepdims=True), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("change", "words", "check"), [
    ({"op": nl.add}, "no activation function", 29), ({"reduce_op": nl.maximum}, "must be nl.add", 29),
    ({"reduce_cmd": Command.load_reduce}, "reduce_cmd must be", 29), ({"scale": "2"}, "must be a number", 24),
    ({"op": "exp"}, "must be an operator", 25),
])  # fmt: skip
def test_bad_arguments(change: dict[str, Any], words: str, check: int) -> None:
    with pytest.raises(KernelError, match=words) as caught:
        one(
            lambda d, s: nisa.activation(**{"dst": d, "op": nl.exp, "data": s, **change}),
            [random((2, 2))],
            (2, 2),
            "float32",
        )
    assert caught.value.check == check  # type: ignore[attr-defined]
    assert "test_scalar_engine.py:" in str(caught.value)
