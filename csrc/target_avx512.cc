// SPDX-License-Identifier: Apache-2.0
// AVX-512 without bfloat16 dot products (Skylake-X, Cascade Lake): float32 math. Compiled with those flags: nothing here may have
// external linkage but the table at the end.
#include <immintrin.h>

#include "targets.h"

namespace sparse_mla {

namespace {

constexpr TargetId THIS_TARGET = TargetId::AVX512;

#include "decode_f32.inc"
#include "vector_avx512.inc"
#include "decode_avx512.inc"
#include "attention_f32.inc"
#include "attention_direct_none.inc"
#include "attention.inc"
#include "merge_partials.inc"
#include "index_avx512.inc"
#include "operators.inc"

}  // namespace

extern const Operators OPERATORS_AVX512;
constexpr Operators OPERATORS_AVX512 = make_operators();

}  // namespace sparse_mla
