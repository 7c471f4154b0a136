// SPDX-License-Identifier: Apache-2.0
// AVX2 + FMA + F16C. Compiled with those flags: nothing here may have external linkage but the table at the end.
#include <immintrin.h>

#include "targets.h"

namespace sparse_mla {

namespace {

constexpr TargetId THIS_TARGET = TargetId::AVX2;

#include "decode_f32.inc"
#include "vector_avx2.inc"
#include "attention_f32.inc"
#include "attention_direct_avx2.inc"
#include "attention.inc"
#include "merge_partials.inc"
#include "index_avx2.inc"
#include "operators.inc"

}  // namespace

extern const Operators OPERATORS_AVX2;
constexpr Operators OPERATORS_AVX2 = make_operators();

}  // namespace sparse_mla
