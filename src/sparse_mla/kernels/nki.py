# SPDX-License-Identifier: Apache-2.0
"""The one place kernels take NKI from: the real package where it is installed, else the simulator's modules of the
same names.

The module table is left alone: a program that asks whether `nki` is installed still gets the true answer.
"""

from __future__ import annotations

import importlib
from typing import Any

from ..simulator.install import namespace, real_nki

_real = real_nki()
IS_SIMULATOR = _real is None
nki: Any = namespace() if _real is None else _real
nl: Any = nki.language if _real is None else importlib.import_module("nki.language")
nisa: Any = nki.isa if _real is None else importlib.import_module("nki.isa")

__all__ = ["IS_SIMULATOR", "nisa", "nki", "nl"]
