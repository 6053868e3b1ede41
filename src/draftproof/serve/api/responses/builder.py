"""Builder of a response, and encoder of its events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from draftproof.outputs import LogprobRow, RequestOutput
from draftproof.serve.api.generation.output_items import ItemBuilder, ItemChange, ItemEncoder, OutputItem
from draftproof.serve.api.generation.request_schema import CalledFunction, Message, MessageToolCall
from draftproof.serve.api.responses import response_schema as schema
from draftproof.serve.api.responses.request_schema import ResponseRequest
from draftproof.serve.api.responses.store import ResponseStore
from draftproof.serve.api.responses.translate import input_messages
from draftproof.serve.http.errors import ApiError

ID_PREFIXES = {"text": "msg_", "call": "fc_", "reasoning": "rs_"}
_ENCODER = msgspec.json.Encoder()


class ResponsesBuilder(ItemBuilder):
    """Builder for /v1/responses."""

    body: ResponseRequest
    store: ResponseStore
    key: str
    earlier: Sequence[Message]

    def begun(self, status: Any = "in_progress", **more: Any) -> schema.ResponseObject:
        """Return the response without output."""
        body, params, head = self.body, self.parsed.params, self.head
        return schema.ResponseObject(
            id=head["id"],
            created_at=head["created"],
            model=head["model"],
            system_fingerprint=head["system_fingerprint"],
            status=status,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            max_tool_calls=body.max_tool_calls,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            prompt_cache_key=body.prompt_cache_key,
            reasoning=_given(body.reasoning, effort=None, summary=None),
            safety_identifier=body.safety_identifier,
            store=self.is_stored,
            temperature=params.temperature,
            text=_given(body.text, format={"type": "text"}),
            tool_choice="auto" if body.tool_choice is None else msgspec.to_builtins(body.tool_choice),
            tools=[_given(tool, description=None, parameters=None, strict=None) for tool in body.tools or ()],
            top_logprobs=body.top_logprobs or 0,
            top_p=params.top_p,
            user=body.user,
            **{"output": [], **more},
        )

    @property
    def is_stored(self) -> bool:
        """Whether the response is stored when it is complete."""
        return self.store.is_on and self.body.store is not False

    def response(
        self, items: Sequence[OutputItem], outputs: Sequence[RequestOutput]
    ) -> schema.ResponseObject:
        """Return the response with its output; it is stored unless the request or the server declines."""
        output = outputs[0].outputs[0]
        is_complete = output.finish_reason == "stop"
        last = len(items) - 1
        made = self.begun(
            "completed" if is_complete else "incomplete",
            completed_at=int(time.time()) if is_complete else None,
            incomplete_details=None if is_complete else schema.IncompleteDetails(reason="max_output_tokens"),
            output=[
                self.item(item, "completed" if is_complete or item.index < last else "incomplete")
                for item in items
            ],
            usage=self._usage(outputs),
            **self.extensions(outputs),
        )
        if self.is_stored:
            messages = [*self.earlier, *input_messages(self.body.input), _message(items)]
            self.store.add(self.key, made.id, msgspec.json.encode(made), messages)
        return made

    def _usage(self, outputs: Sequence[RequestOutput]) -> schema.ResponseUsage:
        usage = self.usage(outputs)
        cached = outputs[0].num_cached_tokens
        parsing, ids = self.parsed.parsing, [each.token_ids for each in outputs[0].outputs]
        num_reasoning = 0 if parsing is None else parsing.count_reasoning(ids)
        return schema.ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=schema.InputTokensDetails(cached_tokens=cached),
            output_tokens=usage.completion_tokens,
            output_tokens_details=schema.OutputTokensDetails(reasoning_tokens=num_reasoning),
            total_tokens=usage.total_tokens,
        )

    def item_id(self, item: OutputItem) -> str:
        """Return the id of an item."""
        response_id = str(self.head["id"]).removeprefix("resp_")
        return f"{ID_PREFIXES[item.kind]}{response_id}_{item.index}"

    def item(self, item: OutputItem, status: schema.ItemStatus, is_empty: bool = False) -> msgspec.Struct:
        """Return an item of the output; `is_empty`: as its first event has it."""
        id = self.item_id(item)
        if item.kind == "call":
            return schema.OutputCall(
                id=id,
                status=status,
                call_id=item.call_id,
                name=item.name,
                arguments="" if is_empty else item.text,
            )
        content: Any = [] if is_empty else [self.part(item)]
        if item.kind == "reasoning":
            return schema.OutputReasoning(id=id, status=status, content=content)
        return schema.OutputMessage(id=id, status=status, content=content)

    def part(self, item: OutputItem, is_empty: bool = False) -> Any:
        """Return the only part of a text or of reasoning."""
        text = "" if is_empty else item.text
        if item.kind == "reasoning":
            return schema.ReasoningTextPart(text=text)
        return schema.OutputTextPart(text=text, logprobs=[] if is_empty else self.rows(item.rows))

    def rows(self, rows: Sequence[LogprobRow]) -> list[Any]:
        """Return the logprobs of tokens."""
        return [self.logprobs.chat(row) for row in rows]


def _given(value: msgspec.Struct | None, **defaults: Any) -> dict[str, Any]:
    """Return the fields of an option, with defaults."""
    return {**defaults, **(msgspec.to_builtins(value) if value is not None else {})}


def _message(items: Sequence[OutputItem]) -> Message:
    """Return the output as the message of the assistant that a chat client would send back."""
    calls = [
        MessageToolCall(id=item.call_id, function=CalledFunction(name=item.name, arguments=item.text))
        for item in items
        if item.kind == "call"
    ]
    text, reasoning = (
        "".join(item.text for item in items if item.kind == kind) for kind in ("text", "reasoning")
    )
    return Message(
        role="assistant",
        content=text or (None if calls else ""),
        tool_calls=calls or None,
        reasoning_content=reasoning or None,
    )


class ResponsesEncoder(ItemEncoder):
    """Encoder of the events of one response."""

    def __init__(self, builder: ResponsesBuilder) -> None:
        super().__init__(builder)
        self._builder = builder
        self._number = 0
        self._is_complete = True

    def open(self, out: bytearray, p: int, rows: Sequence[LogprobRow | None]) -> None:
        """Write what comes before the first token."""
        for name in ("created", "in_progress"):
            self._write(out, name, response=self._builder.begun())

    def close(self, out: bytearray, outputs: Sequence[RequestOutput]) -> None:
        """Write what comes after the last token."""
        made = self._builder.response(self._items.items, outputs)
        self._is_complete = made.status == "completed"
        self._end_open_item(out)
        self._write(out, made.status, response=made)

    def failure(self, error: ApiError) -> bytes:
        """Return the event of an error after the status line was sent."""
        detail, out = error.detail, bytearray()
        # a code of the API; clients reject others
        failure = schema.ResponseFailure(
            code="server_error", message=detail.message, type=detail.type, param=detail.param
        )
        items = [self._builder.item(item, "incomplete") for item in self._items.items]
        self._write(out, "failed", response=self._builder.begun("failed", error=failure, output=items))
        return bytes(out)

    def _begin_item(self, out: bytearray, item: OutputItem) -> None:
        made = self._builder.item(item, "in_progress", is_empty=True)
        self._write(out, "output_item.added", output_index=item.index, item=made)
        if item.kind != "call":
            self._write_of(out, "content_part.added", item, part=self._builder.part(item, is_empty=True))

    def _extend_item(self, out: bytearray, change: ItemChange) -> None:
        item, text = change.item, change.text
        if item.kind == "text" and (text or change.rows):
            rows = self._builder.rows(change.rows)
            self._write_of(out, "output_text.delta", item, delta=text, logprobs=rows)
        elif item.kind == "reasoning" and text:
            self._write_of(out, "reasoning_text.delta", item, delta=text)
        elif text:
            self._write_of(out, "function_call_arguments.delta", item, delta=text)

    def _end_item(self, out: bytearray, item: OutputItem) -> None:
        if item.kind == "call":
            self._write_of(out, "function_call_arguments.done", item, name=item.name, arguments=item.text)
        else:
            part = self._builder.part(item)
            if item.kind == "text":
                self._write_of(out, "output_text.done", item, text=item.text, logprobs=part.logprobs)
            else:
                self._write_of(out, "reasoning_text.done", item, text=item.text)
            self._write_of(out, "content_part.done", item, part=part)
        is_cut = not self._is_complete and item.index == len(self._items.items) - 1
        made = self._builder.item(item, "incomplete" if is_cut else "completed")
        self._write(out, "output_item.done", output_index=item.index, item=made)

    def _write_of(self, out: bytearray, event: str, item: OutputItem, /, **fields: Any) -> None:
        """Write an event of an item."""
        place = {"item_id": self._builder.item_id(item), "output_index": item.index}
        if item.kind != "call":
            place["content_index"] = 0
        self._write(out, event, **place, **fields)

    def _write(self, out: bytearray, name: str, /, **fields: Any) -> None:
        event = {"type": f"response.{name}", "sequence_number": self._number, **fields}
        self._number += 1
        out += b"event: response.%s\ndata: %s\n\n" % (name.encode(), _ENCODER.encode(event))
