# SPDX-License-Identifier: Apache-2.0
"""Facts of each NeuronCore generation, under the names of `nl.tile_size` where it has one.

Source of truth: the architecture guides and API pages of the AWS Neuron documentation. `usable_sbuf_bytes` is what
AWS's own kernels budget (raw size - 16 KiB - 8 B); for trn1 and trn3 the same reserve is assumed. Every other file of
the
simulator takes its limits from here.
"""

from __future__ import annotations

from dataclasses import dataclass

from .. import config

__all__ = ["GEN2", "GEN3", "GEN4", "Target", "by_gen", "from_environment"]

KIB = 1024


@dataclass(frozen=True)
class Target:
    """One generation."""

    gen: int
    name: str
    sbuf_raw_bytes: int  # per partition
    usable_sbuf_bytes: int  # per partition, after what compiler and runtime reserve
    moving_fmax_fp32: int  # largest moving free size of one matmul with a float32 result
    moving_fmax_bf16: int  # the same with a bfloat16 result (trn3 only)
    tile_quantum: int  # smallest row / column tile of the PE array
    cores_per_chip: int
    hbm_bytes: int

    pmax: int = 128
    gemm_stationary_fmax: int = 128
    gemm_moving_fmax: int = 512
    psum_bank_fmax: int = 512
    psum_bank_fmax_bytes: int = 2 * KIB
    psum_num_banks: int = 8
    bn_stats_fmax: int = 512
    psum_min_align: int = 4
    sbuf_min_align: int = 1

    quadrant: int = 32  # partitions per quadrant: unit of start rules, shuffles and Vector transposes
    pe_half: int = 64  # PE rows / columns of the coarsest tiling
    gpsimd_cores: int = 8
    gpsimd_partitions: int = 16  # partitions served by one GpSimd core
    max_free_dims: int = 4
    max_view_dims: int = 5
    double_row_contraction: int = 256
    max8_min: int = 8
    max8_max: int = 16384
    activation_reduce_fmax: int = 16384
    local_gather_max_indices: int = 4096
    n_gather_group: int = 512
    topk_max_n: int = 65536
    topk_max_k: int = 32768
    dma_compute_max_sources: int = 16
    dma_transpose_last_dim: int = 128
    dma_transpose_rows: int = 16
    dma_small_bytes: int = 256  # descriptors below this are severely bound
    dma_good_bytes: int = 2 * KIB
    dma_queues: int = 16
    exact_int_limit: int = 1 << 24  # integers at or above this lose bits in float32
    registers_per_engine: int = 64

    @property
    def psum_bytes(self) -> int:
        """PSUM bytes per partition."""
        return self.psum_bank_fmax_bytes * self.psum_num_banks

    @property
    def psum_fmax(self) -> int:
        return self.psum_bank_fmax

    @property
    def sbuf_fmax_bytes(self) -> int:
        return self.usable_sbuf_bytes

    @property
    def sbuf_fmax(self) -> int:
        return self.usable_sbuf_bytes // 4

    @property
    def sbuf_size_bytes(self) -> int:
        return self.sbuf_raw_bytes * self.pmax

    @property
    def total_available_sbuf_size(self) -> int:
        return self.usable_sbuf_bytes


_RESERVE = 16 * KIB + 8
GEN2 = Target(2, "trn1", 192 * KIB, 192 * KIB - _RESERVE, 512, 0, 64, 2, 32 << 30)
GEN3 = Target(3, "trn2", 224 * KIB, 224 * KIB - _RESERVE, 512, 0, 32, 8, 96 << 30)
GEN4 = Target(4, "trn3", 256 * KIB, 256 * KIB - _RESERVE, 4096, 8192, 32, 8, 144 << 30)
_BY_GEN = {2: GEN2, 3: GEN3, 4: GEN4}
_BY_NAME = {"trn1": GEN2, "gen2": GEN2, "inf2": GEN2, "trn2": GEN3, "gen3": GEN3, "trn3": GEN4, "gen4": GEN4}


def by_gen(gen: int) -> Target:
    return _BY_GEN[gen]


def from_environment() -> Target:
    """The target NEURON_PLATFORM_TARGET_OVERRIDE names; trn2 when it is unset."""
    return _BY_NAME[config.get("NEURON_PLATFORM_TARGET_OVERRIDE")]
