# SPDX-License-Identifier: Apache-2.0
"""One attention layer of DeepSeek-V4.1: from the normed hidden state to the o-projection's output.

The stages, in order, with the names under which a trace records them (`STAGES` is the list the picture in docs/layer.md
is drawn from): queries go through a low rank, keys and values are one 512-vector per token, the window ring holds the
last tokens in FP8, a kv source pools and stores compressed entries and their index keys, an index source selects
entries for each row, and every row attends to its window and its selected entries under one softmax with a sink.

Everything between the operators is row-wise with fixed-shape products (linear.py), and a row's window and entries come
in the same order whatever the step looks like. On the reference backend a row's bits therefore do not depend on
chunking, on batching, or on whether it came by prefill or by decode.

What surprised us: prefill must not attend to its own unquantized keys. It quantizes them and casts them back, so that
it sees what decode will read; and it reads the history before it stores, because a chunk's stores overwrite ring places
that its first rows still see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..caches import KVScope, PagedCache, gather_records
from ..errors import ArgumentError, DTypeError, ShapeError, StateError
from ..formats import encode_query, split_record
from ..ops.candidate_blocks import candidate_blocks, candidate_lengths, compact_to_dense
from ..ops.compress import compress
from ..ops.index_logits import Candidates, PagedKeys, RaggedKeys, index_logits
from ..ops.index_topk import index_topk
from ..ops.load_records import load_records
from ..ops.rope import YarnConfig, rope, rope_table
from ..ops.sparse_decode import config_memory_limit, sparse_decode
from ..ops.sparse_prefill import sparse_prefill
from ..ops.store_records import store_records
from ..ops.topk import topk
from .config import HEAD_DIM, INDEX_HEAD_DIM, V41Config
from .linear import LINEAR_MODES, LinearMode, project, quantize_activations, rms_norm
from .metadata import CompressedStep, StepMetadata
from .pool import KVPool
from .topology import LayerPlan, LayerTopology
from .weights import AttentionWeights, LayerWeights

__all__ = ["STAGES", "STAGE_LAYERS", "Stage", "Trace", "V41Attention"]

Trace = Callable[[str, torch.Tensor], None]
Reduce = Callable[[torch.Tensor], torch.Tensor]


class Stage(NamedTuple):
    """One recorded stage: its name in a trace, the layers that have it, the stages it reads, and what happens there."""

    name: str
    layers: str  # a key of STAGE_LAYERS
    reads: tuple[str, ...]  # names of stages; "window ring", "entries cache" and "index pages" are the pool's
    meaning: str


STAGE_LAYERS: dict[str, Callable[[LayerPlan], bool]] = {
    "all": lambda plan: True,
    "kv source": lambda plan: plan.owns_cache,
    "pooling kv source": lambda plan: plan.has_compressor_state,
    "index source": lambda plan: plan.owns_index,
    "candidate source": lambda plan: plan.publishes_candidates,
}

STAGES = (
    Stage("hidden", "all", (), "attention-normed hidden state"),
    Stage("q_latent", "all", ("hidden",), "projection to the query rank"),
    Stage("q_latent_norm", "all", ("q_latent",), "RMSNorm"),
    Stage("q", "all", ("q_latent_norm",), "projection to the heads"),
    Stage("q_rope", "all", ("q",), "rope on the last 64 of each head"),
    Stage("window_kv", "all", ("hidden",), "projection to the one 512-vector"),
    Stage("window_kv_norm", "all", ("window_kv",), "RMSNorm"),
    Stage("window_kv_rope", "all", ("window_kv_norm",), "rope; stored as FP8 in the window ring"),
    Stage("compressor_latent", "kv source", ("hidden",), "projection, float32 if pooled"),
    Stage("compressor_score", "pooling kv source", ("hidden",), "gate projection, float32"),
    Stage("pooled", "kv source", ("compressor_latent", "compressor_score"), "softmax pooling of a group's rows"),
    Stage("pooled_norm", "kv source", ("pooled",), "RMSNorm"),
    Stage("entry", "kv source", ("pooled_norm",), "rope at the group's first token; stored as FP4"),
    Stage("index_k", "kv source", ("pooled_norm",), "projection to 128"),
    Stage("index_k_norm", "kv source", ("index_k",), "RMSNorm"),
    Stage("index_k_rope", "kv source", ("index_k_norm",), "rope; stored as FP4 in the index pages"),
    Stage("index_q", "index source", ("q_latent_norm",), "projection to the index heads"),
    Stage("index_q_rope", "index source", ("index_q",), "rope; quantized to FP4"),
    Stage("index_weights", "index source", ("hidden",), "one weight per index head"),
    Stage("candidates", "candidate source", ("index_q_rope", "index_weights", "index pages"), "best blocks of entries"),
    Stage(
        "entries", "index source", ("index_q_rope", "index_weights", "index pages"), "top-k entries, ascending, -1 fill"
    ),
    Stage("attention", "all", ("q_rope", "window ring", "entries", "entries cache"), "one softmax, with the sink"),
    Stage("attention_unrope", "all", ("attention",), "rope turned back by the query's position"),
    Stage("o_group", "all", ("attention_unrope",), "grouped projection of the heads"),
    Stage("out", "all", ("o_group",), "projection to the hidden size"),
)


class V41Attention:
    """The attention of every layer of a model, over its weights. Holds no per-sequence state: that is the pool's.

    Args:
        config, weights: the model.
        linear: how projections with FP8 weights take their input. "bf16": as it is (the reference model's code). "fp8":
            rounded to e4m3 in
            groups of 32 (DeepInfer). Projections whose weights are bfloat16 in the checkpoint (compressor, index keys,
            index weights) take
            bfloat16 either way.
        backend: of every operator, as everywhere. None: SPARSE_MLA_BACKEND.
        e4m3_max: cap of the "fp8" rounding, 448 or 224.
        memory_limit: bytes of scratch of each operator, and of the logits of a candidate source.
        reduce: sums a tensor over the ranks of tensor parallelism, in place or not. Needed when the weights are a
            shard: it is applied to
            the output, and with sharded index heads also to the float32 logits.
    """

    def __init__(
        self,
        config: V41Config,
        weights: AttentionWeights,
        *,
        linear: LinearMode = "bf16",
        backend: str | None = None,
        e4m3_max: int = 448,
        memory_limit: int | None = None,
        reduce: Reduce | None = None,
    ) -> None:
        if linear not in LINEAR_MODES:
            raise ArgumentError(f"V41Attention: linear must be one of {', '.join(LINEAR_MODES)}, got {linear!r}.")
        if weights.config != config:
            raise ArgumentError("V41Attention: weights must be made for this config, got weights of another model.")
        if weights.shard.size > 1 and reduce is None:
            raise ArgumentError(
                f"V41Attention: reduce must be given for weights of rank {weights.shard.rank} of "
                f"{weights.shard.size}, got None; "
                "without it the output is a part."
            )
        self.config = config
        self.weights = weights
        self.topology = LayerTopology(config)
        self.linear = linear
        self.backend = backend
        self.e4m3_max = e4m3_max
        self.memory_limit = memory_limit
        self.reduce = reduce
        self._tables: dict[str, torch.Tensor] = {}

    def forward(
        self, hidden: torch.Tensor, layer: int, step: StepMetadata, pool: KVPool, *, trace: Trace | None = None
    ) -> torch.Tensor:
        """Run one layer over the rows of a step.

        Args:
            hidden: [T, hidden_size] bfloat16, after the layer's attention norm.
            layer: main layers with a prefill or decode step, draft layers with a draft step.
            step: made for this pool, whose sequences have not moved since. Layers run in ascending order within a step,
                because they read
                the caches and lists of the sources before them.
            pool: the caches; written in place.
            trace: called with the name and tensor of every stage.
        Returns:
            [T, hidden_size] bfloat16, to be added to the residual. Rows of padding are 0.
        Raises:
            ShapeError, DTypeError, ArgumentError: an argument is wrong; the message names it.
            StateError: a freed sequence, a stale step, a list whose source has not run in this step. Nothing is written
            then.
            NonFiniteError: a NaN or infinity reached a quantizer, a NaN a selection.
        """
        plan = self._check(hidden, layer, step, pool)
        note = trace if trace is not None else _no_trace
        weights = self.weights.layer(layer)
        with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
            note("hidden", hidden)
            q_latent = self._norm("q_latent", self._project(hidden, weights.wq_a), weights.q_norm, note)
            q = self._project(q_latent, weights.wq_b)
            q = q.view(step.total_rows, q.shape[1] // HEAD_DIM, HEAD_DIM)
            note("q", q)
            q = self._rope(q, step.positions, plan)
            note("q_rope", q)
            history, current = self._store_window(hidden, weights, plan, step, pool, note)
            if plan.owns_cache:
                self._store_entries(hidden, weights, plan, step, pool, note)
            if plan.owns_index:
                self._select(hidden, q_latent, weights, plan, step, pool, note)
            if step.kind == "prefill":
                out = self._attend_gathered(q, history, current, weights, plan, step, pool, note)
            else:
                out = self._attend_caches(q, weights, plan, step, pool, note)
            note("attention", out)
            out = self._rope(out, step.positions, plan, inverse=True)
            note("attention_unrope", out)
            return self._output(out, weights, note)

    def store_context(self, hidden: torch.Tensor, layer: int, step: StepMetadata, pool: KVPool) -> None:
        """Store window records only, without attention: what a draft layer needs to know of the tokens that main layers
        have processed.

        Args:
            hidden: [T, hidden_size] bfloat16, the draft layer's normed input for the rows of a prefill or decode step.
        """
        if step.kind == "draft":
            raise ArgumentError("V41Attention.store_context: step must be a prefill or decode step, got a draft step.")
        if self.topology[layer].kind != "draft":
            raise ArgumentError(f"V41Attention.store_context: layer must be a draft layer, got {layer}.")
        plan = self._check(hidden, layer, step, pool, context=True)
        with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
            kv = self._window_kv(hidden, self.weights.layer(layer), plan, step, _no_trace)
            store_records(kv, pool.window(layer), step.window_store_slots, backend=self.backend)

    # --- checks ------------------------------------------------------------------------------------------------------

    def _check(
        self, hidden: torch.Tensor, layer: int, step: StepMetadata, pool: KVPool, *, context: bool = False
    ) -> LayerPlan:
        op = "V41Attention"
        if not isinstance(hidden, torch.Tensor) or hidden.dtype != torch.bfloat16:
            got = (
                str(hidden.dtype).removeprefix("torch.") if isinstance(hidden, torch.Tensor) else type(hidden).__name__
            )
            raise DTypeError(f"{op}: hidden must be bfloat16, got {got}.")
        if tuple(hidden.shape) != (step.total_rows, self.config.hidden_size):
            raise ShapeError(
                f"{op}: hidden must be [{step.total_rows}, {self.config.hidden_size}], the step's rows and the "
                "hidden size, "
                f"got {list(hidden.shape)}."
            )
        if hidden.device != pool.device:
            raise ArgumentError(f"{op}: hidden must be on {pool.device} like the pool, got {hidden.device}.")
        if pool.config != self.config:
            raise ArgumentError(f"{op}: pool must be made for this layer's config, got one of another model.")
        plan = self.topology[layer]
        if not context and (plan.kind == "draft") != (step.kind == "draft"):
            raise ArgumentError(
                f"{op}: draft layers run in draft steps and main layers in the others, got layer {layer} in a "
                f"{step.kind} step; "
                "store_context gives a draft layer the tokens of a step."
            )
        step.require_current(op, pool)
        pool.window(layer)  # raises when the pool was made without this layer
        source, candidates = plan.index_source, plan.candidate_source
        if source is not None and source != layer and source not in step.lists:
            raise StateError(f"{op}: layer {layer} reads the list of layer {source}, which has not run in this step.")
        if candidates is not None and candidates not in step.candidates:
            raise StateError(
                f"{op}: layer {layer} searches the blocks of layer {candidates}, which has not run in this step."
            )
        return plan

    # --- row-wise parts ----------------------------------------------------------------------------------------------

    def _project(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """A projection whose weight is FP8 in the checkpoint."""
        return self._product(quantize_activations(x, self.e4m3_max) if self.linear == "fp8" else x, weight)

    def _product(
        self, x: torch.Tensor, weight: torch.Tensor | None, out_dtype: torch.dtype = torch.bfloat16
    ) -> torch.Tensor:
        return project(x, _present(weight), out_dtype=out_dtype, backend=self.backend)

    def _norm(self, name: str, x: torch.Tensor, weight: torch.Tensor | None, note: Trace) -> torch.Tensor:
        note(name, x)
        out = rms_norm(x, _present(weight), self.config.rms_norm_eps)
        note(f"{name}_norm", out)
        return out

    def _rope(self, x: torch.Tensor, positions: torch.Tensor, plan: LayerPlan, inverse: bool = False) -> torch.Tensor:
        table = self.rope_table(plan, int(positions.max()) + 1 if positions.numel() else 1)
        return rope(x, positions, table.to(x.device), inverse=inverse, backend=self.backend)

    def rope_table(self, plan: LayerPlan, positions: int) -> torch.Tensor:
        """cos | sin of at least that many positions; grown in powers of two, so that a short run does not build a
        million rows.
        """
        table = self._tables.get(plan.rope)
        if table is None or table.shape[0] < positions:
            size = min(max(4096, 1 << (positions - 1).bit_length()), self.config.max_position_embeddings)
            c = self.config
            yarn = YarnConfig(c.yarn_factor, c.yarn_beta_fast, c.yarn_beta_slow, c.yarn_original_max_position)
            table = (
                rope_table(size, c.compress_rope_theta, yarn) if plan.rope == "yarn" else rope_table(size, c.rope_theta)
            )
            self._tables[plan.rope] = table
        return table

    # --- stores ------------------------------------------------------------------------------------------------------

    def _window_kv(
        self, hidden: torch.Tensor, weights: LayerWeights, plan: LayerPlan, step: StepMetadata, note: Trace
    ) -> torch.Tensor:
        kv = self._norm("window_kv", self._project(hidden, weights.wkv), weights.kv_norm, note)
        kv = self._rope(kv, step.positions, plan)
        note("window_kv_rope", kv)
        return kv

    def _store_window(
        self,
        hidden: torch.Tensor,
        weights: LayerWeights,
        plan: LayerPlan,
        step: StepMetadata,
        pool: KVPool,
        note: Trace,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Store the step's window records. A prefill also returns what its rows attend to: the history, and the step's
        own cast-back.
        """
        kv = self._window_kv(hidden, weights, plan, step, note)
        ring = pool.window(plan.layer)
        history = current = None
        if step.history_slots is not None:
            history = load_records(ring, step.history_slots, backend=self.backend)
            rows = torch.arange(step.total_rows, dtype=torch.int32, device=hidden.device)
            records = torch.empty(step.total_rows, 1, 1, ring.record_bytes, dtype=torch.uint8, device=hidden.device)
            cast = PagedCache(records, ring.format, 1, e4m3_max=ring.e4m3_max)
            store_records(kv, cast, rows, backend=self.backend)
            current = load_records(cast, rows, backend=self.backend)
        store_records(kv, ring, step.window_store_slots, backend=self.backend)
        return history, current

    def _store_entries(
        self,
        hidden: torch.Tensor,
        weights: LayerWeights,
        plan: LayerPlan,
        step: StepMetadata,
        pool: KVPool,
        note: Trace,
    ) -> None:
        """Pool the groups that close in this step and store them with their index keys, at the same slots."""
        part = step.compressed[plan.ratio]
        wkv = weights.compressor_wkv
        if plan.has_compressor_state:
            latent = self._product(hidden, wkv, torch.float32)
            note("compressor_latent", latent)
            score = self._product(hidden, weights.compressor_wgate, torch.float32)
            note("compressor_score", score)
            pooled = self._pool(score, latent, plan, part, step, pool)
        else:
            pooled = self._product(hidden, wkv)
            note("compressor_latent", pooled)
        normed = self._norm("pooled", pooled, weights.compressor_norm, note)
        entry = self._rope(normed, part.rope_positions, plan)
        note("entry", entry)
        store_records(entry, pool.main(plan.layer), part.store_slots, backend=self.backend)
        step.gathered.pop(plan.layer, None)
        key = self._norm("index_k", self._product(normed, weights.index_wk), weights.index_k_norm, note)
        key = self._rope(key, part.rope_positions, plan)
        note("index_k_rope", key)
        store_records(key, pool.index(plan.layer), part.store_slots, backend=self.backend)

    def _pool(
        self,
        score: torch.Tensor,
        latent: torch.Tensor,
        plan: LayerPlan,
        part: CompressedStep,
        step: StepMetadata,
        pool: KVPool,
    ) -> torch.Tensor:
        state = pool.compressor(plan.layer)
        if step.kind == "prefill":
            return compress(
                score,
                latent,
                state,
                step.sequence_slots,
                step.sequence_lens,
                cu_seqlens_q=step.cu_seqlens,
                num_out=part.store_slots.shape[0],
                backend=self.backend,
            ).rows
        return compress(score, latent, state, step.row_slots, step.context_lens, backend=self.backend).rows

    # --- selection ---------------------------------------------------------------------------------------------------

    def _select(
        self,
        hidden: torch.Tensor,
        q_latent: torch.Tensor,
        weights: LayerWeights,
        plan: LayerPlan,
        step: StepMetadata,
        pool: KVPool,
        note: Trace,
    ) -> None:
        """Choose each row's entries, and at the candidate source its blocks; both are kept in the step for the layers
        behind.
        """
        q = self._project(q_latent, _present(weights.index_wq_b))
        q = q.view(step.total_rows, q.shape[1] // INDEX_HEAD_DIM, INDEX_HEAD_DIM)
        note("index_q", q)
        q = self._rope(q, step.positions, plan)
        note("index_q_rope", q)
        w = self._product(hidden, weights.index_weights)
        note("index_weights", w)
        index = pool.index(_present_layer(plan.kv_source))
        q_fp, q_sf = encode_query(q, index.format, e4m3_max=index.e4m3_max, op="V41Attention")
        if index.format.scale is not None and index.format.scale.name == "float32" and q_sf is not None:
            w, q_sf = w.to(torch.float32) * q_sf, None  # such a cache's queries carry their scale in the weights
        keys = _IndexKeys(step, step.compressed[plan.ratio], index)
        blocks = step.candidates.get(plan.candidate_source) if plan.candidate_source is not None else None
        sharded = self.weights.shard.size > 1 and self.weights.shard.index_heads == "shard"
        if plan.publishes_candidates or sharded:
            self._select_by_logits(q_fp, q_sf, w, keys, blocks, plan, step, sharded)
        else:
            size = self.config.candidate_block_size
            step.lists[plan.layer] = index_topk(
                keys.query(q_fp, q_sf),
                keys.of(slice(0, step.total_rows)),
                w,
                self.config.index_topk,
                candidates=None if blocks is None else Candidates(blocks, size),
                memory_limit=self.memory_limit,
                backend=self.backend,
            )
        if plan.publishes_candidates:
            note("candidates", step.candidates[plan.layer])
        note("entries", step.lists[plan.layer])

    def _select_by_logits(
        self,
        q_fp: torch.Tensor,
        q_sf: torch.Tensor | None,
        w: torch.Tensor,
        keys: _IndexKeys,
        blocks: torch.Tensor | None,
        plan: LayerPlan,
        step: StepMetadata,
        sharded: bool,
    ) -> None:
        """The same through materialised logits, a bounded number of rows at a time: candidate blocks need them, and so
        does a sum over the ranks that hold the index heads.
        """
        c = self.config
        size = c.candidate_block_size
        lens = step.compressed[plan.ratio].lens
        width = max(1, int(lens.max()))
        columns = width if blocks is None else blocks.shape[1] * size
        limit = config_memory_limit() if self.memory_limit is None else self.memory_limit
        chunk = max(8, limit // (8 * columns) // 8 * 8) if step.kind == "prefill" else step.total_rows
        dtype = torch.float32 if sharded else torch.bfloat16
        lists, candidates = [], []
        for start in range(0, step.total_rows, chunk):
            rows = slice(start, min(start + chunk, step.total_rows))
            own = None if blocks is None else blocks[rows]
            logits = index_logits(
                keys.query(q_fp[rows], None if q_sf is None else q_sf[rows]),
                keys.of(rows, width),
                w[rows],
                candidates=None if own is None else Candidates(own, size),
                out_dtype=dtype,
                memory_limit=self.memory_limit,
                backend=self.backend,
            )
            if sharded:
                logits = _present_reduce(self.reduce)(logits).to(torch.bfloat16)
            if plan.publishes_candidates:
                candidates.append(
                    candidate_blocks(
                        logits, lens[rows], block_size=size, topk_blocks=c.candidate_topk_blocks, backend=self.backend
                    )
                )
            if own is None:
                lists.append(topk(logits, c.index_topk, lens[rows], backend=self.backend))
            else:
                end = candidate_lengths(own, lens[rows], size)
                lists.append(compact_to_dense(topk(logits, c.index_topk, end, backend=self.backend), own, size))
        step.lists[plan.layer] = torch.cat(lists)
        if plan.publishes_candidates:
            step.candidates[plan.layer] = torch.cat(candidates)

    # --- attention ---------------------------------------------------------------------------------------------------

    def _attend_caches(
        self,
        q: torch.Tensor,
        weights: LayerWeights,
        plan: LayerPlan,
        step: StepMetadata,
        pool: KVPool,
        note: Trace,
    ) -> torch.Tensor:
        """Decode and draft: window ring and compressed cache, by slot."""
        scopes = [KVScope(pool.window(plan.layer), step.window_index[:, None])]
        if plan.ratio:
            slots = step.slots_of(step.lists[_present_layer(plan.index_source)], plan.ratio)
            scopes.append(KVScope(pool.main(_present_layer(plan.kv_source)), slots[:, None]))
        result = sparse_decode(
            q[:, None], scopes, attn_sink=weights.attn_sink, memory_limit=self.memory_limit, backend=self.backend
        )
        return result.out[:, 0]

    def _attend_gathered(
        self,
        q: torch.Tensor,
        history: torch.Tensor | None,
        current: torch.Tensor | None,
        weights: LayerWeights,
        plan: LayerPlan,
        step: StepMetadata,
        pool: KVPool,
        note: Trace,
    ) -> torch.Tensor:
        """Prefill: one buffer of bfloat16 rows, window part first, then the entries of every sequence."""
        if history is None or current is None:
            raise StateError("V41Attention: a prefill step must carry its history, got a step made by hand.")
        parts, indices = [history, current], step.window_index
        if plan.ratio:
            source = _present_layer(plan.kv_source)
            part = step.compressed[plan.ratio]
            if part.gather_slots is None or part.gather_starts is None:
                raise StateError("V41Attention: a prefill step must carry its gather lists, got a step made by hand.")
            # the layers that read a source share one decoded copy, and only the last is kept
            if source not in step.gathered:
                step.gathered.clear()
                step.gathered[source] = load_records(pool.main(source), part.gather_slots, backend=self.backend)
            parts.append(step.gathered[source])
            entries = step.lists[_present_layer(plan.index_source)]
            placed = entries + (part.gather_starts + step.buffer_tokens)[:, None]
            indices = torch.cat((indices, torch.where(entries >= 0, placed, -1)), dim=1)
        return sparse_prefill(
            q,
            torch.cat(parts)[:, None],
            indices[:, None],
            attn_sink=weights.attn_sink,
            memory_limit=self.memory_limit,
            backend=self.backend,
        ).out

    def _output(self, out: torch.Tensor, weights: LayerWeights, note: Trace) -> torch.Tensor:
        """Grouped projection of the heads, then the one to the hidden size; summed over ranks if there are any."""
        rank = self.config.o_lora_rank
        groups = weights.wo_a.shape[0] // rank
        parts = out.reshape(out.shape[0], groups, weights.wo_a.shape[1])
        wo_a = weights.wo_a.view(groups, rank, -1)
        grouped = torch.cat([self._project(parts[:, g], wo_a[g]) for g in range(groups)], dim=1)
        note("o_group", grouped)
        result = self._project(grouped, weights.wo_b)
        if self.weights.shard.size > 1:
            result = _present_reduce(self.reduce)(result)
        note("out", result)
        return result


class _IndexKeys:
    """Index keys of a step for any range of its rows: pages for decode, one gathered array for prefill."""

    def __init__(self, step: StepMetadata, part: CompressedStep, cache: PagedCache) -> None:
        self.step, self.part, self.cache = step, part, cache
        self.ragged = step.kind == "prefill"
        if self.ragged and part.gather_slots is not None:
            data, scales = split_record(gather_records(cache, part.gather_slots), cache.format)
            self.data = data.contiguous()
            self.sf = scales.contiguous()
            if cache.format.scale is not None and cache.format.scale.name == "float32":
                self.sf = self.sf.view(torch.float32)[:, 0]
        # Rows of one sequence share a row of the block table, which lets a backend decode their keys once.
        counts = set(step.num_rows)
        self.per_table = counts.pop() if len(counts) == 1 else 1

    def query(self, q_fp: torch.Tensor, q_sf: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.ragged:
            return q_fp, q_sf
        shape = (q_fp.shape[0] // self.per_table, self.per_table)
        return q_fp.reshape(*shape, *q_fp.shape[1:]), None if q_sf is None else q_sf.reshape(*shape, *q_sf.shape[1:])

    def of(self, rows: slice, width: int | None = None) -> PagedKeys | RaggedKeys:
        lens = self.part.lens[rows]
        if self.ragged and self.part.gather_starts is not None:
            starts = self.part.gather_starts[rows]
            return RaggedKeys(self.data, self.sf, starts, starts + lens, width)
        table = self.step.block_table if self.per_table > 1 else self.step.row_block_tables
        return PagedKeys(self.cache, table, lens.reshape(-1, self.per_table), width)


def _no_trace(name: str, value: torch.Tensor) -> None:
    return None


def _present(value: torch.Tensor | None) -> torch.Tensor:
    if value is None:
        raise StateError(
            "V41Attention: the layer's weights must hold what its kind needs, got weights of another kind of layer."
        )
    return value


def _present_layer(value: int | None) -> int:
    if value is None:
        raise StateError("V41Attention: a layer with a ratio must have its sources, got a plan without them.")
    return value


def _present_reduce(value: Reduce | None) -> Reduce:
    if value is None:
        raise StateError("V41Attention: reduce must be given for a shard, got None.")
    return value
