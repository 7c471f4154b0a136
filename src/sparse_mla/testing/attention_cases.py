# SPDX-License-Identifier: Apache-2.0
"""Cases of `sparse_decode`, `sparse_prefill` and `merge_partials`.

Among them upstream's published decode matrix (page sizes, list widths, head counts, rows per sequence), dense scopes,
and each corner case by its name. Inputs follow upstream's recipe: queries randn clamped to +-1, keys 0.1 randn
clamped to +-1, scale 512 ** -0.55, sinks randn with some +-inf.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from ..caches import KVScope
from ..formats import BF16, HEAD_DIM, V41_FP4, V41_FP8, RecordFormat, decode, encode
from . import numeric
from .case import BENCH, FULL, POISON, Case, Problem, clamped_randn, pairs
from .pages import Pages

__all__ = [
    "DECODE_CASES",
    "MERGE_CASES",
    "PREFILL_CASES",
    "DecodeCase",
    "MergeCase",
    "PrefillCase",
    "Scope",
    "attend",
]

SOFTMAX_SCALE = HEAD_DIM**-0.55
KEY_SCALE = 0.1
FAR_SLOT = 2**31 - 1  # a stale entry behind topk_length
SELECTION_KEPT = 0.8


@dataclass(frozen=True, kw_only=True)
class Scope:
    """One scope of a decode case: the cache's geometry and what the lists hold."""

    pages: Pages = field(default_factory=Pages)
    topk: int = 128
    empty: float = 0.1  # share of -1, anywhere in the list
    length: str = "none"  # none | random | zero | full | beyond | some_zero
    # random | dense: slots 0, 1, 2, ... | duplicates | window: consecutive slots, one further each row
    # | selection: ascending, as selected by consecutive tokens: each row keeps SELECTION_KEPT of the one before
    order: str = "random"
    tail: str = "slots"  # what lies behind the length: slots | wild: far outside the cache


def attend(
    q: torch.Tensor, keys: torch.Tensor, softmax_scale: float, attn_sink: torch.Tensor | None, exact: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One row, from the definition: q [h, d], keys [n, d] -> (out [h, d], lse [h], max logit [h]).

    exact: float64 throughout. Otherwise as a user writes it in torch: float32 logits of bfloat16 operands, P rounded
    to bfloat16.
    """
    dtype = torch.float64 if exact else torch.float32
    h, n = q.shape[0], keys.shape[0]
    if n == 0:
        infinity = torch.full((h,), float("inf"), dtype=dtype)
        return torch.zeros(q.shape, dtype=dtype), infinity, -infinity
    keys = keys.to(dtype)
    logits = (q.to(dtype) @ keys.T) * softmax_scale
    peak = logits.max(dim=1).values
    weights = (logits - peak[:, None]).exp()
    total = weights.sum(dim=1)
    denominator = total if attn_sink is None else total + (attn_sink.to(dtype) - peak).exp()
    if not exact:
        weights = weights.to(torch.bfloat16).to(dtype)
    return (weights @ keys) / denominator[:, None], peak + total.log(), peak


def make_sink(kind: str, heads: int, generator: torch.Generator) -> torch.Tensor | None:
    """none, finite, mixed (every third head -inf, every fifth +inf), plus_inf, minus_inf, or large (+-80)."""
    if kind == "none":
        return None
    sink = torch.randn(heads, generator=generator)
    if kind == "mixed":
        sink[1::3] = float("-inf")
        sink[2::5] = float("inf")
    elif kind in ("plus_inf", "minus_inf"):
        sink.fill_(float("inf") if kind == "plus_inf" else float("-inf"))
    elif kind == "large":
        sink = torch.where(torch.arange(heads) % 2 == 0, 80.0, -80.0)
    return sink


def make_lengths(kind: str, n: int, topk: int, generator: torch.Generator) -> torch.Tensor | None:
    """[n] int32 lengths of lists of `topk` columns, or None."""
    if kind == "none":
        return None
    if kind == "random":
        return torch.randint(0, topk + 1, (n,), generator=generator, dtype=torch.int32)
    if kind == "some_zero":
        lengths = torch.randint(1, topk + 1, (n,), generator=generator, dtype=torch.int32)
        lengths[::2] = 0
        return lengths
    value = {"zero": 0, "full": topk, "beyond": topk + 7}[kind]
    return torch.full((n,), value, dtype=torch.int32)


def make_lists(scope: Scope, b: int, s_q: int, generator: torch.Generator) -> torch.Tensor:
    """[b, s_q, topk] int32 slots, some -1."""
    shape, num_slots = (b, s_q, scope.topk), scope.pages.num_slots
    if scope.order == "dense":
        return torch.arange(scope.topk, dtype=torch.int32).expand(shape).clone()
    if scope.order == "window":
        start = torch.randint(0, num_slots - scope.topk - s_q + 1, (b, 1, 1), generator=generator)
        row = torch.arange(s_q)[None, :, None]
        return (start + row + torch.arange(scope.topk)).to(torch.int32)
    if scope.order == "selection":
        rows = [torch.randint(0, num_slots, (b, 1, scope.topk), generator=generator)]
        for _ in range(1, s_q):
            fresh = torch.randint(0, num_slots, rows[0].shape, generator=generator)
            kept = torch.rand(rows[0].shape, generator=generator) < SELECTION_KEPT
            rows.append(torch.where(kept, rows[-1], fresh))
        return torch.cat(rows, dim=1).sort(dim=-1).values.to(torch.int32)
    spread = num_slots if scope.order == "random" else max(1, min(num_slots, scope.topk // 8))
    indices = torch.randint(0, spread, shape, generator=generator, dtype=torch.int32)
    if scope.empty > 0:
        indices[torch.rand(shape, generator=generator) < scope.empty] = -1
    return indices


@dataclass(frozen=True, kw_only=True)
class DecodeCase(Case):
    """b sequences, s_q rows each, h_q heads, one or two scopes."""

    op: ClassVar[str] = "sparse_decode"

    b: int = 2
    s_q: int = 1
    h_q: int = 8
    scopes: tuple[Scope, ...] = (Scope(),)
    sink: str = "none"
    softmax_scale: float | None = SOFTMAX_SCALE
    out_dtype: torch.dtype = torch.bfloat16
    strided: bool = False  # q and indices are views of wider tensors
    one_sequence: bool = False  # the rows are one sequence's: wide lists are prefixes of one another

    def build(self, poison: int = POISON) -> Problem:
        g = self.generator()
        q = clamped_randn(g, self.b, self.s_q, self.h_q, HEAD_DIM)
        given, tables, positions, valid = [], [], [], []
        for scope in self.scopes:
            indices = make_lists(scope, self.b, self.s_q, g)
            length = make_lengths(scope.length, self.b, scope.topk, g)
            visible = indices >= 0
            if length is not None:
                behind = (torch.arange(scope.topk) >= length[:, None, None]).expand(indices.shape)
                visible &= ~behind
                if scope.tail == "wild":
                    indices[behind] = FAR_SLOT
            slots, position = torch.unique(indices[visible], return_inverse=True)
            pool = scope.pages.empty(poison)
            records = encode(clamped_randn(g, slots.numel(), HEAD_DIM, scale=KEY_SCALE), scope.pages.format,
                             e4m3_max=scope.pages.e4m3_max)  # fmt: skip
            scope.pages.write(pool, slots, records)
            table = decode(records, scope.pages.format)
            where = torch.full(indices.shape, -1, dtype=torch.int64)
            where[visible] = position
            given.append(KVScope(scope.pages.cache(pool), indices, length))
            tables.append(table)
            positions.append(where.flatten(0, 1))
            valid.append(visible.flatten(0, 1))
        if self.strided:
            q = _inside_wider(q)
            given = [KVScope(s.cache, _inside_wider(s.indices), s.topk_length) for s in given]
        arguments: dict[str, Any] = {
            "q": q,
            "scopes": given,
            "softmax_scale": self.softmax_scale,
            "attn_sink": make_sink(self.sink, self.h_q, g),
            "out_dtype": self.out_dtype,
            "one_sequence": self.one_sequence,
        }
        return Problem(arguments, {"tables": tables, "positions": positions, "valid": valid})

    def expected(self, problem: Problem) -> Any:
        return self.call(problem._replace(arguments=problem.arguments | {"out_dtype": torch.float64}), "reference")

    def oracle(self, problem: Problem) -> Any:
        return self._by_definition(problem, exact=True)

    def plain(self, problem: Problem) -> Any:
        return self._by_definition(problem, exact=False)

    def _by_definition(self, problem: Problem, exact: bool) -> tuple[torch.Tensor, torch.Tensor]:
        q, sink = problem.arguments["q"], problem.arguments["attn_sink"]
        scale = HEAD_DIM**-0.5 if self.softmax_scale is None else self.softmax_scale
        truth = problem.truth
        rows = q.reshape(self.b * self.s_q, self.h_q, HEAD_DIM)
        dtype = torch.float64 if exact else self.out_dtype
        out = torch.empty(rows.shape, dtype=dtype)
        lse = torch.empty(rows.shape[:2], dtype=torch.float64 if exact else torch.float32)
        for i, row in enumerate(rows):
            keys = [t[p[i][v[i]]] for t, p, v in zip(truth["tables"], truth["positions"], truth["valid"], strict=True)]
            result = attend(row, torch.cat(keys), scale, sink, exact)
            out[i], lse[i] = result[0].to(dtype), result[1]
        return out.reshape(q.shape), lse.reshape(self.b, self.s_q, self.h_q).transpose(1, 2)

    def compare(self, actual: Any, expected: Any, plain: Any, ratio: float) -> list[str]:
        out, lse = actual
        return judge_attention(
            out,
            lse,
            expected,
            plain,
            ratio,
            self.out_dtype,
            numeric.DECODE_OUT,
            numeric.DECODE_LSE,
            lse.transpose(1, 2),
        )

    def compare_oracle(self, expected: Any, oracle: Any, plain: Any) -> list[str]:
        return _agree(expected, oracle, ("out", "lse"))

    @property
    def keys_per_row(self) -> int:
        return sum(scope.topk for scope in self.scopes)

    @property
    def flops(self) -> int:
        return 4 * HEAD_DIM * self.h_q * self.b * self.s_q * self.keys_per_row

    @property
    def nbytes(self) -> int:
        rows = self.b * self.s_q
        records = sum(scope.topk * (scope.pages.format.record_bytes + 4) for scope in self.scopes)
        return rows * (records + self.h_q * (HEAD_DIM * (2 + self.out_dtype.itemsize) + 4))


def _agree(expected: Any, oracle: Any, names: tuple[str, ...]) -> list[str]:
    """Two float64 derivations; statistics are float32 at the end."""
    reasons = numeric.within_error(names[0], expected[0], oracle[0], 1e-12)
    for name, ours, theirs in zip(names[1:], tuple(expected)[1:], oracle[1:], strict=True):
        reasons += numeric.by_element(name, ours, theirs, numeric.Rule(1e-6, 1e-6))
    return reasons


def judge_attention(
    out: torch.Tensor,
    lse: torch.Tensor,
    expected: Any,
    plain: Any,
    ratio: float,
    out_dtype: torch.dtype,
    out_rule: numeric.Rule,
    lse_rule: numeric.Rule,
    row_lse: torch.Tensor,
) -> list[str]:
    """The rules of both attention operators; `row_lse` is lse in the order of out's rows and heads."""
    reasons = []
    if out.dtype != out_dtype:
        reasons.append(f"out: dtype {out.dtype}, expected {out_dtype}")
    if lse.dtype != torch.float32:
        reasons.append(f"lse: dtype {lse.dtype}, expected torch.float32")
    reasons += numeric.by_element("lse", lse, expected[1], lse_rule)
    reasons += numeric.by_element("out", out, expected[0], out_rule)
    reasons += numeric.within_plain("out", out, expected[0], plain[0], ratio=ratio or numeric.EXACT_RATIO)
    empty = torch.isposinf(row_lse)
    if not reasons and bool((out[empty] != 0).any()):
        reasons.append("out: a row without a valid slot must be exactly 0")
    return reasons


def _inside_wider(x: torch.Tensor) -> torch.Tensor:
    """The same values as a view into a tensor one element larger along the second dimension."""
    wider = x.new_zeros(x.shape[0], x.shape[1] + 1, *x.shape[2:])
    wider[:, 1:] = x
    return wider[:, 1:]


# --- the lists -------------------------------------------------------------------------------------------------------

PAGE_SIZES = (1, 2, 5, 53, 61, 64, 69, 123, 134, 576)
TOPKS = (64, 100, 128, 512, 576, 2048)
ROWS_PER_SEQUENCE = (1, 2, 3, 4, 5, 6)
HEADS = (1, 2, 3, 8, 11, 16, 64, 128)
FORMAT_PAIRS: dict[str, tuple[RecordFormat, ...]] = {
    "fp8": (V41_FP8,),
    "fp8_fp8": (V41_FP8, V41_FP8),
    "fp8_fp4": (V41_FP8, V41_FP4),
}


def _pages(fmt: RecordFormat, page_size: int, topk: int, **options: Any) -> Pages:
    """Room for about twice the list, three pages at least."""
    return Pages(format=fmt, page_size=page_size, num_pages=max(3, -(-2 * topk // page_size)), **options)


def _scope(fmt: RecordFormat, page_size: int = 64, topk: int = 128, **options: Any) -> Scope:
    pages = {
        k: options.pop(k) for k in ("layout", "e4m3_max", "padding_bytes", "region_offset", "bare") if k in options
    }
    return Scope(pages=_pages(fmt, page_size, topk, **pages), topk=topk, **options)


def _upstream(
    formats: str,
    page: int,
    topk: int,
    extra_page: int,
    extra_topk: int,
    s_q: int,
    h_q: int,
    b: int,
    tags: tuple[str, ...],
) -> DecodeCase:
    number = PAGE_SIZES.index(page) + TOPKS.index(topk) + s_q
    main = _scope(V41_FP8, page, topk, length=("none", "random", "some_zero")[number % 3], bare=number % 2 == 0)
    scopes = [main]
    name = f"upstream-{formats}-p{page}-k{topk}"
    if len(FORMAT_PAIRS[formats]) == 2:
        length = ("random", "none")[number % 2]
        extra = _scope(FORMAT_PAIRS[formats][1], extra_page, extra_topk, length=length, tail="wild")
        scopes.append(extra)
        name += f"-xp{extra_page}-xk{extra_topk}"
    return DecodeCase(
        name=f"{name}-b{b}-s{s_q}-h{h_q}",
        tags=("upstream", *tags),
        b=b,
        s_q=s_q,
        h_q=h_q,
        scopes=tuple(scopes),
        sink=("none", "mixed", "finite")[(number + h_q) % 3],
    )


def _upstream_quick() -> Iterator[DecodeCase]:
    """Every pair of page size, list width, rows, heads and formats; the second scope's page and width run along."""
    axes = {"page": PAGE_SIZES, "h_q": HEADS, "topk": TOPKS, "s_q": ROWS_PER_SEQUENCE, "formats": tuple(FORMAT_PAIRS)}
    for number, chosen in enumerate(pairs(axes)):
        heavy = chosen["h_q"] * chosen["topk"] * chosen["s_q"] > 2**18
        yield _upstream(
            chosen["formats"],
            chosen["page"],
            chosen["topk"],
            PAGE_SIZES[(PAGE_SIZES.index(chosen["page"]) + number) % len(PAGE_SIZES)],
            TOPKS[(TOPKS.index(chosen["topk"]) + number) % (len(TOPKS) - 1)],
            chosen["s_q"],
            chosen["h_q"],
            1 if heavy or number % 2 else 2,
            (),
        )


def _upstream_full() -> Iterator[DecodeCase]:
    """The product of formats, page sizes, list widths and heads, the other axes running along; and the widest
    batches."""
    for number, (formats, page, topk, h_q) in enumerate(itertools.product(FORMAT_PAIRS, PAGE_SIZES, TOPKS, HEADS)):
        extra_page = PAGE_SIZES[(number * 7 + 3) % len(PAGE_SIZES)]
        extra_topk = TOPKS[(number * 5 + 1) % len(TOPKS)]
        s_q = ROWS_PER_SEQUENCE[number % len(ROWS_PER_SEQUENCE)]
        yield _upstream(formats, page, topk, extra_page, extra_topk, s_q, h_q, 1 + number % 3, (FULL,))
    for h_q in (8, 64, 128):
        yield _upstream("fp8_fp4", 134, 128, 64, 512, 1, h_q, 321, (FULL,))


def _named() -> Iterator[DecodeCase]:
    ugly, layout, production = ("ugly",), ("layout",), ("production",)
    fp8, fp4 = V41_FP8, V41_FP4
    both = (_scope(fp8, 64, 128), _scope(fp4, 64, 192))
    yield DecodeCase(name="no-valid-slot", tags=ugly, scopes=(_scope(fp8, empty=2.0),), sink="mixed")
    yield DecodeCase(
        name="no-valid-slot-two-scopes", tags=ugly, scopes=(_scope(fp8, empty=2.0), _scope(fp4, empty=2.0))
    )
    yield DecodeCase(
        name="empty-main", tags=ugly, scopes=(_scope(fp8, length="zero"), _scope(fp4, topk=64)), sink="finite"
    )
    yield DecodeCase(
        name="empty-extra", tags=ugly, scopes=(_scope(fp8), _scope(fp4, topk=64, length="zero")), sink="mixed"
    )
    yield DecodeCase(name="some-rows-empty", tags=ugly, b=5, scopes=(_scope(fp8, length="some_zero", tail="wild"),))
    yield DecodeCase(name="length-beyond-topk", tags=ugly, scopes=(_scope(fp8, length="beyond"),))
    yield DecodeCase(name="wild-tail", tags=ugly, b=4, s_q=2, scopes=(_scope(fp8, length="random", tail="wild"),))
    yield DecodeCase(name="mostly-minus-one", tags=ugly, b=3, scopes=(_scope(fp8, empty=0.9), _scope(fp4, empty=0.95)))
    yield DecodeCase(name="duplicates", tags=ugly, scopes=(_scope(fp8, order="duplicates"),), sink="finite")
    yield DecodeCase(name="one-column", tags=ugly, b=3, scopes=(_scope(fp8, topk=1, empty=0.3),), sink="finite")
    yield DecodeCase(name="one-column-each", tags=ugly, scopes=(_scope(fp8, topk=1), _scope(fp4, topk=1)))
    yield DecodeCase(name="topk-not-of-a-tile", tags=ugly, scopes=(_scope(fp8, topk=97), _scope(fp4, topk=131)))
    yield DecodeCase(name="one-page", tags=ugly, scopes=(Scope(pages=Pages(num_pages=1), topk=100),))
    yield DecodeCase(name="one-slot", tags=ugly, scopes=(Scope(pages=Pages(num_pages=1, page_size=1), topk=9),))
    yield DecodeCase(name="page-of-one", tags=ugly, scopes=(_scope(fp8, 1), _scope(fp4, 1)))
    yield DecodeCase(name="zero-rows", tags=ugly, b=0)
    yield DecodeCase(name="zero-rows-per-sequence", tags=ugly, s_q=0)
    for sink in ("plus_inf", "minus_inf", "mixed", "large"):
        yield DecodeCase(name=f"sink-{sink.replace('_', '-')}", tags=ugly, b=3, h_q=11, sink=sink, scopes=both)
    yield DecodeCase(name="default-scale", scopes=both, softmax_scale=None)
    yield DecodeCase(name="negative-scale", tags=ugly, scopes=both, softmax_scale=-0.05)
    yield DecodeCase(name="zero-scale", tags=ugly, scopes=both, softmax_scale=0.0, sink="finite")
    yield DecodeCase(name="strided-arguments", tags=ugly, s_q=3, scopes=both, strided=True)
    yield DecodeCase(name="float32-out", h_q=16, scopes=both, out_dtype=torch.float32, sink="mixed")
    yield DecodeCase(
        name="float32-out-empty-rows", b=4, scopes=(_scope(fp8, length="some_zero"),), out_dtype=torch.float32
    )
    yield DecodeCase(name="planar", tags=layout, scopes=(_scope(fp8, layout="planar"), _scope(fp4, layout="planar")))
    yield DecodeCase(name="planar-and-interleaved", tags=layout, scopes=(_scope(fp8, layout="planar"), _scope(fp4)))
    yield DecodeCase(name="planar-page-of-one", tags=layout, scopes=(_scope(fp8, 1, layout="planar"),))
    padded = {"padding_bytes": 4224 - 64 * fp8.record_bytes % 4224}
    yield DecodeCase(name="padded-blocks", tags=layout, scopes=(_scope(fp8, **padded), _scope(fp4, padding_bytes=96)))
    yield DecodeCase(
        name="padded-blocks-planar", tags=layout, scopes=(_scope(fp8, 5, padding_bytes=32, layout="planar"),)
    )
    yield DecodeCase(name="padded-blocks-bare", tags=layout, scopes=(_scope(fp8, **padded, bare=True),))
    region = {"region_offset": 4352, "padding_bytes": 8448 + 36864}
    yield DecodeCase(name="pool-region", tags=layout, scopes=(_scope(fp8, 134), _scope(fp4, **region)), sink="finite")
    yield DecodeCase(name="pool-region-planar", tags=layout, scopes=(_scope(fp4, layout="planar", **region),))
    odd = {"region_offset": 4356, "padding_bytes": 68}
    yield DecodeCase(name="pool-region-odd-offset", tags=layout, scopes=(_scope(fp8, 5, **odd), _scope(fp4, 5, **odd)))
    yield DecodeCase(name="cap-224", scopes=(_scope(fp8, e4m3_max=224), _scope(fp4, e4m3_max=224)))
    yield DecodeCase(name="cap-224-planar", tags=layout, scopes=(_scope(fp8, e4m3_max=224, layout="planar"),))
    yield DecodeCase(name="fp4-alone", scopes=(_scope(fp4),), h_q=16)
    yield DecodeCase(name="fp4-fp8", scopes=(_scope(fp4), _scope(fp8, topk=64)))
    yield DecodeCase(name="bf16", scopes=(_scope(BF16),), h_q=16, sink="finite")
    yield DecodeCase(name="bf16-fp4", scopes=(_scope(BF16, 5), _scope(fp4, 53)))
    yield DecodeCase(name="bf16-padded", tags=layout, scopes=(_scope(BF16, 3, padding_bytes=64),))
    one = ("one-sequence",)
    yield DecodeCase(name="one-sequence-chunk", tags=(*ugly, *one), b=1, s_q=16, scopes=both, sink="mixed",
                     one_sequence=True)  # fmt: skip
    yield DecodeCase(name="one-sequence-duplicates", tags=(*ugly, *one), b=1, s_q=16, h_q=11, sink="finite",
                     scopes=(_scope(fp8, order="duplicates"),), one_sequence=True)  # fmt: skip
    prefixes = Scope(
        pages=Pages(format=fp4, page_size=64, num_pages=20), topk=1100, order="dense", length="random", tail="wild"
    )
    yield DecodeCase(name="one-sequence-prefixes", tags=(*ugly, *one), b=6, scopes=(_scope(fp8), prefixes),
                     sink="mixed", one_sequence=True)  # fmt: skip
    yield DecodeCase(name="one-sequence-prefixes-alone", tags=one, b=3, h_q=33, scopes=(prefixes,), one_sequence=True)
    for h_q in HEADS:
        yield DecodeCase(name=f"heads-{h_q}", h_q=h_q, b=1, s_q=2, scopes=both, sink="mixed")
    yield DecodeCase(name="heads-130", h_q=130, b=1, scopes=both)
    for columns, h_q, tags in ((16384, 8, ()), (16384, 64, (FULL,)), (65536, 1, ()), (65536, 64, (FULL,))):
        dense = Scope(
            pages=Pages(format=fp4, page_size=128, num_pages=-(-columns // 128)),
            topk=columns,
            order="dense",
            length="random",
            tail="wild",
        )
        scopes = (_scope(fp8, 134, 128), dense)
        yield DecodeCase(name=f"dense-{columns}-h{h_q}", tags=("dense", *tags), b=2, h_q=h_q, scopes=scopes)
    window = Scope(pages=Pages(page_size=134, num_pages=5), topk=128, order="window")
    compressed = Scope(pages=Pages(format=fp4, page_size=64, num_pages=64), topk=512, empty=0.0)
    for b, s_q, h_q, tags in ((1, 1, 64, ()), (2, 6, 8, ()), (1, 6, 64, ()), (4, 1, 128, ()), (64, 4, 64, (FULL,)),
                              (128, 1, 64, (FULL,)), (512, 4, 128, (BENCH,))):  # fmt: skip
        name = f"v41-flash-b{b}-s{s_q}-h{h_q}"
        yield DecodeCase(
            name=name, tags=production + tags, b=b, s_q=s_q, h_q=h_q, scopes=(window, compressed), sink="finite"
        )
    selection = Scope(pages=Pages(format=fp4, page_size=64, num_pages=64), topk=192, empty=0.0, order="selection")
    for h_q, s_q, length in ((1, 6, "none"), (3, 2, "random"), (8, 6, "none"), (5, 11, "none")):
        yield DecodeCase(name=f"verify-s{s_q}-h{h_q}", tags=production, s_q=s_q, h_q=h_q, sink="finite",
                         scopes=(window, replace(selection, length=length)))  # fmt: skip
    eight = (_scope(fp8, 134, 640, empty=0.0),)
    yield DecodeCase(name="v41-640-fp8", tags=production, b=2, h_q=64, scopes=eight, sink="finite")


def _distinct(cases: Iterator[Case]) -> Iterator[Any]:
    seen = set()
    for case in cases:
        if case.name not in seen:
            seen.add(case.name)
            yield case


def _listed(*sources: Callable[[], Iterator[Any]]) -> tuple[Any, ...]:
    return tuple(_distinct(itertools.chain.from_iterable([source() for source in sources])))


DECODE_CASES: tuple[DecodeCase, ...] = _listed(_named, _upstream_quick, _upstream_full)


# --- prefill ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PrefillCase(Case):
    """s_q rows over s_kv gathered bfloat16 keys. Unselected keys are NaN, and padding indices lie on both sides of
    the buffer."""

    op: ClassVar[str] = "sparse_prefill"

    s_q: int = 4
    s_kv: int = 256
    h_q: int = 8
    topk: int = 128
    empty: float = 0.1
    length: str = "none"
    sink: str = "none"
    softmax_scale: float | None = SOFTMAX_SCALE
    out_dtype: torch.dtype = torch.bfloat16
    key_scale: float = KEY_SCALE
    strided: bool = False  # kv rows lie in wider rows

    def build(self, poison: int = POISON) -> Problem:
        g = self.generator()
        q = clamped_randn(g, self.s_q, self.h_q, HEAD_DIM)
        shape = (self.s_q, 1, self.topk)
        indices = torch.randint(0, max(1, self.s_kv), shape, generator=g, dtype=torch.int32)
        padding = torch.tensor([-1, -5, self.s_kv, 2147480000, -(2**31)], dtype=torch.int32)
        chosen = padding[torch.randint(0, padding.numel(), shape, generator=g)]
        indices = torch.where(torch.rand(shape, generator=g) < (1.1 if self.s_kv == 0 else self.empty), chosen, indices)
        length = make_lengths(self.length, self.s_q, self.topk, g)
        visible = (indices >= 0) & (indices < self.s_kv)
        if length is not None:
            visible &= torch.arange(self.topk) < length[:, None, None]
        width = 2 * HEAD_DIM if self.strided else HEAD_DIM
        # The poison is a bfloat16 pattern: 0xFFFF is NaN.
        kv = torch.full((self.s_kv, 1, width), poison, dtype=torch.uint8).repeat_interleave(2, -1).view(torch.bfloat16)
        kv = kv[..., :HEAD_DIM]
        used = torch.unique(indices[visible]).long()
        kv[used, 0] = clamped_randn(g, used.numel(), HEAD_DIM, scale=self.key_scale)
        arguments: dict[str, Any] = {
            "q": q,
            "kv": kv,
            "indices": indices,
            "softmax_scale": self.softmax_scale,
            "attn_sink": make_sink(self.sink, self.h_q, g),
            "topk_length": length,
            "out_dtype": self.out_dtype,
        }
        return Problem(arguments, {"visible": visible})

    def expected(self, problem: Problem) -> Any:
        return self.call(problem._replace(arguments=problem.arguments | {"out_dtype": torch.float64}), "reference")

    def oracle(self, problem: Problem) -> Any:
        return self._by_definition(problem, exact=True)

    def plain(self, problem: Problem) -> Any:
        return self._by_definition(problem, exact=False)

    def _by_definition(self, problem: Problem, exact: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        given, visible = problem.arguments, problem.truth["visible"]
        scale = HEAD_DIM**-0.5 if self.softmax_scale is None else self.softmax_scale
        out = torch.empty(given["q"].shape, dtype=torch.float64 if exact else self.out_dtype)
        top = torch.empty(out.shape[:2], dtype=torch.float64 if exact else torch.float32)
        lse = torch.empty_like(top)
        for i in range(self.s_q):
            keys = given["kv"][given["indices"][i, 0][visible[i, 0]].long(), 0]
            result = attend(given["q"][i], keys, scale, given["attn_sink"], exact)
            out[i], lse[i], top[i] = result[0].to(out.dtype), result[1], result[2]
        return out, top, lse

    def compare(self, actual: Any, expected: Any, plain: Any, ratio: float) -> list[str]:
        out, top, lse = actual
        rule = numeric.PREFILL_STATS if self.key_scale <= KEY_SCALE else numeric.PREFILL_WIDE_STATS
        reasons = numeric.by_element("max_logits", top, expected[1], rule)
        return reasons + judge_attention(
            out, lse, (expected[0], expected[2]), plain, ratio, self.out_dtype, numeric.PREFILL_OUT, rule, lse
        )

    def compare_oracle(self, expected: Any, oracle: Any, plain: Any) -> list[str]:
        return _agree(expected, oracle, ("out", "max_logits", "lse"))

    @property
    def flops(self) -> int:
        return 4 * HEAD_DIM * self.h_q * self.s_q * self.topk

    @property
    def nbytes(self) -> int:
        per_row = self.topk * (2 * HEAD_DIM + 4) + self.h_q * (HEAD_DIM * (2 + self.out_dtype.itemsize) + 8)
        return self.s_q * per_row


def _prefill() -> Iterator[PrefillCase]:
    ugly = ("ugly",)
    yield PrefillCase(name="no-valid-index", tags=ugly, empty=2.0, sink="mixed")
    yield PrefillCase(name="no-keys", tags=ugly, s_kv=0)
    yield PrefillCase(name="zero-rows", tags=ugly, s_q=0)
    yield PrefillCase(name="one-key", tags=ugly, s_kv=1, topk=1, empty=0.0, sink="finite")
    yield PrefillCase(name="some-rows-empty", tags=ugly, s_q=6, length="some_zero", sink="mixed")
    yield PrefillCase(name="length-beyond-topk", tags=ugly, length="beyond")
    yield PrefillCase(name="random-lengths", s_q=8, length="random", topk=640, s_kv=1000)
    yield PrefillCase(name="mostly-padding", tags=ugly, s_q=5, empty=0.95)
    yield PrefillCase(name="topk-not-of-a-tile", tags=ugly, topk=131)
    yield PrefillCase(name="strided-kv", tags=ugly, strided=True)
    yield PrefillCase(name="default-scale", softmax_scale=None, sink="finite")
    yield PrefillCase(name="float32-out", out_dtype=torch.float32, h_q=16, sink="mixed")
    for sink in ("plus_inf", "minus_inf", "mixed", "large"):
        yield PrefillCase(name=f"sink-{sink.replace('_', '-')}", tags=ugly, h_q=11, sink=sink)
    for h_q in HEADS:
        yield PrefillCase(name=f"heads-{h_q}", h_q=h_q, s_q=2, sink="finite")
    yield PrefillCase(name="v41-flash-chunk-16", tags=("production",), s_q=16, s_kv=4096, h_q=64, topk=640, empty=0.05)
    yield PrefillCase(name="dense-2048", tags=("dense",), s_q=4, s_kv=3000, topk=2048, length="random", h_q=16)
    axes = {
        "h_q": HEADS,
        "topk": (64, 128, 192, 640, 2048),
        "s_kv": (1, 127, 128, 1000, 8192),
        "length": ("none", "random", "some_zero"),
        "sink": ("none", "finite", "mixed"),
        "s_q": (1, 3, 17),
    }
    for a in pairs(axes):
        name = f"upstream-q{a['s_q']}-kv{a['s_kv']}-k{a['topk']}-h{a['h_q']}-{a['length']}-{a['sink']}"
        heavy = a["s_q"] * a["topk"] * a["h_q"] > 2**19
        yield PrefillCase(name=name, tags=("upstream", FULL) if heavy else ("upstream",), **a)
    for s_q, h_q in ((62, 64), (62, 128), (213, 64), (213, 128)):
        name = f"upstream-q{s_q}-kv8192-k2048-h{h_q}"
        yield PrefillCase(name=name, tags=("upstream", FULL), s_q=s_q, s_kv=8192, topk=2048, h_q=h_q, sink="mixed")
    yield PrefillCase(
        name="v41-flash-4096",
        tags=("production", BENCH),
        s_q=4096,
        s_kv=8192,
        h_q=64,
        topk=640,
        empty=0.0,
        sink="finite",
    )


PREFILL_CASES: tuple[PrefillCase, ...] = _listed(_prefill)


# --- merging of partial results --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MergeCase(Case):
    """`parts` disjoint key sets of `keys` keys each (a share of them empty), attended apart and merged."""

    op: ClassVar[str] = "merge_partials"

    parts: int = 2
    b: int = 2
    s_q: int = 1
    h_q: int = 8
    keys: int = 40
    empty: float = 0.0  # share of (part, row) pairs without a key
    sink: str = "none"
    part_dtype: torch.dtype = torch.float32
    out_dtype: torch.dtype = torch.bfloat16
    prefill: bool = False  # [s_q, h_q, d] and [s_q, h_q] as sparse_prefill gives them

    def build(self, poison: int = POISON) -> Problem:
        g = self.generator()
        q = clamped_randn(g, self.b * self.s_q, self.h_q, HEAD_DIM)
        outs, lses, keys_of = [], [], []
        for _ in range(self.parts):
            out = torch.full(q.shape, float("nan"), dtype=self.part_dtype)  # an empty part's out must not be read
            lse = torch.full(q.shape[:2], float("inf"))
            keys_of_part = []
            for i, row in enumerate(q):
                present = not bool(torch.rand((), generator=g) < self.empty)
                keys = clamped_randn(g, self.keys if present else 0, HEAD_DIM, scale=KEY_SCALE)
                keys_of_part.append(keys)
                if present:
                    result = attend(row, keys, SOFTMAX_SCALE, None, exact=True)
                    out[i], lse[i] = result[0].to(self.part_dtype), result[1].float()
            keys_of.append(keys_of_part)
            outs.append(out if self.prefill else out.reshape(self.b, self.s_q, self.h_q, HEAD_DIM))
            lses.append(lse if self.prefill else lse.reshape(self.b, self.s_q, self.h_q).transpose(1, 2))
        arguments: dict[str, Any] = {
            "outs": outs,
            "lses": lses,
            "attn_sink": make_sink(self.sink, self.h_q, g),
            "out_dtype": self.out_dtype,
        }
        return Problem(arguments, {"q": q, "keys": keys_of})

    def expected(self, problem: Problem) -> Any:
        return self.call(problem._replace(arguments=problem.arguments | {"out_dtype": torch.float64}), "reference")

    def oracle(self, problem: Problem) -> Any:
        """Attention over the union of the key sets."""
        q, keys_of = problem.truth["q"], problem.truth["keys"]
        out, lse = torch.empty(q.shape, dtype=torch.float64), torch.empty(q.shape[:2], dtype=torch.float64)
        for i, row in enumerate(q):
            keys = torch.cat([part[i] for part in keys_of])
            out[i], lse[i], _ = attend(row, keys, SOFTMAX_SCALE, problem.arguments["attn_sink"], exact=True)
        if self.prefill:
            return out, lse
        shape = (self.b, self.s_q, self.h_q)
        return out.reshape(*shape, HEAD_DIM), lse.reshape(shape).transpose(1, 2)

    def plain(self, problem: Problem) -> Any:
        """Weights and sum in bfloat16, as tensors of that type give it."""
        lses = torch.stack(problem.arguments["lses"])
        outs = torch.stack(problem.arguments["outs"])
        if not self.prefill:
            lses = lses.transpose(2, 3)
        lses = torch.where(torch.isinf(lses), -torch.inf, lses)
        lse = torch.logsumexp(lses, dim=0)
        sink = problem.arguments["attn_sink"]
        share = torch.where(torch.isinf(lses), 0.0, (lses - lse).exp())
        if sink is not None:
            share = share * torch.where(torch.isinf(lse), 0.0, torch.sigmoid(lse - sink))
        out = (share.to(torch.bfloat16)[..., None] * outs.to(torch.bfloat16).nan_to_num()).sum(
            dim=0, dtype=torch.bfloat16
        )
        lse = torch.where(torch.isinf(lse), torch.inf, lse)
        return out, lse if self.prefill else lse.transpose(1, 2)

    def compare(self, actual: Any, expected: Any, plain: Any, ratio: float) -> list[str]:
        out, lse = actual
        row_lse = lse if self.prefill else lse.transpose(1, 2)
        rules = numeric.DECODE_OUT, numeric.DECODE_LSE
        return judge_attention(out, lse, expected, plain, ratio, self.out_dtype, *rules, row_lse)

    def compare_oracle(self, expected: Any, oracle: Any, plain: Any) -> list[str]:
        rounding = 1e-6 if self.part_dtype == torch.float32 else 4e-3  # of the parts
        out = numeric.within_error("out", expected[0], oracle[0], rounding)
        return out + numeric.by_element("lse", expected[1], oracle[1], numeric.DECODE_LSE)

    @property
    def flops(self) -> int:
        return 2 * self.parts * self.b * self.s_q * self.h_q * HEAD_DIM

    @property
    def nbytes(self) -> int:
        per_head = self.parts * (HEAD_DIM * self.part_dtype.itemsize + 4) + HEAD_DIM * self.out_dtype.itemsize + 4
        return self.b * self.s_q * self.h_q * per_head


def _merge() -> Iterator[MergeCase]:
    yield MergeCase(name="two-parts")
    yield MergeCase(name="one-part", parts=1, sink="finite")
    yield MergeCase(name="eight-parts", parts=8, s_q=3, h_q=16, sink="mixed")
    yield MergeCase(name="empty-parts", tags=("ugly",), parts=3, b=8, empty=0.5, sink="mixed")
    yield MergeCase(name="all-empty", tags=("ugly",), parts=2, empty=2.0, sink="finite")
    yield MergeCase(name="zero-rows", tags=("ugly",), b=0)
    yield MergeCase(name="prefill-shapes", prefill=True, s_q=5, sink="finite", empty=0.2)
    yield MergeCase(name="bf16-parts", part_dtype=torch.bfloat16, parts=3, h_q=64)
    yield MergeCase(name="float32-out", out_dtype=torch.float32, parts=4, empty=0.2, sink="plus_inf")
    yield MergeCase(name="one-head", h_q=1, b=7, parts=2, sink="minus_inf")
    yield MergeCase(name="v41-flash", tags=("production",), b=4, s_q=6, h_q=64, parts=4, sink="finite")


MERGE_CASES: tuple[MergeCase, ...] = _listed(_merge)
