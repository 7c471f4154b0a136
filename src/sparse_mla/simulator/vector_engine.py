# SPDX-License-Identifier: Apache-2.0
"""Vector engine: element-wise arithmetic, copies, reductions and scans. Inputs become float32, results the dst's dtype.

Instructions that may also run on Scalar or GpSimd (tensor_copy, memset, tensor_tensor, tensor_scalar) live here because
Vector is their default engine. The order is that of the nki.isa index.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import dtypes
from .constants import engine as Engine
from .constants import reduce_cmd as Command
from .core import GPSIMD, PSUM, SBUF, SCALAR, VECTOR, Array, Machine, current, describe, instruction
from .operators import BITVEC, BY_NAME, COMMUTATIVE_IDENTITY, Operator, reduce_free
from .tensor import NkiTensor

__all__ = [
    "bn_aggr", "bn_stats", "dropout", "max8", "memset", "nc_find_index8", "nc_match_replace8", "nc_stream_shuffle",
    "range_select", "reciprocal", "scalar_tensor_tensor", "select_reduce", "tensor_copy", "tensor_copy_predicated",
    "tensor_reduce", "tensor_scalar", "tensor_scalar_cumulative", "tensor_scalar_reduce", "tensor_tensor",
    "tensor_tensor_scan",
]  # fmt: skip

BOTH = (SBUF, PSUM)
FP32_MIN = float(np.finfo(np.float32).min)
_RENAMED = {"max": "maximum", "min": "minimum"}


def pick_engine(m: Machine, value: Any, default: str, allowed: tuple[str, ...]) -> str:
    """The engine an `engine=` argument names, checked against what the instruction may run on."""
    if value is None or value is Engine.unknown:
        return default
    if not isinstance(value, Engine):
        m.fail(0, f"engine must be one of nki.isa.engine, got {describe(value)}")
    if value.name not in allowed:
        m.fail(28, f"engine {value.name} cannot run this; possible: {', '.join(allowed)}")
    return value.name


def pick_operator(m: Machine, role: str, value: Any) -> Operator:
    """An operator of nki.language; `nl.max` / `nl.min` are accepted under their new names with a warning."""
    if isinstance(value, Operator):
        return value
    name = _RENAMED.get(getattr(value, "__name__", ""))
    if name is not None:
        m.warn(0, f"{role}: nl.{value.__name__} as an operator is now nl.{name}")
        return BY_NAME[name]
    m.fail(25, f"{role} must be an operator of nki.language, got {describe(value)}")


def on_chip(m: Machine, role: str, value: Any, engine: str = VECTOR) -> NkiTensor:
    """An SBUF or PSUM operand of a compute engine; GpSimd reaches SBUF only."""
    t = m.tile(role, value, (SBUF,) if engine == GPSIMD else BOTH, 16)
    return t if t.scalar_index is None else m.dynamic(role, t)


def not_both_psum(m: Machine, **tiles: Any) -> None:
    if m.checks and all(isinstance(t, NkiTensor) and t.memory == PSUM for t in tiles.values()):
        m.fail(18, f"{' and '.join(tiles)} are both in PSUM; copy one to SBUF")


def immediate(m: Machine, role: str, value: Any) -> np.float32:
    if isinstance(value, (bool, int, float, np.integer, np.floating)):
        number = np.float32(value)
        if isinstance(value, (int, np.integer)) and int(number) != value:
            m.warn(27, f"{role} {value} travels as float32 and becomes {int(number)}")
        return number
    m.fail(24, f"{role} must be a number or a (P, 1) tensor, got {describe(value)}")


def scalar_operand(
    m: Machine, role: str, value: Any, like: NkiTensor, *, fp32: bool = True
) -> tuple[Any, NkiTensor | None]:
    """(float32 constant or (P, 1, ..) array that broadcasts over `like`, the tensor when it is one)."""
    if isinstance(value, NkiTensor):
        t = m.column(role, value, like, fp32=fp32)
        if t.scalar_index is not None:
            t = m.dynamic(role, t)
        values = m.f32(role, t)
        return values.reshape(values.shape[0], *([1] * (like.ndim - 1))), t
    return immediate(m, role, value), None


def elementwise(m: Machine, op: Operator, role: str, x: Any, y: Any) -> Array:
    """op on float32 (or exact integer) arrays."""
    if not op.lowers:
        m.fail_or_warn(0, f"{role}: nl.{op.name} does not lower on the device; simulate only", fatal=m.strict)
    return op.function(x) if op.arity == 1 else op.function(x, y)  # type: ignore[no-any-return]


def alu(m: Machine, role: str, value: Any, *, binary: bool = False) -> Operator:
    """An operator the Vector engine's ALU has; one of two operands with `binary`."""
    op = pick_operator(m, role, value)
    if binary and op.arity == 1:
        m.fail(25, f"{role}: nl.{op.name} takes one operand, this instruction needs an operator of two")
    if m.checks and not op.alu:
        m.fail(25, f"{role}: nl.{op.name} is no Vector operator; use nisa.activation")
    if m.checks and op.arity == 1 and op.name in ("relu", "square", "abs") and m.target.gen < 3:
        m.fail(48, f"{role}: nl.{op.name} in the ALU needs trn2 or later")
    return op


def bitvec_rules(m: Machine, dst: NkiTensor, tiles: dict[str, NkiTensor], engine: str) -> None:
    if not m.checks:
        return
    if engine != VECTOR:
        m.fail(25, f"bit operators run on the Vector engine, not on {engine}")
    for role, t in tiles.items():
        if t.dtype.is_float or t.dtype.is_packed:
            m.fail(25, f"{role} must be an integer type for bit operators, got {t.brief()}; reinterpret with .view()")
        if t.dtype is not dst.dtype:
            m.fail(25, f"{role} {t.brief()} and dst {dst.brief()} must have one dtype for bit operators")


def raw_operand(m: Machine, role: str, value: Any, data: NkiTensor) -> Any:
    """An integer immediate in the width of `data`; tile operands of bit operators are refused by the compiler."""
    if isinstance(value, NkiTensor):
        m.fail_or_warn(
            25, f"{role}: integer tile operands of tensor_scalar are refused by the compiler", fatal=m.checks
        )
        return m.read(role, value).reshape(data.shape[0], *([1] * (data.ndim - 1)))
    if not isinstance(value, (bool, int, float, np.integer, np.floating)) or not float(value).is_integer():
        m.fail(25, f"{role} of a bit operator must be an integer, got {describe(value)}")
    width = data.dtype.itemsize * 8
    if not -(1 << width - 1) <= int(value) < 1 << width:
        m.fail(25, f"{role} {value} does not fit the {width} bits of data {data.brief()}")
    return (
        np.array(int(value) & ((1 << width) - 1), np.uint64).astype(f"u{data.dtype.itemsize}").view(data.dtype.np)[()]
    )


# -- copies and fills ---------------------------------------------------------------------------------------------


@instruction
def tensor_copy(dst: Any, src: Any, engine: Any = Engine.unknown, name: Any = None) -> None:
    """dst = src, cast through float32 when the dtypes differ, bit for bit when they agree."""
    m = current()
    where = pick_engine(m, engine, VECTOR, (VECTOR, SCALAR, GPSIMD))
    if where == SCALAR and m.target.gen < 3 and m.checks:
        m.fail(28, "the Scalar engine of trn1 has no tensor_copy; use nisa.activation(op=nl.copy)")
    # Memory types
    src = on_chip(m, "src", src, where)
    dst = on_chip(m, "dst", dst, where)
    # Layout and tile size
    m.same_size(dst=dst, src=src)
    # Result
    copy_tile(m, dst, src)
    m.emit(where, (dst,), (src,))


def copy_tile(m: Machine, dst: NkiTensor, src: NkiTensor) -> None:
    if src.dtype is dst.dtype:
        values = m.read("src", src)
        out = dst.array()
        out[...] = values if values.shape == out.shape else values.reshape(out.shape)
        m.wrote(dst)
    elif src.dtype.is_int and dst.dtype.is_int and src.dtype.itemsize < 4:
        m.write(dst, m.read("src", src).astype(np.int32))
    else:
        m.write(dst, m.f32("src", src))


@instruction
def memset(dst: Any, value: Any, engine: Any = Engine.unknown, name: Any = None) -> None:
    """dst = value."""
    m = current()
    where = pick_engine(m, engine, VECTOR, (VECTOR, GPSIMD))
    dst = on_chip(m, "dst", dst, where)
    fill(m, dst, value)
    m.emit(where, (dst,), (), zero=bool(value == 0))


def fill(m: Machine, dst: NkiTensor, value: Any) -> None:
    dtype = dst.dtype
    is_int = isinstance(value, (bool, int, np.integer))
    if not is_int and not isinstance(value, (float, np.floating)):
        m.fail(49, f"value must be a number, got {describe(value)}")
    if m.checks:
        if dtype.is_packed and value != 0:
            m.fail(49, f"value of a packed tile {dst.brief()} must be 0, got {value}")
        if dtype.is_int and not is_int:
            m.fail_or_warn(
                49, f"value {value!r} is a float but dst {dst.brief()} holds integers; pass an int",
                fatal=not (m.compat and float(value).is_integer()),
            )  # fmt: skip
        if dtype.is_float and is_int and value != 0:
            m.fail_or_warn(
                49, f"value {value!r} is an int but dst {dst.brief()} holds floats; pass a float", fatal=not m.compat
            )
        if dst.memory == PSUM and dtype.itemsize != 4:
            m.fail_or_warn(
                49, f"memset of PSUM was seen to work for 4-byte types only, got {dst.brief()}", fatal=m.strict
            )
    out = dst.array()
    if dtype.is_float:
        constant(m, dst, value, out)
    elif dtype.is_packed:
        out[...] = 0
    elif dtype.is_bool:
        out[...] = value != 0
    else:
        info = np.iinfo(dtype.np)
        number = int(value)
        if not info.min <= number <= info.max:
            m.fail(49, f"value {value} does not fit {dtype}")
        out[...] = number
    m.wrote(dst)


def constant(m: Machine, dst: NkiTensor, value: Any, out: Array) -> None:
    """Fill `out` with a number in dst's dtype, cast as an engine casts."""
    one = np.empty(1, dst.dtype.np)
    number = np.array([value], np.float32)
    dtypes.cast_into(one, number, dst.dtype)
    if m.checks and dst.dtype.is_float and np.isfinite(value) and not np.isfinite(dtypes.to_f32(one, dst.dtype)[0]):
        m.warn(29, f"value {value} overflows {dst.dtype} of dst {dst.brief()}")
    out[...] = one[0]


@instruction
def tensor_copy_predicated(dst: Any, src: Any, predicate: Any, reverse_pred: bool = False, name: Any = None) -> None:
    """dst = src where predicate is nonzero (zero with reverse_pred); elsewhere dst keeps its value."""
    m = current()
    dst, predicate = on_chip(m, "dst", dst), on_chip(m, "predicate", predicate)
    m.same_size(dst=dst, predicate=predicate)
    if m.checks and predicate.dtype not in (dtypes.uint8, dtypes.uint16, dtypes.uint32):
        m.fail(25, f"predicate must be uint8, uint16 or uint32, got {predicate.brief()}")
    chosen = m.read("predicate", predicate).reshape(dst.shape) != 0
    if reverse_pred:
        chosen = ~chosen
    out = dst.array()
    reads = [predicate]
    if isinstance(src, NkiTensor):
        src = on_chip(m, "src", src)
        not_both_psum(m, src=src, predicate=predicate)
        m.same_start(src=src, predicate=predicate)
        m.same_size(dst=dst, src=src)
        if m.checks and src.dtype is not dst.dtype:
            m.fail(23, f"src {src.brief()} and dst {dst.brief()} must have one dtype")
        np.copyto(out, m.read("src", src).reshape(dst.shape), where=chosen)
        reads.append(src)
    else:
        filled = np.empty(1, dst.dtype.np)
        constant(m, dst, immediate(m, "src", src), filled)
        np.copyto(out, filled[0], where=chosen)
    if not dst.storage.all_init and m.tracks_init and not chosen.all():
        m.storage_partial(dst, chosen)
    else:
        m.wrote(dst)
    m.emit(VECTOR, (dst,), (*reads, dst))


@instruction
def reciprocal(dst: Any, data: Any, name: Any = None) -> None:
    """dst = 1 / data."""
    m = current()
    dst, data = on_chip(m, "dst", dst), on_chip(m, "data", data)
    m.same_size(dst=dst, data=data)
    m.write(dst, np.float32(1) / m.f32("data", data))
    m.emit(VECTOR, (dst,), (data,))


# -- element-wise -------------------------------------------------------------------------------------------------


@instruction
def tensor_tensor(dst: Any, data1: Any, data2: Any, op: Any, engine: Any = Engine.unknown, name: Any = None) -> None:
    """dst = data1 op data2."""
    m = current()
    op = alu(m, "op", op, binary=True)
    for role, t in (("dst", dst), ("data1", data1), ("data2", data2)):
        if type(t) is not NkiTensor:
            m.fail(23, f"{role} must be a tensor, got {describe(t)}")
    wide = (dtypes.int32, dtypes.uint32)
    integer = (
        op.family != BITVEC and data1.dtype in wide and data2.dtype in wide and dst.dtype in wide and engine is not
        Engine.vector and PSUM not in (data1.memory, data2.memory, dst.memory)
    )  # fmt: skip
    default = GPSIMD if integer or op.name == "power" else VECTOR
    where = pick_engine(m, engine, default, (VECTOR, GPSIMD))
    if op.name == "power" and where != GPSIMD and m.checks:
        m.fail(25, "op: nl.power runs on GpSimd only")
    # Memory types
    data1, data2 = on_chip(m, "data1", data1, where), on_chip(m, "data2", data2, where)
    dst = on_chip(m, "dst", dst, where)
    not_both_psum(m, data1=data1, data2=data2)
    # Layout and tile size
    m.same_start(data1=data1, data2=data2)
    m.same_size(dst=dst, data1=data1, data2=data2)
    # Result
    if op.family == BITVEC:
        bitvec_rules(m, dst, {"data1": data1, "data2": data2}, where)
        x, y = m.read("data1", data1), m.read("data2", data2)
        if y.shape != x.shape:
            y = y.reshape(x.shape)
        raw = elementwise(m, op, "op", x, y)
        out = dst.array()
        out[...] = raw.reshape(out.shape)
        m.wrote(dst)
    elif integer and where == GPSIMD and not op.predicate and op.name not in ("divide", "power"):
        x, y = m.read("data1", data1), m.read("data2", data2)
        result = op.function(x.astype(np.int64), y.reshape(x.shape).astype(np.int64))
        out = dst.array()
        out[...] = (
            (result & 0xFFFFFFFF).astype(np.uint32).view(out.dtype).reshape(out.shape)
        )  # wraps as 32-bit adders do
        m.wrote(dst)
    else:
        if integer and where == GPSIMD and op.predicate:
            x, y = m.read("data1", data1).astype(np.int64), m.read("data2", data2).astype(np.int64)
        else:
            x, y = m.f32("data1", data1), m.f32("data2", data2)
        if y.shape != x.shape:
            y = y.reshape(x.shape)
        m.write(dst, elementwise(m, op, "op", x, y))
    m.emit(where, (dst,), (data1, data2), op=op.name)


def scalar_engine_rules(m: Machine, where: str, op0: Operator, op1: Operator | None) -> None:
    if not m.checks:
        return
    pair = (op0.name, op1.name if op1 is not None else None)
    if where == SCALAR:
        if m.target.gen < 3:
            m.fail(28, "the Scalar engine of trn1 has no tensor_scalar")
        if pair not in (("multiply", "add"), ("multiply", None), ("add", None)):
            m.fail(28, f"the Scalar engine runs (multiply, add), (multiply) and (add) only, got {pair}")
    if where == GPSIMD and op0.name != "rsqrt":
        m.fail(28, f"GpSimd runs rsqrt only, got {op0.name}")


@instruction
def tensor_scalar(
    dst: Any, data: Any, op0: Any, operand0: Any, reverse0: bool = False, op1: Any = None, operand1: Any = None,
    reverse1: bool = False, engine: Any = Engine.unknown, name: Any = None,
) -> None:  # fmt: skip
    """dst = (data op0 operand0) op1 operand1; operands are constants or (P, 1) tiles."""
    m = current()
    where = pick_engine(m, engine, VECTOR, (VECTOR, SCALAR, GPSIMD))
    op0 = alu(m, "op0", op0)
    op1 = alu(m, "op1", op1) if op1 is not None else None
    # Memory types
    data = on_chip(m, "data", data, where)
    dst = on_chip(m, "dst", dst, where)
    # Layout and tile size
    m.same_size(dst=dst, data=data)
    if m.checks and op1 is not None and (op0.family == BITVEC) != (op1.family == BITVEC):
        m.fail(25, f"op0 {op0.name} and op1 {op1.name} mix bit and arithmetic operators")
    if op1 is None and operand1 is not None:
        m.fail(24, "operand1 is given without op1")
    reads = [data]
    if op0.family == BITVEC:
        bitvec_rules(m, dst, {"data": data}, where)
        if op1 is not None and op1.name == "right_shift":
            m.fail_or_warn(26, "right_shift as op1 was refused by the compiler; use it as op0", fatal=m.strict)
        values = m.read("data", data)
        for op, operand, reverse, role in (
            (op0, operand0, reverse0, "operand0"),
            (op1, operand1, reverse1, "operand1"),
        ):
            if op is None:
                continue
            if op.arity == 1:
                values = op.function(values)
                continue
            raw = raw_operand(m, role, operand, data)
            if isinstance(operand, NkiTensor):
                reads.append(operand)
            values = op.function(np.broadcast_to(raw, values.shape), values) if reverse else op.function(values, raw)
        out = dst.array()
        out[...] = values.reshape(out.shape)
        m.wrote(dst)
    else:
        scalar_engine_rules(m, where, op0, op1)
        result, used = scale_shift(m, data, op0, operand0, reverse0, op1, operand1, reverse1)
        reads += used
        m.same_start(**{f"operand{i}": t for i, t in enumerate(reads)}) if used else None
        m.write(dst, result)
    m.emit(where, (dst,), tuple(reads), op=op0.name, op1=op1.name if op1 is not None else None)


def scale_shift(
    m: Machine,
    data: NkiTensor,
    op0: Operator,
    operand0: Any,
    reverse0: bool,
    op1: Operator | None,
    operand1: Any,
    reverse1: bool,
    *,
    fp32: bool = True,
) -> tuple[Array, list[NkiTensor]]:
    """(data op0 operand0) op1 operand1 in float32; `fp32`: operand tiles must be float32."""
    values = m.f32("data", data)
    used: list[NkiTensor] = []
    for op, operand, reverse, role in ((op0, operand0, reverse0, "operand0"), (op1, operand1, reverse1, "operand1")):
        if op is None:
            continue
        if op.arity == 1:
            if operand is not None and (isinstance(operand, NkiTensor) or operand != 0):
                m.fail(24, f"{role} must be None or 0 for the unary operator {op.name}")
            values = elementwise(m, op, role, values, None)
            continue
        if operand is None:
            m.fail(24, f"{role} is missing for operator {op.name}")
        other, tensor = scalar_operand(m, role, operand, data, fp32=fp32)
        if tensor is not None:
            used.append(tensor)
        values = elementwise(m, op, role, other, values) if reverse else elementwise(m, op, role, values, other)
    return values, used


@instruction
def scalar_tensor_tensor(
    dst: Any, data: Any, op0: Any, operand0: Any, op1: Any, operand1: Any, reverse0: bool = False,
    reverse1: bool = False, name: Any = None,
) -> None:  # fmt: skip
    """dst = (data op0 operand0) op1 operand1, operand1 a full tile."""
    m = current()
    op0, op1 = alu(m, "op0", op0), alu(m, "op1", op1, binary=True)
    if BITVEC in (op0.family, op1.family):
        m.fail(25, "scalar_tensor_tensor takes arithmetic operators only")
    # Memory types
    data, operand1, dst = on_chip(m, "data", data), on_chip(m, "operand1", operand1), on_chip(m, "dst", dst)
    not_both_psum(m, data=data, operand1=operand1)
    # Layout and tile size
    m.same_size(dst=dst, data=data, operand1=operand1)
    # Result
    values, used = scale_shift(m, data, op0, operand0, reverse0, None, None, False, fp32=False)
    m.same_start(data=data, operand1=operand1, **({"operand0": used[0]} if used else {}))
    other = m.f32("operand1", operand1)
    if other.shape != values.shape:
        other = other.reshape(values.shape)
    result = elementwise(m, op1, "op1", other, values) if reverse1 else elementwise(m, op1, "op1", values, other)
    m.write(dst, result)
    m.emit(VECTOR, (dst,), (data, operand1, *used), op=op0.name, op1=op1.name)


@instruction
def tensor_tensor_scan(
    dst: Any, data0: Any, data1: Any, initial: Any, op0: Any, op1: Any, reverse0: bool = False, reverse1: bool = False,
    name: Any = None,
) -> None:  # fmt: skip
    """r[i] = (data0[i] op0 r[i-1]) op1 data1[i] along the free axis, float32 state."""
    m = current()
    op0, op1 = alu(m, "op0", op0, binary=True), alu(m, "op1", op1, binary=True)
    if BITVEC in (op0.family, op1.family):
        m.fail(25, "tensor_tensor_scan takes binary arithmetic operators only")
    data0, data1, dst = on_chip(m, "data0", data0), on_chip(m, "data1", data1), on_chip(m, "dst", dst)
    not_both_psum(m, data0=data0, data1=data1)
    m.same_start(data0=data0, data1=data1)
    m.same_size(dst=dst, data0=data0, data1=data1)
    start, tensor = scalar_operand(m, "initial", initial, data0, fp32=False)
    p, n = data0.shape[0], data0.free_size
    a = m.f32("data0", data0).reshape(p, n)
    b = m.f32("data1", data1).reshape(p, n)
    state = np.broadcast_to(np.asarray(start, np.float32).reshape(-1), (p,))
    m.write(dst, scan(a, b, state, op0, op1, reverse0, reverse1))
    m.emit(VECTOR, (dst,), (data0, data1) if tensor is None else (data0, data1, tensor), op=op0.name, op1=op1.name)


def scan(a: Array, b: Array, state: Array, op0: Operator, op1: Operator, reverse0: bool, reverse1: bool) -> Array:
    """r[i] = (a[i] op0 r[i-1]) op1 b[i] along the last axis of (P, N) arrays."""
    first, second = op0.function, op1.function
    # A running sum, maximum or minimum is a recurrence NumPy has: same order, same rounding, no Python per element.
    neutral = {"multiply": 1.0, "add": 0.0}.get(op0.name)
    if neutral is not None and op1.name in ("add", "maximum", "minimum") and bool((a == np.float32(neutral)).all()):
        steps = np.array(b, np.float32)
        steps[:, 0] = second(first(a[:, 0], state), b[:, 0])
        return np.asarray(getattr(np, op1.name).accumulate(steps, axis=1))
    a, b = np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)
    out = np.empty(a.shape, np.float32)
    for i in range(len(a)):  # a true recurrence: one operation over all partitions per step
        inner = first(state, a[i]) if reverse0 else first(a[i], state)
        state = second(b[i], inner) if reverse1 else second(inner, b[i])
        out[i] = state
    return np.ascontiguousarray(out.T)


# -- reductions ---------------------------------------------------------------------------------------------------


@instruction
def tensor_reduce(
    dst: Any, op: Any, data: Any, axis: Any, negate: bool = False, keepdims: bool = False, name: Any = None
) -> None:
    """dst = op over trailing free axes of data, times -1 with negate."""
    m = current()
    op = alu(m, "op", op)
    if op.reduce is None:
        m.fail(25, f"op: nl.{op.name} is no reduction operator")
    data, dst = on_chip(m, "data", data), on_chip(m, "dst", dst)
    axes = tuple(sorted(a + data.ndim if a < 0 else a for a in ((axis,) if isinstance(axis, int) else tuple(axis))))
    if not axes or axes[0] == 0:
        m.fail(
            23, f"axis {axis} must name free axes; the partition axis needs nisa.tensor_partition_reduce or a matmul"
        )
    if axes != tuple(range(data.ndim - len(axes), data.ndim)):
        m.fail(23, f"axis {axis} must be the last dims of data {data.brief()}; reorder with permute")
    kept = 1
    for n in data.shape[1 : data.ndim - len(axes)]:
        kept *= n
    if dst.shape[0] != data.shape[0] or dst.free_size != kept:
        m.fail(
            23, f"dst {dst.brief()} must hold {data.shape[0]} x {kept} results of data {data.brief()} over axis {axis}"
        )
    if op.family == BITVEC:
        bitvec_rules(m, dst, {"data": data}, VECTOR)
        if negate:
            m.fail(25, "negate is for arithmetic operators")
        out = dst.array()
        out[...] = reduce_free(op, m.read("data", data), axes).reshape(out.shape)
        m.wrote(dst)
    else:
        result = reduce_free(op, m.f32("data", data), axes)
        m.write(dst, np.negative(result) if negate else result)
    m.emit(VECTOR, (dst,), (data,), data.free_size, op=op.name)


def accumulate_registers(
    m: Machine, lanes: slice, command: Any, op: Operator, values: Array, init: Any, allowed: tuple[Any, ...]
) -> Array:
    """Fold a tile's free-axis reduction into the Vector accumulators of its lanes; returns their (P,) state."""
    p = values.shape[0]
    if command not in allowed:
        m.fail(29, f"reduce_cmd must be one of {', '.join(c.name for c in allowed)}, got {describe(command)}")
    if command is Command.reduce:
        state = m.vector_registers.read(m, lanes)
    elif command is Command.load_reduce:
        state = np.broadcast_to(np.asarray(init, np.float32).reshape(-1), (p,))
    else:
        state = np.full(p, COMMUTATIVE_IDENTITY[op.name], np.float32)
    part = reduce_free(op, values, tuple(range(1, values.ndim)))
    return m.vector_registers.write(lanes, op.function(state, part))


@instruction
def tensor_scalar_reduce(
    dst: Any, data: Any, op0: Any, operand0: Any, reduce_op: Any, reduce_res: Any = None, reverse0: bool = False,
    reduce_cmd: Any = Command.reset_reduce, reduce_init: Any = None, reduce_res_negate: bool = False, name: Any = None,
) -> None:  # fmt: skip
    """dst = data op0 operand0; the Vector accumulators gain reduce_op of dst along the free axes."""
    m = current()
    op0, reduce_op = alu(m, "op0", op0), alu(m, "reduce_op", reduce_op)
    if op0.family == BITVEC:
        m.fail(25, "tensor_scalar_reduce takes arithmetic operators only")
    if reduce_op.name not in ("add", "multiply", "maximum", "minimum"):
        m.fail(25, f"reduce_op must be add, multiply, maximum or minimum, got {reduce_op.name}")
    if (reduce_init is not None) != (reduce_cmd is Command.load_reduce):
        m.fail(24, "reduce_init goes with reduce_cmd.load_reduce and only with it")
    data, dst = on_chip(m, "data", data), on_chip(m, "dst", dst)
    m.same_size(dst=dst, data=data)
    values, reads = scale_shift(m, data, op0, operand0, reverse0, None, None, False)
    init = None
    if reduce_init is not None:
        init, tensor = scalar_operand(m, "reduce_init", reduce_init, data)
        reads += [tensor] if tensor is not None else []
    m.same_start(**{f"operand{i}": t for i, t in enumerate([data, *reads])})
    state = accumulate_registers(
        m, data.lanes, reduce_cmd, reduce_op, values, init,
        (Command.reset_reduce, Command.reduce, Command.load_reduce),
    )  # fmt: skip
    m.write(dst, values)
    writes = write_registers(m, dst, data, reduce_res, np.negative(state) if reduce_res_negate else state)
    m.emit(VECTOR, writes, (data, *reads), op=op0.name, op1=reduce_op.name)


def write_registers(
    m: Machine, dst: NkiTensor, like: NkiTensor, reduce_res: Any, state: Array
) -> tuple[NkiTensor, ...]:
    if reduce_res is None:
        return (dst,)
    column = m.column("reduce_res", reduce_res, like, fp32=False)
    if column.scalar_index is not None:
        column = m.dynamic("reduce_res", column)
    m.write(column, state.reshape(-1, 1))
    return (dst, column)


@instruction
def tensor_scalar_cumulative(
    dst: Any,
    src: Any,
    op0: Any,
    op1: Any,
    imm0: Any,
    imm1: Any = None,
    reduce_cmd: Any = Command.reset_reduce,
    name: Any = None,
) -> None:
    """Running op1 of (src op0 imm0) along the free axis, carried in the Vector accumulators."""
    m = current()
    op0, op1 = alu(m, "op0", op0), alu(m, "op1", op1)
    if op0.family == BITVEC:
        m.fail(25, "op0 must be an arithmetic operator")
    if imm1 is not None and reduce_cmd is not Command.load_reduce:
        m.fail(24, "imm1 goes with reduce_cmd.load_reduce and only with it")
    if op1.name not in ("add", "subtract", "multiply", "maximum", "minimum"):
        m.fail(25, f"op1 must be add, subtract, multiply, maximum or minimum, got {op1.name}")
    src, dst = on_chip(m, "src", src), on_chip(m, "dst", dst)
    m.same_size(dst=dst, src=src)
    if m.checks:
        for role, t in (("src", src), ("dst", dst)):
            if t.dtype in (dtypes.int32, dtypes.uint32):
                m.fail(25, f"{role} must not be a 32-bit integer, got {t.brief()}")
    values, reads = scale_shift(m, src, op0, imm0, False, None, None, False)
    p = src.shape[0]
    if reduce_cmd is Command.load_reduce:
        if imm1 is None:
            m.fail(24, "imm1 is the initial value of reduce_cmd.load_reduce")
        start, tensor = scalar_operand(m, "imm1", imm1, src)
        reads += [tensor] if tensor is not None else []
        state = np.broadcast_to(np.asarray(start, np.float32).reshape(-1), (p,)).copy()
    elif reduce_cmd is Command.reduce:
        state = m.vector_registers.read(m, src.lanes)
    elif reduce_cmd is Command.reset_reduce:
        state = np.full(p, COMMUTATIVE_IDENTITY[op1.name], np.float32)
    else:
        m.fail(29, f"reduce_cmd must be reset_reduce, reduce or load_reduce, got {describe(reduce_cmd)}")
    steps = np.ascontiguousarray(values.reshape(p, -1).T)
    out = np.empty_like(steps)
    for i in range(steps.shape[0]):
        state = op1.function(steps[i], state)
        out[i] = state
    m.vector_registers.write(src.lanes, state)
    m.write(dst, np.ascontiguousarray(out.T))
    m.emit(VECTOR, (dst,), (src, *reads), op=op0.name, op1=op1.name)


# -- selects ------------------------------------------------------------------------------------------------------

_COMPARISONS = ("equal", "less", "less_equal", "greater", "greater_equal")


@instruction
def range_select(
    dst: Any, on_true_tile: Any, comp_op0: Any, comp_op1: Any, bound0: Any, bound1: Any,
    reduce_cmd: Any = Command.reset_reduce, reduce_res: Any = None, reduce_op: Any = BY_NAME["maximum"],
    range_start: int = 0, on_false_value: Any = FP32_MIN, name: Any = None,
) -> None:  # fmt: skip
    """Keep the elements whose index satisfies both comparisons with the (P, 1) bounds, FP32_MIN elsewhere."""
    m = current()
    if m.checks and m.target.gen < 3:
        m.fail(48, "range_select exists from trn2 on")
    tile, dst = on_chip(m, "on_true_tile", on_true_tile), on_chip(m, "dst", dst)
    m.same_size(dst=dst, on_true_tile=tile)
    if m.checks:
        if not tile.dtype.is_float:
            m.fail(25, f"on_true_tile must be a float type, got {tile.brief()}")
        if reduce_op is not None and pick_operator(m, "reduce_op", reduce_op).name != "maximum":
            m.fail(25, "reduce_op must be nl.maximum")
        if np.float32(on_false_value) != np.float32(FP32_MIN):
            m.fail(24, f"on_false_value must be the float32 minimum, got {on_false_value}")
        if abs(range_start) + tile.free_size >= m.target.exact_int_limit:
            m.fail(27, f"range_start {range_start} + {tile.free_size} indices must stay below 2^24")
    ops = []
    for role, op in (("comp_op0", comp_op0), ("comp_op1", comp_op1)):
        found = pick_operator(m, role, op)
        if found.name not in _COMPARISONS:
            m.fail(25, f"{role} must be one of {', '.join(_COMPARISONS)}, got {found.name}")
        ops.append(found)
    low = m.column("bound0", bound0, tile, fp32=True)
    high = m.column("bound1", bound1, tile, fp32=True)
    m.same_start(on_true_tile=tile, bound0=low, bound1=high)
    index = (np.arange(tile.free_size, dtype=np.float32) + np.float32(range_start))[None]
    keep = (ops[0].function(index, m.f32("bound0", low).reshape(-1, 1)) != 0) & (
        ops[1].function(index, m.f32("bound1", high).reshape(-1, 1)) != 0
    )
    values = np.where(keep, m.f32("on_true_tile", tile).reshape(tile.shape[0], -1), np.float32(FP32_MIN))
    state = accumulate_registers(
        m, tile.lanes, reduce_cmd, BY_NAME["maximum"], values, None, (Command.reset_reduce, Command.reduce)
    )
    m.write(dst, values)
    m.emit(VECTOR, write_registers(m, dst, tile, reduce_res, state), (tile, low, high))


@instruction
def select_reduce(
    dst: Any, predicate: Any, on_true: Any, on_false: Any, reduce_res: Any = None, reduce_cmd: Any = Command.idle,
    reduce_op: Any = BY_NAME["maximum"], reverse_pred: bool = False, name: Any = None,
) -> None:  # fmt: skip
    """dst = where(predicate, on_true, on_false), with an optional running max per partition."""
    m = current()
    dst, predicate, on_true = on_chip(m, "dst", dst), on_chip(m, "predicate", predicate), on_chip(m, "on_true", on_true)
    not_both_psum(m, on_true=on_true, predicate=predicate)
    m.same_start(on_true=on_true, predicate=predicate)
    m.same_size(dst=dst, predicate=predicate, on_true=on_true)
    if m.checks:
        if predicate.dtype not in (dtypes.int8, dtypes.uint8, dtypes.int16, dtypes.uint16):
            m.fail(25, f"predicate must be an 8- or 16-bit integer, got {predicate.brief()}")
        if on_true.dtype in (dtypes.int32, dtypes.uint32, dtypes.tfloat32):
            m.fail(25, f"on_true must not be tfloat32, int32 or uint32, got {on_true.brief()}")
        if reduce_op is not None and pick_operator(m, "reduce_op", reduce_op).name != "maximum":
            m.fail(25, "reduce_op must be nl.maximum")
    other, tensor = scalar_operand(m, "on_false", on_false, on_true, fp32=False)
    chosen = m.read("predicate", predicate).reshape(on_true.shape) != 0
    if reverse_pred:
        chosen = ~chosen
    values = np.where(chosen, m.f32("on_true", on_true), other).astype(np.float32, copy=False)
    reads = (predicate, on_true) if tensor is None else (predicate, on_true, tensor)
    if reduce_cmd is Command.idle:
        m.vector_registers.forget(on_true.lanes)  # documented: idle may still disturb the accumulators
        if reduce_res is not None:
            m.fail(24, "reduce_res needs a reduce_cmd other than idle")
        m.write(dst, values)
        m.emit(VECTOR, (dst,), reads)
        return
    state = accumulate_registers(
        m, on_true.lanes, reduce_cmd, BY_NAME["maximum"], values, None, (Command.reset_reduce, Command.reduce)
    )
    m.write(dst, values)
    m.emit(VECTOR, write_registers(m, dst, on_true, reduce_res, state), reads)


# -- partition movement -------------------------------------------------------------------------------------------

KEEP_LANE = 255


@instruction
def nc_stream_shuffle(dst: Any, src: Any, shuffle_mask: Any, name: Any = None) -> None:
    """Per quadrant of 32 partitions: dst lane i = src lane mask[i]; 255 leaves dst lane i as it is."""
    m = current()
    src, dst = m.tile("src", src, BOTH, 16, rule=False), m.tile("dst", dst, BOTH, 16, rule=False)
    lanes = m.target.quadrant
    mask = [int(v) for v in shuffle_mask]
    if len(mask) != lanes:
        m.fail(43, f"shuffle_mask must have {lanes} entries, got {len(mask)}")
    for v in mask:
        if v != KEEP_LANE and not 0 <= v < lanes:
            m.fail(43, f"shuffle_mask holds {v}; entries are 0..{lanes - 1} or {KEEP_LANE}")
    if m.checks:
        if src.dtype is not dst.dtype:
            m.fail(43, f"src {src.brief()} and dst {dst.brief()} must have one dtype")
        if src.free_size != dst.free_size:
            m.fail(23, f"src {src.brief()} and dst {dst.brief()} must have as many elements per partition")
        active = -(-max(src.shape[0], dst.shape[0]) // lanes) * lanes
        for role, t in (("src", src), ("dst", dst)):
            m.partition_rule(role, t, min(active, m.target.pmax) if active != 3 * lanes else m.target.pmax)
    values = m.read("src", src).reshape(src.shape[0], -1).copy()
    out = dst.array().reshape(dst.shape[0], -1) if dst.array().flags.c_contiguous else None
    target_rows, source_rows = [], []
    for row in range(dst.shape[0]):
        lane = mask[row % lanes]
        if lane == KEEP_LANE:
            continue
        origin = row // lanes * lanes + lane
        if origin >= src.shape[0]:
            m.fail_or_warn(
                43, f"dst partition {row} takes lane {lane} of its quadrant, outside src {src.brief()}",
                fatal=not m.compat,
            )  # fmt: skip
            continue
        target_rows.append(row)
        source_rows.append(origin)
    if out is not None:
        out[target_rows] = values[source_rows]
    else:
        view = dst.array()
        view[target_rows] = values[source_rows].reshape(len(source_rows), *dst.shape[1:])
    if len(target_rows) == dst.shape[0]:
        m.wrote(dst)
    else:
        chosen = np.zeros(dst.shape, np.bool_)
        chosen[target_rows] = True
        m.storage_partial(dst, chosen)
    m.emit(VECTOR, (dst,), (src,))


# -- top-8 --------------------------------------------------------------------------------------------------------


def _eight(m: Machine, role: str, t: NkiTensor, like: NkiTensor) -> None:
    if t.shape[0] != like.shape[0] or t.free_size != m.target.max8_min:
        m.fail(40, f"{role} must be ({like.shape[0]}, {m.target.max8_min}), got {t.brief()}")


def _searched(m: Machine, role: str, t: NkiTensor) -> None:
    low, high = m.target.max8_min, m.target.max8_max
    if not low <= t.free_size <= high:
        m.fail(40, f"{role} {t.brief()} must have {low} to {high} elements per partition")


@instruction
def max8(dst: Any, src: Any, name: Any = None) -> None:
    """The 8 largest values of each partition, descending."""
    m = current()
    src, dst = on_chip(m, "src", src), on_chip(m, "dst", dst)
    _searched(m, "src", src)
    _eight(m, "dst", dst, src)
    values = m.f32("src", src).reshape(src.shape[0], -1)
    count = m.target.max8_min
    top = np.partition(values, values.shape[1] - count, axis=1)[:, -count:] if values.shape[1] > count else values
    m.write(dst, np.sort(top, axis=1)[:, ::-1])
    m.emit(VECTOR, (dst,), (src,), src.free_size)


def match_positions(data: Array, vals: Array, *, reverse: bool) -> Array:
    """[P, 8] position of each value in each row, -1 when absent; equal values take successive occurrences, in column
    order or, with reverse, in reverse column order."""
    p, n = data.shape
    taken = np.zeros((p, n), np.bool_)
    found = np.full(vals.shape, -1, np.int64)
    rows = np.arange(p)
    columns = range(vals.shape[1] - 1, -1, -1) if reverse else range(vals.shape[1])
    for c in columns:
        hit = (data == vals[:, c : c + 1]) & ~taken
        where = hit.argmax(axis=1)
        present = hit[rows, where]
        found[present, c] = where[present]
        taken[rows[present], where[present]] = True
    return found


@instruction
def nc_find_index8(dst: Any, data: Any, vals: Any, name: Any = None) -> None:
    """Position of each of 8 values per partition; duplicates take successive occurrences, absent ones all ones."""
    m = current()
    data, vals, dst = on_chip(m, "data", data), on_chip(m, "vals", vals), on_chip(m, "dst", dst)
    _searched(m, "data", data)
    _eight(m, "vals", vals, data)
    _eight(m, "dst", dst, data)
    if dst.dtype not in (dtypes.uint16, dtypes.uint32):
        m.fail(40, f"dst must be uint16 or uint32, got {dst.brief()}")
    found = match_positions(
        m.f32("data", data).reshape(data.shape[0], -1), m.f32("vals", vals).reshape(vals.shape[0], -1), reverse=False
    )
    absent = np.iinfo(dst.dtype.np).max
    out = dst.array()
    out[...] = np.where(found < 0, absent, found).astype(dst.dtype.np).reshape(out.shape)
    m.wrote(dst)
    m.emit(VECTOR, (dst,), (data, vals), data.free_size)


@instruction
def nc_match_replace8(dst: Any, data: Any, vals: Any, imm: float, dst_idx: Any = None, name: Any = None) -> None:
    """data with one occurrence of each of 8 values replaced by imm; positions to dst_idx."""
    m = current()
    data, vals, dst = on_chip(m, "data", data), on_chip(m, "vals", vals), on_chip(m, "dst", dst)
    _searched(m, "data", data)
    _eight(m, "vals", vals, data)
    m.same_size(dst=dst, data=data)
    values = m.f32("data", data).reshape(data.shape[0], -1)
    found = match_positions(values, m.f32("vals", vals).reshape(vals.shape[0], -1), reverse=True)
    replaced = values.copy()
    row, column = np.nonzero(found >= 0)
    replaced[row, found[row, column]] = immediate(m, "imm", imm)
    m.write(dst, replaced)
    writes = [dst]
    if dst_idx is not None:
        index = on_chip(m, "dst_idx", dst_idx)
        _eight(m, "dst_idx", index, data)
        if index.dtype not in (dtypes.uint16, dtypes.uint32):
            m.fail(40, f"dst_idx must be uint16 or uint32, got {index.brief()}")
        absent = np.iinfo(index.dtype.np).max
        out = index.array()
        out[...] = np.where(found < 0, absent, found).astype(index.dtype.np).reshape(out.shape)
        m.wrote(index)
        writes.append(index)
    m.emit(VECTOR, tuple(writes), (data, vals), data.free_size)


# -- statistics ---------------------------------------------------------------------------------------------------

STATS = 6  # (count, mean, variance * count) of the even and of the odd elements


@instruction
def bn_stats(dst: Any, data: Any, name: Any = None) -> None:
    """Count, mean and variance * count of the even and of the odd elements of each partition."""
    m = current()
    data, dst = on_chip(m, "data", data), on_chip(m, "dst", dst)
    if data.free_size > m.target.bn_stats_fmax:
        m.fail(40, f"data {data.brief()} must have at most {m.target.bn_stats_fmax} elements per partition")
    if dst.shape[0] != data.shape[0] or dst.free_size != STATS:
        m.fail(23, f"dst must be ({data.shape[0]}, {STATS}), got {dst.brief()}")
    values = m.f32("data", data).reshape(data.shape[0], -1)
    out = np.zeros((data.shape[0], STATS), np.float32)
    for half in range(2):
        part = values[:, half::2]
        if part.shape[1]:
            out[:, 3 * half] = part.shape[1]
            out[:, 3 * half + 1] = part.mean(axis=1)
            out[:, 3 * half + 2] = part.var(axis=1) * np.float32(part.shape[1])
    m.write(dst, out)
    m.emit(VECTOR, (dst,), (data,), data.free_size)


@instruction
def bn_aggr(dst: Any, data: Any, name: Any = None) -> None:
    """Mean and variance of the union of (count, mean, variance * count) groups."""
    m = current()
    data, dst = on_chip(m, "data", data), on_chip(m, "dst", dst)
    if data.free_size % 3:
        m.fail(23, f"data {data.brief()} must hold (count, mean, variance * count) triples")
    if dst.shape[0] != data.shape[0] or dst.free_size != 2:
        m.fail(23, f"dst must be ({data.shape[0]}, 2), got {dst.brief()}")
    groups = m.f32("data", data).reshape(data.shape[0], -1, 3)
    count, mean, scatter = groups[..., 0], groups[..., 1], groups[..., 2]
    total = count.sum(axis=1)
    whole = (count * mean).sum(axis=1) / total
    variance = (scatter + count * np.square(mean - whole[:, None])).sum(axis=1) / total
    m.write(dst, np.stack([whole, variance], axis=1).astype(np.float32))
    m.emit(VECTOR, (dst,), (data,), data.free_size)


@instruction
def dropout(dst: Any, data: Any, prob: Any, name: Any = None) -> None:
    """data with elements replaced by zero with probability prob; the generator is seeded by the simulation."""
    m = current()
    data, dst = on_chip(m, "data", data), on_chip(m, "dst", dst)
    m.same_size(dst=dst, data=data)
    if m.checks and data.dtype is not dst.dtype:
        m.fail(23, f"data {data.brief()} and dst {dst.brief()} must have one dtype")
    chance, tensor = scalar_operand(m, "prob", prob, data, fp32=not data.dtype.is_float)
    drop = m.random().random(data.shape, np.float32) < chance
    values = m.read("data", data).copy()
    values[drop] = 0
    out = dst.array()
    out[...] = values.reshape(out.shape)
    m.wrote(dst)
    m.emit(VECTOR, (dst,), (data,) if tensor is None else (data, tensor))
