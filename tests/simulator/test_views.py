# SPDX-License-Identifier: Apache-2.0
"""Views address the same elements as NumPy striding does: every method, `.ap`, and chains of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_mla.errors import KernelError
from sparse_mla.simulator import isa as nisa
from sparse_mla.simulator import language as nl
from sparse_mla.simulator.tensor import NkiTensor

from .kit import BF16, get, launch, put


def numbered(shape: tuple[int, ...], dtype: Any = np.int32) -> Any:
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def tensor(shape: tuple[int, ...], buffer: Any = nl.private_hbm, dtype: Any = nl.int32) -> tuple[NkiTensor, Any]:
    """A tensor outside any launch whose elements are numbered row-major, and the same array."""
    t = NkiTensor(shape, dtype, None, buffer)
    reference = numbered(shape, t.dtype.np)
    t.array()[...] = reference
    return t, reference


def same(view: NkiTensor, reference: Any) -> None:
    assert view.shape == reference.shape
    assert (view.array() == reference).all()


SHAPES = st.lists(st.integers(1, 5), min_size=2, max_size=4).map(tuple)
BUFFERS = st.sampled_from([nl.private_hbm, nl.sbuf, nl.psum])


@given(SHAPES, BUFFERS, st.data())
def test_slice_and_getitem(shape: tuple[int, ...], buffer: Any, data: Any) -> None:
    t, r = tensor(shape, buffer)
    keys = []
    for n in shape:
        start = data.draw(st.integers(0, n - 1))
        keys.append(slice(start, data.draw(st.integers(start + 1, n)), data.draw(st.integers(1, 3))))
    same(t[tuple(keys)], r[tuple(keys)])
    view, reference = t, r
    for dim, key in enumerate(keys):
        view = view.slice(dim, key.start, key.stop, key.step)
        index = [slice(None)] * dim + [key]
        reference = reference[tuple(index)]
    same(view, reference)
    same(t[..., keys[-1]], r[..., keys[-1]])


@given(SHAPES, BUFFERS, st.data())
def test_integers_keep_the_partition_axis_on_chip(shape: tuple[int, ...], buffer: Any, data: Any) -> None:
    t, r = tensor(shape, buffer)
    keys = [data.draw(st.one_of(st.integers(-n, n - 1), st.just(slice(None)))) for n in shape]
    reference = r[tuple(keys)]
    if buffer == nl.private_hbm:
        reference = reference.reshape(-1) if reference.ndim == 0 else reference
    else:
        if isinstance(keys[0], int):
            reference = np.expand_dims(reference, 0)
        if reference.ndim == 1:
            reference = reference[:, None]
    same(t[tuple(keys)], reference)


@given(SHAPES, st.data())
def test_permute_broadcast_expand_squeeze(shape: tuple[int, ...], data: Any) -> None:
    t, r = tensor(shape)
    dims = data.draw(st.permutations(range(len(shape))))
    same(t.permute(dims), r.transpose(dims))
    chip, c = tensor(shape, nl.sbuf)
    inner = (0, *data.draw(st.permutations(range(1, len(shape)))))
    same(chip.permute(inner), c.transpose(inner))
    dim = data.draw(st.integers(1, len(shape)))
    wide = chip.expand_dim(dim)
    same(wide, np.expand_dims(c, dim))
    same(wide.squeeze_dim(dim), c)
    same(wide.broadcast(dim, 3), np.repeat(np.expand_dims(c, dim), 3, axis=dim))


@given(st.tuples(*[st.integers(1, 4)] * 4), BUFFERS)
def test_split_and_merge(sizes: tuple[int, int, int, int], buffer: Any) -> None:
    a, b, c, d = sizes
    t, r = tensor((a, b * c, d), buffer)
    same(t.reshape_dim(1, (b, -1)), r.reshape(a, b, c, d))
    same(t.reshape_dim(1, (b, c)).flatten_dims(1, 2), r)
    same(t.reshape((a, b, c * d)), r.reshape(a, b, c * d))
    same(t.flatten_dims(1, 2), r.reshape(a, -1))
    if buffer == nl.private_hbm:
        same(t.reshape((a * b, c * d)), r.reshape(a * b, c * d))
        same(t.reshape(-1), r.reshape(-1))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_rearrange(a: int, b: int, c: int) -> None:
    t, r = tensor((a, b * c), nl.sbuf)
    same(t.rearrange(("p", ("x", "y")), ("p", "y", "x"), {"x": b}), r.reshape(a, b, c).transpose(0, 2, 1))
    h, g = tensor((a, b, c))
    same(h.rearrange(("x", "y", "z"), ("z", ("x", "y"))), g.transpose(2, 0, 1).reshape(c, a * b))


@given(SHAPES, st.data())
def test_reshape_of_slices_agrees_with_numpy_or_refuses(shape: tuple[int, ...], data: Any) -> None:
    t, r = tensor(shape)
    dim = data.draw(st.integers(0, len(shape) - 1))
    stop = data.draw(st.integers(1, shape[dim]))
    view, reference = t.slice(dim, 0, stop), r[tuple([slice(None)] * dim + [slice(0, stop)])]
    total = reference.size
    left = data.draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0]))
    try:
        expected = np.reshape(reference, (left, total // left), copy=False)
    except ValueError:
        with pytest.raises(KernelError, match="does not allow"):
            view.reshape((left, total // left))
        return
    same(view.reshape((left, total // left)), expected)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4)), min_size=1, max_size=4), st.integers(0, 20))
def test_ap_of_hbm_is_as_strided(pattern: list[tuple[int, int]], offset: int) -> None:
    t, r = tensor((8, 12))
    flat = r.reshape(-1)
    last = offset + sum(s * (n - 1) for s, n in pattern)
    if last >= flat.size:
        with pytest.raises(KernelError, match="reaches element"):
            t.ap(pattern, offset=offset).array()
        return
    expected = np.lib.stride_tricks.as_strided(flat[offset:], [n for _, n in pattern], [s * 4 for s, _ in pattern])
    same(t.ap([list(p) for p in pattern], offset=offset), expected)


@given(
    st.integers(0, 7),
    st.integers(1, 8),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=3),
)
def test_ap_on_chip_addresses_partition_and_free(start: int, count: int, free: list[tuple[int, int]]) -> None:
    t, r = tensor((8, 12), nl.sbuf)
    reach = sum(s * (n - 1) for s, n in free)
    if start + count > 8 or reach >= 12:
        with pytest.raises(KernelError, match="reaches partition"):
            t.ap([[12, count], *map(list, free)], offset=12 * start).array()
        return
    expected = np.lib.stride_tricks.as_strided(
        r[start:], [count, *(n for _, n in free)], [48, *(s * 4 for s, _ in free)]
    )
    same(t.ap([[12, count], *map(list, free)], offset=12 * start), expected)


def test_a_pattern_behind_the_end_is_an_error_of_the_instruction_that_uses_it() -> None:
    """Kernels make the view of a last, missing tile and then skip it."""

    def kernel(x: Any, used: Any) -> Any:
        whole = put(x)
        kept = nl.ndarray((8, 4), nl.float32)
        for i in range(4):
            part = whole.ap([[12, 8], [1, 4]], offset=4 * i)
            if i < 2:
                nisa.tensor_copy(kept, part)
        if used == "engine":
            nisa.tensor_copy(kept, part)
        if used == "dma":
            nisa.dma_copy(dst=kept, src=x.ap([[12, 8], [1, 4]], offset=12))
        if used == "slice":
            nisa.tensor_copy(kept, whole.ap([[12, 8], [1, 8]], offset=8)[:, :4])
        return get(kept)

    x = numbered((8, 12), np.float32)
    assert (launch(kernel, x, "nothing").value == x[:, 4:8]).all()
    assert (launch(kernel, x, "slice").value == x[:, 8:]).all()
    with pytest.raises(KernelError, match=r"tensor_copy: src: the pattern reaches partition 8 of 8 and"):
        launch(kernel, x, "engine")
    with pytest.raises(KernelError, match=r"dma_copy: src: the pattern reaches element 99 of 96"):
        launch(kernel, x, "dma")


def test_ap_keeps_the_base_of_a_slice_and_adds_the_offset() -> None:
    t, r = tensor((8, 12))
    same(t[2:4].ap([[1, 3]]), r.reshape(-1)[24:27])
    same(t[2:4].ap([[1, 3]], offset=5), r.reshape(-1)[29:32])
    same(t[2:4, 3:].ap([[0, 4], [1, 2]]), np.tile(r.reshape(-1)[27:29], (4, 1)))


def test_ap_with_dtype_counts_in_the_new_size() -> None:
    t = NkiTensor((4, 8), nl.bfloat16, None, nl.sbuf)
    t.array()[...] = np.arange(32).reshape(4, 8).astype(BF16)
    pairs = t.ap([[4, 4], [1, 4]], dtype=nl.int32)
    assert (pairs.array() == t.array().view(np.int32)).all()
    same(t.ap([[4, 4], [1, 2]], offset=2, dtype=nl.int32), t.array().view(np.int32)[:, 2:4])


@given(st.integers(1, 4), st.integers(1, 4))
def test_view_scales_the_last_dim(rows: int, words: int) -> None:
    for buffer in (nl.sbuf, nl.private_hbm):
        t, r = tensor((rows, words), buffer)
        same(t.view(nl.uint8), r.view(np.uint8))
        same(t.view(nl.uint8).view(nl.int32), r)
        same(t.view(nl.float32), r.view(np.float32))
        same(t.reinterpret_cast(nl.uint16)[:, 1:], r.view(np.uint16)[:, 1:])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda t: t[8:9], "past the end"),
        (lambda t: t[0:0], "empty"),
        (lambda t: t[9], "out of range"),
        (lambda t: t[0, 0, 0], "3 indices"),
        (lambda t: t[::-1], "positive"),
        (lambda t: t.permute((1, 0)), "partition axis"),
        (lambda t: t.expand_dim(0), "partition axis"),
        (lambda t: t.reshape((4, 24)), "partition axis"),
        (lambda t: t.reshape((8, 13)), "96 elements"),
        (lambda t: t.slice(1, 3, 3), "0 <= start < end"),
        (lambda t: t.broadcast(1, 4), "size 1"),
        (lambda t: t.flatten_dims(0, 1), "partition axis"),
        (lambda t: t[:, ::2].view(nl.uint8), "contiguous"),
        (lambda t: t.view("float64"), "no float64"),
        (lambda t: t.ap([[1, 8], [1, 12]]), "whole partitions"),
        (lambda t: t.ap([[0, 8], [1, 12]]), "stride of 0"),
        (lambda t: t.ap([[12, 8], [-1, 2]]), "negative"),
        (lambda t: t + 1, "operators"),
        (lambda t: t.__setitem__(0, 1), "tensor_copy"),
        (lambda t: t.vector_select(1, t), "dim must be 0"),
    ],
)
def test_refused(make: Any, words: str) -> None:
    t, _ = tensor((8, 12), nl.sbuf)
    with pytest.raises((KernelError, TypeError), match=words):
        make(t)


def test_facts() -> None:
    t, _ = tensor((8, 3, 4), nl.sbuf)
    assert (t.strides, t.offset, t.ndim, t.size) == ((12, 4, 1), 0, 3, 96)
    assert t.get_pattern() == [[12, 8], [4, 3], [1, 4]]
    assert t.is_contiguous()
    assert t[2:4].is_contiguous()
    assert not t[:, :, 0:2].is_contiguous()
    assert not t.permute((0, 2, 1)).is_contiguous()
    assert t[2:3, 1].offset == 28
    assert not t.is_indirect()


def test_scalar_index_moves_any_dim() -> None:
    table = numbered((6, 4, 10), np.float32)

    def kernel(x: Any, i: Any) -> Any:
        where = put(i)
        register = nisa.register_alloc()
        nisa.register_load(register, where)
        a, b, c, d = (nl.ndarray((4, 10), nl.float32) for _ in range(4))
        nisa.dma_copy(dst=a, src=x.ap([[10, 4], [1, 10]], scalar_offset=where, indirect_dim=0))
        nisa.dma_copy(dst=b, src=x.select(0, where))
        nisa.dma_copy(dst=c, src=x.select(0, register))
        nisa.dma_copy(dst=d[0:2], src=x[0, nl.ds(register, 2)])
        nisa.dma_copy(dst=d[2:4], src=x[0, 0:2])
        chip = nl.ndarray((6, 40), nl.float32)
        nisa.dma_copy(dst=chip, src=x.reshape((6, 40)))
        free = nl.ndarray((6, 10), nl.float32)
        nisa.tensor_copy(dst=free, src=chip.reshape((6, 4, 10)).select(1, where))
        return get(a), get(b), get(c), get(d), get(free)

    a, b, c, d, free = launch(kernel, table, np.array([[2]], np.int32)).outputs
    for x in (a, b, c):
        assert (x == table[2]).all()
    assert (d == np.concatenate([table[0, 2:4], table[0, 0:2]])).all()
    assert (free == table[:, 2]).all()


def test_scalar_index_outside_is_refused_or_skipped() -> None:
    table = numbered((6, 8), np.float32)

    def kernel(x: Any, i: Any, skip: bool) -> Any:
        where = put(i)
        t = nl.ndarray((1, 8), nl.float32)
        nisa.memset(dst=t, value=-1.0)
        mode = nisa.oob_mode.skip if skip else nisa.oob_mode.error
        nisa.dma_copy(dst=t, src=x.ap([[8, 1], [1, 8]], scalar_offset=where), oob_mode=mode)
        return get(t)

    for bad in (6, -1):
        index = np.array([[bad]], np.int32)
        assert (launch(kernel, table, index, True).value == -1).all()
        with pytest.raises(KernelError, match="outside its tensor"):
            launch(kernel, table, index, False)


def test_one_dynamic_dim_per_view() -> None:
    def kernel(x: Any, i: Any) -> None:
        where = put(i)
        x.select(0, where).select(0, where)

    with pytest.raises(KernelError, match="one dynamic dim"):
        launch(kernel, numbered((6, 4, 8), np.float32), np.array([[2]], np.int32))


def test_index_column_may_be_a_strided_view() -> None:
    table = numbered((32, 16), np.float32)
    index = np.stack([np.arange(8), np.arange(8) * 3, 31 - np.arange(8)], 1).astype(np.int32)

    def kernel(x: Any, i: Any) -> Any:
        tile = put(i)
        outs = []
        for c in range(3):
            t = nl.ndarray((8, 16), nl.float32)
            column = tile[:, c : c + 1] if c < 2 else tile.ap([[3, 8], [1, 1]], offset=c)
            nisa.dma_copy(dst=t, src=x.ap([[999, 8], [1, 16]], vector_offset=column))  # the leading stride is ignored
            outs.append(get(t))
        t = nl.ndarray((8, 16), nl.float32)
        nisa.dma_copy(dst=t, src=x.vector_select(0, tile[:, 1:2]))
        return *outs, get(t)

    outs = launch(kernel, table, index).outputs
    for c in range(3):
        assert (outs[c] == table[index[:, c]]).all()
    assert (outs[3] == table[index[:, 1]]).all()
