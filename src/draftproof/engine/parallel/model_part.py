"""Part of a model that a rank loads, and what it needs before it is built."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftproof.config import EngineConfig
from draftproof.models.load import Checkpoint, keeps_blocks, load_checkpoint
from draftproof.models.weight_formats import WeightPacker, WeightTensor, linear_quantizer
from draftproof.models.weights.sharding import EMBEDDING, LM_HEAD, Sharding
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


def cut_checkpoint(config: EngineConfig, checkpoint: Checkpoint, ops: Ops, rank: int) -> Checkpoint:
    """Return the part of a checkpoint that a rank has, quantised if the options say so."""
    sharding = Sharding(checkpoint.config, rank, config.tensor_parallel_size, config.tp_invariant)
    weights = dict(checkpoint.weights)
    prepare = linear_quantizer(weights, config.quantization, ops)
    local = sharding.cut(weights, checkpoint.dtype, prepare)
    return replace(checkpoint, config=local, weights=weights)


def whole_vocabulary(
    weights: dict[str, WeightTensor], ops: Ops, dtype: torch.dtype
) -> tuple[Tensor | QuantizedTable, Any]:
    """Return a whole embedding table and LM head, for a draft head, which runs on rank 0 alone."""
    packer = WeightPacker(dict(weights), ops, dtype)
    lm_head = LM_HEAD if LM_HEAD in weights else EMBEDDING
    packed = WeightPacker(dict(weights), ops, dtype).packed([lm_head.removesuffix(".weight")], bias=False)
    return packer.tensor(EMBEDDING), packed
