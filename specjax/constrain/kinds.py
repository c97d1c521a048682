"""The kinds of constraints: what each serves, where it is followed, and what it guarantees."""

import dataclasses

from specjax.constrain.texts import FORMATS
from specjax.constrain.words import KNOWN, OF_TYPE

GUARANTEES = {
    "every text": "every text is in the language, and a limit too short for that is an error before the work",
    "ended text": "a text that ends by itself is in the language; one that its limit cuts is the beginning of such a text",
}
"""What holds of the texts under a constraint."""
DISTRIBUTIONS = {
    "local": "each token has the model's distribution, renormalised over what may stand at its place",
    "guided": "each token has the model's probability times that with which a hidden Markov model completes the text after "
    "it, renormalised; the nearer the model is to that one, the nearer to its distribution given the language",
    "consistent": "the more particles, the nearer to the model's distribution given that the text is in the language",
    "converging": "the more texts were drawn before, the nearer to the model's distribution given the language",
}
"""How texts under a constraint are distributed, which the way to decode decides; all kinds have all of them."""
PLACES = {
    "device": "a table, which no step asks the host about; diffusion models follow it too",
    "host": "a matcher, which every step asks once; for diffusion models, the table of `nested`",
}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of constraint.

    Attributes:
      summary: what every text is.
      forms: how a line names it.
      objects: how JSON or Python names it.
      values: the types of such a value.
      place: a key of `PLACES`.
      guarantee: a key of `GUARANTEES`.
      serves: which of its languages are followed.
      source: the paper or origin.
    """

    summary: str
    forms: tuple[str, ...]
    objects: tuple[str, ...]
    values: tuple[type, ...]
    place: str
    guarantee: str
    serves: str
    source: str


_WORDS = [word for words in OF_TYPE.values() for word in words]
_OTHERS = sorted(KNOWN - {*_WORDS} - {"type"})
KINDS = {
    "json": Kind(
        "a JSON value that is valid under a JSON Schema", ("json:FILE", "json:{...}"), ('{"json": {...}}',), (dict,), "device",
        "every text", f"keywords of draft 2020-12: type, {', '.join([*_OTHERS, *_WORDS])}; formats: {', '.join(FORMATS)}",
        "arXiv:2307.09702",
    ),
    "regex": Kind(
        "a match of the whole expression", ("regex:EXPRESSION",), ('{"regex": "..."}',), (str,), "device", "every text",
        "the syntax of Rust's crate regex, without looking around", "arXiv:2307.09702",
    ),
    "choice": Kind(
        "one of several texts", ("choice:A|B|C",), ('{"choice": ["A", "B", "C"]}',), (list,), "device", "every text",
        "any texts that the tokens can write", "arXiv:2307.09702",
    ),
    "grammar": Kind(
        "in the language of a context-free grammar, or valid under a JSON Schema of any depth", ("grammar:FILE",),
        ('{"grammar": "start: ..."}', '{"grammar": {...}}'), (str, dict), "host", "ended text",
        "llguidance's kind of Lark, and the keywords of JSON Schema that it reads", "llguidance",
    ),
    "nested": Kind(
        "in the language of a context-free grammar whose rules come back to themselves three times at most",
        ("nested:FILE",), ('{"nested": "start: ..."}',), (str,), "device", "every text",
        "the part of llguidance's kind of Lark that the package lark reads too", "this library, after arXiv:2508.10111",
    ),
}  # fmt: skip
"""The kinds by the word with which a line begins."""
