"""Conversation: messages, request options and tools; one turn runs until the model calls no tool."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from draftproof.cli.chat.client import ChatClient, Message
from draftproof.cli.chat.reply import Reply, read_reply
from draftproof.cli.chat.tools import Tool, ToolError, cut_result, read_arguments
from draftproof.cli.chat.views import ReplyView, printable
from draftproof.errors import RequestError
from draftproof.metrics import SpecStats

MAX_TOOL_ROUNDS = 20  # requests of one turn: a model may call the same tool forever
ROLES = ("system", "user", "assistant", "tool")
Confirm = Callable[[str], bool]


class Conversation:
    """State of a conversation with a model."""

    def __init__(
        self,
        client: ChatClient,
        console: Console,
        options: dict[str, Any],
        view: str,
        *,
        tools: Mapping[str, Tool] | None = None,
        confirm: Confirm = lambda what: True,
        notes: Console | None = None,  # for messages that are not part of a reply
    ) -> None:
        self.options, self.view, self.tools = options, view, dict(tools or {})
        self.messages: list[Message] = []
        self.replies: list[Reply] = []
        self._client, self._console, self._confirm = client, console, confirm
        self._notes = notes or console

    @property
    def system(self) -> str | None:
        """System message; None without one."""
        return self.messages[0]["content"] if self.messages and self.messages[0]["role"] == "system" else None

    @system.setter
    def system(self, text: str | None) -> None:
        rest = self.messages[1:] if self.system is not None else self.messages
        self.messages = ([{"role": "system", "content": text}] if text else []) + rest

    def reset(self) -> None:
        """Remove all messages but the system message."""
        del self.messages[1 if self.system is not None else 0 :]

    def undo(self) -> str | None:
        """Remove the last message of the user and what followed; return its text, None without one."""
        for at in range(len(self.messages) - 1, -1, -1):
            if self.messages[at]["role"] == "user":
                text: str = self.messages[at]["content"]
                del self.messages[at:]
                return text
        return None

    def send(self, text: str) -> bool:
        """Run one turn; return False if it was interrupted. A turn that fails leaves no message."""
        before = len(self.messages)
        self.messages.append({"role": "user", "content": text})
        try:
            for _ in range(MAX_TOOL_ROUNDS):
                reply = self._request()
                self.messages.append(reply.message())
                if reply.is_interrupted or not reply.calls:
                    return not reply.is_interrupted
                for call in reply.calls:
                    self._run(call)
        except BaseException:
            del self.messages[before:]
            raise
        self._note(f"stopped after {MAX_TOOL_ROUNDS} rounds of tool calls; send a message to continue")
        return True

    def _request(self) -> Reply:
        schemas = [tool.schema for tool in self.tools.values()]
        options = {name: value for name, value in self.options.items() if value is not None}
        chunks = self._client.chat(self.messages, options, schemas)
        reply = read_reply(chunks, ReplyView(self._console, self.view))
        self.replies.append(reply)
        if reply.finish_reason == "length":
            self._note(f"cut after {reply.num_tokens} tokens; /set max_tokens changes the limit")
        return reply

    def _run(self, call: dict[str, str]) -> None:
        """Run one call after confirmation and add its result to the messages."""
        try:
            arguments = read_arguments(call["arguments"])
        except ToolError as error:
            self.messages[-1]["tool_calls"][-1]["function"]["arguments"] = "{}"  # templates need an object
            result = f"error: {error}"
        else:
            result = self._result(call["name"], arguments)
        self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": cut_result(result)})

    def _result(self, name: str, arguments: dict[str, Any]) -> str:
        tool = self.tools.get(name)
        if tool is None:
            self._note(f"the model called {name}, which is not a tool")
            return f"error: there is no tool {name!r}; the tools are {', '.join(self.tools)}"
        shown = tool.show(arguments)
        if not self._confirm(shown):
            return "error: the user refused this call"
        self._note(f"{name}: {shown}" if not shown.startswith(name) else shown)
        try:
            result = tool.call(arguments)
        except ToolError as error:
            result = f"error: {error}"
        except KeyboardInterrupt:
            result = "error: the user interrupted this call"
        self._note(_first_lines(result))
        return result

    def _note(self, text: str) -> None:
        self._notes.print(Text(printable(text), style="dim"))

    def totals(self) -> str:
        """Return lines with the figures of all replies."""
        stats = SpecStats()
        for reply in self.replies:
            stats.add(reply.stats)
        tokens, seconds = sum(r.num_tokens for r in self.replies), sum(r.seconds for r in self.replies)
        prompt, cached = (
            sum(getattr(r, name) for r in self.replies) for name in ("num_prompt_tokens", "num_cached_tokens")
        )
        lines = [
            f"requests:          {len(self.replies)}",
            f"prompt tokens:     {prompt} ({cached} from the prefix cache)",
            f"generated tokens:  {tokens} in {stats.num_steps} steps",
        ]
        if stats.num_drafts:
            accepted = f"{stats.num_accepted_tokens} of {stats.num_draft_tokens}"
            lines.append(f"drafts accepted:   {accepted} ({100 * stats.acceptance_rate:.0f} %)")
            lines.append(f"acceptance length: {stats.acceptance_length:.2f}")
        if seconds:
            lines.append(f"tokens a second:   {tokens / seconds:.1f}")
        return "\n".join(lines)

    def save(self, path: Path) -> None:
        """Write messages and options to a JSON file."""
        data = {"messages": self.messages, "options": self.options}
        try:
            path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise RequestError(f"{path} cannot be written: {error.strerror}") from error

    def load(self, path: Path) -> None:
        """Replace the messages by those of a file that `save` wrote, or by a list of messages."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise RequestError(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise RequestError(f"{path} is not JSON: {error}") from error
        messages = data.get("messages") if isinstance(data, dict) else data
        if not isinstance(messages, list) or not all(_is_message(m) for m in messages):
            raise RequestError(f"{path} has no list of messages with role and content")
        self.messages = messages


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and value.get("role") in ROLES and "content" in value


def _first_lines(text: str, count: int = 5) -> str:
    lines = text.splitlines()
    more = f"\n[{len(lines) - count} further lines]" if len(lines) > count else ""
    return "\n".join(lines[:count]) + more
