"""Training texts: numbered shards of token ids on disk, and batches in an order given by the seed."""

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


@dataclass(frozen=True, slots=True)
class Text:
    """Prompt and generated output."""

    tokens: NDArray[Any]  # [length] uint16 or int32: the prompt, then the output
    prompt_length: int
    temperature: float  # of the output
    seed: int  # of the output's noise


def write_shard(folder: Path, index: int, texts: Sequence[Text], vocab_size: int) -> None:
    """Write the two files of a shard; the second one marks it as complete."""
    folder.mkdir(parents=True, exist_ok=True)
    kind = np.uint16 if vocab_size <= 1 << 16 else np.int32
    tokens = [np.asarray(text.tokens, kind) for text in texts]
    # length, prompt_length, temperature in thousandths, seed
    facts = [(len(t.tokens), t.prompt_length, round(1000 * t.temperature), t.seed) for t in texts]
    flat = np.concatenate(tokens) if tokens else np.zeros(0, kind)
    for name, array in (("tokens", flat), ("facts", np.asarray(facts, np.int64).reshape(-1, 4))):
        partial = folder / f"{index:05}.{name}.part"
        with partial.open("wb") as file:
            np.save(file, array)
        os.replace(partial, folder / f"{index:05}.{name}.npy")


def shard_tokens(folder: Path) -> list[int]:
    """Return the number of tokens of each shard, up to the first that is missing."""
    sizes: list[int] = []
    while (path := folder / f"{len(sizes):05}.facts.npy").exists():
        sizes.append(int(np.load(path)[:, 0].sum()))
    return sizes


def read_texts(folder: Path, shards: int | None = None) -> list[Text]:
    """Return all texts of a folder, or those of its first shards."""
    count = len(shard_tokens(folder)) if shards is None else shards
    if not count:
        raise LoadError(f"{folder}: there is no text here: run the phase `generate` first")
    texts = []
    for index in range(count):
        flat = np.load(folder / f"{index:05}.tokens.npy")
        end = 0
        for length, prompt_length, temperature, seed in np.load(folder / f"{index:05}.facts.npy").tolist():
            end += length
            texts.append(Text(flat[end - length : end], prompt_length, temperature / 1000, seed))
    return texts


def frequent_ids(texts: Sequence[Text], vocab_size: int, count: int) -> NDArray[np.int64]:
    """Return the `count` most frequent ids of the outputs, ascending; ids of equal frequency by number."""
    uses = np.zeros(vocab_size, np.int64)
    for begin in range(0, len(texts), 4096):
        outputs = [text.tokens[text.prompt_length :] for text in texts[begin : begin + 4096]]
        uses += np.bincount(np.concatenate(outputs), minlength=vocab_size)
    order = np.lexsort((np.arange(vocab_size), -uses))
    return np.sort(order[:count]).astype(np.int64)


def coverage(texts: Sequence[Text], ids: NDArray[np.int64], vocab_size: int) -> float:
    """Return the share of output tokens that are among `ids`, the only ones that can be drafted."""
    known = np.zeros(vocab_size, np.bool_)
    known[ids] = True
    outputs = [text.tokens[text.prompt_length :] for text in texts]
    return float(known[np.concatenate(outputs)].mean()) if outputs else 1.0


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts of similar length, padded at the end with id 0."""

    tokens: NDArray[np.int64]  # [B, T]
    lengths: NDArray[np.int64]  # [B]
    prompt_lengths: NDArray[np.int64]  # [B]
    greedy_rows: NDArray[np.bool_]  # [B]: of temperature 0
    which: list[int]  # [B]: indices among all texts; []: not known

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
        """Return the batch with empty texts added, up to `rows` texts."""
        added = max(0, rows - len(self.lengths))
        if not added:
            return self
        return Batch(
            np.pad(self.tokens, ((0, added), (0, 0))),
            np.pad(self.lengths, (0, added)),
            np.pad(self.prompt_lengths, (0, added)),
            np.pad(self.greedy_rows, (0, added)),
            self.which + [0] * (added if self.which else 0),
        )


def usable(texts: Sequence[Text], max_len: int) -> list[Text]:
    """Return the texts of which at least one output token lies within max_len."""
    return [t for t in texts if len(t.tokens) >= 3 and t.prompt_length < min(len(t.tokens), max_len)]


class Batches:
    """Assignment of texts to steps, a function of seed and step alone, so that a resumed run is exact."""

    def __init__(self, texts: Sequence[Text], batch_tokens: int, max_len: int, seed: int) -> None:
        self.texts = usable(texts, max_len)
        self.batch_tokens = batch_tokens
        self.max_len = max_len
        self.seed = seed
        if not self.texts:
            raise LoadError("there is no text to train on: all of it is too long, or empty")
        self.lengths = np.asarray([min(len(t.tokens), max_len) for t in self.texts], np.int64)
        self.begins = np.concatenate([[0], np.cumsum(self.lengths)])  # first token of each text

    def epoch(self, number: int) -> list[list[int]]:
        """Return the indices of the texts of each batch: shuffled, then grouped by length."""
        rng = np.random.default_rng([self.seed, number])
        order = rng.permutation(len(self.texts))
        # Sorted within stretches of some 32 batches: little padding, and batches differ between epochs.
        stretch = max(1, int(32 * self.batch_tokens / max(1.0, float(self.lengths.mean()))))
        groups: list[list[int]] = []
        for begin in range(0, len(order), stretch):
            groups += self._group(order[begin : begin + stretch])
        return [groups[i] for i in rng.permutation(len(groups))]

    def _group(self, indices: NDArray[np.int64]) -> list[list[int]]:
        groups: list[list[int]] = []
        current: list[int] = []
        for index in indices[np.argsort(self.lengths[indices], kind="stable")].tolist():
            width = -(-int(self.lengths[index]) // 64) * 64  # of the whole batch, since lengths ascend
            if current and width * (len(current) + 1) > self.batch_tokens:
                groups.append(current)
                current = []
            current.append(index)
        return [*groups, current] if current else groups

    @cached_property
    def digest(self) -> str:
        """Digest of all texts."""
        known = hashlib.sha256()
        for text in self.texts:
            known.update(f"{text.prompt_length} {text.temperature} {text.seed}".encode())
            known.update(np.asarray(text.tokens, np.int32).tobytes())
        return known.hexdigest()[:16]

    def in_order(self) -> Iterator[Batch]:
        """Yield every text once, the shortest first."""
        yield from map(self._batch, self._group(np.arange(len(self.texts))))

    def _batch(self, group: list[int]) -> Batch:
        return Batch.of([self.texts[i] for i in group], self.max_len, which=group)

    def from_step(self, step: int) -> Iterator[Batch]:
        """Yield the batches of step `step`, `step + 1`, …, without end."""
        number = 0
        while True:
            groups = self.epoch(number)
            yield from map(self._batch, groups[step:])
            step = max(0, step - len(groups))
            number += 1
