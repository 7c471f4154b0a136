# SPDX-License-Identifier: Apache-2.0
"""When everything would happen: a dependency-scheduled estimate over engines and DMA queues.

Each engine runs its instructions in program order; a DMA is issued by its queue and then shares a pool of 16 engines.
An instruction starts when its engine is free and its operands are ready (read after write, write after read, write
after write, by byte range). Tiles without an address get a fresh place while capacity lasts and afterwards the one that
was released first, so eight PSUM banks stay eight.

The order is the written one: a compiler may reorder, so the total is an upper bound for the order given; the busiest
engine's sum is a lower bound. Both are estimates from documented figures, never measurements.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from .core import DMA, GPSIMD, SCALAR, SYNC, TENSOR, VECTOR, Operand, Record
from .costs import REGISTER_US, STORE_RING, Clocks, by_generation, cycles, dma_issue_us, dma_work_us
from .target import Target

__all__ = ["ENGINES", "Estimate", "Event", "Step", "estimate"]

# "sync" and "sync-store" are the rings that issue loads and stores, "dma" the pool of engines that move the bytes
ENGINES = (TENSOR, VECTOR, SCALAR, GPSIMD, SYNC, STORE_RING, DMA)
PE_LOAD_MIN = 32  # cycles of the fastest stationary load
PE_ISSUE = 64  # cycles between the starts of two small matmuls


@dataclass(slots=True)
class Event:
    """One bar of the timeline."""

    core: int
    row: str  # engine or queue
    opcode: str
    start_us: float
    end_us: float
    record: int  # position in the launch's records
    source: str


@dataclass(slots=True)
class Step:
    """One step of the critical path: what ran, from when to when, and what it had waited for."""

    source: str
    opcode: str
    row: str
    start_us: float
    end_us: float
    waited_for: str  # "engine", "data", "buffer", "dma" (the engine pool was taken) or "start"


@dataclass
class Estimate:
    """The estimated time of one launch. Every figure is from the cost model of `target`, none from a device."""

    target: str
    total_us: float
    boundary_us: float  # what one kernel inside a compiled graph costs besides its body
    busy_us: list[dict[str, float]]  # per core and engine; "dma" is the engine pool
    hbm_read_bytes: int
    hbm_written_bytes: int
    descriptors: int
    instructions: int
    critical_path: list[Step]
    events: list[Event] = field(repr=False, default_factory=list)

    @property
    def utilisation(self) -> list[dict[str, float]]:
        """Busy share of the total, per core and engine."""
        return [{e: (us / self.total_us if self.total_us else 0.0) for e, us in core.items()} for core in self.busy_us]

    @property
    def bound_by(self) -> str:
        """The engine with the largest busy time on the slowest core; "latency" when none is busy half of the time."""
        core = max(self.busy_us, key=lambda busy: max(busy.values(), default=0.0))
        engine = max(core, key=lambda e: core[e])
        return engine if core[engine] >= 0.5 * self.total_us else "latency"

    @property
    def lower_bound_us(self) -> float:
        """Sum of the busiest engine: no order of these instructions is faster in this model."""
        return max(max(core.values(), default=0.0) for core in self.busy_us)


def _overlap(a: Operand, b: Operand) -> bool:
    """Whether two operands of one tensor share bytes. Regular patterns of one period are compared inside the period, so
    that stores to neighbouring columns do not wait for each other."""
    if a.p0 >= b.p1 or b.p0 >= a.p1 or a.b0 >= b.b1 or b.b0 >= a.b1:
        return False
    step = a.step
    if step and step == b.step:
        x, y = a.b0 % step, b.b0 % step
        if x + a.span <= step and y + b.span <= step:
            return x < y + b.span and y < x + a.span
    return True


def _covers(a: Operand, b: Operand) -> bool:
    """Whether `a` surely touches every byte that `b` touches."""
    if a.contiguous:
        return a.p0 <= b.p0 and b.p1 <= a.p1 and a.b0 <= b.b0 and b.b1 <= a.b1
    same = a.b0 == b.b0 and a.b1 == b.b1 and a.step == b.step and a.span == b.span and a.run_bytes == b.run_bytes
    return same and a.p0 <= b.p0 and b.p1 <= a.p1


class _Pool:
    """The DMA engines of a core as one capacity. Transfers take what is idle from their start on: one that waits for
    its data does not hold up a later one that has its own."""

    KEPT = 4096

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.ends: list[float] = []

    def take(self, when: float, share: float) -> tuple[float, float]:
        """(first, last moment) of `share` microseconds of the whole pool, from `when` on."""
        starts, ends = self.starts, self.ends
        if share <= 0.0:
            return when, when
        first_index = i = bisect_right(ends, when)
        begin, at, left = -1.0, when, share
        while i < len(starts):
            idle = starts[i] - at
            if idle > 0.0:
                begin = at if begin < 0.0 else begin
                if idle >= left:
                    break
                left -= idle
            at = ends[i]
            i += 1
        begin = at if begin < 0.0 else begin
        end = at + left
        # [begin, end) is busy without a hole now: one interval replaces all it touches
        low = bisect_left(ends, begin, first_index and first_index - 1)
        high = bisect_right(starts, end)
        if low < high:
            starts[low:high] = [min(starts[low], begin)]
            ends[low:high] = [max(ends[high - 1], end)]
        else:
            starts.insert(low, begin)
            ends.insert(low, end)
        if len(starts) > self.KEPT:  # nothing will be placed before intervals that old
            del starts[: self.KEPT // 2], ends[: self.KEPT // 2]
        return begin, end


class _Buffer:
    """What the scheduler knows of one tensor: who wrote and read which bytes until when."""

    __slots__ = (
        "first", "last", "last_write", "memory", "nbytes", "placed", "port", "reads", "release", "writes",
    )  # fmt: skip

    def __init__(self, operand: Operand) -> None:
        self.memory = operand.memory
        self.nbytes = 0
        self.first = -1
        self.last = -1
        self.last_write = -1
        self.placed = operand.address is not None
        self.release = 0.0  # when its last user so far is done
        self.port = (0.0, -1)  # until when Vector or Scalar uses this PSUM tile, and which record
        self.writes: list[tuple[Operand, float, int, bool]] = []  # operand, readable from, record, by the PE array
        self.reads: list[tuple[Operand, float, int]] = []


class _Memory:
    """Capacity of one on-chip memory: dead tiles hand their bytes on, the earliest released first."""

    def __init__(self, capacity: int, bank: int) -> None:
        self.free = capacity
        self.bank = bank
        self.live: list[tuple[int, int, _Buffer]] = []  # last use, bytes, buffer
        self.dead: list[tuple[float, int, int]] = []  # release time, bytes, record of the last use

    def take(self, buffer: _Buffer, now: int) -> tuple[float, int]:
        """(time the bytes are free, record that freed them or -1) for a tile first used by record `now`."""
        size = buffer.nbytes
        if self.bank and size >= self.bank:
            size = -(-size // self.bank) * self.bank
        kept = []
        for last, nbytes, other in self.live:
            if last < now:
                self.dead.append((other.release, nbytes, last))
            else:
                kept.append((last, nbytes, other))
        self.live = [*kept, (buffer.last, size, buffer)]
        ready, freed_by = 0.0, -1
        if self.free < size:
            self.dead.sort(reverse=True)
            while self.free < size and self.dead:
                ready, nbytes, freed_by = self.dead.pop()
                self.free += nbytes
        self.free -= size  # negative where capacity is exceeded, which is judged elsewhere
        return ready, freed_by


class _Core:
    """The schedule of one physical core."""

    def __init__(self, core: int, target: Target, clocks: Clocks) -> None:
        self.core = core
        self.gen = target.gen
        self.clocks = clocks
        self.free: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, -1))  # engine or ring -> (time, record)
        self.busy: dict[str, float] = dict.fromkeys(ENGINES, 0.0)
        self.pool = _Pool()
        self.pool_record = -1  # the transfer that took the pool last
        self.quadrant = target.quadrant
        n = target.pmax // target.quadrant
        self.tiles = [[0.0] * n for _ in range(n)]  # until when each PE quadrant is taken by a small matmul
        self.pe_whole = 0.0  # until when by one that fills the array
        self.pe_any = 0.0  # the latest of all these
        self.pe_issue = 0.0
        self.pe_moving = 0  # moving columns of the previous matmul
        self.memory = {
            "sbuf": _Memory(target.usable_sbuf_bytes, 0),
            "psum": _Memory(target.psum_bytes, target.psum_bank_fmax_bytes),
        }


class _Scheduler:
    def __init__(self, records: list[Record], target: Target, cores: int) -> None:
        self.records = records
        self.clocks = by_generation(target.gen)
        self.cores = [_Core(c, target, self.clocks) for c in range(cores)]
        self.buffers: dict[int, _Buffer] = {}
        self.start = [0.0] * len(records)
        self.end = [0.0] * len(records)
        self.rows = [""] * len(records)
        self.cause: list[tuple[int, str]] = [(-1, "start")] * len(records)
        self.events: list[Event] = []
        self._survey()

    def _survey(self) -> None:
        for i, r in enumerate(self.records):
            for k, group in enumerate((r.reads, r.writes)):
                for o in group:
                    b = self.buffers.get(o.ident)
                    if b is None:
                        b = self.buffers[o.ident] = _Buffer(o)
                    if b.first < 0:
                        b.first = i
                    b.last = i
                    if k:
                        b.last_write = i
                    if o.b1 > b.nbytes:
                        b.nbytes = o.b1

    def run(self) -> None:
        """Cores are independent between the points where they meet."""
        queues: list[list[int]] = [[] for _ in self.cores]
        for i, r in enumerate(self.records):
            queues[r.core].append(i)
        at = [0] * len(queues)
        while True:
            meeting: list[int] = []
            for c, queue in enumerate(queues):
                while at[c] < len(queue):
                    i = queue[at[c]]
                    if self.records[i].opcode in ("core_barrier", "sendrecv"):
                        meeting.append(i)
                        break
                    self.place(i)
                    at[c] += 1
            if not meeting:
                return
            self.meet(meeting)
            for i in meeting:
                at[self.records[i].core] += 1

    # -- dependencies --------------------------------------------------------------------------------------------

    def ready(self, i: int, r: Record, core: _Core) -> tuple[float, int, str]:
        """When operands and places allow record i to start, and which record that is owed to."""
        when, owed, why = 0.0, -1, "start"
        by_pe = r.engine == TENSOR
        reader = r.engine in (VECTOR, SCALAR)
        for o in r.reads:
            b = self.buffers[o.ident]
            for w, t, j, _ in b.writes:
                if t > when and _overlap(o, w):
                    when, owed, why = t, j, "data"
            if reader and b.memory == "psum" and b.port[0] > when:
                (when, owed), why = b.port, "data"  # one engine at a time in a bank
        for o in r.writes:
            b = self.buffers[o.ident]
            if b.first == i and not b.placed and b.memory in core.memory:
                t, j = core.memory[b.memory].take(b, i)
                if t > when:
                    when, owed, why = t, j, "buffer"
            for w, t, j, pe in b.writes:
                if by_pe and pe:
                    continue  # matmuls of one chain follow each other without waiting for results
                if t > when and _overlap(o, w):
                    when, owed, why = t, j, "data"
            for w, t, j in b.reads:
                if t > when and _overlap(o, w):
                    when, owed, why = t, j, "data"
        return when, owed, why

    def commit(self, i: int, r: Record, done: float, result: float) -> None:
        """Operands are read until `done`; what was written is readable from `result`."""
        by_pe = r.engine == TENSOR
        for o in r.reads:
            b = self.buffers[o.ident]
            if done > b.release:
                b.release = done
            if b.last_write > i:
                b.reads.append((o, done, i))
            if b.memory == "psum" and r.engine in (VECTOR, SCALAR) and done > b.port[0]:
                b.port = (done, i)
        for o in r.writes:
            b = self.buffers[o.ident]
            if result > b.release:
                b.release = result
            if b.writes and (o.memory != "hbm" or len(b.writes) < 64):
                b.writes = [w for w in b.writes if not _covers(o, w[0])]
            if b.reads:
                b.reads = [w for w in b.reads if not _covers(o, w[0])]
            b.writes.append((o, result, i, by_pe))

    def note(self, i: int, r: Record, row: str, start: float, end: float) -> None:
        self.events.append(Event(r.core, row, r.opcode, start, end, i, ""))

    # -- placing -------------------------------------------------------------------------------------------------

    def place(self, i: int) -> None:
        r = self.records[i]
        core = self.cores[r.core]
        if r.engine == DMA:
            self.place_dma(i, r, core)
        elif r.engine == TENSOR:
            self.place_tensor(i, r, core)
        else:
            when, owed, why = self.ready(i, r, core)
            free, previous = core.free[r.engine]
            start, self.cause[i] = (free, (previous, "engine")) if free >= when else (when, (owed, why))
            if r.engine == SYNC:
                busy = REGISTER_US
            else:
                busy = cycles(r, core.gen) / (self.clocks.ghz[r.engine] * 1000.0)
            end = start + busy
            core.free[r.engine] = (end, i)
            core.busy[r.engine] += busy
            self.finish(i, r, r.engine, start, end, end + self.clocks.result_us)

    def finish(self, i: int, r: Record, row: str, start: float, end: float, result: float) -> None:
        self.start[i], self.end[i], self.rows[i] = start, result, row
        self.commit(i, r, end, result)
        self.note(i, r, row, start, end)

    def place_tensor(self, i: int, r: Record, core: _Core) -> None:
        ghz = self.clocks.ghz[TENSOR] * 1000.0
        when, owed, why = self.ready(i, r, core)
        q, n = core.quadrant, len(core.tiles)
        row, column, rows, columns = r.detail.get("tile") or (0, 0, n * q, n * q)
        whole = rows >= n * q and columns >= n * q
        row0, row1 = row // q, min(n, -(-(row + rows) // q))
        column0, column1 = column // q, min(n, -(-(column + columns) // q))
        if whole:
            array = core.pe_any
        else:
            array = max(max(core.tiles[a][column0:column1]) for a in range(row0, row1))
            array = max(array, core.pe_whole)
        stationary = r.detail.get("m", n * q)
        load = max(0, max(PE_LOAD_MIN, stationary) - core.pe_moving) / ghz
        free = max(array, core.pe_issue) + load
        previous = core.free[TENSOR][1]
        start, self.cause[i] = (free, (previous, "engine")) if free >= when else (when, (owed, why))
        busy = cycles(r, core.gen) / ghz
        end = start + busy
        core.pe_any = max(core.pe_any, end)
        if whole:
            core.pe_whole = end
        else:
            for a in range(row0, row1):
                core.tiles[a][column0:column1] = [end] * (column1 - column0)
        core.pe_issue = start + min(busy, PE_ISSUE / ghz)
        core.pe_moving = r.detail.get("n", r.elements)
        core.free[TENSOR] = (end, i)
        share = (row1 - row0) * (column1 - column0) / (n * n)
        core.busy[TENSOR] += busy * share
        self.finish(i, r, TENSOR, start, end, end + self.clocks.result_us)

    def place_dma(self, i: int, r: Record, core: _Core) -> None:
        clocks = self.clocks
        when, owed, why = self.ready(i, r, core)
        queue, issue = dma_issue_us(r, clocks, core.gen)
        free, previous = core.free[queue]
        start, self.cause[i] = (free, (previous, "engine")) if free >= when else (when, (owed, why))
        issued = start + issue
        core.free[queue] = (issued, i)
        core.busy[queue] += issue
        alone, share = dma_work_us(r, clocks)
        begin, last = core.pool.take(issued + clocks.dma_start_us, share)
        if begin > issued + clocks.dma_start_us and core.pool_record >= 0:
            self.cause[i] = (core.pool_record, "dma")
        core.pool_record = i
        core.busy[DMA] += share
        end = max(begin + alone, last)
        if queue in (GPSIMD, SCALAR):
            self.note(i, r, queue, start, issued)
        self.start[i], self.end[i], self.rows[i] = start, end + clocks.dma_receipt_us, f"{DMA} {queue}"
        self.commit(i, r, end, end + clocks.dma_receipt_us)
        self.note(i, r, f"{DMA} {queue}", begin, end)

    def meet(self, meeting: list[int]) -> None:
        """Barriers and exchanges: everybody waits for the last."""
        clocks = self.clocks
        arrivals = []
        for i in meeting:
            r = self.records[i]
            core = self.cores[r.core]
            when, owed, why = self.ready(i, r, core)
            engine = GPSIMD if r.engine == DMA else r.engine
            free, previous = core.free[engine]
            arrivals.append((free, previous, "engine") if free >= when else (when, owed, why))
        start = max(a[0] for a in arrivals)
        for i, (mine, owed, why) in zip(meeting, arrivals, strict=True):
            r = self.records[i]
            core = self.cores[r.core]
            latest = max(range(len(arrivals)), key=lambda k: arrivals[k][0])
            self.cause[i] = (owed, why) if mine >= start else (arrivals[latest][1], arrivals[latest][2])
            engine = GPSIMD if r.engine == DMA else r.engine
            if r.opcode == "sendrecv":
                length = clocks.sendrecv_us + r.detail["bytes"] / (clocks.dma_bytes_per_us * clocks.dma_engines)
            else:
                length = clocks.barrier_us
            end = start + length
            core.free[engine] = (end, i)
            self.finish(i, r, engine, start, end, end)


def estimate(records: list[Record], target: Target, cores: int) -> Estimate:
    """Schedule the instructions of one launch in the written order.

    Args:
        records: as a run keeps them (`SimulatorParams.timing`).
        target: the generation whose clocks hold.
        cores: physical cores of the launch.
    """
    s = _Scheduler(records, target, cores)
    s.run()
    total = max(s.end, default=0.0)
    detail: list[dict[str, Any]] = [r.detail for r in records if r.engine == DMA]
    path: list[Step] = []
    i = max(range(len(records)), key=lambda k: s.end[k]) if records else -1
    while i >= 0:
        cause, why = s.cause[i]
        path.append(Step(records[i].source, records[i].opcode, s.rows[i], s.start[i], s.end[i], why))
        if cause >= i:
            break
        i = cause
    path.reverse()
    sources: dict[tuple[Any, int], str] = {}
    for event in s.events:
        r = records[event.record]
        found = sources.get((r.code, r.lasti))
        if found is None:
            found = sources[r.code, r.lasti] = r.source
        event.source = found
    return Estimate(
        target=target.name,
        total_us=total,
        boundary_us=s.clocks.kernel_boundary_us,
        busy_us=[core.busy for core in s.cores],
        hbm_read_bytes=sum(d.get("hbm_read", 0) for d in detail),
        hbm_written_bytes=sum(d.get("hbm_written", 0) for d in detail),
        descriptors=sum(d.get("descriptors", 0) for d in detail),
        instructions=len(records),
        critical_path=path,
        events=s.events,
    )
