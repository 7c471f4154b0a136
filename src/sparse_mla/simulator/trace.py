# SPDX-License-Identifier: Apache-2.0
"""The timeline of an estimate as a file: Chrome trace format (Perfetto, chrome://tracing) or a PNG.

One process per core and one row per engine and queue. Bars of one row that run at the same time - small matmuls on
disjoint tiles of the array, transfers of one ring - continue on rows of the same name with a number.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import UnsupportedError
from .core import GPSIMD, SCALAR, SYNC, TENSOR, VECTOR
from .timing import Estimate, Event

__all__ = ["Trace"]

_ORDER = (TENSOR, VECTOR, SCALAR, GPSIMD, SYNC)
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")


def _rank(row: str) -> tuple[int, str]:
    """Engines first, then transfers by the queue that issued them."""
    return (_ORDER.index(row), "") if row in _ORDER else (len(_ORDER), row)


class Trace:
    """What happens when, row by row."""

    def __init__(self, estimate: Estimate, title: str) -> None:
        self.estimate = estimate
        self.title = f"{title}: estimated, {estimate.target}"

    def rows(self) -> list[tuple[int, str, list[Event]]]:
        """(core, name, events) of each row, without overlap inside a row."""
        groups: dict[tuple[int, str], list[Event]] = {}
        for event in self.estimate.events:
            groups.setdefault((event.core, event.row), []).append(event)
        found: list[tuple[int, str, list[Event]]] = []
        for core, row in sorted(groups, key=lambda key: (key[0], _rank(key[1]))):
            lanes: list[list[Event]] = []
            for event in sorted(groups[core, row], key=lambda e: (e.start_us, e.end_us)):
                lane = next((each for each in lanes if each[-1].end_us <= event.start_us), None)
                if lane is None:
                    lanes.append([event])
                else:
                    lane.append(event)
            found += [(core, row if n == 0 else f"{row} {n + 1}", lane) for n, lane in enumerate(lanes)]
        return found

    def events(self) -> list[dict[str, Any]]:
        """The entries of `traceEvents`: names of rows, then one complete event per bar, in microseconds."""
        critical = {(step.row, step.start_us, step.source) for step in self.estimate.critical_path}
        made: list[dict[str, Any]] = []
        named: set[int] = set()
        for row, (core, name, lane) in enumerate(self.rows()):
            if core not in named:
                named.add(core)
                label = {"name": f"core {core} (estimated, {self.estimate.target})"}
                made.append({"name": "process_name", "ph": "M", "pid": core, "tid": 0, "args": label})
            made.append({"name": "thread_name", "ph": "M", "pid": core, "tid": row, "args": {"name": name}})
            made.append({"name": "thread_sort_index", "ph": "M", "pid": core, "tid": row, "args": {"sort_index": row}})
            for e in lane:
                arguments: dict[str, Any] = {"source": e.source, "instruction": e.record}
                if (e.row, e.start_us, e.source) in critical:
                    arguments["critical path"] = True
                made.append(
                    {
                        "name": e.opcode,
                        "cat": e.row,
                        "ph": "X",
                        "pid": core,
                        "tid": row,
                        "ts": round(e.start_us, 4),
                        "dur": round(e.end_us - e.start_us, 4),
                        "args": arguments,
                    }
                )
        return made

    def save(self, path: str | Path) -> Path:
        """Write Chrome trace JSON; open it at ui.perfetto.dev or chrome://tracing."""
        path = Path(path)
        body = {"displayTimeUnit": "ns", "otherData": {"title": self.title}, "traceEvents": self.events()}
        path.write_text(json.dumps(body), encoding="utf-8")
        return path

    def save_png(self, path: str | Path, between: tuple[float, float] | None = None) -> Path:
        """Draw the timeline, or the microseconds `between`, with matplotlib; overlapping bars of a row share it."""
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
            from matplotlib.patches import Patch
        except ModuleNotFoundError:
            raise UnsupportedError(
                "trace: a PNG needs matplotlib, which is not installed: pip install 'sparse-mla[plot]'."
            ) from None
        first, last = (0.0, max(self.estimate.total_us, 1e-3)) if between is None else between
        events = self.estimate.events
        rows = sorted({(e.core, e.row) for e in events}, key=lambda key: (key[0], _rank(key[1])))
        seen = [e for e in events if e.end_us >= first and e.start_us <= last]
        busiest: dict[str, float] = {}
        for e in seen:
            busiest[e.opcode] = busiest.get(e.opcode, 0.0) + e.end_us - e.start_us
        opcodes = sorted(busiest, key=lambda name: -busiest[name])
        colours = {name: _COLOURS[min(i, len(_COLOURS) - 1)] for i, name in enumerate(opcodes)}
        figure = Figure(figsize=(14, 1.6 + 0.4 * max(1, len(rows))), layout="constrained")
        axes = figure.add_subplot()
        for y, key in enumerate(rows):
            mine = [e for e in seen if (e.core, e.row) == key]
            spans = [(e.start_us, max(e.end_us - e.start_us, 1e-4)) for e in mine]
            axes.broken_barh(spans, (y - 0.4, 0.8), facecolors=[colours[e.opcode] for e in mine], alpha=0.8)
        axes.set_yticks(range(len(rows)), [f"core {core} {row}" for core, row in rows])
        axes.invert_yaxis()
        axes.set_xlim(first, last)
        axes.set_xlabel(f"microseconds (estimated, {self.estimate.target})")
        part = "" if between is None else f", {first:g} to {last:g} of {self.estimate.total_us:.0f} us"
        axes.set_title(self.title + part)
        shown = opcodes[: len(_COLOURS) - 1]
        handles = [Patch(color=colours[name], label=name) for name in shown]
        if len(opcodes) > len(shown):
            handles.append(Patch(color=_COLOURS[-1], label="other"))
        if handles:
            figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
        FigureCanvasAgg(figure)
        path = Path(path)
        figure.savefig(path, dpi=110, format="png")
        return path
