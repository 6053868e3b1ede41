"""Parsing of the outputs of a chat request: reasoning, content and tool calls, whole or in deltas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import UNSET

from draftproof.serve.api.generation import response_schema as response
from draftproof.serve.api.generation.tool_options import ToolOptions
from draftproof.text.reasoning.parser import parse_reasoning
from draftproof.text.reasoning.section import Reasoning
from draftproof.text.tool_calls.parser import (
    CallDelta,
    ContentDelta,
    Delta,
    ReasoningDelta,
    ToolCallParser,
    collect,
)


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """How the outputs of one request are parsed: for reasoning, tool calls, or both."""

    tools: ToolOptions | None = None
    reasoning: Reasoning | None = None  # of the model
    is_open: bool = False  # the prompt ends inside the reasoning
    includes_reasoning: bool = True  # False: it is left out of the response

    def stream(self) -> ChoiceStream:
        """Return the state of one streamed choice."""
        return ChoiceStream(self)

    def parser(self) -> ToolCallParser:
        """Return the parser of one output."""
        calls = None if self.tools is None else self.tools.output_format.parse
        schemas = {} if self.tools is None else self.tools.schemas
        if self.reasoning is not None:
            calls = parse_reasoning(self.reasoning.form, self.is_open, calls)
        assert calls is not None
        return ToolCallParser(calls, schemas)

    def count_reasoning(self, outputs: Sequence[Sequence[int]]) -> int:
        """Return the number of reasoning tokens in outputs of token ids."""
        if self.reasoning is None:
            return 0
        return sum(self.reasoning.section.count(ids, self.is_open) for ids in outputs)

    def call_id(self, call: CallDelta) -> str:
        """Return the id of a call at its start."""
        assert self.tools is not None and call.name is not None
        return call.id or self.tools.format.make_id(call.name, call.index)

    def message(self, text: str) -> response.ChatMessage:
        """Return the message of a whole output."""
        stream = self.stream()
        parsed = collect(stream.parse(text, is_last=True))
        calls = [
            response.ToolCall(
                id=self.call_id(CallDelta(i, call.name, call.id)),
                function=response.FunctionCall(name=call.name, arguments=call.arguments),
            )
            for i, call in enumerate(parsed.calls)
        ]
        return response.ChatMessage(
            content=parsed.content or (None if calls else ""),
            tool_calls=calls or UNSET,
            reasoning_content=parsed.reasoning or UNSET,
            reasoning=parsed.reasoning or UNSET,
        )


class ChoiceStream:
    """State of one streamed choice with tools or reasoning."""

    def __init__(self, options: OutputOptions) -> None:
        self._options, self._parser = options, options.parser()

    @property
    def has_calls(self) -> bool:
        """Whether a call has started."""
        return self._parser.num_calls > 0

    def parse(self, text: str, is_last: bool) -> list[Delta]:
        """Return the deltas of new text in their order, without those that the request excludes."""
        deltas: list[Delta] = self._parser.feed(text)
        if is_last:
            deltas += self._parser.finish()
        return [each for each in deltas if self._is_included(each)]

    def _is_included(self, delta: Delta) -> bool:
        tools = self._options.tools
        if isinstance(delta, ReasoningDelta):
            return self._options.includes_reasoning
        return not (isinstance(delta, CallDelta) and delta.index and tools is not None and tools.only_one)

    def delta(self, text: str, is_last: bool) -> response.Delta:
        """Return the delta of new text."""
        made = response.Delta()
        calls: dict[int, response.ToolCallDelta] = {}
        for each in self.parse(text, is_last):
            if isinstance(each, ContentDelta):
                made.content = (made.content or "") + each.text
            elif isinstance(each, ReasoningDelta):
                made.reasoning_content = made.reasoning = (made.reasoning or "") + each.text
            else:
                self._add(calls, each)
        if calls:
            made.tool_calls = list(calls.values())
        return made

    def _add(self, calls: dict[int, response.ToolCallDelta], delta: CallDelta) -> None:
        if delta.name is not None:
            calls[delta.index] = response.ToolCallDelta(
                index=delta.index,
                id=self._options.call_id(delta),
                type="function",
                function=response.FunctionDelta(name=delta.name, arguments=delta.arguments),
            )
        elif delta.index in calls:
            calls[delta.index].function.arguments += delta.arguments
        else:
            function = response.FunctionDelta(arguments=delta.arguments)
            calls[delta.index] = response.ToolCallDelta(index=delta.index, function=function)
