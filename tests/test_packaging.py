# SPDX-License-Identifier: Apache-2.0
"""What is shipped: the source distribution builds by itself, native part included."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_source_distribution_builds_a_wheel(tmp_path: Path) -> None:
    pytest.importorskip("build", reason="needs `build`, which `make wheel` installs")
    if shutil.which("g++") is None and shutil.which("c++") is None:
        pytest.skip("no C++ compiler, so the wheel would lack what this test looks for")
    subprocess.run([sys.executable, "-m", "build", "--sdist", "--outdir", str(tmp_path), str(ROOT)], check=True)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for needed in ("CMakeLists.txt", "csrc/bindings.cc", "tests/conftest.py", "Makefile", "constraints.txt", "LICENSE"):
        assert needed in names, f"{needed} is missing from the source distribution"
    wheel_command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-cache-dir",
        "-w",
        str(tmp_path),
    ]
    subprocess.run([*wheel_command, str(sdist)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        members = archive.namelist()
    assert any(name.startswith("sparse_mla/_native") for name in members), "the wheel has no native extension"
    assert "sparse_mla/py.typed" in members
