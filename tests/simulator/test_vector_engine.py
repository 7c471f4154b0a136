# SPDX-License-Identifier: Apache-2.0
"""Vector engine instructions against NumPy statements of their documented meaning, in every type and at the limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sparse_mla.errors import KernelError
from sparse_mla.simulator import isa as nisa
from sparse_mla.simulator import language as nl

from .kit import BF16, checks_of, get, launch, put, random
from .reference import ALL, FINITE_MAX, FLOATS, INTEGERS, bits, cast, compute, nearest, one, run, same, samples, widen

Command = nisa.reduce_cmd
FP32_MIN = np.finfo(np.float32).min
QUICK = settings(max_examples=25, deadline=None)


# -- casting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ALL)
@pytest.mark.parametrize("source", ALL)
def test_tensor_copy_casts_through_float32(source: str, target: str) -> None:
    x = samples(ALL[source], (8, 32))
    expected = x if source == target else cast(widen(x), ALL[target])
    same(one(lambda d, s: nisa.tensor_copy(dst=d, src=s), [x], x.shape, target), expected)


@pytest.mark.parametrize("engine", ["vector", "scalar", "gpsimd"])
@pytest.mark.parametrize("name", ALL)
def test_tensor_copy_of_one_type_moves_bits(name: str, engine: str) -> None:
    dtype = ALL[name]
    codes = np.random.default_rng(3).integers(0, 256, (4, 64 * dtype.itemsize)).astype(np.uint8)  # NaN payloads too
    x = codes.view(dtype)
    out = one(lambda d, s: nisa.tensor_copy(dst=d, src=s, engine=nisa.engine[engine]), [x], x.shape, name)
    assert (bits(out) == bits(x)).all()


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3", "float8_e5m2"])
@QUICK
@given(data=st.data())
def test_float_results_round_to_nearest_even(name: str, data: Any) -> None:
    limit = FINITE_MAX.get(name, 2.0**127)
    x = data.draw(hnp.arrays(np.float32, (2, 16), elements=st.floats(-limit, limit, width=32)))
    out = one(lambda d, s: nisa.tensor_copy(dst=d, src=s), [x], x.shape, name)
    assert (bits(out) == nearest(x, FLOATS[name])).all()


@pytest.mark.parametrize("name", ["float8_e4m3", "float8_e5m2", "bfloat16", "float16"])
def test_ties_between_neighbours_go_to_the_even_code(name: str) -> None:
    dtype = FLOATS[name]
    codes = np.arange(0, 1 << (8 * dtype.itemsize - 1), max(1, 1 << 8 * dtype.itemsize >> 10))
    values = codes.astype(f"u{dtype.itemsize}").view(dtype).astype(np.float32)
    following = (codes + 1).astype(f"u{dtype.itemsize}").view(dtype).astype(np.float32)
    both = np.isfinite(values) & np.isfinite(following)
    middle = ((values[both].astype(np.float64) + following[both]) / 2).astype(np.float32).reshape(1, -1)
    out = one(lambda d, s: nisa.tensor_copy(dst=d, src=s), [middle], middle.shape, name)
    assert (bits(out)[0] % 2 == 0).all()


@pytest.mark.parametrize("name", INTEGERS)
def test_integer_results_round_to_even_and_saturate(name: str) -> None:
    x = np.array([[0.5, 1.5, 2.5, -0.5, -1.5, 3.4999998, 1e20, -1e20, np.inf, -np.inf, 254.5, 255.5]], np.float32)
    out = one(lambda d, s: nisa.tensor_copy(dst=d, src=s), [x], x.shape, name)
    info = np.iinfo(name)
    wanted = [0, 2, 2, 0, -2, 3, info.max, info.min, info.max, info.min, 254, 256]
    assert out.tolist() == [[min(max(w, info.min), info.max) for w in wanted]]


@pytest.mark.parametrize(("name", "largest"), [("float8_e4m3", 240.0), ("float8_e5m2", 57344.0)])
def test_fp8_overflow_is_inf_and_warned(name: str, largest: float) -> None:
    def body(d: Any, s: Any) -> None:
        nisa.tensor_scalar(dst=d, data=s, op0=nl.multiply, operand0=1.0)

    fits = run(body, [np.full((4, 4), largest, np.float32)], [((4, 4), name)])
    assert 29 not in checks_of(fits)
    assert (widen(fits.outputs[0]) == largest).all()
    over = run(body, [np.full((4, 4), 1.1 * largest, np.float32)], [((4, 4), name)])
    assert 29 in checks_of(over)
    assert np.isposinf(widen(over.outputs[0])).all()


def test_every_e4m3_code_reads_as_the_ieee_like_format_of_trn2() -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)

    def kernel(x: Any) -> Any:
        raw = put(x)
        wide = nl.ndarray((2, 128), nl.float32)
        nisa.tensor_copy(dst=wide, src=raw.view(nl.float8_e4m3))
        return get(wide)

    out = launch(kernel, codes).value.reshape(-1)
    for code in range(256):
        exponent, mantissa, sign = code >> 3 & 15, code & 7, -1.0 if code & 128 else 1.0
        if exponent == 15:
            assert np.isnan(out[code]) if mantissa else out[code] == sign * np.inf
        else:
            value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
            assert out[code] == sign * value


def test_ocp_e4m3_needs_trn3_where_codes_of_exponent_15_are_numbers() -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)

    def kernel(x: Any) -> Any:
        wide = nl.ndarray((2, 128), nl.float32)
        nisa.tensor_copy(dst=wide, src=put(x).view(nl.float8_e4m3fn))
        return get(wide)

    with pytest.raises(KernelError, match="float8_e4m3fn needs trn3") as caught:
        launch(kernel, codes)
    assert caught.value.check == 48  # type: ignore[attr-defined]
    out = launch(kernel, codes, gen=4).value.reshape(-1)
    assert out[0x7E] == 448.0
    assert out[0x78] == 256.0
    assert np.isnan(out[[0x7F, 0xFF]]).all()
    assert np.isnan(out).sum() == 2


def test_tfloat32_keeps_ten_mantissa_bits() -> None:
    x = np.array([[1 + 2.0**-10, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-12, np.inf, -3.0]], np.float32)
    out = one(lambda d, s: nisa.tensor_copy(dst=d, src=s.view(nl.tfloat32)), [x], x.shape, "float32")
    assert out.tolist() == [[1 + 2.0**-10, 1.0, 1 + 2.0**-9, 1.0, np.inf, -3.0]]


# -- fills --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["vector", "gpsimd"])
@pytest.mark.parametrize("name", ALL)
def test_memset(name: str, engine: str) -> None:
    dtype = ALL[name]
    value = 3.3 if name in FLOATS else int(np.iinfo(dtype).max)
    out = one(lambda d: nisa.memset(dst=d, value=value, engine=nisa.engine[engine]), [], (8, 5), name)
    same(out, np.full((8, 5), value, np.float32 if name in FLOATS else dtype).astype(dtype))


def test_memset_limits() -> None:
    assert np.isneginf(
        one(lambda d: nisa.memset(dst=d, value=-np.inf), [], (2, 2), "bfloat16").astype(np.float32)
    ).all()
    assert 29 in checks_of(run(lambda d: nisa.memset(dst=d, value=1e6), [], [((2, 2), "float16")]))
    for value in (256, -1):
        with pytest.raises(KernelError, match="does not fit uint8"):
            one(lambda d, v=value: nisa.memset(dst=d, value=v), [], (2, 2), "uint8")
    with pytest.raises(KernelError, match="must be a number"):
        one(lambda d: nisa.memset(dst=d, value="1"), [], (2, 2), "uint8")


@pytest.mark.parametrize("predicate", ["uint8", "uint16", "uint32"])
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("reverse", [False, True])
def test_tensor_copy_predicated(name: str, predicate: str, reverse: bool) -> None:
    x, before = samples(ALL[name], (8, 24), 1), samples(ALL[name], (8, 24), 2)
    mask = np.random.default_rng(4).integers(0, 3, (8, 24)).astype(predicate)

    def body(d: Any, s: Any, b: Any, p: Any) -> None:
        nisa.tensor_copy(dst=d, src=b)
        nisa.tensor_copy_predicated(dst=d, src=s, predicate=p, reverse_pred=reverse)

    out = one(body, [x, before, mask], x.shape, name)
    assert (bits(out) == bits(np.where((mask != 0) != reverse, x, before))).all()


def test_tensor_copy_predicated_with_a_number_and_uninitialised_rest() -> None:
    mask = np.array([[1, 0, 1, 0]], np.uint8)

    def body(d: Any, p: Any) -> None:
        nisa.tensor_copy_predicated(dst=d, src=2.5, predicate=p)

    with pytest.raises(KernelError, match="never written"):
        one(body, [mask], (1, 4), "int32")

    def filled(d: Any, p: Any) -> None:
        nisa.memset(dst=d, value=9)
        body(d, p)

    assert one(filled, [mask], (1, 4), "int32").tolist() == [[2, 9, 2, 9]]  # cast as an engine casts: to even


@pytest.mark.parametrize("source", ALL)
@pytest.mark.parametrize("target", ["float32", "bfloat16"])
def test_reciprocal(source: str, target: str) -> None:
    x = samples(ALL[source], (4, 32))
    with np.errstate(divide="ignore"):
        expected = cast(np.float32(1) / widen(x), ALL[target])
    same(one(lambda d, s: nisa.reciprocal(dst=d, data=s), [x], x.shape, target), expected)


# -- element-wise -------------------------------------------------------------------------------------------------

ARITHMETIC = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "maximum": np.maximum, "minimum": np.minimum,
    "abs_max": lambda a, b: np.maximum(abs(a), abs(b)), "abs_min": lambda a, b: np.minimum(abs(a), abs(b)),
    "equal": np.equal, "not_equal": np.not_equal, "less": np.less, "less_equal": np.less_equal,
    "greater": np.greater, "greater_equal": np.greater_equal,
    "logical_and": lambda a, b: (a != 0) & (b != 0), "logical_or": lambda a, b: (a != 0) | (b != 0),
    "logical_xor": lambda a, b: (a != 0) ^ (b != 0),
}  # fmt: skip


@pytest.mark.parametrize("op", ARITHMETIC)
@pytest.mark.parametrize(
    ("left", "right", "target"),
    [("float32", "float32", "float32"), ("bfloat16", "float32", "bfloat16"), ("float16", "bfloat16", "float8_e5m2"),
     ("float8_e4m3", "float8_e5m2", "float16"), ("uint8", "int16", "int16"), ("int8", "float32", "uint8"),
     ("bfloat16", "bfloat16", "int32")],
)  # fmt: skip
def test_tensor_tensor_computes_in_float32(op: str, left: str, right: str, target: str) -> None:
    a, b = samples(ALL[left], (8, 40), 1), samples(ALL[right], (8, 40), 2)[:, ::-1]
    b[0, :4] = a[0, :4].astype(b.dtype)  # some equal pairs
    with np.errstate(all="ignore"):
        wide = ARITHMETIC[op](widen(a), widen(b)).astype(np.float32)
    out = one(lambda d, x, y: nisa.tensor_tensor(dst=d, data1=x, data2=y, op=getattr(nl, op)), [a, b], a.shape, target)
    same(out, cast(wide, ALL[target]))


@pytest.mark.parametrize("where", ["data1", "data2", "dst"])
def test_tensor_tensor_reaches_psum(where: str) -> None:
    a, b = random((8, 16), seed=1), random((8, 16), seed=2)
    out = one(
        lambda d, x, y: nisa.tensor_tensor(dst=d, data1=x, data2=y, op=nl.subtract), [a, b], a.shape, "float32",
        buffers=[nl.psum if where == n else nl.sbuf for n in ("data1", "data2")],
        out_buffers=[nl.psum if where == "dst" else nl.sbuf],
    )  # fmt: skip
    same(out, a - b)


INTS32 = st.integers(-(1 << 31), (1 << 31) - 1)


@pytest.mark.parametrize("op", ["add", "subtract", "multiply", "maximum", "minimum"])
@pytest.mark.parametrize("name", ["int32", "uint32"])
@QUICK
@given(data=st.data())
def test_integer_tensor_tensor_is_exact_on_gpsimd(op: str, name: str, data: Any) -> None:
    whole = hnp.arrays(np.int32, (2, 8), elements=INTS32)
    a, b = data.draw(whole).view(name), data.draw(whole).view(name)
    result = run(
        lambda d, x, y: nisa.tensor_tensor(dst=d, data1=x, data2=y, op=getattr(nl, op)), [a, b], [(a.shape, name)]
    )
    with np.errstate(over="ignore"):
        same(result.outputs[0], getattr(np, op)(a, b))
    assert 27 not in checks_of(result)
    assert [r.engine for r in result.records if r.opcode == "tensor_tensor"] == ["gpsimd"]


def test_integer_comparison_is_exact_on_gpsimd_and_not_on_vector() -> None:
    a = np.array([[1 << 24, (1 << 24) + 1]], np.int32)
    b = np.array([[(1 << 24) + 1, (1 << 24) + 1]], np.int32)

    def body(engine: Any) -> Any:
        return lambda d, x, y: nisa.tensor_tensor(dst=d, data1=x, data2=y, op=nl.equal, engine=engine)

    assert one(body(nisa.engine.unknown), [a, b], (1, 2), "int32").tolist() == [[0, 1]]
    forced = run(body(nisa.engine.vector), [a, b], [((1, 2), "int32")])
    assert forced.outputs[0].tolist() == [[1, 1]]
    assert 27 in checks_of(forced)


def test_power_runs_on_gpsimd_in_float32() -> None:
    a, b = np.array([[2.0, 3.0, 4.0]], np.float32), np.array([[-1.0, 2.0, 0.5]], np.float32)
    result = run(
        lambda d, x, y: nisa.tensor_tensor(dst=d, data1=x, data2=y, op=nl.power), [a, b], [((1, 3), "float32")]
    )
    assert result.outputs[0].tolist() == [[0.5, 9.0, 2.0]]
    assert result.records[2].engine == "gpsimd"
    i, j = np.array([[2, 4]], np.int32), np.array([[-1, 2]], np.int32)
    out = one(lambda d, x, y: nisa.tensor_tensor(dst=d, data1=x, data2=y, op=nl.power), [i, j], (1, 2), "int32")
    assert out.tolist() == [[0, 16]]


BITWISE = {"bitwise_and": np.bitwise_and, "bitwise_or": np.bitwise_or, "bitwise_xor": np.bitwise_xor}


def shifted(x: Any, distance: Any, left: bool) -> Any:
    """Logical shift in the width of x, by Python integers."""
    width = 8 * x.dtype.itemsize
    mask = (1 << width) - 1
    raw = bits(x).reshape(-1).tolist()
    moved = [(v << d) & mask if left else v >> d for v, d in zip(raw, np.ravel(distance).tolist(), strict=True)]
    return np.array(moved, f"u{x.dtype.itemsize}").view(x.dtype).reshape(x.shape)


@pytest.mark.parametrize("op", [*BITWISE, "left_shift", "right_shift"])
@pytest.mark.parametrize("name", INTEGERS)
def test_bit_operators_see_raw_bits(name: str, op: str) -> None:
    dtype = INTEGERS[name]
    a = np.random.default_rng(1).integers(0, 256, (4, 16 * dtype.itemsize)).astype(np.uint8).view(dtype)
    if op in BITWISE:
        b = np.random.default_rng(2).integers(0, 256, (4, 16 * dtype.itemsize)).astype(np.uint8).view(dtype)
        expected = BITWISE[op](a, b)
    else:
        b = (np.arange(a.size) % (8 * dtype.itemsize + 3)).astype(dtype).reshape(a.shape)  # beyond the width too
        expected = shifted(a, b, op == "left_shift")
    out = one(lambda d, x, y: nisa.tensor_tensor(dst=d, data1=x, data2=y, op=getattr(nl, op)), [a, b], a.shape, name)
    same(out, expected)
    for immediate in (0, 1, 3, 8 * dtype.itemsize - 1):
        wanted = (
            BITWISE[op](a, np.array(immediate, dtype))
            if op in BITWISE
            else shifted(a, np.full(a.shape, immediate), op == "left_shift")
        )
        same(one(lambda d, x, i=immediate: nisa.tensor_scalar(d, x, getattr(nl, op), i), [a], a.shape, name), wanted)


@pytest.mark.parametrize("name", INTEGERS)
def test_invert_and_pairs_of_bit_operators(name: str) -> None:
    dtype = INTEGERS[name]
    a = np.random.default_rng(1).integers(0, 256, (4, 16 * dtype.itemsize)).astype(np.uint8).view(dtype)
    same(one(lambda d, x: nisa.tensor_scalar(d, x, nl.invert, None), [a], a.shape, name), ~a)
    out = one(
        lambda d, x: nisa.tensor_scalar(d, x, nl.right_shift, 4, op1=nl.bitwise_and, operand1=0x0F), [a], a.shape, name
    )
    same(out, (bits(a) >> 4 & 0x0F).astype(bits(a).dtype).view(dtype))


def test_full_width_masks_are_exact() -> None:
    x = np.array([[-1, 0x12345678]], np.int32)
    for mask in (0xF0F0F0F1, -0x0F0F0F0F):
        out = one(lambda d, s, v=mask: nisa.tensor_scalar(d, s, nl.bitwise_and, v), [x], (1, 2), "int32")
        assert bits(out).tolist() == [[mask & 0xFFFFFFFF, 0x12345678 & mask & 0xFFFFFFFF]]
    with pytest.raises(KernelError, match="does not fit the 8 bits"):
        one(lambda d, s: nisa.tensor_scalar(d, s, nl.bitwise_and, 0x1FF), [x.view(np.uint8)], (1, 8), "uint8")
    for operand in (1.5, None, "3"):
        with pytest.raises(KernelError, match="must be an integer"):
            one(lambda d, s, v=operand: nisa.tensor_scalar(d, s, nl.bitwise_and, v), [x], (1, 2), "int32")


def test_unary_operators_do_not_pass_where_two_operands_are_needed() -> None:
    x = random((4, 4))
    for op in (nl.rsqrt, nl.abs, nl.logical_not):
        with pytest.raises(KernelError, match="takes one operand"):
            one(lambda d, a, o=op: nisa.tensor_tensor(d, a, a, o), [x], x.shape, "float32")
        with pytest.raises(KernelError, match="takes one operand"):
            one(lambda d, a, o=op: nisa.scalar_tensor_tensor(d, a, nl.add, 1.0, o, a), [x], x.shape, "float32")


PAIRS = [("multiply", "add"), ("subtract", "multiply"), ("add", "maximum"), ("minimum", "subtract"), ("add", None)]


@pytest.mark.parametrize("reverse", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("kind", ["constant", "tile"])
@pytest.mark.parametrize("ops", PAIRS)
def test_tensor_scalar(ops: tuple[str, str | None], kind: str, reverse: tuple[bool, bool]) -> None:
    x = samples(BF16, (16, 24))
    a, b = random((16, 1), seed=1), random((16, 1), seed=2)  # a different factor in each row
    if kind == "constant":
        a, b = a[:1], b[:1]
    values = widen(x)
    with np.errstate(all="ignore"):
        for op, operand, swap in zip(ops, (a, b), reverse, strict=True):
            if op is not None:
                values = ARITHMETIC[op](*((operand, values) if swap else (values, operand)))

    def body(d: Any, s: Any, p: Any, q: Any) -> None:
        first, second = (p, q) if kind == "tile" else (float(a[0, 0]), float(b[0, 0]))
        nisa.tensor_scalar(
            d, s, getattr(nl, ops[0]), first, reverse0=reverse[0], op1=getattr(nl, ops[1]) if ops[1] else None,
            operand1=second if ops[1] else None, reverse1=reverse[1],
        )  # fmt: skip

    for target in ("float32", "bfloat16", "int8"):  # rounded once, at the end
        same(one(body, [x, a, b], x.shape, target), cast(values, ALL[target]))


@pytest.mark.parametrize("op", ["abs", "square", "relu", "rsqrt", "reciprocal", "logical_not"])
def test_tensor_scalar_with_one_operand(op: str) -> None:
    x = samples(np.dtype(np.float32), (4, 20))
    meaning = {
        "abs": np.abs, "square": np.square, "relu": lambda v: np.maximum(v, np.float32(0)),
        "rsqrt": lambda v: np.float32(1) / np.sqrt(v), "reciprocal": lambda v: np.float32(1) / v,
        "logical_not": lambda v: (v == 0).astype(np.float32),
    }[op]  # fmt: skip
    with np.errstate(all="ignore"):
        expected = meaning(x)
    out = one(lambda d, s: nisa.tensor_scalar(d, s, getattr(nl, op), None), [x], x.shape, "float32")
    assert np.array_equal(out, expected, equal_nan=True)
    with pytest.raises(KernelError, match="must be None or 0"):
        one(lambda d, s: nisa.tensor_scalar(d, s, getattr(nl, op), 2.0), [x], x.shape, "float32")


def test_each_row_has_its_own_factor_through_a_stride_0_view() -> None:
    x, factor = random((8, 4, 6), seed=1), random((8, 4, 1), seed=2)
    out = one(lambda d, s, f: nisa.tensor_tensor(d, s, f.broadcast(2, 6), nl.multiply), [x, factor], x.shape, "float32")
    same(out, x * factor)


BLOCK, PAGE, OFFSET = 262145, 64, 37  # slot 16777317: its float32 neighbours are 2 apart


def test_slots_above_2_24_are_wrong_in_float32_and_warned() -> None:
    block = np.full((4, 1), BLOCK, np.int32)

    def body(d: Any, b: Any) -> None:
        nisa.tensor_scalar(dst=d, data=b, op0=nl.multiply, operand0=PAGE, op1=nl.add, operand1=OFFSET)

    result = run(body, [block], [((4, 1), "int32")])
    exact = BLOCK * PAGE + OFFSET
    assert exact == 16777317
    assert (result.outputs[0] == int(np.float32(np.float32(BLOCK) * PAGE + OFFSET))).all()
    assert (result.outputs[0] != exact).all()
    messages = [w.message for w in result.warnings if w.check == 27]
    assert len(messages) == 1
    assert "16777316" in messages[0]
    assert "test_vector_engine.py" in messages[0]


def test_slots_above_2_24_are_exact_in_integers() -> None:
    block, page = np.full((4, 1), BLOCK, np.int32), np.full((4, 1), PAGE, np.int32)
    offset = np.arange(OFFSET, OFFSET + 4, dtype=np.int32).reshape(4, 1)

    def body(d: Any, b: Any, n: Any, o: Any) -> None:
        nisa.tensor_tensor(dst=d, data1=b, data2=n, op=nl.multiply)
        nisa.tensor_tensor(dst=d, data1=d, data2=o, op=nl.add)

    result = run(body, [block, page, offset], [((4, 1), "int32")])
    assert (result.outputs[0] == BLOCK * PAGE + offset).all()
    assert 27 not in checks_of(result)

    def by_bits(d: Any, b: Any, n: Any, o: Any) -> None:
        nisa.tensor_scalar(dst=d, data=b, op0=nl.left_shift, operand0=6)
        nisa.tensor_tensor(dst=d, data1=d, data2=o, op=nl.bitwise_or)

    assert (one(by_bits, [block, page, offset], (4, 1), "int32") == BLOCK * PAGE + offset).all()


def test_integer_immediates_that_float32_cannot_hold_are_warned() -> None:
    x = np.zeros((2, 2), np.int32)
    result = run(lambda d, s: nisa.tensor_scalar(d, s, nl.add, (1 << 24) + 1), [x], [((2, 2), "int32")])
    assert (result.outputs[0] == 1 << 24).all()
    assert any("travels as float32" in w.message for w in result.warnings)


@pytest.mark.parametrize("reverse", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("ops", [p for p in PAIRS if p[1] is not None])
def test_scalar_tensor_tensor(ops: tuple[str, str], reverse: tuple[bool, bool]) -> None:
    x, y, a = samples(BF16, (16, 24)), samples(np.dtype(np.float16), (16, 24), 5), random((16, 1))
    with np.errstate(all="ignore"):
        inner = ARITHMETIC[ops[0]](*((a, widen(x)) if reverse[0] else (widen(x), a)))
        values = ARITHMETIC[ops[1]](*((widen(y), inner) if reverse[1] else (inner, widen(y))))
    out = one(
        lambda d, s, t, p: nisa.scalar_tensor_tensor(
            d, s, getattr(nl, ops[0]), p, getattr(nl, ops[1]), t, reverse0=reverse[0], reverse1=reverse[1]
        ),
        [x, y, a], x.shape, "bfloat16",
    )  # fmt: skip
    same(out, cast(values, BF16))


def test_scalar_tensor_tensor_takes_an_operand_of_any_float_type() -> None:
    """The page asks for float32 in tensor_scalar only; published kernels scale by a bfloat16 column here."""

    def kernel(x: Any, y: Any, column: Any) -> Any:
        dst = nl.ndarray(x.shape, nl.float32)
        nisa.scalar_tensor_tensor(dst, put(x), nl.multiply, put(column), nl.add, put(y))
        return get(dst)

    x, y, column = random((128, 40)), random((128, 40), seed=1), random((128, 1), BF16, seed=2)
    assert (launch(kernel, x, y, column).value == x * column.astype(np.float32) + y).all()


SCAN_OPS = {
    "add": np.add,
    "multiply": np.multiply,
    "subtract": np.subtract,
    "maximum": np.maximum,
    "minimum": np.minimum,
}


@pytest.mark.parametrize("target", ["float32", "bfloat16"])
@QUICK
@given(data=st.data())
def test_scan_is_its_recurrence(target: str, data: Any) -> None:
    names = st.sampled_from(sorted(SCAN_OPS))
    op0, op1 = data.draw(names), data.draw(names)
    reverse = data.draw(st.tuples(st.booleans(), st.booleans()))
    small = hnp.arrays(np.float32, (3, 9), elements=st.floats(-2, 2, width=16))
    a, b, start = data.draw(small), data.draw(small), data.draw(small)[:, :1]
    state, expected = start[:, 0], np.empty_like(a)
    for i in range(9):
        inner = SCAN_OPS[op0](*((state, a[:, i]) if reverse[0] else (a[:, i], state)))
        state = SCAN_OPS[op1](*((b[:, i], inner) if reverse[1] else (inner, b[:, i])))
        expected[:, i] = state  # the state keeps float32 although the results are narrower
    out = one(
        lambda d, x, y, s: nisa.tensor_tensor_scan(
            d, x, y, s, getattr(nl, op0), getattr(nl, op1), reverse0=reverse[0], reverse1=reverse[1]
        ),
        [a, b, start], a.shape, target,
    )  # fmt: skip
    assert (out == cast(expected, ALL[target])).all()


# -- reductions ---------------------------------------------------------------------------------------------------

REDUCTIONS = {
    "add": lambda x, ax: x.astype(np.float64).sum(axis=ax), "maximum": np.max, "minimum": np.min,
    "multiply": lambda x, ax: x.astype(np.float64).prod(axis=ax),
    "abs_max": lambda x, ax: np.abs(x).max(axis=ax), "logical_and": lambda x, ax: (x != 0).all(axis=ax),
    "logical_or": lambda x, ax: (x != 0).any(axis=ax),
    "subtract": lambda x, ax: 2 * x.reshape(*x.shape[: ax[0]], -1)[..., 0].astype(np.float64) - x.sum(axis=ax),
}  # fmt: skip


@pytest.mark.parametrize("axis", [(3,), (2, 3), (1, 2, 3), -1])
@pytest.mark.parametrize("op", REDUCTIONS)
def test_tensor_reduce(op: str, axis: Any) -> None:
    x = (random((8, 3, 4, 5)) * 0.5).astype(np.float32)
    x[0] = np.round(x[0])  # zeros among them
    axes = axis if isinstance(axis, tuple) else (3,)
    expected = np.asarray(REDUCTIONS[op](x, axes), np.float32)
    shape = (8, max(1, int(np.prod(expected.shape[1:]))))
    for negate in (False, True):
        out = one(
            lambda d, s, n=negate: nisa.tensor_reduce(d, getattr(nl, op), s, axis, negate=n), [x], shape, "float32"
        )
        assert np.allclose(out.reshape(expected.shape), -expected if negate else expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("source", ALL)
@pytest.mark.parametrize("op", ["add", "maximum"])
def test_tensor_reduce_of_every_type(source: str, op: str) -> None:
    x = (np.arange(32).reshape(4, 8) % 7).astype(ALL[source])
    expected = widen(x).sum(axis=1, keepdims=True) if op == "add" else widen(x).max(axis=1, keepdims=True)
    for target in ("float32", "bfloat16", source):
        out = one(lambda d, s: nisa.tensor_reduce(d, getattr(nl, op), s, 1), [x], (4, 1), target)
        same(out, cast(expected, ALL[target]))


@pytest.mark.parametrize("op", BITWISE)
@pytest.mark.parametrize("name", INTEGERS)
def test_bit_reductions(op: str, name: str) -> None:
    dtype = INTEGERS[name]
    x = np.random.default_rng(1).integers(0, 256, (4, 8 * dtype.itemsize)).astype(np.uint8).view(dtype)
    out = one(lambda d, s: nisa.tensor_reduce(d, getattr(nl, op), s, 1), [x], (4, 1), name)
    same(out, BITWISE[op].reduce(x, axis=1, keepdims=True))
    with pytest.raises(KernelError, match="negate is for arithmetic"):
        one(lambda d, s: nisa.tensor_reduce(d, getattr(nl, op), s, 1, negate=True), [x], (4, 1), name)


def test_reduce_a_permuted_view_and_wrong_axes() -> None:
    x = random((8, 3, 5))
    out = one(lambda d, s: nisa.tensor_reduce(d, nl.maximum, s.permute((0, 2, 1)), 2), [x], (8, 5), "float32")
    same(out, x.max(axis=1))
    for axis, words in ((1, "last dims"), (0, "free axes"), ((), "free axes")):
        with pytest.raises(KernelError, match=words):
            one(lambda d, s, a=axis: nisa.tensor_reduce(d, nl.maximum, s, a), [x], (8, 5), "float32")


IDENTITY = {"add": 0.0, "multiply": 1.0, "maximum": -np.inf, "minimum": np.inf}
FOLD = {"add": np.add, "multiply": np.multiply, "maximum": np.maximum, "minimum": np.minimum}


@pytest.mark.parametrize("op", FOLD)
def test_tensor_scalar_reduce_keeps_registers_across_calls(op: str) -> None:
    parts = [np.round(random((16, 8), seed=i) * 2) / 2 + 0.25 for i in range(3)]
    parts = [p.astype(np.float32) for p in parts]
    start = random((16, 1), seed=9)

    def body(r0: Any, r1: Any, r2: Any, r3: Any, scratch: Any, a: Any, b: Any, c: Any, s: Any) -> None:
        def go(x: Any, **kw: Any) -> None:
            nisa.tensor_scalar_reduce(scratch, x, nl.multiply, 2.0, getattr(nl, op), **kw)

        go(a)
        go(b, reduce_cmd=Command.reduce, reduce_res=r0)
        go(c, reduce_cmd=Command.reduce, reduce_res=r1, reduce_res_negate=True)
        go(a, reduce_cmd=Command.load_reduce, reduce_init=s, reduce_res=r2)
        go(b, reduce_res=r3)

    outs = compute(body, [*parts, start], [((16, 1), "float32")] * 4 + [((16, 8), "float32")])
    folded = [FOLD[op].reduce(2 * p, axis=1, keepdims=True) for p in parts]
    two = FOLD[op](folded[0], folded[1])
    wanted = [two, -FOLD[op](two, folded[2]), FOLD[op](start, folded[0]), folded[1]]
    for out, want in zip(outs, wanted, strict=False):
        assert np.allclose(out, want, rtol=1e-5)
    same(outs[4], 2 * parts[1])


def test_registers_belong_to_partitions_and_must_be_started() -> None:
    x = random((64, 8))

    def halves(low: Any, high: Any, scratch: Any, s: Any) -> None:
        for command in (Command.reset_reduce, Command.reduce):
            for half, out in ((slice(0, 32), low), (slice(32, 64), high)):
                nisa.tensor_scalar_reduce(
                    scratch[half], s[half], nl.add, 0.0, nl.add, reduce_res=out, reduce_cmd=command
                )

    low, high, _ = compute(halves, [x], [((32, 1), "float32"), ((32, 1), "float32"), ((64, 8), "float32")])
    assert np.allclose(np.concatenate([low, high]), 2 * x.sum(axis=1, keepdims=True), rtol=1e-5)

    def fresh(d: Any, s: Any) -> None:
        nisa.tensor_scalar_reduce(d, s, nl.add, 0.0, nl.add, reduce_cmd=Command.reduce)

    def wider(d: Any, s: Any) -> None:
        nisa.tensor_scalar_reduce(d[0:32], s[0:32], nl.add, 0.0, nl.add)
        fresh(d, s)

    def disturbed(d: Any, s: Any) -> None:
        mask = nl.zeros((64, 8), nl.uint8)
        nisa.tensor_scalar_reduce(d, s, nl.add, 0.0, nl.maximum)
        nisa.select_reduce(d, mask, s, 0.0)  # idle may disturb the accumulators
        fresh(d, s)

    for body in (fresh, wider, disturbed):
        with pytest.raises(KernelError, match="begin with reset_reduce"):
            one(body, [x], x.shape, "float32")


@pytest.mark.parametrize("op1", ["add", "subtract", "multiply", "maximum", "minimum"])
def test_tensor_scalar_cumulative(op1: str) -> None:
    x, start = np.round(random((4, 12)) * 4).astype(np.float32) / 4, random((4, 1), seed=2)
    fold = SCAN_OPS[op1]

    def reference(state: Any) -> Any:
        out = np.empty_like(x)
        for i in range(x.shape[1]):
            state = fold(x[:, i] + np.float32(0.5), state)
            out[:, i] = state
        return out, state

    first, state = reference(np.full(4, {"subtract": 0.0, **IDENTITY}[op1], np.float32))
    second, _ = reference(state)
    third, _ = reference(start[:, 0])

    def body(a: Any, b: Any, c: Any, s: Any, i: Any) -> None:
        def go(d: Any, **kw: Any) -> None:
            nisa.tensor_scalar_cumulative(d, s, nl.add, getattr(nl, op1), 0.5, **kw)

        go(a)
        go(b, reduce_cmd=Command.reduce)
        go(c, reduce_cmd=Command.load_reduce, imm1=i)

    for out, want in zip(compute(body, [x, start], [(x.shape, "float32")] * 3), (first, second, third), strict=True):
        same(out, want)


# -- selects ------------------------------------------------------------------------------------------------------

COMPARE = {"equal": np.equal, "less": np.less, "less_equal": np.less_equal, "greater": np.greater,
           "greater_equal": np.greater_equal}  # fmt: skip


@pytest.mark.parametrize("low", COMPARE)
@pytest.mark.parametrize("high", COMPARE)
def test_range_select(low: str, high: str) -> None:
    x = random((8, 20))
    a, b = (np.arange(8, dtype=np.float32).reshape(8, 1) + 3), (19 - np.arange(8, dtype=np.float32).reshape(8, 1))
    index = np.arange(20, dtype=np.float32)[None] + 5
    keep = COMPARE[low](index, a) & COMPARE[high](index, b)
    expected = np.where(keep, x, FP32_MIN)

    def body(d: Any, r: Any, s: Any, p: Any, q: Any) -> None:
        nisa.range_select(d, s, getattr(nl, low), getattr(nl, high), p, q, reduce_res=r, range_start=5)

    for target in ("float32", "bfloat16"):  # FP32_MIN rounds to -inf in bfloat16, as documented
        out, top = compute(body, [x, a, b], [(x.shape, target), ((8, 1), "float32")])
        same(out, cast(expected, ALL[target]))
        same(top, expected.max(axis=1, keepdims=True))


def test_range_select_chains_its_maximum_and_checks_its_arguments() -> None:
    x, y = random((8, 16), seed=1), random((8, 16), seed=2)
    low, high = np.zeros((8, 1), np.float32), np.full((8, 1), 24, np.float32)

    def body(d: Any, r: Any, s: Any, t: Any, p: Any, q: Any) -> None:
        nisa.range_select(d, s, nl.greater_equal, nl.less, p, q)
        nisa.range_select(
            d, t, nl.greater_equal, nl.less, p, q, reduce_cmd=Command.reduce, reduce_res=r, range_start=16
        )

    _, top = compute(body, [x, y, low, high], [(x.shape, "float32"), ((8, 1), "float32")])
    same(top, np.maximum(x.max(axis=1), y[:, :8].max(axis=1))[:, None])
    bad = (
        ({"comp_op0": nl.add}, "comp_op0 must be one of"), ({"on_false_value": 0.0}, "float32 minimum"),
        ({"range_start": 1 << 24}, "2\\^24"), ({"reduce_op": nl.add}, "must be nl.maximum"),
        ({"reduce_cmd": Command.idle}, "reduce_cmd must be one of"),
    )  # fmt: skip
    for change, words in bad:
        arguments = {"comp_op0": nl.less, "comp_op1": nl.less, **change}
        with pytest.raises(KernelError, match=words):
            one(
                lambda d, s, t, p, q, a=arguments: nisa.range_select(d, s, bound0=p, bound1=q, **a),
                [x, y, low, high], x.shape, "float32",
            )  # fmt: skip


@pytest.mark.parametrize("predicate", ["int8", "uint8", "int16", "uint16"])
@pytest.mark.parametrize("name", [*FLOATS, "int8", "uint8", "int16", "uint16"])
@pytest.mark.parametrize("reverse", [False, True])
def test_select_reduce(name: str, predicate: str, reverse: bool) -> None:
    x = samples(ALL[name], (8, 24), 1)
    mask = np.random.default_rng(4).integers(0, 2, x.shape).astype(predicate)
    other = random((8, 1))
    expected = np.where((mask != 0) != reverse, widen(x), other)

    def body(d: Any, r: Any, e: Any, s: Any, p: Any, o: Any) -> None:
        nisa.select_reduce(d, p, s, o, reduce_res=r, reduce_cmd=Command.reset_reduce, reverse_pred=reverse)
        nisa.select_reduce(e, p, s, -1.0, reverse_pred=reverse)

    out, top, plain = compute(
        body, [x, mask, other], [(x.shape, "bfloat16"), ((8, 1), "float32"), (x.shape, "float32")]
    )
    same(out, cast(expected, BF16))
    same(top, expected.max(axis=1, keepdims=True))
    same(plain, np.where((mask != 0) != reverse, widen(x), np.float32(-1)))


# -- partition movement -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["float32", "bfloat16", "uint8"])
@pytest.mark.parametrize("partitions", [32, 64, 128])
@QUICK
@given(data=st.data())
def test_stream_shuffle(name: str, partitions: int, data: Any) -> None:
    mask = data.draw(st.lists(st.one_of(st.integers(0, 31), st.just(255)), min_size=32, max_size=32))
    x, before = samples(ALL[name], (partitions, 4), 1), samples(ALL[name], (partitions, 4), 2)
    expected = before.copy()
    for row in range(partitions):
        if mask[row % 32] != 255:
            expected[row] = x[row // 32 * 32 + mask[row % 32]]

    def body(d: Any, s: Any, b: Any) -> None:
        nisa.tensor_copy(dst=d, src=b)
        nisa.nc_stream_shuffle(d, s, mask)

    assert (bits(one(body, [x, before], x.shape, name)) == bits(expected)).all()


def test_stream_shuffle_between_quadrants_in_place_and_outside() -> None:
    x = random((32, 4))

    def broadcast(d: Any, s: Any) -> None:
        for start in (0, 32, 64, 96):
            nisa.nc_stream_shuffle(d[start : start + 32], s, [5] * 32)

    same(one(broadcast, [x], (128, 4), "float32"), np.repeat(x[5:6], 128, axis=0))

    def reverse(d: Any, s: Any) -> None:
        nisa.nc_stream_shuffle(s, s, list(range(31, -1, -1)))
        nisa.tensor_copy(d, s)

    same(one(reverse, [x], (32, 4), "float32"), x[::-1].copy())
    with pytest.raises(KernelError, match="outside src"):
        one(lambda d, s: nisa.nc_stream_shuffle(d, s[0:8], [9] * 32), [x], (32, 4), "float32")
    wide = random((128, 4))
    with pytest.raises(KernelError, match="partition 32") as caught:
        one(lambda d, s: nisa.nc_stream_shuffle(d[32:96], s[0:64], [0] * 32), [wide], (128, 4), "float32")
    assert caught.value.check == 2  # type: ignore[attr-defined]


# -- top-8 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int16"])
@pytest.mark.parametrize("n", [8, 9, 100, 16384])
def test_max8(name: str, n: int) -> None:
    x = (np.random.default_rng(n).integers(-50, 50, (4, n)) / (1 if name == "int16" else 8)).astype(ALL[name])
    expected = -np.sort(-widen(x), axis=1)[:, :8]
    same(one(lambda d, s: nisa.max8(d, s), [x], (4, 8), "float32"), expected)
    same(one(lambda d, s: nisa.max8(d, s), [x], (4, 8), "bfloat16"), cast(expected, BF16))


def positions(row: Any, wanted: Any, order: Any) -> list[int]:
    """Successive occurrences of equal values, in the order the columns are served."""
    free = row.tolist()
    found = [-1] * len(wanted)
    for column in order:
        if wanted[column] in free:
            found[column] = free.index(wanted[column])
            free[found[column]] = None
    return found


@pytest.mark.parametrize("name", ["uint16", "uint32"])
@QUICK
@given(data=st.data())
def test_find_index8_and_match_replace8_serve_duplicates_in_opposite_orders(name: str, data: Any) -> None:
    few = st.integers(0, 5)
    x = data.draw(hnp.arrays(np.int32, (3, 12), elements=few)).astype(np.float32)
    wanted = data.draw(hnp.arrays(np.int32, (3, 8), elements=few)).astype(np.float32)

    def body(i: Any, r: Any, j: Any, s: Any, v: Any) -> None:
        nisa.nc_find_index8(i, s, v)
        nisa.nc_match_replace8(r, s, v, -9.5, dst_idx=j)

    found, replaced, where = compute(body, [x, wanted], [((3, 8), name), (x.shape, "float32"), ((3, 8), name)])
    absent = np.iinfo(name).max
    for p in range(3):
        ascending = positions(x[p], wanted[p].tolist(), range(8))
        descending = positions(x[p], wanted[p].tolist(), range(7, -1, -1))
        assert found[p].tolist() == [absent if v < 0 else v for v in ascending]
        assert where[p].tolist() == [absent if v < 0 else v for v in descending]
        expected = x[p].copy()
        expected[[v for v in descending if v >= 0]] = -9.5
        assert replaced[p].tolist() == expected.tolist()


def test_match_replace8_reverse_order_of_a_known_row() -> None:
    x = np.array([[0, 1, 3, 1, 8, 8, 8, 8, 8, 8, 8, 2]], np.float32)
    wanted = np.array([[3, 8, 8, 8, 8, 8, 8, 8]], np.float32)
    _, where = compute(
        lambda d, i, s, v: nisa.nc_match_replace8(d, s, v, 0.0, dst_idx=i), [x, wanted],
        [(x.shape, "float32"), ((1, 8), "uint32")],
    )  # fmt: skip
    assert where.tolist() == [[2, 10, 9, 8, 7, 6, 5, 4]]
    found = one(lambda d, s, v: nisa.nc_find_index8(d, s, v), [x, wanted], (1, 8), "uint32")
    assert found.tolist() == [[2, 4, 5, 6, 7, 8, 9, 10]]


def test_rounds_of_max8_and_match_replace8_sort_a_row() -> None:
    x = np.random.default_rng(1).permutation(64).astype(np.float32).reshape(1, 64)

    def body(d: Any, s: Any) -> None:
        for i in range(8):
            nisa.max8(d[:, 8 * i : 8 * i + 8], s)
            nisa.nc_match_replace8(s, s, d[:, 8 * i : 8 * i + 8], -1.0)

    assert one(body, [x], (1, 64), "float32").tolist() == [list(range(63, -1, -1))]


# -- statistics ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 7, 512])
def test_bn_stats_and_bn_aggr(n: int) -> None:
    x = random((8, 2 * n), BF16, scale=3.0)

    def body(stats: Any, result: Any, s: Any) -> None:
        nisa.bn_stats(stats[:, 0:6], s[:, 0:n])
        nisa.bn_stats(stats[:, 6:12], s[:, n : 2 * n])
        nisa.bn_aggr(result, stats)

    stats, result = compute(body, [x], [((8, 12), "float32"), ((8, 2), "float32")])
    values = x.astype(np.float64)
    for half, part in ((0, values[:, 0:n:2]), (3, values[:, 1:n:2])):
        assert (stats[:, half] == part.shape[1]).all()
        if part.shape[1]:
            assert np.allclose(stats[:, half + 1], part.mean(axis=1), atol=1e-5)
            assert np.allclose(stats[:, half + 2], part.var(axis=1) * part.shape[1], rtol=1e-4, atol=1e-4)
    assert np.allclose(result[:, 0], values.mean(axis=1), atol=1e-5)
    assert np.allclose(result[:, 1], values.var(axis=1), rtol=1e-4, atol=1e-5)
