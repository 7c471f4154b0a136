// SPDX-License-Identifier: Apache-2.0
// Softmax pooling of R rows per channel, alone and with the compressor's ring of recent rows.
//
//     out[n, d] = sum_r latent[n, r, d] * softmax(score[n, :, d])_r
//
// A row whose score is -inf is left out, whatever its latent holds; a channel of nothing but -inf gives 0; rows with score +inf share the
// weight equally.
#pragma once

#include <cstdint>

#include "parallel.h"

namespace sparse_mla {

struct SoftmaxPoolParams {
    const float *score, *latent;  // [n, ratio, dim], channels contiguous
    int64_t n, ratio, dim;
    int64_t score_stride_n, score_stride_r, latent_stride_n, latent_stride_r;  // elements
    void* out;  // [n, dim] contiguous, bfloat16 or float
    bool out_float;
    Plan plan;
};

// One step of the compressor. Position p of a sequence lives at p % ring of its state slot.
struct CompressParams {
    const float *score, *latent;  // [n, dim], channels contiguous
    int64_t n, dim;
    int64_t score_stride, latent_stride;  // elements
    float* state;                         // [num_slots, ring, 2, dim]: score, then latent
    int64_t state_stride_slot, state_stride_ring, state_stride_plane, state_stride_dim;  // elements
    int64_t num_slots, ring;
    const int64_t* slots;         // decode [n], prefill [sequences]; -1: padding, or a sequence not to be remembered
    const int64_t* context_lens;  // likewise: tokens up to and including this row, or this chunk
    const int64_t* cu_seqlens_q;  // [sequences + 1], or nullptr: decode
    int64_t sequences;
    int64_t ratio, max_rows, num_out;
    void* rows;  // [num_out, dim] contiguous, bfloat16 or float
    bool rows_float;
    bool* closes;          // [num_out]
    int32_t* positions;    // [num_out]
    int32_t* owners;       // [num_out]
    Plan plan;
};

// The description of the step is legal: slots and lengths in range, rows of a sequence consecutive, no slot twice, room in the output.
bool compress_step_is_sound(const CompressParams& params);

// Fills closes, positions and owners of a legal step.
void plan_compress_step(const CompressParams& params);

}  // namespace sparse_mla
