"""Copy-heavy agent traffic on this CPU at batch 1; the last line of stdout is JSON.

    python bench/agent.py [--tasks edit:96,conversation:96] [--window 96] [--model smollm2-135m] [-k 12]
                          [--quantization gguf]

Tasks (`common/agent_traffic.py`): `edit`, a 300-line file read through one tool call (result as JSON) and
written with five changes through another; `edit_text_result`, where the result of the first call is text, so
that every line end differs from the escaped one to be written; `conversation`, eight turns that repeat
earlier code. Sides: an engine without a proposer, and engines with n-gram, suffix and hybrid drafts (EAGLE-3
head and suffix). The suffix pool of earlier outputs is off: drafts come from the request alone.

The replies are forced: a small model does not follow such instructions, so a logits processor permits only
the next token of the reply. Every token is still computed and verified by the model, and proposers never see
the reply; the figures are those of a model that replies with these texts. Tokens and logprobs of all sides
must be equal bit for bit.

A reply is measured in windows of `--window` tokens, which begin `stride` tokens apart (`--tasks NAME:STRIDE`;
a stride as long as the window covers the whole reply). A window is a request of its own whose prompt is the
conversation and the reply so far, mostly from the prefix cache. The sides take turns window by window, so a
slow minute of the machine affects all of them. Speed is decode speed, from the first token of a window on.
`times_plain` compares the sums of all windows; `median` is the median of the windows' ratios.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from common.agent_traffic import TASKS, Turn
from common.measure import finish, others_seconds
from torch import Tensor

from draftproof import LLM, SamplingParams

PLAIN = "plain"


def speculation(name: str, k: int) -> dict[str, Any] | None:
    """Return the options of a side."""
    suffix = {"method": "suffix", "pool_tokens": 0}
    return {
        PLAIN: None,
        "ngram": {"method": "ngram", "num_speculative_tokens": k},
        "suffix": {**suffix, "num_speculative_tokens": k},
        "hybrid": {
            "method": "hybrid",
            "num_speculative_tokens": k,
            "proposers": [{"method": "eagle3", "num_speculative_tokens": min(4, k)}, suffix],
        },
    }[name]


class Forced:
    """Logits processor that permits only the next token of a reply."""

    def __init__(self, reply: Sequence[int], num_prompt: int) -> None:
        self._reply, self._num_prompt = reply, num_prompt

    def __call__(self, tokens: Sequence[int], logits: Tensor) -> Tensor:
        at = min(len(tokens) - self._num_prompt, len(self._reply) - 1)  # a window may pass the end
        logits.fill_(float("-inf"))  # a copy of the row
        logits[self._reply[at]] = 0.0
        return logits


class Side:
    """Engine of one side and its output of the turn that runs."""

    def __init__(self, name: str, model: str, k: int, quantization: str) -> None:
        self.name = name
        self.llm = LLM(
            model, max_num_seqs=1, speculative_config=speculation(name, k), quantization=quantization
        )
        self.tokens: list[int] = []
        self.logprobs: list[Any] = []

    def decode(self, ids: list[int], reply: list[int]) -> float:
        """Generate a reply; return the seconds from its first token on."""
        params = SamplingParams(
            temperature=0, max_tokens=len(reply), logprobs=0, logits_processors=[Forced(reply, len(ids))]
        )
        self.tokens, self.logprobs, begin = [], [], 0.0
        for event in self.llm.stream({"prompt_token_ids": ids}, params):
            begin = begin or time.perf_counter()
            if event.token_id is not None:
                self.tokens.append(event.token_id)
                self.logprobs.append(event.logprobs)
        return time.perf_counter() - begin


def windows(llm: LLM, turn: Turn, size: int, stride: int) -> list[tuple[list[int], list[int]]]:
    """Return prompts and replies of the windows of a turn; a rest of less than half a window is left out."""
    prompt = llm.chat_token_ids(turn.messages)
    reply = llm.get_tokenizer().encode(turn.reply, add_special_tokens=False)
    starts = [at for at in range(0, len(reply), stride) if at == 0 or len(reply) - at >= size // 2]
    return [(prompt + reply[:at], reply[at : at + size]) for at in starts]


def run_task(name: str, stride: int, sides: list[Side], size: int) -> dict[str, Any]:
    """Run the windows of a task on all sides, interleaved; return its figures."""
    turns, times, num_tokens = TASKS[name](), [], 0
    for side in sides:
        side.llm.reset_stats()
    for turn in turns:
        for ids, reply in windows(sides[0].llm, turn, size, stride):
            seconds = {side.name: side.decode(ids, reply) for side in sides}
            for side in sides:
                if side.tokens != reply or side.logprobs != sides[0].logprobs:
                    sys.exit(f"{side.name}: tokens or logprobs differ from those without drafts")
            times.append(seconds)
            num_tokens += len(reply) - 1
            print(name, len(ids), "  ".join(f"{n} {s:6.1f} s" for n, s in seconds.items()), flush=True)
    total = {side.name: sum(each[side.name] for each in times) for side in sides}
    drafted = [side.name for side in sides if side.name != PLAIN]
    figures = {
        "turns": len(turns),
        "windows": len(times),
        "stride": stride,
        "tokens": num_tokens,
        "tokens_per_second": {n: round(num_tokens / s, 2) for n, s in total.items()},
        "times_plain": {n: round(total[PLAIN] / total[n], 2) for n in drafted},
        "median": {n: round(statistics.median(t[PLAIN] / t[n] for t in times), 2) for n in drafted},
        "acceptance_length": {
            side.name: round(side.llm.stats.acceptance_length, 2) for side in sides if side.name in drafted
        },
        "same_bits": True,  # else the run ends with an error
    }
    print(figures, flush=True)
    return figures


def main() -> None:
    """Run all tasks on all sides."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--tasks", default="edit:96,conversation:96", help="NAME:STRIDE of " + ", ".join(TASKS)
    )
    parser.add_argument("--quantization", default="none", help="option of the engines, such as gguf")
    parser.add_argument("--sides", default="ngram,suffix,hybrid")
    parser.add_argument("--window", type=int, default=96, help="tokens between changes of the side")
    parser.add_argument("-k", type=int, default=12, help="most drafts of a step")
    options = parser.parse_args()
    names = (PLAIN, *options.sides.split(","))
    sides = [Side(name, options.model, options.k, options.quantization) for name in names]
    begin, others = time.perf_counter(), others_seconds()
    tasks = {}
    for name, _, stride in (task.partition(":") for task in options.tasks.split(",")):
        tasks[name] = run_task(name, int(stride or options.window), sides, options.window)
    seconds = time.perf_counter() - begin
    finish(
        "agent",
        {
            "model": options.model,
            "dtype": str(sides[0].llm.config.dtype),
            "batch": 1,
            "quantization": options.quantization,
            "k": options.k,
            "window": options.window,
            "other_processes_cpus": round((others_seconds() - others) / seconds, 2),
            "tasks": tasks,
        },
    )


if __name__ == "__main__":
    main()
