# SPDX-License-Identifier: Apache-2.0
"""Sweeps, charts and the report: tables hold what was measured, the page needs nothing else, estimates are marked."""

from __future__ import annotations

import base64
import json
import re
import time
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from sparse_mla import cli
from sparse_mla.dispatch import presence
from sparse_mla.errors import ArgumentError, UnsupportedError
from sparse_mla.testing import plots, report, scaling, timing
from sparse_mla.testing.bench import BenchRow
from sparse_mla.testing.neuron_cost import CostRow
from sparse_mla.testing.report import Report, render
from sparse_mla.testing.scaling import Point, ScalingRow, Sweep, decode_case, markdown, run_sweeps, sweeps, topk_case
from sparse_mla.testing.timing import Roofs

PNG = b"\x89PNG\r\n\x1a\n"
ROOFS = Roofs(peak_gflops=1000.0, gemm_gflops=1000.0, read_gbs=100.0)
SMALL = [
    Sweep(
        name="context",
        title="small contexts <&>",
        axis="keys of context",
        points=tuple(Point(x=n, case=topk_case(f"c-{n}", context=n, rows=1), threads=1) for n in (512, 1024)),
    ),
    Sweep(
        name="heads",
        title="few heads",
        axis="heads",
        points=tuple(
            Point(x=n, case=decode_case(f"h-{n}", rows=1, heads=n, keys=64), threads=1, contestants=("torch_pair",))
            for n in (2, 1)
        ),
    ),
    Sweep(
        name="decode-threads",
        title="one or two threads",
        axis="threads",
        points=tuple(Point(x=n, case=decode_case(f"t-{n}", rows=1, heads=1, keys=64), threads=n) for n in (1, 2)),
    ),
]
BENCH_ROW = BenchRow(
    op="topk", case="<case>", backend="native", cpu_target="avx2", threads=1, median_us=12.5, spread=0.02, gflops=0.0,
    gbs=3.0, pct_peak=None, pct_gemm=None, pct_stream=40.0, pct_gather=None, ratio_vs={"best_torch": 2.5},
)  # fmt: skip


def cost(rows: int, heads: int, family: str = "fused", variant: str = "native", us: float = 24.0) -> CostRow:
    return CostRow(
        "sparse_decode", family, variant, "128_fp8+512_fp4", rows, heads, 1, us, 30.0, 1, 1, 1, {}, "vector", 10**6,
        "trn2",
    )  # fmt: skip


@pytest.fixture(scope="module")
def rows() -> list[ScalingRow]:
    return list(run_sweeps(SMALL, rounds=3, min_seconds=0.0, footprint_bytes=1 << 20, roofs=lambda *_, **__: ROOFS))


@pytest.fixture(scope="module")
def whole(rows: list[ScalingRow]) -> Report:
    costs = [cost(6, 8), cost(6, 8, "bf16_rows")]
    charts = plots.draw_all(SMALL, rows, costs)
    return Report(
        command="sparse-mla bench --plot 'a b'", rows=[BENCH_ROW], skipped=["one <sentence>"], sweeps=SMALL,
        scaling=rows, costs=costs, charts=charts, facts={"processor": "a & b"},
    )  # fmt: skip


# --- sweeps ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quick", [False, True])
def test_sweeps_differ_in_what_they_name(quick: bool) -> None:
    found = {sweep.name: sweep for sweep in sweeps(quick=quick, threads=2)}
    for point in found["context"].points:
        assert point.case.context == point.x  # type: ignore[attr-defined]
    for point in found["heads"].points:
        assert point.case.h_q == point.x  # type: ignore[attr-defined]
    for point in found["batch"].points:
        assert point.case.b == point.x  # type: ignore[attr-defined]
    for point in found["sequences"].points:
        assert (point.case.b, point.case.n) == (point.x, 1)  # type: ignore[attr-defined]
    for point in found["keys"].points:
        assert [s.topk for s in point.case.scopes] == [128, point.x]  # type: ignore[attr-defined]
    for name in ("decode-threads", "index-threads"):
        assert [p.threads for p in found[name].points] == [p.x for p in found[name].points]
    assert all(p.threads == 2 for name, s in found.items() if "threads" not in name for p in s.points)


def test_contexts_reach_a_million() -> None:
    points = sweeps()[0].points
    assert [p.x for p in points] == [4096 << i for i in range(9)]
    assert all(not p.contestants for p in points if p.x > scaling.TORCH_CONTEXT)


@pytest.mark.parametrize(("cores", "counts"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))])
def test_thread_counts(cores: int, counts: tuple[int, ...]) -> None:
    assert scaling._thread_counts(cores) == counts


def test_rows_say_what_was_measured(rows: list[ScalingRow]) -> None:
    assert [(r.sweep, r.x) for r in rows] == [(s.name, p.x) for s in SMALL for p in s.points]
    assert {r.backend for r in rows} == {"reference" if presence("native") else "native"}
    assert all(r.median_us > 0 for r in rows)
    assert [r.ratio for r in rows if r.x == {"context": 512, "heads": 2, "decode-threads": 1}[r.sweep]] == [1.0] * 3
    assert all((r.best_torch is not None) == (r.sweep == "heads") for r in rows)
    assert all((r.pct_gather is None) == (r.op == "index_topk") for r in rows)
    assert all((r.pct_stream is None) == (r.op == "sparse_decode") for r in rows)
    assert [r.scores_bytes for r in rows if r.sweep == "context"] == [1024, 2048]


def test_the_nearest_roof_bounds() -> None:
    """The case's own counts over the time, against made-up roofs."""
    case = decode_case("bound", rows=1, heads=8, keys=64)
    sweep = Sweep(name="s", title="s", axis="rows", points=(Point(x=1, case=case, threads=1),))
    taken = {"0/ours": scaling.Timing((50.0, 50.0, 50.0))}
    gflops, gbs = case.flops / 50e3, case.nbytes / 50e3
    compute = scaling._row(sweep, 0, taken, "native", ROOFS._replace(peak_gflops=2 * gflops), 4 * gbs)
    assert (compute.pct_peak, compute.pct_gather, compute.bound_by) == (50.0, 25.0, "arithmetic")
    memory = scaling._row(sweep, 0, taken, "native", ROOFS._replace(peak_gflops=4 * gflops), 2 * gbs)
    assert (memory.pct_peak, memory.pct_gather, memory.bound_by) == (25.0, 50.0, "gathering")
    gemm = scaling._row(sweep, 0, taken, "native", Roofs(None, 2 * gflops, 4 * gbs), None)
    assert (gemm.pct_peak, gemm.pct_gemm, gemm.pct_stream, gemm.bound_by) == (None, 50.0, 25.0, "arithmetic")


def test_ratios_are_medians_over_rounds() -> None:
    points = tuple(
        Point(x=n, case=decode_case(f"r-{n}", rows=n), threads=1, contestants=("torch_pair",)) for n in (1, 2)
    )
    sweep = Sweep(name="s", title="s", axis="rows", points=points)
    # The machine became ten times slower in the last round; the ratio does not notice.
    taken = {
        "0/ours": scaling.Timing((10.0, 10.0, 100.0)),
        "0/torch_pair": scaling.Timing((20.0, 20.0, 200.0)),
        "1/ours": scaling.Timing((15.0, 15.0, 150.0)),
        "1/torch_pair": scaling.Timing((60.0, 60.0, 600.0)),
    }
    row = scaling._row(sweep, 1, taken, "native", ROOFS, 10.0)
    assert (row.ratio, row.best_torch) == (1.5, 4.0)


def test_processor_time_leaves_out_waiting() -> None:
    def action(_: int) -> None:
        time.sleep(0.02)

    taken = timing.interleave({"a": action}, rounds=3, min_seconds=0.0, clock=time.thread_time)["a"]
    assert taken.median_us < 5000


def test_processor_time_is_of_one_thread() -> None:
    with pytest.raises(ArgumentError, match="threads must be 1"):
        next(run_sweeps(SMALL, cpu_time=True))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="resident memory is read from Linux's /proc")
def test_growth_sees_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    held = []

    def take(case: object, problem: object, backend: str) -> None:
        held.append(torch.ones((32 << 20) // 4) if case == case_of_interest else None)
        held.clear()  # a peak, not a leak

    case_of_interest = topk_case("big", context=2048, rows=1)
    before = torch.get_num_threads()
    monkeypatch.setattr(scaling.Case, "call", take)
    try:
        grown = scaling._growth(case_of_interest, "native", 1)
    finally:
        torch.set_num_threads(before)
    assert 31 << 20 < grown < 48 << 20


@pytest.mark.full
@pytest.mark.skipif(bool(presence("native")), reason="the bound is the native backend's")
def test_memory_does_not_grow_with_the_context() -> None:
    small, large = (scaling.scratch_bytes(topk_case("m", context=n), "native", 2) for n in (2**15, 2**19))
    if small is None or large is None:
        pytest.skip("this system does not tell")
    assert large < small + (2 << 20)
    assert large < 6 * 2**19 * 2  # the scores alone


def test_table_leaves_out_empty_columns(rows: list[ScalingRow]) -> None:
    text = markdown(SMALL, rows)
    tables = re.split(r"^### ", text, flags=re.M)[1:]
    assert [t.splitlines()[0] for t in tables] == [s.title for s in SMALL]
    assert "us per key" in tables[0]
    assert "best torch" not in tables[0]
    assert "best torch" in tables[1]
    assert "speed-up" in tables[2]
    for t in tables:
        lines = [line for line in t.splitlines() if line.startswith("|")]
        assert len(lines) == 4
        assert len({line.count("|") for line in lines}) == 1


@pytest.mark.parametrize(
    ("value", "text"), [(0.012345, "0.0123"), (12.345, "12.3"), (123.4, "123"), (123456.0, "123,456")]
)
def test_three_digits(value: float, text: str) -> None:
    assert scaling.significant(value) == text


# --- charts ----------------------------------------------------------------------------------------------------------


def test_every_chart_is_drawn(whole: Report) -> None:
    charts = whole.charts
    assert [c.name for c in charts] == [
        "time-by-context", "time-by-heads", "speed-by-threads", "bytes-per-token", "neuron-estimate",
    ]  # fmt: skip
    assert all(c.png.startswith(PNG) and len(c.png) > 5000 for c in charts)
    assert len({c.png for c in charts}) == len(charts)


def test_nothing_measured_draws_no_measurement() -> None:
    assert [c.name for c in plots.draw_all(SMALL, [], [])] == ["bytes-per-token"]


def drawn(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    figures: list[object] = []
    keep = plots._png
    monkeypatch.setattr(plots, "_png", lambda figure: figures.append(figure) or keep(figure))
    return figures


def test_estimates_say_so_in_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = drawn(monkeypatch)
    chart = plots.draw_all([], [], [cost(1, 8, us=7.0), cost(6, 8, us=70.0), cost(6, 64, us=90.0)])[-1]
    (axes,) = figures[-1].axes  # type: ignore[attr-defined]
    assert "ESTIMATED, trn2: not measured" in axes.get_title()
    assert "cost model of trn2" in chart.caption
    assert [bar.get_height() for bar in axes.patches] == [70.0, 90.0]  # the most rows


def test_lines_hold_the_rows(rows: list[ScalingRow], monkeypatch: pytest.MonkeyPatch) -> None:
    figures = drawn(monkeypatch)
    heads = [replace(r, median_us=10.0 * r.x, best_torch=3.0) for r in rows if r.sweep == "heads"]
    plots.draw_all(SMALL, heads, [])
    (axes,) = figures[0].axes  # type: ignore[attr-defined]
    ours, torch_form = axes.lines
    assert (list(ours.get_xdata()), list(ours.get_ydata())) == ([1, 2], [10.0, 20.0])
    assert list(torch_form.get_ydata()) == [30.0, 60.0]


@pytest.mark.parametrize(("value", "text"), [(50.0, "50 us"), (2000.0, "2 ms"), (3e6, "3 s")])
def test_time_axis(value: float, text: str) -> None:
    assert plots._time(value) == text


def test_without_matplotlib_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda _: None)
    begin = time.perf_counter()
    with pytest.raises(UnsupportedError, match="charts need matplotlib"):
        report.make_report(tmp_path, [], command="")
    assert time.perf_counter() - begin < 1


# --- the page --------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Checks nesting; collects links to other files, pictures and text."""

    void = ("meta", "img", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.sources: list[str] = []
        self.pictures: list[dict[str, str | None]] = []
        self.cells: list[int] = []
        self.text = ""
        self.feed(text)
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.sources += [v or "" for k, v in attrs if k in ("src", "href", "action", "data")]
        if tag == "img":
            self.pictures.append(given)
        if tag == "tr":
            self.cells.append(0)
        if tag in ("td", "th"):
            self.cells[-1] += 1
        assert tag not in ("script", "link", "iframe")
        if tag not in self.void:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_page_needs_nothing_else(whole: Report) -> None:
    text = render(whole)
    page = Page(text)
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)
    assert "url(" not in text
    assert "@import" not in text
    pictures = [base64.b64decode(str(p["src"]).partition(",")[2]) for p in page.pictures]
    assert pictures == [chart.png for chart in whole.charts]
    assert all(p["alt"] for p in page.pictures)


def test_page_shows_everything_and_escapes_it(whole: Report) -> None:
    page = Page(render(whole))
    for expected in (
        "small contexts <&>",
        "<case>",
        "one <sentence>",
        "a & b",
        "sparse-mla bench --plot 'a b'",
        "2.50x",
    ):
        assert expected in page.text
    for row in whole.scaling:
        assert scaling.significant(row.median_us) in page.text


def test_estimates_are_marked(whole: Report) -> None:
    with_costs, without = render(whole), render(replace(whole, costs=[], charts=whole.charts[:-1]))
    assert '<h2>Neuron launches <span class="estimated">estimated, trn2</span></h2>' in with_costs
    assert with_costs.count('<span class="estimated">') == 3  # the introduction, the chart, the table
    assert without.count('<span class="estimated">') == 1


def test_page_fits_small_screens_and_paper(whole: Report) -> None:
    text = render(whole)
    assert 'name="viewport" content="width=device-width' in text
    assert text.count("<table>") == len(
        re.findall(r'<div class="wide[ a-z]*" tabindex="0"><table>', text)
    )  # it scrolls
    assert text.count("<table>") == len(SMALL) + 2
    assert "@media print" in text


def test_command_writes_the_folder(
    rows: list[ScalingRow], whole: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparse_mla.testing.bench.run_plan", lambda *_, **__: [BENCH_ROW])
    monkeypatch.setattr(report, "sweeps", lambda **_: SMALL)
    monkeypatch.setattr(report, "run_sweeps", lambda *_, **__: iter(rows))
    monkeypatch.setattr(report, "draw_all", lambda *_: whole.charts)
    monkeypatch.setattr(report, "run_costs", lambda points, on_point: (cost(p.rows, p.heads) for p in points))
    monkeypatch.setattr("sys.argv", ["/somewhere/sparse-mla", "bench", "--quick", "--plot", "x"])
    folder = tmp_path / "new" / "folder"
    result = CliRunner().invoke(cli.commands, ["bench", "--quick", "--plot", str(folder)])
    assert result.exit_code == 0, result.output
    assert "report.html" in result.output
    page = Page((folder / "report.html").read_text())
    assert "sparse-mla bench --quick --plot x" in page.text
    assert len(list(folder.glob("*.png"))) == len(page.pictures) == 5
    assert json.loads((folder / "bench.jsonl").read_text()) == asdict(BENCH_ROW)
    lines = [json.loads(line) for line in (folder / "scaling.jsonl").read_text().splitlines()]
    assert lines == [asdict(row) for row in rows]
    assert len((folder / "neuron.jsonl").read_text().splitlines()) > 5


def test_command_prints_markdown(rows: list[ScalingRow], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "sweeps", lambda **_: SMALL)
    monkeypatch.setattr(scaling, "run_sweeps", lambda *_, **__: iter(rows))
    out = tmp_path / "rows.jsonl"
    result = CliRunner().invoke(cli.commands, ["bench", "--scaling", "--quick", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert markdown(SMALL, rows) in result.output
    assert "processor: " in result.output
    assert [json.loads(line)["x"] for line in out.read_text().splitlines()] == [r.x for r in rows]


@pytest.mark.parametrize("flag", [["--scaling"], ["--plot", "x"]])
def test_command_refuses_the_simulator(flag: list[str]) -> None:
    result = CliRunner().invoke(cli.commands, ["bench", "--backend", "simulated", *flag])
    assert result.exit_code == 2
    assert "measure on this CPU" in result.output
