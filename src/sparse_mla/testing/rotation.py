# SPDX-License-Identifier: Apache-2.0
"""Inputs for timing: one cache of a stated footprint, and many index lists into it, so that records are not found in
a near cache
by accident. Records are a few thousand real ones, repeated; no list holds -1, because empty columns cost nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..caches import KVScope
from ..formats import HEAD_DIM, INDEX_DIM, RecordFormat, encode, encode_query
from ..ops.index_logits import PagedKeys
from .attention_cases import KEY_SCALE, SOFTMAX_SCALE, DecodeCase, make_lists, make_sink
from .case import Case, Problem, clamped_randn
from .index_cases import IndexLogitsCase, IndexTopkCase
from .pages import Pages
from .record_cases import LoadCase, StoreCase

__all__ = ["HOT_BYTES", "rotation", "touched_bytes"]

HOT_BYTES = 9 << 20  # inside any last-level cache this library is used with
DISTINCT = 4096  # records or pages that are really encoded


def touched_bytes(case: Case) -> int:
    """Bytes of cache records one call reads or writes."""
    if isinstance(case, DecodeCase):
        return case.b * case.s_q * sum(s.topk * s.pages.format.record_bytes for s in case.scopes)
    return case.nbytes


def rotation(case: Case, footprint_bytes: int) -> list[Problem]:
    """Problems that share their caches, enough of them that a round of all touches more than a last-level cache."""
    count = max(2, min(32, -(-(64 << 20) // max(1, touched_bytes(case)))))
    if isinstance(case, DecodeCase):
        return _decode(case, footprint_bytes, count)
    if isinstance(case, IndexLogitsCase) and not case.ragged:
        return _index(case)
    if isinstance(case, StoreCase):
        return _store(case, footprint_bytes, count)
    if isinstance(case, LoadCase):
        return _load(case, footprint_bytes, count)
    return [case.build(), case.build()]


def _pool(pages: Pages, values_per_row: int, scale: float, g: torch.Generator) -> torch.Tensor:
    """The bytes of a cache without padding, filled with repeated pages of encoded values."""
    distinct = max(1, min(pages.num_pages, DISTINCT // pages.page_size))
    few = replace(pages, num_pages=distinct)
    pool = few.empty(0)
    records = encode(clamped_randn(g, few.num_slots, values_per_row, scale=scale), pages.format)
    few.write(pool, torch.arange(few.num_slots), records)
    whole = pages.empty(0).view(pages.num_pages, -1)
    for start in range(0, pages.num_pages, distinct):
        part = whole[start : start + distinct]
        part.copy_(pool.view(distinct, -1)[: len(part)])
    return whole.view(-1)


def _sized(pages: Pages, share: float, footprint_bytes: int, at_least: int) -> Pages:
    """The same geometry, compact, with as many pages as that share of the footprint holds."""
    page_bytes = pages.page_size * pages.format.record_bytes
    num_pages = max(-(-at_least // pages.page_size), int(footprint_bytes * share) // page_bytes)
    return replace(pages, num_pages=num_pages, padding_bytes=0, region_offset=0, bare=False)


def _decode(case: DecodeCase, footprint_bytes: int, count: int) -> list[Problem]:
    g = case.generator()
    weights = [s.topk * s.pages.format.record_bytes for s in case.scopes]
    sized = [
        _sized(s.pages, weight / sum(weights), footprint_bytes, s.topk + case.s_q)
        for s, weight in zip(case.scopes, weights, strict=True)
    ]
    pools = [_pool(pages, HEAD_DIM, KEY_SCALE, g) for pages in sized]
    q = clamped_randn(g, case.b, case.s_q, case.h_q, HEAD_DIM)
    sink = make_sink(case.sink, case.h_q, g)
    problems = []
    for _ in range(count):
        scopes = []
        for scope, pages, pool in zip(case.scopes, sized, pools, strict=True):
            slots = make_lists(replace(scope, pages=pages, empty=0.0), case.b, case.s_q, g)
            scopes.append(KVScope(pages.cache(pool), slots))
        arguments: dict[str, Any] = {
            "q": q,
            "scopes": scopes,
            "softmax_scale": SOFTMAX_SCALE,
            "attn_sink": sink,
            "out_dtype": case.out_dtype,
        }
        rows = [_flat_rows(pages.format, pool) for pages, pool in zip(sized, pools, strict=True)]
        problems.append(Problem(arguments, {"rows": rows}))
    return problems


def _flat_rows(fmt: RecordFormat, pool: torch.Tensor) -> torch.Tensor:
    return pool.view(-1, fmt.record_bytes)


def _index(case: IndexLogitsCase) -> list[Problem]:
    """Two deals of the same pages; a context is read whole, so there is nothing to rotate but the pages' places."""
    g = case.generator()
    per_sequence = -(-case.context // case.page_size)
    pages = Pages(format=case.format, page_size=case.page_size, num_pages=case.b * per_sequence)
    pool = _pool(pages, INDEX_DIM, 1.0, g)
    q = encode_query(clamped_randn(g, case.b, case.n, case.heads, INDEX_DIM), case.format)
    rows = case.b * case.n
    weights = torch.randn(rows, case.heads, generator=g).to(case.weight_dtype)
    lengths = torch.full((case.b, case.n), case.context, dtype=torch.int32)
    problems = []
    for _ in range(2):
        table = torch.randperm(pages.num_pages, generator=g).reshape(case.b, per_sequence).to(torch.int32)
        keys = PagedKeys(pages.cache(pool), table, lengths, case.context)
        arguments: dict[str, Any] = {"q": q, "keys": keys, "weights": weights, "candidates": None}
        if isinstance(case, IndexTopkCase):
            arguments["k"] = case.k
        else:
            arguments["out_dtype"] = case.out_dtype
        problems.append(Problem(arguments, {"pool": pool.view(pages.num_pages, -1)}))
    return problems


def _store(case: StoreCase, footprint_bytes: int, count: int) -> list[Problem]:
    g = case.generator()
    pages = _sized(case.pages, 1.0, footprint_bytes, case.n)
    pool = pages.empty(0)
    x = clamped_randn(g, case.n, pages.format.elements).to(case.dtype)
    problems = []
    for _ in range(count):
        slots = torch.randperm(pages.num_slots, generator=g)[: case.n]
        arguments: dict[str, Any] = {"x": x, "cache": pages.cache(pool), "slots": slots.to(case.integers)}
        rows = _flat_rows(pages.format, pool)
        problems.append(Problem(arguments, {"x": x, "slots": slots, "rows": rows, "pool": pool}))
    return problems


def _load(case: LoadCase, footprint_bytes: int, count: int) -> list[Problem]:
    g = case.generator()
    pages = _sized(case.pages, 1.0, footprint_bytes, 1)
    pool = _pool(pages, pages.format.elements, 1.0, g)
    out = case.empty_out(0)
    problems = []
    for _ in range(count):
        slots = torch.randint(0, pages.num_slots, case.shape, generator=g)
        arguments: dict[str, Any] = {"cache": pages.cache(pool), "slots": slots.to(case.integers), "out": out}
        problems.append(Problem(arguments, {"slots": slots.flatten(), "rows": _flat_rows(pages.format, pool)}))
    return problems
