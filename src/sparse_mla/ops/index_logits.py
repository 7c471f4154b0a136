# SPDX-License-Identifier: Apache-2.0
"""Index scores: weighted-ReLU products of one query row with its keys, over paged or contiguous index keys.

    logits[t, j] = sum_h relu(q[t, h] . k[j]) * w[t, h]

What surprised us: a matrix product's bits depend on its shape, so a key scored inside a longer context, another tile
or a compact candidate list would not score the same. Here it does, by construction: the 32 products that share a
scale have at most 41 significant bits, so float64 sums them exactly in any order, and everything after that is
elementwise in a fixed order. Paged, ragged, dense and candidate forms, `index_topk`, and any thread count therefore
agree bit for bit.

The call record below holds all validation. `IndexInputs` is what `index_topk` shares with it; `score_tiles` is the
scorer of both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ..caches import PagedCache, gather_records
from ..dispatch import EXACT, Limits, Op, opaque
from ..errors import ArgumentError, DTypeError, FormatError, ShapeError, SlotRangeError
from ..formats import (
    FORMATS,
    INDEX_DIM,
    INDEX_FP4,
    INDEX_FP8,
    INDEX_FP8_FP32,
    QuantizedQuery,
    RecordFormat,
    decode_query,
    split_record,
)
from ..memory import with_huge_pages
from .candidate_blocks import BLOCK_SIZES, check_candidates
from .sparse_decode import checks_on, config_memory_limit
from .validation import choice, memory_limit_bytes, same_device, shape_text, tensor

__all__ = [
    "INDEX_LOGITS",
    "LOGITS_ROW_ALIGN_BYTES",
    "Candidates",
    "IndexInputs",
    "IndexLogitsCall",
    "PagedKeys",
    "RaggedKeys",
    "ScoreTile",
    "index_logits",
    "row_groups",
    "score_tiles",
    "tile_keys",
]

OUT_DTYPES = (torch.bfloat16, torch.float32, torch.float64)
WEIGHT_DTYPES = (torch.bfloat16, torch.float32)
SCALE_GROUPS = INDEX_FP8.num_sf  # ue8m0 scales per key, 32 elements each
LOGITS_ROW_ALIGN_BYTES = 1024  # DeepSelect's top-k wants such rows; DeepGEMM's own alignment changed between versions
ORIGINS = ("row", "keys")


class PagedKeys(NamedTuple):
    """Index keys of each batch element in pages. b batch elements, n query rows per batch element."""

    cache: (
        PagedCache | torch.Tensor
    )  # index records; a bare tensor [pages, page_size, 1, 68 or 132] takes its format from q
    block_table: torch.Tensor  # [b, w] int32; entries past the context are never dereferenced
    context_lens: torch.Tensor  # [b, n] int32 (or [b] when n = 1): keys of each query row
    max_context_len: int | None = None  # columns of the logits, keys past it are not scored; None: the table's room


class RaggedKeys(NamedTuple):
    """Index keys in one contiguous array; each query row scores the range [starts, ends). s keys, t query rows."""

    data: torch.Tensor  # [s, 64] int8/uint8 (FP4) or [s, 128] float8_e4m3fn/uint8/int8 (FP8)
    sf: torch.Tensor  # ue8m0: [s] int32, [s, 2] int16 or [s, 4] uint8; or [s] float32 with q_sf None
    starts: torch.Tensor  # [t] int32
    ends: torch.Tensor  # [t] int32
    max_len: int | None = None  # columns of the logits, keys past it are not scored; column j is key starts + j


class Candidates(NamedTuple):
    """Score only these blocks: column c of a row is key `blocks[c // block_size] * block_size + c % block_size`."""

    blocks: torch.Tensor  # [t, blocks] int32, strictly increasing, then -1
    block_size: int = 8
    origin: str = "row"  # block 0 begins at the row's first key; "keys": at key 0 of the array (ragged keys only)


class IndexInputs(NamedTuple):
    """The validated inputs of one scoring, the same for both kinds of keys. t query rows, h index heads."""

    q: torch.Tensor  # [t, h, data bytes]
    q_sf: torch.Tensor | None  # [t, h], [t, h, 2] or [t, h, 4]
    weights: torch.Tensor  # [t, h]
    format: RecordFormat
    cache: PagedCache | None
    keys: torch.Tensor  # bytes of the cache, or ragged data
    keys_sf: torch.Tensor | None
    block_table: torch.Tensor | None
    rows_per_table: int  # consecutive query rows that share a row of the block table
    starts: torch.Tensor | None  # [t] int32, ragged only
    ends: torch.Tensor  # [t] int32: context length, or end of the range
    width: int | None  # columns allowed; None: no bound
    candidates: Candidates | None

    @classmethod
    def check(
        cls,
        op: str,
        q: QuantizedQuery | tuple[torch.Tensor, torch.Tensor | None],
        keys: PagedKeys | RaggedKeys,
        weights: torch.Tensor,
        candidates: Candidates | None,
    ) -> IndexInputs:
        sizes: dict[str, int] = {}
        if not isinstance(q, (tuple, list)) or len(q) != 2:
            raise DTypeError(
                f"{op}: q must be a pair (q_fp, q_sf), got {type(q).__name__}; q_sf may be None for plain e4m3."
            )
        if not isinstance(keys, (PagedKeys, RaggedKeys)):
            raise DTypeError(f"{op}: keys must be PagedKeys or RaggedKeys, got {type(keys).__name__}.")
        q_fp, q_sf = q
        paged = isinstance(keys, PagedKeys)
        lead = "b n" if paged else "t"
        fmt = _check_query(op, q_fp, q_sf, lead, sizes)
        num_rows = sizes["b"] * sizes["n"] if paged else sizes["t"]
        sizes["rows"] = num_rows
        tensor(op, "weights", weights, "rows h", WEIGHT_DTYPES, sizes)
        blocks = None
        if candidates is not None:
            _check_candidates(op, candidates, paged, sizes)
            blocks = candidates.blocks
        q_parts = (("q", q_fp), ("q_sf", q_sf), ("weights", weights), ("candidates.blocks", blocks))
        rows_sf = None if q_sf is None else q_sf.reshape(num_rows, *q_sf.shape[q_fp.dim() - 2 :])
        rows = (q_fp.reshape(num_rows, *q_fp.shape[-2:]), rows_sf, weights, fmt)
        if isinstance(keys, RaggedKeys):
            same_device(op, (*q_parts, *_check_ragged(op, keys, fmt, sizes)))
            return cls(*rows, None, keys.data, keys.sf, None, 1, keys.starts, keys.ends, keys.max_len, candidates)
        cache = _check_cache(op, keys.cache, fmt)
        same_device(op, (*q_parts, ("keys.cache", cache.data), *_check_paged(op, keys, sizes)))
        width = keys.max_context_len
        if width is None and candidates is None:
            width = sizes["w"] * cache.page_size
        lens = keys.context_lens.reshape(num_rows)
        return cls(*rows, cache, cache.data, None, keys.block_table, sizes["n"], None, lens, width, candidates)

    @property
    def num_rows(self) -> int:
        return self.q.shape[0]

    @property
    def num_heads(self) -> int:
        return self.q.shape[1]

    @property
    def layouts(self) -> tuple[str, ...]:
        return ()  # index pages are sectioned whatever the layout of the main caches

    def flat(self) -> tuple[Any, ...]:
        """The arguments of `INPUTS_SCHEMA`."""
        blocks = self.candidates
        return (
            self.q,
            self.q_sf,
            self.weights,
            self.keys,
            self.keys_sf,
            self.block_table,
            self.starts,
            self.ends,
            None if blocks is None else blocks.blocks,
            0 if blocks is None else blocks.block_size,
            blocks is None or blocks.origin == "row",
            [] if self.cache is None else list(self.cache.geometry),
            self.format.name,
            self.rows_per_table,
            self.width,
        )

    @classmethod
    def from_flat(cls, *args: Any) -> IndexInputs:
        """The inverse of `flat`, inside an opaque operator."""
        (
            q,
            q_sf,
            weights,
            keys,
            keys_sf,
            table,
            starts,
            ends,
            blocks,
            size,
            from_row,
            geometry,
            fmt,
            per_table,
            width,
        ) = args
        cache = PagedCache.from_geometry(keys, geometry) if geometry else None
        candidates = None if blocks is None else Candidates(blocks, size, "row" if from_row else "keys")
        return cls(
            q, q_sf, weights, FORMATS[fmt], cache, keys, keys_sf, table, per_table, starts, ends, width, candidates
        )  # fmt: skip


INPUTS_SCHEMA = (
    "Tensor q, Tensor? q_sf, Tensor weights, Tensor keys, Tensor? keys_sf, Tensor? block_table, Tensor? starts, "
    "Tensor ends, Tensor? blocks, int block_size, bool from_row, int[] geometry, str key_format, "
    "SymInt rows_per_table, SymInt? width"
)
NUM_INPUTS = 15


def _code_dtypes(fmt: RecordFormat) -> tuple[torch.dtype, ...]:
    packed = (torch.int8, torch.uint8)
    return packed if fmt is INDEX_FP4 else (torch.float8_e4m3fn, *packed)


def _check_query(
    op: str, q_fp: torch.Tensor, q_sf: torch.Tensor | None, rows: str, sizes: dict[str, int]
) -> RecordFormat:
    """The key format a query is for: FP4 by its 64 bytes, FP8 by 128, the kind of FP8 by whether scales are given."""
    tensor(op, "q_fp", q_fp, f"{rows} h _", (torch.float8_e4m3fn, torch.int8, torch.uint8), sizes)
    width = q_fp.shape[-1]
    if width not in (INDEX_FP4.data_bytes, INDEX_FP8.data_bytes):
        raise ShapeError(
            f"{op}: q_fp must end in {INDEX_FP4.data_bytes} bytes of e2m1 pairs or {INDEX_FP8.data_bytes} of e4m3, "
            f"got {shape_text(q_fp)}."
        )
    if width == INDEX_FP4.data_bytes and q_fp.dtype == torch.float8_e4m3fn:
        raise DTypeError(
            f"{op}: q_fp must be int8 or uint8 when it holds e2m1 pairs, got float8_e4m3fn {shape_text(q_fp)}."
        )
    if sizes["h"] < 1:
        raise ShapeError(f"{op}: q_fp must have at least one head, got {shape_text(q_fp)}.")
    if q_sf is None:
        if width == INDEX_FP4.data_bytes:
            raise ArgumentError(f"{op}: q_sf must be given with e2m1 queries, got None.")
        return INDEX_FP8_FP32
    fmt = INDEX_FP4 if width == INDEX_FP4.data_bytes else INDEX_FP8
    _check_scales(op, "q_sf", q_sf, f"{rows} h", fmt, sizes)
    return fmt


def _check_ragged(
    op: str, keys: RaggedKeys, fmt: RecordFormat, sizes: dict[str, int]
) -> tuple[tuple[str, torch.Tensor], ...]:
    cause = "q and keys differ in format"
    tensor(op, "keys.data", keys.data, f"s {fmt.data_bytes}", _code_dtypes(fmt), sizes, cause)
    _check_scales(op, "keys.sf", keys.sf, "s", fmt, sizes)
    tensor(op, "keys.starts", keys.starts, "t", (torch.int32,), sizes)
    tensor(op, "keys.ends", keys.ends, "t", (torch.int32,), sizes)
    _check_width(op, "keys.max_len", keys.max_len)
    data = (("keys.data", keys.data), ("keys.sf", keys.sf))
    return (*data, ("keys.starts", keys.starts), ("keys.ends", keys.ends))


def _check_paged(op: str, keys: PagedKeys, sizes: dict[str, int]) -> tuple[tuple[str, torch.Tensor], ...]:
    tensor(op, "keys.block_table", keys.block_table, "b w", (torch.int32,), sizes)
    lens = keys.context_lens
    one_each = isinstance(lens, torch.Tensor) and lens.dim() == 1
    if one_each and sizes["n"] != 1:
        raise ShapeError(
            f"{op}: keys.context_lens must be [b, n] with n = {sizes['n']}, got {shape_text(lens)}; one length "
            "per batch element does not say what each of its query rows sees."
        )
    tensor(op, "keys.context_lens", lens, "b" if one_each else "b n", (torch.int32,), sizes)
    _check_width(op, "keys.max_context_len", keys.max_context_len)
    return (("keys.block_table", keys.block_table), ("keys.context_lens", lens))


def _check_candidates(op: str, candidates: Candidates, paged: bool, sizes: dict[str, int]) -> None:
    if not isinstance(candidates, Candidates):
        raise DTypeError(f"{op}: candidates must be Candidates(blocks), got {type(candidates).__name__}.")
    tensor(op, "candidates.blocks", candidates.blocks, "rows blocks", (torch.int32,), sizes)
    choice(op, "candidates.block_size", candidates.block_size, BLOCK_SIZES)
    choice(op, "candidates.origin", candidates.origin, ORIGINS)
    if candidates.origin == "keys" and paged:
        raise ArgumentError(f"{op}: candidates.origin must be 'row' with paged keys, got 'keys'.")


def _check_scales(op: str, name: str, sf: object, lead: str, fmt: RecordFormat, sizes: dict[str, int]) -> None:
    if fmt is INDEX_FP8_FP32:
        cause = "q came without q_sf, so keys carry one float32 scale each"
        if isinstance(sf, torch.Tensor) and sf.dtype != torch.float32:
            raise DTypeError(f"{op}: {name} must be float32, got {str(sf.dtype).removeprefix('torch.')}; {cause}.")
        tensor(op, name, sf, lead, (torch.float32,), sizes, cause)
        return
    words = {torch.int32: "", torch.int16: " 2", torch.uint8: " 4"}
    shape = lead + (words.get(sf.dtype, "") if isinstance(sf, torch.Tensor) else "")
    tensor(op, name, sf, shape, tuple(words), sizes)


def _check_cache(op: str, given: PagedCache | torch.Tensor, fmt: RecordFormat) -> PagedCache:
    """The cache of a query's format; a bare tensor is one, unless its width does not tell."""
    if isinstance(given, PagedCache):
        cache = given
    elif not isinstance(given, torch.Tensor):
        raise DTypeError(f"{op}: keys.cache must be a PagedCache or a tensor, got {type(given).__name__}.")
    elif fmt is INDEX_FP8_FP32:
        raise FormatError(
            f"{op}: keys.cache must be a PagedCache of INDEX_FP8_FP32 when q_sf is None, got a bare tensor; "
            "its width does not tell one float32 scale from four ue8m0 ones."
        )
    else:
        cache = index_pages(op, "keys.cache", given, fmt)
    if cache.format is not fmt:
        raise FormatError(
            f"{op}: keys.cache must hold {fmt.name} records to match q, got {cache.format.name}; FP4 scores with "
            "INDEX_FP4, FP8 with query scales with INDEX_FP8, FP8 without them with INDEX_FP8_FP32."
        )
    return cache


def index_pages(op: str, name: str, pages: torch.Tensor, fmt: RecordFormat) -> PagedCache:
    """A bare tensor [pages, page_size, 1, record_bytes] as a cache of that format."""
    tensor(op, name, pages, "pages page_size 1 _", (torch.uint8, torch.int8, torch.float8_e4m3fn), {})
    width = pages.shape[3]
    if width != fmt.record_bytes:
        other = {f.record_bytes: f"; {f.name} pages need such a query" for f in (INDEX_FP4, INDEX_FP8)}.get(width, "")
        raise FormatError(
            f"{op}: {name} must have records of {fmt.record_bytes} bytes ({fmt.name}), got {width}{other}."
        )
    strides = pages.stride()
    if strides[3] != 1 or (pages.shape[1] > 1 and strides[1] != width):
        raise ShapeError(f"{op}: {name} must have contiguous pages, got strides {shape_text(strides)}.")
    if pages.shape[1] < 1:
        raise ShapeError(f"{op}: {name} must have at least one record per page, got {shape_text(pages)}.")
    return PagedCache(pages, fmt, pages.shape[1])


def _check_width(op: str, name: str, width: object) -> None:
    if width is not None and (isinstance(width, bool) or not isinstance(width, (int, torch.SymInt)) or width < 0):
        raise ArgumentError(f"{op}: {name} must be an integer >= 0, got {width!r}.")


class IndexLogitsCall(NamedTuple):
    """A validated call of `index_logits`, defaults filled."""

    inputs: IndexInputs
    out_dtype: torch.dtype
    memory_limit: int  # bytes of scratch
    checks: bool

    @classmethod
    def check(
        cls,
        q: QuantizedQuery | tuple[torch.Tensor, torch.Tensor | None],
        keys: PagedKeys | RaggedKeys,
        weights: torch.Tensor,
        *,
        candidates: Candidates | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
        memory_limit: int | None = None,
    ) -> IndexLogitsCall:
        op = "index_logits"
        inputs = IndexInputs.check(op, q, keys, weights, candidates)
        if inputs.width is None and candidates is None:
            raise ArgumentError(f"{op}: keys.max_len must be the number of logits columns, got None.")
        choice(op, "out_dtype", out_dtype, OUT_DTYPES)
        return cls(inputs, out_dtype, memory_limit_bytes(op, memory_limit, config_memory_limit()), checks_on())

    @property
    def device(self) -> torch.device:
        return self.inputs.q.device

    @property
    def num_rows(self) -> int:
        return self.inputs.num_rows

    @property
    def num_heads(self) -> int:
        return self.inputs.num_heads

    @property
    def formats(self) -> tuple[str, ...]:
        return (self.inputs.format.name,)

    @property
    def layouts(self) -> tuple[str, ...]:
        return self.inputs.layouts

    @property
    def columns(self) -> int:
        """Columns of the result."""
        return logits_columns(self.inputs.candidates, self.inputs.width)

    def flat(self) -> tuple[Any, ...]:
        """The arguments of every backend's opaque operator, in the order of `SCHEMA`."""
        return (*self.inputs.flat(), self.out_dtype, self.memory_limit, self.checks)


INDEX_LOGITS = Op("index_logits", IndexLogitsCall)

SCHEMA = f"({INPUTS_SCHEMA}, ScalarType out_dtype, int memory_limit, bool checks) -> Tensor"


def index_logits(
    q: QuantizedQuery | tuple[torch.Tensor, torch.Tensor | None],
    keys: PagedKeys | RaggedKeys,
    weights: torch.Tensor,
    *,
    candidates: Candidates | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    memory_limit: int | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Score index keys for each query row (DeepSeek sparse attention, indexer).

        logits[t, j] = sum_h relu(q[t, h] . k[j]) * w[t, h]      -inf where row t has no key j

    Args:
        q: pair (q_fp, q_sf), as `encode_query` gives it. q_fp [b, n, h, 64] int8 or uint8 (e2m1 pairs) or [b, n, h,
            128] float8_e4m3fn (or its bytes); q_sf ue8m0 scales as [b, n, h] int32, [b, n, h, 2] int16 or [b, n, h,
            4] uint8, or None for e4m3 codes that are the values. With ragged keys [t, h, ...] instead of [b, n, h,
            ...]. Any h >= 1.
        keys: `PagedKeys` (pages of any size and stride, one block table row for the n rows of a batch element) or
            `RaggedKeys` (contiguous). What may meet: FP4 q with INDEX_FP4; FP8 q with scales with INDEX_FP8; FP8 q
            without scales with INDEX_FP8_FP32, which a page tensor cannot say by its width and must be named in a
            `PagedCache`.
        weights: [b * n, h] (or [t, h]) bfloat16 or float32. Negative weights are ordinary.
        candidates: score only these blocks; the result is then compact. Its bits are those of the dense form.
        out_dtype: bfloat16, float32, or float64 (reference only: everything after the exact products then stays
            float64).
        memory_limit: bytes of scratch. Default SPARSE_MLA_MEMORY_LIMIT (1 GiB); the reference needs about 20 MB.
        backend: "auto", or a name listed by `sparse-mla info`. Default SPARSE_MLA_BACKEND.
    Returns:
        [rows, columns] in out_dtype with stride(1) == 1 and rows that are a multiple of 1024 bytes apart. columns is
        max_context_len, max_len, or blocks * block_size with candidates; column j of a ragged row is key starts + j.
        A column without a key is -inf, so the result may go to `topk` as it is.
    Raises:
        ShapeError, DTypeError, ArgumentError, FormatError: an argument is wrong; the message names it.
        SlotRangeError: a length that is negative or longer than its table; a table entry inside a context that is no
            page of the cache; a range outside the keys.
        UnsupportedError: no backend accepts the call; lists each backend's reasons.
    Numerics: the product of q and k is rounded to float32 once; relu, weight and the sum over heads (a fixed binary
        tree) are float32, and one rounding to out_dtype ends it. A logit's bits depend on its query row and its key
        alone.
    Source: DeepGEMM 2.8.2 `fp8_fp4_paged_mqa_logits`, `fp8_fp4_mqa_logits` and their sparse forms.
    """
    call = IndexLogitsCall.check(
        q, keys, weights, candidates=candidates, out_dtype=out_dtype, memory_limit=memory_limit
    )
    result: torch.Tensor = INDEX_LOGITS.run(call, backend)
    return result


def logits_columns(candidates: Candidates | None, width: int | None) -> int:
    return candidates.blocks.shape[1] * candidates.block_size if candidates is not None else int(width or 0)


def empty_logits(q: torch.Tensor, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised [rows, columns] whose rows are a multiple of LOGITS_ROW_ALIGN_BYTES apart, also when it has no
    columns."""
    align = LOGITS_ROW_ALIGN_BYTES // dtype.itemsize
    stride = (max(columns, 1) + align - 1) // align * align
    return with_huge_pages(q.new_empty((rows, stride), dtype=dtype))[:, :columns]


# --- reference: the scorer -------------------------------------------------------------------------------------------

MAX_TILE = 4096  # keys decoded at once
MIN_TILE = 64
# Peak bytes per key of gathering and decoding to float64, measured; the test of `index_topk_workspace_size` holds them.
_DECODE_BYTES = {INDEX_FP4.name: 1380, INDEX_FP8.name: 1700, INDEX_FP8_FP32.name: 2220}


class ScoreTile(NamedTuple):
    """Scores of some keys of one row, before rounding to the output dtype."""

    row: int
    columns: slice | torch.Tensor  # where they stand in the row's logits
    entries: slice | torch.Tensor  # which keys of the row they are; the same as columns unless compact
    scores: torch.Tensor  # [m] float32, or float64


def tile_keys(fmt: RecordFormat, num_heads: int, memory_limit: int) -> int:
    """Keys per tile that fit half of the limit: a power of two, so that nearby limits give the same tiles."""
    tile = MIN_TILE
    while tile < MAX_TILE and 2 * tile * key_bytes(fmt, num_heads) <= memory_limit // 2:
        tile *= 2
    return tile


def key_bytes(fmt: RecordFormat, num_heads: int) -> int:
    """Scratch bytes per key of a tile: the larger of its decode and of two float64 products per head beside the key."""
    return max(_DECODE_BYTES[fmt.name], INDEX_DIM * 8 + 16 * num_heads)


def query_bytes(num_heads: int, state_bytes: int) -> int:
    """Scratch bytes of a query row while its keys pass by: its decoded heads and the caller's state."""
    return num_heads * (INDEX_DIM * 8 + 4) + state_bytes


def group_rows(num_heads: int, state_bytes: int, memory_limit: int) -> int:
    """Query rows that share one pass over the keys: they fit a quarter of the limit."""
    return max(1, memory_limit // 4 // query_bytes(num_heads, state_bytes))


def row_groups(inputs: IndexInputs, memory_limit: int, state_bytes: int = 0) -> Iterator[range]:
    """Query rows to be scored in one pass over their keys; rows of a group share a block table row."""
    size = group_rows(inputs.num_heads, state_bytes, memory_limit)
    per_table = inputs.num_rows if inputs.cache is None else inputs.rows_per_table
    for first in range(0, inputs.num_rows, max(per_table, 1)):
        for row in range(first, first + per_table, size):
            yield range(row, min(row + size, first + per_table))


def score_tiles(inputs: IndexInputs, rows: range, math: torch.dtype, memory_limit: int) -> Iterator[ScoreTile]:
    """Every score of the rows of one group, tile by tile; tiles of one row come in ascending order of key."""
    tile = tile_keys(inputs.format, inputs.num_heads, memory_limit)
    ends = dict(zip(rows, inputs.ends[rows.start : rows.stop].tolist(), strict=True))
    starts = dict.fromkeys(rows, 0)
    if inputs.starts is not None:
        starts = dict(zip(rows, inputs.starts[rows.start : rows.stop].tolist(), strict=True))
    if inputs.width is not None:
        ends = {row: min(end, starts[row] + inputs.width) for row, end in ends.items()}
    spans = {row: (starts[row], ends[row]) for row in rows if starts[row] < ends[row]}
    if inputs.candidates is not None:
        return _compact_tiles(inputs, spans, inputs.candidates, tile, math)
    return _dense_tiles(inputs, spans, tile, math)


def _dense_tiles(
    inputs: IndexInputs, spans: dict[int, tuple[int, int]], tile: int, math: torch.dtype
) -> Iterator[ScoreTile]:
    if not spans:
        return
    queries = {row: _Query(inputs, row, math) for row in spans}
    last = max(end for _, end in spans.values())
    for first in range(min(start for start, _ in spans.values()), last, tile):
        stop = min(first + tile, last)
        parts = [(row, start, max(first, start), min(stop, end)) for row, (start, end) in spans.items()]
        parts = [part for part in parts if part[2] < part[3]]
        if not parts:
            continue
        values, scale = _load(inputs, parts[0][0], torch.arange(first, stop, device=inputs.q.device))
        for row, start, a, b in parts:
            here, where = slice(a - first, b - first), slice(a - start, b - start)
            scores = queries[row].score(values[here], None if scale is None else scale[here])
            yield ScoreTile(row, where, where, scores)
        del values, scale  # or two tiles of keys would be alive while the next one is decoded


def _compact_tiles(
    inputs: IndexInputs, spans: dict[int, tuple[int, int]], candidates: Candidates, tile: int, math: torch.dtype
) -> Iterator[ScoreTile]:
    size = candidates.block_size
    per_tile = tile // size
    for row, (start, end) in spans.items():
        query = _Query(inputs, row, math)
        base = start if candidates.origin == "keys" else 0
        for block in range(0, candidates.blocks.shape[1], per_tile):
            ids = candidates.blocks[row, block : block + per_tile].to(torch.int64)
            inside = torch.arange(size, device=ids.device)
            entries = (ids[:, None] * size + inside - base).flatten()
            valid = (ids >= 0)[:, None].expand(-1, size).flatten()
            columns = (valid & (entries >= 0) & (entries < end - start)).nonzero()[:, 0]
            if columns.numel() == 0:
                continue
            entries = entries[columns]
            values, scale = _load(inputs, row, entries + start)
            yield ScoreTile(row, columns + block * size, entries, query.score(values, scale))
            del values, scale


def _load(inputs: IndexInputs, row: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keys at `positions` of a row's sequence: float64 [m, 128], and the float32 scale of each where the format has
    one.

    A float32 scale stays apart, because a product with it would not be exact."""
    fmt = inputs.format
    if inputs.cache is not None and inputs.block_table is not None:
        table = inputs.block_table[row // inputs.rows_per_table]
        page = inputs.cache.page_size
        slots = table[positions // page].to(torch.int64) * page + positions % page
        data, scales = split_record(gather_records(inputs.cache, slots, checked=False), fmt)
        if fmt is INDEX_FP8_FP32:
            scales = scales.contiguous().view(torch.float32)[:, 0]
    else:
        data = inputs.keys.index_select(0, positions)
        scales = inputs.keys_sf.index_select(0, positions) if inputs.keys_sf is not None else data
    if fmt is INDEX_FP8_FP32:
        return decode_query(data, None, dtype=torch.float64), torch.nan_to_num(
            scales, nan=0.0, posinf=None, neginf=None
        )
    return decode_query(data, scales, dtype=torch.float64), None


class _Query:
    """One query row, decoded once."""

    def __init__(self, inputs: IndexInputs, row: int, math: torch.dtype) -> None:
        sf = None if inputs.q_sf is None else inputs.q_sf[row]
        self.values = decode_query(inputs.q[row], sf, dtype=torch.float64)  # [h, 128]
        self.weights = inputs.weights[row].to(math)[:, None]
        self.math = math

    def score(self, keys: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        """[m] scores of keys float64 [m, 128]."""
        width = keys.shape[1] // SCALE_GROUPS
        dots = torch.mm(self.values[:, :width], keys[:, :width].t())
        for first in range(width, keys.shape[1], width):
            dots += torch.mm(self.values[:, first : first + width], keys[:, first : first + width].t())
        if scale is not None:
            dots *= scale
        terms = torch.relu_(dots.to(self.math)).mul_(self.weights)
        heads = terms.shape[0]
        while heads > 1:  # a binary tree over heads: elementwise, so its order is the same for every key
            half = (heads + 1) // 2
            terms[: heads - half] += terms[half:heads]
            heads = half
        return terms[0].clone()  # a view would keep all heads alive


def check_values(op: str, inputs: IndexInputs) -> None:
    """Raise SlotRangeError unless every key that will be read exists. Always run: a read must be legal."""
    if inputs.ends.numel() == 0:
        return
    if inputs.cache is None or inputs.block_table is None:
        _check_ranges(op, inputs)
    else:
        _check_contexts(op, inputs, inputs.cache, inputs.block_table)
    if inputs.candidates is not None:
        check_candidates(op, inputs.candidates.blocks)


def _check_ranges(op: str, inputs: IndexInputs) -> None:
    if inputs.starts is None:
        return
    total = inputs.keys.shape[0]
    starts, ends = inputs.starts, inputs.ends
    bad = (starts < ends) & ((starts < 0) | (ends > total))
    if bool(bad.any()):
        row = int(bad.nonzero()[0, 0])
        raise SlotRangeError(
            f"{op}: keys.starts and keys.ends must be inside the {total} keys, "
            f"got {int(starts[row])} and {int(ends[row])} at row {row}."
        )


def _check_contexts(op: str, inputs: IndexInputs, cache: PagedCache, table: torch.Tensor) -> None:
    room = table.shape[1] * cache.page_size
    bad = (inputs.ends < 0) | (inputs.ends > room)
    if bool(bad.any()):
        row = int(bad.nonzero()[0, 0])
        raise SlotRangeError(
            f"{op}: keys.context_lens must be between 0 and {room}, which {table.shape[1]} table columns of "
            f"{cache.page_size} keys hold, got {int(inputs.ends[row])} at query row {row}."
        )
    scored = inputs.ends if inputs.width is None else inputs.ends.clamp(max=inputs.width)
    longest = scored.reshape(-1, inputs.rows_per_table).amax(dim=1).tolist()
    for element, length in enumerate(longest):
        used = table[element, : -(-length // cache.page_size)]
        bad = (used < 0) | (used >= cache.num_blocks)
        if bool(bad.any()):
            column = int(bad.nonzero()[0, 0])
            raise SlotRangeError(
                f"{op}: keys.block_table must hold pages below {cache.num_blocks} inside the context, got "
                f"{int(used[column])} at [{element}, {column}]; a stale table, or a context longer than what is stored."
            )


# --- reference: the operator -----------------------------------------------------------------------------------------


def _reference(*args: Any) -> torch.Tensor:
    inputs = IndexInputs.from_flat(*args[:NUM_INPUTS])
    out_dtype, memory_limit, _checks = args[NUM_INPUTS:]
    check_values("index_logits", inputs)
    columns = logits_columns(inputs.candidates, inputs.width)
    out = empty_logits(inputs.q, inputs.num_rows, columns, out_dtype)
    out.fill_(float("-inf"))
    math = torch.float64 if out_dtype == torch.float64 else torch.float32
    with torch.autocast(inputs.q.device.type, enabled=False):
        for rows in row_groups(inputs, memory_limit):
            for tile in score_tiles(inputs, rows, math, memory_limit):
                out[tile.row, tile.columns] = tile.scores.to(out_dtype)
    return out


def _fake(q: torch.Tensor, *args: Any) -> torch.Tensor:
    blocks, size, width, out_dtype = args[7], args[8], args[13], args[14]
    columns = width if blocks is None else blocks.shape[1] * size
    return empty_logits(q, q.shape[0], columns, out_dtype)


_operator = opaque("index_logits", "reference", SCHEMA, _reference, _fake)


@INDEX_LOGITS.impl("reference", limits=Limits(out_dtypes=OUT_DTYPES), tolerance=EXACT)
def _run_reference(call: IndexLogitsCall) -> torch.Tensor:
    result: torch.Tensor = _operator(*call.flat())
    return result
