"""String schemas with lengths beside a pattern, and formats of addresses, against `re` and `ipaddress`."""

from __future__ import annotations

import ipaddress
import json
import random
import re
from typing import Any

import pytest

import grammars
from draftproof.errors import RequestError
from draftproof.sampling_params import SamplingParams
from draftproof.text.grammar.string_patterns import FORMAT_PATTERNS, bounded_pattern, rewrite_strings
from grammars import EOS

LETTERS = "ab1-_."
REWRITTEN = [
    r"^[a-z]+$",
    r"^[a-b1_-]*$",
    r"^\w{2,}$",
    r"^[a-z]{2}[0-9]+$",
    r"^[ab]+-1$",
    r"^(ab|1-)+$",
    r"^(?:a|b)-\d*$",
    r"^a?b{3}$",
    r"^(a|b1){1,2}$",
    r"[ab.]+",
    r"^(ab){2}\.[ab1]{0,9}$",
]
NOT_REWRITTEN = [
    "(" * 5000 + ")" * 5000,
    r"^[a-z]+-[a-z]+$",
    r"^(?=a)b+$",
    r"^a+?$",
    r"^(a+)+$",
    r"^a|b+$",
    r"^[a-z]+\b$",
]


def accepts(schema: dict[str, Any], value: str) -> bool:
    """Return whether the compiled schema accepts a string, byte by byte."""
    grammar = grammars.grammars().compile(SamplingParams(structured_outputs={"json": schema}))
    assert grammar is not None
    state = grammar.start()
    return all(state.accept(grammars.token_of(c)) for c in json.dumps(value)) and state.accept(EOS)


@pytest.mark.parametrize("pattern", REWRITTEN)
def test_bounded_pattern_matches_the_texts_of_that_length(pattern: str) -> None:
    chance, seen = random.Random(pattern), 0
    for lowest, highest in ((0, 3), (2, 5), (4, 4), (3, None), (0, 40)):
        bounded = bounded_pattern(pattern, lowest, highest)
        if bounded is None:
            continue
        for _ in range(3000):
            text = "".join(chance.choices(LETTERS, k=chance.randint(0, 8)))
            is_long_enough = lowest <= len(text) <= (len(text) if highest is None else highest)
            expected = bool(re.fullmatch(pattern, text)) and is_long_enough
            assert bool(re.fullmatch(bounded, text)) is expected, (bounded, text)
        seen += 1
    assert seen >= 1


@pytest.mark.parametrize("pattern", NOT_REWRITTEN, ids=lambda text: text[:20])
def test_other_patterns_with_a_length_are_refused(pattern: str) -> None:
    assert bounded_pattern(pattern, 0, 5) is None
    schema = {"type": "string", "pattern": pattern, "maxLength": 5}
    assert json.loads(rewrite_strings(json.dumps(schema))) == schema


def test_pattern_with_a_length_is_enforced_and_others_are_refused_by_name() -> None:
    schema = {"type": "string", "pattern": "^[a-z]+$", "minLength": 2, "maxLength": 4}
    texts = ["a", "ab", "abcd", "abcde", "a1"]
    assert [accepts(schema, text) for text in texts] == [False, True, True, False, False]
    nested = {"type": "object", "properties": {"pattern": {**schema, "pattern": "^a+-b+$"}}}
    with pytest.raises(RequestError, match="pattern combined with minLength/maxLength"):
        grammars.grammars().compile(SamplingParams(structured_outputs={"json": nested}))


def test_addresses_have_no_leading_zeros() -> None:
    for text in ("9.8.7.6", "255.249.10.0", "001.50.02.001", "1.2.3", "1.2.3.4.5", "256.1.1.1", "01.2.3.4"):
        assert accepts({"type": "string", "format": "ipv4"}, text) is _is_address(text), text
    for text in ("::1", "1:2:3:4:5:6:7:8", "fe80::1", "::ffff:1.2.3.4", "::ffff:01.2.3.4", "1::2::3", ":1"):
        assert accepts({"type": "string", "format": "ipv6"}, text) is _is_address(text), text


def test_format_patterns_match_valid_addresses_only() -> None:
    chance = random.Random(2)
    counts = {True: 0, False: 0}
    for _ in range(6000):
        parts = [chance.choice(["", "0", "1", "ff", "a0b1", "12345"]) for _ in range(chance.randint(2, 9))]
        texts = (
            ":".join(parts),
            ".".join(chance.choice(["0", "9", "00", "25", "256", "199"]) for _ in range(4)),
        )
        for name, text in zip(("ipv6", "ipv4"), texts, strict=True):
            matches = bool(re.fullmatch(FORMAT_PATTERNS[name], text))
            assert matches is _is_address(text), text
            counts[matches] += 1
    assert min(counts.values()) > 500


def test_schemas_inside_structural_tags_are_rewritten() -> None:
    schema = {"type": "object", "properties": {"format": {"type": "string", "format": "ipv4"}}}
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    made = json.loads(rewrite_strings(json.dumps(tag), is_tag=True))
    found = made["format"]["json_schema"]["properties"]["format"]
    assert found == {"type": "string", "pattern": FORMAT_PATTERNS["ipv4"]}


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
