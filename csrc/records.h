// SPDX-License-Identifier: Apache-2.0
// Quantize rows into slots of a paged cache, and read slots back.
//
// Bytes are those of formats.py's encoder on every target, and no byte outside the slots' records is touched.
#pragma once

#include <cstdint>

#include "formats.h"
#include "parallel.h"

namespace sparse_mla {

// Where records lie. Interleaved pages: scale factors right behind each record's codes; sectioned pages: behind all codes.
struct RecordCache {
    uint8_t* data;         // block 0, record 0
    RecordKind kind;
    int64_t page_size;     // records per block
    int64_t block_stride;  // bytes
    int64_t data_step;     // bytes from one record's codes to the next one's inside a block
    int64_t scale_base;    // bytes from the block's start to its first scale factors
    int64_t scale_step;    // bytes from one record's scale factors to the next one's
    int64_t num_slots;
};

enum class Nonfinite : int32_t { RAISE, ZERO, SATURATE, NAN_SCALE };

struct StoreParams {
    RecordCache cache;
    const void* x;  // [n, dim] bfloat16 or float, elements contiguous
    bool x_float;
    int64_t x_stride;   // elements
    const void* slots;  // [n] int32 or int64, -1: skip
    bool slots_long;
    int64_t n;
    int e4m3_max;  // 448 or 224
    Nonfinite on_nonfinite;
    bool nonfinite_found;  // out: under RAISE, a row to be stored has one; nothing was written
    Plan plan;
};

struct LoadParams {
    RecordCache cache;
    const void* slots;  // [n] int32 or int64, -1: a row of zeros
    bool slots_long;
    int64_t n;
    void* out;  // [n, dim] contiguous, bfloat16 or float
    bool out_float;
    Plan plan;
};

// Every slot is -1 or inside the cache.
bool slots_are_sound(const void* slots, bool slots_long, int64_t n, int64_t num_slots);

// Marks in `skip` [n] the rows that a later row with the same slot overwrites; false when memory is exhausted.
bool find_overwritten(const void* slots, bool slots_long, int64_t n, uint8_t* skip, bool* any);

}  // namespace sparse_mla
