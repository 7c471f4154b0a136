# SPDX-License-Identifier: Apache-2.0
"""Operators of `nki.language`: tokens that instructions take as `op=`, and tile functions when called.

Each `Operator` says what it computes on float32 (or raw integer) arrays, which family it belongs to, and where it may
appear: element-wise on the Vector engine, as a reduction, as an activation function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import NotSimulatedError

__all__ = ["ACTIVATIONS", "BY_NAME", "OPERATORS", "RANGES", "Operator", "find"]

Array = np.ndarray[Any, np.dtype[Any]]
Function = Callable[..., Any]

ARITHMETIC, BITVEC, ACTIVATION = "arithmetic", "bitvec", "activation"


class Operator:
    """One name of `nki.language` usable as an operator and callable on tiles."""

    def __init__(
        self,
        name: str,
        function: Function,
        *,
        family: str = ARITHMETIC,
        arity: int = 2,
        reduce: Any = None,
        alu: bool = True,
        activation: bool = False,
        predicate: bool = False,
        lowers: bool = True,
    ) -> None:
        self.name = name
        self.__name__ = name
        self.function = function
        self.family = family
        self.arity = arity
        self.reduce = reduce  # NumPy ufunc whose .reduce is this operator's reduction, or None
        self.alu = alu  # Vector engine operator
        self.activation = activation  # Scalar engine function
        self.predicate = predicate  # result is 1.0 / 0.0
        self.lowers = lowers  # False: exists in the simulator, not on the device

    def __repr__(self) -> str:
        return f"nl.{self.name}"

    def __reduce__(self) -> Any:
        return (find, (self.name,))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The tile function of this name: allocates the result and runs the instruction that computes it."""
        from . import tile_functions

        return tile_functions.apply(self, *args, **kwargs)


def _f32(function: Function) -> Function:
    def compute(x: Array) -> Array:
        return np.asarray(function(x), np.float32)

    return compute


_ERF_TERMS = 64  # of erf(x) = 2/sqrt(pi) exp(-x^2) sum 2^n x^(2n+1) / (2n+1)!!; float32-exact for |x| <= 4
_ERF_ONE = 4.0  # erf is 1 to float32 precision from here on


def _erf(x: Array) -> Array:
    """erf to float32 accuracy by its all-positive series in float64; NumPy has none."""
    y = np.clip(x.astype(np.float64), -_ERF_ONE, _ERF_ONE)
    square = 2 * y * y
    term = y.copy()
    total = y.copy()
    for n in range(1, _ERF_TERMS):
        term *= square / (2 * n + 1)
        total += term
    return np.asarray(2 / math.sqrt(math.pi) * np.exp(-y * y) * total, np.float32)


def _sigmoid(x: Array) -> Array:
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0 / (1.0 + e), e / (1.0 + e)).astype(np.float32)


def _softplus(x: Array) -> Array:
    return np.asarray(np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))), np.float32)


_SQRT_2_PI = math.sqrt(2 / math.pi)


def _gelu(x: Array) -> Array:
    return np.where(np.isneginf(x), np.float32(0), 0.5 * x * (1 + _erf(x / math.sqrt(2)))).astype(np.float32)


def _gelu_dx(x: Array) -> Array:
    return np.asarray(
        0.5 * (1 + _erf(x / math.sqrt(2))) + x * np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi), np.float32
    )


def _gelu_tanh(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + np.tanh(_SQRT_2_PI * (x + 0.044715 * x**3))), np.float32)


def _gelu_sigmoid(x: Array) -> Array:
    return np.asarray(x * _sigmoid(1.702 * x), np.float32)


def _gelu_sigmoid_dx(x: Array) -> Array:
    s = _sigmoid(1.702 * x)
    return np.asarray(s + 1.702 * x * s * (1 - s), np.float32)


def _silu(x: Array) -> Array:
    return np.where(np.isneginf(x), np.float32(0), x * _sigmoid(x)).astype(np.float32)  # 0 * -inf is not meant


def _silu_dx(x: Array) -> Array:
    s = _sigmoid(x)
    return np.asarray(s * (1 + x * (1 - s)), np.float32)


def _mish(x: Array) -> Array:
    return np.where(np.isneginf(x), np.float32(0), x * np.tanh(_softplus(x))).astype(np.float32)


def _erf_dx(x: Array) -> Array:
    return np.asarray(2 / math.sqrt(math.pi) * np.exp(-x * x), np.float32)


def sin_table(x: Array) -> Array:
    """sin on the Scalar engine: exact inside [-pi, pi]; outside, the fitting cubic is extrapolated, as documented
    (sin(9.0) gives about 27.65)."""
    inside = np.abs(x) <= np.float32(math.pi)
    # continuation of the last segment: value 0, slope -1 at pi, cubic through the documented point sin(9) = 27.65
    d = np.abs(x).astype(np.float64) - math.pi
    outer = -d + (27.65 + (9 - math.pi)) / (9 - math.pi) ** 3 * d**3
    return np.where(inside, np.sin(x), np.sign(x) * outer).astype(np.float32)


def _logical(function: Function) -> Function:
    def compute(x: Array, y: Array) -> Array:
        return np.asarray(function(x != 0, y != 0), np.float32)

    return compute


def _shift_left(x: Array, y: Any) -> Array:
    return _shift(x, y, np.left_shift)


def _shift_right(x: Array, y: Any) -> Array:
    return _shift(x, y, np.right_shift)


def _shift(x: Array, y: Any, function: Any) -> Array:
    """Logical shifts on raw bits; a distance of the width or more clears everything."""
    unsigned = np.dtype(f"u{x.dtype.itemsize}")
    bits = x.dtype.itemsize * 8
    raw = np.ascontiguousarray(x).view(unsigned)
    distance = np.asarray(y).astype(np.int64) & 0xFFFFFFFF
    moved = function(raw, np.minimum(distance, bits - 1).astype(unsigned))
    cleared: Array = np.where(distance >= bits, unsigned.type(0), moved).astype(unsigned)
    return cleared.view(x.dtype)


def _abs_max(x: Array, y: Array) -> Array:
    return np.maximum(np.abs(x), np.abs(y))


def _abs_min(x: Array, y: Array) -> Array:
    return np.minimum(np.abs(x), np.abs(y))


def _compare(function: Any) -> Function:
    def compute(x: Array, y: Array) -> Array:
        return np.asarray(function(x, y)).astype(np.float32)

    return compute


def _rsqrt(x: Array) -> Array:
    return np.asarray(np.float32(1) / np.sqrt(x), np.float32)


def _reciprocal(x: Array) -> Array:
    return np.float32(1) / x


def _fmod(x: Array, y: Array) -> Array:
    return np.fmod(x, y)


def _no_prelu(x: Array) -> Array:
    raise NotSimulatedError("nl.prelu: not simulated: its slope operand is not documented")


_TABLE = [
    Operator("add", np.add, reduce=np.add),
    Operator("subtract", np.subtract, reduce=np.subtract),
    Operator("multiply", np.multiply, reduce=np.multiply),
    Operator("divide", np.divide, lowers=False),
    Operator("maximum", np.maximum, reduce=np.maximum),
    Operator("minimum", np.minimum, reduce=np.minimum),
    Operator("abs_max", _abs_max, reduce="abs_max"),
    Operator("abs_min", _abs_min, reduce="abs_min"),
    Operator("power", np.power),
    Operator("fmod", _fmod, lowers=False),
    Operator("mod", np.mod, lowers=False),
    Operator("equal", _compare(np.equal), predicate=True),
    Operator("not_equal", _compare(np.not_equal), predicate=True),
    Operator("less", _compare(np.less), predicate=True),
    Operator("less_equal", _compare(np.less_equal), predicate=True),
    Operator("greater", _compare(np.greater), predicate=True),
    Operator("greater_equal", _compare(np.greater_equal), predicate=True),
    Operator("logical_and", _logical(np.logical_and), predicate=True, reduce="logical_and"),
    Operator("logical_or", _logical(np.logical_or), predicate=True, reduce="logical_or"),
    Operator("logical_xor", _logical(np.logical_xor), predicate=True, reduce="logical_xor"),
    Operator("logical_not", lambda x: (x == 0).astype(np.float32), arity=1, predicate=True),
    Operator("bitwise_and", np.bitwise_and, family=BITVEC, reduce=np.bitwise_and),
    Operator("bitwise_or", np.bitwise_or, family=BITVEC, reduce=np.bitwise_or),
    Operator("bitwise_xor", np.bitwise_xor, family=BITVEC, reduce=np.bitwise_xor),
    Operator("left_shift", _shift_left, family=BITVEC),
    Operator("right_shift", _shift_right, family=BITVEC),
    Operator("invert", np.invert, family=BITVEC, arity=1),
    Operator("abs", np.abs, arity=1, activation=True),
    Operator("square", np.square, arity=1, activation=True),
    Operator("relu", lambda x: np.maximum(x, np.float32(0)), arity=1, activation=True),
    Operator("rsqrt", _rsqrt, arity=1, activation=True),
    Operator("reciprocal", _reciprocal, arity=1, activation=True),
    Operator("negative", np.negative, arity=1, alu=False),
    Operator("copy", lambda x: x, arity=1, alu=False, activation=True),
    Operator("exp", np.exp, arity=1, alu=False, activation=True),
    Operator("log", np.log, arity=1, alu=False, activation=True),
    Operator("sqrt", np.sqrt, arity=1, alu=False, activation=True),
    Operator("tanh", np.tanh, arity=1, alu=False, activation=True),
    Operator("sigmoid", _sigmoid, arity=1, alu=False, activation=True),
    Operator("gelu", _gelu, arity=1, alu=False, activation=True),
    Operator("gelu_dx", _gelu_dx, arity=1, alu=False, activation=True),
    Operator("gelu_apprx_sigmoid", _gelu_sigmoid, arity=1, alu=False, activation=True),
    Operator("gelu_apprx_sigmoid_dx", _gelu_sigmoid_dx, arity=1, alu=False, activation=True),
    Operator("gelu_apprx_tanh", _gelu_tanh, arity=1, alu=False, activation=True),
    Operator("silu", _silu, arity=1, alu=False, activation=True),
    Operator("silu_dx", _silu_dx, arity=1, alu=False, activation=True),
    Operator("softplus", _softplus, arity=1, alu=False, activation=True),
    Operator("mish", _mish, arity=1, alu=False, activation=True),
    Operator("erf", _erf, arity=1, alu=False, activation=True),
    Operator("erf_dx", _erf_dx, arity=1, alu=False, activation=True),
    Operator("sin", sin_table, arity=1, alu=False, activation=True),
    Operator("cos", np.cos, arity=1, alu=False),
    Operator("tan", np.tan, arity=1, alu=False),
    Operator("arctan", np.arctan, arity=1, alu=False, activation=True),
    Operator("sign", np.sign, arity=1, alu=False, activation=True),
    Operator("ceil", np.ceil, arity=1, alu=False),
    Operator("floor", np.floor, arity=1, alu=False),
    Operator("trunc", np.trunc, arity=1, alu=False),
    Operator("prelu", _no_prelu, arity=1, alu=False, activation=True),
    Operator("bypass", lambda x: x, arity=1, alu=False),
    Operator("average", np.add, alu=False, reduce="average"),
]

BY_NAME: dict[str, Operator] = {op.name: op for op in _TABLE}
OPERATORS = tuple(op for op in _TABLE if op.alu)
ACTIVATIONS = tuple(op for op in _TABLE if op.activation)

# Valid input ranges of the Scalar engine's tables; (low, high, symmetric: the range applies to |x|).
RANGES: dict[str, tuple[float, float, bool]] = {
    "log": (2.0**-64, 2.0**64, False),
    "sqrt": (2.0**-116, 2.0**118, False),
    "rsqrt": (2.0**-87, 2.0**97, False),
    "reciprocal": (2.0**-42, 2.0**42, True),
    "sin": (-math.pi, math.pi, False),
    "arctan": (-math.pi / 2, math.pi / 2, False),
}

COMMUTATIVE_IDENTITY: dict[str, float] = {
    "add": 0.0, "subtract": 0.0, "multiply": 1.0, "maximum": -math.inf, "minimum": math.inf, "abs_max": 0.0,
}  # fmt: skip


def find(name: str) -> Operator:
    return BY_NAME[name]


def reduce_free(op: Operator, values: Array, axes: tuple[int, ...]) -> Array:
    """Reduce trailing axes. `subtract` folds left to right: x0 - x1 - x2 ..."""
    kind = op.reduce
    if kind is np.subtract:
        lead = values.shape[: values.ndim - len(axes)]
        flat = values.reshape(*lead, -1)
        return np.asarray(2 * flat[..., 0] - flat.sum(axis=-1))
    if isinstance(kind, np.ufunc):
        if kind is np.add and values.dtype == np.float32:
            return np.asarray(np.add.reduce(values, axis=axes, dtype=np.float32))
        return np.asarray(kind.reduce(values, axis=axes))
    if kind == "abs_max":
        return np.asarray(np.abs(values).max(axis=axes))
    if kind == "abs_min":
        return np.asarray(np.abs(values).min(axis=axes))
    if kind == "average":
        return np.asarray(values.mean(axis=axes, dtype=np.float32))
    truth = values != 0
    reduced = {
        "logical_and": lambda: truth.all(axis=axes),
        "logical_or": lambda: truth.any(axis=axes),
        "logical_xor": lambda: np.logical_xor.reduce(
            truth.reshape(*values.shape[: values.ndim - len(axes)], -1), axis=-1
        ),
    }[kind]()
    return np.asarray(reduced).astype(np.float32)
