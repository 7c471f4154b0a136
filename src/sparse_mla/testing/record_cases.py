# SPDX-License-Identifier: Apache-2.0
"""Cases of `store_records` and `load_records`.

The oracles quantize and decode with numpy and ml_dtypes in float64, group by group, and place bytes with `pages.py`.
A store is judged by the whole memory around the cache: no byte but those of the slots may change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import ml_dtypes
import numpy
import torch

from ..formats import (
    BF16,
    E2M1,
    E4M3FN,
    FLOAT32,
    FORMATS,
    INDEX_FORMATS,
    INDEX_FP4,
    INDEX_FP8,
    MAIN_FORMATS,
    UE8M0,
    V41_FP4,
    V41_FP8,
    RecordFormat,
)
from ..memory import with_huge_pages
from . import numeric
from .case import FULL, POISON, Case, Problem
from .pages import Pages

__all__ = ["LOAD_CASES", "STORE_CASES", "LoadCase", "StoreCase", "decode_by_definition", "encode_by_definition"]

LARGEST = float(torch.finfo(torch.bfloat16).max)


def _power_covering(amax: numpy.ndarray, largest: float) -> numpy.ndarray:
    """The smallest e with largest * 2^e >= amax; both sides are exact in float64."""
    e = numpy.floor(numpy.log2(amax / largest)).astype(numpy.int64) - 1
    for _ in range(3):
        e = numpy.where(largest * numpy.exp2(e.astype(numpy.float64)) >= amax, e, e + 1)
    return e


def encode_by_definition(x: torch.Tensor, fmt: RecordFormat, cap: int, on_nonfinite: str) -> torch.Tensor:
    """[n, elements] to records [n, record_bytes], in float64."""
    source = x.to(torch.bfloat16).float() if fmt is BF16 else x.float()
    values = source.numpy().astype(numpy.float64)
    bad = ~numpy.isfinite(values)
    if on_nonfinite == "saturate":
        values = numpy.where(numpy.isnan(values), 0.0, numpy.clip(values, -LARGEST, LARGEST))
    else:
        values = numpy.where(bad, 0.0, values)
    if fmt is BF16:
        out = torch.from_numpy(values).to(torch.bfloat16)
        if on_nonfinite == "nan_scale":
            out[torch.from_numpy(bad)] = torch.nan
        return out.view(torch.uint8)
    groups = values.reshape(len(values), fmt.num_sf, fmt.elements_per_sf)
    amax = numpy.abs(groups).max(axis=-1)
    largest = float(cap) if fmt.element is E4M3FN else 6.0
    stored: numpy.ndarray[Any, Any]
    if fmt.scale is UE8M0:
        floor = numpy.float64(numpy.float32(1e-4)) if fmt.element is E4M3FN else 6.0 * 2.0**-126
        exponent = _power_covering(numpy.maximum(amax, floor), largest)
        scale, stored = numpy.exp2(exponent.astype(numpy.float64)), (exponent + 127).astype(numpy.uint8)
        nan: Any = 0xFF
    elif fmt.scale is E4M3FN:
        rounded = numpy.minimum(numpy.maximum(amax, 6.0 * 2.0**-9) / 6.0, cap).astype(ml_dtypes.float8_e4m3fn)
        scale, stored, nan = rounded.astype(numpy.float64), rounded.view(numpy.uint8), 0x7F
    else:
        single = numpy.maximum(amax.astype(numpy.float32), numpy.float32(1e-4)) / numpy.float32(cap)
        scale, stored, nan = single.astype(numpy.float64), single, numpy.nan
    if fmt.scale is FLOAT32:
        quotient = (groups.astype(numpy.float32) / scale.astype(numpy.float32)[..., None]).astype(numpy.float64)
    else:
        quotient = groups / scale[..., None]
    kind = ml_dtypes.float8_e4m3fn if fmt.element is E4M3FN else ml_dtypes.float4_e2m1fn
    codes: numpy.ndarray[Any, Any] = numpy.clip(quotient, -largest, largest).astype(kind).view(numpy.uint8)
    if on_nonfinite == "nan_scale":
        marked = numpy.asarray(bad.reshape(groups.shape).any(axis=-1))
        codes[marked] = 0
        stored[marked] = nan
    codes = codes.reshape(len(values), fmt.elements).astype(numpy.uint8)
    if fmt.element is E2M1:
        codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    scales = numpy.ascontiguousarray(stored).reshape(len(values), fmt.num_sf)
    scales = scales.view(numpy.uint8).reshape(len(values), fmt.scale_bytes)
    return torch.from_numpy(numpy.concatenate((codes, scales), axis=1))


def decode_by_definition(records: torch.Tensor, fmt: RecordFormat) -> torch.Tensor:
    """[n, record_bytes] to [n, elements] float64, by the rule of every operator: what is NaN is 0, what overflows is
    infinite, an
    e4m3 product with an exponent below -126 is 0."""
    raw = records.numpy()
    with numpy.errstate(invalid="ignore", over="ignore"):
        if fmt is BF16:
            values = raw.view(ml_dtypes.bfloat16).astype(numpy.float64)
            return torch.from_numpy(numpy.where(numpy.isnan(values), 0.0, values))
        data, scales = raw[:, : fmt.data_bytes], numpy.ascontiguousarray(raw[:, fmt.data_bytes :])
        if fmt.element is E2M1:
            data = numpy.stack((data & 15, data >> 4), axis=-1).reshape(len(raw), -1)
            values = data.astype(numpy.uint8).view(ml_dtypes.float4_e2m1fn).astype(numpy.float64)
        else:
            values = numpy.ascontiguousarray(data).view(ml_dtypes.float8_e4m3fn).astype(numpy.float64)
        if fmt.scale is UE8M0:
            factor = numpy.where(scales == 255, numpy.nan, numpy.exp2(scales.astype(numpy.float64) - 127.0))
        elif fmt.scale is E4M3FN:
            factor = scales.view(ml_dtypes.float8_e4m3fn).astype(numpy.float64)
        else:
            factor = scales.view(numpy.float32).astype(numpy.float64)
        spread = numpy.repeat(factor, fmt.elements_per_sf, axis=1)
        product = values * spread
        if fmt.scale is UE8M0 and fmt.element is E4M3FN:
            field_of = numpy.maximum((data >> 3) & 15, 1).astype(numpy.int64)
            exponent = field_of - 10 + numpy.repeat(scales.astype(numpy.int64) - 127, fmt.elements_per_sf, axis=1)
            product = numpy.where(exponent < -126, 0.0, product)
        product = product.astype(numpy.float32).astype(numpy.float64)
        return torch.from_numpy(numpy.where(numpy.isnan(product), 0.0, product))


# --- store -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StoreCase(Case):
    """n rows into slots of one cache."""

    op: ClassVar[str] = "store_records"
    writes: ClassVar[bool] = True

    pages: Pages = field(default_factory=Pages)
    n: int = 37
    values: str = "randn"  # randn | wide: exponents from -40 to 30 | zeros | ties: half steps of the element | tiny
    nonfinite: float = 0.0  # share of elements that are NaN or infinite
    skipped: float = 0.1  # share of slots that are -1; their rows hold NaN
    duplicates: bool = False
    on_nonfinite: str = "raise"
    dtype: torch.dtype = torch.bfloat16
    integers: torch.dtype = torch.int32

    def build(self, poison: int = POISON) -> Problem:
        g = self.generator()
        fmt = self.pages.format
        x = torch.randn(self.n, fmt.elements, generator=g)
        if self.values == "wide":
            x = x * torch.exp2(torch.randint(-40, 30, (self.n, fmt.elements // 16), generator=g)).repeat_interleave(
                16, 1
            )
        elif self.values == "zeros":
            x = torch.where(x > 0, 0.0, -0.0)
        elif self.values == "ties":
            x = (x * 8).round() / 4
        elif self.values == "tiny":
            x = x * 2.0**-130
        if self.nonfinite:
            kind = torch.tensor([torch.nan, torch.inf, -torch.inf])
            chosen = kind[torch.randint(0, 3, x.shape, generator=g)]
            x = torch.where(torch.rand(x.shape, generator=g) < self.nonfinite, chosen, x)
        slots = torch.randint(0, self.pages.num_slots, (self.n,), generator=g)
        if not self.duplicates:
            slots = torch.randperm(self.pages.num_slots, generator=g)[: self.n]
        slots[torch.rand(self.n, generator=g) < self.skipped] = -1
        x[slots < 0] = torch.nan
        pool = self.pages.empty(poison)
        arguments: dict[str, Any] = {
            "x": x.to(self.dtype),
            "cache": self.pages.cache(pool),
            "slots": slots.to(self.integers),
            "on_nonfinite": self.on_nonfinite,
        }
        return Problem(arguments, {"pool": pool})

    def call(self, problem: Problem, backend: str | None = None) -> Any:
        super().call(problem, backend)
        return problem.truth["pool"]

    def oracle(self, problem: Problem) -> Any:
        pool = problem.truth["pool"].clone()
        given = problem.arguments
        kept = given["slots"] >= 0
        records = encode_by_definition(given["x"][kept], self.pages.format, self.pages.e4m3_max, self.on_nonfinite)
        for slot, record in zip(given["slots"][kept], records, strict=True):  # in order: of equal slots the last wins
            self.pages.write(pool, slot[None], record[None])
        return pool

    def compare(self, actual: Any, expected: Any, plain: Any, ratio: float) -> list[str]:
        return numeric.equal("bytes", actual, expected)

    def selected(self, result: Any, problem: Problem) -> tuple[torch.Tensor, ...]:
        slots = problem.arguments["slots"]
        return (self.pages.read(result, slots[slots >= 0]),)

    @property
    def nbytes(self) -> int:
        return self.n * (self.pages.format.elements * self.dtype.itemsize + self.pages.format.record_bytes + 4)


def _store() -> Iterator[StoreCase]:
    for fmt in FORMATS.values():
        kind = fmt.name.lower().replace("_", "-")
        yield StoreCase(name=kind, pages=Pages(format=fmt))
        yield StoreCase(name=f"{kind}-wide", pages=Pages(format=fmt, page_size=5, num_pages=40), values="wide", n=120)
        yield StoreCase(name=f"{kind}-ties", pages=Pages(format=fmt), values="ties", integers=torch.int64)
        yield StoreCase(name=f"{kind}-zeros", tags=("ugly",), pages=Pages(format=fmt), values="zeros", n=9)
        yield StoreCase(name=f"{kind}-tiny", tags=("ugly",), pages=Pages(format=fmt), values="tiny", n=9)
        yield StoreCase(name=f"{kind}-float32", pages=Pages(format=fmt), dtype=torch.float32)
        yield StoreCase(
            name=f"{kind}-pool-region",
            tags=("layout",),
            pages=Pages(format=fmt, page_size=53, region_offset=4352, padding_bytes=8448),
        )
        for treatment in ("zero", "saturate", "nan_scale"):
            yield StoreCase(
                name=f"{kind}-nonfinite-{treatment.replace('_', '-')}",
                tags=("ugly",),
                pages=Pages(format=fmt),
                nonfinite=0.02,
                on_nonfinite=treatment,
            )
    for fmt in MAIN_FORMATS:
        kind = fmt.name.lower().replace("_", "-")
        yield StoreCase(
            name=f"{kind}-planar", tags=("layout",), pages=Pages(format=fmt, layout="planar", padding_bytes=64)
        )
    for fmt in (V41_FP8, V41_FP4, INDEX_FP8):
        kind = fmt.name.lower().replace("_", "-")
        yield StoreCase(name=f"{kind}-cap-224", pages=Pages(format=fmt, e4m3_max=224), values="wide")
    yield StoreCase(name="bare-tensor", pages=Pages(bare=True, padding_bytes=96))
    yield StoreCase(name="bare-index-tensor", pages=Pages(format=INDEX_FP4, bare=True))
    yield StoreCase(name="all-skipped", tags=("ugly",), skipped=2.0)
    yield StoreCase(name="no-rows", tags=("ugly",), n=0)
    yield StoreCase(name="page-of-one", tags=("ugly",), pages=Pages(page_size=1, num_pages=50))
    yield StoreCase(name="duplicates", tags=("ugly",), pages=Pages(num_pages=1, page_size=8), n=40, duplicates=True)
    for fmt in (V41_FP8, V41_FP4):
        kind = fmt.name.lower().replace("_", "-")
        pages = Pages(format=fmt, num_pages=128)
        yield StoreCase(name=f"v41-flash-{kind}-4096", tags=("production", FULL), pages=pages, n=4096, skipped=0.0)


STORE_CASES: tuple[StoreCase, ...] = tuple(_store())


# --- load ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LoadCase(Case):
    """Slots of any shape out of one cache, whose selected records are random bytes: every code and every scale byte."""

    op: ClassVar[str] = "load_records"

    pages: Pages = field(default_factory=Pages)
    shape: tuple[int, ...] = (40,)
    skipped: float = 0.1
    out_dtype: torch.dtype = torch.bfloat16
    integers: torch.dtype = torch.int32
    into: bool = False  # the result goes to memory that the caller keeps

    def empty_out(self, poison: int) -> torch.Tensor | None:
        """Memory for the result, or None where the call allocates."""
        if not self.into:
            return None
        out = with_huge_pages(torch.empty((*self.shape, self.pages.format.elements), dtype=self.out_dtype))
        out.view(torch.uint8).fill_(poison)
        return out

    def call(self, problem: Problem, backend: str | None = None) -> Any:
        result = super().call(problem, backend)
        return result.clone() if self.into else result  # the next call writes to the same memory

    def build(self, poison: int = POISON) -> Problem:
        g = self.generator()
        fmt = self.pages.format
        slots = torch.randint(0, self.pages.num_slots, self.shape, generator=g)
        slots[torch.rand(self.shape, generator=g) < self.skipped] = -1
        used = torch.unique(slots[slots >= 0])
        records = torch.randint(0, 256, (used.numel(), fmt.record_bytes), generator=g, dtype=torch.uint8)
        if fmt.scale is FLOAT32:  # random bytes are random float32: keep most of them ordinary
            scale = torch.randn(used.numel(), generator=g).abs().view(torch.uint8).reshape(-1, 4)
            records[::2, fmt.data_bytes :] = scale[::2]
        pool = self.pages.empty(poison)
        self.pages.write(pool, used, records)
        arguments: dict[str, Any] = {
            "cache": self.pages.cache(pool),
            "slots": slots.to(self.integers),
            "out_dtype": self.out_dtype,
            "out": self.empty_out(poison),
        }
        return Problem(arguments, {"pool": pool})

    def oracle(self, problem: Problem) -> Any:
        slots = problem.arguments["slots"].long().flatten()
        records = self.pages.read(problem.truth["pool"], slots.clamp(min=0))
        values = decode_by_definition(records, self.pages.format)
        values[slots < 0] = 0.0
        return values.to(self.out_dtype).reshape(*self.shape, self.pages.format.elements)

    def compare(self, actual: Any, expected: Any, plain: Any, ratio: float) -> list[str]:
        # The sign of a zero is free: adding 0 makes all of them positive.
        return numeric.equal("values", actual + 0.0, expected + 0.0)

    @property
    def nbytes(self) -> int:
        n = torch.Size(self.shape).numel()
        return n * (self.pages.format.record_bytes + 4 + self.pages.format.elements * self.out_dtype.itemsize)


def _load() -> Iterator[LoadCase]:
    for fmt in FORMATS.values():
        kind = fmt.name.lower().replace("_", "-")
        yield LoadCase(name=kind, pages=Pages(format=fmt, num_pages=16), shape=(300,))
        yield LoadCase(name=f"{kind}-float32", pages=Pages(format=fmt), out_dtype=torch.float32)
        yield LoadCase(
            name=f"{kind}-pool-region",
            tags=("layout",),
            pages=Pages(format=fmt, page_size=5, num_pages=30, region_offset=4352, padding_bytes=8448),
        )
    for fmt in MAIN_FORMATS:
        kind = fmt.name.lower().replace("_", "-")
        yield LoadCase(
            name=f"{kind}-planar", tags=("layout",), pages=Pages(format=fmt, layout="planar"), shape=(3, 5, 7)
        )
    yield LoadCase(name="bare-tensor", pages=Pages(bare=True, padding_bytes=96), integers=torch.int64)
    yield LoadCase(name="all-skipped", tags=("ugly",), skipped=2.0)
    yield LoadCase(name="no-slots", tags=("ugly",), shape=(0, 4))
    yield LoadCase(name="into", pages=Pages(num_pages=16), shape=(9, 5), into=True)
    yield LoadCase(name="into-float32", pages=Pages(format=V41_FP4), out_dtype=torch.float32, into=True)
    yield LoadCase(name="into-nothing", tags=("ugly",), shape=(0, 4), into=True)
    yield LoadCase(name="page-of-one", tags=("ugly",), pages=Pages(page_size=1, num_pages=64))
    for fmt in (V41_FP8, V41_FP4, INDEX_FORMATS[0]):
        kind = fmt.name.lower().replace("_", "-")
        pages = Pages(format=fmt, num_pages=1024)
        yield LoadCase(
            name=f"v41-flash-{kind}-65536", tags=("production", FULL), pages=pages, shape=(65536,), skipped=0.0
        )


LOAD_CASES: tuple[LoadCase, ...] = tuple(_load())
