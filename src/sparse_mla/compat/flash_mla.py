# SPDX-License-Identifier: Apache-2.0
"""FlashMLA's interface (1.0.0) over `sparse_decode` and `sparse_prefill`.

Accepts more than the original: any number of heads, any topk, any page size, uint8 / int8 / float8_e4m3fn caches with
    any block
stride. Lengths at or below 0 are an empty row and lengths above topk act as topk. Results do not depend on the batch,
so `enable_batch_invariant` changes nothing. There is no schedule: lengths and indices may change between calls that
share a FlashMLASchedMeta, shapes may not, as upstream demands.
"""

from __future__ import annotations

from typing import Any

import torch

from ..caches import KVScope, PagedCache
from ..errors import ArgumentError, DTypeError, FormatError, SparseMlaError
from ..formats import HEAD_DIM, V41_FP4, V41_FP8
from ..ops.sparse_decode import sparse_decode
from ..ops.sparse_prefill import sparse_prefill
from . import cache_e4m3_max, cache_layout, renamed

__all__ = ["FlashMLASchedMeta", "flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]


class FlashMLASchedMeta:
    """What the first successful call fixes for the calls that share this object: shapes and flags, never lengths."""

    def __init__(self) -> None:
        self.config: dict[str, Any] | None = None

    def require(self, config: dict[str, Any]) -> None:
        """Raise ArgumentError unless `config` is that of the first call."""
        if self.config is None:
            return
        for name, value in config.items():
            if self.config[name] != value:
                raise ArgumentError(
                    f"flash_mla_with_kvcache: tile_scheduler_metadata must be used with {name} = {self.config[name]} "
                    f"as in its first call, got {value}; take a new one from get_mla_metadata()."
                )


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """An empty schedule; the arguments of older versions are accepted and ignored."""
    return FlashMLASchedMeta(), None


_DECODE_NAMES = {
    "sparse_decode:": "flash_mla_with_kvcache:",
    "scopes[0].cache": "k_cache",
    "scopes[0].indices": "indices",
    "scopes[0].topk_length": "topk_length",
    "scopes[1].cache": "extra_k_cache",
    "scopes[1].indices": "extra_indices_in_kvcache",
    "scopes[1].topk_length": "extra_topk_length",
}
_PREFILL_NAMES = {"sparse_prefill:": "flash_mla_sparse_fwd:", "softmax_scale": "sm_scale"}


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = True,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    enable_batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sparse_decode` under FlashMLA's name: (out [b, s_q, h_q, 512], lse [b, h_q, s_q], a transposed view).

    block_table and cache_seqlens are ignored. k_cache [blocks, page, 1, 528], extra_k_cache [.., 528 or 288].
    """
    op = "flash_mla_with_kvcache"
    if head_dim_v != HEAD_DIM:
        raise ArgumentError(f"{op}: head_dim_v must be {HEAD_DIM}, got {head_dim_v}.")
    if not isinstance(tile_scheduler_metadata, FlashMLASchedMeta):
        raise DTypeError(
            f"{op}: tile_scheduler_metadata must be a FlashMLASchedMeta, got {type(tile_scheduler_metadata).__name__}; "
            "take it from get_mla_metadata()."
        )
    if num_splits is not None:
        raise ArgumentError(f"{op}: num_splits must be None, got {type(num_splits).__name__}; older versions used it.")
    if causal:
        raise ArgumentError(f"{op}: causal must be False, got True; the indices say what each query sees.")
    if not is_fp8_kvcache:
        raise ArgumentError(
            f"{op}: is_fp8_kvcache must be True, got False; sparse_mla.sparse_decode takes BF16 caches."
        )
    if indices is None:
        raise ArgumentError(
            f"{op}: indices must be given, got None; dense attention over a block_table is not offered."
        )
    if (extra_k_cache is None) != (extra_indices_in_kvcache is None):
        given = "extra_k_cache" if extra_indices_in_kvcache is None else "extra_indices_in_kvcache"
        raise ArgumentError(f"{op}: extra_k_cache and extra_indices_in_kvcache must come together, got only {given}.")
    if extra_topk_length is not None and extra_k_cache is None:
        raise ArgumentError(f"{op}: extra_topk_length must come with extra_k_cache, got it alone.")
    scopes = [_scope(op, "k_cache", k_cache, indices, topk_length)]
    if extra_k_cache is not None and extra_indices_in_kvcache is not None:
        scopes.append(_scope(op, "extra_k_cache", extra_k_cache, extra_indices_in_kvcache, extra_topk_length))
    fixed = {
        "q": None if not isinstance(q, torch.Tensor) else tuple(q.shape[:3]),
        "page_size": scopes[0].cache.page_size,
        "topk": scopes[0].indices.shape[-1],
        "extra_page_size": scopes[1].cache.page_size if len(scopes) == 2 else None,
        "extra_topk": scopes[1].indices.shape[-1] if len(scopes) == 2 else None,
        "enable_batch_invariant": enable_batch_invariant,
    }
    tile_scheduler_metadata.require(fixed)
    try:
        out, lse = sparse_decode(q, scopes, softmax_scale=softmax_scale, attn_sink=attn_sink)
    except SparseMlaError as error:
        raise renamed(error, _DECODE_NAMES) from None
    tile_scheduler_metadata.config = fixed  # only now: a call that failed fixes nothing
    return out, lse


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`sparse_prefill` under FlashMLA's name: (out [s_q, h_q, 512], max_logits [s_q, h_q], lse [s_q, h_q])."""
    if d_v != HEAD_DIM:
        raise ArgumentError(f"flash_mla_sparse_fwd: d_v must be {HEAD_DIM}, got {d_v}.")
    try:
        result = sparse_prefill(
            q, kv, indices, softmax_scale=sm_scale, attn_sink=attn_sink, topk_length=_clamped(topk_length, indices)
        )
    except SparseMlaError as error:
        raise renamed(error, _PREFILL_NAMES) from None
    return result.out, result.max_logits, result.lse


def _scope(op: str, name: str, cache: torch.Tensor, indices: torch.Tensor, topk_length: torch.Tensor | None) -> KVScope:
    """One scope over a bare cache tensor, in the layout the drop-ins were told."""
    if isinstance(cache, torch.Tensor) and cache.dtype == torch.bfloat16:
        raise DTypeError(
            f"{op}: {name} must be uint8, int8 or float8_e4m3fn bytes, got bfloat16; "
            "sparse_mla.sparse_decode takes BF16 caches."
        )
    try:
        paged = PagedCache.of(cache, layout=cache_layout(), e4m3_max=cache_e4m3_max(), op=op, argument=name)
    except SparseMlaError as error:
        raise renamed(error, {"PagedCache: data": f"{op}: {name}", "PagedCache:": f"{op}: {name}:"}) from None
    accepted = (V41_FP8,) if name == "k_cache" else (V41_FP8, V41_FP4)
    if paged.format not in accepted:
        listed = " or ".join([f"{fmt.record_bytes} bytes ({fmt.name})" for fmt in accepted])
        why = "; FP4 records are only accepted in extra_k_cache" if paged.format is V41_FP4 else ""
        raise FormatError(f"{op}: {name} must hold records of {listed}, got {paged.format.name}{why}.")
    return KVScope(paged, indices, _clamped(topk_length, indices))


def _clamped(topk_length: torch.Tensor | None, indices: torch.Tensor) -> torch.Tensor | None:
    """Lengths as upstream treats them: at or below 0 is an empty row. Wrong dtypes pass, for the operator to refuse."""
    if not isinstance(topk_length, torch.Tensor) or topk_length.dtype != torch.int32:
        return topk_length
    return topk_length.clamp(min=0)
