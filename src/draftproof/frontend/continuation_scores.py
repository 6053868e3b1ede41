"""Log-likelihoods of continuations, from the prompt logprobs of a request without output."""

from __future__ import annotations

from draftproof.errors import RequestFailedError
from draftproof.outputs import RequestOutput, ScoreOutput


def check_finished(result: RequestOutput) -> None:
    """Raise RequestFailedError unless the prompt of a request without output was computed."""
    output = result.outputs[0]
    if output.finish_reason in ("error", "abort"):
        raise RequestFailedError(output.finish_reason, output.error)


def score_output(num_context: int, result: RequestOutput) -> ScoreOutput:
    """Return the score of the tokens after the first `num_context` of a prompt."""
    check_finished(result)
    ids, rows = result.prompt_token_ids, result.prompt_logprobs
    assert rows is not None
    entries = []
    for token, row in zip(ids[num_context:], list(rows)[num_context:], strict=True):
        assert row is not None  # only the first token of a prompt has none
        entries.append(row[token])
    return ScoreOutput(
        prompt_token_ids=ids[:num_context],
        token_ids=ids[num_context:],
        token_logprobs=[entry.logprob for entry in entries],
        is_greedy=all(entry.rank == 1 for entry in entries),
        weights_version=result.weights_version,
    )
