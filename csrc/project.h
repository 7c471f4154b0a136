// SPDX-License-Identifier: Apache-2.0
// Projection of the attention layer: out = x * weight^T in float32, rounded once. A row's bits depend on the row and the
// weight alone, not on how many rows come with it, which no general matrix product promises.
#pragma once

#include <cstdint>

#include "parallel.h"

namespace sparse_mla {

struct ProjectParams {
    const uint16_t* x;  // [rows, k] bfloat16
    int64_t x_stride;   // elements
    const uint16_t* weight;  // [n, k] bfloat16
    int64_t weight_stride;   // elements
    int64_t rows, n, k;
    void* out;  // [rows, n] contiguous, bfloat16 or float
    bool out_float;
    Plan plan;
};

}  // namespace sparse_mla
