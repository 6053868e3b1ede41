"""`draftproof chat` on a pseudo-terminal against a scripted server."""

from __future__ import annotations

import json
import re
from pathlib import Path

from scripted_chat import HOLD, call, pieces, scripted_chat
from terminal import Screen, on_terminal

REPLY = "The **sky** is `blue`:\n\n- by day\n- not by night\n\nNothing else.\n"
GOLDEN = """\
> What is it?
The sky is blue:

 • by day
 • not by night

Nothing else.
13 tokens in 13 steps, 0.0 tok/s"""


def shown(text: str) -> str:
    """Return what a terminal shows, with speeds replaced by zero."""
    return re.sub(r"[\d.]+ tok/s", "0.0 tok/s", Screen().feed(text).text)


def test_conversation_on_a_terminal(tmp_path: Path) -> None:
    """Check Markdown, multi-line input, commands, partial replies after Ctrl-C, errors and the history."""
    tools = tmp_path / "tools.py"
    tools.write_text('def add(a: int, b: int) -> int:\n    """Add numbers."""\n    return a + b\n')
    replies = [
        pieces(REPLY),
        [{"reasoning_content": "Hmm."}, {"content": "Partial"}, HOLD],
        "no such thing",
        call("add", '{"a": 2, "b": 3}'),
        pieces("It is 5."),
        pieces("Again."),
    ]
    saved, state = tmp_path / "talk.json", tmp_path / "state"
    arguments = ("chat", "--tools", str(tools), "--system", "Be brief.")
    with (
        scripted_chat(replies) as server,
        on_terminal(*arguments, "--url", server.url, XDG_STATE_HOME=str(state)) as terminal,
    ):
        terminal.expect("exits.\n")
        terminal.expect("> ")
        terminal.send("What is it?\r")
        output = "> " + terminal.expect("tok/s")
        assert shown(output) == GOLDEN
        terminal.expect("> ")
        terminal.send('"""one\r')
        terminal.expect(". ")
        terminal.send('two"""\r')
        terminal.expect("\x1b[2mHmm.")  # reasoning is dimmed
        terminal.expect("Partial")
        terminal.expect("> ", interrupt=True)  # stops the reply, not the program
        terminal.send("wrong\\\r")
        terminal.expect(". ")
        terminal.send("thing\r")
        terminal.expect("error: no such thing")
        terminal.expect("> ")
        terminal.expect("/exit or Ctrl-D exits.", interrupt=True)
        terminal.expect("> ")
        terminal.send("/set temperature 0.7\r")
        terminal.expect("temperature 0.7\n")
        terminal.expect("> ")
        terminal.send("Sum?\r")
        terminal.expect("Run it? [y/N, a: always] ")
        terminal.send("y\r")
        terminal.expect("It is 5.")
        terminal.expect("tok/s")
        terminal.send("/ret\t\r")  # completed
        terminal.expect("Again.")
        terminal.expect("tok/s")
        terminal.send(f"/save {saved}\r")
        terminal.expect("messages are in")
        terminal.expect("> ")
        terminal.send("\x04")
        assert terminal.wait() == 0
    assert [body["messages"][-1]["content"] for body in server.bodies] == [
        *("What is it?", "one\ntwo", "wrong\nthing", "Sum?", "5", "Sum?")
    ]
    last = server.bodies[-1]
    assert last["temperature"] == 0.7 and last["tools"][0]["function"]["name"] == "add"
    roles = [message["role"] for message in last["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
    assert last["messages"][4]["content"] == "Partial"  # of the reply that was stopped
    assert server.bodies[4]["messages"][-2]["tool_calls"][0]["function"]["name"] == "add"
    assert json.loads(saved.read_text())["messages"][-1] == {"role": "assistant", "content": "Again."}
    history = state / "draftproof" / "chat_history"
    assert "What is it?" in history.read_text() and history.stat().st_mode & 0o077 == 0
