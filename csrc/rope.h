// SPDX-License-Identifier: Apache-2.0
// Interleaved rotary embedding of the last 64 elements of every head, forward and conjugate.
//
//     out[2i] = fma(x[2i], cos, -(x[2i+1] * sin))      out[2i+1] = fma(x[2i], sin, x[2i+1] * cos)      inverse: sin -> -sin
#pragma once

#include <cstdint>

#include "parallel.h"

namespace sparse_mla {

constexpr int ROPE_DIM = 64;

struct RopeParams {
    const void* x;  // [n, h, d] bfloat16 or float, elements contiguous
    bool is_float;
    int64_t n, h, d;
    int64_t x_stride_n, x_stride_h;  // elements
    const void* positions;           // [n] int32 or int64
    bool positions_long;
    const float* table;    // [max_pos, 64]: cosines of the 32 pairs, then their sines
    int64_t table_stride;  // elements
    int64_t max_pos;
    bool inverse;
    void* out;  // [n, h, d] contiguous
    Plan plan;
};

// Every position has a row in the table.
bool rope_positions_are_sound(const RopeParams& params);

}  // namespace sparse_mla
