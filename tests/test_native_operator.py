# SPDX-License-Identifier: Apache-2.0
"""`torch.ops.sparse_mla.sparse_decode_native`: the kernel that torch calls in C++, and what it leaves to Python."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from sparse_mla import config, formats
from sparse_mla.caches import KVScope, PagedCache
from sparse_mla.errors import (
    ArgumentError,
    DTypeError,
    FormatError,
    ShapeError,
    SlotRangeError,
    SparseMlaError,
    UnsupportedError,
)
from sparse_mla.ops.sparse_decode import SparseDecodeCall
from test_native import ABSENT, PRESENT, child, make_cache, make_call, same_bits, threads  # noqa: F401

pytestmark = pytest.mark.skipif(bool(ABSENT), reason=f"native: {ABSENT}")
if not ABSENT:
    from sparse_mla.backends import native, native_operator

    operator = torch.ops.sparse_mla.sparse_decode_native.default
    in_python = native._sparse_decode
    NAMES = [argument.name for argument in operator._schema.arguments]

ROOT = Path(__file__).resolve().parents[1]
HAS_INTERFACE = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)
needs_kernel = pytest.mark.skipif(not HAS_INTERFACE, reason="torch before 2.13: the operator is a Python function")


def flat(call: dict[str, Any], **changes: Any) -> list[Any]:
    """The operator's arguments, some replaced by name."""
    arguments = dict(zip(NAMES, SparseDecodeCall.check(**call).flat(), strict=True))
    return list((arguments | changes).values())


def same(a: Any, b: Any) -> bool:
    return all(x.shape == y.shape and x.stride() == y.stride() and same_bits(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture
def python_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever leaves a call to Python fails."""

    def refuse(*arguments: Any) -> Any:
        raise AssertionError("left to Python")

    monkeypatch.setattr(native_operator, "_in_python", refuse)
    monkeypatch.setattr(native, "_sparse_decode", refuse)


# Results


def padded_pool() -> KVScope:
    """A page inside each block of a pool, behind other bytes."""
    small = make_cache(formats.V41_FP4, 4, 8)
    pool = torch.zeros(4 * 5000, dtype=torch.uint8)
    cache = PagedCache(pool, formats.V41_FP4, 8, block_stride=5000, region_offset=96)
    cache.pages().copy_(small.pages())
    return KVScope(cache, torch.randint(-1, 32, (2, 3, 9), dtype=torch.int32), torch.tensor([9, 4], dtype=torch.int32))


def bf16_rows() -> KVScope:
    cache = PagedCache(torch.randn(7, 3, 1, 512).bfloat16(), formats.BF16, 3)
    return KVScope(cache, torch.randint(-1, 21, (2, 3, 5), dtype=torch.int32))


def planar() -> KVScope:
    cache = make_cache(formats.V41_FP8, 4, 16, layout="planar")
    return KVScope(cache, torch.randint(-1, 64, (2, 3, 20), dtype=torch.int32))


ORDINARY = {
    "two scopes": {},
    "one scope": {"cache1": None, "indices1": None, "length1": None, "half": True},
    "float32 out": {"out_dtype": torch.float32},
    "no sink": {"attn_sink": None},
    "another scale": {"softmax_scale": 0.3},
    "strided queries": {"q": lambda q: torch.cat([q, q], 2)[:, :, ::2]},
    "strided lists": {"indices0": lambda i: torch.cat([i, i], 1)[:, ::2]},
    "lengths": {"length0": torch.tensor([3, 0], dtype=torch.int32)},
    "no checks": {"checks": False},
    "signed bytes": {"cache0": lambda cache: cache.view(torch.int8)},
    "e4m3 bytes": {"cache1": lambda cache: cache.view(torch.float8_e4m3fn)},
}


def changed(call: dict[str, Any], changes: dict[str, Any]) -> list[Any]:
    arguments = dict(zip(NAMES, flat(call), strict=True))
    changes = dict(changes)
    if changes.pop("half", False):
        arguments["geometry"] = arguments["geometry"][: len(arguments["geometry"]) // 2]
    for name, value in changes.items():
        arguments[name] = value(arguments[name]) if callable(value) else value
    return list(arguments.values())


@needs_kernel
@pytest.mark.parametrize("name", ORDINARY)
def test_the_kernel_computes_the_bits_of_the_python_function(name: str, python_is_out: None) -> None:
    arguments = changed(make_call(2, 3, 5, (20, 30)), ORDINARY[name])
    assert same(operator(*arguments), in_python(*arguments))


@needs_kernel
@pytest.mark.parametrize("scope", [padded_pool, bf16_rows, planar])
def test_every_kind_of_cache_is_ordinary(scope: Any, python_is_out: None) -> None:
    call = {"q": torch.randn(2, 3, 4, 512).bfloat16(), "scopes": [planar(), scope()]}
    assert same(operator(*flat(call)), in_python(*flat(call)))


@needs_kernel
@pytest.mark.parametrize("shape", [(0, 1, 3), (2, 0, 3)])
def test_no_rows_is_ordinary(shape: tuple[int, int, int], python_is_out: None) -> None:
    out, lse = operator(*flat(make_call(*shape, (4, 4))))
    assert out.shape == (*shape, 512)
    assert lse.shape == shape
    assert out.is_contiguous()
    assert lse.is_contiguous()


def every_second(t: torch.Tensor) -> torch.Tensor:
    return t.repeat_interleave(2, -1)[..., ::2]


@pytest.mark.parametrize("name", ["q", "indices0", "length0", "indices1", "attn_sink"])
def test_what_is_not_contiguous_is_copied(name: str) -> None:
    call = make_call(2, 1, 3, (20, 30))
    length = torch.tensor([7, 20], dtype=torch.int32)
    arguments = dict(zip(NAMES, flat(call, length0=length), strict=True))
    expected = operator(*arguments.values())
    arguments[name] = every_second(arguments[name])
    assert arguments[name].stride(-1) == 2
    assert same(operator(*arguments.values()), expected)


@needs_kernel
def test_more_cache_shapes_than_a_thread_remembers() -> None:
    scopes = [make_cache(formats.V41_FP8, 1 + n, 4) for n in range(40)]
    q = torch.randn(1, 1, 2, 512).bfloat16()
    for _ in range(2):
        for cache in scopes:
            last = torch.tensor([[[cache.num_slots - 1, 0]]], dtype=torch.int32)
            arguments = flat({"q": q, "scopes": KVScope(cache, last)})
            assert same(operator(*arguments), in_python(*arguments))
            arguments[2] = last + 1
            with pytest.raises(SlotRangeError, match=f"below {cache.num_slots}, got {cache.num_slots} at"):
                operator(*arguments)


def test_the_target_named_now_is_used() -> None:
    arguments = flat(make_call(1, 1, 2, (30, 30)))
    by_target = {}
    for name in PRESENT:
        with config.override(SPARSE_MLA_CPU_TARGET=name):
            by_target[name] = operator(*arguments)
            assert same(by_target[name], in_python(*arguments))
    assert len(PRESENT) == 1 or not same(by_target[PRESENT[0]], by_target["portable"])
    with config.override(SPARSE_MLA_CPU_TARGET="sse9"), pytest.raises(ArgumentError, match="got 'sse9'"):
        operator(*arguments)
    with config.override(SPARSE_MLA_CPU_TARGET=None):
        assert same(operator(*arguments), by_target[PRESENT[0]])


def test_threads_call_at_once(threads: Any) -> None:  # noqa: F811
    threads(2)
    calls = [flat(make_call(2, 1, h, (40, 40))) for h in (1, 3, 8, 17)]
    expected = [operator(*arguments) for arguments in calls]
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(30):
            if not same(operator(*calls[number]), expected[number]):
                wrong.append(number)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not any(worker.is_alive() for worker in workers)
    assert not wrong


# Errors

BAD_SLOT = r"sparse_decode: scopes\[1\].indices must be -1 or a slot below 1280, got 1280 at \[1, 0, 5\]; a stale list"
WRONG = {
    "float64 out": (
        {"out_dtype": torch.float64},
        UnsupportedError,
        "out_dtype must be one of bfloat16, float32, got f",
    ),
    "float queries": ({"q": lambda q: q.float()}, DTypeError, "q must be bfloat16, got float32"),
    "long lists": ({"indices0": lambda i: i.long()}, DTypeError, "scopes.0..indices must be int32"),
    "lists of other rows": ({"indices1": lambda i: i[:1]}, ShapeError, r"scopes\[1\].indices"),
    "bfloat16 sink": ({"attn_sink": lambda s: s.bfloat16()}, DTypeError, "attn_sink must be float32"),
    "sink of other heads": ({"attn_sink": lambda s: s[:1]}, ShapeError, "attn_sink"),
    "cache of integers": ({"cache0": lambda c: c.int()}, DTypeError, "data must be uint8, int8 or float8_e4m3fn"),
    "cache of another width": ({"cache0": lambda c: c[..., :100]}, FormatError, "100"),
    "negative length": (
        {"length1": torch.tensor([-2, 0], dtype=torch.int32)},
        SlotRangeError,
        "length must be >= 0, g",
    ),
}


@needs_kernel
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_refused_in_words(name: str) -> None:
    changes, kind, words = WRONG[name]
    with pytest.raises(kind, match=words):
        operator(*changed(make_call(2, 1, 3, (20, 30)), changes))


def bad_call() -> list[Any]:
    call = make_call(2, 1, 2, (8, 8))
    call["scopes"][1].indices[1, 0, 5] = 1280
    return flat(call)


def test_a_bad_slot_keeps_type_sentence_and_traceback() -> None:
    with pytest.raises(SlotRangeError, match=BAD_SLOT) as caught:
        operator(*bad_call())
    assert caught.value.__context__ is None
    assert any(entry.name == "check_slots" for entry in caught.traceback)
    with pytest.raises(SlotRangeError, match=BAD_SLOT):
        torch.ops.sparse_mla.sparse_decode_native(*bad_call())  # the packet of overloads
    assert operator(*flat(make_call(2, 1, 2, (8, 8))))[0].isfinite().all()


# inductor's own: it loads a part of torch that is deprecated.
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_bad_slot_inside_a_graph(backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda *a: operator(*a)[0] + 1, fullgraph=True, backend=backend)
    good, bad = flat(make_call(2, 1, 2, (8, 8))), bad_call()
    compiled(*good)
    with pytest.raises(SlotRangeError, match=BAD_SLOT):
        compiled(*bad)
    assert torch.equal(compiled(*good), operator(*good)[0] + 1)


def test_a_bad_slot_in_another_thread_is_raised_there() -> None:
    caught: list[BaseException] = []

    def work() -> None:
        try:
            operator(*bad_call())
        except SlotRangeError as error:
            caught.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    operator(*flat(make_call(2, 1, 2, (8, 8))))
    worker.join(60)
    assert len(caught) == 1


def test_nothing_is_kept_of_a_call_that_fails_or_succeeds() -> None:
    call = make_call(2, 1, 2, (8, 8))
    for arguments in (flat(call), bad_call(), changed(call, {"q": every_second})):
        tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
        uses = [t._use_count() for t in tensors]
        counts = [sys.getrefcount(t) for t in tensors]
        for _ in range(3):
            try:
                results = operator(*arguments)
                alive = [weakref.ref(r) for r in results]
                assert [r._use_count() for r in results] == [1, 1]
                del results
                assert [r() for r in alive] == [None, None]
            except SparseMlaError:
                pass
        gc.collect()
        assert [t._use_count() for t in tensors] == uses
        assert [sys.getrefcount(t) for t in tensors] == counts


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="/proc/self/statm tells the memory only on Linux")
def test_memory_stays_flat() -> None:
    good, bad = flat(make_call(1, 1, 1, (1, 1))), bad_call()

    def fails() -> None:
        with contextlib.suppress(SlotRangeError):
            operator(*bad)

    for run, count in ((lambda: operator(*good), 100_000), (fails, 2_000)):
        for _ in range(200):
            run()
        before = resident()
        for _ in range(count):
            run()
        assert resident() - before < 1 << 20  # ten bytes a call would be a megabyte


# Processes

INTERRUPTED = """
import signal, sys
import test_native as t, test_native_operator as o, torch
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(2)
arguments = o.flat(t.make_call(400, 1, 128, (2000, 2000)))
small = o.flat(t.make_call(2, 1, 8))
run = o.operator
if sys.argv[1] == "graph":
    run = torch.compile(lambda *a: o.operator(*a), fullgraph=True, backend="aot_eager", dynamic=False)
    run(*arguments[:2], arguments[2][:, :, :1].contiguous(), *arguments[3:])
print("running", flush=True)
try:
    while True:
        run(*arguments)
except KeyboardInterrupt:
    print("interrupted", flush=True)
o.operator(*small)
print("usable", flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT is a POSIX signal")
@pytest.mark.parametrize("where", ["eager", "graph"])
def test_ctrl_c_stops_a_long_call(where: str) -> None:
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}"}
    command = [sys.executable, "-c", INTERRUPTED, where]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == "running"
            time.sleep(3 if where == "graph" else 0.7)
            sent = time.monotonic()
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline().strip() == "interrupted"
            assert time.monotonic() - sent < 1.5
            assert process.stdout.readline().strip() == "usable"
            assert process.wait(60) == 0
        finally:
            process.kill()


FALLBACK = """
import warnings; warnings.simplefilter("error")
import sparse_mla._native as core
{change}
import test_native as t, test_native_operator as o
from sparse_mla.backends import native, native_operator
ran = []
inner = native._native
class Spy:
    def __getattr__(self, name):
        return getattr(inner, name)
    def attention(self, *arguments):
        ran.append(1)
        return inner.attention(*arguments)
native._native = Spy()
o.operator(*o.flat(t.make_call(2, 1, 2, (8, 8))))
print("python" if ran else "kernel")
try:
    o.operator(*o.bad_call())
except o.SlotRangeError:
    print("worded")
"""
CHANGES = {
    "an older torch": 'names = core.torch_functions\ncore.torch_functions = lambda: [*names(), "not_there"]',
    "an error arrives as another": "real = core.leave_error\ncore.leave_error = lambda error: real(OSError(error))",
}


@needs_kernel
@pytest.mark.parametrize("name", CHANGES)
def test_without_the_interface_the_operator_is_the_python_function(name: str) -> None:
    done = child(FALLBACK.format(change=CHANGES[name]), 120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["python", "worded"]


@needs_kernel
def test_loading_under_a_mode_still_takes_the_kernel() -> None:
    code = """
from torch._subclasses.fake_tensor import FakeTensorMode
from sparse_mla.dispatch import presence
with FakeTensorMode():
    presence("native")
"""
    done = child(code + FALLBACK.format(change=""), 120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["kernel", "worded"]


def test_the_profiler_sees_the_operator_by_name() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        operator(*flat(make_call(1, 1, 1, (4, 4))))
    assert any(event.key == "sparse_mla::sparse_decode_native" for event in profile.key_averages())


def test_opcheck() -> None:
    torch.library.opcheck(operator, tuple(flat(make_call(2, 1, 3, (8, 8)))))
