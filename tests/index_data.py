# SPDX-License-Identifier: Apache-2.0
"""Inputs of the index operators and an oracle that shares no code with them: pages are laid out here byte by byte,
scores are one float64 einsum over decoded records."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sparse_mla.formats import INDEX_FP4, INDEX_FP8, INDEX_FP8_FP32, RecordFormat, decode, encode, encode_query

FORMATS = (INDEX_FP4, INDEX_FP8, INDEX_FP8_FP32)


def sectioned(records: torch.Tensor, fmt: RecordFormat, *, pad: int = 0) -> torch.Tensor:
    """records [pages, page_size, bytes] to index pages [pages, page_size, 1, bytes]: all data of a page, then all
    scales. `pad` bytes of 0xA5 stand between two pages, so the page stride is larger than the page."""
    pages, page_size, width = records.shape
    flat = torch.full((pages, page_size * width + pad), 0xA5, dtype=torch.uint8)
    split = page_size * fmt.data_bytes
    flat[:, :split] = records[:, :, : fmt.data_bytes].reshape(pages, -1)
    flat[:, split : page_size * width] = records[:, :, fmt.data_bytes :].reshape(pages, -1)
    return (
        flat.as_strided((pages, page_size, 1, width), (flat.shape[1], width, width, 1))
        if pages
        else records[:, :, None]
    )


class Problem(NamedTuple):
    """One paged scoring. records [pages, page_size, bytes] are the decodable truth behind `pages`."""

    fmt: RecordFormat
    q: tuple[torch.Tensor, torch.Tensor | None]
    weights: torch.Tensor
    records: torch.Tensor
    pages: torch.Tensor
    block_table: torch.Tensor
    context_lens: torch.Tensor

    def expected(self, columns: int) -> torch.Tensor:
        """float64 [b * n, columns], -inf without a key."""
        b, n = self.context_lens.shape
        h = self.weights.shape[1]
        query = decode_pair(self.q, self.fmt).reshape(b * n, h, -1)
        keys = decode(self.records, self.fmt, dtype=torch.float32).double()
        out = torch.full((b * n, columns), float("-inf"), dtype=torch.float64)
        page_size = self.records.shape[1]
        for row in range(b * n):
            positions = torch.arange(int(self.context_lens.reshape(-1)[row]))
            pages = self.block_table[row // n, positions // page_size].long()
            dots = torch.einsum("hd,jd->hj", query[row], keys[pages, positions % page_size]).relu()
            out[row, : len(positions)] = (dots * self.weights[row].double()[:, None]).sum(0)
        return out


def decode_pair(q: tuple[torch.Tensor, torch.Tensor | None], fmt: RecordFormat) -> torch.Tensor:
    """float64 values of a query pair, by way of the record decoder."""
    data, sf = q
    data = data.contiguous().view(torch.uint8)
    if sf is None:
        return data.view(torch.float8_e4m3fn).double()
    scales = sf.contiguous().view(torch.uint8).reshape(*data.shape[:-1], 4)
    return decode(torch.cat((data, scales), dim=-1), fmt, dtype=torch.float32).double()


def make_query(fmt: RecordFormat, shape: tuple[int, ...], seed: int, sf_dtype: torch.dtype = torch.int32):
    """A quantized query of lead shape `shape`: scales differ from head to head and group to group."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-3, 4, (*shape, 4), generator=generator).float()).repeat_interleave(32, dim=-1)
    x = (torch.randn(*shape, 128, generator=generator) * spread).bfloat16()
    pair = encode_query(x, fmt, sf_dtype=sf_dtype)
    return (pair.q_fp, None) if fmt is INDEX_FP8_FP32 else (pair.q_fp, pair.q_sf)


def make_records(fmt: RecordFormat, count: int, seed: int) -> torch.Tensor:
    """[count, bytes] records with their own scale each."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-4, 5, (count, 4), generator=generator).float()).repeat_interleave(32, dim=-1)
    return encode((torch.randn(count, 128, generator=generator) * spread).bfloat16(), fmt)


def make_problem(
    fmt: RecordFormat,
    lengths: list[list[int]],
    *,
    heads: int = 4,
    page_size: int = 16,
    num_pages: int | None = None,
    seed: int = 0,
    weights_dtype: torch.dtype = torch.bfloat16,
    pad: int = 0,
    sf_dtype: torch.dtype = torch.int32,
) -> Problem:
    """b x n query rows over random pages: tables are random with repeats, and columns past a context hold 2**31 - 1."""
    generator = torch.Generator().manual_seed(seed)
    lens = torch.tensor(lengths, dtype=torch.int32).reshape(len(lengths), -1)
    b, n = lens.shape
    width = max(1, -(-int(lens.max() if lens.numel() else 0) // page_size) + 1)
    num_pages = num_pages or max(2, 2 * width)
    table = torch.randint(0, num_pages, (b, width), generator=generator, dtype=torch.int32)
    used = -(-lens.amax(dim=1) // page_size) if lens.numel() else torch.zeros(b, dtype=torch.int32)
    table[torch.arange(width)[None, :] >= used[:, None]] = 2**31 - 1
    records = make_records(fmt, num_pages * page_size, seed + 1).reshape(num_pages, page_size, -1)
    weights = torch.randn(b * n, heads, generator=generator).to(weights_dtype)
    q = make_query(fmt, (b, n, heads), seed + 2, sf_dtype)
    return Problem(fmt, q, weights, records, sectioned(records, fmt, pad=pad), table, lens)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """||actual - expected|| / ||expected|| over the finite places; infinite places must be the same."""
    finite = expected.isfinite()
    assert torch.equal(actual.isfinite(), finite)
    assert torch.equal(actual.double()[~finite], expected[~finite])
    if not bool(finite.any()):
        return 0.0
    difference = (actual.double() - expected)[finite].norm()
    return float(difference / expected[finite].norm().clamp_min(1e-300))
