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
from draftproof.models.gguf.file import TYPES, GGUFFile, TensorInfo, check_types, dequantize, end_token_ids
from draftproof.models.gguf.weights import GGUFMapping, GGUFWeight, has_blocks
from draftproof.models.registry import expected_tensors
from draftproof.models.rope import qk_to_halves
from draftproof.models.weight_formats import FloatWeight, WeightTensor

T = TypeVar("T")

GGUF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# llama.cpp stores q and k of these as adjacent rotary pairs; the rope kernels rotate halves.
_INTERLEAVED = ("llama", "mistral")

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
}
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FREQS = "rope_freqs.weight"


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
    layers = check_num_layers(need("block_count"))
    has_kv = f"{arch}.attention.head_count_kv" in meta
    head_dim = int(meta.get(f"{arch}.attention.key_length", hidden // heads))
    if meta.get(f"{arch}.attention.value_length", head_dim) != head_dim:
        raise LoadError("values of another size than keys are not supported")
    if meta.get(f"{arch}.rope.dimension_count", head_dim) != head_dim:
        raise LoadError("partial rotary embeddings are not supported")
    if "token_embd.weight" not in file.tensors:
        raise LoadError("missing token_embd.weight: is this a model, or an adapter or a projector?")
    tokens, rows = meta.get("tokenizer.ggml.tokens", ()), file.tensors["token_embd.weight"].shape[0]
    return ModelConfig(
        architecture=GGUF_ARCHITECTURES[arch],
        vocab_size=int(meta.get(f"{arch}.vocab_size") or len(tokens) or rows),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=need("attention.head_count_kv") if has_kv else heads,
        head_dim=head_dim,
        intermediate_size=need("feed_forward_length"),
        norm_eps=_short(need("attention.layer_norm_rms_epsilon")),
        rope_theta=float(meta.get(f"{arch}.rope.freq_base", 10000.0)),
        rope_scaling=_rope(file, arch),
        max_position=need("context_length"),
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm=arch == "qwen3",
        windows=_windows(meta, arch, layers),
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
    if meta.get(f"{arch}.expert_count", 0):
        raise LoadError(f"mixture-of-experts models are not supported ({arch}.expert_count)")
    if meta.get("general.type", "model") != "model":
        raise LoadError(f"this is a {meta['general.type']}, not a model")
    for key in ("logit_scale", "residual_scale", "embedding_scale", "attention.scale"):
        if meta.get(f"{arch}.{key}"):
            raise LoadError(f"{arch}.{key} is not supported")


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


def _windows(meta: dict[str, Any], arch: str, layers: int) -> tuple[int, ...]:
    window = meta.get(f"{arch}.attention.sliding_window") or 0
    if window and arch not in _INTERLEAVED:
        raise LoadError(f"{arch}.attention.sliding_window is not supported for this architecture")
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


def hf_name(name: str) -> str | None:
    """Return the Hugging Face name of a llama.cpp tensor, or None."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP and kind == "weight":
        return f"{_TOP[stem]}.weight"
    match = _BLOCK_NAME.fullmatch(name)
    if match and match[2] in _BLOCK:
        return f"model.layers.{match[1]}.{_BLOCK[match[2]]}.{match[3]}"
    return None


def gguf_tensors(
    file: GGUFFile, config: ModelConfig, dtype: torch.dtype, track: Callable[..., Iterable[Any]] | None = None
) -> dict[str, Tensor]:
    """Return every tensor of the model in `dtype`, under its Hugging Face name."""

    def convert(name: str, raw: np.ndarray[Any, Any], info: TensorInfo, is_interleaved: bool) -> Tensor:
        tensor = torch.from_numpy(dequantize(raw, info))
        if is_interleaved:
            tensor = qk_to_halves(name, tensor, config)
        return tensor.to(dtype).contiguous()

    return _convert_all(file, config, convert, track)


def gguf_weights(
    file: GGUFFile, config: ModelConfig, dtype: torch.dtype, track: Callable[..., Iterable[Any]] | None = None
) -> dict[str, WeightTensor]:
    """Return every weight of the model: matrices left in the blocks of the file, other tensors in `dtype`."""

    mapping = GGUFMapping(file)

    def convert(name: str, raw: np.ndarray[Any, Any], info: TensorInfo, is_interleaved: bool) -> WeightTensor:
        if not has_blocks(info):
            tensor = torch.from_numpy(dequantize(raw, info)).to(dtype)
            return FloatWeight(qk_to_halves(name, tensor, config) if is_interleaved else tensor)
        order = qk_to_halves(name, torch.arange(info.shape[0]), config) if is_interleaved else None
        if order is not None and torch.equal(order, torch.arange(len(order))):
            order = None
        kind = TYPES[info.type_id][0]
        return GGUFWeight(mapping.tensor(info), kind=kind, name=info.name, mapping=mapping, order=order)

    return _convert_all(file, config, convert, track)


def _convert_all(
    file: GGUFFile,
    config: ModelConfig,
    convert: Callable[[str, np.ndarray[Any, Any], TensorInfo, bool], T],
    track: Callable[..., Iterable[Any]] | None,
) -> dict[str, T]:
    """Return the converted tensors of the file in the order of the model's table, converted in threads."""
    check_types(file)
    expected = expected_tensors(config)
    names = {hf_name(key) or key: key for key in file.tensors if key != _ROPE_FREQS}
    found = {name: file.tensors[key].shape for name, key in names.items()}
    check_shapes(found, expected, str(file.path))
    is_interleaved = file.metadata["general.architecture"] in _INTERLEAVED
    raw = np.memmap(file.path, dtype=np.uint8, mode="r")

    def convert_one(name: str) -> T:
        return convert(name, raw, file.tensors[names[name]], is_interleaved)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        results = pool.map(convert_one, expected)
        done = track(results, total=len(expected)) if track else results
        try:
            return dict(zip(expected, done, strict=True))
        except LoadError as error:
            raise LoadError(f"{file.path}: {error}") from error
