"""The promise and the speed on a GPU, in one run; the last line of stdout is JSON.

    python bench/gpu.py [--model smollm2-135m] [--tokens 256] [--batches 1,8,64,256] [--seconds 400]

First bits: every request with n-gram and with junk drafts, in company and in chunks, against itself plain,
and some of those against themselves alone; tokens, and sampled and top-5 logprobs. Then tokens a second of
`LLM.generate`, prefill and detokenising included: plain, with logprobs, with n-gram drafts, on chat prompts
and on a copy task. Parts that no time is left for are left out and named.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from itertools import product
from typing import Any

from measure import finish

from draftproof import LLM, SamplingParams
from draftproof.propose import Proposer
from draftproof.types import Draft, ProposeBatch, RequestOutput

TEXT = (
    "river mountain valley bridge city summer winter children harbour lantern garden window letter "
    "station silver copper gentle quiet sudden narrow because although between beneath against toward"
)
WORDS = TEXT.split()


class Junk(Proposer):
    """Random tokens: nearly all fall."""

    sources = ("junk",)

    def propose(self, batch: ProposeBatch) -> Draft:
        draw = random.Random(sum(batch.lengths))
        vocab = self.env.vocab_size
        return Draft.of([[draw.randrange(vocab) for _ in range(b)] for b in batch.budget], self.env.k)


def chat_prompts(count: int, vocab: int, tokenizer: Any) -> list[list[int]]:
    """50 to 1000 tokens each, all different."""
    draw, prompts = random.Random(1), []
    for i in range(count):
        length = 50 + (i * 37) % 950
        words = " ".join(draw.choice(WORDS) for _ in range(length))
        text = f"<|im_start|>user\nNumber {i}. Write about this: {words}"
        ids = tokenizer.encode(text) if tokenizer else [draw.randrange(3, vocab) for _ in range(length)]
        prompts.append(
            ids[:length] + (tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n") if tokenizer else [])
        )
    return prompts


def copy_prompts(count: int, vocab: int, tokenizer: Any) -> list[list[int]]:
    """A passage three times over: greedy text goes on with it."""
    draw, prompts = random.Random(2), []
    for _ in range(count):
        words = " ".join(draw.choice(WORDS) for _ in range(60)) + ". "
        passage = tokenizer.encode(words) if tokenizer else [draw.randrange(3, vocab) for _ in range(70)]
        prompts.append(passage * 3 + passage[:5])
    return prompts


def build(options: argparse.Namespace, method: str) -> LLM:
    return LLM(
        options.model,
        dtype="bfloat16",
        device="cuda",
        load_format=options.load_format,
        max_model_len=2048,
        max_num_seqs=max(options.batches),
        max_num_batched_tokens=options.rows,
        speculative_config={"method": method, "num_speculative_tokens": 8},
    )


def same(left: Sequence[RequestOutput], right: Sequence[RequestOutput]) -> int:
    """How many tokens differ, in id or in any bit of a logprob."""
    wrong = 0
    for a, b in zip(left, right, strict=True):
        x, y = a.outputs[0], b.outputs[0]
        wrong += abs(len(x.token_ids) - len(y.token_ids))
        lines = zip(x.token_ids, x.logprobs or [], y.token_ids, y.logprobs or [], strict=False)
        wrong += sum((t, p) != (u, q) for t, p, u, q in lines)
    return wrong


def asked(count: int, temperature: float, tokens: int, speculative: Any) -> list[SamplingParams]:
    shared = {"temperature": temperature, "max_tokens": tokens, "ignore_eos": True, "logprobs": 5}
    return [SamplingParams(seed=i, speculative=speculative, **shared) for i in range(count)]


def bits(llms: dict[str, LLM], options: argparse.Namespace, until: float) -> dict[str, Any]:
    checked, wrong, cases = 0, 0, []
    some, tokens = next(iter(llms.values())), min(options.tokens, 128)
    vocab = some.engine.limits.vocab_size
    for batch, temperature in product(options.batches, (0.0, 1.0)):
        if time.monotonic() > until:
            cases.append(f"batch {batch} T {temperature}: no time left")
            continue
        prompts = chat_prompts(batch, vocab, some.tokenizer)
        prompts[: batch // 2] = copy_prompts(batch // 2, vocab, some.tokenizer)
        params = asked(batch, temperature, tokens, False)
        plain = some.generate(prompts, params, use_tqdm=False)
        few = range(0, batch, max(1, batch // 2))
        alone = [some.generate([prompts[i]], params[i], use_tqdm=False)[0] for i in few]
        wrong += same([plain[i] for i in few], alone)
        for (name, llm), k in product(llms.items(), (1, 3, 8)):
            wishes = asked(batch, temperature, tokens, {"num_speculative_tokens": k})
            differ = same(plain, llm.generate(prompts, wishes, use_tqdm=False))
            wrong += differ
            checked += batch * tokens
            cases.append(f"batch {batch} T {temperature} {name} k {k}: {differ} of {batch * tokens}")
            print(cases[-1], flush=True)
    return {"tokens checked": checked, "tokens that differ": wrong, "cases": cases}


def speed(llm: LLM, options: argparse.Namespace, until: float) -> dict[str, Any]:
    vocab, out = llm.engine.limits.vocab_size, {}
    settings = {
        "plain": {"speculative": False},
        "logprobs=5": {"speculative": False, "logprobs": 5},
        "ngram k=5": {"speculative": {"num_speculative_tokens": 5}},
    }
    for task, make in (("chat", chat_prompts), ("copy", copy_prompts)):
        for batch in options.batches:
            prompts = make(batch, vocab, llm.tokenizer)
            for name, changes in settings.items():
                if time.monotonic() > until or (task == "copy" and name == "logprobs=5"):
                    continue
                params = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True, **changes)
                llm.generate(prompts[:1], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
                begin = time.perf_counter()
                done = llm.generate(prompts, params, use_tqdm=False)
                seconds = time.perf_counter() - begin
                total = sum(len(o.outputs[0].token_ids) for o in done)
                steps = sum(o.metrics.num_steps for o in done) / batch
                out[f"{task} batch {batch} {name}"] = {
                    "tok/s": round(total / seconds, 1),
                    "acceptance length": round(total / (steps * batch), 3),
                    "ms a step": round(1000 * seconds / steps, 3),
                }
                print(f"{task} batch {batch} {name}", out[f"{task} batch {batch} {name}"], flush=True)
    return out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument(
        "--batches", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 64, 256]
    )
    parser.add_argument("--seconds", type=float, default=400)
    options = parser.parse_args()
    begin = time.monotonic()
    llms = {
        name: build(options, method) for name, method in (("ngram", "ngram"), ("junk", f"{__name__}:Junk"))
    }
    print(llms["ngram"].engine.describe(), f"{time.monotonic() - begin:.1f} s to start", flush=True)
    found = bits(llms, options, begin + 0.6 * options.seconds)
    rates = speed(llms["ngram"], options, begin + options.seconds)
    finish(
        "gpu",
        {
            "model": options.model,
            "bits": found,
            "speed": rates,
        },
    )


if __name__ == "__main__":
    main()
