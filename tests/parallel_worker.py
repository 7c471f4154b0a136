# SPDX-License-Identifier: Apache-2.0
"""A group of processes for test_parallel.py: `python parallel_worker.py SIZE FOLDER PLAN [SECONDS]`.

The first process imports torch, forks SIZE ranks before it has run anything, and waits for them. Each rank runs the
plan's scenarios in one gloo group and writes rank<i>.json: scenario -> "ok" or a traceback.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import sparse_mla
from sparse_mla import PagedKeys, allocate, index_logits, index_topk, sparse_decode, store_records, topk
from sparse_mla.attention import AttentionWeights, KVPool, StepMetadata, V41Attention, V41Config
from sparse_mla.caches import KVScope
from sparse_mla.dispatch import presence
from sparse_mla.errors import ArgumentError, CollectiveError, NonFiniteError, SlotRangeError, StateError
from sparse_mla.formats import INDEX_FP4, INDEX_FP8, V41_FP4, V41_FP8, encode_query
from sparse_mla.ops.candidate_blocks import candidate_blocks
from sparse_mla.parallel import (
    PageSpread,
    candidate_blocks_over_ranks,
    decode_over_ranks,
    entries_to_local_slots,
    head_slice,
    index_topk_of_shards,
    index_topk_over_ranks,
    merge_bytes,
    merge_over_ranks,
    output_sum_bytes,
    rank_and_size,
    require_same,
    score_sum_bytes,
    selection_bytes,
    shard_of,
    sum_over,
    topk_over_ranks,
)

GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
BACKENDS = ["reference"] + ([] if presence("native") else ["native"])


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def every(x: torch.Tensor) -> list[torch.Tensor]:
    """x of every rank, through the group but not through the library."""
    out = [torch.empty_like(x.contiguous()) for _ in range(dist.get_world_size())]
    dist.all_gather(out, x.contiguous())
    return out


def refused(call, kind):
    """The error that every rank must raise; a rank that returns instead fails the scenario."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


class Problem:
    """Two sequences in pages, whole on every rank, and this rank's pages of them in caches of its own."""

    def __init__(self, page=8, pages=9, rows=2, heads=8, index_heads=4, fmt=INDEX_FP4, run=1, lens=None, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.rank, self.size = rank_and_size()
        self.page, self.rows, self.heads = page, rows, heads
        self.spread = PageSpread.over(page, run=run)
        b = 2
        self.lens = torch.tensor(lens or [[page * pages - 3, page * pages - 2], [5, 6]], dtype=torch.int32)
        self.index = allocate(fmt, b * pages, page)
        self.main = allocate(V41_FP4, b * pages, page)
        # Few distinct keys: ties everywhere, and a plateau of zeros.
        distinct = torch.randn(5, 128, generator=g)
        picks = torch.randint(0, 5, (b * pages * page,), generator=g)
        slots = torch.arange(b * pages * page)
        store_records(distinct[picks], self.index, slots)
        store_records(torch.randn(slots.numel(), 512, generator=g) * 0.1, self.main, slots)
        self.table = torch.randperm(b * pages, generator=g).view(b, pages).to(torch.int32)
        query = torch.randn(b, rows, index_heads, 128, generator=g)
        self.q_index = encode_query(query, fmt)
        self.weights = torch.randn(b * rows, index_heads, generator=g)
        self.q = torch.randn(b, rows, heads, 512, generator=g).clamp(-1, 1).to(torch.bfloat16)
        self.sink = torch.randn(heads, generator=g)
        self.sink[0], self.sink[-1] = float("-inf"), float("inf")
        self.window = allocate(V41_FP8, 2, 16)
        store_records(torch.randn(32, 512, generator=g) * 0.1, self.window, torch.arange(32))
        self.window_slots = (torch.arange(16) + 16 * torch.arange(2)[:, None, None]).expand(b, rows, 16)
        self.window_slots = self.window_slots.to(torch.int32).contiguous()
        # This rank's pages, alone in its caches; everything else is poison.
        own = self.spread.local_pages(pages)
        self.own_table = torch.arange(b * len(own), dtype=torch.int32).view(b, len(own))
        self.own_index, self.own_main = allocate(fmt, b * len(own), page), allocate(V41_FP4, b * len(own), page)
        for mine, whole in ((self.own_index, self.index), (self.own_main, self.main)):
            mine.pages()[:] = whole.pages()[self.table[:, own].reshape(-1).long()]

    def keys(self):
        return PagedKeys(self.index, self.table, self.lens)

    def own_keys(self):
        return PagedKeys(self.own_index, self.own_table, self.lens)

    def slots(self, entries):
        table = self.table.repeat_interleave(self.rows, 0).long()
        block = table.gather(1, (entries.clamp(min=0) // self.page).long())
        slots = torch.where(entries >= 0, block * self.page + entries % self.page, -1).to(torch.int32)
        return slots.view(2, self.rows, -1)


def selection():
    """The list over ranks is the single-process one, bit for bit, ties and absent pages included."""
    with_ties = 0
    for backend in BACKENDS:
        for fmt in (INDEX_FP4, INDEX_FP8):
            layouts = ((9, 1, None), (9, 3, None), (3, 1, [[20, 24], [1, 0]]), (1, 2, [[8, 7], [0, 0]]))
            for pages, run, lens in layouts if fmt is INDEX_FP4 else layouts[1:3]:
                p = Problem(fmt=fmt, pages=pages, run=run, lens=lens)
                for k in (1, 7, 24, 100):
                    for dtype in (torch.bfloat16, torch.float32) if k in (7, 100) else (torch.bfloat16,):
                        options = {"logits_dtype": dtype, "backend": backend}
                        whole = index_topk(p.q_index, p.keys(), p.weights, k, **options)
                        found = index_topk_over_ranks(p.q_index, p.own_keys(), p.weights, k, p.spread, **options)
                        assert same(found, whole), (backend, fmt, pages, run, k, dtype, found, whole)
                        require_same("test", found)
                # A limit below one batch element's scores changes nothing.
                tight = index_topk_over_ranks(
                    p.q_index, p.own_keys(), p.weights, 24, p.spread, memory_limit=1 << 20, backend=backend
                )
                assert same(tight, index_topk(p.q_index, p.keys(), p.weights, 24, backend=backend))
                logits = index_logits(p.q_index, p.keys(), p.weights, backend=backend)
                if logits.shape[1] > 8 and int(p.lens.max()) > 8:
                    with_ties += int(logits[0, : int(p.lens[0, 0])].unique().numel() < int(p.lens[0, 0]))
    assert with_ties, "the data has no ties"


def plain_topk():
    """Any scores: -inf as a value or as a mask, +inf, rows without entries."""
    p = Problem()
    n = p.page * 9
    g = torch.Generator().manual_seed(1)
    scores = torch.randint(-2, 3, (4, n), generator=g).to(torch.bfloat16)
    scores[:, ::5], scores[:, 3::17] = float("-inf"), float("inf")
    lens = torch.tensor([n, n - 11, 3, 0], dtype=torch.int32)
    mine = p.spread.to_global(torch.arange(int(p.spread.local_lens(torch.tensor([n]))), dtype=torch.int32)).long()
    for k in (1, 13, 200):
        for rule in ("skip", "last"):
            found = topk_over_ranks(scores[:, mine], k, lens, p.spread, on_neg_inf=rule)
            assert same(found, topk(scores, k, lens, on_neg_inf=rule)), (k, rule)
    for size in (8, 16):
        whole, spread = scores, p.spread
        if size == 16:
            spread = PageSpread.over(16)
            padded = torch.nn.functional.pad(scores, (0, -n % 16))
            whole = padded
        mine = spread.to_global(
            torch.arange(int(spread.local_lens(torch.tensor([whole.shape[1]]))), dtype=torch.int32)
        ).long()
        for k in (1, 3, 5):
            expected = candidate_blocks(whole, lens, block_size=size, topk_blocks=k)
            found = candidate_blocks_over_ranks(whole[:, mine], lens, spread, block_size=size, topk_blocks=k)
            assert same(found, expected), (size, k, found, expected)


def attention():
    """Partial attention over ranks is attention over all keys; every rank gets the same bytes."""
    for backend in BACKENDS:
        for lens in (None, [[3, 8], [1, 0]]):  # the second: one page, so most ranks hold no selected key
            p = Problem(pages=9 if lens is None else 1, lens=lens)
            entries = index_topk(p.q_index, p.keys(), p.weights, 24, backend=backend)
            own = entries_to_local_slots(entries, p.own_table, p.spread, rows_per_table=p.rows)
            nobody = torch.full_like(p.window_slots, -1)
            for with_window in (True, False):
                scopes = [KVScope(p.main, p.slots(entries))]
                mine = [KVScope(p.own_main, own.view(2, p.rows, -1))]
                if p.own_main.num_blocks == 0:  # a rank without pages still takes part
                    mine = [KVScope(p.main, torch.full_like(p.slots(entries), -1))]
                if with_window:
                    scopes.insert(0, KVScope(p.window, p.window_slots))
                    mine.insert(0, KVScope(p.window, p.window_slots if p.rank == p.size - 1 else nobody))
                for dtype in (torch.float32, torch.bfloat16):
                    whole = sparse_decode(p.q, scopes, attn_sink=p.sink, out_dtype=dtype, backend=backend)
                    found = decode_over_ranks(p.q, mine, attn_sink=p.sink, out_dtype=dtype, backend=backend)
                    assert found.out.dtype == dtype
                    assert found.out.shape == whole.out.shape
                    assert found.lse.shape == whole.lse.shape
                    for part in found:
                        assert all(same(other, every(part)[0]) for other in every(part))
                    empty = torch.isinf(whole.lse)
                    assert torch.equal(empty, torch.isinf(found.lse))
                    assert not found.out[empty.transpose(1, 2)].any()
                    gap = (found.lse - whole.lse)[~empty].abs()
                    assert bool((gap < 1e-5).all()), gap.max()
                    difference = (found.out.float() - whole.out.float()).abs()
                    # The tolerance of a decode's output: absolute 1e-3, or relative 2.01 / 128.
                    close = (difference < 1e-3) | (difference / (whole.out.float().abs() + 1e-6) < 2.01 / 128)
                    assert bool(close.all()), difference.max()
                    assert not found.out[:, :, -1].any()  # a sink of +inf
                    part = head_slice(p.heads)
                    mine_only = decode_over_ranks(
                        p.q, mine, attn_sink=p.sink, out_dtype=dtype, backend=backend, heads="own"
                    )
                    assert same(mine_only.out, found.out[:, :, part])
                    assert same(mine_only.lse, found.lse[:, part])


def sink_counts_once():
    """Equal parts on every rank: the merged value is the part, and only one sink is in the denominator."""
    _, size = rank_and_size()
    out = torch.full((1, 1, size, 512), 2.0)
    lse = torch.zeros(1, size, 1)
    sink = torch.zeros(size)
    merged = merge_over_ranks(out, lse, sink, out_dtype=torch.float32)
    expected = 2.0 * size / (size + 1)  # `size` keys of weight 1 against one sink of weight 1
    assert torch.allclose(merged.out, torch.full_like(out, expected), rtol=1e-6)
    assert torch.allclose(merged.lse, torch.full_like(lse, float(torch.tensor(float(size)).log())), rtol=1e-6)
    # A rank without keys may hold anything in its part.
    rank, _ = rank_and_size()
    if rank == 0:
        out, lse = torch.full_like(out, float("nan")), torch.full_like(lse, float("inf"))
    merged = merge_over_ranks(out, lse, sink, out_dtype=torch.float32)
    assert torch.allclose(merged.out, torch.full_like(out, 2.0 * (size - 1) / size), rtol=1e-6)


def bad_values():
    """A value that one rank refuses is refused by all, without a timeout; the group stays usable."""
    rank, size = rank_and_size()
    p = Problem()
    n = int(p.spread.local_lens(torch.tensor([72])))
    scores = torch.zeros(4, n)
    lens = torch.full((4,), 72, dtype=torch.int32)
    if rank == 1:
        scores[2, 0] = float("nan")
    text = refused(lambda: topk_over_ranks(scores, 5, lens, p.spread), NonFiniteError)
    assert ("row 2" in text) == (rank == 1), text
    assert ("rank 1" in text) == (rank != 1), text
    table = p.own_table.clone()
    if rank == size - 1:
        table[0, 0] = 99
    keys = p.own_keys()._replace(block_table=table)
    refused(lambda: index_topk_over_ranks(p.q_index, keys, p.weights, 5, p.spread), SlotRangeError)
    slots = torch.full((2, p.rows, 4), -1, dtype=torch.int32)
    if rank == 0:
        slots[0, 0, 0] = 10**6
    refused(lambda: decode_over_ranks(p.q, KVScope(p.own_main, slots)), SlotRangeError)
    whole_table = p.table.clone()
    if rank == 0:
        whole_table[0, 0] = 10**6
    part = head_slice(4)
    q = (p.q_index[0][:, :, part], p.q_index[1][:, :, part])
    keys = p.keys()._replace(block_table=whole_table)
    refused(lambda: index_topk_of_shards(q, keys, p.weights[:, part], 5), SlotRangeError)
    refused(lambda: require_same("test", torch.tensor([rank])), StateError)
    require_same("test", torch.tensor([size]))
    # Mistakes that every rank makes alike never reach the group.
    refused(lambda: index_topk_over_ranks(p.q_index, p.own_keys(), p.weights, 5, PageSpread(0, 64, 8)), ArgumentError)
    refused(lambda: head_slice(size + 1), ArgumentError)
    refused(
        lambda: merge_over_ranks(torch.zeros(1, 1, size + 1, 512), torch.zeros(1, size + 1, 1), heads="own"),
        ArgumentError,
    )
    assert same(
        index_topk_over_ranks(p.q_index, p.own_keys(), p.weights, 9, p.spread),
        index_topk(p.q_index, p.keys(), p.weights, 9),
    )


def index_heads():
    """Split index heads: one list on every rank, by value as good as one process's; replicated: the same bytes."""
    for backend in BACKENDS:
        p = Problem(index_heads=8, seed=3)
        part = head_slice(8)
        q = (p.q_index[0][:, :, part], p.q_index[1][:, :, part])
        w = p.weights[:, part]
        scores = index_logits(p.q_index, p.keys(), p.weights, out_dtype=torch.float32, backend=backend)
        for k in (1, 24, 100):
            found = index_topk_of_shards(q, p.keys(), w, k, backend=backend)
            assert all(same(other, found) for other in every(found))
            whole = index_topk(p.q_index, p.keys(), p.weights, k, backend=backend)
            assert torch.equal(found >= 0, whole >= 0)
            for row in range(found.shape[0]):
                chosen = found[row][found[row] >= 0].long()
                if chosen.numel() == 0:
                    continue
                taken = torch.zeros(scores.shape[1], dtype=torch.bool)
                taken[chosen] = True
                valid = scores[row] > float("-inf")
                left = scores[row][valid & ~taken]
                if left.numel():
                    # Nothing better was left behind, up to one rounding to bfloat16 of the larger.
                    worst, best = float(scores[row][taken].min()), float(left.max())
                    assert worst >= best - abs(best) / 64 - 1e-5, (backend, k, row, worst, best)
        # Whole batch elements under a tight limit: several sums, the same list.
        tight = index_topk_of_shards(q, p.keys(), w, 24, memory_limit=1 << 20, backend=backend)
        assert same(tight, index_topk_of_shards(q, p.keys(), w, 24, backend=backend))
        blocks = candidate_blocks(scores.to(torch.bfloat16), p.lens.reshape(-1), topk_blocks=3)
        some = index_topk_of_shards(q, p.keys(), w, 10, candidates=sparse_mla.Candidates(blocks), backend=backend)
        assert all(same(other, some) for other in every(some))
        inside = [[int(e) // 8 in blocks[r].tolist() for e in some[r] if e >= 0] for r in range(4)]
        assert all(all(row) for row in inside)
        assert any(inside)
        replicated = index_topk(p.q_index, p.keys(), p.weights, 24, backend=backend)
        assert all(same(other, replicated) for other in every(replicated))


def exact_sum():
    """With scores that float32 adds exactly, split heads select one process's list bit for bit, ties included."""
    p = Problem(index_heads=8, seed=5)
    g = torch.Generator().manual_seed(9)
    query = torch.randint(-2, 3, (2, 2, 8, 128), generator=g).float()
    store_records(
        torch.randint(-2, 3, (p.index.num_slots, 128), generator=g).float(), p.index, torch.arange(p.index.num_slots)
    )
    q = encode_query(query, INDEX_FP4)
    weights = torch.ones(4, 8)
    part = head_slice(8)
    for k in (3, 24):
        found = index_topk_of_shards((q[0][:, :, part], q[1][:, :, part]), p.keys(), weights[:, part], k)
        assert same(found, index_topk(q, p.keys(), weights, k))


def layers():
    """Whole attention layers: heads and index heads split, caches replicated, outputs summed over the group."""
    _, size = rank_and_size()
    config = replace(V41Config.tiny(), num_attention_heads=8, o_groups=max(2, size // 2), index_topk=16)
    chosen = (0, 2, 20)
    g = torch.Generator().manual_seed(2)
    hidden = torch.randn(46, config.hidden_size, generator=g).to(torch.bfloat16)

    def run(weights, reduce=None):
        pool = KVPool(config, num_blocks=2, num_sequences=1, layers=chosen)
        attention = V41Attention(config, weights, reduce=reduce)
        sequence, found = pool.allocate(), []
        for build, rows in (("prefill", slice(0, 42)), ("decode", slice(42, 46))):
            step = getattr(StepMetadata, build)(pool, [sequence], [rows.stop - rows.start])
            found.append([attention.forward(hidden[rows], layer, step, pool) for layer in chosen])
            lists = [step.lists[layer].clone() for layer in chosen if layer in step.lists]
            step.commit()
        return [torch.cat(parts) for parts in zip(*found, strict=True)], lists, pool

    whole, whole_lists, _ = run(AttentionWeights.random(config))
    for treatment in ("replicate", "shard"):
        weights = AttentionWeights.random(config, shard=shard_of(index_heads=treatment))
        parts, lists, pool = run(weights, sum_over())
        for mine in (*parts, *lists, pool.data, pool.rings):
            require_same("layers", mine)
        for a, b in zip(parts, whole, strict=True):
            error = float((a.double() - b.double()).norm() / b.double().norm())
            assert error < 2e-2, error
        if treatment == "replicate":
            assert all(same(a, b) for a, b in zip(lists, whole_lists, strict=True))


def bytes_sent():
    """The formulas say what is handed to the transport, by a count of it."""
    _, size = rank_and_size()
    sent = []
    ring = {
        "all_reduce": lambda args: -(-2 * (size - 1) * args[0].numel() * args[0].element_size() // size),
        GATHER: lambda args: (size - 1) * args[1].numel() * args[1].element_size(),
        "all_to_all_single": lambda args: (size - 1) * args[1].numel() * args[1].element_size() // size,
    }
    originals = {name: getattr(dist, name) for name in ring}

    def counting(name):
        def call(*args, **kwargs):
            sent.append(ring[name](args))
            return originals[name](*args, **kwargs)

        return call

    def refuse(name):
        def call(*args, **kwargs):
            raise AssertionError(f"{name} is not in the formulas")

        return call

    others = ("all_gather", "broadcast", "reduce_scatter", "reduce_scatter_tensor", "send", "recv", "all_gather_object")
    kept = {name: getattr(dist, name) for name in others}
    try:
        for name in ring:
            setattr(dist, name, counting(name))
        for name in others:
            setattr(dist, name, refuse(name))
        p = Problem(index_heads=8)
        rows = 4
        for k in (1, 24):
            for dtype in (torch.bfloat16, torch.float32):
                sent.clear()
                index_topk_over_ranks(p.q_index, p.own_keys(), p.weights, k, p.spread, logits_dtype=dtype)
                assert sent == [selection_bytes(rows, k, size, logits_dtype=dtype)]
        slots = torch.full((2, p.rows, 4), -1, dtype=torch.int32)
        for heads in ("all", "own"):
            sent.clear()
            decode_over_ranks(p.q, KVScope(p.own_main, slots), heads=heads)
            assert sent == [merge_bytes(rows, p.heads, size, heads=heads)]
        part = head_slice(8)
        sent.clear()
        index_topk_of_shards((p.q_index[0][:, :, part], p.q_index[1][:, :, part]), p.keys(), p.weights[:, part], 24)
        assert sent == [score_sum_bytes(rows, p.page * 9, size)]
        sent.clear()
        sum_over()(torch.zeros(6, 5120, dtype=torch.bfloat16))
        assert sent == [output_sum_bytes(6, 5120, size)]
    finally:
        for name, function in {**originals, **kept}.items():
            setattr(dist, name, function)


def subgroups():
    """Any process group: every second rank forms its own."""
    rank, size = rank_and_size()
    groups = [dist.new_group([r for r in range(size) if r % 2 == parity]) for parity in (0, 1)]
    mine, other = groups[rank % 2], groups[1 - rank % 2]
    assert rank_and_size(mine) == (rank // 2, size // 2)
    spread = PageSpread.over(8, mine)
    scores = torch.arange(16, dtype=torch.float32)[None] + 100 * (rank % 2)
    found = topk_over_ranks(scores, 3, torch.tensor([16 * spread.size], dtype=torch.int32), spread, group=mine)
    assert found.shape == (1, 3)
    require_same("test", found, mine)
    refused(lambda: rank_and_size(other), ArgumentError)


def failing(how, seconds):
    """Rank 1 dies or stalls before a collective: the others get CollectiveError in time, and the pool is as it was."""
    rank, size = rank_and_size()
    config = replace(V41Config.tiny(), num_attention_heads=8, o_groups=2)
    pool = KVPool(config, num_blocks=3, num_sequences=2, layers=(0, 2))
    attention = V41Attention(config, AttentionWeights.random(config, shard=shard_of()), reduce=sum_over())
    hidden = torch.randn(40, config.hidden_size, generator=torch.Generator().manual_seed(rank)).to(torch.bfloat16)
    safe, other = pool.allocate(), pool.allocate()
    step = StepMetadata.prefill(pool, [safe], [40])
    for layer in (0, 2):
        attention.forward(hidden, layer, step, pool)
    step.commit()
    kept = pool.rings[safe.slot].clone(), pool.data[safe.blocks].clone()
    if rank == 1:
        if how == "dies":
            os._exit(0)
        time.sleep(seconds + 8)
        return
    started = time.monotonic()
    step = StepMetadata.prefill(pool, [other], [10])
    text = refused(lambda: attention.forward(hidden[:10], 0, step, pool), CollectiveError)
    waited = time.monotonic() - started
    assert waited < seconds + 6, f"waited {waited:.1f} s for a group with a timeout of {seconds} s"
    assert f"over {size} ranks failed on rank {rank}" in text
    assert torch.equal(kept[0], pool.rings[safe.slot])
    assert torch.equal(kept[1], pool.data[safe.blocks])
    assert safe.length == 40
    pool.require_live("test", safe)
    pool.free(other)
    pool.free(safe)
    assert pool.bytes_used == 0
    assert pool.blocks_free == 3


SCENARIOS = {
    "all": (selection, plain_topk, attention, sink_counts_once, bad_values, index_heads, exact_sum, layers, bytes_sent),
}


def rank_main(rank: int, size: int, folder: Path, plan: str, seconds: float) -> None:
    torch.set_num_threads(1)
    report: dict[str, str] = {}
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'rendezvous'}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=seconds),
        )
        if plan in ("dies", "stalls"):
            scenarios = [(plan, lambda: failing(plan, seconds))]
        else:
            chosen = (*SCENARIOS["all"], *([subgroups] if size == 4 else []))
            scenarios = [(s.__name__, s) for s in chosen if plan in ("all", s.__name__)]
        for name, scenario in scenarios:
            began = time.monotonic()
            try:
                scenario()
                report[name] = "ok"
            except BaseException:
                report[name] = traceback.format_exc()
                break  # the ranks are out of step now
            finally:
                report[f"{name} seconds"] = f"{time.monotonic() - began:.2f}"
    except BaseException:
        report["start"] = traceback.format_exc()
    (folder / f"rank{rank}.json").write_text(json.dumps(report))
    os._exit(0)  # destroying a group whose peer is dead would wait


def main() -> None:
    size, folder, plan = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    seconds = float(sys.argv[4]) if len(sys.argv) > 4 else 60.0
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    children = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            rank_main(rank, size, folder, plan, seconds)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
