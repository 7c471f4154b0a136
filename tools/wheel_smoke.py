# SPDX-License-Identifier: Apache-2.0
"""What an installed wheel must do anywhere: import, find its native extension, and agree with the reference."""

import torch

import sparse_mla
from sparse_mla import KVScope, allocate, sparse_decode, store_records


def main() -> None:
    report = sparse_mla.info()
    print(report)
    cache = allocate("V41_FP8", num_blocks=4, page_size=64)
    generator = torch.Generator().manual_seed(0)
    store_records(torch.randn(256, 512, generator=generator).bfloat16() * 0.1, cache, torch.arange(256))
    q = torch.randn(3, 1, 16, 512, generator=generator).bfloat16()
    slots = torch.randint(0, 256, (3, 1, 128), generator=generator, dtype=torch.int32)
    fast, _ = sparse_decode(q, KVScope(cache, slots), backend="native")
    slow, _ = sparse_decode(q, KVScope(cache, slots), backend="reference")
    error = float((fast.float() - slow.float()).norm() / slow.float().norm())
    if not error < 1e-2:
        raise SystemExit(f"wheel_smoke: native differs from the reference by {error:.2e}")
    print(f"native agrees with the reference to {error:.1e}")


if __name__ == "__main__":
    main()
