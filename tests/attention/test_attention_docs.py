# SPDX-License-Identifier: Apache-2.0
"""The stages of the code, the page about them, and the demo that runs them."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from attention_driver import BACKENDS, KINDS, SMALL, Run, hidden_rows

from sparse_mla.attention import STAGES, picture
from sparse_mla.attention.demo import LayersReport, run_layers_demo
from sparse_mla.attention.layer import STAGE_LAYERS
from sparse_mla.errors import ArgumentError

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def shapes():
    return picture.recorded_shapes()


def test_every_kind_of_layer_records_exactly_its_stages():
    run = Run()
    run.record = True
    s = run.pool.allocate()
    run.prefill([s], hidden_rows(SMALL, 9), [9])
    run.draft([s], hidden_rows(SMALL, 5))
    for layer in KINDS:
        plan = run.pool.topology[layer]
        expected = {stage.name for stage in STAGES if STAGE_LAYERS[stage.layers](plan)}
        found = {stage for (_, n, stage) in run.recorded if n == layer}
        if plan.publishes_candidates:
            found.add("candidates")  # kept apart by the recorder
        assert found == expected, layer


def test_a_stage_reads_only_stages_before_it():
    known = set(picture.STORES)
    for stage in STAGES:
        assert set(stage.reads) <= known, stage.name
        known.add(stage.name)


def test_the_page_holds_the_generated_table_and_picture(shapes):
    page = (DOCS / "layer.md").read_text()
    fix = "run: python -m sparse_mla.attention.picture docs"
    assert page.split(picture.BEGIN)[1].split(picture.END)[0].strip() == picture.table(shapes), fix
    svg = (DOCS / "layer.svg").read_text()
    assert svg == picture.draw(shapes), fix
    drawn = {t.text for t in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")}
    assert {stage.name for stage in STAGES} | set(picture.STORES) <= drawn


def test_the_code_of_the_page_runs():
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "layer.md").read_text(), re.S)
    assert blocks
    torch.manual_seed(0)
    for block in blocks:
        exec(compile(block, "layer.md", "exec"), {})


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "simulated"])
def test_the_demo_checks_itself_against_one_prefill(backend):
    seen = []
    report = run_layers_demo(
        "tiny",
        backend=backend,
        prompts=(9, 30),
        chunk=11,
        decode_steps=1,
        on_step=lambda what, done, total: seen.append((what, done, total)),
    )
    assert report.passed
    assert report.notes == []
    assert len(report.layers) == 43
    assert report.verified == 12
    assert report.accepted + report.rejected == 12
    assert report.checked_sequences == 2
    assert report.bytes_per_token == 890.0
    assert all(0 <= done <= total for _, done, total in seen)
    assert {what.split(": ")[1] for what, _, _ in seen} == {"drawing weights", "prefill", "decode", "one-shot prefill"}
    values = dict(report.rows())
    assert values["prompts, tokens"] == "9, 30"
    assert values["sequences checked"] == "2 of 2: ok"


def test_the_demo_notices_a_wrong_result():
    report = LayersReport("tiny", (0,), "reference", (3,))
    assert report.passed
    report.decode_error = 1e-9
    assert not report.passed  # the reference must be exact
    with pytest.raises(ArgumentError, match="preset"):
        run_layers_demo("huge")
    with pytest.raises(ArgumentError, match="1048576"):
        run_layers_demo("tiny", prompts=(1 << 20,))


def test_the_command_runs_the_demo():
    click_testing = pytest.importorskip("click.testing")
    from sparse_mla.cli import commands

    backend = "native" if "native" in BACKENDS else "reference"
    arguments = [
        "demo",
        "--layers",
        "--quick",
        "--preset",
        "tiny",
        "--prompt",
        "4",
        "--prompt",
        "7",
        "--backend",
        backend,
    ]
    result = click_testing.CliRunner().invoke(commands, arguments)
    assert result.exit_code == 0, result.output
    for text in ("prefill, tokens/s", "cache bytes per token", "890", "one-shot", "2 of 2: ok"):
        assert text in result.output


@pytest.mark.full
def test_the_demo_runs_one_layer_of_each_kind_at_full_size():
    backend = "native" if "native" in BACKENDS else "reference"
    report = run_layers_demo("flash", backend=backend, prompts=(40, 150), chunk=100, decode_steps=2)
    assert report.passed
    assert report.layers == (0, 2, 3, 20, 21, 24, 40)
