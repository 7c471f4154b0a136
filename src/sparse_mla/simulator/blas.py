# SPDX-License-Identifier: Apache-2.0
"""One BLAS thread while a kernel runs.

The largest product is 128 x 128 x 512: waking a second thread for it costs more than it saves, and on a busy machine
the
spinning threads cost ten times more (measured: 0.4 ms -> 2.3 ms per product on 2 shared cores). NumPy gives no handle
on
its OpenBLAS, so its two entry points are looked up in the library NumPy already loaded; without them nothing changes.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["single_threaded"]


@functools.cache
def _entry_points() -> tuple[Callable[[], Any], Callable[[int], Any]] | None:
    """(get, set) number of threads of NumPy's own OpenBLAS, or None."""
    folder = Path(np.__file__).parent.parent / "numpy.libs"
    for path in sorted(folder.glob("*openblas*")):
        try:
            library = ctypes.CDLL(str(path))
        except OSError:
            continue
        for prefix in ("scipy_", ""):
            for suffix in ("64_", ""):
                get = getattr(library, f"{prefix}openblas_get_num_threads{suffix}", None)
                put = getattr(library, f"{prefix}openblas_set_num_threads{suffix}", None)
                if get is not None and put is not None:
                    return get, put
    return None


@contextmanager
def single_threaded() -> Iterator[None]:
    """Run the block with one BLAS thread; the number before is restored."""
    found = _entry_points()
    if found is None:
        yield
        return
    get, put = found
    before = int(get())
    put(1)
    try:
        yield
    finally:
        put(before)
