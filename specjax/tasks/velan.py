"""Velan, an invented language: its dictionary and grammar never change, so a model can learn them.

A clause is a particle of time (`ta` past, `su` future), `ne` if negated, the verb, its subject, its object, and `po`
with a place. `mi` precedes a plural noun, and an adjective follows its noun. `ke` joins two clauses, and a full stop
ends them.
"""

import dataclasses

from specjax.tasks.words import ADJECTIVES, ANIMALS, PLACES, THINGS

_PASTS = (
    "see saw find found carry carried follow followed hide hid paint painted watch watched push pushed take took "
    "want wanted forget forgot guard guarded bring brought love loved"
).split()
VERBS: dict[str, str] = dict(zip(_PASTS[::2], _PASTS[1::2], strict=True))
"""English verbs and their past forms."""
PLURALS = {"wolf": "wolves", "mouse": "mice", "knife": "knives", "fox": "foxes", "box": "boxes"}
SAME = ("sheep", "deer")
NOUNS = tuple(word for word in (*ANIMALS, *THINGS) if word not in SAME)
_SYLLABLES = [consonant + vowel for consonant in "bdgklmnprstvz" for vowel in "aeiou"]


def _roots(words: tuple[str, ...], turn: int, ending: str) -> dict[str, str]:
    n = len(_SYLLABLES)
    return {
        word: _SYLLABLES[(7 * i + turn) % n] + _SYLLABLES[(11 * i + 3 * turn + 5) % n] + ending
        for i, word in enumerate(words)
    }


DICTIONARY = {
    "noun": _roots(NOUNS, 0, ""),
    "verb": _roots(tuple(VERBS), 20, "r"),
    "adjective": _roots(ADJECTIVES, 40, "s"),
    "place": _roots(PLACES, 50, "n"),
}
"""The Velan word for each English word, by kind."""
_ENGLISH = {kind: {word: english for english, word in words.items()} for kind, words in DICTIONARY.items()}


@dataclasses.dataclass(frozen=True)
class Noun:
    """A noun, whether there are several, and its adjective or None."""

    word: str
    many: bool
    adjective: str | None


@dataclasses.dataclass(frozen=True)
class Clause:
    """Who did what to whom; English words. `place` may be None."""

    future: bool
    denied: bool
    verb: str
    subject: Noun
    object: Noun
    place: str | None


Sentence = tuple[Clause, ...]


def draw_clause(rng, subject: str | None = None) -> Clause:
    """A random clause, with a given subject if there is one."""

    def noun(word=None):
        return Noun(word or rng.choice(NOUNS), rng.chance(0.3), rng.choice(ADJECTIVES) if rng.chance(0.5) else None)

    place = rng.choice(PLACES) if rng.chance(0.5) else None
    return Clause(rng.chance(0.4), rng.chance(0.25), rng.choice(tuple(VERBS)), noun(subject), noun(), place)


def english(sentences: tuple[Sentence, ...]) -> str:
    """Sentences in English.

    >>> english(((Clause(False, True, "see", Noun("fox", True, "old"), Noun("cup", False, None), "barn"),),))
    'The old foxes did not see the cup in the barn.'
    """
    texts = (", and ".join(map(_english_clause, sentence)) for sentence in sentences)
    return " ".join(f"{text[0].upper()}{text[1:]}." for text in texts)


def _english_clause(clause: Clause) -> str:
    if clause.denied:
        verb = f"{'will' if clause.future else 'did'} not {clause.verb}"
    else:
        verb = f"will {clause.verb}" if clause.future else VERBS[clause.verb]
    place = f" in the {clause.place}" if clause.place else ""
    return f"{_english_noun(clause.subject)} {verb} {_english_noun(clause.object)}{place}"


def _english_noun(noun: Noun) -> str:
    word = PLURALS.get(noun.word, f"{noun.word}s") if noun.many else noun.word
    return f"the {noun.adjective} {word}" if noun.adjective else f"the {word}"


def velan(sentences: tuple[Sentence, ...]) -> str:
    """Sentences in Velan.

    >>> velan(((Clause(False, True, "see", Noun("fox", True, "old"), Noun("cup", False, None), "barn"),),))
    'ta ne labar mi bada razas zedo po taman.'
    """
    return " ".join(" ke ".join(map(_velan_clause, sentence)) + "." for sentence in sentences)


def _velan_clause(clause: Clause) -> str:
    words = ["su" if clause.future else "ta", *(["ne"] if clause.denied else []), DICTIONARY["verb"][clause.verb]]
    for noun in (clause.subject, clause.object):
        words += ["mi"] if noun.many else []
        words.append(DICTIONARY["noun"][noun.word])
        words += [DICTIONARY["adjective"][noun.adjective]] if noun.adjective else []
    return " ".join([*words, *(["po", DICTIONARY["place"][clause.place]] if clause.place else [])])


def read(text: str) -> tuple[Sentence, ...]:
    """The sentences of a text in Velan.

    Raises:
      ValueError: if it is not Velan.
    """
    text = " ".join(text.split())
    if not text.endswith("."):
        raise ValueError("a text ends with a full stop")
    return tuple(
        tuple(_read_clause(clause.split()) for clause in f" {sentence} ".split(" ke "))
        for sentence in text[:-1].split(".")
    )


def _read_clause(words: list[str]) -> Clause:
    left = words[::-1]

    def took(word: str) -> bool:
        return bool(left and left[-1] == word and left.pop())

    def word_of(kind: str) -> str | None:
        return _ENGLISH[kind][left.pop()] if left and left[-1] in _ENGLISH[kind] else None

    def needed(kind: str) -> str:
        if (word := word_of(kind)) is None:
            raise ValueError(f"a {kind} is missing in {' '.join(words)!r}")
        return word

    def noun() -> Noun:
        many = took("mi")
        return Noun(needed("noun"), many, word_of("adjective"))

    future = took("su")
    if not future and not took("ta"):
        raise ValueError("a clause begins with ta or su")
    denied = took("ne")
    clause = Clause(future, denied, needed("verb"), noun(), noun(), needed("place") if took("po") else None)
    if left:
        raise ValueError(f"too many words in {' '.join(words)!r}")
    return clause
