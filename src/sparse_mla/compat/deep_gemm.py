# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM's indexer interface (2.8.2) over `index_logits`.

Accepts more than the original: any number of heads up to whatever memory holds, any page size and page stride,
contexts of 0, context_lens as [B] when there is one query row per batch element, int32 / int16 / uint8 query scales,
bfloat16 or float32 weights, and strided inputs. Results are bfloat16; float32 where q comes without scales, which is
the older one-scale-per-key kernel.

    rule                 here                                         upstream
    columns past a row   -inf                                         unspecified
    stride(1)            1                                            1
    stride(0)            a multiple of 1024 bytes                     changed between versions; do not rely on it
    FP8 pages            q_sf given: four ue8m0 scales per key;       the same
                         q_sf None: one float32 scale per key
    schedules            accepted, never read: a stale one is no harm  must match the call

Pages are always sectioned (all data of a page, then all scales), in every engine, so the layout option of the main
caches does not concern this module. Row ids of 998244353 mark padding rows; they score nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..errors import ArgumentError, DTypeError, SparseMlaError
from ..formats import INDEX_FP8_FP32
from ..ops.index_logits import Candidates, PagedKeys, RaggedKeys, index_logits, index_pages
from . import renamed

__all__ = [
    "PagedSparseMqaMetadata",
    "SparseMqaMetadata",
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_fp4_paged_sparse_mqa_logits",
    "fp8_fp4_sparse_mqa_logits",
    "get_mqa_logits_metadata",
    "get_paged_mqa_logits_metadata",
    "get_paged_sparse_mqa_logits_metadata",
    "get_sparse_mqa_logits_metadata",
]

PADDING_REQUEST = 998244353  # request id of rows that only pad a batch

Query = torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]


class SparseMqaMetadata(NamedTuple):
    """What `get_sparse_mqa_logits_metadata` was given; the call it is for has no other way to know the ranges and
    blocks."""

    cu_seq_len_k_start: torch.Tensor  # [T] int32
    cu_seq_len_k_end: torch.Tensor  # [T] int32
    candidates: Candidates


class PagedSparseMqaMetadata(NamedTuple):
    """What `get_paged_sparse_mqa_logits_metadata` was given."""

    context_lens: torch.Tensor
    block_table: torch.Tensor
    candidates: Candidates


def get_paged_mqa_logits_metadata(
    context_lens: torch.Tensor, block_kv: int, num_sms: int, indices: torch.Tensor | None = None
) -> torch.Tensor:
    """int32 [num_sms + 1, 2] of zeros: there is no schedule here, and none is read."""
    return torch.zeros((num_sms + 1, 2), dtype=torch.int32, device=context_lens.device)


def get_mqa_logits_metadata(
    cu_seq_len_k_start: torch.Tensor, cu_seq_len_k_end: torch.Tensor, num_kv_tokens: int, num_heads: int
) -> torch.Tensor:
    """int32 [1, 2] of zeros: there is no schedule here, and none is read."""
    return torch.zeros((1, 2), dtype=torch.int32, device=cu_seq_len_k_start.device)


def get_sparse_mqa_logits_metadata(
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    num_kv_tokens: int,
    sparse_kv_block_indices: torch.Tensor,
    qk_dtype: torch.dtype,
    sparse_block_kv: int,
    use_unaligned_ks: bool = False,
) -> SparseMqaMetadata:
    """The ranges and candidate blocks of a ragged sparse call. Without use_unaligned_ks, block b begins at key b *
    sparse_block_kv; with it, a row's list holds floor(start / sparse_block_kv) + i and block i begins at start + i *
    sparse_block_kv."""
    blocks, origin = sparse_kv_block_indices, "keys"
    if use_unaligned_ks:
        first = torch.div(cu_seq_len_k_start, sparse_block_kv, rounding_mode="floor")[:, None]
        blocks, origin = torch.where(blocks >= 0, blocks - first, blocks), "row"
    return SparseMqaMetadata(cu_seq_len_k_start, cu_seq_len_k_end, Candidates(blocks, sparse_block_kv, origin))


def get_paged_sparse_mqa_logits_metadata(
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    indices: torch.Tensor | None,
    page_kv: int,
    sparse_kv_block_indices: torch.Tensor,
    qk_dtype: torch.dtype,
    sparse_block_kv: int,
) -> PagedSparseMqaMetadata:
    """The contexts, pages and candidate blocks of a paged sparse call."""
    candidates = Candidates(sparse_kv_block_indices, sparse_block_kv)
    return PagedSparseMqaMetadata(_live(context_lens, indices), block_table, candidates)


_PAGED_NAMES = {
    "keys.cache": "kv_cache",
    "keys.block_table": "block_table",
    "keys.context_lens": "context_lens",
    "keys.max_context_len": "max_context_len",
    "candidates.blocks": "sparse_kv_block_indices",
    "candidates.block_size": "sparse_block_kv",
}
_RAGGED_NAMES = {
    "keys.data": "kv[0]",
    "keys.sf": "kv[1]",
    "keys.starts": "cu_seq_len_k_start",
    "keys.ends": "cu_seq_len_k_end",
    "keys.max_len": "max_seqlen_k",
    "candidates.blocks": "sparse_kv_block_indices",
    "candidates.block_size": "sparse_block_kv",
}


def fp8_fp4_paged_mqa_logits(
    q: Query,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor | None,
    max_context_len: int,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """`index_logits` over pages: [B * n, max_context_len], -inf past each row's context.

    q is (q_fp [B, n, H, 64 or 128], q_sf) or a bare e4m3 tensor; kv_cache [pages, P, 1, 68 or 132]; weights [B * n, H];
    context_lens [B, n], or [B] when n is 1. schedule_meta is not read.
    """
    op = "fp8_fp4_paged_mqa_logits"
    keys = (_live(context_lens, indices), block_table, max_context_len)
    return _paged(op, q, kv_cache, weights, *keys, None)


def fp8_fp4_paged_sparse_mqa_logits(
    q: Query,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    metadata: PagedSparseMqaMetadata,
    num_max_sparse_blocks: int,
    sparse_block_kv: int,
) -> torch.Tensor:
    """`index_logits` over the candidate blocks of pages: [B * n, num_max_sparse_blocks * sparse_block_kv]; column c
    is key `blocks[c // sparse_block_kv] * sparse_block_kv + c % sparse_block_kv`."""
    op = "fp8_fp4_paged_sparse_mqa_logits"
    if not isinstance(metadata, PagedSparseMqaMetadata):
        raise DTypeError(
            f"{op}: metadata must come from get_paged_sparse_mqa_logits_metadata, got {type(metadata).__name__}."
        )
    _require_same_blocks(op, metadata.candidates, num_max_sparse_blocks, sparse_block_kv)
    return _paged(op, q, kv_cache, weights, metadata.context_lens, metadata.block_table, None, metadata.candidates)


def fp8_fp4_mqa_logits(
    q: Query,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    max_seqlen_k: int,
    schedule_meta: torch.Tensor | None = None,
) -> torch.Tensor:
    """`index_logits` over contiguous keys, compressed: [T, max_seqlen_k], column j of row t is key start + j, -inf
    past the end.

    q is (q_fp [T, H, 64 or 128], q_sf) or a bare e4m3 tensor; kv is (keys [S, 64 or 128], scales [S]). max_seqlen_k
    must be positive: older versions took 0 for an uncompressed result, which this is not. schedule_meta is not read.
    """
    op = "fp8_fp4_mqa_logits"
    if max_seqlen_k <= 0:
        raise ArgumentError(
            f"{op}: max_seqlen_k must be positive, got {max_seqlen_k}; 0 meant an uncompressed result once."
        )
    return _ragged(op, q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, max_seqlen_k, None)


def fp8_fp4_sparse_mqa_logits(
    q: Query,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    metadata: SparseMqaMetadata,
    num_max_sparse_blocks: int,
    sparse_block_kv: int,
    use_unaligned_ks: bool = False,
) -> torch.Tensor:
    """`index_logits` over the candidate blocks of contiguous keys: [T, num_max_sparse_blocks * sparse_block_kv]."""
    op = "fp8_fp4_sparse_mqa_logits"
    if not isinstance(metadata, SparseMqaMetadata):
        raise DTypeError(
            f"{op}: metadata must come from get_sparse_mqa_logits_metadata, got {type(metadata).__name__}."
        )
    if use_unaligned_ks != (metadata.candidates.origin == "row"):
        raise ArgumentError(f"{op}: use_unaligned_ks must be what the metadata was made with, got {use_unaligned_ks}.")
    _require_same_blocks(op, metadata.candidates, num_max_sparse_blocks, sparse_block_kv)
    start, end, candidates = metadata
    return _ragged(op, q, kv, weights, start, end, None, candidates)


def _paged(
    op: str,
    q: Query,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_context_len: int | None,
    candidates: Candidates | None,
) -> torch.Tensor:
    pair = _pair(q)
    try:
        one_scale = len(pair) == 2 and pair[1] is None
        cache = index_pages(op, "kv_cache", kv_cache, INDEX_FP8_FP32) if one_scale else kv_cache
        keys = PagedKeys(cache, block_table, context_lens, max_context_len)
        return index_logits(pair, keys, weights, candidates=candidates, out_dtype=_out_dtype(pair))
    except SparseMlaError as error:
        raise renamed(error, {"index_logits:": f"{op}:", **_PAGED_NAMES}) from None


def _ragged(
    op: str,
    q: Query,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    max_seqlen_k: int | None,
    candidates: Candidates | None,
) -> torch.Tensor:
    pair = _pair(q)
    if not isinstance(kv, (tuple, list)) or len(kv) != 2:
        raise DTypeError(f"{op}: kv must be a pair (keys, scales), got {type(kv).__name__}.")
    try:
        keys = RaggedKeys(kv[0], kv[1], start, end, max_seqlen_k)
        return index_logits(pair, keys, weights, candidates=candidates, out_dtype=_out_dtype(pair))
    except SparseMlaError as error:
        raise renamed(error, {"index_logits:": f"{op}:", **_RAGGED_NAMES}) from None


def _pair(q: Query) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(q_fp, q_sf); a bare tensor is e4m3 without scales, as in older versions."""
    return (q, None) if isinstance(q, torch.Tensor) else q


def _out_dtype(pair: tuple[torch.Tensor, torch.Tensor | None]) -> torch.dtype:
    return torch.float32 if len(pair) == 2 and pair[1] is None else torch.bfloat16


def _live(context_lens: torch.Tensor, indices: torch.Tensor | None) -> torch.Tensor:
    """Context lengths with 0 for padding rows, whose tables may hold anything."""
    if indices is None or not isinstance(context_lens, torch.Tensor):
        return context_lens
    padding = (indices == PADDING_REQUEST).reshape(-1, *[1] * (context_lens.dim() - 1))
    return torch.where(padding, torch.zeros_like(context_lens), context_lens)


def _require_same_blocks(op: str, candidates: Candidates, num_blocks: int, block_size: int) -> None:
    if candidates.blocks.shape[-1] != num_blocks:
        raise ArgumentError(
            f"{op}: num_max_sparse_blocks must be {candidates.blocks.shape[-1]} as in the metadata, got {num_blocks}."
        )
    if candidates.block_size != block_size:
        raise ArgumentError(
            f"{op}: sparse_block_kv must be {candidates.block_size} as in the metadata, got {block_size}."
        )
