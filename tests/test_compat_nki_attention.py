# SPDX-License-Identifier: Apache-2.0
"""The engine's Neuron functions: signatures, golden bytes, switches read at use, and what a row count leaves open."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sparse_mla import config
from sparse_mla.caches import allocate
from sparse_mla.compat import nki_attention as nki
from sparse_mla.errors import ArgumentError, ShapeError, SparseMlaError, UnsupportedError
from sparse_mla.formats import INDEX_FP4, INDEX_FP8, V41_FP4, V41_FP8, encode, encode_query
from sparse_mla.kernels import launch
from sparse_mla.ops.index_logits import PagedKeys, index_logits
from sparse_mla.ops.sparse_decode import KVScope
from sparse_mla.ops.sparse_decode import sparse_decode as reference_decode
from sparse_mla.ops.store_records import store_records
from sparse_mla.testing import numeric
from sparse_mla.testing.neuron_graph import check_graph

VECTORS = Path(__file__).parent / "data" / "vectors"
SCALE = 512**-0.55


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with config.override(SPARSE_MLA_BACKEND="simulated"):
        yield


SIGNATURES = {
    "gather_rows": "cache block offset record token_stride base=0",
    "gather_paged_kv": "k_cache flat_indices",
    "decode_v41_fp8": "records",
    "decode_v41_fp4": "records",
    "supported_decode": "q caches rms_norm_scale_factor d_v",
    "sparse_decode": "q scopes softmax_scale attn_sink",
    "flash_mla_decode": "q k_cache indices topk_length attn_sink extra_k_cache extra_indices extra_topk_length "
    "softmax_scale *one_sequence=None",
    "supported_paged_mqa_logits": "q_data kv_cache",
    "paged_mqa_logits": "q_data q_sf kv_cache weights context_lens block_table max_context_len *one_sequence=None",
    "supported_pool": "score_rows",
    "softmax_pool": "score_rows latent_rows",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    """Engines call these by position."""
    words = []
    for parameter in inspect.signature(getattr(nki, name)).parameters.values():
        star = "*" if parameter.kind is inspect.Parameter.KEYWORD_ONLY else ""
        default = "" if parameter.default is inspect.Parameter.empty else f"={parameter.default}"
        words.append(f"{star}{parameter.name}{default}")
    assert " ".join(words) == SIGNATURES[name]
    assert sorted(nki.__all__) == sorted(SIGNATURES)


# --- golden bytes ----------------------------------------------------------------------------------------------------

GATHERS = json.loads((VECTORS / "gather_rows.json").read_text())["cases"]


@pytest.mark.parametrize("case", GATHERS, ids=[c["name"] for c in GATHERS])
def test_gather_rows_vectors(case: dict[str, Any]) -> None:
    size = (case["blocks"] - 1) * case["block_stride"] + case["block_bytes"]
    i = torch.arange(size)
    memory = ((7 * i + 3 * (i // 256) + 1) & 255).to(torch.uint8)
    cache = memory.unfold(0, case["block_bytes"], case["block_stride"])
    block = torch.tensor([q["block"] for q in case["queries"]])
    offset = torch.tensor([q["offset"] for q in case["queries"]])
    found = nki.gather_rows(cache, block, offset, case["record"], case["token_stride"], case["base"])
    assert [bytes(row.tolist()).hex() for row in found] == [q["bytes"] for q in case["queries"]]


def test_gather_rows_refuses_single_bytes() -> None:
    with pytest.raises(ArgumentError, match="share a factor of 4"):
        nki.gather_rows(torch.zeros(2, 33, dtype=torch.uint8), torch.tensor([0]), torch.tensor([1]), 3, 3)


EDGES = json.loads((VECTORS / "decode_edges.json").read_text())


def _number(text: Any) -> float:
    return float(text)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def test_decode_fp8_edges() -> None:
    """Every listed code and scale byte, 255 included, bit for bit with the sign of zeros."""
    edges = EDGES["e4m3_times_ue8m0"]
    records = torch.zeros(len(edges), V41_FP8.record_bytes, dtype=torch.uint8)
    for row, edge in enumerate(edges):
        records[row, :32], records[row, 512] = edge["code"], edge["ue8m0"]
    wanted = torch.tensor([_number(e["neuron_decode"]) for e in edges]).to(torch.bfloat16)
    assert {255} <= {e["ue8m0"] for e in edges}
    found = nki.decode_v41_fp8(records)
    assert found.dtype == torch.bfloat16
    assert _same(found[:, 31].contiguous(), wanted)


def test_decode_fp4_edges() -> None:
    edges = EDGES["e2m1_times_e4m3"]
    records = torch.zeros(len(edges), V41_FP4.record_bytes, dtype=torch.uint8)
    for row, edge in enumerate(edges):
        records[row, 0], records[row, 256] = edge["code"] | edge["code"] << 4, edge["e4m3_scale"]
    wanted = torch.tensor([_number(e["neuron_decode"]) for e in edges]).to(torch.bfloat16)
    found = nki.decode_v41_fp4(records)
    assert _same(found[:, 0].contiguous(), wanted)
    assert _same(found[:, 1].contiguous(), wanted)


# --- attention -------------------------------------------------------------------------------------------------------


def _attention(rows: int, heads: int = 4, seed: int = 3) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    caches, lists = [], []
    for fmt, topk in ((V41_FP8, 20), (V41_FP4, 40)):
        cache = allocate(fmt, 4, 32)
        keys = (torch.randn(128, 512, generator=g) * 0.1).bfloat16()
        store_records(keys, cache, torch.arange(128, dtype=torch.int32), backend="reference")
        caches.append(cache.as_tensor())
        lists.append(torch.randint(-1, 128, (rows, 1, topk), generator=g, dtype=torch.int32))
    q = torch.randn(rows, 1, heads, 512, generator=g).clamp(-1, 1).bfloat16()
    sink = torch.randn(heads, generator=g)
    return {"q": q, "caches": caches, "lists": lists, "sink": sink}


def _decode(p: dict[str, Any], **options: Any) -> torch.Tensor:
    caches, lists = p["caches"], p["lists"]
    return nki.flash_mla_decode(
        p["q"], caches[0], lists[0], None, p["sink"], caches[1], lists[1], None, SCALE, **options
    )


def _expected(p: dict[str, Any]) -> torch.Tensor:
    scopes = [KVScope(c, i) for c, i in zip(p["caches"], p["lists"], strict=True)]
    options: dict[str, Any] = {"softmax_scale": SCALE, "attn_sink": p["sink"], "backend": "reference"}
    return reference_decode(p["q"], scopes, out_dtype=torch.float64, **options).out


def test_both_attention_functions_agree() -> None:
    p = _attention(rows=6)
    out = _decode(p)
    assert not numeric.by_element("out", out, _expected(p), numeric.DECODE_OUT)
    scopes = [(c, i[:, 0].clamp(min=0), i[:, 0] == -1) for c, i in zip(p["caches"], p["lists"], strict=True)]
    assert torch.equal(nki.sparse_decode(p["q"][:, 0], scopes, SCALE, p["sink"]), out[:, 0])


@pytest.mark.parametrize("rows", [4, 6])
def test_a_batch_as_large_as_the_bucket_is_no_chunk(rows: int) -> None:
    """Unrelated rows whose number happens to equal the bucket: each answers from its own slots."""
    p = _attention(rows)
    with config.override(DEEPINFER_NEURON_PREFILL_BUCKET=rows):
        out = _decode(p)
    assert not numeric.by_element("out", out, _expected(p), numeric.DECODE_OUT)


def test_the_bucket_permits_the_table_and_nothing_else() -> None:
    """A strided cache is refused by the fused kernel; the table serves it at the bucket's row count only, and only
    while its slots are allowed."""
    p = _attention(rows=4)
    wide = torch.zeros(4, 32 * 528 + 528, dtype=torch.uint8)
    wide[:, : 32 * 528] = p["caches"][0].reshape(4, -1)
    p["caches"][0] = wide[:, : 32 * 528].unflatten(1, (32, 1, 528))

    def kernels(**switches: int) -> list[str]:
        with config.override(**switches), launch.recording() as launched:
            out = _decode(p)
        assert not numeric.by_element("out", out, _expected(p), numeric.DECODE_OUT)
        return [getattr(each.kernel, "func", each.kernel).__name__ for each in launched]

    assert kernels() == ["gathered_attn"]
    assert kernels(DEEPINFER_NEURON_PREFILL_BUCKET=4) == ["gathered_attn_idx"]
    assert kernels(DEEPINFER_NEURON_PREFILL_BUCKET=5) == ["gathered_attn"]
    assert kernels(DEEPINFER_NEURON_PREFILL_BUCKET=4, DEEPINFER_NEURON_ATTN_TABLE_SLOTS=100) == ["gathered_attn"]


def test_one_sequence_with_lists_that_are_no_prefixes() -> None:
    g = torch.Generator().manual_seed(5)
    p = _attention(rows=2)
    p["lists"][1] = torch.randint(0, 128, (2, 1, 1024), generator=g, dtype=torch.int32)
    p["lists"][1][0, :, 512:] = -1
    with config.override(DEEPINFER_NEURON_ATTN_TABLE_SLOTS=0), pytest.raises(SparseMlaError, match="prefixes"):
        _decode(p, one_sequence=True)


def test_supported_decode_agrees_with_the_call() -> None:
    p = _attention(rows=2)
    q, caches = p["q"], p["caches"]
    assert nki.supported_decode(q, [caches[0], caches[1]], None, 512)
    assert nki.supported_decode(q, [caches[0], None], None, 512)
    assert not nki.supported_decode(q, [caches[0]], torch.ones(2, 4), 512)
    assert not nki.supported_decode(q, [caches[0]], None, 448)
    assert not nki.supported_decode(q, [None], None, 512)
    assert not nki.supported_decode(q, [torch.zeros(2, 4, 1, 656, dtype=torch.uint8)], None, 512)
    assert not nki.supported_decode(q, [caches[0].view(torch.int8)], None, 512)
    many = q.expand(2, 1, 4, 512).repeat(1, 1, 33, 1)
    assert not nki.supported_decode(many, caches, None, 512)
    p["q"], p["sink"] = many, torch.zeros(132)
    with pytest.raises(UnsupportedError, match="at most 128 heads, got 132"):
        _decode(p)


def test_predicates_follow_the_switch_and_the_backend() -> None:
    p = _attention(rows=1)
    rows = torch.zeros(2, 2, 8)
    with config.override(DEEPINFER_NEURON_NKI_ATTN="0"):
        assert not nki.supported_decode(p["q"], p["caches"], None, 512)
        assert not nki.supported_pool(rows)
        assert _decode(p).shape == p["q"].shape  # the switch governs the predicates only
    with config.override(SPARSE_MLA_BACKEND="auto"):  # no device here
        assert not nki.supported_decode(p["q"], p["caches"], None, 512)
        assert not nki.supported_pool(rows)


def test_errors_are_in_the_callers_words() -> None:
    p = _attention(rows=2)
    p["lists"][1][0, 0, 3] = 128
    with pytest.raises(SparseMlaError, match=r"flash_mla_decode: extra_indices .*128"):
        _decode(p)
    with pytest.raises(ArgumentError, match="given together"):
        nki.flash_mla_decode(p["q"], p["caches"][0], p["lists"][0], None, None, p["caches"][1], None, None, SCALE)


# --- index scores ----------------------------------------------------------------------------------------------------


def _index(fmt: Any, rows: int, seed: int = 7) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    pages = torch.zeros(3 * rows, 16, 1, fmt.record_bytes, dtype=torch.uint8)
    cache = allocate(fmt, 3 * rows, 16)
    keys = torch.randn(3 * rows * 16, 128, generator=g).bfloat16()
    store_records(keys, cache, torch.arange(3 * rows * 16, dtype=torch.int32), backend="reference")
    pages.copy_(cache.as_tensor())
    q = encode_query(torch.randn(rows, 1, 8, 128, generator=g).bfloat16(), fmt, sf_dtype=torch.uint8)
    lens = torch.randint(1, 49, (rows, 1), generator=g, dtype=torch.int32)
    table = torch.randperm(3 * rows, generator=g, dtype=torch.int32).reshape(rows, 3)
    stale = torch.arange(3) * 16 >= lens
    table = torch.where(stale, 998244353, table)
    weights = torch.randn(rows, 8, generator=g).bfloat16()
    return {"q": q, "pages": pages, "weights": weights, "lens": lens, "table": table}


def _logits(p: dict[str, Any], width: int = 60, **options: Any) -> torch.Tensor:
    q = p["q"]
    return nki.paged_mqa_logits(q.q_fp, q.q_sf, p["pages"], p["weights"], p["lens"], p["table"], width, **options)


@pytest.mark.parametrize("fmt", [INDEX_FP4, INDEX_FP8], ids=str)
def test_paged_logits(fmt: Any) -> None:
    """Each row reads its own table, also when the number of rows is the bucket; stale entries are not looked up."""
    p = _index(fmt, rows=3)
    with config.override(DEEPINFER_NEURON_PREFILL_BUCKET=3):
        out = _logits(p)
    assert out.shape == (3, 60)
    assert out.dtype == torch.bfloat16
    assert out.stride(1) == 1
    assert out.stride(0) * 2 % 512 == 0
    keys = PagedKeys(p["pages"], p["table"], p["lens"], 60)
    wanted = index_logits(p["q"], keys, p["weights"], out_dtype=torch.float64, backend="reference")
    assert not numeric.within_diff("logits", out, wanted, numeric.LOGITS_DIFF)
    assert nki.supported_paged_mqa_logits(p["q"].q_fp, p["pages"])


def test_paged_logits_of_one_sequence() -> None:
    p = _index(INDEX_FP4, rows=4)
    p["lens"] = torch.tensor([[30], [31], [32], [33]], dtype=torch.int32)
    p["table"] = torch.tensor([[5, 2, 7]], dtype=torch.int32).repeat(4, 1)
    apart, shared = _logits(p), _logits(p, one_sequence=True)
    assert not numeric.within_diff("logits", shared, apart.double(), numeric.LOGITS_DIFF)
    p["table"][2, 1] = 3
    with pytest.raises(ArgumentError, match=r"got 3 at \[2, 1\] and 2 in row 0"):
        _logits(p, one_sequence=True)
    p["table"][2, 1], p["table"][1, 2] = 2, 998244353  # row 1 does not reach its third page
    _logits(p, one_sequence=True)


def test_paged_logits_refusals() -> None:
    p = _index(INDEX_FP4, rows=2)
    assert not nki.supported_paged_mqa_logits(p["q"].q_fp, p["pages"].view(torch.int8))
    assert not nki.supported_paged_mqa_logits(p["q"].q_fp[..., :32], p["pages"])
    assert not nki.supported_paged_mqa_logits(p["q"].q_fp.repeat(1, 1, 17, 1), p["pages"])
    wide = _index(INDEX_FP8, rows=2)
    assert not nki.supported_paged_mqa_logits(p["q"].q_fp, wide["pages"])
    with pytest.raises(ShapeError, match="q_data must be"):
        nki.paged_mqa_logits(p["q"].q_fp[:, 0], p["q"].q_sf, p["pages"], p["weights"], p["lens"], p["table"], 8)
    p["table"][0, 0] = 77
    with pytest.raises(SparseMlaError, match="paged_mqa_logits: block_table"):
        _logits(p)


# --- pooling and graphs ----------------------------------------------------------------------------------------------


def test_softmax_pool_takes_the_score_first() -> None:
    g = torch.Generator().manual_seed(11)
    score, latent = torch.randn(5, 2, 64, generator=g), torch.randn(5, 2, 64, generator=g)
    wanted = (torch.softmax(score.double(), 1) * latent.double()).sum(1)
    assert not numeric.within_ulp("rows", nki.softmax_pool(score, latent), wanted)
    assert nki.supported_pool(score)
    assert not nki.supported_pool(score[:, :1])
    assert not nki.supported_pool(score.double())
    with pytest.raises(UnsupportedError, match="at least 2 rows"):
        nki.softmax_pool(score[:, :1], latent[:, :1])


def test_every_function_survives_the_graph_check() -> None:
    p, i = _attention(rows=4), _index(INDEX_FP4, rows=4)
    records8 = encode(torch.randn(4, 512).bfloat16(), V41_FP8)
    records4 = encode(torch.randn(4, 512).bfloat16(), V41_FP4)
    slots = torch.arange(4, dtype=torch.int32)
    q = i["q"]
    calls: list[tuple[Any, ...]] = [
        (nki.gather_rows, p["caches"][0], slots, slots, 528, 528),
        (nki.gather_paged_kv, p["caches"][1], slots),
        (nki.decode_v41_fp8, records8),
        (nki.decode_v41_fp4, records4),
        (nki.flash_mla_decode, p["q"], p["caches"][0], p["lists"][0], None, p["sink"], p["caches"][1], p["lists"][1],
         None, SCALE),
        (nki.sparse_decode, p["q"][:, 0], [(p["caches"][0], p["lists"][0][:, 0], p["lists"][0][:, 0] < 0)], SCALE,
         p["sink"]),
        (nki.paged_mqa_logits, q.q_fp, q.q_sf, i["pages"], i["weights"], i["lens"], i["table"], 48),
        (nki.softmax_pool, torch.randn(4, 2, 32), torch.randn(4, 2, 32)),
    ]  # fmt: skip
    for function, *arguments in calls:
        assert check_graph(function, *arguments) == [], function.__name__
