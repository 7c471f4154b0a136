# SPDX-License-Identifier: Apache-2.0
"""One operator, several backends: the whole dispatch.

An `Op` holds implementations in priority order. Each declares `Limits` (data) and may add one function for a rule
across arguments; both answer with sentences, never with a bare False. `select` takes the first implementation without a
refusal, or raises with everybody's reasons; `explain` returns the same table before the call.

Everything here is plain Python over shapes, dtypes and devices, so `torch.compile(fullgraph=True)` traces through it.
What is opaque to the compiler is the implementation: `opaque(...)` registers it as the torch operator
`sparse_mla::<stem>_<backend>`.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import torch

from . import config
from .errors import ArgumentError, BackendUnavailableError, UnsupportedError

__all__ = [
    "BACKENDS",
    "EXACT",
    "OPS",
    "WITHIN_2X_BF16",
    "Explanation",
    "Implementation",
    "Limits",
    "Op",
    "Refusal",
    "Tolerance",
    "backend_names",
    "explain",
    "implement",
    "opaque",
    "presence",
]

BACKENDS = ("neuron", "native", "simulated", "reference")  # every name a call may give; "simulated" is never automatic
AUTO_ORDER = ("neuron", "native", "reference")


class Tolerance(NamedTuple):
    """How close an implementation promises to come to the float64 result on decoded records, and why."""

    name: str
    ratio_to_bf16: float  # error at most this many times that of the same math in plain bf16 torch; 0 means bit-exact
    reason: str


EXACT = Tolerance("exact", 0.0, "integers, bytes, or a fixed order of float32 operations")
WITHIN_2X_BF16 = Tolerance("within_2x_bf16", 2.0, "P is rounded to bfloat16 before P @ V and the order of sums is free")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What an implementation accepts, as data. None means no limit. Each field is compared with the property of the
    same meaning
    of the call record (`num_heads`, `formats`, `layouts`, `out_dtype`, `num_rows`, `topk`), where the record has it."""

    max_heads: int | None = None
    formats: frozenset[str] | None = None
    layouts: frozenset[str] | None = None
    out_dtypes: tuple[torch.dtype, ...] | None = (torch.bfloat16, torch.float32)
    max_rows: int | None = None
    max_topk: int | None = None

    def refusals(self, call: Any) -> list[str]:
        """Sentences that say why `call` is outside these limits; empty when it is inside."""
        reasons = []
        if self.max_heads is not None and call.num_heads > self.max_heads:
            reasons.append(f"at most {self.max_heads} heads, got {call.num_heads}")
        if self.formats is not None:
            for name in call.formats:
                if name not in self.formats:
                    reasons.append(f"record format must be one of {', '.join(sorted(self.formats))}, got {name}")
        if self.layouts is not None:
            for name in call.layouts:
                if name not in self.layouts:
                    reasons.append(f"page layout must be one of {', '.join(sorted(self.layouts))}, got {name}")
        out_dtype = getattr(call, "out_dtype", None)
        if self.out_dtypes is not None and out_dtype is not None and out_dtype not in self.out_dtypes:
            names = ", ".join([str(d).removeprefix("torch.") for d in self.out_dtypes])
            reasons.append(f"out_dtype must be one of {names}, got {str(out_dtype).removeprefix('torch.')}")
        if self.max_rows is not None and call.num_rows > self.max_rows:
            reasons.append(f"at most {self.max_rows} query rows, got {call.num_rows}")
        if self.max_topk is not None and call.topk > self.max_topk:
            reasons.append(f"topk at most {self.max_topk}, got {call.topk}")
        return reasons

    def sentence(self) -> str:
        """The limits in words, for docs and `info`."""
        parts = []
        if self.max_heads is not None:
            parts.append(f"heads <= {self.max_heads}")
        if self.formats is not None:
            parts.append("formats " + ", ".join(sorted(self.formats)))
        if self.layouts is not None:
            parts.append("layouts " + ", ".join(sorted(self.layouts)))
        if self.max_rows is not None:
            parts.append(f"rows <= {self.max_rows}")
        if self.max_topk is not None:
            parts.append(f"topk <= {self.max_topk}")
        return "; ".join(parts) if parts else "none"


@dataclass(frozen=True)
class Implementation:
    """One way to execute an operator under one backend. `strategy` tells several ways under the same backend apart."""

    stem: str
    backend: str
    strategy: str
    run: Callable[[Any], Any]
    limits: Limits
    tolerance: Tolerance
    rule: Callable[[Any], list[str]] | None = None
    torch_form: bool = False  # executes as plain torch on the tensor's own device: declared, not a fallback

    @property
    def name(self) -> str:
        return f"{self.backend}:{self.strategy}" if self.strategy else self.backend

    def refusals(self, call: Any) -> list[str]:
        reasons = device_refusals(self.backend, call.device)
        if not reasons:
            reasons = self.limits.refusals(call)
            if self.rule is not None:
                reasons = reasons + self.rule(call)
        return reasons

    def executes(self, call: Any) -> str:
        """What runs, for people: `native`, `neuron:per_row_gather`, or `torch on cpu`."""
        return f"torch on {call.device.type}" if self.torch_form else self.name


class Refusal(NamedTuple):
    """One row of an explanation: an implementation and why it does not take the call (no reasons: it does)."""

    backend: str
    strategy: str
    reasons: tuple[str, ...]


class Explanation(NamedTuple):
    """What a call would do: the implementation chosen (None: the call raises) and every candidate with its reasons."""

    stem: str
    chosen: str | None
    executes: str | None
    rows: tuple[Refusal, ...]

    def __str__(self) -> str:
        lines = [f"{self.stem}: {self.executes or 'no backend accepts this call'}"]
        for row in self.rows:
            name = f"{row.backend}:{row.strategy}" if row.strategy else row.backend
            state = "refuses: " + "; ".join(row.reasons) if row.reasons else "accepts"
            lines.append(f"  {name:<28} {state}")
        return "\n".join(lines)


OPS: dict[str, Op] = {}


@dataclass(eq=False)
class Op:
    """One operator: its stem, the class of its call record, and its implementations in priority order within each
    backend."""

    stem: str
    call_type: type[Any]
    implementations: list[Implementation] = field(default_factory=list)

    def __post_init__(self) -> None:
        OPS[self.stem] = self

    def impl(
        self,
        *backends: str,
        limits: Limits,
        tolerance: Tolerance,
        strategy: str = "",
        rule: Callable[[Any], list[str]] | None = None,
        torch_form: bool = False,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register the decorated function under each backend named. With several backends it receives the backend's
        name
        as the keyword `backend`, since the same launch then differs only in who executes it."""

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            for backend in backends:
                if backend not in BACKENDS:
                    raise ArgumentError(f"{self.stem}: backend must be one of {', '.join(BACKENDS)}, got {backend!r}.")
                run = function if len(backends) == 1 else _bind_backend(function, backend)
                self.implementations.append(
                    Implementation(self.stem, backend, strategy, run, limits, tolerance, rule, torch_form)
                )
            return function

        return register

    def candidates(self, backend: str) -> list[Implementation]:
        """Implementations a call under `backend` may use, best first."""
        order = AUTO_ORDER if backend == "auto" else (backend,)
        found = []
        for name in order:
            if presence(name) == "":
                found += [i for i in self.implementations if i.backend == name]
        return found

    def select(self, call: Any, backend: str | None = None) -> Implementation:
        """The first implementation that accepts `call`. Raises UnsupportedError with all reasons when none does."""
        name = default_backend() if backend is None else backend
        if name != "auto":
            _require_backend(self.stem, name)
        refused: list[tuple[Implementation, list[str]]] = []
        for each in AUTO_ORDER if name == "auto" else (name,):
            if presence(each) != "":
                continue
            for candidate in self.implementations:
                if candidate.backend != each:
                    continue
                reasons = candidate.refusals(call)
                if not reasons:
                    if refused and each == "reference":
                        _warn_reference(self.stem, refused)
                    return candidate
                refused.append((candidate, reasons))
        listed = " ".join([f"{c.name}: {'; '.join(r)}." for c, r in refused]) or f"{name} has no implementation."
        raise UnsupportedError(f"{self.stem}: no implementation under backend {name!r} accepts this call. {listed}")

    def run(self, call: Any, backend: str | None = None) -> Any:
        return self.select(call, backend).run(call)

    def explain(self, call: Any, backend: str | None = None) -> Explanation:
        """The same answer as `select`, as a table, without running anything."""
        name = default_backend() if backend is None else backend
        if name != "auto" and name not in BACKENDS:
            _require_backend(self.stem, name)
        rows: list[Refusal] = []
        chosen: Implementation | None = None
        for each in AUTO_ORDER if name == "auto" else (name,):
            absent = presence(each)
            if absent:
                rows.append(Refusal(each, "", (absent,)))
                continue
            for candidate in [i for i in self.implementations if i.backend == each]:
                reasons = candidate.refusals(call)
                rows.append(Refusal(each, candidate.strategy, tuple(reasons)))
                if chosen is None and not reasons:
                    chosen = candidate
        return Explanation(
            self.stem, chosen.name if chosen else None, chosen.executes(call) if chosen else None, tuple(rows)
        )


def explain(stem: str, *args: Any, backend: str | None = None, **kwargs: Any) -> Explanation:
    """What `sparse_mla.<stem>(*args, **kwargs)` would do, without doing it: which implementation runs and why others
    refuse.

    Raises what the call itself would raise for a bad argument."""
    if stem not in OPS:
        raise ArgumentError(f"explain: op must be one of {', '.join(sorted(OPS))}, got {stem!r}.")
    op = OPS[stem]
    call = args[0] if args and isinstance(args[0], op.call_type) else op.call_type.check(*args, **kwargs)
    return op.explain(call, backend)


# --- backends --------------------------------------------------------------------------------------------------------

_MODULES: dict[str, ModuleType | None] = {}


def backend_module(name: str) -> ModuleType | None:
    """The module behind a backend, loaded on first use; None for `reference`, which needs none."""
    if name not in _MODULES:
        _MODULES[name] = None if name == "reference" else importlib.import_module(f"{__package__}.backends.{name}")
    return _MODULES[name]


_PRESENCE: dict[str, str] = {}


@config.constant_in_graphs
def presence(name: str) -> str:
    """ "" when the backend can run on this machine, else one sentence that says what is missing. Asked once per
    process."""
    if name not in _PRESENCE:
        module = backend_module(name)
        _PRESENCE[name] = "" if module is None else module.presence()
    return _PRESENCE[name]


@config.constant_in_graphs
def default_backend() -> str:
    """SPARSE_MLA_BACKEND as it is now; a compiled graph keeps the value it was traced with."""
    return str(config.get("SPARSE_MLA_BACKEND"))


def backend_names() -> tuple[str, ...]:
    return BACKENDS


_DEVICES = {"native": "cpu", "simulated": "cpu", "neuron": "neuron"}


def device_refusals(backend: str, device: torch.device) -> list[str]:
    wanted = _DEVICES.get(backend)
    if wanted is None or device.type == wanted or (backend == "neuron" and device.type == "xla"):
        return []
    return [f"tensors must be on {wanted}, got {device.type}"]


def _require_backend(stem: str, name: str) -> None:
    if name not in BACKENDS:
        raise ArgumentError(f"{stem}: backend must be auto or one of {', '.join(BACKENDS)}, got {name!r}.")
    absent = presence(name)
    if absent:
        raise BackendUnavailableError(f"{stem}: backend {name!r} is not available here: {absent}")


def _bind_backend(function: Callable[..., Any], backend: str) -> Callable[[Any], Any]:
    def run(call: Any) -> Any:
        return function(call, backend=backend)

    return run


_WARNED: set[str] = set()


@config.constant_in_graphs
def _warn_once(text: str, key: str) -> bool:
    if key not in _WARNED:
        _WARNED.add(key)
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    return True


def _warn_reference(stem: str, refused: Sequence[tuple[Implementation, list[str]]]) -> None:
    # A machine of another kind is no news; a faster backend that is present for this device and refuses is.
    said = [(c, r) for c, r in refused if not (len(r) == 1 and r[0].startswith("tensors must be on "))]
    if said:
        listed = " ".join([f"{c.name}: {'; '.join(r)}." for c, r in said])
        _warn_once(
            f"{stem}: running on the slow reference backend because the faster ones refuse. {listed}", "reference"
        )


# --- opaque operators ------------------------------------------------------------------------------------------------

_LIBRARY = torch.library.Library("sparse_mla", "FRAGMENT")
DISPATCH_KEY = "CompositeExplicitAutograd"  # one plain implementation for every device; there is no backward


def opaque(
    stem: str, backend: str, schema: str, function: Callable[..., Any] | None, fake: Callable[..., Any]
) -> Callable[..., Any]:
    """Register `function` as the torch operator `sparse_mla::<stem>_<backend>` with the argument list `schema`,
    opaque to the
    compiler; `fake` computes the outputs' shapes. Returns the callable operator. Without a function the operator waits
    for `implement`, or for a kernel that is registered in C++."""
    name = f"{stem}_{backend}"
    _LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.needs_exact_strides,))
    if function is not None:
        implement(stem, backend, function)
    torch.library.register_fake(f"sparse_mla::{name}", fake, lib=_LIBRARY)
    operator: Callable[..., Any] = getattr(torch.ops.sparse_mla, name).default
    return operator


def implement(stem: str, backend: str, function: Callable[..., Any]) -> None:
    """Make `function` what the torch operator `sparse_mla::<stem>_<backend>` runs."""
    _LIBRARY.impl(f"{stem}_{backend}", function, DISPATCH_KEY)
