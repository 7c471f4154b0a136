# SPDX-License-Identifier: Apache-2.0
"""Launch of `candidate_blocks`: block maxima and their selection in one kernel call, that of `topk`.

The kernel sees -inf in every column past a row's length and +inf in the row's last valid column. A block of nothing but
-inf may be selected as long as it is valid; blocks past the length look the same, but their numbers are higher, so they
lose every tie, and what is selected of them is cut off here.
"""

from __future__ import annotations

import torch

from ..dispatch import EXACT, Limits
from ..ops.candidate_blocks import CANDIDATE_BLOCKS, LARGEST_SCORE, CandidateBlocksCall
from ..ops.sparse_decode import checks_on
from ..ops.topk import check_bounds, raise_nan
from . import launch
from .topk import NEGATIVE_INFINITY, bfloat16_refusal, select_rows


def _rule(call: CandidateBlocksCall) -> list[str]:
    return bfloat16_refusal(call.logits, call.logits.shape[1])


def _check(call: CandidateBlocksCall) -> None:
    if not launch.checks_now(checks_on()):
        return
    n = call.logits.shape[1]
    check_bounds("candidate_blocks", "lengths", call.lengths, n, "n")
    if call.on_nan == "raise":
        inside = torch.arange(n, device=call.device) < call.lengths.unsqueeze(1)
        for row in (call.logits.isnan() & inside).any(dim=1).nonzero()[:, 0].tolist():
            raise_nan("candidate_blocks", call.logits[row, : int(call.lengths[row])], row, 0)


@CANDIDATE_BLOCKS.impl("neuron", "simulated", limits=Limits(out_dtypes=None), tolerance=EXACT, rule=_rule)
def _launch(call: CandidateBlocksCall, backend: str) -> torch.Tensor:
    """Inside a graph, and with SPARSE_MLA_CHECKS=0, a NaN counts as -inf and is never an error."""
    _check(call)
    rows, n = call.logits.shape
    if rows == 0 or n == 0 or call.k == 0:
        return torch.full((rows, call.k), -1, dtype=torch.int32, device=call.device)
    column = torch.arange(n, dtype=torch.int32, device=call.device).unsqueeze(0)
    length = call.lengths.unsqueeze(1)
    values = torch.where(call.logits == call.logits, call.logits.clamp(max=LARGEST_SCORE), -torch.inf)
    values = torch.where(column < length, values, -torch.inf)
    values = torch.where(column == length - 1, torch.inf, values)
    blocks = select_rows(values, call.k, NEGATIVE_INFINITY, call.block_size, backend)
    return torch.where(blocks * call.block_size < length, blocks, -1)
