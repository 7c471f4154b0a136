# SPDX-License-Identifier: Apache-2.0
"""What holds when things go wrong: guards around every buffer, many threads, no memory, hostile files; and which bits
never change. `docs/reliability.md` lists the promises with these tests beside them."""

from __future__ import annotations

import ast
import itertools
import json
import os
import pickle
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import guarded
from sparse_mla import allocate, config, load_records, merge_partials, store_records
from sparse_mla.attention import AttentionWeights, V41Config
from sparse_mla.dispatch import presence
from sparse_mla.errors import FormatError, SparseMlaError
from sparse_mla.formats import V41_FP8
from sparse_mla.testing.demo import INPUT_NAMES, load_inputs

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
BACKENDS = [
    pytest.param(name, marks=[] if not presence(name) else pytest.mark.skip(reason=f"{name}: {presence(name)}"))
    for name in ("reference", "native")
]
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="uses /proc and Linux's limits")


def child(*command: str, seconds: float = 250, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the package and this folder importable."""
    paths = f"{ROOT / 'src'}{os.pathsep}{HERE}"
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=seconds,
        env={**config.environment(), "PYTHONPATH": paths, **env},
        check=False,
    )


def results(case, backend):
    """Every tensor of a case's result; of a writing case, also what it wrote."""
    return guarded.results_of(case, case.build(), backend)


def same(a, b):
    return len(a) == len(b) and all(map(guarded.equal_bits, a, b))


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_operator_touches_a_byte_beside_its_arguments(backend: str) -> None:
    """Every argument between two pages without access, first against the one behind, then against the one in front."""
    done = child(str(HERE / "guarded.py"), backend)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-2000:]}"
    assert "of 12 operators" in done.stdout


@pytest.mark.full
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_operator_touches_a_byte_beside_its_arguments_in_any_case(backend: str) -> None:
    done = child(str(HERE / "guarded.py"), backend, "--all", seconds=2900)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-2000:]}"


@LINUX
def test_the_guard_works() -> None:
    """One byte past a guarded buffer ends the process, so the two tests above can fail."""
    done = child(str(HERE / "guarded.py"), "crash")
    assert "inside True" in done.stdout
    assert "outside" not in done.stdout
    assert done.returncode < 0


EXHAUSTED = """
import resource, sys, torch
from sparse_mla import KVScope, V41_FP8, allocate, sparse_decode, store_records, index_logits, topk, load_records
torch.set_num_threads(2)
backend = sys.argv[1]
cache = allocate(V41_FP8, 16, 64)
store_records(torch.randn(1024, 512), cache, torch.arange(1024), backend=backend)
kept = cache.data.clone()
small = torch.randn(2, 1, 8, 512).to(torch.bfloat16)
slots = torch.arange(1024, dtype=torch.int32).view(1, 1, -1)
expected = sparse_decode(small, KVScope(cache, slots.expand(2, 1, -1).contiguous()), backend=backend)
many = torch.zeros(1, 1, 1, 512, dtype=torch.bfloat16).expand(3000, 1, 128, 512).contiguous()
lists = slots[:, :, :4].expand(3000, 1, 4).contiguous()
values = torch.randn(120_000, 512).to(torch.bfloat16)  # last one wins: all into slots of this small cache
places = torch.arange(120_000) % 1024
wide = torch.zeros(64, 2_000_000, dtype=torch.bfloat16)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
before = resource.getrlimit(resource.RLIMIT_AS)
for name, call in {
    "decode": lambda: sparse_decode(many, KVScope(cache, lists), out_dtype=torch.float32, backend=backend),
    "load": lambda: load_records(cache, slots.expand(1, 300, -1), out_dtype=torch.float32, backend=backend),
    "topk": lambda: topk(wide, 2_000_000, backend=backend),
    "store": lambda: store_records(values, cache, places, backend=backend),
}.items():
    resource.setrlimit(resource.RLIMIT_AS, (used + (24 << 20), before[1]))
    try:
        call()
        outcome = "finished"
    except (RuntimeError, MemoryError) as error:
        outcome = "refused"
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    same = torch.equal(cache.data, kept)
    print(name, outcome, "intact" if same else "changed", flush=True)
    if not same:
        cache.data.copy_(kept)
again = sparse_decode(small, KVScope(cache, slots.expand(2, 1, -1).contiguous()), backend=backend)
print("usable", torch.equal(again.out, expected.out), flush=True)
"""


@LINUX
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_memory_in_the_middle_of_a_call(backend: str) -> None:
    """An exception, the caches as they were, and the next call right. A store either finishes or changes nothing."""
    done = child("-c", EXHAUSTED, backend)
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert lines["decode"] == lines["load"] == lines["topk"] == "refused intact", done.stdout
    assert lines["store"] in ("refused intact", "finished changed"), done.stdout
    assert lines["usable"] == "True"


# --- threads, repeats, processes, targets ----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_eight_python_threads_get_the_bits_of_a_serial_run(backend: str) -> None:
    """Every operator from eight threads at once, readers on shared arguments."""
    cases = guarded.small_cases(2)
    assert len({c.op for c in cases}) == 12
    shared = {str(c): c.build() for c in cases if not c.writes}
    expected = {}
    for case in cases:
        expected[str(case)] = (
            results(case, backend) if case.writes else guarded.tensors(case.call(shared[str(case)], backend))
        )
    wrong: list[str] = []
    gate = threading.Barrier(8)

    def work(number: int) -> None:
        try:
            gate.wait(60)
            for case in cases[number:] + cases[:number]:
                name = str(case)
                found = results(case, backend) if case.writes else guarded.tensors(case.call(shared[name], backend))
                if not same(found, expected[name]):
                    wrong.append(f"thread {number}: {name}")
        except BaseException as error:
            wrong.append(f"thread {number}: {error!r}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("backend", BACKENDS)
def test_eight_threads_fill_one_cache(backend: str) -> None:
    """Stores into disjoint slots of one cache at once leave the bytes of one store."""
    x, slots = torch.randn(512, 512), torch.randperm(512)
    one, many = allocate(V41_FP8, 8, 64, layout="planar"), allocate(V41_FP8, 8, 64, layout="planar")
    store_records(x, one, slots, backend=backend)
    threads = [
        threading.Thread(target=store_records, args=(x[i::8], many, slots[i::8]), kwargs={"backend": backend})
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert torch.equal(one.data, many.data)
    assert guarded.equal_bits(load_records(one, slots, backend=backend), load_records(many, slots, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_twenty_repeats_over_dirty_memory_are_equal(backend: str) -> None:
    """Scratch is never trusted: freed memory full of NaN patterns between the calls moves no bit."""
    for case in guarded.small_cases(1):
        first = results(case, backend)
        for _ in range(20):
            dirt = [torch.full((n,), 0xFF, dtype=torch.uint8) for n in (100, 5000, 300_000)]
            del dirt
            assert same(results(case, backend), first), f"{case} on {backend}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_thread_counts_move_no_bit(backend: str) -> None:
    before = torch.get_num_threads()
    try:
        for case in guarded.small_cases(1):
            found = []
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                found.append(results(case, backend))
            # The reference's attention is a BLAS product, whose bits are its library's.
            if backend == "native" or case.op not in ("sparse_decode", "sparse_prefill"):
                assert same(found[0], found[1]), f"{case} on {backend}"
                assert same(found[0], found[2]), f"{case} on {backend}"
    finally:
        torch.set_num_threads(before)


DIGEST = """
import hashlib, sys
import guarded, test_reliability as t, torch
torch.set_num_threads(1)
for case in guarded.small_cases(1):
    digest = hashlib.sha256()
    for x in t.results(case, sys.argv[1]):
        digest.update(x.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    print(case, digest.hexdigest())
"""


def digests(backend: str, **env: str) -> dict[str, str]:
    done = child("-c", DIGEST, backend, **env)
    assert done.returncode == 0, done.stderr
    return dict(line.split(" ") for line in done.stdout.splitlines())


@pytest.mark.parametrize("backend", BACKENDS)
def test_processes_agree(backend: str) -> None:
    first, second = digests(backend), digests(backend, PYTHONHASHSEED="7", MALLOC_PERTURB_="165")
    assert len(first) >= 12
    assert first == second


# Operators whose result is exact or computed in one fixed order: the same bits on every CPU target.
EXACT_STEMS = ("store_records", "load_records", "topk", "candidate_blocks", "rope")


@pytest.mark.skipif(bool(presence("native")), reason=f"native: {presence('native')}")
def test_exact_operators_have_the_same_bits_on_every_target() -> None:
    from sparse_mla.backends import native

    reference = digests("reference")
    present = [name for name, why in native.targets() if not why]
    assert present
    for name in present:
        found = digests("native", SPARSE_MLA_CPU_TARGET=name)
        for case, digest in reference.items():
            if case.split("/")[0] in EXACT_STEMS:
                assert found[case] == digest, f"{case} on {name}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_merged_row_does_not_depend_on_rows_and_heads_beside_it(backend: str) -> None:
    """Found by splitting heads over ranks: torch.sigmoid rounds its last few elements differently."""
    outs = [torch.randn(3, 2, 11, 512) for _ in range(3)]
    lses = [torch.randn(3, 11, 2) * 2 for _ in range(3)]
    sink = torch.randn(11)
    whole = merge_partials(outs, lses, sink, out_dtype=torch.float32, backend=backend)
    for row, head in itertools.product(range(3), range(11)):
        one = merge_partials(
            [o[row : row + 1, :, head : head + 1] for o in outs],
            [x[row : row + 1, head : head + 1] for x in lses],
            sink[head : head + 1],
            out_dtype=torch.float32,
            backend=backend,
        )
        assert guarded.equal_bits(one.out[0, :, 0], whole.out[row, :, head])
        assert guarded.equal_bits(one.lse[0, 0], whole.lse[row, head])


# --- files from strangers --------------------------------------------------------------------------------------------


def file_of(header: object, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HOSTILE = {
    "empty": b"",
    "short prefix": b"\x01\x02",
    "no header": struct.pack("<Q", 0),
    "header past the end": struct.pack("<Q", 1000) + b"{}",
    "header of 2^63 bytes": struct.pack("<Q", 1 << 63) + b"{}",
    "header of all ones": b"\xff" * 64,
    "no JSON": file_of(b"{" * 50),
    "deep JSON": file_of(b"[" * 100_000),
    "no object": file_of([1, 2]),
    "unknown dtype": file_of({"q": entry("Q7", [1], 0, 1)}, b"\0"),
    "offsets past the end": file_of({"q": entry("BF16", [4], 0, 8)}, b"\0" * 4),
    "offsets backwards": file_of({"q": entry("BF16", [2], 8, 4)}, b"\0" * 8),
    "a shape of 2^62": file_of({"q": entry("BF16", [1 << 62, 4], 0, 8)}, b"\0" * 8),
    "a negative shape": file_of({"q": entry("BF16", [-4], 0, 8)}, b"\0" * 8),
    "overlapping tensors": file_of({n: entry("BF16", [2], 0, 4) for n in INPUT_NAMES}, b"\0" * 4),
    "not UTF-8": file_of(b'{"\xff\xfe": 1}'),
    "a pickle": pickle.dumps({"q": [1, 2, 3]}, protocol=2) * 20,
    "a torch file": b"PK\x03\x04" + bytes(200),
    "other tensors": file_of({"x": entry("U8", [1], 0, 1)}, b"\0"),
    "no dimensions": file_of({n: entry("BF16", [], 2 * i, 2 * i + 2) for i, n in enumerate(INPUT_NAMES)}, bytes(14)),
    "empty tensors": file_of({n: entry("BF16", [0, 0, 0, 512], 0, 0) for n in INPUT_NAMES}),
}


@pytest.mark.parametrize("name", list(HOSTILE))
def test_a_hostile_safetensors_file_is_one_clear_error(name: str, tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(HOSTILE[name])
    for read in (load_inputs, lambda path: AttentionWeights.from_safetensors(path, V41Config.tiny(), layers=[0])):
        began = time.monotonic()
        with pytest.raises(SparseMlaError) as caught:
            read(file)
        assert time.monotonic() - began < 5.0
        assert len(str(caught.value)) < 2000


def test_an_input_larger_than_the_machine_is_refused_unread(tmp_path: Path) -> None:
    """A sparse file of 8 TiB whose header is right: the size is refused before anything is allocated."""
    nbytes = 1 << 43
    header = json.dumps({"q": entry("U8", [nbytes], 0, nbytes)}).encode()
    file = tmp_path / "big.safetensors"
    with open(file, "wb") as stream:
        stream.write(struct.pack("<Q", len(header)) + header)
        try:
            stream.truncate(8 + len(header) + nbytes)
        except OSError as error:
            pytest.skip(f"this file system has no files of 8 TiB: {error}")
    began = time.monotonic()
    with pytest.raises(FormatError, match="at most"):
        load_inputs(file)
    assert time.monotonic() - began < 5.0


def test_no_module_reads_pickles() -> None:
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            names += [ast.unparse(node.func)] if isinstance(node, ast.Call) else []
            for name in names:
                assert name.split(".")[0] not in ("pickle", "shelve", "marshal", "dill", "joblib"), path.name
                assert name not in ("torch.load", "numpy.load", "eval", "exec"), f"{path.name} calls {name}"
