"""What free texts are measured by. Each measure needs a package that may be missing."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

EXTRA = "pip install 'specjax[parallel]'"


def grammar() -> Callable[[str], float]:
    """Whether LanguageTool (en-US) finds nothing to mend in a text; an empty text fails.

    Raises:
      ValueError: without the package, Java, or LanguageTool itself, which the package downloads once.
    """
    tool = _language_tool()
    return lambda text: float(bool(text.strip()) and not tool.check(text.strip()))


@functools.cache
def _language_tool() -> Any:
    try:
        import language_tool_python
    except ImportError as error:
        raise ValueError(f"grammar needs the package language_tool_python, and Java: {EXTRA}") from error
    try:
        return language_tool_python.LanguageTool("en-US", config={"maxCheckThreads": 1, "maxSpellingSuggestions": 1})
    except Exception as error:  # errors of Java, of the download and of the server have no class in common
        raise ValueError(f"grammar needs LanguageTool, which did not start: {_first_line(error)}") from error


def rouge_l() -> Callable[[str, str], float]:
    """ROUGE-L, the F-measure of words by their stems, of a text and a reference.

    Raises:
      ValueError: without the package.
    """
    try:
        from rouge_score import rouge_scorer
    except ImportError as error:
        raise ValueError(f"ROUGE-L needs the package rouge_score: {EXTRA}") from error
    scorer = rouge_scorer.RougeScorer(["rougeL"], use_stemmer=True)
    return lambda text, reference: float(scorer.score(reference.strip(), text.strip())["rougeL"].fmeasure)


def bleu() -> Callable[[str, str], float]:
    """BLEU of a text and one reference: up to four words, the tokens of WMT (13a), not smoothed.

    Raises:
      ValueError: without the package.
    """
    try:
        from sacrebleu.metrics import BLEU
    except ImportError as error:
        raise ValueError(f"BLEU needs the package sacrebleu: {EXTRA}") from error
    scorer = BLEU(smooth_method="none")
    return lambda text, reference: scorer.corpus_score([text.strip()], [[reference]]).score / 100


def bert_score() -> Callable[[str, str], float]:
    """BERTScore's F1 by its English model, of a text and a reference.

    Raises:
      ValueError: without the package or the model.
    """
    try:
        from bert_score import BERTScorer
    except ImportError as error:
        raise ValueError(f"BERTScore needs the package bert_score: {EXTRA}") from error
    try:
        scorer = BERTScorer(lang="en")
    except OSError as error:
        raise ValueError(f"BERTScore needs its model, which was not found: {_first_line(error)}") from error
    return lambda text, reference: float(scorer.score([text.strip()], [reference])[2][0])


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


MEASURES = {"grammar": grammar, "rouge_l": rouge_l, "bleu": bleu, "bert_score": bert_score}


def tools_of(names: Iterable[str]) -> tuple[dict[str, Callable[..., float]], dict[str, str]]:
    """Measures that are here, by name, and the reasons why others are not.

    >>> tools_of(())
    ({}, {})
    """
    found, missing = {}, {}
    for name in dict.fromkeys(names):
        try:
            found[name] = MEASURES[name]()
        except ValueError as error:
            missing[name] = str(error)
    return found, missing
