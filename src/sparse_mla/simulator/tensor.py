# SPDX-License-Identifier: Apache-2.0
"""`NkiTensor`: a view of storage - shape, strides and offset - plus at most one dynamic index.

Views never copy. Internally strides and offsets are bytes over the logical storage: on-chip storage is (partition, free
byte), so one partition step is `row_bytes`; HBM storage is flat. Public `strides` and `offset` are in elements. A view
with
a scalar index is turned into a plain one when an instruction executes; a vector index is consumed by the DMA engines.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NoReturn

import numpy as np

from ..errors import KernelError
from . import dtypes
from .core import Operand, not_simulated, running, short_path, source_line
from .core import kernel_frame as _kernel_frame
from .dtypes import DType
from .memory import HBM, PSUM, SBUF, Storage

__all__ = ["DynamicSlice", "MemoryRegion", "NKIObject", "NkiTensor", "VirtualRegister", "resolve"]

Array = np.ndarray[Any, np.dtype[Any]]


@functools.cache
def _parameters(cls: type) -> tuple[tuple[str, ...], frozenset[str]]:
    """(all parameters of making one, those without a default)."""
    init = next(c.__dict__["__init__"] for c in cls.__mro__ if "__init__" in c.__dict__)
    taken = list(inspect.signature(init).parameters.values())[1:]
    plain = [p for p in taken if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return tuple(p.name for p in plain), frozenset(p.name for p in plain if p.default is p.empty)


class _Fields(type):
    """Under aws_compat a dataclass is made as published kernels expect of the device's tracer, not as Python does:
    fields may be left out (they are None), and class attributes without an annotation are fields too."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "__dataclass_fields__" not in cls.__dict__ or not _compat():
            return super().__call__(*args, **kwargs)
        parameters, needed = _parameters(cls)
        left_out = sorted(needed - set(parameters[: len(args)]) - set(kwargs))
        bare = {name: kwargs.pop(name) for name in list(kwargs) if name not in parameters and hasattr(cls, name)}
        machine = running()
        if machine is not None and (left_out or bare):
            text = f"without {', '.join(left_out)}" if left_out else f"with {', '.join(bare)}, which have no annotation"
            machine.warn(0, f"{cls.__name__} is made {text}; Python refuses that")
        made = super().__call__(*args, **kwargs, **dict.fromkeys(left_out))
        for name, value in bare.items():
            setattr(made, name, value)
        return made


class NKIObject(metaclass=_Fields):
    """Base of configuration objects and dataclasses used inside kernels."""

    def __init__(self, **kwargs: Any) -> None:
        for key, value in kwargs.items():
            setattr(self, key, value)


class MemoryRegion(StrEnum):
    """Memories a tensor may be declared in."""

    sbuf = "sbuf"
    psum = "psum"
    private_hbm = "private_hbm"
    hbm = "private_hbm"
    shared_hbm = "shared_hbm"


_REGION = {
    SBUF: MemoryRegion.sbuf, PSUM: MemoryRegion.psum, "private_hbm": MemoryRegion.private_hbm,
    "shared_hbm": MemoryRegion.shared_hbm, "input": MemoryRegion.shared_hbm,
}  # fmt: skip


def refuse(check: int, message: str) -> NoReturn:
    """An error of view arithmetic, at the kernel line."""
    machine = running()
    if machine is not None:
        before = machine.opcode, machine.frame
        machine.opcode, machine.frame = "view", _kernel_frame(2)
        try:
            machine.fail(check, message)
        finally:
            machine.opcode, machine.frame = before
    frame = _kernel_frame(2)
    error = KernelError(
        f"view: {message} - {short_path(frame.f_code.co_filename)}:{source_line(frame.f_code, frame.f_lasti)}"
    )
    error.check = check  # type: ignore[attr-defined]
    raise error


def _compat() -> bool:
    """True when the launch relaxes rules to the vendor's simulator: slices are cut at the end, empty ones allowed."""
    machine = running()
    return machine is not None and machine.compat


class VirtualRegister(NKIObject):
    """A 32-bit scalar register. Only `nisa.register_*` and loops may change it; Python arithmetic on it is refused."""

    __slots__ = ("frozen", "state")

    def __init__(self, state: int | None = None, frozen: bool = False) -> None:
        self.state = state
        self.frozen = frozen

    def value(self) -> int:
        if self.state is None:
            refuse(46, "register is read before it was loaded")
        return self.state

    def __repr__(self) -> str:
        return f"VirtualRegister({self.state})"

    def _no_arithmetic(self, *_: Any) -> NoReturn:
        refuse(
            50,
            "Python arithmetic, comparison or indexing on a run-time register; compute in a tile and register_load it",
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __mod__ = _no_arithmetic
    __rfloordiv__ = __rmod__ = __truediv__ = __lshift__ = __rshift__ = __and__ = __or__ = __neg__ = _no_arithmetic
    __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __int__ = __index__ = _no_arithmetic

    def __eq__(self, other: object) -> bool:
        if other is None or isinstance(other, VirtualRegister):
            return self is other
        self._no_arithmetic()

    def __hash__(self) -> int:
        return id(self)


class DynamicSlice(NKIObject):
    """`nl.ds(start, size)`: a slice whose start may be known only at run time."""

    __slots__ = ("size", "start")

    def __init__(self, start: Any, size: int) -> None:
        self.start = start
        self.size = size

    def __repr__(self) -> str:
        return f"ds({self.start}, {self.size})"


class NkiTensor(NKIObject):
    """A tensor or a view of one. See the module docstring for how it addresses storage."""

    __slots__ = (
        "_array", "_operand", "base_rows", "byte_offset", "byte_strides", "dtype", "legal", "memory", "row_step",
        "scalar_index", "scalar_limit", "scalar_step", "shape", "storage", "suspect", "vector_index",
    )  # fmt: skip

    shape: tuple[int, ...]
    dtype: DType
    byte_strides: tuple[int, ...]
    byte_offset: int

    def __init__(self, shape: Any, dtype: Any, storage: Any, buffer: Any = MemoryRegion.sbuf, name: str = "") -> None:
        self.shape = tuple(int(s) for s in shape)
        self.dtype = dtypes.from_any(dtype)
        if storage is None:
            kind = str(MemoryRegion(buffer))
            home = kind if kind in (SBUF, PSUM) else HBM
            storage = Storage(home, kind, self.shape, self.dtype, name=name)
        self.storage: Storage = storage
        self.memory: str = storage.memory
        strides = [self.dtype.itemsize] * len(self.shape)
        for i in range(len(self.shape) - 2, -1, -1):
            strides[i] = strides[i + 1] * self.shape[i + 1]
        if self.memory != HBM:
            strides[0] = storage.row_bytes
        self.byte_strides = tuple(strides)
        self.byte_offset = 0
        self.scalar_index: Any = None
        self.scalar_step = 0
        self.vector_index: NkiTensor | None = None
        self.row_step = 0
        self.base_rows = 0
        self.scalar_limit = -1  # largest index that stays inside the dim, -1 when only the storage bounds it
        self.suspect = False  # an `.ap` reached outside the storage: an error once an instruction uses it
        self.legal = False
        self._array: Array | None = None
        self._operand: Operand | None = None

    def _view(
        self, shape: tuple[int, ...], byte_strides: tuple[int, ...], byte_offset: int, dtype: DType | None = None
    ) -> NkiTensor:
        made = NkiTensor.__new__(NkiTensor)
        made.storage = self.storage
        made.memory = self.memory
        made.shape = shape
        made.byte_strides = byte_strides
        made.byte_offset = byte_offset
        made.dtype = self.dtype if dtype is None else dtype
        made.scalar_index = self.scalar_index
        made.scalar_step = self.scalar_step
        made.vector_index = self.vector_index
        made.row_step = self.row_step
        made.base_rows = self.base_rows
        made.scalar_limit = self.scalar_limit
        made.suspect = self.suspect
        made.legal = False
        made._array = None
        made._operand = None
        return made

    # -- facts ---------------------------------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        count = 1
        for n in self.shape:
            count *= n
        return count

    @property
    def free_size(self) -> int:
        """Elements per partition (of dim 0)."""
        count = 1
        for n in self.shape[1:]:
            count *= n
        return count

    @property
    def name(self) -> str:
        return self.storage.name

    @property
    def buffer(self) -> MemoryRegion:
        return _REGION[self.storage.kind]

    @property
    def strides(self) -> tuple[int, ...]:
        """Element strides; on-chip, dim 0 steps by the free elements of one partition."""
        size = self.dtype.itemsize
        return tuple([s // size for s in self.byte_strides])

    @property
    def offset(self) -> int:
        return self.byte_offset // self.dtype.itemsize

    @property
    def p0(self) -> int:
        """First partition touched."""
        st = self.storage
        start = self.byte_offset // st.row_bytes if self.memory != HBM else 0
        return start + st.address[0] if st.address is not None else start

    @property
    def lanes(self) -> slice:
        """Partitions as a slice: the registers an engine uses for this tile."""
        return slice(self.p0, self.p0 + self.shape[0])

    @property
    def partition_step(self) -> int:
        return self.byte_strides[0] // self.storage.row_bytes if self.memory != HBM else 1

    @property
    def is_whole(self) -> bool:
        """True when the view covers every byte of its storage exactly once."""
        st = self.storage
        if self.size * self.dtype.itemsize != st.partitions * st.row_bytes:
            return False
        expected = self.dtype.itemsize
        for stride, count in sorted(zip(self.byte_strides, self.shape, strict=True)):
            if count != 1:
                if stride != expected:
                    return False
                expected *= count
        return True

    def brief(self) -> str:
        """(shape) dtype memory: how messages show a tile."""
        label = f" '{self.storage.name}'" if self.storage.name else ""
        return f"{tuple(self.shape)} {self.dtype} {self.memory.upper()}{label}"

    def __repr__(self) -> str:
        if self.is_indirect():
            return f"NkiTensor({self.brief()}, indirect)"
        return f"NkiTensor({self.brief()})\n{self.array()!r}"

    def numpy(self) -> Array:
        """A copy of the present contents, for debugging; fresh memory shows its poison."""
        return resolve(self).array().copy()

    def __len__(self) -> int:
        return self.shape[0]

    def is_contiguous(self) -> bool:
        expected = self.dtype.itemsize
        first = 0 if self.memory == HBM else 1
        for i in range(self.ndim - 1, first - 1, -1):
            if self.shape[i] != 1:
                if self.byte_strides[i] != expected:
                    return False
                expected *= self.shape[i]
        return True

    def get_pattern(self) -> list[list[int]]:
        return [[s, n] for s, n in zip(self.strides, self.shape, strict=True)]

    def is_indirect(self) -> bool:
        return self.scalar_index is not None or self.vector_index is not None

    def array(self) -> Array:
        """The elements as a NumPy view of storage."""
        made = self._array
        if made is None:
            if self.suspect and (text := self.outside()):
                refuse(33, text)
            st = self.storage
            if st.pitch == st.row_bytes:
                made = np.ndarray(self.shape, self.dtype.np, st.data, st.base + self.byte_offset, self.byte_strides)
            else:
                row, free = divmod(self.byte_offset, st.row_bytes)
                step = self.byte_strides[0] // st.row_bytes * st.pitch
                made = np.ndarray(
                    self.shape, self.dtype.np, st.data, st.base + row * st.pitch + free, (step, *self.byte_strides[1:])
                )
            self._array = made
        return made

    def operand(self) -> Operand:
        """The facts the timing layer asks for."""
        made = self._operand
        if made is None:
            made = self._operand = Operand()
            st = self.storage
            itemsize = self.dtype.itemsize
            first = 0 if self.memory == HBM and self.vector_index is None else 1
            extent = itemsize
            run = itemsize
            step = outer = 0
            contiguous = True
            stride0 = False
            shape, strides = self.shape, self.byte_strides
            for i in range(len(shape) - 1, first - 1, -1):
                n = shape[i]
                if n == 1:
                    continue
                s = strides[i]
                extent += (n - 1) * s
                if s > step:
                    step, outer = s, (n - 1) * s
                if s == 0:
                    stride0 = True
                if contiguous and s == run:
                    run *= n
                else:
                    contiguous = False
            made.ident, made.memory, made.itemsize, made.dtype = st.ident, self.memory, itemsize, str(self.dtype)
            made.contiguous, made.run_bytes, made.stride0, made.name = contiguous, run, stride0, st.name
            made.address = st.address
            made.step, made.span = step, extent - outer
            if self.memory == HBM:
                made.p0, made.p1, made.b0 = 0, 1, self.byte_offset
                made.partitions, made.elements = 1, self.size
            else:
                made.p0, made.b0 = divmod(self.byte_offset, st.row_bytes)
                made.p1 = made.p0 + (shape[0] - 1) * (strides[0] // st.row_bytes) + 1
                made.partitions, made.elements = shape[0], self.free_size
            made.b1 = made.b0 + extent
            if self.vector_index is not None:
                made.b0, made.b1, made.step = 0, st.row_bytes, 0
        return made

    # -- indexing ------------------------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> NkiTensor:
        keys: Sequence[Any] = key if type(key) is tuple else (key,)
        shape, strides = self.shape, self.byte_strides
        given = len(keys)
        if Ellipsis in [k for k in keys if k is Ellipsis]:
            at = [i for i, k in enumerate(keys) if k is Ellipsis]
            if len(at) > 1:
                refuse(23, "an index may hold one Ellipsis")
            fill = len(shape) - (given - 1)
            keys = (*keys[: at[0]], *([slice(None)] * fill), *keys[at[0] + 1 :])
            given = len(keys)
        if given > len(shape):
            refuse(23, f"{given} indices for {self.brief()}")
        on_chip = self.memory != HBM
        new_shape: list[int] = []
        new_strides: list[int] = []
        offset = self.byte_offset
        dynamic: tuple[Any, int, int] | None = None  # index, byte step, largest legal value
        for i in range(given):
            k = keys[i]
            n = shape[i]
            s = strides[i]
            kind = type(k)
            if kind is slice:
                if self.vector_index is not None and i == 0 and k != slice(None):
                    refuse(32, "the indirect dim of a view cannot be sliced")
                start = 0 if k.start is None else k.start
                stop = n if k.stop is None else k.stop
                step = 1 if k.step is None else k.step
                if isinstance(start, VirtualRegister) or isinstance(stop, VirtualRegister):
                    refuse(50, "a slice bound is a run-time register; use nl.ds(start, size)")
                start, stop, step = int(start), int(stop), int(step)
                if start < 0:
                    start += n
                if stop < 0:
                    stop += n
                if step < 1:
                    refuse(3, f"slice step {step} of dim {i} must be positive")
                if stop > n:
                    if not _compat():
                        refuse(23, f"slice {start}:{stop} of dim {i} reaches past the end of {self.brief()}")
                    stop = n
                if not 0 <= start < stop and not (0 <= start == stop <= n and _compat()):
                    refuse(23, f"slice {start}:{stop} of dim {i} of {self.brief()} is empty or out of range")
                offset += start * s
                new_shape.append(-((start - stop) // step))
                new_strides.append(s * step)
            elif kind is DynamicSlice:
                size = int(k.size)
                if isinstance(k.start, (VirtualRegister, NkiTensor)):
                    if dynamic is not None or self.is_indirect():
                        refuse(32, "one dynamic dim per view")
                    if not 1 <= size <= n:
                        refuse(23, f"ds({k.start}, {size}) of dim {i} reaches outside {self.brief()}")
                    dynamic = (k.start, s, n - size)
                else:
                    start = int(k.start)
                    if start < 0 or size < (0 if _compat() else 1) or start + size > n:
                        refuse(23, f"ds({start}, {size}) of dim {i} reaches outside {self.brief()}")
                    offset += start * s
                new_shape.append(size)
                new_strides.append(s)
            elif k is None:
                refuse(23, "None does not index a tensor; use expand_dim")
            elif isinstance(k, (VirtualRegister, NkiTensor)):
                if dynamic is not None or self.is_indirect():
                    refuse(32, "one dynamic dim per view")
                dynamic = (k, s, n - 1)
                if on_chip and i == 0:
                    new_shape.append(1)
                    new_strides.append(s)
            else:
                try:
                    index = int(k.__index__())
                except AttributeError:
                    refuse(23, f"index {k!r} of dim {i} must be an int, a slice, nl.ds or Ellipsis")
                if index < 0:
                    index += n
                if not 0 <= index < n:
                    refuse(23, f"index {k} of dim {i} is out of range for {self.brief()}")
                if self.vector_index is not None and i == 0:
                    refuse(32, "the indirect dim of a view cannot be selected")
                offset += index * s
                if on_chip and i == 0:
                    new_shape.append(1)
                    new_strides.append(s)
        if given < len(shape):
            new_shape += shape[given:]
            new_strides += strides[given:]
        size = self.dtype.itemsize
        if on_chip and len(new_shape) == 1:
            new_shape.append(1)
            new_strides.append(size)
        elif not new_shape:
            new_shape, new_strides = [1], [size]
        made = self._view(tuple(new_shape), tuple(new_strides), offset)
        if dynamic is not None:
            made.scalar_index, made.scalar_step, made.scalar_limit = dynamic
        return made

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        refuse(50, "assigning to a tensor slice is not part of the language; use nisa.tensor_copy or nisa.dma_copy")

    def _no_operator(self, *_: Any) -> NoReturn:
        refuse(
            50,
            "Python operators on tensors are not instructions; use nisa.tensor_tensor / tensor_scalar or nl functions",
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _no_operator
    __neg__ = __matmul__ = __and__ = __or__ = __xor__ = __lt__ = __le__ = __gt__ = __ge__ = _no_operator
    __iter__ = None

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (int, float)) and not _compat():
            self._no_operator()
        return self is other

    def __hash__(self) -> int:
        return id(self)

    # -- views ---------------------------------------------------------------------------------------------------

    def _dim(self, dim: int, *, insert: bool = False) -> int:
        limit = self.ndim + (1 if insert else 0)
        if dim < 0:
            dim += limit
        if not 0 <= dim < limit:
            refuse(23, f"dim {dim} is out of range for {self.brief()}")
        return dim

    def _free_only(self, what: str, dim: int) -> None:
        if dim == 0 and self.memory != HBM:
            refuse(3, f"{what}: dim 0 of {self.brief()} is the partition axis")
        if dim == 0 and self.vector_index is not None:
            refuse(32, f"{what}: dim 0 of the view is indirect")

    def slice(self, dim: int, start: int, end: int, step: int = 1) -> NkiTensor:
        """Elements start, start+step, .. < end of one dim."""
        dim = self._dim(dim)
        n = self.shape[dim]
        if not 0 <= start < end <= n or step < 1:
            refuse(23, f"slice(dim={dim}, {start}, {end}, {step}) must satisfy 0 <= start < end <= {n} and step >= 1")
        if self.vector_index is not None and dim == 0:
            refuse(32, "the indirect dim of a view cannot be sliced")
        shape, strides = list(self.shape), list(self.byte_strides)
        shape[dim] = -((start - end) // step)
        strides[dim] *= step
        return self._view(tuple(shape), tuple(strides), self.byte_offset + start * self.byte_strides[dim])

    def select(self, dim: int, index: Any) -> NkiTensor:
        """One element of one dim, which disappears; the index may be a run-time scalar."""
        dim = self._dim(dim)
        self._free_only("select", dim) if self.memory != HBM or self.vector_index is not None else None
        shape = self.shape[:dim] + self.shape[dim + 1 :]
        strides = self.byte_strides[:dim] + self.byte_strides[dim + 1 :]
        if not shape:
            shape, strides = (1,), (self.dtype.itemsize,)
        if self.memory != HBM and len(shape) == 1:
            shape, strides = (*shape, 1), (*strides, self.dtype.itemsize)
        if isinstance(index, (NkiTensor, VirtualRegister)):
            if self.is_indirect():
                refuse(32, "one dynamic dim per view")
            made = self._view(shape, strides, self.byte_offset)
            made.scalar_index, made.scalar_step = index, self.byte_strides[dim]
            made.scalar_limit = self.shape[dim] - 1
            return made
        if not 0 <= index < self.shape[dim]:
            refuse(23, f"select(dim={dim}, {index}) is out of range for {self.brief()}")
        return self._view(shape, strides, self.byte_offset + index * self.byte_strides[dim])

    def permute(self, dims: Sequence[int]) -> NkiTensor:
        """Dims in another order; dim 0 stays first on-chip."""
        dims = tuple(dims)
        if sorted(dims) != list(range(self.ndim)):
            refuse(23, f"permute{dims} is no permutation of the {self.ndim} dims of {self.brief()}")
        if dims[0] != 0:
            self._free_only("permute", 0)
        return self._view(
            tuple([self.shape[d] for d in dims]), tuple([self.byte_strides[d] for d in dims]), self.byte_offset
        )

    def broadcast(self, dim: int, size: int) -> NkiTensor:
        """Repeat a size-1 dim by stride 0."""
        dim = self._dim(dim)
        self._free_only("broadcast", dim)
        if self.shape[dim] != 1:
            refuse(23, f"broadcast: dim {dim} of {self.brief()} must have size 1")
        shape, strides = list(self.shape), list(self.byte_strides)
        shape[dim], strides[dim] = size, 0
        return self._view(tuple(shape), tuple(strides), self.byte_offset)

    def expand_dim(self, dim: int) -> NkiTensor:
        """Insert a dim of size 1."""
        dim = self._dim(dim, insert=True)
        self._free_only("expand_dim", dim)
        stride = self.dtype.itemsize if dim == self.ndim else self.byte_strides[dim] * self.shape[dim]
        return self._view(
            (*self.shape[:dim], 1, *self.shape[dim:]),
            (*self.byte_strides[:dim], stride, *self.byte_strides[dim:]),
            self.byte_offset,
        )

    def squeeze_dim(self, dim: int) -> NkiTensor:
        """Drop a dim of size 1."""
        dim = self._dim(dim)
        self._free_only("squeeze_dim", dim)
        if self.shape[dim] != 1:
            refuse(23, f"squeeze_dim: dim {dim} of {self.brief()} must have size 1")
        return self._view(
            self.shape[:dim] + self.shape[dim + 1 :],
            self.byte_strides[:dim] + self.byte_strides[dim + 1 :],
            self.byte_offset,
        )

    def reshape_dim(self, dim: int, shape: Sequence[int]) -> NkiTensor:
        """Split one dim; one size may be -1."""
        dim = self._dim(dim)
        sizes = list(shape)
        if len(sizes) > 1:
            self._free_only("reshape_dim", dim)
        sizes = _fill(sizes, self.shape[dim], self.brief())
        strides = [self.byte_strides[dim]] * len(sizes)
        for i in range(len(sizes) - 2, -1, -1):
            strides[i] = strides[i + 1] * sizes[i + 1]
        return self._view(
            (*self.shape[:dim], *sizes, *self.shape[dim + 1 :]),
            (*self.byte_strides[:dim], *strides, *self.byte_strides[dim + 1 :]),
            self.byte_offset,
        )

    def flatten_dims(self, start_dim: int, end_dim: int) -> NkiTensor:
        """Merge dims start_dim .. end_dim, which must be contiguous."""
        start_dim, end_dim = self._dim(start_dim), self._dim(end_dim)
        if start_dim > end_dim:
            refuse(23, f"flatten_dims({start_dim}, {end_dim}): start must not exceed end")
        if start_dim != end_dim:
            self._free_only("flatten_dims", start_dim)
        merged = merge(self.shape[start_dim : end_dim + 1], self.byte_strides[start_dim : end_dim + 1])
        if merged is None:
            refuse(23, f"flatten_dims({start_dim}, {end_dim}): the dims of {self.brief()} are not contiguous")
        size, stride = merged
        return self._view(
            (*self.shape[:start_dim], size, *self.shape[end_dim + 1 :]),
            (*self.byte_strides[:start_dim], stride, *self.byte_strides[end_dim + 1 :]),
            self.byte_offset,
        )

    def reshape(self, *shape: Any) -> NkiTensor:
        """Another shape over the same bytes; dim 0 is fixed on-chip."""
        sizes = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else list(shape)
        sizes = _fill([int(s) for s in sizes], self.size, self.brief())
        fixed = 0 if self.memory == HBM and self.vector_index is None else 1
        if fixed and (not sizes or sizes[0] != self.shape[0]):
            refuse(3, f"reshape{tuple(sizes)}: dim 0 of {self.brief()} is the partition axis and keeps its size")
        strides = _reshape(self.shape[fixed:], self.byte_strides[fixed:], sizes[fixed:], self.dtype.itemsize)
        if strides is None:
            refuse(23, f"reshape{tuple(sizes)}: the layout of {self.brief()} does not allow it without a copy")
        return self._view(tuple(sizes), (*self.byte_strides[:fixed], *strides), self.byte_offset)

    def rearrange(
        self, src_pattern: Sequence[Any], dst_pattern: Sequence[Any], fixed_sizes: dict[str, int] | None = None
    ) -> NkiTensor:
        """Split, permute and merge dims by name, as einops does."""
        sizes = dict(fixed_sizes or {})
        view = self
        flat: list[str] = []
        if len(src_pattern) != self.ndim:
            refuse(23, f"rearrange: {tuple(src_pattern)} must name the {self.ndim} dims of {self.brief()}")
        for entry in src_pattern:
            if isinstance(entry, str):
                flat.append(entry)
            else:
                view = view.reshape_dim(len(flat), [sizes.get(name, -1) for name in entry])
                flat.extend(entry)
        names = [n for entry in dst_pattern for n in ((entry,) if isinstance(entry, str) else entry)]
        if sorted(names) != sorted(flat) or len(set(flat)) != len(flat):
            refuse(23, f"rearrange: {tuple(dst_pattern)} must use each name of {tuple(src_pattern)} once")
        for name, size in sizes.items():
            if name in flat and view.shape[flat.index(name)] != size:
                refuse(23, f"rearrange: {name} is {view.shape[flat.index(name)]}, not {size}")
        view = view.permute([flat.index(n) for n in names])
        for position, entry in enumerate(dst_pattern):
            if not isinstance(entry, str) and len(entry) > 1:
                view = view.flatten_dims(position, position + len(entry) - 1)
        return view

    def view(self, dtype: Any) -> NkiTensor:
        """The same bytes as another element type; the last dim scales."""
        new = dtypes.from_any(dtype)
        old_size, new_size = self.dtype.itemsize, new.itemsize
        _available(new)
        if old_size == new_size:
            return self._view(self.shape, self.byte_strides, self.byte_offset, new)
        if self.is_indirect():
            refuse(32, "view(dtype) of another size is not possible on an indirect view")
        last = self.ndim - 1
        if self.shape[last] != 1 and self.byte_strides[last] != old_size:
            refuse(23, f"view({new}): the last dim of {self.brief()} must be contiguous")
        nbytes = self.shape[last] * old_size
        if nbytes % new_size:
            refuse(23, f"view({new}): {nbytes} bytes of the last dim of {self.brief()} are no multiple of {new_size}")
        shape = (*self.shape[:last], nbytes // new_size)
        strides = self.byte_strides[:last]
        if any(s % new_size for s, n in zip(strides, shape, strict=False) if n != 1) or self.byte_offset % new_size:
            refuse(23, f"view({new}): strides or offset of {self.brief()} are no multiple of {new_size} bytes")
        if self.memory != HBM and last == 0:
            refuse(23, "on-chip tensors have a partition and a free axis")
        return self._view(shape, (*strides, new_size), self.byte_offset, new)

    reinterpret_cast = view

    def vector_select(self, dim: int, vector_offset: NkiTensor) -> NkiTensor:
        """Rows of dim 0 picked per partition by a (P, 1) index tile."""
        if dim != 0:
            refuse(32, f"vector_select: dim must be 0, got {dim}")
        if self.is_indirect():
            refuse(32, "one dynamic dim per view")
        return self.ap(
            [[self.strides[0], vector_offset.shape[0]], *self.get_pattern()[1:]], vector_offset=vector_offset
        )

    def indirect(self, index: NkiTensor, num_elem: int | None = None) -> NkiTensor:
        """Free-axis gather or scatter inside compute instructions (trn3)."""
        machine = running()
        if machine is not None and machine.target.gen < 4:
            refuse(48, ".indirect() views exist from trn3 on")
        not_simulated("NkiTensor.indirect", "gathers inside compute instructions exist on trn3 only")

    def ap(
        self,
        pattern: Sequence[Sequence[int]],
        offset: int | None = None,
        scalar_offset: Any = None,
        vector_offset: NkiTensor | None = None,
        indirect_dim: int = 0,
        dtype: Any = None,
    ) -> NkiTensor:
        """An explicit [[stride, count], ..] pattern over the storage, from this view's base offset."""
        st = self.storage
        new = self.dtype if dtype is None else dtypes.from_any(dtype)
        if dtype is not None:
            _available(new)
        size = new.itemsize
        if not pattern:
            refuse(23, "ap: the pattern is empty")
        shape = tuple([int(pair[1]) for pair in pattern])
        strides = [int(pair[0]) * size for pair in pattern]
        start = self.byte_offset + (0 if offset is None else int(offset) * size)
        if min(shape) < 1:
            refuse(23, f"ap: counts must be positive, got {shape}")
        if min(strides) < 0:
            refuse(3, f"ap: strides must not be negative, got {[p[0] for p in pattern]}")
        if scalar_offset is not None and vector_offset is not None:
            refuse(32, "ap: scalar_offset and vector_offset exclude each other")
        if (scalar_offset is not None or vector_offset is not None) and self.is_indirect():
            refuse(32, "ap: the view is indirect already")
        if self.memory != HBM:
            if len(shape) == 1:
                refuse(3, "ap: an on-chip pattern has a partition pair and at least one free pair")
            if shape[0] == 1:
                strides[0] = st.row_bytes
            elif strides[0] % st.row_bytes:
                refuse(
                    3,
                    f"ap: the first stride {pattern[0][0]} must step whole partitions of "
                    f"{st.row_bytes // size} elements of {self.brief()}",
                )
            elif strides[0] == 0:
                refuse(3, "ap: an on-chip partition stride of 0 does not exist; broadcast by DMA from HBM")
        made = self._view(shape, tuple(strides), start, new)
        if vector_offset is not None:
            _check_vector(self, vector_offset, indirect_dim, shape[0])
            made.vector_index = vector_offset
            made.row_step = self.byte_strides[indirect_dim] if self.ndim > 1 else self.dtype.itemsize
            if made.row_step == 0:
                refuse(32, f"ap: vector_offset cannot index the stride-0 dim of {self.brief()}")
            made.base_rows = self.shape[0]
            made.byte_strides = (made.row_step, *strides[1:])
            made.suspect = bool(made.outside())
            return made
        if scalar_offset is not None:
            if not 0 <= indirect_dim < self.ndim:
                refuse(32, f"ap: indirect_dim {indirect_dim} is out of range for {self.brief()}")
            made.scalar_index, made.scalar_step = scalar_offset, self.byte_strides[indirect_dim]
            made.scalar_limit = -1
        made.suspect = bool(made.outside())
        return made

    def moved(self, index: int) -> NkiTensor:
        """The plain view a scalar index of that value selects."""
        made = self._view(self.shape, self.byte_strides, self.byte_offset + index * self.scalar_step)
        made.scalar_index = None
        made.scalar_step = 0
        return made

    def reaches(self, index: int, made: NkiTensor) -> bool:
        """True when the run-time index keeps `made`, the plain view it selects, where it belongs: inside the dim it
        indexes, or for `.ap` inside the storage; an on-chip free index never walks into the next partition."""
        if self.scalar_limit >= 0 and not 0 <= index <= self.scalar_limit:
            return False
        if self.memory != HBM:
            row_bytes = self.storage.row_bytes
            if self.scalar_step % row_bytes and made.byte_offset // row_bytes != self.byte_offset // row_bytes:
                return False
        return made.in_storage()

    def in_storage(self) -> bool:
        """True when every address of the (plain) view lies inside its storage."""
        st = self.storage
        if self.byte_offset < 0:
            return False
        size = self.dtype.itemsize
        if self.memory == HBM:
            high = (
                self.byte_offset + size + sum((n - 1) * s for n, s in zip(self.shape, self.byte_strides, strict=True))
            )
            return high <= st.row_bytes
        row, free = divmod(self.byte_offset, st.row_bytes)
        rows = row + (self.shape[0] - 1) * (self.byte_strides[0] // st.row_bytes) + 1
        high = free + size + sum((n - 1) * s for n, s in zip(self.shape[1:], self.byte_strides[1:], strict=True))
        return rows <= st.partitions and high <= st.row_bytes

    def outside(self) -> str:
        """How the pattern reaches outside the storage (dim 0 left out when a vector picks its rows), or nothing.

        Kernels describe tiles behind the end and then skip them, so this is an error of the instruction that uses one.
        """
        st = self.storage
        size = self.dtype.itemsize
        if self.memory == HBM:
            first = 0 if self.vector_index is None else 1
            last = self.byte_offset + size
            for n, s in zip(self.shape[first:], self.byte_strides[first:], strict=True):
                last += (n - 1) * s
            if last > st.row_bytes or self.byte_offset < 0:
                return (
                    f"the pattern reaches element {last // size - 1} of {st.row_bytes // size} of the storage "
                    f"{st.shape} {st.dtype}"
                )
            return ""
        row, free = divmod(self.byte_offset, st.row_bytes)
        rows = row + (self.shape[0] - 1) * (self.byte_strides[0] // st.row_bytes) + 1
        last = free + size
        for n, s in zip(self.shape[1:], self.byte_strides[1:], strict=True):
            last += (n - 1) * s
        if rows > st.partitions or last > st.row_bytes or row < 0:
            return (
                f"the pattern reaches partition {rows - 1} of {st.partitions} and element {last // size - 1} of "
                f"{st.row_bytes // size} of the storage {st.shape} {st.dtype}"
            )
        return ""


def _available(dtype: DType) -> None:
    """Refuse to reinterpret bytes as a type the target does not have."""
    machine = running()
    if machine is None or not machine.checks or machine.compat or machine.target.gen >= 4:
        return
    if dtype in dtypes.GEN4_ONLY:
        refuse(48, f"dtype {dtype} needs trn3; {machine.target.name} reads float8_e4m3")


def _check_vector(base: NkiTensor, index: Any, indirect_dim: int, count: int) -> None:
    if not isinstance(index, NkiTensor):
        refuse(32, f"ap: vector_offset must be an SBUF tensor, got {type(index).__name__}")
    if base.memory != HBM:
        refuse(32, f"ap: vector_offset addresses rows of an HBM tensor, not of {base.brief()}")
    if indirect_dim != 0 and (indirect_dim >= base.ndim or base.byte_strides[indirect_dim] != base.byte_strides[0]):
        refuse(32, f"ap: vector_offset needs indirect_dim 0, got {indirect_dim}")
    if index.memory != SBUF:
        refuse(32, f"ap: vector_offset must be in SBUF, got {index.brief()}")
    if index.dtype not in (dtypes.int32, dtypes.uint32):
        refuse(32, f"ap: vector_offset must be int32 or uint32, got {index.brief()}")


def _fill(sizes: list[int], total: int, of: str) -> list[int]:
    """Replace one -1 and check the product."""
    if sizes.count(-1) > 1:
        refuse(23, f"reshape to {tuple(sizes)}: one size may be -1")
    product = 1
    for s in sizes:
        product *= 1 if s == -1 else s
    if -1 in sizes and product and total % product == 0:
        sizes[sizes.index(-1)] = total // product
        product = total
    if product != total:
        refuse(23, f"reshape to {tuple(sizes)}: {of} has {total} elements there")
    return sizes


def merge(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int] | None:
    """(size, stride) of dims merged into one, or None when they are not contiguous."""
    size, stride = 1, strides[-1]
    started = False
    for n, s in zip(reversed(shape), reversed(strides), strict=True):
        if n == 1:
            continue
        if not started:
            size, stride, started = n, s, True
        elif s == size * stride:
            size *= n
        else:
            return None
    return size, stride


def _reshape(shape: Sequence[int], strides: Sequence[int], new: Sequence[int], item: int) -> tuple[int, ...] | None:
    """Strides of `new` over the same elements in the same order, or None when a copy would be needed."""
    old = [(n, s) for n, s in zip(shape, strides, strict=True) if n != 1]
    out = [0] * len(new)
    i = j = 0
    while i < len(old) and j < len(new):
        i_end, j_end = i + 1, j + 1
        a, b = old[i][0], new[j]
        while a != b:
            if a < b:
                a *= old[i_end][0]
                i_end += 1
            else:
                b *= new[j_end]
                j_end += 1
        for k in range(i, i_end - 1):
            if old[k][1] != old[k + 1][0] * old[k + 1][1]:
                return None
        step = old[i_end - 1][1]
        for k in range(j_end - 1, j - 1, -1):
            out[k] = step
            step *= new[k]
        i, j = i_end, j_end
    for k in range(j, len(new)):  # trailing sizes of 1
        out[k] = item
    return tuple(out)


def resolve(t: NkiTensor) -> NkiTensor:
    """The view with its scalar index read now, unchecked; for printing."""
    index = t.scalar_index
    if index is None:
        return t
    return t.moved(index.value() if isinstance(index, VirtualRegister) else int(index.array().reshape(-1)[0]))
