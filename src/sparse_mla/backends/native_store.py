# SPDX-License-Identifier: Apache-2.0
"""Records, pooling and rope on the native backend: what fills the caches and what turns."""

from __future__ import annotations

from typing import Any

import torch

from .. import _native  # type: ignore[attr-defined]
from ..caches import PagedCache, check_slots, geometry_kind
from ..dispatch import EXACT, Limits, Tolerance, opaque
from ..errors import SparseMlaError
from ..formats import ON_NONFINITE, encode
from ..memory import empty_in_huge_pages
from ..ops.compress import COMPRESS, CompressCall, check_decode_step, fake_compress, prefill_plan
from ..ops.compress import SCHEMA as COMPRESS_SCHEMA
from ..ops.load_records import LOAD_DTYPES, LOAD_RECORDS, LoadRecordsCall, fake_load, fake_load_into
from ..ops.load_records import SCHEMA as LOAD_SCHEMA
from ..ops.load_records import SCHEMA_INTO as LOAD_SCHEMA_INTO
from ..ops.rope import ROPE, RopeCall, check_positions, fake_rope
from ..ops.rope import SCHEMA as ROPE_SCHEMA
from ..ops.softmax_pool import POOL_DTYPES, SOFTMAX_POOL, SoftmaxPoolCall, fake_pool
from ..ops.softmax_pool import SCHEMA as POOL_SCHEMA
from ..ops.store_records import SCHEMA as STORE_SCHEMA
from ..ops.store_records import STORE_RECORDS, StoreRecordsCall, _require_finite, fake_store
from .native import _address, _page_layout, _plan, _rows

__all__ = ["POOLING"]

POOLING = Tolerance(
    "within_2x_bf16",
    2.0,
    "the exponential is a polynomial, relative error 2e-7; sums in the reference's order",
)

_TREATMENTS = {name: number for number, name in enumerate(("raise", "zero", "saturate", "nan_scale"))}


def _record_cache(cache: torch.Tensor, geometry: list[int]) -> tuple[int, ...]:
    offset, layout = _page_layout(tuple(cache.shape), cache.stride(), cache.dtype, tuple(geometry))
    return (cache.data_ptr() + offset, *layout)


def _store_records(
    x: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    geometry: list[int],
    on_nonfinite: str,
    memory_limit: int,
) -> None:
    x, slots = _rows(x), slots.contiguous()
    place = _record_cache(cache, geometry)
    _, e4m3_max, _ = geometry_kind(geometry[0])
    target, threads = _plan()
    outcome = _native.store_records(
        target,
        threads,
        place,
        x.data_ptr(),
        x.dtype == torch.float32,
        x.stride(0),
        slots.data_ptr(),
        slots.dtype == torch.int64,
        x.shape[0],
        e4m3_max,
        _TREATMENTS[on_nonfinite],
    )
    if outcome == 0:
        return
    paged = PagedCache.from_geometry(cache, geometry)
    check_slots(paged, slots, op="store_records")
    _require_finite(x, slots, max(1, memory_limit // (paged.format.elements * 48)))
    # Finite floats that are infinite as bfloat16.
    encode(x[slots >= 0], paged.format, on_nonfinite="raise", op="store_records")
    raise SparseMlaError("store_records: the native core refused rows that the reference accepts; this is a bug.")


def _load_records(
    cache: torch.Tensor,
    slots: torch.Tensor,
    geometry: list[int],
    elements: int,
    out_dtype: torch.dtype,
    memory_limit: int,
) -> torch.Tensor:
    out = empty_in_huge_pages((*slots.shape, elements), out_dtype)
    _load_records_into(cache, slots, geometry, out, memory_limit)
    return out


def _load_records_into(
    cache: torch.Tensor, slots: torch.Tensor, geometry: list[int], out: torch.Tensor, memory_limit: int
) -> None:
    flat = slots.reshape(-1).contiguous()
    target, threads = _plan()
    done = _native.load_records(
        target,
        threads,
        _record_cache(cache, geometry),
        flat.data_ptr(),
        flat.dtype == torch.int64,
        flat.numel(),
        out.data_ptr(),
        out.dtype == torch.float32,
    )
    if not done:
        check_slots(PagedCache.from_geometry(cache, geometry), slots, op="load_records")
        raise SparseMlaError("load_records: the native core refused a slot that the reference accepts; this is a bug.")


def _softmax_pool(score: torch.Tensor, latent: torch.Tensor, out_dtype: torch.dtype, memory_limit: int) -> torch.Tensor:
    n, ratio, dim = score.shape
    score, latent = _rows(score), _rows(latent)
    out = empty_in_huge_pages((n, dim), out_dtype)
    target, threads = _plan()
    fields = (
        score.data_ptr(),
        latent.data_ptr(),
        n,
        ratio,
        dim,
        *score.stride()[:2],
        *latent.stride()[:2],
        out.data_ptr(),
        int(out_dtype == torch.float32),
    )
    _native.softmax_pool(target, threads, fields)
    return out


def _compress(
    score: torch.Tensor,
    latent: torch.Tensor,
    state: torch.Tensor,
    state_slots: torch.Tensor,
    context_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    ratio: int,
    max_rows: int,
    num_out: int,
    out_dtype: torch.dtype,
    memory_limit: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    n, dim = score.shape
    score, latent = _rows(score), _rows(latent)
    slots, lens = state_slots.to(torch.int64).contiguous(), context_lens.to(torch.int64).contiguous()
    cu = None if cu_seqlens_q is None else cu_seqlens_q.to(torch.int64).contiguous()
    rows = empty_in_huge_pages((num_out, dim), out_dtype)
    closes = torch.empty(num_out, dtype=torch.bool)
    positions = torch.empty(num_out, dtype=torch.int32)
    owners = torch.empty(num_out, dtype=torch.int32)
    target, threads = _plan()
    fields = (
        score.data_ptr(),
        latent.data_ptr(),
        n,
        dim,
        score.stride(0),
        latent.stride(0),
        state.data_ptr(),
        *state.stride(),
        state.shape[0],
        state.shape[1],
        slots.data_ptr(),
        lens.data_ptr(),
        _address(cu),
        slots.numel(),
        ratio,
        max_rows,
        num_out,
        rows.data_ptr(),
        int(out_dtype == torch.float32),
        closes.data_ptr(),
        positions.data_ptr(),
        owners.data_ptr(),
    )
    if not _native.compress(target, threads, fields):
        if cu is None:
            check_decode_step(slots, lens, state.shape[0], ratio, max_rows)
        else:
            prefill_plan(slots, lens, cu, state.shape[0], n, ratio, num_out)
        raise SparseMlaError("compress: the native core refused a step that the reference accepts; this is a bug.")
    return rows, closes, positions, owners


def _rope(
    x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, inverse: bool, memory_limit: int
) -> torch.Tensor:
    n, h, d = x.shape
    x, positions, table = _rows(x), positions.contiguous(), _rows(table)
    out = empty_in_huge_pages((n, h, d), x.dtype)
    target, threads = _plan()
    fields = (
        x.data_ptr(),
        int(x.dtype == torch.float32),
        n,
        h,
        d,
        x.stride(0),
        x.stride(1),
        positions.data_ptr(),
        int(positions.dtype == torch.int64),
        table.data_ptr(),
        table.stride(0),
        table.shape[0],
        int(inverse),
        out.data_ptr(),
    )
    if not _native.rope(target, threads, fields):
        check_positions("rope", positions, table.shape[0])
        raise SparseMlaError("rope: the native core refused a position that the reference accepts; this is a bug.")
    return out


def _register() -> None:
    if set(_TREATMENTS) != set(ON_NONFINITE):
        raise SparseMlaError("native: the treatments of non-finite values differ from the core's; this is a bug.")
    store = opaque("store_records", "native", STORE_SCHEMA, _store_records, fake_store)
    load = opaque("load_records", "native", LOAD_SCHEMA, _load_records, fake_load)
    load_into = opaque("load_records_into", "native", LOAD_SCHEMA_INTO, _load_records_into, fake_load_into)
    pool = opaque("softmax_pool", "native", POOL_SCHEMA, _softmax_pool, fake_pool)
    step = opaque("compress", "native", COMPRESS_SCHEMA, _compress, fake_compress)
    turn = opaque("rope", "native", ROPE_SCHEMA, _rope, fake_rope)

    @STORE_RECORDS.impl("native", limits=Limits(), tolerance=EXACT)
    def run_store(call: StoreRecordsCall) -> None:
        store(*call.flat())

    @LOAD_RECORDS.impl("native", limits=Limits(out_dtypes=LOAD_DTYPES), tolerance=EXACT)
    def run_load(call: LoadRecordsCall) -> Any:
        if call.out is None:
            return load(*call.flat())
        load_into(*call.flat_into())
        return call.out

    @SOFTMAX_POOL.impl("native", limits=Limits(out_dtypes=POOL_DTYPES), tolerance=POOLING)
    def run_pool(call: SoftmaxPoolCall) -> Any:
        return pool(*call.flat())

    @COMPRESS.impl("native", limits=Limits(out_dtypes=POOL_DTYPES), tolerance=POOLING)
    def run_compress(call: CompressCall) -> Any:
        return step(*call.flat())

    @ROPE.impl("native", limits=Limits(out_dtypes=None), tolerance=EXACT)
    def run_rope(call: RopeCall) -> Any:
        return turn(*call.flat())


_register()
