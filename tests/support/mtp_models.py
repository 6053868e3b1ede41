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


def mtp_tensors(
    arch: str, form: str, dtype: torch.dtype = torch.float32, seed: int = 5, layers: int = 1
) -> dict[str, Tensor]:
    """Return random tensors of MTP layers under the names of a checkpoint."""
    config, names = tiny.model_config(arch), MTP_FORMS[form]
    hidden, first, generator = config.hidden_size, config.num_layers, torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {}
    layer = f"model.layers.{first}."
    for i in range(layers):
        for ours, stored in names.names(i, first).items():
            if ours not in ("lm_head", "embed_tokens"):
                shapes[f"{stored}.weight"] = (hidden, 2 * hidden) if ours == "eh_proj" else (hidden,)
        for name, shape in expected_tensors(config.with_next_layers(1)).items():
            if name.startswith(layer):
                shapes[names.prefix(i, first) + name.removeprefix(layer)] = shape
    return {name: random_tensor(name, shape, generator, dtype) for name, shape in shapes.items()}


def write_model(
    folder: Path, arch: str, form: str, dtype: str = "float32", layers: int = 1, **config: Any
) -> dict[str, Tensor]:
    """Write a tiny model with MTP layers; return the tensors of the layers."""
    made = tiny.checkpoint(arch, dtype)
    heads.write_model(folder, made.config, made.tensors)
    path, weights = folder / "config.json", folder / "model.safetensors"
    raw = json.loads(path.read_text()) | {"num_nextn_predict_layers": layers} | config
    path.write_text(json.dumps(raw))
    tensors = mtp_tensors(arch, form, getattr(torch, dtype), layers=layers)
    stored = {**load_file(weights), **tensors}
    # A norm of ones would hide whether a row was normed once or twice.
    generator, norm = torch.Generator().manual_seed(6), "model.norm.weight"
    stored[norm] = random_tensor(norm, tuple(stored[norm].shape), generator, stored[norm].dtype)
    save_file(stored, weights)
    return tensors


@cache
def model(form: str, dtype: str = "float32", layers: int = 1) -> str:
    """Return the folder of a tiny model with MTP layers of this form."""
    folder = heads.folder(f"mtp-{form}-{dtype}-{layers}")
    write_model(folder, FORM_ARCHITECTURES[form], form, dtype, layers)
    return str(folder)


# --- a plain reading of the definitions, with the decoder layers of transformers ---


@dataclass(frozen=True)
class Definition:
    """Published definition of an MTP layer, without any of this project's tables."""

    names: dict[str, str]  # part -> tensor name; `{i}`: index of the MTP layer; `{layer}`: of all layers
    layer: str
    combine: Callable[[Tensor, Tensor], Tensor]  # normed embedding, normed hidden -> both side by side
    reads_normed_hidden: bool  # the hidden row of the model after its last norm
    returns_normed_hidden: bool  # the hidden row of the next draft after the norm before the LM head

    def name(self, part: str, index: int) -> str:
        """Return the tensor name of a part of an MTP layer; the model of the test has two layers."""
        return (self.layer if part == "layer" else self.names[part]).format(i=index, layer=2 + index)


def _embedding_first(token: Tensor, hidden: Tensor) -> Tensor:
    return torch.cat([token, hidden], dim=-1)


def _hidden_first(token: Tensor, hidden: Tensor) -> Tensor:
    return torch.cat([hidden, token], dim=-1)


DEFINITIONS = {
    # h' = M [RMSNorm(embedding); RMSNorm(h)], h = TRM(h'), logits = shared_head(h) with a norm of its own
    "deepseek": Definition(
        {
            "token_norm": "model.layers.{layer}.enorm.weight",
            "hidden_norm": "model.layers.{layer}.hnorm.weight",
            "projection": "model.layers.{layer}.eh_proj.weight",
            "norm": "model.layers.{layer}.shared_head.norm.weight",
        },
        "model.layers.{layer}.",
        _embedding_first,
        reads_normed_hidden=True,
        returns_normed_hidden=False,
    ),
    # mtp_hidden_norm reads the rows before `norm`, which follows the last layer and the MTP layer alike
    "ernie4_5": Definition(
        {
            "token_norm": "model.mtp_emb_norm.{i}.weight",
            "hidden_norm": "model.mtp_hidden_norm.{i}.weight",
            "projection": "model.mtp_linear_proj.{i}.weight",
            "norm": "model.norm.weight",
        },
        "model.mtp_block.{i}.",
        _embedding_first,
        reads_normed_hidden=False,
        returns_normed_hidden=False,
    ),
    # input_proj(cat(hidden, embedding)); the model's norm belongs to its LM head
    "mimo": Definition(
        {
            "token_norm": "model.mtp_layers.{i}.token_layernorm.weight",
            "hidden_norm": "model.mtp_layers.{i}.hidden_layernorm.weight",
            "projection": "model.mtp_layers.{i}.input_proj.weight",
            "norm": "model.mtp_layers.{i}.final_layernorm.weight",
        },
        "model.mtp_layers.{i}.",
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
        "mtp.layers.{i}.",
        _embedding_first,
        reads_normed_hidden=True,
        returns_normed_hidden=True,
    ),
}


class PlainMtp:
    """Drafts of a model folder, every row computed anew for every draft.

    Row p of module k has the row p of module k - 1 and the token at p + k + 1. Behind the last module, its
    own rows take the place of those of the module before.
    """

    def __init__(self, folder: str, form: str, model: Any = None, layers: int = 1) -> None:
        """Read a folder. `model`: of transformers, whose last layers are the layers of the modules."""
        self.definition, self.num_modules = DEFINITIONS[form], layers
        self.tensors = load_file(Path(folder) / "model.safetensors")
        self.model = self._read(folder) if model is None else model
        self.eps = self.model.config.rms_norm_eps

    def _read(self, folder: str) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder)
        first = config.num_hidden_layers
        config.num_hidden_layers += self.num_modules
        config.layer_types = ["full_attention"] * config.num_hidden_layers
        renamed = dict(self.tensors)
        for i in range(self.num_modules):
            names = {self.definition.name(part, i) for part in self.definition.names}
            renamed = {n: t for n, t in renamed.items() if n not in names - {"model.norm.weight"}}
            at, layer = self.definition.name("layer", i), f"model.layers.{first + i}."
            renamed = {layer + n.removeprefix(at) if n.startswith(at) else n: t for n, t in renamed.items()}
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
        missing, unexpected = model.load_state_dict(renamed, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}
        model.tie_weights()
        return model

    def norm(self, rows: Tensor, part: str, module: int) -> Tensor:
        weight = self.tensors[self.definition.name(part, module)]
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
        definition, model, count = self.definition, self.model.model, self.num_modules
        embedded = model.embed_tokens(torch.tensor(tokens + drafts))
        hidden = self.layers(embedded[: len(tokens) - 1], model.layers[:-count])
        features = model.norm(hidden) if definition.reads_normed_hidden else hidden
        made = []
        for j in range(len(drafts)):
            k = min(j, count - 1)
            token = self.norm(embedded[k + 1 : len(tokens) + j], "token_norm", k)
            pair = definition.combine(token, self.norm(features, "hidden_norm", k))
            projected = F.linear(pair, self.tensors[definition.name("projection", k)])
            rows = self.layers(projected, [model.layers[k - count]])
            made.append(self.model.lm_head(self.norm(rows[-1:], "norm", k))[0])
            own = self.norm(rows, "norm", k) if definition.returns_normed_hidden else rows
            features = own if j + 1 < count else torch.cat([features, own[-1:]])
        return torch.stack(made)


@cache
def plain_reading(form: str, layers: int = 1) -> PlainMtp:
    """Return the plain reading of the tiny model with MTP layers of this form."""
    return PlainMtp(model(form, layers=layers), form, layers=layers)


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


def save_family(folder: Path, family: str, layers: int) -> Any:
    """Save a random model of transformers whose last layers become MTP layers; return the model."""
    import transformers

    form, sizes = FAMILIES[family]
    common = {"vocab_size": tiny.VOCAB, "hidden_size": 48, "intermediate_size": 80}
    common |= {"num_hidden_layers": 2 + layers}
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
    moved, definition = load_file(path), DEFINITIONS[form]
    for i in range(layers):
        at, prefix = f"model.layers.{2 + i}.", definition.name("layer", i)
        moved = {prefix + n.removeprefix(at) if n.startswith(at) else n: t for n, t in moved.items()}
        for part in definition.names:
            shape = (48, 96) if part == "projection" else (48,)
            if (name := definition.name(part, i)) not in moved:
                moved[name] = random_tensor(part, shape, generator, torch.float32)
    save_file(moved, path)
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"num_hidden_layers": 2, "num_nextn_predict_layers": layers}
    raw.pop("layer_types", None)
    raw.pop("mlp_layer_types", None)
    (folder / "config.json").write_text(json.dumps(raw))
    return model
