# SPDX-License-Identifier: Apache-2.0
"""Tables of docs/simulator.md against the code, and the tables themselves against what the simulator does."""

from __future__ import annotations

import importlib.util
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparse_mla.errors import KernelError, NotSimulatedError
from sparse_mla.simulator import coverage, rules
from sparse_mla.simulator import isa as nisa

from . import test_checks
from .kit import launch

ROOT = Path(__file__).resolve().parents[2]
ISA = json.loads((ROOT / "tests" / "data" / "nki_api.json").read_text())["api"]["nki.isa"]["functions"]


def tool(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_tables_are_current() -> None:
    module = tool("simulator_docs")
    assert module.page() == module.PAGE.read_text(encoding="utf-8"), "run: python tools/simulator_docs.py"


def test_every_rule_is_described_once() -> None:
    assert list(rules.RULES) == list(range(1, test_checks.RULES + 1))


@pytest.mark.parametrize("number", rules.RULES)
def test_a_rule_does_what_its_row_says(number: int) -> None:
    cases = [c for c in test_checks.CASES if c.check == number and not c.options.get("strict")]
    level = rules.RULES[number].level
    if level == "error":
        assert not any(c.warns for c in cases)
    elif level == "warning":
        assert all(c.warns for c in cases)


@pytest.mark.parametrize("name", coverage.MISSING)
def test_missing_instructions_say_their_name(name: str) -> None:
    function = getattr(nisa, name)
    given = [None for p in inspect.signature(function).parameters.values() if p.default is inspect.Parameter.empty]

    def kernel(a: Any) -> Any:
        function(*given)

    with pytest.raises(NotSimulatedError, match=f"nisa.{name}"):
        launch(kernel, np.ones((1, 1), np.float32), gen=4)


@pytest.mark.parametrize("name", [n for n, gen in coverage.FIRST_GENERATION.items() if gen == 3])
def test_instructions_of_trn2_are_refused_on_trn1(name: str) -> None:
    function = getattr(nisa, name)
    given = [None for p in inspect.signature(function).parameters.values() if p.default is inspect.Parameter.empty]

    def kernel(a: Any) -> Any:
        function(*given)

    with pytest.raises(KernelError, match="from trn2 on"):
        launch(kernel, np.ones((1, 1), np.float32), gen=2)


def test_coverage_knows_every_instruction_and_no_other() -> None:
    rows = coverage.coverage(list(ISA))
    assert {r.name for r in rows} == set(ISA)
    named = {*coverage.MISSING, *coverage.APPROXIMATE_RESULT, *coverage.FIRST_GENERATION, *coverage.NO_TIME}
    assert named <= set(ISA)
    assert all(set(r.results) <= {"exact", "approximate", "missing", "-"} for r in rows)


def test_the_library_suite_asks_for_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NKI_LIBRARY_DIR", raising=False)
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "nki_library_suite.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "NKI_LIBRARY_DIR must name a checkout of aws-neuron/nki-library" in done.stderr
