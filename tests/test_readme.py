"""The README's Python runs as written."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS, ids=[f"block-{i}" for i in range(len(BLOCKS))])
def test_block(block):
    names: dict = {}
    exec(compile(block, str(README), "exec"), names)
    if "state" in names:
        assert bool(names["state"].done.all())
    else:
        assert names["records"][0].new_tokens > 0
