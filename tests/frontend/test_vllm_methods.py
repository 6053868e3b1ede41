"""Methods of LLM that scripts for vLLM call: score, get_metrics, defaults of generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftproof import LLM, LoadError, RequestError, SamplingParams
from draftproof.frontend.vllm_metrics import Counter, Gauge, Histogram, Vector
from text_pieces import make_llm, output_fields

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
PROMPT = "abababab"


def test_score_is_the_logprob_of_the_same_tokens_as_output(tmp_path: Path) -> None:
    """Compare scores with the logprobs of a greedy output, with and without drafts."""
    scores = []
    for spec in (None, NGRAM):
        with make_llm(tmp_path, spec) as llm:
            params = SamplingParams(temperature=0, max_tokens=6, logprobs=0, ignore_eos=True)
            output = llm.generate(PROMPT, params)[0].outputs[0]
            other = [*output.token_ids[:-1], 19 if output.token_ids[-1] != 19 else 18]
            found = llm.score(PROMPT, [output.token_ids, other], use_tqdm=False)
            chosen = [row[t].logprob for t, row in zip(output.token_ids, output.logprobs, strict=True)]
            assert found[0].token_logprobs == chosen and found[0].is_greedy
            assert not found[1].is_greedy and found[1].logprob < found[0].logprob
            assert found[0].logprob == pytest.approx(output.cumulative_logprob)
            assert found[1].token_ids == other and found[0].prompt_token_ids == llm.tokenizer.encode(PROMPT)
            scores.append([*found, *llm.score([PROMPT, "b"], ["a", "ab"])])
    assert scores[0] == scores[1]


@pytest.mark.parametrize(
    ("contexts", "continuations", "message"),
    [
        ("ab", [], None),
        (["a", "b"], ["a"], "2 contexts and 1"),
        ("", "a", "no tokens"),
        ("a", "", "no tokens"),
    ],
)
def test_pairs_without_tokens_are_refused(
    tmp_path: Path, contexts: Any, continuations: Any, message: str | None
) -> None:
    with make_llm(tmp_path, None) as llm:
        if message is None:
            assert llm.score(contexts, continuations) == []
            return
        with pytest.raises(RequestError, match=message):
            llm.score(contexts, continuations)


def test_metrics_have_the_names_and_classes_of_vllm(tmp_path: Path) -> None:
    with make_llm(tmp_path, NGRAM) as llm:
        llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        found = {metric.name.removeprefix("vllm:"): metric for metric in llm.get_metrics()}
        stats = llm.stats
    accepted, per_position = (
        found["spec_decode_num_accepted_tokens"],
        found["spec_decode_num_accepted_tokens_per_pos"],
    )
    assert isinstance(accepted, Counter) and accepted.value == stats.num_accepted_tokens > 0
    assert isinstance(per_position, Vector) and sum(per_position.values) == accepted.value
    assert isinstance(found["num_requests_running"], Gauge) and found["num_requests_running"].value == 0
    first = found["time_to_first_token_seconds"]
    assert isinstance(first, Histogram) and first.count == first.buckets["+Inf"] == 1
    assert found["generation_tokens"].value == 20 and first.labels == {"model_name": str(tmp_path)}


def test_defaults_of_the_model_apply_to_requests_without_params(tmp_path: Path) -> None:
    """Compare with explicit params, with and without drafts; other folders and `vllm` change them."""
    other = tmp_path / "other"
    other.mkdir()
    values = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "max_new_tokens": 9, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps({**values, "eos_token_id": 2}))
    (other / "generation_config.json").write_text(json.dumps({"max_new_tokens": 4}))
    expected = SamplingParams(temperature=0.5, top_k=3, top_p=0.9, max_tokens=9)

    def run(params: SamplingParams | None, spec: Any = None, **options: Any) -> tuple[SamplingParams, Any]:
        with make_llm(tmp_path, spec, seed=7, **options) as llm:
            output = llm.generate(PROMPT, params)[0].outputs[0]
            return llm.get_default_sampling_params(), output_fields(output)

    assert run(None) == run(None, NGRAM) == run(expected) and run(None)[0] == expected
    assert run(None, generation_config="vllm") == run(SamplingParams(), generation_config="vllm") != run(None)
    assert run(None, generation_config=str(other))[0] == SamplingParams(max_tokens=4)


def test_wrong_generation_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="does not exist"):
        make_llm(tmp_path, None, generation_config=str(tmp_path))
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": -1}))
    with pytest.raises(LoadError, match="generation_config='vllm'"):
        make_llm(tmp_path, None)
    assert isinstance(make_llm(tmp_path, None, generation_config="vllm"), LLM)
