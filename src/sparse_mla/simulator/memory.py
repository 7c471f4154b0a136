# SPDX-License-Identifier: Apache-2.0
"""Where bytes live: HBM, SBUF and PSUM storage, what of it was ever written, and how much is alive at once.

A `Storage` is one declared tensor. On-chip storage has rows = partitions, each `row_bytes` long; HBM storage is one
row.
Tiles without an address own a private buffer, tiles with an address are windows into the memory's arena, so two tiles
at
one place really share bytes. What was written is tracked in units of the declared element (finer when a narrower view
writes); the bitmap disappears once everything is written, so full tiles cost nothing.

Capacity is judged after the run, from each tile's first write to its last use: the compiler may place tiles at any byte
and reuse dead ones, so only bytes alive at the same instruction compete.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np

from .dtypes import DType
from .target import Target

__all__ = ["HBM", "PSUM", "SBUF", "Arena", "Life", "Peak", "Pool", "Storage", "poison", "psum_peak", "sbuf_peak"]

Array = np.ndarray[Any, np.dtype[Any]]
SBUF, PSUM, HBM = "sbuf", "psum", "hbm"
_ids = itertools.count(1)
NAN_BYTE = 0xFF  # all ones is NaN in every float format but e8m0 (NaN too) and fp4


def poison(data: Array, dtype: DType, seed: int, ident: int) -> None:
    """Fill fresh memory: NaN for floats, seed-dependent nonsense for integers."""
    if dtype.is_float:
        data.fill(NAN_BYTE)
    else:
        # Knuth's multiplicative hash; 0x40 set so that it is never zero and never a plausible index
        data.fill((((seed * 2654435761 + ident * 40503) >> 7) & 0x3F) | 0x40)


class Pool:
    """Buffers of dead tiles, kept for the next tile of that size (a fresh page costs more than the arithmetic)."""

    LIMIT_BYTES = 1 << 28

    def __init__(self) -> None:
        self.free: dict[int, list[Array]] = {}
        self.held = 0

    def take(self, nbytes: int) -> Array:
        found = self.free.get(nbytes)
        if found:
            self.held -= nbytes
            return found.pop()
        return np.empty(nbytes, np.uint8)

    def give(self, data: Array) -> None:
        if self.held + data.nbytes <= self.LIMIT_BYTES:
            self.held += data.nbytes
            self.free.setdefault(data.nbytes, []).append(data)


@dataclass(frozen=True, slots=True)
class Life:
    """One dead or finished tile: alive from instruction `first` to `last`, `row_bytes` per partition."""

    first: int
    last: int
    row_bytes: int
    shape: tuple[int, ...]
    dtype: str
    source: tuple[str, int]
    end: int = 0  # byte behind the tile in each partition when it was placed by address, 0 otherwise


class Arena:
    """All bytes of one on-chip memory of one core; exists once a tile asks for an address."""

    def __init__(self, row_bytes: int, partitions: int) -> None:
        self.row_bytes = row_bytes
        self.data = np.full(row_bytes * partitions, NAN_BYTE, np.uint8)
        self.tiles: weakref.WeakSet[Storage] = weakref.WeakSet()


class Storage:
    """Bytes of one declared tensor."""

    __slots__ = (
        "__weakref__", "accumulation", "address", "all_init", "base", "bitmap", "clobbered_by", "data", "dtype",
        "first", "home", "ident", "kind", "last", "lives", "memory", "name", "overlaps", "partitions", "pitch",
        "pool", "row_bytes", "shape", "source", "unit", "writers",
    )  # fmt: skip

    def __init__(
        self,
        memory: str,
        kind: str,
        shape: tuple[int, ...],
        dtype: DType,
        *,
        name: str = "",
        source: tuple[str, int] = ("", 0),
        data: Array | None = None,
        arena: Arena | None = None,
        address: tuple[int, int] | None = None,
        pool: Pool | None = None,
        lives: list[Life] | None = None,
        home: int = 0,
        seed: int = 0,
    ) -> None:
        self.ident = next(_ids)
        self.memory = memory  # sbuf, psum or hbm
        self.kind = kind  # the buffer as declared: sbuf, psum, private_hbm, shared_hbm, input
        self.shape = shape
        self.dtype = dtype
        self.name = name
        self.source = source
        self.home = home  # core that declared it
        if memory == HBM:
            count = 1
            for size in shape:
                count *= size
            self.partitions, self.row_bytes = 1, count * dtype.itemsize
        else:
            count = 1
            for size in shape[1:]:
                count *= size
            self.partitions, self.row_bytes = shape[0], count * dtype.itemsize
        self.pitch = self.row_bytes
        self.base = 0
        self.address = address
        self.pool = None
        self.lives = lives
        self.first = -1
        self.last = -1
        self.unit = dtype.itemsize
        self.bitmap: Array | None = None
        self.all_init = False
        self.clobbered_by: Storage | None = None
        self.overlaps: list[weakref.ref[Storage]] = []
        self.accumulation: Any = None  # PSUM: state of matmul accumulation, kept by the tensor engine
        self.writers = 0  # bit set of cores that wrote
        if data is not None:
            self.data = data
            self.all_init = True
        elif arena is not None and address is not None:
            self.data = arena.data
            self.pitch = arena.row_bytes
            self.base = address[0] * arena.row_bytes + address[1]
            mine = (address[0], address[0] + self.partitions, address[1], address[1] + self.row_bytes)
            for other in arena.tiles:
                a = other.address or (0, 0)
                if (
                    a[0] < mine[1]
                    and mine[0] < a[0] + other.partitions
                    and a[1] < mine[3]
                    and mine[2] < a[1] + other.row_bytes
                ):
                    self.overlaps.append(weakref.ref(other))
                    other.overlaps.append(weakref.ref(self))
            arena.tiles.add(self)
        else:
            nbytes = self.partitions * self.row_bytes
            self.pool = pool
            self.data = pool.take(nbytes) if pool is not None else np.empty(nbytes, np.uint8)
            poison(self.data, dtype, seed, self.ident)

    def __del__(self) -> None:
        try:
            self.retire()
            if self.pool is not None:
                self.pool.give(self.data)
        except Exception:  # an object half made, or interpreter shutdown: nothing to save
            pass

    def retire(self) -> None:
        """Hand the life span to the capacity check; called once, when the tile dies or the run ends."""
        if self.lives is not None and self.first >= 0:
            end = 0 if self.address is None else self.address[1] + self.row_bytes
            self.lives.append(
                Life(self.first, self.last, self.row_bytes, self.shape, str(self.dtype), self.source, end)
            )
        self.lives = None

    # -- initialised memory -------------------------------------------------------------------------------------

    def bits(self, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, itemsize: int) -> Array:
        """The part of the bitmap behind a view given in logical bytes (row_bytes per partition)."""
        if self.bitmap is None:
            self.bitmap = np.zeros(self.partitions * self.row_bytes // self.unit, np.bool_)
        unit = self.unit
        if itemsize % unit or offset % unit or any(s % unit for s in strides):
            self.bitmap = np.repeat(self.bitmap, unit)
            self.unit = unit = 1
        if itemsize == unit:
            return np.ndarray(shape, np.bool_, self.bitmap, offset // unit, tuple(s // unit for s in strides))
        return np.ndarray(
            (*shape, itemsize // unit), np.bool_, self.bitmap, offset // unit, (*(s // unit for s in strides), 1)
        )

    def is_initialised(self, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, itemsize: int) -> bool:
        """True when every byte of the view was written."""
        if self.all_init:
            return True
        if self.bitmap is None:
            return False
        found = bool(self.bits(shape, strides, offset, itemsize).all())
        if found and self.bitmap is not None and bool(self.bitmap.all()):
            self.all_init = True
            self.bitmap = None
            self.unit = self.dtype.itemsize
        return found

    def mark(self, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, itemsize: int, whole: bool) -> None:
        """Remember that the view was written."""
        if self.all_init:
            return
        if whole:
            self.all_init = True
            self.bitmap = None
            self.unit = self.dtype.itemsize
        else:
            self.bits(shape, strides, offset, itemsize)[...] = True

    def forget(self, p0: int, p1: int, b0: int, b1: int, by: Storage) -> None:
        """Another tile at overlapping addresses was written: those bytes are no longer ours."""
        if self.bitmap is None:
            self.bitmap = np.full(self.partitions * self.row_bytes, self.all_init, np.bool_)
            self.unit = 1
        elif self.unit != 1:
            self.bitmap = np.repeat(self.bitmap, self.unit)
            self.unit = 1
        self.all_init = False
        self.bitmap.reshape(self.partitions, self.row_bytes)[p0:p1, b0:b1] = False
        self.clobbered_by = by

    def clobber_overlaps(self, p0: int, p1: int, b0: int, b1: int) -> list[Storage]:
        """Tell the tiles that share our bytes [p0, p1) x [b0, b1) that they were overwritten; returns them."""
        if self.address is None:
            return []
        alive = []
        hit = []
        for ref in self.overlaps:
            other = ref()
            if other is None or other.address is None:
                continue
            alive.append(ref)
            dp, db = self.address[0] - other.address[0], self.address[1] - other.address[1]
            q0, q1 = max(p0 + dp, 0), min(p1 + dp, other.partitions)
            c0, c1 = max(b0 + db, 0), min(b1 + db, other.row_bytes)
            if q0 < q1 and c0 < c1:
                other.forget(q0, q1, c0, c1, self)
                hit.append(other)
        self.overlaps = alive
        return hit


@dataclass(frozen=True)
class Peak:
    """Most bytes (SBUF) or banks (PSUM) alive at once, where, and the largest tiles there."""

    amount: int
    instruction: int
    largest: tuple[Life, ...]


def _sweep(lives: list[Life], weight: Any) -> tuple[int, int]:
    """(highest sum of weights of lives that overlap, instruction where it is reached).

    A tile counts in full however few partitions it has: tiles without an address start at partition 0, so they compete
    there. Tiles with an address may share bytes or sit side by side; together they never count more than the highest
    byte any of them reaches.
    """
    if not lives:
        return 0, 0
    placed = np.fromiter((life.end for life in lives), np.int64, len(lives))
    first = np.fromiter((life.first for life in lives), np.int64, len(lives))
    last = np.fromiter((life.last for life in lives), np.int64, len(lives))
    size = np.fromiter((weight(life) for life in lives), np.int64, len(lives))
    # a tile dies after its last use: releases sort behind acquisitions of the same instruction
    when = np.concatenate([first * 2, last * 2 + 1])
    change = np.concatenate([size, -size])
    order = np.argsort(when, kind="stable")
    fixed = np.concatenate([placed, placed])[order] > 0
    level = np.cumsum(np.where(fixed, 0, change[order]))
    level += np.minimum(np.cumsum(np.where(fixed, change[order], 0)), int(placed.max()))
    top = int(np.argmax(level))
    return int(level[top]), int(when[order][top] // 2)


def _at(lives: list[Life], instruction: int) -> tuple[Life, ...]:
    alive = [life for life in lives if life.first <= instruction <= life.last]
    return tuple(sorted(alive, key=lambda life: -life.row_bytes)[:3])


def sbuf_peak(lives: list[Life]) -> Peak:
    """Peak live bytes per partition."""
    amount, where = _sweep(lives, lambda life: life.row_bytes)
    return Peak(amount, where, _at(lives, where))


def psum_peak(lives: list[Life], target: Target) -> Peak:
    """Peak live banks: a tile of a bank or more takes whole banks, smaller tiles share."""
    bank = target.psum_bank_fmax_bytes
    amount, where = _sweep(
        lives, lambda life: -(-life.row_bytes // bank) * bank if life.row_bytes >= bank else life.row_bytes
    )
    return Peak(-(-amount // bank), where, _at(lives, where))
