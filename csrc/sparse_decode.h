// SPDX-License-Identifier: Apache-2.0
// Attention of query rows over selected slots of one or two paged caches: one softmax, sink in the denominator, lse.
//
//     out[i] = sum_j exp(l_ij - lse_i) * k_j / (1 + exp(sink - lse_i)),   l_ij = softmax_scale * (q_i . k_j)
//
// A row without a valid slot gives out = 0, lse = +inf. Slots that are not valid are never read.
#pragma once

#include <cstdint>

#include "cpu.h"
#include "formats.h"
#include "parallel.h"

namespace sparse_mla {

struct AttentionScope {
    const uint8_t* data;      // byte of block 0, record 0
    RecordKind kind;
    int64_t page_size;        // records per block
    int64_t block_stride;     // bytes
    int64_t data_step;        // bytes from one record's codes to the next one's inside a block
    int64_t scale_base;       // bytes from the block's start to its first scale factors
    int64_t scale_step;       // bytes from one record's scale factors to the next one's
    int64_t num_slots;        // slots at or past it do not exist
    const int32_t* indices;   // [b, s_q, topk], -1: empty
    int64_t index_stride_b, index_stride_s;  // elements
    int64_t topk;
    const int32_t* topk_length;  // [b] or nullptr: columns at or past it are ignored
};

// Where a record is.
struct Address {
    const uint8_t *data, *scales;
};

struct AttentionParams {
    const uint16_t* q;  // [b, s_q, h_q, 512] bfloat16, last dimension contiguous
    int64_t q_stride_b, q_stride_s, q_stride_h;  // elements
    int64_t b, s_q, h_q;
    int num_scopes;
    AttentionScope scopes[2];
    bool skip_out_of_range;   // slots outside [0, num_slots) are empty (prefill) instead of the caller's fault (decode)
    float softmax_scale;
    const float* attn_sink;   // [h_q] or nullptr
    void* out;                // [b, s_q, h_q, 512] contiguous, bfloat16 or float
    bool out_float;
    float* lse;               // [b, s_q, h_q] contiguous
    float* max_logits;        // [b, s_q, h_q] contiguous or nullptr: scaled, -inf for an empty row
    Plan plan;                // scratch_bytes is filled by the operator
    TargetId ran;             // filled by the operator: the target whose code this was
    int64_t decoded;          // filled by the operator: records decoded, fewer than listed where rows share them
};

// Whether a slot inside its length is neither -1 nor below num_slots, or a length is negative. Only whether: the caller words it.
bool has_bad_slot(const AttentionParams& params);

}  // namespace sparse_mla
