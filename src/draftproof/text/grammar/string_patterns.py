"""String schemas that the grammar compiler does not enforce as they are, rewritten as patterns that it does.

The compiler ignores `minLength` and `maxLength` beside a `pattern`, and its `ipv4` and `ipv6` allow leading
zeros. A pattern of characters, sets and groups in which one part has a variable length is rewritten with the
bounds of that part. Other patterns stay as they are, and the compiler's warning becomes a refusal.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from draftproof.text.grammar.json_schema_check import SCHEMA_LISTS, SCHEMA_MAPS, SCHEMA_VALUES

_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"({_OCTET}\.){{3}}{_OCTET}"
_GROUP = "[0-9a-fA-F]{1,4}"
_IPV6 = "|".join(
    [
        f"({_GROUP}:){{7}}{_GROUP}",
        *(f"({_GROUP}:){{1,{7 - n}}}(:{_GROUP}){{1,{n}}}" for n in range(1, 7)),
        f"({_GROUP}:){{1,7}}:",
        f":((:{_GROUP}){{1,7}}|:)",
        f"::([fF]{{4}}:)?{_IPV4}",
        f"({_GROUP}:){{6}}{_IPV4}",
    ]
)
FORMAT_PATTERNS = {"ipv4": f"^({_IPV4})$", "ipv6": f"^({_IPV6})$"}
_LENGTHS = ("minLength", "maxLength")
_ATOM = re.compile(
    r"\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}|\\[dDwWsS.^$*+?(){}\[\]|/\-]"  # escapes
    r"|\[(?:\\.|[^\]\\])+\]"  # sets
    r"|[^\\\[\](){}|^$*+?]"
)
_QUANTIFIER = re.compile(r"[*+?]|\{(\d+)(,?)(\d*)\}")
_MAX_BOUND = 1 << 20
_MAX_DEPTH = 50  # of groups
ONCE: tuple[int, int | None] = (1, 1)


class _Part(NamedTuple):
    """Atom of a pattern, repeated; `width`: characters of one repetition."""

    text: str
    width: tuple[int, int | None]
    repeat: tuple[int, int | None]


def rewrite_strings(source: str, is_tag: bool = False) -> str:
    """Return a schema, or a structural tag with schemas, in which string schemas are rewritten."""
    value = json.loads(source)
    return json.dumps(_rewrite_tag(value) if is_tag else _rewrite(value), ensure_ascii=False)


def _rewrite_tag(value: Any) -> Any:
    if isinstance(value, list):
        return [_rewrite_tag(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _rewrite(item) if key == "json_schema" else _rewrite_tag(item) for key, item in value.items()
    }


def _rewrite(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for key in SCHEMA_MAPS:
        if isinstance(made.get(key), dict):
            made[key] = {name: _rewrite(part) for name, part in made[key].items()}
    for key in SCHEMA_VALUES:
        if key in made:
            made[key] = _rewrite(made[key])
    for key in SCHEMA_LISTS:
        if isinstance(made.get(key), list):
            made[key] = [_rewrite(part) for part in made[key]]
    return _rewrite_string(made) if made.get("type") == "string" else made


def _rewrite_string(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema of strings with its format or lengths as part of the pattern."""
    if "pattern" not in schema and schema.get("format") in FORMAT_PATTERNS:
        rest = {key: item for key, item in schema.items() if key != "format"}
        schema = {**rest, "pattern": FORMAT_PATTERNS[schema["format"]]}
    lowest, highest = schema.get("minLength", 0), schema.get("maxLength")
    sizes = [lowest, 0 if highest is None else highest]
    if not isinstance(schema.get("pattern"), str) or any(type(size) is not int for size in sizes):
        return schema
    pattern = bounded_pattern(schema["pattern"], lowest, highest)
    if pattern is None or not schema.keys() & set(_LENGTHS):
        return schema
    return {**{key: item for key, item in schema.items() if key not in _LENGTHS}, "pattern": pattern}


def bounded_pattern(pattern: str, lowest: int, highest: int | None) -> str | None:
    """Return a pattern of the same texts with `lowest` to `highest` characters; None if that is not possible.

    As in the compiler, a pattern describes the whole text.
    """
    body = pattern.removeprefix("^")
    if body.endswith("$") and not body.endswith("\\$"):
        body = body[:-1]
    parsed = _parse(body, 0)
    if parsed is None or parsed[1] != len(body):
        return None
    alternatives = parsed[0]
    shortest, longest = _width(alternatives)
    if shortest >= lowest and (highest is None or (longest is not None and longest <= highest)):
        return f"^({body})$"
    parts = alternatives[0]
    variable = [i for i, part in enumerate(parts) if part.repeat[0] != part.repeat[1]]
    if len(alternatives) > 1 or len(variable) != 1 or any(part.width[0] != part.width[1] for part in parts):
        return None
    at = variable[0]
    size, (least, most) = parts[at].width[0], parts[at].repeat
    fixed = sum(part.width[0] * part.repeat[0] for i, part in enumerate(parts) if i != at)
    if size == 0:
        return None
    least = max(least, -(-(lowest - fixed) // size))
    if highest is not None:
        most = (highest - fixed) // size if most is None else min(most, (highest - fixed) // size)
    if most is not None and most < least:
        return None
    texts = [_repeated(part.text, part.repeat) for part in parts]
    texts[at] = _repeated(parts[at].text, (least, most))
    return f"^{''.join(texts)}$"


def _repeated(text: str, repeat: tuple[int, int | None]) -> str:
    least, most = repeat
    return text if repeat == ONCE else f"{text}{{{least},{'' if most is None else most}}}"


def _parse(text: str, at: int, depth: int = 0) -> tuple[list[list[_Part]], int] | None:
    """Return the alternatives of a pattern, and where they end; None for what is not handled."""
    alternatives: list[list[_Part]] = [[]]
    while at < len(text) and text[at] != ")":
        if text[at] == "|":
            alternatives.append([])
            at += 1
            continue
        start = at
        if text[at] == "(":
            inside = at + (3 if text.startswith("(?:", at) else 1)
            found = _parse(text, inside, depth + 1) if depth < _MAX_DEPTH else None
            if text.startswith("?", inside) or found is None or text[found[1] : found[1] + 1] != ")":
                return None
            width, at = _width(found[0]), found[1] + 1
        elif atom := _ATOM.match(text, at):
            width, at = ONCE, atom.end()
        else:
            return None
        part, repeat = text[start:at], ONCE
        if quantifier := _QUANTIFIER.match(text, at):
            repeat, at = _bounds(quantifier), quantifier.end()
        if text[at : at + 1] in ("?", "+", "*", "{") or max(repeat[0], repeat[1] or 0) > _MAX_BOUND:
            return None
        alternatives[-1].append(_Part(part, width, repeat))
    return alternatives, at


def _bounds(quantifier: re.Match[str]) -> tuple[int, int | None]:
    simple = {"*": (0, None), "+": (1, None), "?": (0, 1)}
    if quantifier[0] in simple:
        return simple[quantifier[0]]
    least = int(quantifier[1])
    return least, int(quantifier[3]) if quantifier[3] else None if quantifier[2] else least


def _width(alternatives: list[list[_Part]]) -> tuple[int, int | None]:
    """Return the smallest and largest number of characters; None: no limit."""
    shortest, longest = [], []
    for parts in alternatives:
        shortest.append(sum(part.width[0] * part.repeat[0] for part in parts))
        sizes = [
            0
            if 0 in (part.width[1], part.repeat[1])
            else None
            if part.width[1] is None or part.repeat[1] is None
            else part.width[1] * part.repeat[1]
            for part in parts
        ]
        longest.append(None if None in sizes else sum(filter(None, sizes)))
    known = [size for size in longest if size is not None]
    return min(shortest), max(known) if len(known) == len(longest) else None
