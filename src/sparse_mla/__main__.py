# SPDX-License-Identifier: Apache-2.0
"""`python -m sparse_mla`: the command `sparse-mla`, where its script is not on PATH."""

from .cli import main

main()
