"""Prompts of the benchmarks: chat requests of 50 to 1000 tokens, text to copy, text to edit, free text.

Lengths are spread evenly on a logarithmic scale. With a tokenizer the prompts are text in the model's chat
format; without one (dummy weights) they are random tokens of the same lengths.
"""

from __future__ import annotations

import random
from typing import Any

PASSAGES = (
    "A lighthouse is built where ships are most likely to lose their way. Its lamp turns through the night "
    "at a steady pace, and every lighthouse on a coast has its own rhythm, so that a captain can tell from "
    "the flashes which headland lies ahead. Before electricity the keepers carried oil up the stairs and "
    "cleaned the glass by hand.",
    "Bread rises because yeast eats the sugar in the flour and breathes out gas. The gas is caught in a net "
    "of gluten, which forms when the dough is kneaded. A dough that rests overnight in a cool place rises "
    "slowly and tastes better, since the acids that give bread its flavour need time to form.",
    "Trains changed the way people thought about time. When every town set its clocks by the sun, noon in "
    "one place was not noon in the next. A timetable could not be printed until the towns along a line had "
    "agreed on one clock, and within a few decades whole countries had done so.",
    "Bees tell one another where flowers are by dancing. The angle of the dance gives the direction in "
    "relation to the sun, and its length gives the distance. Other bees follow the dancer in the dark of "
    "the hive, feel her movements, and fly straight to the place.",
    "The first computers filled whole rooms and could be heard from the corridor. Programs were wired by "
    "hand or punched into cards, and a mistake was found the next morning, when the printout came back. "
    "Most of what we call software today grew out of the wish not to do the same wiring twice.",
    "Glass is made from sand, soda and lime, melted at great heat. For two thousand years it was blown on "
    "the end of a pipe. Flat panes were cut from cylinders or spun into discs, which is why old windows are "
    "thicker at one edge and make the street behind them swim.",
    "A city by a river is really two cities, the one on the water and the one behind it. Warehouses, cranes "
    "and customs houses face the quay; theatres, markets and churches turn their backs to it. When the "
    "harbour moves downstream to deeper water, the first city becomes a promenade.",
    "Volcanoes build land as well as destroy it. Ash makes the soil around them rich, and farmers return to "
    "the slopes a few years after an eruption. On islands far out at sea everything that grows has come by "
    "wind, by water, or in the feathers of a bird.",
    "Chess was carried from India to Persia and from there to Europe, and the pieces changed their names on "
    "the way. The counsellor became a queen and learned to cross the whole board in one move. Players who "
    "meet for the first time, without a common language, can begin a game at once.",
    "A vaccine shows the body the face of an illness without the illness. The body remembers, and when the "
    "real thing arrives it answers within hours instead of days. For that reason a disease can vanish from "
    "a country long before everybody in it has been vaccinated.",
    "Old maps show what their makers feared as much as what they knew. Empty seas were filled with monsters, "
    "and deserts with towns that nobody had seen. A map that admitted it did not know was harder to sell, "
    "and it took a long time until a white patch was thought to be honest.",
    "An orchestra tunes to the oboe because its note is hard to bend. The strings could follow anything, "
    "but the oboe can only be what it is. In a large hall the players at the back hear the front a moment "
    "late, and learn to play ahead of what they hear.",
)
TASKS = (
    "Summarise the following notes in a few sentences for somebody who is in a hurry.",
    "Explain the following to a twelve-year-old, and give an example for each point.",
    "Write a letter to the author of these notes, with three questions and a suggestion.",
    "What is the most surprising statement in these notes, and why? Answer in detail.",
    "Turn these notes into a short speech for the opening of an exhibition.",
    "List the main ideas of these notes and say how they are connected.",
)


def lengths(count: int) -> list[int]:
    """Return lengths from 50 to 1000, evenly on a logarithmic scale, in a fixed shuffled order."""
    spread = [round(50 * 20 ** (i / max(1, count - 1))) for i in range(count)] if count > 1 else [224]
    random.Random(5).shuffle(spread)
    return spread


def chat_prompts(count: int, vocab: int, tokenizer: Any) -> list[list[int]]:
    """Return chat requests about notes, cut to the lengths of `lengths`."""
    draw, prompts = random.Random(1), []
    for i, length in enumerate(lengths(count)):
        if tokenizer is None:
            prompts.append([draw.randrange(3, vocab) for _ in range(length)])
            continue
        notes = " ".join(" ".join(draw.sample(PASSAGES, len(PASSAGES))) for _ in range(2))
        text = f"{TASKS[i % len(TASKS)]} Number {i}. {notes}"
        head = tokenizer.encode(f"<|im_start|>user\n{text}", add_special_tokens=False)
        tail = tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
        prompts.append(head[: length - len(tail)] + tail)
    return prompts


def copy_prompts(count: int, vocab: int, tokenizer: Any) -> list[list[int]]:
    """Return two passages three times over and their first words again: greedy output continues them."""
    draw, prompts = random.Random(2), []
    for i in range(count):
        if tokenizer is None:
            passage = [draw.randrange(3, vocab) for _ in range(100)]
            prompts.append(passage * 3 + passage[:5])
            continue
        text = f"Note {i}. " + " ".join(draw.sample(PASSAGES, 2)) + "\n"
        passage = tokenizer.encode(text, add_special_tokens=False)
        prompts.append(passage * 3 + passage[:12])
    return prompts


def _chat(text: str, tokenizer: Any) -> list[int]:
    chat = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    return list(tokenizer.encode(chat, add_special_tokens=False))


def edit_prompts(count: int, vocab: int, tokenizer: Any) -> list[list[int]]:
    """Return passages with mistakes to correct: most of the output is in the prompt."""
    if tokenizer is None:
        return copy_prompts(count, vocab, None)
    draw, prompts = random.Random(3), []
    for i in range(count):
        words = " ".join(draw.sample(PASSAGES, 2)).split()
        for at in draw.sample(range(len(words)), 6):
            words[at] = words[at][::-1]
        task = "Correct the spelling of the following text. Repeat the whole text and change nothing else."
        prompts.append(_chat(f"{task} Text {i}:\n\n{' '.join(words)}", tokenizer))
    return prompts


def free_prompts(count: int, vocab: int, tokenizer: Any) -> list[list[int]]:
    """Return prompts without text to copy."""
    draw, prompts = random.Random(4), []
    people = ("a tired baker", "two sisters", "an old sailor", "a clockmaker")
    places = ("a lighthouse", "a city on Mars", "a night train", "an empty theatre")
    for i in range(count):
        if tokenizer is None:
            prompts.append([draw.randrange(3, vocab) for _ in range(24)])
            continue
        who, where = draw.choice(people), draw.choice(places)
        prompts.append(_chat(f"Make up a story about {who} in {where}. It begins on day {i}.", tokenizer))
    return prompts
