"""Reasoning formats: detection, splitting of whole and streamed texts, open prompts, counted tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from draftproof.errors import ConfigError
from draftproof.text.reasoning.formats import FORMATS, ReasoningFormat, find_format
from draftproof.text.reasoning.parser import parse_reasoning
from draftproof.text.reasoning.section import Phase, Reasoning
from draftproof.text.tool_calls import json_calls
from draftproof.text.tool_calls.parser import ParsedText, ToolCallParser, collect

MARKED = [form for form in FORMATS.values() if form.parse is None]
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


class Pieces:
    """Tokenizer with given token texts; encoding takes the longest token that fits."""

    def __init__(self, texts: Sequence[str], special: Sequence[str] = ()) -> None:
        self.texts = [*special, *texts]
        self.special_ids = frozenset(range(len(special)))

    def token_bytes(self, token: int) -> bytes:
        return self.texts[token].encode()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = []
        while text:
            fitting = [i for i, piece in enumerate(self.texts) if text.startswith(piece)]
            ids.append(max(fitting, key=lambda i: len(self.texts[i])))
            text = text[len(self.texts[ids[-1]]) :]
        return ids


def letters(*special: str, also: Sequence[str] = ()) -> Any:
    return Pieces([*map(chr, range(32, 127)), "\n", "◁", "▷", "/", *also], special)


def reasoning(name: str, *special: str, also: Sequence[str] = ()) -> Any:
    made = letters(*special, also=also)
    return Reasoning(FORMATS[name], made, len(made.texts)), made


def split_text(form: ReasoningFormat, text: str, is_open: bool) -> ParsedText:
    """Split a whole output without tool calls: the incremental parser, fed once."""
    parser = ToolCallParser(parse_reasoning(form, is_open), {})
    return collect([*parser.feed(text), *parser.finish()])


@pytest.mark.parametrize("form", MARKED, ids=lambda form: form.name)
def test_text_is_split_in_every_way_to_stream_it(form: Any) -> None:
    start, end = form.starts[0] + form.label, form.ends[0]
    before, after = form.answer or ("", "")
    answer = f"{before}\n The answer < {end[:4]} \n{after}"
    cases = [
        (f"\n{start}\n why < {end[:3]}\n{end}\n\n{answer}", False, f"why < {end[:3]}"),
        (f"why{end}{answer}", True, "why"),
        (f"{start}why{end}{answer}", True, "why"),
    ]
    wanted = f"The answer < {end[:4]}"
    for text, is_open, thought in cases:
        found = split_text(form, text, is_open)
        assert (found.reasoning, found.content.strip()) == (thought, wanted), (text, found)
        for seed in range(20):
            draw = random.Random(seed)
            cuts = sorted(draw.sample(range(len(text) + 1), min(len(text), 1 + seed)))
            parser = ToolCallParser(parse_reasoning(form, is_open), {})
            deltas = [
                d for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True) for d in parser.feed(text[a:b])
            ]
            assert collect([*deltas, *parser.finish()]) == found
    assert split_text(form, " plain text", False).content == " plain text"
    cut = split_text(form, f"{start}never ended", False)
    assert (cut.reasoning, cut.content) == ("never ended", "")


def test_second_section_and_markers_in_the_content_stay_content() -> None:
    found = split_text(FORMATS["qwen3"], "<think>a</think>b <think>c</think>", False)
    assert (found.reasoning, found.content) == ("a", "b <think>c</think>")
    found = split_text(FORMATS["qwen3"], "b </think> c", False)
    assert (found.reasoning, found.content) == ("", "b </think> c")


def test_calls_are_parsed_behind_the_reasoning_only() -> None:
    text = f"<think>I could write {CALL}</think>\n\nWell. {CALL}"
    parser = ToolCallParser(parse_reasoning(FORMATS["qwen3"], False, json_calls.hermes), {"f": {}})
    found = collect([*parser.feed(text), *parser.finish()])
    assert found.reasoning == f"I could write {CALL}" and found.content == "Well."
    assert [(call.name, call.arguments) for call in found.calls] == [("f", '{"x": 1}')]


def test_calls_of_kimi_end_an_unclosed_reasoning() -> None:
    form = FORMATS["kimi_k2"]
    found = split_text(form, "<think>why<|tool_calls_section_begin|>call", False)
    assert (found.reasoning, found.content) == ("why", "<|tool_calls_section_begin|>call")


def test_harmony_is_split_by_its_own_parser() -> None:
    text = "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>42"
    found = split_text(FORMATS["openai_gptoss"], text, False)
    assert (found.reasoning, found.content) == ("why", "42")


TEMPLATES = {
    "{{ '<think>\n\n</think>' if not enable_thinking }}": "qwen3",
    "{% set content = content.split('</think>')[-1] %}": "qwen3",
    "<think></think> <answer>": "hunyuan_a13b",
    "<think></think><response>": "ernie45",
    "{{ '[THINK]' + text + '[/THINK]' }}": "mistral",
    "<seed:think>": "seed_oss",
    "◁think▷": "kimi",
    "Write after 'Here is my thought process:' and 'Here is my response:'": "granite",
    "<|channel|>analysis": "openai_gptoss",
    "<|channel>thought": "gemma4",
    "plain": None,
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_format_is_detected_from_the_template_or_chosen_by_name(template: str) -> None:
    found = find_format(None, template)
    assert (found and found.name) == TEMPLATES[template]
    assert find_format("none", template) is None
    assert find_format("glm45", template) is FORMATS["qwen3"]
    with pytest.raises(ConfigError, match="did you mean 'qwen3'"):
        find_format("qwen33", template)


def test_prompt_is_open_only_by_the_text_behind_the_last_special_token() -> None:
    model, pieces = reasoning("qwen3", "<|im_start|>", "<|im_end|>", also=("<think>", "</think>"))
    cases = {
        "<|im_start|>assistant\n<think>\n": True,
        "<|im_start|>assistant\n<think>\nas I was": True,
        "<|im_start|>assistant\n<think>\n\n</think>\n\n": False,
        "<|im_start|>assistant\n": False,
        "<|im_start|>user\nwhat is <think>?<|im_end|>\n<|im_start|>assistant\n": False,
        "": False,
    }
    assert {text: model.is_open(pieces.encode(text)) for text in cases} == cases
    seed, pieces = reasoning("seed_oss", "<seed:bos>", "<seed:think>", "<seed:cot_budget_reflect>")
    assert seed.is_open(pieces.encode("<seed:bos>assistant\n<seed:think><seed:cot_budget_reflect>"))
    always, pieces = reasoning("deepseek_r1", "<User>", "<Assistant>")
    assert always.is_open(pieces.encode("<User>hi<Assistant>"))
    assert not always.is_open(pieces.encode("<User>hi<Assistant></think>"))


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_tokens_are_counted_like_the_matcher_and_like_the_text(form: Any) -> None:
    start, end = form.starts[0], form.ends[0]
    for special in ((), (start, end)):
        pieces = letters(*special, also=() if special else (start, end))
        model = Reasoning(form, pieces, len(pieces.texts))  # type: ignore[arg-type]
        assert model.has_special_tokens == bool(special)
        for text, is_open, count in (
            (f"\n{start}abc{end}de", False, 3),
            (f"abc{end}de", True, 3),
            (f"{end}abc", True, 0),
            ("abc", False, 0),
            (f"{start}abc", False, 3),
            (f"a{start}abc{end}", False, 0),
        ):
            ids = pieces.encode(text)
            state = model.section.begin(is_open)
            for token in ids:
                state = model.section.advance(state, token)
            assert model.section.count(ids, is_open) == count == state.num_tokens, text
            assert (state.phase is Phase.INSIDE) == (end not in text and count > 0)
