"""LLM on the default model, with the interface of vLLM."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytest import MonkeyPatch

from draftproof import LLM, ConfigError, EngineClosedError, LoadError, RequestError, SamplingParams
from draftproof.text.bulk.output_columns import OutputColumns
from draftproof.text.bulk.output_table import OutputTable
from text_pieces import CONFIG, Pieces

COPY = "one two three four five six seven eight one two three four five six seven eight one two three"


@pytest.fixture(scope="module")
def llm(smollm2_path: object) -> LLM:
    spec = {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "adaptive": False,
    }  # adaptive counts depend on measured times
    return LLM("smollm2-135m", speculative_config=spec, max_num_seqs=8, debug=True)


def greedy(**options: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 12, **options})


def test_prompt_forms_give_the_same_output(llm: LLM) -> None:
    ids = llm.tokenizer.encode("The capital of France is")
    text, array = "The capital of France is", np.asarray(ids)
    forms = [text, {"prompt": text}, {"prompt_token_ids": ids}, ids, array, list(array), torch.tensor(ids)]
    forms.append({"prompt_token_ids": torch.tensor(ids)})
    results = [llm.generate(form, greedy())[0] for form in forms]
    assert "Paris" in results[0].outputs[0].text
    assert {each.outputs[0].text for each in results} == {results[0].outputs[0].text}
    assert results[0].prompt == forms[0] and results[2].prompt is None
    assert len(llm.generate(torch.tensor([ids, ids]), greedy(max_tokens=1), use_tqdm=False)) == 2
    together = llm.generate(forms[:4], [greedy(max_tokens=n) for n in (3, 4, 5, 6)], use_tqdm=False)
    assert [len(a.outputs[0].token_ids) for a in together] == [3, 4, 5, 6]


def test_speculation_changes_metrics_and_no_output(llm: LLM) -> None:
    params = greedy(max_tokens=30, logprobs=5)
    drafted = llm.generate(COPY, params)[0]
    plain = llm.generate(COPY, greedy(max_tokens=30, logprobs=5, speculative=False))[0]
    for name in ("token_ids", "logprobs", "text"):
        assert getattr(drafted.outputs[0], name) == getattr(plain.outputs[0], name)
    assert drafted.metrics.acceptance_length > 2 and plain.metrics.acceptance_length == 1
    assert plain.metrics.num_draft_tokens == 0 and set(plain.outputs[0].provenance) == {"plain"}
    origins = drafted.outputs[0].provenance
    assert sum(o == "accepted:ngram" for o in origins) == drafted.metrics.num_accepted_tokens
    assert len(origins) == drafted.metrics.num_emitted_tokens == 30


def test_logprobs_hold_the_token_and_the_best_with_ranks(llm: LLM) -> None:
    out = llm.generate("Hello", greedy(logprobs=3, prompt_logprobs=1, max_tokens=4))[0]
    output = out.outputs[0]
    assert len(output.logprobs) == 4
    for token, entries in zip(output.token_ids, output.logprobs, strict=True):
        assert next(iter(entries)) == token and len(entries) == 3
        assert entries[token].rank == 1 and entries[token].decoded_token == llm.tokenizer.token_text(token)
    total = sum(entries[t].logprob for t, entries in zip(output.token_ids, output.logprobs, strict=True))
    assert output.cumulative_logprob == pytest.approx(total)
    assert out.prompt_logprobs[0] is None and len(out.prompt_logprobs) == len(out.prompt_token_ids)


def test_stop_string_across_tokens_cuts_text_tokens_and_logprobs(llm: LLM) -> None:
    free = llm.generate(COPY, greedy(max_tokens=30, logprobs=0))[0].outputs[0]
    stop = free.text[7:15]  # not aligned with tokens
    cut = free.text.index(stop)
    for include, speculative in itertools.product((False, True), repeat=2):
        options = {"include_stop_str_in_output": include, "speculative": speculative}
        output = llm.generate(COPY, greedy(max_tokens=30, logprobs=0, stop=stop, **options))[0].outputs[0]
        assert output.text == free.text[: cut + len(stop) if include else cut]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        n = len(output.token_ids)
        assert output.token_ids == free.token_ids[:n] and n < 30
        assert n == len(output.logprobs) == len(output.provenance) == len(output.text_offsets)
        assert n == output.metrics.num_emitted_tokens
        assert max(output.text_offsets) <= len(output.text)
        assert output.provenance.count("accepted:ngram") == output.metrics.num_accepted_tokens
    assert not llm.engine.has_work


def test_stream_events_join_to_the_whole_output(llm: LLM) -> None:
    params = greedy(max_tokens=20, logprobs=2, stop=["zzz"])
    whole, events = llm.generate(COPY, params)[0].outputs[0], list(llm.stream(COPY, params))
    assert "".join(e.text for e in events) == whole.text
    assert [e.token_id for e in events] == whole.token_ids
    assert [e.logprobs for e in events] == whole.logprobs
    assert [e.finish_reason for e in events[:-1]] == [None] * 19 and events[-1].finish_reason == "length"


def test_closed_stream_frees_its_pages_and_leaves_another_unchanged(llm: LLM) -> None:
    alone = [e.token_id for e in llm.stream("Once upon a time", greedy(max_tokens=15))]
    first = llm.stream("Once upon a time", greedy(max_tokens=15))
    second = llm.stream(COPY, greedy(max_tokens=200))
    seen = []
    for event in first:
        seen.append(event.token_id)
        next(second)
    second.close()
    assert seen == alone
    assert not llm.engine.has_work
    pages = llm.engine.loop.scheduler.pages
    assert pages.num_free == pages.capacity


def test_n_outputs_have_consecutive_seeds(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=7, max_tokens=8, temperature=1.0)
    out = llm.generate("My favourite food is", params)[0]
    assert [o.seed for o in out.outputs] == [7, 8, 9]
    assert len({tuple(o.token_ids) for o in out.outputs}) == 3
    again = llm.generate("My favourite food is", SamplingParams(seed=8, max_tokens=8, temperature=1.0))[0]
    assert again.outputs[0].token_ids == out.outputs[1].token_ids
    assert out.usage["completion_tokens"] == sum(len(o.token_ids) for o in out.outputs)


def test_request_without_a_seed_reports_a_random_one(llm: LLM) -> None:
    first = llm.generate("Hi", SamplingParams(max_tokens=8))[0].outputs[0]
    second = llm.generate("Hi", SamplingParams(max_tokens=8, seed=first.seed))[0].outputs[0]
    assert first.token_ids == second.token_ids
    assert llm.generate("Hi", SamplingParams(max_tokens=8))[0].outputs[0].seed != first.seed


def test_engine_seed_makes_random_seeds_repeatable(smollm2_path: object) -> None:
    def seeds(seed: int | None) -> list[int]:
        llm = LLM("smollm2-135m", max_num_seqs=2, max_model_len=64, seed=seed)
        results = llm.generate(["a", "b"], SamplingParams(max_tokens=1, n=2), use_tqdm=False)
        return [output.seed for result in results for output in result.outputs]

    first = seeds(7)
    assert first == seeds(7) != seeds(8)
    assert seeds(None) != seeds(None) and len(set(first)) == 4


def test_bad_words_are_not_generated(llm: LLM) -> None:
    free = llm.generate("The capital of France is", greedy())[0].outputs[0].text
    assert "Paris" in free
    kept = llm.generate("The capital of France is", greedy(bad_words=["Paris"]))[0].outputs[0].text
    assert "Paris" not in kept


def test_chat_generates_the_next_message_of_each_conversation(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is 2 + 2? Answer with a number."}]
    both = llm.chat([messages, messages], greedy(max_tokens=20), use_tqdm=False)
    assert len(both) == 2 and both[0].outputs[0].text == both[1].outputs[0].text
    assert "4" in both[0].outputs[0].text


def test_chat_template_options_are_passed_to_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    template = "{{ messages[0].content }} there{{ mark }}"
    ids = llm.chat_token_ids(messages, chat_template=template, chat_template_kwargs={"mark": "!"})
    assert llm.get_tokenizer().decode(ids) == "Hi there!"
    out = llm.chat(messages, greedy(max_tokens=1), chat_template=template)[0]
    assert llm.tokenizer.decode(out.prompt_token_ids) == "Hi there" and out.outputs[0].finished()
    with pytest.raises(RequestError, match="cannot be compiled"):
        llm.chat(messages, greedy(), chat_template="{% if")


@pytest.mark.parametrize("name", ["max_tokens", "add_generation_promt", "mark"])
def test_unknown_chat_option_is_rejected_by_name(llm: LLM, name: str) -> None:
    message = f"no option '{name}'.*SamplingParams.*chat_template_kwargs"
    with pytest.raises(RequestError, match=message) as caught:
        llm.chat([{"role": "user", "content": "Hi"}], greedy(max_tokens=1), **{name: 5})
    assert caught.value.param == name
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert llm.chat_token_ids([{"role": "assistant", "content": "Hi"}], **options)


MESSAGES = ["hello", [], [["hello"]], [{"role": "user"}, "hello"]]
PROMPTS = [5, None, [None], b"abc", {"prompt_token_ids": 5}, {"prompt": None}, torch.tensor(5)]
INVALID_CALLS = [
    *(("chat", (messages,), "messages must be a list") for messages in MESSAGES),
    *(("generate", (prompt,), "a text or a list of token ids") for prompt in PROMPTS),
    ("generate", (["a"], {"temperature": 0}), "must be SamplingParams"),
    ("generate", (["a"], [{"temperature": 0}]), "must be SamplingParams"),
    ("generate", (["a", "b"], [SamplingParams()]), "one each"),
    ("generate", ({"promt": "x"},), "prompt_token_ids"),
    ("generate", (["fine", {"prompt_token_ids": []}],), "empty"),
    ("stream", ({"prompt_token_ids": []},), "empty"),
    ("stream", ("a", {"temperature": 0}), "must be SamplingParams"),
]


@pytest.mark.parametrize(("method", "arguments", "message"), INVALID_CALLS, ids=lambda value: str(value)[:40])
def test_invalid_arguments_are_rejected(llm: LLM, method: str, arguments: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        getattr(llm, method)(*arguments)
    assert not llm.engine.has_work


def test_eos_and_bad_words_outside_the_vocabulary_are_ignored(llm: LLM, monkeypatch: MonkeyPatch) -> None:
    """Give the tokenizer more tokens than the model."""
    vocab = llm.engine.model_config.vocab_size
    monkeypatch.setattr(llm.tokenizer, "eos_token_ids", (*llm.tokenizer.eos_token_ids, vocab + 3))
    want = llm.generate("Hi", greedy())[0].outputs[0].token_ids
    encode = llm.tokenizer.encode
    beyond = {"odd": [vocab], " odd": [5, vocab]}
    monkeypatch.setattr(
        llm.tokenizer, "encode", lambda text, **more: beyond.get(text) or encode(text, **more)
    )
    assert llm.generate("Hi", greedy(bad_words=["odd"]))[0].outputs[0].token_ids == want


def test_tokenizer_of_a_named_model_is_used(smollm2_path: object, tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 49152, "hidden_size": 16}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    bare = LLM(str(tmp_path), load_format="dummy", tokenizer="smollm2-135m", max_num_seqs=2)
    assert bare.get_tokenizer().decode(bare.tokenizer.encode("Hello")) == "Hello"
    with pytest.raises(LoadError, match="smollm2-135m"):
        LLM(str(tmp_path), load_format="dummy", tokenizer="smollm2")


def test_generate_does_not_wait_for_a_concurrent_stream(llm: LLM, monkeypatch: MonkeyPatch) -> None:
    stream = llm.stream("Once upon a time", greedy(max_tokens=60, ignore_eos=True, speculative=False))
    next(stream)
    step, calls = llm.tracker.step, []
    monkeypatch.setattr(llm.tracker, "step", lambda **how: calls.append(1) or step(**how))
    each = [greedy(max_tokens=n, ignore_eos=True, speculative=False) for n in (2, 4)]
    assert len(llm.generate(["a", "b"], each, use_tqdm=False)) == 2
    assert len(calls) < 8
    assert sum(event.token_id is not None for event in stream) == 59


def test_interrupted_generate_leaves_no_request(llm: LLM, monkeypatch: MonkeyPatch) -> None:
    """Interrupt at several moments, also between the end of a request and the end of its output."""
    moments = (OutputTable, "add", 3), (OutputTable, "close_deferred", 3), (OutputColumns, "append", 1)
    for owner, moment, number in (*moments, (OutputTable, "_close_finished", 1)):
        whole, calls = getattr(owner, moment), []

        def interrupted(
            self: object, *args: object, whole: Any = whole, calls: Any = calls, number: int = number
        ) -> Any:
            calls.append(1)
            if len(calls) == number:
                raise KeyboardInterrupt
            return whole(self, *args)

        with monkeypatch.context() as patch:
            patch.setattr(owner, moment, interrupted)
            with pytest.raises(KeyboardInterrupt):
                each = [greedy(max_tokens=n) for n in (2, 3, 4, 5)]  # no two of them end together
                llm.generate(["a", "b", "c", "d"], each, use_tqdm=False)
        assert not llm.tracker.has_pending_outputs and not llm.engine.has_work
    assert llm.generate("fine", greedy())[0].finished


def test_processor_error_ends_only_its_request(llm: LLM) -> None:
    def failing(tokens: list[int], logits: object) -> object:
        raise RuntimeError("no")

    both = llm.generate(["a", "b"], [greedy(logits_processors=[failing]), greedy()], use_tqdm=False)
    failed, other = both[0].outputs[0], both[1].outputs[0]
    assert failed.finish_reason == "error" and "RuntimeError: no" in failed.error
    assert other.token_ids == llm.generate("b", greedy())[0].outputs[0].token_ids


@pytest.fixture
def tiny_llm(tmp_path: Path) -> LLM:
    """Model of one layer with random weights and a tokenizer of ten pieces."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    llm = LLM(str(tmp_path), load_format="dummy", dtype="float32", max_num_seqs=4)
    llm.tokenizer = Pieces()  # type: ignore[assignment]
    return llm


@pytest.mark.parametrize("n", [16385, 10**9])
def test_n_above_the_limit_is_refused_before_allocation(tiny_llm: LLM, n: int) -> None:
    for call in (tiny_llm.generate, tiny_llm.stream):
        with pytest.raises(RequestError, match="n must be at most 16384") as refused:
            call("ab", SamplingParams(n=n))
        assert refused.value.param == "n"
    assert not tiny_llm.tracker.has_pending_outputs


@pytest.mark.parametrize(
    "options",
    [{}, {"logprobs": 3}, {"logprobs": 0, "prompt_logprobs": 2}, {"logprob_token_ids": [3, 5]}, {"n": 2}],
    ids=str,
)
def test_pickled_and_copied_output_equals_the_original(tiny_llm: LLM, options: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=5, seed=3, ignore_eos=True, **options)
    output = tiny_llm.generate("ab", params, use_tqdm=False)[0]
    for copied in (pickle.loads(pickle.dumps(output)), copy.deepcopy(output)):
        assert copied == output and output == copied
        assert copied.outputs == output.outputs
        assert repr(copied) == repr(output)
    events = list(tiny_llm.stream("ab", params))
    copied = pickle.loads(pickle.dumps(events))
    assert copied == events and [event.logprobs for event in copied] == [event.logprobs for event in events]


def test_events_of_a_tokenizer_that_cannot_be_pickled_are_pickled(tiny_llm: LLM) -> None:
    """Pickle after a chat template was compiled, whose functions have no module."""
    events = list(tiny_llm.stream("ab", SamplingParams(max_tokens=3, seed=3, logprobs=2)))
    for event in events:
        event.token_text = lambda token: f"<{token}>"
    copied = pickle.loads(pickle.dumps(events))
    assert copied == events and copied[0].logprobs == events[0].logprobs


def test_llm_as_context_manager_is_closed_at_the_end(tiny_llm: LLM) -> None:
    with tiny_llm as llm:
        stream = llm.stream("ab", SamplingParams(max_tokens=50, ignore_eos=True))
        next(stream)
        assert llm.tracker.num_requests == 1
    assert not llm.engine.has_work and not llm.tracker.has_pending_outputs
    for call in (llm.generate, llm.stream):
        with pytest.raises(EngineClosedError, match="was closed"):
            call("ab")
    llm.close()
    with pytest.raises(ZeroDivisionError), tiny_llm:
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("max_num_seqs", {"max_num_seq": 3}),
        ("memory_utilization' twice", {"gpu_memory_utilization": 0.5, "memory_utilization": 0.6}),
        ("memory_utilization must lie in 0..1", {"gpu_memory_utilization": 2}),
    ],
)
def test_invalid_engine_option_is_a_config_error(message: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("smollm2-135m", **options)
