#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Published times of whole kernels beside the simulator's estimates, with their ratio - the bad ones too.

    NEURON_SDK_DIR=<checkout of aws-neuron/aws-neuron-sdk> python tools/simulator_calibration.py
    python tools/simulator_calibration.py --ours          # only the rows that need nothing of others
    ... --json bench/simulator_calibration.json                 # keep the rows for the documentation

Rows of the tutorials run the tutorials' own kernels, unmodified, from that checkout; nothing of it is copied. A large
problem is estimated on a part of it and scaled by the stated factor: its loops repeat the same instructions.
No figure here was measured by this project. Published ones come from profiles and reports of others.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparse_mla import simulator
from sparse_mla.simulator import SimulatorParams
from sparse_mla.testing import simulator_bench as bench

MATMUL = "nki/examples/matrix_multiplication/matrix_multiplication_nki_kernels.py"
MAMBA = "nki/examples/fused_mamba/mamba_nki_kernels.py"
MATMUL_PROFILE = "profile in the kernel optimization tutorial (trn2, 4096 x 8192 x 8192 float32)"
MAMBA_TUTORIAL = "fused Mamba tutorial (device not named; trn1 assumed)"


@dataclass(frozen=True)
class Row:
    """One kernel."""

    kernel: str
    source: str
    target: str
    published_us: float
    estimated_us: float
    scale: float  # the estimate is of 1 / scale of the problem, times this
    bound_by: str
    remark: str = ""

    @property
    def ratio(self) -> float:
        return self.estimated_us / self.published_us


def run(kernel: Any, *args: Any, gen: int = 3, **constants: Any) -> simulator.Run:
    # values do not matter here, and checks are another test's subject
    params = SimulatorParams(gen=gen, checks=False, aws_compat=True, show_warnings=False)
    return simulator.run(kernel, *args, params=params, **constants)


def load(root: Path, path: str) -> Any:
    simulator.install(force=True)
    spec = importlib.util.spec_from_file_location(Path(path).stem, root / path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"simulator_calibration: {root / path} cannot be loaded.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def matmul_rows(root: Path) -> Iterator[Row]:
    """The tutorial's kernels on 1/32 of the profiled problem, whose contraction is kept."""
    module = load(root, MATMUL)
    published = (
        ("nki_matmul_tiled_", 39_890.0, "loads both tiles for every matmul"),
        ("nki_matmul_hoist_load_", 28_200.0, "loads hoisted out of the inner loop"),
        ("nki_matmul_block_free_dimension_", 28_410.0, "blocks of rows and columns"),
        ("nki_matmul_fully_optimized_", 28_300.0, "blocks of all dimensions"),
    )
    for name, microseconds, remark in published:
        # (rows, columns, how much smaller): the last kernel needs whole blocks of 2048 x 1024
        m, n, scale = (2048, 1024, 16.0) if "fully" in name else (1024, 1024, 32.0)
        a, b = np.ones((8192, m), np.float32), np.ones((8192, n), np.float32)
        e = run(getattr(module, name), a, b).estimate
        yield Row(name.strip("_"), MATMUL_PROFILE, "trn2", microseconds, e.total_us * scale, scale, e.bound_by, remark)


def mamba_rows(root: Path) -> Iterator[Row]:
    module = load(root, MAMBA)
    for name, channels, length, microseconds, part in (
        ("mamba_v1", 256, 512, 172.93, 1),
        ("mamba_v1", 4096, 512, 2340.0, 8),
        ("mamba_v2", 4096, 512, 1610.0, 8),
        ("mamba_v3", 4096, 8192, 27_800.0, 16),
    ):
        c = channels // part
        x = np.ones((1, c, length), np.float32)
        state = np.ones((1, 16, length), np.float32)
        e = run(getattr(module, name), x, x, np.ones((c, 16), np.float32), state, state, gen=2).estimate
        label = f"{name}, {channels} channels x {length}"
        yield Row(label, MAMBA_TUTORIAL, "trn1", microseconds, e.total_us * part, float(part), e.bound_by)


def our_rows() -> Iterator[Row]:
    """Published times of kernels whose source is not ours to run: our kernel of the same structure and sizes."""
    same = "our kernel of the same structure"
    q, table, index = bench.attention_arguments(1, heads=1, keys=2048)
    report = "third-party report, trn2, decode of 2048 gathered rows of 512 as one LNC2 program"
    for label, contiguous, microseconds in (("1 head, contiguous", True, 58.7), ("1 head, gathered", False, 101.8)):
        e = run(bench.attention, q, table, index, contiguous=contiguous).estimate
        yield Row(f"decode attention, {label}", report, "trn2", microseconds, e.total_us, 1.0, e.bound_by, same)
    four = bench.attention_arguments(4, heads=1, keys=2048)
    e = run(bench.attention, *four).estimate
    yield Row("decode attention, 4 queries, gathered", report, "trn2", 311.8, e.total_us, 1.0, e.bound_by, same)
    report = "third-party report, trn1, sparse decode of 64 heads over fp8 rows, per row"
    for keys, microseconds in ((640, 40.5), (128, 14.9)):
        arguments = bench.attention_arguments(8, heads=64, keys=keys)
        e = run(bench.attention, *arguments, gen=2).estimate
        remark = "our kernel reads bfloat16 rows and decodes nothing"
        yield Row(
            f"sparse decode, {keys} slots", report, "trn1", microseconds, e.total_us / 8, 1 / 8, e.bound_by, remark
        )
    a, b = bench.matmul_arguments(2048)
    e = run(blocked_matmul, a, b).estimate
    peak = 2 * 2048**3 / 78.6e6  # microseconds at 78.6 TFLOP/s
    report = "nki-autotune, trn2, best hand-written: 90.9 % of the bfloat16 peak"
    yield Row("matmul 2048^3 bfloat16", report, "trn2", peak / 0.909, e.total_us, 1.0, e.bound_by, same)


def blocked_matmul(lhs_t: Any, rhs: Any) -> Any:
    """[K, M], [K, N] -> [M, N]: both operands stay in SBUF, one load per 128 rows of either."""
    from sparse_mla.simulator import isa as nisa
    from sparse_mla.simulator import language as nl

    p, f = nl.tile_size.pmax, nl.tile_size.gemm_moving_fmax
    k_size, m_size = lhs_t.shape
    n_size = rhs.shape[1]
    out = nl.ndarray((m_size, n_size), lhs_t.dtype, buffer=nl.shared_hbm, name="out")
    left, right = [], []
    for k in range(0, k_size, p):
        a = nl.ndarray((p, m_size), lhs_t.dtype, buffer=nl.sbuf)
        b = nl.ndarray((p, n_size), rhs.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=a, src=lhs_t[k : k + p])
        nisa.dma_copy(dst=b, src=rhs[k : k + p])
        left.append(a)
        right.append(b)
    for m in range(0, m_size, p):
        row = nl.ndarray((p, n_size), out.dtype, buffer=nl.sbuf)
        for n in range(0, n_size, f):
            sums = nl.ndarray((p, f), nl.float32, buffer=nl.psum)
            for k in range(len(left)):
                nisa.nc_matmul(dst=sums, stationary=left[k][:, m : m + p], moving=right[k][:, n : n + f])
            nisa.tensor_copy(dst=row[:, n : n + f], src=sums)
        nisa.dma_copy(dst=out[m : m + p], src=row)
    return out


def markdown(rows: list[Row]) -> str:
    lines = ["| kernel | published | estimated | ratio | bound by | source |", "|---|---:|---:|---:|---|---|"]
    for r in rows:
        note = f"; {r.remark}" if r.remark else ""
        lines.append(
            f"| {r.kernel} | {r.published_us:,.1f} us | {r.estimated_us:,.1f} us | {r.ratio:.2f} | {r.bound_by} | "
            f"{r.source}{note} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", action="store_true", help="leave the tutorials' kernels out")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    given = os.environ.get("NEURON_SDK_DIR", "")
    parts: list[Callable[[], Iterator[Row]]] = []
    if not options.ours:
        if not (Path(given) / MATMUL).is_file():
            print(f"simulator_calibration: NEURON_SDK_DIR must hold {MATMUL}, got {given!r}.", file=sys.stderr)
            return 2
        parts = [lambda: matmul_rows(Path(given)), lambda: mamba_rows(Path(given))]
    rows: list[Row] = []
    for part in [*parts, our_rows]:
        for row in part():
            print(f"{row.kernel}: {row.ratio:.2f}", file=sys.stderr, flush=True)
            rows.append(row)
    print(markdown(rows))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
