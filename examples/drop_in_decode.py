# SPDX-License-Identifier: Apache-2.0
"""FlashMLA's decode call, unchanged, on a CPU: install the drop-in, then import as an engine does."""

import torch

import sparse_mla.compat
from sparse_mla import V41_FP4, V41_FP8, allocate, store_records

sparse_mla.compat.install("flash_mla")
import flash_mla  # noqa: E402

torch.manual_seed(0)
window = allocate(V41_FP8, num_blocks=3, page_size=134)
compressed = allocate(V41_FP4, num_blocks=64, page_size=64)
store_records((0.1 * torch.randn(402, 512)).bfloat16(), window, torch.arange(402))
store_records((0.1 * torch.randn(4096, 512)).bfloat16(), compressed, torch.arange(4096))

b, heads = 3, 64
q = torch.randn(b, 1, heads, 512).bfloat16()
recent = torch.arange(128, dtype=torch.int32) + 134 * torch.arange(b, dtype=torch.int32)[:, None]
selected = torch.rand(b, 4096).topk(512).indices.sort().values.to(torch.int32)

metadata, _ = flash_mla.get_mla_metadata()
out, lse = flash_mla.flash_mla_with_kvcache(
    q,
    window.as_tensor(),
    None,
    None,
    512,
    metadata,
    indices=recent.view(b, 1, 128),
    attn_sink=torch.zeros(heads),
    extra_k_cache=compressed.as_tensor(),
    extra_indices_in_kvcache=selected.view(b, 1, 512),
)
print(f"out {tuple(out.shape)} {out.dtype}, lse {tuple(lse.shape)}, |out| = {out.float().norm():.3f}")
sparse_mla.compat.uninstall()
