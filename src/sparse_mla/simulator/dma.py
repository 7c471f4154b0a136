# SPDX-License-Identifier: Apache-2.0
"""DMA engines: copies between HBM and SBUF with arbitrary patterns, gathers, scatters, transposes and sums.

A DMA has no partition-start rule. Equal dtypes copy bits; different dtypes go through float32. A vector index makes the
GpSimd engine build the descriptors (software DGE). Descriptor counts follow from the layout: one per contiguous run of
both sides, one per element when an innermost stride is not 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import dtypes
from .constants import dge_mode as Dge
from .constants import engine as Engine
from .constants import oob_mode as Oob
from .core import DMA, HBM, PSUM, SBUF, Array, Machine, current, describe, instruction
from .tensor import NkiTensor
from .vector_engine import pick_operator

__all__ = ["dma_compute", "dma_copy", "dma_transpose"]


def subnormal_data(m: Machine, t: NkiTensor, values: Array) -> None:
    """Data that enters SBUF is looked at once here, so that engines need not look at every read."""
    if not m.checks or t.memory != SBUF or t.dtype not in (dtypes.float32, dtypes.bfloat16):
        return
    bits = np.ascontiguousarray(values).view(f"u{t.dtype.itemsize}")
    mantissa = 23 if t.dtype.itemsize == 4 else 7
    magnitude = bits << bits.dtype.type(1)  # drops the sign
    magnitude -= bits.dtype.type(1)  # zero wraps to the top
    if values.size and int(magnitude.min()) < (1 << mantissa + 1) - 1:
        m.note(54, f"dst {t.brief()} receives subnormal values; an engine that reads them may flush them to zero")


def dma_operand(m: Machine, role: str, value: Any) -> NkiTensor:
    """An HBM or SBUF operand; PSUM is out of a DMA's reach."""
    if type(value) is not NkiTensor:
        m.fail(17, f"{role} must be a tensor, got {describe(value)}")
    if value.suspect and value.scalar_index is None and (text := value.outside()):
        m.fail(33, f"{role}: {text}")
    if value.memory == PSUM and m.checks:
        m.fail(17, f"{role} {value.brief()}: DMA cannot reach PSUM; copy to SBUF first")
    if value.memory == SBUF and value.shape[0] > m.target.pmax and m.checks:
        m.fail(1, f"{role} {value.brief()} spans more than {m.target.pmax} partitions")
    return value


def row_indices(m: Machine, role: str, t: NkiTensor, *, rows: int, column: bool = True) -> Array:
    """The row numbers of a vector-indexed view, int64, one per row of dim 0."""
    index = t.vector_index
    if index is None:
        m.fail(32, f"{role} {t.brief()} has no vector index")
    if index.scalar_index is not None:
        index = m.dynamic(f"vector_offset of {role}", index)
    values = m.read(f"vector_offset of {role}", index).astype(np.int64)
    m.pending.append(index)
    if column:
        if m.checks and (index.free_size != 1 or index.shape[0] != t.shape[0]):
            m.fail(32, f"vector_offset of {role} must be ({t.shape[0]}, 1), one index per row, got {index.brief()}")
        if m.checks and t.shape[0] > m.target.pmax:
            m.fail(32, f"{role}: {t.shape[0]} indexed rows in one DMA, at most {m.target.pmax}")
        return values.reshape(-1)
    return np.ascontiguousarray(values.reshape(index.shape[0], -1).T).reshape(-1)[:rows]


def all_rows(t: NkiTensor) -> tuple[Array, Array | None, int]:
    """(every addressable row of a vector-indexed view, its bitmap or None when all is initialised, number of rows)."""
    st = t.storage
    size = t.dtype.itemsize
    extent = size
    for n, s in zip(t.shape[1:], t.byte_strides[1:], strict=True):
        extent += (n - 1) * s
    fit = (st.row_bytes - t.byte_offset - extent) // t.row_step + 1
    count = max(min(fit, t.base_rows), 0)
    shape, strides = (count, *t.shape[1:]), (t.row_step, *t.byte_strides[1:])
    rows = np.ndarray(shape, t.dtype.np, st.data, t.byte_offset, strides)
    bits = None if st.all_init else st.bits(shape, strides, t.byte_offset, size)
    return rows, bits, count


def valid_rows(m: Machine, role: str, index: Array, count: int, mode: Any) -> Array | None:
    """Mask of rows inside the tensor, None when all are; raises in error mode."""
    outside = (index < 0) | (index >= count)
    if not bool(outside.any()):
        return None
    if mode is not Oob.skip:
        at = int(outside.argmax())
        m.fail(
            33,
            f"{role}: index {int(index[at])} at row {at} is outside 0..{count - 1} (oob_mode.skip leaves such "
            "rows unchanged)",
        )
    return ~outside


def fetch(m: Machine, role: str, t: NkiTensor, mode: Any, *, column: bool = True) -> tuple[Array, Array | None]:
    """(elements of a source shaped like its view, mask of rows that exist or None)."""
    if t.vector_index is None:
        return m.read(role, t), None
    index = row_indices(m, role, t, rows=t.shape[0], column=column)
    rows, bits, count = all_rows(t)
    valid = valid_rows(m, role, index, count, mode)
    safe = index if valid is None else np.where(valid, index, 0)
    if count == 0:
        return np.zeros(t.shape, t.dtype.np), valid
    if bits is not None and m.tracks_init:
        touched = safe if valid is None else safe[valid]
        if not bool(bits[touched].all()):
            m.fail(46, f"{role} {t.brief()} gathers rows that were never written")
    t.storage.last = m.index
    return rows[safe], valid


def deliver(m: Machine, t: NkiTensor, values: Array, valid: Array | None, mode: Any) -> None:
    """Store elements of the dst's dtype; rows masked out keep what they had."""
    if t.vector_index is not None:
        index = row_indices(m, "dst", t, rows=t.shape[0])
        rows, bits, count = all_rows(t)
        inside = valid_rows(m, "dst", index, count, mode)
        if inside is not None:
            valid = inside if valid is None else valid & inside
        values = values.reshape(t.shape)
        if valid is not None:
            index, values = index[valid], values[valid]
        if m.checks and len(np.unique(index)) != len(index):
            m.warn(33, "dst: an index occurs twice; which row wins is not defined on hardware (here the last one)")
        rows[index] = values
        st = t.storage
        if bits is not None:
            bits[index] = True
        st.first = m.index if st.first < 0 else st.first
        st.last = m.index
        st.writers |= 1 << m.core
        return
    out = t.array()
    if valid is None:
        out[...] = values if values.shape == out.shape else values.reshape(out.shape)
        m.wrote(t)
        return
    if t.shape[0] != len(valid):
        m.fail(32, f"dst {t.brief()} must have one row per index ({len(valid)})")
    out[valid] = values.reshape(t.shape)[valid]
    keep = np.zeros(t.shape, np.bool_)
    keep[valid] = True
    m.storage_partial(t, keep)


def convert(m: Machine, values: Array, src: dtypes.DType, dst: dtypes.DType) -> Array:
    """A DMA's cast: bits when equal, else through float32."""
    if src is dst or (src.is_bool and dst is dtypes.uint8) or (dst.is_bool and src is dtypes.uint8):
        return values
    if src.is_packed or dst.is_packed:
        m.fail(31, f"DMA cannot cast {src} to {dst}")
    exact_int(m, f"a DMA cast of {src}", values, src)
    out = np.empty(values.shape, dst.np)
    wide = dtypes.to_f32(values, src)
    dtypes.cast_into(out, wide, dst)
    if m.checks and dst.lut is not None and dtypes.overflowed(out, wide, dst):
        m.warn(29, f"a DMA cast overflows {dst}; clamp first (saturate or inf is not documented)")
    return out


def exact_int(m: Machine, what: str, values: Array, dtype: dtypes.DType) -> None:
    """Warn when 32-bit integers pass through float32 and lose bits."""
    if m.checks and dtype.is_int and dtype.itemsize == 4 and values.size:
        top = max(-int(values.min()), int(values.max()))
        if top >= m.target.exact_int_limit:
            m.warn(27, f"{what} holds {top}: integers from 2^24 on lose bits in float32")


def inside(m: Machine, role: str, original: NkiTensor, t: NkiTensor, mode: Any) -> bool:
    """False when a scalar-indexed DMA has to be skipped; raises when the address is outside and skipping is off."""
    if t is original or original.reaches((t.byte_offset - original.byte_offset) // (original.scalar_step or 1), t):
        return True
    if mode is Oob.skip:
        return False
    m.fail(33, f"{role}: the run-time index moves {original.brief()} outside its tensor {original.storage.shape}")


def descriptor_facts(dst: NkiTensor, src: NkiTensor) -> tuple[int, int, int]:
    """(bytes moved, descriptors, bytes per descriptor)."""
    a, b = dst.operand(), src.operand()
    nbytes = dst.size * dst.dtype.itemsize
    # a run is counted in elements: the two sides may have different widths
    run = min(a.run_bytes // a.itemsize, b.run_bytes // b.itemsize)
    if (dst.memory == HBM and dst.vector_index is not None) or (src.memory == HBM and src.vector_index is not None):
        run = min(run, dst.size // dst.shape[0], src.size // src.shape[0])
    return nbytes, -(-dst.size // run), run * max(a.itemsize, b.itemsize)


def descriptor_warnings(m: Machine, dst: NkiTensor, src: NkiTensor, count: int, size: int) -> None:
    element = max(dst.dtype.itemsize, src.dtype.itemsize)
    if size == element and count > m.target.pmax:
        m.note(52, f"the pattern needs one descriptor per element: {count} descriptors of {size} B")
    elif m.target.dma_small_bytes <= size < m.target.dma_good_bytes:
        m.info(52, f"descriptors of {size} B; {m.target.dma_good_bytes} B and more use the whole bandwidth")
    elif size < m.target.dma_small_bytes:
        m.note(
            52,
            f"descriptors of {size} B, below {m.target.dma_small_bytes} B: the transfer is bound by {count} "
            "descriptors",
        )
    if (
        dst.memory == HBM
        and src.memory == SBUF
        and dst.dtype.itemsize < 4
        and not dst.operand().contiguous
        and dst.ndim == 1
    ):
        m.warn(
            52,
            f"dst {dst.brief()}: strided 1-D stores of narrow types were seen to write zeros; widen or use a 2-D "
            "pattern",
        )


def by_number(m: Machine, mode: Any) -> Any:
    """Kernels for 0.3 write the number of a descriptor mode instead of its name."""
    if type(mode) is int and mode in [each.value for each in Dge]:
        m.note(0, f"dge_mode={mode} is now nisa.dge_mode.{Dge(mode).name}")
        return Dge(mode)
    return mode


def dge(
    m: Machine, mode: Any, engine: Any, dst: NkiTensor, src: NkiTensor, *, indirect: bool, dynamic: bool
) -> tuple[str, str]:
    """(descriptor mode, issuing engine) of a copy, checked."""
    mode = by_number(m, mode)
    if engine is not None and not isinstance(engine, Engine):
        m.fail(34, f"engine must be one of nki.isa.engine, got {describe(engine)}")
    if not isinstance(mode, Dge):
        m.fail(34, f"dge_mode must be one of nki.isa.dge_mode, got {describe(mode)}")
    if engine is None:
        engine = Engine.unknown
    if m.checks:
        if mode is Dge.hwdge:
            if m.target.gen < 3:
                m.fail(34, "hwdge needs trn2 or later")
            if engine not in (Engine.unknown, Engine.sync, Engine.scalar):
                m.fail(34, f"engine of a hwdge DMA must be sync or scalar, got {engine.name}")
            if dst.dtype is not src.dtype:
                m.fail(31, f"hwdge cannot cast {src.dtype} to {dst.dtype}")
        elif engine is not Engine.unknown:
            m.fail_or_warn(34, f"engine={engine.name} has a meaning with dge_mode.hwdge only", fatal=m.strict)
        if indirect and mode in (Dge.hwdge, Dge.none):
            m.fail(32, f"a vector index needs software DGE, not dge_mode.{mode.name}")
        if dynamic and mode is Dge.none:
            m.fail(32, "dge_mode.none takes static addresses only")
    if indirect:
        return "swdge", "gpsimd"
    queue = {Dge.hwdge: engine.name if engine is not Engine.unknown else "sync", Dge.swdge: "gpsimd"}.get(mode, "")
    return mode.name, queue


def priority_rule(m: Machine, priority: Any) -> None:
    if priority is None or not m.checks:
        return
    if m.target.gen < 4:
        m.fail(37, "priority needs trn3")
    if priority not in (0, 1, 2, 3):
        m.fail(37, f"priority must be 0..3, got {priority!r}")


def oob_rule(m: Machine, mode: Any) -> None:
    if not isinstance(mode, Oob):
        m.fail(33, f"oob_mode must be one of nki.isa.oob_mode, got {describe(mode)}")


def hbm_traffic(dst: NkiTensor, src: NkiTensor) -> dict[str, int]:
    return {
        "hbm_read": src.size * src.dtype.itemsize if src.memory == HBM else 0,
        "hbm_written": dst.size * dst.dtype.itemsize if dst.memory == HBM else 0,
    }


@instruction
def dma_copy(
    dst: Any, src: Any, priority: Any = None, oob_mode: Any = Oob.error, dge_mode: Any = Dge.unknown,
    engine: Any = Engine.unknown, name: Any = None,
) -> None:  # fmt: skip
    """dst = src, element by element in row-major order; either side may be indexed at run time."""
    m = current()
    # Memory types
    dst0, src0 = dma_operand(m, "dst", dst), dma_operand(m, "src", src)
    dst, src = m.dynamic("dst", dst0, bounds=False), m.dynamic("src", src0, bounds=False)
    priority_rule(m, priority)
    oob_rule(m, oob_mode)
    indirect = dst.vector_index is not None or src.vector_index is not None
    if dst.vector_index is not None and src.vector_index is not None:
        m.fail(32, "one side of a DMA may be indexed by a vector, not both")
    mode, queue = dge(m, dge_mode, engine, dst, src, indirect=indirect, dynamic=dst is not dst0 or src is not src0)
    # Tile size
    if dst.size != src.size:
        m.fail(31, f"dst {dst.brief()} has {dst.size} elements, src {src.brief()} has {src.size}")
    if dst.size == 0:
        return  # an empty transfer, which only aws_compat lets through
    if indirect and m.checks:
        indexed, other = (dst, src) if dst.vector_index is not None else (src, dst)
        if other.memory == SBUF and other.shape[0] != indexed.shape[0]:
            m.fail(32, f"the SBUF side {other.brief()} must have one partition per index ({indexed.shape[0]})")
    # Result
    moved = inside(m, "src", src0, src, oob_mode) and inside(m, "dst", dst0, dst, oob_mode)
    if moved:
        values, valid = fetch(m, "src", src, oob_mode)
        values = convert(m, values, src.dtype, dst.dtype)
        subnormal_data(m, dst, values)
        deliver(m, dst, values, valid, oob_mode)
    nbytes, count, size = descriptor_facts(dst, src)
    if m.checks:
        descriptor_warnings(m, dst, src, count, size)
    m.emit(
        DMA, (dst,), (src,), bytes=nbytes, descriptors=count, descriptor_bytes=size, dge=mode, queue=queue,
        indirect=indirect, rows=dst.shape[0] if indirect else 0, cast=dst.dtype is not src.dtype, **hbm_traffic(dst,
        src),
    )  # fmt: skip
    if m.launch.pause is not None and dst.storage.kind == "shared_hbm":
        m.launch.pause(m)


_AXES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}


@instruction
def dma_transpose(
    dst: Any, src: Any, axes: Any = None, priority: Any = None, dge_mode: Any = Dge.unknown, oob_mode: Any = Oob.error,
    name: Any = None,
) -> None:  # fmt: skip
    """dst = src with axes (1,0), (2,1,0) or (3,1,2,0); src may be gathered by an index tile first."""
    m = current()
    target = m.target
    dge_mode = by_number(m, dge_mode)
    dst0, src0 = dma_operand(m, "dst", dst), dma_operand(m, "src", src)
    dst, src = m.dynamic("dst", dst0, bounds=False), m.dynamic("src", src0, bounds=False)
    priority_rule(m, priority)
    oob_rule(m, oob_mode)
    if dst.memory != SBUF or dst.vector_index is not None:
        m.fail(35, f"dst {dst.brief()} must be a plain SBUF tile")
    order = _AXES.get(src.ndim)
    if order is None:
        m.fail(35, f"src {src.brief()} must have 2, 3 or 4 dims")
    if axes is not None and tuple(axes) != order:
        m.fail(35, f"axes of a {src.ndim}-D transpose must be {order}, got {tuple(axes)}")
    indirect = src.vector_index is not None
    if m.checks:
        if src.dtype is not dst.dtype:
            m.fail(35, f"dst {dst.brief()} must have the dtype of src, {src.dtype}")
        size = src.dtype.itemsize
        last = target.dma_transpose_last_dim
        if size not in (2, 4) or (size != 2 and (indirect or dge_mode is Dge.hwdge)):
            m.fail(35, f"src {src.brief()} must hold 2-byte elements")
        if src.shape[-1] > last:
            m.fail(35, f"src {src.brief()}: the last dim must be at most {last}")
        if dge_mode is Dge.hwdge:
            _hwdge_transpose_rules(m, src, indirect)
        elif dge_mode not in ((Dge.unknown, Dge.swdge) if indirect else (Dge.unknown, Dge.none)):
            legal = "unknown or swdge" if indirect else "unknown, none or hwdge"
            m.fail(35, f"dge_mode must be {legal}, got {describe(dge_mode)}")
        if dge_mode is Dge.none and (dst is not dst0 or src is not src0):
            m.fail(32, "dge_mode.none takes static addresses only")
        if indirect:
            _indirect_transpose_rules(m, src)
        alignment = target.quadrant  # bytes
        if dst.memory == SBUF and dst.operand().b0 % alignment:
            m.warn(
                36,
                f"dst {dst.brief()} starts at byte {dst.operand().b0}; transposes were seen to need "
                f"{alignment}-byte alignment",
            )
    wanted = tuple(src.shape[a] for a in order)
    if dst.shape != wanted:
        m.fail(35, f"dst {dst.brief()} must be exactly {wanted}, the transpose of src {src.brief()}")
    if inside(m, "src", src0, src, oob_mode) and inside(m, "dst", dst0, dst, oob_mode):
        values, valid = fetch(m, "src", src, oob_mode, column=False)
        if valid is not None:
            m.warn(33, "oob_mode.skip in a gather-transpose was seen to abort the DMA queue")
            kept = np.broadcast_to(valid.reshape(-1, *([1] * (src.ndim - 1))), src.shape).transpose(order)
            out = dst.array()
            np.copyto(out, values.transpose(order), where=kept)
            m.storage_partial(dst, kept)
        else:
            deliver(m, dst, values.transpose(order), None, oob_mode)
    nbytes = dst.size * dst.dtype.itemsize
    run = min(src.operand().run_bytes, src.shape[-1] * src.dtype.itemsize)
    m.emit(
        DMA, (dst,), (src,), bytes=nbytes, descriptors=-(-nbytes // run), descriptor_bytes=run,
        dge="swdge" if indirect else dge_mode.name,
        queue="gpsimd" if indirect else "sync" if dge_mode is Dge.hwdge else "",
        indirect=indirect, rows=src.shape[0] if indirect else 0, cast=False, **hbm_traffic(dst, src),
    )  # fmt: skip


def _hwdge_transpose_rules(m: Machine, src: NkiTensor, indirect: bool) -> None:
    rows = m.target.dma_transpose_rows
    if indirect:
        m.fail(35, "an indirect transpose needs software DGE")
    if m.target.gen < 3:
        m.fail(34, "hwdge needs trn2 or later")
    if src.ndim == 2 and src.shape[0] != rows:
        m.fail(35, f"src {src.brief()}: a 2-D hwdge transpose takes {rows} rows")
    if src.ndim > 2 and (src.shape[0] not in (1, 2, 4, 8, rows) or src.shape[0] * src.shape[-2] % rows):
        m.fail(
            35,
            f"src {src.brief()}: shape[0] must be 1, 2, 4, 8 or {rows} and shape[0] * shape[-2] a multiple of {rows}",
        )


def _indirect_transpose_rules(m: Machine, src: NkiTensor) -> None:
    index = src.vector_index
    if index is None:
        return
    rows = m.target.dma_transpose_rows
    if m.target.gen < 3:
        m.fail(35, "an indirect transpose needs trn2 or later")
    if src.ndim == 4 and 1 not in src.shape[1:3]:
        m.fail(35, f"src {src.brief()}: dim 1 or dim 2 of a 4-D indirect transpose must be 1")
    if src.shape[0] % rows:
        m.fail(35, f"src {src.brief()}: rows must be a multiple of {rows}")
    if index.dtype is not dtypes.uint32:
        m.fail(35, f"the index tile must be uint32, got {index.brief()}")
    if index.ndim != 2:
        m.fail(35, f"the index tile must be 2-D, got {index.brief()}")
    p, columns = index.shape
    if not rows <= p <= m.target.pmax or p % rows or (columns > 1 and p != m.target.pmax):
        m.fail(
            35,
            f"the index tile {index.brief()} must have 16..128 rows in steps of 16, exactly 128 with several columns",
        )
    if p * columns < src.shape[0]:
        m.fail(35, f"the index tile {index.brief()} holds fewer indices than the {src.shape[0]} rows of src")


@instruction
def dma_compute(
    dst: Any, srcs: Any, reduce_op: Any, scales: Any = None, unique_indices: bool = True, oob_mode: Any = Oob.error,
    name: Any = None,
) -> None:  # fmt: skip
    """dst = sum of srcs in float32; with a vector index on one side: gather-add into SBUF or scatter-add into HBM."""
    m = current()
    dst = dma_operand(m, "dst", dst)
    sources = [dma_operand(m, f"srcs[{i}]", s) for i, s in enumerate(srcs)]
    oob_rule(m, oob_mode)
    if pick_operator(m, "reduce_op", reduce_op).name != "add":
        m.fail(31, f"reduce_op must be nl.add, got {reduce_op!r}")
    if scales is not None and (len(scales) != len(sources) or any(float(s) != 1.0 for s in scales)):
        m.fail(31, f"scales must be {len(sources)} times 1.0, got {list(scales)}")
    limit = m.target.dma_compute_max_sources
    if not 1 <= len(sources) <= limit:
        m.fail(31, f"srcs must hold 1 to {limit} tensors, got {len(sources)}")
    for t in (dst, *sources):
        if t.scalar_index is not None:
            m.fail(32, "dma_compute takes static addresses, or one vector index")
    indirect = any(t.vector_index is not None for t in (dst, *sources))
    if indirect:
        if len(sources) != 2:
            m.fail(32, f"with a vector index srcs must hold exactly 2 tensors, got {len(sources)}")
        if not unique_indices:
            m.fail(32, "unique_indices=False is not supported; combine duplicates first")
        if dst.memory == HBM and dst.vector_index is None:
            m.fail(32, "a scatter-add needs the vector index on dst too")
    for i, t in enumerate(sources):
        if t.size != dst.size:
            m.fail(31, f"srcs[{i}] {t.brief()} has {t.size} elements, dst {dst.brief()} has {dst.size}")
    total = np.zeros(dst.shape, np.float32)
    mask: Array | None = None
    for i, t in enumerate(sources):
        values, valid = fetch(m, f"srcs[{i}]", t, oob_mode)
        if valid is not None:
            mask = valid if mask is None else mask & valid
        if t.dtype.is_packed:
            m.fail(31, f"srcs[{i}] {t.brief()}: packed types cannot be summed")
        exact_int(m, f"srcs[{i}] {t.brief()}", values, t.dtype)
        values = dtypes.to_f32(values, t.dtype).reshape(dst.shape)
        total = values if i == 0 else total + values
    out = np.empty(dst.shape, dst.dtype.np)
    dtypes.cast_into(out, total, dst.dtype)
    if m.checks and dst.vector_index is not None:
        index = dst.vector_index.array().reshape(-1)
        if len(np.unique(index)) != len(index):
            m.fail(32, "a scatter-add needs unique indices, got a repeated one")
    deliver(m, dst, out, mask, oob_mode)
    nbytes = sum(t.size * t.dtype.itemsize for t in sources)
    facts = [descriptor_facts(dst, t) for t in sources]
    m.emit(
        DMA, (dst,), tuple(sources), bytes=nbytes, descriptors=sum(f[1] for f in facts), descriptor_bytes=facts[0][2],
        dge="swdge" if indirect else "none", queue="gpsimd" if indirect else "", indirect=indirect,
        rows=dst.shape[0] if indirect else 0, cast=False,
        hbm_read=sum(t.size * t.dtype.itemsize for t in sources if t.memory == HBM),
        hbm_written=dst.size * dst.dtype.itemsize if dst.memory == HBM else 0,
    )  # fmt: skip
