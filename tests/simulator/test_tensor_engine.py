# SPDX-License-Identifier: Apache-2.0
"""Matrix multiply and transposes: products, accumulation, tiling, and the bits transposes must keep."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparse_mla.errors import KernelError
from sparse_mla.simulator import isa as nisa
from sparse_mla.simulator import language as nl

from .kit import BF16, E4M3, E4M3FN, E5M2, checks_of, get, launch, put, random
from .reference import ALL, bits, run, same, samples

NARROW = ["bfloat16", "float16", "float8_e4m3", "float8_e5m2"]
DOUBLE = nisa.matmul_perf_mode.double_row


def operand(shape: tuple[int, ...], name: str, seed: int) -> Any:
    """Small multiples of 1/8: exact in every format, and so are their sums."""
    values = np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float32) / 8
    return values.astype({"float32": np.float32, "float16": np.float16, "bfloat16": BF16, "float8_e4m3": E4M3,
                          "float8_e5m2": E5M2}[name])  # fmt: skip


def matmul_kernel(s: Any, x: Any, n: int, **options: Any) -> Any:
    ps = nl.ndarray((s.shape[1], n), nl.float32, nl.psum)
    nisa.nc_matmul(ps, put(s), put(x), **options)
    return get(ps)


@pytest.mark.parametrize("right", NARROW)
@pytest.mark.parametrize("left", NARROW)
def test_products_of_narrow_formats_are_exact(left: str, right: str) -> None:
    s, x = operand((128, 48), left, 1), operand((128, 72), right, 2)
    out = launch(matmul_kernel, s, x, 72).value
    same(out, (s.astype(np.float64).T @ x.astype(np.float64)).astype(np.float32))


@pytest.mark.parametrize(("k", "m", "n"), [(1, 1, 1), (128, 128, 512), (128, 1, 512), (1, 128, 3), (37, 65, 129)])
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_shapes_up_to_the_limits(name: str, k: int, m: int, n: int) -> None:
    s, x = (
        random((k, m), np.float32 if name == "float32" else BF16, 1),
        random((k, n), np.float32 if name == "float32" else BF16, 2),
    )
    out = launch(matmul_kernel, s, x, n).value
    assert out.shape == (m, n)
    assert np.allclose(out, s.astype(np.float64).T @ x.astype(np.float64), rtol=1e-5, atol=1e-4)


def test_tf32_operands_lose_mantissa_bits() -> None:
    def kernel(s: Any, x: Any) -> Any:
        ps = nl.ndarray((1, 1), nl.float32, nl.psum)
        nisa.nc_matmul(ps, put(s).view(nl.tfloat32), put(x))
        return get(ps)

    one = np.ones((1, 1), np.float32)
    assert launch(kernel, one + np.float32(2.0**-12), one).value.item() == 1.0
    assert launch(kernel, one + np.float32(2.0**-10), one).value.item() == 1 + 2.0**-10


def test_moving_may_have_several_free_dims_and_strides() -> None:
    s, x = operand((64, 32), "bfloat16", 1), operand((64, 4, 6, 10), "bfloat16", 2)

    def kernel(s: Any, x: Any) -> Any:
        tile = put(x)
        ps = nl.ndarray((32, 2, 6, 5), nl.float32, nl.psum)
        nisa.nc_matmul(ps, put(s), tile[:, 0:4:2, :, 0:10:2])
        return get(ps)

    wanted = np.einsum("km,kabc->mabc", s.astype(np.float32), x[:, ::2, :, ::2].astype(np.float32))
    assert (launch(kernel, s, x).value == wanted).all()


# -- accumulation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("explicit", [False, True])
def test_a_group_of_matmuls_adds_up(explicit: bool) -> None:
    s, x = operand((384, 16), "bfloat16", 1), operand((384, 24), "bfloat16", 2)

    def kernel(s: Any, x: Any) -> Any:
        ps = nl.ndarray((16, 24), nl.float32, nl.psum)
        for i in range(3):
            rows = slice(128 * i, 128 * i + 128)
            nisa.nc_matmul(ps, put(s[rows]), put(x[rows]), accumulate=(i > 0) if explicit else None)
        return get(ps)

    assert (launch(kernel, s, x).value == s.astype(np.float32).T @ x.astype(np.float32)).all()


def test_false_restarts_a_group_and_a_new_tile_starts_fresh() -> None:
    s, x = operand((32, 8), "bfloat16", 1), operand((32, 8), "bfloat16", 2)
    product = s.astype(np.float32).T @ x.astype(np.float32)

    def kernel(s: Any, x: Any) -> Any:
        a, b = put(s), put(x)
        outs = []
        for _ in range(2):
            ps = nl.ndarray((8, 8), nl.float32, nl.psum)
            nisa.nc_matmul(ps, a, b)
            nisa.nc_matmul(ps, a, b)
            outs.append(get(ps))
        ps = nl.ndarray((8, 8), nl.float32, nl.psum)
        for flag in (False, True, False):
            nisa.nc_matmul(ps, a, b, accumulate=flag)
        return outs[0], outs[1], get(ps)

    first, second, third = launch(kernel, s, x).outputs
    assert (first == 2 * product).all()
    assert (second == 2 * product).all()
    assert (third == product).all()


def test_regions_of_one_tile_accumulate_apart_and_across() -> None:
    s, x = operand((32, 8), "bfloat16", 1), operand((32, 16), "bfloat16", 2)
    product = s.astype(np.float32).T @ x.astype(np.float32)

    def kernel(s: Any, x: Any) -> Any:
        a, b = put(s), put(x)
        ps = nl.ndarray((8, 16), nl.float32, nl.psum)
        nisa.nc_matmul(ps[:, 0:8], a, b[:, 0:8])
        nisa.nc_matmul(ps, a, b)  # adds on the left half, starts the right half
        nisa.nc_matmul(ps[:, 4:12], a, b[:, 4:12])
        return get(ps)

    counts = np.array([2] * 4 + [3] * 4 + [2] * 4 + [1] * 4, np.float32)
    assert (launch(kernel, s, x).value == product * counts).all()


@pytest.mark.parametrize("half", [False, True])
def test_fills_by_other_engines_cannot_be_added_to(half: bool) -> None:
    def kernel(s: Any, x: Any, value: float, flag: Any) -> Any:
        a, b = put(s), put(x)
        ps = nl.ndarray((8, 16), nl.float32, nl.psum)
        if half:  # part of the region by a matmul, part by memset
            nisa.nc_matmul(ps[:, 0:8], a, b[:, 0:8])
            nisa.memset(ps[:, 8:16], value)
        else:
            nisa.memset(ps, value)
        nisa.nc_matmul(ps, a, b, accumulate=flag)
        return get(ps)

    s, x = operand((32, 8), "bfloat16", 1), operand((32, 16), "bfloat16", 2)
    product = s.astype(np.float32).T @ x.astype(np.float32)
    zeroed = launch(kernel, s, x, 0.0, None)
    assert 14 in checks_of(zeroed)
    assert (zeroed.value == product * np.array([2 if half else 1] * 8 + [1] * 8)).all()
    with pytest.raises(KernelError, match="another engine") as caught:
        launch(kernel, s, x, 2.0, None)
    assert caught.value.check == 14  # type: ignore[attr-defined]
    assert 14 in checks_of(launch(kernel, s, x, 2.0, None, gen=4))
    if not half:
        with pytest.raises(KernelError, match="another engine"):
            launch(kernel, s, x, 2.0, True)
        assert (launch(kernel, s, x, 2.0, False).value == product).all()


@pytest.mark.parametrize(("flags", "words"), [
    ((None, True), "without the flag"), ((False, None), "explicit flags"), ((True,), "no matmul with accumulate=False"),
])  # fmt: skip
def test_flags_of_a_group_agree(flags: Any, words: str) -> None:
    def kernel() -> None:
        a = nl.zeros((32, 8), nl.bfloat16)
        ps = nl.ndarray((8, 8), nl.float32, nl.psum)
        for flag in flags:
            nisa.nc_matmul(ps, a, a, accumulate=flag)

    with pytest.raises(KernelError, match=words) as caught:
        launch(kernel)
    assert caught.value.check == 13  # type: ignore[attr-defined]


def test_trn3_writes_bfloat16_results_and_wider_moving_tiles() -> None:
    s, x = operand((64, 8), "bfloat16", 1), operand((64, 1024), "bfloat16", 2)

    def kernel(s: Any, x: Any) -> Any:
        a, b = put(s), put(x)
        ps = nl.ndarray((8, 1024), nl.bfloat16, nl.psum)
        nisa.nc_matmul(ps, a, b)
        nisa.nc_matmul(ps, a, b)
        return get(ps)

    once = (s.astype(np.float32).T @ x.astype(np.float32)).astype(BF16).astype(np.float32)
    product = s.astype(np.float32).T @ x.astype(np.float32)
    assert (bits(launch(kernel, s, x, gen=4).value) == bits((once + product).astype(BF16))).all()
    with pytest.raises(KernelError, match="must be float32"):
        launch(kernel, s, x)


# -- modes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("left", "right"), [("float8_e4m3", "float8_e4m3"), ("float8_e4m3", "float8_e5m2")])
def test_double_row_contracts_256(left: str, right: str) -> None:
    s, x = operand((128, 2, 64), left, 1), operand((128, 2, 40), right, 2)

    def kernel(s: Any, x: Any) -> Any:
        ps = nl.ndarray((64, 40), nl.float32, nl.psum)
        nisa.nc_matmul(ps, put(s), put(x), perf_mode=DOUBLE)
        return get(ps)

    wanted = np.einsum("kjm,kjn->mn", s.astype(np.float32), x.astype(np.float32))
    assert (launch(kernel, s, x).value == wanted).all()
    with pytest.raises(KernelError, match="needs trn2"):
        launch(kernel, s, x, gen=2)


@pytest.mark.parametrize(("change", "words", "check"), [
    ({"is_transpose": True}, "cannot transpose", 11),
    ({"tile_size": (128, 64), "tile_position": (0, 0)}, "column tiling", 11),
    ({"perf_mode": "twice"}, "must be one of", 11),
])  # fmt: skip
def test_double_row_exclusions(change: dict[str, Any], words: str, check: int) -> None:
    def kernel() -> None:
        a = nl.zeros((128, 2, 64), nl.float8_e4m3)
        dtype = nl.float8_e4m3 if "is_transpose" in change else nl.float32
        nisa.nc_matmul(nl.ndarray((64, 64), dtype, nl.psum), a, a, **{"perf_mode": DOUBLE, **change})

    with pytest.raises(KernelError, match=words) as caught:
        launch(kernel)
    assert caught.value.check == check  # type: ignore[attr-defined]


def test_column_tiles_put_four_results_side_by_side() -> None:
    s, x = operand((128, 32), "bfloat16", 1), operand((128, 64), "bfloat16", 2)

    def kernel(s: Any, x: Any) -> Any:
        a, b = put(s), put(x)
        ps = nl.ndarray((128, 64), nl.float32, nl.psum)
        for i in range(4):
            nisa.nc_matmul(ps[32 * i : 32 * i + 32], a, b, tile_position=(0, 32 * i), tile_size=(128, 32))
        return get(ps)

    product = s.astype(np.float32).T @ x.astype(np.float32)
    assert (launch(kernel, s, x).value == np.tile(product, (4, 1))).all()


def test_row_tiles_contract_parts_of_the_partitions() -> None:
    s, x = operand((128, 16), "bfloat16", 1), operand((128, 24), "bfloat16", 2)

    def kernel(s: Any, x: Any) -> Any:
        a, b = put(s), put(x)
        outs = []
        for i in range(2):
            ps = nl.ndarray((16, 24), nl.float32, nl.psum)
            rows = slice(64 * i, 64 * i + 64)
            nisa.nc_matmul(ps, a[rows], b[rows], tile_position=(64 * i, 0), tile_size=(64, 128))
            outs.append(get(ps))
        return outs[0], outs[1]

    for i, out in enumerate(launch(kernel, s, x).outputs):
        rows = slice(64 * i, 64 * i + 64)
        assert (out == s[rows].astype(np.float32).T @ x[rows].astype(np.float32)).all()


@pytest.mark.parametrize(("position", "size", "words"), [
    ((0, 16), (128, 32), "multiples"), ((64, 0), (64, 128), "starts at partition 0, the tile at row 64"),
    ((0, 0), (32, 128), "exceeds tile_size"), ((128, 0), (64, 128), "inside the array"),
])  # fmt: skip
def test_tile_positions_are_checked(position: Any, size: Any, words: str) -> None:
    def kernel() -> None:
        a = nl.zeros((64, 16), nl.bfloat16)
        nisa.nc_matmul(nl.ndarray((16, 16), nl.float32, nl.psum), a, a, tile_position=position, tile_size=size)

    with pytest.raises(KernelError, match=words) as caught:
        launch(kernel)
    assert caught.value.check == 12  # type: ignore[attr-defined]


def test_a_claim_of_ones_and_zeros_must_hold() -> None:
    def kernel(s: Any, x: Any, which: str) -> Any:
        ps = nl.ndarray((8, 8), nl.float32, nl.psum)
        nisa.nc_matmul(ps, put(s), put(x), **{f"is_{which}_onezero": True})
        return get(ps)

    mask, x = np.eye(8, dtype=np.float32), random((8, 8))
    assert (launch(kernel, mask, x, "stationary").value == x).all()
    with pytest.raises(KernelError, match="ones and zeros only"):
        launch(kernel, mask, x, "moving")


@pytest.mark.parametrize(("left", "right", "gen", "words"), [
    ("int8", "int8", 3, "float type"), ("uint8", "bfloat16", 3, "float type"),
    ("float32", "float16", 3, "32-bit partner"), ("float8_e4m3fn", "float8_e4m3", 4, "cannot be mixed"),
])  # fmt: skip
def test_dtype_pairs(left: str, right: str, gen: int, words: str) -> None:
    def kernel() -> None:
        a, b = nl.zeros((8, 8), getattr(nl, left)), nl.zeros((8, 8), getattr(nl, right))
        nisa.nc_matmul(nl.ndarray((8, 8), nl.float32, nl.psum), a, b)

    with pytest.raises(KernelError, match=words) as caught:
        launch(kernel, gen=gen)
    assert caught.value.check == 9  # type: ignore[attr-defined]


def test_ocp_fp8_multiplies_on_trn3() -> None:
    values = np.full((4, 4), 448.0, np.float32).astype(E4M3FN)
    out = launch(matmul_kernel, values, values, 4, gen=4).value
    assert (out == 4 * 448.0 * 448.0).all()


def test_run_time_indices_move_operands_and_destination() -> None:
    s, x = operand((32, 2, 8), "bfloat16", 1), operand((32, 8), "bfloat16", 2)

    def kernel(s: Any, x: Any) -> Any:
        a, b = put(s), put(x)
        ps = nl.ndarray((8, 2, 8), nl.float32, nl.psum)
        for i in nl.dynamic_range(2):
            nisa.nc_matmul(ps[:, i], a[:, i], b)
        return get(ps)

    wanted = np.einsum("kjm,kn->mjn", s.astype(np.float32), x.astype(np.float32))
    assert (launch(kernel, s, x).value == wanted).all()


# -- transposes ---------------------------------------------------------------------------------------------------


def patterned(name: str, shape: tuple[int, ...]) -> Any:
    """Every kind of bits, NaN payloads included."""
    size = ALL[name].itemsize
    raw = np.random.default_rng(7).integers(0, 256, (*shape[:-1], shape[-1] * size)).astype(np.uint8)
    return raw.view(ALL[name])


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (32, 7), (5, 128), (128, 1)])
@pytest.mark.parametrize("name", ALL)
def test_pe_transpose_moves_bits(name: str, shape: tuple[int, int]) -> None:
    x = patterned(name, shape)
    out = run(
        lambda d, s: nisa.nc_transpose(d, s, engine=nisa.engine.tensor),
        [x],
        [(shape[::-1], name)],
        out_buffers=[nl.psum],
    ).outputs[0]
    assert (bits(out) == bits(x).T).all()


@pytest.mark.parametrize("buffer", [nl.sbuf, nl.psum])
@pytest.mark.parametrize("name", ALL)
def test_vector_transpose_moves_bits(name: str, buffer: Any) -> None:
    x = patterned(name, (32, 20))
    out = run(
        lambda d, s: nisa.nc_transpose(d, s, engine=nisa.engine.vector), [x], [((20, 32), name)], buffers=[buffer]
    ).outputs[0]
    assert (bits(out) == bits(x).T).all()


def test_transpose_flattens_free_dims() -> None:
    x = random((16, 3, 5))
    out = run(lambda d, s: nisa.nc_transpose(d, s), [x], [((15, 16), "float32")], out_buffers=[nl.psum]).outputs[0]
    same(out, x.reshape(16, 15).T.copy())


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_matmul_transpose_mode_moves_bits_where_a_product_would_not(name: str) -> None:
    x = samples(ALL[name], (16, 24))
    x[0, 0] = np.nan
    identity = np.eye(16, dtype=ALL[name])

    def kernel(x: Any, identity: Any, mode: bool) -> Any:
        ps = nl.ndarray((24, 16), x.dtype if mode else nl.float32, nl.psum)
        nisa.nc_matmul(ps, put(x), put(identity), is_transpose=mode)
        return get(ps)

    assert (bits(launch(kernel, x, identity, True).value) == bits(x).T).all()
    assert np.isnan(launch(kernel, x, identity, False).value).sum() > 1  # NaN and inf times 0
    with pytest.raises(KernelError, match="must be an identity"):
        launch(kernel, x, np.ones_like(identity), True)


def test_transposing_and_multiplying_into_one_bank_do_not_add_up() -> None:
    x = np.eye(8, dtype=np.float32) * 3

    def kernel(x: Any) -> Any:
        a = put(x)
        ps = nl.ndarray((8, 8), nl.float32, nl.psum)
        nisa.nc_transpose(ps, a)
        nisa.nc_matmul(ps, a, a)
        return get(ps)

    assert (launch(kernel, x).value == x.T @ x).all()
