"""Weight updates, sleep and scores with LLM, AsyncLLM and HTTP: every result carries its version."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import save_file

from draftproof import LLM, AsyncLLM, SamplingParams
from draftproof.errors import ConfigError, EngineDownError, LoadError
from draftproof.models.expected_tensors import dummy_tensors
from draftproof.outputs import RequestOutput, WeightsSpan
from draftproof.serve.settings import ApiKeys, Settings
from serving import NGRAM, make_folder, serving, tiny
from worker_thread import run_remote

LONG = SamplingParams(temperature=0.7, seed=3, max_tokens=40, logprobs=1, ignore_eos=True)
SHORT = replace(LONG, max_tokens=24)
ADMIN = {"Authorization": "Bearer operator"}
PROMPTS: list[Any] = [{"prompt_token_ids": [5 + i, 9, 5 + i, 9, 7]} for i in range(64)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model folder without weights, beside `new` with a complete set of others."""
    made = make_folder(tmp_path_factory.mktemp("model"))
    llm = tiny(made)
    config, dtype = llm.engine.model_config, llm.engine.dtype
    llm.close()
    (made / "new").mkdir()
    tensors = dummy_tensors(config, dtype, seed=77)
    save_file({name: tensor * 8 if tensor.dim() > 1 else tensor for name, tensor in tensors.items()},
              made / "new" / "model.safetensors")  # fmt: skip
    return made


def fresh(folder: Path, speculative: Any = None) -> LLM:
    """Return a new LLM that was loaded with the new weights."""
    whole = folder / "whole"
    if not whole.exists():
        whole.mkdir()
        for path in folder.glob("*.json"):
            (whole / path.name).write_bytes(path.read_bytes())
        (whole / "model.safetensors").write_bytes((folder / "new" / "model.safetensors").read_bytes())
    return tiny(whole, speculative, load_format="auto")


def gauges_of(page: str) -> dict[str, float]:
    """Return the metrics of a page by name, read by the parser of Prometheus."""
    return {s.name: s.value for family in text_string_to_metric_families(page) for s in family.samples}


def facts(output: RequestOutput) -> Any:
    """Return the tokens and logprobs of an output."""
    return [(one.token_ids, one.text, list(one.logprobs or [])) for one in output.outputs]


def test_llm_updates_between_and_during_requests(folder: Path) -> None:
    """Spans name the version of every token; outputs after the update equal those of a fresh LLM."""
    with tiny(folder, NGRAM) as llm, fresh(folder) as want:
        before = llm.generate(PROMPTS[:2], LONG)
        assert [o.weights_version for o in before] == [0, 0]
        stream = llm.stream(PROMPTS[0], LONG)
        first = [next(stream) for _ in range(7)]
        assert llm.update_weights(str(folder / "new"), version=5) == 5
        rest = list(stream)
        versions = [event.weights_version for event in (*first, *rest)]
        cut = versions.index(5)
        assert versions == [0] * cut + [5] * (LONG.max_tokens - cut) and 7 <= cut < LONG.max_tokens
        tokens = [event.token_id for event in (*first, *rest)]
        assert tokens[:cut] == before[0].outputs[0].token_ids[:cut]
        assert tokens != before[0].outputs[0].token_ids
        after = llm.generate(PROMPTS[:2], LONG)
        assert list(map(facts, after)) == list(map(facts, want.generate(PROMPTS[:2], LONG)))
        assert after[0].outputs[0].weights_versions == [WeightsSpan(5, 0)]
        with pytest.raises(LoadError, match="no such folder"):
            llm.update_weights(str(folder / "none"))
        with pytest.raises(ConfigError, match="mode must be"):
            llm.update_weights(str(folder / "new"), mode="abort")


@pytest.mark.parametrize("speculative", [None, NGRAM], ids=["plain", "ngram"])
def test_scores_are_what_generation_reported(folder: Path, speculative: Any) -> None:
    """Score generated answers in one batch and one by one: each logprob has the bits of generation."""
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=20, logprobs=0, ignore_eos=True)
    with tiny(folder, speculative) as llm, tiny(folder, None if speculative else NGRAM) as other:
        answers = llm.generate(PROMPTS[:24], params)
        whole = [[*a.prompt_token_ids, *a.outputs[0].token_ids] for a in answers]
        reported = [
            [row[token].logprob for token, row in zip(o.token_ids, o.logprobs or [], strict=True)]
            for o in (a.outputs[0] for a in answers)
        ]
        sequences: list[Any] = [{"prompt_token_ids": ids} for ids in whole]
        for engine, several in ((llm, sequences), (other, sequences), (llm, sequences[:1])):
            scored = engine.score(several)
            starts = [len(a.prompt_token_ids) - 1 for a in answers]
            assert [s.token_logprobs[at:] for s, at in zip(scored, starts, strict=False)] == reported[
                : len(several)
            ]
            assert scored[0].token_ids == whole[0][1:] and scored[0].weights_version == 0
        after = llm.score([{"prompt_token_ids": a.prompt_token_ids} for a in answers[:2]],
                          [{"prompt_token_ids": a.outputs[0].token_ids} for a in answers[:2]])  # fmt: skip
        assert [s.token_logprobs for s in after] == reported[:2]


def test_async_update_under_load(folder: Path) -> None:
    """Swap in the middle of 64 streams: every token has its version, and later requests the new bits."""

    async def body(llm: AsyncLLM) -> tuple[list[Any], list[RequestOutput]]:
        async def read(i: int) -> Any:
            events = [event async for event in llm.stream(PROMPTS[i], SHORT)]
            return [(event.token_id, event.weights_version) for event in events]

        reads = [asyncio.create_task(read(i)) for i in range(64)]
        wholes = [asyncio.create_task(llm.generate(PROMPTS[i], SHORT)) for i in range(4)]
        while llm.engine_stats().timings.decode_steps.count < 8:
            await asyncio.sleep(0.005)
        assert await llm.update_weights(str(folder / "new")) == 1 == llm.weights_version
        streamed = await asyncio.gather(*reads)
        outputs = await asyncio.gather(*wholes)
        for output in outputs:
            spans = output.outputs[0].weights_versions
            assert [span.version for span in spans] in ([0], [1], [0, 1]), spans
        return streamed, [await llm.generate(PROMPTS[i], SHORT) for i in range(2)]

    async def run() -> Any:
        async with AsyncLLM.from_llm(llm) as served:
            return await body(served)

    with tiny(folder, NGRAM) as llm, tiny(folder) as old, fresh(folder) as want:
        streamed, later = asyncio.run(run())
        before = [o.outputs[0].token_ids for o in old.generate(PROMPTS, SHORT)]
        after = [o.outputs[0].token_ids for o in want.generate(PROMPTS, SHORT)]
        assert list(map(facts, later)) == list(map(facts, want.generate(PROMPTS[:2], SHORT)))
        counts = {0: 0, 1: 0, 2: 0}
        for i, events in enumerate(streamed):
            cut = sum(version == 0 for _, version in events)
            assert [version for _, version in events] == [0] * cut + [1] * (24 - cut)
            tokens = [token for token, _ in events]
            assert tokens[:cut] == before[i][:cut]
            if cut == 0:  # it had not begun
                assert tokens == after[i]
            counts[0 if cut == 24 else 1 if cut == 0 else 2] += 1
        assert counts[1] and counts[2], counts


def test_http_operator_routes(folder: Path) -> None:
    """Update, sleep and wake up over HTTP with the admin key; versions are in every response."""
    settings = Settings(admin_keys=ApiKeys(["operator"]), vllm_metrics=True)
    body = {"prompt": [5, 9, 5], "max_tokens": 6, "seed": 4, "ignore_eos": True, "logprobs": 2}
    update = {"model_path": str(folder / "new"), "version": 12}
    with serving(tiny(folder, NGRAM, enable_sleep_mode=True), settings) as served:
        old = served.post("/v1/completions", body).json()
        assert old["metrics"]["weights_version"] == 0
        assert served.post("/update_weights_from_disk", update).status_code == 401
        bad = served.post("/update_weights_from_disk", {"model_path": "/nowhere"}, headers=ADMIN)
        assert bad.status_code == 400 and "no such folder" in bad.json()["error"]["message"]
        done = served.post("/update_weights_from_disk", update, headers=ADMIN).json()
        assert done == {"success": True, "message": "weights are updated", "weights_version": 12}
        new = served.post("/v1/completions", body).json()
        assert new["metrics"]["weights_version"] == 12 and new["system_fingerprint"].endswith("-w12")
        assert new["metrics"]["weights_versions"] == [[{"version": 12, "first_token": 0}]]
        chunks = served.post(
            "/v1/completions", {**body, "stream": True, "stream_options": {"include_usage": True}}
        )
        last = [json.loads(line[6:]) for line in chunks.text.splitlines() if line.startswith("data: {")][-1]
        assert last["metrics"]["weights_version"] == 12
        assert served.http.get("/version").json()["weights_version"] == 12
        scored = served.post("/v1/score", {"text_1": [5, 9], "text_2": [7]}).json()
        assert scored["usage"]["weights_version"] == 12
        assert served.post("/sleep?level=1", None, headers=ADMIN).json()["is_sleeping"] is True
        assert served.http.get("/is_sleeping", headers=ADMIN).json()["is_sleeping"] is True
        assert served.post("/v1/completions", body).status_code == 503
        assert served.post("/wake_up", None, headers=ADMIN).json()["is_sleeping"] is False
        assert served.post("/v1/completions", body).json()["choices"] == new["choices"]
        gauges = gauges_of(served.http.get("/metrics").text)
        assert gauges["draftproof:weights_version"] == 12 and gauges["draftproof:sleep_level"] == 0
        names = "num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "gpu_cache_usage_perc"
        assert [gauges[f"vllm:{name}"] for name in names] == [0, 0, 0, 0]
        assert gauges["vllm:cache_config_info"] == 1
    with serving(tiny(folder)) as served:
        closed = served.post("/sleep", None, headers=ADMIN)
        assert closed.status_code == 403 and "DRAFTPROOF_ADMIN_KEY" in closed.json()["error"]["message"]


def test_remote_engine_is_updated(folder: Path, tmp_path: Path) -> None:
    """The worker process updates, sleeps and wakes up, and HTTP processes see the version."""
    llm = tiny(folder, NGRAM, enable_sleep_mode=True)

    async def body(remote: Any) -> Any:
        running = asyncio.create_task(remote.generate(PROMPTS[0], LONG))
        with pytest.raises(LoadError, match="no such folder"):
            await remote.update_weights("/nowhere")
        with pytest.raises(ConfigError, match="must be a folder"):
            await remote.update_weights([("a", 1)])
        assert await remote.update_weights(str(folder / "new")) == 1
        spans = (await running).outputs[0].weights_versions
        assert spans[-1].version in (0, 1)
        await remote.sleep(1)
        assert await remote.is_sleeping()
        with pytest.raises(EngineDownError, match="sleeps"):
            await remote.generate(PROMPTS[0], LONG)
        await remote.wake_up()
        assert not await remote.is_sleeping()
        return await remote.generate(PROMPTS[1], LONG)

    with fresh(folder) as want:
        got = run_remote(llm, tmp_path, body)
        assert facts(got) == facts(want.generate(PROMPTS[1], LONG)[0])
        assert got.weights_version == 1
