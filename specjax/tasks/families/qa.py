"""A question on facts in a context of about 60 to 800 tokens: quote the sentence, then the answer."""

from specjax.about import About
from specjax.tasks.base import Family, Question, same_words
from specjax.tasks.words import ANIMALS, CITIES, COLORS, FRUITS, JOBS, NAMES, PLACES, THINGS

SIZES = {1: (8, 12), 2: (12, 24), 3: (60, 112)}
"""The fewest and most sentences of the context, by level."""
# relation: values, sentences, questions about a person
Relation = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
RELATIONS: dict[str, Relation] = {
    "city": (
        CITIES,
        ("{n} lives in {v}.", "The home of {n} is in {v}."),
        ("Where does {n} live?", "What is the city of {n}?"),
    ),
    "job": (
        JOBS,
        ("{n} works as a {v}.", "The job of {n} is that of a {v}."),
        ("What is the job of {n}?", "As what does {n} work?"),
    ),
    "color": (COLORS, ("{n} always wears {v} clothes.", "The coat of {n} is {v}."), ("What color does {n} wear?",)),
    "pet": (
        ANIMALS,
        ("{n} takes care of the {v}.", "The pet of {n} is the {v}."),
        ("What animal does {n} have?", "What is the pet of {n}?"),
    ),
    "fruit": (
        FRUITS,
        ("{n} likes the taste of {v} best.", "For breakfast {n} wants one {v}."),
        ("What fruit does {n} like?",),
    ),
    "lost": (
        THINGS,
        ("{n} has lost a {v}.", "Yesterday {n} could not find the {v}."),
        ("What did {n} lose?", "What is {n} looking for?"),
    ),
    "meets": (
        PLACES,
        ("{n} spends the evenings in the {v}.", "After work {n} goes to the {v}."),
        ("Where does {n} go after work?",),
    ),
    "boss": (
        NAMES,
        ("{n} gets orders from {v}.", "The boss of {n} is {v}."),
        ("Who is the boss of {n}?", "Who gives orders to {n}?"),
    ),
    "friend": (
        NAMES,
        ("{n} plays chess with {v}.", "The best friend of {n} is {v}."),
        ("Who is the best friend of {n}?",),
    ),
}
LINKS = {"boss": "the boss of {n}", "friend": "the best friend of {n}"}
ASKS = (
    "{context}\n Question: {question} Quote the {facts}, then answer.",
    "Read the text.\n {context}\n {question} First quote the {facts}.",
    "{question} Answer from this text, and quote the {facts} that you need.\n {context}",
    "Text: {context}\n Use the text to say: {question} Quote the {facts} first.",
    "Here are some facts. {context}\n Give the {facts} needed and the answer: {question}",
    "Find the {facts} needed to answer this: {question}\n {context}",
    "{context}\n {question} Begin with the {facts} of the text.",
)


class Qa(Family):
    """A question about one fact; at levels 2 and 3 about two facts, of two people or of somebody's boss or friend."""

    about = About("qa", "questions on facts in a context: the sentences, then the answer", "-")
    asks = "copying"

    def draw(self, rng, level):
        person, other = rng.sample(NAMES, 2)
        if level == 1 or rng.chance(0.5):
            people = (person,) if level == 1 else (person, other)
            return "apart", tuple((name, *_fact(rng, rng.choice(tuple(RELATIONS)), name)) for name in people)
        relation = rng.choice([name for name in RELATIONS if name not in LINKS])
        return "linked", ((person, rng.choice(tuple(LINKS)), other), (other, *_fact(rng, relation, other)))

    def key(self, content):
        return " ; ".join(map(" ".join, content[1]))

    def write(self, rng, level, content):
        way, facts = content
        count = rng.integers(*SIZES[level])
        known = {(person, relation): value for person, relation, value in facts}
        while len(known) < count:
            person, relation = rng.choice(NAMES), rng.choice(tuple(RELATIONS))
            known.setdefault((person, relation), _fact(rng, relation, person)[1])
        told = {fact: rng.choice(RELATIONS[fact[1]][1]).format(n=fact[0], v=value) for fact, value in known.items()}
        if way == "linked":
            subject = LINKS[facts[0][1]].format(n=facts[0][0])
            question, answer = rng.choice(RELATIONS[facts[1][1]][2]).format(n=subject), facts[1][2]
        else:
            question = " ".join(rng.choice(RELATIONS[relation][2]).format(n=person) for person, relation, _ in facts)
            answer = " and ".join(value for _, _, value in facts)
        form = rng.integers(len(ASKS))
        words = {"facts": "sentence" if len(facts) == 1 else "two sentences", "question": question}
        prompt = ASKS[form].format(context=" ".join(rng.shuffled(list(told.values()))), **words)
        answer = f"{' '.join(told[fact[:2]] for fact in facts)} So the answer is {answer}."
        return Question(self.name, level, prompt, (answer,), self.key(content), f"{way}-{form}")

    def check(self, question, text):
        return same_words(question, text)


def _fact(rng, relation: str, person: str) -> tuple[str, str]:
    values = RELATIONS[relation][0]
    return relation, rng.choice([value for value in values if value != person])
