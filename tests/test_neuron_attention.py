# SPDX-License-Identifier: Apache-2.0
"""What is special about attention on the Neuron route: strategies agree, rows stand alone, nothing unselected is read.

The case list runs through every strategy in `test_ops.py`; here are the properties across calls.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import sparse_mla
from sparse_mla import KVScope, PagedCache, config, load_records, sparse_decode, sparse_prefill, store_records
from sparse_mla.caches import allocate
from sparse_mla.dispatch import OPS, explain
from sparse_mla.errors import ArgumentError, SlotRangeError, UnsupportedError
from sparse_mla.formats import BF16, V41_FP4, V41_FP8, RecordFormat, decode, encode
from sparse_mla.kernels import attention, launch
from sparse_mla.kernels.decode_records import (
    E4M3_RAISE,
    decode_e2m1,
    decode_e4m3_integer,
    decode_e4m3_native,
    scale_factors_e4m3,
    scale_factors_ue8m0,
)
from sparse_mla.kernels.nki import nisa, nl
from sparse_mla.simulator import SimulatorParams, jit, run
from sparse_mla.simulator.lint import lint_source
from sparse_mla.testing.check import forced, implementations

SCALE = 512**-0.55
FULL = pytest.mark.full


def implementation(strategy: str, stem: str = "sparse_decode") -> Any:
    return next(i for i in implementations(stem, "simulated") if i.strategy == strategy)


def simulated(strategy: str, *args: Any, **kwargs: Any) -> Any:
    """sparse_decode under exactly this strategy."""
    with forced(implementation(strategy)):
        return sparse_decode(*args, backend="simulated", softmax_scale=SCALE, **kwargs)


def keys_of(n: int, scale: float = 0.1) -> torch.Tensor:
    return (torch.randn(n, 512) * scale).clamp(-1, 1).bfloat16()


def queries(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, 512).clamp(-1, 1).bfloat16()


def filled(fmt: RecordFormat, blocks: int = 8, page: int = 16, **options: Any) -> PagedCache:
    """A cache whose every slot holds a record."""
    cache = allocate(fmt, blocks, page, **options)
    store_records(keys_of(cache.num_slots), cache, torch.arange(cache.num_slots), backend="reference")
    return cache


def lists(rows: int, topk: int, slots: int, empty: float = 0.1) -> torch.Tensor:
    indices = torch.randint(0, slots, (rows, 1, topk), dtype=torch.int32)
    indices[torch.rand(indices.shape) < empty] = -1
    return indices


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8)
    )


STRATEGIES = ("fused", "fused_planar", "decoded_table", "row_gather")


def scopes_for(strategy: str, rows: int, cap: int = 448) -> list[KVScope]:
    planar = {"layout": "planar"} if strategy == "fused_planar" else {}
    main = filled(V41_FP8, e4m3_max=cap, **planar)
    extra = filled(V41_FP4, e4m3_max=cap, **planar)
    return [KVScope(main, lists(rows, 128, 128)), KVScope(extra, lists(rows, 200, 128))]


def row_of(scope: KVScope, row: int) -> KVScope:
    return KVScope(scope.cache, scope.indices[row : row + 1], None)


# --- rows stand alone ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [8, 64, pytest.param(33, marks=FULL), pytest.param(128, marks=FULL)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_six_rows_equal_each_row_alone(strategy: str, heads: int) -> None:
    """Six rows of speculative verification: bit for bit what each row gives alone, in every strategy."""
    scopes, q, sink = scopes_for(strategy, 6), queries(6, 1, heads), torch.randn(heads)
    together = simulated(strategy, q, scopes, attn_sink=sink)
    for row in range(6) if heads == 8 else (0, 5):
        alone = simulated(strategy, q[row : row + 1], [row_of(s, row) for s in scopes], attn_sink=sink)
        assert same_bits(alone.out[0], together.out[row]), f"row {row}"
        assert same_bits(alone.lse[0], together.lse[row]), f"row {row}"


@pytest.mark.parametrize("strategy", ["dense_mask", "shared_prefix"])
def test_six_rows_of_one_sequence_equal_each_row(strategy: str) -> None:
    """The strategies for one sequence give what the per-row gather gives, within the rounding of P, and each row the
    bits it gives alone."""
    q, sink = queries(6, 1, 5), torch.randn(5)
    if strategy == "dense_mask":
        scopes = [KVScope(filled(V41_FP8), lists(6, 128, 128)), KVScope(filled(V41_FP4), lists(6, 640, 128))]
    else:
        cache = filled(V41_FP4, blocks=66)
        dense = torch.arange(1030, dtype=torch.int32).expand(6, 1, 1030).clone()
        for row in range(6):
            dense[row, 0, 1000 + 5 * row :] = -1
        scopes = [KVScope(filled(V41_FP8), lists(6, 128, 128)), KVScope(cache, dense)]
    found = simulated(strategy, q, scopes, attn_sink=sink, one_sequence=True)
    for row in (0, 5):
        given = q[row : row + 1], [row_of(s, row) for s in scopes]
        alone = simulated(strategy, *given, attn_sink=sink, one_sequence=True)
        assert same_bits(alone.out[0], found.out[row]), f"row {row}"
        assert same_bits(alone.lse[0], found.lse[row]), f"row {row}"
    assert explain("sparse_decode", q, scopes, one_sequence=True, backend="simulated").chosen is not None
    expected = simulated("row_gather", q, scopes, attn_sink=sink)
    assert (found.lse - expected.lse).abs().max() < 1e-5
    assert (found.out.float() - expected.out.float()).norm() < 4e-3 * expected.out.float().norm()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_core_and_two_give_the_same_bits(strategy: str) -> None:
    scopes, q = scopes_for(strategy, 3), queries(3, 1, 40)
    results = []
    for cores in (1, 2):
        with config.override(NEURON_LOGICAL_NC_CONFIG=cores):
            results.append(simulated(strategy, q, scopes, attn_sink=torch.linspace(-2, 2, 40)))
    assert same_bits(results[0].out, results[1].out)
    assert same_bits(results[0].lse, results[1].lse)


def test_all_strategies_give_the_same_bits() -> None:
    """They decode to the same bfloat16 keys and share one body, so a table is no different from a gather."""
    scopes, q = scopes_for("fused", 6), queries(6, 1, 8)
    first, *others = [simulated(s, q, scopes) for s in ("fused", "decoded_table", "row_gather")]
    for other in others:
        assert same_bits(first.out, other.out)
        assert same_bits(first.lse, other.lse)


def test_native_and_integer_decoding_give_the_same_bits() -> None:
    """Records of the 224 cap read the same either way."""
    cache, q = filled(V41_FP8, e4m3_max=224), queries(2, 1, 8)
    declared_448 = PagedCache(cache.data, V41_FP8, cache.page_size, e4m3_max=448)
    indices = lists(2, 256, cache.num_slots)
    native, integer = [simulated("fused", q, [KVScope(c, indices)]) for c in (cache, declared_448)]
    assert same_bits(native.out, integer.out)
    kinds = []
    for c in (cache, declared_448):
        with launch.recording() as calls:
            simulated("fused", q, [KVScope(c, indices)])
        kinds.append(calls[0].constants["kind0"])
    assert kinds == ["fp8_native", "fp8_integer"]


def test_wide_lanes_are_a_switch() -> None:
    """SPARSE_MLA_NEURON_LANES reaches the kernel and changes no bit."""
    q, scopes = queries(2, 1, 4), [KVScope(filled(V41_FP4), lists(2, 128, 128))]
    found = []
    for lanes in (16, 32):
        with config.override(SPARSE_MLA_NEURON_LANES=lanes), launch.recording() as calls:
            found.append(simulated("fused", q, scopes))
        assert calls[0].constants["lanes"] == lanes
    assert same_bits(found[0].out, found[1].out)
    assert same_bits(found[0].lse, found[1].lse)
    with config.override(SPARSE_MLA_NEURON_LANES=24), pytest.raises(ArgumentError, match="must be 16 or 32, got '24'"):
        simulated("fused", q, scopes)


def test_a_decode_batch_of_the_buckets_size_is_no_chunk() -> None:
    """Four sequences with lists of their own, at the row count an engine calls a prompt chunk."""
    scopes, q = scopes_for("fused", 4), queries(4, 1, 8)
    expected = sparse_decode(q, scopes, softmax_scale=SCALE, backend="reference")
    with config.override(DEEPINFER_NEURON_PREFILL_BUCKET=4):
        found = sparse_decode(q, scopes, softmax_scale=SCALE, backend="simulated")
    assert (found.lse - expected.lse).abs().max() < 1e-5
    assert (found.out.float() - expected.out.float()).norm() < 4e-3 * expected.out.float().norm()


# --- the decoded table -----------------------------------------------------------------------------------------------


def test_a_table_answers_from_the_moment_it_was_made() -> None:
    """Why a table may change what six rows of verification see, while gathers do not.

    The rows of a verification step list the slots that the same step has just written: row j its own and those of rows
    0 .. j-1. A table decoded before the store, or kept from the step before, holds what those slots held then. Nothing
    faults, row 0 is off by one key of 128, and row 5 by six, so drafts stop being accepted. The bits are otherwise
    those of the gather. Hence the table is decoded inside the call, from the tensor the call was given, and never kept.
    """
    cache, q = filled(V41_FP8, blocks=9), queries(6, 1, 2)
    window = torch.stack([torch.arange(row + 6, row + 134) % 144 for row in range(6)]).to(torch.int32)[:, None]
    new = window[:, 0, -1].long()  # each row's own slot
    before = simulated("decoded_table", q, [KVScope(cache, window)])
    store_records(keys_of(6, 0.5), cache, new, backend="reference")
    after = simulated("decoded_table", q, [KVScope(cache, window)])
    gathered = simulated("row_gather", q, [KVScope(cache, window)])
    assert same_bits(after.out, gathered.out)
    change = (before.out.float() - after.out.float()).flatten(1).norm(dim=1) / after.out.float().flatten(1).norm(dim=1)
    assert (change > 0.05).all(), change
    assert change[5] > change[0], change


def test_table_limit_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    scopes, q = scopes_for("decoded_table", 1), queries(1, 1, 2)
    with config.override(DEEPINFER_NEURON_ATTN_TABLE_SLOTS=100):
        with pytest.raises(UnsupportedError, match=r"at most 100 slots .*got 256"):
            simulated("decoded_table", q, scopes)
        assert "at most 100 slots" in str(explain("sparse_decode", q, scopes, backend="simulated"))


# --- nothing unselected is read --------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_unselected_byte_matters(strategy: str) -> None:
    """Any byte in any slot that no row selects, including slot 0, and -1 anywhere in the lists."""
    scopes, q = scopes_for(strategy, 3), queries(3, 1, 4)
    for scope in scopes:
        scope.indices[scope.indices == 0] = -1
        scope.indices[:, :, 5:9] = -1
    scopes[1].indices[0] = -1  # a row without any slot of the second scope
    expected = simulated(strategy, q, scopes)
    for poison in (0x00, 0x7F, 0x80, 0xFE, 0xFF, None):
        for scope in scopes:
            used = torch.zeros(scope.cache.num_slots, dtype=torch.bool)
            used[scope.indices[scope.indices >= 0].long()] = True
            for view, _ in scope.cache.parts():
                noise = torch.randint(0, 256, view.shape, dtype=torch.uint8)
                keep = used.reshape(view.shape[0], view.shape[1], 1)
                view.copy_(torch.where(keep, view, noise if poison is None else torch.full_like(view, poison)))
        found = simulated(strategy, q, scopes)
        assert same_bits(found.out, expected.out), f"poison {poison}"
        assert same_bits(found.lse, expected.lse), f"poison {poison}"


def test_prefill_reads_no_unselected_row() -> None:
    q, kv = queries(3, 8), keys_of(300)[:, None]
    indices = torch.randint(10, 300, (3, 1, 200), dtype=torch.int32)
    indices[:, :, 3:70] = -1
    results = []
    for poison in (0.0, float("nan"), float("inf")):
        kv[:10] = poison
        results.append(sparse_prefill(q, kv, indices, softmax_scale=SCALE, backend="simulated"))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert same_bits(a, b)


# --- sinks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["fused", "row_gather"])
def test_sinks_never_touch_the_lse(strategy: str) -> None:
    scopes, q = scopes_for(strategy, 2), queries(2, 1, 8)
    scopes[0].indices[1] = scopes[1].indices[1] = -1
    inf = float("inf")
    sinks = torch.tensor([inf, -inf, 1e30, -1e30, 200.0, -200.0, 85.0, 0.5])
    without = simulated(strategy, q, scopes)
    found = simulated(strategy, q, scopes, attn_sink=sinks)
    assert same_bits(found.lse, without.lse)
    assert (found.lse[1] == inf).all()
    assert (found.out[1] == 0).all()
    row = found.out[0, 0].float()
    assert (row[0] == 0).all()
    assert row[[2, 4, 6]].abs().max() < 1e-30
    for head in (1, 3, 5):
        assert same_bits(found.out[0, 0, head], without.out[0, 0, head]), f"head {head}"
    share = torch.sigmoid(without.lse[0, 7, 0] - 0.5)
    assert torch.allclose(row[7], without.out[0, 0, 7].float() * share, rtol=2**-7, atol=1e-5)


# --- pools -----------------------------------------------------------------------------------------------------------


def test_a_pool_beyond_2_to_the_24_units() -> None:
    """Unit indices never pass through float32, where 2^24 + 1 is 2^24."""
    small = filled(V41_FP8, blocks=3, page=5)
    stride, offset = 5 * 528 + 4, 4
    total = (1 << 26) + 40 * stride
    pool = torch.zeros(total, dtype=torch.uint8)
    big = PagedCache(pool, V41_FP8, 5, region_offset=offset, block_stride=stride)
    units = launch.pool_units(big)
    assert units.pool.shape[0] > 1 << 24
    assert units.pool.shape[1] == 4
    assert units.pool.data_ptr() == pool.data_ptr()
    base = big.num_blocks - 4
    for block in range(3):
        start = offset + (base + block) * stride
        pool[start : start + 5 * 528] = small.data[block].flatten()
    indices, q = lists(2, 128, small.num_slots), queries(2, 1, 4)
    moved = torch.where(indices < 0, -1, indices + base * 5)
    addressed = launch.unit_indices(units, moved[moved >= 0])[0]
    assert int(addressed.min()) > 1 << 24
    assert (addressed % 2 == 1).any(), "all even: float32 would still hold them"
    found, expected = simulated("fused", q, [KVScope(big, moved)]), simulated("fused", q, [KVScope(small, indices)])
    assert same_bits(found.out, expected.out)


def test_a_strided_view_goes_to_the_row_gather() -> None:
    pool = torch.zeros(6, 16 * 528 + 96, dtype=torch.uint8)
    view = pool[:, : 16 * 528].view(6, 16, 1, 528)
    dense = filled(V41_FP8, blocks=6)
    view.copy_(dense.data)
    indices, q = lists(2, 128, 96), queries(2, 1, 4)
    told = explain("sparse_decode", q, [KVScope(view, indices)], backend="simulated")
    rows = {row.strategy: row.reasons for row in told.rows}
    assert "must be one contiguous pool, got a strided view" in rows["fused"][0]
    assert "region_offset and block_stride" in rows["fused"][0]
    assert rows["row_gather"] == ()
    found = sparse_decode(q, [KVScope(view, indices)], softmax_scale=SCALE, backend="simulated")
    whole = PagedCache(pool, V41_FP8, 16)
    fused = simulated("fused", q, [KVScope(whole, indices)])
    assert same_bits(found.out, fused.out)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_other_byte_types_are_refused(dtype: torch.dtype) -> None:
    cache = filled(V41_FP8)
    scope = KVScope(PagedCache(cache.data.view(dtype), V41_FP8, 16), lists(1, 128, 128))
    with pytest.raises(UnsupportedError, match=r"must be uint8, got .*bitcast"):
        sparse_decode(queries(1, 1, 2), [scope], backend="simulated")


def test_planar_pages_take_a_second_gather() -> None:
    scopes, q = scopes_for("fused_planar", 1), queries(1, 1, 2)
    with launch.recording() as calls:
        simulated("fused_planar", q, scopes)
    assert {"scale_idx0", "scale_idx1"} <= set(calls[0].tensors)
    assert "planar" in str(explain("sparse_decode", q, scopes_for("fused", 1), backend="simulated"))


# --- refusals by value -----------------------------------------------------------------------------------------------


def test_codes_the_engine_would_misread_are_refused() -> None:
    """Exponent field 15 under a declared cap of 224, NaN codes under 448: refused before the launch, never inf."""
    cache, q = filled(V41_FP8, e4m3_max=224), queries(1, 1, 2)
    scope = KVScope(cache, torch.arange(128, dtype=torch.int32).reshape(1, 1, 128))
    cache.data[3, 2, 0, 77] = 0x7A
    with pytest.raises(SlotRangeError, match=r"code 0x7A in slot 50.*declared with e4m3_max=224"):
        simulated("fused", q, [scope])
    wide = KVScope(PagedCache(cache.data, V41_FP8, 16), scope.indices)
    found, expected = simulated("fused", q, [wide]), simulated("row_gather", q, [wide])
    assert same_bits(found.out, expected.out)
    cache.data[3, 2, 0, 78] = 0xFF
    with pytest.raises(SlotRangeError, match="NaN code 0xFF in slot 50"):
        simulated("fused", q, [wide])


@pytest.mark.parametrize("as_bytes", [True, False])
def test_a_bfloat16_nan_is_a_zero_or_refused(as_bytes: bool) -> None:
    """NaN decodes to 0 in every format. The fused kernel takes bfloat16 rows unread, so it refuses the record."""
    cache, q = filled(BF16), queries(2, 1, 4)
    rows = cache.data.view(torch.bfloat16).reshape(-1, 512)
    rows[50, 3:7] = torch.tensor([torch.nan, -torch.nan, torch.nan, 1.0])
    clean = rows.nan_to_num(nan=0.0)
    data = cache.data if as_bytes else rows.reshape(cache.num_blocks, cache.page_size, 1, 512)
    scope = KVScope(PagedCache(data, BF16, cache.page_size), torch.arange(128, dtype=torch.int32).expand(2, 1, 128))
    assert torch.equal(launch.load_cache(scope.cache), clean)
    assert torch.equal(load_records(scope.cache, torch.arange(128), backend="simulated"), clean)
    expected = sparse_decode(q, [scope], softmax_scale=SCALE, backend="reference")
    for strategy in ("row_gather", "decoded_table"):
        found = simulated(strategy, q, [scope])
        assert (found.lse - expected.lse).abs().max() < 1e-5
        assert (found.out.float() - expected.out.float()).norm() < 4e-3 * expected.out.float().norm()
    with pytest.raises(SlotRangeError, match="must hold numbers, got NaN in slot 50"):
        simulated("fused", q, [scope])
    others = KVScope(scope.cache, torch.where(scope.indices == 50, -1, scope.indices))
    assert bool(torch.isfinite(simulated("fused", q, [others]).out).all())


def test_every_bfloat16_decodes_as_formats_say() -> None:
    records = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.uint8).reshape(128, 1024)
    assert same_bits(launch.decode_rows(records, BF16), decode(records, BF16))


@pytest.mark.parametrize("strategy", ["fused", "fused_planar"])
def test_scales_that_integers_cannot_raise_are_refused(strategy: str) -> None:
    """246 and the NaN byte 255 decode by integers, 247 .. 254 do not; unselected slots hold anything."""
    planar = {"layout": "planar"} if strategy == "fused_planar" else {}
    cache, q = filled(V41_FP8, **planar), queries(1, 1, 2)
    scope = KVScope(cache, torch.arange(128, dtype=torch.int32).reshape(1, 1, 128))
    data, scales = cache.data_and_scales()
    page = scales[3]
    data[3, 2, 5 * 32 : 6 * 32] = 0  # 2^119 times what was encoded overflows float32 in a logit
    page[2, 5], page[2, 6] = 246, 255
    assert bool(torch.isfinite(simulated(strategy, q, [scope]).lse).all())
    for byte in (247, 254):
        page[2, 5] = byte
        with launch.recording() as calls, pytest.raises(SlotRangeError, match=rf"up to 246 .*got {byte} in slot 50"):
            simulated(strategy, q, [scope])
        assert calls == []
        others = torch.where(scope.indices == 50, -1, scope.indices)
        assert bool(torch.isfinite(simulated(strategy, q, [KVScope(cache, others)]).lse).all())


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_slots_out_of_range_are_refused_before_the_launch(strategy: str, number: int) -> None:
    scopes, q = scopes_for(strategy, 2), queries(2, 1, 2)
    scopes[number].indices[1, 0, 7] = scopes[number].cache.num_slots
    sentence = rf"scopes\[{number}\].indices must be -1 or a slot"
    with launch.recording() as calls, pytest.raises(SlotRangeError, match=sentence):
        simulated(strategy, q, scopes)
    assert calls == []


def test_lists_that_are_no_prefixes_are_refused() -> None:
    cache = filled(V41_FP4, blocks=66)
    dense = torch.arange(1030, dtype=torch.int32).expand(2, 1, 1030).clone()
    dense[1, 0, 900:] = -1
    dense[1, 0, 4] = 1
    with pytest.raises(ArgumentError, match=r"prefixes of one list .*row 1, column 4"):
        simulated("shared_prefix", queries(2, 1, 2), [KVScope(cache, dense)], one_sequence=True)
    with pytest.raises(UnsupportedError, match="one_sequence=False"):
        simulated("shared_prefix", queries(2, 1, 2), [KVScope(cache, dense)])


def test_more_heads_than_partitions_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="at most 128 heads, got 130"):
        sparse_decode(queries(1, 1, 130), scopes_for("fused", 1), backend="simulated")


# --- kernels ---------------------------------------------------------------------------------------------------------


def reference_rows(
    q: torch.Tensor, keys: torch.Tensor, bias: torch.Tensor, sink: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float64 of q [rows, h, 512], keys [rows, k, 512], bias [rows, 16 + k]."""
    logits = torch.einsum("rhd,rkd->rhk", q.double(), keys.double()) * bias[:, None, None, 0].double()
    logits = logits + bias[:, None, 16:].double()
    lse = logits.logsumexp(-1)
    out = torch.einsum("rhk,rkd->rhd", (logits - lse[..., None]).exp(), keys.double())
    return out * torch.sigmoid(lse - sink[:, 0])[..., None], lse, logits.amax(-1)


@pytest.mark.parametrize(("rows", "heads", "keys"), [(4, 3, 256), pytest.param(2, 64, 1152, marks=FULL)])
def test_any_bias_and_scale_per_row(rows: int, heads: int, keys: int) -> None:
    """The kernels' own contract: column 0 is the row's scale, columns 16.. are added to the scaled logit."""
    q, kv = queries(rows, heads), keys_of(rows * keys)
    bias = torch.zeros(rows, 16 + keys)
    bias[:, 0] = SCALE * torch.arange(1, rows + 1)
    bias[:, 16:] = torch.randn(rows, keys)
    bias[:, 16:][torch.rand(rows, keys) < 0.2] = -1e30
    sink = torch.randn(heads, 1)
    given = {"q": q.reshape(-1, 512), "bias": bias, "sink": sink, "with_lse": True, "with_max": True}
    expected = reference_rows(q, kv.reshape(rows, keys, 512), bias, sink)
    flat = run(attention.gathered_attn, kv=kv, grid=2, **given).outputs
    order = torch.randperm(rows * keys)
    table = torch.empty_like(kv)
    table[order] = kv
    idx = order.reshape(rows, keys).to(torch.int32)
    indexed = run(attention.gathered_attn_idx, kv_table=table, idx=idx, grid=2, **given).outputs
    for a, b in zip(flat, indexed, strict=True):
        assert same_bits(a, b)
    out, lse, top = [x.reshape(rows, heads, -1) for x in flat]
    assert (out.double() - expected[0]).norm() < 4e-3 * expected[0].norm()
    assert (lse[..., 0] - expected[1]).abs().max() < 1e-5
    assert (top[..., 0] - expected[2]).abs().max() < 1e-5


@jit
def decode_all(raw: Any, kind: str, lanes: int) -> Any:
    """bf16 [128, chunks, 512] of records [128, chunks, pitch]."""
    p, chunks, pitch = raw.shape
    out = nl.ndarray(shape=(p, chunks, 512), dtype=nl.bfloat16, buffer=nl.shared_hbm, name="out")
    tile = nl.ndarray(shape=(p, chunks, pitch), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=raw)
    v = nl.ndarray(shape=(p, chunks, 512), dtype=nl.bfloat16, buffer=nl.sbuf)
    vector = nisa.engine.vector
    if kind == "fp4":
        factors = scale_factors_e4m3(raw=tile[:, :, 256:288], chunks=chunks, groups=32)
        decode_e2m1(dst=v, data=tile[:, :, 0:256], factors=factors, groups=32, lanes=lanes, engine=vector)
    else:
        raise_by = E4M3_RAISE if kind == "fp8_integer" else 0
        factors = scale_factors_ue8m0(raw=tile[:, :, 512:528], chunks=chunks, groups=16, raise_by=raise_by)
        data = tile[:, :, 0:512]
        if kind == "fp8_integer":
            decode_e4m3_integer(dst=v, data=data, factors=factors, groups=16, lanes=lanes, engine=vector)
        else:
            decode_e4m3_native(dst=v, data=data, factors=factors, groups=16, engine=vector)
    nisa.dma_copy(dst=out, src=v)
    return out


@pytest.mark.parametrize(
    ("kind", "lanes"), [("fp8_native", 16), ("fp8_integer", 16), ("fp8_integer", 32), ("fp4", 16), ("fp4", 32)]
)
def test_on_chip_decoding_of_every_code_under_every_scale(kind: str, lanes: int) -> None:
    """Against the library's decoder, bit for bit wherever a product is a normal number below overflow."""
    fmt = V41_FP4 if kind == "fp4" else V41_FP8
    scale = torch.arange(256, dtype=torch.int64).reshape(2, 128).T  # [128, 2]
    code = torch.arange(fmt.data_bytes) % 256
    records = torch.zeros(128, 2, 544 if fmt is V41_FP8 else 288, dtype=torch.uint8)
    records[:, :, : fmt.data_bytes] = code.to(torch.uint8)
    records[:, :, fmt.data_bytes : fmt.record_bytes] = scale[..., None].to(torch.uint8)
    found = run(decode_all, raw=records, kind=kind, lanes=lanes, params=SimulatorParams(show_warnings=False)).value
    expected = decode(records[..., : fmt.record_bytes], fmt)
    comparable = torch.isfinite(expected)
    if fmt is V41_FP8:
        comparable &= (code & 0x7F) < (0x78 if kind == "fp8_native" else 0x7F)
        comparable &= (scale[..., None] <= (254 if kind == "fp8_native" else 246)) | (scale[..., None] == 255)
        comparable &= scale[..., None] != 0
        tiny = (found.float() - expected.float()).abs() < 2.0**-120  # the rule flushes products below 2^-126
    else:
        tiny = torch.zeros_like(comparable)
    equal = found.view(torch.int16) == expected.view(torch.int16)
    equal |= (found == 0) & (expected == 0)
    assert bool((equal | tiny | ~comparable).all())
    assert comparable.float().mean() > 0.9


def test_kernel_source_is_portable() -> None:
    """The lint follows calls inside one file, so the decoding that two kernels share is read in front of each."""
    folder = Path(sparse_mla.__file__).parent / "kernels"
    shared = (folder / "decode_records.py").read_text()
    for name in ("attention.py", "weighted_scores.py", "selection.py", "softmax_pool.py", "probe.py"):
        text = shared + (folder / name).read_text()
        findings = lint_source(text, name)
        assert findings == [], "\n".join(str(f) for f in findings)
    broken = shared.replace("for parity in range(2):", "for parity in enumerate(range(2)):")
    assert lint_source(broken + (folder / "attention.py").read_text()), "the lint does not reach the shared decoding"


# What the simulator notes about these kernels and why it is accepted: the functions that make small transfers on
# purpose.
SMALL_TRANSFERS = {
    "load_index_columns": "a row's indices of one chunk are 4 bytes per partition",
    "load_lanes": "one softmax scale per lane",
    "store_lanes": "lse is 4 bytes per head",
    "load_sink": "the sink, once per launch",
    "gather_chunk": "16 or 32 scale bytes of a planar record; costed apart",
    "fill_rows": "lse of padding rows",
}


@pytest.mark.parametrize("strategy", [*STRATEGIES, "dense_mask"])
def test_every_simulator_note_is_explained(strategy: str) -> None:
    """All checks on, trn2; anything but a small transfer on purpose is a fault."""
    q = queries(6, 1, 8)
    with launch.recording() as calls:
        simulated(strategy, q, scopes_for(strategy, 6), one_sequence=strategy == "dense_mask")
    (call,) = calls
    result = run(
        call.kernel, grid=call.cores, params=SimulatorParams(gen=3, show_warnings=False, strict=True), **call.tensors,
        **call.constants,
    )  # fmt: skip
    source = Path(attention.__file__).read_text().splitlines()
    for warning in result.warnings:
        if "use the whole bandwidth" in warning.message:  # rows of keys and queries are 1 KiB, records less
            continue
        above = [line for line in source[: warning.line] if line.startswith("def ")]
        function = above[-1].split("(")[0].removeprefix("def ")
        assert warning.check == 52, warning.message
        assert function in SMALL_TRANSFERS, f"{function}: {warning.message}"


def test_every_launch_has_its_torch_outside_the_kernel() -> None:
    """The launch is plain torch around one kernel per call, however many rows."""
    for rows in (1, 6, 17):
        with launch.recording() as calls:
            simulated("fused", queries(rows, 1, 2), [KVScope(filled(BF16), lists(rows, 128, 128))])
        assert len(calls) == 1
        assert calls[0].tensors["bias"].shape[0] == launch.power_of_two(rows)


def test_unchecked_mode_reads_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """With checks off nothing is looked at on the host."""
    scopes, q = scopes_for("fused", 2), queries(2, 1, 2)
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda _: pytest.fail("a launch looked at a value"))
    with config.override(SPARSE_MLA_CHECKS=False):
        simulated("fused", q, scopes)


def test_encoded_then_attended_end_to_end() -> None:
    """Records made by `encode` and by `store_records` attend alike."""
    keys = keys_of(64)
    made = PagedCache(encode(keys, V41_FP8).reshape(4, 16, 1, 528), V41_FP8, 16)
    stored = allocate(V41_FP8, 4, 16)
    store_records(keys, stored, torch.arange(64), backend="reference")
    indices, q = lists(2, 128, 64), queries(2, 1, 2)
    a, b = [simulated("fused", q, [KVScope(c, indices)]) for c in (made, stored)]
    assert same_bits(a.out, b.out)


def test_registered_under_both_names() -> None:
    for stem in ("sparse_decode", "sparse_prefill"):
        by_backend = {
            name: [i.strategy for i in OPS[stem].implementations if i.backend == name]
            for name in ("neuron", "simulated")
        }
        assert by_backend["neuron"] == by_backend["simulated"] != []
