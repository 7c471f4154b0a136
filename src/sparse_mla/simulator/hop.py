# SPDX-License-Identifier: Apache-2.0
"""A local `wrap_nki`: a kernel as a torch custom op, so that host code runs under `torch.compile` without a device.

`wrap_nki(kernel)[cores](**tensors_and_constants)` calls one opaque op per kernel, core count and set of constants.
Eagerly it runs the simulator; under fake tensors it runs the kernel on tensors of ones, as the real hop does, to learn
the output shapes - so a kernel must not fault on index 1. bf16 and fp8 tensors cross by reinterpretation.
"""

from __future__ import annotations

import inspect
import itertools
from typing import Any

from .. import config
from ..errors import ArgumentError
from .launch import Kernel, jit, run
from .params import SimulatorParams

__all__ = ["kernel_operator", "wrap_nki"]

NAMESPACE = "sparse_mla_simulated"
_library: Any = None
_ops: dict[Any, Any] = {}
_numbers = itertools.count()
_known_shapes: dict[Any, Any] = {}  # what a kernel returns for inputs of these shapes: tracers ask several times


def wrap_nki(kernel: Any, params: SimulatorParams | None = None, operand_output_aliases: Any = None) -> _Caller:
    """A caller of `kernel` through torch; index it with the number of cores.

    Args:
        kernel: a function or a jit kernel.
        params: how to simulate; None: the defaults.
        operand_output_aliases: {index of a tensor argument: index of the output that is it}; those arguments are
            declared mutated, and the op does not return them again.
    """
    return _Caller(jit(kernel), params, dict(operand_output_aliases or {}))


@config.constant_in_graphs
def kernel_operator(
    kernel: Any, cores: int, names: tuple[str, ...], constants: tuple[tuple[str, Any], ...], params: SimulatorParams
) -> str:
    """Name below `torch.ops.sparse_mla_simulated` of a kernel's operator for tensors of these names, in this order, and
    these constants. A strict trace may ask for it, as it may not call `wrap_nki`. The operator returns a list."""
    made = _op(_Caller(jit(kernel)[cores], params, {}), names, dict(constants))[0]
    return str(made._schema.name).split("::")[1]


class _Caller:
    def __init__(self, kernel: Kernel, params: SimulatorParams | None, aliases: dict[int, int]) -> None:
        self.kernel = kernel
        self.params = params
        self.aliases = aliases

    def __getitem__(self, grid: Any) -> _Caller:
        return _Caller(self.kernel[grid], self.params, self.aliases)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import torch

        try:
            bound = inspect.signature(self.kernel.func).bind(*args, **kwargs)
        except TypeError as error:
            raise ArgumentError(f"wrap_nki: {self.kernel.func.__name__}: {error}.") from None
        tensors = {n: v for n, v in bound.arguments.items() if isinstance(v, torch.Tensor)}
        constants = {n: v for n, v in bound.arguments.items() if n not in tensors}
        op, single = _op(self, tuple(tensors), constants)
        results = op(*tensors.values())
        outputs = self._with_aliases(list(results), list(tensors.values()))
        return outputs[0] if single(len(outputs)) else tuple(outputs)

    def _with_aliases(self, results: list[Any], tensors: list[Any]) -> list[Any]:
        """Outputs that are arguments: the op does not return them, the caller does."""
        for operand, output in sorted(self.aliases.items(), key=lambda pair: pair[1]):
            results.insert(output, tensors[operand])
        return results

    def execute(self, names: tuple[str, ...], constants: dict[str, Any], tensors: Any) -> list[Any]:
        """Run the simulator on real tensors; the outputs that are not aliases."""
        result = run(self.kernel, params=self.params, **dict(zip(names, tensors, strict=True)), **constants)
        aliased = set(self.aliases.values())
        return [t for i, t in enumerate(result.outputs) if i not in aliased]


def _op(caller: _Caller, names: tuple[str, ...], constants: dict[str, Any]) -> tuple[Any, Any]:
    """The torch op of one kernel, grid and set of constants; made on first use."""
    import torch

    global _library
    kernel = caller.kernel
    try:
        key = (
            kernel.func, kernel.grid, names, tuple(sorted(constants.items())), tuple(sorted(caller.aliases.items())),
            caller.params,
        )  # fmt: skip
        hash(key)
    except TypeError:
        raise ArgumentError(
            f"wrap_nki: constants of {kernel.func.__name__} must be hashable (use tuples), got {constants}."
        ) from None
    known = _ops.get(key)
    if known is not None:
        return known  # type: ignore[no-any-return]
    if _library is None:
        _library = torch.library.Library(NAMESPACE, "DEF")
    name = f"{kernel.func.__name__}_{next(_numbers)}"
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    parameters = ", ".join(
        f"Tensor({next(letters)}!) {n}" if i in caller.aliases else f"Tensor {n}" for i, n in enumerate(names)
    )
    _library.define(f"{name}({parameters}) -> Tensor[]")

    def implementation(*tensors: Any) -> list[Any]:
        return caller.execute(names, constants, tensors)

    def fake(*tensors: Any) -> list[Any]:
        return _shapes(caller, names, constants, tensors)

    _library.impl(name, implementation, "CPU")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    made = getattr(getattr(torch.ops, NAMESPACE), name).default, lambda count: count == 1
    _ops[key] = made
    return made


def _shapes(caller: _Caller, names: tuple[str, ...], constants: dict[str, Any], tensors: Any) -> list[Any]:
    """Fake outputs: the kernel on ones, its results' shapes and dtypes."""
    import torch
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    inputs = tuple((tuple(int(n) for n in t.shape), t.dtype) for t in tensors)
    key = (caller.kernel.func, caller.kernel.grid, names, tuple(sorted(constants.items())), inputs)
    known = _known_shapes.get(key)
    if known is not None:
        return [tensors[0].new_empty(shape, dtype=dtype) for shape, dtype in known]
    with unset_fake_temporarily():
        ones = [torch.ones([int(n) for n in t.shape], dtype=torch.uint8).to(t.dtype) for t in tensors]
        found = [(tuple(t.shape), t.dtype) for t in caller.execute(names, constants, ones)]
    _known_shapes[key] = found
    return [tensors[0].new_empty(shape, dtype=dtype) for shape, dtype in found]
