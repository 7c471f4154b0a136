# SPDX-License-Identifier: Apache-2.0
"""The native backend: C++ on CPU tensors, threads as torch has them, the machine's best CPU target or the one named.

Loaded when first asked. torch is imported before the extension on purpose: both then share torch's OpenMP runtime; a
second one would spin against the first. The extension takes addresses, strides and sizes as integers. Everything was
validated by the call records; what needs the values (slots, lengths) the core checks before anything is written.

After os.fork() a child runs on one thread: the OpenMP pool does not survive the fork.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NoReturn

import torch

from .. import config
from ..caches import KVScope, PagedCache
from ..dispatch import WITHIN_2X_BF16, Limits, opaque
from ..errors import ArgumentError, BackendUnavailableError, SparseMlaError
from ..formats import FORMATS
from ..memory import with_huge_pages
from ..ops.merge_partials import MERGE_PARTIALS, MergePartialsCall, fake_merge
from ..ops.merge_partials import SCHEMA as MERGE_SCHEMA
from ..ops.sparse_decode import SPARSE_DECODE, SparseDecodeCall, check_slots
from ..ops.sparse_prefill import SCHEMA as PREFILL_SCHEMA
from ..ops.sparse_prefill import SPARSE_PREFILL, SparsePrefillCall, check_lengths, fake_prefill

_native: Any = None
_WHY_ABSENT = ""
try:
    _native = importlib.import_module("sparse_mla._native")
except ImportError as error:  # a checkout without a compiler, or an extension built for another Python
    _WHY_ABSENT = f"the extension sparse_mla._native was not built ({error}); a C++20 compiler and CMake build it"

__all__ = ["KINDS", "cpu_target", "presence", "targets"]


def presence() -> str:
    """Why native calls cannot run here; empty when they can."""
    if _native is None:
        return _WHY_ABSENT
    try:
        cpu_target()
    except SparseMlaError as error:
        return str(error)
    return ""


def targets() -> list[tuple[str, str]]:
    """(name, why it cannot run on this machine or "") of every CPU target, best first."""
    if _native is None:
        raise BackendUnavailableError(f"native: {_WHY_ABSENT}.")
    return list(_native.targets())


@lru_cache(maxsize=8)
def _target_number(name: str) -> int:
    found = targets()
    for number, (each, absence) in enumerate(found):
        if each == name and absence:
            raise BackendUnavailableError(f"native: SPARSE_MLA_CPU_TARGET is {name}, but {absence}.")
        if each == name or (not name and not absence):
            return number
    raise ArgumentError(
        f"native: SPARSE_MLA_CPU_TARGET must be one of {', '.join(each for each, _ in found)}, got {name!r}."
    )


def cpu_target() -> str:
    """The CPU target calls use now: the best present, or the one SPARSE_MLA_CPU_TARGET names."""
    return targets()[_target_number(config.get("SPARSE_MLA_CPU_TARGET"))][0]


PEAK_ROUNDS = 100_000  # of the loop of `peak_flops`: 0.2 ms on a processor of 3 GHz that starts two FMA a cycle


def peak_flops(threads: int = 1) -> float:
    """Run a register-only loop of the target's widest dot or FMA on so many threads, and return the floating point
    operations done: the roof of `pct_peak`, to be timed by whoever calls."""
    target = _target_number(config.get("SPARSE_MLA_CPU_TARGET"))
    if threads == 1:
        return float(_native.peak_loop(target, PEAK_ROUNDS))
    rounds = 200 * PEAK_ROUNDS  # so that neither starting threads nor OpenMP's, which spin for a while, count
    with ThreadPoolExecutor(threads) as pool:
        return float(sum(pool.map(_native.peak_loop, [target] * threads, [rounds] * threads)))


def _plan() -> tuple[int, int]:
    """(target, threads) of a call made now."""
    return _target_number(config.get("SPARSE_MLA_CPU_TARGET")), torch.get_num_threads()


# Numbers of the record formats in csrc/formats.h, which lists them in the same order; a test compares names and sizes.
KINDS = {name: number for number, name in enumerate(FORMATS)}


@lru_cache(maxsize=1024)
def _page_layout(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, geometry: tuple[int, ...]
) -> tuple[int, tuple[int, ...]]:
    """What the core needs to know of a cache besides its address: (bytes from the tensor's start to the first page,
    (kind, page_size, block_stride, data_step, scale_base, scale_step, num_slots)). A cache keeps its shape for life."""
    like = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    cache = PagedCache.from_geometry(like, list(geometry))
    fmt = cache.format
    if cache.is_sectioned:
        steps = (fmt.data_bytes, cache.page_size * fmt.data_bytes, fmt.scale_bytes)
    else:
        steps = (fmt.record_bytes, fmt.data_bytes, fmt.record_bytes)
    offset = cache.region_offset
    return offset, (KINDS[fmt.name], cache.page_size, cache.block_stride_bytes, *steps, cache.num_slots)


def _scope(
    cache: torch.Tensor, indices: torch.Tensor, length: torch.Tensor | None, geometry: Sequence[int]
) -> tuple[Any, ...]:
    offset, layout = _page_layout(cache.shape, cache.stride(), cache.dtype, tuple(geometry))
    lists = (indices.data_ptr(), indices.stride(), indices.shape[2], _address(length))
    return (cache.data_ptr() + offset, layout, *lists)


def _call_scope(scope: KVScope) -> tuple[Any, ...] | None:
    """`_scope` of a call record; the layout is kept with its cache. None: a tensor has to be copied first."""
    cache, indices, length = scope.cache, scope.indices, scope.topk_length
    data, strides = cache.data, indices.stride()
    if strides[2] != 1 or (length is not None and not length.is_contiguous()):
        return None
    known = cache.__dict__.get("_native_layout")
    if known is None or known[0] != data.shape:  # somebody may have resized the tensor in place
        known = (data.shape, *_page_layout(data.shape, data.stride(), data.dtype, cache.geometry))
        object.__setattr__(cache, "_native_layout", known)
    address = data.data_ptr() + known[1]
    return address, known[2], indices.data_ptr(), strides, indices.shape[2], 0 if length is None else length.data_ptr()


def _attend(
    q: torch.Tensor,
    scope0: tuple[Any, ...],
    scope1: tuple[Any, ...],
    softmax_scale: float,
    sink: torch.Tensor | None,
    out_dtype: torch.dtype,
    checks: bool,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(out, lse) of decode attention; None when a slot or length is out of range."""
    shape = q.shape
    b, s_q, h_q, d = shape
    if out_dtype is torch.bfloat16 and q.is_contiguous():
        out = torch.empty_like(q)  # half the time of torch.empty
    else:
        out = torch.empty(b, s_q, h_q, d, dtype=out_dtype)
    lse = torch.empty(b, s_q, h_q, dtype=torch.float32)
    ran = _native.attention(
        _target_number(config.get("SPARSE_MLA_CPU_TARGET")),
        torch.get_num_threads(),
        checks,
        False,
        q.data_ptr(),
        shape,
        q.stride(),
        scope0,
        scope1,
        softmax_scale,
        0 if sink is None else sink.data_ptr(),
        out.data_ptr(),
        out_dtype is torch.float32,
        lse.data_ptr(),
        0,
    )
    return None if ran < 0 else (out, lse)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself when its last dimension is contiguous, else a contiguous copy."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _flat(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _sparse_decode(
    q: torch.Tensor,
    cache0: torch.Tensor,
    indices0: torch.Tensor,
    length0: torch.Tensor | None,
    cache1: torch.Tensor | None,
    indices1: torch.Tensor | None,
    length1: torch.Tensor | None,
    geometry: list[int],
    softmax_scale: float,
    attn_sink: torch.Tensor | None,
    out_dtype: torch.dtype,
    memory_limit: int,
    checks: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    q, sink = _rows(q), _flat(attn_sink)
    indices0, length0 = _rows(indices0), _flat(length0)
    half = len(geometry) if cache1 is None else len(geometry) // 2
    scope0 = _scope(cache0, indices0, length0, geometry[:half])
    scope1: tuple[Any, ...] = ()
    if cache1 is not None and indices1 is not None:
        indices1, length1 = _rows(indices1), _flat(length1)
        scope1 = _scope(cache1, indices1, length1, geometry[half:])
    result = _attend(q, scope0, scope1, softmax_scale, sink, out_dtype, checks)
    if result is None:
        _raise_bad_slot(((cache0, indices0, length0), (cache1, indices1, length1)), geometry, half)
    return result


def _decode_directly(call: SparseDecodeCall) -> tuple[torch.Tensor, torch.Tensor] | None:
    """What the operator computes, without the 8 us in which torch carries thirteen arguments to it. None: take the
    operator, because somebody watches operators (a compiler, a tracer, a mode, a profiler), or a tensor must be copied
    first, or a slot is out of range."""
    q, sink, scopes = call.q, call.attn_sink, call.scopes
    if (
        q.__class__ is not torch.Tensor
        or q.stride(-1) != 1
        or (sink is not None and not sink.is_contiguous())
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._is_torch_function_mode_enabled()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or torch._C._autograd._profiler_enabled()
    ):
        return None
    scope0 = _call_scope(scopes[0])
    scope1 = _call_scope(scopes[1]) if len(scopes) == 2 else ()
    if scope0 is None or scope1 is None:
        return None
    return _attend(q, scope0, scope1, call.softmax_scale, sink, call.out_dtype, call.checks)


def _raise_bad_slot(scopes: Any, geometry: list[int], half: int) -> NoReturn:
    """The core found a slot or length out of range; the reference's own check words the error."""
    for number, (cache, indices, length) in enumerate(scopes):
        if cache is not None:
            slots = PagedCache.from_geometry(cache, geometry[half * number : half * (number + 1)]).num_slots
            check_slots("sparse_decode", f"scopes[{number}]", indices, slots, length)
    raise SparseMlaError("sparse_decode: the native core refused a slot that the reference accepts; this is a bug.")


def _sparse_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    topk_length: torch.Tensor | None,
    softmax_scale: float,
    attn_sink: torch.Tensor | None,
    out_dtype: torch.dtype,
    memory_limit: int,
    checks: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    s_q, h_q, d = q.shape
    q, kv, indices, sink, length = _rows(q), _rows(kv), _rows(indices), _flat(attn_sink), _flat(topk_length)
    if checks:
        check_lengths("sparse_prefill", length)
    # A gathered buffer is a cache of one-record pages whose block stride is the row stride.
    row_bytes = kv.stride(0) * kv.element_size()
    layout = (_native.BF16_ROW, 1, row_bytes, row_bytes, 0, 0, kv.shape[0])
    lists = (indices.data_ptr(), (indices.stride(0), 0), indices.shape[2], _address(length))
    out = with_huge_pages(torch.empty((s_q, h_q, d), dtype=out_dtype))
    max_logits = torch.empty((s_q, h_q), dtype=torch.float32)
    lse = torch.empty((s_q, h_q), dtype=torch.float32)
    target, threads = _plan()
    _native.attention(
        target,
        threads,
        False,
        True,
        q.data_ptr(),
        (s_q, 1, h_q),
        (q.stride(0), 0, q.stride(1)),
        (kv.data_ptr(), layout, *lists),
        (),
        softmax_scale,
        _address(sink),
        out.data_ptr(),
        out_dtype == torch.float32,
        lse.data_ptr(),
        max_logits.data_ptr(),
    )
    return out, max_logits, lse


def _merge_partials(
    outs: list[torch.Tensor],
    lses: list[torch.Tensor],
    attn_sink: torch.Tensor | None,
    out_dtype: torch.dtype,
    memory_limit: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    n, h, d = outs[0].shape
    parts = [out.contiguous() for out in outs]
    weights = [lse.contiguous() for lse in lses]
    sink = _flat(attn_sink)
    out = with_huge_pages(torch.empty((n, h, d), dtype=out_dtype))
    lse = torch.empty((n, h), dtype=torch.float32)
    target, threads = _plan()
    _native.merge_partials(
        target,
        threads,
        tuple(part.data_ptr() for part in parts),
        parts[0].dtype == torch.float32,
        tuple(weight.data_ptr() for weight in weights),
        _address(sink),
        h,
        n * h,
        d,
        out.data_ptr(),
        out_dtype == torch.float32,
        lse.data_ptr(),
    )
    return out, lse


def _register() -> None:
    from . import native_operator

    decode = native_operator.register()
    prefill = opaque("sparse_prefill", "native", PREFILL_SCHEMA, _sparse_prefill, fake_prefill)
    merge = opaque("merge_partials", "native", MERGE_SCHEMA, _merge_partials, fake_merge)

    @SPARSE_DECODE.impl("native", limits=Limits(), tolerance=WITHIN_2X_BF16)
    def run_decode(call: SparseDecodeCall) -> Any:
        result = None if torch.compiler.is_compiling() else _decode_directly(call)
        return decode(*call.flat()) if result is None else result

    @SPARSE_PREFILL.impl("native", limits=Limits(), tolerance=WITHIN_2X_BF16)
    def run_prefill(call: SparsePrefillCall) -> Any:
        return prefill(*call.flat())

    @MERGE_PARTIALS.impl("native", limits=Limits(), tolerance=WITHIN_2X_BF16, rule=_no_float64_parts)
    def run_merge(call: MergePartialsCall) -> Any:
        return merge(*call.flat())


def _no_float64_parts(call: MergePartialsCall) -> list[str]:
    return ["parts must be float32 or bfloat16, got float64"] if call.outs[0].dtype == torch.float64 else []


if _native is not None:
    _register()
    from . import native_index, native_store  # noqa: F401  (they register theirs; both build on the names above)
