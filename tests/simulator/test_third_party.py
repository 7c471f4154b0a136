# SPDX-License-Identifier: Apache-2.0
"""Kernels of others, unmodified, from folders the caller names; skipped with that reason when none is given."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from sparse_mla import simulator
from sparse_mla.simulator import SimulatorParams

ROOT = Path(__file__).resolve().parents[2]
QUICK_FAMILIES = ("core/cumsum", "experimental/dynamic_shapes")


def folder(name: str) -> Path:
    given = os.environ.get(name)
    if not given:
        pytest.skip(f"{name} is not set; third-party kernels are fetched by whoever runs this and never part of it")
    return Path(given)


def test_nki_library_families_pass() -> None:
    root = folder("NKI_LIBRARY_DIR")
    command = [sys.executable, ROOT / "tools" / "nki_library_suite.py", *QUICK_FAMILIES, "--seconds-per-family", "60"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "NKI_LIBRARY_DIR": str(root)}
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def example() -> Iterator[Any]:
    root = folder("NEURON_SDK_DIR") / "nki" / "examples"
    simulator.install(force=True)

    def load(path: str, name: str) -> Any:
        spec = importlib.util.spec_from_file_location(Path(path).stem, root / path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kernel = getattr(module, name)

        def run(*args: Any, **constants: Any) -> Any:
            # the examples return tensors in private HBM, as the vendor's simulator accepts
            params = SimulatorParams(gen=3, show_warnings=False, aws_compat=True)
            return simulator.run(kernel, *args, params=params, **constants).value

        return run

    yield load
    simulator.uninstall()


@pytest.mark.parametrize(
    ("name", "k", "m", "n"),
    [
        ("nki_matmul_basic_", 128, 64, 512),
        ("nki_matmul_tiled_", 256, 256, 1024),
        ("nki_matmul_hoist_load_", 256, 256, 1024),
        ("nki_matmul_block_free_dimension_", 256, 256, 1024),
        ("nki_matmul_fully_optimized_", 1024, 2048, 1024),
    ],
)
def test_sdk_matmul(example: Any, name: str, k: int, m: int, n: int) -> None:
    g = np.random.default_rng(0)
    a, b = (g.standard_normal((k, size), np.float32).astype(ml_dtypes.bfloat16) for size in (m, n))
    out = example("matrix_multiplication/matrix_multiplication_nki_kernels.py", name)(a, b)
    expected = a.astype(np.float32).T @ b.astype(np.float32)
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, rtol=2e-2, atol=0.5)


def test_sdk_tensor_addition(example: Any) -> None:
    a = np.random.default_rng(1).standard_normal((128, 512), np.float32)
    out = example("tensor_addition/tensor_addition_nki_kernels.py", "nki_tensor_add")(a, a)
    np.testing.assert_allclose(out, a + a, rtol=1e-6)


def test_sdk_transpose(example: Any) -> None:
    a = np.arange(16 * 12 * 8, dtype=np.float32).reshape(16, 96)
    out = example("transpose2d/transpose2d_nki_kernels.py", "tensor_transpose2D_kernel_")(a, shape2D=(12, 8))
    np.testing.assert_array_equal(out, a.reshape(16, 12, 8).transpose(0, 2, 1).reshape(16, 96))


def test_sdk_average_pool(example: Any) -> None:
    a = np.random.default_rng(2).standard_normal((128, 6, 6), np.float32)
    out = example("average_pool2d/average_pool2d_nki_kernels.py", "tensor_avgpool_kernel")(a, pool_size=2)
    np.testing.assert_allclose(out, a.reshape(128, 3, 2, 3, 2).mean((2, 4)), rtol=1e-5, atol=1e-6)


def test_sdk_mamba_versions_agree(example: Any) -> None:
    g = np.random.default_rng(3)
    delta, u = (g.random((1, 128, 512), np.float32) * 0.1 for _ in range(2))
    a, (b, c) = -g.random((128, 4), np.float32), (g.random((1, 4, 512), np.float32) for _ in range(2))
    state = np.zeros((128, 4))
    expected = np.zeros((1, 128, 512))
    for t in range(512):
        step = delta[0, :, t : t + 1]
        state = np.exp(step * a) * state + step * u[0, :, t : t + 1] * b[0, :, t]
        expected[0, :, t] = state @ c[0, :, t]
    for name in ("mamba_v1", "mamba_v2", "mamba_v3"):
        out = example("fused_mamba/mamba_nki_kernels.py", name)(delta, u, a, b, c)
        np.testing.assert_allclose(out, expected, rtol=1e-3, atol=1e-5)
