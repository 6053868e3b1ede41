"""Parser of the harmony format of gpt-oss: messages with a channel and a recipient."""

from __future__ import annotations

import re

from draftproof.text.tool_calls.parser import Steps, TextReader

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_CHANNEL = re.compile(r"(?:<\|channel\|>|^)\s*(\w+)")


def harmony(reader: TextReader) -> Steps[None]:
    """Parse messages: analysis is reasoning, a recipient makes a call, the rest is content."""
    opening = yield from reader.stream_until((START, CHANNEL), reader.content)
    while opening:
        head, found = yield from reader.take_until((MESSAGE,))
        if not found:  # cut off inside a header, which is no content
            return
        recipient = _RECIPIENT.search(head)
        channel = _CHANNEL.findall(head if opening == CHANNEL else head.partition(CHANNEL)[2] or "final")
        if recipient:
            reader.start_call(recipient[1])
            emit = reader.arguments
        else:
            emit = reader.reasoning if channel[:1] == ["analysis"] else reader.content
        end = yield from reader.stream_until((*ENDS, START), emit)
        if end in (START, ""):
            opening = end
        else:
            opening = yield from reader.stream_until((START, CHANNEL), reader.content)
