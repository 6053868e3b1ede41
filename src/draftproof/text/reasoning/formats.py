"""Table of reasoning formats: the markers around the reasoning, by family of models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from draftproof.errors import ConfigError, nearest
from draftproof.text.tool_calls import harmony
from draftproof.text.tool_calls.parser import Steps, TextReader

NO_PARSER = "none"  # value of the option that switches the splitting off
Parse = Callable[[TextReader], Steps[None]]


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Form in which a family of models writes its reasoning."""

    name: str
    models: str
    starts: tuple[str, ...]  # the first is the usual one
    ends: tuple[str, ...]  # the first is the one that a budget forces
    template_marks: tuple[str, ...]  # all of them are in a chat template of this format
    names: tuple[str, ...] = ()  # further names, of parsers in vLLM and SGLang
    label: str = ""  # text behind the start marker that is no reasoning
    answer: tuple[str, str] | None = None  # text around the content
    call_start: str | None = None  # start of tool calls, which ends the reasoning as well
    is_always_open: bool = False  # outputs begin inside the reasoning, unless the prompt ends it
    parse: Parse | None = None  # parser of the whole output, in place of the markers


def _think(name: str, models: str, *more: str, **fields: object) -> ReasoningFormat:
    """Return a format with the markers `<think>` and `</think>`. `more`: further marks of templates."""
    marks = ("</think>", *more)
    return ReasoningFormat(name, models, ("<think>",), ("</think>",), marks, **fields)  # type: ignore[arg-type]


# The order matters for detection: marks of a later format may occur in templates of an earlier one.
FORMATS = {
    each.name: each
    for each in (
        ReasoningFormat(
            "openai_gptoss",
            "gpt-oss",
            ("<|channel|>analysis<|message|>",),
            ("<|end|>",),
            ("<|channel|>", "analysis"),
            names=("gpt_oss", "gpt-oss"),
            parse=harmony.harmony,
        ),
        ReasoningFormat(
            "gemma4", "Gemma 4", ("<|channel>",), ("<channel|>",), ("<|channel>",), label="thought\n"
        ),
        ReasoningFormat(
            "cohere_command3",
            "Command A Reasoning",
            ("<|START_THINKING|>",),
            ("<|END_THINKING|>",),
            ("<|START_THINKING|>",),
            answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        ),
        ReasoningFormat(
            "mistral", "Magistral, Ministral", ("[THINK]",), ("[/THINK]",), ("[THINK]",), names=("magistral",)
        ),
        ReasoningFormat(
            "seed_oss",
            "Seed-OSS",
            ("<seed:think>",),
            ("</seed:think>",),
            ("<seed:think>",),
            names=("seed-oss",),
            label="<seed:cot_budget_reflect>",
        ),
        ReasoningFormat("kimi", "Kimi-VL, Kimi K1.5", ("◁think▷",), ("◁/think▷",), ("◁think▷",)),
        ReasoningFormat("exaone", "EXAONE Deep", ("<thought>",), ("</thought>",), ("</thought>",)),
        ReasoningFormat(
            "granite",
            "Granite 3.2",
            ("Here is my thought process:", "Here's my thought process:"),
            ("Here is my response:", "Here's my response:"),
            ("Here is my thought process:",),
        ),
        _think("hunyuan_a13b", "Hunyuan A13B", "<answer>", answer=("<answer>", "</answer>")),
        _think(
            "ernie45", "ERNIE 4.5 Thinking, Granite 3.3", "<response>", answer=("<response>", "</response>")
        ),
        _think(
            "kimi_k2",
            "Kimi K2 Thinking",
            "<|tool_calls_section_begin|>",
            call_start="<|tool_calls_section_begin|>",
        ),
        _think(
            "qwen3",
            "Qwen3, QwQ, DeepSeek R1 and V3.1, GLM-4.5, SmolLM3, MiniMax-M2, OLMo 3, Phi-4, Nemotron",
            names=(
                *(
                    "deepseek_v3",
                    "deepseek-v3",
                    "glm45",
                    "glm47",
                    "holo2",
                    "mimo",
                    "minimax_m2",
                    "nemotron_v3",
                ),
                *("olmo3", "smollm3", "think"),
            ),
        ),
        # chosen by name only: for templates that neither open the reasoning nor let the model do it
        _think(
            "deepseek_r1",
            "DeepSeek R1 with templates that leave <think> out",
            "\0",
            names=("deepseek-r1", "qwen3-thinking", "step3"),
            is_always_open=True,
        ),
    )
}
_BY_NAME = {name: form for form in FORMATS.values() for name in (form.name, *form.names)}


def detect(template: str) -> ReasoningFormat | None:
    """Return the format that a chat template writes reasoning in; None if it has no known one."""
    found = (each for each in FORMATS.values() if all(mark in template for mark in each.template_marks))
    return next(found, None)


def find_format(name: str | None, template: str) -> ReasoningFormat | None:
    """Return the format of the option `reasoning_parser`; ConfigError for an unknown name."""
    if name is None:
        return detect(template)
    if name == NO_PARSER:
        return None
    if name not in _BY_NAME:
        raise ConfigError(f"unknown reasoning parser {name!r}: {nearest(name, (*_BY_NAME, NO_PARSER))}")
    return _BY_NAME[name]
