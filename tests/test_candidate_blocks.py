# SPDX-License-Identifier: Apache-2.0
"""Two-level selection: golden vectors, the rule against plain Python, and both consumer forms choosing the same
entries."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing

from index_data import make_problem
from sparse_mla import config
from sparse_mla.errors import ArgumentError, DTypeError, NonFiniteError, ShapeError, SlotRangeError, SparseMlaError
from sparse_mla.formats import INDEX_FP4
from sparse_mla.ops.candidate_blocks import (
    CandidateBlocksCall,
    candidate_blocks,
    candidate_lengths,
    candidate_mask,
    compact_to_dense,
    dense_to_compact,
)
from sparse_mla.ops.index_logits import Candidates, PagedKeys, index_logits
from sparse_mla.ops.topk import topk

VECTORS = Path(__file__).parent / "data" / "vectors"
INF = math.inf


@pytest.fixture(autouse=True)
def _on_the_reference() -> Iterator[None]:
    """These tests hold the definition; other backends are held to it by the cases."""
    with config.override(SPARSE_MLA_BACKEND="reference"):
        yield


def lengths_of(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def expected_row(values: list[float], block_size: int, k: int) -> list[int]:
    """The rule in plain Python."""
    starts = range(0, len(values), block_size)
    cap = torch.finfo(torch.bfloat16).max
    scores = [min(max(-INF if math.isnan(v) else v for v in values[s : s + block_size]), cap) for s in starts]
    if scores:
        scores[-1] = INF
    best = sorted(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k])
    return best + [-1] * (k - len(best))


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("k", [1, 3, 9, 100])
def test_against_the_rule(block_size: int, dtype: torch.dtype, k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    logits = torch.randn(7, 150, generator=generator).mul(2).round().to(dtype)
    logits[3, 5], logits[4, 60], logits[5, :64], logits[6, 20] = INF, -INF, -INF, math.nan
    lengths = lengths_of(0, 1, 8, 150, 149, 120, 100)
    out = candidate_blocks(logits, lengths, block_size=block_size, topk_blocks=k, on_nan="last")
    width = min(k, -(-150 // block_size))
    assert out.dtype == torch.int32
    assert out.shape == (7, width)
    for row, length in enumerate(lengths.tolist()):
        assert out[row].tolist() == expected_row(logits[row, :length].float().tolist(), block_size, width), row


def test_golden_vectors() -> None:
    v = json.loads((VECTORS / "candidates.json").read_text())
    size, tokens = v["block_size"], v["topk_tokens"]
    logits = torch.tensor([[float(x) for x in row] for row in v["logits"]], dtype=torch.bfloat16)
    lengths = lengths_of(*(row["valid_len"] for row in v["rows"]))
    blocks = candidate_blocks(logits, lengths, block_size=size, topk_blocks=v["topk_blocks"])
    compact_len = candidate_lengths(blocks, lengths, size)
    columns = torch.arange(blocks.shape[1] * size, dtype=torch.int32).expand(len(lengths), -1)
    entries = compact_to_dense(columns, blocks, size)
    compact = torch.where(entries >= 0, logits.gather(1, entries.clamp(0, logits.shape[1] - 1).long()), -INF)
    picks = topk(compact, tokens, compact_len)
    restored = compact_to_dense(picks, blocks, size)
    offset = torch.where(restored >= 0, restored + 100, restored)
    for row, want in enumerate(v["rows"]):
        assert blocks[row].tolist() == want["candidate_blocks"]
        assert int(compact_len[row]) == want["compact_len"]
        assert picks[row].tolist() == want["compact_topk"]
        assert restored[row].tolist() == want["restored"]
        assert offset[row].tolist() == want["restored_with_offset_100"]
    # The dense form: everything outside the candidates masked, then the same selection.
    masked = logits.masked_fill(~candidate_mask(blocks, logits.shape[1], size), -INF)
    assert topk(masked, tokens, lengths).tolist() == restored.tolist()


@pytest.mark.parametrize("seed", range(6))
def test_compact_and_masked_forms_select_the_same(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    n, size = 400, 8 if seed % 2 else 16
    lengths = torch.randint(0, n + 1, (5,), generator=generator, dtype=torch.int32)
    problem = make_problem(INDEX_FP4, [[int(x)] for x in lengths], page_size=16, num_pages=40, seed=seed)
    keys = PagedKeys(problem.pages, problem.block_table, problem.context_lens)
    logits = index_logits(problem.q, keys, problem.weights)
    blocks = candidate_blocks(logits, lengths, block_size=size, topk_blocks=9)
    compact = index_logits(problem.q, keys, problem.weights, candidates=Candidates(blocks, size))
    picks = topk(compact, 33, candidate_lengths(blocks, lengths, size))
    masked = logits.masked_fill(~candidate_mask(blocks, logits.shape[1], size), -INF)
    dense = topk(masked, 33)
    assert torch.equal(compact_to_dense(picks, blocks, size), dense)
    assert torch.equal(dense_to_compact(dense, blocks, size), picks)
    # Compact columns have no gap: exactly the first candidate_lengths columns hold a key.
    filled = (compact != -INF).sum(dim=1)
    assert torch.equal(filled.int(), candidate_lengths(blocks, lengths, size))


def test_every_block_is_a_candidate_when_they_are_few() -> None:
    logits = torch.randn(3, 16384, generator=torch.Generator().manual_seed(0)).bfloat16()
    lengths = lengths_of(16384, 7, 5000)
    blocks = candidate_blocks(logits, lengths)
    assert blocks.shape == (3, 2048)
    assert blocks[0].tolist() == list(range(2048))
    masked = logits.masked_fill(~candidate_mask(blocks, 16384), -INF)
    assert torch.equal(topk(masked, 512, lengths), topk(logits, 512, lengths))


def test_the_last_block_wins_against_infinite_logits() -> None:
    logits = torch.full((1, 32), INF, dtype=torch.bfloat16)
    logits[0, 24:] = -5
    assert candidate_blocks(logits, lengths_of(32), topk_blocks=1).tolist() == [[3]]
    assert candidate_blocks(logits, lengths_of(25), topk_blocks=2).tolist() == [[0, 3]]
    logits.fill_(-INF)
    assert candidate_blocks(logits, lengths_of(32), topk_blocks=9).tolist() == [[0, 1, 2, 3]]


def test_nan_raises_by_default() -> None:
    logits = torch.zeros(2, 20)
    logits[1, 13] = math.nan
    with pytest.raises(NonFiniteError, match="candidate_blocks: logits must not be NaN, got NaN at row 1, column 13"):
        candidate_blocks(logits, lengths_of(20, 14))
    assert candidate_blocks(logits, lengths_of(20, 13)).tolist() == [[0, 1, 2], [0, 1, -1]]


def test_columns_past_the_length_are_ignored_and_strides_do_not_matter() -> None:
    logits = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    lengths = lengths_of(40, 9, 64, 0)
    want = candidate_blocks(logits, lengths, topk_blocks=3)
    poisoned = logits.clone()
    for row, length in enumerate(lengths.tolist()):
        poisoned[row, length:] = math.nan
    assert torch.equal(candidate_blocks(poisoned, lengths, topk_blocks=3), want)
    assert torch.equal(candidate_blocks(logits.t().contiguous().t(), lengths, topk_blocks=3), want)


def test_no_rows_and_no_columns() -> None:
    assert candidate_blocks(torch.zeros(0, 64), lengths_of()).shape == (0, 8)
    empty = candidate_blocks(torch.zeros(2, 0), lengths_of(0, 0))
    assert empty.shape == (2, 0)
    assert candidate_lengths(empty, lengths_of(0, 0)).tolist() == [0, 0]
    assert candidate_mask(empty, 5).tolist() == [[False] * 5] * 2
    columns = torch.zeros(2, 3, dtype=torch.int32)
    assert compact_to_dense(columns, empty).tolist() == [[-1] * 3] * 2
    assert dense_to_compact(columns, empty).tolist() == [[-1] * 3] * 2


def test_mapping_sends_what_is_outside_to_minus_one() -> None:
    blocks = torch.tensor([[1, 4, -1]], dtype=torch.int32)
    columns = torch.tensor([[0, 7, 8, 15, 16, 23, 24, 999, -1, -7]], dtype=torch.int32)
    assert compact_to_dense(columns, blocks).tolist() == [[8, 15, 32, 39, -1, -1, -1, -1, -1, -1]]
    entries = torch.tensor([[8, 15, 32, 39, 0, 16, 40, 2**31 - 1, -1, -9]], dtype=torch.int32)
    assert dense_to_compact(entries, blocks).tolist() == [[0, 7, 8, 15, -1, -1, -1, -1, -1, -1]]
    assert candidate_mask(torch.tensor([[0, 9, -1]], dtype=torch.int32), 10).tolist() == [[True] * 8 + [False] * 2]


# --- bad input and the torch ecosystem -----------------------------------------------------------------------------

LOGITS = torch.zeros(2, 20)
BLOCKS = torch.tensor([[0, 1], [1, -1]], dtype=torch.int32)
BAD_INPUTS: dict[str, tuple[Any, type[Exception], str]] = {
    "logits": (
        lambda: candidate_blocks(LOGITS[0], lengths_of(1)),
        ShapeError,
        r"logits must be \[rows, n\], got \[20\]",
    ),
    "dtype": (
        lambda: candidate_blocks(LOGITS.int(), lengths_of(1, 1)),
        DTypeError,
        "logits must be bfloat16 or float32",
    ),
    "lengths": (lambda: candidate_blocks(LOGITS, lengths_of(1)), ShapeError, r"lengths must be \[rows\] with rows = 2"),
    "long": (lambda: candidate_blocks(LOGITS, lengths_of(1, 1).long()), DTypeError, "lengths must be int32, got int64"),
    "range": (
        lambda: candidate_blocks(LOGITS, lengths_of(1, 21)),
        SlotRangeError,
        r"lengths must be .* n = 20, got 21 at \[1\]",
    ),
    "negative": (
        lambda: candidate_blocks(LOGITS, lengths_of(-1, 2)),
        SlotRangeError,
        "lengths must be between 0 and n",
    ),
    "block": (
        lambda: candidate_blocks(LOGITS, lengths_of(1, 1), block_size=4),
        ArgumentError,
        "block_size must be one of 8, 16",
    ),
    "k": (
        lambda: candidate_blocks(LOGITS, lengths_of(1, 1), topk_blocks=0),
        ArgumentError,
        "topk_blocks must be an integer >= 1",
    ),
    "on_nan": (lambda: candidate_blocks(LOGITS, lengths_of(1, 1), on_nan="no"), ArgumentError, "on_nan must be one of"),
    "mask": (lambda: candidate_mask(BLOCKS.long(), 5), DTypeError, "candidate_mask: blocks must be int32, got int64"),
    "lens": (
        lambda: candidate_lengths(BLOCKS, lengths_of(1)),
        ShapeError,
        r"candidate_lengths: lengths must be \[rows\]",
    ),
    "columns": (
        lambda: compact_to_dense(BLOCKS[:1], BLOCKS),
        ShapeError,
        r"compact_to_dense: columns must be \[rows, k\]",
    ),
    "entries": (
        lambda: dense_to_compact(BLOCKS[0], BLOCKS),
        ShapeError,
        r"dense_to_compact: entries must be \[rows, k\]",
    ),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_bad_input_is_one_sentence_that_names_the_argument(name: str) -> None:
    call, error, message = BAD_INPUTS[name]
    with pytest.raises(error, match=message) as raised:
        call()
    assert isinstance(raised.value, SparseMlaError)
    assert "\n" not in str(raised.value)


def test_opcheck() -> None:
    call = CandidateBlocksCall.check(LOGITS.bfloat16(), lengths_of(20, 3), topk_blocks=2)
    torch.library.opcheck(torch.ops.sparse_mla.candidate_blocks_reference.default, call.flat())


def test_fullgraph_compile_of_both_consumer_forms() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()

    def consume(logits: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, ...]:
        blocks = candidate_blocks(logits, lengths, topk_blocks=3)
        masked = topk(logits.masked_fill(~candidate_mask(blocks, logits.shape[1]), -INF), 10)
        compact = dense_to_compact(masked, blocks)
        return blocks, candidate_lengths(blocks, lengths), masked, compact, compact_to_dense(compact, blocks)

    compiled = torch.compile(consume, fullgraph=True, backend=counter)
    for b in (1, 2, 3, 5, 17, 64):
        logits = torch.randn(b, 60, generator=torch.Generator().manual_seed(b))
        lengths = torch.full((b,), 55, dtype=torch.int32)
        for got, want in zip(compiled(logits, lengths), consume(logits, lengths), strict=True):
            assert torch.equal(got, want)
    assert counter.frame_count <= 3
    torch._dynamo.reset()


def test_inference_mode_and_autocast_change_nothing() -> None:
    logits = torch.randn(3, 90, generator=torch.Generator().manual_seed(4))
    want = candidate_blocks(logits, lengths_of(90, 8, 40), topk_blocks=4)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(candidate_blocks(logits, lengths_of(90, 8, 40), topk_blocks=4), want)
