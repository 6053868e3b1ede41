"""Prompts in every form that users give them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from draftproof.errors import RequestError

Prompt = str | Sequence[int] | Mapping[str, Any]


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as several."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    prompts = _plain(prompts)
    if not isinstance(prompts, Iterable) or isinstance(prompts, (bytes, bytearray)):
        return [prompts]  # refused where single prompts are read
    items: list[Any] = [_plain(item) for item in prompts]
    if items and all(isinstance(item, int) for item in items):
        return [items]
    return items


def token_ids(value: Any) -> list[int]:
    """A prompt that is no text."""
    value = _plain(value)
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, bytearray)):
        raise RequestError(f"a prompt is a text or a list of token ids, not {value!r}", "prompt")
    return [_plain(item) for item in value]


def _plain(value: Any) -> Any:
    """Arrays and tensors, and numbers out of them, as Python has them."""
    return value.tolist() if hasattr(value, "tolist") else value
