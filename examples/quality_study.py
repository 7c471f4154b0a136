# SPDX-License-Identifier: Apache-2.0
"""What FP8 and FP4 caches do to quality: recall of the top-k and error of the attention output, as a plot.

python examples/quality_study.py [picture.png]
"""

import sys

import torch

from sparse_mla import BF16, V41_FP4, V41_FP8, KVScope, allocate, decode, encode, sparse_decode, store_records

torch.manual_seed(0)
keys, rows, heads, width = 4096, 16, 16, 512
smooth = torch.cumsum(torch.randn(keys, width), 0) / 30 + 0.3 * torch.randn(keys, width)
smooth[:, ::61] *= 6  # outlier channels, as real caches have
kv = (0.1 * smooth).bfloat16()
q = torch.randn(rows, 1, heads, width).bfloat16()
indexer_q = torch.randn(rows, width)
TOPKS = (64, 128, 256, 512, 1024)


def selected(values: torch.Tensor, k: int) -> torch.Tensor:
    return (indexer_q @ values.float().T).topk(k).indices.sort().values


def attend(fmt, slots: torch.Tensor) -> torch.Tensor:
    cache = allocate(fmt, num_blocks=keys // 64, page_size=64)
    store_records(kv, cache, torch.arange(keys))
    chosen = slots.to(torch.int32).view(rows, 1, -1)
    return sparse_decode(q, KVScope(cache, chosen), out_dtype=torch.float32).out


results = {}
print("format    " + "".join(f"   recall@{k:<5}error@{k:<5}" for k in TOPKS))
for fmt in (BF16, V41_FP8, V41_FP4):
    stored = decode(encode(kv, fmt), fmt)
    recall, error = [], []
    for k in TOPKS:
        truth, mine = selected(kv, k), selected(stored, k)
        hits = [len(set(a.tolist()) & set(b.tolist())) / k for a, b in zip(truth, mine, strict=True)]
        recall.append(sum(hits) / rows)
        exact = attend(BF16, truth)
        error.append(float((attend(fmt, mine) - exact).norm() / exact.norm()))
    results[fmt.name] = (recall, error)
    print(f"{fmt.name:<10}" + "".join(f"   {r:<12.3f}{e:<11.4f}" for r, e in zip(recall, error, strict=True)))

if len(sys.argv) > 1:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for name, (recall, error) in results.items():
        axes[0].plot(TOPKS, recall, marker="o", label=name)
        axes[1].plot(TOPKS, error, marker="o", label=name)
    for axis, title in zip(axes, ("share of the true top-k", "relative error of the output"), strict=True):
        axis.set(xscale="log", xlabel="k", title=title)
        axis.legend()
    figure.savefig(sys.argv[1], dpi=150)
    print(f"saved {sys.argv[1]}")
