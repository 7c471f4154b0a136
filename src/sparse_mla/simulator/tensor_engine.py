# SPDX-License-Identifier: Apache-2.0
"""Tensor engine: matrix multiply into PSUM, and the transposes the PE array can do.

Products are exact for the narrow formats and summed in float32; the order of summation is NumPy's, which differs from
the
array's at the 1e-7 level. PSUM accumulation is tracked per region: a matmul may only add onto what a matmul put there.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import dtypes
from .constants import engine as Engine
from .constants import matmul_perf_mode as PerfMode
from .core import PSUM, SBUF, TENSOR, VECTOR, Array, Machine, current, describe, instruction
from .memory import Storage
from .tensor import NkiTensor, merge
from .vector_engine import on_chip, pick_engine

__all__ = ["Accumulation", "nc_matmul", "nc_transpose"]

NONE, IMPLICIT, EXPLICIT, FOREIGN, MIXED = 0, 1, 2, 3, 4
Key = tuple[int, tuple[int, ...], tuple[int, ...]]


class Accumulation:
    """What wrote each region of one PSUM tile last: nothing, a matmul (flags implicit or explicit), or another engine.

    Regions are kept by exact view as long as the views are disjoint or equal, which is the rule; the first partial
    overlap
    switches to a map with one state per element.
    """

    def __init__(self, storage: Storage) -> None:
        self.partitions, self.row_bytes = storage.partitions, storage.row_bytes
        self.regions: dict[Key, tuple[int, tuple[int, int, int, int]]] = {}
        self.map: Array | None = None

    @staticmethod
    def _box(t: NkiTensor) -> tuple[int, int, int, int]:
        o = t.operand()
        return o.p0, o.p1, o.b0, o.b1

    def _cells(self, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, itemsize: int) -> Array:
        if self.map is None:
            self.map = np.zeros(self.partitions * self.row_bytes, np.uint8)
        return np.ndarray((*shape, itemsize), np.uint8, self.map, offset, (*strides, 1))

    def _to_map(self) -> None:
        self.map = np.zeros(self.partitions * self.row_bytes, np.uint8)
        for (offset, shape, strides), (state, _) in self.regions.items():
            # the itemsize is the last stride entry of the key
            self._cells(shape, strides[:-1], offset, strides[-1])[...] = state
        self.regions.clear()

    def state(self, t: NkiTensor) -> int:
        """State of the view's bytes: one of the constants, MIXED when they differ."""
        key: Key = (t.byte_offset, t.shape, (*t.byte_strides, t.dtype.itemsize))
        if self.map is None:
            known = self.regions.get(key)
            if known is not None:
                return known[0]
            if not self.regions:
                return NONE
            a = self._box(t)
            if not any(a[0] < b[1] and b[0] < a[1] and a[2] < b[3] and b[2] < a[3] for _, b in self.regions.values()):
                return NONE
            self._to_map()
        cells = self._cells(t.shape, t.byte_strides, t.byte_offset, t.dtype.itemsize)
        low, high = int(cells.min()), int(cells.max())
        return low if low == high else MIXED

    def cells(self, t: NkiTensor) -> Array:
        """Per-element states of a MIXED view."""
        return self._cells(t.shape, t.byte_strides, t.byte_offset, t.dtype.itemsize)[..., 0]

    def put(self, t: NkiTensor, state: int) -> None:
        self.state(t)  # resolves overlaps first
        if self.map is None:
            self.regions[(t.byte_offset, t.shape, (*t.byte_strides, t.dtype.itemsize))] = (state, self._box(t))
        else:
            self._cells(t.shape, t.byte_strides, t.byte_offset, t.dtype.itemsize)[...] = state

    def foreign_write(self, t: NkiTensor) -> None:
        """An engine other than PE wrote here."""
        self.put(t, FOREIGN)


def _matmul_dtypes(m: Machine, stationary: NkiTensor, moving: NkiTensor) -> None:
    for role, t in (("stationary", stationary), ("moving", moving)):
        if not t.dtype.is_float or t.dtype is dtypes.float8_e8m0fnu:
            m.fail(9, f"{role} must be a float type the PE array multiplies, got {t.brief()}")
        if t.dtype is dtypes.float8_e4m3fn and m.target.gen < 4:
            m.fail(9, f"{role}: float8_e4m3fn needs trn3; on {m.target.name} use float8_e4m3")
    wide = (dtypes.float32, dtypes.tfloat32)
    if (stationary.dtype in wide) != (moving.dtype in wide):
        m.fail(9, f"stationary {stationary.dtype} and moving {moving.dtype}: a 32-bit operand needs a 32-bit partner")
    if {stationary.dtype, moving.dtype} == {dtypes.float8_e4m3, dtypes.float8_e4m3fn}:
        m.fail(9, "float8_e4m3 and float8_e4m3fn cannot be mixed")


def _tile(m: Machine, position: Any, size: Any, stationary: NkiTensor, dst: NkiTensor) -> tuple[int, int, int, int]:
    """(row, column, rows, columns) of the PE tile, checked."""
    target = m.target
    if not position and not size:
        return 0, 0, target.pmax, target.pmax
    if not position or not size:
        m.fail(12, "tile_position and tile_size must be set together")
    (row, column), (rows, columns) = (int(v) for v in position), (int(v) for v in size)
    if m.checks:
        legal = [n for n in (target.quadrant, target.pe_half, target.pmax) if n >= target.tile_quantum]
        for word, n in (("row", rows), ("column", columns)):
            if n not in legal:
                m.fail(12, f"tile_size {word}s must be one of {legal}, got {n}")
        if row % rows or column % columns or row + rows > target.pmax or column + columns > target.pmax:
            m.fail(
                12, f"tile_position {(row, column)} must be multiples of tile_size {(rows, columns)} inside the array"
            )
        if stationary.shape[0] > rows or stationary.free_size > columns:
            m.fail(12, f"stationary {stationary.brief()} exceeds tile_size {(rows, columns)}")
        if stationary.p0 != row:
            m.fail(12, f"stationary starts at partition {stationary.p0}, the tile at row {row}")
        if dst.p0 != column:
            m.fail(
                12,
                f"dst starts at partition {dst.p0}, the tile's columns at {column}; output lands at the column "
                "position",
            )
    return row, column, rows, columns


def _inside_bank(m: Machine, dst: NkiTensor) -> None:
    bank = m.target.psum_bank_fmax_bytes
    o = dst.operand()
    base = o.address[1] if o.address is not None else 0
    if (base + o.b0) // bank != (base + o.b1 - 1) // bank:
        m.fail(
            7,
            f"dst {dst.brief()} spans bytes {o.b0}..{o.b1} of a partition; one matmul writes inside one {bank} B "
            "PSUM bank",
        )


@instruction
def nc_matmul(
    dst: Any, stationary: Any, moving: Any, is_stationary_onezero: bool = False, is_moving_onezero: bool = False,
    is_transpose: bool = False, accumulate: bool | None = None, tile_position: Any = (), tile_size: Any = (),
    perf_mode: Any = PerfMode.none, name: Any = None,
) -> None:  # fmt: skip
    """dst[M, N] = stationary[K, M].T @ moving[K, N], or added to what earlier matmuls left there."""
    m = current()
    target = m.target
    if isinstance(perf_mode, str) and perf_mode in PerfMode.__members__:
        m.warn(0, f"perf_mode={perf_mode!r} is now nisa.matmul_perf_mode.{perf_mode}")
        perf_mode = PerfMode[perf_mode]
    if not isinstance(perf_mode, PerfMode):
        m.fail(11, f"perf_mode must be one of nisa.matmul_perf_mode, got {describe(perf_mode)}")
    double_row = perf_mode is PerfMode.double_row
    # Memory types
    stationary = m.tile("stationary", stationary, (SBUF,), 6)
    moving = m.tile("moving", moving, (SBUF,), 6)
    dst = m.tile("dst", dst, (PSUM,), 6)
    # Data types
    k, columns, n = stationary.shape[0], stationary.free_size, moving.free_size
    if m.checks:
        _matmul_dtypes(m, stationary, moving)
        if is_transpose:
            if dst.dtype is not stationary.dtype:
                m.fail(8, f"dst {dst.brief()} of a transpose must have the dtype of stationary, {stationary.dtype}")
        elif dst.dtype is not dtypes.float32 and not (target.gen >= 4 and dst.dtype is dtypes.bfloat16):
            m.fail(8, f"dst {dst.brief()} must be float32")
        if double_row:
            _double_row_rules(m, stationary, moving, tile_size, is_transpose)
        elif stationary.ndim > 2 and merge(stationary.shape[1:], stationary.byte_strides[1:]) is None:
            m.fail_or_warn(
                10,
                f"stationary {stationary.brief()} has two free dims; hardware takes one and computes wrong numbers",
                fatal=not m.compat,
            )
        # Tile size
        m.same_start(stationary=stationary, moving=moving)
        if columns > target.gemm_stationary_fmax * (2 if double_row else 1):
            m.fail(5, f"stationary free size {columns} exceeds {target.gemm_stationary_fmax}")
        limit = target.moving_fmax_bf16 if dst.dtype is dtypes.bfloat16 and target.gen >= 4 else target.moving_fmax_fp32
        if n > limit * (2 if double_row else 1):
            m.fail(5, f"moving free size {n} exceeds {limit}")
        if target.gen < 4:
            _inside_bank(m, dst)
    # Layout: contraction on the partition axis
    if moving.shape[0] != k:
        m.fail(
            5, f"stationary {stationary.brief()} and moving {moving.brief()} must have equal partitions (contraction)"
        )
    tile = _tile(m, tile_position, tile_size, stationary, dst)
    if double_row:
        columns, n = columns // 2, n // 2
    if dst.shape[0] != columns or dst.free_size != n:
        m.fail(
            23,
            f"dst {dst.brief()} must be ({columns}, {n}) for stationary {stationary.brief()} and moving "
            f"{moving.brief()}",
        )
    # Result: float32 accumulation in PSUM
    added = False
    if is_transpose:
        transpose_by_identity(m, dst, stationary, moving)
    else:
        s, x = m.f32("stationary", stationary), m.f32("moving", moving)
        if m.checks:
            for role, claimed, values, t in (
                ("stationary", is_stationary_onezero, s, stationary), ("moving", is_moving_onezero, x, moving),
            ):  # fmt: skip
                if claimed and t.dtype.itemsize == 4 and not ((values == 0) | (values == 1)).all():
                    m.fail(9, f"{role} {t.brief()} is claimed to hold ones and zeros only, but holds other values")
        rows = k * 2 if double_row else k
        product = s.reshape(rows, columns).T @ x.reshape(rows, n)
        added = accumulate_into(m, dst, product, accumulate)
    m.emit(
        TENSOR, (dst,), (stationary, moving), n, k=k, m=columns, n=n, fp32=stationary.dtype is dtypes.float32,
        double_row=double_row, transpose=is_transpose, tile=tile, accumulate=added,
    )  # fmt: skip


def _double_row_rules(m: Machine, stationary: NkiTensor, moving: NkiTensor, tile_size: Any, is_transpose: bool) -> None:
    if m.target.gen < 3:
        m.fail(11, "double_row needs trn2 or later")
    for role, t in (("stationary", stationary), ("moving", moving)):
        if t.dtype not in dtypes.FP8:
            m.fail(11, f"{role} must be fp8 in double_row mode, got {t.brief()}")
        if t.ndim < 3 or t.shape[1] != 2:
            m.fail(11, f"{role} {t.brief()} must be [K, 2, free] in double_row mode")
    if stationary.ndim != 3:
        m.fail(10, f"stationary {stationary.brief()} must be exactly [K, 2, M] in double_row mode")
    if is_transpose:
        m.fail(11, "double_row cannot transpose")
    if tile_size and tile_size[1] != m.target.pmax:
        m.fail(11, "double_row cannot be combined with column tiling")


def accumulate_into(m: Machine, dst: NkiTensor, product: Array, accumulate: bool | None) -> bool:
    """Overwrite or add, as flags and history say; returns True when something was added to."""
    st = dst.storage
    track: Accumulation = st.accumulation
    out = dst.array()
    product = product.reshape(out.shape)
    state = track.state(dst)
    add: Any
    states = np.asarray(state) if state != MIXED else track.cells(dst)
    if accumulate is None:
        if m.checks and bool((states == EXPLICIT).any()):
            m.fail_or_warn(
                13,
                "accumulate=None follows explicit flags on this accumulation group; set it on all or on none",
                fatal=not m.compat,
            )
        foreign(m, dst, out, states)
        summed = (states == IMPLICIT) | (states == EXPLICIT)
        add = bool(summed) if state != MIXED else summed
    elif accumulate:
        if m.checks and bool((states == IMPLICIT).any()):
            m.fail_or_warn(
                13, "accumulate=True follows matmuls without the flag; set it on all or on none", fatal=not m.compat
            )
        foreign(m, dst, out, states)
        if m.checks and bool((states == NONE).any()):
            m.fail(13, f"accumulate=True but no matmul with accumulate=False wrote dst {dst.brief()} before")
        add = True
    else:
        add = False
    if add is True and out.dtype == product.dtype:
        out += product
    else:
        if add is not False:
            product = np.where(add, out.astype(np.float32) + product, product)
        dtypes.cast_into(out, product, dst.dtype)
    track.put(dst, IMPLICIT if accumulate is None else EXPLICIT)
    wrote_by_pe(m, dst)
    return add is not False


def foreign(m: Machine, dst: NkiTensor, out: Array, states: Array) -> None:
    """A matmul onto PSUM that another engine initialised: undefined on trn1/trn2, not described for trn3."""
    if not m.checks:
        return
    touched = states == FOREIGN
    if not bool(touched.any()):
        return
    if bool(((out != 0) & touched).any()):
        if m.target.gen >= 4:
            m.warn(14, f"dst {dst.brief()} holds nonzero values of another engine; whether a matmul adds is not known")
            return
        m.fail(
            14, f"dst {dst.brief()} was set to nonzero values by another engine; a matmul cannot accumulate onto them"
        )
    m.warn(
        14, f"dst {dst.brief()} was zeroed by another engine; the first matmul overwrites it, the fill is not needed"
    )


def wrote_by_pe(m: Machine, dst: NkiTensor) -> None:
    """`Machine.wrote` without marking the region as another engine's."""
    st = dst.storage
    track, st.accumulation = st.accumulation, None
    m.wrote(dst)
    st.accumulation = track


def transpose_by_identity(m: Machine, dst: NkiTensor, stationary: NkiTensor, moving: NkiTensor) -> None:
    """Transpose mode: moving must be a permutation matrix; bits move, nothing is computed."""
    k = stationary.shape[0]
    selector = m.f32("moving", moving).reshape(k, -1)
    source = selector.argmax(axis=0)
    if m.checks and not (
        bool((selector[source, np.arange(selector.shape[1])] == 1).all())
        and np.count_nonzero(selector) == selector.shape[1]
    ):
        m.fail(8, "moving of a transpose must be an identity (one 1 per column)")
    data = m.read("stationary", stationary).reshape(k, -1)
    move_transposed(m, dst, data[source])


def move_transposed(m: Machine, dst: NkiTensor, data: Array) -> None:
    out = dst.array()
    moved = data.T
    out[...] = moved if moved.shape == out.shape else moved.reshape(out.shape)
    if dst.storage.accumulation is not None:
        dst.storage.accumulation.put(dst, NONE)
        wrote_by_pe(m, dst)
    else:
        m.wrote(dst)


@instruction
def nc_transpose(dst: Any, data: Any, engine: Any = Engine.unknown, name: Any = None) -> None:
    """dst[F, P] = data[P, F].T, free dims flattened; PE array up to 128 x 128, Vector up to 32 x 32."""
    m = current()
    target = m.target
    for role, t in (("dst", dst), ("data", data)):
        if type(t) is not NkiTensor:
            m.fail(23, f"{role} must be a tensor, got {describe(t)}")
    default = TENSOR if data.memory == SBUF and dst.memory == PSUM else VECTOR
    where = pick_engine(m, engine, default, (TENSOR, VECTOR))
    # Memory types
    if where == TENSOR:
        data, dst = m.tile("data", data, (SBUF,), 6), m.tile("dst", dst, (PSUM,), 6)
    else:
        data, dst = on_chip(m, "data", data), on_chip(m, "dst", dst)
    # Data types
    if m.checks and dst.dtype is not data.dtype:
        m.fail(8, f"dst {dst.brief()} must have the dtype of data, {data.dtype}")
    # Tile size
    p, f = data.shape[0], data.free_size
    side = target.pmax if where == TENSOR else target.quadrant
    if m.checks and max(p, f) > side:
        m.fail(15, f"data {data.brief()} exceeds {side} x {side} of the {where} engine")
    # Layout
    if dst.shape[0] != f or dst.free_size != p:
        m.fail(23, f"dst {dst.brief()} must be ({f}, {p}), the transpose of data {data.brief()}")
    if where == TENSOR and m.checks and target.gen < 4:
        _inside_bank(m, dst)
    move_transposed(m, dst, m.read("data", data).reshape(p, f))
    size = data.dtype.itemsize
    m.emit(where, (dst,), (data,), f if where == TENSOR else p, k=p, m=f, fp32=size == 4, two_byte=size == 2)
