"""Trains SmolLM2's head of the rule `judge`: `python -m experiments.smollm2.judge` puts it among the shipped heads.

The questions are short tasks like those of `experiments.smollm2.lossy`, and none of them; the draft model is the shipped one.
How tokens are labelled is in `experiments/lossy/train_judge.py`.
"""

import argparse
from functools import partial
from pathlib import Path

import specjax
from experiments.lossy.train_judge import Asked, trained
from experiments.smollm2.lossy import is_right, tasks
from experiments.smollm2.train import SHIPPED
from specjax.bench.peers.folders import draft_of
from specjax.draft.heads.folder import save_head
from specjax.verify import Judge

EACH, TOKENS = 80, 600
"""Tasks of each kind, and tokens that are labelled."""
KINDS = "copy", "sum", "format"


def asked() -> list[Asked]:
    """Tasks that are not among those of the table."""
    known = {prompt for prompt, _ in tasks()}
    made = zip(KINDS * EACH, tasks(seed=1, each=EACH), strict=True)
    return [
        Asked(kind, [{"role": "user", "content": prompt}], partial(is_right, wanted=wanted))
        for kind, (prompt, wanted) in made
        if prompt not in known
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=SHIPPED / "smollm2-judge")
    output = parser.parse_args().output
    model = specjax.load("smollm2", dtype="float32")
    draft = draft_of(specjax.Engine(model, drafter="draft"))
    assert draft is not None  # the shipped draft is of the Llama family
    params = trained(specjax.Engine(model, drafter="none"), draft, asked(), TOKENS)
    save_head(output, Judge.about.name, {}, params, model, "float16")


if __name__ == "__main__":
    main()
