"""How users' messages begin: a model that is given such an opening goes on as a user would.

Left to itself a model asks what it was most often asked. These beginnings bring it to questions of fact, to
translation, and to texts that are there to be summarised, rewritten or asked about.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

QUESTIONS = (
    *("What is", "What was", "What does", "What are the", "Who was", "Who wrote", "Who is the", "When did"),
    *("When was the", "Where is", "Where does", "Why do", "Why is", "How do I", "How does", "How many"),
    *(
        "How much",
        "How long",
        "Which",
        "Is it true that",
        "Can you",
        "Could you",
        "Should I",
        "In which year",
    ),
    *("The name of", "what is the", "who played", "when is the", "where was the", "how old is"),
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
# {} is the text; those that end open are gone on with, so that the question fits the text
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
    """The beginning of a message, for the model to go on with."""
    kind = rng.random()
    if kind < 0.2:
        language = rng.choice(sorted(LANGUAGES))
        return rng.choice(TRANSLATE).format(language) + rng.choice(LANGUAGES[language])
    return rng.choice(QUESTIONS if kind < 0.55 else TASKS)


def message_about(texts: Sequence[str], rng: random.Random) -> tuple[str, bool]:
    """A message about these texts, and whether the model is to go on with it."""
    goes_on = rng.random() < 0.5
    message = rng.choice(ASK if goes_on else READ).replace("{}", "\n".join(texts))
    return (message + rng.choice(QUESTIONS) if goes_on else message), goes_on
