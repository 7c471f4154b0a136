# SPDX-License-Identifier: Apache-2.0
"""The simulated backend: the Neuron launches and kernels, executed by the simulator on CPU tensors.

Never chosen automatically. Every check of the simulator is on; the target is what NEURON_PLATFORM_TARGET_OVERRIDE
says, trn2 when it is unset.
"""

from __future__ import annotations

from typing import Any

import torch

from ..kernels import launch
from ..kernels.nki import IS_SIMULATOR
from ..simulator.hop import kernel_operator
from ..simulator.params import SimulatorParams
from . import launches

__all__ = ["presence"]

PARAMS = SimulatorParams(timing=False)


def presence() -> str:
    """ "" when kernels run in the simulator here, else why not."""
    if IS_SIMULATOR:
        return ""
    return (
        "the kernels of this process are bound to the real nki package, which is installed; "
        "use its own nki.simulate, or an environment without it"
    )


def _execute(kernel: Any, cores: int, arguments: dict[str, Any]) -> Any:
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    constants = [(name, value) for name, value in arguments.items() if name not in tensors]
    name = kernel_operator(kernel, cores, tuple(tensors), tuple(constants), PARAMS)
    results = getattr(torch.ops.sparse_mla_simulated, name).default(*tensors.values())
    return results[0] if len(results) == 1 else tuple(results)


launch.EXECUTORS["simulated"] = _execute
launches.load()
