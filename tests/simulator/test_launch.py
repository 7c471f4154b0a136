# SPDX-License-Identifier: Apache-2.0
"""Launches: arguments in, results out, two cores, run-time loops, registers, budget, capacity, determinism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch

from sparse_mla import config, simulator
from sparse_mla.errors import ArgumentError, DTypeError, KernelError, NotSimulatedError
from sparse_mla.simulator import isa as nisa
from sparse_mla.simulator import language as nl

from .kit import BF16, checks_of, get, launch, put, random


@simulator.jit
def double(x: Any, factor: float = 2.0) -> Any:
    out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
    t = nl.load(x)
    nisa.tensor_scalar(dst=t, data=t, op0=nl.multiply, operand0=factor)
    nisa.dma_copy(dst=out, src=t)
    return out


# -- arguments and results ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16, np.int32, np.uint8, ml_dtypes.float8_e5m2])
def test_numpy_in_numpy_out(dtype: Any) -> None:
    x = (np.arange(64).reshape(8, 8) % 16).astype(dtype)
    for call in (double, simulator.simulate(double), simulator.simulate(double)[1], double[1]):
        out = call(x)
        assert out.dtype == x.dtype
        assert (out.astype(np.float32) == 2 * x.astype(np.float32)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.float8_e5m2])
def test_torch_in_torch_out(dtype: Any) -> None:
    x = torch.arange(64).reshape(8, 8).remainder(16).to(dtype)
    out = double(x, factor=2.0)
    assert out.dtype == dtype
    assert torch.equal(out.float(), x.float() * 2)


def test_shapes_of_results() -> None:
    def pair(x: Any) -> Any:
        return get(put(x)), get(put(x))

    x = random((4, 4))
    assert isinstance(launch(pair, x).value, tuple)
    assert launch(lambda x: None, x).value is None
    assert launch(lambda x: None, x).outputs == ()
    assert len(launch(pair, x).outputs) == 2


def test_inputs_are_shared_not_copied_and_only_written_by_the_kernel() -> None:
    def write(x: Any) -> Any:
        t = nl.ndarray((2, 8), nl.float32)
        nisa.memset(dst=t, value=7.0)
        nisa.dma_copy(dst=x[2:4], src=t)
        return x

    whole = np.zeros((6, 16), np.float32)
    inner = whole[1:5, 4:12]  # a strided window: what surrounds it must not change
    out = launch(write, inner).value
    assert (inner[2:4] == 7).all()
    assert (out == inner).all()
    whole[1:5, 4:12] = 0
    assert (whole == 0).all()
    frozen = np.zeros((4, 8), np.float32)
    frozen.flags.writeable = False
    with pytest.raises(ArgumentError, match="read-only"):
        launch(write, frozen)
    assert (frozen == 0).all()


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclass
class Config(nl.NKIObject):
    table: Any
    scale: float


def test_nested_arguments() -> None:
    def kernel(pair: Any, cfg: Any, names: tuple[str, ...]) -> Any:
        assert names == ("x",)
        t = nl.add(put(pair.a), put(pair.b))
        return get(nl.multiply(nl.add(t, put(cfg.table)), cfg.scale))

    a, b, c = (random((4, 4), seed=i) for i in range(3))
    out = launch(kernel, Pair(a, b), Config(c, 2.0), ("x",)).value
    assert np.allclose(out, (a + b + c) * 2)


def test_refused_arguments() -> None:
    with pytest.raises(DTypeError, match="no float64"):
        launch(double, np.zeros((4, 4)))
    with pytest.raises(ArgumentError, match="list"):
        launch(lambda x: None, [random((4, 4))])
    with pytest.raises(ArgumentError, match="no elements"):
        launch(double, np.zeros((0, 4), np.float32))
    with pytest.raises(ArgumentError, match="double"):
        simulator.run(double, random((4, 4)), wrong=1)
    with pytest.raises(ArgumentError, match=r"\[1\] or \[2\]"):
        launch(double, random((4, 4)), grid=4)


def test_logical_core_configuration_must_agree() -> None:
    with config.override(NEURON_LOGICAL_NC_CONFIG=2), pytest.raises(ArgumentError, match="agree"):
        launch(double, random((4, 4)))


def test_target_comes_from_the_environment() -> None:
    def kernel() -> None:
        assert nisa.get_nc_version() == nisa.nc_version.gen4
        assert nl.tile_size.sbuf_size_bytes == 32 << 20

    with config.override(NEURON_PLATFORM_TARGET_OVERRIDE="trn3"):
        assert simulator.run(kernel).target.name == "trn3"
        assert nisa.get_nc_version() > nisa.nc_version.gen3
    assert nisa.get_nc_version() == nisa.nc_version.gen3


def test_a_kernel_calling_a_kernel() -> None:
    def outer(x: Any) -> Any:
        return double(x)

    x = random((4, 4))
    result = launch(outer, x)
    assert (result.value == 2 * x).all()
    assert 50 in checks_of(result)
    with pytest.raises(KernelError, match="jit kernel"):
        launch(outer, x, strict=True)


def test_instructions_outside_a_kernel() -> None:
    with pytest.raises(KernelError, match="outside a kernel"):
        nisa.memset(dst=None, value=0)
    with pytest.raises(KernelError, match="outside a kernel"):
        nl.ndarray((4, 4), nl.float32)


def test_state_does_not_leak_from_a_failed_launch() -> None:
    def bad() -> None:
        raise RuntimeError("kernel bug")

    with pytest.raises(RuntimeError, match="kernel bug"):
        launch(bad)
    with pytest.raises(RuntimeError, match="kernel bug"):
        launch(bad, grid=2)
    x = random((4, 4))
    assert (launch(double, x).value == 2 * x).all()


# -- two cores ----------------------------------------------------------------------------------------------------


def test_two_cores_fill_halves_of_a_named_tensor() -> None:
    def kernel(x: Any) -> Any:
        assert (nl.num_programs(), nl.program_ndim()) == (2, 1)
        out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm, name="out")
        core = nl.program_id(0)
        nisa.dma_copy(dst=out[64 * core : 64 * core + 64], src=put(x[64 * core : 64 * core + 64]))
        return out

    x = random((128, 32))
    assert (launch(kernel, x, grid=2).value == x).all()


def test_private_tensors_are_per_core() -> None:
    def kernel(x: Any) -> Any:
        core = nl.program_id(0)
        scratch = nl.ndarray((4, 4), nl.float32, nl.private_hbm)
        nisa.dma_copy(dst=scratch, src=put(x[core]))
        out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm, name="out")
        nisa.core_barrier(data=out, cores=(0, 1))
        nisa.dma_copy(dst=out[core], src=put(scratch))
        return out

    x = random((2, 4, 4))
    assert (launch(kernel, x, grid=2).value == x).all()


def test_barrier_makes_the_other_half_visible() -> None:
    def kernel(x: Any, wait: bool) -> Any:
        core = nl.program_id(0)
        middle = nl.ndarray(x.shape, x.dtype, nl.shared_hbm, name="middle")
        out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm, name="out")
        nisa.dma_copy(dst=middle[core], src=put(x[core]))
        if wait:
            nisa.core_barrier(data=middle, cores=(0, 1))
        nisa.dma_copy(dst=out[core], src=put(middle[1 - core]))
        return out

    x = random((2, 4, 4))
    assert (launch(kernel, x, True, grid=2).value == x[::-1]).all()
    with pytest.raises(KernelError, match="never written"):
        launch(kernel, x, False, grid=2)


def test_a_barrier_that_names_a_tile_is_refused_or_only_waits_with_aws_compat() -> None:
    def kernel(x: Any) -> Any:
        core = nl.program_id(0)
        middle = nl.ndarray(x.shape, x.dtype, nl.shared_hbm, name="middle")
        out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm, name="out")
        tile = put(x[core])
        nisa.dma_copy(dst=middle[core], src=tile)
        nisa.core_barrier(data=tile, cores=(0, 1))
        nisa.dma_copy(dst=out[core], src=put(middle[1 - core]))
        return out

    x = random((2, 4, 4))
    with pytest.raises(KernelError, match=r"data must be a shared_hbm tensor, got \(4, 4\) float32 SBUF"):
        launch(kernel, x, grid=2)
    done = launch(kernel, x, grid=2, aws_compat=True)
    assert (done.value == x[::-1]).all()
    assert 45 in checks_of(done)


@pytest.mark.parametrize("cores", [0, (0,), (1, 2)])
def test_a_barrier_of_other_cores_is_refused(cores: Any) -> None:
    def kernel() -> None:
        nisa.core_barrier(data=nl.ndarray((4, 4), nl.float32, nl.shared_hbm, name="x"), cores=cores)

    with pytest.raises(KernelError, match=r"cores must be \(0, 1\), got \("):
        launch(kernel, grid=2)


@pytest.mark.parametrize("engine", [nisa.dma_engine.dma, nisa.dma_engine.gpsimd_dma])
def test_sendrecv_swaps(engine: Any) -> None:
    def kernel(x: Any) -> Any:
        core = nl.program_id(0)
        mine, theirs = put(x[core]), nl.ndarray((128, 16), nl.float32)
        nisa.sendrecv(
            src=mine, dst=theirs, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0, dma_engine=engine
        )
        out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm, name="out")
        nisa.dma_copy(dst=out[core], src=theirs)
        return out

    x = random((2, 128, 16))
    result = launch(kernel, x, grid=2)
    assert (result.value == x[::-1]).all()
    assert 44 not in checks_of(result)


def test_cores_that_never_meet_are_reported() -> None:
    def kernel() -> None:
        out = nl.ndarray((4, 4), nl.float32, nl.shared_hbm, name="out")
        if nl.program_id(0) == 0:
            nisa.core_barrier(data=out, cores=(0, 1))

    with pytest.raises(
        KernelError, match=r"core 0 waits in core_barrier at .*test_launch\.py:\d+, core 1 has finished"
    ):
        launch(kernel, grid=2)


def test_named_tensors_must_agree() -> None:
    def kernel() -> None:
        nl.ndarray((4, 4 + nl.program_id(0)), nl.float32, nl.shared_hbm, name="out")

    with pytest.raises(KernelError, match="on the other core"):
        launch(kernel, grid=2)


def test_no_grid() -> None:
    def kernel() -> None:
        assert (nl.program_id(0), nl.num_programs(), nl.program_ndim()) == (0, 1, 0)
        with pytest.raises(KernelError, match="two cores"):
            nisa.core_barrier(data=nl.ndarray((4, 4), nl.float32, nl.shared_hbm, name="x"), cores=(0, 1))

    launch(kernel)


# -- run-time loops and registers ---------------------------------------------------------------------------------


def test_fori_loop_with_a_run_time_bound() -> None:
    def kernel(x: Any, count: Any) -> Any:
        out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
        upper = nisa.register_alloc()
        nisa.register_load(upper, put(count))
        blank = nl.zeros((8, 16), nl.float32)
        nisa.dma_copy(dst=out, src=blank)
        row = nl.ndarray((1, 16), nl.float32)

        def body(i: Any) -> None:
            nisa.dma_copy(dst=row, src=x.ap([[16, 1], [1, 16]], scalar_offset=i))
            nisa.dma_copy(dst=out.ap([[16, 1], [1, 16]], scalar_offset=i), src=row)

        nl.fori_loop(1, upper, body, step=2)
        return out

    x = random((8, 16))
    out = launch(kernel, x, np.array([[6]], np.int32)).value
    expected = np.zeros_like(x)
    expected[1:6:2] = x[1:6:2]
    assert (out == expected).all()


def test_while_loop_and_register_store() -> None:
    def kernel(count: Any) -> Any:
        total, one = nl.zeros((1, 1), nl.int32), nl.ones((1, 1), nl.int32)
        left = put(count)
        register = nisa.register_alloc()
        nisa.register_load(register, left)

        def body(r: Any) -> Any:
            nisa.tensor_tensor(dst=total, data1=total, data2=left, op=nl.add)
            nisa.tensor_tensor(dst=left, data1=left, data2=one, op=nl.subtract)
            nisa.register_load(r, left)
            return r

        nl.while_loop(register, body)
        stored = nl.ndarray((1, 1), nl.int32)
        copy = nisa.register_alloc(0)
        nisa.register_move(copy, register)
        nisa.register_store(stored, copy)
        return get(total), get(stored)

    total, stored = launch(kernel, np.array([[5]], np.int32)).outputs
    assert total.item() == 15
    assert stored.item() == 5


def test_dynamic_range_gives_registers() -> None:
    def kernel(x: Any) -> Any:
        t = nl.zeros((1, 4), nl.float32)
        for i in nl.dynamic_range(0, 3):
            nisa.dma_copy(dst=t, src=x[nl.ds(i, 1)])
        return get(t)

    x = random((4, 4))
    assert (launch(kernel, x).value == x[2:3]).all()

    def arithmetic(x: Any) -> None:
        for i in nl.dynamic_range(3):
            x[i + 1]

    with pytest.raises(KernelError, match="arithmetic"):
        launch(arithmetic, x)


def test_registers_refuse_misuse() -> None:
    def unloaded() -> None:
        nisa.register_store(nl.ndarray((1, 1), nl.int32), nisa.register_alloc())

    def compared() -> None:
        if nisa.register_alloc(1) > 0:
            pass

    def static() -> None:
        for _ in nl.affine_range(nisa.register_alloc(1)):
            pass

    for kernel, words in ((unloaded, "before it was loaded"), (compared, "arithmetic"), (static, "fori_loop")):
        with pytest.raises(KernelError, match=words):
            launch(kernel)


@pytest.mark.parametrize("empty", [True, False])
def test_endless_loops_are_stopped(empty: bool) -> None:
    def kernel() -> None:
        one = nl.ones((1, 1), nl.int32)
        register = nisa.register_alloc(1)

        def body(r: Any) -> Any:
            if not empty:
                nisa.register_load(r, one)
            return r

        nl.while_loop(register, body)

    with pytest.raises(KernelError, match="more than 1000 instructions"):
        launch(kernel, max_instructions=1000)


# -- accounting ---------------------------------------------------------------------------------------------------


def test_dead_tiles_do_not_count() -> None:
    def kernel() -> None:
        out = nl.ndarray((128, 512), nl.float32)
        for _ in range(40):  # 40 banks in total, at most one alive at once
            t = nl.zeros((128, 512), nl.float32, nl.psum)
            nisa.tensor_copy(dst=out, src=t)

    result = launch(kernel)
    assert result.psum_peaks[0].amount == 1
    assert result.sbuf_peaks[0].amount == 2048


def test_small_psum_tiles_share_banks() -> None:
    def kernel(n: int) -> None:
        tiles = [nl.zeros((128, 64), nl.float32, nl.psum) for _ in range(n)]
        out = nl.ndarray((128, 64), nl.float32)
        for t in tiles:
            nisa.tensor_copy(dst=out, src=t)

    assert launch(kernel, 64).psum_peaks[0].amount == 8
    with pytest.raises(KernelError, match="9 banks"):
        launch(kernel, 65)


def test_records_describe_the_launch() -> None:
    def kernel(a: Any, b: Any) -> Any:
        s, x = put(a), put(b)
        ps = nl.ndarray((64, 256), nl.float32, nl.psum)
        nisa.nc_matmul(dst=ps, stationary=s, moving=x, name="product")
        return get(ps)

    result = launch(kernel, random((128, 64), BF16), random((128, 256), BF16))
    opcodes = [(r.engine, r.opcode) for r in result.records]
    assert opcodes == [
        ("dma", "dma_copy"), ("dma", "dma_copy"), ("tensor", "nc_matmul"), ("vector", "tensor_copy"),
        ("dma", "dma_copy"),
    ]  # fmt: skip
    matmul = result.records[2]
    assert (matmul.detail["k"], matmul.detail["m"], matmul.detail["n"]) == (128, 64, 256)
    assert matmul.name == "product"
    assert matmul.source.endswith(f"test_launch.py:{kernel.__code__.co_firstlineno + 3}")
    load = result.records[1].detail
    assert (load["bytes"], load["descriptors"], load["descriptor_bytes"]) == (128 * 512, 128, 512)
    assert (load["hbm_read"], load["hbm_written"]) == (128 * 512, 0)
    written, read = matmul.writes[0], result.records[3].reads[0]
    assert (written.ident, written.p0, written.p1, written.b0, written.b1) == (read.ident, 0, 64, 0, 1024)
    assert result.instructions == len(result.records) == 5
    assert launch(kernel, random((128, 64), BF16), random((128, 256), BF16), timing=False).records == []


def test_the_log_has_a_line_per_instruction() -> None:
    lines: list[str] = []
    launch(double, random((4, 4)), log=lines.append)
    assert len(lines) == 3
    assert "dma_copy" in lines[0]
    assert "test_launch.py:" in lines[1]


def test_poison_is_deterministic_and_nan_for_floats(capsys: pytest.CaptureFixture[str]) -> None:
    def kernel() -> Any:
        f, i = nl.ndarray((4, 4), nl.bfloat16), nl.ndarray((4, 4), nl.int32)
        print(f)
        assert np.isnan(f.numpy().astype(np.float32)).all()
        assert (i.numpy() != 0).all()
        nl.device_print("value ", f)

    launch(kernel)
    assert "nan" in capsys.readouterr().out


def test_the_same_launch_gives_the_same_bits() -> None:
    def kernel(x: Any) -> Any:
        t = put(x)
        r = nl.rand((8, 8), nl.float32)
        d = nl.ndarray((8, 8), nl.float32)
        nisa.dropout(dst=d, data=t, prob=0.5)
        return get(r), get(d)

    x = random((8, 8))
    first, second = launch(kernel, x).outputs, launch(kernel, x).outputs
    other = launch(kernel, x, poison_seed=1).outputs
    assert all((a == b).all() for a, b in zip(first, second, strict=True))
    assert not (first[0] == other[0]).all()
    dropped = first[1] == 0
    assert 0 < dropped.sum() < 64
    assert (first[1][~dropped] == x[~dropped]).all()


def test_capacity_errors_name_the_tiles() -> None:
    def kernel() -> None:
        tiles = [nl.zeros((128, 30000), nl.float32) for _ in range(2)]
        nisa.tensor_tensor(dst=tiles[0], data1=tiles[0], data2=tiles[1], op=nl.add)

    with pytest.raises(
        KernelError, match=r"240000 B per partition of SBUF.*\(128, 30000\) float32 at .*test_launch\.py"
    ):
        launch(kernel)
    assert launch(kernel, aws_compat=True).sbuf_peaks[0].amount == 240000


@pytest.mark.parametrize("op1", ["add", "maximum", "subtract"])
@pytest.mark.parametrize("plain", [True, False])
def test_scan_fast_path_gives_the_bits_of_the_recurrence(op1: str, plain: bool) -> None:
    def kernel(a: Any, b: Any, s: Any) -> Any:
        out = nl.ndarray(a.shape, nl.float32)
        nisa.tensor_tensor_scan(
            dst=out, data0=put(a), data1=put(b), initial=put(s), op0=nl.multiply, op1=getattr(nl, op1)
        )
        return get(out)

    a = np.ones((8, 33), np.float32) if plain else random((8, 33), seed=1)
    b, s = random((8, 33), seed=2), random((8, 1), seed=3)
    state, expected = s[:, 0], np.empty_like(a)
    for i in range(33):
        state = getattr(np, op1)(a[:, i] * state, b[:, i])
        expected[:, i] = state
    assert (launch(kernel, a, b, s).value == expected).all()


@pytest.mark.parametrize("aws_compat", [False, True])
def test_exchanges_in_a_row_keep_apart(aws_compat: bool) -> None:
    def kernel(a: Any) -> Any:
        core = nl.program_id(0)
        out = nl.ndarray((2, 2, 128, 4), nl.float32, nl.shared_hbm, name="out")
        for step in range(2):
            mine = nl.ndarray((128, 4 + step), nl.float32, nl.sbuf)
            other = nl.ndarray((128, 4 + step), nl.float32, nl.sbuf)
            nisa.memset(dst=mine, value=10.0 * step + core)
            nisa.sendrecv(src=mine, dst=other, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0)
            nisa.dma_copy(dst=out[core, step], src=other[:, 0:4])
        return out

    value = launch(kernel, np.zeros((1, 1), np.float32), grid=2, aws_compat=aws_compat).value
    np.testing.assert_array_equal(value[:, :, 0, 0], [[1.0, 11.0], [0.0, 10.0]])


def test_tiles_placed_by_address_count_up_to_their_highest_byte() -> None:
    def kernel(side_by_side: bool) -> None:
        for i in range(2):  # two names for the same bytes, or two quadrants of the same columns
            address = (32 * i if side_by_side else 0, 0)
            t = nl.ndarray((32, 30000), nl.float32, address=address)
            kept.append(t)
            nisa.memset(dst=t, value=0.0)
        for t in kept if side_by_side else kept[1:]:
            nisa.tensor_copy(dst=t, src=t)
        kept.clear()

    for side_by_side in (True, False):
        kept: list[Any] = []
        assert launch(kernel, side_by_side).sbuf_peaks[0].amount == 120000


def test_running_out_of_usable_bytes_is_shown() -> None:
    def kernel() -> None:
        tiles = [nl.zeros((128, 11000), nl.float32) for _ in range(5)]
        for t in tiles:
            nisa.tensor_copy(dst=t, src=t)

    with pytest.warns(simulator.SimulatorWarning, match="212984 B usable"):
        simulator.run(kernel, params=simulator.SimulatorParams(gen=3))


def test_comparing_run_time_values_with_numbers_is_refused() -> None:
    def kernel(x: Any) -> None:
        register = nisa.register_alloc(3)
        assert register != None  # noqa: E711 - how kernels ask for a missing argument
        assert x != None  # noqa: E711
        assert x == x
        for value in (x, register):
            with pytest.raises(KernelError, match=r"Python (operators|arithmetic)"):
                _ = value == 3
        for wide in (1 << 32, -(1 << 31) - 1):
            with pytest.raises(KernelError, match="32-bit register"):
                nisa.register_move(register, wide)

    launch(kernel, random((4, 4)))


def test_the_loop_index_belongs_to_the_loop() -> None:
    def kernel() -> None:
        def body(i: Any) -> None:
            nisa.register_move(i, 7)

        nl.fori_loop(0, 2, body)

    with pytest.raises(KernelError, match="only the loop changes"):
        launch(kernel)


def test_arguments_no_check_foresaw_still_name_the_kernel_line() -> None:
    def kernel(x: Any) -> None:
        t = put(x)
        nisa.tensor_reduce(dst=t, op=nl.add, data=t, axis=("one",))

    words = r"tensor_reduce: cannot run with these arguments.*test_launch\.py:\d+$"
    with pytest.raises(KernelError, match=words) as caught:
        launch(kernel, random((4, 4)))
    assert isinstance(caught.value.__cause__, TypeError)


def test_gathers_inside_compute_instructions_are_refused_by_name() -> None:
    def kernel() -> None:
        t = nl.zeros((16, 8), nl.float32)
        nisa.tensor_copy(dst=t, src=t.indirect(nl.zeros((16, 1), nl.uint16)))

    with pytest.raises(NotSimulatedError, match="indirect"):
        launch(kernel, gen=4)


def test_arithmetic_on_packed_types_is_refused() -> None:
    def kernel() -> None:
        t = nl.zeros((16, 8), nl.float8_e4m3fn_x4)
        nisa.tensor_copy(dst=nl.ndarray((16, 8), nl.float32), src=t)

    with pytest.raises(KernelError, match="packed types"):
        launch(kernel, gen=4)


@dataclass
class Sizes(nl.NKIObject):
    rows: int
    unused: int
    columns: int = 4


@dataclass
class Own(nl.NKIObject):
    rows: int

    def __init__(self, twice: int) -> None:
        self.rows = 2 * twice


@dataclass
class Bare(nl.NKIObject):
    rows = None
    columns = 3


def test_a_dataclass_without_all_fields_is_refused_as_in_python_or_warned_about_with_aws_compat() -> None:
    def kernel(x: Any) -> Any:
        sizes = Sizes(rows=2)  # type: ignore[call-arg]
        assert sizes.unused is None
        assert Sizes(1, 2, 3).unused == 2
        assert Own(2).rows == Own(twice=2).rows == 4
        return get(put(x)[: sizes.rows, : sizes.columns])

    x = np.ones((4, 8), np.float32)
    with pytest.raises(TypeError, match="unused"):
        launch(kernel, x)
    done = launch(kernel, x, aws_compat=True)
    assert done.value.shape == (2, 4)
    assert [w.message for w in done.warnings if "Sizes is made without unused" in w.message]


def test_attributes_without_annotation_are_fields_with_aws_compat() -> None:
    def kernel(x: Any) -> Any:
        bare = Bare(rows=2)  # type: ignore[call-arg]
        return get(put(x)[: bare.rows, : bare.columns])  # type: ignore[misc]

    x = np.ones((4, 8), np.float32)
    with pytest.raises(TypeError, match="rows"):
        launch(kernel, x)
    done = launch(kernel, x, aws_compat=True)
    assert done.value.shape == (2, 3)
    assert [w.message for w in done.warnings if "Bare is made with rows, which have no annotation" in w.message]
