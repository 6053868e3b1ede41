"""Requests as scripts for vLLM write them: SamplingParams, prompts, scoring without output."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pydantic
import pytest

from draftproof import (
    LLM,
    AsyncLLM,
    RequestError,
    SamplingParams,
    StructuredOutputs,
    TextPrompt,
    TokensPrompt,
)
from text_pieces import make_llm, output_fields

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
PROMPT = "abababab"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, LLM]]:
    """Return an engine without and one with drafts."""
    folder = tmp_path_factory.mktemp("pieces")
    with make_llm(folder, None, max_logprobs=-1) as plain, make_llm(folder, NGRAM, max_logprobs=-1) as spec:
        yield plain, spec


def same(pair: tuple[LLM, LLM], prompt: Any, params: SamplingParams) -> Any:
    """Return the output of a request after a comparison of both engines."""
    plain, spec = (llm.generate(prompt, params)[0] for llm in pair)
    assert output_fields(plain.outputs[0]) == output_fields(spec.outputs[0])
    assert plain.prompt_token_ids == spec.prompt_token_ids and plain.prompt_logprobs == spec.prompt_logprobs
    return spec


def test_clone_is_equal_and_takes_changes() -> None:
    params = SamplingParams(2, temperature=0.5, seed=3, stop=["x"], structured_outputs={"choice": ["a"]})
    assert params.n == 2 and params.clone() == params and params.clone() is not params
    changed = params.clone(max_tokens=5)
    assert (changed.max_tokens, changed.n, changed.stop) == (5, 2, ("x",)) and params.max_tokens == 16
    with pytest.raises(FrozenInstanceError):
        changed.max_tokens = 7  # type: ignore[misc]
    with pytest.raises(RequestError, match="max_tokens"):
        params.clone(max_tokens=-1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"best_of": 3}, "cumulative_logprob"),
        ({"detokenize": False, "stop": ["a"]}, "leave detokenize true"),
        ({"detokenize": 1}, "true or false"),
        ({"truncate_prompt_tokens": 0}, "positive or -1"),
        ({"truncate_prompt_tokens": -2}, "at least -1"),
        ({"max_tokens": 0}, "unless prompt_logprobs is set"),
        ({"max_tokens": 0, "prompt_logprobs": 0, "n": 2}, "leave n at 1"),
        ({"spaces_between_special_tokens": 1}, "true or false"),
    ],
)
def test_option_that_is_not_honoured_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**options)


def test_values_without_effect_are_accepted() -> None:
    given = SamplingParams(n=2, best_of=2, spaces_between_special_tokens=False)
    assert given == SamplingParams(n=2)


def test_output_without_text_has_the_same_tokens(pair: tuple[LLM, LLM]) -> None:
    params = SamplingParams(temperature=1, seed=4, max_tokens=20, logprobs=1)
    full, bare = same(pair, PROMPT, params), same(pair, PROMPT, params.clone(detokenize=False))
    assert bare.outputs[0].token_ids == full.outputs[0].token_ids
    assert bare.outputs[0].text == "" != full.outputs[0].text
    values = [[entry.logprob for entry in row.values()] for row in bare.outputs[0].logprobs]
    assert values == [[entry.logprob for entry in row.values()] for row in full.outputs[0].logprobs]


def test_truncated_prompt_keeps_its_last_tokens(pair: tuple[LLM, LLM]) -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    cut = same(pair, PROMPT, params.clone(truncate_prompt_tokens=3))
    assert cut.prompt_token_ids == pair[0].tokenizer.encode(PROMPT)[-3:]
    assert cut.outputs[0].token_ids == same(pair, PROMPT[-3:], params).outputs[0].token_ids
    long = same(pair, "ab" * 200, params.clone(truncate_prompt_tokens=-1))
    assert len(long.prompt_token_ids) == 256 - 8 and len(long.outputs[0].token_ids) <= 8
    with pytest.raises(RequestError, match="max_model_len"):
        pair[0].generate("ab" * 200, params)


def test_prompt_types_of_vllm(pair: tuple[LLM, LLM]) -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    expected = same(pair, PROMPT, params)
    ids = expected.prompt_token_ids
    text, tokens = TextPrompt(prompt=PROMPT), TokensPrompt(prompt_token_ids=ids)
    forms = [
        text,
        tokens,
        TokensPrompt(prompt_token_ids=ids, prompt="the text"),
        {**text, "multi_modal_data": None},
    ]
    found = [same(pair, form, params) for form in forms]
    assert [each.prompt for each in found] == [PROMPT, None, "the text", PROMPT]
    assert all(each.outputs[0].token_ids == expected.outputs[0].token_ids for each in found)
    for wrong in ({"prompt": PROMPT, "multi_modal_data": {"image": 1}}, {"cache_salt": "x"}):
        with pytest.raises(RequestError, match="a prompt mapping"):
            pair[0].generate(wrong, params)


def test_salt_of_a_prompt_separates_cached_prefixes(pair: tuple[LLM, LLM]) -> None:
    ids, params = [10, 11] * 24, SamplingParams(temperature=0, max_tokens=4)

    def cached(salt: str, **options: Any) -> int:
        prompt = TokensPrompt(prompt_token_ids=ids, cache_salt=salt)
        return pair[0].generate(prompt, params.clone(**options))[0].num_cached_tokens

    assert [cached("a"), cached("b"), cached("a"), cached("a", cache_salt="a")] == [0, 0, 32, 32]
    with pytest.raises(RequestError, match="different cache_salts"):
        cached("a", cache_salt="b")


@pytest.mark.parametrize("width", [0, 3, -1])
def test_scoring_without_output_equals_the_prompt_logprobs_of_a_request(
    pair: tuple[LLM, LLM], width: int
) -> None:
    long = same(pair, PROMPT, SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=width))
    score = same(pair, PROMPT, SamplingParams(max_tokens=0, prompt_logprobs=width, logprobs=2))
    assert list(score.prompt_logprobs) == list(long.prompt_logprobs) and score.finished
    output = score.outputs[0]
    assert (output.token_ids, output.text, output.logprobs, output.finish_reason) == ([], "", None, "length")
    assert score.usage["completion_tokens"] == 0 and long.outputs[0].token_ids
    with pytest.raises(RequestError, match="nothing to stream"):
        pair[0].stream(PROMPT, SamplingParams(max_tokens=0, prompt_logprobs=width))


def test_scoring_without_output_works_on_an_event_loop(tmp_path: Path) -> None:
    async def run(llm: LLM) -> Any:
        async with AsyncLLM.from_llm(llm) as engine:
            return await engine.generate(PROMPT, SamplingParams(max_tokens=0, prompt_logprobs=1))

    with make_llm(tmp_path, NGRAM) as llm:
        expected = llm.generate(PROMPT, SamplingParams(max_tokens=3, prompt_logprobs=1))[0]
        found = asyncio.run(run(llm))
    assert list(found.prompt_logprobs) == list(expected.prompt_logprobs)
    assert found.outputs[0].token_ids == []


def test_logprobs_above_20_need_the_engine_option(pair: tuple[LLM, LLM], tmp_path: Path) -> None:
    params = SamplingParams(temperature=1, seed=1, max_tokens=8, logprobs=25)
    rows = same(pair, PROMPT, params).outputs[0].logprobs
    assert all(25 <= len(row) <= 26 for row in rows)
    with make_llm(tmp_path, None) as llm, pytest.raises(RequestError, match="max_logprobs is 20"):
        llm.generate(PROMPT, params)


class City(pydantic.BaseModel):
    """Schema of a test."""

    name: str
    people: int


def test_pydantic_class_is_its_json_schema() -> None:
    assert StructuredOutputs(json=City) == StructuredOutputs(json=City.model_json_schema())
    assert json.loads(str(StructuredOutputs(json=City).json))["required"] == ["name", "people"]
    with pytest.raises(RequestError, match="or a pydantic class"):
        StructuredOutputs(json=int)
