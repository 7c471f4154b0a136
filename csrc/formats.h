// SPDX-License-Identifier: Apache-2.0
// Byte layouts of one token's record, and the exact decode rule every target must reproduce.
//
// The twin of src/sparse_mla/formats.py; a test reads these constants through the binding and compares them.
// e4m3  s eeee mmm   (-1)^s * m * 2^-9 for e = 0, (-1)^s * (8 + m) * 2^(e - 10) otherwise; 0x7f and 0xff are NaN
// e2m1  s ee m       0 0.5 1 1.5 2 3 4 6 and negatives; element 2i in the low nibble of byte i
// ue8m0 B            2^(B - 127); 255 is NaN
#pragma once

#include <cstdint>

namespace sparse_mla {

constexpr int HEAD_DIM = 512;   // elements of a main record; K and V are the same vector
constexpr int INDEX_DIM = 128;  // elements of an index record

enum class RecordKind : int32_t { V41_FP8, V41_FP4, INDEX_FP4, INDEX_FP8, INDEX_FP8_FP32, BF16 };
constexpr int NUM_RECORD_KINDS = 6;

// No record format: a row of a gathered bfloat16 buffer, whose NaN is kept where a record's reads as zero.
constexpr RecordKind BF16_ROW = RecordKind(NUM_RECORD_KINDS);

struct RecordFormat {
    const char* name;
    int dim;               // elements
    int data_bytes;        // codes of one token
    int scale_bytes;       // scale factors of one token
    int elements_per_sf;   // 0: no scale factors
    constexpr int record_bytes() const { return data_bytes + scale_bytes; }
};

// Indexed by RecordKind. Main records are data then scales per token (interleaved) or per page (planar); index records are
// always sectioned per page.
constexpr RecordFormat RECORD_FORMATS[NUM_RECORD_KINDS + 1] = {
    {"V41_FP8", HEAD_DIM, 512, 16, 32},         // 528 bytes: e4m3, ue8m0
    {"V41_FP4", HEAD_DIM, 256, 32, 16},         // 288 bytes: e2m1, e4m3
    {"INDEX_FP4", INDEX_DIM, 64, 4, 32},        // 68 bytes: e2m1, ue8m0
    {"INDEX_FP8", INDEX_DIM, 128, 4, 32},       // 132 bytes: e4m3, ue8m0
    {"INDEX_FP8_FP32", INDEX_DIM, 128, 4, 128}, // 132 bytes: e4m3, one float32
    {"BF16", HEAD_DIM, 1024, 0, 0},             // 1024 bytes
    {"", HEAD_DIM, 1024, 0, 0},                 // BF16_ROW
};

static_assert(RECORD_FORMATS[int(RecordKind::V41_FP8)].record_bytes() == 528);
static_assert(RECORD_FORMATS[int(RecordKind::V41_FP4)].record_bytes() == 288);
static_assert(RECORD_FORMATS[int(RecordKind::INDEX_FP4)].record_bytes() == 68);
static_assert(RECORD_FORMATS[int(RecordKind::INDEX_FP8)].record_bytes() == 132);
static_assert(RECORD_FORMATS[int(RecordKind::INDEX_FP8_FP32)].record_bytes() == 132);
static_assert(RECORD_FORMATS[int(RecordKind::BF16)].record_bytes() == 1024);

// Every product e4m3 * 2^(B-127) is a normal bfloat16 number without overflow while B lies here, so a plain multiply is exact.
// Outside, the smallest exponent falls below 2^-126 (flushed to zero) or 448 * 2^(B-127) reaches 2^128 (infinity).
constexpr int UE8M0_EXACT_MIN = 10;
constexpr int UE8M0_EXACT_MAX = 246;

constexpr float E2M1_VALUES[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                   -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

namespace formats_detail {

constexpr float power_of_two(int exponent) {
    float value = 1.0f;
    for (; exponent > 0; --exponent) value *= 2.0f;
    for (; exponent < 0; ++exponent) value *= 0.5f;
    return value;
}

// NaN codes become zero with the code's sign.
constexpr float e4m3_or_zero(int code) {
    const float sign = code & 0x80 ? -1.0f : 1.0f;
    const int exponent = (code >> 3) & 15, mantissa = code & 7;
    if ((code & 0x7f) == 0x7f) return sign * 0.0f;
    return exponent == 0 ? sign * (mantissa * power_of_two(-9)) : sign * ((8 + mantissa) * power_of_two(exponent - 10));
}

struct E4m3Table {
    float values[256];
    constexpr E4m3Table() : values() {
        for (int code = 0; code < 256; ++code) values[code] = e4m3_or_zero(code);
    }
};

}  // namespace formats_detail

// Value of each e4m3 code; NaN codes read as zero of their sign, exponent field 15 is finite.
constexpr formats_detail::E4m3Table E4M3{};

// One element under one ue8m0 scale, over the whole range of scales: exponents below -126 flush to zero (even where the
// product would be normal), products at or above 2^128 are infinite, scale 255 gives zero.
static inline float decode_e4m3_ue8m0(uint8_t code, uint8_t scale) {
    const uint32_t sign = uint32_t(code & 0x80) << 24;
    const int field = (code >> 3) & 15;
    const int significand = field == 0 ? code & 7 : 8 + (code & 7);
    const int exponent = (field == 0 ? 1 : field) - 10 + (int(scale) - 127);
    uint32_t bits = sign;
    if ((code & 0x7f) != 0x7f && scale != 255 && significand != 0 && exponent >= -126) {
        int shift = 0;
        while (!((significand << shift) & 8)) ++shift;
        const int biased = exponent + 3 - shift + 127;
        bits |= biased >= 255 ? 0x7f800000u : (uint32_t(biased) << 23) | (uint32_t((significand << shift) & 7) << 20);
    }
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float bf16_to_float(uint16_t half) {
    const uint32_t bits = uint32_t(half) << 16;
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

// Round to nearest even; NaN stays NaN (quiet).
static inline uint16_t float_to_bf16(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

}  // namespace sparse_mla
