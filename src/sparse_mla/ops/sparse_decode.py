# SPDX-License-Identifier: Apache-2.0
"""Sparse decode attention over one or two quantized paged caches.

The call record below holds all validation and the preparation every backend shares. The opaque operators of all
backends have one schema, `SCHEMA`, and take `SparseDecodeCall.flat()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .. import config
from ..caches import KVScope, PagedCache, gather_decoded
from ..dispatch import EXACT, Limits, Op, opaque
from ..errors import ArgumentError, ShapeError, SlotRangeError
from .validation import choice, memory_limit_bytes, same_device, tensor

__all__ = ["SPARSE_DECODE", "AttnOutput", "SparseDecodeCall", "sparse_decode"]

HEAD_DIM = 512
DEFAULT_SCALE = HEAD_DIM**-0.5
OUT_DTYPES = (torch.bfloat16, torch.float32, torch.float64)


class AttnOutput(NamedTuple):
    """Attention result. out: as the queries, in `out_dtype`. lse: float32 [b, h_q, s_q], natural log, sink excluded."""

    out: torch.Tensor
    lse: torch.Tensor


class SparseDecodeCall(NamedTuple):
    """A validated call of `sparse_decode`, defaults filled. b batch, s_q query rows per batch element, h_q heads."""

    q: torch.Tensor  # [b, s_q, h_q, 512] bfloat16
    scopes: tuple[KVScope, ...]  # one or two
    softmax_scale: float
    attn_sink: torch.Tensor | None  # [h_q] float32
    out_dtype: torch.dtype
    one_sequence: bool
    memory_limit: int  # bytes of scratch
    checks: bool  # range-check slots before any read

    @classmethod
    def check(
        cls,
        q: torch.Tensor,
        scopes: KVScope | Sequence[KVScope],
        *,
        softmax_scale: float | None = None,
        attn_sink: torch.Tensor | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
        one_sequence: bool = False,
        memory_limit: int | None = None,
    ) -> SparseDecodeCall:
        plain = _if_plain(q, scopes, attn_sink, out_dtype)
        if plain is not None and memory_limit is None:
            scale = DEFAULT_SCALE if softmax_scale is None else float(softmax_scale)
            limit = config_memory_limit()
            return cls(q, plain, scale, attn_sink, out_dtype, bool(one_sequence), limit, checks_on())
        op = "sparse_decode"
        sizes: dict[str, int] = {}
        tensor(op, "q", q, "b s_q h_q 512", (torch.bfloat16,), sizes)
        if sizes["h_q"] < 1:
            raise ShapeError(f"{op}: q must have at least one head, got h_q = 0.")
        given = (scopes,) if isinstance(scopes, KVScope) else tuple(scopes)
        if len(given) not in (1, 2):
            raise ArgumentError(f"{op}: scopes must be one or two KVScope, got {len(given)}.")
        kept = []
        for number, scope in enumerate(given):
            name = f"scopes[{number}]"
            if not isinstance(scope, KVScope):
                raise ArgumentError(f"{op}: {name} must be a KVScope(cache, indices), got {type(scope).__name__}.")
            cache = PagedCache.of(scope.cache)
            if cache.format.is_index:
                raise ArgumentError(f"{op}: {name}.cache must hold main records, got {cache.format.name} index pages.")
            local = {"b": sizes["b"], "s_q": sizes["s_q"]}
            tensor(op, f"{name}.indices", scope.indices, "b s_q topk", (torch.int32,), local)
            if local["topk"] < 1:
                raise ShapeError(f"{op}: {name}.indices must have at least one column, got topk = 0; fill with -1.")
            if scope.topk_length is not None:
                tensor(op, f"{name}.topk_length", scope.topk_length, "b", (torch.int32,), local)
            same_device(
                op,
                (
                    ("q", q),
                    (f"{name}.cache", cache.data),
                    (f"{name}.indices", scope.indices),
                    (f"{name}.topk_length", scope.topk_length),
                ),
            )
            kept.append(KVScope(cache, scope.indices, scope.topk_length))
        if attn_sink is not None:
            tensor(op, "attn_sink", attn_sink, "h_q", (torch.float32,), sizes)
        same_device(op, (("q", q), ("attn_sink", attn_sink)))
        choice(op, "out_dtype", out_dtype, OUT_DTYPES)
        limit = memory_limit_bytes(op, memory_limit, config_memory_limit())
        scale = DEFAULT_SCALE if softmax_scale is None else float(softmax_scale)
        return cls(q, tuple(kept), scale, attn_sink, out_dtype, bool(one_sequence), limit, checks_on())

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def num_rows(self) -> int:
        return self.q.shape[0] * self.q.shape[1]

    @property
    def num_heads(self) -> int:
        return self.q.shape[2]

    @property
    def topk(self) -> int:
        return sum([s.indices.shape[2] for s in self.scopes])

    @property
    def formats(self) -> tuple[str, ...]:
        return tuple([s.cache.format.name for s in self.scopes])

    @property
    def layouts(self) -> tuple[str, ...]:
        return tuple([s.cache.layout for s in self.scopes])

    def flat(self) -> tuple[Any, ...]:
        """The arguments of every backend's opaque operator, in the order of `SCHEMA`."""
        first = self.scopes[0]
        second = self.scopes[1] if len(self.scopes) == 2 else None
        geometry = list(first.cache.geometry)
        if second is not None:
            geometry += second.cache.geometry
        return (
            self.q,
            first.cache.data,
            first.indices,
            first.topk_length,
            second.cache.data if second is not None else None,
            second.indices if second is not None else None,
            second.topk_length if second is not None else None,
            geometry,
            self.softmax_scale,
            self.attn_sink,
            self.out_dtype,
            self.memory_limit,
            self.checks,
        )


def _if_plain(
    q: torch.Tensor, scopes: KVScope | Sequence[KVScope], attn_sink: torch.Tensor | None, out_dtype: torch.dtype
) -> tuple[KVScope, ...] | None:
    """The scopes, if nothing is wrong with the call. It asks for each fact once and words no error: a third of the
    time of the checks in `check`, which decide whenever the answer is None."""
    given = (scopes,) if isinstance(scopes, KVScope) else tuple(scopes)
    if not isinstance(q, torch.Tensor) or q.dtype is not torch.bfloat16 or q.requires_grad or len(given) not in (1, 2):
        return None
    shape, device = q.shape, q.device
    if len(shape) != 4 or shape[3] != HEAD_DIM or shape[2] < 1 or out_dtype not in OUT_DTYPES:
        return None
    b, s_q = shape[0], shape[1]
    for scope in given:
        if not isinstance(scope, KVScope):
            return None
        cache, indices, length = scope.cache, scope.indices, scope.topk_length
        if not isinstance(cache, PagedCache) or cache.format.is_index or not isinstance(indices, torch.Tensor):
            return None
        if indices.dtype is not torch.int32 or indices.device != device or cache.data.device != device:
            return None
        listed = indices.shape
        if len(listed) != 3 or listed[0] != b or listed[1] != s_q or listed[2] < 1:
            return None
        if length is not None:
            if not isinstance(length, torch.Tensor) or length.dtype is not torch.int32 or length.device != device:
                return None
            if length.dim() != 1 or length.shape[0] != b:
                return None
    if attn_sink is not None:
        if not isinstance(attn_sink, torch.Tensor) or attn_sink.dtype is not torch.float32 or attn_sink.requires_grad:
            return None
        if attn_sink.device != device or attn_sink.dim() != 1 or attn_sink.shape[0] != shape[2]:
            return None
    return given


@config.constant_in_graphs
def config_memory_limit() -> int:
    """SPARSE_MLA_MEMORY_LIMIT now; a compiled graph keeps the value it was traced with."""
    return int(config.get("SPARSE_MLA_MEMORY_LIMIT"))


@config.constant_in_graphs
def checks_on() -> bool:
    """SPARSE_MLA_CHECKS now; a compiled graph keeps the value it was traced with."""
    return bool(config.get("SPARSE_MLA_CHECKS"))


SPARSE_DECODE = Op("sparse_decode", SparseDecodeCall)

SCHEMA = (
    "(Tensor q, Tensor cache0, Tensor indices0, Tensor? length0, Tensor? cache1, Tensor? indices1, Tensor? length1, "
    "SymInt[] geometry, float softmax_scale, Tensor? attn_sink, ScalarType out_dtype, int memory_limit, bool checks) "
    "-> (Tensor, Tensor)"
)


def sparse_decode(
    q: torch.Tensor,
    scopes: KVScope | Sequence[KVScope],
    *,
    softmax_scale: float | None = None,
    attn_sink: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    one_sequence: bool = False,
    memory_limit: int | None = None,
    backend: str | None = None,
) -> AttnOutput:
    """Attend each query to its selected cache slots (DeepSeek sparse attention, decode).

        out[i] = sum_j softmax(scale * q[i] . k[j])_j * v[j]      over valid j, with the sink in the denominator

    Args:
        q: [b, s_q, h_q, 512] bfloat16. Queries after RoPE. Any h_q >= 1; zero rows are allowed.
        scopes: one or two `KVScope`; slots are int32 [b, s_q, topk], -1 means empty and is never read. Columns at or
            past `topk_length` [b] int32 are ignored. The union of scopes is one softmax; a slot listed twice counts
            twice.
        softmax_scale: multiplier of the logits before softmax. Default 512 ** -0.5.
        attn_sink: [h_q] float32 or None. -inf has no effect, +inf zeroes the head; it never enters the lse.
        out_dtype: bfloat16, float32, or float64 (reference only: the whole computation then runs in float64).
        one_sequence: the rows are consecutive tokens of one sequence, so one row's list may be a prefix of the next
            one's. Only Neuron strategies use it; it never changes what is computed.
        memory_limit: bytes of scratch. Default SPARSE_MLA_MEMORY_LIMIT (1 GiB).
        backend: "auto", or a name listed by `sparse-mla info`. Default SPARSE_MLA_BACKEND.
    Returns:
        AttnOutput(out [b, s_q, h_q, 512] out_dtype, lse [b, h_q, s_q] float32, natural log, sink excluded; a transposed
        view of [b, s_q, h_q]).
    Raises:
        ShapeError, DTypeError, ArgumentError, FormatError: an argument is wrong; the message names it.
        SlotRangeError: a slot other than -1 outside its cache, or a negative length (while SPARSE_MLA_CHECKS is 1).
        UnsupportedError: no backend accepts the call; lists each backend's reasons.
    Numerics: float32 logits and sums over exactly decoded records; native and Neuron round P to bfloat16 before P @ V.
        A query without a valid slot gives out = 0, lse = +inf. A row's bits do not depend on the other rows, nor on the
        number of threads, except on the reference backend, whose matrix products are the BLAS library's.
    Source: FlashMLA 1.0.0 `flash_mla_with_kvcache`; docs/formats.md.
    """
    call = SparseDecodeCall.check(
        q,
        scopes,
        softmax_scale=softmax_scale,
        attn_sink=attn_sink,
        out_dtype=out_dtype,
        one_sequence=one_sequence,
        memory_limit=memory_limit,
    )
    out, lse = SPARSE_DECODE.run(call, backend)
    return AttnOutput(out, lse.mT)


# --- reference -------------------------------------------------------------------------------------------------------

MAX_KEY_CHUNK = 8192  # keys decoded at once; longer lists go through an online softmax, so memory stays bounded


def fake_attention(q: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes of (out, lse [b, s_q, h_q]) for the compiler; out_dtype is the one dtype among the arguments."""
    out_dtype = next(a for a in rest if isinstance(a, torch.dtype))
    return q.new_empty(q.shape, dtype=out_dtype), q.new_empty(q.shape[:3], dtype=torch.float32)


def check_slots(op: str, name: str, indices: torch.Tensor, num_slots: int, length: torch.Tensor | None) -> None:
    """Raise SlotRangeError unless every slot inside its length is -1 or inside the cache and no length is negative."""
    if indices.numel() == 0:
        return
    if length is not None:
        lowest = int(length.min()) if length.numel() else 0
        if lowest < 0:
            raise SlotRangeError(f"{op}: {name}.topk_length must be >= 0, got {lowest}.")
    bad = (indices < -1) | (indices > num_slots - 1)  # 2^31 slots are legal, but 2^31 is no int32 to compare with
    if length is not None:
        columns = torch.arange(indices.shape[-1], device=indices.device)
        bad = bad & (columns < length.reshape(-1, *([1] * (indices.dim() - 1))))
    if bool(bad.any()):
        where = bad.nonzero()[0].tolist()
        value = int(indices[tuple(where)])
        raise SlotRangeError(
            f"{op}: {name}.indices must be -1 or a slot below {num_slots}, got {value} at {where}; "
            "a stale list or the wrong block table."
        )


def attend_rows(
    q: torch.Tensor,
    keys_of_row: Any,
    softmax_scale: float,
    attn_sink: torch.Tensor | None,
    math: torch.dtype,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One softmax per row of q [n, h, d]; `keys_of_row(i)` yields [keys, d] chunks. Computes in `math`; returns out in
    `out_dtype`, lse and max_logits in `math`.

    Each row is its own pair of matrix products, whose shapes depend on that row alone, so its bits do not depend on the
    other rows.
    """
    n, h, d = q.shape
    out = torch.zeros(n, h, d, dtype=out_dtype, device=q.device)  # rounded row by row: no second copy in `math`
    lse = torch.full((n, h), float("inf"), dtype=math, device=q.device)
    top = torch.full((n, h), float("-inf"), dtype=math, device=q.device)
    for row in range(n):
        query = q[row].to(math)
        state: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # peak [h], sum [h], P @ V [h, d]
        for keys in keys_of_row(row):
            keys = keys.to(math)
            logits = torch.mm(query, keys.t()) * softmax_scale  # [h, keys]
            chunk_peak = logits.amax(dim=1)
            if state is None:
                p = torch.exp(logits - chunk_peak[:, None])
                state = chunk_peak, p.sum(dim=1), torch.mm(p, keys)
                continue
            peak, total, acc = state
            new_peak = torch.maximum(peak, chunk_peak)
            p = torch.exp(logits - new_peak[:, None])
            rescale = torch.exp(peak - new_peak)
            state = new_peak, total * rescale + p.sum(dim=1), acc * rescale[:, None] + torch.mm(p, keys)
        if state is None:
            continue
        peak, total, acc = state
        row_lse = peak + torch.log(total)
        result = acc / total[:, None]
        if attn_sink is not None:
            result = result * torch.sigmoid(row_lse - attn_sink.to(math))[:, None]
        out[row], lse[row], top[row] = result, row_lse, peak
    return out, lse, top


def key_chunk(memory_limit: int, h: int, d: int, itemsize: int) -> int:
    """Keys per chunk so that decoded keys, their temporaries and the logits stay inside the limit."""
    per_key = 6 * d * itemsize + 4 * h * itemsize
    return max(128, min(MAX_KEY_CHUNK, memory_limit // per_key))


def _reference(
    q: torch.Tensor,
    cache0: torch.Tensor,
    indices0: torch.Tensor,
    length0: torch.Tensor | None,
    cache1: torch.Tensor | None,
    indices1: torch.Tensor | None,
    length1: torch.Tensor | None,
    geometry: list[int],
    softmax_scale: float,
    attn_sink: torch.Tensor | None,
    out_dtype: torch.dtype,
    memory_limit: int,
    checks: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    b, s_q, h, d = q.shape
    half = len(geometry) // (1 if cache1 is None else 2)
    scopes = [(PagedCache.from_geometry(cache0, geometry[:half]), indices0, length0)]
    if cache1 is not None and indices1 is not None:
        scopes.append((PagedCache.from_geometry(cache1, geometry[half:]), indices1, length1))
    for number, (cache, indices, length) in enumerate(scopes):
        # Whatever `checks` says: plain torch would read another slot or stop with a message about its own internals.
        check_slots("sparse_decode", f"scopes[{number}]", indices, cache.num_slots, length)
    math = torch.float64 if out_dtype == torch.float64 else torch.float32
    chunk = key_chunk(memory_limit, h, d, 8 if math == torch.float64 else 4)

    def keys_of_row(row: int) -> Any:
        # Chunks run across the scopes, so the bits are those of `sparse_prefill` over the same keys side by side.
        listed = []
        for cache, indices, length in scopes:
            slots = indices[row // s_q, row % s_q]
            if length is not None:
                slots = slots[: int(length[row // s_q])]
            listed.append((cache, slots[slots >= 0]))
        for start in range(0, sum([slots.numel() for _, slots in listed]), chunk):
            parts, first = [], start
            for cache, slots in listed:
                part = slots[max(first, 0) : max(first + chunk, 0)]
                if part.numel():
                    parts.append(gather_decoded(cache, part))
                first -= slots.numel()
            yield parts[0] if len(parts) == 1 else torch.cat(parts)

    with torch.autocast(q.device.type, enabled=False):
        out, lse, _ = attend_rows(q.reshape(b * s_q, h, d), keys_of_row, softmax_scale, attn_sink, math, out_dtype)
    return out.reshape(q.shape), lse.float().reshape(b, s_q, h)


_operator = opaque("sparse_decode", "reference", SCHEMA, _reference, fake_attention)


@SPARSE_DECODE.impl("reference", limits=Limits(out_dtypes=OUT_DTYPES), tolerance=EXACT)
def _run_reference(call: SparseDecodeCall) -> tuple[torch.Tensor, torch.Tensor]:
    result: tuple[torch.Tensor, torch.Tensor] = _operator(*call.flat())
    return result
