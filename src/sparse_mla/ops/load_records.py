# SPDX-License-Identifier: Apache-2.0
"""Read slots of a paged cache back as vectors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..caches import PagedCache, check_slots, gather_decoded
from ..dispatch import EXACT, Limits, Op, opaque
from ..errors import DTypeError, ShapeError
from ..formats import INDEX_FORMATS
from .sparse_decode import config_memory_limit
from .validation import choice, dtype_name, memory_limit_bytes, same_device, shape_text, tensor

__all__ = ["LOAD_RECORDS", "LoadRecordsCall", "load_records"]

LOAD_DTYPES = (torch.bfloat16, torch.float32)


class LoadRecordsCall(NamedTuple):
    """A validated call of `load_records`."""

    cache: PagedCache
    slots: torch.Tensor  # any shape, int32 or int64
    out_dtype: torch.dtype
    out: torch.Tensor | None  # written to instead of new memory
    memory_limit: int

    @classmethod
    def check(
        cls,
        cache: PagedCache | torch.Tensor,
        slots: torch.Tensor,
        *,
        out_dtype: torch.dtype = torch.bfloat16,
        out: torch.Tensor | None = None,
        memory_limit: int | None = None,
    ) -> LoadRecordsCall:
        op = "load_records"
        width = cache.shape[-1] if isinstance(cache, torch.Tensor) and cache.dim() > 0 else 0
        index = width in [fmt.record_bytes for fmt in INDEX_FORMATS]
        paged = PagedCache.of(cache, index=index, op=op, argument="cache")
        dims = slots.dim() if isinstance(slots, torch.Tensor) else 1
        tensor(op, "slots", slots, " ".join(["_"] * dims), (torch.int32, torch.int64), {})
        choice(op, "out_dtype", out_dtype, LOAD_DTYPES)
        if out is not None:
            _check_out(op, out, (*slots.shape, paged.format.elements), out_dtype)
        same_device(op, (("cache", paged.data), ("slots", slots), ("out", out)))
        return cls(paged, slots, out_dtype, out, memory_limit_bytes(op, memory_limit, config_memory_limit()))

    @property
    def device(self) -> torch.device:
        return self.slots.device

    @property
    def num_rows(self) -> int:
        return self.slots.numel()

    @property
    def formats(self) -> tuple[str, ...]:
        return (self.cache.format.name,)

    @property
    def layouts(self) -> tuple[str, ...]:
        return (self.cache.layout,)

    def flat(self) -> tuple[Any, ...]:
        """The arguments of every backend's opaque operator, in the order of `SCHEMA`."""
        return (
            self.cache.data,
            self.slots,
            list(self.cache.geometry),
            self.cache.format.elements,
            self.out_dtype,
            self.memory_limit,
        )

    def flat_into(self) -> tuple[Any, ...]:
        """The same when `out` was given, in the order of `SCHEMA_INTO`."""
        return self.cache.data, self.slots, list(self.cache.geometry), self.out, self.memory_limit


def _check_out(op: str, out: object, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if not isinstance(out, torch.Tensor):
        raise DTypeError(f"{op}: out must be a torch.Tensor or None, got {type(out).__name__}.")
    wanted = f"{op}: out must be a contiguous {shape_text(shape)} of {dtype_name(dtype)}"
    if out.dtype != dtype:
        raise DTypeError(f"{wanted}, got {dtype_name(out.dtype)}; out_dtype says which.")
    if tuple(out.shape) != tuple(shape):
        raise ShapeError(f"{wanted}, got {shape_text(out)}.")
    if not out.is_contiguous():
        raise ShapeError(f"{wanted}, got strides {list(out.stride())}.")
    if out.requires_grad and torch.is_grad_enabled():
        raise DTypeError(
            f"{wanted} that does not require grad, got requires_grad=True; the operators have no backward."
        )


LOAD_RECORDS = Op("load_records", LoadRecordsCall)

SCHEMA = (
    "(Tensor cache, Tensor slots, SymInt[] geometry, int elements, ScalarType out_dtype, int memory_limit) -> Tensor"
)
# torch's operators may not return what they were given: writing into `out` is an operator of its own.
SCHEMA_INTO = "(Tensor cache, Tensor slots, SymInt[] geometry, Tensor(a!) out, int memory_limit) -> ()"


def load_records(
    cache: PagedCache | torch.Tensor,
    slots: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    memory_limit: int | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Decode the records of the given slots.

        out[i] = decode(cache[slots[i]])      0 where slots[i] is -1

    Args:
        cache: `PagedCache`, or a bare tensor (format by width, layout from the configuration; 132 bytes are ambiguous).
        slots: int32 or int64 of any shape; -1 gives a zero row.
        out_dtype: bfloat16 or float32.
        out: None, or a contiguous tensor of the result's shape and `out_dtype` that shares no memory with the others;
            it is written to and returned. Large results are worth keeping a buffer for: mapping new memory takes as
            long as loading.
        memory_limit: bytes of scratch. Default SPARSE_MLA_MEMORY_LIMIT (1 GiB).
        backend: "auto", or a name listed by `sparse-mla info`. Default SPARSE_MLA_BACKEND.
    Returns:
        [*slots.shape, 512] (main caches) or [*slots.shape, 128] (index caches), contiguous.
    Raises:
        ShapeError, DTypeError, ArgumentError, FormatError: an argument is wrong; the message names it.
        SlotRangeError: a slot other than -1 outside the cache.
        UnsupportedError: no backend accepts the call; lists each backend's reasons.
    Numerics: those of `formats.decode`: exact in bfloat16; NaN codes and NaN scales give 0.
    Source: DeepInfer 0.1.0 cache load; docs/formats.md.
    """
    call = LoadRecordsCall.check(cache, slots, out_dtype=out_dtype, out=out, memory_limit=memory_limit)
    rows: torch.Tensor = LOAD_RECORDS.run(call, backend)
    return rows


# --- reference -------------------------------------------------------------------------------------------------------


def fake_load(
    cache: torch.Tensor,
    slots: torch.Tensor,
    geometry: list[int],
    elements: int,
    out_dtype: torch.dtype,
    memory_limit: int,
) -> torch.Tensor:
    return cache.new_empty((*slots.shape, elements), dtype=out_dtype)


def _reference(
    cache: torch.Tensor,
    slots: torch.Tensor,
    geometry: list[int],
    elements: int,
    out_dtype: torch.dtype,
    memory_limit: int,
) -> torch.Tensor:
    out = torch.empty((*slots.shape, elements), dtype=out_dtype, device=cache.device)
    _reference_into(cache, slots, geometry, out, memory_limit)
    return out


def fake_load_into(*arguments: Any) -> None:
    """Nothing but the bytes of `out` changes."""


def _reference_into(
    cache: torch.Tensor, slots: torch.Tensor, geometry: list[int], out: torch.Tensor, memory_limit: int
) -> None:
    paged = PagedCache.from_geometry(cache, geometry)
    check_slots(paged, slots, op="load_records")
    flat, rows = slots.reshape(-1), out.view(-1, out.shape[-1])
    chunk = max(1, memory_limit // (out.shape[-1] * 24))
    for start in range(0, flat.numel(), chunk):
        rows[start : start + chunk] = gather_decoded(paged, flat[start : start + chunk], dtype=out.dtype, checked=True)


_operator = opaque("load_records", "reference", SCHEMA, _reference, fake_load)
_operator_into = opaque("load_records_into", "reference", SCHEMA_INTO, _reference_into, fake_load_into)


@LOAD_RECORDS.impl("reference", limits=Limits(out_dtypes=LOAD_DTYPES), tolerance=EXACT)
def _run_reference(call: LoadRecordsCall) -> torch.Tensor:
    if call.out is not None:
        _operator_into(*call.flat_into())
        return call.out
    result: torch.Tensor = _operator(*call.flat())
    return result
