# SPDX-License-Identifier: Apache-2.0
"""The deep_gemm drop-in: upstream's signatures and conventions, sentinels, stale schedules, and the sparse forms."""

from __future__ import annotations

import inspect
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from index_data import Problem, make_problem, make_query, make_records, relative_error
from sparse_mla.compat import deep_gemm, deep_select
from sparse_mla.errors import ArgumentError, DTypeError, FormatError, ShapeError, SlotRangeError, SparseMlaError
from sparse_mla.formats import INDEX_FP4, INDEX_FP8, INDEX_FP8_FP32

SIGNATURES = json.loads((Path(__file__).parent / "data" / "upstream_signatures.json").read_text())["deep_gemm"]
INF = math.inf


@pytest.mark.parametrize("name", [name for name in SIGNATURES if name != "source"])
def test_signature_is_upstreams(name: str) -> None:
    parameters = inspect.signature(getattr(deep_gemm, name)).parameters.values()
    ours = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    assert ours == SIGNATURES[name]
    assert name in deep_gemm.__all__


def paged(problem: Problem, width: int, meta: torch.Tensor | None = None, **changes: Any) -> torch.Tensor:
    p = problem._replace(**changes)
    return deep_gemm.fp8_fp4_paged_mqa_logits(p.q, p.pages, p.weights, p.context_lens, p.block_table, meta, width)


@pytest.mark.parametrize("fmt", [INDEX_FP4, INDEX_FP8, INDEX_FP8_FP32], ids=str)
def test_paged_logits(fmt: Any) -> None:
    problem = make_problem(fmt, [[100, 101], [0, 3]], heads=8, page_size=64, seed=1)
    out = paged(problem, 110)
    assert out.dtype == (torch.float32 if fmt is INDEX_FP8_FP32 else torch.bfloat16)
    assert relative_error(out, problem.expected(110)) < 4e-3
    if fmt is INDEX_FP8_FP32:  # a bare tensor is a query without scales too
        assert torch.equal(paged(problem, 110, q=problem.q[0]), out)


@pytest.mark.parametrize("width", [0, 1, 256])
def test_all_contexts_zero(width: int) -> None:
    problem = make_problem(INDEX_FP4, [[0]] * 32, seed=2)
    meta = deep_gemm.get_paged_mqa_logits_metadata(problem.context_lens, 64, 132)
    assert meta.shape == (133, 2)
    assert meta.dtype == torch.int32
    out = paged(problem, width, meta)
    assert out.shape == (32, width)
    assert bool((out == -INF).all())
    _, picks = deep_select.topk(out, 8, end=torch.zeros(32, dtype=torch.int32), idx_oob_fill_value=-1)
    assert bool((picks == -1).all())


@pytest.mark.parametrize("width", [1, 100, 256, 257, 4097])
def test_result_rows(width: int) -> None:
    for fmt in (INDEX_FP4, INDEX_FP8_FP32):
        out = paged(make_problem(fmt, [[90], [7]], seed=3), width)
        assert out.shape == (2, width)
        assert out.stride(1) == 1
        assert out.stride(0) * out.element_size() % 1024 == 0


def test_context_lens_of_either_rank() -> None:
    problem = make_problem(INDEX_FP4, [[30], [7]], seed=4)
    flat = problem.context_lens[:, 0]
    assert torch.equal(paged(problem, 40, context_lens=flat), paged(problem, 40))
    deep_gemm.get_paged_mqa_logits_metadata(flat, 64, 1)
    two = make_problem(INDEX_FP4, [[30, 31], [7, 8]], seed=4)
    with pytest.raises(
        ShapeError, match=r"fp8_fp4_paged_mqa_logits: context_lens must be \[b, n\] with n = 2, got \[2\]"
    ):
        paged(two, 40, context_lens=two.context_lens[:, 0])


def test_a_stale_schedule_is_no_harm() -> None:
    problem = make_problem(INDEX_FP4, [[256]], page_size=64, seed=5, num_pages=80)
    meta = deep_gemm.get_paged_mqa_logits_metadata(problem.context_lens, 64, 8)
    table = torch.randint(0, 80, (1, 65), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    for length in (257, 4096):
        now = problem._replace(block_table=table, context_lens=torch.tensor([[length]], dtype=torch.int32))
        fresh = deep_gemm.get_paged_mqa_logits_metadata(now.context_lens, 64, 8)
        assert torch.equal(paged(now, 4096, meta), paged(now, 4096, fresh))


def test_padding_rows_score_nothing() -> None:
    problem = make_problem(INDEX_FP4, [[30], [7], [12]], seed=6)
    problem.block_table[1:] = 2**31 - 1
    problem.context_lens[1:] = 40
    indices = torch.tensor([0, 998244353, 998244353], dtype=torch.int32)
    out = deep_gemm.fp8_fp4_paged_mqa_logits(
        problem.q, problem.pages, problem.weights, problem.context_lens, problem.block_table, None, 40, indices
    )
    assert bool((out[1:] == -INF).all())
    assert torch.equal(
        out[0, :30], paged(problem._replace(context_lens=torch.tensor([[30], [0], [0]]).int()), 40)[0, :30]
    )


def ragged(rows: int = 5, keys: int = 120) -> tuple[Any, Any, torch.Tensor, torch.Tensor, torch.Tensor]:
    records = make_records(INDEX_FP4, keys, 7)
    kv = (records[:, :64].contiguous().view(torch.int8), records[:, 64:].contiguous().view(torch.int32)[:, 0])
    start = torch.tensor([0, 8, 16, 40, 120], dtype=torch.int32)[:rows]
    end = torch.tensor([120, 8, 37, 41, 120], dtype=torch.int32)[:rows]
    weights = torch.randn(rows, 4, generator=torch.Generator().manual_seed(1)).bfloat16()
    return make_query(INDEX_FP4, (rows, 4), 8), kv, weights, start, end


def test_ragged_logits_are_compressed() -> None:
    q, kv, weights, start, end = ragged()
    meta = deep_gemm.get_mqa_logits_metadata(start, end, 120, 4)
    out = deep_gemm.fp8_fp4_mqa_logits(q, kv, weights, start, end, 120, meta)
    whole = deep_gemm.fp8_fp4_mqa_logits(q, kv, weights, 0 * start, 0 * end + 120, 120)
    assert out.stride(0) * out.element_size() % 1024 == 0
    for row, (a, b) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        assert torch.equal(out[row, : b - a], whole[row, a:b])
        assert bool((out[row, b - a :] == -INF).all())


@pytest.mark.parametrize("unaligned", [False, True])
def test_ragged_sparse_logits_are_the_dense_ones(unaligned: bool) -> None:
    q, kv, weights, start, end = ragged()
    if unaligned:
        start = torch.tensor([3, 8, 21, 40, 119], dtype=torch.int32)
        end = torch.tensor([120, 8, 60, 41, 120], dtype=torch.int32)
    dense = deep_gemm.fp8_fp4_mqa_logits(q, kv, weights, start, end, 120)
    rows = []
    for a, b in zip(start.tolist(), end.tolist(), strict=True):
        count = -(-(b - a) // 8)
        chosen = [i + a // 8 for i in range(count)][:: 2 if count > 4 else 1][:4]
        rows.append(chosen + [-1] * (4 - len(chosen)))
    blocks = torch.tensor(rows, dtype=torch.int32)
    meta = deep_gemm.get_sparse_mqa_logits_metadata(start, end, 120, blocks, torch.int8, 8, unaligned)
    out = deep_gemm.fp8_fp4_sparse_mqa_logits(q, kv, weights, meta, 4, 8, unaligned)
    assert out.shape == (5, 32)
    for row, (a, b) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        for c in range(32):
            block = rows[row][c // 8]
            column = (block - a // 8) * 8 + c % 8 if unaligned else block * 8 + c % 8 - a
            inside = block >= 0 and 0 <= column < b - a
            assert float(out[row, c]) == (float(dense[row, column]) if inside else -INF)


def test_paged_sparse_logits_are_the_dense_ones() -> None:
    problem = make_problem(INDEX_FP8, [[100], [33], [0]], heads=4, page_size=64, seed=9)
    dense = paged(problem, 100)
    blocks = torch.tensor([[0, 3, 12], [1, 4, -1], [-1, -1, -1]], dtype=torch.int32)
    meta = deep_gemm.get_paged_sparse_mqa_logits_metadata(
        problem.context_lens, problem.block_table, None, 64, blocks, torch.float8_e4m3fn, 8
    )
    for _ in range(20):
        out = deep_gemm.fp8_fp4_paged_sparse_mqa_logits(problem.q, problem.pages, problem.weights, meta, 3, 8)
        for row in range(3):
            for c in range(24):
                entry = int(blocks[row, c // 8]) * 8 + c % 8
                inside = 0 <= entry < int(problem.context_lens[row])
                assert float(out[row, c]) == (float(dense[row, entry]) if inside else -INF)


GOOD = make_problem(INDEX_FP4, [[20], [9]], heads=3, num_pages=6, seed=30)
GOOD8 = make_problem(INDEX_FP8, [[20], [9]], heads=3, num_pages=6, seed=30)
RAGGED = ragged()
META = deep_gemm.get_sparse_mqa_logits_metadata(*RAGGED[3:], 120, torch.zeros(5, 1, dtype=torch.int32), torch.int8, 8)
BAD_INPUTS: dict[str, tuple[Any, type[Exception], str]] = {
    "width": (lambda: paged(GOOD, -1), ArgumentError, "max_context_len must be an integer >= 0, got -1"),
    "token width": (lambda: paged(GOOD, 9, pages=GOOD8.pages), FormatError, r"kv_cache must have .*68.* got 132"),
    "no cache": (
        lambda: paged(GOOD, 9, pages=None),
        DTypeError,
        "kv_cache must be a PagedCache or a tensor, got NoneType",
    ),
    "scales missing": (
        lambda: paged(GOOD, 9, q=(GOOD.q[0], None)),
        SparseMlaError,
        "q_sf must be given|kv_cache must have",
    ),
    "weights": (
        lambda: paged(GOOD, 9, weights=GOOD.weights[:, :1]),
        ShapeError,
        r"weights must be \[rows, h\] with h = 3",
    ),
    "table": (lambda: paged(GOOD, 9, block_table=GOOD.block_table[:1]), ShapeError, r"block_table must be \[b, w\]"),
    "stale": (
        lambda: paged(GOOD, 20, block_table=0 * GOOD.block_table + 6),
        SlotRangeError,
        "block_table must hold pages",
    ),
    "ragged width": (
        lambda: deep_gemm.fp8_fp4_mqa_logits(*RAGGED, 0),
        ArgumentError,
        "max_seqlen_k must be positive, got 0",
    ),
    "kv": (
        lambda: deep_gemm.fp8_fp4_mqa_logits(RAGGED[0], RAGGED[1][0], *RAGGED[2:], 9),
        DTypeError,
        r"kv must be a pair \(keys, scales\), got Tensor",
    ),
    "ragged range": (
        lambda: deep_gemm.fp8_fp4_mqa_logits(*RAGGED[:4], RAGGED[4] + 1, 9),
        SlotRangeError,
        "cu_seq_len_k_start and cu_seq_len_k_end must be inside the 120 keys",
    ),
    "metadata": (
        lambda: deep_gemm.fp8_fp4_sparse_mqa_logits(*RAGGED[:3], torch.zeros(1), 1, 8),
        DTypeError,
        "metadata must come from get_sparse_mqa_logits_metadata, got Tensor",
    ),
    "flag": (
        lambda: deep_gemm.fp8_fp4_sparse_mqa_logits(*RAGGED[:3], META, 1, 8, True),
        ArgumentError,
        "use_unaligned_ks must be what the metadata was made with, got True",
    ),
    "blocks": (
        lambda: deep_gemm.fp8_fp4_sparse_mqa_logits(*RAGGED[:3], META, 2, 8),
        ArgumentError,
        "num_max_sparse_blocks must be 1 as in the metadata, got 2",
    ),
    "block size": (
        lambda: deep_gemm.fp8_fp4_sparse_mqa_logits(*RAGGED[:3], META, 1, 16),
        ArgumentError,
        "sparse_block_kv must be 8 as in the metadata, got 16",
    ),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_bad_input_is_one_sentence_in_upstreams_names(name: str) -> None:
    call, error, message = BAD_INPUTS[name]
    with pytest.raises(error, match=message) as raised:
        call()
    assert isinstance(raised.value, SparseMlaError)
    assert str(raised.value).startswith("fp8_fp4_")
    assert "keys." not in str(raised.value)
    assert "\n" not in str(raised.value)
