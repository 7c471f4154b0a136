# SPDX-License-Identifier: Apache-2.0
"""What is special to the native backend: CPU targets, threads, fork, Ctrl-C, the OpenMP runtime, the compiled code.

That its operators compute the right thing is tested with the other backends' over the shared case list."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sparse_mla import config, formats
from sparse_mla.caches import KVScope, PagedCache
from sparse_mla.dispatch import presence
from sparse_mla.errors import ArgumentError, BackendUnavailableError, SlotRangeError
from sparse_mla.ops import merge_partials, sparse_decode, sparse_prefill

ABSENT = presence("native")
pytestmark = pytest.mark.skipif(bool(ABSENT), reason=f"native: {ABSENT}")
if not ABSENT:
    from sparse_mla.backends import native

ROOT = Path(__file__).resolve().parents[1]
PRESENT = [] if ABSENT else [name for name, why in native.targets() if not why]
ABSENT_TARGETS = [] if ABSENT else [name for name, why in native.targets() if why]


def make_cache(fmt: formats.RecordFormat, num_blocks: int, page_size: int, **options: Any) -> PagedCache:
    """A cache full of valid records: any codes but NaN, moderate scales."""
    data = torch.randint(0, 256, (num_blocks, page_size, 1, fmt.record_bytes), dtype=torch.int32).to(torch.uint8)
    cache = PagedCache(data, fmt, page_size, **options)
    codes, scales = cache.data_and_scales()
    if fmt is formats.V41_FP8:
        codes.bitwise_and_(0xBF)
        scales.copy_(torch.randint(119, 123, scales.shape))
    elif fmt is formats.V41_FP4:
        scales.copy_(torch.randint(0x10, 0x20, scales.shape))
    return cache


def make_call(b: int, s_q: int, h_q: int, topk: tuple[int, int] = (128, 512)) -> dict[str, Any]:
    main, extra = make_cache(formats.V41_FP8, 5, 134), make_cache(formats.V41_FP4, 20, 64)
    scopes = [
        KVScope(main, torch.randint(-1, main.num_slots, (b, s_q, topk[0]), dtype=torch.int32)),
        KVScope(extra, torch.randint(-1, extra.num_slots, (b, s_q, topk[1]), dtype=torch.int32)),
    ]
    return {"q": torch.randn(b, s_q, h_q, 512).bfloat16(), "scopes": scopes, "attn_sink": torch.randn(h_q)}


def run(call: dict[str, Any], **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    result = sparse_decode(**{**call, **changes}, backend="native")
    return result.out, result.lse


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    kind = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


@pytest.fixture
def threads() -> Any:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# CPU targets


def test_targets_are_listed_best_first_with_reasons() -> None:
    names = [name for name, _ in native.targets()]
    assert names == ["avx512bf16", "avx512", "avx2", "portable"]
    assert "portable" in PRESENT
    for name, why in native.targets():
        assert why == "" or "lacks" in why or "no x86-64" in why or "compiled" in why, name


@pytest.mark.parametrize("name", PRESENT)
def test_a_forced_target_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    core = native._native

    class Spy:
        def __getattr__(self, attribute: str) -> Any:
            return getattr(core, attribute)

        def attention(self, *args: Any) -> int:
            ran.append(core.attention(*args))  # the target's own code says who it is
            return ran[-1]

    monkeypatch.setattr(native, "_native", Spy())
    call = make_call(1, 2, 9, (20, 30))
    with config.override(SPARSE_MLA_CPU_TARGET=name):
        assert native.cpu_target() == name
        out, lse = run(call)
    assert ran == [["avx512bf16", "avx512", "avx2", "portable"].index(name)]
    expected = sparse_decode(**call, out_dtype=torch.float64, backend="reference")
    error = (out.double() - expected.out).norm() / expected.out.norm()
    assert error < 4e-3
    assert (lse - expected.lse).abs().max() < 1e-5


def test_without_a_name_the_best_present_target_is_used() -> None:
    with config.override(SPARSE_MLA_CPU_TARGET=None):
        assert native.cpu_target() == PRESENT[0]


def test_an_unknown_target_is_refused_with_the_known_ones() -> None:
    call = make_call(1, 1, 1, (4, 4))
    with (
        config.override(SPARSE_MLA_CPU_TARGET="sse9"),
        pytest.raises(ArgumentError, match="one of avx512bf16, avx512, avx2, portable, got 'sse9'"),
    ):
        run(call)


@pytest.mark.parametrize("name", ABSENT_TARGETS)
def test_an_absent_target_is_refused_with_the_reason(name: str) -> None:
    call = make_call(1, 1, 1, (4, 4))
    with config.override(SPARSE_MLA_CPU_TARGET=name), pytest.raises(BackendUnavailableError, match=f"is {name}, but "):
        run(call)


# Formats


def test_formats_h_says_what_formats_py_says() -> None:
    listed = native._native.formats()
    assert [entry[0] for entry in listed] == list(formats.FORMATS)
    for name, dim, data_bytes, scale_bytes, elements_per_sf in listed:
        fmt = formats.FORMATS[name]
        assert (dim, data_bytes, scale_bytes) == (fmt.elements, fmt.data_bytes, fmt.scale_bytes), name
        assert elements_per_sf == (fmt.elements_per_sf if fmt.scale_bytes else 0), name
        assert native.KINDS[name] == [entry[0] for entry in listed].index(name)


def decoded_by(target: str, fmt: formats.RecordFormat, records: torch.Tensor) -> torch.Tensor:
    out = torch.empty(records.shape[0], fmt.elements)
    number = [name for name, _ in native.targets()].index(target)
    for record, row in zip(records, out, strict=True):
        address = record.data_ptr()
        native._native.decode_record(number, native.KINDS[fmt.name], address, address + fmt.data_bytes, row.data_ptr())
    return out


def all_records(fmt: formats.RecordFormat) -> torch.Tensor:
    """Records that together hold every code under every scale byte, in several places of a record."""
    if fmt is formats.BF16:
        return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(-1, 512).contiguous().view(torch.uint8)
    scale = torch.arange(256, dtype=torch.int32)
    codes = torch.arange(fmt.data_bytes, dtype=torch.int32) * (1 if fmt is formats.V41_FP8 else 37)
    rows = []
    for shift in (0, 37, 101):
        data = ((codes + shift) % 256).expand(256, -1)
        same = scale[:, None].expand(-1, fmt.scale_bytes)
        mixed = (scale[:, None] + torch.arange(fmt.scale_bytes) * shift) % 256
        rows += [torch.cat([data, same], 1), torch.cat([data, mixed], 1)]
    return torch.cat(rows).to(torch.uint8).contiguous()


@pytest.mark.parametrize("name", PRESENT)
@pytest.mark.parametrize("fmt", formats.MAIN_FORMATS, ids=str)
def test_every_code_under_every_scale_decodes_exactly(name: str, fmt: formats.RecordFormat) -> None:
    records = all_records(fmt)
    got = decoded_by(name, fmt, records)
    expected = formats.decode(records, fmt).float()
    wrong = ~((got == expected) | (got.isnan() & expected.isnan()))
    assert not wrong.any(), f"{int(wrong.sum())} elements differ, first at {wrong.nonzero()[0].tolist()}"


# Threads


@pytest.mark.parametrize("h_q", [1, 3, 8, 17, 64, 130])
@pytest.mark.parametrize("rows", [1, 3])
def test_thread_count_moves_no_bit(h_q: int, rows: int, threads: Any) -> None:
    call = make_call(rows, 1, h_q)
    threads(1)
    out, lse = run(call)
    for count in (2, 3, 8):
        threads(count)
        other_out, other_lse = run(call)
        assert same_bits(out, other_out), count
        assert same_bits(lse, other_lse), count


@pytest.mark.parametrize("h_q", [1, 4, 8, 33])
def test_batch_composition_moves_no_bit(h_q: int, threads: Any) -> None:
    threads(2)
    call = make_call(3, 2, h_q)
    out, lse = run(call)
    for i in range(3):
        for j in range(2):
            scopes = [KVScope(s.cache, s.indices[i : i + 1, j : j + 1].contiguous()) for s in call["scopes"]]
            row_out, row_lse = run(call, q=call["q"][i : i + 1, j : j + 1].contiguous(), scopes=scopes)
            assert same_bits(row_out[0, 0], out[i, j])
            assert same_bits(row_lse[0, :, 0], lse[i, :, j])


@pytest.mark.parametrize("h_q", [1, 3, 8, 9])
def test_rows_that_share_records_get_the_bits_they_get_alone(h_q: int, threads: Any) -> None:
    # Six verify rows of one sequence: windows one token apart, compressed lists that overlap. Up to eight heads they
    # decode a shared record once; the driver counts how many they decode.
    call = make_call(1, 6, h_q)
    window = torch.stack([torch.arange(128, dtype=torch.int32) + i for i in range(6)])[None]
    common = torch.randperm(1280)[:540].sort().values.to(torch.int32)
    lists = torch.stack([common[i * 5 : i * 5 + 512] for i in range(6)])[None].contiguous()
    call["scopes"] = [KVScope(call["scopes"][0].cache, window), KVScope(call["scopes"][1].cache, lists)]
    alone = []
    for i in range(6):
        scopes = [KVScope(s.cache, s.indices[:, i : i + 1].contiguous()) for s in call["scopes"]]
        alone.append(run(call, q=call["q"][:, i : i + 1].contiguous(), scopes=scopes))
    for count in (1, 2, 3):
        threads(count)
        out, lse = run(call)
        for i, (row_out, row_lse) in enumerate(alone):
            assert same_bits(row_out[0, 0], out[0, i]), (count, i)
            assert same_bits(row_lse[0, :, 0], lse[0, :, i]), (count, i)


def test_several_python_threads_call_at_once(threads: Any) -> None:
    threads(2)
    calls = [make_call(2, 1, h) for h in (1, 8, 16, 64)]
    expected = [run(call) for call in calls]
    wrong: list[str] = []

    def work(number: int) -> None:
        for _ in range(5):
            out, lse = run(calls[number])
            if not (same_bits(out, expected[number][0]) and same_bits(lse, expected[number][1])):
                wrong.append(f"call {number}")

    workers = [threading.Thread(target=work, args=(number,)) for number in range(len(calls))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not any(worker.is_alive() for worker in workers)
    assert not wrong


def test_the_callers_denormal_mode_changes_nothing_and_survives() -> None:
    # Scale bytes near the bottom of the range: flushing denormals would zero codes that decode to normal numbers.
    call = make_call(1, 1, 2, (40, 40))
    call["scopes"][0].cache.data_and_scales()[1].fill_(20)
    out, lse = run(call)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no flush-to-zero mode")
    try:
        other_out, other_lse = run(call)
        assert torch.tensor([1e-39]).mul(1.0).item() == 0.0  # still on for the caller
    finally:
        torch.set_flush_denormal(False)
    assert same_bits(out, other_out)
    assert same_bits(lse, other_lse)


def test_merge_and_prefill_move_no_bit_with_threads(threads: Any) -> None:
    q, kv = torch.randn(40, 8, 512).bfloat16(), torch.randn(300, 1, 512).bfloat16()
    indices = torch.randint(-5, 310, (40, 1, 128), dtype=torch.int32)
    results = []
    for count in (1, 2, 5):
        threads(count)
        part = sparse_prefill(q, kv, indices, out_dtype=torch.float32, backend="native")
        other = sparse_prefill(q, kv, indices.flip(0), out_dtype=torch.float32, backend="native")
        merged = merge_partials([part.out, other.out], [part.lse, other.lse], backend="native")
        results.append((*part, *merged))
    for other_result in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other_result, strict=True))


# Processes


def child(code: str, timeout: float, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}", **variables}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout, env=env)


FORK = """
import os, signal, torch
import test_native as t
from sparse_mla.ops.sparse_decode import SparseDecodeCall
torch.set_num_threads(2)
call = t.make_call(4, 1, 64)
arguments = SparseDecodeCall.check(**call).flat()
q, kv = torch.randn(8, 4, 512).bfloat16(), torch.randn(64, 1, 512).bfloat16()
lists = torch.randint(0, 64, (8, 1, 32), dtype=torch.int32)

def everything():
    part = t.sparse_prefill(q, kv, lists, backend="native")
    merged = t.merge_partials([part.out], [part.lse], backend="native")
    # torch itself must not compute here: its own threads are gone in the child too.
    operated = torch.ops.sparse_mla.sparse_decode_native(*arguments)
    return [bytes(x.untyped_storage()) for x in (*t.run(call), *operated, *part, *merged)]

before = everything()
pid = os.fork()
if pid == 0:
    signal.alarm(10)
    same = everything() == before
    os._exit(0 if same and t.native._native.is_forked_child() else 3)
_, status = os.waitpid(pid, 0)
print("child", status)
print("parent", everything() == before and not t.native._native.is_forked_child())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_runs_on_one_thread() -> None:
    done = child(FORK, 120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["child", "0", "parent", "True"]


MAPS = """
import test_native as t, torch
torch.set_num_threads(2)
t.run(t.make_call(4, 1, 64))
torch.randn(512, 512) @ torch.randn(512, 512)
names = set()
for line in open("/proc/self/maps"):
    name = line.split()[-1]
    if "libgomp" in name or "libomp" in name or "libiomp" in name:
        names.add(name)
print(len(names), sorted(names))
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="/proc/self/maps lists what is loaded only on Linux")
def test_one_openmp_runtime_is_loaded() -> None:
    done = child(MAPS, 120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 "), done.stdout


INTERRUPTED = """
import signal
import test_native as t, torch
signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent started in the background hands down "ignore"
torch.set_num_threads(2)
call = t.make_call(400, 1, 128, (2000, 2000))
print("running", flush=True)
try:
    while True:  # seconds a call, and one after another, so that the signal meets a call on any machine
        t.run(call)
except KeyboardInterrupt:
    print("interrupted", flush=True)
t.run(t.make_call(2, 1, 8))
print("usable", flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT is a POSIX signal")
def test_ctrl_c_stops_a_long_call_within_a_second() -> None:
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}"}
    with subprocess.Popen([sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == "running"
            time.sleep(0.7)
            sent = time.monotonic()
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline().strip() == "interrupted"
            assert time.monotonic() - sent < 1.0
            assert process.stdout.readline().strip() == "usable"
            assert process.wait(60) == 0
        finally:
            process.kill()


# Values


def test_a_bad_slot_is_found_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    call = make_call(2, 1, 2, (8, 8))
    call["scopes"][1].indices[1, 0, 5] = call["scopes"][1].cache.num_slots
    message = r"sparse_decode: scopes\[1\].indices must be -1 or a slot below 1280, got 1280 at \[1, 0, 5\]"
    with pytest.raises(SlotRangeError, match=message):
        run(call)


class Recorder(TorchDispatchMode):
    """Notes every operator that torch's dispatcher carries."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_a_watched_call_takes_the_operator_with_the_same_bits(out_dtype: torch.dtype) -> None:
    call = make_call(2, 2, 3, (20, 30))
    call["q"] = torch.randn(2, 2, 6, 512).bfloat16()[:, :, ::2]  # strided queries
    direct = run(call, out_dtype=out_dtype)
    with Recorder() as recorder:
        watched = run(call, out_dtype=out_dtype)
    assert any("sparse_decode_native" in name for name in recorder.seen)
    assert same_bits(direct[0], watched[0])
    assert same_bits(direct[1], watched[1])
    copied = [KVScope(s.cache, s.indices.repeat_interleave(2, -1)[..., ::2]) for s in call["scopes"]]
    assert same_bits(run(call, out_dtype=out_dtype, scopes=copied)[0], direct[0])


def test_a_cache_shrunk_in_place_is_seen() -> None:
    call = make_call(1, 1, 1, (1, 1))
    cache = call["scopes"][0].cache
    for scope in call["scopes"]:
        scope.indices.fill_(scope.cache.num_slots - 1)
    run(call)
    cache.data.resize_(1, *cache.data.shape[1:])
    with pytest.raises(SlotRangeError, match=f"below {cache.page_size}, got"):
        run(call)


def test_byte_offsets_past_4_gib() -> None:
    page, stride = 2, 1 << 20
    blocks = 4200  # 4.1 GiB apart; memory nobody touches is never backed
    pool = torch.empty(blocks * stride, dtype=torch.uint8)
    cache = PagedCache(pool, formats.V41_FP8, page, block_stride=stride, region_offset=64)
    small = make_cache(formats.V41_FP8, 2, page)
    for source, block in ((0, 0), (1, blocks - 1)):
        start = block * stride + 64
        pool[start : start + cache.page_bytes] = small.pages()[source]
    q = torch.randn(1, 1, 5, 512).bfloat16()
    far = torch.tensor([[[0, 1, 2 * blocks - 2, 2 * blocks - 1]]], dtype=torch.int32)
    near = torch.tensor([[[0, 1, 2, 3]]], dtype=torch.int32)
    a = sparse_decode(q, KVScope(cache, far), backend="native")
    b = sparse_decode(q, KVScope(small, near), backend="native")
    assert same_bits(a.out, b.out)


# Compiled code


def compiled_object(source: str, flags: list[str], tmp_path: Path) -> Path:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None or shutil.which("objdump") is None or shutil.which("nm") is None:
        pytest.skip("needs a C++ compiler, objdump and nm")
    target = tmp_path / (source + ".o")
    always = ["-std=c++20", "-O2", "-fopenmp", "-fvisibility=hidden"]
    command = [compiler, *always, *flags, "-c", str(ROOT / "csrc" / source), "-o", str(target)]
    subprocess.run(command, check=True, capture_output=True)
    return target


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="wide instructions are an x86-64 matter")
@pytest.mark.parametrize("source", ["target_portable.cc", "parallel.cc", "sparse_decode.cc", "cpu.cc"])
def test_no_wide_instruction_outside_the_target_files(source: str, tmp_path: Path) -> None:
    built = compiled_object(source, ["-DSPARSE_MLA_X86_TARGETS"], tmp_path)
    listing = subprocess.run(["objdump", "-d", "--no-show-raw-insn", built], check=True, capture_output=True, text=True)
    assert len(listing.stdout.splitlines()) > 50
    wide = re.findall(r"^\s*[0-9a-f]+:\s+(v[a-z0-9]+ .*|.*%[yz]mm.*)$", listing.stdout, re.MULTILINE)
    assert not wide, wide[:5]


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the target files are x86-64")
@pytest.mark.parametrize(
    ("source", "flags"),
    [
        ("target_portable.cc", []),
        ("target_avx2.cc", ["-mavx2", "-mfma", "-mf16c"]),
    ],
)
def test_a_target_file_exports_its_table_alone(source: str, flags: list[str], tmp_path: Path) -> None:
    # Anything else with external linkage, compiled for a newer processor, could be picked by the linker for all of
    # them; a static constructor would run at import, on any processor.
    built = compiled_object(source, flags, tmp_path)
    listing = subprocess.run(["nm", "-C", "--defined-only", built], check=True, capture_output=True, text=True)
    exported = [
        line.split(None, 2)[1:] for line in listing.stdout.splitlines() if line.split(None, 2)[1].upper() != "X"
    ]
    exported = [name for kind, name in exported if kind.isupper() or kind in "vw"]
    assert len(exported) == 1, exported
    assert exported[0].startswith("sparse_mla::OPERATORS_")
    headers = subprocess.run(["objdump", "-h", built], check=True, capture_output=True, text=True)
    assert ".init_array" not in headers.stdout


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_operators_run_clean_under_address_sanitizer(tmp_path: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None or importlib.util.find_spec("nanobind") is None:
        pytest.skip("needs a C++ compiler and nanobind, which `make test-all` installs")
    tool = [sys.executable, str(ROOT / "tools" / "sanitize_python.py"), "--build", str(tmp_path)]
    done = subprocess.run(tool, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the emulated targets are x86-64")
def test_the_avx512_targets_compute_the_same_when_emulated(tmp_path: Path) -> None:
    if not Path("/usr/include/simde").exists():
        pytest.skip("needs SIMDe's headers (package libsimde-dev)")
    cmake = shutil.which("cmake") or str(Path(sys.executable).with_name("cmake"))
    options = ["-DSPARSE_MLA_PYTHON=OFF", "-DSPARSE_MLA_EMULATION=ON"]
    subprocess.run([cmake, "-S", str(ROOT), "-B", str(tmp_path), *options], check=True, capture_output=True)
    subprocess.run(
        [cmake, "--build", str(tmp_path), "--target", "native_driver_emulated", "--parallel", "2"],
        check=True,
        capture_output=True,
    )
    done = subprocess.run([str(tmp_path / "native_driver_emulated"), "test"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "avx512bf16: ok" in done.stdout
    assert "avx512: ok" in done.stdout
