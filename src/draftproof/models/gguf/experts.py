"""Mixtures of experts in GGUF files: metadata to MoeConfig, stacked tensors to one entry an expert."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from draftproof.errors import LoadError
from draftproof.models.config import MoeConfig
from draftproof.models.gguf.file import GGUFFile, TensorInfo, num_bytes
from draftproof.models.gguf.rope import short_float
from draftproof.ops import Routing

# llama.cpp's architecture with experts -> Hugging Face class name
MOE_ARCHITECTURES = {
    "llama": "MixtralForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "ernie4_5-moe": "Ernie4_5_MoeForCausalLM",
    "glm4moe": "Glm4MoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "deepseek2": "DeepseekV2ForCausalLM",
}
_STACKED = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.(weight|bias)")
_SINGLE = re.compile(
    r"blk\.(\d+)\.(ffn_gate_inp|ffn_gate_inp_shexp|ffn_(?:gate|up|down)_shexp)\.(weight|bias)"
)
_CORRECTION = re.compile(r"blk\.(\d+)\.exp_probs_b\.bias")
SOFTMAX, SIGMOID = 1, 2  # values of `expert_gating_func`
_PARTS = ("gate", "up", "down")


def moe_architecture(arch: str, moe: MoeConfig) -> str:
    """Return the Hugging Face class name of a model with experts; both DeepSeeks are one architecture."""
    if arch == "deepseek2" and moe.routing.scoring == "sigmoid":
        return "DeepseekV3ForCausalLM"
    return MOE_ARCHITECTURES[arch]


def moe_from_gguf(file: GGUFFile, arch: str, num_layers: int, need: Callable[[str], Any]) -> MoeConfig | None:
    """Return the mixtures of experts of a file; None without experts."""
    meta = file.metadata
    if not meta.get(f"{arch}.expert_count", 0):
        return None
    if arch not in MOE_ARCHITECTURES:
        raise LoadError(f"experts of GGUF architecture {arch!r} are not supported ({arch}.expert_count)")
    count, top_k = need("expert_count"), need("expert_used_count")
    if arch == "llama":
        return MoeConfig(
            routing=Routing(count, top_k),
            intermediate_size=need("feed_forward_length"),
            router="block_sparse_moe.gate",
            experts="block_sparse_moe.experts",
            projections=("w1", "w3", "w2"),
        )
    if arch == "gpt-oss":
        inner = need("expert_feed_forward_length")
        return MoeConfig(Routing(count, top_k), inner, router="mlp.router", has_router_bias=True)
    if arch in ("ernie4_5-moe", "glm4moe", "deepseek2"):
        return _with_shared_experts(file, arch, num_layers, need)
    is_qwen2 = arch == "qwen2moe"
    return MoeConfig(
        routing=Routing(count, top_k, normalize=not is_qwen2),
        intermediate_size=need("expert_feed_forward_length"),
        shared_intermediate_size=need("expert_shared_feed_forward_length") if is_qwen2 else 0,
        has_shared_gate=is_qwen2,
        shared="mlp.shared_expert" if is_qwen2 else "mlp.shared_experts",
    )


def _with_shared_experts(file: GGUFFile, arch: str, num_layers: int, need: Callable[[str], Any]) -> MoeConfig:
    """Return the mixtures of experts of ERNIE-4.5, GLM-4.5 or DeepSeek, some of whose layers have none.

    Sizes of shared experts in the metadata of ERNIE-4.5 are wrong, so they are taken from the tensors.
    """
    dense = tuple(i for i in range(num_layers) if f"blk.{i}.ffn_gate_inp.weight" not in file.tensors)
    first = next((i for i in range(num_layers) if i not in dense), 0)
    shared = file.tensors.get(f"blk.{first}.ffn_up_shexp.weight")
    moe = MoeConfig(
        routing=Routing(need("expert_count"), need("expert_used_count")),
        intermediate_size=need("expert_feed_forward_length"),
        dense_layers=dense,
        shared_intermediate_size=0 if shared is None else shared.shape[0],
        correction="mlp.moe_statics.e_score_correction_bias",
        is_correction_row=True,
    )
    if arch == "ernie4_5-moe":
        return moe
    meta = file.metadata
    gating = meta.get(f"{arch}.expert_gating_func", SOFTMAX if arch == "deepseek2" else None)
    if gating != SIGMOID and (arch != "deepseek2" or gating != SOFTMAX):
        raise LoadError(f"{arch}.expert_gating_func = {gating} is not supported")
    is_sigmoid = gating == SIGMOID
    routing = replace(
        moe.routing,
        scoring="sigmoid" if is_sigmoid else "softmax",
        group_score="top2_sum" if is_sigmoid else "max",
        num_groups=int(meta.get(f"{arch}.expert_group_count") or 1),
        top_groups=int(meta.get(f"{arch}.expert_group_used_count") or 1),
        normalize=bool(meta.get(f"{arch}.expert_weights_norm", arch == "glm4moe")),
        scale=short_float(meta.get(f"{arch}.expert_weights_scale", 1.0)),
    )
    if not is_sigmoid and routing.normalize:
        raise LoadError(f"{arch}.expert_weights_norm has no agreed meaning with softmax scores")
    correction = "mlp.gate.e_score_correction_bias" if is_sigmoid else ""
    return replace(moe, routing=routing, correction=correction, is_correction_row=False)


def expert_tensors(key: str, info: TensorInfo, moe: MoeConfig) -> dict[str, TensorInfo]:
    """Return Hugging Face name -> tensor for a tensor of a mixture of experts; empty for another one.

    A stacked tensor [E, N, K] becomes E matrices in the same bytes, biases [E, N] E vectors.
    """
    if (stacked := _STACKED.fullmatch(key)) and len(info.shape) > 1:
        prefix = f"model.layers.{stacked[1]}.{moe.experts}."
        part = moe.projections[_PARTS.index(stacked[2])]
        size = num_bytes(info) // info.shape[0]
        return {
            f"{prefix}{expert}.{part}.{stacked[3]}": TensorInfo(
                f"{key}[{expert}]", info.shape[1:], info.type_id, info.offset + expert * size
            )
            for expert in range(info.shape[0])
        }
    if (bias := _CORRECTION.fullmatch(key)) and moe.correction:
        info = replace(info, shape=(1, *info.shape)) if moe.is_correction_row else info
        return {f"model.layers.{bias[1]}.{moe.correction}": info}
    single = _SINGLE.fullmatch(key)
    if single is None:
        return {}
    names = {"ffn_gate_inp": moe.router, "ffn_gate_inp_shexp": f"{moe.shared}_gate"}
    names |= {f"ffn_{part}_shexp": f"{moe.shared}.{part}_proj" for part in _PARTS}
    if single[2] == "ffn_gate_inp_shexp" and len(info.shape) == 1:  # stored as a vector
        info = replace(info, shape=(1, *info.shape))
    return {f"model.layers.{single[1]}.{names[single[2]]}.{single[3]}": info}
