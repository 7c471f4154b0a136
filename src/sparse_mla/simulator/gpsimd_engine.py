# SPDX-License-Identifier: Apache-2.0
"""GpSimd engine: index patterns, gathers within SBUF, top-k, and what else needs general-purpose cores. SBUF only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import dtypes
from .constants import engine as Engine
from .core import GPSIMD, SBUF, VECTOR, Array, Machine, current, describe, instruction
from .operators import BY_NAME, reduce_free
from .tensor import NkiTensor
from .vector_engine import constant, immediate, on_chip, pick_engine, pick_operator, scalar_operand

__all__ = [
    "affine_select", "iota", "local_gather", "nc_n_gather", "nonzero_with_count", "rand2", "rand_get_state",
    "rand_set_state", "rng", "sequence_bounds", "set_rng_seed", "tensor_partition_reduce", "topk",
]  # fmt: skip


def _affine(m: Machine, dst: NkiTensor, pattern: Any, offset: int, channel_multiplier: int) -> Array:
    """offset + p * channel_multiplier + sum(step * index), int32, shape (P, elements)."""
    if not isinstance(pattern, Sequence) or not all(isinstance(p, Sequence) and len(p) == 2 for p in pattern):
        m.fail(22, f"pattern must be [[step, num], ..], got {describe(pattern)}")
    if len(pattern) > m.target.max_free_dims:
        m.fail(22, f"pattern has {len(pattern)} dims, at most {m.target.max_free_dims}")
    count = 1
    for _, n in pattern:
        count *= int(n)
    if any(int(n) < 1 for _, n in pattern) or count != dst.free_size:
        m.fail(23, f"pattern makes {count} elements, dst {dst.brief()} has {dst.free_size} per partition")
    line = np.zeros(1, np.int64)
    for step, n in pattern:
        line = (line[:, None] + np.arange(int(n), dtype=np.int64) * int(step)).reshape(-1)
    rows = int(offset) + np.arange(dst.shape[0], dtype=np.int64) * int(channel_multiplier)
    values = rows[:, None] + line[None]
    if m.checks and (int(values.min()) < INT32.min or int(values.max()) > INT32.max):
        m.warn(27, f"the pattern reaches {int(values.min())}..{int(values.max())}, beyond 32-bit integers; it wraps")
    return values.astype(np.int32)


@instruction
def iota(dst: Any, pattern: Any, offset: int = 0, channel_multiplier: int = 0, name: Any = None) -> None:
    """dst[p, ..] = offset + p * channel_multiplier + sum(step * index)."""
    m = current()
    dst = on_chip(m, "dst", dst, GPSIMD)
    values = _affine(m, dst, pattern, offset, channel_multiplier)
    if m.checks and dst.dtype.is_float and max(-int(values.min()), int(values.max())) >= m.target.exact_int_limit:
        m.warn(27, f"dst {dst.brief()}: integers from 2^24 on lose bits in float32")
    m.write(dst, values.astype(np.float32) if dst.dtype.is_float else values)
    m.emit(GPSIMD, (dst,), ())


INT32 = np.iinfo(np.int32)
_COMPARES = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")


@instruction
def affine_select(
    dst: Any, pattern: Any, channel_multiplier: int, on_true_tile: Any, on_false_value: float,
    cmp_op: Any = BY_NAME["equal"], offset: int = 0, name: Any = None,
) -> None:  # fmt: skip
    """dst = on_true_tile where cmp_op(affine value, 0) holds, on_false_value elsewhere."""
    m = current()
    tile, dst = on_chip(m, "on_true_tile", on_true_tile, GPSIMD), on_chip(m, "dst", dst, GPSIMD)
    m.same_size(dst=dst, on_true_tile=tile)
    compare = pick_operator(m, "cmp_op", cmp_op)
    if compare.name not in _COMPARES:
        m.fail(25, f"cmp_op must be a comparison, got {compare.name}")
    if m.checks and dst.ndim > m.target.max_free_dims:
        m.fail_or_warn(22, f"dst {dst.brief()}: hardware was seen to refuse more than 3 free dims here", fatal=m.strict)
    if isinstance(on_false_value, NkiTensor):
        m.fail(24, "on_false_value must be a number")
    keep = compare.function(_affine(m, dst, pattern, offset, channel_multiplier), 0) != 0
    if tile.dtype is dst.dtype:
        values = m.read("on_true_tile", tile).reshape(keep.shape)
        other = np.empty(1, dst.dtype.np)
        constant(m, dst, immediate(m, "on_false_value", on_false_value), other)
        out = dst.array()
        out[...] = np.where(keep, values, other[0]).reshape(out.shape)
        m.wrote(dst)
    else:
        m.write(dst, np.where(keep, m.f32("on_true_tile", tile).reshape(keep.shape), np.float32(on_false_value)))
    m.emit(GPSIMD, (dst,), (tile,))


@instruction
def tensor_partition_reduce(dst: Any, op: Any, data: Any, name: Any = None) -> None:
    """dst[1, ..] = op over the partitions of data."""
    m = current()
    data, dst = on_chip(m, "data", data, GPSIMD), on_chip(m, "dst", dst, GPSIMD)
    found = pick_operator(m, "op", op)
    if found.name not in ("add", "average", "maximum", "bitwise_or", "bitwise_and"):
        m.fail(25, f"op must be add, average, maximum, bitwise_or or bitwise_and, got {found.name}")
    if dst.shape[0] != 1 or dst.free_size != data.free_size:
        m.fail(23, f"dst must be (1, {data.free_size}), got {dst.brief()}")
    if found.family == "bitvec":
        values = m.read("data", data).reshape(data.shape[0], -1)
        out = dst.array()
        out[...] = reduce_free(found, values.T, (1,)).reshape(out.shape)
        m.wrote(dst)
    else:
        values = m.f32("data", data).reshape(data.shape[0], -1)
        m.write(dst, np.asarray(reduce_free(found, np.ascontiguousarray(values.T), (1,)), np.float32))
    m.emit(GPSIMD, (dst,), (data,), op=found.name)


@instruction
def nc_n_gather(dst: Any, data: Any, indices: Any, name: Any = None) -> None:
    """dst[p, j] = data[p, indices[p, j]], free dims flattened."""
    m = current()
    data, indices, dst = (
        on_chip(m, "data", data, GPSIMD), on_chip(m, "indices", indices, GPSIMD), on_chip(m, "dst", dst, GPSIMD),
    )  # fmt: skip
    m.same_size(dst=dst, indices=indices)
    if data.shape[0] != indices.shape[0]:
        m.fail(23, f"data {data.brief()} and indices {indices.brief()} must have equal partitions")
    if data.dtype is not dst.dtype:
        m.fail(23, f"dst {dst.brief()} must have the dtype of data, {data.dtype}")
    if m.checks and indices.dtype is not dtypes.uint32:
        m.fail(39, f"indices must be uint32, got {indices.brief()}")
    at = m.read("indices", indices).reshape(data.shape[0], -1).astype(np.int64)
    if at.size and (int(at.max()) >= data.free_size or int(at.min()) < 0):
        m.fail(39, f"indices reach {int(at.max())}, data {data.brief()} has {data.free_size} elements per partition")
    gathered = np.take_along_axis(m.read("data", data).reshape(data.shape[0], -1), at, axis=1)
    out = dst.array()
    out[...] = gathered.reshape(out.shape)
    m.wrote(dst)
    m.emit(GPSIMD, (dst,), (data, indices), groups=-(-dst.free_size // m.target.n_gather_group))


@instruction
def local_gather(
    dst: Any,
    src_buffer: Any,
    index: Any,
    num_elem_per_idx: int = 1,
    num_valid_indices: int | None = None,
    name: Any = None,
) -> None:
    """Each group of 16 partitions gathers the positions its 16-row slice of index lists, partition first.

    Positions are element offsets; each brings num_elem_per_idx consecutive elements.
    """
    m = current()
    src = on_chip(m, "src_buffer", src_buffer, GPSIMD)
    index, dst = on_chip(m, "index", index, GPSIMD), on_chip(m, "dst", dst, GPSIMD)
    group = m.target.gpsimd_partitions
    p = src.shape[0]
    each = int(num_elem_per_idx)
    if index.shape[0] != p or p % group or dst.shape[0] != p:
        m.fail(
            38,
            f"src_buffer {src.brief()}, index {index.brief()} and dst {dst.brief()} need equal partitions, a "
            f"multiple of {group}",
        )
    if index.dtype is not dtypes.uint16:
        m.fail(38, f"index must be uint16, got {index.brief()}")
    if src.dtype is not dst.dtype:
        m.fail(38, f"dst {dst.brief()} must have the dtype of src_buffer, {src.dtype}")
    if each not in (1, 2, 4, 8, 16, 32):
        m.fail(38, f"num_elem_per_idx must be 1, 2, 4, 8, 16 or 32, got {each}")
    listed = index.free_size * group
    valid = listed if num_valid_indices is None else int(num_valid_indices)
    if not 1 <= valid <= listed or (
        listed > m.target.local_gather_max_indices and valid > m.target.local_gather_max_indices
    ):
        m.fail(38, f"num_valid_indices {valid} must be 1..{min(listed, m.target.local_gather_max_indices)}")
    if dst.free_size != valid * each:
        m.fail(38, f"dst {dst.brief()} must have {valid} x {each} elements per partition")
    if num_valid_indices is None:
        m.warn(38, "pass num_elem_per_idx and num_valid_indices explicitly; omitting them is a known issue")
    table = m.read("index", index).reshape(p // group, group, -1)
    lists = table.transpose(0, 2, 1).reshape(p // group, -1)[:, :valid].astype(np.int64)  # partition dim first
    at = (lists[:, :, None] + np.arange(each)).reshape(p // group, -1)
    if int(at.max()) >= src.free_size:
        m.fail(38, f"index reaches element {int(at.max())}, src_buffer {src.brief()} has {src.free_size} per partition")
    values = m.read("src_buffer", src).reshape(p, -1)
    out = dst.array()
    out[...] = np.take_along_axis(values, np.repeat(at, group, axis=0), axis=1).reshape(out.shape)
    m.wrote(dst)
    m.emit(GPSIMD, (dst,), (src, index), indices=valid, num_elem_per_idx=each)


@instruction
def topk(val_dst: Any, idx_dst: Any, src: Any, n: int, name: Any = None) -> None:
    """The k largest of n bfloat16 values per 16-partition group; element j lies at (j % 16, j // 16), results too.

    Results ascend by value here; hardware order was seen to differ, so treat them as a set. Columns beyond the k
    results are not defined; here they hold poison.
    """
    m = current()
    target = m.target
    src, values_out, index_out = (
        on_chip(m, "src", src, GPSIMD), on_chip(m, "val_dst", val_dst, GPSIMD), on_chip(m, "idx_dst", idx_dst, GPSIMD),
    )  # fmt: skip
    group = target.gpsimd_partitions
    p, k = src.shape[0], values_out.free_size
    n = int(n)
    if src.dtype is not dtypes.bfloat16 or values_out.dtype is not dtypes.bfloat16:
        m.fail(41, f"src and val_dst must be bfloat16, got {src.brief()} and {values_out.brief()}")
    if index_out.dtype is not dtypes.uint32:
        m.fail(41, f"idx_dst must be uint32, got {index_out.brief()}")
    m.same_size(val_dst=values_out, idx_dst=index_out)
    if values_out.shape[0] != p or p % group:
        m.fail(41, f"src {src.brief()} and val_dst {values_out.brief()} need equal partitions, a multiple of {group}")
    if not target.max8_min <= n < target.topk_max_n:
        m.fail(41, f"n must be {target.max8_min}..{target.topk_max_n - 1}, got {n}")
    if not 1 <= k < target.topk_max_k or k > n:
        m.fail(41, f"k = {k} (free size of val_dst) must be 1..{min(target.topk_max_k - 1, n)}")
    if src.free_size < -(-n // group):
        m.fail(41, f"src {src.brief()} holds {src.free_size * group} elements per group, n is {n}")
    if p < target.pmax:
        m.warn(41, f"topk on {p} partitions: allocate all {target.pmax}, fewer were seen to misbehave")
    columns = -(-n // group)
    used = src[:, 0:columns] if src.ndim == 2 else src
    data = m.f32("src", used).reshape(p, -1)[:, :columns]
    snakes = data.reshape(p // group, group, columns).transpose(0, 2, 1).reshape(p // group, -1)[:, :n]
    # ascending by value; of equal values the lower position counts as larger, so it comes last
    order = np.lexsort((-np.arange(n)[None].repeat(len(snakes), 0), snakes), axis=1)[:, -k:]
    picked = np.take_along_axis(snakes, order, axis=1)
    width = -(-k // group)
    flat_v = np.full((p // group, width * group), np.nan, np.float32)
    flat_i = np.full((p // group, width * group), np.iinfo(np.uint32).max, np.uint32)
    flat_v[:, :k], flat_i[:, :k] = picked, order
    v = np.full((p, k), np.nan, np.float32)
    i = np.full((p, k), np.iinfo(np.uint32).max, np.uint32)
    v[:, :width] = flat_v.reshape(-1, width, group).transpose(0, 2, 1).reshape(p, width)
    i[:, :width] = flat_i.reshape(-1, width, group).transpose(0, 2, 1).reshape(p, width)
    m.write(values_out, v)
    m.write(index_out, i)
    m.emit(GPSIMD, (values_out, index_out), (src,), n=n, k=k)


@instruction
def nonzero_with_count(dst: Any, src: Any, index_offset: int = 0, padding_val: int = -1, name: Any = None) -> None:
    """On partitions 0, 16, .., 112: positions of the nonzero elements, padding, and their count last."""
    m = current()
    if m.checks and m.target.gen < 3:
        m.fail(48, "nonzero_with_count exists from trn2 on")
    src, dst = on_chip(m, "src", src, GPSIMD), on_chip(m, "dst", dst, GPSIMD)
    group = m.target.gpsimd_partitions
    if src.dtype not in (dtypes.float32, dtypes.int32) or dst.dtype is not dtypes.int32:
        m.fail(42, f"src must be float32 or int32 and dst int32, got {src.brief()} and {dst.brief()}")
    if dst.shape[0] != src.shape[0]:
        m.fail(42, f"dst {dst.brief()} and src {src.brief()} must have equal partitions")
    if dst.free_size != src.free_size + 1:
        m.fail(42, f"dst {dst.brief()} must have one element more per partition than src {src.brief()}, for the count")
    if m.checks and src.p0 % group:
        m.fail(42, f"src starts at partition {src.p0}; only partitions 0, {group}, .. are read")
    served = src.shape[0] > 0 and src[0:1] if src.shape[0] < 2 else src.ap(
        [[src.strides[0] * group, -(-src.shape[0] // group)], *src.get_pattern()[1:]]
    ) if src.shape[0] > group else src[0:1]  # fmt: skip
    lines = m.read("src", served).reshape(served.shape[0], -1)
    out = dst.array().reshape(dst.shape[0], -1) if dst.array().flags.c_contiguous else dst.array()
    chosen = np.zeros(dst.shape, np.bool_)
    for g, line in enumerate(lines):  # at most 8 rows
        hits = np.flatnonzero(line)
        result = np.full(dst.free_size, padding_val, np.int32)
        result[: len(hits)] = hits + index_offset
        result[-1] = len(hits)
        out[g * group] = result.reshape(out.shape[1:])
        chosen[g * group] = True
    m.storage_partial(dst, chosen)
    m.emit(GPSIMD, (dst,), (src,))


@instruction
def sequence_bounds(dst: Any, segment_ids: Any, name: Any = None) -> None:
    """Per element the [start, end) of its run of equal segment ids; padding (id 0) gets [n, -1]."""
    m = current()
    ids, dst = on_chip(m, "segment_ids", segment_ids, GPSIMD), on_chip(m, "dst", dst, GPSIMD)
    n = ids.free_size
    if ids.shape[0] != 1 or dst.shape[0] != 1 or dst.free_size != 2 * n:
        m.fail(23, f"segment_ids must be (1, n) and dst (1, 2, n), got {ids.brief()} and {dst.brief()}")
    for role, t in (("segment_ids", ids), ("dst", dst)):
        if t.dtype not in (dtypes.float32, dtypes.int32):
            m.fail(25, f"{role} must be float32 or int32, got {t.brief()}")
    values = m.read("segment_ids", ids).reshape(-1)
    change = np.flatnonzero(np.diff(values)) + 1
    starts = np.concatenate([[0], change])
    ends = np.concatenate([change, [n]])
    lengths = ends - starts
    low, high = np.repeat(starts, lengths), np.repeat(ends, lengths)
    padding = values == 0
    result = np.stack([np.where(padding, n, low), np.where(padding, -1, high)])
    m.write(dst, result.astype(np.float32) if dst.dtype.is_float else result.astype(np.int32))
    m.emit(GPSIMD, (dst,), (ids,))


# -- random numbers: deterministic per launch, not the hardware's sequence ----------------------------------------


def _where(m: Machine, engine: Any) -> str:
    where = pick_engine(m, engine, VECTOR, (VECTOR, GPSIMD))
    if where == GPSIMD and m.checks and m.target.gen < 3:
        m.fail(28, "GpSimd random numbers exist from trn2 on")
    return where


@instruction
def rng(dst: Any, engine: Any = Engine.vector, name: Any = None) -> None:
    """dst = random bits."""
    m = current()
    where = _where(m, engine)
    dst = on_chip(m, "dst", dst, where)
    if not dst.dtype.is_int:
        m.fail(25, f"dst must be an integer type, got {dst.brief()}")
    bits = m.random().integers(0, 1 << 32, dst.shape, np.uint32)
    out = dst.array()
    out[...] = bits.astype(f"u{dst.dtype.itemsize}").view(dst.dtype.np)
    m.wrote(dst)
    m.emit(where, (dst,), ())


@instruction
def rand2(dst: Any, min: Any, max: Any, name: Any = None) -> None:
    """dst = uniform random numbers in [min, max)."""
    m = current()
    dst = on_chip(m, "dst", dst)
    low, a = scalar_operand(m, "min", min, dst)
    high, b = scalar_operand(m, "max", max, dst)
    m.write(dst, (low + (high - low) * m.random().random(dst.shape, np.float32)).astype(np.float32))
    m.emit(VECTOR, (dst,), tuple(t for t in (a, b) if t is not None))


@instruction
def set_rng_seed(src_seeds: Any, name: Any = None) -> None:
    """Seed the Vector engine's generator from a [1, 1] tensor."""
    m = current()
    seeds = m.tile("src_seeds", src_seeds, (SBUF,), 16)
    m.rng_state = np.random.default_rng(m.read("src_seeds", seeds).reshape(-1).view(np.uint8).tolist())
    m.emit(VECTOR, (), (seeds,))


@instruction
def rand_set_state(src_seeds: Any, engine: Any = Engine.gpsimd, name: Any = None) -> None:
    """Seed an engine's generator."""
    m = current()
    where = _where(m, engine)
    seeds = m.tile("src_seeds", src_seeds, (SBUF,), 16)
    m.rng_state = np.random.default_rng(
        np.ascontiguousarray(m.read("src_seeds", seeds)).reshape(-1).view(np.uint8).tolist()
    )
    m.emit(where, (), (seeds,))


@instruction
def rand_get_state(dst: Any, engine: Any = Engine.gpsimd, name: Any = None) -> None:
    """dst = words that describe the generator's state (deterministic, not the hardware's)."""
    m = current()
    where = _where(m, engine)
    dst = on_chip(m, "dst", dst, where)
    state = int(m.random().bit_generator.state["state"]["state"])
    words = [(state >> (32 * i)) & 0xFFFFFFFF for i in range(4)]
    out = dst.array()
    out[...] = np.resize(np.array(words, np.uint32).astype(out.dtype), out.shape)
    m.wrote(dst)
    m.emit(where, (dst,), ())
