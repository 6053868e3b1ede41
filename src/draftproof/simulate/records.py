"""Recorded requests, from JSON lines: ids as they are, or texts and a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftproof.errors import RequestError
from draftproof.text.tokenizer import Tokenizer

MOST_IDS = 1 << 22  # of a vocabulary: some columns are as wide


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request and what came of it."""

    prompt: Sequence[int]
    output: Sequence[int]
    task: str = ""
    salt: str | None = None
    prediction: Sequence[int] = ()


def read(path: Path, tokenizer: Tokenizer | None = None) -> list[Recorded]:
    """Lines with prompt_token_ids and token_ids, or prompt and text; also task, cache_salt, prediction."""
    try:
        lines = path.read_text("utf-8").split("\n")  # other ends of lines may stand in a JSON text
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read {path}: {error}") from error
    found = [_line(line, tokenizer, f"{path}:{i}") for i, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise RequestError(f"{path} holds no request")
    return found


def _line(line: str, tokenizer: Tokenizer | None, where: str) -> Recorded:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise RequestError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise RequestError(f"{where}: an object is wanted, one a line")
    prompt = _ids(row, "prompt_token_ids", "prompt", tokenizer, where, begins=True)
    output = _ids(row, "token_ids", "text", tokenizer, where)
    guess: Sequence[int] = ()
    if "prediction" in row or "prediction_token_ids" in row:
        guess = _ids(row, "prediction_token_ids", "prediction", tokenizer, where)
    if not prompt or not output:
        raise RequestError(f"{where}: prompt and output need a token at least")
    salt, task = row.get("cache_salt"), row.get("task", "")
    if not isinstance(task, str) or not (salt is None or isinstance(salt, str)):
        raise RequestError(f"{where}: task and cache_salt are texts")
    return Recorded(prompt, output, task, salt, guess)


def _ids(
    row: dict[str, Any], ids: str, text: str, tokenizer: Tokenizer | None, where: str, begins: bool = False
) -> list[int]:
    """`begins`: special tokens belong before such a text."""
    if ids in row:
        value = row[ids]
        if not isinstance(value, list) or any(
            isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < MOST_IDS for i in value
        ):
            raise RequestError(f"{where}: {ids} must be a list of token ids, in 0..{MOST_IDS - 1}")
        return value
    if not isinstance(row.get(text), str):
        raise RequestError(f"{where}: neither {ids} nor {text} is there")
    if tokenizer is None:
        raise RequestError(f"{where}: {text} is a text; --tokenizer MODEL says how it is cut into tokens")
    return tokenizer.encode(row[text], add_special_tokens=begins)
