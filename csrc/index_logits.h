// SPDX-License-Identifier: Apache-2.0
// Index scores, and the selection of the best keys without a matrix of scores in memory.
//
//     logits[t, j] = sum_h relu(q[t, h] . k[j]) * w[t, h]        -inf where row t has no key j
//
// A score depends on its query row and its key alone: which other keys or rows share a tile, which thread computes it, and whether
// it ends in a matrix or in a selection never moves a bit.
#pragma once

#include <cstdint>

#include "formats.h"
#include "parallel.h"

namespace sparse_mla {

// Where index keys lie. Contiguous ("ragged") keys are one page of any size.
struct IndexKeys {
    RecordKind kind;
    const uint8_t* data;    // codes of page 0, record 0
    const uint8_t* scales;  // scale factors of page 0, record 0
    int64_t num_pages;
    int64_t page_size;      // records per page
    int64_t data_page_stride, scale_page_stride;  // bytes from one page to the next
    int64_t data_step, scale_step;                // bytes from one record to the next inside a page
};

struct IndexParams {
    IndexKeys keys;
    const uint8_t* q;  // [rows, heads, 64 e2m1 pairs or 128 e4m3]
    int64_t q_stride_row, q_stride_head;        // bytes
    const uint8_t* q_sf;                        // [rows, heads, 4] ue8m0, or nullptr: 1 (INDEX_FP8_FP32)
    int64_t q_sf_stride_row, q_sf_stride_head;  // bytes
    const void* weights;                        // [rows, heads] bfloat16 or float
    bool weights_float;
    int64_t weights_stride_row, weights_stride_head;  // elements
    int64_t rows, heads;
    const int32_t* block_table;  // [rows / rows_per_table, table_width] pages, or nullptr: contiguous keys
    int64_t table_stride, table_width;
    int64_t rows_per_table;
    const int32_t* starts;  // [rows] first key, contiguous keys only (else nullptr: 0)
    const int32_t* ends;    // [rows] one past the last key
    const int32_t* blocks;  // [rows, num_blocks] candidate blocks, ascending, then -1; or nullptr: every key
    int64_t blocks_stride, num_blocks;
    int64_t block_size;
    bool blocks_from_row;   // block 0 begins at the row's first key, not at key 0 of the array
    int64_t width;          // keys a row may have
    bool score_float;       // scores are rounded to float, else to bfloat16
    Plan plan;              // scratch_bytes is filled by the operator
};

struct IndexLogitsParams : IndexParams {
    void* out;           // [rows, columns] of the score type
    int64_t columns;     // width, or num_blocks * block_size
    int64_t out_stride;  // elements
};

struct IndexTopkParams : IndexParams {
    int64_t k;
    int32_t* out;  // [rows, k] contiguous, ascending, -1 filled
    bool raise_on_nan;
    int64_t nan_row, nan_entry;  // out: the first NaN score by row, then by entry; nan_row is -1 without one
};

// Every key a call will read exists: ranges inside the array, table entries inside the context are pages, candidate blocks ascend.
bool index_inputs_are_sound(const IndexParams& params);

}  // namespace sparse_mla
