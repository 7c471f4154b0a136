# SPDX-License-Identifier: Apache-2.0
"""The bench: torch's contestants compute the same thing, rows say what they must, and a regression is seen."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from sparse_mla import cli, index_logits, load_records, sparse_decode, sparse_prefill
from sparse_mla.errors import ArgumentError
from sparse_mla.formats import INDEX_FP4, INDEX_FP8, V41_FP4, V41_FP8, decode
from sparse_mla.testing import bench, timing
from sparse_mla.testing.attention_cases import DecodeCase, PrefillCase, Scope
from sparse_mla.testing.bench import PLAN, BenchRow, Entry, compare_baseline, run_plan, select_plan, write_jsonl
from sparse_mla.testing.contestants import CONTESTANTS, is_torch, quantize
from sparse_mla.testing.index_cases import IndexLogitsCase, IndexTopkCase
from sparse_mla.testing.numeric import frobenius_error
from sparse_mla.testing.pages import Pages
from sparse_mla.testing.record_cases import LoadCase, StoreCase
from sparse_mla.testing.rotation import rotation
from sparse_mla.testing.timing import Action, Roof, Timing, interleave

# torch.compile's own: it loads a part of torch that is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")

SMALL = 1 << 20
REQUIRED_FIELDS = set(
    "op case backend cpu_target threads median_us gflops pct_peak pct_gemm pct_stream pct_gather ratio_vs".split()  # noqa: SIM905
)


def eager(op: str) -> list[str]:
    return [name for name in CONTESTANTS[op] if is_torch(name) and not name.startswith("compiled")]


MIX = (Scope(topk=20, empty=0.0), Scope(pages=Pages(format=V41_FP4), topk=30, empty=0.0))


def check_attention(name: str) -> None:
    case = DecodeCase(name="small", b=3, h_q=4, scopes=MIX)
    problems = rotation(case, SMALL)
    made = CONTESTANTS["sparse_decode"][name](case, problems)
    for number in (0, 1):
        expected = sparse_decode(**problems[number].arguments | {"out_dtype": torch.float64}, backend="reference").out
        actual = torch.cat(made(number)).reshape(expected.shape)  # type: ignore[call-overload]
        assert frobenius_error(actual, expected) < 8e-3


@pytest.mark.parametrize("name", eager("sparse_decode"))
def test_torch_attention_is_attention(name: str) -> None:
    check_attention(name)


@pytest.mark.full
@pytest.mark.parametrize("name", [n for n in CONTESTANTS["sparse_decode"] if n.startswith("compiled")])
def test_compiled_attention_is_attention(name: str) -> None:
    check_attention(name)


@pytest.mark.parametrize("name", ["torch_bmm", "sdpa_bmm"])
def test_torch_prefill_is_attention(name: str) -> None:
    case = PrefillCase(name="small", s_q=3, s_kv=64, topk=20, empty=0.3)
    problem = case.build(poison=0)
    made = CONTESTANTS["sparse_prefill"][name](case, [problem])
    expected = sparse_prefill(**problem.arguments, backend="reference").out
    assert frobenius_error(torch.cat(made(0)), expected) < 8e-3  # type: ignore[call-overload]


SCORES = [
    pytest.param(name, marks=[pytest.mark.full] if name.startswith("compiled") else [])
    for name in CONTESTANTS["index_logits"]
]


@pytest.mark.parametrize("fmt", [INDEX_FP4, INDEX_FP8], ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_torch_scores_are_scores(name: str, fmt: object) -> None:
    case = IndexLogitsCase(name="small", b=2, n=3, heads=4, context=100, format=fmt, lengths="full")  # type: ignore[arg-type]
    problems = rotation(case, SMALL)
    made = CONTESTANTS["index_logits"][name](case, problems)
    for number in (0, 1):
        expected = index_logits(**problems[number].arguments, backend="reference")
        assert frobenius_error(made(number), expected) < 1e-2  # type: ignore[arg-type]


def test_torch_selection_selects() -> None:
    case = IndexTopkCase(name="small", b=1, n=2, heads=4, context=300, k=10, lengths="full")
    problems = rotation(case, SMALL)
    picks = CONTESTANTS["index_topk"]["torch_pair"](case, problems)(0)
    assert tuple(picks.values.shape) == (2, 10)


@pytest.mark.parametrize("fmt", [V41_FP8, V41_FP4], ids=str)
def test_torch_records_are_records(fmt: object) -> None:
    store = StoreCase(name="small", pages=Pages(format=fmt), n=40, skipped=0.0)  # type: ignore[arg-type]
    problem = rotation(store, SMALL)[0]
    x = problem.truth["x"]
    by_torch = decode(quantize(x, fmt), fmt)  # type: ignore[arg-type]  # its ties go down, ours to even
    store.call(problem, "reference")
    ours = load_records(problem.arguments["cache"], problem.arguments["slots"], backend="reference")
    assert frobenius_error(by_torch, ours.double()) < 3e-2
    CONTESTANTS["store_records"]["torch_quantize"](store, [problem])(0)
    for into in (False, True):
        load = LoadCase(name="small", pages=Pages(format=fmt), shape=(50,), skipped=0.0, into=into)  # type: ignore[arg-type]
        problems = rotation(load, SMALL)
        for name in eager("load_records"):
            actual = CONTESTANTS["load_records"][name](load, problems)(1)
            assert (actual is problems[1].arguments["out"]) == into
            expected = load_records(**problems[1].arguments | {"out": None}, backend="reference")
            assert torch.equal(actual, expected)  # type: ignore[arg-type]
    copied = CONTESTANTS["load_records"]["copy_to_new"](load, problems)(0)
    assert isinstance(copied, torch.Tensor)
    assert 2 * copied.nbytes == load.nbytes


def test_rotation_moves_over_the_footprint() -> None:
    problems = rotation(DecodeCase(name="small", b=1, h_q=1, scopes=MIX), 8 << 20)
    lists = [p.arguments["scopes"][1].indices for p in problems]
    assert len(problems) == 32
    assert all(not torch.equal(lists[0], other) for other in lists[1:])
    assert (
        problems[0].arguments["scopes"][0].cache.data.data_ptr()
        == problems[1].arguments["scopes"][0].cache.data.data_ptr()
    )
    held = sum(s.cache.num_slots * s.cache.record_bytes for s in problems[0].arguments["scopes"])
    assert 6 << 20 < held <= 8 << 20
    assert max(int(x.max()) for x in lists) > 0.8 * problems[0].arguments["scopes"][1].cache.num_slots


# --- the plan --------------------------------------------------------------------------------------------------------


def test_plan_holds_every_promised_row() -> None:
    names = {f"{e.case.op}/{e.name}" for e in PLAN}
    assert len(names) == len(PLAN)
    for heads in (1, 8, 16, 64, 128):
        for rows in (1, 6, 64):
            assert f"sparse_decode/128fp8+512fp4-{rows}x{heads}h" in names
        assert f"sparse_decode/128fp8+512fp4-64x{heads}h-hot" in names
    for kind in ("fp4", "fp8"):
        for rest in ("128x65536-32h", "6x65536-32h", "1x65536-64h", "1x65536-32h"):
            assert f"index_logits/{kind}-{rest}" in names
        assert f"store_records/{kind}-4096" in names
        assert {f"load_records/{kind}-65536", f"load_records/{kind}-65536-into"} <= set(names)
    for name in ("sparse_decode/verify-6-of-one-8h", "sparse_decode/one-call-hot", "index_topk/fp4-6x1048576",
                 "index_topk/fp4-512x262144", "topk/relu-64x65536-k512", "sparse_prefill/4096x640-64h"):  # fmt: skip
        assert name in names


def test_quick_plan_is_small_and_checks_names() -> None:
    assert 0 < len(select_plan(quick=True)) < len(PLAN) / 3
    assert {e.case.op for e in select_plan("topk")} == {"topk"}
    with pytest.raises(ArgumentError, match="bench: op must be one of"):
        select_plan("nothing")


# --- measuring -------------------------------------------------------------------------------------------------------


def test_contestants_take_turns() -> None:
    order: list[str] = []
    numbers: list[int] = []

    def make(name: str) -> timing.Action:
        def action(number: int) -> None:
            order.append(name)
            numbers.append(number)

        return action

    timings = interleave({"a": make("a"), "b": make("b")}, rounds=3, min_seconds=0.0)
    assert order == ["a", "a", "b", "b"] + ["a", "b"] * 3
    assert numbers[4:] == sorted(numbers[4:])
    assert all(len(t.rounds_us) == 3 for t in timings.values())


@pytest.mark.parametrize(("seconds", "expected"), [(0.01, 7), (6.0, 5), (50.0, 3)])
def test_long_calls_take_fewer_rounds(seconds: float, expected: int) -> None:
    now = 0.0

    def wait(_: int) -> None:
        nonlocal now
        now += seconds

    timings = interleave({"a": wait}, rounds=7, min_seconds=0.0, clock=lambda: now)
    assert timings["a"].rounds_us == pytest.approx((seconds * 1e6,) * expected)


def test_median_spread_and_ratio() -> None:
    ours, theirs = Timing((10.0, 12.0, 11.0, 50.0, 9.0)), Timing((20.0, 36.0, 22.0, 100.0, 27.0))
    assert ours.median_us == 11.0
    assert ours.ratio_to(theirs) == 2.0
    assert Timing((10.0,) * 5).spread == 0.0
    assert 0.1 < Timing((8.0, 9.0, 10.0, 11.0, 12.0)).spread < 0.2


def test_a_share_is_taken_within_rounds() -> None:
    # The machine is three times slower in the last rounds: the share is that of every round.
    ours, roof = Timing((10.0, 10.0, 30.0, 30.0, 30.0)), Timing((4.0, 4.0, 12.0, 12.0, 12.0))
    assert ours.share_of(roof, work=50.0, roof_work=40.0) == pytest.approx(50.0)  # 5 a microsecond of 10


@pytest.fixture
def quick_roofs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Roofs without a measurement; everything takes 100 us."""

    def fixed(actions: Mapping[str, Action], **_: float) -> dict[str, Timing]:
        for action in actions.values():
            action(0)
        return dict.fromkeys(actions, Timing((100.0,) * 3))

    monkeypatch.setattr(bench, "gemm_roof", lambda: Roof(lambda _: None, 0.0))
    monkeypatch.setattr(bench, "best_rate", lambda roof, threads: 80.0)
    monkeypatch.setattr(bench, "peak_roof", lambda threads: Roof(lambda _: None, 1e7))
    monkeypatch.setattr(bench, "stream_roof", lambda copy: Roof(lambda _: None, 2.5e6 if copy else 2e6))
    monkeypatch.setattr(bench, "gather_roof", lambda *_: Roof(lambda _: None, 1e6))
    monkeypatch.setattr(bench, "interleave", fixed)
    monkeypatch.setattr(bench, "COLD_BYTES", SMALL)


@pytest.mark.usefixtures("quick_roofs")
def test_a_row_says_what_it_must(tmp_path: Path) -> None:
    entry = Entry(case=DecodeCase(name="small", b=2, h_q=4, scopes=MIX), without=("rows_apart",), threads=(1,))
    (row,) = run_plan([entry], backend="reference", compiled=False)
    write_jsonl([row], tmp_path / "rows.jsonl")
    (stored,) = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert set(stored) >= REQUIRED_FIELDS
    assert (stored["backend"], stored["median_us"]) == ("reference", 100.0)
    assert set(stored["ratio_vs"]) == {*eager("sparse_decode"), "best_torch"}
    assert set(stored["ratio_vs"].values()) == {1.0}
    flops, nbytes = entry.case.flops, entry.case.nbytes
    assert stored["gflops"] == pytest.approx(flops / 1e5, abs=2e-3)
    assert stored["pct_peak"] == pytest.approx(100 * flops / 1e7, abs=0.01)
    assert stored["pct_gemm"] == pytest.approx(100 * flops / 1e5 / 80, abs=0.01)
    assert stored["pct_stream"] == pytest.approx(100 * nbytes / 2e6, abs=0.01)
    assert stored["pct_gather"] == pytest.approx(100 * nbytes / 1e6, abs=0.01)


@pytest.mark.usefixtures("quick_roofs")
def test_writing_operators_are_held_to_the_copy_roof() -> None:
    entry = Entry(case=StoreCase(name="small", n=16, skipped=0.0), threads=(1,))
    (row,) = run_plan([entry], backend="reference", compiled=False)
    assert row.pct_stream == pytest.approx(100 * entry.case.nbytes / 2.5e6, abs=0.01)
    assert row.pct_gemm is None


@pytest.mark.parametrize("copy", [False, True])
def test_the_roofs_do_what_they_say(copy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "STREAM_BYTES", 1 << 12)
    timing._stream.cache_clear()
    try:
        roof = timing.stream_roof(copy=copy)
        assert roof.work == (2 << 12 if copy else 1 << 12)
        assert float(roof.action(0).sum()) == 1024
    finally:
        timing._stream.cache_clear()
    gather = timing.gather_roof(288, 288 * 100)
    assert gather.action(0).shape == (4096, 36)
    assert gather.work == 4096 * 288


@pytest.mark.usefixtures("quick_roofs")
def test_overhead_of_a_call_is_told_apart() -> None:
    case = DecodeCase(name="one-call", b=1, h_q=1, scopes=(Scope(topk=1, empty=0.0),))
    entry = Entry(case=case, overhead=True, only=("-",), threads=(1,))
    (row,) = run_plan([entry], backend="reference", compiled=False, rounds=3, min_seconds=0.0)
    assert set(row.ratio_vs) == {"operator"}


# --- baseline --------------------------------------------------------------------------------------------------------

ROW = BenchRow(
    op="topk",
    case="c",
    backend="native",
    cpu_target="avx2",
    threads=1,
    median_us=100.0,
    spread=0.01,
    gflops=0.0,
    gbs=1.0,
    pct_peak=None,
    pct_gemm=None,
    pct_stream=1.0,
    pct_gather=None,
    roof_gemm_gflops=50.0,
)


@pytest.mark.parametrize(
    ("changes", "regressed"),
    [
        ({"median_us": 110.0}, False),
        ({"median_us": 130.0}, True),
        ({"median_us": 130.0, "spread": 0.2}, False),
        ({"median_us": 200.0, "roof_gemm_gflops": 25.0}, False),  # the machine is half as fast
        ({"median_us": 200.0, "roof_gemm_gflops": 100.0}, True),
        ({"median_us": 50.0}, False),
    ],
)
def test_regression_beyond_noise(changes: dict[str, float], regressed: bool, tmp_path: Path) -> None:
    write_jsonl([ROW], tmp_path / "base.jsonl")
    found = compare_baseline([replace(ROW, **changes)], tmp_path / "base.jsonl")  # type: ignore[arg-type]
    assert bool(found) == regressed
    if regressed:
        assert "topk c native 1t: 100.0 ->" in found[0]


def test_baseline_must_fit(tmp_path: Path) -> None:
    path = tmp_path / "base.jsonl"
    write_jsonl([replace(ROW, case="other")], path)
    with pytest.raises(ArgumentError, match="rows of the same cases, got none in common"):
        compare_baseline([ROW], path)
    path.write_text('{"op": "topk"}\n')
    with pytest.raises(ArgumentError, match=r"line 1 of base\.jsonl must be a row of a bench"):
        compare_baseline([ROW], path)


def test_command_exits_1_on_a_regression(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, out = tmp_path / "base.jsonl", tmp_path / "out.jsonl"
    write_jsonl([ROW], base)
    monkeypatch.setattr(bench, "run_plan", lambda *_, **__: [replace(ROW, median_us=300.0)])
    result = CliRunner().invoke(cli.commands, ["bench", "--op", "topk", "--baseline", str(base), "--out", str(out)])
    assert result.exit_code == 1
    assert "REGRESSION topk c native" in result.output
    assert json.loads(out.read_text())["median_us"] == 300.0
    monkeypatch.setattr(bench, "run_plan", lambda *_, **__: [ROW])
    assert CliRunner().invoke(cli.commands, ["bench", "--op", "topk", "--baseline", str(base)]).exit_code == 0


def test_rows_survive_the_file(tmp_path: Path) -> None:
    write_jsonl([ROW], tmp_path / "rows.jsonl")
    assert asdict(bench.read_jsonl(tmp_path / "rows.jsonl")[0]) == asdict(ROW)
