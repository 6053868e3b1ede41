"""Text that a grammar is likely to produce, drafted where it continues the output.

Keys, names and markers are the grammar's. A value is an example of its type; behind the value of the output
the search finds the next key. As with any draft, a wrong one costs time and changes no output.
"""

from __future__ import annotations

import json
from typing import Any

from draftproof.structured_outputs import StructuredOutputs

MAX_DEPTH = 8  # of nested schemas and references
VALUES = {"string": '"text"', "integer": "1", "number": "1.0", "boolean": "true", "null": "null"}
Parts = list[str | int]  # texts, and special tokens by id


def draft_parts(outputs: StructuredOutputs) -> Parts:
    """Return the likely text of a JSON schema or structural tag; empty for other grammars."""
    if outputs.json is not None:
        schema = json.loads(str(outputs.json))
        return [_value_text(schema, schema, 0)]
    if outputs.structural_tag is not None:
        return _joined(_format_parts(json.loads(str(outputs.structural_tag)).get("format")))
    return []


def _joined(parts: Parts) -> Parts:
    """Return the parts with neighbouring texts joined."""
    found: Parts = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, str) and isinstance(last, str):
            found[-1] = last + part
        else:
            found.append(part)
    return found


def _format_parts(part: Any) -> Parts:
    """Return the likely text of a part of a structural tag, all alternatives one after another."""
    if isinstance(part, list):
        return [each for element in part for each in _format_parts(element)]
    if not isinstance(part, dict):
        return []
    kind = part.get("type")
    if kind == "const_string":
        return [str(part["value"])]
    if kind == "json_schema":
        return [_value_text(part["json_schema"], part["json_schema"], 0)]
    if kind == "token":
        return [part["token"]] if isinstance(part["token"], int) else []
    if kind in ("dispatch", "token_dispatch"):
        return [each for trigger, content in part["rules"] for each in (trigger, *_format_parts(content))]
    if kind in ("tag", None) and "begin" in part:
        begin, end = (
            [each] if isinstance(each, str) else _format_parts(each) for each in (part["begin"], part["end"])
        )
        return [*begin, *_format_parts(part.get("content")), *end]
    return _format_parts(part.get("elements") or part.get("tags") or part.get("content"))


def _value_text(schema: Any, root: Any, depth: int) -> str:
    """Return an example of a schema as JSON text."""
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return "{}"
    if "const" in schema or schema.get("enum"):
        value = schema["const"] if "const" in schema else schema["enum"][0]
        return json.dumps(value, ensure_ascii=False)
    if isinstance(schema.get("$ref"), str):
        target = root
        for key in schema["$ref"].removeprefix("#").strip("/").split("/"):
            target = target.get(key) if key and isinstance(target, dict) else target
        return _value_text(target, root, depth + 1)
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return _value_text(schema[key][0], root, depth + 1)
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if kind == "array":
        return f"[{_value_text(schema.get('items', {'type': 'string'}), root, depth + 1)}]"
    if isinstance(kind, str) and kind in VALUES:
        return VALUES[kind]
    members = (
        f"{json.dumps(key, ensure_ascii=False)}: {_value_text(value, root, depth + 1)}"
        for key, value in (schema.get("properties") or {}).items()
    )
    return "{" + ", ".join(members) + "}"
