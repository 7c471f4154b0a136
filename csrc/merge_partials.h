// SPDX-License-Identifier: Apache-2.0
// Combine attention outputs over disjoint key sets: softmax weights from their lse, the sink applied once.
#pragma once

#include <cstdint>

#include "parallel.h"

namespace sparse_mla {

struct MergeParams {
    int64_t num_parts, rows, dim;  // a row is one (token, head)
    const void* const* outs;       // [num_parts] of [rows, dim] contiguous, bfloat16 or float
    bool outs_float;
    const float* const* lses;      // [num_parts] of [rows] contiguous; +inf: an empty part, its out is not read
    const float* attn_sink;        // [num_heads] or nullptr
    int64_t num_heads;             // row % num_heads picks the sink
    void* out;                     // [rows, dim] contiguous
    bool out_float;
    float* lse;                    // [rows]
    Plan plan;
};

}  // namespace sparse_mla
