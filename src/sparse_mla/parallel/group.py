# SPDX-License-Identifier: Apache-2.0
"""The three collectives this package uses, and what becomes of their failures.

A rank that dies or stalls makes its peers' collective fail, at once or after the group's timeout, with a RuntimeError
whose text is the transport's. Here it becomes one CollectiveError that names the operator. Collectives come after
everything that can fail locally and before anything is written, so a failed one leaves every cache as it was. The group
is not usable afterwards: that is torch's contract, not ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from ..errors import ArgumentError, CollectiveError, NonFiniteError, SlotRangeError, StateError

__all__ = ["Failure", "all_gather", "all_reduce", "all_to_all", "rank_and_size", "require_same"]

T = TypeVar("T")


def rank_and_size(group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """This process's rank in the group and the group's size.

    Raises:
        StateError: torch.distributed is not initialised.
        ArgumentError: this process is not in the group.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise StateError(
            "parallel: torch.distributed must be initialised, got no process group; run under torchrun and call "
            "torch.distributed.init_process_group first."
        )
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ArgumentError("parallel: group must contain this process, got a group of others.")
    return rank, size


def _guarded(op: str, what: str, group: dist.ProcessGroup | None, run: Callable[[], T]) -> T:
    try:
        return run()
    except (RuntimeError, ValueError) as error:
        rank, size = rank_and_size(group)
        first = (str(error).strip().splitlines() or ["no reason given"])[0].rstrip(".")
        raise CollectiveError(
            f"{op}: {what} over {size} ranks failed on rank {rank}; a rank died or stalled past the group's "
            f"timeout, or the ranks called with different shapes: {first[:300]}."
        ) from error


def all_reduce(op: str, x: torch.Tensor, group: dist.ProcessGroup | None, maximum: bool = False) -> torch.Tensor:
    """Sum (or maximum) over the ranks, in place when x is contiguous."""
    x = x.contiguous()
    kind = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
    _guarded(op, "all_reduce", group, lambda: dist.all_reduce(x, kind, group=group))
    return x


def all_gather(op: str, x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """[size, *x.shape]: every rank's x, in rank order."""
    size = rank_and_size(group)[1]
    out = x.new_empty((size * x.numel(),))
    flat = x.contiguous().view(-1)
    # torch 2.13 renamed it and warns at the old name.
    gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    _guarded(op, "all_gather", group, lambda: gather(out, flat, group=group))
    return out.view(size, *x.shape)


def all_to_all(op: str, x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """[size, ...]: entry i is what rank i had for this rank. x [size, ...]: entry i goes to rank i."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _guarded(op, "all_to_all", group, lambda: dist.all_to_all_single(out.view(-1), x.view(-1), group=group))
    return out


class Failure:
    """What went wrong on this rank before a collective, carried through it so that no rank waits for another in vain.

    Values (a NaN score, a slot out of range) differ from rank to rank. A rank that met a bad one still takes part, with
    a code in the message; afterwards every rank raises, the one it happened on its own error, the others its class.
    """

    CODES = (NonFiniteError, SlotRangeError)

    def __init__(self) -> None:
        self.error: NonFiniteError | SlotRangeError | None = None

    def run(self, compute: Callable[[], T], otherwise: Callable[[], T]) -> T:
        """`compute()`, or `otherwise()` after remembering why not."""
        try:
            return compute()
        except self.CODES as error:
            self.error = error
            return otherwise()

    @property
    def code(self) -> int:
        """0 for none, else the place of its class in CODES, from 1."""
        if self.error is None:
            return 0
        return next(place for place, kind in enumerate(self.CODES, 1) if isinstance(self.error, kind))

    def settle(self, op: str, codes: Sequence[int]) -> None:
        """Raise on every rank if any of all ranks' codes is not 0."""
        if self.error is not None:
            raise self.error
        for rank, code in enumerate(codes):
            if code:
                kind = self.CODES[code - 1]
                raise kind(f"{op}: rank {rank} refused its part of the step; the error there names the value.")


def require_same(op: str, x: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Raise StateError unless x has the same bytes on every rank: one all-reduce of 16 bytes.

    A check for tests, and for engines that want proof in production that all ranks attend to one list. Two different
    tensors pass with probability 2^-64, not for an adversary.
    """
    raw = x.contiguous().view(-1).view(torch.uint8).to(torch.int64)
    place = torch.arange(1, raw.numel() + 1, device=x.device)
    mixed = (raw + 1) * (place * 0x5851F42D4C957F2D + 0x14057B7EF767814F)  # int64 wraps, which is what a hash wants
    mixed = (mixed ^ (mixed >> 29)) * 0x2545F4914F6CDD1D
    digest = (mixed ^ (mixed >> 32)).sum()
    highest, lowest = all_reduce(op, torch.stack([digest, ~digest]), group, maximum=True).tolist()
    if highest != ~lowest:
        raise StateError(
            f"{op}: every rank must hold the same bytes, got ranks that differ; their inputs, CPU targets or library "
            "versions are not the same."
        )
