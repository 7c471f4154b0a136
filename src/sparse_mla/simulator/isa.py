# SPDX-License-Identifier: Apache-2.0
"""`nki.isa` (nisa): every instruction under its documented name, and the enumerations that go with them."""

from __future__ import annotations

from typing import Any

from ..errors import KernelError
from . import constants
from . import target as _target
from .constants import dge_mode, dma_engine, engine, matmul_perf_mode, nc_version, oob_mode, reduce_cmd
from .core import not_simulated, running
from .dma import dma_compute, dma_copy, dma_transpose
from .gpsimd_engine import (
    affine_select,
    iota,
    local_gather,
    nc_n_gather,
    nonzero_with_count,
    rand2,
    rand_get_state,
    rand_set_state,
    rng,
    sequence_bounds,
    set_rng_seed,
    tensor_partition_reduce,
    topk,
)
from .scalar_engine import activation, activation_reduce
from .sync import core_barrier, register_alloc, register_load, register_move, register_store, sendrecv
from .tensor import VirtualRegister
from .tensor_engine import nc_matmul, nc_transpose
from .vector_engine import (
    bn_aggr,
    bn_stats,
    dropout,
    max8,
    memset,
    nc_find_index8,
    nc_match_replace8,
    nc_stream_shuffle,
    range_select,
    reciprocal,
    scalar_tensor_tensor,
    select_reduce,
    tensor_copy,
    tensor_copy_predicated,
    tensor_reduce,
    tensor_scalar,
    tensor_scalar_cumulative,
    tensor_scalar_reduce,
    tensor_tensor,
    tensor_tensor_scan,
)

NkiValidationError = KernelError

_NEED_TRN3 = "an instruction of trn3"


def activate2(
    dst: Any, op: Any, data: Any, imm0: Any, imm1: Any, op0: Any, op1: Any, relu_param: Any = 0.0, reverse0: bool =
    False, reverse1: bool = False, reduce_op: Any = None, reduce_res: Any = None, reduce_cmd: Any = reduce_cmd.idle,
    name: Any = None,
) -> None:  # fmt: skip
    """(data op0 imm0) op1 imm1, activated."""
    not_simulated("nisa.activate2", _NEED_TRN3)


def exponential(
    dst: Any, src: Any, max_value: Any = 0.0, reduce_res: Any = None, reduce_cmd: Any = reduce_cmd.idle, reduce_init:
    Any = 0.0, name: Any = None,
) -> None:  # fmt: skip
    """exp(src - max_value) on the Vector engine."""
    not_simulated("nisa.exponential", _NEED_TRN3)


def nc_matmul_mx(
    dst: Any, stationary: Any, moving: Any, stationary_scale: Any, moving_scale: Any, tile_position: Any = None,
    tile_size: Any = None, accumulate: Any = None, name: Any = None,
) -> None:  # fmt: skip
    """Matmul of MX-quantised operands."""
    not_simulated("nisa.nc_matmul_mx", _NEED_TRN3)


def quantize_mx(dst: Any, src: Any, dst_scale: Any, name: Any = None) -> None:
    """Quantise to MX."""
    not_simulated("nisa.quantize_mx", _NEED_TRN3)


def get_nc_version() -> nc_version:
    """The generation kernels are compiled for."""
    machine = running()
    return nc_version((machine.target if machine is not None else _target.from_environment()).gen)


def get_nc_sub_version() -> int:
    """Revision within the generation; always 0 here."""
    return 0


_OLD_ENGINES = {f"{e.name}_engine": e for e in engine}


def __getattr__(name: str) -> Any:
    found = _OLD_ENGINES.get(name)
    if found is not None:
        machine = running()
        if machine is not None:
            machine.note(0, f"nisa.{name} is now nisa.engine.{found.name}")
        return found
    if name in ("tensor_copy_dynamic_src", "tensor_copy_dynamic_dst"):
        not_simulated(f"nisa.{name}", "removed in 0.4; use a scalar_offset view")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "VirtualRegister",
    "activate2",
    "activation",
    "activation_reduce",
    "affine_select",
    "bn_aggr",
    "bn_stats",
    "constants",
    "core_barrier",
    "dge_mode",
    "dma_compute",
    "dma_copy",
    "dma_engine",
    "dma_transpose",
    "dropout",
    "engine",
    "exponential",
    "get_nc_sub_version",
    "get_nc_version",
    "iota",
    "local_gather",
    "matmul_perf_mode",
    "max8",
    "memset",
    "nc_find_index8",
    "nc_match_replace8",
    "nc_matmul",
    "nc_matmul_mx",
    "nc_n_gather",
    "nc_stream_shuffle",
    "nc_transpose",
    "nc_version",
    "nonzero_with_count",
    "oob_mode",
    "quantize_mx",
    "rand2",
    "rand_get_state",
    "rand_set_state",
    "range_select",
    "reciprocal",
    "reduce_cmd",
    "register_alloc",
    "register_load",
    "register_move",
    "register_store",
    "rng",
    "scalar_tensor_tensor",
    "select_reduce",
    "sendrecv",
    "sequence_bounds",
    "set_rng_seed",
    "tensor_copy",
    "tensor_copy_predicated",
    "tensor_partition_reduce",
    "tensor_reduce",
    "tensor_scalar",
    "tensor_scalar_cumulative",
    "tensor_scalar_reduce",
    "tensor_tensor",
    "tensor_tensor_scan",
    "topk",
]  # fmt: skip
