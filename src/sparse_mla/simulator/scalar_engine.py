# SPDX-License-Identifier: Apache-2.0
"""Scalar engine: activation functions with a free scale and bias, and a sum register per partition.

Functions are exact here (float32); the hardware's are tables, exact only inside the ranges of `operators.RANGES`, so an
input outside them is a warning.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import dtypes
from .constants import reduce_cmd as Command
from .core import SCALAR, Array, Machine, current, describe, instruction, not_simulated
from .operators import RANGES, Operator
from .tensor import NkiTensor
from .vector_engine import immediate, on_chip, pick_operator, scalar_operand

__all__ = ["activation", "activation_reduce"]


@instruction
def activation(
    dst: Any, op: Any, data: Any, bias: Any = None, scale: Any = 1.0, reduce_op: Any = None, reduce_res: Any = None,
    reduce_cmd: Any = Command.idle, name: Any = None,
) -> None:  # fmt: skip
    """dst = op(data * scale + bias); the sum registers gain dst's free-axis sum as reduce_cmd says."""
    _activate(current(), dst, op, data, bias, scale, reduce_op, reduce_res, reduce_cmd)


@instruction
def activation_reduce(
    dst: Any, op: Any, data: Any, reduce_op: Any, reduce_res: Any, bias: Any = None, scale: Any = 1.0, name: Any = None
) -> None:
    """activation with reset_reduce."""
    m = current()
    if m.checks and isinstance(data, NkiTensor) and data.free_size > m.target.activation_reduce_fmax:
        m.warn(53, f"data {data.brief()} has more than {m.target.activation_reduce_fmax} elements per partition")
    _activate(m, dst, op, data, bias, scale, reduce_op, reduce_res, Command.reset_reduce)


def _activate(
    m: Machine, dst: Any, op: Any, data: Any, bias: Any, scale: Any, reduce_op: Any, reduce_res: Any, command: Any
) -> None:
    op = pick_operator(m, "op", op)
    if op.name == "prelu":
        not_simulated("nisa.activation(op=nl.prelu)", "its slope operand is not documented")
    if not op.activation:
        m.fail(29, f"op: nl.{op.name} is no activation function")
    if not isinstance(command, Command) or command is Command.load_reduce:
        m.fail(29, f"reduce_cmd must be idle, reset, reduce or reset_reduce, got {describe(command)}")
    if reduce_op is not None and pick_operator(m, "reduce_op", reduce_op).name != "add":
        m.fail(29, f"reduce_op must be nl.add, got {reduce_op!r}")
    # Memory types
    data, dst = on_chip(m, "data", data), on_chip(m, "dst", dst)
    # Layout and tile size
    m.same_size(dst=dst, data=data)
    reads = [data]
    starts = {"data": data}
    x = m.f32("data", data)
    if isinstance(scale, NkiTensor) or scale != 1.0:
        factor, tensor = scalar_operand(m, "scale", scale, data)
        if tensor is not None:
            reads.append(tensor)
            starts["scale"] = tensor
        x = x * factor
    if bias is not None:
        if isinstance(bias, NkiTensor):
            if m.checks and bias.dtype is dtypes.tfloat32:
                m.fail(24, "bias must not be tfloat32")
            shift, tensor = scalar_operand(m, "bias", bias, data, fp32=False)
            if tensor is not None:
                reads.append(tensor)
                starts["bias"] = tensor
        else:
            if m.checks and m.target.gen < 3:
                m.fail(30, "bias must be a (P, 1) tensor on trn1, not a constant")
            shift = immediate(m, "bias", bias)
        x = x + shift
    m.same_start(**starts)
    if m.checks and op.name in RANGES:
        table_range(m, op, x)
    # Result
    result = np.asarray(op.function(x))
    if result.dtype != np.float32:
        result = result.astype(np.float32)
    p = data.shape[0]
    registers, lanes = m.scalar_registers, data.lanes
    if command in (Command.reset, Command.reset_reduce):
        registers.write(lanes, np.zeros(p, np.float32))
    if command in (Command.reduce, Command.reset_reduce):
        part = result.reshape(p, -1).sum(axis=1, dtype=np.float32)
        registers.write(lanes, registers.read(m, lanes) + part)
    m.write(dst, result)
    writes = [dst]
    if reduce_res is not None:
        column = m.column("reduce_res", reduce_res, data, fp32=False)
        m.write(column, registers.read(m, lanes).reshape(p, 1))
        writes.append(column)
    m.emit(SCALAR, tuple(writes), tuple(reads), op=op.name, reads_register=reduce_res is not None)


def table_range(m: Machine, op: Operator, x: Array) -> None:
    low, high, symmetric = RANGES[op.name]
    values = np.abs(x) if symmetric else x
    outside = (values < np.float32(low)) | (values > np.float32(high))
    if bool(outside.any()):
        m.warn(29, f"{op.name} is valid in [{low:g}, {high:g}]; {int(outside.sum())} inputs lie outside")
