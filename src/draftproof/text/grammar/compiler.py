"""Compilation of structured outputs to grammars that compute token masks.

The compiler is xgrammar; it gets the vocabulary as bytes. The bytes of special tokens there are no text, so
that a grammar allows such a token only where a structural tag has its id. Where the grammar is complete,
end-of-text is allowed.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

from draftproof.errors import RequestError
from draftproof.sampling_params import SamplingParams
from draftproof.structured_outputs import PARAM, StructuredOutputs, schemas_of_tag, tokens_of_tag
from draftproof.text.grammar.compiled_grammar import TextGrammar
from draftproof.text.grammar.json_schema_check import not_enforced
from draftproof.text.grammar.process import GrammarProcess
from draftproof.text.grammar.reasoning import ReasoningEnd
from draftproof.text.grammar.regex_dialect import to_compiler_dialect
from draftproof.text.grammar.string_patterns import rewrite_strings
from draftproof.text.grammar.surrogates import SurrogateTokens
from draftproof.text.reasoning.budget import ThinkingBudget
from draftproof.text.reasoning.section import Reasoning, ReasoningSection, end_marker_ids
from draftproof.text.tokenizer import Tokenizer
from draftproof.types import Grammar

COMPILE_SECONDS = 10.0  # time limit of one grammar
MAX_COMPILED_CHARS = 32 << 20  # of a compiled grammar, serialized
MAX_CACHED_GRAMMARS = 256
NO_MARKERS = (
    "thinking_token_budget: the reasoning markers of this model are not known; choose them with the option "
    "reasoning_parser"
)
MAX_CACHED_BYTES = 256 << 20  # of all cached grammars together


class GrammarCompiler:
    """Compiler with a cache: equal structured outputs are compiled once while they are cached."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        stops: Sequence[int],
        reasoning: Reasoning | None = None,
    ) -> None:
        self._tokenizer, self._reasoning = tokenizer, reasoning
        self._vocab_size = vocab_size
        self._stops = list(stops)
        self._lock = threading.Lock()
        self._cache: OrderedDict[tuple[object, ...], _CachedGrammar] = OrderedDict()
        self._process: GrammarProcess | None = None
        self._info: Any = None
        self._surrogates: SurrogateTokens | None = None
        self._ends: dict[str | int, ReasoningEnd] = {}
        self.seconds = COMPILE_SECONDS

    def compile(self, params: SamplingParams, prompt: Sequence[int] = ()) -> Grammar | None:
        """Return the grammar of a request, None without one; RequestError if it cannot be compiled.

        After a prompt that ends inside the reasoning, structured outputs begin behind it.
        """
        if not params.needs_grammar:
            return None
        outputs, reasoning = params.structure, self._reasoning
        is_open = reasoning is not None and reasoning.is_open(prompt)
        if outputs is None:
            return self._budget(params, is_open, None, None)
        if outputs.reasoning_end is None and reasoning is not None and is_open:
            outputs = replace(outputs, reasoning_end=reasoning.form.ends[0])
        answer = self._answer(outputs)
        if params.thinking_token_budget is None or outputs.reasoning_end is None:
            return answer  # without a free section there is no reasoning
        return self._budget(params, True, outputs.reasoning_end, answer)

    def _budget(
        self, params: SamplingParams, is_open: bool, end: str | int | None, answer: Grammar | None
    ) -> ThinkingBudget:
        """Return the grammar of a thinking budget. `end`: of the free section of `answer`."""
        assert params.thinking_token_budget is not None
        if end is not None:
            tokenizer = self._need_tokenizer()
            section = ReasoningSection(tokenizer, (), (end,))
            end_ids = end_marker_ids(end, tokenizer, self._vocab_size)
        elif self._reasoning is not None:
            section, end_ids = self._reasoning.section, self._reasoning.end_ids()
        else:
            raise RequestError(NO_MARKERS, "thinking_token_budget")
        return ThinkingBudget(section, is_open, params.thinking_token_budget, end_ids, answer)

    def _answer(self, outputs: StructuredOutputs) -> Grammar:
        """Return the compiled grammar of structured outputs, from the cache if it is there."""
        cached = self._compiled(outputs)
        with self._lock:
            if outputs.reasoning_end not in cached.by_reasoning_end:
                if len(cached.by_reasoning_end) >= MAX_CACHED_GRAMMARS:
                    cached.by_reasoning_end.clear()
                end = self._reasoning_end(outputs.reasoning_end)
                assert self._surrogates is not None  # set with the first compiled grammar
                made = TextGrammar(
                    cached.compiled,
                    self._vocab_size,
                    self._stops,
                    end,
                    self._forbidden(outputs),
                    self._surrogates,
                )
                cached.by_reasoning_end[outputs.reasoning_end] = made
            return cached.by_reasoning_end[outputs.reasoning_end]

    # --- compiling ----------------------------------------------------------------------------------

    def _compiled(self, outputs: StructuredOutputs) -> _CachedGrammar:
        job = _job(outputs)
        key = (job[0], job[1], *job[2].items())
        with self._lock:
            found = self._cache.get(key)
            if found is not None:
                self._cache.move_to_end(key)
        if found is not None:
            return found
        process = self._set_up()
        import xgrammar

        text = process.compile(job, self.seconds)
        if len(text) > MAX_COMPILED_CHARS:
            raise RequestError(
                "structured_outputs: the compiled grammar is too large: make it smaller", PARAM
            )
        cached = _CachedGrammar(xgrammar.CompiledGrammar.deserialize_json(text, self._info))
        with self._lock:
            self._cache[key] = cached
            size = sum(each.size for each in self._cache.values())
            while len(self._cache) > 1 and (
                len(self._cache) > MAX_CACHED_GRAMMARS or size > MAX_CACHED_BYTES
            ):
                size -= self._cache.popitem(last=False)[1].size
        return cached

    def _set_up(self) -> GrammarProcess:
        """Start the compiler process and load the vocabulary in both processes."""
        with self._lock:
            if self._process is not None:
                return self._process
            vocabulary = self._vocabulary()
            if find_spec("xgrammar") is None:
                raise RequestError("structured_outputs needs xgrammar: pip install xgrammar", PARAM)
            process = GrammarProcess(vocabulary, self._stops)
            process.start()  # loads while this process does
            try:
                import xgrammar
            except ImportError as error:  # a dependency of xgrammar is missing
                process.close()
                raise RequestError(f"structured_outputs needs xgrammar, and {error}", PARAM) from error
            self._info = xgrammar.TokenizerInfo(
                vocabulary, xgrammar.VocabType.RAW, vocab_size=self._vocab_size, stop_token_ids=self._stops
            )
            self._surrogates = SurrogateTokens(vocabulary)
            self._process = process
            return process

    def _vocabulary(self) -> list[bytes]:
        tokenizer = self._need_tokenizer()
        if not self._stops:
            raise RequestError(
                "structured_outputs needs an end-of-text token to end with, and this model names none", PARAM
            )
        special = {i: b"\xff%d" % i for i in tokenizer.special_ids}  # no valid UTF-8 begins like this
        special.update(dict.fromkeys(self._stops, b""))
        return [special[i] if i in special else tokenizer.token_bytes(i) for i in range(self._vocab_size)]

    def _forbidden(self, outputs: StructuredOutputs) -> frozenset[int]:
        """Return the special tokens that free text would match, without those that the tag has."""
        if outputs.kind not in ("structural_tag", "grammar"):
            return frozenset()
        named = tokens_of_tag(str(outputs.structural_tag)) if outputs.structural_tag else ()
        special = self._need_tokenizer().special_ids.difference(self._stops, named)
        return special.intersection(range(self._vocab_size))

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
            if len(self._ends) >= MAX_CACHED_GRAMMARS:
                self._ends.clear()
            tokenizer = self._need_tokenizer()
            token_bytes = [tokenizer.token_bytes(i) for i in range(self._vocab_size)]
            self._ends[end] = ReasoningEnd(end, token_bytes)
        return self._ends[end]

    def close(self) -> None:
        """End the compiler process."""
        if self._process is not None:
            self._process.close()


@dataclass(frozen=True, slots=True)
class _CachedGrammar:
    compiled: Any
    by_reasoning_end: dict[str | int | None, TextGrammar] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return int(self.compiled.memory_size_bytes)


def _job(outputs: StructuredOutputs) -> tuple[str, str, dict[str, Any]]:
    """Return the job for the compiler process; refuse keywords that it would silently ignore."""
    kind = outputs.kind
    source: Any = getattr(outputs, kind)
    if kind in ("json", "json_object"):
        if kind == "json" and (problem := not_enforced(json.loads(source))):
            raise RequestError(f"structured_outputs: json cannot be used: {problem}", PARAM)
        any_whitespace = not outputs.disable_any_whitespace
        whitespace = {"any_whitespace": any_whitespace, "max_whitespace_cnt": outputs.max_whitespace}
        return kind, rewrite_strings(source) if kind == "json" else "", whitespace
    if kind == "structural_tag":
        for schema in schemas_of_tag(source):
            if problem := not_enforced(schema):
                raise RequestError(f"structured_outputs: structural_tag cannot be used: {problem}", PARAM)
        return kind, rewrite_strings(source, is_tag=True), {}
    if kind == "choice":
        return "grammar", "root ::= " + " | ".join(map(_literal, source)), {}
    return kind, to_compiler_dialect(source) if kind == "regex" else source, {}


def _literal(text: str) -> str:
    """Return a text as a string literal of the grammar language."""
    escaped = re.sub(r'["\\]', r"\\\g<0>", text)
    return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda found: f"\\x{ord(found[0]):02x}", escaped) + '"'
