# SPDX-License-Identifier: Apache-2.0
"""The attention's weights of every layer: drawn from a seed, or read from a checkpoint's safetensors files.

`TENSORS` states each tensor once: its name in the checkpoint, its shape, its kind, which layers have it, and how tensor
parallelism cuts it. Everything else here is derived from that table. Names are those of DeepSeek's own release:
`layers.7.attn.wq_b.weight` with `layers.7.attn.wq_b.scale` for main layers, `mtp.0.attn...` for draft layers; a ratio-1
compressor has no gate, and only kv sources have index keys.

FP8 tensors are e4m3 with one ue8m0 scale factor per 32 x 32 block; they are decoded to bfloat16, exactly, when their
layer is first used. A checkpoint is data from a stranger: only safetensors is read (no pickle), headers are bounded,
shard names cannot leave the folder, and every tensor's presence, dtype and shape is checked before the first byte of it
is read.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch

from ..errors import ArgumentError, FormatError, NonFiniteError, ShapeError
from .config import HEAD_DIM, INDEX_HEAD_DIM, WEIGHT_BLOCK, V41Config
from .topology import LayerPlan, LayerTopology

__all__ = [
    "TENSORS",
    "AttentionWeights",
    "LayerWeights",
    "Shard",
    "TensorSpec",
    "decode_fp8_weight",
    "encode_fp8_weight",
    "layer_prefix",
]

MAX_HEADER_BYTES = 64 << 20
MAX_INDEX_BYTES = 64 << 20  # the real index lists 96,085 tensors in about 8 MB
DECODE_ROWS = 4096  # rows decoded at once, so that the float32 temporaries stay small


@dataclass(frozen=True)
class Shard:
    """One rank of tensor parallelism. Heads are cut evenly; key, index-key and compressor weights are on every rank.

    With no more ranks than o-groups a rank owns whole groups. With more, the ranks of a group each multiply their
    heads' part of its inputs, and since everything behind is linear the sum of the ranks' outputs is still the layer's
    output. `index_heads`: "replicate" (every rank scores with all index heads) or "shard" (ranks score with theirs and
    sum the logits).
    """

    rank: int = 0
    size: int = 1
    index_heads: Literal["replicate", "shard"] = "replicate"

    def check(self, config: V41Config) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ArgumentError(f"Shard: rank must be 0 to size - 1, got rank {self.rank} of {self.size}.")
        if config.num_attention_heads % self.size:
            raise ArgumentError(f"Shard: size must divide the {config.num_attention_heads} heads, got {self.size}.")
        if config.o_groups % self.size and self.size % config.o_groups:
            raise ArgumentError(
                f"Shard: size must divide the {config.o_groups} o-groups or be a multiple of them, got {self.size}."
            )
        if self.index_heads not in ("replicate", "shard"):
            raise ArgumentError(f"Shard: index_heads must be 'replicate' or 'shard', got {self.index_heads!r}.")
        if self.index_heads == "shard" and config.index_n_heads % self.size:
            raise ArgumentError(
                f"Shard: index_heads='shard' needs a size that divides the {config.index_n_heads} index heads, got "
                f"{self.size}; "
                "replicate them."
            )

    def heads(self, config: V41Config) -> slice:
        return _part(config.num_attention_heads, self.rank, self.size)

    def groups(self, config: V41Config) -> slice:
        """The o-groups this rank has a part of."""
        if self.size <= config.o_groups:
            return _part(config.o_groups, self.rank, self.size)
        group = self.rank // (self.size // config.o_groups)
        return slice(group, group + 1)

    def group_columns(self, config: V41Config) -> slice:
        """The columns of those groups' inputs that come from this rank's heads."""
        per_group = max(1, self.size // config.o_groups)
        return _part(config.group_in, self.rank % per_group, per_group)

    def index(self, config: V41Config) -> slice:
        if self.index_heads == "replicate":
            return slice(0, config.index_n_heads)
        return _part(config.index_n_heads, self.rank, self.size)


def _part(total: int, rank: int, size: int) -> slice:
    return slice(rank * total // size, (rank + 1) * total // size)


def _scaled(part: slice, factor: int) -> slice:
    return slice(part.start * factor, part.stop * factor)


ALL = slice(None)
Cut = Callable[[V41Config, Shard], tuple[slice, ...]]
Kind = Literal["fp8", "bf16", "float32"]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor: the field of `LayerWeights`, its checkpoint name behind the layer's prefix, and what it must look
    like.
    """

    field: str
    name: str
    shape: Callable[[V41Config], tuple[int, ...]]
    kind: Kind  # fp8: block-scaled in checkpoints, bfloat16 here. bf16, float32: as stored, float32 also from bfloat16.
    needed: Callable[[LayerPlan], bool]
    cut: Cut  # the part of a rank

    @property
    def scale_name(self) -> str:
        return self.name.removesuffix(".weight") + ".scale"


def _whole(config: V41Config, shard: Shard) -> tuple[slice, ...]:
    return (ALL,)


def _always(plan: LayerPlan) -> bool:
    return True


def _owns_cache(plan: LayerPlan) -> bool:
    return plan.owns_cache


def _owns_index(plan: LayerPlan) -> bool:
    return plan.owns_index


def _cut_heads(c: V41Config, s: Shard) -> tuple[slice, ...]:
    return (s.heads(c),)


def _cut_head_rows(c: V41Config, s: Shard) -> tuple[slice, ...]:
    return (_scaled(s.heads(c), HEAD_DIM),)


def _cut_groups(c: V41Config, s: Shard) -> tuple[slice, ...]:
    return (_scaled(s.groups(c), c.o_lora_rank), s.group_columns(c))


def _cut_group_columns(c: V41Config, s: Shard) -> tuple[slice, ...]:
    return (ALL, _scaled(s.groups(c), c.o_lora_rank))


def _cut_index_rows(c: V41Config, s: Shard) -> tuple[slice, ...]:
    return (_scaled(s.index(c), INDEX_HEAD_DIM),)


def _cut_index_heads(c: V41Config, s: Shard) -> tuple[slice, ...]:
    return (s.index(c),)


def _pools(plan: LayerPlan) -> bool:
    return plan.has_compressor_state


def _o_rank(c: V41Config) -> int:
    return c.o_groups * c.o_lora_rank


TENSORS: tuple[TensorSpec, ...] = (
    TensorSpec("attn_norm", "attn_norm.weight", lambda c: (c.hidden_size,), "float32", _always, _whole),
    TensorSpec("wq_a", "attn.wq_a.weight", lambda c: (c.q_lora_rank, c.hidden_size), "fp8", _always, _whole),
    TensorSpec("q_norm", "attn.q_norm.weight", lambda c: (c.q_lora_rank,), "float32", _always, _whole),
    TensorSpec(
        "wq_b",
        "attn.wq_b.weight",
        lambda c: (c.num_attention_heads * HEAD_DIM, c.q_lora_rank),
        "fp8",
        _always,
        _cut_head_rows,
    ),
    TensorSpec("wkv", "attn.wkv.weight", lambda c: (HEAD_DIM, c.hidden_size), "fp8", _always, _whole),
    TensorSpec("kv_norm", "attn.kv_norm.weight", lambda c: (HEAD_DIM,), "float32", _always, _whole),
    TensorSpec("attn_sink", "attn.attn_sink", lambda c: (c.num_attention_heads,), "float32", _always, _cut_heads),
    TensorSpec("wo_a", "attn.wo_a.weight", lambda c: (_o_rank(c), c.group_in), "fp8", _always, _cut_groups),
    TensorSpec("wo_b", "attn.wo_b.weight", lambda c: (c.hidden_size, _o_rank(c)), "fp8", _always, _cut_group_columns),
    TensorSpec(
        "compressor_wkv",
        "attn.compressor.wkv.weight",
        lambda c: (HEAD_DIM, c.hidden_size),
        "bf16",
        _owns_cache,
        _whole,
    ),
    TensorSpec(
        "compressor_wgate",
        "attn.compressor.wgate.weight",
        lambda c: (HEAD_DIM, c.hidden_size),
        "bf16",
        _pools,
        _whole,
    ),
    TensorSpec("compressor_norm", "attn.compressor.norm.weight", lambda c: (HEAD_DIM,), "float32", _owns_cache, _whole),
    TensorSpec("index_wk", "attn.indexer.wk.weight", lambda c: (INDEX_HEAD_DIM, HEAD_DIM), "bf16", _owns_cache, _whole),
    TensorSpec(
        "index_k_norm", "attn.indexer.k_norm.weight", lambda c: (INDEX_HEAD_DIM,), "float32", _owns_cache, _whole
    ),
    TensorSpec(
        "index_wq_b",
        "attn.indexer.wq_b.weight",
        lambda c: (c.index_n_heads * INDEX_HEAD_DIM, c.q_lora_rank),
        "fp8",
        _owns_index,
        _cut_index_rows,
    ),
    TensorSpec(
        "index_weights",
        "attn.indexer.weights_proj.weight",
        lambda c: (c.index_n_heads, c.hidden_size),
        "bf16",
        _owns_index,
        _cut_index_heads,
    ),
)


@dataclass(frozen=True)
class LayerWeights:
    """One layer's tensors, this rank's part. Matrices are [out, in] bfloat16, norms and the sink float32; None where a
    layer has none.
    """

    attn_norm: torch.Tensor  # [hidden], applied by the stack in front of the layer
    wq_a: torch.Tensor  # [q_lora, hidden]
    q_norm: torch.Tensor  # [q_lora]
    wq_b: torch.Tensor  # [heads * 512, q_lora]
    wkv: torch.Tensor  # [512, hidden]
    kv_norm: torch.Tensor  # [512]
    attn_sink: torch.Tensor  # [heads]
    wo_a: torch.Tensor  # [groups * o_lora, group_in]
    wo_b: torch.Tensor  # [hidden, groups * o_lora]
    compressor_wkv: torch.Tensor | None = None  # [512, hidden]
    compressor_wgate: torch.Tensor | None = None  # [512, hidden], ratio > 1
    compressor_norm: torch.Tensor | None = None  # [512]
    index_wk: torch.Tensor | None = None  # [128, 512]
    index_k_norm: torch.Tensor | None = None  # [128]
    index_wq_b: torch.Tensor | None = None  # [index heads * 128, q_lora]
    index_weights: torch.Tensor | None = None  # [index heads, hidden]

    @property
    def nbytes(self) -> int:
        held = (getattr(self, f.name) for f in fields(self))
        return sum(t.numel() * t.element_size() for t in held if t is not None)


def layer_prefix(config: V41Config, layer: int) -> str:
    """`layers.7.` of main layer 7, `mtp.1.` of the second draft layer."""
    return f"layers.{layer}." if layer < config.num_hidden_layers else f"mtp.{layer - config.num_hidden_layers}."


class AttentionWeights:
    """Weights of all layers, each made when it is first asked for and then kept until `drop`."""

    def __init__(self, config: V41Config, make: Callable[[LayerPlan], LayerWeights], shard: Shard) -> None:
        shard.check(config)
        self.config = config
        self.shard = shard
        self.topology = LayerTopology(config)
        self._make = make
        self._layers: dict[int, LayerWeights] = {}

    def layer(self, layer: int) -> LayerWeights:
        """The weights of one layer, read or drawn now if they are not here yet."""
        if layer not in self._layers:
            self._layers[layer] = self._make(self.topology[layer])
        return self._layers[layer]

    def load(self, layers: Iterable[int] | None = None, *, progress: bool = False) -> AttentionWeights:
        """Make several layers now (default: all), with a progress bar on standard error if asked."""
        wanted = range(len(self.topology)) if layers is None else list(layers)
        with _progress_bar("loading layers", len(wanted), progress) as advance:
            for layer in wanted:
                self.layer(layer)
                advance()
        return self

    def drop(self, layer: int) -> None:
        """Forget a layer's tensors; the next `layer` call makes them again."""
        self._layers.pop(layer, None)

    @property
    def nbytes(self) -> int:
        """Bytes of the layers that are here now."""
        return sum(w.nbytes for w in self._layers.values())

    @classmethod
    def random(cls, config: V41Config, *, seed: int = 0, shard: Shard | None = None) -> AttentionWeights:
        """Weights drawn layer by layer from `seed`: the same for every rank, order of use and choice of layers.

        Projections that are FP8 in the checkpoint are rounded to that grid, so that they are values a checkpoint could
        hold.
        """
        part = Shard() if shard is None else shard

        def make(plan: LayerPlan) -> LayerWeights:
            generator = torch.Generator().manual_seed((seed << 20) + plan.layer)
            tensors = {}
            for spec in _of_layer(plan):
                full = _draw(spec, config, generator)
                tensors[spec.field] = full[spec.cut(config, part)].contiguous()
            return LayerWeights(**tensors)

        return cls(config, make, part)

    @classmethod
    def from_safetensors(
        cls,
        path: str | Path,
        config: V41Config,
        *,
        shard: Shard | None = None,
        layers: Iterable[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> AttentionWeights:
        """Open a checkpoint: one `.safetensors` file, or a folder with `model.safetensors.index.json` or one such file.

        Args:
            path: file or folder. Only headers are read now; each layer's tensors when it is first used.
            config: the model the checkpoint must fit.
            shard: this process's part. Default: everything.
            layers: only these layers (with the sources they read) must be in the checkpoint. Default: all.
            device: where the decoded tensors go.
        Raises:
            FormatError: no readable safetensors file: missing, truncated, hostile header or index.
            ShapeError: a tensor is missing or has another shape; the message names it.
        """
        part = Shard() if shard is None else shard
        part.check(config)
        source = _Checkpoint(Path(path))
        topology = LayerTopology(config)
        for layer in topology.closure(layers):
            for spec in _of_layer(topology[layer]):
                source.check(spec, config, layer)

        def make(plan: LayerPlan) -> LayerWeights:
            tensors = {}
            for spec in _of_layer(plan):
                source.check(spec, config, plan.layer)
                tensors[spec.field] = source.read(spec, config, plan.layer, part).to(device)
            return LayerWeights(**tensors)

        return cls(config, make, part)


def _of_layer(plan: LayerPlan) -> list[TensorSpec]:
    return [spec for spec in TENSORS if spec.needed(plan)]


def _draw(spec: TensorSpec, config: V41Config, generator: torch.Generator) -> torch.Tensor:
    shape = spec.shape(config)
    values = torch.randn(shape, generator=generator)
    if spec.field == "attn_sink":
        return values
    if spec.kind == "float32":
        return 1.0 + 0.1 * values
    values = values.mul_(shape[1] ** -0.5).to(torch.bfloat16)
    return decode_fp8_weight(*encode_fp8_weight(values)) if spec.kind == "fp8" else values


# --- FP8 blocks ------------------------------------------------------------------------------------------------------


def decode_fp8_weight(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """e4m3 [n, k] with ue8m0 bytes [n / 32, k / 32] to bfloat16 [n, k]. NaN codes and NaN scales stay NaN."""
    n, k = weight.shape
    out = torch.empty(n, k, dtype=torch.bfloat16, device=weight.device)
    exponent = scale.view(torch.uint8).to(torch.float32) - 127.0
    factor = torch.where(exponent == 128.0, torch.nan, torch.exp2(exponent))
    for start in range(0, n, DECODE_ROWS):
        stop = min(start + DECODE_ROWS, n)
        rows = factor[start // WEIGHT_BLOCK : -(-stop // WEIGHT_BLOCK)].repeat_interleave(WEIGHT_BLOCK, 0)[
            : stop - start
        ]
        values = weight[start:stop].to(torch.float32).reshape(stop - start, k // WEIGHT_BLOCK, WEIGHT_BLOCK)
        out[start:stop] = (values * rows[:, :, None]).reshape(stop - start, k).to(torch.bfloat16)
    return out


def encode_fp8_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bfloat16 or float32 [n, k] to (e4m3 [n, k], ue8m0 bytes [n / 32, k / 32]): the smallest power of two that fits
    each block.
    """
    n, k = weight.shape
    blocks = weight.to(torch.float32).reshape(n // WEIGHT_BLOCK, WEIGHT_BLOCK, k // WEIGHT_BLOCK, WEIGHT_BLOCK)
    amax = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-30)
    mantissa, exponent = torch.frexp(amax / 448.0)  # in [0.5, 1) * 2^exponent
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-126, 127)
    codes = (blocks * torch.exp2(-exponent.to(torch.float32))[:, None, :, None]).clamp(-448.0, 448.0)
    return codes.reshape(n, k).to(torch.float8_e4m3fn), (exponent + 127).to(torch.uint8)


# --- safetensors -----------------------------------------------------------------------------------------------------

_ACCEPTED = {"fp8": ("F8_E4M3", "BF16"), "bf16": ("BF16",), "float32": ("F32", "BF16")}


class _Checkpoint:
    """Names to files, headers checked when a file is first opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: dict[str, Path] = {}  # tensor -> file
        self._open: dict[Path, Any] = {}
        index = path / "model.safetensors.index.json"
        if path.is_dir() and index.is_file():
            self._read_index(index)
            return
        file = path / "model.safetensors" if path.is_dir() else path
        for name in self._handle(file).keys():  # noqa: SIM118 - a safetensors handle is no mapping
            self.files[name] = file

    def _read_index(self, index: Path) -> None:
        with open(index, "rb") as stream:
            data = stream.read(MAX_INDEX_BYTES + 1)
        if len(data) > MAX_INDEX_BYTES:
            raise FormatError(f"weights: {index.name} must be at most {MAX_INDEX_BYTES} bytes, got more.")
        try:
            weight_map = json.loads(data.decode("utf-8"))["weight_map"]
            pairs = list(weight_map.items())
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            raise FormatError(
                f"weights: {index.name} must be a JSON object with a weight_map from tensor to file."
            ) from None
        for name, file in pairs:
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                raise FormatError(
                    f"weights: {index.name} must map tensors to .safetensors files of its own folder, got "
                    f"{str(file)[:80]!r} for {name[:80]}."
                )
            self.files[name] = self.path / file

    def _handle(self, file: Path) -> Any:
        if file not in self._open:
            from safetensors import SafetensorError, safe_open

            _check_header(file)
            try:
                self._open[file] = safe_open(str(file), framework="pt", device="cpu")
            except (SafetensorError, OSError, ValueError) as error:
                raise FormatError(f"weights: {file.name} is no valid safetensors file; {error}.") from None
        return self._open[file]

    def _slice(self, name: str) -> Any:
        if name not in self.files:
            raise ShapeError(
                f"weights: {name} is missing from {self.path.name}; the checkpoint does not fit this configuration."
            )
        handle = self._handle(self.files[name])
        try:
            return handle.get_slice(name)
        except Exception as error:  # the library raises its own class, or KeyError, by version
            raise ShapeError(
                f"weights: {name} is missing from {self.files[name].name}, where the index puts it; {error}."
            ) from None

    def check(self, spec: TensorSpec, config: V41Config, layer: int) -> None:
        """Raise unless the tensor, and its scale factors if it is FP8, are there with the right dtype and shape."""
        name, shape = layer_prefix(config, layer) + spec.name, spec.shape(config)
        dtype = self._check_one(name, shape, _ACCEPTED[spec.kind])
        if dtype == "F8_E4M3":
            blocks = tuple(-(-n // WEIGHT_BLOCK) for n in shape)
            self._check_one(layer_prefix(config, layer) + spec.scale_name, blocks, ("F8_E8M0", "U8"))

    def _check_one(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> str:
        part = self._slice(name)
        found = tuple(part.get_shape())
        if found != shape:
            raise ShapeError(
                f"weights: {name} must be {list(shape)}, got {list(found)}; the checkpoint is of another model."
            )
        dtype = str(part.get_dtype())
        if dtype not in dtypes:
            raise FormatError(f"weights: {name} must be {' or '.join(dtypes)}, got {dtype}.")
        return dtype

    def read(self, spec: TensorSpec, config: V41Config, layer: int, shard: Shard) -> torch.Tensor:
        """This rank's part, decoded."""
        name = layer_prefix(config, layer) + spec.name
        part = self._slice(name)
        cut = spec.cut(config, shard)
        values: torch.Tensor = part[cut]
        if str(part.get_dtype()) == "F8_E4M3":
            blocks = tuple(
                slice(None) if c == ALL else slice(c.start // WEIGHT_BLOCK, -(-c.stop // WEIGHT_BLOCK)) for c in cut
            )
            scale = self._slice(layer_prefix(config, layer) + spec.scale_name)[blocks]
            values = decode_fp8_weight(values, scale)
        values = values.to(torch.float32 if spec.kind == "float32" else torch.bfloat16)
        if spec.field != "attn_sink" and not bool(torch.isfinite(values).all()):
            raise NonFiniteError(f"weights: {name} must be finite, got NaN or infinity; the file is damaged.")
        if spec.field == "attn_sink" and bool(values.isnan().any()):
            raise NonFiniteError(f"weights: {name} must not be NaN, got NaN; the file is damaged.")
        return values.contiguous()


def _check_header(file: Path) -> None:
    """Refuse what the reader should not even try: no regular file, a header longer than the file or any real one."""
    if not file.is_file():
        raise FormatError(f"weights: {file.name} must be a safetensors file, got no regular file of that name.")
    size = file.stat().st_size
    with open(file, "rb") as stream:
        prefix = stream.read(8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else math.inf
    if length > size - 8:
        raise FormatError(
            f"weights: {file.name} is truncated; its header needs {length} bytes and {max(size - 8, 0)} are there."
        )
    if length > MAX_HEADER_BYTES:
        raise FormatError(f"weights: {file.name} must have a header of at most {MAX_HEADER_BYTES} bytes, got {length}.")


@contextmanager
def _progress_bar(text: str, total: int, shown: bool) -> Iterator[Callable[[], None]]:
    if not shown:
        yield lambda: None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ModuleNotFoundError:
        yield lambda: None
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(text, total=total)
        yield lambda: bar.advance(task)
