# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""On-chip decoding of gathered records: bytes in SBUF to bfloat16, exactly, by table-free arithmetic.

A record lies in one partition: [128 records, chunks, bytes]. Everything is exact in bfloat16: an e4m3 value has four
significant bits, e2m1 times e4m3 six, and a ue8m0 scale factor is a power of two.

    e4m3, native   the byte is viewed as Trainium's own float8_e4m3, which reads exponent field 15 (256 .. 448) as inf
                   or NaN. Right for caches written with the 224 cap only.
    e4m3, integer  float16 bits = (b & 0x7F) << 7 | (b & 0x80) << 8 hold value * 2^-8 for every code but NaN; subnormal
                   codes become float16 subnormals, which are normal numbers once an engine has read them as float32.
    e2m1           byte = (n & 7) << 2 | (n & 8) << 4 viewed as float8_e4m3 is value / 64 for all 16 codes: no exponent
                   field 15.

Bit operators see two bytes at a time (`lanes=16`) or four (`lanes=32`). Whether an integer immediate of 2^24 or more
reaches the engine exactly is not documented; it may travel as float32. The 32-bit masks of e4m3 have at most 24
significant bits, so they are exact either way; those of e2m1 do not, which is why 16 is the default there.
"""

from __future__ import annotations

from .nki import nisa, nl

P = 128  # partitions: records decoded at once
UE8M0_NAN = 255.0
UE8M0_BIAS_SHIFT = 23  # a ue8m0 byte is the exponent field of a float32
UE8M0_MAX = 254.0
E4M3_RAISE = 8  # float16 bits made from an e4m3 byte hold value * 2^-8
E2M1_RAISE = 6  # the float8_e4m3 byte made from an e2m1 code holds value * 2^-6
E4M3_NAN_HALF = 1.8  # between 1.75 (448 * 2^-8) and 1.875 (what the NaN code reads as)
E2M1_FACTOR = 16384.0  # 2^6 of the e2m1 byte times 2^8 of the e4m3 scale factor


def bit_field(words, kind, shape, shift, mask):
    """Some bits of every word, moved: (words & mask) << shift, or (words >> -shift) & mask for a shift below 0."""
    field = nl.ndarray(shape=shape, dtype=kind, buffer=nl.sbuf)
    if shift < 0:
        nisa.tensor_scalar(
            dst=field,
            data=words,
            op0=nl.right_shift,
            operand0=-shift,
            op1=nl.bitwise_and,
            operand1=mask,
            engine=nisa.engine.vector,
        )
    elif shift == 0:
        nisa.tensor_scalar(dst=field, data=words, op0=nl.bitwise_and, operand0=mask, engine=nisa.engine.vector)
    else:
        nisa.tensor_scalar(
            dst=field,
            data=words,
            op0=nl.bitwise_and,
            operand0=mask,
            op1=nl.left_shift,
            operand1=shift,
            engine=nisa.engine.vector,
        )
    return field


def e4m3_fields(words, kind, shape, repeat, parity):
    """(magnitude, sign) of the even (parity 0) or odd e4m3 bytes of every word, where float16 lanes hold them."""
    if parity == 0:
        magnitude = bit_field(words=words, kind=kind, shape=shape, shift=7, mask=0x7F * repeat)
        sign = bit_field(words=words, kind=kind, shape=shape, shift=8, mask=0x80 * repeat)
    else:
        magnitude = bit_field(words=words, kind=kind, shape=shape, shift=-1, mask=0x3F80 * repeat)
        sign = bit_field(words=words, kind=kind, shape=shape, shift=0, mask=0x8000 * repeat)
    return magnitude, sign


def join_fields(dst, magnitude, sign):
    """dst = magnitude | sign."""
    nisa.tensor_tensor(dst=dst, data1=magnitude, data2=sign, op=nl.bitwise_or, engine=nisa.engine.vector)


def join_finite(dst, magnitude, sign):
    """The same for the two fields of e4m3 codes in float16 lanes; a NaN code becomes 0 with its sign."""
    value = magnitude.view(nl.float16)
    finite = nl.ndarray(shape=value.shape, dtype=nl.float16, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(
        dst=finite, data=value, op0=nl.less, operand0=E4M3_NAN_HALF, op1=nl.multiply, operand1=value
    )
    join_fields(dst=dst, magnitude=finite.view(sign.dtype), sign=sign)


def word_kind(lanes, byte_pairs):
    """(integer dtype of `lanes` bits, the factor that repeats a mask of one byte, or of two, over such a word)."""
    if lanes == 32:
        return nl.uint32, 0x00010001 if byte_pairs else 0x01010101
    return nl.uint16, 1 if byte_pairs else 0x0101


def scale_factors_ue8m0(raw, chunks, groups, raise_by):
    """float32 [128, chunks, groups] of ue8m0 bytes times 2^raise_by; byte 255 gives 0.

    raise_by: E4M3_RAISE for e4m3 decoded by integers, E2M1_RAISE for e2m1, else 0. Bytes above 254 - raise_by count
    as that."""
    exponent = nl.ndarray(shape=(P, chunks, groups), dtype=nl.int32, buffer=nl.sbuf)
    if raise_by:
        raised = nl.ndarray(shape=(P, chunks, groups), dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_scalar(
            dst=raised,
            data=raw,
            op0=nl.minimum,
            operand0=UE8M0_MAX - float(raise_by),
            op1=nl.add,
            operand1=float(raise_by),
            engine=nisa.engine.vector,
        )
    else:
        raised = raw
    nisa.scalar_tensor_tensor(
        dst=exponent, data=raw, op0=nl.not_equal, operand0=UE8M0_NAN, op1=nl.multiply, operand1=raised
    )
    bits = nl.ndarray(shape=(P, chunks, groups), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=bits, data=exponent, op0=nl.left_shift, operand0=UE8M0_BIAS_SHIFT, engine=nisa.engine.vector)
    return bits.view(nl.float32)


def scale_factors_e4m3(raw, chunks, groups):
    """float32 [128, chunks, groups] of e4m3 bytes times E2M1_FACTOR / 64; any code, NaN gives 0, the sign is kept."""
    shape = (P, chunks, groups)
    wide = nl.ndarray(shape=shape, dtype=nl.uint16, buffer=nl.sbuf)
    nisa.tensor_copy(dst=wide, src=raw, engine=nisa.engine.vector)
    magnitude, sign = e4m3_fields(words=wide, kind=nl.uint16, shape=shape, repeat=1, parity=0)
    signed = nl.ndarray(shape=shape, dtype=nl.uint16, buffer=nl.sbuf)
    join_finite(dst=signed, magnitude=magnitude, sign=sign)
    factors = nl.ndarray(shape=shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=factors,
        data=signed.view(nl.float16),
        op0=nl.multiply,
        operand0=E2M1_FACTOR,
        engine=nisa.engine.vector,
    )
    return factors


def scale_groups(dst, codes, factors, length, engine):
    """dst = codes * factors, `length` neighbours per factor; all [128, chunks, groups, length] but the factors."""
    nisa.tensor_tensor(
        dst=dst,
        data1=codes,
        data2=factors.expand_dim(3).broadcast(3, length),
        op=nl.multiply,
        engine=engine,
    )


def decode_e4m3_native(dst, data, factors, groups, engine):
    """dst [128, chunks, n] bf16 = float8_e4m3 bytes `data` times their group's factor."""
    length = dst.shape[2] // groups
    scale_groups(
        dst=dst.reshape_dim(2, (groups, length)),
        codes=data.view(nl.float8_e4m3).reshape_dim(2, (groups, length)),
        factors=factors,
        length=length,
        engine=engine,
    )


def decode_e4m3_integer(dst, data, factors, groups, lanes, engine):
    """The same for any e4m3 code but NaN; `factors` must carry 2^E4M3_RAISE."""
    chunks = dst.shape[1]
    half = dst.shape[2] // 2
    length = half // groups
    codes = nl.ndarray(shape=(P, 2, chunks, half), dtype=nl.float16, buffer=nl.sbuf)
    kind, repeat = word_kind(lanes=lanes, byte_pairs=True)
    words = data.view(kind)
    shape = (P, chunks, words.shape[2])
    for parity in range(2):
        magnitude, sign = e4m3_fields(words=words, kind=kind, shape=shape, repeat=repeat, parity=parity)
        join_fields(dst=codes[:, parity, :, :].view(kind), magnitude=magnitude, sign=sign)
    for parity in range(2):
        scale_groups(
            dst=dst.reshape_dim(2, (groups, length, 2))[:, :, :, :, parity],
            codes=codes[:, parity, :, :].reshape_dim(2, (groups, length)),
            factors=factors,
            length=length,
            engine=engine,
        )


def decode_e2m1(dst, data, factors, groups, lanes, engine):
    """dst [128, chunks, n] bf16 of packed e2m1 bytes [128, chunks, n / 2]; `factors` must carry 2^E2M1_RAISE."""
    chunks = dst.shape[1]
    half = dst.shape[2] // 2
    length = half // groups
    codes = nl.ndarray(shape=(P, 2, chunks, half), dtype=nl.uint8, buffer=nl.sbuf)
    kind, repeat = word_kind(lanes=lanes, byte_pairs=False)
    words = data.view(kind)
    shape = (P, chunks, words.shape[2])
    # Masks keep what a shift moved across a byte border out.
    magnitude = bit_field(words=words, kind=kind, shape=shape, shift=2, mask=0x07 * repeat)
    sign = bit_field(words=words, kind=kind, shape=shape, shift=4, mask=0x08 * repeat)
    join_fields(dst=codes[:, 0, :, :].view(kind), magnitude=magnitude, sign=sign)
    magnitude = bit_field(words=words, kind=kind, shape=shape, shift=-2, mask=0x1C * repeat)
    sign = bit_field(words=words, kind=kind, shape=shape, shift=0, mask=0x80 * repeat)
    join_fields(dst=codes[:, 1, :, :].view(kind), magnitude=magnitude, sign=sign)
    for parity in range(2):
        scale_groups(
            dst=dst.reshape_dim(2, (groups, length, 2))[:, :, :, :, parity],
            codes=codes[:, parity, :, :].view(nl.float8_e4m3).reshape_dim(2, (groups, length)),
            factors=factors,
            length=length,
            engine=engine,
        )
