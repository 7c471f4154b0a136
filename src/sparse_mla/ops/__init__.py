# SPDX-License-Identifier: Apache-2.0
"""What each operator means: signature, validation, docstring and reference implementation, one file per operator."""

from .candidate_blocks import (
    CANDIDATE_BLOCKS,
    CandidateBlocksCall,
    candidate_blocks,
    candidate_lengths,
    candidate_mask,
    compact_to_dense,
    dense_to_compact,
)
from .compress import COMPRESS, CompressCall, CompressorState, CompressOutput, compress
from .index_logits import INDEX_LOGITS, Candidates, IndexLogitsCall, PagedKeys, RaggedKeys, index_logits
from .index_topk import INDEX_TOPK, IndexTopkCall, index_topk, index_topk_workspace_size
from .load_records import LOAD_RECORDS, LoadRecordsCall, load_records
from .merge_partials import MERGE_PARTIALS, MergePartialsCall, merge_partials
from .rope import ROPE, RopeCall, YarnConfig, rope, rope_table
from .softmax_pool import SOFTMAX_POOL, SoftmaxPoolCall, softmax_pool
from .sparse_decode import SPARSE_DECODE, AttnOutput, SparseDecodeCall, sparse_decode
from .sparse_prefill import SPARSE_PREFILL, PrefillOutput, SparsePrefillCall, sparse_prefill
from .store_records import STORE_RECORDS, StoreRecordsCall, store_records
from .topk import TOPK, TopkCall, selected_values, topk

__all__ = [
    "CANDIDATE_BLOCKS",
    "COMPRESS",
    "INDEX_LOGITS",
    "INDEX_TOPK",
    "LOAD_RECORDS",
    "MERGE_PARTIALS",
    "ROPE",
    "SOFTMAX_POOL",
    "SPARSE_DECODE",
    "SPARSE_PREFILL",
    "STORE_RECORDS",
    "TOPK",
    "AttnOutput",
    "CandidateBlocksCall",
    "Candidates",
    "CompressCall",
    "CompressOutput",
    "CompressorState",
    "IndexLogitsCall",
    "IndexTopkCall",
    "LoadRecordsCall",
    "MergePartialsCall",
    "PagedKeys",
    "PrefillOutput",
    "RaggedKeys",
    "RopeCall",
    "SoftmaxPoolCall",
    "SparseDecodeCall",
    "SparsePrefillCall",
    "StoreRecordsCall",
    "TopkCall",
    "YarnConfig",
    "candidate_blocks",
    "candidate_lengths",
    "candidate_mask",
    "compact_to_dense",
    "compress",
    "dense_to_compact",
    "index_logits",
    "index_topk",
    "index_topk_workspace_size",
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
