"""StructuredOutputs: the format that an output must follow. The fields are those of vLLM.

The options are validated here; `text/grammar` compiles them.
"""

from __future__ import annotations

import json as json_format
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from draftproof.errors import RequestError, nearest

PARAM = "structured_outputs"
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
MAX_SOURCE_CHARS = 1 << 20  # of a schema, regex, grammar, or all choices together


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """Constraint of an output: exactly one of the first six fields; the others are its options."""

    json: str | dict[str, Any] | type | None = None  # a JSON schema, or a pydantic class
    regex: str | None = None  # of the whole output
    choice: Sequence[str] | None = None
    grammar: str | None = None  # EBNF ("root ::= …"), or Lark ("start: …")
    json_object: bool | None = None  # any JSON object
    structural_tag: str | dict[str, Any] | None = None  # free text with constrained sections, as in xgrammar
    reasoning_end: str | int | None = None  # text or token up to which the output is unconstrained
    disable_any_whitespace: bool = False  # JSON: exactly one space after ',' and ':', none elsewhere
    max_whitespace: int | None = None  # JSON: maximum whitespace in one place; None: no limit

    @classmethod
    def parse(cls, value: StructuredOutputs | dict[str, Any] | None) -> StructuredOutputs | None:
        if value is None or isinstance(value, StructuredOutputs):
            return value
        if not isinstance(value, dict):
            raise _error(f"it must be a dict such as {{'json': schema}}, not {value!r}")
        known = {f.name for f in fields(cls)}
        for key in value:
            if key not in known:
                raise _error(f"unknown key {key!r}: {nearest(str(key), known)}")
        return cls(**value)

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) not in (None, False)]
        if len(given) != 1:
            what = f"{given[0]!r} and {given[1]!r} are given" if given else "none is given"
            raise _error(f"exactly one of {', '.join(KINDS)} must be given; {what}")
        for name in ("regex", "grammar"):
            text = getattr(self, name)
            if text is not None and (not isinstance(text, str) or not text):
                raise _error(f"{name} must be a text that is not empty, got {text!r}")
        if self.json_object not in (None, True, False):
            raise _error(f"json_object must be true, got {self.json_object!r}")
        object.__setattr__(self, "json", _schema_text(self.json))
        object.__setattr__(self, "structural_tag", _tag_text(self.structural_tag))
        object.__setattr__(self, "choice", _choices(self.choice))
        source = self.json or self.regex or self.grammar or self.structural_tag or "".join(self.choice or ())
        assert isinstance(source, str)
        if len(source) > MAX_SOURCE_CHARS:
            raise _error(f"{self.kind} has {len(source)} characters, the limit is {MAX_SOURCE_CHARS}")
        _check_text(source)
        self._check_options()

    def _check_options(self) -> None:
        end, limit = self.reasoning_end, self.max_whitespace
        if end is not None and (isinstance(end, bool) or not isinstance(end, (str, int)) or end in ("",)):
            raise _error(f"reasoning_end must be a text or a token id, got {end!r}")
        if isinstance(end, str):
            _check_text(end)
        if not isinstance(self.disable_any_whitespace, bool):
            raise _error(f"disable_any_whitespace must be true or false, got {self.disable_any_whitespace!r}")
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise _error(f"max_whitespace must be an integer of at least 1, got {limit!r}")
        for name in ("disable_any_whitespace", "max_whitespace"):
            if getattr(self, name) and self.kind not in ("json", "json_object"):
                raise _error(f"{name} is for json and json_object; {self.kind} defines its whitespace itself")

    @property
    def kind(self) -> str:
        return next(kind for kind in KINDS if getattr(self, kind) not in (None, False))


def _error(text: str) -> RequestError:
    return RequestError(f"structured_outputs: {text}", PARAM)


def _schema_text(schema: Any) -> str | None:
    """Return a schema as text. The order of its properties is kept: outputs follow it."""
    if schema is None:
        return None
    try:
        if isinstance(schema, type) and hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        if isinstance(schema, str):
            schema = json_format.loads(schema)
        if not isinstance(schema, dict):
            raise _error(
                f"json must be a JSON schema (an object, its text, or a pydantic class), got {schema!r}"
            )
        return json_format.dumps(schema, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, RequestError):
            raise
        raise _error(f"json is not JSON: {error}") from error


def _tag_text(tag: Any) -> str | None:
    """Return a structural tag as text. A mapping with `structures` and `triggers` is vLLM's older form."""
    if tag is None:
        return None
    try:
        value = json_format.loads(tag) if isinstance(tag, str) else tag
        if not isinstance(value, dict):
            raise _error(f"structural_tag must be an object or its text, got {tag!r}")
        if "structures" in value and "triggers" in value:
            tags = [
                {
                    "begin": each["begin"],
                    "content": {"type": "json_schema", "json_schema": each["schema"]},
                    "end": each["end"],
                }
                for each in value["structures"]
            ]
            content = {"type": "triggered_tags", "triggers": value["triggers"], "tags": tags}
            value = {"type": "structural_tag", "format": content}
        return json_format.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError, LookupError) as error:
        if isinstance(error, RequestError):
            raise
        raise _error(f"structural_tag cannot be read: {error!r}") from error


def schemas_of_tag(text: str) -> list[Any]:
    """Return the JSON schemas inside a structural tag, given as text."""
    return [part["json_schema"] for part in _parts_of_tag(text) if "json_schema" in part]


def tokens_of_tag(text: str) -> set[int]:
    """Return the ids of the tokens that a structural tag matches by id."""
    found: list[Any] = []
    for part in _parts_of_tag(text):
        found += [part.get("token"), *part.get("trigger_tokens", ())]
        found += [rule[0] for rule in part.get("rules", ())]
    return {token for token in found if isinstance(token, int)}


def _parts_of_tag(text: str) -> Iterator[dict[str, Any]]:
    """Yield the objects inside a structural tag, without the contents of JSON schemas."""
    pending = [json_format.loads(text)]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            yield value
            if "json_schema" not in value:
                pending += value.values()
        elif isinstance(value, list):
            pending += value


def _choices(choice: Any) -> tuple[str, ...] | None:
    if choice is None:
        return None
    if isinstance(choice, str) or not isinstance(choice, Sequence) or not choice:
        raise _error(f"choice must be a list of texts with at least one in it, got {choice!r}")
    if any(not isinstance(text, str) or not text for text in choice):
        raise _error("choice must hold texts that are not empty")
    return tuple(dict.fromkeys(choice))


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _error(f"it is not valid Unicode: {error}") from error
