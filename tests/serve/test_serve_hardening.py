"""Defects found by attacking the server: limits, isolation of keys, hosts, headers."""

from __future__ import annotations

from typing import Any

import pytest

from draftproof.errors import ConfigError
from draftproof.serve.settings import ApiKeys, Settings
from serving import NGRAM, Served, serving, tiny

SUFFIX = {"method": "suffix", "num_speculative_tokens": 4, "adaptive": False}
KEYS = ApiKeys(["alpha", "beta"])


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def usage(running: Served, key: str, **more: Any) -> tuple[int, int]:
    """Return the cached prompt tokens and the drafts of a request of one API key."""
    body = {"prompt": "nine ten and then again " * 8, "max_tokens": 24, "temperature": 0, **more}
    got = running.post("/v1/completions", {**body, "ignore_eos": True}, headers=bearer(key))
    assert got.status_code == 200, got.text
    found = got.json()
    drafts = found["metrics"]["speculative_decoding"]["num_draft_tokens"]
    return found["usage"]["prompt_tokens_details"]["cached_tokens"], drafts


@pytest.mark.parametrize("shared", [False, True])
def test_prefix_cache_is_separate_for_each_key_unless_shared(folder: Any, shared: bool) -> None:
    with serving(tiny(folder, SUFFIX), Settings(api_keys=KEYS, share_prefix_cache=shared)) as running:
        assert usage(running, "alpha")[0] == 0
        assert usage(running, "alpha")[0] > 0
        assert (usage(running, "beta")[0] > 0) is shared
        for salt in ({"cache_salt": "s"}, {"prompt_cache_key": "s"}):
            assert usage(running, "alpha", **salt)[0] == 0
            assert usage(running, "alpha", **salt)[0] > 0
            assert (usage(running, "beta", **salt)[0] > 0) is shared


@pytest.mark.parametrize("shared", [False, True])
def test_pool_of_earlier_outputs_is_separate_for_each_key_unless_shared(folder: Any, shared: bool) -> None:
    settings = Settings(api_keys=KEYS, share_prefix_cache=shared)
    with serving(tiny(folder, SUFFIX), settings) as running:
        body = {"prompt": "seven", "temperature": 1, "seed": 9, "logprobs": 0}
        first = usage(running, "alpha", **body)[1]
        assert (usage(running, "beta", **body)[1] > first) is shared
        assert usage(running, "alpha", **body)[1] > first  # its own output is in the pool


@pytest.mark.parametrize(("limit", "accepted"), [(0, [0]), (5, [-5, 0, 5])])
def test_priority_is_limited_by_the_operator(folder: Any, limit: int, accepted: list[int]) -> None:
    with serving(tiny(folder, NGRAM), Settings(max_priority=limit)) as running:
        for priority in (-(2**31), -limit - 1, -5, 0, 5, limit + 1):
            got = running.post("/v1/completions", {"prompt": "one", "max_tokens": 1, "priority": priority})
            assert got.status_code == (200 if priority in accepted else 400), got.text
            if priority not in accepted:
                error = got.json()["error"]
                assert error["param"] == "priority" and "--max-priority" in error["message"]
    with pytest.raises(ConfigError, match="max_priority"):
        Settings(max_priority=-1)
