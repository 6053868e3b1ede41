"""Texts on disk: token ids in numbered shards, and batches of them in an order given by the seed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftproof.errors import LoadError

FIELDS = ("length", "prompt_length", "temperature", "seed")  # of a text; temperature in thousandths


@dataclass(frozen=True, slots=True)
class Text:
    """A conversation that the model wrote, or wrote the end of."""

    tokens: NDArray[Any]  # [length] uint16 or int32: the prompt, then the answer
    prompt_length: int
    temperature: float  # of the answer
    seed: int  # of the answer's noise


def write_shard(folder: Path, index: int, texts: Sequence[Text], vocab_size: int) -> None:
    """Both files or none: the second one makes a shard whole."""
    folder.mkdir(parents=True, exist_ok=True)
    kind = np.uint16 if vocab_size <= 1 << 16 else np.int32
    tokens = [np.asarray(text.tokens, kind) for text in texts]
    facts = [
        (len(text.tokens), text.prompt_length, round(1000 * text.temperature), text.seed) for text in texts
    ]
    flat = np.concatenate(tokens) if tokens else np.zeros(0, kind)
    _write(folder / f"{index:05}.tokens.npy", flat)
    _write(folder / f"{index:05}.facts.npy", np.asarray(facts, np.int64).reshape(-1, len(FIELDS)))


def _write(path: Path, array: NDArray[Any]) -> None:
    half = path.with_suffix(".part")
    with half.open("wb") as file:
        np.save(file, array)
    os.replace(half, path)


def shard_tokens(folder: Path) -> list[int]:
    """How many tokens each shard has, up to the first that is missing."""
    sizes: list[int] = []
    while (path := folder / f"{len(sizes):05}.facts.npy").exists():
        sizes.append(int(np.load(path)[:, 0].sum()))
    return sizes


def read_texts(folder: Path, shards: int | None = None) -> list[Text]:
    """All texts of a folder, or those of its first shards."""
    count = len(shard_tokens(folder)) if shards is None else shards
    if not count:
        raise LoadError(f"{folder}: there is no text here: run the phase `generate` first")
    texts = []
    for index in range(count):
        flat = np.load(folder / f"{index:05}.tokens.npy")
        facts = np.load(folder / f"{index:05}.facts.npy")
        ends = np.cumsum(facts[:, 0])
        for (length, prompt_length, temperature, seed), end in zip(
            facts.tolist(), ends.tolist(), strict=True
        ):
            texts.append(Text(flat[end - length : end], prompt_length, temperature / 1000, seed))
    return texts


def frequent_ids(texts: Sequence[Text], vocab_size: int, count: int) -> NDArray[np.int64]:
    """The ids that answers use most, ascending; those never used come last, by id."""
    uses = np.zeros(vocab_size, np.int64)
    for begin in range(0, len(texts), 4096):
        answers = [text.tokens[text.prompt_length :] for text in texts[begin : begin + 4096]]
        uses += np.bincount(np.concatenate(answers), minlength=vocab_size)
    order = np.lexsort((np.arange(vocab_size), -uses))
    return np.sort(order[:count]).astype(np.int64)


def coverage(texts: Sequence[Text], ids: NDArray[np.int64], vocab_size: int) -> float:
    """Share of the tokens of these answers that are among `ids`: no draft can be one of the others."""
    known = np.zeros(vocab_size, np.bool_)
    known[ids] = True
    answers = [text.tokens[text.prompt_length :] for text in texts]
    return float(known[np.concatenate(answers)].mean()) if answers else 1.0


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts of nearly one length, padded at the end with id 0."""

    tokens: NDArray[np.int64]  # [B, T]
    lengths: NDArray[np.int64]  # [B]
    prompt_lengths: NDArray[np.int64]  # [B]
    greedy_rows: NDArray[np.bool_]  # [B]: of temperature 0
    which: list[int]  # [B]: places among all texts, where they have some

    @classmethod
    def of(cls, texts: Sequence[Text], max_len: int, multiple: int = 64, which: Sequence[int] = ()) -> Batch:
        lengths = np.asarray([min(len(text.tokens), max_len) for text in texts], np.int64)
        width = -(-int(lengths.max()) // multiple) * multiple
        tokens = np.zeros((len(texts), width), np.int64)
        for row, (text, length) in enumerate(zip(texts, lengths.tolist(), strict=True)):
            tokens[row, :length] = text.tokens[:length]
        prompts = np.asarray([text.prompt_length for text in texts], np.int64)
        greedy_rows = np.asarray([text.temperature == 0 for text in texts])
        return cls(tokens, lengths, prompts, greedy_rows, list(which))

    def padded_to(self, rows: int) -> Batch:
        """With empty texts, so that there are as many as that."""
        more = max(0, rows - len(self.lengths))
        if not more:
            return self
        none = np.zeros(more, np.int64)
        return Batch(
            np.concatenate([self.tokens, np.zeros((more, self.tokens.shape[1]), np.int64)]),
            np.concatenate([self.lengths, none]),
            np.concatenate([self.prompt_lengths, none]),
            np.concatenate([self.greedy_rows, none != 0]),
            self.which + [0] * (more if self.which else 0),
        )


def usable(texts: Sequence[Text], max_len: int) -> list[Text]:
    """A text whose answer is cut off by max_len altogether teaches nothing, and says nothing of a head."""
    return [t for t in texts if len(t.tokens) >= 3 and t.prompt_length < min(len(t.tokens), max_len)]


class Batches:
    """Which texts are in which step: a function of seed and step alone, so a resumed run goes on exactly."""

    def __init__(self, texts: Sequence[Text], batch_tokens: int, max_len: int, seed: int) -> None:
        self.texts = usable(texts, max_len)
        self.batch_tokens = batch_tokens
        self.max_len = max_len
        self.seed = seed
        if not self.texts:
            raise LoadError("there is no text to train on: all of it is too long, or empty")
        self.lengths = np.asarray([min(len(t.tokens), max_len) for t in self.texts], np.int64)
        self.begins = np.concatenate([[0], np.cumsum(self.lengths)])  # of each text, one after the other

    def epoch(self, number: int) -> list[list[int]]:
        """Indices of the texts of each batch: shuffled, then neighbours of one length put together."""
        rng = np.random.default_rng([self.seed, number])
        order = rng.permutation(len(self.texts))
        lengths = self.lengths
        # sorted within stretches of some 32 batches: little padding, and no batch is the same in two epochs
        stretch = max(1, int(32 * self.batch_tokens / max(1.0, float(lengths.mean()))))
        groups: list[list[int]] = []
        for begin in range(0, len(order), stretch):
            some = order[begin : begin + stretch]
            groups += self._group(some[np.argsort(lengths[some], kind="stable")].tolist(), lengths)
        return [groups[i] for i in rng.permutation(len(groups))]

    def _group(self, ordered: list[int], lengths: NDArray[np.int64]) -> list[list[int]]:
        groups: list[list[int]] = []
        current: list[int] = []
        for index in ordered:
            width = -(-int(lengths[index]) // 64) * 64  # the longest so far: they ascend
            if current and width * (len(current) + 1) > self.batch_tokens:
                groups.append(current)
                current = []
            current.append(index)
        return [*groups, current] if current else groups

    @cached_property
    def digest(self) -> str:
        """Of all that is learnt from."""
        known = hashlib.sha256()
        for text in self.texts:
            known.update(f"{text.prompt_length} {text.temperature} {text.seed}".encode())
            known.update(np.asarray(text.tokens, np.int32).tobytes())
        return known.hexdigest()[:16]

    def in_order(self) -> Iterator[Batch]:
        """Every text once, the shortest first."""
        for group in self._group(np.argsort(self.lengths, kind="stable").tolist(), self.lengths):
            yield self._batch(group)

    def _batch(self, group: list[int]) -> Batch:
        return Batch.of([self.texts[i] for i in group], self.max_len, which=group)

    def from_step(self, step: int) -> Iterator[Batch]:
        """The batches of step `step`, `step + 1`, …, without end."""
        number = 0
        while True:
            groups = self.epoch(number)
            for group in groups[step:]:
                yield self._batch(group)
            step = max(0, step - len(groups))
            number += 1
