# SPDX-License-Identifier: Apache-2.0
"""One implementation on one case: the body of `tests/test_ops.py` and of `sparse-mla check`.

A new backend is checked by being registered, a new operator by having cases. An implementation that refuses a case is
counted with its sentence; then the public call must refuse too, with the same sentence, instead of falling back.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

from ..dispatch import BACKENDS, OPS, Implementation, presence
from ..errors import ArgumentError, BackendUnavailableError, UnsupportedError
from .case import Case, Problem
from .cases import suits

__all__ = ["Outcome", "forced", "implementations", "plan", "require", "run_case", "validated_call"]

PASSED, REFUSED, FAILED = "passed", "refused", "failed"


class Outcome(NamedTuple):
    """What came of one implementation on one case. reasons: why it failed, or why it refuses."""

    op: str
    implementation: str
    case: str
    state: str  # passed | refused | failed
    reasons: tuple[str, ...]
    seconds: float


def implementations(op: str | None = None, backend: str | None = None) -> list[Implementation]:
    """Every implementation whose backend can run here, of every operator or one, under every backend or one."""
    present = [name for name in BACKENDS if backend in (None, name) and presence(name) == ""]
    return [i for stem, each in OPS.items() if op in (None, stem) for i in each.implementations if i.backend in present]


def plan(cases: Iterator[Case] | list[Case], backend: str | None = None) -> list[tuple[Implementation, Case]]:
    """All pairs to run, case by case, so that the float64 result is computed once per case."""
    return [
        (implementation, case)
        for case in cases
        for implementation in implementations(case.op, backend)
        if suits(implementation, case)
    ]


def require(op: str | None, backend: str | None) -> None:
    """Raise, as a call would, for an operator that does not exist or a backend that is not present."""
    if op is not None and op not in OPS:
        raise ArgumentError(f"check: op must be one of {', '.join(sorted(OPS))}, got {op!r}.")
    if backend is not None and presence(backend):
        raise BackendUnavailableError(f"check: backend {backend!r} is not available here: {presence(backend)}.")


@contextmanager
def forced(implementation: Implementation) -> Iterator[None]:
    """Make the public operator use exactly this implementation, among several strategies of one backend."""
    op = OPS[implementation.stem]
    before = op.implementations
    op.implementations = [implementation]
    try:
        yield
    finally:
        op.implementations = before


def validated_call(case: Case, arguments: dict[str, Any]) -> Any:
    """The call record of these arguments."""
    return OPS[case.op].call_type.check(**arguments)


def run_case(implementation: Implementation, case: Case) -> Outcome:
    """Run, judge, and say what came of it. Never raises for a fault of the implementation."""
    start = time.perf_counter()
    state, reasons = _judge(implementation, case)
    return Outcome(case.op, implementation.name, case.name, state, tuple(reasons), time.perf_counter() - start)


def _judge(implementation: Implementation, case: Case) -> tuple[str, list[str]]:
    try:
        answers = _answers(case)
        problem = case.build() if case.writes else answers.problem
        refusals = implementation.refusals(validated_call(case, problem.arguments))
        with forced(implementation):
            if refusals:
                return _refuses(implementation, case, problem, refusals)
            actual = case.call(problem, implementation.backend)
        ratio = implementation.tolerance.ratio_to_bf16
        reasons = case.compare(actual, answers.expected, answers.plain, ratio)
        if implementation.backend == "reference":
            # The yardstick itself: its float64 form against the definition.
            fresh = case.build() if case.writes else problem
            oracle = case.oracle(fresh)
            reasons += [
                f"{r} (reference against the definition)"
                for r in case.compare_oracle(answers.expected, oracle, answers.plain)
            ]
    except Exception as error:  # a crash of one case must not hide the others
        return FAILED, [f"{type(error).__name__}: {error}"]
    return (FAILED, reasons) if reasons else (PASSED, [])


def _refuses(implementation: Implementation, case: Case, problem: Any, refusals: list[str]) -> tuple[str, list[str]]:
    try:
        case.call(problem, implementation.backend)
    except UnsupportedError as error:
        missing = [r for r in refusals if r not in str(error)]
        return (FAILED, [f"the error does not say: {r}" for r in missing]) if missing else (REFUSED, refusals)
    return FAILED, [f"refuses ({'; '.join(refusals)}), yet the call returned"]


class Answers(NamedTuple):
    """What every implementation of a case is judged by."""

    problem: Problem
    expected: Any  # the reference's, in float64 where the operator has it
    plain: Any  # plain bfloat16 torch


@lru_cache(maxsize=2)
def _answers(case: Case) -> Answers:
    """Kept for the next implementation of the same case."""
    problem = case.build()
    plain = case.plain(problem)
    return Answers(problem, case.expected(problem), plain)
