# SPDX-License-Identifier: Apache-2.0
"""The neuron backend: NKI kernels on a Neuron device, called through torch's own hop for them.

Loading this module starts no device. A machine without one is told what to install.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from ..errors import BackendUnavailableError
from ..kernels import launch
from ..kernels.nki import IS_SIMULATOR
from . import launches

__all__ = ["HOPS", "presence"]

# Where `wrap_nki` lives: the full torch-neuronx stack, and the lighter library of some inference images.
HOPS = ("torch_neuronx.nki_hop", "libtorch_neuronx_lite.nki.nki_hop")


def presence() -> str:
    """ "" when kernels can be launched on a device from here, else what is missing."""
    if IS_SIMULATOR:
        return (
            "the nki package is not installed; on a Trainium instance install the AWS Neuron SDK 2.29 or later "
            "(nki, neuronx-cc and torch-neuronx)"
        )
    if _find_hop() is None:
        return f"no wrap_nki to launch kernels with: install torch-neuronx ({' or '.join(HOPS)} must import)"
    return ""


def _find_hop() -> Callable[..., Any] | None:
    for name in HOPS:
        try:
            found = importlib.import_module(name)
        except Exception:  # whatever its import raises: it is not usable
            continue
        hop: Callable[..., Any] | None = getattr(found, "wrap_nki", None)
        if hop is not None:
            return hop
    return None


def _execute(kernel: Any, cores: int, arguments: dict[str, Any]) -> Any:
    hop = _find_hop()
    if hop is None:
        raise BackendUnavailableError(f"neuron: {presence()}.")
    return hop(kernel)[cores](**arguments)


launch.EXECUTORS["neuron"] = _execute
launches.load()
