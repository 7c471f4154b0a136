# SPDX-License-Identifier: Apache-2.0
"""DMA: copies of any pattern, gathers and scatters with their out-of-bounds modes, transposes, sums, descriptors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_mla.errors import KernelError
from sparse_mla.simulator import isa as nisa
from sparse_mla.simulator import language as nl

from .kit import BF16, checks_of, get, launch, put, random
from .reference import ALL, bits, cast, one, run, same, samples, widen

QUICK = settings(max_examples=25, deadline=None)
SKIP, HWDGE, SWDGE, NODGE = nisa.oob_mode.skip, nisa.dge_mode.hwdge, nisa.dge_mode.swdge, nisa.dge_mode.none


# -- plain copies -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ALL)
@pytest.mark.parametrize("source", ALL)
def test_copies_cast_through_float32(source: str, target: str) -> None:
    x = samples(ALL[source], (8, 24))

    def kernel(x: Any) -> Any:
        t = nl.ndarray(x.shape, target)
        nisa.dma_copy(dst=t, src=x)
        return get(t)

    expected = x if source == target else cast(widen(x), ALL[target])
    same(launch(kernel, x).value, expected)


def test_a_cast_warns_where_it_loses() -> None:
    def kernel(x: Any, dtype: Any) -> None:
        nisa.dma_copy(dst=nl.ndarray(x.shape, dtype), src=x)

    assert 27 in checks_of(launch(kernel, np.full((2, 2), (1 << 24) + 1, np.int32), nl.float32))
    assert 27 not in checks_of(launch(kernel, np.full((2, 2), (1 << 24) + 1, np.int32), nl.int32))
    assert 29 in checks_of(launch(kernel, np.full((2, 2), 300.0, np.float32), nl.float8_e4m3))
    assert 54 in checks_of(launch(kernel, np.full((2, 2), 1e-40, np.float32), nl.float32))
    assert 54 in checks_of(launch(kernel, np.full((2, 2), 1, np.uint16).view(BF16), nl.bfloat16))
    for harmless in (0.0, 2.0**-126, -(2.0**-126), np.nan, np.inf):
        assert 54 not in checks_of(launch(kernel, np.full((2, 2), harmless, np.float32), nl.float32))


@pytest.mark.parametrize("path", ["hbm-hbm", "hbm-sbuf-hbm", "sbuf-sbuf"])
def test_copies_between_memories_with_other_shapes(path: str) -> None:
    x = random((12, 10), BF16)

    def kernel(x: Any) -> Any:
        out = nl.ndarray((4, 5, 6), x.dtype, nl.shared_hbm)
        if path == "hbm-hbm":
            nisa.dma_copy(dst=out, src=x)
            return out
        a = nl.ndarray((30, 4), x.dtype)
        nisa.dma_copy(dst=a, src=x)
        if path == "sbuf-sbuf":
            b = nl.ndarray((5, 24), x.dtype)
            nisa.dma_copy(dst=b, src=a)
            a = b
        nisa.dma_copy(dst=out, src=a)
        return out

    same(launch(kernel, x).value, x.reshape(4, 5, 6))


@QUICK
@given(start=st.integers(0, 60), count=st.integers(1, 20), step=st.integers(1, 3), free=st.integers(1, 9))
def test_dma_has_no_partition_rule(start: int, count: int, step: int, free: int) -> None:
    x = random((count, free))

    def kernel(x: Any) -> Any:
        t = nl.zeros((128, 9), nl.float32)
        rows = slice(start, start + count * step, step) if step > 1 else slice(start, start + count)
        nisa.dma_copy(dst=t[rows, 0:free], src=x)
        return get(t)

    expected = np.zeros((128, 9), np.float32)
    expected[start : start + count * step : step, :free] = x
    same(launch(kernel, x).value, expected)


def test_a_leading_stride_of_0_replicates_a_row_and_windows_overlap() -> None:
    x = random((1, 20))

    def kernel(x: Any) -> Any:
        rows, windows = nl.ndarray((128, 20), nl.float32), nl.ndarray((5, 16), nl.float32)
        nisa.dma_copy(dst=rows, src=x.ap([[0, 128], [1, 20]]))
        nisa.dma_copy(dst=windows, src=x.ap([[1, 5], [1, 16]]))
        return get(rows), get(windows)

    rows, windows = launch(kernel, x).outputs
    same(rows, np.repeat(x, 128, axis=0))
    same(windows, np.lib.stride_tricks.sliding_window_view(x[0], 16).copy())


def test_descriptors_follow_the_layout() -> None:
    def kernel(x: Any) -> None:
        t = nl.ndarray((128, 64), nl.float32)
        nisa.dma_copy(dst=t, src=x)  # one run per partition
        nisa.dma_copy(dst=t[:, 0:32], src=x[:, 0:32])
        nisa.dma_copy(dst=t[:, 0:64:2], src=x[:, 0:32])  # one per element
        nisa.dma_copy(dst=t, src=x.permute((1, 0)).reshape((128, 64)) if x.shape[0] == 64 else x)
        nisa.dma_copy(dst=x, src=x)

    facts = [r.detail for r in launch(kernel, random((128, 64))).records]
    assert [(f["descriptors"], f["descriptor_bytes"]) for f in facts[:3]] == [(128, 256), (128, 128), (4096, 4)]
    assert (facts[4]["descriptors"], facts[4]["hbm_read"], facts[4]["hbm_written"]) == (1, 32768, 32768)


def test_advice_on_descriptor_size_has_levels() -> None:
    def kernel(x: Any, width: int) -> None:
        nisa.dma_copy(dst=nl.ndarray((128, width), nl.float32), src=x[:, 0:width])

    x = random((128, 1024))
    for width, level in ((16, "warning"), (64, "info"), (511, "info"), (512, None)):
        found = [w.level for w in launch(kernel, x, width).warnings if w.check == 52]
        assert found == ([level] if level else []), width


@pytest.mark.parametrize(("kw", "words", "check"), [
    ({"dge_mode": "hwdge"}, "dge_mode must be", 34), ({"oob_mode": "skip"}, "oob_mode must be", 33),
    ({"dge_mode": HWDGE, "engine": nisa.engine.vector}, "sync or scalar", 34),
    ({"engine": "sync"}, "engine must be", 34),
    ({"priority": 9}, "needs trn3", 37), ({"mask": 1}, "mask= was removed", 0), ({"dst_rmw_op": 1}, "dma_compute", 0),
])  # fmt: skip
def test_bad_options(kw: dict[str, Any], words: str, check: int) -> None:
    def kernel(x: Any) -> None:
        nisa.dma_copy(dst=nl.ndarray((4, 4), nl.float32), src=x, **kw)

    with pytest.raises(KernelError, match=words) as caught:
        launch(kernel, random((4, 4)))
    assert caught.value.check == check  # type: ignore[attr-defined]
    assert "test_dma.py:" in str(caught.value)


def test_priority_exists_on_trn3() -> None:
    def kernel(x: Any, priority: Any) -> None:
        nisa.dma_copy(dst=nl.ndarray((4, 4), nl.float32), src=x, priority=priority)

    launch(kernel, random((4, 4)), 3, gen=4)
    with pytest.raises(KernelError, match=r"0\.\.3"):
        launch(kernel, random((4, 4)), 4, gen=4)


# -- vector offsets -----------------------------------------------------------------------------------------------


def gather_kernel(table: Any, index: Any, width: int, first: int, mode: Any, fill: float) -> Any:
    dst = nl.ndarray((index.shape[0], width), table.dtype)
    nisa.memset(dst, fill)
    src = table.ap([[7, index.shape[0]], [1, width]], offset=first, vector_offset=put(index))  # 7: ignored
    nisa.dma_copy(dst=dst, src=src, oob_mode=mode)
    return get(dst)


@pytest.mark.parametrize("name", ["int32", "uint32"])
@QUICK
@given(data=st.data())
def test_gather_rows(name: str, data: Any) -> None:
    rows, columns = data.draw(st.integers(1, 40)), data.draw(st.integers(2, 16))
    count = data.draw(st.integers(1, 128))
    width = data.draw(st.integers(1, columns))
    first = data.draw(st.integers(0, columns - width))
    low = 0 if name == "uint32" else -3
    index = np.array(data.draw(st.lists(st.integers(low, rows + 3), min_size=count, max_size=count)), name)
    table = random((rows, columns), seed=rows)
    valid = (index.astype(np.int64) >= 0) & (index < rows)
    expected = np.full((count, width), -7.5, np.float32)
    expected[valid] = table[index[valid].astype(np.int64), first : first + width]
    column = index.reshape(count, 1)
    same(launch(gather_kernel, table, column, width, first, SKIP, -7.5).value, expected)
    if valid.all():
        same(launch(gather_kernel, table, column, width, first, nisa.oob_mode.error, -7.5).value, expected)
    else:
        at = int(np.argmin(valid))
        with pytest.raises(KernelError, match=f"index {index[at]} at row {at} is outside 0..{rows - 1}") as caught:
            launch(gather_kernel, table, column, width, first, nisa.oob_mode.error, -7.5)
        assert caught.value.check == 33  # type: ignore[attr-defined]


@QUICK
@given(data=st.data())
def test_scatter_rows(data: Any) -> None:
    rows, count = data.draw(st.integers(2, 40)), data.draw(st.integers(1, 30))
    index = np.array(data.draw(st.lists(st.integers(-2, rows + 2), min_size=count, max_size=count)), np.int32)
    values, before = random((count, 6), seed=1), random((rows, 6), seed=2)
    expected = before.copy()
    for i, row in enumerate(index):
        if 0 <= row < rows:
            expected[row] = values[i]  # the last writer wins

    def kernel(x: Any, values: Any, index: Any) -> Any:
        dst = x.ap([[6, count], [1, 6]], vector_offset=put(index))
        nisa.dma_copy(dst=dst, src=put(values), oob_mode=SKIP)
        return x

    guard = np.full((rows + 2, 6), 99.0, np.float32)
    guard[1:-1] = before
    window = guard[1:-1]  # what lies around the array must stay
    result = launch(kernel, window, values, index.reshape(-1, 1))
    same(result.value, expected)
    assert (guard[[0, -1]] == 99).all()
    inside = index[(index >= 0) & (index < rows)]
    twice = any("occurs twice" in w.message for w in result.warnings)
    assert twice == (len(np.unique(inside)) != len(inside))


def test_offsets_of_a_slice_count_from_the_slice() -> None:
    table, index = random((16, 8)), np.array([[0], [3]], np.int32)

    def kernel(table: Any, index: Any) -> Any:
        dst = nl.ndarray((2, 8), nl.float32)
        nisa.dma_copy(dst=dst, src=table[4:8].ap([[8, 2], [1, 8]], vector_offset=put(index)))
        return get(dst)

    same(launch(kernel, table, index).value, table[[4, 7]])
    with pytest.raises(KernelError, match=r"outside 0\.\.3"):
        launch(kernel, table, index + 1)


def test_elements_are_gathered_from_a_flat_view_and_index_columns_may_be_strided() -> None:
    table, index = random((10, 8)), np.random.default_rng(1).integers(0, 80, (32, 3)).astype(np.int32)

    def kernel(table: Any, index: Any) -> Any:
        at = put(index)
        dst = nl.ndarray((32, 3), nl.float32)
        flat = table.reshape((80,))
        for c in range(3):
            column = at[:, c : c + 1] if c < 2 else at.ap([[3, 32], [1, 1]], offset=c)
            nisa.dma_copy(dst=dst[:, c : c + 1], src=flat.ap([[1, 32], [1, 1]], vector_offset=column))
        return get(dst)

    same(launch(kernel, table, index).value, table.reshape(-1)[index])


def test_a_gather_may_cast_and_reinterpret() -> None:
    table, index = random((8, 16), BF16), np.array([[5], [2]], np.int32)

    def kernel(table: Any, index: Any) -> Any:
        at = put(index)
        wide, pairs = nl.ndarray((2, 16), nl.float32), nl.ndarray((2, 8), nl.int32)
        nisa.dma_copy(dst=wide, src=table.ap([[16, 2], [1, 16]], vector_offset=at))
        nisa.dma_copy(dst=pairs, src=table.ap([[8, 2], [1, 8]], vector_offset=at, dtype=nl.int32))
        return get(wide), get(pairs)

    wide, pairs = launch(kernel, table, index).outputs
    same(wide, table[[5, 2]].astype(np.float32))
    same(pairs, table[[5, 2]].view(np.int32))


@pytest.mark.parametrize(("kw", "words"), [
    ({"dge_mode": HWDGE}, "software DGE"), ({"dge_mode": NODGE}, "software DGE"),
])  # fmt: skip
def test_gathers_need_software_dge(kw: dict[str, Any], words: str) -> None:
    def kernel(table: Any, index: Any) -> None:
        dst = nl.ndarray((2, 8), nl.float32)
        nisa.dma_copy(dst=dst, src=table.ap([[8, 2], [1, 8]], vector_offset=put(index)), **kw)

    with pytest.raises(KernelError, match=words) as caught:
        launch(kernel, random((4, 8)), np.zeros((2, 1), np.int32))
    assert caught.value.check == 32  # type: ignore[attr-defined]


def test_a_gather_is_recorded_as_software_work_of_gpsimd() -> None:
    table, index = random((16, 64)), np.zeros((16, 1), np.int32)
    detail = launch(gather_kernel, table, index, 64, 0, SKIP, 0.0).records[2].detail
    assert (detail["dge"], detail["queue"], detail["indirect"], detail["rows"]) == ("swdge", "gpsimd", True, 16)
    assert (detail["descriptors"], detail["descriptor_bytes"], detail["dynamic"]) == (16, 256, True)


def test_rows_that_nobody_wrote_cannot_be_gathered() -> None:
    def kernel(index: Any) -> Any:
        table = nl.ndarray((8, 4), nl.float32, nl.private_hbm)
        nisa.dma_copy(dst=table[0:4], src=nl.zeros((4, 4), nl.float32))
        dst = nl.ndarray((2, 4), nl.float32)
        nisa.dma_copy(dst=dst, src=table.ap([[4, 2], [1, 4]], vector_offset=put(index)))
        return get(dst)

    launch(kernel, np.array([[3], [0]], np.int32))
    with pytest.raises(KernelError, match="never written") as caught:
        launch(kernel, np.array([[3], [4]], np.int32))
    assert caught.value.check == 46  # type: ignore[attr-defined]


def test_compute_engines_cannot_follow_a_vector_index() -> None:
    def kernel(table: Any, index: Any) -> None:
        nisa.tensor_copy(nl.ndarray((2, 8), nl.float32), table.ap([[8, 2], [1, 8]], vector_offset=put(index)))

    for checks in (True, False):
        with pytest.raises(KernelError, match="indexed by a vector"):
            launch(kernel, random((4, 8)), np.zeros((2, 1), np.int32), checks=checks)


# -- scalar offsets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["register", "tile"])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_scalar_offsets_step_any_dim(kind: str, dim: int) -> None:
    x = random((4, 5, 6))

    def kernel(x: Any, at: Any) -> Any:
        index = put(at)
        if kind == "register":
            register = nisa.register_alloc()
            nisa.register_load(register, index)
            index = register
        dst = nl.ndarray((2, 3), nl.float32)
        nisa.dma_copy(dst=dst, src=x.ap([[30, 2], [1, 3]], scalar_offset=index, indirect_dim=dim))
        return get(dst)

    for value in (0, 1, 2):
        start = value * (30, 6, 1)[dim]
        flat = x.reshape(-1)
        wanted = np.stack([flat[start : start + 3], flat[start + 30 : start + 33]])
        same(launch(kernel, x, np.array([[value]], np.uint32)).value, wanted)
    for value in (-1, 120):
        with pytest.raises(KernelError, match="outside its tensor"):
            launch(kernel, x, np.array([[value]], np.int32))


def test_a_scalar_offset_outside_is_skipped_on_request() -> None:
    def kernel(x: Any, at: Any) -> Any:
        dst = nl.zeros((1, 4), nl.float32)
        nisa.dma_copy(dst=dst, src=x.ap([[4, 1], [1, 4]], scalar_offset=put(at)), oob_mode=SKIP)
        return get(dst)

    x = random((3, 4))
    same(launch(kernel, x, np.array([[2]], np.int32)).value, x[2:3])
    for outside in (3, -1):
        assert (launch(kernel, x, np.array([[outside]], np.int32)).value == 0).all()


@pytest.mark.parametrize(("value", "good"), [(0, True), (5, True), (6, False), (7, False), (-1, False), (8, False)])
def test_a_run_time_slice_stays_inside_its_dim(value: int, good: bool) -> None:
    x = random((16, 8))

    def free(x: Any, at: Any) -> Any:
        return get(nl.copy(put(x)[0:4, nl.ds(put(at), 3)]))

    def rows(x: Any, at: Any) -> Any:
        out = nl.ndarray((1, 3), nl.float32)
        nisa.dma_copy(dst=out, src=x[2:3, nl.ds(put(at), 3)])
        return get(out)

    for kernel, part in ((free, x[0:4]), (rows, x[2:3])):
        if good:
            same(launch(kernel, x, np.array([[value]], np.uint32)).value, part[:, value : value + 3].copy())
        else:
            with pytest.raises(KernelError, match="run-time index") as caught:
                launch(kernel, x, np.array([[value]], np.int32))
            assert caught.value.check == 33  # type: ignore[attr-defined]


def test_an_on_chip_pattern_does_not_walk_into_the_next_partition() -> None:
    def kernel(x: Any, at: Any) -> Any:
        return get(nl.copy(put(x).ap([[8, 4], [1, 3]], scalar_offset=put(at), indirect_dim=1)))

    x = random((16, 8))
    same(launch(kernel, x, np.array([[5]], np.int32)).value, x[0:4, 5:8].copy())
    for value in (6, 8):
        with pytest.raises(KernelError, match="run-time index"):
            launch(kernel, x, np.array([[value]], np.int32))


def test_a_scalar_offset_needs_a_dge() -> None:
    def kernel(x: Any, at: Any) -> None:
        dst = nl.zeros((1, 4), nl.float32)
        nisa.dma_copy(dst=dst, src=x.ap([[4, 1], [1, 4]], scalar_offset=put(at)), dge_mode=NODGE)

    with pytest.raises(KernelError, match="static addresses only"):
        launch(kernel, random((3, 4)), np.zeros((1, 1), np.int32))


# -- transposes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["hbm", "sbuf"])
@pytest.mark.parametrize("name", ["bfloat16", "float32", "int16"])
@pytest.mark.parametrize(("shape", "axes"), [
    ((16, 128), (1, 0)), ((100, 33), (1, 0)), ((4, 6, 40), (2, 1, 0)), ((3, 4, 5, 32), (3, 1, 2, 0)),
])  # fmt: skip
def test_dma_transpose(shape: tuple[int, ...], axes: tuple[int, ...], name: str, memory: str) -> None:
    x = samples(ALL[name], shape)

    def kernel(x: Any) -> Any:
        dst = nl.ndarray(tuple(shape[a] for a in axes), name)
        src = put(x) if memory == "sbuf" else x
        nisa.dma_transpose(dst=dst, src=src, axes=axes)
        return get(dst)

    assert (bits(launch(kernel, x).value) == bits(x.transpose(axes))).all()


@pytest.mark.parametrize(("shape", "good"), [
    ((16, 128), True), ((8, 128), False), ((2, 8, 64), True), ((3, 16, 64), False), ((2, 4, 64), False),
    ((4, 2, 4, 64), True), ((16, 129), False),
])  # fmt: skip
def test_hardware_transposes_have_their_shapes(shape: tuple[int, ...], good: bool) -> None:
    order = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}[len(shape)]
    x = random(shape, BF16)

    def kernel(x: Any) -> Any:
        dst = nl.ndarray(tuple(shape[a] for a in order) if shape[-1] <= 128 else (128, 16), nl.bfloat16)
        nisa.dma_transpose(dst=dst, src=x, dge_mode=HWDGE)
        return get(dst)

    if good:
        assert (bits(launch(kernel, x).value) == bits(x.transpose(order))).all()
    else:
        with pytest.raises(KernelError) as caught:
            launch(kernel, x)
        assert caught.value.check == 35  # type: ignore[attr-defined]


def indirect_kernel(table: Any, index: Any, rows: int, dims: Any, **kw: Any) -> Any:
    at = put(index)
    sizes = (rows, *dims)
    strides = [int(np.prod(sizes[i + 1 :])) for i in range(len(sizes))]
    src = table.ap([[s, n] for s, n in zip(strides, sizes, strict=True)], vector_offset=at)
    order = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}[len(sizes)]
    dst = nl.ndarray(tuple(sizes[a] for a in order), nl.bfloat16)
    nisa.dma_transpose(dst=dst, src=src, **kw)
    return get(dst)


@pytest.mark.parametrize(("index_shape", "rows", "dims"), [
    ((16, 1), 16, (128,)), ((128, 1), 112, (64,)), ((128, 3), 384, (128,)), ((128, 2), 144, (32,)),
    ((128, 2), 256, (3, 1, 16)), ((48, 1), 48, (1, 4, 16)),
])  # fmt: skip
def test_indirect_transpose_takes_indices_column_by_column(index_shape: Any, rows: int, dims: Any) -> None:
    table = random((50, *dims), BF16)
    index = np.random.default_rng(1).integers(0, 50, index_shape).astype(np.uint32)
    gathered = table[index.T.reshape(-1)[:rows].astype(np.int64)]
    order = {2: (1, 0), 4: (3, 1, 2, 0)}[gathered.ndim]
    out = launch(indirect_kernel, table, index, rows, dims).value
    assert (bits(out) == bits(gathered.transpose(order))).all()


@pytest.mark.parametrize(("index", "rows", "dims", "kw", "words"), [
    (np.zeros((16, 1), np.int32), 16, (64,), {}, "must be uint32"),
    (np.zeros((24, 1), np.uint32), 16, (64,), {}, "steps of 16"),
    (np.zeros((64, 2), np.uint32), 128, (64,), {}, "exactly 128 with several columns"),
    (np.zeros((16, 1), np.uint32), 32, (64,), {}, "fewer indices"),
    (np.zeros((128, 1), np.uint32), 24, (64,), {}, "multiple of 16"),
    (np.zeros((16, 1), np.uint32), 16, (2, 2, 8), {}, "must be 1"),
    (np.zeros((16, 1), np.uint32), 16, (64,), {"dge_mode": HWDGE}, "software DGE"),
    (np.zeros((16, 1), np.uint32), 16, (64,), {"axes": (0, 1)}, "axes of a 2-D transpose"),
])  # fmt: skip
def test_indirect_transpose_rules(index: Any, rows: int, dims: Any, kw: dict[str, Any], words: str) -> None:
    with pytest.raises(KernelError, match=words) as caught:
        launch(indirect_kernel, random((50, *dims), BF16), index, rows, dims, **{"gen": 3}) if not kw else launch(
            lambda t, i: indirect_kernel(t, i, rows, dims, **kw), random((50, *dims), BF16), index
        )
    assert caught.value.check == 35  # type: ignore[attr-defined]


def test_a_transpose_with_descriptors_made_in_advance_takes_static_addresses() -> None:
    def kernel(x: Any, row: Any) -> Any:
        dst = nl.ndarray((64, 32), nl.bfloat16)
        nisa.dma_transpose(dst=dst, src=x[0], dge_mode=NODGE)
        if row is not None:
            nisa.dma_transpose(dst=dst, src=x.select(0, put(row)), dge_mode=NODGE)
        return get(dst)

    x = random((2, 32, 64), BF16)
    assert (bits(launch(kernel, x, None).value) == bits(x[0].T)).all()
    with pytest.raises(KernelError, match=r"dge_mode\.none takes static addresses only") as caught:
        launch(kernel, x, np.ones((1, 1), np.int32))
    assert caught.value.check == 32  # type: ignore[attr-defined]


def test_transposes_end_in_sbuf() -> None:
    def kernel(x: Any) -> None:
        nisa.dma_transpose(dst=nl.ndarray((128, 16), nl.bfloat16, nl.private_hbm), src=x)

    with pytest.raises(KernelError, match="plain SBUF tile"):
        launch(kernel, random((16, 128), BF16))


# -- sums ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 16])
@pytest.mark.parametrize("target", ["float32", "bfloat16", "int8"])
def test_dma_compute_adds_in_float32(count: int, target: str) -> None:
    xs = [
        samples(ALL[n], (8, 20), i)
        for i, n in zip(range(count), ["bfloat16", "float32", "int8", "uint16"] * 4, strict=False)
    ]
    with np.errstate(all="ignore"):
        total = widen(xs[0])
        for x in xs[1:]:
            total = total + widen(x)
    out = one(lambda d, *tiles: nisa.dma_compute(d, list(tiles), nl.add, scales=[1.0] * count), xs, (8, 20), target)
    same(out, cast(total, ALL[target]))


def test_gather_add_and_scatter_add() -> None:
    table, values = random((20, 6), seed=1), random((8, 6), seed=2)
    index = np.random.default_rng(3).permutation(20)[:8].astype(np.int32).reshape(8, 1)

    def kernel(table: Any, values: Any, index: Any) -> Any:
        at, sums = put(index), put(values)
        rows = [[6, 8], [1, 6]]
        nisa.dma_compute(sums, [sums, table.ap(rows, vector_offset=at)], nl.add)
        out = nl.ndarray((20, 6), nl.float32, nl.shared_hbm)
        nisa.dma_copy(dst=out, src=table)
        there = out.ap(rows, vector_offset=at)
        nisa.dma_compute(there, [there, put(values)], nl.add)
        return get(sums), out

    sums, out = launch(kernel, table, values, index).outputs
    same(sums, values + table[index[:, 0]])
    expected = table.copy()
    expected[index[:, 0]] += values
    same(out, expected)
    index[1] = index[0]
    with pytest.raises(KernelError, match="unique indices"):
        launch(kernel, table, values, index)


@pytest.mark.parametrize(("kw", "words"), [
    ({"reduce_op": nl.maximum}, "must be nl.add"), ({"scales": [2.0, 1.0]}, "times 1.0"),
    ({"scales": [1.0]}, "2 times 1.0"), ({"srcs": []}, "1 to 16"),
])  # fmt: skip
def test_dma_compute_rules(kw: dict[str, Any], words: str) -> None:
    x = random((4, 4))
    with pytest.raises(KernelError, match=words) as caught:
        run(
            lambda d, a: nisa.dma_compute(**{"dst": d, "srcs": [a, a], "reduce_op": nl.add, **kw}), [x],
            [((4, 4), "float32")],
        )  # fmt: skip
    assert caught.value.check == 31  # type: ignore[attr-defined]


def test_mixed_dge_modes_are_recorded() -> None:
    def kernel(x: Any) -> None:
        t = nl.ndarray(x.shape, x.dtype)
        nisa.dma_copy(dst=t, src=x, dge_mode=HWDGE, engine=nisa.engine.scalar)
        nisa.dma_copy(dst=t, src=x, dge_mode=HWDGE)
        nisa.dma_copy(dst=t, src=x, dge_mode=SWDGE)
        nisa.dma_copy(dst=t, src=x, dge_mode=NODGE)

    found = [(r.detail["dge"], r.detail["queue"]) for r in launch(kernel, random((4, 4))).records]
    assert found == [("hwdge", "scalar"), ("hwdge", "sync"), ("swdge", "gpsimd"), ("none", "")]
