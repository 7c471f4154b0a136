# SPDX-License-Identifier: Apache-2.0
"""`softmax_pool`: golden rows, float64, infinities and NaN, strides, batch independence and bad input."""

from __future__ import annotations

import pytest
import torch

from sparse_mla.errors import ArgumentError, DTypeError, ShapeError
from sparse_mla.ops.softmax_pool import SOFTMAX_POOL, SoftmaxPoolCall, softmax_pool

INF = float("inf")
NAN = float("nan")
BACKENDS = sorted({i.backend for i in SOFTMAX_POOL.candidates("auto")})


def exact(score: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
    return (torch.softmax(score.double(), dim=1) * latent.double()).sum(dim=1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 7, 128])
def test_against_float64(ratio, backend):
    g = torch.Generator().manual_seed(ratio)
    score = torch.randn(33, ratio, 512, generator=g) * 4
    latent = torch.randn(33, ratio, 512, generator=g)
    expected = exact(score, latent)
    got = softmax_pool(score, latent, out_dtype=torch.float32, backend=backend)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)
    rounded = softmax_pool(score, latent, backend=backend)
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, got.to(torch.bfloat16))  # one rounding


def test_ratio_one_is_the_latent():
    latent = torch.randn(9, 1, 64)
    assert torch.equal(softmax_pool(torch.randn(9, 1, 64) * 50, latent, out_dtype=torch.float32), latent[:, 0])


def test_two_rows_agree_with_the_sigmoid_form():
    score, latent = torch.randn(2, 50, 2, 512)
    closed = latent[:, 0] + (latent[:, 1] - latent[:, 0]) * torch.sigmoid(score[:, 1] - score[:, 0])
    torch.testing.assert_close(softmax_pool(score, latent, out_dtype=torch.float32), closed, atol=1e-6, rtol=1e-5)


def test_equal_scores_average_and_large_ones_do_not_overflow():
    latent = torch.tensor([[[1.0, 2.0], [3.0, 6.0]]])
    for level in (0.0, 1e30, -1e30, 3e38, -3e38):
        got = softmax_pool(torch.full((1, 2, 2), level), latent, out_dtype=torch.float32)
        assert got.tolist() == [[2.0, 4.0]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("scores", "latents", "expected"),
    [
        ([-INF, -INF], [5.0, 7.0], 0.0),  # nothing to pool
        ([-INF, -INF], [NAN, INF], 0.0),  # and nothing of it is read
        ([-INF], [5.0], 0.0),
        ([-INF, 0.0], [NAN, 7.0], 7.0),  # a row left out may hold anything
        ([-INF, 3.0, -INF], [INF, 7.0, NAN], 7.0),
        ([INF, 0.0], [5.0, 7.0], 5.0),
        ([INF, INF, 1.0], [5.0, 7.0, 100.0], 6.0),
        ([INF, -INF], [5.0, NAN], 5.0),
        ([0.0, -200.0], [1.0, 9.0], 1.0),  # weight underflows to 0
        ([NAN, 0.0], [1.0, 2.0], NAN),
        ([NAN, -INF], [1.0, 2.0], NAN),
        ([0.0, 0.0], [NAN, 2.0], NAN),
        ([0.0, 0.0], [INF, 2.0], INF),
        ([0.0, 0.0], [INF, -INF], NAN),
    ],
)
def test_infinities_and_nan(scores, latents, expected, backend):
    score = torch.tensor(scores)[None, :, None].repeat(3, 1, 40)
    latent = torch.tensor(latents)[None, :, None].repeat(3, 1, 40)
    score[1], latent[1] = 0.25, 1.5  # a neighbour that must stay itself
    score[:, :, 7], latent[:, :, 7] = 0.5, 2.5  # and a channel
    got = softmax_pool(score, latent, out_dtype=torch.float32, backend=backend)
    wanted = torch.full((3, 40), expected)
    wanted[1], wanted[:, 7] = 1.5, 2.5
    torch.testing.assert_close(got, wanted, equal_nan=True, atol=1e-6, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_views_give_the_bits_of_copies(backend):
    """The projection that feeds the pooling holds score and latent side by side."""
    projection = torch.randn(24, 1024)
    score, latent = (part.reshape(12, 2, 512) for part in (projection[:, :512], projection[:, 512:]))
    strided = projection.view(12, 2, 1024)
    got = softmax_pool(strided[..., :512], strided[..., 512:], backend=backend)
    assert torch.equal(got, softmax_pool(score.contiguous(), latent.contiguous(), backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_do_not_depend_on_each_other_or_on_the_memory_limit(backend):
    score, latent = torch.randn(2, 700, 3, 77)
    whole = softmax_pool(score, latent, backend=backend)
    assert torch.equal(softmax_pool(score, latent, memory_limit=1 << 20, backend=backend), whole)
    for first, last in ((0, 1), (5, 6), (5, 7), (3, 130), (699, 700)):
        assert torch.equal(softmax_pool(score[first:last], latent[first:last], backend=backend), whole[first:last])
    wider = torch.cat([score, torch.full_like(score, NAN)], dim=2)
    assert torch.equal(softmax_pool(wider, torch.cat([latent, latent], dim=2), backend=backend)[:, :77], whole)


def test_autocast_changes_nothing():
    score, latent = torch.randn(2, 5, 2, 64)
    outside = softmax_pool(score, latent, out_dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(softmax_pool(score, latent, out_dtype=torch.float32), outside)


def test_no_groups():
    assert softmax_pool(torch.empty(0, 2, 64), torch.empty(0, 2, 64)).shape == (0, 64)


def test_compiles_without_breaks_and_passes_opcheck():
    score, latent = torch.randn(2, 5, 2, 64)
    compiled = torch.compile(softmax_pool, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(score, latent), softmax_pool(score, latent))
    torch.library.opcheck(
        torch.ops.sparse_mla.softmax_pool_reference.default, SoftmaxPoolCall.check(score, latent).flat()
    )


BAD = {
    "rank": (lambda a: a | {"score": torch.zeros(4, 8)}, ShapeError, "score must be"),
    "no rows": (
        lambda a: a | {"score": torch.zeros(4, 0, 8), "latent": torch.zeros(4, 0, 8)},
        ShapeError,
        "at least one row",
    ),
    "mismatch": (lambda a: a | {"latent": torch.zeros(4, 3, 8)}, ShapeError, "latent must be"),
    "dtype": (lambda a: a | {"score": torch.zeros(4, 2, 8, dtype=torch.bfloat16)}, DTypeError, "score must be float32"),
    "grad": (lambda a: a | {"latent": torch.zeros(4, 2, 8, requires_grad=True)}, DTypeError, "require grad"),
    "out dtype": (lambda a: a | {"out_dtype": torch.float16}, ArgumentError, "out_dtype"),
    "device": (lambda a: a | {"latent": torch.zeros(4, 2, 8, device="meta")}, ArgumentError, "must be on"),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_bad_input(name):
    change, kind, text = BAD[name]
    arguments = {"score": torch.zeros(4, 2, 8), "latent": torch.zeros(4, 2, 8)}
    softmax_pool(**arguments)
    with pytest.raises(kind, match=text) as caught:
        softmax_pool(**change(arguments))
    assert str(caught.value).startswith("softmax_pool: ")
