"""Tiny models with an MTP layer in their checkpoint, and a plain reading of the published definitions."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

import heads
import tiny
from draftproof.models.draft_head.mtp_forms import MTP_FORMS
from draftproof.models.registry import expected_tensors

# form -> architecture of `tiny.ARCHITECTURES` that it is tested with
FORM_ARCHITECTURES = {"deepseek": "llama", "ernie4_5": "ernie4_5", "mimo": "qwen2", "qwen3_next": "qwen3"}


def random_tensor(
    name: str, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype
) -> Tensor:
    """Return a norm near 1, or a matrix large enough for drafts to depend on it."""
    values = torch.randn(shape, generator=generator)
    return (1 + 0.3 * values if "norm" in name else 0.2 * values).to(dtype)


def mtp_tensors(arch: str, form: str, dtype: torch.dtype = torch.float32, seed: int = 5) -> dict[str, Tensor]:
    """Return random tensors of an MTP layer under the names of a checkpoint."""
    config, names = tiny.model_config(arch), MTP_FORMS[form]
    hidden, first, generator = config.hidden_size, config.num_layers, torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {}
    for ours, stored in names.names(0, first).items():
        if ours not in ("lm_head", "embed_tokens"):
            shapes[f"{stored}.weight"] = (hidden, 2 * hidden) if ours == "eh_proj" else (hidden,)
    layer = f"model.layers.{first}."
    for name, shape in expected_tensors(config.with_next_layers(1)).items():
        if name.startswith(layer):
            shapes[names.prefix(0, first) + name.removeprefix(layer)] = shape
    return {name: random_tensor(name, shape, generator, dtype) for name, shape in shapes.items()}


def write_model(
    folder: Path, arch: str, form: str, dtype: str = "float32", **config: Any
) -> dict[str, Tensor]:
    """Write a tiny model with an MTP layer; return the tensors of the layer."""
    made = tiny.checkpoint(arch, dtype)
    heads.write_model(folder, made.config, made.tensors)
    path, weights = folder / "config.json", folder / "model.safetensors"
    raw = json.loads(path.read_text()) | {"num_nextn_predict_layers": 1} | config
    path.write_text(json.dumps(raw))
    tensors = mtp_tensors(arch, form, getattr(torch, dtype))
    stored = {**load_file(weights), **tensors}
    # A norm of ones would hide whether a row was normed once or twice.
    generator, norm = torch.Generator().manual_seed(6), "model.norm.weight"
    stored[norm] = random_tensor(norm, tuple(stored[norm].shape), generator, stored[norm].dtype)
    save_file(stored, weights)
    return tensors


@cache
def model(form: str, dtype: str = "float32") -> str:
    """Return the folder of a tiny model with an MTP layer of this form."""
    folder = heads.folder(f"mtp-{form}-{dtype}")
    write_model(folder, FORM_ARCHITECTURES[form], form, dtype)
    return str(folder)


# --- a plain reading of the definitions, with the decoder layers of transformers ---


@dataclass(frozen=True)
class Definition:
    """Published definition of an MTP layer, without any of this project's tables."""

    names: dict[str, str]  # part -> tensor name; the model of the test has two layers
    layer: str
    combine: Callable[[Tensor, Tensor], Tensor]  # normed embedding, normed hidden -> both side by side
    reads_normed_hidden: bool  # the hidden row of the model after its last norm
    returns_normed_hidden: bool  # the hidden row of the next draft after the norm before the LM head


def _embedding_first(token: Tensor, hidden: Tensor) -> Tensor:
    return torch.cat([token, hidden], dim=-1)


def _hidden_first(token: Tensor, hidden: Tensor) -> Tensor:
    return torch.cat([hidden, token], dim=-1)


DEFINITIONS = {
    # h' = M [RMSNorm(embedding); RMSNorm(h)], h = TRM(h'), logits = shared_head(h) with a norm of its own
    "deepseek": Definition(
        {
            "token_norm": "model.layers.2.enorm.weight",
            "hidden_norm": "model.layers.2.hnorm.weight",
            "projection": "model.layers.2.eh_proj.weight",
            "norm": "model.layers.2.shared_head.norm.weight",
        },
        "model.layers.2.",
        _embedding_first,
        reads_normed_hidden=True,
        returns_normed_hidden=False,
    ),
    # mtp_hidden_norm reads the rows before `norm`, which follows the last layer and the MTP layer alike
    "ernie4_5": Definition(
        {
            "token_norm": "model.mtp_emb_norm.0.weight",
            "hidden_norm": "model.mtp_hidden_norm.0.weight",
            "projection": "model.mtp_linear_proj.0.weight",
            "norm": "model.norm.weight",
        },
        "model.mtp_block.0.",
        _embedding_first,
        reads_normed_hidden=False,
        returns_normed_hidden=False,
    ),
    # input_proj(cat(hidden, embedding)); the model's norm belongs to its LM head
    "mimo": Definition(
        {
            "token_norm": "model.mtp_layers.0.token_layernorm.weight",
            "hidden_norm": "model.mtp_layers.0.hidden_layernorm.weight",
            "projection": "model.mtp_layers.0.input_proj.weight",
            "norm": "model.mtp_layers.0.final_layernorm.weight",
        },
        "model.mtp_layers.0.",
        _hidden_first,
        reads_normed_hidden=False,
        returns_normed_hidden=True,
    ),
    "qwen3_next": Definition(
        {
            "token_norm": "mtp.pre_fc_norm_embedding.weight",
            "hidden_norm": "mtp.pre_fc_norm_hidden.weight",
            "projection": "mtp.fc.weight",
            "norm": "mtp.norm.weight",
        },
        "mtp.layers.0.",
        _embedding_first,
        reads_normed_hidden=True,
        returns_normed_hidden=True,
    ),
}


class PlainMtp:
    """Drafts of a model folder, every row computed anew for every draft."""

    def __init__(self, folder: str, form: str, model: Any = None) -> None:
        """Read a folder. `model`: of transformers, whose last layer is the decoder layer of the MTP layer."""
        self.definition = DEFINITIONS[form]
        self.tensors = load_file(Path(folder) / "model.safetensors")
        self.model = self._read(folder) if model is None else model
        self.eps = self.model.config.rms_norm_eps

    def _read(self, folder: str) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder)
        config.num_hidden_layers += 1
        config.layer_types = ["full_attention"] * config.num_hidden_layers
        at, last = self.definition.layer, f"model.layers.{config.num_hidden_layers - 1}."
        around = set(self.definition.names.values()) - {"model.norm.weight"}
        renamed = {
            last + name.removeprefix(at) if name.startswith(at) else name: tensor
            for name, tensor in self.tensors.items()
            if name not in around
        }
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
        missing, unexpected = model.load_state_dict(renamed, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}
        model.tie_weights()
        return model

    def norm(self, rows: Tensor, name: str) -> Tensor:
        weight = self.tensors[self.definition.names[name]]
        return F.rms_norm(rows, weight.shape, weight, self.eps)

    def layers(self, rows: Tensor, layers: Any) -> Tensor:
        """Run decoder layers over rows [T, hidden] at positions 0 to T - 1."""
        at = torch.arange(len(rows))[None]
        mask = torch.full((len(rows), len(rows)), -torch.inf).triu(1)[None, None]
        x = rows[None]
        rope = self.model.model.rotary_emb(x, at)
        for layer in layers:
            found = layer(x, attention_mask=mask, position_ids=at, position_embeddings=rope)
            x = found[0] if isinstance(found, tuple) else found
        return x[0]

    @torch.no_grad()
    def logits(self, tokens: list[int], drafts: list[int]) -> Tensor:
        """Return the draft logits [len(drafts), V] behind committed tokens, given the drafts made."""
        definition, model = self.definition, self.model.model
        embedded = model.embed_tokens(torch.tensor(tokens + drafts))
        hidden = self.layers(embedded[: len(tokens) - 1], model.layers[:-1])
        features = model.norm(hidden) if definition.reads_normed_hidden else hidden
        made = []
        for j in range(len(drafts)):
            token = self.norm(embedded[1 : len(tokens) + j], "token_norm")
            pair = definition.combine(token, self.norm(features, "hidden_norm"))
            projected = F.linear(pair, self.tensors[definition.names["projection"]])
            row = self.layers(projected, model.layers[-1:])[-1:]
            made.append(self.model.lm_head(self.norm(row, "norm"))[0])
            own = self.norm(row, "norm") if definition.returns_normed_hidden else row
            features = torch.cat([features, own])
        return torch.stack(made)


@cache
def plain_reading(form: str) -> PlainMtp:
    """Return the plain reading of the tiny model with an MTP layer of this form."""
    return PlainMtp(model(form), form)


# --- mixtures of experts and latent attention inside an MTP layer ---

_EXPERTS = {"moe_intermediate_size": 20, "num_experts_per_tok": 3}
_GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, **_EXPERTS}
_LATENT = {"q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8}
# class of transformers -> form and sizes
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepseekV3": ("deepseek", {**_GROUPS, **_LATENT, "v_head_dim": 14, "num_key_value_heads": 4}),
    "Glm4Moe": ("deepseek", {**_GROUPS, "n_group": 1, "topk_group": 1, "head_dim": 16, "use_qk_norm": True}),
    "Ernie4_5_Moe": (
        "ernie4_5",
        {"moe_num_experts": 8, "moe_k": 3, "moe_layer_start_index": 1, "moe_intermediate_size": 20},
    ),
    "Qwen3Moe": ("qwen3_next", {"num_experts": 8, "head_dim": 16, **_EXPERTS}),
}


def save_family(folder: Path, family: str) -> Any:
    """Save a random model of transformers whose last layer becomes an MTP layer; return the model."""
    import transformers

    form, sizes = FAMILIES[family]
    common = {"vocab_size": tiny.VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3}
    common |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    common |= {"initializer_range": 0.3, "attn_implementation": "eager", "pad_token_id": 0, "eos_token_id": 2}
    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(**{**common, **sizes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name or "bias" in name:
                value.copy_(torch.randn_like(value) * 0.3 + float("norm" in name))
    model.save_pretrained(folder)
    path, generator = folder / "model.safetensors", torch.Generator().manual_seed(5)
    stored, last, prefix = load_file(path), "model.layers.2.", DEFINITIONS[form].layer
    moved = {prefix + n.removeprefix(last) if n.startswith(last) else n: t for n, t in stored.items()}
    for part, name in DEFINITIONS[form].names.items():
        shape = (48, 96) if part == "projection" else (48,)
        if name not in moved:
            moved[name] = random_tensor(part, shape, generator, torch.float32)
    save_file(moved, path)
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    raw.pop("layer_types", None)
    raw.pop("mlp_layer_types", None)
    (folder / "config.json").write_text(json.dumps(raw))
    return model
