# SPDX-License-Identifier: Apache-2.0
"""`sparse_prefill`: what counts as padding, empty rows, sink and lse identities, order and batch independence, bad
input.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from sparse_mla.errors import ArgumentError, DTypeError, ShapeError, SlotRangeError
from sparse_mla.ops.merge_partials import merge_partials
from sparse_mla.ops.sparse_prefill import SPARSE_PREFILL, SparsePrefillCall, sparse_prefill
from sparse_mla.testing import numeric
from sparse_mla.testing.attention_cases import SOFTMAX_SCALE, attend
from sparse_mla.testing.case import clamped_randn

INF, NAN = float("inf"), float("nan")
IMPLEMENTATIONS = SPARSE_PREFILL.candidates("auto")
BACKENDS = sorted({i.backend for i in IMPLEMENTATIONS})
NOWHERE = 2147480000  # what upstream's own tests pad with


def keys(s_kv: int, seed: int = 0) -> torch.Tensor:
    return clamped_randn(torch.Generator().manual_seed(seed), s_kv, 1, 512, scale=0.1)


def queries(s_q: int, h_q: int = 4, seed: int = 1) -> torch.Tensor:
    return clamped_randn(torch.Generator().manual_seed(seed), s_q, h_q, 512)


def lists(rows: list[list[int]], width: int, fill: int = -1) -> torch.Tensor:
    return torch.tensor([[row + [fill] * (width - len(row))] for row in rows], dtype=torch.int32)


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def judge(got, q, kv, visible, sink=None, scale=SOFTMAX_SCALE):
    """The rules of the operator against float64, where `visible[row]` lists the keys of each row."""
    exact, plain = (
        [
            attend(row, kv[torch.tensor(v, dtype=torch.long), 0], scale, sink, way)
            for row, v in zip(q, visible, strict=True)
        ]
        for way in (True, False)
    )
    out, lse, top = (torch.stack([e[i] for e in exact]) for i in range(3))
    reasons = numeric.by_element("out", got.out, out, numeric.PREFILL_OUT)
    reasons += numeric.by_element("lse", got.lse, lse, numeric.PREFILL_STATS)
    reasons += numeric.by_element("max_logits", got.max_logits, top, numeric.PREFILL_STATS)
    reasons += numeric.within_plain("out", got.out, out, torch.stack([p[0] for p in plain]).to(got.out.dtype))
    assert not reasons, reasons


@pytest.mark.parametrize("backend", BACKENDS)
def test_result_shapes_and_dtypes(backend):
    q, kv = queries(3), keys(50)
    got = sparse_prefill(q, kv, lists([[0], [1, 2], []], 7), backend=backend)
    assert (got.out.shape, got.out.dtype) == ((3, 4, 512), torch.bfloat16)
    assert (got.lse.shape, got.lse.dtype) == ((3, 4), torch.float32)
    assert (got.max_logits.shape, got.max_logits.dtype) == ((3, 4), torch.float32)
    assert got.out.is_contiguous()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("padding", [-1, -2, -5, -(2**31), 40, 41, NOWHERE, 2**31 - 1])
def test_every_index_outside_the_keys_is_padding(padding, backend):
    q, kv = queries(2), keys(40)
    visible = [[7, 12, 39, 0], [3]]
    compact = sparse_prefill(q, kv, lists(visible, 128), softmax_scale=SOFTMAX_SCALE, backend=backend)
    judge(compact, q, kv, visible)
    padded = sparse_prefill(q, kv, lists(visible, 128, fill=padding), softmax_scale=SOFTMAX_SCALE, backend=backend)
    assert same(padded, compact)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_may_stand_anywhere(backend):
    """Leading, interleaved, trailing and random padding give the result of the compacted list."""
    q, kv = queries(2), keys(300)
    g = torch.Generator().manual_seed(3)
    chosen = [torch.randperm(300, generator=g)[:40].tolist() for _ in range(2)]
    compact = sparse_prefill(q, kv, lists(chosen, 40), softmax_scale=SOFTMAX_SCALE, backend=backend)
    judge(compact, q, kv, chosen)
    random_places = torch.randperm(128, generator=g)[:40].sort().values.tolist()
    for places in (list(range(88, 128)), list(range(1, 81, 2)), list(range(40)), random_places):
        indices = torch.full((2, 1, 128), -1, dtype=torch.int32)
        for row in range(2):
            indices[row, 0, places] = torch.tensor(chosen[row], dtype=torch.int32)
        got = sparse_prefill(q, kv, indices, softmax_scale=SOFTMAX_SCALE, backend=backend)
        judge(got, q, kv, chosen)
        if backend == "reference":
            assert same(got, compact)  # it drops padding before it computes


@pytest.mark.parametrize("backend", BACKENDS)
def test_unselected_keys_may_hold_nan(backend):
    """NaN in key 0 and in every other unselected key, with padding of both signs in the lists."""
    q, clean = queries(3), keys(64)
    indices = lists([[5, 9, 63], [9], []], 128, fill=-1)
    indices[:, :, 64:] = 64
    expected = sparse_prefill(q, clean, indices, backend=backend)
    poisoned = torch.full_like(clean, NAN)
    poisoned[[5, 9, 63]] = clean[[5, 9, 63]]
    assert same(sparse_prefill(q, poisoned, indices, backend=backend), expected)
    assert not expected.out.isnan().any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("stale", [60, 2**31 - 1, -7])
def test_columns_behind_the_length_are_not_looked_at(stale, backend):
    """60 is a key that holds NaN; the others are far outside."""
    q, kv = queries(2), keys(64)
    kv[60] = NAN
    visible = [[1, 4, 9, 16, 25], [2]]
    indices = lists(visible, 128, fill=stale)
    lengths = torch.tensor([5, 1], dtype=torch.int32)
    got = sparse_prefill(q, kv, indices, topk_length=lengths, backend=backend)
    assert same(got, sparse_prefill(q, kv, lists(visible, 5), backend=backend)) or backend != "reference"
    judge(got, q, kv, visible, scale=512**-0.5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_per_row(backend):
    q, kv = queries(5), keys(200)
    indices = torch.arange(128, dtype=torch.int32).expand(5, 1, 128)
    lengths = [0, 1, 127, 128, 129]
    got = sparse_prefill(
        q,
        kv,
        indices,
        softmax_scale=SOFTMAX_SCALE,
        topk_length=torch.tensor(lengths, dtype=torch.int32),
        backend=backend,
    )
    judge(got, q, kv, [list(range(min(n, 128))) for n in lengths])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sink", [None, 0.7, -INF, INF])
def test_empty_rows_are_zero_whatever_the_sink(sink, backend):
    q, kv = queries(4), keys(30)
    sinks = None if sink is None else torch.full((4,), sink)
    indices = lists([[1, 2], [3], [4, 5, 6], []], 16)
    got = sparse_prefill(q, kv, indices, attn_sink=sinks, backend=backend)
    assert torch.equal(got.out[3], torch.zeros_like(got.out[3]))
    assert bool(torch.isposinf(got.lse[3]).all())
    assert bool(torch.isneginf(got.max_logits[3]).all())
    assert bool(got.out.isfinite().all())
    assert bool(got.lse[:3].isfinite().all())
    alone = sparse_prefill(q[:3], kv, indices[:3], attn_sink=sinks, backend=backend)
    assert same(alone, (got.out[:3], got.max_logits[:3], got.lse[:3]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("count", [1, 2, 8, 100])
def test_zero_queries_average_and_the_lse_is_the_natural_log(count, backend):
    q = torch.zeros(1, 2, 512, dtype=torch.bfloat16)
    kv = keys(128)
    indices = lists([list(range(count))], 128)
    plain = sparse_prefill(q, kv, indices, out_dtype=torch.float32, backend=backend)
    sunk = sparse_prefill(q, kv, indices, attn_sink=torch.zeros(2), out_dtype=torch.float32, backend=backend)
    mean = kv[:count, 0].float().mean(dim=0).expand(1, 2, 512)
    torch.testing.assert_close(plain.out, mean, atol=2e-5, rtol=1e-2 if backend != "reference" else 1e-5)
    torch.testing.assert_close(
        sunk.out, mean * count / (count + 1), atol=2e-5, rtol=1e-2 if backend != "reference" else 1e-5
    )
    for got in (plain, sunk):
        torch.testing.assert_close(got.lse, torch.full((1, 2), math.log(count)), atol=1e-6, rtol=0)
        assert torch.equal(got.max_logits, torch.zeros(1, 2))


@pytest.mark.parametrize("backend", BACKENDS)
def test_sinks_weigh_each_head_by_itself(backend):
    q, kv = queries(2), keys(64)
    sink = torch.tensor([0.5, -INF, INF, 3.0])
    visible = [list(range(64)), [3, 3, 5]]
    got = sparse_prefill(
        q, kv, lists(visible, 64), softmax_scale=SOFTMAX_SCALE, attn_sink=sink, out_dtype=torch.float32, backend=backend
    )
    judge(got, q, kv, visible, sink)
    without = sparse_prefill(
        q, kv, lists(visible, 64), softmax_scale=SOFTMAX_SCALE, out_dtype=torch.float32, backend=backend
    )
    assert torch.equal(got.lse, without.lse)
    assert torch.equal(got.max_logits, without.max_logits)
    assert torch.equal(got.out[:, 1], without.out[:, 1])
    assert not got.out[:, 2].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_halves_merge_into_the_whole(backend):
    q, kv = queries(3), keys(256)
    whole = torch.arange(256, dtype=torch.int32).expand(3, 1, 256)
    sink = torch.tensor([0.5, -1.0, INF, -INF])
    options = {"softmax_scale": SOFTMAX_SCALE, "out_dtype": torch.float32, "backend": backend}
    halves = [
        sparse_prefill(q, kv, whole[..., part].contiguous(), **options) for part in (slice(0, 100), slice(100, 256))
    ]
    merged = merge_partials([h.out for h in halves], [h.lse for h in halves], sink, out_dtype=torch.float32)
    together = sparse_prefill(q, kv, whole, attn_sink=sink, **options)
    torch.testing.assert_close(merged.out, together.out, atol=1e-3, rtol=2e-2)
    torch.testing.assert_close(merged.lse, together.lse, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_does_not_depend_on_its_neighbours(backend):
    s_q, h_q = 130, 8
    q, kv = queries(s_q, h_q), keys(500)
    g = torch.Generator().manual_seed(8)
    indices = torch.randint(-1, 500, (s_q, 1, 128), generator=g, dtype=torch.int32)
    indices[1::3, :, 3:] = -1
    whole = sparse_prefill(q, kv, indices, backend=backend)
    for count in (1, 2, 7, 64, 65, 128):
        for first in (0, 2):
            rows = slice(first, first + count)
            got = sparse_prefill(q[rows], kv, indices[rows], backend=backend)
            assert same(got, (whole.out[rows], whole.max_logits[rows], whole.lse[rows]))
    before = torch.get_num_threads()
    try:
        if backend != "reference":  # its products are BLAS's, whose order of sums may depend on the threads
            torch.set_num_threads(1 if before > 1 else 2)
        assert same(sparse_prefill(q, kv, indices, backend=backend), whole)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_heads_agree_with_the_first_heads_of_a_wider_call(backend):
    q, kv = queries(2, 128), keys(200)
    indices = torch.arange(200, dtype=torch.int32).expand(2, 1, 200)
    sink = torch.linspace(-3, 3, 128)
    wide = sparse_prefill(q, kv, indices, softmax_scale=SOFTMAX_SCALE, attn_sink=sink, backend=backend)
    for h_q in (1, 2, 8, 11, 66):
        got = sparse_prefill(
            q[:, :h_q], kv, indices, softmax_scale=SOFTMAX_SCALE, attn_sink=sink[:h_q].contiguous(), backend=backend
        )
        torch.testing.assert_close(got.out, wide.out[:, :h_q], atol=8e-4, rtol=3.01 / 128)
        torch.testing.assert_close(got.lse, wide.lse[:, :h_q], atol=1e-6, rtol=2.01 / 65536)


def test_memory_limit_chunks_long_lists():
    """A list far longer than one chunk: the online softmax agrees with one pass, and scratch stays near the limit."""
    q, kv = queries(1, 2), keys(5000)
    indices = torch.arange(5000, dtype=torch.int32).reshape(1, 1, -1)
    one = sparse_prefill(q, kv, indices, softmax_scale=SOFTMAX_SCALE, out_dtype=torch.float64, backend="reference")
    small = sparse_prefill(
        q, kv, indices, softmax_scale=SOFTMAX_SCALE, out_dtype=torch.float64, memory_limit=1 << 20, backend="reference"
    )
    torch.testing.assert_close(small.out, one.out, atol=1e-12, rtol=1e-9)
    torch.testing.assert_close(small.lse, one.lse)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_views_and_no_rows_and_no_keys(backend):
    q, kv = queries(3), keys(40)
    indices = torch.randint(-1, 40, (3, 1, 16), dtype=torch.int32)
    expected = sparse_prefill(q, kv, indices, backend=backend)
    wide_q = torch.full((3, 6, 512), NAN, dtype=torch.bfloat16)
    wide_q[:, 1:5] = q
    wide_kv = torch.full((40, 1, 1024), NAN, dtype=torch.bfloat16)
    wide_kv[..., 256:768] = kv
    wide_indices = torch.zeros(3, 1, 20, dtype=torch.int32)
    wide_indices[..., 4:] = indices
    assert same(sparse_prefill(wide_q[:, 1:5], wide_kv[..., 256:768], wide_indices[..., 4:], backend=backend), expected)
    assert sparse_prefill(q[:0], kv, indices[:0], backend=backend).out.shape == (0, 4, 512)
    nothing = sparse_prefill(q, kv[:0], indices, backend=backend)
    assert not nothing.out.any()
    assert bool(torch.isposinf(nothing.lse).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_and_inference_mode_change_nothing(backend):
    q, kv = queries(2), keys(40)
    indices = lists([[1, 2, 3], [39]], 8)
    expected = sparse_prefill(q, kv, indices, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        assert same(sparse_prefill(q, kv, indices, backend=backend), expected)
    with torch.inference_mode():
        assert same(sparse_prefill(q, kv, indices, backend=backend), expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda i: i.name)
def test_opcheck(implementation):
    call = SparsePrefillCall.check(queries(2), keys(9), lists([[1, 2], [8]], 4), attn_sink=torch.zeros(4))
    operator = getattr(torch.ops.sparse_mla, f"sparse_prefill_{implementation.backend}", None)
    if operator is None or implementation.refusals(call):
        pytest.skip(f"{implementation.name} has no opaque operator for this call")
    torch.library.opcheck(operator.default, call.flat())
    length = torch.tensor([1, 0], dtype=torch.int32)
    torch.library.opcheck(operator.default, call._replace(topk_length=length, attn_sink=None).flat())


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_graph_for_any_number_of_rows(backend):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    kv, sink = keys(64), torch.zeros(4)

    def step(q, indices):
        return sparse_prefill(q, kv, indices, attn_sink=sink, backend=backend)

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for rows in (1, 2, 7, 64):
        q, indices = queries(rows), torch.randint(-1, 70, (rows, 1, 16), dtype=torch.int32)
        assert same(compiled(q, indices), step(q, indices))
    assert counter.frame_count <= 3  # the first compilation and at most two more


def good():
    return {"q": queries(3), "kv": keys(9), "indices": torch.zeros(3, 1, 4, dtype=torch.int32)}


BAD = {
    "q rank": ({"q": queries(3)[None]}, ShapeError, "q must be"),
    "q head size": ({"q": torch.zeros(3, 4, 576).bfloat16()}, ShapeError, "576 is the V3.2"),
    "q dtype": ({"q": queries(3).float()}, DTypeError, "q must be bfloat16"),
    "no heads": ({"q": queries(3)[:, :0]}, ShapeError, "at least one head"),
    "q needs grad": ({"q": queries(3).requires_grad_()}, DTypeError, "require grad"),
    "two kv heads": ({"kv": torch.zeros(9, 2, 512).bfloat16()}, ShapeError, "kv must be"),
    "kv dtype": ({"kv": keys(9).float()}, DTypeError, "kv must be bfloat16"),
    "kv bytes": ({"kv": torch.zeros(9, 1, 528, dtype=torch.uint8)}, ShapeError, "kv must be"),
    "indices dtype": ({"indices": torch.zeros(3, 1, 4, dtype=torch.int64)}, DTypeError, "indices must be int32"),
    "indices rank": ({"indices": torch.zeros(3, 4, dtype=torch.int32)}, ShapeError, "indices must be"),
    "indices rows": ({"indices": torch.zeros(2, 1, 4, dtype=torch.int32)}, ShapeError, "indices must be"),
    "no columns": ({"indices": torch.zeros(3, 1, 0, dtype=torch.int32)}, ShapeError, "at least one column"),
    "sink dtype": ({"attn_sink": torch.zeros(4).bfloat16()}, DTypeError, "attn_sink must be float32"),
    "sink wide": ({"attn_sink": torch.zeros(4).double()}, DTypeError, "attn_sink must be float32"),
    "sink rank": ({"attn_sink": torch.zeros(1, 4)}, ShapeError, "attn_sink"),
    "sink heads": ({"attn_sink": torch.zeros(5)}, ShapeError, "attn_sink"),
    "length dtype": ({"topk_length": torch.zeros(3, dtype=torch.int64)}, DTypeError, "topk_length must be int32"),
    "length rows": ({"topk_length": torch.zeros(2, dtype=torch.int32)}, ShapeError, "topk_length"),
    "length negative": ({"topk_length": torch.tensor([1, -3, 2], dtype=torch.int32)}, SlotRangeError, "got -3"),
    "out dtype": ({"out_dtype": torch.float16}, ArgumentError, "out_dtype"),
    "memory limit": ({"memory_limit": 0}, ArgumentError, "memory_limit"),
    "device": ({"kv": keys(9).to("meta")}, ArgumentError, "must be on"),
    "no tensor": ({"kv": None}, DTypeError, "kv must be a torch.Tensor"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", sorted(BAD))
def test_bad_input(name, backend):
    change, kind, text = BAD[name]
    sparse_prefill(**good(), backend=backend)
    with pytest.raises(kind, match=text) as caught:
        sparse_prefill(**(good() | change), backend=backend)
    assert str(caught.value).startswith("sparse_prefill: ")
