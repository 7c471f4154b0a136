# SPDX-License-Identifier: Apache-2.0
"""Attend over two key ranges apart, as two machines would, and merge the partial results: the sink enters once."""

import torch

from sparse_mla import V41_FP8, KVScope, allocate, merge_partials, sparse_decode, store_records

torch.manual_seed(0)
cache = allocate(V41_FP8, num_blocks=16, page_size=64)
store_records((0.1 * torch.randn(1024, 512)).bfloat16(), cache, torch.arange(1024))

q, sink = torch.randn(4, 1, 64, 512).bfloat16(), torch.randn(64)
slots = torch.stack([torch.randperm(1024)[:512] for _ in range(4)]).to(torch.int32).view(4, 1, 512)
whole = sparse_decode(q, KVScope(cache, slots), attn_sink=sink)

halves = []
for owner in (0, 1):  # who owns the lower and who the upper half of the pages
    mine = torch.where((slots >= 512) == bool(owner), slots, torch.tensor(-1, dtype=torch.int32))
    halves.append(sparse_decode(q, KVScope(cache, mine), out_dtype=torch.float32))

merged = merge_partials([h.out for h in halves], [h.lse for h in halves], attn_sink=sink)
error = (merged.out.float() - whole.out.float()).norm() / whole.out.float().norm()
print(f"merged against the one call: out {error:.1e}, lse {(merged.lse - whole.lse).abs().max():.1e}")
assert error < 5e-3
