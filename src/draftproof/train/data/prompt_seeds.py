"""Openings of user messages, which a model completes to a prompt.

Without an opening a model writes the prompts that were most frequent in its training. These openings lead to
questions of fact, translation, and tasks about a given text.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

QUESTIONS = (
    *("What is", "What was", "What does", "What are the", "Who was", "Who wrote", "Who is the", "When did"),
    *("When was the", "Where is", "Where does", "Why do", "Why is", "How do I", "How does", "How many"),
    *("How much", "How long", "Which", "Is it true that", "Can you", "Could you", "Should I"),
    *("In which year", "The name of", "what is the", "who played", "when is the", "where was the"),
    *("how old is",),
)
TASKS = (
    *("Write a", "Write an email", "Write a short story", "Write a poem", "Write a blog post about", "Draft"),
    *("Explain", "Explain how", "Describe", "Compare", "Discuss", "Give me", "Give three", "List", "Name"),
    *("Suggest", "Plan", "Imagine", "Imagine you are", "Pretend", "You are", "Act as", "I want", "I need"),
    *("I have", "My", "Help me", "Tell me", "Create", "Design", "Develop", "Outline", "Analyze", "Evaluate"),
    *("Solve", "Calculate", "Find", "Prove", "If", "Suppose", "A train", "There are", "Tom has", "Classify"),
    *("Identify", "Edit the following", "Rewrite", "Summarize the", "Extract", "Implement", "Convert"),
)
LANGUAGES = {
    "German": ("Der", "Die", "Das", "Ein", "Eine", "Es", "In", "Im", "Wir", "Ich", "Er", "Nach", "Am", "Mit"),
    "French": ("Le", "La", "Les", "Un", "Une", "Il", "Elle", "Nous", "Je", "Dans", "En", "C'est", "Pour"),
    "Spanish": ("El", "La", "Los", "Un", "Una", "Es", "En", "Por", "Yo", "Nosotros", "Hay", "Con", "Se"),
    "Italian": ("Il", "La", "Lo", "Un", "Una", "In", "Per", "Noi", "Io", "Con"),
}
TRANSLATE = (
    "Translate from {} to English: ",
    "Translate this {} sentence into English: ",
    "What does this {} sentence mean in English?\n\n",
    "Please translate the following {} text to English:\n\n",
)
# {} is the text; the model completes a message of ASK, so that the question fits the text
READ = (
    "Summarize the following text: {}",
    "Summarize this article:\n\n{}",
    "Give a short summary of this text.\n\n{}",
    "{}\n\nSummarize the text above in a few sentences.",
    "What is this text about?\n\n{}",
    "List the main points.\n\n{}",
    "Rewrite this in simpler words:\n\n{}",
    "Correct the mistakes in this text and repeat it:\n\n{}",
)
ASK = (
    "{}\n",
    "{}\n\n",
    "Answer from the text alone.\n\n{}\n\nQuestion: ",
    "Read this and answer the question.\n\n{}\n\n",
    "Context: {}\n\nQuestion: ",
)


def opening(rng: random.Random) -> str:
    """Return the opening of a message, for the model to complete."""
    kind = rng.random()
    if kind < 0.2:
        language = rng.choice(sorted(LANGUAGES))
        return rng.choice(TRANSLATE).format(language) + rng.choice(LANGUAGES[language])
    return rng.choice(QUESTIONS if kind < 0.55 else TASKS)


def message_about(texts: Sequence[str], rng: random.Random) -> tuple[str, bool]:
    """Return a message about these texts, and whether the model has to complete it."""
    is_open = rng.random() < 0.5
    message = rng.choice(ASK if is_open else READ).replace("{}", "\n".join(texts))
    return (message + rng.choice(QUESTIONS) if is_open else message), is_open
