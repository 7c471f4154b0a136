# SPDX-License-Identifier: Apache-2.0
"""The main job at a small size: its numbers, its own tensors from a file, and what it says to a wrong file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from sparse_mla import cli
from sparse_mla.errors import ArgumentError, DTypeError, ShapeError
from sparse_mla.testing.demo import INPUT_NAMES, STAGE_NAMES, DemoInputs, load_inputs, make_inputs, run_demo


@pytest.fixture(scope="module")
def inputs() -> DemoInputs:
    return make_inputs(sequences=2, rows=3, heads=4, index_heads=8, entries=2000)


def save(path: Path, inputs: DemoInputs, **changes: torch.Tensor | None) -> Path:
    tensors = inputs._asdict() | changes
    save_file({name: t.contiguous() for name, t in tensors.items() if t is not None}, str(path))
    return path


def test_the_job(inputs: DemoInputs) -> None:
    heard: list[str] = []
    report = run_demo(inputs, backend="reference", on_stage=heard.append)
    assert tuple(heard) == STAGE_NAMES
    assert [s.executes for s in report.stages] == ["reference"] * 6
    assert all(s.seconds > 0 for s in report.stages)
    # Nothing but the rounding of the output to bfloat16 is left of the kernel.
    assert 1e-4 < report.kernel_error < 2.5e-3
    # FP4 entries and another selection cost far more, and far less than everything.
    assert 0.02 < report.format_error < 0.6
    assert 0.5 < report.selected_share <= 1.0
    assert report.bytes_per_token["window FP8"] == 528
    assert report.bytes_per_token["compressed FP4"] == 144
    assert report.tensors["out"].shape == (2, 3, 4, 512)
    assert report.tensors["selected"].shape == (2, 3, 512)
    assert int(report.tensors["selected"].min()) >= 0


def test_formats_cost_nothing_when_they_are_exact() -> None:
    """Keys that FP8 and FP4 hold exactly, and fewer entries than are selected: both errors are the kernel's alone."""
    inputs = make_inputs(sequences=1, rows=2, heads=3, index_heads=4, entries=500)
    exact = inputs._replace(compressed_kv=inputs.compressed_kv.sign() * 1.5, window_kv=inputs.window_kv.sign())
    report = run_demo(exact, backend="reference")
    assert report.kernel_error < 2.5e-3
    assert report.format_error == pytest.approx(report.kernel_error, rel=1e-6)
    assert report.selected_share == 1.0
    assert (report.tensors["selected"] >= 0).sum(dim=-1).flatten().tolist() == [499, 500]


def test_own_tensors_from_a_file(inputs: DemoInputs, tmp_path: Path) -> None:
    source, target = save(tmp_path / "in.safetensors", inputs), tmp_path / "out.safetensors"
    result = CliRunner().invoke(
        cli.commands, ["demo", "--input", str(source), "--save", str(target), "--backend", "reference"]
    )
    assert result.exit_code == 0, result.output
    for word in ("kernel error", "format error", "bytes per token", "selected keys", "attend", "reference"):
        assert word in result.output
    saved, again = load_file(str(target)), run_demo(inputs, backend="reference")
    assert set(saved) == {"out", "lse", "selected"}
    for name, tensor in saved.items():
        assert torch.equal(tensor, again.tensors[name])


def test_help_documents_the_tensor_names() -> None:
    text = " ".join(CliRunner().invoke(cli.commands, ["demo", "--help"]).output.split())
    for name in INPUT_NAMES:
        assert name in text


def test_a_sink_is_optional(inputs: DemoInputs, tmp_path: Path) -> None:
    loaded = load_inputs(save(tmp_path / "in.safetensors", inputs, attn_sink=None))
    assert loaded.attn_sink is None
    assert run_demo(loaded, backend="reference").kernel_error < 2.5e-3


def test_a_wrong_file_is_told_in_one_sentence(inputs: DemoInputs, tmp_path: Path) -> None:
    path = tmp_path / "in.safetensors"
    with pytest.raises(ArgumentError, match=r"demo: in.safetensors must hold q, .* got no index_k, index_weights"):
        load_inputs(save(path, inputs, index_k=None, index_weights=None))
    with pytest.raises(ShapeError, match=r"demo: index_k must be \[2, 2000, 128\] to match"):
        load_inputs(save(path, inputs, index_k=inputs.index_k[:, 1:]))
    with pytest.raises(DTypeError, match=r"demo: window_kv must be torch.bfloat16, got torch.float32"):
        load_inputs(save(path, inputs, window_kv=inputs.window_kv.float()))
    with pytest.raises(ShapeError, match=r"demo: q and index_q must have 4 dimensions"):
        load_inputs(save(path, inputs, q=inputs.q[0]))
    few = {"compressed_kv": inputs.compressed_kv[:, :50], "index_k": inputs.index_k[:, :50]}
    with pytest.raises(ShapeError, match="must cover the window"):
        load_inputs(save(path, inputs, **few))


def test_more_rows_than_the_ring_allows(tmp_path: Path) -> None:
    inputs = make_inputs(sequences=1, rows=8, heads=1, index_heads=1, entries=200)
    with pytest.raises(ShapeError, match="at most 7 rows per sequence, got 8"):
        load_inputs(save(tmp_path / "in.safetensors", inputs))
