# SPDX-License-Identifier: Apache-2.0
"""Scoring and selection in one call whose scratch does not grow with the context: the logits are never materialised.

Each tile of scores is merged into the row's best k so far. The order (higher value, then lower index) is total, so
merging tiles selects exactly what selecting from the whole row would, and scores come from the same scorer as
`index_logits`: the result is that of `topk(index_logits(...), k)`, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..dispatch import EXACT, Limits, Op, opaque
from ..formats import QuantizedQuery
from .index_logits import (
    INPUTS_SCHEMA,
    NUM_INPUTS,
    OUT_DTYPES,
    Candidates,
    IndexInputs,
    PagedKeys,
    RaggedKeys,
    check_values,
    group_rows,
    key_bytes,
    query_bytes,
    row_groups,
    score_tiles,
    tile_keys,
)
from .sparse_decode import checks_on, config_memory_limit
from .topk import ON_NAN, candidates_of, check_k, raise_nan, select_largest
from .validation import choice, memory_limit_bytes

__all__ = ["INDEX_TOPK", "WORKSPACE", "IndexTopkCall", "index_topk", "index_topk_workspace_size"]


class IndexTopkCall(NamedTuple):
    """A validated call of `index_topk`, defaults filled."""

    inputs: IndexInputs
    k: int
    logits_dtype: torch.dtype
    on_nan: str
    memory_limit: int  # bytes of scratch
    checks: bool

    @classmethod
    def check(
        cls,
        q: QuantizedQuery | tuple[torch.Tensor, torch.Tensor | None],
        keys: PagedKeys | RaggedKeys,
        weights: torch.Tensor,
        k: int,
        *,
        candidates: Candidates | None = None,
        logits_dtype: torch.dtype = torch.bfloat16,
        on_nan: str = "raise",
        memory_limit: int | None = None,
    ) -> IndexTopkCall:
        op = "index_topk"
        inputs = IndexInputs.check(op, q, keys, weights, candidates)
        check_k(op, k)
        choice(op, "logits_dtype", logits_dtype, OUT_DTYPES)
        choice(op, "on_nan", on_nan, ON_NAN)
        limit = memory_limit_bytes(op, memory_limit, config_memory_limit())
        return cls(inputs, k, logits_dtype, on_nan, limit, checks_on())

    @property
    def device(self) -> torch.device:
        return self.inputs.q.device

    @property
    def num_rows(self) -> int:
        return self.inputs.num_rows

    @property
    def num_heads(self) -> int:
        return self.inputs.num_heads

    @property
    def formats(self) -> tuple[str, ...]:
        return (self.inputs.format.name,)

    @property
    def layouts(self) -> tuple[str, ...]:
        return self.inputs.layouts

    @property
    def out_dtype(self) -> torch.dtype:
        return self.logits_dtype

    @property
    def topk(self) -> int:
        return self.k

    def flat(self) -> tuple[Any, ...]:
        """The arguments of every backend's opaque operator, in the order of `SCHEMA`."""
        raising = self.on_nan == "raise"
        return (*self.inputs.flat(), self.k, self.logits_dtype, raising, self.memory_limit, self.checks)


INDEX_TOPK = Op("index_topk", IndexTopkCall)

SCHEMA = (
    f"({INPUTS_SCHEMA}, SymInt k, ScalarType logits_dtype, bool raise_on_nan, int memory_limit, bool checks) -> Tensor"
)

# Backend -> bytes of scratch a call needs there. A backend that implements the operator registers its own.
WORKSPACE: dict[str, Callable[[IndexTopkCall], int]] = {}


def index_topk(
    q: QuantizedQuery | tuple[torch.Tensor, torch.Tensor | None],
    keys: PagedKeys | RaggedKeys,
    weights: torch.Tensor,
    k: int,
    *,
    candidates: Candidates | None = None,
    logits_dtype: torch.dtype = torch.bfloat16,
    on_nan: str = "raise",
    memory_limit: int | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Score index keys and select the k best of each row, in bounded memory.

        index_topk(q, keys, w, k) == topk(index_logits(q, keys, w), k)      bit for bit

    Args:
        q, keys, weights: as in `index_logits`. `max_context_len` and `max_len` only bound the lengths; None: no bound.
        k: picks per row, any k >= 1.
        candidates: select only from these blocks. The indices returned count the row's own keys, not compact columns.
        logits_dtype: what a score is rounded to before it is compared; bfloat16 makes ties, which the lower index wins.
        on_nan: a NaN score is an error ("raise"), or is never selected ("last").
        memory_limit: bytes of scratch. Default SPARSE_MLA_MEMORY_LIMIT (1 GiB). `index_topk_workspace_size` says what
            a call needs; it does not depend on the length of the context.
        backend: "auto", or a name listed by `sparse-mla info`. Default SPARSE_MLA_BACKEND.
    Returns:
        int32 [rows, k], ascending by index, -1 in the places that no key fills. With ragged keys index j is key
        starts + j.
    Raises:
        ShapeError, DTypeError, ArgumentError, FormatError: an argument is wrong; the message names it.
        SlotRangeError: as in `index_logits`.
        NonFiniteError: a NaN score under on_nan="raise".
        UnsupportedError: no backend accepts the call; lists each backend's reasons.
    Numerics: those of `index_logits` with out_dtype=logits_dtype, then exact.
    """
    call = IndexTopkCall.check(
        q,
        keys,
        weights,
        k,
        candidates=candidates,
        logits_dtype=logits_dtype,
        on_nan=on_nan,
        memory_limit=memory_limit,
    )
    result: torch.Tensor = INDEX_TOPK.run(call, backend)
    return result


def index_topk_workspace_size(*args: Any, backend: str | None = None, **kwargs: Any) -> int:
    """Bytes of scratch that `index_topk` with the same arguments allocates at its peak, its result not counted. Reads
    shapes only, so it is the need of the longest contexts those shapes allow."""
    call = args[0] if args and isinstance(args[0], IndexTopkCall) else IndexTopkCall.check(*args, **kwargs)
    return WORKSPACE[INDEX_TOPK.select(call, backend).backend](call)


# --- reference -------------------------------------------------------------------------------------------------------


class _Best:
    """The best k of one row so far, ascending by index."""

    def __init__(self, k: int, dtype: torch.dtype, device: torch.device) -> None:
        self.k = k
        self.values = torch.empty(0, dtype=dtype, device=device)
        self.indices = torch.empty(0, dtype=torch.int64, device=device)

    def merge(self, values: torch.Tensor, indices: torch.Tensor) -> None:
        """Take in values of higher indices than all before, without NaN."""
        if self.values.numel() == self.k:
            # A full row only changes for strictly better values: among equals the earlier index stays.
            better = (values > self.values.amin()).nonzero()[:, 0]
            if better.numel() == 0:
                return
            values, indices = values[better], indices[better]
        values, indices = torch.cat((self.values, values)), torch.cat((self.indices, indices))
        picks = select_largest(values, self.k)
        self.values, self.indices = values[picks], indices[picks]


def _reference(*args: Any) -> torch.Tensor:
    inputs = IndexInputs.from_flat(*args[:NUM_INPUTS])
    k, logits_dtype, raise_on_nan, memory_limit, _checks = args[NUM_INPUTS:]
    check_values("index_topk", inputs)
    out = torch.full((inputs.num_rows, k), -1, dtype=torch.int32, device=inputs.q.device)
    math = torch.float64 if logits_dtype == torch.float64 else torch.float32
    with torch.autocast(inputs.q.device.type, enabled=False):
        for rows in row_groups(inputs, memory_limit, state_bytes(k, logits_dtype)):
            best = {row: _Best(k, logits_dtype, out.device) for row in rows}
            for tile in score_tiles(inputs, rows, math, memory_limit):
                values, entries = tile.scores.to(logits_dtype), tile.entries
                if isinstance(entries, slice):
                    entries = torch.arange(entries.start, entries.stop, device=values.device)
                if raise_on_nan:
                    raise_nan("index_topk", values, tile.row, entries, "scores")
                kept = candidates_of(values, skip_neg_inf=True)
                if kept is not None:
                    values, entries = values[kept], entries[kept]
                best[tile.row].merge(values, entries)
            for row, chosen in best.items():
                out[row, : chosen.indices.numel()] = chosen.indices
    return out


def state_bytes(k: int, logits_dtype: torch.dtype) -> int:
    """Scratch of one row between tiles: its best values and their indices."""
    return k * (logits_dtype.itemsize + 8)


def _workspace(call: IndexTopkCall) -> int:
    inputs = call.inputs
    rows = inputs.num_rows if inputs.cache is None else inputs.rows_per_table
    state = state_bytes(call.k, call.logits_dtype)
    rows = min(rows, group_rows(inputs.num_heads, state, call.memory_limit))
    if inputs.candidates is not None:
        longest = inputs.candidates.blocks.shape[1] * inputs.candidates.block_size
    elif inputs.cache is not None and inputs.block_table is not None:
        longest = inputs.block_table.shape[1] * inputs.cache.page_size
        longest = longest if inputs.width is None else min(longest, inputs.width)
    else:
        longest = inputs.keys.shape[0]
    keys = min(longest, tile_keys(inputs.format, inputs.num_heads, call.memory_limit))
    together = rows if inputs.candidates is None else min(rows, 1)  # rows with their own keys are scored one by one
    queries = together * query_bytes(inputs.num_heads, 0) + rows * state
    return queries + keys * key_bytes(inputs.format, inputs.num_heads)


WORKSPACE["reference"] = _workspace


def _fake(q: torch.Tensor, *args: Any) -> torch.Tensor:
    return q.new_empty((q.shape[0], args[NUM_INPUTS - 1]), dtype=torch.int32)


_operator = opaque("index_topk", "reference", SCHEMA, _reference, _fake)


@INDEX_TOPK.impl("reference", limits=Limits(out_dtypes=OUT_DTYPES), tolerance=EXACT)
def _run_reference(call: IndexTopkCall) -> torch.Tensor:
    result: torch.Tensor = _operator(*call.flat())
    return result
