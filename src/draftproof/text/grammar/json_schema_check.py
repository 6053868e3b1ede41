"""JSON schemas: check that the grammar compiler enforces all of a schema.

The compiler silently ignores some keywords, and an output that only seems to follow its schema is worse than
a refusal. A schema with a keyword that would be ignored is refused here, with its name and place. Annotations
(title, default, examples, unknown formats, …) constrain nothing and are accepted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from draftproof.text.grammar.regex_dialect import unescapable_character

_IGNORED = (
    *("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"),
    *("contains", "minContains", "maxContains", "$dynamicRef", "$recursiveRef"),
)
_NUMBER = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_STRING = ("minLength", "maxLength", "pattern")
_ARRAY = ("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems")
_OBJECT = (
    *("properties", "patternProperties", "additionalProperties", "unevaluatedProperties"),
    *("propertyNames", "required", "minProperties", "maxProperties"),
)
_SIZES = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
# without a type the compiler enforces the first if one of the second implies an array or object
_IMPLIED = (
    (("minItems", "maxItems"), ("items", "prefixItems", "unevaluatedItems")),
    (
        ("patternProperties", "propertyNames", "minProperties", "maxProperties"),
        ("properties", "additionalProperties", "unevaluatedProperties"),
    ),
)
_ASSERTS = {"type", *_NUMBER, *_STRING, *_ARRAY, *_OBJECT}
# other keywords beside one of these are ignored
_EXCLUSIVE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
# keywords whose value has schemas by name, is one, or is a list of them
SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
SCHEMA_VALUES = (
    "items",
    "additionalProperties",
    "unevaluatedItems",
    "unevaluatedProperties",
    "propertyNames",
)
SCHEMA_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}
_MAX_DEPTH = 200


def not_enforced(schema: Any) -> str | None:
    """Return the first part of a schema that would not be enforced, with its place; None if there is none."""
    return next(_problems(schema, "#", 0), None)


def _problems(schema: Any, where: str, depth: int) -> Iterator[str]:
    if depth > _MAX_DEPTH:
        yield f"{where}: schemas are nested more than {_MAX_DEPTH} deep"
        return
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        yield f"{where}: a schema is an object, not {type(schema).__name__}"
        return
    yield from (f"{where}: {text}" for text in _schema_problems(schema))
    for key in SCHEMA_MAPS:
        if isinstance(schema.get(key), dict):
            for name, part in schema[key].items():
                yield from _problems(part, f"{where}/{key}/{name}", depth + 1)
    for key in SCHEMA_VALUES:
        if key in schema:
            yield from _problems(schema[key], f"{where}/{key}", depth + 1)
    for key in SCHEMA_LISTS:
        if isinstance(schema.get(key), list):
            for number, part in enumerate(schema[key]):
                yield from _problems(part, f"{where}/{key}/{number}", depth + 1)


def _schema_problems(schema: dict[str, Any]) -> Iterator[str]:
    for key in _IGNORED:
        if key in schema:
            yield f"{key!r} is not supported"
    if schema.get("uniqueItems"):
        yield "'uniqueItems' is not supported"
    reference = schema.get("$ref")
    if reference is not None and not (isinstance(reference, str) and (reference + "/").startswith("#/")):
        yield f"'$ref' must point into this schema ('#' or '#/…'), not to {reference!r}"
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        yield "'allOf' of several schemas is not supported: merge them"
    for key in ("anyOf", "type"):
        if schema.get(key) == []:
            yield f"{key!r} is empty"
    for key in _SIZES:
        if isinstance(schema.get(key), (int, float)) and schema[key] < 0:
            yield f"{key!r} is negative"
    named = schema.get("patternProperties")
    for pattern in (schema.get("pattern"), *(named if isinstance(named, dict) else ())):
        if isinstance(pattern, str) and (character := unescapable_character(pattern)) is not None:
            yield f"a pattern with {character!r}, which JSON writes with a backslash, is not supported"
    yield from _siblings(schema)
    yield from _typeless(schema)
    yield from _objects(schema)


def _siblings(schema: dict[str, Any]) -> Iterator[str]:
    alone = [key for key in _EXCLUSIVE if key in schema]
    if len(alone) > 1:
        yield f"{alone[0]!r} beside {alone[1]!r} is not supported"
    if not alone:
        return
    literal = alone[0] in ("const", "enum")
    beside = sorted(_ASSERTS & schema.keys() - ({"type"} if literal else set()))
    if beside:
        yield f"{beside[0]!r} beside {alone[0]!r} would be ignored: move it inside"
    if literal and "type" in schema:
        values = schema["enum"] if alone[0] == "enum" else [schema["const"]]
        for value in values if isinstance(values, list) else []:
            if not _is_of(value, _types(schema)):
                yield f"{value!r} is not of the 'type' beside it"


def _typeless(schema: dict[str, Any]) -> Iterator[str]:
    """Yield bounds without a type: they are enforced only where the type is given or implied."""
    if "type" in schema or any(key in schema for key in _EXCLUSIVE):
        return
    for key in (*_NUMBER, *_STRING):
        if key in schema:
            yield f"{key!r} needs a 'type' beside it"
    for keys, signs in _IMPLIED:
        for key in keys:
            if key in schema and not any(sign in schema for sign in signs):
                yield f"{key!r} needs a 'type' beside it"


def _objects(schema: dict[str, Any]) -> Iterator[str]:
    listed = schema.get("properties", {})
    required = schema.get("required", [])
    if not isinstance(listed, dict) or not isinstance(required, list):
        yield "'properties' must be an object and 'required' a list"
        return
    missing = [name for name in required if name not in listed]
    if missing:
        yield f"'required' names {missing[0]!r}, which is not among 'properties'"
    names = [key for key in ("patternProperties", "propertyNames", "properties") if schema.get(key)]
    if len(names) > 1:
        yield f"{names[0]!r} beside {names[1]!r} is not supported"
    for key in ("additionalProperties", "unevaluatedProperties"):
        if "propertyNames" in schema and schema.get(key) is False:
            yield f"{key!r}: false beside 'propertyNames' would be ignored: list the 'properties' instead"
    minimum = schema.get("minProperties", 0)
    if isinstance(minimum, int) and minimum > len(listed):  # a key may be written twice
        yield "'minProperties' beyond the listed 'properties' is not supported"


def _types(schema: dict[str, Any]) -> list[str]:
    found = schema.get("type", [])
    return [found] if isinstance(found, str) else list(found)


def _is_of(value: Any, types: list[str]) -> bool:
    for name in types:
        if isinstance(value, _TYPES.get(name, ())) and (name == "boolean" or not isinstance(value, bool)):
            return True
    return False
