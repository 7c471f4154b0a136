// SPDX-License-Identifier: Apache-2.0
#include "cpu.h"

#include "targets.h"

namespace sparse_mla {

namespace {

#if defined(SPARSE_MLA_EMULATED_AVX512)

const char* missing_feature(TargetId) { return nullptr; }  // the test build computes every intrinsic in plain code

#elif defined(__x86_64__)

// __builtin_cpu_supports asks cpuid and, for every wide set, xgetbv: a set whose registers the kernel does not save reads as
// absent.
const char* missing_feature(TargetId target) {
    __builtin_cpu_init();
    if (target == TargetId::PORTABLE) return nullptr;
    if (!__builtin_cpu_supports("avx2")) return "the processor or the operating system lacks avx2";
    if (!__builtin_cpu_supports("fma")) return "the processor or the operating system lacks fma";
    if (!__builtin_cpu_supports("f16c")) return "the processor or the operating system lacks f16c";
    if (target == TargetId::AVX2) return nullptr;
    if (!__builtin_cpu_supports("avx512f")) return "the processor or the operating system lacks avx512f";
    if (!__builtin_cpu_supports("avx512bw")) return "the processor or the operating system lacks avx512bw";
    if (!__builtin_cpu_supports("avx512dq")) return "the processor or the operating system lacks avx512dq";
    if (!__builtin_cpu_supports("avx512vl")) return "the processor or the operating system lacks avx512vl";
    if (target == TargetId::AVX512) return nullptr;
    if (!__builtin_cpu_supports("avx512bf16")) return "the processor or the operating system lacks avx512bf16";
    if (!__builtin_cpu_supports("avx512vbmi")) return "the processor or the operating system lacks avx512vbmi";
    if (!__builtin_cpu_supports("avx512vnni")) return "the processor or the operating system lacks avx512vnni";
    return nullptr;
}

#else

const char* missing_feature(TargetId target) {
    return target == TargetId::PORTABLE ? nullptr : "the processor is no x86-64";
}

#endif

}  // namespace

const char* target_absence(TargetId target) {
    if (!operators_of(target)) return "it was not compiled in";
    return missing_feature(target);
}

}  // namespace sparse_mla
