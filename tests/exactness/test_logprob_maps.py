"""Logprob maps, which are built when read and look like a list of dicts."""

from __future__ import annotations

import copy
import pickle
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from draftproof.outputs import CompletionOutput, DraftColumns, DraftRecord, Logprob, LogprobRow
from draftproof.text.bulk.draft_list import DraftList
from draftproof.text.bulk.logprob_rows import pack_rows
from draftproof.text.logprobs import LogprobMaps, LogprobTable


class Letters:
    def token_text(self, token_id: int) -> str:
        return chr(97 + token_id)


LETTERS: Any = Letters()
TOKENS = np.array([3, 1, 9])
VALUES = np.array([[-0.1, -0.1, -2.5], [-3.25, -0.5, -0.75], [-4.1, -0.2, -0.3]], np.float32)
IDS = np.array([[3, 4], [5, 6], [5, 7]], np.int32)
RANKS = np.array([1, 8, 3])


def f32(value: float) -> float:
    return float(np.float32(value))


PLAIN = [
    {3: Logprob(f32(-0.1), 1, "d"), 4: Logprob(-2.5, 2, "e")},  # the sampled token is the best one: one entry
    {1: Logprob(-3.25, 8, "b"), 5: Logprob(-0.5, 1, "f"), 6: Logprob(-0.75, 2, "g")},
    {9: Logprob(f32(-4.1), 3, "j"), 5: Logprob(f32(-0.2), 1, "f"), 7: Logprob(f32(-0.3), 2, "h")},
]


def table(*columns: Any) -> LogprobTable:
    return LogprobTable([pack_rows(*columns, top=columns[2].shape[1])])


def maps(tokenizer: Any = LETTERS) -> LogprobMaps:
    return LogprobMaps(table(TOKENS, VALUES, IDS, RANKS), tokenizer)


def by_rows(tokenizer: Any = LETTERS) -> LogprobMaps:
    return LogprobMaps(list(table(TOKENS, VALUES, IDS, RANKS)), tokenizer)


both_forms = pytest.mark.parametrize("make", (maps, by_rows))


@both_forms
def test_maps_read_like_a_list(make: Any) -> None:
    got = make()
    assert got == PLAIN and list(got) == PLAIN and len(got) == 3
    assert PLAIN.__eq__(got) is NotImplemented and [got] == [PLAIN]
    assert [list(entries) for entries in got] == [list(entries) for entries in PLAIN]  # in this order
    assert got[0] == PLAIN[0] and got[-1] == PLAIN[-1] and got[np.int64(1)] == PLAIN[1]
    for cut in (slice(1), slice(1, None), slice(None, None, -1), slice(-2, None), slice(5, 9)):
        assert got[cut] == PLAIN[cut] and list(got[cut]) == PLAIN[cut]
    assert got[1:][0] == PLAIN[1] and got[1:][1:] == PLAIN[2:]
    assert list(reversed(got)) == PLAIN[::-1] and PLAIN[1] in got and got.index(PLAIN[2]) == 2
    assert got + [None] == [*PLAIN, None] and [None] + got == [None, *PLAIN]
    assert repr(got) == repr(PLAIN)
    for index in (3, -4):
        with pytest.raises(IndexError):
            got[index]
    with pytest.raises(TypeError):
        hash(got)
    with pytest.raises(TypeError):
        got[0] = {}


@both_forms
def test_entries_have_plain_types(make: Any) -> None:
    for entries in make():
        for token, entry in entries.items():
            assert type(token) is int and type(entry) is Logprob
            assert [type(x) for x in entry] == [float, int, str]


def test_maps_equal_lists_with_equal_entries() -> None:
    assert maps() == maps() == by_rows() == maps() and [maps()] == [PLAIN]
    assert maps() != PLAIN[:2] and maps() != PLAIN[::-1] and maps() != tuple(PLAIN) and maps() != 3
    assert maps() != maps(None) and maps(None)[0][3] == Logprob(f32(-0.1), 1, "")
    assert maps()[:2] != maps() and LogprobMaps([], LETTERS) == []
    ids, values = IDS[:, ::-1], VALUES[:, [0, 2, 1]]
    swapped = LogprobMaps(table(TOKENS[1:], values[1:], ids[1:], RANKS[1:]), LETTERS)
    assert swapped != maps()[1:]  # ranks go by place
    wide = table(TOKENS, np.hstack([VALUES, VALUES[:, :1]]), np.hstack([IDS, TOKENS[:, None]]), RANKS)
    assert LogprobMaps(wide, LETTERS) == maps()  # the sampled token again: one entry


@pytest.mark.parametrize("column", range(4))
def test_control_changed_column_is_detected(column: int) -> None:
    columns = [TOKENS.copy(), VALUES.copy(), IDS.copy(), RANKS.copy()]
    columns[column][-1:] = columns[column][-1:] + 1
    assert LogprobMaps(table(*columns), LETTERS) != maps()


def test_first_prompt_token_has_no_entry() -> None:
    rows = [None, LogprobRow([3], [-1.0], [2])]
    assert LogprobMaps(rows, LETTERS) == [None, {3: Logprob(-1.0, 2, "d")}]


def test_copies_are_plain_lists() -> None:
    for made in (pickle.loads(pickle.dumps(maps())), copy.deepcopy(maps())):
        assert type(made) is list and made == PLAIN
    assert asdict(CompletionOutput(0, 1, logprobs=maps()))["logprobs"] == PLAIN


def test_draft_list_equals_a_list_of_records() -> None:
    columns = DraftColumns(
        entry=np.array([0, 0, 1]),
        token=np.array([3, 4, 5]),
        position=np.array([0, 1, 7]),
        source=np.array([0, 1, 0], np.int8),
        accepted=np.array([True, False, False]),
        draft_logprob=np.array([np.nan, -0.5, -1.5], np.float32),
        target_logprob=np.array([-0.25, -2.0, -3.0], np.float32),
        rank=np.array([0, 2, 1]),
        top_width=np.array([0, 1, 2]),
        top_ids=np.array([[0, 0], [9, 0], [5, 8]]),
        top_logprobs=np.array([[0, 0], [-0.125, 0], [-1.5, -2.5]], np.float32),
    )
    plain = [
        DraftRecord(3, 0, "ngram", True, None, -0.25),
        DraftRecord(4, 1, "eagle3", False, -0.5, -2.0, 2, ((9, -0.125),)),
        DraftRecord(5, 7, "ngram", False, -1.5, -3.0, 1, ((5, -1.5), (8, -2.5))),
    ]

    def drafts() -> DraftList:
        order = np.arange(3)
        return DraftList([(columns, order, 0, 2), (columns, order, 2, 3)], ("ngram", "eagle3"))

    assert drafts() == plain == list(drafts()) and plain == drafts() and drafts() != plain[:2]
    assert len(drafts()) == 3 and drafts()[1:] == plain[1:] and drafts() + plain[:1] == [*plain, plain[0]]
    for copied in (pickle.loads(pickle.dumps(drafts())), copy.deepcopy(drafts())):
        assert type(copied) is list and copied == plain
    assert repr(drafts()) == repr(plain) and DraftList([], ()) == []
