# SPDX-License-Identifier: Apache-2.0
"""NKI on a CPU: runs unmodified NKI 0.6 kernels, refuses what hardware would refuse, and estimates their time.

    from sparse_mla import simulator
    simulator.install()                 # `import nki` now works when the real package is absent
    result = simulator.run(kernel, a, b, grid=2)
    result.outputs, result.warnings

Nothing here is evidence from hardware: targets are named, times are estimates.
"""

from __future__ import annotations

from .core import SimulatorWarning, WarningRecord
from .install import install, installed, namespace, uninstall
from .launch import Kernel, Run, jit, run, simulate
from .params import SimulatorParams
from .target import GEN2, GEN3, GEN4, Target

__all__ = [
    "GEN2", "GEN3", "GEN4", "Kernel", "Run", "SimulatorParams", "SimulatorWarning", "Target", "WarningRecord",
    "install", "installed", "jit", "namespace", "run", "simulate", "uninstall",
]  # fmt: skip
