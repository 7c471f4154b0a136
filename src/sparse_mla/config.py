# SPDX-License-Identifier: Apache-2.0
"""Every environment variable the library reads, and nothing else reads the environment.

A variable is read when it is used, never at import, so a test or an engine may change it between two calls.
`override(NAME=value)` sets variables for the length of a `with` block; `describe()` lists them for `info` and the docs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from .errors import ArgumentError

__all__ = ["VARIABLES", "Variable", "constant_in_graphs", "describe", "environment", "get", "override", "place_of"]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def constant_in_graphs(function: F) -> F:
    """Mark a function whose result `torch.compile` takes as a constant of the graph it traces, such as a variable's
    value.

    It is `torch.compiler.assume_constant_result` without that function's import of the whole compiler: 4 s on two
    cores.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# os.environ.get answers for an absent variable by raising and catching KeyError: 1 us, four times a call.
# The table behind it is of bytes on POSIX systems; elsewhere the slow way serves.
_TABLE: Any = getattr(os.environ, "_data", None)
if os.name != "posix" or not isinstance(_TABLE, dict):
    _TABLE = None


def _text(name: str, key: bytes) -> str | None:
    if _TABLE is None:
        return os.environ.get(name)
    text = _TABLE.get(key)
    return None if text is None else os.fsdecode(text)


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One environment variable: its name, how its text is read, its default, and one sentence for the reader."""

    name: str
    parse: Callable[[str], T]
    default: T
    meaning: str
    key: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", os.fsencode(self.name))

    def read(self) -> T:
        text = _text(self.name, self.key)
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise ArgumentError(f"config: {self.name} must be {error}, got {text!r}.") from None


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError("one of " + ", ".join(allowed))
        return text

    return parse


def _integer(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise ValueError(f"an integer >= {minimum}")
        return value

    return parse


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("0 or 1")
    return text == "1"


def _exactly_one(text: str) -> bool:
    # The engine's rule for this switch: anything but exactly "1" turns the route off.
    return text == "1"


def _cap(text: str) -> int:
    if text not in ("448", "224"):
        raise ValueError("448 or 224")
    return int(text)


def _lanes(text: str) -> int:
    if text not in ("16", "32"):
        raise ValueError("16 or 32")
    return int(text)


GIB = 1 << 30

VARIABLES: dict[str, Variable[Any]] = {
    variable.name: variable
    for variable in (
        Variable("SPARSE_MLA_BACKEND", str, "auto", "Backend of calls that name none (the drop-ins, for instance)."),
        Variable(
            "SPARSE_MLA_LAYOUT",
            _choice("interleaved", "planar"),
            "interleaved",
            "Layout of main-cache pages given to the drop-ins, whose upstream signatures cannot carry it.",
        ),
        Variable(
            "SPARSE_MLA_E4M3_MAX", _cap, 448, "Largest e4m3 value the caches given to the drop-ins were written with."
        ),
        Variable(
            "SPARSE_MLA_CHECKS",
            _flag,
            True,
            "1: slots and table entries are range-checked before any read. 0: they are not; a bad one is undefined.",
        ),
        Variable(
            "SPARSE_MLA_MEMORY_LIMIT",
            _integer(1 << 20),
            GIB,
            "Bytes of scratch memory an operator may use when the call gives no memory_limit.",
        ),
        Variable(
            "SPARSE_MLA_CPU_TARGET",
            str,
            "",
            "Forces a CPU target of the native backend (avx512bf16, avx512, avx2, portable); empty: the best present.",
        ),
        Variable(
            "SPARSE_MLA_REQUIRE_NATIVE",
            _flag,
            False,
            "1: a missing native extension fails the test run instead of being skipped.",
        ),
        Variable(
            "DEEPINFER_NEURON_NKI_ATTN",
            _exactly_one,
            True,
            "Engine switch of the Neuron route: the supported_* predicates answer yes only when it is exactly 1.",
        ),
        Variable(
            "DEEPINFER_NEURON_PREFILL_BUCKET",
            _integer(0),
            0,
            "Engine switch: rows of a prefill step; permits strategies that suit any rows at that count. 0: never.",
        ),
        Variable(
            "DEEPINFER_NEURON_ATTN_TABLE_SLOTS",
            _integer(0),
            32768,
            "Engine switch: the decoded-table strategy is allowed while its caches hold at most this many slots.",
        ),
        Variable(
            "NEURON_PLATFORM_TARGET_OVERRIDE",
            _choice("trn1", "gen2", "trn2", "gen3", "trn3", "gen4"),
            "trn2",
            "Neuron generation the simulator stands for.",
        ),
        Variable(
            "SPARSE_MLA_NEURON_LANES",
            _lanes,
            16,
            "Bits of FP4 codes a Trainium bit operation takes at once: 16 anywhere, 32 where probe A13 agrees.",
        ),
        Variable("NEURON_LOGICAL_NC_CONFIG", _integer(1), 0, "Physical cores per logical core; 0: as the launch says."),
    )
}


def get(name: str) -> Any:
    """The value of one variable, read now. KeyError for a name that is not ours."""
    return VARIABLES[name].read()


def place_of(name: str) -> tuple[Any, bytes]:
    """Where the text of a variable lies, for compiled code that asks at each call whether it changed: (the dict of
    bytes, or None where there is none, its key)."""
    return _TABLE, VARIABLES[name].key


@contextmanager
def override(**values: object) -> Iterator[None]:
    """Set variables (None removes one) for the length of a `with` block; for tests and scripts."""
    before = {}
    for name in values:
        if name not in VARIABLES:
            raise ArgumentError(
                f"config.override: {name} is no variable of this library; known: {', '.join(VARIABLES)}."
            )
        before[name] = os.environ.get(name)
    try:
        for name, value in values.items():
            _put(name, None if value is None else str(int(value)) if isinstance(value, bool) else str(value))
        yield
    finally:
        for name, text in before.items():
            _put(name, text)


def _put(name: str, text: str | None) -> None:
    if text is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = text


def environment() -> dict[str, str]:
    """A copy of the process environment, for starting a child process."""
    return dict(os.environ)


def describe() -> list[tuple[str, str, str, str]]:
    """(name, value now, default, meaning) of every variable."""
    return [(v.name, str(_shown(v.read())), str(_shown(v.default)), v.meaning) for v in VARIABLES.values()]


def _shown(value: object) -> object:
    return int(value) if isinstance(value, bool) else value
