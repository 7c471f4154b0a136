# SPDX-License-Identifier: Apache-2.0
"""The graph check catches each construct it names, and every launch passes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparse_mla import KVScope, PagedCache, sparse_decode
from sparse_mla.dispatch import OPS, Implementation
from sparse_mla.formats import BF16, INDEX_FP4, INDEX_FP8, V41_FP4, V41_FP8, RecordFormat
from sparse_mla.kernels import launch
from sparse_mla.simulator import isa as nisa
from sparse_mla.simulator import jit
from sparse_mla.simulator import language as nl
from sparse_mla.testing.cases import cases_of
from sparse_mla.testing.check import forced, implementations, validated_call
from sparse_mla.testing.neuron_graph import RULES, check_case, check_graph, kernel_calls


@jit
def doubled(x: Any, bias: Any) -> Any:
    """x times two; `bias` says how many query rows there are."""
    out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm, name="out")
    if nl.program_id(0) == 0:
        tile = nl.load(x)
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=2.0)
        nisa.dma_copy(dst=out, src=tile)
    return out


def bytes_(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def slots(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def bitcast(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


def make_float8(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float8_e4m3fn).float()


def strided_view(x: torch.Tensor) -> torch.Tensor:
    return x[:, 4:].as_strided((4, 4), (16, 1)) + 1


def byte_gather(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return x[i, i]


def pair_gather(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return x.view(4, 8, 2)[i, i]


def taken(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return torch.take(x, i.long())


def selected_bytes(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return torch.index_select(x, 1, i)


def bool_index(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0]


def bool_write(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[x > 0] = 1
    return y


def positions(x: torch.Tensor) -> torch.Tensor:
    return x.nonzero()


def masked(x: torch.Tensor) -> torch.Tensor:
    return torch.masked_select(x, x > 0)


def read_value(x: torch.Tensor) -> torch.Tensor:
    return x * x.max().item()


def branch(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if bool((x > 0).any()) else x


def kernel_call(x: torch.Tensor, bias: torch.Tensor) -> Any:
    return launch.call_kernel("simulated", doubled, x=x, bias=bias)


def decode(records: torch.Tensor) -> torch.Tensor:
    return launch.decode_rows(records, V41_FP8)


def record_gather(cache: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return launch.gather_rows(cache, i, i, 528, 528)


BROKEN = [
    ("a", bitcast, (bytes_(4, 16),)),
    ("a", make_float8, (torch.zeros(4),)),
    ("b", strided_view, (bytes_(4, 16),)),
    ("c", byte_gather, (bytes_(4, 16), slots(2))),
    ("c", pair_gather, (bytes_(4, 16), slots(2))),
    ("c", taken, (bytes_(4, 16), slots(2))),
    ("c", selected_bytes, (bytes_(4, 16), slots(2))),
    ("d", bool_index, (torch.zeros(4),)),
    ("d", bool_write, (torch.zeros(4),)),
    ("d", positions, (torch.zeros(4),)),
    ("d", masked, (torch.zeros(4),)),
    ("d", read_value, (torch.zeros(4),)),
    ("d", branch, (torch.zeros(4),)),
    ("e", kernel_call, (torch.zeros(128, 8), torch.zeros(6, 4))),
    ("e", decode, (bytes_(6, 3, 528),)),
    ("e", record_gather, (bytes_(4, 2, 1, 528), slots(6, 3))),
]


@pytest.mark.parametrize(("rule", "function", "arguments"), BROKEN, ids=[f"{r}-{f.__name__}" for r, f, _ in BROKEN])
def test_each_construct_is_caught(rule: str, function: Any, arguments: Any) -> None:
    findings = check_graph(function, *arguments)
    assert rule in {f.rule for f in findings}, f"{function.__name__} passes; rule {rule} ({RULES[rule]}) is blind"
    found = next(f for f in findings if f.rule == rule)
    assert "test_neuron_graph.py:" in found.source or "launch.py:" in found.source, found
    assert len(found.message.split()) >= 4
    assert found.node in str(found)


GOOD = [
    ("words of four bytes", pair_gather, None),
    ("kernel of a power of two", kernel_call, (torch.zeros(128, 8), torch.zeros(8, 4))),
    ("decode of a power of two", decode, (bytes_(8, 3, 528),)),
    ("gather of whole records", record_gather, (bytes_(4, 2, 1, 528), slots(8, 3))),
    ("gather of one row", record_gather, (bytes_(4, 2, 1, 528), slots(1, 3))),
]


@pytest.mark.parametrize(("function", "arguments"), [(f, a) for _, f, a in GOOD[1:]], ids=[n for n, _, _ in GOOD[1:]])
def test_what_is_allowed_passes(function: Any, arguments: Any) -> None:
    assert check_graph(function, *arguments) == []


def test_float8_input_is_refused_before_tracing() -> None:
    traced = []

    def spy(x: torch.Tensor) -> torch.Tensor:
        traced.append(True)
        return x.float()

    findings = check_graph(spy, torch.zeros(4).to(torch.float8_e4m3fn))
    assert [f.rule for f in findings] == ["a"]
    assert "uint8 view" in findings[0].message
    assert not traced


@pytest.mark.parametrize("fmt", [BF16, V41_FP8, V41_FP4, INDEX_FP8, INDEX_FP4], ids=str)
def test_records_decode_without_64_bit_integers(fmt: RecordFormat) -> None:
    """`torch.where(mask, 8, 0)` of two plain numbers is int64, twice the bytes of every temporary after it."""

    class Decode(torch.nn.Module):
        def forward(self, records: torch.Tensor) -> torch.Tensor:
            return launch.decode_rows(records, fmt)

    graph = torch.export.export(Decode(), (bytes_(4, fmt.record_bytes),), strict=True).graph
    values = {node.name: node.meta.get("val") for node in graph.nodes if node.op == "call_function"}
    dtypes = {name: value.dtype for name, value in values.items() if isinstance(value, torch.Tensor)}
    assert dtypes
    assert [name for name, dtype in dtypes.items() if dtype in (torch.int64, torch.float64)] == []


def test_whole_cache_decode_is_exempt() -> None:
    def table(data: torch.Tensor) -> torch.Tensor:
        return launch.load_cache(PagedCache(data, V41_FP8, 2))

    assert check_graph(table, bytes_(3, 2, 1, 528)) == []


def _traced(implementation: Implementation) -> list[Any]:
    """Findings of the smallest case that the implementation takes and whose inputs may enter a graph."""
    cases = [c for c in cases_of(implementation.stem) if not c.is_full and not c.is_bench_only and c.nbytes > 0]
    for case in sorted(cases, key=lambda c: c.nbytes):
        if implementation.refusals(validated_call(case, case.build().arguments)):
            continue
        findings = check_case(implementation, case)
        if not any(f.source == "argument" for f in findings):  # float8 queries enter as their bytes: another case does
            return findings
    raise AssertionError(f"{implementation.stem}: {implementation.name} takes no case that can be traced")


def _launches() -> list[Implementation]:
    return [i for stem in sorted(OPS) for i in implementations(stem, "simulated")]


@pytest.mark.parametrize("implementation", _launches(), ids=lambda i: f"{i.stem}-{i.name}")
def test_every_launch_passes(implementation: Implementation) -> None:
    findings = _traced(implementation)
    assert findings == [], "\n".join(str(f) for f in findings)


@pytest.mark.parametrize(
    ("strategy", "kernel"),
    [
        ("fused", "fused_attn"),
        pytest.param("decoded_table", "gathered_attn_idx", marks=pytest.mark.full),
        pytest.param("row_gather", "gathered_attn", marks=pytest.mark.full),
    ],
)
def test_rows_that_are_no_power_of_two_are_padded(strategy: str, kernel: str) -> None:
    """Six rows of speculative verification reach the kernel as eight."""
    cache = PagedCache(bytes_(4, 8, 1, 528), V41_FP8, 8)
    q = torch.zeros(1, 6, 2, 512, dtype=torch.bfloat16)
    scope = KVScope(cache, slots(1, 6, 128))
    chosen = next(i for i in implementations("sparse_decode", "simulated") if i.strategy == strategy)
    with forced(chosen):
        findings = check_graph(sparse_decode, q, scope, backend="simulated")
        assert findings == [], "\n".join(str(f) for f in findings)
        assert kernel_calls(sparse_decode, q, scope, backend="simulated") == [kernel]
