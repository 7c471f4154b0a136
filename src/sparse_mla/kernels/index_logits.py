# SPDX-License-Identifier: Apache-2.0
"""Launches of the index scores: the host side around the kernels of `weighted_scores.py`.

    fused       paged keys straight from the pool, page sections gathered and decoded on chip; with candidates, the
                candidate blocks are the sections. e4m3 natively for caches of the 224 cap, by integers otherwise
    row_gather  keys gathered and decoded in torch, for everything else: ragged keys, float32 scales, strided pages

Query rows that share a row of the block table are one *group* and share its decoded keys; groups never share anything,
so a batch of unrelated sequences is right whatever its size. Columns past a row's keys become -inf after the kernel;
pages past every row's context are never looked up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..caches import PagedCache
from ..dispatch import WITHIN_2X_BF16, Limits
from ..formats import INDEX_DIM, INDEX_FP4, INDEX_FP8, INDEX_FP8_FP32, RecordFormat, unpack_scales
from ..ops.index_logits import INDEX_LOGITS, LOGITS_ROW_ALIGN_BYTES, IndexInputs, IndexLogitsCall, check_values
from . import launch
from .launch import CHUNK, EMPTY_UNIT, INT32_END
from .torch_forms import as_bytes, as_bytes_view, float8_refusal, float32_of_bytes
from .weighted_scores import page_scores, weighted_scores

__all__ = ["decode_index_rows", "decode_queries", "score_rows"]

MAX_HEADS = 128  # output partitions
MAX_GROUP_TOKENS = 128  # query rows of one kernel call
MAX_TILES = 64  # tiles of one kernel call: its program is unrolled, about 600 instructions a tile of 4096 keys
MAX_SECTION = 32  # keys per gathered section: 2 KiB of e2m1
GATHER_US, KEY_US = 2.4, 0.3  # of a tile: two gathers; and of each of its chunks of 128 keys
KEY_SCRATCH = 24 * INDEX_DIM  # bytes of torch temporaries per key decoded in torch
UE8M0_ONE = 127
POSITION_BITS = 31


class Groups(NamedTuple):
    """The query rows as groups that share keys; both counts are powers of two after padding."""

    queries: torch.Tensor  # [groups, tokens, heads, 128] bf16
    weights: torch.Tensor  # [groups, tokens, heads] fp32
    lengths: torch.Tensor  # [groups, tokens] int32: keys of each row, cut to the width


# --- operands --------------------------------------------------------------------------------------------------------


def decode_queries(inputs: IndexInputs) -> torch.Tensor:
    """[rows, heads, 128] bf16 of the queries; rows must be a power of two."""
    codes = as_bytes(inputs.q)
    if inputs.q_sf is None:
        scales = torch.full((*codes.shape[:-1], 4), UE8M0_ONE, dtype=torch.int32, device=codes.device)
    else:
        packed = inputs.q_sf.unsqueeze(-1) if inputs.q_sf.dim() == 2 else inputs.q_sf
        scales = unpack_scales(packed).int()
    fmt = INDEX_FP4 if codes.shape[-1] == INDEX_FP4.data_bytes else INDEX_FP8
    return launch.decode_rows(torch.cat((codes, scales), dim=-1), fmt)


def decode_index_rows(records: torch.Tensor, fmt: RecordFormat) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Records [.., bytes] as (bf16 [.., 128], factor [..] float32 or None), see `_with_factor`."""
    if fmt is not INDEX_FP8_FP32:
        return launch.decode_rows(records, fmt), None
    data, tail = records[..., : fmt.data_bytes].int(), records[..., fmt.data_bytes :].int()
    return _with_factor(data, float32_of_bytes(tail))


def _with_factor(codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes [.., 128] and their float32 scale [..].

    The scale stays apart, because its product with a code is no bfloat16; the key carries its sign, and the scores are
    multiplied by its magnitude."""
    ones = torch.full((*codes.shape[:-1], 4), UE8M0_ONE, dtype=torch.int32, device=codes.device)
    values = launch.decode_rows(torch.cat((codes, ones), dim=-1), INDEX_FP8)
    scale = torch.where(scale == scale, scale, 0.0)
    return values * torch.where(scale < 0, -1.0, 1.0).to(torch.bfloat16).unsqueeze(-1), scale.abs()


def _pad_inputs(inputs: IndexInputs, groups: int, tokens: int) -> IndexInputs:
    """The same rows as `groups` groups of `tokens` rows; padding rows score nothing."""
    per_table = max(1, inputs.rows_per_table) if inputs.candidates is None else 1
    count = inputs.num_rows // per_table

    def pad(x: torch.Tensor | None, value: float) -> torch.Tensor | None:
        if x is None:
            return None
        split = as_bytes_view(x)
        split = split.reshape(count, per_table, *x.shape[1:])
        split = launch.pad_to(launch.pad_to(split, tokens, 1, value), groups, 0, value)
        return split.reshape(groups * tokens, *x.shape[1:])

    q, weights, ends = pad(inputs.q, 0), pad(inputs.weights, 0.0), pad(inputs.ends, 0)
    assert q is not None
    assert weights is not None
    assert ends is not None
    return inputs._replace(q=q, q_sf=pad(inputs.q_sf, 0), weights=weights, ends=ends)


def _grouped(inputs: IndexInputs, groups: int, tokens: int) -> Groups:
    padded = _pad_inputs(inputs, groups, tokens)
    heads = inputs.num_heads
    lengths = padded.ends
    if inputs.starts is not None:
        starts = launch.pad_to(inputs.starts, groups * tokens, 0, 0)
        lengths = lengths - starts
    if inputs.width is not None:
        lengths = lengths.clamp(max=inputs.width)
    return Groups(
        decode_queries(padded).reshape(groups, tokens, heads, INDEX_DIM),
        padded.weights.float().reshape(groups, tokens, heads),
        lengths.clamp(min=0).reshape(groups, tokens),
    )


def _kernel_operands(part: Groups) -> tuple[torch.Tensor, torch.Tensor]:
    """(q [t * h, 128] bf16, w [h, t] fp32) of some groups."""
    heads = part.weights.shape[2]
    return part.queries.reshape(-1, INDEX_DIM), part.weights.reshape(-1, heads).transpose(0, 1).contiguous()


# --- which keys ------------------------------------------------------------------------------------------------------


def _section_keys(page_size: int, keys: int) -> int:
    """Consecutive keys per gathered section: the divisor of the page that the cost model likes best."""
    best, best_us = 1, float("inf")
    for size in range(1, min(page_size, MAX_SECTION) + 1):
        if page_size % size:
            continue
        tiles = -(-(-(-keys // size)) // CHUNK)
        us = tiles * (GATHER_US + KEY_US * size)
        if us < best_us:
            best, best_us = size, us
    return best


def _paged_sections(inputs: IndexInputs, groups: Groups, columns: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(slots, wanted) [groups, sections] of the sections of `size` keys that the groups' rows may score."""
    assert inputs.cache is not None
    assert inputs.block_table is not None
    page, count = inputs.cache.page_size, groups.lengths.shape[0]
    longest = groups.lengths.amax(dim=1, keepdim=True)
    first = torch.arange(0, -(-columns // size) * size, size, dtype=torch.int32, device=longest.device)
    wanted = first < longest
    per_page = page // size
    pages = -(-first.shape[0] // per_page)
    table = launch.pad_to(inputs.block_table[:, :pages], count, 0, 0)
    table = launch.pad_to(table, pages, 1, 0)  # a width past the table holds no keys
    block = table.unsqueeze(2).expand(count, pages, per_page).reshape(count, -1)[:, : first.shape[0]]
    return torch.where(wanted, block * page + first % page, 0), wanted


def _candidate_entries(inputs: IndexInputs, groups: int) -> torch.Tensor:
    """[groups, blocks] int32: the row's key at which each candidate block begins; far outside for no block."""
    assert inputs.candidates is not None
    blocks, size, origin = inputs.candidates
    blocks = launch.pad_to(blocks, groups, 0, -1)
    first = blocks * size
    if origin == "keys" and inputs.starts is not None:
        first = first - launch.pad_to(inputs.starts, groups, 0, 0).unsqueeze(1)
    return torch.where(blocks >= 0, first, -(1 << (POSITION_BITS - 1)))


def _slots_of_entries(inputs: IndexInputs, entries: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Slots of [groups, n] entries of each group's sequence; 0 where not wanted."""
    assert inputs.cache is not None
    assert inputs.block_table is not None
    page = inputs.cache.page_size
    entries = torch.where(wanted, entries, 0)
    column = torch.div(entries, page, rounding_mode="floor")
    table = inputs.block_table
    per_group = 1 if inputs.candidates is None else max(1, inputs.rows_per_table)  # groups to a row of the table
    group = torch.arange(entries.shape[0], dtype=torch.int32, device=entries.device)
    row = torch.div(group, per_group, rounding_mode="floor").clamp(max=table.shape[0] - 1).unsqueeze(1)
    block = table[row, column.clamp(max=table.shape[1] - 1)]
    return torch.where(wanted, block * page + (entries - column * page), 0)


# --- joining ---------------------------------------------------------------------------------------------------------


def _check(call: IndexLogitsCall) -> None:
    if launch.checks_now(call.checks):
        check_values("index_logits", call.inputs)


def _finish(scores: torch.Tensor, valid: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, columns] in `dtype` of kernel scores [rows, n] and valid [rows, m <= n]; rows a multiple of 1 KiB
    apart."""
    scores = torch.where(valid, scores[:, : valid.shape[1]], -torch.inf).to(dtype)
    align = LOGITS_ROW_ALIGN_BYTES // dtype.itemsize
    width = max(1, -(-columns // align)) * align
    if scores.shape[1] > width:
        scores = scores[:, :width].contiguous()
    return launch.pad_to(scores, width, 1, -torch.inf)[:, :columns]


def _without_rows(call: IndexLogitsCall) -> torch.Tensor:
    empty = torch.zeros((call.num_rows, 0), dtype=torch.float32, device=call.device)
    return _finish(empty, empty.to(torch.bool), call.columns, call.out_dtype)


def _launch_shape(inputs: IndexInputs) -> tuple[int, int, int, int]:
    """(groups, tokens per group, both padded)."""
    per_table = max(1, inputs.rows_per_table) if inputs.candidates is None else 1
    groups = inputs.num_rows // per_table
    return groups, per_table, launch.power_of_two(groups), launch.power_of_two(per_table)


def _columns_now(inputs: IndexInputs, columns: int) -> int:
    """Columns that can hold a key: the table's room and the width bound them."""
    assert inputs.cache is not None
    assert inputs.block_table is not None
    return min(columns, inputs.block_table.shape[1] * inputs.cache.page_size)


# --- fused -----------------------------------------------------------------------------------------------------------


def _fused_rule(call: IndexLogitsCall) -> list[str]:
    inputs = call.inputs
    found = [float8_refusal("q_fp", inputs.q)]
    if inputs.cache is None:
        found.append("keys must be paged; a contiguous array needs no gather")
        return [sentence for sentence in found if sentence]
    found.append(launch.pool_refusal(inputs.cache, "keys"))
    candidates = inputs.candidates
    if candidates is not None and inputs.cache.page_size % candidates.block_size:
        found.append(
            f"candidate blocks must not cross pages, got blocks of {candidates.block_size} in pages of "
            f"{inputs.cache.page_size}"
        )
    return [sentence for sentence in found if sentence]


@INDEX_LOGITS.impl(
    "neuron",
    "simulated",
    strategy="fused",
    limits=Limits(max_heads=MAX_HEADS, formats=frozenset({INDEX_FP4.name, INDEX_FP8.name})),
    tolerance=WITHIN_2X_BF16,
    rule=_fused_rule,
)
def _launch_fused(call: IndexLogitsCall, backend: str) -> torch.Tensor:
    _check(call)
    inputs = call.inputs
    if call.num_rows == 0 or call.columns == 0:
        return _without_rows(call)
    assert inputs.cache is not None
    groups, tokens, groups_padded, tokens_padded = _launch_shape(inputs)
    shared = _grouped(inputs, groups_padded, tokens_padded)
    if inputs.candidates is None:
        columns = _columns_now(inputs, call.columns)
        size = _section_keys(inputs.cache.page_size, columns)
        slots, wanted = _paged_sections(inputs, shared, columns, size)
        key = torch.arange(columns, dtype=torch.int32, device=call.device)
        valid = key < shared.lengths.unsqueeze(2)
    else:
        size = inputs.candidates.block_size
        entries = _candidate_entries(inputs, groups_padded)
        wanted = (entries >= 0) & (entries < shared.lengths)
        slots = _slots_of_entries(inputs, entries, wanted)
        key = entries.unsqueeze(2) + torch.arange(size, dtype=torch.int32, device=call.device)
        valid = ((key < shared.lengths.unsqueeze(2)) & wanted.unsqueeze(2)).reshape(groups_padded, 1, -1)
    units = launch.pool_units(inputs.cache)
    data, scales = launch.unit_indices(units, slots)
    assert scales is not None
    if inputs.format is INDEX_FP4:
        decoding = {"kind": "fp4", "lanes": launch.lanes()}
    else:
        decoding = {"kind": launch.e4m3_kind(inputs.cache)}
        if launch.checks_now(call.checks):
            _refuse_codes(inputs.cache, slots, size, valid)
    scores = _page_scores(shared, units.pool, (data, scales), wanted, size, decoding, backend)
    scores = scores[:groups, :tokens].reshape(call.num_rows, -1)
    valid = valid[:groups, :tokens].reshape(call.num_rows, -1)
    return _finish(scores, valid, call.columns, call.out_dtype)


CHECKED_KEYS = 65536  # keys looked at together


def _refuse_codes(cache: PagedCache, slots: torch.Tensor, size: int, valid: torch.Tensor) -> None:
    """Refuse keys that native decoding would misread, among those that a row scores: `valid` [groups, tokens, n] of the
    `size` keys from each of `slots` [groups, sections] on. Integer decoding reads every code, NaN as 0."""
    if cache.e4m3_max != 224:
        return
    keys = slots.unsqueeze(2) + torch.arange(size, dtype=torch.int32, device=slots.device)
    scored = valid.any(dim=1)
    keys = keys.reshape(slots.shape[0], -1)[:, : scored.shape[1]][scored]
    for some in keys.split(CHECKED_KEYS):
        codes = launch.gather_bytes(cache, some)[:, : cache.format.data_bytes]
        bad = (codes & 0x7F) >= 0x78
        if bool(bad.any()):
            row, column = bad.nonzero()[0].tolist()
            launch.refuse_code("index_logits: keys", int(codes[row, column]), int(some[row]), True)


def _page_scores(
    shared: Groups,
    pool: torch.Tensor,
    units: tuple[torch.Tensor, torch.Tensor],
    wanted: torch.Tensor,
    size: int,
    decoding: dict[str, Any],
    backend: str,
) -> torch.Tensor:
    """[groups, tokens, sections * size] fp32; kernel calls of at most MAX_TILES tiles and MAX_GROUP_TOKENS rows.
    decoding: the kernel's `kind`, and `lanes` for e2m1."""
    groups, tokens = shared.lengths.shape
    sections = wanted.shape[1]
    tiles = -(-sections // CHUNK)
    data, scales = [
        launch.pad_to(torch.where(wanted, each, EMPTY_UNIT), tiles * CHUNK, 1, EMPTY_UNIT) for each in units
    ]
    at_once = launch.power_of_two(max(1, MAX_TILES // tiles) + 1) // 2
    rows_at_once = min(tokens, MAX_GROUP_TOKENS)
    tiles_at_once = min(tiles, MAX_TILES)
    by_group = []
    for g in range(0, groups, at_once):
        some = slice(g, min(groups, g + at_once))
        by_rows = []
        for t in range(0, tokens, rows_at_once):
            part = Groups(*[each[some, t : t + rows_at_once] for each in shared])
            q, w = _kernel_operands(part)
            by_tiles = []
            for first in range(0, tiles, tiles_at_once):
                keys = slice(first * CHUNK, min(tiles, first + tiles_at_once) * CHUNK)
                out = launch.call_kernel(
                    backend,
                    page_scores,
                    q=q,
                    pool=pool,
                    idx=launch.columns(data[some, keys]),
                    scale_idx=launch.columns(scales[some, keys]),
                    w=w,
                    groups=some.stop - some.start,
                    section=size,
                    **decoding,
                )
                by_tiles.append(out.reshape(some.stop - some.start, part.lengths.shape[1], -1))
            by_rows.append(_joined(by_tiles, 2))
        by_group.append(_joined(by_rows, 1))
    return _joined(by_group, 0)


def _joined(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


# --- keys gathered and decoded in torch ------------------------------------------------------------------------------


def _row_gather_rule(call: IndexLogitsCall) -> list[str]:
    inputs = call.inputs
    found = [float8_refusal("q_fp", inputs.q)]
    if inputs.cache is not None:
        found.append(launch.gather_refusal(inputs.cache, "keys"))
    else:
        found.append(float8_refusal("keys.data", inputs.keys))
        if inputs.keys.shape[0] >= INT32_END:
            found.append(f"keys must be fewer than 2^31, got {inputs.keys.shape[0]}")
    return [sentence for sentence in found if sentence]


@INDEX_LOGITS.impl(
    "neuron",
    "simulated",
    strategy="row_gather",
    limits=Limits(max_heads=MAX_HEADS),
    tolerance=WITHIN_2X_BF16,
    rule=_row_gather_rule,
)
def _launch_row_gather(call: IndexLogitsCall, backend: str) -> torch.Tensor:
    _check(call)
    inputs = call.inputs
    if call.num_rows == 0 or call.columns == 0:
        return _without_rows(call)
    if inputs.cache is None and inputs.candidates is None:
        return _ragged(call, backend)
    groups, tokens, groups_padded, tokens_padded = _launch_shape(inputs)
    shared = _grouped(inputs, groups_padded, tokens_padded)
    if inputs.candidates is None:
        columns = _columns_now(inputs, call.columns)
        entries = torch.arange(columns, dtype=torch.int32, device=call.device).expand(groups_padded, columns)
    else:
        first = _candidate_entries(inputs, groups_padded).unsqueeze(2)
        within = torch.arange(inputs.candidates.block_size, dtype=torch.int32, device=call.device)
        entries = (first + within).reshape(groups_padded, -1)
    longest = shared.lengths.amax(dim=1, keepdim=True)
    wanted = (entries >= 0) & (entries < longest)
    valid = wanted.unsqueeze(1) & (entries.unsqueeze(1) < shared.lengths.unsqueeze(2))
    scores = _gathered_scores(call, shared, entries, wanted, backend)
    scores = scores[:groups, :tokens].reshape(call.num_rows, -1)
    return _finish(scores, valid[:groups, :tokens].reshape(call.num_rows, -1), call.columns, call.out_dtype)


def _gathered_scores(
    call: IndexLogitsCall, shared: Groups, entries: torch.Tensor, wanted: torch.Tensor, backend: str
) -> torch.Tensor:
    """[groups, tokens, n] fp32 of each group's own entries, decoded within the scratch budget."""
    inputs = call.inputs
    groups, n = entries.shape
    width = -(-n // CHUNK) * CHUNK
    entries, wanted = launch.pad_to(entries, width, 1, 0), launch.pad_to(wanted, width, 1, False)
    budget = max(CHUNK, call.memory_limit // KEY_SCRATCH)
    at_once = groups
    while at_once > 1 and at_once * width > budget:
        at_once //= 2
    keys_at_once = max(CHUNK, min(width, budget) // CHUNK * CHUNK)
    if inputs.cache is not None:
        places = _slots_of_entries(inputs, entries, wanted)
    else:
        assert inputs.starts is not None
        starts = launch.pad_to(inputs.starts, groups, 0, 0).unsqueeze(1)
        places = torch.where(wanted, entries + starts, 0)
    by_group = []
    for g in range(0, groups, at_once):
        part = Groups(*[each[g : g + at_once] for each in shared])
        by_key = []
        for k in range(0, width, keys_at_once):
            keys, factor = _keys_at(inputs, places[g : g + at_once, k : k + keys_at_once])
            keys = torch.where(wanted[g : g + at_once, k : k + keys_at_once].unsqueeze(2), keys, 0.0)
            scores = score_rows(part, keys, backend)
            by_key.append(scores if factor is None else scores * factor.unsqueeze(1))
        by_group.append(_joined(by_key, 2))
    return _joined(by_group, 0)[:, :, :n]


def _keys_at(inputs: IndexInputs, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Decoded keys at `places`: slots of the cache, or positions of the array."""
    if inputs.cache is not None:
        return decode_index_rows(launch.gather_bytes(inputs.cache, places), inputs.format)
    data, sf = inputs.keys, inputs.keys_sf
    assert sf is not None
    codes = as_bytes(as_bytes_view(data)[places])
    if inputs.format is INDEX_FP8_FP32:
        return _with_factor(codes, sf[places])
    packed = sf[places]
    scales = unpack_scales(packed.unsqueeze(-1) if sf.dim() == 1 else packed).int()
    return launch.decode_rows(torch.cat((codes, scales), dim=-1), inputs.format), None


def score_rows(part: Groups, keys: torch.Tensor, backend: str) -> torch.Tensor:
    """[groups, tokens, n] fp32 of decoded keys [groups, n, 128], n a multiple of 128."""
    q, w = _kernel_operands(part)
    groups, tokens = part.lengths.shape
    out: torch.Tensor = launch.call_kernel(
        backend, weighted_scores, q=q, k=keys.reshape(-1, INDEX_DIM).contiguous(), w=w, groups=groups
    )
    return out.reshape(groups, tokens, -1)


def _ragged(call: IndexLogitsCall, backend: str) -> torch.Tensor:
    """Every key of the array against every row, once, then each row's own range.

    Rows of one prompt share nearly all of their keys. A batch of many prompts scores them against each other's keys
    too; call once per prompt where that counts."""
    inputs = call.inputs
    assert inputs.starts is not None
    rows, total = call.num_rows, inputs.keys.shape[0]
    padded = launch.power_of_two(rows)
    shared = _grouped(inputs._replace(rows_per_table=rows), 1, padded)
    width = max(CHUNK, -(-total // CHUNK) * CHUNK)
    if total == 0:
        return _without_rows(call)
    every = torch.arange(width, dtype=torch.int32, device=call.device).clamp(max=total - 1)
    budget = max(CHUNK, call.memory_limit // KEY_SCRATCH) // CHUNK * CHUNK
    by_key = []
    for k in range(0, width, budget):
        keys, factor = _keys_at(inputs, every[k : k + budget].unsqueeze(0))
        keys = torch.where(keys.abs() < torch.inf, keys, 0.0)  # keys between the ranges may hold anything
        by_rows = []
        for t in range(0, padded, MAX_GROUP_TOKENS):
            part = Groups(*[each[:, t : t + MAX_GROUP_TOKENS] for each in shared])
            by_rows.append(score_rows(part, keys, backend)[0])
        scores = _joined(by_rows, 0)
        by_key.append(scores if factor is None else scores * factor)
    dense = _joined(by_key, 1)[:rows]
    column = torch.arange(call.columns, dtype=torch.int32, device=call.device)
    valid = column < shared.lengths.reshape(-1, 1)[:rows]
    place = torch.where(valid, inputs.starts.unsqueeze(1) + column, 0)
    row = torch.arange(rows, dtype=torch.int32, device=call.device).unsqueeze(1)
    return _finish(dense[row, place], valid, call.columns, call.out_dtype)
