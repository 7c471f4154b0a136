# SPDX-License-Identifier: Apache-2.0
"""Launch of `compress`: the ring of recent rows in torch, the pooling in the kernel of `softmax_pool`.

Nothing depends on values inside the graph: every row is pooled and what closes no group becomes 0; a row that must not
be stored is pointed at one that is, with the same numbers, or at what already stands there.
"""

from __future__ import annotations

import torch

from ..dispatch import Limits
from ..ops.compress import COMPRESS, LATENT, SCORE, CompressCall, check_decode_step, prefill_plan
from ..ops.softmax_pool import POOL_DTYPES
from ..ops.sparse_decode import checks_on
from . import launch
from .softmax_pool import POOL_STEP, pool_channels
from .torch_forms import live_or_first


def _store_rows(
    state: torch.Tensor, live: torch.Tensor, slot: torch.Tensor, place: torch.Tensor, rows: torch.Tensor
) -> None:
    """state[slot, place] = rows [n, 2, D] for live rows; places of live rows are distinct."""
    row, some = live_or_first(live)
    slot, place = torch.where(some, slot[row], 0), torch.where(some, place[row], 0)
    state[slot, place] = torch.where(some, rows[row], state[slot, place])


def _decode(call: CompressCall, backend: str) -> tuple[torch.Tensor, ...]:
    state, ratio = call.state.data, call.state.ratio
    slots, lens = call.state_slots.to(torch.int32), call.context_lens.to(torch.int32)
    if launch.checks_now(checks_on()):
        check_decode_step(
            call.state_slots.to(torch.int64),
            call.context_lens.to(torch.int64),
            call.state.num_slots,
            ratio,
            call.state.max_rows,
        )
    live = slots >= 0
    ring = state.shape[1]
    slot = torch.where(live, slots, 0)
    rows = torch.stack((call.score, call.latent), dim=1)
    _store_rows(state, live, slot, torch.where(live, (lens - 1) % ring, 0), rows)
    closes = live & (lens % ratio == 0)
    positions = torch.where(closes, lens - ratio, 0)
    place = (positions.unsqueeze(1) + torch.arange(ratio, dtype=torch.int32, device=call.device)) % ring
    kept = state[slot.unsqueeze(1), place]  # [n, R, 2, D]
    pooled = pool_channels(kept[:, :, SCORE], kept[:, :, LATENT], call.out_dtype, backend)
    number = torch.arange(slots.shape[0], dtype=torch.int32, device=call.device)
    return torch.where(closes.unsqueeze(1), pooled, 0.0), closes, positions, torch.where(live, number, -1)


def _prefill(call: CompressCall, cu_seqlens_q: torch.Tensor, backend: str) -> tuple[torch.Tensor, ...]:
    state, ratio, num_out = call.state.data, call.state.ratio, call.num_out
    slots, lens = call.state_slots.to(torch.int32), call.context_lens.to(torch.int32)
    cu = cu_seqlens_q.to(torch.int32)
    n, ring, device = call.num_rows, state.shape[1], call.device
    if launch.checks_now(checks_on()):
        prefill_plan(
            call.state_slots.to(torch.int64),
            call.context_lens.to(torch.int64),
            cu_seqlens_q.to(torch.int64),
            call.state.num_slots,
            n,
            ratio,
            num_out,
        )
    begin, length = cu[:-1], cu[1:] - cu[:-1]
    history = lens - length
    first = torch.div(history, ratio, rounding_mode="floor")
    closed = torch.div(lens, ratio, rounding_mode="floor") - first
    owned = closed.clamp(min=1)
    after = owned.cumsum(dim=0, dtype=torch.int32)
    number = torch.arange(num_out, dtype=torch.int32, device=device)
    sequence = (number.unsqueeze(1) >= after).sum(dim=1, dtype=torch.int32)
    known = sequence < slots.shape[0]
    owner = torch.where(known, sequence, 0)
    nth = number - (after - owned)[owner]
    closes = known & (nth < closed[owner])
    positions = torch.where(closes, (first[owner] + nth) * ratio, 0)

    within = torch.arange(ratio, dtype=torch.int32, device=device)
    position = positions.unsqueeze(1) + within  # [N, R]
    is_new = (position >= history[owner].unsqueeze(1)) | ~closes.unsqueeze(1)
    new_row = begin[owner].unsqueeze(1) + position - history[owner].unsqueeze(1)
    new_row = torch.where(is_new & closes.unsqueeze(1), new_row, 0)
    rows = torch.stack((call.score, call.latent), dim=1)  # [n, 2, D]
    old = state[slots[owner].clamp(min=0).unsqueeze(1), position % ring]
    source = torch.where(is_new[:, :, None, None], rows[new_row], old) if n else old
    pooled = pool_channels(source[:, :, SCORE], source[:, :, LATENT], call.out_dtype, backend)

    back = torch.arange(ring, dtype=torch.int32, device=device)  # the last rows of each sequence, newest first
    live = ((back < length.unsqueeze(1)) & (slots >= 0).unsqueeze(1)).reshape(-1)
    slot = slots.clamp(min=0).unsqueeze(1).expand(-1, ring).reshape(-1)
    place = torch.where(live, (lens.unsqueeze(1) - 1 - back).reshape(-1) % ring, 0)
    from_row = torch.where(live, (begin + length).unsqueeze(1).sub(1 + back).reshape(-1), 0)
    if n:
        _store_rows(state, live, slot, place, rows[from_row])
    return torch.where(closes.unsqueeze(1), pooled, 0.0), closes, positions, torch.where(known, sequence, -1)


@COMPRESS.impl("neuron", "simulated", limits=Limits(out_dtypes=POOL_DTYPES), tolerance=POOL_STEP)
def _launch(call: CompressCall, backend: str) -> tuple[torch.Tensor, ...]:
    if call.num_out == 0:
        d = call.score.shape[1]
        empty = torch.zeros((0,), dtype=torch.int32, device=call.device)
        return call.score.new_empty((0, d), dtype=call.out_dtype), empty.to(torch.bool), empty, empty
    if call.cu_seqlens_q is None:
        return _decode(call, backend)
    return _prefill(call, call.cu_seqlens_q, backend)
