# SPDX-License-Identifier: Apache-2.0
"""Every implementation of every operator on every case: one body over the registry.

A backend is tested here by being registered, an operator by having cases. Per-operator files hold only what is
special to one.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from sparse_mla.dispatch import OPS, Implementation
from sparse_mla.testing.case import Case
from sparse_mla.testing.cases import ALL_CASES, cases_of, is_long, select
from sparse_mla.testing.check import forced, implementations, plan, run_case, validated_call

torch_equal = torch.equal


def _params(cases: list[Case]) -> list[Any]:
    return [
        pytest.param(i, case, id=f"{i.name}-{case}", marks=[pytest.mark.full] if is_long(i, case) else [])
        for i, case in plan(cases)
    ]


@pytest.mark.parametrize(("implementation", "case"), _params(list(select(full=True))))
def test_case(implementation: Implementation, case: Case) -> None:
    """Within the rules of `numeric`, or a refusal that the public call repeats in the same words."""
    outcome = run_case(implementation, case)
    assert outcome.state != "failed", f"{case} under {implementation.name}: " + "; ".join(outcome.reasons)


@pytest.mark.parametrize("op", sorted(OPS))
def test_accepts_something(op: str) -> None:
    """An implementation that refuses all of its cases is tested by nothing; a refusal is a sentence."""
    accepted: Counter[str] = Counter()
    for case in cases_of(op):
        if case.is_full or case.is_bench_only:
            continue
        call = validated_call(case, case.build().arguments)
        for implementation in implementations(op):
            reasons = implementation.refusals(call)
            accepted[implementation.name] += not reasons
            for reason in reasons:
                assert len(reason.split()) >= 3, f"{implementation.name} refuses {case}: {reason!r}; write a sentence"
    idle = sorted({i.name for i in implementations(op)} - {name for name, count in accepted.items() if count})
    assert not idle, f"{op}: {', '.join(idle)} refuses every case"


def _small(op: str) -> list[Case]:
    """The cases in which something must not be read, small enough for every backend."""
    return [
        c for c in cases_of(op) if not c.is_full and not c.is_bench_only and ("ugly" in c.tags or "layout" in c.tags)
    ]


@pytest.mark.parametrize(("implementation", "case"), _params([c for op in OPS for c in _small(op)]))
def test_unselected_bytes_change_no_bit(implementation: Implementation, case: Case) -> None:
    """Invalid slots are never read: two fillings of every byte that the call must not use give the same bits."""
    results = []
    for poison in (0xFF, 0x7E):  # NaN and scale 255; large finite values
        problem = case.build(poison)
        if implementation.refusals(validated_call(case, problem.arguments)):
            return  # test_case holds the refusal
        with forced(implementation):
            results.append(case.selected(case.call(problem, implementation.backend), problem))
    for first, second in zip(*results, strict=True):
        assert first.dtype == second.dtype
        assert torch_equal(_bits(first), _bits(second)), f"{case}: the result depends on bytes that no row selects"


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def test_every_operator_has_cases() -> None:
    with_cases = {case.op for case in ALL_CASES}
    missing = sorted(set(OPS) - with_cases)
    assert not missing, (
        f"add cases in sparse_mla/testing/*_cases.py and list them in cases.py for: {', '.join(missing)}"
    )
