# SPDX-License-Identifier: Apache-2.0
"""Context parallel decode: the pages of each sequence are spread over ranks, queries are on all of them.

    1. each rank scores its own entries and selects the best k of them           local
    2. the ranks exchange those k values and entries, and each selects from all  one all-gather
    3. each rank attends to the selected entries it holds, in float32, no sink   local
    4. the parts and their lse are exchanged and merged; the sink counts once    one all-gather, or one all-to-all

The list is the single-process one, bit for bit. A score's bits do not depend on the pages around it; the order (higher
value, then lower entry) is total; so the best k of all entries are among the best k of their ranks. Local entries keep
the order of the sequence, so a tie inside a rank is broken the same way as between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..caches import KVScope, ceil_div
from ..errors import ArgumentError, ShapeError
from ..formats import QuantizedQuery
from ..ops.candidate_blocks import BLOCK_SIZES, DEFAULT_TOPK_BLOCKS, LARGEST_SCORE
from ..ops.index_logits import IndexLogitsCall, PagedKeys, index_logits
from ..ops.merge_partials import merge_partials
from ..ops.sparse_decode import AttnOutput, sparse_decode
from ..ops.topk import LOGIT_DTYPES, check_k, selected_values, topk
from ..ops.validation import choice, same_device, tensor
from .group import Failure, all_gather, all_to_all, rank_and_size

__all__ = [
    "PageSpread",
    "candidate_blocks_over_ranks",
    "decode_over_ranks",
    "entries_to_local_slots",
    "index_topk_over_ranks",
    "merge_bytes",
    "merge_over_ranks",
    "selection_bytes",
    "topk_over_ranks",
]


@dataclass(frozen=True)
class PageSpread:
    """Which pages of a sequence this rank holds: page p of the sequence is on rank (p // run) % size.

    A rank's block table lists its own pages in the order of the sequence. Entry e of the sequence lies in its page
    e // page_size; the entries of a rank, counted in the order of its table, are its local entries.

    Args:
        rank, size: of the group.
        page_size: entries per page.
        run: consecutive pages that stay together.
    """

    rank: int
    size: int
    page_size: int
    run: int = 1

    def __post_init__(self) -> None:
        for name, value, low in (("size", self.size, 1), ("page_size", self.page_size, 1), ("run", self.run, 1)):
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ArgumentError(f"PageSpread: {name} must be an integer of at least {low}, got {value!r}.")
        if not 0 <= self.rank < self.size:
            raise ArgumentError(f"PageSpread: rank must be 0 to size - 1 = {self.size - 1}, got {self.rank}.")

    @classmethod
    def over(cls, page_size: int, group: dist.ProcessGroup | None = None, *, run: int = 1) -> PageSpread:
        """The spread over a group, seen from this rank."""
        rank, size = rank_and_size(group)
        return cls(rank, size, page_size, run)

    @property
    def stripe(self) -> int:
        """Entries that stay together on a rank."""
        return self.page_size * self.run

    def scaled(self, divisor: int) -> PageSpread:
        """The same spread counted in blocks of `divisor` entries."""
        if self.page_size % divisor:
            raise ArgumentError(f"PageSpread: page_size {self.page_size} must be a multiple of blocks of {divisor}.")
        return PageSpread(self.rank, self.size, self.page_size // divisor, self.run)

    def local_pages(self, num_pages: int) -> list[int]:
        """The numbers of this rank's pages among the first `num_pages` of a sequence, ascending."""
        return [page for page in range(num_pages) if page // self.run % self.size == self.rank]

    def local_lens(self, lens: torch.Tensor) -> torch.Tensor:
        """Entries that this rank holds of the first `lens` of a sequence, elementwise."""
        cycle = self.stripe * self.size
        rest = lens % cycle - self.rank * self.stripe
        return lens // cycle * self.stripe + rest.clamp(0, self.stripe)

    def to_global(self, entries: torch.Tensor) -> torch.Tensor:
        """Local entries to entries of the sequence; -1 stays."""
        turn, within = entries // self.stripe, entries % self.stripe
        return torch.where(entries < 0, -1, (turn * self.size + self.rank) * self.stripe + within).to(entries.dtype)

    def to_local(self, entries: torch.Tensor) -> torch.Tensor:
        """Entries of the sequence to local ones; -1 for those of other ranks, and for -1."""
        turn, within = entries // self.stripe, entries % self.stripe
        here = (entries >= 0) & (turn % self.size == self.rank)
        return torch.where(here, turn // self.size * self.stripe + within, -1).to(entries.dtype)


def topk_over_ranks(
    logits: torch.Tensor,
    k: int,
    lens: torch.Tensor,
    spread: PageSpread,
    *,
    group: dist.ProcessGroup | None = None,
    on_nan: str = "raise",
    on_neg_inf: str = "skip",
    backend: str | None = None,
) -> torch.Tensor:
    """Select the k best entries of each row from scores that are spread over the ranks.

    Args:
        logits: [rows, n] this rank's scores; column c is local entry c. n may differ between ranks.
        k: picks per row.
        lens: [rows] int32 entries of the whole sequence that the row sees, the same on every rank.
        spread: who holds what.
        group, on_nan, on_neg_inf, backend: the ranks; as in `topk`.
    Returns:
        int32 [rows, k] entries of the sequence, ascending, -1 filled: what `topk` selects from the whole scores, on
        every rank the same bytes.
    Raises:
        What `topk` raises; CollectiveError. A NaN on one rank is refused by all.
    """
    op = "topk_over_ranks"
    sizes: dict[str, int] = {}
    tensor(op, "logits", logits, "rows n", LOGIT_DTYPES, sizes)
    check_k(op, k)
    tensor(op, "lens", lens, "rows", (torch.int32,), sizes)
    same_device(op, (("logits", logits), ("lens", lens)))
    _check_spread(op, spread, group)
    failure = Failure()
    local = failure.run(
        lambda: topk(logits, k, spread.local_lens(lens), on_nan=on_nan, on_neg_inf=on_neg_inf, backend=backend),
        lambda: torch.full((logits.shape[0], k), -1, dtype=torch.int32, device=logits.device),
    )
    return _exchange(op, selected_values(logits, local), spread.to_global(local), k, failure, group, backend)


def _exchange(
    op: str,
    values: torch.Tensor,
    entries: torch.Tensor,
    k: int,
    failure: Failure,
    group: dist.ProcessGroup | None,
    backend: str | None,
) -> torch.Tensor:
    """The best k of all ranks' [rows, k] values. The message is entries, a code, values: one all-gather."""
    rows = values.shape[0]
    code = torch.tensor([failure.code], dtype=torch.int32, device=values.device)
    parts = [entries.reshape(-1).to(torch.int32), code, values.reshape(-1)]
    message = torch.cat([part.contiguous().view(torch.uint8) for part in parts])
    gathered = all_gather(op, message, group)  # [size, bytes]
    border = 4 * rows * k
    codes = gathered[:, border : border + 4].contiguous().view(torch.int32)[:, 0]
    failure.settle(op, codes.tolist())
    every_entry = gathered[:, :border].contiguous().view(torch.int32).view(-1, rows, k).transpose(0, 1).flatten(1)
    every_value = gathered[:, border + 4 :].contiguous().view(values.dtype).view(-1, rows, k).transpose(0, 1).flatten(1)
    # Columns in the order of the sequence, places without an entry last: the lower column is then the lower entry.
    place = torch.where(every_entry < 0, torch.iinfo(torch.int32).max, every_entry)
    ordered, order = place.sort(dim=1)
    end = (every_entry >= 0).sum(dim=1).to(torch.int32)
    # A value of -inf is here only if its rank was asked to keep it.
    picks = topk(every_value.gather(1, order), k, end, on_nan="last", on_neg_inf="last", backend=backend)
    chosen = ordered.gather(1, picks.clamp(min=0).to(torch.int64))
    return torch.where(picks >= 0, chosen, -1).to(torch.int32)


def index_topk_over_ranks(
    q: QuantizedQuery | tuple[torch.Tensor, torch.Tensor | None],
    keys: PagedKeys,
    weights: torch.Tensor,
    k: int,
    spread: PageSpread,
    *,
    group: dist.ProcessGroup | None = None,
    logits_dtype: torch.dtype = torch.bfloat16,
    on_nan: str = "raise",
    memory_limit: int | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Score this rank's index keys and select the k best entries of each row over all ranks.

    Args:
        q, weights: all index heads, the same on every rank; as in `index_topk`.
        keys: this rank's cache and its own block table [b, w] (w may differ between ranks, and be 0), but the
            context_lens of the whole sequence, the same on every rank. max_context_len is not looked at.
        k, logits_dtype, on_nan, memory_limit, backend: as in `index_topk`.
        spread, group: who holds what.
    Returns:
        int32 [rows, k] entries of the sequence, ascending, -1 filled: the bytes of the single-process `index_topk`.
    Raises:
        What `index_logits` and `topk` raise; CollectiveError. A value that one rank refuses is refused by all.
    """
    op = "index_topk_over_ranks"
    _check_spread(op, spread, group)
    check_k(op, k)
    if not isinstance(keys, PagedKeys) or not isinstance(keys.context_lens, torch.Tensor):
        raise ArgumentError(f"{op}: keys must be PagedKeys with context_lens, got {type(keys).__name__}.")
    own = keys._replace(context_lens=spread.local_lens(keys.context_lens), max_context_len=None)
    call = IndexLogitsCall.check(q, own, weights, out_dtype=logits_dtype, memory_limit=memory_limit)
    rows, per_table = call.num_rows, call.inputs.rows_per_table
    # Batch elements whose scores fit the limit; the picks of all of them go in one exchange.
    step = max(1, call.memory_limit // (max(1, call.columns) * logits_dtype.itemsize * max(1, per_table)))
    values = torch.full((rows, k), float("-inf"), dtype=logits_dtype, device=call.device)
    entries = torch.full((rows, k), -1, dtype=torch.int32, device=call.device)
    failure = Failure()

    def score(part: slice) -> None:
        some = slice(part.start * per_table, part.stop * per_table)
        logits = index_logits(
            (q[0][part], None if q[1] is None else q[1][part]),
            own._replace(block_table=own.block_table[part], context_lens=own.context_lens[part]),
            weights[some],
            out_dtype=logits_dtype,
            memory_limit=memory_limit,
            backend=backend,
        )
        picks = topk(logits, k, call.inputs.ends[some], on_nan=on_nan, backend=backend)
        values[some], entries[some] = selected_values(logits, picks), picks

    batches = own.block_table.shape[0]
    for start in range(0, batches, step):
        failure.run(lambda s=start: score(slice(s, min(s + step, batches))), lambda: None)  # type: ignore[misc]
    return _exchange(op, values, spread.to_global(entries), k, failure, group, backend)


def candidate_blocks_over_ranks(
    logits: torch.Tensor,
    lens: torch.Tensor,
    spread: PageSpread,
    *,
    block_size: int = 8,
    topk_blocks: int = DEFAULT_TOPK_BLOCKS,
    group: dist.ProcessGroup | None = None,
    on_nan: str = "raise",
    backend: str | None = None,
) -> torch.Tensor:
    """`candidate_blocks` of scores that are spread over the ranks: the same list on every rank.

    Args:
        logits: [rows, n] this rank's scores, column c being local entry c.
        lens: [rows] int32 entries of the whole sequence.
        spread: who holds what; its page_size must be a multiple of block_size.
        block_size, topk_blocks, on_nan, backend: as in `candidate_blocks`.
    Returns:
        int32 [rows, topk_blocks], ascending block ids of the sequence, -1 filled. `spread.scaled(block_size).to_local`
        gives a rank's own blocks for its `Candidates`.
    """
    op = "candidate_blocks_over_ranks"
    sizes: dict[str, int] = {}
    tensor(op, "logits", logits, "rows n", LOGIT_DTYPES, sizes)
    tensor(op, "lens", lens, "rows", (torch.int32,), sizes)
    choice(op, "block_size", block_size, BLOCK_SIZES)
    check_k(op, topk_blocks, "topk_blocks")
    _check_spread(op, spread, group)
    blocks = spread.scaled(block_size)
    rows, n = logits.shape
    width = ceil_div(n, block_size)
    column = torch.arange(width * block_size, device=logits.device)
    inside = column < spread.local_lens(lens)[:, None]
    padded = torch.nn.functional.pad(logits, (0, width * block_size - n), value=float("-inf"))
    padded = torch.where(inside, padded, float("-inf")).view(rows, width, block_size)
    if on_nan == "last":
        padded = torch.where(padded.isnan(), float("-inf"), padded)
    scores = padded.amax(dim=2).clamp(max=LARGEST_SCORE)  # amax keeps a NaN, for topk to name
    num_blocks = (lens + block_size - 1) // block_size
    last = blocks.to_local(torch.where(num_blocks > 0, num_blocks - 1, -1))
    here = (torch.arange(width, device=logits.device) == last[:, None]) & (last >= 0)[:, None]
    scores = torch.where(here & ~scores.isnan(), float("inf"), scores)
    return topk_over_ranks(
        scores,
        topk_blocks,
        num_blocks.to(torch.int32),
        blocks,
        group=group,
        on_nan=on_nan,
        on_neg_inf="last",
        backend=backend,
    )


def entries_to_local_slots(
    entries: torch.Tensor, block_table: torch.Tensor, spread: PageSpread, *, rows_per_table: int = 1
) -> torch.Tensor:
    """Slots of this rank's cache for the selected entries it holds, -1 for the others.

    Args:
        entries: int32 [rows, k] entries of the sequence, as the selections here return them.
        block_table: int32 [b, w] this rank's pages of each batch element.
        spread: who holds what.
        rows_per_table: consecutive rows that share a row of the table.
    Raises:
        ShapeError: the table has too few rows or columns for these entries.
    """
    op = "entries_to_local_slots"
    tensor(op, "entries", entries, "rows k", (torch.int32,), {})
    tensor(op, "block_table", block_table, "b w", (torch.int32,), {})
    if block_table.shape[0] * rows_per_table != entries.shape[0]:
        raise ShapeError(
            f"{op}: block_table must have a row for each {rows_per_table} of the {entries.shape[0]} rows of entries, "
            f"got {block_table.shape[0]}."
        )
    local = spread.to_local(entries)
    page, offset = local // spread.page_size, local % spread.page_size
    highest = int(torch.where(local < 0, -1, page).max()) if local.numel() else -1
    if highest >= block_table.shape[1]:
        raise ShapeError(
            f"{op}: block_table must have {highest + 1} columns for these entries, got {block_table.shape[1]}; the "
            "spread and the table disagree about who holds which page."
        )
    if highest < 0:
        return torch.full_like(entries, -1)
    table = block_table.repeat_interleave(rows_per_table, dim=0)
    block = table.gather(1, page.clamp(min=0).to(torch.int64))
    return torch.where(local >= 0, block * spread.page_size + offset, -1).to(torch.int32)


def decode_over_ranks(
    q: torch.Tensor,
    scopes: KVScope | Sequence[KVScope],
    *,
    group: dist.ProcessGroup | None = None,
    softmax_scale: float | None = None,
    attn_sink: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    heads: str = "all",
    memory_limit: int | None = None,
    backend: str | None = None,
) -> AttnOutput:
    """`sparse_decode` of keys that are spread over the ranks.

    Args:
        q: [b, s_q, h_q, 512] bfloat16, the same on every rank.
        scopes: what this rank holds; -1 where a selected slot is elsewhere. A cache that every rank holds (the window)
            must be listed by one rank only, or it counts once per rank: the others give indices of -1.
        softmax_scale, attn_sink, out_dtype, memory_limit, backend: as in `sparse_decode`.
        group, heads: as in `merge_over_ranks`.
    Returns, Raises:
        As `merge_over_ranks`. A slot that one rank refuses is refused by all.
    """
    op = "decode_over_ranks"
    failure = Failure()
    b, s_q, h_q = q.shape[:3]
    part = failure.run(
        lambda: sparse_decode(
            q,
            scopes,
            softmax_scale=softmax_scale,
            out_dtype=torch.float32,
            memory_limit=memory_limit,
            backend=backend,
        ),
        lambda: AttnOutput(
            q.new_zeros(q.shape, dtype=torch.float32), q.new_full((b, h_q, s_q), float("inf"), dtype=torch.float32)
        ),
    )
    return _merge(op, part.out, part.lse, attn_sink, group, out_dtype, heads, memory_limit, backend, failure)


def merge_over_ranks(
    out: torch.Tensor,
    lse: torch.Tensor,
    attn_sink: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    heads: str = "all",
    memory_limit: int | None = None,
    backend: str | None = None,
) -> AttnOutput:
    """Merge the attention of every rank's keys into attention over all of them; the sink counts once, here.

    Args:
        out: [b, s_q, h_q, d] float32, this rank's part, made without a sink. Read only where lse is finite.
        lse: [b, h_q, s_q] float32; +inf where this rank holds no selected key.
        attn_sink: [h_q] float32 or None; all heads, the same on every rank.
        group: the ranks.
        out_dtype: bfloat16 or float32.
        heads: "all": every rank gets every head (one all-gather). "own": a rank gets the heads whose output projection
            it has, h_q / size of them (one all-to-all, about 1 / size of the bytes).
        memory_limit, backend: as in `merge_partials`.
    Returns:
        AttnOutput in the layout of the parts. Parts are added in rank order, so "all" gives every rank the same bytes,
        and "own" the same bytes as its slice of them.
    Raises:
        What `merge_partials` raises; ArgumentError: heads="own" and the ranks do not divide h_q; CollectiveError.
    """
    return _merge("merge_over_ranks", out, lse, attn_sink, group, out_dtype, heads, memory_limit, backend, Failure())


def _merge(
    op: str,
    out: torch.Tensor,
    lse: torch.Tensor,
    attn_sink: torch.Tensor | None,
    group: dist.ProcessGroup | None,
    out_dtype: torch.dtype,
    heads: str,
    memory_limit: int | None,
    backend: str | None,
    failure: Failure,
) -> AttnOutput:
    sizes: dict[str, int] = {}
    tensor(op, "out", out, "b s_q h_q d", (torch.float32,), sizes)
    tensor(op, "lse", lse, "b h_q s_q", (torch.float32,), sizes)
    if attn_sink is not None:
        tensor(op, "attn_sink", attn_sink, "h_q", (torch.float32,), sizes)
    choice(op, "heads", heads, ("all", "own"))
    choice(op, "out_dtype", out_dtype, (torch.bfloat16, torch.float32))
    rank, size = rank_and_size(group)
    b, s_q, h_q, d = out.shape
    if heads == "own" and h_q % size:
        raise ArgumentError(f"{op}: heads='own' needs h_q to be a multiple of the {size} ranks, got {h_q}.")
    # [b, s_q, h_q, d + 1]: each head's part with its lse behind it, and one float for the code at the end.
    packed = torch.cat((out, lse.transpose(1, 2)[..., None]), dim=-1)
    code = float(failure.code)
    if heads == "all":
        message = torch.cat((packed.reshape(-1), packed.new_tensor([code])))
        gathered = all_gather(op, message, group)
        shape = (size, b, s_q, h_q, d + 1)
    else:
        part = h_q // size
        split = packed.reshape(b, s_q, size, part, d + 1).permute(2, 0, 1, 3, 4).reshape(size, -1)
        gathered = all_to_all(op, torch.cat((split, split.new_full((size, 1), code)), dim=1), group)
        shape = (size, b, s_q, part, d + 1)
        attn_sink = None if attn_sink is None else attn_sink[rank * part : (rank + 1) * part]
    failure.settle(op, [int(c) for c in gathered[:, -1].tolist()])
    parts = gathered[:, :-1].reshape(shape)
    return merge_partials(
        list(parts[..., :d].unbind(0)),
        list(parts[..., d].transpose(2, 3).unbind(0)),
        attn_sink,
        out_dtype=out_dtype,
        memory_limit=memory_limit,
        backend=backend,
    )


def _check_spread(op: str, spread: PageSpread, group: dist.ProcessGroup | None) -> None:
    rank, size = rank_and_size(group)
    if not isinstance(spread, PageSpread) or (spread.rank, spread.size) != (rank, size):
        raise ArgumentError(f"{op}: spread must be the PageSpread of rank {rank} of {size}, got {spread!r}.")


def selection_bytes(num_rows: int, k: int, size: int, *, logits_dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes a rank sends for one selection over ranks: a ring all-gather of k entries and values per row, and a code.

    (size - 1) * (num_rows * k * (4 + itemsize) + 4); it does not depend on the context.
    """
    return (size - 1) * (num_rows * k * (4 + logits_dtype.itemsize) + 4)


def merge_bytes(num_rows: int, num_heads: int, size: int, *, heads: str = "all", head_dim: int = 512) -> int:
    """Bytes a rank sends for one merge: float32 parts with their lse, and a code.

    "all": (size - 1) * (num_rows * num_heads * (head_dim + 1) * 4 + 4), a ring all-gather.
    "own": (size - 1) * (num_rows * num_heads / size * (head_dim + 1) * 4 + 4), an all-to-all.
    """
    own = num_heads if heads == "all" else num_heads // size
    return (size - 1) * (num_rows * own * (head_dim + 1) * 4 + 4)
