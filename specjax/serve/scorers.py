"""The scorer for a model: token by token, or for a masked-diffusion model by masks."""

from typing import Any

from specjax.serve.masked_scores import SAMPLES, MaskedScorer
from specjax.serve.score import Score, Scorer, pair_up


def scorer_of(engine: Any, samples: int | None = None) -> Scorer:
    """The scorer for an engine's model.

    Args:
      engine: a `specjax.Engine`; its drafter and verifier do not matter.
      samples: masks of a text, for a masked-diffusion model; None: 128.

    Raises:
      ValueError: for a diffusion model without masks, or samples for a model that has none.
    """
    if engine.model.any_subset:
        raise ValueError(f"{engine.model.name} is an any-subset model, which is not scored: choose another model")
    if engine.model.masked is not None or samples is not None:
        return MaskedScorer(engine, SAMPLES if samples is None else samples)
    return Scorer(engine)


def check_batch(batch_size: int) -> None:
    """Raises ValueError on a batch without rows."""
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")


def score_with(
    engine: Any, prompts: Any, continuations: Any, batch_size: int, samples: int | None = None
) -> list[Score]:
    """`score` with the model of an engine."""
    check_batch(batch_size)
    asked = pair_up(prompts, continuations)
    scorer = scorer_of(engine, samples)
    pairs = []
    for number, (prompt, continuation) in enumerate(asked, start=1):
        try:
            pairs.append(scorer.pair(prompt, continuation))
        except ValueError as error:
            raise ValueError(f"pair {number} of {len(asked)}: {error}") from error
    return list(scorer.run(pairs, batch_size=batch_size))
