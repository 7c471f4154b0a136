# SPDX-License-Identifier: Apache-2.0
"""`sparse_decode`, each test on every backend present: golden cases, what is never read, empty rows, sink and lse,
layouts and strides,
large slots, independence of the batch, compilation, bad input.

Shapes, page sizes, head counts and list widths are swept by the cases; here is what a case cannot say.
"""

from __future__ import annotations

import json
import math
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from sparse_mla import config
from sparse_mla.caches import KVScope, PagedCache
from sparse_mla.errors import (
    ArgumentError,
    DTypeError,
    FormatError,
    ShapeError,
    SlotRangeError,
    SparseMlaError,
    UnsupportedError,
)
from sparse_mla.formats import BF16, INDEX_FP8, V41_FP4, V41_FP8, RecordFormat, decode, encode
from sparse_mla.ops.merge_partials import merge_partials
from sparse_mla.ops.sparse_decode import SPARSE_DECODE, SparseDecodeCall, sparse_decode
from sparse_mla.ops.store_records import store_records
from sparse_mla.testing import numeric
from sparse_mla.testing.attention_cases import SOFTMAX_SCALE, attend
from sparse_mla.testing.case import clamped_randn
from sparse_mla.testing.pages import Pages

INF, NAN = float("inf"), float("nan")
IMPLEMENTATIONS = SPARSE_DECODE.candidates("auto")
BACKENDS = sorted({i.backend for i in IMPLEMENTATIONS})
VECTORS = json.loads((Path(__file__).parent / "data" / "vectors" / "sparse_attention.json").read_text())
FORMATS = {"fp8": V41_FP8, "fp4": V41_FP4, "bf16": BF16}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def queries(b: int, s_q: int = 1, h_q: int = 4, seed: int = 1) -> torch.Tensor:
    return clamped_randn(generator(seed), b, s_q, h_q, 512)


def records(n: int, fmt: RecordFormat = V41_FP8, seed: int = 0) -> torch.Tensor:
    return encode(clamped_randn(generator(seed), n, 512, scale=0.1), fmt)


def filled(pages: Pages, slots: list[int] | None = None, fill: int = 0, seed: int = 0) -> tuple[torch.Tensor, Any]:
    """(pool, cache) with random records in the given slots (None: all) and `fill` in every other byte."""
    pool = pages.empty(fill)
    chosen = torch.arange(pages.num_slots) if slots is None else torch.tensor(slots, dtype=torch.long)
    pages.write(pool, chosen, records(pages.num_slots, pages.format, seed)[chosen])
    return pool, pages.cache(pool)


def lists(rows: list[list[int]], width: int, b: int | None = None) -> torch.Tensor:
    """[b, s_q, width] int32, each row followed by -1."""
    table = torch.tensor([row + [-1] * (width - len(row)) for row in rows], dtype=torch.int32)
    return table.reshape(len(rows) if b is None else b, -1, width)


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def judge(got, q, keys, sink=None, scale=SOFTMAX_SCALE):
    """The rules of the operator against float64; `keys[row]` are the decoded records of each of the b * s_q rows."""
    flat = q.reshape(-1, *q.shape[2:])
    results = [[attend(row, k, scale, sink, way) for row, k in zip(flat, keys, strict=True)] for way in (True, False)]
    exact, plain = (torch.stack([r[0] for r in way]).reshape(q.shape) for way in results)
    lse = torch.stack([r[1] for r in results[0]]).reshape(q.shape[:3]).transpose(1, 2)
    reasons = numeric.by_element("out", got.out, exact, numeric.DECODE_OUT)
    reasons += numeric.by_element("lse", got.lse, lse, numeric.DECODE_LSE)
    reasons += numeric.within_plain("out", got.out, exact, plain.to(got.out.dtype))
    assert not reasons, reasons


@pytest.fixture(params=BACKENDS)
def backend(request) -> str:
    return str(request.param)


# --- golden cases ----------------------------------------------------------------------------------------------------


def golden(text: str, shape: list[int]) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8).reshape(shape)


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda c: c["name"])
def test_golden_cases(case, backend):
    def lengths(values):
        return None if values is None else torch.tensor(values, dtype=torch.int32)

    q = golden(VECTORS["q_bf16le"], [-1]).view(torch.bfloat16).reshape(VECTORS["q_shape"])
    main = golden("".join(VECTORS["k_cache_hex"]), VECTORS["k_cache_shape"])
    scopes = [KVScope(main, torch.tensor(VECTORS["indices"], dtype=torch.int32), lengths(case["topk_length"]))]
    if case["extra"] is not None:
        shape = [*VECTORS["extra_288_shape"][:3], case["extra"]]
        extra = golden("".join(VECTORS[f"extra_{case['extra']}_hex"]), shape)
        indices = torch.tensor(VECTORS["extra_indices"], dtype=torch.int32)
        scopes.append(KVScope(extra, indices, lengths(case["extra_topk_length"])))
    sink = None if case["attn_sink"] is None else torch.tensor([float(v) for v in case["attn_sink"]])
    expected = golden(case["out_f32le"], [-1]).view(torch.float32).reshape(VECTORS["out_shape"])
    rows = [[float(v) for v in row] for row in case["lse_row_head"]]
    lse = torch.tensor(rows, dtype=torch.float64).reshape(2, 2, 3).transpose(1, 2)
    for out_dtype in (torch.bfloat16, torch.float32):
        got = sparse_decode(
            q, scopes, softmax_scale=VECTORS["softmax_scale"], attn_sink=sink, out_dtype=out_dtype, backend=backend
        )
        reasons = numeric.by_element("out", got.out, expected, numeric.DECODE_OUT)
        reasons += numeric.by_element("lse", got.lse, lse, numeric.DECODE_LSE)
        assert not reasons, reasons
    assert len(VECTORS["cases"]) == 7


def test_result_shapes_dtypes_and_strides(backend):
    _, cache = filled(Pages(num_pages=1))
    got = sparse_decode(queries(2, 3), KVScope(cache, lists([[0]] * 6, 4, b=2)), backend=backend)
    assert (got.out.shape, got.out.dtype) == ((2, 3, 4, 512), torch.bfloat16)
    assert got.out.is_contiguous()
    assert (got.lse.shape, got.lse.dtype) == ((2, 4, 3), torch.float32)
    assert got.lse.transpose(1, 2).is_contiguous()
    out, lse = got
    assert out is got.out
    assert lse is got.lse


# --- what is never read ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [0x7F, 0xFF])
@pytest.mark.parametrize("layout", ["interleaved", "planar"])
@pytest.mark.parametrize("extra", ["fp4", "fp8", "bf16"])
def test_bytes_nobody_selects_change_no_bit(extra, layout, poison, backend):
    """Valid slots lie past page 0, a quarter of each list is -1, and everything else - page 0, padding between
    blocks, the pool
    around the region - is poison."""
    results = []
    q, sink = queries(2, h_q=64), torch.linspace(-2, 2, 64)
    for fill in (0x00, poison):
        scopes = []
        for fmt, width, seed in ((V41_FP8, 128, 2), (FORMATS[extra], 192, 3)):
            pages = Pages(
                format=fmt, num_pages=8, page_size=64, layout=layout, padding_bytes=64, region_offset=fmt.record_bytes
            )
            g = generator(seed)
            indices = torch.randint(64, 512, (2, 1, width), generator=g, dtype=torch.int32)
            indices[torch.rand(indices.shape, generator=g) < 0.25] = -1
            used = sorted(set(indices[indices >= 0].tolist()))
            scopes.append(KVScope(filled(pages, used, fill, seed)[1], indices))
        results.append(sparse_decode(q, scopes, attn_sink=sink, backend=backend))
    assert same(*results)
    assert bool(results[0].out.isfinite().all())


def test_columns_behind_the_length_are_not_looked_at(backend):
    """They hold slots whose records are NaN, then slots far outside the cache: the result is that of the shorter
    list."""
    pages = Pages(num_pages=4, page_size=64)
    _, cache = filled(pages, list(range(64)), fill=0xFF)
    visible = [[3, 9, 27, 1, 60], [5, 6]]
    q, lengths = queries(2), torch.tensor([5, 2], dtype=torch.int32)
    short = sparse_decode(q, KVScope(cache, lists(visible, 5)), backend=backend)
    for stale in (200, 2**31 - 1, -2, -(2**31)):
        indices = lists(visible, 128)
        for row, n in enumerate(lengths.tolist()):
            indices[row, :, n:] = stale
        got = sparse_decode(q, KVScope(cache, indices, lengths), backend=backend)
        judge(got, q, [cached(pages, cache, row) for row in visible], scale=512**-0.5)
        if backend == "reference":
            assert same(got, short)


def cached(pages: Pages, cache: PagedCache, slots: list[int]) -> torch.Tensor:
    """Decoded records of slots, read by the independent layout of the test pages."""
    if not slots:
        return torch.zeros(0, 512, dtype=torch.bfloat16)
    data = cache.data if isinstance(cache, PagedCache) else cache
    pool = data.as_strided((pages.region_offset + pages.num_pages * pages.block_stride,), (1,), 0)
    return decode(pages.read(pool, torch.tensor(slots)), pages.format)


def test_minus_one_may_stand_anywhere(backend):
    """Leading, interleaved, trailing and random: as the compacted list, in both scopes at once."""
    main, extra = Pages(num_pages=4), Pages(format=V41_FP4, num_pages=4)
    (_, cache), (_, more) = filled(main), filled(extra, seed=5)
    g = generator(4)
    chosen, added = (torch.randperm(256, generator=g)[:40].tolist() for _ in range(2))
    q, sink = queries(1), torch.tensor([0.1, -3.0, 2.0, -INF])
    keys = [torch.cat([cached(main, cache, chosen), cached(extra, more, added)])]

    def attend_lists(places):
        scopes = []
        for holder, slots in ((cache, chosen), (more, added)):
            indices = torch.full((1, 1, 128), -1, dtype=torch.int32)
            indices[0, 0, places] = torch.tensor(slots, dtype=torch.int32)
            scopes.append(KVScope(holder, indices))
        return sparse_decode(q, scopes, softmax_scale=SOFTMAX_SCALE, attn_sink=sink, backend=backend)

    compact = attend_lists(list(range(40)))
    judge(compact, q, keys, sink)
    for places in (
        list(range(88, 128)),
        list(range(0, 80, 2)),
        list(range(1, 80, 2)),
        torch.randperm(128, generator=g)[:40].sort().values.tolist(),
    ):
        got = attend_lists(places)
        judge(got, q, keys, sink)
        if backend == "reference":
            assert same(got, compact)


@pytest.mark.parametrize("bad", [-2, -(2**31), 256, 2147480000, 2**31 - 1])
@pytest.mark.parametrize("scope", [0, 1])
def test_a_slot_outside_the_cache_is_an_error(scope, bad, backend):
    """Only -1 is empty. Anything else that is no slot would attend somebody else's memory."""
    _, cache = filled(Pages(num_pages=4))
    indices = [lists([[1, 2, 3]], 8), lists([[4]], 8)]
    indices[scope][0, 0, 5] = bad
    with pytest.raises(SlotRangeError, match=rf"scopes\[{scope}\].indices .*{bad}"):
        sparse_decode(queries(1), [KVScope(cache, i) for i in indices], backend=backend)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_codes_of_selected_records_count_as_zero(code, backend):
    """NaN elements, and a whole group under the NaN scale."""
    pages = Pages(num_pages=1, page_size=4)
    pool, cache = filled(pages)
    pool[0:7] = code
    pool[512 + 5] = 0xFF
    got = sparse_decode(queries(1), KVScope(cache, lists([[0, 1]], 2)), softmax_scale=SOFTMAX_SCALE, backend=backend)
    keys = cached(pages, cache, [0, 1])
    assert not keys[0, :7].any()
    assert not keys[0, 160:192].any()
    judge(got, queries(1), [keys])


# --- empty rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["indices", "length"])
@pytest.mark.parametrize("sink", [None, 0.4, -INF, INF])
def test_empty_rows_are_zero_whatever_the_sink(sink, how, backend):
    (_, cache), (_, more) = filled(Pages(num_pages=4)), filled(Pages(format=V41_FP4, num_pages=4))
    q = queries(4, h_q=64)
    sinks = None if sink is None else torch.full((64,), sink)
    g = generator(6)
    scopes = []
    for holder in (cache, more):
        indices, lengths = torch.randint(0, 256, (4, 1, 64), generator=g, dtype=torch.int32), None
        if how == "indices":
            indices[3] = -1
        else:
            lengths = torch.tensor([64, 10, 1, 0], dtype=torch.int32)
        scopes.append(KVScope(holder, indices, lengths))
    got = sparse_decode(q, scopes, attn_sink=sinks, backend=backend)
    assert torch.equal(got.out[3], torch.zeros_like(got.out[3]))
    assert bool(torch.isposinf(got.lse[3]).all())
    assert bool(got.lse[:3].isfinite().all())
    assert bool(got.out.abs().amax().isfinite())
    first = [KVScope(s.cache, s.indices[:3], None if s.topk_length is None else s.topk_length[:3]) for s in scopes]
    assert same(sparse_decode(q[:3], first, attn_sink=sinks, backend=backend), (got.out[:3], got.lse[:3]))


@pytest.mark.parametrize("empty", [0, 1])
def test_one_empty_scope_beside_a_full_one(empty, backend):
    pages = (Pages(num_pages=2), Pages(format=V41_FP4, num_pages=2))
    held = [filled(p)[1] for p in pages]
    rows = [[4, 5, 6], [7]]
    for lengths in (None, torch.zeros(2, dtype=torch.int32)):
        scopes = [
            KVScope(cache, lists([[], []] if number == empty and lengths is None else rows, 64),
                    lengths if number == empty else None)
            for number, cache in enumerate(held)
        ]  # fmt: skip
        got = sparse_decode(queries(2), scopes, softmax_scale=SOFTMAX_SCALE, backend=backend)
        judge(got, queries(2), [cached(pages[1 - empty], held[1 - empty], row) for row in rows])


def test_no_rows_and_no_pages(backend):
    _, cache = filled(Pages(num_pages=1))
    for b, s_q in ((0, 1), (2, 0)):
        indices = torch.empty(b, s_q, 4, dtype=torch.int32)
        got = sparse_decode(queries(1).new_empty(b, s_q, 4, 512), KVScope(cache, indices), backend=backend)
        assert got.out.shape == (b, s_q, 4, 512)
        assert got.lse.shape == (b, 4, s_q)
    nothing = torch.empty(0, 64, 1, 528, dtype=torch.uint8)
    got = sparse_decode(queries(2), KVScope(nothing, lists([[], []], 4)), backend=backend)
    assert not got.out.any()
    assert bool(torch.isposinf(got.lse).all())


@pytest.mark.parametrize("length", [0, 1, 127, 128, 129, 2**31 - 1])
def test_lengths_up_to_and_past_the_width(length, backend):
    pages = Pages(num_pages=2)
    _, cache = filled(pages)
    indices = torch.arange(128, dtype=torch.int32).reshape(1, 1, 128)
    scope = KVScope(cache, indices, torch.tensor([length], dtype=torch.int32))
    got = sparse_decode(queries(1), scope, softmax_scale=SOFTMAX_SCALE, backend=backend)
    judge(got, queries(1), [cached(pages, cache, list(range(min(length, 128))))])


def test_a_length_covers_every_row_of_its_sequence(backend):
    pages = Pages(num_pages=2)
    _, cache = filled(pages)
    indices = torch.randperm(128, generator=generator(7)).to(torch.int32).reshape(2, 2, 32)
    lengths = torch.tensor([5, 20], dtype=torch.int32)
    got = sparse_decode(queries(2, 2), KVScope(cache, indices, lengths), softmax_scale=SOFTMAX_SCALE, backend=backend)
    rows = [indices[i, j, : int(lengths[i])].tolist() for i in range(2) for j in range(2)]
    judge(got, queries(2, 2), [cached(pages, cache, row) for row in rows])


# --- sink and lse ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 8, 100])
@pytest.mark.parametrize("fmt", ["fp8", "fp4", "bf16"])
def test_zero_queries_average_and_the_lse_is_the_natural_log(fmt, count, backend):
    """lse = ln n whatever the sink; a sink of 0 takes the weight of one key: mean * n / (n + 1)."""
    pages = Pages(format=FORMATS[fmt], num_pages=2)
    _, cache = filled(pages)
    scope = KVScope(cache, lists([list(range(count))], 100))
    q = torch.zeros(1, 1, 2, 512, dtype=torch.bfloat16)
    mean = cached(pages, cache, list(range(count))).double().mean(dim=0)
    for sink, share in ((None, 1.0), (0.0, count / (count + 1)), (-INF, 1.0), (INF, 0.0)):
        sinks = None if sink is None else torch.full((2,), sink)
        got = sparse_decode(q, scope, attn_sink=sinks, out_dtype=torch.float32, backend=backend)
        torch.testing.assert_close(got.lse, torch.full((1, 2, 1), math.log(count)), atol=1e-6, rtol=0)
        torch.testing.assert_close(
            got.out[0, 0, 0].double(), mean * share, atol=1e-4, rtol=1e-5 if backend == "reference" else 1e-2
        )
        assert torch.equal(got.out[0, 0, 0], got.out[0, 0, 1])
        if share == 0.0:
            assert not got.out.any()


def test_each_head_has_its_own_sink(backend):
    pages = Pages(num_pages=2)
    _, cache = filled(pages)
    rows = [list(range(100)), [3, 3, 9]]
    sink = torch.tensor([0.5, -INF, INF, 3.0])
    scope = KVScope(cache, lists(rows, 100))
    with_sink, without = (
        sparse_decode(
            queries(2), scope, softmax_scale=SOFTMAX_SCALE, attn_sink=s, out_dtype=torch.float32, backend=backend
        )
        for s in (sink, None)
    )
    judge(with_sink, queries(2), [cached(pages, cache, row) for row in rows], sink)
    assert torch.equal(with_sink.lse, without.lse)
    assert torch.equal(with_sink.out[:, :, 1], without.out[:, :, 1])
    assert not with_sink.out[:, :, 2].any()
    assert not torch.equal(with_sink.out[:, :, 0], without.out[:, :, 0])


def test_two_halves_merge_into_the_whole(backend):
    (_, cache), (_, more) = filled(Pages(num_pages=4)), filled(Pages(format=V41_FP4, num_pages=4))
    q, sink = queries(3, 2), torch.tensor([0.5, -1.0, INF, -INF])
    g = generator(9)
    first, second = (torch.randint(-1, 256, (3, 2, 96), generator=g, dtype=torch.int32) for _ in range(2))
    second[1] = -1
    options = {"softmax_scale": SOFTMAX_SCALE, "out_dtype": torch.float32, "backend": backend}
    parts = [sparse_decode(q, KVScope(c, i), **options) for c, i in ((cache, first), (more, second))]
    merged = merge_partials([p.out for p in parts], [p.lse for p in parts], sink, out_dtype=torch.float32)
    whole = sparse_decode(q, [KVScope(cache, first), KVScope(more, second)], attn_sink=sink, **options)
    torch.testing.assert_close(merged.out, whole.out, atol=1e-3, rtol=2.01 / 128)
    torch.testing.assert_close(merged.lse, whole.lse, atol=1e-6, rtol=8.01 / 65536)


def test_a_slot_listed_twice_counts_twice(backend):
    pages = Pages(num_pages=1)
    _, cache = filled(pages)
    got = sparse_decode(queries(1), KVScope(cache, lists([[3, 3, 5]], 3)), softmax_scale=SOFTMAX_SCALE, backend=backend)
    judge(got, queries(1), [cached(pages, cache, [3, 3, 5])])
    scopes = [KVScope(cache, lists([[3]], 1)), KVScope(cache, lists([[3, 5]], 2))]
    judge(sparse_decode(queries(1), scopes, softmax_scale=SOFTMAX_SCALE, backend=backend), queries(1),
          [cached(pages, cache, [3, 3, 5])])  # fmt: skip


@pytest.mark.parametrize("level", [30.0, -30.0, 200.0])
def test_large_logits_do_not_overflow(level, backend):
    """Keys of one repeated value, so that every logit is near `level`."""
    q = torch.full((1, 1, 2, 512), 1.0, dtype=torch.bfloat16)
    data = torch.full((1, 8, 1, 512), 1.0, dtype=torch.bfloat16)
    data[0, 1] = 1.0078125
    scope = KVScope(data, lists([[0, 1, 2]], 4))
    got = sparse_decode(q, scope, softmax_scale=level / 512, out_dtype=torch.float32, backend=backend)
    exact = attend(q[0, 0], data[0, :3, 0], level / 512, None, True)
    torch.testing.assert_close(got.out[0, 0].double(), exact[0], atol=1e-3, rtol=1e-2)
    torch.testing.assert_close(got.lse[0, :, 0].double(), exact[1], atol=1e-4, rtol=1e-5)


# --- layouts, strides, pools -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["fp8", "fp4", "bf16"])
@pytest.mark.parametrize("page_size", [1, 2, 5, 61, 64, 128, 256])
def test_every_way_to_lay_out_the_same_records_gives_the_same_bits(page_size, fmt, backend):
    """Interleaved, planar, padded blocks, a region of a pool (at an odd offset too), a bare strided view."""
    fmt = FORMATS[fmt]
    num_pages = max(2, 256 // page_size)
    indices = torch.randint(-1, num_pages * page_size, (2, 1, 96), generator=generator(11), dtype=torch.int32)
    results = {}
    for name, options in {
        "interleaved": {},
        "planar": {"layout": "planar"},
        "padded": {"padding_bytes": 576},
        "padded planar": {"padding_bytes": 96, "layout": "planar"},
        "bare": {"padding_bytes": 1_002_240 - page_size * fmt.record_bytes, "bare": True},
        "region": {"region_offset": 4352, "padding_bytes": 4352},
        "odd region": {"region_offset": 4355, "padding_bytes": 13},
        "odd region planar": {"region_offset": 1, "padding_bytes": 2, "layout": "planar"},
    }.items():
        if name == "bare" and page_size not in (1, 64):
            continue
        pages = Pages(format=fmt, num_pages=num_pages, page_size=page_size, **options)
        if fmt is BF16 and "region_offset" in options and options["region_offset"] % 2:
            continue  # bfloat16 elements lie on even bytes
        pool, cache = filled(pages, fill=0xFF)
        if isinstance(cache, torch.Tensor) and fmt is BF16:
            continue  # a bare BF16 cache is a bfloat16 tensor
        before = pool.clone() if name != "bare" else None
        results[name] = sparse_decode(queries(2), KVScope(cache, indices), backend=backend)
        if before is not None:
            assert torch.equal(pool, before)
    assert len(results) >= 5
    for name, got in results.items():
        assert same(got, results["interleaved"]), name


def test_a_block_of_several_layers_serves_each_of_them(backend):
    """Three caches of different formats in one physical block; each view reads its own region only."""
    page_size, num_pages = 64, 4
    offsets, end = [], 0
    for fmt in (V41_FP8, V41_FP4, V41_FP8):
        offsets.append(end)
        end += page_size * fmt.record_bytes
    stride = end + 128
    pool = torch.full((num_pages * stride,), 0xFF, dtype=torch.uint8)
    caches, alone = [], []
    for seed, (fmt, offset) in enumerate(zip((V41_FP8, V41_FP4, V41_FP8), offsets, strict=True)):
        caches.append(PagedCache(pool, fmt, page_size, region_offset=offset, block_stride=stride))
        values = clamped_randn(generator(seed), num_pages * page_size, 512, scale=0.1)
        slots = torch.arange(num_pages * page_size)
        store_records(values, caches[-1], slots)
        alone.append(filled(Pages(format=fmt, num_pages=num_pages, page_size=page_size))[1])
        store_records(values, alone[-1], slots)
    indices = torch.randint(-1, 256, (2, 1, 64), generator=generator(3), dtype=torch.int32)
    for first, second in ((0, 1), (2, 1), (1, 0), (0, 2)):
        got, expected = (
            sparse_decode(queries(2), [KVScope(c[first], indices), KVScope(c[second], indices)], backend=backend)
            for c in (caches, alone)
        )
        assert same(got, expected)


@pytest.mark.parametrize("page_size", [16, 48, 61, 96, 160, 192, 224])
def test_every_token_of_every_page_is_attended_once(page_size, backend):
    """One marker element per token in a reversed order of pages; the weights of 3072 zero logits are 1 / 3072 each."""
    tokens = 3072
    num_pages = -(-tokens // page_size)
    data = torch.zeros(num_pages, page_size, 1, 512, dtype=torch.bfloat16)
    token = torch.arange(tokens)
    slots = (num_pages - 1 - token // page_size) * page_size + token % page_size
    data.view(-1, 512)[slots, token % 512] = (1.0 + token // 512).to(torch.bfloat16)
    got = sparse_decode(
        torch.zeros(1, 1, 1, 512, dtype=torch.bfloat16),
        KVScope(data, slots.to(torch.int32).reshape(1, 1, -1)),
        out_dtype=torch.float32,
        backend=backend,
    )
    expected = torch.full((512,), sum(range(1, 7)) / tokens)  # each column holds the markers 1 .. 6
    torch.testing.assert_close(got.out.flatten(), expected, rtol=1e-4 if backend == "reference" else 1e-2, atol=0)
    assert abs(float(got.lse) - math.log(tokens)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_other_dtypes_of_the_same_bytes(dtype, backend):
    _, cache = filled(Pages(num_pages=2, bare=True))
    indices = lists([[1, 2], [100]], 4)
    expected = sparse_decode(queries(2), KVScope(cache, indices), backend=backend)
    assert same(sparse_decode(queries(2), KVScope(cache.view(dtype), indices), backend=backend), expected)


def test_strided_arguments(backend):
    _, cache = filled(Pages(num_pages=2))
    q, indices = queries(2, 3), torch.randint(-1, 128, (2, 3, 16), generator=generator(2), dtype=torch.int32)
    lengths = torch.tensor([16, 3], dtype=torch.int32)
    sink = torch.tensor([0.0, 1.0, -1.0, 2.0])
    expected = sparse_decode(q, KVScope(cache, indices, lengths), attn_sink=sink, backend=backend)
    wide_q = torch.full((2, 5, 6, 512), NAN, dtype=torch.bfloat16)
    wide_q[:, 1:4, 2:] = q
    wide_indices = torch.full((2, 3, 40), 2**31 - 1, dtype=torch.int32)
    wide_indices[..., 7:23] = indices
    got = sparse_decode(
        wide_q[:, 1:4, 2:],
        KVScope(cache, wide_indices[..., 7:23], torch.stack([lengths, lengths + 9], dim=1)[:, 0]),
        attn_sink=torch.stack([sink, sink * NAN], dim=1)[:, 0],
        backend=backend,
    )
    assert same(got, expected)
    backwards = q.flip(0).transpose(0, 1).contiguous().transpose(0, 1)
    again = sparse_decode(backwards, KVScope(cache, indices.flip(0), lengths.flip(0)), attn_sink=sink, backend=backend)
    assert same((again.out.flip(0), again.lse.flip(0)), expected)


# --- large caches ----------------------------------------------------------------------------------------------------


def reserved(size: int) -> torch.Tensor:
    """`size` zero bytes of address space, of which only the pages that are touched cost memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    try:
        memory = mmap.mmap(-1, size, flags=flags)
    except (OSError, OverflowError) as error:
        pytest.skip(f"{size >> 20} MiB of address space cannot be reserved here: {error}")
    return torch.frombuffer(memory, dtype=torch.uint8)


@pytest.mark.parametrize("layout", ["interleaved", "planar"])
@pytest.mark.parametrize(("fmt", "num_pages", "far"), [("fp8", 63_600, 63_560), ("fp4", 116_600, 116_560)])
def test_bytes_past_2_gib(fmt, num_pages, far, layout, backend):
    """A record whose byte offset does not fit int32 is attended as its copy near the start."""
    fmt = FORMATS[fmt]
    assert far * 64 * fmt.record_bytes > 2**31
    cache = PagedCache(reserved(num_pages * 64 * fmt.record_bytes), fmt, 64, layout=layout)
    values = clamped_randn(generator(), 1, 512).repeat(2, 1)
    store_records(values, cache, torch.tensor([far * 64 + 3, 64 + 3]))
    near, distant = (
        sparse_decode(queries(1), KVScope(cache, lists([[slot, slot + 1]], 4)), backend=backend)
        for slot in (64 + 3, far * 64 + 3)
    )
    assert same(near, distant)
    assert bool(near.out.any())


@pytest.mark.parametrize("layout", ["interleaved", "planar"])
def test_the_largest_slots_of_int32(layout, backend):
    """2^31 slots of 288 bytes are 618 GB of address space; slots around 2^24 are where float32 arithmetic loses the
    odd ones."""
    cache = PagedCache(reserved(2**31 * V41_FP4.record_bytes), V41_FP4, 64, layout=layout)
    slots = [2**31 - 1, 2**31 - 66, 2**24 - 1, 2**24, 2**24 + 1, 2**24 + 65]
    values = clamped_randn(generator(), 6, 512, scale=0.1)
    store_records(values, cache, torch.tensor(slots, dtype=torch.int32))
    got = sparse_decode(queries(1), KVScope(cache, lists([slots], 8)), softmax_scale=SOFTMAX_SCALE, backend=backend)
    judge(got, queries(1), [decode(encode(values, V41_FP4), V41_FP4)])


# --- independence of the batch, determinism --------------------------------------------------------------------------


def production(b: int, h_q: int = 8):
    (_, cache), (_, more) = filled(Pages(num_pages=4)), filled(Pages(format=V41_FP4, num_pages=4), seed=3)
    g = generator(13)
    indices = torch.randint(-1, 256, (b, 1, 64), generator=g, dtype=torch.int32)
    others = torch.randint(-1, 256, (b, 1, 97), generator=g, dtype=torch.int32)
    lengths = torch.randint(0, 98, (b,), generator=g, dtype=torch.int32)
    lengths[2::5] = 0
    return queries(b, 1, h_q), [KVScope(cache, indices), KVScope(more, others, lengths)], torch.linspace(-2, 2, h_q)


def rows_of(scopes, rows):
    return [KVScope(s.cache, s.indices[rows], None if s.topk_length is None else s.topk_length[rows]) for s in scopes]


def test_a_row_does_not_depend_on_its_neighbours(backend):
    q, scopes, sink = production(130)
    whole = sparse_decode(q, scopes, attn_sink=sink, backend=backend)
    for b in (1, 2, 7, 64, 65, 128):
        for start in (0, 2):
            rows = slice(start, start + b)
            got = sparse_decode(q[rows], rows_of(scopes, rows), attn_sink=sink, backend=backend)
            assert same(got, (whole.out[rows], whole.lse[rows]))
    shuffled = torch.randperm(130, generator=generator(1))
    got = sparse_decode(q[shuffled], rows_of(scopes, shuffled), attn_sink=sink, backend=backend)
    assert same(got, (whole.out[shuffled], whole.lse[shuffled]))
    flat = [KVScope(s.cache, s.indices.reshape(65, 2, -1), None) for s in scopes[:1]]
    grouped = sparse_decode(q.reshape(65, 2, 8, 512), flat, backend=backend)
    single = sparse_decode(q, scopes[:1], backend=backend)
    assert torch.equal(grouped.out.reshape(130, 1, 8, 512), single.out)
    assert torch.equal(grouped.lse.transpose(1, 2).reshape(130, 1, 8), single.lse.transpose(1, 2))


@pytest.mark.parametrize("h_q", [1, 8, 64])
def test_threads_repeats_and_dirty_memory_change_no_bit(h_q, backend):
    q, scopes, sink = production(4, h_q)
    expected = sparse_decode(q, scopes, attn_sink=sink, backend=backend)
    before = torch.get_num_threads()
    try:
        for threads in (before,) * 3 if backend == "reference" else (1, 2, 8):  # the reference's products are BLAS's
            torch.set_num_threads(threads)
            for _ in range(7):
                dirt = torch.full((4, 1, h_q, 512), NAN)
                del dirt
                assert same(sparse_decode(q, scopes, attn_sink=sink, backend=backend), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("h_q", [1, 2, 8, 11, 48, 66, 96])
def test_fewer_heads_are_the_first_heads_of_more(h_q, backend):
    q, scopes, sink = production(2, 128)
    wide = sparse_decode(q, scopes, attn_sink=sink, backend=backend)
    got = sparse_decode(q[:, :, :h_q], scopes, attn_sink=sink[:h_q], backend=backend)
    torch.testing.assert_close(got.out, wide.out[:, :, :h_q], atol=1e-3, rtol=2.01 / 128)
    torch.testing.assert_close(got.lse, wide.lse[:, :h_q], atol=1e-6, rtol=8.01 / 65536)


@pytest.mark.full
@pytest.mark.parametrize("topk", [1, 64, 100, 133, 192, 256, 512, 640, 1024, 2048])
@pytest.mark.parametrize("h_q", [8, 16, 32, 64, 128])
def test_any_width_with_any_heads_and_batch(h_q, topk, backend):
    pages = Pages(num_pages=34, page_size=64)
    _, cache = filled(pages)
    for b in (1, 7, 64, 65):
        indices = torch.randint(-1, pages.num_slots, (b, 1, topk), generator=generator(b), dtype=torch.int32)
        got = sparse_decode(queries(b, 1, h_q), KVScope(cache, indices), softmax_scale=SOFTMAX_SCALE, backend=backend)
        checked = slice(0, 3)
        rows = [[s for s in row if s >= 0] for row in indices[checked, 0].tolist()]
        judge(got._replace(out=got.out[checked], lse=got.lse[checked]), queries(b, 1, h_q)[checked],
              [cached(pages, cache, row) for row in rows])  # fmt: skip


def test_memory_limit_bounds_the_scratch_and_changes_nothing_but_rounding():
    """A list of 8192 keys in chunks of 128: the online softmax agrees with one pass in float64."""
    pages = Pages(format=V41_FP4, num_pages=64, page_size=128)
    _, cache = filled(pages)
    scope = KVScope(cache, torch.arange(8192, dtype=torch.int32).reshape(1, 1, -1))
    options = {"softmax_scale": SOFTMAX_SCALE, "out_dtype": torch.float64, "backend": "reference"}
    whole, chunked = (sparse_decode(queries(1), scope, memory_limit=m, **options) for m in (1 << 30, 1 << 20))
    torch.testing.assert_close(chunked.out, whole.out, atol=1e-12, rtol=1e-9)
    torch.testing.assert_close(chunked.lse, whole.lse)


# --- modes of torch --------------------------------------------------------------------------------------------------


def test_autocast_and_inference_mode_change_no_bit(backend):
    q, scopes, sink = production(3)
    expected = sparse_decode(q, scopes, attn_sink=sink, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        assert same(sparse_decode(q, scopes, attn_sink=sink, backend=backend), expected)
    with torch.inference_mode():
        assert same(sparse_decode(q, scopes, attn_sink=sink, backend=backend), expected)
    with torch.no_grad():
        parameter = torch.nn.Parameter(sink)
        assert same(sparse_decode(q, scopes, attn_sink=parameter, backend=backend), expected)


def test_fake_tensors_have_the_real_shapes_and_strides(backend):
    q, scopes, sink = production(3)
    real = sparse_decode(q, scopes, attn_sink=sink, backend=backend)
    with torch._subclasses.FakeTensorMode() as mode:
        faked = [
            KVScope(
                PagedCache(mode.from_tensor(s.cache.data), s.cache.format, s.cache.page_size),
                mode.from_tensor(s.indices),
                None if s.topk_length is None else mode.from_tensor(s.topk_length),
            )
            for s in scopes
        ]
        fake = sparse_decode(mode.from_tensor(q), faked, attn_sink=mode.from_tensor(sink), backend=backend)
    for a, b in zip(fake, real, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda i: i.name)
def test_opcheck(implementation):
    q, scopes, sink = production(2)
    operator = getattr(torch.ops.sparse_mla, f"sparse_decode_{implementation.backend}", None)
    for call in (
        SparseDecodeCall.check(q, scopes, attn_sink=sink),
        SparseDecodeCall.check(q, scopes[0], out_dtype=torch.float32),
    ):
        if operator is None or implementation.refusals(call):
            pytest.skip(f"{implementation.name} has no opaque operator for this call")
        torch.library.opcheck(operator.default, call.flat())


def test_one_graph_serves_every_batch(backend):
    """No graph break, and at most two recompilations over b = 1 .. 64."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    _, scopes, sink = production(64)
    main, extra = scopes[0].cache.data, scopes[1].cache.data

    def step(q, main, extra, indices, others, lengths):
        out, lse = sparse_decode(
            q, [KVScope(main, indices), KVScope(extra, others, lengths)], attn_sink=sink, backend=backend
        )
        return out * 2, lse + 1

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for b in (1, 2, 3, 5, 8, 17, 33, 64):
        q, rows, _ = production(b)
        given = (q, main, extra, rows[0].indices, rows[1].indices, rows[1].topk_length)
        expected, got = step(*given), compiled(*given)
        assert same(got, expected)
        assert got[1].stride() == expected[1].stride()
    assert 1 <= counter.frame_count <= 3


def test_a_padded_pool_inside_a_compiled_graph(backend):
    """A view of a graph input with a block stride larger than the page, which a compiler must not make contiguous."""
    pages = Pages(num_pages=3, page_size=5, padding_bytes=576, bare=True)
    pool, cache = filled(pages, fill=0xFF)
    indices = lists([[0, 7, 14, 3]], 4)

    def step(q, pool):
        view = pool.as_strided((3, 5, 1, 528), (pages.block_stride, 528, 528, 1))
        return sparse_decode(q + 0, KVScope(view, indices), backend=backend)

    expected = sparse_decode(queries(1), KVScope(cache, indices), backend=backend)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(queries(1), pool)
    assert same(got, expected)


def test_errors_inside_a_graph_keep_their_sentence(backend):
    """The type may become torch's; the sentence stays."""
    _, cache = filled(Pages(num_pages=2))
    compiled = torch.compile(
        lambda q, i: sparse_decode(q, KVScope(cache, i), backend=backend).out, fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(Exception, match=r"scopes\[0\].indices must be -1 or .*got 999"):
        compiled(queries(1), lists([[1, 999]], 4))
    with pytest.raises(Exception, match="q must be bfloat16"):
        compiled(queries(1).float(), lists([[1]], 4))


# --- bad input -------------------------------------------------------------------------------------------------------


def good() -> dict[str, Any]:
    return {
        "q": queries(2, 3),
        "scopes": [
            KVScope(torch.zeros(4, 8, 1, 528, dtype=torch.uint8), torch.zeros(2, 3, 5, dtype=torch.int32)),
            KVScope(torch.zeros(4, 8, 1, 288, dtype=torch.uint8), torch.zeros(2, 3, 6, dtype=torch.int32)),
        ],
    }


def main_scope(**changes):
    def change(arguments):
        scope = arguments["scopes"][0]
        given = {"cache": scope.cache, "indices": scope.indices, "topk_length": scope.topk_length} | changes
        return arguments | {"scopes": [KVScope(**given), arguments["scopes"][1]]}

    return change


def bytes_cache(width: int, **options) -> torch.Tensor:
    return torch.zeros(4, 8, 1, width, dtype=torch.uint8, **options)


def given(**changes):
    return lambda arguments: arguments | changes


BAD = {
    "q rank": (given(q=queries(2)[:, 0]), ShapeError, "q must be"),
    "q of the V3.2 head": (given(q=torch.zeros(2, 3, 4, 576).bfloat16()), ShapeError, "576 is the V3.2 head width"),
    "q float32": (given(q=queries(2, 3).float()), DTypeError, "q must be bfloat16, got float32"),
    "q no tensor": (given(q=None), DTypeError, "q must be a torch.Tensor, got NoneType"),
    "q no heads": (given(q=queries(2, 3)[:, :, :0]), ShapeError, "at least one head"),
    "q needs grad": (given(q=queries(2, 3).requires_grad_()), DTypeError, "require grad"),
    "no scopes": (given(scopes=[]), ArgumentError, "one or two"),
    "three scopes": (lambda a: a | {"scopes": [*a["scopes"], a["scopes"][0]]}, ArgumentError, "one or two"),
    "a tensor as scope": (lambda a: a | {"scopes": [bytes_cache(528)]}, ArgumentError, "KVScope"),
    "cache of the V4 record": (lambda a: main_scope(cache=bytes_cache(584))(a), FormatError, "584.*V4"),
    "cache of the V3.2 record": (lambda a: main_scope(cache=bytes_cache(656))(a), FormatError, "656.*V3.2"),
    "cache of an older mix": (lambda a: main_scope(cache=bytes_cache(592))(a), FormatError, "592"),
    "cache of the head size": (lambda a: main_scope(cache=bytes_cache(512))(a), FormatError, "512"),
    "cache 576": (lambda a: main_scope(cache=bytes_cache(576))(a), FormatError, "576"),
    "cache 384": (lambda a: main_scope(cache=bytes_cache(384))(a), FormatError, "384"),
    "cache 352": (lambda a: main_scope(cache=bytes_cache(352))(a), FormatError, "352"),
    "cache of index keys": (
        lambda a: main_scope(cache=PagedCache(bytes_cache(132), INDEX_FP8, 8))(a),
        ArgumentError,
        "main records, got INDEX_FP8",
    ),
    "cache float32": (lambda a: main_scope(cache=bytes_cache(528).float())(a), DTypeError, "float32"),
    "cache of two heads": (
        lambda a: main_scope(cache=torch.zeros(4, 8, 2, 528, dtype=torch.uint8))(a),
        ShapeError,
        r"\[4, 8, 2, 528\]",
    ),
    "cache rank": (lambda a: main_scope(cache=torch.zeros(32, 528, dtype=torch.uint8))(a), ShapeError, r"\[32, 528\]"),
    "cache with gaps between records": (
        lambda a: main_scope(cache=torch.zeros(4, 16, 1, 528, dtype=torch.uint8)[:, ::2])(a),
        ShapeError,
        "contiguous",
    ),
    "indices int64": (main_scope(indices=torch.zeros(2, 3, 5, dtype=torch.int64)), DTypeError, "indices must be int32"),
    "indices rank": (main_scope(indices=torch.zeros(2, 5, dtype=torch.int32)), ShapeError, r"scopes\[0\].indices"),
    "indices rows": (main_scope(indices=torch.zeros(2, 2, 5, dtype=torch.int32)), ShapeError, r"scopes\[0\].indices"),
    "indices batch": (main_scope(indices=torch.zeros(3, 3, 5, dtype=torch.int32)), ShapeError, r"scopes\[0\].indices"),
    "indices empty": (main_scope(indices=torch.zeros(2, 3, 0, dtype=torch.int32)), ShapeError, "topk = 0"),
    "indices missing": (main_scope(indices=None), DTypeError, r"scopes\[0\].indices"),
    "length int64": (main_scope(topk_length=torch.ones(2, dtype=torch.int64)), DTypeError, "topk_length must be int32"),
    "length rows": (main_scope(topk_length=torch.ones(3, dtype=torch.int32)), ShapeError, "topk_length"),
    "length rank": (main_scope(topk_length=torch.ones(2, 3, dtype=torch.int32)), ShapeError, "topk_length"),
    "length negative": (
        main_scope(topk_length=torch.tensor([2, -3], dtype=torch.int32)),
        SlotRangeError,
        "topk_length must be >= 0, got -3",
    ),
    "sink bfloat16": (given(attn_sink=torch.zeros(4).bfloat16()), DTypeError, "attn_sink must be float32"),
    "sink float64": (given(attn_sink=torch.zeros(4).double()), DTypeError, "attn_sink must be float32"),
    "sink rank": (given(attn_sink=torch.zeros(1, 4)), ShapeError, "attn_sink must be"),
    "sink heads": (given(attn_sink=torch.zeros(5)), ShapeError, "h_q = 4"),
    "sink needs grad": (
        given(attn_sink=torch.zeros(4, requires_grad=True)),
        DTypeError,
        "attn_sink must not require grad",
    ),
    "sink on another device": (
        given(attn_sink=torch.zeros(4, device="meta")),
        ArgumentError,
        "attn_sink must be on cpu",
    ),
    "cache on another device": (main_scope(cache=bytes_cache(528, device="meta")), ArgumentError, "must be on cpu"),
    "out dtype": (given(out_dtype=torch.float16), ArgumentError, "out_dtype must be one of"),
    "memory limit": (given(memory_limit=100), ArgumentError, "memory_limit must be at least"),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_bad_input(name, backend):
    change, kind, text = BAD[name]
    sparse_decode(**good(), backend=backend)
    with pytest.raises(kind, match=text) as caught:
        sparse_decode(**change(good()), backend=backend)
    assert isinstance(caught.value, SparseMlaError)
    assert str(caught.value).split(": ")[0] in ("sparse_decode", "KVScope", "PagedCache")
    assert "\n" not in str(caught.value)


def test_length_on_another_device(backend):
    arguments = main_scope(topk_length=torch.ones(2, dtype=torch.int32, device="meta"))(good())
    with pytest.raises(ArgumentError, match=r"scopes\[0\].topk_length must be on cpu"):
        sparse_decode(**arguments, backend=backend)


def test_a_backend_is_named_or_refused():
    with pytest.raises(ArgumentError, match=r"backend must be auto or one of .* got 'gpu'"):
        sparse_decode(**good(), backend="gpu")
    with pytest.raises(UnsupportedError, match="neuron"):
        sparse_decode(**good(), backend="neuron")
    with config.override(SPARSE_MLA_BACKEND="neuron"), pytest.raises(UnsupportedError, match="neuron"):
        sparse_decode(**good())


def test_float64_is_the_reference_alone():
    got = sparse_decode(**good(), out_dtype=torch.float64, backend="reference")
    assert got.out.dtype == torch.float64
    for implementation in IMPLEMENTATIONS:
        if implementation.backend != "reference":
            call = SparseDecodeCall.check(**good(), out_dtype=torch.float64)
            assert any("out_dtype" in reason for reason in implementation.refusals(call))
