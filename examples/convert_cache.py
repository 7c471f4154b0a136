# SPDX-License-Identifier: Apache-2.0
"""Write a cache in the layout of FlashMLA and DeepInfer, convert it to that of vLLM and SGLang, and read both."""

import torch

from sparse_mla import (
    V41_FP8,
    KVScope,
    PagedCache,
    allocate,
    convert_layout,
    load_records,
    sparse_decode,
    store_records,
)

torch.manual_seed(0)
interleaved = allocate(V41_FP8, num_blocks=4, page_size=64)
x = torch.randn(256, 512).bfloat16()
store_records(x, interleaved, torch.arange(256))

planar = convert_layout(interleaved, "planar")
print("first bytes of page 0, interleaved:", interleaved.pages()[0, 510:516].tolist())
print("first bytes of page 0, planar:     ", planar.pages()[0, 510:516].tolist())

slots = torch.arange(256)
assert torch.equal(load_records(interleaved, slots), load_records(planar, slots))

q, chosen = torch.randn(2, 1, 8, 512).bfloat16(), torch.randint(0, 256, (2, 1, 64), dtype=torch.int32)
a, b = sparse_decode(q, KVScope(interleaved, chosen)), sparse_decode(q, KVScope(planar, chosen))
assert torch.equal(a.out, b.out)

# Nothing in the bytes tells the layouts apart: read with the wrong one and the numbers are wrong, silently.
wrong = PagedCache(planar.data, V41_FP8, 64, layout="interleaved")
error = (load_records(wrong, slots).float() - x.float()).norm() / x.float().norm()
print(f"read with the wrong layout: relative error {error:.1f}")
