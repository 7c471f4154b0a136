# SPDX-License-Identifier: Apache-2.0
"""The graph check: what of a launch would not survive compilation for Neuron, found on any machine.

`check_graph(function, *arguments)` traces the call with `torch.export(strict=True)` and reports each offending node
with its source line and the rule it breaks:

    a  a dtype view of a tensor (`aten.view.dtype`): a fused bitcast becomes a numeric conversion; and any float8
       tensor, inputs included, which the compiler rejects - bytes enter as uint8
    b  `as_strided`: over a column-sliced input it reads a contiguous copy with the original strides
    c  a gather on uint8 whose contiguous unit is below 4 bytes: the compiler crashes on gathers of single bytes
    d  a result whose size depends on values: bool `index` or `index_put`, `nonzero`, `masked_select`, `.item()`,
       unbacked sizes
    e  a kernel call, or a per-row gather or decode of records, whose number of query rows is no power of two: the
       compiler rejects some counts (6, for instance); decoding a whole cache once is exempt

A graph that cannot be traced at all is reported under d with the tracer's first sentence.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from ..caches import PagedCache
from ..kernels import launch
from ..simulator.hop import NAMESPACE

__all__ = ["KERNEL_ROWS", "RULES", "Finding", "check_case", "check_graph", "kernel_calls"]

RULES = {
    "a": "no dtype bitcast and no float8 tensor",
    "b": "no as_strided",
    "c": "no gather of units below 4 bytes",
    "d": "no size that depends on values",
    "e": "a power of two of query rows",
}

# Which argument and dimension of a kernel counts its query rows, by argument name; the first that the kernel has.
KERNEL_ROWS: tuple[tuple[str, int], ...] = (("bias", 0), ("w", 1))
WHOLE_CACHE = "load_cache"  # the function that decodes all slots of a cache once
SMALLEST_UNIT = launch.SMALLEST_UNIT

_FLOAT8 = {getattr(torch, name) for name in dir(torch) if name.startswith("float8_")}
_GATHERS = {"aten::index.Tensor", "aten::_unsafe_index.Tensor", "aten::index_select", "aten::gather", "aten::take"}
_BY_VALUE = (
    "aten::nonzero", "aten::nonzero_numpy", "aten::masked_select", "aten::item", "aten::_local_scalar_dense",
    "aten::unique", "aten::_unique2", "aten::unique_consecutive", "aten::bincount", "aten::argwhere",
    "aten::repeat_interleave.Tensor",
)  # fmt: skip


class Finding(NamedTuple):
    """One node that breaks a rule."""

    rule: str
    node: str  # its operator, or the argument's name
    source: str  # file:line of the innermost frame that is not torch's
    message: str

    def __str__(self) -> str:
        return f"rule ({self.rule}): {self.node} at {self.source}: {self.message}"


def check_graph(function: Callable[..., Any], /, *arguments: Any, **options: Any) -> list[Finding]:
    """Trace `function(*arguments, **options)` and report what breaks a rule; an empty list when nothing does.

    Tensors anywhere inside the arguments become inputs of the graph; everything else is constant.
    """
    collected = _Tensors()
    template = collected.take((arguments, options))
    findings = [
        Finding("a", name, "argument", f"{_name(t.dtype)} tensor; pass its uint8 view, taken before the graph")
        for name, t in zip(collected.names, collected.tensors, strict=True)
        if t.dtype in _FLOAT8
    ]
    if findings:
        return findings

    class Call(torch.nn.Module):
        def forward(self, tensors: list[torch.Tensor]) -> Any:
            args, kwargs = _fill(template, iter(tensors))
            return function(*args, **kwargs)

    try:
        with torch.no_grad():
            program = torch.export.export(Call(), (collected.tensors,), strict=True)
    except Exception as error:
        text = str(error).strip()
        first = text.splitlines()[0] if text else type(error).__name__
        return [Finding("d", "graph", _error_source(text), f"cannot be traced: {first}")]
    return [finding for node in program.graph.nodes for finding in _check_node(node)]


def check_case(implementation: Any, case: Any) -> list[Finding]:
    """The findings of one implementation on one case; it must accept the case."""
    from .check import forced

    problem = case.build()
    with forced(implementation):
        return check_graph(_public(case), **problem.arguments, backend=implementation.backend)


def kernel_calls(function: Callable[..., Any], /, *arguments: Any, **options: Any) -> list[str]:
    """Names of the kernels in the traced graph, in order."""
    collected = _Tensors()
    template = collected.take((arguments, options))

    class Call(torch.nn.Module):
        def forward(self, tensors: list[torch.Tensor]) -> Any:
            args, kwargs = _fill(template, iter(tensors))
            return function(*args, **kwargs)

    with torch.no_grad():
        program = torch.export.export(Call(), (collected.tensors,), strict=True)
    return [_kernel_name(node) for node in program.graph.nodes if _is_kernel(node)]


def _public(case: Any) -> Callable[..., Any]:
    import importlib

    from .. import ops

    module = importlib.import_module(f"{ops.__name__}.{case.op}")
    return getattr(module, case.op)  # type: ignore[no-any-return]


# --- tensors inside arguments ----------------------------------------------------------------------------------------


class _Hole:
    """Where a tensor stood."""


class _Cache(NamedTuple):
    geometry: tuple[int, ...]


class _Tensors:
    """Takes the tensors out of nested arguments."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.names: list[str] = []

    def take(self, value: Any, name: str = "") -> Any:
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            self.names.append(name or "argument")
            return _Hole
        if isinstance(value, PagedCache):
            self.take(value.data, f"{name}.data")
            return _Cache(value.geometry)
        if isinstance(value, dict):
            return {key: self.take(each, str(key)) for key, each in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            parts = [self.take(each, f"{name}.{key}") for key, each in zip(value._fields, value, strict=True)]
            return _Made(type(value), tuple(parts), ())
        if isinstance(value, list | tuple):
            return type(value)([self.take(each, f"{name}[{i}]") for i, each in enumerate(value)])
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = [f.name for f in dataclasses.fields(value) if f.init]
            parts = [self.take(getattr(value, field), f"{name}.{field}") for field in fields]
            if any(part is not getattr(value, field) for part, field in zip(parts, fields, strict=True)):
                return _Made(type(value), tuple(parts), tuple(fields))
        return value


class _Made(NamedTuple):
    kind: Any
    parts: tuple[Any, ...]
    fields: tuple[str, ...]


def _fill(template: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if template is _Hole:
        return next(tensors)
    if isinstance(template, _Cache):
        return PagedCache.from_geometry(next(tensors), template.geometry)
    if isinstance(template, _Made):
        parts = [_fill(part, tensors) for part in template.parts]
        if template.fields:
            return template.kind(**dict(zip(template.fields, parts, strict=True)))
        return template.kind(*parts)
    if isinstance(template, dict):
        return {key: _fill(each, tensors) for key, each in template.items()}
    if isinstance(template, list | tuple):
        return type(template)([_fill(each, tensors) for each in template])
    return template


# --- rules -----------------------------------------------------------------------------------------------------------


def _check_node(node: fx.Node) -> Iterator[Finding]:
    if node.op != "call_function":
        return
    name = _operator(node)

    def found(rule: str, message: str) -> Finding:
        return Finding(rule, name, _source(node), message)

    if name == "aten::view.dtype":
        kinds = f"{_name(_value(node.args[0]).dtype)} to {_name(_value(node).dtype)}"
        yield found("a", f"bitcast of {kinds}; compute the number from integers")
    if any(t.dtype in _FLOAT8 for t in _tensors_of(node)):
        yield found("a", "makes a float8 tensor; keep bytes in uint8")
    if name.startswith("aten::as_strided"):
        yield found("b", "as_strided; use view, narrow and select of a contiguous tensor")
    yield from (found("c", text) for text in _small_gather(node, name))
    yield from (found("d", text) for text in _by_value(node, name))
    yield from (found("e", text) for text in _odd_rows(node, name))


def _small_gather(node: fx.Node, name: str) -> Iterator[str]:
    if not any(name == gather or name.startswith(gather + ".") for gather in _GATHERS):
        return
    source = _value(node.args[0])
    if source is None or source.dtype not in (torch.uint8, torch.int8):
        return
    if name in ("aten::index.Tensor", "aten::_unsafe_index.Tensor"):
        indices: Any = node.args[1]
        indexed = len(indices)
    elif name.startswith("aten::index_select"):
        indexed = int(node.args[1]) + 1  # type: ignore[arg-type]
    else:
        indexed = source.dim()  # gather and take move single elements
    unit = 1
    for size in source.shape[indexed:]:
        unit *= int(size)
    if unit < SMALLEST_UNIT:
        yield f"gathers units of {unit} bytes of uint8; at least {SMALLEST_UNIT} are needed"


def _by_value(node: fx.Node, name: str) -> Iterator[str]:
    if any(name == each or name.startswith(each + ".") for each in _BY_VALUE):
        yield "its result depends on values; use torch.where"
        return
    if name.startswith(("aten::index.", "aten::index_put", "aten::_unsafe_index")):
        indices: Any = node.args[1]
        for index in indices:
            value = _value(index)
            if value is not None and value.dtype == torch.bool:
                yield "bool index; use torch.where"
                return
    for tensor in _tensors_of(node):
        if any(_is_unbacked(size) for size in tensor.shape):
            yield f"a size that depends on values, {list(tensor.shape)}"
            return


def _odd_rows(node: fx.Node, name: str) -> Iterator[str]:
    if _is_kernel(node):
        rows = _kernel_rows(node)
        if rows is not None and not _is_power_of_two(rows):
            yield f"{rows} query rows in a kernel call; pad them to {launch.power_of_two(rows)}"
        return
    is_decode = name == "aten::exp2" or name.startswith("aten::exp2.")
    is_gather = name == "aten::index.Tensor" and _value(node.args[0]).dtype == torch.uint8
    if not (is_decode or is_gather) or _inside(node, WHOLE_CACHE):
        return
    value = _value(node)
    rows = int(value.shape[0]) if value is not None and value.dim() > 0 else 1
    if not _is_power_of_two(rows):
        what = "decode" if is_decode else "gather"
        yield f"{rows} query rows in a record {what}; pad them to {launch.power_of_two(rows)}"


def _is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def _is_kernel(node: fx.Node) -> bool:
    return node.op == "call_function" and _operator(node).startswith(f"{NAMESPACE}::")


def _kernel_name(node: fx.Node) -> str:
    return re.sub(r"_\d+$", "", _operator(node).split("::")[1].split(".")[0])


def _kernel_rows(node: fx.Node) -> int | None:
    schema: Any = node.target
    names = [argument.name for argument in schema._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    for name, dim in KERNEL_ROWS:
        if name in given:
            return int(_value(given[name]).shape[dim])
    return None


# --- nodes -----------------------------------------------------------------------------------------------------------


def _operator(node: fx.Node) -> str:
    target: Any = node.target
    schema = getattr(target, "_schema", None)
    if schema is None:
        return getattr(target, "__name__", str(target))
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else str(schema.name)


def _value(argument: Any) -> Any:
    if not isinstance(argument, fx.Node):
        return None
    value = argument.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def _tensors_of(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    return [v for v in values if isinstance(v, torch.Tensor)]


def _is_unbacked(size: Any) -> bool:
    if not isinstance(size, torch.SymInt):
        return False
    return any(str(symbol).startswith("u") for symbol in size.node.expr.free_symbols)


_HIDDEN = ("call_kernel", "_execute")  # between a launch and its kernel
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def _frames(node: fx.Node) -> list[tuple[str, str, str]]:
    return _FRAME.findall(node.meta.get("stack_trace") or "")


def _source(node: fx.Node) -> str:
    frames = [f for f in _frames(node) if f[2] not in _HIDDEN]
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else "unknown"


def _error_source(text: str) -> str:
    frames = [f for f in _FRAME.findall(text) if f"{torch.__name__}/" not in f[0]]
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else "unknown"


def _inside(node: fx.Node, function: str) -> bool:
    return any(frame[2] == function for frame in _frames(node))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
