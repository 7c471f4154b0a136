# SPDX-License-Identifier: Apache-2.0
"""The case list itself: what it must hold, that it is deterministic, and that the rules of `numeric` can fail."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from sparse_mla.formats import V41_FP4, V41_FP8
from sparse_mla.testing import numeric
from sparse_mla.testing.attention_cases import DECODE_CASES, HEADS, PAGE_SIZES, ROWS_PER_SEQUENCE, TOPKS, attend
from sparse_mla.testing.case import pairs
from sparse_mla.testing.cases import ALL_CASES, cases_of, select

QUICK = list(select())


def test_upstream_matrix_is_covered() -> None:
    upstream = [c for c in DECODE_CASES if "upstream" in c.tags]
    quick = [c for c in upstream if not c.is_full]
    for group in (quick, upstream):
        assert {c.scopes[0].pages.page_size for c in group} == set(PAGE_SIZES)
        assert {c.scopes[0].topk for c in group} == set(TOPKS)
        assert {c.s_q for c in group} == set(ROWS_PER_SEQUENCE)
        assert {c.h_q for c in group} == set(HEADS)
        kinds = {tuple(s.pages.format for s in c.scopes) for c in group}
        assert kinds == {(V41_FP8,), (V41_FP8, V41_FP8), (V41_FP8, V41_FP4)}
    assert max(c.b for c in upstream) == 321
    product = {(c.scopes[0].pages.page_size, c.scopes[0].topk, c.h_q, len(c.scopes)) for c in upstream}
    assert product >= set(itertools.product(PAGE_SIZES, TOPKS, HEADS, (1, 2)))


def test_dense_and_ugly_cases_are_there() -> None:
    names = {c.name for c in DECODE_CASES}
    wanted = (
        "no-valid-slot one-page page-of-one topk-not-of-a-tile zero-rows sink-plus-inf sink-minus-inf planar cap-224 "
        "padded-blocks pool-region empty-main mostly-minus-one"
    )
    assert set(wanted.split()) <= names
    dense = {s.topk for c in DECODE_CASES if "dense" in c.tags for s in c.scopes}
    assert {16384, 65536} <= dense


def test_names_are_unique() -> None:
    names = [str(c) for c in ALL_CASES]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("sizes", [(2, 2), (3, 4, 2), (5, 1, 3, 4), (10, 8, 6, 6, 3)])
def test_pairs_cover_every_pair(sizes: tuple[int, ...]) -> None:
    axes = {f"axis{i}": tuple(range(n)) for i, n in enumerate(sizes)}
    rows = list(pairs(axes))
    for a, b in itertools.combinations(axes, 2):
        assert {(r[a], r[b]) for r in rows} == set(itertools.product(axes[a], axes[b]))
    two_largest = sorted(sizes)[-1] * sorted(sizes)[-2]
    assert len(rows) <= 2 * two_largest


@pytest.mark.parametrize(
    "case", [next(c for c in QUICK if c.op == op) for op in sorted({c.op for c in QUICK})], ids=str
)
def test_building_is_deterministic(case: Any) -> None:
    first, second = (_tensors(case.build().arguments) for _ in range(2))
    assert len(first) == len(second) > 0
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.flatten().contiguous().view(torch.uint8), b.flatten().contiguous().view(torch.uint8))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value] if value.dim() else []
    if hasattr(value, "data") and isinstance(value.data, torch.Tensor):
        return [value.data]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for v in value for t in _tensors(v)] if isinstance(value, list | tuple) else []


def test_every_quick_case_states_its_work() -> None:
    for case in QUICK:
        assert case.nbytes >= 0
        assert case.flops >= 0
        if case.op != "topk" and "ugly" not in case.tags:
            assert case.nbytes > 0, case


def test_flops_of_the_production_row() -> None:
    case = next(c for c in cases_of("sparse_decode") if c.name == "v41-flash-b1-s1-h64")
    assert case.flops == 4 * 512 * 64 * 640
    assert case.nbytes == 128 * (528 + 4) + 512 * (288 + 4) + 64 * (512 * 4 + 4)


# --- the rules must be able to fail ----------------------------------------------------------------------------------


def _one_row() -> tuple[torch.Tensor, torch.Tensor]:
    q, keys = torch.randn(4, 512).clamp(-1, 1).bfloat16(), (torch.randn(50, 512) * 0.1).bfloat16()
    exact = attend(q, keys, 0.03, None, exact=True)[0]
    return exact, attend(q, keys, 0.03, None, exact=False)[0]


def test_element_rule_sees_one_wrong_element() -> None:
    exact, _ = _one_row()
    actual = exact.clone()
    assert numeric.by_element("out", actual, exact, numeric.DECODE_OUT) == []
    actual[2, 77] += 0.05
    (reason,) = numeric.by_element("out", actual, exact, numeric.DECODE_OUT)[:1]
    assert "[2, 77]" in reason


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_specials_must_agree(value: float) -> None:
    exact, _ = _one_row()
    actual = exact.clone()
    actual[1, 3] = value
    for rule in (
        lambda a, e: numeric.by_element("x", a, e, numeric.Rule(1e9, 1e9)),
        lambda a, e: numeric.within_plain("x", a, e, e, floor=1e9),
        lambda a, e: numeric.within_diff("x", a, e, 1e9),
        lambda a, e: numeric.within_error("x", a, e, 1e9),
    ):
        assert any("wrong places" in reason for reason in rule(actual, exact))
        assert any("wrong places" in reason for reason in rule(exact, actual))


def test_plain_rule_is_twice_the_plain_error() -> None:
    exact, plain = _one_row()
    noise = (plain - exact.float()).double()
    assert numeric.within_plain("x", exact + 1.9 * noise, exact, plain) == []
    assert numeric.within_plain("x", exact + 2.1 * noise, exact, plain) != []


def test_ulp_rule_counts_steps_over_zero() -> None:
    values = torch.tensor([1.0, -1.0, 0.0, 2.0**-133])
    code = values.bfloat16().view(torch.int16)
    assert numeric.within_ulp("x", values.bfloat16(), values) == []
    assert numeric.within_ulp("x", (code + 1).view(torch.bfloat16), values) == []
    assert numeric.within_ulp("x", (code + 2).view(torch.bfloat16), values) != []
    smallest = torch.tensor([1], dtype=torch.int16).view(torch.bfloat16)
    assert numeric.within_ulp("x", -smallest, smallest.float(), ulps=2) == []
    assert numeric.within_ulp("x", -smallest, smallest.float(), ulps=1) != []


def test_equal_tells_zeros_and_nans_apart() -> None:
    zero = torch.zeros(3)
    assert numeric.equal("x", zero, zero.clone()) == []
    assert numeric.equal("x", -zero, zero) != []
    assert numeric.equal("x", zero.double(), zero) != []
    assert numeric.equal("x", torch.full((2,), torch.nan), torch.full((2,), torch.nan)) == []


@pytest.mark.parametrize(
    ("picks", "word"),
    [
        ([0, 2], ""),
        ([2, 0], "ascending"),
        ([0, 0], "ascending"),
        ([0, 1], "rejects"),
        ([0, -1], "selects 1"),
        ([-1, 0], "before"),
        ([0, 4], "valid"),
        ([0, 3], "masked"),
    ],
)
def test_topk_rule(picks: list[int], word: str) -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, -torch.inf, 9.0]])
    lengths = torch.tensor([4], dtype=torch.int32)
    reasons = numeric.by_topk_values("picks", torch.tensor([picks], dtype=torch.int32), logits, lengths, 2)
    assert (reasons == []) if not word else (word in reasons[0])
