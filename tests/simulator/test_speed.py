# SPDX-License-Identifier: Apache-2.0
"""The simulator's own speed, with room for a busy machine: processor time, and shares of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from sparse_mla import cli
from sparse_mla.simulator import SimulatorParams, run
from sparse_mla.testing import simulator_bench as bench

from .kit import launch


@pytest.fixture(scope="module")
def measured() -> dict[str, bench.Measurement]:
    return {m.name.split()[0]: m for m in bench.measurements(small=True, rounds=3)}


def test_matmul_is_an_eighth_of_the_limit(measured: dict[str, bench.Measurement]) -> None:
    # 1024^3 has an eighth of the multiplications of 2048^3, which may take 3 s
    assert measured["matmul"].full < bench.LIMITS["matmul 2048^3"] / 8 * 3


def test_attention_keeps_its_share_of_the_limit(measured: dict[str, bench.Measurement]) -> None:
    m = measured["attention"]
    assert m.full / m.instructions < 3 * bench.LIMITS["attention 14,000 instructions"] / 14_000


def test_the_bench_command_times_the_simulator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def measurements(*, small: bool) -> list[bench.Measurement]:
        asked.append(small)
        return [bench.Measurement(name="matmul 2048^3", instructions=2_000, full=0.5, bare=0.4)]

    monkeypatch.setattr(bench, "measurements", measurements)
    out = tmp_path / "rows.json"
    done = CliRunner().invoke(cli.commands, ["bench", "--op", "simulator", "--quick", "--out", str(out)])
    assert (done.exit_code, asked) == (0, [True]), done.output
    assert "matmul 2048^3" in done.output
    assert "250.0" in done.output  # microseconds per instruction
    assert json.loads(out.read_text())[0]["full"] == 0.5
    refused = CliRunner().invoke(cli.commands, ["bench", "--op", "simulator", "--threads", "1"])
    assert refused.exit_code == 2
    assert "--quick and --out only" in refused.output


def test_fixed_cost_per_instruction(measured: dict[str, bench.Measurement]) -> None:
    assert measured["fixed"].full / measured["fixed"].instructions < 3 * bench.LIMITS["fixed cost per instruction"]


@pytest.mark.parametrize("name", ["matmul", "attention"])
def test_checks_and_time_take_less_than_half(measured: dict[str, bench.Measurement], name: str) -> None:
    assert measured[name].share < 0.6  # 0.5 on a quiet machine


def test_the_measured_matmul_is_right() -> None:
    a, b = bench.matmul_arguments(512)
    out = launch(bench.matmul, a, b).value.astype(np.float32)
    np.testing.assert_allclose(out, a.astype(np.float32).T @ b.astype(np.float32), rtol=2e-2, atol=0.3)


@pytest.mark.parametrize("contiguous", [False, True])
def test_the_measured_attention_is_right(contiguous: bool) -> None:
    q, table, index = bench.attention_arguments(2, heads=16, slots=1024)
    out = launch(bench.attention, q, table, index, contiguous).value.astype(np.float32)
    keys = table.astype(np.float32)
    for r in range(2):
        chosen = keys[:640] if contiguous else keys[index[:, r]]
        logits = q[r].astype(np.float32) @ chosen.T * 512**-0.5
        weights = np.exp(logits - logits.max(1, keepdims=True))
        expected = weights @ chosen / weights.sum(1, keepdims=True)
        np.testing.assert_allclose(out[r], expected, rtol=3e-2, atol=2e-2)


def test_14_000_instructions_are_what_the_bench_runs() -> None:
    params = SimulatorParams(gen=3, show_warnings=False, checks=False, timing=False)
    arguments: tuple[Any, ...] = bench.attention_arguments(4)
    few = run(bench.attention, *arguments, params=params).instructions
    more = run(bench.attention, *bench.attention_arguments(8), params=params).instructions
    per_row = (more - few) // 4
    assert 220 * per_row + few - 4 * per_row >= 14_000
