# SPDX-License-Identifier: Apache-2.0
"""The attention layers at work: chunked prefill of several prompts, drafting, verification, random rejection, and a
check at the end.

The check feeds the tokens that survived, prompt and accepted ones together, through one prefill per sequence in a fresh
pool, and compares every output row with what chunks and decode steps gave. Hidden states are random; the caches, lists
and lengths are those of a real run.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from ..dispatch import default_backend
from ..errors import ArgumentError
from .config import V41Config
from .pool import KVPool
from .stack import AttentionStack
from .topology import LayerTopology
from .weights import AttentionWeights

__all__ = ["PRESETS", "PROMPTS", "LayersReport", "run_layers_demo"]

PROMPTS = (1024, 2048, 3072, 8192)
CHUNK = 1024
DECODE_STEPS = 32
DRAFTS = 5
PRESETS = ("tiny", "flash")
# The reference gives equal bits. Faster backends sum the softmax of prefill and decode in another order; an output
# moves by a rounding,
# and now and then a near tie of two index scores falls the other way, which later layers amplify.
MAX_ERROR = 5e-2


@dataclass
class LayersReport:
    """What one preset did. Errors are ||x - r|| / ||r|| against the one-shot prefill."""

    preset: str
    layers: tuple[int, ...]
    backend: str
    prompts: tuple[int, ...]
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_steps: int = 0
    verified: int = 0  # rows that decode steps ran
    accepted: int = 0  # of them, kept
    rejected: int = 0
    bytes_per_token: float = 0.0
    bytes_per_sequence: int = 0
    pool_bytes: int = 0
    weight_bytes: int = 0
    prompt_error: float = 0.0
    decode_error: float = 0.0
    checked_sequences: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def prefill_tokens_per_second(self) -> float:
        return sum(self.prompts) / self.prefill_seconds

    @property
    def decode_tokens_per_second(self) -> float:
        """Accepted tokens; the rows that verification threw away are in the time."""
        return self.accepted / self.decode_seconds

    def rows(self) -> list[tuple[str, str]]:
        """(measure, value) pairs for a table."""
        return [
            ("layers", f"{len(self.layers)} ({_ranges(self.layers)}), backend {self.backend}"),
            ("prompts, tokens", ", ".join(map(str, self.prompts))),
            ("prefill, tokens/s", f"{self.prefill_tokens_per_second:.1f}"),
            ("decode, accepted tokens/s", f"{self.decode_tokens_per_second:.1f}"),
            (
                "verified / accepted / rejected rows",
                f"{self.verified} / {self.accepted} / {self.rejected} in {self.decode_steps} steps",
            ),
            ("cache bytes per token", f"{self.bytes_per_token:g}"),
            ("cache bytes per sequence (rings and states)", f"{self.bytes_per_sequence}"),
            ("pool bytes in use at the end", f"{self.pool_bytes}"),
            ("weight bytes", f"{self.weight_bytes}"),
            ("prompt rows against one-shot prefill", f"error {self.prompt_error:.1e}"),
            ("decoded rows against one-shot prefill", f"error {self.decode_error:.1e}"),
            (
                "sequences checked",
                f"{self.checked_sequences} of {len(self.prompts)}: {'ok' if self.passed else 'FAILED'}",
            ),
        ]

    @property
    def passed(self) -> bool:
        return max(self.prompt_error, self.decode_error) <= (0.0 if self.backend == "reference" else MAX_ERROR)


def run_layers_demo(
    preset: str,
    *,
    backend: str | None = None,
    prompts: Sequence[int] = PROMPTS,
    chunk: int = CHUNK,
    decode_steps: int = DECODE_STEPS,
    drafts: int = DRAFTS,
    check_longest: int | None = None,
    seed: int = 0,
    on_step: Callable[[str, int, int], None] | None = None,
) -> LayersReport:
    """Run one preset.

    Args:
        preset: "tiny": all 43 layers with small projections. "flash": one layer of each kind at V4.1-Flash size.
        backend: of every operator; None: SPARSE_MLA_BACKEND.
        prompts, chunk, decode_steps, drafts: tokens of the prompts, tokens of a prefill step, decode steps, drafts in
            each.
        check_longest: sequences longer than this are left out of the check, which runs everything a second time. None:
            check all.
        on_step: called with (what runs, tokens done, tokens to do).
    """
    if preset not in PRESETS:
        raise ArgumentError(f"run_layers_demo: preset must be one of {', '.join(PRESETS)}, got {preset!r}.")
    longest = max(prompts) + decode_steps * (1 + drafts) + drafts
    flash = V41Config.v41_flash()
    if longest > flash.max_position_embeddings:
        raise ArgumentError(
            "run_layers_demo: prompts must leave room for the decode steps within "
            f"{flash.max_position_embeddings} tokens, "
            f"got {max(prompts)} and {longest - max(prompts)} more."
        )
    config = replace(V41Config.tiny() if preset == "tiny" else flash, max_position_embeddings=max(longest, 4096))
    layers = LayerTopology(config).closure(None if preset == "tiny" else LayerTopology(config).one_of_each_kind())
    weights = AttentionWeights.random(config, seed=seed)
    report = LayersReport(preset, layers, default_backend() if backend is None else backend, tuple(prompts))
    note = on_step if on_step is not None else _silent
    for done, layer in enumerate(layers):
        note(f"{preset}: drawing weights", done, len(layers))
        weights.layer(layer)
    report.weight_bytes = weights.nbytes

    tokens = [n + decode_steps * (1 + drafts) for n in prompts]
    inputs = [_hidden(config, n, seed + 1 + i) for i, n in enumerate(tokens)]
    stack = _stack(config, weights, layers, tokens, drafts, backend)
    sequences = [stack.pool.allocate() for _ in prompts]
    outputs: list[list[torch.Tensor]] = [[] for _ in prompts]

    done = 0
    started = time.perf_counter()
    while any(s.length < n for s, n in zip(sequences, prompts, strict=True)):
        active = [i for i, n in enumerate(prompts) if sequences[i].length < n]
        parts = [inputs[i][sequences[i].length : min(prompts[i], sequences[i].length + chunk)] for i in active]
        for i, out in zip(active, stack.prefill([sequences[i] for i in active], parts), strict=True):
            outputs[i].append(out)
            done += out.shape[0]
        note(f"{preset}: prefill", done, sum(prompts))
    report.prefill_seconds = time.perf_counter() - started

    rng = random.Random(seed)
    started = time.perf_counter()
    for step in range(decode_steps):
        note(f"{preset}: decode", step, decode_steps)
        stack.draft(sequences, _hidden(config, len(sequences) * config.draft_block_size, seed + 1000 + step))
        accepted = [rng.randint(0, drafts) for _ in sequences]
        rows = []
        for i, (sequence, kept) in enumerate(zip(sequences, accepted, strict=True)):
            row = inputs[i][sequence.length : sequence.length + 1 + drafts].clone()
            # drafts that will not be accepted
            row[1 + kept :] = _hidden(config, drafts - kept, seed + 2000 + 100 * step + i)
            rows.append(row)
        out = stack.decode(sequences, torch.cat(rows), [1 + drafts] * len(sequences))
        for i, part in enumerate(torch.split(out, 1 + drafts)):
            outputs[i].append(part[: 1 + accepted[i]])
            stack.reject(sequences[i], drafts - accepted[i])
        report.verified += out.shape[0]
        report.accepted += sum(accepted) + len(sequences)
    report.decode_seconds = time.perf_counter() - started
    report.decode_steps = decode_steps
    report.rejected = report.verified - report.accepted
    report.bytes_per_token = stack.pool.bytes_per_token
    report.bytes_per_sequence = stack.pool.slot_bytes
    report.pool_bytes = stack.pool.bytes_used
    lengths = [s.length for s in sequences]
    for sequence in sequences:
        stack.free(sequence)
    if stack.pool.bytes_used:
        report.notes.append(f"the pool holds {stack.pool.bytes_used} bytes after everything was freed")
    _check(report, config, weights, layers, inputs, outputs, lengths, drafts, backend, check_longest, note)
    return report


def _check(
    report: LayersReport,
    config: V41Config,
    weights: AttentionWeights,
    layers: tuple[int, ...],
    inputs: list[torch.Tensor],
    outputs: list[list[torch.Tensor]],
    lengths: list[int],
    drafts: int,
    backend: str | None,
    check_longest: int | None,
    note: Callable[[str, int, int], None],
) -> None:
    sums = {"prompt": [0.0, 0.0], "decode": [0.0, 0.0]}
    chosen = [i for i, n in enumerate(report.prompts) if check_longest is None or n <= check_longest]
    for done, i in enumerate(chosen):
        note(f"{report.preset}: one-shot prefill", done, len(chosen))
        stack = _stack(config, weights, layers, [lengths[i]], drafts, backend)
        expected = stack.prefill([stack.pool.allocate()], [inputs[i][: lengths[i]]])[0]
        found = torch.cat(outputs[i])
        prompt = report.prompts[i]
        for name, part in (("prompt", slice(0, prompt)), ("decode", slice(prompt, None))):
            reference = expected[part].double()
            sums[name][0] += float((found[part].double() - reference).square().sum())
            sums[name][1] += float(reference.square().sum())
    report.checked_sequences = len(chosen)
    errors = {name: (wrong / total) ** 0.5 if total else 0.0 for name, (wrong, total) in sums.items()}
    report.prompt_error, report.decode_error = errors["prompt"], errors["decode"]
    if len(chosen) < len(report.prompts):
        report.notes.append(f"checked the {len(chosen)} sequences of at most {check_longest} prompt tokens")


def _stack(
    config: V41Config,
    weights: AttentionWeights,
    layers: tuple[int, ...],
    tokens: Sequence[int],
    drafts: int,
    backend: str | None,
) -> AttentionStack:
    blocks = sum(-(-n // 128) + 1 for n in tokens)
    pool = KVPool(config, num_blocks=blocks, num_sequences=len(tokens), rows_per_step=1 + drafts, layers=layers)
    return AttentionStack(weights, pool, backend=backend)


def _hidden(config: V41Config, rows: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, config.hidden_size, generator=generator).to(torch.bfloat16)


def _ranges(layers: tuple[int, ...]) -> str:
    return f"{layers[0]}-{layers[-1]}" if len(layers) == layers[-1] - layers[0] + 1 else ", ".join(map(str, layers))


def _silent(what: str, done: int, total: int) -> None:
    return None
