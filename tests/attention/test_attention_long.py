# SPDX-License-Identifier: Apache-2.0
"""200,000 tokens of context: caches filled directly, the last 64 rows through ratio-1 and ratio-2 layers with candidate
blocks at work.
"""

import threading
from dataclasses import replace

import attention_oracle as oracle
import pytest
import torch
from attention_driver import BACKENDS, Run, hidden_rows

from sparse_mla.attention import V41Config
from sparse_mla.caches import gather_records, scatter_records
from sparse_mla.formats import INDEX_FP4, V41_FP4, V41_FP8, encode

pytestmark = pytest.mark.timeout(1800)  # the reference takes minutes for the fixture
TOKENS, ROWS = 200_000, 64
CONFIG = replace(V41Config.tiny(), index_topk=512, candidate_topk_blocks=2048, max_position_embeddings=1 << 18)
LAYERS = (2, 20, 24)
QUICK = "native" if "native" in BACKENDS else "reference"
PEAK_BYTES = 1 << 30  # above the filled caches; 451 MiB measured with the native backend


def filled(backend):
    """A sequence of TOKENS - ROWS tokens in shuffled blocks, every record a random one."""
    run = Run(CONFIG, LAYERS, backend=backend, num_blocks=-(-TOKENS // 128) + 3, num_sequences=1)
    run.record = True
    pool, generator = run.pool, torch.Generator().manual_seed(11)
    shuffled = torch.randperm(pool.num_blocks, generator=generator).tolist()
    pool._free_blocks = shuffled
    s = pool.allocate(TOKENS)
    s.length = s.written = TOKENS - ROWS

    def random_records(count, width, fmt):
        return encode(torch.randn(count, width, generator=generator).to(torch.bfloat16), fmt)

    mains = random_records(4096, 512, V41_FP4)
    blocks = torch.tensor(s.blocks)
    for source in pool.sources:
        page, entry = 128 // pool.topology[source].ratio, torch.arange(s.length // pool.topology[source].ratio)
        slots = blocks[entry // page] * page + entry % page
        scatter_records(pool.main(source), slots, mains[torch.randint(0, 4096, entry.shape, generator=generator)])
        scatter_records(pool.index(source), slots, random_records(entry.numel(), 128, INDEX_FP4))
    for layer in pool.layers:
        positions = torch.arange(s.length - pool.ring, s.length)
        scatter_records(pool.window(layer), positions % pool.ring, random_records(pool.ring, 512, V41_FP8))
    return run, s


@pytest.fixture(scope="module", params=[QUICK, pytest.param("reference", marks=pytest.mark.full)])
def long_run(request):
    if request.param == "reference" and QUICK == "reference" and request.param_index:
        pytest.skip("the reference has run already")
    run, s = filled(request.param)
    pool = run.pool
    history = {  # what the rings held before the chunk overwrote them
        n: gather_records(pool.window(n), torch.arange(s.length - 127, s.length) % pool.ring) for n in pool.layers
    }
    growth = peak_growth(lambda: run.prefill([s], hidden_rows(CONFIG, ROWS, 3), [ROWS]))
    return run, s, history, growth


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def peak_growth(work):
    """Bytes of resident memory that `work` adds at its highest, sampled every few milliseconds."""
    before, done, seen = resident_bytes(), threading.Event(), [0]

    def sample():
        while not done.wait(0.003):
            seen.append(resident_bytes())

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        work()
    finally:
        done.set()
        sampler.join()
    return max(seen) - before


def entries_of(run, s, source):
    page = 128 // run.pool.topology[source].ratio
    entry = torch.arange(s.length // run.pool.topology[source].ratio)
    slots = torch.tensor(s.blocks)[entry // page] * page + entry % page
    return gather_records(run.pool.main(source), slots), gather_records(run.pool.index(source), slots)


def test_peak_memory_is_bounded(long_run, record_property):
    growth = long_run[3]
    record_property("peak_bytes", growth)
    print(f"peak memory of the step: {growth / 2**20:.0f} MiB above the filled caches")
    assert growth < PEAK_BYTES


@pytest.mark.parametrize("layer", LAYERS)
def test_every_stage_at_two_hundred_thousand_tokens(long_run, layer):
    run, s, history, _ = long_run
    plan, w, eps = run.pool.topology[layer], run.weights.layer(layer), CONFIG.rms_norm_eps

    def get(stage):
        return run.get(s, layer, stage)

    positions = range(TOKENS - ROWS, TOKENS)
    yarn = (CONFIG.yarn_factor, CONFIG.yarn_beta_fast, CONFIG.yarn_beta_slow, CONFIG.yarn_original_max_position)
    turn = oracle.angles(positions, CONFIG.compress_rope_theta, yarn)

    def check(found, exact, plain, what):
        oracle.within_twice_plain(found.flatten(1), exact.flatten(1), plain.flatten(1), f"layer {layer} {what}")

    for stage, source, matrix in (
        ("q_latent", "hidden", w.wq_a),
        ("q", "q_latent_norm", w.wq_b),
        ("window_kv", "hidden", w.wkv),
        ("index_q", "q_latent_norm", w.index_wq_b),
        ("index_weights", "hidden", w.index_weights),
        ("out", "o_group", w.wo_b),
    ):
        check(get(stage), oracle.linear(get(source), matrix), oracle.plain_linear(get(source), matrix), stage)
    for stage, vector in (("q_latent", w.q_norm), ("window_kv", w.kv_norm)):
        x = get(stage)
        check(get(f"{stage}_norm"), oracle.norm(x, vector, eps), oracle.plain_norm(x, vector, eps), f"{stage}_norm")
    ropes = (("q_rope", "q"), ("window_kv_rope", "window_kv_norm"), ("index_q_rope", "index_q"))
    for stage, source in (*ropes, ("attention_unrope", "attention")):
        x, inverse = get(source), stage == "attention_unrope"
        check(get(stage), oracle.rope(x, turn, inverse), oracle.rope(x, turn, inverse, torch.bfloat16), stage)

    # what was stored
    ring = gather_records(run.pool.window(layer), torch.tensor(positions) % run.pool.ring)
    assert torch.equal(ring, oracle.window_record(get("window_kv_rope")))
    mains, keys = entries_of(run, s, plan.kv_source)
    if plan.owns_cache:
        new = ROWS // plan.ratio
        assert torch.equal(mains[-new:], oracle.entry_record(get("entry")))
        assert torch.equal(keys[-new:], oracle.index_record(get("index_k_rope")))

    # what was selected
    q = get("index_q_rope")
    q_records = oracle.index_record(q.flatten(0, 1)).reshape(*q.shape[:2], 68)
    chosen, size = get("entries"), CONFIG.candidate_block_size
    key_values = oracle.index_values(keys)
    for row in range(0, ROWS, 7):
        visible = (positions[row] + 1) // plan.ratio
        scores = oracle.scores(q_records[row], key_values[:visible], get("index_weights")[row])
        if plan.publishes_candidates:
            blocks = run.candidates[id(s)][row]
            assert blocks.shape == (2048,)
            oracle.check_selection(oracle.block_scores(scores, size), blocks, 2048, f"row {row} blocks")
        if plan.candidate_source is not None:
            blocks = run.candidates[id(s)][row].to(torch.int64)
            inside = torch.zeros(-(-visible // size), dtype=torch.bool)
            inside[blocks[blocks >= 0]] = True
            inside = inside.repeat_interleave(size)[:visible]
            assert int(inside.sum()) <= 2048 * size < visible  # the blocks leave most of the context out
            scores = scores.masked_fill(~inside, -torch.inf)
        oracle.check_selection(scores, chosen[row], CONFIG.index_topk, f"layer {layer} row {row}")

    # what was attended
    windows = torch.cat((history[layer], oracle.window_record(get("window_kv_rope"))))
    exact, plain = [], []
    for row, query in enumerate(get("q_rope")):
        picked = oracle.entry_values(mains[chosen[row].to(torch.int64)])
        all_keys = torch.cat((oracle.window_values(windows[row : row + 128]), picked))
        exact.append(oracle.attend(query, all_keys, w.attn_sink))
        plain.append(oracle.attend(query, all_keys, w.attn_sink, torch.bfloat16))
    check(get("attention"), torch.stack(exact), torch.stack(plain), "attention")
