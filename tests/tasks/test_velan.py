"""The invented language: no word means two things, what is written is read again, and stories are checked by the grammar."""

import pytest

from specjax.tasks import LEVELS, Rng, check, generate
from specjax.tasks.velan import DICTIONARY, draw_clause, english, read, velan


def test_no_word_means_two_things():
    words = [word for kind in DICTIONARY.values() for word in kind.values()]
    assert len({*words, "ta", "su", "ne", "mi", "po", "ke"}) == len(words) + 6
    meanings = [meaning for kind in DICTIONARY.values() for meaning in kind]
    assert len({*meanings}) >= len(meanings) - 1  # to watch, a watch


def test_what_is_written_is_read_again():
    rng = Rng("velan")
    for _ in range(300):
        sentences = tuple(tuple(draw_clause(rng) for _ in range(1 + rng.integers(2))) for _ in range(3))
        assert read(velan(sentences)) == sentences
    texts = {}
    for _ in range(3000):
        clause = ((draw_clause(rng),),)
        assert texts.setdefault(english(clause), clause) == clause  # English is as clear


@pytest.mark.parametrize(
    "text", ("", "ta.", "ta sorur gumi", "sorur gumi kudi.", "ta sorur gumi kudi ke.", "ta gumi sorur kudi.")
)
def test_what_is_no_velan(text):
    with pytest.raises(ValueError):
        read(text)


@pytest.mark.parametrize("level", LEVELS)
def test_translations_and_stories(level):
    made = generate("translate", level, 8, 60)
    ways = {question.given[0] for question in made}
    assert ways == {"into", "out", "story"}
    for question in made:
        way, count, nouns = question.given
        words = question.answers[0].split()
        dropped = [" ".join(words[:i] + words[i + 1 :]) for i in range(len(words))]
        if way != "story":
            assert not any(check(question, text) for text in dropped)
            continue
        sentences = question.answers[0].split(". ")
        assert check(question, ". ".join(sentences[::-1]).replace(".. ", ". ").rstrip(".") + ".")  # in another order
        assert not check(question, f"{question.answers[0]} ta sorur gumi kudi.")  # one sentence too many
        assert not check(question, " ".join([sentences[0].rstrip(".") + "."] * count))  # nothing but one sentence
