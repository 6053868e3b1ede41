"""Regular expressions: differences between the grammar compiler's dialect and the usual one.

The compiler puts the pattern of a JSON string between two quotation marks unchanged. A character that JSON
escapes with a backslash would end or break the string. The compiler excludes such characters from sets, but
not where a pattern names them.
"""

from __future__ import annotations

import re

_CODE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\})")
_NAMED = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "e": "\x1b", "0": "\0"}
_SETS = "dDwWsSpPbBk123456789"  # character classes, anchors and group references


def to_compiler_dialect(regex: str) -> str:
    """Rewrite a regex for the compiler, whose '.' matches newlines and whose codes have any length."""
    out: list[str] = []
    at, inside = 0, False
    while at < len(regex):
        if code := _CODE.match(regex, at):
            out.append(f"\\u{{{code[code.lastindex or 1]}}}")
            at = code.end()
            continue
        size = 2 if regex[at] == "\\" else 1
        part = regex[at : at + size]
        if part == "." and not inside:
            part = r"[^\n\r]"
        inside = part != "]" if inside else regex[at] == "["
        out.append(part)
        at += size
    return "".join(out)


def unescapable_character(pattern: str) -> str | None:
    """Return the first character that a pattern requires and that JSON must escape."""
    at, inside, negated = 0, False, False
    while at < len(pattern):
        if not inside and pattern[at] == "[":
            negated = pattern[at + 1 : at + 2] == "^"
            at, inside = at + 1 + negated, True
            continue
        if inside and pattern[at] == "]":
            at, inside, negated = at + 1, False, False
            continue
        character, at = _read(pattern, at, inside)
        if inside and pattern[at : at + 1] == "-" and pattern[at + 1 : at + 2] not in ("", "]"):
            last, at = _read(pattern, at + 1, inside)
            character = character if _is_escaped(last) else None  # a range that contains other characters
        if not negated and _is_escaped(character):
            return character
    return None


def _read(pattern: str, at: int, inside: bool) -> tuple[str | None, int]:
    """Return the character at `at` (None for a class of characters) and the index of the next."""
    name = pattern[at + 1 : at + 2]
    if pattern[at] != "\\" or not name:
        return pattern[at], at + 1
    if code := _CODE.match(pattern, at):
        return chr(min(int(code[code.lastindex or 1], 16), 0x10FFFF)), code.end()
    if name == "c":
        return "\x01", at + 3
    if name == "b" and inside:
        return "\b", at + 2
    return _NAMED.get(name, None if name in _SETS else name), at + 2


def _is_escaped(character: str | None) -> bool:
    return character is not None and (character in '"\\' or character < " ")
