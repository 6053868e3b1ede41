"""Schemas are enforced or refused: random outputs that the masks of random schemas allow are valid."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
import torch

import grammars
import tiny
from draftproof.errors import RequestError
from draftproof.sampling_params import SamplingParams
from draftproof.text.grammar import compiler as text_grammar
from draftproof.text.grammar.json_schema_check import not_enforced
from draftproof.verify.grammar_guide import is_set
from grammars import EOS, TINY

W = -(-tiny.VOCAB // 32)
CLOSING = [token for token in range(3, tiny.VOCAB) if TINY.token_bytes(token)[-1:] in b'"}],:012']
SCHEMAS, ANSWERS, LONGEST = 150, 4, 600


class Maker:
    """Random schemas of supported keywords and, sometimes, unsupported ones."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def some(self, **parts: Any) -> dict[str, Any]:
        return {key: value for key, value in parts.items() if self.chance.random() < 0.5}

    def schema(self, depth: int = 0) -> dict[str, Any]:
        kinds = [self.number, self.string, self.literal, self.number, self.string]
        if depth < 3:
            kinds += [self.array, self.object, self.object, self.object, self.several]
        made = self.chance.choice(kinds)(depth)
        if self.chance.random() < 0.03:
            made["not"] = {"const": 1}
        return made

    def number(self, depth: int) -> dict[str, Any]:
        low = self.chance.randint(-30, 30)
        bounds = self.some(minimum=low, maximum=low + self.chance.randint(0, 400))
        if self.chance.random() < 0.2:
            bounds = self.some(exclusiveMinimum=low, exclusiveMaximum=low + self.chance.randint(2, 400))
        if self.chance.random() < 0.1:
            bounds = {"multipleOf": self.chance.choice([2, 5, 7])}
            return {"type": "integer", **bounds}
        return {"type": self.chance.choice(["integer", "number"]), **bounds}

    def string(self, depth: int) -> dict[str, Any]:
        low = self.chance.randint(0, 3)
        if self.chance.random() < 0.3:
            return {"type": "string", "pattern": self.chance.choice(["^a+$", "^[a-c]{1,3}$", "^(x|yz)?w$"])}
        return {"type": "string", **self.some(minLength=low, maxLength=low + self.chance.randint(0, 3))}

    def literal(self, depth: int) -> dict[str, Any]:
        values = [1, -2.5, "x", 'q"\\', None, True, False, [], [1, "a"], {"k": 1}]
        if self.chance.random() < 0.5:
            return {"const": self.chance.choice(values)}
        return {"enum": self.chance.sample(values, self.chance.randint(1, 4))}

    def array(self, depth: int) -> dict[str, Any]:
        low = self.chance.randint(0, 2)
        made = {"type": "array", "items": self.schema(depth + 1)}
        made |= self.some(minItems=low, maxItems=low + self.chance.randint(0, 2))
        if self.chance.random() < 0.3:
            made = {"type": "array", "prefixItems": [self.schema(depth + 1)], "items": False, "minItems": 1}
        if self.chance.random() < 0.05:
            made["uniqueItems"] = True
        return made

    def object(self, depth: int) -> dict[str, Any]:
        names = self.chance.sample(["a", "b", "not", "items", "x y"], self.chance.randint(0, 3))
        listed = {name: self.schema(depth + 1) for name in names}
        required = [name for name in names if self.chance.random() < 0.5]
        made = {"type": "object", "properties": listed, "required": required, "additionalProperties": False}
        if not names:
            made = {"type": "object", "additionalProperties": self.schema(depth + 1)}
            made |= self.some(maxProperties=self.chance.randint(0, 2))
        elif self.chance.random() < 0.2:
            made["minProperties"] = self.chance.randint(1, len(names))
        return made

    def several(self, depth: int) -> dict[str, Any]:
        parts = [self.schema(depth + 1) for _ in range(self.chance.randint(1, 3))]
        if self.chance.random() < 0.3:
            return {"$ref": "#/$defs/d"} if depth else {"allOf": parts[:1]}
        return {"anyOf": parts}


def make(seed: int) -> dict[str, Any]:
    maker = Maker(seed)
    made = maker.schema()
    if '"$ref"' in json.dumps(made):
        made["$defs"] = {"d": maker.number(0)}
    return made


def answer(grammar: Any, chance: random.Random) -> str | None:
    """Sample tokens that the mask allows, closing ones more often; None if the output does not end."""
    state, row, tokens = grammar.start(), torch.zeros(W, dtype=torch.int32), []
    while len(tokens) < LONGEST:
        state.fill(row)
        allowed = [token for token in range(tiny.VOCAB) if is_set(row, token)]
        assert allowed, f"stuck after {TINY.text(tokens)!r}"
        if EOS in allowed and (len(allowed) == 1 or chance.random() < 0.5):
            return TINY.text(tokens)
        closing = [token for token in CLOSING if token in allowed]
        tokens.append(chance.choice(closing if closing and chance.random() < 0.6 else allowed))
        if tokens[-1] == EOS:
            tokens.pop()
            continue
        assert state.accept(tokens[-1])
    return None


def invalid(seed: int) -> tuple[str, list[str]]:
    """Return the result of a schema and the outputs that it should have refused."""
    schema = make(seed)
    wanted = {"json": schema, "max_whitespace": 1}
    try:
        grammar = grammars.grammars().compile(SamplingParams(structured_outputs=wanted))
    except RequestError:
        return "refused", []
    check = jsonschema.Draft202012Validator(schema)
    answers = [answer(grammar, random.Random(f"{seed} {i}")) for i in range(ANSWERS)]
    ended = [text for text in answers if text is not None]
    wrong = [f"{schema} let {text!r} through" for text in ended if not check.is_valid(json.loads(text))]
    return ("ended" if ended else "endless"), wrong


def test_outputs_of_random_schemas_are_valid() -> None:
    found = [invalid(seed) for seed in range(SCHEMAS)]
    assert [line for _, wrong in found for line in wrong] == []
    counts = {what: sum(became == what for became, _ in found) for what in ("ended", "refused", "endless")}
    assert counts["ended"] > SCHEMAS // 2 and counts["refused"] > 5 and counts["endless"] < 10, counts


def test_control_schemas_with_ignored_keywords_give_invalid_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = [seed for seed in range(3 * SCHEMAS) if not_enforced(make(seed))]
    monkeypatch.setattr(text_grammar, "not_enforced", lambda schema: None)
    assert any(invalid(seed)[1] for seed in seeds)
