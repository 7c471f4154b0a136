# SPDX-License-Identifier: Apache-2.0
"""Launches of sparse decode attention: the host side around the kernels of `attention.py`.

Strategies, best first; each is an implementation with its own limits, and all give the same answer.

    fused              records straight from the pool, decoded on chip; native e4m3 for caches of the 224 cap,
    integers otherwise fused_planar       the same for planar pages: a second gather per chunk for the scale bytes
    decoded_table      every slot of the caches to bfloat16 once, then gathered rows; for small caches and many rows
    row_gather         each row's records gathered and decoded in torch; takes whatever a kernel's pool contract refuses
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .. import config
from ..caches import PagedCache
from ..dispatch import WITHIN_2X_BF16, Limits
from ..errors import SlotRangeError
from ..formats import V41_FP8
from ..ops.sparse_decode import SPARSE_DECODE, SparseDecodeCall, check_slots
from . import launch
from .attention import fused_attn, gathered_attn, gathered_attn_idx
from .launch import BIAS_PAD, CHUNK, EMPTY, EMPTY_UNIT

__all__ = ["ATTENTION_FORMATS", "Softmax", "Visible", "attention_operands", "finish_attention", "visible_slots"]

ATTENTION_FORMATS = frozenset({"V41_FP8", "V41_FP4", "BF16"})
MAX_HEADS = 128  # output partitions
MAX_LAUNCH_ROWS = 256  # rows of one kernel call: its program is unrolled, about 140 instructions a row
TINY_SCALE = 1e-20  # below it every logit rounds to 0 beside any other


class Visible(NamedTuple):
    """The slots of one scope, padded to the kernel's tile: slots [rows, k] int32, 0 where not valid; valid [rows, k]
    bool."""

    slots: torch.Tensor
    valid: torch.Tensor


class Softmax(NamedTuple):
    """Scale and sink of a call in the form kernels take."""

    scale: float  # positive
    sign: float  # -1, 0 or 1, to be applied to the queries
    sink: torch.Tensor  # [heads, 1] float32, clamped to +-1e30


def softmax_of(softmax_scale: float, attn_sink: torch.Tensor | None, like: torch.Tensor, heads: int) -> Softmax:
    """A kernel's scale is positive: the sign moves to the queries, and a scale of zero zeroes them."""
    if attn_sink is None:
        sink = torch.full((heads, 1), EMPTY, dtype=torch.float32, device=like.device)
    else:
        sink = attn_sink.clamp(EMPTY, -EMPTY).unsqueeze(1)
    if abs(softmax_scale) < TINY_SCALE:
        return Softmax(1.0, 0.0, sink)
    return Softmax(abs(softmax_scale), 1.0 if softmax_scale > 0 else -1.0, sink)


def visible_slots(call: SparseDecodeCall, number: int) -> Visible:
    """The slots of scope `number`, [rows, padded topk]."""
    scope = call.scopes[number]
    rows, topk = call.num_rows, scope.indices.shape[2]
    listed = scope.indices.reshape(rows, topk)
    valid = listed >= 0
    if scope.topk_length is not None:
        length = scope.topk_length.unsqueeze(1).expand(call.q.shape[0], call.q.shape[1]).reshape(rows, 1)
        column = torch.arange(topk, dtype=torch.int32, device=listed.device)
        valid = valid & (column < length)
    width = -(-topk // CHUNK) * CHUNK
    slots = torch.where(valid, listed, 0)
    return Visible(launch.pad_to(slots, width, 1, 0), launch.pad_to(valid, width, 1, False))


def check_call(call: SparseDecodeCall) -> None:
    """In checked mode, outside a graph: refuse slots outside their cache before anything reads them."""
    if launch.checks_now(call.checks):
        for number, scope in enumerate(call.scopes):
            check_slots("sparse_decode", f"scopes[{number}]", scope.indices, scope.cache.num_slots, scope.topk_length)


def attention_operands(
    queries: torch.Tensor, softmax: Softmax, valid: torch.Tensor, padded: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q [padded * heads, 512] bf16, bias [padded, 16 + k] fp32) of queries [rows, heads, 512] and valid [rows, k]."""
    if softmax.sign != 1.0:
        queries = queries * softmax.sign
    queries = launch.pad_to(queries, padded, 0, 0.0)
    valid = launch.pad_to(valid, padded, 0, False)
    head = queries.new_zeros((padded, BIAS_PAD - 1), dtype=torch.float32)
    scale = torch.full((padded, 1), softmax.scale, dtype=torch.float32, device=queries.device)
    bias = torch.cat((scale, head, torch.where(valid, 0.0, EMPTY)), dim=1)
    return queries.reshape(-1, queries.shape[-1]), bias


def finish_attention(
    out: torch.Tensor, stats: tuple[torch.Tensor, ...], valid: torch.Tensor, attn_sink: torch.Tensor | None, heads: int
) -> tuple[torch.Tensor, ...]:
    """Kernel results [padded * heads, n] of valid [rows, k] rows to (out [rows, heads, 512], stats [rows, heads] ..).

    Rows without a valid slot become 0 with infinite statistics, heads with an infinite sink 0.
    """
    rows = valid.shape[0]
    lonely = ~valid.any(dim=1)
    zero = lonely.reshape(rows, 1, 1)
    if attn_sink is not None:
        zero = zero | (attn_sink == torch.inf).reshape(1, heads, 1)
    out = torch.where(zero, 0.0, out[: rows * heads].reshape(rows, heads, out.shape[1]))
    ends = (torch.inf, -torch.inf)  # lse, max_logits
    finished = [
        torch.where(lonely.reshape(rows, 1), end, each[: rows * heads].reshape(rows, heads))
        for each, end in zip(stats, ends, strict=False)
    ]
    return (out, *finished)


def no_rows(call: SparseDecodeCall) -> tuple[torch.Tensor, torch.Tensor]:
    out = call.q.new_empty(call.q.shape, dtype=call.out_dtype)
    return out, call.q.new_empty(call.q.shape[:3], dtype=torch.float32)


def in_blocks(call: SparseDecodeCall, limit: int, run: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`run(queries, softmax, visible, padded)` on blocks of at most `limit` rows, joined and reshaped."""
    check_call(call)
    b, s_q, heads, d = call.q.shape
    rows = b * s_q
    if rows == 0:
        return no_rows(call)
    queries = call.q.reshape(rows, heads, d)
    softmax = softmax_of(call.softmax_scale, call.attn_sink, call.q, heads)
    seen = [visible_slots(call, number) for number in range(len(call.scopes))]
    outs, lses = [], []
    for start, count, padded in launch.blocks_of_rows(rows, limit):
        part = [Visible(v.slots[start : start + count], v.valid[start : start + count]) for v in seen]
        valid = part[0].valid if len(part) == 1 else torch.cat([v.valid for v in part], dim=1)
        out, *stats = run(queries[start : start + count], softmax, part, valid, padded)
        out, lse = finish_attention(out, tuple(stats), valid, call.attn_sink, heads)
        outs.append(out)
        lses.append(lse)
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    lse = lses[0] if len(lses) == 1 else torch.cat(lses)
    return out.reshape(call.q.shape), lse.reshape(b, s_q, heads)


# --- fused -----------------------------------------------------------------------------------------------------------


def kind_of(cache: PagedCache) -> str:
    """The kernel's decoding of a cache: e4m3 by the engines' own cast only where the writer kept below 256."""
    if cache.format is V41_FP8:
        return "fp8_native" if cache.e4m3_max == 224 else "fp8_integer"
    return "fp4" if cache.format.name == "V41_FP4" else "bf16"


def pool_refusals(call: SparseDecodeCall) -> list[str]:
    found = [launch.pool_refusal(scope.cache, f"scopes[{number}]") for number, scope in enumerate(call.scopes)]
    return [sentence for sentence in found if sentence]


def _fused_planar_rule(call: SparseDecodeCall) -> list[str]:
    if "planar" not in call.layouts:
        return ["page layout must be planar in one scope at least; interleaved records need no second gather"]
    return pool_refusals(call)


def refuse_codes(call: SparseDecodeCall) -> None:
    """In checked mode, outside a graph: refuse selected records that the kernel's decoding would misread."""
    if not launch.checks_now(call.checks):
        return
    for number, scope in enumerate(call.scopes):
        kind = kind_of(scope.cache)
        if not kind.startswith("fp8"):
            continue
        seen = visible_slots(call, number)
        slots = seen.slots[seen.valid]
        if slots.numel() == 0:
            continue
        records = launch.gather_bytes(scope.cache, slots)
        data = records[:, : V41_FP8.data_bytes] & 0x7F
        bad = data >= 0x78 if kind == "fp8_native" else data == 0x7F
        if not bool(bad.any()):
            continue
        where = bad.nonzero()[0]
        slot, code = int(slots[where[0]]), int(records[where[0], where[1]])
        why = (
            f"got e4m3 code 0x{code:02X} in slot {slot}, which Trainium's own e4m3 reads as inf or NaN; the cache is "
            "declared with e4m3_max=224, declare 448 for what was encoded so"
            if kind == "fp8_native"
            else f"got the NaN code 0x{code:02X} in slot {slot}; an unwritten slot or a corrupted record"
        )
        raise SlotRangeError(f"sparse_decode: scopes[{number}].cache must hold codes the kernel can decode, {why}.")


def _fused(call: SparseDecodeCall, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    refuse_codes(call)
    pools = [launch.pool_units(scope.cache) for scope in call.scopes]
    kinds = [kind_of(scope.cache) for scope in call.scopes]

    def run(queries: Any, softmax: Softmax, part: list[Visible], valid: Any, padded: int) -> Any:
        q, bias = attention_operands(queries, softmax, valid, padded)
        arguments: dict[str, Any] = {"q": q}
        for number, (units, seen) in enumerate(zip(pools, part, strict=True)):
            data, scales = launch.unit_indices(units, seen.slots)
            arguments[f"pool{number}"] = units.pool
            arguments[f"idx{number}"] = _unit_columns(data, seen.valid, padded)
            if scales is not None:
                arguments[f"scale_idx{number}"] = _unit_columns(scales, seen.valid, padded)
            arguments[f"kind{number}"] = kinds[number]
        return launch.call_kernel(
            backend,
            fused_attn,
            **arguments,
            bias=bias,
            sink=softmax.sink,
            with_lse=True,
            out_fp32=call.out_dtype == torch.float32,
            active=queries.shape[0],
        )

    return in_blocks(call, MAX_LAUNCH_ROWS, run)


def _unit_columns(units: torch.Tensor, valid: torch.Tensor, padded: int) -> torch.Tensor:
    return launch.columns(launch.pad_to(torch.where(valid, units, EMPTY_UNIT), padded, 0, EMPTY_UNIT))


@SPARSE_DECODE.impl(
    "neuron",
    "simulated",
    strategy="fused",
    limits=Limits(max_heads=MAX_HEADS, formats=ATTENTION_FORMATS, layouts=frozenset({"interleaved"})),
    tolerance=WITHIN_2X_BF16,
    rule=pool_refusals,
)
def _launch_fused(call: SparseDecodeCall, backend: str) -> Any:
    return _fused(call, backend)


@SPARSE_DECODE.impl(
    "neuron",
    "simulated",
    strategy="fused_planar",
    limits=Limits(max_heads=MAX_HEADS, formats=ATTENTION_FORMATS),
    tolerance=WITHIN_2X_BF16,
    rule=_fused_planar_rule,
)
def _launch_fused_planar(call: SparseDecodeCall, backend: str) -> Any:
    return _fused(call, backend)


# --- decoded table ---------------------------------------------------------------------------------------------------

TABLE_ROWS = 16  # fewer rows read less by gathering their own records


@config.constant_in_graphs
def table_slots() -> int:
    """Slots a decoded table may have."""
    return int(config.get("DEEPINFER_NEURON_ATTN_TABLE_SLOTS"))


def _table_rule(call: SparseDecodeCall) -> list[str]:
    slots = sum([scope.cache.num_slots for scope in call.scopes])
    if slots > table_slots():
        return [f"the caches must hold at most {table_slots()} slots (DEEPINFER_NEURON_ATTN_TABLE_SLOTS), got {slots}"]
    if slots == 0:
        return ["the caches must hold at least one slot, got none"]
    return []


@SPARSE_DECODE.impl(
    "neuron",
    "simulated",
    strategy="decoded_table",
    limits=Limits(max_heads=MAX_HEADS, formats=ATTENTION_FORMATS),
    tolerance=WITHIN_2X_BF16,
    rule=_table_rule,
)
def _launch_table(call: SparseDecodeCall, backend: str) -> Any:
    tables = [launch.load_cache(scope.cache) for scope in call.scopes]
    table = tables[0] if len(tables) == 1 else torch.cat(tables)
    table = launch.pad_to(table, max(2, table.shape[0]), 0, 0.0)
    starts = (0, tables[0].shape[0])

    def run(queries: Any, softmax: Softmax, part: list[Visible], valid: Any, padded: int) -> Any:
        q, bias = attention_operands(queries, softmax, valid, padded)
        shifted = [seen.slots + starts[number] for number, seen in enumerate(part)]
        idx = torch.where(valid, shifted[0] if len(shifted) == 1 else torch.cat(shifted, dim=1), EMPTY_UNIT)
        return launch.call_kernel(
            backend,
            gathered_attn_idx,
            q=q,
            kv_table=table,
            idx=launch.columns(launch.pad_to(idx, padded, 0, EMPTY_UNIT)),
            bias=bias,
            sink=softmax.sink,
            with_lse=True,
            exact_bias=False,
            is_columns=True,
            out_fp32=call.out_dtype == torch.float32,
            active=queries.shape[0],
        )

    return in_blocks(call, MAX_LAUNCH_ROWS, run)


# --- rows gathered and decoded in torch ------------------------------------------------------------------------------


def gather_decoded_rows(cache: PagedCache, seen: Visible, padded: int) -> torch.Tensor:
    """[padded, k, 512] bf16 of the visible slots, 0 where not valid. The row count of gather and decode is `padded`."""
    slots = launch.pad_to(seen.slots, padded, 0, 0)
    valid = launch.pad_to(seen.valid, padded, 0, False)
    if cache.num_slots == 0:
        return torch.zeros((*slots.shape, 512), dtype=torch.bfloat16, device=slots.device)
    records = launch.gather_bytes(cache, slots)
    rows = records if records.dtype == torch.bfloat16 else launch.decode_rows(records, cache.format)
    return torch.where(valid.unsqueeze(-1), rows, 0.0)


def _row_gather_rule(call: SparseDecodeCall) -> list[str]:
    found = [launch.gather_refusal(scope.cache, f"scopes[{number}]") for number, scope in enumerate(call.scopes)]
    return [sentence for sentence in found if sentence]


@SPARSE_DECODE.impl(
    "neuron",
    "simulated",
    strategy="row_gather",
    limits=Limits(max_heads=MAX_HEADS, formats=ATTENTION_FORMATS),
    tolerance=WITHIN_2X_BF16,
    rule=_row_gather_rule,
)
def _launch_row_gather(call: SparseDecodeCall, backend: str) -> Any:
    def run(queries: Any, softmax: Softmax, part: list[Visible], valid: Any, padded: int) -> Any:
        q, bias = attention_operands(queries, softmax, valid, padded)
        parts = [gather_decoded_rows(scope.cache, seen, padded) for scope, seen in zip(call.scopes, part, strict=True)]
        kv = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return launch.call_kernel(
            backend,
            gathered_attn,
            q=q,
            kv=kv.reshape(-1, kv.shape[-1]),
            bias=bias,
            sink=softmax.sink,
            with_lse=True,
            exact_bias=False,
            out_fp32=call.out_dtype == torch.float32,
            active=queries.shape[0],
        )

    return in_blocks(call, _rows_within(call), run)


GATHER_BYTES = 1024 * 12  # of torch temporaries per gathered record: int32 parts and float32 values of 512 elements


def _rows_within(call: SparseDecodeCall) -> int:
    """The largest power of two of rows whose gathered records fit the scratch budget."""
    rows = MAX_LAUNCH_ROWS
    width = sum([-(-scope.indices.shape[2] // CHUNK) * CHUNK for scope in call.scopes])
    while rows > 1 and rows * width * GATHER_BYTES > call.memory_limit:
        rows //= 2
    return rows
