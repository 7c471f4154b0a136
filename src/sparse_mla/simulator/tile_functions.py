# SPDX-License-Identifier: Apache-2.0
"""Convenience functions of `nki.language` that work on tiles: each allocates its result and runs `nisa` instructions.

They exist for small kernels and documentation examples. Nothing is broadcast over partitions; free dims of size 1 are
broadcast by a view.
"""

from __future__ import annotations

import builtins
import math
from typing import Any

import numpy as np

from . import dtypes, gpsimd_engine, scalar_engine, tensor_engine, vector_engine
from .core import HBM, PSUM, SBUF, Array, current, describe, instruction
from .dma import dma_copy
from .memory import Storage
from .operators import BITVEC, BY_NAME, Operator
from .tensor import MemoryRegion, NkiTensor

__all__ = ["apply", "ndarray"]


def ndarray(shape: Any, dtype: Any, buffer: Any = MemoryRegion.sbuf, name: str = "", address: Any = None) -> NkiTensor:
    """A new tensor in `buffer`; `address` = (partition, byte) pins an on-chip tile."""
    m = current()
    sizes = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(int(s) for s in shape)
    before = m.opcode
    m.opcode = "ndarray"
    try:
        return _declare(sizes, dtypes.from_any(dtype, "ndarray"), buffer, name, address)
    finally:
        m.opcode = before


def _declare(sizes: tuple[int, ...], element: dtypes.DType, buffer: Any, name: str, address: Any) -> NkiTensor:
    m = current()
    target = m.target
    text = buffer.value if isinstance(buffer, MemoryRegion) else str(buffer).rsplit(".", 1)[-1]
    kind = {"hbm": "private_hbm"}.get(text, text)
    if kind not in (SBUF, PSUM, "private_hbm", "shared_hbm"):
        m.fail(6, f"buffer must be nl.sbuf, nl.psum, nl.private_hbm or nl.shared_hbm, got {describe(buffer)}")
    if not sizes or builtins.min(sizes) < 1:
        m.fail(23, f"shape {sizes} must have positive sizes")
    if m.checks and element in dtypes.GEN4_ONLY and target.gen < 4 and not m.compat:
        m.fail(48, f"dtype {element} needs trn3; on {target.name} pass bytes and .view(nl.float8_e4m3)")
    if kind in (SBUF, PSUM):
        if len(sizes) == 1:
            if m.checks and not m.compat:
                m.fail(22, f"on-chip shape {sizes} needs a partition and a free axis; write ({sizes[0]}, 1)")
            sizes = (sizes[0], 1) if sizes[0] != 1 else (1, 1)
        if m.checks:
            if sizes[0] > target.pmax:
                m.fail(1, f"{sizes} {element} {kind.upper()} spans {sizes[0]} partitions, at most {target.pmax}")
            if len(sizes) > target.max_view_dims:
                m.fail(22, f"{sizes} has {len(sizes)} dims, at most {target.max_view_dims}")
        per_partition = math.prod(sizes[1:]) * element.itemsize
        raw = target.sbuf_raw_bytes if kind == SBUF else target.psum_bytes
        address = _check_address(kind, sizes, per_partition, raw, address)
        if m.checks and per_partition > raw:
            m.fail(
                20 if kind == SBUF else 19,
                f"{sizes} {element} needs {per_partition} B per partition, {kind.upper()} has {raw}",
            )
    elif address is not None:
        m.fail(21, "address is for on-chip tiles")
    return NkiTensor(sizes, element, _storage(kind, sizes, element, name, address), MemoryRegion(kind), name)


def _check_address(kind: str, sizes: tuple[int, ...], nbytes: int, raw: int, address: Any) -> tuple[int, int] | None:
    if address is None:
        return None
    m = current()
    partition, offset = int(address[0]), int(address[1])
    if partition < 0 or offset < 0 or partition + sizes[0] > m.target.pmax or offset + nbytes > raw:
        m.fail(
            21,
            f"address {(partition, offset)} of a {sizes} tile of {nbytes} B per partition lies outside {kind.upper()}",
        )
    if m.checks and kind == PSUM and offset % m.target.psum_bank_fmax_bytes:
        m.fail_or_warn(
            21, f"address {(partition, offset)}: PSUM tiles start at a bank, every {m.target.psum_bank_fmax_bytes} B",
            fatal=not m.compat,
        )  # fmt: skip
    return partition, offset


def _storage(kind: str, sizes: tuple[int, ...], element: dtypes.DType, name: str, address: Any) -> Storage:
    """Storage of a declaration; shared_hbm tensors of one name are one tensor on all cores."""
    m = current()
    launch = m.launch
    if kind == "shared_hbm" and launch.cores > 1:
        key = name
        if not name and m.compat:
            key = f"unnamed {m.unnamed_shared}"
            m.unnamed_shared += 1
        if key:
            found = launch.shared.get(key)
            if found is not None and m.core not in launch.declared[key]:
                launch.declared[key].add(m.core)
                if found.shape != sizes or found.dtype is not element:
                    m.fail(45, f"'{name}' is {sizes} {element} here but {found.shape} {found.dtype} on the other core")
                return found
            made = m.allocate(kind, sizes, element, name, address)
            launch.shared[key] = made
            launch.declared[key] = {m.core}
            return made
    return m.allocate(kind, sizes, element, name, address)


# -- calling an operator ------------------------------------------------------------------------------------------


def _like(x: NkiTensor, shape: tuple[int, ...], dtype: Any) -> NkiTensor:
    return ndarray(shape, x.dtype if dtype is None else dtype, MemoryRegion.sbuf)


def _fit(x: NkiTensor, shape: tuple[int, ...]) -> NkiTensor:
    """Broadcast free dims of size 1."""
    m = current()
    if x.shape == shape:
        return x
    if x.ndim != len(shape) or x.shape[0] != shape[0]:
        m.fail(23, f"{x.brief()} does not broadcast to {shape}; partitions are never broadcast")
    for dim in range(1, x.ndim):
        if x.shape[dim] != shape[dim]:
            x = x.broadcast(dim, shape[dim])
    return x


def _on_chip(role: str, x: Any) -> NkiTensor:
    m = current()
    if type(x) is not NkiTensor:
        m.fail(23, f"{role} must be a tile, got {describe(x)}")
    if x.memory == HBM:
        m.fail(16, f"{role} must be on-chip, got {x.brief()}; nl.load it first")
    return x


def apply(op: Operator, x: Any, y: Any = None, dtype: Any = None, **kwargs: Any) -> NkiTensor:
    """nl.<op>(x) or nl.<op>(x, y): a new SBUF tile."""
    m = current()
    before, m.opcode = m.opcode, f"nl.{op.name}"
    try:
        if kwargs:
            m.fail(0, f"unexpected arguments {', '.join(kwargs)}")
        if op.arity == 1:
            if y is not None:
                dtype = y if dtype is None else dtype
            return _unary(op, _on_chip("x", x), dtype)
        return _binary(op, x, y, dtype)
    finally:
        m.opcode = before


@instruction
def elementwise_function(dst: NkiTensor, op: Operator, data: NkiTensor) -> None:
    """A function the engines compose from several instructions (cos, tan, floor, ..): exact here."""
    m = current()
    x = m.f32("x", vector_engine.on_chip(m, "x", data))
    m.write(dst, np.asarray(op.function(x), np.float32))
    m.emit("vector", (dst,), (data,), op=op.name)


def _unary(op: Operator, x: NkiTensor, dtype: Any) -> NkiTensor:
    out = _like(x, x.shape, dtype)
    if op.family == BITVEC:
        vector_engine.tensor_scalar(out, x, op, None)
    elif op.name == "sin":
        elementwise_function(out, _EXACT_SIN, x)  # nl.sin reduces its range first, unlike the activation
    elif op.activation:
        scalar_engine.activation(out, op, x)
    else:
        elementwise_function(out, op, x)
    return out


_EXACT_SIN = Operator("sin", np.sin, arity=1)


def _binary(op: Operator, x: Any, y: Any, dtype: Any) -> NkiTensor:
    m = current()
    if y is None:
        m.fail(23, "y is missing")
    if not isinstance(x, NkiTensor):
        other, tile, reverse = x, _on_chip("y", y), True
    else:
        other, tile, reverse = y, _on_chip("x", x), False
    if not isinstance(other, NkiTensor):
        out = _like(tile, tile.shape, dtype)
        vector_engine.tensor_scalar(out, tile, op, other, reverse0=reverse)
        return out
    _on_chip("y", other)
    if tile.ndim != other.ndim:
        m.fail(23, f"{tile.brief()} and {other.brief()} must have the same number of dims")
    shape = (tile.shape[0], *(builtins.max(a, b) for a, b in zip(tile.shape[1:], other.shape[1:], strict=True)))
    out = _like(tile, shape, dtype)
    left, right = _fit(tile, shape), _fit(other, shape)
    if left.memory == PSUM and right.memory == PSUM:
        right = _copy(right, right.dtype)
    vector_engine.tensor_tensor(out, left, right, op)
    return out


def _copy(x: NkiTensor, dtype: Any) -> NkiTensor:
    out = _like(x, x.shape, dtype)
    vector_engine.tensor_copy(out, x)
    return out


# -- reductions and compositions ----------------------------------------------------------------------------------


def _axes(x: NkiTensor, axis: Any) -> tuple[int, ...]:
    given = (axis,) if isinstance(axis, int) else tuple(axis)
    axes = tuple(sorted(a + x.ndim if a < 0 else a for a in given))
    if not axes or axes[0] <= 0:
        current().fail(23, f"axis {axis} must name free axes of {x.brief()}")
    return axes


def _reduce(op: Operator, x: NkiTensor, axis: Any, dtype: Any, keepdims: bool) -> NkiTensor:
    x = _on_chip("x", x)
    axes = _axes(x, axis)
    kept = [d for d in range(x.ndim) if d not in axes]
    moved = x.permute((*kept, *axes))
    shape = tuple(x.shape[d] for d in kept)
    out = _like(x, shape if len(shape) > 1 else (*shape, 1), dtype)
    vector_engine.tensor_reduce(out, op, moved, tuple(range(len(kept), x.ndim)))
    if keepdims:
        out = out.reshape(tuple(1 if d in axes else x.shape[d] for d in range(x.ndim)))
    return out


def sum(x: Any, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Sum over free axes."""
    return _reduce(BY_NAME["add"], x, axis, dtype, keepdims)


def max(x: Any, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Maximum over free axes."""
    return _reduce(BY_NAME["maximum"], x, axis, dtype, keepdims)


def min(x: Any, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Minimum over free axes."""
    return _reduce(BY_NAME["minimum"], x, axis, dtype, keepdims)


def prod(x: Any, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Product over free axes."""
    return _reduce(BY_NAME["multiply"], x, axis, dtype, keepdims)


def all(x: Any, axis: Any, dtype: Any = None) -> NkiTensor:
    """1 where all elements along the axes are nonzero."""
    return _reduce(BY_NAME["logical_and"], x, axis, dtype, False)


def mean(x: Any, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Mean over free axes."""
    count = math.prod(x.shape[a] for a in _axes(x, axis))
    total = _reduce(BY_NAME["add"], x, axis, dtypes.float32, keepdims)
    out = _like(total, total.shape, x.dtype if dtype is None else dtype)
    vector_engine.tensor_scalar(out, total, BY_NAME["multiply"], 1.0 / count)
    return out


def var(x: Any, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Variance (divided by n) over free axes."""
    centre = mean(x, axis, dtypes.float32, True)
    deviation = ndarray(x.shape, dtypes.float32)
    vector_engine.tensor_tensor(deviation, x, _fit(centre, x.shape), BY_NAME["subtract"])
    square = apply(BY_NAME["multiply"], deviation, deviation)
    return mean(square, axis, x.dtype if dtype is None else dtype, keepdims)


def softmax(x: Any, axis: Any = -1, dtype: Any = None) -> NkiTensor:
    """exp(x - max) / sum over one free axis."""
    x = _on_chip("x", x)
    top = max(x, axis, dtypes.float32, True)
    shifted = ndarray(x.shape, dtypes.float32)
    vector_engine.tensor_tensor(shifted, x, _fit(top, x.shape), BY_NAME["subtract"])
    weights = apply(BY_NAME["exp"], shifted)
    total = sum(weights, axis, dtypes.float32, True)
    inverse = ndarray(total.shape, dtypes.float32)
    vector_engine.reciprocal(inverse, total)
    return _binary(BY_NAME["multiply"], weights, inverse, x.dtype if dtype is None else dtype)


def rms_norm(
    x: Any, w: Any, axis: Any, n: int, epsilon: float = 1e-6, dtype: Any = None, compute_dtype: Any = None
) -> NkiTensor:
    """x / sqrt(sum(x^2) / n + epsilon) * w."""
    compute = dtypes.float32 if compute_dtype is None else compute_dtype
    square = apply(BY_NAME["square"], _on_chip("x", x), dtype=compute)
    total = sum(square, axis, dtypes.float32, True)
    scale = ndarray(total.shape, dtypes.float32)
    vector_engine.tensor_scalar(scale, total, BY_NAME["multiply"], 1.0 / n, op1=BY_NAME["add"], operand1=epsilon)
    root = apply(BY_NAME["rsqrt"], scale)
    normed = _binary(BY_NAME["multiply"], x, root, compute)
    return _binary(BY_NAME["multiply"], normed, w, x.dtype if dtype is None else dtype)


def where(condition: Any, x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """x where condition is nonzero, y elsewhere; x and y are tiles or numbers."""
    mask = _on_chip("condition", condition)
    like = x if isinstance(x, NkiTensor) else y if isinstance(y, NkiTensor) else mask
    element = dtypes.from_any(dtype) if dtype is not None else (dtypes.float32 if like is mask else like.dtype)
    out = ndarray(mask.shape, element)
    select_tile(out, mask, x, y)
    return out


@instruction
def select_tile(dst: NkiTensor, condition: NkiTensor, x: Any, y: Any) -> None:
    """The predicated copies behind nl.where."""
    m = current()
    reads = [condition]
    sides: list[Array] = []
    condition = vector_engine.on_chip(m, "condition", condition)
    for role, side in (("x", x), ("y", y)):
        if isinstance(side, NkiTensor):
            t = _fit(vector_engine.on_chip(m, role, side), condition.shape)
            sides.append(m.f32(role, t))
            reads.append(t)
        else:
            sides.append(np.asarray(vector_engine.immediate(m, role, side)))
    m.write(dst, np.where(m.read("condition", condition) != 0, *sides).astype(np.float32, copy=False))
    m.emit("vector", (dst,), tuple(reads))


# -- movement -----------------------------------------------------------------------------------------------------


def load(src: Any, dtype: Any = None) -> NkiTensor:
    """A new SBUF tile with the contents of an HBM tensor."""
    shape = src.shape if src.ndim > 1 else (src.shape[0], 1)
    out = ndarray(shape, src.dtype if dtype is None else dtype)
    dma_copy(out, src)
    return out


def store(dst: Any, value: Any) -> None:
    """Write an SBUF tile to HBM."""
    dma_copy(dst, value)


def transpose(x: Any, dtype: Any = None) -> NkiTensor:
    """x.T of a 2-D tile, through the PE array; the result is in PSUM unless a cast is asked."""
    x = _on_chip("x", x)
    out = ndarray((x.shape[1], x.shape[0]), x.dtype, MemoryRegion.psum)
    tensor_engine.nc_transpose(out, x)
    return out if dtype is None or dtypes.from_any(dtype) is x.dtype else _copy(out, dtype)


def matmul(x: Any, y: Any, transpose_x: bool = False) -> NkiTensor:
    """x @ y, or x.T @ y with transpose_x: a float32 PSUM tile."""
    x, y = _on_chip("x", x), _on_chip("y", y)
    if not transpose_x:
        x = _copy(transpose(x), x.dtype)
    out = ndarray((x.shape[1], *y.shape[1:]), dtypes.float32, MemoryRegion.psum)
    tensor_engine.nc_matmul(out, x, y)
    return out


def broadcast_to(x: Any, shape: Any, dtype: Any = None) -> NkiTensor:
    """x repeated to `shape`; a size-1 partition axis is repeated by a ones-matmul or a copy, free axes by a view."""
    m = current()
    x = _on_chip("x", x)
    sizes = tuple(int(s) for s in shape)
    if x.shape == sizes:
        return x if dtype is None or dtypes.from_any(dtype) is x.dtype else _copy(x, dtype)
    if x.ndim != len(sizes):
        m.fail(23, f"{x.brief()} and {sizes} must have the same number of dims")
    for dim in range(1, x.ndim):
        if x.shape[dim] != sizes[dim]:
            x = x.broadcast(dim, sizes[dim])
    out = ndarray(sizes, x.dtype if dtype is None else dtype)
    if x.shape[0] == sizes[0]:
        vector_engine.tensor_copy(out, x)
    else:
        replicate_partition(out, x)
    return out


@instruction
def replicate_partition(dst: NkiTensor, src: NkiTensor) -> None:
    """One partition copied to all partitions of dst (stream shuffles on hardware)."""
    m = current()
    if src.shape[0] != 1:
        m.fail(23, f"{src.brief()} must have one partition to be replicated")
    values = m.f32("x", src)
    m.write(dst, np.ascontiguousarray(np.broadcast_to(values, dst.shape)))
    m.emit("vector", (dst,), (src,))


def gather_flattened(data: Any, indices: Any, axis: int = 0, dtype: Any = None) -> NkiTensor:
    """data[p, indices[p, j]] per partition; the free axes count as one, so axis is 0 or 1."""
    if axis not in (0, 1):
        current().fail(23, f"gather_flattened: axis must be 0 or 1, got {axis!r}")
    out = _like(data, indices.shape, None)
    gpsimd_engine.nc_n_gather(out, data, indices)
    return out if dtype is None else _copy(out, dtype)


def load_transpose2d(src: Any, dtype: Any = None) -> NkiTensor:
    """Load an HBM tensor transposed."""
    out = ndarray((src.shape[1], src.shape[0]), src.dtype if dtype is None else dtype)
    dma_copy(out, src.permute((1, 0)))
    return out


# -- filled tiles -------------------------------------------------------------------------------------------------


def full(shape: Any, fill_value: Any, dtype: Any, buffer: Any = MemoryRegion.sbuf, name: str = "") -> NkiTensor:
    """A new tensor filled with a value."""
    element = dtypes.from_any(dtype)
    out = ndarray(shape, element, buffer, name)
    value = float(fill_value) if element.is_float else int(fill_value)
    if out.memory == HBM:
        fill_hbm(out, value)
    else:
        vector_engine.memset(out, value)
    return out


@instruction
def fill_hbm(dst: NkiTensor, value: Any) -> None:
    """Fill an HBM tensor (a DMA from a constant)."""
    m = current()
    m.write(dst, np.full(dst.shape, value, np.float32 if dst.dtype.is_float else np.int64))
    nbytes = dst.size * dst.dtype.itemsize
    m.emit(
        "dma", (dst,), (), bytes=nbytes, descriptors=1, descriptor_bytes=nbytes, dge="none", queue="", indirect=False,
        rows=0, cast=False, hbm_read=0, hbm_written=nbytes,
    )  # fmt: skip


def zeros(shape: Any, dtype: Any, buffer: Any = MemoryRegion.sbuf, name: str = "") -> NkiTensor:
    """A new tensor of zeros."""
    return full(shape, 0, dtype, buffer, name)


def ones(shape: Any, dtype: Any, buffer: Any = MemoryRegion.sbuf, name: str = "") -> NkiTensor:
    """A new tensor of ones."""
    return full(shape, 1, dtype, buffer, name)


def zeros_like(x: Any, dtype: Any = None, buffer: Any = None, name: str = "") -> NkiTensor:
    """zeros with the shape of x."""
    return zeros(x.shape, x.dtype if dtype is None else dtype, x.buffer if buffer is None else buffer, name)


def empty_like(x: Any, dtype: Any = None, buffer: Any = None, name: str = "") -> NkiTensor:
    """ndarray with the shape of x."""
    return ndarray(x.shape, x.dtype if dtype is None else dtype, x.buffer if buffer is None else buffer, name)


def rand(shape: Any, dtype: Any, buffer: Any = MemoryRegion.sbuf, name: str = "") -> NkiTensor:
    """Uniform random numbers in [0, 1)."""
    out = ndarray(shape, dtype, buffer, name)
    gpsimd_engine.rand2(out, 0.0, 1.0)
    return out


def random_seed(seed: Any) -> None:
    """Seed the generator from a [1, 1] tensor."""
    gpsimd_engine.set_rng_seed(seed)


def dropout(x: Any, rate: Any, dtype: Any = None) -> NkiTensor:
    """x with elements zeroed with probability rate."""
    out = _like(x, x.shape, None)
    vector_engine.dropout(out, x, rate)
    return out if dtype is None else _copy(out, dtype)


def expand_dims(x: Any, axis: int) -> NkiTensor:
    """A view with one more dim of size 1."""
    return x.expand_dim(axis if axis >= 0 else axis + x.ndim + 1)  # type: ignore[no-any-return]


def shared_constant(constant: Any) -> NkiTensor:
    """An HBM tensor holding a NumPy array (or the contents of an .npy file)."""
    m = current()
    array = np.load(constant) if isinstance(constant, str) else np.asarray(constant)
    element = dtypes.from_any(array.dtype)
    data = np.ascontiguousarray(array).view(np.uint8).reshape(-1).copy()
    st = Storage(HBM, "shared_hbm", array.shape or (1,), element, name="constant", data=data, home=m.core)
    return NkiTensor(array.shape or (1,), element, st, MemoryRegion.shared_hbm)


def shared_identity_matrix(n: int, dtype: Any = dtypes.uint8, dst: Any = None) -> NkiTensor:
    """An n x n identity in SBUF."""
    out = ndarray((n, n), dtype) if dst is None else dst
    load_identity(out)
    return out


@instruction
def load_identity(dst: NkiTensor) -> None:
    """Load the identity constant from HBM."""
    m = current()
    if dst.shape[0] != dst.free_size:
        m.fail(23, f"dst {dst.brief()} must be square")
    m.write(dst, np.eye(dst.shape[0], dtype=np.float32))
    nbytes = dst.size * dst.dtype.itemsize
    m.emit(
        "dma", (dst,), (), bytes=nbytes, descriptors=dst.shape[0], descriptor_bytes=nbytes // dst.shape[0], dge="none",
        queue="", indirect=False, rows=0, cast=False, hbm_read=nbytes, hbm_written=0,
    )  # fmt: skip


@instruction
def device_print(print_prefix: str, tensor: Any) -> None:
    """Print a tensor, with the core and the kernel line."""
    m = current()
    if type(tensor) is not NkiTensor or tensor.memory == PSUM:
        m.fail(17, "tensor must be in SBUF or HBM")
    print(f"[core {m.core}] {print_prefix}{m.dynamic('tensor', tensor).array()!r}")
