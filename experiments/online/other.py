"""A draft model of another vocabulary that learns while a job runs: `python -m experiments.online.other WORK`.

The draft has the shape of the shipped one, a tokenizer of its own with 512 tokens, and some updates on questions of other
families with their reference answers. Then a job runs with the draft as it is, and another one in which it learns. The
command prints the table.
"""

import argparse
import dataclasses
import json
from pathlib import Path

import jax
import numpy as np

from experiments.online.__main__ import chat, interval, per_step, run
from specjax import models
from specjax.models import LlamaLM
from specjax.tasks import FAMILIES, generate

DOMAIN, NEW, WINDOW = "code", 48, 100
BEGINS_ON, UPDATES, TOKENS = 60, 200, 512
WAYS = {"as it is": [], "learns": ["--learn"]}


def begun(work: Path) -> Path:
    """The draft with which both jobs begin."""
    import tokenizers
    import transformers

    draft = work / "draft"
    if draft.exists():
        return draft
    target = models.load("tiny")
    questions = [q for family in FAMILIES if family != DOMAIN for q in generate(family, 1, 0, BEGINS_ON, "train")]
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    special = [token for token in target.tokenizer.get_vocab() if token.startswith("<|")]
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=TOKENS, special_tokens=special, initial_alphabet=letters, show_progress=False
    )
    core.train_from_iterator([text for q in questions for text in (q.prompt, q.answers[0])], trainer)
    own = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|end|>", chat_template=target.tokenizer.chat_template
    )
    shape = models.load("tiny-draft").lm.config
    lm = LlamaLM(dataclasses.replace(shape, embedding=dataclasses.replace(shape.embedding, vocab_size=len(own))))
    weights = jax.jit(lm.init)(jax.random.key(0))
    models.save(work / "first", lm, weights, "float32", own, (own.eos_token_id,))
    said = lambda q: json.dumps(
        {"messages": [{"role": "user", "content": q.prompt}, {"role": "assistant", "content": q.answers[0]}]}
    )
    (work / "others.jsonl").write_text("".join(said(q) + "\n" for q in questions))
    how = ["--steps", UPDATES, "--length", 128, "--learning-rate", 2e-3]
    run("train", "lm", "--target", work / "first", "--data", work / "others.jsonl", "--output", draft, *how)
    return draft


def measure(work: Path, count: int) -> dict[str, list[dict]]:
    """The records of each way's job of `count` questions."""
    work.mkdir(parents=True, exist_ok=True)
    draft, found = begun(work), {}
    lines = [chat(q, id=str(i)) for i, q in enumerate(generate(DOMAIN, 1, 1, count, "train"))]
    (work / "asked.jsonl").write_text("".join(lines))
    for name, options in WAYS.items():
        output = work / f"{name.replace(' ', '-')}.jsonl"
        own = ["--drafter", f"omnidraft:model={draft},length=4", *options, *[work / "learnt"] * len(options)]
        how = ["--max-new-tokens", NEW, "--batch-size", 8, *own]
        run("generate", "--input", work / "asked.jsonl", "--output", output, *how)
        found[name] = [json.loads(line) for line in output.read_text().splitlines()]
    return found


def table(found: dict[str, list[dict]]) -> str:
    rng = np.random.default_rng(0)
    parts = {f"the first {WINDOW}": slice(None, WINDOW), f"the last {WINDOW}": slice(-WINDOW, None)}
    heads = "draft", *(f"tokens per step, {name}" for name in parts), "same texts"
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, records in found.items():
        pairs = [[record["new_tokens"], record["steps"]] for record in records]
        ends = {part: (per_step(pairs[at]), *interval(pairs[at], rng)) for part, at in parts.items()}
        cells = [f"{mean:.2f} ({low:.2f} to {high:.2f})" for mean, low, high in ends.values()]
        same = all(a["tokens"] == b["tokens"] for a, b in zip(records, found["as it is"], strict=True))
        lines.append(f"| {name} | {' | '.join(cells)} | {'yes' if same else 'no'} |")
    return "\n".join(lines)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("work", type=Path, help="a folder for the draft and the texts")
    options.add_argument("--questions", type=int, default=400, help="of the job (default: 400)")
    chosen = options.parse_args()
    print(table(measure(chosen.work, chosen.questions)))
