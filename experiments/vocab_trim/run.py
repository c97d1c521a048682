"""Acceptance and speed by how many tokens a draft's head keeps: `python -m experiments.vocab_trim.run`."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments import claims
from specjax.assembly.registry import build_drafter
from specjax.draft import trim
from specjax.draft.head import most_frequent
from specjax.tasks import Mixture

FOLDER = Path(__file__).resolve().parent


def trimmed(target: Any) -> dict[str, Any]:
    """Drafters whose heads keep the most frequent tokens of training answers, by what the config calls them."""
    config = claims.config_of(FOLDER)
    mixture = Mixture(5, levels=(2,))
    text = " ".join(mixture[i].answers[0] for i in range(config["answers"]))
    counts = np.bincount(target.tokenizer(text)["input_ids"], minlength=target.lm.vocab_size)
    found = {}
    for line in (row["line"] for row in config["decoders"] if " of " in row["line"]):
        name, _, kept = line.partition(" of ")
        drafter, params = build_drafter(name, target)
        ids = most_frequent(counts, int(kept), always=target.eos_ids)
        print(f"{line}: {counts[ids].sum() / counts.sum():.2%} of the tokens of training answers")
        found[line] = trim(drafter, {"target": target.params, "draft": params}, ids, target.lm.vocab_size)
    return found


if __name__ == "__main__":
    claims.main(FOLDER, trimmed)
