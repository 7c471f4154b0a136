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
from .index_logits import INDEX_LOGITS, Candidates, IndexLogitsCall, PagedKeys, RaggedKeys, index_logits
from .index_topk import INDEX_TOPK, IndexTopkCall, index_topk, index_topk_workspace_size
from .sparse_decode import SPARSE_DECODE, AttnOutput, SparseDecodeCall, sparse_decode
from .topk import TOPK, TopkCall, selected_values, topk

__all__ = [
    "CANDIDATE_BLOCKS",
    "INDEX_LOGITS",
    "INDEX_TOPK",
    "SPARSE_DECODE",
    "TOPK",
    "AttnOutput",
    "CandidateBlocksCall",
    "Candidates",
    "IndexLogitsCall",
    "IndexTopkCall",
    "PagedKeys",
    "RaggedKeys",
    "SparseDecodeCall",
    "TopkCall",
    "candidate_blocks",
    "candidate_lengths",
    "candidate_mask",
    "compact_to_dense",
    "dense_to_compact",
    "index_logits",
    "index_topk",
    "index_topk_workspace_size",
    "selected_values",
    "sparse_decode",
    "topk",
]
