# SPDX-License-Identifier: Apache-2.0
"""Launches of sparse decode attention: the host side around the kernels of `attention.py`.

Strategies, in the order they are asked; each is an implementation with its own limits, and all give the same answer.

    dense_mask     a chunk of one sequence over all slots of its caches with a mask, while that is cheaper
    shared_prefix  a chunk of one sequence with wide lists: the longest is gathered once, a mask per row
    fused          records straight from the pool, decoded on chip; native e4m3 for caches of the 224 cap, integers
                   otherwise
    fused_planar   the same for planar pages: a second gather per chunk for the scale bytes
    decoded_table  every slot of the caches to bfloat16 once, then gathered rows; for small caches and many rows
    row_gather     each row's records gathered and decoded in torch; takes whatever a kernel's pool contract refuses
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .. import config
from ..caches import PagedCache
from ..dispatch import WITHIN_2X_BF16, Limits
from ..errors import ArgumentError, SlotRangeError
from ..formats import V41_FP8
from ..ops.sparse_decode import SPARSE_DECODE, SparseDecodeCall, check_slots
from . import launch
from .attention import fused_attn, gathered_attn, gathered_attn_idx, shared_attn
from .decode_records import E4M3_RAISE, UE8M0_MAX, UE8M0_NAN
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


def in_blocks(
    call: SparseDecodeCall, backend: str, kernel: Any, limit: int, keys_of: Callable[..., dict[str, Any]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """One kernel call for each block of at most `limit` rows, joined and reshaped.

    keys_of: (visible slots of each scope, valid [rows, k], padded rows) of a block -> the kernel's arguments that say
    where its keys are.
    """
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
        q, bias = attention_operands(queries[start : start + count], softmax, valid, padded)
        out, lse = launch.call_kernel(
            backend,
            kernel,
            q=q,
            **keys_of(part, valid, padded),
            bias=bias,
            sink=softmax.sink,
            with_lse=True,
            exact_bias=False,
            out_fp32=call.out_dtype == torch.float32,
            active=count,
        )
        out, lse = finish_attention(out, (lse,), valid, call.attn_sink, heads)
        outs.append(out)
        lses.append(lse)
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    lse = lses[0] if len(lses) == 1 else torch.cat(lses)
    return out.reshape(call.q.shape), lse.reshape(b, s_q, heads)


# --- chunks of one sequence ------------------------------------------------------------------------------------------

SHARED_WIDTH = 1024  # a list at least so wide is dense: rows of one sequence hold prefixes of the longest one
SHARED_STEP_US = 6.0  # estimated: 128 (row, head) pairs against 1,024 shared keys
GATHER_CHUNK_US = 1.5  # estimated: one row's 128 gathered and decoded records, the cheapest format
DECODE_KEYS = 8192  # shared keys decoded in torch at once


def merge_parts(
    parts: list[tuple[torch.Tensor, torch.Tensor]], attn_sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [rows, heads, 512], lse [rows, heads]) float32 of disjoint key sets as one softmax, then the sink. An
    empty part has
    lse = +inf."""
    lses = torch.stack([lse for _, lse in parts])
    empty = lses == torch.inf
    weights = torch.where(empty, -torch.inf, lses)
    peak = weights.amax(dim=0)
    none = peak == -torch.inf
    peak = torch.where(none, 0.0, peak)
    weights = torch.exp(weights - peak)
    total = weights.sum(dim=0)
    lse = torch.where(none, torch.inf, peak + torch.log(torch.where(none, 1.0, total)))
    share = weights / torch.where(none, 1.0, total)
    if attn_sink is not None:
        # Not torch.sigmoid: on a CPU its last elements, past a whole vector, have other last bits, and which rows those
        # are depends on the rest of the batch.
        share = share / (1.0 + torch.exp(attn_sink - torch.where(none, 0.0, lse)))
    out = (torch.stack([out for out, _ in parts]) * share.unsqueeze(-1)).sum(dim=0)
    return torch.where(none.unsqueeze(-1), 0.0, out), lse


def attend_shared(
    call: SparseDecodeCall, backend: str, keys: torch.Tensor, logits: torch.Tensor, softmax: Softmax, has_weights: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse), without the sink, of all rows over `keys` [n, 512]; `logits` [rows, n] are added to the scaled
    ones."""
    rows, heads = call.num_rows, call.num_heads
    queries = call.q.reshape(rows, heads, call.q.shape[3])
    if softmax.sign != 1.0:
        queries = queries * softmax.sign
    width = -(-keys.shape[0] // CHUNK) * CHUNK
    keys = launch.pad_to(keys, width, 0, 0.0)
    logits = launch.pad_to(logits, width, 1, EMPTY)
    no_sink = torch.full((heads, 1), EMPTY, dtype=torch.float32, device=keys.device)
    parts = []
    for start, count, padded in launch.blocks_of_rows(rows, MAX_LAUNCH_ROWS):
        q = launch.pad_to(queries[start : start + count], padded, 0, 0.0)
        bias = launch.pad_to(logits[start : start + count], padded, 0, EMPTY)
        bias = torch.cat((bias.new_zeros((padded, BIAS_PAD)), bias), dim=1)
        out, lse = launch.call_kernel(
            backend,
            shared_attn,
            q=q.reshape(-1, q.shape[2]),
            kv=keys,
            bias=bias,
            sink=no_sink,
            scale=softmax.scale,
            has_weights=has_weights,
            active=count,
        )
        valid = logits[start : start + count] > EMPTY
        parts.append(finish_attention(out, (lse,), valid, None, heads))
    out, lse = [torch.cat(each) if len(each) > 1 else each[0] for each in zip(*parts, strict=True)]
    return out, lse


def _finish_shared(
    call: SparseDecodeCall, parts: list[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = merge_parts(parts, call.attn_sink)
    return out.to(call.out_dtype).reshape(call.q.shape), lse.reshape(call.q.shape[:3])


def _one_sequence(call: SparseDecodeCall) -> list[str]:
    return [] if call.one_sequence else ["the rows must be declared as one sequence's, got one_sequence=False"]


def _per_core(rows: int) -> int:
    return -(-rows // launch.cores())


def dense_us(rows: int, heads: int, slots: int) -> float:
    """Estimated time of a dense pass of one core's rows over all slots."""
    width = 32 if heads <= 32 else 64 if heads <= 64 else 128
    groups = -(-_per_core(rows) * width // 128)
    return groups * (-(-slots // SHARED_WIDTH)) * SHARED_STEP_US


def gather_us(rows: int, keys: int) -> float:
    """Estimated time of gathering and attending each row's own keys."""
    return _per_core(rows) * (-(-keys // CHUNK)) * GATHER_CHUNK_US


def _dense_rule(call: SparseDecodeCall) -> list[str]:
    reasons = _one_sequence(call) + _table_rule(call)
    if reasons:
        return reasons
    slots = sum([scope.cache.num_slots for scope in call.scopes])
    dense, gather = dense_us(call.num_rows, call.num_heads, slots), gather_us(call.num_rows, call.topk)
    if dense >= gather:
        return [
            f"a dense pass over {slots} slots must be the cheaper one, got {dense:.0f} us against {gather:.0f} us of "
            "gathering (estimated)"
        ]
    return []


@SPARSE_DECODE.impl(
    "neuron",
    "simulated",
    strategy="dense_mask",
    limits=Limits(max_heads=MAX_HEADS, formats=ATTENTION_FORMATS),
    tolerance=WITHIN_2X_BF16,
    rule=_dense_rule,
)
def _launch_dense(call: SparseDecodeCall, backend: str) -> Any:
    check_call(call)
    if call.num_rows == 0:
        return no_rows(call)
    softmax = softmax_of(call.softmax_scale, None, call.q, call.num_heads)
    tables = [launch.load_cache(scope.cache) for scope in call.scopes]
    row = torch.arange(call.num_rows, dtype=torch.int32, device=call.device).unsqueeze(1)
    listed = []
    for number, table in enumerate(tables):
        seen = visible_slots(call, number)
        count = torch.zeros((call.num_rows, table.shape[0]), dtype=torch.float32, device=call.device)
        # A slot listed twice counts twice: its logit gains ln 2.
        listed.append(count.index_put((row, seen.slots), seen.valid.float(), accumulate=True))
    counts = torch.cat(listed, dim=1)
    logits = torch.where(counts > 0, torch.log(counts.clamp(min=1.0)) / softmax.scale, EMPTY)
    part = attend_shared(call, backend, torch.cat(tables), logits, softmax, True)
    return _finish_shared(call, [part])


def _shared_rule(call: SparseDecodeCall) -> list[str]:
    reasons = _one_sequence(call)
    if not any([scope.indices.shape[2] >= SHARED_WIDTH for scope in call.scopes]):
        widest = max([scope.indices.shape[2] for scope in call.scopes])
        reasons.append(f"one scope must list at least {SHARED_WIDTH} slots a row, got {widest}")
    return reasons + _row_gather_rule(call)


@SPARSE_DECODE.impl(
    "neuron",
    "simulated",
    strategy="shared_prefix",
    limits=Limits(max_heads=MAX_HEADS, formats=ATTENTION_FORMATS),
    tolerance=WITHIN_2X_BF16,
    rule=_shared_rule,
)
def _launch_shared(call: SparseDecodeCall, backend: str) -> Any:
    check_call(call)
    if call.num_rows == 0:
        return no_rows(call)
    softmax = softmax_of(call.softmax_scale, None, call.q, call.num_heads)
    keys, logits = [], []
    for number, scope in enumerate(call.scopes):
        if scope.indices.shape[2] < SHARED_WIDTH:
            continue
        seen = visible_slots(call, number)
        longest = seen.valid.sum(dim=1).argmax().reshape(1)
        shared = Visible(seen.slots.index_select(0, longest), seen.valid.index_select(0, longest))
        if launch.checks_now(call.checks):
            _check_prefixes(number, seen, shared)
        keys.append(_shared_keys(scope.cache, shared))
        logits.append(torch.where(seen.valid, 0.0, EMPTY))
    parts = [attend_shared(call, backend, torch.cat(keys), torch.cat(logits, dim=1), softmax, False)]
    narrow = tuple([scope for scope in call.scopes if scope.indices.shape[2] < SHARED_WIDTH])
    if narrow:
        rest = call._replace(scopes=narrow, attn_sink=None, out_dtype=torch.float32)
        own = _launch_fused if not pool_refusals(rest) else _launch_row_gather
        out, lse = own(rest, backend)
        parts.append((out.reshape(call.num_rows, *out.shape[2:]), lse.reshape(call.num_rows, -1)))
    return _finish_shared(call, parts)


def _check_prefixes(number: int, seen: Visible, shared: Visible) -> None:
    differs = seen.valid & ~((seen.slots == shared.slots) & shared.valid)
    if bool(differs.any()):
        row, column = differs.nonzero()[0].tolist()
        raise ArgumentError(
            f"sparse_decode: scopes[{number}].indices must hold prefixes of one list when one_sequence=True and lists "
            f"are {SHARED_WIDTH} or wider, got another slot in row {row}, column {column}; these are several sequences."
        )


def _shared_keys(cache: PagedCache, shared: Visible) -> torch.Tensor:
    """[n, 512] bf16 of the one list [1, n], decoded DECODE_KEYS at a time."""
    parts = []
    for start in range(0, shared.slots.shape[1], DECODE_KEYS):
        part = slice(start, start + DECODE_KEYS)
        parts.append(gather_decoded_rows(cache, Visible(shared.slots[:, part], shared.valid[:, part]), 1)[0])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


# --- fused -----------------------------------------------------------------------------------------------------------


def kind_of(cache: PagedCache) -> str:
    """The kernel's decoding of a cache."""
    if cache.format is V41_FP8:
        return launch.e4m3_kind(cache)
    return "fp4" if cache.format.name == "V41_FP4" else "bf16"


def pool_refusals(call: SparseDecodeCall) -> list[str]:
    found = [launch.pool_refusal(scope.cache, f"scopes[{number}]") for number, scope in enumerate(call.scopes)]
    return [sentence for sentence in found if sentence]


def _fused_planar_rule(call: SparseDecodeCall) -> list[str]:
    if "planar" not in call.layouts:
        return ["page layout must be planar in one scope at least; interleaved records need no second gather"]
    return pool_refusals(call)


LARGEST_SCALE = int(UE8M0_MAX) - E4M3_RAISE  # ue8m0 byte; the integer variant would count a larger one as this


def refuse_codes(call: SparseDecodeCall) -> None:
    """In checked mode, outside a graph: refuse selected records that the kernel's decoding would misread."""
    if not launch.checks_now(call.checks):
        return
    for number, scope in enumerate(call.scopes):
        kind = kind_of(scope.cache)
        if kind == "fp4":
            continue
        seen = visible_slots(call, number)
        slots = seen.slots[seen.valid]
        if slots.numel() == 0:
            continue
        records = launch.gather_bytes(scope.cache, slots)
        if kind == "bf16":
            _refuse_nan(number, slots, records)
            continue
        data = records[:, : V41_FP8.data_bytes] & 0x7F
        bad = data >= 0x78 if kind == "fp8_native" else data == 0x7F
        if bool(bad.any()):
            where = bad.nonzero()[0]
            code = int(records[where[0], where[1]])
            launch.refuse_code(
                f"sparse_decode: scopes[{number}].cache", code, int(slots[where[0]]), kind == "fp8_native"
            )
        if kind == "fp8_integer":
            _refuse_scales(number, slots, records[:, V41_FP8.data_bytes :])


def _refuse_nan(number: int, slots: torch.Tensor, records: torch.Tensor) -> None:
    """The kernel takes bfloat16 rows as they are: a NaN would reach every output of its row, where it decodes to 0."""
    if records.dtype == torch.bfloat16:
        bad = (records != records).any(dim=1)
    else:
        low, high = records[:, 0::2].int(), records[:, 1::2].int()
        bad = ((((high & 127) << 8) | low) > 0x7F80).any(dim=1)
    if bool(bad.any()):
        slot = int(slots[bad.nonzero()[0, 0]])
        raise SlotRangeError(
            f"sparse_decode: scopes[{number}].cache must hold numbers, got NaN in slot {slot}; an unwritten slot or a "
            "corrupted record."
        )


def _refuse_scales(number: int, slots: torch.Tensor, scales: torch.Tensor) -> None:
    """Integer decoding raises a factor by 2^8, so factors above 2^119 do not fit float32; 255 is NaN and gives 0."""
    bad = (scales > LARGEST_SCALE) & (scales < UE8M0_NAN)
    if bool(bad.any()):
        where = bad.nonzero()[0]
        slot, byte = int(slots[where[0]]), int(scales[where[0], where[1]])
        raise SlotRangeError(
            f"sparse_decode: scopes[{number}].cache must hold scale bytes up to {LARGEST_SCALE} for integer decoding, "
            f"got {byte} in slot {slot}; an unwritten slot or a corrupted record."
        )


@SPARSE_DECODE.impl(
    "neuron",
    "simulated",
    strategy="fused_planar",
    limits=Limits(max_heads=MAX_HEADS, formats=ATTENTION_FORMATS),
    tolerance=WITHIN_2X_BF16,
    rule=_fused_planar_rule,
)
@SPARSE_DECODE.impl(  # registered, and so asked, before the one above
    "neuron",
    "simulated",
    strategy="fused",
    limits=Limits(max_heads=MAX_HEADS, formats=ATTENTION_FORMATS, layouts=frozenset({"interleaved"})),
    tolerance=WITHIN_2X_BF16,
    rule=pool_refusals,
)
def _launch_fused(call: SparseDecodeCall, backend: str) -> Any:
    check_call(call)
    refuse_codes(call)
    pools = [launch.pool_units(scope.cache) for scope in call.scopes]
    kinds = [kind_of(scope.cache) for scope in call.scopes]

    def keys_of(part: list[Visible], valid: torch.Tensor, padded: int) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        for number, (units, seen) in enumerate(zip(pools, part, strict=True)):
            data, scales = launch.unit_indices(units, seen.slots)
            arguments[f"pool{number}"] = units.pool
            arguments[f"idx{number}"] = _unit_columns(data, seen.valid, padded)
            if scales is not None:
                arguments[f"scale_idx{number}"] = _unit_columns(scales, seen.valid, padded)
            arguments[f"kind{number}"] = kinds[number]
        if "fp4" in kinds:
            arguments["lanes"] = launch.lanes()
        return arguments

    return in_blocks(call, backend, fused_attn, MAX_LAUNCH_ROWS, keys_of)


def _unit_columns(units: torch.Tensor, valid: torch.Tensor, padded: int) -> torch.Tensor:
    return launch.columns(launch.pad_to(torch.where(valid, units, EMPTY_UNIT), padded, 0, EMPTY_UNIT))


# --- decoded table ---------------------------------------------------------------------------------------------------

TABLE_ROWS = 16  # fewer rows read less by gathering their own records


@config.constant_in_graphs
def table_slots() -> int:
    """Slots a decoded table may have."""
    return int(config.get("DEEPINFER_NEURON_ATTN_TABLE_SLOTS"))


def _table_rule(call: SparseDecodeCall) -> list[str]:
    found = [launch.dtype_refusal(scope.cache, f"scopes[{number}]") for number, scope in enumerate(call.scopes)]
    if any(found):
        return [sentence for sentence in found if sentence]
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
    check_call(call)
    tables = [launch.load_cache(scope.cache) for scope in call.scopes]
    table = tables[0] if len(tables) == 1 else torch.cat(tables)
    table = launch.pad_to(table, max(2, table.shape[0]), 0, 0.0)
    starts = (0, tables[0].shape[0])

    def keys_of(part: list[Visible], valid: torch.Tensor, padded: int) -> dict[str, Any]:
        shifted = [seen.slots + starts[number] for number, seen in enumerate(part)]
        idx = torch.where(valid, shifted[0] if len(shifted) == 1 else torch.cat(shifted, dim=1), EMPTY_UNIT)
        idx = launch.columns(launch.pad_to(idx, padded, 0, EMPTY_UNIT))
        return {"kv_table": table, "idx": idx, "is_columns": True}

    return in_blocks(call, backend, gathered_attn_idx, MAX_LAUNCH_ROWS, keys_of)


# --- rows gathered and decoded in torch ------------------------------------------------------------------------------


def gather_decoded_rows(cache: PagedCache, seen: Visible, padded: int) -> torch.Tensor:
    """[padded, k, 512] bf16 of the visible slots, 0 where not valid. The row count of gather and decode is `padded`."""
    slots = launch.pad_to(seen.slots, padded, 0, 0)
    valid = launch.pad_to(seen.valid, padded, 0, False)
    if cache.num_slots == 0:
        return torch.zeros((*slots.shape, 512), dtype=torch.bfloat16, device=slots.device)
    rows = launch.decode_rows(launch.gather_bytes(cache, slots), cache.format)
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
    check_call(call)

    def keys_of(part: list[Visible], valid: torch.Tensor, padded: int) -> dict[str, Any]:
        parts = [gather_decoded_rows(scope.cache, seen, padded) for scope, seen in zip(call.scopes, part, strict=True)]
        kv = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return {"kv": kv.reshape(-1, kv.shape[-1])}

    return in_blocks(call, backend, gathered_attn, _rows_within(call), keys_of)


GATHER_BYTES = 1024 * 12  # of torch temporaries per gathered record: int32 parts and float32 values of 512 elements


def _rows_within(call: SparseDecodeCall) -> int:
    """The largest power of two of rows whose gathered records fit the scratch budget."""
    rows = MAX_LAUNCH_ROWS
    width = sum([-(-scope.indices.shape[2] // CHUNK) * CHUNK for scope in call.scopes])
    while rows > 1 and rows * width * GATHER_BYTES > call.memory_limit:
        rows //= 2
    return rows
