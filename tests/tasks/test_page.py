"""The page of tasks shows what the generator makes."""

from pathlib import Path

import pytest

from specjax.tasks import FAMILIES, LEVELS, generate

PAGE = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_example_of_every_family_and_level(family, level):
    (question,) = generate(family, level, 1, 1)
    begin = PAGE.index(f"--- {family}, level {level}\n")
    shown, answer = PAGE[begin : PAGE.index("\n\n" if (family, level) != ("judge", 3) else "\n```", begin)].split(
        "\n--> "
    )
    first, *last = shown.partition("\n")[2].split(" [...] ")
    assert (
        answer == question.answers[0] and question.prompt.startswith(first) and question.prompt.endswith("".join(last))
    )
    assert last or first == question.prompt
    assert f"| `{family}` | {FAMILIES[family].about.summary} |" in PAGE
