# SPDX-License-Identifier: Apache-2.0
"""The deep_select drop-in: upstream's signature, orders, fills and offsets over the library's tie rule."""

from __future__ import annotations

import inspect
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from sparse_mla.compat import deep_select
from sparse_mla.errors import ArgumentError, NonFiniteError, ShapeError, SparseMlaError

SIGNATURES = json.loads((Path(__file__).parent / "data" / "upstream_signatures.json").read_text())["deep_select"]
INF = math.inf
FILL = 2147483647


@pytest.mark.parametrize("name", [name for name in SIGNATURES if name != "source"])
def test_signature_is_upstreams(name: str) -> None:
    parameters = inspect.signature(getattr(deep_select, name)).parameters.values()
    ours = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    assert ours == SIGNATURES[name]
    assert name in deep_select.__all__


LOGITS = torch.tensor([[1.0, 5.0, 3.0, 5.0, -INF], [2.0, -1.0, 0.0, 9.0, 4.0]])
END = torch.tensor([5, 3], dtype=torch.int32)


def test_defaults() -> None:
    values, indices = deep_select.topk(LOGITS, 3)
    assert indices.dtype == torch.int64
    assert indices.tolist() == [[1, 2, 3], [0, 3, 4]]
    assert values.tolist() == [[5.0, 3.0, 5.0], [2.0, 9.0, 4.0]]


def test_as_the_engine_calls_it() -> None:
    values, indices = deep_select.topk(
        LOGITS, 4, end=END, indices_type=torch.int32, sorted_index=True, idx_oob_fill_value=-1, return_value=False
    )
    assert values is None
    assert indices.dtype == torch.int32
    assert indices.tolist() == [[0, 1, 2, 3], [0, 1, 2, -1]]


def test_all_columns_before_end_are_returned_minus_infinity_included() -> None:
    values, indices = deep_select.topk(LOGITS, 6, end=END)
    assert indices.tolist() == [[0, 1, 2, 3, 4, FILL], [0, 1, 2, FILL, FILL, FILL]]
    assert values[0].tolist() == [1.0, 5.0, 3.0, 5.0, -INF, -INF]


def test_sorted_by_value_with_fills_last() -> None:
    values, indices = deep_select.topk(LOGITS, 6, sorted=True, end=END, value_oob_fill_value=7.5)
    assert indices.tolist() == [[1, 3, 2, 0, 4, FILL], [0, 2, 1, FILL, FILL, FILL]]
    assert values.tolist() == [[5.0, 5.0, 3.0, 1.0, -INF, 7.5], [2.0, 0.0, -1.0, 7.5, 7.5, 7.5]]


def test_offset_is_added_to_valid_indices_only() -> None:
    per_row = torch.tensor([100, 200], dtype=torch.int32)
    for offset, second in ((100, 100), (per_row, 200), (per_row[:, None], 200)):
        _, indices = deep_select.topk(LOGITS, 4, end=END, output_idx_offset=offset, idx_oob_fill_value=-1)
        assert indices.tolist() == [[100, 101, 102, 103], [second, second + 1, second + 2, -1]]


def test_begin_and_output_buffer() -> None:
    out = torch.full((2, 2), 55, dtype=torch.int64)
    begin = torch.tensor([2, 1], dtype=torch.int32)
    _, indices = deep_select.topk(LOGITS, 2, begin=begin, end=END, output_idx=out)
    assert indices is out
    assert out.tolist() == [[2, 3], [1, 2]]


def test_nan_raises_or_is_never_picked() -> None:
    logits = torch.tensor([[math.nan, 1.0, -INF]])
    with pytest.raises(
        NonFiniteError, match=r"topk: input must not be NaN.*abort_when_nan_found=False never selects it"
    ):
        deep_select.topk(logits, 2)
    _, indices = deep_select.topk(logits, 3, abort_when_nan_found=False, idx_oob_fill_value=-1)
    assert indices.tolist() == [[1, 2, -1]]


BAD_INPUTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "both orders": (
        {"sorted": True, "sorted_index": True},
        ArgumentError,
        "sorted and sorted_index must not both be True",
    ),
    "hint": ({"hint": END}, ArgumentError, "hint must be None, got Tensor"),
    "indices_type": (
        {"indices_type": torch.int16},
        ArgumentError,
        "indices_type must be int32 or int64, got torch.int16",
    ),
    "input": ({"input": LOGITS[0]}, ShapeError, r"input must be \[rows, n\], got \[5\]"),
    "topk": ({"topk": 0}, ArgumentError, "topk must be an integer >= 1, got 0"),
    "end": ({"end": END[:1]}, ShapeError, r"end must be \[rows\] with rows = 2"),
    "output_idx": ({"output_idx": END}, ShapeError, r"output_idx must be \[2, 2\], got \[2\]"),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_bad_input_is_one_sentence_in_upstreams_names(name: str) -> None:
    changes, error, message = BAD_INPUTS[name]
    with pytest.raises(error, match=message) as raised:
        deep_select.topk(**({"input": LOGITS, "topk": 2} | changes))
    assert isinstance(raised.value, SparseMlaError)
    assert str(raised.value).startswith("topk: ")
