# SPDX-License-Identifier: Apache-2.0
"""Tensor parallel: heads are split over ranks, caches are on every rank.

Main heads need no communication until the output projection, whose parts are summed. Index heads are either replicated,
and then every rank selects what one process would, bit for bit; or split, and then their float32 scores are summed
before the selection. A sum over ranks has one result: the collective's. Every rank rounds and selects from those same
bits by a rule that leaves no choice among equals, so every rank gets the same list; `require_same` checks it at run
time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist

from ..attention.weights import Shard
from ..caches import ceil_div
from ..errors import ArgumentError, SlotRangeError
from ..formats import QuantizedQuery
from ..ops.candidate_blocks import candidate_lengths, compact_to_dense
from ..ops.index_logits import Candidates, IndexLogitsCall, PagedKeys, RaggedKeys, index_logits
from ..ops.topk import check_k, topk
from .group import Failure, all_reduce, rank_and_size

__all__ = ["head_slice", "index_topk_of_shards", "output_sum_bytes", "score_sum_bytes", "shard_of", "sum_over"]


def head_slice(num_heads: int, group: dist.ProcessGroup | None = None) -> slice:
    """The heads of this rank. ArgumentError when the ranks do not divide them."""
    rank, size = rank_and_size(group)
    if num_heads < 1 or num_heads % size:
        raise ArgumentError(f"head_slice: num_heads must be a multiple of the {size} ranks, got {num_heads}.")
    part = num_heads // size
    return slice(rank * part, (rank + 1) * part)


def shard_of(
    group: dist.ProcessGroup | None = None, *, index_heads: Literal["replicate", "shard"] = "replicate"
) -> Shard:
    """This rank's `Shard`, for `AttentionWeights`."""
    rank, size = rank_and_size(group)
    return Shard(rank, size, index_heads)


def sum_over(group: dist.ProcessGroup | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
    """The `reduce` of `V41Attention`: the sum over the ranks in float32, rounded once to the tensor's dtype."""

    def reduce(x: torch.Tensor) -> torch.Tensor:
        return all_reduce("sum_over", x.to(torch.float32, copy=True), group).to(x.dtype)

    return reduce


def index_topk_of_shards(
    q: QuantizedQuery | tuple[torch.Tensor, torch.Tensor | None],
    keys: PagedKeys | RaggedKeys,
    weights: torch.Tensor,
    k: int,
    *,
    group: dist.ProcessGroup | None = None,
    candidates: Candidates | None = None,
    logits_dtype: torch.dtype = torch.bfloat16,
    on_nan: str = "raise",
    memory_limit: int | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Select with the index heads split over the ranks: scores are summed in float32, rounded, then selected from.

        topk(round(sum over ranks of index_logits(this rank's heads)), k)

    Args:
        q, weights: this rank's index heads. Everything else must be the same on every rank.
        keys, k, candidates, logits_dtype, on_nan, memory_limit, backend: as in `index_topk`. With ragged keys and no
            candidates, `keys.max_len` is needed.
        group: the ranks that hold the heads.
    Returns:
        int32 [rows, k], the same bytes on every rank.
    Raises:
        What `index_logits` and `topk` raise; CollectiveError. A value that one rank refuses is refused by all.
    Numerics: one float32 sum over the ranks in the collective's order. Scores may differ from one process's in the last
        bit of float32, so a bfloat16 rounding may differ; equal to it for one rank.
    """
    op = "index_topk_of_shards"
    check_k(op, k)
    if candidates is not None and candidates.origin != "row":
        raise ArgumentError(f"{op}: candidates.origin must be 'row', got {candidates.origin!r}.")
    call = IndexLogitsCall.check(
        q, keys, weights, candidates=candidates, out_dtype=torch.float32, memory_limit=memory_limit
    )
    own = call.inputs
    lens = own.ends if own.starts is None else own.ends - own.starts
    lens = lens if own.width is None else lens.clamp(max=own.width)
    step = max(1, call.memory_limit // (12 * max(1, call.columns)))  # scores, the message, and the rounded scores
    step = max(1, step // own.rows_per_table) * own.rows_per_table  # whole batch elements
    lists = [torch.empty((0, k), dtype=torch.int32, device=own.q.device)]
    for start in range(0, own.num_rows, step):
        rows = slice(start, min(start + step, own.num_rows))
        blocks = None if candidates is None else candidates.blocks[rows]
        logits = _summed_scores(op, q, keys, weights, candidates, rows, call, backend, group).to(logits_dtype)
        if candidates is None or blocks is None:
            lists.append(topk(logits, k, lens[rows], on_nan=on_nan, backend=backend))
            continue
        end = candidate_lengths(blocks, lens[rows], candidates.block_size)
        picks = topk(logits, k, end, on_nan=on_nan, backend=backend)
        lists.append(compact_to_dense(picks, blocks, candidates.block_size))
    return torch.cat(lists)


def _summed_scores(
    op: str,
    q: QuantizedQuery | tuple[torch.Tensor, torch.Tensor | None],
    keys: PagedKeys | RaggedKeys,
    weights: torch.Tensor,
    candidates: Candidates | None,
    rows: slice,
    call: IndexLogitsCall,
    backend: str | None,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """float32 scores of some rows, summed over the ranks. The message's last element counts the ranks that refused."""
    failure = Failure()
    if isinstance(keys, PagedKeys):
        part = slice(rows.start // call.inputs.rows_per_table, rows.stop // call.inputs.rows_per_table)
        own_keys: PagedKeys | RaggedKeys = keys._replace(
            block_table=keys.block_table[part], context_lens=keys.context_lens[part]
        )
    else:
        part = rows
        own_keys = keys._replace(starts=keys.starts[part], ends=keys.ends[part])
    own_q = (q[0][part], None if q[1] is None else q[1][part])
    logits = failure.run(
        lambda: index_logits(
            own_q,
            own_keys,
            weights[rows],
            candidates=None if candidates is None else candidates._replace(blocks=candidates.blocks[rows]),
            out_dtype=torch.float32,
            memory_limit=call.memory_limit,
            backend=backend,
        ),
        lambda: weights.new_zeros((rows.stop - rows.start, call.columns), dtype=torch.float32),
    )
    message = torch.empty(logits.numel() + 1, dtype=torch.float32, device=logits.device)
    message[:-1] = logits.reshape(-1)
    message[-1] = float(failure.code != 0)
    summed = all_reduce(op, message, group)
    refused = int(summed[-1])
    if failure.error is not None:
        raise failure.error
    if refused:
        raise SlotRangeError(f"{op}: {refused} of the ranks refused their part of the step; their own errors say why.")
    return summed[:-1].view(logits.shape)


def score_sum_bytes(num_rows: int, columns: int, size: int) -> int:
    """Bytes a rank sends for one `index_topk_of_shards`: a ring all-reduce of the float32 scores and one flag.

    num_rows * columns scores of 4 bytes, 2 (size - 1) / size of them; `columns` counts entries, or candidate columns.
    """
    return ceil_div(2 * (size - 1) * 4 * (num_rows * columns + 1), size)


def output_sum_bytes(num_rows: int, hidden_size: int, size: int) -> int:
    """Bytes a rank sends for the sum of one layer's outputs: a ring all-reduce of float32 [num_rows, hidden_size]."""
    return ceil_div(2 * (size - 1) * 4 * num_rows * hidden_size, size)
