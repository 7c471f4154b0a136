// SPDX-License-Identifier: Apache-2.0
// CPU targets: which instruction sets this processor and its operating system offer, asked once, at first use.
#pragma once

namespace sparse_mla {

// Best first. The order of TARGET_NAMES and of the table in targets.h.
enum class TargetId : int { AVX512BF16, AVX512, AVX2, PORTABLE };
constexpr int NUM_TARGETS = 4;

constexpr const char* TARGET_NAMES[NUM_TARGETS] = {"avx512bf16", "avx512", "avx2", "portable"};

// Null when the target can run here, else the reason why not, as the end of a sentence ("the processor lacks avx512bf16").
const char* target_absence(TargetId target);

}  // namespace sparse_mla
