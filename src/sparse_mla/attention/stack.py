# SPDX-License-Identifier: Apache-2.0
"""The attention layers of a model one behind the other: attention norm, attention, residual add, and nothing else.

No embedding, no experts, no head: hidden states go in and come out. That is enough to drive every path of the caches
(chunked prefill, decode, verification, rejection, drafting, forking) the way an engine does, to measure it, and to show
where an engine's own code goes.

The draft layers of a real model read a projection of three main layers' outputs. That projection is not part of the
attention, so the mean of those outputs stands in for it here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..errors import ArgumentError, DTypeError, ShapeError
from .layer import Trace, V41Attention
from .linear import LinearMode, rms_norm
from .metadata import StepMetadata
from .pool import KVPool, KVSequence
from .weights import AttentionWeights

__all__ = ["AttentionStack"]


class AttentionStack:
    """Runs steps through a pool's layers and keeps the sequences' lengths.

    Args:
        weights: of the model the pool was made for.
        pool: the caches. Its layers are the ones that run.
        layers: a subset of the pool's layers. Default: all of them.
        linear, backend, memory_limit, attention: as in `V41Attention`, or one that exists already.
    """

    def __init__(
        self,
        weights: AttentionWeights,
        pool: KVPool,
        *,
        layers: Iterable[int] | None = None,
        linear: LinearMode = "bf16",
        backend: str | None = None,
        memory_limit: int | None = None,
        attention: V41Attention | None = None,
    ) -> None:
        self.config = weights.config
        self.pool = pool
        self.weights = weights
        self.attention = attention or V41Attention(
            self.config, weights, linear=linear, backend=backend, memory_limit=memory_limit
        )
        chosen = pool.layers if layers is None else pool.topology.closure(layers)
        for layer in chosen:
            pool.window(layer)
        self.main_layers = tuple(n for n in chosen if pool.topology[n].kind != "draft")
        self.draft_layers = tuple(n for n in chosen if pool.topology[n].kind == "draft")

    def prefill(
        self,
        sequences: Sequence[KVSequence],
        hidden: Sequence[torch.Tensor],
        *,
        chunk: int | None = None,
        trace: Trace | None = None,
    ) -> list[torch.Tensor]:
        """Feed every sequence its next tokens, in steps of at most `chunk` tokens of each (default: all at once).

        Args:
            hidden: one [tokens, hidden_size] bfloat16 per sequence.
        Returns:
            One [tokens, hidden_size] bfloat16 per sequence, in their order.
        Raises:
            PoolFullError: not enough blocks for all of the tokens. Nothing has run then.
        """
        op = "AttentionStack.prefill"
        if len(hidden) != len(sequences):
            raise ShapeError(f"{op}: hidden must have one tensor per sequence, got {len(hidden)} for {len(sequences)}.")
        for rows in hidden:
            self._check_hidden(op, rows, None)
        if chunk is not None and (not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1):
            raise ArgumentError(f"{op}: chunk must be an integer of at least 1, got {chunk!r}.")
        totals = [int(rows.shape[0]) for rows in hidden]
        if min(totals, default=0) < 1:
            raise ArgumentError(f"{op}: every sequence must get at least one token, got {totals}.")
        self.pool.reserve(list(sequences), totals, op)
        done = [0] * len(totals)
        parts: list[list[torch.Tensor]] = [[] for _ in totals]
        while any(d < t for d, t in zip(done, totals, strict=True)):
            active = [i for i, t in enumerate(totals) if done[i] < t]
            counts = [totals[i] - done[i] if chunk is None else min(chunk, totals[i] - done[i]) for i in active]
            step = StepMetadata.prefill(self.pool, [sequences[i] for i in active], counts)
            rows = torch.cat([hidden[i][done[i] : done[i] + n] for i, n in zip(active, counts, strict=True)])
            out = self._run(rows, step, trace)
            for i, piece in zip(active, torch.split(out, counts), strict=True):
                parts[i].append(piece)
                done[i] += piece.shape[0]
        return [torch.cat(pieces) for pieces in parts]

    def decode(
        self,
        sequences: Sequence[KVSequence | None],
        hidden: torch.Tensor,
        num_rows: Sequence[int] | None = None,
        *,
        trace: Trace | None = None,
    ) -> torch.Tensor:
        """One decode step. More than one row for a sequence verifies drafts: `reject` what was not accepted afterwards.

        Args:
            hidden: [T, hidden_size] bfloat16, the rows of the sequences one after another.
            num_rows: rows of each sequence. Default: one.
        Returns:
            [T, hidden_size] bfloat16.
        """
        counts = [1] * len(sequences) if num_rows is None else list(num_rows)
        self._check_hidden("AttentionStack.decode", hidden, sum(counts))
        return self._run(hidden, StepMetadata.decode(self.pool, sequences, counts), trace)

    def draft(
        self, sequences: Sequence[KVSequence | None], hidden: torch.Tensor, *, trace: Trace | None = None
    ) -> torch.Tensor:
        """One pass of the draft layers over the next block of every sequence. Lengths do not change.

        Args:
            hidden: [sequences * draft_block_size, hidden_size] bfloat16.
        """
        self._check_hidden("AttentionStack.draft", hidden, len(sequences) * self.config.draft_block_size)
        step = StepMetadata.draft(self.pool, sequences)
        residual = hidden
        for layer in self.draft_layers:
            residual = residual + self._layer(residual, layer, step, trace)
        step.commit()
        return residual

    def reject(self, sequence: KVSequence, num_tokens: int) -> None:
        """Take back the last tokens of a sequence: the drafts that verification did not accept."""
        self.pool.reject(sequence, num_tokens)

    def free(self, sequence: KVSequence) -> None:
        """Give a sequence's blocks and slot back."""
        self.pool.free(sequence)

    def _run(self, hidden: torch.Tensor, step: StepMetadata, trace: Trace | None) -> torch.Tensor:
        """The main layers of a step, then what the draft layers must know of it. A failure in the middle damages its
        sequences: their rings are half written."""
        targets: list[torch.Tensor] = []
        residual = hidden
        try:
            for layer in self.main_layers:
                residual = residual + self._layer(residual, layer, step, trace)
                if layer in self.config.draft_target_layer_ids:
                    targets.append(residual)
            if self.draft_layers:
                context = torch.stack([t.float() for t in targets or [residual]]).mean(0).to(torch.bfloat16)
                for layer in self.draft_layers:
                    self.attention.store_context(self._normed(context, layer), layer, step, self.pool)
        except BaseException:
            for sequence in step.sequences:
                if sequence is not None and sequence.state == "live":
                    sequence.state = "damaged"
            raise
        step.commit()
        return residual

    def _layer(self, residual: torch.Tensor, layer: int, step: StepMetadata, trace: Trace | None) -> torch.Tensor:
        return self.attention.forward(self._normed(residual, layer), layer, step, self.pool, trace=trace)

    def _normed(self, residual: torch.Tensor, layer: int) -> torch.Tensor:
        return rms_norm(residual, self.weights.layer(layer).attn_norm, self.config.rms_norm_eps)

    def _check_hidden(self, op: str, hidden: torch.Tensor, rows: int | None) -> None:
        if not isinstance(hidden, torch.Tensor) or hidden.dtype != torch.bfloat16:
            got = (
                str(hidden.dtype).removeprefix("torch.") if isinstance(hidden, torch.Tensor) else type(hidden).__name__
            )
            raise DTypeError(f"{op}: hidden must be bfloat16, got {got}.")
        if hidden.dim() != 2 or hidden.shape[1] != self.config.hidden_size or rows not in (None, hidden.shape[0]):
            wanted = "tokens" if rows is None else str(rows)
            raise ShapeError(f"{op}: hidden must be [{wanted}, {self.config.hidden_size}], got {list(hidden.shape)}.")
        if hidden.device != self.pool.device:
            raise ArgumentError(f"{op}: hidden must be on {self.pool.device} like the pool, got {hidden.device}.")
        if not bool(torch.isfinite(hidden).all()):
            raise ArgumentError(f"{op}: hidden must be finite, got NaN or infinity; the layers before are broken.")
