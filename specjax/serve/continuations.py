"""`specjax.score`: a model's log-probabilities of continuations."""

from typing import Any

from specjax.names import named
from specjax.serve.engine import Engine
from specjax.serve.score import Score, pair_up
from specjax.serve.scorers import check_batch, score_with


@named
def score(
    model: Any = None,
    prompts: Any = None,
    continuations: Any = None,
    *,
    batch_size: int = 8,
    samples: int | None = None,
    dtype: Any = None,
    mesh: Any = None,
) -> list[Score]:
    """Scores continuations of prompts by their log-probabilities; returns one score for each, in order.

    Texts of similar lengths share a compiled program. Scores depend on batch and mesh only by rounding. `encode_pair`
    documents how texts become tokens at the border between prompt and continuation.

    Args:
      model: a model, as for `specjax.generate`.
      prompts: texts, lists of token ids or chats, as many as continuations; or a single one for all continuations.
      continuations: texts or lists of token ids; or a single one for one prompt.
      batch_size: rows read together.
      samples: masks of a text, for a masked-diffusion model, whose scores are bounds (`specjax.serve.masked_scores`); None:
        128.
      dtype: the type of the parameters; None: float32 on a CPU, bfloat16 elsewhere.
      mesh: a mesh, or a line such as `"data=2,model=4"`.

    Raises:
      ValueError: before anything is read; one line says what cannot be used and, for a pair, its number (from 1).

    >>> import specjax
    >>> near, far = specjax.score(None, "def add(a, b):\\n    return a +", [" b", " zebra"])
    >>> near.logprob > far.logprob
    True
    """
    check_batch(batch_size)
    pair_up(prompts, continuations)  # errors in them are reported before the model is loaded
    return score_with(Engine(model, dtype=dtype, mesh=mesh), prompts, continuations, batch_size, samples)
