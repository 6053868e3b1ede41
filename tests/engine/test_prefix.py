"""Prefix cache of an engine: hits, misses, and equal bits of both."""

from __future__ import annotations

import json

import pytest

import tiny
from draftproof import LLM
from draftproof.engine import page_pool
from draftproof.engine.page_pool import digests
from draftproof.sampling_params import SamplingParams
from exact import check_empty, compare
from text_pieces import CONFIG

PAGE = 8


def serve(engine, ids, index=0, tokens=4, **options):
    """Return the record and the cached tokens of one request."""
    params = SamplingParams(**{"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, **options})
    stats = {}
    records = tiny.run(engine, [tiny.request(index, params, prompt_token_ids=ids)], stats=stats)
    check_empty(engine)
    return records[str(index)], stats[str(index)].num_cached_tokens


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 17, 30])
def test_full_pages_but_that_of_the_newest_token_are_found(length):
    engine, ids = tiny.engine(page_size=PAGE), tiny.prompt(0, length)
    first, none = serve(engine, ids)
    again, found = serve(engine, ids)
    assert none == 0 and found == (length - 1) // PAGE * PAGE
    assert again.same() == first.same()


def test_longest_common_prefix_is_found():
    engine, ids = tiny.engine(page_size=PAGE), tiny.prompt(0, 40)
    serve(engine, ids)
    assert serve(engine, [*ids[:20], 90, *ids[21:]])[1] == 16
    assert serve(engine, [90, *ids[1:]])[1] == 0
    assert serve(engine, ids[PAGE:])[1] == 0, "the same pages at another place"


def test_output_is_found_by_the_next_turn():
    """The last token of the output has no KV yet."""
    for overlap in (False, True):
        engine, ids = tiny.engine(page_size=PAGE, overlap=overlap), tiny.prompt(0, 12)
        answer = serve(engine, ids, tokens=21)[0].token_ids
        record, found = serve(engine, [*ids, *answer, 5, 6, 7])
        assert found == 32
        assert record.same() == serve(tiny.engine(), [*ids, *answer, 5, 6, 7])[0].same()


def test_salts_share_no_pages():
    engine, ids = tiny.engine(page_size=PAGE), tiny.prompt(0, 40)
    assert [serve(engine, ids, cache_salt=salt)[1] for salt in (None, "a", "b", "a", None, "c")] == [
        *(0, 0, 0, 32, 32, 0)
    ]


def test_disabled_cache_finds_nothing():
    engine, ids = tiny.engine(page_size=PAGE, enable_prefix_caching=False), tiny.prompt(0, 40)
    assert [serve(engine, ids)[1] for _ in range(3)] == [0, 0, 0]
    stats = engine.stats()
    assert (stats.num_queried_tokens, stats.num_cached_tokens, stats.num_cached_pages) == (0, 0, 0)


def test_least_recently_used_text_is_evicted():
    engine = tiny.engine(page_size=PAGE, kv_cache_tokens=10 * PAGE)
    texts = [tiny.prompt(0, 24), tiny.prompt(1, 24), tiny.prompt(2, 48)]  # 3, 3 and more than 6 pages
    for ids in texts[:2]:
        serve(engine, ids, tokens=2)
    assert serve(engine, texts[0], tokens=2)[1] == 16
    serve(engine, texts[2], tokens=6)
    assert serve(engine, texts[0], tokens=1)[1] == 16, "used recently"
    assert serve(engine, texts[1], tokens=1)[1] < 16


@pytest.mark.parametrize("top", [0, 3, -1])
@pytest.mark.parametrize("overlap", [False, True])
def test_prompt_logprobs_are_exact_with_a_warm_cache(top, overlap):
    """Rows with logprobs are computed, not found."""
    ids = tiny.prompt(0, 40)
    options = {"page_size": PAGE, "max_num_batched_tokens": 16, "max_logprobs": -1, "overlap": overlap}
    cold = serve(tiny.engine(**options), ids, prompt_logprobs=top, logprobs=2)[0]
    engine = tiny.engine(**options)
    serve(engine, ids)
    warm, found = serve(engine, ids, prompt_logprobs=top, logprobs=2)
    assert compare("0", cold, warm) == [] and len(warm.prompt_logprobs) == 39 and found == 0


def test_outputs_report_cached_tokens_and_preemptions(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": tiny.VOCAB}))
    sizes = {"page_size": PAGE, "kv_cache_tokens": 96, "max_num_seqs": 4}
    llm = LLM(
        str(tmp_path),
        load_format="dummy",
        **sizes,
        max_num_waiting=1,  # LLM waits by itself
    )
    prompts = [{"prompt_token_ids": tiny.prompt(i, 17)} for i in range(7)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    again = llm.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in again]
    stats, both = llm.engine.stats(), [*outputs, *again]
    assert sum(o.num_preemptions for o in both) == stats.num_preemptions > 0
    assert sum(o.num_cached_tokens for o in both) == stats.num_cached_tokens
    assert llm.generate(prompts[-1], params)[0].num_cached_tokens == 16
    assert stats.num_queried_tokens == 14 * 17 and stats.num_used_pages == 0


# --- controls ---


def serve_overtaken_request() -> list[str]:
    """Serve a request that one of better rank with the same prompt overtakes in the middle of its prompt."""
    ids = tiny.prompt(0, 40)
    options = {"max_tokens": 12, "ignore_eos": True, "logprobs": 3}
    requests = [
        tiny.request(i, SamplingParams(**options, priority=-i), prompt_token_ids=ids) for i in range(2)
    ]
    alone = {r.id: tiny.run(tiny.engine(), [r])[r.id] for r in requests}
    engine = tiny.engine(page_size=PAGE, max_num_batched_tokens=16, debug=False)
    stats = {}
    records = tiny.run(engine, requests, arrivals=[0, 1], stats=stats)
    assert stats["1"].num_cached_tokens >= 16, "no page was found"
    return [line for name in records for line in compare(name, alone[name], records[name])]


def test_found_pages_are_stored():
    assert serve_overtaken_request() == []


def test_digests_continue_from_known_ones():
    ids = tiny.prompt(0, 50)
    whole = list(digests(ids, PAGE, "a"))
    for known in range(len(whole) + 1):
        assert list(digests(ids, PAGE, "a", whole[:known])) == whole[known:]
    assert list(digests(ids, PAGE, "b", whole[:2])) == whole[2:]  # the salt is in the first digest
    assert list(digests(ids, PAGE, "a", whole[1:2])) != whole[1:]


def test_digests_of_the_next_request_are_computed_while_idle(monkeypatch):
    engine, num_known, whole = tiny.engine(page_size=PAGE, max_num_seqs=1), [], page_pool.digests
    monkeypatch.setattr(
        page_pool, "digests", lambda ids, *more: num_known.append(len(more[2])) or whole(ids, *more)
    )
    scheduler = engine.loop.scheduler
    for i in range(2):
        engine.add(tiny.request(i, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), 40))
    for _ in range(3):
        scheduler.do_idle_work()
    first, second = scheduler.waiting
    assert len(first.digests) == 40 // PAGE and not second.digests and num_known == [0]
    while engine.has_work:
        engine.step()
        scheduler.do_idle_work()
    pages = 40 // PAGE
    assert sorted(num_known) == [0, 0, pages, pages]
    assert first.digests == list(whole(first.ids, PAGE)) and len(first.digests) > pages


@pytest.mark.parametrize("what", ["salted", "chained"])
def test_control_digests_without_salt_or_chain_are_detected(monkeypatch, what):
    engine, ids = tiny.engine(page_size=PAGE), tiny.prompt(0, 40)

    def broken(tokens, size, salt="", known=()):
        found = digests(tokens, size, "" if what == "salted" else salt, known)
        for at, digest in enumerate(found, len(known)):
            page = tokens[at * size : (at + 1) * size]
            yield repr((salt, list(page))).encode() if what == "chained" else digest

    monkeypatch.setattr(page_pool, "digests", broken)
    serve(engine, ids, cache_salt="a")
    if what == "salted":
        assert serve(engine, ids, cache_salt="b")[1] == 32, "a page of another salt was found"
        return
    moved = ids[PAGE : 2 * PAGE] + ids[:32]
    record, found = serve(engine, moved, cache_salt="a", logprobs=2)
    alone = serve(tiny.engine(page_size=PAGE), moved, logprobs=2)[0]
    assert found and compare("0", alone, record), "KV of other positions was used"


def test_pages_of_a_request_with_wrong_logits_are_not_found(monkeypatch):
    engine, ids = tiny.engine(page_size=PAGE), tiny.prompt(0, 40)
    runner = engine.runner
    with monkeypatch.context() as patch:
        whole = runner.logits
        patch.setattr(runner, "logits", lambda hidden: whole(hidden) * float("nan"))
        assert serve(engine, ids)[0].finish[0] == "error"
    assert serve(engine, ids)[1] == 0 and serve(engine, ids)[1] == 32
