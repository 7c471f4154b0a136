// SPDX-License-Identifier: Apache-2.0
#include "compress.h"

#include <cstdlib>

namespace sparse_mla {

namespace {

// A mark per state slot; data is null when memory is exhausted.
struct SlotMarks {
    uint8_t* data;
    explicit SlotMarks(int64_t slots) : data(static_cast<uint8_t*>(std::calloc(size_t(slots > 0 ? slots : 1), 1))) {}
    ~SlotMarks() { std::free(data); }
    bool first_time(int64_t slot) {
        const bool first = !data[slot];
        data[slot] = 1;
        return first;
    }
};

bool decode_is_sound(const CompressParams& p) {
    SlotMarks seen(p.num_slots);
    if (!seen.data) return false;
    int64_t run = 0;
    for (int64_t i = 0; i < p.n; ++i) {
        const int64_t slot = p.slots[i];
        if (slot < -1 || slot >= p.num_slots) return false;
        if (slot < 0) continue;
        if (p.context_lens[i] < 1) return false;
        const bool continues = i > 0 && p.slots[i - 1] == slot;
        if (continues && p.context_lens[i] != p.context_lens[i - 1] + 1) return false;
        if (!continues && !seen.first_time(slot)) return false;
        run = continues ? run + 1 : 1;
        if (run > p.max_rows) return false;
    }
    return true;
}

bool prefill_is_sound(const CompressParams& p) {
    SlotMarks seen(p.num_slots);
    if (!seen.data) return false;
    if (p.cu_seqlens_q[0] != 0 || p.cu_seqlens_q[p.sequences] > p.n) return false;
    int64_t total = 0;
    for (int64_t i = 0; i < p.sequences; ++i) {
        const int64_t length = p.cu_seqlens_q[i + 1] - p.cu_seqlens_q[i], history = p.context_lens[i] - length;
        if (length < 0 || history < 0) return false;
        const int64_t slot = p.slots[i];
        if (slot < -1 || slot >= p.num_slots || (slot >= 0 && !seen.first_time(slot))) return false;
        const int64_t closed = p.context_lens[i] / p.ratio - history / p.ratio;
        if (slot < 0 && history % p.ratio != 0 && closed > 0) return false;
        total += closed > 1 ? closed : 1;
    }
    return total <= p.num_out;
}

}  // namespace

bool compress_step_is_sound(const CompressParams& params) {
    return params.cu_seqlens_q ? prefill_is_sound(params) : decode_is_sound(params);
}

void plan_compress_step(const CompressParams& p) {
    const auto put = [&](int64_t i, bool closes, int64_t position, int64_t owner) {
        p.closes[i] = closes;
        p.positions[i] = closes ? int32_t(position) : 0;
        p.owners[i] = int32_t(owner);
    };
    if (!p.cu_seqlens_q) {
        for (int64_t i = 0; i < p.n; ++i) {
            const bool live = p.slots[i] >= 0;
            put(i, live && p.context_lens[i] % p.ratio == 0, p.context_lens[i] - p.ratio, live ? i : -1);
        }
        return;
    }
    int64_t out = 0;
    for (int64_t i = 0; i < p.sequences; ++i) {
        const int64_t history = p.context_lens[i] - (p.cu_seqlens_q[i + 1] - p.cu_seqlens_q[i]);
        const int64_t first = history / p.ratio, last = p.context_lens[i] / p.ratio;
        if (first == last) put(out++, false, 0, i);
        for (int64_t group = first; group < last; ++group) put(out++, true, group * p.ratio, i);
    }
    for (; out < p.num_out; ++out) put(out, false, 0, -1);
}

}  // namespace sparse_mla
