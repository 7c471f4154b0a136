// SPDX-License-Identifier: Apache-2.0
#include "targets.h"

namespace sparse_mla {

extern const Operators OPERATORS_PORTABLE;
#if defined(SPARSE_MLA_X86_TARGETS)
extern const Operators OPERATORS_AVX2;
extern const Operators OPERATORS_AVX512;
extern const Operators OPERATORS_AVX512BF16;
#endif

const Operators* operators_of(TargetId target) {
    switch (target) {
#if defined(SPARSE_MLA_X86_TARGETS)
        case TargetId::AVX512BF16: return &OPERATORS_AVX512BF16;
        case TargetId::AVX512: return &OPERATORS_AVX512;
        case TargetId::AVX2: return &OPERATORS_AVX2;
#endif
        case TargetId::PORTABLE: return &OPERATORS_PORTABLE;
        default: return nullptr;
    }
}

}  // namespace sparse_mla
