# SPDX-License-Identifier: Apache-2.0
"""Portable-Python lint of kernel files: what the NKI front ends refuse, or silently misread, in kernel source.

Kernels are functions decorated with `jit`; the lint follows plain functions of the same file that they call. Findings
are sentences with a line; nothing is executed.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Finding", "lint_file", "lint_source"]


@dataclass(frozen=True)
class Finding:
    """One construct a front end refuses."""

    file: str
    line: int
    function: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.function}: {self.message}"


_STATEMENTS: dict[type[ast.AST], str] = {
    ast.ListComp: "list comprehension; write a loop with append",
    ast.SetComp: "set comprehension; write a loop",
    ast.DictComp: "dict comprehension; write a loop",
    ast.GeneratorExp: "generator expression; write a loop",
    ast.Yield: "yield; kernels are plain functions",
    ast.YieldFrom: "yield; kernels are plain functions",
    ast.Lambda: "lambda; define a function",
    ast.Try: "try; errors cannot be caught in a kernel",
    ast.Raise: "raise; use assert",
    ast.Starred: "starred expression; name every element",
    ast.AsyncFunctionDef: "async function",
    ast.Await: "await",
    ast.Global: "global; pass values as arguments",
    ast.Nonlocal: "nonlocal; pass values as arguments",
    ast.NamedExpr: "assignment expression; use a statement",
    ast.Delete: "del; let names go out of scope",
    ast.Set: "set display; use a tuple",
    ast.Import: "import inside a kernel; import at the top of the file",
    ast.ImportFrom: "import inside a kernel; import at the top of the file",
}
_CALLS = {
    "map": "map(); write a loop",
    "filter": "filter(); write a loop",
    "zip": "zip(); index by integer",
    "enumerate": "enumerate(); count with range",
    "open": "open(); kernels do no input or output",
    "eval": "eval()",
    "exec": "exec()",
    "getattr": "getattr(); name the attribute",
    "setattr": "setattr(); assign the attribute",
}
_REMOVED = {
    "mgrid": "nl.mgrid was removed; use slices or .ap",
    "arange": "nl.arange was removed; use slices or .ap",
    "par_dim": "nl.par_dim was removed; dim 0 is the partition axis",
    "load_transpose2d": "nl.load_transpose2d is not portable; use nisa.dma_transpose",
    "divide": "nl.divide does not lower; multiply by a reciprocal",
    "mod": "nl.mod does not lower; use bit operators",
    "fmod": "nl.fmod does not lower; use bit operators",
}
_FOREIGN = {"np": "NumPy", "numpy": "NumPy", "torch": "torch", "os": "os", "sys": "sys", "random": "random"}
_MATH_OK = {"pi", "e", "inf", "tau", "nan", "floor", "ceil", "sqrt", "log", "log2", "exp", "prod", "gcd"}


def lint_file(path: str | Path) -> list[Finding]:
    """Findings of all kernels in a file."""
    text = Path(path).read_text()
    return lint_source(text, str(path))


def lint_source(source: str, file: str = "<source>") -> list[Finding]:
    """Findings of all kernels in a source text."""
    tree = ast.parse(source, file)
    functions = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    kernels = [f for f in functions.values() if any(_is_jit(d) for d in f.decorator_list)]
    reached: dict[str, ast.FunctionDef] = {}
    waiting = list(kernels)
    while waiting:
        function = waiting.pop()
        if function.name in reached:
            continue
        reached[function.name] = function
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions:
                waiting.append(functions[node.func.id])
    findings = _imports(tree, file) if kernels else []
    mutable = _mutable_globals(tree)
    for function in reached.values():
        findings += _Visitor(function, file, mutable, function in kernels).findings
    return sorted(set(findings), key=lambda f: (f.line, f.message))


def _is_jit(decorator: ast.expr) -> bool:
    target = decorator.func if isinstance(decorator, ast.Call) else decorator
    return (target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")) == "jit"


def _mutable_globals(tree: ast.Module) -> set[str]:
    names = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(
            node.value, (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp)
        ):
            names |= {t.id for t in node.targets if isinstance(t, ast.Name) and t.id != "__all__"}
    return names


def _imports(tree: ast.Module, file: str) -> list[Finding]:
    """`nl.tile_size` read at import: no backend is set then."""
    findings = []
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            continue
        for inner in ast.walk(node):
            if isinstance(inner, ast.Attribute) and inner.attr == "tile_size":
                findings.append(
                    Finding(file, inner.lineno, "<module>", "nl.tile_size read at import; read it inside the kernel")
                )
    return findings


class _Visitor(ast.NodeVisitor):
    """Collects the findings of one function."""

    def __init__(self, function: ast.FunctionDef, file: str, mutable: set[str], is_kernel: bool) -> None:
        self.function = function
        self.file = file
        self.mutable = mutable
        self.findings: list[Finding] = []
        arguments = function.args
        if arguments.vararg is not None:
            self.add(function, f"*{arguments.vararg.arg} parameter; name every argument")
        if arguments.kwarg is not None:
            self.add(function, f"**{arguments.kwarg.arg} parameter; name every argument")
        if arguments.kwonlyargs:
            self.add(function, "keyword-only parameters are silently dropped; make them positional")
        if is_kernel:
            for default in arguments.defaults:
                if isinstance(default, (ast.List, ast.Dict, ast.Set)):
                    self.add(default, "mutable default; use a tuple")
        for statement in function.body:
            self.visit(statement)

    def add(self, node: ast.AST, message: str) -> None:
        self.findings.append(Finding(self.file, getattr(node, "lineno", 0), self.function.name, message))

    def generic_visit(self, node: ast.AST) -> None:
        text = _STATEMENTS.get(type(node))
        if text is not None:
            self.add(node, text)
        super().generic_visit(node)

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            call = item.context_expr
            name = call.func if isinstance(call, ast.Call) else call
            if (name.attr if isinstance(name, ast.Attribute) else getattr(name, "id", "")) != "no_reorder":
                self.add(node, "with; only `with nl.no_reorder()` is part of the language")
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        if isinstance(node.target, (ast.Tuple, ast.List)):
            self.add(node, "loop over pairs; index by integer")
        if node.orelse:
            self.add(node, "for-else; use a flag")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for operator, right in zip(node.ops, node.comparators, strict=True):
            if isinstance(operator, (ast.Is, ast.IsNot)):
                sign = "==" if isinstance(operator, ast.Is) else "!="
                what = ast.unparse(right)
                self.add(node, f"`is` is unsupported; write `{sign} {what}`")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in _CALLS:
            self.add(node, _CALLS[name])
        if any(k.arg is None for k in node.keywords):
            self.add(node, "** in a call; pass the arguments by name")
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        root = owner.id if isinstance(owner, ast.Name) else ""
        attribute = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if root in _FOREIGN:
            self.add(node, f"{_FOREIGN[root]} call; compute outside and pass constants")
        if root == "math" and attribute not in _MATH_OK:
            self.add(node, f"math.{attribute}; compute outside and pass the constant")
        if root in ("nisa", "nl"):
            for keyword in node.keywords:
                if keyword.arg == "mask":
                    self.add(node, "mask= was removed; use slices")
                if keyword.arg == "dtype" and root == "nisa":
                    self.add(node, "dtype= on an instruction was removed; declare the dst with it")
        if root == "nisa" and attribute == "memset":
            self._memset(node)
        shape = node.args[0] if root == "nl" and attribute == "ndarray" and node.args else None
        if isinstance(shape, ast.Tuple) and any(isinstance(e, ast.Constant) and e.value == 0 for e in shape.elts):
            self.add(node, "zero-extent tensor; guard in Python")
        self.generic_visit(node)

    def _memset(self, node: ast.Call) -> None:
        for keyword in node.keywords:
            if (
                keyword.arg == "value"
                and isinstance(keyword.value, ast.Constant)
                and isinstance(keyword.value.value, bool)
            ):
                self.add(node, "bool memset value; use 0 or 1")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        root = node.value.id if isinstance(node.value, ast.Name) else ""
        if root == "nl" and node.attr in _REMOVED:
            self.add(node, _REMOVED[node.attr])
        if root == "os":
            self.add(node, "os; kernels may not read the environment")
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and node.id in self.mutable:
            self.add(node, f"{node.id} is mutable state outside the kernel; pass it as an argument")

    def visit_While(self, node: ast.While) -> None:
        if node.orelse:
            self.add(node, "while-else; use a flag")
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.add(node, "class inside a kernel; define it at the top of the file")

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if any(_is_jit(d) for d in node.decorator_list):
            self.add(node, "nested jit; call plain functions")
        for statement in node.body:
            self.visit(statement)
