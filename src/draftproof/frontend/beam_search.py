"""Beam search: the best continuations by the sum of their logprobs. Names and scores are those of vLLM.

A beam is a prompt of the engine, whose next tokens are ranked by raw logprobs. The order of equal scores is
that of their beams, then of their tokens, so the result depends on the model alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from draftproof.errors import RequestError
from draftproof.frontend.continuation_scores import check_finished
from draftproof.outputs import Logprob, RequestOutput
from draftproof.sampling_params import SamplingParams
from draftproof.text.tokenizer import Tokenizer

CANDIDATES_PER_BEAM = 2  # next tokens of a beam, as a multiple of the beam width: each may end its beam


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Options of a beam search, frozen and valid once built."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False  # keep the end token

    def __post_init__(self) -> None:
        """Check every option."""
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise RequestError(f"{name} must be a positive integer, got {value!r}", name)
        if self.temperature != 0:
            text = "beams are ranked by the model's own logprobs, without sampling: leave it at 0"
            raise RequestError(f"temperature={self.temperature!r} is not supported: {text}", "temperature")
        if isinstance(self.length_penalty, bool) or not isinstance(self.length_penalty, (int, float)):
            raise RequestError(
                f"length_penalty must be a number, got {self.length_penalty!r}", "length_penalty"
            )

    def step_params(self, vocab_size: int) -> SamplingParams:
        """Return the options of the requests of one step."""
        top = min(CANDIDATES_PER_BEAM * self.beam_width, vocab_size)
        return SamplingParams(
            temperature=0, max_tokens=1, logprobs=top, ignore_eos=True, detokenize=False, speculative=False
        )


@dataclass(slots=True)
class BeamSearchSequence:
    """One continuation. `tokens` and `text` include the prompt."""

    tokens: list[int]
    logprobs: list[Mapping[int, Logprob]] = field(default_factory=list)  # one entry a step
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None

    def score(self, length: int, length_penalty: float) -> float:
        """Return the sum of logprobs divided by a power of the number of tokens, prompt included."""
        return float(self.cum_logprob / length**length_penalty)


@dataclass(slots=True)
class BeamSearchOutput:
    """The best continuations of a prompt, best first."""

    sequences: list[BeamSearchSequence]


class BeamSearch:
    """Beams of one prompt."""

    def __init__(self, prompt: list[int], params: BeamSearchParams, end_token_ids: Sequence[int]) -> None:
        self._params = params
        self._ends = frozenset() if params.ignore_eos else frozenset(end_token_ids)
        self.beams = [BeamSearchSequence(prompt)]
        self._completed: list[tuple[float, BeamSearchSequence]] = []

    def advance(self, rows: Sequence[Mapping[int, Logprob]]) -> None:
        """Extend the beams by their next tokens: one row of logprobs for each beam."""
        candidates: list[tuple[float, BeamSearchSequence]] = []
        for beam, row in zip(self.beams, rows, strict=True):
            for token, entry in row.items():
                is_end = token in self._ends
                keeps = not is_end or self._params.include_stop_str_in_output
                extended = BeamSearchSequence(
                    tokens=[*beam.tokens, token] if keeps else beam.tokens,
                    logprobs=[*beam.logprobs, row],
                    cum_logprob=beam.cum_logprob + entry.logprob,
                    finish_reason="stop" if is_end else None,
                    stop_reason=token if is_end else None,
                )
                length = len(beam.tokens) + (not is_end)  # an end token does not count
                scored = extended.score(length, self._params.length_penalty), extended
                (self._completed if is_end else candidates).append(scored)
        self.beams = self._best(candidates)

    def output(self, tokenizer: Tokenizer | None) -> BeamSearchOutput:
        """Return the best sequences, completed or not, with their texts if there is a tokenizer."""
        for beam in self.beams:
            beam.finish_reason = "length"
        penalty = self._params.length_penalty
        last = [(beam.score(len(beam.tokens), penalty), beam) for beam in self.beams]
        best = self._best([*self._completed, *last])
        if tokenizer is not None:
            for sequence in best:
                sequence.text = tokenizer.decode(sequence.tokens, skip_special_tokens=False)
        return BeamSearchOutput(best)

    def _best(self, scored: list[tuple[float, BeamSearchSequence]]) -> list[BeamSearchSequence]:
        scored.sort(key=lambda one: one[0], reverse=True)  # equal scores keep their order
        return [sequence for _, sequence in scored[: self._params.beam_width]]


def step_logprobs(result: RequestOutput) -> Mapping[int, Logprob]:
    """Return the best next tokens of a beam, best first."""
    check_finished(result)
    rows = result.outputs[0].logprobs
    assert rows is not None
    return rows[0]
