# SPDX-License-Identifier: Apache-2.0
"""The simulated backend."""

from __future__ import annotations


def presence() -> str:
    return "it is not part of this version"
