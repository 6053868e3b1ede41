"""Configuration of the engine: frozen, validated once; an unknown key is an error that names the nearest.

The fields of `EngineConfig` are the one declaration of the engine's options. The command line and the table
in docs/options.md are generated from their metadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from os import PathLike
from typing import Any

from draftproof.compat.kv_events_config import KVEventsConfig
from draftproof.compat.vllm_options import OPTION_ALIASES, translate_options, translate_values
from draftproof.errors import ConfigError, nearest
from draftproof.speculative_config import SpeculativeConfig, merge_aliases

DEFAULT_PAGE_TOKENS = 16
DEFAULT_MODEL = "smollm2-135m"


def option(default: Any, text: str, **metadata: Any) -> Any:
    """Declare an option. `text`: its help. `choices`: allowed values. `default_text`: shown default.

    `api_only`: an option of `LLM` and `AsyncLLM` that the command line does not offer.
    """
    return field(default=default, metadata={"help": text, **metadata})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of an engine. Sizes that depend on the model or the machine are None until resolved."""

    model: str
    tokenizer: str | None = option(
        None, "folder or name of another tokenizer", default_text="the model's own"
    )
    skip_tokenizer_init: bool = option(
        False, "load no tokenizer: prompts and outputs are token ids", api_only=True
    )
    dtype: str = option(
        "auto",
        "dtype of the weights; `auto`: fp32 for weights stored in fp32, bf16 for all others",
        choices=("auto", "bfloat16", "float32"),
    )
    quantization: str = option(
        "auto",
        "arithmetic of linear layers. `auto`: a GGUF file on the CPU is computed from its blocks as they are "
        "stored, every other model in `dtype`. `none`: weights are unpacked to `dtype`. Made on load: "
        "`int8`, `fp8` (weights per output channel, activations per token), `int4` (CPU: groups of 32, "
        "activations in int8 per group; GPU: groups of 128, activations in `dtype`). `gguf`: the blocks of a "
        "GGUF file, with the backend `cpu`, `torch` or `reference`",
        choices=("auto", "none", "int8", "fp8", "int4", "gguf"),
    )
    kv_cache_dtype: str = option(
        "auto",
        "storage of K and V; `auto`: the dtype of the weights. Others have one byte an element and a scale "
        "per token and KV head, about half the memory of bf16",
        choices=("auto", "int8", "fp8", "fp8_e4m3"),
    )
    device: str = option("auto", "`cpu`, `cuda` or `cuda:1`; `auto`: a usable GPU, else the CPU")
    backend: str = option(
        "auto", "`cpu`, `triton`, `torch` (any device) or `reference` (the definition, slow)"
    )
    numerics: str = option(
        "exact",
        "`exact`: bits do not depend on the batch; `fast`: with the backend `triton` they may, and so may "
        "drafts change the output; other backends compute the same bits as with `exact`",
        choices=("exact", "fast"),
    )
    tensor_parallel_size: int = option(
        1, "ranks that a model is cut between: GPUs of one machine, or processes on a CPU"
    )
    tp_invariant: bool = option(
        False,
        "sum the layers that are cut between ranks in 8 fixed parts: 1, 2, 4 and 8 ranks give the same bits",
    )
    load_format: str = option(
        "auto",
        "format of the weights; `dummy`: random weights",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
    revision: str | None = option(None, "revision of a model from the hub")
    max_model_len: int | None = option(
        None,
        "tokens of prompt and output together; a larger value must be given explicitly",
        default_text="the model's, at most 8192",
    )
    max_num_seqs: int | None = option(None, "requests in one batch", default_text="32; 256 on a GPU")
    max_num_batched_tokens: int | None = option(
        None,
        "rows of one step; longer prompts are computed in chunks",
        default_text="512; 256 with the `cpu` backend, 8192 on a GPU",
    )
    page_size: int = option(DEFAULT_PAGE_TOKENS, "tokens of a KV page: 8, 16, 32 or 64 (alias `block_size`)")
    kv_cache_tokens: int | None = option(None, "tokens in the KV cache", default_text="as many as fit")
    enable_prefix_caching: bool = option(True, "reuse the KV of common prefixes")
    kv_events_config: dict[str, Any] | None = option(
        None,
        "publish changes of the prefix cache for routers, in vLLM's keys and format "
        '(`{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}`); see docs/serving.md',
    )
    max_num_waiting: int | None = option(
        None, "requests in the queue", default_text="no limit; `serve`: 1024"
    )
    memory_utilization: float = option(
        0.9, "share of a GPU's free memory for weights and KV (alias `gpu_memory_utilization`)"
    )
    max_logprobs: int = option(20, "largest number of logprobs per token in a request; -1: no limit")
    max_grammar_seconds: float = option(
        2.0,
        "CPU seconds that matching one request's grammar may take beyond 5 ms a token, and those of one step "
        "together; then the request fails",
    )
    reasoning_parser: str | None = option(
        None,
        "markers of the model's reasoning, such as `qwen3`; `none`: outputs are not split",
        default_text="from the chat template",
    )
    seed: int | None = option(None, "source of the seeds of requests without one, and of dummy weights")
    speculative: SpeculativeConfig | None = None
    generation_config: str = option(
        "auto",
        "sampling options of requests that give none; `auto`: `generation_config.json` of the model, `vllm`: "
        "the defaults of `SamplingParams`, or a folder with the file",
    )
    pooling_type: str = option(
        "auto",
        "hidden rows that make an embedding: the last one of the prompt, or the mean of all; `auto`: as the "
        "model's files define it, else `last`",
        choices=("auto", "last", "mean"),
    )
    normalize_embeddings: bool | None = option(
        None, "scale embeddings to length 1", default_text="as the model's files define it, else true"
    )
    enable_sleep_mode: bool = option(False, "keep weights and KV in memory that `sleep` can release")
    enforce_eager: bool = option(False, "run every step op by op, without captured graphs")
    warm_up: bool = option(True, "capture and time steps at start-up", api_only=True)
    overlap: bool | None = option(
        None,
        "plan the next step, or two, before the last one is read",
        default_text="where the device has a queue",
        api_only=True,
    )
    debug: bool = option(False, "check invariants at every step", api_only=True)

    @property
    def publishes_kv_events(self) -> bool:
        """Return whether changes of the prefix cache are published."""
        return self.kv_events_config is not None and KVEventsConfig.parse(self.kv_events_config).is_enabled

    @classmethod
    def parse(cls, model: str, options: Mapping[str, Any]) -> EngineConfig:
        """Read keyword options as `LLM(...)` takes them."""
        known = {f.name for f in fields(cls)} - {"speculative"} | {"speculative_config"}
        values = merge_aliases(translate_options(options), OPTION_ALIASES, "the options give")
        translate_values(values, DEFAULT_PAGE_TOKENS)
        for key in values:
            if key not in known:
                raise ConfigError(f"unknown option {key!r}: {nearest(key, known)}")
        spec = values.pop("speculative_config", None)
        if isinstance(spec, Mapping):
            spec = SpeculativeConfig.parse(spec)
        elif spec is not None and not isinstance(spec, SpeculativeConfig):
            raise ConfigError(f"speculative_config must be a mapping, got {spec!r}")
        return cls(model=model, speculative=spec, **values)

    def __post_init__(self) -> None:
        """Check the type and range of every field."""
        lengths = ("max_model_len", "max_num_batched_tokens", "kv_cache_tokens")
        for name in (*lengths, "max_num_seqs", "max_num_waiting", "tensor_parallel_size"):
            value = getattr(self, name)
            if (value is not None or name == "tensor_parallel_size") and (
                not _is_integer(value) or value < 1
            ):
                raise ConfigError(f"{name} must be a positive integer, got {value!r}")
        if self.seed is not None and (not _is_integer(self.seed) or not 0 <= self.seed < 2**63):
            raise ConfigError(f"seed must be an integer in 0..{2**63 - 1}, got {self.seed!r}")
        share = self.memory_utilization
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ConfigError(f"memory_utilization must lie in 0..1, got {share!r}")
        seconds = self.max_grammar_seconds
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
            raise ConfigError(f"max_grammar_seconds must be a positive number, got {seconds!r}")
        if self.page_size not in (8, 16, 32, 64):
            raise ConfigError(f"page_size must be 8, 16, 32 or 64, got {self.page_size!r}")
        switches = ("tp_invariant", "enable_prefix_caching", "warm_up", "overlap", "debug", "enforce_eager")
        for name in (*switches, "enable_sleep_mode", "skip_tokenizer_init", "normalize_embeddings"):
            value, optional = getattr(self, name), name in ("overlap", "normalize_embeddings")
            if not isinstance(value, bool) and not (optional and value is None):
                raise ConfigError(f"{name} must be true or false, got {value!r}")
        if self.skip_tokenizer_init and self.tokenizer is not None:
            raise ConfigError("skip_tokenizer_init and tokenizer are given: leave one out")
        for name in ("device", "backend", "tokenizer", "revision", "generation_config", "reasoning_parser"):
            value = getattr(self, name)
            optional = name in ("tokenizer", "revision", "reasoning_parser")
            if not isinstance(value, (str, PathLike)) and not (optional and value is None):
                raise ConfigError(f"{name} must be a string, got {value!r}")
        for declared in fields(self):
            choices, value = declared.metadata.get("choices"), getattr(self, declared.name)
            if choices is not None and value not in choices:
                raise ConfigError(f"{declared.name} must be one of {', '.join(choices)}, got {value!r}")
        if self.kv_events_config is not None:
            if not isinstance(self.kv_events_config, Mapping):
                raise ConfigError(f"kv_events_config must be a mapping, got {self.kv_events_config!r}")
            if KVEventsConfig.parse(self.kv_events_config).is_enabled and not self.enable_prefix_caching:
                raise ConfigError("kv_events_config: without enable_prefix_caching there are no events")
        if not _is_integer(self.max_logprobs) or self.max_logprobs < -1:
            raise ConfigError("max_logprobs must be an integer, -1 for no limit")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def options_table() -> str:
    """Return the Markdown table of engine options for docs/options.md."""
    lines = ["| option | default | |", "|---|---|---|"]
    for declared in fields(EngineConfig):
        if declared.name in ("model", "speculative"):
            continue
        data = declared.metadata
        value = declared.default
        default = data.get("default_text") or (f"`{value}`" if isinstance(value, str) else str(value).lower())
        allowed = ", ".join(f"`{choice}`" for choice in data.get("choices", ()))
        text = f"{data['help']}. One of {allowed}" if allowed else data["help"]
        text += ". `LLM` and `AsyncLLM` only" if data.get("api_only") else ""
        lines.append(f"| `{declared.name}` | {default} | {text} |")
    return "\n".join(lines) + "\n"
