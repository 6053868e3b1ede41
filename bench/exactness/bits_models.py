"""Tiny models and draft heads of `bits_between_commits.py`.

Their random weights are the same on every machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

TINY_VOCAB = 131
MERGED_PIECES = ("ab", "ba", "ree", '":', '{"', '"}', "true", "th", "he", "in", "er", "an", " a", " t", ", ")
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True},
}
TINY_CONFIG: dict[str, Any] = {
    "vocab_size": TINY_VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}


def random_tensor(name: str, shape: Sequence[int], exponent: int) -> Tensor:
    """Return integers in -128..127 times 2**exponent: exact in bf16 and the same on every machine."""
    data = bytearray(hashlib.shake_256(name.encode()).digest(prod(shape)))
    return torch.frombuffer(data, dtype=torch.int8).view(*shape).float() * 2.0**exponent


def norm_tensor(name: str, size: int) -> Tensor:
    """Return norm weights in 15/16 to 17/16, exact in bf16."""
    return 1 + torch.floor(random_tensor(name, (size,), -4)) / 128


def layer_tensors(seed: str, prefix: str, has_qk_norm: bool, num_inputs: int = 64) -> dict[str, Tensor]:
    """Return one decoder layer whose attention reads `num_inputs` columns.

    Without tied embeddings a layer adds little to the token's own embedding: text then repeats, and drafts
    are accepted. With tied ones it adds more, since the model would only repeat its last token.
    """
    exponent = -10 if has_qk_norm else -12
    shapes = {
        "self_attn.q_proj": (64, num_inputs),
        "self_attn.k_proj": (32, num_inputs),
        "self_attn.v_proj": (32, num_inputs),
        "self_attn.o_proj": (64, 64),
        "mlp.gate_proj": (96, 64),
        "mlp.up_proj": (96, 64),
        "mlp.down_proj": (64, 96),
    }
    found = {
        f"{prefix}{name}.weight": random_tensor(f"{seed}.{name}", shape, exponent if shape[0] == 64 else -9)
        for name, shape in shapes.items()
    }
    for name in ("input_layernorm", "post_attention_layernorm"):
        found[f"{prefix}{name}.weight"] = norm_tensor(f"{seed}.{name}", 64)
    if has_qk_norm:
        for name in ("q_norm", "k_norm"):
            found[f"{prefix}self_attn.{name}.weight"] = norm_tensor(f"{seed}.{name}", 16)
    return found


def model_tensors(family: str, noise: int = 0) -> dict[str, Tensor]:
    """Return a tiny model; with `noise`, a slightly different one that serves as its draft model."""
    tensors = {"model.embed_tokens.weight": random_tensor(f"{family}.embed", (TINY_VOCAB, 64), -8)}
    for layer in range(2):
        tensors |= layer_tensors(f"{family}.{layer}", f"model.layers.{layer}.", family == "qwen3")
    tensors["model.norm.weight"] = norm_tensor(f"{family}.norm", 64)
    if family != "qwen3":
        tensors["lm_head.weight"] = random_tensor(f"{family}.head", (TINY_VOCAB, 64), -8)
    if noise:
        for name in [name for name in tensors if "_proj" in name]:
            tensors[name] += random_tensor(f"{name}.noise", tensors[name].shape, -13)
    return tensors


def head_tensors(kind: str, family: str) -> dict[str, Tensor]:
    """Return a draft head in a public format that copies the target's first layer, so some drafts match."""
    target, qk_norm = model_tensors(family), family == "qwen3"
    eye, zero = torch.eye(64), torch.zeros(64, 64)
    if kind == "eagle3":
        ids = torch.arange(0, 122, 2) + torch.arange(61) % 2  # 61 of the target's token ids
        tensors = layer_tensors(f"{family}.eagle3", "midlayer.", qk_norm, 128)
        tensors["midlayer.hidden_norm.weight"] = norm_tensor("eagle3.hidden", 64)
        tensors["fc.weight"] = torch.cat([eye / 2, eye], dim=1)
        head = target.get("lm_head.weight", target["model.embed_tokens.weight"])
        tensors |= {"d2t": ids - torch.arange(61), "lm_head.weight": head[ids]}
    else:
        first = {name: t for name, t in target.items() if name.startswith("model.layers.0.")}
        tensors = {name.removeprefix("model."): t.clone() for name, t in first.items()}
        name = "fc" if kind == "eagle" else "eh_proj"
        tensors[f"{name}.weight"] = torch.cat([eye, zero + random_tensor("join", (64, 64), -12)], dim=1)
        if kind == "mtp":
            tensors |= {name: norm_tensor(name, 64) for name in ("enorm.weight", "hnorm.weight")}
    tensors["norm.weight"] = target["model.norm.weight"].clone()
    return tensors


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer of the printable ASCII characters and a few longer pieces."""
    characters = [chr(288) if byte == 32 else chr(byte) for byte in range(32, 127)]
    vocab = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *characters])}
    merges = []
    for piece in MERGED_PIECES:
        piece = piece.replace(" ", chr(288))
        for end in range(2, len(piece) + 1):
            if piece[:end] not in vocab:
                vocab[piece[:end]] = len(vocab)
                merges.append(f"{piece[: end - 1]} {piece[end - 1]}")
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = [{"id": i, "content": text, **flags} for i, text in enumerate(["<pad>", "<s>", "</s>"])]
    document = {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }
    (folder / "tokenizer.json").write_text(json.dumps(document))


class TinyModels:
    """Folder that holds the tiny models and heads, each written when it is first used."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, name: str, family: str, tensors: Mapping[str, Tensor], **config: Any) -> str:
        """Write a model or head, and return its folder."""
        made = self.root / f"{family}-{name}"
        if not made.exists():
            made.mkdir(parents=True)
            raw = {**TINY_CONFIG, **FAMILIES[family], **config}
            (made / "config.json").write_text(json.dumps(raw))
            save_file(
                {key: tensor.contiguous() for key, tensor in tensors.items()}, made / "model.safetensors"
            )
            write_tokenizer(made)
        return str(made)

    def target(self, family: str) -> str:
        """Return the folder of the target model."""
        return self.folder("target", family, model_tensors(family))

    def speculation(self, method: str, family: str) -> dict[str, Any]:
        """Return the options of one proposer, the folder of its model included."""
        if method == "draft_model":
            return {"method": method, "model": self.folder("draft", family, model_tensors(family, noise=1))}
        if method == "hybrid":
            members = [self.speculation(name, family) for name in ("suffix", "mtp", "ngram")]
            return {"method": method, "proposers": members}
        if method in ("mtp", "eagle", "eagle3"):
            more = (
                {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}} if method == "eagle3" else {}
            )
            tensors = head_tensors(method, family)
            return {"method": method, "model": self.folder(method, family, tensors, **more)}
        return {"method": method}
