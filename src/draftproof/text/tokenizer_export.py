"""Tokenizer of a GGUF file, written as the files that other tools load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftproof.text.tokenizer import load_tokenizer


def write_tokenizer(source: Path, folder: Path) -> None:
    """Write the tokenizer of a GGUF file as tokenizer.json with its settings."""
    tokenizer = load_tokenizer(source)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens}
    if tokenizer.chat_template is not None:
        settings["chat_template"] = tokenizer.chat_template.source
    _write_json(folder / "tokenizer_config.json", settings)
    ids = list(tokenizer.eos_token_ids)
    _write_json(
        folder / "generation_config.json", {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": ids}
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
