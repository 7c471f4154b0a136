# SPDX-License-Identifier: Apache-2.0
"""What each operator means: signature, validation, docstring and reference implementation, one file per operator."""

from .sparse_decode import SPARSE_DECODE, AttnOutput, SparseDecodeCall, sparse_decode

__all__ = ["SPARSE_DECODE", "AttnOutput", "SparseDecodeCall", "sparse_decode"]
