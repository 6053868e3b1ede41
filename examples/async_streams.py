"""Several streams on one engine, one of them aborted early, beside a request that is not streamed."""

import asyncio

from draftproof import AsyncLLM, SamplingParams

PROMPTS = ["Count: one two three one two three one two", "The capital of France is", "Once upon a time"]


async def read(llm: AsyncLLM, prompt: str, max_events: int) -> str:
    """Return the text of the first `max_events` events of a stream."""
    text, num_events = "", 0
    params = SamplingParams(temperature=0, max_tokens=24)
    async for event in llm.stream(prompt, params):
        text += event.text
        num_events += 1
        if num_events == max_events:
            break  # which aborts the request
    return text


async def main() -> None:
    """Serve all requests at once."""
    spec = {"method": "ngram", "num_speculative_tokens": 5}
    async with AsyncLLM("smollm2-135m", speculative_config=spec) as llm:
        streams = [read(llm, prompt, count) for prompt, count in zip(PROMPTS, (99, 99, 5), strict=True)]
        whole = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=24, n=2))
        output, *texts = await asyncio.gather(whole, *streams)
        for prompt, text in zip(PROMPTS, texts, strict=True):
            print(repr(prompt), "->", repr(text))
        print(f"  {output.metrics.acceptance_length:.2f} tokens a step, strategy {output.strategy}")
        print("aborted by the end of draining:", await llm.drain(timeout=10))


asyncio.run(main())
