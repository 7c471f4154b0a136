# SPDX-License-Identifier: Apache-2.0
"""`nki.language` (nl): dtypes, memories, operators, tile functions, loops and questions about the launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, ClassVar

from . import dtypes as _dtypes
from . import target as _target
from .core import current, running
from .dtypes import (
    DType,
    bfloat16,
    bool_,
    float4_e2m1fn_x4,
    float8_e4m3,
    float8_e4m3fn,
    float8_e4m3fn_x4,
    float8_e5m2,
    float8_e5m2_x4,
    float8_e8m0fnu,
    float16,
    float32,
    int8,
    int16,
    int32,
    tfloat32,
    uint8,
    uint16,
    uint32,
)
from .operators import BY_NAME as _OPS
from .tensor import DynamicSlice, MemoryRegion, NKIObject, NkiTensor, VirtualRegister
from .tile_functions import (
    all,
    broadcast_to,
    device_print,
    dropout,
    empty_like,
    expand_dims,
    full,
    gather_flattened,
    load,
    load_transpose2d,
    matmul,
    max,
    mean,
    min,
    ndarray,
    ones,
    prod,
    rand,
    random_seed,
    rms_norm,
    shared_constant,
    shared_identity_matrix,
    softmax,
    store,
    sum,
    transpose,
    var,
    where,
    zeros,
    zeros_like,
)

__all__ = [
    "DType",
    "MemoryRegion",
    "NKIObject",
    "NkiTensor",
    "abs",
    "abs_max",
    "abs_min",
    "add",
    "affine_range",
    "all",
    "arctan",
    "average",
    "bfloat16",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "bool",
    "bool_",
    "broadcast_to",
    "bypass",
    "ceil",
    "copy",
    "cos",
    "device_print",
    "divide",
    "dropout",
    "ds",
    "dtype",
    "dynamic_range",
    "empty_like",
    "equal",
    "erf",
    "erf_dx",
    "exp",
    "expand_dims",
    "float4_e2m1fn_x4",
    "float8_e4m3",
    "float8_e4m3fn",
    "float8_e4m3fn_x4",
    "float8_e5m2",
    "float8_e5m2_x4",
    "float8_e8m0fnu",
    "float16",
    "float32",
    "floor",
    "fmod",
    "fori_loop",
    "fp32",
    "full",
    "gather_flattened",
    "gelu",
    "gelu_apprx_sigmoid",
    "gelu_apprx_sigmoid_dx",
    "gelu_apprx_tanh",
    "gelu_dx",
    "greater",
    "greater_equal",
    "hbm",
    "int8",
    "int16",
    "int32",
    "invert",
    "is_hbm",
    "is_on_chip",
    "is_psum",
    "is_sbuf",
    "left_shift",
    "less",
    "less_equal",
    "load",
    "load_transpose2d",
    "log",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "matmul",
    "max",
    "maximum",
    "mean",
    "min",
    "minimum",
    "mish",
    "mod",
    "multiply",
    "ndarray",
    "negative",
    "no_reorder",
    "not_equal",
    "num_programs",
    "ones",
    "power",
    "prelu",
    "private_hbm",
    "prod",
    "program_id",
    "program_ndim",
    "psum",
    "rand",
    "random_seed",
    "reciprocal",
    "relu",
    "right_shift",
    "rms_norm",
    "rsqrt",
    "sbuf",
    "sequential_range",
    "shared_constant",
    "shared_hbm",
    "shared_identity_matrix",
    "sigmoid",
    "sign",
    "silu",
    "silu_dx",
    "sin",
    "softmax",
    "softplus",
    "sqrt",
    "square",
    "static_range",
    "store",
    "subtract",
    "sum",
    "tan",
    "tanh",
    "tensor",
    "tfloat32",
    "tile_size",
    "transpose",
    "trunc",
    "uint8",
    "uint16",
    "uint32",
    "var",
    "where",
    "while_loop",
    "zeros",
    "zeros_like",
]  # fmt: skip

sbuf = MemoryRegion.sbuf
psum = MemoryRegion.psum
hbm = MemoryRegion.hbm
private_hbm = MemoryRegion.private_hbm
shared_hbm = MemoryRegion.shared_hbm
bool = _dtypes.bool_
fp32 = _dtypes.float32
tensor = NkiTensor
dtype = DType
dtypes = _dtypes

add = _OPS["add"]
subtract = _OPS["subtract"]
multiply = _OPS["multiply"]
divide = _OPS["divide"]
maximum = _OPS["maximum"]
minimum = _OPS["minimum"]
abs_max = _OPS["abs_max"]
abs_min = _OPS["abs_min"]
abs = _OPS["abs"]
square = _OPS["square"]
power = _OPS["power"]
equal = _OPS["equal"]
not_equal = _OPS["not_equal"]
less = _OPS["less"]
less_equal = _OPS["less_equal"]
greater = _OPS["greater"]
greater_equal = _OPS["greater_equal"]
bitwise_and = _OPS["bitwise_and"]
bitwise_or = _OPS["bitwise_or"]
bitwise_xor = _OPS["bitwise_xor"]
invert = _OPS["invert"]
left_shift = _OPS["left_shift"]
right_shift = _OPS["right_shift"]
logical_and = _OPS["logical_and"]
logical_or = _OPS["logical_or"]
logical_xor = _OPS["logical_xor"]
logical_not = _OPS["logical_not"]
exp = _OPS["exp"]
log = _OPS["log"]
sqrt = _OPS["sqrt"]
rsqrt = _OPS["rsqrt"]
tanh = _OPS["tanh"]
sigmoid = _OPS["sigmoid"]
relu = _OPS["relu"]
gelu = _OPS["gelu"]
gelu_apprx_sigmoid = _OPS["gelu_apprx_sigmoid"]
gelu_apprx_tanh = _OPS["gelu_apprx_tanh"]
gelu_dx = _OPS["gelu_dx"]
gelu_apprx_sigmoid_dx = _OPS["gelu_apprx_sigmoid_dx"]
silu = _OPS["silu"]
silu_dx = _OPS["silu_dx"]
softplus = _OPS["softplus"]
mish = _OPS["mish"]
erf = _OPS["erf"]
erf_dx = _OPS["erf_dx"]
reciprocal = _OPS["reciprocal"]
copy = _OPS["copy"]
sin = _OPS["sin"]
cos = _OPS["cos"]
tan = _OPS["tan"]
arctan = _OPS["arctan"]
ceil = _OPS["ceil"]
floor = _OPS["floor"]
trunc = _OPS["trunc"]
negative = _OPS["negative"]
sign = _OPS["sign"]
fmod = _OPS["fmod"]
mod = _OPS["mod"]
average = _OPS["average"]
prelu = _OPS["prelu"]
bypass = _OPS["bypass"]


def is_hbm(buffer: Any) -> Any:
    """True for any HBM memory."""
    return buffer in (private_hbm, shared_hbm)


def is_sbuf(buffer: Any) -> Any:
    """True for SBUF."""
    return buffer == sbuf


def is_psum(buffer: Any) -> Any:
    """True for PSUM."""
    return buffer == psum


def is_on_chip(buffer: Any) -> Any:
    """True for SBUF and PSUM."""
    return buffer in (sbuf, psum)


class _TileSize(NKIObject):
    """Hardware tile sizes of the current target, read when asked."""

    _OLD: ClassVar[dict[str, str]] = {"psum_fmax": "psum_bank_fmax", "total_available_sbuf_size": "sbuf_fmax_bytes"}
    _NAMES = (
        "bn_stats_fmax", "gemm_moving_fmax", "gemm_stationary_fmax", "pmax", "psum_bank_fmax",
        "psum_bank_fmax_bytes", "psum_fmax", "psum_min_align", "psum_num_banks", "sbuf_fmax", "sbuf_fmax_bytes",
        "sbuf_min_align", "sbuf_size_bytes", "total_available_sbuf_size",
    )  # fmt: skip

    def __getattr__(self, name: str) -> int:
        if name not in self._NAMES:
            raise AttributeError(f"nl.tile_size has no {name}")
        machine = running()
        if machine is None:
            facts = _target.from_environment()
        else:
            facts = machine.target
            if name in self._OLD:
                machine.note(0, f"nl.tile_size.{name} is now {self._OLD[name]}")
        return getattr(facts, name)  # type: ignore[no-any-return]


tile_size = _TileSize()


def ds(start: Any, size: Any) -> DynamicSlice:
    """A slice of `size` elements from `start`, which may be a register."""
    return DynamicSlice(start, size)


# -- loops ------------------------------------------------------------------------------------------------------------


def affine_range(start: Any, stop: Any = None, step: Any = 1) -> range:
    """range(); unrolled when the kernel is traced."""
    return _static(start, stop, step)


def sequential_range(start: Any, stop: Any = None, step: Any = 1) -> range:
    """range(); unrolled when the kernel is traced."""
    return _static(start, stop, step)


def static_range(start: Any, stop: Any = None, step: Any = 1) -> range:
    """range(); unrolled when the kernel is traced."""
    return _static(start, stop, step)


def _static(start: Any, stop: Any, step: Any) -> range:
    for bound in (start, stop, step):
        if isinstance(bound, VirtualRegister):
            current().fail(50, "a static loop bound is a run-time register; use nl.fori_loop or nl.dynamic_range")
    return range(int(start)) if stop is None else range(int(start), int(stop), int(step))


range_ = range


def _bound(value: Any) -> int:
    return value.value() if isinstance(value, VirtualRegister) else int(value)


def dynamic_range(start: Any, stop: Any = None, step: int = 1) -> Iterator[Any]:
    """A run-time loop in `for` form; the index is a register."""
    machine = current()
    if isinstance(step, VirtualRegister) or int(step) < 1:
        machine.fail(50, "the step of a run-time loop must be a positive constant")
    low, high = (0, _bound(start)) if stop is None else (_bound(start), _bound(stop))
    for i in range_(low, high, int(step)):
        with machine.loop():
            yield i if machine.compat else VirtualRegister(i, frozen=True)


def fori_loop(lower: Any, upper: Any, body_fun: Callable[[Any], Any], step: int = 1) -> None:
    """body_fun(i) for i in range(lower, upper, step), at run time; i is a register."""
    for i in dynamic_range(lower, upper, step):
        body_fun(i if isinstance(i, VirtualRegister) else VirtualRegister(i, frozen=True))


def while_loop(init: Any, body_fun: Callable[[Any], Any]) -> None:
    """r = init; while r != 0: r = body_fun(r), at run time."""
    machine = current()
    if not isinstance(init, VirtualRegister):
        machine.fail(50, "init of while_loop must be a register")
    condition = init
    while condition.value() != 0:
        with machine.loop():
            condition = body_fun(VirtualRegister(condition.value()))
        if not isinstance(condition, VirtualRegister):
            machine.fail(50, "the body of while_loop must return the next condition register")


class no_reorder:
    """Instructions inside keep their order; the estimate never reorders, so this has no effect here."""

    def __enter__(self) -> no_reorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


# -- the launch -------------------------------------------------------------------------------------------------------


def program_id(axis: int = 0) -> int:
    """This core's number in the launch grid."""
    machine = current()
    if axis != 0:
        machine.fail(0, f"the launch grid has one axis, got axis {axis}")
    return machine.core


def num_programs(axes: Any = 0) -> int:
    """Cores of the launch grid; 1 without a grid."""
    return current().launch.cores


def program_ndim() -> int:
    """Dims of the launch grid; 0 without one."""
    return len(current().launch.grid)


def __getattr__(name: str) -> Any:
    if name == "range":
        return range_
    if name in ("mgrid", "arange", "par_dim"):
        machine = running()
        text = f"nl.{name} was removed after 0.1; use slices, nl.ds or .ap"
        if machine is not None:
            machine.fail(50, text)
        raise AttributeError(text)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
