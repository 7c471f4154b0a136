# SPDX-License-Identifier: Apache-2.0
"""The rules a simulation enforces, by number: what `KernelError.check` and `WarningRecord.check` refer to."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RULES", "Rule"]

ERROR, WARNING, EITHER = "error", "warning", "error or warning"


@dataclass(frozen=True)
class Rule:
    """One rule: what it is about, what holds, and what breaking it gives."""

    subject: str
    limit: str
    level: str = ERROR
    relaxed: bool = False  # aws_compat does not enforce it


RULES: dict[int, Rule] = {
    1: Rule("partitions of an on-chip tile or access", "at most 128"),
    2: Rule("first partition of an access", "more than 64: 0; 33 to 64: 0 or 64; up to 32: 0, 32, 64 or 96"),
    3: Rule("partition step", "1"),
    4: Rule("inputs of one instruction in one memory", "start on the same partition"),
    5: Rule("matmul sizes K, M, N", "128, 128, 512"),
    6: Rule("matmul memories", "operands in SBUF, dst in PSUM"),
    7: Rule("matmul dst on trn1 and trn2", "inside one PSUM bank, 2048 B per partition"),
    8: Rule("matmul dst type on trn1 and trn2", "float32; a transpose keeps its input's type"),
    9: Rule("matmul operand types", "floats; 32-bit only with 32-bit; e4m3fn on trn3 only, not with e4m3"),
    10: Rule("free dims of stationary", "one; double_row: exactly [K, 2, M]"),
    11: Rule("double_row", "both fp8, no column tiling, no transpose, from trn2 on"),
    12: Rule("tile_size and tile_position", "multiples of 64, of 32 from trn2 on"),
    13: Rule("accumulate flags of one group", "all given or all None; True needs an earlier matmul"),
    14: Rule("accumulating onto what no matmul wrote", "refused when nonzero, a warning when zero", EITHER),
    15: Rule("transpose sizes", "128 x 128 on Tensor, 32 x 32 on Vector"),
    16: Rule("memories an engine reaches", "GpSimd: SBUF only; Vector and Scalar: SBUF and PSUM"),
    17: Rule("memories a DMA reaches", "HBM and SBUF, not PSUM"),
    18: Rule("two PSUM inputs", "refused for elementwise instructions, scans and selections"),
    19: Rule("PSUM alive at once", "8 banks of 2 KiB per partition"),
    20: Rule("SBUF alive at once (trn2)", "212,984 B usable: warning; 229,376 B: error", EITHER, relaxed=True),
    21: Rule(
        "explicit addresses", "PSUM: bank starts; reading what an overlapping tile overwrote", ERROR, relaxed=True
    ),
    22: Rule("free dims per instruction", "at most 4"),
    23: Rule("sizes of operands", "equal; nothing is broadcast without a view"),
    24: Rule("one value per partition", "shape (P, 1), float32 where the page says so"),
    25: Rule("bit operators", "integers, one type in and out, Vector, not mixed with arithmetic, no arithmetic shift"),
    26: Rule("right shift as second operator", "was refused by hardware's compiler: error with strict", WARNING),
    27: Rule("int32 through float32 arithmetic", "exact below 2^24", WARNING),
    28: Rule("Scalar engine's tensor_scalar", "multiply, add, or multiply then add; tensor_copy from trn2 on"),
    29: Rule("activation", "reduce_op is add; inputs inside the table's documented range", EITHER),
    30: Rule("constant bias of activation on trn1", "not possible"),
    31: Rule("DMA totals and casts", "as many elements on both sides; hardware descriptors do not cast"),
    32: Rule("vector_offset", "(P, 1) int32 or uint32 in SBUF, base in HBM, dim 0, at most 128 rows, software DGE"),
    33: Rule("run-time index outside the tensor", "an error, or skipped with oob_mode.skip"),
    34: Rule("issuing engine of hardware descriptors", "sync or scalar, from trn2 on"),
    35: Rule("dma_transpose", "2-byte types, last dim up to 128, row counts, exact dst shape"),
    36: Rule("dma_transpose dst", "starts at a multiple of 32 B", WARNING),
    37: Rule("priority of a DMA", "trn3 only"),
    38: Rule("local_gather", "partitions in 16s, uint16 indices, at most 4096, group of 1 to 32 elements"),
    39: Rule("nc_n_gather", "uint32 indices inside the data"),
    40: Rule("max8 and nc_find_index8", "8 to 16384 elements"),
    41: Rule("topk", "n below 65536, k below 32768, partitions in 16s; a warning below 128", EITHER),
    42: Rule("nonzero_with_count", "partitions 0, 16, ..; dst one element longer"),
    43: Rule("nc_stream_shuffle", "mask of 32 lanes, each 0 to 31 or 255; legal starts"),
    44: Rule("sendrecv", "128 partitions", WARNING),
    45: Rule("shared_hbm of two cores", "has a name; cores meet", ERROR, relaxed=True),
    46: Rule("reading memory nobody wrote", "refused, by a bitmap", ERROR, relaxed=True),
    47: Rule("outputs", "in shared_hbm (error), completely written (warning)", EITHER),
    48: Rule("what a generation does not have", "types, views and instructions of trn2 or trn3"),
    49: Rule("memset value", "a float for float types, an int for integer types"),
    50: Rule("Python outside the portable subset", "found by the lint"),
    51: Rule("manual addresses reused inside a run-time loop", "iterations may overlap", WARNING),
    52: Rule("small descriptors", "below 256 B, or one per element", WARNING),
    53: Rule("free size of activation_reduce", "16384", WARNING),
    54: Rule("subnormal inputs or results", "an engine may flush them", WARNING),
}
