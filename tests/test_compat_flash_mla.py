# SPDX-License-Identifier: Apache-2.0
"""The FlashMLA drop-in: upstream's signatures, the same results as the operators, lengths and metadata as upstream's
callers use them,
caches in every dtype, stride and layout, and errors that name upstream's arguments."""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import sparse_mla.compat
from sparse_mla import compat, config
from sparse_mla.caches import KVScope
from sparse_mla.compat import flash_mla
from sparse_mla.compat.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
from sparse_mla.errors import SparseMlaError
from sparse_mla.formats import V41_FP4, V41_FP8, encode
from sparse_mla.ops.sparse_decode import sparse_decode
from sparse_mla.ops.sparse_prefill import sparse_prefill
from sparse_mla.testing import numeric
from sparse_mla.testing.attention_cases import attend
from sparse_mla.testing.case import clamped_randn
from sparse_mla.testing.pages import Pages

INF = float("inf")
SIGNATURES = json.loads((Path(__file__).parent / "data" / "upstream_signatures.json").read_text())["flash_mla"]


@pytest.fixture(autouse=True)
def _fresh_options():
    compat.uninstall()
    yield
    compat.uninstall()


def cache_of(fmt=V41_FP8, page_size=64, num_pages=4, seed=0, **options) -> torch.Tensor:
    pages = Pages(format=fmt, page_size=page_size, num_pages=num_pages, bare=True, **options)
    pool = pages.empty(0xFF)
    values = clamped_randn(torch.Generator().manual_seed(seed), pages.num_slots, 512, scale=0.1)
    pages.write(pool, torch.arange(pages.num_slots), encode(values, fmt))
    return pages.cache(pool)


def slots(b: int, topk: int, s_q: int = 1, limit: int = 256, seed: int = 3) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-1, limit, (b, s_q, topk), generator=g, dtype=torch.int32)


def queries(b: int, s_q: int = 1, h_q: int = 4) -> torch.Tensor:
    return clamped_randn(torch.Generator().manual_seed(1), b, s_q, h_q, 512)


def decode(q, k_cache, **options):
    meta, _ = get_mla_metadata()
    return flash_mla_with_kvcache(q, k_cache, None, None, 512, options.pop("meta", meta), **options)


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# --- signatures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in SIGNATURES if name != "source"])
def test_signature_is_upstreams(name):
    shown = []
    for parameter in inspect.signature(getattr(flash_mla, name)).parameters.values():
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        assert parameter.kind != parameter.KEYWORD_ONLY
        default = "" if parameter.default is parameter.empty else f"={parameter.default}"
        shown.append(f"{star}{parameter.name}{default}")
    assert shown == SIGNATURES[name]


def test_no_error_is_an_assertion():
    """`python -O` removes assertions, and with them upstream's checks; ours are no assertions."""
    package = Path(sparse_mla.compat.__file__).parent
    for path in (*package.glob("*.py"), *(package.parent / "ops").glob("*.py")):
        assert not [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)], path.name


# --- results ---------------------------------------------------------------------------------------------------------


def test_decode_is_sparse_decode():
    q, main, extra = queries(3, 2), cache_of(), cache_of(V41_FP4, seed=5)
    first, second = slots(3, 128, 2), slots(3, 100, 2, seed=7)
    lengths, more = torch.tensor([128, 5, 0], dtype=torch.int32), torch.tensor([1, 100, 7], dtype=torch.int32)
    sink = torch.tensor([0.5, -INF, INF, 2.0])
    meta, splits = get_mla_metadata()
    assert splits is None
    got = flash_mla_with_kvcache(
        q, main, None, None, 512, meta, None, 0.05, False, True, first, sink, extra, second, lengths, more, True
    )
    scopes = [KVScope(main, first, lengths), KVScope(extra, second, more)]
    assert isinstance(got, tuple)
    assert len(got) == 2
    assert same(got, sparse_decode(q, scopes, softmax_scale=0.05, attn_sink=sink))
    out, lse = got
    assert (out.shape, out.dtype) == ((3, 2, 4, 512), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((3, 4, 2), torch.float32)
    assert lse.transpose(1, 2).is_contiguous()
    plain = decode(q, main, indices=first)
    assert same(plain, sparse_decode(q, KVScope(main, first)))


def test_prefill_is_sparse_prefill():
    kv = clamped_randn(torch.Generator().manual_seed(2), 300, 1, 512, scale=0.1)
    q, indices, sink = queries(5)[:, 0], slots(5, 64, limit=310), torch.tensor([0.5, -INF, INF, 2.0])
    lengths = torch.tensor([0, 1, 64, 30, 2], dtype=torch.int32)
    got = flash_mla_sparse_fwd(q, kv, indices, 0.05, 512, sink, lengths)
    assert isinstance(got, tuple)
    assert same(got, sparse_prefill(q, kv, indices, softmax_scale=0.05, attn_sink=sink, topk_length=lengths))
    assert [tuple(t.shape) for t in got] == [(5, 4, 512), (5, 4), (5, 4)]


def test_both_agree_with_the_definition():
    values = clamped_randn(torch.Generator().manual_seed(9), 64, 512, scale=0.1)
    pages = Pages(num_pages=1, page_size=64, bare=True)
    pool = pages.empty(0)
    pages.write(pool, torch.arange(64), encode(values, V41_FP8))
    decoded = sparse_mla.decode(encode(values, V41_FP8), V41_FP8)
    q, indices, sink = queries(1), torch.arange(0, 64, 2, dtype=torch.int32).reshape(1, 1, 32), torch.zeros(4)
    exact = attend(q[0, 0], decoded[::2], 512**-0.5, sink, True)
    out, lse = decode(q, pages.cache(pool), indices=indices, attn_sink=sink)
    prefill = flash_mla_sparse_fwd(q[:, 0], decoded[:, None], indices, 512**-0.5, attn_sink=sink)
    for result, stats in ((out[0, 0], lse[0, :, 0]), (prefill[0][0], prefill[2][0])):
        assert not numeric.by_element("out", result, exact[0], numeric.DECODE_OUT)
        assert not numeric.by_element("lse", stats, exact[1], numeric.DECODE_LSE)


def test_block_table_and_seqlens_are_ignored():
    q, main, indices = queries(2), cache_of(), slots(2, 16)
    expected = decode(q, main, indices=indices)
    meta, _ = get_mla_metadata(torch.zeros(2), 64, 1)
    garbage = torch.full((2, 3), 10**6, dtype=torch.int32)
    assert same(flash_mla_with_kvcache(q, main, garbage, garbage[:, 0], 512, meta, indices=indices), expected)


@pytest.mark.parametrize("h_q", [1, 3, 11, 130])
@pytest.mark.parametrize(("topk", "extra_topk"), [(1, 1), (63, 100), (133, 192)])
def test_any_heads_and_any_width(h_q, topk, extra_topk):
    q, main, extra = queries(2, 1, h_q), cache_of(page_size=5, num_pages=60), cache_of(V41_FP4, page_size=61)
    first, second = slots(2, topk), slots(2, extra_topk, limit=244)
    got = decode(q, main, indices=first, extra_k_cache=extra, extra_indices_in_kvcache=second)
    assert same(got, sparse_decode(q, [KVScope(main, first), KVScope(extra, second)]))


@pytest.mark.parametrize("length", [-(2**31), -3, 0, 1, 127, 128, 129, 2**31 - 1])
def test_lengths_outside_the_list(length):
    """At or below 0 is an empty row, above topk is topk."""
    q, main, indices = queries(2), cache_of(), slots(2, 128).clamp(min=0)
    lengths = torch.tensor([length, 5], dtype=torch.int32)
    expected = torch.tensor([min(max(length, 0), 128), 5], dtype=torch.int32)
    out, lse = decode(q, main, indices=indices, topk_length=lengths)
    assert same((out, lse), sparse_decode(q, KVScope(main, indices, expected)))
    both = decode(q, main, indices=indices, topk_length=lengths, extra_k_cache=main, extra_indices_in_kvcache=indices,
                  extra_topk_length=lengths)  # fmt: skip
    assert same(both, sparse_decode(q, [KVScope(main, indices, expected)] * 2))
    if length <= 0:
        assert not out[0].any()
        assert bool(torch.isposinf(lse[0]).all())
    kv = clamped_randn(torch.Generator().manual_seed(2), 256, 1, 512)
    prefill = flash_mla_sparse_fwd(q[:, 0], kv, indices, 0.05, topk_length=lengths)
    assert same(prefill, sparse_prefill(q[:, 0], kv, indices, softmax_scale=0.05, topk_length=expected))


@pytest.mark.parametrize("bad", [-2, -(2**31), 256, 2147480000])
def test_a_bad_slot_is_an_error_in_decode_and_padding_in_prefill(bad):
    indices = slots(1, 8).clamp(min=0)
    indices[0, 0, 3] = bad
    with pytest.raises(ValueError, match=f"flash_mla_with_kvcache: indices must be -1 or .* got {bad}"):
        decode(queries(1), cache_of(), indices=indices)
    with pytest.raises(ValueError, match="extra_indices_in_kvcache must be -1 or"):
        decode(queries(1), cache_of(), indices=slots(1, 8), extra_k_cache=cache_of(), extra_indices_in_kvcache=indices)
    kv = clamped_randn(torch.Generator().manual_seed(2), 256, 1, 512)
    padded = indices.clone()
    padded[0, 0, 3] = -1
    assert same(
        flash_mla_sparse_fwd(queries(1)[:, 0], kv, indices, 0.05),
        flash_mla_sparse_fwd(queries(1)[:, 0], kv, padded, 0.05),
    )


# --- caches ----------------------------------------------------------------------------------------------------------


def test_dtypes_of_the_same_bytes():
    q, main, extra, indices = queries(2), cache_of(), cache_of(V41_FP4), slots(2, 16)
    options = {"indices": indices, "extra_indices_in_kvcache": indices}
    expected = decode(q, main, extra_k_cache=extra, **options)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        assert same(decode(q, main.view(dtype), extra_k_cache=extra.view(dtype), **options), expected)


@pytest.mark.parametrize("padding", [576, 1_002_240 - 64 * 528])
def test_pages_packed_with_other_layers(padding):
    """stride(0) is larger than a page, and what lies between is NaN bytes of other layers."""
    q, indices = queries(2), slots(2, 64)
    dense, packed = cache_of(), cache_of(padding_bytes=padding)
    assert packed.stride(0) == 64 * 528 + padding
    assert same(decode(q, packed, indices=indices), decode(q, dense, indices=indices))
    extra, packed_extra = cache_of(V41_FP4), cache_of(V41_FP4, padding_bytes=padding)
    options = {"indices": indices, "extra_indices_in_kvcache": indices}
    assert same(
        decode(q, dense, extra_k_cache=packed_extra, **options), decode(q, dense, extra_k_cache=extra, **options)
    )


def test_layout_comes_from_the_configuration_or_install():
    q, indices = queries(2), slots(2, 64)
    interleaved, planar = cache_of(), cache_of(layout="planar")
    planar_extra, extra = cache_of(V41_FP4, layout="planar"), cache_of(V41_FP4)
    options = {"indices": indices, "extra_indices_in_kvcache": indices}
    expected = decode(q, interleaved, extra_k_cache=extra, **options)
    assert not same(decode(q, planar, extra_k_cache=planar_extra, **options), expected)
    with config.override(SPARSE_MLA_LAYOUT="planar"):
        assert same(decode(q, planar, extra_k_cache=planar_extra, **options), expected)
    compat.install("flash_mla", layout="planar")
    assert same(decode(q, planar, extra_k_cache=planar_extra, **options), expected)
    with config.override(SPARSE_MLA_LAYOUT="interleaved"):
        assert same(decode(q, planar, extra_k_cache=planar_extra, **options), expected)


@pytest.mark.parametrize(
    ("width", "looks_like"), [(512, "head size"), (576, "V3.2"), (584, "V4"), (592, "older"), (656, "V3.2"), (384,
    ""), (352, "")]
)  # fmt: skip
def test_a_foreign_record_width_is_named(width, looks_like):
    foreign = torch.zeros(4, 64, 1, width, dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"flash_mla_with_kvcache: k_cache .*528.*{width}.*{looks_like}"):
        decode(queries(1), foreign, indices=slots(1, 8))
    with pytest.raises(ValueError, match=f"flash_mla_with_kvcache: extra_k_cache .*288.*{width}"):
        decode(queries(1), cache_of(), indices=slots(1, 8), extra_k_cache=foreign, extra_indices_in_kvcache=slots(1, 8))


def test_fp4_is_an_extra_cache_only():
    with pytest.raises(ValueError, match=r"k_cache must hold .*528.* got V41_FP4; .* only accepted in extra_k_cache"):
        decode(queries(1), cache_of(V41_FP4), indices=slots(1, 8))
    assert decode(
        queries(1),
        cache_of(),
        indices=slots(1, 8),
        extra_k_cache=cache_of(V41_FP4),
        extra_indices_in_kvcache=slots(1, 8),
    )


# --- metadata --------------------------------------------------------------------------------------------------------


def test_lengths_may_change_under_one_metadata_object():
    q, main, indices = queries(2), cache_of(), slots(2, 128)
    meta, _ = get_mla_metadata()
    for lengths in ([5, 128], [128, 5], [0, 64], [0, 0]):
        length = torch.tensor(lengths, dtype=torch.int32)
        assert same(
            decode(q, main, indices=indices, topk_length=length, meta=meta),
            decode(q, main, indices=indices, topk_length=length),
        )


def test_a_failed_call_fixes_nothing():
    meta, _ = get_mla_metadata()
    with pytest.raises(TypeError, match="q must be bfloat16"):
        decode(queries(2).float(), cache_of(), indices=slots(2, 8), meta=meta)
    decode(queries(3), cache_of(), indices=slots(3, 8), meta=meta)
    for q, options in (
        (queries(4), {"indices": slots(4, 8)}),
        (queries(3, 2), {"indices": slots(3, 8, 2)}),
        (queries(3, 1, 5), {"indices": slots(3, 8)}),
        (queries(3), {"indices": slots(3, 9)}),
        (queries(3), {"indices": slots(3, 8), "extra_k_cache": cache_of(), "extra_indices_in_kvcache": slots(3, 8)}),
        (queries(3), {"indices": slots(3, 8), "enable_batch_invariant": True}),
    ):
        with pytest.raises(ValueError, match=r"tile_scheduler_metadata must be used with .* first call"):
            decode(q, cache_of(), meta=meta, **options)
    with pytest.raises(ValueError, match="page_size = 64"):
        decode(queries(3), cache_of(page_size=32, num_pages=8), indices=slots(3, 8), meta=meta)
    decode(queries(3), cache_of(), indices=slots(3, 8), meta=meta)  # the refusals changed nothing either


def test_metadata_of_older_versions_is_accepted():
    for meta, splits in (get_mla_metadata(), get_mla_metadata(torch.zeros(2), 128, 1, is_fp8_kvcache=True, topk=2048)):
        assert isinstance(meta, flash_mla.FlashMLASchedMeta)
        assert splits is None
        decode(queries(2), cache_of(), indices=slots(2, 8), meta=meta)


# --- compilation -----------------------------------------------------------------------------------------------------


def test_compiles_with_the_metadata_argument():
    """One graph without breaks, the metadata object and the None options among the arguments, at most two
    recompilations."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    main, extra, sink = cache_of(), cache_of(V41_FP4), torch.zeros(4)

    def step(q, main, extra, indices, others, meta):
        out, lse = flash_mla_with_kvcache(
            q, main, None, None, 512, meta, None, indices=indices, attn_sink=sink, extra_k_cache=extra,
            extra_indices_in_kvcache=others,
        )  # fmt: skip
        return out + 1, lse

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for b in (1, 2, 5, 64):
        given = (queries(b), main, extra, slots(b, 16), slots(b, 20))
        metas = [get_mla_metadata()[0] for _ in range(2)]
        assert same(compiled(*given, metas[0]), step(*given, metas[1]))
        assert metas[0].config == metas[1].config
    assert 1 <= counter.frame_count <= 3


def test_prefill_compiles():
    kv = clamped_randn(torch.Generator().manual_seed(2), 300, 1, 512)
    given = (queries(5)[:, 0], kv, slots(5, 64), 0.05)
    compiled = torch.compile(flash_mla_sparse_fwd, fullgraph=True, backend="aot_eager")
    assert same(compiled(*given), flash_mla_sparse_fwd(*given))


# --- bad input -------------------------------------------------------------------------------------------------------


def good() -> dict[str, Any]:
    return {
        "q": queries(2),
        "k_cache": cache_of(),
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "tile_scheduler_metadata": get_mla_metadata()[0],
        "indices": slots(2, 8),
        "attn_sink": torch.zeros(4),
        "extra_k_cache": cache_of(V41_FP4),
        "extra_indices_in_kvcache": slots(2, 12),
        "topk_length": torch.tensor([8, 3], dtype=torch.int32),
        "extra_topk_length": torch.tensor([12, 3], dtype=torch.int32),
    }


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "q rank": ({"q": queries(2)[:, 0]}, ValueError, "q must be"),
    "q dtype": ({"q": queries(2).float()}, TypeError, "q must be bfloat16, got float32"),
    "q head size": ({"q": torch.zeros(2, 1, 4, 576).bfloat16()}, ValueError, "q must be .* 576"),
    "q None": ({"q": None}, TypeError, "q must be"),
    "k_cache float32": ({"k_cache": torch.zeros(4, 64, 1, 528)}, TypeError, "k_cache must be .* got float32"),
    "k_cache bfloat16": ({"k_cache": torch.zeros(4, 64, 1, 512).bfloat16()}, TypeError, "k_cache must be .* bfloat16"),
    "k_cache None": ({"k_cache": None}, TypeError, "k_cache must be"),
    "k_cache two heads": (
        {"k_cache": torch.zeros(4, 64, 2, 528, dtype=torch.uint8)},
        ValueError,
        "k_cache must be .* 2,",
    ),
    "k_cache rank": ({"k_cache": torch.zeros(256, 528, dtype=torch.uint8)}, ValueError, "k_cache must be .* got"),
    "k_cache rows apart": ({"k_cache": torch.zeros(4, 128, 1, 528, dtype=torch.uint8)[:, ::2]}, ValueError, "k_cache"),
    "k_cache elsewhere": ({"k_cache": cache_of().to("meta")}, ValueError, "k_cache must be on cpu"),
    "indices int64": ({"indices": slots(2, 8).long()}, TypeError, "indices must be int32, got int64"),
    "indices None": ({"indices": None}, ValueError, "indices must be given, got None"),
    "indices rank": ({"indices": slots(2, 8)[:, 0]}, ValueError, "indices must be"),
    "indices batch": ({"indices": slots(3, 8)}, ValueError, "indices must be"),
    "indices empty": ({"indices": slots(2, 0)}, ValueError, "indices must have at least one column"),
    "sink float64": ({"attn_sink": torch.zeros(4).double()}, TypeError, "attn_sink must be float32, got float64"),
    "sink bfloat16": ({"attn_sink": torch.zeros(4).bfloat16()}, TypeError, "attn_sink must be float32, got bfloat16"),
    "sink rank": ({"attn_sink": torch.zeros(1, 4)}, ValueError, "attn_sink must be"),
    "sink heads": ({"attn_sink": torch.zeros(64)}, ValueError, "attn_sink must be"),
    "length int64": ({"topk_length": torch.tensor([8, 3])}, TypeError, "topk_length must be int32, got int64"),
    "length rank": ({"topk_length": torch.ones(2, 1, dtype=torch.int32)}, ValueError, "topk_length must be"),
    "length no tensor": ({"topk_length": [8, 3]}, TypeError, "topk_length must be"),
    "extra cache alone": (
        {"extra_indices_in_kvcache": None, "extra_topk_length": None},
        ValueError,
        "extra_indices_in_kvcache must come together, got only extra_k_cache",
    ),
    "extra indices alone": (
        {"extra_k_cache": None, "extra_topk_length": None},
        ValueError,
        "must come together, got only extra_indices_in_kvcache",
    ),
    "extra length alone": (
        {"extra_k_cache": None, "extra_indices_in_kvcache": None},
        ValueError,
        "extra_topk_length must come with extra_k_cache",
    ),
    "extra indices int64": (
        {"extra_indices_in_kvcache": slots(2, 12).long()},
        TypeError,
        "extra_indices_in_kvcache must be int32, got int64",
    ),
    "extra length int64": ({"extra_topk_length": torch.tensor([8, 3])}, TypeError, "extra_topk_length must be int32"),
    "extra cache float32": (
        {"extra_k_cache": torch.zeros(4, 64, 1, 288)},
        TypeError,
        "extra_k_cache must be .* got float32",
    ),
    "head_dim_v": ({"head_dim_v": 256}, ValueError, "head_dim_v must be 512, got 256"),
    "causal": ({"causal": True}, ValueError, "causal must be False, got True"),
    "not fp8": ({"is_fp8_kvcache": False}, ValueError, "is_fp8_kvcache must be True, got False"),
    "num_splits": ({"num_splits": torch.zeros(3)}, ValueError, "num_splits must be None, got Tensor"),
    "metadata of an older version": (
        {"tile_scheduler_metadata": torch.zeros(3)},
        TypeError,
        "tile_scheduler_metadata must be .* got Tensor",
    ),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_bad_input_of_decode(name):
    change, kind, text = BAD[name]
    flash_mla_with_kvcache(**good())
    with pytest.raises(kind, match=text) as caught:
        flash_mla_with_kvcache(**(good() | change))
    assert isinstance(caught.value, SparseMlaError)
    assert str(caught.value).startswith("flash_mla_with_kvcache: ")
    assert "scopes[" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"d_v": 256}, ValueError, "d_v must be 512, got 256"),
        ({"kv": torch.zeros(9, 2, 512).bfloat16()}, ValueError, "kv must be"),
        ({"kv": torch.zeros(9, 1, 512)}, TypeError, "kv must be bfloat16, got float32"),
        ({"indices": torch.zeros(2, 1, 4, dtype=torch.int64)}, TypeError, "indices must be int32, got int64"),
        ({"attn_sink": torch.zeros(1, 4)}, ValueError, "attn_sink must be"),
        ({"topk_length": torch.zeros(3, dtype=torch.int32)}, ValueError, "topk_length must be"),
        ({"topk_length": torch.zeros(2)}, TypeError, "topk_length must be int32"),
    ],
)
def test_bad_input_of_prefill(change, kind, text):
    arguments = {
        "q": queries(2)[:, 0],
        "kv": torch.zeros(9, 1, 512).bfloat16(),
        "indices": torch.zeros(2, 1, 4, dtype=torch.int32),
        "sm_scale": 0.05,
    }
    flash_mla_sparse_fwd(**arguments)
    with pytest.raises(kind, match=text) as caught:
        flash_mla_sparse_fwd(**(arguments | change))
    assert isinstance(caught.value, SparseMlaError)
    assert str(caught.value).startswith("flash_mla_sparse_fwd: ")
