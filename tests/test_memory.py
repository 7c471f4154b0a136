# SPDX-License-Identifier: Apache-2.0
"""Huge pages: asked for where the system has them, and nothing else changes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sparse_mla import allocate, memory
from sparse_mla.memory import HUGE_PAGE_BYTES, LARGE_BYTES, empty_in_huge_pages, with_huge_pages

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags(address: int) -> list[str]:
    """VmFlags of the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("no mapping holds the address")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the flags of a mapping")
@pytest.mark.skipif(not SETTING.exists(), reason="this kernel was built without transparent huge pages")
def test_large_memory_asks_for_huge_pages_and_small_memory_does_not() -> None:
    large = torch.zeros(4 * LARGE_BYTES, dtype=torch.uint8)  # above what malloc takes from its heap
    assert with_huge_pages(large) is large
    assert "hg" in flags(large.data_ptr() + LARGE_BYTES)
    assert not large.any()
    cache = allocate("V41_FP8", num_blocks=4 * LARGE_BYTES // 528 // 64, page_size=64)
    assert "hg" in flags(cache.data.data_ptr() + LARGE_BYTES)
    asked: list[int] = []
    small = torch.zeros(LARGE_BYTES - 1, dtype=torch.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "_madvise", lambda: lambda begin, *_: asked.append(begin))
        with_huge_pages(small)
        assert not asked
        with_huge_pages(large[1:])  # whole pages inside the tensor only
    assert asked
    assert asked[0] % 4096 == 0
    assert asked[0] > large.data_ptr()


def test_tensors_without_memory_of_ours_are_left_alone() -> None:
    with FakeTensorMode():
        fake = with_huge_pages(torch.empty(2 * LARGE_BYTES, dtype=torch.uint8))
    assert fake.shape == (2 * LARGE_BYTES,)
    meta = torch.empty(2 * LARGE_BYTES, dtype=torch.uint8, device="meta")
    assert with_huge_pages(meta) is meta


def test_a_system_without_huge_pages_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_madvise", lambda: None)
    assert not with_huge_pages(torch.zeros(2 * LARGE_BYTES, dtype=torch.uint8)).any()


def test_compiled_code_allocates_without_a_graph_break() -> None:
    made = torch.compile(
        lambda: with_huge_pages(torch.zeros(2 * LARGE_BYTES, dtype=torch.uint8)), fullgraph=True, backend="aot_eager"
    )()
    assert not made.any()


def test_large_results_begin_with_a_huge_page() -> None:
    rows = 4 * LARGE_BYTES // 1024
    large = empty_in_huge_pages((rows, 2, 256), torch.bfloat16)
    assert large.shape == (rows, 2, 256)
    assert large.is_contiguous()
    assert not large._is_view()
    if sys.platform == "linux":
        assert large.data_ptr() % HUGE_PAGE_BYTES == 0
        assert not SETTING.exists() or "hg" in flags(large.data_ptr())
    large.fill_(1)
    small = empty_in_huge_pages((LARGE_BYTES // 1024 - 1, 512), torch.bfloat16)
    assert small.storage_offset() == 0
    with FakeTensorMode():
        assert empty_in_huge_pages((rows, 512), torch.bfloat16).shape == (rows, 512)
