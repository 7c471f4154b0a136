# SPDX-License-Identifier: Apache-2.0
"""The report of one launch as text: time, engines, memory, critical path, warnings. Times are estimates and say so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .core import DMA, short_path
from .timing import Estimate

if TYPE_CHECKING:
    from .launch import Run
    from .memory import Peak

__all__ = ["PathLine", "path_by_line", "report"]


class PathLine:
    """What one source line and opcode contribute to the critical path."""

    def __init__(self, source: str, opcode: str) -> None:
        self.source = source
        self.opcode = opcode
        self.steps = 0
        self.us = 0.0
        self.waits: dict[str, int] = {}

    @property
    def waited_for(self) -> str:
        """What most of its steps had waited for."""
        return max(self.waits, key=lambda why: self.waits[why])


def path_by_line(estimate: Estimate) -> list[PathLine]:
    """The critical path summed by source line, longest first. The times add up to the total."""
    lines: dict[tuple[str, str], PathLine] = {}
    before = 0.0
    for step in estimate.critical_path:
        line = lines.setdefault((step.source, step.opcode), PathLine(step.source, step.opcode))
        line.steps += 1
        line.us += max(0.0, step.end_us - before)
        line.waits[step.waited_for] = line.waits.get(step.waited_for, 0) + 1
        before = max(before, step.end_us)
    return sorted(lines.values(), key=lambda line: -line.us)


def report(run: Run, *, path_lines: int = 10) -> str:
    """The text of `run.report()`.

    Args:
        run: a launch with timing on.
        path_lines: source lines of the critical path to show.
    """
    estimate = run.estimate
    label = f"estimated, {estimate.target}"
    cores = f"{run.cores} core{'s' if run.cores > 1 else ''}"
    text = [f"{run.kernel}: {cores}, {run.instructions} instructions ({label}; nothing ran on a device)", ""]
    text.append(f"time ({label})         {estimate.total_us:.2f} us, bound by {estimate.bound_by}")
    text.append(
        f"  busiest engine alone      {estimate.lower_bound_us:.2f} us: no order of these instructions is faster"
    )
    text.append(f"  around the kernel         about {estimate.boundary_us:.0f} us more inside a compiled graph")
    text += ["", f"engines ({label})", *_engines(estimate)]
    text += ["", f"memory ({label})", *_memory(run, estimate)]
    text += ["", f"critical path ({label}), {len(estimate.critical_path)} steps by source line"]
    lines = path_by_line(estimate)
    for line in lines[:path_lines]:
        share = 100 * line.us / estimate.total_us if estimate.total_us else 0.0
        text.append(
            f"  {line.us:10.2f} us {share:5.1f} %  {line.steps:6d} x {line.opcode:22s} {line.source}  "
            f"(waited for {line.waited_for})"
        )
    rest = lines[path_lines:]
    if rest:
        text.append(f"  {sum(line.us for line in rest):10.2f} us in {len(rest)} more lines")
    text += ["", *_warnings(run)]
    return "\n".join(text)


def _engines(estimate: Estimate) -> list[str]:
    heads = "".join(f"{f'core {core} busy':>16s}{'share':>8s}" for core in range(len(estimate.busy_us)))
    text = [f"  {'':12s}{heads}"]
    for engine in estimate.busy_us[0]:
        cells = ""
        for core, busy in enumerate(estimate.busy_us):
            cells += f"{busy[engine]:13.2f} us{100 * estimate.utilisation[core][engine]:6.1f} %"
        text.append(f"  {engine:12s}{cells}")
    return text


def _memory(run: Run, estimate: Estimate) -> list[str]:
    read, written = estimate.hbm_read_bytes, estimate.hbm_written_bytes
    # bytes per microsecond / 1000 = GB/s
    rate = (read + written) / estimate.total_us / 1000 if estimate.total_us else 0.0
    count = sum(1 for r in run.records if r.engine == DMA)
    moved = sum(r.detail["bytes"] for r in run.records if r.engine == DMA)
    text = [f"  HBM          {read:,} B read, {written:,} B written, {rate:.1f} GB/s over the whole kernel"]
    if count:
        each = moved / estimate.descriptors if estimate.descriptors else 0.0
        text.append(
            f"  DMA          {count:,} transfers, {estimate.descriptors:,} descriptors of {each:,.0f} B on average"
        )
    facts = run.target
    for core in range(run.cores):
        suffix = f" core {core}" if run.cores > 1 else ""
        sbuf, psum = run.sbuf_peaks[core], run.psum_peaks[core]
        text.append(
            f"  SBUF{suffix:8s} {sbuf.amount:,} of {facts.usable_sbuf_bytes:,} usable B per partition at most"
            f"{_where(run, sbuf)}"
        )
        text.append(f"  PSUM{suffix:8s} {psum.amount} of {facts.psum_num_banks} banks at most{_where(run, psum)}")
    return text


def _where(run: Run, peak: Peak) -> str:
    if not peak.largest:
        return ""
    tile = peak.largest[0]
    return f"; largest tile {tile.shape} {tile.dtype} of {short_path(tile.source[0])}:{tile.source[1]}"


def _warnings(run: Run) -> list[str]:
    if not run.warnings:
        return ["no warnings"]
    text = ["warnings"]
    for warning in sorted(run.warnings, key=lambda w: (w.check, w.line)):
        times = f" ({warning.count} times)" if warning.count > 1 else ""
        text.append(f"  rule {warning.check}: {warning.message}{times}")
    return text
