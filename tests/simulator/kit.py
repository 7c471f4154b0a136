# SPDX-License-Identifier: Apache-2.0
"""What the simulator's tests share: the NKI names, a launcher that collects warnings, and tiles from arrays."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from sparse_mla import simulator
from sparse_mla.simulator import SimulatorParams
from sparse_mla.simulator import isa as nisa
from sparse_mla.simulator import language as nl

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3)
E5M2 = np.dtype(ml_dtypes.float8_e5m2)
E4M3FN = np.dtype(ml_dtypes.float8_e4m3fn)


def launch(kernel: Any, *args: Any, grid: Any = None, gen: int = 3, **options: Any) -> simulator.Run:
    """Run a kernel on trn2 (by default) without printing its warnings."""
    return simulator.run(kernel, *args, grid=grid, params=SimulatorParams(gen=gen, show_warnings=False, **options))


def checks_of(result: simulator.Run) -> list[int]:
    """Numbers of the rules that warned."""
    return [w.check for w in result.warnings]


def put(array: Any, buffer: Any = nl.sbuf, dtype: Any = None) -> Any:
    """A tile holding an HBM tensor's contents (inside a kernel)."""
    tile = nl.ndarray(array.shape, array.dtype if dtype is None else dtype, nl.sbuf)
    nisa.dma_copy(dst=tile, src=array)
    if buffer == nl.sbuf:
        return tile
    moved = nl.ndarray(array.shape, tile.dtype, buffer)
    nisa.tensor_copy(dst=moved, src=tile)
    return moved


def get(tile: Any, name: str = "") -> Any:
    """A shared_hbm tensor holding a tile's contents (inside a kernel)."""
    if tile.buffer == nl.psum:
        moved = nl.ndarray(tile.shape, tile.dtype, nl.sbuf)
        nisa.tensor_copy(dst=moved, src=tile)
        tile = moved
    out = nl.ndarray(tile.shape, tile.dtype, nl.shared_hbm, name=name)
    nisa.dma_copy(dst=out, src=tile)
    return out


def random(shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 0, scale: float = 1.0) -> Any:
    """Normal random numbers in any dtype (integers: 0..100)."""
    generator = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        return generator.integers(0, 100, shape).astype(dtype)
    return (generator.standard_normal(shape) * scale).astype(dtype)
