# SPDX-License-Identifier: Apache-2.0
"""The portable-Python lint: each refused construct is found at its line, and what is allowed is not."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from sparse_mla.simulator.lint import lint_file, lint_source

REFUSED = {
    "xs = [i for i in range(4)]": "list comprehension",
    "xs = {i for i in range(4)}": "set comprehension",
    "xs = {i: 1 for i in range(4)}": "dict comprehension",
    "xs = tuple(i for i in range(4))": "generator",
    "f = lambda i: i": "lambda",
    "xs = map(abs, a)": "map()",
    "for i, x in zip(a, b): pass": "zip()",
    "for i, x in enumerate(a): pass": "enumerate()",
    "for x, y in pairs: pass": "loop over pairs",
    "f(*a)": "starred",
    "f(**a)": "** in a call",
    "ok = a is None": "write `== None`",
    "ok = a is not None": "write `!= None`",
    "raise ValueError": "raise",
    "with open_thing() as f: pass": "with;",
    "x = os.environ['A']": "os;",
    "x = np.zeros(4)": "NumPy call",
    "x = torch.zeros(4)": "torch call",
    "x = math.lgamma(2.0)": "math.lgamma",
    "t = nl.arange(4)": "nl.arange",
    "t = nl.mgrid[0:4]": "nl.mgrid",
    "nisa.tensor_copy(dst=a, src=b, mask=c)": "mask=",
    "nisa.tensor_copy(dst=a, src=b, dtype=nl.float32)": "dtype=",
    "t = nl.divide(a, b)": "does not lower",
    "t = nl.load_transpose2d(a)": "not portable",
    "t = nl.ndarray((0, 4), nl.float32)": "zero-extent",
    "x = CACHE": "mutable state",
    "global COUNT": "global",
    "import numpy": "import inside",
    "y = (x := 3)": "assignment expression",
}
ALLOWED = """
    for i in nl.affine_range(4):
        t = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.sbuf, name=f"tile_{i}")
        nisa.memset(dst=t, value=0.0)
    a, b = x.shape
    if flag == None:
        print("no flag")
    assert a > 0, "rows"
    with nl.no_reorder():
        helper(t)
    size = math.ceil(a / 2)
    while a > 4:
        a = a - 1
        if a == 5:
            break
    return t
"""


def source(body: str) -> str:
    return "import nki\nCACHE = {}\n\n@nki.jit\ndef kernel(x, flag=None):\n" + textwrap.indent(body, "    ") + "\n"


@pytest.mark.parametrize("statement", REFUSED)
def test_refused(statement: str) -> None:
    findings = lint_source(source(statement), "k.py")
    texts = [str(f) for f in findings]
    assert any(REFUSED[statement] in t for t in texts), texts
    assert all(f.line == 6 and f.function == "kernel" for f in findings), texts


def test_allowed() -> None:
    assert lint_source(source(textwrap.dedent(ALLOWED))) == []


def test_try_and_signature() -> None:
    text = "@nki.jit\ndef kernel(a, *rest, b=1, **more):\n    try:\n        pass\n    finally:\n        pass\n"
    messages = " | ".join(f.message for f in lint_source(text))
    for word in ("*rest", "**more", "keyword-only", "try"):
        assert word in messages, messages


def test_helpers_of_a_kernel_are_followed_and_others_are_not(tmp_path: Path) -> None:
    file = tmp_path / "kernel.py"
    file.write_text(
        "import nki\n"
        "SIZE = nl.tile_size.pmax\n"
        "def helper(a):\n    return [i for i in range(a)]\n"
        "def host(a):\n    return [i for i in range(a)]\n"
        "@nki.jit(mode='trace')\ndef kernel(a):\n    return helper(3)\n"
    )
    findings = lint_file(file)
    assert [(f.line, f.function) for f in findings] == [(2, "<module>"), (4, "helper")]
    assert str(findings[1]).startswith(f"{file}:4: helper: list comprehension")


def test_host_code_alone_is_not_linted() -> None:
    assert lint_source("def host(a):\n    return [i for i in a]\n") == []
