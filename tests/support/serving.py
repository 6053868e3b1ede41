"""A tiny model behind a real socket for tests of the server."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tokenizers
import uvicorn
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from draftproof import LLM, AsyncLLM, SamplingParams
from draftproof.serve.http.app import create_app
from draftproof.serve.http.server import uvicorn_config
from draftproof.serve.settings import Settings
from text_pieces import CONFIG

CORPUS = [
    "one two three four five six seven eight nine ten and then again one two three",
    'The answer is {"name": "Ada", "age": 36} and not [1, 2, 3] or "true".',
    "Größe, naïve café, здравствуй мир, 你好世界 👍🏽",
]
CHAT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' + (extra_name or '') }}{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>"]
END = 1
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "adaptive": False}


@cache
def _tokenizer() -> str:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[AddedToken(token, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    return backend.to_str()


def make_folder(folder: Path) -> Path:
    """Write a checkpoint without weights, with a tokenizer, a chat template and an end token."""
    (folder / "tokenizer.json").write_text(_tokenizer())
    vocab = tokenizers.Tokenizer.from_str(_tokenizer()).get_vocab_size()
    settings = {"chat_template": CHAT, "eos_token": SPECIAL[END]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    # Tied embeddings make greedy output repeat itself, so that drafts are accepted.
    config = {**CONFIG, "vocab_size": vocab, "eos_token_id": END, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def tiny(folder: Path, speculative_config: Any = None, **more: Any) -> LLM:
    options = {"load_format": "dummy", "dtype": "float32", "device": "cpu", "max_num_seqs": 8, "seed": 5}
    return LLM(str(folder), speculative_config=speculative_config, **{**options, "debug": True, **more})


def with_grammars(llm: LLM) -> LLM:
    """Start the grammar compiler of an LLM, so that no request of a test waits for that."""
    llm.generate("one", SamplingParams(max_tokens=1, structured_outputs={"choice": ["a"]}))
    return llm


def slow_down(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.05) -> None:
    """Make every step of the engine take longer, so that a long request is open while a test continues."""
    tracker = llm._llm.tracker
    step = tracker.step

    def slowly() -> Any:
        time.sleep(seconds)
        return step()

    monkeypatch.setattr(tracker, "step", slowly)


class Served:
    """A running server and clients of it."""

    def __init__(self, url: str, app: Any, llm: AsyncLLM) -> None:
        self.url, self.app, self.llm = url, app, llm
        self.model = app.state.metrics.model
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)
        self.http = httpx.Client(base_url=url, timeout=300)

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return self.http.post(path, json=body, **more)

    def complete(self, prompt: Any, **options: Any) -> Any:
        extra = options.pop("extra_body", None)
        return self.client.completions.create(model=self.model, prompt=prompt, extra_body=extra, **options)

    def chat(self, content: str, **options: Any) -> Any:
        messages: Any = [{"role": "user", "content": content}]
        return self.client.chat.completions.create(model=self.model, messages=messages, **options)

    def close(self) -> None:
        self.client.close()
        self.http.close()


@contextmanager
def serving(llm: LLM, settings: Settings | None = None, send_buffer: int = 0) -> Iterator[Served]:
    """Serve in a thread of its own; check that nothing is left afterwards."""
    engine = AsyncLLM.from_llm(llm)
    app = create_app(engine, settings)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        if send_buffer:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        settings = settings or Settings()
        server = uvicorn.Server(uvicorn_config(app, settings))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        scheme = "http" if settings.ssl_certfile is None else "https"
        served = Served(f"{scheme}://127.0.0.1:{listener.getsockname()[1]}", app, engine)
        try:
            while not server.started and thread.is_alive():
                thread.join(0.01)
            yield served
        finally:
            served.close()
            server.should_exit = True
            thread.join(120)
            engine._finalizer()
    assert not thread.is_alive() and app.state.guard.num_open == 0


def raw_request(url: str, body: dict[str, Any], length: int | None = None) -> tuple[tuple[str, int], bytes]:
    """Return address and bytes of a request, for clients that misbehave."""
    host, port = url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    size = len(data) if length is None else length
    return (host, int(port)), f"{head}content-length: {size}\r\n\r\n".encode() + data


def events(response: httpx.Response) -> Iterator[Any]:
    """Yield the events of a stream up to its end."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            if line == "data: [DONE]":
                return
            yield json.loads(line[6:])
    raise AssertionError("the stream has no end")
