# SPDX-License-Identifier: Apache-2.0
"""Every code block of README and docs runs, generated pages are current, and links inside the docs lead somewhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from sparse_mla.dispatch import presence

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.S | re.M)
WITH_CODE = [p for p in PAGES if BLOCK.search(p.read_text())]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", WITH_CODE, ids=_name)
def test_code_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "docs"}  # blocks of one page build on each other
    for number, block in enumerate(BLOCK.findall(page.read_text()), 1):
        exec(compile(block, f"{_name(page)}, block {number}", "exec"), namespace)


def test_generated_pages_are_current() -> None:
    if presence("native"):
        pytest.skip(f"pages list the native implementations, and the backend is absent: {presence('native')}")
    spec = importlib.util.spec_from_file_location("gen_docs", ROOT / "tools" / "gen_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.stale() == [], "run: python tools/gen_docs.py"


def test_links_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{_name(page)} -> {target}")
    assert broken == []
