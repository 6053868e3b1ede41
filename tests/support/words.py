"""Reference grammar of finitely many words, by trying every token; and grammars that raise."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from draftproof.types import GrammarState


class Words:
    """Any of some words, then an end token; before it, if `end` is given, any text up to `end`."""

    def __init__(
        self,
        words: Collection[str],
        produced: Sequence[bytes],
        silent: Collection[int],
        eos: int,
        end: str = "",
    ) -> None:
        self.words = {word.encode() for word in words}
        self.produced, self.silent, self.eos, self.end = produced, set(silent), eos, end.encode()
        self.beginnings = {word[:n] for word in self.words for n in range(len(word) + 1)}
        self._allowed_tokens: dict[tuple[int, ...], list[int]] = {}

    def start(self) -> GrammarState:
        return WordsState(self)

    def viable(self, tokens: Sequence[int]) -> bool:
        """Return whether an output may begin like this."""
        text = self._constrained(tokens)
        if text is None:
            return True
        if text[1]:  # ended
            return text[0] in self.words
        return text[0] in self.beginnings

    def allowed_tokens(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens that may follow, by trying each."""
        key = tuple(tokens)
        if key not in self._allowed_tokens:
            self._allowed_tokens[key] = [t for t in range(len(self.produced)) if self.viable([*key, t])]
        return self._allowed_tokens[key]

    def _constrained(self, tokens: Sequence[int]) -> tuple[bytes, bool] | None:
        """Return the constrained text and whether it has ended; None if all of it is unconstrained."""
        rest, free, before = b"", bool(self.end), b""
        for at, token in enumerate(tokens):
            if free:
                before += self.produced[token]
                where = before.find(self.end)
                if where >= 0:
                    rest, free = before[where + len(self.end) :], False
            elif token == self.eos:
                return (rest, True) if all(t == self.eos for t in tokens[at:]) else (b"\0", False)
            elif token in self.silent or not self.produced[token]:
                return b"\0", False
            else:
                rest += self.produced[token]
        return None if free else (rest, False)


class WordsState:
    def __init__(self, grammar: Words) -> None:
        self.grammar = grammar
        self.tokens: list[int] = []

    def fill(self, row: Tensor) -> None:
        allowed = torch.zeros(32 * len(row), dtype=torch.int64)
        allowed[self.grammar.allowed_tokens(self.tokens)] = 1
        words = (allowed.view(-1, 32) << torch.arange(32)).sum(1)
        row.copy_(torch.where(words >= 2**31, words - 2**32, words).to(torch.int32))

    def accept(self, token: int) -> bool:
        if not self.grammar.viable([*self.tokens, token]):
            return False
        self.tokens.append(token)
        return True

    def rollback(self, count: int) -> None:
        if count:
            del self.tokens[-count:]


class Breaking:
    """Grammar whose methods raise where `breaks(name of the method, tokens so far)`."""

    def __init__(self, whole: Words, breaks: Callable[[str, list[int]], bool]) -> None:
        self.whole, self.breaks = whole, breaks

    def start(self) -> GrammarState:
        self.check("start", [])
        return BreakingState(self)

    def check(self, name: str, tokens: list[int]) -> None:
        if self.breaks(name, tokens):
            raise ValueError(f"{name} failed")


class BreakingState(WordsState):
    def __init__(self, broken: Breaking) -> None:
        super().__init__(broken.whole)
        self.broken = broken

    def fill(self, row: Tensor) -> None:
        row.fill_(7)  # incomplete
        self.broken.check("fill", self.tokens)
        super().fill(row)

    def accept(self, token: int) -> bool:
        self.broken.check("accept", [*self.tokens, token])
        return super().accept(token)

    def rollback(self, count: int) -> None:
        self.broken.check("rollback", self.tokens)
        super().rollback(count)
