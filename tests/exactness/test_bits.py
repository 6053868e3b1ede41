"""Compare the tokens and logprobs of a set of tiny engines with those recorded before the code changed.

A record of this machine's kind must agree in every bit. Against a record of another kind of machine the
tokens of fp32 engines must be equal and their logprobs close; bf16 rounds differently from kind to kind.
"""

from __future__ import annotations

import copy
import json
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from exactness import bits_between_commits as bits
from exactness import bits_cases

ROOT = Path(__file__).resolve().parents[2]
GOLDENS = ROOT / "tests" / "goldens"
LOGPROB_TOLERANCE = 1e-3


def read_golden() -> dict[str, Any]:
    """Return the record of this architecture, or else any other."""
    own = GOLDENS / f"bits_tiny_{platform.machine()}.json"
    path = own if own.exists() else sorted(GOLDENS.glob("bits_tiny_*.json"))[0]
    golden: dict[str, Any] = json.loads(path.read_text())
    return golden


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    """Return the recorded cases that the tests run again."""
    found = read_golden()
    found["cases"] = {
        name: case for name, case in found["cases"].items() if name.startswith(bits_cases.QUICK)
    }
    return found


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the same cases as this code generates them."""
    engines = bits_cases.tiny(tmp_path_factory.mktemp("bits"), "cpu")
    found: dict[str, Any] = bits.record((e for e in engines if e.name.startswith(bits_cases.QUICK)), "cpu")
    return found


def same_kind(golden: dict[str, Any], recorded: dict[str, Any]) -> bool:
    """Return whether both records come from one kind of machine and one set of libraries."""
    return bool(golden["environment"] == recorded["environment"])


def fp32(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record without its bf16 engines."""
    return {**record, "cases": {k: v for k, v in record["cases"].items() if "bfloat16" not in k}}


def far_logprobs(golden: dict[str, Any], recorded: dict[str, Any]) -> list[str]:
    """Return the cases whose first logprobs differ by more than the tolerance."""
    return [
        name
        for name, case in golden["cases"].items()
        if recorded["cases"][name]["logprobs"] != pytest.approx(case["logprobs"], abs=LOGPROB_TOLERANCE)
    ]


@pytest.mark.slow
def test_bits_equal_the_record(golden: dict[str, Any], recorded: dict[str, Any]) -> None:
    if not same_kind(golden, recorded):
        pytest.skip(f"recorded on {golden['environment']}")
    assert bits.differences(golden, recorded) == []


@pytest.mark.slow
def test_fp32_tokens_equal_and_logprobs_close_on_any_machine(
    golden: dict[str, Any], recorded: dict[str, Any]
) -> None:
    old, new = (fp32(record) for record in (golden, recorded))
    assert bits.differences(old, new, key="tokens") == []
    assert far_logprobs(old, new) == []


def test_record_covers_every_proposer_strategy_and_option(golden: dict[str, Any]) -> None:
    parts = [name.split("/") for name in golden["cases"]]
    assert {part[1] for part in parts} >= {"none", *bits_cases.PROPOSERS}
    assert {part[2] for part in parts} == {"plain", *bits_cases.STRATEGIES}
    assert {part[3] for part in parts} == {*bits_cases.REQUESTS, *bits_cases.GRAMMARS}


@pytest.mark.control
@pytest.mark.parametrize("part", ["logprob", "token", "missing"])
def test_comparison_finds_a_perturbed_case(golden: dict[str, Any], part: str) -> None:
    """Negative control of the comparison."""
    changed = copy.deepcopy(golden)
    name = next(name for name, case in fp32(golden)["cases"].items() if case["logprobs"])
    case = changed["cases"][name]
    if part == "logprob":
        case["logprobs"][0] += 2 * LOGPROB_TOLERANCE
        assert far_logprobs(golden, changed) == [name]
    elif part == "token":
        case["tokens"][-1] += 1
        assert len(bits.differences(golden, changed, key="tokens")) == 1
    else:
        del changed["cases"][name]
        assert len(bits.differences(golden, changed)) == 1


@pytest.mark.control
def test_hash_changes_with_the_last_digits_of_a_logprob(tmp_path: Path) -> None:
    """Negative control of the hash: the tokens stay the same, the logprobs change in their last digits."""
    case = next(case for case in bits_cases.tiny(tmp_path, "cpu") if case.name == "llama-float32-cpu/ngram")
    options = {"temperature": 1.0, "seed": 6, "logprobs": 2, "logprobs_mode": "processed"}
    requests = [("same", options), ("again", options), ("changed", {**options, "temperature": 1.0 + 1e-6})]
    found, _ = bits.run_engine(replace(case, requests=requests, prompts=case.prompts[:1]))
    same, again, changed = (found[f"{case.name}/{name}/batch"] for name, _ in requests)
    assert same == again
    assert same["tokens"] == changed["tokens"] and same["hash"] != changed["hash"]
