// SPDX-License-Identifier: Apache-2.0
#include "rope.h"

namespace sparse_mla {

bool rope_positions_are_sound(const RopeParams& p) {
    for (int64_t i = 0; i < p.n; ++i) {
        const int64_t at = p.positions_long ? static_cast<const int64_t*>(p.positions)[i] : static_cast<const int32_t*>(p.positions)[i];
        if (at < 0 || at >= p.max_pos) return false;
    }
    return true;
}

}  // namespace sparse_mla
