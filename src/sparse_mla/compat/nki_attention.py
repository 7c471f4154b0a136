# SPDX-License-Identifier: Apache-2.0
"""The functions an engine's `neuron_ops` package expects of its NKI attention, over this library's operators.

They run on the Neuron backends: `neuron`, or `simulated` where SPARSE_MLA_BACKEND says so. Three engine switches are
read at each call: DEEPINFER_NEURON_NKI_ATTN turns the `supported_*` predicates off (the functions themselves still
work), DEEPINFER_NEURON_PREFILL_BUCKET and DEEPINFER_NEURON_ATTN_TABLE_SLOTS permit the decoded table.

A step whose row count equals the bucket is not taken for a chunk of one prompt: a decode batch may have that many rows
by chance, and sharing row 0's block table, or one row's list, would answer it wrongly. At that count only the decoded
table is added, which reads each row's own slots. `one_sequence=True` says what a row count cannot, and in checked mode
outside of a graph it is held to it.

A predicate answers for the call it precedes: it asks the same limits and rules, not a list of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import config
from ..caches import KVScope, PagedCache
from ..dispatch import default_backend, device_refusals, presence
from ..errors import ArgumentError, ShapeError, SparseMlaError, UnsupportedError
from ..formats import HEAD_DIM, INDEX_FP4, INDEX_FP8, V41_FP4, V41_FP8
from ..kernels import launch
from ..kernels.launch import gather_rows
from ..ops.index_logits import INDEX_LOGITS, IndexLogitsCall, PagedKeys
from ..ops.softmax_pool import softmax_pool as pool
from ..ops.sparse_decode import SPARSE_DECODE, SparseDecodeCall, checks_on
from . import cache_e4m3_max, cache_layout, renamed

__all__ = [
    "decode_v41_fp4",
    "decode_v41_fp8",
    "flash_mla_decode",
    "gather_paged_kv",
    "gather_rows",
    "paged_mqa_logits",
    "softmax_pool",
    "sparse_decode",
    "supported_decode",
    "supported_paged_mqa_logits",
    "supported_pool",
]

NEURON_BACKENDS = ("neuron", "simulated")
MAX_HEADS = 128
TABLE = "decoded_table"
Scope = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


# --- switches --------------------------------------------------------------------------------------------------------


@config.constant_in_graphs
def enabled() -> bool:
    """DEEPINFER_NEURON_NKI_ATTN, as it is now."""
    return bool(config.get("DEEPINFER_NEURON_NKI_ATTN"))


@config.constant_in_graphs
def prefill_bucket() -> int:
    """DEEPINFER_NEURON_PREFILL_BUCKET, as it is now; 0 is never a row count."""
    return int(config.get("DEEPINFER_NEURON_PREFILL_BUCKET"))


def _backend() -> str:
    chosen = default_backend()
    return chosen if chosen in NEURON_BACKENDS else "neuron"


def _usable(device: torch.device) -> bool:
    backend = _backend()
    return enabled() and presence(backend) == "" and not device_refusals(backend, device)


# --- records ---------------------------------------------------------------------------------------------------------


def gather_paged_kv(k_cache: torch.Tensor, flat_indices: torch.Tensor) -> torch.Tensor:
    """Records [*flat_indices.shape, record] uint8 of slots of a cache [blocks, page, 1, record].

    Slots must lie inside the cache, and there is no empty one: replace -1 before the call."""
    page, record = k_cache.shape[1], k_cache.shape[-1]
    slots = flat_indices.to(torch.int32)
    block = torch.div(slots, page, rounding_mode="floor")
    return gather_rows(k_cache, block, slots - block * page, record, record)


def decode_v41_fp8(records: torch.Tensor) -> torch.Tensor:
    """bf16 [.., 512] of 528-byte records; scale byte 255 is the exponent 128, unlike everywhere else in this library
    (where it is NaN and its group 0)."""
    return launch.decode_rows(records, V41_FP8, keep_scale_255=True)


def decode_v41_fp4(records: torch.Tensor) -> torch.Tensor:
    """bf16 [.., 512] of 288-byte records."""
    return launch.decode_rows(records, V41_FP4)


# --- attention -------------------------------------------------------------------------------------------------------


def supported_decode(
    q: torch.Tensor, caches: Sequence[torch.Tensor | None], rms_norm_scale_factor: torch.Tensor | None, d_v: int
) -> bool:
    """Whether `sparse_decode` and `flash_mla_decode` take these tensors. Entries of `caches` that are None are
    ignored."""
    given = [cache for cache in caches if cache is not None]
    if not _usable(q.device) or rms_norm_scale_factor is not None or d_v != HEAD_DIM or not given:
        return False
    if q.dtype != torch.bfloat16 or q.shape[-1] != HEAD_DIM or not 1 <= q.shape[-2] <= MAX_HEADS:
        return False
    return all(_is_main_cache(cache) and cache.device == q.device for cache in given)


def _is_main_cache(cache: torch.Tensor) -> bool:
    if cache.dtype != torch.uint8 or cache.dim() != 4:
        return False
    try:
        return launch.gather_refusal(_main_cache(cache, "k_cache"), "k_cache") == ""
    except SparseMlaError:
        return False


def _main_cache(cache: torch.Tensor, name: str) -> PagedCache:
    return PagedCache.of(cache, layout=cache_layout(), e4m3_max=cache_e4m3_max(), op="sparse_decode", argument=name)


def _attend(call: SparseDecodeCall) -> torch.Tensor:
    """The output of the first strategy that takes the call; the decoded table only where the engine permits it."""
    backend = _backend()
    table_allowed = call.one_sequence or call.num_rows == prefill_bucket()
    for candidate in SPARSE_DECODE.candidates(backend):
        if candidate.strategy == TABLE and not table_allowed:
            continue
        if not candidate.refusals(call):
            out: torch.Tensor = candidate.run(call)[0]
            return out
    SPARSE_DECODE.select(call, backend)  # raises with everybody's reasons, or the table alone accepts
    raise UnsupportedError(
        f"sparse_decode: no strategy but {TABLE} accepts this call, and {call.num_rows} rows are not "
        "DEEPINFER_NEURON_PREFILL_BUCKET."
    )


def sparse_decode(
    q: torch.Tensor, scopes: Sequence[Scope], softmax_scale: float, attn_sink: torch.Tensor | None
) -> torch.Tensor:
    """Attention of q [rows, h, 512] over one or two (k_cache, idx int32 [rows, topk], invalid bool [rows, topk]).

    Returns out [rows, h, 512] bf16; 0 for a row without a valid slot."""
    kept = []
    for number, (k_cache, idx, invalid) in enumerate(scopes):
        indices = torch.where(invalid, -1, idx).to(torch.int32).unsqueeze(1)
        kept.append(KVScope(_main_cache(k_cache, f"scopes[{number}].cache"), indices))
    return _attend(SparseDecodeCall.check(q.unsqueeze(1), kept, softmax_scale=softmax_scale, attn_sink=attn_sink))[:, 0]


_DECODE_NAMES = {
    "sparse_decode:": "flash_mla_decode:",
    "scopes[0].cache": "k_cache",
    "scopes[0].indices": "indices",
    "scopes[0].topk_length": "topk_length",
    "scopes[1].cache": "extra_k_cache",
    "scopes[1].indices": "extra_indices",
    "scopes[1].topk_length": "extra_topk_length",
}


def flash_mla_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    topk_length: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    extra_k_cache: torch.Tensor | None,
    extra_indices: torch.Tensor | None,
    extra_topk_length: torch.Tensor | None,
    softmax_scale: float | None,
    *,
    one_sequence: bool | None = None,
) -> torch.Tensor:
    """Attention of q [b, s_q, h, 512] over slots indices [b, s_q, topk] of k_cache, and of extra_k_cache if given.

    one_sequence: True says that the rows are consecutive tokens of one sequence, so that wide lists are prefixes of
    one another; None and False are the same. Returns out [b, s_q, h, 512] bf16.
    """
    try:
        scopes = [KVScope(_main_cache(k_cache, "scopes[0].cache"), indices, topk_length)]
        if (extra_k_cache is None) != (extra_indices is None):
            raise ArgumentError(
                "flash_mla_decode: extra_k_cache and extra_indices must be given together, got only one of them."
            )
        if extra_k_cache is not None and extra_indices is not None:
            scopes.append(KVScope(_main_cache(extra_k_cache, "scopes[1].cache"), extra_indices, extra_topk_length))
        call = SparseDecodeCall.check(
            q, scopes, softmax_scale=softmax_scale, attn_sink=attn_sink, one_sequence=bool(one_sequence)
        )
        return _attend(call)
    except SparseMlaError as error:
        raise renamed(error, _DECODE_NAMES) from None


# --- index scores ----------------------------------------------------------------------------------------------------


def supported_paged_mqa_logits(q_data: torch.Tensor, kv_cache: torch.Tensor) -> bool:
    """Whether `paged_mqa_logits` takes these tensors: q_data [T, 1, H, 64 or 128], kv_cache [pages, P, 1, 68 or
    132]."""
    if not _usable(q_data.device) or q_data.dim() != 4 or kv_cache.dim() != 4 or kv_cache.dtype != torch.uint8:
        return False
    if kv_cache.device != q_data.device or not 1 <= q_data.shape[2] <= MAX_HEADS or kv_cache.shape[1] < 1:
        return False
    formats = {INDEX_FP4.data_bytes: INDEX_FP4, INDEX_FP8.data_bytes: INDEX_FP8}
    fmt = formats.get(q_data.shape[3])
    packed = (torch.int8, torch.uint8)
    if fmt is None or q_data.dtype not in (packed if fmt is INDEX_FP4 else (torch.float8_e4m3fn, *packed)):
        return False
    if kv_cache.shape[3] != fmt.record_bytes:
        return False
    try:
        return launch.gather_refusal(PagedCache(kv_cache, fmt, kv_cache.shape[1]), "kv_cache") == ""
    except SparseMlaError:
        return False


_LOGITS_NAMES = {
    "index_logits:": "paged_mqa_logits:",
    "keys.cache": "kv_cache",
    "keys.block_table": "block_table",
    "keys.context_lens": "context_lens",
    "keys.max_context_len": "max_context_len",
    "q_fp": "q_data",
}


def paged_mqa_logits(
    q_data: torch.Tensor,
    q_sf: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_context_len: int,
    *,
    one_sequence: bool | None = None,
) -> torch.Tensor:
    """Index scores of T rows, each over the pages of its own row of the block table.

    Args:
        q_data: [T, 1, H, 64] int8/uint8 e2m1 pairs, or [T, 1, H, 128] e4m3 (inside a graph: its uint8 view).
        q_sf: ue8m0 scales, [T, 1, H] int32, [T, 1, H, 2] int16 or [T, 1, H, 4] uint8.
        kv_cache: [pages, P, 1, 68 or 132] uint8 index pages, any stride between pages.
        weights: [T, H]. context_lens: [T, 1] int32. block_table: [T, W] int32; entries past a context may be stale.
        max_context_len: columns of the result.
        one_sequence: True says that all rows are of one sequence; row 0's table then serves all and its keys are
            decoded once. None and False are the same, whatever T is.
    Returns: bf16 [T, max_context_len], -inf past a row's context; rows a multiple of 512 bytes apart.
    """
    if q_data.dim() != 4 or q_data.shape[1] != 1:
        raise ShapeError(f"paged_mqa_logits: q_data must be [T, 1, H, 64 or 128], got {list(q_data.shape)}.")
    if one_sequence and q_data.shape[0] > 0:
        if launch.checks_now(checks_on()):
            _require_one_table(block_table, context_lens, kv_cache.shape[1])
        q_data, q_sf = q_data.transpose(0, 1), q_sf.transpose(0, 1)
        block_table, context_lens = block_table[:1], context_lens.transpose(0, 1)
    try:
        keys = PagedKeys(kv_cache, block_table, context_lens, max_context_len)
        call = IndexLogitsCall.check((q_data, q_sf), keys, weights)
        out: torch.Tensor = INDEX_LOGITS.run(call, _backend())
        return out
    except SparseMlaError as error:
        raise renamed(error, _LOGITS_NAMES) from None


def _require_one_table(block_table: torch.Tensor, context_lens: torch.Tensor, page: int) -> None:
    """Raise unless the pages inside every row's context are those of row 0's table."""
    pages = torch.div(context_lens.reshape(-1, 1) + page - 1, page, rounding_mode="floor")
    used = torch.arange(block_table.shape[1], device=block_table.device) < pages
    bad = used & (block_table != block_table[:1])
    if bool(bad.any()):
        row, column = bad.nonzero()[0].tolist()
        raise ArgumentError(
            "paged_mqa_logits: block_table must have the same pages in all rows when one_sequence=True, got "
            f"{int(block_table[row, column])} at [{row}, {column}] and {int(block_table[0, column])} in row 0; "
            "these rows are not one sequence's."
        )


# --- pooling ---------------------------------------------------------------------------------------------------------


def supported_pool(score_rows: torch.Tensor) -> bool:
    """Whether `softmax_pool` takes these score rows: [N, R >= 2, D] float32."""
    return (
        _usable(score_rows.device)
        and score_rows.dim() == 3
        and score_rows.dtype == torch.float32
        and score_rows.shape[1] >= 2
        and score_rows.shape[2] >= 1
    )


def softmax_pool(score_rows: torch.Tensor, latent_rows: torch.Tensor) -> torch.Tensor:
    """bf16 [N, D] of score and latent rows [N, R, D] float32, R >= 2."""
    if score_rows.dim() == 3 and score_rows.shape[1] < 2:
        raise UnsupportedError(
            f"softmax_pool: score_rows must have at least 2 rows per group, got {score_rows.shape[1]}; "
            "one row needs no pooling."
        )
    return pool(score_rows, latent_rows, backend=_backend())
