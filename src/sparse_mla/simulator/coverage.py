# SPDX-License-Identifier: Apache-2.0
"""What the simulator covers, instruction by instruction and generation by generation.

"exact": the documented result, bit for bit where the documentation determines it. "approximate": a documented result
whose last bits, order or random sequence are the hardware's own. "missing": raises, with the instruction's name.
"-": the generation does not have it. The cost column says whether AWS documents a formula.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import costs

__all__ = ["APPROXIMATE_RESULT", "FIRST_GENERATION", "MISSING", "Coverage", "coverage"]

MISSING = ("activate2", "exponential", "nc_matmul_mx", "quantize_mx")  # trn3 only
APPROXIMATE_RESULT = {
    "activation": "exact functions instead of the hardware's tables",
    "activation_reduce": "exact functions instead of the hardware's tables",
    "bn_aggr": "order of float32 sums",
    "bn_stats": "order of float32 sums",
    "dma_compute": "order of float32 sums",
    "dropout": "another random sequence",
    "local_gather": "the unit of an index is ambiguous in the documentation",
    "nc_matmul": "order of float32 sums",
    "rand2": "another random sequence",
    "rand_get_state": "another generator",
    "rand_set_state": "another generator",
    "rng": "another random sequence",
    "set_rng_seed": "another generator",
    "tensor_partition_reduce": "order of float32 sums",
    "tensor_reduce": "order of float32 sums",
    "tensor_scalar_reduce": "order of float32 sums",
    "topk": "order of the results",
}
FIRST_GENERATION = {
    "activate2": 4, "core_barrier": 3, "exponential": 4, "nc_matmul_mx": 4, "nonzero_with_count": 3, "quantize_mx": 4,
    "range_select": 3, "sendrecv": 3,
}  # fmt: skip
NO_TIME = ("get_nc_sub_version", "get_nc_version", "register_alloc")  # answered while the kernel is traced


@dataclass(frozen=True)
class Coverage:
    """One instruction."""

    name: str
    results: tuple[str, str, str]  # on trn1, trn2, trn3
    cost: str
    remark: str


def coverage(names: list[str]) -> list[Coverage]:
    """The table's rows for the documented instructions `names`."""
    rows = []
    for name in sorted(names):
        first = FIRST_GENERATION.get(name, 2)
        state = "missing" if name in MISSING else "approximate" if name in APPROXIMATE_RESULT else "exact"
        results = tuple(state if gen >= first else "-" for gen in (2, 3, 4))
        if name in MISSING or name in NO_TIME:
            cost = "-"
        elif name in costs.DOCUMENTED:
            cost = "documented"
        else:
            cost = "assumed"
        rows.append(Coverage(name, results, cost, APPROXIMATE_RESULT.get(name, "")))  # type: ignore[arg-type]
    return rows
