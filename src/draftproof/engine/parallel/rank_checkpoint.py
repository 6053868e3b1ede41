"""Part of a model that a rank loads, and what it needs before it is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from draftproof.config import EngineConfig
from draftproof.errors import ConfigError
from draftproof.models.load import Checkpoint, keeps_blocks, load_checkpoint
from draftproof.models.weight_formats import PackedEntry, WeightPacker, WeightTensor, linear_quantizer
from draftproof.models.weights.cuts import EMBEDDING, LM_HEAD, WeightCuts
from draftproof.models.weights.sharding import Sharding
from draftproof.ops import Ops, QuantizedTable, resolve, resolve_device
from draftproof.ops.parallel.communicator import rank_device, select_device


def is_cut(config: EngineConfig) -> bool:
    """Return whether linear layers are summed in parts."""
    return config.tensor_parallel_size > 1 or config.tp_invariant


def load_for(config: EngineConfig, progress: bool = True) -> Checkpoint:
    """Load the checkpoint of an engine; weights that will be cut stay mapped from their files."""
    return load_checkpoint(
        config.model,
        dtype=config.dtype,
        load_format=config.load_format,
        revision=config.revision,
        seed=config.seed or 0,
        progress=progress,
        keep_blocks=keeps_blocks(config.quantization, resolve_device(config.device)),
        converts=not is_cut(config),
    )


def rank_ops(config: EngineConfig, rank: int) -> Ops:
    """Return the ops of a rank: on a GPU of its own, or on its share of the threads."""
    size = config.tensor_parallel_size
    device = resolve_device(config.device)
    if size > 1:
        device = rank_device(device, rank, size)
        select_device(device)
    return resolve(config.backend, device, config.numerics, num_ranks=size)


def check_invariant(config: EngineConfig, ops: Ops) -> None:
    """Refuse `tp_invariant` where products depend on the number of columns that a rank has."""
    if config.tp_invariant and (config.numerics != "exact" or not ops.forward.has_independent_columns):
        raise ConfigError(
            "tp_invariant needs numerics='exact' and the backend cpu or triton: leave it out, and bits are "
            "the same within a number of ranks"
        )


def plan_cuts(config: EngineConfig, checkpoint: Checkpoint, ops: Ops, rank: int) -> WeightCuts:
    """Return the places at which the weights of a checkpoint are cut."""
    sharding = Sharding(checkpoint.config, rank, config.tensor_parallel_size, config.tp_invariant)
    prepare = linear_quantizer(checkpoint.weights, config.quantization, ops)
    return WeightCuts.of_weights(sharding, checkpoint.weights, checkpoint.dtype, prepare)


def cut_checkpoint(config: EngineConfig, checkpoint: Checkpoint, ops: Ops, cuts: WeightCuts) -> Checkpoint:
    """Return the part of a checkpoint that a rank has, quantised if the options say so."""
    weights = dict(checkpoint.weights)
    cuts.cut(weights, linear_quantizer(weights, config.quantization, ops))
    return replace(checkpoint, config=cuts.local_config(), weights=weights)


@dataclass(frozen=True, slots=True)
class WholeVocabulary:
    """Whole embedding table and LM head, for a draft head, which runs on rank 0 alone."""

    embedding: Tensor | QuantizedTable
    lm_head: Any
    entries: Sequence[PackedEntry]


def whole_vocabulary(weights: dict[str, WeightTensor], ops: Ops, dtype: torch.dtype) -> WholeVocabulary:
    """Pack the vocabulary of a model without cutting it."""
    packers = [WeightPacker(dict(weights), ops, dtype) for _ in range(2)]
    lm_head = LM_HEAD if LM_HEAD in weights else EMBEDDING
    packed = packers[0].packed([lm_head.removesuffix(".weight")], bias=False)
    embedding = packers[1].tensor(EMBEDDING)
    return WholeVocabulary(embedding, packed, [*packers[0].entries, *packers[1].entries])
