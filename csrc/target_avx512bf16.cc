// SPDX-License-Identifier: Apache-2.0
// AVX-512 with bfloat16 dot products, VBMI and VNNI. Compiled with those flags: nothing here may have
// external linkage but the table at the end.
#include <immintrin.h>

#include "targets.h"

namespace sparse_mla {

namespace {

constexpr TargetId THIS_TARGET = TargetId::AVX512BF16;

#include "decode_f32.inc"
#include "vector_avx512.inc"
#include "decode_avx512.inc"
#include "attention_bf16.inc"
#ifdef SPARSE_MLA_EMULATED_AVX512
#include "attention_direct_none.inc"  // g++ 12 works on the emulated one for more than ten minutes
#else
#include "attention_direct_avx512bf16.inc"
#endif
#include "attention.inc"
#include "merge_partials.inc"
#include "index_avx512bf16.inc"
#include "operators.inc"

}  // namespace

extern const Operators OPERATORS_AVX512BF16;
constexpr Operators OPERATORS_AVX512BF16 = make_operators();

}  // namespace sparse_mla
