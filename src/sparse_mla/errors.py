# SPDX-License-Identifier: Apache-2.0
"""Every exception the library raises on purpose.

    SparseMlaError
    |- ShapeError(ValueError)             an argument has the wrong rank, size or stride
    |- DTypeError(TypeError)              an argument has the wrong dtype, requires grad, or is no tensor
    |- ArgumentError(ValueError)          an option has an illegal value, or two arguments exclude each other
    |- FormatError(ValueError)            a record width or format name that is not ours
    |- SlotRangeError(ValueError)         a slot, page or length points outside its cache
    |- NonFiniteError(ValueError)         NaN or infinity where the caller asked to be told
    |- StateError(RuntimeError)           a pool, ring or compressor state is used against its contract
    |  `- PoolFullError                   the pool has too few free blocks; nothing was allocated
    |- UnsupportedError(RuntimeError)     no backend accepts the call; the message lists each one's reasons
    |  `- BackendUnavailableError         the named backend is not present on this machine
    |- CollectiveError(RuntimeError)      a collective of a process group failed: a rank died, stalled or left
    |- KernelError(RuntimeError)          the simulator found a fault in a kernel; names file, line and instruction
    `- NotSimulatedError(NotImplementedError)   an instruction the simulator does not model

One sentence each: operator, argument, what is expected, what came, and the likely cause when it is known:
`sparse_decode: q must be [b, s_q, h_q, 512], got [2, 1, 64, 576]; 576 is the V3.2 head width.`
Raised before any output is written. Never an AssertionError, so nothing changes under `python -O`.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "BackendUnavailableError",
    "CollectiveError",
    "DTypeError",
    "FormatError",
    "KernelError",
    "NonFiniteError",
    "NotSimulatedError",
    "PoolFullError",
    "ShapeError",
    "SlotRangeError",
    "SparseMlaError",
    "StateError",
    "UnsupportedError",
]


class SparseMlaError(Exception):
    """Root of all errors raised on purpose."""


class ShapeError(SparseMlaError, ValueError):
    """An argument has the wrong rank, size or stride."""


class DTypeError(SparseMlaError, TypeError):
    """An argument has the wrong dtype, requires grad, or is no tensor."""


class ArgumentError(SparseMlaError, ValueError):
    """An option has an illegal value, or two arguments exclude each other."""


class FormatError(SparseMlaError, ValueError):
    """A record width or a format name that is not ours."""


class SlotRangeError(SparseMlaError, ValueError):
    """A slot, page or length points outside its cache."""


class NonFiniteError(SparseMlaError, ValueError):
    """NaN or infinity where the caller asked to be told."""


class StateError(SparseMlaError, RuntimeError):
    """A pool, ring or compressor state is used against its contract."""


class PoolFullError(StateError):
    """The pool has too few free blocks; nothing was allocated."""


class UnsupportedError(SparseMlaError, RuntimeError):
    """No backend accepts the call; the message lists each one's reasons."""


class BackendUnavailableError(UnsupportedError):
    """The named backend is not present on this machine."""


class CollectiveError(SparseMlaError, RuntimeError):
    """A collective of a process group failed: a rank died, stalled past the group's timeout, or left."""


class KernelError(SparseMlaError, RuntimeError):
    """The simulator found a fault in a kernel; the message names file, line and instruction."""


class NotSimulatedError(SparseMlaError, NotImplementedError):
    """An instruction the simulator does not model."""
