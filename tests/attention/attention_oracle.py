# SPDX-License-Identifier: Apache-2.0
"""An independent statement of V4.1's attention, one function per stage: float64, dense, no caches, no paging, no
operators.

It imports nothing of the library. Each stage is given what the implementation itself fed into it, so that an error is
blamed on the stage
that made it. `plain_*` is the same stage in plain bfloat16 torch, whose error is the yardstick.
"""

import math

import ml_dtypes
import numpy as np
import torch

F64 = torch.float64
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=F64)
BOUNDARIES = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


def error(x, reference):
    """||x - r|| / ||r|| over the whole output."""
    norm = reference.to(F64).norm()
    return float((x.to(F64) - reference.to(F64)).norm() / norm) if norm else float(x.to(F64).norm())


def within_twice_plain(x, reference, plain, what):
    ours, theirs = error(x, reference), error(plain, reference)
    assert ours <= 2 * theirs + 1e-12, f"{what}: error {ours:.3g}, plain bfloat16 has {theirs:.3g}"


# --- records ---------------------------------------------------------------------------------------------------------


def e4m3_values(codes):
    return torch.from_numpy(codes.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64))


def e4m3_codes(values):
    return torch.from_numpy(values.numpy().astype(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def ceil_exponent(amax, largest):
    """The smallest e with largest * 2^e >= amax, by comparison."""
    e = torch.ceil(torch.log2(amax / largest))
    for _ in range(2):
        e = torch.where(largest * torch.exp2(e) < amax, e + 1, e)
        e = torch.where(largest * torch.exp2(e - 1) >= amax, e - 1, e)
    return e


def e2m1_codes(x, unit):
    """Nearest of x / unit, ties to the even code, by comparing |x| with boundary * unit."""
    code = torch.zeros_like(x, dtype=torch.int64)
    for boundary, inclusive in BOUNDARIES:
        limit = boundary * unit
        code += (x.abs() >= limit) if inclusive else (x.abs() > limit)
    return code + 8 * torch.signbit(x).to(torch.int64)


def pack(codes):
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).to(torch.uint8)


def unpack(data):
    return torch.stack((data & 15, data >> 4), -1).flatten(-2).to(torch.int64)


def fp8_groups(x, cap=448.0):
    """[n, k] to (codes, scale bytes): e4m3 with ue8m0 scales of 32."""
    groups = x.to(F64).reshape(x.shape[0], -1, 32)
    amax = groups.abs().amax(-1).clamp(min=float(np.float32(1e-4)))
    e = ceil_exponent(amax, cap)
    codes = e4m3_codes((groups / torch.exp2(e)[..., None]).clamp(-cap, cap))
    return codes.reshape(x.shape), (e + 127).to(torch.uint8)


def window_record(x):
    return torch.cat(fp8_groups(x), dim=1)


def window_values(records):
    values = e4m3_values(records[:, :512]).reshape(-1, 16, 32)
    return (values * torch.exp2(records[:, 512:].to(F64) - 127)[..., None]).reshape(-1, 512)


def entry_record(x):
    groups = x.to(F64).reshape(x.shape[0], -1, 16)
    amax = groups.abs().amax(-1).clamp(min=6 * 2.0**-9)
    scale = e4m3_codes((amax / 6).clamp(max=448))
    return torch.cat((pack(e2m1_codes(groups, e4m3_values(scale)[..., None]).flatten(1)), scale), dim=1)


def entry_values(records):
    values = E2M1[unpack(records[:, :256])].reshape(-1, 32, 16)
    return (values * e4m3_values(records[:, 256:].contiguous())[..., None]).reshape(-1, 512)


def index_record(x):
    """[n, 128] to 64 data bytes and 4 scale bytes."""
    groups = x.to(F64).reshape(x.shape[0], 4, 32)
    e = ceil_exponent(groups.abs().amax(-1).clamp(min=6 * 2.0**-126), 6.0)
    return torch.cat((pack(e2m1_codes(groups, torch.exp2(e)[..., None]).flatten(1)), (e + 127).to(torch.uint8)), dim=1)


def index_values(records):
    values = E2M1[unpack(records[:, :64])].reshape(-1, 4, 32)
    return (values * torch.exp2(records[:, 64:].to(F64) - 127)[..., None]).reshape(-1, 128)


def rounded_activations(x):
    codes, scale = fp8_groups(x)
    return (e4m3_values(codes).reshape(x.shape[0], -1, 32) * torch.exp2(scale.to(F64) - 127)[..., None]).reshape(
        x.shape
    )


# --- row-wise stages -------------------------------------------------------------------------------------------------


def linear(x, weight, rounded=False):
    return (rounded_activations(x) if rounded else x.to(F64)) @ weight.to(F64).t()


def plain_linear(x, weight, rounded=False):
    return (rounded_activations(x).to(torch.bfloat16) if rounded else x) @ weight.t()


def norm(x, weight, eps):
    x = x.to(F64)
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight.to(F64)


def plain_norm(x, weight, eps):
    x = x.to(torch.bfloat16)
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight.to(torch.bfloat16)


def angles(positions, theta, yarn):
    """The float32 product of position and frequency, which is what models were trained with."""
    i = np.arange(32)
    frequency = theta ** (-2.0 * i / 64)
    if yarn is not None:
        factor, fast, slow, original = yarn
        low = math.floor(64 * math.log(original / (2 * math.pi * fast)) / (2 * math.log(theta)))
        high = math.ceil(64 * math.log(original / (2 * math.pi * slow)) / (2 * math.log(theta)))
        ramp = np.clip((i - low) / (high - low), 0, 1)
        frequency = frequency * (1 - ramp) + frequency / factor * ramp
    product = np.asarray(positions, dtype=np.float32)[:, None] * frequency.astype(np.float32)[None, :]
    return torch.from_numpy(product.astype(np.float64))


def rope(x, angle, inverse=False, dtype=F64):
    """x [T, ..., d] turned by angle [T, 32] on its last 64 elements."""
    x = x.to(dtype)
    shape = (x.shape[0],) + (1,) * (x.dim() - 2) + (32,)
    cos, sin = angle.cos().to(dtype).reshape(shape), angle.sin().to(dtype).reshape(shape)
    sin = -sin if inverse else sin
    a, b = x[..., -64::2], x[..., -63::2]
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((x[..., :-64], turned), -1)


def pool(score, latent, ratio, dtype=F64):
    """[n, 512] rows to n // ratio pooled rows."""
    n = score.shape[0] // ratio * ratio
    s, x = (t[:n].to(dtype).reshape(-1, ratio, t.shape[1]) for t in (score, latent))
    return (torch.softmax(s, dim=1) * x).sum(1)


# --- selection and attention -----------------------------------------------------------------------------------------


def scores(q_records, keys, weights):
    """[entries] of one row: quantized queries [H, 68], decoded keys [entries, 128], weights [H]."""
    return weights.to(F64) @ torch.relu(index_values(q_records) @ keys.t())


def logits(q_records, k_records, weights):
    """[T, entries] from quantized queries [T, H, 68] and keys [entries, 68]."""
    keys = index_values(k_records)
    return torch.stack([scores(q, keys, w) for q, w in zip(q_records, weights, strict=True)])


TIE = 2.0**-7  # a logit is rounded to bfloat16 before it is compared: two of them tie within a step of it


def check_selection(row_logits, chosen, k, what):
    """By value: the right number, ascending, unique, in range, and nothing better left out. `row_logits` [visible]."""
    visible = row_logits.shape[0]
    picks = [c for c in chosen.tolist() if c >= 0]
    assert chosen.tolist() == picks + [-1] * (len(chosen) - len(picks)), what
    assert picks == sorted(set(picks)), what
    assert all(0 <= c < visible for c in picks), what
    assert len(picks) == min(k, int(torch.isfinite(row_logits).sum())), what
    out = torch.ones(visible, dtype=torch.bool)
    out[picks] = False
    out &= torch.isfinite(row_logits)
    if picks and bool(out.any()):
        worst, best = float(row_logits[picks].min()), float(row_logits[out].max())
        assert worst >= best - TIE * max(abs(worst), abs(best)), f"{what}: took {worst}, left {best}"


def block_scores(row_logits, size):
    blocks = -(-row_logits.shape[0] // size)
    padded = torch.full((blocks * size,), -math.inf, dtype=F64)
    padded[: row_logits.shape[0]] = row_logits
    scores = padded.reshape(blocks, size).amax(1)
    scores[-1] = 1e30  # the last block is always chosen
    return scores


def attend(q, keys, sink, dtype=F64):
    """One row: q [h, 512], keys [n, 512], sink [h] -> [h, 512]."""
    q, keys = q.to(dtype), keys.to(dtype)
    scores = (q @ keys.t()) * 512**-0.5
    joined = torch.cat((scores, sink.to(dtype)[:, None]), dim=1)
    return torch.softmax(joined, dim=1)[:, :-1] @ keys
