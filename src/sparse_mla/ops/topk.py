# SPDX-License-Identifier: Apache-2.0
"""Deterministic top-k over index logits: higher value first, then lower index.

ReLU scores have a wide plateau of exact zeros and bfloat16 makes ties everywhere, so which of several equal columns
is taken decides what a model sees. Here it is a rule, not an order of arrival: the result is a function of the row's
values alone. `select_largest` is that rule for one row; `index_topk` merges tiles with the same function, which is
why both agree bit for bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..dispatch import EXACT, Limits, Op, opaque
from ..errors import ArgumentError, NonFiniteError, SlotRangeError
from .validation import choice, same_device, tensor

__all__ = [
    "LOGIT_DTYPES",
    "TOPK",
    "TopkCall",
    "check_bounds",
    "check_k",
    "raise_nan",
    "select_largest",
    "selected_values",
    "topk",
]

LOGIT_DTYPES = (torch.bfloat16, torch.float32, torch.float64)
ON_NAN = ("raise", "last")
ON_NEG_INF = ("skip", "last")


class TopkCall(NamedTuple):
    """A validated call of `topk`. rows query rows, n columns."""

    logits: torch.Tensor  # [rows, n] bfloat16, float32 or float64, any strides
    k: int
    begin: torch.Tensor | None  # [rows] int32, first valid column
    end: torch.Tensor | None  # [rows] int32, one past the last valid column
    on_nan: str
    on_neg_inf: str

    @classmethod
    def check(
        cls,
        logits: torch.Tensor,
        k: int,
        end: torch.Tensor | None = None,
        *,
        begin: torch.Tensor | None = None,
        on_nan: str = "raise",
        on_neg_inf: str = "skip",
    ) -> TopkCall:
        op = "topk"
        sizes: dict[str, int] = {}
        tensor(op, "logits", logits, "rows n", LOGIT_DTYPES, sizes)
        check_k(op, k)
        for name, bound in (("end", end), ("begin", begin)):
            if bound is not None:
                tensor(op, name, bound, "rows", (torch.int32,), sizes)
        same_device(op, (("logits", logits), ("end", end), ("begin", begin)))
        choice(op, "on_nan", on_nan, ON_NAN)
        choice(op, "on_neg_inf", on_neg_inf, ON_NEG_INF)
        return cls(logits, k, begin, end, on_nan, on_neg_inf)

    @property
    def device(self) -> torch.device:
        return self.logits.device

    @property
    def num_rows(self) -> int:
        return self.logits.shape[0]

    @property
    def topk(self) -> int:
        return self.k

    def flat(self) -> tuple[Any, ...]:
        """The arguments of every backend's opaque operator, in the order of `SCHEMA`."""
        return (self.logits, self.k, self.begin, self.end, self.on_nan == "raise", self.on_neg_inf == "skip")


def check_k(op: str, k: object, name: str = "k") -> None:
    """Raise unless `k` is a positive number of picks."""
    if isinstance(k, bool) or not isinstance(k, (int, torch.SymInt)) or k < 1:
        raise ArgumentError(f"{op}: {name} must be an integer >= 1, got {k!r}.")


TOPK = Op("topk", TopkCall)

SCHEMA = "(Tensor logits, int k, Tensor? begin, Tensor? end, bool raise_on_nan, bool skip_neg_inf) -> Tensor"


def topk(
    logits: torch.Tensor,
    k: int,
    end: torch.Tensor | None = None,
    *,
    begin: torch.Tensor | None = None,
    on_nan: str = "raise",
    on_neg_inf: str = "skip",
    backend: str | None = None,
) -> torch.Tensor:
    """Select the k best columns of each row, the same ones every time.

        order of columns: higher value first, then lower index; the picks are returned in ascending index order

    Args:
        logits: [rows, n] bfloat16, float32 or float64, any row stride. +inf is an ordinary value, -0.0 equals 0.0.
        k: picks per row, any k >= 1; larger than n is allowed.
        end: [rows] int32 or None (n). Columns at or past it are never read as candidates.
        begin: [rows] int32 or None (0). Columns before it are never candidates; the indices returned still count from
            0.
        on_nan: a NaN inside [begin, end) is an error ("raise"), or orders below -inf and is never selected ("last").
        on_neg_inf: -inf is the mark of a masked column (what `index_logits` writes past the context and a candidate
            mask writes outside the candidates) and is never selected ("skip"), or is the lowest legal value ("last").
        backend: "auto", or a name listed by `sparse-mla info`. Default SPARSE_MLA_BACKEND.
    Returns:
        int32 [rows, k], ascending by index, -1 in the places that no candidate fills. With at most k candidates in a
        row, all of them are returned.
    Raises:
        ShapeError, DTypeError, ArgumentError: an argument is wrong; the message names it.
        SlotRangeError: begin or end outside [0, n].
        NonFiniteError: a NaN among the candidates under on_nan="raise"; the message names row and column.
        UnsupportedError: no backend accepts the call; lists each backend's reasons.
    Numerics: exact. A row's result does not depend on other rows, on n, or on the number of threads.
    Source: DeepSelect `topk`, which leaves the choice among equal values open.
    """
    call = TopkCall.check(logits, k, end, begin=begin, on_nan=on_nan, on_neg_inf=on_neg_inf)
    result: torch.Tensor = TOPK.run(call, backend)
    return result


def selected_values(logits: torch.Tensor, indices: torch.Tensor, fill: float = float("-inf")) -> torch.Tensor:
    """The logits at `indices` [rows, k], and `fill` where an index is -1. Traceable."""
    if logits.shape[1] == 0:
        return logits.new_full(indices.shape, fill)
    picked = logits.gather(1, indices.clamp(min=0).to(torch.int64))
    return torch.where(indices >= 0, picked, torch.full_like(picked, fill))


# --- reference -------------------------------------------------------------------------------------------------------


def select_largest(values: torch.Tensor, k: int) -> torch.Tensor:
    """Positions (int64, ascending) of the k largest of `values` [n] without NaN; among equals the lower position
    wins."""
    n = values.numel()
    if n <= k:
        return torch.arange(n, device=values.device)
    threshold = torch.topk(values, k, sorted=False).values.amin()
    above = (values > threshold).nonzero()[:, 0]
    ties = (values == threshold).nonzero()[: k - above.numel(), 0]
    return torch.cat((above, ties)).sort().values


def candidates_of(values: torch.Tensor, skip_neg_inf: bool) -> torch.Tensor | None:
    """Positions (ascending) of the values that may be selected, or None when all may."""
    dropped = values.isnan()
    if skip_neg_inf:
        dropped |= values == float("-inf")
    return (~dropped).nonzero()[:, 0] if bool(dropped.any()) else None


def raise_nan(op: str, values: torch.Tensor, row: int, columns: int | torch.Tensor, subject: str = "logits") -> None:
    """NonFiniteError when `values` [n] of `row` hold a NaN; `columns` are theirs, or the first of consecutive ones."""
    bad = values.isnan()
    if bool(bad.any()):
        place = int(bad.nonzero()[0, 0])
        column = int(columns[place]) if isinstance(columns, torch.Tensor) else columns + place
        raise NonFiniteError(
            f"{op}: {subject} must not be NaN, got NaN at row {row}, column {column}; on_nan='last' never selects it."
        )


def check_bounds(op: str, name: str, bound: torch.Tensor | None, upper: int, upper_name: str) -> None:
    """Raise SlotRangeError unless every element of `bound` is inside [0, upper]."""
    if bound is None or bound.numel() == 0:
        return
    bad = (bound < 0) | (bound > upper)
    if bool(bad.any()):
        where = bad.nonzero()[0].tolist()
        raise SlotRangeError(
            f"{op}: {name} must be between 0 and {upper_name} = {upper}, got {int(bound[tuple(where)])} at {where}."
        )


def _reference(
    logits: torch.Tensor,
    k: int,
    begin: torch.Tensor | None,
    end: torch.Tensor | None,
    raise_on_nan: bool,
    skip_neg_inf: bool,
) -> torch.Tensor:
    rows, n = logits.shape
    check_bounds("topk", "begin", begin, n, "n")
    check_bounds("topk", "end", end, n, "n")
    firsts = [0] * rows if begin is None else begin.tolist()
    lasts = [n] * rows if end is None else end.tolist()
    out = torch.full((rows, k), -1, dtype=torch.int32, device=logits.device)
    for row, (first, last) in enumerate(zip(firsts, lasts, strict=True)):
        values = logits[row, first:last]
        if raise_on_nan:
            raise_nan("topk", values, row, first)
        kept = candidates_of(values, skip_neg_inf)
        picks = select_largest(values, k) if kept is None else kept[select_largest(values[kept], k)]
        out[row, : picks.numel()] = picks + first
    return out


def _fake(logits: torch.Tensor, k: int, *rest: Any) -> torch.Tensor:
    return logits.new_empty((logits.shape[0], k), dtype=torch.int32)


_operator = opaque("topk", "reference", SCHEMA, _reference, _fake)


@TOPK.impl("reference", limits=Limits(out_dtypes=None), tolerance=EXACT)
def _run_reference(call: TopkCall) -> torch.Tensor:
    result: torch.Tensor = _operator(*call.flat())
    return result
