"""Token ids are checked at once, as strictly as one by one."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftproof.engine import validation
from draftproof.errors import RequestError

VOCAB = 50


class Three(IntEnum):
    THREE = 3


def check_one_by_one(name: str, ids: Any, vocab_size: int) -> None:
    """Check each id by definition."""
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise RequestError(f"{name} must hold integers, got {token!r}", name)
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{name} holds token id {token}, outside the vocabulary 0..{vocab_size - 1}", name
            )


def error_of(check: Any, ids: Any) -> str | None:
    try:
        check("prompt", ids, VOCAB)
    except RequestError as error:
        return f"{error} {error.param}"
    return None


invalid = st.sampled_from([True, False, 1.0, "3", None, -1, VOCAB, 2**70, -(2**70), np.int64(3), Three.THREE])
lists = st.lists(st.integers(0, VOCAB - 1) | invalid, max_size=12)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(lists | lists.map(tuple))
def test_ids_are_refused_as_by_a_check_one_by_one(ids: Any) -> None:
    assert error_of(validation._check_ids, ids) == error_of(check_one_by_one, ids)


@pytest.mark.parametrize("ids", [[], [0], [VOCAB - 1], (3, 4), [Three.THREE, 4], {5: 1.0}])
def test_valid_ids_pass(ids: Any) -> None:
    assert error_of(validation._check_ids, ids) is None


def test_control_check_by_value_accepts_bool() -> None:
    def by_value(name: str, ids: Any, vocab_size: int) -> None:
        if min(ids) < 0 or max(ids) >= vocab_size:
            check_one_by_one(name, ids, vocab_size)

    assert error_of(by_value, [3, True]) is None and "integers" in (
        error_of(validation._check_ids, [3, True]) or ""
    )
