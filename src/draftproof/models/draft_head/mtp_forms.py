"""MTP layers inside the checkpoint of their model: the public forms as data.

A form gives the names of the tensors and how the layer combines its two rows. The decoder layer inside has
the names and shapes of the model's own layers, numbered after the last one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# Keys of config.json that count MTP layers.
COUNT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "multi_token_pred_depth")


@dataclass(frozen=True, slots=True)
class MtpForm:
    """Names of the tensors of an MTP layer. `{i}`: its index; `{layer}`: the same, after the model's layers.

    The feature of the first draft is the target's row before or after its last norm. The feature of the next
    draft is the layer's own row, before or after the norm in front of the LM head.
    """

    layer: str  # prefix of the decoder layer
    token_norm: str  # norm of the next token's embedding
    hidden_norm: str  # norm of the feature
    projection: str  # of both rows, concatenated
    norm: str = ""  # before the LM head; "": the last norm of the model
    lm_head: str = ""  # "": that of the model
    embedding: str = ""  # "": that of the model
    is_hidden_first: bool = False  # order of the concatenation
    has_normed_feature: bool = True
    has_normed_output: bool = False

    def names(self, index: int, num_layers: int) -> dict[str, str]:
        """Return our name -> stored name of the tensors around the decoder layer, without `.weight`."""
        stored = {
            "enorm": self.token_norm,
            "hnorm": self.hidden_norm,
            "eh_proj": self.projection,
            "norm": self.norm,
            "lm_head": self.lm_head,
            "embed_tokens": self.embedding,
        }
        at = {"i": index, "layer": num_layers + index}
        return {ours: name.format(**at) for ours, name in stored.items() if name}

    def prefix(self, index: int, num_layers: int) -> str:
        """Return the prefix of the tensors of the decoder layer."""
        return self.layer.format(i=index, layer=num_layers + index)


MTP_FORMS = {
    # DeepSeek-V3 and GLM-4.5
    "deepseek": MtpForm(
        layer="model.layers.{layer}.",
        token_norm="model.layers.{layer}.enorm",
        hidden_norm="model.layers.{layer}.hnorm",
        projection="model.layers.{layer}.eh_proj",
        norm="model.layers.{layer}.shared_head.norm",
        lm_head="model.layers.{layer}.shared_head.head",
        embedding="model.layers.{layer}.embed_tokens",
    ),
    # The training code applies the norm of the model behind the last of all layers, MTP layers included.
    "ernie4_5": MtpForm(
        layer="model.mtp_block.{i}.",
        token_norm="model.mtp_emb_norm.{i}",
        hidden_norm="model.mtp_hidden_norm.{i}",
        projection="model.mtp_linear_proj.{i}",
        has_normed_feature=False,
    ),
    "mimo": MtpForm(
        layer="model.mtp_layers.{i}.",
        token_norm="model.mtp_layers.{i}.token_layernorm",
        hidden_norm="model.mtp_layers.{i}.hidden_layernorm",
        projection="model.mtp_layers.{i}.input_proj",
        norm="model.mtp_layers.{i}.final_layernorm",
        is_hidden_first=True,
        has_normed_feature=False,
        has_normed_output=True,
    ),
    "qwen3_next": MtpForm(
        layer="mtp.layers.{i}.",
        token_norm="mtp.pre_fc_norm_embedding",
        hidden_norm="mtp.pre_fc_norm_hidden",
        projection="mtp.fc",
        norm="mtp.norm",
        has_normed_output=True,
    ),
}


def declared_mtp_layers(raw: Mapping[str, Any]) -> int:
    """Return the number of MTP layers that config.json (`raw`) names; 0: none."""
    counts = [raw.get(key) for key in COUNT_KEYS]
    return max((count for count in counts if isinstance(count, int)), default=0)


def find_form(names: Iterable[str], num_layers: int) -> MtpForm | None:
    """Return the form whose projection is among the names of a checkpoint's MTP tensors."""
    found = set(names)
    for form in MTP_FORMS.values():
        module = form.names(0, num_layers)["eh_proj"]
        if any(name.startswith(f"{module}.") for name in found):
            return form
    return None


def count_layers(form: MtpForm, names: Iterable[str], num_layers: int) -> int:
    """Return the number of MTP layers among the names of a checkpoint's MTP tensors."""
    pattern = re.escape(form.layer).replace(r"\{i\}", r"(\d+)").replace(r"\{layer\}", r"(\d+)")
    return len({match[1] for match in map(re.compile(pattern).match, names) if match})
