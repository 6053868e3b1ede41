"""LLM.beam_search against transformers and against a search over all outputs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from test_transformers import make, tokens_of

from draftproof import LLM, BeamSearchParams, RequestError, SamplingParams
from draftproof.frontend import beam_search
from text_pieces import make_llm

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


def found(llm: Any, prompts: Any, params: BeamSearchParams) -> list[Any]:
    """Return tokens and sums of logprobs of all sequences."""
    outputs = llm.beam_search(prompts, params)
    return [[(s.tokens, s.cum_logprob, s.finish_reason) for s in out.sequences] for out in outputs]


def test_beams_equal_those_of_transformers(tmp_path: Path) -> None:
    """Compare without end tokens: both then search the same beams. Drafts and batches change nothing."""
    model, prompts = make("llama3", tmp_path), [tokens_of(30).tolist(), tokens_of(17).tolist()]
    params = BeamSearchParams(beam_width=3, max_tokens=7, ignore_eos=True, length_penalty=0.0)
    options = {"dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, "max_model_len": 128}
    with LLM(str(tmp_path), **options) as llm:
        ours = found(llm, prompts, params)
        assert ours == [found(llm, one, params)[0] for one in prompts]
    with LLM(str(tmp_path), speculative_config=NGRAM, enable_prefix_caching=False, **options) as llm:
        assert found(llm, prompts, params) == ours
    model.generation_config.eos_token_id = None
    for ids, sequences in zip(prompts, ours, strict=True):
        theirs = model.generate(
            torch.tensor([ids]), num_beams=3, num_return_sequences=3, max_new_tokens=7, do_sample=False,
            length_penalty=0.0, pad_token_id=0, output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
        assert [tokens for tokens, _, _ in sequences] == theirs.sequences.tolist()
        sums = theirs.sequences_scores.tolist()
        assert [one for _, one, _ in sequences] == pytest.approx(sums, rel=1e-4)


def all_outputs(llm: Any, prompt: list[int], length: int, end: int) -> list[tuple[float, list[int]]]:
    """Score every output of up to `length` tokens that ends at its length or with the end token."""
    vocab, bodies = range(32), []
    for size in range(length + 1):
        for body in itertools.product([t for t in vocab if t != end], repeat=size):
            bodies.append([*body] if size == length else [*body, end])
    scores = llm.score([prompt], bodies, use_tqdm=False)
    ranked = []
    for body, one in zip(bodies, scores, strict=True):
        count = len(prompt) + len(body) - (body[-1] == end)
        ranked.append((one.logprob / count, [*prompt, *(t for t in body if t != end)]))
    return sorted(ranked, key=lambda one: -one[0])


def test_wide_beams_find_the_best_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with a search over all outputs of two tokens, shorter ones with the end token included.

    Beams that are ranked by their last token alone must differ.
    """

    def last_only(self: Any, length: int, length_penalty: float) -> float:
        return max(entry.logprob for entry in self.logprobs[-1].values())

    with make_llm(tmp_path, None, max_logprobs=-1) as llm:
        prompt = [10, 11, 12]
        expected = all_outputs(llm, prompt, 2, end=2)
        llm.tokenizer = None
        params = BeamSearchParams(beam_width=32, max_tokens=2)
        sequences = llm.beam_search([prompt], params)[0].sequences
        assert [s.tokens for s in sequences] == [tokens for _, tokens in expected[:32]]
        kept = llm.beam_search(
            [prompt], BeamSearchParams(beam_width=32, max_tokens=2, include_stop_str_in_output=True)
        )
        ended = [s for s in kept[0].sequences if s.finish_reason == "stop"]
        assert ended and all(s.tokens[-1] == s.stop_reason == 2 for s in ended)
        monkeypatch.setattr(beam_search.BeamSearchSequence, "score", last_only)
        wrong = llm.beam_search([prompt], params)[0].sequences
        assert [s.tokens for s in wrong] != [tokens for _, tokens in expected[:32]]


def test_one_beam_is_the_greedy_output(tmp_path: Path) -> None:
    with make_llm(tmp_path, None) as llm:
        llm.tokenizer = None
        greedy = llm.generate([[10, 11]], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))[0]
        beams = llm.beam_search([[10, 11]], BeamSearchParams(1, 9, ignore_eos=True))
    assert beams[0].sequences[0].tokens == [10, 11, *greedy.outputs[0].token_ids]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_width": 0, "max_tokens": 3}, "beam_width"),
        ({"beam_width": 2, "max_tokens": True}, "max_tokens"),
        ({"beam_width": 2, "max_tokens": 2, "temperature": 0.5}, "temperature"),
        ({"beam_width": 2, "max_tokens": 300}, "together at most"),
        ({"beam_width": 11, "max_tokens": 2}, "max_logprobs"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, options: Any, message: str) -> None:
    with make_llm(tmp_path, None) as llm, pytest.raises(RequestError, match=message):
        llm.beam_search([[10, 11]], BeamSearchParams(**options))
