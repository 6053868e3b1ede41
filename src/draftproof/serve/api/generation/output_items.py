"""Output of a choice as a list of items: reasoning, text and calls in the order of the output.

The Responses API and the Messages API return such lists, whole or as events. Both come from the same deltas.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from draftproof.outputs import CompletionOutput, LogprobRow, RequestOutput, TokenEvent
from draftproof.serve.api.generation.logprob_format import logprob_rows
from draftproof.serve.api.generation.request_parser import ParsedRequest
from draftproof.serve.api.generation.response_builder import Fields, ResponseBuilder
from draftproof.serve.http.sse import GenerationFailed
from draftproof.text.tool_calls.parser import CallDelta, ContentDelta, Delta

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class OutputItem:
    """One item. `text` of a call: its arguments."""

    kind: Kind
    index: int  # in the output
    text: str = ""
    name: str = ""  # of the function that is called
    call_id: str = ""
    rows: list[LogprobRow] = field(default_factory=list)  # logprobs of the tokens of a text


@dataclass(slots=True)
class ItemChange:
    """New text of an item."""

    item: OutputItem
    text: str
    rows: Sequence[LogprobRow]
    is_new: bool  # first change of the item


class OutputItems:
    """Items of one choice, built from its text as it arrives."""

    def __init__(self, parsed: ParsedRequest) -> None:
        self._parsing = parsed.parsing
        self._stream = None if parsed.parsing is None else parsed.parsing.stream()
        self.items: list[OutputItem] = []
        self._num_parsed = 0  # characters
        self._waiting: deque[tuple[int, LogprobRow]] = deque()  # by the character where their token begins
        self._rows: list[LogprobRow] = []  # of tokens whose text is held back

    def add_rows(self, begins: Iterable[int], rows: Iterable[LogprobRow]) -> None:
        """Add the logprobs of tokens that begin at these characters, before their text is fed."""
        self._waiting.extend(zip(begins, rows, strict=False))

    def feed(self, text: str, is_last: bool) -> list[ItemChange]:
        """Return the changes by new text. Tokens that begin in it add their logprobs on the way."""
        changes = []
        while self._waiting and (is_last or self._waiting[0][0] <= self._num_parsed + len(text)):
            begin, row = self._waiting.popleft()
            length = max(0, begin - self._num_parsed)
            changes += self._parse(text[:length], is_last=False)
            text = text[length:]
            self._rows.append(row)
        return changes + self._parse(text, is_last)

    def _parse(self, text: str, is_last: bool) -> list[ItemChange]:
        self._num_parsed += len(text)
        changes = [self._change(delta) for delta in self._deltas(text, is_last)]
        if is_last and not self.items:
            changes.append(self._change(ContentDelta("")))
        if is_last and self._rows and self.items[-1].kind == "text":
            changes.append(self._change(ContentDelta("")))  # logprobs of tokens without text
        return changes

    def _deltas(self, text: str, is_last: bool) -> list[Delta]:
        if self._stream is not None:
            return self._stream.parse(text, is_last)
        return [ContentDelta(text)] if text else []

    def _change(self, delta: Delta) -> ItemChange:
        last = self.items[-1] if self.items else None
        if isinstance(delta, CallDelta):
            kind: Kind = "call"
            text, is_new = delta.arguments, delta.name is not None
        else:
            kind, text = "text" if isinstance(delta, ContentDelta) else "reasoning", delta.text
            is_new = last is None or last.kind != kind
        if is_new:
            last = OutputItem(kind, len(self.items))
            if isinstance(delta, CallDelta):
                assert delta.name is not None and self._parsing is not None
                last.name, last.call_id = delta.name, self._parsing.call_id(delta)
            self.items.append(last)
        assert last is not None and last.kind == kind
        rows, self._rows = self._rows if kind == "text" else [], []
        last.text += text
        last.rows += rows
        return ItemChange(last, text, rows, is_new)


class ItemBuilder(ResponseBuilder):
    """Builder of a response that is a list of items."""

    def items(self, output: CompletionOutput) -> list[OutputItem]:
        """Return the items of a whole output."""
        items = OutputItems(self.parsed)
        items.add_rows(output.text_offsets, logprob_rows(output.logprobs))
        items.feed(output.text, is_last=True)
        return items.items

    def whole(self, outputs: Sequence[RequestOutput]) -> Any:
        """Return the body of a request without streaming."""
        return self.response(self.items(outputs[0].outputs[0]), outputs)

    def response(self, items: Sequence[OutputItem], outputs: Sequence[RequestOutput]) -> Any:
        """Return the response with the items of its only choice."""
        raise NotImplementedError

    def extensions(self, outputs: Sequence[RequestOutput]) -> Fields:
        """Return the fields of this server: seed, statistics, and token ids if requested."""
        fields: Fields = {"seed": self.seed_of(0), "metrics": self.metrics(outputs)}
        if self.parsed.token_ids:
            fields["token_ids"] = outputs[0].outputs[0].token_ids
            fields["prompt_token_ids"] = outputs[0].prompt_token_ids
        return fields


class ItemEncoder:
    """Encoder of the events of a response that is a list of items."""

    def __init__(self, builder: ItemBuilder) -> None:
        self._items = OutputItems(builder.parsed)
        self._open: OutputItem | None = None

    def add(self, out: bytearray, p: int, events: Sequence[TokenEvent]) -> None:
        """Write tokens. GenerationFailed after the tokens before a failure."""
        for event in events:
            if event.finish_reason in ("error", "abort"):
                raise GenerationFailed(event)
            if event.logprob_row is not None:
                self._items.add_rows([event.text_offset], [event.logprob_row])
            for change in self._items.feed(event.text, event.finish_reason is not None):
                if change.is_new:
                    self._end_open_item(out)
                    self._open = change.item
                    self._begin_item(out, change.item)
                self._extend_item(out, change)

    def _end_open_item(self, out: bytearray) -> None:
        if self._open is not None:
            self._end_item(out, self._open)
            self._open = None

    def _begin_item(self, out: bytearray, item: OutputItem) -> None:
        raise NotImplementedError

    def _extend_item(self, out: bytearray, change: ItemChange) -> None:
        raise NotImplementedError

    def _end_item(self, out: bytearray, item: OutputItem) -> None:
        raise NotImplementedError
