"""Words that readers stumble over stay out of pages and docstrings; the glossary has those to use instead."""

import ast
import re
from collections.abc import Iterator, Mapping

import pytest
from support.blocks import PAGES, ROOT

FOLDERS = ("specjax", "models", "kernels", "sharding")
WORDS = {
    r"laws?": "distribution, property, rule",
    r"whoever": "the caller, the reader, or a noun for what it is",
    r"in silence": "say it, and how",
    r"(?:tokens?|pass|passes) an? (?:step|pass|second)": "per",
}
"""Patterns of whole words, each with what to write in its place."""
IN_PAGES = {**WORDS, r"behind": "after"}
"""Those of pages; code has fields named `behind`, of places on a line."""
ALLOWED = (
    r"Zipf's law",  # names
    r"scaling law",
    r"(?:is|are|further|far) behind",  # late, which is no order in a text
)
STORIES = ("docs/tasks.md", "specjax/tasks")
"""Texts of the shipped tasks are data: their words are those that the models were trained on."""


def found(text: str, words: Mapping[str, str] = WORDS) -> list[str]:
    """The words that a text holds outside of what is `ALLOWED`.

    >>> found("Zipf's law lies behind it", IN_PAGES)
    ['behind']
    """
    text = re.sub(r"\s+", " ", text)
    text = re.sub("|".join(ALLOWED), " ", text)
    return [hit for word in words for hit in re.findall(rf"\b{word}\b", text, re.IGNORECASE)]


def docstrings(tree: ast.AST) -> Iterator[str]:
    """Those of a module, its classes and functions, and of attributes."""
    alone = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
    return (value.value for value in alone if isinstance(value, ast.Constant) and isinstance(value.value, str))


def prose(page: str) -> str:
    """A page without its code."""
    return re.sub(r"^```.*?^```$|`[^`\n]*`", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)


def test_pages_do_without_these_words():
    pages = [*PAGES, *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*/*.md"))]
    held = {page: found(prose(page), IN_PAGES) for page in pages if page not in STORIES}
    assert {page: words for page, words in held.items() if words} == {}, IN_PAGES


def test_docstrings_do_without_these_words():
    held = {}
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        name = str(path.relative_to(ROOT))
        text = path.read_text()
        if not name.startswith(STORIES) and found(text):  # few have one anywhere, and parsing takes the time
            held[name] = found(" | ".join(docstrings(ast.parse(text))))
    assert {name: words for name, words in held.items() if words} == {}, WORDS


@pytest.mark.parametrize(
    "text", ("The target's law of it", "what lies behind the text", "Whoever reads it", "4.0 tokens a step")
)
def test_each_is_found(text):
    assert len(found(text, IN_PAGES)) == 1
