# SPDX-License-Identifier: Apache-2.0
"""Caches for cases, laid out here byte by byte so that a fault in `caches.py` cannot hide in its own mirror.

A page holds its records one after another (interleaved), or all data and then all scales (planar, and every index
page). Blocks may be padded, and may begin at an offset inside a larger pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..caches import PagedCache
from ..formats import V41_FP8, RecordFormat
from ..memory import with_huge_pages

__all__ = ["Pages"]


@dataclass(frozen=True, kw_only=True)
class Pages:
    """Geometry of one cache."""

    format: RecordFormat = V41_FP8
    num_pages: int = 8
    page_size: int = 64
    layout: str = "interleaved"
    e4m3_max: int = 448
    padding_bytes: int = 0  # after the records of each block
    region_offset: int = 0  # bytes before the first block; the cache is then a region of a larger pool
    bare: bool = False  # hand over the tensor alone, whose width tells the format

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size

    @property
    def block_stride(self) -> int:
        return self.page_size * self.format.record_bytes + self.padding_bytes

    @property
    def is_sectioned(self) -> bool:
        return self.format.is_index or self.layout == "planar"

    def empty(self, fill: int) -> torch.Tensor:
        """The pool's bytes, [region_offset + num_pages * block_stride]."""
        count = self.region_offset + self.num_pages * self.block_stride
        return with_huge_pages(torch.empty(count, dtype=torch.uint8)).fill_(fill)

    def _section(self, pool: torch.Tensor, start: int, width: int, stride: int) -> torch.Tensor:
        """[num_pages, page_size, width] view of the bytes at `start` of each block, `stride` apart within it."""
        size = (self.num_pages, self.page_size, width)
        return pool.as_strided(size, (self.block_stride, stride, 1), self.region_offset + start)

    def _parts(self, pool: torch.Tensor) -> list[tuple[torch.Tensor, int, int]]:
        fmt = self.format
        if not self.is_sectioned:
            return [(self._section(pool, 0, fmt.record_bytes, fmt.record_bytes), 0, fmt.record_bytes)]
        data = self._section(pool, 0, fmt.data_bytes, fmt.data_bytes)
        scales = self._section(pool, self.page_size * fmt.data_bytes, fmt.scale_bytes, fmt.scale_bytes)
        return [(data, 0, fmt.data_bytes), (scales, fmt.data_bytes, fmt.record_bytes)]

    def write(self, pool: torch.Tensor, slots: torch.Tensor, records: torch.Tensor) -> None:
        """Put records [n, record_bytes] at slots [n]."""
        block, offset = slots.long() // self.page_size, slots.long() % self.page_size
        for section, begin, end in self._parts(pool):
            section[block, offset] = records[:, begin:end]

    def read(self, pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Records [n, record_bytes] of slots [n]."""
        block, offset = slots.long() // self.page_size, slots.long() % self.page_size
        return torch.cat([section[block, offset] for section, _, _ in self._parts(pool)], dim=-1)

    def cache(self, pool: torch.Tensor) -> Any:
        """What an operator takes: a `PagedCache`, or the bare [num_pages, page_size, 1, record_bytes] tensor."""
        fmt = self.format
        if self.region_offset:
            return PagedCache(
                pool,
                fmt,
                self.page_size,
                layout=self.layout,
                e4m3_max=self.e4m3_max,
                region_offset=self.region_offset,
                block_stride=self.block_stride,
            )
        size = (self.num_pages, self.page_size, 1, fmt.record_bytes)
        tensor = pool.as_strided(size, (self.block_stride, fmt.record_bytes, fmt.record_bytes, 1))
        if self.bare:
            return tensor
        return PagedCache(tensor, fmt, self.page_size, layout=self.layout, e4m3_max=self.e4m3_max)
