# SPDX-License-Identifier: Apache-2.0
"""Select 512 of 131,072 keys for each of 64 rows without ever holding the score matrix."""

import torch

from sparse_mla import (
    INDEX_FP4,
    PagedKeys,
    allocate,
    encode_query,
    index_logits,
    index_topk,
    index_topk_workspace_size,
    store_records,
    topk,
)

torch.manual_seed(0)
context, rows, heads, page = 131_072, 64, 32, 64
keys = allocate(INDEX_FP4, num_blocks=context // page, page_size=page)
for start in range(0, context, 16_384):
    store_records(torch.randn(16_384, 128).bfloat16(), keys, torch.arange(start, start + 16_384))

table = torch.randperm(context // page).to(torch.int32).expand(1, -1)
lengths = (context - rows + 1 + torch.arange(rows, dtype=torch.int32)).view(1, rows)
q = encode_query(torch.randn(1, rows, heads, 128).bfloat16(), INDEX_FP4)
weights = torch.rand(rows, heads).bfloat16()
paged = PagedKeys(keys, table, lengths, context)

need = index_topk_workspace_size(q, paged, weights, 512)
print(f"scratch of the call: {need / 2**20:.1f} MiB; the matrix would be {rows * context * 2 / 2**20:.0f} MiB")
chosen = index_topk(q, paged, weights, 512)
assert torch.equal(chosen[:4], topk(index_logits(q, paged, weights)[:4], 512))
print("first keys of row 0:", chosen[0, :8].tolist())
