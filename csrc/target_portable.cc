// SPDX-License-Identifier: Apache-2.0
// Any processor: plain C++, compiled with the architecture's oldest flags.
#include "targets.h"

namespace sparse_mla {

namespace {

constexpr TargetId THIS_TARGET = TargetId::PORTABLE;

#include "vector_portable.inc"
#include "attention_f32.inc"
#include "attention_direct_none.inc"
#include "attention.inc"
#include "merge_partials.inc"
#include "index_portable.inc"
#include "operators.inc"

}  // namespace

extern const Operators OPERATORS_PORTABLE;
constexpr Operators OPERATORS_PORTABLE = make_operators();

}  // namespace sparse_mla
