# SPDX-License-Identifier: Apache-2.0
"""Paged caches: every byte where the layout says, nothing read or written elsewhere, at any stride and any size."""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
import subprocess
import sys
import textwrap
import timeit
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_mla import config, errors
from sparse_mla.caches import (
    LAYOUTS,
    KVScope,
    PagedCache,
    PoolLayout,
    Region,
    allocate,
    block_stride_alignment,
    blocks_to_slots,
    carve_regions,
    check_slots,
    convert_layout,
    gather_decoded,
    gather_records,
    scatter_records,
    slots_to_blocks,
)
from sparse_mla.formats import (
    BF16,
    FORMATS,
    INDEX_FP4,
    INDEX_FP8,
    INDEX_FP8_FP32,
    MAIN_FORMATS,
    V41_FP4,
    V41_FP8,
    RecordFormat,
    decode,
    encode,
    split_record,
)

VECTORS = Path(__file__).parent / "data" / "vectors"
ALL = tuple(FORMATS.values())
CANARY = 0xA5
PAGE_SIZES = (1, 2, 5, 53, 61, 64, 69, 128, 134, 256)


def random_records(count: int, fmt: RecordFormat, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, fmt.record_bytes), dtype=torch.uint8, generator=generator)


def hex_bytes(text: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)


def byte_positions(fmt: RecordFormat, page_size: int, layout: str, stride: int, slot: int, start: int = 0) -> list[int]:
    """Where each byte of a slot's record lies in memory, stated anew: one byte at a time."""
    block, offset = divmod(slot, page_size)
    page = start + block * stride
    if not fmt.is_index and layout == "interleaved":
        return [page + offset * fmt.record_bytes + i for i in range(fmt.record_bytes)]
    data = [page + offset * fmt.data_bytes + i for i in range(fmt.data_bytes)]
    scales = [page + page_size * fmt.data_bytes + offset * fmt.scale_bytes + i for i in range(fmt.scale_bytes)]
    return data + scales


def flat_cache(
    fmt: RecordFormat, num_blocks: int, page_size: int, layout: str, *, padding: int = 0, start: int = 0
) -> tuple[torch.Tensor, PagedCache, int]:
    """(memory full of canaries, a cache in it, its block stride)."""
    stride = page_size * fmt.record_bytes + padding
    memory = torch.full((start + num_blocks * stride + 7,), CANARY, dtype=torch.uint8)
    usable = memory[: start + num_blocks * stride]
    return memory, PagedCache(usable, fmt, page_size, layout=layout, region_offset=start, block_stride=stride), stride


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fmt", ALL, ids=str)
@pytest.mark.parametrize(("page_size", "padding", "start"), [(1, 0, 0), (5, 96, 32), (61, 3, 17), (64, 576, 128)])
def test_every_byte_lies_where_the_layout_says(
    fmt: RecordFormat, layout: str, page_size: int, padding: int, start: int
) -> None:
    memory, cache, stride = flat_cache(fmt, 3, page_size, layout, padding=padding, start=start)
    assert (cache.num_blocks, cache.num_slots, cache.block_stride_bytes) == (3, 3 * page_size, stride)
    slots = torch.tensor(sorted({0, page_size - 1, page_size, 3 * page_size - 1, 3 * page_size // 2}))
    records = random_records(len(slots), fmt)
    expected = memory.clone()
    for slot, record in zip(slots.tolist(), records, strict=True):
        expected[byte_positions(fmt, page_size, layout, stride, slot, start)] = record
    scatter_records(cache, slots.int(), records)
    assert torch.equal(memory, expected)
    assert torch.equal(gather_records(cache, slots.int()), records)


@pytest.mark.parametrize("fmt", ALL, ids=str)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_every_token_has_its_own_bytes(fmt: RecordFormat, page_size: int) -> None:
    """Random order over all tokens of all pages: no tail is skipped, no token stands for another."""
    cache = allocate(fmt, 4, page_size, layout="planar")
    order = torch.randperm(cache.num_slots, generator=torch.Generator().manual_seed(page_size))
    records = random_records(cache.num_slots, fmt, seed=page_size)
    records[:, 0], records[:, 1] = order % 256, order // 256
    scatter_records(cache, order.int(), records)
    again = torch.randperm(cache.num_slots, generator=torch.Generator().manual_seed(page_size + 1))
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(cache.num_slots)
    assert torch.equal(gather_records(cache, again), records[inverse[again]])
    data, scales = cache.data_and_scales()
    assert torch.equal(data.flatten(0, 1)[order], records[:, : fmt.data_bytes])
    assert torch.equal(scales.flatten(0, 1)[order], records[:, fmt.data_bytes :])


@pytest.mark.parametrize("page_size", [16, 48, 61, 96, 160, 192, 224])
def test_pages_that_are_no_multiple_of_a_tile_lose_no_token(page_size: int) -> None:
    blocks = -(-3072 // page_size)
    cache = allocate(INDEX_FP4, blocks, page_size)
    position = torch.arange(3072)
    slots = (blocks - 1 - position // page_size) * page_size + position % page_size
    x = torch.zeros(3072, 128)
    x[position, position % 128] = 2.0 ** (position // 128 - 12).float()
    scatter_records(cache, slots, encode(x, INDEX_FP4))
    assert torch.equal(gather_decoded(cache, slots).float(), x)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fmt", ALL, ids=str)
def test_padding_rows_write_nothing(fmt: RecordFormat, layout: str, dtype: torch.dtype) -> None:
    """-1 must neither become the page before the cache nor slot 0."""
    page_size = 16
    buffer = torch.full((6, page_size, 1, fmt.record_bytes), CANARY, dtype=torch.uint8)
    cache = PagedCache(buffer[2:], fmt, page_size, layout=layout)
    records = random_records(4, fmt)
    expected = buffer.clone().flatten()
    for row, slot in ((0, 3), (2, 17)):
        start = 2 * page_size * fmt.record_bytes
        expected[byte_positions(fmt, page_size, layout, page_size * fmt.record_bytes, slot, start)] = records[row]
    scatter_records(cache, torch.tensor([3, -1, 17, -1], dtype=dtype), records)
    assert torch.equal(buffer.flatten(), expected)
    scatter_records(cache, torch.full((4,), -1, dtype=dtype), records)
    assert torch.equal(buffer.flatten(), expected)


@pytest.mark.parametrize("bad", [-2, -(2**31), 64, 2**31 - 1])
def test_a_slot_outside_is_refused_before_a_byte_is_written(bad: int) -> None:
    memory, cache, _ = flat_cache(V41_FP8, 4, 16, "interleaved")
    before = memory.clone()
    slots = torch.tensor([5, bad, -1, 7], dtype=torch.int32)
    with pytest.raises(
        errors.SlotRangeError, match=rf"store: slots must be -1 or 0 \.\. 63, got {bad}; .*4 blocks of 16"
    ):
        scatter_records(cache, slots, random_records(4, V41_FP8), op="store")
    assert torch.equal(memory, before)
    with pytest.raises(errors.SlotRangeError, match=f"got {bad}"):
        gather_records(cache, slots)
    with pytest.raises(errors.SlotRangeError, match=r"must be 0 \.\. 63, got -1"):
        check_slots(cache, torch.tensor([3, -1]), op="load", allow_empty=False)


def test_minus_two_does_not_reach_the_last_page() -> None:
    cache = allocate(V41_FP8, 3, 64)
    scatter_records(cache, torch.tensor([2 * 64 + 62]), torch.full((1, 528), 0x38, dtype=torch.uint8))
    with pytest.raises(errors.SlotRangeError, match="got -2"):
        gather_records(cache, torch.tensor([-2]))


@pytest.mark.parametrize("count", [2, 100, 5000])
def test_of_equal_slots_the_last_wins(count: int) -> None:
    cache = allocate(V41_FP4, 2, 64)
    generator = torch.Generator().manual_seed(count)
    slots = torch.randint(-1, 128, (count,), generator=generator)
    records = random_records(count, V41_FP4, seed=count)
    expected = torch.zeros(128, 288, dtype=torch.uint8)
    for slot, record in zip(slots.tolist(), records, strict=True):
        if slot >= 0:
            expected[slot] = record
    for _ in range(3):
        scatter_records(cache, slots, records)
        assert torch.equal(gather_records(cache, torch.arange(128)), expected)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 127, 128, 129])
def test_any_number_of_rows(count: int) -> None:
    memory, cache, stride = flat_cache(INDEX_FP8, 3, 64, "interleaved", padding=64)
    records = random_records(count, INDEX_FP8)
    slots = torch.arange(count, dtype=torch.int32)
    expected = memory.clone()
    for slot in range(count):
        expected[byte_positions(INDEX_FP8, 64, "interleaved", stride, slot)] = records[slot]
    scatter_records(cache, slots, records)
    assert torch.equal(memory, expected)
    assert gather_records(cache, slots).shape == (count, 132)
    assert gather_decoded(cache, slots).shape == (count, 128)


def test_empty_slots_read_as_zeros_and_shapes_are_kept() -> None:
    cache = allocate(V41_FP8, 2, 8)
    cache.as_tensor().fill_(0x7F)
    cache.as_tensor()[..., 512:] = 0xFF
    x = torch.randn(1, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    scatter_records(cache, torch.tensor([9]), encode(x, V41_FP8))
    slots = torch.tensor([[[9, -1], [-1, 9]]], dtype=torch.int32)
    values = gather_decoded(cache, slots)
    assert values.shape == (1, 2, 2, 512)
    assert torch.equal(values[0, 0, 0], decode(encode(x, V41_FP8), V41_FP8)[0])
    assert (values[0, 0, 1] == 0).all()
    assert (values[0, 1, 0] == 0).all()
    empty = PagedCache(torch.zeros(0, 8, 1, 528, dtype=torch.uint8), V41_FP8, 8)
    assert (gather_records(empty, torch.tensor([-1, -1])) == 0).all()
    with pytest.raises(errors.SlotRangeError, match="got 0"):
        gather_records(empty, torch.tensor([0]))


# Layouts


@pytest.mark.parametrize("fmt", [V41_FP8, V41_FP4], ids=str)
@pytest.mark.parametrize("page_size", [1, 2, 5, 61, 64, 128, 256])
def test_the_two_main_layouts_hold_the_same_records_in_other_places(fmt: RecordFormat, page_size: int) -> None:
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(page_size)).bfloat16()
    records, slots = encode(x, fmt), torch.arange(64, dtype=torch.int32)
    caches = {layout: allocate(fmt, -(-64 // page_size), page_size, layout=layout) for layout in LAYOUTS}
    for cache in caches.values():
        scatter_records(cache, slots, records)
        assert torch.equal(gather_records(cache, slots), records)
    interleaved, planar = caches["interleaved"], caches["planar"]
    assert torch.equal(interleaved.data, planar.data) == (page_size == 1)
    misread = PagedCache(planar.data, fmt, page_size, layout="interleaved")
    assert torch.equal(gather_records(misread, slots), records) == (page_size == 1)
    for source, target in ((interleaved, "planar"), (planar, "interleaved"), (planar, "planar")):
        converted = convert_layout(source, target)
        assert converted.layout == target
        assert torch.equal(converted.data, caches[target].data)
        assert converted.data.data_ptr() != source.data.data_ptr()


@pytest.mark.parametrize("fmt", [INDEX_FP4, INDEX_FP8, INDEX_FP8_FP32, BF16], ids=str)
def test_layout_changes_nothing_where_there_is_only_one(fmt: RecordFormat) -> None:
    records, slots = random_records(20, fmt), torch.arange(20)
    caches = [allocate(fmt, 4, 5, layout=layout) for layout in LAYOUTS]
    for cache in caches:
        scatter_records(cache, slots, records)
    assert torch.equal(caches[0].data, caches[1].data)
    assert caches[0].is_sectioned == fmt.is_index


def test_converting_a_padded_cache_packs_it() -> None:
    memory, cache, _ = flat_cache(V41_FP8, 3, 5, "planar", padding=96, start=64)
    scatter_records(cache, torch.arange(15), random_records(15, V41_FP8))
    before = memory.clone()
    packed = convert_layout(cache, "interleaved")
    assert packed.block_stride_bytes == packed.page_bytes
    assert torch.equal(gather_records(packed, torch.arange(15)), random_records(15, V41_FP8))
    assert torch.equal(memory, before)


def test_listed_index_pages() -> None:
    file = json.loads((VECTORS / "index_pages.json").read_text())
    for fmt in (INDEX_FP4, INDEX_FP8):
        key = f"{fmt.record_bytes}"
        pages = torch.stack([hex_bytes(text) for text in file[f"pages_{key}"]])
        shaped = pages.view(file["pages"], file["page_kv"], 1, fmt.record_bytes)
        cache = PagedCache(shaped, fmt, file["page_kv"])
        expected = torch.stack(
            [hex_bytes(t).view(torch.bfloat16) for page in file[f"decoded_{key}_bf16le"] for t in page]
        )
        assert torch.equal(gather_decoded(cache, torch.arange(cache.num_slots)), expected)
        written = allocate(fmt, file["pages"], file["page_kv"])
        x = torch.stack([hex_bytes(t).view(torch.bfloat16) for page in file["x_bf16le"] for t in page])
        scatter_records(written, torch.arange(written.num_slots), encode(x, fmt))
        assert torch.equal(written.data, shaped)


def test_listed_rows_out_of_padded_blocks() -> None:
    formats = {
        "kv528": (V41_FP8, slice(None)),
        "kv288_padded_block": (V41_FP4, slice(None)),
        "index68_data": (INDEX_FP4, slice(0, 64)),
        "index68_sf": (INDEX_FP4, slice(64, 68)),
        "index132_sf": (INDEX_FP8, slice(128, 132)),
    }
    cases = json.loads((VECTORS / "gather_rows.json").read_text())["cases"]
    assert {case["name"] for case in cases} == set(formats)
    for case in cases:
        fmt, part = formats[case["name"]]
        at = torch.arange(case["blocks"] * case["block_stride"])
        memory = ((at * 7 + at // 256 * 3 + 1) & 255).to(torch.uint8)
        cache = PagedCache(memory, fmt, case["page"], block_stride=case["block_stride"])
        slots = torch.tensor([query["block"] * case["page"] + query["offset"] for query in case["queries"]])
        expected = torch.stack([hex_bytes(query["bytes"]) for query in case["queries"]])
        assert torch.equal(gather_records(cache, slots)[:, part], expected), case["name"]


def test_the_two_132_byte_index_records_are_told_apart_by_name_only() -> None:
    x = torch.randn(128, 128, generator=torch.Generator().manual_seed(5)).bfloat16()
    slots = torch.arange(128)
    caches = {}
    for fmt in (INDEX_FP8, INDEX_FP8_FP32):
        caches[fmt] = allocate(fmt, 2, 64)
        scatter_records(caches[fmt], slots, encode(x, fmt))
        assert torch.equal(gather_decoded(caches[fmt], slots), decode(encode(x, fmt), fmt))
        with pytest.raises(errors.FormatError, match=r"must name its format, got only .*132 bytes"):
            PagedCache.of(caches[fmt].data, index=True)
    crossed = PagedCache(caches[INDEX_FP8].data, INDEX_FP8_FP32, 64)
    assert not torch.allclose(gather_decoded(crossed, slots).float(), x.float(), atol=0.2, rtol=0.1)


# Strides and pools


@pytest.mark.parametrize("stride", [64 * 528 + 576, 1_002_240, 64 * 528 + 1])
def test_blocks_of_a_packed_allocation(stride: int) -> None:
    """The page is a column range of a wider block, so addressing by slot alone reads another layer."""
    generator = torch.Generator().manual_seed(3)
    buffer = torch.randint(0, 256, (4, stride), dtype=torch.uint8, generator=generator)
    begin = min(288, stride - 64 * 528)
    view = buffer[:, begin : begin + 64 * 528].unflatten(1, (64, 1, 528))
    slots = torch.tensor([0, 63, 64, 65, 255, 130], dtype=torch.int32)
    strided, copied = (PagedCache(data, V41_FP8, 64) for data in (view, view.contiguous()))
    as_pool = PagedCache(buffer, V41_FP8, 64, region_offset=begin)
    assert strided.block_stride_bytes == as_pool.block_stride_bytes == stride
    expected = gather_records(copied, slots)
    assert torch.equal(gather_records(strided, slots), expected)
    assert torch.equal(gather_records(as_pool, slots), expected)
    assert torch.equal(as_pool.as_tensor(), view)
    outside = buffer.clone()
    scatter_records(strided, slots, random_records(6, V41_FP8))
    assert torch.equal(gather_records(as_pool, slots), random_records(6, V41_FP8))
    changed = (buffer != outside).nonzero()[:, 1]
    assert changed.min() >= begin
    assert changed.max() < begin + 64 * 528


def test_a_slice_of_another_tensor_keeps_its_offset() -> None:
    buffer = torch.arange(7 * 5 * 528, dtype=torch.int32).to(torch.uint8).view(7, 5, 528)
    cache = PagedCache(buffer[2:6], V41_FP8, 5)
    assert torch.equal(gather_records(cache, torch.tensor([6])), buffer[3, 1][None])
    strided = PagedCache(buffer[1::2], V41_FP8, 5)
    assert strided.num_blocks == 3
    assert torch.equal(gather_records(strided, torch.tensor([11])), buffer[5, 1][None])


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_views_of_the_same_bytes(dtype: torch.dtype) -> None:
    data = random_records(32, V41_FP8).view(2, 16, 1, 528)
    slots = torch.tensor([0, 31, 5])
    cache = PagedCache(data.view(dtype), V41_FP8, 16)
    assert torch.equal(gather_records(cache, slots), gather_records(PagedCache(data, V41_FP8, 16), slots))
    scatter_records(cache, slots, torch.zeros(3, 528, dtype=torch.uint8).view(dtype))
    assert (data.flatten(0, 1)[slots] == 0).all()


def test_a_bfloat16_tensor_is_a_cache() -> None:
    values = torch.randn(3, 8, 1, 512, generator=torch.Generator().manual_seed(7)).bfloat16()
    wide = torch.zeros(3, 9, 1, 512, dtype=torch.bfloat16)
    wide[:, :8] = values
    slots = torch.tensor([23, 0, 9, -1])
    for data in (values, wide[:, :8], values.squeeze(2), values.view(torch.uint8)):
        cache = PagedCache(data, BF16, 8)
        assert (cache.num_blocks, cache.num_slots, cache.page_bytes) == (3, 24, 8192)
        decoded = gather_decoded(cache, slots)
        assert torch.equal(decoded[:3], values.flatten(0, 1)[slots[:3], 0])
        assert (decoded[3] == 0).all()
    assert PagedCache.of(values).format is BF16
    scatter_records(PagedCache(wide[:, :8], BF16, 8), torch.tensor([9]), encode(torch.ones(1, 512), BF16))
    assert (wide[1, 1] == 1).all()
    assert (wide[:, 8] == 0).all()


def v41_flash_regions(main: RecordFormat) -> list[Region]:
    """Layers 2, 8 and 14 hold an entry per two tokens, layer 20 one per token; blocks are 128 tokens."""
    regions = []
    for layer, entries in ((2, 64), (8, 64), (14, 64), (20, 128)):
        regions += [Region(f"index{layer}", INDEX_FP4, entries), Region(f"main{layer}", main, entries)]
    return regions


@pytest.mark.parametrize(
    ("main", "block_bytes", "block_stride", "per_token"),
    [(V41_FP4, 113920, 114048, 890), (V41_FP8, 190720, 194304, 1490)],
)
def test_the_pool_of_v41_flash(main: RecordFormat, block_bytes: int, block_stride: int, per_token: float) -> None:
    layout = PoolLayout(v41_flash_regions(main), tokens_per_block=128)
    assert (layout.block_bytes, layout.block_stride) == (block_bytes, block_stride)
    assert layout.bytes_per_token == per_token
    assert layout.padded_bytes_per_token == block_stride / 128
    assert all(offset % 32 == 0 for offset in layout.offsets)
    assert layout.num_blocks(memory_bytes=10 * block_stride + 5) == 10
    assert layout.num_blocks(memory_bytes=block_stride - 1) == 0
    assert layout.num_blocks(num_tokens=65_536) == 512
    assert layout.num_blocks(num_tokens=129, memory_bytes=2 * block_stride) == 2
    with pytest.raises(errors.ArgumentError, match=f"at least {3 * block_stride} for 257 tokens"):
        layout.num_blocks(num_tokens=257, memory_bytes=2 * block_stride)
    with pytest.raises(errors.ArgumentError, match="must be given"):
        layout.num_blocks()


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("page_layout", LAYOUTS)
def test_regions_of_one_pool_do_not_touch_each_other(flat: bool, page_layout: str) -> None:
    regions = [Region("a", INDEX_FP4, 5), Region("b", V41_FP8, 5), Region("c", V41_FP4, 3), Region("d", BF16, 2)]
    layout = PoolLayout(regions, tokens_per_block=5)
    assert layout.block_stride % math.lcm(128, 528, 288, 1024) == 0
    pool = layout.allocate(3).fill_(CANARY)
    caches = carve_regions(pool.view(-1) if flat else pool, layout, page_layout=page_layout)
    assert list(caches) == ["a", "b", "c", "d"]
    expected = {}
    for seed, (name, cache) in enumerate(caches.items()):
        assert cache.num_blocks == 3
        slots = torch.randperm(cache.num_slots, generator=torch.Generator().manual_seed(seed))
        expected[name] = (slots, random_records(cache.num_slots, cache.format, seed=seed))
        scatter_records(cache, *expected[name])
    covered = torch.zeros(3, layout.block_stride, dtype=torch.bool)
    for region, offset in zip(layout.regions, layout.offsets, strict=True):
        slots, records = expected[region.name]
        assert torch.equal(gather_records(caches[region.name], slots), records)
        assert not covered[:, offset : offset + region.page_bytes].any()
        covered[:, offset : offset + region.page_bytes] = True
    assert (pool[~covered] == CANARY).all()


def test_alignment_of_block_strides() -> None:
    assert block_stride_alignment(V41_FP8) == math.lcm(32, 528) == 1056
    assert block_stride_alignment("V41_FP4", pool=True) == math.lcm(128, 288) == 1152
    assert block_stride_alignment([V41_FP8, INDEX_FP4], pool=True) == 4224
    assert block_stride_alignment(INDEX_FP8) == 32
    assert (134 * 528) % block_stride_alignment(V41_FP8) == 0, "a ring of 134 tokens needs no padding"
    for wrong in ([], [Region("x", V41_FP8, 4), Region("x", V41_FP4, 4)]):
        with pytest.raises(errors.ArgumentError, match="distinct names"):
            PoolLayout(wrong)


# Large caches


def reserve(num_bytes: int) -> torch.Tensor:
    """Address space without memory behind it; pages come as they are touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    try:
        return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=torch.uint8)
    except (OSError, ValueError, OverflowError) as error:
        pytest.skip(f"{num_bytes} bytes of address space cannot be reserved here: {error}")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("fmt", "pages", "page"), [(V41_FP8, 63_600, 63_560), (V41_FP4, 116_600, 116_560)], ids=str)
def test_a_store_past_two_gibibytes_lands_on_its_page(fmt: RecordFormat, pages: int, page: int, layout: str) -> None:
    data = reserve(pages * 64 * fmt.record_bytes).view(pages, 64, 1, fmt.record_bytes)
    cache = PagedCache(data, fmt, 64, layout=layout)
    assert page * cache.page_bytes > 2**31
    record = encode(torch.randn(1, 512, generator=torch.Generator().manual_seed(1)), fmt)
    slots = torch.tensor([page * 64 + 3, 64 + 3], dtype=torch.int32)
    scatter_records(cache, slots, record.expand(2, -1))
    expected = byte_positions(fmt, 64, layout, cache.block_stride_bytes, int(slots[0]))
    assert torch.equal(data.view(-1)[expected], record[0])
    near, far = gather_records(cache, slots)
    assert torch.equal(near, record[0])
    assert torch.equal(far, record[0])
    wrapped = (page * cache.page_bytes) % 2**32 % 2**31
    assert (data.view(-1)[wrapped : wrapped + cache.page_bytes] == 0).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fmt", ALL, ids=str)
def test_slots_up_to_the_last_int32(fmt: RecordFormat, layout: str) -> None:
    pages = 2**31 // 64
    stride = 64 * fmt.record_bytes + 96
    memory = reserve(pages * stride)
    cache = PagedCache(memory, fmt, 64, layout=layout, block_stride=stride)
    assert cache.num_slots == 2**31
    slots = [2**31 - 1, 2**31 - 64, 2**24 + 1, 2**24, 16_777_281, 2**32 // fmt.record_bytes + 1, 1]
    records = random_records(len(slots), fmt)
    scatter_records(cache, torch.tensor(slots, dtype=torch.int32), records)
    for slot, record in zip(slots, records, strict=True):
        assert torch.equal(memory[byte_positions(fmt, 64, layout, stride, slot)], record)
    assert torch.equal(gather_records(cache, torch.tensor(slots, dtype=torch.int32)), records)
    with pytest.raises(errors.ShapeError, match=r"at most 2\^31 slots"):
        PagedCache(memory, fmt, 1, layout=layout)


def test_bytes_that_were_not_asked_for_are_not_read() -> None:
    """Memory without read permission around the records: reading one more byte ends the process."""
    script = """
        import ctypes, mmap, torch
        from sparse_mla.caches import PagedCache, gather_records
        from sparse_mla.formats import V41_FP8, INDEX_FP4
        unit = mmap.PAGESIZE
        area = mmap.mmap(-1, 64 * unit, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory = torch.frombuffer(area, dtype=torch.uint8)
        memory.fill_(7)
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        for fmt, layout in ((V41_FP8, "interleaved"), (V41_FP8, "planar"), (INDEX_FP4, "interleaved")):
            stride = 8 * unit
            cache = PagedCache(memory, fmt, 8 * unit // fmt.record_bytes, layout=layout, block_stride=stride)
            slots = torch.tensor([cache.page_size * 5, -1, cache.page_size * 2, -1], dtype=torch.int32)
            touched = set()
            for slot in (5, 2):
                starts = [(slot * stride, fmt.record_bytes)]
                if cache.is_sectioned:
                    scales = slot * stride + cache.page_size * fmt.data_bytes
                    starts = [(slot * stride, fmt.data_bytes), (scales, fmt.scale_bytes)]
                for start, size in starts:
                    touched |= set(range(start // unit, (start + size - 1) // unit + 1))
            base = memory.data_ptr()
            for page in range(64):
                if page not in touched:
                    assert protect(ctypes.c_void_p(base + page * unit), unit, 0) == 0
            records = gather_records(cache, slots)
            assert (records[[0, 2]] == 7).all() and (records[[1, 3]] == 0).all()
            assert protect(ctypes.c_void_p(base), 64 * unit, 3) == 0
        print("untouched")
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=config.environment(),
    )
    assert result.stdout.strip() == "untouched", result.stderr


# Slots and blocks


@given(slots=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20), page_size=st.integers(1, 4096))
@settings(max_examples=60, deadline=None)
def test_slots_and_blocks_are_inverse(slots: list[int], page_size: int) -> None:
    for dtype in (torch.int32, torch.int64):
        given_slots = torch.tensor(slots, dtype=dtype)
        block, offset = slots_to_blocks(given_slots, page_size)
        assert block.tolist() == [slot // page_size for slot in slots]
        assert offset.tolist() == [slot % page_size for slot in slots]
        assert blocks_to_slots(block, offset, page_size).tolist() == slots
    assert blocks_to_slots(torch.tensor([-1, 2**20], dtype=torch.int32), 5, 4096).tolist() == [-1, 2**32 + 5]


@given(
    fmt=st.sampled_from(ALL),
    layout=st.sampled_from(LAYOUTS),
    num_blocks=st.integers(1, 5),
    page_size=st.integers(1, 70),
    padding=st.integers(0, 40),
    start=st.integers(0, 40),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_any_geometry_round_trips(
    fmt: RecordFormat, layout: str, num_blocks: int, page_size: int, padding: int, start: int, data: Any
) -> None:
    memory, cache, stride = flat_cache(fmt, num_blocks, page_size, layout, padding=padding, start=start)
    slots = data.draw(st.lists(st.integers(-1, cache.num_slots - 1), min_size=1, max_size=12))
    records = random_records(len(slots), fmt)
    expected = memory.clone()
    for slot, record in zip(slots, records, strict=True):
        if slot >= 0:
            expected[byte_positions(fmt, page_size, layout, stride, slot, start)] = record
    scatter_records(cache, torch.tensor(slots), records)
    assert torch.equal(memory, expected)
    again = PagedCache.from_geometry(cache.data, cache.geometry)
    assert again.geometry == cache.geometry
    gathered = gather_records(again, torch.tensor(slots))
    for slot, record in zip(slots, gathered, strict=True):
        where = byte_positions(fmt, page_size, layout, stride, slot, start) if slot >= 0 else []
        assert torch.equal(record, memory[where] if slot >= 0 else torch.zeros_like(record))


@pytest.mark.parametrize("fmt", [V41_FP8, V41_FP4, INDEX_FP4], ids=str)
@pytest.mark.parametrize("e4m3_max", [448, 224])
@pytest.mark.parametrize("layout", ["interleaved", "planar"])
@pytest.mark.parametrize("inside", [{}, {"block_stride": 9000, "region_offset": 96}])
def test_geometry_holds_all_but_the_tensor(
    fmt: RecordFormat, e4m3_max: int, layout: str, inside: dict[str, int]
) -> None:
    data = torch.zeros(90_000, dtype=torch.uint8) if inside else torch.zeros(2, 7, 1, fmt.record_bytes).byte()
    cache = PagedCache(data, fmt, 7, layout=layout, e4m3_max=e4m3_max, **inside)
    again = PagedCache.from_geometry(data, cache.geometry)
    for name in ("format", "page_size", "layout", "e4m3_max", "region_offset", "block_stride"):
        assert getattr(again, name) == getattr(cache, name), name


# What a cache says of itself, and what it refuses


def test_a_bare_tensor_takes_layout_and_cap_from_the_configuration() -> None:
    data = torch.zeros(2, 64, 1, 528, dtype=torch.uint8)
    indices = torch.zeros(1, 1, 4, dtype=torch.int32)
    scope = KVScope(data, indices)
    assert (scope.cache.format, scope.cache.layout, scope.cache.e4m3_max) == (V41_FP8, "interleaved", 448)
    with config.override(SPARSE_MLA_LAYOUT="planar", SPARSE_MLA_E4M3_MAX=224):
        scope = KVScope(data, indices, None)
        assert (scope.cache.layout, scope.cache.e4m3_max) == ("planar", 224)
        assert PagedCache.of(data, layout="interleaved", e4m3_max=448).layout == "interleaved"
        given_cache = PagedCache(data, V41_FP8, 64)
        assert KVScope(given_cache, indices).cache is given_cache
    assert PagedCache.of(torch.zeros(2, 64, 288, dtype=torch.uint8)).format is V41_FP4
    assert PagedCache.of(torch.zeros(2, 64, 1, 68, dtype=torch.int8), index=True).format is INDEX_FP4


def test_a_cache_is_a_frozen_value_that_can_be_replaced() -> None:
    cache = allocate(V41_FP8, 2, 64, e4m3_max=224, block_stride=64 * 528 + 32)
    with pytest.raises(dataclasses.FrozenInstanceError):
        cache.page_size = 32  # type: ignore[misc]
    planar = dataclasses.replace(cache, layout="planar")
    assert planar.data is cache.data
    assert (planar.layout, planar.e4m3_max, planar.block_stride_bytes) == ("planar", 224, 64 * 528 + 32)
    scope = KVScope(cache, torch.zeros(1, 1, 1, dtype=torch.int32))
    assert dataclasses.replace(scope, cache=planar).indices is scope.indices
    assert "V41_FP8, 2 blocks of 64, sectioned" in repr(planar)
    with pytest.raises(errors.FormatError, match=r"PagedCache\.geometry"):
        _ = PagedCache(cache.data, RecordFormat("OWN", V41_FP8.element, 512, 32, V41_FP8.scale), 64).geometry


def zeros(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("width", "hint"),
    [
        (584, "V4 record"),
        (656, "V3.2 record"),
        (592, "older"),
        (512, "head size"),
        (576, "head size"),
        (384, "V4 family"),
    ],
)
def test_a_cache_of_a_foreign_width_is_refused_at_once(width: int, hint: str) -> None:
    """An allocation with the head size instead of the record's bytes fails here, not in a kernel."""
    with pytest.raises(errors.FormatError, match=rf"528 bytes, got {width}; {width} is .*{hint}"):
        PagedCache(zeros(2, 64, 1, width), V41_FP8, 64)
    with pytest.raises(errors.FormatError, match=rf"KVScope: cache must have.*got {width}; .*{hint}"):
        KVScope(zeros(2, 64, 1, width), zeros(1, 1, 1, dtype=torch.int32))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: PagedCache(None, V41_FP8, 64), errors.DTypeError, "data must be a tensor, got NoneType"),
        (lambda: PagedCache(zeros(2, 64, 1, 528, dtype=torch.float32), V41_FP8, 64), errors.DTypeError, "got float32"),
        (
            lambda: PagedCache(zeros(2, 64, 1, 528, dtype=torch.bfloat16), V41_FP8, 64),
            errors.DTypeError,
            "got bfloat16",
        ),
        (lambda: PagedCache(zeros(2, 64, 1, 528), "V4", 64), errors.FormatError, "got 'V4'"),
        (
            lambda: PagedCache(zeros(2, 64, 1, 528), V41_FP8, 32),
            errors.ShapeError,
            r"\[num_blocks, 32, 1, 528\], got \[2, 64",
        ),
        (lambda: PagedCache(zeros(2, 64, 2, 528), V41_FP8, 64), errors.ShapeError, r"got \[2, 64, 2, 528\]"),
        (
            lambda: PagedCache(zeros(2, 64, 1, 528), V41_FP8, 0),
            errors.ArgumentError,
            "page_size must be at least 1, got 0",
        ),
        (lambda: PagedCache(zeros(2, 64, 1, 528), V41_FP8, 64, layout="flat"), errors.ArgumentError, "got 'flat'"),
        (lambda: PagedCache(zeros(2, 64, 1, 528), V41_FP8, 64, e4m3_max=240), errors.ArgumentError, "got 240"),
        (
            lambda: PagedCache(zeros(2, 64, 1, 528), V41_FP8, 64, region_offset=4),
            errors.ArgumentError,
            "region_offset must",
        ),
        (
            lambda: PagedCache(zeros(2, 64, 1, 528), V41_FP8, 64, block_stride=99),
            errors.ArgumentError,
            "own 33792 bytes, got 99",
        ),
        (lambda: PagedCache(zeros(2, 64, 1, 1056)[..., ::2], V41_FP8, 64), errors.ShapeError, "must be contiguous"),
        (lambda: PagedCache(zeros(64, 2, 528).transpose(0, 1), V41_FP8, 64), errors.ShapeError, "must be contiguous"),
        (lambda: PagedCache(zeros(1, 64, 1, 528).expand(3, 64, 1, 528), V41_FP8, 64), errors.ShapeError, "overlap"),
        (lambda: PagedCache(zeros(2, 528 * 4), V41_FP8, 5), errors.ShapeError, "up to byte 2640, got blocks of 2112"),
        (lambda: PagedCache(zeros(2, 528 * 4), V41_FP8, 4, region_offset=1), errors.ShapeError, "up to byte 2113"),
        (lambda: PagedCache(zeros(2, 528 * 4), V41_FP8, 4, region_offset=-1), errors.ShapeError, "region_offset -1"),
        (lambda: PagedCache(zeros(2, 528 * 8)[:, ::2], V41_FP8, 4), errors.ShapeError, r"stride\(1\) = 2"),
        (lambda: PagedCache(zeros(9000)[::2], V41_FP8, 4), errors.ShapeError, r"stride\(0\) = 2"),
        (lambda: PagedCache(zeros(9000), V41_FP8, 4, block_stride=528), errors.ShapeError, "at least the 2112 bytes"),
        (lambda: PagedCache(zeros(9000), V41_FP8, 4, block_stride=0), errors.ArgumentError, "block_stride positive"),
        (lambda: PagedCache(zeros(1, 1, 1, 1, 528), V41_FP8, 1), errors.ShapeError, r"got \[1, 1, 1, 1, 528\]"),
        (
            lambda: PagedCache(torch.zeros(1, 2, 1, 512, dtype=torch.bfloat16, requires_grad=True), BF16, 2),
            errors.DTypeError,
            "must not require grad",
        ),
        (lambda: PagedCache.of("cache"), errors.DTypeError, "got str"),
        (lambda: PagedCache.of(zeros(4, 528)), errors.ShapeError, "a pool needs a PagedCache"),
        (lambda: PagedCache.of(zeros(2, 4, 1, 528, dtype=torch.float32)), errors.DTypeError, "got float32"),
        (lambda: PagedCache.of(zeros(2, 4, 1, 256, dtype=torch.bfloat16)), errors.ShapeError, "512.* as bfloat16"),
        (
            lambda: PagedCache.of(zeros(2, 4, 1, 512, dtype=torch.bfloat16), index=True),
            errors.DTypeError,
            "got bfloat16",
        ),
        (lambda: allocate(V41_FP8, -1, 4), errors.ArgumentError, "num_blocks must be >= 0"),
        (lambda: allocate(V41_FP8, 2, 4, block_stride=100), errors.ArgumentError, "at least the 2112 bytes"),
        (
            lambda: gather_records(allocate(V41_FP8, 1, 4), torch.zeros(2)),
            errors.DTypeError,
            "slots must be int32 or int64",
        ),
        (
            lambda: scatter_records(allocate(V41_FP8, 1, 4), zeros(2, dtype=torch.int16), zeros(2, 528)),
            errors.DTypeError,
            "int32 or int64, got int16",
        ),
        (
            lambda: scatter_records(allocate(V41_FP8, 1, 4), zeros(2, 1, dtype=torch.int32), zeros(2, 528)),
            errors.ShapeError,
            r"slots must be \[n\], got \[2, 1\]",
        ),
        (
            lambda: scatter_records(allocate(V41_FP8, 1, 4), zeros(2, dtype=torch.int32), zeros(3, 528)),
            errors.ShapeError,
            r"records must be \[2, 528\] for V41_FP8, got \[3, 528\]",
        ),
        (
            lambda: scatter_records(allocate(V41_FP8, 1, 4), zeros(2, dtype=torch.int32), torch.zeros(2, 528)),
            errors.DTypeError,
            "records must be uint8",
        ),
        (
            lambda: carve_regions(zeros(2, 100), PoolLayout([Region("a", V41_FP8, 4)])),
            errors.ShapeError,
            "must have 2112 bytes, got 100",
        ),
        (
            lambda: carve_regions(zeros(100), PoolLayout([Region("a", V41_FP8, 4)])),
            errors.ShapeError,
            "multiple of 4224 bytes",
        ),
        (
            lambda: carve_regions(zeros(1, 1, 1), PoolLayout([Region("a", V41_FP8, 4)])),
            errors.ShapeError,
            "pool must be",
        ),
    ],
)
def test_bad_input_is_one_sentence(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        make()
    text = str(caught.value)
    assert text.endswith(".")
    assert "\n" not in text


def test_building_a_cache_is_cheap() -> None:
    """It is part of every call. 2.4 us on the machine this was written on; the bound allows for a busy one."""
    data = zeros(4, 64, 1, 528)
    best = min(timeit.repeat(lambda: PagedCache(data, V41_FP8, 64), number=500, repeat=15)) / 500
    assert best < 20e-6


@pytest.mark.parametrize("fmt", [*MAIN_FORMATS, INDEX_FP4], ids=str)
def test_a_cache_is_built_inside_a_compiled_graph(fmt: RecordFormat) -> None:
    """Also over a padded block stride, and without a new graph for every number of blocks."""

    def read(data: torch.Tensor, block: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        cache = PagedCache(data, fmt, 4, layout="planar")
        scope = KVScope(cache, block)
        values, scales = scope.cache.data_and_scales()
        return torch.cat((values[block, offset], scales[block, offset]), dim=-1)

    torch._dynamo.reset()
    compiled = torch.compile(read, fullgraph=True, backend="eager")
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    for blocks in (3, 4, 7, 20):
        wide = torch.randint(0, 256, (blocks, 4 * fmt.record_bytes + 96), dtype=torch.uint8)
        data = wide[:, : 4 * fmt.record_bytes].view(blocks, 4, 1, fmt.record_bytes)
        slots = torch.tensor([0, 7, 11])
        block, offset = slots_to_blocks(slots, 4)
        expected = gather_records(PagedCache(data, fmt, 4, layout="planar"), slots)
        assert torch.equal(compiled(data, block, offset), expected)
    assert graphs["unique_graphs"] - before <= 2


def test_split_views_are_the_record() -> None:
    cache = allocate(V41_FP4, 2, 3, layout="planar")
    scatter_records(cache, torch.arange(6), random_records(6, V41_FP4))
    data, scales = cache.data_and_scales()
    expected = split_record(random_records(6, V41_FP4), V41_FP4)
    assert torch.equal(data.flatten(0, 1), expected[0])
    assert torch.equal(scales.flatten(0, 1), expected[1])


def test_unchecked_reads_skip_only_the_check() -> None:
    cache = allocate(V41_FP8, 2, 4)
    scatter_records(cache, torch.arange(8), random_records(8, V41_FP8))
    slots = torch.tensor([7, -1, 0], dtype=torch.int32)
    with config.override(SPARSE_MLA_CHECKS=False):
        assert torch.equal(gather_records(cache, slots), gather_records(cache, slots, checked=True))
    assert torch.equal(gather_records(cache, slots, checked=False), gather_records(cache, slots))
