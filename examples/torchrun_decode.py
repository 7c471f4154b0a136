# SPDX-License-Identifier: Apache-2.0
"""One decode step of DeepSeek-V4.1's sparse attention over several processes, compared with one process.

    torchrun --nproc-per-node 4 examples/torchrun_decode.py
    torchrun --nproc-per-node 4 examples/torchrun_decode.py --entries 65536 --heads 64 --rows 6

Every rank draws the same problem, so each can compute the single-process answer to compare with; an engine's ranks hold
their pages only. Exit status 1 when a promise is not kept.
"""

from __future__ import annotations

import argparse
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from sparse_mla import (
    INDEX_FP4,
    V41_FP4,
    V41_FP8,
    KVScope,
    PagedCache,
    PagedKeys,
    allocate,
    index_logits,
    index_topk,
    sparse_decode,
    store_records,
)
from sparse_mla.formats import encode_query
from sparse_mla.parallel import (
    PageSpread,
    decode_over_ranks,
    entries_to_local_slots,
    head_slice,
    index_topk_of_shards,
    index_topk_over_ranks,
    merge_bytes,
    rank_and_size,
    score_sum_bytes,
    selection_bytes,
)

PAGE, WINDOW, TOPK = 64, 128, 512
ABSOLUTE, RELATIVE = 1e-3, 2.01 / 128  # of a decode's output, as FlashMLA's own test has them


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--rows", type=int, default=6, help="query rows per sequence: 1 + drafts")
    parser.add_argument("--heads", type=int, default=16, help="main heads, divisible by the ranks")
    parser.add_argument("--index-heads", type=int, default=32, help="index heads, divisible by the ranks")
    parser.add_argument("--entries", type=int, default=4096, help="compressed entries per sequence")
    parser.add_argument("--backend", default=None, help="backend of the operators")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds until a lost rank is an error")
    return parser.parse_args()


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def same_on_every_rank(x: torch.Tensor) -> bool:
    mine = x.contiguous().view(-1).view(torch.uint8)
    copies = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, mine)
    return all(torch.equal(copy, copies[0]) for copy in copies)


def agreed(ok: bool) -> bool:
    """Whether it is so on every rank."""
    flag = torch.tensor([int(ok)])
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())


def within_tolerance(found: torch.Tensor, whole: torch.Tensor) -> bool:
    gap = (found.double() - whole.double()).abs()
    return bool(((gap < ABSOLUTE) | (gap / (whole.double().abs() + 1e-6) < RELATIVE)).all())


def main() -> int:
    args = options()
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout))
    rank, size = rank_and_size()
    g = torch.Generator().manual_seed(41)
    b, n, h, e = args.sequences, args.rows, args.heads, args.entries
    pages = -(-e // PAGE)

    # The whole problem, the same on every rank.
    index, main_cache = allocate(INDEX_FP4, b * pages, PAGE), allocate(V41_FP4, b * pages, PAGE)
    window = allocate(V41_FP8, b, WINDOW + n)
    every = torch.arange(b * pages * PAGE)
    store_records(torch.randn(every.numel(), 128, generator=g), index, every)
    store_records(0.1 * torch.randn(every.numel(), 512, generator=g), main_cache, every)
    store_records(0.1 * torch.randn(window.num_slots, 512, generator=g), window, torch.arange(window.num_slots))
    table = torch.randperm(b * pages, generator=g).view(b, pages).to(torch.int32)
    q_index = encode_query(torch.randn(b, n, args.index_heads, 128, generator=g), INDEX_FP4)
    weights = torch.randn(b * n, args.index_heads, generator=g)
    q = torch.randn(b, n, h, 512, generator=g).clamp(-1, 1).to(torch.bfloat16)
    sink = torch.randn(h, generator=g)
    lens = (e - n + torch.arange(n)).clamp(min=0).expand(b, n).to(torch.int32).contiguous()
    seen = torch.arange(WINDOW) + torch.arange(n)[:, None] + (WINDOW + n) * torch.arange(b)[:, None, None]
    window_slots = seen.to(torch.int32)

    # One process.
    entries = index_topk(q_index, PagedKeys(index, table, lens), weights, TOPK, backend=args.backend)
    block = table.repeat_interleave(n, 0).gather(1, (entries.clamp(min=0) // PAGE).long())
    slots = torch.where(entries >= 0, block * PAGE + entries % PAGE, -1).to(torch.int32).view(b, n, -1)
    scopes = [KVScope(window, window_slots), KVScope(main_cache, slots)]
    whole = sparse_decode(q, scopes, attn_sink=sink, backend=args.backend)

    # Context parallel: this rank's pages, copied into caches of its own. The last rank attends to the window.
    spread = PageSpread.over(PAGE)
    held = spread.local_pages(pages)
    own_index, own_main = (of_pages(cache, table[:, held]) for cache in (index, main_cache))
    own_table = torch.arange(b * len(held), dtype=torch.int32).view(b, len(held))
    nobody = torch.full_like(window_slots, -1)
    dist.barrier()
    began = time.perf_counter()
    found = index_topk_over_ranks(
        q_index, PagedKeys(own_index, own_table, lens), weights, TOPK, spread, backend=args.backend
    )
    local = entries_to_local_slots(found, own_table, spread, rows_per_table=n).view(b, n, -1)
    parts = [KVScope(window, window_slots if rank == size - 1 else nobody), KVScope(own_main, local)]
    merged = decode_over_ranks(q, parts, attn_sink=sink, backend=args.backend)
    milliseconds = 1e3 * (time.perf_counter() - began)
    yes = {True: "yes", False: "NO"}
    verdicts = [
        agreed(torch.equal(found, entries)),
        agreed(within_tolerance(merged.out, whole.out)),
        same_on_every_rank(merged.out) and same_on_every_rank(merged.lse) and same_on_every_rank(found),
    ]
    say(f"{size} ranks, {b} sequences of {n} rows, {h} heads, {e} entries in pages of {PAGE}, top-{TOPK}")
    say(f"context parallel   selected lists equal bit for bit: {yes[verdicts[0]]}")
    worst = float((merged.out.double() - whole.out.double()).abs().max())
    say(f"context parallel   outputs within tolerance: {yes[verdicts[1]]} (largest difference {worst:.1e})")
    say(f"context parallel   every rank bit-equal to every other: {yes[verdicts[2]]}")
    sent = selection_bytes(b * n, TOPK, size) + merge_bytes(b * n, h, size)
    say(f"context parallel   a rank sends {sent:,} bytes per layer; this step took {milliseconds:.1f} ms")

    # Tensor parallel: this rank's main heads and index heads, all pages.
    heads, index_heads = head_slice(h), head_slice(args.index_heads)
    mine = (q_index[0][:, :, index_heads], None if q_index[1] is None else q_index[1][:, :, index_heads])
    listed = index_topk_of_shards(
        mine, PagedKeys(index, table, lens), weights[:, index_heads], TOPK, backend=args.backend
    )
    part = sparse_decode(q[:, :, heads], scopes, attn_sink=sink[heads], backend=args.backend)
    split = [
        same_on_every_rank(listed),
        agreed(within_tolerance(part.out, whole.out[:, :, heads])),
        agreed(as_good(listed, index_logits(q_index, PagedKeys(index, table, lens), weights, out_dtype=torch.float32))),
    ]
    say(f"tensor parallel    every rank bit-equal to every other: {yes[split[0]]}")
    say(f"tensor parallel    outputs within tolerance: {yes[split[1]]}")
    say(f"tensor parallel    no better entry left behind: {yes[split[2]]}")
    say(f"tensor parallel    a rank sends {score_sum_bytes(b * n, pages * PAGE, size):,} bytes per selecting layer")
    dist.destroy_process_group()
    return 0 if all(verdicts) and all(split) else 1


def of_pages(cache: PagedCache, table: torch.Tensor) -> PagedCache:
    """A cache of those pages alone."""
    own = allocate(cache.format, table.numel(), cache.page_size)
    own.pages()[:] = cache.pages()[table.reshape(-1).long()]
    return own


def as_good(listed: torch.Tensor, scores: torch.Tensor) -> bool:
    """Whether no entry left out scores above one taken by more than the rounding of scores to bfloat16."""
    n = scores.shape[1]
    places = torch.where(listed < 0, n, listed).long()  # column n takes what is no entry
    taken = torch.zeros((scores.shape[0], n + 1), dtype=torch.bool).scatter_(1, places, True)[:, :n]
    worst = scores.masked_fill(~taken, float("inf")).amin(1)
    best = scores.masked_fill(taken, float("-inf")).amax(1)
    return bool((worst >= best - best.abs() / 64 - 1e-5).all())


if __name__ == "__main__":
    sys.exit(main())
