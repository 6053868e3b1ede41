"""Replay of recorded outputs: counts of a real run, costs, refused proposers, files, the command."""

from __future__ import annotations

import json
import random

import pytest

import tiny
from draftproof.cli.main import main
from draftproof.cli.simulate import _measured
from draftproof.errors import ConfigError, RequestError
from draftproof.llm import LLM
from draftproof.metrics import SpecStats
from draftproof.sampling_params import SamplingParams
from draftproof.simulate.records import RecordedRequest, read_records
from draftproof.simulate.replay import Costs, replay
from draftproof.speculative_config import SpeculativeConfig
from serving import make_folder

LOOP = [5, 6, 7, 8] * 8


def config(method, **options):
    return SpeculativeConfig.parse({"method": method, **options})


def test_ngram_replay_of_a_repeated_text_commits_full_windows():
    found = replay([RecordedRequest([1], LOOP)], config("ngram"), [1, 3])
    assert [out.k for out in found] == [1, 3]
    # 5 6 7 8 5 6 come one by one, then 26 tokens in windows
    assert [out.stats.num_steps for out in found] == [6 + 13, 6 + 7]
    assert all(out.stats.num_emitted_tokens == 32 for out in found)
    assert found[1].stats.acceptance_rate == 1.0 and found[1].sources == {"ngram": 19}
    assert found[1].stats.accepted_per_position == [7, 6, 6]


def run_engine(method, requests, k, **engine):
    """Return the counts of a real engine and the records of its outputs."""
    spec = {"method": method, "num_speculative_tokens": k, "adaptive": False}
    target = tiny.engine(speculative=spec, **engine)
    records = tiny.run(target, requests)
    stats = SpecStats()
    for record in records.values():
        for step in record.steps:
            if step.token_ids:
                stats.record(step.num_draft, step.num_accepted, len(step.token_ids))
    return stats, [RecordedRequest(r.prompt_token_ids, records[r.id].token_ids) for r in requests]


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_replay_counts_equal_those_of_an_engine(method):
    """Run one request at a time, so that the pool learns in the same order."""
    params = SamplingParams(max_tokens=40, temperature=0.4, ignore_eos=True, logit_bias={5: 6.0, 9: 6.0})
    requests = [tiny.request(i, params) for i in range(4)]
    want, records = run_engine(method, requests, 4, max_num_seqs=1)
    assert replay(records, config(method), [4])[0].stats == want and want.num_accepted_tokens > 10
    wrong = [RecordedRequest(r.prompt, [*r.output[:20], 3, *r.output[21:]]) for r in records]
    assert replay(wrong, config(method), [4])[0].stats != want  # the comparison can fail


def test_suffix_pool_drafts_from_finished_requests_of_the_same_salt():
    text = list(range(10, 40))
    twice = [RecordedRequest([1, 2, 3], text, "first"), RecordedRequest([1, 2, 3], text, "second")]
    out = replay(twice, config("suffix"), [6])[0]
    assert out.tasks["first"].acceptance_length == 1.0 and out.tasks["second"].acceptance_length > 4
    salted = [RecordedRequest(r.prompt, r.output, r.task, salt) for r, salt in zip(twice, "ab", strict=True)]
    assert replay(salted, config("suffix"), [6])[0].tasks["second"].acceptance_length == 1.0
    together = replay(twice, config("suffix"), [6], batch=2)[0]
    assert together.stats.acceptance_length == 1.0  # neither had finished when the other started


def test_given_proposer_drafts_the_prediction():
    out = replay([RecordedRequest([1], LOOP, prediction=LOOP)], config("given"), [3])[0]
    assert out.stats.num_steps == 1 + 8 and out.sources == {"given": 23}


def test_costs_are_interpolated_and_give_the_speed_up():
    costs = Costs({1: 0.010, 4: 0.016})
    assert [round(costs.step_seconds(n), 4) for n in (1, 2, 4, 8)] == [0.010, 0.012, 0.016, 0.032]
    out = replay([RecordedRequest([1], LOOP)], config("ngram"), [3], costs=costs)[0]
    assert out.plain_seconds == pytest.approx(0.32)
    # 6 plain steps and the last window has one draft only
    assert out.seconds == pytest.approx(6 * 0.010 + 6 * 0.016 + 0.012)
    assert out.speed_up == pytest.approx(0.32 / out.seconds)
    for wrong in ({}, {0: 1.0}, {1: 0.0}, {1: float("inf")}, {1: float("nan")}):
        with pytest.raises(ConfigError, match="seconds by rows"):
            Costs(wrong)


def test_hybrid_replay_counts_drafts_of_each_proposer():
    members = [{"method": "ngram", "num_speculative_tokens": 2}, {"method": "suffix", "min_match": 6}]
    spec = config("hybrid", proposers=members)
    out = replay([RecordedRequest([1], LOOP)], spec, [4])[0]
    assert set(out.sources) == {"ngram", "suffix"} and out.stats.acceptance_length > 2


def test_hybrid_choice_does_not_depend_on_earlier_requests_of_a_slot():
    rng = random.Random(1)
    prompts = [[rng.randrange(50) for _ in range(40)] for _ in range(12)]
    noise = [[rng.randrange(8) for _ in range(80)] for _ in range(6)]
    outputs = [(prompts[i] * 2) if i % 2 else noise[i // 2] for i in range(12)]
    records = [RecordedRequest(p, o, str(i)) for i, (p, o) in enumerate(zip(prompts, outputs, strict=True))]
    spec = config("hybrid", proposers=[{"method": "ngram"}, {"method": "suffix", "pool_tokens": 0}])
    after, beside = (replay(records, spec, [4], batch)[0].tasks for batch in (1, 12))
    assert after == beside


def test_measured_costs_reach_the_largest_step(tmp_path, monkeypatch):
    given = {}

    class Engine(LLM):
        def __init__(self, model, **options):
            given.update(options)
            super().__init__(model, load_format="dummy", **options)

        def close(self):
            given["closed"] = True
            super().close()

    monkeypatch.setattr("draftproof.llm.LLM", Engine)
    assert max(_measured(str(make_folder(tmp_path)), 40)) == 40
    assert given["max_num_batched_tokens"] == 40 and given["closed"]


def test_proposers_that_need_a_model_are_refused():
    with pytest.raises(ConfigError, match="model of its own"):
        replay([RecordedRequest([1], LOOP)], config("proposers:SelfModel"), [2])
    for method in ("eagle3", "draft_model"):
        members = [{"method": "ngram"}, {"method": method}]
        for spec in (config(method, model="smollm2-135m"), config("hybrid", proposers=members)):
            with pytest.raises(ConfigError, match=f"{method!r} drafts with a model of its own"):
                replay([RecordedRequest([1], LOOP)], spec, [2])
    with pytest.raises(ConfigError, match="prompt_lookup_max"):
        replay([RecordedRequest([1], LOOP)], config("ngram", prompt_lookup_mx=3), [2])


# --- files and the command ----------------------------------------------------------------------------


class Letters:
    def encode(self, text, add_special_tokens=True):
        return [1] * add_special_tokens + [ord(letter) for letter in text]


def test_records_are_read_from_ids_or_texts(tmp_path):
    path = tmp_path / "records.jsonl"
    rows = [
        {"prompt_token_ids": [1, 2], "token_ids": [3], "task": "qa", "cache_salt": "x"},
        {"prompt": "ab", "text": "c\u2028", "prediction": "e"},
    ]
    path.write_text("\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n", "utf-8")
    assert read_records(path, Letters()) == [
        RecordedRequest([1, 2], [3], "qa", "x"),
        RecordedRequest([1, 97, 98], [99, 0x2028], prediction=[101]),
    ]
    for line, reason in (
        ("{", "not JSON"),
        ("[]", "one JSON object per line"),
        ('{"prompt": "a", "text": "b"}', "--tokenizer"),
        ('{"prompt_token_ids": [1]}', "neither token_ids nor text"),
        ('{"prompt_token_ids": [1], "token_ids": []}', "at least one token"),
        ('{"prompt_token_ids": [1, -1], "token_ids": [1]}', "token ids"),
        ('{"prompt_token_ids": [1], "token_ids": [1099511627776]}', "token ids, in 0.."),
        ('{"prompt_token_ids": [1], "token_ids": [1], "task": 3}', "texts"),
        ("", "no request"),
    ):
        path.write_text(line)
        with pytest.raises(RequestError, match=reason):
            read_records(path)
    with pytest.raises(RequestError, match="cannot read"):
        read_records(tmp_path / "nothing")


def test_table_has_every_column_in_a_narrow_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps({"prompt_token_ids": [1], "token_ids": LOOP}))
    assert main(["simulate", str(path), "-k", "8"]) == 0
    shown = capsys.readouterr().out
    assert "acceptance length" in shown and "speed-up" in shown and "…" not in shown
    assert " 8 " in shown


def test_command_prints_and_writes_the_figures(tmp_path, capsys):
    path, out = tmp_path / "records.jsonl", tmp_path / "out.json"
    path.write_text(json.dumps({"prompt_token_ids": [1], "token_ids": LOOP, "task": "loops"}))
    given = ["simulate", str(path), "-k", "1,3", "--costs", '{"1": 0.01, "4": 0.016}']
    assert main([*given, "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "acceptance length" in shown and "loops" in shown and "2.46" in shown
    report = json.loads(out.read_text())
    assert [o["k"] for o in report["outcomes"]] == [1, 3] and report["tokens"] == 32
    assert report["outcomes"][1]["speed_up"] == pytest.approx(0.32 / 0.168, abs=1e-3)
    assert main([*given, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["outcomes"][0]["tasks"] == {"loops": 1.6842}
    for extra in ('"adaptive": true', '"accept_policy": "reject_all"', '"verify_strategy": "topp"'):
        assert main([*given, "--speculative-config", f'{{"method": "ngram", {extra}}}']) == 2
        assert f"{extra.split(':')[0][1:-1]} does not affect" in capsys.readouterr().err
    assert main([*given, "--speculative-config", '{"method": "ngram", "adaptive": false}']) == 0
    unwritable = str(tmp_path / "nowhere" / "out.json")
    wrong = {"--costs": "3", "--batch": "0", "--speculative-config": "[", "--json": unwritable}
    for option, value in (("-k", "0"), ("-k", "x"), *wrong.items()):
        assert main([*given[:2], option, value]) == 2
