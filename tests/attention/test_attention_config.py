# SPDX-License-Identifier: Apache-2.0
"""Reading a model configuration: the preset equals the published file, and everything unsupported is refused by its
key.
"""

import copy
import json
import os
import time

import pytest

from sparse_mla.attention.config import V41Config
from sparse_mla.attention.topology import LayerTopology
from sparse_mla.errors import ArgumentError, FormatError, SlotRangeError

# The attention's part of the published config.json of DeepSeek-V4.1-Flash, with keys of other parts between.
FLASH = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "image_token_id": 129264,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [32, 32],
        "activation_scheme": "dynamic",
    },
    "text_config": {
        "model_type": "deepseek_v41_text",
        "vocab_size": 129280,
        "hidden_size": 5120,
        "moe_intermediate_size": 2304,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1280,
        "o_lora_rank": 1024,
        "o_groups": 8,
        "rms_norm_eps": 1e-20,
        "max_position_embeddings": 1048576,
        "rope_theta": 10000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "sliding_window": 128,
        "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3,
        "compress_rope_theta": 160000,
        "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 512,
        "candidate_source_layer_id": 20,
        "candidate_topk_blocks": 2048,
        "candidate_block_size": 8,
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_target_layer_ids": [37, 38, 39],
    },
}


def changed(key, value):
    config = copy.deepcopy(FLASH)
    where = config
    *path, last = key.split(".")
    for part in path:
        where = where[part]
    if value is KeyError:
        del where[last]
    else:
        where[last] = value
    return config


def test_the_published_file_gives_the_preset(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(FLASH))
    assert V41Config.from_json(tmp_path) == V41Config.v41_flash()
    assert V41Config.from_json(tmp_path / "config.json") == V41Config.v41_flash()
    assert V41Config.from_dict(FLASH["text_config"]) == V41Config.v41_flash()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "deepseek_v3"),
        ("text_config.model_type", "deepseek_v4"),
        ("text_config.head_dim", 576),
        ("text_config.head_dim", 512.0),
        ("text_config.qk_rope_head_dim", 32),
        ("text_config.index_head_dim", 64),
        ("text_config.num_key_value_heads", 8),
        ("text_config.kv_lora_rank", 512),
        ("text_config.hidden_size", KeyError),
        ("text_config.hidden_size", 5121),
        ("text_config.hidden_size", True),
        ("text_config.hidden_size", "5120"),
        ("text_config.hidden_size", None),
        ("text_config.num_hidden_layers", 0),
        ("text_config.num_hidden_layers", 10**9),
        ("text_config.o_groups", 7),
        ("text_config.o_lora_rank", 1000),
        ("text_config.q_lora_rank", -32),
        ("text_config.rms_norm_eps", -1.0),
        ("text_config.rms_norm_eps", float("nan")),
        ("text_config.max_position_embeddings", 1 << 40),
        ("text_config.rope_theta", 0),
        ("text_config.compress_rope_theta", "x"),
        ("text_config.rope_scaling", KeyError),
        ("text_config.rope_scaling", []),
        ("text_config.rope_scaling.rope_type", "linear"),
        ("text_config.rope_scaling.factor", 0.5),
        ("text_config.rope_scaling.beta_slow", 64),
        ("text_config.rope_scaling.mscale", 0.707),
        ("text_config.rope_scaling.original_max_position_embeddings", 0),
        ("text_config.compress_ratios", [0] * 40),
        ("text_config.compress_ratios", [0] * 2 + [3] * 18 + [1] * 20 + [0] * 3),
        ("text_config.compress_ratios", [0] * 2 + [2] * 18 + [1] * 20 + [0, 0, 1]),
        ("text_config.compress_ratios", [0] * 2 + [2] * 5 + [1] + [2] * 12 + [1] * 20 + [0] * 3),
        ("text_config.compress_ratios", "0" * 43),
        ("text_config.kv_source_layer_ids", [3, 8, 14, 20]),
        ("text_config.kv_source_layer_ids", [8, 2, 14, 20]),
        ("text_config.kv_source_layer_ids", [2, 2, 14, 20]),
        ("text_config.kv_source_layer_ids", [0, 2, 8, 14, 20]),
        ("text_config.kv_source_layer_ids", [2, 8, 14, 40]),
        ("text_config.index_source_layer_ids", [2, 8, 20, 24]),
        ("text_config.candidate_source_layer_id", 21),
        ("text_config.candidate_source_layer_id", 14),
        ("text_config.candidate_source_layer_id", 2.0),
        ("text_config.candidate_block_size", 12),
        ("text_config.candidate_topk_blocks", 0),
        ("text_config.index_topk", 0),
        ("text_config.index_n_heads", 129),
        ("text_config.sliding_window", 0),
        ("text_config.dspark_target_layer_ids", [37, 40]),
        ("text_config.attention_bias", True),
        ("text_config.use_qnorm", True),
        ("quantization_config.quant_method", "awq"),
        ("quantization_config.weight_block_size", [128, 128]),
        ("quantization_config.scale_fmt", "float"),
        ("quantization_config", "fp8"),
        ("text_config", 5),
    ],
)
def test_an_unsupported_value_is_refused_by_the_name_of_its_key(key, value):
    with pytest.raises(ArgumentError) as caught:
        V41Config.from_dict(changed(key, value))
    # a wrong source may be reported under the key it contradicts; everything else under its own, with the part of the
    # file
    related = {
        "text_config.kv_source_layer_ids": ("kv_source_layer_ids", "index_source_layer_ids"),
        "text_config.compress_ratios": ("compress_ratios", "kv_source_layer_ids"),
    }
    assert any(name in str(caught.value) for name in related.get(key, (key,)))
    assert str(caught.value).count("\n") == 0


def test_a_candidate_block_must_not_cross_pages():
    config = changed("text_config.compress_ratios", [0] * 2 + [2] * 18 + [16] * 20 + [0] * 3)
    assert V41Config.from_dict(config).candidate_block_size == 8
    config["text_config"]["candidate_block_size"] = 16
    with pytest.raises(ArgumentError, match="candidate_block_size"):
        V41Config.from_dict(config)


def test_a_model_without_candidates_or_drafts_is_ordinary():
    config = copy.deepcopy(FLASH["text_config"])
    config["candidate_source_layer_id"] = -1
    del config["candidate_topk_blocks"], config["num_nextn_predict_layers"], config["dspark_target_layer_ids"]
    config["compress_ratios"] = config["compress_ratios"][:40]
    read = V41Config.from_dict(config)
    assert read.candidate_source_layer_id is None
    assert read.num_layers == 40
    assert all(plan.candidate_source is None for plan in LayerTopology(read).layers)


NOT_CONFIGURATIONS = {
    "empty": "",
    "list": "[1]",
    "null": "null",
    "string": '"x"',
    "open": "{",
    "not-utf8": "\xff",
    "deep-list": "[" * 100000,
    "deep-object": '{"a":' * 100000,
    "long-number": "1" * 10000,
    "long-integer": '{"hidden_size": ' + "9" * 5000 + "}",
}


@pytest.mark.parametrize("text", NOT_CONFIGURATIONS.values(), ids=NOT_CONFIGURATIONS.keys())
def test_a_file_that_is_no_configuration_is_an_error_in_bounded_time(tmp_path, text):
    file = tmp_path / "config.json"
    file.write_bytes(text.encode("latin-1"))
    started = time.monotonic()
    with pytest.raises((FormatError, ArgumentError)):
        V41Config.from_json(file)
    assert time.monotonic() - started < 2.0


def test_a_huge_file_is_refused_unread(tmp_path):
    file = tmp_path / "config.json"
    with open(file, "wb") as stream:
        stream.truncate(8 << 30)  # sparse
    started = time.monotonic()
    with pytest.raises(FormatError, match="1048576 bytes"):
        V41Config.from_json(file)
    assert time.monotonic() - started < 2.0


def test_a_missing_file_and_a_pipe_are_errors(tmp_path):
    with pytest.raises(FormatError, match=r"config\.json"):
        V41Config.from_json(tmp_path)
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(FormatError, match="must be a file"):  # reading it would wait forever
        V41Config.from_json(tmp_path)


def test_the_maximum_may_only_shrink():
    config = V41Config.tiny().with_max_positions(512)
    assert config.max_position_embeddings == 512
    for bad in (0, 1 << 30):
        with pytest.raises((ArgumentError, SlotRangeError)):
            config.with_max_positions(bad)


def test_the_topology_of_the_flash_model():
    topology = LayerTopology(V41Config.v41_flash())
    kinds = {
        kind: [p.layer for p in topology.layers if p.kind == kind] for kind in ("window", "source", "index", "draft")
    }
    assert kinds == {"window": [0, 1], "source": [2, 8, 14, 20], "index": [24, 28, 32, 36], "draft": [40, 41, 42]}
    assert [topology[n].kv_source for n in (2, 7, 8, 13, 14, 19, 20, 24, 39)] == [2, 2, 8, 8, 14, 14, 20, 20, 20]
    assert [topology[n].index_source for n in (2, 7, 19, 20, 23, 24, 27, 39)] == [2, 2, 14, 20, 20, 24, 24, 36]
    assert [topology[n].candidate_source for n in (14, 20, 21, 24, 36)] == [None, None, None, 20, 20]
    assert [p.layer for p in topology.layers if p.publishes_candidates] == [20]
    assert [p.layer for p in topology.layers if p.has_compressor_state] == [2, 8, 14]
    assert {p.rope for p in topology.layers if p.ratio} == {"yarn"}
    assert {p.rope for p in topology.layers if not p.ratio} == {"plain"}
    assert topology.one_of_each_kind() == (0, 2, 3, 20, 21, 24, 40)
    assert topology.closure([39]) == (20, 36, 39)
    with pytest.raises(ArgumentError, match="0 to 42"):
        topology[43]


def test_the_tiny_preset_has_the_same_topology():
    tiny, flash = LayerTopology(V41Config.tiny()), LayerTopology(V41Config.v41_flash())
    assert tiny.layers == flash.layers
