# SPDX-License-Identifier: Apache-2.0
"""`nki.compiler`: directives for the real compiler. They place or order things; here they have no effect on results."""

from __future__ import annotations

from typing import Any

from .language import no_reorder

__all__ = ["no_reorder"]


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    from .core import not_simulated

    not_simulated(f"nki.compiler.{name}", "compiler directives have no meaning in the simulator")
