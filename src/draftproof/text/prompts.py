"""Prompt forms: text, token ids, mappings, arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from draftproof.errors import RequestError


class TextPrompt(TypedDict):
    """Prompt given as a text, under the name that vLLM has for it."""

    prompt: str
    cache_salt: NotRequired[str | None]


class TokensPrompt(TypedDict):
    """Prompt given as token ids, under the name that vLLM has for it; `prompt` is their text."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str | None]
    cache_salt: NotRequired[str | None]


Prompt = str | Sequence[int] | Mapping[str, Any]


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts, from one prompt or several."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    prompts = _plain(prompts)
    if not isinstance(prompts, Iterable) or isinstance(prompts, (bytes, bytearray)):
        return [prompts]  # `read_prompt` refuses it
    items: list[Any] = [_plain(item) for item in prompts]
    if items and all(isinstance(item, int) for item in items):
        return [items]
    return items


def token_ids(value: Any) -> list[int]:
    """Return the token ids of a prompt that is not a text."""
    value = _plain(value)
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, bytearray)):
        raise RequestError(f"a prompt is a text or a list of token ids, not {value!r}", "prompt")
    ids = list(value)
    return ids if set(map(type, ids)) == {int} else [_plain(item) for item in ids]


def _plain(value: Any) -> Any:
    """Convert arrays, tensors and their scalars to Python values."""
    return value.tolist() if hasattr(value, "tolist") else value
