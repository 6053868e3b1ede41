"""Outputs of grammars are valid UTF-8: the bytes of surrogates, which are no characters, are not allowed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from draftproof.errors import RequestError
from draftproof.sampling_params import SamplingParams
from draftproof.text.grammar.compiler import GrammarCompiler
from draftproof.text.grammar.surrogates import SurrogateTokens
from draftproof.text.grammar.worker import names_a_surrogate

END = 256
STRING = {"type": "string", "maxLength": 4}
CALL = {"type": "sequence", "elements": [{"type": "json_schema", "json_schema": STRING}]}
KINDS: dict[str, dict[str, Any]] = {
    "json": {"json": STRING},
    "free_string": {"json": {"type": "string"}},
    "regex": {"regex": '"[^"]{0,4}"'},
    "ebnf": {"grammar": r'root ::= "\"" [^"]{0,4} "\""'},
    "structural_tag": {"structural_tag": json.dumps({"type": "structural_tag", "format": CALL})},
    "reasoning": {"json": STRING, "reasoning_end": "=>"},
}


class ByteTokenizer:
    """Every byte, then the end, then tokens that have parts of surrogates."""

    special_ids = frozenset([END])
    longer = (
        b"\xed\xa0\x80",
        b"a\xed",
        b"\xbf\xbf",
        b"\x80\x80",
        b"\xed\x9f\xbf",
        b'=>"\xed',
        b'=>"\xed\xbf',
    )

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < END else (b"<end>", *self.longer)[token - END]


TOKENIZER: Any = ByteTokenizer()
VOCAB = END + 1 + len(ByteTokenizer.longer)
BYTES = [TOKENIZER.token_bytes(token) for token in range(VOCAB)]


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(TOKENIZER, VOCAB, [END])
    yield made
    made.close()


def allowed(state: Any) -> list[int]:
    row = torch.zeros(-(-VOCAB // 32), dtype=torch.int32)
    state.fill(row)
    return np.flatnonzero(np.unpackbits(row.numpy().view(np.uint8), bitorder="little")[:VOCAB]).tolist()


def start(compiler: GrammarCompiler, kind: str) -> Any:
    grammar = compiler.compile(SamplingParams(structured_outputs=KINDS[kind]))
    assert grammar is not None
    return grammar.start()


def random_output(state: Any, order: random.Random) -> bytes:
    """Walk to the end; every step also takes and rolls back a detour, and tries tokens that are masked."""
    data = b""
    while True:
        mask = allowed(state)
        detour = 0
        while detour < 3 and (choice := allowed(state)) and choice != [END]:
            detour += state.accept(order.choice([token for token in choice if token != END]))
        state.rollback(detour)
        assert allowed(state) == mask
        assert not any(state.accept(token) for token in order.sample(range(VOCAB), 20) if token not in mask)
        if END in mask and (len(mask) == 1 or order.random() < 0.3):
            return data
        likely = [t for t in mask if 0xED in BYTES[t] or t == ord('"')]
        token = order.choice(likely if likely and order.random() < 0.7 else [t for t in mask if t != END])
        assert state.accept(token)
        data += BYTES[token]


@pytest.mark.parametrize("kind", KINDS)
def test_random_outputs_are_utf8_and_follow_the_length(compiler: GrammarCompiler, kind: str) -> None:
    order = random.Random(kind)
    for _ in range(40):
        if kind == "reasoning":
            state = start(compiler, kind)
            opening = order.choice([t for t in allowed(state) if BYTES[t][:2] in (b"=>", b"=")])
            assert state.accept(opening)
            data = BYTES[opening]
            if data == b"=":
                assert state.accept(ord(">"))
                data += b">"
            text = (data + random_output(state, order)).removeprefix(b"=>").decode()
        else:
            text = random_output(start(compiler, kind), order).decode()
        if kind != "free_string" and not set(text) & {"\\", *map(chr, range(32))}:
            jsonschema.validate(json.loads(text), STRING)


def test_lead_may_be_followed_by_the_characters_before_the_surrogates(compiler: GrammarCompiler) -> None:
    state = start(compiler, "json")
    for data in (b'"', b"\xed", b"\x9f\xbf", b"\xed\x9f\xbf", b"a\xed"):
        for token in [BYTES.index(data)] if data in BYTES else list(data):
            assert state.accept(token)
    assert 0x80 in allowed(state) and 0x9F in allowed(state) and BYTES.index(b"\x80\x80") in allowed(state)
    assert 0xA0 not in allowed(state) and not state.accept(0xA0)
    assert not state.accept(BYTES.index(b"\xbf\xbf"))


def test_tokens_of_a_vocabulary_are_found() -> None:
    found = SurrogateTokens(
        [b"", b"a", b"\xed", b"b\xed", b"\xa0", b"\xbfx", b"\x9f", b"\xed\xa0", b"\xed\x9f"]
    )
    assert (found.complete, found.first, found.second) == ({7}, {2, 3}, {4, 5})


REFUSED = [
    r"[\ud800-\udfff]",
    r"[\ud900-\uffff]",
    r"a[b\udfff]",
    r"[^\u0000-\ud7ff]",
    r"(x|\ud83c)",
    r"[\ud800-\udbff][\udc00-\udfff]|[^\ud800-\udfff]",  # how JavaScript writes any character
]
ACCEPTED = [
    r"[^\ud800-\udfff]",
    r"[^\u0000-\ud7ff\ud800-\udfff]",
    r"[\u0000-\uffff]",
    r"[a\-\ue000]",
    r"\ud7ff",
    r"[\ud7ff-\udfff]",
]


def structures(pattern: str) -> list[dict[str, Any]]:
    """Return a pattern as a regex, in a schema and in a tag, and a set as both kinds of grammar."""
    schema = {"type": "string", "pattern": pattern}
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    made: list[dict[str, Any]] = [{"regex": pattern}, {"json": schema}, {"structural_tag": json.dumps(tag)}]
    if pattern.startswith("["):
        made += [{"grammar": f"root ::= {pattern}"}, {"grammar": f"start: /{pattern}/"}]
    return made


@pytest.mark.parametrize("pattern", REFUSED)
def test_surrogates_that_begin_a_text_or_set_are_refused(compiler: GrammarCompiler, pattern: str) -> None:
    for structure in structures(pattern):
        with pytest.raises(RequestError, match="surrogate"):
            compiler.compile(SamplingParams(structured_outputs=structure))


@pytest.mark.parametrize("pattern", ACCEPTED)
def test_sets_around_the_surrogates_have_a_next_token_everywhere(
    compiler: GrammarCompiler, pattern: str
) -> None:
    for structure in structures(pattern):
        grammar = compiler.compile(SamplingParams(structured_outputs=structure))
        assert grammar is not None
        order = random.Random(pattern)
        for _ in range(5):
            assert random_output(grammar.start(), order)


def test_quotes_and_brackets_in_a_grammar_do_not_hide_a_surrogate() -> None:
    assert not names_a_surrogate(r'root ::= "[" [\]"\\] "\\ud800" [\xd800]')
    assert names_a_surrogate(r'root ::= "\"[" [\]"\ud800]')
    assert names_a_surrogate(r'root ::= "\ud800"')
    assert not names_a_surrogate(r'a ::= Regex("[\"]\\\\ud800", json_string=true)')
    assert names_a_surrogate(r'a ::= Regex("[\"]\\ud800", json_string=true)')
