# SPDX-License-Identifier: Apache-2.0
"""The report of `sparse-mla bench --plot DIR`: charts, their data as JSONL, and one HTML file that holds everything.

The page needs no other file, no script and no network. It is laid out for a telephone (360 pixels), a desk (1,400) and
paper. What was estimated is marked where it stands.
"""

from __future__ import annotations

import base64
import datetime
import html
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..info import info
from .bench import BenchRow, write_jsonl
from .neuron_cost import CostRow, cost_plan, run_costs, write_costs
from .plots import Chart, draw_all, require_matplotlib
from .scaling import ScalingRow, Sweep, run_sweeps, significant, sweeps, table, write_scaling

__all__ = ["Report", "make_report", "render", "write_report"]

ESTIMATED = "estimated"
SHORT_TABLE = 20  # lines of a table that paper does not break
QUICK_COSTS = ((6,), (8, 64), (1,))  # rows, heads, physical cores of a launch
COSTS = ((1, 6), (1, 8, 64, 128), (1,))


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything the page shows."""

    command: str
    rows: list[BenchRow]
    skipped: list[str]
    sweeps: list[Sweep]
    scaling: list[ScalingRow]
    costs: list[CostRow]
    charts: list[Chart]
    facts: dict[str, str] = field(default_factory=dict)


def make_report(
    directory: Path,
    rows: list[BenchRow],
    *,
    command: str,
    quick: bool = False,
    backend: str | None = None,
    skipped: Sequence[str] = (),
    chosen: list[Sweep] | None = None,
    scaling: list[ScalingRow] | None = None,
    on_step: Callable[[str], None] = lambda name: None,
) -> Path:
    """Measure the sweeps (unless they are given), estimate the Neuron launches, draw, and write `report.html`."""
    require_matplotlib()
    load = _load()
    chosen = sweeps(quick=quick) if chosen is None else chosen
    if scaling is None:
        scaling = list(run_sweeps(chosen, backend=backend, **settings(quick), on_sweep=on_step))
    points = cost_plan(*(QUICK_COSTS if quick else COSTS))
    costs = list(run_costs(points, lambda point: on_step(f"estimating {point.keys}, {point.heads} heads")))
    on_step("drawing")
    report = Report(
        command=command,
        rows=rows,
        skipped=list(skipped),
        sweeps=chosen,
        scaling=scaling,
        costs=costs,
        charts=draw_all(chosen, scaling, costs),
        facts=facts() | {"load before and after": f"{load} and {_load()} runnable tasks, mean of a minute"},
    )
    return write_report(directory, report)


def settings(quick: bool) -> dict[str, Any]:
    """How long sweeps measure."""
    short = {"rounds": 3, "min_seconds": 0.003, "footprint_bytes": 96 << 20}
    return short if quick else {"rounds": 7, "min_seconds": 0.03}


def write_report(directory: Path, report: Report) -> Path:
    """The PNG files, the JSONL files and `report.html`; the path of the latter."""
    directory.mkdir(parents=True, exist_ok=True)
    for chart in report.charts:
        (directory / f"{chart.name}.png").write_bytes(chart.png)
    write_jsonl(report.rows, directory / "bench.jsonl")
    write_scaling(report.scaling, directory / "scaling.jsonl")
    write_costs(directory / "neuron.jsonl", report.costs)
    path = directory / "report.html"
    path.write_text(render(report), encoding="utf-8")
    return path


def facts() -> dict[str, str]:
    """Machine and versions, by name."""
    found = info()
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "CPU target": f"{found.machine['cpu_target']}, {found.machine['threads']} threads",
        "system": str(found.machine["system"]),
        "versions": ", ".join(f"{name} {version}" for name, version in found.versions.items()),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"


# --- the page --------------------------------------------------------------------------------------------------------

STYLE = """
:root { color-scheme: light; --ink: #1b1f24; --soft: #59636e; --line: #d1d9e0; --tint: #f6f8fa; }
* { box-sizing: border-box; }
body { margin: 0; color: var(--ink); background: #fff; font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: .5rem 0; }
h2 { font-size: 1.3rem; margin: 2.2rem 0 .6rem; padding-top: .6rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
p { max-width: 75ch; margin: .5rem 0; }
code, pre { font: .85rem/1.45 ui-monospace, monospace; background: var(--tint); border-radius: 4px; }
code { padding: .1em .3em; overflow-wrap: anywhere; }
pre { padding: .7rem; white-space: pre-wrap; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; margin: .5rem 0; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 360px), 1fr)); gap: 1rem; }
figure { margin: 0; padding: .6rem; border: 1px solid var(--line); border-radius: 6px; break-inside: avoid; }
figure img { display: block; width: 100%; max-width: 640px; height: auto; margin: 0 auto; }
figcaption { color: var(--soft); font-size: .85rem; margin-top: .4rem; }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; width: 100%; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { background: var(--tint); vertical-align: bottom; white-space: normal; }
tr:last-child td { border-bottom: 0; }
.text { text-align: left; }
.estimated { background: #fff3cd; border: 1px solid #d9b64a; border-radius: 4px; padding: .1rem .4rem;
  font-size: .8rem; font-weight: 600; white-space: nowrap; }
@media (max-width: 600px) {
  main { padding: .75rem; }
  dl { grid-template-columns: 1fr; gap: 0; }
  dd { margin-bottom: .5rem; }
  th, td { padding: .3rem .35rem; }
  table { font-size: .75rem; }
  .wide th:first-child, .wide td:first-child { position: sticky; left: 0; background: var(--tint); }
}
@media print {
  @page { margin: 14mm; }
  body { font-size: 10pt; }
  main { max-width: none; padding: 0; }
  .charts { grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); margin-right: 1px; }
  .wide { overflow: visible; border: 0; }
  .short { break-inside: avoid; }
  figcaption { font-size: 8pt; }
  table { font-size: 7.5pt; }
  th, td { padding: 1.5pt 3pt; white-space: normal; }
  tr, h2, h3 { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  thead { display: table-header-group; }
}
"""


def render(report: Report) -> str:
    """The page."""
    return "\n".join(_page(report)) + "\n"


def _page(report: Report) -> Iterator[str]:
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>sparse-mla: what was measured</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>"
    yield "<h1>sparse-mla: what was measured</h1>"
    yield (
        "<p>Times are medians of one run on one machine. Ratios within a table hold; absolute times are shown, never "
        "promised. Everything about Neuron devices is "
        f'<span class="estimated">{ESTIMATED}</span> by the simulator\'s cost model and was not measured.</p>'
    )
    yield "<dl>"
    yield from (f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in report.facts.items())
    yield "</dl>\n<h3>Made by</h3>"
    yield f"<pre>{_text(report.command)}</pre>"
    yield '<h2>Charts</h2>\n<div class="charts">'
    for chart in report.charts:
        data = base64.b64encode(chart.png).decode()
        mark = f' <span class="estimated">{ESTIMATED}</span>' if chart.name.startswith("neuron") else ""
        yield f'<figure><img alt="{_text(chart.caption)}" src="data:image/png;base64,{data}">'
        yield f"<figcaption>{_text(chart.caption)}{mark}</figcaption></figure>"
    yield "</div>"
    if report.scaling:
        yield "<h2>Scaling</h2>"
        yield (
            "<p>The shares tell how near a call is to what this machine can do: arithmetic in registers, streaming, "
            "and gathering random records of the same size. The highest one bounds the call; what the shares leave is "
            "decoding, waiting and other programs.</p>"
        )
    for sweep in report.sweeps:
        heads, lines = table(sweep, report.scaling)
        if lines:
            yield f"<h3>{_text(sweep.title)}</h3>"
            yield _table(heads, lines, text_columns=0)
    if report.rows:
        yield "<h2>Operators</h2>\n<p>Best torch: how many times longer the fastest torch form of the run takes.</p>"
        yield _table(*_bench_table(report.rows), text_columns=3)
    if report.skipped:
        yield "<h3>Not measured</h3>\n<ul>"
        yield from (f"<li>{_text(sentence)}</li>" for sentence in report.skipped)
        yield "</ul>"
    if report.costs:
        target = report.costs[0].target
        yield f'<h2>Neuron launches <span class="estimated">{ESTIMATED}, {_text(target)}</span></h2>'
        yield (
            "<p>The body of one sparse_decode launch at the cost model's nominal constants. Beside it, what a kernel "
            "inside a compiled graph costs besides. Nothing here was measured on a device.</p>"
        )
        yield _table(*_cost_table(report.costs), text_columns=3)
    yield "</main>\n</body>\n</html>"


def _bench_table(rows: Sequence[BenchRow]) -> tuple[list[str], list[list[str]]]:
    heads = ["operator", "case", "backend", "threads", "median us", "+- %", "GFLOP/s", "GB/s"]
    heads += ["% of peak", "% of gemm", "% of stream", "% of gather", "best torch"]
    lines = []
    for r in rows:
        shares = ["" if x is None else f"{x:.0f}" for x in (r.pct_peak, r.pct_gemm, r.pct_stream, r.pct_gather)]
        best = r.ratio_vs.get("best_torch")
        numbers = [
            str(r.threads),
            significant(r.median_us),
            f"{100 * r.spread:.0f}",
            *map(significant, (r.gflops, r.gbs)),
        ]
        lines.append([r.op, r.case, r.backend, *numbers, *shares, "" if best is None else f"{best:.2f}x"])
    return heads, lines


def _cost_table(costs: Sequence[CostRow]) -> tuple[list[str], list[list[str]]]:
    heads = ["family", "keys", "variant", "rows", "heads", "estimated us", "graph boundary us", "bound by", "KV MB"]
    lines = []
    for c in costs:
        numbers = [str(c.rows), str(c.heads), significant(c.estimated_us), significant(c.boundary_us)]
        keys = c.keys.replace("_", " ")
        lines.append([c.family, keys, c.variant, *numbers, c.bound_by, f"{c.kv_traffic_bytes / 1e6:.2f}"])
    return heads, lines


def _table(heads: list[str], lines: list[list[str]], *, text_columns: int) -> str:
    def cells(tag: str, values: list[str]) -> str:
        kinds = [' class="text"' if i < text_columns else "" for i in range(len(values))]
        return "".join(f"<{tag}{kind}>{_text(v)}</{tag}>" for kind, v in zip(kinds, values, strict=True))

    body = "\n".join(f"<tr>{cells('td', line)}</tr>" for line in lines)
    head = f"<thead><tr>{cells('th', heads)}</tr></thead>"
    short = " short" if len(lines) <= SHORT_TABLE else ""
    return f'<div class="wide{short}" tabindex="0"><table>{head}\n<tbody>\n{body}\n</tbody></table></div>'


def _text(value: str) -> str:
    return html.escape(value, quote=True)
