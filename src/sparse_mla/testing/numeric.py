# SPDX-License-Identifier: Apache-2.0
"""How results are compared. Every rule answers with sentences; an empty list means that the result is within it.

    err(x) = ||x - r||_F / ||r||_F                        over the whole output, r in float64 on decoded records
    diff(x) = 1 - 2 sum(x r) / sum(x^2 + r^2)             the cosine difference of DeepGEMM and FlashMLA, in float64
    element: |x - r| < absolute   or   |x - r| / (|r| + 1e-6) < relative

NaN and infinities must sit at the same places. The rounding of FP8 and FP4 records is never part of a tolerance:
references read decoded records. The element rule depends on the recipe of inputs in `cases.py` (keys of standard
deviation 0.1): with wider keys, correct kernels that round P to bfloat16 miss it on near-zero outputs. Freely drawn
inputs use `within_plain` alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = [
    "DECODE_LSE",
    "DECODE_OUT",
    "DRAWN_FLOOR",
    "EXACT_RATIO",
    "LOGITS_DIFF",
    "PLAIN_RATIO",
    "POOL_DIFF",
    "PREFILL_OUT",
    "PREFILL_STATS",
    "PREFILL_WIDE_STATS",
    "Rule",
    "by_element",
    "by_topk_values",
    "diff",
    "equal",
    "frobenius_error",
    "within_diff",
    "within_error",
    "within_plain",
    "within_ulp",
]


class Rule(NamedTuple):
    """Bounds of the element rule, and of `diff` where there is one."""

    absolute: float
    relative: float
    diff: float | None = None


# FlashMLA's tests of the same operators use these bounds.
DECODE_OUT = Rule(1e-3, 2.01 / 128, 5e-6)
DECODE_LSE = Rule(1e-6, 8.01 / 65536)
PREFILL_OUT = Rule(8e-4, 3.01 / 128, 1e-5)
PREFILL_STATS = Rule(1e-6, 2.01 / 65536)
PREFILL_WIDE_STATS = Rule(1e-5, 4.01 / 65536)  # keys wider than the usual recipe
LOGITS_DIFF = 3e-5  # DeepGEMM, against operands as quantized
POOL_DIFF = 1e-8  # DeepInfer, against the result rounded to bfloat16
PLAIN_RATIO = 2.0  # error at most twice that of the same math in plain bfloat16 torch
EXACT_RATIO = 1.1  # for an implementation that keeps P in float32: nothing but the last rounding is left
DRAWN_FLOOR = 4e-3  # for freely drawn inputs: twice the rounding of P and of the output together


def diff(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The cosine difference over the finite places, 0 for two zero tensors."""
    x, r = actual.double().flatten(), expected.double().flatten()
    finite = torch.isfinite(x) & torch.isfinite(r)
    x, r = x[finite], r[finite]
    total = float((x * x + r * r).sum())
    return 0.0 if total == 0 else 1.0 - 2.0 * float((x * r).sum()) / total


def frobenius_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """||x - r|| / ||r|| over the finite places; 0 for two zero tensors, infinity when only r is zero."""
    x, r = actual.double().flatten(), expected.double().flatten()
    finite = torch.isfinite(r)
    x, r = x[finite], r[finite]
    distance, norm = float((x - r).norm()), float(r.norm())
    if norm == 0:
        return 0.0 if distance == 0 else float("inf")
    return distance / norm


def _same_shape(name: str, actual: torch.Tensor, expected: torch.Tensor) -> list[str]:
    if actual.shape != expected.shape:
        return [f"{name}: shape {list(actual.shape)}, expected {list(expected.shape)}"]
    return []


def _same_specials(name: str, actual: torch.Tensor, expected: torch.Tensor) -> list[str]:
    x, r = actual.double(), expected.double()
    for word, wrong in (
        ("NaN", x.isnan() != r.isnan()),
        ("+inf", x.isposinf() != r.isposinf()),
        ("-inf", x.isneginf() != r.isneginf()),
    ):
        if bool(wrong.any()):
            where = wrong.nonzero()[0].tolist()
            return [
                f"{name}: {word} at {int(wrong.sum())} wrong places, first {where}: got {float(x[tuple(where)])}, "
                f"expected {float(r[tuple(where)])}"
            ]
    return []


def by_element(name: str, actual: torch.Tensor, expected: torch.Tensor, rule: Rule) -> list[str]:
    """The element rule, the places of NaN and infinities, and the cosine difference."""
    reasons = _same_shape(name, actual, expected) or _same_specials(name, actual, expected)
    if reasons or actual.numel() == 0:
        return reasons
    x, r = actual.double(), expected.double()
    distance = (x - r).abs()
    finite = torch.isfinite(r)
    wrong = finite & ~((distance < rule.absolute) | (distance / (r.abs() + 1e-6) < rule.relative))
    if bool(wrong.any()):
        worst = torch.where(wrong, distance, torch.zeros_like(distance)).flatten().argmax()
        where = [int(i) for i in torch.unravel_index(worst, distance.shape)]
        reasons.append(
            f"{name}: {int(wrong.sum())} of {x.numel()} elements outside abs {rule.absolute:.3g} and rel "
            f"{rule.relative:.3g}, worst at {where}: got {float(x[tuple(where)]):.7g}, "
            f"expected {float(r[tuple(where)]):.7g}"
        )
    if rule.diff is not None:
        reasons += within_diff(name, actual, expected, rule.diff)
    return reasons


def within_diff(name: str, actual: torch.Tensor, expected: torch.Tensor, bound: float) -> list[str]:
    """The cosine difference and the places of NaN and infinities."""
    reasons = _same_shape(name, actual, expected) or _same_specials(name, actual, expected)
    if not reasons:
        value = diff(actual, expected)
        if not value < bound:
            reasons = [f"{name}: cosine difference {value:.3g}, allowed below {bound:.3g}"]
    return reasons


def within_plain(
    name: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    plain: torch.Tensor,
    *,
    ratio: float = PLAIN_RATIO,
    floor: float = 0.0,
) -> list[str]:
    """err(actual) <= max(ratio * err(plain), floor), where `plain` is the same math in plain bfloat16 torch."""
    reasons = _same_shape(name, actual, expected) or _same_specials(name, actual, expected)
    if reasons:
        return reasons
    ours, theirs = frobenius_error(actual, expected), frobenius_error(plain, expected)
    allowed = max(ratio * theirs, floor)
    if not ours <= allowed:
        return [
            f"{name}: error {ours:.3g}, allowed {allowed:.3g} ({ratio:g} times plain bfloat16 torch's {theirs:.3g})"
        ]
    return []


def within_error(name: str, actual: torch.Tensor, expected: torch.Tensor, bound: float) -> list[str]:
    """err(actual) <= bound, and the places of NaN and infinities."""
    reasons = _same_shape(name, actual, expected) or _same_specials(name, actual, expected)
    if not reasons and not frobenius_error(actual, expected) <= bound:
        reasons = [f"{name}: error {frobenius_error(actual, expected):.3g}, allowed {bound:.3g}"]
    return reasons


def within_ulp(name: str, actual: torch.Tensor, expected: torch.Tensor, ulps: int = 1) -> list[str]:
    """bfloat16 `actual` at most `ulps` steps from `expected` rounded to bfloat16."""
    rounded = expected.to(torch.bfloat16)
    reasons = _same_shape(name, actual, expected) or _same_specials(name, actual, rounded)
    if reasons or actual.numel() == 0:
        return reasons
    distance = (_ordered_code(actual.to(torch.bfloat16)) - _ordered_code(rounded)).abs()
    worst = int(distance.max())
    if worst > ulps:
        where = [int(i) for i in torch.unravel_index(distance.flatten().argmax(), distance.shape)]
        return [f"{name}: {worst} bfloat16 steps away at {where}, allowed {ulps}"]
    return []


def _ordered_code(x: torch.Tensor) -> torch.Tensor:
    """The place of each bfloat16 value in increasing order; +0 and -0 share one."""
    code = x.contiguous().view(torch.int16).int()
    return torch.where(code < 0, -(code & 0x7FFF), code)


def equal(name: str, actual: torch.Tensor, expected: torch.Tensor) -> list[str]:
    """Same dtype, shape and bits; NaN equals NaN of the same bits."""
    if actual.dtype != expected.dtype:
        return [f"{name}: dtype {actual.dtype}, expected {expected.dtype}"]
    reasons = _same_shape(name, actual, expected)
    if reasons or actual.numel() == 0:
        return reasons
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    integer = kinds[actual.element_size()]
    x, r = (_dense(t).view(integer).reshape(actual.shape) for t in (actual, expected))
    wrong = x != r
    if bool(wrong.any()):
        where = wrong.nonzero()[0].tolist()
        at = tuple(where)
        return [
            f"{name}: {int(wrong.sum())} of {x.numel()} elements differ, first at {where}: "
            f"got {actual[at].item()!r}, expected {expected[at].item()!r}"
        ]
    return []


def _dense(x: torch.Tensor) -> torch.Tensor:
    """All elements in one contiguous dimension; flatten() alone may keep the stride of a dimension of size 1."""
    return x.flatten().clone(memory_format=torch.contiguous_format)


def by_topk_values(
    name: str,
    actual: torch.Tensor,
    logits: torch.Tensor,
    lengths: torch.Tensor | None,
    topk: int,
    *,
    slack: float = 0.0,
) -> list[str]:
    """A selection judged by value: ascending, unique, in range, -1 only at the end, as many as there are valid
    columns, and no
    rejected value above a selected one. `logits` [rows, n] are the scores the selection was made from (NaN and -inf
    are no candidates), `lengths` [rows] the valid columns, `actual` [rows, topk]; `slack` allows for the rounding of
    the scores."""
    rows, n = logits.shape
    if list(actual.shape) != [rows, topk]:
        return [f"{name}: shape {list(actual.shape)}, expected {[rows, topk]}"]
    for row in range(rows):
        end = n if lengths is None else min(n, max(0, int(lengths[row])))
        chosen = actual[row].long()
        count = int((chosen >= 0).sum())
        picked = chosen[:count]
        if bool((picked < 0).any()) or bool((chosen[count:] != -1).any()):
            return [f"{name}: row {row} has -1 before a selected index, or another filler"]
        if count > 1 and not bool((picked[1:] > picked[:-1]).all()):
            return [f"{name}: row {row} is not strictly ascending"]
        if count and int(picked[-1]) >= end:
            return [f"{name}: row {row} selects column {int(picked[-1])}, only {end} are valid"]
        values = logits[row, :end].double()
        allowed = ~values.isnan() & (values != -torch.inf)
        wanted = min(topk, int(allowed.sum()))
        if count != wanted:
            return [f"{name}: row {row} selects {count} columns, expected {wanted}"]
        if not bool(allowed[picked].all()):
            return [f"{name}: row {row} selects a masked column"]
        if 0 < count < end:
            allowed[picked] = False
            rejected = values[allowed]
            if rejected.numel() and float(values[picked].min()) < float(rejected.max()) - slack:
                return [
                    f"{name}: row {row} keeps {float(values[picked].min()):.6g} and rejects {float(rejected.max()):.6g}"
                ]
    return []
