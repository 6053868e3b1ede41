"""Detokenizer: whole characters as soon as they are certain, which join to decode()."""

from __future__ import annotations

import random
from functools import cache

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models

from draftproof.sampling_params import SamplingParams
from draftproof.text.detokenizer import Detokenizer
from draftproof.text.streaming_output import StreamingOutput
from draftproof.text.token_bytes import byte_level_alphabet
from draftproof.text.tokenizer import Tokenizer
from draftproof.types import Request, StepOutput

EOS = 256


@cache
def byte_level() -> Tokenizer:
    """Return a tokenizer whose ids 0..255 are the bytes; then a special token and some longer ones."""
    shown = {byte: character for character, byte in byte_level_alphabet().items()}
    words = [b" the", b"\xbd\xa0\xe5", b"\xf0\x9f", b"ab\xe4"]
    vocab = {shown[byte]: byte for byte in range(256)}
    vocab["<|eos|>"] = EOS
    for word in words:
        vocab["".join(shown[byte] for byte in word)] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|eos|>", special=True, normalized=False)])
    return Tokenizer(backend, special_tokens={"eos_token": "<|eos|>"})


@cache
def fallback() -> Tokenizer:
    """Return a tokenizer of the Llama 2 kind: ids 0..255 are byte tokens, a leading space is dropped."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab["</s>"] = EOS
    for piece in ("▁the", "▁", "▁▁", "a", "é", "你"):
        vocab[piece] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    return Tokenizer(backend, special_tokens={"eos_token": "</s>"})


KINDS = {"byte_level": byte_level, "fallback": fallback}


def random_ids(rng: random.Random, tokenizer: Tokenizer) -> list[int]:
    """Return bytes of characters, invalid bytes, words, special ids and ids that do not exist."""
    ids: list[int] = []
    for _ in range(rng.randrange(12)):
        choice = rng.randrange(6)
        if choice < 3:
            ids += rng.choice(["é", "你好", "👍🏽", "\n", "x y", "\u0301", "\ufffd"]).encode()
        elif choice == 3:
            ids.append(rng.randrange(256))
        elif choice == 4:
            ids.append(rng.randrange(256, tokenizer.vocab_size))
        else:
            ids.append(rng.choice([EOS, 32, 10**6, 0xE4, 0xF0]))
    return ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
def test_pieces_join_to_decode(kind: str, skip: bool) -> None:
    tokenizer = KINDS[kind]()
    rng = random.Random(7)
    for _ in range(3000):
        ids = random_ids(rng, tokenizer)
        stream = Detokenizer(tokenizer, skip)
        pieces, at = [], 0
        while at < len(ids):  # in steps of any size, as speculation commits them
            step = rng.randrange(1, 5)
            pieces += stream.push(ids[at : at + step])
            at += step
        assert len(pieces) == len(ids) == len(stream.offsets)
        single = Detokenizer(tokenizer, skip)
        assert [single.push([i])[0] for i in ids] == pieces
        text = "".join(pieces) + stream.finish()
        assert text == tokenizer.decode(ids, skip)
        assert stream.length == len(text)
        assert stream.offsets == sorted(stream.offsets)
        assert all(0 <= offset <= len(text) for offset in stream.offsets)


def test_character_is_returned_with_the_token_that_completes_it() -> None:
    stream = Detokenizer(byte_level())
    assert stream.push("a👍b".encode()) == ["a", "", "", "", "👍", "b"]
    assert stream.offsets == [0, 1, 1, 1, 1, 2]
    assert stream.push([0xE4, 0xBD]) == ["", ""]
    assert stream.finish() == "\ufffd"  # never completed
    fresh = Detokenizer(fallback())
    assert fresh.push(b"\n") == ["\n"]  # a byte token that is a character is not held


def test_invalid_bytes_are_returned_as_soon_as_they_are_certain() -> None:
    stream = Detokenizer(byte_level())
    assert stream.push([0xE4, ord("a")]) == ["", "\ufffda"]
    assert stream.offsets == [0, 1]  # the second token's text begins after the broken one
    assert stream.push([0xE0, 0x80, 0xFF]) == ["", "\ufffd\ufffd", "\ufffd"]
    assert stream.offsets == [0, 1, 2, 3, 4]
    assert stream.push([0xE4, 0xE4, 0xBD, 0xA0]) == ["", "\ufffd", "", "你"]
    assert stream.offsets[5:] == [5, 6, 6, 6]


def test_skipped_special_token_does_not_end_a_character() -> None:
    first, *rest = "é".encode()
    stream = Detokenizer(byte_level())
    assert stream.push([first, EOS, *rest]) == ["", "", "é"]
    shown = Detokenizer(byte_level(), skip_special_tokens=False)
    assert "".join(shown.push([first, EOS, *rest])) == "\ufffd<|eos|>\ufffd"


def test_leading_space_is_dropped_unless_the_text_continues() -> None:
    tokenizer = fallback()
    the = tokenizer.backend.token_to_id("▁the")
    space = tokenizer.backend.token_to_id("▁")
    stream = Detokenizer(tokenizer)
    assert stream.push([EOS, the, the]) == ["", "the", " the"]
    assert stream.offsets == [0, 0, 3]
    assert Detokenizer(tokenizer).push([space, the]) == ["", " the"]
    assert Detokenizer(tokenizer, continues=True).push([the]) == [" the"]


def test_output_keeps_the_space_after_its_prompt() -> None:
    tokenizer = fallback()
    the = tokenizer.backend.token_to_id("▁the")
    request = Request(id="0", prompt_token_ids=[the], params=SamplingParams(), seed=0)
    builder = StreamingOutput(0, request, tokenizer)
    step = StepOutput("0", [the], None, None, 0, 0, [], None, "length")
    assert builder.feed(step)[0].text == builder.output.text == " the"


def test_each_token_is_looked_up_once() -> None:
    tokenizer = byte_level()
    calls = 0
    plain = tokenizer.token_bytes

    class Counting(Tokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            nonlocal calls
            calls += 1
            return plain(token_id)

    counting = Counting(tokenizer.backend, special_tokens={})
    stream = Detokenizer(counting)
    for _ in range(1000):
        stream.push([97])
    assert calls == 1000
