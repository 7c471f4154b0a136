# SPDX-License-Identifier: Apache-2.0
"""The element types of `nki.language`, and the only place where numbers change their format.

A dtype is a `str` (as in the documented API), so kernels may compare it by identity or by text, and NumPy accepts it.
Conversions follow the engines: everything is computed in float32; float results round to nearest even; integer results
round to nearest even and saturate; `bool_` is one byte.
"""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import DTypeError

__all__ = ["ALL", "DType", "cast_into", "from_any", "to_f32"]

Array = np.ndarray[Any, np.dtype[Any]]


class DType(str):
    """One element type: its documented name plus the facts instructions ask for."""

    itemsize: int
    np: np.dtype[Any]
    is_float: bool
    is_int: bool
    is_packed: bool
    lut: Array | None  # float32 value of each code, for one-byte floats
    largest: float  # largest finite value of a one-byte float

    @property
    def is_bool(self) -> bool:
        return self == "bool"


def _dtype(name: str, numpy_type: Any, *, is_float: bool = False, is_packed: bool = False) -> DType:
    made = DType(name)
    made.np = np.dtype(numpy_type)
    made.itemsize = made.np.itemsize
    made.is_float = is_float
    made.is_packed = is_packed
    made.is_int = not is_float and not is_packed and name != "bool"
    made.lut, made.largest = None, 0.0
    if is_float and made.itemsize == 1:
        with np.errstate(all="ignore"):
            made.lut = np.arange(256, dtype=np.uint8).view(made.np).astype(np.float32)
        made.largest = float(made.lut[np.isfinite(made.lut)].max())
    return made


bool_ = _dtype("bool", np.uint8)
int8 = _dtype("int8", np.int8)
int16 = _dtype("int16", np.int16)
int32 = _dtype("int32", np.int32)
uint8 = _dtype("uint8", np.uint8)
uint16 = _dtype("uint16", np.uint16)
uint32 = _dtype("uint32", np.uint32)
float16 = _dtype("float16", np.float16, is_float=True)
float32 = _dtype("float32", np.float32, is_float=True)
bfloat16 = _dtype("bfloat16", ml_dtypes.bfloat16, is_float=True)
tfloat32 = _dtype("tfloat32", np.float32, is_float=True)
float8_e4m3 = _dtype("float8_e4m3", ml_dtypes.float8_e4m3, is_float=True)
float8_e4m3fn = _dtype("float8_e4m3fn", ml_dtypes.float8_e4m3fn, is_float=True)
float8_e5m2 = _dtype("float8_e5m2", ml_dtypes.float8_e5m2, is_float=True)
float8_e8m0fnu = _dtype("float8_e8m0fnu", ml_dtypes.float8_e8m0fnu, is_float=True)
float8_e5m2_x4 = _dtype("float8_e5m2_x4", np.uint32, is_packed=True)
float8_e4m3fn_x4 = _dtype("float8_e4m3fn_x4", np.uint32, is_packed=True)
float4_e2m1fn_x4 = _dtype("float4_e2m1fn_x4", np.uint16, is_packed=True)

ALL: dict[str, DType] = {
    str(d): d
    for d in (
        bool_, int8, int16, int32, uint8, uint16, uint32, float16, float32, bfloat16, tfloat32, float8_e4m3,
        float8_e4m3fn, float8_e5m2, float8_e8m0fnu, float8_e5m2_x4, float8_e4m3fn_x4, float4_e2m1fn_x4,
    )
}  # fmt: skip
_ALIASES = {"bool_": bool_, "float8e4": float8_e4m3, "float8e5": float8_e5m2, "float8_e8m0": float8_e8m0fnu}
FP8 = (float8_e4m3, float8_e5m2, float8_e4m3fn)
GEN4_ONLY = (float8_e4m3fn, float8_e8m0fnu, float8_e5m2_x4, float8_e4m3fn_x4, float4_e2m1fn_x4)
_WIDE = {"float64": "float32", "int64": "int32", "uint64": "uint32", "complex64": "float32"}


def from_any(value: Any, where: str = "dtype") -> DType:
    """The DType for a name, a DType, or a NumPy / ml_dtypes type. 64-bit types do not exist on the device."""
    if type(value) is DType:
        return value
    if isinstance(value, str):
        name = str(value).rsplit(".", 1)[-1]
    else:
        try:
            name = np.dtype(value).name
        except TypeError:
            name = str(getattr(value, "__name__", value)).rsplit(".", 1)[-1]
    found = ALL.get(name) or _ALIASES.get(name)
    if found is not None:
        return found
    if name in _WIDE:
        raise DTypeError(f"{where}: the device has no {name}; convert to {_WIDE[name]} first.")
    raise DTypeError(f"{where}: must be a dtype of nki.language ({', '.join(ALL)}), got {value!r}.")


def to_f32(array: Array, dtype: DType) -> Array:
    """The values as float32. A float32 array is returned as it is, everything else is a fresh array."""
    if dtype is float32:
        return array
    if dtype.lut is not None:
        # `take` is twice as fast as indexing, and by pairs of codes it is faster once more
        if array.flags.c_contiguous and array.size >= _PAIRED and array.shape[-1] % 2 == 0:
            return _pairs(dtype).take(array.view(np.uint16)).view(np.float32)
        return np.asarray(dtype.lut.take(array.view(np.uint8)))
    if dtype is tfloat32:
        return round_tf32(array)
    if array.dtype.itemsize not in array.strides:
        array = np.ascontiguousarray(array)  # a strided copy and a plain cast: three times faster than a strided cast
    return array.astype(np.float32)


_SMALL = 2048  # elements up to which one cast is faster than five passes
_PAIRED = 1 << 14  # elements from which the table of pairs, half a megabyte, is worth its place in the cache


@functools.cache
def _pairs(dtype: DType) -> Array:
    """The two float32 values of each pair of codes of a one-byte float, as one 8-byte word."""
    return np.asarray(dtype.lut).take(np.arange(1 << 16, dtype=np.uint16).view(np.uint8)).view(np.uint64)


@functools.cache
def _codes(dtype: DType) -> Array:
    """The one-byte float code of each bfloat16 pattern."""
    with np.errstate(all="ignore"):
        patterns = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
        return np.asarray(patterns.astype(np.float32).astype(dtype.np)).view(np.uint8)


def codes_of(values: Array, dtype: DType) -> Array:
    """float32 as the codes of a one-byte float, six times faster than the cast of `ml_dtypes`.

    The upper 16 bits of a float32, the last one set when any lower bit was (rounding to odd), are enough digits to
    round to 3 mantissa bits exactly: a table of all 2^16 patterns does the rest.
    """
    bits = values.view(np.uint32)
    upper = (bits >> np.uint32(16)).astype(np.uint16)
    upper |= bits.astype(np.uint16) != 0
    return _codes(dtype).take(upper)


def overflowed(out: Array, values: Array, dtype: DType) -> bool:
    """True when a finite float32 value became infinite or NaN in `out`, whose elements are a one-byte float."""
    if values.size == 0 or max(float(values.max()), -float(values.min())) <= dtype.largest:
        return False  # NaN compares false and goes on
    return not bool(np.isfinite(to_f32(out, dtype))[np.isfinite(values)].all())


def round_tf32(array: Array) -> Array:
    """float32 with 10 mantissa bits: the 13 others are rounded to nearest even."""
    bits = np.ascontiguousarray(array).view(np.uint32)
    rounded = (bits + np.uint32(0x0FFF) + ((bits >> np.uint32(13)) & np.uint32(1))) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(array), rounded.view(np.float32), array)


def cast_into(out: Array, values: Array, dtype: DType) -> None:
    """Write float32 (or exact integer) `values` into `out`, whose elements are `dtype`."""
    if dtype.is_float:
        if dtype is tfloat32:
            values = round_tf32(np.asarray(values, np.float32))
        if out.dtype == values.dtype:
            out[...] = values
        elif dtype.lut is not None and values.dtype == np.float32 and values.size > _SMALL:
            out.view(np.uint8)[...] = codes_of(values, dtype)
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                np.copyto(out, values, casting="unsafe")
        return
    if dtype is bool_:
        np.not_equal(values, 0, out=out.view(np.bool_))
        return
    if values.dtype.kind in "iub":
        if values.dtype.kind != "b" and values.dtype != out.dtype:
            info = np.iinfo(out.dtype)
            values = np.clip(values.astype(np.int64), info.min, info.max)
        np.copyto(out, values, casting="unsafe")
        return
    info = np.iinfo(out.dtype)
    with np.errstate(invalid="ignore"):
        rounded = np.rint(values).astype(np.float64)
        np.nan_to_num(rounded, copy=False, nan=0.0, posinf=float(info.max), neginf=float(info.min))
        np.copyto(out, np.clip(rounded, info.min, info.max), casting="unsafe")
