// SPDX-License-Identifier: Apache-2.0
#include "sparse_decode.h"

namespace sparse_mla {

bool has_bad_slot(const AttentionParams& params) {
    for (int n = 0; n < params.num_scopes; ++n) {
        const AttentionScope& s = params.scopes[n];
        const uint32_t limit = uint32_t(s.num_slots < 0x80000000 ? s.num_slots : 0x80000000);  // slot 2^31 - 1 is legal
        for (int64_t i = 0; i < params.b; ++i) {
            int64_t columns = s.topk;
            if (s.topk_length) {
                if (s.topk_length[i] < 0) return true;
                columns = s.topk_length[i] < columns ? s.topk_length[i] : columns;
            }
            for (int64_t j = 0; j < params.s_q; ++j) {
                const int32_t* indices = s.indices + i * s.index_stride_b + j * s.index_stride_s;
                // slot + 1 as unsigned: -1 becomes 0, every other negative slot a huge number.
                uint32_t worst = 0;
                for (int64_t c = 0; c < columns; ++c) {
                    const uint32_t shifted = uint32_t(indices[c]) + 1;
                    worst = shifted > worst ? shifted : worst;
                }
                if (worst > limit) return true;
            }
        }
    }
    return false;
}

}  // namespace sparse_mla
