# SPDX-License-Identifier: Apache-2.0
"""Torch forms under the Neuron backends: operators that have no kernel, as plain torch that survives compilation.

They run on the tensors' own device. What they avoid, and why, stands in `launch.py`: no dtype bitcast, no value-
dependent size, gathers of whole units, int32 indices. So bytes become numbers, and numbers bytes, by integer
arithmetic, comparisons and `exp2`; rows that must not be written are pointed at a row that is written anyway, with the
same bytes.

Values are checked outside of graphs, as everywhere under these backends. Inside one, `on_nonfinite="raise"` cannot
raise and acts as "zero".
"""

from __future__ import annotations

import math

import torch

from ..caches import PagedCache, check_slots
from ..dispatch import EXACT, Limits, Tolerance
from ..errors import NonFiniteError
from ..formats import BF16, BFLOAT16, E2M1, E4M3FN, FLOAT32, INDEX_FP8, INDEX_FP8_FP32, RecordFormat
from ..ops.load_records import LOAD_RECORDS, LoadRecordsCall
from ..ops.merge_partials import MERGE_PARTIALS, MergePartialsCall
from ..ops.rope import PAIRS, ROPE, ROPE_DIM, RopeCall, check_positions
from ..ops.sparse_decode import checks_on
from ..ops.store_records import STORE_RECORDS, StoreRecordsCall
from . import launch

__all__ = [
    "as_bytes",
    "as_bytes_view",
    "bytes_of_bfloat16",
    "bytes_of_float32",
    "encode_rows",
    "float8_refusal",
    "float32_of_bytes",
    "live_or_first",
]

ONE_STEP = Tolerance("one_step", 2.0, "plain float32 products and sums where the reference has fused ones")
FLOAT32_BIAS, FLOAT32_MANTISSA = 127, 23
BFLOAT16_MANTISSA = 7
E4M3_SMALLEST, E4M3_MANTISSA = -6, 3  # exponent of the smallest normal number; mantissa bits
E4M3_AMAX_MIN = 1e-4  # group maxima below it count as it
UE8M0_BIAS = 127
UE8M0_NAN, E4M3_NAN = 255, 127
STORE_ROWS = 1024  # rows stored at once: finding equal slots compares all pairs
ELEMENT_SCRATCH = 64  # bytes of torch temporaries per element encoded or decoded


# --- numbers and bytes -----------------------------------------------------------------------------------------------


def float8_refusal(name: str, x: torch.Tensor) -> str:
    """Why a float8 tensor cannot enter a graph; "" when it may."""
    if x.dtype == torch.float8_e4m3fn and torch.compiler.is_compiling():
        return f"{name} must enter a graph as its uint8 view, got float8_e4m3fn; a dtype view inside is a bitcast"
    return ""


def as_bytes_view(x: torch.Tensor) -> torch.Tensor:
    """A tensor of one-byte elements that torch can gather; a float8 one only outside of graphs."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """int32 0 .. 255 of a tensor of one-byte elements."""
    return as_bytes_view(x).int() & 255


def is_negative(x: torch.Tensor) -> torch.Tensor:
    """Whether the sign bit is set, -0.0 included."""
    return torch.where(x == 0, 1.0 / x, x) < 0


def power(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent in float32 for int32 exponents of -149 .. 127, by factors inside the range where exp2 is exact."""
    lower = (exponent + 126).clamp(max=0)
    return torch.exp2((exponent - lower).float()) * torch.exp2(lower.float())


def binary_exponent(magnitude: torch.Tensor, smallest: int, largest: int) -> torch.Tensor:
    """int32 floor(log2(magnitude)), held inside [smallest, largest]. Exact: the logarithm is only a first guess."""
    guess = torch.log2(magnitude.clamp(min=2.0**smallest)).floor().clamp(smallest, largest).int()
    guess = torch.where(power(guess) > magnitude, guess - 1, guess)
    above = torch.where(power((guess + 1).clamp(max=largest)) <= magnitude, guess + 1, guess)
    return above.clamp(smallest, largest)


def float32_of_bytes(data: torch.Tensor) -> torch.Tensor:
    """float32 [..] of little-endian bytes [.., 4] (int32 0 .. 255)."""
    sign = data[..., 3] >> 7
    field = ((data[..., 3] & 127) << 1) | (data[..., 2] >> 7)
    fraction = ((data[..., 2] & 127) << 16) | (data[..., 1] << 8) | data[..., 0]
    mantissa = fraction + ((field > 0).int() << FLOAT32_MANTISSA)
    exponent = field.clamp(min=1) - (FLOAT32_BIAS + FLOAT32_MANTISSA)
    # The mantissa has 24 bits: half of the exponent at a time keeps every product a normal number or exact.
    half = exponent >> 1
    value = mantissa.float() * power(half) * power(exponent - half)
    special = torch.where(fraction == 0, torch.inf, torch.nan)
    return torch.where(field == 255, special, value) * (1 - 2 * sign).float()


def _finite_bytes(x: torch.Tensor, mantissa_bits: int) -> torch.Tensor:
    """int32 bit pattern, without the sign, of finite float32 values with at most `mantissa_bits` + 1 significant
    bits."""
    magnitude = x.abs()
    exponent = binary_exponent(magnitude, -126, 127)
    half = (mantissa_bits - exponent) >> 1
    mantissa = (magnitude * power(half) * power(mantissa_bits - exponent - half)).int()
    normal = mantissa >= 1 << mantissa_bits
    field = torch.where(normal, exponent + FLOAT32_BIAS, 0)
    return (field << mantissa_bits) | (mantissa & ((1 << mantissa_bits) - 1))


def bytes_of_float32(x: torch.Tensor) -> torch.Tensor:
    """uint8 [.., 4] of float32 values; NaN is 0x7FC00000."""
    bits = _finite_bytes(torch.where(x.abs() < torch.inf, x, 0.0), FLOAT32_MANTISSA)
    bits = torch.where(x.abs() == torch.inf, 0x7F800000, bits)
    bits = torch.where(x == x, bits, 0x7FC00000)
    high = (bits >> 24) | is_negative(x).int() << 7
    return torch.stack((bits & 255, (bits >> 8) & 255, (bits >> 16) & 255, high), dim=-1).to(torch.uint8)


def bytes_of_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """uint8 [.., 2 n] of float32 values [.., n] that are bfloat16 numbers; NaN is 0x7FC0."""
    bits = _finite_bytes(torch.where(x.abs() < torch.inf, x, 0.0), BFLOAT16_MANTISSA)
    bits = torch.where(x.abs() == torch.inf, 0x7F80, bits)
    bits = torch.where(x == x, bits, 0x7FC0) | (is_negative(x).int() << 15)
    return torch.stack((bits & 255, bits >> 8), dim=-1).flatten(-2).to(torch.uint8)


# --- encoding --------------------------------------------------------------------------------------------------------


def _e4m3_codes(x: torch.Tensor, limit: float) -> torch.Tensor:
    """int32 e4m3 codes of finite float32 values: nearest, ties to the even code, saturating at `limit`."""
    magnitude = x.abs().clamp(max=limit)
    exponent = binary_exponent(magnitude, E4M3_SMALLEST, 8)
    units = torch.round(magnitude * power(E4M3_MANTISSA - exponent)).int()  # torch.round takes ties to even
    code = ((exponent - E4M3_SMALLEST) << E4M3_MANTISSA) + units
    return code | (is_negative(x).int() << 7)


_E2M1_TIES = tuple(((E2M1.value(i) + E2M1.value(i + 1)) / 2, i % 2 == 1) for i in range(7))


def _e2m1_codes(x: torch.Tensor, unit: torch.Tensor | float) -> torch.Tensor:
    """int32 e2m1 codes of x / unit: |x| is held against (boundary * unit), which is exact."""
    magnitude = x.abs()
    code = is_negative(x).int() << 3
    for boundary, tie_goes_up in _E2M1_TIES:
        limit = boundary * unit
        code = code + (magnitude >= limit if tie_goes_up else magnitude > limit).int()
    return code


def _covering_exponent(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """int32: the smallest e with largest * 2^e >= amax, for amax above 2^-126."""
    mantissa, exponent = math.frexp(largest)
    own = binary_exponent(amax, -126, 127)
    half = own >> 1
    fraction = amax * power(-half) * power(half - own)  # 1 <= fraction < 2
    return own - (exponent - 1) + (fraction > 2.0 * mantissa).int()


def encode_rows(x: torch.Tensor, fmt: RecordFormat, e4m3_max: int, on_nonfinite: str) -> torch.Tensor:
    """[n, elements] to records [n, record_bytes] uint8, the bytes of `formats.encode`."""
    values = x.to(torch.bfloat16).float() if fmt is BF16 else x.float()
    finite = values.abs() < torch.inf
    if on_nonfinite == "saturate":
        largest = torch.finfo(torch.bfloat16).max
        values = torch.where(values == values, values.clamp(-largest, largest), 0.0)
    else:
        values = torch.where(finite, values, 0.0)
    marks = on_nonfinite == "nan_scale"
    if fmt.element is BFLOAT16:
        return bytes_of_bfloat16(torch.where(finite, values, torch.nan) if marks else values)
    groups = values.unflatten(-1, (fmt.num_sf, fmt.elements_per_sf))
    amax = groups.abs().amax(dim=-1)
    nan = UE8M0_NAN
    scale_bytes: torch.Tensor | None = None
    if fmt.scale is FLOAT32:
        scale = amax.clamp(min=E4M3_AMAX_MIN) / float(e4m3_max)
        codes = _e4m3_codes(groups / scale.unsqueeze(-1), float(e4m3_max))
        bad = ~finite.unflatten(-1, (fmt.num_sf, fmt.elements_per_sf)).all(dim=-1)
        scale_bytes = bytes_of_float32(torch.where(bad, torch.nan, scale) if marks else scale).flatten(-2)
        sf = amax.int()
    elif fmt.scale is E4M3FN:
        smallest = E2M1.max * 2.0**-9
        sf = _e4m3_codes(amax.clamp(min=smallest) / E2M1.max, float(e4m3_max))
        factor = ((sf & 7) + ((sf > 7).int() << 3)).float() * power((sf >> 3).clamp(min=1) - 10)
        codes = _e2m1_codes(groups, factor.unsqueeze(-1))
        nan = E4M3_NAN
    elif fmt.element is E2M1:
        exponent = _covering_exponent(amax.clamp(min=E2M1.max * 2.0**-126), E2M1.max)
        codes = _e2m1_codes(groups * power(-exponent).unsqueeze(-1), 1.0)
        sf = exponent + UE8M0_BIAS
    else:
        exponent = _covering_exponent(amax.clamp(min=E4M3_AMAX_MIN), float(e4m3_max))
        codes = _e4m3_codes(groups * power(-exponent).unsqueeze(-1), float(e4m3_max))
        sf = exponent + UE8M0_BIAS
    if marks:
        bad = ~finite.unflatten(-1, (fmt.num_sf, fmt.elements_per_sf)).all(dim=-1)
        codes = torch.where(bad.unsqueeze(-1), 0, codes)
        sf = torch.where(bad, nan, sf)
    codes = codes.flatten(-2)
    if fmt.elements_per_byte == 2:
        pairs = codes.unflatten(-1, (fmt.data_bytes, 2))
        codes = pairs[..., 0] | (pairs[..., 1] << 4)
    tail = sf.to(torch.uint8) if scale_bytes is None else scale_bytes
    return torch.cat((codes.to(torch.uint8), tail), dim=-1)


# --- store and load --------------------------------------------------------------------------------------------------


def _cache_rule(call: StoreRecordsCall | LoadRecordsCall) -> list[str]:
    sentence = launch.gather_refusal(call.cache, "cache").replace("cache.cache", "cache")
    return [sentence] if sentence else []


def live_or_first(live: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(row [n] int32, any): each live row itself, each other the first live one, 0 when there is none."""
    n = live.shape[0]
    number = torch.arange(n, dtype=torch.int32, device=live.device)
    first = torch.where(live, number, n).amin()
    some = first < n
    return torch.where(live, number, torch.where(some, first, 0)), some


def _store(cache: PagedCache, slots: torch.Tensor, records: torch.Tensor) -> None:
    """Write records [n, bytes] into slots [n] int32; -1 is skipped, of equal slots the last wins."""
    n = slots.shape[0]
    number = torch.arange(n, dtype=torch.int32, device=slots.device)
    last = torch.where(slots.unsqueeze(1) == slots.unsqueeze(0), number, -1).amax(dim=1)
    row, some = live_or_first(slots >= 0)
    records = records[last][row]
    slots = torch.where(some, slots[row], 0)
    records = torch.where(some, records, launch.gather_bytes(cache, slots) if cache.format is not BF16 else records)
    fmt = cache.format
    parts = [(0, fmt.record_bytes)]
    if cache.is_sectioned and fmt.scale_bytes:
        parts = [(0, fmt.data_bytes), (fmt.data_bytes, fmt.scale_bytes)]
    if not launch.pool_refusal(cache, "cache"):
        units = launch.pool_units(cache)
        unit = units.pool.shape[1]
        for (start, length), first in zip(parts, launch.unit_indices(units, slots), strict=False):
            assert first is not None
            run = first.unsqueeze(1) + torch.arange(length // unit, dtype=torch.int32, device=slots.device)
            units.pool[run] = records[:, start : start + length].unflatten(1, (length // unit, unit))
        return
    block = torch.div(slots, cache.page_size, rounding_mode="floor")
    offset = slots - block * cache.page_size
    for (start, length), (view, _) in zip(parts, cache.parts(), strict=True):
        view[block, offset] = records[:, start : start + length]


@STORE_RECORDS.impl("neuron", "simulated", limits=Limits(), tolerance=EXACT, rule=_cache_rule, torch_form=True)
def _store_records(call: StoreRecordsCall, backend: str) -> None:
    slots, fmt = call.slots, call.cache.format
    if launch.checks_now(checks_on()):
        check_slots(call.cache, slots, op="store_records")
    if call.on_nonfinite == "raise" and not torch.compiler.is_compiling():
        _require_finite(call.x, slots)
    if call.cache.num_slots == 0 or slots.shape[0] == 0:
        return
    step = min(STORE_ROWS, launch.power_of_two(call.memory_limit // (fmt.elements * ELEMENT_SCRATCH) + 1) // 2)
    for start in range(0, slots.shape[0], step):
        part = slots[start : start + step].to(torch.int32)
        padded = launch.power_of_two(part.shape[0])
        x = launch.pad_to(call.x[start : start + step], padded, 0, 0.0)
        part = launch.pad_to(part, padded, 0, -1)
        records = encode_rows(x, fmt, call.cache.e4m3_max, call.on_nonfinite)
        _store(call.cache, part, records)


def _require_finite(x: torch.Tensor, slots: torch.Tensor) -> None:
    bad = ~torch.isfinite(x) & (slots >= 0).unsqueeze(1)
    if bool(bad.any()):
        row, column = bad.nonzero()[0].tolist()
        raise NonFiniteError(
            f"store_records: x must be finite, got {float(x[row, column])} at [{row}, {column}]; "
            "on_nonfinite chooses another treatment."
        )


@LOAD_RECORDS.impl("neuron", "simulated", limits=Limits(), tolerance=EXACT, rule=_cache_rule, torch_form=True)
def _load_records(call: LoadRecordsCall, backend: str) -> torch.Tensor:
    rows = _loaded(call)
    return rows if call.out is None else call.out.copy_(rows)


def _loaded(call: LoadRecordsCall) -> torch.Tensor:
    cache, fmt = call.cache, call.cache.format
    if launch.checks_now(checks_on()):
        check_slots(cache, call.slots, op="load_records")
    shape = (*call.slots.shape, fmt.elements)
    n = call.slots.numel()
    if n == 0 or cache.num_slots == 0:
        return torch.zeros(shape, dtype=call.out_dtype, device=call.device)
    flat = launch.pad_to(call.slots.reshape(n).to(torch.int32), launch.power_of_two(n), 0, -1)
    step = max(1, launch.power_of_two(call.memory_limit // (fmt.elements * ELEMENT_SCRATCH) + 1) // 2)
    parts = []
    for start in range(0, flat.shape[0], step):
        slots = flat[start : start + step]
        rows = _decode(launch.gather_bytes(cache, slots.clamp(min=0)), fmt, call.out_dtype)
        parts.append(torch.where((slots >= 0).unsqueeze(1), rows, 0.0))
    rows = parts[0] if len(parts) == 1 else torch.cat(parts)
    return rows[:n].reshape(shape)


def _decode(records: torch.Tensor, fmt: RecordFormat, dtype: torch.dtype) -> torch.Tensor:
    if records.dtype == torch.bfloat16:
        return torch.where(records == records, records, 0.0).to(dtype)
    if fmt is BF16:
        pairs = records.int().unflatten(-1, (fmt.elements, 2))
        rows = float32_of_bytes(torch.cat((pairs.new_zeros(pairs.shape), pairs), dim=-1))
        return torch.where(rows == rows, rows, 0.0).to(dtype)
    if fmt is not INDEX_FP8_FP32:
        rows = launch.decode_rows(records, fmt)
        return torch.where(rows == rows, rows, 0.0).to(dtype)
    data, scale = records[:, : fmt.data_bytes].int(), float32_of_bytes(records[:, fmt.data_bytes :].int())
    ones = torch.full((data.shape[0], INDEX_FP8.num_sf), UE8M0_BIAS, dtype=torch.int32, device=data.device)
    product = launch.decode_rows(torch.cat((data, ones), dim=1), INDEX_FP8).float() * scale.unsqueeze(1)
    return torch.where(product == product, product, 0.0).to(dtype)


# --- rope ------------------------------------------------------------------------------------------------------------


@ROPE.impl("neuron", "simulated", limits=Limits(), tolerance=ONE_STEP, torch_form=True)
def _rope(call: RopeCall, backend: str) -> torch.Tensor:
    if launch.checks_now(checks_on()):
        check_positions("rope", call.positions, call.table.shape[0])
    n, heads, d = call.num_rows, call.num_heads, call.x.shape[-1]
    x = call.x.reshape(n, heads, d)
    turn = call.table[call.positions.reshape(n).to(torch.int32)].unsqueeze(1)
    cos, sin = turn[..., :PAIRS], turn[..., PAIRS:]
    if call.inverse:
        sin = -sin
    pairs = x[..., d - ROPE_DIM :].float().unflatten(-1, (PAIRS, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)
    return torch.cat((x[..., : d - ROPE_DIM], turned), dim=-1)


# --- merge -----------------------------------------------------------------------------------------------------------


def _merge_rule(call: MergePartialsCall) -> list[str]:
    if call.outs[0].dtype == torch.float64:
        return ["parts must be bfloat16 or float32, got float64; there is no float64 on the device"]
    return []


@MERGE_PARTIALS.impl("neuron", "simulated", limits=Limits(), tolerance=ONE_STEP, rule=_merge_rule, torch_form=True)
def _merge_partials(call: MergePartialsCall, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    outs, lses, attn_sink, out_dtype, _ = call.flat()
    parts = torch.stack(lses)  # [parts, rows, heads]
    empty = parts.abs() == torch.inf
    peak = torch.where(empty, -torch.inf, parts).amax(dim=0)
    lonely = peak == -torch.inf
    weight = torch.where(empty, 0.0, torch.exp(parts - torch.where(lonely, 0.0, peak)))
    total = weight[0]
    for part in range(1, len(outs)):
        total = total + weight[part]
    factor = torch.where(lonely, 0.0, 1.0 / total)
    lse = torch.where(lonely, torch.inf, peak + torch.log(total))
    if attn_sink is not None:
        factor = factor / (1.0 + torch.exp(attn_sink - torch.where(lonely, 0.0, lse)))  # as the reference has it
    merged = torch.where(empty[0].unsqueeze(2), 0.0, outs[0].float() * weight[0].unsqueeze(2))
    for part in range(1, len(outs)):
        merged = merged + torch.where(empty[part].unsqueeze(2), 0.0, outs[part].float() * weight[part].unsqueeze(2))
    out = torch.where(lonely.unsqueeze(2), 0.0, merged * factor.unsqueeze(2))
    return out.to(out_dtype), lse
