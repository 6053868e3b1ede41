"""Draftproof: an LLM inference engine in which speculative decoding changes nothing but the speed."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from draftproof.registry import no_collection

if TYPE_CHECKING:
    from draftproof.async_llm import AsyncLLM as AsyncLLM
    from draftproof.config import EngineConfig as EngineConfig
    from draftproof.errors import ConfigError as ConfigError
    from draftproof.errors import DraftproofError as DraftproofError
    from draftproof.errors import EngineClosedError as EngineClosedError
    from draftproof.errors import EngineDeadError as EngineDeadError
    from draftproof.errors import EngineDownError as EngineDownError
    from draftproof.errors import LoadError as LoadError
    from draftproof.errors import QueueFullError as QueueFullError
    from draftproof.errors import RequestError as RequestError
    from draftproof.frontend.beam_search import BeamSearchOutput as BeamSearchOutput
    from draftproof.frontend.beam_search import BeamSearchParams as BeamSearchParams
    from draftproof.frontend.pooler import PoolingParams as PoolingParams
    from draftproof.llm import LLM as LLM
    from draftproof.metrics import EngineStats as EngineStats
    from draftproof.metrics import SpecStats as SpecStats
    from draftproof.outputs import CompletionOutput as CompletionOutput
    from draftproof.outputs import EmbeddingOutput as EmbeddingOutput
    from draftproof.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from draftproof.outputs import Logprob as Logprob
    from draftproof.outputs import RequestOutput as RequestOutput
    from draftproof.outputs import ScoreOutput as ScoreOutput
    from draftproof.outputs import TokenEvent as TokenEvent
    from draftproof.sampling_params import SamplingParams as SamplingParams
    from draftproof.sampling_params import SpeculativeParams as SpeculativeParams
    from draftproof.speculative_config import SpeculativeConfig as SpeculativeConfig
    from draftproof.structured_outputs import StructuredOutputs as StructuredOutputs
    from draftproof.text.prompts import TextPrompt as TextPrompt
    from draftproof.text.prompts import TokensPrompt as TokensPrompt

__version__ = "0.2.0"

_NAMES = {
    "async_llm": ("AsyncLLM",),
    "config": ("EngineConfig",),
    "errors": (
        *("ConfigError", "DraftproofError", "EngineClosedError", "EngineDeadError", "EngineDownError"),
        *("LoadError", "QueueFullError", "RequestError"),
    ),
    "frontend.beam_search": ("BeamSearchOutput", "BeamSearchParams"),
    "frontend.pooler": ("PoolingParams",),
    "llm": ("LLM",),
    "metrics": ("EngineStats", "SpecStats"),
    "outputs": (
        *("CompletionOutput", "EmbeddingOutput", "EmbeddingRequestOutput", "Logprob", "RequestOutput"),
        *("ScoreOutput", "TokenEvent"),
    ),
    "sampling_params": ("SamplingParams", "SpeculativeParams"),
    "speculative_config": ("SpeculativeConfig",),
    "structured_outputs": ("StructuredOutputs",),
    "text.prompts": ("TextPrompt", "TokensPrompt"),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    """Load a public name on first use, so that `draftproof --help` does not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'draftproof' has no attribute {name!r}")
    with no_collection():
        return getattr(import_module(f"draftproof.{_HOMES[name]}"), name)
