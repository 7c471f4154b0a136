// SPDX-License-Identifier: Apache-2.0
// The core without Python and torch: a deterministic self-test against plain double arithmetic, run under the sanitizers, under
// emulators of other processors, and by hand; and a timing loop.
//
//     native_driver test [target]           every case on every target present (or the one named); exit status 1 on a failure
//     native_driver corpus <file>...        every file's bytes as records, slots, lengths and logits, on every target present
//     native_driver bench <target> <threads> <heads> <rows> <fp8 keys> <fp4 keys> <MiB of cache>
//     native_driver verify <the same> <percent>    rows of one sequence that share so many keys with the one before, against the same
//                                                  rows as sequences of their own
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>
#include <vector>

#include "driver_index.h"
#include "targets.h"

using namespace sparse_mla;

namespace {

struct Random {
    uint64_t state;
    uint32_t next() {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        uint32_t x = uint32_t((state ^ (state >> 22)) >> (22 + (state >> 61)));
        return x;
    }
    float uniform() { return float(next() >> 8) / 16777216.0f; }
    float normal() { return std::sqrt(-2 * std::log(uniform() + 1e-7f)) * std::cos(6.2831853f * uniform()); }
    int64_t below(int64_t n) { return int64_t((uint64_t(next()) * uint64_t(n)) >> 32); }
};

int failures = 0;

void expect(bool ok, const char* target, const char* what, double got, double limit) {
    if (ok) return;
    ++failures;
    std::printf("FAILED %s %s: %g, limit %g\n", target, what, got, limit);
}

double decode_exact(RecordKind kind, const uint8_t* data, const uint8_t* scales, int i) {
    if (kind == RecordKind::BF16) return bf16_to_float(uint16_t(data[2 * i] | data[2 * i + 1] << 8));
    if (kind == RecordKind::V41_FP4) {
        const int nibble = i % 2 ? data[i / 2] >> 4 : data[i / 2] & 15;
        const int sf = scales[i / 16];
        const double scale = (sf & 0x7f) == 0x7f ? 0.0
                             : (sf & 0x78) == 0 ? std::ldexp(sf & 7, -9) : std::ldexp(8 + (sf & 7), ((sf >> 3) & 15) - 10);
        return E2M1_VALUES[nibble] * (sf & 0x80 ? -scale : scale);
    }
    const int code = data[i], sf = scales[i / 32], field = (code >> 3) & 15;
    const int exponent = (field ? field : 1) - 10 + sf - 127;
    if ((code & 0x7f) == 0x7f || sf == 255 || exponent < -126) return code & 0x80 ? -0.0 : 0.0;
    const double value = std::ldexp(field ? 8 + (code & 7) : code & 7, exponent);
    const double rounded = value >= std::ldexp(1.0, 128) ? INFINITY : value;
    return code & 0x80 ? -rounded : rounded;
}

void test_decode(const Operators& ops, const char* target) {
    float out[HEAD_DIM];
    int wrong = 0;
    std::vector<uint8_t> data(1024), scales(32);
    for (int sf = 0; sf < 256; ++sf) {
        for (int shift = 0; shift < 512; shift += 37) {  // every code under every position of a register sooner or later
            for (int i = 0; i < 512; ++i) data[i] = uint8_t(i + shift);
            for (int i = 0; i < 16; ++i) scales[i] = uint8_t(i % 3 == shift % 3 ? sf : 100 + i);
            ops.decode_record(RecordKind::V41_FP8, data.data(), scales.data(), out);
            for (int i = 0; i < 512; ++i) {
                const float want = float(decode_exact(RecordKind::V41_FP8, data.data(), scales.data(), i));
                wrong += out[i] != want;
            }
            for (int i = 0; i < 256; ++i) data[i] = uint8_t(i * 7 + shift);
            for (int i = 0; i < 32; ++i) scales[i] = uint8_t(sf + i);
            ops.decode_record(RecordKind::V41_FP4, data.data(), scales.data(), out);
            for (int i = 0; i < 512; ++i) wrong += out[i] != float(decode_exact(RecordKind::V41_FP4, data.data(), scales.data(), i));
        }
    }
    for (int i = 0; i < 1024; ++i) data[i] = uint8_t(i % 2 ? 0x3f : i / 2);
    ops.decode_record(RecordKind::BF16, data.data(), data.data(), out);
    for (int i = 0; i < 512; ++i) wrong += out[i] != float(decode_exact(RecordKind::BF16, data.data(), nullptr, i));
    expect(wrong == 0, target, "decoded elements that differ", wrong, 0);
}

struct Case {
    const char* name;
    int b, s_q, h_q;
    RecordKind kind[2];
    int topk[2];  // second 0: one scope
    int page;
    bool planar, lengths, sink, out_float;
    int empty_percent;
    bool shares = false;  // its rows overlap, and so decode little more than half of what they list
};

struct Cache {
    std::vector<uint8_t> bytes;
    AttentionScope scope;
};

void fill_cache(Random& random, RecordKind kind, int page, int pages, bool planar, Cache* cache) {
    const RecordFormat& format = RECORD_FORMATS[int(kind)];
    AttentionScope& s = cache->scope;
    s.kind = kind;
    s.page_size = page;
    s.block_stride = int64_t(page) * format.record_bytes() + 96;
    s.data_step = planar ? format.data_bytes : format.record_bytes();
    s.scale_base = planar ? int64_t(page) * format.data_bytes : format.data_bytes;
    s.scale_step = planar ? format.scale_bytes : format.record_bytes();
    s.num_slots = int64_t(page) * pages;
    // Exactly the bytes a reader may touch, so that a sanitizer sees one read past them.
    cache->bytes.assign(size_t((pages - 1) * s.block_stride + int64_t(page) * format.record_bytes()), 0);
    s.data = cache->bytes.data();
    for (int64_t slot = 0; slot < s.num_slots; ++slot) {
        uint8_t* block = cache->bytes.data() + slot / page * s.block_stride;
        uint8_t* data = block + slot % page * s.data_step;
        uint8_t* scales = block + s.scale_base + slot % page * s.scale_step;
        for (int i = 0; i < format.data_bytes; ++i) data[i] = uint8_t(random.next());
        if (kind == RecordKind::BF16) {
            for (int i = 0; i < HEAD_DIM; ++i) {
                const uint16_t half = float_to_bf16(0.2f * random.normal());
                std::memcpy(data + 2 * i, &half, 2);
            }
        } else if (kind == RecordKind::V41_FP8) {
            for (int i = 0; i < 512; ++i) {
                if ((data[i] & 0x78) == 0x78) data[i] &= 0xbf;
            }
            for (int i = 0; i < 16; ++i) scales[i] = uint8_t(119 + random.below(3));
        } else {
            for (int i = 0; i < 32; ++i) scales[i] = uint8_t(0x10 + random.below(8) + (random.below(2) ? 0x80 : 0));
        }
    }
}

void run_case(const Operators& ops, const char* target, const Case& c) {
    Random random{uint64_t(c.h_q * 1000 + c.topk[0])};
    Cache caches[2];
    const int num_scopes = c.topk[1] ? 2 : 1;
    std::vector<int32_t> indices[2], lengths[2];
    AttentionParams p{};
    for (int n = 0; n < num_scopes; ++n) {
        const int pages = (c.shares ? 4 * c.topk[n] : 40) / c.page + 3;
        fill_cache(random, c.kind[n], c.page, pages, c.planar && c.kind[n] != RecordKind::BF16, &caches[n]);
        indices[n].resize(size_t(c.b) * c.s_q * c.topk[n]);
        for (auto& slot : indices[n]) slot = random.below(100) < c.empty_percent ? -1 : int32_t(random.below(caches[n].scope.num_slots));
        // Rows of a batch element overlap: each moves the list of the one before on by one and changes every seventh key.
        for (int64_t row = 1; row < int64_t(c.b) * c.s_q; ++row) {
            if (row % c.s_q == 0) continue;
            int32_t *list = indices[n].data() + row * c.topk[n], *before = list - c.topk[n];
            for (int k = 0; k + 1 < c.topk[n]; ++k)
                if (random.below(7)) list[k] = before[k + 1];
        }
        AttentionScope& s = caches[n].scope;
        s.indices = indices[n].data();
        s.index_stride_s = c.topk[n];
        s.index_stride_b = int64_t(c.topk[n]) * c.s_q;
        s.topk = c.topk[n];
        s.topk_length = nullptr;
        if (c.lengths) {
            for (int i = 0; i < c.b; ++i) lengths[n].push_back(i == 0 ? 0 : int32_t(random.below(c.topk[n] + 10)));
            s.topk_length = lengths[n].data();
        }
        p.scopes[n] = s;
    }
    const int64_t rows = int64_t(c.b) * c.s_q;
    std::vector<uint16_t> q(size_t(rows) * c.h_q * HEAD_DIM);
    for (auto& x : q) x = float_to_bf16(random.normal());
    std::vector<float> sink(c.h_q);
    for (int h = 0; h < c.h_q; ++h) sink[h] = h % 5 == 1 ? INFINITY : h % 5 == 2 ? -INFINITY : 3 * random.normal();
    p.q = q.data();
    p.q_stride_h = HEAD_DIM;
    p.q_stride_s = int64_t(c.h_q) * HEAD_DIM;
    p.q_stride_b = p.q_stride_s * c.s_q;
    p.b = c.b, p.s_q = c.s_q, p.h_q = c.h_q;
    p.num_scopes = num_scopes;
    p.softmax_scale = 0.0441941738f;
    p.attn_sink = c.sink ? sink.data() : nullptr;
    p.out_float = c.out_float;

    std::vector<double> want(size_t(rows) * c.h_q * HEAD_DIM, 0.0), want_lse(size_t(rows) * c.h_q, INFINITY);
    for (int64_t row = 0; row < rows; ++row) {
        std::vector<std::vector<double>> keys;
        for (int n = 0; n < num_scopes; ++n) {
            const AttentionScope& s = p.scopes[n];
            const int64_t columns = c.lengths ? std::min<int64_t>(s.topk, s.topk_length[row / c.s_q]) : s.topk;
            for (int64_t col = 0; col < columns; ++col) {
                const int32_t slot = s.indices[row * s.topk + col];
                if (slot < 0) continue;
                const uint8_t* block = s.data + slot / s.page_size * s.block_stride;
                std::vector<double> key(HEAD_DIM);
                for (int d = 0; d < HEAD_DIM; ++d)
                    key[d] = decode_exact(s.kind, block + slot % s.page_size * s.data_step,
                                          block + s.scale_base + slot % s.page_size * s.scale_step, d);
                keys.push_back(std::move(key));
            }
        }
        for (int h = 0; h < c.h_q && !keys.empty(); ++h) {
            std::vector<double> logits;
            double top = -INFINITY, total = 0;
            for (const auto& key : keys) {
                double dot = 0;
                for (int d = 0; d < HEAD_DIM; ++d) dot += key[d] * bf16_to_float(q[(row * c.h_q + h) * HEAD_DIM + d]);
                logits.push_back(dot * p.softmax_scale);
                top = std::max(top, logits.back());
            }
            for (double l : logits) total += std::exp(l - top);
            want_lse[row * c.h_q + h] = top + std::log(total);
            if (c.sink) total += std::exp(sink[h] - top);
            for (size_t k = 0; k < keys.size(); ++k)
                for (int d = 0; d < HEAD_DIM; ++d) want[(row * c.h_q + h) * HEAD_DIM + d] += std::exp(logits[k] - top) / total * keys[k][d];
        }
    }

    // The same rows as batch elements of their own, which share nothing; then as they are, on any number of threads.
    AttentionParams apart = p;
    apart.b = rows, apart.s_q = 1, apart.q_stride_b = p.q_stride_s;
    std::vector<int32_t> row_lengths[2];
    for (int n = 0; n < num_scopes; ++n) {
        apart.scopes[n].index_stride_b = c.topk[n];
        for (int64_t row = 0; row < rows && c.lengths; ++row) row_lengths[n].push_back(lengths[n][row / c.s_q]);
        if (c.lengths) apart.scopes[n].topk_length = row_lengths[n].data();
    }
    int64_t decoded_apart = 0;
    std::vector<uint8_t> first;
    std::vector<float> first_lse;
    for (int threads : {0, 1, 2, 3, 8}) {
        const size_t width = c.out_float ? 4 : 2;
        std::vector<uint8_t> out(want.size() * width, 0xff);
        std::vector<float> lse(want_lse.size(), NAN), peaks(want_lse.size(), NAN);
        AttentionParams copy = threads == 0 ? apart : p;
        copy.plan = {threads == 0 ? 1 : threads, 0, nullptr};
        copy.out = out.data(), copy.lse = lse.data(), copy.max_logits = peaks.data();
        const Status status = ops.sparse_decode(copy);
        expect(status == Status::OK, target, c.name, double(status), 0);
        if (threads == 0) decoded_apart = copy.decoded;
        if (threads == 1 && c.shares) expect(copy.decoded < 0.6 * double(decoded_apart), target, c.name, copy.decoded, 0.6 * double(decoded_apart));
        if (threads == 1 && !c.shares && c.h_q > 8) expect(copy.decoded >= decoded_apart, target, c.name, copy.decoded, decoded_apart);
        if (threads > 0) {
            expect(out == first, target, c.name, threads, 1);
            expect(std::memcmp(lse.data(), first_lse.data(), lse.size() * 4) == 0, target, c.name, threads, 1);
            continue;
        }
        first = out;
        first_lse = lse;
        double error = 0, norm = 0, lse_error = 0;
        for (size_t i = 0; i < want.size(); ++i) {
            float got;
            if (c.out_float) {
                std::memcpy(&got, out.data() + 4 * i, 4);
            } else {
                uint16_t half;
                std::memcpy(&half, out.data() + 2 * i, 2);
                got = bf16_to_float(half);
            }
            error += (got - want[i]) * (got - want[i]);
            norm += want[i] * want[i];
        }
        for (size_t i = 0; i < lse.size(); ++i) {
            if (std::isinf(want_lse[i]) || std::isinf(lse[i]))
                lse_error += want_lse[i] == double(lse[i]) ? 0 : 1;
            else
                lse_error = std::max(lse_error, std::fabs(lse[i] - want_lse[i]) / (1 + std::fabs(want_lse[i])));
        }
        // P may be rounded to bfloat16 (2^-9 relative), the output is (unless float).
        expect(std::sqrt(error / (norm + 1e-30)) < 3e-3, target, c.name, std::sqrt(error / (norm + 1e-30)), 3e-3);
        expect(lse_error < 2e-5, target, c.name, lse_error, 2e-5);
    }
}

void test_merge(const Operators& ops, const char* target) {
    Random random{7};
    const int64_t rows = 37, dim = 96, parts = 3, heads = 5;
    std::vector<std::vector<float>> outs(parts, std::vector<float>(rows * dim)), lses(parts, std::vector<float>(rows));
    std::vector<float> sink(heads);
    for (auto& s : sink) s = random.normal();
    sink[2] = INFINITY, sink[3] = -INFINITY;
    for (int64_t i = 0; i < parts; ++i) {
        for (auto& x : outs[i]) x = random.normal();
        for (int64_t r = 0; r < rows; ++r) {
            lses[i][r] = (r + i) % 4 == 0 || r == 5 ? INFINITY : 4 * random.normal();
            for (int64_t d = 0; d < dim && lses[i][r] == INFINITY; ++d) outs[i][r * dim + d] = NAN;  // an empty part is not read
        }
    }
    const void* out_list[] = {outs[0].data(), outs[1].data(), outs[2].data()};
    const float* lse_list[] = {lses[0].data(), lses[1].data(), lses[2].data()};
    std::vector<float> out(rows * dim), lse(rows);
    MergeParams p{parts, rows, dim, out_list, true, lse_list, sink.data(), heads, out.data(), true, lse.data(), {2, 0, nullptr}};
    expect(ops.merge_partials(p) == Status::OK, target, "merge status", 1, 0);
    double worst = 0;
    for (int64_t r = 0; r < rows; ++r) {
        double total = 0;
        for (int64_t i = 0; i < parts; ++i) total += lses[i][r] == INFINITY ? 0 : std::exp(double(lses[i][r]));
        const double want_lse = total == 0 ? INFINITY : std::log(total);
        if (want_lse != lse[r]) worst = std::max(worst, std::fabs(want_lse - lse[r]));
        for (int64_t d = 0; d < dim; ++d) {
            double want = 0;
            for (int64_t i = 0; i < parts; ++i)
                if (lses[i][r] != INFINITY) want += std::exp(double(lses[i][r])) / (total + std::exp(double(sink[r % heads]))) * outs[i][r * dim + d];
            worst = std::max(worst, std::fabs(want - out[r * dim + d]));
        }
    }
    expect(worst < 1e-5, target, "merge error", worst, 1e-5);
}

void test_bad_slot() {
    std::vector<int32_t> indices = {0, -1, 5, 9, 10, 3, -1, -7};
    AttentionParams p{};
    p.b = 2, p.s_q = 1, p.num_scopes = 1;
    p.scopes[0].indices = indices.data();
    p.scopes[0].index_stride_b = 4;
    p.scopes[0].topk = 4;
    p.scopes[0].num_slots = 10;
    expect(has_bad_slot(p), "core", "slot past the end", 0, 1);
    std::vector<int32_t> lengths = {4, 0};
    p.scopes[0].topk_length = lengths.data();
    expect(!has_bad_slot(p), "core", "slot past the length", 1, 0);
    lengths[1] = -1;
    expect(has_bad_slot(p), "core", "negative length", 0, 1);
    lengths = {4, 4};
    indices[4] = -2;
    expect(has_bad_slot(p), "core", "negative slot", 0, 1);
    indices[4] = 9, indices[7] = -1;
    expect(!has_bad_slot(p), "core", "good slots", 1, 0);
}

constexpr RecordKind FP8 = RecordKind::V41_FP8, FP4 = RecordKind::V41_FP4, BF16 = RecordKind::BF16;

const Case CASES[] = {
    {"one key", 1, 1, 1, {FP8, FP8}, {1, 0}, 1, false, false, false, false, 0},
    {"all empty", 2, 1, 3, {FP8, FP4}, {5, 7}, 4, false, false, true, false, 100},
    {"one head", 2, 2, 1, {FP8, FP4}, {33, 70}, 7, false, true, true, false, 20},
    {"two heads", 1, 3, 2, {FP8, FP4}, {16, 513}, 64, true, false, true, true, 5},
    {"three heads", 2, 1, 3, {FP4, FP8}, {17, 19}, 5, true, false, true, false, 10},
    {"four heads", 2, 1, 4, {BF16, FP4}, {31, 64}, 16, false, false, false, false, 10},
    {"five heads", 2, 1, 5, {FP8, FP8}, {31, 64}, 16, false, false, true, false, 10},
    {"six heads", 1, 1, 6, {FP8, FP4}, {40, 31}, 16, true, false, true, false, 10},
    {"seven heads", 1, 1, 7, {FP8, FP4}, {40, 31}, 16, true, false, true, false, 10},
    {"eight heads", 3, 2, 8, {FP8, FP4}, {128, 300}, 64, true, true, true, false, 15},
    {"six rows, one head", 1, 6, 1, {FP8, FP4}, {128, 512}, 64, false, false, true, false, 0},
    {"one head, bfloat16 beside FP8", 1, 2, 1, {BF16, FP8}, {33, 70}, 7, false, true, true, false, 20},
    {"six rows, two heads", 1, 6, 2, {FP8, FP4}, {128, 512}, 64, false, false, true, false, 0, true},
    {"six rows, three heads", 2, 6, 3, {FP8, BF16}, {128, 70}, 16, true, true, false, true, 0, true},
    {"six rows, five heads", 1, 6, 5, {FP8, FP4}, {128, 512}, 64, true, false, true, false, 3, true},
    {"twenty-one rows, eight heads", 1, 21, 8, {FP8, FP4}, {128, 300}, 64, false, false, true, false, 0, true},
    {"six rows, sixteen heads", 1, 6, 16, {FP8, FP4}, {64, 200}, 64, false, false, true, false, 0},
    {"three short rows of a wide list", 3, 1, 16, {FP8, FP4}, {400, 400}, 64, false, true, false, false, 60},
    {"twelve heads", 1, 1, 12, {FP8, BF16}, {100, 801}, 3, false, false, true, true, 0},
    {"sixteen heads", 1, 5, 16, {FP8, FP4}, {128, 512}, 64, false, false, true, false, 3},
    {"seventeen heads", 2, 1, 17, {FP8, FP4}, {61, 0}, 64, false, false, true, false, 3},
    {"sixty-four heads", 1, 1, 64, {FP8, FP4}, {128, 512}, 64, false, false, true, false, 0},
    {"a hundred heads", 1, 1, 100, {FP8, FP4}, {65, 130}, 64, true, true, true, false, 9},
    {"a hundred and forty heads", 1, 1, 140, {FP8, FP4}, {12, 130}, 64, false, false, true, true, 9},
};

// A list for each of `rows` rows, ascending: every next one takes (100 - percent) % of its keys anew, or, for consecutive slots,
// moves on by one.
void fill_overlapping(Random& random, int rows, int topk, int64_t slots, int percent, bool window, int32_t* indices) {
    std::vector<int32_t> list(static_cast<size_t>(topk));
    const int32_t start = int32_t(random.below(slots - topk - rows));
    for (int row = 0; row < rows; ++row) {
        for (int k = 0; k < topk; ++k) {
            if (window) list[k] = start + row + k;
            else if (row == 0 || random.below(100) >= percent) list[k] = int32_t(random.below(slots));
        }
        std::sort(list.begin(), list.end());
        std::copy(list.begin(), list.end(), indices + int64_t(row) * topk);
    }
}

// percent < 0: rows of different sequences. Otherwise the rows of one, timed against the same rows as if of different ones.
void bench(const Operators& ops, int threads, int heads, int rows, int topk8, int topk4, int mib, int percent) {
    Random random{1};
    AttentionParams p{};
    const int topk[2] = {topk8, topk4};
    const RecordKind kind[2] = {FP8, FP4};
    std::vector<std::vector<uint8_t>> bytes(2);
    std::vector<std::vector<int32_t>> indices(2);
    const int lists = 128;  // more than a last-level cache holds, though most of their keys repeat
    for (int n = 0; n < 2; ++n) {
        const int record = RECORD_FORMATS[int(kind[n])].record_bytes(), data = RECORD_FORMATS[int(kind[n])].data_bytes;
        if (!topk[n]) continue;
        AttentionScope& s = p.scopes[p.num_scopes++];
        const int64_t slots = int64_t(mib) * (1 << 20) / 2 / record / 64 * 64;
        bytes[n].resize(size_t(slots) * record);
        for (int64_t i = 0; i < slots; ++i) {
            uint8_t* r = bytes[n].data() + i * record;
            for (int j = 0; j < data; j += 4) {
                // Of FP8 no subnormal codes: hardly a quantised value is one, and arithmetic on them is slow.
                const uint32_t x = (random.next() & 0xbfbfbfbf) | (kind[n] == FP8 ? 0x20202020 : 0);
                std::memcpy(r + j, &x, 4);
            }
            for (int j = data; j < record; ++j) r[j] = kind[n] == FP8 ? 120 : 0x18;
        }
        indices[n].resize(size_t(lists) * rows * topk[n]);
        for (auto& slot : indices[n]) slot = int32_t(random.below(slots));
        for (int i = 0; i < lists && percent >= 0; ++i)
            fill_overlapping(random, rows, topk[n], slots, percent, n == 0, indices[n].data() + int64_t(i) * rows * topk[n]);
        s = {bytes[n].data(), kind[n], 64, 64 * record, record, data, record, slots, indices[n].data(), topk[n], topk[n], topk[n], nullptr};
    }
    std::vector<uint16_t> q(size_t(rows) * heads * 512), out(q.size());
    for (auto& x : q) x = float_to_bf16(random.normal());
    std::vector<float> lse(size_t(rows) * heads);
    p.q = q.data();
    p.q_stride_h = 512, p.q_stride_s = p.q_stride_b = heads * 512;
    p.b = rows, p.s_q = 1, p.h_q = heads;
    p.softmax_scale = 0.0441941738f;
    p.out = out.data();
    p.lse = lse.data();
    p.plan = {threads, 0, nullptr};
    // One thread is timed by its own CPU clock, which other processes do not disturb.
    const auto now = [threads] {
        timespec t;
        clock_gettime(threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
        return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
    };
    const auto seconds = [&](double from) { return now() - from; };
    std::vector<double> times, peaks, alone, ratios, gathers;
    std::vector<uint8_t> gathered(64 * 1024);
    const double deadline = 1.0;
    const double start = now();
    for (int i = 0; seconds(start) < deadline || i < 20; ++i) {
        if (i % 16 == 0) {
            const double t = now();
            const double flops = ops.peak_loop(100000);
            peaks.push_back(flops / seconds(t) * 1e-9);
        }
        AttentionParams call = p;
        for (int n = 0; n < p.num_scopes; ++n) call.scopes[n].indices += int64_t(i % lists) * rows * p.scopes[n].topk;
        if (percent >= 0) {
            // Both read the same records: whoever comes first brings them to the cache, so they take turns.
            for (int turn = 0; turn < 2; ++turn) {
                const bool together = (turn + i + i / lists) % 2 == 0;
                AttentionParams each = call;
                if (together) each.s_q = each.b, each.b = 1;
                const double t = now();
                ops.sparse_decode(each);
                (together ? times : alone).push_back(seconds(t));
            }
            ratios.push_back(alone.back() / times.back());
            continue;
        }
        // The roof of few heads: the same kind of records from the same memory, copied to where they stay in cache.
        const int other = (i + lists / 2) % lists;
        const double g = now();
        for (int n = 0; n < p.num_scopes && threads == 1; ++n) {
            const AttentionScope& scope = p.scopes[n];
            const int32_t* slots = scope.indices + int64_t(other) * rows * scope.topk;
            for (int64_t k = 0; k < rows * scope.topk; ++k)
                std::memcpy(gathered.data() + k % 64 * scope.data_step, scope.data + slots[k] * scope.data_step, size_t(scope.data_step));
        }
        gathers.push_back(seconds(g));
        const double t = now();
        ops.sparse_decode(call);
        times.push_back(seconds(t));
    }
    if (percent >= 0) {
        std::sort(alone.begin(), alone.end());
        std::sort(ratios.begin(), ratios.end());
        std::sort(times.begin(), times.end());
        std::printf("h=%d, %d rows, %d %% of the keys shared, %d MiB, %d threads: together %.1f us a row (best %.1f), alone %.1f (best %.1f), ratio %.3f (of medians %.3f)\n",
                    heads, rows, percent, mib, threads, times[times.size() / 2] * 1e6 / rows, times[0] * 1e6 / rows,
                    alone[alone.size() / 2] * 1e6 / rows, alone[0] * 1e6 / rows, ratios[ratios.size() / 2], alone[alone.size() / 2] / times[times.size() / 2]);
        return;
    }
    std::sort(times.begin(), times.end());
    std::sort(peaks.begin(), peaks.end());
    std::sort(gathers.begin(), gathers.end());
    const double us = times[times.size() / 2] * 1e6, peak = peaks[peaks.size() / 2];
    const double gflops = 4.0 * 512 * heads * (topk8 + topk4) * rows / us * 1e-3;
    std::printf("h=%d rows=%d %d+%d keys %d MiB threads=%d: %.1f us (%.1f per row, best %.1f), %.1f GF/s, %.1f%% of %.1f GF/s, %.2f GB/s, copying the records %.1f us a row (best %.1f)\n", heads,
                rows, topk8, topk4, mib, threads, us, us / rows, times[0] * 1e6 / rows, gflops, 100 * gflops / (peak * threads), peak,
                rows * (topk8 * 528.0 + topk4 * 288.0) / us * 1e-3, gathers[gathers.size() / 2] * 1e6 / rows, gathers[0] * 1e6 / rows);
}

// Bytes from the front of a file, zeros once they are used up.
struct Input {
    std::vector<uint8_t> bytes;
    size_t at = 0;
    uint8_t next() { return at < bytes.size() ? bytes[at++] : 0; }
    int64_t below(int64_t n) { return (next() | next() << 8) % n; }
};

// The fuzz corpus under a sanitizer: buffers are exactly as large as the operators may read, and any bytes may be in them. There is
// nothing to compare with here; the Python side compares backends on the same files.
void run_corpus_file(const Operators& ops, Input input) {
    for (const RecordKind kind : {RecordKind::V41_FP8, RecordKind::V41_FP4, RecordKind::BF16}) {
        const RecordFormat& format = RECORD_FORMATS[int(kind)];
        const bool planar = input.below(2) && kind != RecordKind::BF16;
        const int page = 1 + int(input.below(5)), topk = 1 + int(input.below(40)), heads = 1 + int(input.below(20));
        Cache cache;
        Random random{1};
        fill_cache(random, kind, page, 3, planar, &cache);
        for (auto& byte : cache.bytes) byte = input.next();
        for (int64_t slot = 0; slot < cache.scope.num_slots; ++slot) {
            const uint8_t* block = cache.scope.data + slot / page * cache.scope.block_stride;
            std::vector<uint8_t> data(block + slot % page * cache.scope.data_step,
                                      block + slot % page * cache.scope.data_step + format.data_bytes);
            std::vector<uint8_t> scales(block + cache.scope.scale_base + slot % page * cache.scope.scale_step,
                                        block + cache.scope.scale_base + slot % page * cache.scope.scale_step + format.scale_bytes);
            std::vector<float> values(HEAD_DIM);
            ops.decode_record(kind, data.data(), scales.data(), values.data());
        }
        std::vector<int32_t> indices(static_cast<size_t>(topk));
        for (auto& slot : indices) slot = int32_t(input.below(cache.scope.num_slots + 1)) - 1;
        std::vector<int32_t> length{int32_t(input.below(topk + 3))};
        std::vector<uint16_t> q(size_t(heads) * HEAD_DIM);
        for (auto& x : q) x = uint16_t(input.next() | input.next() << 8);
        std::vector<float> out(size_t(heads) * HEAD_DIM), lse(static_cast<size_t>(heads));
        AttentionParams p{};
        p.q = q.data();
        p.q_stride_h = HEAD_DIM;
        p.q_stride_s = p.q_stride_b = int64_t(heads) * HEAD_DIM;
        p.b = p.s_q = 1, p.h_q = heads, p.num_scopes = 1;
        p.scopes[0] = cache.scope;
        p.scopes[0].indices = indices.data();
        p.scopes[0].index_stride_b = p.scopes[0].index_stride_s = p.scopes[0].topk = topk;
        p.scopes[0].topk_length = length.data();
        p.softmax_scale = 0.0441941738f;
        p.out = out.data(), p.out_float = true, p.lse = lse.data();
        p.plan.num_threads = 2;
        if (!has_bad_slot(p)) ops.sparse_decode(p);
    }
}

int run_corpus(int count, char** names) {
    for (int t = 0; t < NUM_TARGETS; ++t) {
        if (target_absence(TargetId(t))) continue;
        int done = 0;
        for (int i = 0; i < count; ++i) {
            std::FILE* file = std::fopen(names[i], "rb");
            if (!file) continue;
            Input input;
            for (int c; (c = std::fgetc(file)) != EOF;) input.bytes.push_back(uint8_t(c));
            std::fclose(file);
            run_corpus_file(*operators_of(TargetId(t)), std::move(input));
            ++done;
        }
        std::printf("%s: %d files\n", TARGET_NAMES[t], done);
        if (!done) return 1;
    }
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    const std::string mode = argc > 1 ? argv[1] : "test";
    if (mode == "corpus") return run_corpus(argc - 2, argv + 2);
    const std::string wanted = argc > 2 ? argv[2] : "";
    for (int t = 0; t < NUM_TARGETS; ++t) {
        const char* name = TARGET_NAMES[t];
        if (!wanted.empty() && wanted != name) continue;
        if (const char* why = target_absence(TargetId(t))) {
            std::printf("%s: absent, %s\n", name, why);
            continue;
        }
        const Operators& ops = *operators_of(TargetId(t));
        if (mode == "bench" || mode == "verify") {
            const auto arg = [&](int i, int fallback) { return argc > i ? std::atoi(argv[i]) : fallback; };
            bench(ops, arg(3, 1), arg(4, 64), arg(5, 8), arg(6, 128), arg(7, 512), arg(8, 512), mode == "verify" ? arg(9, 80) : -1);
            continue;
        }
        test_decode(ops, name);
        for (const Case& c : CASES) run_case(ops, name, c);
        test_merge(ops, name);
        driver::test_index(ops, name, &failures);
        std::printf("%s: %s\n", name, failures ? "FAILED" : "ok");
    }
    if (mode == "test") test_bad_slot();
    return failures != 0;
}
