# SPDX-License-Identifier: Apache-2.0
"""Running steps layer by layer with every stage recorded, for the tests of the attention layer."""

from collections import defaultdict
from dataclasses import replace

import torch

from sparse_mla import dispatch
from sparse_mla.attention import AttentionWeights, KVPool, StepMetadata, V41Attention, V41Config
from sparse_mla.attention.linear import rms_norm

STEMS = (  # the operators a layer calls
    "candidate_blocks",
    "compress",
    "index_logits",
    "index_topk",
    "load_records",
    "rope",
    "sparse_decode",
    "sparse_prefill",
    "store_records",
    "topk",
)


def missing_stems(backend):
    """Operators of the layer that a backend has no implementation of."""
    return [stem for stem in STEMS if not any(i.backend == backend for i in dispatch.OPS[stem].implementations)]


PRESENT = tuple(name for name in dispatch.BACKENDS if dispatch.presence(name) == "" and name != "neuron")
BACKENDS = tuple(name for name in PRESENT if not missing_stems(name))
KINDS = (0, 2, 3, 20, 21, 24, 40)
# Small enough that selection and candidate blocks bite within 160 tokens.
SMALL = replace(V41Config.tiny(), index_topk=16, candidate_topk_blocks=6)

ENTRY_STAGES = ("pooled", "pooled_norm", "entry", "index_k", "index_k_norm", "index_k_rope")
_WEIGHTS = {}


def weights_of(config, seed=0):
    if (config, seed) not in _WEIGHTS:
        _WEIGHTS[config, seed] = AttentionWeights.random(config, seed=seed)
    return _WEIGHTS[config, seed]


def hidden_rows(config, count, seed=0):
    return torch.randn(count, config.hidden_size, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


class Run:
    """A pool with layers, driven step by step. Records (sequence, layer, stage) -> rows in token or entry order."""

    def __init__(self, config=SMALL, layers=KINDS, *, backend="reference", linear="bf16", weights=None, **pool):
        self.config = config
        self.weights = weights or weights_of(config)
        self.pool = KVPool(config, **{"num_blocks": 12, "num_sequences": 4, "layers": layers, **pool})
        self.attention = V41Attention(config, self.weights, linear=linear, backend=backend)
        self.main = [n for n in self.pool.layers if self.pool.topology[n].kind != "draft"]
        self.drafts = [n for n in self.pool.layers if self.pool.topology[n].kind == "draft"]
        self.recorded = defaultdict(list)
        self.record = False
        self.contexts = defaultdict(list)
        self.candidates = defaultdict(list)  # sequence -> blocks of each position

    def prefill(self, sequences, hidden, counts):
        return self.run(StepMetadata.prefill(self.pool, sequences, counts), hidden)

    def decode(self, sequences, hidden, counts):
        return self.run(StepMetadata.decode(self.pool, sequences, counts), hidden)

    def draft(self, sequences, hidden):
        return self.run(StepMetadata.draft(self.pool, sequences), hidden)

    def run(self, step, hidden):
        residual = hidden
        for layer in self.drafts if step.kind == "draft" else self.main:
            normed = rms_norm(residual, self.weights.layer(layer).attn_norm, self.config.rms_norm_eps)
            trace = self._recorder(step, layer) if self.record else None
            residual = residual + self.attention.forward(normed, layer, step, self.pool, trace=trace)
        if step.kind != "draft":
            for layer in self.drafts:
                normed = rms_norm(residual, self.weights.layer(layer).attn_norm, self.config.rms_norm_eps)
                self.attention.store_context(normed, layer, step, self.pool)
                for number, sequence in enumerate(step.sequences):
                    self.contexts[id(sequence), layer].append(normed[step.row_sequences == number])
        step.commit()
        return residual

    def get(self, sequence, layer, stage):
        return torch.cat(self.recorded[id(sequence), layer, stage])

    def _recorder(self, step, layer):
        def trace(stage, value):
            if stage in ENTRY_STAGES:
                owners, closes = closing_rows(step, self.pool.topology[layer].ratio)
                assert value.shape[0] == len(owners), stage
                for number, sequence in enumerate(step.sequences):
                    rows = [i for i, owner in enumerate(owners) if owner == number and closes[i]]
                    self.recorded[id(sequence), layer, stage].append(value[rows].clone())
                return
            assert value.shape[0] == step.total_rows, stage
            if stage == "candidates":  # rows of different steps have lists of different width
                for number, sequence in enumerate(step.sequences):
                    self.candidates[id(sequence)] += list(value[step.row_sequences == number])
                return
            for number, sequence in enumerate(step.sequences):
                self.recorded[id(sequence), layer, stage].append(value[step.row_sequences == number].clone())

        return trace


def closing_rows(step, ratio):
    """(owner of each output row of the compressor, whether it closes an entry), from the step's lengths alone."""
    owners, closes = [], []
    for number, (start, rows) in enumerate(zip(step.starts, step.num_rows, strict=True)):
        if step.kind == "prefill":
            closed = (start + rows) // ratio - start // ratio
            owners += [number] * max(1, closed)
            closes += [True] * closed if closed else [False]
        else:
            owners += [number] * rows
            closes += [(start + j + 1) % ratio == 0 for j in range(rows)]
    return owners, closes
