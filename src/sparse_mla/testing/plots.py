# SPDX-License-Identifier: Apache-2.0
"""The charts of `sparse-mla bench --plot`: PNG bytes by name, drawn from sweeps and from estimates.

Small figures with large type: a chart stays readable on a telephone, where it is 330 pixels wide, and on paper without
colour, where markers and hatches tell lines and bars apart. A chart of what was estimated says so in its title.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..errors import UnsupportedError
from ..formats import BF16, INDEX_FP4, INDEX_FP8, V41_FP4, V41_FP8
from .neuron_cost import CostRow
from .scaling import ScalingRow, Sweep

__all__ = ["Chart", "draw_all", "require_matplotlib"]

SIZE_INCHES = (4.8, 3.4)
DPI = 200
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9")  # told apart by colour-blind readers
MARKERS = ("o", "s", "^", "D", "v")
HATCHES = ("", "///", "...", "xx", "\\\\")
FORMATS = (BF16, V41_FP8, V41_FP4, INDEX_FP8, INDEX_FP4)
NEURON_KEYS = "128_fp8+512_fp4"
STRATEGIES = {
    ("fused", "native"): "fused, e4m3 cap 224",
    ("fused", "integer"): "fused, any e4m3",
    ("bf16_rows", "native"): "rows decoded first",
}
TITLES = {
    "context": "Scoring and selecting, by context",
    "batch": "Attention, by rows in the batch",
    "sequences": "Scoring and selecting, by sequences",
    "heads": "Attention, by heads of a rank",
    "keys": "Attention, by selected keys",
}


class Chart(NamedTuple):
    """A picture and what it shows, in words."""

    name: str
    caption: str
    png: bytes


def require_matplotlib() -> None:
    """Raise before anything is measured."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedError("bench: charts need matplotlib, which is not installed: pip install 'sparse-mla[plot]'.")


def draw_all(chosen: Sequence[Sweep], rows: Sequence[ScalingRow], costs: Sequence[CostRow]) -> list[Chart]:
    """Every chart that has something to show."""
    require_matplotlib()
    charts = [_sweep(sweep, mine) for sweep in chosen if (mine := _of(sweep, rows)) and sweep.axis != "threads"]
    threads = [(sweep, mine) for sweep in chosen if (mine := _of(sweep, rows)) and sweep.axis == "threads"]
    if threads:
        charts.append(_threads(threads))
    charts.append(_record_bytes())
    if any(cost.keys == NEURON_KEYS for cost in costs):
        charts.append(_neuron([cost for cost in costs if cost.keys == NEURON_KEYS]))
    return charts


def _of(sweep: Sweep, rows: Iterable[ScalingRow]) -> list[ScalingRow]:
    return [row for row in rows if row.sweep == sweep.name]


# --- the charts ------------------------------------------------------------------------------------------------------


def _sweep(sweep: Sweep, rows: list[ScalingRow]) -> Chart:
    figure, axes = _figure(TITLES.get(sweep.name, sweep.name))
    rows = sorted(rows, key=lambda row: row.x)
    x = [row.x for row in rows]
    axes.plot(x, [row.median_us for row in rows], color=COLOURS[0], marker=MARKERS[0], label=f"{rows[0].backend}")
    with_torch = [row for row in rows if row.best_torch is not None]
    if with_torch:
        best = [row.median_us * float(row.best_torch or 0) for row in with_torch]
        style = {"color": COLOURS[1], "marker": MARKERS[1], "linestyle": "--"}
        axes.plot([row.x for row in with_torch], best, label="best eager torch", **style)
        axes.legend(frameon=False)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(x, [_short(value) for value in x])
    axes.minorticks_off()
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, high / 30), 1.3 * high)  # noise on a flat line must not look like a slope
    axes.yaxis.set_major_formatter(lambda value, _: _time(value))
    axes.set_xlabel(sweep.axis)
    axes.set_ylabel("median time of a call")
    caption = f"{sweep.title}; {rows[0].threads} thread{'s' if rows[0].threads > 1 else ''}. Both axes are logarithmic."
    return Chart(f"time-by-{sweep.name}", caption, _png(figure))


def _threads(given: list[tuple[Sweep, list[ScalingRow]]]) -> Chart:
    figure, axes = _figure("Speed-up by threads")
    counts = sorted({row.x for _, rows in given for row in rows})
    for number, (_, rows) in enumerate(given):
        speed = [1 / row.ratio for row in sorted(rows, key=lambda row: row.x)]
        axes.plot(sorted(row.x for row in rows), speed, color=COLOURS[number], marker=MARKERS[number], label=rows[0].op)
    axes.plot(counts, counts, color="#888888", linestyle=":", label="ideal")
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("threads")
    axes.set_ylabel("speed over one thread")
    axes.legend(frameon=False)
    return Chart("speed-by-threads", "; ".join(sweep.title for sweep, _ in given) + ".", _png(figure))


def _record_bytes() -> Chart:
    figure, axes = _figure("Bytes per token, by format")
    names = [fmt.name for fmt in FORMATS]
    sizes = [fmt.record_bytes for fmt in FORMATS]
    colours = [COLOURS[4] if fmt.is_index else COLOURS[0] for fmt in FORMATS]
    bars = axes.barh(names, sizes, color=colours, edgecolor="black", linewidth=0.6)
    for bar, fmt in zip(bars, FORMATS, strict=True):
        bar.set_hatch(HATCHES[1] if fmt.is_index else "")
    axes.bar_label(bars, padding=3)
    axes.set_xlim(0, max(sizes) * 1.15)
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.set_xlabel("bytes of one record")
    caption = (
        "One record holds one token, or one compressed entry. Hatched: index keys. From the formats, not measured."
    )
    return Chart("bytes-per-token", caption, _png(figure))


def _neuron(costs: list[CostRow]) -> Chart:
    rows, target = max(cost.rows for cost in costs), costs[0].target
    shown = [cost for cost in costs if cost.rows == rows and cost.lnc == 1]
    heads = sorted({cost.heads for cost in shown})
    figure, axes = _figure(f"Attention on a Neuron core\nESTIMATED, {target}: not measured")
    strategies = [way for way in STRATEGIES if any((cost.family, cost.variant) == way for cost in shown)]
    width = 0.8 / max(1, len(strategies))
    for number, way in enumerate(strategies):
        found = {cost.heads: cost.estimated_us for cost in shown if (cost.family, cost.variant) == way}
        places = [i + (number - (len(strategies) - 1) / 2) * width for i in range(len(heads))]
        bars = axes.bar(
            places,
            [found.get(h, 0.0) for h in heads],
            width,
            label=STRATEGIES[way],
            color=COLOURS[number],
            hatch=HATCHES[number],
            edgecolor="black",
            linewidth=0.6,
        )
        axes.bar_label(bars, fmt="%.0f", padding=1, fontsize=8)
    axes.set_xticks(range(len(heads)), [str(h) for h in heads])
    axes.set_ylim(top=axes.get_ylim()[1] * 1.45)  # room for the legend
    axes.grid(visible=False)
    axes.set_xlabel("heads")
    axes.set_ylabel("estimated us")
    axes.legend(frameon=False, fontsize=8, loc="upper left", ncols=1)
    caption = (
        f"sparse_decode of {rows} row{'s' if rows > 1 else ''}, 128 FP8 + 512 FP4 keys, one core: the kernel's body as "
        f"the simulator's cost model of {target} estimates it, by strategy. No device was at hand."
    )
    return Chart("neuron-estimate", caption, _png(figure))


# --- drawing ---------------------------------------------------------------------------------------------------------


def _figure(title: str) -> tuple[Any, Any]:
    # A figure of its own: pyplot would keep it, and would choose a window system.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=11, fontweight="bold")
    axes.grid(visible=True, color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _png(figure: Any) -> bytes:
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=DPI, metadata={"Software": None})
    return target.getvalue()


def _short(value: int) -> str:
    for size, suffix in ((2**20, "M"), (2**10, "k")):
        if value >= size and value % size == 0:
            return f"{value // size}{suffix}"
    return str(value)


def _time(microseconds: float) -> str:
    for size, unit in ((1e6, "s"), (1e3, "ms")):
        if microseconds >= size:
            return f"{microseconds / size:g} {unit}"
    return f"{microseconds:g} us"
