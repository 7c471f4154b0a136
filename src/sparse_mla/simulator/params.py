# SPDX-License-Identifier: Apache-2.0
"""How a simulation behaves. Pessimistic by default: what hardware or its compiler would refuse is an error here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import ArgumentError

__all__ = ["SimulatorParams"]


@dataclass(frozen=True, kw_only=True)
class SimulatorParams:
    """Options of one simulation.

    Every field is keyword-only and has a default.
    """

    gen: int | None = None
    """NeuronCore generation whose limits hold: 2 (trn1), 3 (trn2) or 4 (trn3). None: as NEURON_PLATFORM_TARGET_OVERRIDE
    says, trn2 when it is unset."""

    checks: bool = True
    """False: hardware rules, capacity and initialised-memory tracking are skipped; shapes are still checked."""

    strict: bool = False
    """True: what some front ends accept and hardware was seen to refuse is an error, not a warning."""

    aws_compat: bool = False
    """True: relax SBUF capacity, overlap of addressed tiles, what two cores may share and name in a barrier, and
    uninitialised reads to the behaviour of the vendor's simulator, and make dataclasses as published kernels expect:
    fields may be left out, and attributes without an annotation are fields. For running third-party kernels."""

    timing: bool = True
    """False: no time estimate is made and instruction records are not kept."""

    max_instructions: int = 50_000_000
    """Instructions (all cores) after which a launch is stopped; a loop on device-side conditions may never end."""

    poison_seed: int = 0
    """Seed of the bytes fresh integer memory holds. Fresh float memory is NaN."""

    log: Callable[[str], None] | None = None
    """Called with one line per instruction; None: no log."""

    show_warnings: bool = True
    """True: each distinct warning is shown once through Python's `warnings`; they are always kept in the result."""

    def __post_init__(self) -> None:
        if self.gen not in (None, 2, 3, 4):
            raise ArgumentError(f"SimulatorParams: gen must be 2, 3, 4 or None, got {self.gen!r}.")
        if self.max_instructions < 1:
            raise ArgumentError(f"SimulatorParams: max_instructions must be positive, got {self.max_instructions}.")
