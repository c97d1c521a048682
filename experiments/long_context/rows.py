"""Training rows: texts that tell keys, and questions for many of them: `python -m experiments.long_context.rows FILE`."""

import argparse
import json
import pathlib
import random
from collections.abc import Iterator

from tqdm import tqdm

from experiments.long_context.text import END, OWNERS, Writer, asked, drawn_key, told

SHARE = 0.4
"""Of a row that questions, answers and the lines that tell keys take, at most."""
LINE = 30
"""Tokens of a line that tells a key, its question and its answer, about."""


def row(writer: Writer, draw: random.Random, tokens: int) -> str:
    """One text of nearly `tokens` tokens that tells some keys, then a question for each and its answer."""
    most = max(1, min(len(OWNERS) // 2, int(tokens * SHARE) // LINE))
    owners = draw.sample(OWNERS, draw.randint(1, most))
    lines = [told(owner, drawn_key(draw)) for owner in owners]
    ends = [f"{asked([owner])}{line}{END}" for owner, line in zip(owners, lines, strict=True)]
    draw.shuffle(ends)
    left, text = tokens - LINE * len(owners), []
    while left > 0:
        text.append(writer.sentence(draw))
        left -= len(writer.ids(text[-1]))
    for line in lines:
        text.insert(draw.randrange(len(text) + 1), line)
    return "".join(text + ends)


def rows(tokens: int, count: int, seed: str = "train") -> Iterator[str]:
    """So many texts of one length, others than those of other seeds."""
    writer, draw = Writer.shipped(), random.Random(f"{seed} {tokens}")
    for _ in range(count):
        yield row(writer, draw, tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    args = parser.parse_args()
    with args.file.open("w") as file:
        for text in tqdm(rows(args.tokens, args.count), total=args.count):
            file.write(json.dumps({"text": text}) + "\n")


if __name__ == "__main__":
    main()
