"""Conversion of a sentence to JSON under a stated schema.

Strings begin with a space, so that a copied word is the same token on both sides.
"""

import json

from specjax.about import About
from specjax.tasks.base import Family, Question
from specjax.tasks.words import CITIES, COLORS, DAYS, FRUITS, JOBS, NAMES, THINGS

# field: type, values, phrases
Field = tuple[str, str, tuple[str, ...]]
FIELDS: dict[str, dict[str, Field]] = {
    "person": {
        "name": ("string", "names", ()),
        "age": ("integer", "18:90", ("is {} years old", "has the age {}")),
        "city": ("string", "cities", ("lives in {}", "has a home in {}")),
        "job": ("string", "jobs", ("works as a {}", "earns money as a {}")),
        "married": ("boolean", "", ("is married|is not married", "has a partner|has no partner")),
        "color": ("string", "colors", ("likes the color {}", "always wears {}")),
        "children": ("integer", "2:9", ("has {} children", "is the parent of {} children")),
        "fruits": ("array of strings", "fruits", ("likes to eat {}", "often buys {}")),
    },
    "order": {
        "customer": ("string", "names", ()),
        "item": ("string", "things", ("wants a {}", "orders the {}")),
        "count": ("integer", "2:60", ("asks for {} pieces", "needs {} of them")),
        "color": ("string", "colors", ("takes it in {}", "chooses {} as the color")),
        "city": ("string", "cities", ("has it sent to {}", "waits for it in {}")),
        "day": ("string", "days", ("needs it on {}", "expects it by {}")),
        "gift": ("boolean", "", ("says that it is a gift|says that it is no gift",)),
        "extras": ("array of strings", "things", ("adds {}", "also takes {}")),
    },
    "trip": {
        "traveler": ("string", "names", ()),
        "from": ("string", "cities", ("starts in {}", "sets out from {}")),
        "to": ("string", "cities", ("goes to {}", "has a ticket to {}")),
        "day": ("string", "days", ("leaves on {}", "travels on {}")),
        "hour": ("integer", "1:24", ("leaves at hour {}", "takes the train of hour {}")),
        "seat": ("integer", "1:99", ("sits in seat {}", "has seat number {}")),
        "window": ("boolean", "", ("sits at a window|does not sit at a window",)),
        "bags": ("array of strings", "things", ("carries {}", "brings {}")),
    },
}
VALUES = {
    "names": NAMES,
    "cities": CITIES,
    "jobs": JOBS,
    "colors": COLORS,
    "fruits": FRUITS,
    "things": THINGS,
    "days": DAYS,
}
SCHEMAS = ("Keys: {typed}.", "Schema: {typed}.", "The object has the keys {typed}.", "Use exactly these keys: {typed}.")
ASKS = (
    "{schema}\n Text: {text}\n Write the JSON.",
    "Turn the text into JSON. {schema}\n {text}",
    "{text}\n Give this as JSON. {schema}",
    "Read this: {text}\n Fill in the schema with what it says. {schema}",
    "Extract a JSON value from the text. {schema}\n Text: {text}",
    "Write one line of JSON for the following text. {schema}\n {text}",
    "{schema}\n What is the JSON for this? {text}",
)


class Json(Family):
    """One record, or at level 3 two or three of a kind."""

    about = About("json", "a sentence to JSON under a stated schema", "-")
    asks = "copying"

    def draw(self, rng, level):
        kind = rng.choice(tuple(FIELDS))
        first, *others = FIELDS[kind]
        count = {1: 3, 2: rng.integers(4, 6), 3: rng.integers(3, 5)}[level]
        chosen = [first, *sorted(rng.sample(others, count), key=others.index)]
        number = rng.integers(2, 4) if level == 3 else 1
        names = rng.sample(VALUES[FIELDS[kind][first][1]], number)
        records = tuple((names[i], *(_value(rng, FIELDS[kind][field]) for field in chosen[1:])) for i in range(number))
        return kind, tuple(chosen), records

    def key(self, content):
        kind, fields, records = content
        rows = (sorted(zip(fields, map(str, record), strict=True)) for record in records)
        return f"{kind} {sorted(map(str, rows))}"

    def write(self, rng, level, content):
        kind, fields, records = content
        typed = ", ".join(f'"{field}" ({FIELDS[kind][field][0]})' for field in fields)
        many = "A list of objects in the order of the text. " if len(records) > 1 else ""
        text = " ".join(_sentence(rng, kind, fields, record) for record in records)
        objects = [dict(zip(fields, record, strict=True)) for record in records]
        answer = written(objects if many else objects[0])
        schema, form = rng.choice(SCHEMAS), rng.integers(len(ASKS))
        prompt = ASKS[form].format(schema=many + schema.format(typed=typed), text=text)
        return Question(self.name, level, prompt, (answer,), self.key(content), f"{kind}-{form}")

    def check(self, question, text):
        try:
            return _typed(read(text)) == _typed(read(question.answers[0]))
        except (ValueError, RecursionError):
            return False

    def constraint(self, question):
        """The stated keys in their order, with values of the stated types. Spaces stand where answers have them, or not."""
        value = read(question.answers[0])
        return {"regex": f" ?{_form(value[:1] if isinstance(value, list) else value)}"}

    def obeys(self, question, text):
        try:
            value, answer = read(text), read(question.answers[0])
        except (ValueError, RecursionError):
            return False
        if not isinstance(answer, list):
            return _types(value) == _types(answer)
        return isinstance(value, list) and bool(value) and all(_types(own) == _types(answer[0]) for own in value)


def _form(value) -> str:
    """The expression of values with the same keys and types; of a list, with at least one item."""
    if isinstance(value, dict):
        items = ", ?".join(f'"{key}": ?{_form(own)}' for key, own in value.items())
        return rf"\{{ ?{items} ?\}}"
    if isinstance(value, list):
        return rf"\[ ?{_form(value[0])}(?:, ?{_form(value[0])})* ?\]"
    if isinstance(value, bool):
        return "(?:true|false)"
    return "-?(?:0|[1-9][0-9]*)" if isinstance(value, int) else r'"[^"\\\x00-\x1f]+"'


def _types(value):
    """The keys and types of a value, whatever their order; all items of a list have one."""
    if isinstance(value, dict):
        return {key: _types(own) for key, own in value.items()}
    if isinstance(value, list):
        return sorted({str(_types(own)) for own in value})
    return type(value).__name__


def _value(rng, field: Field):
    kind, values, _ = field
    if kind == "integer":
        low, high = map(int, values.split(":"))
        return rng.integers(low, high + 1)
    if kind == "boolean":
        return rng.chance(0.5)
    return (
        tuple(rng.sample(VALUES[values], rng.integers(2, 4)))
        if kind.startswith("array")
        else rng.choice(VALUES[values])
    )


def _sentence(rng, kind, fields, record) -> str:
    said = []
    for field, value in zip(fields[1:], record[1:], strict=True):
        phrase = rng.choice(FIELDS[kind][field][2])
        if isinstance(value, bool):
            said.append(phrase.split("|")[not value])
        else:
            said.append(phrase.format(_and(value) if isinstance(value, tuple) else value))
    order = rng.shuffled(said)
    return f"{record[0]} {_and(tuple(order))}."


def _and(words: tuple[str, ...]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]


def written(value) -> str:
    """A value as JSON in one line; string values begin with a space.

    >>> written({"name": "Ada", "age": 30})
    '{ "name": " Ada", "age": 30 }'
    """
    if isinstance(value, dict):
        return "{ " + ", ".join(f'"{key}": {written(item)}' for key, item in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[ " + ", ".join(map(written, value)) + " ]"
    return json.dumps(f" {value}" if isinstance(value, str) else value)


def read(text: str, longest: int = 4000):
    """The value of a JSON text; spaces around a string do not count.

    Raises:
      ValueError: if it is not JSON, repeats a key, has a number that JSON lacks, or is too long.
    """
    if len(text) > longest:
        raise ValueError("too long")
    return json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)


def _object(pairs):
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key stands twice")
    return dict(pairs)


def _no_constant(word):
    raise ValueError(f"{word} is no JSON")


def _typed(value):
    """A value that equals another only if their types are equal: 1, 1.0 and true differ."""
    if isinstance(value, dict):
        return ("object", frozenset((key, _typed(item)) for key, item in value.items()))
    if isinstance(value, list):
        return ("array", tuple(map(_typed, value)))
    return (type(value).__name__, value.strip() if isinstance(value, str) else value)
