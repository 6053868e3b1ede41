"""Proposer of your own: one class, named as "module:Class".

This one drafts the tokens that followed the last occurrence of the newest token. It cannot change an output,
which the example checks.
"""

from draftproof import LLM, SamplingParams
from draftproof.propose import Proposer
from draftproof.types import Draft, ProposeBatch


class Echo(Proposer):
    """Continuation of the last occurrence of the newest token."""

    sources = ("echo",)

    def propose(self, batch: ProposeBatch) -> Draft:
        """Return the drafts of every request."""
        drafts = []
        for slot, budget, length in zip(batch.slots, batch.budget, batch.lengths, strict=True):
            tokens = batch.columns.tokens[slot, :length].tolist()
            seen = [i for i in range(length - 1) if tokens[i] == tokens[-1]]
            drafts.append(tokens[seen[-1] + 1 :][:budget] if seen else [])
        return Draft.from_lists(drafts, self.env.k)


if __name__ == "__main__":
    llm = LLM("smollm2-135m", speculative_config={"method": f"{__name__}:Echo", "num_speculative_tokens": 4})
    prompt = "red green blue red green blue red green blue red"
    greedy = {"temperature": 0, "max_tokens": 24, "logprobs": 5}
    drafted = llm.generate(prompt, SamplingParams(**greedy))[0]
    plain = llm.generate(prompt, SamplingParams(**greedy, speculative=False))[0]
    assert drafted.outputs[0].logprobs == plain.outputs[0].logprobs
    print(drafted.outputs[0].text)
    print(f"{drafted.metrics.acceptance_length:.2f} tokens a step, and the same bits as without")
