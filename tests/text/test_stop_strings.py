"""Stop strings: results depend on the tokens alone, and no part of a stop string is shown."""

from __future__ import annotations

import random

import pytest

from draftproof.errors import RequestError
from draftproof.text.stop_strings import StopMatch, StopStrings


def run(
    pieces: list[str], stops: list[str], steps: list[int] | None = None, **options: object
) -> tuple[str, StopMatch | None]:
    """Push the pieces in steps of the given sizes; return the shown text and the match."""
    watch = StopStrings(stops, **options)  # type: ignore[arg-type]
    shown, at = "", 0
    for size in steps or [1] * len(pieces):
        shown += watch.push(pieces[at : at + size])
        at += size
    if watch.match is None:
        shown += watch.finish()
    return shown, watch.match


def reference(
    pieces: list[str], stops: list[str], include: bool, min_tokens: int
) -> tuple[str, StopMatch | None]:
    """Apply the rule by a search over the whole text after each token."""
    text = ""
    for index, piece in enumerate(pieces):
        before, text = len(text), text + piece
        found = [
            (start, -len(stop), stop)
            for stop in stops
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > before
        ]
        if found and index >= min_tokens:
            start, _, stop = min(found)
            end = start + len(stop) if include else start
            return text[:end], StopMatch(stop, end)
    return text, None


@pytest.mark.parametrize("include", [False, True])
def test_random_texts_equal_the_reference(include: bool) -> None:
    rng = random.Random(9)
    stopped = 0
    for _ in range(4000):
        pieces = ["".join(rng.choices("ab\n", k=rng.randrange(4))) for _ in range(rng.randrange(12))]
        stops = ["".join(rng.choices("ab\n", k=rng.randrange(1, 6))) for _ in range(rng.randrange(4))]
        least = rng.choice([0, 0, 1, 3, 20])
        wanted = reference(pieces, stops, include, least)
        steps = []
        while sum(steps) < len(pieces):
            steps.append(rng.randrange(1, 5))
        for sizes in (None, steps, [len(pieces)]):
            found = run(pieces, stops, sizes, include_in_output=include, min_tokens=least)
            assert found == wanted, (pieces, stops, sizes, least)
        stopped += wanted[1] is not None
    assert stopped > 1000


def test_shown_text_is_never_part_of_a_stop_string() -> None:
    rng = random.Random(10)
    for _ in range(2000):
        pieces = ["".join(rng.choices("ab", k=rng.randrange(3))) for _ in range(10)]
        stops = ["".join(rng.choices("ab", k=rng.randrange(1, 5))) for _ in range(2)]
        final, match = reference(pieces, stops, False, 0)
        watch = StopStrings(stops)
        shown, text = "", ""
        for piece in pieces:
            shown += watch.push([piece])
            text += piece
            assert final.startswith(shown)
            if watch.match is None:  # and no more is held back than could still become a stop
                held = text[len(shown) :]
                assert not held or any(s.startswith(held) and s != held for s in stops)
        assert (watch.match is None) == (match is None)


def test_stop_string_across_tokens_ends_the_text() -> None:
    found = run(["Hello", " wor", "ld", "!\n", "\nmore", "!"], ["\n\n"])
    assert found == ("Hello world!", StopMatch("\n\n", 12))


def test_included_stop_string_is_shown_and_nothing_is_held() -> None:
    assert run(["a", "b\n", "\nc"], ["\n\n"], include_in_output=True) == ("ab\n\n", StopMatch("\n\n", 4))
    watch = StopStrings(["\n\n"], include_in_output=True)
    assert watch.push(["b\n"]) == "b\n"


def test_first_completed_then_first_then_longest_stop_string_counts() -> None:
    assert run(["xabcab"], ["cab", "abc"])[1] == StopMatch("abc", 1)  # begins first
    assert run(["xabc"], ["ab", "abc"])[1] == StopMatch("abc", 1)  # the longer
    assert run(["xab", "c"], ["ab", "abc"])[1] == StopMatch("ab", 1)  # completed first
    assert run(["a", "b"], ["b", "b"])[1] == StopMatch("b", 1)


def test_stop_string_within_min_tokens_does_not_count() -> None:
    pieces = ["a", "STOP", "b", "STO", "P", "c"]
    assert run(pieces, ["STOP"])[0] == "a"
    assert run(pieces, ["STOP"], min_tokens=1)[0] == "a"  # the second token may stop
    assert run(pieces, ["STOP"], min_tokens=2)[0] == "aSTOPb"
    assert run(pieces, ["STOP"], min_tokens=4)[0] == "aSTOPb"  # begun within, completed after
    assert run(pieces, ["STOP"], min_tokens=5)[0] == "aSTOPbSTOPc"


def test_held_text_is_shown_at_the_end() -> None:
    watch = StopStrings(["###"])
    assert watch.push(["a#", "#"]) == "a"
    assert watch.finish() == "##"
    assert watch.match is None


def test_held_bytes_can_complete_a_stop_string() -> None:
    watch = StopStrings(["x\ufffd"])
    assert watch.push(["ax", ""]) == "a"
    assert watch.finish("\ufffd") == ""
    assert watch.match == StopMatch("x\ufffd", 1)


def test_no_stop_strings_hold_nothing_and_an_empty_one_is_refused() -> None:
    assert run(["a", "", "b"], []) == ("ab", None)
    assert StopStrings([]).push(["abc"]) == "abc"
    with pytest.raises(RequestError, match="empty"):
        StopStrings(["a", ""])
