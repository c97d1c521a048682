"""Free texts: a sentence from given words, a paraphrase, a summary. Grammar counts in all of them."""

import numpy as np

from specjax.bench.parallel.base import Question, Task
from specjax.bench.parallel.templates import CONVERSATIONS, SENTENCES
from specjax.bench.parallel.word_groups import FIELDS, THEMES
from specjax.tasks import words


class WordsToSentence(Task):
    """A sentence with n given words, which go together less and less from `easy` to `hard`.

    The words of `easy` are of one theme, those of `medium` of n everyday themes, those of `hard` of n fields of rare
    words. A word counts if the text has it as it is written, even as a part of another word.
    """

    sizes = range(1, 9)
    usual = (4,)
    measured = ("grammar",)

    def __init__(self, kind: str):
        self.name = f"words_{kind}"
        self.kind = kind

    def draw(self, rng, size):
        if self.kind == "easy":
            group = THEMES[rng.integers(len(THEMES))]
            chosen = [group[i] for i in rng.choice(len(group), size, replace=False)]
        else:
            groups = FIELDS if self.kind == "hard" else THEMES
            picked = [groups[i] for i in rng.choice(len(groups), size, replace=False)]
            chosen = [group[rng.integers(len(group))] for group in picked]
        named = " and ".join(part for part in (", ".join(chosen[:-1]), chosen[-1]) if part)
        text = f"Write one sentence that makes sense and has in it: {named}. Answer with the sentence and nothing else."
        return Question(self.name, text, f"Here are {named}.", tuple(chosen))

    def factors(self, question, text, tools):
        inside = {"words": float(all(word in text for word in question.given))}
        return inside | _grammar(text, tools)


class Paraphrase(Task):
    """A sentence in other words: few of its own (1 - BLEU), the same meaning (BERTScore), no fault of grammar."""

    name = "paraphrase"
    measured = ("bleu", "bert_score", "grammar")

    def draw(self, rng, size):
        sentence, other = _filled(rng, SENTENCES)
        text = f"Say this in other words. Answer with one sentence and nothing else.\n{sentence}"
        return Question(self.name, text, other, sentence)

    def factors(self, question, text, tools):
        if not text.strip():
            return {"other_words": 0.0} if "bleu" in tools else {}
        found = {"other_words": 1 - tools["bleu"](text, question.given)} if "bleu" in tools else {}
        if "bert_score" in tools:
            found["meaning"] = tools["bert_score"](text, question.given)
        return found | _grammar(text, tools)


class Summarize(Task):
    """The summary of a conversation: ROUGE-L against a reference, no fault of grammar."""

    name = "summarize"
    measured = ("rouge_l", "grammar")

    def draw(self, rng, size):
        conversation, summary = _filled(rng, CONVERSATIONS)
        text = f"Sum up this conversation in one or two sentences. Answer with them and nothing else.\n{conversation}"
        return Question(self.name, text, summary)

    def factors(self, question, text, tools):
        found = {"rouge_l": tools["rouge_l"](text, question.answer)} if "rouge_l" in tools else {}
        return found | _grammar(text, tools)


def _grammar(text: str, tools) -> dict[str, float]:
    return {"grammar": tools["grammar"](text)} if "grammar" in tools else {}


def _filled(rng: np.random.Generator, pairs: tuple[tuple[str, str], ...]) -> tuple[str, str]:
    """Both texts of one of the pairs, with the same words in their places."""
    one = lambda items: items[rng.integers(len(items))]
    pair = one(pairs)
    who, friend, third = (words.NAMES[i] for i in rng.choice(len(words.NAMES), 3, replace=False))
    filled = {
        "who": who,
        "friend": friend,
        "third": third,
        "city": one(words.CITIES),
        "color": one(words.COLORS),
        "thing": one(words.THINGS),
        "day": one(words.DAYS),
        "job": one(words.JOBS),
        "place": one(words.PLACES),
        "animal": one(words.ANIMALS),
        "hour": int(rng.integers(5, 12)),
    }
    sentence, other = (text.format(**filled) for text in pair)
    return sentence, other
