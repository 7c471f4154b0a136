# SPDX-License-Identifier: Apache-2.0
"""Cases of `index_logits`, `index_topk`, `topk` and `candidate_blocks`.

Pages are dealt to sequences at random, the table's columns past a context hold stale numbers, and every byte no
context covers is poison. Queries and keys are randn clamped to +-1 before they are quantized; weights are randn, so
some are negative.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..formats import (
    INDEX_DIM,
    INDEX_FP4,
    INDEX_FP8,
    INDEX_FP8_FP32,
    RecordFormat,
    decode,
    decode_query,
    encode,
    encode_query,
)
from ..ops.index_logits import Candidates, PagedKeys, RaggedKeys
from . import numeric
from .case import BENCH, FULL, POISON, Case, Problem, clamped_randn, pairs
from .pages import Pages

__all__ = [
    "CANDIDATE_CASES",
    "INDEX_LOGITS_CASES",
    "INDEX_TOPK_CASES",
    "TOPK_CASES",
    "CandidateCase",
    "IndexLogitsCase",
    "IndexTopkCase",
    "TopkCase",
]

STALE = (-1, 2**31 - 1, 998244353)  # what engines leave behind the pages of a context


def scores(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, exact: bool) -> torch.Tensor:
    """One row, from the definition: q [h, 128], keys [n, 128], weights [h] -> [n].

    exact: float64. Otherwise as tensors in bfloat16 give it: float32 dots, relu and products rounded to bfloat16,
    float32 sum."""
    dtype = torch.float64 if exact else torch.float32
    dots = (q.to(dtype) @ keys.to(dtype).T).relu()
    if not exact:
        dots = dots.to(torch.bfloat16).to(dtype)
    return (dots * weights.to(dtype)[:, None]).sum(dim=0)


@dataclass(frozen=True, kw_only=True)
class IndexLogitsCase(Case):
    """b sequences with n query rows each (ragged: b * n rows over one array of keys), h index heads."""

    op: ClassVar[str] = "index_logits"

    ragged: bool = False
    format: RecordFormat = INDEX_FP4
    b: int = 2
    n: int = 1
    heads: int = 32
    context: int = 200  # longest context; the rows' own lengths are drawn below it
    lengths: str = "random"  # random | full | zero | some_zero
    page_size: int = 64
    width: int | None = None  # columns of the result; None: as many as the table or the longest row has
    table_slack: int = 2  # table columns past the longest context
    sf_dtype: torch.dtype = torch.int32
    weight_dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype = torch.bfloat16
    padding_bytes: int = 0
    region_offset: int = 0
    bare: bool = False
    blocks: int = 0  # candidate blocks per row; 0: none
    block_size: int = 8
    origin: str = "row"

    def build(self, poison: int = POISON) -> Problem:
        g = self.generator()
        fmt, rows = self.format, self.b * self.n
        q_values = clamped_randn(g, self.b, self.n, self.heads, INDEX_DIM)
        q = encode_query(q_values, fmt, sf_dtype=self.sf_dtype)
        weights = torch.randn(rows, self.heads, generator=g).to(self.weight_dtype)
        if fmt is INDEX_FP8_FP32:  # the scale of such queries travels in the weights
            assert_sf = q.q_sf if q.q_sf is not None else torch.ones(self.b, self.n, self.heads)
            weights = (weights.float() * assert_sf.reshape(rows, self.heads)).to(self.weight_dtype)
            q = q._replace(q_sf=None)
        lengths = self._lengths(g)
        keys, tables = self._ragged(g, lengths, poison) if self.ragged else self._paged(g, lengths, poison)
        if self.ragged:
            q = q._replace(q_fp=q.q_fp.flatten(0, 1), q_sf=None if q.q_sf is None else q.q_sf.flatten(0, 1))
        starts = (
            keys.starts
            if isinstance(keys, RaggedKeys) and self.origin == "keys"
            else torch.zeros_like(lengths.flatten())
        )
        candidates = self._candidates(g, lengths.flatten(), starts)
        arguments: dict[str, Any] = {
            "q": q,
            "keys": keys,
            "weights": weights,
            "candidates": candidates,
            "out_dtype": self.out_dtype,
        }
        q_decoded = decode_query(q.q_fp, q.q_sf).reshape(rows, self.heads, INDEX_DIM)
        return Problem(arguments, {"q": q_decoded, "keys": tables, "lengths": lengths.flatten()})

    def _lengths(self, g: torch.Generator) -> torch.Tensor:
        """[b, n] contexts: rows of one sequence grow by one."""
        if self.lengths == "zero":
            return torch.zeros(self.b, self.n, dtype=torch.int32)
        last = torch.full((self.b, 1), self.context, dtype=torch.int32)
        if self.lengths != "full":
            last = torch.randint(1, self.context + 1, (self.b, 1), generator=g, dtype=torch.int32)
            if self.b:
                last[0] = self.context
        if self.lengths == "some_zero":
            last[1::2] = 0
        steps = torch.arange(self.n, dtype=torch.int32) - (self.n - 1)
        return (last + steps).clamp_(min=0)

    def _paged(self, g: torch.Generator, lengths: torch.Tensor, poison: int) -> tuple[PagedKeys, list[torch.Tensor]]:
        page = self.page_size
        longest = lengths.amax(dim=1) if self.b and self.n else torch.zeros(self.b, dtype=torch.int32)
        needed = [-(-int(x) // page) for x in longest]
        columns = max([1, *needed]) + self.table_slack
        num_pages = sum(needed) + 3
        pages = Pages(format=self.format, num_pages=num_pages, page_size=page, padding_bytes=self.padding_bytes,
                      region_offset=self.region_offset, bare=self.bare)  # fmt: skip
        pool = pages.empty(poison)
        dealt = torch.randperm(num_pages, generator=g, dtype=torch.int32)
        stale = torch.tensor(STALE, dtype=torch.int32)
        table = stale[torch.randint(0, len(STALE), (self.b, columns), generator=g)]
        tables = []
        for i, count in enumerate(needed):
            table[i, :count], dealt = dealt[:count], dealt[count:]
            entries = torch.arange(int(longest[i]))
            records = encode(clamped_randn(g, entries.numel(), INDEX_DIM), self.format)
            pages.write(pool, table[i, entries // page].long() * page + entries % page, records)
            tables.append(decode(records, self.format, dtype=torch.float64))
        keys = PagedKeys(pages.cache(pool), table, lengths, self.width)
        return keys, [tables[i] for i in range(self.b) for _ in range(self.n)]

    def _ragged(self, g: torch.Generator, lengths: torch.Tensor, poison: int) -> tuple[RaggedKeys, list[torch.Tensor]]:
        fmt, flat = self.format, lengths.flatten()
        total = int(flat.max() if flat.numel() else 0) + 37
        records = encode(clamped_randn(g, total, INDEX_DIM), fmt)
        starts = (
            torch.stack([torch.randint(0, total - int(x) + 1, (), generator=g) for x in flat]) if flat.numel() else flat
        )
        starts = starts.to(torch.int32)
        ends = starts + flat
        covered = torch.zeros(total, dtype=torch.bool)
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            covered[start:end] = True
        values = decode(records, fmt, dtype=torch.float64)
        records[~covered] = poison
        data, sf = records[:, : fmt.data_bytes].contiguous(), records[:, fmt.data_bytes :].contiguous()
        data = data.view(torch.int8) if fmt is INDEX_FP4 else data.view(torch.float8_e4m3fn)
        if fmt is INDEX_FP8_FP32:
            sf = sf.view(torch.float32).squeeze(-1)
        elif self.sf_dtype != torch.uint8:
            sf = sf.view(self.sf_dtype)
            sf = sf.squeeze(-1) if self.sf_dtype == torch.int32 else sf
        longest = int(flat.max()) if flat.numel() else 0
        keys = RaggedKeys(data, sf, starts, ends, longest if self.width is None else self.width)
        return keys, [values[s:e] for s, e in zip(starts.tolist(), ends.tolist(), strict=True)]

    def _candidates(self, g: torch.Generator, lengths: torch.Tensor, starts: torch.Tensor) -> Candidates | None:
        """Some of each row's blocks, its last one always among them."""
        if not self.blocks:
            return None
        chosen = torch.full((lengths.numel(), self.blocks), -1, dtype=torch.int32)
        for row, (length, start) in enumerate(zip(lengths.tolist(), starts.tolist(), strict=True)):
            first, last = start // self.block_size, -(-(start + length) // self.block_size) - 1
            if length:
                picks = first + torch.randperm(last - first, generator=g)[: self.blocks - 1].sort().values
                picks = torch.cat((picks, torch.tensor([last])))
                chosen[row, : picks.numel()] = picks.to(torch.int32)
        return Candidates(chosen, self.block_size, self.origin)

    def places(self, problem: Problem, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(result columns that hold a key, which of the row's keys each is)."""
        length = int(problem.truth["lengths"][row])
        candidates = problem.arguments["candidates"]
        if candidates is None:
            return torch.arange(length), torch.arange(length)
        blocks = candidates.blocks[row].long()
        start = int(problem.arguments["keys"].starts[row]) if self.origin == "keys" else 0
        entries = (blocks[:, None] * self.block_size + torch.arange(self.block_size) - start).flatten()
        held = (entries >= 0) & (entries < length) & (blocks >= 0).repeat_interleave(self.block_size)
        return held.nonzero()[:, 0], entries[held]

    def expected(self, problem: Problem) -> Any:
        return self.call(problem._replace(arguments=problem.arguments | {"out_dtype": torch.float64}), "reference")

    def oracle(self, problem: Problem) -> Any:
        return self._by_definition(problem, exact=True)

    def plain(self, problem: Problem) -> Any:
        return self._by_definition(problem, exact=False)

    def _by_definition(self, problem: Problem, exact: bool) -> torch.Tensor:
        truth, weights = problem.truth, problem.arguments["weights"]
        out = torch.full(
            (self.b * self.n, self.num_columns(problem)), -torch.inf, dtype=torch.float64 if exact else self.out_dtype
        )
        for row in range(out.shape[0]):
            columns, entries = self.places(problem, row)
            out[row, columns] = scores(truth["q"][row], truth["keys"][row][entries], weights[row], exact).to(out.dtype)
        return out

    def num_columns(self, problem: Problem) -> int:
        if self.blocks:
            return self.blocks * self.block_size
        if self.width is not None:
            return self.width
        if self.ragged:
            return int(problem.truth["lengths"].max()) if self.b * self.n else 0
        return int(problem.arguments["keys"].block_table.shape[1]) * self.page_size

    def compare(self, actual: Any, expected: Any, plain: Any, ratio: float) -> list[str]:
        wrong = [] if actual.dtype in (self.out_dtype, torch.float64) else [f"logits: dtype {actual.dtype}"]
        wrong += numeric.within_diff("logits", actual, expected, numeric.LOGITS_DIFF)
        return wrong + numeric.within_plain("logits", actual, expected, plain)

    def compare_oracle(self, expected: Any, oracle: Any, plain: Any) -> list[str]:
        # The reference multiplies by a key's one float32 scale last; a decoded key has it rounded in.
        return numeric.within_error("logits", expected, oracle, 1e-6 if self.format is INDEX_FP8_FP32 else 1e-12)

    @property
    def flops(self) -> int:
        columns = self.blocks * self.block_size or self.context
        return self.b * self.n * columns * self.heads * (2 * INDEX_DIM + 2)

    @property
    def nbytes(self) -> int:
        columns = self.blocks * self.block_size or self.context
        keys = (1 if self.ragged else self.b) * columns * self.format.record_bytes
        rows = self.b * self.n
        return keys + rows * (columns * self.out_dtype.itemsize + self.heads * (self.format.record_bytes + 2))


KEY_FORMATS = (INDEX_FP4, INDEX_FP8, INDEX_FP8_FP32)


def _index_logits() -> Iterator[IndexLogitsCase]:
    ugly = ("ugly",)
    for fmt in KEY_FORMATS:
        kind = fmt.name.removeprefix("INDEX_").lower().replace("_", "-")
        yield IndexLogitsCase(name=f"paged-{kind}", format=fmt)
        yield IndexLogitsCase(name=f"ragged-{kind}", format=fmt, ragged=True, b=3)
        yield IndexLogitsCase(name=f"paged-{kind}-verify", format=fmt, b=3, n=6, context=300)
        yield IndexLogitsCase(name=f"paged-{kind}-candidates", format=fmt, context=700, blocks=24)
        yield IndexLogitsCase(name=f"ragged-{kind}-candidates", format=fmt, ragged=True, context=700, blocks=24)
        yield IndexLogitsCase(name=f"ragged-{kind}-candidates-by-key", format=fmt, ragged=True, context=700, blocks=24,
                              origin="keys")  # fmt: skip
        yield IndexLogitsCase(name=f"paged-{kind}-zero-context", tags=ugly, format=fmt, lengths="zero", b=32, heads=4)
        yield IndexLogitsCase(name=f"paged-{kind}-some-zero", tags=ugly, format=fmt, lengths="some_zero", b=4)
        yield IndexLogitsCase(
            name=f"ragged-{kind}-some-zero", tags=ugly, format=fmt, ragged=True, lengths="some_zero", b=5
        )
        yield IndexLogitsCase(name=f"paged-{kind}-pool-region", tags=("layout",), format=fmt, region_offset=4352,
                              padding_bytes=18432)  # fmt: skip
        yield IndexLogitsCase(name=f"v41-flash-{kind}-6x8192", tags=("production",), format=fmt, b=1, n=6, context=8192,
                              page_size=64)  # fmt: skip
    yield IndexLogitsCase(name="bare-tensor", bare=True, padding_bytes=64)
    yield IndexLogitsCase(name="bare-tensor-fp8", bare=True, format=INDEX_FP8)
    yield IndexLogitsCase(name="page-of-one", tags=ugly, page_size=1, context=70)
    yield IndexLogitsCase(name="page-128", page_size=128, context=300)
    yield IndexLogitsCase(name="page-not-of-a-tile", tags=ugly, page_size=37, context=300)
    yield IndexLogitsCase(name="width-of-context", tags=ugly, context=50, width=50)
    yield IndexLogitsCase(name="width-beyond-table", tags=ugly, width=1000, table_slack=0)
    yield IndexLogitsCase(name="width-one", tags=ugly, context=1, width=1)
    yield IndexLogitsCase(name="no-rows", tags=ugly, b=0, width=64)
    yield IndexLogitsCase(name="ragged-width", ragged=True, b=4, width=256, format=INDEX_FP8)
    yield IndexLogitsCase(name="candidate-blocks-of-16", context=900, blocks=20, block_size=16)
    yield IndexLogitsCase(name="every-block-a-candidate", context=333, blocks=64, n=2)
    for sf_dtype in (torch.int16, torch.uint8):
        kind = str(sf_dtype).removeprefix("torch.")
        yield IndexLogitsCase(name=f"scales-{kind}", sf_dtype=sf_dtype)
        yield IndexLogitsCase(name=f"ragged-scales-{kind}", sf_dtype=sf_dtype, ragged=True, format=INDEX_FP8)
    yield IndexLogitsCase(name="float32-weights", weight_dtype=torch.float32)
    yield IndexLogitsCase(name="float32-out", out_dtype=torch.float32, format=INDEX_FP8)
    axes = {
        "heads": (1, 4, 32, 64, 128),
        "page_size": (1, 32, 61, 64, 128),
        "format": KEY_FORMATS,
        "n": (1, 2, 6),
        "context": (1, 63, 64, 65, 513),
        "b": (1, 3, 7),
        "lengths": ("random", "full", "some_zero"),
    }
    for a in pairs(axes):
        kind = a["format"].name.removeprefix("INDEX_").lower()
        name = f"pairs-{kind}-b{a['b']}-n{a['n']}-h{a['heads']}-p{a['page_size']}-c{a['context']}-{a['lengths']}"
        yield IndexLogitsCase(name=name, tags=("upstream",), **a)
    for b, n, heads in ((1, 1, 32), (1, 1, 64), (1, 6, 64), (1, 128, 32)):
        for fmt in (INDEX_FP4, INDEX_FP8):
            yield IndexLogitsCase(
                name=f"v41-flash-{fmt.name.removeprefix('INDEX_').lower()}-{b * n}x65536-h{heads}",
                tags=("production", FULL),
                b=b,
                n=n,
                format=fmt,
                heads=heads,
                context=65536,
                lengths="full",
            )


INDEX_LOGITS_CASES: tuple[IndexLogitsCase, ...] = tuple(_index_logits())


# --- index_topk ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class IndexTopkCase(IndexLogitsCase):
    """Scoring and selection in one call: bit-equal to `topk` over `index_logits` under the same backend."""

    op: ClassVar[str] = "index_topk"

    k: int = 64
    memory_limit: int | None = None

    def build(self, poison: int = POISON) -> Problem:
        problem = super().build(poison)
        problem.arguments.pop("out_dtype")
        problem.arguments.update(k=self.k)
        if self.memory_limit is not None:
            problem.arguments["memory_limit"] = self.memory_limit
        return problem

    def call(self, problem: Problem, backend: str | None = None) -> Any:
        """(the selection, the same by the two-step path)."""
        found = Case.call(self, problem, backend)
        return found, self._two_steps(problem, backend, torch.bfloat16)[0]

    def _two_steps(
        self, problem: Problem, backend: str | None, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        given = {name: problem.arguments[name] for name in ("q", "keys", "weights", "candidates")}
        index_logits = importlib.import_module("..ops.index_logits", __package__).index_logits
        topk = importlib.import_module("..ops.topk", __package__).topk
        logits = index_logits(**given, out_dtype=dtype, backend=backend)
        picks = topk(logits, self.k, backend=backend)
        return self._entries(problem, picks), logits

    def _entries(self, problem: Problem, picks: torch.Tensor) -> torch.Tensor:
        """Compact columns back to entries."""
        if not self.blocks:
            return picks
        out = torch.full_like(picks, -1)
        for row in range(picks.shape[0]):
            columns, entries = self.places(problem, row)
            entry_of = torch.full((int(columns.max()) + 1 if columns.numel() else 0,), -1)
            entry_of[columns] = entries
            chosen = picks[row][picks[row] >= 0].long()
            out[row, : chosen.numel()] = entry_of[chosen].to(torch.int32)
        return out

    def expected(self, problem: Problem) -> Any:
        return self.call(problem, "reference")

    def oracle(self, problem: Problem) -> Any:
        """float64 logits by entry, -inf where a row may not select."""
        truth, weights = problem.truth, problem.arguments["weights"]
        lengths = truth["lengths"]
        out = torch.full(
            (self.b * self.n, int(lengths.max()) if lengths.numel() else 0), -torch.inf, dtype=torch.float64
        )
        for row in range(out.shape[0]):
            _, entries = self.places(problem, row)
            out[row, entries] = scores(truth["q"][row], truth["keys"][row][entries], weights[row], exact=True)
        return out

    def plain(self, problem: Problem) -> Any:
        return self.oracle(problem)

    def compare_oracle(self, expected: Any, oracle: Any, plain: Any) -> list[str]:
        return self.compare(expected, oracle, plain, numeric.PLAIN_RATIO)

    def compare(self, actual: Any, expected: Any, plain: Any, ratio: float) -> list[str]:
        found, two_steps = actual
        reasons = numeric.equal("indices", found, two_steps)
        if isinstance(expected, tuple):
            expected = plain
        # Scores are rounded to bfloat16 before they are compared, so a pick may be that much below a rejected key.
        finite = expected[torch.isfinite(expected)]
        slack = float(finite.abs().max()) * 2**-7 if finite.numel() else 0.0
        return reasons + numeric.by_topk_values("indices", found, expected, None, self.k, slack=slack)


def _index_topk() -> Iterator[IndexTopkCase]:
    ugly = ("ugly",)
    for fmt in KEY_FORMATS:
        kind = fmt.name.removeprefix("INDEX_").lower().replace("_", "-")
        yield IndexTopkCase(name=f"paged-{kind}", format=fmt, n=2, context=300)
        yield IndexTopkCase(name=f"ragged-{kind}", format=fmt, ragged=True, b=3, context=300)
        yield IndexTopkCase(name=f"paged-{kind}-candidates", format=fmt, context=700, blocks=24)
    yield IndexTopkCase(name="fewer-keys-than-k", tags=ugly, context=40, b=3)
    yield IndexTopkCase(name="zero-context", tags=ugly, lengths="zero")
    yield IndexTopkCase(name="some-zero", tags=ugly, lengths="some_zero", b=4)
    yield IndexTopkCase(name="one-pick", tags=ugly, k=1)
    yield IndexTopkCase(name="no-rows", tags=ugly, b=0, width=64)
    yield IndexTopkCase(name="page-of-one", tags=ugly, page_size=1, context=90)
    yield IndexTopkCase(name="one-head-many-ties", tags=ugly, heads=1, context=900)
    yield IndexTopkCase(name="small-memory", b=3, n=2, context=4000, k=512, memory_limit=1 << 20)
    yield IndexTopkCase(name="v41-flash-6x16384", tags=("production",), b=1, n=6, context=16384, k=512, lengths="full")
    yield IndexTopkCase(
        name="v41-flash-6x1m", tags=("production", FULL), b=1, n=6, context=2**20, k=512, lengths="full"
    )
    yield IndexTopkCase(name="v41-flash-512x262144", tags=("production", BENCH), b=1, n=512, context=2**18, k=512,
                        lengths="full")  # fmt: skip


INDEX_TOPK_CASES: tuple[IndexTopkCase, ...] = tuple(_index_topk())


# --- topk ------------------------------------------------------------------------------------------------------------


def make_values(kind: str, rows: int, n: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """randn | relu: two thirds zeros | coarse: seven values | constant | infinite: some +-inf | masked: all -inf |
    zeros: +-0 |
    nan: some NaN."""
    x = torch.randn(rows, n, generator=generator)
    if kind == "relu":
        x = (x - 0.4).relu()
    elif kind == "coarse":
        x = (x * 2).round().clamp(-3, 3)
    elif kind == "constant":
        x = torch.full_like(x, 1.5)
    elif kind == "masked":
        x = torch.full_like(x, -torch.inf)
    elif kind == "zeros":
        x = torch.where(x > 0, 0.0, -0.0)
    elif kind in ("infinite", "nan"):
        draw = torch.rand(rows, n, generator=generator)
        x[draw < 0.1] = torch.inf
        x[draw > 0.7] = -torch.inf
        if kind == "nan":
            x[(draw > 0.3) & (draw < 0.5)] = torch.nan
    return x.to(dtype)


@dataclass(frozen=True, kw_only=True)
class TopkCase(Case):
    """k of n columns in each row."""

    op: ClassVar[str] = "topk"

    rows: int = 3
    n: int = 1000
    k: int = 64
    dtype: torch.dtype = torch.bfloat16
    values: str = "randn"
    bounds: str = "none"  # none | end | both | empty
    on_nan: str = "raise"
    on_neg_inf: str = "skip"
    strided: bool = False  # rows lie in wider rows

    def build(self, poison: int = POISON) -> Problem:
        g = self.generator()
        logits = make_values(self.values, self.rows, self.n, self.dtype, g)
        arguments: dict[str, Any] = {"k": self.k, "on_nan": self.on_nan, "on_neg_inf": self.on_neg_inf}
        begin, end = torch.zeros(self.rows, dtype=torch.int32), torch.full((self.rows,), self.n, dtype=torch.int32)
        if self.bounds == "empty":
            begin = end = torch.randint(0, self.n + 1, (self.rows,), generator=g, dtype=torch.int32)
        elif self.bounds != "none":
            end = torch.randint(0, self.n + 1, (self.rows,), generator=g, dtype=torch.int32)
            if self.rows:
                end[0] = self.n
            if self.bounds == "both":
                begin = (end * torch.rand(self.rows, generator=g)).to(torch.int32)
        if self.bounds != "none":
            arguments |= {"begin": begin, "end": end} if self.bounds in ("both", "empty") else {"end": end}
        outside = torch.arange(self.n)
        outside = (outside < begin[:, None]) | (outside >= end[:, None])
        logits[outside] = torch.nan  # not candidates, so not an error either
        if self.strided:
            wider = torch.full((self.rows, self.n + 24), torch.nan, dtype=self.dtype)
            wider[:, 8 : 8 + self.n] = logits
            logits = wider[:, 8 : 8 + self.n]
        return Problem({"logits": logits} | arguments, {"outside": outside})

    def oracle(self, problem: Problem) -> Any:
        """A stable sort by value, in Python's own order of numbers."""
        logits, outside = problem.arguments["logits"].double(), problem.truth["outside"]
        out = torch.full((self.rows, self.k), -1, dtype=torch.int32)
        for row in range(self.rows):
            barred = outside[row] | logits[row].isnan()
            if self.on_neg_inf == "skip":
                barred |= logits[row] == -torch.inf
            values = logits[row].tolist()
            allowed = (~barred).nonzero()[:, 0].tolist()
            picks = sorted(column for _, column in sorted((-values[column], column) for column in allowed)[: self.k])
            out[row, : len(picks)] = torch.tensor(picks, dtype=torch.int32)
        return out

    def compare(self, actual: Any, expected: Any, plain: Any, ratio: float) -> list[str]:
        return numeric.equal("indices", actual, expected)

    @property
    def nbytes(self) -> int:
        return self.rows * (self.n * self.dtype.itemsize + 4 * self.k)


def _topk() -> Iterator[TopkCase]:
    ugly = ("ugly",)
    axes = {
        "values": ("randn", "relu", "coarse", "constant", "infinite", "masked", "zeros"),
        "n": (1, 63, 64, 65, 700, 4099),
        "k": (1, 7, 64, 512, 2048),
        "bounds": ("none", "end", "both", "empty"),
        "dtype": (torch.bfloat16, torch.float32),
        "on_neg_inf": ("skip", "last"),
        "rows": (1, 5),
    }
    for a in pairs(axes):
        kind = str(a["dtype"]).removeprefix("torch.")
        name = f"{a['values']}-{a['rows']}x{a['n']}-k{a['k']}-{a['bounds']}-{kind}-{a['on_neg_inf']}"
        yield TopkCase(name=name, **a)
    yield TopkCase(name="nan-last", tags=ugly, values="nan", on_nan="last", n=400)
    yield TopkCase(
        name="nan-last-neg-inf-last", tags=ugly, values="nan", on_nan="last", on_neg_inf="last", n=400, k=300
    )
    yield TopkCase(name="no-rows", tags=ugly, rows=0)
    yield TopkCase(name="no-columns", tags=ugly, n=0)
    yield TopkCase(name="strided-rows", tags=ugly, strided=True, bounds="end")
    yield TopkCase(name="v41-flash-6x32768", tags=("production",), rows=6, n=32768, k=512, values="relu", bounds="end")
    yield TopkCase(name="v41-flash-64x65536", tags=("production", FULL), rows=64, n=65536, k=512, values="relu")


TOPK_CASES: tuple[TopkCase, ...] = tuple(_topk())


# --- candidate_blocks ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CandidateCase(Case):
    """topk_blocks of the blocks of n columns in each row."""

    op: ClassVar[str] = "candidate_blocks"

    rows: int = 3
    n: int = 1000
    block_size: int = 8
    topk_blocks: int = 32
    dtype: torch.dtype = torch.bfloat16
    values: str = "randn"
    lengths: str = "random"  # random | full | zero | short
    on_nan: str = "raise"

    def build(self, poison: int = POISON) -> Problem:
        g = self.generator()
        logits = make_values(self.values, self.rows, self.n, self.dtype, g)
        lengths = torch.full(
            (self.rows,), {"zero": 0, "short": min(self.n, 5)}.get(self.lengths, self.n), dtype=torch.int32
        )
        if self.lengths == "random":
            lengths = torch.randint(0, self.n + 1, (self.rows,), generator=g, dtype=torch.int32)
        logits[torch.arange(self.n) >= lengths[:, None]] = torch.nan
        arguments: dict[str, Any] = {
            "logits": logits,
            "lengths": lengths,
            "block_size": self.block_size,
            "topk_blocks": self.topk_blocks,
            "on_nan": self.on_nan,
        }
        return Problem(arguments, {})

    def oracle(self, problem: Problem) -> Any:
        logits, size = problem.arguments["logits"].double(), self.block_size
        k = min(self.topk_blocks, -(-self.n // size))
        out = torch.full((self.rows, k), -1, dtype=torch.int32)
        largest = float(torch.finfo(torch.bfloat16).max)
        for row, length in enumerate(problem.arguments["lengths"].tolist()):
            values = [-torch.inf if v != v else v for v in logits[row, :length].tolist()]
            best = [min(max(values[i : i + size]), largest) for i in range(0, length, size)]
            if best:
                best[-1] = torch.inf
            picks = sorted(block for _, block in sorted((-score, block) for block, score in enumerate(best))[:k])
            out[row, : len(picks)] = torch.tensor(picks, dtype=torch.int32)
        return out

    def compare(self, actual: Any, expected: Any, plain: Any, ratio: float) -> list[str]:
        return numeric.equal("blocks", actual, expected)

    @property
    def nbytes(self) -> int:
        return self.rows * (self.n * self.dtype.itemsize + 4 * self.topk_blocks)


def _candidates() -> Iterator[CandidateCase]:
    axes = {
        "values": ("randn", "relu", "coarse", "constant", "infinite", "masked"),
        "n": (1, 8, 65, 1000, 4099),
        "topk_blocks": (1, 5, 32, 2048),
        "block_size": (8, 16),
        "lengths": ("random", "full", "zero", "short"),
        "dtype": (torch.bfloat16, torch.float32),
        "rows": (1, 4),
    }
    for a in pairs(axes):
        kind = str(a["dtype"]).removeprefix("torch.")
        name = f"{a['values']}-{a['rows']}x{a['n']}-b{a['block_size']}-k{a['topk_blocks']}-{a['lengths']}-{kind}"
        yield CandidateCase(name=name, **a)
    yield CandidateCase(name="nan-last", tags=("ugly",), values="nan", on_nan="last")
    yield CandidateCase(name="no-rows", tags=("ugly",), rows=0)
    yield CandidateCase(
        name="v41-flash-6x65536", tags=("production",), rows=6, n=65536, topk_blocks=2048, values="relu"
    )


CANDIDATE_CASES: tuple[CandidateCase, ...] = tuple(_candidates())
