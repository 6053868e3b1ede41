"""Builder of a message, and encoder of its events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from draftproof.outputs import LogprobRow, RequestOutput
from draftproof.serve.api.generation.output_items import ItemBuilder, ItemChange, ItemEncoder, OutputItem
from draftproof.serve.api.messages import response_schema as schema
from draftproof.serve.http.errors import ApiError

_ENCODER = msgspec.json.Encoder()


class MessageBuilder(ItemBuilder):
    """Builder for /v1/messages."""

    def begun(self, num_prompt: int) -> schema.MessageResponse:
        """Return the message without content."""
        usage = schema.MessageUsage(input_tokens=num_prompt, cache_read_input_tokens=0, output_tokens=0)
        head = self.head
        return schema.MessageResponse(id=head["id"], model=head["model"], content=[], usage=usage)

    def response(
        self, items: Sequence[OutputItem], outputs: Sequence[RequestOutput]
    ) -> schema.MessageResponse:
        """Return the message."""
        output, usage = outputs[0].outputs[0], self.usage(outputs)
        reason: schema.StopReason = "end_turn"
        if output.finish_reason == "length":
            is_limit = usage.completion_tokens == self.parsed.params.max_tokens
            reason = "max_tokens" if is_limit else "model_context_window_exceeded"
        elif any(item.kind == "call" for item in items):
            reason = "tool_use"
        elif isinstance(output.stop_reason, str):
            reason = "stop_sequence"
        cached = outputs[0].num_cached_tokens
        return schema.MessageResponse(
            id=self.head["id"],
            model=self.head["model"],
            content=[self.block(item) for item in items],
            stop_reason=reason,
            stop_sequence=str(output.stop_reason) if reason == "stop_sequence" else None,
            usage=schema.MessageUsage(
                input_tokens=usage.prompt_tokens - cached,
                cache_read_input_tokens=cached,
                output_tokens=usage.completion_tokens,
            ),
            **self.extensions(outputs),
        )

    def block(self, item: OutputItem, is_empty: bool = False) -> Any:
        """Return an item as a block; `is_empty`: as its first event has it."""
        text = "" if is_empty else item.text
        if item.kind == "text":
            return schema.OutputTextBlock(text=text)
        if item.kind == "reasoning":
            return schema.OutputThinkingBlock(thinking=text)
        return schema.OutputToolUseBlock(id=item.call_id, name=item.name, input=_json_object(text))


def _json_object(text: str) -> msgspec.Raw:
    """Return the arguments of a call; {} if the end of the output cut them off."""
    try:
        is_object = isinstance(msgspec.json.decode(text), dict)
    except msgspec.DecodeError:
        is_object = False
    return msgspec.Raw(text.encode() if is_object else b"{}")


class MessageEncoder(ItemEncoder):
    """Encoder of the events of one message."""

    def __init__(self, builder: MessageBuilder) -> None:
        super().__init__(builder)
        self._builder = builder

    def open(self, out: bytearray, p: int, rows: Sequence[LogprobRow | None]) -> None:
        """Write what comes before the first token."""
        num_prompt = len(self._builder.parsed.prompts[p].ids)
        _write(out, "message_start", message=self._builder.begun(num_prompt))
        _write(out, "ping")

    def close(self, out: bytearray, outputs: Sequence[RequestOutput]) -> None:
        """Write what comes after the last token."""
        made = self._builder.response(self._items.items, outputs)
        self._end_open_item(out)
        delta = {"stop_reason": made.stop_reason, "stop_sequence": made.stop_sequence}
        extensions = self._builder.extensions(outputs)
        _write(out, "message_delta", delta=delta, usage=made.usage, **extensions)
        _write(out, "message_stop")

    def failure(self, error: ApiError) -> bytes:
        """Return the event of an error after the status line was sent."""
        return b"event: error\ndata: %s\n\n" % error.body

    def _begin_item(self, out: bytearray, item: OutputItem) -> None:
        block = self._builder.block(item, is_empty=True)
        _write(out, "content_block_start", index=item.index, content_block=block)

    def _extend_item(self, out: bytearray, change: ItemChange) -> None:
        if not change.text:
            return
        kind, name = {
            "text": ("text_delta", "text"),
            "reasoning": ("thinking_delta", "thinking"),
            "call": ("input_json_delta", "partial_json"),
        }[change.item.kind]
        delta = {"type": kind, name: change.text}
        _write(out, "content_block_delta", index=change.item.index, delta=delta)

    def _end_item(self, out: bytearray, item: OutputItem) -> None:
        _write(out, "content_block_stop", index=item.index)


def _write(out: bytearray, kind: str, **fields: Any) -> None:
    data = _ENCODER.encode({"type": kind, **fields})
    out += b"event: %s\ndata: %s\n\n" % (kind.encode(), data)
