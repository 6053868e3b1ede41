"""The prompts of an audit. Nothing else is ever sent."""

from __future__ import annotations

PASSAGE = (
    "The river begins high in the mountains, where the snow melts in spring and fills a hundred small "
    "streams. The streams run down over grey stones and meet in a quiet valley."
)
CODE = "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n"

# Many continuations are plausible: drafts are rejected often.
FREE = (
    "The old lighthouse had been empty for years, until one evening in October",
    "My grandmother's recipe for soup begins like this: first",
    "Three reasons why people move to another city are",
    "Dear editor, I am writing to you because",
    "The most surprising thing about deep oceans is",
    "Once there was a cat who wanted to learn to",
    "In the year 2150 the first school on the moon",
    "A short list of unusual hobbies: 1.",
    "The detective opened the letter, and all it contained was",
    "When the power went out in the whole town,",
    "Here is what I learned from ten years of gardening:",
    "The committee met on Tuesday to discuss",
)

# The continuation repeats the prompt: n-gram drafts are accepted often.
COPIES = (
    f"{PASSAGE}\n\nThe same text again:\n\n{PASSAGE}\n\nThe same text again:\n\nThe river begins",
    f"{CODE}    return width * height * depth\n\n{CODE}    return",
    "one two three four five six one two three four five six one two three four five six one two",
    "| name | city |\n" + 2 * "| Anna | Oslo |\n| Ben | Rome |\n| Cleo | Oslo |\n" + "| Anna |",
    "red green blue red green blue red green blue red green yellow red green blue red green",
    f"A: {PASSAGE}\nB: {PASSAGE}\nC: The river begins high in the mountains,",
)

NEIGHBOURS = ("A list of colours:", "Count: 1, 2, 3,", "The weather today is", "for i in range(")


def sampling_prompt(index: int) -> str:
    """Return a prompt by number; free text and copies alternate."""
    kind = COPIES if index % 2 else FREE
    return kind[index // 2 % len(kind)]
