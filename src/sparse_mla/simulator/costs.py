# SPDX-License-Identifier: Apache-2.0
"""What one instruction and one DMA cost, by formula.

Cycle formulas are those AWS documents per instruction (N is elements per partition; MIN the 64-cycle initiation
interval); where a page gives none the entry says `assumed`. Rates and latencies of DMA fit the documented points: one
engine moves 8 runs of 4 KiB in 1416 ns, below 256 B per partition it is severely bound, 2 KiB and more are fine.

Nothing here was measured on a device by this project.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .core import DMA, GPSIMD, SCALAR, SYNC, TENSOR, VECTOR, Operand, Record

__all__ = ["ASSUMED", "DOCUMENTED", "STORE_RING", "Clocks", "by_generation", "cycles", "dma_issue_us", "dma_work_us"]


@dataclass(frozen=True)
class Clocks:
    """Rates and latencies of one generation. Times in microseconds, rates in bytes per microsecond."""

    ghz: dict[str, float]  # per engine
    dma_engines: int
    descriptor_us: float  # per descriptor, whatever its size
    dma_bytes_per_us: float  # of one DMA engine
    dma_start_us: float = 1.3  # from trigger to first byte
    dma_receipt_us: float = 0.7  # from last byte to the semaphore
    trigger_us: float = 0.06  # starting a transfer whose descriptors the host built
    hwdge_issue_us: float = 0.6  # one instruction of the hardware descriptor engine, on its issuing engine
    swdge_issue_us: float = 1.2  # descriptors for 128 rows built by GpSimd, which does nothing else meanwhile
    swdge_rows: int = 128
    result_us: float = 0.06  # from the end of an instruction to its result being readable
    barrier_us: float = 2.0
    sendrecv_us: float = 2.0
    kernel_boundary_us: float = 30.0  # around one kernel inside a compiled graph; never part of the body


_TRN1 = Clocks({TENSOR: 2.8, VECTOR: 1.12, SCALAR: 1.4, GPSIMD: 1.4, SYNC: 1.4}, 16, 0.090, 20_100.0)
_TRN2 = Clocks({TENSOR: 2.4, VECTOR: 0.96, SCALAR: 1.2, GPSIMD: 1.2, SYNC: 1.2}, 16, 0.028, 27_200.0)
_TRN3 = Clocks({TENSOR: 2.4, VECTOR: 1.2, SCALAR: 1.2, GPSIMD: 1.2, SYNC: 1.2}, 16, 0.017, 38_400.0)
HBM_PIECE_BYTES = 4096
TINY_DESCRIPTOR_BYTES, TINY_DESCRIPTOR_US = 64, 0.028  # on every generation but trn1, which is slower anyway


def by_generation(gen: int) -> Clocks:
    return {2: _TRN1, 3: _TRN2, 4: _TRN3}[gen]


MIN = 64  # cycles between two starts on one engine
DYNAMIC_MIN = 600  # cycles of an on-chip access whose address a register holds
GPSIMD_START = 150
TWO_BYTE_FLOATS = ("bfloat16", "float16")
STORE_RING = f"{SYNC}-store"
REGISTER_US = 0.1  # assumed: register moves and loads on the sequencer


def _two_byte(o: Operand) -> bool:
    return o.dtype in TWO_BYTE_FLOATS


def _copy(r: Record, gen: int) -> float:
    """tensor_copy and tensor_scalar: 2- and 4-fold modes exist on Vector from trn2 on, for 2-byte floats only."""
    n = float(r.elements)
    tiles = [*r.writes, *[o for o in r.reads if o.elements == r.elements]]
    if gen >= 3 and r.engine == VECTOR and all(_two_byte(o) for o in tiles):
        psum = any(o.memory == "psum" for o in tiles)
        plain = all(o.contiguous and not o.stride0 for o in tiles)
        n = n / 4 if plain and not psum else n / 2
    return max(MIN, n)


def _tensor_tensor(r: Record, gen: int) -> float:
    n = float(r.elements)
    tiles = [*r.writes, *r.reads]
    fast = all(_two_byte(o) and o.memory == "sbuf" and o.contiguous and not o.stride0 for o in tiles)
    if any(o.memory == "psum" for o in r.reads) or (fast and r.detail.get("op") in ("add", "multiply", "subtract")):
        return max(MIN, n)
    return max(MIN, 2 * n)


def _scalar_tensor_tensor(r: Record, gen: int) -> float:
    n = float(r.elements)
    fast = all(_two_byte(o) for o in (*r.writes, *r.reads[:2])) and r.elements % 2 == 0
    if fast and (r.detail.get("op"), r.detail.get("op1")) == ("subtract", "multiply"):
        return max(MIN, n)
    return max(MIN, 2 * n)


def _reduce(r: Record, gen: int) -> float:
    n = float(r.elements)
    fast = all(_two_byte(o) for o in (*r.writes, *r.reads)) and r.detail.get("op") in ("add", "maximum")
    return max(MIN, n / 2 if fast else n)


def _activation(r: Record, gen: int) -> float:
    return max(MIN, float(r.elements)) + (MIN if r.detail.get("reads_register") else 0)


def _matmul(r: Record, gen: int) -> float:
    d = r.detail
    base = float(max(min(64, d["m"]), d["n"]))
    if not d["fp32"]:
        return base
    return base * (2.0 if d["transpose"] else 4.0)


def _transpose(r: Record, gen: int) -> float:
    if r.engine == VECTOR:
        return max(MIN, float(r.elements))
    base = float(max(r.detail["k"], min(64, r.detail["m"])))
    return base * 2 if r.detail["fp32"] else base


def _predicated(r: Record, gen: int) -> float:
    split = len({o.memory for o in r.reads}) > 1
    return max(MIN, float(r.elements) if split else 2.0 * r.elements)


def _memset(r: Record, gen: int) -> float:
    half = r.detail.get("zero") and _two_byte(r.writes[0])
    return max(MIN, r.elements / 2 if half else float(r.elements))


def _local_gather(r: Record, gen: int) -> float:
    each, size = r.detail["num_elem_per_idx"], r.reads[0].itemsize
    rate = ((28 + 4 * each) / (4 * each)) / min(4 / size, each)
    return GPSIMD_START + float(r.detail["indices"] * each / rate)


def _plain(factor: float = 1.0, start: float = 0.0) -> Callable[[Record, int], float]:
    return lambda r, gen: start + max(MIN, factor * r.elements)


_CYCLES: dict[str, Callable[[Record, int], float]] = {
    "nc_matmul": _matmul,
    "nc_transpose": _transpose,
    "tensor_copy": _copy,
    "tensor_scalar": _copy,
    "tensor_tensor": _tensor_tensor,
    "scalar_tensor_tensor": _scalar_tensor_tensor,
    "tensor_reduce": _reduce,
    "tensor_scalar_reduce": _plain(start=MIN),
    "select_reduce": _plain(start=MIN),
    "tensor_tensor_scan": _plain(2),
    "tensor_scalar_cumulative": _plain(2),
    "tensor_copy_predicated": _predicated,
    "activation": _activation,
    "activation_reduce": lambda r, gen: _activation(r, gen) + (0 if r.detail.get("reads_register") else MIN),
    "reciprocal": _plain(8),
    "memset": _memset,
    "iota": _plain(start=GPSIMD_START),
    "affine_select": _plain(start=GPSIMD_START),
    "nc_stream_shuffle": _plain(),
    "range_select": _plain(),
    "max8": _plain(),
    "nc_find_index8": _plain(),
    "nc_match_replace8": _plain(),
    "bn_stats": _plain(),
    "bn_aggr": _plain(13 / 3),
    "local_gather": _local_gather,
    "nc_n_gather": lambda r, gen: GPSIMD_START * r.detail["groups"] + 2.0 * r.elements,
    "topk": lambda r, gen: 4.0 * r.detail["n"] + r.detail["k"],
    "tensor_partition_reduce": _plain(32, GPSIMD_START),
    "nonzero_with_count": _plain(2, GPSIMD_START),
}
# Formulas no page states. Every other opcode that is not listed at all counts as one pass over its elements.
ASSUMED = frozenset(
    {"nc_n_gather", "tensor_partition_reduce", "nonzero_with_count", "select_reduce", "tensor_scalar_cumulative"}
)
# Rates of transfers fit documented points; gathers by software descriptors and sums do not have any.
DOCUMENTED = (frozenset(_CYCLES) - ASSUMED) | {"dma_copy", "dma_transpose"}


def cycles(r: Record, gen: int) -> float:
    """Cycles the engine of this instruction is busy. Unlisted ones (convenience functions) count as one plain pass."""
    found = _CYCLES.get(r.opcode)
    n = found(r, gen) if found is not None else max(MIN, float(r.elements))
    if r.engine == GPSIMD and r.opcode in ("tensor_tensor", "tensor_copy", "tensor_scalar"):
        n = GPSIMD_START + 2.0 * r.elements  # assumed: software loops, no documented rate
    if r.detail.get("dynamic") and r.engine != DMA:
        n = max(n, DYNAMIC_MIN)
    return n


def dma_work_us(r: Record, clocks: Clocks) -> tuple[float, float]:
    """(time this transfer takes alone, share of the engine pool it uses) in microseconds."""
    d = r.detail
    count = d.get("descriptors") or 1
    size = d.get("descriptor_bytes") or d["bytes"] / count
    overhead = clocks.descriptor_us
    if size <= TINY_DESCRIPTOR_BYTES:
        overhead = max(overhead, TINY_DESCRIPTOR_US)
    if count < clocks.dma_engines and all(o.memory == "hbm" for o in (*r.reads[:1], *r.writes)):
        # assumed: a long run between two places in HBM is cut so that every engine has a piece
        count = max(count, min(clocks.dma_engines, int(d["bytes"]) // HBM_PIECE_BYTES))
        size = d["bytes"] / count
    each = overhead + size / clocks.dma_bytes_per_us
    if r.opcode == "dma_transpose":
        each /= 0.9 if d.get("hbm_read") else 0.5  # share of a copy's rate
    waves = -(-count // clocks.dma_engines)
    return waves * each, count * each / clocks.dma_engines


def dma_issue_us(r: Record, clocks: Clocks, gen: int) -> tuple[str, float]:
    """(issuing queue, time that queue is busy). A DMA that names no mode is taken as hardware descriptors issued by the
    Sync engine, loads and stores in rings of their own; casts and trn1 need descriptors the host built."""
    d = r.detail
    if d.get("dge") == "swdge" or d.get("indirect"):
        rows = max(1, d.get("rows") or clocks.swdge_rows)
        return GPSIMD, clocks.swdge_issue_us * -(-rows // clocks.swdge_rows)
    store = bool(d.get("hbm_written"))
    ring = STORE_RING if store else SYNC
    if d.get("dge") == "hwdge":
        queue = d.get("queue") or SYNC
        return (queue if queue == SCALAR else ring), clocks.hwdge_issue_us
    if d.get("dge") == "none" or d.get("cast") or gen < 3:
        return ring, clocks.trigger_us
    return ring, clocks.hwdge_issue_us
