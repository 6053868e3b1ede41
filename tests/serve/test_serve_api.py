"""Every route with OpenAI's client, whole and streamed: responses equal the outputs of LLM."""

from __future__ import annotations

import json
from itertools import accumulate
from typing import Any

import openai
import pytest

from draftproof import SamplingParams
from draftproof.outputs import RequestOutput
from draftproof.serve.settings import Settings
from serving import END, NGRAM, Served, events, serving, tiny

PROMPT = "one two three four one two three"


@pytest.fixture(scope="module")
def plain(folder: Any) -> Any:
    """Return an LLM without drafts, whose outputs the responses must equal."""
    return tiny(folder)


@pytest.fixture(scope="module")
def served(folder: Any) -> Any:
    with serving(tiny(folder, NGRAM), Settings(max_priority=2)) as running:
        yield running


def reference(plain: Any, prompt: Any, **options: Any) -> RequestOutput:
    """Return the output of a single request without drafts."""
    return plain.generate(prompt, SamplingParams(**options), use_tqdm=False)[0]


def ids_of(plain: Any, text: str) -> list[int]:
    return plain.tokenizer.encode(text)


def test_completion_equals_llm_output_with_usage(served: Served, plain: Any) -> None:
    got = served.complete(PROMPT, max_tokens=12, seed=3, temperature=0.8)
    want = reference(plain, PROMPT, max_tokens=12, seed=3, temperature=0.8)
    assert got.object == "text_completion" and got.model == served.model and got.id.startswith("cmpl-")
    (choice,) = got.choices
    assert choice.text == want.outputs[0].text and choice.finish_reason == want.outputs[0].finish_reason
    assert choice.logprobs is None and choice.index == 0
    assert got.usage.prompt_tokens == len(want.prompt_token_ids)
    assert got.usage.completion_tokens == len(want.outputs[0].token_ids)
    assert got.usage.total_tokens == got.usage.prompt_tokens + got.usage.completion_tokens
    assert got.usage.prompt_tokens_details.cached_tokens >= 0


@pytest.mark.parametrize("form", ["ids", "texts", "lists of ids"])
def test_prompt_as_texts_and_ids_gives_one_choice_per_output(served: Served, plain: Any, form: str) -> None:
    texts = [PROMPT] if form == "ids" else [PROMPT, "again one"]
    lists = [ids_of(plain, text) for text in texts]
    prompt: Any = lists[0] if form == "ids" else texts if form == "texts" else lists
    got = served.complete(prompt, max_tokens=6, temperature=0, n=2)
    for number, choice in enumerate(got.choices):
        assert choice.index == number
        want = reference(plain, texts[number // 2], max_tokens=6, temperature=0, n=2)
        assert choice.text == want.outputs[number % 2].text
    assert len(got.choices) == 2 * len(texts)
    assert got.usage.prompt_tokens == sum(map(len, lists))


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_completion_logprobs_equal_llm_logprobs(served: Served, plain: Any, count: int) -> None:
    got = served.complete(PROMPT, max_tokens=9, seed=4, logprobs=count).choices[0]
    want = reference(plain, PROMPT, max_tokens=9, seed=4, logprobs=count).outputs[0]
    logprobs = got.logprobs
    rows = zip(want.token_ids, want.logprobs, strict=True)
    assert logprobs.token_logprobs == [row[i].logprob for i, row in rows]
    names = [_name(plain, token) for token in want.token_ids]
    assert logprobs.tokens == names and logprobs.text_offset == want.text_offsets
    for row, best, token in zip(want.logprobs, logprobs.top_logprobs, want.token_ids, strict=True):
        assert best == {_name(plain, i): entry.logprob for i, entry in reversed(row.items())}
        assert _name(plain, token) in best


def _name(plain: Any, token: int) -> str:
    data = plain.tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def test_echo_returns_prompt_text_and_logprobs(served: Served, plain: Any) -> None:
    got = served.complete(PROMPT, max_tokens=4, temperature=0, echo=True, logprobs=2).choices[0]
    want = reference(plain, PROMPT, max_tokens=4, temperature=0, logprobs=2, prompt_logprobs=2)
    ids = want.prompt_token_ids
    assert got.text == PROMPT + want.outputs[0].text
    found = got.logprobs
    rows = [*want.prompt_logprobs[1:], *want.outputs[0].logprobs]
    after = [*ids[1:], *want.outputs[0].token_ids]
    assert found.token_logprobs == [None, *[row[i].logprob for i, row in zip(after, rows, strict=True)]]
    assert found.top_logprobs[0] is None and len(found.top_logprobs) == len(found.tokens) == len(ids) + 4
    pieces = [got.text[a:b] for a, b in zip(found.text_offset, [*found.text_offset[1:], None], strict=True)]
    assert "".join(pieces) == got.text and pieces[: len(ids)] == found.tokens[: len(ids)]


@pytest.mark.parametrize("skip", [True, False])
def test_echo_offsets_count_shown_special_tokens_only(served: Served, plain: Any, skip: bool) -> None:
    """Echo a text as it was sent, and ids with their special tokens unless these are skipped."""
    text = "<|im_start|>one two<|im_end|> three"
    for prompt in (text, ids_of(plain, text)):
        shown = not skip or prompt == text
        options: Any = {"max_tokens": 2, "echo": True, "logprobs": 1, "seed": 3}
        got = served.complete(prompt, extra_body={"skip_special_tokens": skip}, **options).choices[0]
        want = text if shown else "one two three"
        assert got.text.startswith(want)
        pieces = ["<|im_start|>", "one", " two", "<|im_end|>", " three"]
        assert got.logprobs.tokens[:5] == pieces
        ends = [0, *accumulate(len(p) if shown or "<" not in p else 0 for p in pieces)]
        assert got.logprobs.text_offset[:6] == ends


def test_echo_with_max_tokens_0_scores_a_prompt(served: Served, plain: Any) -> None:
    """Send what a benchmark of log-likelihoods sends: ids, logprobs, no output."""
    ids = ids_of(plain, PROMPT)
    options: Any = {"max_tokens": 0, "echo": True, "logprobs": 1, "seed": 7}
    streamed = list(served.complete([ids, ids[:4]], stream=True, **options))
    assert {c.index: c.seed for chunk in streamed for c in chunk.choices if c.finish_reason} == {0: 7, 1: 7}
    got = served.complete([ids, ids[:4]], **options)
    want = reference(plain, {"prompt_token_ids": ids}, max_tokens=1, prompt_logprobs=1).prompt_logprobs
    assert got.usage.completion_tokens == 0
    for choice, length in zip(got.choices, (len(ids), 4), strict=True):
        values = [row[i].logprob for i, row in zip(ids[1:length], want[1:length], strict=True)]
        assert choice.logprobs.token_logprobs == [None, *values] and choice.finish_reason == "length"
    assert got.choices[0].text == PROMPT


def test_stop_strings_bias_and_penalties_equal_llm(served: Served, plain: Any) -> None:
    first = served.complete(PROMPT, max_tokens=30, seed=9).choices[0].text
    stop = first[8:11]
    options: dict[str, Any] = {"max_tokens": 30, "seed": 9, "stop": [stop, "never sampled"]}
    got = served.complete(PROMPT, **options).choices[0]
    want = reference(plain, PROMPT, **options).outputs[0]
    assert got.text == want.text == first[: first.index(stop)]
    assert got.finish_reason == "stop" and got.stop_reason == stop
    got = served.complete(PROMPT, **options, extra_body={"include_stop_str_in_output": True}).choices[0]
    assert got.text == first[: first.index(stop) + len(stop)]
    more: dict[str, Any] = {"presence_penalty": 0.5, "frequency_penalty": 1.5, "max_tokens": 20, "seed": 1}
    got = served.complete(PROMPT, **more, logit_bias={"300": 4, "301": -100}).choices[0]
    assert got.text == reference(plain, PROMPT, **more, logit_bias={300: 4, 301: -100}).outputs[0].text


def test_options_of_vllm_equal_llm(served: Served, plain: Any) -> None:
    ids = ids_of(plain, PROMPT)
    more: dict[str, Any] = {"top_k": 9, "min_p": 0.01, "repetition_penalty": 1.2, "min_tokens": 5}
    more |= {"stop_token_ids": [ids[1]], "ignore_eos": True, "skip_special_tokens": False}
    more |= {"bad_words": ["five"], "allowed_token_ids": sorted({*range(260, 320), *ids})}
    more |= {"prompt_logprobs": 1, "priority": -2, "cache_salt": "mine"}
    own = {"request_id": "me-1", "return_token_ids": True, "return_tokens_as_token_ids": True}
    got = served.complete(PROMPT, max_tokens=20, seed=2, logprobs=1, extra_body={**more, **own})
    want = reference(plain, PROMPT, max_tokens=20, seed=2, logprobs=1, **more)
    choice, output = got.choices[0], want.outputs[0]
    assert got.id == "cmpl-me-1"
    assert choice.token_ids == output.token_ids and choice.prompt_token_ids == want.prompt_token_ids
    assert choice.text == output.text and choice.stop_reason == output.stop_reason
    assert choice.logprobs.tokens == [f"token_id:{i}" for i in output.token_ids]
    assert choice.prompt_logprobs[0] is None
    for entries, row in zip(choice.prompt_logprobs[1:], want.prompt_logprobs[1:], strict=True):
        expected = {str(i): (e.logprob, e.rank) for i, e in row.items()}
        assert {i: (e["logprob"], e["rank"]) for i, e in entries.items()} == expected


def test_logprob_token_ids_return_those_tokens_in_order(served: Served, plain: Any) -> None:
    more: dict[str, Any] = {"logprob_token_ids": [300, 7, END], "logprobs_mode": "processed", "top_k": 5}
    got = served.complete(PROMPT, max_tokens=6, seed=2, extra_body=more).choices[0].logprobs
    want = reference(plain, PROMPT, max_tokens=6, seed=2, **more).outputs[0]
    for top, row in zip(got.top_logprobs, want.logprobs, strict=True):
        assert set(top.values()) == {max(entry.logprob, -9999.0) for entry in row.values()}
    chat = served.chat("one two", max_tokens=4, seed=2, logprobs=True, extra_body=more)
    for entry in chat.choices[0].logprobs.content:
        assert [top.token for top in entry.top_logprobs] == [_name(plain, i) for i in (300, 7, END)]


def chat_ids(plain: Any, content: str) -> dict[str, list[int]]:
    return {"prompt_token_ids": plain.chat_token_ids([{"role": "user", "content": content}])}


@pytest.mark.parametrize("count", [None, 0, 3, 20])
def test_chat_equals_llm_outputs_and_logprobs(served: Served, plain: Any, count: int | None) -> None:
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": count} if count is not None else {}
    got = served.chat("one two", max_completion_tokens=8, seed=6, n=2, **options)
    want = reference(plain, chat_ids(plain, "one two"), max_tokens=8, seed=6, n=2, logprobs=count)
    assert got.object == "chat.completion" and got.id.startswith("chatcmpl-")
    for choice, output in zip(got.choices, want.outputs, strict=True):
        assert choice.message.role == "assistant" and choice.message.content == output.text
        assert choice.finish_reason == output.finish_reason and choice.seed == output.seed
        if count is None:
            assert choice.logprobs is None
            continue
        rows = zip(choice.logprobs.content, output.token_ids, output.logprobs, strict=True)
        for entry, token, row in rows:
            assert (entry.token, entry.logprob) == (_name(plain, token), row[token].logprob)
            assert bytes(entry.bytes) == plain.tokenizer.token_bytes(token)
            best = sorted((each.rank, i, each.logprob) for i, each in row.items())[:count]
            names = [(_name(plain, i), logprob) for _, i, logprob in best]
            assert [(top.token, top.logprob) for top in entry.top_logprobs] == names


def test_conversation_is_rendered_by_the_chat_template(served: Served, plain: Any) -> None:
    messages: Any = [
        {"role": "developer", "content": "Count."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "three four", "refusal": None, "tool_calls": None},
    ]
    extra = {"add_generation_prompt": False, "continue_final_message": True, "return_token_ids": True}
    create, options = served.client.chat.completions.create, {"max_tokens": 3, "temperature": 0}
    got = create(model=served.model, messages=messages, extra_body=extra, **options)
    text = (
        "<|im_start|>system\nCount.<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>\n"
        "<|im_start|>assistant\nthree four"
    )
    assert plain.tokenizer.decode(got.prompt_token_ids, False) == text
    named = served.chat(
        "{{ 7 * 7 }}{% raw %}",  # text, not a template
        max_tokens=1,
        extra_body={"chat_template_kwargs": {"extra_name": "abc"}, "return_token_ids": True},
    )
    prompt = plain.tokenizer.decode(named.prompt_token_ids, False)
    assert prompt.endswith("assistant\nabc") and "{{ 7 * 7 }}{% raw %}" in prompt


def test_response_format_and_structured_outputs_constrain_the_output(served: Served, plain: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["Ada", "Grace"]}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    options: dict[str, Any] = {"max_tokens": 150, "seed": 8}
    got = served.chat("one", response_format=form, **options)
    found = json.loads(got.choices[0].message.content)
    assert set(found) == {"name", "age"} and got.choices[0].finish_reason == "stop"
    same = served.chat("one", extra_body={"structured_outputs": {"json": schema}}, **options)
    assert same.choices[0].message.content == got.choices[0].message.content
    want = reference(plain, chat_ids(plain, "one"), structured_outputs={"json": schema}, **options)
    assert want.outputs[0].text == got.choices[0].message.content
    anything: Any = {"type": "json_object"}
    got = served.chat("one", response_format=anything, **options, logprobs=True).choices[0]
    assert got.message.content.lstrip().startswith("{")
    free: Any = {"type": "text"}
    assert served.chat("one", response_format=free, max_tokens=3).choices[0].message.content is not None
    choice = {"structured_outputs": {"choice": ["three", "seven"]}}
    picked = served.complete("x", max_tokens=9, extra_body=choice)
    assert picked.choices[0].text in ("three", "seven")


def test_speculation_options_change_metrics_and_no_output(served: Served) -> None:
    prompt = "one two three one two three one two three one"
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    body |= {"logprobs": 2, "provenance": True}

    def complete(**more: Any) -> Any:
        return served.post("/v1/completions", {**body, **more}).json()

    drafted, off = complete(), complete(speculative=False)
    few = complete(speculative={"num_speculative_tokens": 1})
    for other in (off, few):
        assert other["choices"][0]["logprobs"] == drafted["choices"][0]["logprobs"]
        assert other["choices"][0]["text"] == drafted["choices"][0]["text"]
    stats = drafted["metrics"]["speculative_decoding"]
    steps, histogram = stats["num_spec_steps"], stats["acceptance_histogram"]
    assert sum(histogram) == steps and len(histogram) == stats["num_spec_tokens"] + 1 == 5
    accepted = sum(count * times for count, times in enumerate(histogram))
    assert stats["num_accepted_draft_tokens"] == accepted > 0
    assert stats["mean_acceptance_length"] == 1 + accepted / steps
    assert stats["draft_acceptance_rate"] == accepted / stats["num_draft_tokens"]
    origins = drafted["choices"][0]["provenance"]
    assert origins.count("accepted:ngram") == accepted and len(origins) == 40
    assert set(off["choices"][0]["provenance"]) == {"plain"}
    assert off["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    assert few["metrics"]["speculative_decoding"]["acceptance_histogram"][2:] == [0, 0, 0]
    assert drafted["metrics"]["lossless"] and "target_match" in drafted["metrics"]["strategy"]
    lossy = complete(speculative={"verify_strategy": "topp"})["metrics"]
    assert not lossy["lossless"] and "LOSSY" in lossy["strategy"]
    known = complete(include_draft_logprobs=True)["choices"][0]
    assert known["text"] == drafted["choices"][0]["text"]
    assert sum(draft["accepted"] for draft in known["drafts"]) == accepted
    assert all(draft["source"] == "ngram" and draft["target_logprob"] <= 0 for draft in known["drafts"])


BESIDE = {"given": {}, "ngram": {}, "hybrid": {"proposers": [{"method": "ngram"}, {"method": "suffix"}]}}


@pytest.mark.parametrize("method", BESIDE)
def test_prediction_beside_any_proposer_gives_the_same_text(folder: Any, plain: Any, method: str) -> None:
    want = reference(plain, chat_ids(plain, "one"), max_tokens=40, temperature=0, ignore_eos=True).outputs[0]
    spec = {"method": method, "num_speculative_tokens": 4, "adaptive": False, **BESIDE[method]}
    middle = len(want.text) // 2
    expected: Any = {"type": "content", "content": want.text[:middle] + "?" + want.text[middle:]}
    options: dict[str, Any] = {"max_tokens": 40, "temperature": 0}
    extra = {"ignore_eos": True, "include_draft_logprobs": True}
    with serving(tiny(folder, spec)) as running:
        got = running.chat("one", prediction=expected, extra_body=extra, **options)
        assert got.choices[0].message.content == want.text
        accepted = [draft["accepted"] for draft in got.choices[0].drafts if draft["source"] == "given"]
        counts = sum(accepted), len(accepted) - sum(accepted)
        assert usage_of(got.usage) == counts and counts[0] > 4 and counts[1] > 0
        streamed: Any = {"stream": True, "stream_options": {"include_usage": True}}
        ignore = {"ignore_eos": True}
        *chunks, last = running.chat("one", prediction=expected, extra_body=ignore, **options, **streamed)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == want.text
        assert usage_of(last.usage) == counts
        off = {"ignore_eos": True, "speculative": False}
        assert usage_of(running.chat("one", prediction=expected, extra_body=off, **options).usage) == (0, 0)
        assert running.chat("one", max_tokens=2).usage.completion_tokens_details is None
        for size, message in ((2000, "max_model_len is 256"), (1 << 20, "characters are more than 256")):
            long: Any = {"type": "content", "content": "x" * size}
            with pytest.raises(openai.BadRequestError, match=message) as caught:
                running.chat("one", max_tokens=2, prediction=long)
            assert caught.value.param == "prediction"


def usage_of(usage: Any) -> tuple[int, int]:
    """Return the accepted and rejected prediction tokens of a response."""
    details = usage.completion_tokens_details
    return details.accepted_prediction_tokens, details.rejected_prediction_tokens


@pytest.mark.parametrize("granularity", ["token", "step"])
def test_completion_stream_equals_whole_response(served: Served, granularity: str) -> None:
    options: dict[str, Any] = {"max_tokens": 20, "seed": 3, "logprobs": 3, "n": 2, "echo": True, "stop": "zz"}
    prompts = [PROMPT, "again"]
    whole = served.complete(prompts, **options)
    streamed: Any = {"stream": True, "stream_options": {"include_usage": True}}
    extra = {"stream_granularity": granularity}
    chunks = list(served.complete(prompts, **options, **streamed, extra_body=extra))
    usage, hidden = chunks[-1].usage, {"prompt_tokens_details"}
    assert usage.model_dump(exclude=hidden) == whole.usage.model_dump(exclude=hidden)
    assert all(chunk.usage is None for chunk in chunks[:-1]) and not chunks[-1].choices
    for choice in whole.choices:
        mine = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == choice.index]
        assert "".join(c.text for c in mine) == choice.text
        assert [c.finish_reason for c in mine] == [None] * (len(mine) - 1) + [choice.finish_reason]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            found = [x for c in mine if c.logprobs for x in getattr(c.logprobs, name)]
            assert found == getattr(choice.logprobs, name), name
        if granularity == "token":
            assert all(len(c.logprobs.tokens) == 1 for c in mine[1:])
        assert mine[-1].seed == choice.seed


def test_chat_stream_equals_whole_response(served: Served) -> None:
    options: dict[str, Any] = {"max_completion_tokens": 20, "seed": 3, "logprobs": True, "top_logprobs": 2}
    whole = served.chat(PROMPT, **options)
    chunks = list(served.chat(PROMPT, **options, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    parts = [chunk.choices[0] for chunk in chunks]
    assert "".join(part.delta.content for part in parts) == whole.choices[0].message.content
    logprobs = [entry for part in parts if part.logprobs for entry in part.logprobs.content]
    assert logprobs == whole.choices[0].logprobs.content
    assert parts[-1].finish_reason == whole.choices[0].finish_reason
    assert all(chunk.usage is None for chunk in chunks)
    counted: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(served.chat(PROMPT, **options, stream=True, stream_options=counted))
    made = [chunk.usage.completion_tokens for chunk in chunks[1:]]
    assert made[:-1] == list(range(1, len(made))) and made[-1] == whole.usage.completion_tokens


def test_stream_reports_steps_provenance_and_drafts(served: Served) -> None:
    messages = [{"role": "user", "content": "one two three one two three one two"}]
    body = {"model": served.model, "messages": messages, "max_tokens": 40, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    body |= {"provenance": True, "return_token_ids": True, "include_draft_logprobs": True}
    body["prompt_logprobs"] = 0
    with served.http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        got = list(events(response))
    first, last = got[0], got[-1]
    assert len(first["prompt_token_ids"]) == len(first["prompt_logprobs"]) == last["usage"]["prompt_tokens"]
    choices = [chunk["choices"][0] for chunk in got[1:-1]]
    assert all(len(c["token_ids"]) == len(c["provenance"]) == 1 for c in choices) and len(choices) == 40
    drafts = [draft for c in choices for draft in c.get("drafts", [])]
    counted = last["metrics"]["speculative_decoding"]
    assert sum(c.get("num_draft", 0) for c in choices) == len(drafts) == counted["num_draft_tokens"]
    accepted = [c for c in choices if c["provenance"][0].startswith("accepted:")]
    assert len(accepted) == sum(d["accepted"] for d in drafts) == counted["num_accepted_draft_tokens"] > 0
    assert choices[-1]["step_end"] and not all(c["step_end"] for c in choices)
    not_streamed = {k: v for k, v in body.items() if not k.startswith("stream")}
    whole = served.post("/v1/chat/completions", not_streamed).json()
    output = whole["choices"][0]
    assert [c["token_ids"][0] for c in choices] == output["token_ids"]
    assert [c["provenance"][0] for c in choices] == output["provenance"] and drafts == output["drafts"]
    assert whole["prompt_logprobs"] == first["prompt_logprobs"]


def test_stream_of_partial_characters_joins_to_the_whole_text(served: Served, plain: Any) -> None:
    """Allow only tokens that are parts of characters."""
    halves = [i for i in range(320) if _name(plain, i).startswith("bytes:")]
    options: Any = {"max_tokens": 60, "seed": 1, "allowed_token_ids": halves, "ignore_eos": True}
    body = {"prompt": "x", "stream": True, **options}
    with served.http.stream("POST", "/v1/completions", json=body) as response:
        parts = [chunk["choices"][0]["text"] for chunk in events(response)]
    want = reference(plain, "x", **options).outputs[0]
    assert "".join(parts) == want.text and "\ufffd" in want.text


def test_models_health_and_version_describe_the_server(served: Served) -> None:
    (card,) = served.client.models.list().data
    assert card.id == served.model and card.max_model_len == 256
    assert served.client.models.retrieve(served.model).id == served.model
    assert served.http.get("/health").json()["status"] == "ok"
    assert "ngram" in served.http.get("/version").json()["engine"]
    assert served.http.get("/").status_code == 200


def test_tokenize_and_detokenize_are_inverse(served: Served, plain: Any) -> None:
    got = served.post("/tokenize", {"prompt": "one two", "return_token_strs": True}).json()
    assert got["tokens"] == ids_of(plain, "one two") and got["count"] == len(got["tokens"])
    assert "".join(got["token_strs"]) == "one two" and got["max_model_len"] == 256
    back = served.post("/detokenize", {"tokens": got["tokens"]}).json()
    assert back == {"prompt": "one two"}
    messages = [{"role": "user", "content": "hi"}]
    chat = served.post("/tokenize", {"messages": messages}).json()
    assert chat["tokens"] == plain.chat_token_ids(messages)
    assert served.post("/tokenize", {}).status_code == 400
    assert served.post("/detokenize", {"tokens": [9999]}).json()["error"]["param"] == "tokens"


def test_metrics_count_tokens_drafts_and_requests(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    open_stream, read_sizes = served.llm.stream, []

    def counted(*given: Any, **options: Any) -> Any:
        stream = open_stream(*given, **options)
        read_events = stream.read

        async def read() -> Any:
            found = await read_events()
            read_sizes.append(len(found))
            return found

        stream.read = read
        return stream

    monkeypatch.setattr(served.llm, "stream", counted)

    def read() -> dict[str, float]:
        lines = served.http.get("/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line[0] != "#")
        return {name: float(value) for name, value in pairs}

    before = read()
    prompt = "one two three one two three one two three"
    body = {"prompt": prompt, "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    stats = served.post("/v1/completions", body).json()["metrics"]["speculative_decoding"]
    options = {"max_tokens": 40, "stream": True, "extra_body": {"ignore_eos": True}}
    assert len([chunk for chunk in served.complete(PROMPT, **options) if chunk.choices]) == 40
    after = read()

    def more(name: str, label: str = "") -> float:
        key = f'draftproof:{name}{{model_name="{served.model}"{label}}}'
        return after[key] - before.get(key, 0)

    spec = "spec_decode_num_"
    assert more(f"{spec}drafts_total") >= stats["num_spec_steps"] > 0
    assert more(f"{spec}draft_tokens_total") >= stats["num_draft_tokens"]
    assert more(f"{spec}accepted_tokens_total") >= stats["num_accepted_draft_tokens"]
    by_position = sum(more(f"{spec}accepted_tokens_per_pos_total", f',position="{i}"') for i in range(4))
    assert by_position == more(f"{spec}accepted_tokens_total")
    assert more("generation_tokens_total") == 70 and more("prompt_tokens_total") > 0
    assert more("time_to_first_token_seconds_count") == 1 and sum(read_sizes) == 40
    # the tokens of the first read have no time between them; under load there is more than one
    assert more("inter_token_latency_seconds_count") == 40 - read_sizes[0]
    assert more("http_requests_total", ',path="/v1/completions",status="200"') == 2
    assert not any(name.startswith("vllm:") for name in after)
    for name in ("num_requests_running", "num_requests_waiting", "kv_pages", "kv_pages_used"):
        assert f'draftproof:{name}{{model_name="{served.model}"}}' in after
