# SPDX-License-Identifier: Apache-2.0
"""`wrap_nki`: kernels as torch ops, eagerly, with fake tensors and under torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sparse_mla.errors import ArgumentError
from sparse_mla.simulator import isa as nisa
from sparse_mla.simulator import jit
from sparse_mla.simulator import language as nl
from sparse_mla.simulator.hop import wrap_nki


@jit
def scaled_sum(a: Any, b: Any, scale: float = 1.0) -> Any:
    out = nl.ndarray(a.shape, a.dtype, nl.shared_hbm, name="out")
    x, y = nl.load(a), nl.load(b)
    total = nl.ndarray(a.shape, nl.float32)
    nisa.tensor_tensor(dst=total, data1=x, data2=y, op=nl.add)
    result = nl.ndarray(a.shape, a.dtype)
    nisa.tensor_scalar(dst=result, data=total, op0=nl.multiply, operand0=scale)
    if nl.program_id(0) == 0:
        nisa.dma_copy(dst=out, src=result)
    return out


@jit
def two_outputs(a: Any) -> Any:
    p, n = a.shape
    total = nl.ndarray((p, 1), nl.float32, nl.shared_hbm)
    double = nl.ndarray((p, n), nl.bfloat16, nl.shared_hbm)
    x = nl.load(a)
    t = nl.ndarray((p, 1), nl.float32)
    nisa.tensor_reduce(dst=t, op=nl.add, data=x, axis=1)
    nisa.dma_copy(dst=total, src=t)
    y = nl.ndarray((p, n), nl.bfloat16)
    nisa.tensor_scalar(dst=y, data=x, op0=nl.multiply, operand0=2.0)
    nisa.dma_copy(dst=double, src=y)
    return total, double


@jit
def increment(a: Any) -> Any:
    x = nl.load(a)
    nisa.tensor_scalar(dst=x, data=x, op0=nl.add, operand0=1.0)
    nisa.dma_copy(dst=a, src=x)
    return a


def test_eager_matches_torch() -> None:
    a, b = torch.randn(128, 64, dtype=torch.bfloat16), torch.randn(128, 64, dtype=torch.bfloat16)
    for grid in (1, 2):
        out = wrap_nki(scaled_sum)[grid](a=a, b=b, scale=0.5)
        expected = ((a.float() + b.float()) * 0.5).to(torch.bfloat16)
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, expected)


def test_fake_tensors_give_shapes() -> None:
    with FakeTensorMode():
        a = torch.empty(64, 32)
        total, double = wrap_nki(two_outputs)(a)
    assert (total.shape, total.dtype) == ((64, 1), torch.float32)
    assert (double.shape, double.dtype) == ((64, 32), torch.bfloat16)


def test_compile_keeps_the_kernel_as_one_node() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    call = wrap_nki(two_outputs)

    @torch.compile(backend=backend, fullgraph=True)
    def model(a: torch.Tensor) -> torch.Tensor:
        total, double = call(a)
        return total + double.float().sum(dim=1, keepdim=True)

    a = torch.randn(64, 32)
    out = model(a)
    assert torch.allclose(out, a.sum(1, keepdim=True) + (a * 2).bfloat16().float().sum(1, keepdim=True), atol=1e-4)
    assert len(graphs) == 1
    assert any("two_outputs" in str(node.target) for node in graphs[0].graph.nodes)


def test_aliased_arguments_are_mutated_in_place() -> None:
    a = torch.zeros(32, 16)
    out = wrap_nki(increment, operand_output_aliases={0: 0})(a)
    assert out is a
    assert (a == 1).all()


def test_wrong_arguments_are_one_sentence() -> None:
    with pytest.raises(ArgumentError, match="scaled_sum"):
        wrap_nki(scaled_sum)(a=torch.zeros(4, 4))
    with pytest.raises(ArgumentError, match="hashable"):
        wrap_nki(scaled_sum)(a=torch.zeros(4, 4), b=torch.zeros(4, 4), scale=[1.0])
