"""Errors of options and requests name the option; other requests in the engine are not affected."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import tiny
from draftproof.config import EngineConfig
from draftproof.errors import ConfigError, RequestError
from draftproof.sampling_params import SamplingParams
from draftproof.speculative_config import SpeculativeConfig
from exact import NEIGHBOURS, Case, Setup, bits, check_empty, reference_run

WRONG_VALUES: dict[str, list[Any]] = {
    # 1e39 is beyond fp32, 10**310 beyond every float
    "temperature": [math.nan, -0.1, math.inf, 1e39, 10**310, "hot", True],
    "top_p": [0.0, 1.1],
    "min_p": [math.nan],
    "top_k": [-2, 1.5],
    "presence_penalty": [2.5],
    "frequency_penalty": [-3],
    "repetition_penalty": [0.0, 5e-324, 1e39],
    "logit_bias": [
        *({3: math.nan}, {3: math.inf}, {3: 1e39}, {"three": 1.0}, [3], {3.7: 1.0}, {math.inf: 1.0}),
        {3: 10**310},
    ],
    "seed": [-(2**63) - 1, 2**63],
    "n": [0],
    "max_tokens": [0],
    "min_tokens": [-1],
    "logprobs": [-2],
    "logprob_token_ids": [[], [[5]]],
    "allowed_token_ids": [[], 5, [[5]]],
    "ignore_eos": ["no"],
    "skip_special_tokens": ["no"],
    "include_stop_str_in_output": [None],
    "include_draft_logprobs": [1],
    "stop_token_ids": [5],
    "stop": [[""], [5]],
    "bad_words": [[""], "word"],
    "logprobs_mode": ["cooked"],
    "logits_processors": [["no function"]],
    "prediction": [5, b"text"],
    "speculative": [3, {"enabled": "no"}, {"adaptive": 0}],
}
WRONG_PARAMS = [(name, {name: value}) for name, values in WRONG_VALUES.items() for value in values]
WRONG_PARAMS += [
    ("min_tokens", {"min_tokens": 9, "max_tokens": 8}),
    ("logprob_token_ids", {"logprobs": 3, "logprob_token_ids": [5]}),
]


@pytest.mark.parametrize(("param", "options"), WRONG_PARAMS, ids=lambda value: str(value)[:60])
def test_invalid_sampling_option_is_rejected_by_name(param, options):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**options)
    assert caught.value.param == param
    assert param in str(caught.value)


@pytest.mark.parametrize(
    "name", ["stop", "stop_token_ids", "bad_words", "logits_processors", "logit_bias", "seed", "max_tokens"]
)
def test_none_is_the_default_of_optional_options(name):
    """None is vLLM's default for these options."""
    assert not getattr(SamplingParams(**{name: None}), name)


def test_misspelt_key_error_names_the_nearest_key():
    with pytest.raises(RequestError, match="did you mean 'num_speculative_tokens'"):
        SamplingParams(speculative={"num_spec_tokens": 3})


def request(**options):
    """Return a request: fields of Request by their names, the rest are sampling options."""
    fields = {
        k: options.pop(k)
        for k in ("prompt_token_ids", "bad_word_ids", "eos_token_ids", "prediction_ids")
        if k in options
    }
    return tiny.request(9, SamplingParams(**options), **fields)


WRONG_REQUESTS = [
    ("prompt", "empty", {"prompt_token_ids": []}),
    ("prompt", "max_model_len is 256", {"prompt_token_ids": [5] * 256}),
    ("prompt", "outside the vocabulary", {"prompt_token_ids": [5, 97]}),
    ("prompt", "outside the vocabulary", {"prompt_token_ids": [-1]}),
    ("prompt", "integers", {"prompt_token_ids": [5, "a"]}),
    ("prompt", "integers", {"prompt_token_ids": [5.0]}),
    ("logit_bias", "outside", {"logit_bias": {97: 1.0}}),
    ("allowed_token_ids", "outside", {"allowed_token_ids": [5, 200]}),
    ("stop_token_ids", "outside", {"stop_token_ids": [-3]}),
    ("logprob_token_ids", "outside", {"logprob_token_ids": [97]}),
    ("bad_words", "outside", {"bad_word_ids": [[4, 97]]}),
    ("bad_words", "without tokens", {"bad_word_ids": [[]]}),
    ("logprobs", "max_logprobs is 20", {"logprobs": 21}),
    ("prompt_logprobs", "all tokens", {"prompt_logprobs": -1}),
    ("min_tokens", "beyond max_model_len", {"min_tokens": 250, "max_tokens": None}),
    ("speculative", "above the engine's 5", {"speculative": {"num_speculative_tokens": 6}}),
    ("speculative", "positive integer", {"speculative": {"num_speculative_tokens": 0}}),
    ("speculative", "did you mean 'greedy'", {"speculative": {"verify_strategy": "greedly"}}),
    ("speculative", "unknown verify_strategy", {"speculative": {"verify_strategy": "proposers:Junk"}}),
    ("speculative", "unknown verify_strategy", {"speculative": {"verify_strategy": 5}}),
    ("speculative", "unknown verify_strategy", {"speculative": {"verify_strategy": ["greedy"]}}),
    ("prediction", "257 tokens and max_model_len is 256", {"prediction_ids": [5] * 257}),
]


@pytest.fixture(scope="module")
def busy():
    return tiny.engine(speculative={"method": "ngram"})


@pytest.mark.parametrize(("param", "message", "options"), WRONG_REQUESTS, ids=str)
def test_invalid_request_is_rejected_by_option(busy, param, message, options):
    with pytest.raises(RequestError, match=message) as caught:
        busy.add(request(**options))
    assert caught.value.param == param
    assert not busy.has_work


def test_speculation_options_without_speculative_config_are_refused():
    plain = tiny.engine()
    refused = [{"speculative": {"num_speculative_tokens": 2}}, {"speculative": {"adaptive": False}}]
    for options in (*refused, {"prediction": [5, 6]}):
        with pytest.raises(RequestError, match="speculative_config"):
            plain.add(request(**options))
    plain.add(request(speculative=False))


def test_id_of_a_running_request_is_rejected(busy):
    busy.add(request())
    with pytest.raises(RequestError, match="already running") as caught:
        busy.add(request())
    assert caught.value.param == "request_id"
    assert busy.abort("9") and not busy.abort("9")


def test_request_larger_than_the_kv_cache_is_rejected():
    small = tiny.engine(kv_cache_tokens=64)
    with pytest.raises(RequestError, match="KV cache holds 64") as caught:
        small.add(request(max_tokens=100))
    assert caught.value.param == "max_tokens"
    for param, options in (("prompt", {"prompt_token_ids": [5] * 64}), ("min_tokens", {"min_tokens": 60})):
        with pytest.raises(RequestError, match="64") as caught:
            small.add(request(max_tokens=None, **options))
        assert caught.value.param == param


def test_request_without_max_tokens_runs_until_the_kv_cache_is_full():
    small = tiny.engine(kv_cache_tokens=64, speculative={"method": "ngram", "adaptive": False})
    cases = [tiny.request(i, SamplingParams(max_tokens=None, ignore_eos=True)) for i in range(3)]
    records = tiny.run(small, cases)
    assert {len(record.token_ids) for record in records.values()} == {64 - 12}
    assert {record.finish[0] for record in records.values()} == {"length"}
    check_empty(small)


def raises(tokens, row):
    raise KeyError("gone")


def raises_later(tokens, row):
    if len(tokens) >= 15:
        raise KeyError("gone")
    return row


BAD_PROCESSORS = {
    "raises": (raises, "logits processor raised KeyError: 'gone'", 0),
    "raises later": (raises_later, "logits processor raised KeyError: 'gone'", 3),
    "wrong shape": (lambda tokens, row: row[:-1], "must return a tensor of shape", 0),
    "no tensor": (lambda tokens, row: None, "must return a tensor of shape", 0),
    "nan": (lambda tokens, row: row * math.nan, "not finite", 0),
    "infinite": (lambda tokens, row: row + math.inf, "not finite", 0),
    "all forbidden": (lambda tokens, row: row - math.inf, "forbid every one", 0),
}


@pytest.mark.parametrize("name", BAD_PROCESSORS)
@pytest.mark.parametrize("method", [None, "ngram", "proposers:Flaky"])
def test_failing_processor_ends_only_its_own_request(method, name):
    import proposers

    function, message, delivered = BAD_PROCESSORS[name]
    cases, setup = NEIGHBOURS[:2], Setup()
    alone = {str(a.index): reference_run(a, setup) for a in cases}
    proposers.set_outputs({k: v.token_ids for k, v in alone.items()})
    engine = setup.engine({"method": method} if method else None)
    bad = request(logits_processors=[function], temperature=0, logprobs=2)
    records = tiny.run(engine, [cases[0].request(plain=not method), bad, cases[1].request(plain=not method)])
    finish, _, error = records["9"].finish
    assert finish == "error" and message in error
    assert len(records["9"].token_ids) == len(records["9"].logprobs) == delivered
    for key, record in alone.items():
        assert records[key].token_ids == record.token_ids and records[key].finish == record.finish
        assert bits(records[key].logprobs) == bits(record.logprobs)
    check_empty(engine)


def test_invalid_requests_do_not_change_running_ones():
    setup = Setup()
    cases = [replace(n, k=None) for n in NEIGHBOURS[:3]]
    alone = {str(a.index): reference_run(a, setup) for a in cases}
    engine = setup.engine({"method": "ngram"})
    wrong = [options for _, _, options in WRONG_REQUESTS if "logprobs" not in str(options)]

    def interrupt(step):
        if step < len(wrong):
            with pytest.raises(RequestError):
                engine.add(request(**wrong[step]))

    records = tiny.run(engine, [a.request() for a in cases], each_step=interrupt)
    assert all(records[k].token_ids == r.token_ids for k, r in alone.items())
    assert all(bits(records[k].logprobs) == bits(r.logprobs) for k, r in alone.items())
    check_empty(engine)


@pytest.mark.parametrize("strategy", ["rejection", "topp", "target_match", "greedy"])
def test_drafts_outside_the_vocabulary_are_ignored(strategy):
    engine = tiny.engine(
        speculative={"method": "proposers:Junk", "verify_strategy": strategy, "adaptive": False}
    )
    cases = [Case(i, "mix", 0.7, strategy, length=9 + i) for i in range(4)]
    records = tiny.run(engine, [a.request() for a in cases])
    assert all(r.finish[0] in ("length", "stop") for r in records.values())
    assert sum(s.num_draft for r in records.values() for s in r.steps) > 10


def test_extreme_valid_values_are_served():
    engine = tiny.engine(max_logprobs=-1)
    extremes = [
        *({"temperature": 1e6}, {"temperature": 1e-9}, {"temperature": 1e-5}, {"top_k": 2**70}),
        *({"repetition_penalty": 1e6}, {"repetition_penalty": 1e-6, "temperature": 0.01}),
        *({"logprobs": 500, "prompt_logprobs": 500}, {"top_p": 1e-9, "min_p": 1.0}),
        {"logit_bias": {5: 1e6, 6: -math.inf}},
    ]
    requests = [tiny.request(i, SamplingParams(max_tokens=3, **each)) for i, each in enumerate(extremes)]
    records = tiny.run(engine, requests)
    assert all(record.finish[0] in ("length", "stop") for record in records.values())
    assert len(records["6"].logprobs[0].token_ids) == 1 + tiny.VOCAB


SYNTHETIC = {"method": "ngram", "accept_policy": "synthetic"}
WRONG_CONFIGS = [
    ("did you mean 'ngram'", {"method": "ngrams"}),
    ("needs a 'method'", {"num_speculative_tokens": 3}),
    *(("in 1..64", {"method": "ngram", "num_speculative_tokens": value}) for value in (65, 0, True)),
    ("did you mean 'target_match'", {"method": "ngram", "verify_strategy": "target_macth"}),
    ("did you mean 'prompt_lookup_max'", {"method": "ngram", "prompt_lookup_maxx": 3}),
    ("did you mean 'reject_all'", {"method": "ngram", "accept_policy": "rejectall"}),
    ("above prompt_lookup_max", {"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3}),
    ("twice", {"method": "ngram", "max_ngram_size": 4, "prompt_lookup_max": 3}),
    ("needs accept_policy='synthetic'", {"method": "ngram", "synthetic_acceptance_length": 2}),
    ("needs either", {"method": "ngram", "accept_policy": "synthetic"}),
    ("must lie in 1..6", {**SYNTHETIC, "synthetic_acceptance_length": "2"}),
    ("must be 5 numbers", {**SYNTHETIC, "synthetic_acceptance_rates": "12345"}),
    ("must be 5 numbers", {**SYNTHETIC, "synthetic_acceptance_rates": [0.5, 0.5, 0.5, None, 0]}),
    ("verify_strategy must be a string", {"method": "ngram", "verify_strategy": None}),
    ("pool_tokens must be an integer", {"method": "suffix", "pool_tokens": "many"}),
    ("belongs to verify_strategy 'topp'", {"method": "ngram", "max_candidate_len": 5}),
    ("max_candidate_len", {"method": "ngram", "verify_strategy": "topp", "max_candidate_len": 0}),
    ("max_candidate_len", {"method": "ngram", "verify_strategy": "topp", "max_candidate_len": "5"}),
    ("verify_window", {"method": "ngram", "verify_strategy": "topp", "verify_window": -1}),
    ("cannot load", {"method": "no_such_module:Thing"}),
    ("cannot load", {"method": "proposers:Thing"}),
]


@pytest.mark.parametrize(("message", "spec"), WRONG_CONFIGS, ids=str)
def test_invalid_speculative_config_is_rejected(message, spec):
    with pytest.raises(ConfigError, match=message):
        tiny.engine(speculative=SpeculativeConfig.parse(spec))


WRONG_BOOLEANS = {"overlap": "no", "debug": None, "warm_up": 0}
WRONG_STRINGS = {"backend": None, "device": 0, "tokenizer": True, "revision": 5}


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("did you mean 'max_model_len'", {"max_model_length": 5}),
        ("positive integer", {"max_num_seqs": 0}),
        ("page_size", {"page_size": 7}),
        ("dtype must be one of", {"dtype": "int3"}),
        ("numerics must be one of", {"numerics": "quick"}),
        ("speculative_config must be a mapping", {"speculative_config": 3}),
        ("max_logprobs", {"max_logprobs": -2}),
        *(("seed must be", {"seed": value}) for value in ("7", -1, 2**63)),
        *((f"{name} must be true or false", {name: value}) for name, value in WRONG_BOOLEANS.items()),
        *((f"{name} must be a string", {name: value}) for name, value in WRONG_STRINGS.items()),
    ],
)
def test_invalid_engine_config_is_rejected(message, options):
    with pytest.raises(ConfigError, match=message):
        EngineConfig.parse("model", options)


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("beyond the 512 positions", {"max_model_len": 513}),
        ("must be at least max_num_seqs", {"max_num_batched_tokens": 7}),
        ("unknown backend", {"backend": "tpu"}),
        ("cannot be used here", {"device": "cuda:63"}),
        ("unknown device", {"device": "abacus"}),
    ],
)
def test_engine_options_that_do_not_fit_are_rejected(message, options):
    with pytest.raises(ConfigError, match=message):
        tiny.engine(**options)


LARGE_LOGIT_PROCESSORS = {  # finite, and beyond fp32 once they are divided by a temperature
    "likely": lambda tokens, row: row.index_fill(0, torch.tensor([30, 40, 50]), 3e38),
    "unlikely": lambda tokens, row: torch.full_like(row, torch.finfo(row.dtype).min),
}


@pytest.mark.parametrize("name", LARGE_LOGIT_PROCESSORS)
def test_processor_with_very_large_logits(name):
    """Only tokens that it allows are sampled, whatever else is in the batch."""
    options = {"logits_processors": [LARGE_LOGIT_PROCESSORS[name]], "allowed_token_ids": [40, 50]}
    cut = tiny.request(1, SamplingParams(top_k=3, max_tokens=12, ignore_eos=True))
    for temperature in (0.5, 1e-5):
        params = SamplingParams(temperature=temperature, **options)
        alone = tiny.run(tiny.engine(), [tiny.request(0, params)])["0"]
        beside = tiny.run(tiny.engine(), [tiny.request(0, params), cut])["0"]
        assert set(alone.token_ids) == {40, 50} and beside.token_ids == alone.token_ids
        with_logprobs = replace(params, logprobs=1, logprobs_mode="processed", speculative=None)
        seen = tiny.run(tiny.engine(), [tiny.request(0, with_logprobs)])["0"]
        assert seen.token_ids == alone.token_ids
        assert all(x == pytest.approx(-math.log(2)) for row in seen.logprobs for x in row.logprobs)


def test_bias_with_very_large_values():
    """A bias makes tokens unlikely and forbids none: if all are unlikely, one of them is sampled."""
    bias = dict.fromkeys(range(tiny.VOCAB), -1e38)
    for temperature in (0.5, 1e-5):
        params = SamplingParams(temperature=temperature, logit_bias=bias, allowed_token_ids=[40, 50])
        alone = tiny.run(tiny.engine(), [tiny.request(0, params)])["0"]
        assert set(alone.token_ids) <= {40, 50}


def test_processor_that_writes_in_place_does_not_change_raw_logprobs():

    def spoil(tokens, row):
        row.fill_(0)
        row[5] = 9
        return row

    options = {"temperature": 0.0, "max_tokens": 2, "logprobs": 3}
    spoiled = SamplingParams(logits_processors=[spoil], **options)
    record = tiny.run(tiny.engine(), [tiny.request(0, spoiled)])["0"]
    plain = tiny.run(tiny.engine(), [tiny.request(0, SamplingParams(**options))])["0"]
    assert record.token_ids[0] == 5
    assert record.logprobs[0].logprobs[1:] == plain.logprobs[0].logprobs[1:]
    assert torch.isfinite(torch.tensor(record.logprobs[0].logprobs)).all()


@pytest.mark.parametrize(
    ("name", "value", "plain"),
    [
        ("temperature", np.float32(0.5), 0.5),
        ("top_p", np.float64(0.9), 0.9),
        ("n", np.int64(5), 5),
        ("max_tokens", np.int32(7), 7),
        ("seed", np.uint64(2**63 - 1), 2**63 - 1),
        ("top_k", torch.tensor(3), 3),
        ("stop_token_ids", np.array([4, 5]), (4, 5)),
        ("allowed_token_ids", [np.int64(6), 6, 7], (6, 7)),
        ("prediction", np.array([8, 9]), (8, 9)),
        ("logit_bias", {np.int64(3): np.float32(1.5)}, {3: 1.5}),
    ],
    ids=lambda value: str(value),
)
def test_numpy_scalars_in_sampling_params_become_python_numbers(name: str, value: Any, plain: Any) -> None:
    found = getattr(SamplingParams(**{name: value}), name)
    assert found == plain
    items = [*found, *found.values()] if isinstance(found, dict) else found
    for each in items if isinstance(items, (tuple, list)) else [items]:
        assert type(each) in (int, float)


@pytest.mark.parametrize(
    ("name", "value"),
    [("n", np.bool_(True)), ("temperature", np.bool_(False)), ("n", np.float32(2)), ("n", np.array([1, 2]))],
    ids=str,
)
def test_numpy_values_of_another_kind_in_sampling_params_are_refused(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})
