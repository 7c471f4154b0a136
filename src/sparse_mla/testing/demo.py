# SPDX-License-Identifier: Apache-2.0
"""The main job, whole: quantize and store the caches, score, select, attend, and say what each step cost in accuracy.

Shapes are DeepSeek-V4.1-Flash's in a verification step: 4 sequences of 65,536 tokens, 6 rows each, 64 heads; a window
of 128 tokens in FP8 pages of 134, and 512 of the 32,768 compressed entries (one per two tokens) in FP4 pages of 64. The
simulator executes instruction by instruction, so on it the same job has 2 sequences, 16 heads and 4,096 entries.

Two errors are told apart. The kernel error is against float64 over the same decoded records and the same selection.
The format error is against float64 over the tensors before quantization and the selection their own scores give.

`sparse-mla demo --input FILE` takes these tensors from a safetensors file (b sequences, n rows, h heads, e entries):

    q              [b, n, h, 512] bfloat16      queries after rope
    window_kv      [b, 127 + n, 512] bfloat16   keys of the last 127 + n tokens, oldest first
    compressed_kv  [b, e, 512] bfloat16         compressed entries; entry c stands for tokens 2c and 2c + 1
    index_q        [b, n, i, 128] bfloat16      index queries of i index heads
    index_k        [b, e, 128] bfloat16         index keys, one per entry
    index_weights  [b, n, i] bfloat16
    attn_sink      [h] float32                  optional
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from ..caches import KVScope, PagedCache, allocate
from ..dispatch import default_backend, explain
from ..errors import ArgumentError, DTypeError, FormatError, ShapeError
from ..formats import BF16, HEAD_DIM, INDEX_DIM, INDEX_FP4, V41_FP4, V41_FP8, encode_query
from ..ops.index_logits import PagedKeys, index_logits
from ..ops.sparse_decode import sparse_decode
from ..ops.store_records import store_records
from ..ops.topk import topk
from .attention_cases import attend
from .index_cases import scores
from .numeric import frobenius_error

__all__ = ["INPUT_NAMES", "DemoInputs", "DemoReport", "Stage", "load_inputs", "make_inputs", "run_demo", "save_result"]

T = TypeVar("T")

SEED = 41
WINDOW, RING, RATIO, TOPK, PAGE = 128, 134, 2, 512, 64
SOFTMAX_SCALE = HEAD_DIM**-0.5
MAX_INPUT_BYTES = 256 << 30
MAX_HEADER_BYTES = 1 << 20  # seven tensors need a kilobyte
SIMULATED_SHAPES = {"sequences": 2, "heads": 16, "entries": 4096}  # a few seconds instead of minutes


class DemoInputs(NamedTuple):
    """The tensors of the job before quantization; see the module's table."""

    q: torch.Tensor
    window_kv: torch.Tensor
    compressed_kv: torch.Tensor
    index_q: torch.Tensor
    index_k: torch.Tensor
    index_weights: torch.Tensor
    attn_sink: torch.Tensor | None


INPUT_NAMES = DemoInputs._fields


def _smooth(generator: torch.Generator, b: int, tokens: int, dim: int) -> torch.Tensor:
    """[b, tokens, dim] bfloat16 of root mean square 1: eight slow waves over the positions in random directions, a
    third of
    noise, and eight outlier channels six times as large, as trained caches have them."""
    position = torch.arange(tokens, dtype=torch.float32)[:, None]
    period = torch.exp(torch.rand(b, 1, 8, generator=generator) * 6 + 3)
    phase = torch.rand(b, 1, 8, generator=generator) * 6.2832
    waves = torch.sin(position / period * 6.2832 + phase)  # [b, tokens, 8]
    x = torch.bmm(waves, torch.randn(b, 8, dim, generator=generator) * 8**-0.5)
    x += torch.randn(b, tokens, dim, generator=generator) * 0.33
    x[:, :, torch.randperm(dim, generator=generator)[:8]] *= 6.0
    x *= torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-20)
    return x.to(torch.bfloat16)


def make_inputs(
    *, sequences: int = 4, rows: int = 6, heads: int = 64, index_heads: int = 32, entries: int = 32768, seed: int = SEED
) -> DemoInputs:
    """The demo's own tensors. Each head looks for one entry: its query is that entry's key and noise. Index keys are a
    projection of the entries, and index heads look for the same entries, as a trained indexer does."""
    g = torch.Generator().manual_seed(seed)
    window_kv = _smooth(g, sequences, WINDOW - 1 + rows, HEAD_DIM)
    compressed_kv = _smooth(g, sequences, entries, HEAD_DIM)
    projection = torch.randn(HEAD_DIM, INDEX_DIM, generator=g) * HEAD_DIM**-0.5
    index_k = torch.stack([(kv.float() @ projection).to(torch.bfloat16) for kv in compressed_kv])
    wanted = torch.randint(0, entries, (sequences, rows, index_heads), generator=g)

    def looking_for(keys: torch.Tensor, count: int) -> torch.Tensor:
        heads_of = wanted[:, :, torch.arange(count) % index_heads].flatten(1)
        found = torch.stack([keys[i, heads_of[i]] for i in range(sequences)]).float()
        found += torch.randn(found.shape, generator=g) * 0.3
        return found.reshape(sequences, rows, count, -1).to(torch.bfloat16)

    return DemoInputs(
        q=looking_for(compressed_kv, heads),
        window_kv=window_kv,
        compressed_kv=compressed_kv,
        index_q=looking_for(index_k, index_heads),
        index_k=index_k,
        index_weights=torch.rand(sequences, rows, index_heads, generator=g).to(torch.bfloat16),
        attn_sink=torch.randn(heads, generator=g),
    )


def _check_file(path: Path) -> None:
    """Refuse, before the reader maps or parses anything, what cannot be an input: a file from a stranger."""
    if not path.is_file():
        raise FormatError(f"demo: {path.name} must be a safetensors file, got no regular file of that name.")
    size = path.stat().st_size
    if size > MAX_INPUT_BYTES:
        raise FormatError(f"demo: {path.name} must be at most {MAX_INPUT_BYTES} bytes, got {size}.")
    with open(path, "rb") as stream:
        prefix = stream.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > size - 8 or length > MAX_HEADER_BYTES:
        raise FormatError(
            f"demo: {path.name} must begin with the length of its header, at most {MAX_HEADER_BYTES} bytes, "
            f"got {length} in a file of {size}; truncated, or no safetensors file."
        )


def load_inputs(path: Path) -> DemoInputs:
    """The tensors of a safetensors file, checked against the module's table."""
    from safetensors import SafetensorError, safe_open

    _check_file(path)
    try:
        with safe_open(str(path), framework="pt", device="cpu") as handle:
            present = set(handle.keys())
            found = {name: handle.get_tensor(name) for name in INPUT_NAMES if name in present}
    except (SafetensorError, OSError, ValueError, OverflowError) as error:
        raise FormatError(f"demo: {path.name} must be a valid safetensors file; {str(error)[:300]}.") from None
    missing = [name for name in INPUT_NAMES if name not in found and name != "attn_sink"]
    if missing:
        raise ArgumentError(f"demo: {path.name} must hold {', '.join(INPUT_NAMES)}, got no {', '.join(missing)}.")
    inputs = DemoInputs(*[found.get(name) for name in INPUT_NAMES])  # type: ignore[arg-type]
    if inputs.q.dim() != 4 or inputs.index_q.dim() != 4 or inputs.compressed_kv.dim() != 3:
        raise ShapeError(
            "demo: q and index_q must have 4 dimensions and compressed_kv 3, got "
            f"{list(inputs.q.shape)}, {list(inputs.index_q.shape)} and {list(inputs.compressed_kv.shape)}."
        )
    b, n, h, _ = inputs.q.shape
    e, i = inputs.compressed_kv.shape[1], inputs.index_q.shape[2]
    wanted: dict[str, tuple[list[int], torch.dtype]] = {
        "q": ([b, n, h, HEAD_DIM], torch.bfloat16),
        "window_kv": ([b, WINDOW - 1 + n, HEAD_DIM], torch.bfloat16),
        "compressed_kv": ([b, e, HEAD_DIM], torch.bfloat16),
        "index_q": ([b, n, i, INDEX_DIM], torch.bfloat16),
        "index_k": ([b, e, INDEX_DIM], torch.bfloat16),
        "index_weights": ([b, n, i], torch.bfloat16),
        "attn_sink": ([h], torch.float32),
    }
    for name, (shape, dtype) in wanted.items():
        value = getattr(inputs, name)
        if value is None:
            continue
        if list(value.shape) != shape:
            raise ShapeError(f"demo: {name} must be {shape} to match q and compressed_kv, got {list(value.shape)}.")
        if value.dtype != dtype:
            raise DTypeError(f"demo: {name} must be {dtype}, got {value.dtype}.")
    if n > RING - WINDOW + 1:
        raise ShapeError(
            f"demo: q must have at most {RING - WINDOW + 1} rows per sequence, got {n}; the ring holds {RING}."
        )
    if RATIO * e < WINDOW - 1 + n:
        raise ShapeError(f"demo: compressed_kv must cover the window, {WINDOW - 1 + n} tokens, got {e} entries.")
    return inputs


class Stage(NamedTuple):
    """One step of the job: what ran it, how long it took, and what it moved."""

    name: str
    executes: str
    seconds: float
    note: str


@dataclass
class DemoReport:
    """What the demo prints and saves."""

    shapes: str
    stages: list[Stage] = field(default_factory=list)
    kernel_error: float = 0.0
    format_error: float = 0.0
    selected_share: float = 0.0
    bytes_per_token: dict[str, float] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


Progress = Callable[[str], None]
STAGE_NAMES = ("inputs", "store window", "store compressed", "store index keys", "score", "select", "attend", "judge")


def run_demo(
    inputs: DemoInputs | None = None, *, backend: str | None = None, on_stage: Progress = lambda name: None
) -> DemoReport:
    """The whole job on `backend` (default: as any call chooses). `on_stage` is told each stage as it begins."""
    on_stage("inputs")
    if inputs is None:
        simulated = (default_backend() if backend is None else backend) == "simulated"
        inputs = make_inputs(**SIMULATED_SHAPES) if simulated else make_inputs()
    b, n, h, _ = inputs.q.shape
    entries = inputs.compressed_kv.shape[1]
    tokens = RATIO * entries
    report = DemoReport(
        f"{b} sequences x {n} rows x {h} heads, window {WINDOW} of FP8, {TOPK} of {entries:,} FP4 entries "
        f"({tokens:,} tokens)"
    )

    def stage(name: str, stem: str, run: Callable[[], T], note: str, *args: Any, **kwargs: Any) -> T:
        on_stage(name)
        executes = explain(stem, *args, backend=backend, **kwargs).executes or "nothing"
        begin = time.perf_counter()
        result = run()
        report.stages.append(Stage(name, executes, time.perf_counter() - begin, note))
        return result

    def store(name: str, values: torch.Tensor, cache: PagedCache, slots: torch.Tensor) -> None:
        arguments = (values.flatten(0, 1), cache, slots.flatten())
        note = f"{slots.numel():,} x {cache.format.record_bytes} B"
        stage(name, "store_records", lambda: store_records(*arguments, backend=backend), note, *arguments)

    # The window: one ring of 134 slots per sequence; position p lies at p % 134.
    position = torch.arange(tokens - (WINDOW - 1 + n), tokens)  # of window_kv's rows
    ring = (torch.arange(b)[:, None] * RING + position % RING).to(torch.int32)  # [b, 127 + n]
    window = allocate(V41_FP8, b, RING)
    store("store window", inputs.window_kv, window, ring)

    # The compressed entries and their index keys share block numbers, dealt at random as a busy pool has them.
    blocks = -(-entries // PAGE)
    table = torch.randperm(b * blocks, generator=torch.Generator().manual_seed(SEED)).reshape(b, blocks).to(torch.int32)
    entry = torch.arange(entries)
    slots = table[:, entry // PAGE] * PAGE + (entry % PAGE).to(torch.int32)  # [b, entries]
    compressed = allocate(V41_FP4, b * blocks, PAGE)
    store("store compressed", inputs.compressed_kv, compressed, slots)
    index = allocate(INDEX_FP4, b * blocks, PAGE)
    store("store index keys", inputs.index_k, index, slots)

    # Row j of a sequence stands at position tokens - n + j and sees (position + 1) // 2 entries.
    row_position = tokens - n + torch.arange(n)
    lengths = ((row_position + 1) // RATIO).to(torch.int32).expand(b, n).contiguous()
    query = encode_query(inputs.index_q, INDEX_FP4)
    weights = inputs.index_weights.flatten(0, 1)
    keys = PagedKeys(index, table, lengths, entries)
    logits = stage(
        "score",
        "index_logits",
        lambda: index_logits(query, keys, weights, backend=backend),
        f"{b * n} x {entries:,} scores of {inputs.index_q.shape[2]} heads",
        query,
        keys,
        weights,
    )
    end = lengths.flatten()
    picks = stage(
        "select", "topk", lambda: topk(logits, TOPK, end, backend=backend), f"{TOPK} of each row", logits, TOPK, end
    )

    block = table.repeat_interleave(n, dim=0).gather(1, (picks.clamp(min=0) // PAGE).long())
    compressed_list = torch.where(picks < 0, -1, block * PAGE + picks % PAGE).reshape(b, n, TOPK)
    window_list = torch.stack([ring[:, j : j + WINDOW] for j in range(n)], dim=1)  # [b, n, 128]
    scopes = [KVScope(window, window_list), KVScope(compressed, compressed_list)]
    options: dict[str, Any] = {"softmax_scale": SOFTMAX_SCALE, "attn_sink": inputs.attn_sink}
    out, lse = stage(
        "attend",
        "sparse_decode",
        lambda: sparse_decode(inputs.q, scopes, backend=backend, **options),
        f"{b * n} rows x {WINDOW + TOPK} keys",
        inputs.q,
        scopes,
        **options,
    )

    on_stage("judge")
    exact = sparse_decode(inputs.q, scopes, out_dtype=torch.float64, backend="reference", **options)
    report.kernel_error = frobenius_error(out, exact.out)
    ideal, ideal_picks = _ideal(inputs, lengths)
    report.format_error = frobenius_error(out, ideal)
    shared = [
        torch.isin(mine[mine >= 0].long(), theirs).sum().item() / theirs.numel()
        for mine, theirs in zip(picks, ideal_picks, strict=True)
    ]
    report.selected_share = sum(shared) / max(1, len(shared))
    report.bytes_per_token = {
        "window FP8": float(V41_FP8.record_bytes),
        "compressed FP4": V41_FP4.record_bytes / RATIO,
        "index FP4": INDEX_FP4.record_bytes / RATIO,
        "the same entries in bfloat16": (BF16.record_bytes + 2 * INDEX_DIM) / RATIO,
    }
    report.tensors = {"out": out, "lse": lse.contiguous(), "selected": picks.reshape(b, n, TOPK)}
    return report


def _ideal(inputs: DemoInputs, lengths: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Attention in float64 over the tensors as given, each row with the 512 best entries of its own exact scores."""
    b, n = inputs.q.shape[:2]
    out = torch.empty(inputs.q.shape, dtype=torch.float64)
    picks = []
    for i in range(b):
        for j in range(n):
            length = int(lengths[i, j])
            exact = scores(inputs.index_q[i, j], inputs.index_k[i, :length], inputs.index_weights[i, j], exact=True)
            best = exact.topk(min(TOPK, length)).indices
            keys = torch.cat((inputs.window_kv[i, j : j + WINDOW], inputs.compressed_kv[i, best]))
            out[i, j] = attend(inputs.q[i, j], keys, SOFTMAX_SCALE, inputs.attn_sink, exact=True)[0]
            picks.append(best)
    return out, picks


def save_result(path: Path, report: DemoReport) -> None:
    """`out`, `lse` and `selected` as a safetensors file."""
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in report.tensors.items()}, str(path))
