"""Structured outputs: accepted and refused options, schemas and regexes, limits of the compiler process."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import xgrammar

import grammars
import tiny
from draftproof.errors import RequestError
from draftproof.sampling_params import SamplingParams
from draftproof.structured_outputs import MAX_SOURCE_CHARS, StructuredOutputs
from draftproof.text.grammar import compiler as text_grammar
from draftproof.text.grammar import worker
from draftproof.text.grammar.compiler import GrammarCompiler
from draftproof.text.grammar.json_schema_check import not_enforced
from draftproof.text.grammar.process import GrammarProcess
from draftproof.text.grammar.reasoning import ReasoningEnd
from grammars import EOS, TINY

VOCABULARY = [b"" if i in TINY.special_ids else TINY.token_bytes(i) for i in range(tiny.VOCAB)]


def compiled(**wanted: Any) -> Any:
    return grammars.grammars().compile(SamplingParams(structured_outputs=wanted))


def matches(text: str, **wanted: Any) -> bool:
    """Return whether the text is a complete output."""
    matcher = xgrammar.GrammarMatcher(compiled(**wanted).compiled)
    return bool(matcher.accept_string(text) and matcher.is_completed())


# --- shapes -------------------------------------------------------------------------------------------

SHAPES: dict[str, tuple[Any, str]] = {
    "no dict": ("json", "must be a dict"),
    "unknown key": ({"jsn": {}}, "did you mean 'json'"),
    "nothing": ({}, "exactly one of"),
    "nothing either": ({"json_object": False}, "none is given"),
    "two": ({"json": {}, "regex": "a"}, "'json' and 'regex' are given"),
    "json no schema": ({"json": 3}, "JSON schema"),
    "json no text": ({"json": "{"}, "not JSON"),
    "json a list": ({"json": "[]"}, "must be a JSON schema"),
    "json not serialisable": ({"json": {"a": {1, 2}}}, "not JSON"),
    "regex empty": ({"regex": ""}, "not empty"),
    "regex no text": ({"regex": 3}, "regex must be a text"),
    "grammar no text": ({"grammar": ["root"]}, "grammar must be a text"),
    "choice empty": ({"choice": []}, "at least one"),
    "choice a text": ({"choice": "yes"}, "list of texts"),
    "choice of numbers": ({"choice": [1, 2]}, "choice must hold texts"),
    "choice of nothing": ({"choice": [""]}, "not empty"),
    "json_object no bool": ({"json_object": "yes"}, "json_object must be true"),
    "reasoning_end empty": ({"regex": "a", "reasoning_end": ""}, "reasoning_end"),
    "reasoning_end a bool": ({"regex": "a", "reasoning_end": True}, "reasoning_end"),
    "whitespace of a regex": ({"regex": "a", "max_whitespace": 2}, "max_whitespace is for json"),
    "whitespace of no size": ({"json": {}, "max_whitespace": 0}, "of at least 1"),
    "whitespace no bool": ({"json": {}, "disable_any_whitespace": 1}, "true or false"),
    "too long": ({"regex": "a" * (MAX_SOURCE_CHARS + 1)}, "the limit is"),
    "half a character": ({"regex": "a\ud800"}, "not valid Unicode"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_malformed_structured_outputs_are_refused_with_the_reason(name: str) -> None:
    value, message = SHAPES[name]
    with pytest.raises(RequestError, match=message) as caught:
        SamplingParams(structured_outputs=value)
    assert caught.value.param == "structured_outputs"


def test_well_formed_structured_outputs_are_normalised() -> None:
    params = SamplingParams(structured_outputs={"json": '{"type": "integer"}'})
    assert params.structure == StructuredOutputs(json={"type": "integer"}) and params.structure.kind == "json"
    assert SamplingParams().structure is None
    assert SamplingParams(structured_outputs=StructuredOutputs(choice=["a", "b", "a"])).structure == (
        StructuredOutputs(choice=("a", "b"))
    )
    schema = {"properties": {"z": {}, "a": {}}}
    text = StructuredOutputs(json=schema).json
    assert isinstance(text, str) and text.index("z") < text.index('"a"'), "the order is the user's"


def test_engine_refuses_unknown_reasoning_end_and_uncompiled_grammar() -> None:
    params = SamplingParams(structured_outputs={"regex": "a", "reasoning_end": tiny.VOCAB})
    request = tiny.request(0, params, grammar=grammars.grammar("regex"))
    with pytest.raises(RequestError, match="outside the vocabulary") as caught:
        tiny.engine().check(request)
    assert caught.value.param == "structured_outputs"
    with pytest.raises(RequestError, match="must be compiled"):
        tiny.engine().check(tiny.request(0, SamplingParams(structured_outputs={"regex": "a"})))


# --- grammars that cannot be used -------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "regex open": ({"regex": "(a"}, "parenthesis is not closed"),
    "regex look-ahead": ({"regex": "(?=a)b"}, "Lookahead is not supported"),
    "regex back-reference": ({"regex": r"(a)\1"}, "Backreference"),
    "pattern look-ahead": ({"json": {"type": "string", "pattern": "(?=a)b"}}, "Lookahead"),
    "pattern and length": ({"json": {"type": "string", "pattern": "a+b+", "maxLength": 3}}, "ignoring"),
    "type": ({"json": {"type": "foo"}}, 'Unsupported type "foo"'),
    "range": ({"json": {"type": "integer", "minimum": 5, "maximum": 1}}, "minimum greater than maximum"),
    "reference": ({"json": {"$ref": "#/$defs/a"}}, "Cannot find"),
    "circle": ({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "no token"),
    "root": ({"grammar": 'x ::= "a"'}, 'root rule with name "root" is not found'),
    "rule": ({"grammar": "root ::= foo"}, '"foo" is not defined'),
    "endless": ({"grammar": "root ::= root"}, "no token"),
    "lark": ({"grammar": "start: NOPE"}, "unknown name 'NOPE'"),
    "deep": ({"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}, "maximum limit"),
    "overlap": ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "oneOf"),
    "not in the vocabulary": ({"regex": "é"}, "no token of this vocabulary"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_uncompilable_grammar_is_refused_with_the_reason(name: str) -> None:
    wanted, message = REFUSED[name]
    with pytest.raises(RequestError) as caught:
        compiled(**wanted)
    assert caught.value.param == "structured_outputs" and message in str(caught.value)
    assert "/project" not in str(caught.value) and "\n" not in str(caught.value)


def test_compiler_needs_a_tokenizer_an_end_token_and_xgrammar(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(structured_outputs={"regex": "a"})
    for made, message in (
        (GrammarCompiler(None, 97, [2]), "needs a tokenizer"),
        (GrammarCompiler(TINY, 97, []), "end-of-text"),
    ):
        with pytest.raises(RequestError, match=message) as caught:
            made.compile(params)
        assert caught.value.param == "structured_outputs"
    assert GrammarCompiler(None, 97, []).compile(SamplingParams()) is None
    monkeypatch.setattr(text_grammar, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match="pip install xgrammar"):
        GrammarCompiler(TINY, 97, [2]).compile(params)


# --- schemas: enforced or refused -----------------------------------------------------------------------

ONE: dict[str, Any] = {"type": "integer"}
AB = {"a": ONE, "b": ONE}
# a schema, an output that it allows, and one that it does not
SCHEMAS: dict[str, tuple[Any, Any, Any]] = {
    "integer": (ONE, 3, "x"),
    "minimum": ({**ONE, "minimum": 5}, 7, 3),
    "exclusive": ({"type": "number", "exclusiveMaximum": 5}, 4.5, 5.5),
    "multipleOf": ({**ONE, "multipleOf": 5}, 10, 7),
    "maxLength": ({"type": "string", "maxLength": 2}, "ab", "abc"),
    "pattern": ({"type": "string", "pattern": "^a+$"}, "aa", "b"),
    "format": ({"type": "string", "format": "date"}, "2026-01-01", "x"),
    "items": ({"type": "array", "items": ONE, "minItems": 2, "maxItems": 3}, [1, 2], [1]),
    "prefixItems": ({"type": "array", "prefixItems": [ONE], "items": False}, [1], ["a"]),
    "required": ({"type": "object", "properties": AB, "required": ["a"]}, {"a": 1}, {"b": 1}),
    "additional": ({"type": "object", "additionalProperties": ONE}, {"x": 1}, {"x": "y"}),
    "closed": ({"type": "object", "properties": AB, "additionalProperties": False}, {"a": 1}, {"c": 1}),
    "maxProperties": ({"type": "object", "additionalProperties": ONE, "maxProperties": 1}, {"a": 1}, AB),
    "enum": ({"enum": [1, "a", None]}, "a", "b"),
    "enum of a type": ({"type": "string", "enum": ["a", "b"]}, "a", "c"),
    "const": ({"const": 5}, 5, 6),
    "anyOf": ({"anyOf": [ONE, {"type": "null"}]}, None, "a"),
    "oneOf": ({"oneOf": [ONE, {"type": "null"}]}, None, "a"),
    "one allOf": ({"allOf": [ONE]}, 1, "a"),
    "types": ({"type": ["integer", "null"], "minimum": 3}, None, 1),
    "reference": ({"$ref": "#/$defs/a", "$defs": {"a": ONE}}, 1, "a"),
    "annotations": ({**ONE, "title": "T", "default": 1, "x-own": {}, "format": "int32"}, 1, "a"),
    "named like a keyword": ({"type": "object", "properties": {"not": ONE}}, {"not": 1}, {"not": "x"}),
}


@pytest.mark.parametrize("bounds", [{"maxLength": 3}, {"minLength": 1}, {"minLength": 1, "maxLength": 900}])
def test_strings_of_bounded_length_are_json(bounds: dict[str, int]) -> None:
    """Compare with the compiler itself, which allows control characters."""
    info = xgrammar.TokenizerInfo([bytes([i]) for i in range(256)], stop_token_ids=[10])
    made = worker._build(xgrammar, info, "json", json.dumps({"type": "string", **bounds}), {})
    plain = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps({"type": "string", **bounds}))
    for text in ("", "a", "é€", "abc", "abcd", "a" * 901, "\x00", "\x1f", "a\tb", "\n", '"', "\\"):
        produced = f'"{text}"'
        try:
            length = len(json.loads(produced))
            right = bounds.get("minLength", 0) <= length <= bounds.get("maxLength", length)
        except ValueError:
            right = False
        assert _takes(made, produced) == right, text
        assert _takes(plain, produced) == (right or text in ("\x00", "\x1f", "a\tb"))


def _takes(grammar: Any, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(grammar)
    return all(matcher.accept_token(byte) for byte in text.encode()) and matcher.accept_token(10)


IGNORED: dict[str, tuple[Any, Any]] = {  # a schema, and an output that the compiler would allow
    "not": ({**ONE, "not": {"const": 3}}, 3),
    "if": ({**ONE, "if": {"minimum": 3}, "then": {"minimum": 5}}, 4),
    "uniqueItems": ({"type": "array", "items": ONE, "uniqueItems": True}, [1, 1]),
    "contains": ({"type": "array", "items": ONE, "contains": {"const": 5}}, [1]),
    "dependentRequired": ({"type": "object", "properties": AB, "dependentRequired": {"a": ["b"]}}, {"a": 1}),
    "dependentSchemas": (
        {"type": "object", "properties": AB, "dependentSchemas": {"a": {"required": ["b"]}}},
        {"a": 1},
    ),
    "required and not listed": ({"type": "object", "properties": AB, "required": ["a", "z"]}, {"a": 1}),
    "no type": ({"minimum": 5}, 3),
    "no type of a text": ({"maxLength": 1}, "ab"),
    "beside anyOf": ({**ONE, "anyOf": [{**ONE, "minimum": 5}, {**ONE, "maximum": 1}], "minimum": 3}, 1),
    "beside a reference": ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": ONE}}, 1),
    "enum of another type": ({"type": "string", "enum": [1, "a"]}, 1),
    "enum and anyOf": ({"enum": [1, 2], "anyOf": [{"const": 1}]}, 2),
    "one allOf and more": ({**ONE, "allOf": [{"minimum": 3}]}, 1),
    "two allOf": ({"allOf": [ONE, {**ONE, "minimum": 3}]}, 1),
    "minProperties": ({"type": "object", "additionalProperties": ONE, "minProperties": 1}, {}),
    "patterns beside properties": (
        {"type": "object", "properties": {"ab": {"type": "string"}}, "patternProperties": {"^a": ONE}},
        {"ab": "x"},
    ),
    "minItems alone": ({"minItems": 2}, [1]),
    "maxItems alone": ({"maxItems": 1}, [1, 2]),
    "maxProperties alone": ({"maxProperties": 0}, {"a": 1}),
    "propertyNames alone": ({"propertyNames": {"type": "string", "pattern": "^a$"}}, {"b": 1}),
    "patternProperties alone": ({"patternProperties": {"^a$": ONE}}, {"a": "x"}),
    "names beside properties": (
        {"type": "object", "properties": {"b": ONE}, "propertyNames": {"type": "string", "pattern": "a"}},
        {"b": 1},
    ),
    "names beside patterns": (
        {
            "type": "object",
            "patternProperties": {"b": ONE},
            "propertyNames": {"type": "string", "pattern": "a"},
        },
        {"b": 1},
    ),
    "names and nothing else": (
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": False},
        {"a": 1},
    ),
    "empty anyOf": ({"anyOf": []}, 1),
    "negative": ({"type": "array", "minItems": 1, "maxItems": -1}, [1]),
    "a quotation mark": ({"type": "string", "pattern": '^"$'}, "x"),
    "a quotation mark in a name": ({"type": "object", "patternProperties": {'"': ONE}}, {'"': "x"}),
}


def valid(document: Any, schema: Any) -> bool:
    kind = jsonschema.Draft202012Validator
    return bool(kind(schema, format_checker=kind.FORMAT_CHECKER).is_valid(document))


@pytest.mark.parametrize("name", SCHEMAS)
def test_schema_keywords_are_enforced(name: str) -> None:
    schema, right, wrong = SCHEMAS[name]
    assert not_enforced(schema) is None
    assert valid(right, schema)
    assert not valid(wrong, schema)
    assert matches(json.dumps(right), json=schema) and not matches(json.dumps(wrong), json=schema)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("name", IGNORED)
def test_schema_with_ignored_keyword_is_refused_with_its_place(name: str, depth: int) -> None:
    schema, wrong = IGNORED[name]
    assert not valid(wrong, schema)
    if depth == 1:
        schema = {"type": "object", "properties": {"x": schema}}
    elif depth == 2:
        schema = {"type": "array", "items": {"anyOf": [schema, {"type": "null"}]}}
    where = ["#", "#/properties/x", "#/items/anyOf/0"][depth]
    with pytest.raises(RequestError, match=f"{where}: ") as caught:
        compiled(json=schema)
    assert caught.value.param == "structured_outputs"


SPECIAL = ['"', r"\"", 'a|"', r"\\", r"\n", "\t", r"\x22", r"\u005c", r"\cA", '["]', r"[\\]"]
SPECIAL += [r"[\x00-\x1f]", r"[\b]"]
USUAL = [".", '[^"\\\\]*', "[ -~]", r"[\x00-\x7f]+", r"\s\S\d", r"[^\n]", r"\.\/\-", "a{2,3}", r"[\]]"]
USUAL += ["^(a|b)$"]
REGEXES = ["a.b", ".", "[.]", r"\.", r"\\.", r"[\]].", r"[^.]", ".{2}", r"\x61b", r"[\x61-b]c", r"\u0061b"]
REGEXES += [r"\\x61", "^a|b$"]
REGEX_TEXTS = ["ab", "a\nb", "axb", ".", "\n", "\\.", "\\x", "]x", "]\n", "..", "bc", "\\x61", "a", "b", "x"]


def test_pattern_with_characters_that_json_escapes_is_refused() -> None:
    for pattern in SPECIAL:
        assert "backslash" in str(not_enforced({"type": "string", "pattern": pattern})), pattern
    for pattern in USUAL:
        schema = {"type": "string", "pattern": pattern}
        assert not_enforced(schema) is None, pattern
        for inside in ('"', "\\", "\n", "\t"):
            assert not matches(f'"{inside}"', json=schema), (pattern, inside)


@pytest.mark.parametrize("regex", REGEXES)
def test_regex_matches_as_in_python(regex: str) -> None:
    found = [text for text in REGEX_TEXTS if matches(text, regex=regex)]
    assert found == [text for text in REGEX_TEXTS if re.fullmatch(regex, text)]
    assert not matches("a\r", regex=regex)


def test_schema_problems_are_found_in_all_places() -> None:
    for key in ("$defs", "definitions", "patternProperties"):
        schema = {"type": "object", key: {"n": {"not": {}}}}
        assert not_enforced(schema) == f"#/{key}/n: 'not' is not supported"
    for key in ("additionalProperties", "items", "propertyNames"):
        schema = {"type": "object", key: {"not": {}}}
        assert not_enforced(schema) == f"#/{key}: 'not' is not supported"
    assert "a schema is an object" in str(not_enforced({"items": 3}))
    assert "must point into" in str(not_enforced({"$ref": "http://a.b/c"}))
    assert "must be an object" in str(not_enforced({"properties": []}))
    deep: dict[str, Any] = {}
    for _ in range(300):
        deep = {"items": deep}
    assert "nested" in str(not_enforced(deep))


@pytest.mark.parametrize(
    ("wanted", "right", "wrong"),
    [
        ({}, '{ "a" :\n 1}', '{"a": x}'),
        ({"max_whitespace": 1}, '{ "a": 1 }', '{  "a": 1}'),
        ({"disable_any_whitespace": True}, '{"a": 1}', '{"a":1}'),
    ],
    ids=str,
)
def test_whitespace_options_limit_whitespace(wanted: dict[str, Any], right: str, wrong: str) -> None:
    schema = {"type": "object", "properties": {"a": ONE}, "required": ["a"]}
    assert matches(right, json=schema, **wanted) and not matches(wrong, json=schema, **wanted)


def test_choices_match_literally() -> None:
    odd = ['a"b', "c\\d", "[x]", "tab\t", "x ::= y", "a|b"]
    for text in odd:
        assert matches(text, choice=odd)
    assert not matches("a", choice=odd) and not matches("x", choice=odd)


# --- bounds -------------------------------------------------------------------------------------------

BIG = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(12_000)}}


def test_grammar_beyond_the_time_limit_is_refused_and_the_next_compiles() -> None:
    made = GrammarCompiler(TINY, tiny.VOCAB, [EOS])
    made.seconds = 0.05
    with pytest.raises(RequestError, match="longer than 0.05 s") as caught:
        made.compile(SamplingParams(structured_outputs={"json": BIG}))
    assert caught.value.param == "structured_outputs"
    made.seconds = 60
    assert made.compile(SamplingParams(structured_outputs={"regex": "a+"})) is not None
    made.close()


def test_dead_compiler_process_fails_its_job_alone() -> None:
    """Kill the process before a job, during a job, and before the job is sent."""
    process = GrammarProcess(VOCABULARY, [EOS])

    def kill() -> None:
        assert process._worker is not None
        process._worker._process.kill()
        process._worker._process.wait()

    assert process.compile(("regex", "a+", {}), 60)
    kill()
    assert process.compile(("regex", "b+", {}), 60)
    started: Any = process._worker
    receive = started._receive
    started._receive = lambda seconds: (kill(), receive(seconds))[1]  # the job is sent, its reply is awaited
    with pytest.raises(RequestError, match="ran out of memory or stack") as caught:
        process.compile(("json", json.dumps(BIG), {}), 60)
    assert caught.value.param == "structured_outputs"
    assert process.compile(("regex", "b+", {}), 60)
    process._running = lambda: process._worker  # as if it ended while the job was sent
    kill()
    with pytest.raises(RequestError, match="ran out of memory or stack"):
        process.compile(("regex", "b+", {}), 60)
    del process._running
    assert process.compile(("regex", "b+", {}), 60)
    process.close()


def test_grammar_beyond_the_memory_limit_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Expect a refusal where the system supports a memory limit."""
    source = Path(worker.__file__).read_text()
    small = tmp_path / "worker.py"
    small.write_text(source.replace("MAX_COMPILE_BYTES = 4 << 30", "MAX_COMPILE_BYTES = 24 << 20"))
    assert small.read_text() != source
    monkeypatch.setattr(worker, "__file__", str(small))
    process = GrammarProcess(VOCABULARY, [EOS])
    assert process.compile(("regex", "a+", {}), 60)
    if Path("/proc/self/statm").exists():
        with pytest.raises(RequestError, match="ran out of memory or stack"):
            process.compile(("json", json.dumps(BIG), {}), 60)
    assert process.compile(("regex", "b+", {}), 60)
    process.close()


def test_jobs_of_several_threads_are_all_compiled() -> None:
    process, done = GrammarProcess(VOCABULARY, [EOS]), []

    def work(letter: str) -> None:
        text = process.compile(("regex", letter + "+", {}), 60)
        done.append((letter, letter in text))

    threads = [threading.Thread(target=work, args=(letter,)) for letter in "abcdef"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    process.close()
    assert sorted(letter for letter, _ in done) == [*"abcdef"]


def test_grammar_cache_compiles_once_and_evicts_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = []
    whole = GrammarProcess.compile

    def counted(self: GrammarProcess, job: Any, seconds: float) -> str:
        jobs.append(job)
        return whole(self, job, seconds)

    monkeypatch.setattr(GrammarProcess, "compile", counted)
    monkeypatch.setattr(text_grammar, "MAX_CACHED_GRAMMARS", 2)
    made = GrammarCompiler(TINY, tiny.VOCAB, [EOS])

    def compile_regex(regex: str, **more: Any) -> None:
        made.compile(SamplingParams(structured_outputs={"regex": regex, **more}))

    def compile_all(regexes: str) -> None:
        for regex in regexes:
            compile_regex(regex)

    compile_all("aba")
    compile_regex("a", reasoning_end="x")
    assert [job[1] for job in jobs] == ["a", "b"]
    compile_all("cab")  # b was the oldest
    assert [job[1] for job in jobs] == ["a", "b", "c", "b"]
    monkeypatch.setattr(text_grammar, "MAX_CACHED_BYTES", 1)
    compile_all("ddb")
    assert [job[1] for job in jobs][4:] == ["d", "b"]
    monkeypatch.setattr(text_grammar, "MAX_COMPILED_CHARS", 1)
    with pytest.raises(RequestError, match="too large"):
        compile_regex("e")
    made.close()


# --- end of the reasoning section -------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["a", "ab", "aab", "abab", "abcabd"])
def test_reasoning_end_is_found_across_tokens(end: str) -> None:
    """Compare with a search of the whole text, for all texts of six tokens."""
    produced = [b"a", b"b", b"aab", b"bc", b"cab", b"d", b""]
    found = ReasoningEnd(end, produced)
    front: list[tuple[bytes, int]] = [(b"", 0)]
    for _ in range(6):
        after = {}
        for text, matched in front:
            for token, data in enumerate(produced):
                now, rest = found.advance(matched, token)
                at = (text + data).find(end.encode())
                assert rest == (None if at < 0 else (text + data)[at + len(end) :])
                more = [r for t, r in found.overshooting(matched) if t == token]
                assert more == ([rest] if rest else [])
                if rest is None:
                    after[text + data] = now
        front = list(after.items())[:400]
    token = ReasoningEnd(3, produced)
    assert [token.advance(0, t)[1] for t in range(7)] == [None, None, None, b"", None, None, None]
    assert token.overshooting(0) == []
