# SPDX-License-Identifier: Apache-2.0
"""What the host side of every launch shares: who executes, padding, addressing of records, decoding in torch.

A launch is plain torch around one kernel call, traced through by the compiler and never hidden in an opaque operator.
The torch of it must survive compilation for Neuron, which `testing/neuron_graph.py` proves for each launch:

* no dtype bitcast (a fused one becomes a numeric conversion): bytes become numbers by integer arithmetic and `exp2`;
* no `as_strided` over a sliced view (it reads a contiguous copy with the original strides: wrong bytes);
* one gather of whole units, never of single bytes; int32 indices, and int32 arithmetic on codes;
* no boolean index, `nonzero`, `.item()`: choices are `torch.where`;
* a power of two of query rows per kernel call and per record decode (the compiler rejects some other counts, 6 for
  instance).

Unit indices address a record inside the whole pool: the pool is [units, g] bytes, g the greatest common divisor of
everything an address is made of, and a record is consecutive units. They are computed in int32 and never pass through
float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import torch

from .. import config
from ..caches import PagedCache
from ..errors import ArgumentError, BackendUnavailableError, SlotRangeError
from ..formats import BF16, E2M1, E4M3FN, RecordFormat

__all__ = [
    "BIAS_PAD",
    "CHUNK",
    "EMPTY",
    "EMPTY_UNIT",
    "EXECUTORS",
    "Launched",
    "PoolUnits",
    "blocks_of_rows",
    "call_kernel",
    "checks_now",
    "columns",
    "cores",
    "decode_rows",
    "dtype_refusal",
    "e4m3_kind",
    "gather_bytes",
    "gather_refusal",
    "gather_rows",
    "lanes",
    "load_cache",
    "pad_to",
    "padded_rows",
    "pool_refusal",
    "pool_units",
    "power_of_two",
    "recording",
    "refuse_code",
    "unit_indices",
]

EMPTY = -1e30  # bias of an empty slot; exp of it underflows to exactly 0 beside any finite logit
BIAS_PAD = 16  # columns before the per-slot bias
CHUNK = 128  # keys per chunk, the kernels' tile
EMPTY_UNIT = -1  # index of an empty slot: outside every pool, so the gather skips it
SMALLEST_UNIT = 4  # bytes of one gathered unit in torch; the compiler crashes on gathers of single bytes
DEFAULT_CORES = 2  # physical cores behind one logical core of trn2
INT32_END = 1 << 31


# --- who executes ----------------------------------------------------------------------------------------------------


class Launched(NamedTuple):
    """One kernel call as it was made."""

    kernel: Any
    cores: int
    tensors: dict[str, torch.Tensor]
    constants: dict[str, Any]


# backend name -> how it calls wrap_nki(kernel)[cores](**arguments), put there by the backend's module
EXECUTORS: dict[str, Callable[[Any, int, dict[str, Any]], Any]] = {}
_recorders: list[list[Launched]] = []


def call_kernel(backend: str, kernel: Any, /, **arguments: Any) -> Any:
    """Run one kernel under a backend on as many cores as the logical core has. Traced through."""
    execute = EXECUTORS.get(backend)
    if execute is None:
        raise BackendUnavailableError(f"{backend}: nothing executes kernels under this name here.")
    degree = cores()
    for recorder in _recorders:
        tensors = {n: v for n, v in arguments.items() if isinstance(v, torch.Tensor)}
        constants = {n: v for n, v in arguments.items() if n not in tensors}
        recorder.append(Launched(kernel, degree, tensors, constants))
    return execute(kernel, degree, arguments)


class recording:
    """`with recording() as launched:` collects every kernel call made inside, for cost estimates and tests."""

    def __enter__(self) -> list[Launched]:
        self.list: list[Launched] = []
        _recorders.append(self.list)
        return self.list

    def __exit__(self, *_: object) -> None:
        _recorders.remove(self.list)


@config.constant_in_graphs
def cores() -> int:
    """Physical cores per logical core: NEURON_LOGICAL_NC_CONFIG, else 2."""
    return int(config.get("NEURON_LOGICAL_NC_CONFIG")) or DEFAULT_CORES


@config.constant_in_graphs
def lanes() -> int:
    """Bits of e2m1 codes per bit operation: SPARSE_MLA_NEURON_LANES."""
    return int(config.get("SPARSE_MLA_NEURON_LANES"))


def checks_now(checks: bool) -> bool:
    """Whether a launch may look at values: checked mode, and not while a graph is being traced."""
    return checks and not torch.compiler.is_compiling()


# --- padding ---------------------------------------------------------------------------------------------------------


def power_of_two(n: int) -> int:
    """The smallest power of two >= n."""
    return 1 << max(0, n - 1).bit_length()


def padded_rows(rows: int, limit: int) -> int:
    """Rows of one kernel call for `rows` rows in blocks of at most `limit`."""
    return power_of_two(min(rows, limit))


def blocks_of_rows(rows: int, limit: int) -> Iterator[tuple[int, int, int]]:
    """(first row, rows, padded rows) of each kernel call; limit is a power of two."""
    for start in range(0, rows, limit):
        count = min(limit, rows - start)
        yield start, count, power_of_two(count)


def pad_to(x: torch.Tensor, size: int, dim: int, value: float | int | bool) -> torch.Tensor:
    """`x` lengthened along `dim` with `value`."""
    missing = size - x.shape[dim]
    if missing == 0:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat((x, x.new_full(shape, value)), dim=dim)


def columns(indices: torch.Tensor) -> torch.Tensor:
    """[rows, chunks * 128] to [128, rows * chunks]: column r * chunks + c holds keys 128 c .. of row r, a key per
    partition."""
    rows, width = indices.shape
    chunks = width // CHUNK
    return indices.reshape(rows * chunks, CHUNK).transpose(0, 1).contiguous()


# --- addressing ------------------------------------------------------------------------------------------------------


class PoolUnits(NamedTuple):
    """A cache as a pool of units: [units, unit] and how many units each part of an address takes."""

    pool: torch.Tensor  # [units, unit] uint8, or [slots, 512] bfloat16
    page_size: int
    block: int  # units from block to block
    base: int  # units before the first record's data
    step: int  # units from record to record inside a page
    data: int  # units of the data (of the whole record when scales follow it)
    scale_base: int  # units before the first record's scale bytes; -1 when they follow the data
    scale_step: int


def dtype_refusal(cache: PagedCache, name: str) -> str:
    """Why no launch reads a cache of this dtype; "" for uint8 and for bfloat16 rows."""
    if cache.data.dtype in (torch.uint8, torch.bfloat16):
        return ""
    got = str(cache.data.dtype).removeprefix("torch.")
    return f"{name}.cache must be uint8, got {got}; a dtype view of a graph input is a bitcast, pass its uint8 view"


def pool_refusal(cache: PagedCache, name: str) -> str:
    """Why the bytes of a cache cannot be handed to a kernel as one contiguous pool; "" when they can."""
    data = cache.data
    refused = dtype_refusal(cache, name)
    if refused:
        return refused
    if cache.num_slots == 0:
        return f"{name}.cache must hold at least one slot, got an empty pool"
    if not data.is_contiguous():
        return (
            f"{name}.cache must be one contiguous pool, got a strided view {list(data.shape)} with strides "
            f"{list(data.stride())}; give the pool itself with region_offset and block_stride"
        )
    units = data.numel() // _unit(cache)
    if units >= INT32_END:
        return f"{name}.cache must have fewer than 2^31 units of {_unit(cache)} bytes, got {units}"
    return ""


def _parts(cache: PagedCache) -> tuple[int, int, int, int, int]:
    """(block stride, region offset, data step, scale base inside a block or -1, scale step), in elements of the
    pool."""
    fmt = cache.format
    if cache.data.dtype == torch.bfloat16:
        return cache.page_size * fmt.elements, 0, fmt.elements, -1, 0
    if cache.is_sectioned and fmt.scale_bytes:
        return (
            cache.block_stride_bytes,
            cache.region_offset,
            fmt.data_bytes,
            cache.page_size * fmt.data_bytes,
            fmt.scale_bytes,
        )
    return cache.block_stride_bytes, cache.region_offset, fmt.record_bytes, -1, 0


def _unit(cache: PagedCache) -> int:
    block, offset, step, scale_base, scale_step = _parts(cache)
    unit = math.gcd(step, offset)
    if cache.num_blocks > 1:
        unit = math.gcd(unit, block)
    return unit if scale_base < 0 else math.gcd(unit, scale_base, scale_step)


def pool_units(cache: PagedCache) -> PoolUnits:
    """The pool of a cache that `pool_refusal` accepts. A view: nothing is copied."""
    block, offset, step, scale_base, scale_step = _parts(cache)
    unit = _unit(cache)
    flat = cache.data.reshape(-1)
    units = flat.shape[0] // unit
    if units * unit != flat.shape[0]:
        flat = flat[: units * unit]
    return PoolUnits(
        flat.view(units, unit),
        cache.page_size,
        block // unit,
        offset // unit,
        step // unit,
        step // unit,
        -1 if scale_base < 0 else (offset + scale_base) // unit,
        scale_step // unit,
    )


def unit_indices(units: PoolUnits, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """int32 units of the data and, when they lie apart, of the scale bytes of valid slots. int32 arithmetic
    throughout."""
    scales = None
    if units.scale_base < 0 and units.block == units.page_size * units.step:
        return slots * units.step + units.base, None  # pages follow one another: no division
    page = units.page_size
    if page & (page - 1) == 0:
        block = slots >> (page.bit_length() - 1)
    else:
        block = torch.div(slots, page, rounding_mode="floor")
    offset = slots - block * page
    start = block * units.block
    if units.scale_base >= 0:
        scales = start + offset * units.scale_step + units.scale_base
    return start + offset * units.step + units.base, scales


def gather_rows(
    cache: torch.Tensor, block: torch.Tensor, offset: torch.Tensor, record: int, token_stride: int, base: int = 0
) -> torch.Tensor:
    """Bytes [base + offset * token_stride, + record) of each requested block, as one gather of whole units.

    Args:
        cache: [blocks, ...] uint8, each block contiguous, any stride between blocks.
        block, offset: integer tensors of one shape.
        record, token_stride, base: bytes.
    Returns: [*block.shape, record] uint8.
    """
    blocks = cache.shape[0]
    flat = cache.flatten(1) if cache.dim() > 2 else cache
    length = flat.shape[1]
    unit = math.gcd(record, token_stride, base, length)
    if unit < SMALLEST_UNIT:
        raise ArgumentError(
            f"gather_rows: record, token_stride, base and block bytes must share a factor of {SMALLEST_UNIT}, got "
            f"{record}, {token_stride}, {base} and {length} with factor {unit}; gathers of single bytes do not compile."
        )
    first = offset.to(torch.int32) * (token_stride // unit) + base // unit
    return _take(flat.view(blocks, length // unit, unit), block.to(torch.int32), first, record // unit)


def _take(view: torch.Tensor, block: torch.Tensor, first: torch.Tensor, count: int) -> torch.Tensor:
    """view [blocks, units, unit] -> [*first.shape, count * unit]."""
    if count == 1:
        return view[block, first]
    run = first.unsqueeze(-1) + torch.arange(count, dtype=torch.int32, device=first.device)
    return view[block.unsqueeze(-1), run].flatten(-2)


def gather_bytes(cache: PagedCache, slots: torch.Tensor) -> torch.Tensor:
    """Records [*slots.shape, record_bytes] uint8 of valid slots, or their bfloat16 rows when the cache holds those."""
    fmt = cache.format
    if not pool_refusal(cache, "cache"):
        units = pool_units(cache)
        first, scales = unit_indices(units, slots)
        if cache.data.dtype == torch.bfloat16:
            return units.pool[first]
        unit = units.pool.shape[1]
        length = fmt.data_bytes if scales is not None else fmt.record_bytes
        data = _take_flat(units.pool, first, length // unit)
        if scales is None:
            return data
        return torch.cat((data, _take_flat(units.pool, scales, fmt.scale_bytes // unit)), dim=-1)
    page = cache.page_size
    block = torch.div(slots, page, rounding_mode="floor")
    offset = slots - block * page
    if cache.data.dtype == torch.bfloat16:
        return cache.data.view(cache.data.shape[0], page, fmt.elements)[block, offset]
    blocks = cache.data if cache.data.dim() > 2 else cache.pages()
    if not cache.is_sectioned or not fmt.scale_bytes:
        return gather_rows(blocks, block, offset, fmt.record_bytes, fmt.record_bytes)
    data = gather_rows(blocks, block, offset, fmt.data_bytes, fmt.data_bytes)
    tail = gather_rows(blocks, block, offset, fmt.scale_bytes, fmt.scale_bytes, page * fmt.data_bytes)
    return torch.cat((data, tail), dim=-1)


def _take_flat(pool: torch.Tensor, first: torch.Tensor, count: int) -> torch.Tensor:
    if count == 1:
        return pool[first]
    run = first.unsqueeze(-1) + torch.arange(count, dtype=torch.int32, device=first.device)
    return pool[run].flatten(-2)


def gather_refusal(cache: PagedCache, name: str) -> str:
    """Why `gather_bytes` cannot serve a cache; "" when it can."""
    data = cache.data
    refused = dtype_refusal(cache, name)
    if refused:
        return refused
    if cache.num_slots == 0 or data.dtype == torch.bfloat16:
        return ""
    unit = (
        _unit(cache) if data.is_contiguous() else math.gcd(*[n for n in _parts(cache)[1:] if n > 0], cache.page_bytes)
    )
    if unit < SMALLEST_UNIT:
        return (
            f"{name}.cache must place records at multiples of {SMALLEST_UNIT} bytes, got block stride "
            f"{cache.block_stride_bytes} and region_offset {cache.region_offset}; gathers of single bytes "
            "do not compile"
        )
    return ""


def load_cache(cache: PagedCache) -> torch.Tensor:
    """Every slot of a cache in bfloat16, [slots, 512]; what is not finite becomes 0, since unwritten slots hold
    anything."""
    fmt = cache.format
    if cache.data.dtype == torch.bfloat16:
        table = cache.data.reshape(cache.num_slots, fmt.elements)
    else:
        parts = cache.parts()
        flat = [view.reshape(cache.num_slots, view.shape[-1]) for view, _ in parts]
        table = decode_rows(flat[0] if len(flat) == 1 else torch.cat(flat, dim=-1), fmt)
    return torch.where(table.abs() < torch.inf, table, 0.0)


# --- e4m3 on chip ----------------------------------------------------------------------------------------------------


def e4m3_kind(cache: PagedCache) -> str:
    """How kernels decode the e4m3 records of a cache: by the engines' own cast only where the writer kept below 256."""
    return "fp8_native" if cache.e4m3_max == 224 else "fp8_integer"


def refuse_code(where: str, code: int, slot: int, native: bool) -> NoReturn:
    """Say that a selected record holds a code which the kernel would misread."""
    if native:
        why = (
            f"got e4m3 code 0x{code:02X} in slot {slot}, which Trainium's own e4m3 reads as inf or NaN; "
            "the cache is declared with e4m3_max=224, declare 448 for what was encoded so"
        )
    else:
        why = f"got the NaN code 0x{code:02X} in slot {slot}; an unwritten slot or a corrupted record"
    raise SlotRangeError(f"{where} must hold codes the kernel can decode, {why}.")


# --- decoding in torch -----------------------------------------------------------------------------------------------

SMALLEST_NORMAL = -126  # products whose exponent is below decode to 0
NEVER = -1000  # an exponent far below it
LARGEST_EXPONENT = 127  # exp2 is exact from -126 to 127


def decode_rows(records: torch.Tensor, fmt: RecordFormat, *, keep_scale_255: bool = False) -> torch.Tensor:
    """Records [..., record_bytes] uint8 to [..., elements] bfloat16, exactly as `formats.decode`, by integers and exp2.
    Rows that are bfloat16 already lose their NaN, which decodes to 0 in every format.

    keep_scale_255: scale byte 255 is the exponent 128 instead of NaN, which decodes to 0.
    """
    if records.dtype == torch.bfloat16:
        return torch.where(records == records, records, 0.0)
    data, scales = records[..., : fmt.data_bytes].int(), records[..., fmt.data_bytes :].int()
    if fmt is BF16:
        return _bfloat16(data)
    if fmt.scale is E4M3FN:
        mantissa, exponent, sign = _e4m3_parts(scales)
        factor = mantissa.float() * torch.exp2(exponent.float()) * sign.float()  # in this order: zeros have signs
        codes = torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)
        values = _e2m1(codes)
        return _grouped(values, factor, fmt, torch.mul).to(torch.bfloat16)
    ue8m0 = scales - 127
    if fmt.element is E2M1:
        codes = torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)
        factor = _power(ue8m0)
        if not keep_scale_255:
            factor = torch.where(scales == 255, 0.0, factor)
        return _grouped(_e2m1(codes), factor, fmt, torch.mul).to(torch.bfloat16)
    mantissa, exponent, sign = _e4m3_parts(data)
    if not keep_scale_255:
        ue8m0 = torch.where(scales == 255, NEVER, ue8m0)
    exponent = _grouped(exponent, ue8m0, fmt, torch.add)
    values = (mantissa * sign).float() * _power(exponent.clamp(min=SMALLEST_NORMAL))
    alive = (exponent >= SMALLEST_NORMAL) & (mantissa > 0)
    signed_zero = sign.float() * 0.0
    return torch.where(alive, values, signed_zero).to(torch.bfloat16)


def _grouped(elements: torch.Tensor, per_group: torch.Tensor, fmt: RecordFormat, op: Any) -> torch.Tensor:
    """op of every element and its group's value."""
    groups = per_group.shape[-1]
    split = elements.reshape(*elements.shape[:-1], groups, fmt.elements // groups)
    return op(split, per_group.unsqueeze(-1)).flatten(-2)  # type: ignore[no-any-return]


def _e4m3_parts(codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(mantissa, exponent, sign) with value = sign * mantissa * 2^exponent; the NaN codes have mantissa 0."""
    field = (codes >> 3) & 15
    mantissa = (codes & 7) + ((field > 0).int() << 3)
    mantissa = torch.where((codes & 127) == 127, 0, mantissa)
    return mantissa, field.clamp(min=1) - 10, 1 - ((codes >> 7) << 1)


def _e2m1(codes: torch.Tensor) -> torch.Tensor:
    """float32 of e2m1 codes."""
    field = (codes >> 1) & 3
    doubled = ((codes & 1) + ((field > 0).int() << 1)) << (field.clamp(min=1) - 1)
    return (doubled * (1 - ((codes >> 3) << 1))).float() * torch.where(codes == 8, -0.5, 0.5)


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent in float32 for exponents >= -127: two factors, each inside the range where exp2 is exact."""
    upper = (exponent - LARGEST_EXPONENT).clamp(min=0)
    lower = (exponent + 126).clamp(max=0)
    middle = exponent - upper - lower
    return torch.exp2(middle.float()) * torch.exp2(upper.float()) * torch.exp2(lower.float())


def _bfloat16(data: torch.Tensor) -> torch.Tensor:
    """bfloat16 of little-endian byte pairs [..., 2 n] (int32), without a bitcast; NaN gives 0 with its sign."""
    pairs = data.reshape(*data.shape[:-1], data.shape[-1] // 2, 2)
    low, high = pairs[..., 0], pairs[..., 1]
    field = ((high & 127) << 1) | (low >> 7)
    mantissa = (low & 127) + ((field > 0).int() << 7)
    mantissa = torch.where((field == 255) & (mantissa > 128), 0, mantissa)
    value: torch.Tensor = mantissa.float() * _power(field.clamp(min=1) - 134)
    return (value * (1 - ((high >> 7) << 1)).float()).to(torch.bfloat16)
