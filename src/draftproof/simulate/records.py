"""Recorded requests, from JSON lines: ids as they are, or texts and a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftproof.errors import RequestError
from draftproof.text.tokenizer import Tokenizer

MAX_VOCAB_IDS = 1 << 22  # some columns have one entry per id


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request and its output."""

    prompt: Sequence[int]
    output: Sequence[int]
    task: str = ""
    salt: str | None = None
    prediction: Sequence[int] = ()


def read_records(path: Path, tokenizer: Tokenizer | None = None) -> list[RecordedRequest]:
    """Read lines with prompt_token_ids and token_ids, or prompt and text; task, cache_salt, prediction."""
    try:
        lines = path.read_text("utf-8").split("\n")  # a JSON string may contain other line ends
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read {path}: {error}") from error
    found = [_line(line, tokenizer, f"{path}:{i}") for i, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise RequestError(f"{path} holds no request")
    return found


def _line(line: str, tokenizer: Tokenizer | None, where: str) -> RecordedRequest:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise RequestError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise RequestError(f"{where}: one JSON object per line is expected")
    prompt = _ids(row, "prompt_token_ids", "prompt", tokenizer, where, is_prompt=True)
    output = _ids(row, "token_ids", "text", tokenizer, where)
    prediction: Sequence[int] = ()
    if "prediction" in row or "prediction_token_ids" in row:
        prediction = _ids(row, "prediction_token_ids", "prediction", tokenizer, where)
    if not prompt or not output:
        raise RequestError(f"{where}: prompt and output need at least one token")
    salt, task = row.get("cache_salt"), row.get("task", "")
    if not isinstance(task, str) or not (salt is None or isinstance(salt, str)):
        raise RequestError(f"{where}: task and cache_salt are texts")
    return RecordedRequest(prompt, output, task, salt, prediction)


def _ids(
    row: dict[str, Any], ids: str, text: str, tokenizer: Tokenizer | None, where: str, is_prompt: bool = False
) -> list[int]:
    if ids in row:
        value = row[ids]
        if not isinstance(value, list) or any(
            isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < MAX_VOCAB_IDS for i in value
        ):
            raise RequestError(f"{where}: {ids} must be a list of token ids, in 0..{MAX_VOCAB_IDS - 1}")
        return value
    if not isinstance(row.get(text), str):
        raise RequestError(f"{where}: it has neither {ids} nor {text}")
    if tokenizer is None:
        raise RequestError(f"{where}: {text} is a text and needs --tokenizer MODEL")
    return tokenizer.encode(row[text], add_special_tokens=is_prompt)
