# SPDX-License-Identifier: Apache-2.0
"""Kernels of others, unmodified, from folders the caller names; skipped with that reason when none is given."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
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


@pytest.fixture(scope="module")
def suite() -> Any:
    spec = importlib.util.spec_from_file_location("nki_library_suite", ROOT / "tools" / "nki_library_suite.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Item:
    """What the suite needs of a pytest item."""

    def __init__(self, function: str, *sizes: int) -> None:
        self.nodeid = f"test/integration/nkilib/core/thing/test_a.py::T::{function}[{'-'.join(map(str, sizes))}]"
        self.callspec = SimpleNamespace(params={"sizes": sizes})


def test_the_suite_runs_the_cheapest_function_and_its_smallest_test_next(suite: Any) -> None:
    cheap, dear = [Item("cheap", n) for n in (4, 1, 2)], [Item("dear", n) for n in (8, 16)]
    tried = {cheap[1].nodeid: {"state": "too slow", "seconds": 0.0, "limit": 0.0}}
    queue = suite.Queue([*dear, *cheap], tried)
    names = []
    while (item := queue.next()) is not None:
        queue.done(item, 5.0 if item in cheap else 50.0, slow=item in dear)
        names.append(item.nodeid.split("::")[-1])
    # the test of size 1 was tried before, so it comes last
    assert names == ["cheap[2]", "dear[8]", "cheap[4]", "cheap[1]", "dear[16]"]
    queue = suite.Queue([Item("slow", n) for n in range(1, 9)], {})
    for _ in range(3):
        queue.done(queue.next(), 9.0, slow=True)
    assert queue.next() is None  # three too slow in a row: the function rests


def test_the_suite_keeps_final_states(suite: Any, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    rows = [("a", "passed", 0), ("b", "failed", 0), ("c", "too slow", 10), ("d", "too slow", 30), ("e", "not run", 0)]
    lines = [json.dumps({"test": t, "state": s, "limit": limit, "reason": "", "seconds": 0}) for t, s, limit in rows]
    gone = json.dumps({"test": "f", "state": "gone"})
    out.write_text("\n".join([*lines, json.dumps({"test": "f", "state": "passed"}), gone]) + "\n")
    found = suite.load(out)
    assert list(found) == ["a", "b", "c", "d", "e"]
    run = object.__new__(suite.Suite)
    run.limit, run.resume, run.again = 30.0, True, set()
    assert [t for t, row in found.items() if not run.final(row)] == ["c", "e"]
    run.again = {"failed"}
    assert [t for t, row in found.items() if not run.final(row)] == ["b", "c", "e"]
    run.resume = False
    assert not any(run.final(row) for row in found.values())


def test_the_suite_knows_tests_on_several_devices_before_it_runs_them(suite: Any, tmp_path: Path) -> None:
    items = [Item("one", 1), Item("spread", 2), Item("spread", 3), Item("ran", 4)]
    for item, devices in zip(items, (1, 2, 2, 2), strict=True):
        item.callspec.params["config"] = SimpleNamespace(KVDP=devices)
    run = object.__new__(suite.Suite)
    run.path, run.limit, run.resume, run.again, run.shard, run.shards = tmp_path / "rows", 30.0, True, set(), 0, 1
    run.path.touch()
    run.write(items[2].nodeid, "not run", "not reached")  # by a run that did not know
    run.write(items[3].nodeid, "passed")
    option = SimpleNamespace(keyword="")
    run.pytest_collection_finish(SimpleNamespace(items=items, config=SimpleNamespace(option=option)))
    states = [row["state"] for row in suite.load(run.path).values()]
    assert sorted(states) == ["needs collectives", "needs collectives", "not run", "passed"]
    assert run.queue.next() is items[0]
    assert run.queue.next() is None


def test_the_suite_says_nothing_about_tests_its_caller_left_out(suite: Any, tmp_path: Path) -> None:
    run = object.__new__(suite.Suite)
    run.path, run.limit, run.shard = tmp_path / "rows", 30.0, 0
    run.path.touch()
    item: Any = Item("left", 1)
    for keyword, count in (("other", 0), ("", 1)):
        item.config = SimpleNamespace(option=SimpleNamespace(keyword=keyword))
        run.pytest_deselected([item])
        assert len(suite.load(run.path)) == count


@pytest.mark.parametrize(
    ("state", "reason", "expired", "no_memory", "expected"),
    [
        ("passed", "", False, False, "passed"),
        ("passed", "", True, False, "too slow"),  # a negative test that met the limit instead of its error
        ("failed", "Validation failed for ['out']", False, False, "failed"),
        ("failed", "InferenceException: ", False, True, "too slow"),
        ("failed", "Unable to allocate 8.00 GiB for an array", False, False, "too slow"),
        ("failed", "nc_matmul_mx: not simulated", False, False, "needs trn3"),
        ("failed", "'PerRankLazyInputGenerator' object has no attribute 'items'", False, False, "needs collectives"),
        ("failed", "IndentationError: unexpected indent", False, False, "excluded"),
        (
            "failed",
            "size of tensor a (384) must match the size of tensor b (3) at non-singleton",
            False,
            False,
            "excluded",
        ),
        ("not run", "Skipped: only one combination is run", False, False, "excluded"),
        ("not run", "Skipped: MX Quantization is only supported on TRN3.", False, False, "needs trn3"),
    ],
)
def test_the_suite_says_why(suite: Any, state: str, reason: str, expired: bool, no_memory: bool, expected: str) -> None:
    assert suite.classify(state, reason, expired, no_memory)[0] == expected


def test_nki_library_families_pass() -> None:
    root = folder("NKI_LIBRARY_DIR")
    command = [sys.executable, ROOT / "tools" / "nki_library_suite.py", *QUICK_FAMILIES, "--seconds", "120"]
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
