"""Texts that SmolLM2 writes itself, from which its heads are trained.

python -m experiments.smollm2.data FOLDER --apart QUESTIONS.jsonl ...

The model is started at the user's turn of its chat template and writes a question (Magpie, arXiv:2406.08464). Usable questions
are kept and answered: half of them greedily, half at temperature 1. Those of 6,000 turns are in `questions.jsonl.gz`, which
took 45 minutes of two cores beside other work; `--turns` writes others. In a second round the model writes second turns, and is
asked to summarise and rewrite what it wrote in the first. `specjax train --data` reads `answers-1.jsonl` and `answers-2.jsonl`;
those of the kept questions are in `texts.jsonl.gz`, from which `experiments.smollm2.train` trains.

After a kill the same command goes on: each step is a job of `specjax generate`, or a file that is written as a whole. Questions
that share ten words in a row with a file of `--apart` (the questions that heads are measured with) are left out.
"""

import argparse
import gzip
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import specjax

MODEL = "smollm2"
QUESTIONS = Path(__file__).with_name("questions.jsonl.gz")
"""The kept ones of 6,000 turns: a JSON object with a `text` in every line."""
LONGEST_TURN, LONGEST_ANSWER = 96, 256
WORDS, LETTERS = (4, 64), 1200
"""Of a question: the least and the most words; and the most characters of a text that is to be copied from."""
LEAST = -3.2
"""The least mean log-probability of a question's tokens, in nats."""
MOST_ALIKE = 0.02
"""The largest share of questions that begin with the same four words."""
ASKS = re.compile(
    r"(?i)^(can|could|would|will|what|which|who|how|why|when|where|is|are|do|does|should|write|explain|list|give|create|"
    r"i'm|i am|i need|i want|i have|help|rewrite|translate|summari[sz]e|describe|compare|find|make|tell|please|imagine|"
    r"suggest|provide|generate|identify|calculate|solve|compute|design|convert|classify|design|edit|name)\b"
)
COPIES = (
    "Summarize this text in one sentence:\n\n{}",
    "Rewrite this text so that a child understands it:\n\n{}",
    "Correct the mistakes in this text, and change nothing else:\n\n{}",
    "Read this text:\n\n{}\n\nWhat is it about? Quote the sentence that says so.",
    "Translate this text into French:\n\n{}",
)
Line = dict[str, Any]


# ---- which questions are kept ------------------------------------------------------------------------------------------


def words(text: str) -> list[str]:
    """Those of a text, in small letters.

    >>> words("What's a JAX array?")
    ["what's", 'a', 'jax', 'array']
    """
    return re.findall(r"[a-z0-9']+", text.lower())


def runs(text: str, count: int) -> set[tuple[str, ...]]:
    """All so many words in a row.

    >>> sorted(runs("one two three", 2))
    [('one', 'two'), ('two', 'three')]
    """
    found = words(text)
    return {tuple(found[at : at + count]) for at in range(len(found) - count + 1)}


def usable(record: Line) -> bool:
    """Whether a turn that the model wrote is a question by itself: ended, of some words, likely enough, and it asks."""
    text = record["text"].strip()
    found = words(text)
    if record["finish_reason"] != "eos" or not WORDS[0] <= len(found) <= WORDS[1] or "<|" in text:
        return False
    if np.mean(record["logprobs"]) < LEAST or ("?" not in text and not ASKS.match(text)):
        return False
    fours = Counter(tuple(found[at : at + 4]) for at in range(len(found) - 3))
    return max(fours.values()) < 3


def kept(records: Iterable[Line], apart: set[tuple[str, ...]]) -> Iterator[Line]:
    """The usable ones, without those that are nearly one of before, begin as many others, or are near what is kept apart."""
    seen: set[tuple[str, ...]] = set()
    begins: Counter[tuple[str, ...]] = Counter()
    good = [record for record in records if usable(record)]
    most = max(1, round(MOST_ALIKE * len(good)))
    for record in good:
        text = record["text"].strip()
        begin = tuple(words(text)[:4])
        alike = runs(text, 8) or {tuple(words(text))}
        if alike & seen or begins[begin] >= most or runs(text, 10) & apart:
            continue
        seen |= alike
        begins[begin] += 1
        yield record


# ---- what the model is asked -------------------------------------------------------------------------------------------


def turns(count: int, start: Sequence[int]) -> Iterator[Line]:
    """Questions to write: half of them at temperature 1, half closer to what is likely."""
    for at in range(count):
        drawn = {"temperature": 1.0} if at % 2 else {"temperature": 0.8, "top_p": 0.95}
        yield {"id": at, "prompt": list(start), "seed": at, "max_new_tokens": LONGEST_TURN, "ignore_eos": False} | drawn


def answered(at: int, messages: list[Line]) -> Line:
    """A conversation to go on with; every other one is answered greedily."""
    return {"id": at, "messages": messages, "seed": at, "temperature": float(at % 2), "max_new_tokens": LONGEST_ANSWER}


def first_prompts(records: Iterable[Line]) -> Iterator[Line]:
    """The kept questions."""
    for at, record in enumerate(records):
        yield answered(at, [{"role": "user", "content": record["text"].strip()}])


def second_turns(
    prompts: Sequence[Line], answers: Sequence[Line], encode: Callable[[list[Line]], list[int]]
) -> Iterator[Line]:
    """Second questions to write, after every third answer that has an end."""
    for prompt, answer in list(zip(prompts, answers, strict=True))[::3]:
        if answer["finish_reason"] == "eos":
            said = [*prompt["messages"], {"role": "assistant", "content": answer["text"].strip()}]
            line = {"id": prompt["id"], "prompt": encode(said), "seed": prompt["id"], "temperature": 0.8, "top_p": 0.95}
            yield line | {"max_new_tokens": LONGEST_TURN}


def second_prompts(prompts: Sequence[Line], answers: Sequence[Line], asked: Iterable[Line]) -> Iterator[Line]:
    """Conversations of two turns, and texts to copy from."""
    known = {prompt["id"]: (prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)}
    at = len(prompts)
    for record in asked:
        prompt, answer = known[record["id"]]
        said = {"role": "assistant", "content": answer["text"].strip()}
        yield answered(at, [*prompt["messages"], said, {"role": "user", "content": record["text"].strip()}])
        at += 1
    for number, answer in enumerate(answers):
        text = answer["text"].strip()
        if number % 3 == 1 and answer["finish_reason"] == "eos" and 200 <= len(text) <= LETTERS:
            yield answered(at, [{"role": "user", "content": COPIES[number // 3 % len(COPIES)].format(text)}])
            at += 1


# ---- the steps ---------------------------------------------------------------------------------------------------------


def read(path: Path) -> list[Line]:
    """The lines of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def written(path: Path, lines: Callable[[], Iterable[Line]]) -> list[Line]:
    """The lines of a file, which is made if it is not there."""
    if not path.exists():
        begun = path.with_suffix(".part")
        begun.write_text("".join(json.dumps(line) + "\n" for line in lines()))
        begun.rename(path)
    return read(path)


def completed(path: Path, output: Path, *flags: str) -> list[Line]:
    """The records of a job over a file, which goes on where it was."""
    asked = [sys.executable, "-m", "specjax", "generate", "--model", MODEL, "--drafter", "none", "--batch-size", "32"]
    subprocess.run([*asked, "--input", str(path), "--output", str(output), *flags], check=True)
    return read(output)


def tokens(records: Iterable[Line], encode: Callable[[list[Line]], list[int]], prompts: Iterable[Line]) -> int:
    """How many a head is trained on or reads, prompts included."""
    return sum(record["new_tokens"] for record in records) + sum(len(encode(line["messages"])) for line in prompts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for all files")
    parser.add_argument("--turns", type=int, help="questions to write in the first round, in place of the kept ones")
    parser.add_argument("--apart", type=Path, nargs="*", default=[], help="JSONL files whose questions stay out")
    options = parser.parse_args()
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = specjax.load(MODEL).tokenizer
    encode = lambda messages: list(tokenizer.apply_chat_template(messages)["input_ids"])
    begin = tokenizer.encode("<|im_start|>user\n")
    system = encode([{"role": "user", "content": ""}])
    start = system[: len(system) - len(tokenizer.encode("<|im_end|>\n"))]
    apart = {run for path in options.apart for line in read(path) for run in runs(json.dumps(line), 10)}

    if options.turns is None:
        asked = [json.loads(line) for line in gzip.decompress(QUESTIONS.read_bytes()).splitlines()]
        questions = [line for line in asked if not runs(line["text"], 10) & apart]
    else:
        written(folder / "turns-1.jsonl", lambda: turns(options.turns, start))
        questions = list(kept(completed(folder / "turns-1.jsonl", folder / "written-1.jsonl", "--logprobs"), apart))
    prompts = written(folder / "prompts-1.jsonl", lambda: first_prompts(questions))
    answers = completed(folder / "prompts-1.jsonl", folder / "answers-1.jsonl")
    written(folder / "turns-2.jsonl", lambda: second_turns(prompts, answers, lambda said: encode(said) + begin))
    more = completed(folder / "turns-2.jsonl", folder / "written-2.jsonl", "--logprobs")
    others = written(folder / "prompts-2.jsonl", lambda: second_prompts(prompts, answers, kept(more, apart)))
    again = completed(folder / "prompts-2.jsonl", folder / "answers-2.jsonl")
    print(f"{len(prompts)} questions; {len(others)} more conversations")
    print(f"{tokens(answers, encode, prompts) + tokens(again, encode, others)} tokens, prompts included")


if __name__ == "__main__":
    main()
