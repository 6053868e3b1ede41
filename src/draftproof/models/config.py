"""Model configuration: one frozen description of a Llama-family decoder.

It comes from a Hugging Face `config.json` or from GGUF metadata and says everything the forward
pass needs to know. What it cannot compute exactly is refused here, before any weight is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftproof.errors import LoadError


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How the rotary frequencies differ from the plain ones.

    Kinds: "none", "linear", "llama3", "yarn", and "factors": each frequency divided by its own
    factor, as GGUF files of Llama 3 have it.
    """

    kind: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position: int = 0  # llama3, yarn
    attention_factor: float | None = None  # yarn: on cos and sin; None = from factor
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    factors: tuple[float, ...] = ()  # "factors": [head_dim / 2]


_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "max_position",
)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family; flags tell its members apart."""

    architecture: str  # Hugging Face class name
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = RopeScaling()
    max_position: int = 2048
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int, ...] = ()  # [num_layers]; 0 = full attention; () becomes all zeros
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"  # of the stored matrices: torch's name, or a GGUF type such as "q4_1"

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) <= 0:
                raise LoadError(f"{name} must be positive, not {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise LoadError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} KV heads evenly"
            )
        if self.head_dim % 2:
            raise LoadError(f"head_dim {self.head_dim} is odd; rotary embedding needs an even one")
        if not self.windows:
            object.__setattr__(self, "windows", (0,) * self.num_layers)
        if len(self.windows) != self.num_layers:
            raise LoadError(f"{len(self.windows)} windows given for {self.num_layers} layers")
        if min(self.windows) < 0:
            raise LoadError(f"an attention window cannot be negative: {self.windows}")


@dataclass(frozen=True, slots=True)
class Architecture:
    """What a class of checkpoints means where its config.json is silent (as in transformers)."""

    num_kv_heads: int | None  # None = num_attention_heads
    max_position: int
    head_dim: int | None = None  # None = hidden_size / num_attention_heads
    qkv_bias: bool | str = False  # a string names the config key that decides
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    sliding_window: int | None = None
    windows: str = "none"  # "none" | "all" | "layer_types"
    bos_token_id: int | None = None
    eos_token_id: int | None = None


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(
        num_kv_heads=None,
        max_position=2048,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        bos_token_id=1,
        eos_token_id=2,
    ),
    "MistralForCausalLM": Architecture(
        num_kv_heads=8,
        max_position=4096 * 32,
        sliding_window=4096,
        windows="all",
        bos_token_id=1,
        eos_token_id=2,
    ),
    "Qwen2ForCausalLM": Architecture(
        num_kv_heads=32,
        max_position=32768,
        qkv_bias=True,
        sliding_window=4096,
        windows="layer_types",
    ),
    "Qwen3ForCausalLM": Architecture(
        num_kv_heads=32,
        max_position=32768,
        head_dim=128,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        sliding_window=4096,
        windows="layer_types",
    ),
}

# Keys that ask for a computation we do not have: (key, values that are fine, what it would be).
_REFUSED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("quantization_config", (None, {}), "quantised checkpoints other than GGUF files"),
    ("num_local_experts", (None, 0), "mixture-of-experts models"),
    ("num_experts", (None, 0), "mixture-of-experts models"),
    ("n_routed_experts", (None, 0), "mixture-of-experts models"),
    ("partial_rotary_factor", (None, 1, 1.0), "partial rotary embeddings"),
    ("attention_sinks", (None, False, 0), "attention sinks"),
    ("use_attention_sinks", (None, False, 0), "attention sinks"),
    ("attn_logit_softcapping", (None, 0), "logit soft-capping"),
    ("final_logit_softcapping", (None, 0), "logit soft-capping"),
    ("is_encoder_decoder", (None, False), "encoder-decoder models"),
)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; LoadError that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise LoadError(f"{path}: no such file") from error
    except OSError as error:
        raise LoadError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise LoadError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise LoadError(f"{path}: a JSON object is expected, not {type(value).__name__}")
    return value


def config_from_hf(
    raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None, where: str = "config.json"
) -> ModelConfig:
    """From the contents of config.json and, where there is one, generation_config.json."""
    try:
        return _from_hf(raw, generation or {})
    except LoadError as error:
        raise LoadError(f"{where}: {error}") from error
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        raise LoadError(f"{where}: not a usable model configuration: {error!r}") from error


def _from_hf(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    names = raw.get("architectures") or []
    name = names[0] if names else "(none named)"
    if name not in ARCHITECTURES:
        raise LoadError(f"architecture {name} is not supported; supported: {', '.join(ARCHITECTURES)}")
    arch = ARCHITECTURES[name]
    for key, fine, what in _REFUSED:
        if raw.get(key) not in fine:
            raise LoadError(f"{what} are not supported ({key} = {raw[key]!r})")
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise LoadError(f"activation {raw['hidden_act']!r} is not supported; supported: silu")
    num_heads = _int(raw, "num_attention_heads")
    num_layers = plausible_layers(_int(raw, "num_hidden_layers"))
    hidden_size = _int(raw, "hidden_size")
    max_position = int(raw.get("max_position_embeddings") or arch.max_position)
    rope = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    theta = rope.get("rope_theta") or raw.get("rope_theta") or 10000.0
    bos = raw.get("bos_token_id", generation.get("bos_token_id", arch.bos_token_id))
    eos = [*_ids(generation.get("eos_token_id")), *_ids(raw.get("eos_token_id", arch.eos_token_id))]
    return ModelConfig(
        architecture=name,
        vocab_size=_int(raw, "vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=int(raw.get("num_key_value_heads", arch.num_kv_heads) or num_heads),
        head_dim=int(raw.get("head_dim", arch.head_dim) or hidden_size // num_heads),
        intermediate_size=_int(raw, "intermediate_size"),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=float(theta),
        rope_scaling=_rope_from_hf(rope, raw, max_position),
        max_position=max_position,
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=_flag(arch.qkv_bias, raw),
        o_bias=_flag(arch.o_bias, raw),
        mlp_bias=_flag(arch.mlp_bias, raw),
        qk_norm=arch.qk_norm,
        windows=_windows(raw, arch, num_layers),
        bos_token_id=_ids(bos)[0] if _ids(bos) else None,
        eos_token_ids=tuple(dict.fromkeys(eos)),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
    )


def plausible_layers(count: int) -> int:
    """`count`, unless a damaged file would have us build a table of millions of names."""
    if not 0 < count <= 10_000:
        raise LoadError(f"{count} layers cannot be meant")
    return count


def _int(raw: Mapping[str, Any], key: str) -> int:
    if not isinstance(raw.get(key), int):
        raise LoadError(f"{key} is missing or not a whole number")
    return int(raw[key])


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(x) for x in value] if isinstance(value, list | tuple) else [int(value)]


def _flag(rule: bool | str, raw: Mapping[str, Any]) -> bool:
    return bool(raw.get(rule, False)) if isinstance(rule, str) else rule


def _rope_from_hf(rope: dict[str, Any], raw: Mapping[str, Any], max_position: int) -> RopeScaling:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if any(isinstance(value, dict) for value in rope.values()):
        raise LoadError("rotary parameters that differ between layers are not supported")
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise LoadError("partial rotary embeddings are not supported")
    if kind == "default":
        return RopeScaling()
    if kind not in ("linear", "llama3", "yarn"):
        why = ""
        if kind in ("dynamic", "longrope"):
            # The frequencies of a row would depend on tokens that come after it.
            why = ": its frequencies change with the length of the text"
        raise LoadError(f"rope type {kind!r} is not supported{why}; supported: default, linear, llama3, yarn")
    if rope.get("factor") is None:
        raise LoadError(f"rope type {kind!r} without a factor")
    original = (
        raw.get("original_max_position_embeddings")
        or rope.get("original_max_position_embeddings")
        or max_position
    )
    scaling = RopeScaling(kind, float(rope["factor"]), original_max_position=int(original))
    if kind == "llama3":
        return replace(
            scaling,
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
        )
    if kind == "yarn":
        if rope.get("mscale") and rope.get("mscale_all_dim"):
            raise LoadError("yarn with mscale and mscale_all_dim is not supported")
        attention = rope.get("attention_factor")
        return replace(
            scaling,
            attention_factor=None if attention is None else float(attention),
            beta_fast=float(rope.get("beta_fast") or 32),
            beta_slow=float(rope.get("beta_slow") or 1),
            truncate=bool(rope.get("truncate", True)),
        )
    return scaling


def _windows(raw: Mapping[str, Any], arch: Architecture, num_layers: int) -> tuple[int, ...]:
    """Attention window per layer, as transformers 5 reads these keys."""
    types = raw.get("layer_types")
    if types is not None and len(types) != num_layers:
        raise LoadError(f"layer_types names {len(types)} layers, the model has {num_layers}")
    window = raw.get("sliding_window", arch.sliding_window)
    if arch.windows != "layer_types":
        if len(set(types or ())) > 1:
            raise LoadError(f"layers of different attention types are not supported here: {types}")
        return (int(window or 0) if arch.windows == "all" else 0,) * num_layers
    if not raw.get("use_sliding_window", False):
        window = None
    if types is None:
        first = int(raw.get("max_window_layers", 28))
        return tuple(int(window or 0) if layer >= first else 0 for layer in range(num_layers))
    if unknown := set(types) - {"full_attention", "sliding_attention"}:
        raise LoadError(f"attention types not supported: {', '.join(sorted(unknown))}")
    if "sliding_attention" in types and not window:
        raise LoadError("layer_types asks for sliding_attention but no window is in force")
    return tuple(int(window) if kind == "sliding_attention" and window else 0 for kind in types)
