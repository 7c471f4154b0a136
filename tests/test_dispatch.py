# SPDX-License-Identifier: Apache-2.0
"""Selection among implementations: order, refusals, no fallback of a named backend, one warning, `explain`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

import sparse_mla
from sparse_mla import config, dispatch
from sparse_mla.dispatch import BACKENDS, EXACT, OPS, Limits, Op, Tolerance, explain
from sparse_mla.errors import ArgumentError, BackendUnavailableError, UnsupportedError
from sparse_mla.testing.cases import cases_of


class Call(NamedTuple):
    num_heads: int = 8
    num_rows: int = 4
    topk: int = 64
    formats: tuple[str, ...] = ("V41_FP8",)
    layouts: tuple[str, ...] = ("interleaved",)
    out_dtype: torch.dtype = torch.bfloat16
    device: torch.device = torch.device("cpu")

    @classmethod
    def check(cls, num_heads: int) -> Call:
        return cls(num_heads=num_heads)


LOOSE = Tolerance("loose", 2.0, "for this test")


@pytest.fixture
def op(monkeypatch: pytest.MonkeyPatch) -> Iterator[Op]:
    """An operator with a native implementation for up to 16 heads, another strategy up to 32, and a reference."""
    monkeypatch.setattr(dispatch, "_PRESENCE", {"native": "", "reference": "", "neuron": "no device", "simulated": ""})
    monkeypatch.setattr(dispatch, "_WARNED", set())
    made = Op("made_for_test", Call)
    made.impl("native", limits=Limits(max_heads=16), tolerance=LOOSE, strategy="small")(lambda call: "small")
    made.impl("native", limits=Limits(max_heads=32), tolerance=LOOSE, strategy="large")(lambda call: "large")
    made.impl("reference", limits=Limits(), tolerance=EXACT)(lambda call: "reference")
    yield made
    del OPS["made_for_test"]


@pytest.mark.parametrize(("heads", "taken"), [(16, "small"), (17, "large"), (32, "large")])
def test_first_that_accepts_is_taken(op: Op, heads: int, taken: str) -> None:
    assert op.run(Call(num_heads=heads), "auto") == taken
    assert op.run(Call(num_heads=heads), "native") == taken
    assert op.run(Call(num_heads=heads), "reference") == "reference"


def test_auto_ends_at_reference_with_one_warning_that_says_why(op: Op) -> None:
    with pytest.warns(RuntimeWarning, match=r"native:large: at most 32 heads, got 33"):
        assert op.run(Call(num_heads=33), "auto") == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert op.run(Call(num_heads=34), "auto") == "reference"


def test_a_named_backend_never_falls_back(op: Op) -> None:
    with pytest.raises(UnsupportedError) as error:
        op.run(Call(num_heads=33), "native")
    text = str(error.value)
    assert text.startswith("made_for_test: no implementation under backend 'native' accepts this call.")
    assert "native:small: at most 16 heads, got 33." in text
    assert "native:large: at most 32 heads, got 33." in text


def test_absent_and_unknown_backends(op: Op) -> None:
    with pytest.raises(BackendUnavailableError, match="backend 'neuron' is not available here: no device"):
        op.run(Call(), "neuron")
    with pytest.raises(ArgumentError, match=r"backend must be auto or one of .*, got 'cuda'"):
        op.run(Call(), "cuda")
    with pytest.raises(UnsupportedError, match="simulated has no implementation"):
        op.run(Call(), "simulated")


def test_simulated_is_never_automatic(op: Op) -> None:
    op.impl("simulated", limits=Limits(), tolerance=LOOSE)(lambda call: "simulated")
    assert "simulated" not in {i.backend for i in op.candidates("auto")}
    assert op.run(Call(), "simulated") == "simulated"


def test_the_environment_chooses_for_calls_that_name_none(op: Op) -> None:
    with config.override(SPARSE_MLA_BACKEND="reference"):
        assert op.run(Call()) == "reference"
    with config.override(SPARSE_MLA_BACKEND="native"):
        assert op.run(Call()) == "small"
    with config.override(SPARSE_MLA_BACKEND="nonsense"), pytest.raises(ArgumentError, match="'nonsense'"):
        op.run(Call())


def test_another_device_is_refused_without_a_warning(op: Op) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert op.run(Call(device=torch.device("meta")), "auto") == "reference"
    with pytest.raises(UnsupportedError, match="tensors must be on cpu, got meta"):
        op.run(Call(device=torch.device("meta")), "native")


def test_one_function_under_two_backends_is_told_which(op: Op) -> None:
    monkey = Op("made_for_test", Call)

    @monkey.impl("neuron", "simulated", limits=Limits(), tolerance=LOOSE)
    def launch(call: Call, backend: str) -> str:
        return backend

    assert [i.run(Call()) for i in monkey.implementations] == ["neuron", "simulated"]


def test_a_rule_across_arguments_adds_sentences(op: Op) -> None:
    def rule(call: Any) -> list[str]:
        return [] if call.num_rows % 2 == 0 else [f"rows must be even, got {call.num_rows}"]

    op.impl("simulated", limits=Limits(max_topk=64), tolerance=LOOSE, rule=rule)(lambda call: "ok")
    assert op.run(Call(), "simulated") == "ok"
    with pytest.raises(UnsupportedError, match=r"topk at most 64, got 65; rows must be even, got 3"):
        op.run(Call(num_rows=3, topk=65), "simulated")


@pytest.mark.parametrize(
    ("limits", "call", "sentence"),
    [
        (Limits(max_heads=4), Call(), "at most 4 heads, got 8"),
        (Limits(max_rows=3), Call(), "at most 3 query rows, got 4"),
        (Limits(max_topk=63), Call(), "topk at most 63, got 64"),
        (Limits(formats=frozenset({"V41_FP4"})), Call(), "record format must be one of V41_FP4, got V41_FP8"),
        (Limits(layouts=frozenset({"planar"})), Call(), "page layout must be one of planar, got interleaved"),
        (Limits(), Call(out_dtype=torch.float64), "out_dtype must be one of bfloat16, float32, got float64"),
    ],
)
def test_each_limit_refuses_with_its_sentence(limits: Limits, call: Call, sentence: str) -> None:
    assert limits.refusals(call) == [sentence]
    assert limits.refusals(call._replace(num_heads=1, num_rows=1, topk=1)) == (
        [] if sentence.startswith(("at most", "topk")) else [sentence]
    )


def test_limits_in_words() -> None:
    assert Limits().sentence() == "none"
    text = Limits(
        max_heads=128, formats=frozenset({"B", "A"}), layouts=frozenset({"planar"}), max_rows=2, max_topk=3
    ).sentence()
    assert text == "heads <= 128; formats A, B; layouts planar; rows <= 2; topk <= 3"


def test_explain_lists_everybody_and_runs_nothing(op: Op) -> None:
    found = op.explain(Call(num_heads=20), "auto")
    assert (found.chosen, found.executes) == ("native:large", "native:large")
    assert [(r.backend, r.strategy, r.reasons) for r in found.rows] == [
        ("neuron", "", ("no device",)),
        ("native", "small", ("at most 16 heads, got 20",)),
        ("native", "large", ()),
        ("reference", "", ()),
    ]
    text = str(found)
    assert "neuron                       refuses: no device" in text
    assert "native:large                 accepts" in text
    nothing = op.explain(Call(num_heads=99), "native")
    assert nothing.chosen is None
    assert "no backend accepts this call" in str(nothing)
    assert explain("made_for_test", 20).chosen == "native:large"


def test_explain_names_the_torch_form(op: Op) -> None:
    op.impl("simulated", limits=Limits(), tolerance=LOOSE, torch_form=True)(lambda call: "torch")
    assert op.explain(Call(), "simulated").executes == "torch on cpu"


def test_explain_needs_a_known_operator() -> None:
    with pytest.raises(ArgumentError, match=r"explain: op must be one of .*, got 'attention'"):
        explain("attention")


@pytest.mark.parametrize("stem", sorted(OPS))
@pytest.mark.parametrize("backend", [None, "reference"])
def test_explain_answers_as_the_call_would(stem: str, backend: str | None) -> None:
    case = next(c for c in cases_of(stem) if not c.tags)
    problem = case.build()
    said = explain(stem, **problem.arguments, backend=backend)
    call = OPS[stem].call_type.check(**problem.arguments)
    assert said.chosen == OPS[stem].select(call, backend).name
    assert {r.backend for r in said.rows} == ({"neuron", "native", "reference"} if backend is None else {backend})


@pytest.mark.parametrize("make", [lambda: sparse_mla.info(), lambda: sparse_mla.info().as_dict()])
def test_info_tells_every_backend(make: Callable[[], Any]) -> None:
    made = make()
    backends = made["backends"] if isinstance(made, dict) else made.backends
    assert set(backends) == set(BACKENDS)
    assert all(name in str(made) for name in BACKENDS)
