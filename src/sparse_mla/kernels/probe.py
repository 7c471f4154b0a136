# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""Small kernels that settle what the documentation leaves open, one question each.

Each probe states what the simulator assumes, runs, and says what it found in words that can be compared. On a device
the answers are facts about it; on the simulator they show that the probes themselves work, and that the assumption is
what the simulator does. `table` makes Markdown for an issue.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .. import config
from ..errors import ArgumentError, SparseMlaError
from . import launch
from .nki import IS_SIMULATOR, nisa, nki, nl

__all__ = ["PROBES", "Probe", "ProbeResult", "heading", "run_probes", "table"]

P = 128
TINY = {torch.float32: 2.0**-140, torch.bfloat16: 2.0**-130, torch.float16: 2.0**-20}
RAISE = 2.0**100
REPEATS = 400  # of the instruction that is timed


class Probe(NamedTuple):
    """One open question: how it is asked, what the simulator assumes, and how an answer is put into words."""

    name: str  # A1 .. A15
    question: str
    assumed: str
    matters: str  # what depends on it
    ask: Callable[[str, torch.device], str]


class ProbeResult(NamedTuple):
    name: str
    question: str
    assumed: str
    found: str

    @property
    def agrees(self) -> bool:
        return self.found == self.assumed


def sbuf(shape, dtype):
    return nl.ndarray(shape=shape, dtype=dtype, buffer=nl.sbuf)


def hbm(shape, dtype, name):
    return nl.ndarray(shape=shape, dtype=dtype, buffer=nl.shared_hbm, name=name)


def loaded(src, shape, dtype):
    """A tile of `shape` holding an HBM tensor."""
    tile = sbuf(shape=shape, dtype=dtype)
    nisa.dma_copy(dst=tile, src=src)
    return tile


# --- kernels ---------------------------------------------------------------------------------------------------------


@nki.jit
def cast_to_e4m3(x):
    """A1: bytes of fp32 values cast to float8_e4m3."""
    out = hbm(shape=x.shape, dtype=nl.uint8, name="out")
    tile = loaded(src=x, shape=x.shape, dtype=nl.float32)
    cast = sbuf(shape=x.shape, dtype=nl.float8_e4m3)
    nisa.tensor_copy(dst=cast, src=tile, engine=nisa.engine.vector)
    nisa.dma_copy(dst=out, src=cast.view(nl.uint8))
    return out


@nki.jit
def scale_subnormal(x):
    """A2: a subnormal number times 2^100 on Vector, Scalar, GpSimd and Tensor."""
    out = hbm(shape=(4, 1), dtype=nl.float32, name="out")
    tile = loaded(src=x, shape=(1, 1), dtype=x.dtype)
    vector = sbuf(shape=(1, 1), dtype=nl.float32)
    nisa.tensor_scalar(dst=vector, data=tile, op0=nl.multiply, operand0=RAISE, engine=nisa.engine.vector)
    nisa.dma_copy(dst=out[0:1, :], src=vector)
    scalar = sbuf(shape=(1, 1), dtype=nl.float32)
    nisa.activation(dst=scalar, op=nl.copy, data=tile, scale=RAISE)
    nisa.dma_copy(dst=out[1:2, :], src=scalar)
    factor = sbuf(shape=(1, 1), dtype=nl.float32)
    nisa.memset(dst=factor, value=RAISE, engine=nisa.engine.vector)
    gpsimd = sbuf(shape=(1, 1), dtype=nl.float32)
    nisa.tensor_tensor(dst=gpsimd, data1=tile, data2=factor, op=nl.multiply, engine=nisa.engine.gpsimd)
    nisa.dma_copy(dst=out[2:3, :], src=gpsimd)
    # The array multiplies like with like: a float32 factor for float32, else a bfloat16 one.
    other = sbuf(shape=(1, 1), dtype=nl.float32 if x.dtype == nl.float32 else nl.bfloat16)
    nisa.memset(dst=other, value=RAISE, engine=nisa.engine.vector)
    product = nl.ndarray(shape=(1, 1), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=product, stationary=tile, moving=other)
    tensor = sbuf(shape=(1, 1), dtype=nl.float32)
    nisa.tensor_copy(dst=tensor, src=product, engine=nisa.engine.vector)
    nisa.dma_copy(dst=out[3:4, :], src=tensor)
    return out


@nki.jit
def offset_of_slice(x):
    """A3: .ap with an offset on a row slice of [8, 8]."""
    out = hbm(shape=(1, 4), dtype=nl.float32, name="out")
    tile = sbuf(shape=(1, 4), dtype=nl.float32)
    nisa.dma_copy(dst=tile, src=x[2:6, :].ap(pattern=[[8, 1], [1, 4]], offset=3))
    nisa.dma_copy(dst=out, src=tile)
    return out


@nki.jit
def shift_bytes(x):
    """A4: uint8 shifted left by 4."""
    out = hbm(shape=x.shape, dtype=nl.uint8, name="out")
    tile = loaded(src=x, shape=x.shape, dtype=nl.uint8)
    shifted = sbuf(shape=x.shape, dtype=nl.uint8)
    nisa.tensor_scalar(dst=shifted, data=tile, op0=nl.left_shift, operand0=4, engine=nisa.engine.vector)
    nisa.dma_copy(dst=out, src=shifted)
    return out


@nki.jit
def sum_while_casting(x):
    """A5: the sum an activation takes while its result is rounded to bf16."""
    out = hbm(shape=(1, 1), dtype=nl.float32, name="out")
    tile = loaded(src=x, shape=x.shape, dtype=nl.float32)
    rounded = sbuf(shape=x.shape, dtype=nl.bfloat16)
    total = sbuf(shape=(1, 1), dtype=nl.float32)
    nisa.activation_reduce(dst=rounded, op=nl.copy, data=tile, reduce_op=nl.add, reduce_res=total)
    nisa.dma_copy(dst=out, src=total)
    return out


@nki.jit
def multiply_matrices(a, b):
    """A6, A9: [k, m]^T x [k, n] into fp32."""
    k, m = a.shape
    n = b.shape[1]
    out = hbm(shape=(m, n), dtype=nl.float32, name="out")
    stationary = loaded(src=a, shape=(k, m), dtype=a.dtype)
    moving = loaded(src=b, shape=(k, n), dtype=b.dtype)
    product = nl.ndarray(shape=(m, n), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=product, stationary=stationary, moving=moving)
    tile = sbuf(shape=(m, n), dtype=nl.float32)
    nisa.tensor_copy(dst=tile, src=product, engine=nisa.engine.vector)
    nisa.dma_copy(dst=out, src=tile)
    return out


@nki.jit
def cast_by_dma(x):
    """A7: fp32 to bf16 on the way."""
    out = hbm(shape=x.shape, dtype=nl.float32, name="out")
    tile = sbuf(shape=x.shape, dtype=nl.bfloat16)
    nisa.dma_copy(dst=tile, src=x)
    wide = sbuf(shape=x.shape, dtype=nl.float32)
    nisa.tensor_copy(dst=wide, src=tile, engine=nisa.engine.vector)
    nisa.dma_copy(dst=out, src=wide)
    return out


@nki.jit
def gather_few(x, idx):
    """A8: 4 rows by 4 indices, an index of -1 skipped."""
    rows = idx.shape[0]
    out = hbm(shape=(rows, x.shape[1]), dtype=nl.float32, name="out")
    column = loaded(src=idx, shape=(rows, 1), dtype=nl.int32)
    tile = sbuf(shape=(rows, x.shape[1]), dtype=nl.float32)
    nisa.memset(dst=tile, value=-7.0, engine=nisa.engine.vector)
    nisa.dma_copy(
        dst=tile,
        src=x.ap(pattern=[[x.shape[1], rows], [1, x.shape[1]]], vector_offset=column, indirect_dim=0),
        oob_mode=nisa.oob_mode.skip,
    )
    nisa.dma_copy(dst=out, src=tile)
    return out


@nki.jit
def activate(x, which):
    """A10, A15: one activation function."""
    out = hbm(shape=x.shape, dtype=nl.float32, name="out")
    tile = loaded(src=x, shape=x.shape, dtype=nl.float32)
    result = sbuf(shape=x.shape, dtype=nl.float32)
    if which == "exp":
        nisa.activation(dst=result, op=nl.exp, data=tile)
    elif which == "sigmoid":
        nisa.activation(dst=result, op=nl.sigmoid, data=tile)
    elif which == "log":
        nisa.activation(dst=result, op=nl.log, data=tile)
    else:
        nisa.reciprocal(dst=result, data=tile)
    nisa.dma_copy(dst=out, src=result)
    return out


@nki.jit
def multiply_often(x, y, is_broadcast, repeats):
    """A11: bf16 products, one operand broadcast along the free axis or not, many times."""
    out = hbm(shape=x.shape, dtype=nl.bfloat16, name="out")
    n = x.shape[1]
    tile = loaded(src=x, shape=x.shape, dtype=nl.bfloat16)
    other = loaded(src=y, shape=y.shape, dtype=nl.bfloat16)
    result = sbuf(shape=x.shape, dtype=nl.bfloat16)
    for i in range(repeats):
        if is_broadcast:
            nisa.tensor_tensor(
                dst=result.reshape_dim(1, (n // 32, 32)),
                data1=tile.reshape_dim(1, (n // 32, 32)),
                data2=other[:, 0 : n // 32].expand_dim(2).broadcast(2, 32),
                op=nl.multiply,
                engine=nisa.engine.vector,
            )
        else:
            nisa.tensor_tensor(dst=result, data1=tile, data2=other, op=nl.multiply, engine=nisa.engine.vector)
    nisa.dma_copy(dst=out, src=result)
    return out


@nki.jit
def mixed_operands(x, scale):
    """A12: x * (P, 1) tile + constant in one instruction."""
    out = hbm(shape=x.shape, dtype=nl.float32, name="out")
    tile = loaded(src=x, shape=x.shape, dtype=nl.float32)
    factor = loaded(src=scale, shape=scale.shape, dtype=nl.float32)
    result = sbuf(shape=x.shape, dtype=nl.float32)
    nisa.tensor_scalar(
        dst=result,
        data=tile,
        op0=nl.multiply,
        operand0=factor,
        op1=nl.add,
        operand1=3.0,
        engine=nisa.engine.vector,
    )
    nisa.dma_copy(dst=out, src=result)
    return out


@nki.jit
def mask_words(x, mask):
    """A13: 32-bit words and a mask above 2^24."""
    out = hbm(shape=x.shape, dtype=nl.int32, name="out")
    tile = loaded(src=x, shape=x.shape, dtype=nl.int32)
    masked = sbuf(shape=x.shape, dtype=nl.int32)
    nisa.tensor_scalar(dst=masked, data=tile, op0=nl.bitwise_and, operand0=mask, engine=nisa.engine.vector)
    nisa.dma_copy(dst=out, src=masked)
    return out


@nki.jit
def read_e4m3(x):
    """A14: bytes read as float8_e4m3."""
    out = hbm(shape=x.shape, dtype=nl.float32, name="out")
    tile = loaded(src=x, shape=x.shape, dtype=nl.uint8)
    wide = sbuf(shape=x.shape, dtype=nl.float32)
    nisa.tensor_copy(dst=wide, src=tile.view(nl.float8_e4m3), engine=nisa.engine.vector)
    nisa.dma_copy(dst=out, src=wide)
    return out


# --- asking ----------------------------------------------------------------------------------------------------------


def _run(backend: str, kernel: Any, **arguments: Any) -> torch.Tensor:
    out: torch.Tensor = launch.EXECUTORS[backend](kernel, 1, arguments)
    return out.cpu()


def _row(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor([list(values)], dtype=torch.float64).to(dtype).to(device)


def _listed(x: torch.Tensor) -> str:
    return ", ".join([f"{float(value):.9g}" for value in x.flatten()])


def _hex(x: torch.Tensor, digits: int) -> str:
    return ", ".join([f"0x{int(value) & (16**digits - 1):0{digits}X}" for value in x.flatten()])


def _ask_cast(backend: str, device: torch.device) -> str:
    return _hex(_run(backend, cast_to_e4m3, x=_row((240.0, 256.0, 1e6, -1e6), device)), 2)


def _ask_subnormals(backend: str, device: torch.device) -> str:
    said = []
    for dtype, tiny in TINY.items():
        out = _run(backend, scale_subnormal, x=_row((tiny,), device, dtype)).flatten()
        kept = [
            name
            for name, value in zip(("vector", "scalar", "gpsimd", "tensor"), out.tolist(), strict=True)
            if value != 0
        ]
        said.append(f"{str(dtype).removeprefix('torch.')} kept by {' '.join(kept) or 'none'}")
    return "; ".join(said)


def _ask_offset(backend: str, device: torch.device) -> str:
    x = torch.arange(64, dtype=torch.float32).reshape(8, 8).to(device)
    first = int(_run(backend, offset_of_slice, x=x)[0, 0])
    return {19: "added to the slice's base", 3: "replaces the slice's base"}.get(first, f"element {first}")


def _ask_shift(backend: str, device: torch.device) -> str:
    x = torch.tensor([[0xFF, 0x1F, 0x01]], dtype=torch.uint8, device=device)
    return _hex(_run(backend, shift_bytes, x=x), 2)


def _ask_sum(backend: str, device: torch.device) -> str:
    total = float(_run(backend, sum_while_casting, x=_row([1.0 + 2.0**-10] * 64, device)))
    return {64.0625: "before the cast", 64.0: "after the cast"}.get(total, f"a sum of {total!r}")


def _ask_order(backend: str, device: torch.device) -> str:
    terms = torch.ones((P, 1))
    terms[0], terms[P - 1] = 2.0**24, -(2.0**24)
    total = float(
        _run(backend, multiply_matrices, a=terms.bfloat16().to(device), b=torch.ones((P, 1)).bfloat16().to(device))
    )
    return "a sum between 0 and 126" if 0 <= total <= P - 2 else f"a sum of {total!r}"


def _ask_dma_cast(backend: str, device: torch.device) -> str:
    out = _run(backend, cast_by_dma, x=_row((1 + 2.0**-8, 1 + 3 * 2.0**-8), device)).flatten().tolist()
    known = {
        (1.0, 1.015625): "nearest, ties to even",
        (1.0, 1.0078125): "towards zero",
        (1.0078125, 1.015625): "nearest, ties up",
    }
    return known.get((out[0], out[1]), f"values {out}")


def _ask_gather(backend: str, device: torch.device) -> str:
    x = torch.arange(32, dtype=torch.float32).reshape(8, 4).to(device)
    idx = torch.tensor([[5], [-1], [2], [7]], dtype=torch.int32, device=device)
    return _listed(_run(backend, gather_few, x=x, idx=idx)[:, 0])


def _ask_fp32(backend: str, device: torch.device) -> str:
    product = float(_run(backend, multiply_matrices, a=_row((1 + 2.0**-23,), device), b=_row((1.0,), device)))
    return "all 24 bits" if product == 1 + 2.0**-23 else f"{product!r} for (1 + 2^-23) * 1"


def _ask_exp(backend: str, device: torch.device) -> str:
    return _listed(_run(backend, activate, x=_row((-1e30, -200.0, 0.0), device), which="exp"))


def _time_us(backend: str, is_broadcast: bool, device: torch.device) -> float:
    x = torch.ones((P, 512), dtype=torch.bfloat16, device=device)
    arguments: dict[str, Any] = {"x": x, "y": x, "is_broadcast": is_broadcast}
    if backend == "simulated":
        from ..simulator import SimulatorParams, run

        result = run(
            multiply_often, grid=1, params=SimulatorParams(timing=True, show_warnings=False), repeats=8, **arguments
        )
        return float(result.estimate.busy_us[0]["vector"])
    spent = []
    for repeats in (1, REPEATS):
        _run(backend, multiply_often, repeats=repeats, **arguments)
        begin = time.perf_counter()
        for _ in range(20):
            _run(backend, multiply_often, repeats=repeats, **arguments)
        spent.append(time.perf_counter() - begin)
    return spent[1] - spent[0]


def _ask_broadcast(backend: str, device: torch.device) -> str:
    ratio = _time_us(backend, True, device) / max(_time_us(backend, False, device), 1e-9)
    return "twice as long" if 1.5 < ratio < 2.8 else f"{ratio:.1f} times as long"


def _ask_mixed(backend: str, device: torch.device) -> str:
    return _listed(_run(backend, mixed_operands, x=_row((2.0, -1.0), device), scale=_row((5.0,), device)))


def _ask_masks(backend: str, device: torch.device) -> str:
    x = torch.full((1, 1), -1, dtype=torch.int32, device=device)
    masks = (0x1C1C1C1D, 0x08080809, 0x0F0F0F0F)
    out = torch.stack([_run(backend, mask_words, x=x, mask=mask).flatten()[0] for mask in masks])
    return _hex(out, 8)


def _ask_field_15(backend: str, device: torch.device) -> str:
    x = torch.tensor([[0x77, 0x78, 0x79, 0x7E, 0x7F, 0xF8, 0x01]], dtype=torch.uint8, device=device)
    return _listed(_run(backend, read_e4m3, x=x))


def _ask_precise(backend: str, device: torch.device) -> str:
    said = []
    for which, value in (("exp", 1.1), ("sigmoid", 0.3), ("log", 3.0), ("reciprocal", 3.0)):
        out = _run(backend, activate, x=_row((value,), device), which=which)
        said.append(f"{which} {float(out):.9g}")
    return "; ".join(said)


def _exact() -> str:
    x = [torch.tensor(value, dtype=torch.float32) for value in (1.1, 0.3, 3.0, 3.0)]
    wide = [x[0].double().exp(), x[1].double().sigmoid(), x[2].double().log(), 1 / x[3].double()]
    names = ("exp", "sigmoid", "log", "reciprocal")
    return "; ".join([f"{name} {float(value.float()):.9g}" for name, value in zip(names, wide, strict=True)])


PROBES = (
    Probe("A1", "What does a cast to e4m3 give above 240?", "0x77, 0x78, 0x78, 0xF8", "quantizing on chip", _ask_cast),
    Probe(
        "A2",
        "Which engines keep subnormal numbers?",
        "; ".join([f"{d} kept by vector scalar gpsimd tensor" for d in ("float32", "bfloat16", "float16")]),
        "integer e4m3 decoding, whose small codes are float16 subnormals",
        _ask_subnormals,
    ),
    Probe("A3", "Is .ap's offset added to a slice's base?", "added to the slice's base", "addressing", _ask_offset),
    Probe("A4", "Does a shift of uint8 drop bits above 8?", "0xF0, 0xF0, 0x10", "bit decoding on bytes", _ask_shift),
    Probe("A5", "Does an activation sum before its cast?", "before the cast", "softmax denominators", _ask_sum),
    Probe("A6", "How does the array order its sums?", "a sum between 0 and 126", "comparing bits", _ask_order),
    Probe("A7", "How does a casting DMA round?", "nearest, ties to even", "loads that cast", _ask_dma_cast),
    Probe("A8", "Do gathers of 4 rows work, and does -1 skip?", "20, -7, 8, 28", "empty slots", _ask_gather),
    Probe("A9", "Are float32 products exact in the array?", "all 24 bits", "weights of index scores", _ask_fp32),
    Probe("A10", "Is exp(-1e30) exactly 0?", "0, 0, 1", "the mark of an empty slot", _ask_exp),
    Probe("A11", "What does a broadcast bf16 operand cost?", "twice as long", "time of decoding", _ask_broadcast),
    Probe("A12", "May a tile and a constant be mixed?", "13, -2", "fused scale and offset", _ask_mixed),
    Probe(
        "A13",
        "Are integer immediates above 2^24 exact?",
        "0x1C1C1C1D, 0x08080809, 0x0F0F0F0F",
        "e2m1 decoding in 32-bit lanes",
        _ask_masks,
    ),
    Probe(
        "A14",
        "How are e4m3 bytes of exponent field 15 read?",
        "240, inf, nan, nan, nan, -inf, 0.001953125",
        "native decoding of caches of the 448 cap",
        _ask_field_15,
    ),
    Probe("A15", "What does NKI_PRECISE_FP change? Run with 0 and with 1.", _exact(), "accuracy", _ask_precise),
)  # fmt: skip


def run_probes(backend: str, names: Sequence[str] = (), device: torch.device | None = None) -> list[ProbeResult]:
    """Ask the questions, all or those named. A kernel that is refused or fails is an answer too: its first line."""
    known = [probe.name for probe in PROBES]
    for name in names:
        if name not in known:
            raise ArgumentError(f"probe: name must be one of {', '.join(known)}, got {name!r}.")
    if backend not in launch.EXECUTORS:
        raise ArgumentError(f"probe: backend must be neuron or simulated, got {backend!r}.")
    where = torch.device("neuron" if backend == "neuron" else "cpu") if device is None else device
    results = []
    for probe in PROBES:
        if names and probe.name not in names:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the simulator warns of the very things that are asked
            try:
                found = probe.ask(backend, where)
            except (SparseMlaError, RuntimeError, TypeError, ValueError, NotImplementedError) as error:
                lines = str(error).strip().splitlines()
                found = f"refused: {lines[0] if lines else type(error).__name__}"
        results.append(ProbeResult(probe.name, probe.question, probe.assumed, found))
    return results


def heading(backend: str) -> str:
    """What the answers are true of, in one line."""
    version = "none" if IS_SIMULATOR else str(getattr(nki, "__version__", "unknown"))
    target = config.get("NEURON_PLATFORM_TARGET_OVERRIDE")
    kind = "simulator, no device" if backend == "simulated" else "device"
    return f"sparse-mla probe: {kind}, target {target}, nki {version}, torch {torch.__version__}"


def table(results: Sequence[ProbeResult], heading: str) -> str:
    """Markdown for an issue."""
    lines = [heading, "", "| probe | question | assumed | found | same |", "|---|---|---|---|---|"]
    lines += [f"| {r.name} | {r.question} | {r.assumed} | {r.found} | {'yes' if r.agrees else 'NO'} |" for r in results]
    return "\n".join(lines)
