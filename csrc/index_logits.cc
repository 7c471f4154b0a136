// SPDX-License-Identifier: Apache-2.0
#include "index_logits.h"

namespace sparse_mla {

bool index_inputs_are_sound(const IndexParams& p) {
    for (int64_t row = 0; row < p.rows; ++row) {
        const int64_t start = p.starts ? p.starts[row] : 0, end = p.ends[row], length = end - start;
        if (p.block_table) {
            if (end < 0 || end > p.table_width * p.keys.page_size) return false;
        } else if (length > 0 && (start < 0 || end > p.keys.page_size)) {
            return false;
        }
        if (p.block_table) {
            // Rows of one table row: the longest covers the others.
            const int64_t first = row / p.rows_per_table * p.rows_per_table;
            bool longest = true;
            for (int64_t other = first; other < first + p.rows_per_table && other < p.rows; ++other)
                if (p.ends[other] > end || (p.ends[other] == end && other < row)) longest = false;
            if (!longest) continue;
            const int32_t* table = p.block_table + row / p.rows_per_table * p.table_stride;
            const int64_t scored = end < p.width ? end : p.width;  // keys past the width are cut, and not read
            const int64_t pages = (scored + p.keys.page_size - 1) / p.keys.page_size;
            const uint32_t limit = uint32_t(p.keys.num_pages < 0x7fffffff ? p.keys.num_pages : 0x7fffffff);
            bool bad = false;
            for (int64_t i = 0; i < pages; ++i) bad |= uint32_t(table[i]) >= limit;
            if (bad) return false;
        }
    }
    if (p.blocks) {
        for (int64_t row = 0; row < p.rows; ++row) {
            const int32_t* ids = p.blocks + row * p.blocks_stride;
            for (int64_t i = 0; i < p.num_blocks; ++i) {
                if (ids[i] < -1) return false;
                if (i > 0 && ids[i] >= 0 && (ids[i - 1] < 0 || ids[i] <= ids[i - 1])) return false;
            }
        }
    }
    return true;
}

}  // namespace sparse_mla
