"""Limit of decoding by memory bandwidth: bytes that a step reads, at the bandwidth measured on this GPU."""

from __future__ import annotations

from typing import Any

import torch

from draftproof import LLM
from draftproof.ops import LatentAttention, Moe

MAX_READ_BYTES = 4 << 30  # of the measurement of the bandwidth


def bytes_of(packed: Any) -> int:
    """Return the bytes of a packed weight with its scales."""
    parts = (packed.weight, packed.scales, packed.zeros)
    return sum(part.nbytes for part in parts if part is not None)


def step_weights(llm: LLM, batch: int) -> tuple[list[Any], int]:
    """Return the packed weights of the model, and the bytes of those that a step of `batch` rows reads.

    Rows select their experts independently.
    """
    model = llm.engine.runner.model
    packed = [p for layer in model.layers for p in (layer.attention.qkv, layer.attention.out)]
    packed.append(model.lm_head)
    sizes = [bytes_of(p) for p in packed]
    for latent in (a for a in (layer.attention for layer in model.layers) if isinstance(a, LatentAttention)):
        sizes += [latent.key_up.nbytes, latent.value_up.nbytes]
        sizes += [] if latent.q_up is None else [bytes_of(latent.q_up)]
    for mlp in (layer.mlp for layer in model.layers):
        if isinstance(mlp, Moe):  # a row reads the router, its own experts and the shared one
            share = 1 - (1 - mlp.routing.top_k / mlp.routing.num_experts) ** batch
            packed += [mlp.gate_up, mlp.down]
            sizes += [round(share * bytes_of(p)) for p in (mlp.gate_up, mlp.down)]
            sizes.append(mlp.router.linear.weight.nbytes)
            mlp = mlp.shared
        if mlp is not None:
            packed += [mlp.gate_up, mlp.down]
            sizes += [bytes_of(p) for p in (mlp.gate_up, mlp.down)]
    return packed, sum(sizes)


def memory_floor(llm: LLM, context: int = 0, batch: int = 1) -> dict[str, Any]:
    """Return tokens a second if a step only read the weights and the KV of `batch` requests.

    The bandwidth is that of a reduction over one large tensor. With sliding windows fewer keys are read than
    counted here.
    """
    packed, size = step_weights(llm, batch)
    runner, ops = llm.engine.runner, llm.engine.ops
    held = max((*(p.weight for p in packed), *runner.caches), key=lambda t: t.numel() * t.element_size())
    large = held.view(-1).view(torch.int64)[: MAX_READ_BYTES >> 3]
    seconds = min(ops.runtime.seconds(reader, 10) for reader in (large.max, large.view(torch.float32).amax))
    rate = large.numel() * 8 / seconds
    num_tokens = runner.caches[0].shape[1] * runner.page_size
    kv = context * batch * sum(cache.nbytes for cache in runner.caches) // num_tokens
    return {
        "weights": size,
        "kv": kv,
        "GB/s": round(rate / 1e9),
        "tok/s": round(batch * rate / (size + kv), 1),
    }
