# SPDX-License-Identifier: Apache-2.0
"""Huge pages behind large CPU tensors.

A new tensor of many megabytes is mapped page by page when it is first written, which takes several times as long as
writing it; and a gather of random records out of 4 KiB pages walks the page tables for each of them. Linux gives 2 MiB
pages to memory that asks for them, which is all that is done here: no value, layout or lifetime changes.
"""

from __future__ import annotations

import ctypes
import math
import sys
from functools import cache
from typing import Any

import torch

__all__ = ["empty_in_huge_pages", "with_huge_pages"]

LARGE_BYTES = 8 << 20  # below, the allocator recycles memory that is mapped already
PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
MADV_HUGEPAGE = 14  # <linux/mman.h>


@cache
def _madvise() -> Any:
    """libc's madvise, or None where the system has none."""
    if not sys.platform.startswith("linux"):
        return None
    function = getattr(ctypes.CDLL(None), "madvise", None)
    if function is not None:
        function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return function


def with_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor. If it is large, on the CPU and not written yet, its memory will come in huge pages.

    The kernel is free to refuse (its setting is `never`, or no huge page is free); nothing depends on it.
    """
    if torch.compiler.is_compiling() or type(tensor) is not torch.Tensor or tensor.device.type != "cpu":
        return tensor  # a traced, fake or foreign tensor has no memory of ours
    if tensor.nbytes >= LARGE_BYTES and _madvise() is not None:
        begin = -(-tensor.data_ptr() // PAGE_BYTES) * PAGE_BYTES
        end = (tensor.data_ptr() + tensor.nbytes) // PAGE_BYTES * PAGE_BYTES
        _madvise()(begin, end - begin, MADV_HUGEPAGE)
    return tensor


def empty_in_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """`torch.empty` on the CPU; if it is large, it begins where a huge page does. An allocator's own place is in the
    middle of one as a rule, and the ends outside whole huge pages, 2 MiB together, are then mapped in 512 steps."""
    nbytes = math.prod(shape) * dtype.itemsize
    if torch.compiler.is_compiling() or nbytes < LARGE_BYTES or _madvise() is None:
        return torch.empty(shape, dtype=dtype)
    memory = torch.empty(nbytes + HUGE_PAGE_BYTES, dtype=torch.uint8)
    if type(memory) is not torch.Tensor:
        return torch.empty(shape, dtype=dtype)
    with_huge_pages(memory)
    skipped = -memory.data_ptr() % HUGE_PAGE_BYTES // dtype.itemsize  # never written, and so no memory
    strides = torch.empty(shape, dtype=dtype, device="meta").stride()
    return torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), skipped, shape, strides)
