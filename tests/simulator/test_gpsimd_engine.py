# SPDX-License-Identifier: Apache-2.0
"""GpSimd instructions: index patterns, gathers inside SBUF, top-k, nonzero positions."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_mla.errors import KernelError
from sparse_mla.simulator import isa as nisa
from sparse_mla.simulator import language as nl

from .kit import BF16, checks_of, random
from .reference import ALL, bits, cast, compute, one, run, same, samples, widen

QUICK = settings(max_examples=25, deadline=None)
STEPS = st.integers(-5, 70)
PATTERNS = st.lists(st.tuples(STEPS, st.integers(1, 4)), min_size=1, max_size=4)


def affine(partitions: int, pattern: Any, offset: int, multiplier: int) -> Any:
    """The documented loop nest."""
    rows = []
    for p in range(partitions):
        cells = itertools.product(*[range(n) for _, n in pattern])
        steps = [s for s, _ in pattern]
        rows.append([offset + p * multiplier + sum(s * i for s, i in zip(steps, c, strict=True)) for c in cells])
    return np.array(rows, np.int64)


@QUICK
@given(pattern=PATTERNS, offset=st.integers(-100, 100), multiplier=st.integers(-40, 40), p=st.sampled_from([1, 5, 32]))
def test_iota_is_its_loop_nest(pattern: Any, offset: int, multiplier: int, p: int) -> None:
    values = affine(p, pattern, offset, multiplier)
    pairs = [list(pair) for pair in pattern]

    def body(a: Any, b: Any, c: Any) -> None:
        for dst in (a, b, c):
            nisa.iota(dst, pairs, offset=offset, channel_multiplier=multiplier)

    shape = values.shape
    i32, u8, f32 = compute(body, [], [(shape, "int32"), (shape, "uint8"), (shape, "float32")])
    same(i32, values.astype(np.int32))
    same(u8, np.clip(values, 0, 255).astype(np.uint8))
    same(f32, values.astype(np.float32))


def test_iota_limits() -> None:
    def reach(dtype: str, **kw: Any) -> Any:
        return run(lambda d: nisa.iota(d, [[1, 4]], **kw), [], [((2, 4), dtype)])

    assert 27 not in checks_of(reach("int32", offset=(1 << 31) - 4))
    assert 27 in checks_of(reach("int32", offset=(1 << 31) - 3))
    assert 27 in checks_of(reach("float32", offset=(1 << 24) - 3))
    for pattern, words in (
        ([[1, 3]], "makes 3 elements"),
        ([1, 4], "must be"),
        ([[1, -4]], "makes -4"),
        ("x", "must be"),
    ):
        with pytest.raises(KernelError, match=words):
            run(lambda d, p=pattern: nisa.iota(d, p), [], [((2, 4), "int32")])


COMPARE = {"equal": np.equal, "not_equal": np.not_equal, "less": np.less, "less_equal": np.less_equal,
           "greater": np.greater, "greater_equal": np.greater_equal}  # fmt: skip


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("op", COMPARE)
def test_affine_select(op: str, name: str) -> None:
    x = samples(ALL[name], (16, 2, 12))
    predicate = affine(16, [(-3, 2), (1, 12)], -4, 1)
    keep = COMPARE[op](predicate, 0).reshape(x.shape)
    other = -2.5  # integers: saturated and rounded to even
    for target in (name, "float32"):
        out = one(
            lambda d, s: nisa.affine_select(
                d, [[-3, 2], [1, 12]], 1, s, other, cmp_op=getattr(nl, op), offset=-4
            ),
            [x], x.shape, target,
        )  # fmt: skip
        filled = cast(np.full(x.shape, other), ALL[target])
        picked = x if target == name else cast(widen(x), ALL[target])
        assert (bits(out) == bits(np.where(keep, picked, filled)))[~np.isnan(widen(out))].all()


def test_affine_select_makes_a_causal_mask_and_an_identity() -> None:
    x = random((32, 32))
    causal = one(
        lambda d, s: nisa.affine_select(d, [[-1, 32]], 1, s, -1e30, cmp_op=nl.greater_equal), [x], x.shape, "float32"
    )
    same(causal, np.where(np.tri(32, dtype=bool), x, np.float32(-1e30)))

    def identity(d: Any) -> None:
        nisa.memset(d, 1.0)
        nisa.affine_select(d, [[-1, 32]], 1, d, 0.0)

    same(one(identity, [], (32, 32), "bfloat16"), np.eye(32, dtype=BF16))
    for value, words in ((None, "must be a number"), ("0", "must be a number")):
        with pytest.raises(KernelError, match=words):
            one(lambda d, s, v=value: nisa.affine_select(d, [[-1, 32]], 1, s, v), [x], x.shape, "float32")


@pytest.mark.parametrize("op", ["add", "maximum", "average", "bitwise_or", "bitwise_and"])
def test_tensor_partition_reduce(op: str) -> None:
    x = samples(np.dtype(np.int16), (24, 10)) if op.startswith("bit") else random((24, 10))
    meaning = {
        "add": lambda v: v.astype(np.float64).sum(axis=0), "maximum": lambda v: v.max(axis=0),
        "average": lambda v: v.astype(np.float64).mean(axis=0), "bitwise_or": np.bitwise_or.reduce,
        "bitwise_and": np.bitwise_and.reduce,
    }[op]  # fmt: skip
    out = one(lambda d, s: nisa.tensor_partition_reduce(d, getattr(nl, op), s), [x], (1, 10), x.dtype.name)
    assert np.allclose(out[0], meaning(x), rtol=1e-5, atol=1e-5)
    with pytest.raises(KernelError, match="op must be"):
        one(lambda d, s: nisa.tensor_partition_reduce(d, nl.minimum, s), [x], (1, 10), x.dtype.name)


# -- gathers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_n_gather(name: str) -> None:
    x = samples(ALL[name], (16, 5, 8))
    at = np.random.default_rng(2).integers(0, 40, (16, 3, 20)).astype(np.uint32)
    result = run(lambda d, s, i: nisa.nc_n_gather(d, s, i), [x, at], [((16, 3, 20), name)])
    wanted = np.stack([x[p].reshape(-1)[at[p].astype(np.int64)] for p in range(16)])
    assert (bits(result.outputs[0]) == bits(wanted)).all()
    assert result.records[2].detail["groups"] == 1


def test_n_gather_counts_its_groups_and_checks_its_range() -> None:
    x, at = random((4, 8)), np.zeros((4, 1025), np.uint32)
    assert (
        run(lambda d, s, i: nisa.nc_n_gather(d, s, i), [x, at], [((4, 1025), "float32")]).records[2].detail["groups"]
        == 3
    )
    at[3, 7] = 8
    with pytest.raises(KernelError, match="reach 8") as caught:
        one(lambda d, s, i: nisa.nc_n_gather(d, s, i), [x, at], at.shape, "float32")
    assert caught.value.check == 39  # type: ignore[attr-defined]


@pytest.mark.parametrize("each", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("valid", [1, 17, 48])
def test_local_gather(each: int, valid: int) -> None:
    x = random((32, 100), BF16)
    index = np.random.default_rng(each).integers(0, 100 - each, (32, 3)).astype(np.uint16)
    out = one(
        lambda d, s, i: nisa.local_gather(d, s, i, num_elem_per_idx=each, num_valid_indices=valid),
        [x, index], (32, valid * each), "bfloat16",
    )  # fmt: skip
    wanted = np.empty((32, valid * each), BF16)
    for p in range(32):
        group = index[p // 16 * 16 : p // 16 * 16 + 16]
        for j in range(valid):
            start = int(group[j % 16, j // 16])  # partition first
            wanted[p, j * each : j * each + each] = x[p, start : start + each]
    assert (bits(out) == bits(wanted)).all()


@pytest.mark.parametrize(("shape", "columns", "kw", "words"), [
    ((24, 8), 1, {"num_valid_indices": 16}, "multiple of 16"), ((16, 8), 1, {"num_valid_indices": 17}, "must be 1..16"),
    ((16, 8), 1, {"num_valid_indices": 0}, "must be 1..16"), ((16, 8), 257, {"num_valid_indices": 4097}, "1..4096"),
    ((16, 8), 1, {"num_valid_indices": 16, "num_elem_per_idx": 2}, "16 x 2 elements"),
])  # fmt: skip
def test_local_gather_limits(shape: Any, columns: int, kw: dict[str, int], words: str) -> None:
    x, index = random(shape), np.zeros((shape[0], columns), np.uint16)
    with pytest.raises(KernelError, match=words) as caught:
        one(lambda d, s, i: nisa.local_gather(d, s, i, **kw), [x, index], (shape[0], 16), "float32")
    assert caught.value.check == 38  # type: ignore[attr-defined]


def test_local_gather_past_the_end() -> None:
    x, index = random((16, 8)), np.full((16, 1), 7, np.uint16)
    with pytest.raises(KernelError, match="reaches element 8"):
        one(
            lambda d, s, i: nisa.local_gather(d, s, i, num_elem_per_idx=2, num_valid_indices=16), [x, index], (16, 32),
            "float32",
        )  # fmt: skip


# -- top-k --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "k"), [(8, 1), (8, 8), (100, 16), (640, 100), (2048, 33)])
def test_topk_of_each_group(n: int, k: int) -> None:
    columns = -(-n // 16)
    values = np.random.default_rng(n).integers(-3 * n, 3 * n, (8, n)).astype(np.float32).astype(BF16)  # with ties
    x = np.zeros((128, columns + 2), BF16)
    for j in range(n):
        x[np.arange(8) * 16 + j % 16, j // 16] = values[:, j]
    outs = compute(lambda v, i, s: nisa.topk(v, i, s, n), [x], [((128, k), "bfloat16"), ((128, k), "uint32")])
    for group in range(8):
        rows = slice(16 * group, 16 * group + 16)
        got = [outs[0][rows][j % 16, j // 16].astype(np.float32) for j in range(k)]
        where = [int(outs[1][rows][j % 16, j // 16]) for j in range(k)]
        wide = values[group].astype(np.float32)
        assert got == sorted(wide.tolist())[n - k :], group  # ascending
        assert [wide[w] for w in where] == got
        assert len(set(where)) == k


@pytest.mark.parametrize(("n", "k", "width", "words"), [
    (7, 4, 8, "n must be 8"), (65536, 4, 4096, "n must be 8"), (16, 17, 8, "must be 1..16"),
    (200, 8, 8, "n is 200"),
])  # fmt: skip
def test_topk_limits(n: int, k: int, width: int, words: str) -> None:
    x = np.zeros((128, width), BF16)
    with pytest.raises(KernelError, match=words) as caught:
        compute(lambda v, i, s: nisa.topk(v, i, s, n), [x], [((128, k), "bfloat16"), ((128, k), "uint32")])
    assert caught.value.check == 41  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["float32", "int32"])
@pytest.mark.parametrize("partitions", [1, 16, 40, 128])
def test_nonzero_with_count(name: str, partitions: int) -> None:
    generator = np.random.default_rng(partitions)
    x = (generator.integers(0, 2, (partitions, 20)) * generator.integers(1, 9, (partitions, 20))).astype(name)
    x[0] = 0
    x[-1] = 1

    def body(d: Any, s: Any) -> None:
        nisa.memset(d, 77)
        nisa.nonzero_with_count(d, s, index_offset=100, padding_val=-5)

    out = one(body, [x], (partitions, 21), "int32")
    for p in range(partitions):
        if p % 16:
            assert (out[p] == 77).all()  # only every 16th partition is served
            continue
        hits = [i + 100 for i in range(20) if x[p, i] != 0]
        assert out[p].tolist() == hits + [-5] * (20 - len(hits)) + [len(hits)]


def test_nonzero_with_count_leaves_other_partitions_unwritten() -> None:
    x = np.ones((32, 4), np.float32)

    def body(d: Any, s: Any) -> None:
        nisa.nonzero_with_count(d, s)

    with pytest.raises(KernelError, match="never written"):
        one(body, [x], (32, 5), "int32")
    with pytest.raises(KernelError, match="trn2 on"):
        one(body, [x], (32, 5), "int32", gen=2)
    with pytest.raises(KernelError, match="int32") as caught:
        one(body, [x], (32, 5), "float32")
    assert caught.value.check == 42  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["float32", "int32"])
def test_sequence_bounds(name: str) -> None:
    ids = np.array([[1, 1, 2, 2, 2, 0, 3, 0, 0]], name)
    out = one(lambda d, s: nisa.sequence_bounds(d, s), [ids], (1, 2, 9), name)
    assert out[0, 0].tolist() == [0, 0, 2, 2, 2, 9, 6, 9, 9]
    assert out[0, 1].tolist() == [2, 2, 5, 5, 5, -1, 7, -1, -1]


# -- random numbers -----------------------------------------------------------------------------------------------


def test_random_numbers_lie_in_their_range_and_follow_their_seed() -> None:
    seed = np.array([[7]], np.uint32)
    low = np.arange(16, dtype=np.float32).reshape(16, 1)

    def body(a: Any, b: Any, c: Any, d: Any, s: Any, least: Any) -> None:
        nisa.set_rng_seed(s)
        nisa.rand2(a, least, 20.0)
        nisa.set_rng_seed(s)
        nisa.rand2(b, least, 20.0)
        nisa.rand2(c, least, 20.0)
        nisa.rng(d)

    shape = (16, 200)
    a, b, c, d = compute(body, [seed, low], [(shape, "float32")] * 3 + [(shape, "uint32")])
    same(a, b)
    assert (a != c).mean() > 0.9
    assert ((a >= low) & (a < 20)).all()
    assert np.allclose(a.mean(axis=1), (low[:, 0] + 20) / 2, atol=1.5)
    assert abs((d >> 31).mean() - 0.5) < 0.05


def test_dropout_drops_the_share_it_is_told() -> None:
    x = np.ones((128, 512), np.float32)
    share = np.linspace(0, 1, 128, dtype=np.float32).reshape(128, 1)
    out = one(lambda d, s, p: nisa.dropout(d, s, p), [x, share], x.shape, "float32")
    assert set(np.unique(out).tolist()) <= {0.0, 1.0}
    assert np.abs((out == 0).mean(axis=1) - share[:, 0]).max() < 0.1
    assert (out[0] == 1).all()
    assert (out[-1] == 0).all()
