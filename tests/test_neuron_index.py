# SPDX-License-Identifier: Apache-2.0
"""What is special about index scores, selection and pooling on the Neuron route; the rest is in test_ops.py."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from sparse_mla import config, simulator
from sparse_mla.caches import PagedCache
from sparse_mla.dispatch import presence
from sparse_mla.errors import SlotRangeError
from sparse_mla.formats import INDEX_FP4, INDEX_FP8, RecordFormat, decode, encode, encode_query
from sparse_mla.kernels import launch, selection, weighted_scores
from sparse_mla.kernels.softmax_pool import softmax_pool_kernel
from sparse_mla.ops.candidate_blocks import candidate_blocks
from sparse_mla.ops.index_logits import PagedKeys, index_logits
from sparse_mla.ops.softmax_pool import softmax_pool
from sparse_mla.ops.topk import topk
from sparse_mla.simulator import SimulatorParams
from sparse_mla.testing.case import Case
from sparse_mla.testing.cases import select
from sparse_mla.testing.check import plan, validated_call
from sparse_mla.testing.demo import make_inputs, run_demo
from sparse_mla.testing.neuron_graph import check_case, check_graph

PARAMS = SimulatorParams(gen=3, show_warnings=False)
TIMED = SimulatorParams(gen=3, show_warnings=False, timing=True, checks=False)


@pytest.fixture(autouse=True)
def _present() -> None:
    assert presence("simulated") == ""


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- selection -------------------------------------------------------------------------------------------------------

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 127, 128, 129, 32768, 32769, 65535, 65536, 70000)


@pytest.mark.parametrize("n", SIZES)
def test_topk_of_any_length_with_ties_across_the_boundary(n: int) -> None:
    """Five values only, so hundreds of columns are equal at the k-th place, over partitions, blocks and segments."""
    logits = (torch.randn(2, n, generator=_generator(n)) * 2).round().clamp(0, 4).bfloat16()
    logits[0, n // 2 :] = 4.0  # all ties in the second half
    for k in (1, 64, 512):
        assert torch.equal(topk(logits, k, backend="simulated"), topk(logits, k, backend="reference")), k


def _by_the_rule(values: torch.Tensor, k: int) -> torch.Tensor:
    """Columns of the k largest values, the lower column first among equal ones, ascending."""
    threshold = values.sort(descending=True).values[k - 1]
    above, equal = (values > threshold).nonzero()[:, 0], (values == threshold).nonzero()[:, 0]
    assert len(above) < k < len(above) + len(equal), "no tie at the k-th place"
    return torch.cat((above, equal[: k - len(above)])).sort().values.int()


LONG = 524288  # columns: the longest context of V4.1 at ratio 2


@pytest.mark.full
@pytest.mark.parametrize("k", [512, 2048])
def test_topk_of_half_a_million_columns(k: int) -> None:
    """The k-th place falls among equal values that lie in many segments; a bound inside the row moves it."""
    logits = (torch.randn(1, LONG, generator=_generator(k)) * 16).round().bfloat16() / 16
    found = topk(logits, k, backend="simulated")
    assert torch.equal(found[0], _by_the_rule(logits[0].float(), k))
    end = torch.tensor([LONG - 77777], dtype=torch.int32)
    found = topk(logits, k, end=end, backend="simulated")
    assert torch.equal(found[0], _by_the_rule(logits[0, : int(end)].float(), k))


@pytest.mark.full
def test_candidate_blocks_of_a_long_context() -> None:
    """65,536 blocks, the best 2,048 by their maxima; the last valid one always, ties to the lower block."""
    size, k = 8, 2048
    logits = (torch.randn(2, LONG, generator=_generator(3)) * 16).round().bfloat16() / 16
    lengths = torch.tensor([LONG - 5, 300001], dtype=torch.int32)
    found = candidate_blocks(logits, lengths, block_size=size, topk_blocks=k, backend="simulated")
    for row, length in enumerate(lengths.tolist()):
        valid = torch.where(torch.arange(LONG) < length, logits[row].float(), -torch.inf)
        best = valid.reshape(-1, size).amax(dim=1)
        best[(length - 1) // size] = torch.inf
        assert torch.equal(found[row], _by_the_rule(best, k)), row


@pytest.mark.parametrize("dtype_bits", ["every bfloat16"])
def test_topk_orders_every_bfloat16(dtype_bits: str) -> None:
    """All 65,536 patterns: subnormals, both zeros (equal), infinities; NaN of either sign is never taken."""
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    shuffled = patterns[torch.randperm(65536, generator=_generator(1))].unsqueeze(0)
    for on_neg_inf in ("skip", "last"):
        options: dict[str, Any] = {"on_nan": "last", "on_neg_inf": on_neg_inf}
        for k in (3, 32000, 65536):
            found = topk(shuffled, k, backend="simulated", **options)
            assert torch.equal(found, topk(shuffled, k, backend="reference", **options)), (on_neg_inf, k)


def test_topk_launches_do_not_grow_with_rows() -> None:
    for rows in (1, 5, 70):
        logits = torch.randn(rows, 300, generator=_generator(rows)).bfloat16()
        with launch.recording() as launched:
            found = topk(logits, 32, backend="simulated")
        assert len(launched) == 1
        assert torch.equal(found, topk(logits, 32, backend="reference"))


def test_the_engines_own_topk_decides_nothing() -> None:
    source = inspect.getsource(selection)
    assert "nisa.topk" not in source
    assert "max8" not in source
    assert "nonzero_with_count" in source


def test_topk_needs_no_values_in_unchecked_mode() -> None:
    logits = torch.tensor([[1.0, torch.nan, 3.0, 2.0]]).bfloat16()
    with config.override(SPARSE_MLA_CHECKS=0):
        assert topk(logits, 3, backend="simulated").tolist() == [[0, 2, 3]]


# --- scores ----------------------------------------------------------------------------------------------------------


def _exact(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    heads, tokens = w.shape
    dots = (q.double() @ k.double().T).relu().reshape(tokens, heads, -1)
    return (dots * w.double().T[:, :, None]).sum(dim=1)


@pytest.mark.parametrize(
    ("heads", "tokens", "groups", "n"),
    [(1, 1, 1, 128), (1, 256, 1, 128), (3, 8, 2, 256), (32, 4, 4, 2176), (64, 2, 1, 640), (128, 2, 2, 384)],
)
def test_weighted_scores(heads: int, tokens: int, groups: int, n: int) -> None:
    """Any heads up to 128, any tokens, groups with keys of their own; one core gives the bits of two."""
    g = _generator(heads)
    q = torch.randn(tokens * heads, 128, generator=g).bfloat16()
    k = torch.randn(groups * n, 128, generator=g).bfloat16()
    w = torch.randn(heads, tokens, generator=g)
    results = [
        simulator.run(weighted_scores.weighted_scores, q, k, w, groups, grid=cores, params=PARAMS).outputs[0]
        for cores in (1, 2)
    ]
    assert torch.equal(*results)
    per_group = tokens // groups
    for i in range(groups):
        rows = slice(i * per_group, (i + 1) * per_group)
        expected = _exact(q[rows.start * heads : rows.stop * heads], k[i * n : (i + 1) * n], w[:, rows])
        torch.testing.assert_close(results[0][rows].double(), expected, rtol=2e-5, atol=2e-4)


def _pages(records: torch.Tensor, fmt: RecordFormat, page: int) -> torch.Tensor:
    """[pages, page bytes] of records in order: data of a page, then its scales."""
    pages = records.shape[0] // page
    data = records[:, : fmt.data_bytes].reshape(pages, -1)
    return torch.cat((data, records[:, fmt.data_bytes :].reshape(pages, -1)), dim=1).contiguous()


def _run_pages(
    records: torch.Tensor, kind: str, q: torch.Tensor, w: torch.Tensor, *, section: int = 16, lanes: int = 16,
    grid: int = 1, params: SimulatorParams = PARAMS,
) -> Any:  # fmt: skip
    fmt = INDEX_FP4 if kind == "fp4" else INDEX_FP8
    page = 64
    pool = _pages(records, fmt, page).reshape(-1, 4)
    first = torch.arange(0, records.shape[0], section)
    base = first // page * (page * fmt.record_bytes // 4)
    data = base + first % page * (fmt.data_bytes // 4)
    scales = base + page * fmt.data_bytes // 4 + first % page
    columns = []
    for units in (data, scales):
        padded = torch.nn.functional.pad(units, (0, -len(units) % 128), value=-1)
        columns.append(padded.reshape(-1, 128).T.int().contiguous())
    return simulator.run(
        weighted_scores.page_scores, q, pool, *columns, w, 1, section, kind, lanes, grid=grid, params=params
    )


@pytest.mark.parametrize(("kind", "lanes"), [("fp4", 16), ("fp4", 32), ("fp8_integer", 16), ("fp8_native", 16)])
def test_every_code_and_scale_byte_on_chip(kind: str, lanes: int) -> None:
    """A query of +-1 in one dimension reads a key back: relu(k) - relu(-k) = k. Codes of NaN and scale 255 read 0.
    Native decoding knows no exponent field 15: such a key is NaN, and no other key is touched by it."""
    fmt = INDEX_FP4 if kind == "fp4" else INDEX_FP8
    scales = (0, 1, 9, 60, 119, 127, 128, 200, 246, 254, 255)
    records = torch.zeros(256 * len(scales), fmt.record_bytes, dtype=torch.uint8)
    records[:, : fmt.data_bytes] = torch.arange(256, dtype=torch.uint8).repeat(len(scales)).unsqueeze(1)
    records[:, fmt.data_bytes :] = torch.tensor(scales, dtype=torch.uint8).repeat_interleave(256).unsqueeze(1)
    for dim in (0, 37, 127):
        q = torch.zeros(2, 128)
        q[0, dim], q[1, dim] = 1.0, -1.0
        w = torch.tensor([[1.0], [-1.0]])
        found = _run_pages(records, kind, q.bfloat16(), w, lanes=lanes).outputs[0][0, : len(records)]
        expected = decode(records, fmt, dtype=torch.float32)[:, dim]
        if kind == "fp8_native":
            beyond = (records[:, dim] & 0x7F) >= 0x78
            assert not bool(torch.isfinite(found[beyond & (records[:, fmt.data_bytes] != 0)]).any())
            beyond |= torch.isinf(expected)  # times the zeros of the query: NaN, as in the reference
            found, expected = found[~beyond], expected[~beyond]
        small = expected.abs() < 2.0**-117  # key bits that a raised bfloat16 cannot hold
        assert torch.equal(torch.where(small, 0.0, found), torch.where(small, 0.0, expected)), dim
        assert bool((found[small].abs() <= 2.0**-116).all())


def test_a_row_of_scores_depends_on_itself_and_its_keys_alone() -> None:
    """Other rows, other keys and the number of cores change no bit; nor does what lies outside of a context."""
    g = _generator(4)
    page, b = 64, 3
    records = encode(torch.randn(b * 4 * page, 128, generator=g).bfloat16(), INDEX_FP4)
    cache = PagedCache(_pages(records, INDEX_FP4, page), INDEX_FP4, page)
    table = torch.randperm(b * 4, generator=g, dtype=torch.int32).reshape(b, 4)
    lens = torch.tensor([[200], [64], [1]], dtype=torch.int32)
    q = encode_query(torch.randn(b, 1, 8, 128, generator=g).bfloat16(), INDEX_FP4)
    assert q.q_sf is not None
    weights = torch.randn(b, 8, generator=g)

    def score(rows: slice, table: torch.Tensor = table, cache: PagedCache = cache) -> torch.Tensor:
        pair = (q.q_fp[rows], q.q_sf[rows])
        keys = PagedKeys(cache, table[rows], lens[rows], 256)
        return index_logits(pair, keys, weights[rows], out_dtype=torch.float32, backend="simulated")

    whole = score(slice(0, 3))
    for row in range(b):
        assert torch.equal(score(slice(row, row + 1)), whole[row : row + 1])
    with config.override(NEURON_LOGICAL_NC_CONFIG=1):
        assert torch.equal(score(slice(0, 3)), whole)
    stale = table.clone()
    stale[1, 1:], stale[2, 1:] = 2**31 - 1, -1
    assert torch.equal(score(slice(0, 3), stale), whole)
    for poison in (0xFF, 0x7E):
        poisoned = torch.full_like(cache.data, poison)
        for row, length in enumerate(lens.flatten().tolist()):
            for block in table[row, : -(-length // page)].tolist():
                kept = min(page, length - table[row].tolist().index(block) * page)
                poisoned[block, : kept * 64] = cache.data[block, : kept * 64]
                at = page * 64
                poisoned[block, at : at + kept * 4] = cache.data[block, at : at + kept * 4]
        assert torch.equal(score(slice(0, 3), table, PagedCache(poisoned, INDEX_FP4, page)), whole)


def _fp8_keys(cap: int, generator: torch.Generator) -> tuple[Any, PagedKeys, torch.Tensor]:
    """(q, keys, weights) of two rows whose contexts end inside a page; the cache is written and declared with `cap`."""
    page = 64
    records = encode(torch.randn(6 * page, 128, generator=generator).bfloat16() * 300, INDEX_FP8, e4m3_max=cap)
    cache = PagedCache(_pages(records, INDEX_FP8, page), INDEX_FP8, page, e4m3_max=cap)
    table = torch.tensor([[5, 0, 3], [1, 4, 2]], dtype=torch.int32)
    lens = torch.tensor([[130], [77]], dtype=torch.int32)
    q = encode_query(torch.randn(2, 1, 8, 128, generator=generator).bfloat16(), INDEX_FP8)
    return (
        (q.q_fp.view(torch.uint8), q.q_sf),
        PagedKeys(cache, table, lens, 192),
        torch.randn(2, 8, generator=generator),
    )


def test_the_declared_cap_chooses_how_fp8_keys_are_read() -> None:
    """Records of the 224 cap score the same bits either way; those of 448 are read by integers."""
    q, keys, weights = _fp8_keys(224, _generator(10))
    declared_448 = PagedCache(keys.cache.data, INDEX_FP8, 64, e4m3_max=448)
    found, kinds = [], []
    for cache in (keys.cache, declared_448):
        with launch.recording() as calls:
            pages = keys._replace(cache=cache)
            found.append(index_logits(q, pages, weights, out_dtype=torch.float32, backend="simulated"))
        kinds.append(calls[0].constants["kind"])
    assert kinds == ["fp8_native", "fp8_integer"]
    assert torch.equal(*found)
    expected = index_logits(q, keys, weights, out_dtype=torch.float32, backend="reference")
    torch.testing.assert_close(found[0], expected, rtol=2e-5, atol=0.3)
    q, keys, weights = _fp8_keys(448, _generator(10))
    wide = index_logits(q, keys, weights, out_dtype=torch.float32, backend="simulated")
    expected = index_logits(q, keys, weights, out_dtype=torch.float32, backend="reference")
    torch.testing.assert_close(wide, expected, rtol=2e-5, atol=0.3)


def test_codes_past_a_declared_cap_are_refused_in_keys_that_are_scored() -> None:
    """Row 1 ends after 13 keys of page 4: the 13th is its last; the 14th may hold anything and changes no bit."""
    q, keys, weights = _fp8_keys(224, _generator(11))
    data = keys.cache.data
    before = index_logits(q, keys, weights, backend="simulated")
    for garbage in (0x7A, 0xFF):
        data[4, 13 * 128 : 64 * 128] = garbage
        assert torch.equal(index_logits(q, keys, weights, backend="simulated"), before)
    data[4, 12 * 128 + 7] = 0xF9
    with launch.recording() as calls, pytest.raises(SlotRangeError, match=r"code 0xF9 in slot 268.*e4m3_max=224"):
        index_logits(q, keys, weights, backend="simulated")
    assert calls == []
    declared_448 = keys._replace(cache=PagedCache(data, INDEX_FP8, 64, e4m3_max=448))
    found = index_logits(q, declared_448, weights, out_dtype=torch.float32, backend="simulated")
    expected = index_logits(q, declared_448, weights, out_dtype=torch.float32, backend="reference")
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=0.3)


def test_wide_lanes_are_a_switch() -> None:
    """SPARSE_MLA_NEURON_LANES reaches the kernel and changes no bit."""
    g = _generator(12)
    records = encode(torch.randn(128, 128, generator=g).bfloat16(), INDEX_FP4)
    q = encode_query(torch.randn(1, 1, 4, 128, generator=g).bfloat16(), INDEX_FP4)
    table, lens = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([[128]], dtype=torch.int32)
    keys = PagedKeys(PagedCache(_pages(records, INDEX_FP4, 64), INDEX_FP4, 64), table, lens)
    found = []
    for lanes in (16, 32):
        with config.override(SPARSE_MLA_NEURON_LANES=lanes), launch.recording() as calls:
            found.append(index_logits(q, keys, torch.ones(1, 4), backend="simulated"))
        assert calls[0].constants["lanes"] == lanes
    assert torch.equal(*found)


def test_a_pool_past_2_to_the_24_units() -> None:
    """Unit indices never pass through float32, where 2^24 + 1 does not exist."""
    g = _generator(6)
    page = 64
    page_bytes = page * INDEX_FP4.record_bytes
    pages = (1 << 24) * 4 // page_bytes + 7
    data = torch.zeros(pages, page_bytes, dtype=torch.uint8)
    last = encode(torch.randn(2 * page, 128, generator=g).bfloat16(), INDEX_FP4)
    data[-2:] = _pages(last, INDEX_FP4, page)
    q = encode_query(torch.randn(1, 1, 4, 128, generator=g).bfloat16(), INDEX_FP4)
    table = torch.tensor([[pages - 2, pages - 1]], dtype=torch.int32)
    keys = PagedKeys(PagedCache(data, INDEX_FP4, page), table, torch.tensor([[128]], dtype=torch.int32))
    weights = torch.ones(1, 4)
    found = index_logits(q, keys, weights, out_dtype=torch.float32, backend="simulated")
    expected = index_logits(q, keys, weights, out_dtype=torch.float32, backend="reference")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "lanes", "bound"), [("fp4", 32, 2.6), ("fp4", 16, 3.3), ("fp8_native", 16, 2.6)])
@pytest.mark.parametrize("tokens", [1, 4])
def test_estimated_time_of_a_key(kind: str, lanes: int, bound: float, tokens: int) -> None:
    """Nanoseconds of the cost model that a further key takes one core, 32 heads; not a measurement."""
    g = _generator(8)
    q = torch.randn(tokens * 32, 128, generator=g).bfloat16()
    w = torch.randn(32, tokens, generator=g)
    spent = []
    for n in (8192, 16384):
        records = torch.zeros(n, (INDEX_FP4 if kind == "fp4" else INDEX_FP8).record_bytes, dtype=torch.uint8)
        spent.append(_run_pages(records, kind, q, w, section=32, lanes=lanes, params=TIMED).estimate.total_us)
    assert (spent[1] - spent[0]) / 8192 * 1000 <= bound


# --- pooling ---------------------------------------------------------------------------------------------------------


def test_the_form_for_two_rows_is_the_general_one() -> None:
    g = _generator(9)
    latent = torch.randn(140, 2, 40, generator=g)
    score = torch.randn(140, 2, 40, generator=g) * 20
    forms = [
        simulator.run(softmax_pool_kernel, latent, score, True, two_rows, grid=2, params=PARAMS).outputs[0]
        for two_rows in (True, False)
    ]
    torch.testing.assert_close(forms[0], forms[1], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_pooling_of_infinite_and_unknown_scores(ratio: int) -> None:
    values = torch.tensor([-torch.inf, torch.inf, 0.0, 3e38, -3e38, torch.nan])
    grid = torch.cartesian_prod(*[values] * ratio).reshape(-1, ratio)
    score = grid.unsqueeze(2).expand(-1, ratio, 4).contiguous()
    latent = torch.randn(score.shape, generator=_generator(ratio))
    latent[score == -torch.inf] = torch.nan
    found = softmax_pool(score, latent, out_dtype=torch.float32, backend="simulated")
    expected = softmax_pool(score, latent, out_dtype=torch.float32, backend="reference")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


# --- graphs and the job ----------------------------------------------------------------------------------------------

# test_neuron_graph.py traces every launch on its smallest case; these cases take other paths through it.
QUICK = {"compress": ("decode-padding", "prefill-continued")}
FULL = {
    "index_logits": (
        "paged-fp4", "paged-fp4-verify", "paged-fp4-candidates", "ragged-fp4", "ragged-fp4-candidates", "bare-tensor",
    ),
    "index_topk": ("paged-fp4", "paged-fp4-candidates"),
    "topk": ("nan-last",),
    "candidate_blocks": ("nan-last",),
    "softmax_pool": ("ratio-1", "ratio-2", "ratio-4"),
    "store_records": ("v41-fp8", "v41-fp4-planar", "index-fp4", "index-fp8-fp32", "bf16", "bare-tensor"),
    "load_records": ("v41-fp8", "v41-fp8-planar", "index-fp4", "index-fp8-fp32", "bf16"),
    "rope": ("5x8x512-inverse-float32-int32",),
    "merge_partials": ("empty-parts",),
}  # fmt: skip


def _graphs() -> list[Any]:
    chosen = []
    for names, marks in ((QUICK, []), (FULL, [pytest.mark.full])):
        for stem, wanted in names.items():
            cases: list[Case] = [c for c in select(stem) if c.name in wanted]
            assert len(cases) == len(wanted), stem
            for implementation, case in plan(cases, "simulated"):
                chosen.append(pytest.param(implementation, case, id=f"{implementation.name}-{case}", marks=marks))
    return chosen


@pytest.mark.parametrize(("implementation", "case"), _graphs())
def test_launches_survive_the_graph_check(implementation: Any, case: Case) -> None:
    if implementation.refusals(validated_call(case, case.build().arguments)):
        return  # test_ops.py holds the refusal
    assert check_case(implementation, case) == []


def test_a_float8_query_is_refused_before_tracing() -> None:
    q = encode_query(torch.randn(1, 1, 4, 128).bfloat16(), INDEX_FP8)
    cache = PagedCache(torch.zeros(2, 64 * 132, dtype=torch.uint8), INDEX_FP8, 64)
    keys = PagedKeys(cache, torch.zeros(1, 2).int(), torch.ones(1, 1).int())
    findings = check_graph(index_logits, q, keys, torch.ones(1, 4), backend="simulated")
    assert [f.rule for f in findings] == ["a"]
    assert "uint8 view" in findings[0].message


def test_the_job_selects_the_same_values_as_the_reference() -> None:
    inputs = make_inputs(sequences=1, heads=4, index_heads=8, entries=1024)
    ours, theirs = (run_demo(inputs, backend=name) for name in ("simulated", "reference"))
    assert ours.kernel_error <= 2 * theirs.kernel_error
    assert torch.equal(ours.tensors["selected"], theirs.tensors["selected"])
    assert {s.executes.split(":")[0] for s in ours.stages} <= {"simulated", "torch on cpu"}
