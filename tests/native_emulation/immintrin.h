// SPDX-License-Identifier: Apache-2.0
// Stands in for the compiler's <immintrin.h> in a test build: every intrinsic of the x86 targets in plain code, by SIMDe
// (package libsimde-dev), so that the AVX-512 sources run, slowly, on a machine without AVX-512. Intrinsics that SIMDe lacks follow
// the pseudocode of the instruction set reference.
#pragma once

#define SIMDE_NO_NATIVE
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/avx2.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

#define _MM_FROUND_NO_EXC SIMDE_MM_FROUND_NO_EXC
#define _MM_FROUND_TO_NEAREST_INT SIMDE_MM_FROUND_TO_NEAREST_INT

namespace emulated {

template <typename T, int N>
struct Lanes {
    T at[N];
};

template <typename T, int N, typename V>
inline Lanes<T, N> lanes(const V& v) {
    static_assert(sizeof(V) >= sizeof(T) * N);
    Lanes<T, N> out;
    __builtin_memcpy(out.at, &v, sizeof out.at);
    return out;
}

template <typename V, typename T, int N>
inline V vector(const Lanes<T, N>& in) {
    V out{};
    static_assert(sizeof(V) == sizeof in.at);
    __builtin_memcpy(&out, in.at, sizeof out);
    return out;
}

// Lane-wise conversion of N lanes.
template <typename To, typename From, int N, typename V, typename W>
inline V convert(const W& w) {
    const auto in = lanes<From, N>(w);
    Lanes<To, N> out;
    for (int i = 0; i < N; ++i) out.at[i] = To(in.at[i]);
    return vector<V>(out);
}

template <typename T, int N, typename V, typename Test>
inline uint32_t compare(const V& a, const V& b, Test test) {
    const auto x = lanes<T, N>(a), y = lanes<T, N>(b);
    uint32_t mask = 0;
    for (int i = 0; i < N; ++i) mask |= uint32_t(test(x.at[i], y.at[i])) << i;
    return mask;
}

}  // namespace emulated

#define _mm512_cvtepi8_epi32(a) emulated::convert<int32_t, int8_t, 16, simde__m512i>(a)
#define _mm512_cvtepu8_epi32(a) emulated::convert<int32_t, uint8_t, 16, simde__m512i>(a)
#define _mm512_cvtepu16_epi32(a) emulated::convert<int32_t, uint16_t, 16, simde__m512i>(a)
#define _mm512_cvtepi32_epi16(a) emulated::convert<int16_t, int32_t, 16, simde__m256i>(a)
#define _mm512_cmpneq_epi32_mask(a, b) simde__mmask16(~simde_mm512_cmpeq_epi32_mask(a, b))
#define _mm512_cvtepi32_epi8(a) emulated::convert<int8_t, int32_t, 16, simde__m128i>(a)
#define _mm512_cmpgt_epi16_mask(a, b) emulated::compare<int16_t, 32>(a, b, [](int16_t x, int16_t y) { return x > y; })
#define _mm512_cmplt_epi16_mask(a, b) emulated::compare<int16_t, 32>(a, b, [](int16_t x, int16_t y) { return x < y; })
#define _mm512_stream_si512(p, a) simde_mm512_storeu_si512(p, a)
using __mmask16 = uint16_t;
using __mmask32 = uint32_t;
using __mmask64 = uint64_t;

inline simde__m512i _mm512_cvtps_epi32(simde__m512 a) {
    const auto in = emulated::lanes<float, 16>(a);
    emulated::Lanes<int32_t, 16> out;
    for (int i = 0; i < 16; ++i) {
        const float r = __builtin_nearbyintf(in.at[i]);
        out.at[i] = r >= -2147483648.0f && r < 2147483648.0f ? int32_t(r) : INT32_MIN;
    }
    return emulated::vector<simde__m512i>(out);
}

inline simde__m512i _mm512_mask_cvtps_epi32(simde__m512i kept, uint16_t mask, simde__m512 a) {
    auto out = emulated::lanes<int32_t, 16>(kept);
    const auto converted = emulated::lanes<int32_t, 16>(_mm512_cvtps_epi32(a));
    for (int i = 0; i < 16; ++i)
        if (mask >> i & 1) out.at[i] = converted.at[i];
    return emulated::vector<simde__m512i>(out);
}

inline simde__m512i _mm512_mask_srlv_epi16(simde__m512i kept, uint32_t mask, simde__m512i a, simde__m512i count) {
    auto out = emulated::lanes<uint16_t, 32>(kept);
    const auto x = emulated::lanes<uint16_t, 32>(a), n = emulated::lanes<uint16_t, 32>(count);
    for (int i = 0; i < 32; ++i)
        if (mask >> i & 1) out.at[i] = n.at[i] < 16 ? uint16_t(x.at[i] >> n.at[i]) : uint16_t(0);
    return emulated::vector<simde__m512i>(out);
}

inline simde__m512i _mm512_shuffle_i64x2(simde__m512i a, simde__m512i b, int imm) {
    const auto x = emulated::lanes<int64_t, 8>(a), y = emulated::lanes<int64_t, 8>(b);
    emulated::Lanes<int64_t, 8> out;
    for (int group = 0; group < 4; ++group)
        for (int i = 0; i < 2; ++i) out.at[2 * group + i] = (group < 2 ? x : y).at[2 * ((imm >> (2 * group)) & 3) + i];
    return emulated::vector<simde__m512i>(out);
}

inline simde__m512 _mm512_shuffle_f32x4(simde__m512 a, simde__m512 b, int imm) {
    const auto x = emulated::lanes<float, 16>(a), y = emulated::lanes<float, 16>(b);
    emulated::Lanes<float, 16> out;
    for (int group = 0; group < 4; ++group)
        for (int i = 0; i < 4; ++i) out.at[4 * group + i] = (group < 2 ? x : y).at[4 * ((imm >> (2 * group)) & 3) + i];
    return emulated::vector<simde__m512>(out);
}

#undef _mm512_madd_epi16  // SIMDe 0.7.4 gives it the masked form's arguments
inline simde__m512i _mm512_madd_epi16(simde__m512i a, simde__m512i b) {
    const auto x = emulated::lanes<int16_t, 32>(a), y = emulated::lanes<int16_t, 32>(b);
    emulated::Lanes<int32_t, 16> out;
    for (int i = 0; i < 16; ++i) out.at[i] = x.at[2 * i] * y.at[2 * i] + x.at[2 * i + 1] * y.at[2 * i + 1];
    return emulated::vector<simde__m512i>(out);
}

#define _mm512_cvtepi32_ps(a) emulated::convert<float, int32_t, 16, simde__m512>(a)

// SIMDe multiplies, rounds and adds; rope's bits need the fused form.
#undef _mm256_fmadd_ps
inline simde__m256 _mm256_fmadd_ps(simde__m256 a, simde__m256 b, simde__m256 c) {
    const auto x = emulated::lanes<float, 8>(a), y = emulated::lanes<float, 8>(b), z = emulated::lanes<float, 8>(c);
    emulated::Lanes<float, 8> out;
    for (int i = 0; i < 8; ++i) out.at[i] = __builtin_fmaf(x.at[i], y.at[i], z.at[i]);
    return emulated::vector<simde__m256>(out);
}
