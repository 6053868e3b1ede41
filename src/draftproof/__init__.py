"""Draftproof: an LLM inference engine in which speculative decoding changes nothing but the speed."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftproof.async_llm import AsyncLLM
    from draftproof.config import EngineConfig
    from draftproof.errors import (
        ConfigError,
        DraftproofError,
        EngineClosedError,
        EngineDeadError,
        EngineDownError,
        LoadError,
        QueueFullError,
        RequestError,
    )
    from draftproof.llm import LLM
    from draftproof.metrics import EngineStats, SpecStats
    from draftproof.outputs import CompletionOutput, Logprob, RequestOutput, TokenEvent
    from draftproof.sampling_params import SamplingParams, SpeculativeParams
    from draftproof.speculative_config import SpeculativeConfig
    from draftproof.structured_outputs import StructuredOutputs

__version__ = "0.2.0"

_HOMES = {
    "AsyncLLM": "async_llm",
    "CompletionOutput": "outputs",
    "ConfigError": "errors",
    "DraftproofError": "errors",
    "EngineClosedError": "errors",
    "EngineConfig": "config",
    "EngineDeadError": "errors",
    "EngineDownError": "errors",
    "EngineStats": "metrics",
    "LLM": "llm",
    "LoadError": "errors",
    "Logprob": "outputs",
    "QueueFullError": "errors",
    "RequestError": "errors",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
    "SpecStats": "metrics",
    "SpeculativeConfig": "speculative_config",
    "SpeculativeParams": "sampling_params",
    "StructuredOutputs": "structured_outputs",
    "TokenEvent": "outputs",
}
__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "ConfigError",
    "DraftproofError",
    "EngineClosedError",
    "EngineConfig",
    "EngineDeadError",
    "EngineDownError",
    "EngineStats",
    "LoadError",
    "Logprob",
    "QueueFullError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SpecStats",
    "SpeculativeConfig",
    "SpeculativeParams",
    "StructuredOutputs",
    "TokenEvent",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Public names load on first use: `draftproof --help` should not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'draftproof' has no attribute {name!r}")
    return getattr(import_module(f"draftproof.{_HOMES[name]}"), name)
