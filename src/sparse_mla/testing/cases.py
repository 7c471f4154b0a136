# SPDX-License-Identifier: Apache-2.0
"""All cases of all operators. An operator is tested, benchmarked and listed by having cases here."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from ..dispatch import Implementation
from .attention_cases import DECODE_CASES, MERGE_CASES, PREFILL_CASES
from .case import Case
from .index_cases import CANDIDATE_CASES, INDEX_LOGITS_CASES, INDEX_TOPK_CASES, TOPK_CASES
from .pooling_cases import COMPRESS_CASES, POOL_CASES, ROPE_CASES
from .record_cases import LOAD_CASES, STORE_CASES

__all__ = ["ALL_CASES", "cases_of", "is_long", "select", "suits"]

ALL_CASES: tuple[Case, ...] = (
    *DECODE_CASES,
    *PREFILL_CASES,
    *MERGE_CASES,
    *INDEX_LOGITS_CASES,
    *INDEX_TOPK_CASES,
    *TOPK_CASES,
    *CANDIDATE_CASES,
    *POOL_CASES,
    *COMPRESS_CASES,
    *ROPE_CASES,
    *STORE_CASES,
    *LOAD_CASES,
)

SIMULATED_FLOPS = 2**28  # the simulator executes instruction by instruction in numpy: cases above this are trimmed away
SIMULATED_BYTES = 2**24
SIMULATED_QUICK_BYTES = 2**22  # the short run takes those up to here: three quarters of them, in half of the time


def cases_of(op: str) -> tuple[Any, ...]:
    """Every case of one operator."""
    return tuple(case for case in ALL_CASES if case.op == op)


def select(op: str | None = None, name: str | None = None, *, full: bool = False) -> Iterator[Case]:
    """Cases to judge, whose operator is `op` and whose name contains `name`; those tagged "full" only on request."""
    for case in ALL_CASES:
        if case.is_bench_only or (case.is_full and not full):
            continue
        if (op is None or case.op == op) and (name is None or name in str(case)):
            yield case


def suits(implementation: Implementation, case: Case) -> bool:
    """Whether the case is of a size that backend is checked with. Only the simulator has a bound."""
    if implementation.backend != "simulated":
        return True
    return case.flops <= SIMULATED_FLOPS and case.nbytes <= SIMULATED_BYTES


def is_long(implementation: Implementation, case: Case) -> bool:
    """Whether only the long run takes this pair: the case says so, or it is a large one for the simulator."""
    return case.is_full or (implementation.backend == "simulated" and case.nbytes > SIMULATED_QUICK_BYTES)


_names = [str(case) for case in ALL_CASES]
_twice = [name for name, group in itertools.groupby(sorted(_names)) if len(list(group)) > 1]
if _twice:
    raise RuntimeError(f"cases: names must be unique, got {', '.join(_twice)} twice.")
