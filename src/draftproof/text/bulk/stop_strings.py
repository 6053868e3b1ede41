"""Stop strings in an answer that nobody reads before it is complete: found with the token that ends it."""

from __future__ import annotations

from draftproof.sampling_params import SamplingParams
from draftproof.text.bulk.detokenizer import Pieces
from draftproof.text.detokenizer import Detokenizer
from draftproof.text.stop_strings import StopMatch, StopStrings


class Watch:
    """One answer's. It agrees with `StopStrings` on every token, and costs a look-up for most."""

    def __init__(self, params: SamplingParams, pieces: Pieces) -> None:
        self._pieces = pieces
        self._speller = Detokenizer(pieces.tokenizer, pieces.skip_special_tokens, continues=True)
        self._holds = False
        self._stops = StopStrings(
            params.stop,
            include_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    @property
    def match(self) -> StopMatch | None:
        return self._stops.match

    def push(self, tokens: list[int], unseen: bool) -> int:
        """How many of these count: all, or up to the one that completed a stop string.

        `unseen`: the last one is not shown.
        """
        for i, token in enumerate(tokens):
            piece = "" if unseen and i == len(tokens) - 1 else self._piece(token)
            if self._stops.look(piece) is not None:
                return i + 1
        return len(tokens)

    def finish(self) -> None:
        """The answer ended otherwise: what is still held may complete a stop string."""
        if self.match is None:
            self._stops.look(self._speller.finish(), new_token=False)

    def _piece(self, token: int) -> str:
        if not self._holds and (text := self._pieces.text_of(token)) is not None:
            return text
        piece = self._speller.push([token])[0]
        self._holds = self._speller.holds
        return piece
