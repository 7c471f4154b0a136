# SPDX-License-Identifier: Apache-2.0
"""What is fuzzed: every function that takes bytes from outside. A target takes any bytes, and either does its work or
raises one of the library's own errors; anything else, and any wrong answer, is a finding.

`tools/fuzz.py` runs the targets under atheris (`make fuzz`); test_fuzz.py runs the stored corpus and mutations of it.
"""

from __future__ import annotations

import json
import math
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from sparse_mla import KVScope, allocate, load_records, sparse_decode, store_records, topk
from sparse_mla.attention.config import V41Config
from sparse_mla.attention.weights import TENSORS, AttentionWeights, layer_prefix
from sparse_mla.caches import PagedCache, gather_records
from sparse_mla.dispatch import presence
from sparse_mla.errors import NonFiniteError, SparseMlaError
from sparse_mla.formats import (
    FORMATS,
    MAIN_FORMATS,
    ON_NONFINITE,
    decode,
    decode_query,
    encode,
)
from sparse_mla.testing.demo import INPUT_NAMES, load_inputs

NATIVE = not presence("native")
NAMES = tuple(FORMATS)
TINY = replace(V41Config.tiny(), hidden_size=32, q_lora_rank=32, o_lora_rank=32, num_attention_heads=2, o_groups=2)


class Bytes:
    """Numbers and tensors taken from the front of some bytes; zeros once they are used up."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, count: int) -> bytes:
        part = self.data[self.at : self.at + count]
        self.at += count
        return part + bytes(count - len(part))

    def below(self, n: int) -> int:
        return int.from_bytes(self.take(2), "little") % n

    def signed(self) -> int:
        """Small numbers mostly, and now and then the largest there are."""
        kind = self.below(8)
        raw = struct.unpack("<q", self.take(8))[0]
        return raw if kind == 7 else raw % 4096 - 64 if kind > 3 else raw % 24

    def tensor(self, *shape: int) -> torch.Tensor:
        """[*shape] uint8."""
        if math.prod(shape) == 0:
            return torch.empty(shape, dtype=torch.uint8)
        return torch.frombuffer(bytearray(self.take(math.prod(shape))), dtype=torch.uint8).reshape(shape)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def records(data: bytes) -> None:
    """Any bytes are records: they decode to no NaN, on every backend to the same bits, and encode again."""
    source = Bytes(data)
    fmt = FORMATS[NAMES[source.below(len(NAMES))]]
    planar = "planar" if source.below(2) else "interleaved"
    cache = allocate(fmt, 2, 3, layout=planar)
    cache.pages()[:] = source.tensor(2, cache.page_bytes)
    slots = torch.arange(6)
    for dtype in (torch.bfloat16, torch.float32):
        values = load_records(cache, slots, out_dtype=dtype, backend="reference")
        # A plain float32 scale, or bfloat16 itself, can be anything; codes under ue8m0 or e4m3 scales never are NaN.
        assert fmt.scale is None or fmt.scale.name == "float32" or not values.isnan().any(), fmt
        if NATIVE:
            assert same(values, load_records(cache, slots, out_dtype=dtype, backend="native")), fmt
        assert same(values, decode(gather_records(cache, slots), fmt, dtype=dtype))
    ideal = decode(gather_records(cache, slots), fmt, nan="ideal", dtype=torch.float64)
    assert ideal.shape == (6, fmt.elements)
    again = encode(values, fmt, on_nonfinite="zero")
    assert again.shape == (6, fmt.record_bytes)


def values(data: bytes) -> None:
    """Any floats: refused as a whole under "raise", else stored; every backend writes the same bytes and no others."""
    source = Bytes(data)
    fmt = FORMATS[NAMES[source.below(len(NAMES))]]
    rule = ON_NONFINITE[source.below(len(ON_NONFINITE))]
    dtype = (torch.bfloat16, torch.float32)[source.below(2)]
    cap = (448, 224)[source.below(2)]
    x = source.tensor(3, fmt.elements * dtype.itemsize).view(dtype)
    slots = torch.tensor([source.below(8) - 1 for _ in range(3)])
    written = []
    for backend in ("reference", "native") if NATIVE else ("reference",):
        cache = allocate(fmt, 2, 4, e4m3_max=cap)
        cache.data.view(torch.uint8).fill_(0xA5)
        before = cache.data.clone()
        try:
            store_records(x, cache, slots, on_nonfinite=rule, backend=backend)
        except NonFiniteError:
            assert rule == "raise" and same(cache.data, before)  # noqa: PT018 - one fact
        written.append(cache.data)
    assert all(same(w, written[0]) for w in written), fmt


def queries(data: bytes) -> None:
    """Index queries in every dtype and scale packing."""
    source = Bytes(data)
    width = (64, 128, 132, 0, 1)[source.below(5)]
    q = source.tensor(2, width)
    q = (q, q.view(torch.int8), q.view(torch.float8_e4m3fn))[source.below(3)]
    scales = source.tensor(2, 4)
    sf = (scales, scales.view(torch.int16), scales.view(torch.int32)[:, 0], scales.view(torch.float32)[:, 0], None)
    try:
        out = decode_query(q, sf[source.below(5)])
    except SparseMlaError:
        return
    assert out.shape == (2, 128)


def geometry(data: bytes) -> None:
    """Any shape, strides and offsets: refused, or every slot's bytes are inside the memory given."""
    source = Bytes(data)
    fmt = FORMATS[NAMES[source.below(len(NAMES))]]
    memory = torch.arange(4096).to(torch.uint8)
    rank = source.below(5)
    shape = [source.below(40) for _ in range(rank)]
    if rank and source.below(2):
        shape[-1] = fmt.record_bytes if source.below(2) else 3 * fmt.record_bytes
    strides = [source.below(900) for _ in range(rank)]
    if rank and source.below(4):
        strides[-1] = 1
    start = source.below(64)
    page = source.signed() if source.below(2) else 1 + source.below(4)
    options = {
        "layout": ("interleaved", "planar", "odd")[source.below(3)],
        "e4m3_max": (448, 224, source.signed())[source.below(3)],
        "region_offset": source.signed() if source.below(2) else 0,
        "block_stride": source.signed() if source.below(2) else None,
    }
    end = start + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
    if end > memory.numel() or (0 in shape and source.below(2)):
        return
    view = memory.as_strided(shape, strides, start)
    try:
        cache = PagedCache(view, fmt, page, **options)
    except SparseMlaError:
        return
    assert cache.num_slots >= 0
    if cache.num_slots == 0 or cache.num_slots > 4096:
        return
    slots = torch.arange(cache.num_slots)
    found = gather_records(cache, slots)
    assert found.shape == (cache.num_slots, fmt.record_bytes)
    again = PagedCache.from_geometry(view, cache.geometry)
    assert same(gather_records(again, slots), found)
    if NATIVE and found.numel():
        native = load_records(cache, slots, out_dtype=torch.float32, backend="native")
        assert same(native, load_records(cache, slots, out_dtype=torch.float32, backend="reference"))


def attention(data: bytes) -> None:
    """Attention over caches of any bytes, with any slots and lengths: refused alike, or finite where keys are."""
    source = Bytes(data)
    fmt = MAIN_FORMATS[source.below(len(MAIN_FORMATS))]
    cache = allocate(fmt, 2, 4, layout=("interleaved", "planar")[source.below(2)])
    cache.pages()[:] = source.tensor(2, cache.page_bytes)
    wild = source.below(4) == 0
    listed = [source.signed() % (1 << 31) if wild else source.below(9) - 1 for _ in range(6)]
    indices = torch.tensor(listed, dtype=torch.int64).to(torch.int32).view(1, 1, 6)
    length = torch.tensor([source.below(9) - (1 if wild else 0)], dtype=torch.int32)
    q = torch.ones(1, 1, 3, 512, dtype=torch.bfloat16)
    outcomes = []
    for backend in ("reference", "native") if NATIVE else ("reference",):
        try:
            found = sparse_decode(q, KVScope(cache, indices, length), out_dtype=torch.float32, backend=backend)
            assert found.out.shape == (1, 1, 3, 512)
            outcomes.append("")
        except SparseMlaError as error:
            outcomes.append(str(error))
    assert len(set(outcomes)) == 1, outcomes


def selections(data: bytes) -> None:
    """Top-k of any float bits: the same list or the same refusal on every backend."""
    source = Bytes(data)
    dtype = (torch.bfloat16, torch.float32)[source.below(2)]
    rules = {"on_nan": ("raise", "last")[source.below(2)], "on_neg_inf": ("skip", "last")[source.below(2)]}
    n, k = 1 + source.below(60), 1 + source.below(70)
    end = torch.tensor([source.below(n + 1), n], dtype=torch.int32)
    logits = source.tensor(2, n * dtype.itemsize).view(dtype)
    outcomes = []
    for backend in ("reference", "native") if NATIVE else ("reference",):
        try:
            outcomes.append(topk(logits, k, end, **rules, backend=backend).tolist())
        except SparseMlaError as error:
            outcomes.append(str(error))
    assert all(outcome == outcomes[0] for outcome in outcomes), outcomes


def _short(error: SparseMlaError) -> None:
    """An error must not carry the whole of a hostile file into a log."""
    if len(str(error)) > 4000:
        raise AssertionError("an error longer than 4,000 characters") from error


def _file(data: bytes, read: Callable[[Path], object]) -> None:
    with tempfile.TemporaryDirectory(prefix="fuzz") as folder:
        path = Path(folder) / "x.safetensors"
        path.write_bytes(data)
        try:
            read(path)
        except SparseMlaError as error:
            _short(error)


def weights(data: bytes) -> None:
    """A checkpoint of any bytes."""
    _file(data, lambda path: AttentionWeights.from_safetensors(path, TINY, layers=[0]).layer(0))


def demo_input(data: bytes) -> None:
    """The demo's input file of any bytes."""
    _file(data, load_inputs)


INTERESTING = (
    *(None, True, False, 0, 1, -1, 2, 7, 64, 1 << 31, 1 << 63, -(1 << 63), 1e308, 0.5),
    *("", "yarn", "x" * 300, [], {}, [0] * 50, [1e9]),
)


def config(data: bytes) -> None:
    """A HF config.json: any bytes as a file, and the published one with some of its values replaced."""
    with tempfile.TemporaryDirectory(prefix="fuzz") as folder:
        path = Path(folder) / "config.json"
        path.write_bytes(data)
        try:
            V41Config.from_json(path)
        except SparseMlaError as error:
            _short(error)
    source, parsed = Bytes(data), json.loads(PUBLISHED)
    for _ in range(1 + source.below(4)):
        here = parsed["text_config"] if source.below(4) else parsed
        if source.below(6) == 0:
            here = parsed["text_config"]["rope_scaling"] if isinstance(parsed.get("text_config"), dict) else parsed
        if not isinstance(here, dict) or not here:
            break
        key = sorted(here)[source.below(len(here))]
        value = here[key]
        if isinstance(value, list) and value and source.below(2):
            here[key] = [*value[: source.below(len(value) + 1)], INTERESTING[source.below(len(INTERESTING))]]
        else:
            here[key] = INTERESTING[source.below(len(INTERESTING))]
        if not isinstance(parsed.get("text_config"), dict) or not isinstance(
            parsed["text_config"].get("rope_scaling"), dict
        ):
            break
    try:
        V41Config.from_dict(parsed)
    except SparseMlaError as error:
        _short(error)


def _published() -> str:
    flash = V41Config.v41_flash()
    text = {
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "kv_lora_rank": 448,
        "index_head_dim": 128,
        "num_key_value_heads": 1,
        "num_nextn_predict_layers": flash.num_draft_layers,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "dspark_block_size": flash.draft_block_size,
    }
    same_name = (
        "hidden_size num_hidden_layers num_attention_heads q_lora_rank o_groups o_lora_rank sliding_window "
        "rms_norm_eps index_n_heads index_topk compress_ratios kv_source_layer_ids index_source_layer_ids "
        "candidate_source_layer_id candidate_topk_blocks candidate_block_size rope_theta "
        "compress_rope_theta max_position_embeddings"
    )
    for name in same_name.split():
        text[name] = getattr(flash, name)
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [32, 32]}
    return json.dumps({"text_config": text, "quantization_config": quantization})


PUBLISHED = _published()

TARGETS: dict[str, Callable[[bytes], None]] = {
    f.__name__: f for f in (records, values, queries, geometry, attention, selections, weights, demo_input, config)
}


# --- seeds -----------------------------------------------------------------------------------------------------------


def _safetensors(tensors: dict[str, tuple[str, list[int], int]]) -> bytes:
    header, at, body = {}, 0, b""
    for name, (dtype, shape, item) in tensors.items():
        count = math.prod(shape) * item
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + count]}
        at += count
        body += bytes(i * 7 % 120 for i in range(count))
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def seeds(name: str) -> Iterator[bytes]:
    """Inputs that reach deep, made here so that the stored corpus need only hold what fuzzing found."""
    if name == "weights":
        tensors: dict[str, tuple[str, list[int], int]] = {}
        for spec in TENSORS:
            if spec.needed(AttentionWeights.random(TINY).topology[0]):
                shape = list(spec.shape(TINY))
                full = layer_prefix(TINY, 0) + spec.name
                if spec.kind == "fp8":
                    tensors[full] = ("F8_E4M3", shape, 1)
                    tensors[layer_prefix(TINY, 0) + spec.scale_name] = ("U8", [-(-n // 32) for n in shape], 1)
                else:
                    tensors[full] = ("BF16", shape, 2)
        whole = _safetensors(tensors)
        yield from (whole, whole[:3000], whole[:9])
    elif name == "demo_input":
        shapes = ([1, 1, 1, 512], [1, 128, 512], [1, 64, 512], [1, 1, 1, 128], [1, 64, 128], [1, 1, 1], [1])
        kinds = [("F32", 4) if n == "attn_sink" else ("BF16", 2) for n in INPUT_NAMES]
        whole = _safetensors({n: (k, s, i) for n, s, (k, i) in zip(INPUT_NAMES, shapes, kinds, strict=True)})
        yield from (whole, whole[:900], whole[:20])
    elif name == "config":
        yield from (PUBLISHED.encode(), PUBLISHED.encode()[:200], b"[" * 3000, b"\xff\xfe")
    else:
        generator = torch.Generator().manual_seed(len(name))
        for size in (0, 8, 200, 7000):
            yield bytes(torch.randint(0, 256, (size,), generator=generator).tolist())
        yield b"\xff" * 4000
        yield b"\x7f\x80" * 2000
        for number in range(len(NAMES)):
            yield struct.pack("<HH", number, number % 2) + bytes(range(256)) * 14
            yield struct.pack("<HHHHH", number, number % 4, 1, 0, 3) + b"\x00\x80\x7f\xc0\xff\xff" * 700
