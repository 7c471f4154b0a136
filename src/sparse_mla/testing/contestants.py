# SPDX-License-Identifier: Apache-2.0
"""What a torch user would write instead of this library: the peers of the bench.

They are given every advantage: contiguous caches, no lengths, no lse, shapes known to the compiler. Attention is
gather, decode, two batched products. Decoding comes in three forms: a table of 256 bytes, a table of 65,536 byte
pairs, and torch's own float8 cast. Products are in bfloat16, or in float32 where that is faster. `torch_` runs
eagerly, `compiled_` under torch.compile, `sdpa_` with F.scaled_dot_product_attention. The fastest is "best torch".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ..caches import KVScope
from ..formats import BF16, E2M1, E4M3FN, RecordFormat
from ..memory import empty_in_huge_pages
from .case import Problem
from .timing import Action, product_dtype

__all__ = ["CONTESTANTS", "Maker", "is_torch"]

Maker = Callable[[Any, Sequence[Problem]], Action]


def is_torch(name: str) -> bool:
    """Whether a contestant is one of the torch forms, among which "best torch" is chosen."""
    return name.startswith(("torch_", "compiled_", "sdpa_"))


# --- decoding --------------------------------------------------------------------------------------------------------


def _table(kind: str) -> torch.Tensor:
    """e4m3_1: 256 bfloat16. e4m3_2: 65,536 pairs as int32. e2m1_1: 256 pairs as int32. e2m1_2: 65,536 quadruples as
    int64."""
    number = E4M3FN if kind.startswith("e4m3") else E2M1
    values = torch.tensor(number.values, dtype=torch.float32).nan_to_num(0).to(torch.bfloat16)
    if kind == "e4m3_1":
        return values
    if number is E2M1:
        byte = torch.arange(256)
        values = torch.stack((values[byte & 15], values[byte >> 4]), dim=1)
        if kind == "e2m1_1":
            return values.view(torch.int32).flatten()
    code = torch.arange(65536)
    values = torch.stack((values[code & 255], values[code >> 8]), dim=1).flatten(1)
    return values.view(torch.int32 if number is E4M3FN else torch.int64).flatten()


# Plain globals, which the compiler takes as inputs: a table built inside the graph would be built in every call.
_TABLES = {kind: _table(kind) for kind in ("e4m3_1", "e4m3_2", "e2m1_1", "e2m1_2")}


def _power(scale: torch.Tensor) -> torch.Tensor:
    """ue8m0 bytes to bfloat16."""
    return (scale.to(torch.int32) << 23).view(torch.float32).to(torch.bfloat16)


def _scaled(values: torch.Tensor, scales: torch.Tensor, fmt: RecordFormat) -> torch.Tensor:
    factor = scales.view(torch.float8_e4m3fn).to(torch.bfloat16) if fmt.scale is E4M3FN else _power(scales)
    grouped = values.view(*values.shape[:-1], fmt.num_sf, fmt.elements_per_sf) * factor[..., None]
    return grouped.flatten(-2)


def _codes(data: torch.Tensor, fmt: RecordFormat, form: str) -> torch.Tensor:
    number = "e4m3" if fmt.element is E4M3FN else "e2m1"
    if form == "cast" and fmt.element is E4M3FN:
        return data.view(torch.float8_e4m3fn).to(torch.bfloat16)
    if form == "pair":
        index = data.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
        table = _TABLES[f"{number}_2"]
    else:  # torch has no cast of e2m1: a table of bytes, which hold two
        index, table = data.to(torch.int32), _TABLES[f"{number}_1"]
    return table.index_select(0, index.flatten()).view(torch.bfloat16).view(*data.shape[:-1], fmt.elements)


def decode_records(records: torch.Tensor, fmt: RecordFormat, form: str) -> torch.Tensor:
    """[..., record_bytes] -> [..., elements] bfloat16."""
    if fmt is BF16:
        return records.contiguous().view(torch.bfloat16)
    data, scales = records[..., : fmt.data_bytes], records[..., fmt.data_bytes :]
    return _scaled(_codes(data, fmt, form), scales.contiguous(), fmt)


# --- attention -------------------------------------------------------------------------------------------------------


def _bmm(
    q: torch.Tensor, keys: torch.Tensor, empty: torch.Tensor, scale: float, sink: torch.Tensor | None
) -> torch.Tensor:
    logits = torch.bmm(q, keys.transpose(1, 2)).float() * scale
    logits = logits.masked_fill(empty[:, None, :], -torch.inf)
    if sink is None:
        return torch.bmm(torch.softmax(logits, dim=-1).to(keys.dtype), keys).to(torch.bfloat16)
    column = sink[None, :, None].expand(logits.shape[0], -1, 1)
    weights = torch.softmax(torch.cat((logits, column), dim=-1), dim=-1)[..., :-1]
    return torch.bmm(weights.to(keys.dtype), keys).to(torch.bfloat16)


def _sdpa(
    q: torch.Tensor, keys: torch.Tensor, empty: torch.Tensor, scale: float, sink: torch.Tensor | None
) -> torch.Tensor:
    # One batch element per row, the heads as its queries; it has no sink, which is to its advantage.
    mask = ~empty[:, None, None, :].expand(-1, 1, q.shape[1], -1)
    kv = keys[:, None]
    return F.scaled_dot_product_attention(q[:, None], kv, kv, attn_mask=mask, scale=scale)[:, 0].to(torch.bfloat16)


ROWS_AT_ONCE = 256  # a user would chunk as well: 256 rows x 640 keys are 168 MB of decoded keys


def _decode_attention(form: str, attention: str, compiled: bool) -> Maker:
    attend = _sdpa if attention == "sdpa" else _bmm

    def make(case: Any, problems: Sequence[Problem]) -> Action:
        formats = [s.pages.format for s in case.scopes]
        dtype = product_dtype()

        def one(q: torch.Tensor, caches: list[torch.Tensor], lists: list[torch.Tensor], scale: float, sink: Any) -> Any:
            keys = []
            for cache_rows, slots, fmt in zip(caches, lists, formats, strict=True):
                records = cache_rows.index_select(0, slots.clamp(min=0).flatten())
                keys.append(decode_records(records, fmt, form).view(*slots.shape, fmt.elements))
            empty = torch.cat(lists, dim=1) < 0
            return attend(q.to(dtype), torch.cat(keys, dim=1).to(dtype), empty, scale, sink)

        run = torch.compile(one, dynamic=False, fullgraph=True) if compiled else one
        prepared = []
        for problem in problems:
            given = problem.arguments
            q = given["q"].flatten(0, 1)
            lists = [s.indices.flatten(0, 1) for s in given["scopes"]]
            chunks = [
                (q[i : i + ROWS_AT_ONCE], [x[i : i + ROWS_AT_ONCE] for x in lists])
                for i in range(0, len(q), ROWS_AT_ONCE)
            ]
            prepared.append((chunks, problem.truth["rows"], given["softmax_scale"], given["attn_sink"]))

        def action(number: int) -> object:
            chunks, caches, scale, sink = prepared[number % len(prepared)]
            return [run(q, caches, lists, scale, sink) for q, lists in chunks]

        return action

    return make


def _prefill_attention(attention: str, compiled: bool) -> Maker:
    attend = _sdpa if attention == "sdpa" else _bmm

    def make(case: Any, problems: Sequence[Problem]) -> Action:
        dtype = product_dtype()

        def one(q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, scale: float, sink: Any) -> Any:
            empty = (indices < 0) | (indices >= kv.shape[0])
            keys = kv.index_select(0, torch.where(empty, 0, indices).flatten()).view(*indices.shape, kv.shape[-1])
            return attend(q.to(dtype), keys.to(dtype), empty, scale, sink)

        run = torch.compile(one, dynamic=False, fullgraph=True) if compiled else one

        def action(number: int) -> object:
            given = problems[number % len(problems)].arguments
            q, kv, indices = given["q"], given["kv"][:, 0], given["indices"][:, 0]
            scale, sink = given["softmax_scale"], given["attn_sink"]
            steps = range(0, q.shape[0], ROWS_AT_ONCE)
            return [run(q[i : i + ROWS_AT_ONCE], kv, indices[i : i + ROWS_AT_ONCE], scale, sink) for i in steps]

        return action

    return make


# --- index scores ----------------------------------------------------------------------------------------------------


def _index_scores(form: str, compiled: bool, select: bool = False) -> Maker:
    def make(case: Any, problems: Sequence[Problem]) -> Action:
        fmt: RecordFormat = case.format
        page: int = case.page_size
        dtype = product_dtype()

        def one(
            q: torch.Tensor,
            q_sf: torch.Tensor,
            pool: torch.Tensor,
            table: torch.Tensor,
            weights: torch.Tensor,
            columns: int,
        ) -> torch.Tensor:
            b, n, h = q.shape[:3]
            pages = pool.index_select(0, table.flatten())  # [b * w, page * record]
            data = pages[:, : page * fmt.data_bytes].reshape(-1, page, fmt.data_bytes)
            scales = pages[:, page * fmt.data_bytes :].reshape(-1, page, fmt.scale_bytes)
            keys = _scaled(_codes(data, fmt, form), scales.contiguous(), fmt).view(b, -1, fmt.elements)[:, :columns]
            codes = _codes(q.view(torch.uint8), fmt, form)
            queries = _scaled(codes, q_sf.contiguous(), fmt).view(b, n * h, fmt.elements)
            dots = torch.relu(torch.bmm(queries.to(dtype), keys.to(dtype).transpose(1, 2))).view(b * n, h, -1)
            return torch.bmm(weights[:, None, :].to(dtype), dots)[:, 0].to(torch.bfloat16)

        run = torch.compile(one, dynamic=False, fullgraph=True) if compiled else one
        prepared = []
        for problem in problems:
            given = problem.arguments
            q, keys = given["q"], given["keys"]
            columns = int(keys.context_lens.max())
            table = keys.block_table[:, : -(-columns // page)].contiguous()
            q_sf = q.q_sf.view(torch.uint8).view(*q.q_fp.shape[:3], 4)
            prepared.append((q.q_fp.view(torch.uint8), q_sf, problem.truth["pool"], table, given["weights"], columns))

        def action(number: int) -> object:
            arguments = prepared[number % len(prepared)]
            logits = run(*arguments)
            return torch.topk(logits, case.k, dim=-1).indices.sort(dim=-1) if select else logits

        return action

    return make


def _torch_topk(case: Any, problems: Sequence[Problem]) -> Action:
    def action(number: int) -> object:
        logits = problems[number % len(problems)].arguments["logits"]
        return torch.topk(logits, case.k, dim=-1).indices.sort(dim=-1)

    return action


def _scores_alone(case: Any, problems: Sequence[Problem]) -> Action:
    """The scoring part of `index_topk` by this library's fastest backend, without a selection."""
    from ..ops.index_logits import index_logits

    def action(number: int) -> object:
        given = problems[number % len(problems)].arguments
        return index_logits(given["q"], given["keys"], given["weights"], candidates=given["candidates"])

    return action


# --- records ---------------------------------------------------------------------------------------------------------


def quantize(x: torch.Tensor, fmt: RecordFormat) -> torch.Tensor:
    """bfloat16 [n, elements] to records, as one writes it in torch: float32 math, torch's float8 cast, a bucket
    search for e2m1."""
    if fmt is BF16:
        return x.view(torch.uint8)
    groups = x.float().view(-1, fmt.num_sf, fmt.elements_per_sf)
    amax = groups.abs().amax(dim=-1)
    if fmt.scale is E4M3FN:
        scale = (amax / 6).clamp(2.0**-9, 448).to(torch.float8_e4m3fn)
        stored, factor = scale.view(torch.uint8), scale.float()
    else:
        largest = 448.0 if fmt.element is E4M3FN else 6.0
        exponent = torch.ceil(torch.log2(amax.clamp(min=1e-4) / largest))
        stored, factor = (exponent + 127).to(torch.uint8), torch.exp2(exponent)
    quotient = (groups / factor[..., None]).flatten(-2)
    if fmt.element is E4M3FN:
        return torch.cat((quotient.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8), stored), dim=-1)
    bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    codes = torch.bucketize(quotient.abs(), bounds).to(torch.uint8) | (torch.signbit(quotient).to(torch.uint8) << 3)
    return torch.cat((codes[..., 0::2] | (codes[..., 1::2] << 4), stored), dim=-1)


def _store(compiled: bool) -> Maker:
    def make(case: Any, problems: Sequence[Problem]) -> Action:
        fmt: RecordFormat = case.pages.format

        def one(x: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
            rows.index_copy_(0, slots, quantize(x, fmt))

        run = torch.compile(one, dynamic=False, fullgraph=True) if compiled else one

        def action(number: int) -> object:
            problem = problems[number % len(problems)]
            return run(problem.truth["x"], problem.truth["slots"], problem.truth["rows"])

        return action

    return make


def _load(form: str, compiled: bool) -> Maker:
    def make(case: Any, problems: Sequence[Problem]) -> Action:
        fmt: RecordFormat = case.pages.format

        def one(slots: torch.Tensor, rows: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
            values = decode_records(rows.index_select(0, slots), fmt, form)
            return values if out is None else out.copy_(values)

        run = torch.compile(one, dynamic=False, fullgraph=True) if compiled else one

        def action(number: int) -> object:
            problem = problems[number % len(problems)]
            return run(problem.truth["slots"], problem.truth["rows"], problem.arguments.get("out"))

        return action

    return make


def _copy_to_new(case: Any, problems: Sequence[Problem]) -> Action:
    """As many bytes as the call reads and writes, copied from memory in order to memory that is new like its result:
    the stream roof of a call that allocates."""
    source = problems[0].truth["rows"].view(-1)[: case.nbytes // 2]

    def action(number: int) -> object:
        return empty_in_huge_pages(source.shape, source.dtype).copy_(source)

    return action


# --- pooling, rope, merging ------------------------------------------------------------------------------------------


def _softmax_pool(compiled: bool) -> Maker:
    def make(case: Any, problems: Sequence[Problem]) -> Action:
        def one(score: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
            return (torch.softmax(score, dim=1) * latent).sum(dim=1).to(torch.bfloat16)

        run = torch.compile(one, dynamic=False, fullgraph=True) if compiled else one

        def action(number: int) -> object:
            given = problems[number % len(problems)].arguments
            return run(given["score"], given["latent"])

        return action

    return make


def _rope(compiled: bool) -> Maker:
    def make(case: Any, problems: Sequence[Problem]) -> Action:
        def one(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            row = table[positions][:, None, :]
            cos, sin = row[..., :32], row[..., 32:]
            part = x[..., -64:].float()
            even, odd = part[..., 0::2], part[..., 1::2]
            turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
            return torch.cat((x[..., :-64], turned.to(x.dtype)), dim=-1)

        run = torch.compile(one, dynamic=False, fullgraph=True) if compiled else one

        def action(number: int) -> object:
            given = problems[number % len(problems)].arguments
            return run(given["x"], given["positions"], given["table"])

        return action

    return make


def _merge(compiled: bool) -> Maker:
    def make(case: Any, problems: Sequence[Problem]) -> Action:
        def one(outs: list[torch.Tensor], lses: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            stacked = torch.stack(lses)
            lse = torch.logsumexp(stacked, dim=0)
            share = (stacked - lse).exp().transpose(2, 3)[..., None]
            return (share * torch.stack(outs)).sum(dim=0).to(torch.bfloat16), lse

        run = torch.compile(one, dynamic=False, fullgraph=True) if compiled else one

        def action(number: int) -> object:
            given = problems[number % len(problems)].arguments
            return run(given["outs"], given["lses"])

        return action

    return make


def _rows_apart(case: Any, problems: Sequence[Problem]) -> Action:
    """The same rows as sequences of their own, in one call: they share nothing, and no call more is made."""
    from ..ops.sparse_decode import sparse_decode

    prepared = []
    for problem in problems:
        given = problem.arguments
        scopes = [KVScope(s.cache, s.indices.flatten(0, 1)[:, None]) for s in given["scopes"]]
        options = {name: given[name] for name in ("softmax_scale", "attn_sink", "out_dtype")}
        prepared.append((given["q"].flatten(0, 1)[:, None], scopes, options))

    def action(number: int) -> object:
        q, scopes, options = prepared[number % len(prepared)]
        return sparse_decode(q, scopes, **options)

    return action


CONTESTANTS: dict[str, dict[str, Maker]] = {
    "sparse_decode": {
        "torch_byte": _decode_attention("byte", "bmm", False),
        "torch_pair": _decode_attention("pair", "bmm", False),
        "torch_cast": _decode_attention("cast", "bmm", False),
        "sdpa_pair": _decode_attention("pair", "sdpa", False),
        "compiled_byte": _decode_attention("byte", "bmm", True),
        "compiled_pair": _decode_attention("pair", "bmm", True),
        "compiled_cast": _decode_attention("cast", "bmm", True),
        "rows_apart": _rows_apart,
    },
    "sparse_prefill": {
        "torch_bmm": _prefill_attention("bmm", False),
        "sdpa_bmm": _prefill_attention("sdpa", False),
        "compiled_bmm": _prefill_attention("bmm", True),
    },
    "index_logits": {
        "torch_pair": _index_scores("pair", False),
        "torch_cast": _index_scores("cast", False),
        "compiled_pair": _index_scores("pair", True),
        "compiled_cast": _index_scores("cast", True),
    },
    "index_topk": {
        "torch_pair": _index_scores("pair", False, select=True),
        "compiled_pair": _index_scores("pair", True, select=True),
        "scores_alone": _scores_alone,
    },
    "topk": {"torch_topk": _torch_topk},
    "store_records": {"torch_quantize": _store(False), "compiled_quantize": _store(True)},
    "load_records": {
        "torch_pair": _load("pair", False),
        "torch_cast": _load("cast", False),
        "compiled_pair": _load("pair", True),
        "compiled_cast": _load("cast", True),
        "copy_to_new": _copy_to_new,
    },
    "softmax_pool": {"torch_softmax": _softmax_pool(False), "compiled_softmax": _softmax_pool(True)},
    "rope": {"torch_rope": _rope(False), "compiled_rope": _rope(True)},
    "merge_partials": {"torch_logsumexp": _merge(False), "compiled_logsumexp": _merge(True)},
}
