# SPDX-License-Identifier: Apache-2.0
"""Each rule the simulator enforces has a kernel here that breaks it, and the message names what a reader needs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from sparse_mla.errors import KernelError
from sparse_mla.simulator import isa as nisa
from sparse_mla.simulator import language as nl

from .kit import BF16, E4M3, launch, put, random

RULES = 54
LINTED = {50}  # the source rule has its own file of tests


@dataclass
class Case:
    """A kernel that breaks one rule."""

    check: int
    kernel: Callable[..., Any]
    words: tuple[str, ...]
    warns: bool = False
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


CASES: list[Case] = []


def breaks(check: int, *words: str, warns: bool = False, args: tuple[Any, ...] = (), **options: Any) -> Any:
    """Register a kernel that breaks `check`; `words` must occur in the message."""

    def add(kernel: Callable[..., Any]) -> Callable[..., Any]:
        CASES.append(Case(check, kernel, words, warns, args, options))
        return kernel

    return add


def tile(
    shape: tuple[int, ...], dtype: Any = nl.float32, buffer: Any = nl.sbuf, value: float | int = 0.0, **kw: Any
) -> Any:
    """A filled tile."""
    t = nl.ndarray(shape, dtype, buffer, **kw)
    nisa.memset(dst=t, value=value if dtype in (nl.float32, nl.bfloat16, nl.float16, nl.float8_e4m3) else int(value))
    return t


@breaks(1, "129", "128")
def partitions() -> None:
    nl.ndarray((129, 4), nl.float32)


@breaks(2, "dst", "partition 16", "0, 32, 64 or 96")
def start_of_few() -> None:
    t = nl.ndarray((128, 4), nl.float32)
    nisa.memset(dst=t[16:32], value=0.0)


@breaks(2, "partition 32", "0 or 64")
def start_of_half() -> None:
    t = nl.ndarray((128, 4), nl.float32)
    nisa.memset(dst=t[32:96], value=0.0)


@breaks(2, "partition 32", "may start at 0")
def start_of_most() -> None:
    t = nl.ndarray((128, 4), nl.float32)
    nisa.memset(dst=t[32:128], value=0.0)


@breaks(3, "step 2")
def partition_step() -> None:
    t = nl.ndarray((128, 4), nl.float32)
    nisa.memset(dst=t[0:64:2], value=0.0)


@breaks(4, "data2", "partition 32", "data1 at 0")
def inputs_on_different_partitions() -> None:
    t = tile((64, 4))
    nisa.tensor_tensor(dst=t[0:32], data1=t[0:32], data2=t[32:64], op=nl.add)


def matmul(
    k: int = 128,
    m: int = 128,
    n: int = 512,
    *,
    k2: int | None = None,
    dtype: Any = nl.bfloat16,
    out: Any = nl.float32,
    **kw: Any,
) -> None:
    ps = nl.ndarray((min(m, 128), n), out, nl.psum)
    nisa.nc_matmul(dst=ps, stationary=tile((k, m), dtype), moving=tile((k2 or k, n), dtype), **kw)


@breaks(5, "stationary free size 129", "128")
def wide_stationary() -> None:
    matmul(m=129)


@breaks(5, "moving free size 513", "512")
def wide_moving() -> None:
    matmul(n=513)


@breaks(5, "equal partitions")
def contraction() -> None:
    matmul(k=64, k2=32)


@breaks(6, "stationary must be in SBUF")
def matmul_from_psum() -> None:
    ps = nl.ndarray((128, 128), nl.float32, nl.psum)
    nisa.nc_matmul(dst=ps, stationary=tile((128, 128), nl.float32, nl.psum), moving=tile((128, 128)))


@breaks(6, "dst must be in PSUM")
def matmul_to_sbuf() -> None:
    nisa.nc_matmul(dst=nl.ndarray((128, 128), nl.float32), stationary=tile((128, 128)), moving=tile((128, 128)))


@breaks(7, "2048 B PSUM bank")
def across_banks() -> None:
    ps = nl.ndarray((128, 1024), nl.float32, nl.psum)
    nisa.nc_matmul(dst=ps[:, 256:768], stationary=tile((128, 128)), moving=tile((128, 512)))


@breaks(8, "must be float32")
def matmul_dtype() -> None:
    matmul(out=nl.bfloat16)


@breaks(8, "dtype of data")
def transpose_dtype() -> None:
    nisa.nc_transpose(dst=nl.ndarray((64, 128), nl.float32, nl.psum), data=tile((128, 64), nl.bfloat16))


@breaks(9, "float type")
def integer_matmul() -> None:
    matmul(dtype=nl.int32)


@breaks(9, "32-bit partner")
def mixed_width() -> None:
    ps = nl.ndarray((128, 128), nl.float32, nl.psum)
    nisa.nc_matmul(dst=ps, stationary=tile((128, 128)), moving=tile((128, 128), nl.bfloat16))


@breaks(10, "two free dims")
def stationary_dims() -> None:
    ps = nl.ndarray((64, 128), nl.float32, nl.psum)
    s = tile((128, 8, 16))[:, :, 0:8]
    nisa.nc_matmul(dst=ps, stationary=s, moving=tile((128, 128)))


@breaks(11, "must be fp8")
def double_row_dtype() -> None:
    ps = nl.ndarray((64, 128), nl.float32, nl.psum)
    nisa.nc_matmul(
        dst=ps,
        stationary=tile((128, 2, 64), nl.bfloat16),
        moving=tile((128, 2, 128), nl.bfloat16),
        perf_mode=nisa.matmul_perf_mode.double_row,
    )


@breaks(12, "must be one of [32, 64, 128]")
def tile_size() -> None:
    matmul(k=32, m=48, tile_size=(48, 128), tile_position=(0, 0))


@breaks(12, "must be one of [64, 128]", gen=2)
def tile_size_trn1() -> None:
    matmul(k=32, m=32, n=64, tile_size=(32, 32), tile_position=(0, 0))


@breaks(12, "set together")
def tile_position_alone() -> None:
    matmul(tile_position=(0, 0))


@breaks(12, "output lands at the column position")
def column_position() -> None:
    matmul(k=32, m=32, n=64, tile_size=(32, 32), tile_position=(0, 64))


@breaks(13, "explicit flags")
def mixed_flags() -> None:
    ps = nl.ndarray((128, 128), nl.float32, nl.psum)
    s, x = tile((128, 128)), tile((128, 128))
    nisa.nc_matmul(dst=ps, stationary=s, moving=x, accumulate=False)
    nisa.nc_matmul(dst=ps, stationary=s, moving=x)


@breaks(13, "no matmul with accumulate=False")
def accumulate_onto_nothing() -> None:
    matmul(accumulate=True)


@breaks(14, "another engine")
def accumulate_onto_fill() -> None:
    ps = tile((128, 128), nl.float32, nl.psum, 1.0)
    nisa.nc_matmul(dst=ps, stationary=tile((128, 128)), moving=tile((128, 128)))


@breaks(14, "zeroed by another engine", warns=True)
def accumulate_onto_zero() -> None:
    ps = tile((128, 128), nl.float32, nl.psum, 0.0)
    nisa.nc_matmul(dst=ps, stationary=tile((128, 128)), moving=tile((128, 128)))


@breaks(15, "exceeds 128 x 128")
def big_transpose() -> None:
    nisa.nc_transpose(dst=nl.ndarray((128, 128), nl.float32, nl.psum), data=tile((128, 129)))


@breaks(15, "exceeds 32 x 32")
def big_vector_transpose() -> None:
    nisa.nc_transpose(dst=nl.ndarray((64, 32), nl.float32), data=tile((32, 64)))


@breaks(16, "must be in SBUF, got PSUM")
def gpsimd_psum() -> None:
    nisa.iota(dst=nl.ndarray((128, 4), nl.int32, nl.psum), pattern=[[1, 4]])


@breaks(17, "DMA cannot reach PSUM")
def dma_psum() -> None:
    nisa.dma_copy(dst=nl.ndarray((128, 4), nl.float32), src=tile((128, 4), nl.float32, nl.psum))


@breaks(18, "both in PSUM")
def two_psum() -> None:
    t = tile((128, 4), nl.float32, nl.psum)
    nisa.tensor_tensor(dst=nl.ndarray((128, 4), nl.float32), data1=t, data2=t, op=nl.add)


@breaks(19, "9 banks", "8 banks", "largest tiles")
def psum_capacity() -> None:
    tiles = [tile((128, 512), nl.float32, nl.psum) for _ in range(9)]
    out = nl.ndarray((128, 512), nl.float32)
    for t in tiles:
        nisa.tensor_copy(dst=out, src=t)


@breaks(20, "limit 229376 B", "at once")
def sbuf_capacity() -> None:
    tiles = [tile((128, 20000)) for _ in range(3)]
    for t in tiles:
        nisa.tensor_copy(dst=t, src=t)


@breaks(20, "212984 B usable", warns=True)
def sbuf_reserve() -> None:
    tiles = [tile((128, 11000)) for _ in range(5)]
    for t in tiles:
        nisa.tensor_copy(dst=t, src=t)


@breaks(21, "start at a bank")
def psum_address() -> None:
    nl.ndarray((128, 64), nl.float32, nl.psum, address=(0, 1024))


@breaks(21, "overwritten by the tile of line", "still in use")
def overlapping_tiles() -> None:
    a = nl.ndarray((128, 64), nl.float32, address=(0, 0))
    b = nl.ndarray((128, 64), nl.float32, address=(0, 128))
    nisa.memset(dst=a, value=1.0)
    nisa.memset(dst=b, value=2.0)
    nisa.tensor_copy(dst=b, src=a)


@breaks(22, "free dims, at most 4")
def dims() -> None:
    t = nl.ndarray((4, 2, 2, 2, 2), nl.float32).expand_dim(1)
    nisa.memset(dst=t, value=0.0)


@breaks(22, "pattern has 5 dims")
def iota_dims() -> None:
    nisa.iota(dst=nl.ndarray((4, 1), nl.int32), pattern=[[1, 1]] * 5)


@breaks(23, "data2", "4 elements per partition", "8", "view")
def broadcast() -> None:
    nisa.tensor_tensor(dst=nl.ndarray((4, 8), nl.float32), data1=tile((4, 8)), data2=tile((4, 4)), op=nl.add)


@breaks(24, "operand0", "must be (4, 1)")
def row_operand() -> None:
    nisa.tensor_scalar(dst=nl.ndarray((4, 8), nl.float32), data=tile((4, 8)), op0=nl.add, operand0=tile((4, 8)))


@breaks(24, "operand0 must be float32")
def bf16_operand() -> None:
    nisa.tensor_scalar(
        dst=nl.ndarray((4, 8), nl.float32), data=tile((4, 8)), op0=nl.add, operand0=tile((4, 1), nl.bfloat16)
    )


@breaks(24, "scale must be float32")
def bf16_scale() -> None:
    nisa.activation(dst=nl.ndarray((4, 8), nl.float32), op=nl.exp, data=tile((4, 8)), scale=tile((4, 1), nl.bfloat16))


@breaks(25, "must be an integer type")
def bit_on_float() -> None:
    nisa.tensor_scalar(dst=nl.ndarray((4, 8), nl.float32), data=tile((4, 8)), op0=nl.bitwise_and, operand0=1)


@breaks(25, "one dtype")
def bit_widening() -> None:
    nisa.tensor_scalar(
        dst=nl.ndarray((4, 8), nl.int32), data=tile((4, 8), nl.uint8, value=1), op0=nl.bitwise_and, operand0=1
    )


@breaks(25, "mix bit and arithmetic")
def bit_and_arithmetic() -> None:
    t = tile((4, 8), nl.int32, value=1)
    nisa.tensor_scalar(dst=t, data=t, op0=nl.bitwise_and, operand0=1, op1=nl.add, operand1=1)


@breaks(25, "Vector engine")
def bit_on_gpsimd() -> None:
    t = tile((4, 8), nl.int32, value=1)
    nisa.tensor_tensor(dst=t, data1=t, data2=t, op=nl.bitwise_or, engine=nisa.engine.gpsimd)


@breaks(26, "right_shift as op1", warns=True)
def shift_second() -> None:
    t = tile((4, 8), nl.int32, value=1)
    nisa.tensor_scalar(dst=t, data=t, op0=nl.bitwise_and, operand0=255, op1=nl.right_shift, operand1=1)


@breaks(26, "right_shift as op1", strict=True)
def shift_second_strict() -> None:
    shift_second()


@breaks(27, "16777216", "2^24", warns=True)
def big_integers() -> None:
    t = tile((4, 8), nl.int32, value=1 << 24)
    nisa.tensor_scalar(dst=nl.ndarray((4, 8), nl.float32), data=t, op0=nl.add, operand0=1.0)


@breaks(28, "(multiply, add)")
def scalar_pairs() -> None:
    t = tile((4, 8))
    nisa.tensor_scalar(dst=t, data=t, op0=nl.subtract, operand0=1.0, engine=nisa.engine.scalar)


@breaks(28, "no tensor_copy", gen=2)
def scalar_copy_trn1() -> None:
    t = tile((4, 8))
    nisa.tensor_copy(dst=t, src=t, engine=nisa.engine.scalar)


@breaks(29, "reduce_op must be nl.add")
def activation_reduction() -> None:
    t, r = tile((4, 8)), tile((4, 1))
    nisa.activation(
        dst=t, op=nl.exp, data=t, reduce_op=nl.maximum, reduce_res=r, reduce_cmd=nisa.reduce_cmd.reset_reduce
    )


@breaks(29, "log is valid in", "lie outside", warns=True)
def activation_range() -> None:
    t = tile((4, 8), value=0.0)
    nisa.activation(dst=t, op=nl.log, data=t)


@breaks(30, "(P, 1) tensor on trn1", gen=2)
def constant_bias() -> None:
    t = tile((4, 8))
    nisa.activation(dst=t, op=nl.exp, data=t, bias=1.0)


@breaks(31, "32 elements", "16")
def dma_totals() -> None:
    nisa.dma_copy(dst=nl.ndarray((4, 8), nl.float32), src=tile((4, 4)))


@breaks(31, "hwdge cannot cast")
def hwdge_cast() -> None:
    nisa.dma_copy(dst=nl.ndarray((4, 8), nl.bfloat16), src=tile((4, 8)), dge_mode=nisa.dge_mode.hwdge)


def gather(table: Any, index: Any, *, rows: int = 8, **kw: Any) -> None:
    column = put(index)
    dst = nl.ndarray((rows, table.shape[1]), table.dtype)
    nisa.memset(dst=dst, value=0.0)
    nisa.dma_copy(dst=dst, src=table.ap([[table.shape[1], rows], [1, table.shape[1]]], vector_offset=column), **kw)


TABLE = random((16, 32))
INDEX = np.arange(8, dtype=np.int32).reshape(8, 1)


@breaks(32, "one index per row", args=(TABLE, INDEX))
def index_count(table: Any, index: Any) -> None:
    gather(table, index, rows=4)


@breaks(32, "int32 or uint32", args=(TABLE, INDEX.astype(np.int16)))
def index_dtype(table: Any, index: Any) -> None:
    gather(table, index)


@breaks(32, "rows of an HBM tensor")
def index_of_sbuf() -> None:
    t = tile((8, 32))
    t.ap([[32, 8], [1, 32]], vector_offset=tile((8, 1), nl.int32))


@breaks(32, "software DGE", args=(TABLE, INDEX))
def index_by_hwdge(table: Any, index: Any) -> None:
    gather(table, index, dge_mode=nisa.dge_mode.hwdge)


@breaks(33, "index 16", "outside 0..15", args=(TABLE, INDEX + 9))
def index_past_end(table: Any, index: Any) -> None:
    gather(table, index)


@breaks(33, "index -1", args=(TABLE, INDEX - 1))
def index_negative(table: Any, index: Any) -> None:
    gather(table, index)


@breaks(34, "sync or scalar")
def hwdge_engine() -> None:
    t = tile((4, 8))
    nisa.dma_copy(dst=nl.ndarray((4, 8), nl.float32), src=t, dge_mode=nisa.dge_mode.hwdge, engine=nisa.engine.gpsimd)


@breaks(34, "trn2 or later", gen=2)
def hwdge_trn1() -> None:
    nisa.dma_copy(dst=nl.ndarray((4, 8), nl.float32), src=tile((4, 8)), dge_mode=nisa.dge_mode.hwdge)


@breaks(35, "2-byte", args=(random((16, 64), np.float32),))
def transpose_width(x: Any) -> None:
    nisa.dma_transpose(dst=nl.ndarray((64, 16), nl.float32), src=x, dge_mode=nisa.dge_mode.hwdge)


@breaks(35, "16 rows", args=(random((32, 64), BF16),))
def transpose_rows(x: Any) -> None:
    nisa.dma_transpose(dst=nl.ndarray((64, 32), nl.bfloat16), src=x, dge_mode=nisa.dge_mode.hwdge)


@breaks(35, "must be exactly (64, 16)", args=(random((16, 64), BF16),))
def transpose_shape(x: Any) -> None:
    nisa.dma_transpose(dst=nl.ndarray((16, 64), nl.bfloat16), src=x)


@breaks(36, "byte 2", "32-byte", warns=True, args=(random((16, 64), BF16),))
def transpose_alignment(x: Any) -> None:
    t = nl.ndarray((64, 32), nl.bfloat16)
    nisa.dma_transpose(dst=t[:, 1:17], src=x)


@breaks(37, "trn3")
def priority() -> None:
    nisa.dma_copy(dst=nl.ndarray((4, 8), nl.float32), src=tile((4, 8)), priority=1)


@breaks(38, "uint16")
def local_gather_dtype() -> None:
    nisa.local_gather(
        dst=nl.ndarray((16, 16), nl.float32),
        src_buffer=tile((16, 8)),
        index=tile((16, 1), nl.uint32),
        num_elem_per_idx=1,
        num_valid_indices=16,
    )


@breaks(38, "1, 2, 4, 8, 16 or 32")
def local_gather_elements() -> None:
    nisa.local_gather(
        dst=nl.ndarray((16, 48), nl.float32),
        src_buffer=tile((16, 8)),
        index=tile((16, 1), nl.uint16),
        num_elem_per_idx=3,
        num_valid_indices=16,
    )


@breaks(39, "uint32")
def n_gather_dtype() -> None:
    nisa.nc_n_gather(dst=nl.ndarray((4, 4), nl.float32), data=tile((4, 8)), indices=tile((4, 4), nl.int32))


@breaks(39, "reach 8")
def n_gather_range() -> None:
    nisa.nc_n_gather(dst=nl.ndarray((4, 4), nl.float32), data=tile((4, 8)), indices=tile((4, 4), nl.uint32, value=8))


@breaks(40, "8 to 16384")
def max8_size() -> None:
    nisa.max8(dst=nl.ndarray((4, 8), nl.float32), src=tile((4, 7)))


@breaks(41, "multiple of 16")
def topk_partitions() -> None:
    nisa.topk(
        val_dst=nl.ndarray((8, 8), nl.bfloat16),
        idx_dst=nl.ndarray((8, 8), nl.uint32),
        src=tile((8, 8), nl.bfloat16),
        n=64,
    )


@breaks(41, "allocate all 128", warns=True)
def topk_few() -> None:
    nisa.topk(
        val_dst=nl.ndarray((16, 8), nl.bfloat16),
        idx_dst=nl.ndarray((16, 8), nl.uint32),
        src=tile((16, 8), nl.bfloat16),
        n=64,
    )


@breaks(42, "one element more")
def nonzero_width() -> None:
    nisa.nonzero_with_count(dst=nl.ndarray((16, 8), nl.int32), src=tile((16, 8)))


@breaks(43, "32 entries")
def shuffle_length() -> None:
    t = tile((32, 8))
    nisa.nc_stream_shuffle(dst=t, src=t, shuffle_mask=[0] * 31)


@breaks(43, "holds 32")
def shuffle_lane() -> None:
    t = tile((32, 8))
    nisa.nc_stream_shuffle(dst=t, src=t, shuffle_mask=[32] * 32)


@breaks(44, "fewer than 128", warns=True, grid=2)
def narrow_exchange() -> None:
    t = tile((64, 8))
    other = 1 - nl.program_id(0)
    nisa.sendrecv(src=t, dst=t, send_to_rank=other, recv_from_rank=other, pipe_id=0)


@breaks(45, "no name", "core 1's writes are lost", grid=2)
def unnamed_output() -> Any:
    out = nl.ndarray((2, 8), nl.float32, nl.shared_hbm)
    t = tile((1, 8))
    core = nl.program_id(0)
    nisa.dma_copy(dst=out[core : core + 1], src=t)
    return out


@breaks(46, "never written", "declared at line")
def uninitialised() -> None:
    t = nl.ndarray((4, 8), nl.float32)
    nisa.memset(dst=t[:, 0:7], value=0.0)
    nisa.tensor_copy(dst=nl.ndarray((4, 8), nl.float32), src=t)


@breaks(46, "never written")
def uninitialised_hbm() -> None:
    nisa.dma_copy(dst=nl.ndarray((4, 8), nl.float32), src=nl.ndarray((4, 8), nl.float32, nl.private_hbm))


@breaks(47, "must be in shared_hbm")
def private_output() -> Any:
    out = nl.ndarray((4, 8), nl.float32, nl.private_hbm)
    nisa.dma_copy(dst=out, src=tile((4, 8)))
    return out


@breaks(47, "never written", warns=True)
def half_output() -> Any:
    out = nl.ndarray((4, 8), nl.float32, nl.shared_hbm)
    nisa.dma_copy(dst=out[0:2], src=tile((2, 8)))
    return out


@breaks(48, "needs trn3")
def ocp_fp8() -> None:
    nl.ndarray((4, 8), nl.float8_e4m3fn)


@breaks(48, "trn3")
def tensor_indirection() -> None:
    tile((16, 8)).indirect(tile((16, 1), nl.uint16))


@breaks(49, "is a float but dst", "integers")
def float_fill() -> None:
    nisa.memset(dst=nl.ndarray((4, 8), nl.int32), value=1.0)


@breaks(49, "is an int but dst", "floats")
def integer_fill() -> None:
    nisa.memset(dst=nl.ndarray((4, 8), nl.bfloat16), value=1)


@breaks(51, "same run-time loop body", warns=True)
def loop_hazard() -> None:
    a = nl.ndarray((128, 64), nl.float32, address=(0, 0))
    b = nl.ndarray((128, 64), nl.float32, address=(0, 0))
    out = nl.ndarray((128, 64), nl.float32)

    def body(i: Any) -> None:
        nisa.memset(dst=a, value=1.0)
        nisa.tensor_copy(dst=out, src=a)
        nisa.memset(dst=b, value=2.0)

    nl.fori_loop(0, 2, body)


@breaks(52, "bound by 128 descriptors", warns=True)
def small_descriptors() -> None:
    nisa.dma_copy(dst=nl.ndarray((128, 4), nl.float32), src=tile((128, 4)))


@breaks(52, "one descriptor per element", warns=True, args=(random((64, 128)),))
def element_descriptors(x: Any) -> None:
    nisa.dma_copy(dst=nl.ndarray((128, 64), nl.float32), src=x.permute((1, 0)))


@breaks(53, "16384", warns=True)
def long_activation_reduce() -> None:
    t, r = tile((4, 16385)), tile((4, 1))
    nisa.activation_reduce(dst=t, op=nl.exp, data=t, reduce_op=nl.add, reduce_res=r)


@breaks(54, "subnormal", warns=True)
def subnormal() -> None:
    t = tile((4, 8), value=-100.0)
    nisa.activation(dst=t, op=nl.exp, data=t)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.check:02d}-{case.kernel.__name__}")
def test_rule(case: Case) -> None:
    if case.warns:
        result = launch(case.kernel, *case.args, **case.options)
        texts = [w.message for w in result.warnings if w.check == case.check]
        assert texts, f"no warning of rule {case.check}, got {result.warnings}"
        assert any(all(word in text for word in case.words) for text in texts), texts
        return
    with pytest.raises(KernelError) as caught:
        launch(case.kernel, *case.args, **case.options)
    text = str(caught.value)
    assert caught.value.check == case.check, text  # type: ignore[attr-defined]
    for word in case.words:
        assert word in text, text
    gen = case.options.get("gen", 3)
    assert f"(trn{gen - 1})" in text, text
    if case.check not in (19, 20, 45, 47):  # those are judged after the run and name lines inside the sentence
        assert re.search(r"test_checks\.py:\d+$", text), text


def test_every_rule_is_broken_here() -> None:
    assert {case.check for case in CASES} | LINTED == set(range(1, RULES + 1))


def test_checks_can_be_turned_off() -> None:
    result = launch(uninitialised, checks=False)
    assert result.warnings == []


def test_compat_relaxes_what_the_vendor_simulator_accepts() -> None:
    for kernel in (uninitialised, overlapping_tiles):
        launch(kernel, aws_compat=True)
    out = launch(unnamed_output, grid=2, aws_compat=True)
    assert (np.asarray(out.value) == 0).all()


def test_a_warning_is_shown_once() -> None:
    from sparse_mla import simulator

    with pytest.warns(simulator.SimulatorWarning, match="right_shift as op1") as seen:
        simulator.run(shift_second, params=simulator.SimulatorParams(gen=3))
    assert len(seen) == 1


def test_the_line_of_the_message_is_the_kernel_line() -> None:
    def kernel() -> None:
        t = nl.ndarray((4, 8), nl.float32)
        nisa.memset(
            dst=t,
            value="zero",
        )

    with pytest.raises(KernelError) as caught:
        launch(kernel)
    first = kernel.__code__.co_firstlineno
    assert str(caught.value).endswith(f":{first + 2}")


_ = E4M3
