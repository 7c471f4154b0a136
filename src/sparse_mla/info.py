# SPDX-License-Identifier: Apache-2.0
"""What this installation is and can do: versions, CPU target, threads, cache defaults, backends with reasons,
configuration.

`sparse-mla info --json` prints it for a bug report. Nothing here starts a device or a subprocess.
"""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import asdict, dataclass
from typing import Any

import torch

from . import config
from .dispatch import BACKENDS, OPS, backend_module, presence

__all__ = ["REBUILD", "Info", "cpu_target", "info"]

# Without --no-cache-dir pip would reuse the wheel that has no extension.
REBUILD = "pip install --force-reinstall --no-cache-dir --no-deps sparse-mla"
PACKAGES = ("sparse-mla", "torch", "numpy", "ml_dtypes", "safetensors")


@dataclass(frozen=True)
class Info:
    """A report for people (`str`) and for machines (`as_dict`)."""

    versions: dict[str, str]
    machine: dict[str, Any]  # system, processor, cpu_target, threads
    caches: dict[str, Any]  # layout and cap that the drop-ins assume
    backends: dict[str, str]  # name -> "" when present, else why not
    operators: dict[str, list[dict[str, str]]]  # stem -> implementations: name, limits, tolerance
    variables: list[dict[str, str]]
    hints: list[str]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = ["versions   " + "  ".join(f"{name} {version}" for name, version in self.versions.items())]
        lines.append("machine    " + "  ".join(f"{name}={value}" for name, value in self.machine.items()))
        lines.append("caches     " + "  ".join(f"{name}={value}" for name, value in self.caches.items()))
        lines += [f"backend    {name:<10} {reason or 'present'}" for name, reason in self.backends.items()]
        for stem, rows in self.operators.items():
            lines.append(f"operator   {stem:<18} " + ", ".join(row["name"] for row in rows))
        lines += [f"variable   {v['name']}={v['value']}" for v in self.variables if v["value"] != v["default"]]
        lines += [f"hint       {hint}" for hint in self.hints]
        return "\n".join(lines)


def info() -> Info:
    """Collect the report: versions, machine, cache defaults, backends with reasons, operators, configuration."""
    backends = {name: presence(name) for name in BACKENDS}
    hints = []
    if backends["native"]:
        hints.append(
            f"the native backend is missing ({backends['native']}); with a C++20 compiler at hand, rebuild: {REBUILD}"
        )
    return Info(
        versions={"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        machine={
            "system": f"{platform.system()} {platform.release()}",
            "processor": platform.machine(),
            "cpu_target": cpu_target() or "none",
            "threads": torch.get_num_threads(),
        },
        caches={"layout": config.get("SPARSE_MLA_LAYOUT"), "e4m3_max": config.get("SPARSE_MLA_E4M3_MAX")},
        backends=backends,
        operators={
            stem: [
                {
                    "name": each.name,
                    "executes": "torch on the tensor's device" if each.torch_form else each.name,
                    "limits": each.limits.sentence(),
                    "tolerance": each.tolerance.name,
                }
                for each in op.implementations
            ]
            for stem, op in sorted(OPS.items())
        },
        variables=[
            {"name": name, "value": value, "default": default, "meaning": meaning}
            for name, value, default, meaning in config.describe()
        ],
        hints=hints,
    )


def cpu_target() -> str:
    """The instruction set the native backend uses on this machine, "" without one."""
    if presence("native"):
        return ""
    target = getattr(backend_module("native"), "cpu_target", None)
    return str(target()) if target is not None else ""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
