// SPDX-License-Identifier: Apache-2.0
// The table of operators every target fills: the same algorithms (<op>.inc) compiled once per instruction set.
#pragma once

#include "cpu.h"
#include "index_operators.h"
#include "merge_partials.h"
#include "sparse_decode.h"

namespace sparse_mla {

struct Operators {
    TargetId target;
    Status (*sparse_decode)(AttentionParams& params);  // also sparse_prefill: one BF16 scope of page size 1
    Status (*merge_partials)(const MergeParams& params);
    // One record to 512 floats in natural order, through the target's own decoder; for the exhaustive test of all codes x scales.
    void (*decode_record)(RecordKind kind, const uint8_t* data, const uint8_t* scales, float* out);
    // Register-only loop of the target's widest dot or FMA: runs `rounds` rounds, returns the floating point operations done.
    double (*peak_loop)(int64_t rounds);
    IndexOperators index;
};

// Null when the target was not compiled for this architecture.
const Operators* operators_of(TargetId target);

}  // namespace sparse_mla
