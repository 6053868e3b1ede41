"""Weights that are cut between ranks: the forms of whole weights, and an update of all parts.

Rank 0 receives an update as whole weights, cuts them and sends each rank its part, layer by layer, through
the rank's pipe. The checks of an update are made on whole weights before anything is sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from draftproof.engine.parallel.rank_processes import RankProcesses
from draftproof.models.families.moe import keeps_stored_dtype
from draftproof.models.load import Checkpoint
from draftproof.models.weight_formats import (
    FloatWeight,
    PackedEntry,
    WeightTensor,
    linear_quantizer,
    quantized_format,
)
from draftproof.models.weights.cuts import WeightCuts
from draftproof.models.weights.tensor import FLOAT_NAMES
from draftproof.models.weights.update import WeightForms, apply_update
from draftproof.ops import Ops

_EXPERT = re.compile(r"(?<=experts\.)\d+(?=\.)")
_LAYER = re.compile(r"model\.layers\.\d+\.")


@dataclass(frozen=True, slots=True)
class SplitWeights:
    """Cuts of the weights of a running engine, as rank 0 knows them."""

    cuts: WeightCuts
    shapes: Mapping[str, tuple[int, ...]]  # of whole weights
    formats: Mapping[str, str]
    ranks: RankProcesses | None  # None: an engine with one rank
    vocabulary: Sequence[PackedEntry]  # whole embedding and LM head of a draft head

    @classmethod
    def of_weights(
        cls,
        cuts: WeightCuts,
        weights: Mapping[str, WeightTensor],
        quantization: str,
        ops: Ops,
        ranks: RankProcesses | None,
        vocabulary: Sequence[PackedEntry],
    ) -> SplitWeights:
        """Record the forms of whole `weights` before they are cut."""
        formats = {}
        for name, weight in weights.items():
            stored = weight.format
            is_float = isinstance(weight, FloatWeight) or quantization == "none"
            if is_float and not keeps_stored_dtype(name, cuts.sharding.model):
                stored = FLOAT_NAMES[cuts.dtype]
            formats[name] = quantized_format(name, weight, quantization, ops) or stored
        return cls(cuts, {name: weight.shape for name, weight in weights.items()}, formats, ranks, vocabulary)

    def forms(self, entries: Sequence[PackedEntry]) -> WeightForms:
        """Return the forms of whole weights; `entries`: of rank 0.

        The experts of a layer are one group, since which of them are packed together depends on the rank.
        """
        by_pattern: dict[str, list[str]] = {}
        for name in self.shapes:
            by_pattern.setdefault(_EXPERT.sub("*", name), []).append(name)
        packed = {
            frozenset(_EXPERT.sub("*", name) for name in group)
            for group in WeightForms.of_entries(entries).groups
        }
        groups = [frozenset(name for pattern in group for name in by_pattern[pattern]) for group in packed]
        return WeightForms(self.shapes, self.formats, groups)

    def apply(self, entries: Sequence[PackedEntry], weights: Mapping[str, WeightTensor]) -> None:
        """Cut whole weights, send the parts of other ranks, and copy those of rank 0 into `entries`."""
        size = self.cuts.sharding.size
        for names in _layers(weights):
            for rank in range(1, size):
                assert self.ranks is not None
                self.ranks.call_rank(rank, "update_weights", self._parts(rank, names, weights))
            apply_update(entries, self._parts(0, names, weights))
        apply_update(self.vocabulary, weights)

    def finish(self, is_complete: bool) -> None:
        """End an update on the other ranks; `is_complete`: it had every weight."""
        if self.ranks is not None:
            self.ranks.call("finish_update", is_complete)

    def reload(
        self, entries: Sequence[PackedEntry], checkpoint: Checkpoint, quantization: str, ops: Ops
    ) -> None:
        """Copy the part of rank 0 of a checkpoint that was read again."""
        weights = dict(checkpoint.weights)
        self.cuts.cut(weights, linear_quantizer(weights, quantization, ops))
        apply_update(entries, weights)
        apply_update(self.vocabulary, checkpoint.weights)

    def _parts(
        self, rank: int, names: Sequence[str], weights: Mapping[str, WeightTensor]
    ) -> dict[str, WeightTensor]:
        """Return the parts of a rank, with memory of their own, in the memory of the host."""
        cuts, host = self.cuts.of_rank(rank), torch.device("cpu")
        parts = {name: cuts.part(name, weights[name]) for name in names if cuts.has(name)}
        return {name: own_memory(part.to(host)) for name, part in parts.items()} if rank else parts


def _layers(names: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the names of each layer, then those outside of layers one by one: none is packed with another."""
    layers: dict[str, list[str]] = {}
    for name in names:
        match = _LAYER.match(name)
        layers.setdefault(match[0] if match else name, []).append(name)
    yield from layers.values()


def own_memory(node: Any) -> Any:
    """Return a weight whose tensors share no memory, so that a message holds nothing but their values."""
    if isinstance(node, Tensor):
        return node.clone(memory_format=torch.contiguous_format)
    if isinstance(node, tuple):
        return tuple(map(own_memory, node))
    if not is_dataclass(node) or isinstance(node, type):
        return node
    return replace(node, **{field.name: own_memory(getattr(node, field.name)) for field in fields(node)})
