# SPDX-License-Identifier: Apache-2.0
"""The timeline as a file: what Perfetto reads, and the picture."""

from __future__ import annotations

import builtins
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparse_mla.errors import UnsupportedError

from .kit import BF16, launch, nisa, nl, put, random


def two_cores(a: Any, b: Any) -> Any:
    core = nl.program_id(0)
    out = nl.ndarray((2, 128, 512), nl.float32, nl.shared_hbm, name="out")
    x, y = put(a), put(b)
    sums = nl.ndarray((128, 512), nl.float32, nl.psum)
    for i in range(4):
        c = 32 * i
        nisa.nc_matmul(
            dst=sums[c : c + 32], stationary=x[:, c : c + 32], moving=y, tile_position=(0, c), tile_size=(128, 32)
        )
    result = nl.ndarray((128, 512), nl.float32, nl.sbuf)
    nisa.activation(dst=result, op=nl.exp, data=sums)
    nisa.dma_copy(dst=out[core], src=result)
    return out


@pytest.fixture(scope="module")
def result() -> Any:
    return launch(two_cores, random((128, 128), BF16, scale=0.01), random((128, 512), BF16), grid=2)


def test_saved_file_is_a_chrome_trace(result: Any, tmp_path: Path) -> None:
    body = json.loads(result.trace.save(tmp_path / "x.json").read_text())
    assert body["otherData"]["title"] == "two_cores: estimated, trn2"
    bars = [e for e in body["traceEvents"] if e["ph"] == "X"]
    assert len(bars) == len(result.estimate.events)
    assert max(e["ts"] + e["dur"] for e in bars) <= result.estimate.total_us + 1e-3
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in body["traceEvents"] if e["name"] == "thread_name"}
    for core in (0, 1):
        assert {"tensor", "scalar", "dma sync", "dma sync-store"} <= {n for (pid, _), n in names.items() if pid == core}
    cores = {e["args"]["name"] for e in body["traceEvents"] if e["name"] == "process_name"}
    assert cores == {"core 0 (estimated, trn2)", "core 1 (estimated, trn2)"}
    here = {e["args"]["source"] for e in bars if e["name"] == "nc_matmul"}
    assert len(here) == 1
    assert here.pop().rsplit(":", 1)[0].endswith(Path(__file__).name)


def test_bars_of_a_row_never_overlap_and_none_is_lost(result: Any) -> None:
    rows = defaultdict(list)
    for e in result.trace.events():
        if e["ph"] == "X":
            rows[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
    for spans in rows.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-3 for a, b in pairwise(spans))
    names = [name for core, name, _ in result.trace.rows() if core == 0 and name.startswith("tensor")]
    assert names == ["tensor", "tensor 2", "tensor 3", "tensor 4"]  # four matmuls on four tiles at once


def test_the_critical_path_is_marked(result: Any) -> None:
    marked = [e for e in result.trace.events() if e["ph"] == "X" and e["args"].get("critical path")]
    assert marked
    assert "nc_matmul" in {e["name"] for e in marked}


def test_a_picture(result: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = result.trace.save_png(tmp_path / "x.png")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert path.stat().st_size > 5000
    part = result.trace.save_png(tmp_path / "part.png", between=(0.0, result.estimate.total_us / 4))
    assert part.read_bytes()[:8] == path.read_bytes()[:8]
    assert part.read_bytes() != path.read_bytes()


def test_a_picture_without_matplotlib_says_what_to_install(
    result: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UnsupportedError, match=r"sparse-mla\[plot\]"):
        result.trace.save_png(tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()


def test_an_empty_launch_has_an_empty_trace(tmp_path: Path) -> None:
    empty = launch(lambda a: None, np.ones((1, 1), np.float32))
    assert empty.trace.events() == []
    assert json.loads(empty.trace.save(tmp_path / "x.json").read_text())["traceEvents"] == []
