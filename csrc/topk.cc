// SPDX-License-Identifier: Apache-2.0
#include "topk.h"

namespace sparse_mla {

namespace {

bool all_inside(const int32_t* bound, int64_t rows, int64_t n) {
    for (int64_t i = 0; bound && i < rows; ++i)
        if (bound[i] < 0 || bound[i] > n) return false;
    return true;
}

}  // namespace

bool topk_bounds_are_sound(const TopkParams& params) {
    return all_inside(params.begin, params.rows, params.n) && all_inside(params.end, params.rows, params.n);
}

bool candidate_lengths_are_sound(const CandidateBlocksParams& params) { return all_inside(params.lengths, params.rows, params.n); }

}  // namespace sparse_mla
