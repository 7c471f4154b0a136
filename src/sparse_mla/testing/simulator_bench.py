# SPDX-License-Identifier: Apache-2.0
"""How fast the simulator itself is: two kernels, with and without checks and time, and the fixed cost of instructions.

    sparse-mla bench --op simulator            # all of it, about a minute
    sparse-mla bench --op simulator --quick    # a quarter of the sizes

The kernels are ordinary NKI: a tiled matrix multiply, and attention of a few heads over gathered rows, row by row.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from .. import simulator
from ..simulator import SimulatorParams
from ..simulator import isa as nisa
from ..simulator import language as nl

__all__ = [
    "LIMITS",
    "Measurement",
    "attention",
    "attention_arguments",
    "main",
    "matmul",
    "matmul_arguments",
    "measure",
    "report",
]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def matmul(lhs_t: Any, rhs: Any) -> Any:
    """[K, M], [K, N] -> [M, N] by tiles of 128 x 128 x 512; rows of lhs stay, columns of rhs are loaded again."""
    k_tile, m_tile, n_tile = nl.tile_size.pmax, nl.tile_size.gemm_stationary_fmax, nl.tile_size.gemm_moving_fmax
    k_size, m_size = lhs_t.shape
    n_size = rhs.shape[1]
    out = nl.ndarray((m_size, n_size), lhs_t.dtype, buffer=nl.shared_hbm, name="out")
    for m in range(0, m_size, m_tile):
        stationary = []
        for k in range(0, k_size, k_tile):
            tile = nl.ndarray((k_tile, m_tile), lhs_t.dtype, buffer=nl.sbuf)
            nisa.dma_copy(dst=tile, src=lhs_t[k : k + k_tile, m : m + m_tile])
            stationary.append(tile)
        for n in range(0, n_size, n_tile):
            sums = nl.ndarray((m_tile, n_tile), nl.float32, buffer=nl.psum)
            for k in range(0, k_size, k_tile):
                moving = nl.ndarray((k_tile, n_tile), rhs.dtype, buffer=nl.sbuf)
                nisa.dma_copy(dst=moving, src=rhs[k : k + k_tile, n : n + n_tile])
                nisa.nc_matmul(dst=sums, stationary=stationary[k // k_tile], moving=moving)
            result = nl.ndarray((m_tile, n_tile), out.dtype, buffer=nl.sbuf)
            nisa.tensor_copy(dst=result, src=sums)
            nisa.dma_copy(dst=out[m : m + m_tile, n : n + n_tile], src=result)
    return out


def matmul_arguments(size: int, seed: int = 0) -> tuple[Any, Any]:
    """Two square bfloat16 matrices."""
    g = np.random.default_rng(seed)
    return tuple(g.standard_normal((size, size), np.float32).astype(BFLOAT16) for _ in range(2))  # type: ignore[return-value]


def attention(q: Any, table: Any, index: Any, contiguous: bool = False) -> Any:
    """Each query row (h heads of d) attends to its rows of `table`; keys are values.

    Dimensions: q [rows, h, d], table [slots, d], index [chunks * 128, rows] int32, out [rows, h, d]. With `contiguous`
    row r reads table rows 0 .. chunks * 128 and `index` is not used.
    """
    p, f_max = nl.tile_size.pmax, nl.tile_size.gemm_moving_fmax
    rows, heads, d = q.shape
    chunks, parts = index.shape[0] // p, d // p
    scale = d**-0.5
    out = nl.ndarray(q.shape, q.dtype, buffer=nl.shared_hbm, name="out")
    identity = nl.ndarray((p, p), nl.bfloat16, buffer=nl.sbuf)
    ones = nl.ndarray((p, p), nl.bfloat16, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    nisa.affine_select(
        dst=identity, pattern=[[-1, p]], channel_multiplier=1, on_true_tile=ones, on_false_value=0.0, cmp_op=nl.equal
    )
    slots = []
    for c in range(chunks):
        column = nl.ndarray((p, rows), nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(dst=column, src=index[c * p : (c + 1) * p, 0:rows])
        slots.append(column)
    for r in range(rows):
        values = nl.ndarray((p, chunks, d), table.dtype, buffer=nl.sbuf)
        for c in range(chunks):
            if contiguous:
                nisa.dma_copy(dst=values[:, c, :], src=table[c * p : (c + 1) * p, 0:d])
            else:
                source = table.ap([[d, p], [1, d]], vector_offset=slots[c][0:p, r : r + 1], indirect_dim=0)
                nisa.dma_copy(dst=values[:, c, :], src=source)
        query = nl.ndarray((heads, d), q.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=query, src=q[r])
        query_t = nl.ndarray((p, parts, heads), nl.bfloat16, buffer=nl.sbuf)
        turned = nl.ndarray((p, parts, heads), nl.bfloat16, buffer=nl.psum)
        for j in range(parts):
            nisa.nc_transpose(dst=turned[:, j, :], data=query[:, j * p : (j + 1) * p])
        nisa.tensor_copy(dst=query_t, src=turned)
        keys_t = nl.ndarray((p, parts, chunks * p), nl.bfloat16, buffer=nl.sbuf)
        for c in range(chunks):
            bank = nl.ndarray((p, parts, p), nl.bfloat16, buffer=nl.psum)
            for j in range(parts):
                nisa.nc_transpose(dst=bank[:, j, :], data=values[:, c, j * p : (j + 1) * p])
            engine = nisa.engine.vector if c % 2 == 0 else nisa.engine.scalar
            nisa.tensor_copy(dst=keys_t[:, :, c * p : (c + 1) * p], src=bank, engine=engine)
        probabilities = nl.ndarray((heads, chunks * p), nl.bfloat16, buffer=nl.sbuf)
        tops = nl.ndarray((heads, -(-chunks * p // f_max)), nl.float32, buffer=nl.sbuf)
        scores = []
        for first in range(0, chunks * p, f_max):
            width = min(f_max, chunks * p - first)
            bank = nl.ndarray((heads, width), nl.float32, buffer=nl.psum)
            for j in range(parts):
                nisa.nc_matmul(dst=bank, stationary=query_t[:, j, :], moving=keys_t[:, j, first : first + width])
            at = first // f_max
            nisa.tensor_reduce(dst=tops[:, at : at + 1], op=nl.maximum, data=bank, axis=1)
            scores.append(bank)
        top = nl.ndarray((heads, 1), nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=top, op=nl.maximum, data=tops, axis=1, negate=True)
        nisa.tensor_scalar(dst=top, data=top, op0=nl.multiply, operand0=scale)
        total = nl.ndarray((heads, 1), nl.float32, buffer=nl.sbuf)
        for i in range(len(scores)):
            last = i == len(scores) - 1
            nisa.activation(
                dst=probabilities[:, i * f_max : i * f_max + scores[i].shape[1]], op=nl.exp, data=scores[i], bias=top,
                scale=scale, reduce_op=nl.add, reduce_res=total if last else None,
                reduce_cmd=nisa.reduce_cmd.reset_reduce if i == 0 else nisa.reduce_cmd.reduce,
            )  # fmt: skip
        weights_t = nl.ndarray((p, chunks, heads), nl.bfloat16, buffer=nl.sbuf)
        turned = nl.ndarray((p, chunks, heads), nl.bfloat16, buffer=nl.psum)
        for c in range(chunks):
            nisa.nc_transpose(dst=turned[:, c, :], data=probabilities[:, c * p : (c + 1) * p])
        nisa.tensor_copy(dst=weights_t, src=turned)
        mixed = nl.ndarray((heads, d), nl.float32, buffer=nl.psum)
        for c in range(chunks):
            nisa.nc_matmul(dst=mixed, stationary=weights_t[:, c, :], moving=values[:, c, :])
        inverse = nl.ndarray((heads, 1), nl.float32, buffer=nl.sbuf)
        nisa.reciprocal(dst=inverse, data=total)
        result = nl.ndarray((heads, d), q.dtype, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=result, data=mixed, op0=nl.multiply, operand0=inverse)
        nisa.dma_copy(dst=out[r], src=result)
    return out


def attention_arguments(
    rows: int, heads: int = 64, keys: int = 640, width: int = 512, slots: int = 4096, seed: int = 0
) -> tuple[Any, Any, Any]:
    """Queries, a table, and distinct slots per row."""
    g = np.random.default_rng(seed)
    q = g.standard_normal((rows, heads, width), np.float32).astype(BFLOAT16)
    table = g.standard_normal((slots, width), np.float32).astype(BFLOAT16)
    index = np.stack([g.permutation(slots)[:keys] for _ in range(rows)], 1).astype(np.int32)
    return q, table, index


@dataclass(frozen=True)
class Measurement:
    """Processor seconds of one kernel in the simulator."""

    name: str
    instructions: int
    full: float  # checks, records and the estimate
    bare: float  # neither checks nor time

    @property
    def share(self) -> float:
        """Part of the time that checks and estimate take."""
        return 1.0 - self.bare / self.full

    @property
    def microseconds(self) -> float:
        """Per instruction, everything included."""
        return self.full / self.instructions * 1e6


# What the simulator is held to on one core of a recent server: seconds, checks and time included.
LIMITS = {"matmul 2048^3": 3.0, "attention 14,000 instructions": 15.0, "fixed cost per instruction": 100e-6}


def measure(name: str, kernel: Callable[..., Any], arguments: tuple[Any, ...], rounds: int = 3) -> Measurement:
    """Median processor times, the two settings in turns (one thread: BLAS is held to one inside a launch)."""
    on = SimulatorParams(gen=3, show_warnings=False)
    off = SimulatorParams(gen=3, show_warnings=False, checks=False, timing=False)
    full, bare, instructions = [], [], 0
    for _ in range(rounds):
        start = time.process_time()
        result = simulator.run(kernel, *arguments, params=on)
        _ = result.estimate
        full.append(time.process_time() - start)
        start = time.process_time()
        simulator.run(kernel, *arguments, params=off)
        bare.append(time.process_time() - start)
        instructions = result.instructions
    return Measurement(name, instructions, statistics.median(full), statistics.median(bare))


def _small_operations(a: Any, count: int = 2000) -> Any:
    """Instructions on tiles so small that only their fixed cost is left."""
    out = nl.ndarray((1, 1), nl.float32, buffer=nl.shared_hbm, name="out")
    x = nl.ndarray((1, 1), nl.float32, buffer=nl.sbuf)
    y = nl.ndarray((1, 1), nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=x, src=a)
    for _ in range(count // 4):
        nisa.tensor_copy(dst=y, src=x)
        nisa.tensor_scalar(dst=x, data=y, op0=nl.add, operand0=1.0)
        nisa.activation(dst=y, op=nl.copy, data=x)
        nisa.dma_copy(dst=x, src=y)
    nisa.dma_copy(dst=out, src=x)
    return out


def measurements(*, small: bool = False, rounds: int = 3) -> list[Measurement]:
    """All of them. `small`: sizes for a test."""
    size, rows = (1024, 16) if small else (2048, 220)
    label = "attention 14,000 instructions" if not small else f"attention {rows} rows"
    return [
        measure(f"matmul {size}^3", matmul, matmul_arguments(size), rounds),
        measure(label, attention, attention_arguments(rows), rounds),
        measure("fixed cost per instruction", _small_operations, (np.ones((1, 1), np.float32),), rounds),
    ]


def report(*, small: bool = False, out: Path | None = None) -> str:
    """Measure and describe in a table; `out`: also write the rows to this JSON file."""
    measured = measurements(small=small)
    lines = [
        f"{'kernel':32s}{'instructions':>13s}{'s':>8s}{'bare s':>8s}{'checks+time':>12s}{'us each':>9s}{'limit':>10s}"
    ]
    for m in measured:
        limit = LIMITS.get(m.name)
        text = "" if limit is None else f"{limit:.0f} s" if limit >= 1 else f"{limit * 1e6:.0f} us"
        lines.append(
            f"{m.name:32s}{m.instructions:13,d}{m.full:8.2f}{m.bare:8.2f}{100 * m.share:10.0f} %{m.microseconds:9.1f}"
            f"{text:>10s}"
        )
    if out is not None:
        out.write_text(json.dumps([asdict(m) for m in measured], indent=1) + "\n", encoding="utf-8")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a quarter of the sizes")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    print(report(small=options.small, out=options.json))


if __name__ == "__main__":
    main()
