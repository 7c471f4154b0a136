# SPDX-License-Identifier: Apache-2.0
"""The shapes an engine will launch, and running each of them once before the first request.

A Neuron kernel is compiled per shape, pool sizes included, so the first call of a new shape takes minutes. Row counts
are padded to powers of two by the launches, which leaves few of them. On the simulator the same run proves that every
shape is inside the limits. No cache is read or written: all indices are empty and all contexts 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..caches import KVScope, PagedCache
from ..dispatch import explain
from ..errors import ArgumentError
from ..formats import HEAD_DIM
from ..ops.index_logits import PagedKeys, index_logits
from ..ops.softmax_pool import softmax_pool
from ..ops.sparse_decode import sparse_decode
from ..ops.topk import topk
from .launch import power_of_two

__all__ = ["EngineConfig", "NeuronShape", "Warmed", "neuron_shapes", "warm_up"]


class EngineConfig(NamedTuple):
    """What decides an engine's launch shapes. The caches are the engine's own, because their sizes are compiled in."""

    rows: Sequence[int]  # query rows of the steps that occur: decode batches, verification, prefill chunks
    window_cache: PagedCache
    compressed_cache: PagedCache | None = None
    index_cache: PagedCache | None = None
    heads: int = 64
    index_heads: int = 32
    window: int = 128
    topk: int = 512
    ratio: int = 2  # tokens of one compressed entry; 1 needs no pooling
    max_context_len: int = 0  # entries of the longest context; columns of the logits


class NeuronShape(NamedTuple):
    """One shape of one operator."""

    op: str
    rows: int
    description: str
    arguments: dict[str, Any]  # of the public operator; nothing in them is read

    def run(self, backend: str) -> Any:
        functions: dict[str, Callable[..., Any]] = {
            "sparse_decode": sparse_decode,
            "index_logits": index_logits,
            "topk": topk,
            "softmax_pool": softmax_pool,
        }
        return functions[self.op](**self.arguments, backend=backend)


class Warmed(NamedTuple):
    """What came of one shape."""

    op: str
    rows: int
    description: str
    executes: str
    seconds: float


def neuron_shapes(config: EngineConfig) -> list[NeuronShape]:
    """Every launch shape of the steps in `config.rows`.

    Attention is compiled for each row count, since its kernel is told how many of its padded rows are real; of the
    other operators, counts that pad to the same power of two share a shape."""
    if not config.rows or min(config.rows) < 1:
        raise ArgumentError(f"neuron_shapes: rows must be row counts of at least 1, got {list(config.rows)}.")
    shapes = []
    for rows in sorted(set(config.rows)):
        shapes.append(_attention(config, rows, with_compressed=False))
        if config.compressed_cache is not None:
            shapes.append(_attention(config, rows, with_compressed=True))
    for rows in sorted({power_of_two(n) for n in config.rows}):
        if config.index_cache is not None and config.max_context_len > 0:
            shapes.append(_logits(config, rows, config.index_cache))
            shapes.append(_selection(config, rows))
        if config.ratio > 1:
            shapes.append(_pooling(config, rows))
    return shapes


def _attention(config: EngineConfig, rows: int, with_compressed: bool) -> NeuronShape:
    device = config.window_cache.data.device

    def empty(width: int) -> torch.Tensor:
        return torch.full((rows, 1, width), -1, dtype=torch.int32, device=device)

    scopes = [KVScope(config.window_cache, empty(config.window))]
    text = f"{config.heads} heads, {config.window} {config.window_cache.format}"
    if with_compressed and config.compressed_cache is not None:
        scopes.append(KVScope(config.compressed_cache, empty(config.topk)))
        text += f" + {config.topk} {config.compressed_cache.format}"
    arguments = {
        "q": torch.zeros((rows, 1, config.heads, HEAD_DIM), dtype=torch.bfloat16, device=device),
        "scopes": scopes,
        "attn_sink": torch.zeros(config.heads, dtype=torch.float32, device=device),
    }
    return NeuronShape("sparse_decode", rows, text, arguments)


def _logits(config: EngineConfig, rows: int, cache: PagedCache) -> NeuronShape:
    device, heads = cache.data.device, config.index_heads
    data_bytes = cache.format.data_bytes
    q_fp = torch.zeros((rows, 1, heads, data_bytes), dtype=torch.uint8, device=device)
    q_sf = None
    if cache.format.scale_bytes and cache.format.num_sf > 1:
        q_sf = torch.full((rows, 1, heads, 4), 127, dtype=torch.uint8, device=device)
    columns = -(-config.max_context_len // cache.page_size)
    table = torch.zeros((rows, columns), dtype=torch.int32, device=device)
    lens = torch.zeros((rows, 1), dtype=torch.int32, device=device)
    arguments = {
        "q": (q_fp, q_sf),
        "keys": PagedKeys(cache, table, lens, config.max_context_len),
        "weights": torch.zeros((rows, heads), dtype=torch.bfloat16, device=device),
    }
    return NeuronShape("index_logits", rows, f"{heads} heads, {config.max_context_len} {cache.format} keys", arguments)


def _selection(config: EngineConfig, rows: int) -> NeuronShape:
    device = config.window_cache.data.device
    logits = torch.zeros((rows, config.max_context_len), dtype=torch.bfloat16, device=device)
    end = torch.zeros(rows, dtype=torch.int32, device=device)
    text = f"{config.topk} of {config.max_context_len}"
    return NeuronShape("topk", rows, text, {"logits": logits, "k": config.topk, "end": end})


def _pooling(config: EngineConfig, rows: int) -> NeuronShape:
    zeros = torch.zeros((rows, config.ratio, HEAD_DIM), dtype=torch.float32, device=config.window_cache.data.device)
    return NeuronShape("softmax_pool", rows, f"{config.ratio} rows a group", {"score": zeros, "latent": zeros})


def warm_up(
    config: EngineConfig, backend: str = "neuron", *, on_shape: Callable[[NeuronShape], None] = lambda shape: None
) -> list[Warmed]:
    """Run every shape once and say what ran and how long it took; the first time on a device this compiles.

    Raises what the call itself would raise, so an engine learns of an unsupported shape before it serves.
    """
    done = []
    for shape in neuron_shapes(config):
        on_shape(shape)
        executes = explain(shape.op, **shape.arguments, backend=backend).executes or "nothing"
        begin = time.perf_counter()
        shape.run(backend)
        done.append(Warmed(shape.op, shape.rows, shape.description, executes, time.perf_counter() - begin))
    return done
