"""The method: a batch's prompts are merged and read, and the model goes on in its own tokens.

In the shape descriptions `E` denotes the model width.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from specjax.about import About
from specjax.lm import LM, check_mixtures
from specjax.models.text import new_text
from specjax.search.merged_prompts.embedder import WithMerged, read_network, with_inputs
from specjax.search.merged_prompts.merging import Merged, Merger
from specjax.search.stepwise import Asked, Stepwise, Written
from specjax.search.writer import Writer
from specjax.speculative import speculative

PyTree = Any
_LEAST = 64
"""Merged tokens that there is room for at least."""


@dataclasses.dataclass(frozen=True, repr=False)
class MergedWritten(Written):
    """A text after a prompt that was merged.

    Attributes:
      prompt_tokens: of the prompt, as the tokenizer makes them.
      prompt_read: of the prompt, as the model read them.
    """

    prompt_tokens: int = 0
    prompt_read: int = 0


@dataclasses.dataclass(frozen=True)
class MergedPrompts(Stepwise):
    """Frequent pairs of tokens in a batch of prompts are read as one token each (dynamic tokenization).

    Prompts are shorter then, and so are their caches; what is read is not quite the prompt. New text is in the
    model's own tokens. A batch is the prompts that are decoded together, so a text depends on the others, and on
    `batch_size`; a last batch that is filled up with its last prompt counts these copies. Positions are those of the
    shorter text.

    Attributes:
      merges: how many pairs of a batch are merged; 0 is plain decoding.
      embedder: a folder of `specjax train merged_prompts`, which makes the inputs of merged tokens; None: the mean of
        the parts' embeddings, which is the authors' baseline without training.
      boundary: what no merged token crosses, see `Merger`.

    Raises:
      ValueError: for merges below 0.
    """

    about = About(
        "merged_prompts", "prompts are read with the frequent pairs of their tokens merged", "arXiv:2411.18553", "own text",
        fields=("merges", "embedder", "boundary"),
    )  # fmt: skip

    merges: int = 1000
    embedder: str | None = None
    boundary: str = "pretokens"

    def __post_init__(self):
        if isinstance(self.merges, bool) or not isinstance(self.merges, int) or self.merges < 0:
            raise ValueError(f"merges must be a whole number from 0 on, got {self.merges!r}")

    def bind(self, model: Any, *, mesh: Any = None, rows: int = 1, logprobs: bool = False) -> tuple["Stepwise", PyTree]:
        """See `Decode.bind`."""
        bound = super().bind(model, mesh=mesh, rows=rows, logprobs=logprobs)
        self._checked(model)
        return bound

    def _checked(self, model: Any) -> tuple[Merger, PyTree | None]:
        """What merges, and the trained network or None."""
        check_mixtures(model.lm)
        merger = Merger(model.tokenizer, self.boundary)
        return merger, None if self.embedder is None else read_network(self.embedder, width_of(model))

    def __call__(
        self,
        model: Any,
        prompts: Sequence[Any],
        *,
        max_new_tokens: int = 128,
        seed: int = 0,
        batch_size: int = 8,
        keys: np.ndarray | None = None,
        **sampling: Any,
    ) -> list[Written]:
        """A text for every prompt, in order, each a `MergedWritten`.

        Args:
          model: from `specjax.load`, with a byte-level tokenizer.
          prompts: a list of texts, lists of token ids or chats.
          max_new_tokens: the most new tokens for each.
          seed: determines the noise, together with a prompt.
          batch_size: prompts whose pairs are counted together, and which are decoded side by side.
          keys: see `Asked.of`.
          **sampling: as in `specjax.generate`.

        Raises:
          ValueError: see `Asked.of`, `Merger` and `read_network`; also for a model that reads tokens only.
        """
        merger, network = self._checked(model)
        asked = Asked.of([model], prompts, max_new_tokens, seed, sampling, keys)
        parts = asked.parts(batch_size)
        if not parts:
            return []
        plans = [merger(part.ids, self.merges, model.lm.vocab_size) for part in parts]
        most = max(_LEAST, *(len(plan.parts) for plan in plans))
        room = 1 << (most - 1).bit_length()  # few sizes, so few programs
        lm, rows = WithMerged(model.lm), len(parts[0].ids)
        found: list[Written] = []
        for part, plan in zip(parts, plans, strict=True):
            weights = with_inputs(model.lm, model.params, network, plan.parts, room)
            way = speculative(cast(LM, lm)), {"target": weights, "draft": None}
            found += _part(Writer(model, rows, asked, (), way=way), model, part, plan)
        return found


def _part(writer: Writer, model: Any, part: Asked, plan: Merged) -> list[MergedWritten]:
    """The texts of some prompts side by side."""
    writer.enter(dataclasses.replace(part, ids=plan.rows))
    texts = writer.write(np.arange(writer.rows) < len(part.ids), part.max_new_tokens, step=False)
    return [
        MergedWritten(
            part.prompts[row], new_text(model.tokenizer, ids, texts[row]), texts[row], writer.reason(row),
            int(writer.passes[row]), prompt_tokens=len(ids), prompt_read=len(plan.rows[row]),
        )
        for row, ids in enumerate(part.ids)
    ]  # fmt: skip


def width_of(model: Any) -> int:
    """E, from the form of an embedding, without computing one."""
    return jax.eval_shape(model.lm.embed, model.params, jnp.zeros((1, 1), jnp.int32)).shape[-1]
