# SPDX-License-Identifier: Apache-2.0
"""Number formats, record formats, and the one encoder and decoder for both.

A record is what one token occupies in a cache: data bytes, then scale factors. A `RecordFormat` states four facts
(element kind, number of elements, elements per scale factor, kind of the scale factor); every size is derived.

    V41_FP8         512 e4m3 + 16 ue8m0     main cache
    V41_FP4         512 e2m1 + 32 e4m3      main cache, as the extra (compressed) scope
    INDEX_FP4       128 e2m1 +  4 ue8m0     index keys
    INDEX_FP8       128 e4m3 +  4 ue8m0     index keys
    INDEX_FP8_FP32  128 e4m3 +  1 float32   index keys of older engines; as wide as INDEX_FP8, so it must be named
    BF16            512 bfloat16            main cache, unquantized

`encode` rounds once per element, to nearest with ties to the even code, against the scale that is actually stored.
`decode` looks every data byte up in a table of (scale byte, data byte): no floating-point mode can change it.

What surprised us: an e4m3 product whose exponent falls below 2^-126 decodes to zero even where the value itself would
be a normal number (code 0x0F under scale byte 9). Accelerators do it, so every backend does. `nan="ideal"` does not.
docs/formats.md holds the byte pictures, the rules for scale bytes 0 and 255, and worked examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .config import constant_in_graphs
from .errors import ArgumentError, DTypeError, FormatError, NonFiniteError, ShapeError

__all__ = [
    "BF16",
    "BFLOAT16",
    "E2M1",
    "E4M3FN",
    "E4M3_CAPS",
    "FLOAT32",
    "FORMATS",
    "HEAD_DIM",
    "INDEX_DIM",
    "INDEX_FORMATS",
    "INDEX_FP4",
    "INDEX_FP8",
    "INDEX_FP8_FP32",
    "MAIN_FORMATS",
    "ON_NONFINITE",
    "UE8M0",
    "V41_FP4",
    "V41_FP8",
    "NumberFormat",
    "QuantizedQuery",
    "RecordFormat",
    "by_name",
    "by_record_bytes",
    "check_e4m3_max",
    "decode",
    "decode_query",
    "encode",
    "encode_query",
    "join_record",
    "pack_scales",
    "split_record",
    "unpack_scales",
]

HEAD_DIM = 512  # elements of a main record: 448 without rope, then 64 with; keys and values are the same vector
INDEX_DIM = 128  # elements of an index key
E4M3_CAPS = (448, 224)  # 448: all of e4m3fn. 224: largest value of trn2's own e4m3 that is a power of two below 448
ON_NONFINITE = ("raise", "zero", "saturate", "nan_scale")
NAN_RULES = ("zero", "ideal")

E4M3_AMAX_MIN = 1e-4  # group maxima below it count as it, so the smallest e4m3 scale is 2^-22 (2^-21 under the 224 cap)
SMALLEST_NORMAL_EXPONENT = -126  # of float32 and bfloat16
BF16_MAX = torch.finfo(torch.bfloat16).max
_ENCODER_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_DECODER_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_GroupEncoder = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
_BYTE_DTYPES = (torch.uint8, torch.int8, torch.float8_e4m3fn)


@dataclass(frozen=True, eq=False)
class NumberFormat:
    """One number format: the width of its fields, and from them every value it can hold.

    A format without mantissa and sign (ue8m0) is a pure power of two and has no zero.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    signed: bool = True
    has_nan: bool = (
        False  # the all-ones pattern (after the sign) is NaN; nothing here but bfloat16/float32 has infinities
    )
    bits: int = field(init=False)
    values: tuple[float, ...] = field(init=False)  # of every code, exact, NaN for NaN codes; empty above 8 bits
    max: float = field(init=False)  # the largest of `values`

    def __post_init__(self) -> None:
        bits = int(self.signed) + self.exponent_bits + self.mantissa_bits
        object.__setattr__(self, "bits", bits)
        values = tuple(self.value(code) for code in range(1 << bits)) if bits <= 8 else ()
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "max", max((v for v in values if not math.isnan(v)), default=math.nan))

    def __repr__(self) -> str:
        return self.name

    def parts(self, code: int) -> tuple[float, int, int] | None:
        """(sign, mantissa, exponent) with value = sign * mantissa * 2^exponent, or None for NaN."""
        magnitude = code & ((1 << (self.exponent_bits + self.mantissa_bits)) - 1)
        if self.has_nan and magnitude == (1 << (self.exponent_bits + self.mantissa_bits)) - 1:
            return None
        sign = -1.0 if self.signed and code >> (self.bits - 1) else 1.0
        exponent, mantissa = magnitude >> self.mantissa_bits, magnitude & ((1 << self.mantissa_bits) - 1)
        if self.mantissa_bits == 0:
            return sign, 1, exponent - self.bias
        if exponent == 0:
            return sign, mantissa, 1 - self.bias - self.mantissa_bits
        return sign, (1 << self.mantissa_bits) + mantissa, exponent - self.bias - self.mantissa_bits

    def value(self, code: int) -> float:
        """The exact value of one code; NaN for the NaN codes."""
        parts = self.parts(code)
        return math.nan if parts is None else parts[0] * math.ldexp(float(parts[1]), parts[2])

    def decode(self, codes: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """Codes (any integer dtype, one per element) to values; NaN codes give NaN."""
        if not self.values:
            raise FormatError(
                f"{self}.decode: the format must have at most 8 bits, got {self.bits}; use torch's dtype."
            )
        table = torch.tensor(self.values, dtype=torch.float64).to(dtype).to(codes.device)
        return table.index_select(0, codes.reshape(-1).to(torch.int32)).reshape(codes.shape)

    def encode(self, x: Tensor) -> Tensor:
        """Finite float32 values to codes (uint8, one per element): nearest, ties to even, saturating.

        ue8m0 rounds up instead, because a scale that is too small would overflow its group.
        """
        return _ELEMENT_ENCODERS[self.name](x.to(torch.float32))


E4M3FN = NumberFormat("e4m3fn", exponent_bits=4, mantissa_bits=3, bias=7, has_nan=True)
E2M1 = NumberFormat("e2m1", exponent_bits=2, mantissa_bits=1, bias=1)
UE8M0 = NumberFormat("ue8m0", exponent_bits=8, mantissa_bits=0, bias=127, signed=False, has_nan=True)
BFLOAT16 = NumberFormat("bfloat16", exponent_bits=8, mantissa_bits=7, bias=127)
FLOAT32 = NumberFormat("float32", exponent_bits=8, mantissa_bits=23, bias=127)


def _encode_e4m3(x: Tensor, limit: float = 448.0) -> Tensor:
    # Older torch casts overflow to NaN, so the clamp comes first; the cast itself rounds to nearest even.
    return x.clamp(-limit, limit).to(torch.float8_e4m3fn).view(torch.uint8)


def _encode_e2m1(x: Tensor, unit: Tensor | float = 1.0) -> Tensor:
    """Codes of x / unit without dividing: |x| is held against (boundary * unit), which is exact in float32."""
    magnitude = x.abs()
    code = torch.signbit(x).to(torch.uint8) << 3
    for boundary, tie_goes_up in _E2M1_BOUNDARIES:
        limit = boundary * unit
        code += magnitude >= limit if tie_goes_up else magnitude > limit
    return code


def _encode_ue8m0(x: Tensor) -> Tensor:
    return _ceil_exponent(x, 1.0).clamp(1, 254).to(torch.uint8)


# The midpoint between codes i and i + 1, and whether the tie goes to i + 1 (when that is the even one).
_E2M1_BOUNDARIES = tuple(((E2M1.value(i) + E2M1.value(i + 1)) / 2, i % 2 == 1) for i in range(7))
_ELEMENT_ENCODERS: dict[str, Callable[[Tensor], Tensor]] = {
    E4M3FN.name: _encode_e4m3,
    E2M1.name: _encode_e2m1,
    UE8M0.name: _encode_ue8m0,
}


def _ceil_exponent(amax: Tensor, largest: float) -> Tensor:
    """127 + the smallest e with largest * 2^e >= amax, for positive normal float32 amax. Exact: integers only.

    With largest = c * 2^k and amax = m * 2^j (1 <= c, m < 2) that e is j - k, one more where m > c.
    """
    mantissa, exponent = math.frexp(largest)
    largest_mantissa = int((2.0 * mantissa - 1.0) * (1 << 23))
    bits = amax.contiguous().view(torch.int32)
    return (bits >> 23) - (exponent - 1) + ((bits & 0x7FFFFF) > largest_mantissa).to(torch.int32)


KINDS = ("e4m3fn+ue8m0", "e2m1+ue8m0", "e2m1+e4m3fn", "e4m3fn+float32", "bfloat16")  # element + scale


@dataclass(frozen=True, eq=False)
class RecordFormat:
    """The bytes of one token, stated as four facts; sizes are derived.

    `elements` values of kind `element`, then one scale factor of kind `scale` per `elements_per_sf` of them. Pages of
    an index format are sectioned: all data of a page, then all its scales.
    """

    name: str
    element: NumberFormat
    elements: int
    elements_per_sf: int
    scale: NumberFormat | None
    is_index: bool = False
    kind: str = field(init=False)  # element and scale, such as "e2m1+ue8m0"
    data_bytes: int = field(init=False)
    num_sf: int = field(init=False)
    scale_bytes: int = field(init=False)
    record_bytes: int = field(init=False)
    elements_per_byte: int = field(init=False)  # 2 for e2m1, 1 for e4m3, 0 for wider elements

    def __post_init__(self) -> None:
        kind = self.element.name + (f"+{self.scale.name}" if self.scale else "")
        if kind not in KINDS:
            raise FormatError(f"RecordFormat: element and scale must be one of {', '.join(KINDS)}, got {kind}.")
        if self.elements <= 0 or self.elements_per_sf <= 0 or self.elements % self.elements_per_sf:
            raise FormatError(
                f"RecordFormat: elements must be a positive multiple of elements_per_sf, "
                f"got {self.elements} and {self.elements_per_sf} for {self.name}."
            )
        if self.elements_per_sf * self.element.bits % 8:
            raise FormatError(
                f"RecordFormat: elements_per_sf must fill whole bytes, got {self.elements_per_sf} for {self.name}."
            )
        num_sf = self.elements // self.elements_per_sf if self.scale else 0
        data_bytes = self.elements * self.element.bits // 8
        scale_bytes = num_sf * self.scale.bits // 8 if self.scale else 0
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "num_sf", num_sf)
        object.__setattr__(self, "data_bytes", data_bytes)
        object.__setattr__(self, "scale_bytes", scale_bytes)
        object.__setattr__(self, "record_bytes", data_bytes + scale_bytes)
        object.__setattr__(self, "elements_per_byte", 8 // self.element.bits)

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled or deep-copied registered format comes back as the same object, so `is` and sets keep working.
        if FORMATS.get(self.name) is self:
            return by_name, (self.name,)
        facts = (self.name, self.element, self.elements, self.elements_per_sf, self.scale, self.is_index)
        return RecordFormat, facts

    @property
    def description(self) -> str:
        """One line for tables and messages, such as `512 e4m3fn + 16 ue8m0 = 528 B`."""
        scales = f" + {self.num_sf} {self.scale.name}" if self.scale else ""
        return f"{self.elements} {self.element.name}{scales} = {self.record_bytes} B"


V41_FP8 = RecordFormat("V41_FP8", E4M3FN, HEAD_DIM, 32, UE8M0)  # 528 B
V41_FP4 = RecordFormat("V41_FP4", E2M1, HEAD_DIM, 16, E4M3FN)  # 288 B
INDEX_FP4 = RecordFormat("INDEX_FP4", E2M1, INDEX_DIM, 32, UE8M0, is_index=True)  # 68 B
INDEX_FP8 = RecordFormat("INDEX_FP8", E4M3FN, INDEX_DIM, 32, UE8M0, is_index=True)  # 132 B
INDEX_FP8_FP32 = RecordFormat("INDEX_FP8_FP32", E4M3FN, INDEX_DIM, 128, FLOAT32, is_index=True)  # 132 B
BF16 = RecordFormat("BF16", BFLOAT16, HEAD_DIM, HEAD_DIM, None)  # 1024 B

FORMATS: dict[str, RecordFormat] = {
    fmt.name: fmt for fmt in (V41_FP8, V41_FP4, INDEX_FP4, INDEX_FP8, INDEX_FP8_FP32, BF16)
}
MAIN_FORMATS = tuple(fmt for fmt in FORMATS.values() if not fmt.is_index)
INDEX_FORMATS = tuple(fmt for fmt in FORMATS.values() if fmt.is_index)

# Widths people really pass, and what they are. Not ours, so there is nothing to derive them from.
_LOOKS_LIKE = {
    512: "the head size in elements, not the bytes of a record",
    576: "the V3.2 head size in elements, not the bytes of a record",
    584: "the V4 record (448 e4m3, 64 bfloat16, 8 scale bytes)",
    592: "an older mixed fp8/bfloat16 record padded to 16 bytes",
    656: "the V3.2 record (512 e4m3, 4 float32 scales, 64 bfloat16)",
    384: "an FP4 record of the V4 family",
    352: "an FP4 record of the V4 family",
    256: "the data bytes of V41_FP4 without its scales",
    128: "the index head size, or the data bytes of an FP8 index key without its scales",
    64: "the data bytes of an FP4 index key without its scales",
}


def by_name(name: str | RecordFormat) -> RecordFormat:
    """The record format of that name; a `RecordFormat` passes through. FormatError for an unknown name."""
    if isinstance(name, RecordFormat):
        return name
    fmt = FORMATS.get(name) if isinstance(name, str) else None
    if fmt is None:
        raise FormatError(f"formats.by_name: name must be one of {', '.join(FORMATS)}, got {name!r}.")
    return fmt


def by_record_bytes(
    width: int, *, index: bool | None = None, op: str = "formats.by_record_bytes", argument: str = "width"
) -> RecordFormat:
    """The record format of that many bytes, which is how a bare cache tensor tells its format.

    Args:
        width: bytes per token, the last dimension of a byte cache.
        index: True for index caches only, False for main caches only, None for both.
        op, argument: how the error names the caller's argument.
    Raises:
        FormatError: unknown width (with what it looks like), or a width that two formats share.
    """
    candidates = MAIN_FORMATS + INDEX_FORMATS if index is None else INDEX_FORMATS if index else MAIN_FORMATS
    found = [fmt for fmt in candidates if fmt.record_bytes == width]
    if len(found) == 1:
        return found[0]
    if found:
        names = " or ".join(fmt.name for fmt in found)
        raise FormatError(
            f"{op}: {argument} must name its format, got only a width of {width} bytes; it may be {names}."
        )
    accepted = ", ".join(f"{fmt.record_bytes} ({fmt.name})" for fmt in candidates)
    looks_like = width_hint(width)
    hint = f"; {width} is {looks_like}" if looks_like else ""
    raise FormatError(f"{op}: {argument} must have records of {accepted} bytes, got {width}{hint}.")


def width_hint(width: int) -> str:
    """What a record width looks like, for the end of an error; empty when it looks like nothing known."""
    same = [fmt for fmt in FORMATS.values() if fmt.record_bytes == width]
    if same:
        return f"an {'index' if same[0].is_index else 'attention'} record ({' or '.join(fmt.name for fmt in same)})"
    return _LOOKS_LIKE.get(width, "")


def check_e4m3_max(e4m3_max: int | float, op: str) -> None:
    """ArgumentError unless the cap is one an encoder can honour."""
    if e4m3_max not in E4M3_CAPS:
        raise ArgumentError(f"{op}: e4m3_max must be 448 or 224, got {e4m3_max!r}.")


def encode(
    x: Tensor,
    fmt: RecordFormat | str,
    *,
    e4m3_max: int = 448,
    on_nonfinite: str | None = None,
    op: str = "encode",
) -> Tensor:
    """Quantize vectors to records.

    Args:
        x: [..., elements] bfloat16, float16 or float32. Groups never cross a vector.
        fmt: a `RecordFormat` or its name.
        e4m3_max: largest e4m3 value written, codes and e4m3 scales alike: 448, or 224 for trn2.
        on_nonfinite: "raise"; "zero": NaN and infinities become 0; "saturate": infinities become the largest bfloat16,
            NaN becomes 0; "nan_scale": the group gets a NaN scale and decodes to 0. Default: "raise" on CPU, and "zero"
            elsewhere, where raising would wait for the device.
        op: how errors name the caller.
    Returns:
        [..., record_bytes] uint8: data, then scales.
    Raises:
        NonFiniteError: a NaN or an infinity under "raise".
        ShapeError, DTypeError, ArgumentError, FormatError: the argument they name.
    Numerics: the scale is chosen first and stored; elements are rounded against the stored scale, to nearest, ties to
        the even code. INDEX_FP8_FP32 divides in float32 first; the other formats round once, float32 input included.
    """
    fmt = by_name(fmt)
    _check_values(x, fmt.elements, op)
    check_e4m3_max(e4m3_max, op)
    values, marked = _admit(x, fmt, on_nonfinite, op)
    if fmt.element is BFLOAT16:
        return values.to(torch.bfloat16).contiguous().view(torch.uint8)
    data, scales = _quantize(values, fmt, e4m3_max, marked)
    return torch.cat((data, scales), dim=-1)


def _check_values(x: Tensor, elements: int, op: str) -> None:
    if not isinstance(x, Tensor):
        raise DTypeError(f"{op}: x must be a tensor, got {type(x).__name__}.")
    if x.dtype not in _ENCODER_DTYPES:
        raise DTypeError(f"{op}: x must be bfloat16, float16 or float32, got {_name(x.dtype)}.")
    if x.dim() == 0 or x.shape[-1] != elements:
        raise ShapeError(f"{op}: x must be [..., {elements}], got {list(x.shape)}.")
    if x.requires_grad and torch.is_grad_enabled():
        raise DTypeError(f"{op}: x must not require grad, got a tensor that does; quantization has no backward.")


def _admit(x: Tensor, fmt: RecordFormat, on_nonfinite: str | None, op: str) -> tuple[Tensor, Tensor | None]:
    """(values the quantizer may take, groups to mark with a NaN scale or None)."""
    if on_nonfinite is None:
        on_nonfinite = "raise" if x.device.type == "cpu" else "zero"
    if on_nonfinite not in ON_NONFINITE:
        raise ArgumentError(f"{op}: on_nonfinite must be one of {', '.join(ON_NONFINITE)}, got {on_nonfinite!r}.")
    # A bfloat16 record rounds first: a finite float32 can become infinite by it.
    values = x.to(torch.bfloat16) if fmt.element is BFLOAT16 else x.to(torch.float32)
    if on_nonfinite == "saturate":
        return values.nan_to_num(nan=0.0, posinf=BF16_MAX, neginf=-BF16_MAX), None
    if on_nonfinite == "raise":
        if not _all_finite(values):
            where = (~values.isfinite()).nonzero()
            position = where[0].tolist()
            raise NonFiniteError(
                f"{op}: x must be finite, got {float(values[tuple(position)])} at {position} "
                f"({where.shape[0]} such elements); on_nonfinite chooses another treatment."
            )
        return values, None
    bad = ~values.isfinite()
    if on_nonfinite == "zero":
        return values.masked_fill(bad, 0.0), None
    if fmt.element is BFLOAT16:  # no scale to mark: the element itself is the group
        return values.masked_fill(bad, math.nan), None
    marked = bad.reshape(*bad.shape[:-1], fmt.num_sf, fmt.elements_per_sf).any(dim=-1)
    return values.masked_fill(bad, 0.0), marked


def _all_finite(values: Tensor) -> bool:
    """One pass without a temporary: NaN and infinities show in the extremes."""
    return values.numel() == 0 or all(math.isfinite(extreme) for extreme in torch.aminmax(values))


def _quantize(values: Tensor, fmt: RecordFormat, e4m3_max: int, marked: Tensor | None) -> tuple[Tensor, Tensor]:
    """float32 [..., elements] to (data [..., data_bytes], scales [..., scale_bytes]), both uint8."""
    groups = values.reshape(*values.shape[:-1], fmt.num_sf, fmt.elements_per_sf)
    amax = groups.abs().amax(dim=-1)
    codes, scales = _GROUP_ENCODERS[fmt.kind](groups, amax, e4m3_max)
    if marked is not None:
        codes = codes.masked_fill(marked[..., None], 0)
        nan = math.nan if fmt.scale is FLOAT32 else 0xFF if fmt.scale is UE8M0 else 0x7F
        scales = scales.masked_fill(marked, nan)
    codes = codes.flatten(-2)
    if fmt.elements_per_byte == 2:
        codes = codes[..., 0::2] | (codes[..., 1::2] << 4)
    # An empty tensor may have any strides, which a dtype view of its last dimension refuses.
    return codes, scales.reshape(-1).view(torch.uint8).reshape(*scales.shape[:-1], fmt.scale_bytes)


def _group_e4m3_ue8m0(groups: Tensor, amax: Tensor, e4m3_max: int) -> tuple[Tensor, Tensor]:
    byte = _ceil_exponent(amax.clamp_min(E4M3_AMAX_MIN), float(e4m3_max))
    inverse = ((254 - byte) << 23).view(torch.float32)  # 2^-(byte - 127), always normal
    return _encode_e4m3(groups * inverse[..., None], float(e4m3_max)), byte.to(torch.uint8)


def _group_e2m1_ue8m0(groups: Tensor, amax: Tensor, e4m3_max: int) -> tuple[Tensor, Tensor]:
    byte = _ceil_exponent(amax.clamp_min(E2M1.max * 2.0**SMALLEST_NORMAL_EXPONENT), E2M1.max)
    inverse = ((254 - byte) << 23).view(torch.float32)
    return _encode_e2m1(groups * inverse[..., None]), byte.to(torch.uint8)


def _group_e2m1_e4m3(groups: Tensor, amax: Tensor, e4m3_max: int) -> tuple[Tensor, Tensor]:
    # The clamp keeps the scale at least the smallest e4m3; float32 division cannot move a quotient by 6 across a tie.
    byte = _encode_e4m3(amax.clamp_min(E2M1.max * E4M3FN.value(1)) / E2M1.max, float(e4m3_max))
    return _encode_e2m1(groups, byte.view(torch.float8_e4m3fn).to(torch.float32)[..., None]), byte


def _group_e4m3_float32(groups: Tensor, amax: Tensor, e4m3_max: int) -> tuple[Tensor, Tensor]:
    scale = amax.clamp_min(E4M3_AMAX_MIN) / float(e4m3_max)
    return _encode_e4m3(groups / scale[..., None], float(e4m3_max)), scale


_GROUP_ENCODERS: dict[str, _GroupEncoder] = {
    "e4m3fn+ue8m0": _group_e4m3_ue8m0,
    "e2m1+ue8m0": _group_e2m1_ue8m0,
    "e2m1+e4m3fn": _group_e2m1_e4m3,
    "e4m3fn+float32": _group_e4m3_float32,
}


def decode(
    records: Tensor,
    fmt: RecordFormat | str,
    *,
    nan: str = "zero",
    dtype: torch.dtype = torch.bfloat16,
    op: str = "decode",
) -> Tensor:
    """Read records back to values.

    Args:
        records: [..., record_bytes] uint8 (int8 and float8_e4m3fn views of the same bytes are taken too).
        fmt: a `RecordFormat` or its name.
        nan: "zero", the rule of every operator: NaN codes and NaN scales give 0 (with the sign of the code), e4m3
            products with an exponent below -126 give 0, overflow gives infinity. "ideal": the exact product, NaN kept.
        dtype: bfloat16, float16, float32 or float64 of the result. float64 with "ideal" never overflows.
        op: how errors name the caller.
    Returns:
        [..., elements] in `dtype`.
    Numerics: exact in bfloat16 for all formats but INDEX_FP8_FP32, whose float32 product is then rounded to `dtype`.
    """
    fmt = by_name(fmt)
    records = _as_bytes(records, fmt.record_bytes, "records", op)
    data, scales = records[..., : fmt.data_bytes], records[..., fmt.data_bytes :]
    return _dequantize(data, scales, fmt, nan, dtype, op)


def _as_bytes(tensor: Tensor, width: int, argument: str, op: str) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise DTypeError(f"{op}: {argument} must be a tensor, got {type(tensor).__name__}.")
    if tensor.dtype not in _BYTE_DTYPES:
        raise DTypeError(f"{op}: {argument} must be uint8, int8 or float8_e4m3fn bytes, got {_name(tensor.dtype)}.")
    if tensor.dim() == 0 or tensor.shape[-1] != width:
        raise ShapeError(f"{op}: {argument} must be [..., {width}], got {list(tensor.shape)}.")
    return tensor if tensor.dtype == torch.uint8 else tensor.view(torch.uint8)


def _dequantize(data: Tensor, scales: Tensor, fmt: RecordFormat, nan: str, dtype: torch.dtype, op: str) -> Tensor:
    """uint8 (data [..., data_bytes], scales [..., scale_bytes]) to [..., elements]."""
    if nan not in NAN_RULES:
        raise ArgumentError(f"{op}: nan must be one of {', '.join(NAN_RULES)}, got {nan!r}.")
    if dtype not in _DECODER_DTYPES:
        raise DTypeError(f"{op}: dtype must be bfloat16, float16, float32 or float64, got {_name(dtype)}.")
    if fmt.scale is None:
        values = _reinterpret(data, torch.bfloat16)
        return (values if nan == "ideal" else _zero_nan(values, values)).to(dtype)
    if fmt.scale is FLOAT32:
        values = _lookup(data, _code_table(data.device)).reshape(*data.shape[:-1], fmt.num_sf, fmt.elements_per_sf)
        scale = _reinterpret(scales, torch.float32)[..., None]
        if nan == "zero":
            values = _zero_nan(values, values)
            product = values * scale
            return _zero_nan(product, values).flatten(-2).to(dtype)
        return (values.to(dtype) * scale.to(dtype) if dtype == torch.float64 else values * scale).flatten(-2).to(dtype)
    bytes_per_sf = fmt.elements_per_sf // fmt.elements_per_byte
    index = data.reshape(*data.shape[:-1], fmt.num_sf, bytes_per_sf).to(torch.int32)
    index += (scales.to(torch.int32) << 8)[..., None]
    table = _product_table(fmt.element, fmt.scale, nan, dtype, data.device)
    values = table.index_select(0, index.reshape(-1))
    if table.dim() == 1 and table.dtype != dtype:
        values = values.view(dtype)
    result: Tensor = values.reshape(*data.shape[:-1], fmt.elements)
    return result


def _reinterpret(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes [..., n] as wider numbers. A single row counts as contiguous at any offset and stride, hence the copy."""
    return data.clone(memory_format=torch.contiguous_format).view(dtype)


def _zero_nan(values: Tensor, sign: Tensor) -> Tensor:
    zero = torch.zeros((), dtype=values.dtype, device=values.device)
    return torch.where(values.isnan(), torch.copysign(zero, sign), values)


def _lookup(codes: Tensor, table: Tensor) -> Tensor:
    values: Tensor = table.index_select(0, codes.reshape(-1).to(torch.int32)).reshape(codes.shape)
    return values


# Tables by their arguments, built at first use. A dict and not functools.cache: torch.compile traces through a cached
# function, while the decorator below makes the finished table a constant of the graph.
_TABLES: dict[tuple[Any, ...], Tensor] = {}


@constant_in_graphs
def _code_table(device: torch.device) -> Tensor:
    """[256] float32: the value of every e4m3 code. NaN codes keep their sign bit."""
    key = ("codes", device)
    if key not in _TABLES:
        codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
        _TABLES[key] = codes.to(torch.float32).to(device)
    return _TABLES[key]


@constant_in_graphs
def _product_table(
    element: NumberFormat, scale: NumberFormat, nan: str, dtype: torch.dtype, device: torch.device
) -> Tensor:
    key = (element.name, scale.name, nan, dtype, device)
    if key not in _TABLES:
        _TABLES[key] = _build_product_table(element, scale, nan, dtype).to(device)
    return _TABLES[key]


def _build_product_table(element: NumberFormat, scale: NumberFormat, nan: str, dtype: torch.dtype) -> Tensor:
    """Entry 256 * scale_byte + data_byte: the one or two values that byte stands for, in `dtype`.

    Two bfloat16 or float16 values travel as one int32, two float32 as one int64 (a gather of scalars is several times
    faster than one of rows of two); two float64 are a row.
    """
    product = _zeroing_product if nan == "zero" else _ideal_product
    codes = range(1 << element.bits)
    values = torch.tensor([[product(element, c, scale, s) for c in codes] for s in range(256)], dtype=torch.float64)
    values = values.to(torch.float32).to(dtype) if dtype != torch.float64 else values
    if element.bits == 8:
        return values.reshape(-1)
    byte = torch.arange(256)
    pairs = torch.stack((values[:, byte & 15], values[:, byte >> 4]), dim=-1).reshape(-1, 2)
    if dtype == torch.float64:
        return pairs
    return pairs.contiguous().view(torch.int64 if dtype == torch.float32 else torch.int32).reshape(-1)


def _ideal_product(element: NumberFormat, code: int, scale: NumberFormat, scale_code: int) -> float:
    return element.value(code) * scale.value(scale_code)


def _zeroing_product(element: NumberFormat, code: int, scale: NumberFormat, scale_code: int) -> float:
    """The rule of every operator. Zeros keep the sign of the code, times the sign of the scale where it has one."""
    sign = -1.0 if code >> (element.bits - 1) else 1.0
    if scale.signed and scale_code >> (scale.bits - 1):
        sign = -sign
    element_parts, scale_parts = element.parts(code), scale.parts(scale_code)
    if element_parts is None or scale_parts is None:
        return math.copysign(0.0, sign)
    exponent = element_parts[2] + scale_parts[2]
    if element is E4M3FN and exponent < SMALLEST_NORMAL_EXPONENT:
        return math.copysign(0.0, sign)
    magnitude = math.ldexp(float(element_parts[1] * scale_parts[1]), exponent)
    return math.copysign(math.inf if magnitude > torch.finfo(torch.float32).max else magnitude, sign)


def split_record(records: Tensor, fmt: RecordFormat | str) -> tuple[Tensor, Tensor]:
    """[..., record_bytes] bytes to views (data [..., data_bytes], scales [..., scale_bytes]), both uint8."""
    fmt = by_name(fmt)
    records = _as_bytes(records, fmt.record_bytes, "records", "split_record")
    return records[..., : fmt.data_bytes], records[..., fmt.data_bytes :]


def join_record(data: Tensor, scales: Tensor, fmt: RecordFormat | str) -> Tensor:
    """(data [..., data_bytes], scales [..., scale_bytes]) bytes to one [..., record_bytes] uint8."""
    fmt = by_name(fmt)
    data = _as_bytes(data, fmt.data_bytes, "data", "join_record")
    scales = _as_bytes(scales, fmt.scale_bytes, "scales", "join_record")
    if data.shape[:-1] != scales.shape[:-1]:
        raise ShapeError(
            f"join_record: scales must have the leading shape of data, {list(data.shape[:-1])}, "
            f"got {list(scales.shape[:-1])}."
        )
    return torch.cat((data, scales), dim=-1)


def _scales_per_word(dtype: torch.dtype, op: str) -> int:
    words = {torch.uint8: 1, torch.int16: 2, torch.int32: 4}
    if dtype not in words:
        raise DTypeError(f"{op}: packed ue8m0 scales must be int32, int16 or uint8, got {_name(dtype)}.")
    return words[dtype]


def pack_scales(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """ue8m0 bytes [..., n] uint8 to [..., n / 4] int32, [..., n / 2] int16, or themselves (uint8).

    The first group is in the lowest bits, so on a little-endian machine the memory does not change. Shifts instead of a
    dtype view: a view of a graph input is a bitcast, which Neuron compilers turn into a numeric conversion.
    """
    if scales.dtype != torch.uint8:
        raise DTypeError(f"pack_scales: scales must be uint8, got {_name(scales.dtype)}.")
    per_word = _scales_per_word(dtype, "pack_scales")
    if scales.dim() == 0 or scales.shape[-1] % per_word:
        raise ShapeError(f"pack_scales: scales must be [..., a multiple of {per_word}], got {list(scales.shape)}.")
    if per_word == 1:
        return scales
    words = scales[..., 0::per_word].to(torch.int32)
    for j in range(1, per_word):
        words = words | (scales[..., j::per_word].to(torch.int32) << (8 * j))
    return words.to(dtype)


def unpack_scales(packed: Tensor, op: str = "unpack_scales") -> Tensor:
    """The ue8m0 bytes of a packed tensor: [..., n] int32, int16 or uint8 to [..., n * groups per word] uint8."""
    per_word = _scales_per_word(packed.dtype, op)
    if per_word == 1:
        return packed
    if packed.dim() == 0:
        raise ShapeError(f"{op}: packed ue8m0 scales must be [..., n], got a scalar.")
    words = packed.to(torch.int32)
    return torch.stack([(words >> (8 * j)) & 0xFF for j in range(per_word)], dim=-1).flatten(-2).to(torch.uint8)


class QuantizedQuery(NamedTuple):
    """The (q_fp, q_sf) pair of an index query, as the scoring operators take it.

    q_fp: [..., 64] int8 (two e2m1 a byte) or [..., 128] float8_e4m3fn.
    q_sf: [...] int32, [..., 2] int16 or [..., 4] uint8 packed ue8m0; [...] float32 for INDEX_FP8_FP32, to be multiplied
        into the index weights (upstream's q then travels with q_sf None); or None, which is a scale of 1.
    """

    q_fp: Tensor
    q_sf: Tensor | None


def encode_query(
    q: Tensor,
    fmt: RecordFormat | str,
    *,
    sf_dtype: torch.dtype = torch.int32,
    e4m3_max: int = 448,
    on_nonfinite: str | None = None,
    op: str = "encode_query",
) -> QuantizedQuery:
    """Quantize index queries [..., 128] for keys of an index format; the arithmetic is `encode`'s."""
    fmt = _index_format(fmt, op)
    _check_values(q, fmt.elements, op)
    check_e4m3_max(e4m3_max, op)
    values, marked = _admit(q, fmt, on_nonfinite, op)
    data, scales = _quantize(values, fmt, e4m3_max, marked)
    data = data.view(torch.int8 if fmt.element is E2M1 else torch.float8_e4m3fn)
    if fmt.scale is FLOAT32:
        return QuantizedQuery(data, scales.view(torch.float32).squeeze(-1))
    packed = pack_scales(scales, sf_dtype)
    return QuantizedQuery(data, packed.squeeze(-1) if sf_dtype == torch.int32 else packed)


def decode_query(
    q_fp: Tensor,
    q_sf: Tensor | None = None,
    *,
    nan: str = "zero",
    dtype: torch.dtype = torch.bfloat16,
    op: str = "decode_query",
) -> Tensor:
    """Values [..., 128] of a quantized index query.

    Args:
        q_fp: [..., 64] int8 or uint8 (e2m1 pairs), or [..., 128] float8_e4m3fn, int8 or uint8 (e4m3).
        q_sf: [...] int32, [..., 2] int16 or [..., 4] uint8 ue8m0 scales. None (e4m3 only): the scale is 1.
        nan, dtype: as in `decode`.
    """
    fmt = query_format(q_fp, op)
    data = q_fp if q_fp.dtype == torch.uint8 else q_fp.view(torch.uint8)
    lead = list(q_fp.shape[:-1])
    if q_sf is None:
        if fmt.element is E2M1:
            raise ArgumentError(f"{op}: q_sf must be given with e2m1 queries, got None.")
        values = _lookup(data, _code_table(data.device))
        return (values if nan == "ideal" else _zero_nan(values, values)).to(dtype)
    per_word = _scales_per_word(q_sf.dtype, f"{op}: q_sf")
    words = fmt.num_sf // per_word
    if words == 1:
        expected, packed = lead, q_sf[..., None]
    else:
        expected, packed = [*lead, words], q_sf
    if list(q_sf.shape) != expected:
        raise ShapeError(f"{op}: q_sf must be {_name(q_sf.dtype)} {expected}, got {list(q_sf.shape)}.")
    return _dequantize(data, unpack_scales(packed, op), fmt, nan, dtype, op)


def query_format(q_fp: Tensor, op: str = "query_format") -> RecordFormat:
    """INDEX_FP4 or INDEX_FP8, by the dtype and the last dimension of q_fp."""
    if not isinstance(q_fp, Tensor) or q_fp.dtype not in _BYTE_DTYPES:
        got = _name(q_fp.dtype) if isinstance(q_fp, Tensor) else type(q_fp).__name__
        raise DTypeError(f"{op}: q must be int8 e2m1 pairs or float8_e4m3fn, got {got}.")
    kinds = {INDEX_FP4.data_bytes: INDEX_FP4, INDEX_FP8.data_bytes: INDEX_FP8}
    fmt = kinds.get(q_fp.shape[-1]) if q_fp.dim() else None
    if fmt is None or (fmt is INDEX_FP4 and q_fp.dtype == torch.float8_e4m3fn):
        raise ShapeError(
            f"{op}: q must be [..., {INDEX_FP4.data_bytes}] int8 or [..., {INDEX_FP8.data_bytes}] float8_e4m3fn, "
            f"got {list(q_fp.shape)} {_name(q_fp.dtype)}."
        )
    return fmt


def _index_format(fmt: RecordFormat | str, op: str) -> RecordFormat:
    fmt = by_name(fmt)
    if not fmt.is_index:
        names: Sequence[str] = [index.name for index in INDEX_FORMATS]
        raise FormatError(f"{op}: fmt must be an index format ({', '.join(names)}), got {fmt.name}.")
    return fmt


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
