# SPDX-License-Identifier: Apache-2.0
"""Paged caches: where the record of a slot lies, and moving records in and out.

A cache is blocks (pages) at a constant byte distance. A slot is `block * page_size + offset`. Inside a block:

    interleaved   record 0 | record 1 | ...                  a record is [data | scales]
    sectioned     data 0 | data 1 | ... | scales 0 | ...     `layout="planar"`, and index formats whatever the layout

A `PagedCache` is a view: it never copies the tensor it is given, and bytes between two blocks belong to somebody else
(other layers of the same pool, as a rule). `PoolLayout` places several such regions in one block.

Every byte offset is int64: a slot fits int32, the byte it stands for does not.
What surprised us: engines store the same 528-byte records interleaved or planar, with equal shapes and strides, and
nothing in the bytes says which. At page size 1 the two are the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import config
from .errors import ArgumentError, DTypeError, FormatError, ShapeError, SlotRangeError
from .formats import (
    BF16,
    E4M3_CAPS,
    FORMATS,
    RecordFormat,
    by_name,
    by_record_bytes,
    check_e4m3_max,
    decode,
    width_hint,
)
from .memory import with_huge_pages

__all__ = [
    "LAYOUTS",
    "KVScope",
    "PagedCache",
    "PoolLayout",
    "Region",
    "align",
    "allocate",
    "block_stride_alignment",
    "blocks_to_slots",
    "carve_regions",
    "ceil_div",
    "check_slots",
    "convert_layout",
    "gather_decoded",
    "gather_records",
    "scatter_records",
    "slots_to_blocks",
]

LAYOUTS = ("interleaved", "planar")
MAX_SLOTS = 1 << 31  # slots are int32
REGION_ALIGN_BYTES = 32  # regions of a pool start on it, and blocks of one cache are a multiple of it
POOL_ALIGN_BYTES = 128  # whole pool blocks are a multiple of it; sparse paged scoring on GPUs asks for it
_BYTE_DTYPES = (torch.uint8, torch.int8, torch.float8_e4m3fn)
_NUMBERED_FORMATS = tuple(FORMATS.values())
_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16))


def ceil_div(a: int, b: int) -> int:
    """The smallest integer >= a / b."""
    return -(-a // b)


def align(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` >= value."""
    return ceil_div(value, multiple) * multiple


@dataclass(frozen=True, init=False, eq=False)
class PagedCache:
    """A paged cache: a tensor, and what a bare tensor cannot say about it.

    Args:
        data: one of
            [num_blocks, page_size, 1, record_bytes] or [num_blocks, page_size, record_bytes] bytes, any stride between
            blocks, each block contiguous;
            the same with 512 bfloat16 for BF16;
            [num_blocks, block_bytes] bytes: a pool, of which each block holds this cache's page at `region_offset`;
            [bytes]: the pool flat, blocks `block_stride` apart.
            Bytes are uint8, int8 or float8_e4m3fn.
        format: a `RecordFormat` or its name.
        page_size: tokens per block.
        layout: "interleaved" or "planar"; index formats are sectioned whatever it says.
        e4m3_max: the cap records stored here are encoded with, 448 or 224. Reading does not depend on it.
        region_offset: bytes from the start of a block to this cache's page (pools only).
        block_stride: bytes from one block to the next. Default: the tensor's own; for a flat pool the page's bytes.
    Attributes:
        num_blocks, num_slots, page_bytes, record_bytes, block_stride_bytes; is_sectioned.
    """

    data: Tensor
    format: RecordFormat
    page_size: int
    layout: str
    e4m3_max: int
    region_offset: int
    block_stride: int | None
    num_blocks: int = field(init=False)
    block_stride_bytes: int = field(init=False)

    def __init__(
        self,
        data: Tensor,
        format: RecordFormat | str,
        page_size: int,
        *,
        layout: str = "interleaved",
        e4m3_max: int = 448,
        region_offset: int = 0,
        block_stride: int | None = None,
    ) -> None:
        fmt = format if isinstance(format, RecordFormat) else by_name(format)
        if layout not in LAYOUTS:
            raise ArgumentError(f"PagedCache: layout must be interleaved or planar, got {layout!r}.")
        if e4m3_max not in E4M3_CAPS:
            check_e4m3_max(e4m3_max, "PagedCache")
        num_blocks, stride_bytes = _check_geometry(data, fmt, page_size, region_offset, block_stride)
        put = object.__setattr__
        put(self, "data", data)
        put(self, "format", fmt)
        put(self, "page_size", page_size)
        put(self, "layout", layout)
        put(self, "e4m3_max", e4m3_max)
        put(self, "region_offset", region_offset)
        put(self, "block_stride", block_stride)
        put(self, "num_blocks", num_blocks)
        put(self, "block_stride_bytes", stride_bytes)

    def __repr__(self) -> str:
        return (
            f"PagedCache({self.format}, {self.num_blocks} blocks of {self.page_size}, "
            f"{'sectioned' if self.is_sectioned else 'interleaved'}, block stride {self.block_stride_bytes} B, "
            f"offset {self.region_offset} B, {self.data.device})"
        )

    @classmethod
    def of(
        cls,
        cache: PagedCache | Tensor,
        *,
        index: bool = False,
        layout: str | None = None,
        e4m3_max: int | None = None,
        op: str = "PagedCache",
        argument: str = "data",
    ) -> PagedCache:
        """A `PagedCache` as it is; a bare tensor by its width, which says nothing about its layout.

        Args:
            cache: a `PagedCache`, or bytes [num_blocks, page_size, 1, record_bytes] (the 1 may be absent), or bfloat16
                [num_blocks, page_size, 1, 512].
            index: whether an index cache is expected; decides which widths are accepted.
            layout, e4m3_max: of a bare tensor; None asks SPARSE_MLA_LAYOUT and SPARSE_MLA_E4M3_MAX.
            op, argument: how errors name the caller's argument.
        """
        if isinstance(cache, PagedCache):
            return cache
        if not isinstance(cache, Tensor):
            raise DTypeError(f"{op}: {argument} must be a PagedCache or a tensor, got {type(cache).__name__}.")
        if cache.dtype not in _BYTE_DTYPES and (index or cache.dtype != torch.bfloat16):
            raise DTypeError(
                f"{op}: {argument} must be uint8, int8 or float8_e4m3fn bytes{'' if index else ' or bfloat16'}, "
                f"got {_name(cache.dtype)}."
            )
        if cache.dim() not in (3, 4):
            raise ShapeError(
                f"{op}: {argument} must be [num_blocks, page_size, 1, record_bytes], got {list(cache.shape)}; "
                f"a pool needs a PagedCache."
            )
        if cache.dtype == torch.bfloat16:
            fmt = BF16
            if cache.shape[-1] != fmt.elements:
                raise ShapeError(
                    f"{op}: {argument} must be [num_blocks, page_size, 1, {fmt.elements}] as bfloat16, "
                    f"got {list(cache.shape)}."
                )
        else:
            fmt = by_record_bytes(cache.shape[-1], index=index, op=op, argument=argument)
        if layout is None or e4m3_max is None:
            configured = _configured_layout()
            layout = configured[0] if layout is None else layout
            e4m3_max = configured[1] if e4m3_max is None else e4m3_max
        return cls(cache, fmt, cache.shape[1], layout=layout, e4m3_max=e4m3_max)

    @property
    def geometry(self) -> tuple[int, ...]:
        """All but the tensor as integers, for opaque operators, whose schema has no room for objects: what is never
        symbolic in one, page size, region offset, block stride. torch takes 0.12 us to hand over each."""
        kind = (_format_number(self.format) * len(E4M3_CAPS) + E4M3_CAPS.index(self.e4m3_max)) * len(LAYOUTS)
        stride = -1 if self.block_stride is None else self.block_stride
        return kind + LAYOUTS.index(self.layout), self.page_size, self.region_offset, stride

    @classmethod
    def from_geometry(cls, data: Tensor, geometry: Sequence[int]) -> PagedCache:
        """The cache whose `geometry` that is, over `data`."""
        kind, page_size, region_offset, block_stride = geometry
        fmt, e4m3_max, layout = geometry_kind(kind)
        return cls(
            data,
            fmt,
            page_size,
            layout=layout,
            e4m3_max=e4m3_max,
            region_offset=region_offset,
            block_stride=None if block_stride < 0 else block_stride,
        )

    @property
    def record_bytes(self) -> int:
        """Bytes of one token."""
        return self.format.record_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, without what lies between blocks."""
        return self.page_size * self.format.record_bytes

    @property
    def num_slots(self) -> int:
        """Tokens the cache holds; slots are 0 .. num_slots - 1."""
        return self.num_blocks * self.page_size

    @property
    def is_sectioned(self) -> bool:
        """Whether a page is all data, then all scales."""
        return self.format.is_index or self.layout == "planar"

    @property
    def device(self) -> torch.device:
        """Device of the bytes."""
        return self.data.device

    def pages(self) -> Tensor:
        """[num_blocks, page_bytes] uint8 view of the pages, without what lies between them.

        Slices and views only: an `as_strided` over a sliced graph input reads the wrong bytes under some compilers.
        """
        data = self.data if self.data.dtype == torch.uint8 else self.data.view(torch.uint8)
        if data.dim() > 2:
            return data.flatten(1)
        if data.dim() == 2:
            return data.narrow(1, self.region_offset, self.page_bytes)
        if self.num_blocks == 0:
            return data.new_empty((0, self.page_bytes))
        start = self.region_offset
        end = start + (self.num_blocks - 1) * self.block_stride_bytes + self.page_bytes
        return data[start:end].unfold(0, self.page_bytes, self.block_stride_bytes)

    def as_tensor(self) -> Tensor:
        """[num_blocks, page_size, 1, record_bytes] uint8 view: the form upstream's functions take."""
        return self.pages().view(self.num_blocks, self.page_size, 1, self.record_bytes)

    def parts(self) -> tuple[tuple[Tensor, int], ...]:
        """The views that make up a record: ([num_blocks, page_size, n] uint8, first byte inside the record), each.

        One view for interleaved pages, data and scales apart for sectioned ones.
        """
        pages, fmt = self.pages(), self.format
        blocks, page = self.num_blocks, self.page_size
        if not self.is_sectioned or fmt.scale_bytes == 0:
            return ((pages.view(blocks, page, fmt.record_bytes), 0),)
        border = page * fmt.data_bytes
        data = pages[:, :border].view(blocks, page, fmt.data_bytes)
        scales = pages[:, border:].view(blocks, page, fmt.scale_bytes)
        return ((data, 0), (scales, fmt.data_bytes))

    def data_and_scales(self) -> tuple[Tensor, Tensor]:
        """Views ([num_blocks, page_size, data_bytes], [num_blocks, page_size, scale_bytes]) uint8, in either layout."""
        parts, fmt = self.parts(), self.format
        if len(parts) == 2:
            return parts[0][0], parts[1][0]
        records = parts[0][0]
        return records[..., : fmt.data_bytes], records[..., fmt.data_bytes :]


def _check_geometry(
    data: Tensor, fmt: RecordFormat, page_size: int, region_offset: int, block_stride: int | None
) -> tuple[int, int]:
    """(num_blocks, block stride in bytes) of a cache tensor; errors say what is wrong with it.

    This is on the path of every call, so the common case, bytes [num_blocks, page_size, 1, record_bytes], comes first
    and asks the tensor for each fact once.
    """
    if not isinstance(data, Tensor):
        raise DTypeError(f"PagedCache: data must be a tensor, got {type(data).__name__}.")
    if page_size < 1:
        raise ArgumentError(f"PagedCache: page_size must be at least 1, got {page_size}.")
    item = 1 if data.dtype is torch.uint8 else _check_dtype(data, fmt)
    shape, strides = data.shape, data.stride()
    rank = len(shape)
    record = fmt.record_bytes
    page_bytes = page_size * record
    if rank == 4 or rank == 3:
        width = record // item
        if shape[-1] != width or shape[1] != page_size or (rank == 4 and shape[2] != 1):
            _refuse_shape(shape, fmt, page_size, item)
        if strides[-1] != 1 or (page_size > 1 and strides[1] != width):
            raise ShapeError(
                f"PagedCache: the records of a block must be contiguous, got strides {list(strides)} "
                f"for shape {list(shape)}."
            )
        if region_offset != 0:
            raise ArgumentError(
                f"PagedCache: region_offset must be 0 for a tensor of {rank} dimensions, got {region_offset}; "
                f"offsets belong to byte pools [num_blocks, block_bytes]."
            )
        num_blocks, stride = shape[0], strides[0] * item
    elif rank == 2:
        num_blocks, stride = shape[0], strides[0]
        if strides[1] != 1:
            raise ShapeError(f"PagedCache: bytes of a block must be contiguous, got stride(1) = {strides[1]}.")
        if region_offset < 0 or region_offset + page_bytes > shape[1]:
            raise ShapeError(
                f"PagedCache: blocks must hold {page_size} records of {record} bytes from region_offset "
                f"{region_offset} on, up to byte {region_offset + page_bytes}, got blocks of {shape[1]} bytes."
            )
    elif rank == 1:
        stride = page_bytes if block_stride is None else block_stride
        if shape[0] > 1 and strides[0] != 1:
            raise ShapeError(f"PagedCache: a flat pool must be contiguous, got stride(0) = {strides[0]}.")
        if region_offset < 0 or stride < 1:
            raise ArgumentError(
                f"PagedCache: region_offset must be >= 0 and block_stride positive, got {region_offset} and {stride}."
            )
        room = shape[0] - region_offset - page_bytes
        num_blocks = 0 if room < 0 else room // stride + 1
    else:
        raise ShapeError(
            f"PagedCache: data must be [num_blocks, {page_size}, 1, {record // item}], a pool [num_blocks, bytes] "
            f"or [bytes], got {list(shape)}."
        )
    if block_stride is not None and block_stride != stride and num_blocks > 1:
        raise ArgumentError(
            f"PagedCache: block_stride must be the tensor's own {stride} bytes, got {block_stride}; "
            f"give the pool flat, [bytes], to choose it."
        )
    if stride < page_bytes:
        if num_blocks > 1:
            raise ShapeError(
                f"PagedCache: the block stride must be at least the {page_bytes} bytes of a page, got {stride}; "
                f"blocks would overlap."
            )
        stride = page_bytes
    if num_blocks * page_size > MAX_SLOTS:
        raise ShapeError(
            f"PagedCache: data must hold at most 2^31 slots, which is what int32 indices can name, "
            f"got {num_blocks} blocks of {page_size}."
        )
    return num_blocks, stride


def _check_dtype(data: Tensor, fmt: RecordFormat) -> int:
    """Bytes per element of a cache tensor that is not uint8."""
    if data.dtype == torch.bfloat16 and fmt is BF16 and data.dim() >= 3:
        if data.requires_grad:
            raise DTypeError("PagedCache: data must not require grad, got a tensor that does; caches have no backward.")
        return 2
    if data.dtype not in _BYTE_DTYPES:
        also = " (or bfloat16 [num_blocks, page_size, 1, 512])" if fmt is BF16 else ""
        raise DTypeError(f"PagedCache: data must be uint8, int8 or float8_e4m3fn bytes{also}, got {_name(data.dtype)}.")
    return 1


def _refuse_shape(shape: Sequence[int], fmt: RecordFormat, page_size: int, item: int) -> None:
    """Say what is wrong with the shape of a [num_blocks, page_size, (1,) record] tensor."""
    width = fmt.record_bytes // item
    if shape[-1] != width:
        looks_like = width_hint(shape[-1] * item)
        hint = f"; {shape[-1] * item} is {looks_like}" if looks_like else ""
        raise FormatError(
            f"PagedCache: data must have {fmt} records of {fmt.record_bytes} bytes, got {shape[-1] * item}{hint}."
        )
    one = "1, " if len(shape) == 4 else ""
    raise ShapeError(f"PagedCache: data must be [num_blocks, {page_size}, {one}{width}], got {list(shape)}.")


def _format_number(fmt: RecordFormat) -> int:
    for number, known in enumerate(_NUMBERED_FORMATS):
        if known is fmt:
            return number
    raise FormatError(f"PagedCache.geometry: format must be one of {', '.join(FORMATS)}, got {fmt}.")


def geometry_kind(kind: int) -> tuple[RecordFormat, int, str]:
    """(format, e4m3_max, layout) of the first integer of a `PagedCache.geometry`."""
    rest, layout = divmod(kind, len(LAYOUTS))
    number, cap = divmod(rest, len(E4M3_CAPS))
    return _NUMBERED_FORMATS[number], E4M3_CAPS[cap], LAYOUTS[layout]


@config.constant_in_graphs
def _configured_layout() -> tuple[str, int]:
    """(layout, e4m3 cap) of caches that come as bare tensors; a compiled graph keeps what it was traced with."""
    return config.get("SPARSE_MLA_LAYOUT"), config.get("SPARSE_MLA_E4M3_MAX")


@dataclass(frozen=True, init=False, eq=False)
class KVScope:
    """One cache and the slots of it that each query attends to.

    Args:
        cache: a `PagedCache`, or a bare tensor whose format is told by its width (see `PagedCache.of`).
        indices: [b, s_q, topk] int32 slots; -1 means empty.
        topk_length: [b] int32 or None; columns from it on are ignored.
    """

    cache: PagedCache
    indices: Tensor
    topk_length: Tensor | None

    def __init__(self, cache: PagedCache | Tensor, indices: Tensor, topk_length: Tensor | None = None) -> None:
        put = object.__setattr__
        put(self, "cache", PagedCache.of(cache, op="KVScope", argument="cache"))
        put(self, "indices", indices)
        put(self, "topk_length", topk_length)


def slots_to_blocks(slots: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Slots (any integer dtype) to (block, offset), int64. Negative slots are the caller's to mask."""
    wide = slots.to(torch.int64)
    block = wide.div(page_size, rounding_mode="floor")
    return block, wide - block * page_size


def blocks_to_slots(block: Tensor, offset: Tensor | int, page_size: int) -> Tensor:
    """(block, offset) to slots, int64; a negative block gives -1."""
    wide = block.to(torch.int64)
    return torch.where(wide < 0, -1, wide * page_size + offset)


def check_slots(
    cache: PagedCache, slots: Tensor, *, op: str, argument: str = "slots", allow_empty: bool = True
) -> tuple[int, int]:
    """Range-check slots by value and return their (lowest, highest); (-1, -1) when there are none.

    Raises:
        DTypeError: not int32 or int64.
        SlotRangeError: a slot that is neither -1 (when `allow_empty`) nor inside the cache.
    """
    _check_slot_dtype(slots, op, argument)
    if slots.numel() == 0:
        return -1, -1
    low_value, high_value = torch.aminmax(slots)
    low, high = int(low_value), int(high_value)
    lowest = -1 if allow_empty else 0
    if low < lowest or high >= cache.num_slots:
        bad = low if low < lowest else high
        empty = "-1 or " if allow_empty else ""
        raise SlotRangeError(
            f"{op}: {argument} must be {empty}0 .. {cache.num_slots - 1}, got {bad}; "
            f"the cache has {cache.num_blocks} blocks of {cache.page_size}."
        )
    return low, high


def _check_slot_dtype(slots: Tensor, op: str, argument: str) -> None:
    if not isinstance(slots, Tensor) or slots.dtype not in (torch.int32, torch.int64):
        got = _name(slots.dtype) if isinstance(slots, Tensor) else type(slots).__name__
        raise DTypeError(f"{op}: {argument} must be int32 or int64, got {got}.")


def gather_records(
    cache: PagedCache, slots: Tensor, *, op: str = "gather_records", checked: bool | None = None
) -> Tensor:
    """The records of `slots`, reading no other byte of the cache.

    Args:
        cache: the cache.
        slots: int32 or int64 of any shape; -1 gives a record of zero bytes, which decodes to zeros.
        op: how errors name the caller.
        checked: whether to range-check the slots first; None asks SPARSE_MLA_CHECKS. Unchecked, a slot outside the
            cache is undefined.
    Returns:
        [*slots.shape, record_bytes] uint8, in record order (data, then scales) whatever the layout.
    """
    if checked is None:
        checked = bool(config.get("SPARSE_MLA_CHECKS"))
    flat = slots.reshape(-1)
    if checked:
        low, _ = check_slots(cache, flat, op=op)
    else:
        _check_slot_dtype(slots, op, "slots")
        low = int(flat.min()) if flat.numel() else -1
    shape = (*slots.shape, cache.record_bytes)
    if low >= 0:
        return _read(cache, flat).reshape(shape)
    records = torch.zeros((flat.numel(), cache.record_bytes), dtype=torch.uint8, device=cache.device)
    present = (flat >= 0).nonzero().squeeze(-1)
    if present.numel():
        records[present] = _read(cache, flat[present])
    return records.reshape(shape)


def gather_decoded(
    cache: PagedCache,
    slots: Tensor,
    *,
    nan: str = "zero",
    dtype: torch.dtype = torch.bfloat16,
    op: str = "gather_decoded",
    checked: bool | None = None,
) -> Tensor:
    """`decode(gather_records(cache, slots))`: [*slots.shape, elements] in `dtype`; -1 gives zeros."""
    return decode(gather_records(cache, slots, op=op, checked=checked), cache.format, nan=nan, dtype=dtype, op=op)


def scatter_records(cache: PagedCache, slots: Tensor, records: Tensor, *, op: str = "scatter_records") -> None:
    """Write records into slots.

    Args:
        cache: the cache, written in place.
        slots: [n] int32 or int64. -1 is skipped. Of equal slots the last one wins, always.
        records: [n, record_bytes] uint8 (or int8, float8_e4m3fn views).
        op: how errors name the caller.
    Raises:
        SlotRangeError: any other slot outside the cache; nothing has been written then.
    """
    if not isinstance(slots, Tensor) or slots.dim() != 1:
        shape = list(slots.shape) if isinstance(slots, Tensor) else type(slots).__name__
        raise ShapeError(f"{op}: slots must be [n], got {shape}.")
    if not isinstance(records, Tensor) or records.dtype not in _BYTE_DTYPES:
        got = _name(records.dtype) if isinstance(records, Tensor) else type(records).__name__
        raise DTypeError(f"{op}: records must be uint8, int8 or float8_e4m3fn bytes, got {got}.")
    if tuple(records.shape) != (slots.shape[0], cache.record_bytes):
        raise ShapeError(
            f"{op}: records must be [{slots.shape[0]}, {cache.record_bytes}] for {cache.format}, "
            f"got {list(records.shape)}."
        )
    low, high = check_slots(cache, slots, op=op)
    if high < 0:
        return
    kept = _last_of_each(slots)
    if low < 0:
        kept = kept[slots[kept] >= 0]
    records = (records if records.dtype == torch.uint8 else records.view(torch.uint8)).index_select(0, kept)
    block, offset = slots_to_blocks(slots[kept], cache.page_size)
    for view, first in cache.parts():
        # A clone, since `contiguous` keeps the odd row stride of a single row, which no wider word can view.
        source = records[:, first : first + view.shape[-1]].clone(memory_format=torch.contiguous_format)
        word = _widest_word(view)
        if word is not None:
            view, source = view.view(word), source.view(word)
        view[block, offset] = source


def _last_of_each(slots: Tensor) -> Tensor:
    """Positions of the last occurrence of every distinct slot."""
    ordered, position = torch.sort(slots, stable=True)
    last = torch.ones_like(ordered, dtype=torch.bool)
    last[:-1] = ordered[1:] != ordered[:-1]
    return position[last]


def _read(cache: PagedCache, slots: Tensor) -> Tensor:
    """[n] slots, all inside the cache, to [n, record_bytes]."""
    block, offset = slots_to_blocks(slots, cache.page_size)
    parts = []
    for view, _ in cache.parts():
        word = _widest_word(view)
        read = view[block, offset] if word is None else view.view(word)[block, offset].view(torch.uint8)
        parts.append(read)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _widest_word(view: Tensor) -> torch.dtype | None:
    """The widest integer dtype a byte view can be seen as; gathering words is up to eight times faster than bytes."""
    common = math.gcd(view.shape[-1], view.stride(0), view.stride(1), view.storage_offset())
    for size, dtype in _WORDS:
        if common % size == 0:
            return dtype
    return None


def convert_layout(cache: PagedCache, layout: str) -> PagedCache:
    """A new cache with the same records in another layout, blocks densely packed. Index caches keep their sections."""
    converted = allocate(
        cache.format, cache.num_blocks, cache.page_size, layout=layout, e4m3_max=cache.e4m3_max, device=cache.device
    )
    for target, source in zip(converted.data_and_scales(), cache.data_and_scales(), strict=True):
        target.copy_(source)
    return converted


def allocate(
    format: RecordFormat | str,
    num_blocks: int,
    page_size: int,
    *,
    layout: str = "interleaved",
    e4m3_max: int = 448,
    block_stride: int | None = None,
    device: torch.device | str = "cpu",
) -> PagedCache:
    """A new cache of zero bytes (every slot decodes to zeros).

    Args:
        format, num_blocks, page_size, layout, e4m3_max, device: of the cache.
        block_stride: bytes from block to block. Default: the bytes of a page.
    """
    fmt = by_name(format)
    if num_blocks < 0 or page_size < 1:
        raise ArgumentError(f"allocate: num_blocks must be >= 0 and page_size >= 1, got {num_blocks} and {page_size}.")
    page_bytes = page_size * fmt.record_bytes
    stride = page_bytes if block_stride is None else block_stride
    if stride < page_bytes:
        raise ArgumentError(f"allocate: block_stride must be at least the {page_bytes} bytes of a page, got {stride}.")
    pool = with_huge_pages(torch.zeros((num_blocks, stride), dtype=torch.uint8, device=device))
    data = pool[:, :page_bytes].view(num_blocks, page_size, 1, fmt.record_bytes)
    return PagedCache(data, fmt, page_size, layout=layout, e4m3_max=e4m3_max)


def block_stride_alignment(formats: RecordFormat | str | Iterable[RecordFormat | str], *, pool: bool = False) -> int:
    """Bytes a block stride must be a multiple of, so that every known reader takes the cache.

    A main format asks for whole records and REGION_ALIGN_BYTES (POOL_ALIGN_BYTES when it shares a pool's blocks), an
    index format for the alignment alone.
    """
    names: Sequence[Any] = [formats] if isinstance(formats, str | RecordFormat) else list(formats)
    unit = POOL_ALIGN_BYTES if pool else REGION_ALIGN_BYTES
    records = [fmt.record_bytes for fmt in map(by_name, names) if not fmt.is_index]
    return math.lcm(unit, *records)


@dataclass(frozen=True)
class Region:
    """One cache's page inside a pool block: a name, the record format, and its entries per block."""

    name: str
    format: RecordFormat
    page_size: int

    @property
    def page_bytes(self) -> int:
        """Bytes of the page."""
        return self.page_size * self.format.record_bytes


@dataclass(frozen=True, init=False)
class PoolLayout:
    """Several regions in one physical block, one after another.

    Args:
        regions: in the order they lie in.
        tokens_per_block: tokens a block stands for; a region of ratio R has tokens_per_block / R entries.
    Attributes:
        offsets: first byte of every region; block_bytes: end of the last; block_stride: bytes per block of the pool.
    """

    regions: tuple[Region, ...]
    tokens_per_block: int
    offsets: tuple[int, ...] = field(init=False)
    block_bytes: int = field(init=False)
    block_stride: int = field(init=False)

    def __init__(self, regions: Iterable[Region], tokens_per_block: int = 128) -> None:
        regions = tuple(regions)
        names = [region.name for region in regions]
        if not regions or len(set(names)) != len(names):
            raise ArgumentError(f"PoolLayout: regions must be at least one, with distinct names, got {names}.")
        if tokens_per_block < 1 or any(region.page_size < 1 for region in regions):
            raise ArgumentError("PoolLayout: tokens_per_block and every page_size must be at least 1.")
        offsets, end = [], 0
        for region in regions:
            start = align(end, REGION_ALIGN_BYTES)
            offsets.append(start)
            end = start + region.page_bytes
        put = object.__setattr__
        put(self, "regions", regions)
        put(self, "tokens_per_block", tokens_per_block)
        put(self, "offsets", tuple(offsets))
        put(self, "block_bytes", end)
        put(self, "block_stride", align(end, block_stride_alignment((r.format for r in regions), pool=True)))

    @property
    def bytes_per_token(self) -> float:
        """Bytes of the regions per token, without the padding of the block."""
        return self.block_bytes / self.tokens_per_block

    @property
    def padded_bytes_per_token(self) -> float:
        """Bytes of the pool per token."""
        return self.block_stride / self.tokens_per_block

    def num_blocks(self, *, memory_bytes: int | None = None, num_tokens: int | None = None) -> int:
        """Blocks that fit a memory budget, or that hold so many tokens; with both, ArgumentError unless they fit."""
        if memory_bytes is None and num_tokens is None:
            raise ArgumentError("PoolLayout.num_blocks: memory_bytes or num_tokens must be given.")
        if (memory_bytes or 0) < 0 or (num_tokens or 0) < 0:
            raise ArgumentError(
                f"PoolLayout.num_blocks: memory_bytes and num_tokens must be >= 0, got {memory_bytes} and {num_tokens}."
            )
        fit = None if memory_bytes is None else memory_bytes // self.block_stride
        need = None if num_tokens is None else ceil_div(num_tokens, self.tokens_per_block)
        if fit is not None and need is not None and need > fit:
            raise ArgumentError(
                f"PoolLayout.num_blocks: memory_bytes must be at least {need * self.block_stride} "
                f"for {num_tokens} tokens, got {memory_bytes}."
            )
        return need if need is not None else fit if fit is not None else 0

    def allocate(self, num_blocks: int, *, device: torch.device | str = "cpu") -> Tensor:
        """A pool [num_blocks, block_stride] of zero bytes."""
        return with_huge_pages(torch.zeros((num_blocks, self.block_stride), dtype=torch.uint8, device=device))


def carve_regions(
    pool: Tensor, layout: PoolLayout, *, page_layout: str = "interleaved", e4m3_max: int = 448
) -> dict[str, PagedCache]:
    """The regions of a pool as caches by name. They are views: all of them write into `pool`.

    Args:
        pool: [num_blocks, block_stride] or [num_blocks * block_stride] bytes.
        layout: what lies where in a block.
        page_layout, e4m3_max: of the main regions, as in `PagedCache`.
    """
    if pool.dim() == 2 and pool.shape[1] < layout.block_bytes:
        raise ShapeError(f"carve_regions: pool blocks must have {layout.block_bytes} bytes, got {pool.shape[1]}.")
    if pool.dim() == 1 and pool.shape[0] % layout.block_stride:
        raise ShapeError(
            f"carve_regions: a flat pool must be a multiple of {layout.block_stride} bytes, got {pool.shape[0]}."
        )
    if pool.dim() not in (1, 2):
        raise ShapeError(f"carve_regions: pool must be [num_blocks, block_stride] or [bytes], got {list(pool.shape)}.")
    return {
        region.name: PagedCache(
            pool,
            region.format,
            region.page_size,
            layout=page_layout,
            e4m3_max=e4m3_max,
            region_offset=offset,
            block_stride=layout.block_stride if pool.dim() == 1 else None,
        )
        for region, offset in zip(layout.regions, layout.offsets, strict=True)
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
