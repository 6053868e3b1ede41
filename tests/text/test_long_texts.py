"""Long texts: equal tokens, tokenized without the interpreter lock, and refused early if they cannot fit."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from draftproof.text.tokenizer import MIN_UNLOCKED_CHARS, Tokenizer
from serving import CORPUS, make_folder, serving, tiny


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny(make_folder(tmp_path_factory.mktemp("long")))


def test_long_text_has_the_tokens_of_the_backend(llm: Any) -> None:
    tokenizer: Tokenizer = llm.get_tokenizer()
    text = "\n".join(CORPUS * 40)
    assert len(text) > MIN_UNLOCKED_CHARS
    assert tokenizer.encode(text) == tokenizer.backend.encode(text).ids
    assert max(len(tokenizer.backend.id_to_token(i)) for i in tokenizer.encode(text)) <= tokenizer.longest


def test_other_threads_run_while_a_long_text_is_tokenized(llm: Any) -> None:
    tokenizer: Tokenizer = llm.get_tokenizer()
    text, counts = " ".join(CORPUS * 2000), []
    done = threading.Event()

    def count() -> None:
        while not done.wait(0.0001):
            counts.append(1)

    def counted(encode: Any) -> int:
        before = len(counts)
        encode()
        return len(counts) - before

    thread = threading.Thread(target=count)
    thread.start()
    try:
        ours = counted(lambda: tokenizer.encode(text))
        control = counted(lambda: tokenizer.backend.encode(text))  # holds it
    finally:
        done.set()
        thread.join()
    assert ours > 10 * control


def test_text_beyond_the_context_is_not_tokenized(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    size = llm.engine.limits.max_model_len * llm.get_tokenizer().longest + 1

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("it was tokenized")

    with serving(llm) as served:
        monkeypatch.setattr(Tokenizer, "encode", never)
        chat = {"messages": [{"role": "user", "content": "a" * size}]}
        for path, body, param in (
            ("/v1/completions", {"prompt": "a" * size}, "prompt"),
            ("/v1/chat/completions", chat, "messages"),
        ):
            reply = served.post(path, body)
            assert reply.status_code == 400 and reply.json()["error"]["param"] == param
