# SPDX-License-Identifier: Apache-2.0
"""Scoring and selection in one call: bit-equal to the two steps, and its scratch is what it says, whatever the
context."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing

from index_data import FORMATS, Problem, make_problem, make_query, make_records
from sparse_mla import config
from sparse_mla.caches import PagedCache
from sparse_mla.errors import ArgumentError, DTypeError, NonFiniteError, ShapeError, SlotRangeError, SparseMlaError
from sparse_mla.formats import INDEX_FP4, INDEX_FP8, INDEX_FP8_FP32
from sparse_mla.ops.candidate_blocks import candidate_blocks, compact_to_dense
from sparse_mla.ops.index_logits import Candidates, PagedKeys, RaggedKeys, index_logits
from sparse_mla.ops.index_topk import IndexTopkCall, index_topk, index_topk_workspace_size
from sparse_mla.ops.topk import topk


@pytest.fixture(autouse=True)
def _on_the_reference() -> Iterator[None]:
    """These tests hold the definition; other backends are held to it by the cases."""
    with config.override(SPARSE_MLA_BACKEND="reference"):
        yield


def keys_of(problem: Problem, width: int | None = None) -> PagedKeys:
    cache = PagedCache(problem.pages, problem.fmt, problem.pages.shape[1])
    return PagedKeys(cache, problem.block_table, problem.context_lens, width)


def ragged_problem(fmt: Any, rows: int, keys: int, heads: int, seed: int) -> tuple[Any, RaggedKeys, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    records = make_records(fmt, keys, seed)
    data, sf = records[:, : fmt.data_bytes].contiguous(), records[:, fmt.data_bytes :].contiguous()
    sf = sf.view(torch.float32)[:, 0] if fmt is INDEX_FP8_FP32 else sf
    edges = torch.randint(0, keys + 1, (2, rows), generator=generator, dtype=torch.int32).sort(dim=0).values
    weights = torch.randn(rows, heads, generator=generator).bfloat16()
    return make_query(fmt, (rows, heads), seed + 1), RaggedKeys(data, sf, edges[0], edges[1], keys), weights


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("k", [1, 7, 64, 501])
def test_paged_equals_the_two_steps(fmt: Any, k: int) -> None:
    problem = make_problem(fmt, [[300, 299, 0], [5, 64, 65]], heads=3, page_size=17, seed=k)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        want = topk(index_logits(problem.q, keys_of(problem), problem.weights, out_dtype=dtype), k)
        for limit in (1 << 20, None):
            got = index_topk(problem.q, keys_of(problem), problem.weights, k, logits_dtype=dtype, memory_limit=limit)
            assert got.dtype == torch.int32
            assert torch.equal(got, want)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_ragged_equals_the_two_steps(fmt: Any) -> None:
    q, keys, weights = ragged_problem(fmt, 9, 1000, 4, 3)
    want = topk(index_logits(q, keys, weights), 50)
    for limit in (1 << 20, 1 << 21, None):  # at 1 MiB rows go in several groups and keys in tiles
        assert torch.equal(index_topk(q, keys, weights, 50, memory_limit=limit), want)
    assert torch.equal(index_topk(q, keys._replace(max_len=None), weights, 50), want)
    cut = topk(index_logits(q, keys._replace(max_len=100), weights), 50)
    assert torch.equal(index_topk(q, keys._replace(max_len=100), weights, 50), cut)


@pytest.mark.parametrize("block_size", [8, 16])
def test_candidates_give_entries_not_compact_columns(block_size: int) -> None:
    problem = make_problem(INDEX_FP4, [[500, 470], [33, 0]], heads=3, page_size=32, seed=5)
    logits = index_logits(problem.q, keys_of(problem), problem.weights)
    lengths = problem.context_lens.reshape(-1)
    blocks = candidate_blocks(logits, lengths, block_size=block_size, topk_blocks=6)
    candidates = Candidates(blocks, block_size)
    compact = topk(index_logits(problem.q, keys_of(problem), problem.weights, candidates=candidates), 30)
    want = compact_to_dense(compact, blocks, block_size)
    for limit in (1 << 20, None):
        got = index_topk(problem.q, keys_of(problem), problem.weights, 30, candidates=candidates, memory_limit=limit)
        assert torch.equal(got, want)
    assert int(got.max()) >= 6 * block_size  # entries lie beyond the compact columns


def test_ties_across_tiles_go_to_the_lower_index() -> None:
    """One key value everywhere: every score ties, in every tile."""
    record = make_records(INDEX_FP4, 1, 0).expand(700, -1)
    data, sf = record[:, :64].contiguous(), record[:, 64:].contiguous()
    q = make_query(INDEX_FP4, (2, 4), 1)
    bounds = (torch.tensor([0, 300], dtype=torch.int32), torch.tensor([700, 700], dtype=torch.int32))
    got = index_topk(q, RaggedKeys(data, sf, *bounds), torch.ones(2, 4), 130, memory_limit=1 << 20)
    assert got.tolist() == [list(range(130))] * 2


def test_nan_scores_raise_or_are_never_selected() -> None:
    """A scale of 2**127 overflows to infinity, and infinity times a zero element is NaN."""
    problem = make_problem(INDEX_FP8, [[40]], heads=2, page_size=8, num_pages=8, seed=7)
    page, offset = int(problem.block_table[0, 1]), 3
    flat = problem.pages.as_strided((8, 8 * 132), (problem.pages.stride(0), 1))
    flat[page, 8 * 128 + 4 * offset : 8 * 128 + 4 * offset + 4] = 254
    flat[page, offset * 128 : offset * 128 + 128] = 0x7E
    q = (problem.q[0].view(torch.uint8).clone(), problem.q[1])
    q[0][..., :2] = torch.tensor([0x00, 0xB8], dtype=torch.uint8)
    logits = index_logits(q, keys_of(problem), problem.weights)
    assert bool(logits[0].isnan().any())
    bad = int(logits[0].isnan().nonzero()[0, 0])
    with pytest.raises(NonFiniteError, match=rf"index_topk: scores must not be NaN, got NaN at row 0, column {bad}"):
        index_topk(q, keys_of(problem), problem.weights, 5)
    got = index_topk(q, keys_of(problem), problem.weights, 60, on_nan="last")
    assert torch.equal(got, topk(logits, 60, on_nan="last"))
    assert bad not in got[0].tolist()


def test_no_rows_no_keys() -> None:
    problem = make_problem(INDEX_FP4, [[0], [0]], seed=1)
    assert bool((index_topk(problem.q, keys_of(problem), problem.weights, 4) == -1).all())
    empty = keys_of(problem)._replace(block_table=problem.block_table[:0], context_lens=problem.context_lens[:0])
    assert index_topk((problem.q[0][:0], problem.q[1][:0]), empty, problem.weights[:0], 4).shape == (0, 4)


# --- memory --------------------------------------------------------------------------------------------------------


def measured_peak(call: Any) -> int:
    """Bytes the call holds at its peak beyond its result, by the allocator's own events."""
    call()  # tables that are built once are not scratch
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        out = call()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    assert peak > 0
    return peak - out.untyped_storage().nbytes()


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize(
    ("heads", "n", "limit", "context"), [(1, 1, 1 << 30, 4160), (32, 3, 1 << 22, 1100), (128, 2, 1 << 20, 200)]
)
def test_workspace_size_is_the_measured_peak(fmt: Any, heads: int, n: int, limit: int, context: int) -> None:
    k = 64
    problem = make_problem(fmt, [[context] * n], heads=heads, page_size=64, num_pages=66, seed=heads)
    arguments = (problem.q, keys_of(problem), problem.weights, k)
    stated = index_topk_workspace_size(*arguments, memory_limit=limit, backend="reference")
    measured = measured_peak(lambda: index_topk(*arguments, memory_limit=limit, backend="reference"))
    assert abs(stated - measured) <= 0.1 * measured, (stated, measured)
    assert stated <= limit


@pytest.mark.parametrize("limit", [1 << 20, 1 << 24])
def test_workspace_size_with_ragged_keys_and_with_candidates(limit: int) -> None:
    q, keys, weights = ragged_problem(INDEX_FP4, 8, 600, 16, 3)
    keys = keys._replace(starts=0 * keys.starts, ends=0 * keys.ends + 600)
    stated = index_topk_workspace_size(q, keys, weights, 256, memory_limit=limit, backend="reference")
    measured = measured_peak(lambda: index_topk(q, keys, weights, 256, memory_limit=limit, backend="reference"))
    assert abs(stated - measured) <= 0.1 * measured, (stated, measured)
    options = {"candidates": Candidates(torch.arange(75, dtype=torch.int32).expand(8, -1)), "memory_limit": limit}
    stated = index_topk_workspace_size(q, keys, weights, 256, backend="reference", **options)
    measured = measured_peak(lambda: index_topk(q, keys, weights, 256, backend="reference", **options))
    assert abs(stated - measured) <= 0.1 * measured, (stated, measured)


def test_workspace_does_not_grow_with_the_context() -> None:
    sizes = []
    for pages in (1 << 10, 1 << 14):
        cache = torch.empty_strided((pages, 64, 1, 68), (64 * 68, 68, 68, 1), dtype=torch.uint8, device="meta")
        table = torch.empty((1, pages), dtype=torch.int32, device="meta")
        lens = torch.empty((1, 6), dtype=torch.int32, device="meta")
        q = (
            torch.empty((1, 6, 32, 64), dtype=torch.int8, device="meta"),
            torch.empty((1, 6, 32), dtype=torch.int32, device="meta"),
        )
        weights = torch.empty((6, 32), device="meta")
        sizes.append(index_topk_workspace_size(q, PagedKeys(cache, table, lens), weights, 512, backend="reference"))
    assert sizes[0] == sizes[1]


@pytest.mark.full
def test_512_rows_of_262144_keys_under_256_mib() -> None:
    rows, keys, limit = 512, 262_144, 256 << 20
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(-128, 128, (keys, 64), generator=generator, dtype=torch.int8)
    sf = torch.randint(124, 131, (keys, 4), generator=generator, dtype=torch.uint8)
    q = make_query(INDEX_FP4, (rows, 2), 1)
    ends = torch.linspace(1000, keys, rows).int()
    ragged = RaggedKeys(data, sf, torch.zeros_like(ends), ends, keys)
    weights = torch.randn(rows, 2, generator=generator)
    call = (q, ragged, weights, 512)
    got = index_topk(*call, memory_limit=limit)
    assert index_topk_workspace_size(*call, memory_limit=limit, backend="reference") <= limit
    for part in range(0, rows, 64):  # the logits of all rows would take 256 MiB themselves
        here = slice(part, part + 64)
        some = ragged._replace(starts=ragged.starts[here], ends=ends[here])
        want = topk(index_logits((q[0][here], q[1][here]), some, weights[here]), 512)
        assert torch.equal(got[here], want)


# --- bad input and the torch ecosystem -----------------------------------------------------------------------------

GOOD = make_problem(INDEX_FP4, [[20, 21], [9, 3]], heads=3, num_pages=6, seed=30)


def call_with(k: Any = 4, q: Any = GOOD.q, options: Any = None, **changes: Any) -> Any:
    return lambda: index_topk(q, keys_of(GOOD)._replace(**changes), GOOD.weights, k, **(options or {}))


BAD_INPUTS: dict[str, tuple[Any, type[Exception], str]] = {
    "k": (call_with(k=0), ArgumentError, "k must be an integer >= 1, got 0"),
    "q": (call_with(q=GOOD.q[0]), DTypeError, "q must be a pair"),
    "table": (call_with(block_table=GOOD.block_table[:1]), ShapeError, r"keys.block_table must be \[b, w\] with b = 2"),
    "lens": (
        call_with(context_lens=GOOD.context_lens - 10),
        SlotRangeError,
        r"keys.context_lens must be between 0 and 48.*got -1 at query row 2",
    ),
    "dtype": (call_with(options={"logits_dtype": torch.half}), ArgumentError, "logits_dtype must be one of bfloat16"),
    "on_nan": (call_with(options={"on_nan": "x"}), ArgumentError, "on_nan must be one of 'raise', 'last', got 'x'"),
    "memory": (
        call_with(options={"memory_limit": 0}),
        ArgumentError,
        "memory_limit must be at least 1048576 bytes, got 0",
    ),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_bad_input_is_one_sentence_that_names_the_argument(name: str) -> None:
    call, error, message = BAD_INPUTS[name]
    with pytest.raises(error, match=message) as raised:
        call()
    assert isinstance(raised.value, SparseMlaError)
    assert str(raised.value).startswith("index_topk: ")


def test_opcheck() -> None:
    blocks = Candidates(torch.tensor([[0, 1], [0, -1], [-1, -1], [0, -1]], dtype=torch.int32))
    for options in ({}, {"candidates": blocks, "logits_dtype": torch.float32}):
        call = IndexTopkCall.check(GOOD.q, keys_of(GOOD), GOOD.weights, 5, **options)
        torch.library.opcheck(torch.ops.sparse_mla.index_topk_reference.default, call.flat())


def test_fullgraph_compile_recompiles_at_most_twice() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    keys = keys_of(GOOD)

    def select(q: Any, sf: Any, table: Any, lens: Any, weights: Any) -> torch.Tensor:
        given = keys._replace(block_table=table, context_lens=lens)
        return index_topk((q, sf), given, weights + 1, 8, backend="reference") + 1

    compiled = torch.compile(select, fullgraph=True, backend=counter)
    for b in (1, 2, 3, 5, 17, 64):
        q, sf = (x[:1].expand(b, *x.shape[1:]).clone() for x in GOOD.q)
        table = GOOD.block_table[:1].expand(b, -1).clone()
        lens = torch.full((b, 2), 20, dtype=torch.int32)
        weights = torch.ones(b * 2, 3)
        assert torch.equal(compiled(q, sf, table, lens, weights), select(q, sf, table, lens, weights))
    assert counter.frame_count <= 3
    torch._dynamo.reset()


def test_inference_mode_and_autocast_change_nothing() -> None:
    want = call_with()()
    with torch.inference_mode():
        assert torch.equal(call_with()(), want)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(call_with()(), want)
