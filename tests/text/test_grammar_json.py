"""Structured outputs follow their schema, with the distribution of constrained decoding without drafts.

The tiny models have random weights over single characters, so at temperature 1 outputs vary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest
import torch
from scipy import stats

import grammars
import proposers
import tiny
from distribution import ALPHA, BIAS, p_value
from draftproof import LLM
from draftproof.ops import STREAM_SAMPLE
from draftproof.propose import Proposer
from draftproof.sampling_params import SamplingParams
from draftproof.types import Draft, ProposeBatch
from draftproof.verify.grammar_guide import GrammarGuide
from grammars import EOS, TINY

RUNS = 500
DRAFTED_RUNS = 120  # with each proposer and each strategy: every schema 24 times
SMALL = {"type": "string", "maxLength": 3}
SCHEMAS: list[dict[str, Any]] = [
    grammars.SCHEMA,
    {
        "type": "array",
        "items": {"type": "integer", "minimum": 1, "maximum": 99},
        "minItems": 1,
        "maxItems": 4,
    },
    {
        "type": "object",
        "properties": {
            "kind": {"enum": ["add", "take"]},
            "at": {"$ref": "#/$defs/point"},
            "note": {"anyOf": [SMALL, {"type": "null"}]},
        },
        "required": ["kind", "at", "note"],
        "$defs": {
            "point": {
                "type": "object",
                "properties": {"x": {"type": "boolean"}, "y": {"const": 7}},
                "required": ["x", "y"],
                "additionalProperties": False,
            }
        },
    },
    {"type": "object", "properties": {"s": {**SMALL, "minLength": 1}, "t": SMALL}, "minProperties": 1},
    {"type": ["boolean", "null"]},
]
METHODS = ["ngram", "proposers:Junk", "proposers:Flaky", "proposers:DeviceJunk"]


def answers(method: str | None, count: int = DRAFTED_RUNS, **options: Any) -> dict[str, tiny.Record]:
    """Run one request per seed, over all schemas."""
    spec = method and {"method": method, "num_speculative_tokens": 5, "adaptive": False, **options}
    target = tiny.engine(speculative=spec or None, max_num_seqs=250, max_num_batched_tokens=2048, debug=False)
    requests = []
    for i in range(count):
        wanted = {"json": SCHEMAS[i % len(SCHEMAS)], "max_whitespace": 2}
        params = SamplingParams(temperature=1.0, max_tokens=200, structured_outputs=wanted)
        requests.append(tiny.request(i, params, 5 + i % 9, grammar=grammars.grammars().compile(params)))
    return tiny.run(target, requests)


def wrong(records: dict[str, tiny.Record]) -> list[str]:
    """Return the outputs that do not parse or do not validate."""
    found = []
    for name, record in records.items():
        text = TINY.text(record.token_ids)
        try:
            assert record.finish == ("stop", None, None), record.finish
            jsonschema.validate(json.loads(text), SCHEMAS[int(name) % len(SCHEMAS)])
        except (AssertionError, ValueError, jsonschema.ValidationError) as error:
            found.append(f"{text!r}: {error}")
    return found


@pytest.fixture(scope="module")
def plain() -> dict[str, tiny.Record]:
    return answers(None, RUNS)


def test_500_outputs_without_drafts_are_valid(plain: dict[str, tiny.Record]) -> None:
    assert wrong(plain) == []
    assert len({TINY.text(r.token_ids) for r in plain.values()}) > RUNS // 2, "they differ"


@pytest.mark.parametrize("method", METHODS)
def test_outputs_with_drafts_are_valid_and_equal_those_without(
    method: str, plain: dict[str, tiny.Record]
) -> None:
    proposers.set_outputs({name: record.token_ids for name, record in plain.items()})
    records = answers(method)
    assert wrong(records) == []
    assert {n: r.token_ids for n, r in records.items()} == {n: plain[n].token_ids for n in records}
    assert sum(step.num_draft for r in records.values() for step in r.steps) > DRAFTED_RUNS


@pytest.mark.parametrize("strategy", ["rejection", "topp", "greedy"])
def test_outputs_of_each_verify_strategy_are_valid(strategy: str, plain: dict[str, tiny.Record]) -> None:
    proposers.set_outputs({name: record.token_ids for name, record in plain.items()})
    records = answers("proposers:Flaky", verify_strategy=strategy)
    assert wrong(records) == []
    assert sum(step.num_accepted for r in records.values() for step in r.steps) > DRAFTED_RUNS


def test_control_masks_that_ignore_drafts_are_detected(
    monkeypatch: pytest.MonkeyPatch, plain: dict[str, tiny.Record]
) -> None:
    proposers.set_outputs({name: record.token_ids for name, record in plain.items()})
    whole = GrammarGuide.fill

    def broken(
        self: GrammarGuide, drafts: Sequence[int], rows: torch.Tensor, *limit: float
    ) -> dict[int, str]:
        errors = whole(self, [], rows[:1])
        rows[1:] = rows[0]
        return errors

    monkeypatch.setattr(GrammarGuide, "fill", broken)
    assert wrong(answers("proposers:Flaky", count=50))


# --- a real model -------------------------------------------------------------------------------------


def test_smollm2_outputs_follow_the_schema_with_and_without_drafts(smollm2_path: object) -> None:
    spec = {"method": "ngram", "num_speculative_tokens": 5, "adaptive": False}  # independent of timings
    llm = LLM("smollm2-135m", speculative_config=spec)
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
    }
    people = ["Ada"]
    prompts = [f'{{"name": "Zoë", "age": 3, "tags": ["a", "b"]}}\nNow {name} as JSON:\n' for name in people]
    wanted = {"json": schema, "max_whitespace": 1}

    def generate(**more: Any) -> list[Any]:
        params = SamplingParams(n=2, max_tokens=150, seed=5, logprobs=2, structured_outputs=wanted, **more)
        return [output for out in llm.generate(prompts, params, use_tqdm=False) for output in out.outputs]

    drafted, alone = generate(), generate(speculative=False)
    for one, other in zip(drafted, alone, strict=True):
        assert one.finish_reason == "stop", one.text
        jsonschema.validate(json.loads(one.text), schema)
        assert one.token_ids == other.token_ids and list(one.logprobs) == list(other.logprobs)
    assert sum(one.metrics.num_accepted_tokens for one in drafted) > 0
    params = SamplingParams(max_tokens=150, seed=5, structured_outputs=wanted)
    assert "".join(event.text for event in llm.stream(prompts[0], params)) == drafted[0].text
    llm._grammars.close()


# --- distribution -------------------------------------------------------------------------------------

REGEX = "[abc](a[ab]|b[cd]|c[ad])"  # allowed tokens depend on the drafts before them
NEXT = {"": "abc", "x": "abc", "xa": "ab", "xb": "cd", "xc": "ad"}
OUTCOMES = [a + b + c for a in "abc" for b in "abc" for c in NEXT["x" + b]]
COUNT = 16_000


class SampledLetters(Proposer):
    """Sample drafts with the target's noise from another distribution, with a quarter on z, never allowed."""

    sources = ("sampled",)
    reports_probs = True
    drops = False

    def propose(self, batch: ProposeBatch) -> Draft:
        b, k, vocab = len(batch.slots), self.env.k, self.env.vocab_size
        logits = torch.full((vocab,), -torch.inf)
        for letter, value in zip("abcdz", (1.0, 0.0, 0.4, -0.5, 0.6), strict=True):
            logits[grammars.token_of(letter)] = value
        out = torch.tensor(batch.lengths) - batch.columns.prompt_len[batch.slots]
        seeds = batch.columns.seed[batch.slots].repeat_interleave(k)
        positions = (out[:, None] + torch.arange(k)).reshape(-1)
        sampling = self.env.ops.sampling
        tokens = sampling.gumbel_argmax(logits.expand(b * k, vocab), seeds, positions, STREAM_SAMPLE)
        tokens, probs = tokens.view(b, k), logits.softmax(-1).expand(b, k, vocab)
        count = torch.full((b,), k)
        if self.drops:
            legal = tokens != grammars.token_of("z")
            count = legal.long().cumprod(1).sum(1)
        return Draft(tokens, count, probs.gather(2, tokens[..., None])[..., 0].log(), probs)


class DroppedLetters(SampledLetters):
    """Drop drafts that the grammar forbids; the others no longer follow the reported distribution."""

    drops = True


def exact_distribution(temperature: float) -> dict[tuple[str, ...], float]:
    """Compute probabilities from the engine's logprobs of forced continuations, over allowed tokens."""
    target = tiny.engine(max_logprobs=-1)
    base = tiny.prompt(0)

    def row(produced: str, allowed: str) -> dict[str, float]:
        ids = [*base, *map(grammars.token_of, produced)]
        params = SamplingParams(max_tokens=1, logprobs=-1)
        line = tiny.run(target, [tiny.request(0, params, prompt_token_ids=ids)])["0"].logprobs[0]
        values = dict(zip(line.token_ids, line.logprobs, strict=True))
        weights = {c: math.exp(values[grammars.token_of(c)] / temperature) for c in allowed}
        return {c: w / sum(weights.values()) for c, w in weights.items()}

    first = row("", "abc")
    found = {}
    for a in "abc":
        second = row(a, "abc")
        for b in "abc":
            for c, p in row(a + b, NEXT["x" + b]).items():
                found[(a + b + c,)] = first[a] * second[b] * p
    return found


def sampled(strategy: str, proposer: str, count: int = COUNT) -> list[tuple[str, ...]]:
    spec = {
        "method": f"test_grammar_json:{proposer}",
        "num_speculative_tokens": 2,
        "verify_strategy": strategy,
        "adaptive": False,
    }
    target = tiny.engine(speculative=spec, max_num_seqs=256, max_num_batched_tokens=4096, debug=False)
    params = SamplingParams(temperature=3.0, max_tokens=8, structured_outputs={"regex": REGEX})
    given = {"prompt_token_ids": tiny.prompt(0), "grammar": grammars.grammars().compile(params)}
    requests = [tiny.request(i, params, **given) for i in range(count)]
    records = tiny.run(target, requests)
    assert all(r.finish[0] == "stop" and r.token_ids[-1] == EOS for r in records.values())
    assert sum(s.num_accepted for r in records.values() for s in r.steps) > count // 10
    return [(TINY.text(r.token_ids),) for r in records.values()]


def test_sample_size_detects_the_assumed_bias() -> None:
    cells = len(OUTCOMES)
    assert stats.ncx2.sf(stats.chi2.isf(ALPHA, cells - 1), cells - 1, COUNT * BIAS**2 * 4) > 0.99


# target_match equals decoding without drafts, token by token (above): a smaller sample suffices
@pytest.mark.parametrize(("strategy", "count"), [("rejection", COUNT), ("target_match", COUNT // 16)])
def test_distribution_equals_constrained_decoding(strategy: str, count: int) -> None:
    value = p_value(sampled(strategy, "SampledLetters", count), exact_distribution(3.0))
    assert value >= ALPHA, value


def test_control_drafts_dropped_before_verification_bias_rejection() -> None:
    assert p_value(sampled("rejection", "DroppedLetters", COUNT // 4), exact_distribution(3.0)) < ALPHA


@pytest.mark.parametrize(("strategy", "count"), [("topp", 4000), ("greedy", 500)])
def test_control_lossy_strategy_is_detected(strategy: str, count: int) -> None:
    assert p_value(sampled(strategy, "SampledLetters", count), exact_distribution(3.0)) < ALPHA
