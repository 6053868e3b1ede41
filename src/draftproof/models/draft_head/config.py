"""A draft head: its description, its tensors, and the model it belongs to."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from draftproof.errors import LoadError
from draftproof.models.config import ModelConfig, RopeScaling
from draftproof.models.weights import linear_shapes
from draftproof.ops import KVLayout

FEATURES = ("aux", "last", "last_normed")
FEATURE_NORMS = ("none", "whole", "each")


@dataclass(frozen=True, slots=True)
class Kind:
    """How a head joins the two rows that it is given."""

    reads_both: bool  # its first layer's attention reads both, normed, side by side; else they are projected
    norms_both: bool  # before that
    fuses: str  # the name of the weight that makes one row of several


KINDS = {
    "eagle3": Kind(reads_both=True, norms_both=True, fuses="fc"),
    "eagle": Kind(reads_both=False, norms_both=False, fuses="fc"),
    "mtp": Kind(reads_both=False, norms_both=True, fuses="eh_proj"),
}


@dataclass(frozen=True, slots=True)
class Target:
    """The model that a head was trained for."""

    model_type: str  # Hugging Face class name; "": not told
    hidden_size: int
    vocab_size: int
    num_layers: int  # 0: not told
    digest: str  # of its weights: `weights_digest`; "": not told

    @classmethod
    def of(cls, config: ModelConfig, tensors: Mapping[str, Tensor]) -> Target:
        sizes = config.hidden_size, config.vocab_size, config.num_layers
        return cls(config.architecture, *sizes, weights_digest(tensors))

    def check(self, found: Target, where: str) -> None:
        """LoadError with the reason if `found` is not the model that this head was made for."""
        reasons = [
            f"its {what} is {mine}, this model's is {theirs}"
            for what, mine, theirs in (
                ("target's hidden size", self.hidden_size, found.hidden_size),
                ("target's vocabulary", self.vocab_size, found.vocab_size),
                ("target's number of layers", self.num_layers or found.num_layers, found.num_layers),
                ("target's class", self.model_type or found.model_type, found.model_type),
                ("target's digest", self.digest or found.digest, found.digest),
            )
            if mine != theirs
        ]
        if reasons:
            raise LoadError(
                f"{where}: this head was made for another model: {'; '.join(reasons)}. Use a head made for "
                "this one, or make one with `draftproof train`"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """One head: a small decoder over the target's rows and the next token's embedding.

    The row at position p takes the feature of the target's row p and the embedding of token p + 1, has rope
    position p, and predicts token p + 2. Its output, before the norm, is the feature of its own next step.

    "eagle3" concatenates the normed embedding and the normed feature and reads both in the attention of its
    first layer. "eagle" and "mtp" first project the two, concatenated, to one row; "mtp" norms them before.
    """

    kind: str  # one of KINDS
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int = 1
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = RopeScaling()
    feature: str = "aux"  # one of FEATURES
    aux_layers: tuple[int, ...] = ()  # layers of the target whose residual output is the feature
    draft_vocab_size: int
    share_head: bool = True  # the target's own LM head, its rows d2t
    target: Target
    # what public formats differ in
    own_embedding: bool = False  # else the target's
    feature_norm: str = "none"  # of the concatenated aux rows, before fc; one of FEATURE_NORMS
    norm_before_residual: bool = False  # eagle3: the normed feature goes around the attention
    norm_output: bool = False  # the feature of the next step is taken after the last norm
    input_norm: bool = True  # eagle: the first layer has one
    final_norm: bool = True  # there is one before the LM head
    fc_bias: bool = False  # eagle
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    window: int = 0  # as of the target's layers; 0: all keys are seen

    def __post_init__(self) -> None:
        for what, value, known in (
            ("kind", self.kind, tuple(KINDS)),
            ("feature", self.feature, FEATURES),
            ("feature_norm", self.feature_norm, FEATURE_NORMS),
        ):
            if value not in known:
                raise LoadError(f"a head's {what} is {value!r}, which is not known: {', '.join(known)}")
        if (self.feature == "aux") != bool(self.aux_layers):
            raise LoadError("aux_layers belong to feature 'aux', and it needs them")
        if self.join.reads_both != (self.feature == "aux"):
            raise LoadError(f"a head of kind {self.kind!r} cannot have the feature {self.feature!r}")
        layers = self.target.num_layers
        if any(not 0 <= layer < (layers or layer + 1) for layer in self.aux_layers):
            raise LoadError(f"aux_layers {list(self.aux_layers)}: the target has layers 0..{layers - 1}")
        if not 0 < self.draft_vocab_size <= self.target.vocab_size:
            raise LoadError(f"a draft vocabulary of {self.draft_vocab_size} ids of {self.target.vocab_size}")
        alone = self.join.reads_both and self.own_embedding and not self.share_head
        if self.hidden_size != self.target.hidden_size and not alone:
            raise LoadError(
                "a head of another width than the target's needs embedding and LM head of its own"
            )
        self.decoder()

    @property
    def join(self) -> Kind:
        return KINDS[self.kind]

    @property
    def reduced(self) -> bool:
        """Does it know some ids of the target's vocabulary alone?"""
        return self.draft_vocab_size != self.target.vocab_size

    def decoder(self) -> ModelConfig:
        """Its layers, as those of a model."""
        return ModelConfig(
            architecture=self.kind,
            vocab_size=self.draft_vocab_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            norm_eps=self.rms_norm_eps,
            rope_theta=self.rope_theta,
            rope_scaling=self.rope_scaling,
            qkv_bias=self.qkv_bias,
            o_bias=self.o_bias,
            mlp_bias=self.mlp_bias,
            qk_norm=self.qk_norm,
            windows=(self.window,) * self.num_layers,
        )

    def kv_layout(self, dtype: torch.dtype) -> KVLayout:
        """Return the storage of K and V that this draft head needs."""
        return KVLayout(self.num_layers, self.num_kv_heads, self.head_dim, dtype)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of everything that its file holds; see `head_formats` for other people's names."""
        hidden, kv = self.hidden_size, self.num_kv_heads * self.head_dim
        q, inner, wide = self.num_heads * self.head_dim, self.intermediate_size, self.target.hidden_size
        shapes: dict[str, tuple[int, ...]] = {}
        if self.own_embedding:
            shapes["embed_tokens.weight"] = (self.target.vocab_size, hidden)
        join, fuse = self.join, f"{self.join.fuses}.weight"
        if join.reads_both:
            count = len(self.aux_layers)
            if self.feature_norm == "whole":
                shapes["feature_norm.weight"] = (count * wide,)
            if self.feature_norm == "each":
                shapes |= {f"feature_norm.{i}.weight": (wide,) for i in range(count)}
            shapes[fuse] = (hidden, count * wide)
        else:
            if join.norms_both:
                shapes |= {"enorm.weight": (hidden,), "hnorm.weight": (hidden,)}
            shapes[fuse] = (hidden, 2 * hidden)
            if self.fc_bias:
                shapes[f"{join.fuses}.bias"] = (hidden,)
        for index in range(self.num_layers):
            at, first = f"layers.{index}.", index == 0
            reads = 2 * hidden if first and join.reads_both else hidden
            if first and join.reads_both:
                shapes[at + "hidden_norm.weight"] = (hidden,)
            if not first or self.input_norm:
                shapes[at + "input_layernorm.weight"] = (hidden,)
            biases = self.qkv_bias, self.o_bias, self.mlp_bias
            shapes |= linear_shapes(at, hidden, reads, q, kv, inner, biases)
            if self.qk_norm:
                shapes |= {f"{at}self_attn.{x}_norm.weight": (self.head_dim,) for x in "qk"}
            shapes[at + "post_attention_layernorm.weight"] = (hidden,)
        if self.final_norm:
            shapes["norm.weight"] = (hidden,)
        if not self.share_head:
            shapes["lm_head.weight"] = (self.draft_vocab_size, hidden)
        if self.reduced:
            shapes["d2t"] = (self.draft_vocab_size,)
        return shapes

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> HeadConfig:
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(raw) - known):
            raise LoadError(f"a head's config has no {', '.join(unknown)}")
        values = dict(raw)
        try:
            values["aux_layers"] = tuple(values.get("aux_layers", ()))
            scaling = dict(values.get("rope_scaling", {}))
            scaling["factors"] = tuple(scaling.get("factors", ()))
            values["rope_scaling"] = RopeScaling(**scaling)
            values["target"] = Target(**values["target"])
            return cls(**values)
        except (TypeError, KeyError) as error:
            raise LoadError(f"not a head's config: {error}") from error


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """The same for one model in every dtype and quantisation: its norms, which nobody quantises, as bf16.

    Where they say nothing, all ones as in an untrained model, the embedding speaks too.
    """
    norms = {name: tensors[name] for name in sorted(tensors) if name.endswith("norm.weight")}
    if all(bool((norm == 1).all()) for norm in norms.values()):
        norms["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:64]
    known = hashlib.sha256()
    for name, norm in norms.items():
        known.update(name.encode() + str(tuple(norm.shape)).encode())
        known.update(norm.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes())
    return known.hexdigest()[:32]
