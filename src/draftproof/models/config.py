"""Model configuration that the forward pass reads; what it cannot compute is refused here."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftproof.errors import LoadError

if TYPE_CHECKING:  # the ops import torch, which processes without an engine do not load
    from draftproof.ops.contract.types import Routing

MAX_LAYERS = 10_000  # a larger count is a damaged file, and would build a table of millions of names


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Change of the rotary frequencies against the default ones.

    Kinds: "none", "linear", "llama3", "yarn", "factors", where each frequency is divided by a factor
    of its own, as in GGUF files of Llama 3, and "longrope", with one set of factors for models up to
    `original_max_position` and one for longer ones.
    """

    kind: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position: int = 0  # llama3, yarn, longrope
    attention_factor: float | None = None  # yarn, longrope: on cos and sin; None = from factor
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    factors: tuple[float, ...] = ()  # "factors", longrope: [rotary_dim / 2]
    long_factors: tuple[float, ...] = ()  # longrope: [rotary_dim / 2]


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """Names of the norms of a layer in a checkpoint; "" where there is none."""

    attention: str = "input_layernorm"  # before the attention block
    attention_output: str = ""  # of its output, before the sum with the residual
    mlp: str = "post_attention_layernorm"
    mlp_output: str = ""


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Mixtures of experts of a model, and the names of their tensors in a layer."""

    routing: Routing
    intermediate_size: int  # of one expert
    dense_layers: tuple[int, ...] = ()  # layers with an MLP instead
    shared_intermediate_size: int = 0  # 0: no shared expert
    has_shared_gate: bool = False
    router: str = "mlp.gate"
    has_router_bias: bool = False
    correction: str = ""  # name of the correction bias; "": none
    is_correction_row: bool = False  # whether it is stored as [1, E], not [E]
    experts: str = "mlp.experts"
    shared: str = "mlp.shared_experts"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    owners: tuple[int, ...] = ()  # rank of each expert; (): all are here
    rank: int = 0

    @property
    def own_experts(self) -> range:
        """Return the experts that are here."""
        if not self.owners:
            return range(self.routing.num_experts)
        first = self.owners.index(self.rank)
        return range(first, first + self.owners.count(self.rank))

    def __post_init__(self) -> None:
        routing = self.routing
        if not 0 < routing.top_k <= routing.num_experts:
            raise LoadError(f"{routing.top_k} experts a token of {routing.num_experts} are not possible")
        if self.intermediate_size <= 0:
            raise LoadError(f"the size of an expert must be positive, not {self.intermediate_size}")
        if routing.num_experts % routing.num_groups or not 0 < routing.top_groups <= routing.num_groups:
            raise LoadError(
                f"{routing.top_groups} of {routing.num_groups} groups of {routing.num_experts} experts are "
                "not possible"
            )
        per_group = routing.num_experts // routing.num_groups
        if routing.top_k > per_group * routing.top_groups:
            raise LoadError(f"{routing.top_groups} groups have fewer than {routing.top_k} experts")
        if routing.group_score == "top2_sum" and routing.num_groups > 1 and per_group < 2:
            raise LoadError("groups of one expert have no second best score")


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Latent attention (MLA); `ModelConfig.head_dim` is the number of rope columns of a query head."""

    q_rank: int  # of the queries' low-rank projection; 0: they are projected from the hidden row
    kv_rank: int  # columns of a latent
    nope_dim: int  # columns of a query head before its rope columns
    value_dim: int  # columns of a value head
    scale: float  # of attention scores
    rope_pairs: bool = True  # rotary pairs are adjacent columns, not halves
    norm_eps: float = 1e-6  # of the norms between two projections, whatever `ModelConfig.norm_eps` is


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
    partial_rotary_dim: int = 0  # first columns of a head that alone are rotated; 0: all are
    local_rope_theta: float | None = None  # of layers with a window, which have no rope scaling; None: as all
    no_rope_layers: tuple[int, ...] = ()  # layers without rotary embedding
    max_position: int = 2048
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_row_norm: bool = False  # norm over all heads of q together, and of k
    has_sinks: bool = False  # a logit of each head without a value in the softmax of attention
    norms: LayerNorms = LayerNorms()
    norm_offset: float = 0.0  # safetensors hold norm weights less this number; loaded with it
    activation: str = "silu"  # one of `ops.contract.types.ACTIVATIONS`
    attention_scale: float | None = None  # of attention scores; None: head_dim ** -0.5
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of the output of a block before the sum with the residual
    logit_scale: float = 1.0
    windows: tuple[int, ...] = ()  # [num_layers]; 0 = full attention; () becomes all zeros
    moe: MoeConfig | None = None
    latent: LatentConfig | None = None  # latent attention instead of K and V heads
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    mtp_source: str = ""  # folder of the model where its files hold MTP layers or its config names some
    dtype: str = "float32"  # of the stored matrices: torch's name, or a GGUF type such as "q4_1"

    @property
    def rotary_dim(self) -> int:
        """Return the number of columns of a head that are rotated."""
        return self.partial_rotary_dim or self.head_dim

    @property
    def reorders_qk(self) -> bool:
        """Return whether q and k rows of safetensors are reordered, so that all kernels rotate halves."""
        return self.rope_interleaved or self.rotary_dim != self.head_dim

    @property
    def has_plain_layers(self) -> bool:
        """Return whether layers are those of Llama, apart from biases, QK norms of a head and windows."""
        plain = ModelConfig(self.architecture, 1, 1, 1, 1, 1, 2, 1)
        names = (
            *("norms", "activation", "attention_scale", "embedding_scale", "residual_scale", "logit_scale"),
            *("qk_row_norm", "has_sinks", "local_rope_theta", "no_rope_layers", "moe", "latent"),
        )
        return all(getattr(self, name) == getattr(plain, name) for name in names)

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has a mixture of experts; MTP layers are numbered after the last one."""
        return self.moe is not None and layer not in self.moe.dense_layers

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
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise LoadError(f"{self.rotary_dim} rotary columns of {self.head_dim} are not possible")
        if not self.windows:
            object.__setattr__(self, "windows", (0,) * self.num_layers)
        if len(self.windows) != self.num_layers:
            raise LoadError(f"{len(self.windows)} windows given for {self.num_layers} layers")
        if min(self.windows) < 0:
            raise LoadError(f"an attention window cannot be negative: {self.windows}")

    def with_next_layers(self, count: int) -> ModelConfig:
        """Return the model with `count` MTP layers as further layers, which attend as the last one does."""
        windows = self.windows + self.windows[-1:] * count
        return replace(self, num_layers=self.num_layers + count, windows=windows)


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
