# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4.1 sparse attention for Trainium and any CPU: the operators, the caches they read, and which backend
runs them.

Importing this package imports torch and nothing else of weight: no device is started and the native extension is not
loaded.
"""

from .caches import KVScope, PagedCache, allocate, convert_layout
from .dispatch import OPS, explain
from .errors import SparseMlaError
from .formats import (
    BF16,
    INDEX_FP4,
    INDEX_FP8,
    INDEX_FP8_FP32,
    V41_FP4,
    V41_FP8,
    QuantizedQuery,
    decode,
    encode,
    encode_query,
)
from .info import info
from .ops.candidate_blocks import (
    candidate_blocks,
    candidate_lengths,
    candidate_mask,
    compact_to_dense,
    dense_to_compact,
)
from .ops.compress import CompressorState, CompressOutput, compress
from .ops.index_logits import Candidates, PagedKeys, RaggedKeys, index_logits
from .ops.index_topk import index_topk, index_topk_workspace_size
from .ops.load_records import load_records
from .ops.merge_partials import merge_partials
from .ops.rope import YarnConfig, rope, rope_table
from .ops.softmax_pool import softmax_pool
from .ops.sparse_decode import AttnOutput, sparse_decode
from .ops.sparse_prefill import PrefillOutput, sparse_prefill
from .ops.store_records import store_records
from .ops.topk import selected_values, topk

__all__ = [
    "BF16",
    "INDEX_FP4",
    "INDEX_FP8",
    "INDEX_FP8_FP32",
    "OPS",
    "V41_FP4",
    "V41_FP8",
    "AttnOutput",
    "Candidates",
    "CompressOutput",
    "CompressorState",
    "KVScope",
    "PagedCache",
    "PagedKeys",
    "PrefillOutput",
    "QuantizedQuery",
    "RaggedKeys",
    "SparseMlaError",
    "YarnConfig",
    "allocate",
    "candidate_blocks",
    "candidate_lengths",
    "candidate_mask",
    "compact_to_dense",
    "compress",
    "convert_layout",
    "decode",
    "dense_to_compact",
    "encode",
    "encode_query",
    "explain",
    "index_logits",
    "index_topk",
    "index_topk_workspace_size",
    "info",
    "load_records",
    "merge_partials",
    "rope",
    "rope_table",
    "selected_values",
    "softmax_pool",
    "sparse_decode",
    "sparse_prefill",
    "store_records",
    "topk",
]
