# SPDX-License-Identifier: Apache-2.0
"""The documented number rules, stated without the simulator: what the instruction tests compare with.

An engine reads every element as float32, computes in float32, and casts once to the result's type: floats to the
nearest value (even code on ties), integers to the nearest integer (even on ties), saturating.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from sparse_mla.simulator import language as nl

from .kit import BF16, E4M3, E5M2, get, launch, put

FLOATS = {"float32": np.dtype(np.float32), "bfloat16": BF16, "float16": np.dtype(np.float16), "float8_e4m3": E4M3,
          "float8_e5m2": E5M2}  # fmt: skip
INTEGERS = {n: np.dtype(n) for n in ("int8", "uint8", "int16", "uint16", "int32", "uint32")}
ALL = FLOATS | INTEGERS
FINITE_MAX = {"float8_e4m3": 240.0, "float8_e5m2": 57344.0, "float16": 65504.0}


def widen(array: Any) -> Any:
    """Any element as float32."""
    return np.asarray(array).astype(np.float64).astype(np.float32)


def cast(values: Any, dtype: np.dtype[Any]) -> Any:
    """float32 results in the destination's type."""
    values = np.asarray(values, np.float32)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        wide = np.rint(values.astype(np.float64))
        return np.clip(np.where(np.isnan(wide), 0, wide), info.min, info.max).astype(dtype)
    with np.errstate(all="ignore"):
        return values.astype(dtype)


@functools.cache
def finite_codes(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """Codes of the finite values that are not negative, ascending, and those values."""
    codes = np.arange(1 << 8 * dtype.itemsize - 1).astype(f"u{dtype.itemsize}")
    with np.errstate(invalid="ignore"):
        values = codes.view(dtype).astype(np.float64)
    finite = np.isfinite(values)
    return codes[finite], values[finite]


def nearest(values: Any, dtype: np.dtype[Any]) -> Any:
    """Codes of the nearest representable values, ties to the even code, by searching the whole one- or two-byte type;
    finite values only."""
    unsigned = np.dtype(f"u{dtype.itemsize}")
    half, magnitudes = finite_codes(dtype)
    wide = np.abs(np.asarray(values, np.float64))
    at = np.clip(np.searchsorted(magnitudes, wide), 1, len(magnitudes) - 1)
    low, high = wide - magnitudes[at - 1], magnitudes[at] - wide
    up = (high < low) | ((high == low) & (half[at] % 2 == 0))
    chosen = np.where(up, half[at], half[at - 1]).astype(np.uint32)
    sign = np.signbit(np.asarray(values)).astype(np.uint32) << np.uint32(8 * dtype.itemsize - 1)
    return (chosen | sign).astype(unsigned)


def bits(array: Any) -> Any:
    array = np.ascontiguousarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def same(actual: Any, expected: Any) -> None:
    """Equal type, shape and bits; any NaN equals any NaN."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    equal = bits(actual) == bits(expected)
    if actual.dtype.kind not in "iub":
        a, b = actual.astype(np.float32), expected.astype(np.float32)
        equal |= np.isnan(a) & np.isnan(b)
    wrong = np.argwhere(~equal)
    assert not len(wrong), (
        f"{len(wrong)} differ, first at {wrong[0]}: {actual[tuple(wrong[0])]!r} is not {expected[tuple(wrong[0])]!r}"
    )


def samples(dtype: np.dtype[Any], shape: tuple[int, ...], seed: int = 0) -> Any:
    """Values of every kind a type holds: extremes, ties, zeros of both signs, and random ones."""
    generator = np.random.default_rng(seed)
    count = int(np.prod(shape))
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        special = [info.min, info.max, 0, 1, info.max // 2]
        values = generator.integers(max(info.min, -1000), min(info.max, 1000), count).astype(dtype)
        values[: len(special)] = np.array(special, dtype)
        return values.reshape(shape)
    normal = generator.standard_normal(count).astype(np.float32) * np.exp2(generator.integers(-6, 7, count))
    values = normal.astype(dtype)
    special = np.array([0.0, -0.0, 0.5, 1.5, 2.5, -2.5, 126.5, 127.5, -128.5, 1.0, np.inf, -np.inf], np.float32)
    values[: len(special)] = special.astype(dtype)
    return values.reshape(shape)


def compute(body: Any, arrays: Any, outs: Any, *, buffers: Any = None, out_buffers: Any = None, **options: Any) -> Any:
    """Outputs of `body(*destination tiles, *input tiles)`; arrays are loaded to SBUF (or the buffer named)."""
    return run(body, arrays, outs, buffers=buffers, out_buffers=out_buffers, **options).outputs


def run(body: Any, arrays: Any, outs: Any, *, buffers: Any = None, out_buffers: Any = None, **options: Any) -> Any:
    def kernel(xs: Any) -> Any:
        places = buffers or [nl.sbuf] * len(xs)
        tiles = [put(x, place) for x, place in zip(xs, places, strict=True)]
        homes = out_buffers or [nl.sbuf] * len(outs)
        made = [nl.ndarray(shape, dtype, home) for (shape, dtype), home in zip(outs, homes, strict=True)]
        body(*made, *tiles)
        return tuple(get(t) for t in made)

    return launch(kernel, tuple(arrays), **options)


def one(body: Any, arrays: Any, shape: Any, dtype: Any, **options: Any) -> Any:
    """The single output of `compute`."""
    return compute(body, arrays, [(shape, dtype)], **options)[0]
