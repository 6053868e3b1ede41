"""Completions with a suffix, and defaults of generation_config.json on the server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken

from draftproof.serve.ipc.remote_llm import RemoteLLM
from draftproof.text.fill_in_middle import FORMATS, PREFIX, SUFFIX
from draftproof.text.gguf_tokenizer import build_tokenizer
from draftproof.text.tokenizer import Tokenizer, load_tokenizer
from serving import NGRAM, Served, make_folder, serving, tiny
from worker_thread import run_remote

BEFORE, AFTER = "one two {", "\n  } four five"
DEFAULTS = {"temperature": 0.7, "top_k": 5, "max_new_tokens": 9}


def with_tokens(folder: Path, texts: list[str]) -> Path:
    """Add special tokens to the tokenizer of a model folder."""
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in texts])
    backend.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    config["vocab_size"] = backend.get_vocab_size()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form[0])
def test_prompts_equal_the_tokens_of_their_text(form: tuple[str, ...], tmp_path: Path) -> None:
    """Compare with the tokenizer's own encoding of the text with the special tokens in it."""
    names = [part for part in form if part not in (PREFIX, SUFFIX)]
    tokenizer = load_tokenizer(with_tokens(make_folder(tmp_path), names))
    text = "".join({PREFIX: BEFORE, SUFFIX: AFTER}.get(part, part) for part in form)
    assert tokenizer.fill_in_middle(BEFORE, AFTER) == tokenizer.encode(text)
    assert tokenizer.fill_in_middle(tokenizer.encode(BEFORE), AFTER) == tokenizer.encode(text)


def test_suffix_gets_no_implicit_space_and_metadata_of_gguf_is_read() -> None:
    """A tokenizer that puts a space before texts puts none before the suffix, and a begin token first."""
    pieces = ["▁", "a", "b", "▁a", "ab", "▁ab"]
    marks = ["[pre]", "[suf]", "[mid]"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces, *marks]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces), *[3] * 3]
    meta: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [-float(i) for i in range(len(tokens))],
        "tokenizer.ggml.bos_token_id": 1,
    }
    keys = {f"tokenizer.ggml.fim_{key}_token_id": tokens.index(f"[{key}]") for key in ("pre", "suf", "mid")}

    def made(metadata: dict[str, Any]) -> Tokenizer:
        backend = build_tokenizer(metadata, "test")
        return Tokenizer(backend, special_tokens={"bos_token": "<s>"}, gguf_metadata=metadata)

    tokenizer = made({**meta, **keys})
    found = [tokens[i] for i in tokenizer.fill_in_middle("ab", "ab")]
    assert found == ["<s>", "[pre]", "▁ab", "[suf]", "ab", "[mid]"]
    assert [tokens[i] for i in tokenizer.fill_in_middle("a", "", False)] == ["[pre]", "▁a", "[suf]", "[mid]"]
    assert made(meta).fim is None


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve a model with tokens for a suffix and sampling defaults."""
    folder = make_folder(tmp_path_factory.mktemp("coder"))
    (folder / "generation_config.json").write_text(json.dumps({**DEFAULTS, "eos_token_id": 1}))
    with_tokens(folder, ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|endoftext|>"])
    with serving(tiny(folder, NGRAM)) as running:
        yield running


def text_of(served: Served, body: dict[str, Any]) -> Any:
    choice = served.post("/v1/completions", body).json()["choices"][0]
    return choice["text"], choice["finish_reason"], choice["stop_reason"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_suffix_equals_the_rendered_prompt(served: Served, temperature: float) -> None:
    """Compare with the prompt as text, streamed and whole, with and without drafts."""
    options: Any = {"temperature": temperature, "seed": 3, "max_tokens": 30, "logit_bias": {"1": -100}}
    options["skip_special_tokens"] = False
    end = served.llm.get_tokenizer().backend.token_to_id("<|endoftext|>")
    rendered = f"<|fim_prefix|>{BEFORE}<|fim_suffix|>{AFTER}<|fim_middle|>"
    expected = text_of(served, {**options, "prompt": rendered, "stop_token_ids": [end]})
    body = {**options, "prompt": BEFORE, "suffix": AFTER}
    assert text_of(served, body) == text_of(served, {**body, "speculative": False}) == expected
    assert len(expected[0]) > 5
    chunks = served.complete(BEFORE, stream=True, suffix=AFTER, extra_body=options)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == expected[0]
    forced = {**body, "logit_bias": {str(end): 100}}
    assert text_of(served, forced) == ("", "stop", end)
    assert text_of(served, {**forced, "ignore_eos": True, "temperature": 0})[1] == "length"


def test_suffix_is_refused_where_it_cannot_be_honoured(served: Served, folder: Path) -> None:
    error = served.post("/v1/completions", {"prompt": "a", "suffix": "b", "echo": True}).json()["error"]
    assert error["param"] == "echo" and "suffix" in error["message"]
    body = {"messages": [{"role": "user", "content": "a"}], "suffix": "b"}
    assert served.post("/v1/chat/completions", body).json()["error"]["param"] == "suffix"
    with serving(tiny(folder)) as other:
        response = other.post("/v1/completions", {"prompt": "a", "suffix": "b"})
        assert response.status_code == 400 and response.json()["error"]["param"] == "suffix"
        assert (
            other.post("/v1/completions", {"prompt": "a", "suffix": "", "max_tokens": 1}).status_code == 200
        )


def test_defaults_of_the_model_apply_on_the_server(served: Served) -> None:
    """Compare requests without options with explicit ones; a given option replaces its default."""
    explicit = {"temperature": 0.7, "top_k": 5, "max_tokens": 9}
    base = {"seed": 11, "logit_bias": {"1": -100}}
    text = {**base, "prompt": "one two"}
    chat = {**base, "messages": [{"role": "user", "content": "one two"}]}
    for path, body in (("/v1/completions", text), ("/v1/chat/completions", chat)):
        found, same = (served.post(path, {**body, **more}).json() for more in ({}, explicit))
        assert found["choices"] == same["choices"] and found["usage"]["completion_tokens"] == 9
        changed = {"temperature": 0, "max_tokens": 4}
        found, same = (served.post(path, {**body, **more, **changed}).json() for more in ({}, {"top_k": 5}))
        assert found["choices"] == same["choices"] and found["usage"]["completion_tokens"] == 4


def test_defaults_reach_other_processes(served: Served, tmp_path: Path) -> None:
    folder = Path(served.llm.config.model)

    async def options(remote: RemoteLLM) -> Any:
        return dict(remote.default_options), (await remote.generate("one two")).usage[
            "completion_tokens"
        ] <= 9

    expected = {"temperature": 0.7, "top_k": 5, "max_tokens": 9}
    assert run_remote(tiny(folder), tmp_path, options) == (expected, True)
    assert tiny(folder, generation_config="vllm").default_options == {}
