# SPDX-License-Identifier: Apache-2.0
"""`nki.typing`: annotations of kernel parameters. They are accepted and have no effect."""

from __future__ import annotations

from typing import Any

from .tensor import NkiTensor

__all__ = ["mutable_tensor", "tensor"]


class _Annotation(type):
    def __getitem__(cls, shape: Any) -> Any:
        return cls

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, NkiTensor)


class tensor(metaclass=_Annotation):
    """A tensor parameter."""


class mutable_tensor(metaclass=_Annotation):
    """A tensor parameter the kernel writes to."""


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    return tensor
