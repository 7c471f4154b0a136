# SPDX-License-Identifier: Apache-2.0
"""The first-contact kit: every open question is asked, an answer that differs is seen, and engines can warm up."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from sparse_mla.caches import KVScope, allocate
from sparse_mla.cli import commands
from sparse_mla.dispatch import presence
from sparse_mla.errors import ArgumentError, UnsupportedError
from sparse_mla.formats import INDEX_FP4, V41_FP4, V41_FP8
from sparse_mla.kernels import launch, probe, warm_up
from sparse_mla.ops.sparse_decode import sparse_decode
from sparse_mla.ops.topk import topk

DOC = Path(__file__).parents[1] / "docs" / "first-contact.md"


@pytest.fixture(autouse=True)
def _present() -> None:
    assert presence("simulated") == ""


def test_every_question_is_asked() -> None:
    assert [p.name for p in probe.PROBES] == [f"A{n}" for n in range(1, 16)]
    explained = set(re.findall(r"A\d+", DOC.read_text()))
    assert {p.name for p in probe.PROBES} <= explained, "docs/first-contact.md says what each answer would change"


@pytest.mark.parametrize("name", [p.name for p in probe.PROBES])
def test_the_simulator_does_what_is_assumed(name: str) -> None:
    (result,) = probe.run_probes("simulated", [name])
    assert result.agrees, f"{result.question} assumed {result.assumed}, found {result.found}"


def test_a_different_answer_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that flushes, truncates or saturates must not read 'yes'."""

    def zeros(kernel: object, cores: int, arguments: dict[str, torch.Tensor]) -> torch.Tensor:
        shape = {"scale_subnormal": (4, 1)}.get(getattr(kernel, "func", kernel).__name__)  # type: ignore[attr-defined]
        x = arguments.get("x", arguments.get("a"))
        assert x is not None
        return torch.zeros(shape or (8, 8))

    monkeypatch.setitem(launch.EXECUTORS, "simulated", zeros)
    results = {r.name: r for r in probe.run_probes("simulated", [f"A{n}" for n in range(1, 16) if n not in (6, 11)])}
    assert not any(r.agrees for r in results.values()), [r for r in results.values() if r.agrees]
    assert results["A2"].found.startswith("float32 kept by none")
    text = probe.table(list(results.values()), "heading")
    assert text.startswith("heading\n")
    assert "| NO |" in text
    assert "| yes |" not in text


def test_a_refused_kernel_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("NCC_1234: not today\nsecond line")

    monkeypatch.setitem(launch.EXECUTORS, "simulated", refuse)
    (result,) = probe.run_probes("simulated", ["A12"])
    assert result.found == "refused: NCC_1234: not today"


def test_command(tmp_path: Path) -> None:
    out = tmp_path / "probe.md"
    done = CliRunner().invoke(commands, ["probe", "--backend", "simulated", "--probe", "A14", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "simulator, no device" in done.output
    assert "| A14 |" in out.read_text()
    absent = CliRunner().invoke(commands, ["probe", "--backend", "neuron"])
    assert absent.exit_code != 0
    assert "install the AWS Neuron SDK" in absent.output


def test_unknown_question() -> None:
    with pytest.raises(ArgumentError, match=r"one of A1, .* got 'A16'"):
        probe.run_probes("simulated", ["A16"])


# --- warm-up ---------------------------------------------------------------------------------------------------------


def _config(**changes: object) -> warm_up.EngineConfig:
    config = warm_up.EngineConfig(
        rows=(1, 3, 4),
        window_cache=allocate(V41_FP8, 2, 134),
        compressed_cache=allocate(V41_FP4, 4, 64),
        index_cache=allocate(INDEX_FP4, 4, 64),
        heads=4,
        index_heads=8,
        topk=128,
        max_context_len=256,
    )
    return config._replace(**changes)  # type: ignore[arg-type]


def test_shapes_are_padded_and_unique() -> None:
    shapes = warm_up.neuron_shapes(_config())
    assert {s.rows for s in shapes if s.op == "sparse_decode"} == {1, 3, 4}
    assert {s.rows for s in shapes if s.op != "sparse_decode"} == {1, 4}
    names = [(s.op, s.rows, s.description) for s in shapes]
    assert len(set(names)) == len(names)
    assert {s.op for s in shapes} == {"sparse_decode", "index_logits", "topk", "softmax_pool"}
    alone = warm_up.neuron_shapes(_config(compressed_cache=None, index_cache=None, ratio=1))
    assert {s.op for s in alone} == {"sparse_decode"}
    with pytest.raises(ArgumentError, match="at least 1"):
        warm_up.neuron_shapes(_config(rows=(0,)))


def test_a_call_meets_the_warmed_shapes() -> None:
    """What compiles later is what was compiled: same kernels, same operand shapes, same constants."""
    config = _config(rows=(3,))

    def signatures(run: object) -> set[tuple[object, ...]]:
        with launch.recording() as launched:
            run()  # type: ignore[operator]
        return {
            (
                str(e.kernel),
                tuple(sorted((n, tuple(t.shape), t.dtype) for n, t in e.tensors.items())),
                tuple(sorted(e.constants.items())),
            )
            for e in launched
        }

    warmed = signatures(lambda: warm_up.warm_up(config, "simulated"))
    for shape in warm_up.neuron_shapes(config):
        if shape.op != "sparse_decode":
            continue
        scopes = [KVScope(s.cache, torch.zeros_like(s.indices)) for s in shape.arguments["scopes"]]
        arguments = shape.arguments | {"q": torch.randn(3, 1, 4, 512).bfloat16(), "scopes": scopes}
        call = signatures(lambda: sparse_decode(**arguments, backend="simulated"))  # noqa: B023
        assert call <= warmed, shape.description
    logits = torch.randn(3, 256).bfloat16()
    assert signatures(lambda: topk(logits, 128, torch.full((3,), 200).int(), backend="simulated")) <= warmed


def test_warm_up_refuses_what_will_be_refused() -> None:
    with pytest.raises(UnsupportedError, match="at most 128 heads"):
        warm_up.warm_up(_config(heads=129), "simulated")
