# SPDX-License-Identifier: Apache-2.0
"""Public tools to judge and measure an implementation: the cases, the numeric rules, the check, the bench and the demo.

Nothing here needs pytest. An engineer of another accelerator runs `cases` through his kernel and `numeric` over the
result.
"""
