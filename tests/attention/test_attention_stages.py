# SPDX-License-Identifier: Apache-2.0
"""Every stage of every kind of layer against the independent oracle, for every backend that is present."""

import attention_oracle as oracle
import pytest
import torch
from attention_driver import BACKENDS, KINDS, PRESENT, SMALL, Run, hidden_rows, missing_stems

from sparse_mla.attention import StepMetadata

ANGLE = {
    "plain": (SMALL.rope_theta, None),
    "yarn": (
        SMALL.compress_rope_theta,
        (SMALL.yarn_factor, SMALL.yarn_beta_fast, SMALL.yarn_beta_slow, SMALL.yarn_original_max_position),
    ),
}


PARAMS = [(b, m) for b in BACKENDS for m in ("bf16", "fp8") if b != "simulated" or m == "bf16"]


@pytest.fixture(scope="module", params=PARAMS, ids=lambda p: f"{p[0]}-{p[1]}")
def finished(request):
    """Two sequences: chunked prefill of 130 and 75 tokens, six decode steps of one to six rows, then a draft block.
    The simulator, which is slow, runs one sequence: 130 tokens at once and six decode steps.
    """
    backend, linear = request.param
    run = Run(backend=backend, linear=linear)
    run.record = True
    sequences = tuple(run.pool.allocate() for _ in range(1 if backend == "simulated" else 2))
    rows = {id(s): hidden_rows(SMALL, 160, n + 1) for n, s in enumerate(sequences)}
    fed = dict.fromkeys(rows, 0)

    def take(sequence, count):
        start = fed[id(sequence)]
        fed[id(sequence)] += count
        return rows[id(sequence)][start : start + count]

    def feed(step, counts):
        step(list(sequences), torch.cat([take(s, n) for s, n in zip(sequences, counts, strict=True)]), list(counts))

    if backend == "simulated":
        feed(run.prefill, [130])
        for _ in range(6):
            feed(run.decode, [1])
    else:
        a, _ = sequences
        feed(run.prefill, [61, 75])
        run.prefill([a], take(a, 69), [69])
        for counts in ((1, 1), (6, 2), (1, 6), (2, 1), (6, 6), (3, 1)):
            feed(run.decode, counts)
    assert [s.length for s in sequences] == ([136] if backend == "simulated" else [149, 92])
    drafted = sequences[::-1]
    run.draft(list(drafted), hidden_rows(SMALL, 5 * len(drafted), 3))
    return run, sequences, linear


@pytest.mark.parametrize("backend", PRESENT)
def test_every_backend_that_is_present_runs_this_suite(backend):
    if missing_stems(backend):
        assert backend not in ("native", "reference")
        pytest.skip(f"{backend} has no implementation yet of {', '.join(missing_stems(backend))}")
    assert backend in BACKENDS


def angle(run, layer, positions):
    return oracle.angles(positions, *ANGLE[run.pool.topology[layer].rope])


def weight(run, layer):
    return run.weights.layer(layer)


def queries(run, sequence, layer):
    """(positions of the recorded rows, how many tokens were there)."""
    if run.pool.topology[layer].kind == "draft":
        return list(range(sequence.length, sequence.length + 5))
    return list(range(sequence.length))


def window_bytes(run, sequence, layer, position):
    """Where the ring must hold a position, worked out from the geometry alone."""
    ring = run.pool.ring
    per_layer = -(-ring * 528 // 1056) * 1056
    start = run.pool.layers.index(layer) * per_layer + position % ring * 528
    return run.pool.rings[sequence.slot, start : start + 528]


def entry_bytes(run, sequence, source, entry):
    """(main record, index record) of a compressed entry, from the geometry of a block alone."""
    end = 0
    for other in run.pool.sources:
        page = 128 // run.pool.topology[other].ratio
        index_start = -(-end // 32) * 32
        main_start = -(-(index_start + page * 68) // 32) * 32
        end = main_start + page * 288
        if other == source:
            break
    block, offset = run.pool.data[sequence.blocks[entry // page]], entry % page
    data, scales = index_start + offset * 64, index_start + page * 64 + offset * 4
    main = main_start + offset * 288
    return block[main : main + 288], torch.cat((block[data : data + 64], block[scales : scales + 4]))


@pytest.mark.parametrize("layer", KINDS)
def test_projections_norms_and_ropes(finished, layer):
    run, sequences, linear = finished
    w, eps, rounded = weight(run, layer), SMALL.rms_norm_eps, linear == "fp8"
    for s in sequences:

        def get(stage, s=s):
            return run.get(s, layer, stage)

        turn = angle(run, layer, queries(run, s, layer))

        def check(stage, exact, plain):
            found = get(stage)
            oracle.within_twice_plain(found.flatten(1), exact.flatten(1), plain.flatten(1), f"layer {layer} {stage}")

        for stage, source, matrix in (
            ("q_latent", "hidden", w.wq_a),
            ("q", "q_latent_norm", w.wq_b),
            ("window_kv", "hidden", w.wkv),
            ("out", "o_group", w.wo_b),
            *((("index_q", "q_latent_norm", w.index_wq_b),) if run.pool.topology[layer].owns_index else ()),
        ):
            x = get(source)
            check(stage, oracle.linear(x, matrix, rounded), oracle.plain_linear(x, matrix, rounded))
        for stage, vector in (("q_latent", w.q_norm), ("window_kv", w.kv_norm)):
            x = get(stage)
            check(f"{stage}_norm", oracle.norm(x, vector, eps), oracle.plain_norm(x, vector, eps))
        for stage, source, inverse in (
            ("q_rope", "q", False),
            ("window_kv_rope", "window_kv_norm", False),
            ("attention_unrope", "attention", True),
        ):
            x = get(source)
            check(stage, oracle.rope(x, turn, inverse), oracle.rope(x, turn, inverse, torch.bfloat16))
        unroped = get("attention_unrope")
        groups = unroped.reshape(unroped.shape[0], SMALL.o_groups, SMALL.group_in)
        wo_a = w.wo_a.reshape(SMALL.o_groups, SMALL.o_lora_rank, SMALL.group_in)
        exact = torch.cat([oracle.linear(groups[:, g], wo_a[g], rounded) for g in range(SMALL.o_groups)], dim=1)
        plain = torch.cat([oracle.plain_linear(groups[:, g], wo_a[g], rounded) for g in range(SMALL.o_groups)], dim=1)
        check("o_group", exact, plain)


@pytest.mark.parametrize("layer", [2, 20])
def test_compressor_and_index_keys(finished, layer):
    run, sequences, _ = finished
    w, eps, ratio = weight(run, layer), SMALL.rms_norm_eps, run.pool.topology[layer].ratio
    for s in sequences:
        entries = s.length // ratio

        def get(stage, s=s):
            return run.get(s, layer, stage)

        hidden, latent = get("hidden"), get("compressor_latent")
        if ratio == 1:
            oracle.within_twice_plain(
                latent, oracle.linear(hidden, w.compressor_wkv), oracle.plain_linear(hidden, w.compressor_wkv), "latent"
            )
            assert torch.equal(get("pooled"), latent)
        else:
            score = get("compressor_score")
            assert latent.dtype == score.dtype == torch.float32
            assert oracle.error(latent, oracle.linear(hidden, w.compressor_wkv)) < 1e-6
            assert oracle.error(score, oracle.linear(hidden, w.compressor_wgate)) < 1e-6
            exact, plain = oracle.pool(score, latent, ratio), oracle.pool(score, latent, ratio, torch.bfloat16)
            oracle.within_twice_plain(get("pooled"), exact, plain, "pooled")
            # one bfloat16 step, plus float32's error of the terms where two latents cancel
            allowed = exact.abs() * 2**-8 + 1e-6 * float(latent.abs().max())
            assert bool(((get("pooled").double() - exact).abs() <= allowed).all())
        assert get("pooled").shape[0] == entries  # every closed group, and nothing else
        turn = angle(run, layer, [e * ratio for e in range(entries)])
        for stage, vector in (("pooled", w.compressor_norm), ("index_k", w.index_k_norm)):
            x = get(stage)
            oracle.within_twice_plain(
                get(f"{stage}_norm"), oracle.norm(x, vector, eps), oracle.plain_norm(x, vector, eps), stage
            )
        x = get("pooled_norm")
        oracle.within_twice_plain(
            get("index_k"), oracle.linear(x, w.index_wk), oracle.plain_linear(x, w.index_wk), "index_k"
        )
        for stage, source in (("entry", "pooled_norm"), ("index_k_rope", "index_k_norm")):
            x = get(source)
            oracle.within_twice_plain(
                get(stage), oracle.rope(x, turn), oracle.rope(x, turn, dtype=torch.bfloat16), stage
            )


@pytest.mark.parametrize("layer", [n for n in KINDS if n < 40])
def test_stored_bytes_are_exact(finished, layer):
    run, sequences, _ = finished
    for s in sequences:
        records = oracle.window_record(run.get(s, layer, "window_kv_rope"))
        for position in range(max(0, s.length - run.pool.ring), s.length):
            assert torch.equal(window_bytes(run, s, layer, position), records[position]), (layer, position)
        if run.pool.topology[layer].owns_cache:
            mains = oracle.entry_record(run.get(s, layer, "entry"))
            keys = oracle.index_record(run.get(s, layer, "index_k_rope"))
            for entry in range(mains.shape[0]):
                main, key = entry_bytes(run, s, layer, entry)
                assert torch.equal(main, mains[entry]), (layer, entry)
                assert torch.equal(key, keys[entry]), (layer, entry)


def test_the_draft_ring_holds_the_context_and_the_block(finished):
    run, sequences, linear = finished
    w = weight(run, 40)
    for s in sequences:
        block = oracle.window_record(run.get(s, 40, "window_kv_rope"))
        for n in range(5):
            assert torch.equal(window_bytes(run, s, 40, s.length + n), block[n])
        # the context went through the same projection, norm and rope from the main layers' output
        hidden = torch.cat(run.contexts[id(s), 40])
        assert hidden.shape[0] == s.length
        turned = oracle.rope(
            oracle.norm(oracle.linear(hidden, w.wkv, linear == "fp8"), w.kv_norm, SMALL.rms_norm_eps),
            angle(run, 40, range(s.length)),
        )
        kept = range(max(0, s.length + 5 - run.pool.ring), s.length)
        held = oracle.window_values(torch.stack([window_bytes(run, s, 40, p) for p in kept]))
        assert oracle.error(held, turned[list(kept)]) < 0.04  # e4m3 keeps four bits


def logits_of(run, sequence, layer):
    source = run.pool.topology[layer].kv_source
    keys = oracle.index_record(run.get(sequence, source, "index_k_rope"))
    q = run.get(sequence, layer, "index_q_rope")
    records = oracle.index_record(q.flatten(0, 1)).reshape(q.shape[0], q.shape[1], 68)
    return oracle.logits(records, keys, run.get(sequence, layer, "index_weights"))


@pytest.mark.parametrize("layer", [2, 20, 24])
def test_selections_are_valid_by_value(finished, layer):
    run, sequences, _ = finished
    plan, size = run.pool.topology[layer], SMALL.candidate_block_size
    w = weight(run, layer)
    bites = 0
    for s in sequences:
        hidden = run.get(s, layer, "hidden")
        oracle.within_twice_plain(
            run.get(s, layer, "index_weights"),
            oracle.linear(hidden, w.index_weights),
            oracle.plain_linear(hidden, w.index_weights),
            "index_weights",
        )
        q = run.get(s, layer, "index_q")
        turn = angle(run, layer, range(s.length))
        oracle.within_twice_plain(
            run.get(s, layer, "index_q_rope").flatten(1),
            oracle.rope(q, turn).flatten(1),
            oracle.rope(q, turn, dtype=torch.bfloat16).flatten(1),
            "index_q_rope",
        )
        scores, chosen = logits_of(run, s, layer), run.get(s, layer, "entries")
        for position in range(s.length):
            visible = (position + 1) // plan.ratio
            row = scores[position, :visible].clone()
            if plan.publishes_candidates and visible:
                blocks = run.candidates[id(s)][position]
                oracle.check_selection(oracle.block_scores(row, size), blocks, SMALL.candidate_topk_blocks, "blocks")
                assert (visible - 1) // size in blocks.tolist()  # the last block is always in
            if plan.candidate_source is not None:
                blocks = run.candidates[id(s)][position]
                inside = torch.zeros(visible, dtype=torch.bool)
                for block in blocks[blocks >= 0].tolist():
                    inside[block * size : (block + 1) * size] = True
                bites += int((~inside).any())
                row[~inside] = -torch.inf
            oracle.check_selection(row, chosen[position], SMALL.index_topk, f"layer {layer} position {position}")
            bites += visible > SMALL.index_topk
    assert bites > 50  # selection and candidate blocks really left something out


def keys_of_rows(run, sequence, layer):
    """The keys of every row, in order: window, then the entries its list names."""
    plan = run.pool.topology[layer]
    windows = oracle.window_values(oracle.window_record(run.get(sequence, layer, "window_kv_rope")))
    entries = chosen = None
    if plan.ratio:
        entries = oracle.entry_values(oracle.entry_record(run.get(sequence, plan.kv_source, "entry")))
        chosen = run.get(sequence, plan.index_source, "entries").to(torch.int64)
    keys = []
    for p in range(sequence.length):
        own = windows[max(0, p - 127) : p + 1]
        keys.append(own if chosen is None else torch.cat((own, entries[chosen[p][chosen[p] >= 0]])))
    return keys


@pytest.mark.parametrize("layer", [n for n in KINDS if n < 40])
def test_attention_over_the_dense_keys(finished, layer):
    run, sequences, _ = finished
    sink = weight(run, layer).attn_sink
    for s in sequences:
        q, found = run.get(s, layer, "q_rope"), run.get(s, layer, "attention")
        every = range(s.length)
        keys = keys_of_rows(run, s, layer)
        exact = torch.stack([oracle.attend(q[p], keys[p], sink) for p in every])
        plain = torch.stack([oracle.attend(q[p], keys[p], sink, torch.bfloat16) for p in every])
        oracle.within_twice_plain(found.flatten(1), exact.flatten(1), plain.flatten(1), f"layer {layer} attention")
        worst = max(oracle.error(found[p], exact[p]) for p in every)
        assert worst < 2e-2  # no single row is off, whatever the average says


def test_draft_attention_is_bidirectional_inside_its_block(finished):
    run, sequences, _ = finished
    sink = weight(run, 40).attn_sink
    for s in sequences:
        q, found = run.get(s, 40, "q_rope"), run.get(s, 40, "attention")
        first = max(0, s.length - 128)
        held = torch.stack([window_bytes(run, s, 40, p) for p in range(first, s.length + 5)])
        keys = oracle.window_values(held)
        exact = torch.stack([oracle.attend(row, keys, sink) for row in q])
        plain = torch.stack([oracle.attend(row, keys, sink, torch.bfloat16) for row in q])
        oracle.within_twice_plain(found.flatten(1), exact.flatten(1), plain.flatten(1), "draft attention")


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "simulated"])
@pytest.mark.parametrize("layer", [0, 2, 20])
def test_end_to_end_without_selection(backend, layer):
    """Fewer visible entries than top-k: one float64 chain from the hidden state to the output, over the stored keys."""
    from dataclasses import replace

    config = replace(SMALL, index_topk=64)
    run = Run(config, [layer], backend=backend)
    s = run.pool.allocate()
    n = 60
    hidden = hidden_rows(config, n, 7)
    plan, w = run.pool.topology[layer], weight(run, layer)
    step = StepMetadata.prefill(run.pool, [s], [n])
    out = run.attention.forward(hidden, layer, step, run.pool)
    windows = oracle.window_values(torch.stack([window_bytes(run, s, layer, p) for p in range(n)]))
    if plan.ratio:
        entries = oracle.entry_values(torch.stack([entry_bytes(run, s, layer, e)[0] for e in range(n // plan.ratio)]))
    turn = angle(run, layer, range(n))
    q = oracle.linear(oracle.norm(oracle.linear(hidden, w.wq_a), w.q_norm, config.rms_norm_eps), w.wq_b)
    q = oracle.rope(q.reshape(n, -1, 512), turn)
    rows = []
    for p in range(n):
        keys = windows[: p + 1]
        if plan.ratio:
            keys = torch.cat((keys, entries[: (p + 1) // plan.ratio]))
        rows.append(oracle.attend(q[p], keys, w.attn_sink))
    turned = oracle.rope(torch.stack(rows), turn, inverse=True).reshape(n, config.o_groups, config.group_in)
    wo_a = w.wo_a.reshape(config.o_groups, config.o_lora_rank, config.group_in)
    grouped = torch.cat([oracle.linear(turned[:, g], wo_a[g]) for g in range(config.o_groups)], dim=1)
    assert oracle.error(out, oracle.linear(grouped, w.wo_b)) <= 2e-2
