# SPDX-License-Identifier: Apache-2.0
"""The attention's part of a DeepSeek-V4.1 model configuration, from a Hugging Face `config.json` or a preset.

Only what decides the attention is kept; experts, vision and embedding keys are ignored. A value this layer does not
implement is refused with the key's name, never replaced by a default: a checkpoint that needs another number would
otherwise run and answer wrongly. What surprised us: `compress_ratios` covers the draft layers too (40 + 3 entries),
`kv_lora_rank` is the part without rope, and `rms_norm_eps` is 1e-20, far below float32's useful range, which is what
keeps rows of zeros finite.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, FormatError

__all__ = ["BLOCK_TOKENS", "HEAD_DIM", "INDEX_HEAD_DIM", "ROPE_DIM", "V41Config"]

HEAD_DIM = 512  # 448 without rope, then 64 with it; the record formats and every kernel are built for it
ROPE_DIM = 64
INDEX_HEAD_DIM = 128
BLOCK_TOKENS = 128  # tokens of one physical cache block; a compressed page then holds BLOCK_TOKENS // ratio entries
RATIOS = (0, 1, 2, 4, 8, 16)  # divisors of BLOCK_TOKENS whose page still holds a candidate block
WEIGHT_BLOCK = 32  # rows and columns that share one ue8m0 scale factor in an FP8 checkpoint
MAX_FILE_BYTES = 1 << 20
MODEL_TYPES = ("deepseek_v41", "deepseek_v41_text")


@dataclass(frozen=True, kw_only=True)
class V41Config:
    """Sizes, sources and rope constants of the attention of all layers, main layers first, then the draft layers."""

    hidden_size: int
    num_hidden_layers: int
    num_draft_layers: int
    num_attention_heads: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    rms_norm_eps: float
    index_n_heads: int
    index_topk: int
    compress_ratios: tuple[int, ...]  # one per layer, drafts included
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    candidate_source_layer_id: int | None
    candidate_topk_blocks: int
    candidate_block_size: int
    rope_theta: float
    compress_rope_theta: float
    yarn_factor: float
    yarn_beta_fast: float
    yarn_beta_slow: float
    yarn_original_max_position: int
    max_position_embeddings: int
    draft_block_size: int
    draft_target_layer_ids: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        return self.num_hidden_layers + self.num_draft_layers

    @property
    def heads_per_group(self) -> int:
        return self.num_attention_heads // self.o_groups

    @property
    def group_in(self) -> int:
        """Columns of one o-group's input: its heads side by side."""
        return self.heads_per_group * HEAD_DIM

    def with_max_positions(self, max_positions: int) -> V41Config:
        """The same model with a shorter maximum: rope tables and sequences then need not cover a million tokens."""
        if not 1 <= max_positions <= self.max_position_embeddings:
            raise ArgumentError(
                f"config: max_positions must be 1 to {self.max_position_embeddings} (max_position_embeddings), got "
                f"{max_positions}."
            )
        return replace(self, max_position_embeddings=max_positions)

    @classmethod
    def v41_flash(cls) -> V41Config:
        """DeepSeek-V4.1-Flash: 40 main layers and 3 draft layers."""
        return cls(
            hidden_size=5120,
            num_hidden_layers=40,
            num_draft_layers=3,
            num_attention_heads=64,
            q_lora_rank=1280,
            o_groups=8,
            o_lora_rank=1024,
            sliding_window=128,
            rms_norm_eps=1e-20,
            index_n_heads=32,
            index_topk=512,
            compress_ratios=(0,) * 2 + (2,) * 18 + (1,) * 20 + (0,) * 3,
            kv_source_layer_ids=(2, 8, 14, 20),
            index_source_layer_ids=(2, 8, 14, 20, 24, 28, 32, 36),
            candidate_source_layer_id=20,
            candidate_topk_blocks=2048,
            candidate_block_size=8,
            rope_theta=10000.0,
            compress_rope_theta=160000.0,
            yarn_factor=16.0,
            yarn_beta_fast=32.0,
            yarn_beta_slow=1.0,
            yarn_original_max_position=65536,
            max_position_embeddings=1048576,
            draft_block_size=5,
            draft_target_layer_ids=(37, 38, 39),
        )

    @classmethod
    def tiny(cls) -> V41Config:
        """The same 43 layers with small projections: 2 heads, hidden 128, top-k 64 inside 64 candidate blocks. For
        tests and demos.
        """
        return replace(
            cls.v41_flash(),
            hidden_size=128,
            num_attention_heads=2,
            q_lora_rank=64,
            o_groups=2,
            o_lora_rank=32,
            index_n_heads=4,
            index_topk=64,
            candidate_topk_blocks=64,
            max_position_embeddings=16384,
        )

    @classmethod
    def from_json(cls, path: str | Path) -> V41Config:
        """Read a `config.json`, or the one inside a model folder.

        Raises:
            FormatError: the file is missing, larger than 1 MiB, or no JSON object.
            ArgumentError: a key is missing or has a value this layer does not implement; the message names the key.
        """
        file = Path(path)
        if file.is_dir():
            file = file / "config.json"
        if not file.is_file():
            raise FormatError(
                f"config: {file.name} must be a file, got none of that name; give config.json or its folder."
            )
        try:
            with open(file, "rb") as stream:
                data = stream.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise FormatError(f"config: {file.name} cannot be read: {error.strerror or error}.") from None
        if len(data) > MAX_FILE_BYTES:
            raise FormatError(
                f"config: {file.name} must be at most {MAX_FILE_BYTES} bytes, got more; not a model configuration."
            )
        try:
            parsed = json.loads(data.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise FormatError(f"config: {file.name} must be UTF-8 JSON; {reason}.") from None
        return cls.from_dict(parsed)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> V41Config:
        """Read a parsed `config.json`: the whole file (with `text_config`) or the text part alone."""
        if not isinstance(config, Mapping):
            raise FormatError(f"config: the file must hold a JSON object, got {type(config).__name__}.")
        _check_model_type(config, "")
        text = config.get("text_config", config)
        where = "text_config." if text is not config else ""
        if not isinstance(text, Mapping):
            raise ArgumentError(f"config: text_config must be an object, got {type(text).__name__}.")
        _check_model_type(text, where)
        quantization = config.get("quantization_config", text.get("quantization_config"))
        if quantization is not None:
            _check_quantization(quantization)
        return _read_text(_Keys(text, where))


class _Keys:
    """Typed access to one JSON object; every refusal names the key, with the part of the file it stands in."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def refuse(self, key: str, expected: str, got: object, cause: str = "") -> ArgumentError:
        shown = repr(got)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return ArgumentError(
            f"config: {self.where}{key} must be {expected}, got {shown}{'; ' + cause if cause else ''}."
        )

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key, default)
        if value is None and default is None:
            raise ArgumentError(f"config: {self.where}{key} is missing; a DeepSeek-V4.1 configuration has it.")
        return value

    def integer(self, key: str, low: int, high: int, default: int | None = None, multiple: int = 1) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high or value % multiple:
            step = f" and a multiple of {multiple}" if multiple > 1 else ""
            raise self.refuse(key, f"an integer from {low} to {high}{step}", value)
        return value

    def exactly(self, key: str, wanted: Any, default: Any = None, cause: str = "") -> None:
        value = self.get(key, wanted if default is None else default)
        if type(value) is not type(wanted) or value != wanted:
            raise self.refuse(key, repr(wanted), value, cause)

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        value = self.get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
            raise self.refuse(key, f"a number from {low:g} to {high:g}", value)
        return float(value)

    def integers(
        self, key: str, low: int, high: int, max_length: int, default: list[int] | None = None
    ) -> tuple[int, ...]:
        value = self.get(key, default)
        if not isinstance(value, (list, tuple)) or len(value) > max_length:
            raise self.refuse(key, f"a list of at most {max_length} integers", value)
        for item in value:
            if not isinstance(item, int) or isinstance(item, bool) or not low <= item <= high:
                raise self.refuse(key, f"a list of integers from {low} to {high}", item)
        return tuple(value)


MAX_LAYERS = 1024
# Switches that other members of the family set and this layer does not implement; absent or off is fine.
_OFF = ("attention_bias", "use_qnorm", "use_qk_norm", "attention_dropout", "mlp_bias")


def _read_text(keys: _Keys) -> V41Config:
    for key in _OFF:
        value = keys.values.get(key)
        if value not in (None, False, 0, 0.0):
            raise keys.refuse(key, "absent or false", value, "V4.1's attention has none")
    keys.exactly("head_dim", HEAD_DIM)
    keys.exactly("qk_rope_head_dim", ROPE_DIM)
    keys.exactly("kv_lora_rank", HEAD_DIM - ROPE_DIM, HEAD_DIM - ROPE_DIM)
    keys.exactly("index_head_dim", INDEX_HEAD_DIM)
    keys.exactly("num_key_value_heads", 1, cause="keys and values are one 512-vector per token")
    layers = keys.integer("num_hidden_layers", 1, MAX_LAYERS)
    drafts = keys.integer("num_nextn_predict_layers", 0, 64, 0)
    heads = keys.integer("num_attention_heads", 1, 1024)
    groups = keys.integer("o_groups", 1, heads)
    if heads % groups:
        raise keys.refuse("o_groups", f"a divisor of num_attention_heads ({heads})", groups)
    candidate = keys.values.get("candidate_source_layer_id")
    if candidate is not None and candidate != -1:
        candidate = keys.integer("candidate_source_layer_id", 0, layers - 1)
    else:
        candidate = None
    block_size = keys.integer("candidate_block_size", 1, 64, 8)
    if block_size not in (8, 16):
        raise keys.refuse("candidate_block_size", "8 or 16", block_size)
    yarn = _read_yarn(keys)
    ratios = keys.integers("compress_ratios", 0, BLOCK_TOKENS, 2 * MAX_LAYERS)
    if len(ratios) != layers + drafts:
        raise keys.refuse(
            "compress_ratios",
            f"one ratio for each of {layers} layers and {drafts} draft layers",
            f"{len(ratios)} entries",
        )
    for ratio in ratios:
        if ratio not in RATIOS:
            raise keys.refuse("compress_ratios", f"made of {', '.join(map(str, RATIOS))}", ratio)
    config = V41Config(
        hidden_size=keys.integer("hidden_size", 32, 1 << 16, multiple=WEIGHT_BLOCK),
        num_hidden_layers=layers,
        num_draft_layers=drafts,
        num_attention_heads=heads,
        q_lora_rank=keys.integer("q_lora_rank", 32, 1 << 16, multiple=WEIGHT_BLOCK),
        o_groups=groups,
        o_lora_rank=keys.integer("o_lora_rank", 32, 1 << 16, multiple=WEIGHT_BLOCK),
        sliding_window=keys.integer("sliding_window", 1, 1 << 16),
        rms_norm_eps=keys.number("rms_norm_eps", 0.0, 1.0),
        index_n_heads=keys.integer("index_n_heads", 1, 128),
        index_topk=keys.integer("index_topk", 1, 4096),
        compress_ratios=ratios,
        kv_source_layer_ids=keys.integers("kv_source_layer_ids", 0, layers - 1, MAX_LAYERS),
        index_source_layer_ids=keys.integers("index_source_layer_ids", 0, layers - 1, MAX_LAYERS),
        candidate_source_layer_id=candidate,
        candidate_topk_blocks=keys.integer("candidate_topk_blocks", 1, 1 << 20, None if candidate is not None else 1),
        candidate_block_size=block_size,
        rope_theta=keys.number("rope_theta", 1.0, 1e12),
        compress_rope_theta=keys.number("compress_rope_theta", 1.0, 1e12),
        yarn_factor=yarn[0],
        yarn_beta_fast=yarn[1],
        yarn_beta_slow=yarn[2],
        yarn_original_max_position=int(yarn[3]),
        max_position_embeddings=keys.integer("max_position_embeddings", 1, 1 << 24),
        draft_block_size=keys.integer("dspark_block_size", 1, 64, 5),
        draft_target_layer_ids=keys.integers(
            "dspark_target_layer_ids", 0, layers - 1, MAX_LAYERS, list(range(max(0, layers - 3), layers))
        ),
    )
    from .topology import (
        LayerTopology,
    )  # the sharing rules live there; a configuration that breaks them is refused here

    LayerTopology(config, where=keys.where)
    return config


def _read_yarn(keys: _Keys) -> tuple[float, float, float, float]:
    scaling = keys.get("rope_scaling")
    if not isinstance(scaling, Mapping):
        raise keys.refuse("rope_scaling", "an object with rope_type yarn", scaling)
    inner = _Keys(scaling, keys.where + "rope_scaling.")
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind != "yarn":
        raise inner.refuse("rope_type", "'yarn'", kind)
    for key in ("mscale", "mscale_all_dim", "attention_factor"):
        value = scaling.get(key)
        if value is not None and value not in (1, 1.0):
            raise inner.refuse(key, "absent or 1.0", value, "V4.1 has no attention-scale correction")
    fast = inner.number("beta_fast", 1e-6, 1e6)
    slow = inner.number("beta_slow", 1e-6, fast)
    return (
        inner.number("factor", 1.0, 1e6),
        fast,
        slow,
        float(inner.integer("original_max_position_embeddings", 1, 1 << 24)),
    )


def _check_model_type(config: Mapping[str, Any], where: str) -> None:
    kind = config.get("model_type")
    if kind is not None and kind not in MODEL_TYPES:
        raise _Keys(config, where).refuse("model_type", f"one of {', '.join(MODEL_TYPES)}", kind)


def _check_quantization(quantization: Any) -> None:
    if not isinstance(quantization, Mapping):
        raise ArgumentError(f"config: quantization_config must be an object, got {type(quantization).__name__}.")
    keys = _Keys(quantization, "quantization_config.")
    keys.exactly("quant_method", "fp8")
    if quantization.get("fmt") not in (None, "e4m3"):
        raise keys.refuse("fmt", "'e4m3'", quantization.get("fmt"))
    if quantization.get("scale_fmt") not in (None, "ue8m0"):
        raise keys.refuse("scale_fmt", "'ue8m0'", quantization.get("scale_fmt"))
    block = quantization.get("weight_block_size")
    if block is not None and block != [WEIGHT_BLOCK, WEIGHT_BLOCK]:
        raise keys.refuse("weight_block_size", f"[{WEIGHT_BLOCK}, {WEIGHT_BLOCK}]", block)
