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


EVERY = [*PAGES, *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*/*.md"))]
LONGEST_SENTENCE, LONGEST_PARAGRAPH, MOST_LINKS = 40, 80, 2


def paragraphs(text: str) -> Iterator[str]:
    """Those of a page and the items of its lists, without code blocks, tables, headings and comments."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)
    for part in re.split(r"\n\s*\n|^(?=\s*(?:[-*]|\d+\.) )", text, flags=re.MULTILINE):
        lines = (line for line in part.splitlines() if not line.startswith(("|", "#", ":")))
        if found := " ".join(lines).strip():
            yield found


def hard_to_read(text: str) -> Iterator[str]:
    """Parts of a page that a reader has to read twice."""
    for paragraph in paragraphs(text):
        words = lambda part: re.sub(r"`[^`]*`", "X", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", part)).split()
        if len(words(paragraph)) > LONGEST_PARAGRAPH:
            yield f"a paragraph of {len(words(paragraph))} words: {' '.join(words(paragraph)[:5])}"
        for sentence in re.split(r"(?<=[.:;!?])\s+(?=[A-Za-z`*\[])", paragraph):
            if len(words(sentence)) > LONGEST_SENTENCE:
                yield f"a sentence of {len(words(sentence))} words: {' '.join(words(sentence)[:5])}"
            if sentence.startswith("Of ") and not sentence.startswith("Of course"):
                yield sentence
            if sentence.count("](") > MOST_LINKS:
                yield f"{sentence.count('](')} links: {' '.join(words(sentence)[:5])}"


def test_sentences_are_short():
    pages = [page for page in EVERY if not page.startswith(("docs/notebooks", "docs/experiments"))]
    held = {page: list(hard_to_read((ROOT / page).read_text())) for page in pages}
    assert {page: parts for page, parts in held.items() if parts} == {}


def test_pages_do_without_these_words():
    held = {page: found(prose(page), IN_PAGES) for page in EVERY if page not in STORIES}
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


def test_parts_that_are_read_twice_are_found():
    links = " ".join(f"[a](b{i}.md)" for i in range(3))
    page = (
        f"# Page\n\nOf two rows one is read. {'word ' * 41}\n\n- {links}\n- {'A word. ' * 41}\n\n| {'word ' * 50} |\n"
    )
    found = [part.split()[0] for part in hard_to_read(page)]
    assert found == ["Of", "a", "3", "a"]
