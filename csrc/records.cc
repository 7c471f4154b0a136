// SPDX-License-Identifier: Apache-2.0
#include "records.h"

#include <cstdlib>

namespace sparse_mla {

namespace {

int64_t slot_at(const void* slots, bool slots_long, int64_t i) {
    return slots_long ? static_cast<const int64_t*>(slots)[i] : static_cast<const int32_t*>(slots)[i];
}

}  // namespace

bool slots_are_sound(const void* slots, bool slots_long, int64_t n, int64_t num_slots) {
    // slot + 1 as unsigned: -1 becomes 0, every other negative slot a huge number.
    uint64_t worst = 0;
    for (int64_t i = 0; i < n; ++i) {
        const uint64_t shifted = uint64_t(slot_at(slots, slots_long, i)) + 1;
        worst = shifted > worst ? shifted : worst;
    }
    return worst <= uint64_t(num_slots);
}

bool find_overwritten(const void* slots, bool slots_long, int64_t n, uint8_t* skip, bool* any) {
    *any = false;
    int64_t before = -1;
    bool ascending = true;
    for (int64_t i = 0; i < n && ascending; ++i) {
        const int64_t slot = slot_at(slots, slots_long, i);
        if (slot < 0) continue;
        ascending = slot > before;
        before = slot;
    }
    if (ascending) return true;
    int bits = 4;
    while ((int64_t(1) << bits) < 2 * n) ++bits;
    const int64_t size = int64_t(1) << bits, mask = size - 1;
    struct Entry {
        int64_t slot, row;
    };
    Entry* table = static_cast<Entry*>(std::malloc(size_t(size) * sizeof(Entry)));
    if (!table) return false;
    for (int64_t i = 0; i < size; ++i) table[i].slot = -1;
    for (int64_t i = 0; i < n; ++i) {
        skip[i] = 0;
        const int64_t slot = slot_at(slots, slots_long, i);
        if (slot < 0) continue;
        int64_t at = int64_t((uint64_t(slot) * 0x9e3779b97f4a7c15u) >> (64 - bits));
        while (table[at].slot >= 0 && table[at].slot != slot) at = (at + 1) & mask;
        if (table[at].slot == slot) {
            skip[table[at].row] = 1;
            *any = true;
        }
        table[at] = {slot, i};
    }
    std::free(table);
    return true;
}

}  // namespace sparse_mla
