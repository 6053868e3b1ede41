"""Parser of `quantization_config`: the stored layout of each linear layer, or the name of what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftproof.errors import LoadError

BLOCK_SIZE = 128  # rows and columns that share a scale in fp8 blocks
SUPPORTED = (
    "supported: compressed-tensors (int8 and fp8 with dynamic activations per token, fp8 blocks of 128x128, "
    "pack-quantized int4), awq (4 bits, gemm), gptq (4 bits, gptq or gptq_v2), fp8 (dynamic activations), "
    "mxfp4 (experts of gpt-oss), and GGUF files"
)
REQUANTIZE = "quantise the bf16 model with `draftproof quantize`, or load it with the option quantization"


@dataclass(frozen=True, slots=True)
class StoredScheme:
    """Stored layout of one quantised linear layer."""

    layout: str  # a key of `layouts.LAYOUTS`
    group_size: int = 0  # columns that share a scale, of 4-bit layouts; 0: the whole row
    has_zero_points: bool = False
    zero_offset: int = 0  # added to stored zero points: 1 in GPTQ files of version 1
    scale_name: str = "weight_scale"  # suffix of the scales, of fp8 layouts


@dataclass(frozen=True, slots=True)
class CheckpointQuantization:
    """Quantisation of a checkpoint: schemes by target, and the layers that stay floats."""

    method: str  # quant_method of config.json
    groups: tuple[tuple[tuple[str, ...], StoredScheme], ...]  # (targets, scheme)
    ignore: tuple[str, ...] = ()  # names, or "re:" and a pattern from the start of the name
    ignore_parts: tuple[str, ...] = ()  # text that names of float layers contain

    @property
    def name(self) -> str:
        """Return the method with its layouts, for messages and `draftproof info`."""
        return f"{self.method} ({', '.join(dict.fromkeys(scheme.layout for _, scheme in self.groups))})"

    def scheme(self, module: str) -> StoredScheme | None:
        """Return the scheme of a linear layer; None: its weight is stored as floats."""
        if any(_is_match(module, target) for target in self.ignore):
            return None
        if any(part in module for part in self.ignore_parts):
            return None
        named = [(t, scheme) for targets, scheme in self.groups for t in targets if _is_match(module, t)]
        # As compressed-tensors: a name has precedence over a pattern, a pattern over the class.
        named.sort(key=lambda entry: (entry[0] == "Linear", entry[0].startswith("re:")))
        return named[0][1] if named else None


def _is_match(module: str, target: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return target in (module, "Linear")


def parse_quantization(raw: Mapping[str, Any], where: str) -> CheckpointQuantization | None:
    """Parse the key `quantization_config` of config.json; LoadError names a scheme that is not supported."""
    stored = raw.get("quantization_config") or raw.get("compression_config")
    if not stored:
        return None
    if not isinstance(stored, Mapping):
        raise LoadError(f"{where}: quantization_config is {type(stored).__name__}, not an object")
    method = str(stored.get("quant_method") or "(none named)").lower()
    if method not in METHODS:
        raise LoadError(f"{where}: quantization method {method!r} is not supported; {SUPPORTED}")
    try:
        return METHODS[method](stored)
    except LoadError as error:
        raise LoadError(f"{where}: {method}: {error}; {SUPPORTED}") from error
    except (TypeError, ValueError, KeyError, AttributeError, re.error) as error:
        raise LoadError(f"{where}: {method}: not a usable quantization_config: {error!r}") from error


def _compressed_tensors(stored: Mapping[str, Any]) -> CheckpointQuantization:
    if stored.get("kv_cache_scheme"):
        raise LoadError(
            "kv_cache_scheme (calibrated scales of the KV cache) is not supported: take the checkpoint "
            "without it and choose kv_cache_dtype"
        )
    sparsity = (stored.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise LoadError(f"sparsity_config {sparsity!r} is not supported")
    for key in ("transform_config", "moe_sparsity_config"):
        if stored.get(key):
            raise LoadError(f"{key} is not supported")
    if stored.get("quantization_status", "compressed") != "compressed":
        raise LoadError(f"quantization_status {stored['quantization_status']!r} is not 'compressed'")
    groups = []
    for name, group in stored["config_groups"].items():
        if not isinstance(group, Mapping):
            raise LoadError(f"config group {name!r} is a preset name: write its arguments out")
        targets = tuple(str(target) for target in group["targets"])
        _check_targets(targets)
        groups.append((targets, _compressed_scheme(group, str(group.get("format") or stored.get("format")))))
    if not groups:
        raise LoadError("config_groups is empty")
    ignore = tuple(str(name) for name in stored.get("ignore") or ())
    _check_patterns(ignore)
    return CheckpointQuantization("compressed-tensors", tuple(groups), ignore)


def _check_targets(targets: Sequence[str]) -> None:
    _check_patterns(targets)
    for target in targets:
        if "." not in target and not target.startswith("re:") and target not in ("Linear", "lm_head"):
            raise LoadError(f"target class {target!r} is not supported: Linear, names and 're:' patterns are")


def _check_patterns(targets: Sequence[str]) -> None:
    for target in targets:
        if target.startswith("re:"):
            re.compile(target.removeprefix("re:"))


def _compressed_scheme(group: Mapping[str, Any], form: str) -> StoredScheme:
    """Return the scheme of one config group; `form` is its compression format."""
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not weights:
        raise LoadError(f"targets {group['targets']} without quantised weights are not supported")
    if group.get("output_activations"):
        raise LoadError("output_activations are not supported")
    bits, kind, strategy = int(weights["num_bits"]), weights.get("type", "int"), weights.get("strategy")
    strategy = strategy or ("group" if weights.get("group_size") else "tensor")
    what = f"{form} with {kind}{bits} weights per {strategy}"
    if form == "pack-quantized":
        if bits != 4 or kind != "int" or strategy not in ("group", "channel"):
            raise LoadError(f"{what} is not supported: int4 per group or channel is")
        if inputs:
            raise LoadError(f"{what} and quantised activations is not supported: 16-bit activations are")
        size = int(weights["group_size"]) if strategy == "group" else 0
        return StoredScheme("int4_packed", max(0, size), has_zero_points=not weights.get("symmetric", True))
    if form not in ("int-quantized", "float-quantized", "naive-quantized"):
        raise LoadError(f"compression format {form!r} is not supported")
    if not weights.get("symmetric", True):
        raise LoadError(f"{what} and zero points is not supported: symmetric weights are")
    if bits != 8 or kind not in ("int", "float"):
        raise LoadError(f"{what} is not supported: 8 bits are")
    if not inputs:
        raise LoadError(f"{what} without quantised activations is not supported")
    _check_dynamic(inputs, kind)
    if strategy == "block":
        if kind != "float" or list(weights.get("block_structure") or ()) != [BLOCK_SIZE, BLOCK_SIZE]:
            raise LoadError(f"{what} {weights.get('block_structure')} is not supported: fp8 [128, 128] is")
        if inputs.get("strategy") != "group" or inputs.get("group_size") != BLOCK_SIZE:
            raise LoadError(f"{what} needs activations in groups of {BLOCK_SIZE}")
        return StoredScheme("fp8_block")
    if strategy not in ("channel", "tensor"):
        raise LoadError(f"{what} is not supported: per channel or tensor is")
    if inputs.get("strategy") != "token":
        raise LoadError(
            f"{what} with dynamic activations per {inputs.get('strategy')} is not supported: a scale per "
            "token is, since one scale of a batch makes outputs depend on other requests"
        )
    return StoredScheme("int8" if kind == "int" else "fp8")


def _check_dynamic(inputs: Mapping[str, Any], kind: str) -> None:
    if inputs.get("dynamic") is not True:
        raise LoadError("static activation scales are not supported: dynamic ones per token are")
    if int(inputs["num_bits"]) != 8 or inputs.get("type", "int") != kind:
        raise LoadError(f"activations in {inputs.get('type')}{inputs['num_bits']} are not supported here")
    if not inputs.get("symmetric", True):
        raise LoadError("activations with zero points are not supported")


def _awq(stored: Mapping[str, Any]) -> CheckpointQuantization:
    bits = stored.get("bits", stored.get("w_bit", 4))
    if bits != 4:
        raise LoadError(f"{bits} bits are not supported: 4 are")
    version = str(stored.get("version", stored.get("format", "gemm"))).lower()
    if version != "gemm":
        raise LoadError(f"version {version!r} is not supported: gemm is")
    if not stored.get("zero_point", True):
        raise LoadError("a checkpoint without zero points is not supported")
    size = int(stored.get("group_size", stored.get("q_group_size", 128)))
    scheme = StoredScheme("awq", max(0, size), has_zero_points=True)
    parts = tuple(str(name) for name in stored.get("modules_to_not_convert") or ())
    return CheckpointQuantization("awq", ((("Linear",), scheme),), ignore_parts=("lm_head", *parts))


def _gptq(stored: Mapping[str, Any]) -> CheckpointQuantization:
    if stored["bits"] != 4:
        raise LoadError(f"{stored['bits']} bits are not supported: 4 are")
    form = str(stored.get("checkpoint_format") or stored.get("format") or "gptq").lower()
    if form not in ("gptq", "gptq_v2"):
        raise LoadError(f"checkpoint_format {form!r} is not supported: gptq and gptq_v2 are")
    dynamic = stored.get("dynamic") or {}
    if changed := [rule for rule in dynamic if not str(rule).startswith("-:")]:
        raise LoadError(f"dynamic rules with options of their own are not supported ({changed[0]!r})")
    ignore = [f"re:{str(rule).removeprefix('-:')}" for rule in dynamic]
    if not stored.get("lm_head", False):
        ignore.append("lm_head")
    _check_patterns(ignore)
    zero_offset = 1 if form == "gptq" else 0
    scheme = StoredScheme("gptq", max(0, int(stored["group_size"])), True, zero_offset)
    parts = tuple(str(name) for name in stored.get("modules_to_not_convert") or ())
    return CheckpointQuantization("gptq", ((("Linear",), scheme),), tuple(ignore), parts)


def _fp8(stored: Mapping[str, Any]) -> CheckpointQuantization:
    if stored.get("activation_scheme", "dynamic") != "dynamic":
        raise LoadError("static activation scales are not supported: activation_scheme 'dynamic' is")
    form = stored.get("fmt") or "e4m3"
    if form not in ("e4m3", "float8_e4m3fn"):
        raise LoadError(f"fmt {form!r} is not supported: e4m3 is")
    if stored.get("scale_fmt") not in (None, "float"):
        raise LoadError(f"scale_fmt {stored['scale_fmt']!r} is not supported: scales in float are")
    size = stored.get("weight_block_size")
    if size is not None and list(size) != [BLOCK_SIZE, BLOCK_SIZE]:
        raise LoadError(f"weight_block_size {size} is not supported: [128, 128] is")
    scheme = StoredScheme("fp8_block", scale_name="weight_scale_inv") if size else StoredScheme("fp8")
    keys = ("modules_to_not_convert", "ignored_layers")
    parts = tuple(str(name) for key in keys for name in stored.get(key) or ())
    return CheckpointQuantization("fp8", ((("Linear",), scheme),), ignore_parts=("lm_head", *parts))


def _mxfp4(stored: Mapping[str, Any]) -> CheckpointQuantization:
    """Return the scheme of gpt-oss, whose experts alone are quantised."""
    return CheckpointQuantization("mxfp4", (((r"re:.*\.mlp\.experts\.",), StoredScheme("mxfp4")),))


METHODS: dict[str, Callable[[Mapping[str, Any]], CheckpointQuantization]] = {
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
}
