"""Engine options of vLLM without a field of the same name in `EngineConfig`.

An option that requests the behaviour of this engine is accepted and removed. Any other value is refused with
the reason, since an option that is ignored would change what a script measures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from draftproof.errors import ConfigError

OPTION_ALIASES = {
    "gpu_memory_utilization": "memory_utilization",
    "block_size": "page_size",
    "async_scheduling": "overlap",
}
DTYPE_ALIASES = {"float": "float32", "bf16": "bfloat16", "fp32": "float32"}
HALF_DTYPES = ("float16", "half", "fp16")
# Options whose value None means the default in vLLM.
NONE_IS_DEFAULT = (
    *("page_size", "enable_prefix_caching", "dtype", "load_format", "generation_config"),
    *("quantization", "kv_cache_dtype", "tensor_parallel_size"),
)


class Rule(NamedTuple):
    """Values of an option that are accepted, and the advice for any other one."""

    accepts: Callable[[Any], bool]
    advice: str


def _one_of(*values: Any) -> Callable[[Any], bool]:
    """Return a test for None and the given values; True is not 1."""
    return lambda value: value is None or any(type(value) is type(v) and value == v for v in values)


def _is_switch(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _is_unset(value: Any) -> bool:
    """Return whether a value requests nothing: None, False, or an empty mapping or list."""
    return value is None or value is False or (isinstance(value, (Mapping, list, tuple)) and not value)


def _is_served_name(value: Any) -> bool:
    names = value if isinstance(value, (list, tuple)) else [value]
    return value is None or all(isinstance(name, str) for name in names)


_ONE_DEVICE = "layers are cut between GPUs by tensor_parallel_size: use it, or start several engines"
_NO_LORA = "adapters are not available: merge the adapter into the weights"
_NO_MEDIA = "only text models are available"
_FIRST_COME = "requests are scheduled by priority, then by arrival: leave it out"
_FROM_CHECKPOINT = "the model is built from its own files: change config.json, or leave it out"
_HUB_LOGIN = "log in with `hf auth login` or set HF_TOKEN"
_TASKS = "generation and embeddings are available, both from one engine"
_XGRAMMAR = "structured outputs are compiled by xgrammar: leave it out"

RULES: dict[str, Rule] = {
    "pipeline_parallel_size": Rule(_one_of(1), _ONE_DEVICE),
    "data_parallel_size": Rule(_one_of(1), _ONE_DEVICE),
    "enable_expert_parallel": Rule(_is_unset, _ONE_DEVICE),
    "distributed_executor_backend": Rule(_one_of("uni", "mp"), "ranks are processes of one machine"),
    "disable_custom_all_reduce": Rule(_is_switch, "it must be true or false"),
    "trust_remote_code": Rule(_is_switch, "it must be true or false; code of a model is never run"),
    "disable_log_stats": Rule(_is_switch, "it must be true or false; see get_metrics()"),
    "served_model_name": Rule(_is_served_name, "it must be a text or a list of texts"),
    "enable_chunked_prefill": Rule(
        _one_of(True),
        "long prompts are always computed in chunks; with max_num_batched_tokens of at least max_model_len "
        "a prompt fits one step",
    ),
    "tokenizer_mode": Rule(_one_of("auto", "hf"), "tokenizer.json or the tokenizer of the GGUF file is used"),
    "tokenizer_revision": Rule(_is_unset, "give a folder as tokenizer"),
    "calculate_kv_scales": Rule(_is_unset, "scales are computed for each token and head: leave it out"),
    "override_generation_config": Rule(
        _is_unset, "pass SamplingParams, or a folder with generation_config.json as generation_config"
    ),
    "swap_space": Rule(_one_of(0, 0.0), "preempted requests are computed again: leave it out"),
    "cpu_offload_gb": Rule(_one_of(0, 0.0), "weights and KV are kept on the device: use a smaller model"),
    "preemption_mode": Rule(_one_of("recompute"), "preempted requests are computed again: leave it out"),
    "scheduling_policy": Rule(_one_of("fcfs", "priority"), _FIRST_COME),
    "max_seq_len_to_capture": Rule(
        _is_unset, "steps of any length are captured; enforce_eager=True captures none"
    ),
    "compilation_config": Rule(_is_unset, "steps are captured at start-up; enforce_eager=True captures none"),
    "optimization_level": Rule(_is_unset, "steps are captured at start-up; enforce_eager=True captures none"),
    "disable_sliding_window": Rule(_is_unset, "the attention windows of the model are always applied"),
    "disable_cascade_attn": Rule(_is_switch, "it must be true or false"),
    "logprobs_mode": Rule(
        _one_of("raw_logprobs"),
        "it is an option of a request: SamplingParams(logprobs_mode='processed'); logits are not returned",
    ),
    "logits_processors": Rule(_is_unset, "pass functions as SamplingParams(logits_processors=[...])"),
    "guided_decoding_backend": Rule(_one_of("auto", "xgrammar"), _XGRAMMAR),
    "structured_outputs_config": Rule(_is_unset, _XGRAMMAR),
    "reasoning_config": Rule(
        _is_unset, "the markers are those of reasoning_parser, or reasoning_end of structured_outputs"
    ),
    "runner": Rule(_one_of("auto", "generate", "pooling"), _TASKS),
    "task": Rule(_one_of("auto", "generate", "embed", "embedding"), _TASKS),
    "convert": Rule(_one_of("auto", "none", "embed"), _TASKS),
    "config_format": Rule(_one_of("auto", "hf"), "config.json of Hugging Face or a GGUF file is read"),
    "model_impl": Rule(_one_of("auto"), "models are built in: leave it out"),
    "hf_config_path": Rule(_is_unset, _FROM_CHECKPOINT),
    "hf_overrides": Rule(_is_unset, _FROM_CHECKPOINT),
    "rope_scaling": Rule(_is_unset, _FROM_CHECKPOINT),
    "rope_theta": Rule(_is_unset, _FROM_CHECKPOINT),
    "code_revision": Rule(_is_unset, "code of a model is never run"),
    "hf_token": Rule(_is_unset, _HUB_LOGIN),
    "download_dir": Rule(_is_unset, "set HF_HOME for models of the hub, DRAFTPROOF_CACHE for built-in ones"),
    "enable_lora": Rule(_is_unset, _NO_LORA),
    "lora_modules": Rule(_is_unset, _NO_LORA),
    "max_loras": Rule(_is_unset, _NO_LORA),
    "max_lora_rank": Rule(_is_unset, _NO_LORA),
    "limit_mm_per_prompt": Rule(_is_unset, _NO_MEDIA),
    "mm_processor_kwargs": Rule(_is_unset, _NO_MEDIA),
    "allowed_local_media_path": Rule(_one_of(""), _NO_MEDIA),
    "enable_prompt_embeds": Rule(_is_unset, "prompts are texts or token ids"),
    "kv_transfer_config": Rule(_is_unset, "the KV cache is not shared between engines"),
    "kv_cache_memory_bytes": Rule(_is_unset, "set kv_cache_tokens"),
    "num_scheduler_steps": Rule(_one_of(1), "overlap plans steps ahead: leave it out"),
    "use_v2_block_manager": Rule(_one_of(True), "leave it out"),
}


def translate_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword options without those of vLLM that are accepted; ConfigError for a refused one."""
    kept = {}
    for key, value in given.items():
        rule = RULES.get(key)
        if rule is None:
            kept[key] = value
        elif not rule.accepts(value):
            raise ConfigError(f"{key}={value!r} is not supported: {rule.advice}")
    return kept


def translate_values(values: dict[str, Any], default_page_size: int) -> None:
    """Replace values in vLLM's notation, in options that have their names here."""
    for name in NONE_IS_DEFAULT:
        if name in values and values[name] is None:
            del values[name]
    blocks = values.pop("num_gpu_blocks_override", None)
    if blocks is not None:
        if isinstance(blocks, bool) or not isinstance(blocks, int) or blocks < 1:
            raise ConfigError(f"num_gpu_blocks_override must be a positive integer, got {blocks!r}")
        if values.get("kv_cache_tokens") is not None:
            raise ConfigError("num_gpu_blocks_override and kv_cache_tokens are given: leave one out")
        page_size = values.get("page_size", default_page_size)
        values["kv_cache_tokens"] = blocks * page_size if isinstance(page_size, int) else blocks
    if values.get("reasoning_parser") == "":
        del values["reasoning_parser"]
    for key in ("pooler_config", "override_pooler_config"):
        _translate_pooler(values, values.pop(key, None))
    if "dtype" in values:
        values["dtype"] = _dtype_name(values["dtype"])


def _translate_pooler(values: dict[str, Any], given: Any) -> None:
    """Set the options that a PoolerConfig of vLLM, or a mapping with its fields, describes."""
    fields = given if isinstance(given, Mapping) else vars(given) if hasattr(given, "__dict__") else None
    if given is None:
        return
    if fields is None:
        raise ConfigError(f"pooler_config must be a mapping, got {given!r}")
    names = {"pooling_type": "pooling_type", "normalize": "normalize_embeddings"}
    for key, value in fields.items():
        if value is None:
            continue
        if key not in names:
            raise ConfigError(
                f"pooler_config: {key} is not supported, only {' and '.join(names)}: leave it out"
            )
        values[names[key]] = value.lower() if isinstance(value, str) else value


def _dtype_name(dtype: Any) -> Any:
    """Return the name of a dtype that is given as a name, an alias or a torch.dtype."""
    name = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
    if name in HALF_DTYPES:
        raise ConfigError(
            f"dtype={name!r} is not supported, since no backend computes in float16: use 'bfloat16', which "
            "takes the same memory, or 'float32', which holds float16 weights exactly"
        )
    return DTYPE_ALIASES.get(name, name)
