# SPDX-License-Identifier: Apache-2.0
"""The torch operator `sparse_decode_native`: a kernel in C++ where torch allows it, else the Python function.

torch takes 8 us to hand thirteen arguments to Python and the results back. csrc/torch_operator.cc is called by torch
itself, through torch's stable C interface; this module looks up the addresses of that interface in the torch that is
loaded, answers what C++ cannot know (page layouts, the CPU target), and does every call that is not ordinary.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch

from .. import _native, config  # type: ignore[attr-defined]
from ..caches import KVScope, PagedCache
from ..dispatch import DISPATCH_KEY, implement, opaque
from ..errors import SparseMlaError, UnsupportedError
from ..ops.sparse_decode import SCHEMA, SPARSE_DECODE, SparseDecodeCall, fake_attention
from . import native

__all__ = ["register"]


def register() -> Any:
    """The operator, registered. C++ runs it if torch offers the interface and the kernel passes its trial."""
    operator = opaque("sparse_decode", "native", SCHEMA, None, fake_attention)
    if not _register_kernel(operator):
        implement("sparse_decode", "native", native._sparse_decode)
    return operator


def _register_kernel(operator: Any) -> bool:
    interface = ctypes.PyDLL(torch._C.__file__)  # loaded already; names are also looked up in what it depends on
    try:
        addresses = [_address(interface, name) for name in _native.torch_functions()]
    except AttributeError:  # torch before 2.13
        return False

    def page_layout(shape: tuple[int, ...], stride: tuple[int, ...], dtype: str, geometry: tuple[int, ...]) -> Any:
        return native._page_layout(shape, stride, getattr(torch, dtype), geometry)

    def target() -> int:
        return native._target_number(config.get("SPARSE_MLA_CPU_TARGET"))

    opaque("sparse_decode", "native_in_python", SCHEMA, _in_python, fake_attention)
    place = config.place_of("SPARSE_MLA_CPU_TARGET")
    if not _native.register_torch_operator(tuple(addresses), DISPATCH_KEY, page_layout, target, *place):
        return False
    if not _passes_its_trial(operator):
        _native.unregister_torch_operator()
        return False
    return True


def _address(interface: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(getattr(interface, name), ctypes.c_void_p).value or 0


def _passes_its_trial(operator: Any) -> bool:
    """Whether an error of ours arrives as itself: that rests on how torch was built. In a thread of its own, which no
    dispatch mode and no tracer watches."""
    found: list[bool] = []

    def attempt() -> None:
        wrong = torch.zeros(1)
        try:
            operator(wrong, wrong, wrong, None, None, None, None, [0] * 4, 1.0, None, torch.bfloat16, 0, True)
        except SparseMlaError:
            found.append(True)
        except Exception:
            found.append(False)

    trial = threading.Thread(target=attempt, daemon=True)
    trial.start()
    trial.join()
    return found == [True]


def _in_python(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A call that the kernel did not take: an argument has to be copied, or is wrong. An error is left for the kernel
    to raise, since torch would make a RuntimeError of it between here and there."""
    try:
        _refuse(*arguments)
        return native._sparse_decode(*arguments)
    except BaseException as error:
        _native.leave_error(error)
        return torch.empty(0), torch.empty(0)


def _refuse(
    q: torch.Tensor,
    cache0: torch.Tensor,
    indices0: torch.Tensor,
    length0: torch.Tensor | None,
    cache1: torch.Tensor | None,
    indices1: torch.Tensor | None,
    length1: torch.Tensor | None,
    geometry: list[int],
    softmax_scale: float,
    attn_sink: torch.Tensor | None,
    out_dtype: torch.dtype,
    memory_limit: int,
    checks: bool,
) -> None:
    """Raise for arguments the public function would not have passed on."""
    half = len(geometry) // (1 if cache1 is None else 2)
    scopes = [KVScope(PagedCache.from_geometry(cache0, geometry[:half]), indices0, length0)]
    if cache1 is not None and indices1 is not None:
        scopes.append(KVScope(PagedCache.from_geometry(cache1, geometry[half:]), indices1, length1))
    sink = None if attn_sink is None else attn_sink.detach()
    call = SparseDecodeCall.check(q.detach(), scopes, attn_sink=sink, out_dtype=out_dtype)
    for implementation in SPARSE_DECODE.implementations:
        if implementation.backend == "native" and (reasons := implementation.refusals(call)):
            raise UnsupportedError(f"sparse_decode: native does not take this call: {'; '.join(reasons)}.")
