"""`specjax.score`: what a model gives continuations of prompts."""

from typing import Any

from specjax.names import named
from specjax.serve.engine import Engine
from specjax.serve.score import Score, check_batch, pair_up, score_with


@named
def score(
    model: Any = None,
    prompts: Any = None,
    continuations: Any = None,
    *,
    batch_size: int = 8,
    dtype: Any = None,
    mesh: Any = None,
) -> list[Score]:
    """Scores continuations of prompts by their log-probabilities: a score for each, in order.

    Texts of like lengths share a compiled program; scores depend on batch and mesh by rounding alone. How texts become tokens
    at the border between the two: `encode_pair`.

    Args:
      model: an autoregressive model, as for `specjax.generate`.
      prompts: texts, lists of token ids or chats, as many as continuations; or one, which all continuations follow.
      continuations: texts or lists of token ids; or one of them, for one prompt.
      batch_size: rows read together.
      dtype: of the parameters; None is float32 on a CPU and bfloat16 elsewhere.
      mesh: a mesh, or a line such as `"data=2,model=4"`.

    Raises:
      ValueError: one line that says what cannot be used, before anything is read; of a pair it says which (from 1).

    >>> import specjax
    >>> near, far = specjax.score(None, "def add(a, b):\\n    return a +", [" b", " zebra"])
    >>> near.logprob > far.logprob
    True
    """
    check_batch(batch_size)
    pair_up(prompts, continuations)  # what is wrong with them is said before the model is loaded
    return score_with(Engine(model, dtype=dtype, mesh=mesh), prompts, continuations, batch_size)
