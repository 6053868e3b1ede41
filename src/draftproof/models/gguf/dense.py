"""GGUF files of decoders: metadata to ModelConfig, tensors to Hugging Face names."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from draftproof.errors import LoadError
from draftproof.models.config import LayerNorms, ModelConfig, check_num_layers
from draftproof.models.expected_tensors import check_shapes
from draftproof.models.families.dense import DENSE_FAMILIES, DenseFamily
from draftproof.models.families.moe import keeps_stored_dtype
from draftproof.models.gguf.experts import expert_tensors, moe_architecture, moe_from_gguf
from draftproof.models.gguf.file import TYPES, GGUFFile, TensorInfo, check_types, end_token_ids
from draftproof.models.gguf.fused_tensors import LatentUp, join_latent_up, read_tensor, split_fused_rows
from draftproof.models.gguf.mapped_weights import GGUFMapping, GGUFWeight, has_blocks
from draftproof.models.gguf.rope import ROPE_TENSORS, latent_from_gguf, rope_from_gguf, short_float
from draftproof.models.hf_config import ACTIVATIONS, no_rope_layers
from draftproof.models.registry import expected_tensors
from draftproof.models.rope import qk_to_halves
from draftproof.models.weight_formats import FloatWeight, WeightTensor

T = TypeVar("T")

GGUF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "ernie4_5-moe": "Ernie4_5_MoeForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4moe": "Glm4MoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "deepseek2": "DeepseekV2ForCausalLM",
}
# llama.cpp stores q and k of these as adjacent rotary pairs; the rope kernels rotate halves.
_INTERLEAVED = ("llama", "mistral", "granite", "smollm3", "ernie4_5", "ernie4_5-moe", "glm4")
_WINDOWED = ("llama", "mistral", "gemma3", "phi3", "gpt-oss")
GEMMA3_27B_LAYERS = 62  # its queries have another scale, which files do not have; llama.cpp has the same rule

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
_NEXTN = {  # of an MTP layer
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+|nextn\.\w+)\.(weight|bias)")
_BLOCK_NUMBER = re.compile(r"blk\.(\d+)\.")
_NORMS = LayerNorms()
_SINKS = "attn_sinks"  # without a suffix in checkpoints
# field of `ModelConfig` -> key of the metadata
_SCALES = {
    "logit_scale": "logit_scale",
    "residual_scale": "residual_scale",
    "embedding_scale": "embedding_scale",
    "attention_scale": "attention.scale",
}


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """Build the configuration from the metadata and the set of tensors."""
    try:
        return _config(file)
    except LoadError as error:
        text = str(error)
        raise LoadError(text if str(file.path) in text else f"{file.path}: {text}") from error
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        raise LoadError(f"{file.path}: metadata of an unexpected kind: {error}") from error


def _config(file: GGUFFile) -> ModelConfig:
    meta = file.metadata
    arch = meta.get("general.architecture")
    if arch not in GGUF_ARCHITECTURES:
        raise LoadError(
            f"GGUF architecture {arch!r} is not supported; supported: "
            f"{', '.join(GGUF_ARCHITECTURES)} ({', '.join(GGUF_ARCHITECTURES.values())})"
        )
    _check_supported(meta, arch)

    def need(key: str) -> Any:
        value = meta.get(f"{arch}.{key}")
        if isinstance(value, list):
            value = value[0] if len(set(value)) == 1 else None
        if value is None:
            raise LoadError(f"metadata {arch}.{key} is missing or differs between layers")
        return value

    heads, hidden = need("attention.head_count"), need("embedding_length")
    layers = check_num_layers(need("block_count") - num_mtp_layers(file))  # MTP layers are further blocks
    has_kv = f"{arch}.attention.head_count_kv" in meta
    family = DENSE_FAMILIES[GGUF_ARCHITECTURES[arch]]
    latent = latent_from_gguf(meta, arch, need) if family.latent else None
    head_dim = int(meta.get(f"{arch}.attention.key_length", hidden // heads))
    if latent is not None:
        head_dim = int(need("rope.dimension_count"))
    elif meta.get(f"{arch}.attention.value_length", head_dim) != head_dim:
        raise LoadError("values of another size than keys are not supported")
    if "token_embd.weight" not in file.tensors:
        raise LoadError("missing token_embd.weight: is this a model, or an adapter or a projector?")
    rotary = int(meta.get(f"{arch}.rope.dimension_count", head_dim))
    if rotary != head_dim and family.rotary_factor is None:
        raise LoadError("partial rotary embeddings are not supported")
    moe = moe_from_gguf(file, arch, layers, need)
    tokens, rows = meta.get("tokenizer.ggml.tokens", ()), file.tensors["token_embd.weight"].shape[0]
    return ModelConfig(
        architecture=GGUF_ARCHITECTURES[arch] if moe is None else moe_architecture(arch, moe),
        vocab_size=int(meta.get(f"{arch}.vocab_size") or len(tokens) or rows),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=need("attention.head_count_kv") if has_kv and latent is None else heads,
        head_dim=head_dim,
        intermediate_size=need("feed_forward_length"),
        moe=moe,
        latent=latent,
        norm_eps=short_float(need("attention.layer_norm_rms_epsilon")),
        rope_theta=float(meta.get(f"{arch}.rope.freq_base", 10000.0)),
        rope_scaling=rope_from_gguf(file, arch),
        rope_interleaved=family.rope_interleaved,
        partial_rotary_dim=0 if rotary == head_dim else rotary,
        local_rope_theta=_local_rope_theta(meta, arch, family),
        max_position=need("context_length"),
        tie_embeddings="output.weight" not in file.tensors,
        **_parts(file, family),
        has_sinks=family.has_sinks,
        norms=family.norms,
        norm_offset=family.norm_offset,  # files hold the sum
        activation=family.fixed_activation or ACTIVATIONS[family.activation],
        no_rope_layers=no_rope_layers({}, family, layers),
        **_scales(meta, arch, family),
        **_gemma3_scales(family, layers, hidden, heads, head_dim),
        windows=_windows(meta, arch, layers, family),
        bos_token_id=meta.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=end_token_ids(meta),
        mtp_source=str(file.path) if num_mtp_layers(file) else "",
        dtype=_stored_dtype(file),
    )


def _parts(file: GGUFFile, family: DenseFamily) -> dict[str, Any]:
    """Return which biases and norms of q and k the layers have."""

    def has(name: str) -> bool:
        return f"blk.0.{name}" in file.tensors

    return {
        "qkv_bias": has("attn_q.bias") or has("attn_qkv.bias"),
        "o_bias": has("attn_output.bias"),
        "mlp_bias": has("ffn_down.bias") or has("ffn_down_exps.bias"),
        "qk_norm": has("attn_q_norm.weight") and not family.qk_row_norm,
        "qk_row_norm": family.qk_row_norm,
    }


def _check_supported(meta: dict[str, Any], arch: str) -> None:
    if meta.get("split.count", 1) > 1:
        raise LoadError(
            f"this is part {meta.get('split.no', 0) + 1} of {meta['split.count']} of a split "
            "model; join the parts first (llama-gguf-split --merge)"
        )
    if meta.get("general.type", "model") != "model":
        raise LoadError(f"this is a {meta['general.type']}, not a model")
    if meta.get(f"{arch}.final_logit_softcapping"):
        raise LoadError(f"{arch}.final_logit_softcapping is not supported")
    has_scales = DENSE_FAMILIES[GGUF_ARCHITECTURES[arch]].has_multipliers
    for key in _SCALES.values():
        if meta.get(f"{arch}.{key}") and not has_scales:
            raise LoadError(f"{arch}.{key} is not supported")


def _scales(meta: dict[str, Any], arch: str, family: DenseFamily) -> dict[str, Any]:
    """Return the multipliers of the family; llama.cpp divides logits by its `logit_scale`."""
    if not family.has_multipliers:
        return {}
    found = {name: short_float(meta.get(f"{arch}.{key}") or 1.0) for name, key in _SCALES.items()}
    if not meta.get(f"{arch}.attention.scale"):
        del found["attention_scale"]
    return found | {"logit_scale": 1.0 / found["logit_scale"]}


def _gemma3_scales(
    family: DenseFamily, layers: int, hidden: int, heads: int, head_dim: int
) -> dict[str, Any]:
    """Return the factors of embeddings and scores that Gemma 3 has and its files do not."""
    if not family.scales_embedding:
        return {}
    divisor = hidden // heads if layers == GEMMA3_27B_LAYERS else head_dim
    return {"embedding_scale": hidden**0.5, "attention_scale": float(divisor) ** -0.5}


def _local_rope_theta(meta: dict[str, Any], arch: str, family: DenseFamily) -> float | None:
    """Return the rotary base of layers with a window, where it is another one."""
    if family.local_rope_theta is None:
        return None
    return float(meta.get(f"{arch}.rope.freq_base_swa", family.local_rope_theta))


def _windows(meta: dict[str, Any], arch: str, layers: int, family: DenseFamily) -> tuple[int, ...]:
    window = meta.get(f"{arch}.attention.sliding_window") or 0
    if window and arch not in _WINDOWED:
        raise LoadError(f"{arch}.attention.sliding_window is not supported for this architecture")
    if family.windows == "pattern":
        return tuple(int(window) if (layer + 1) % family.full_interval else 0 for layer in range(layers))
    return (int(window),) * layers


def _stored_dtype(file: GGUFFile) -> str:
    """Return the type of most matrix elements, by torch's name where it has one."""
    counts: dict[int, int] = {}
    for info in file.tensors.values():
        if len(info.shape) > 1:
            counts[info.type_id] = counts.get(info.type_id, 0) + info.shape[0] * info.shape[1]
    if not counts:
        raise LoadError("there are no matrices in the file")
    name = TYPES.get(max(counts, key=lambda key: counts[key]), ("unknown", 0, 0))[0]
    return {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get(name, name.lower())


def hf_name(name: str, norms: LayerNorms = _NORMS) -> str | None:
    """Return the Hugging Face name of a llama.cpp tensor, or None; `norms`: names of the norms of a layer."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP and kind == "weight":
        return f"{_TOP[stem]}.weight"
    match = _BLOCK_NAME.fullmatch(name)
    if match is None:
        return None
    layer = f"model.layers.{match[1]}."
    if match[2] == _SINKS:
        return f"{layer}self_attn.sinks"
    norm_names = {
        "attn_norm": norms.attention,
        "post_attention_norm": norms.attention_output or norms.mlp,
        "ffn_norm": norms.mlp,
        "post_ffw_norm": norms.mlp_output,
    }
    part = _BLOCK.get(match[2]) or _NEXTN.get(match[2]) or norm_names.get(match[2])
    return f"{layer}{part}.{match[3]}" if part else None


def num_mtp_layers(file: GGUFFile) -> int:
    """Return the number of MTP layers that the metadata name."""
    arch = file.metadata["general.architecture"]
    return int(file.metadata.get(f"{arch}.nextn_predict_layers") or 0)


def _is_mtp(name: str, file: GGUFFile, config: ModelConfig) -> bool:
    """Return whether a tensor belongs to an MTP layer, which is a block after the last layer."""
    match, first = _BLOCK_NUMBER.match(name), config.num_layers
    return match is not None and int(match[1]) in range(first, first + num_mtp_layers(file))


def stored_names(file: GGUFFile, config: ModelConfig, mtp: bool = False) -> dict[str, TensorInfo | LatentUp]:
    """Return Hugging Face name -> tensor of the model, or with `mtp` of its MTP layers."""
    stored: dict[str, TensorInfo] = {}
    for key, info in split_fused_rows(file, config).items():
        if key not in ROPE_TENSORS and _is_mtp(key, file, config) == mtp:
            experts = {} if config.moe is None else expert_tensors(key, info, config.moe)
            stored |= experts or {hf_name(key, config.norms) or key: info}
    return join_latent_up(stored)


def gguf_tensors(
    file: GGUFFile, config: ModelConfig, dtype: torch.dtype, track: Callable[..., Iterable[Any]] | None = None
) -> dict[str, Tensor]:
    """Return every tensor of the model in `dtype`, under its Hugging Face name."""

    reorder = _reorder(file, config)

    def convert(name: str, raw: np.ndarray[Any, Any], info: TensorInfo | LatentUp) -> Tensor:
        tensor = reorder(name, torch.from_numpy(read_tensor(raw, info)))
        return (tensor if keeps_stored_dtype(name, config) else tensor.to(dtype)).contiguous()

    return _convert_all(file, stored_names(file, config), expected_tensors(config), convert, track)


def gguf_weights(
    file: GGUFFile,
    config: ModelConfig,
    dtype: torch.dtype,
    track: Callable[..., Iterable[Any]] | None = None,
    mtp: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, WeightTensor]:
    """Return every weight of the model: matrices left in the blocks of the file, other tensors in `dtype`.

    `mtp`, if given, names the weights of MTP layers with their shapes, which are returned instead.
    """

    mapping, reorder = GGUFMapping(file), _reorder(file, config)

    def convert(name: str, raw: np.ndarray[Any, Any], info: TensorInfo | LatentUp) -> WeightTensor:
        if isinstance(info, LatentUp) or not has_blocks(info):
            tensor = reorder(name, torch.from_numpy(read_tensor(raw, info)))
            return FloatWeight(tensor if keeps_stored_dtype(name, config) else tensor.to(dtype))
        rows = torch.arange(info.shape[0])
        moved = reorder(name, rows)
        order = None if torch.equal(moved, rows) else moved
        kind = TYPES[info.type_id][0]
        return GGUFWeight(mapping.tensor(info), kind=kind, name=info.name, mapping=mapping, order=order)

    expected = expected_tensors(config) if mtp is None else mtp
    return _convert_all(file, stored_names(file, config, mtp is not None), expected, convert, track)


def _reorder(file: GGUFFile, config: ModelConfig) -> Callable[[str, Tensor], Tensor]:
    """Return the function that puts the rows of q and k of a name into the order of the model."""
    is_interleaved = file.metadata["general.architecture"] in _INTERLEAVED
    if config.latent is not None or (not is_interleaved and config.rotary_dim == config.head_dim):
        return lambda name, tensor: tensor
    return lambda name, tensor: qk_to_halves(name, tensor, config, is_interleaved)


def _convert_all(
    file: GGUFFile,
    tensors: Mapping[str, TensorInfo | LatentUp],
    expected: Mapping[str, tuple[int, ...]],
    convert: Callable[[str, np.ndarray[Any, Any], TensorInfo | LatentUp], T],
    track: Callable[..., Iterable[Any]] | None,
) -> dict[str, T]:
    """Return the converted tensors of the file in the order of `expected`, converted in threads."""
    check_types(file)
    check_shapes({name: info.shape for name, info in tensors.items()}, expected, str(file.path))
    raw = np.memmap(file.path, dtype=np.uint8, mode="r")

    def convert_one(name: str) -> T:
        return convert(name, raw, tensors[name])

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        results = pool.map(convert_one, expected)
        done = track(results, total=len(expected)) if track else results
        try:
            return dict(zip(expected, done, strict=True))
        except LoadError as error:
            raise LoadError(f"{file.path}: {error}") from error
