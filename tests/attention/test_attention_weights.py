# SPDX-License-Identifier: Apache-2.0
"""Weights: a checkpoint's bytes decode exactly, ranks cut what they own, and a broken file is one clear error."""

import functools
import json
import struct
import time
from dataclasses import fields

import pytest
import torch
from safetensors.torch import save_file

from sparse_mla.attention.config import V41Config
from sparse_mla.attention.topology import LayerTopology
from sparse_mla.attention.weights import (
    TENSORS,
    AttentionWeights,
    LayerWeights,
    Shard,
    decode_fp8_weight,
    encode_fp8_weight,
    layer_prefix,
)
from sparse_mla.errors import ArgumentError, FormatError, NonFiniteError, ShapeError

TINY = V41Config.tiny()
LAYERS = (0, 2, 3, 20, 24, 40)


def checkpoint(layers=LAYERS):
    """A release's tensors of some layers: FP8 with ue8m0 blocks, norms in bfloat16, the sink in float32."""
    return dict(_tensors(tuple(layers)))


@functools.cache
def _tensors(layers):
    weights, tensors = AttentionWeights.random(TINY, seed=0), {}
    topology = LayerTopology(TINY)
    for layer in layers:
        held = weights.layer(layer)
        for spec in TENSORS:
            if not spec.needed(topology[layer]):
                continue
            name, value = layer_prefix(TINY, layer) + spec.name, getattr(held, spec.field)
            if spec.kind == "fp8":
                codes, scale = encode_fp8_weight(value)
                tensors[name] = codes
                tensors[layer_prefix(TINY, layer) + spec.scale_name] = scale.view(torch.float8_e8m0fnu)
            elif spec.kind == "float32" and spec.field != "attn_sink":
                tensors[name] = value.to(torch.bfloat16)
            else:
                tensors[name] = value
    return tensors


def assert_layers_equal(a: LayerWeights, b: LayerWeights):
    for f in fields(LayerWeights):
        left, right = getattr(a, f.name), getattr(b, f.name)
        assert (left is None) == (right is None), f.name
        if left is not None:
            assert left.dtype == right.dtype, f.name
            expected = right.to(torch.bfloat16).float() if f.name.endswith("norm") else right
            assert torch.equal(left, expected), f.name


def test_a_file_gives_back_the_drawn_weights(tmp_path):
    save_file(checkpoint(), tmp_path / "model.safetensors")
    drawn = AttentionWeights.random(TINY)
    for path in (tmp_path, tmp_path / "model.safetensors"):
        read = AttentionWeights.from_safetensors(path, TINY, layers=LAYERS)
        assert read.nbytes == 0  # nothing is read before it is used
        for layer in LAYERS:
            assert_layers_equal(read.layer(layer), drawn.layer(layer))


def test_an_indexed_folder_of_shards_is_read(tmp_path):
    tensors = checkpoint()
    names, weight_map = sorted(tensors), {}
    for number in range(3):
        part = {name: tensors[name] for name in names[number::3]}  # a weight and its scale factors may be in two files
        save_file(part, tmp_path / f"model-{number}.safetensors")
        weight_map |= dict.fromkeys(part, f"model-{number}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    read = AttentionWeights.from_safetensors(tmp_path, TINY, layers=LAYERS)
    for layer in LAYERS:
        assert_layers_equal(read.layer(layer), AttentionWeights.random(TINY).layer(layer))


def test_loading_all_and_dropping_one(tmp_path, capsys):
    weights = AttentionWeights.random(TINY).load([0, 2], progress=True)
    held = weights.nbytes
    assert held == weights.layer(0).nbytes + weights.layer(2).nbytes
    weights.drop(2)
    assert weights.nbytes == weights.layer(0).nbytes
    assert capsys.readouterr().out == ""  # the bar is on standard error


def test_a_block_decodes_to_the_exact_product():
    """Every e4m3 code under a spread of scale bytes, against ml_dtypes."""
    import ml_dtypes
    import numpy as np

    codes = torch.arange(256, dtype=torch.uint8).repeat(32, 1)  # [32, 256]
    for byte in (1, 9, 100, 126, 127, 128, 200, 230):
        scale = torch.full((1, 8), byte, dtype=torch.uint8)
        found = decode_fp8_weight(codes.view(torch.float8_e4m3fn), scale)
        exact = codes.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64) * 2.0 ** (byte - 127)
        expected = torch.from_numpy(exact).to(torch.float32).to(torch.bfloat16)
        finite = ~expected.isnan()
        normal = finite & ((expected.abs() >= 2.0**-126) | (expected == 0))
        assert torch.equal(found[normal], expected[normal])
        assert bool(found[~finite].isnan().all())
    assert bool(
        decode_fp8_weight(codes.view(torch.float8_e4m3fn), torch.full((1, 8), 255, dtype=torch.uint8)).isnan().all()
    )


def test_encoding_uses_the_smallest_power_of_two_and_is_idempotent():
    values = torch.randn(64, 96, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    values[:32, :32] = 0
    values[32, 32], values[33:64, 32:64] = 448.0, 1.0
    codes, scale = encode_fp8_weight(values)
    assert int(scale[1, 1]) == 127  # 448 fits with scale 1
    decoded = decode_fp8_weight(codes, scale)
    blocks = values.float().reshape(2, 32, 3, 32).abs().amax(dim=(1, 3))
    unit = torch.exp2(scale.float() - 127)
    assert bool((blocks <= 448 * unit).all())
    assert bool((blocks[blocks > 0] > 224 * unit[blocks > 0]).all())
    assert torch.equal(decode_fp8_weight(*encode_fp8_weight(decoded)), decoded)


# --- tensor parallelism ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "heads", "groups", "columns"), [(1, 64, 8, 4096), (8, 8, 1, 4096), (64, 1, 1, 512)])
def test_a_rank_of_the_flash_model_owns_the_documented_shapes(size, heads, groups, columns):
    config = V41Config.v41_flash()
    covered = set()
    for rank in range(size):
        shard = Shard(rank, size)
        shard.check(config)
        head = shard.heads(config)
        assert head.stop - head.start == heads
        group = shard.groups(config)
        assert group.stop - group.start == groups
        part = shard.group_columns(config)
        assert part.stop - part.start == columns
        # the columns of a rank's groups are its own heads
        first = group.start * config.heads_per_group + part.start // 512
        assert (first, first + heads) == (head.start, head.stop)
        covered |= set(range(head.start, head.stop))
        assert shard.index(config) == slice(0, 32)
    assert covered == set(range(64))
    if size == 8:
        assert [Shard(r, 8, "shard").index(config) for r in (0, 7)] == [slice(0, 4), slice(28, 32)]


@pytest.mark.parametrize(
    ("shard", "text"),
    [
        (Shard(0, 3), "heads"),
        (Shard(2, 2), "rank"),
        (Shard(-1, 2), "rank"),
        (Shard(0, 0), "rank"),
        (Shard(0, 64, "shard"), "index heads"),
        (Shard(0, 1, "split"), "index_heads"),
    ],
)
def test_an_impossible_split_is_refused(shard, text):
    with pytest.raises(ArgumentError, match=text):
        shard.check(V41Config.v41_flash())


@pytest.mark.parametrize("size", [2, 4, 8])
def test_ranks_read_the_parts_that_make_up_the_whole(tmp_path, size):
    from dataclasses import replace

    config = replace(TINY, num_attention_heads=8, o_groups=4, index_n_heads=8)
    whole = AttentionWeights.random(config, seed=5).layer(2)
    ranks = [AttentionWeights.random(config, seed=5, shard=Shard(r, size, "shard")).layer(2) for r in range(size)]
    assert torch.equal(torch.cat([w.wq_b for w in ranks]), whole.wq_b)
    assert torch.equal(torch.cat([w.attn_sink for w in ranks]), whole.attn_sink)
    assert torch.equal(torch.cat([w.index_wq_b for w in ranks]), whole.index_wq_b)
    assert torch.equal(torch.cat([w.index_weights for w in ranks]), whole.index_weights)
    assert all(torch.equal(w.wkv, whole.wkv) for w in ranks)
    per_group = max(1, size // 4)
    groups = [ranks[i : i + per_group] for i in range(0, size, per_group)]
    rows = torch.cat([torch.cat([w.wo_a for w in group], dim=1) for group in groups])
    assert torch.equal(rows, whole.wo_a)
    assert torch.equal(torch.cat([group[0].wo_b for group in groups], dim=1), whole.wo_b)


def test_ranks_read_their_part_of_a_file(tmp_path):
    save_file(checkpoint(), tmp_path / "model.safetensors")
    for rank in range(2):
        shard = Shard(rank, 2, "shard")
        read = AttentionWeights.from_safetensors(tmp_path, TINY, shard=shard, layers=LAYERS)
        drawn = AttentionWeights.random(TINY, shard=shard)
        for layer in LAYERS:
            assert_layers_equal(read.layer(layer), drawn.layer(layer))


# --- bad files -------------------------------------------------------------------------------------------------------


def opened(path, layers=LAYERS):
    return AttentionWeights.from_safetensors(path, TINY, layers=layers)


def test_a_missing_tensor_is_named(tmp_path):
    for missing in (
        "layers.2.attn.compressor.wgate.weight",
        "layers.24.attn.indexer.wq_b.scale",
        "mtp.0.attn.attn_sink",
    ):
        tensors = checkpoint()
        del tensors[missing]
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ShapeError, match=missing.replace(".", r"\.")):
            opened(tmp_path)


def test_a_layer_outside_the_file_is_named_when_it_is_asked_for(tmp_path):
    save_file(checkpoint([0]), tmp_path / "model.safetensors")
    weights = opened(tmp_path, [0])
    with pytest.raises(ShapeError, match=r"layers\.1\."):
        weights.layer(1)


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("layers.0.attn.wq_b.weight", lambda t: t[:-32].contiguous(), ShapeError),
        ("layers.0.attn.wq_b.scale", lambda t: t[:, :-1].contiguous(), ShapeError),
        ("layers.0.attn.attn_sink", lambda t: t[:, None].contiguous(), ShapeError),
        ("layers.0.attn.wkv.weight", lambda t: t.view(torch.uint8), FormatError),
        ("layers.0.attn.wkv.scale", lambda t: t.float(), FormatError),
        ("layers.0.attn.kv_norm.weight", lambda t: t.to(torch.float64), FormatError),
        ("layers.2.attn.indexer.wk.weight", lambda t: t.to(torch.float16), FormatError),
    ],
)
def test_a_misshapen_or_mistyped_tensor_is_named(tmp_path, name, change, error):
    tensors = checkpoint()
    tensors[name] = change(tensors[name])
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(error, match=name.replace(".", r"\.")):
        opened(tmp_path)


@pytest.mark.parametrize(
    "name", ["layers.0.attn.wkv.weight", "layers.0.attn.wkv.scale", "layers.0.attn.kv_norm.weight"]
)
def test_nan_in_a_weight_is_named_when_its_layer_is_read(tmp_path, name):
    tensors = checkpoint()
    damaged = tensors[name].clone()
    damaged.view(torch.uint8).fill_(0xFF)
    tensors[name] = damaged
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(NonFiniteError, match=r"layers\.0\.attn\.(wkv|kv_norm)\.weight"):
        opened(tmp_path).layer(0)


def test_a_truncated_file_is_an_error_at_every_length(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file(checkpoint([0]), file)
    data = file.read_bytes()
    header = struct.unpack("<Q", data[:8])[0]
    for length in (0, 1, 7, 8, 9, 8 + header // 2, 8 + header, 8 + header + 1, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:length])
        with pytest.raises(FormatError, match=r"model\.safetensors"):
            opened(tmp_path, [0])


HOSTILE_HEADERS = {
    "not json": b"hello world, this is no header",
    "list": b"[]",
    "deep": b'{"a":' * 20000 + b"1" + b"}" * 20000,
    "negative offsets": b'{"layers.0.attn.attn_sink":{"dtype":"F32","shape":[2],"data_offsets":[-8,0]}}',
    "beyond the file": b'{"x":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4398046511104]}}',
    "shape and bytes differ": b'{"layers.0.attn.attn_sink":{"dtype":"F32","shape":[1000000],"data_offsets":[0,8]}}',
    "overflowing shape": b'{"x":{"dtype":"F32","shape":[4294967296,4294967296,4294967296],"data_offsets":[0,8]}}',
    "reversed offsets": b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}',
    "unknown dtype": b'{"x":{"dtype":"PICKLE","shape":[2],"data_offsets":[0,8]}}',
}


@pytest.mark.parametrize("header", HOSTILE_HEADERS.values(), ids=HOSTILE_HEADERS.keys())
def test_a_hostile_header_is_an_error_in_bounded_time(tmp_path, header):
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    started = time.monotonic()
    with pytest.raises(FormatError, match=r"model\.safetensors"):
        opened(tmp_path, [0])
    assert time.monotonic() - started < 2.0


def test_a_header_length_beyond_reason_is_refused_unread(tmp_path):
    file = tmp_path / "model.safetensors"
    with open(file, "wb") as stream:
        stream.write(struct.pack("<Q", 3 << 30))
        stream.truncate(4 << 30)  # sparse
    with pytest.raises(FormatError, match="header of at most"):
        opened(tmp_path, [0])


def test_a_pickle_is_not_read(tmp_path):
    torch.save({"layers.0.attn.attn_sink": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(FormatError):
        opened(tmp_path, [0])
    with pytest.raises(FormatError, match="no regular file"):
        opened(tmp_path / "absent.safetensors", [0])


@pytest.mark.parametrize(
    "index",
    [
        "",
        "[]",
        '{"weight_map": []}',
        '{"weight_map": {"layers.0.attn.attn_sink": 5}}',
        '{"weight_map": {"layers.0.attn.attn_sink": "../model.safetensors"}}',
        '{"weight_map": {"layers.0.attn.attn_sink": "/elsewhere/model.safetensors"}}',
        '{"weight_map": {"layers.0.attn.attn_sink": "model.bin"}}',
        '{"a":' * 50000,
    ],
)
def test_a_hostile_index_is_an_error(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(FormatError, match=r"index\.json"):
        opened(tmp_path, [0])


def test_an_index_that_points_at_a_file_without_the_tensor_is_named(tmp_path):
    save_file({"x": torch.zeros(1)}, tmp_path / "a.safetensors")
    names = dict.fromkeys(checkpoint([0]), "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ShapeError, match=r"layers\.0\.attn_norm\.weight"):
        opened(tmp_path, [0])
    names = dict.fromkeys(names, "absent.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(FormatError, match=r"absent\.safetensors"):
        opened(tmp_path, [0])
