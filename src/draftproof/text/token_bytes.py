"""Token bytes: the bytes that each token of a vocabulary adds to the text.

The decoders of the Llama family are context-free: every token maps to some bytes, the text is their
concatenation decoded as UTF-8, and at most a leading space is dropped. Decoding therefore needs no look-back,
and streamed text equals the text decoded at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from draftproof.errors import LoadError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class ByteDecoder:
    """Conversion of a token's string to bytes, and the leading spaces that the text loses."""

    to_bytes: Callable[[str], bytes]
    strip_left: int


def byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's printable characters for the 256 bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in shown}
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    table.update({chr(256 + i): byte for i, byte in enumerate(hidden)})
    return table


def byte_decoder(decoder: Any) -> ByteDecoder:
    """Build from a `tokenizers` decoder; LoadError if it is not context-free."""
    if decoder is None:  # tokens are words, joined by spaces
        return ByteDecoder(lambda token: b" " + token.encode(), 1)
    spec = json.loads(decoder.__getstate__())
    steps = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    edits: list[tuple[str, str]] = []
    byte_level = fallback = False
    strip_left = 0
    for step in steps:
        kind = step["type"]
        if kind == "ByteLevel":
            byte_level = True
        elif kind == "ByteFallback":
            fallback = True
        elif kind == "Replace" and "String" in step["pattern"]:
            edits.append((step["pattern"]["String"], step["content"]))
        elif kind == "Metaspace":
            edits.append((step["replacement"], " "))
            strip_left += step.get("prepend_scheme", "always") != "never"
        elif kind == "Strip" and step["content"] == " " and not step["stop"]:
            strip_left += step["start"]
        elif kind != "Fuse":
            raise LoadError(f"the tokenizer's decoder has a step that is not supported: {step}")
    alphabet = byte_level_alphabet() if byte_level else {}

    def to_bytes(token: str) -> bytes:
        for old, new in edits:
            token = token.replace(old, new)
        if fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        # A token with any other character was added as plain text.
        if byte_level and all(character in alphabet for character in token):
            return bytes(alphabet[character] for character in token)
        return token.encode("utf-8", errors="replace")

    return ByteDecoder(to_bytes, strip_left)
