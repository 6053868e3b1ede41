"""`draftproof chat` on a model in this process: the server's application without a socket."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from draftproof import SamplingParams
from draftproof.cli.chat.conversation import Conversation
from draftproof.cli.chat.local_client import LocalClient
from draftproof.cli.chat.slash_commands import COMMANDS, run_command
from draftproof.errors import RequestError
from draftproof.serve.settings import Settings
from exact import check_empty
from serving import NGRAM, make_folder, tiny

QUESTION = "one two three one two three one two"
OPTIONS = {"temperature": 0.0, "max_completion_tokens": 24, "seed": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("local"))


@pytest.fixture(params=[None, NGRAM], ids=["plain", "ngram"])
def client(request: Any, folder: Path) -> Iterator[LocalClient]:
    llm = tiny(folder, request.param)
    made = LocalClient(llm, Settings())
    made.llm = llm  # type: ignore[attr-defined]
    yield made
    made.close()
    check_empty(llm.engine)
    llm.close()


def talk_with(client: Any, **more: Any) -> Conversation:
    return Conversation(client, Console(quiet=True), {**OPTIONS, **more}, "plain")


def test_replies_equal_those_of_the_engine(client: Any, folder: Path) -> None:
    """Check two turns against `LLM.chat` without speculation."""
    talk = talk_with(client)
    assert talk.send(QUESTION) and talk.send("seven")
    plain = tiny(folder)
    params = SamplingParams(temperature=0, max_tokens=24, seed=3)
    for at in (1, 3):
        expected = plain.chat(talk.messages[:at], params)[0].outputs[0]
        assert talk.messages[at] == {"role": "assistant", "content": expected.text}
    plain.close()
    assert [reply.num_tokens for reply in talk.replies] == [24, 24]
    assert all(reply.finish_reason == "length" for reply in talk.replies)
    assert ("drafts accepted" in talk.totals()) == (client.describe().find("ngram") >= 0)


def test_closed_stream_aborts_the_request(client: Any) -> None:
    chunks = client.chat([{"role": "user", "content": QUESTION}], {**OPTIONS, "max_completion_tokens": 90})
    assert len(list(islice(chunks, 3))) == 3
    chunks.close()
    talk = talk_with(client)
    assert talk.send(QUESTION)  # the next request runs; the fixture checks that the engine is empty


def test_refused_request_leaves_no_message(client: Any) -> None:
    talk = talk_with(client, temperature=-1)
    with pytest.raises(RequestError, match="temperature"):
        talk.send(QUESTION)
    assert talk.messages == []


def test_commands_change_the_conversation(tmp_path: Path) -> None:
    console = Console(quiet=True)
    talk = Conversation(None, console, dict(OPTIONS), "plain")  # type: ignore[arg-type]
    talk.messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    run = lambda line: run_command(line, talk, console)  # noqa: E731
    run("/system Be brief.")
    assert talk.messages[0] == {"role": "system", "content": "Be brief."} and len(talk.messages) == 3
    run(f"/save {tmp_path / 'c.json'}")
    run("/undo")
    assert talk.messages == [{"role": "system", "content": "Be brief."}]
    run(f"/load {tmp_path / 'c.json'}")
    assert len(talk.messages) == 3
    run("/reset")
    run("/system none")
    assert talk.messages == []
    for line, key, value in (
        ("/set temperature 0.7", "temperature", 0.7),
        ("/set max_tokens=9", "max_completion_tokens", 9),
        ("/set seed none", "seed", None),
    ):
        run(line)
        assert talk.options[key] == value
    run("/set view drafts")
    assert talk.view == "drafts"
    assert not run("/exit") and set(COMMANDS) >= {"/help", "/stats", "/retry"}
    run("/help"), run("/stats"), run("/tools")
    for line, message in (
        ("/rest", "did you mean '/reset'"),
        ("/reset now", "takes no argument"),
        ("/set temprature 1", "did you mean 'temperature'"),
        ("/set temperature hot", "must be a number"),
        ("/set temperature -1", "temperature"),
        ("/set view html", "one of markdown"),
        ("/undo", "no message"),
        ("/retry", "no message"),
        ("/save", "needs the name"),
        ("/load /no/such/file", "cannot be read"),
    ):
        with pytest.raises(RequestError, match=message):
            run(line)
