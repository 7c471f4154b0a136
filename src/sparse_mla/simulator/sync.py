# SPDX-License-Identifier: Apache-2.0
"""What ties engines and cores together: registers, barriers, and exchanges between the two cores of a logical core."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import dtypes
from .constants import dma_engine as DmaEngine
from .constants import engine as Engine
from .core import DMA, GPSIMD, HBM, SBUF, SYNC, Machine, current, describe, instruction
from .tensor import NkiTensor, VirtualRegister
from .vector_engine import pick_engine

__all__ = ["core_barrier", "register_alloc", "register_load", "register_move", "register_store", "sendrecv"]

INT32_MIN, INT32_MAX = -(1 << 31), (1 << 31) - 1


def _register(m: Machine, role: str, value: Any) -> VirtualRegister:
    if not isinstance(value, VirtualRegister):
        m.fail(24, f"{role} must be a register from nisa.register_alloc, got {describe(value)}")
    return value


def _one_element(m: Machine, role: str, value: Any) -> NkiTensor:
    if type(value) is not NkiTensor or value.size != 1 or value.memory not in (HBM, SBUF):
        m.fail(24, f"{role} must be a one-element HBM or SBUF tensor, got {describe(value)}")
    return m.dynamic(role, value)


def _fits(m: Machine, role: str, value: int) -> int:
    """A value a 32-bit register can hold, signed or unsigned."""
    if not INT32_MIN <= value < 1 << 32:
        m.fail(24, f"{role} {value} does not fit a 32-bit register")
    return value


@instruction
def register_alloc(x: int | None = None) -> VirtualRegister:
    """A new register, loaded with x when given (an int, or a one-element tensor in older kernels)."""
    m = current()
    if x is None or isinstance(x, (int, np.integer)):
        return VirtualRegister(None if x is None else _fits(m, "x", int(x)))
    made = VirtualRegister()
    _load(m, made, x)
    return made


@instruction
def register_move(dst: Any, src: Any = None, imm: Any = None) -> None:
    """dst = src, a constant or a register. `imm=` is the older name."""
    m = current()
    if imm is not None:
        m.warn(0, "register_move(imm=) is now src=")
        src = imm
    register = _register(m, "dst", dst)
    if register.frozen:
        m.fail(24, "dst is a loop index, which only the loop changes")
    if isinstance(src, VirtualRegister):
        register.state = src.value()
    elif isinstance(src, (int, np.integer)):
        register.state = _fits(m, "src", int(src))
    else:
        m.fail(24, f"src must be an int or a register, got {describe(src)}")
    m.emit(SYNC, (), ())


def _load(m: Machine, register: VirtualRegister, src: Any) -> None:
    t = _one_element(m, "src", src)
    if t.dtype.itemsize > 4 or t.dtype.is_packed:
        m.fail(24, f"src must be at most 32 bits wide, got {t.brief()}")
    array = m.read("src", t)
    if t.dtype.is_float:
        array = dtypes.to_f32(array, t.dtype)
        value = float(array.reshape(-1)[0])
        register.state = int(np.clip(np.rint(value), INT32_MIN, INT32_MAX)) if np.isfinite(value) else 0
    else:
        register.state = int(array.reshape(-1)[0])
    m.emit(SYNC, (), (t,))


@instruction
def register_load(dst: Any, src: Any) -> None:
    """dst = the one element of src."""
    m = current()
    register = _register(m, "dst", dst)
    if register.frozen:
        m.fail(24, "dst is a loop index, which only the loop changes")
    _load(m, register, src)


@instruction
def register_store(dst: Any, src: Any) -> None:
    """The one element of dst = register src."""
    m = current()
    t = _one_element(m, "dst", dst)
    value = _register(m, "src", src).value()
    m.write(t, np.full(t.shape, value, np.int64))
    m.emit(SYNC, (t,), ())


def meet(m: Machine, key: tuple[Any, ...], payload: Any) -> dict[int, Any]:
    """Wait until all cores of the launch arrive at `key`; returns what each brought."""
    if m.launch.meet is None:
        m.fail(45, "needs a launch on two cores, kernel[2](..)")
    return m.launch.meet(m, key, payload)  # type: ignore[no-any-return]


@instruction
def core_barrier(data: Any, cores: Any = (0, 1), engine: Any = Engine.gpsimd, name: Any = None) -> None:
    """After it, both cores see what either wrote to the shared_hbm tensor `data`."""
    m = current()
    if m.checks and m.target.gen < 3:
        m.fail(48, "core_barrier exists from trn2 on")
    if type(data) is not NkiTensor:
        m.fail(45, f"data must be a shared_hbm tensor, got {describe(data)}")
    if data.memory != HBM:  # a published kernel names a tile of its own, where cores wait but share nothing
        text = f"data must be a shared_hbm tensor, got {data.brief()}"
        m.fail_or_warn(45, text, fatal=not m.compat or data.memory != SBUF)
    ids = (int(cores),) if isinstance(cores, (int, np.integer)) else tuple(int(c) for c in cores)
    if ids != (0, 1):
        m.fail(45, f"cores must be (0, 1), got {ids}")
    where = pick_engine(m, engine, GPSIMD, (GPSIMD, "vector", "scalar", "tensor", SYNC))
    if m.checks and data.storage.kind == "shared_hbm" and not data.storage.name:
        m.fail_or_warn(
            45,
            f"data {data.brief()} has no name: each core has its own copy, a barrier cannot share it",
            fatal=not m.compat,
        )
    sequence = m.barriers.get(ids, 0)
    m.barriers[ids] = sequence + 1
    meet(m, ("core_barrier", sequence), None)
    m.emit(where, (data,), (data,), cores=ids, sequence=sequence)


@instruction
def sendrecv(
    src: Any,
    dst: Any,
    send_to_rank: Any,
    recv_from_rank: Any,
    pipe_id: Any,
    dma_engine: Any = DmaEngine.dma,
    name: Any = None,
) -> None:
    """Exchange SBUF tiles between the two cores."""
    m = current()
    if m.checks and m.target.gen < 3:
        m.fail(48, "sendrecv exists from trn2 on")
    for role, t in (("src", src), ("dst", dst)):
        if type(t) is not NkiTensor or t.memory != SBUF:
            m.fail(44, f"{role} must be an SBUF tile, got {t.brief() if type(t) is NkiTensor else describe(t)}")
    src, dst = m.dynamic("src", src), m.dynamic("dst", dst)
    if src.dtype is not dst.dtype or src.shape != dst.shape:
        m.fail(44, f"src {src.brief()} and dst {dst.brief()} must agree in shape and dtype")
    for role, rank in (("send_to_rank", send_to_rank), ("recv_from_rank", recv_from_rank)):
        if rank not in (0, 1):
            m.fail(44, f"{role} must be 0 or 1, got {rank!r}")
    if src.shape[0] != m.target.pmax:
        m.warn(
            44,
            f"src {src.brief()}: exchanges of fewer than {m.target.pmax} partitions were seen to scramble the layout",
        )
    if dma_engine is DmaEngine.gpsimd_dma:
        limit = 256 * src.dtype.itemsize
        if m.checks and src.free_size * src.dtype.itemsize > limit:
            m.fail(44, f"src {src.brief()}: gpsimd_dma moves at most {limit} B per partition of this dtype")
    values = m.read("src", src).copy()
    key = ("sendrecv", int(pipe_id) if not isinstance(pipe_id, str) else pipe_id)
    brought = meet(m, key, (int(send_to_rank), values))
    receiver, arrived = brought[int(recv_from_rank)]
    if receiver != m.core:
        m.fail(44, f"core {recv_from_rank} sends to core {receiver}, but core {m.core} expects to receive from it")
    if arrived.shape != dst.shape or arrived.dtype != dst.dtype.np:
        m.fail(44, f"core {recv_from_rank} sent {arrived.shape} {arrived.dtype}, dst is {dst.brief()}")
    out = dst.array()
    out[...] = arrived
    m.wrote(dst)
    m.emit(DMA, (dst,), (src,), bytes=src.size * src.dtype.itemsize, peer=int(recv_from_rank), via=dma_engine.name)
