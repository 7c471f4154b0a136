// SPDX-License-Identifier: Apache-2.0
// Deterministic selection of the k best columns of each row: higher value first, then lower index; ascending output, -1 filled.
//
// Values are compared as integer codes that order like the values, with -0 equal to +0. NaN is never selected.
#pragma once

#include <cstdint>

#include "parallel.h"

namespace sparse_mla {

struct TopkParams {
    const void* logits;  // [rows, n] bfloat16 or float, columns contiguous
    bool logits_float;
    int64_t rows, n, row_stride;  // elements
    int64_t k;
    const int32_t* begin;  // [rows] or nullptr: 0
    const int32_t* end;    // [rows] or nullptr: n
    bool skip_neg_inf;     // -inf marks a masked column and is never selected
    int32_t* out;          // [rows, k] contiguous
    int64_t nan_row;       // out: the first row with a NaN among its candidates, -1 without one
    Plan plan;
};

// Candidate blocks: the block_size columns of a block count as their maximum, the last block of a row always wins.
struct CandidateBlocksParams {
    const void* logits;  // [rows, n] bfloat16 or float, columns contiguous
    bool logits_float;
    int64_t rows, n, row_stride;  // elements
    const int32_t* lengths;       // [rows] valid columns
    int64_t block_size;           // 8 or 16
    int64_t k;
    int32_t* out;     // [rows, k] contiguous block ids
    int64_t nan_row;  // out, as in TopkParams
    Plan plan;
};

// All begin and end (lengths) lie in [0, n].
bool topk_bounds_are_sound(const TopkParams& params);
bool candidate_lengths_are_sound(const CandidateBlocksParams& params);

}  // namespace sparse_mla
