"""Reply: one message of the model, collected from chunks while a view shows it."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from draftproof.cli.chat.client import Chunk, Message
from draftproof.cli.chat.views import ReplyView
from draftproof.cli.output_rendering import figures_line
from draftproof.metrics import SpecStats


@dataclass(slots=True)
class Reply:
    """Text, tool calls and figures of a message."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)  # id, name, arguments
    finish_reason: str | None = None
    is_interrupted: bool = False
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    seconds: float = 0.0  # from the first token to the last
    stats: SpecStats = field(default_factory=SpecStats)

    @property
    def rate(self) -> float:
        """Tokens per second after the first token."""
        return (self.num_tokens - 1) / self.seconds if self.seconds > 0 else 0.0

    def figures(self) -> str:
        """Return one line with tokens, steps, acceptance and speed."""
        return figures_line(self.num_tokens, self.stats, self.rate)

    def message(self) -> Message:
        """Return the message for the conversation. An interrupted reply keeps its text, not its calls."""
        calls = [] if self.is_interrupted else self.calls
        made: Message = {"role": "assistant", "content": self.content or (None if calls else "")}
        if calls:
            made["tool_calls"] = [
                {
                    "id": c["id"],
                    "type": "function",
                    "function": {"name": c["name"], "arguments": c["arguments"]},
                }
                for c in calls
            ]
        return made

    def add(self, chunk: Chunk, view: ReplyView) -> None:
        """Add one chunk and show it."""
        for choice in chunk["choices"]:
            delta, origins = choice["delta"], choice.get("provenance") or [""]
            self.num_tokens += len(choice.get("token_ids") or ())
            self.stats.num_steps += bool(choice.get("step_end"))
            if thought := delta.get("reasoning_content") or delta.get("reasoning"):
                self.reasoning += thought
                view.reasoning(thought)
            if text := delta.get("content"):
                self.content += text
                view.content(text, origins[-1])
            for call in delta.get("tool_calls") or ():
                self._add_call(call)
            self.finish_reason = choice["finish_reason"] or self.finish_reason
        if usage := chunk.get("usage"):
            self.num_prompt_tokens = usage["prompt_tokens"]
            self.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if metrics := (chunk.get("metrics") or {}).get("speculative_decoding"):
            self.stats.num_emitted_tokens = chunk["usage"]["completion_tokens"]
            self.stats.num_drafts = metrics["num_spec_steps"]
            self.stats.num_draft_tokens = metrics["num_draft_tokens"]
            self.stats.num_accepted_tokens = metrics["num_accepted_draft_tokens"]

    def _add_call(self, delta: dict[str, Any]) -> None:
        function = delta.get("function") or {}
        if delta["index"] == len(self.calls):
            self.calls.append({"id": delta["id"], "name": function["name"], "arguments": ""})
        self.calls[delta["index"]]["arguments"] += function.get("arguments") or ""


def read_reply(chunks: Iterator[Chunk], view: ReplyView) -> Reply:
    """Show a reply as it arrives and return it. Ctrl-C ends it and keeps what was shown."""
    reply, start = Reply(), 0.0
    assert isinstance(chunks, Generator)
    with closing(chunks):
        try:
            for chunk in chunks:
                now = time.perf_counter()
                start = start or (now if any(choice.get("token_ids") for choice in chunk["choices"]) else 0.0)
                reply.add(chunk, view)
                if chunk["choices"] and start:
                    reply.seconds = now - start
        except KeyboardInterrupt:
            reply.is_interrupted = True
        finally:
            view.close()
    return reply
