"""Translation into and out of an invented language, and stories in it, which have many right answers."""

from specjax.about import About
from specjax.tasks.base import Family, Question, same_words
from specjax.tasks.velan import DICTIONARY, NOUNS, draw_clause, english, read, velan

SIZES = {1: (2, 2), 2: (3, 4), 3: (5, 7)}
"""The fewest and most clauses, by level."""
ASKS = {
    "into": (
        "Translate into Velan: {text}",
        "How do you say this in Velan? {text}",
        "Say it in Velan.\n {text}",
        "English: {text}\n Velan:",
        "{text}\n Write this in Velan.",
        "Put these words into Velan. {text}",
    ),
    "out": (
        "Translate into English: {text}",
        "What does this Velan text mean? {text}",
        "Say it in English.\n {text}",
        "Velan: {text}\n English:",
        "{text}\n Write this Velan text in English.",
        "Put this Velan into English. {text}",
    ),
    "story": (
        "Write a story in Velan of {n} sentences that speaks of the {words}.",
        "Tell something in Velan about the {words}, in {n} sentences.",
        "Make up {n} sentences in Velan. Speak of the {words}.",
        "In Velan, {n} sentences about the {words}, please.",
        "Invent a short text of {n} sentences in Velan with the {words} in it.",
        "I want to read {n} sentences of Velan about the {words}.",
    ),
}


class Translate(Family):
    """English to Velan, Velan to English, or a story."""

    about = About("translate", "into and out of an invented language, and stories in it", "-")
    asks = "knowledge"

    def draw(self, rng, level):
        count = rng.integers(SIZES[level][0], SIZES[level][1] + 1)
        if rng.chance(0.2):
            return "story", count, tuple(sorted(rng.sample(NOUNS, 2 if level < 3 else 3)))
        sentences = []
        while (left := count - sum(map(len, sentences))) > 0:
            sentences.append(tuple(draw_clause(rng) for _ in range(2 if left > 1 and rng.chance(0.3) else 1)))
        return "text", count, tuple(sentences)

    def key(self, content):
        kind, count, about = content
        return f"story {count} {' '.join(about)}" if kind == "story" else velan(about)

    def write(self, rng, level, content):
        kind, count, about = content
        way = kind if kind == "story" else rng.choice(("into", "out"))
        form = rng.integers(len(ASKS[way]))
        if way == "story":
            nouns = rng.shuffled([*about, *(rng.choice(about) for _ in range(count - len(about)))])
            answer = velan(tuple((draw_clause(rng, noun),) for noun in nouns))
            words = f"{', the '.join(about[:-1])} and the {about[-1]}"
            prompt = ASKS[way][form].format(n=count, words=words)
        else:
            texts = velan(about), english(about)
            answer, text = texts if way == "into" else texts[::-1]
            prompt = ASKS[way][form].format(text=text)
        given = (way, count, about if way == "story" else ())
        return Question(self.name, level, prompt, (answer,), self.key(content), f"{way}-{form}", given=given)

    def check(self, question, text):
        way, count, nouns = question.given
        if way != "story":
            return same_words(question, text)
        try:
            sentences = read(text)
        except ValueError:
            return False
        said = {noun.word for sentence in sentences for clause in sentence for noun in (clause.subject, clause.object)}
        return len(sentences) == count == len({*sentences}) and {*nouns} <= said


def dictionary() -> dict[str, str]:
    """Velan's words with their English meanings."""
    return {word: meaning for words in DICTIONARY.values() for meaning, word in words.items()}
