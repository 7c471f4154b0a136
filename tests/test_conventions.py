# SPDX-License-Identifier: Apache-2.0
"""The rules of the code that a machine can check. Each failure says how to fix it."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sparse_mla
from sparse_mla import config, errors
from sparse_mla.dispatch import BACKENDS, EXACT, OPS, Limits, Tolerance
from sparse_mla.testing.cases import cases_of

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "sparse_mla"
MODULES = sorted(SOURCE.rglob("*.py"))
SUFFIXES = {
    ".py",
    ".cc",
    ".h",
    ".inc",
    ".cmake",
    ".toml",
    ".md",
    ".txt",
    ".json",
    ".jsonl",
    ".yaml",
    ".yml",
    ".sh",
    ".cfg",
    "",
}
FOLDERS = ("src", "csrc", "tests", "docs", "examples", "bench", "tools", ".ci")


def _texts() -> Iterator[Path]:
    for path in sorted([*ROOT.glob("*"), *(p for folder in FOLDERS for p in (ROOT / folder).rglob("*"))]):
        if path.is_file() and path.suffix in SUFFIXES and "__pycache__" not in path.parts:
            yield path


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


# --- operators -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stem", sorted(OPS))
def test_operator_has_a_reference(stem: str) -> None:
    backends = {i.backend for i in OPS[stem].implementations}
    assert "reference" in backends, (
        f"register the plain torch implementation of {stem} under 'reference' in ops/{stem}.py"
    )


@pytest.mark.parametrize("stem", sorted(OPS))
def test_operator_has_cases(stem: str) -> None:
    assert cases_of(stem), f"declare cases of {stem} in testing/*_cases.py and list them in testing/cases.py"


@pytest.mark.parametrize("stem", sorted(OPS))
def test_operator_carries_its_stem(stem: str) -> None:
    assert (SOURCE / "ops" / f"{stem}.py").exists(), f"put the operator {stem} into ops/{stem}.py"
    assert callable(getattr(sparse_mla, stem, None)), f"export {stem} from sparse_mla/__init__.py"
    assert stem in sparse_mla.__all__, f"add {stem!r} to __all__ of sparse_mla/__init__.py"


@pytest.mark.parametrize("stem", sorted(OPS))
def test_implementations_declare_limits_and_tolerance(stem: str) -> None:
    for each in OPS[stem].implementations:
        where = f"{stem} under {each.name}"
        assert isinstance(each.limits, Limits), f"{where}: declare limits=Limits(...)"
        assert isinstance(each.tolerance, Tolerance), f"{where}: declare tolerance="
        assert each.tolerance.reason, f"{where}: a tolerance stands beside its reason"
        assert each.backend in BACKENDS, f"{where}: not a backend"
        if each.backend == "reference":
            assert each.tolerance is EXACT, f"{where}: the reference defines the result, so its tolerance is EXACT"


SECTIONS = ("Args", "Returns", "Raises", "Numerics", "Limits", "Source")


@pytest.mark.parametrize("stem", sorted(OPS))
def test_docstring_sections_stand_in_order(stem: str) -> None:
    function = getattr(sparse_mla, stem)
    text = inspect.getdoc(function) or ""
    assert text, f"{stem}: write a docstring"
    found = re.findall(r"^(\w+):(?=$| )", text, re.MULTILINE)
    assert [s for s in found if s not in SECTIONS] == [], (
        f"{stem}: the sections of a docstring are {', '.join(SECTIONS)}"
    )
    assert found == [s for s in SECTIONS if s in found], f"{stem}: put the sections in the order {', '.join(SECTIONS)}"
    returns = inspect.signature(function).return_annotation not in (None, "None")
    for required in ("Args", *(["Returns"] if returns else []), "Raises"):
        assert required in found, f"{stem}: the docstring needs a section {required}:"
    summary = text.splitlines()[0]
    assert re.fullmatch(r".{20,}\.", summary), f"{stem}: begin with one sentence that says what it does"
    arguments = text[text.index("\nArgs:") : text.index("\nReturns:" if returns else "\nRaises:")]
    for name in inspect.signature(function).parameters:
        assert re.search(rf"\b{name}\b", arguments), f"{stem}: say in Args: what {name} is"


# --- imports ---------------------------------------------------------------------------------------------------------

# Lower layers first; a module may import its own layer and those before it.
LAYERS = (
    {"errors", "config", "memory"},
    {"formats"},
    {"caches", "dispatch"},
    {"ops"},
    {"simulator"},
    {"kernels"},
    {"backends"},
    {"info"},
    {"attention", "parallel"},
    {"compat", "testing"},
    {"cli", "__main__", "__init__"},
)
ONLY = {"simulator": {"errors", "config", "formats", "simulator"}, "errors": {"errors"}}


def _layer(module: str) -> int:
    for level, names in enumerate(LAYERS):
        if module in names:
            return level
    raise AssertionError(f"{module} is in no layer; give it a place in LAYERS of tests/test_conventions.py")


def _imported(path: Path) -> Iterator[tuple[str, int]]:
    """(first component below the package, line) of everything a module imports from the package, at any depth."""
    package = ["sparse_mla", *path.relative_to(SOURCE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            targets = [(alias.name.split("."), alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module.split(".") if node.module else [])]
            targets = [([*base, alias.name], alias.name) for alias in node.names]
        else:
            continue
        for parts, _ in targets:
            if parts[0] == "sparse_mla" and len(parts) > 1:
                yield parts[1], node.lineno


def test_imports_go_down_only() -> None:
    wrong = []
    for path in MODULES:
        here = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if here == "__init__":
            continue
        level = _layer(here)
        for target, line in _imported(path):
            if not ((SOURCE / target).is_dir() or (SOURCE / f"{target}.py").exists()):
                continue  # a name of the package's own namespace, or the compiled part
            where = f"{_name(path)}:{line}"
            if _layer(target) > level:
                wrong.append(f"{where} imports {target}, which is above {here}; move what it needs down")
            if here in ONLY and target not in ONLY[here]:
                wrong.append(f"{where}: {here} may import only {', '.join(sorted(ONLY[here]))}, not {target}")
    assert not wrong, "\n".join(wrong)


def test_environment_is_read_in_one_file() -> None:
    wrong = []
    for path in MODULES:
        if path == SOURCE / "config.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else node.name if isinstance(node, ast.alias) else ""
            if name in ("environ", "getenv", "putenv"):
                wrong.append(f"{_name(path)}: read the variable through config.get(...); declare it in config.py")
    assert not wrong, "\n".join(wrong)


def test_package_does_not_import_test_tools() -> None:
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            for name in names:
                tool = name.split(".")[0]
                assert tool not in ("pytest", "hypothesis"), f"{_name(path)}: shipped code never imports {name}"


def test_operators_raise_only_our_errors() -> None:
    known = set(errors.__all__)
    for path in sorted((SOURCE / "ops").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                called = node.exc.func
                name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
                assert name in known, f"{_name(path)}:{node.lineno}: raise a class of errors.py, not {name}"


def test_binding_library_is_included_once() -> None:
    for path in sorted((ROOT / "csrc").rglob("*")):
        if path.suffix in (".h", ".inc", ".cc") and path.name != "bindings.cc":
            assert "nanobind" not in path.read_text(), f"{_name(path)}: only bindings.cc may include nanobind"


# --- importing the package -------------------------------------------------------------------------------------------

_IMPORT = """
import json, sys, time
import torch
started = []
starts = ("subprocess.Popen", "os.fork", "os.posix_spawn")
sys.addaudithook(lambda event, args: started.append(event) if event in starts else None)
before = set(sys.modules)
begin = time.process_time()
import sparse_mla
seconds = time.process_time() - begin
print(json.dumps({"seconds": seconds, "new": sorted(set(sys.modules) - before), "started": started,
                  "threads": torch.get_num_threads()}))
"""


def _import_once() -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _IMPORT],
        capture_output=True,
        text=True,
        timeout=120,
        env=config.environment(),
    )
    assert done.returncode == 0, f"importing the package fails or warns:\n{done.stderr}"
    assert done.stderr == "", f"importing the package prints:\n{done.stderr}"
    return dict(json.loads(done.stdout))


def test_import_is_quick_quiet_and_loads_nothing() -> None:
    runs = [_import_once() for _ in range(2)]
    seconds = min(float(str(run["seconds"])) for run in runs)
    assert seconds < 0.2, (
        f"importing sparse_mla adds {seconds:.2f} s to importing torch; load heavy things on first use"
    )
    new = {str(name) for name in list(runs[0]["new"])}  # type: ignore[call-overload]
    assert runs[0]["started"] == [], "importing the package starts a process"
    ours = [f"sparse_mla.{name}" for name in ("_native", "simulator", "testing", "cli")]
    for name in (*ours, "nki", "torch_neuronx", "matplotlib", "click", "rich"):
        assert name not in new, f"importing sparse_mla loads {name}; import it where it is first used"
    loaded = sorted(name for name in new if name.startswith("sparse_mla.backends."))
    assert loaded == [], f"importing sparse_mla loads {loaded}; dispatch loads a backend when it is first asked"


# --- texts -----------------------------------------------------------------------------------------------------------


def test_licence_line_comes_first() -> None:
    wrong = []
    for path in _texts():
        lines = path.read_text(errors="replace").splitlines() if path.suffix in (".py", ".cc", ".h", ".inc") else []
        first = lines[1:2] if lines and lines[0].startswith("#!") else lines[:1]
        if first and "SPDX-License-Identifier: Apache-2.0" not in first[0]:
            wrong.append(_name(path))
    assert not wrong, f"begin with the line SPDX-License-Identifier: Apache-2.0: {', '.join(wrong)}"


# In parts, so that this file does not hold what it forbids.
FORBIDDEN = {
    r"(?<![\w.])/(?:"
    + "wo"
    + "rk|ro"
    + "ot|ho"
    + r"me/\w+)/[\w.]": "a path of somebody's machine; use a relative path",
    "pypi"
    + r"\.org|files\."
    + "pythonhosted|download\\.pytorch\\.org": "the host of a package registry; link to the install page",
    r"\b(?:issue|bug)\s*#\d+\b": "an issue number; write the fact instead",
    r"\bR0\d\d\b|\bR1[01]\d\b": "a report's number; write what happened instead",
}


def test_texts_are_meant_for_strangers() -> None:
    wrong = []
    for path in _texts():
        text = path.read_text(errors="replace")
        for pattern, why in FORBIDDEN.items():
            found = re.search(pattern, text, re.IGNORECASE if "issue" in pattern else 0)
            if found:
                line = text.count("\n", 0, found.start()) + 1
                wrong.append(f"{_name(path)}:{line} holds {found.group()!r}: {why}")
    assert not wrong, "\n".join(wrong)


def test_configuration_names_are_ours_or_an_engines() -> None:
    for name, variable in config.VARIABLES.items():
        assert name.startswith(("SPARSE_MLA_", "DEEPINFER_NEURON_", "NEURON_")), f"{name}: begin with SPARSE_MLA_"
        assert variable.meaning.endswith("."), f"{name}: say in one sentence what it does"
