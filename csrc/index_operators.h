// SPDX-License-Identifier: Apache-2.0
// The part of a target's table that serves the indexer, the caches and the layer.
#pragma once

#include "compress.h"
#include "index_logits.h"
#include "project.h"
#include "records.h"
#include "rope.h"
#include "topk.h"

namespace sparse_mla {

struct IndexOperators {
    Status (*index_logits)(IndexLogitsParams& params);
    Status (*index_topk)(IndexTopkParams& params);
    int64_t (*index_topk_scratch)(int64_t rows, int64_t heads, int64_t k, int threads);
    Status (*topk)(TopkParams& params);
    Status (*candidate_blocks)(CandidateBlocksParams& params);
    Status (*softmax_pool)(SoftmaxPoolParams& params);
    Status (*compress)(CompressParams& params);
    Status (*rope)(RopeParams& params);
    Status (*project)(ProjectParams& params);
    Status (*store_records)(StoreParams& params);
    Status (*load_records)(LoadParams& params);
    // One index record to 128 floats in natural order, through the target's own decoder.
    void (*decode_index)(RecordKind kind, const uint8_t* data, const uint8_t* scales, float* out);
};

}  // namespace sparse_mla
