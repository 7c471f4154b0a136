# SPDX-License-Identifier: Apache-2.0
"""The selection rule: higher value, then lower index; ascending output; -1 at the end; NaN and -inf as documented."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch._dynamo.testing

from sparse_mla import config
from sparse_mla.errors import ArgumentError, DTypeError, NonFiniteError, ShapeError, SlotRangeError, SparseMlaError
from sparse_mla.ops.topk import TOPK, TopkCall, selected_values, topk

INF = math.inf


@pytest.fixture(autouse=True)
def _on_the_reference() -> Iterator[None]:
    """These tests hold the definition; other backends are held to it by the cases."""
    with config.override(SPARSE_MLA_BACKEND="reference"):
        yield


def expected_row(values: list[float], k: int, first: int = 0, *, keep_neg_inf: bool = False) -> list[int]:
    """The rule, written as a sort in plain Python."""
    usable = [j for j, v in enumerate(values) if not math.isnan(v) and (keep_neg_inf or v != -INF)]
    best = sorted(sorted(usable, key=lambda j: (-values[j], j))[:k])
    return [j + first for j in best] + [-1] * (k - len(best))


def check_against_rule(logits: torch.Tensor, k: int, **options: object) -> torch.Tensor:
    out = topk(logits, k, on_nan="last", **options)
    assert out.dtype == torch.int32
    assert out.shape == (logits.shape[0], k)
    end, begin = options.get("end"), options.get("begin")
    for row in range(logits.shape[0]):
        first = 0 if begin is None else int(begin[row])
        last = logits.shape[1] if end is None else int(end[row])
        keep = options.get("on_neg_inf") == "last"
        want = expected_row(logits[row, first:last].float().tolist(), k, first, keep_neg_inf=keep)
        assert out[row].tolist() == want, f"row {row}"
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("rows", "n", "k"), [(3, 700, 64), (2, 129, 1), (4, 33, 7), (2, 5, 9), (1, 2048, 2047), (2, 1, 1)]
)
def test_random_logits(dtype: torch.dtype, rows: int, n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(rows * n + k)
    # Few distinct values: every row is full of ties.
    logits = (torch.randn(rows, n, generator=generator) * 3).round().div(4).to(dtype)
    end = torch.randint(0, n + 1, (rows,), generator=generator, dtype=torch.int32)
    begin = (end.float() * torch.rand(rows, generator=generator)).int()
    check_against_rule(logits, k)
    check_against_rule(logits, k, end=end)
    check_against_rule(logits, k, end=end, begin=begin)


def test_zero_plateau_takes_all_winners_then_the_lowest_zeros() -> None:
    n, k = 4096, 512
    logits = torch.zeros(1, n, dtype=torch.bfloat16)
    winners = torch.randperm(n, generator=torch.Generator().manual_seed(3))[:100].sort().values
    logits[0, winners] = torch.rand(100, generator=torch.Generator().manual_seed(4)).bfloat16() + 1
    zeros = [j for j in range(n) if logits[0, j] == 0][: k - 100]
    want = sorted(winners.tolist() + zeros)
    for _ in range(25):
        assert topk(logits, k)[0].tolist() == want


@pytest.mark.parametrize("kind", ["100 winners", "all equal", "with +inf", "all +inf"])
def test_many_ties_never_give_minus_one_when_there_are_enough_columns(kind: str) -> None:
    n, k = 8320, 2048
    logits = torch.full((1, n), 0.5, dtype=torch.bfloat16)
    if kind == "100 winners":
        logits[0, -100:] = 2.0
    elif kind == "with +inf":
        logits[0, 5::83] = INF
    elif kind == "all +inf":
        logits.fill_(INF)
    out = check_against_rule(logits, k)[0]
    assert int(out.min()) >= 0
    assert out.unique().numel() == k


@pytest.mark.parametrize("k", [2, 512])
@pytest.mark.parametrize("places", [[5], list(range(300, 900)), list(range(1000))])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nan_orders_last_and_is_never_selected(k: int, places: list[int], dtype: torch.dtype) -> None:
    logits = torch.randn(2, 1000, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[0, places] = math.nan
    out = check_against_rule(logits, k)
    chosen = out[0][out[0] >= 0]
    assert not bool(torch.isin(chosen, torch.tensor(places)).any())


def test_nan_raises_by_default_and_names_the_place() -> None:
    logits = torch.zeros(3, 10)
    logits[1, 7] = math.nan
    with pytest.raises(NonFiniteError, match=r"topk: logits must not be NaN, got NaN at row 1, column 7"):
        topk(logits, 2)
    # A NaN outside the candidates is nobody's business.
    assert topk(logits, 2, torch.tensor([10, 7, 10], dtype=torch.int32))[1].tolist() == [0, 1]
    assert topk(logits, 2, begin=torch.tensor([0, 8, 0], dtype=torch.int32))[1].tolist() == [8, 9]


def test_neg_inf_is_masked_or_lowest_as_asked() -> None:
    logits = torch.tensor([[1.0, -INF, 3.0, -INF], [-INF] * 4, [-INF, math.nan, -5.0, -INF]])
    assert topk(logits, 3, on_nan="last").tolist() == [[0, 2, -1], [-1, -1, -1], [2, -1, -1]]
    lowest = topk(logits, 3, on_nan="last", on_neg_inf="last")
    assert lowest.tolist() == [[0, 1, 2], [0, 1, 2], [0, 2, 3]]
    assert topk(logits, 4, on_nan="last", on_neg_inf="last")[2].tolist() == [0, 2, 3, -1]


def test_signed_zeros_are_equal() -> None:
    assert topk(torch.tensor([[-0.0, 0.0, -0.0, 0.0]]), 2).tolist() == [[0, 1]]


@pytest.mark.parametrize("end", [0, 1, 4, 5, 6])
def test_all_valid_columns_are_returned_when_they_are_few(end: int) -> None:
    logits = torch.randn(1, 9, generator=torch.Generator().manual_seed(end))
    out = topk(logits, 5, torch.tensor([end], dtype=torch.int32))[0]
    if end <= 5:
        assert out.tolist() == list(range(end)) + [-1] * (5 - end)
    assert int(out.max()) < max(end, 0)


@pytest.mark.parametrize("n", [1, 7, 8, 65535, 65536, 70000])
def test_row_lengths_around_instruction_limits(n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    logits = torch.randn(1, n, generator=generator).mul(8).round().div(8).bfloat16()
    k = 512
    order = torch.sort(logits[0].float(), descending=True, stable=True).indices[:k].sort().values
    out = topk(logits, k)[0]
    assert out[: order.numel()].tolist() == order.tolist()
    assert bool((out[order.numel() :] == -1).all())


def test_ties_across_column_65536_go_to_the_lower_index() -> None:
    logits = torch.zeros(1, 65_600, dtype=torch.bfloat16)
    logits[0, 65_500:65_600] = 1.0
    assert topk(logits, 50)[0].tolist() == list(range(65_500, 65_550))


def test_row_strides_do_not_matter() -> None:
    wide = torch.randn(4, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    view = wide[:, 3:500]
    want = topk(view.contiguous(), 31)
    assert torch.equal(topk(view, 31), want)
    assert torch.equal(topk(view.t().contiguous().t(), 31), want)
    assert torch.equal(topk(wide[::2, 3:500], 31), want[::2])
    assert torch.equal(topk(wide[:1, 3:500].expand(4, -1), 31), want[:1].expand(4, -1))


def test_a_row_does_not_depend_on_its_neighbours_width_or_threads() -> None:
    n, k = 1000, 64
    row = torch.randn(1, n, generator=torch.Generator().manual_seed(9)).bfloat16()
    want = topk(row, k)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for b in (1, 2, 7, 64, 65, 128):
                batch = torch.randn(b, n, generator=torch.Generator().manual_seed(b)).bfloat16()
                batch[b // 2] = row[0]
                assert torch.equal(topk(batch, k)[b // 2], want[0])
    finally:
        torch.set_num_threads(threads)
    for width in (4 * n, 65536):
        wide = torch.full((1, width), INF, dtype=torch.bfloat16)
        wide[0, :n] = row[0]
        assert torch.equal(topk(wide, k, torch.tensor([n], dtype=torch.int32)), want)


def test_no_rows_and_no_columns() -> None:
    assert topk(torch.zeros(0, 10), 3).shape == (0, 3)
    assert topk(torch.zeros(2, 0), 3).tolist() == [[-1] * 3] * 2
    assert topk(torch.zeros(0, 0), 3, torch.zeros(0, dtype=torch.int32)).shape == (0, 3)


def test_selected_values_fill_where_nothing_was_picked() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0]])
    assert selected_values(logits, torch.tensor([[0, 2, -1]], dtype=torch.int32)).tolist() == [[3.0, 2.0, -INF]]
    assert selected_values(torch.zeros(1, 0), torch.tensor([[-1]], dtype=torch.int32), 7.0).tolist() == [[7.0]]


# --- bad input -------------------------------------------------------------------------------------------------------

LOGITS = torch.zeros(3, 8)
BAD_INPUTS = {
    "logits no tensor": (([1.0], 2), {}, DTypeError, "topk: logits must be a torch.Tensor, got list"),
    "logits rank": ((torch.zeros(8), 2), {}, ShapeError, r"topk: logits must be \[rows, n\], got \[8\]"),
    "logits half": (
        (LOGITS.half(), 2),
        {},
        DTypeError,
        "topk: logits must be bfloat16 or float32 or float64, got float16",
    ),
    "logits grad": ((torch.zeros(3, 8, requires_grad=True), 2), {}, DTypeError, "topk: logits must not require grad"),
    "k zero": ((LOGITS, 0), {}, ArgumentError, "topk: k must be an integer >= 1, got 0"),
    "k bool": ((LOGITS, True), {}, ArgumentError, "topk: k must be an integer >= 1, got True"),
    "k float": ((LOGITS, 2.0), {}, ArgumentError, "topk: k must be an integer >= 1, got 2.0"),
    "end rows": (
        (LOGITS, 2, torch.zeros(2, dtype=torch.int32)),
        {},
        ShapeError,
        r"topk: end must be \[rows\].*got \[2\]",
    ),
    "end dtype": ((LOGITS, 2, torch.zeros(3)), {}, DTypeError, "topk: end must be int32, got float32"),
    "end int64": ((LOGITS, 2, torch.zeros(3, dtype=torch.int64)), {}, DTypeError, "topk: end must be int32, got int64"),
    "begin rows": (
        (LOGITS, 2),
        {"begin": torch.zeros(4, dtype=torch.int32)},
        ShapeError,
        r"topk: begin must be \[rows\]",
    ),
    "end too big": (
        (LOGITS, 2, torch.tensor([1, 9, 2], dtype=torch.int32)),
        {},
        SlotRangeError,
        r"topk: end must be between 0 and n = 8, got 9 at \[1\]",
    ),
    "end negative": (
        (LOGITS, 2, torch.tensor([1, -1, 2], dtype=torch.int32)),
        {},
        SlotRangeError,
        "topk: end must be between",
    ),
    "begin negative": (
        (LOGITS, 2),
        {"begin": torch.tensor([0, 0, -2], dtype=torch.int32)},
        SlotRangeError,
        "topk: begin must",
    ),
    "on_nan": (
        (LOGITS, 2),
        {"on_nan": "zero"},
        ArgumentError,
        "topk: on_nan must be one of 'raise', 'last', got 'zero'",
    ),
    "on_neg_inf": (
        (LOGITS, 2),
        {"on_neg_inf": "x"},
        ArgumentError,
        "topk: on_neg_inf must be one of 'skip', 'last', got 'x'",
    ),
    "backend": ((LOGITS, 2), {"backend": "gpu"}, ArgumentError, "topk: backend must be auto or one of .*got 'gpu'"),
    "device": (
        (LOGITS, 2, torch.zeros(3, dtype=torch.int32, device="meta")),
        {},
        ArgumentError,
        "topk: end must be on cpu",
    ),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_bad_input_is_one_sentence_that_names_the_argument(name: str) -> None:
    args, kwargs, error, message = BAD_INPUTS[name]
    with pytest.raises(error, match=message) as raised:
        topk(*args, **kwargs)
    assert isinstance(raised.value, SparseMlaError)
    assert "\n" not in str(raised.value)


# --- torch ecosystem -------------------------------------------------------------------------------------------------


def test_opcheck() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    end = torch.tensor([40, 0, 9], dtype=torch.int32)
    for call in (TopkCall.check(logits, 7, end), TopkCall.check(logits.float()[:, ::2], 50, begin=end // 4)):
        torch.library.opcheck(torch.ops.sparse_mla.topk_reference.default, call.flat())


def test_fullgraph_compile_recompiles_at_most_twice() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()

    def select(logits: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        return topk(logits * 2, 16, end) + 1

    compiled = torch.compile(select, fullgraph=True, backend=counter)
    for b in range(1, 65):
        logits = torch.randn(b, 100, generator=torch.Generator().manual_seed(b))
        end = torch.full((b,), 90, dtype=torch.int32)
        assert torch.equal(compiled(logits, end), select(logits, end))
    assert counter.frame_count <= 3
    torch._dynamo.reset()


def test_compiled_error_holds_our_sentence() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: topk(x, 2), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="topk: logits must be bfloat16 or float32 or float64, got int32"):
        compiled(torch.zeros(2, 3, dtype=torch.int32))
    torch._dynamo.reset()


def test_inference_mode_and_autocast_change_nothing() -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(5))
    want = topk(logits, 20)
    with torch.inference_mode():
        assert torch.equal(topk(logits, 20), want)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(topk(logits, 20), want)


def test_explain_gives_the_answer_of_the_call() -> None:
    explanation = TOPK.explain(TopkCall.check(LOGITS, 2), backend="reference")
    assert explanation.chosen == "reference"
    assert explanation.stem == "topk"


@pytest.mark.full
@pytest.mark.parametrize("seed", range(200))
def test_random_rows_against_the_rule(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    n = int(torch.randint(0, 600, (), generator=generator))
    k = int(torch.randint(1, 300, (), generator=generator))
    logits = torch.randn(3, n, generator=generator).mul(1 + seed % 7).round()
    specials = torch.rand(3, n, generator=generator)
    logits[specials < 0.05] = -INF
    logits[specials > 0.97] = INF
    logits[(specials > 0.5) & (specials < 0.53)] = math.nan
    end = torch.randint(0, n + 1, (3,), generator=generator, dtype=torch.int32)
    for option in ("skip", "last"):
        check_against_rule(logits.bfloat16(), k, end=end, on_neg_inf=option)
