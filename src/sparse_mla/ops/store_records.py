# SPDX-License-Identifier: Apache-2.0
"""Quantize vectors and store them into slots of a paged cache.

Nothing is written unless everything can be: slots and values are checked for the whole call before the first byte.
    Padding rows
(slot -1) are dropped before that, because graph padding holds garbage.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..caches import PagedCache, check_slots, scatter_records
from ..dispatch import EXACT, Limits, Op, opaque
from ..errors import NonFiniteError
from ..formats import INDEX_DIM, ON_NONFINITE, encode
from .sparse_decode import config_memory_limit
from .validation import choice, memory_limit_bytes, same_device, tensor

__all__ = ["STORE_RECORDS", "StoreRecordsCall", "store_records"]

SOURCE_DTYPES = (torch.bfloat16, torch.float32)


class StoreRecordsCall(NamedTuple):
    """A validated call of `store_records`. n rows of d elements."""

    x: torch.Tensor  # [n, d] bfloat16 or float32
    cache: PagedCache
    slots: torch.Tensor  # [n] int32 or int64
    on_nonfinite: str
    memory_limit: int

    @classmethod
    def check(
        cls,
        x: torch.Tensor,
        cache: PagedCache | torch.Tensor,
        slots: torch.Tensor,
        *,
        on_nonfinite: str | None = None,
        memory_limit: int | None = None,
    ) -> StoreRecordsCall:
        op = "store_records"
        tensor(op, "x", x, "n d", SOURCE_DTYPES, {})
        paged = PagedCache.of(cache, index=x.shape[1] == INDEX_DIM, op=op, argument="cache")
        sizes: dict[str, int] = {}
        cause = f"the cache holds {paged.format.name} records"
        tensor(op, "x", x, f"n {paged.format.elements}", SOURCE_DTYPES, sizes, cause)
        tensor(op, "slots", slots, "n", (torch.int32, torch.int64), sizes)
        same_device(op, (("x", x), ("cache", paged.data), ("slots", slots)))
        # Off the CPU, raising would wait for the device.
        treatment = ("raise" if x.device.type == "cpu" else "zero") if on_nonfinite is None else on_nonfinite
        choice(op, "on_nonfinite", treatment, ON_NONFINITE)
        return cls(x, paged, slots, treatment, memory_limit_bytes(op, memory_limit, config_memory_limit()))

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def num_rows(self) -> int:
        return self.x.shape[0]

    @property
    def formats(self) -> tuple[str, ...]:
        return (self.cache.format.name,)

    @property
    def layouts(self) -> tuple[str, ...]:
        return (self.cache.layout,)

    def flat(self) -> tuple[Any, ...]:
        """The arguments of every backend's opaque operator, in the order of `SCHEMA`."""
        return (
            self.x,
            self.cache.data,
            self.slots,
            list(self.cache.geometry),
            self.on_nonfinite,
            self.memory_limit,
        )


STORE_RECORDS = Op("store_records", StoreRecordsCall)

SCHEMA = "(Tensor x, Tensor(a!) cache, Tensor slots, SymInt[] geometry, str on_nonfinite, int memory_limit) -> ()"


def store_records(
    x: torch.Tensor,
    cache: PagedCache | torch.Tensor,
    slots: torch.Tensor,
    *,
    on_nonfinite: str | None = None,
    memory_limit: int | None = None,
    backend: str | None = None,
) -> None:
    """Quantize each row of x and write its record into its slot, in place.

        cache[slots[i]] = encode(x[i])      for slots[i] >= 0

    Args:
        x: [n, 512] for main caches, [n, 128] for index caches; bfloat16 or float32.
        cache: `PagedCache`, or a bare main cache tensor (format by width, layout and cap from the configuration), or a
            bare 68-byte index cache. Any block stride, either layout; the cap is the cache's `e4m3_max`.
        slots: [n] int32 or int64. -1 is skipped, whatever its row of x holds. Of equal slots the last row wins.
        on_nonfinite: "raise"; "zero": NaN and infinities become 0; "saturate": infinities become the largest bfloat16,
            NaN 0; "nan_scale": the group gets a NaN scale, which decodes to 0. Default "raise" on CPU, "zero"
            elsewhere.
        memory_limit: bytes of scratch. Default SPARSE_MLA_MEMORY_LIMIT (1 GiB).
        backend: "auto", or a name listed by `sparse-mla info`. Default SPARSE_MLA_BACKEND.
    Raises:
        ShapeError, DTypeError, ArgumentError, FormatError: an argument is wrong; the message names it.
        SlotRangeError: a slot other than -1 outside the cache. NonFiniteError: under "raise". Not a byte is written
            then.
        UnsupportedError: no backend accepts the call; lists each backend's reasons.
    Numerics: those of `formats.encode`; every backend writes the same bytes, and no other byte of the cache.
    Source: DeepInfer 0.1.0 cache store; docs/formats.md.
    """
    call = StoreRecordsCall.check(x, cache, slots, on_nonfinite=on_nonfinite, memory_limit=memory_limit)
    STORE_RECORDS.run(call, backend)


# --- reference -------------------------------------------------------------------------------------------------------


def fake_store(*arguments: Any) -> None:
    """Nothing but the cache's bytes changes."""


def _require_finite(x: torch.Tensor, slots: torch.Tensor, chunk: int) -> None:
    for start in range(0, x.shape[0], chunk):
        bad = ~torch.isfinite(x[start : start + chunk]) & (slots[start : start + chunk] >= 0)[:, None]
        if bool(bad.any()):
            row, column = bad.nonzero()[0].tolist()
            raise NonFiniteError(
                f"store_records: x must be finite, got {float(x[start + row, column])} at [{start + row}, {column}]; "
                "on_nonfinite chooses another treatment."
            )


def _reference(
    x: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    geometry: list[int],
    on_nonfinite: str,
    memory_limit: int,
) -> None:
    paged = PagedCache.from_geometry(cache, geometry)
    check_slots(paged, slots, op="store_records")
    chunk = max(1, memory_limit // (paged.format.elements * 48))  # a dozen float32 temporaries in the encoder
    if on_nonfinite == "raise":
        _require_finite(x, slots, chunk)
    for start in range(0, x.shape[0], chunk):
        rows = slots[start : start + chunk]
        kept = (rows >= 0).nonzero()[:, 0]
        records = encode(
            x[start : start + chunk][kept],
            paged.format,
            e4m3_max=paged.e4m3_max,
            on_nonfinite=on_nonfinite,
            op="store_records",
        )
        scatter_records(paged, rows[kept], records, op="store_records")


_operator = opaque("store_records", "reference", SCHEMA, _reference, fake_store)


@STORE_RECORDS.impl("reference", limits=Limits(), tolerance=EXACT)
def _run_reference(call: StoreRecordsCall) -> None:
    _operator(*call.flat())
