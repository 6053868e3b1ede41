"""Text to train on, written by the model itself: answers to prompts of a file, and to prompts of its own.

An instruct model given only the opening of a user turn writes what a user might say; sampled at temperature
1 it never runs out. The engine is the generator: a text depends on its prompt and seed alone, so shards are
the same whatever ran beside them, and a run that was cut goes on with the next one.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard, cast

import numpy as np

from draftproof.errors import ConfigError
from draftproof.llm import LLM
from draftproof.sampling_params import SamplingParams
from draftproof.train.config import TextPlan
from draftproof.train.data.dataset import Text, shard_tokens, write_shard
from draftproof.train.data.prompt_seeds import message_about, opening
from draftproof.train.progress import ProgressReporter

MAX_TURNS = 4  # of a conversation, at most
MIN_TEXT_CHARS = 80  # letters; what is shorter is not asked about
Messages = list[dict[str, str]]
Conversation = Messages | list[int]  # a conversation, or the ids of any prompt


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """A prompt to be answered."""

    conversation: Conversation
    temperature: float
    seed: int


def read_prompts(paths: Sequence[str]) -> list[Conversation]:
    """One a line: {"prompt": text}, {"prompt_token_ids": ids}, {"messages": […]} or {"turns": [text, …]}."""
    prompts: list[Conversation] = []
    for path in paths:
        for number, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                prompts.append(_prompt(row))
            except (ValueError, TypeError, KeyError, IndexError) as error:
                raise ConfigError(f"{path}, line {number}: not a prompt: {error!r}") from error
    return prompts


def _prompt(row: dict[str, Any]) -> Conversation:
    if "prompt_token_ids" in row:
        return [int(token) for token in row["prompt_token_ids"]]
    if "messages" in row:
        return list(row["messages"])
    text = row["turns"][0] if "turns" in row else row["prompt"]
    return [{"role": "user", "content": str(text)}]


class Generator:
    """Writes shards until there is enough text. `begin` is called before the first is written."""

    def __init__(
        self, llm: LLM, plan: TextPlan, reporter: ProgressReporter, begin: Callable[[], None]
    ) -> None:
        self.begin = begin
        self.llm = llm
        self.plan = plan
        self.reporter = reporter
        prompts = read_prompts(plan.prompts)
        random.Random(f"{plan.seed} prompts").shuffle(prompts)
        held = plan.held_out if prompts else 0
        if prompts and len(prompts) <= held:
            raise ConfigError(f"{len(prompts)} prompts are not more than the {held} to be held out")
        self.held, self.prompts = prompts[:held], prompts[held:]
        self.too_long: list[int] = []  # tokens of the prompts that were left out

    def run(self, folder: Path, stop_at: float | None = None) -> bool:
        """Whether it is done; False when the time was up (`time.monotonic()`) between two shards."""
        if self.plan.held_out and not shard_tokens(folder / "held"):
            self._write_shard(folder / "held", 0, self._held_out())
        sizes = shard_tokens(folder)
        began, before = time.monotonic(), sum(sizes)
        while sum(sizes) < self.plan.tokens:
            if stop_at is not None and time.monotonic() > stop_at:
                self.reporter.log(f"generate: stopped at {sum(sizes):,} tokens; run it again to go on")
                return False
            texts = self._shard(len(sizes))
            self._write_shard(folder, len(sizes), texts)
            sizes.append(sum(len(text.tokens) for text in texts))
            self.reporter.update("generate", min(sum(sizes), self.plan.tokens), self.plan.tokens)
            rate = (sum(sizes) - before) / (time.monotonic() - began)
            left = max(0, self.plan.tokens - sum(sizes)) / rate if rate else 0.0
            self.reporter.log(
                f"generate: shard {len(sizes) - 1}, {sum(sizes):,} of {self.plan.tokens:,} tokens, "
                f"{rate:,.0f} tokens/s, {left:.0f} s left"
            )
        return True

    def _write_shard(self, folder: Path, index: int, texts: list[Text]) -> None:
        """Write a shard down; the first one, and the plan with it."""
        if not texts:
            plan, why = self.plan, "the model does not end the prompts that it writes: lower --written"
            if self.too_long:
                why = f"the shortest prompt has {min(self.too_long)} tokens: raise --prompt-tokens"
            raise ConfigError(
                f"{folder}: shard {index} has no text, with --prompt-tokens {plan.prompt_tokens} and "
                f"--answer-tokens {plan.answer_tokens}; {why}"
            )
        self.begin()
        write_shard(folder, index, texts, self.llm.engine.limits.vocab_size)

    # --- one shard ----------------------------------------------------------------------------------

    def _shard(self, index: int) -> list[Text]:
        plan = self.plan
        rng = random.Random(f"{plan.seed} shard {index}")
        own = round(plan.shard * plan.written)
        shown = round(own * plan.shown)
        requests = [
            PromptRequest(conversation, self._temperature(rng), _seed(rng))
            for conversation in self._self_written(rng, own - shown)
        ]
        for number in range(index * (plan.shard - own), (index + 1) * (plan.shard - own)):
            again, place = divmod(number, len(self.prompts))
            temperature = self._temperature(rng)
            if again and plan.greedy < 1:  # a second answer at temperature 0 would be the first one again
                temperature = plan.temperature
            requests.append(PromptRequest(self.prompts[place], temperature, _seed(rng)))
        texts, conversations = self._generate(requests)
        every = list(texts)
        read = self._prompts_about(conversations, shown, rng)
        more = self._generate(
            [PromptRequest(conversation, self._temperature(rng), _seed(rng)) for conversation in read]
        )
        every += more[0]
        texts, conversations = [*texts, *more[0]], [*conversations, *more[1]]
        for _ in range(MAX_TURNS - 1):
            texts, conversations = self._follow_up(texts, conversations, rng)
            every += texts
        return every

    def _held_out(self) -> list[Text]:
        """Each held-out prompt is answered at both temperatures."""
        plan = self.plan
        rng = random.Random(f"{plan.seed} held out")
        own = plan.held_out if plan.written else 0
        shown = round(own * plan.shown)
        prompts = [*self.held, *self._self_written(rng, own - shown)]
        if shown:
            seen = self._generate([PromptRequest(prompt, 0.0, _seed(rng)) for prompt in prompts])[1]
            prompts += self._prompts_about(seen, shown, rng)
        rng.shuffle(prompts)  # the first ones alone are measured while training
        requests = [
            PromptRequest(prompt, t, _seed(rng)) for prompt in prompts for t in (0.0, plan.temperature)
        ]
        return self._generate(requests)[0]

    def _temperature(self, rng: random.Random) -> float:
        return 0.0 if rng.random() < self.plan.greedy else self.plan.temperature

    def _generate(self, requests: list[PromptRequest]) -> tuple[list[Text], list[Messages]]:
        """The answers to what is not too long, and the conversations: [] where none can go on."""
        given = [(a, self._ids(a.conversation)) for a in requests]
        kept = [(a, ids) for a, ids in given if 0 < len(ids) <= self.plan.prompt_tokens]
        self.too_long += [len(ids) for _, ids in given if len(ids) > self.plan.prompt_tokens]
        params = [
            SamplingParams(temperature=a.temperature, seed=a.seed, max_tokens=self.plan.answer_tokens)
            for a, _ in kept
        ]
        prompts = [{"prompt_token_ids": ids} for _, ids in kept]
        texts, conversations = [], []
        outputs = self.llm.generate(prompts, params, use_tqdm=False) if prompts else []
        for (a, ids), out in zip(kept, outputs, strict=True):
            answer = out.outputs[0]
            tokens = np.asarray([*ids, *answer.token_ids], np.int64)
            texts.append(Text(tokens, len(ids), a.temperature, a.seed))
            ended = answer.finish_reason == "stop" and _is_conversation(a.conversation)
            conversations.append(
                [*a.conversation, {"role": "assistant", "content": answer.text}] if ended else []
            )
        return texts, conversations

    def _follow_up(
        self, texts: list[Text], conversations: list[Messages], rng: random.Random
    ) -> tuple[list[Text], list[Messages]]:
        """Some conversations go on: the model asks as the user, and answers."""
        room = self.plan.prompt_tokens - 32  # a question needs some
        chosen = [rng.random() < self.plan.follow for _ in texts]
        on = [i for i, text in enumerate(texts) if chosen[i] and conversations[i] and len(text.tokens) < room]
        self._write("user", conversations, on, rng)
        return self._generate(
            [
                PromptRequest(conversations[i], self._temperature(rng), _seed(rng))
                for i in on
                if conversations[i]
            ]
        )

    # --- prompts ------------------------------------------------------------------------------------

    def _ids(self, conversation: Conversation) -> list[int]:
        return (
            self.llm.chat_token_ids(conversation)
            if _is_conversation(conversation)
            else cast("list[int]", conversation)
        )

    def _self_written(self, rng: random.Random, count: int) -> Iterator[Messages]:
        """Prompts of the model's own, fewer than asked for: what does not come to an end is left out."""
        if not count:
            return
        with_system = [rng.random() < self.plan.systems for _ in range(count)]
        conversations: list[Messages] = [[] for _ in range(count)]
        self._write("system", conversations, [i for i in range(count) if with_system[i]], rng)
        initial = [i for i in range(count) if not with_system[i] and rng.random() < self.plan.opened]
        wanted = [i for i in range(count) if conversations[i] or not with_system[i]]
        self._write("user", conversations, wanted, rng, {i: opening(rng) for i in initial})
        for conversation in conversations:
            if conversation and conversation[-1]["role"] == "user":
                yield conversation

    def _prompts_about(self, conversations: list[Messages], count: int, rng: random.Random) -> list[Messages]:
        """Prompts about what the model said last in these conversations: one to three texts each."""
        said = [conversation[-1]["content"].strip() for conversation in conversations if conversation]
        said = [text for text in said if len(text) > MIN_TEXT_CHARS]
        if not said:
            return []
        read: list[Messages] = []
        initial: dict[int, str] = {}
        for index in range(count):
            message, goes_on = message_about(rng.choices(said, k=rng.choice((1, 1, 2, 3))), rng)
            read.append([] if goes_on else [{"role": "user", "content": message}])
            if goes_on:
                initial[index] = message
        self._write("user", read, list(initial), rng, initial)
        return [conversation for conversation in read if conversation]

    def _write(
        self,
        role: str,
        conversations: list[Messages],
        which: list[int],
        rng: random.Random,
        openings: Mapping[int, str] | None = None,  # how the message begins; nothing: with nothing
    ) -> None:
        """Let the model write the next message of these conversations, and add it where it has an end."""
        tokenizer = self.llm.get_tokenizer()
        params, prompts, plan, initial = [], [], self.plan, openings or {}
        for index in which:
            message = [*conversations[index], {"role": role, "content": initial.get(index, "")}]
            text = tokenizer.apply_chat_template(
                message, add_generation_prompt=False, continue_final_message=True
            )
            ids = tokenizer.encode(text, add_special_tokens=False)
            room = min(plan.answer_tokens, max(1, plan.prompt_tokens - len(ids)))
            prompts.append({"prompt_token_ids": ids[: plan.prompt_tokens]})
            params.append(SamplingParams(temperature=1.0, seed=_seed(rng), max_tokens=room))
        outputs = self.llm.generate(prompts, params, use_tqdm=False) if prompts else []
        for index, out in zip(which, outputs, strict=True):
            said = out.outputs[0]
            if said.finish_reason == "stop" and said.text.strip():
                whole = (initial.get(index, "") + said.text).strip()
                conversations[index].append({"role": role, "content": whole})
            else:
                conversations[index].clear()


def _seed(rng: random.Random) -> int:
    return rng.getrandbits(48)


def _is_conversation(prompt: Conversation) -> TypeGuard[Messages]:
    return bool(prompt) and not isinstance(prompt[0], int)
