# SPDX-License-Identifier: Apache-2.0
"""What every test run shares: one seed per test, one torch thread per worker, and no silent absence of the native
extension."""

from __future__ import annotations

import os
import random
import zlib

import numpy
import pytest
import torch

from sparse_mla import config
from sparse_mla.dispatch import presence

NOT_YET = "it is not part of this version"  # what a backend without any code says; nothing can be missing of it


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)  # two workers on two cores; a kernel test that needs more threads sets them itself


def pytest_sessionstart(session: pytest.Session) -> None:
    if config.get("SPARSE_MLA_REQUIRE_NATIVE"):
        absent = presence("native")
        if absent and absent != NOT_YET:
            pytest.exit(
                f"SPARSE_MLA_REQUIRE_NATIVE=1 and the native extension is missing: {absent}. "
                "Rebuild it (pip install --force-reinstall --no-cache-dir --no-deps -e .), or unset the variable.",
                returncode=1,
            )


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    """Every test draws the same numbers alone, in any order, and on any worker."""
    seed = zlib.crc32(request.node.nodeid.encode())
    torch.manual_seed(seed)
    numpy.random.seed(seed)
    random.seed(seed)
