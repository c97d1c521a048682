"""The Python of the README and of the pages on models and on diffusion runs as written."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = {
    f"{page}-{i}": block
    for page in ("README.md", "docs/diffusion.md", "docs/models.md")
    for i, block in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL))
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
def test_block(name):
    names: dict = {}
    exec(compile(BLOCKS[name], name, "exec"), names)
    if "state" in names:
        assert bool(names["state"].done.all())
    elif "again" in names:
        assert names["again"].lm == names["model"].lm
    else:
        assert names["records"][0].new_tokens > 0
