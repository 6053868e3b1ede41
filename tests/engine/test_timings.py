"""Queue times, times to the first token and step times, with a clock that only counts."""

import asyncio
import itertools

import pytest

import tiny
from draftproof import AsyncLLM
from draftproof.metrics import BOUNDS, Histogram, RequestStats
from draftproof.sampling_params import SamplingParams


@pytest.fixture
def clock(monkeypatch):
    """Advance time by a second at every read."""
    ticks = itertools.count(100)
    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(f"time.{name}", lambda: float(next(ticks)))


def test_histogram_counts_by_bounds():
    made = Histogram()
    for seconds in (0.0, BOUNDS[0], 0.002, 1.0, 1e9):
        made.observe(seconds)
    assert made.count == 5 and made.total == sum((0.0, BOUNDS[0], 0.002, 1.0, 1e9))
    assert made.counts[0] == 2 and made.counts[2] == 1 and made.counts[BOUNDS.index(1.0)] == 1
    assert made.counts[-1] == 1 and len(made.counts) == len(BOUNDS) + 1
    other = made.copy()
    other.add(made)
    assert other.count == 10 and made.count == 5 and other.mean == pytest.approx(made.mean)
    assert Histogram().mean == 0.0


def test_unscheduled_request_has_no_times():
    stats = RequestStats()
    assert stats.queue_seconds is stats.first_token_seconds is stats.seconds is None


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("spec", [None, {"method": "ngram", "num_speculative_tokens": 3}])
def test_totals_are_sums_of_request_times(spec, overlap, clock):
    target = tiny.engine(speculative=spec, overlap=overlap, max_num_seqs=3, kv_cache_tokens=96, page_size=8)
    requests = [tiny.request(i, SamplingParams(max_tokens=24, ignore_eos=True), length=10) for i in range(6)]
    stats = {}
    tiny.run(target, requests, stats=stats)
    timings = target.stats().timings
    assert target.stats().num_preemptions
    for one in stats.values():
        assert one.arrived_at < one.scheduled_at < one.first_token_at < one.ended_at
        assert 0 < one.queue_seconds < one.first_token_seconds < one.seconds
    assert timings.queue.count == timings.first_token.count == 6
    assert timings.queue.total == sum(one.queue_seconds for one in stats.values())
    assert timings.first_token.total == sum(one.first_token_seconds for one in stats.values())
    assert stats["5"].queue_seconds > stats["0"].queue_seconds  # it waited for a slot
    assert timings.prompt_steps.count >= 2 and timings.decode_steps.count >= 20
    before = timings.decode_steps.count
    tiny.run(target, [tiny.request(9, SamplingParams(max_tokens=4))])
    assert timings.decode_steps.count == before < target.stats().timings.decode_steps.count  # a snapshot


def test_llm_and_async_llm_report_times(make):
    llm = make("ngram")
    out = llm.generate(["ab", "ba"], SamplingParams(max_tokens=6, n=2))
    assert all(0 < o.queue_seconds <= o.first_token_seconds for o in out)
    assert llm.engine_stats().timings.first_token.count == 4

    async def main():
        async with AsyncLLM.from_llm(llm) as engine:
            answer = await engine.generate("ab", SamplingParams(max_tokens=3))
            return answer, engine.engine_stats()

    answer, stats = asyncio.run(main())
    assert answer.first_token_seconds > 0 and stats.timings.queue.count == 5


def test_request_aborted_in_the_queue_has_no_first_token(clock):
    target = tiny.engine(max_num_seqs=1)
    stats = [target.add(tiny.request(i, SamplingParams(max_tokens=5))) for i in range(2)]
    target.step()
    target.abort("1")
    while target.has_work:
        target.step()
    assert stats[1].queue_seconds is None and stats[1].first_token_at is None and stats[1].seconds > 0
    assert target.stats().timings.queue.count == 1
