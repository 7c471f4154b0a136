# SPDX-License-Identifier: Apache-2.0
"""The cost table of the Neuron attention launches: its targets, its traffic, and the lines it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparse_mla.dispatch import presence
from sparse_mla.testing.neuron_cost import (
    CostPoint,
    CostRow,
    cost_page,
    cost_plan,
    estimate_row,
    kv_traffic,
    run_costs,
    write_costs,
)

ROOT = Path(__file__).resolve().parent.parent
COMMITTED = [json.loads(text) for text in (ROOT / "bench" / "neuron_cost.jsonl").read_text().splitlines()]
FULL = pytest.mark.full
FP8, MIXED, ROWS = "640_fp8", "128_fp8+512_fp4", "640_bf16"


def estimated(family: str, variant: str, keys: str, rows: int, heads: int, lnc: int = 2) -> CostRow:
    assert presence("simulated") == ""
    return estimate_row(CostPoint(family, variant, keys, rows, heads, lnc))[0]


# At the model's nominal constants, native variant, interleaved records.
@pytest.mark.parametrize("heads", [1, 8, 64, 128])
@pytest.mark.parametrize("keys", [FP8, MIXED])
@pytest.mark.parametrize(("rows", "limit_us"), [(1, 27.0), (6, 50.0)])
def test_few_rows_stay_within_their_target(keys: str, rows: int, limit_us: float, heads: int) -> None:
    assert estimated("fused", "native", keys, rows, heads).estimated_us <= limit_us


@pytest.mark.parametrize("heads", [pytest.param(h, marks=FULL) for h in (1, 8, 64, 128)])
@pytest.mark.parametrize(("keys", "limit_us"), [(FP8, 800.0), (MIXED, 900.0)])
def test_a_chunk_of_128_rows_stays_within_its_target(keys: str, limit_us: float, heads: int) -> None:
    assert estimated("fused", "native", keys, 128, heads).estimated_us <= limit_us


@pytest.mark.parametrize("keys", [FP8, MIXED])
@pytest.mark.parametrize("rows", [6, pytest.param(128, marks=FULL)])
def test_integer_decoding_costs_at_most_1_6_of_native(keys: str, rows: int) -> None:
    native, integer = [estimated("fused", v, keys, rows, 64).estimated_us for v in ("native", "integer")]
    assert native <= integer <= 1.6 * native


@pytest.mark.parametrize("keys", [FP8, MIXED])
@pytest.mark.parametrize("rows", [1, 6, 128])
def test_fused_moves_at_most_a_quarter_of_the_bytes(keys: str, rows: int) -> None:
    fused, plain = [kv_traffic(CostPoint(f, "native", keys, rows, 64, 2)) for f in ("fused", "bf16_rows")]
    assert 4 * fused <= plain


def test_the_model_counts_what_the_kernel_reads() -> None:
    """The estimate's own HBM bytes contain the gathered records and little else."""
    row = estimated("fused", "native", FP8, 6, 64)
    gathered = 6 * 640 * 528
    assert gathered <= row.hbm_read_bytes <= 1.6 * gathered
    assert row.hbm_written_bytes >= 8 * 64 * 1024
    assert row.descriptors >= 6 * 640


def test_two_cores_share_the_rows() -> None:
    one, two = [estimated("fused", "native", FP8, 6, 64, lnc).estimated_us for lnc in (1, 2)]
    assert two < 0.75 * one


def test_lines_have_the_documented_fields(tmp_path: Path) -> None:
    points = [CostPoint("fused", "native", FP8, 1, 8, 1), CostPoint("bf16_rows", "none", ROWS, 1, 8, 1)]
    seen: list[Any] = []
    rows = list(run_costs(points, seen.append))
    write_costs(tmp_path / "cost.jsonl", rows)
    lines = [json.loads(line) for line in (tmp_path / "cost.jsonl").read_text().splitlines()]
    assert seen == points
    wanted = {
        "op", "family", "variant", "keys", "rows", "heads", "lnc", "estimated_us", "boundary_us", "hbm_read_bytes",
        "hbm_written_bytes", "descriptors", "busy_us", "bound_by",
    }  # fmt: skip
    for line in lines:
        assert wanted <= set(line)
        assert line["target"] == "trn2"
        assert 0 < max(line["busy_us"].values()) <= line["estimated_us"]


def test_the_plan_covers_rows_heads_cores_and_keys() -> None:
    points = cost_plan()
    assert {(p.rows, p.heads, p.lnc) for p in points} == {
        (n, h, c) for n in (1, 6, 128) for h in (1, 8, 64, 128) for c in (1, 2)
    }
    assert {p.keys for p in points} == {FP8, MIXED, ROWS}
    assert {p.family for p in points} == {"fused", "bf16_rows", "dense"}


def test_the_page_shows_what_the_file_holds() -> None:
    page = (ROOT / "docs" / "neuron.md").read_text()
    shown = page.split("<!-- cost:")[1].split("-->\n", 1)[1].split("<!-- end -->")[0]
    assert shown.strip() == cost_page(COMMITTED).strip(), "run: python -m sparse_mla.testing.neuron_cost"


def test_every_launch_is_estimated_and_every_target_met() -> None:
    page = cost_page(COMMITTED)
    assert "not run" not in page
    targets = page.split("### Targets")[1].split("###")[0]
    assert targets.count("| yes |") >= 11
    assert "| NO |" not in targets


def test_scores_state_a_further_key_and_the_whole_call() -> None:
    """The limit is that of a further key; a call that also pays its start is shown beside it."""
    fields = {"op": "index_logits", "variant": "lanes32", "rows": 4, "lnc": 1, "boundary_us": 30.0, "descriptors": 5}
    sizes = {"bound_by": "vector", "hbm_read_bytes": 1}
    lines = [
        {**fields, **sizes, "keys": f"{n}_index_fp4", "estimated_us": us} for n, us in ((8192, 30.0), (32768, 90.0))
    ]
    page = cost_page(lines)
    assert "up to 4 tokens: a further key on one core | 2.6 ns | 2.44 ns; 2.75 of a whole call with 32,768" in page
    assert "| index_fp4 | lanes32 | 4 | 1 | 2.44 | 3.66 | 2.75 |" in page
    assert "a further key on one core | 2.6 ns | 3.26 ns" in cost_page([lines[0], {**lines[1], "estimated_us": 110.0}])
    assert "NO |" in cost_page([lines[0], {**lines[1], "estimated_us": 110.0}])


def test_what_was_not_run_is_not_shown_as_a_number() -> None:
    fields = {"op": "sparse_decode", "estimated_us": 901.0, "boundary_us": 30.0, "descriptors": 5, "bound_by": "vector"}
    sizes = {"hbm_read_bytes": 1, "hbm_written_bytes": 1, "kv_traffic_bytes": 1}
    points = [CostPoint("fused", "native", MIXED, 128, h, 2) for h in (1, 8, 64)]
    few = [{**fields, **sizes, **point._asdict()} for point in points]
    last = {**few[0], "heads": 128}
    target = "| 128 FP8 + 512 FP4, 128 rows, native, two cores, all heads | 900 us |"
    assert f"{target} not run | not run |" in cost_page(few)
    assert f"{target} 901.0 us | NO |" in cost_page([*few, last])
    assert f"| {MIXED} | fused | native | 128 | 2 | 901.0 | 901.0 | 901.0 | not run |" in cost_page(few)
