# SPDX-License-Identifier: Apache-2.0
"""The running machine: which core executes, what it did, and how it refuses.

A `Launch` is one kernel call; it owns one `Machine` per physical core. Exactly one machine runs at any moment, so
`current()` is a plain global. Every instruction passes through the `@instruction` decorator, which counts it against
the
budget, finds the kernel line it came from, and gives its errors their shape:
`nc_matmul: moving free size 1024 exceeds 512 (trn2) - my_kernel.py:88`.

The functional part knows nothing about time. What the timing layer needs is the stream of `Record`s: each names engine
and opcode, the operands as byte ranges of buffers with their layout facts, and what the opcode's cost formula asks for.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np

from ..errors import KernelError, NotSimulatedError, SparseMlaError
from . import dtypes
from .memory import HBM, PSUM, SBUF, Arena, Life, Pool, Storage
from .params import SimulatorParams
from .target import Target

if TYPE_CHECKING:
    from .tensor import NkiTensor

__all__ = [
    "DMA",
    "GPSIMD",
    "SCALAR",
    "SYNC",
    "TENSOR",
    "VECTOR",
    "Launch",
    "Machine",
    "Operand",
    "Record",
    "SimulatorWarning",
    "WarningRecord",
    "current",
    "instruction",
    "not_simulated",
    "running",
    "source_line",
]  # fmt: skip

Array = np.ndarray[Any, np.dtype[Any]]
TENSOR, VECTOR, SCALAR, GPSIMD, DMA, SYNC = "tensor", "vector", "scalar", "gpsimd", "dma", "sync"
F = TypeVar("F", bound=Callable[..., Any])
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


class SimulatorWarning(UserWarning):
    """Something hardware may do differently, or much slower; the message names kernel line and instruction."""


@dataclass(slots=True)
class WarningRecord:
    """One distinct warning of a run; `count` says how often it was met."""

    check: int
    message: str
    file: str
    line: int
    count: int = 1
    level: str = "warning"  # or "info": advice about speed


class Operand:
    """One tensor operand as the timing layer sees it. Made once per view.

    Bytes touched: partitions [p0, p1) x bytes [b0, b1) of each partition of buffer `ident` (HBM: one partition).
    """

    __slots__ = (
        "address", "b0", "b1", "contiguous", "dtype", "elements", "ident", "itemsize", "memory", "name", "p0", "p1",
        "partitions", "run_bytes", "span", "step", "stride0",
    )  # fmt: skip

    ident: int  # unique per declared tensor
    memory: str  # "sbuf", "psum" or "hbm"
    address: tuple[int, int] | None  # (partition, byte) when the tile was placed explicitly
    p0: int
    p1: int
    b0: int
    b1: int
    partitions: int  # shape[0] on-chip, 1 in HBM
    elements: int  # elements per partition (HBM: all elements)
    itemsize: int
    dtype: str
    contiguous: bool  # the free elements are one run, in order
    run_bytes: int  # bytes of the longest run the innermost dims form; itemsize when the innermost stride is not 1
    stride0: bool  # some free dim of more than one element has stride 0
    step: int  # bytes between repetitions of the outermost free dim, 0 when there is one or they are not regular
    span: int  # bytes each repetition spans; [b0, b1) is repetitions of `span` every `step`
    name: str

    def __repr__(self) -> str:
        return f"{self.memory}#{self.ident}[{self.p0}:{self.p1}, {self.b0}:{self.b1}B] {self.dtype}"


@dataclass(slots=True)
class Record:
    """One executed instruction.

    `engine` is where it runs (tensor, vector, scalar, gpsimd, dma, sync). `partitions` x `elements` is the size its
    cost formula uses (elements per partition of the largest operand). `detail` holds what is particular to the opcode:

    nc_matmul        {"k", "m", "n", "fp32": bool, "double_row": bool, "transpose": bool,
                      "tile": (row, col, rows, cols), "accumulate": bool}
    nc_transpose     {"k", "m", "fp32", "two_byte"}: partitions and free size of the input (tensor or vector)
    tensor_tensor .. {"op": name, "op1": name or None}
    activation       {"op": name, "reads_register": bool}
    tensor_reduce    {"op": name}
    dma_*            {"bytes", "descriptors", "descriptor_bytes", "dge": "none|hwdge|swdge|unknown", "queue": issuing
    engine
                      ("sync", "scalar", "gpsimd" or ""), "indirect": bool, "rows": gathered rows, "cast": bool,
                      "hbm_read", "hbm_written"}
    sendrecv         {"bytes", "peer": core, "via": "dma" or "gpsimd_dma"}
    core_barrier     {"cores": tuple, "sequence": n}: the n-th meeting of these cores
    local_gather     {"indices", "num_elem_per_idx"};  nc_n_gather {"groups"};  topk {"n", "k"}
    any              "dynamic": True when a run-time index addressed an operand (the index tiles end the reads)
    """

    index: int
    core: int
    engine: str
    opcode: str
    code: CodeType
    lasti: int
    writes: tuple[Operand, ...]
    reads: tuple[Operand, ...]
    partitions: int
    elements: int
    detail: dict[str, Any]
    name: str | None = None

    @property
    def file(self) -> str:
        return self.code.co_filename

    @property
    def line(self) -> int:
        return source_line(self.code, self.lasti)

    @property
    def source(self) -> str:
        """file:line of the kernel statement."""
        return f"{short_path(self.file)}:{self.line}"


_lines: dict[tuple[CodeType, int], int] = {}


def source_line(code: CodeType, lasti: int) -> int:
    """Line of one instruction of a code object; looked up when somebody asks, not when the kernel runs."""
    key = (code, lasti)
    found = _lines.get(key)
    if found is None:
        found = code.co_firstlineno
        for start, end, line in code.co_lines():
            if start <= lasti < end and line is not None:
                found = line
                break
        _lines[key] = found
    return found


def short_path(path: str) -> str:
    """The path as seen from the working directory when it lies below it."""
    here = os.getcwd() + os.sep
    return path[len(here) :] if path.startswith(here) else path


_inside: dict[CodeType, bool] = {}


def kernel_frame(depth: int = 1) -> Any:
    """The innermost frame that is not the simulator's own."""
    frame: Any = sys._getframe(depth)
    while frame is not None:
        code = frame.f_code
        inside = _inside.get(code)
        if inside is None:
            inside = _inside[code] = os.path.abspath(code.co_filename).startswith(_HERE)
        if not inside:
            return frame
        frame = frame.f_back
    return sys._getframe(depth)


class Launch:
    """One kernel call over all its cores."""

    def __init__(self, params: SimulatorParams, target: Target, cores: int, grid: tuple[int, ...], name: str) -> None:
        self.params = params
        self.target = target
        self.cores = cores
        self.grid = grid  # () without a grid
        self.name = name
        self.count = 0
        self.limit = params.max_instructions
        self.records: list[Record] = []
        self.observers: list[Callable[[Record], None]] = []
        if params.timing:
            self.observers.append(self.records.append)
        self.warnings: dict[tuple[int, str, str, int], WarningRecord] = {}
        self.shared: dict[str, Storage] = {}  # shared_hbm tensors by name
        self.declared: dict[str, set[int]] = {}  # cores that declared each of them
        self.pool = Pool()
        self.machines = [Machine(self, core) for core in range(cores)]
        self.meet: Callable[[Machine, tuple[Any, ...], Any], Any] | None = (
            None  # rendezvous of cores, set by the launcher
        )
        self.pause: Callable[[Machine], None] | None = None  # lets the other core run, set by the launcher


# instructions behind tile functions, whose own names a kernel's author never wrote
_PUBLIC = {
    "select_tile": "nl.where", "replicate_partition": "nl.broadcast_to", "elementwise_function": "nl function",
    "fill_hbm": "nl.full", "load_identity": "nl.shared_identity_matrix",
}  # fmt: skip


class Accumulators:
    """Reduction registers of one engine: a float32 per lane (partition), and whether anything defined is in it."""

    def __init__(self, lanes: int) -> None:
        self.values = np.full(lanes, np.nan, np.float32)
        self.valid = np.zeros(lanes, np.bool_)

    def read(self, m: Machine, lanes: slice) -> Array:
        """A copy of some registers, all of which an earlier instruction must have started."""
        if not self.valid[lanes].all():
            m.fail(
                46, f"the accumulators of partitions {lanes.start}..{lanes.stop - 1} hold nothing defined; begin with "
                "reset_reduce",
            )  # fmt: skip
        return self.values[lanes].copy()

    def write(self, lanes: slice, values: Array) -> Array:
        """Set some registers; returns their values."""
        self.values[lanes] = values
        self.valid[lanes] = True
        return self.values[lanes].copy()

    def forget(self, lanes: slice) -> None:
        self.valid[lanes] = False


class Machine:
    """One physical core: its tiles, its registers, and the helpers every instruction uses."""

    def __init__(self, launch: Launch, core: int) -> None:
        self.launch = launch
        self.core = core
        self.params = launch.params
        self.target = launch.target
        self.checks = launch.params.checks
        self.compat = launch.params.aws_compat
        self.strict = launch.params.strict
        self.tracks_init = self.checks and not self.compat
        self.index = -1
        self.opcode = ""
        self.frame: Any = None
        self.name: str | None = None
        self.arenas: dict[str, Arena] = {}
        self.lives: dict[str, list[Life]] = {SBUF: [], PSUM: []}
        self.tiles: weakref.WeakSet[Storage] = weakref.WeakSet()  # on-chip tiles that still exist
        self.loop_start = -1  # first instruction of the current run-time loop iteration
        self.scalar_registers = Accumulators(self.target.pmax)
        self.vector_registers = Accumulators(self.target.pmax)
        self.unnamed_shared = 0
        self.barriers: dict[tuple[int, ...], int] = {}
        self.rng_state: Any = None
        self.pending: list[NkiTensor] = []  # index tiles the current instruction read

    def called(self) -> str:
        """What the kernel called, as messages name it."""
        return _PUBLIC.get(self.opcode, self.opcode) or "kernel"

    # -- refusing ------------------------------------------------------------------------------------------------

    def where(self) -> tuple[str, int]:
        frame = self.frame if self.frame is not None else kernel_frame(2)
        return frame.f_code.co_filename, source_line(frame.f_code, frame.f_lasti)

    def fail(self, check: int, message: str) -> NoReturn:
        """Refuse: one sentence with instruction, operand, limit, target, file and line."""
        file, line = self.where()
        error = KernelError(f"{self.called()}: {message} ({self.target.name}) - {short_path(file)}:{line}")
        error.check = check  # type: ignore[attr-defined]
        raise error

    def fail_unexpected(self, cause: Exception) -> NoReturn:
        """Refuse arguments that made the simulator itself stumble, with the Python error as the reason."""
        try:
            self.fail(0, f"cannot run with these arguments: {type(cause).__name__}: {cause}")
        except KernelError as error:
            raise error from cause

    def warn(self, check: int, message: str, *, quiet: bool = False, level: str = "warning") -> None:
        """Keep a warning; the same text at the same line is kept once, with a count."""
        file, line = self.where()
        key = (check if level == "warning" else -check, self.opcode, file, line)
        known = self.launch.warnings.get(key)
        if known is not None:
            known.count += 1
            return
        text = f"{self.called()}: {message} ({self.target.name}) - {short_path(file)}:{line}"
        self.launch.warnings[key] = WarningRecord(check, text, file, line, level=level)
        if self.params.show_warnings and not quiet:
            warnings.warn(SimulatorWarning(text), stacklevel=1)

    def note(self, check: int, message: str) -> None:
        """A warning about speed or denormals: kept in the result, not shown through `warnings`."""
        self.warn(check, message, quiet=True)

    def info(self, check: int, message: str) -> None:
        """Advice: kept in the result with level "info", never shown through `warnings`."""
        self.warn(check, message, quiet=True, level="info")

    def fail_or_warn(self, check: int, message: str, *, fatal: bool) -> None:
        if fatal:
            self.fail(check, message)
        self.warn(check, message)

    # -- operands ------------------------------------------------------------------------------------------------

    def tile(self, role: str, value: Any, memories: tuple[str, ...], check: int, *, rule: bool = True) -> NkiTensor:
        """`value` as an on-chip tensor this engine may touch; checks memory, partition start and number of dims."""
        if type(value) is not _tensor_type():
            self.fail(23, f"{role} must be a tensor, got {describe(value)}")
        t: NkiTensor = value
        if t.vector_index is not None:
            self.fail(check, f"{role} {t.brief()} is indexed by a vector; only DMA gathers and scatters rows")
        if t.scalar_index is not None:
            t = self.dynamic(role, t)
        elif t.suspect and (text := t.outside()):
            self.fail(33, f"{role}: {text}")
        if not self.checks:
            return t
        if t.memory not in memories:
            legal = " or ".join([memory.upper() for memory in memories])
            self.fail(check, f"{role} must be in {legal}, got {t.memory.upper()} {t.brief()}")
        if rule and not t.legal:
            if t.memory != HBM:
                self.partition_rule(role, t)
            t.legal = True
        if t.ndim > self.target.max_free_dims + 1:
            self.fail(22, f"{role} {t.brief()} has {t.ndim - 1} free dims, at most {self.target.max_free_dims}")
        return t

    def partition_rule(self, role: str, t: NkiTensor, count: int = 0) -> None:
        """Compute engines: at most 128 partitions, step 1, and starts that match the count."""
        target = self.target
        count = count or t.shape[0]
        if count > target.pmax:
            self.fail(1, f"{role} {t.brief()} spans {count} partitions, at most {target.pmax}")
        start = t.p0
        if count > 1 and t.partition_step != 1:
            self.fail(3, f"{role} {t.brief()} has partition step {t.partition_step}, only 1 is possible")
        if start % target.quadrant or (
            count > target.quadrant and (start % target.pe_half or (count > target.pe_half and start))
        ):
            legal = "0" if count > target.pe_half else "0 or 64" if count > target.quadrant else "0, 32, 64 or 96"
            self.fail(2, f"{role} {t.brief()} starts at partition {start}; {count} partitions may start at {legal}")

    def same_start(self, **tiles: Any) -> None:
        """Inputs of one instruction that lie in one memory sit on the same partitions. AWS's router kernel adds PSUM
        partitions 32.. to SBUF partitions 0.., so two memories may differ."""
        if not self.checks:
            return
        first: dict[str, tuple[str, int]] = {}
        for role, t in tiles.items():
            if type(t) is not _tensor_type() or t.memory == HBM:
                continue
            name, start = first.setdefault(t.memory, (role, t.p0))
            if t.p0 != start:
                self.fail(4, f"{role} starts at partition {t.p0} but {name} at {start}; inputs must start alike")

    def same_size(self, **tiles: NkiTensor) -> None:
        """Same partitions and same number of elements per partition; nothing is broadcast implicitly."""
        names = list(tiles)
        a = tiles[names[0]]
        for role in names[1:]:
            b = tiles[role]
            if a.shape[0] != b.shape[0]:
                self.fail(
                    23, f"{role} {b.brief()} has {b.shape[0]} partitions but {names[0]} {a.brief()} has {a.shape[0]}"
                )
            if a.free_size != b.free_size:
                self.fail(
                    23,
                    f"{role} {b.brief()} has {b.free_size} elements per partition but {names[0]} {a.brief()} has "
                    f"{a.free_size}; broadcast with a view",
                )

    def column(
        self, role: str, value: Any, like: NkiTensor, *, fp32: bool, memories: tuple[str, ...] = (SBUF, PSUM)
    ) -> NkiTensor:
        """A (P, 1) operand: one value per partition."""
        t = self.tile(role, value, memories, 16)
        if t.shape[0] != like.shape[0] or t.free_size != 1:
            self.fail(24, f"{role} must be ({like.shape[0]}, 1), one value per partition, got {t.brief()}")
        if fp32 and t.dtype is not dtypes.float32 and self.checks:
            self.fail(24, f"{role} must be float32, got {t.brief()}")
        return t

    # -- reading and writing ---------------------------------------------------------------------------------------

    def read(self, role: str, t: NkiTensor) -> Array:
        """The operand's elements as a NumPy view; refuses bytes nobody wrote."""
        st = t.storage
        st.last = self.index
        if st.first < 0:
            st.first = self.index
        if not st.all_init and self.tracks_init:
            self.initialised(role, t)
        return t.array()

    def initialised(self, role: str, t: NkiTensor) -> None:
        st = t.storage
        if not st.is_initialised(t.shape, t.byte_strides, t.byte_offset, t.dtype.itemsize):
            if st.clobbered_by is not None:
                by = st.clobbered_by
                self.fail(
                    21,
                    f"{role} {t.brief()} was overwritten by the tile of line {by.source[1]} at overlapping address "
                    f"{by.address} while still in use",
                )
            self.fail(46, f"{role} {t.brief()} reads memory that was never written (declared at line {st.source[1]})")

    def f32(self, role: str, t: NkiTensor) -> Array:
        """The operand as float32, as an engine reads it."""
        array = self.read(role, t)
        dtype = t.dtype
        if dtype.is_packed:
            self.fail(48, f"{role} {t.brief()}: arithmetic on packed types is not possible")
        values = dtypes.to_f32(array, dtype)
        if self.checks:
            if dtype.is_int:
                if dtype.itemsize == 4 and array.size:
                    top = max(-int(array.min()), int(array.max()))
                    if top >= self.target.exact_int_limit:
                        self.warn(27, f"{role} {t.brief()} holds {top}: integers from 2^24 on lose bits in float32")
            elif dtype is not t.storage.dtype and dtype.itemsize > 1 and has_subnormal(values):
                self.note(54, f"{role} {t.brief()} holds subnormal values; an engine may flush them to zero")
        return values

    def wrote(self, t: NkiTensor) -> None:
        """Remember that `t` holds data now."""
        st = t.storage
        st.last = self.index
        if st.first < 0:
            st.first = self.index
        st.writers |= 1 << self.core
        if not st.all_init:
            st.mark(t.shape, t.byte_strides, t.byte_offset, t.dtype.itemsize, t.is_whole)
        if st.overlaps:
            self.overwrite(t)
        if st.accumulation is not None:
            st.accumulation.foreign_write(t)

    def overwrite(self, t: NkiTensor) -> None:
        """`t` was written and shares addresses with other tiles: their bytes there are gone."""
        o = t.operand()
        for other in t.storage.clobber_overlaps(o.p0, o.p1, o.b0, o.b1):
            if self.loop_start >= 0 and other.last >= self.loop_start and self.checks:
                self.warn(
                    51, f"dst {t.brief()} overwrites the tile of line {other.source[1]} used in the same run-time "
                    "loop body; iterations may overlap",
                )  # fmt: skip

    @contextmanager
    def loop(self) -> Iterator[None]:
        """One iteration of a run-time loop; counts against the instruction budget even when it is empty."""
        launch = self.launch
        launch.count += 1
        if launch.count > launch.limit:
            self.frame = None
            self.fail(
                0, f"more than {launch.limit} instructions; the loop may never end (max_instructions raises the limit)"
            )
        before, self.loop_start = self.loop_start, launch.count
        try:
            yield
        finally:
            self.loop_start = before

    def write(self, t: NkiTensor, values: Array) -> None:
        """Store float32 or exact integer results with the engines' casting rules."""
        out = t.array()
        if values.shape != out.shape:
            values = values.reshape(out.shape)
        dtype = t.dtype
        if self.checks and dtype.is_float and values.dtype == np.float32:
            if dtype.itemsize == 1:
                self.narrow(t, out, values)
                self.wrote(t)
                return
            if has_subnormal(values):
                self.note(54, f"dst {t.brief()} receives subnormal values; an engine may flush them to zero")
        elif self.checks and dtype.is_int and dtype.itemsize == 4 and values.dtype == np.float32 and values.size:
            top = max(-float(values.min()), float(values.max()))
            if top >= self.target.exact_int_limit:
                self.warn(
                    27, f"dst {t.brief()} receives {top:.0f} from float32 arithmetic: integers from 2^24 on lose bits"
                )
        dtypes.cast_into(out, values, dtype)
        self.wrote(t)

    def narrow(self, t: NkiTensor, out: Array, values: Array) -> None:
        """fp8 results: whether hardware saturates or gives inf is not documented."""
        dtypes.cast_into(out, values, t.dtype)
        if dtypes.overflowed(out, values, t.dtype):
            self.warn(
                29,
                f"dst {t.brief()}: a finite value overflows {t.dtype}; clamp first (saturate or inf is not documented)",
            )

    def storage_partial(self, t: NkiTensor, chosen: Array) -> None:
        """Like `wrote`, for an instruction that wrote only where `chosen` (shaped like t) is True."""
        st = t.storage
        st.last = self.index
        if st.first < 0:
            st.first = self.index
        st.writers |= 1 << self.core
        if not st.all_init:
            bits = st.bits(t.shape, t.byte_strides, t.byte_offset, t.dtype.itemsize)
            bits |= chosen if bits.ndim == chosen.ndim else chosen[..., None]
        if st.overlaps:
            self.overwrite(t)
        if st.accumulation is not None:
            st.accumulation.foreign_write(t)

    def dynamic(self, role: str, t: NkiTensor, *, bounds: bool = True) -> NkiTensor:
        """The view with its run-time scalar index applied; the index tile becomes a read of the instruction."""
        index = t.scalar_index
        if index is None:
            return t
        tensor = _tensor_type()
        if type(index) is tensor:
            if index.size != 1 or index.memory != SBUF:
                self.fail(32, f"scalar_offset of {role} must be a 1 x 1 SBUF tensor or a register, got {index.brief()}")
            if not index.dtype.is_int:
                self.fail(32, f"scalar_offset of {role} must be an integer type, got {index.brief()}")
            index = self.dynamic(role, index)
            value = int(self.read(f"scalar_offset of {role}", index).reshape(-1)[0])
            self.pending.append(index)
        else:
            value = index.value()
        made = t.moved(value)
        if bounds and not t.reaches(value, made):
            self.fail(33, f"{role}: the run-time index {value} moves {t.brief()} outside its tensor {t.storage.shape}")
        return made

    def random(self) -> Any:
        """The launch's generator of random numbers (deterministic; not the hardware's sequence)."""
        if self.rng_state is None:
            self.rng_state = np.random.default_rng([self.params.poison_seed, self.core])
        return self.rng_state

    # -- records -------------------------------------------------------------------------------------------------

    def emit(
        self,
        engine: str,
        writes: tuple[NkiTensor, ...],
        reads: tuple[NkiTensor, ...],
        elements: int = 0,
        /,
        **detail: Any,
    ) -> None:
        """Hand one executed instruction to the observers and the log."""
        launch = self.launch
        if self.pending:
            reads = (*reads, *self.pending)
            self.pending.clear()
            detail["dynamic"] = True
        if launch.observers:
            frame = self.frame
            dst = writes[0] if writes else None
            record = Record(
                self.index, self.core, engine, self.opcode, frame.f_code, frame.f_lasti,
                tuple([t.operand() for t in writes]), tuple([t.operand() for t in reads]),
                dst.shape[0] if dst is not None and dst.memory != HBM else 1,
                elements or (dst.free_size if dst is not None else 0), detail, self.name,
            )  # fmt: skip
            for observe in launch.observers:
                observe(record)
        if self.params.log is not None:
            file, line = self.where()
            out = ", ".join(t.brief() for t in writes)
            src = ", ".join(t.brief() for t in reads)
            self.params.log(
                f"{self.index:6d} c{self.core} {engine:7s} {self.opcode} {out} <- {src} {short_path(file)}:{line}"
            )

    def allocate(self, kind: str, shape: tuple[int, ...], dtype: dtypes.DType, name: str, address: Any) -> Storage:
        """Storage for `nl.ndarray`."""
        frame = kernel_frame(2)
        source = (frame.f_code.co_filename, source_line(frame.f_code, frame.f_lasti))
        seed = self.params.poison_seed
        if kind in (SBUF, PSUM):
            arena = None
            if address is not None:
                arena = self.arenas.get(kind)
                if arena is None:
                    raw = self.target.sbuf_raw_bytes if kind == SBUF else self.target.psum_bytes
                    arena = self.arenas[kind] = Arena(raw, self.target.pmax)
            made = Storage(
                kind, kind, shape, dtype, name=name, source=source, arena=arena, address=address, pool=self.launch.pool,
                lives=self.lives[kind] if self.checks else None, home=self.core, seed=seed,
            )  # fmt: skip
            if self.checks:
                self.tiles.add(made)
            if kind == PSUM:
                from .tensor_engine import Accumulation

                made.accumulation = Accumulation(made)
            return made
        return Storage(HBM, kind, shape, dtype, name=name, source=source, home=self.core, seed=seed)


def has_subnormal(values: Array) -> bool:
    """True when a float32 array holds a subnormal (nonzero, below 2^-126). The common case costs two passes."""
    if values.size == 0:
        return False
    bits = values.view(np.uint32) if values.flags.c_contiguous else np.ascontiguousarray(values).view(np.uint32)
    magnitude = bits << np.uint32(1)  # drops the sign; subnormals are 1 .. 0x00FFFFFF
    magnitude -= np.uint32(1)  # zero wraps to the top
    return bool(magnitude.min() < 0x00FFFFFF)


def describe(value: Any) -> str:
    return f"{type(value).__name__} {value!r}"[:80]


@functools.cache
def _tensor_type() -> Any:
    from .tensor import NkiTensor

    return NkiTensor


_active: Machine | None = None


def current() -> Machine:
    """The machine that executes now."""
    if _active is None:
        raise KernelError("nki: called outside a kernel; run it through nki.simulate(kernel)(...) or kernel(...).")
    return _active


def running() -> Machine | None:
    return _active


def activate(machine: Machine | None) -> Machine | None:
    """Make `machine` current; returns the one before."""
    global _active
    before = _active
    _active = machine
    return before


_REMOVED = {
    "dtype": "declare the dst tile with the dtype you want",
    "mask": "use slices; mask= was removed after 0.1",
    "dst_rmw_op": "use nisa.dma_compute",
    "reduce_idx": "reduce with nisa.tensor_reduce",
}


def instruction(fn: F) -> F:
    """Make a function an instruction: budget, source position, `name=`, and errors that name the kernel line."""
    opcode = fn.__name__

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        machine = _active
        if machine is None:
            raise KernelError(f"{opcode}: called outside a kernel; run it through nki.simulate(kernel)(...).")
        launch = machine.launch
        launch.count += 1
        if launch.count > launch.limit:
            machine.frame, machine.opcode = kernel_frame(2), opcode
            machine.fail(
                0, f"more than {launch.limit} instructions; the loop may never end (max_instructions raises the limit)"
            )
        before = machine.opcode, machine.frame, machine.name
        machine.index = launch.count - 1
        machine.opcode = opcode
        frame = sys._getframe(1)
        machine.frame = frame if _inside.get(frame.f_code) is False else kernel_frame(2)
        machine.name = kwargs.get("name")
        try:
            return fn(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                hints = [f"; {text}" for word, text in _REMOVED.items() if f"'{word}'" in str(error)]
                machine.fail(0, str(error).replace(f"{opcode}() ", "") + "".join(hints))
            machine.fail_unexpected(error)
        except (SparseMlaError, MemoryError):
            raise
        except Exception as error:  # an argument of a kind no check foresaw still names the kernel line
            machine.fail_unexpected(error)
        finally:
            machine.opcode, machine.frame, machine.name = before

    call.is_instruction = True  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def not_simulated(opcode: str, why: str) -> NoReturn:
    """Refuse an instruction by name."""
    where = ""
    if _active is not None:
        file, line = _active.where()
        where = f" - {short_path(file)}:{line}"
    raise NotSimulatedError(f"{opcode}: not simulated: {why}{where}")


__all__ += ["HBM", "PSUM", "SBUF", "activate", "describe", "has_subnormal", "kernel_frame", "short_path"]
