# SPDX-License-Identifier: Apache-2.0
"""The picture and the table of docs/layer.md, drawn from the stages the code itself records.

A tiny model whose sizes are all different runs one decode step of every kind of layer; each recorded dimension is then
named by the only size it can be. What the page shows is therefore what ran. `python -m sparse_mla.attention.picture
docs` writes both.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

from .config import HEAD_DIM, INDEX_HEAD_DIM, V41Config
from .layer import STAGES, Stage
from .pool import KVPool
from .stack import AttentionStack
from .topology import LayerTopology
from .weights import AttentionWeights

__all__ = ["draw", "recorded_shapes", "table", "update_page"]

ROWS = 3
BEGIN, END = "<!-- stages: generated -->", "<!-- stages: end -->"
COLUMNS = (  # where a stage stands, row by row: one column for each path from the hidden state to the attention
    ("q_latent", "q_latent_norm", "q", "q_rope"),
    ("window_kv", "window_kv_norm", "window_kv_rope", "window ring"),
    ("compressor_latent", "compressor_score", "pooled", "pooled_norm", "entry", "entries cache"),
    (*[""] * 4, "index_k", "index_k_norm", "index_k_rope", "index pages"),
    ("index_weights", "", "index_q", "index_q_rope", *[""] * 4, "candidates", "entries"),
)
TAIL = ("attention", "attention_unrope", "o_group", "out")
STORES = {"window ring": "window_kv_rope", "entries cache": "entry", "index pages": "index_k_rope"}


def _config() -> V41Config:
    return replace(
        V41Config.tiny(),
        hidden_size=160,
        q_lora_rank=96,
        num_attention_heads=4,
        o_groups=2,
        o_lora_rank=224,
        index_n_heads=6,
        index_topk=24,
    )


def recorded_shapes() -> dict[str, tuple[str, str]]:
    """Stage -> (shape with named sizes, dtype), from one decode step of one layer of each kind."""
    config = _config()
    layers = LayerTopology(config).one_of_each_kind()
    pool = KVPool(config, num_blocks=2, num_sequences=1, layers=layers)
    stack = AttentionStack(AttentionWeights.random(config), pool, backend="reference")
    sequence = pool.allocate()
    stack.prefill([sequence], [torch.ones(9, config.hidden_size, dtype=torch.bfloat16)])
    sizes = {
        ROWS: "T",
        config.hidden_size: "hidden",
        config.q_lora_rank: "q_rank",
        config.num_attention_heads: "heads",
        config.num_attention_heads * HEAD_DIM: "heads*512",
        config.index_n_heads: "index_heads",
        config.index_n_heads * INDEX_HEAD_DIM: "index_heads*128",
        config.o_groups * config.o_lora_rank: "o_groups*o_rank",
        config.index_topk: "topk",
        HEAD_DIM: "512",
        INDEX_HEAD_DIM: "128",
    }
    shapes: dict[str, tuple[str, str]] = {}

    def trace(name: str, value: torch.Tensor) -> None:
        named = [sizes.get(n, "blocks" if name == "candidates" else str(n)) for n in value.shape]
        dtype = str(value.dtype).removeprefix("torch.")
        known = shapes.get(name)
        if known is not None and dtype not in known[1].split(" or "):
            dtype = f"{known[1]} or {dtype}"
        elif known is not None:
            dtype = known[1]
        shapes[name] = ("[" + ", ".join(named) + "]", dtype)

    stack.decode([sequence], torch.ones(ROWS, config.hidden_size, dtype=torch.bfloat16), [ROWS], trace=trace)
    return shapes


def table(shapes: dict[str, tuple[str, str]]) -> str:
    """The stages as a Markdown table."""
    lines = ["| stage | layers | shape | dtype | what happens |", "|---|---|---|---|---|"]
    for stage in STAGES:
        shape, dtype = shapes[stage.name]
        lines.append(f"| `{stage.name}` | {stage.layers} | {shape} | {dtype} | {stage.meaning} |")
    return "\n".join(lines)


WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 188, 46, 30, 26, 16
COLOURS = {"stage": "#eef3fb", "cache": "#fdf1dc", "edge": "#4a6a94"}


def draw(shapes: dict[str, tuple[str, str]]) -> str:
    """The data flow of one layer as an SVG document."""
    stages = {stage.name: stage for stage in STAGES}
    place: dict[str, tuple[int, int]] = {"hidden": (2, 0)}
    for column, names in enumerate(COLUMNS):
        for row, name in enumerate(names):
            if name:
                place[name] = (column, row + 1)
    bottom = 1 + max(len(names) for names in COLUMNS)
    for row, name in enumerate(TAIL):
        place[name] = (2, bottom + row)
    parts = []
    for name in place:
        sources = stages[name].reads if name in stages else (STORES[name],)
        parts += [_edge(place[source], place[name]) for source in sources]
    parts += [_box(name, stages.get(name), place[name], shapes) for name in place]
    width = 2 * MARGIN + len(COLUMNS) * (WIDTH + GAP_X)
    height = 2 * MARGIN + (bottom + len(TAIL)) * (HEIGHT + GAP_Y) - GAP_Y
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12" text-anchor="middle">'
    )
    arrow = (
        '<defs><marker id="a" markerWidth="8" markerHeight="8" refX="7" refY="3" orient="auto">'
        f'<path d="M0,0 L7,3 L0,6 z" fill="{COLOURS["edge"]}"/></marker></defs>'
    )
    return "\n".join((head, f'<rect width="{width}" height="{height}" fill="white"/>', arrow, *parts, "</svg>", ""))


def _corner(place: tuple[int, int]) -> tuple[int, int]:
    return MARGIN + place[0] * (WIDTH + GAP_X), MARGIN + place[1] * (HEIGHT + GAP_Y)


def _edge(start: tuple[int, int], stop: tuple[int, int]) -> str:
    """From the lower edge of one box, down the free lane on its right where boxes would be in the way, into the upper
    edge of the other.
    """
    (x0, y0), (x1, y1) = _corner(start), _corner(stop)
    x0, x1, y0 = x0 + WIDTH // 2, x1 + WIDTH // 2, y0 + HEIGHT
    style = f'fill="none" stroke="{COLOURS["edge"]}" marker-end="url(#a)"'
    if start[0] == stop[0] and stop[1] == start[1] + 1:
        return f'<path d="M{x0},{y0} V{y1 - 2}" {style}/>'
    lane = x0 + (WIDTH + GAP_X) // 2 if stop[0] >= start[0] else x0 - (WIDTH + GAP_X) // 2
    if stop[1] == start[1] + 1:
        return f'<path d="M{x0},{y0} V{y0 + GAP_Y // 2} H{x1} V{y1 - 2}" {style}/>'
    return f'<path d="M{x0},{y0} V{y0 + GAP_Y // 3} H{lane} V{y1 - GAP_Y // 2} H{x1} V{y1 - 2}" {style}/>'


def _box(name: str, stage: Stage | None, place: tuple[int, int], shapes: dict[str, tuple[str, str]]) -> str:
    x, y = _corner(place)
    middle = x + WIDTH // 2
    fill = COLOURS["stage" if stage is not None else "cache"]
    second = shapes[name][0] if stage is not None else "in the pool"
    dash = ' stroke-dasharray="4 3"' if stage is not None and stage.layers != "all" else ""
    return (
        f'<g><rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="{fill}" stroke="#33507a"{dash}/>'
        f'<text x="{middle}" y="{y + 19}" font-weight="bold">{name}</text>'
        f'<text x="{middle}" y="{y + 36}" fill="#444">{second}</text></g>'
    )


def update_page(folder: Path) -> None:
    """Write layer.svg and the table between the marks of layer.md."""
    shapes = recorded_shapes()
    (folder / "layer.svg").write_text(draw(shapes))
    page = folder / "layer.md"
    text = page.read_text()
    before, rest = text.split(BEGIN, 1)
    page.write_text(before + BEGIN + "\n" + table(shapes) + "\n" + END + rest.split(END, 1)[1])


if __name__ == "__main__":
    update_page(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
