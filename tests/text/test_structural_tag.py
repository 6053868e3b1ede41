"""Structural tags: free text whose sections between tags are constrained."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from draftproof import LLM, RequestError, SamplingParams, StructuredOutputs
from draftproof.text.grammar.compiler import GrammarCompiler
from text_pieces import make_llm, output_fields

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
SECTION = {"begin": "ab", "content": {"type": "regex", "pattern": " +"}, "end": "b"}
TAG = {
    "type": "structural_tag",
    "format": {"type": "triggered_tags", "triggers": ["ab"], "tags": [SECTION]},
}
WRONG = re.compile(r"ab(?! +b| *$)")  # an "ab" that no section follows
OLD = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}],
    "triggers": ["<f>"],
}


def tagged_llm(folder: Path, spec: dict[str, Any] | None) -> LLM:
    """Return an LLM whose grammars use the tokenizer of the test."""
    llm = make_llm(folder, spec)
    llm._grammars = GrammarCompiler(llm.tokenizer, llm.engine.limits.vocab_size, (2,))
    return llm


def test_sections_follow_their_tag_and_drafts_change_no_output(tmp_path: Path) -> None:
    """Compare outputs with and without drafts; without the tag some outputs break the rule."""
    tagged = [
        SamplingParams(seed=i, max_tokens=40, logprobs=2, structured_outputs={"structural_tag": TAG})
        for i in range(12)
    ]
    results = []
    for spec in (None, NGRAM):
        with tagged_llm(tmp_path, spec) as llm:
            results.append([llm.generate("abab", p)[0].outputs[0] for p in tagged])
            free = [llm.generate("abab", p.clone(structured_outputs=None))[0].outputs[0].text for p in tagged]
    assert list(map(output_fields, results[0])) == list(map(output_fields, results[1]))
    texts = [output.text for output in results[1]]
    assert not [text for text in texts if WRONG.search(text)] and any("ab " in text for text in texts)
    assert any(WRONG.search(text) for text in free)


def test_older_form_of_a_tag_is_converted() -> None:
    found = json.loads(str(StructuredOutputs(structural_tag=json.dumps(OLD)).structural_tag))
    assert found["format"]["triggers"] == ["<f>"] and found["format"]["type"] == "triggered_tags"
    section = {
        "begin": "<f>",
        "content": {"type": "json_schema", "json_schema": {"type": "object"}},
        "end": "</f>",
    }
    assert found["format"]["tags"] == [section]


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ([1], "must be an object"),
        ("{", "cannot be read"),
        ({"structures": [{}], "triggers": []}, "cannot be read"),
    ],
)
def test_wrong_tag_is_refused(tag: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        StructuredOutputs(structural_tag=tag)


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ({"type": "structural_tag", "format": {"type": "nonsense"}}, "nonsense"),
        ({**OLD, "structures": [{**OLD["structures"][0], "schema": {"not": {"type": "string"}}}]}, "'not'"),
    ],
)
def test_tag_that_cannot_be_enforced_is_refused(tmp_path: Path, tag: Any, message: str) -> None:
    with tagged_llm(tmp_path, None) as llm, pytest.raises(RequestError, match=message):
        llm.generate("ab", SamplingParams(structured_outputs={"structural_tag": tag}))
