# SPDX-License-Identifier: Apache-2.0
"""Formats against golden bytes, a float64 statement of their own, and ml_dtypes: every code under every scale."""

from __future__ import annotations

import copy
import itertools
import json
import math
import pickle
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from sparse_mla import errors, formats
from sparse_mla.formats import (
    BF16,
    E2M1,
    E4M3FN,
    FORMATS,
    INDEX_FORMATS,
    INDEX_FP4,
    INDEX_FP8,
    INDEX_FP8_FP32,
    UE8M0,
    V41_FP4,
    V41_FP8,
    RecordFormat,
    by_name,
    by_record_bytes,
    decode,
    decode_query,
    encode,
    encode_query,
    join_record,
    pack_scales,
    split_record,
    unpack_scales,
)

VECTORS = Path(__file__).parent / "data" / "vectors"
QUANTIZED = (V41_FP8, V41_FP4, INDEX_FP4, INDEX_FP8)
SCALED = (*QUANTIZED, INDEX_FP8_FP32)
ALL = tuple(FORMATS.values())
FLOAT32_MAX = float(np.finfo(np.float32).max)


def vectors(name: str) -> Any:
    return json.loads((VECTORS / f"{name}.json").read_text())


def hex_bytes(text: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)


def hex_bf16(text: str) -> torch.Tensor:
    return hex_bytes(text).view(torch.bfloat16)


def number(value: float | str) -> float:
    return float(value)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal dtype, shape and bytes; any NaN equals any NaN."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    nan = expected.isnan() if expected.is_floating_point() else torch.zeros(expected.shape, dtype=torch.bool)
    if expected.is_floating_point():
        assert torch.equal(actual.isnan(), nan)
        words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.element_size()]
        actual, expected = actual.view(words), expected.view(words)
    different = (actual != expected) & ~nan
    assert not different.any(), f"{int(different.sum())} differ, first at {different.nonzero()[0].tolist()}"


# The statement of the formats, written from the definitions alone: Python integers and float64, one code at a time.


def e4m3_value(code: int) -> float:
    sign, exponent, mantissa = (-1.0 if code & 0x80 else 1.0), (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


def e2m1_value(code: int) -> float:
    return (-1.0 if code & 8 else 1.0) * (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)[code & 7]


def ue8m0_value(code: int) -> float:
    return math.nan if code == 255 else 2.0 ** (code - 127)


def signed_zero(negative: bool) -> float:
    return -0.0 if negative else 0.0


def stated_e4m3_ue8m0(code: int, scale: int) -> float:
    """The operators' rule: NaN to zero, exponents below -126 to zero, overflow to infinity; zeros keep their sign."""
    negative = bool(code & 0x80)
    exponent, mantissa = (code >> 3) & 15, code & 7
    power = max(exponent, 1) - 10 + scale - 127
    if (code & 0x7F) == 0x7F or scale == 255 or power < -126:
        return signed_zero(negative)
    magnitude = (mantissa if exponent == 0 else 8 + mantissa) * 2.0**power
    return math.copysign(math.inf if magnitude > FLOAT32_MAX else magnitude, -1.0 if negative else 1.0)


def stated_e2m1_ue8m0(code: int, scale: int) -> float:
    if scale == 255:
        return signed_zero(bool(code & 8))
    value = e2m1_value(code) * 2.0 ** (scale - 127)
    return math.copysign(math.inf, value) if abs(value) > FLOAT32_MAX else value


def stated_e2m1_e4m3(code: int, scale: int) -> float:
    if (scale & 0x7F) == 0x7F:
        return signed_zero(bool(code & 8) != bool(scale & 0x80))
    return e2m1_value(code) * e4m3_value(scale)


STATED = {
    "e4m3fn+ue8m0": (stated_e4m3_ue8m0, lambda c, s: e4m3_value(c) * ue8m0_value(s)),
    "e2m1+ue8m0": (stated_e2m1_ue8m0, lambda c, s: e2m1_value(c) * ue8m0_value(s)),
    "e2m1+e4m3fn": (stated_e2m1_e4m3, lambda c, s: e2m1_value(c) * e4m3_value(s)),
}


def every_record(fmt: RecordFormat) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    """Records that hold every data byte under every scale byte, and (code, scale) of each element."""
    group_bytes = fmt.data_bytes // fmt.num_sf
    data, scale = np.meshgrid(np.arange(256), np.arange(256))
    pairs = np.stack([data.ravel(), scale.ravel()], axis=1).reshape(-1, group_bytes, 2)  # groups of one scale
    pairs = pairs.reshape(-1, fmt.num_sf, group_bytes, 2)
    data_bytes, scales = pairs[..., 0], pairs[:, :, 0, 1]
    records = np.concatenate([data_bytes.reshape(-1, fmt.data_bytes), scales], axis=1).astype(np.uint8)
    if fmt.element is E2M1:
        codes = np.stack([data_bytes & 15, data_bytes >> 4], axis=-1).reshape(-1, fmt.elements)
    else:
        codes = data_bytes.reshape(-1, fmt.elements)
    return torch.from_numpy(records), codes, np.repeat(scales, fmt.elements_per_sf, axis=1)


# Number formats


def test_every_code_has_the_listed_value() -> None:
    listed = vectors("formats")
    for stated, values, fmt in (
        (e4m3_value, listed["e4m3fn_value"], E4M3FN),
        (e2m1_value, listed["e2m1_value"], E2M1),
    ):
        expected = np.array([number(v) for v in values])
        np.testing.assert_array_equal(np.array(fmt.values), expected)
        np.testing.assert_array_equal(np.signbit(fmt.values), np.signbit([stated(c) for c in range(len(values))]))
    for code, value in listed["ue8m0_value"].items():
        assert UE8M0.value(int(code)) == value
    assert math.isnan(UE8M0.value(255))
    assert UE8M0.value(0) == 2.0**-127
    assert (E4M3FN.max, E2M1.max, UE8M0.max) == (448.0, 6.0, 2.0**127)


@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [(E4M3FN, ml_dtypes.float8_e4m3fn), (E2M1, ml_dtypes.float4_e2m1fn), (UE8M0, ml_dtypes.float8_e8m0fnu)],
    ids=str,
)
def test_number_formats_agree_with_ml_dtypes(fmt: formats.NumberFormat, dtype: Any) -> None:
    codes = np.arange(1 << fmt.bits, dtype=np.uint8)
    theirs = codes.view(dtype).astype(np.float64)
    np.testing.assert_array_equal(np.array(fmt.values), theirs)
    decoded = fmt.decode(torch.from_numpy(codes), dtype=torch.float64)
    np.testing.assert_array_equal(decoded.numpy(), theirs)
    finite = np.isfinite(theirs) & (theirs >= 2.0**-126 if fmt is UE8M0 else np.isfinite(theirs))
    back = fmt.encode(torch.from_numpy(theirs[finite].astype(np.float32)))
    np.testing.assert_array_equal(back.numpy(), codes[finite])


@pytest.mark.parametrize(
    ("fmt", "dtype"), [(E4M3FN, ml_dtypes.float8_e4m3fn), (E2M1, ml_dtypes.float4_e2m1fn)], ids=str
)
def test_rounding_of_a_million_float32_agrees_with_ml_dtypes(fmt: formats.NumberFormat, dtype: Any) -> None:
    rng = np.random.default_rng(5)
    x = (rng.standard_normal(1_000_000) * 2.0 ** rng.integers(-12, 9, 1_000_000)).astype(np.float32)
    x = np.clip(x, -fmt.max, fmt.max)
    np.testing.assert_array_equal(fmt.encode(torch.from_numpy(x)).numpy(), x.astype(dtype).view(np.uint8))


@pytest.mark.parametrize("fmt", [E4M3FN, E2M1], ids=str)
def test_rounding_next_to_every_midpoint(fmt: formats.NumberFormat) -> None:
    """One float32 step decides; a cast that goes through a narrower type first gets these wrong."""
    magnitudes = sorted({abs(v) for v in fmt.values if not math.isnan(v)})
    for code, (low, high) in enumerate(itertools.pairwise(magnitudes)):
        middle = np.float32((low + high) / 2)
        even = code if code % 2 == 0 else code + 1
        x = torch.tensor([np.nextafter(middle, np.float32(0)), middle, np.nextafter(middle, np.float32(1e9))])
        assert fmt.encode(x).tolist() == [code, even, code + 1]
        negative = 1 << (fmt.bits - 1)
        assert fmt.encode(-x).tolist() == [negative | code, negative | even, negative | (code + 1)]
    outside = torch.tensor([fmt.max * 1.03125, 1e9, math.inf, -1e9])
    top = len(magnitudes) - 1
    assert fmt.encode(outside).tolist() == [top, top, top, top | 1 << (fmt.bits - 1)]


def test_scales_round_up() -> None:
    x = torch.tensor([1.0, 1.0000001, 0.75, 2.0**-126, 3e38])
    assert UE8M0.encode(x).tolist() == [127, 128, 127, 1, 254]


# Record formats


def test_sizes_are_what_upstream_calls_them() -> None:
    sizes = {fmt.name: (fmt.data_bytes, fmt.scale_bytes, fmt.record_bytes, fmt.num_sf) for fmt in ALL}
    assert sizes == {
        "V41_FP8": (512, 16, 528, 16),
        "V41_FP4": (256, 32, 288, 32),
        "INDEX_FP4": (64, 4, 68, 4),
        "INDEX_FP8": (128, 4, 132, 4),
        "INDEX_FP8_FP32": (128, 4, 132, 1),
        "BF16": (1024, 0, 1024, 0),
    }
    assert {fmt.name for fmt in INDEX_FORMATS} == {"INDEX_FP4", "INDEX_FP8", "INDEX_FP8_FP32"}
    assert V41_FP4.description == "512 e2m1 + 32 e4m3fn = 288 B"


@pytest.mark.parametrize("fmt", ALL, ids=str)
def test_a_format_is_one_object(fmt: RecordFormat) -> None:
    assert by_name(fmt.name) is fmt
    assert by_name(fmt) is fmt
    assert pickle.loads(pickle.dumps(fmt)) is fmt
    assert copy.deepcopy(fmt) is fmt


def test_a_format_of_ones_own() -> None:
    wide = RecordFormat("MXFP4_512", E2M1, 512, 32, UE8M0)
    assert (wide.data_bytes, wide.scale_bytes, wide.record_bytes) == (256, 16, 272)
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    narrow = decode(encode(x.reshape(12, 128), INDEX_FP4), INDEX_FP4).reshape(3, 512)
    assert torch.equal(decode(encode(x, wide), wide), narrow)
    assert pickle.loads(pickle.dumps(wide)).record_bytes == 272
    for facts in (("BAD", E4M3FN, 512, 32, E4M3FN), ("BAD", E2M1, 100, 16, E4M3FN), ("BAD", E2M1, 3, 3, UE8M0)):
        with pytest.raises(errors.FormatError, match="RecordFormat: element"):
            RecordFormat(*facts)


@pytest.mark.parametrize("fmt", [f for f in ALL if f.record_bytes != 132], ids=str)
def test_a_width_tells_the_format(fmt: RecordFormat) -> None:
    assert by_record_bytes(fmt.record_bytes) is fmt
    assert by_record_bytes(fmt.record_bytes, index=fmt.is_index) is fmt
    with pytest.raises(errors.FormatError, match=f"got {fmt.record_bytes}; {fmt.record_bytes} is an .* record"):
        by_record_bytes(fmt.record_bytes, index=not fmt.is_index)


@pytest.mark.parametrize(
    ("width", "hint"),
    [
        (584, "V4 record"),
        (656, "V3.2 record"),
        (592, "older mixed"),
        (512, "head size in elements"),
        (576, "V3.2 head size"),
        (384, "FP4 record of the V4 family"),
        (352, "FP4 record of the V4 family"),
    ],
)
def test_a_foreign_width_is_refused_with_what_it_looks_like(width: int, hint: str) -> None:
    with pytest.raises(errors.FormatError) as caught:
        by_record_bytes(width, index=False, op="sparse_decode", argument="k_cache")
    message = str(caught.value)
    assert message.startswith(
        "sparse_decode: k_cache must have records of 528 (V41_FP8), 288 (V41_FP4), 1024 (BF16) bytes"
    )
    assert f"got {width}; {width} is " in message
    assert hint in message
    assert isinstance(caught.value, ValueError)


def test_an_unknown_width_or_name_is_refused() -> None:
    with pytest.raises(errors.FormatError, match=r"got 7\.$"):
        by_record_bytes(7)
    with pytest.raises(errors.FormatError, match=r"V41_FP8, V41_FP4.*got 'V4'"):
        by_name("V4")


def test_132_bytes_must_be_named() -> None:
    for index in (None, True):
        with pytest.raises(errors.FormatError, match=r"must name its format.*INDEX_FP8 or INDEX_FP8_FP32"):
            by_record_bytes(132, index=index)


# Decode


@pytest.mark.parametrize("nan", ["zero", "ideal"])
@pytest.mark.parametrize("fmt", QUANTIZED, ids=str)
def test_every_code_under_every_scale(fmt: RecordFormat, nan: str) -> None:
    records, codes, scales = every_record(fmt)
    stated = STATED[fmt.kind][0 if nan == "zero" else 1]
    table = np.array([[stated(c, s) for c in range(1 << fmt.element.bits)] for s in range(256)])
    exact = torch.from_numpy(table[scales, codes])
    assert_same_bits(decode(records, fmt, nan=nan, dtype=torch.float64), exact)
    single = exact.to(torch.float32)
    assert_same_bits(decode(records, fmt, nan=nan, dtype=torch.float32), single)
    half = torch.from_numpy(single.numpy().astype(ml_dtypes.bfloat16).view(np.int16)).view(torch.bfloat16)
    assert_same_bits(decode(records, fmt, nan=nan), half)
    if nan == "zero":
        assert not decode(records, fmt).isnan().any()
        assert torch.equal(half.double(), exact), "the operators' rule must be exact in bfloat16"


def test_listed_decode_edges() -> None:
    listed = vectors("decode_edges")
    for fmt, cases, scale in (
        (V41_FP8, listed["e4m3_times_ue8m0"], "ue8m0"),
        (INDEX_FP8, listed["e4m3_times_ue8m0"], "ue8m0"),
        (V41_FP4, listed["e2m1_times_e4m3"], "e4m3_scale"),
    ):
        for case in cases:
            record = torch.zeros(fmt.record_bytes, dtype=torch.uint8)
            record[0], record[fmt.data_bytes] = case["code"], case[scale]
            # Scale 255 is the one place where the operators' rule and the listed column differ: NaN, so zero.
            listed_zero = 0.0 if case.get("ue8m0") == 255 else number(case["neuron_decode"])
            for nan, value in (("zero", listed_zero), ("ideal", number(case["ideal"]))):
                got = decode(record, fmt, nan=nan, dtype=torch.float64)[0].item()
                assert got == value or (math.isnan(got) and math.isnan(value)), (fmt, case, nan)
                assert math.isnan(value) or math.copysign(1, got) == math.copysign(1, value), (fmt, case, nan)


def test_scale_byte_255_makes_the_group_zero_and_no_other() -> None:
    for fmt in (V41_FP8, INDEX_FP8, INDEX_FP4):
        records = torch.full((1, fmt.record_bytes), 0x38, dtype=torch.uint8)
        records[0, fmt.data_bytes :] = 127
        records[0, fmt.data_bytes + 1] = 255
        groups = decode(records, fmt).reshape(fmt.num_sf, fmt.elements_per_sf)
        assert (groups[1] == 0).all()
        assert (groups[[0, 2, 3]] != 0).any(dim=1).all()
        assert decode(records, fmt, nan="ideal").isnan().sum() == fmt.elements_per_sf


def test_bytes_written_by_engines_with_the_large_cap_decode_as_finite() -> None:
    record = torch.zeros(V41_FP8.record_bytes, dtype=torch.uint8)
    record[:9] = torch.tensor([0x78, 0x79, 0x7A, 0x7B, 0x7C, 0x7D, 0x7E, 0x80, 0x01])
    record[V41_FP8.data_bytes :] = 127
    values = decode(record, V41_FP8)[:9]
    assert values.tolist() == [256, 288, 320, 352, 384, 416, 448, 0, 2**-9]
    assert math.copysign(1, values[7].item()) == -1


def test_float32_scales() -> None:
    fmt = INDEX_FP8_FP32
    scales = torch.tensor([1.0, 0.0078125, 3.3e-5, -2.0, 0.0, -0.0, math.nan, math.inf, -math.inf, 1e-42, 3e38])
    codes = torch.arange(256, dtype=torch.uint8).reshape(2, 128)
    records = torch.cat(
        (
            codes.repeat(len(scales), 1, 1).reshape(-1, 128),
            scales.repeat_interleave(2)[:, None].contiguous().view(torch.uint8),
        ),
        dim=1,
    )
    assert records.shape[1] == fmt.record_bytes
    value = np.array([e4m3_value(c) for c in range(256)], dtype=np.float32).reshape(1, 2, 128)
    with np.errstate(all="ignore"):
        product = (value * scales.numpy()[:, None, None]).astype(np.float32).reshape(-1, 128)
        value64 = value.astype(np.float64) * scales.numpy().astype(np.float64)[:, None, None]
    assert_same_bits(decode(records, fmt, nan="ideal", dtype=torch.float32), torch.from_numpy(product))
    assert_same_bits(decode(records, fmt, nan="ideal", dtype=torch.float64), torch.from_numpy(value64.reshape(-1, 128)))
    zeroed = decode(records, fmt, dtype=torch.float32)
    assert not zeroed.isnan().any()
    assert torch.equal(zeroed, torch.from_numpy(product).nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf))
    bits = product.astype(ml_dtypes.bfloat16).view(np.int16)
    rounded = torch.from_numpy(bits).view(torch.bfloat16)
    assert torch.equal(decode(records, fmt), rounded.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf))


def test_every_bfloat16_survives_its_record() -> None:
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).reshape(-1, 512)
    records = every.view(torch.uint8)
    assert_same_bits(decode(records, BF16, nan="ideal"), every)
    zeroed = decode(records, BF16)
    assert torch.equal(zeroed, every.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf))
    finite = every[every.isfinite().all(dim=1)]
    assert torch.equal(encode(finite, BF16), finite.view(torch.uint8))


@pytest.mark.parametrize("fmt", ALL, ids=str)
def test_flush_to_zero_does_not_change_a_decode(fmt: RecordFormat) -> None:
    """The processor mode that other libraries switch on must not reach the tables."""
    records = torch.randint(
        0, 256, (64, fmt.record_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(3)
    )
    if fmt is INDEX_FP8_FP32:
        records[:, fmt.data_bytes :] = torch.tensor([0, 0, 0x80, 0x3F])
    before = decode(records, fmt)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        after = decode(records, fmt)
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(after, before)


@pytest.mark.parametrize("fmt", ALL, ids=str)
def test_shapes_and_views_of_records(fmt: RecordFormat) -> None:
    x = torch.randn(2, 3, fmt.elements, generator=torch.Generator().manual_seed(1)).bfloat16()
    records = encode(x, fmt)
    assert records.shape == (2, 3, fmt.record_bytes)
    assert records.dtype == torch.uint8
    values = decode(records, fmt)
    assert values.shape == x.shape
    assert values.dtype == torch.bfloat16
    assert torch.equal(encode(x[1, 2], fmt), records[1, 2])
    assert torch.equal(decode(records[1, 2], fmt), values[1, 2])
    strided = torch.empty(3, 2, fmt.record_bytes + 5, dtype=torch.uint8)[:, :, 3 : 3 + fmt.record_bytes].transpose(0, 1)
    strided.copy_(records)
    assert torch.equal(decode(strided, fmt), values)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        assert torch.equal(decode(records.view(dtype), fmt), values)
    odd = torch.zeros(fmt.record_bytes + 9, dtype=torch.uint8)
    odd[3:-6] = records[1, 2]
    assert torch.equal(decode(odd[3:-6], fmt), values[1, 2]), "one record at an odd address"
    assert torch.equal(decode(odd[None, 3:-6], fmt)[0], values[1, 2])
    data, scales = split_record(records, fmt)
    assert data.shape[-1] == fmt.data_bytes
    assert scales.shape[-1] == fmt.scale_bytes
    assert data.data_ptr() == records.data_ptr()
    assert torch.equal(join_record(data, scales, fmt), records)
    wide = x[:, :, None, :].expand(2, 3, 2, fmt.elements)
    assert torch.equal(encode(wide, fmt.name), records[:, :, None, :].expand(2, 3, 2, fmt.record_bytes))


@pytest.mark.parametrize("fmt", ALL, ids=str)
@pytest.mark.parametrize("lead", [(0,), (2, 0, 3), ()])
def test_no_rows_is_no_error(fmt: RecordFormat, lead: tuple[int, ...]) -> None:
    records = encode(torch.zeros(*lead, fmt.elements), fmt)
    assert records.shape == (*lead, fmt.record_bytes)
    assert decode(records, fmt).shape == (*lead, fmt.elements)


# Encode


@pytest.mark.parametrize(
    "name", ["quant_e4m3_ue8m0_g32_448", "quant_e4m3_ue8m0_g32_224", "quant_e2m1_ue8m0_g32", "quant_e2m1_e4m3_g16"]
)
def test_listed_groups(name: str) -> None:
    file = vectors(name)
    fmt = {"quant_e2m1_e4m3_g16": V41_FP4, "quant_e2m1_ue8m0_g32": INDEX_FP4}.get(name, V41_FP8)
    cap = 224 if name.endswith("224") else 448
    assert file["group"] == fmt.elements_per_sf
    for case in file["cases"]:
        x = torch.zeros(fmt.elements)
        x[: fmt.elements_per_sf] = torch.tensor([number(v) for v in case["x"]])
        x = x.to(torch.bfloat16)
        for given in (x, x.float()):
            data, scales = split_record(encode(given, fmt, e4m3_max=cap), fmt)
            codes = data[: fmt.elements_per_sf]
            if fmt.element is E2M1:
                half = data[: fmt.elements_per_sf // 2]
                codes = torch.stack((half & 15, half >> 4), dim=-1).flatten()
            assert scales[0].item() == case["scale_byte"], case["name"]
            assert codes.tolist() == case["codes"], case["name"]
        expected = torch.tensor([number(v) for v in case["decoded"]])
        decoded = decode(encode(x, fmt, e4m3_max=cap), fmt, dtype=torch.float32)[: fmt.elements_per_sf]
        assert torch.equal(decoded, expected), case["name"]
        assert torch.equal(decoded.signbit(), expected.signbit()), case["name"]


def test_listed_records() -> None:
    for case in vectors("records")["cases"]:
        x = hex_bf16(case["x_bf16le"])
        for key, fmt, cap in (("528", V41_FP8, 448), ("528_max224", V41_FP8, 224), ("288", V41_FP4, 448)):
            record = encode(x, fmt, e4m3_max=cap)
            assert torch.equal(record, hex_bytes(case[f"record_{key}"]))
            assert_same_bits(decode(record, fmt), hex_bf16(case[f"decoded_{key}_bf16le"]))


def test_the_listed_reciprocal_ties_are_real_ties() -> None:
    """Encoders that multiply by a float32 reciprocal differ exactly where listed: readers accept both, we write one."""
    listed = 0
    for case in vectors("records")["cases"]:
        x, ours = hex_bf16(case["x_bf16le"]), hex_bytes(case["record_288"])
        for position, (canonical, other) in case["record_288_if_reciprocal_multiply"].items():
            listed += 1
            assert ours[int(position)].item() == canonical != other
            scale = e4m3_value(int(ours[256 + int(position) // 8]))
            for nibble in (0, 4):
                a, b = canonical >> nibble & 7, other >> nibble & 7
                if a != b:
                    value = abs(float(x[2 * int(position) + nibble // 4]))
                    assert Fraction(value) == Fraction(scale) * (Fraction(e2m1_value(a)) + Fraction(e2m1_value(b))) / 2
    assert listed >= 1


def test_listed_index_pages() -> None:
    file = vectors("index_pages")
    page = file["page_kv"]
    for fmt in (INDEX_FP8, INDEX_FP4):
        for number_of_page in range(file["pages"]):
            x = torch.stack([hex_bf16(text) for text in file["x_bf16le"][number_of_page]])
            data, scales = split_record(encode(x, fmt), fmt)
            sections = torch.cat((data.flatten(), scales.flatten()))
            assert torch.equal(sections, hex_bytes(file[f"pages_{fmt.record_bytes}"][number_of_page]))
            expected = torch.stack([hex_bf16(t) for t in file[f"decoded_{fmt.record_bytes}_bf16le"][number_of_page]])
            assert_same_bits(decode(join_record(data, scales, fmt), fmt), expected)
        assert page == x.shape[0]


def stated_scale(amax: Fraction, fmt: RecordFormat, cap: int) -> int:
    """Scale byte of a group maximum by exact rational arithmetic."""
    if fmt.kind == "e2m1+e4m3fn":
        quotient = min(max(amax, Fraction(6, 512)) / 6, Fraction(cap))
        above = min(next((c for c in range(0x7F) if E4M3FN.values[c] >= quotient), 0x7E), 0x76 if cap == 224 else 0x7E)
        near = (max(above - 1, 0), above)
        return min(near, key=lambda c: (abs(Fraction(e4m3_value(c)) - quotient), c % 2))
    largest, floor = (cap, Fraction(float(np.float32(1e-4)))) if fmt.element is E4M3FN else (6, Fraction(6, 2**126))
    amax = max(amax, floor)
    byte = max(1, math.frexp(float(amax / largest))[1] + 125)  # at or one below the answer
    while Fraction(largest) * Fraction(2) ** (byte - 127) < amax:
        byte += 1
    return byte


@pytest.mark.parametrize(
    ("fmt", "cap"), [(V41_FP8, 448), (V41_FP8, 224), (INDEX_FP4, 448), (V41_FP4, 448), (V41_FP4, 224)], ids=str
)
def test_the_scale_of_every_bfloat16_maximum(fmt: RecordFormat, cap: int) -> None:
    """All 32,640 finite maxima against exact arithmetic, which is monotonic, so its steps are found by bisection."""
    every = torch.arange(0, 0x7F80, dtype=torch.int16).view(torch.bfloat16)
    x = torch.zeros(len(every) // fmt.num_sf, fmt.num_sf, fmt.elements_per_sf, dtype=torch.bfloat16)
    x[:, :, 3] = -every.reshape(-1, fmt.num_sf)
    got = split_record(encode(x.flatten(1), fmt, e4m3_max=cap), fmt)[1].flatten().numpy()
    exact = [Fraction(float(v)) for v in every]
    expected = np.zeros(len(every), dtype=np.int64)

    def fill(first: int, last: int, low: int, high: int) -> None:
        if low == high or last - first <= 1:
            expected[first:last] = low
            expected[last] = high
            return
        middle = (first + last) // 2
        at = stated_scale(exact[middle], fmt, cap)
        fill(first, middle, low, at)
        fill(middle, last, at, high)

    last = len(every) - 1
    fill(0, last, stated_scale(exact[0], fmt, cap), stated_scale(exact[last], fmt, cap))
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("scale_byte", range(1, 0x7F))
def test_every_bfloat16_significand_under_every_e4m3_scale(scale_byte: int) -> None:
    """Nearest e2m1 of the exact quotient, ties to the even code, in the binades where the quotient is decided."""
    scale = e4m3_value(scale_byte)
    exponents = range(math.floor(math.log2(scale)) - 3, math.floor(math.log2(scale)) + 3)
    values = np.array([m * 2.0 ** (e - 7) for e in exponents for m in range(128, 256)])
    values = values[values <= min(6 * scale, 2688.0)]
    x = np.zeros((-(-len(values) // 15), 16))
    x[:, 0] = 6 * scale
    x[:, 1:].flat[: len(values)] = values
    records = np.zeros((len(x), 512))
    records[:, :16] = x
    data, scales = split_record(encode(torch.from_numpy(records).to(torch.float32), V41_FP4), V41_FP4)
    assert (scales[:, 0] == scale_byte).all()
    codes = torch.stack((data & 15, data >> 4), dim=-1).flatten(1)[:, 1:16].flatten().numpy()[: len(values)]
    quotient = values / scale  # float64: 8 bits over 4 bits, so no quotient but an exact tie compares equal to one
    magnitude = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    distance = np.abs(quotient[:, None] - magnitude) + np.array([0, 1, 0, 1, 0, 1, 0, 1]) * 1e-12
    np.testing.assert_array_equal(codes, distance.argmin(axis=1))


def test_ties_of_e2m1_and_the_nibble_order() -> None:
    x = torch.zeros(512)
    x[:10] = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -5])
    x[16:18] = torch.tensor([0.5, 1.0])
    x[18] = 6.0
    data, scales = split_record(encode(x, V41_FP4), V41_FP4)
    assert scales[:2].tolist() == [0x38, 0x38]
    codes = torch.stack((data & 15, data >> 4), dim=-1).flatten()
    assert codes[:10].tolist() == [7, 0, 2, 2, 4, 4, 6, 6, 8, 14]
    assert data[8].item() == 0x21, "the even element is the low nibble"


def test_fp4_scale_bytes_of_named_maxima() -> None:
    maxima = {0.0: 0x01, 1e-4: 0x01, 1.0: 0x23, 6.0: 0x38, 7.0: 0x39, 2688.0: 0x7E, 3000.0: 0x7E}
    for amax, expected in maxima.items():
        x = torch.zeros(512)
        x[5] = amax
        data, scales = split_record(encode(x, V41_FP4), V41_FP4)
        assert scales[0].item() == expected
        if amax == 3000.0:
            assert data[2].item() == 0x70


def test_quiet_groups_keep_the_small_scales() -> None:
    """The floor is on the maximum (1e-4), not on the scale: smallest byte 105, 106 under the smaller cap."""
    for amax, expected in ((0.0, 105), (1e-3, 109), (0.01, 112), (0.05, 114)):
        x = torch.full((512,), amax).bfloat16()
        assert split_record(encode(x, V41_FP8), V41_FP8)[1].unique().tolist() == [expected]
        assert split_record(encode(x, V41_FP8, e4m3_max=224), V41_FP8)[1].unique().tolist() == [expected + 1]
    assert split_record(encode(torch.zeros(128), INDEX_FP4), INDEX_FP4)[1].tolist() == [1] * 4


def test_float32_input_is_not_rounded_to_bfloat16_first() -> None:
    x = torch.zeros(512)
    x[0] = 1.7535  # in bfloat16 it would be 1.75, whose scale is half as large
    assert split_record(encode(x, V41_FP8), V41_FP8)[1][0].item() == 120
    assert split_record(encode(x.bfloat16(), V41_FP8), V41_FP8)[1][0].item() == 119
    x[0] = float(np.nextafter(np.float32(1.75), np.float32(2)))
    assert split_record(encode(x, V41_FP8), V41_FP8)[1][0].item() == 120
    x[:4] = torch.tensor([448.0, 1.0625 + 2.0**-20, 1.0625, 17 + 2.0**-18])
    assert encode(x, V41_FP8)[:4].tolist() == [0x7E, 0x39, 0x38, 0x59]
    half = torch.randn(4, 512, generator=torch.Generator().manual_seed(2)).half()
    assert torch.equal(encode(half, V41_FP8), encode(half.float(), V41_FP8))


def test_the_smaller_cap_shifts_codes_and_scales_by_one() -> None:
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(7)).bfloat16()
    (full, full_sf), (small, small_sf) = (
        split_record(encode(x, V41_FP8, e4m3_max=cap), V41_FP8) for cap in formats.E4M3_CAPS
    )
    assert torch.equal(small_sf, full_sf + 1)
    assert (small & 0x7F).max() <= 0x76, "nothing in the exponent field trn2 lacks"
    normal = (full & 0x7F) >= 0x10
    assert torch.equal(small[normal], full[normal] - 8)
    a, b = decode(encode(x, V41_FP8), V41_FP8), decode(encode(x, V41_FP8, e4m3_max=224), V41_FP8)
    assert torch.equal(a[normal], b[normal])
    assert torch.equal(encode(x, V41_FP4, e4m3_max=224), encode(x, V41_FP4)), "scales of ordinary rows are far below"
    loud = torch.full((512,), 2000.0)
    assert split_record(encode(loud, V41_FP4, e4m3_max=224), V41_FP4)[1].unique().tolist() == [0x76]


def test_values_are_rounded_against_the_stored_scale() -> None:
    """Rounding with the exact scale and storing a power of two is 14 times worse, and looks fine on one element."""
    x = torch.randn(4096, 512, generator=torch.Generator().manual_seed(11)).bfloat16()
    error = (decode(encode(x, V41_FP8), V41_FP8).double() - x.double()).norm() / x.double().norm()
    assert error <= 0.028
    error = (decode(encode(x, V41_FP4), V41_FP4).double() - x.double()).norm() / x.double().norm()
    assert error <= 0.1


@pytest.mark.parametrize("fmt", [V41_FP8, INDEX_FP8, INDEX_FP4], ids=str)
def test_power_of_two_scales_requantize_to_the_same_values(fmt: RecordFormat) -> None:
    x = torch.randn(512, fmt.elements, generator=torch.Generator().manual_seed(13)).bfloat16()
    once = decode(encode(x, fmt), fmt)
    assert torch.equal(decode(encode(once, fmt), fmt), once)


def test_float32_scales_encode() -> None:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(17)).bfloat16()
    data, scales = split_record(encode(x, INDEX_FP8_FP32), INDEX_FP8_FP32)
    scale = x.float().abs().amax(dim=1).clamp_min(1e-4) / np.float32(448)
    assert torch.equal(scales.contiguous().view(torch.float32)[:, 0], scale)
    codes = (x.float() / scale[:, None]).numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(data.numpy(), codes)
    error = (decode(encode(x, INDEX_FP8_FP32), INDEX_FP8_FP32).double() - x.double()).norm() / x.double().norm()
    assert error < 0.03


def test_the_two_132_byte_records_do_not_read_each_other() -> None:
    x = torch.randn(128, 128, generator=torch.Generator().manual_seed(19)).bfloat16()
    for written, read in ((INDEX_FP8, INDEX_FP8_FP32), (INDEX_FP8_FP32, INDEX_FP8)):
        records = encode(x, written)
        assert torch.allclose(decode(records, written).float(), x.float(), atol=0.2, rtol=0.07)
        crossed = decode(records, read).float()
        assert not torch.allclose(crossed, x.float(), atol=0.2, rtol=0.07)


# Non-finite values


@pytest.mark.parametrize("fmt", ALL, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_becomes_of_a_nonfinite_element(fmt: RecordFormat, bad: float) -> None:
    clean = torch.randn(3, fmt.elements, generator=torch.Generator().manual_seed(23)).bfloat16()
    clean[1, 40] = 0.0
    x = clean.clone()
    x[1, 40] = bad
    with pytest.raises(errors.NonFiniteError, match=r"encode: x must be finite, got -?(nan|inf) at \[1, 40\] \(1 such"):
        encode(x, fmt)
    assert torch.equal(encode(x, fmt, on_nonfinite="zero"), encode(clean, fmt))
    saturated = clean.clone()
    saturated[1, 40] = 0.0 if math.isnan(bad) else math.copysign(formats.BF16_MAX, bad)
    assert torch.equal(encode(x, fmt, on_nonfinite="saturate"), encode(saturated, fmt))
    marked = encode(x, fmt, on_nonfinite="nan_scale")
    group = slice(
        40 // fmt.elements_per_sf * fmt.elements_per_sf, (40 // fmt.elements_per_sf + 1) * fmt.elements_per_sf
    )
    if fmt is BF16:
        group = slice(40, 41)
    values = decode(marked, fmt)
    assert (values[1, group] == 0).all()
    assert decode(marked, fmt, nan="ideal")[1, group].isnan().all()
    untouched = torch.ones(3, fmt.elements, dtype=torch.bool)
    untouched[1, group] = False
    assert torch.equal(values[untouched], decode(encode(clean, fmt), fmt)[untouched])
    if fmt.scale is not None and fmt is not INDEX_FP8_FP32:
        nan_byte = 0x7F if fmt.scale is E4M3FN else 0xFF
        assert split_record(marked, fmt)[1][1, 40 // fmt.elements_per_sf].item() == nan_byte


def test_a_float32_that_bfloat16_cannot_hold_is_not_finite_there() -> None:
    x = torch.zeros(512)
    x[7] = 3.4e38
    with pytest.raises(errors.NonFiniteError, match="inf at \\[7\\]"):
        encode(x, BF16)
    assert decode(encode(x, BF16, on_nonfinite="saturate"), BF16)[7].item() == formats.BF16_MAX
    assert decode(encode(x, V41_FP8), V41_FP8)[7].item() == math.inf, "a listed overflow: the scale cannot follow"


def test_other_devices_do_not_wait_to_raise() -> None:
    assert encode(torch.zeros(2, 512, device="meta"), V41_FP8).shape == (2, 528)


# Packed scales and queries


def test_listed_packed_scales() -> None:
    for case in vectors("packed_scales")["cases"]:
        scales = torch.tensor(case["uint8"], dtype=torch.uint8)
        for dtype, key in ((torch.int16, "int16"), (torch.int32, "int32")):
            packed = pack_scales(scales, dtype)
            assert packed.dtype == dtype
            assert packed.tolist() == (case[key] if dtype == torch.int16 else [case[key]])
            assert torch.equal(packed.view(torch.uint8), scales), "the memory does not change"
            assert torch.equal(unpack_scales(packed), scales)
        assert pack_scales(scales, torch.uint8) is scales
        assert unpack_scales(scales) is scales


def test_every_packed_pattern_comes_back() -> None:
    pairs = torch.cartesian_prod(torch.arange(256), torch.arange(256)).to(torch.uint8)
    assert torch.equal(unpack_scales(pack_scales(pairs, torch.int16)), pairs)
    fours = torch.randint(0, 256, (3, 5, 8), dtype=torch.uint8)
    assert pack_scales(fours, torch.int32).shape == (3, 5, 2)
    assert torch.equal(unpack_scales(pack_scales(fours, torch.int32)), fours)
    with pytest.raises(errors.ShapeError, match="multiple of 4"):
        pack_scales(fours[..., :6], torch.int32)
    with pytest.raises(errors.DTypeError, match="int32, int16 or uint8, got int64"):
        pack_scales(fours, torch.int64)
    with pytest.raises(errors.DTypeError, match="int32, int16 or uint8, got float32"):
        unpack_scales(torch.zeros(4))


@pytest.mark.parametrize("fmt", [INDEX_FP4, INDEX_FP8], ids=str)
def test_a_query_is_the_same_under_every_packing(fmt: RecordFormat) -> None:
    q = torch.randn(2, 3, 32, 128, generator=torch.Generator().manual_seed(29)).bfloat16()
    expected = decode(encode(q, fmt), fmt)
    shapes = {torch.int32: (2, 3, 32), torch.int16: (2, 3, 32, 2), torch.uint8: (2, 3, 32, 4)}
    for dtype, shape in shapes.items():
        query = encode_query(q, fmt, sf_dtype=dtype)
        assert query.q_fp.dtype == (torch.int8 if fmt is INDEX_FP4 else torch.float8_e4m3fn)
        assert query.q_fp.shape == (2, 3, 32, fmt.data_bytes)
        assert query.q_sf is not None
        assert query.q_sf.shape == shape
        assert query.q_sf.dtype == dtype
        assert_same_bits(decode_query(*query), expected)
        assert_same_bits(decode_query(query.q_fp.view(torch.uint8), query.q_sf), expected)
        with pytest.raises(errors.ShapeError, match="q_sf must be"):
            decode_query(query.q_fp, query.q_sf[..., None])
        with pytest.raises(errors.ShapeError, match="q_sf must be"):
            decode_query(query.q_fp, query.q_sf[:1])
    for wrong in (torch.float32, torch.int64):
        with pytest.raises(errors.DTypeError, match=r"decode_query: q_sf.*must be int32, int16 or uint8"):
            decode_query(query.q_fp, torch.zeros(2, 3, 32, dtype=wrong))


def test_listed_queries() -> None:
    file = vectors("paged_mqa_logits")
    for key, fmt in (("fp4", INDEX_FP4), ("fp8", INDEX_FP8)):
        data = torch.stack([torch.stack([hex_bytes(h) for h in row]) for row in file[f"q_{key}"]])
        scales = torch.tensor(file[f"q_sf_{key}_uint8"], dtype=torch.uint8)
        values = decode_query(data, scales)
        assert_same_bits(values, decode(join_record(data, scales, fmt), fmt))
        again = encode_query(values, fmt, sf_dtype=torch.uint8)
        assert torch.equal(decode_query(*again), values)


def test_a_query_without_scales() -> None:
    q = torch.randn(5, 128, generator=torch.Generator().manual_seed(31)).bfloat16()
    query = encode_query(q, INDEX_FP8_FP32)
    assert query.q_fp.dtype == torch.float8_e4m3fn
    assert query.q_sf is not None
    assert query.q_sf.shape == (5,)
    assert query.q_sf.dtype == torch.float32
    values = decode_query(query.q_fp, None)
    assert torch.equal(values.float(), query.q_fp.float())
    codes = torch.arange(128, 256, dtype=torch.uint8)
    expected = [e4m3_value(c) for c in range(128, 255)] + [0.0]
    assert decode_query(codes, None).tolist() == expected
    assert decode_query(codes, None, nan="ideal")[-1].isnan()
    with pytest.raises(errors.ArgumentError, match="q_sf must be given"):
        decode_query(torch.zeros(5, 64, dtype=torch.int8), None)


@pytest.mark.parametrize("fmt", [INDEX_FP4, INDEX_FP8], ids=str)
def test_all_codes_under_all_scales_as_a_query(fmt: RecordFormat) -> None:
    records, _, _ = every_record(fmt)
    data, scales = split_record(records, fmt)
    assert_same_bits(
        decode_query(data.contiguous(), pack_scales(scales, torch.int32).squeeze(-1)), decode(records, fmt)
    )


# Bad input


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: encode(torch.zeros(3, 128), V41_FP8),
            errors.ShapeError,
            r"encode: x must be \[..., 512\], got \[3, 128\]",
        ),
        (lambda: encode(torch.tensor(1.0), V41_FP8), errors.ShapeError, "x must be"),
        (lambda: encode(torch.zeros(512, dtype=torch.float64), V41_FP8), errors.DTypeError, "got float64"),
        (lambda: encode([0.0] * 512, V41_FP8), errors.DTypeError, "must be a tensor, got list"),
        (lambda: encode(torch.zeros(512, requires_grad=True), V41_FP8), errors.DTypeError, "must not require grad"),
        (lambda: encode(torch.zeros(512), "V4"), errors.FormatError, "got 'V4'"),
        (lambda: encode(torch.zeros(512), V41_FP8, e4m3_max=240), errors.ArgumentError, "448 or 224, got 240"),
        (lambda: encode(torch.zeros(512), V41_FP8, on_nonfinite="no"), errors.ArgumentError, "one of raise, zero"),
        (lambda: decode(torch.zeros(527, dtype=torch.uint8), V41_FP8), errors.ShapeError, r"\[..., 528\], got \[527\]"),
        (lambda: decode(torch.zeros(528), V41_FP8), errors.DTypeError, "bytes, got float32"),
        (lambda: decode(None, V41_FP8), errors.DTypeError, "got NoneType"),
        (lambda: decode(torch.zeros(528, dtype=torch.uint8), V41_FP8, nan="no"), errors.ArgumentError, "zero, ideal"),
        (
            lambda: decode(torch.zeros(528, dtype=torch.uint8), V41_FP8, dtype=torch.int8),
            errors.DTypeError,
            "dtype must be bfloat16, float16, float32 or float64, got int8",
        ),
        (
            lambda: join_record(torch.zeros(2, 512).byte(), torch.zeros(3, 16).byte(), V41_FP8),
            errors.ShapeError,
            r"leading shape of data, \[2\], got \[3\]",
        ),
        (lambda: encode_query(torch.zeros(128), V41_FP8), errors.FormatError, "must be an index format"),
        (lambda: decode_query(torch.zeros(2, 64), None), errors.DTypeError, "got float32"),
        (lambda: decode_query(torch.zeros(2, 65).char(), None), errors.ShapeError, r"got \[2, 65\] int8"),
        (lambda: formats.BFLOAT16.decode(torch.zeros(1)), errors.FormatError, "at most 8 bits"),
    ],
)
def test_bad_input_is_one_sentence(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        call()
    text = str(caught.value)
    assert text.endswith(".")
    assert "\n" not in text


@pytest.mark.parametrize("fmt", ALL, ids=str)
def test_encode_and_decode_trace_without_a_break(fmt: RecordFormat) -> None:
    def round_trip(x: torch.Tensor) -> torch.Tensor:
        return decode(encode(x, fmt, on_nonfinite="zero"), fmt)

    x = torch.randn(3, fmt.elements, generator=torch.Generator().manual_seed(37)).bfloat16()
    torch._dynamo.reset()
    compiled = torch.compile(round_trip, fullgraph=True, backend="eager")
    assert_same_bits(compiled(x), round_trip(x))
    with torch.inference_mode():
        assert_same_bits(round_trip(x.clone()), round_trip(x))


def test_the_examples_of_the_format_page_run() -> None:
    page = (Path(__file__).parents[1] / "docs" / "formats.md").read_text()
    blocks = [block.split("```")[0] for block in page.split("```python\n")[1:]]
    assert len(blocks) >= 3
    for block in blocks:
        exec(compile(block, "docs/formats.md", "exec"), {})
    for fmt in ALL:
        sizes = f"{fmt.data_bytes} + {fmt.scale_bytes} = **{fmt.record_bytes}** B"
        assert any(f"`{fmt.name}`" in line and sizes in line for line in page.splitlines()), fmt
