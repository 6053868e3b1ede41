"""GrammarCompiler for structured output: from a request's wish to what the engine asks for masks.

The compiler is xgrammar; it sees the vocabulary as bytes. Special tokens say nothing to it (they would vanish
from the text), so the grammar never lets one through; where the grammar is complete, end-of-text is allowed.
"""

from __future__ import annotations

import json
import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftproof.errors import RequestError
from draftproof.sampling_params import SamplingParams
from draftproof.structured_outputs import PARAM, StructuredOutputs
from draftproof.text.grammar.json_schema import not_enforced
from draftproof.text.grammar.process import GrammarProcess
from draftproof.text.grammar.reasoning import ReasoningEnd
from draftproof.text.grammar.regex import standard
from draftproof.text.tokenizer import Tokenizer
from draftproof.types import Grammar, GrammarState

COMPILE_SECONDS = 10.0  # for one grammar; what takes longer is refused
LARGEST = 32 << 20  # characters of a compiled grammar, serialised
CACHED, CACHED_BYTES = 256, 256 << 20  # grammars kept, and what they may hold together


class GrammarCompiler:
    """Compiles what requests ask for, each different one once for as long as it is remembered."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, stops: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stops = list(stops)
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[object, ...], _Known] = OrderedDict()
        self._process: GrammarProcess | None = None
        self._info: Any = None
        self._ends: dict[str | int, ReasoningEnd] = {}
        self.seconds = COMPILE_SECONDS

    def compile(self, params: SamplingParams) -> Grammar | None:
        """Return the grammar of a request, None without one; RequestError if it cannot be compiled."""
        wish = params.structure
        if wish is None:
            return None
        known = self._compiled(wish)
        with self._lock:
            if wish.reasoning_end not in known.made:
                if len(known.made) >= CACHED:
                    known.made.clear()
                end = self._reasoning_end(wish.reasoning_end)
                made = TextGrammar(known.compiled, self._vocab_size, self._stops, end)
                known.made[wish.reasoning_end] = made
            return known.made[wish.reasoning_end]

    # --- compiling ----------------------------------------------------------------------------------

    def _compiled(self, wish: StructuredOutputs) -> _Known:
        job = _job(wish)
        key = (job[0], job[1], *job[2].items())
        with self._lock:
            found = self._known.get(key)
            if found is not None:
                self._known.move_to_end(key)
        if found is not None:
            return found
        process = self._set_up()
        import xgrammar

        text = process.compile(job, self.seconds)
        if len(text) > LARGEST:
            raise RequestError(
                "structured_outputs: it compiles to something too large: make it smaller", PARAM
            )
        known = _Known(xgrammar.CompiledGrammar.deserialize_json(text, self._info))
        with self._lock:
            self._known[key] = known
            size = sum(each.size for each in self._known.values())
            while len(self._known) > 1 and (len(self._known) > CACHED or size > CACHED_BYTES):
                size -= self._known.popitem(last=False)[1].size
        return known

    def _set_up(self) -> GrammarProcess:
        """The vocabulary for both sides: the process that compiles and this one, which follows."""
        with self._lock:
            if self._process is not None:
                return self._process
            vocabulary = self._vocabulary()
            if find_spec("xgrammar") is None:
                raise RequestError("structured_outputs needs xgrammar: pip install xgrammar", PARAM)
            process = GrammarProcess(vocabulary, self._stops)
            process.start()  # it loads while this one does
            try:
                import xgrammar
            except ImportError as error:  # of something that it needs itself
                process.close()
                raise RequestError(f"structured_outputs needs xgrammar, and {error}", PARAM) from error
            self._info = xgrammar.TokenizerInfo(
                vocabulary,
                xgrammar.VocabType.RAW,
                vocab_size=self._vocab_size,
                stop_token_ids=self._stops,
            )
            self._process = process
            return process

    def _vocabulary(self) -> list[bytes]:
        tokenizer = self._need_tokenizer()
        if not self._stops:
            raise RequestError(
                "structured_outputs needs an end-of-text token to end with, and this model names none", PARAM
            )
        silent = tokenizer.special_ids | set(self._stops)
        return [b"" if i in silent else tokenizer.token_bytes(i) for i in range(self._vocab_size)]

    def _need_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError(
                "structured_outputs needs a tokenizer and this model has none: pass tokenizer=FOLDER", PARAM
            )
        return self._tokenizer

    def _reasoning_end(self, end: str | int | None) -> ReasoningEnd | None:
        if end is None:
            return None
        if end not in self._ends:
            if len(self._ends) >= CACHED:
                self._ends.clear()
            tokenizer = self._need_tokenizer()
            said = [tokenizer.token_bytes(i) for i in range(self._vocab_size)]
            self._ends[end] = ReasoningEnd(end, said)
        return self._ends[end]

    def close(self) -> None:
        """End the process that compiles."""
        if self._process is not None:
            self._process.close()


@dataclass(frozen=True, slots=True)
class _Known:
    compiled: Any
    made: dict[str | int | None, TextGrammar] = field(default_factory=dict)  # by the end of the free section

    @property
    def size(self) -> int:
        return int(self.compiled.memory_size_bytes)


def _job(wish: StructuredOutputs) -> tuple[str, str, dict[str, Any]]:
    """For the process that compiles; what it would silently ignore is refused here."""
    kind = wish.kind
    whitespace = {
        "any_whitespace": not wish.disable_any_whitespace,
        "max_whitespace_cnt": wish.max_whitespace,
    }
    if kind == "json":
        assert isinstance(wish.json, str)
        complaint = not_enforced(json.loads(wish.json))
        if complaint:
            raise RequestError(f"structured_outputs: json cannot be used: {complaint}", PARAM)
        return kind, wish.json, whitespace
    if kind == "json_object":
        return kind, "", whitespace
    if kind == "choice":
        assert wish.choice is not None
        return "grammar", "root ::= " + " | ".join(map(_literal, wish.choice)), {}
    if kind == "regex":
        assert wish.regex is not None
        return kind, standard(wish.regex), {}
    assert wish.grammar is not None
    return kind, wish.grammar, {}


def _literal(text: str) -> str:
    """A text as a string of the grammar's language."""
    out = []
    for c in text:
        if c in '"\\':
            out.append("\\" + c)
        elif ord(c) < 32 or ord(c) == 127:
            out.append(f"\\x{ord(c):02x}")
        else:
            out.append(c)
    return '"' + "".join(out) + '"'


# --- following ------------------------------------------------------------------------------------------


class TextGrammar:
    """A compiled grammar, perhaps with a free section before it. One for any number of requests."""

    def __init__(
        self, compiled: Any, vocab_size: int, stops: Sequence[int], end: ReasoningEnd | None
    ) -> None:
        self.compiled = compiled
        self.words = math.ceil(vocab_size / 32)
        self.stops = frozenset(stops)
        self.end = end
        self._closed: dict[int, Tensor] = {}

    def start(self) -> GrammarState:
        return TextGrammarState(self)

    def free_mask(self, matched: int, matcher: Any) -> Tensor:
        """[W] of the free section, `matched` bytes into its end: all, but for tokens that would end it and
        go on with what the grammar does not begin with."""
        if matched not in self._closed:
            assert self.end is not None
            mask = torch.full((self.words,), -1, dtype=torch.int32)
            view = mask.numpy().view(np.uint32)
            for token, rest in self.end.overshooting(matched):
                if matcher.accept_string(rest):
                    matcher.rollback(1)
                else:
                    view[token // 32] &= ~np.uint32(1 << token % 32)
            self._closed[matched] = mask
        return self._closed[matched]


class TextGrammarState:
    """Where one request is in its grammar. Every accepted token can be taken back."""

    def __init__(self, grammar: TextGrammar) -> None:
        import xgrammar

        self._grammar = grammar
        self._matcher = xgrammar.GrammarMatcher(grammar.compiled)
        self._row = torch.zeros((1, grammar.words), dtype=torch.int32)
        self._free = grammar.end is not None
        self._matched = 0  # bytes of the free section's end that were said
        # what each token did: was it free, how much of the end was matched before it, steps of the matcher
        self._done: list[tuple[bool, int, int]] = []

    def fill(self, row: Tensor) -> None:
        """row [W] int32: bit t % 32 of word t // 32 says whether token t may follow."""
        if self._free:
            row.copy_(self._grammar.free_mask(self._matched, self._matcher))
        elif self._matcher.is_terminated():
            row.zero_()
            view = row.numpy().view(np.uint32)
            for token in self._grammar.stops:
                view[token // 32] |= np.uint32(1 << token % 32)
        else:
            # into a row of its own: the matcher heeds no strides
            self._matcher.fill_next_token_bitmask(self._row)
            row.copy_(self._row[0])

    def accept(self, token: int) -> bool:
        """Go on by a token; False, and nothing changes, if it may not follow."""
        free, matched, steps = self._free, self._matched, 0
        if free:
            assert self._grammar.end is not None
            self._matched, rest = self._grammar.end.advance(matched, token)
            if rest is not None:
                if rest:
                    if not self._matcher.accept_string(rest):
                        self._matched = matched
                        return False
                    steps = 1
                self._free = False
        elif not self._matcher.is_terminated():
            if not self._matcher.accept_token(token):
                return False
            steps = 1
        elif token not in self._grammar.stops:
            return False
        self._done.append((free, matched, steps))
        return True

    def rollback(self, count: int) -> None:
        """Take back the last tokens."""
        steps = 0
        for _ in range(count):
            self._free, self._matched, more = self._done.pop()
            steps += more
        if steps:
            self._matcher.rollback(steps)
