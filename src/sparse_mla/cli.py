# SPDX-License-Identifier: Apache-2.0
"""The command `sparse-mla`: what is here, is it right, what does it do, how fast is it. Each command is a few lines
over the library."""

from __future__ import annotations

import json
import shlex
import sys
from collections import defaultdict
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    import click
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
    from rich.table import Table
except ModuleNotFoundError as missing:
    raise SystemExit(
        f"sparse-mla: the command needs click and rich ({missing.name} is not installed): pip install 'sparse-mla[cli]'"
    ) from None

from .dispatch import BACKENDS
from .errors import SparseMlaError

if TYPE_CHECKING:
    from .testing.bench import BenchRow
    from .testing.neuron_cost import CostPoint
    from .testing.neuron_index_cost import IndexPoint

__all__ = ["main"]

WIDE_TABLE = 160  # columns the bench's table needs

INPUT_HELP = (
    "safetensors file with q [b, n, h, 512], window_kv [b, 127 + n, 512], compressed_kv [b, e, 512], "
    "index_q [b, n, i, 128], index_k [b, e, 128], index_weights [b, n, i] in bfloat16, and optionally attn_sink [h] in "
    "float32: n last tokens of b sequences with h heads, e entries of two tokens each, i index heads."
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="sparse-mla")
def commands() -> None:
    """DeepSeek-V4.1 sparse attention on Trainium and on any CPU."""


@commands.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for a bug report.")
def info(as_json: bool) -> None:
    """Versions, CPU target, threads, backends with reasons, configuration."""
    from .info import info as collect

    report = collect()
    click.echo(json.dumps(report.as_dict(), indent=2) if as_json else str(report))


@commands.command()
@click.option("--op", help="Only this operator.")
@click.option("--backend", type=click.Choice(BACKENDS), help="Only this backend; the default is every one present.")
@click.option("--case", "case_name", help="Only cases whose name contains this.")
@click.option("--full", is_flag=True, help="The whole matrix; takes long.")
def check(op: str | None, backend: str | None, case_name: str | None, full: bool) -> None:
    """Compare every implementation with the float64 result, over all cases. Exit code 1 if one fails."""
    from .testing.cases import select
    from .testing.check import Outcome, plan, require, run_case

    require(op, backend)
    pairs = plan(select(op, case_name, full=full), backend)
    if not pairs:
        raise click.ClickException("no case matches.")
    counts: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    failures: list[Outcome] = []
    refusals: dict[tuple[str, str], int] = defaultdict(int)
    with _progress() as progress:
        task = progress.add_task("checking", total=len(pairs))
        for implementation, case in pairs:
            progress.update(task, description=f"{case.op} {implementation.name}")
            outcome = run_case(implementation, case)
            counts[outcome.op, outcome.implementation][outcome.state] += 1
            if outcome.state == "failed":
                failures.append(outcome)
            elif outcome.state == "refused":
                refusals[outcome.implementation, "; ".join(outcome.reasons)] += 1
            progress.advance(task)
    table = _table("operator", "implementation", "passed", "refused", "failed")
    for (stem, name), states in sorted(counts.items()):
        table.add_row(stem, name, *[str(states[s]) for s in ("passed", "refused", "failed")])
    console = Console()
    console.print(table)
    for (name, sentence), number in sorted(refusals.items()):
        console.print(f"{name} refuses {number}: {sentence}", markup=False)
    for outcome in failures:
        reasons = "\n    ".join(outcome.reasons)
        console.print(f"FAILED {outcome.implementation} {outcome.op}/{outcome.case}\n    {reasons}", markup=False)
    sys.exit(1 if failures else 0)


@commands.command()
@click.option("--input", "source", type=click.Path(exists=True, dir_okay=False, path_type=Path), help=INPUT_HELP)
@click.option(
    "--save", type=click.Path(dir_okay=False, path_type=Path), help="Write out, lse and selected to this file."
)
@click.option("--backend", type=click.Choice(("auto", *BACKENDS)), help="The default is SPARSE_MLA_BACKEND, or auto.")
@click.option("--layers", is_flag=True, help="Run whole attention layers instead: prefill, drafts, rejection; minutes.")
@click.option("--quick", is_flag=True, help="With --layers: an eighth of the prompts' length, a quarter of the steps.")
@click.option("--preset", type=click.Choice(("tiny", "flash")), help="With --layers: only this model; else both.")
@click.option(
    "--prompt", type=click.IntRange(min=1), multiple=True, help="With --layers: tokens of a prompt; repeatable."
)
def demo(
    source: Path | None,
    save: Path | None,
    backend: str | None,
    layers: bool,
    quick: bool,
    preset: str | None,
    prompt: tuple[int, ...],
) -> None:
    """Store, score, select and attend over V4.1 caches, and show what each step costs in accuracy and time."""
    from .testing.demo import STAGE_NAMES, load_inputs, run_demo, save_result

    if layers:
        _demo_layers(backend, quick, preset, prompt)
        return
    inputs = None if source is None else load_inputs(source)
    with _progress() as progress:
        task = progress.add_task("starting", total=len(STAGE_NAMES))
        report = run_demo(
            inputs, backend=backend, on_stage=lambda name: progress.update(task, description=name, advance=1)
        )
    stages = _table("stage", "ran on", "milliseconds", "work")
    for each in report.stages:
        stages.add_row(each.name, each.executes, f"{each.seconds * 1e3:.2f}", each.note)
    console = Console()
    console.print(report.shapes, highlight=False)
    console.print(stages)
    facts = _table("measure", "value")
    facts.add_row("kernel error, to float64 on decoded records", f"{report.kernel_error:.2e}")
    facts.add_row("format error, to float64 without quantization", f"{report.format_error:.2e}")
    facts.add_row("selected keys among the true best", f"{report.selected_share:.1%}")
    for name, number in report.bytes_per_token.items():
        facts.add_row(f"bytes per token, {name}", f"{number:g}")
    console.print(facts)
    if save is not None:
        save_result(save, report)
        console.print(f"wrote {save}", highlight=False)


def _demo_layers(backend: str | None, quick: bool, only: str | None, given: tuple[int, ...]) -> None:
    from .attention.demo import DECODE_STEPS, PRESETS, PROMPTS, run_layers_demo

    prompts = given or tuple(n // 8 if quick else n for n in PROMPTS)
    steps = DECODE_STEPS // 4 if quick else DECODE_STEPS
    reports = []
    with _progress() as progress:
        task = progress.add_task("starting", total=None)
        said = ""

        def show(what: str, done: int, total: int) -> None:
            nonlocal said
            progress.update(task, description=what, completed=done, total=total)
            if what != said:
                _log(progress, f"{what}, {total} to do")
            said = what

        for preset in PRESETS if only is None else (only,):
            longest = None if preset == "tiny" else min(prompts)
            reports.append(
                run_layers_demo(
                    preset, backend=backend, prompts=prompts, decode_steps=steps, check_longest=longest, on_step=show
                )
            )
    console = Console()
    table = _table("preset", "measure", "value")
    for r in reports:
        table.add_section()
        for measure, value in r.rows():
            table.add_row(r.preset, measure, value)
    console.print(table)
    for note in [note for r in reports for note in r.notes]:
        console.print(note, markup=False, highlight=False)
    sys.exit(0 if all(r.passed for r in reports) else 1)


@commands.command()
@click.option("--op", help="Only this operator; `simulator` times the Trainium simulator itself.")
@click.option(
    "--backend", type=click.Choice(BACKENDS), help="Only this backend; the reference is timed only when named."
)
@click.option("--case", "case_name", help="Only rows whose name contains this.")
@click.option("--threads", type=int, multiple=True, help="Only these thread counts; may be given twice.")
@click.option("--quick", is_flag=True, help="A few rows, short measurements, no torch.compile.")
@click.option("--cost", is_flag=True, help="With --backend simulated: what the cost model estimates for a Trainium.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the rows to this JSONL file.")
@click.option(
    "--baseline", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Compare with such a file."
)
@click.option("--scaling", is_flag=True, help="Instead: how cost grows with context, batch, heads, keys and threads.")
@click.option("--cpu-time", is_flag=True, help="With --scaling: processor time of one thread; for a busy machine.")
@click.option(
    "--plot", type=click.Path(file_okay=False, path_type=Path), help="Also write charts and report.html to this folder."
)
def bench(
    op: str | None,
    backend: str | None,
    case_name: str | None,
    threads: tuple[int, ...],
    quick: bool,
    cost: bool,
    out: Path | None,
    baseline: Path | None,
    scaling: bool,
    cpu_time: bool,
    plot: Path | None,
) -> None:
    """Time the backends against torch and against the machine. Exit code 1 on a regression beyond noise."""
    from .testing.bench import compare_baseline, json_line, run_plan, select_plan
    from .testing.check import require
    from .testing.contestants import is_torch

    if op == "simulator":
        from .testing import simulator_bench

        if backend or case_name or threads or cost or baseline or scaling or cpu_time or plot:
            raise click.UsageError("--op simulator takes --quick and --out only.")
        click.echo(simulator_bench.report(small=quick, out=out))
        return
    require(op, backend)
    if cost:
        if backend != "simulated":
            raise click.UsageError("--cost estimates the simulated backend: add --backend simulated.")
        _print_costs(quick, case_name, out)
        return
    if (scaling or plot is not None) and backend not in (None, "native", "reference"):
        raise click.UsageError(f"--scaling and --plot measure on this CPU: --backend {backend} does not fit.")
    if plot is not None:
        from .testing.plots import require_matplotlib

        require_matplotlib()
    if cpu_time and not scaling:
        raise click.UsageError("--cpu-time is for --scaling only.")
    if scaling:
        _print_scaling(quick, backend, cpu_time, out, plot)
        return
    entries = select_plan(op, case_name, quick=quick)
    if not entries:
        raise click.ClickException(f"no row of the {'quick ' if quick else ''}plan matches.")
    skipped: list[str] = []
    rows: list[BenchRow] = []
    # A full plan takes half an hour: what is measured is written at once, whatever happens later.
    with nullcontext() if out is None else out.open("w") as written, _progress() as progress:
        total = sum(len([n for n in e.threads if not threads or n in threads]) for e in entries)
        task = progress.add_task("measuring", total=total)
        for row in run_plan(
            entries,
            backend=backend,
            threads=threads or None,
            compiled=not quick,
            rounds=5 if quick else 7,
            min_seconds=0.005 if quick else 0.03,
            on_row=lambda name: progress.update(task, description=name, advance=1),
            on_skip=skipped.append,
        ):
            rows.append(row)
            if written is not None:
                written.write(json_line(row))
                written.flush()
            _log(progress, f"{row.op} {row.case} {row.backend} {row.threads}t: {row.median_us:.1f} us")
    table = _table(
        "operator",
        "case",
        "backend",
        "thr",
        "us",
        "+-%",
        "GF/s",
        "GB/s",
        "peak%",
        "gemm%",
        "strm%",
        "gath%",
        "best torch",
        "compiled",
        "others",
    )
    for r in rows:
        shares = ["-" if x is None else f"{x:.0f}" for x in (r.pct_peak, r.pct_gemm, r.pct_stream, r.pct_gather)]
        compiled = [ratio for name, ratio in r.ratio_vs.items() if name.startswith("compiled_")]
        ratios = [r.ratio_vs.get("best_torch"), min(compiled, default=None)]
        others = [f"{n} {x:.2f}x" for n, x in r.ratio_vs.items() if not is_torch(n) and n != "best_torch"]
        numbers = [f"{r.median_us:.1f}", f"{r.spread * 100:.0f}", f"{r.gflops:.1f}", f"{r.gbs:.1f}", *shares]
        table.add_row(
            r.op,
            r.case,
            r.backend,
            str(r.threads),
            *numbers,
            *("-" if x is None else f"{x:.2f}x" for x in ratios),
            "\n".join(others),
        )
    console = Console(width=max(WIDE_TABLE, Console().width))  # a narrower one would cut every number
    console.print(table)
    for sentence in skipped:
        console.print(sentence, markup=False, highlight=False)
    if plot is not None:
        _write_report(plot, rows, quick=quick, backend=backend, skipped=skipped)
    regressions = [] if baseline is None else compare_baseline(rows, baseline)
    for sentence in regressions:
        console.print(f"REGRESSION {sentence}", markup=False)
    sys.exit(1 if regressions else 0)


def _print_scaling(quick: bool, backend: str | None, cpu_time: bool, out: Path | None, plot: Path | None) -> None:
    from .testing.report import facts, settings
    from .testing.scaling import markdown, run_sweeps, sweeps, write_scaling

    chosen = sweeps(quick=quick)
    if cpu_time:
        chosen = [s for s in sweeps(quick=quick, threads=1) if s.axis != "threads"]
    with _progress() as progress:
        task = progress.add_task("starting", total=len(chosen))
        step = partial(_advance, progress, task)
        rows = list(run_sweeps(chosen, backend=backend, cpu_time=cpu_time, **settings(quick), on_sweep=step))
    for name, value in facts().items():
        click.echo(f"{name}: {value}  ")
    click.echo(f"\n{markdown(chosen, rows)}")
    if out is not None:
        write_scaling(rows, out)
    if plot is not None:
        _write_report(plot, [], quick=quick, backend=backend, chosen=chosen, scaling=rows)


def _write_report(plot: Path, rows: list[BenchRow], **given: Any) -> None:
    from .testing.report import make_report

    with _progress() as progress:
        task = progress.add_task("starting", total=None)
        command = shlex.join(["sparse-mla", *sys.argv[1:]])
        path = make_report(plot, rows, command=command, on_step=partial(_advance, progress, task), **given)
    click.echo(f"wrote {path}")


def _log(progress: Progress, text: str) -> None:
    """A line on standard error where it is a file or a pipe, which shows no progress bar."""
    if not progress.console.is_terminal:
        click.echo(text, err=True)


def _advance(progress: Progress, task: TaskID, name: str) -> None:
    progress.update(task, description=name[:32], advance=1)


def _print_costs(quick: bool, name: str | None, out: Path | None) -> None:
    from .testing.neuron_cost import cost_plan, run_costs, write_costs
    from .testing.neuron_index_cost import index_cost_plan, run_index_costs

    points = [p for p in cost_plan((1, 6) if quick else (1, 6, 128)) if name is None or name in str(p)]
    index = [p for p in index_cost_plan() if (name is None or name in str(p)) and (p.rows <= 6 or not quick)]
    if not points and not index:
        raise click.ClickException("no row of the cost table matches.")
    with _progress() as progress:
        task = progress.add_task("estimating", total=len(points) + len(index))

        def show(point: CostPoint | IndexPoint) -> None:
            progress.update(task, description=f"{point.keys} x {point.rows} rows", advance=1)

        rows = [*run_costs(points, show), *run_index_costs(index, show)]
    table = _table(
        "operator",
        "family",
        "keys",
        "variant",
        "rows",
        "heads",
        "lnc",
        "estimated us",
        "boundary us",
        "bound by",
        "KV MB",
    )
    for r in rows:
        numbers = [str(r.rows), str(r.heads), str(r.lnc), f"{r.estimated_us:.1f}", f"{r.boundary_us:.0f}", r.bound_by]
        table.add_row(r.op, r.family, r.keys, r.variant, *numbers, f"{r.kv_traffic_bytes / 1e6:.2f}")
    console = Console()
    console.print(table)
    console.print(
        f"Estimated by the cost model of {rows[0].target}; nothing here was measured on a device.", markup=False
    )
    if out is not None:
        write_costs(out, rows)


@commands.command()
@click.argument("kernel", metavar="FILE:KERNEL")
@click.option(
    "--args", "arguments", type=click.Path(path_type=Path), help="Arrays by argument name: .npz, .safetensors."
)
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="A constant argument; may be repeated.")
@click.option("--grid", type=click.Choice(("1", "2")), help="Physical cores of the launch; default: none given.")
@click.option("--gen", type=click.Choice(("2", "3", "4")), help="trn1, trn2 or trn3; default: the environment's, or 3.")
@click.option("--strict", is_flag=True, help="What some front ends accept and hardware refused is an error.")
@click.option("--aws-compat", is_flag=True, help="Relax what the vendor's simulator does not check.")
@click.option("--log", is_flag=True, help="Print every instruction.")
@click.option("--trace", type=click.Path(path_type=Path), help="Write the timeline in Chrome trace format.")
@click.option("--png", type=click.Path(path_type=Path), help="Draw the timeline.")
@click.option("--save", type=click.Path(path_type=Path), help="Write the outputs to this .npz file.")
@click.option("--lint", is_flag=True, help="FILE only: list what NKI front ends would refuse, and run nothing.")
def simulate(
    kernel: str,
    arguments: Path | None,
    settings: tuple[str, ...],
    grid: str | None,
    gen: str | None,
    strict: bool,
    aws_compat: bool,
    log: bool,
    trace: Path | None,
    png: Path | None,
    save: Path | None,
    lint: bool,
) -> None:
    """Run an NKI kernel on this CPU, check it as hardware would, and estimate its time."""
    from .simulator import command

    if lint:
        findings = command.lint(kernel)
        click.echo("\n".join(findings) or f"{kernel}: nothing that a front end would refuse")
        sys.exit(1 if findings else 0)
    result = command.simulate_file(
        kernel,
        arguments,
        settings=settings,
        grid=int(grid) if grid else None,
        gen=int(gen) if gen else None,
        strict=strict,
        aws_compat=aws_compat,
        log=click.echo if log else None,
    )
    click.echo(result.report())
    if save is not None:
        command.save_outputs(result, save)
    if trace is not None:
        click.echo(f"wrote {result.trace.save(trace)}; open it at ui.perfetto.dev")
    if png is not None:
        click.echo(f"wrote {result.trace.save_png(png)}")


@commands.command()
@click.option("--backend", type=click.Choice(("neuron", "simulated")), help="The default is neuron where present.")
@click.option("--probe", "names", multiple=True, help="Only this question (A1 .. A15); may be given several times.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the table to this file too.")
def probe(backend: str | None, names: tuple[str, ...], out: Path | None) -> None:
    """Settle what Neuron's documentation leaves open, with small kernels. Prints a table for an issue."""
    from .dispatch import presence
    from .kernels.probe import heading, run_probes, table

    chosen = backend or ("neuron" if presence("neuron") == "" else "simulated")
    absent = presence(chosen)
    if absent:
        raise click.ClickException(f"backend {chosen!r} is not available here: {absent}")
    results = run_probes(chosen, names)
    text = table(results, heading(chosen))
    click.echo(text)
    if out is not None:
        out.write_text(text + "\n")
    # On a device a difference is an answer; on the simulator it is a fault of ours.
    sys.exit(1 if chosen == "simulated" and not all(r.agrees for r in results) else 0)


def _progress() -> Progress:
    # On standard error, so that a table or JSON can be piped.
    columns = (TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _table(*columns: str) -> Table:
    table = Table()
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < 2 else "right")
    return table


def main() -> None:
    """Entry point: a mistake of the caller is one sentence on standard error and exit code 1."""
    try:
        commands()
    except SparseMlaError as error:
        raise SystemExit(f"sparse-mla: {error}") from None


if __name__ == "__main__":
    main()
