# SPDX-License-Identifier: Apache-2.0
"""Running a kernel: `jit`, `simulate`, grids, two-core launches, arguments in and results out.

A kernel is an ordinary Python function that is executed with tensors whose instructions act at once. On a two-core
launch the cores alternate: core 0 runs until it waits for core 1 (barrier or exchange) or ends, then core 1; so results
do not depend on thread timing, and a core that never arrives is reported instead of waited for. With aws_compat a core
also hands over after each write to shared_hbm: both advance together, as third-party tests expect.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import config
from ..errors import ArgumentError, DTypeError, KernelError
from . import dtypes, target
from .blas import single_threaded
from .core import Array, Launch, Machine, Record, SimulatorWarning, WarningRecord, activate, running, short_path
from .memory import HBM, PSUM, SBUF, Peak, Storage, psum_peak, sbuf_peak
from .params import SimulatorParams
from .report import report
from .tensor import MemoryRegion, NKIObject, NkiTensor
from .timing import Estimate, estimate
from .trace import Trace

__all__ = ["Kernel", "Run", "cpu_simulate", "jit", "run", "simulate"]

MAX_CORES = 2


@dataclass
class Run:
    """What one simulated launch gave."""

    kernel: str
    value: Any  # what the kernel returned: one array, a tuple of arrays, or None
    target: target.Target
    params: SimulatorParams
    cores: int
    instructions: int
    records: list[Record]
    warnings: list[WarningRecord]
    sbuf_peaks: list[Peak]  # per core, bytes per partition
    psum_peaks: list[Peak]  # per core, banks
    inputs: dict[str, Storage] = field(default_factory=dict)

    @property
    def outputs(self) -> tuple[Any, ...]:
        """The results as a tuple."""
        if self.value is None:
            return ()
        return tuple(self.value) if isinstance(self.value, (tuple, list)) else (self.value,)

    @functools.cached_property
    def estimate(self) -> Estimate:
        """When everything would happen on the target: scheduled on first use from the records of the launch."""
        if not self.params.timing:
            raise ArgumentError(f"{self.kernel}: estimate needs SimulatorParams(timing=True), got timing=False.")
        return estimate(self.records, self.target, self.cores)

    @property
    def trace(self) -> Trace:
        """The timeline of the estimate; `run.trace.save("x.json")` opens in Perfetto."""
        return Trace(self.estimate, self.kernel)

    def report(self, *, path_lines: int = 10) -> str:
        """Time, engines, memory, critical path and warnings as text."""
        return report(self, path_lines=path_lines)


class Kernel:
    """A function compiled by `nki.jit`; call it, or index it with the number of cores first."""

    def __init__(self, function: Callable[..., Any], grid: tuple[int, ...] = (), **options: Any) -> None:
        self.func = function
        self.grid = grid
        self.options = options
        functools.update_wrapper(self, function)

    def __getitem__(self, grid: Any) -> Kernel:
        return Kernel(self.func, tuple(grid) if isinstance(grid, (tuple, list)) else (int(grid),), **self.options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        machine = running()
        if machine is not None:
            if machine.strict:
                machine.fail(50, f"{self.func.__name__} is a jit kernel; call plain functions from a kernel")
            machine.note(50, f"{self.func.__name__} is a jit kernel called from a kernel; plain functions are portable")
            return self.func(*args, **kwargs)
        return run(self, *args, **kwargs).value

    def __repr__(self) -> str:
        return f"<nki kernel {self.func.__name__}{list(self.grid) if self.grid else ''}>"


def jit(fn: Any = None, **options: Any) -> Any:
    """Make a function a kernel. Options of the real decorator (`mode=`, ..) are accepted and have no effect."""
    if fn is None:
        return functools.partial(jit, **options)
    return fn if isinstance(fn, Kernel) else Kernel(fn, **options)


class _Simulated:
    """`nki.simulate(kernel)`: runs on NumPy or torch arguments, also as `nki.simulate(kernel)[2](..)`."""

    def __init__(self, kernel: Any, params: SimulatorParams | None = None) -> None:
        self.kernel = jit(kernel)
        self.params = params

    def __getitem__(self, grid: Any) -> _Simulated:
        return _Simulated(self.kernel[grid], self.params)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run(self.kernel, *args, params=self.params, **kwargs).value


def simulate(kernel: Any, params: SimulatorParams | None = None) -> Any:
    """A callable that executes the kernel on the CPU and returns its results in the format of the arguments."""
    return _Simulated(kernel, params)


cpu_simulate = simulate  # name of older harnesses

_default_params = SimulatorParams()


def set_default_params(params: SimulatorParams) -> SimulatorParams:
    """Parameters of launches that name none; returns those before."""
    global _default_params
    before, _default_params = _default_params, params
    return before


def run(kernel: Any, *args: Any, grid: Any = None, params: SimulatorParams | None = None, **kwargs: Any) -> Run:
    """Execute a kernel and return everything known about the launch."""
    params = _default_params if params is None else params
    kernel = jit(kernel)
    if grid is not None:
        kernel = kernel[grid]
    cores = _cores(kernel.grid)
    facts = target.by_gen(params.gen) if params.gen is not None else target.from_environment()
    if running() is not None:
        raise KernelError(f"{kernel.func.__name__}: a launch inside a kernel; call plain functions from a kernel.")
    launch = Launch(params, facts, cores, kernel.grid, kernel.func.__name__)
    bound = _bind(kernel.func, args, kwargs)
    arguments = _Arguments(params)
    values = {name: arguments.convert(name, value) for name, value in bound.items()}
    with single_threaded():
        results = _execute(launch, kernel.func, values)
    value = _results(launch, results, arguments)
    arguments.finish()
    peaks = _capacity(launch)
    return Run(
        kernel.func.__name__, value, facts, params, cores, launch.count, launch.records, list(launch.warnings.values()),
        *peaks, inputs=arguments.storages,
    )  # fmt: skip


def _cores(grid: tuple[int, ...]) -> int:
    cores = 1
    for n in grid:
        cores *= n
    if not 1 <= cores <= MAX_CORES or (len(grid) > 1 and cores != grid[0]):
        raise ArgumentError(f"nki: the launch grid must be [1] or [2] (the LNC degree), got {list(grid)}.")
    wanted = config.get("NEURON_LOGICAL_NC_CONFIG")
    if wanted and wanted != cores:
        raise ArgumentError(
            f"nki: the launch uses {cores} cores but NEURON_LOGICAL_NC_CONFIG is {wanted}; they must agree."
        )
    return cores


def _bind(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    signature = inspect.signature(function)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ArgumentError(f"{function.__name__}: {error}.") from None
    bound.apply_defaults()
    flat: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            flat.update(value)
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            if value:
                raise ArgumentError(
                    f"{function.__name__}: *{name} is not part of the kernel language; name every argument."
                )
        else:
            flat[name] = value
    return flat


# -- arguments ----------------------------------------------------------------------------------------------------


class _Arguments:
    """Host values to kernel values; remembers what must be copied back or refused after the run."""

    def __init__(self, params: SimulatorParams) -> None:
        self.params = params
        self.torch = False
        self.storages: dict[str, Storage] = {}
        self.copied: list[tuple[str, Array, Array, Storage]] = []

    def convert(self, name: str, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return self.tensor(name, value)
        if isinstance(value, np.generic):
            return value.item()
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            self.torch = True
            return self.tensor(name, _numpy_of(name, value, torch))
        if isinstance(value, tuple):
            converted = [self.convert(f"{name}[{i}]", v) for i, v in enumerate(value)]
            return type(value)(*converted) if hasattr(value, "_fields") else tuple(converted)
        if isinstance(value, list):
            if not self.params.aws_compat:
                raise ArgumentError(f"nki: argument {name} is a list; kernels take tuples.")
            return [self.convert(f"{name}[{i}]", v) for i, v in enumerate(value)]
        if isinstance(value, dict):
            return {k: self.convert(f"{name}.{k}", v) for k, v in value.items()}
        if isinstance(value, NKIObject) and not isinstance(value, NkiTensor):
            fields = getattr(value, "__dict__", {})
            if any(_is_array(v) for v in fields.values()):
                made = object.__new__(type(value))
                made.__dict__.update({k: self.convert(f"{name}.{k}", v) for k, v in fields.items()})
                return made
        return value

    def tensor(self, name: str, array: Array) -> NkiTensor:
        element = dtypes.bool_ if array.dtype == np.bool_ else dtypes.from_any(array.dtype, f"nki: argument {name}")
        if array.size == 0:
            raise ArgumentError(f"nki: argument {name} has no elements, shape {array.shape}; guard in the caller.")
        shape = array.shape if array.ndim else (1,)
        owned = array
        if not array.flags.c_contiguous or not array.flags.writeable:
            owned = np.array(array, order="C", copy=True)
        data = owned.reshape(-1).view(np.uint8)
        storage = Storage(HBM, "input", shape, element, name=name, data=data)
        if owned is not array:
            self.copied.append((name, array, owned, storage))
        self.storages[name] = storage
        return NkiTensor(shape, element, storage, MemoryRegion.shared_hbm, name)

    def finish(self) -> None:
        """Kernels may write to their inputs: bring the writes back to arrays that had to be copied."""
        for name, array, owned, storage in self.copied:
            if not storage.writers:
                continue
            if not array.flags.writeable:
                raise ArgumentError(f"nki: the kernel writes to argument {name}, which is read-only.")
            array[...] = owned.reshape(array.shape)

    def result(self, t: NkiTensor) -> Any:
        array = t.array().copy()
        if t.dtype.is_bool:
            array = array.view(np.bool_)
        return _torch_of(array, sys.modules["torch"]) if self.torch else array


def _is_array(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return isinstance(value, np.ndarray) or (torch is not None and isinstance(value, torch.Tensor))


_TORCH_BITS = {
    "bfloat16": ("int16", dtypes.bfloat16), "float8_e4m3fn": ("uint8", dtypes.float8_e4m3fn),
    "float8_e5m2": ("uint8", dtypes.float8_e5m2), "float8_e8m0fnu": ("uint8", dtypes.float8_e8m0fnu),
}  # fmt: skip


def _numpy_of(name: str, tensor: Any, torch: Any) -> Array:
    if tensor.device.type != "cpu":
        raise DTypeError(f"nki: argument {name} is on {tensor.device}; the simulator takes CPU tensors.")
    tensor = tensor.detach()
    bits = _TORCH_BITS.get(str(tensor.dtype).removeprefix("torch."))
    if bits is None:
        return tensor.numpy()  # type: ignore[no-any-return]
    return tensor.view(getattr(torch, bits[0])).numpy().view(bits[1].np)  # type: ignore[no-any-return]


def _torch_of(array: Array, torch: Any) -> Any:
    bits = _TORCH_BITS.get(array.dtype.name)
    if bits is not None:
        return torch.from_numpy(array.view(bits[0])).view(getattr(torch, array.dtype.name))
    if array.dtype.name == "float8_e4m3":  # torch has no IEEE e4m3: hand out the bytes
        return torch.from_numpy(array.view(np.uint8))
    return torch.from_numpy(array)


# -- execution ----------------------------------------------------------------------------------------------------


class _Abort(BaseException):
    """Unwinds a core whose launch has failed elsewhere."""


def _execute(launch: Launch, function: Any, values: dict[str, Any]) -> list[Any]:
    if launch.cores == 1:
        activate(launch.machines[0])
        try:
            with np.errstate(all="ignore"):
                return [function(**values)]
        finally:
            activate(None)
    return _Cores(launch, function, values).run()


class _Cores:
    """Cores of one launch, each in its thread, exactly one of them running."""

    def __init__(self, launch: Launch, function: Any, values: dict[str, Any]) -> None:
        self.launch = launch
        self.function = function
        self.values = values
        n = launch.cores
        self.go = [threading.Semaphore(0) for _ in range(n)]
        self.back = threading.Semaphore(0)
        self.state: list[str] = ["ready"] * n
        self.keys: list[Any] = [None] * n
        self.payload: list[Any] = [None] * n
        self.exchanged: dict[int, Any] = {}
        self.position: list[tuple[str, str, int]] = [("", "", 0)] * n
        self.result: list[Any] = [None] * n
        self.error: BaseException | None = None
        self.aborting = False
        self.last = -1  # the core that ran last
        launch.meet = self.meet
        if launch.params.aws_compat:  # otherwise a missing barrier is to be found: one core runs far ahead
            launch.pause = self.pause

    def run(self) -> list[Any]:
        threads = [
            threading.Thread(target=self._body, args=(core,), name=f"core {core}", daemon=True)
            for core in range(self.launch.cores)
        ]
        for thread in threads:
            thread.start()
        try:
            while self.error is None and "ready" in self.state:
                n = len(self.state)
                self._step(next(c for k in range(n) if self.state[c := (self.last + 1 + k) % n] == "ready"))
                if self.error is None and "ready" not in self.state and "waiting" in self.state:
                    self._meet_or_deadlock()
        finally:
            self.aborting = True
            for core, thread in enumerate(threads):
                if self.state[core] in ("ready", "waiting"):
                    self.go[core].release()
                thread.join()
            activate(None)
        if self.error is not None:
            raise self.error
        return self.result

    def pause(self, machine: Machine) -> None:
        """Let the other core run: called after each write to shared memory."""
        if self.state.count("ready") > 1:
            self.back.release()
            self.go[machine.core].acquire()
            if self.aborting:
                raise _Abort

    def _step(self, core: int) -> None:
        self.last = core
        activate(self.launch.machines[core])
        self.go[core].release()
        self.back.acquire()

    def _meet_or_deadlock(self) -> None:
        if all(s == "waiting" for s in self.state) and len(set(self.keys)) == 1:
            self.state = ["ready"] * len(self.state)
            self.exchanged = dict(enumerate(self.payload))  # the first to go on may bring the next before others look
            return
        texts = []
        for core, state in enumerate(self.state):
            opcode, file, line = self.position[core]
            texts.append(
                f"core {core} waits in {opcode} at {short_path(file)}:{line}"
                if state == "waiting"
                else f"core {core} has finished"
            )
        error = KernelError(
            f"{self.launch.name}: the cores never meet: {', '.join(texts)} ({self.launch.target.name})."
        )
        error.check = 45  # type: ignore[attr-defined]
        self.error = error

    def _body(self, core: int) -> None:
        self.go[core].acquire()
        try:
            if self.aborting:
                return
            with np.errstate(all="ignore"):
                self.result[core] = self.function(**self.values)
            self.state[core] = "done"
        except _Abort:
            self.state[core] = "done"
        except BaseException as error:  # handed to the launching thread
            self.state[core] = "done"
            self.error = error
        finally:
            if not self.aborting:
                self.back.release()

    def meet(self, machine: Machine, key: tuple[Any, ...], payload: Any) -> dict[int, Any]:
        core = machine.core
        self.keys[core], self.payload[core], self.state[core] = key, payload, "waiting"
        file, line = machine.where()
        self.position[core] = (machine.opcode, file, line)
        self.back.release()
        self.go[core].acquire()
        if self.aborting:
            raise _Abort
        return self.exchanged


# -- results ------------------------------------------------------------------------------------------------------


def _fault(launch: Launch, check: int, text: str) -> None:
    error = KernelError(f"{launch.name}: {text} ({launch.target.name}).")
    error.check = check  # type: ignore[attr-defined]
    raise error


def _results(launch: Launch, results: list[Any], arguments: _Arguments) -> Any:
    first = results[0]
    if first is None:
        return None
    several = isinstance(first, (tuple, list))
    outputs = list(first) if several else [first]
    others = [list(r) if isinstance(r, (tuple, list)) else [r] for r in results[1:]]
    converted: list[Any] = []
    for i, t in enumerate(outputs):
        if t is None:
            converted.append(None)
            continue
        if type(t) is not NkiTensor:
            _fault(launch, 47, f"output {i} must be a tensor, got {type(t).__name__}")
        _check_output(launch, i, t, [o[i] for o in others if len(o) > i])
        converted.append(arguments.result(t))
    return (tuple(converted) if isinstance(first, tuple) else converted) if several else converted[0]


def _check_output(launch: Launch, i: int, t: NkiTensor, elsewhere: list[Any]) -> None:
    if not launch.params.checks:
        return
    st = t.storage
    where = f"declared at {short_path(st.source[0])}:{st.source[1]}"
    relaxed = launch.params.aws_compat
    if st.kind not in ("shared_hbm", "input") and not (relaxed and st.memory == HBM):
        _fault(launch, 47, f"output {i} {t.brief()} must be in shared_hbm, {where}")
    if st.kind == "shared_hbm" and not st.name and not relaxed:
        for other in elsewhere:
            if isinstance(other, NkiTensor) and other.storage is not st and other.storage.writers:
                _fault(
                    launch, 45,
                    f"output {i} {t.brief()} has no name, so each core has its own copy and core 1's writes are "
                    f"lost; give it name=, {where}",
                )  # fmt: skip
    if not st.is_initialised(t.shape, t.byte_strides, t.byte_offset, t.dtype.itemsize):
        machine = launch.machines[0]
        key = (47, "output", st.source[0], st.source[1])
        text = f"{launch.name}: output {i} {t.brief()} has elements never written ({machine.target.name}), {where}"
        launch.warnings[key] = WarningRecord(47, text, *st.source)
        if launch.params.show_warnings:
            warnings.warn(SimulatorWarning(text), stacklevel=4)


def _capacity(launch: Launch) -> tuple[list[Peak], list[Peak]]:
    """Peaks of live SBUF bytes and PSUM banks per core, judged."""
    sbuf, psum = [], []
    facts = launch.target
    for machine in launch.machines:
        for st in list(machine.tiles):
            st.retire()
        s, p = sbuf_peak(machine.lives[SBUF]), psum_peak(machine.lives[PSUM], facts)
        sbuf.append(s)
        psum.append(p)
        if not launch.params.checks:
            continue
        if p.amount > facts.psum_num_banks:
            _fault(launch, 19, _peak_text("PSUM", f"{p.amount} banks", f"{facts.psum_num_banks} banks", p, machine))
        if s.amount > facts.sbuf_raw_bytes and not launch.params.aws_compat:
            _fault(
                launch, 20, _peak_text("SBUF", f"{s.amount} B per partition", f"{facts.sbuf_raw_bytes} B", s, machine)
            )
        if s.amount > facts.usable_sbuf_bytes:
            text = _peak_text("SBUF", f"{s.amount} B per partition", f"{facts.usable_sbuf_bytes} B usable", s, machine)
            source = s.largest[0].source if s.largest else ("", 0)
            known = WarningRecord(20, f"{launch.name}: {text} ({facts.name}).", *source)
            launch.warnings[(20, "capacity", *source)] = known
            if launch.params.show_warnings:
                warnings.warn(SimulatorWarning(known.message), stacklevel=4)
    return sbuf, psum


def _peak_text(memory: str, amount: str, limit: str, peak: Peak, machine: Machine) -> str:
    tiles = "; ".join(f"{t.shape} {t.dtype} at {short_path(t.source[0])}:{t.source[1]}" for t in peak.largest)
    record = next((r for r in machine.launch.records if r.index == peak.instruction), None)
    at = f" at {record.source}" if record is not None else ""
    return f"{amount} of {memory} alive at once{at}, limit {limit}; largest tiles: {tiles}"
