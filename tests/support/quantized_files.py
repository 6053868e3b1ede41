"""Tiny quantised model folders, packed value by value as the sources of the public tools define.

AWQ: `WQLinear_GEMM.from_linear` of AutoAWQ. GPTQ: `pack_original` of GPTQModel. Others: the compressors
`int-quantized`, `float-quantized` and `pack-quantized` of compressed-tensors; fp8 blocks as DeepSeek.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftproof.models.weights.low_bit import (
    MXFP4_BIAS,
    MXFP4_GROUP,
    MXFP4_VALUES,
    Int4GroupWeight,
    Mxfp4Weight,
)

GROUP = 32
HIDDEN, INNER, VOCAB, LAYERS = 64, 128, 97, 2
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": INNER,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Packed = tuple[dict[str, Tensor], Tensor]  # stored parts by suffix, and the exact matrix [N, K] in fp32


def words(values: list[int]) -> int:
    """Return eight 4-bit values as one signed 32-bit word, the first in the lowest bits."""
    word = sum((value & 15) << (4 * i) for i, value in enumerate(values))
    return word - (1 << 32) if word >= 1 << 31 else word


def pack_rows(values: Tensor) -> Tensor:
    """Pack [A, B] along B: [A, B / 8] int32."""
    lines = [[words(line[i : i + 8]) for i in range(0, len(line), 8)] for line in values.tolist()]
    return torch.tensor(lines, dtype=torch.int32)


def pack_awq(values: Tensor) -> Tensor:
    """Pack [A, B] along B in the order of AWQ: [A, B / 8] int32."""
    order = [8 * (i // 8) + AWQ_ORDER[i % 8] for i in range(values.shape[1])]
    return pack_rows(values[:, order])


@dataclass(frozen=True)
class FourBits:
    """Random 4-bit matrix [N, K] with scales and zero points [N, K / GROUP]."""

    integers: Tensor
    scales: Tensor
    zeros: Tensor

    @classmethod
    def draw(cls, shape: tuple[int, int], dtype: torch.dtype, zero: int | None = None) -> FourBits:
        groups = shape[0], shape[1] // GROUP
        scales = (torch.rand(groups) * 0.02 + 0.01).to(dtype)
        zeros = torch.randint(1, 16, groups) if zero is None else torch.full(groups, zero)
        return cls(torch.randint(0, 16, shape), scales, zeros)

    @property
    def matrix(self) -> Tensor:
        zeros, scales = (t.repeat_interleave(GROUP, 1) for t in (self.zeros, self.scales.float()))
        return (self.integers - zeros) * scales


def awq(shape: tuple[int, int]) -> Packed:
    made = FourBits.draw(shape, torch.float16)
    parts = {"qweight": pack_awq(made.integers.T), "qzeros": pack_awq(made.zeros.T)}
    return parts | {"scales": made.scales.T.contiguous()}, made.matrix


def gptq(shape: tuple[int, int], offset: int = 1, zero: int | None = 8) -> Packed:
    made = FourBits.draw(shape, torch.float16, zero)
    parts = {"qweight": pack_rows(made.integers).T.contiguous()}
    parts["qzeros"] = pack_rows(made.zeros.T - offset)
    parts["g_idx"] = (torch.arange(shape[1]) // GROUP).int()
    return parts | {"scales": made.scales.T.contiguous()}, made.matrix


def gptq_v2(shape: tuple[int, int]) -> Packed:
    return gptq(shape, offset=0, zero=None)


def int4(shape: tuple[int, int], zero: int | None = 8) -> Packed:
    made = FourBits.draw(shape, torch.bfloat16, zero)
    parts = {"weight_packed": pack_rows(made.integers), "weight_scale": made.scales}
    if zero is None:
        parts["weight_zero_point"] = pack_rows(made.zeros.T).T.contiguous()
    return parts | {"weight_shape": torch.tensor(shape)}, made.matrix


def int4_zeros(shape: tuple[int, int]) -> Packed:
    return int4(shape, zero=None)


def int8(shape: tuple[int, int]) -> Packed:
    data = torch.randint(-127, 128, shape, dtype=torch.int8)
    scales = (torch.rand(shape[0], 1) * 0.002 + 0.001).bfloat16()
    return {"weight": data, "weight_scale": scales}, data.float() * scales.float()


def fp8(shape: tuple[int, int], per_tensor: bool = False) -> Packed:
    data = (torch.randn(shape) * 100).to(torch.float8_e4m3fn)
    scales = (torch.rand(1 if per_tensor else (shape[0], 1)) * 0.001 + 0.0005).float()
    return {"weight": data, "weight_scale": scales}, data.float() * scales


def fp8_tensor(shape: tuple[int, int]) -> Packed:
    return fp8(shape, per_tensor=True)


def fp8_block(shape: tuple[int, int], name: str = "weight_scale_inv") -> Packed:
    data = (torch.randn(shape) * 100).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128)) * 0.001 + 0.0005
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    return {"weight": data, name: scales}, data.float() * wide


def fp8_block_scale(shape: tuple[int, int]) -> Packed:
    return fp8_block(shape, "weight_scale")


def mxfp4_weight(matrix: Tensor) -> Mxfp4Weight:
    """Round a matrix [N, K] to mxfp4; the largest magnitude of a group becomes one of 4 to 6."""
    groups = matrix.float().view(len(matrix), -1, MXFP4_GROUP)
    exponents = groups.abs().amax(2).clamp(min=2.0**-60).log2().floor() - 2  # [N, K / 32]
    scaled = (groups * torch.exp2(-exponents)[..., None]).flatten(1)
    values = torch.tensor(MXFP4_VALUES, device=matrix.device)
    codes = (scaled.abs()[..., None] - values).abs().argmin(-1) + 8 * (scaled < 0)
    pairs = codes.to(torch.uint8).view(len(matrix), -1, 2)
    return Mxfp4Weight.create(pairs[..., 0] | pairs[..., 1] << 4, (exponents + MXFP4_BIAS).to(torch.uint8))


def int4_weight_with_zeros(matrix: Tensor) -> Int4GroupWeight:
    """Return a 4-bit weight with zero points and fp16 scales, as AWQ has."""
    made = Int4GroupWeight.quantize(matrix)
    assert made.scales is not None
    zeros = torch.arange(made.scales.numel(), device=matrix.device).view_as(made.scales) % 16
    return Int4GroupWeight.create(made.integers(), made.scales.half(), zeros)


def compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a quantization_config of compressed-tensors with one config group."""
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}}
    if inputs is not None:
        group["input_activations"] = {"num_bits": 8, "symmetric": True, "dynamic": True, **inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
TOKEN_INT, TOKEN_FP = {"type": "int", "strategy": "token"}, {"type": "float", "strategy": "token"}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
BLOCK = {"strategy": "block", "block_structure": [128, 128]}
SCHEMES: dict[str, tuple[dict[str, Any], Callable[[tuple[int, int]], Packed], str]] = {
    # name -> quantization_config, stored parts, weight format
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq, "w4a16"),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True}, gptq, "w4a16"),
    "gptq_v2": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
        gptq_v2,
        "w4a16",
    ),
    "int4": (compressed("pack-quantized", INT4), int4, "w4a16"),
    "int4_zeros": (compressed("pack-quantized", INT4 | {"symmetric": False}), int4_zeros, "w4a16"),
    "int8": (
        compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, TOKEN_INT),
        int8,
        "w8a8",
    ),
    "fp8": (compressed("float-quantized", FP8, TOKEN_FP), fp8, "fp8"),
    "fp8_tensor": (compressed("float-quantized", FP8 | {"strategy": "tensor"}, TOKEN_FP), fp8_tensor, "fp8"),
    "fp8_dynamic": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, fp8_tensor, "fp8"),
    "fp8_block": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8_block, "fp8_block"),
    "fp8_block_compressed": (
        compressed("float-quantized", FP8 | BLOCK, {"type": "float", "strategy": "group", "group_size": 128}),
        fp8_block_scale,
        "fp8_block",
    ),
}


def write_quantized(folder: Path, scheme: str) -> dict[str, Tensor]:
    """Write a model folder with random weights; return the matrices by name, exact in fp32."""
    torch.manual_seed(1)
    config, pack, _ = SCHEMES[scheme]
    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN).bfloat16(),
        "model.norm.weight": torch.rand(HIDDEN).bfloat16() + 0.5,
        "lm_head.weight": (torch.randn(VOCAB, HIDDEN) * 0.3).bfloat16(),
    }
    exact: dict[str, Tensor] = {}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = torch.rand(HIDDEN).bfloat16() + 0.5
        for name, shape in SHAPES.items():
            parts, exact[f"{prefix}{name}.weight"] = pack(shape)
            tensors |= {f"{prefix}{name}.{suffix}": part for suffix, part in parts.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": config}))
    return exact
