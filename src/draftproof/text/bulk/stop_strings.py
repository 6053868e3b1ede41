"""Stop strings in outputs that are not streamed, found with the token that completes them."""

from __future__ import annotations

from draftproof.sampling_params import SamplingParams
from draftproof.text.bulk.detokenizer import TokenTexts
from draftproof.text.detokenizer import Detokenizer
from draftproof.text.stop_strings import StopMatch, StopStrings


class StopScanner:
    """Stop-string search in one output: one cache lookup for most tokens, results as of `StopStrings`."""

    def __init__(self, params: SamplingParams, token_texts: TokenTexts) -> None:
        self._token_texts = token_texts
        self._detokenizer = Detokenizer(
            token_texts.tokenizer, token_texts.skip_special_tokens, continues=True
        )
        self._has_pending_bytes = False
        self._stops = StopStrings(
            params.stop,
            include_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    @property
    def match(self) -> StopMatch | None:
        """Stop string that was found, if any."""
        return self._stops.match

    def push(self, tokens: list[int], hides_last: bool) -> int:
        """Return how many of the tokens count: all, or up to the one that completes a stop string.

        `hides_last`: the last token adds no text.
        """
        for i, token in enumerate(tokens):
            piece = "" if hides_last and i == len(tokens) - 1 else self._piece(token)
            if self._stops.scan(piece) is not None:
                return i + 1
        return len(tokens)

    def finish(self) -> None:
        """End the output for another reason; pending bytes may still complete a stop string."""
        if self.match is None:
            self._stops.scan(self._detokenizer.finish(), new_token=False)

    def _piece(self, token: int) -> str:
        """Return the text that a token adds."""
        if not self._has_pending_bytes and (text := self._token_texts.token_text(token)) is not None:
            return text
        piece = self._detokenizer.push([token])[0]
        self._has_pending_bytes = self._detokenizer.has_pending_bytes
        return piece
