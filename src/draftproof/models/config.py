"""Model configuration that the forward pass reads; what it cannot compute is refused here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftproof.errors import LoadError

MAX_LAYERS = 10_000  # a larger count is a damaged file, and would build a table of millions of names


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Change of the rotary frequencies against the default ones.

    Kinds: "none", "linear", "llama3", "yarn", and "factors", where each frequency is divided by a factor
    of its own, as in GGUF files of Llama 3.
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
    *("vocab_size", "hidden_size", "intermediate_size", "max_position"),
    *("num_layers", "num_heads", "num_kv_heads", "head_dim"),
)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Decoder configuration; the differences between dense families are flags."""

    architecture: str  # Hugging Face class name, a key of `registry.MODELS`
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
    rope_interleaved: bool = False  # safetensors hold q and k rows as adjacent pairs; loaded as halves
    max_position: int = 2048
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int, ...] = ()  # [num_layers]; 0 = full attention; () becomes all zeros
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    mtp_source: str = ""  # folder of the model itself where its files hold MTP layers, which draft
    dtype: str = "float32"  # of the stored matrices: torch's name, or a GGUF type such as "q4_1"

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) <= 0:
                raise LoadError(f"{name} must be positive, not {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise LoadError(
                f"num_heads ({self.num_heads}) is not a multiple of num_kv_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise LoadError(f"head_dim {self.head_dim} is odd; rotary embedding needs an even one")
        if not self.windows:
            object.__setattr__(self, "windows", (0,) * self.num_layers)
        if len(self.windows) != self.num_layers:
            raise LoadError(f"{len(self.windows)} windows given for {self.num_layers} layers")
        if min(self.windows) < 0:
            raise LoadError(f"an attention window cannot be negative: {self.windows}")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; a LoadError names the file."""
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


def check_num_layers(count: int) -> int:
    """Return `count`, or raise LoadError where it cannot be a number of layers."""
    if not 0 < count <= MAX_LAYERS:
        raise LoadError(f"{count} layers: not a plausible number")
    return count
