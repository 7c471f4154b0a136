# SPDX-License-Identifier: Apache-2.0
"""Conversions of the simulator against ml_dtypes: every code, every bfloat16 pattern and its neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparse_mla.simulator import dtypes

ONE_BYTE = [d for d in dtypes.ALL.values() if d.lut is not None]
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")


def bits(array: Any) -> Any:
    return np.ascontiguousarray(array).view(np.uint8)


@pytest.mark.parametrize("dtype", ONE_BYTE, ids=str)
def test_one_byte_floats_round_as_ml_dtypes_does(dtype: dtypes.DType) -> None:
    """All upper halves of a float32 with lower halves below, at and above the middle: no tie is decided elsewhere."""
    upper = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    for low in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        values = (upper | np.uint32(low)).view(np.float32).reshape(256, 256)
        expected = values.astype(dtype.np)
        out = np.empty_like(expected)
        dtypes.cast_into(out, values, dtype)
        assert (bits(out) == bits(expected)).all()
        turned = np.empty_like(expected)
        dtypes.cast_into(turned.T, values.T, dtype)
        assert (bits(turned) == bits(expected)).all()


@pytest.mark.parametrize("dtype", ONE_BYTE, ids=str)
@pytest.mark.parametrize("shape", [(256, 256), (128, 300), (128, 301), (7,), (1,)])
def test_one_byte_floats_widen_as_ml_dtypes_does(dtype: dtypes.DType, shape: tuple[int, ...]) -> None:
    codes = np.random.default_rng(0).permutation(np.arange(np.prod(shape)) % 256).astype(np.uint8).reshape(shape)
    array = codes.view(dtype.np)
    for view in (array, array[..., ::2], array.T):
        assert (bits(dtypes.to_f32(view, dtype)) == bits(view.astype(np.float32))).all()


@pytest.mark.parametrize("dtype", ONE_BYTE, ids=str)
def test_overflow_is_a_finite_value_that_became_infinite_or_nan(dtype: dtypes.DType) -> None:
    def overflowed(*values: float) -> bool:
        given = np.array(values, np.float32)
        out = np.empty(given.shape, dtype.np)
        dtypes.cast_into(out, given, dtype)
        return dtypes.overflowed(out, given, dtype)

    assert not overflowed(1.0, dtype.largest)
    assert not overflowed(1.0, np.inf, np.nan)
    if dtype is not dtypes.float8_e8m0fnu:  # its range is float32's
        assert overflowed(1.0, dtype.largest * 1.5)
        assert overflowed(-dtype.largest * 1.5, np.nan)
        assert not overflowed(dtype.largest * (1 + 2.0**-10))  # rounds down to the largest
