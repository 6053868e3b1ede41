"""Fill in the middle: prompts that have the text before and after the output.

A model for it has tokens that mark the parts. They are found by their texts, or in GGUF metadata.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tokenizers import Tokenizer

Part = Literal["prefix", "suffix"]
Layout = tuple[int | Part, ...]
PREFIX: Part = "prefix"
SUFFIX: Part = "suffix"
PARTS: dict[str, Part] = {PREFIX: PREFIX, SUFFIX: SUFFIX}
# Tokens and parts in the order of the prompt. The first line counts whose tokens the tokenizer has.
FORMATS: tuple[tuple[str, ...], ...] = (
    ("<|fim_prefix|>", PREFIX, "<|fim_suffix|>", SUFFIX, "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", PREFIX, "<fim_suffix>", SUFFIX, "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", PREFIX, "<fim-suffix>", SUFFIX, "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", PREFIX, "<｜fim▁hole｜>", SUFFIX, "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", PREFIX, "▁<SUF>", SUFFIX, "▁<MID>"),  # CodeLlama
    ("<|code_prefix|>", PREFIX, "<|code_suffix|>", SUFFIX, "<|code_middle|>"),  # GLM-4
    ("[SUFFIX]", SUFFIX, "[PREFIX]", PREFIX),  # Codestral
)
# Tokens that end the middle, beside the model's own end tokens.
END_TOKENS = ("<|fim_pad|>", "<|endoftext|>", "<|file_sep|>", "<|file_separator|>", "<file_sep>", "▁<EOT>")
GGUF_KEYS = (("fim_pre", "fim_suf", "fim_mid"), ("prefix", "suffix", "middle"))  # new and old names
MARK = "☺"  # put before a text that must not get an implicit space; no token joins it with the text


@dataclass(frozen=True, slots=True)
class FillInMiddle:
    """Layout of the prompts of one model, and the tokens that end its outputs."""

    layout: Layout
    end_token_ids: tuple[int, ...]

    def token_ids(self, prefix: Sequence[int], suffix: Sequence[int]) -> list[int]:
        """Return the prompt of two parts."""
        parts: dict[Part, Sequence[int]] = {PREFIX: prefix, SUFFIX: suffix}
        ids: list[int] = []
        for part in self.layout:
            ids += [part] if isinstance(part, int) else parts[part]
        return ids


def find_layout(backend: Tokenizer, metadata: Mapping[str, Any] | None = None) -> FillInMiddle | None:
    """Return the layout of a tokenizer, None without the tokens; `metadata`: that of its GGUF file."""
    ends = tuple(i for text in END_TOKENS if (i := backend.token_to_id(text)) is not None)
    for names in GGUF_KEYS:
        keys = [f"tokenizer.ggml.{name}_token_id" for name in names]
        if metadata is not None and all(key in metadata for key in keys):
            before, after, middle = (int(metadata[key]) for key in keys)
            return FillInMiddle((before, PREFIX, after, SUFFIX, middle), ends)
    for texts in FORMATS:
        found = [_resolved(backend, text) for text in texts]
        layout = tuple(part for part in found if part is not None)
        if len(layout) == len(texts):
            return FillInMiddle(layout, ends)
    return None


def _resolved(backend: Tokenizer, text: str) -> int | Part | None:
    """Return a part as it is, a token as its id; None: the tokenizer has no such token."""
    if text in PARTS:
        return PARTS[text]
    found: int | None = backend.token_to_id(text)
    return found


def encode_inside(backend: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a text that follows others, with a tokenizer that puts a space before texts."""
    head = backend.encode(MARK, add_special_tokens=False).ids
    whole = backend.encode(MARK + text, add_special_tokens=False).ids
    if whole[: len(head)] != head:  # the mark is joined with the text
        return list(backend.encode(text, add_special_tokens=False).ids)
    return list(whole[len(head) :])
