# SPDX-License-Identifier: Apache-2.0
"""Tensors whose first or last byte touches memory that faults: one byte read or written past them ends the process.

`python guarded.py BACKEND [NAME] [--all]` runs the cases of every operator that way and compares with ordinary memory.
Sanitizers see the native core alone; this sees it as it is called, with every stride and offset of the Python side.
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import sys
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from sparse_mla.caches import KVScope, PagedCache
from sparse_mla.dispatch import presence
from sparse_mla.testing.cases import ALL_CASES

PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_kept: list[mmap.mmap] = []  # a mapping must outlive the tensors over it


def guarded_bytes(count: int, at_end: bool = True) -> torch.Tensor:
    """[count] uint8 between two pages without access; the last byte, or else the first, touches one of them."""
    pages = max(1, -(-count // PAGE))
    region = mmap.mmap(-1, (pages + 2) * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(region))
    for guard in (start, start + (pages + 1) * PAGE):
        if _libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(PAGE), 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    _kept.append(region)
    if count == 0:
        return torch.empty(0, dtype=torch.uint8)
    first = PAGE + (pages * PAGE - count if at_end else 0)
    return torch.frombuffer(region, dtype=torch.uint8, count=count, offset=first)


def guarded(x: torch.Tensor, at_end: bool = True) -> torch.Tensor:
    """The same values, shape and strides; nothing of the storage but what the tensor spans, and guards around it."""
    if x.numel() == 0:
        return x
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    source = x.as_strided((span,), (1,)) if x.dim() else x.reshape(1)
    raw = guarded_bytes(span * x.element_size(), at_end)
    raw.copy_(source.view(torch.uint8))
    return raw.view(x.dtype).as_strided(x.shape, x.stride())


def relocate(value: Any, at_end: bool, moved: list[torch.Tensor]) -> Any:
    """A copy of an operator's arguments in guarded memory; every tensor made is added to `moved`."""
    if isinstance(value, torch.Tensor):
        moved.append(guarded(value, at_end))
        return moved[-1]
    if isinstance(value, PagedCache):
        data = relocate(value.data, at_end, moved)
        return PagedCache(
            data,
            value.format,
            value.page_size,
            layout=value.layout,
            e4m3_max=value.e4m3_max,
            region_offset=value.region_offset,
            block_stride=value.block_stride,
        )
    if isinstance(value, KVScope):
        parts = (relocate(part, at_end, moved) for part in (value.cache, value.indices, value.topk_length))
        return KVScope(*parts)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(relocate(part, at_end, moved) for part in value))
    if isinstance(value, (tuple, list)):
        return type(value)(relocate(part, at_end, moved) for part in value)
    if isinstance(value, dict):
        return {name: relocate(part, at_end, moved) for name, part in value.items()}
    if is_dataclass(value) and any(isinstance(getattr(value, f.name), torch.Tensor) for f in fields(value)):
        raise TypeError(f"relocate: {type(value).__name__} holds tensors and is not known here")
    return value


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors of a result or of arguments, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, PagedCache):
        return [value.data]
    if isinstance(value, KVScope):
        return tensors((value.cache, value.indices, value.topk_length))
    if isinstance(value, dict):
        return [t for part in value.values() for t in tensors(part)]
    if isinstance(value, (tuple, list)):
        return [t for part in value for t in tensors(part)]
    return []


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Same shape, dtype and bytes."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def results_of(case: Any, problem: Any, backend: str) -> list[torch.Tensor]:
    """Every tensor that a call returns; of one that writes, its arguments afterwards too."""
    found = case.call(problem, backend)
    if case.op == "store_records":  # the case hands back the builder's memory, not the operator's result
        found = None
    return [*tensors(found), *(tensors(problem.arguments) if case.writes else [])]


def run_guarded(case: Any, backend: str) -> str:
    """Run a case in ordinary and in guarded memory, both ends: "" when the bits agree, else what differs."""
    problem = case.build()
    expected = results_of(case, problem, backend)
    for at_end in (True, False):
        problem = case.build()
        moved: list[torch.Tensor] = []
        problem = problem._replace(arguments=relocate(problem.arguments, at_end, moved))
        before = [] if case.writes else [t.clone() for t in moved]
        actual = results_of(case, problem, backend)
        if len(actual) != len(expected) or not all(map(equal_bits, actual, expected)):
            return f"{case} on {backend}: bits differ beside a guard {'behind' if at_end else 'in front'}"
        if not case.writes and not all(map(equal_bits, moved, before)):
            return f"{case} on {backend}: an input was written"
        del problem, actual, moved, before
    _kept.clear()
    return ""


def small_cases(per_op: int) -> list[Any]:
    """The same few small cases of every operator, spread over its list."""
    chosen = []
    for op in sorted({case.op for case in ALL_CASES}):
        small = [c for c in ALL_CASES if c.op == op and not c.is_full and not c.is_bench_only]
        small = [c for c in small if c.flops <= 12_000_000 and c.nbytes <= 400_000]
        chosen += small[:: max(1, -(-len(small) // per_op))]
    return chosen


def main() -> int:
    faulthandler.enable()
    torch.set_num_threads(2)
    backend = sys.argv[1]
    wanted = [a for a in sys.argv[2:] if not a.startswith("--")]
    if backend == "crash":  # what a read past the end looks like: the test that this file can fail
        block = guarded_bytes(100)
        print("inside", ctypes.string_at(block.data_ptr(), 100) == bytes(100), flush=True)
        ctypes.string_at(block.data_ptr(), 101)
        print("outside", flush=True)
        return 0
    if presence(backend):
        print(f"{backend} is absent: {presence(backend)}")
        return 2
    failures, done, stems = [], 0, set()
    cases = [c for c in ALL_CASES if not c.is_bench_only] if "--all" in sys.argv else small_cases(7)
    for case in cases:
        if wanted and wanted[0] not in str(case):
            continue
        sys.stderr.write(f"\r{case}\n")  # the last line names the case when the process faults
        problem = run_guarded(case, backend)
        failures += [problem] if problem else []
        done += 1
        stems.add(case.op)
    print(f"{done} cases of {len(stems)} operators on {backend}")
    print("\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
