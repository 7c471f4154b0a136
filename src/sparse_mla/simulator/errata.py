# SPDX-License-Identifier: Apache-2.0
"""Where hardware, or its compiler, was seen to differ from its documentation, and what the simulator does about it.

Nothing here was observed by this project: each entry says where the observation comes from. `test` names the test that
holds the simulator to the behaviour in the last column.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ERRATA", "Erratum"]


@dataclass(frozen=True)
class Erratum:
    """One deviation."""

    instruction: str
    page: str  # what the documentation lets one expect
    observed: str
    origin: str
    simulator: str  # what we do
    test: str


_AWS = "comments in AWS's public kernels"
_THIRD = "third-party kernels on trn1 / trn2"

ERRATA = (
    Erratum(
        "nc_matmul", "free dims of stationary are not limited", "two free dims give wrong numbers on trn2", _THIRD,
        "error unless they merge into one", "test_rule[10-stationary_dims]",
    ),
    Erratum(
        "tensor_scalar", "any bit operator as op1", "right_shift as op1 is refused", _THIRD,
        "warning, error with strict", "test_rule[26-shift_second]",
    ),
    Erratum(
        "memset", "all dtypes, SBUF or PSUM", "PSUM accepts 4-byte types only", _THIRD,
        "warning, error with strict", "test_errata_psum_memset",
    ),
    Erratum(
        "affine_select", "patterns of up to 4 dims", "4-D dst patterns are refused", _THIRD,
        "warning, error with strict", "test_errata_affine_select",
    ),
    Erratum(
        "activation_reduce", "as long as a partition", "free sizes above 16384 fail", _THIRD,
        "warning", "test_rule[53-long_activation_reduce]",
    ),
    Erratum(
        "dma_transpose", "no alignment is documented", "dst must start at a multiple of 32 bytes", _THIRD,
        "warning", "test_rule[36-transpose_alignment]",
    ),
    Erratum(
        "dma_transpose", "oob_mode.skip leaves rows out", "a gather-transpose with skip aborts the queue", _THIRD,
        "warning", "test_errata_transpose_skip",
    ),
    Erratum(
        "sendrecv", "any number of partitions", "fewer than 128 partitions arrive scrambled", _AWS,
        "warning", "test_rule[44-narrow_exchange]",
    ),
    Erratum(
        "topk", "values ascend", "order differs from the simulator's; few partitions misbehave", _AWS,
        "ascending order; warning below 128 partitions", "test_rule[41-topk_few]",
    ),
    Erratum(
        "local_gather", "num_valid_indices is optional", "omitting the optional arguments is a known issue of 0.6",
        "release notes", "warning", "test_errata_local_gather",
    ),
    Erratum(
        "ndarray", "shared_hbm is shared by the cores", "unnamed tensors are private to each core", _AWS,
        "error when both cores write one that is returned", "test_rule[45-unnamed_output]",
    ),
)  # fmt: skip
