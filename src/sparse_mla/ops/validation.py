# SPDX-License-Identifier: Apache-2.0
"""Checks that every operator's call record shares: rank, sizes, dtype, device, grad. One sentence each, no values read.

A shape is written as the docs write it, `"b s_q h_q 512"`: a number must match, a letter is bound on first use and must
agree afterwards, `_` takes anything. The bindings are a plain dict, so later arguments are checked against earlier
ones.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..errors import ArgumentError, DTypeError, ShapeError

__all__ = ["choice", "dtype_name", "memory_limit_bytes", "same_device", "shape_text", "tensor"]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def shape_text(value: torch.Tensor | Iterable[int]) -> str:
    # f-strings, not str(): the compiler can format a symbolic size only so.
    return "[" + ", ".join([f"{n}" for n in (value.shape if isinstance(value, torch.Tensor) else value)]) + "]"


# What a wrong last dimension usually means.
_WIDTH_CAUSES = {
    576: "576 is the V3.2 head width",
    448: "448 is the part without rope",
    192: "192 is a plain MLA head width",
}


def tensor(
    op: str,
    name: str,
    value: object,
    shape: str,
    dtypes: tuple[torch.dtype, ...],
    sizes: dict[str, int],
    cause: str = "",
) -> None:
    """Raise unless `value` is a dense tensor of that shape and dtype that needs no gradient."""
    if not isinstance(value, torch.Tensor):
        raise DTypeError(f"{op}: {name} must be a torch.Tensor, got {type(value).__name__}.")
    letters = shape.split()
    if value.dim() != len(letters):
        raise ShapeError(f"{op}: {name} must be [{', '.join(letters)}], got {shape_text(value)}{_because(cause)}")
    for axis, letter in enumerate(letters):
        size = value.shape[axis]
        if letter == "_":
            continue
        if letter.isdigit():
            wanted = int(letter)
        elif letter in sizes:
            wanted = sizes[letter]
        else:
            sizes[letter] = size
            continue
        if size != wanted:
            why = cause or (_WIDTH_CAUSES.get(int(size), "") if wanted == 512 else "")
            bound = "" if letter.isdigit() else f" with {letter} = {wanted} from an earlier argument"
            raise ShapeError(
                f"{op}: {name} must be [{', '.join(letters)}]{bound}, got {shape_text(value)}{_because(why)}"
            )
    if value.dtype not in dtypes:
        wanted_names = " or ".join([dtype_name(d) for d in dtypes])
        raise DTypeError(f"{op}: {name} must be {wanted_names}, got {dtype_name(value.dtype)}.")
    if value.requires_grad and torch.is_grad_enabled():
        raise DTypeError(
            f"{op}: {name} must not require grad, got requires_grad=True; the operators have no backward, "
            "call them under torch.no_grad() or detach the tensor."
        )


def _because(cause: str) -> str:
    return f"; {cause}." if cause else "."


def same_device(op: str, named: Iterable[tuple[str, torch.Tensor | None]]) -> torch.device:
    """The one device of all tensors given; ShapeError-free, DTypeError when they differ."""
    first: tuple[str, torch.Tensor] | None = None
    for name, value in named:
        if value is None:
            continue
        if first is None:
            first = (name, value)
        elif value.device != first[1].device:
            raise ArgumentError(
                f"{op}: {name} must be on {first[1].device} like {first[0]}, got {value.device}; move it there first."
            )
    if first is None:
        raise ArgumentError(f"{op}: at least one tensor is needed, got none.")
    return first[1].device


def choice(op: str, name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        shown = ", ".join([dtype_name(a) if isinstance(a, torch.dtype) else repr(a) for a in allowed])
        got = dtype_name(value) if isinstance(value, torch.dtype) else repr(value)
        raise ArgumentError(f"{op}: {name} must be one of {shown}, got {got}.")


def memory_limit_bytes(op: str, value: int | None, default: int) -> int:
    """The scratch budget of one call in bytes: the argument, else the configured default."""
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 << 20:
        raise ArgumentError(f"{op}: memory_limit must be at least 1048576 bytes, got {value!r}.")
    return value
