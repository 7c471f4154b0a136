# SPDX-License-Identifier: Apache-2.0
"""Observed deviations from the documentation: each is in the table, and the table names a test that exists."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparse_mla.errors import KernelError
from sparse_mla.simulator import isa as nisa
from sparse_mla.simulator import language as nl
from sparse_mla.simulator.errata import ERRATA

from . import test_checks
from .kit import BF16, launch, put, random


def texts(result: Any) -> str:
    return "\n".join(w.message for w in result.warnings)


def test_errata_psum_memset() -> None:
    def kernel() -> None:
        nisa.memset(dst=nl.ndarray((4, 8), nl.bfloat16, nl.psum), value=0.0)

    assert "4-byte types only" in texts(launch(kernel))
    with pytest.raises(KernelError, match="4-byte types only"):
        launch(kernel, strict=True)


def test_errata_affine_select() -> None:
    def kernel() -> None:
        t = nl.zeros((4, 2, 2, 2, 2), nl.float32)
        nisa.affine_select(
            dst=t, pattern=[[1, 2], [1, 2], [1, 2], [1, 2]], channel_multiplier=0, on_true_tile=t, on_false_value=0.0
        )

    assert "more than 3 free dims" in texts(launch(kernel))
    with pytest.raises(KernelError, match="more than 3 free dims"):
        launch(kernel, strict=True)


def test_errata_transpose_skip() -> None:
    def kernel(table: Any, index: Any) -> None:
        t = nl.zeros((32, 16), nl.bfloat16)
        nisa.dma_transpose(
            dst=t, src=table.ap([[32, 16], [1, 32]], vector_offset=put(index)), oob_mode=nisa.oob_mode.skip
        )

    index = np.arange(16, dtype=np.uint32).reshape(16, 1)
    table = random((16, 32), BF16)
    assert "abort the DMA queue" not in texts(launch(kernel, table, index))
    assert "abort the DMA queue" in texts(launch(kernel, table, index + 4))


def test_errata_local_gather() -> None:
    def kernel() -> None:
        index = nl.zeros((16, 1), nl.uint16)
        nisa.local_gather(dst=nl.ndarray((16, 16), nl.float32), src_buffer=nl.zeros((16, 8), nl.float32), index=index)

    assert "explicitly" in texts(launch(kernel))


def test_the_table_names_tests_that_exist() -> None:
    rules = {f"test_rule[{c.check:02d}-{c.kernel.__name__}]" for c in test_checks.CASES}
    for erratum in ERRATA:
        assert erratum.test in rules or erratum.test in globals(), erratum.test
