# SPDX-License-Identifier: Apache-2.0
"""More than one process: gloo groups of 2 and 4 on this machine, and the arithmetic of who holds what in this one."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_mla.attention import Shard, V41Config
from sparse_mla.attention.weights import TENSORS
from sparse_mla.errors import ArgumentError, ShapeError, StateError
from sparse_mla.parallel import (
    PageSpread,
    entries_to_local_slots,
    merge_bytes,
    output_sum_bytes,
    rank_and_size,
    score_sum_bytes,
    selection_bytes,
    topk_over_ranks,
)

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="the test forks its ranks, and this system cannot fork"),
    pytest.mark.skipif(
        not (dist.is_available() and dist.is_gloo_available()), reason="this torch was built without gloo"
    ),
]


def run(command: list[str], seconds: float, **env: str) -> tuple[int, str]:
    """Exit status and all output of a command; it and all it started are dead afterwards."""
    full = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **env}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=full, start_new_session=True
    ) as process:
        try:
            output = process.communicate(timeout=seconds)[0]
        finally:
            with contextlib.suppress(ProcessLookupError):  # all gone, as they should be
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output


def group(size: int, folder: Path, plan: str, seconds: float, limit: float) -> list[dict[str, str]]:
    """Run a plan of parallel_worker.py and read every rank's report."""
    command = [sys.executable, str(HERE / "parallel_worker.py"), str(size), str(folder), plan, str(seconds)]
    status, output = run(command, limit)
    assert status == 0, output
    reports = []
    for rank in range(size):
        file = folder / f"rank{rank}.json"
        reports.append(json.loads(file.read_text()) if file.exists() else {})
    return reports


@pytest.mark.parametrize("size", [2, 4])
def test_every_promise_in_a_group(size: int, tmp_path: Path) -> None:
    """Each scenario of parallel_worker.py on every rank."""
    reports = group(size, tmp_path, "all", 60, 200)
    wrong = []
    for rank, report in enumerate(reports):
        results = {name: text for name, text in report.items() if not name.endswith(" seconds")}
        wrong += [f"rank {rank}, {name}:\n{text}" for name, text in results.items() if text != "ok"]
        if not results:
            wrong.append(f"rank {rank} left no report")
    assert not wrong, "\n".join(wrong)
    names = {name for name in reports[0] if not name.endswith(" seconds")}
    assert len(names) >= 9, names


@pytest.mark.parametrize(
    ("size", "how"),
    [
        (4, "dies"),
        (2, "stalls"),
        pytest.param(2, "dies", marks=pytest.mark.full),
        pytest.param(4, "stalls", marks=pytest.mark.full),
    ],
)
def test_a_lost_rank_is_an_error_in_time_and_the_pool_is_intact(size: int, how: str, tmp_path: Path) -> None:
    reports = group(size, tmp_path, how, 4, 120)
    for rank, report in enumerate(reports):
        if rank != 1:
            assert report.get(how) == "ok", f"rank {rank}: {report}"


def test_the_example_runs_under_torchrun() -> None:
    """What the example prints is what it found; its exit status is its verdict."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--master-addr", "127.0.0.1"]
    command += ["--master-port", str(random.SystemRandom().randrange(20000, 60000))]
    status, output = run([*command, str(ROOT / "examples" / "torchrun_decode.py"), "--entries", "1024"], 150)
    assert status == 0, output
    for line in (
        "context parallel   selected lists equal bit for bit: yes",
        "context parallel   every rank bit-equal to every other: yes",
        "tensor parallel    every rank bit-equal to every other: yes",
        "tensor parallel    no better entry left behind: yes",
    ):
        assert line in output, output
    assert output.count("within tolerance: yes") == 2, output


# --- without a group -------------------------------------------------------------------------------------------------


def test_without_a_group_there_is_one_clear_error() -> None:
    with pytest.raises(StateError, match=r"torch\.distributed must be initialised"):
        rank_and_size()
    with pytest.raises(StateError, match="torchrun"):
        topk_over_ranks(torch.zeros(1, 4), 1, torch.tensor([4], dtype=torch.int32), PageSpread(0, 1, 4))


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 3), st.integers(0, 150))
def test_a_spread_holds_every_entry_once_and_in_order(size: int, page: int, run_length: int, length: int) -> None:
    entries = torch.arange(length, dtype=torch.int32)
    owners = torch.zeros(length, dtype=torch.int64)
    for rank in range(size):
        spread = PageSpread(rank, size, page, run_length)
        local = spread.to_local(entries)
        held = int(spread.local_lens(torch.tensor([length], dtype=torch.int32)))
        assert torch.equal(local[local >= 0], torch.arange(held, dtype=torch.int32))  # dense, in the sequence's order
        back = spread.to_global(local)
        assert torch.equal(back[local >= 0], entries[local >= 0])
        assert bool((back[local < 0] == -1).all())
        pages = spread.local_pages(-(-length // page))
        assert sorted({int(e) // page for e in entries[local >= 0]}) == pages
        owners += local >= 0
    assert bool((owners == 1).all())


def test_slots_of_local_entries() -> None:
    spread = PageSpread(1, 2, 4)
    table = torch.tensor([[7, 3]], dtype=torch.int32)  # pages 1 and 3 of the sequence
    entries = torch.tensor([[0, 4, 7, 8, 13, -1], [5, 3, -1, 15, 12, 6]], dtype=torch.int32)
    slots = entries_to_local_slots(entries, table, spread, rows_per_table=2)
    assert slots.tolist() == [[-1, 28, 31, -1, 13, -1], [29, -1, -1, 15, 12, 30]]
    assert slots.dtype == torch.int32
    with pytest.raises(ShapeError, match="disagree about who holds"):
        entries_to_local_slots(entries, table[:, :1], spread, rows_per_table=2)
    with pytest.raises(ShapeError, match="a row for each"):
        entries_to_local_slots(entries, table, spread)
    nothing = entries_to_local_slots(
        entries, torch.zeros(1, 0, dtype=torch.int32), PageSpread(8, 9, 4), rows_per_table=2
    )
    assert bool((nothing == -1).all())


@pytest.mark.parametrize(
    "build",
    [
        lambda: PageSpread(2, 2, 4),
        lambda: PageSpread(-1, 2, 4),
        lambda: PageSpread(0, 0, 4),
        lambda: PageSpread(0, 1, 0),
        lambda: PageSpread(0, 1, 4, 0),
        lambda: PageSpread(0, 1, 12).scaled(8),
    ],
)
def test_an_impossible_spread_is_refused(build) -> None:
    with pytest.raises(ArgumentError, match="PageSpread"):
        build()


def test_byte_formulas_at_the_model_s_sizes() -> None:
    """Six rows of V4.1-Flash over four ranks, by hand."""
    assert selection_bytes(6, 512, 4) == 3 * (6 * 512 * 6 + 4)
    assert merge_bytes(6, 64, 4) == 3 * (6 * 64 * 513 * 4 + 4)
    assert merge_bytes(6, 64, 4, heads="own") == 3 * (6 * 16 * 513 * 4 + 4)
    assert score_sum_bytes(6, 65536, 4) == 6 * (6 * 65536 + 1)
    assert output_sum_bytes(6, 5120, 8) == 7 * 6 * 5120
    for one in (
        selection_bytes(6, 512, 1),
        merge_bytes(6, 64, 1),
        score_sum_bytes(6, 100, 1),
        output_sum_bytes(6, 32, 1),
    ):
        assert one == 0


def test_one_head_per_rank_adds_up() -> None:
    """64 ranks, one head each, eight of them per o-group: by the weights' shapes their parts sum to the output."""
    config = replace(V41Config.tiny(), num_attention_heads=64, o_groups=8)
    heads = torch.randn(3, 64, 512, dtype=torch.float64)
    rank_width = config.o_lora_rank
    specs = {spec.field: spec for spec in TENSORS}
    whole = {name: torch.randn(specs[name].shape(config)) for name in ("wq_b", "attn_sink", "wo_a", "wo_b")}

    def output(out: torch.Tensor, wo_a: torch.Tensor, wo_b: torch.Tensor) -> torch.Tensor:
        groups = wo_a.shape[0] // rank_width
        parts = out.reshape(3, groups, wo_a.shape[1])
        inner = torch.einsum("tgi,goi->tgo", parts, wo_a.double().view(groups, rank_width, -1))
        return inner.reshape(3, -1) @ wo_b.double().T

    expected = output(heads.reshape(3, -1), whole["wo_a"], whole["wo_b"])
    total = torch.zeros_like(expected)
    for rank in range(64):
        part = {name: value[specs[name].cut(config, Shard(rank, 64))] for name, value in whole.items()}
        assert part["wq_b"].shape == (512, config.q_lora_rank)
        assert part["wo_a"].shape == (rank_width, 512)
        assert torch.equal(part["attn_sink"], whole["attn_sink"][rank : rank + 1])
        total += output(heads[:, rank], part["wo_a"], part["wo_b"])
    assert torch.allclose(total, expected, rtol=1e-10, atol=1e-9)
