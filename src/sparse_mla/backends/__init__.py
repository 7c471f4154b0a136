# SPDX-License-Identifier: Apache-2.0
"""Who executes: one module per backend, loaded when first asked. Each has `presence() -> str`: "" when it can run here."""
