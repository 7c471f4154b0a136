# SPDX-License-Identifier: Apache-2.0
"""The indexer, selection, pooling, rope and record operators of the native core: every CPU target of the machine
against the reference, exhaustive codes, exact integer scores, independence of threads and neighbours, bounded memory,
forks and signals.

Shapes are swept by the cases of `test_ops.py`; here is what only this backend can get wrong.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import signal
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import index_data
from sparse_mla import config
from sparse_mla.caches import PagedCache
from sparse_mla.dispatch import presence
from sparse_mla.errors import NonFiniteError, SlotRangeError, StateError
from sparse_mla.formats import (
    INDEX_FP4,
    INDEX_FP8,
    INDEX_FP8_FP32,
    V41_FP4,
    V41_FP8,
    RecordFormat,
    decode,
    encode,
    encode_query,
)
from sparse_mla.ops.candidate_blocks import candidate_blocks
from sparse_mla.ops.compress import CompressorState, compress
from sparse_mla.ops.index_logits import Candidates, PagedKeys, RaggedKeys, index_logits
from sparse_mla.ops.index_topk import index_topk, index_topk_workspace_size
from sparse_mla.ops.load_records import load_records
from sparse_mla.ops.rope import rope, rope_table
from sparse_mla.ops.softmax_pool import softmax_pool
from sparse_mla.ops.store_records import store_records
from sparse_mla.ops.topk import topk

pytestmark = pytest.mark.skipif(presence("native") != "", reason=f"native: {presence('native')}")

NATIVE = {"backend": "native"}
REFERENCE = {"backend": "reference"}
NAN, INF = float("nan"), float("inf")
FORMATS = {"fp4": INDEX_FP4, "fp8": INDEX_FP8, "fp8_fp32": INDEX_FP8_FP32}


def present_targets() -> list[str]:
    if presence("native") != "":
        return []
    from sparse_mla.backends.native import targets

    return [name for name, absence in targets() if not absence]


@pytest.fixture(params=present_targets())
def target(request: pytest.FixtureRequest):
    """Each CPU target of this machine, forced and proven."""
    from sparse_mla.backends.native import cpu_target

    with config.override(SPARSE_MLA_CPU_TARGET=request.param):
        assert cpu_target() == request.param
        yield request.param


@pytest.fixture
def threads():
    """Sets torch's thread count for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(words), b.contiguous().view(words))


def scene(fmt: RecordFormat, rows: int, heads: int, context: int, *, page: int = 16, seed: int = 0, spread: int = 1):
    """(q pair, PagedKeys, weights): one sequence's pages in random order, seen by every row; group scales
    differ by up to `spread` powers of two."""
    g = generator(seed)

    def values(*shape: int) -> torch.Tensor:
        scale = torch.exp2(torch.randint(0, spread + 1, (*shape, 4), generator=g).float())
        return (torch.randn(*shape, 128, generator=g) * scale.repeat_interleave(32, -1)).bfloat16()

    pages = -(-context // page)
    q = encode_query(values(rows, 1, heads), fmt)
    q_fp = q.q_fp
    records = encode(values(pages * page), fmt).reshape(pages, page, -1)
    order = torch.randperm(pages, generator=g)
    data = torch.empty_like(index_data.sectioned(records, fmt))
    data[order] = index_data.sectioned(records, fmt)
    table = order.to(torch.int32)[None].repeat(rows, 1)
    lens = torch.randint(0, context + 1, (rows, 1), generator=g, dtype=torch.int32)
    lens[-1] = context
    weights = torch.randn(rows, heads, generator=g).bfloat16()
    cache = PagedCache(data, fmt, page)
    return (q_fp, None if fmt is INDEX_FP8_FP32 else q.q_sf), PagedKeys(cache, table, lens, context), weights


# --- scores ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("heads", [1, 5, 8, 17, 32, 64, 128])
def test_scores_of_every_target(target, fmt, heads):
    q, keys, weights = scene(FORMATS[fmt], 3, heads, 150, spread=5)
    ours = index_logits(q, keys, weights, out_dtype=torch.float32, **NATIVE)
    theirs = index_logits(q, keys, weights, out_dtype=torch.float64, **REFERENCE)
    assert torch.equal(torch.isinf(ours), torch.isinf(theirs))
    scored = torch.isfinite(theirs)
    terms = theirs[scored].abs().max()
    assert float((ours.double()[scored] - theirs[scored]).abs().max()) < 3e-6 * float(terms) * heads**0.5


def test_fp4_scores_are_exact(target):
    """One head of weight 1: the dot product of e2m1 vectors is an integer times a power of two, so no bit may be wrong,
    whichever way (bytes, or floats for tokens of widely spread scales) a pair goes."""
    q, keys, weights = scene(INDEX_FP4, 4, 1, 400, spread=9, seed=3)
    weights = torch.ones_like(weights)
    ours = index_logits(q, keys, weights, out_dtype=torch.float32, **NATIVE)
    theirs = index_logits(q, keys, weights, out_dtype=torch.float64, **REFERENCE)
    assert torch.equal(ours.double(), theirs)


@pytest.mark.parametrize("fmt", FORMATS)
def test_neighbours_move_no_bit(target, fmt, threads):
    """The same query and keys alone, in a batch, in other tiles, and on two threads."""
    q, keys, weights = scene(FORMATS[fmt], 7, 32, 777, spread=6, page=8)
    threads(1)
    whole = index_logits(q, keys, weights, out_dtype=torch.float32, **NATIVE)
    threads(2)
    assert same_bits(whole, index_logits(q, keys, weights, out_dtype=torch.float32, **NATIVE))
    for row in (0, 3, 6):
        alone = index_logits(
            (q[0][row : row + 1], None if q[1] is None else q[1][row : row + 1]),
            PagedKeys(keys.cache, keys.block_table[row : row + 1], keys.context_lens[row : row + 1], 777),
            weights[row : row + 1],
            out_dtype=torch.float32,
            **NATIVE,
        )
        assert same_bits(whole[row : row + 1], alone)
    # Compact columns put every key into another tile.
    blocks = torch.arange(0, 777 // 8, 3, dtype=torch.int32)[None].repeat(7, 1)
    compact = index_logits(q, keys, weights, candidates=Candidates(blocks), out_dtype=torch.float32, **NATIVE)
    columns = (blocks[0][:, None] * 8 + torch.arange(8)).flatten().long()
    assert same_bits(compact, whole[:, columns])


def test_rows_with_different_tables_do_not_share_keys(target):
    """Equal lengths and starts, different pages: grouping rows must look at the table."""
    q, keys, weights = scene(INDEX_FP4, 2, 32, 64, page=16)
    table = keys.block_table.clone()
    table[1] = table[1].flip(0)
    lens = torch.full((2, 1), 64, dtype=torch.int32)
    other = PagedKeys(keys.cache, table, lens, 64)
    assert torch.equal(index_logits(q, other, weights, **NATIVE), index_logits(q, other, weights, **REFERENCE))


@pytest.mark.parametrize("scale", [0, 1, 2, 3, 79, 80, 170, 171, 254, 255])
def test_extreme_fp4_scales(target, scale):
    """Scale bytes at and around the limits of the integer products, on one group and on all of them."""
    q, keys, weights = scene(INDEX_FP4, 2, 8, 96, page=16)
    cache = keys.cache.data.clone()
    pages = cache.reshape(cache.shape[0], -1)
    pages[:, 16 * 64 : 16 * 64 + 16] = scale  # all groups of four keys
    pages[:, 16 * 64 + 20] = scale  # one group of a fifth
    keys = keys._replace(cache=PagedCache(cache, INDEX_FP4, 16))
    ours = index_logits(q, keys, weights, out_dtype=torch.float32, **NATIVE).double()
    theirs = index_logits(q, keys, weights, out_dtype=torch.float32, **REFERENCE).double()
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.isinf(), theirs.isinf())
    finite = theirs.isfinite()
    # The processor's bfloat16 dot products read operands below 2^-126 as zero, so much for each of 128 elements.
    smallest = 4e-37 if target == "avx512bf16" else 2e-38
    assert torch.allclose(ours[finite], theirs[finite], rtol=1e-5, atol=smallest if scale < 3 else 1e-6)


@pytest.mark.parametrize("fmt", ["fp4", "fp8"])
def test_every_code_under_every_scale(target, fmt):
    """The decoder of each target, all codes x all scale bytes, bit for bit up to the sign of zero."""
    from sparse_mla import _native
    from sparse_mla.backends.native import KINDS, _target_number

    fmt = FORMATS[fmt]
    codes = torch.arange(256, dtype=torch.uint8)
    data = codes.repeat(256 // 32)[: 256 * 8].reshape(-1, fmt.data_bytes)
    number, kind = _target_number(target), KINDS[fmt.name]
    out = torch.empty(128)
    for scale in range(256):
        scales = torch.full((4,), scale, dtype=torch.uint8)
        for row in data:
            _native.decode_index(number, kind, row.data_ptr(), scales.data_ptr(), out.data_ptr())
            expected = decode(torch.cat((row, scales)), fmt, dtype=torch.float32)
            assert torch.equal(out, expected), (scale, (out != expected).nonzero()[:3])


def test_index_pages_past_4_gib(target):
    """A page whose byte offset does not fit 32 bits is scored as its copy near the start."""
    q, keys, weights = scene(INDEX_FP4, 1, 32, 64, page=64)
    record_page = keys.cache.pages()[0]
    far = 2**32 // (64 * 68) + 5
    size = (far + 1) * 64 * 68
    try:
        memory = mmap.mmap(
            -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        )
    except (OSError, OverflowError) as error:
        pytest.skip(f"{size >> 20} MiB of address space cannot be reserved here: {error}")
    pool = torch.frombuffer(memory, dtype=torch.uint8).reshape(-1, 64, 1, 68)
    pool[far] = record_page.reshape(64, 1, 68)
    pool[1] = record_page.reshape(64, 1, 68)
    lens = torch.tensor([[64]], dtype=torch.int32)
    near, distant = (
        index_logits(q, PagedKeys(pool, torch.tensor([[page]], dtype=torch.int32), lens, 64), weights, **NATIVE)
        for page in (1, far)
    )
    assert same_bits(near, distant)
    assert bool(near.any())


def test_stale_table_entries_are_not_read(target):
    q, keys, weights = scene(INDEX_FP8, 2, 4, 64, page=16)
    table = torch.cat((keys.block_table, torch.full((2, 5), 0x7FFFFFF0, dtype=torch.int32)), dim=1)
    stale = PagedKeys(keys.cache, table, keys.context_lens, 64 + 80)
    ours = index_logits(q, stale, weights, **NATIVE)
    assert same_bits(ours[:, :64], index_logits(q, keys, weights, **NATIVE))
    assert bool((ours[:, 64:] == -INF).all())


# --- selection -------------------------------------------------------------------------------------------------------

DISTRIBUTIONS = {
    "normal": lambda x: x,
    "relu plateau": lambda x: x.clamp(min=1.0),
    "all equal": lambda x: torch.where(x > 0, 0.0, -0.0),
    "ascending": lambda x: torch.arange(x.shape[1]).float().expand_as(x),
    "descending": lambda x: -torch.arange(x.shape[1]).float().expand_as(x),
    "few values": lambda x: x.round(),
    "infinities": lambda x: torch.where(x > 1.5, INF, torch.where(x < 0, -INF, x)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "shape", [(3, 10, 4), (2, 1024, 512), (2, 4100, 512), (2, 70_001, 512), (2, 33, 40), (1, 140_000, 2048)]
)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_topk_is_the_reference(target, distribution, shape, dtype):
    rows, n, k = shape
    x = DISTRIBUTIONS[distribution](torch.randn(rows, n, generator=generator(1))).to(dtype).contiguous()
    begin = torch.randint(0, n // 2, (rows,), dtype=torch.int32, generator=generator(2))
    end = torch.randint(n // 2, n + 1, (rows,), dtype=torch.int32, generator=generator(3))
    for bounds, on_neg_inf in itertools.product(({}, {"begin": begin, "end": end}), ("skip", "last")):
        ours = topk(x, k, on_neg_inf=on_neg_inf, **bounds, **NATIVE)
        assert torch.equal(ours, topk(x, k, on_neg_inf=on_neg_inf, **bounds, **REFERENCE))
    for size in (8, 16):
        blocks = [candidate_blocks(x, end, block_size=size, topk_blocks=k, **way) for way in (NATIVE, REFERENCE)]
        assert torch.equal(*blocks)
    x[torch.rand(rows, n, generator=generator(4)) < 0.01] = NAN
    x[:, n // 3] = -NAN
    assert torch.equal(topk(x, k, on_nan="last", **NATIVE), topk(x, k, on_nan="last", **REFERENCE))
    blocks = [candidate_blocks(x, end, topk_blocks=k, on_nan="last", **way) for way in (NATIVE, REFERENCE)]
    assert torch.equal(*blocks)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 3000),
    k=st.integers(1, 600),
    levels=st.integers(1, 400),
    masked=st.sampled_from([0.0, 0.5, 0.99]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    seed=st.integers(0, 2**20),
)
def test_topk_of_drawn_rows(n, k, levels, masked, dtype, seed):
    g = generator(seed)
    x = (torch.randint(-levels, levels + 1, (2, n), generator=g) / 16).to(dtype)
    x[torch.rand(2, n, generator=g) < masked] = -INF
    assert torch.equal(topk(x, k, **NATIVE), topk(x, k, **REFERENCE))


@pytest.mark.parametrize("threads_used", [1, 2])
def test_topk_names_the_first_nan(threads, threads_used):
    threads(threads_used)
    x = torch.randn(200, 5000)
    x[150, 7] = x[33, 4000] = x[33, 4500] = NAN
    with pytest.raises(NonFiniteError, match=r"^topk: .* at row 33, column 4000"):
        topk(x, 16, **NATIVE)
    with pytest.raises(NonFiniteError, match=r"^candidate_blocks: .* row 33, column 4000"):
        candidate_blocks(x, torch.full((200,), 5000, dtype=torch.int32), **NATIVE)
    assert topk(
        x, 16, torch.full((200,), 4000, dtype=torch.int32).index_fill(0, torch.tensor([150]), 7), **NATIVE
    ).shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("rows", "context", "k"), [(1, 9000, 64), (6, 5000, 512), (40, 700, 20)])
def test_fused_selection_is_the_two_step_one(target, fmt, rows, context, k, dtype, threads):
    """Few rows (parts that are merged) and many (one part), with and without candidates, one and two threads."""
    q, keys, weights = scene(FORMATS[fmt], rows, 32, context, page=64, spread=4)
    scores = index_logits(q, keys, weights, out_dtype=dtype, **NATIVE)
    expected = topk(scores, k, **NATIVE)
    assert torch.equal(expected, topk(scores, k, **REFERENCE))
    for count in (1, 2):
        threads(count)
        assert torch.equal(expected, index_topk(q, keys, weights, k, logits_dtype=dtype, **NATIVE))
    lengths = keys.context_lens.reshape(-1)
    blocks = candidate_blocks(scores, lengths, topk_blocks=max(1, context // 40), **NATIVE)
    fused = index_topk(q, keys, weights, k, candidates=Candidates(blocks), logits_dtype=dtype, **NATIVE)
    inside = torch.zeros_like(scores, dtype=torch.bool)
    for row in range(rows):
        ids = blocks[row][blocks[row] >= 0].long()
        columns = (ids[:, None] * 8 + torch.arange(8)).flatten()
        inside[row, columns[columns < context]] = True
    assert torch.equal(fused, topk(scores.masked_fill(~inside, -INF), k, **REFERENCE))


def test_ragged_rows_with_their_own_starts(target):
    g = generator(5)
    data = encode(torch.randn(500, 128, generator=g).bfloat16(), INDEX_FP8)
    q = encode_query(torch.randn(9, 12, 128, generator=g).bfloat16(), INDEX_FP8)
    starts = torch.tensor([0, 0, 0, 200, 200, 10, 499, 500, 3], dtype=torch.int32)
    ends = torch.tensor([1, 77, 500, 500, 200, 9, 500, 500, 500], dtype=torch.int32)
    keys = RaggedKeys(data[:, :128], data[:, 128:].contiguous().view(torch.int32)[:, 0], starts, ends, 500)
    weights = torch.randn(9, 12, generator=g)
    ours = index_logits((q.q_fp, q.q_sf), keys, weights, **NATIVE)
    theirs = index_logits((q.q_fp, q.q_sf), keys, weights, **REFERENCE)
    assert torch.equal(ours == -INF, theirs == -INF)
    assert torch.allclose(ours.double(), theirs.double(), rtol=2**-7, atol=1e-3)
    blocks = torch.tensor([[0, 3, 25, 62]], dtype=torch.int32).repeat(9, 1)
    for origin in ("row", "keys"):
        candidates = Candidates(blocks, origin=origin)
        compact = index_logits((q.q_fp, q.q_sf), keys, weights, candidates=candidates, **NATIVE)
        wanted = index_logits((q.q_fp, q.q_sf), keys, weights, candidates=candidates, **REFERENCE)
        assert torch.equal(compact == -INF, wanted == -INF)
        assert torch.allclose(compact.double(), wanted.double(), rtol=2**-7, atol=1e-3)


def test_workspace_is_bounded(threads):
    """512 rows, k = 512: below 32 MiB on two threads, whatever the context."""
    threads(2)
    sizes = []
    for context in (4096, 262_144):
        q, keys, weights = scene(INDEX_FP4, 1, 32, 64, page=64)
        table = keys.block_table[:, :1].expand(512, context // 64)
        many = (q[0].expand(512, -1, -1, -1), q[1].expand(512, -1, -1))
        lens = torch.full((512, 1), context, dtype=torch.int32)
        wide = PagedKeys(keys.cache, table, lens, context)
        sizes.append(index_topk_workspace_size(many, wide, weights.expand(512, -1), 512, **NATIVE))
    assert sizes[0] == sizes[1] < 32 << 20


def test_bad_inputs_have_the_reference_sentences():
    q, keys, weights = scene(INDEX_FP8, 2, 4, 64, page=16)
    for wrong in (
        keys._replace(context_lens=torch.tensor([[5], [99]], dtype=torch.int32), max_context_len=None),
        keys._replace(block_table=keys.block_table.clone().fill_(99)),
    ):
        messages = []
        for way in (NATIVE, REFERENCE):
            with pytest.raises(SlotRangeError) as caught:
                index_logits(q, wrong, weights, **way)
            messages.append(str(caught.value))
        assert messages[0] == messages[1]
    with pytest.raises(SlotRangeError, match=r"^topk: end must be between 0 and n = 8"):
        topk(torch.randn(1, 8), 2, torch.tensor([9], dtype=torch.int32), **NATIVE)


# --- records ---------------------------------------------------------------------------------------------------------


def every_bf16(dim: int) -> torch.Tensor:
    """[65280 / dim.., dim]: every finite bfloat16 pattern, neighbours close in size, then everything shuffled."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    values = patterns.view(torch.bfloat16)
    values = values[values.isfinite()]
    shuffled = values[torch.randperm(values.numel(), generator=generator(7))]
    both = torch.cat((values, shuffled))
    return both[: both.numel() // dim * dim].reshape(-1, dim)


@pytest.mark.parametrize("cap", [448, 224])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fmt", [V41_FP8, V41_FP4, INDEX_FP4, INDEX_FP8, INDEX_FP8_FP32], ids=lambda f: f.name)
def test_stored_bytes_of_every_value(target, fmt, dtype, cap):
    """All finite bfloat16 values, alone among their like and among all others, and group maxima of every size."""
    x = every_bf16(fmt.elements)
    spread = torch.randn(400, fmt.elements, generator=generator(8)) * torch.exp2(
        torch.randint(-40, 40, (400, fmt.elements // 16), generator=generator(9)).float()
    ).repeat_interleave(16, -1)
    x = torch.cat((x, spread.bfloat16())).to(dtype)
    if dtype == torch.float32:
        x[-200:] = x[-200:] * 1.0013  # values no bfloat16 holds
    slots = torch.arange(x.shape[0])
    empty = torch.zeros(-(-x.shape[0] // 8), 8, 1, fmt.record_bytes, dtype=torch.uint8)
    layout = "interleaved" if cap == 448 else "planar"
    ours, theirs = (PagedCache(empty.clone(), fmt, 8, layout=layout, e4m3_max=cap) for _ in range(2))
    store_records(x, ours, slots, **NATIVE)
    store_records(x, theirs, slots, **REFERENCE)
    assert torch.equal(ours.data, theirs.data)
    back = [load_records(ours, slots, out_dtype=dtype, **way) for way in (NATIVE, REFERENCE)]
    assert same_bits(*back)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fmt", [V41_FP8, V41_FP4, INDEX_FP4, INDEX_FP8], ids=lambda f: f.name)
def test_loaded_values_of_every_code_and_scale(target, fmt, out_dtype):
    """Bit for bit, signs of zero included; also past the size from which outputs bypass the cache."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(4)[: max(fmt.data_bytes, 256)]
    rows = []
    for scale in range(256):
        for part in codes.reshape(-1, fmt.data_bytes):
            rows.append(torch.cat((part, torch.full((fmt.scale_bytes,), scale, dtype=torch.uint8))))
    records = torch.stack(rows)
    pages = -(-len(rows) // 4)
    cache = PagedCache(torch.zeros(pages, 4, 1, fmt.record_bytes, dtype=torch.uint8), fmt, 4)
    data, scales = cache.data_and_scales()
    slots = torch.arange(len(rows))
    data[slots // 4, slots % 4] = records[:, : fmt.data_bytes]
    scales[slots // 4, slots % 4] = records[:, fmt.data_bytes :]
    expected = load_records(cache, slots, out_dtype=out_dtype, **REFERENCE)
    assert same_bits(load_records(cache, slots, out_dtype=out_dtype, **NATIVE), expected)
    repeats = (9 << 20) // (expected.numel() * expected.element_size()) + 1
    many = load_records(cache, slots.repeat(repeats), out_dtype=out_dtype, **NATIVE)
    assert same_bits(many, expected.repeat(repeats, 1))


def test_last_of_equal_slots_wins_on_any_thread_count(threads):
    x = torch.randn(3000, 512, generator=generator(3)).bfloat16()
    slots = torch.randint(0, 40, (3000,), generator=generator(4))
    slots[::7] = -1
    expected = torch.zeros(5, 8, 1, 528, dtype=torch.uint8)
    store_records(x, PagedCache(expected, V41_FP8, 8), slots, **REFERENCE)
    for count in (1, 2):
        threads(count)
        ours = torch.zeros_like(expected)
        store_records(x, PagedCache(ours, V41_FP8, 8), slots, **NATIVE)
        assert torch.equal(ours, expected)


def test_nothing_is_stored_unless_everything_can_be():
    x = torch.randn(300, 512).bfloat16()
    x[299, 3] = INF
    data = torch.full((40, 8, 1, 528), 7, dtype=torch.uint8)
    with pytest.raises(NonFiniteError, match=r"^store_records: x must be finite, got inf at \[299, 3\]"):
        store_records(x, PagedCache(data, V41_FP8, 8), torch.arange(300), **NATIVE)
    x[299, 3] = 0
    with pytest.raises(SlotRangeError, match=r"^store_records: "):
        store_records(x, PagedCache(data, V41_FP8, 8), torch.arange(21, 321), **NATIVE)
    assert bool((data == 7).all())
    finite = torch.full((1, 512), 3.4e38)
    with pytest.raises(NonFiniteError):
        store_records(
            finite, PagedCache(torch.zeros(1, 8, 1, 512, dtype=torch.bfloat16), "BF16", 8), torch.tensor([0]), **NATIVE
        )


# --- pooling and rope ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [1, 2, 5])
@pytest.mark.parametrize("dim", [1, 7, 512])
def test_pooling_with_special_scores(target, ratio, dim):
    g = generator(ratio * dim)
    score = torch.randn(300, ratio, dim, generator=g) * 4
    latent = torch.randn(300, ratio, dim, generator=g)
    draw = torch.rand(300, ratio, dim, generator=g)
    score[draw < 0.02] = INF
    score[(draw > 0.1) & (draw < 0.3)] = -INF
    latent[score == -INF] = NAN
    score[draw > 0.995] = NAN
    ours, theirs = (softmax_pool(score, latent, out_dtype=torch.float32, **way) for way in (NATIVE, REFERENCE))
    assert torch.allclose(ours, theirs, rtol=2e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("inverse", [False, True])
def test_rope_is_the_reference_bit_for_bit(target, inverse, dtype):
    table = rope_table(5000, 160000.0)
    x = (torch.randn(70, 9, 512, generator=generator(1)) * torch.exp2(torch.randint(-20, 20, (70, 9, 512)).float())).to(
        dtype
    )
    positions = torch.randint(0, 5000, (70,), generator=generator(2))
    strided = x.repeat(1, 2, 1)[:, ::2]
    for each in (x, strided):
        assert same_bits(
            rope(each, positions, table, inverse=inverse, **NATIVE),
            rope(each, positions, table, inverse=inverse, **REFERENCE),
        )
    with pytest.raises(SlotRangeError, match=r"^rope: positions must be in 0\.\.4999"):
        rope(x, positions.index_fill(0, torch.tensor([3]), 5000), table, **NATIVE)


def test_compress_with_strided_state_and_bad_steps(target):
    g = generator(6)
    score, latent = torch.randn(24, 64, generator=g), torch.randn(24, 64, generator=g)
    slots = torch.tensor([2] * 6 + [-1] * 3 + [0] * 6 + [5] * 6 + [-1] * 3)
    lens = torch.tensor([*range(10, 16), 0, 0, 0, *range(1, 7), *range(7, 13), 0, 0, 0])
    results = []
    for way, layout in ((NATIVE, (0, 1, 2, 3)), (NATIVE, (3, 0, 2, 1)), (REFERENCE, (0, 1, 2, 3))):
        storage = torch.randn(6, 7, 2, 64, generator=generator(7))
        data = storage.permute(layout).contiguous().permute([layout.index(i) for i in range(4)])
        state = CompressorState.of(data, 2)
        out = compress(score, latent, state, slots, lens, out_dtype=torch.float32, **way)
        results.append((out, data.contiguous()))
    for out, data in results[:2]:
        assert torch.allclose(out.rows, results[2][0].rows, rtol=2e-6, atol=1e-6)
        assert all(torch.equal(a, b) for a, b in zip(out[1:], results[2][0][1:], strict=True))
        assert same_bits(data, results[2][1])
    state = CompressorState.of(torch.zeros(6, 7, 2, 64), 2)
    with pytest.raises(StateError, match="consecutive"):
        compress(score[:3], latent[:3], state, torch.tensor([1, 2, 1]), torch.tensor([1, 1, 2]), **NATIVE)
    assert not bool(state.data.any())


# --- processes and signals -------------------------------------------------------------------------------------------


def prepared_calls():
    """Every operator over inputs made now: in a child only ours may run, torch's own pool does not survive a fork."""
    q, keys, weights = scene(INDEX_FP4, 4, 32, 2000, page=64)
    scores = index_logits(q, keys, weights, **NATIVE)
    lengths = keys.context_lens.reshape(-1)
    cache = PagedCache(torch.zeros(64, 64, 1, 528, dtype=torch.uint8), V41_FP8, 64)
    x, slots = torch.randn(4096, 512).bfloat16(), torch.arange(4096)
    score, latent = torch.randn(512, 2, 512), torch.randn(512, 2, 512)
    state, steps, lens = CompressorState.allocate(512, 2), torch.arange(512), torch.full((512,), 2)
    heads, table = torch.randn(512, 8, 512).bfloat16(), rope_table(512, 1e4)
    return [
        lambda: index_logits(q, keys, weights, **NATIVE),
        lambda: topk(scores, 64, **NATIVE),
        lambda: index_topk(q, keys, weights, 64, **NATIVE),
        lambda: candidate_blocks(scores, lengths, **NATIVE),
        lambda: store_records(x, cache, slots, **NATIVE),
        lambda: load_records(cache, slots, **NATIVE),
        lambda: softmax_pool(score, latent, **NATIVE),
        lambda: compress(score[:, 0], latent[:, 0], state, steps, lens, **NATIVE),
        lambda: rope(heads, steps, table, **NATIVE),
    ]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_forked_child_runs_every_operator(threads):
    threads(2)
    calls = prepared_calls()
    for call in calls:
        call()
    for number, call in enumerate(calls):
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a hang ends the child
            signal.alarm(10)
            try:
                call()
            except BaseException:
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFEXITED(status), f"call {number}: the child was killed by signal {os.WTERMSIG(status)}"
        assert os.WEXITSTATUS(status) == 0, f"call {number}"


@pytest.fixture
def interrupt_after():
    """Raises KeyboardInterrupt in the main thread so many seconds from now."""

    def handler(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, handler)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("fused", [False, True])
def test_scoring_stops_soon_after_ctrl_c(interrupt_after, fused):
    q, keys, weights = scene(INDEX_FP8, 64, 128, 64, page=64)
    context = 1 << 18
    table = keys.block_table[:, :1].expand(64, context // 64).contiguous()
    long = PagedKeys(keys.cache, table, torch.full((64, 1), context, dtype=torch.int32), context)
    interrupt_after(0.3)
    started = time.monotonic()
    call = index_topk if fused else index_logits
    k = (512,) if fused else ()
    with pytest.raises(KeyboardInterrupt):
        call(q, long, weights, *k, **NATIVE)
    assert time.monotonic() - started < 0.3 + 1.0 + 0.7  # the rule is one second; the rest is a busy machine's


def test_a_store_finishes_before_ctrl_c_is_delivered(interrupt_after):
    """The cache is as before the call (the signal came first) or as after it, never between."""
    x = torch.randn(60_000, 512, generator=generator(1)).bfloat16()
    slots = torch.arange(60_000)
    expected = torch.zeros(7500, 8, 1, 288, dtype=torch.uint8)
    store_records(x, PagedCache(expected, V41_FP4, 8), slots, **NATIVE)
    data = torch.zeros_like(expected)
    cache = PagedCache(data, V41_FP4, 8)
    outcomes = set()
    for attempt in range(60):
        data.zero_()
        interrupted = False
        try:
            interrupt_after(0.0002 + 0.0005 * attempt)
            store_records(x, cache, slots, **NATIVE)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            interrupted = True
        state = "whole" if torch.equal(data, expected) else "untouched" if not bool(data.any()) else "partial"
        outcomes.add((state, interrupted))
        if ("whole", True) in outcomes:
            break
    assert ("whole", True) in outcomes
    assert {state for state, _ in outcomes} <= {"whole", "untouched"}


def test_scratch_is_returned(threads):
    """Resident memory of a long fused call stays far below the matrix of scores it replaces."""
    threads(1)
    q, keys, weights = scene(INDEX_FP4, 32, 8, 64, page=64)
    context = 1 << 19
    table = keys.block_table[:, :1].expand(32, context // 64).contiguous()
    long = PagedKeys(keys.cache, table, torch.full((32, 1), context, dtype=torch.int32), context)
    index_topk(q, long, weights, 512, **NATIVE)
    before = resident_bytes()
    index_topk(q, long, weights, 512, **NATIVE)
    assert resident_bytes() - before < 4 << 20  # the matrix would be 32 MiB


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * ctypes.sizeof(ctypes.c_char) * mmap.PAGESIZE
