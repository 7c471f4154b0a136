# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4.1's attention as one working system: configuration, weights, pool, step metadata, the layer and a stack
of layers.
"""

from .config import V41Config
from .layer import STAGES, Stage, V41Attention
from .metadata import CompressedStep, StepMetadata
from .pool import KVPool, KVSequence
from .stack import AttentionStack
from .topology import LayerPlan, LayerTopology
from .weights import AttentionWeights, LayerWeights, Shard

__all__ = [
    "STAGES",
    "AttentionStack",
    "AttentionWeights",
    "CompressedStep",
    "KVPool",
    "KVSequence",
    "LayerPlan",
    "LayerTopology",
    "LayerWeights",
    "Shard",
    "Stage",
    "StepMetadata",
    "V41Attention",
    "V41Config",
]
