"""Tensors that GGUF files hold in another layout than checkpoints: fused rows, split latent projections."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from draftproof.models.config import ModelConfig
from draftproof.models.gguf.file import GGUFFile, TensorInfo, dequantize, num_bytes

_FUSED_ROWS = re.compile(r"(blk\.\d+\.)(attn_qkv|ffn_up)\.(weight|bias)")
_FUSES_GATE = ("phi3", "glm4")  # `ffn_up` holds the rows of gate, then those of up
_KEY_UP, _VALUE_UP, _BOTH_UP = "k_b_proj.weight", "v_b_proj.weight", "kv_b_proj.weight"


@dataclass(frozen=True, slots=True)
class LatentUp:
    """`kv_b_proj` of latent attention as llama.cpp stores it: keys transposed, and values, head by head."""

    key: TensorInfo  # [heads, kv_rank, nope_dim]
    value: TensorInfo  # [heads, value_dim, kv_rank]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of `kv_b_proj`."""
        heads, rank, nope_dim = self.key.shape
        return heads * (nope_dim + self.value.shape[1]), rank


def read_tensor(raw: np.ndarray[Any, Any], stored: TensorInfo | LatentUp) -> np.ndarray[Any, Any]:
    """Return an fp32 array from the bytes of the whole file, `raw` [file size] uint8."""
    if isinstance(stored, TensorInfo):
        return dequantize(raw, stored)
    key, value = dequantize(raw, stored.key), dequantize(raw, stored.value)
    return np.concatenate([key.swapaxes(1, 2), value], axis=1).reshape(stored.shape)


def split_fused_rows(file: GGUFFile, config: ModelConfig) -> dict[str, TensorInfo]:
    """Return the tensors of a file, with those of fused projections split by output rows."""
    heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
    parts = {"attn_qkv": (["attn_q", "attn_k", "attn_v"], [count * config.head_dim for count in heads])}
    if file.metadata["general.architecture"] in _FUSES_GATE:
        parts["ffn_up"] = (["ffn_gate", "ffn_up"], [config.intermediate_size] * 2)
    found: dict[str, TensorInfo] = {}
    for key, info in file.tensors.items():
        match = _FUSED_ROWS.fullmatch(key)
        names, sizes = parts.get(match[2], ([], [])) if match else ([], [])
        if match is None or sum(sizes) != info.shape[0]:  # the check of all shapes names a wrong one
            found[key] = info
            continue
        row_bytes, row = num_bytes(info) // info.shape[0], 0
        for name, size in zip(names, sizes, strict=True):
            offset = info.offset + row * row_bytes
            shape = (size, *info.shape[1:])
            found[f"{match[1]}{name}.{match[3]}"] = TensorInfo(key, shape, info.type_id, offset)
            row += size
    return found


def join_latent_up(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo | LatentUp]:
    """Return the tensors with both parts of each `kv_b_proj` as one."""
    found: dict[str, TensorInfo | LatentUp] = {}
    for name, info in tensors.items():
        values = tensors.get(name.replace(_KEY_UP, _VALUE_UP))
        if name.endswith(_KEY_UP) and values is not None and len(info.shape) == len(values.shape) == 3:
            found[name.replace(_KEY_UP, _BOTH_UP)] = LatentUp(info, values)
        elif not (name.endswith(_VALUE_UP) and name.replace(_VALUE_UP, _KEY_UP) in tensors):
            found[name] = info
    return found
