"""The Python of the README and of the pages on models, diffusion, evaluation, pictures, scores, searches and verifiers runs."""

import re
from pathlib import Path

import numpy as np
import pytest

from specjax.state import Finish

ROOT = Path(__file__).parents[1]
BLOCKS = {
    f"{page}-{i}": block
    for page in (
        "README.md",
        "docs/diffusion.md",
        "docs/evaluate.md",
        "docs/models.md",
        "docs/pictures.md",
        "docs/score.md",
        "docs/search.md",
        "docs/verifiers.md",
    )
    for i, block in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL))
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
def test_block(name):
    names: dict = {}
    exec(compile(BLOCKS[name], name, "exec"), names)
    if "state" in names:
        assert bool(names["state"].done.all())
        if "texts" in names:  # of the README: each is an answer, and ends there
            assert (np.asarray(names["state"].finish) == Finish.EOS).all()
            assert [text.count("<|end|>") for text in names["texts"]] == [2, 2]  # the question's, and the answer's
            assert all(text.endswith("<|end|>") for text in names["texts"])
    elif "figure" in names:
        assert len(names["figure"].axes[0].lines) == 1
    elif "again" in names:
        assert names["again"].lm == names["model"].lm
    elif "found" in names:
        assert names["found"].comparisons[0].verdict == "same text" and names["found"].rows[0].overall.n == 8
    elif "scores" in names:
        assert len(names["scores"]) == 2 and all(score.logprob < 0 for score in names["scores"])
    elif "method" in names:
        assert "answer is 16" in names["record"].text and names["record"].steps
    elif "spans" in names:
        assert len(names["spans"]) == 3 and names["spans"][0].log_prob > names["spans"][-1].log_prob
    elif "rates" in names:
        assert names["rates"] == sorted(names["rates"])
    else:
        assert names["records"][0].new_tokens > 0
