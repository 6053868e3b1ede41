"""Reasoning over HTTP: split messages and streams, thinking budgets, names for the chat template."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken

from draftproof.errors import ConfigError
from draftproof.serve.api.generation.prompt_parser import PromptParser
from draftproof.serve.api.generation.request_schema import ChatCompletionRequest, Message
from draftproof.serve.settings import Settings
from serving import CHAT, NGRAM, Served, make_folder, serving, tiny

START, END = "<think>", "</think>"
THINKING = CHAT.replace(
    "(extra_name or '')",
    "('<think>\\n' if enable_thinking is not defined or enable_thinking else '<think>\\n\\n</think>\\n\\n')"
    " + (reasoning_effort or '')",
).replace("m['content']", "(m.reasoning_content or '') + m['content']")
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
ANSWER = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve a model whose template begins the reasoning."""
    folder = make_folder(tmp_path_factory.mktemp("reasoning"))
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens([AddedToken(START, normalized=False), AddedToken(END, normalized=False)])
    backend.save(str(folder / "tokenizer.json"))
    changed = {
        "config.json": {"vocab_size": backend.get_vocab_size(), "max_position_embeddings": 1024},
        "tokenizer_config.json": {"chat_template": THINKING},
    }
    for name, fields in changed.items():
        given = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**given, **fields}))
    with serving(tiny(folder, NGRAM), Settings(tool_call_parser="hermes")) as running:
        yield running


def end_id(served: Served) -> int:
    return int(served.llm.get_tokenizer().backend.token_to_id(END))


def ask(served: Served, content: str = "one two", **options: Any) -> Any:
    """Return the answer; the model does not end its reasoning by itself."""
    extra = {"return_token_ids": True, **options.pop("extra_body", {})}
    bias = {str(end_id(served)): -100}
    given = {"max_tokens": 24, "temperature": 1.0, "seed": 7, "logit_bias": bias, **options}
    return served.chat(content, extra_body=extra, **given)


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_budget_is_exact_whole_streamed_and_without_speculation(served: Served, budget: int) -> None:
    seen = []
    for speculative in (True, False):
        extra = {"thinking_token_budget": budget, "speculative": speculative}
        whole = ask(served, n=2, logprobs=True, extra_body=extra)
        details = whole.usage.completion_tokens_details
        assert details.reasoning_tokens == 2 * budget
        for choice in whole.choices:
            ids = choice.model_extra["token_ids"]
            assert ids.index(end_id(served)) == budget and len(choice.logprobs.content) == len(ids)
            assert choice.message.content and END not in choice.message.content
            reasoning = choice.message.model_extra.get("reasoning_content")
            assert bool(reasoning) == (budget > 0)
            assert choice.message.model_extra.get("reasoning") == reasoning
            seen.append((reasoning, choice.message.content, ids))
        chunks = list(ask(served, n=2, stream=True, stream_options={"include_usage": True}, extra_body=extra))
        assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == 2 * budget
        seen += [streamed(chunks, index) for index in range(2)]
    assert seen[:2] * 4 == seen


def streamed(chunks: list[Any], index: int) -> Any:
    """Return reasoning, content and token ids of a streamed choice."""
    found = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    reasoning = "".join((choice.delta.model_extra or {}).get("reasoning_content") or "" for choice in found)
    other = "".join((choice.delta.model_extra or {}).get("reasoning") or "" for choice in found)
    content = "".join(choice.delta.content or "" for choice in found)
    ids = [i for choice in found for i in (choice.model_extra or {}).get("token_ids") or ()]
    assert reasoning == other
    return reasoning or None, content, ids


def test_output_that_never_ends_its_reasoning_has_no_content(served: Served) -> None:
    answer = ask(served)
    message = answer.choices[0].message
    assert message.content == "" and message.model_extra["reasoning_content"]
    assert answer.usage.completion_tokens_details.reasoning_tokens == answer.usage.completion_tokens
    left_out = ask(served, extra_body={"include_reasoning": False}).choices[0].message
    assert left_out.content == "" and not left_out.model_extra


def test_template_names_and_effort_reach_the_template(served: Served) -> None:
    off: Any = {"chat_template_kwargs": {"enable_thinking": False}}
    answer = ask(served, extra_body={**off, "thinking_token_budget": 3})
    assert answer.choices[0].message.content and not answer.choices[0].message.model_extra
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0
    plain = ask(served).model_extra["prompt_token_ids"]
    low = ask(served, reasoning_effort="low").model_extra["prompt_token_ids"]
    assert len(low) > len(plain) and low[: len(plain)] == plain


def test_defaults_of_the_server_are_names_for_the_template(served: Served) -> None:
    parser = PromptParser(served.llm, Settings(default_chat_template_kwargs={"enable_thinking": False}))

    def prompt(**options: Any) -> list[int]:
        message = Message(role="user", content="hi")
        return asyncio.run(parser.conversation(ChatCompletionRequest(messages=[message], **options)))

    assert end_id(served) in prompt()
    assert end_id(served) not in prompt(chat_template_kwargs={"enable_thinking": True})
    with pytest.raises(ConfigError, match="does not use 'thinkin'"):
        PromptParser(served.llm, Settings(default_chat_template_kwargs={"thinkin": False}))


def test_unknown_template_name_is_refused(served: Served) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"enable_thinkin": True}}
    for path in ("/v1/chat/completions", "/tokenize"):
        reply = served.post(path, body)
        error = reply.json()["error"]
        assert reply.status_code == 400 and error["param"] == "chat_template_kwargs"
        assert "did you mean 'enable_thinking'" in error["message"]


def test_grammars_apply_to_the_answer_behind_the_reasoning(served: Served) -> None:
    extra = {"thinking_token_budget": 4}
    for options in ({"response_format": ANSWER}, {"tools": TOOLS, "tool_choice": "required"}):
        found = []
        for speculative in (True, False):
            given = {**extra, "speculative": speculative}
            choice = ask(served, max_tokens=120, extra_body=given, **options).choices[0]
            message = choice.message
            assert message.model_extra["reasoning_content"]
            text = message.tool_calls[0].function.arguments if message.tool_calls else message.content
            assert isinstance(json.loads(text)["ok"], bool)
            assert bool(message.tool_calls) == ("tools" in options)
            found.append((message.content, text, choice.model_extra["token_ids"]))
        assert found[0] == found[1]


def test_reasoning_of_earlier_messages_is_accepted(served: Served) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    lengths = []
    for fields in ({}, {"reasoning_content": "because"}, {"reasoning": "because"}):
        reply = served.post("/tokenize", {"messages": [messages[0], {**messages[1], **fields}]})
        assert reply.status_code == 200
        lengths.append(reply.json()["count"])
    assert lengths[0] < lengths[1] == lengths[2]


@pytest.mark.parametrize("speculative", [True, False])
def test_reasoning_is_an_item_of_responses_and_a_block_of_messages(served: Served, speculative: bool) -> None:
    extra = {"logit_bias": {str(end_id(served)): -100}, "seed": 7, "speculative": speculative}
    want = ask(served, logprobs=True, extra_body={"thinking_token_budget": 5, "speculative": speculative})
    message = want.choices[0].message
    common = {**extra, "temperature": 1.0, "return_token_ids": True}
    body = {**common, "input": "one two", "max_output_tokens": 24, "top_logprobs": 0}
    got = served.post("/v1/responses", {**body, "thinking_token_budget": 5}).json()
    thought, answer = got["output"]
    assert thought["content"][0]["text"] == message.model_extra["reasoning_content"]
    assert answer["content"][0]["text"] == message.content
    assert got["token_ids"] == want.choices[0].model_extra["token_ids"]
    assert got["usage"]["output_tokens_details"]["reasoning_tokens"] == 5
    rows = [row.to_dict() for row in want.choices[0].logprobs.content]
    assert answer["content"][0]["logprobs"] == rows[-len(answer["content"][0]["logprobs"]) :]
    with served.client.responses.create(
        model=served.model, input="one two", stream=True, extra_body={**body, "thinking_token_budget": 5}
    ) as stream:
        events = list(stream)
    last = events[-1].response.to_dict()["output"]
    assert [item["content"] for item in last] == [thought["content"], answer["content"]]
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == thought["content"][0]["text"]
    thinking = {"type": "enabled", "budget_tokens": 5}
    sent = {**common, "messages": [{"role": "user", "content": "one two"}], "max_tokens": 24}
    made = served.post("/v1/messages", {**sent, "thinking": thinking}).json()
    assert [block["type"] for block in made["content"]] == ["thinking", "text"]
    assert made["content"][0]["thinking"] == message.model_extra["reasoning_content"]
    assert made["content"][1]["text"] == message.content and made["token_ids"] == got["token_ids"]
    events_text = served.post("/v1/messages", {**sent, "thinking": thinking, "stream": True}).text
    pieces = [json.loads(line[6:]) for line in events_text.split("\n") if line.startswith("data: ")]
    parts = [piece["delta"].get("thinking", "") for piece in pieces if piece["type"] == "content_block_delta"]
    assert "".join(parts) == made["content"][0]["thinking"]


def test_earlier_reasoning_and_thinking_switches_reach_the_template(served: Served) -> None:
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two", "reasoning_content": "three"},
        {"role": "user", "content": "four"},
    ]
    chat = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
    want = served.post("/v1/chat/completions", chat).json()["prompt_token_ids"]
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "three"}]}
    plain = [{"role": each["role"], "content": each["content"]} for each in messages]
    body = {"input": [plain[0], thought, *plain[1:]], "max_output_tokens": 1, "return_token_ids": True}
    assert served.post("/v1/responses", body).json()["prompt_token_ids"] == want
    blocks = [{"type": "thinking", "thinking": "three", "signature": ""}, {"type": "text", "text": "two"}]
    sent = [plain[0], {"role": "assistant", "content": blocks}, plain[2]]
    body = {"messages": sent, "max_tokens": 1, "return_token_ids": True}
    assert served.post("/v1/messages", body).json()["prompt_token_ids"] == want
    chat["chat_template_kwargs"] = {"enable_thinking": False}
    off = served.post("/v1/chat/completions", chat).json()["prompt_token_ids"]
    body["thinking"] = {"type": "disabled"}
    assert served.post("/v1/messages", body).json()["prompt_token_ids"] == off != want
    missing = served.post("/v1/messages", {**body, "thinking": {"type": "enabled"}})
    assert missing.status_code == 400 and missing.json()["error"]["param"] == "thinking.budget_tokens"
