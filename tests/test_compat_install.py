# SPDX-License-Identifier: Apache-2.0
"""`compat.install`: what `import flash_mla` finds afterwards, when it refuses, and that importing this package costs
nothing."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import types

import pytest

from sparse_mla import compat, config
from sparse_mla.errors import ArgumentError


@pytest.fixture(autouse=True)
def _clean():
    compat.uninstall()
    yield
    compat.uninstall()


def absent(name: str) -> bool:
    return name not in sys.modules and importlib.util.find_spec(name) is None


def test_imports_find_the_drop_ins_and_lose_them_again():
    for name in compat.MODULES:
        assert absent(name)
    compat.install()
    for name in compat.MODULES:
        module = importlib.import_module(name)
        assert module is importlib.import_module(f"sparse_mla.compat.{name}")
    import deep_gemm
    import deep_select
    import flash_mla
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata
    from flash_mla.flash_mla_interface import flash_mla_sparse_fwd

    assert callable(flash_mla_with_kvcache)
    assert callable(flash_mla_sparse_fwd)
    assert get_mla_metadata()[1] is None
    assert callable(deep_gemm.fp8_fp4_paged_mqa_logits)
    assert callable(deep_select.topk)
    assert flash_mla.__name__ == "sparse_mla.compat.flash_mla"
    compat.uninstall()
    for name in compat.MODULES:
        assert absent(name)
    assert "flash_mla.flash_mla_interface" not in sys.modules


def test_only_the_named_ones_and_again():
    compat.install("flash_mla")
    assert absent("deep_gemm")
    assert absent("deep_select")
    compat.install("flash_mla", "deep_select")
    assert "deep_select" in sys.modules
    assert absent("deep_gemm")


def test_options_hold_until_the_next_install():
    assert (compat.cache_layout(), compat.cache_e4m3_max()) == ("interleaved", 448)
    compat.install("flash_mla", layout="planar", e4m3_max=224)
    with config.override(SPARSE_MLA_LAYOUT="interleaved", SPARSE_MLA_E4M3_MAX=448):
        assert (compat.cache_layout(), compat.cache_e4m3_max()) == ("planar", 224)
        compat.install("flash_mla")
        assert (compat.cache_layout(), compat.cache_e4m3_max()) == ("interleaved", 448)
    with config.override(SPARSE_MLA_LAYOUT="planar", SPARSE_MLA_E4M3_MAX=224):
        assert (compat.cache_layout(), compat.cache_e4m3_max()) == ("planar", 224)


@pytest.mark.parametrize("how", ["imported", "installed"])
def test_the_real_package_is_never_replaced(how, tmp_path, monkeypatch):
    """And nothing else is installed beside it."""
    if how == "imported":
        real = types.ModuleType("deep_gemm")
        real.__file__ = "somewhere/deep_gemm.py"
        monkeypatch.setitem(sys.modules, "deep_gemm", real)
    else:
        (tmp_path / "deep_gemm.py").write_text("")
        monkeypatch.syspath_prepend(str(tmp_path))
        importlib.invalidate_caches()
    with pytest.raises(ArgumentError, match=f"compat.install: deep_gemm must not be {how}.*deep_gemm.py"):
        compat.install("flash_mla", "deep_gemm")
    assert absent("flash_mla")
    if how == "imported":
        assert sys.modules["deep_gemm"] is real
        compat.uninstall()
        assert sys.modules["deep_gemm"] is real
    else:
        assert "deep_gemm" not in sys.modules


@pytest.mark.parametrize(
    ("names", "options", "text"),
    [
        (("flash_attn",), {}, "names must be of flash_mla, deep_gemm, deep_select, got 'flash_attn'"),
        (("flash_mla",), {"layout": "rowwise"}, "layout must be one of interleaved, planar, got 'rowwise'"),
        (("flash_mla",), {"e4m3_max": 240}, "e4m3_max must be 448 or 224, got 240"),
    ],
)
def test_bad_options_install_nothing(names, options, text):
    with pytest.raises(ArgumentError, match=f"compat.install: {text}"):
        compat.install(*names, **options)
    assert absent("flash_mla")


PROBE = """
import json, subprocess, sys, time
start = time.perf_counter()
import torch
torch_seconds = time.perf_counter() - start
before = set(sys.modules)

def refuse(*args, **kwargs):
    raise RuntimeError("importing the package started a process")

subprocess.Popen.__init__ = refuse
start = time.perf_counter()
import sparse_mla
seconds = time.perf_counter() - start
missing = [name for name in sparse_mla.__all__ if not hasattr(sparse_mla, name)]
new = sorted(set(sys.modules) - before)
print(json.dumps({"torch": torch_seconds, "ours": seconds, "new": new, "missing": missing}))
"""
HEAVY = ("torch._dynamo", "torch._inductor", "sparse_mla._native", "sparse_mla.backends.")
HEAVY_ROOTS = ("sympy", "click", "rich", "matplotlib", "pytest", "hypothesis", "nki", "flash_mla")


def test_importing_the_package_is_cheap_and_silent():
    """Warnings are errors, no process is started, neither a backend nor torch's compiler nor the command's packages are
    loaded, and the time is small beside torch's own (0.2 s where torch takes 1.3 s)."""
    shares = []
    for _ in range(3):
        run = subprocess.run(
            [sys.executable, "-W", "error", "-O", "-c", PROBE], capture_output=True, text=True, env=config.environment()
        )
        assert run.returncode == 0, run.stderr
        assert run.stderr == ""
        said = json.loads(run.stdout)
        assert said["missing"] == []
        assert [m for m in said["new"] if m.startswith(HEAVY) or m.split(".")[0] in HEAVY_ROOTS] == []
        shares.append(said["ours"] / said["torch"])
        if said["ours"] < 0.2 or shares[-1] < 0.15:
            return
    pytest.fail(f"importing sparse_mla took {min(shares):.0%} of the time torch takes, three times")
