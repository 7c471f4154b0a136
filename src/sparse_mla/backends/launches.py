# SPDX-License-Identifier: Apache-2.0
"""The launches that `neuron` and `simulated` share. Each module registers itself on its operator when it is
imported."""

from __future__ import annotations

import importlib

__all__ = ["MODULES", "load"]

MODULES = (
    "sparse_decode",
    "sparse_prefill",
    "index_logits",
    "topk",
    "candidate_blocks",
    "index_topk",
    "softmax_pool",
    "compress",
    "torch_forms",
)


def load() -> None:
    """Import every launch."""
    for name in MODULES:
        importlib.import_module(f"..kernels.{name}", __package__)
