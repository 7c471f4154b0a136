# SPDX-License-Identifier: Apache-2.0
"""The time model: cost of single instructions, and schedules small enough to work out by hand (trn2 unless named)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from sparse_mla.errors import ArgumentError
from sparse_mla.simulator import GEN3, GEN4
from sparse_mla.simulator.core import Operand, Record
from sparse_mla.simulator.costs import by_generation, cycles, dma_issue_us, dma_work_us
from sparse_mla.simulator.timing import Estimate, _overlap, _Pool, estimate

from .kit import BF16, E4M3, get, launch, nisa, nl, put, random

NS = 1e-3
ISSUE, START, RECEIPT, RESULT = 0.6, 1.3, 0.7, 0.06
DESCRIPTOR, RATE, ENGINES = 0.028, 27_200.0, 16


def transfer(descriptors: int, size: int) -> float:
    """Microseconds of a transfer alone: waves of 16 engines."""
    return -(-descriptors // ENGINES) * (DESCRIPTOR + size / RATE)


def operand(ident: int = 1, memory: str = "sbuf", dtype: str = "float32", n: int = 512, **facts: Any) -> Operand:
    o = Operand()
    size = {"float32": 4, "bfloat16": 2, "int32": 4, "uint8": 1, "float8_e4m3": 1}[dtype]
    values = {
        "ident": ident, "memory": memory, "address": None, "p0": 0, "p1": 128, "b0": 0, "b1": n * size,
        "partitions": 128, "elements": n, "itemsize": size, "dtype": dtype, "contiguous": True, "run_bytes": n * size,
        "stride0": False, "step": size, "span": size, "name": "",
    }  # fmt: skip
    for name, value in (values | facts).items():
        setattr(o, name, value)
    return o


def record(engine: str, opcode: str, n: int, writes: list[Operand], reads: list[Operand], /, **detail: Any) -> Record:
    code = record.__code__
    return Record(0, 0, engine, opcode, code, 0, tuple(writes), tuple(reads), 128, n, detail)


def plain(engine: str, opcode: str, n: int, dtype: str = "float32", psum: bool = False, **detail: Any) -> Record:
    source = operand(2, "psum" if psum else "sbuf", dtype, n)
    return record(engine, opcode, n, [operand(1, "sbuf", dtype, n)], [source], **detail)


def pair(n: int, dtype: str, op: str, first: str = "sbuf", **facts: Any) -> Record:
    reads = [operand(2, first, dtype, n, **facts), operand(3, "sbuf", dtype, n)]
    return record("vector", "tensor_tensor", n, [operand(1, "sbuf", dtype, n)], reads, op=op)


MATMUL = {"k": 128, "m": 128, "n": 512, "fp32": False, "double_row": False, "transpose": False, "accumulate": False}
COSTS = [
    ("matmul_bf16", record("tensor", "nc_matmul", 512, [], [], **MATMUL), 512),
    ("matmul_narrow", record("tensor", "nc_matmul", 8, [], [], **(MATMUL | {"n": 8})), 64),
    ("matmul_narrow_few_columns", record("tensor", "nc_matmul", 8, [], [], **(MATMUL | {"n": 8, "m": 16})), 16),
    ("matmul_fp32", record("tensor", "nc_matmul", 512, [], [], **(MATMUL | {"fp32": True})), 2048),
    (
        "matmul_fp32_transpose",
        record("tensor", "nc_matmul", 128, [], [], **(MATMUL | {"fp32": True, "n": 128, "transpose": True})),
        256,
    ),
    ("transpose", record("tensor", "nc_transpose", 128, [], [], k=128, m=128, fp32=False, two_byte=True), 128),
    ("transpose_fp32", record("tensor", "nc_transpose", 128, [], [], k=128, m=128, fp32=True, two_byte=False), 256),
    ("transpose_vector", record("vector", "nc_transpose", 32, [], [], k=32, m=32, fp32=False, two_byte=True), 64),
    ("copy_fp32", plain("vector", "tensor_copy", 512), 512),
    ("copy_bf16", plain("vector", "tensor_copy", 512, "bfloat16"), 128),
    ("copy_bf16_from_psum", plain("vector", "tensor_copy", 512, "bfloat16", psum=True), 256),
    ("copy_bf16_small", plain("vector", "tensor_copy", 64, "bfloat16"), 64),
    ("copy_uint8", plain("vector", "tensor_copy", 512, "uint8"), 512),
    ("copy_bf16_scalar_engine", plain("scalar", "tensor_copy", 512, "bfloat16"), 512),
    ("tensor_scalar_bf16", plain("vector", "tensor_scalar", 1024, "bfloat16", op="multiply", op1=None), 256),
    ("tensor_tensor_fp32", pair(512, "float32", "add"), 1024),
    ("tensor_tensor_psum", pair(512, "float32", "add", first="psum"), 512),
    ("tensor_tensor_bf16", pair(512, "bfloat16", "add"), 512),
    ("tensor_tensor_bf16_max", pair(512, "bfloat16", "maximum"), 1024),
    ("tensor_tensor_bf16_strided", pair(512, "bfloat16", "add", contiguous=False), 1024),
    ("tensor_tensor_bf16_broadcast", pair(512, "bfloat16", "multiply", stride0=True), 1024),
    ("reduce_fp32", plain("vector", "tensor_reduce", 512, op="add"), 512),
    ("reduce_bf16", plain("vector", "tensor_reduce", 512, "bfloat16", op="maximum"), 256),
    ("activation", plain("scalar", "activation", 512, op="exp", reads_register=False), 512),
    ("activation_reads_register", plain("scalar", "activation", 512, op="exp", reads_register=True), 576),
    ("activation_reduce", plain("scalar", "activation_reduce", 512, op="exp", reads_register=False), 576),
    ("reciprocal", plain("vector", "reciprocal", 16), 128),
    ("tensor_scalar_reduce", plain("vector", "tensor_scalar_reduce", 512), 576),
    ("scan", plain("vector", "tensor_tensor_scan", 512), 1024),
    ("iota", plain("gpsimd", "iota", 512, "int32"), 662),
    ("max8", plain("vector", "max8", 640), 640),
    ("topk", record("gpsimd", "topk", 1, [], [], n=4096, k=512), 16896),
    ("dynamic", plain("vector", "tensor_copy", 64, dynamic=True), 600),
    ("memset_zero_bf16", record("vector", "memset", 512, [operand(1, dtype="bfloat16")], [], zero=True), 256),
    (
        "local_gather",
        record("gpsimd", "local_gather", 64, [], [operand(1, dtype="bfloat16")], indices=1024, num_elem_per_idx=1),
        150 + 1024 / 8,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("made", "expected"), [c[1:] for c in COSTS], ids=[c[0] for c in COSTS])
def test_cycles(made: Record, expected: float) -> None:
    assert cycles(made, 3) == pytest.approx(expected)


def test_cycles_of_trn1_have_no_fast_modes() -> None:
    assert cycles(plain("vector", "tensor_copy", 512, "bfloat16"), 2) == 512


@pytest.mark.parametrize(
    ("size", "tile_us"), [(2, 0.22), (256, 0.30), (288, 0.31), (528, 0.38), (1024, 0.53), (2048, 0.83), (4096, 1.43)]
)
def test_transfers_follow_the_documented_points(size: int, tile_us: float) -> None:
    r = record("dma", "dma_copy", 1, [], [], bytes=128 * size, descriptors=128, descriptor_bytes=size)
    alone, share = dma_work_us(r, by_generation(3))
    assert alone == pytest.approx(tile_us, abs=0.006)
    assert share == pytest.approx(alone)


def test_few_descriptors_use_few_engines() -> None:
    r = record("dma", "dma_copy", 1, [operand()], [], bytes=4096, descriptors=1, descriptor_bytes=4096)
    alone, share = dma_work_us(r, by_generation(3))
    assert alone == pytest.approx(DESCRIPTOR + 4096 / RATE)
    assert share == pytest.approx(alone / ENGINES)


def test_long_runs_inside_hbm_are_cut_over_the_engines() -> None:
    places = [operand(1, "hbm")], [operand(2, "hbm")]
    r = record("dma", "dma_copy", 1, *places, bytes=1 << 20, descriptors=1, descriptor_bytes=1 << 20)
    assert dma_work_us(r, by_generation(3))[0] == pytest.approx(DESCRIPTOR + (1 << 16) / RATE)


@pytest.mark.parametrize(
    ("gen", "detail", "expected"),
    [
        (3, {"dge": "unknown"}, ("sync", 0.6)),
        (3, {"dge": "unknown", "hbm_written": 4}, ("sync-store", 0.6)),
        (3, {"dge": "unknown", "cast": True}, ("sync", 0.06)),
        (3, {"dge": "none"}, ("sync", 0.06)),
        (3, {"dge": "hwdge", "queue": "scalar"}, ("scalar", 0.6)),
        (3, {"dge": "swdge", "indirect": True, "rows": 128}, ("gpsimd", 1.2)),
        (2, {"dge": "unknown"}, ("sync", 0.06)),
    ],
)
def test_who_issues_a_transfer(gen: int, detail: dict[str, Any], expected: tuple[str, float]) -> None:
    found = dma_issue_us(record("dma", "dma_copy", 1, [], [], **detail), by_generation(gen), gen)
    assert found[0] == expected[0]
    assert found[1] == pytest.approx(expected[1])


# -- schedules ---------------------------------------------------------------------------------------------------------


def timed(kernel: Any, *args: Any, **options: Any) -> Estimate:
    return launch(kernel, *args, **options).estimate


def bars(e: Estimate, opcode: str) -> list[tuple[float, float]]:
    return [(x.start_us, x.end_us) for x in e.events if x.opcode == opcode]


def test_a_load_a_sum_and_a_store_follow_each_other() -> None:
    def kernel(a: Any) -> Any:
        x = put(a)
        nisa.tensor_tensor(dst=x, data1=x, data2=x, op=nl.add)
        return get(x)

    e = timed(kernel, np.ones((128, 512), np.float32))
    move = transfer(128, 2048)
    loaded = ISSUE + START + move + RECEIPT
    summed = loaded + 1024 / 960
    assert bars(e, "tensor_tensor") == [pytest.approx((loaded, summed))]
    assert e.total_us == pytest.approx(summed + RESULT + ISSUE + START + move + RECEIPT)
    assert [s.opcode for s in e.critical_path] == ["dma_copy", "tensor_tensor", "dma_copy"]
    assert [s.waited_for for s in e.critical_path] == ["engine", "data", "data"]
    assert (e.hbm_read_bytes, e.hbm_written_bytes, e.descriptors) == (1 << 18, 1 << 18, 256)
    assert e.busy_us[0]["vector"] == pytest.approx(1024 / 960)
    assert e.busy_us[0]["dma"] == pytest.approx(2 * move)
    assert e.bound_by == "latency"
    assert e.target == "trn2"


def test_loads_overlap_and_share_the_engines() -> None:
    def kernel(a: Any) -> Any:
        x = nl.ndarray((128, 512), nl.float32, nl.sbuf)
        y = nl.ndarray((128, 512), nl.float32, nl.sbuf)
        nisa.dma_copy(dst=x, src=a[0])
        nisa.dma_copy(dst=y, src=a[1])
        return get(x)

    move = transfer(128, 2048)
    first, second, _ = bars(timed(kernel, np.ones((2, 128, 512), np.float32)), "dma_copy")
    assert first == pytest.approx((ISSUE + START, ISSUE + START + move))
    # issued at 0.6, could start at 2.5, but the pool is taken until the first has moved
    assert second == pytest.approx((first[1], first[1] + move))


def test_a_store_that_waits_does_not_hold_up_a_later_load() -> None:
    def kernel(a: Any) -> Any:
        out = nl.ndarray((128, 512), nl.float32, nl.shared_hbm, name="out")
        x = put(a[0])
        for _ in range(8):
            nisa.reciprocal(dst=x, data=x)
        nisa.dma_copy(dst=out, src=x)
        y = nl.ndarray((128, 512), nl.float32, nl.sbuf)
        nisa.dma_copy(dst=y, src=a[1])
        return out

    load, store, later = bars(timed(kernel, np.ones((2, 128, 512), np.float32)), "dma_copy")
    assert store[0] > 30.0
    assert later[0] == pytest.approx(max(load[1], 2 * ISSUE + START))


def test_stores_to_neighbouring_columns_do_not_wait_for_each_other() -> None:
    def kernel(a: Any) -> Any:
        out = nl.ndarray((128, 1024), nl.float32, nl.shared_hbm, name="out")
        x = put(a)
        nisa.dma_copy(dst=out[:, 0:512], src=x)
        nisa.dma_copy(dst=out[:, 512:1024], src=x)
        return out

    _, first, second = bars(timed(kernel, np.ones((128, 512), np.float32)), "dma_copy")
    assert second[0] == pytest.approx(first[1])


def test_a_store_waits_for_an_earlier_store_to_the_same_place() -> None:
    def kernel(a: Any) -> Any:
        out = nl.ndarray((128, 512), nl.float32, nl.shared_hbm, name="out")
        x = put(a)
        nisa.dma_copy(dst=out, src=x)
        nisa.dma_copy(dst=out, src=x)
        return out

    _, first, second = bars(timed(kernel, np.ones((128, 512), np.float32)), "dma_copy")
    assert second[0] == pytest.approx(first[1] + RECEIPT + ISSUE + START)


def test_a_chain_of_matmuls_runs_back_to_back() -> None:
    def kernel(a: Any, b: Any) -> Any:
        x, y = put(a), put(b)
        sums = nl.ndarray((128, 512), nl.float32, nl.psum)
        for _ in range(4):
            nisa.nc_matmul(dst=sums, stationary=x, moving=y)
        return get(sums)

    e = timed(kernel, random((128, 128), BF16), random((128, 512), BF16))
    spans = bars(e, "nc_matmul")
    for (_, end), (start, _) in pairwise(spans):
        assert start == pytest.approx(end)  # the next stationary loads while 512 columns stream
    assert e.busy_us[0]["tensor"] == pytest.approx(4 * 512 / 2400)
    assert bars(e, "tensor_copy")[0][0] == pytest.approx(spans[-1][1] + RESULT)


def test_short_matmuls_wait_for_the_stationary_load() -> None:
    def kernel(a: Any, b: Any) -> Any:
        x, y = put(a), put(b)
        sums = nl.ndarray((128, 64), nl.float32, nl.psum)
        for _ in range(3):
            nisa.nc_matmul(dst=sums, stationary=x, moving=y)
        return get(sums)

    spans = bars(timed(kernel, random((128, 128), BF16), random((128, 64), BF16)), "nc_matmul")
    assert spans[1][0] - spans[0][0] == pytest.approx((64 + 128 - 64) / 2400)


def test_matmuls_on_disjoint_tiles_run_together() -> None:
    def kernel(a: Any, b: Any, tiled: bool) -> Any:
        x, y = put(a), put(b)
        sums = nl.ndarray((128, 512), nl.float32, nl.psum)
        for i in range(4):
            c = 32 * i
            if tiled:
                nisa.nc_matmul(
                    dst=sums[c : c + 32], stationary=x[:, c : c + 32], moving=y, tile_position=(0, c),
                    tile_size=(128, 32),
                )  # fmt: skip
            else:
                nisa.nc_matmul(dst=sums[c : c + 32], stationary=x[:, c : c + 32], moving=y)
        return get(sums)

    a, b = random((128, 128), BF16), random((128, 512), BF16)
    apart, together = timed(kernel, a, b, False), timed(kernel, a, b, True)
    first, last = bars(together, "nc_matmul")[0], bars(together, "nc_matmul")[-1]
    assert last[0] - first[0] == pytest.approx(3 * 64 / 2400)
    assert together.busy_us[0]["tensor"] == pytest.approx(512 / 2400)  # four quarters
    assert bars(apart, "nc_matmul")[-1][1] - bars(apart, "nc_matmul")[0][0] == pytest.approx(4 * 512 / 2400)


def test_the_ninth_bank_waits_for_the_first() -> None:
    def kernel(a: Any, b: Any, banks: int) -> Any:
        x, y = put(a), put(b)
        out = nl.ndarray((128, 512), nl.float32, nl.sbuf)
        for i in range(banks):
            sums = nl.ndarray((128, 512), nl.float32, nl.psum)
            nisa.nc_matmul(dst=sums, stationary=x, moving=y)
            nisa.reciprocal(dst=out, data=sums)  # slower than the matmuls
            if i == banks - 1:
                return get(out)
        return None

    e = timed(kernel, random((128, 128), BF16), random((128, 512), BF16), 9)
    matmuls, readers = bars(e, "nc_matmul"), bars(e, "reciprocal")
    assert matmuls[7][0] == pytest.approx(matmuls[6][1])  # eight banks: no waiting
    assert matmuls[8][0] == pytest.approx(readers[0][1])  # reused once its reader is done


def test_one_engine_at_a_time_reads_a_bank() -> None:
    def kernel(a: Any, b: Any) -> Any:
        sums = nl.ndarray((128, 512), nl.float32, nl.psum)
        nisa.nc_matmul(dst=sums, stationary=put(a), moving=put(b))
        x = nl.ndarray((128, 512), nl.float32, nl.sbuf)
        y = nl.ndarray((128, 512), nl.float32, nl.sbuf)
        nisa.tensor_copy(dst=x, src=sums, engine=nisa.engine.vector)
        nisa.tensor_copy(dst=y, src=sums, engine=nisa.engine.scalar)
        nisa.tensor_tensor(dst=x, data1=x, data2=y, op=nl.add)
        return get(x)

    first, second = bars(timed(kernel, random((128, 128), BF16), random((128, 512), BF16)), "tensor_copy")
    assert second[0] == pytest.approx(first[1])


def test_writing_waits_for_readers() -> None:
    def kernel(a: Any) -> Any:
        x = put(a)
        y = nl.ndarray((128, 512), nl.float32, nl.sbuf)
        nisa.activation(dst=y, op=nl.exp, data=x)
        nisa.memset(dst=x, value=0.0, engine=nisa.engine.vector)
        nisa.tensor_tensor(dst=y, data1=x, data2=y, op=nl.add)
        return get(y)

    e = timed(kernel, np.ones((128, 512), np.float32))
    assert bars(e, "memset")[0][0] == pytest.approx(bars(e, "activation")[0][1])


def test_gathers_occupy_gpsimd() -> None:
    def kernel(table: Any, index: Any) -> Any:
        at = put(index)
        rows = nl.ndarray((128, 512), table.dtype, nl.sbuf)
        for _ in range(2):
            nisa.dma_copy(dst=rows, src=table.ap([[512, 128], [1, 512]], vector_offset=at, indirect_dim=0))
        return get(rows)

    e = timed(kernel, random((256, 512), BF16), np.arange(128, dtype=np.int32).reshape(128, 1))
    assert e.busy_us[0]["gpsimd"] == pytest.approx(2 * 1.2)
    issues = [x for x in e.events if x.row == "gpsimd"]
    assert issues[0].end_us - issues[0].start_us == pytest.approx(1.2)


def test_barriers_make_both_cores_wait_for_the_slower() -> None:
    def kernel(a: Any) -> Any:
        out = nl.ndarray((2, 128, 512), nl.float32, nl.shared_hbm, name="out")
        core = nl.program_id(0)
        x = put(a)
        if core == 1:
            for _ in range(4):
                nisa.reciprocal(dst=x, data=x)
        nisa.dma_copy(dst=out[core], src=x)
        nisa.core_barrier(data=out, cores=(0, 1))
        return out

    e = timed(kernel, np.ones((128, 512), np.float32), grid=2)
    barriers = [x for x in e.events if x.opcode == "core_barrier"]
    assert sorted(b.core for b in barriers) == [0, 1]
    assert barriers[0].start_us == pytest.approx(barriers[1].start_us)
    stored = max(x.end_us for x in e.events if x.opcode == "dma_copy" and x.core == 1) + RECEIPT
    assert barriers[0].start_us == pytest.approx(stored)
    assert e.total_us == pytest.approx(stored + 2.0)
    assert len(e.busy_us) == 2


def test_generations_differ() -> None:
    def kernel(a: Any) -> Any:
        return get(put(a))

    array = np.ones((128, 2048), np.float32)
    trn1, trn2, trn3 = (timed(kernel, array, gen=g) for g in (2, 3, 4))
    assert trn3.total_us < trn2.total_us
    assert trn1.target == "trn1"
    assert trn1.busy_us[0]["dma"] > trn2.busy_us[0]["dma"]
    assert trn3.target == GEN4.name


def test_fp8_double_rows_halve_the_tensor_time() -> None:
    def kernel(a: Any, b: Any, double: bool) -> Any:
        x, y = put(a), put(b)
        sums = nl.ndarray((128, 512), nl.float32, nl.psum)
        if double:
            nisa.nc_matmul(dst=sums, stationary=x, moving=y, perf_mode=nisa.matmul_perf_mode.double_row)
        else:
            for i in range(2):
                nisa.nc_matmul(dst=sums, stationary=x[:, i], moving=y[:, i])
        return get(sums)

    a, b = random((128, 2, 128), E4M3), random((128, 2, 512), E4M3)
    assert timed(kernel, a, b, True).busy_us[0]["tensor"] == pytest.approx(512 / 2400)
    assert timed(kernel, a, b, False).busy_us[0]["tensor"] == pytest.approx(2 * 512 / 2400)


def test_total_lies_between_the_bounds() -> None:
    def kernel(a: Any, b: Any) -> Any:
        x, y = put(a), put(b)
        sums = nl.ndarray((128, 512), nl.float32, nl.psum)
        nisa.nc_matmul(dst=sums, stationary=x, moving=y)
        return get(sums)

    e = timed(kernel, random((128, 128), BF16), random((128, 512), BF16))
    serial = sum(s for core in e.busy_us for s in core.values()) + e.instructions * (START + RECEIPT + RESULT)
    assert e.lower_bound_us <= e.total_us <= serial
    assert e.boundary_us == 30.0
    steps = e.critical_path
    assert all(a.start_us <= b.start_us for a, b in pairwise(steps))


def test_no_instructions_take_no_time() -> None:
    e = estimate([], GEN3, 1)
    assert e.total_us == 0.0
    assert e.critical_path == []
    assert e.utilisation[0]["vector"] == 0.0


def test_an_estimate_needs_records() -> None:
    result = launch(lambda a: get(put(a)), np.ones((128, 8), np.float32), timing=False)
    with pytest.raises(ArgumentError, match="timing=True"):
        _ = result.estimate


def test_an_estimate_is_made_once() -> None:
    result = launch(lambda a: get(put(a)), np.ones((128, 8), np.float32))
    assert result.estimate is result.estimate


# -- parts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ({"b0": 0, "b1": 16, "step": 4, "span": 4}, {"b0": 16, "b1": 32, "step": 4, "span": 4}, False),
        ({"b0": 0, "b1": 17, "step": 4, "span": 4}, {"b0": 16, "b1": 32, "step": 4, "span": 4}, True),
        ({"b0": 0, "b1": 56, "step": 16, "span": 8}, {"b0": 8, "b1": 64, "step": 16, "span": 8}, False),
        ({"b0": 0, "b1": 56, "step": 16, "span": 8}, {"b0": 4, "b1": 60, "step": 16, "span": 8}, True),
        ({"b0": 0, "b1": 56, "step": 16, "span": 8}, {"b0": 8, "b1": 16, "step": 4, "span": 4}, True),
        ({"b0": 0, "b1": 64, "p0": 0, "p1": 32}, {"b0": 0, "b1": 64, "p0": 32, "p1": 64}, False),
    ],
)
def test_overlap(a: dict[str, int], b: dict[str, int], expected: bool) -> None:
    assert _overlap(operand(**a), operand(**b)) is expected
    assert _overlap(operand(**b), operand(**a)) is expected


def test_overlap_never_misses_shared_bytes() -> None:
    g = np.random.default_rng(5)

    def draw() -> tuple[Operand, set[int]]:
        step = int(g.integers(2, 12))
        span = int(g.integers(1, step + 1))
        count, first = int(g.integers(1, 6)), int(g.integers(0, 20))
        touched = {first + k * step + i for k in range(count) for i in range(span)}
        return operand(b0=first, b1=first + (count - 1) * step + span, step=step, span=span), touched

    for _ in range(3000):
        (a, x), (b, y) = draw(), draw()
        if x & y:
            assert _overlap(a, b)


def test_the_pool_hands_out_every_idle_moment_once() -> None:
    g = np.random.default_rng(3)
    pool, taken = _Pool(), 0.0
    slots = np.zeros(4000, bool)  # the same pool, one slot at a time
    for _ in range(300):
        when, share = int(g.integers(0, 2000)), int(g.integers(1, 9))
        begin, end = pool.take(float(when), float(share))
        free = np.flatnonzero(~slots[when:])[:share] + when
        slots[free] = True
        taken += share
        assert begin == pytest.approx(free[0])
        assert end == pytest.approx(free[-1] + 1)
    assert slots.sum() == taken
    assert sum(e - s for s, e in zip(pool.starts, pool.ends, strict=True)) == pytest.approx(taken)
    assert pool.starts == sorted(pool.starts)
    assert all(e < s for e, s in zip(pool.ends, pool.starts[1:], strict=False))
