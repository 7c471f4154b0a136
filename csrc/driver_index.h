// SPDX-License-Identifier: Apache-2.0
// The driver's self-test of the indexer, selection, pooling, rope, projection and record operators. Included by driver.cc alone.
//
// Scores are held to plain double arithmetic, selections to a sort, and what must be the same bytes everywhere to the portable
// target, which the Python tests hold to the reference.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "targets.h"

namespace sparse_mla::driver {

struct Draws {
    uint64_t state = 88172645463325252ull;
    uint32_t next() {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        return uint32_t(state >> 24);
    }
    int below(int n) { return int(next() % uint32_t(n)); }
    float normal() {
        const double u = (next() + 1.0) / 4294967297.0, v = next() / 4294967296.0;
        return float(std::sqrt(-2 * std::log(u)) * std::cos(6.283185307179586 * v));
    }
    // Scales far apart now and then.
    float wide() { return normal() * std::exp2(float(below(8) ? below(4) : below(40) - 20)); }
};

inline double exact_element(RecordKind kind, const uint8_t* data, const uint8_t* scales, int i) {
    if (kind == RecordKind::INDEX_FP4) {
        const int code = i % 2 ? data[i / 2] >> 4 : data[i / 2] & 15;
        return scales[i / 32] == 255 ? 0.0 : std::ldexp(double(E2M1_VALUES[code]), scales[i / 32] - 127);
    }
    return decode_e4m3_ue8m0(data[i], kind == RecordKind::INDEX_FP8 ? scales[i / 32] : 127);
}

struct IndexTest {
    const Operators& ops;
    const Operators& portable;
    const char* target;
    int* failures;
    Draws draws;

    void expect(bool ok, const char* what, double detail) {
        if (ok) return;
        ++*failures;
        std::printf("FAILED %s %s: %g\n", target, what, detail);
    }

    static RecordCache cache_over(std::vector<uint8_t>& bytes, RecordKind kind, int64_t page, int64_t slots, bool planar) {
        const RecordFormat& f = RECORD_FORMATS[int(kind)];
        const int64_t record = f.record_bytes(), stride = page * record + 32;
        bytes.assign(size_t((slots / page) * stride), 0xa5);
        if (planar || f.dim == INDEX_DIM) return {bytes.data(), kind, page, stride, f.data_bytes, page * f.data_bytes, f.scale_bytes, slots};
        return {bytes.data(), kind, page, stride, record, f.data_bytes, record, slots};
    }

    void records() {
        constexpr int64_t N = 70, SLOTS = 96;
        std::vector<int32_t> slots(N);
        for (auto& slot : slots) slot = draws.below(SLOTS + 8) - 8 < 0 ? -1 : draws.below(SLOTS);
        for (int kind = 0; kind <= int(RecordKind::BF16); ++kind) {
            const int dim = RECORD_FORMATS[kind].dim;
            std::vector<uint16_t> x(size_t(N * dim));
            std::vector<float> xf(x.size());
            for (size_t i = 0; i < x.size(); ++i) xf[i] = draws.wide(), x[i] = float_to_bf16(xf[i]);
            for (const bool as_float : {false, true})
                for (const int cap : {448, 224}) {
                    std::vector<uint8_t> bytes[2];
                    std::vector<float> loaded[2];
                    std::vector<uint16_t> halves[2];
                    for (int which = 0; which < 2; ++which) {
                        const Operators& o = which ? portable : ops;
                        const RecordCache cache = cache_over(bytes[which], RecordKind(kind), 16, SLOTS, cap == 224);
                        StoreParams store{cache, as_float ? static_cast<void*>(xf.data()) : static_cast<void*>(x.data()), as_float, dim, slots.data(), false,
                                          N, cap, Nonfinite::RAISE, false, {2, 0, nullptr}};
                        expect(o.index.store_records(store) == Status::OK && !store.nonfinite_found, "store_records", kind);
                        loaded[which].resize(size_t(N * dim));
                        halves[which].resize(size_t(N * dim));
                        LoadParams load{cache, slots.data(), false, N, loaded[which].data(), true, {2, 0, nullptr}};
                        expect(o.index.load_records(load) == Status::OK, "load_records", kind);
                        load.out = halves[which].data(), load.out_float = false;
                        expect(o.index.load_records(load) == Status::OK, "load_records", kind);
                    }
                    expect(bytes[0] == bytes[1], "stored bytes", kind);
                    expect(std::memcmp(loaded[0].data(), loaded[1].data(), loaded[0].size() * 4) == 0, "loaded floats", kind);
                    expect(halves[0] == halves[1], "loaded bfloat16", kind);
                }
        }
    }

    // An output that goes around the caches, in items of huge pages, at an address that is none.
    void large_load(RecordKind kind) {
        constexpr int64_t N = 9000, SLOTS = 96, GUARD = 64;
        std::vector<uint8_t> bytes, out[2];
        const RecordCache cache = cache_over(bytes, kind, 16, SLOTS, false);
        for (auto& byte : bytes) byte = uint8_t(draws.below(256));
        std::vector<int64_t> slots(N);
        for (auto& slot : slots) slot = draws.below(20) == 0 ? -1 : draws.below(SLOTS);
        const size_t size = size_t(N) * RECORD_FORMATS[int(kind)].dim * 2;
        uint8_t* begin[2];
        for (int which = 0; which < 2; ++which) {
            out[which].assign(size + 3 * GUARD, 0xa5);
            begin[which] = out[which].data() + GUARD + (-reinterpret_cast<uintptr_t>(out[which].data()) & (GUARD - 1));
            LoadParams load{cache, slots.data(), true, N, begin[which], false, {which ? 1 : 2, 0, nullptr}};
            expect((which ? portable : ops).index.load_records(load) == Status::OK, "large load_records", int(kind));
        }
        expect(std::memcmp(begin[0], begin[1], size) == 0, "many loaded records", int(kind));
        for (int i = 0; i < GUARD; ++i) expect(begin[0][-1 - i] == 0xa5 && begin[0][size + i] == 0xa5, "bytes around loaded records", int(kind));
    }

    void decoders() {
        float out[INDEX_DIM];
        uint8_t data[INDEX_DIM], scales[4];
        for (const RecordKind kind : {RecordKind::INDEX_FP4, RecordKind::INDEX_FP8})
            for (int scale = 0; scale < 256; ++scale)
                for (int part = 0; part < 2; ++part) {
                    for (int i = 0; i < INDEX_DIM; ++i) data[i] = uint8_t(i + part * INDEX_DIM);
                    std::memset(scales, scale, 4);
                    ops.index.decode_index(kind, data, scales, out);
                    for (int i = 0; i < INDEX_DIM; ++i) {
                        const float wanted = float(exact_element(kind, data, scales, i));
                        expect(out[i] == wanted, "decode_index", scale * 1000 + i);
                    }
                }
    }

    void scores(RecordKind kind, int heads, int rows, int context, bool unit_weights) {
        const RecordFormat& f = RECORD_FORMATS[int(kind)];
        const int page = 16, pages = (context + page - 1) / page, q_bytes = f.data_bytes;
        std::vector<uint8_t> cache(size_t(pages) * page * f.record_bytes()), q(size_t(rows * heads * q_bytes)), sf(size_t(rows * heads * 4));
        for (auto& b : cache) b = uint8_t(draws.next());
        for (auto& b : q) b = uint8_t(draws.next());
        // Rows whose scales fit into bytes, rows whose sums are shifted, and rows that go by floats.
        constexpr int SPREADS[3] = {4, 7, 9};
        for (size_t i = 0; i < sf.size(); ++i)
            sf[i] = uint8_t(126 + (draws.below(10) ? draws.below(3) : draws.below(SPREADS[i / size_t(heads * 4) % 3])));
        for (int p = 0; p < pages; ++p) {
            uint8_t* scales = cache.data() + size_t(p) * page * f.record_bytes() + page * f.data_bytes;
            for (int i = 0; i < page * 4; ++i) scales[i] = uint8_t(125 + (draws.below(20) ? draws.below(3) : draws.below(12)));
            if (kind == RecordKind::INDEX_FP8_FP32)
                for (int i = 0; i < page; ++i) {
                    const float scale = std::exp2(draws.normal());
                    std::memcpy(scales + 4 * i, &scale, 4);
                }
        }
        std::vector<float> weights(size_t(rows * heads));
        for (auto& w : weights) w = unit_weights ? 1.0f : draws.normal();
        std::vector<int32_t> table, ends;
        for (int p = 0; p < pages; ++p) table.push_back(p);
        for (int p = pages - 1; p > 0; --p) std::swap(table[size_t(p)], table[size_t(draws.below(p + 1))]);
        for (int r = 0; r < rows; ++r) ends.push_back(r == 0 ? context : draws.below(context + 1));
        IndexTopkParams base{};
        base.keys = {kind, cache.data(), cache.data() + page * f.data_bytes, pages, page, page * f.record_bytes(), page * f.record_bytes(), f.data_bytes, 4};
        base.q = q.data(), base.q_stride_row = heads * q_bytes, base.q_stride_head = q_bytes;
        if (kind != RecordKind::INDEX_FP8_FP32) base.q_sf = sf.data(), base.q_sf_stride_row = heads * 4, base.q_sf_stride_head = 4;
        base.weights = weights.data(), base.weights_float = true, base.weights_stride_row = heads, base.weights_stride_head = 1;
        base.rows = rows, base.heads = heads, base.block_table = table.data(), base.table_width = pages, base.rows_per_table = rows;
        base.ends = ends.data(), base.block_size = 8, base.width = context, base.score_float = true, base.plan = {2, 0, nullptr};
        expect(index_inputs_are_sound(base), "soundness", 0);
        std::vector<float> out(size_t(rows * context));
        IndexLogitsParams logits{};
        static_cast<IndexParams&>(logits) = base;
        logits.out = out.data(), logits.columns = context, logits.out_stride = context;
        expect(ops.index.index_logits(logits) == Status::OK, "index_logits", 0);
        for (int r = 0; r < rows; ++r)
            for (int c = 0; c < context; ++c) {
                const float got = out[size_t(r * context + c)];
                if (c >= ends[size_t(r)]) {
                    expect(got == -INFINITY, "past the context", c);
                    continue;
                }
                const uint8_t* at = cache.data() + size_t(table[size_t(c / page)]) * page * f.record_bytes();
                const uint8_t *data = at + (c % page) * f.data_bytes, *scales = at + page * f.data_bytes + (c % page) * 4;
                double total = 0, size = 0;
                for (int h = 0; h < heads; ++h) {
                    double dot = 0;
                    for (int i = 0; i < INDEX_DIM; ++i)
                        dot += exact_element(kind, q.data() + (r * heads + h) * q_bytes, sf.data() + (r * heads + h) * 4, i) *
                               exact_element(kind, data, scales, i);
                    if (kind == RecordKind::INDEX_FP8_FP32) {
                        float scale;
                        std::memcpy(&scale, scales, 4);
                        dot *= scale;
                    }
                    const double term = (dot > 0 ? dot : 0) * weights[size_t(r * heads + h)];
                    total += term, size += std::fabs(term) + 1e-3 * std::fabs(dot);
                }
                if (unit_weights && kind == RecordKind::INDEX_FP4 && heads == 1)
                    expect(double(got) == total, "exact score", got - total);
                else
                    expect(std::fabs(got - total) <= 4e-6 * (size + 1), "score", got - total);
            }
        for (const bool score_float : {true, false}) {
            std::vector<uint16_t> halves(out.size());
            logits.score_float = base.score_float = score_float;
            logits.out = score_float ? static_cast<void*>(out.data()) : static_cast<void*>(halves.data());
            expect(ops.index.index_logits(logits) == Status::OK, "index_logits", 1);
            const int64_t k = 20;
            std::vector<int32_t> two(size_t(rows * k)), one(two.size());
            TopkParams select{logits.out, score_float, rows, context, context, k, nullptr, nullptr, true, two.data(), -1, {2, 0, nullptr}};
            expect(ops.index.topk(select) == Status::OK, "topk", 0);
            base.k = k, base.out = one.data();
            expect(ops.index.index_topk(base) == Status::OK && base.nan_row < 0, "index_topk", 0);
            expect(one == two, "index_topk against two steps", score_float);
        }
    }

    void selection(int64_t n, int64_t k, int levels) {
        const int64_t rows = 3;
        std::vector<float> x(size_t(rows * n));
        for (auto& v : x) v = levels ? float(draws.below(2 * levels + 1) - levels) : draws.normal();
        for (size_t i = 0; i < x.size(); i += 13) x[i] = -INFINITY;
        for (const bool as_float : {true, false}) {
            std::vector<uint16_t> halves(x.size());
            for (size_t i = 0; i < x.size(); ++i) halves[i] = float_to_bf16(x[i]);
            std::vector<int32_t> out(size_t(rows * k));
            TopkParams p{as_float ? static_cast<void*>(x.data()) : static_cast<void*>(halves.data()), as_float, rows, n, n, k, nullptr, nullptr, true,
                         out.data(), -1, {2, 0, nullptr}};
            expect(ops.index.topk(p) == Status::OK && p.nan_row == -1, "topk", 1);
            for (int64_t r = 0; r < rows; ++r) {
                const auto value = [&](int32_t i) { return as_float ? x[size_t(r * n + i)] : bf16_to_float(halves[size_t(r * n + i)]); };
                std::vector<int32_t> order;
                for (int32_t i = 0; i < n; ++i)
                    if (value(i) > -INFINITY) order.push_back(i);
                std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return value(a) > value(b); });
                if (int64_t(order.size()) > k) order.resize(size_t(k));
                std::sort(order.begin(), order.end());
                order.resize(size_t(k), -1);
                expect(std::equal(order.begin(), order.end(), out.begin() + r * k), "topk against a sort", double(n));
            }
        }
    }

    void turning() {
        const int64_t n = 9, h = 3, d = 512;
        std::vector<float> x(size_t(n * h * d)), table(64 * 20), a(x.size()), b(x.size());
        std::vector<uint16_t> half(x.size()), ah(x.size()), bh(x.size());
        std::vector<int32_t> positions;
        for (size_t i = 0; i < x.size(); ++i) x[i] = draws.wide(), half[i] = float_to_bf16(x[i]);
        for (auto& v : table) v = draws.normal();
        for (int i = 0; i < n; ++i) positions.push_back(draws.below(20));
        for (const bool inverse : {false, true}) {
            for (int which = 0; which < 2; ++which) {
                RopeParams p{x.data(), true, n, h, d, h * d, d, positions.data(), false, table.data(), 64, 20, inverse, which ? b.data() : a.data(),
                             {2, 0, nullptr}};
                (which ? portable : ops).index.rope(p);
                p.x = half.data(), p.is_float = false, p.out = which ? bh.data() : ah.data();
                (which ? portable : ops).index.rope(p);
            }
            expect(std::memcmp(a.data(), b.data(), a.size() * 4) == 0 && ah == bh, "rope", inverse);
        }
    }

    // Against double, and a row alone or among others: the same bits.
    void projecting(int64_t rows, int64_t n, int64_t k) {
        const int64_t x_stride = k + 3, weight_stride = k + 5;
        std::vector<uint16_t> x(size_t(rows * x_stride)), weight(size_t(n * weight_stride)), half(size_t(rows * n));
        std::vector<float> out(size_t(rows * n)), alone(static_cast<size_t>(n));
        for (auto& v : x) v = float_to_bf16(draws.normal());
        for (auto& v : weight) v = float_to_bf16(draws.normal());
        ProjectParams p{x.data(), x_stride, weight.data(), weight_stride, rows, n, k, out.data(), true, {2, 0, nullptr}};
        ops.index.project(p);
        p.out = half.data(), p.out_float = false, p.plan.num_threads = 1;
        ops.index.project(p);
        for (int64_t r = 0; r < rows; ++r) {
            ProjectParams one{x.data() + r * x_stride, x_stride, weight.data(), weight_stride, 1, n, k, alone.data(), true, {3, 0, nullptr}};
            ops.index.project(one);
            expect(std::memcmp(alone.data(), out.data() + r * n, size_t(n) * 4) == 0, "project: a row alone", double(r));
            for (int64_t c = 0; c < n; ++c) {
                double exact = 0, size = 0;
                for (int64_t i = 0; i < k; ++i) {
                    const double term = double(bf16_to_float(x[size_t(r * x_stride + i)])) * bf16_to_float(weight[size_t(c * weight_stride + i)]);
                    exact += term, size += std::fabs(term);
                }
                const float found = out[size_t(r * n + c)];
                expect(std::fabs(found - exact) <= 1e-6 * size, "project against double", found - exact);
                expect(half[size_t(r * n + c)] == float_to_bf16(found), "project: rounding to bfloat16", found);
            }
        }
    }

    void pooling(int64_t ratio, int64_t dim) {
        const int64_t n = 7;
        std::vector<float> score(size_t(n * ratio * dim)), latent(score.size()), out(size_t(n * dim));
        for (auto& v : score) v = 4 * draws.normal();
        for (auto& v : latent) v = draws.normal();
        for (size_t i = 0; i < score.size(); i += 17) score[i] = -INFINITY, latent[i] = NAN;
        SoftmaxPoolParams p{score.data(), latent.data(), n, ratio, dim, ratio * dim, dim, ratio * dim, dim, out.data(), true, {2, 0, nullptr}};
        expect(ops.index.softmax_pool(p) == Status::OK, "softmax_pool", 0);
        for (int64_t i = 0; i < n * dim; ++i) {
            double total = 0, sum = 0;
            for (int64_t r = 0; r < ratio; ++r) {
                const size_t at = size_t((i / dim * ratio + r) * dim + i % dim);
                if (score[at] == -INFINITY) continue;
                total += std::exp(double(score[at])), sum += latent[at] * std::exp(double(score[at]));
            }
            const double wanted = total > 0 ? sum / total : 0.0;
            expect(std::fabs(out[size_t(i)] - wanted) < 2e-6 * (std::fabs(wanted) + 1), "pooled", out[size_t(i)] - wanted);
        }
        std::vector<float> state(size_t(4 * (ratio + 5) * 2 * dim), 1.0f);
        std::vector<int64_t> slots{3, 3, 3, -1, 0, 0, 0}, lens{4, 5, 6, 0, 1, 2, 3};
        std::vector<float> rows(size_t(n * dim));
        std::vector<int32_t> positions(size_t(n), 0), owners(size_t(n), 0);
        bool closes[7];
        CompressParams c{};
        c.score = score.data(), c.latent = latent.data(), c.n = n, c.dim = dim, c.score_stride = c.latent_stride = dim;
        c.state = state.data(), c.state_stride_dim = 1, c.state_stride_plane = dim, c.state_stride_ring = 2 * dim;
        c.ring = ratio + 5, c.state_stride_slot = c.ring * 2 * dim, c.num_slots = 4;
        c.slots = slots.data(), c.context_lens = lens.data(), c.sequences = n, c.ratio = ratio, c.max_rows = 6, c.num_out = n;
        c.rows = rows.data(), c.rows_float = true, c.closes = closes, c.positions = positions.data(), c.owners = owners.data();
        c.plan = {2, 0, nullptr};
        expect(compress_step_is_sound(c) && ops.index.compress(c) == Status::OK, "compress", 0);
        for (int64_t i = 0; i < n; ++i) {
            expect(closes[i] == (slots[size_t(i)] >= 0 && lens[size_t(i)] % ratio == 0), "closes", double(i));
            if (slots[size_t(i)] < 0) continue;
            const float* kept = state.data() + slots[size_t(i)] * c.state_stride_slot + (lens[size_t(i)] - 1) % c.ring * 2 * dim;
            expect(std::memcmp(kept, score.data() + i * dim, size_t(dim) * 4) == 0, "remembered", double(i));
        }
        slots[4] = 3;
        expect(!compress_step_is_sound(c), "a slot in two runs", 0);
    }

    void run() {
        decoders();
        records();
        for (const RecordKind kind : {RecordKind::V41_FP8, RecordKind::V41_FP4, RecordKind::BF16}) large_load(kind);
        for (const int heads : {1, 8, 20, 32}) scores(RecordKind::INDEX_FP4, heads, 3, 130, false);
        scores(RecordKind::INDEX_FP4, 1, 2, 300, true);
        for (const int heads : {1, 24, 33}) scores(RecordKind::INDEX_FP8, heads, 2, 70, false);
        scores(RecordKind::INDEX_FP8_FP32, 16, 2, 70, false);
        selection(5, 3, 0), selection(3000, 70, 0), selection(5000, 70, 9), selection(40000, 512, 0), selection(700, 900, 2);
        turning();
        projecting(1, 1, 1);
        projecting(9, 7, 33);
        projecting(13, 75, 2600);
        projecting(261, 4, 40);
        pooling(2, 64), pooling(3, 37);
    }
};

inline void test_index(const Operators& ops, const char* target, int* failures) {
    IndexTest{ops, *operators_of(TargetId::PORTABLE), target, failures, {}}.run();
}

}  // namespace sparse_mla::driver
