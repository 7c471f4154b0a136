# SPDX-License-Identifier: Apache-2.0
"""`nki.collectives`: importable so that files mentioning it load; every operation refuses by name."""

from __future__ import annotations

from typing import Any

from .core import not_simulated
from .tensor import NKIObject

__all__ = ["ReplicaGroup"]


class ReplicaGroup(NKIObject):
    """A group of ranks; carried, never used."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.args = args


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)

    def refuse(*args: Any, **kwargs: Any) -> None:
        not_simulated(f"nki.collectives.{name}", "collectives between chips")

    return refuse
