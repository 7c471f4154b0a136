# SPDX-License-Identifier: Apache-2.0
"""Enumerations of `nki.isa.constants`, with the documented names and values."""

from __future__ import annotations

from enum import Enum

__all__ = ["dge_mode", "dma_engine", "engine", "matmul_perf_mode", "nc_version", "oob_mode", "reduce_cmd"]


class engine(Enum):
    """Engines of a NeuronCore."""

    unknown = 0
    tensor = 1
    scalar = 2
    gpsimd = 3
    dma = 4
    vector = 5
    sync = 6


class reduce_cmd(Enum):
    """What an instruction does to the engine's accumulators."""

    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
    load_reduce = 4


class dge_mode(Enum):
    """Who builds DMA descriptors."""

    unknown = 0
    swdge = 1
    hwdge = 2
    none = 3


class oob_mode(Enum):
    """What a dynamic index outside the tensor does."""

    error = 0
    skip = 1


class matmul_perf_mode(Enum):
    """Tensor engine modes."""

    none = "none"
    double_row = "double_row"


class nc_version(Enum):
    """NeuronCore generations; ordered."""

    gen2 = 2
    gen3 = 3
    gen4 = 4

    def __lt__(self, other: object) -> bool:
        return isinstance(other, nc_version) and self.value < other.value

    def __le__(self, other: object) -> bool:
        return isinstance(other, nc_version) and self.value <= other.value

    def __gt__(self, other: object) -> bool:
        return isinstance(other, nc_version) and self.value > other.value

    def __ge__(self, other: object) -> bool:
        return isinstance(other, nc_version) and self.value >= other.value


class dma_engine(Enum):
    """Who moves the bytes of a sendrecv."""

    dma = 1
    gpsimd_dma = 2
