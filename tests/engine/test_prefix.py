"""The prefix cache, seen from outside: what is found, what is not, and that a hit has the bits of a miss."""

from __future__ import annotations

import json

import pytest

import tiny
from draftproof import LLM
from draftproof.engine.prefix_cache import PrefixCache
from draftproof.sampling_params import SamplingParams
from exact import Batch, Case, Setup, check_empty, compare, compute_reference_run

PAGE = 8


def serve(engine, ids, index=0, tokens=4, **options):
    """(record, cached tokens) of one request alone."""
    params = SamplingParams(**{"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, **options})
    stats = {}
    records = tiny.run(engine, [tiny.request(index, params, prompt_token_ids=ids)], stats=stats)
    check_empty(engine)
    return records[str(index)], stats[str(index)].num_cached_tokens


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 17, 30])
def test_full_pages_alone_and_never_the_newest_token(length):
    engine, ids = tiny.engine(page_size=PAGE), tiny.prompt(0, length)
    first, none = serve(engine, ids)
    again, found = serve(engine, ids)
    assert none == 0 and found == (length - 1) // PAGE * PAGE
    assert again.same() == first.same()


def test_the_longest_common_beginning_is_found():
    engine, ids = tiny.engine(page_size=PAGE), tiny.prompt(0, 40)
    serve(engine, ids)
    assert serve(engine, [*ids[:20], 90, *ids[21:]])[1] == 16
    assert serve(engine, [90, *ids[1:]])[1] == 0
    assert serve(engine, ids[PAGE:])[1] == 0, "the same pages at another place"


def test_what_was_said_is_found_by_a_follow_up():
    """The next turn holds the answer; its last token has no KV yet."""
    for overlap in (False, True):
        engine, ids = tiny.engine(page_size=PAGE, overlap=overlap), tiny.prompt(0, 12)
        answer = serve(engine, ids, tokens=21)[0].token_ids
        record, found = serve(engine, [*ids, *answer, 5, 6, 7])
        assert found == 32
        assert record.same() == serve(tiny.engine(), [*ids, *answer, 5, 6, 7])[0].same()


def test_salts_keep_tenants_apart():
    engine, ids = tiny.engine(page_size=PAGE), tiny.prompt(0, 40)
    assert [serve(engine, ids, cache_salt=salt)[1] for salt in (None, "a", "b", "a", None, "c")] == [
        *(0, 0, 0, 32, 32, 0)
    ]


def test_switched_off():
    engine, ids = tiny.engine(page_size=PAGE, enable_prefix_caching=False), tiny.prompt(0, 40)
    assert [serve(engine, ids)[1] for _ in range(3)] == [0, 0, 0]
    stats = engine.stats()
    assert (stats.num_queried_tokens, stats.num_cached_tokens, stats.num_cached_pages) == (0, 0, 0)


def test_the_longest_unused_text_gives_way():
    engine = tiny.engine(page_size=PAGE, kv_cache_tokens=10 * PAGE)
    texts = [tiny.prompt(0, 24), tiny.prompt(1, 24), tiny.prompt(2, 48)]  # 3, 3 and more than 6 pages
    for ids in texts[:2]:
        serve(engine, ids, tokens=2)
    assert serve(engine, texts[0], tokens=2)[1] == 16
    serve(engine, texts[2], tokens=6)
    assert serve(engine, texts[0], tokens=1)[1] == 16, "it was used lately"
    assert serve(engine, texts[1], tokens=1)[1] < 16


@pytest.mark.parametrize("top", [0, 3, -1])
@pytest.mark.parametrize("overlap", [False, True])
def test_prompt_logprobs_are_the_same_with_a_warm_cache(top, overlap):
    """Their rows are wanted, so they are computed; what comes after is cached as ever."""
    ids = tiny.prompt(0, 40)
    options = {"page_size": PAGE, "max_num_batched_tokens": 16, "max_logprobs": -1, "overlap": overlap}
    cold = serve(tiny.engine(**options), ids, prompt_logprobs=top, logprobs=2)[0]
    engine = tiny.engine(**options)
    serve(engine, ids)
    warm, found = serve(engine, ids, prompt_logprobs=top, logprobs=2)
    assert compare("0", cold, warm) == [] and len(warm.prompt_logprobs) == 39 and found == 0


def test_counts_reach_the_answers(tmp_path):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 97,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "max_position_embeddings": 256,
        "eos_token_id": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    llm = LLM(
        str(tmp_path),
        load_format="dummy",
        page_size=PAGE,
        kv_cache_tokens=96,
        max_num_seqs=4,
        max_num_waiting=1,  # the offline entry waits by itself
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


def overtaken() -> list[str]:
    """One is in the middle of its prompt when a better rank with the same prompt overtakes it."""
    ids = tiny.prompt(0, 40)
    wish = {"max_tokens": 12, "ignore_eos": True, "logprobs": 3}
    requests = [tiny.request(i, SamplingParams(**wish, priority=-i), prompt_token_ids=ids) for i in range(2)]
    alone = {r.id: tiny.run(tiny.engine(), [r])[r.id] for r in requests}
    engine = tiny.engine(page_size=PAGE, max_num_batched_tokens=16, debug=False)
    stats = {}
    records = tiny.run(engine, requests, arrivals=[0, 1], stats=stats)
    assert stats["1"].num_cached_tokens >= 16, "nothing was found"
    return [line for name in records for line in compare(name, alone[name], records[name])]


def test_what_is_found_was_stored_before():
    assert overtaken() == []


def test_control_a_page_that_is_known_too_early(monkeypatch):
    """All of a prompt, when the first chunk of it is planned."""
    whole = PrefixCache.publish_pages
    monkeypatch.setattr(PrefixCache, "publish_pages", lambda self, s, computed: whole(self, s, len(s.ids)))
    assert any("request 1" in line for line in overtaken())


def plain_digests(salted=True, chained=True):
    from draftproof.engine.page_pool import digests

    def broken(tokens, size, salt="", known=()):
        found = digests(tokens, size, salt if salted else "", known)
        for at, digest in enumerate(found, len(known)):
            page = tokens[at * size : (at + 1) * size]
            yield digest if chained else repr((salt, list(page))).encode()

    return broken


def test_digests_go_on_where_they_ended():
    from draftproof.engine.page_pool import digests

    ids = tiny.prompt(0, 50)
    whole = list(digests(ids, PAGE, "a"))
    for known in range(len(whole) + 1):
        assert list(digests(ids, PAGE, "a", whole[:known])) == whole[known:]
    assert list(digests(ids, PAGE, "b", whole[:2])) == whole[2:]  # whose it is, is in what is known
    assert list(digests(ids, PAGE, "a", whole[1:2])) != whole[1:]


def test_who_comes_next_is_read_while_there_is_time(monkeypatch):
    """And is not read again when seated; what it has said later is read from there on."""
    from draftproof.engine import prefix_cache

    engine, asked, whole = tiny.engine(page_size=PAGE, max_num_seqs=1), [], prefix_cache.digests
    monkeypatch.setattr(
        prefix_cache, "digests", lambda ids, *more: asked.append(len(more[2])) or whole(ids, *more)
    )
    scheduler = engine.loop.scheduler
    for i in range(2):
        engine.add(tiny.request(i, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), 40))
    for _ in range(3):
        scheduler.meanwhile()
    first, second = scheduler.waiting
    assert len(first.digests) == 40 // PAGE and not second.digests and asked == [0]
    while engine.has_work:
        engine.step()
        scheduler.meanwhile()
    pages = 40 // PAGE
    assert sorted(asked) == [0, 0, pages, pages]
    assert first.digests == list(whole(first.ids, PAGE)) and len(first.digests) > pages


@pytest.mark.parametrize("what", ["salted", "chained"])
def test_control_digests_that_say_too_little(monkeypatch, what):
    """One after the other, so that what is found is there: the salt is ignored, or what comes before."""
    engine, ids = tiny.engine(page_size=PAGE), tiny.prompt(0, 40)
    monkeypatch.setattr("draftproof.engine.prefix_cache.digests", plain_digests(**{what: False}))
    serve(engine, ids, cache_salt="a")
    if what == "salted":
        assert serve(engine, ids, cache_salt="b")[1] == 32, "another's text was found"
        return
    moved = ids[PAGE : 2 * PAGE] + ids[:32]
    record, found = serve(engine, moved, cache_salt="a", logprobs=2)
    alone = serve(tiny.engine(page_size=PAGE), moved, logprobs=2)[0]
    assert found and compare("0", alone, record), "KV of other positions was used"


def test_control_numbers_that_went_wrong_are_not_found(monkeypatch):
    """A request whose logits were not finite leaves nothing behind for others to build on."""
    engine, ids = tiny.engine(page_size=PAGE), tiny.prompt(0, 40)
    runner = engine.runner
    with monkeypatch.context() as patch:
        whole = runner.logits
        patch.setattr(runner, "logits", lambda hidden: whole(hidden) * float("nan"))
        assert serve(engine, ids)[0].finish[0] == "error"
    assert serve(engine, ids)[1] == 0 and serve(engine, ids)[1] == 32


def test_a_solo_run_is_a_miss():
    """What the exactness tests compare with has found nothing."""
    case = Case(0, "no_logprobs", length=40)
    batch = Batch([case], Setup())
    assert batch.differences() == [] and compute_reference_run(case, Setup()).token_ids
    assert batch.stats["0"].num_cached_tokens == 0
