# SPDX-License-Identifier: Apache-2.0
"""Who executes: one module per backend, loaded when first asked. `presence() -> str` is "" when it can run here."""
