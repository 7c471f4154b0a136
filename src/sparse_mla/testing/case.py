# SPDX-License-Identifier: Apache-2.0
"""What a case is: shapes and options declared once, from which test, benchmark, command and docs all draw.

A case builds its inputs from a seed that is its own name, so the same case is the same bytes everywhere. It also
states the right answer twice, by independent ways: `expected` is the library's reference in float64; `oracle` is
written here from the definition, over values the builder knows, and never touches a cache. `plain` is what a user
would write in bfloat16 torch.
"""

from __future__ import annotations

import importlib
import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from .. import ops
from .numeric import PLAIN_RATIO

__all__ = ["BENCH", "FULL", "Case", "Problem", "clamped_randn", "pairs"]

FULL = "full"  # the tag of cases that only the long run takes
BENCH = "bench"  # the tag of cases too large to judge, which are only timed
POISON = 0xFF  # what fills every byte that no call may read


class Problem(NamedTuple):
    """The inputs of one case. Writing operators change them, so build a new one for each call of such a case."""

    arguments: dict[str, Any]  # keyword arguments of the public operator
    truth: dict[str, Any]  # what only the builder knows, for the oracle: decoded keys, and so on


@dataclass(frozen=True, kw_only=True)
class Case:
    """One set of shapes and options of one operator. Subclasses add the fields and say how to build, judge and
    count."""

    op: ClassVar[str]
    writes: ClassVar[bool] = False  # the operator changes its inputs, so every call needs new ones

    name: str
    tags: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.op}/{self.name}"

    @property
    def is_full(self) -> bool:
        return FULL in self.tags

    @property
    def is_bench_only(self) -> bool:
        return BENCH in self.tags

    def generator(self) -> torch.Generator:
        """The random stream of this case, from its name."""
        return torch.Generator().manual_seed(zlib.crc32(str(self).encode()))

    def build(self, poison: int = POISON) -> Problem:
        """The inputs. Every byte that the call must not read holds `poison`."""
        raise NotImplementedError

    def call(self, problem: Problem, backend: str | None = None) -> Any:
        """The public operator on these inputs."""
        module = importlib.import_module(f"{ops.__name__}.{self.op}")
        return getattr(module, self.op)(**problem.arguments, backend=backend)

    def expected(self, problem: Problem) -> Any:
        """The result of the reference backend, in float64 where the operator has it."""
        return self.call(problem, "reference")

    def oracle(self, problem: Problem) -> Any:
        """The same result by an independent way, from the definition; float64 where it is not exact."""
        raise NotImplementedError

    def plain(self, problem: Problem) -> Any:
        """The same result in plain bfloat16 torch; None where results are exact."""
        return None

    def compare(self, actual: Any, expected: Any, plain: Any, ratio: float) -> list[str]:
        """Why `actual` is not good enough, as sentences. `ratio`: allowed multiple of the error of `plain`."""
        raise NotImplementedError

    def compare_oracle(self, expected: Any, oracle: Any, plain: Any) -> list[str]:
        """Why the two derivations of the right answer disagree, as sentences."""
        return self.compare(expected, oracle, plain, PLAIN_RATIO)

    def selected(self, result: Any, problem: Problem) -> tuple[torch.Tensor, ...]:
        """The tensors of a result that must not depend on unselected bytes."""
        return tuple(result) if isinstance(result, tuple) else (result,)

    @property
    def flops(self) -> int:
        """Multiplications and additions the operator needs."""
        return 0

    @property
    def nbytes(self) -> int:
        """Bytes the operator must read and write once."""
        raise NotImplementedError


def clamped_randn(generator: torch.Generator, *shape: int, scale: float = 1.0) -> torch.Tensor:
    """bfloat16 normal values times `scale`, clamped to +-1: the recipe of upstream's tests."""
    return (torch.randn(*shape, generator=generator) * scale).clamp(-1, 1).to(torch.bfloat16)


def pairs(axes: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Few combinations of the axes in which every pair of values of two axes occurs. Deterministic and greedy."""
    names = list(axes)
    left = {
        (a, i, b, j)
        for a, b in itertools.combinations(range(len(names)), 2)
        for i in range(len(axes[names[a]]))
        for j in range(len(axes[names[b]]))
    }
    while left:
        first = min(left)
        chosen: dict[int, int] = {first[0]: first[1], first[2]: first[3]}
        for axis in range(len(names)):
            if axis in chosen:
                continue

            best, chosen_value = -1, 0
            for step in range(len(axes[names[axis]])):
                value = (step + len(left)) % len(axes[names[axis]])  # not always the first of equals
                gain = sum(_pair(other, chosen[other], axis, value) in left for other in chosen)
                if gain > best:
                    best, chosen_value = gain, value
            chosen[axis] = chosen_value
        left -= {(a, chosen[a], b, chosen[b]) for a, b in itertools.combinations(range(len(names)), 2)}
        yield {name: axes[name][chosen[axis]] for axis, name in enumerate(names)}


def _pair(a: int, i: int, b: int, j: int) -> tuple[int, int, int, int]:
    """Value i of axis a with value j of axis b, the lower axis first."""
    return (a, i, b, j) if a < b else (b, j, a, i)
