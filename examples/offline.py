"""Generate offline, with logprobs and the acceptance length."""

from draftproof import LLM, SamplingParams

llm = LLM("smollm2-135m", speculative_config={"method": "ngram", "num_speculative_tokens": 5})
prompts = ["Count: one two three one two three one two", "The capital of France is"]
params = SamplingParams(temperature=0, max_tokens=24, logprobs=2)
for output in llm.generate(prompts, params, use_tqdm=False):
    answer = output.outputs[0]
    print(repr(answer.text), answer.finish_reason)
    print(f"  {output.metrics.acceptance_length:.2f} tokens a step, strategy {output.strategy}")
    for token, entries in list(zip(answer.token_ids, answer.logprobs, strict=True))[:3]:
        print("  ", token, entries[token])
