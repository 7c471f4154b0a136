# SPDX-License-Identifier: Apache-2.0
"""`sparse-mla simulate`, and looking into a kernel while it runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

from sparse_mla import cli
from sparse_mla.errors import ArgumentError
from sparse_mla.simulator import command, uninstall

from .kit import get, launch, nisa, nl, put

SOURCE = """
import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit
def add(a, b, factor=1.0, kind="sum"):
    out = nl.ndarray(a.shape, a.dtype, buffer=nl.shared_hbm, name="out")
    x = nl.ndarray(a.shape, a.dtype, buffer=nl.sbuf)
    y = nl.ndarray(a.shape, a.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=x, src=a)
    nisa.dma_copy(dst=y, src=b)
    assert kind == "sum"
    nisa.tensor_tensor(dst=x, data1=x, data2=y, op=nl.add)
    nisa.tensor_scalar(dst=x, data=x, op0=nl.multiply, operand0=factor)
    nisa.dma_copy(dst=out, src=x)
    return out


@nki.jit
def halves(a):
    out = nl.ndarray(a.shape, a.dtype, buffer=nl.shared_hbm, name="out")
    core = nl.program_id(0)
    x = nl.ndarray((1, a.shape[1]), a.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=x, src=a[core : core + 1])
    nisa.dma_copy(dst=out[core : core + 1], src=x)
    return out


@nki.jit
def wide(a):
    x = nl.ndarray((256, 4), nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=x, value=0.0)


@nki.jit
def unportable(a):
    return [x for x in a]
"""


@pytest.fixture
def kernel_file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "some_kernels.py"
    path.write_text(SOURCE)
    before = list(sys.path)
    yield path
    sys.path[:] = before
    sys.modules.pop("some_kernels", None)
    uninstall()


@pytest.fixture
def arguments(tmp_path: Path) -> Path:
    path = tmp_path / "x.npz"
    a = np.arange(128 * 64, dtype=np.float32).reshape(128, 64)
    np.savez(path, a=a, b=np.ones_like(a))
    return path


def invoke(*arguments: Any) -> tuple[int, str, BaseException | None]:
    result = CliRunner().invoke(cli.commands, ["simulate", *map(str, arguments)])
    return result.exit_code, result.output, result.exception


def test_simulate_reports_logs_traces_and_saves(kernel_file: Path, arguments: Path, tmp_path: Path) -> None:
    code, text, _ = invoke(
        f"{kernel_file}:add", "--args", arguments, "--set", "factor=2.0", "--set", "kind=sum", "--log", "--trace",
        tmp_path / "t.json", "--save", tmp_path / "out.npz",
    )  # fmt: skip
    assert code == 0, text
    assert "add: 1 core, 5 instructions (estimated, trn2" in text
    assert text.count("some_kernels.py:") >= 5 + 5
    assert "tensor_scalar" in text
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    with np.load(arguments) as given, np.load(tmp_path / "out.npz") as out:
        np.testing.assert_array_equal(out["output0"], (given["a"] + 1) * 2)


def test_simulate_takes_grid_and_generation(kernel_file: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", a=np.ones((2, 512), np.float32))
    code, text, _ = invoke(f"{kernel_file}:halves", "--args", tmp_path / "a.npz", "--grid", "2", "--gen", "4")
    assert code == 0, text
    assert "halves: 2 cores" in text
    assert "estimated, trn3" in text


def test_simulate_draws(kernel_file: Path, arguments: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code, text, _ = invoke(f"{kernel_file}:add", "--args", arguments, "--png", tmp_path / "t.png")
    assert code == 0, text
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_a_wrong_kernel_is_one_sentence(kernel_file: Path, arguments: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(arguments, a=np.ones((4, 4), np.float32))
    monkeypatch.setattr(sys, "argv", ["sparse-mla", "simulate", f"{kernel_file}:wide", "--args", str(arguments)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert "256 partitions" in str(caught.value)
    assert "some_kernels.py:" in str(caught.value)


def test_lint_lists_findings_and_fails(kernel_file: Path, tmp_path: Path) -> None:
    code, text, _ = invoke("--lint", kernel_file)
    assert code == 1
    assert "unportable: list comprehension" in text
    clean = tmp_path / "clean.py"
    clean.write_text(SOURCE[: SOURCE.index("@nki.jit\ndef unportable")])
    code, text, _ = invoke("--lint", clean)
    assert code == 0, text
    assert "nothing that a front end would refuse" in text


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ((), "FILE:KERNEL"),
        (("--args", "nowhere.npz"), "nowhere.npz is not a file"),
        (("--set", "factor"), "--set must be NAME=VALUE, got 'factor'"),
    ],
)
def test_bad_command_lines_are_one_sentence(kernel_file: Path, more: tuple[str, ...], sentence: str) -> None:
    spec = str(kernel_file) if sentence == "FILE:KERNEL" else f"{kernel_file}:add"
    code, _, error = invoke(spec, *more)
    assert code == 1
    assert isinstance(error, ArgumentError)
    assert sentence in str(error)


def test_an_unknown_kernel_names_those_there_are(kernel_file: Path) -> None:
    _, _, error = invoke(f"{kernel_file}:subtract")
    assert "its kernels are ['add', 'halves', 'wide', 'unportable']" in str(error)


def test_types_numpy_cannot_store(tmp_path: Path) -> None:
    q = np.arange(8, dtype=np.float32).astype(ml_dtypes.bfloat16)
    np.savez(tmp_path / "a.npz", **{"q:bfloat16": q.view(np.uint16)})
    loaded = command.load_arguments(tmp_path / "a.npz")
    assert loaded["q"].dtype == q.dtype
    np.testing.assert_array_equal(loaded["q"].astype(np.float32), np.arange(8))
    np.savez(tmp_path / "b.npz", q=q)
    with pytest.raises(ArgumentError, match="q:bfloat16"):
        command.load_arguments(tmp_path / "b.npz")
    np.savez(tmp_path / "c.npz", **{"q:bfloat16": np.ones(4, np.float32)})
    with pytest.raises(ArgumentError, match="2-byte elements, got float32"):
        command.load_arguments(tmp_path / "c.npz")


def test_safetensors_arguments_and_saved_bfloat16(kernel_file: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    a = torch.arange(256, dtype=torch.float32).reshape(4, 64).to(torch.bfloat16)
    save_file({"a": a, "b": torch.ones_like(a)}, tmp_path / "x.safetensors")
    code, text, _ = invoke(f"{kernel_file}:add", "--args", tmp_path / "x.safetensors", "--save", tmp_path / "o.npz")
    assert code == 0, text
    out = command.load_arguments(tmp_path / "o.npz")["output0"]
    assert out.dtype == np.dtype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(out.astype(np.float32), (a + 1).float().numpy())


# -- looking inside ----------------------------------------------------------------------------------------------------


def test_print_shows_contents(capsys: pytest.CaptureFixture[str]) -> None:
    def kernel(a: Any) -> Any:
        x = put(a)
        nisa.tensor_scalar(dst=x, data=x, op0=nl.add, operand0=0.5)
        print(x)
        print(f"first row {x[0:1, 0:2].numpy()}")
        return get(x)

    launch(kernel, np.arange(8, dtype=np.float32).reshape(2, 4))
    text = capsys.readouterr().out
    assert "(2, 4) float32 SBUF" in text
    assert "0.5" in text
    assert "7.5" in text
    assert "first row [[0.5 1.5]]" in text


def test_breakpoint_stops_in_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def hook(*_: Any, **__: Any) -> None:
        frame = sys._getframe(1)
        seen["function"] = frame.f_code.co_name
        seen["value"] = frame.f_locals["x"].numpy()

    monkeypatch.setattr(sys, "breakpointhook", hook)

    def kernel(a: Any) -> Any:
        x = put(a)
        nisa.tensor_scalar(dst=x, data=x, op0=nl.multiply, operand0=3.0)
        breakpoint()
        return get(x)

    out = launch(kernel, np.ones((2, 4), np.float32)).value
    assert seen["function"] == "kernel"
    np.testing.assert_array_equal(seen["value"], 3.0)
    np.testing.assert_array_equal(out, 3.0)
