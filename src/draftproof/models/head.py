"""A draft head: its description, and the model it belongs to."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from draftproof.errors import LoadError
from draftproof.models.config import ModelConfig, RopeScaling

KINDS = ("eagle3", "eagle", "mtp")
FEATURES = ("aux", "last", "last_normed")


@dataclass(frozen=True, slots=True)
class Target:
    """The model that a head was trained for."""

    model_type: str  # Hugging Face class name
    hidden_size: int
    vocab_size: int
    num_layers: int
    digest: str  # of its weights: `weights_digest`

    @classmethod
    def of(cls, config: ModelConfig, tensors: Mapping[str, Tensor]) -> Target:
        sizes = config.hidden_size, config.vocab_size, config.num_layers
        return cls(config.architecture, *sizes, weights_digest(tensors))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """One head: a small decoder over the target's rows and the next token's embedding.

    The row at position p takes the feature of the target's row p and the embedding of token p + 1, has rope
    position p, and predicts token p + 2. Its output, before the norm, is the feature of its own next step.
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

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise LoadError(f"a head of kind {self.kind!r} is not known; known: {', '.join(KINDS)}")
        if self.feature not in FEATURES:
            raise LoadError(f"feature {self.feature!r} is not known; known: {', '.join(FEATURES)}")
        if (self.feature == "aux") != bool(self.aux_layers):
            raise LoadError("aux_layers belong to feature 'aux', and it needs them")
        if any(not 0 <= layer < self.target.num_layers for layer in self.aux_layers):
            raise LoadError(
                f"aux_layers {list(self.aux_layers)}: the target has layers 0..{self.target.num_layers - 1}"
            )

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
