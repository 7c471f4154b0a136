# SPDX-License-Identifier: Apache-2.0
"""Which layer owns what, and which layer reads whose cache, list and candidate blocks.

A layer with ratio R > 0 reads the compressed cache of the nearest kv source at or before it and the top-k list of the
nearest index source at or before it; index keys live with the kv source. Index sources behind the candidate source
search only inside its blocks.

    kind         ratio  owns                                   reads
    window       0      window ring                            -
    source       > 0    ring, compressor, index keys, list     -
    index        > 0    ring, list                             cache and index keys of its kv source
    reuse        > 0    ring                                   cache of its kv source, list of its index source
    draft        0      ring, bidirectional inside its block   -
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from ..errors import ArgumentError
from .config import BLOCK_TOKENS, V41Config

__all__ = ["LayerPlan", "LayerTopology"]

LayerKind = Literal["window", "source", "index", "reuse", "draft"]


@dataclass(frozen=True)
class LayerPlan:
    """Everything a layer needs to know about its place. `None` where the layer has nothing of that kind."""

    layer: int
    kind: LayerKind
    ratio: int
    kv_source: int | None
    index_source: int | None
    candidate_source: int | None  # whose blocks restrict this layer's own search
    publishes_candidates: bool

    @property
    def owns_cache(self) -> bool:
        return self.kind == "source"

    @property
    def owns_index(self) -> bool:
        return self.kind in ("source", "index")

    @property
    def rope(self) -> Literal["plain", "yarn"]:
        """The rope table of every rotation in this layer."""
        return "yarn" if self.ratio else "plain"

    @property
    def has_compressor_state(self) -> bool:
        """Ratio 1 pools one row, which needs no state."""
        return self.owns_cache and self.ratio > 1


class LayerTopology:
    """The plan of every layer. Raises ArgumentError, naming the configuration key, when the sources do not fit
    together.
    """

    def __init__(self, config: V41Config, *, where: str = "") -> None:
        self.config = config
        self._where = where
        self._check_sources()
        self.layers = tuple(self._plan(layer) for layer in range(config.num_layers))

    def __getitem__(self, layer: int) -> LayerPlan:
        if not 0 <= layer < len(self.layers):
            raise ArgumentError(f"topology: layer must be 0 to {len(self.layers) - 1}, got {layer}.")
        return self.layers[layer]

    def __len__(self) -> int:
        return len(self.layers)

    def closure(self, layers: Iterable[int] | None = None) -> tuple[int, ...]:
        """`layers` (default: all) with every source they read, in running order."""
        if layers is None:
            return tuple(range(len(self.layers)))
        wanted: set[int] = set()
        for layer in layers:
            plan = self[layer]
            wanted |= {layer, *(s for s in (plan.kv_source, plan.index_source, plan.candidate_source) if s is not None)}
        return tuple(sorted(wanted))

    def one_of_each_kind(self) -> tuple[int, ...]:
        """The first layer of every distinct (kind, ratio, searches inside candidates), with the sources they need."""
        found: dict[tuple[object, ...], int] = {}
        for plan in self.layers:
            found.setdefault((plan.kind, plan.ratio, plan.candidate_source is not None), plan.layer)
        return self.closure(found.values())

    # --- construction ------------------------------------------------------------------------------------------------

    def _refuse(self, key: str, text: str) -> ArgumentError:
        return ArgumentError(f"config: {self._where}{key} {text}.")

    def _check_sources(self) -> None:
        c = self.config
        ratios = c.compress_ratios
        for key, ids in (
            ("kv_source_layer_ids", c.kv_source_layer_ids),
            ("index_source_layer_ids", c.index_source_layer_ids),
        ):
            if any(b <= a for a, b in pairwise(ids)):
                raise self._refuse(key, f"must be strictly increasing, got {list(ids)}")
            for layer in ids:
                if ratios[layer] == 0:
                    raise self._refuse(
                        key, f"must name layers with a compress ratio above 0, got {layer} whose ratio is 0"
                    )
        missing = sorted(set(c.kv_source_layer_ids) - set(c.index_source_layer_ids))
        if missing:
            raise self._refuse(
                "index_source_layer_ids",
                f"must contain every kv source, {missing[0]} is missing; its first reader would use a list of "
                "another cache",
            )
        for layer in range(c.num_hidden_layers):
            if ratios[layer] == 0:
                continue
            source = _nearest(c.kv_source_layer_ids, layer)
            if source is None:
                raise self._refuse(
                    "kv_source_layer_ids",
                    f"must name a source at or before layer {layer}, whose ratio is {ratios[layer]}",
                )
            if ratios[source] != ratios[layer]:
                raise self._refuse(
                    "compress_ratios",
                    f"must be equal for a layer and its kv source, got {ratios[layer]} for layer {layer} and "
                    f"{ratios[source]} for "
                    f"source {source}",
                )
        for layer in range(c.num_hidden_layers, c.num_layers):
            if ratios[layer] != 0:
                raise self._refuse(
                    "compress_ratios", f"must be 0 for draft layers, got {ratios[layer]} for layer {layer}"
                )
        candidate = c.candidate_source_layer_id
        if candidate is not None:
            if candidate not in c.index_source_layer_ids:
                raise self._refuse("candidate_source_layer_id", f"must be an index source, got {candidate}")
            if BLOCK_TOKENS // ratios[candidate] % c.candidate_block_size:
                raise self._refuse(
                    "candidate_block_size",
                    f"must divide the {BLOCK_TOKENS // ratios[candidate]} entries of a page at ratio "
                    f"{ratios[candidate]}, "
                    f"got {c.candidate_block_size}",
                )
            for layer in c.index_source_layer_ids:
                if layer > candidate and _nearest(c.kv_source_layer_ids, layer) != _nearest(
                    c.kv_source_layer_ids, candidate
                ):
                    raise self._refuse(
                        "candidate_source_layer_id",
                        f"must share its kv source with the index sources behind it, got {candidate} before {layer}; "
                        "its blocks "
                        "would number entries of another cache",
                    )

    def _plan(self, layer: int) -> LayerPlan:
        c = self.config
        ratio = c.compress_ratios[layer]
        if layer >= c.num_hidden_layers:
            return LayerPlan(layer, "draft", 0, None, None, None, False)
        if ratio == 0:
            return LayerPlan(layer, "window", 0, None, None, None, False)
        kv, index = _nearest(c.kv_source_layer_ids, layer), _nearest(c.index_source_layer_ids, layer)
        kind: LayerKind = "source" if kv == layer else "index" if index == layer else "reuse"
        source = c.candidate_source_layer_id
        restricted = source is not None and index == layer and layer > source
        return LayerPlan(layer, kind, ratio, kv, index, source if restricted else None, layer == source)


def _nearest(sources: tuple[int, ...], layer: int) -> int | None:
    found = [s for s in sources if s <= layer]
    return found[-1] if found else None
