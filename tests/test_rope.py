# SPDX-License-Identifier: Apache-2.0
"""`rope` and its table: golden vectors, exact fused arithmetic, the relative-distance property, shapes and bad
input.
"""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from sparse_mla.errors import ArgumentError, DTypeError, ShapeError, SlotRangeError
from sparse_mla.ops.rope import (
    ROPE,
    ROPE_DIM,
    RopeCall,
    YarnConfig,
    fused_multiply_add,
    inverse_frequencies,
    rope,
    rope_table,
)

VECTORS = json.loads((Path(__file__).parent / "data" / "vectors" / "rope.json").read_text())
TABLES = {"plain_1e4": (10000.0, None), "yarn_160000": (160000.0, YarnConfig())}
BACKENDS = sorted({i.backend for i in ROPE.candidates("auto")})


@pytest.fixture(scope="module")
def table() -> torch.Tensor:
    return rope_table(4096, 10000.0)


@pytest.mark.parametrize("name", sorted(TABLES))
def test_inverse_frequencies_equal_the_golden_ones(name):
    got = inverse_frequencies(*TABLES[name])
    assert got.dtype == torch.float64
    np.testing.assert_allclose(got.numpy(), VECTORS[name]["inv_freq_fp64"], rtol=1e-15)


def test_yarn_with_factor_one_is_plain():
    unstretched = inverse_frequencies(160000.0, YarnConfig(factor=1.0))
    torch.testing.assert_close(unstretched, inverse_frequencies(160000.0), rtol=1e-15, atol=0)


def test_yarn_leaves_fast_pairs_and_divides_slow_ones():
    plain, stretched = inverse_frequencies(160000.0), inverse_frequencies(160000.0, YarnConfig())
    assert torch.equal(stretched[:16], plain[:16])  # pairs up to low = 15 keep their frequency
    assert torch.equal(stretched[25:], plain[25:] / 16)  # from high = 25 on they are divided
    assert bool((stretched[16:25] < plain[16:25]).all())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("name", sorted(TABLES))
def test_golden_vectors(name, inverse, backend):
    """Near float64 up to position 1000; at 131071 the float32 recipe of the angle is the truth, computed here in
    numpy.
    """
    theta, yarn = TABLES[name]
    table = rope_table(131072, theta, yarn)
    frequency = np.array(VECTORS[name]["inv_freq_fp64"]).astype(np.float32)
    for example in VECTORS[name]["examples"]:
        x, position = example["x"], example["pos"]
        got = rope(
            torch.tensor(x, dtype=torch.float32)[None],
            torch.tensor([position]),
            table,
            inverse=inverse,
            backend=backend,
        )[0]
        exact = np.array(example["inverse_fp64" if inverse else "rope_fp64"])
        angle = (np.float32(position) * frequency).astype(np.float64)
        cos, sin = np.cos(angle), np.sin(angle) * (-1 if inverse else 1)
        even, odd = np.array(x[0::2]), np.array(x[1::2])
        recipe = np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).ravel()
        np.testing.assert_allclose(got.numpy(), recipe, atol=1e-6)
        if position <= 1000:
            np.testing.assert_allclose(got.numpy(), exact, atol=2e-4)
        else:
            assert 1e-3 < np.abs(recipe - exact).max() < 3e-2  # what "better" angles would change


def test_table_is_the_float32_recipe():
    table = rope_table(70000, 160000.0, YarnConfig())  # longer than one chunk of the builder
    frequency = inverse_frequencies(160000.0, YarnConfig()).to(torch.float32).numpy()
    assert table.shape == (70000, ROPE_DIM)
    assert table.dtype == torch.float32
    for position in (0, 1, 65535, 65536, 69999):
        angle = (np.float32(position) * frequency).astype(np.float64)
        np.testing.assert_array_equal(table[position, :32].numpy(), np.cos(angle).astype(np.float32))
        np.testing.assert_array_equal(table[position, 32:].numpy(), np.sin(angle).astype(np.float32))


def test_fused_multiply_add_rounds_once():
    """Against rational arithmetic, on random numbers and on sums whose float64 value sits on a float32 midpoint."""
    g = torch.Generator().manual_seed(5)
    a, b = (torch.randn(4000, generator=g) for _ in range(2))
    c = torch.randn(4000, generator=g) * torch.exp2(torch.randint(-40, 8, (4000,), generator=g).float())
    c[:500] = -(a * b)[:500]  # cancellation: the error of the product is the result
    # 1 + 2^-24 is the midpoint above 1; a product of 2^-80 decides, and float64 cannot see it.
    a = torch.cat([a, torch.tensor([2.0**-40, -(2.0**-40)])])
    b = torch.cat([b, torch.tensor([2.0**-40, 2.0**-40])])
    c = torch.cat([c, torch.tensor([1.0, 1.0])])
    got = fused_multiply_add(a, b, c)
    for x, y, z, value in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist(), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        below, above = (
            np.nextafter(np.float32(value), np.float32(-np.inf)),
            np.nextafter(np.float32(value), np.float32(np.inf)),
        )
        error = abs(Fraction(value) - exact)
        assert error <= abs(Fraction(float(below)) - exact)
        assert error <= abs(Fraction(float(above)) - exact)


def test_fused_multiply_add_breaks_a_midpoint_by_the_part_float64_loses():
    """(1 + 2^-12) * (1 + 2^-12) = 1 + 2^-11 + 2^-24 is a float32 midpoint; the addend 2^-70 is lost in float64 but
    decides.
    """
    a = torch.full((2,), 1.0 + 2.0**-12)
    got = fused_multiply_add(a, a, torch.tensor([2.0**-70, -(2.0**-70)]))
    assert got.tolist() == [1.0 + 2.0**-11 + 2.0**-23, 1.0 + 2.0**-11]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_only_the_last_64_elements_turn(table, dtype, backend):
    x = torch.randn(5, 3, 512).to(dtype)
    got = rope(x, torch.arange(5) * 7, table, backend=backend)
    assert got.dtype == dtype
    assert got.shape == x.shape
    assert torch.equal(got[..., :448], x[..., :448])
    assert torch.equal(got[0], x[0])  # position 0
    assert not torch.equal(got[1:, :, 448:], x[1:, :, 448:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_result_is_the_fused_form_rounded_once(table, backend):
    x = torch.randn(64, 2, 64).to(torch.bfloat16)
    positions = torch.randint(0, 4096, (64,))
    got = rope(x, positions, table, backend=backend)
    for row in range(64):
        cos, sin = table[positions[row], :32], table[positions[row], 32:]
        even, odd = x[row, :, 0::2].float(), x[row, :, 1::2].float()
        assert torch.equal(got[row, :, 0::2], fused_multiply_add(even, cos, -(odd * sin)).to(torch.bfloat16))
        assert torch.equal(got[row, :, 1::2], fused_multiply_add(even, sin, odd * cos).to(torch.bfloat16))


def test_inverse_undoes_forward(table):
    x = torch.randn(200, 128)
    positions = torch.randint(0, 4096, (200,))
    back = rope(rope(x, positions, table), positions, table, inverse=True)
    torch.testing.assert_close(back, x, atol=2e-6, rtol=0)


def test_products_depend_on_the_distance_only(table):
    """<rope(q, m), rope(k, n)> = <rope(q, m - n), k>: why values carrying key positions can be turned back by the
    query's.
    """
    q, k = torch.randn(2, 1, 64, dtype=torch.float32)
    for m, n in ((9, 4), (3000, 2995), (4000, 1)):
        turned = rope(q, torch.tensor([m]), table) @ rope(k, torch.tensor([n]), table).T
        relative = rope(q, torch.tensor([m - n]), table) @ k.T
        assert abs(float(turned - relative)) < 2e-3


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_positions_may_cover_any_leading_dimensions(table, index_dtype):
    x = torch.randn(4, 3, 2, 96).to(torch.bfloat16)
    per_token = torch.randint(0, 4096, (4,), dtype=index_dtype)
    expected = rope(x, per_token, table)
    assert torch.equal(rope(x, per_token[:, None].expand(4, 3), table), expected)
    assert torch.equal(rope(x, per_token[:, None, None].expand(4, 3, 2), table), expected)
    assert torch.equal(rope(x.transpose(1, 2), per_token, table), expected.transpose(1, 2))


def test_zero_rows(table):
    assert rope(torch.empty(0, 2, 64, dtype=torch.bfloat16), torch.empty(0, dtype=torch.int32), table).shape == (
        0,
        2,
        64,
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_do_not_depend_on_each_other_or_on_the_memory_limit(table, backend):
    x = torch.randn(100, 16, 512).to(torch.bfloat16)
    positions = torch.randint(0, 4096, (100,))
    whole = rope(x, positions, table, backend=backend)
    assert torch.equal(rope(x, positions, table, memory_limit=1 << 20, backend=backend), whole)
    for row in (0, 37, 99):
        assert torch.equal(
            rope(x[row : row + 1], positions[row : row + 1], table, backend=backend), whole[row : row + 1]
        )


def test_compiles_without_breaks_and_passes_opcheck(table):
    x, positions = torch.randn(3, 2, 64).to(torch.bfloat16), torch.tensor([1, 2, 3])
    compiled = torch.compile(rope, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, positions, table), rope(x, positions, table))
    torch.library.opcheck(torch.ops.sparse_mla.rope_reference.default, RopeCall.check(x, positions, table).flat())


BAD = {
    "x one dimension": (lambda a: a | {"x": torch.zeros(64)}, ShapeError, "x must be"),
    "x too narrow": (lambda a: a | {"x": torch.zeros(3, 63)}, ShapeError, "at least 64"),
    "x dtype": (lambda a: a | {"x": torch.zeros(3, 64, dtype=torch.float16)}, DTypeError, "bfloat16 or float32"),
    "x needs grad": (lambda a: a | {"x": torch.zeros(3, 64, requires_grad=True)}, DTypeError, "require grad"),
    "x no tensor": (lambda a: a | {"x": [1.0]}, DTypeError, "torch.Tensor"),
    "positions count": (
        lambda a: a | {"positions": torch.zeros(4, dtype=torch.int32)},
        ShapeError,
        "leading dimensions",
    ),
    "positions float": (lambda a: a | {"positions": torch.zeros(3)}, DTypeError, "positions must be"),
    "positions scalar": (lambda a: a | {"positions": torch.tensor(1)}, ShapeError, "leading dimensions"),
    "positions past the table": (lambda a: a | {"positions": torch.tensor([0, 4096, 1])}, SlotRangeError, "got 4096"),
    "positions negative": (lambda a: a | {"positions": torch.tensor([0, -1, 1])}, SlotRangeError, "got -1"),
    "table width": (lambda a: a | {"table": torch.zeros(8, 32)}, ShapeError, "table must be"),
    "table dtype": (lambda a: a | {"table": torch.zeros(8, 64, dtype=torch.float64)}, DTypeError, "table must be"),
    "another device": (lambda a: a | {"table": torch.zeros(8, 64, device="meta")}, ArgumentError, "must be on"),
    "memory limit": (lambda a: a | {"memory_limit": 5}, ArgumentError, "memory_limit"),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_bad_input(table, name):
    change, kind, text = BAD[name]
    arguments = {"x": torch.zeros(3, 64, dtype=torch.bfloat16), "positions": torch.tensor([1, 2, 3]), "table": table}
    rope(**arguments)
    with pytest.raises(kind, match=text) as caught:
        rope(**change(arguments))
    assert str(caught.value).startswith("rope: ")


@pytest.mark.parametrize(
    "build",
    [
        lambda: rope_table(0, 10000.0),
        lambda: rope_table(8, 1.0),
        lambda: rope_table(8, math.nan),
        lambda: rope_table(8, 160000.0, YarnConfig(factor=0.5)),
        lambda: rope_table(8, 160000.0, YarnConfig(beta_fast=1.0, beta_slow=1.0)),
        lambda: rope_table(8, 160000.0, YarnConfig(original_max_position=0)),
    ],
)
def test_bad_table_description(build):
    with pytest.raises(ArgumentError):
        build()
