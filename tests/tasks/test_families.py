"""Every family and level: the same questions by seed, right answers pass, spoiled ones fail, and the two sides stay apart."""

import collections
import functools
import hashlib
import json
import random
import re

import pytest

from specjax.tasks import FAMILIES, LEVELS, Mixture, Question, Rng, check, generate
from specjax.tasks.families import fill, lists, retrieve
from specjax.tasks.generate import family_of, keys

EACH = [(family, level) for family in FAMILIES for level in LEVELS]
NAMES = "math json code edit qa retrieve lists translate fill judge".split()


@pytest.fixture(scope="module")
def questions():
    """Some of every family and level, made once."""
    return {(family, level): generate(family, level, 11, 30) for family, level in EACH}


@pytest.fixture(scope="module")
def trained():
    """A stretch of the training stream."""
    mixture = Mixture(seed=4)
    return [mixture[i] for i in range(6000)]


def test_the_families_are_those_that_the_package_exports():
    assert list(FAMILIES) == NAMES


@pytest.mark.parametrize(("family", "level"), EACH)
def test_a_seed_decides_the_questions(questions, family, level):
    made = questions[family, level]
    assert generate(family, level, 11, 10) == made[:10] and len({q.prompt for q in made}) == 30
    other = generate(family, level, 12, 10)
    assert not {q.prompt for q in other} & {q.prompt for q in made[:10]}
    assert all(q.family == family and q.level == level for q in made)


def test_draws_are_the_documented_generator():
    """The first numbers that sha256 and Mersenne Twister give, worked out apart from `Rng`."""
    raw = random.Random(int.from_bytes(hashlib.sha256(b"a\0001").digest()[:8], "big"))
    rng = Rng("a", 1)
    assert [rng.integers(1000) for _ in range(5)] == [int(raw.random() * 1000) for _ in range(5)]
    assert sorted(rng.permutation(30)) == list(range(30)) and len({*rng.sample(range(9), 9)}) == 9
    assert {rng.integers(2, 5) for _ in range(100)} == {2, 3, 4}
    with pytest.raises(ValueError, match="cannot draw 3 of 2"):
        rng.sample("ab", 3)


@pytest.mark.parametrize(("family", "level"), EACH)
def test_right_answers_pass_and_broken_ones_fail(questions, family, level):
    made = questions[family, level]
    for question, other in zip(made, made[1:] + made[:1], strict=True):
        (answer,) = question.answers
        assert check(question, answer) and check(question, f"  {answer}\n")
        words = answer.split(" ")
        for broken in ("", answer[: len(answer) // 2], f"{answer} {answer}", f"{answer} and", other.answers[0]):
            assert not check(question, broken) or broken == answer, (question.prompt, broken)
        assert not check(question, " ".join(words[: len(words) // 3] + words[2 * len(words) // 3 + 1 :]))


EXACT = {"edit", "qa", "retrieve", "judge", "fill"}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("family", sorted(EXACT))
def test_exact_answers_bear_no_change(questions, family, level):
    rng = Rng("spoil", family)
    for question in questions[family, level]:
        words = question.answers[0].split()
        at = rng.integers(len(words))
        assert not check(question, " ".join(words[:at] + words[at + 1 :]))
        i, j = rng.sample(range(len(words)), 2)
        swapped = [words[{i: j, j: i}.get(k, k)] for k in range(len(words))]
        assert check(question, " ".join(swapped)) == (swapped == words)
        assert not check(question, changed_digit(rng, question.answers[0]) or "")


def changed_digit(rng, text):
    """The text with one of its digits changed, or None where it has none."""
    places = [found.start() for found in re.finditer("[0-9]", text)]
    if not places:
        return None
    at = rng.choice(places)
    return f"{text[:at]}{(int(text[at]) + 1 + rng.integers(9)) % 10}{text[at + 1 :]}"


@pytest.mark.parametrize("level", LEVELS)
def test_math_checks_every_step(questions, level):
    rng = Rng("math")
    for question in questions["math", level]:
        answer = question.answers[0]
        head, _, result = answer.rpartition("answer is ")
        for _ in range(5):
            spoiled = changed_digit(rng, answer)
            labels = re.compile("Step [0-9]+|start.*? (with|at) [0-9]+")
            assert not check(question, spoiled) or labels.sub("", spoiled) == labels.sub("", answer)
        assert not check(question, f"The answer is {result}")  # without a step
        equation = re.search(r"[0-9]+ [-+*/] [0-9]+ = [0-9]+", answer)[0]
        assert not check(question, answer.replace(equation, "", 1))
        assert not check(question, answer.replace(equation, f"{equation}. {equation}", 1))
        assert not check(question, answer.replace(equation, f"7 + 7 = 14. {equation}", 1))
        assert not check(question, answer.replace(equation, f"{equation}. That is 8", 1))
    question = Question("math", 1, "", ("3 * 4 = 12. The answer is 12.",), "", given=((3, "*", 4, 12),))
    assert check(question, "Well, 4 * 3 = 12. The answer is 12") and not check(
        question, "3 * 4 = 12. The answer is 13."
    )
    assert not check(question, "3 * 4 = 12. The answer is ١٢.")


def test_steps_are_true(questions):
    for level in LEVELS:
        for question in questions["math", level]:
            for a, sign, b, result in question.given:
                assert {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[sign] == result and 0 <= result <= (30, 60, 99)[
                    level - 1
                ]


def test_judge_is_balanced_and_tells_the_first_mistake():
    made = [q for level in LEVELS for q in generate("judge", level, 2, 120)]
    wrong = [q for q in made if q.given != "right"]
    assert 0.42 < len(wrong) / len(made) < 0.58
    for question in made:
        shown = re.findall(r"Step ([0-9]+): ([0-9]+) (.) ([0-9]+) = ([0-9]+)", question.prompt)
        first = re.search(r"Step ([0-9]+) is wrong: it should be ([0-9]+) (.) ([0-9]+) = ([0-9]+)", question.answers[0])
        held = re.findall(r"Step ([0-9]+) holds: ([0-9]+) (.) ([0-9]+) = ([0-9]+)", question.answers[0])
        assert held == shown[: len(held)] and (first is None) == (question.given == "right")
        assert first is None or (first.groups() != shown[len(held)] and int(first[1]) == len(held) + 1)
        flipped = "The solution is right." if first else "The solution goes wrong at step 1."
        assert not check(question, re.sub(r"The solution [^.]*\.$", flipped, question.answers[0]))
    assert len({q.given for q in wrong}) > 4


def test_judge_and_math_share_their_meanings(trained):
    held = {q.key for level in LEVELS for q in generate("math", level, 0, 60)}
    seen = {q.key for q in trained if q.family in ("math", "judge")}
    assert held and seen and not held & seen


@pytest.mark.parametrize("level", LEVELS)
def test_json_states_a_form(questions, level):
    """Its texts obey it, whatever their values; other keys and types do not. Other families state none."""
    family = family_of("json")
    for question in questions["json", level]:
        (answer,), pattern = question.answers, family.constraint(question)["regex"]
        compact, other = json.dumps(json.loads(answer), separators=(",", ":")), re.sub(r"[0-9]", "7", answer)
        for text in (answer, f" {answer}", compact, other):
            assert re.fullmatch(pattern, text) and family.obeys(question, text)
        for text in (answer[:-1], re.sub(r'[a-z]+":', 'x":', answer, count=1), "null", "[]", ""):
            assert not re.fullmatch(pattern, text) and not family.obeys(question, text)
    (question,) = generate("math", level, 0, 1)
    assert family_of("math").constraint(question) is family_of("math").obeys(question, "1") is None


@pytest.mark.parametrize("level", LEVELS)
def test_json_counts_values_types_and_keys(questions, level):
    for question in questions["json", level]:
        answer = question.answers[0]
        value = json.loads(answer)
        assert check(question, json.dumps(value, indent=1))  # other white space
        assert check(question, answer.replace('" ', '"'))  # strings without their space
        first = value[0] if isinstance(value, list) else value
        reversed_keys = dict(reversed(first.items()))
        turned = [reversed_keys, *value[1:]] if isinstance(value, list) else reversed_keys
        assert check(question, json.dumps(turned))
        for key, item in first.items():
            for other in (None, str(item) + "x", [item], not item):
                spoiled = {**first, key: other}
                assert not check(question, json.dumps([spoiled, *value[1:]] if isinstance(value, list) else spoiled))
            less = {name: held for name, held in first.items() if name != key}
            assert not check(question, json.dumps([less, *value[1:]] if isinstance(value, list) else less))
        assert not check(question, answer.replace("{", '{ "more": 1,', 1))
        assert not check(question, answer.replace("{", '{ "name": 1,', 1)) and not check(question, f"JSON: {answer}")
    question = Question("json", 1, "", ('{ "a": 1 }',), "")
    for text in (
        '{"a": true}',
        '{"a": 1.0}',
        '{"a": "1"}',
        '{"a": 1, "a": 1}',
        '{"a": NaN}',
        "[" * 3000,
        '{"a": 1' + "0" * 3990,
    ):
        assert not check(question, text)


@pytest.mark.parametrize("level", LEVELS)
def test_lists_take_every_right_answer(questions, level):
    for question in questions["lists", level]:
        name, items, word, style, answer = question.given
        write = functools.partial(lists.written, style=style)
        assert not check(question, write((*answer, answer[0]))) and not check(question, write(answer[:-1]))
        other = tuple(answer[i] for i in (1, 0, *range(2, len(answer))))
        assert check(question, write(other)) == (name == "shuffle" and other != items)
        assert check(question, write(items)) == (answer == items)
        if name == "insert_random":
            assert check(question, write((word, *items))) and check(question, write((*items, word)))
        if name == "remove_random":
            assert check(question, write(items[1:])) and check(question, write(items[:-1]))


def solutions(rows, symbols):
    """How many latin squares have these symbols where there is no hole, by trying all."""
    holes = [(i, j) for i, row in enumerate(rows) for j, symbol in enumerate(row) if symbol == "_"]
    if not holes:
        return 1
    choices = lambda i, j: symbols - {*rows[i], *(row[j] for row in rows)}
    i, j = min(holes, key=lambda hole: len(choices(*hole)))
    return sum(
        solutions(
            [[symbol if (a, b) == (i, j) else c for b, c in enumerate(row)] for a, row in enumerate(rows)], symbols
        )
        for symbol in choices(i, j)
    )


def test_latin_squares_have_one_solution(questions):
    square = ((0, 1), (1, 0))
    assert fill.solvable(square, {(0, 0)}) and not fill.solvable(square, {(i, j) for i in range(2) for j in range(2)})
    for level, n in zip(LEVELS, (4, 4, 5), strict=True):
        for question in questions["fill", level]:
            if question.form == "square":
                rows = [row.split() for row in question.answers[0].split("/")]
                assert (
                    all(len({*line}) == n for line in (*rows, *zip(*rows, strict=True)))
                    and question.prompt.count("_") >= n
                )
                first, *middle, last = question.prompt.split(" / ")
                shown = [first.split()[-n:], *(row.split() for row in middle), last.split()[:n]]
                assert len(shown) == n and solutions(shown, {*rows[0]}) == 1


def test_gaps_lie_in_their_prompts(questions):
    found = [q for level in LEVELS for q in questions["fill", level] if q.infill]
    assert len(found) > 30
    assert all(f"{q.infill[0]} ____ {q.infill[1]}" in q.prompt and q.answers[0] not in q.prompt for q in found)


@pytest.mark.slow
def test_training_never_sees_what_is_held_out(trained):
    held = [q for family, level in EACH for seed in (0, 1) for q in generate(family, level, seed, 20)]
    known = keys(held)
    assert len(known) > 600 and not known & keys(trained)
    cheap = Mixture(9, tuple(name for name in NAMES if name not in ("code", "retrieve")))  # a longer stretch
    assert not known & keys([cheap[i] for i in range(14_000)])
    assert not known & keys([q for family, level in EACH for q in generate(family, level, 0, 10, "train")])
    assert not {q.prompt for q in held} & {q.prompt for q in trained}


def test_the_split_is_a_sixteenth_of_the_meanings():
    for family in FAMILIES.values():
        rng = Rng("split", family.name)
        drawn = [family.is_held_out(family.draw(rng, 1 + i % 3)) for i in range(1200)]
        assert 0.03 < sum(drawn) / len(drawn) < 0.1, family.name


def test_training_mixes_families_levels_and_wordings(trained):
    families = collections.Counter(q.family for q in trained)
    levels = collections.Counter(q.level for q in trained)
    assert set(families) == {*NAMES} and min(families.values()) > 500 and min(levels.values()) > 1800
    for family in NAMES:
        assert len({q.form for q in trained if q.family == family}) >= 6, family
    stream = Mixture(seed=4).stream(100)
    assert [next(stream) for _ in range(3)] == trained[100:103]  # goes on anywhere
    assert Mixture(seed=5)[0] != trained[0]
    few = Mixture(0, ("qa", "qa", "code"), (1,))
    counts = collections.Counter(few[i].family for i in range(600))
    assert set(counts) == {"qa", "code"} and counts["qa"] > 1.5 * counts["code"]


def test_lengths(questions, trained):
    answers = [retrieve.pieces(q.answers[0]) for q in trained]
    assert sum(20 <= n <= 200 for n in answers) > 0.75 * len(answers) and max(answers) <= 200
    for level, (low, high) in zip(LEVELS, ((256, 500), (420, 700), (1050, 1950)), strict=True):
        assert all(low <= retrieve.pieces(q.prompt) <= high for q in questions["retrieve", level])
    contexts = [retrieve.pieces(q.prompt) for level in LEVELS for q in questions["qa", level]]
    assert min(contexts) >= 60 and 600 < max(contexts) <= 860


def test_words_and_digits_look_the_same_wherever_they_are_copied(trained):
    """A space stands before every word of an answer that is copied: no line, quote or bracket begins with one at once."""
    for question in trained:
        if question.family != "code":
            for text in (question.prompt, *question.answers):
                assert not re.search(r"\n[^ ]", text), text
        if question.family in ("lists", "edit", "qa", "retrieve", "translate"):
            assert not re.search(r'[\[|>(]\w|" ?"|(^|\s)"\w', question.prompt + question.answers[0]), question.prompt


@pytest.mark.parametrize(
    ("wrong", "said"),
    (
        (("frob", 1, 0, 1), "unknown family 'frob'; choose math, json"),
        (("math", 4, 0, 1), "level must be one of 1, 2, 3, got 4"),
        (("math", 1, 0, -1), "count must be at least 0"),
        (("math", 1, 0, 1, "test"), "unknown split 'test'; choose train, held_out"),
    ),
)
def test_what_cannot_be_generated(wrong, said):
    with pytest.raises(ValueError, match=said):
        generate(*wrong)


def test_what_cannot_be_mixed():
    with pytest.raises(ValueError, match="unknown family 'frob'"):
        Mixture(0, ("frob",))
    with pytest.raises(ValueError, match="at least one level"):
        Mixture(0, (), ())
    with pytest.raises(IndexError, match="begins at 0"):
        Mixture()[-1]
    with pytest.raises(ValueError, match="unknown family 'frob'"):
        check(Question("frob", 1, "", ("",), ""), "")
