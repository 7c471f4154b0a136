# SPDX-License-Identifier: Apache-2.0
"""Index scores against a float64 oracle and golden vectors; paging, sentinels, strides; and that a logit's bits
depend on nothing but its query row and its key."""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing

from index_data import (
    FORMATS,
    Problem,
    decode_pair,
    make_problem,
    make_query,
    make_records,
    relative_error,
    sectioned,
)
from sparse_mla import config
from sparse_mla.caches import PagedCache
from sparse_mla.errors import ArgumentError, DTypeError, FormatError, ShapeError, SlotRangeError, SparseMlaError
from sparse_mla.formats import INDEX_FP4, INDEX_FP8, INDEX_FP8_FP32, V41_FP8, decode
from sparse_mla.ops.index_logits import (
    LOGITS_ROW_ALIGN_BYTES,
    Candidates,
    IndexLogitsCall,
    PagedKeys,
    RaggedKeys,
    index_logits,
)

VECTORS = Path(__file__).parent / "data" / "vectors"
INF = math.inf


@pytest.fixture(autouse=True)
def _on_the_reference() -> Iterator[None]:
    """These tests hold the definition; other backends are held to it by the cases."""
    with config.override(SPARSE_MLA_BACKEND="reference"):
        yield


def cache_of(problem: Problem) -> PagedCache:
    return PagedCache(problem.pages, problem.fmt, problem.pages.shape[1])


def keys_of(problem: Problem, width: int | None = None) -> PagedKeys:
    return PagedKeys(cache_of(problem), problem.block_table, problem.context_lens, width)


def score(problem: Problem, width: int | None = None, **options: Any) -> torch.Tensor:
    return index_logits(problem.q, keys_of(problem, width), problem.weights, **options)


def contiguous(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """(data, sf) of all records of a problem, in page order, as ragged keys hold them."""
    records, fmt = problem.records.reshape(-1, problem.fmt.record_bytes), problem.fmt
    data = records[:, : fmt.data_bytes].contiguous()
    sf = records[:, fmt.data_bytes :].contiguous()
    if fmt is INDEX_FP4:
        return data.view(torch.int8), sf.view(torch.int32)[:, 0]
    return data.view(torch.float8_e4m3fn), sf.view(torch.int32 if fmt is INDEX_FP8 else torch.float32)[:, 0]


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("page_size", [1, 5, 61, 64, 96, 192])
def test_every_logit_over_random_pages(fmt: Any, page_size: int) -> None:
    problem = make_problem(fmt, [[400, 391], [0, 1], [17, 400]], page_size=page_size, heads=3, seed=page_size)
    expected = problem.expected(405)
    single = score(problem, 405, out_dtype=torch.float32)
    assert relative_error(single, expected) < 1e-6
    assert relative_error(score(problem, 405, out_dtype=torch.float64), expected) < 1e-7
    assert torch.equal(score(problem, 405), single.bfloat16())  # one rounding of the float32 result


@pytest.mark.parametrize("heads", [1, 2, 3, 7, 11, 32, 33, 64, 128, 130])
def test_any_number_of_heads(heads: int) -> None:
    for fmt in FORMATS:
        problem = make_problem(fmt, [[50], [33]], heads=heads, seed=heads, weights_dtype=torch.float32)
        assert relative_error(score(problem, 60, out_dtype=torch.float32), problem.expected(60)) < 2e-6


def test_error_is_at_most_twice_that_of_plain_bfloat16_torch() -> None:
    for fmt in FORMATS:
        problem = make_problem(fmt, [[700, 512]], heads=32, page_size=64, seed=5)
        expected = problem.expected(700)
        q = decode_pair(problem.q, fmt).bfloat16()[0]  # [n, h, 128]
        keys = decode(problem.records, fmt).reshape(-1, 128)
        slots = problem.block_table[0, torch.arange(700) // 64].long() * 64 + torch.arange(700) % 64
        plain = (torch.matmul(q, keys[slots].t()).relu() * problem.weights.bfloat16()[:, :, None]).sum(dim=1)
        plain[1, 512:] = -INF
        error, allowed = relative_error(score(problem, 700), expected), relative_error(plain, expected)
        assert error <= 2 * allowed
        assert error < 4e-3


@pytest.mark.parametrize("kind", ["fp4", "fp8"])
@pytest.mark.parametrize("sf_dtype", [torch.uint8, torch.int16, torch.int32])
def test_golden_vectors(kind: str, sf_dtype: torch.dtype) -> None:
    v = json.loads((VECTORS / "paged_mqa_logits.json").read_text())
    fmt = INDEX_FP4 if kind == "fp4" else INDEX_FP8
    rows, heads, page = v["T"], v["H"], v["page_kv"]
    raw = bytes.fromhex("".join("".join(row) for row in v[f"q_{kind}"]))
    q = torch.frombuffer(bytearray(raw), dtype=torch.uint8).reshape(rows, 1, heads, -1)
    q = q.view(torch.int8 if kind == "fp4" else torch.float8_e4m3fn)
    sf = torch.tensor(v[f"q_sf_{kind}_uint8"], dtype=torch.uint8).reshape(rows, 1, heads, 4).view(sf_dtype)
    pages = torch.stack([torch.frombuffer(bytearray(bytes.fromhex(p)), dtype=torch.uint8) for p in v[f"pages_{kind}"]])
    weights = torch.frombuffer(bytearray(bytes.fromhex(v["weights_bf16le"])), dtype=torch.bfloat16).reshape(rows, heads)
    keys = PagedKeys(
        pages.reshape(-1, page, 1, fmt.record_bytes),
        torch.tensor(v["block_table"], dtype=torch.int32),
        torch.tensor(v["context_lens"], dtype=torch.int32),
        v["max_context_len"],
    )
    pair = (q, sf.squeeze(-1) if sf_dtype == torch.int32 else sf)
    expected = torch.tensor([[float(x) for x in row] for row in v[f"logits_{kind}"]], dtype=torch.float64)
    assert relative_error(index_logits(pair, keys, weights, out_dtype=torch.float64), expected) < 1e-12
    assert relative_error(index_logits(pair, keys, weights, out_dtype=torch.float32), expected) < 1e-6
    assert relative_error(index_logits(pair, keys, weights), expected) < 2**-8


def test_a_distinct_marker_for_every_token_is_scored_exactly_once() -> None:
    context, heads = 3072, 1
    for page_size in (16, 48, 61, 96, 160, 192, 224):
        pages = -(-context // page_size)
        # Key t is a one-hot vector with its own scale: read twice, skipped, or with a neighbour's scale, it shows.
        records = torch.zeros(pages * page_size, INDEX_FP4.record_bytes, dtype=torch.uint8)
        token = torch.arange(pages * page_size)
        records[token, (token % 32) // 2] = torch.where(token % 2 == 0, 2, 2 << 4).to(torch.uint8)  # 1.0 in e2m1
        records[:, 64] = (120 + token % 15).to(torch.uint8)
        records = records.reshape(pages, page_size, -1)
        table = torch.arange(pages - 1, -1, -1, dtype=torch.int32)[None]
        shuffled = records.flip(0)
        q = torch.full((1, 1, heads, 64), 2 | 2 << 4, dtype=torch.uint8)
        sf = torch.full((1, 1, heads, 4), 127, dtype=torch.uint8)
        keys = PagedKeys(sectioned(shuffled, INDEX_FP4), table, torch.tensor([[context]], dtype=torch.int32), context)
        out = index_logits((q, sf), keys, torch.ones(1, heads), out_dtype=torch.float32)
        assert torch.equal(out[0], torch.exp2((120 + torch.arange(context) % 15 - 127).float()))


def test_fp8_pages_with_ue8m0_and_with_float32_scales() -> None:
    lengths = [[90], [64]]
    for fmt in (INDEX_FP8, INDEX_FP8_FP32):
        problem = make_problem(fmt, lengths, heads=8, page_size=32, seed=77)
        assert relative_error(score(problem, 90, out_dtype=torch.float32), problem.expected(90)) < 1e-6
    # The same bytes read the other way are other numbers; a query without scales does not read pages that have them.
    ue8m0, one = (make_problem(fmt, lengths, heads=8, page_size=32, seed=77) for fmt in (INDEX_FP8, INDEX_FP8_FP32))
    crossed = index_logits(one.q, keys_of(one._replace(pages=ue8m0.pages)), one.weights, out_dtype=torch.float32)
    straight = score(ue8m0, out_dtype=torch.float32)
    assert not torch.equal(crossed[:, :64].nan_to_num(), straight[:, :64])
    with pytest.raises(FormatError, match=r"keys.cache must hold INDEX_FP8_FP32 records to match q, got INDEX_FP8"):
        index_logits(one.q, keys_of(ue8m0), one.weights)
    with pytest.raises(FormatError, match=r"keys.cache must hold INDEX_FP8 records to match q, got INDEX_FP8_FP32"):
        index_logits(ue8m0.q, keys_of(one), one.weights)
    fp4 = make_problem(INDEX_FP4, lengths, heads=8)
    with pytest.raises(ArgumentError, match="index_logits: q_sf must be given with e2m1 queries, got None"):
        index_logits((fp4.q[0], None), keys_of(fp4), fp4.weights)


# --- what must not be read -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_unselected_bytes_change_no_bit(fmt: Any) -> None:
    problem = make_problem(fmt, [[37, 30], [0, 0], [20, 21]], page_size=8, num_pages=64, pad=24, seed=3)
    table = torch.where(problem.block_table == 0, 1, problem.block_table)  # nobody selects page 0
    problem = problem._replace(block_table=table)
    want = score(problem, 50, out_dtype=torch.float32)
    assert bool(want.isfinite().any())
    flat = problem.pages.as_strided((64, problem.pages.stride(0)), (problem.pages.stride(0), 1))
    for byte in (0xFF, 0x7F, 0x00):
        poisoned = torch.full_like(flat, byte)
        for row in range(3):
            length = int(problem.context_lens[row].max())
            for j in range(length):
                page, offset = int(table[row, j // 8]), j % 8
                for first, size in ((offset * fmt.data_bytes, fmt.data_bytes), (8 * fmt.data_bytes + 4 * offset, 4)):
                    poisoned[page, first : first + size] = flat[page, first : first + size]
        pages = poisoned.as_strided(problem.pages.shape, problem.pages.stride())
        assert torch.equal(score(problem._replace(pages=pages), 50, out_dtype=torch.float32), want)


@pytest.mark.parametrize("stale", [2**31 - 1, -(2**31), -1, 64])
def test_table_entries_past_the_context_are_never_dereferenced(stale: int) -> None:
    problem = make_problem(INDEX_FP4, [[9], [0], [16]], page_size=8, num_pages=64, seed=4)
    want = score(problem, 24)
    table = problem.block_table.clone()
    used = torch.tensor([2, 0, 2])
    table[torch.arange(table.shape[1])[None, :] >= used[:, None]] = stale
    assert torch.equal(score(problem._replace(block_table=table), 24), want)


@pytest.mark.parametrize("bad", [64, -1, 2**31 - 1])
def test_a_table_entry_inside_the_context_must_be_a_page(bad: int) -> None:
    problem = make_problem(INDEX_FP4, [[9], [5], [16]], page_size=8, num_pages=64, seed=4)
    problem.block_table[2, 1] = bad
    with pytest.raises(SlotRangeError, match=rf"block_table must hold pages below 64 .* got {bad} at \[2, 1\]"):
        score(problem, 24)


def test_nan_codes_and_scale_255_count_as_zero_keys() -> None:
    problem = make_problem(INDEX_FP8, [[16]], page_size=16, num_pages=2, heads=2, seed=6)
    page = int(problem.block_table[0, 0])
    problem.records[page, 3, :128] = 0x7F
    problem.records[page, 5, 128:] = 0xFF
    out = score(problem._replace(pages=sectioned(problem.records, INDEX_FP8)), 16, out_dtype=torch.float32)[0]
    assert out[3] == 0
    assert out[5] == 0
    assert bool(out.isfinite().all())


# --- shapes of the problem -------------------------------------------------------------------------------------------


def test_all_contexts_zero() -> None:
    problem = make_problem(INDEX_FP4, [[0]] * 32, seed=1)
    for width in (0, 1, 256):
        out = score(problem, width)
        assert out.shape == (32, width)
        assert bool((out == -INF).all())
    mixed = make_problem(INDEX_FP4, [[0], [5], [0], [64]], seed=1)
    assert relative_error(score(mixed, 64, out_dtype=torch.float32), mixed.expected(64)) < 1e-6


def test_no_rows_and_no_pages() -> None:
    problem = make_problem(INDEX_FP4, [[3], [4]], seed=1)
    empty = index_logits(
        (problem.q[0][:0], problem.q[1][:0]),
        PagedKeys(cache_of(problem), problem.block_table[:0], problem.context_lens[:0], 7),
        problem.weights[:0],
    )
    assert empty.shape == (0, 7)
    nothing = PagedKeys(problem.pages[:0], problem.block_table, torch.zeros_like(problem.context_lens), 7)
    assert bool((index_logits(problem.q, nothing, problem.weights) == -INF).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_result_rows_are_aligned_and_contiguous_inside(dtype: torch.dtype) -> None:
    problem = make_problem(INDEX_FP4, [[90], [1]], seed=2)
    for width in (0, 1, 100, 256, 257, 4097):
        out = score(problem, width, out_dtype=dtype)
        assert out.shape == (2, width)
        assert out.dtype == dtype
        assert out.stride(1) == 1
        assert out.stride(0) * out.element_size() % LOGITS_ROW_ALIGN_BYTES == 0
        if width >= 100:
            for view in (out, out.contiguous()):
                assert torch.equal(
                    torch.topk(view, 5).values, torch.topk(score(problem, 100, out_dtype=dtype), 5).values
                )


def test_keys_past_the_width_are_cut() -> None:
    problem = make_problem(INDEX_FP4, [[90], [40]], seed=2)
    full = score(problem, 90)
    assert torch.equal(score(problem, 50), full[:, :50])
    assert score(problem).shape[1] == problem.block_table.shape[1] * 16


@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize("b", [1, 3])
def test_several_query_rows_equal_the_flattened_call(n: int, b: int) -> None:
    lengths = [[30 + 7 * i + j for j in range(n)] for i in range(b)]
    problem = make_problem(INDEX_FP4, lengths, heads=32, seed=n)
    flat = problem._replace(
        q=(problem.q[0].reshape(b * n, 1, 32, -1), problem.q[1].reshape(b * n, 1, 32)),
        block_table=problem.block_table.repeat_interleave(n, dim=0),
        context_lens=problem.context_lens.reshape(b * n, 1),
    )
    assert torch.equal(score(problem, 70), score(flat, 70))


def test_context_lens_of_rank_one_only_with_one_row_per_element() -> None:
    problem = make_problem(INDEX_FP4, [[30], [7]], seed=8)
    flat = problem._replace(context_lens=problem.context_lens[:, 0])
    assert torch.equal(score(flat, 40), score(problem, 40))
    two = make_problem(INDEX_FP4, [[30, 31], [7, 8]], seed=8)
    with pytest.raises(ShapeError, match=r"context_lens must be \[b, n\] with n = 2, got \[2\]"):
        score(two._replace(context_lens=two.context_lens[:, 0]), 40)


def test_query_scales_in_every_packing_are_the_same_query() -> None:
    results = []
    for sf_dtype in (torch.int32, torch.int16, torch.uint8):
        for fmt in (INDEX_FP4, INDEX_FP8):
            problem = make_problem(fmt, [[40, 41]], heads=5, seed=9, sf_dtype=sf_dtype)
            results.append((fmt, score(problem, 48)))
    for fmt, result in results:
        assert torch.equal(result, next(other for f, other in results if f is fmt))


def test_strided_inputs_equal_contiguous_ones() -> None:
    problem = make_problem(INDEX_FP4, [[40, 41], [7, 9]], heads=6, seed=10)
    want = score(problem, 48)
    b, n, h = 2, 2, 6
    lens = torch.full((b, n + 3), 99, dtype=torch.int32)
    lens[:, 1 : 1 + n] = problem.context_lens
    table = torch.full((b, problem.block_table.shape[1] + 5), 2**31 - 1, dtype=torch.int32)
    table[:, 2:-3] = problem.block_table
    weights = torch.zeros(b * n, 2 * h, dtype=torch.bfloat16)
    weights[:, ::2] = problem.weights
    q = torch.zeros(n, b, h + 1, 64, dtype=torch.int8)
    q[:, :, 1:] = problem.q[0].transpose(0, 1)
    sf = torch.zeros(b, n, h, 2, dtype=torch.int32)
    sf[..., 1] = problem.q[1]
    strided = problem._replace(
        q=(q[:, :, 1:].transpose(0, 1), sf[..., 1]),
        context_lens=lens[:, 1 : 1 + n],
        block_table=table[:, 2:-3],
        weights=weights[:, ::2],
    )
    assert not strided.q[0].is_contiguous()
    assert torch.equal(score(strided, 48), want)


def test_page_stride_larger_than_the_page_and_a_pool_region() -> None:
    plain = make_problem(INDEX_FP4, [[40], [33]], page_size=16, seed=11)
    want = score(plain, 48)
    for pad in (4, 13, 576, 1_002_240 - 16 * 68):
        if pad > 10_000:
            padded = plain._replace(pages=sectioned(plain.records[:, :, :], INDEX_FP4, pad=pad))
        else:
            padded = make_problem(INDEX_FP4, [[40], [33]], page_size=16, seed=11, pad=pad)
        assert padded.pages.stride(0) == 16 * 68 + pad
        assert torch.equal(score(padded, 48), want)
    pages, region = plain.pages.shape[0], 160
    pool = torch.full((pages, region + 16 * 68 + 33), 0xFF, dtype=torch.uint8)
    pool[:, region : region + 16 * 68] = plain.pages.reshape(pages, -1)
    cache = PagedCache(pool, INDEX_FP4, 16, region_offset=region)
    assert torch.equal(index_logits(plain.q, keys_of(plain, 48)._replace(cache=cache), plain.weights), want)


def test_byte_dtypes_of_the_cache_and_of_e4m3_queries_are_views() -> None:
    problem = make_problem(INDEX_FP8, [[20]], seed=12)
    want = score(problem, 20)
    for dtype in (torch.uint8, torch.int8, torch.float8_e4m3fn):
        viewed = problem._replace(q=(problem.q[0].view(dtype), problem.q[1]), pages=problem.pages.view(dtype))
        assert torch.equal(score(viewed, 20), want)
        bare = PagedKeys(viewed.pages, problem.block_table, problem.context_lens, 20)
        assert torch.equal(index_logits(viewed.q, bare, problem.weights), want)


# --- ragged keys -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_ragged_keys_score_as_pages_do(fmt: Any) -> None:
    problem = make_problem(fmt, [[1]], num_pages=20, page_size=16, heads=7, seed=13)
    data, sf = contiguous(problem)
    starts = torch.tensor([0, 0, 100, 320, 17, 5, 200], dtype=torch.int32)
    ends = torch.tensor([0, 320, 101, 320, 130, 2, 320], dtype=torch.int32)  # empty, full, single, at the end, negative
    rows = len(starts)
    q = make_query(fmt, (rows, 7), 14)
    weights = torch.randn(rows, 7, generator=torch.Generator().manual_seed(1))
    out = index_logits(q, RaggedKeys(data, sf, starts, ends, 325), weights, out_dtype=torch.float32)
    table = torch.arange(20, dtype=torch.int32)[None]
    whole = index_logits(
        tuple(None if x is None else x[None] for x in q),
        PagedKeys(cache_of(problem), table, torch.full((1, rows), 320, dtype=torch.int32)),
        weights,
        out_dtype=torch.float32,
    )
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        length = max(0, end - start)
        assert torch.equal(out[row, :length], whole[row, start : start + length]), row
        assert bool((out[row, length:] == -INF).all())
    # Keys past max_len are cut, and keys outside every range may hold anything.
    assert torch.equal(
        index_logits(q, RaggedKeys(data, sf, starts, ends, 50), weights, out_dtype=torch.float32), out[:, :50]
    )


def test_ragged_scales_in_every_packing() -> None:
    problem = make_problem(INDEX_FP4, [[1]], num_pages=4, seed=15)
    data, sf = contiguous(problem)
    q = make_query(INDEX_FP4, (2, 3), 16)
    starts, ends = torch.tensor([0, 9], dtype=torch.int32), torch.tensor([60, 20], dtype=torch.int32)
    weights = torch.randn(2, 3)
    want = index_logits(q, RaggedKeys(data, sf, starts, ends, 60), weights)
    packed = sf[:, None].contiguous()
    for view in (packed.view(torch.int16), packed.view(torch.uint8)):
        assert torch.equal(index_logits(q, RaggedKeys(data.view(torch.uint8), view, starts, ends, 60), weights), want)


def test_ragged_ranges_must_be_inside_the_keys() -> None:
    problem = make_problem(INDEX_FP4, [[1]], num_pages=4, seed=15)
    data, sf = contiguous(problem)
    q = make_query(INDEX_FP4, (2, 3), 16)
    for starts, ends in (([0, 0], [1, 65]), ([-1, 0], [5, 5])):
        keys = RaggedKeys(data, sf, torch.tensor(starts, dtype=torch.int32), torch.tensor(ends, dtype=torch.int32), 99)
        with pytest.raises(SlotRangeError, match=r"keys.starts and keys.ends must be inside the 64 keys"):
            index_logits(q, keys, torch.zeros(2, 3))


# --- candidate blocks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("block_size", [8, 16])
def test_compact_logits_are_the_dense_ones(fmt: Any, block_size: int) -> None:
    problem = make_problem(fmt, [[203, 50], [0, 7]], page_size=5, heads=3, seed=17)
    dense = score(problem, 203, out_dtype=torch.float32)
    blocks = torch.tensor([[0, 2, 3, 12], [1, 3, -1, -1], [-1, -1, -1, -1], [0, 5, -1, -1]], dtype=torch.int32)
    compact = score(problem, candidates=Candidates(blocks, block_size), out_dtype=torch.float32)
    assert compact.shape == (4, 4 * block_size)
    for row in range(4):
        for c in range(4 * block_size):
            block = int(blocks[row, c // block_size])
            entry = block * block_size + c % block_size
            want = dense[row, entry] if block >= 0 and entry < 203 else torch.tensor(-INF)
            assert torch.equal(compact[row, c], want)


def test_candidates_of_ragged_keys_count_from_the_row_or_from_key_zero() -> None:
    problem = make_problem(INDEX_FP4, [[1]], num_pages=10, seed=18)
    data, sf = contiguous(problem)
    q = make_query(INDEX_FP4, (2, 3), 19)
    weights = torch.randn(2, 3, generator=torch.Generator().manual_seed(2))
    starts, ends = torch.tensor([3, 32], dtype=torch.int32), torch.tensor([90, 131], dtype=torch.int32)
    keys = RaggedKeys(data, sf, starts, ends, 100)
    dense = index_logits(q, keys, weights)
    blocks = torch.tensor([[0, 5, 10], [4, 12, 16]], dtype=torch.int32)
    for origin in ("row", "keys"):
        compact = index_logits(q, keys, weights, candidates=Candidates(blocks, 8, origin))
        for row in range(2):
            base = int(starts[row]) if origin == "keys" else 0
            for c in range(24):
                entry = int(blocks[row, c // 8]) * 8 + c % 8 - base
                inside = 0 <= entry < int(ends[row] - starts[row])
                assert torch.equal(
                    compact[row, c], dense[row, entry] if inside else torch.tensor(-INF, dtype=compact.dtype)
                )


@pytest.mark.parametrize("rows", [[3, 3], [5, 2], [-1, 4], [-2, 1]])
def test_candidate_ids_must_ascend(rows: list[int]) -> None:
    problem = make_problem(INDEX_FP4, [[60]], seed=20)
    with pytest.raises(ArgumentError, match=r"candidates.blocks must be strictly increasing ids and then only -1"):
        score(problem, candidates=Candidates(torch.tensor([rows], dtype=torch.int32)))


# --- determinism -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_bits_do_not_depend_on_neighbours_width_tiles_or_threads(fmt: Any) -> None:
    n = 600
    base = make_problem(fmt, [[n]], heads=32, page_size=64, seed=21)
    want = score(base, n, out_dtype=torch.float32)[0]
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for limit in (1 << 20, 1 << 30):
                assert torch.equal(score(base, n, out_dtype=torch.float32, memory_limit=limit)[0], want)
            for width in (4 * n, 65536):
                assert torch.equal(score(base, width, out_dtype=torch.float32)[0, :n], want)
            for b in (2, 7):
                lens = torch.randint(0, n, (b, 1), generator=torch.Generator().manual_seed(b), dtype=torch.int32)
                lens[b // 2] = n
                q = [None if x is None else x.expand(b, *x.shape[1:]) for x in base.q]
                keys = PagedKeys(cache_of(base), base.block_table.expand(b, -1), lens, n)
                out = index_logits(tuple(q), keys, base.weights.expand(b, -1), out_dtype=torch.float32)
                assert torch.equal(out[b // 2], want)
    finally:
        torch.set_num_threads(threads)


def test_a_keys_bits_do_not_depend_on_its_position() -> None:
    """The same key at many positions of contexts of several lengths."""
    for fmt in FORMATS:
        problem = make_problem(fmt, [[130]], heads=11, page_size=10, num_pages=13, seed=22)
        table = torch.arange(13, dtype=torch.int32)[None]
        marker = make_records(fmt, 1, 5)
        problem.records[:] = torch.where(torch.arange(130).reshape(13, 10, 1) % 3 == 0, marker, problem.records)
        moved = problem._replace(pages=sectioned(problem.records, fmt), block_table=table)
        for length in (1, 64, 65, 130):
            lens = torch.tensor([[length]], dtype=torch.int32)
            out = score(moved._replace(context_lens=lens), 130, out_dtype=torch.float32)[0, :length]
            assert out[::3].unique().numel() == 1


def test_twenty_repeats_are_equal() -> None:
    problem = make_problem(INDEX_FP8, [[100, 101]], heads=32, page_size=64, seed=23)
    want = score(problem, 101)
    for _ in range(20):
        filler = torch.full((1 << 16,), 0xFF, dtype=torch.uint8)
        del filler
        assert torch.equal(score(problem, 101), want)


# --- memory ----------------------------------------------------------------------------------------------------------

PEAK_SCRIPT = """
import resource, sys, torch
from sparse_mla.ops.index_logits import PagedKeys, index_logits
rows, context = int(sys.argv[1]), int(sys.argv[2])
generator = torch.Generator().manual_seed(0)
pages = torch.randint(0, 256, (context // 64, 64 * 68), generator=generator, dtype=torch.uint8)
pages[:, 64 * 64 :] = 120
table = torch.arange(context // 64, dtype=torch.int32)[None]
q = torch.randint(-128, 128, (1, rows, 32, 64), generator=generator, dtype=torch.int8)
sf = torch.full((1, rows, 32, 4), 127, dtype=torch.uint8)
w = torch.randn(rows, 32, generator=generator)
def run(length):
    lens = torch.full((1, rows), length, dtype=torch.int32)
    return index_logits((q, sf), PagedKeys(pages.view(-1, 64, 1, 68), table, lens, context), w)
run(64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
out = run(context)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, out.numel() * 2)
"""


def peak_of(rows: int, context: int, limit: int = 0) -> tuple[int, int]:
    """(bytes the peak grew by, bytes of the result) of one call in a fresh process."""

    def cap() -> None:
        if limit:
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    done = subprocess.run(
        [sys.executable, "-c", PEAK_SCRIPT, str(rows), str(context)],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=cap,
        env=dict(os.environ, OMP_NUM_THREADS="1", SPARSE_MLA_BACKEND="reference"),
    )
    grown, size = done.stdout.split()
    return int(grown), int(size)


@pytest.mark.full
@pytest.mark.parametrize("context", [131_072, 1_048_576])
def test_scratch_does_not_grow_with_the_context(context: int) -> None:
    grown, size = peak_of(1, context)
    assert grown < 4 * size + (64 << 20)


def test_eight_rows_of_131072_keys_fit_two_gigabytes_of_address_space() -> None:
    grown, size = peak_of(8, 131_072, limit=2 << 30)
    assert grown < 2 * size + (64 << 20)


# --- bad input -------------------------------------------------------------------------------------------------------

GOOD = make_problem(INDEX_FP4, [[20, 21], [9, 3]], heads=3, num_pages=6, seed=30)
GOOD8 = make_problem(INDEX_FP8, [[20, 21], [9, 3]], heads=3, num_pages=6, seed=30)
RAGGED = contiguous(GOOD)
ONES = torch.ones(4, dtype=torch.int32)
RAGGED_Q = (GOOD.q[0].reshape(4, 3, 64), GOOD.q[1].reshape(4, 3))


def paged_call(q: Any = GOOD.q, weights: Any = GOOD.weights, options: Any = None, **changes: Any) -> Any:
    keys = PagedKeys(GOOD.pages, GOOD.block_table, GOOD.context_lens, 32)._replace(**changes)
    return lambda: index_logits(q, keys, weights, **(options or {}))


def ragged_call(q: Any = RAGGED_Q, weights: Any = GOOD.weights, options: Any = None, **changes: Any) -> Any:
    keys = RaggedKeys(*RAGGED, 0 * ONES, 20 * ONES, 32)._replace(**changes)
    return lambda: index_logits(q, keys, weights, **(options or {}))


def with_blocks(**changes: Any) -> dict[str, Any]:
    return {"candidates": Candidates(torch.zeros(4, 1, dtype=torch.int32))._replace(**changes)}


Q, SF = GOOD.q
BAD_INPUTS: dict[str, tuple[Any, type[Exception], str]] = {
    "q no pair": (paged_call(q=Q), DTypeError, r"q must be a pair \(q_fp, q_sf\), got Tensor"),
    "q no tensor": (paged_call(q=([1], SF)), DTypeError, "q_fp must be a torch.Tensor, got list"),
    "q rank": (paged_call(q=(Q[0], SF[0])), ShapeError, r"q_fp must be \[b, n, h, _\], got \[2, 3, 64\]"),
    "q width": (
        paged_call(q=(Q[..., :32], SF)),
        ShapeError,
        r"q_fp must end in 64 bytes .* or 128 .* got \[2, 2, 3, 32\]",
    ),
    "q dtype": (paged_call(q=(Q.float(), SF)), DTypeError, "q_fp must be float8_e4m3fn or int8 or uint8, got float32"),
    "q e2m1 as e4m3": (paged_call(q=(Q.view(torch.float8_e4m3fn), SF)), DTypeError, "q_fp must be int8 or uint8 when"),
    "q no heads": (paged_call(q=(Q[:, :, :0], SF[:, :, :0])), ShapeError, "q_fp must have at least one head"),
    "q_sf missing": (paged_call(q=(Q, None)), ArgumentError, "q_sf must be given with e2m1 queries, got None"),
    "q_sf dtype": (paged_call(q=(Q, SF.long())), DTypeError, "q_sf must be int32 or int16 or uint8, got int64"),
    "q_sf shape": (paged_call(q=(Q, SF[:, :1])), ShapeError, r"q_sf must be \[b, n, h\] with n = 2 .* got \[2, 1, 3\]"),
    "q_sf int16 width": (paged_call(q=(Q, SF.short()[..., None])), ShapeError, r"q_sf must be \[b, n, h, 2\]"),
    "weights shape": (paged_call(weights=GOOD.weights[:, :2]), ShapeError, r"weights must be \[rows, h\] with h = 3"),
    "weights rows": (paged_call(weights=GOOD.weights[:2]), ShapeError, r"weights must be \[rows, h\] with rows = 4"),
    "weights dtype": (
        paged_call(weights=GOOD.weights.half()),
        DTypeError,
        "weights must be bfloat16 or float32, got float16",
    ),
    "weights grad": (
        paged_call(weights=torch.ones(4, 3, requires_grad=True)),
        DTypeError,
        "weights must not require grad",
    ),
    "keys kind": (
        lambda: index_logits(GOOD.q, GOOD.pages, GOOD.weights),
        DTypeError,
        "keys must be PagedKeys or RaggedKeys",
    ),
    "cache kind": (paged_call(cache=3), DTypeError, "keys.cache must be a PagedCache or a tensor, got int"),
    "cache format": (
        paged_call(cache=GOOD8.pages),
        FormatError,
        r"keys.cache must have records of 68 bytes .* got 132",
    ),
    "cache named": (
        paged_call(cache=PagedCache(GOOD8.pages, INDEX_FP8, 16)),
        FormatError,
        "keys.cache must hold INDEX_FP4 records to match q, got INDEX_FP8",
    ),
    "cache main": (
        paged_call(cache=PagedCache(torch.zeros(2, 4, 1, 528, dtype=torch.uint8), V41_FP8, 4)),
        FormatError,
        "keys.cache must hold INDEX_FP4 records to match q, got V41_FP8",
    ),
    "cache width": (paged_call(cache=torch.zeros(2, 4, 1, 64, dtype=torch.uint8)), FormatError, "got 64"),
    "cache rank": (paged_call(cache=GOOD.pages[:, :, 0]), ShapeError, r"keys.cache must be \[pages, page_size, 1, _\]"),
    "cache dtype": (
        paged_call(cache=GOOD.pages.float()),
        DTypeError,
        "keys.cache must be uint8 or int8 or float8_e4m3fn",
    ),
    "cache stride": (
        paged_call(cache=GOOD.pages[:, ::2]),
        ShapeError,
        "keys.cache must have contiguous pages, got strides",
    ),
    "cache page 0": (
        paged_call(cache=GOOD.pages[:, :0]),
        ShapeError,
        "keys.cache must have at least one record per page",
    ),
    "no scales, bare": (
        lambda: index_logits(
            (GOOD8.q[0], None), PagedKeys(GOOD8.pages, GOOD8.block_table, GOOD8.context_lens), GOOD8.weights
        ),
        FormatError,
        "keys.cache must be a PagedCache of INDEX_FP8_FP32 when q_sf is None, got a bare tensor",
    ),
    "table rank": (paged_call(block_table=GOOD.block_table[0]), ShapeError, r"keys.block_table must be \[b, w\]"),
    "table rows": (
        paged_call(block_table=GOOD.block_table[:1]),
        ShapeError,
        r"keys.block_table must be \[b, w\] with b = 2",
    ),
    "table dtype": (
        paged_call(block_table=GOOD.block_table.long()),
        DTypeError,
        "keys.block_table must be int32, got int64",
    ),
    "lens rank": (
        paged_call(context_lens=GOOD.context_lens[..., None]),
        ShapeError,
        r"keys.context_lens must be \[b, n\]",
    ),
    "lens shape": (
        paged_call(context_lens=GOOD.context_lens[:, :1]),
        ShapeError,
        r"keys.context_lens must be \[b, n\]",
    ),
    "lens dtype": (
        paged_call(context_lens=GOOD.context_lens.long()),
        DTypeError,
        "keys.context_lens must be int32, got int64",
    ),
    "lens negative": (
        paged_call(context_lens=torch.tensor([[1, 2], [-1, 0]], dtype=torch.int32)),
        SlotRangeError,
        r"keys.context_lens must be between 0 and .* got -1 at query row 2",
    ),
    "lens past the table": (
        paged_call(context_lens=torch.tensor([[1, 2], [4000, 0]], dtype=torch.int32), max_context_len=None),
        SlotRangeError,
        r"keys.context_lens must be between 0 and 48, .* got 4000 at query row 2",
    ),
    "width negative": (
        paged_call(max_context_len=-1),
        ArgumentError,
        "keys.max_context_len must be an integer >= 0, got -1",
    ),
    "width float": (
        paged_call(max_context_len=2.0),
        ArgumentError,
        "keys.max_context_len must be an integer >= 0, got 2.0",
    ),
    "ragged width": (
        ragged_call(max_len=None),
        ArgumentError,
        "keys.max_len must be the number of logits columns, got None",
    ),
    "ragged q rank": (ragged_call(q=GOOD.q), ShapeError, r"q_fp must be \[t, h, _\], got \[2, 2, 3, 64\]"),
    "ragged data": (
        ragged_call(data=RAGGED[0].repeat(1, 2)),
        ShapeError,
        r"keys.data must be \[s, 64\].*differ in format",
    ),
    "ragged data dtype": (ragged_call(data=RAGGED[0].int()), DTypeError, "keys.data must be int8 or uint8, got int32"),
    "ragged sf": (ragged_call(sf=RAGGED[1][:9]), ShapeError, r"keys.sf must be \[s\] with s = 96"),
    "ragged sf dtype": (
        ragged_call(sf=RAGGED[1].float()),
        DTypeError,
        "keys.sf must be int32 or int16 or uint8, got float32",
    ),
    "ragged one scale": (
        lambda: index_logits(
            (GOOD8.q[0].reshape(4, 3, 128), None), RaggedKeys(*contiguous(GOOD8), 0 * ONES, ONES, 9), GOOD8.weights
        ),
        DTypeError,
        "keys.sf must be float32, got int32; q came without q_sf",
    ),
    "ragged starts": (ragged_call(starts=ONES[:3]), ShapeError, r"keys.starts must be \[t\] with t = 4"),
    "ragged ends dtype": (ragged_call(ends=ONES.long()), DTypeError, "keys.ends must be int32, got int64"),
    "out_dtype": (
        paged_call(options={"out_dtype": torch.half}),
        ArgumentError,
        "out_dtype must be one of bfloat16, float32",
    ),
    "memory": (
        paged_call(options={"memory_limit": 5}),
        ArgumentError,
        "memory_limit must be at least 1048576 bytes, got 5",
    ),
    "blocks kind": (
        paged_call(options={"candidates": ONES}),
        DTypeError,
        r"candidates must be Candidates\(blocks\), got Tensor",
    ),
    "blocks rows": (
        paged_call(options=with_blocks(blocks=torch.zeros(2, 1, dtype=torch.int32))),
        ShapeError,
        r"candidates.blocks must be \[rows, blocks\] with rows = 4",
    ),
    "blocks size": (
        paged_call(options=with_blocks(block_size=4)),
        ArgumentError,
        "candidates.block_size must be one of 8, 16",
    ),
    "blocks origin": (paged_call(options=with_blocks(origin="x")), ArgumentError, "candidates.origin must be one of"),
    "paged origin": (paged_call(options=with_blocks(origin="keys")), ArgumentError, "candidates.origin must be 'row'"),
    "device": (
        paged_call(context_lens=GOOD.context_lens.to("meta")),
        ArgumentError,
        "keys.context_lens must be on cpu",
    ),
    "backend": (paged_call(options={"backend": "cuda"}), ArgumentError, "backend must be auto or one of"),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_bad_input_is_one_sentence_that_names_the_argument(name: str) -> None:
    call, error, message = BAD_INPUTS[name]
    with pytest.raises(error, match=message) as raised:
        call()
    assert isinstance(raised.value, SparseMlaError)
    assert str(raised.value).startswith("index_logits: ")
    assert "\n" not in str(raised.value)


# --- torch ecosystem -------------------------------------------------------------------------------------------------


def all_forms() -> list[IndexLogitsCall]:
    """One call of every shape of the schema."""
    blocks = Candidates(torch.tensor([[0, 1], [0, -1], [-1, -1], [0, -1]], dtype=torch.int32))
    one = make_problem(INDEX_FP8_FP32, [[4], [5]], seed=2)
    one = one._replace(q=(one.q[0].view(torch.uint8), None))  # opcheck cannot compare float8 tensors
    return [
        IndexLogitsCall.check(GOOD.q, keys_of(GOOD, 32), GOOD.weights),
        IndexLogitsCall.check(GOOD.q, keys_of(GOOD), GOOD.weights, candidates=blocks, out_dtype=torch.float32),
        IndexLogitsCall.check(RAGGED_Q, RaggedKeys(*RAGGED, 0 * ONES, 9 * ONES, 20), GOOD.weights),
        IndexLogitsCall.check(one.q, keys_of(one), one.weights),
    ]


def test_opcheck() -> None:
    for call in all_forms():
        torch.library.opcheck(torch.ops.sparse_mla.index_logits_reference.default, call.flat())


def test_shapes_and_strides_on_fake_tensors_are_the_real_ones() -> None:
    operator = torch.ops.sparse_mla.index_logits_reference.default
    for call in all_forms():
        real = operator(*call.flat())
        mode = torch._subclasses.FakeTensorMode()
        with mode:
            fake = operator(*[mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in call.flat()])
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_fullgraph_compile_recompiles_at_most_twice() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    cache = cache_of(GOOD)

    def logits(q: Any, sf: Any, table: Any, lens: Any, weights: Any) -> torch.Tensor:
        return index_logits((q, sf), PagedKeys(cache, table, lens, 32), weights + 1, backend="reference") * 2

    compiled = torch.compile(logits, fullgraph=True, backend=counter)
    for b in (*range(1, 9), 17, 33, 64):
        q, sf = (x[:1].expand(b, *x.shape[1:]).clone() for x in GOOD.q)
        table = GOOD.block_table[:1].expand(b, -1).clone()
        lens = torch.full((b, 2), 20, dtype=torch.int32)
        weights = torch.ones(b * 2, 3)
        actual = compiled(q, sf, table, lens, weights)
        assert torch.equal(actual, logits(q, sf, table, lens, weights))
    assert counter.frame_count <= 3
    torch._dynamo.reset()


def test_compiled_error_holds_our_sentence() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q: index_logits((q, SF), keys_of(GOOD), GOOD.weights), fullgraph=True, backend="eager"
    )
    with pytest.raises(Exception, match=r"q_fp must end in 64 bytes"):
        compiled(Q[..., :32])
    torch._dynamo.reset()


def test_inference_mode_and_autocast_change_nothing() -> None:
    for problem in (GOOD, GOOD8):
        want = score(problem, 32)
        with torch.inference_mode():
            assert torch.equal(score(problem, 32), want)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(score(problem, 32), want)


# --- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 64, 256])
def test_context_of_6000_over_a_random_table(page_size: int) -> None:
    problem = make_problem(INDEX_FP4, [[6000]], page_size=page_size, heads=4, seed=31)
    out, expected = score(problem, 6000).double(), problem.expected(6000)
    # Every single logit: bfloat16 rounds by at most 2^-8 of the value; cancellation in float32 adds next to nothing.
    assert bool(((out - expected).abs() <= expected.abs() * 2**-7 + 1e-4).all())


@pytest.mark.full
@pytest.mark.parametrize("page_size", [16, 32, 53, 69, 123, 128, 256, 576])
@pytest.mark.parametrize("heads", [1, 4, 32, 64])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_page_sizes_and_heads(fmt: Any, heads: int, page_size: int) -> None:
    problem = make_problem(
        fmt, [[1500, 1499, 3], [0, 64, 65]], heads=heads, page_size=page_size, seed=heads + page_size
    )
    assert relative_error(score(problem, 1500, out_dtype=torch.float32), problem.expected(1500)) < 2e-6
