"""A way to decode that chooses a drafter or a model for every prompt, and learns which pays (arXiv:2410.13287)."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specjax.about import About
from specjax.decode.routing.bandit import Router
from specjax.decode.speculate import Speculate
from specjax.draft.heads.folder import fingerprint
from specjax.models.text import new_text
from specjax.search.means import hidden_means
from specjax.search.reward import ScorerError, function_of
from specjax.search.stepwise import Asked, Step, Stepwise, Written, check_alone, check_pair, partner
from specjax.search.writer import Writer
from specjax.speculative import Speculative

TOKENS_PER_STEP = "tokens_per_step"
FILE = "router.safetensors"

Arm = tuple[Any, Speculative, Any]
"""A model, and a decoder of it with its parameters."""


@dataclasses.dataclass(frozen=True)
class Route(Stepwise):
    """For every prompt one of several drafters of the model, or of several models, writes: the one expected to pay best.

    A `Router` learns online from what each arm has paid, and tries arms of which little is known. What is alike is told by
    the mean of the model's hidden states over the prompt. Drafters do not change the text; another model writes its own.
    With only drafters the text is plain decoding's.

    A drafter's reward is the tokens per pass of the model. If models are among the arms, `reward` must be a function of
    yours.

    Attributes:
      drafters: lines of drafters with `|` between them; `none` is plain decoding.
      models: other models of the same vocabulary, as arms too: results of `specjax.load`, or names with `|` between them.
        The model itself is an arm by each of its drafters.
      reward: `tokens_per_step`, or the name of a function `f(prompt, text)` with its modules, or the function itself: how
        much a text is worth, a number.
      folder: where what was learnt is kept, after every few prompts; a router goes on from what lies there. Empty: nowhere.
      features: random features.
      width: of the kernel, in units of hidden states.
      delta: how much is explored, see `Router`.
      learnt: by model and reward, what was learnt; it is kept with this object.
      ways: by arm, what writes; made by `bind`.

    Raises:
      ValueError: for fewer than two arms, two arms alike, or numbers out of range.
    """

    about = About(
        "route", "for each prompt the drafter or model that pays best for prompts like it", "arXiv:2410.13287", "own text",
        fields=("drafters", "models", "reward", "folder", "features", "width", "delta"),
    )  # fmt: skip

    drafters: str = "prompt_lookup|suffix|none"
    models: str | tuple[Any, ...] = ""
    reward: str | Callable[[str, str], float] = TOKENS_PER_STEP
    folder: str = ""
    features: int = 200
    width: float = 5.0
    delta: float = 0.05
    learnt: dict[str, Router] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    ways: "dict[str, Arm]" = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self):
        arms = [*self._lines, *self._others]
        if len(arms) < 2 or len({own if isinstance(own, str) else id(own) for own in arms}) < len(arms):
            raise ValueError(
                "route chooses between two different arms at least: name drafters and models with | between them, got "
                f"{self.drafters!r}"
            )
        if isinstance(self.features, bool) or not isinstance(self.features, int) or self.features < 1:
            raise ValueError(f"features must be a whole number from 1 on, got {self.features!r}")
        if not 0 < self.width < math.inf or not 0 < self.delta < 1:
            raise ValueError(f"width must be above 0 and delta between 0 and 1, got {self.width!r} and {self.delta!r}")
        if self._others and self.reward == TOKENS_PER_STEP:
            raise ValueError(
                "tokens per step do not say which model's text is better: give reward=pkg.function, from a prompt and a "
                "text to a number"
            )

    @property
    def _lines(self) -> list[str]:
        return [line.strip() for line in self.drafters.split("|") if line.strip()]

    @property
    def _others(self) -> list[Any]:
        given = self.models.split("|") if isinstance(self.models, str) else self.models
        return [own for own in given if not isinstance(own, str) or own.strip()]

    def bind(self, model: Any, *, mesh: Any = None, rows: int = 1, logprobs: bool = False) -> tuple[Stepwise, Any]:
        """See `Decode.bind`; loads the other models and what drafters need, and looks for the function."""
        from specjax import models

        check_alone(self, model, mesh, logprobs)
        load = models.abstract if model.abstract else models.load
        others = tuple(load(own.strip(), model.dtype) if isinstance(own, str) else own for own in self._others)
        check_pair([model, *others])
        worth = self.reward
        if isinstance(worth, str) and worth != TOKENS_PER_STEP:
            worth = function_of(worth)
        if not isinstance(worth, str) and not callable(worth):
            raise ScorerError(
                f"reward must be {TOKENS_PER_STEP} or a function of a prompt and a text, got {worth!r:.60}"
            )
        lines = {line: (model, line) for line in self._lines}
        lines |= {f"{own.name} ({number})": (own, "none") for number, own in enumerate(others, 1)}
        ways = {
            name: (partner(model, own), *Speculate(line).bind(own, rows=rows)) for name, (own, line) in lines.items()
        }
        return dataclasses.replace(self, models=others, reward=worth, ways=ways), {"target": model.params}

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
        """A text for every prompt, in order; its only step says by which arm it is, and `score` is the reward.

        Args:
          model: from `specjax.load`.
          prompts: a list of texts, lists of token ids or chats.
          max_new_tokens: the most new tokens for each.
          seed: determines the noise, together with a prompt.
          batch_size: prompts side by side. Their arms are chosen together, before any of them pays.
          keys: see `Asked.of`.
          **sampling: as in `specjax.generate`.

        Raises:
          ValueError: see `Asked.of` and `Router.resume`; `ScorerError` for a function that fails, or returns no number.
        """
        own: Any = self if self.ways else self.bind(model)[0]
        arms = list(own.ways)
        asked = Asked.of([model, *own.models], prompts, max_new_tokens, seed, self.published(sampling), keys)
        parts = asked.parts(batch_size)
        if not parts:
            return []
        rows, writers, found = len(parts[0].ids), {}, []
        for part in parts:
            contexts = hidden_means(model, part.ids, rows)
            router = own._router(model, arms, contexts.shape[1])
            chosen = _chosen(router, contexts, part.keys)
            texts: dict[int, Written] = {}
            for arm in sorted(set(chosen)):
                if arm not in writers:
                    writer, *way = own.ways[arms[arm]]
                    writers[arm] = Writer(writer, rows, asked, (), way=tuple(way))
                mine = [row for row, own_arm in enumerate(chosen) if own_arm == arm]
                texts |= own._written(writers[arm], part, mine, arms[arm])
            for row, arm in enumerate(chosen):
                if (paid := texts[row].score) is not None:  # of a text that did not fail
                    router.learn(arm, contexts[row], paid)
            if own.folder:
                router.save(Path(own.folder) / FILE)
            found += [texts[row] for row in range(len(part.ids))]
        return found

    def _router(self, model: Any, arms: list[str], size: int) -> Router:
        """What was learnt so far with a model and a reward."""
        worth = self.reward
        named = worth if isinstance(worth, str) else f"{worth.__module__}.{getattr(worth, '__qualname__', worth)}"
        of = f"{fingerprint(model)} {named}"
        if of not in self.learnt:
            router = Router(arms, size, features=self.features, width=self.width, delta=self.delta, of=of)
            if self.folder:
                Path(self.folder).mkdir(parents=True, exist_ok=True)
                if (Path(self.folder) / FILE).exists():
                    router.resume(Path(self.folder) / FILE)
            self.learnt[of] = router
        return self.learnt[of]

    def _written(self, writer: Writer, part: Asked, rows: list[int], arm: str) -> dict[int, Written]:
        """The texts of some rows of a part, written by one arm."""
        pick = lambda values: tuple(values[row] for row in rows)
        writer.enter(dataclasses.replace(part, prompts=pick(part.prompts), ids=pick(part.ids), keys=part.keys[rows]))
        texts = writer.write(np.arange(writer.rows) < len(rows), part.max_new_tokens, step=False)
        found = {}
        for lane, row in enumerate(rows):
            words = new_text(writer.model.tokenizer, part.ids[row], texts[lane])
            step, passes = Step(tuple(texts[lane]), words, arm), int(writer.passes[lane])
            paid = None if writer.failed[lane] else self._paid(part.prompts[row], words, len(texts[lane]), passes)
            found[row] = Written(
                part.prompts[row], words, texts[lane], writer.reason(lane), passes, steps=(step,), score=paid
            )
        return found

    def _paid(self, prompt: Any, text: str | None, tokens: int, passes: int) -> float:
        """The reward of a text.

        Raises:
          ScorerError: if the user's function fails, or returns no finite number.
        """
        if isinstance(self.reward, str):
            return tokens / max(passes, 1)
        try:
            paid = float(self.reward(prompt, text or ""))
        except Exception as error:  # whatever the user's code raises
            raise ScorerError(f"the reward of route failed: {type(error).__name__}: {error}") from error
        if not math.isfinite(paid):
            raise ScorerError(f"the reward of route must be a finite number, got {paid!r}")
        return paid


def _chosen(router: Router, contexts: np.ndarray, keys: np.ndarray) -> list[int]:
    """The arm of every prompt."""
    pending, chosen = np.zeros_like(router.counts), []
    for context, key in zip(contexts, keys, strict=True):
        chosen.append(router.choose(context, np.random.default_rng(key), pending))
        pending[chosen[-1]] += 1
    return chosen
