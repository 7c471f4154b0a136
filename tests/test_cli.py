# SPDX-License-Identifier: Apache-2.0
"""The command: what it prints, what it returns, and what it says when something is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from sparse_mla import cli, config
from sparse_mla.dispatch import BACKENDS, OPS
from sparse_mla.testing import check as checking


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.commands, list(arguments))
    return result.exit_code, result.output


def test_info_names_every_backend_with_its_reason() -> None:
    code, text = run("info")
    assert code == 0
    for name in BACKENDS:
        assert name in text
    assert "cpu_target" in text
    assert "threads" in text


def test_info_json_is_one_object() -> None:
    code, text = run("info", "--json")
    report = json.loads(text)
    assert code == 0
    assert set(report["backends"]) == set(BACKENDS)
    assert report["backends"]["reference"] == ""
    assert set(report["operators"]) == set(OPS)
    assert {v["name"] for v in report["variables"]} == set(config.VARIABLES)
    assert report["versions"]["torch"]
    if report["backends"]["native"]:
        assert "--force-reinstall --no-cache-dir" in report["hints"][0]


def test_info_follows_the_environment_when_asked() -> None:
    with config.override(SPARSE_MLA_LAYOUT="planar", SPARSE_MLA_E4M3_MAX=224):
        caches = json.loads(run("info", "--json")[1])["caches"]
    assert caches == {"layout": "planar", "e4m3_max": 224}


def test_check_passes_and_counts() -> None:
    code, text = run("check", "--op", "merge_partials", "--backend", "reference")
    assert code == 0
    assert "merge_partials" in text
    assert "FAILED" not in text


def test_check_fails_with_exit_code_1_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    implementation = next(i for i in OPS["merge_partials"].implementations if i.backend == "reference")
    true = implementation.run

    def wrong(call: object) -> object:
        out, lse = true(call)
        return out * 1.1, lse

    monkeypatch.setattr(OPS["merge_partials"], "implementations", [type(implementation)(
        **{**implementation.__dict__, "run": wrong})])  # fmt: skip
    checking._answers.cache_clear()
    # The float64 answer comes from the same function, so only the case's own `plain` stays right: judge it by the
    # oracle.
    from sparse_mla.testing.attention_cases import MergeCase

    monkeypatch.setattr(MergeCase, "expected", MergeCase.oracle)
    code, text = run("check", "--op", "merge_partials", "--backend", "reference", "--case", "two-parts")
    checking._answers.cache_clear()
    assert code == 1
    assert "FAILED reference merge_partials/two-parts" in text
    assert "elements outside" in text


def test_check_names_what_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = run("check", "--case", "no such case")
    assert code == 1
    assert "no case matches" in text
    monkeypatch.setattr(sys, "argv", ["sparse-mla", "check", "--op", "no_such_op"])
    with pytest.raises(SystemExit, match=r"sparse-mla: check: op must be one of .*'no_such_op'"):
        cli.main()


def test_check_refuses_an_absent_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = [name for name in BACKENDS if checking.presence(name)]
    if not absent:
        pytest.skip("every backend is present on this machine")
    monkeypatch.setattr(sys, "argv", ["sparse-mla", "check", "--backend", absent[0]])
    with pytest.raises(SystemExit, match=f"backend '{absent[0]}' is not available here"):
        cli.main()


def test_without_click_the_command_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise ModuleNotFoundError('no click', name='click')\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import sparse_mla.cli"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "pip install 'sparse-mla[cli]'" in done.stderr
    assert "Traceback" not in done.stderr
