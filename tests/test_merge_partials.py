# SPDX-License-Identifier: Apache-2.0
"""`merge_partials`: the union of key sets, empty parts, the sink once, any order and tree of merging, both layouts."""

from __future__ import annotations

import math

import pytest
import torch

from sparse_mla.errors import ArgumentError, DTypeError, ShapeError
from sparse_mla.ops.merge_partials import MERGE_PARTIALS, MergePartialsCall, merge_partials
from sparse_mla.testing.attention_cases import attend

INF = float("inf")
NAN = float("nan")
BACKENDS = sorted({i.backend for i in MERGE_PARTIALS.candidates("auto")})
SCALE = 512**-0.5


def parts_of(counts: list[list[int]], heads: int = 3, seed: int = 0):
    """For each part and row that many keys. Returns (q [n, h, 512], outs, lses as prefill gives them, keys[row] all
    together).
    """
    g = torch.Generator().manual_seed(seed)
    rows = len(counts[0])
    q = torch.randn(rows, heads, 512, generator=g)
    outs, lses, keys = [], [], [[] for _ in range(rows)]
    for part in counts:
        out, lse = torch.full((rows, heads, 512), NAN), torch.full((rows, heads), INF)
        for row, count in enumerate(part):
            if count:
                k = torch.randn(count, 512, generator=g)
                result = attend(q[row], k, SCALE, None, exact=True)
                out[row], lse[row] = result[0].float(), result[1].float()
                keys[row].append(k)
        outs.append(out)
        lses.append(lse)
    return q, outs, lses, [torch.cat(k) if k else torch.zeros(0, 512) for k in keys]


def union(q, keys, sink=None):
    results = [attend(row, k, SCALE, sink, exact=True) for row, k in zip(q, keys, strict=True)]
    return torch.stack([r[0] for r in results]), torch.stack([r[1] for r in results])


COUNTS = [[5, 0, 0, 1, 9, 0], [7, 3, 0, 0, 1, 0], [0, 8, 0, 0, 40, 2]]  # row 2 is empty everywhere


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sink", [None, [0.3, -INF, INF]])
def test_equals_attention_over_the_union(sink, backend):
    q, outs, lses, keys = parts_of(COUNTS)
    sink = None if sink is None else torch.tensor(sink)
    out, lse = merge_partials(outs, lses, sink, out_dtype=torch.float32, backend=backend)
    expected, expected_lse = union(q, keys, sink)
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, atol=2e-6, rtol=1e-6)
    assert torch.equal(out[2], torch.zeros_like(out[2]))
    assert bool(torch.isposinf(lse[2]).all())
    assert torch.equal(merge_partials(outs, lses, sink, backend=backend).out, out.to(torch.bfloat16))  # one rounding


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_part_is_returned_as_it_is(backend):
    _, outs, lses, _ = parts_of(COUNTS)
    out, lse = merge_partials(outs[:1], lses[:1], out_dtype=torch.float32, backend=backend)
    empty = torch.isinf(lses[0])
    assert torch.equal(out[~empty], outs[0][~empty])
    assert torch.equal(out[empty], torch.zeros_like(out[empty]))
    assert torch.equal(lse, lses[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("marker", [INF, -INF])
@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 3e38])
def test_an_empty_part_is_not_read(garbage, marker, backend):
    _, outs, lses, _ = parts_of(COUNTS)
    zeroed, dirty = (
        [torch.where(lse[..., None].isinf(), filler, out) for out, lse in zip(outs, lses, strict=True)]
        for filler in (0.0, garbage)
    )
    clean = merge_partials(zeroed, lses, backend=backend)
    marked = [torch.where(lse.isinf(), marker, lse) for lse in lses]
    got = merge_partials(dirty, marked, backend=backend)
    assert torch.equal(got.out, clean.out)
    assert torch.equal(got.lse, clean.lse)


def test_adding_empty_parts_changes_no_bit():
    _, outs, lses, _ = parts_of(COUNTS)
    plain = merge_partials(outs, lses, out_dtype=torch.float32)
    nothing, infinite = torch.full_like(outs[0], NAN), torch.full_like(lses[0], INF)
    padded = merge_partials([nothing, *outs, nothing], [infinite, *lses, infinite], out_dtype=torch.float32)
    assert torch.equal(padded.out, plain.out)
    assert torch.equal(padded.lse, plain.lse)


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_tree_and_order_of_merging_agrees(backend):
    _, outs, lses, _ = parts_of([*COUNTS, [1, 1, 0, 60, 2, 0], [2, 0, 0, 3, 0, 0]])
    sink = torch.tensor([0.5, -1.0, 2.0])

    def merge(pairs, sink=None):
        return merge_partials(
            [p[0] for p in pairs], [p[1] for p in pairs], sink, out_dtype=torch.float32, backend=backend
        )

    pairs = list(zip(outs, lses, strict=True))
    flat = merge(pairs, sink)
    left = pairs[0]
    for pair in pairs[1:]:
        left = merge([left, pair])
    trees = [
        merge([left], sink),
        merge(pairs[::-1], sink),
        merge([merge(pairs[:2]), merge(pairs[2:])], sink),
        merge([pairs[3], merge([pairs[0], merge([pairs[4], pairs[2]])]), pairs[1]], sink),
    ]
    for tree in trees:
        torch.testing.assert_close(tree.out, flat.out, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(tree.lse, flat.lse, atol=2e-6, rtol=1e-6)


def test_the_sink_counts_once_and_never_in_the_lse():
    """Eight keys of logit 0 in two parts, sink 0: one ninth of the weight is the sink's."""
    value = torch.arange(512.0).expand(1, 1, 512)
    lse = torch.full((1, 1), math.log(4.0))
    out, merged = merge_partials([value, value], [lse, lse], torch.zeros(1), out_dtype=torch.float32)
    torch.testing.assert_close(out, value * 8 / 9)
    torch.testing.assert_close(merged, torch.full((1, 1), math.log(8.0)))
    for sink, expected in ((-INF, value), (INF, torch.zeros_like(value))):
        got = merge_partials([value, value], [lse, lse], torch.full((1,), sink), out_dtype=torch.float32)
        torch.testing.assert_close(got.out, expected)
        torch.testing.assert_close(got.lse, merged)


@pytest.mark.parametrize("level", [-3e4, -100.0, 0.0, 100.0, 3e4])
def test_large_lse_neither_overflow_nor_lose_the_weights(level):
    outs = [torch.full((1, 1, 4), 1.0), torch.full((1, 1, 4), 4.0)]
    lses = [torch.full((1, 1), level), torch.full((1, 1), level + math.log(2.0))]
    out, lse = merge_partials(outs, lses, out_dtype=torch.float32)
    torch.testing.assert_close(out, torch.full((1, 1, 4), 3.0), rtol=2e-3, atol=0)
    torch.testing.assert_close(lse, torch.full((1, 1), level + math.log(3.0)), rtol=1e-6, atol=2e-6)


def test_nan_of_a_real_part_is_not_hidden():
    out, lse = merge_partials([torch.ones(1, 1, 4), torch.full((1, 1, 4), NAN)], [torch.zeros(1, 1), torch.zeros(1, 1)])
    assert bool(out.isnan().all())
    assert bool(lse.isfinite().all())
    assert bool(merge_partials([torch.ones(1, 1, 4)], [torch.full((1, 1), NAN)]).lse.isnan().all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_decode_layout_is_prefill_layout_transposed(backend):
    _, outs, lses, _ = parts_of(COUNTS)
    flat = merge_partials(outs, lses, backend=backend)
    four = [out.reshape(2, 3, 3, 512) for out in outs]
    transposed = [lse.reshape(2, 3, 3).transpose(1, 2) for lse in lses]
    for lses_given in (transposed, [lse.contiguous() for lse in transposed]):
        got = merge_partials(four, lses_given, backend=backend)
        assert got.out.shape == (2, 3, 3, 512)
        assert got.lse.shape == (2, 3, 3)
        assert torch.equal(got.out.reshape(6, 3, 512), flat.out)
        assert torch.equal(got.lse.transpose(1, 2).reshape(6, 3), flat.lse)
    stacked = merge_partials(torch.stack(four), torch.stack(transposed), backend=backend)
    assert torch.equal(stacked.out.reshape(6, 3, 512), flat.out)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_do_not_depend_on_each_other_or_on_the_memory_limit(backend):
    _, outs, lses, _ = parts_of([[3] * 300, [1, 0] * 150], heads=2)
    whole = merge_partials(outs, lses, backend=backend)
    small = merge_partials(outs, lses, memory_limit=1 << 20, backend=backend)
    assert torch.equal(small.out, whole.out)
    assert torch.equal(small.lse, whole.lse)
    for row in (0, 1, 150, 299):
        one = merge_partials([o[row : row + 1] for o in outs], [x[row : row + 1] for x in lses], backend=backend)
        assert torch.equal(one.out, whole.out[row : row + 1])
        assert torch.equal(one.lse, whole.lse[row : row + 1])


def test_bfloat16_and_float64_parts():
    q, outs, lses, keys = parts_of(COUNTS)
    expected, _ = union(q, keys)
    narrow = merge_partials([out.to(torch.bfloat16) for out in outs], lses, out_dtype=torch.float32)
    torch.testing.assert_close(narrow.out.double(), expected, atol=2e-2, rtol=1e-2)
    wide = merge_partials([out.double() for out in outs], lses, out_dtype=torch.float64, backend="reference")
    assert wide.out.dtype == torch.float64
    torch.testing.assert_close(wide.out, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("shape", [(0, 3, 512), (0, 2, 3, 512), (2, 0, 3, 512)])
def test_zero_rows(shape):
    lse_shape = (shape[0], 3) if len(shape) == 3 else (shape[0], 3, shape[1])
    got = merge_partials([torch.empty(shape)] * 2, [torch.empty(lse_shape)] * 2)
    assert got.out.shape == shape
    assert got.lse.shape == lse_shape


def test_autocast_changes_nothing():
    _, outs, lses, _ = parts_of(COUNTS)
    outside = merge_partials(outs, lses, out_dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        inside = merge_partials(outs, lses, out_dtype=torch.float32)
    assert torch.equal(inside.out, outside.out)
    assert torch.equal(inside.lse, outside.lse)


def test_compiles_without_breaks_and_passes_opcheck():
    outs = [torch.randn(2, 1, 3, 16) for _ in range(2)]
    lses = [torch.randn(2, 3, 1) for _ in range(2)]
    sink = torch.zeros(3)
    compiled = torch.compile(merge_partials, fullgraph=True, backend="aot_eager")
    got, expected = compiled(outs, lses, sink), merge_partials(outs, lses, sink)
    assert torch.equal(got.out, expected.out)
    assert torch.equal(got.lse, expected.lse)
    assert got.lse.stride() == expected.lse.stride()
    call = MergePartialsCall.check(outs, lses, sink)
    torch.library.opcheck(torch.ops.sparse_mla.merge_partials_reference.default, call.flat())


def good():
    return {
        "outs": [torch.zeros(2, 1, 3, 8), torch.zeros(2, 1, 3, 8)],
        "lses": [torch.zeros(2, 3, 1), torch.zeros(2, 3, 1)],
        "attn_sink": torch.zeros(3),
    }


BAD = {
    "no parts": ({"outs": [], "lses": []}, ArgumentError, "at least one"),
    "counts differ": ({"lses": [torch.zeros(2, 3, 1)]}, ArgumentError, "same parts"),
    "shapes differ": ({"outs": [torch.zeros(2, 1, 3, 8), torch.zeros(2, 1, 3, 9)]}, ShapeError, r"outs\[1\]"),
    "dtypes differ": ({"outs": [torch.zeros(2, 1, 3, 8), torch.zeros(2, 1, 3, 8).double()]}, DTypeError, r"outs\[1\]"),
    "rank": ({"outs": [torch.zeros(3, 8)] * 2}, ShapeError, r"outs\[0\]"),
    "half": ({"outs": [torch.zeros(2, 1, 3, 8).half()] * 2}, DTypeError, r"outs\[0\]"),
    "lse in the order of out": ({"lses": [torch.zeros(2, 1, 3)] * 2}, ShapeError, r"lses\[0\]"),
    "lse dtype": ({"lses": [torch.zeros(2, 3, 1).double()] * 2}, DTypeError, r"lses\[0\]"),
    "sink dtype": ({"attn_sink": torch.zeros(3).bfloat16()}, DTypeError, "attn_sink"),
    "sink rank": ({"attn_sink": torch.zeros(1, 3)}, ShapeError, "attn_sink"),
    "sink heads": ({"attn_sink": torch.zeros(4)}, ShapeError, "attn_sink"),
    "no heads": (
        {"outs": [torch.zeros(2, 1, 0, 8)], "lses": [torch.zeros(2, 0, 1)], "attn_sink": None},
        ShapeError,
        "head",
    ),
    "out dtype": ({"out_dtype": torch.float16}, ArgumentError, "out_dtype"),
    "grad": ({"lses": [torch.zeros(2, 3, 1, requires_grad=True)] * 2}, DTypeError, "require grad"),
    "device": ({"attn_sink": torch.zeros(3, device="meta")}, ArgumentError, "must be on"),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_bad_input(name):
    change, kind, text = BAD[name]
    merge_partials(**good())
    with pytest.raises(kind, match=text) as caught:
        merge_partials(**(good() | change))
    assert str(caught.value).startswith("merge_partials: ")
