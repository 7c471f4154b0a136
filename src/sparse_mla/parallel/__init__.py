# SPDX-License-Identifier: Apache-2.0
"""More than one process: heads of one model split over ranks (tensor parallel), or the pages of a long sequence
(context parallel decode).

Functions over a `torch.distributed` process group, any backend and device; no transport of our own. None means the
default group. A collective carries float32 scores, lists, or partial attention with its lse, never keys or caches; the
`*_bytes` functions count what a rank sends.
"""

from .context import (
    PageSpread,
    candidate_blocks_over_ranks,
    decode_over_ranks,
    entries_to_local_slots,
    index_topk_over_ranks,
    merge_bytes,
    merge_over_ranks,
    selection_bytes,
    topk_over_ranks,
)
from .group import rank_and_size, require_same
from .heads import head_slice, index_topk_of_shards, output_sum_bytes, score_sum_bytes, shard_of, sum_over

__all__ = [
    "PageSpread",
    "candidate_blocks_over_ranks",
    "decode_over_ranks",
    "entries_to_local_slots",
    "head_slice",
    "index_topk_of_shards",
    "index_topk_over_ranks",
    "merge_bytes",
    "merge_over_ranks",
    "output_sum_bytes",
    "rank_and_size",
    "require_same",
    "score_sum_bytes",
    "selection_bytes",
    "shard_of",
    "sum_over",
    "topk_over_ranks",
]
