"""Draft head configuration: kind, sizes, tensor names, and the identity of its target model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from draftproof.errors import LoadError
from draftproof.models.config import ModelConfig, RopeScaling
from draftproof.models.expected_tensors import linear_shapes
from draftproof.models.registry import expected_tensors, kv_layout
from draftproof.ops import KVLayout

FEATURES = ("aux", "last", "last_normed")
FEATURE_NORMS = ("none", "whole", "each")
# Fields that a ModelConfig has under the same names.
LAYER_SIZES = ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "rope_theta", "rope_scaling")
LAYER_FLAGS = ("qkv_bias", "o_bias", "mlp_bias", "qk_norm")
_NOT_STORED = ("native", "chain_length")  # of MTP layers in the checkpoint of their model
_LAYER_FIELDS = ("intermediate_size", "num_layers", *LAYER_FLAGS, *LAYER_SIZES)


@dataclass(frozen=True, slots=True)
class HeadKind:
    """How a kind of draft head combines the target's feature row and the token's embedding row."""

    attends_to_pair: bool  # the first attention reads both rows side by side; else they are projected
    norms_inputs: bool  # both rows are normed before they are combined
    projection: str  # name of the weight that projects several rows to one


KINDS = {
    "eagle3": HeadKind(attends_to_pair=True, norms_inputs=True, projection="fc"),
    "eagle": HeadKind(attends_to_pair=False, norms_inputs=False, projection="fc"),
    "mtp": HeadKind(attends_to_pair=False, norms_inputs=True, projection="eh_proj"),
}


@dataclass(frozen=True, slots=True)
class TargetIdentity:
    """Identity of the model that a draft head was trained for."""

    model_type: str  # Hugging Face class name; "": unknown
    hidden_size: int
    vocab_size: int
    num_layers: int  # 0: unknown
    digest: str  # of the weights, see `weights_digest`; "": unknown

    @classmethod
    def from_weights(cls, config: ModelConfig, tensors: Mapping[str, Tensor]) -> TargetIdentity:
        """Compute the identity of a model from its configuration and float tensors."""
        sizes = config.hidden_size, config.vocab_size, config.num_layers
        return cls(config.architecture, *sizes, digest=weights_digest(tensors))

    def check(self, found: TargetIdentity, where: str) -> None:
        """Raise LoadError with the reasons if `found` is another model."""
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
                "this one, or train one with `draftproof train`"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftHeadConfig:
    """Draft head: a small decoder over the target's rows and the next token's embedding.

    The row at position p reads the feature of the target's row p and the embedding of token p + 1, has rope
    position p, and predicts token p + 2. Its output before the final norm is the feature of the next round.

    The first attention of "eagle3" reads the normed embedding and the normed feature side by side. "eagle"
    and "mtp" project the concatenated rows to one row; "mtp" norms them first.
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
    share_lm_head: bool = True  # use rows d2t of the target's LM head
    target: TargetIdentity
    # Differences between public formats:
    own_embedding: bool = False  # False: the target's embedding
    feature_norm: str = "none"  # of the concatenated aux rows, before fc; one of FEATURE_NORMS
    norm_before_residual: bool = False  # eagle3: the residual around the attention is the normed feature
    norm_output: bool = False  # the feature of the next round is taken after the final norm
    input_norm: bool = True  # eagle: the first layer has an input norm
    final_norm: bool = True  # a norm before the LM head
    fc_bias: bool = False  # eagle
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    window: int = 0  # attention window; 0: full attention
    is_hidden_first: bool = False  # mtp: the feature precedes the embedding in the projected row
    # The target and an MTP layer as a further layer, where it is in its checkpoint; not stored.
    native: ModelConfig | None = None
    chain_length: int = 1  # mtp: layers of the checkpoint, one for each draft; the last one makes the rest

    def __post_init__(self) -> None:
        for what, value, known in (
            ("kind", self.kind, tuple(KINDS)),
            ("feature", self.feature, FEATURES),
            ("feature_norm", self.feature_norm, FEATURE_NORMS),
        ):
            if value not in known:
                raise LoadError(f"unknown {what} of a draft head {value!r}; known: {', '.join(known)}")
        if (self.feature == "aux") != bool(self.aux_layers):
            raise LoadError("aux_layers must be set for feature 'aux' and for no other")
        if self.join.attends_to_pair != (self.feature == "aux"):
            raise LoadError(f"a draft head of kind {self.kind!r} cannot have the feature {self.feature!r}")
        layers = self.target.num_layers
        if any(not 0 <= layer < (layers or layer + 1) for layer in self.aux_layers):
            raise LoadError(f"aux_layers {list(self.aux_layers)}: the target has layers 0..{layers - 1}")
        if not 0 < self.draft_vocab_size <= self.target.vocab_size:
            raise LoadError(f"a draft vocabulary of {self.draft_vocab_size} ids of {self.target.vocab_size}")
        is_independent = self.join.attends_to_pair and self.own_embedding and not self.share_lm_head
        if self.hidden_size != self.target.hidden_size and not is_independent:
            raise LoadError(
                "a draft head whose hidden size differs from the target's needs its own embedding and LM head"
            )
        self.decoder()

    @property
    def join(self) -> HeadKind:
        """Return how the kind combines its two input rows."""
        return KINDS[self.kind]

    @property
    def has_reduced_vocab(self) -> bool:
        """Return whether the draft vocabulary is a part of the target's."""
        return self.draft_vocab_size != self.target.vocab_size

    def decoder(self) -> ModelConfig:
        """Return the layers as a model configuration; they are its last `num_layers` layers."""
        if self.native is not None:
            return self.native
        return ModelConfig(
            architecture=self.kind,
            vocab_size=self.draft_vocab_size,
            norm_eps=self.rms_norm_eps,
            windows=(self.window,) * self.num_layers,
            **{name: getattr(self, name) for name in _LAYER_FIELDS},
        )

    def kv_layout(self, dtype: torch.dtype) -> KVLayout:
        """Return the storage of K and V that this draft head needs."""
        if self.native is not None:
            return replace(kv_layout(self.native, dtype), num_layers=self.num_layers * self.chain_length)
        return KVLayout(self.num_layers, self.num_kv_heads, self.head_dim, dtype)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of every stored tensor; `formats` renames those of public formats.

        Names of the further layers of a chain begin with `chain_prefix`.
        """
        shapes = self._own_tensors()
        chained = range(1, self.chain_length)
        return shapes | {chain_prefix(i) + name: shape for i in chained for name, shape in shapes.items()}

    def _own_tensors(self) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of the tensors of one layer of a chain, or of a whole head."""
        hidden, wide = self.hidden_size, self.target.hidden_size
        shapes: dict[str, tuple[int, ...]] = {}
        if self.own_embedding:
            shapes["embed_tokens.weight"] = (self.target.vocab_size, hidden)
        join, fuse = self.join, f"{self.join.projection}.weight"
        if join.attends_to_pair:
            count = len(self.aux_layers)
            if self.feature_norm == "whole":
                shapes["feature_norm.weight"] = (count * wide,)
            if self.feature_norm == "each":
                shapes |= {f"feature_norm.{i}.weight": (wide,) for i in range(count)}
            shapes[fuse] = (hidden, count * wide)
        else:
            if join.norms_inputs:
                shapes |= {"enorm.weight": (hidden,), "hnorm.weight": (hidden,)}
            shapes[fuse] = (hidden, 2 * hidden)
            if self.fc_bias:
                shapes[f"{join.projection}.bias"] = (hidden,)
        shapes |= self._layers() if self.native is None else _last_layer(self.native)
        if self.final_norm:
            shapes["norm.weight"] = (hidden,)
        if not self.share_lm_head:
            shapes["lm_head.weight"] = (self.draft_vocab_size, hidden)
        if self.has_reduced_vocab:
            shapes["d2t"] = (self.draft_vocab_size,)
        return shapes

    def _layers(self) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of the tensors of the decoder layers."""
        hidden, decoder, pairs = self.hidden_size, self.decoder(), self.join.attends_to_pair
        shapes: dict[str, tuple[int, ...]] = {}
        for index in range(self.num_layers):
            at, first = f"layers.{index}.", index == 0
            if first and pairs:
                shapes[at + "hidden_norm.weight"] = (hidden,)
            if not first or self.input_norm:
                shapes[at + "input_layernorm.weight"] = (hidden,)
            shapes |= linear_shapes(at, decoder, 2 * hidden if first and pairs else hidden)
            if self.qk_norm:
                shapes |= {f"{at}self_attn.{x}_norm.weight": (self.head_dim,) for x in "qk"}
            shapes[at + "post_attention_layernorm.weight"] = (hidden,)
        return shapes

    def to_json(self) -> dict[str, Any]:
        """Return the contents of a config.json."""
        assert self.native is None
        return {key: value for key, value in asdict(self).items() if key not in _NOT_STORED}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> DraftHeadConfig:
        """Parse the contents of a config.json that `to_json` returned."""
        known = {field.name for field in fields(cls)} - set(_NOT_STORED)
        if unknown := sorted(set(raw) - known):
            raise LoadError(f"unknown keys in the config of a draft head: {', '.join(unknown)}")
        values = dict(raw)
        try:
            values["aux_layers"] = tuple(values.get("aux_layers", ()))
            scaling = dict(values.get("rope_scaling", {}))
            for name in ("factors", "long_factors"):
                scaling[name] = tuple(scaling.get(name, ()))
            values["rope_scaling"] = RopeScaling(**scaling)
            values["target"] = TargetIdentity(**values["target"])
            return cls(**values)
        except (TypeError, KeyError) as error:
            raise LoadError(f"not the config of a draft head: {error}") from error


def chain_prefix(index: int) -> str:
    """Return the beginning of the names of layer `index` of a chain; "" for the first one."""
    return f"chain.{index}." if index else ""


def _last_layer(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors of a model's last layer, as layer 0."""
    prefix, shapes = f"model.layers.{model.num_layers - 1}.", expected_tensors(model)
    return {"layers.0." + n.removeprefix(prefix): shapes[n] for n in shapes if n.startswith(prefix)}


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of the norms as bf16, equal for every dtype and quantisation of a model."""
    norms = {name: tensors[name] for name in sorted(tensors) if name.endswith("norm.weight")}
    if all(bool((norm == 1).all()) for norm in norms.values()):  # an untrained model
        norms["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:64]
    digest = hashlib.sha256()
    for name, norm in norms.items():
        digest.update(name.encode() + str(tuple(norm.shape)).encode())
        values = norm.detach().to("cpu", torch.bfloat16).contiguous()
        digest.update(values.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:32]
