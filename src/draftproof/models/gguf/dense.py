"""GGUF files of dense decoders: metadata to ModelConfig, tensors to Hugging Face names."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from draftproof.errors import LoadError
from draftproof.models.config import ModelConfig, RopeScaling, check_num_layers
from draftproof.models.expected_tensors import check_shapes
from draftproof.models.families.dense import DENSE_FAMILIES, DenseFamily
from draftproof.models.families.moe import keeps_stored_dtype
from draftproof.models.gguf.experts import MOE_ARCHITECTURES, expert_tensors, moe_from_gguf
from draftproof.models.gguf.file import TYPES, GGUFFile, TensorInfo, check_types, dequantize, end_token_ids
from draftproof.models.gguf.weights import GGUFMapping, GGUFWeight, has_blocks
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
    "glm4moe": "Glm4MoeForCausalLM",
}
# llama.cpp stores q and k of these as adjacent rotary pairs; the rope kernels rotate halves.
_INTERLEAVED = ("llama", "mistral", "granite", "smollm3", "ernie4_5", "ernie4_5-moe")
_WINDOWED = ("llama", "mistral", "gemma3")
GEMMA3_27B_LAYERS = 62  # its queries have another scale, which files do not have; llama.cpp has the same rule

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_BLOCK_NUMBER = re.compile(r"blk\.(\d+)\.")
_ROPE_FREQS = "rope_freqs.weight"
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
    # MTP layers are stored as further blocks, which are not read
    layers = check_num_layers(need("block_count") - meta.get(f"{arch}.nextn_predict_layers", 0))
    has_kv = f"{arch}.attention.head_count_kv" in meta
    head_dim = int(meta.get(f"{arch}.attention.key_length", hidden // heads))
    if meta.get(f"{arch}.attention.value_length", head_dim) != head_dim:
        raise LoadError("values of another size than keys are not supported")
    if "token_embd.weight" not in file.tensors:
        raise LoadError("missing token_embd.weight: is this a model, or an adapter or a projector?")
    family = DENSE_FAMILIES[GGUF_ARCHITECTURES[arch]]
    rotary = int(meta.get(f"{arch}.rope.dimension_count", head_dim))
    if rotary != head_dim and family.rotary_factor is None:
        raise LoadError("partial rotary embeddings are not supported")
    moe = moe_from_gguf(file, arch, layers, need)
    tokens, rows = meta.get("tokenizer.ggml.tokens", ()), file.tensors["token_embd.weight"].shape[0]
    return ModelConfig(
        architecture=GGUF_ARCHITECTURES[arch] if moe is None else MOE_ARCHITECTURES[arch],
        vocab_size=int(meta.get(f"{arch}.vocab_size") or len(tokens) or rows),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=need("attention.head_count_kv") if has_kv else heads,
        head_dim=head_dim,
        intermediate_size=need("feed_forward_length"),
        moe=moe,
        norm_eps=_short(need("attention.layer_norm_rms_epsilon")),
        rope_theta=float(meta.get(f"{arch}.rope.freq_base", 10000.0)),
        rope_scaling=_rope(file, arch),
        rope_interleaved=family.rope_interleaved,
        partial_rotary_dim=0 if rotary == head_dim else rotary,
        local_rope_theta=_local_rope_theta(meta, arch, family),
        max_position=need("context_length"),
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors and not family.qk_row_norm,
        qk_row_norm=family.qk_row_norm,
        norms=family.norms,
        norm_offset=family.norm_offset,  # files hold the sum
        activation=ACTIVATIONS[family.activation],
        no_rope_layers=no_rope_layers({}, family, layers),
        **_scales(meta, arch, family),
        **_gemma3_scales(family, layers, hidden, heads, head_dim),
        windows=_windows(meta, arch, layers, family),
        bos_token_id=meta.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=end_token_ids(meta),
        dtype=_stored_dtype(file),
    )


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
    found = {name: _short(meta.get(f"{arch}.{key}") or 1.0) for name, key in _SCALES.items()}
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


def _short(value: float) -> float:
    """Return the shortest decimal with the same fp32 bits: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope(file: GGUFFile, arch: str) -> RopeScaling:
    meta = file.metadata
    kind = meta.get(f"{arch}.rope.scaling.type", "linear")  # llama.cpp's default
    old_key = meta.get(f"{arch}.rope.scale_linear", 1.0)
    factor = float(meta.get(f"{arch}.rope.scaling.factor", old_key))
    if _ROPE_FREQS in file.tensors:
        # Llama 3.1 and later: llama.cpp stores the result of the llama3 rule, not its parameters.
        if kind != "none" and factor not in (0.0, 1.0):
            raise LoadError(f"rope_freqs together with {kind} rope scaling is not supported")
        info = file.tensors[_ROPE_FREQS]
        raw = np.memmap(file.path, dtype=np.uint8, mode="r")
        factors = tuple(dequantize(raw, info).flatten().tolist())
        return RopeScaling() if set(factors) == {1.0} else RopeScaling("factors", factors=factors)
    if kind == "none" or factor in (0.0, 1.0):
        return RopeScaling()
    if kind == "linear":
        return RopeScaling("linear", factor)
    if kind == "yarn":
        prefix = f"{arch}.rope.scaling."
        extra = [k for k in meta if k.startswith(prefix + "yarn") or k == prefix + "attn_factor"]
        if extra:
            raise LoadError(f"yarn with {', '.join(extra)} is not supported")
        original = meta.get(prefix + "original_context_length", meta[f"{arch}.context_length"])
        return RopeScaling("yarn", factor, original_max_position=int(original))
    raise LoadError(f"rope scaling {kind!r} is not supported; supported: linear, yarn, rope_freqs")


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


def hf_name(name: str, mlp_norm: str = _BLOCK["ffn_norm"]) -> str | None:
    """Return the Hugging Face name of a llama.cpp tensor, or None; `mlp_norm`: of the norm before the MLP."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP and kind == "weight":
        return f"{_TOP[stem]}.weight"
    match = _BLOCK_NAME.fullmatch(name)
    if match and match[2] in _BLOCK:
        part = mlp_norm if match[2] == "ffn_norm" else _BLOCK[match[2]]
        return f"model.layers.{match[1]}.{part}.{match[3]}"
    return None


def _is_mtp(name: str, file: GGUFFile, config: ModelConfig) -> bool:
    """Return whether a tensor belongs to an MTP layer, which is a block after the last layer."""
    match, first = _BLOCK_NUMBER.match(name), config.num_layers
    count = file.metadata.get(f"{file.metadata['general.architecture']}.nextn_predict_layers", 0)
    return match is not None and int(match[1]) in range(first, first + count)


def gguf_tensors(
    file: GGUFFile, config: ModelConfig, dtype: torch.dtype, track: Callable[..., Iterable[Any]] | None = None
) -> dict[str, Tensor]:
    """Return every tensor of the model in `dtype`, under its Hugging Face name."""

    reorder = _reorder(file, config)

    def convert(name: str, raw: np.ndarray[Any, Any], info: TensorInfo) -> Tensor:
        tensor = reorder(name, torch.from_numpy(dequantize(raw, info)))
        return (tensor if keeps_stored_dtype(name, config) else tensor.to(dtype)).contiguous()

    return _convert_all(file, config, convert, track)


def gguf_weights(
    file: GGUFFile, config: ModelConfig, dtype: torch.dtype, track: Callable[..., Iterable[Any]] | None = None
) -> dict[str, WeightTensor]:
    """Return every weight of the model: matrices left in the blocks of the file, other tensors in `dtype`."""

    mapping, reorder = GGUFMapping(file), _reorder(file, config)

    def convert(name: str, raw: np.ndarray[Any, Any], info: TensorInfo) -> WeightTensor:
        if not has_blocks(info):
            tensor = reorder(name, torch.from_numpy(dequantize(raw, info)))
            return FloatWeight(tensor if keeps_stored_dtype(name, config) else tensor.to(dtype))
        rows = torch.arange(info.shape[0])
        moved = reorder(name, rows)
        order = None if torch.equal(moved, rows) else moved
        kind = TYPES[info.type_id][0]
        return GGUFWeight(mapping.tensor(info), kind=kind, name=info.name, mapping=mapping, order=order)

    return _convert_all(file, config, convert, track)


def _reorder(file: GGUFFile, config: ModelConfig) -> Callable[[str, Tensor], Tensor]:
    """Return the function that puts the rows of q and k of a name into the order of the model."""
    is_interleaved = file.metadata["general.architecture"] in _INTERLEAVED
    if not is_interleaved and config.rotary_dim == config.head_dim:
        return lambda name, tensor: tensor
    return lambda name, tensor: qk_to_halves(name, tensor, config, is_interleaved)


def _convert_all(
    file: GGUFFile,
    config: ModelConfig,
    convert: Callable[[str, np.ndarray[Any, Any], TensorInfo], T],
    track: Callable[..., Iterable[Any]] | None,
) -> dict[str, T]:
    """Return the converted tensors of the file in the order of the model's table, converted in threads."""
    check_types(file)
    expected = expected_tensors(config)
    tensors: dict[str, TensorInfo] = {}
    for key, info in file.tensors.items():
        if key != _ROPE_FREQS and not _is_mtp(key, file, config):
            experts = {} if config.moe is None else expert_tensors(key, info, config.moe)
            tensors |= experts or {hf_name(key, config.norms.mlp) or key: info}
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
