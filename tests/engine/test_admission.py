"""Token ids are checked quickly, and as strictly as one by one."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftproof.engine import validation
from draftproof.errors import RequestError

VOCAB = 50


class Three(IntEnum):
    THREE = 3


def one_by_one(name: str, ids: Any, vocab_size: int) -> None:
    """The definition."""
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise RequestError(f"{name} must hold integers, got {token!r}", name)
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{name} holds token id {token}, outside the vocabulary 0..{vocab_size - 1}", name
            )


def said(check: Any, ids: Any) -> str | None:
    try:
        check("prompt", ids, VOCAB)
    except RequestError as error:
        return f"{error} {error.param}"
    return None


odd = st.sampled_from([True, False, 1.0, "3", None, -1, VOCAB, 2**70, -(2**70), np.int64(3), Three.THREE])
lists = st.lists(st.integers(0, VOCAB - 1) | odd, max_size=12)


@given(lists | lists.map(tuple))
def test_the_same_is_refused_for_the_same_reason(ids: Any) -> None:
    assert said(validation._check_ids, ids) == said(one_by_one, ids)


@pytest.mark.parametrize("ids", [[], [0], [VOCAB - 1], (3, 4), [Three.THREE, 4], {5: 1.0}])
def test_right_ones_pass(ids: Any) -> None:
    assert said(validation._check_ids, ids) is None


def test_control_a_check_by_value_alone_would_take_truth_for_a_number() -> None:
    def by_value(name: str, ids: Any, vocab_size: int) -> None:
        if min(ids) < 0 or max(ids) >= vocab_size:
            one_by_one(name, ids, vocab_size)

    assert said(by_value, [3, True]) is None and "integers" in (said(validation._check_ids, [3, True]) or "")
