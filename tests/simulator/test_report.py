# SPDX-License-Identifier: Apache-2.0
"""The text report: every figure it must hold, in the unit it names, marked as an estimate."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from sparse_mla.simulator.report import path_by_line

from .kit import BF16, get, launch, nisa, nl, put, random


def product(a: Any, b: Any) -> Any:
    x, y = put(a), put(b)
    sums = nl.ndarray((128, 512), nl.float32, nl.psum)
    nisa.nc_matmul(dst=sums, stationary=x, moving=y)
    return get(sums)


@pytest.fixture(scope="module")
def result() -> Any:
    return launch(product, random((128, 128), BF16), random((128, 512), BF16))


def test_report_names_time_engines_memory_path_and_warnings(result: Any) -> None:
    text = result.report()
    e = result.estimate
    assert text.startswith("product: 1 core, 5 instructions (estimated, trn2; nothing ran on a device)")
    assert f"{e.total_us:.2f} us, bound by {e.bound_by}" in text
    for engine in ("tensor", "vector", "scalar", "gpsimd", "sync", "sync-store", "dma"):
        assert re.search(rf"^  {engine} +[\d.]+ us +[\d.]+ %$", text, re.MULTILINE)
    assert f"{(128 * 128 + 128 * 512) * 2:,} B read, {128 * 512 * 4:,} B written" in text
    assert "3 transfers, 384 descriptors" in text
    # the operands (256 + 1024) are dead when the result (2048) is written
    assert "SBUF         2,048 of 212,984 usable B per partition" in text
    assert "PSUM         1 of 8 banks" in text
    assert f"critical path (estimated, trn2), {len(e.critical_path)} steps" in text
    assert re.search(r"us +[\d.]+ % +1 x nc_matmul +\S*test_report.py:\d+", text)


def test_every_section_with_times_says_estimated(result: Any) -> None:
    for line in result.report().splitlines():
        if line.startswith(("time", "engines", "memory", "critical path")):
            assert "estimated, trn2" in line


def test_path_lines_add_up_to_the_total(result: Any) -> None:
    lines = path_by_line(result.estimate)
    assert sum(line.us for line in lines) == pytest.approx(result.estimate.total_us)
    assert [line.us for line in lines] == sorted((line.us for line in lines), reverse=True)


def test_long_paths_are_cut_and_summed(result: Any) -> None:
    text = result.report(path_lines=1)
    rest = sum(line.us for line in path_by_line(result.estimate)[1:])
    assert f"{rest:.2f} us in {len(path_by_line(result.estimate)) - 1} more lines" in text


def test_report_lists_warnings_with_their_rule_and_count() -> None:
    def narrow(a: Any) -> Any:
        x = nl.ndarray((128, 8), nl.float32, nl.sbuf)
        for _ in range(3):
            nisa.dma_copy(dst=x, src=a)
        return get(x)

    text = launch(narrow, np.ones((128, 8), np.float32)).report()
    assert re.search(r"rule 52: dma_copy: descriptors of 32 B.*\(3 times\)", text)


def test_report_without_warnings_says_so() -> None:
    assert launch(lambda a: get(put(a)), np.ones((128, 512), np.float32)).report().endswith("no warnings")


def test_report_of_two_cores_has_a_column_each() -> None:
    def halves(a: Any) -> Any:
        core = nl.program_id(0)
        out = nl.ndarray((2, 128, 512), nl.float32, nl.shared_hbm, name="out")
        nisa.dma_copy(dst=out[core], src=put(a))
        return out

    text = launch(halves, np.ones((128, 512), np.float32), grid=2, gen=4).report()
    assert "core 0 busy" in text
    assert "core 1 busy" in text
    assert "SBUF core 1" in text
    assert "estimated, trn3" in text
