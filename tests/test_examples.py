# SPDX-License-Identifier: Apache-2.0
"""Every example runs, is short enough to read, and says on its first line what it shows."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from sparse_mla import compat, simulator

EXAMPLES = sorted((Path(__file__).resolve().parent.parent / "examples").glob("*.py"))
NEEDS_LAUNCHER = {"torchrun_decode.py"}  # run by its own test, with several processes


@pytest.fixture
def clean_modules():
    yield
    compat.uninstall()
    simulator.uninstall()


@pytest.mark.parametrize("path", [p for p in EXAMPLES if p.name not in NEEDS_LAUNCHER], ids=lambda p: p.stem)
@pytest.mark.usefixtures("clean_modules")
def test_example_runs(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(path.read_text().splitlines()) <= 60, f"{path.name}: keep an example under 60 lines"
    monkeypatch.setattr(sys, "argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip(), "an example prints what it shows"


def test_quality_study_draws_its_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib, extra `plot`")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    picture = tmp_path / "quality.png"
    monkeypatch.setattr(sys, "argv", ["quality_study.py", str(picture)])
    runpy.run_path(str(EXAMPLES[0].parent / "quality_study.py"), run_name="__main__")
    assert picture.stat().st_size > 10_000
