"""Texts in which keys are told and asked for: sentences by seed about people and places, and lines such as
"The key of Mara is 4271."

An answer is the whole line again, " The key of Mara is 4271.", and the end token.
"""

import dataclasses
import functools
import pathlib
import random

from tokenizers import Tokenizer

PEOPLE = (
    "Ada Anna Boris Carla Clara Daniel David Elena Emma Farid Felix Grace Greta Henry Hugo Irene Iris Jamal Jonas Karin Keiko "
    "Leo Liam Mara Mona Nina Noah Olga Oscar Pablo Paula Rosa Sam Tina Umar Vera Wendy Yusuf Zoe"
).split()
PLACES = (
    "Accra Athens Berlin Boston Cairo Dallas Delhi Denver Dublin Hanoi Lima Lisbon Madrid Nairobi Oslo Paris Prague Quito Rome "
    "Seoul Sydney Tokyo Vienna Warsaw"
).split()
WORDS = {
    "who": PEOPLE,
    "where": PLACES,
    "job": "baker cook doctor driver farmer guard judge lawyer nurse painter pilot singer tailor teacher writer".split(),
    "thing": "bag ball basket book box candle clock coat cup drum lamp letter mirror rope table counter".split(),
    "food": "apple banana cherry grape kiwi lemon lime mango melon orange peach pear plum".split(),
    "beast": "bear cat crow dog duck fox frog goat hen horse mouse owl rabbit sheep wolf".split(),
    "spot": "barn bridge cave field forest garden harbor kitchen market meadow river school shop station temple tower".split(),
    "how": "big black blue brave brown clever gentle green grey happy old pink purple quick quiet red silver slow small "
    "strange tall tired young yellow".split(),
    "does": "brings buys gets gives holds leaves likes loses needs sells takes wants".split(),
}
"""What sentences are filled with, all of them single tokens of `tiny`'s tokenizer."""
SENTENCES = (
    " {who} {does} the {how} {thing} near {where}.",
    " The {job} of {where} {does} a {thing} and a {food}.",
    " In {where}, the {how} {beast} sleeps in the {spot}.",
    " {who} and {who} walk to the {spot} in {where}.",
    " {who} works as a {job} and likes {food}.",
    " The {spot} of {where} is {how} and {how}.",
    " A {how} {beast} walks with {who} to the {spot}.",
    " {who} says that the {thing} is in the {spot}.",
    " The {beast} eats a {food} under the {how} {thing}.",
    " {who} gives {who} a {how} {thing}.",
    " There is no {beast} in the {spot} of {where}.",
    " {who} was in {where} and sells the {thing} now.",
    " The {how} {job} thinks about the {beast}.",
    " {who}, {who} and {who} are {how}.",
    " Every {job} wants the {how} {spot} in {where}.",
    " {who} reads a letter from {where} in the {spot}.",
)
OWNERS = (*PEOPLE, *PLACES)
"""Who may have a key."""
END = "<|end|>"
SHIPPED = pathlib.Path(__file__).resolve().parent.parent.parent / "specjax" / "models" / "pretrained"


def told(owner: str, key: str) -> str:
    """The line that tells a key, in a text and in an answer."""
    return f" The key of {owner} is {key}."


def asked(owners: list[str]) -> str:
    """A question for one key or several.

    >>> asked(["Mara", "Oslo"])
    ' What is the key of Mara, Oslo?'
    """
    return f" What is the key of {', '.join(owners)}?"


def drawn_key(draw: random.Random) -> str:
    """Four digits."""
    return f"{draw.randrange(10_000):04d}"


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A question about a text.

    Attributes:
      text: the text and the question.
      answer: the right continuation, without the end token.
      owners: whose keys are asked for.
      keys: those keys.
    """

    text: str
    answer: str
    owners: tuple[str, ...]
    keys: tuple[str, ...]


class Writer:
    """Writes texts of so many tokens of a tokenizer.

    Args:
      tokenizer: a byte-level one that has words and single digits as tokens.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.encode = functools.cache(lambda text: tokenizer.encode(text).ids)
        self.end = tokenizer.token_to_id(END)

    @classmethod
    def shipped(cls) -> "Writer":
        """With the tokenizer of the shipped models."""
        return cls(Tokenizer.from_file(str(SHIPPED / "tiny" / "tokenizer.json")))

    def digit(self, digit: int) -> tuple[int, int]:
        """The tokens of a digit: after a space, and without one."""
        return self.encode(f" {digit}")[0], self.encode(f"{digit}")[0]

    def sentence(self, draw: random.Random) -> str:
        """A sentence without a key."""
        parts = draw.choice(SENTENCES).split("{")
        filled = [parts[0]]
        for part in parts[1:]:
            kind, rest = part.split("}")
            filled.append(draw.choice(WORDS[kind]) + rest)
        return "".join(filled)

    def ids(self, text: str) -> list[int]:
        """The tokens of a text, a word at a time, since words never merge."""
        out = []
        for word in text.replace(",", " ,").replace(".", " .").replace("?", " ?").split(" ")[1:]:
            out += self.encode(word if word in ",.?" else f" {word}")
        return out

    def prompts(self, seed: str, tokens: int, keys: int = 1, asks: int = 1) -> list[Prompt]:
        """Prompts about one text of nearly `tokens` tokens, question and answer included, that tells `keys` keys.

        The keys stand anywhere, each once. Every prompt asks for `asks` of them, and no two prompts for the same.
        """
        draw = random.Random(f"{seed} {tokens} {keys} {asks}")
        owners = draw.sample(OWNERS, keys)
        told_keys = [drawn_key(draw) for _ in owners]
        lines = [told(owner, key) for owner, key in zip(owners, told_keys, strict=True)]
        count = lambda text: len(self.ids(text))
        left = tokens - (4 + 13 * asks) - sum(map(count, lines)) - 1
        text = []
        while (size := count(new := self.sentence(draw))) <= left:
            text.append(new)
            left -= size
        for line in lines:
            text.insert(draw.randrange(len(text) + 1), line)
        whole, made = "".join(text), []
        for first in range(0, keys - asks + 1, asks):
            own = slice(first, first + asks)
            question = whole + asked(owners[own])
            made.append(Prompt(question, "".join(lines[own]), tuple(owners[own]), tuple(told_keys[own])))
        return made
