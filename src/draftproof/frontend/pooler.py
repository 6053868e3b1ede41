"""Embeddings: options of a request, and the pooling of hidden rows as the model's own files define it.

A folder in the format of sentence-transformers has modules.json and the configuration of its pooling. Without
them the last row is the embedding, normalised to length 1, as in vLLM. Free of torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from draftproof.array_types import Floats32
from draftproof.config import EngineConfig
from draftproof.errors import LoadError, RequestError
from draftproof.frontend.continuation_scores import check_finished
from draftproof.models.config import read_json
from draftproof.models.gguf.file import GGUFFile, is_gguf, read_gguf
from draftproof.outputs import EmbeddingOutput, EmbeddingRequestOutput, RequestOutput
from draftproof.sampling_params import SamplingParams
from draftproof.types import PoolingType

MODES: dict[str, PoolingType] = {"lasttoken": "last", "last": "last", "mean_tokens": "mean", "mean": "mean"}
GGUF_POOLING_TYPES = {1: "mean", 2: "cls", 3: "last", 4: "rank"}  # as llama.cpp numbers them
POOLING_OPTION = "set pooling_type to 'last' or 'mean' if the model was trained for it"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """Options of one embedding, frozen and valid once built."""

    dimensions: int | None = None  # keep the first ones, of a model that was trained for it
    normalize: bool | None = None  # to length 1; None: as the model's configuration has it
    truncate_prompt_tokens: int | None = None  # keep the last k tokens; -1: as many as the model can take
    priority: int = 0  # smaller ones are scheduled first
    cache_salt: str | None = None  # only requests with the same salt share cached prefixes

    def __post_init__(self) -> None:
        """Check every option."""
        count = self.dimensions
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise RequestError(f"dimensions must be a positive integer, got {count!r}", "dimensions")
        if self.normalize is not None and not isinstance(self.normalize, bool):
            raise RequestError(f"normalize must be true or false, got {self.normalize!r}", "normalize")
        self.sampling_params()

    def sampling_params(self) -> SamplingParams:
        """Return the options of the engine's request, which samples one token that has no use."""
        return SamplingParams(
            temperature=0,
            max_tokens=1,
            detokenize=False,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            priority=self.priority,
            cache_salt=self.cache_salt,
        )


@dataclass(frozen=True, slots=True)
class Pooler:
    """Pooling of a model."""

    size: int = 0  # dimensions of an embedding
    pooling_type: PoolingType = "last"
    normalize: bool = True
    is_matryoshka: bool = False  # the first dimensions are embeddings themselves
    is_embedding_model: bool = False  # the model's files or an option define the pooling
    matryoshka_dimensions: tuple[int, ...] = ()  # allowed numbers of them; empty: any
    refusal: str | None = None  # reason why the embeddings of this model are not available

    def check(self, params: PoolingParams) -> None:
        """Raise RequestError if an embedding with these options is not available."""
        if self.refusal is not None:
            raise RequestError(f"embeddings of this model are not available: {self.refusal}")
        if params.dimensions is None:
            return
        if not self.is_matryoshka:
            text = "dimensions needs a model with is_matryoshka or matryoshka_dimensions in config.json"
            raise RequestError(f"{text}: leave it out", "dimensions")
        if params.dimensions > self.size:
            text = f"dimensions={params.dimensions} is more than the {self.size} of the model"
            raise RequestError(text, "dimensions")
        allowed = self.matryoshka_dimensions
        if allowed and params.dimensions not in allowed:
            text = f"dimensions={params.dimensions} is none of the model's {', '.join(map(str, allowed))}"
            raise RequestError(text, "dimensions")

    def output(self, result: RequestOutput, params: PoolingParams) -> EmbeddingRequestOutput:
        """Return the embedding of a finished request."""
        check_finished(result)
        assert result.embedding is not None
        return EmbeddingRequestOutput(
            request_id=result.request_id,
            outputs=EmbeddingOutput(self._finish(result.embedding, params).tolist()),
            prompt_token_ids=result.prompt_token_ids,
            num_cached_tokens=result.num_cached_tokens,
            weights_version=result.weights_version,
        )

    def _finish(self, pooled: Floats32, params: PoolingParams) -> Floats32:
        """Return the first dimensions of a pooled row [hidden], normalised."""
        kept = pooled[: params.dimensions]
        if not (self.normalize if params.normalize is None else params.normalize):
            return kept
        length = np.sqrt(np.square(kept, dtype=np.float64).sum())
        return kept if length == 0 else (kept / length).astype(np.float32)


def read_pooler(
    config: EngineConfig, size: int, source: Path | None, header: GGUFFile | None = None
) -> Pooler:
    """Return the pooling of the model at `source`; options of the engine replace what its files define.

    `header`: that of a GGUF file, if it has been read.
    """
    pooler = Pooler()
    if source is not None and source.is_file() and is_gguf(source):
        pooler = _from_gguf(header or read_gguf(source))
    elif source is not None:
        pooler = _from_folder(source)
    if config.pooling_type != "auto":
        refusal = None if pooler.refusal is None or POOLING_OPTION in pooler.refusal else pooler.refusal
        kind: Any = config.pooling_type
        pooler = replace(pooler, pooling_type=kind, refusal=refusal, is_embedding_model=True)
    if config.normalize_embeddings is not None:
        pooler = replace(pooler, normalize=config.normalize_embeddings)
    return replace(pooler, size=size)


def _from_gguf(header: GGUFFile) -> Pooler:
    meta = header.metadata
    number = meta.get(f"{meta.get('general.architecture')}.pooling_type", 0)
    return (
        Pooler() if number in (0, None) else _with_mode(Pooler(), str(GGUF_POOLING_TYPES.get(number, number)))
    )


def _from_folder(folder: Path) -> Pooler:
    settings = folder / "config.json"
    raw = read_json(settings) if settings.exists() else {}
    sizes = tuple(sorted(raw.get("matryoshka_dimensions") or ()))
    pooler = Pooler(is_matryoshka=bool(sizes or raw.get("is_matryoshka")), matryoshka_dimensions=sizes)
    if raw.get("is_causal") is False or raw.get("use_bidirectional_attention"):
        return replace(pooler, refusal="its attention is not causal, and only causal attention is supported")
    path = folder / "modules.json"
    if not path.exists():
        return pooler
    try:
        modules = [
            (str(m["type"]).rsplit(".", 1)[-1], m["path"]) for m in json.loads(path.read_text("utf-8"))
        ]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise LoadError(f"{path}: not the modules of sentence-transformers: {error!r}") from error
    pooler = replace(pooler, normalize=any(name == "Normalize" for name, _ in modules))
    for name, where in modules:
        if name == "Pooling":
            pooler = _with_mode(pooler, _mode(read_json(folder / where / "config.json")))
        elif name not in ("Transformer", "Normalize"):
            return replace(pooler, refusal=f"modules.json has a module {name}, which is not supported")
    return pooler


def _mode(pooling: dict[str, Any]) -> str:
    """Return the mode of a pooling configuration of sentence-transformers; several are joined by `+`."""
    if isinstance(pooling.get("pooling_mode"), str):
        return str(pooling["pooling_mode"])
    names = [key.removeprefix("pooling_mode_") for key, value in pooling.items() if value is True]
    return "+".join(name for name in names if name != "include_prompt")


def _with_mode(pooler: Pooler, mode: str) -> Pooler:
    if mode in MODES:
        return replace(pooler, pooling_type=MODES[mode], is_embedding_model=True)
    return replace(pooler, refusal=f"pooling {mode!r} is not supported; {POOLING_OPTION}")


def pooling_params_for(
    prompts: Sequence[object], params: PoolingParams | Sequence[PoolingParams] | None
) -> list[PoolingParams]:
    """Return one PoolingParams for each prompt, from one for all or a list."""
    if params is None or isinstance(params, PoolingParams):
        return [params or PoolingParams()] * len(prompts)
    if isinstance(params, Mapping) or not all(isinstance(p, PoolingParams) for p in params):
        raise RequestError(f"pooling_params must be PoolingParams, one or a list, not {params!r}")
    if len(params) != len(prompts):
        raise RequestError(f"{len(prompts)} prompts but {len(params)} pooling_params: give one, or one each")
    return list(params)
