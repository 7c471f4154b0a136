# SPDX-License-Identifier: Apache-2.0
"""`store_records` and `load_records`: golden records, untouched bytes, padding, every format and layout, large slots,
bad input.
"""

from __future__ import annotations

import json
import mmap
from pathlib import Path

import pytest
import torch

from sparse_mla.caches import PagedCache
from sparse_mla.errors import (
    ArgumentError,
    DTypeError,
    FormatError,
    NonFiniteError,
    ShapeError,
    SlotRangeError,
)
from sparse_mla.formats import BF16, FORMATS, INDEX_FP4, INDEX_FP8, INDEX_FP8_FP32, V41_FP4, V41_FP8, decode, encode
from sparse_mla.ops.load_records import LOAD_RECORDS, LoadRecordsCall, load_records
from sparse_mla.ops.store_records import STORE_RECORDS, StoreRecordsCall, store_records
from sparse_mla.testing.pages import Pages

INF, NAN = float("inf"), float("nan")
FILL = 0xA5
BACKENDS = sorted({i.backend for i in STORE_RECORDS.candidates("auto")})
LOADERS = sorted({i.backend for i in LOAD_RECORDS.candidates("auto")})
RECORDS = json.loads((Path(__file__).parent / "data" / "vectors" / "records.json").read_text())


def from_hex(text: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8).view(dtype)


def rows(n: int, fmt, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, fmt.elements, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def geometries():
    """Every format in both layouts, pages of 1, 5 and 64, padded blocks and regions of a pool, both caps."""
    for fmt in FORMATS.values():
        for layout in ("interleaved",) if fmt.is_index else ("interleaved", "planar"):
            for page_size, padding, region in ((1, 0, 0), (5, 3, 0), (64, 576, 0), (64, 96, 4352), (5, 7, 13)):
                for cap in (448, 224):
                    if cap == 448 or page_size == 64:
                        yield pytest.param(
                            Pages(format=fmt, num_pages=4, page_size=page_size, layout=layout, padding_bytes=padding,
                                  region_offset=region, e4m3_max=cap),
                            id=f"{fmt.name}-{layout}-page{page_size}-pad{padding}-at{region}-cap{cap}",
                        )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("pages", list(geometries()))
def test_only_the_bytes_of_the_given_slots_change(pages, index_dtype, backend):
    x = rows(5, pages.format)
    slots = torch.tensor([3, -1, 1, -1, 0] if pages.page_size == 1 else [3, -1, 17, -1, 0], dtype=index_dtype)
    kept = slots >= 0
    x[~kept] = NAN  # what padding rows hold
    pool = pages.empty(FILL)
    store_records(x, pages.cache(pool), slots, backend=backend)
    expected = pages.empty(FILL)
    pages.write(expected, slots[kept], encode(x[kept], pages.format, e4m3_max=pages.e4m3_max))
    assert torch.equal(pool, expected)
    loaded = load_records(pages.cache(pool), slots)
    assert torch.equal(loaded[kept], decode(pages.read(pool, slots[kept]), pages.format))
    assert not loaded[~kept].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number", range(len(RECORDS["cases"])))
def test_golden_records(number, backend):
    case = RECORDS["cases"][number]
    x = from_hex(case["x_bf16le"], torch.bfloat16).reshape(1, 512)
    slot = torch.tensor([2], dtype=torch.int32)
    for fmt, cap, key, decoded in (
        (V41_FP8, 448, "record_528", "decoded_528_bf16le"),
        (V41_FP8, 224, "record_528_max224", "decoded_528_max224_bf16le"),
        (V41_FP4, 448, "record_288", "decoded_288_bf16le"),
    ):
        for layout in ("interleaved", "planar"):
            pages = Pages(format=fmt, num_pages=1, page_size=4, layout=layout, e4m3_max=cap)
            pool = pages.empty(0)
            store_records(x, pages.cache(pool), slot, backend=backend)
            assert bytes(pages.read(pool, slot)[0].tolist()).hex() == case[key]
            got = load_records(pages.cache(pool), slot)
            assert torch.equal(got.view(torch.int16)[0], from_hex(case[decoded], torch.int16))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fmt", [V41_FP8, V41_FP4, INDEX_FP8, INDEX_FP4], ids=str)
@pytest.mark.parametrize("layout", ["interleaved", "planar"])
def test_a_cache_inside_a_buffer_leaves_the_rest_of_it_alone(fmt, layout, backend):
    """Six pages, the cache is the last four: an unchecked -1 would land in the page before."""
    buffer = torch.full((6, 16, 1, fmt.record_bytes), FILL, dtype=torch.uint8)
    cache = PagedCache(buffer[2:], fmt, 16, layout=layout)
    slots = torch.tensor([3, -1, 17, -1], dtype=torch.int32)
    store_records(rows(4, fmt), cache, slots, backend=backend)
    assert bool((buffer[:2] == FILL).all())
    touched = Pages(format=fmt, num_pages=4, page_size=16, layout=layout)
    flat = buffer[2:].reshape(-1).clone()
    touched.write(flat, slots[[0, 2]], torch.full((2, fmt.record_bytes), FILL, dtype=torch.uint8))
    assert bool((flat == FILL).all())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fmt", [V41_FP8, V41_FP4], ids=str)
def test_layouts_differ_in_bytes_and_agree_in_values(fmt, backend):
    """Planar bytes read as interleaved are another cache, unless a page holds one record."""
    x, slots = rows(64, fmt), torch.arange(64, dtype=torch.int32)
    for page_size in (1, 2, 64):
        caches = {}
        for layout in ("interleaved", "planar"):
            pages = Pages(format=fmt, num_pages=64 // page_size, page_size=page_size, layout=layout)
            pool = pages.empty(0)
            store_records(x, pages.cache(pool), slots, backend=backend)
            caches[layout] = (pages.cache(pool), pool)
        values = {layout: load_records(cache, slots) for layout, (cache, _) in caches.items()}
        assert torch.equal(values["interleaved"], values["planar"])
        assert torch.equal(values["planar"], decode(encode(x, fmt), fmt))
        same_bytes = torch.equal(caches["interleaved"][1], caches["planar"][1])
        assert same_bytes == (page_size == 1)
        misread = PagedCache(caches["planar"][0].data, fmt, page_size, layout="interleaved")
        assert torch.equal(load_records(misread, slots), values["planar"]) == (page_size == 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_last_of_equal_slots_wins(backend):
    pages = Pages(num_pages=2, page_size=4)
    x, slots = rows(400, V41_FP8), torch.arange(400) % 3
    pool, expected = pages.empty(FILL), pages.empty(FILL)
    store_records(x, pages.cache(pool), slots.to(torch.int32), backend=backend)
    pages.write(expected, torch.tensor([0, 1, 2]), encode(x[[399, 397, 398]], V41_FP8))
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 127, 128, 129, 2001])
def test_any_number_of_rows(count, backend):
    """Counts around tiles; the bytes after the last slot stay. The memory limit changes nothing."""
    pages = Pages(num_pages=40, page_size=53)
    x, slots = rows(count, V41_FP8, count), torch.arange(count, dtype=torch.int32)
    expected = pages.empty(FILL)
    pages.write(expected, slots, encode(x, V41_FP8))
    for limit in (None, 1 << 20):
        pool = pages.empty(FILL)
        store_records(x, pages.cache(pool), slots, memory_limit=limit, backend=backend)
        assert torch.equal(pool, expected)
        assert torch.equal(
            load_records(pages.cache(pool), slots, memory_limit=limit), decode(encode(x, V41_FP8), V41_FP8)
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_are_rounded_against_the_scale_that_is_stored(backend):
    """The relative error of fp8 records is 0.0265; rounding the scale after the values makes it several times that."""
    pages = Pages(num_pages=64, page_size=64)
    x, slots = rows(4096, V41_FP8), torch.randperm(4096).to(torch.int32)
    pool = pages.empty(0)
    store_records(x, pages.cache(pool), slots, backend=backend)
    error = (load_records(pages.cache(pool), slots).double() - x.double()).norm() / x.double().norm()
    assert float(error) <= 0.028


@pytest.mark.parametrize("backend", BACKENDS)
def test_float32_input_takes_its_maximum_in_float32(backend):
    """1.7535 is 1.75 in bfloat16, and 448 * 2^-8 = 1.75: the scale must be the next one."""
    x = torch.zeros(1, 512)
    x[0, 3] = 1.7535
    pages = Pages(num_pages=1, page_size=2)
    pool = pages.empty(0)
    store_records(x, pages.cache(pool), torch.tensor([1]), backend=backend)
    assert int(pages.read(pool, torch.tensor([1]))[0, 512]) == 120


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("fmt", "amax", "byte"),
    [
        (V41_FP8, 0.0, 105), (V41_FP8, 1e-3, 109), (V41_FP8, 0.01, 112), (V41_FP8, 0.05, 114), (V41_FP8, 448.0, 127),
        (V41_FP4, 0.0, 0x01), (V41_FP4, 1e-4, 0x01), (V41_FP4, 1.0, 0x23), (V41_FP4, 6.0, 0x38), (V41_FP4, 7.0, 0x39),
        (V41_FP4, 2688.0, 0x7E), (V41_FP4, 3000.0, 0x7E),
    ],
)  # fmt: skip
def test_scale_bytes(fmt, amax, byte, backend):
    x = torch.zeros(1, 512)
    x[0, 0] = -amax
    pages = Pages(format=fmt, num_pages=1, page_size=1)
    pool = pages.empty(FILL)
    store_records(x.to(torch.bfloat16), pages.cache(pool), torch.tensor([0]), backend=backend)
    assert int(pool[fmt.data_bytes]) == byte


@pytest.mark.parametrize("backend", BACKENDS)
def test_e2m1_midpoints_go_to_the_even_code(backend):
    x = torch.zeros(1, 512)
    x[0, :11] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -5.0, 1.0])
    pages = Pages(format=V41_FP4, num_pages=1, page_size=1)
    pool = pages.empty(FILL)
    store_records(x.to(torch.bfloat16), pages.cache(pool), torch.tensor([0]), backend=backend)
    codes = [code for byte in pool[:6].tolist() for code in (byte & 15, byte >> 4)]
    assert codes[:11] == [7, 0, 2, 2, 4, 4, 6, 6, 8, 14, 2]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_underflowing_negative_is_never_nan(backend):
    x = torch.zeros(1, 512)
    x[0, 0], x[0, 1] = 448.0, -(2.0**-11)
    pages = Pages(num_pages=1, page_size=1)
    pool = pages.empty(FILL)
    store_records(x.to(torch.bfloat16), pages.cache(pool), torch.tensor([0]), backend=backend)
    assert int(pool[1]) == 0x80
    assert float(load_records(pages.cache(pool), torch.tensor([0]))[0, 1]) == 0.0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fmt", list(FORMATS.values()), ids=str)
def test_treatments_of_values_that_are_not_finite(fmt, backend):
    x = rows(3, fmt)
    x[1, 2], x[1, 40], x[2, 5] = NAN, INF, -INF
    pages = Pages(format=fmt, num_pages=1, page_size=4)
    slots = torch.tensor([0, 1, 2], dtype=torch.int32)
    for treatment in ("zero", "saturate", "nan_scale"):
        pool, expected = pages.empty(FILL), pages.empty(FILL)
        store_records(x, pages.cache(pool), slots, on_nonfinite=treatment, backend=backend)
        pages.write(expected, slots, encode(x, fmt, on_nonfinite=treatment))
        assert torch.equal(pool, expected)
        loaded = load_records(pages.cache(pool), slots)
        assert torch.equal(loaded[0], decode(encode(x[:1], fmt), fmt)[0])
        if treatment != "saturate":
            assert bool(loaded.isfinite().all())
            assert float(loaded[1, 2]) == 0.0
    pool = pages.empty(FILL)
    for limit in (None, 1 << 20):
        with pytest.raises(NonFiniteError, match=r"store_records: x must be finite, got nan at \[1, 2\]"):
            store_records(x, pages.cache(pool), slots, memory_limit=limit, backend=backend)
    assert bool((pool == FILL).all())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [-2, 20, 2**31 - 1, -(2**31)])
def test_a_slot_outside_the_cache_is_an_error_before_any_byte(bad, backend):
    pages = Pages(num_pages=4, page_size=5)
    pool = pages.empty(FILL)
    slots = torch.tensor([0, 1, bad, 2], dtype=torch.int32)
    with pytest.raises(SlotRangeError, match=f"store_records: slots must be .* got {bad}"):
        store_records(rows(4, V41_FP8), pages.cache(pool), slots, backend=backend)
    assert bool((pool == FILL).all())
    with pytest.raises(SlotRangeError, match=f"load_records: slots must be .* got {bad}"):
        load_records(pages.cache(pool), slots)
    wide = torch.tensor([2**40], dtype=torch.int64)
    with pytest.raises(SlotRangeError, match=str(2**40)):
        store_records(rows(1, V41_FP8), pages.cache(pool), wide, backend=backend)


@pytest.mark.parametrize("backend", LOADERS)
def test_load_takes_slots_of_any_shape(backend):
    pages = Pages(format=V41_FP4, num_pages=3, page_size=5)
    pool = pages.empty(0)
    pages.write(pool, torch.arange(15), encode(rows(15, V41_FP4), V41_FP4))
    flat = load_records(pages.cache(pool), torch.arange(15), backend=backend)
    slots = torch.tensor([[[3, -1], [14, 0]]], dtype=torch.int32)
    got = load_records(pages.cache(pool), slots, backend=backend)
    assert got.shape == (1, 2, 2, 512)
    assert torch.equal(got[0, 1], flat[[14, 0]])
    assert torch.equal(got[0, 0, 0], flat[3])
    assert not got[0, 0, 1].any()
    assert load_records(pages.cache(pool), torch.tensor(7), backend=backend).shape == (512,)
    assert load_records(pages.cache(pool), slots[:, :0], backend=backend).shape == (1, 0, 2, 512)
    wide = load_records(pages.cache(pool), slots, out_dtype=torch.float32, backend=backend)
    assert torch.equal(wide.to(torch.bfloat16), got)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn])
def test_bare_tensors_and_other_views_of_the_bytes(dtype):
    for fmt in (V41_FP8, V41_FP4, INDEX_FP4):
        data = torch.zeros(3, 4, 1, fmt.record_bytes, dtype=torch.uint8)
        x, slots = rows(2, fmt), torch.tensor([11, 0])
        store_records(x, data.view(dtype), slots)
        assert torch.equal(load_records(data.view(dtype), slots), decode(encode(x, fmt), fmt))
    values = torch.zeros(3, 4, 1, 512, dtype=torch.bfloat16)
    store_records(rows(1, BF16), values, torch.tensor([5]))
    assert torch.equal(values[1, 1, 0], rows(1, BF16)[0])
    with pytest.raises(FormatError, match="132"):
        store_records(rows(1, INDEX_FP8), torch.zeros(3, 4, 1, 132, dtype=torch.uint8), torch.tensor([0]))
    named = PagedCache(torch.zeros(3, 4, 1, 132, dtype=torch.uint8), INDEX_FP8_FP32, 4)
    store_records(rows(1, INDEX_FP8_FP32), named, torch.tensor([0]))
    assert torch.equal(
        load_records(named, torch.tensor([0])), decode(encode(rows(1, INDEX_FP8_FP32), INDEX_FP8_FP32), INDEX_FP8_FP32)
    )


def reserved(size: int) -> torch.Tensor:
    """`size` zero bytes of address space, of which only the pages that are touched cost memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    try:
        memory = mmap.mmap(-1, size, flags=flags)
    except (OSError, OverflowError) as error:
        pytest.skip(f"{size >> 20} MiB of address space cannot be reserved here: {error}")
    return torch.frombuffer(memory, dtype=torch.uint8)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("fmt", "num_pages", "far"), [(V41_FP8, 63_600, 63_560), (V41_FP4, 116_600, 116_560)], ids=["fp8", "fp4"]
)
def test_bytes_past_2_gib(fmt, num_pages, far, backend):
    """A page whose byte offset does not fit int32 holds the record of a near one; only touched pages cost memory."""
    data = reserved(num_pages * 64 * fmt.record_bytes).view(num_pages, 64, 1, fmt.record_bytes)
    assert far * 64 * fmt.record_bytes > 2**31
    x = rows(1, fmt).repeat(2, 1)
    slots = torch.tensor([far * 64 + 3, 64 + 3], dtype=torch.int32)
    store_records(x, data, slots, backend=backend)
    assert torch.equal(data[far, 3, 0], encode(x[:1], fmt)[0])
    assert torch.equal(data[1, 3, 0], data[far, 3, 0])
    assert torch.equal(load_records(data, slots), decode(encode(x, fmt), fmt))
    assert int(data[far, :3].count_nonzero()) == 0
    assert int(data[far, 4:].count_nonzero()) == 0
    assert int(data[0].count_nonzero()) == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_slots_past_2_to_the_24(backend):
    """Where float32 slot arithmetic would lose the odd ones."""
    data = reserved(262_200 * 64 * V41_FP4.record_bytes).view(262_200, 64, 1, V41_FP4.record_bytes)
    slots = torch.tensor([2**24 - 1, 2**24, 2**24 + 1, 2**24 + 65], dtype=torch.int32)
    x = rows(4, V41_FP4)
    store_records(x, data, slots, backend=backend)
    flat = data.view(-1, V41_FP4.record_bytes)
    assert torch.equal(flat[slots.long()], encode(x, V41_FP4))
    assert int(flat[2**24 + 2].count_nonzero()) == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["interleaved", "planar"])
def test_the_largest_slot_of_int32(layout, backend):
    """Slots up to 2^31 - 1: 618 GB of address space, three touched pages of memory."""
    pool = reserved(2**31 * V41_FP4.record_bytes)
    cache = PagedCache(pool, V41_FP4, 64, layout=layout)
    assert cache.num_slots == 2**31
    slots = torch.tensor([2**31 - 1, 0, 2**31 - 65], dtype=torch.int32)
    x = rows(3, V41_FP4)
    store_records(x, cache, slots, backend=backend)
    assert torch.equal(load_records(cache, slots), decode(encode(x, V41_FP4), V41_FP4))
    if layout == "interleaved":
        assert torch.equal(pool[-V41_FP4.record_bytes :], encode(x, V41_FP4)[0])
    else:
        assert torch.equal(pool[-V41_FP4.scale_bytes :], encode(x, V41_FP4)[0, V41_FP4.data_bytes :])


def test_compiled_stores_reach_the_cache():
    """Functionalisation must write through, for a whole tensor and for one region of a pool with padded blocks."""
    for region in ({}, {"region_offset": 4352, "padding_bytes": 96}):
        pages = Pages(num_pages=4, page_size=8, **region)

        def step(x, pool, slots, pages=pages):
            cache = pages.cache(pool)
            store_records(x * 2, cache, slots)
            return load_records(cache, slots) + 1

        eager_pool, compiled_pool = pages.empty(FILL), pages.empty(FILL)
        x, slots = rows(3, V41_FP8), torch.tensor([0, -1, 31], dtype=torch.int32)
        expected = step(x, eager_pool, slots)
        got = torch.compile(step, fullgraph=True, backend="aot_eager")(x, compiled_pool, slots)
        assert torch.equal(got, expected)
        assert torch.equal(eager_pool, compiled_pool)
        assert not bool((eager_pool == FILL).all())


@pytest.mark.parametrize("fmt", [V41_FP8, INDEX_FP4], ids=str)
def test_opcheck(fmt):
    pages = Pages(format=fmt, num_pages=2, page_size=4)
    cache = pages.cache(pages.empty(0))
    slots = torch.tensor([0, -1, 7], dtype=torch.int32)
    torch.library.opcheck(
        torch.ops.sparse_mla.store_records_reference.default, StoreRecordsCall.check(rows(3, fmt), cache, slots).flat()
    )
    torch.library.opcheck(
        torch.ops.sparse_mla.load_records_reference.default, LoadRecordsCall.check(cache, slots).flat()
    )
    call = LoadRecordsCall.check(cache, slots, out=torch.empty(3, fmt.elements, dtype=torch.bfloat16))
    torch.library.opcheck(torch.ops.sparse_mla.load_records_into_reference.default, call.flat_into())


@pytest.mark.parametrize("backend", LOADERS)
def test_load_into_memory_of_the_caller(backend):
    pages = Pages(num_pages=3, page_size=4)
    pool = pages.empty(0)
    cache, slots = pages.cache(pool), torch.tensor([[0, -1, 7], [11, 3, 0]])
    store_records(rows(12, V41_FP8), cache, torch.arange(12))
    expected = load_records(cache, slots, backend=backend)
    around = torch.full((4, 3, 512), 5.0, dtype=torch.bfloat16)
    out = around[1:3]
    assert load_records(cache, slots, out=out, backend=backend) is out
    assert torch.equal(out, expected)
    assert bool((around[[0, 3]] == 5).all())
    with pytest.raises(SlotRangeError):
        load_records(cache, slots + 1, out=out.fill_(5), backend=backend)
    assert bool((out == 5).all())


def test_compiled_load_reaches_out():
    pages = Pages(num_pages=2, page_size=4)
    cache, slots = pages.cache(pages.empty(0)), torch.tensor([0, -1, 7])
    store_records(rows(8, V41_FP8), cache, torch.arange(8))

    def step(out):
        return load_records(cache, slots, out=out) + 1

    out = torch.empty(3, 512, dtype=torch.bfloat16)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(out)
    assert torch.equal(out, load_records(cache, slots))
    assert torch.equal(got, out + 1)


def good():
    return {"x": rows(2, V41_FP8), "cache": torch.zeros(3, 4, 1, 528, dtype=torch.uint8), "slots": torch.tensor([0, 1])}


BAD = {
    "x rank": ({"x": rows(2, V41_FP8)[None]}, ShapeError, "x must be"),
    "x width": ({"x": torch.zeros(2, 576)}, ShapeError, "x must be"),
    "x of an index key": ({"x": rows(2, INDEX_FP4)}, FormatError, "528"),
    "x dtype": ({"x": torch.zeros(2, 512).double()}, DTypeError, "x must be"),
    "x grad": ({"x": torch.zeros(2, 512, requires_grad=True)}, DTypeError, "require grad"),
    "cache dtype": ({"cache": torch.zeros(3, 4, 1, 528)}, DTypeError, "cache must be"),
    "cache width": ({"cache": torch.zeros(3, 4, 1, 584, dtype=torch.uint8)}, FormatError, "584"),
    "cache rank": ({"cache": torch.zeros(528, dtype=torch.uint8)}, ShapeError, "cache must be"),
    "no cache": ({"cache": None}, DTypeError, "cache must be"),
    "slots rank": ({"slots": torch.tensor([[0, 1]])}, ShapeError, "slots must be"),
    "slots count": ({"slots": torch.tensor([0, 1, 2])}, ShapeError, "slots must be"),
    "slots dtype": ({"slots": torch.tensor([0.0, 1.0])}, DTypeError, "slots must be"),
    "treatment": ({"on_nonfinite": "ignore"}, ArgumentError, "on_nonfinite"),
    "device": ({"slots": torch.zeros(2, dtype=torch.int32, device="meta")}, ArgumentError, "must be on"),
    "memory limit": ({"memory_limit": 1}, ArgumentError, "memory_limit"),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_bad_input(name):
    change, kind, text = BAD[name]
    store_records(**good())
    with pytest.raises(kind, match=text) as caught:
        store_records(**(good() | change))
    assert str(caught.value).startswith("store_records: ")


def test_bad_input_of_load():
    cache = torch.zeros(3, 4, 1, 528, dtype=torch.uint8)
    load_records(cache, torch.tensor([0]))
    for change, kind in (
        ({"slots": torch.tensor([0.5])}, DTypeError),
        ({"slots": [0]}, DTypeError),
        ({"out_dtype": torch.float16}, ArgumentError),
        ({"cache": torch.zeros(3, 4, 1, 132, dtype=torch.uint8)}, FormatError),
        ({"cache": torch.zeros(3, 4, 1, 600, dtype=torch.uint8)}, FormatError),
        ({"out": [0.0]}, DTypeError),
        ({"out": torch.zeros(1, 512)}, DTypeError),
        ({"out": torch.zeros(512, dtype=torch.bfloat16)}, ShapeError),
        ({"out": torch.zeros(1, 1024, dtype=torch.bfloat16)[:, ::2]}, ShapeError),
        ({"out": torch.zeros(1, 512, dtype=torch.bfloat16, requires_grad=True)}, DTypeError),
        ({"out": torch.zeros(1, 512, dtype=torch.bfloat16, device="meta")}, ArgumentError),
    ):
        with pytest.raises(kind) as caught:
            load_records(**({"cache": cache, "slots": torch.tensor([0])} | change))
        assert str(caught.value).startswith("load_records: ")
