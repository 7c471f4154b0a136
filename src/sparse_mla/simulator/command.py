# SPDX-License-Identifier: Apache-2.0
"""What `sparse-mla simulate` does: load a kernel file, bind arguments from a file, run, report."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ArgumentError
from . import dtypes
from .install import install
from .launch import Kernel, Run, jit, run
from .lint import lint_file
from .params import SimulatorParams

__all__ = ["constants", "lint", "load_arguments", "load_kernel", "save_outputs", "simulate_file"]


def load_kernel(spec: str) -> Kernel:
    """The kernel that FILE:KERNEL names; `import nki` in the file gives the simulator."""
    name, _, function = spec.rpartition(":")
    path = Path(name)
    if not name or not function.isidentifier():
        raise ArgumentError(f"simulate: the kernel must be given as FILE:KERNEL, got {spec!r}.")
    if not path.is_file():
        raise ArgumentError(f"simulate: {name} is not a file.")
    install(force=True)  # the command always simulates, also on a machine with the real package
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    found = importlib.util.spec_from_file_location(path.stem, path)
    if found is None or found.loader is None:
        raise ArgumentError(f"simulate: {name} must be a Python file.")
    module = importlib.util.module_from_spec(found)
    sys.modules[path.stem] = module
    found.loader.exec_module(module)
    kernel = getattr(module, function, None)
    if not callable(kernel):
        kernels = [key for key, value in vars(module).items() if isinstance(value, Kernel)]
        raise ArgumentError(f"simulate: {name} has no function {function}; its kernels are {kernels}.")
    return jit(kernel)  # type: ignore[no-any-return]


def load_arguments(path: str | Path) -> dict[str, Any]:
    """Arrays by argument name, from .npz or .safetensors.

    A NumPy file cannot name bfloat16 and fp8 types: store their bytes and write the type into the name, as
    `np.savez(path, **{"q:bfloat16": q.view(np.uint16)})`.
    """
    path = Path(path)
    if not path.is_file():
        raise ArgumentError(f"simulate: {path} is not a file.")
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return dict(load_file(path))
    if path.suffix != ".npz":
        raise ArgumentError(f"simulate: arguments must be .npz or .safetensors, got {path.name}.")
    arguments: dict[str, Any] = {}
    with np.load(path, allow_pickle=False) as stored:
        for key in stored.files:
            array = stored[key]
            name, _, kind = key.partition(":")
            if kind:
                dtype = dtypes.from_any(kind, f"simulate: argument {name}").np
                if array.dtype.itemsize != dtype.itemsize:
                    raise ArgumentError(
                        f"simulate: argument {key} must be stored in {dtype.itemsize}-byte elements, got {array.dtype}."
                    )
                array = array.view(dtype)
            elif array.dtype.kind == "V":
                raise ArgumentError(
                    f"simulate: argument {name} has no type in a NumPy file; store its bytes as '{name}:bfloat16' "
                    "(or the type it has)."
                )
            arguments[name] = array
    return arguments


def constants(pairs: tuple[str, ...]) -> dict[str, Any]:
    """NAME=VALUE pairs; a value is a Python literal, or else a string."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.isidentifier():
            raise ArgumentError(f"simulate: --set must be NAME=VALUE, got {pair!r}.")
        try:
            found[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            found[name] = text
    return found


def simulate_file(
    spec: str,
    arguments: str | Path | None,
    *,
    settings: tuple[str, ...] = (),
    grid: int | None = None,
    gen: int | None = None,
    strict: bool = False,
    aws_compat: bool = False,
    log: Callable[[str], None] | None = None,
) -> Run:
    """Run the kernel FILE:KERNEL names."""
    kernel = load_kernel(spec)
    values = load_arguments(arguments) if arguments is not None else {}
    values |= constants(settings)
    params = SimulatorParams(gen=gen, strict=strict, aws_compat=aws_compat, log=log, show_warnings=False)
    return run(kernel, grid=grid, params=params, **values)


def save_outputs(result: Run, path: str | Path) -> None:
    """Write output0, output1, .. to .npz, with the naming rule of `load_arguments`."""
    arrays: dict[str, Any] = {}
    for i, output in enumerate(result.outputs):
        array = np.asarray(output) if isinstance(output, np.ndarray) else output
        if not isinstance(array, np.ndarray):  # torch: bfloat16 and fp8 have no NumPy twin
            import torch

            name = str(array.dtype).removeprefix("torch.")
            if array.dtype in (torch.bfloat16,) or "float8" in name:
                raw = torch.uint8 if "float8" in name else torch.int16
                arrays[f"output{i}:{name}"] = array.view(raw).numpy()
                continue
            array = array.numpy()
        if array.dtype.isbuiltin == 1:
            arrays[f"output{i}"] = array
        else:
            arrays[f"output{i}:{array.dtype.name}"] = array.view(f"u{array.dtype.itemsize}")
    np.savez(path, **arrays)


def lint(path: str | Path) -> list[str]:
    """Findings of the portable-Python lint, one sentence each."""
    if not Path(path).is_file():
        raise ArgumentError(f"simulate: {path} is not a file.")
    return [str(finding) for finding in lint_file(path)]
