"""SWIFT: the target drafts with some of its sublayers skipped, and finds out which ones during decoding (arXiv:2410.06916)."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from specjax.about import About, abouts
from specjax.draft import skip_search, spine
from specjax.draft.base import Proposal, TreeDrafter
from specjax.expand.early_stop import EarlyStop
from specjax.lm import Block, Partial
from specjax.models.drop_config import Drops

Array = jax.Array
OF_SEARCH = ("share", "window", "first", "enough", "patience", "trials", "guess_every", "history")
"""The fields without effect where the list of sublayers is given."""


@dataclasses.dataclass(frozen=True)
class Swift(TreeDrafter):
    """Drafts with the target's own layers and cache, with some sublayers skipped; training-free.

    The draft is a chain with the siblings of its nodes, and stops where it is unsure. The set of skipped sublayers is
    data: each is a scalar branch, so the work is really saved, and no set needs a new compilation. The draft's own keys
    and values live for one step. The first layer always runs and is the same for draft and target, which therefore
    starts above it.

    Until the search is over, every step tries one set. It reads `window` tokens of the rows in one pass without that
    set, and counts the positions where it would have drawn the actual token.

    All rows share the set and the trials, which continue over inserted prompts. The set may change speed but never
    text. Through it a row's draft depends on the other rows (see `Drafter.alone`).

    With `skipped`, the set is given and nothing is searched.

    Attributes:
      length: the longest chain.
      threshold: the confidence below which a row stops drafting.
      width: nodes per level, the chain's own and its siblings.
      narrowing: whether levels with high confidence have fewer nodes, as published; see `EarlyStop`.
      share: the share of the skippable sublayers that are skipped (the first and the last layer never are).
      window: tokens that a trial reads; rows with less text wait.
      first: whether these are the first generated tokens, as published, so that trials are alike; otherwise the last
        tokens of the text, including the prompt.
      enough: the score at which the search ends.
      patience: trials without a better set after which it ends.
      trials: trials after which it ends in any case.
      guess_every: in one of so many trials a Gaussian process proposes the set; the others are random.
      history: trials that the process remembers.
      skipped: the sublayers that are skipped, for each layer (`specjax.models.drop_config`); the first layer must
        stay. None: they are searched.
      target: filled in by `bind`.
    """

    about = About(
        "swift",
        "the target with some layers left out, which ones it finds as it goes",
        "arXiv:2410.06916",
        defaults={"length": 4, "width": 1, "threshold": 0.4, "trials": 64, "patience": 32},
        paper="length=25,width=10,narrowing=true,threshold=0.8,first=true,trials=1000,patience=300",
        loads="skipped",
    )

    length: int = 6
    threshold: float = 0.8
    width: int = 2
    narrowing: bool = False
    share: float = 0.45
    window: int = 32
    first: bool = False
    enough: float = 0.95
    patience: int = 300
    trials: int = 1000
    guess_every: int = 25
    history: int = 64
    skipped: Drops | None = None
    target: Any = None

    def __post_init__(self):
        EarlyStop(self.length, self.threshold, self.width, self.narrowing)
        if not 0 <= self.share <= 1 or min(self.window, self.guess_every, self.history) < 1:
            raise ValueError(f"swift needs a share in [0, 1] and window, guess_every, history >= 1, got {self}")
        if self.skipped is not None and (idle := self._idle()):
            raise ValueError(f"swift: a given list of sublayers leaves nothing to search: leave out {', '.join(idle)}")

    def _idle(self) -> list[str]:
        """The fields of the search that were set."""
        of_lines = abouts(type(self))[0].defaults
        usual = {field.name: (field.default, of_lines.get(field.name)) for field in dataclasses.fields(self)}
        return [name for name in OF_SEARCH if getattr(self, name) not in usual[name]]

    @property
    def expander(self) -> EarlyStop:
        return EarlyStop(self.length, self.threshold, self.width, self.narrowing)

    plain_tree = False

    @property
    def alone(self) -> bool:
        return self.skipped is not None

    @property
    def looks_back(self) -> float:
        """A trial reads the text from the start of its window, which for the first generated tokens never moves."""
        if self.skipped is not None:
            return 0
        return math.inf if self.first else self.window

    def bind(self, target):
        if target.num_layers < 3:
            raise ValueError(
                f"swift skips layers between the first and the last, and the target has {target.num_layers}"
            )
        if self.width > target.vocab_size:
            raise ValueError(f"swift: width={self.width} is more than the target's {target.vocab_size} tokens")
        if self.skipped is not None and len(self.skipped) != target.num_layers:
            raise ValueError(
                f"swift: the list of sublayers has {len(self.skipped)} lines, one per layer, and the target has "
                f"{target.num_layers} layers: give a list that was made for it"
            )
        if self.skipped is not None and any(self.skipped[0]):
            raise ValueError(
                "swift: the list leaves out a part of the first layer, with which draft and target begin: keep it "
                "(`none` in the first line)"
            )
        return dataclasses.replace(self, target=target)

    def init(self, params, batch, capacity):
        search = skip_search.start(self.target.num_layers, self.history)
        search = dataclasses.replace(search, prompt=jnp.ones((batch,), jnp.int32))  # the root is not part of a chunk
        return search if self._size else dataclasses.replace(search, best=jnp.zeros_like(search.best))

    def axes(self, draft):
        return dataclasses.replace(jax.tree.map(lambda leaf: (None,) * leaf.ndim, draft), prompt=("batch",))

    def prefill(self, params, draft, chunk, output):
        return dataclasses.replace(draft, prompt=draft.prompt + chunk.real.sum(axis=1, dtype=jnp.int32))

    @property
    def _size(self) -> int:
        return skip_search.sublayers(self.target.num_layers, self.share)

    def propose(self, params, draft, view, sampler):
        target, weights, slots = self.target, params["target"], self.length + 1
        draft = self._search(params, draft, view, sampler)
        skip = skip_search.mask(draft.best) if self.skipped is None else jnp.asarray(self.skipped)

        def lower(block, past):
            h = target.embed(weights, block.tokens)
            return target.layers(weights, h, 0, 1, block, view.cache, None if past is None else past[1])

        def enter(block, past):
            h, first = lower(block, past)
            above = None if past is None else target.join(past[1], past[2])
            top, rest = target.layers(weights, h, 1, target.num_layers, block, view.cache, above, skip, first)
            return (h, first, rest), target.unembed(weights, target.norm(weights, top))

        def grow(past, level):
            entries, logits = enter(spine.block(view, level.tokens, [level.depth], slots), past)
            return spine.put(past, entries, level.depth), logits

        first, logits = enter(spine.block(view, view.root[:, None], [0], 0), None)
        tree, past, _ = self.expander.run(
            view.root, logits[:, 0], grow, spine.room(first, slots), sampler, keep_q=view.keep_q
        )
        h, below = spine.complete(view, tree, past[:2], lower)
        return Proposal(tree, draft, partial=Partial(h, below, 1))

    def _search(self, params, draft, view, sampler):
        """One trial, if the search is not over and a row has enough text; otherwise nothing is computed."""
        if not self._size or not self.trials or self.skipped is not None:
            return draft
        over = (draft.score[0] >= self.enough) | (draft.idle[0] >= self.patience) | (draft.trials[0] >= self.trials)
        _, ready = self._window(view, draft.prompt)
        score = lambda chosen: self.matchness(params, skip_search.mask(chosen), view, sampler, draft.prompt)
        trial = lambda draft: skip_search.advance(draft, score, self._size, self.guess_every)
        return jax.lax.cond(~over & jnp.any(ready), trial, lambda draft: draft, draft)

    def _window(self, view, prompt) -> tuple[Array, Array]:
        """Where the window's inputs begin, `[B]`, and which rows have one, `[B]` bool; `prompt` `[B]` is their prompts'
        length.
        """
        before = prompt if self.first else jnp.zeros_like(view.length)
        ready = view.live & (view.length > before + self.window)
        return jnp.where(ready, before if self.first else view.length - 1 - self.window, 0), ready

    def matchness(self, params, skip, view, sampler, prompt) -> Array:
        """The share of window tokens that the model would also have drawn without the sublayers `skip` `[L, 2]`. Scalar
        float32.

        It covers the `window` tokens of the rows that have that many. Draws take the positions' own noise, as decoding
        did; the repetition penalty counts the text before the window.
        """
        target, weights, width = self.target, params["target"], self.window
        start, ready = self._window(view, prompt)
        positions = start[:, None] + jnp.arange(width)[None]
        take = lambda at: jnp.take_along_axis(view.tokens, at, axis=1, mode="clip")
        block = Block(take(positions), positions, start)
        h = target.embed(weights, block.tokens)
        h, _ = target.layers(weights, h, 0, target.num_layers, block, view.cache, None, skip)
        logits = target.unembed(weights, target.norm(weights, h))
        then = dataclasses.replace(sampler, length=start + 1)
        depths = jnp.broadcast_to(jnp.arange(width)[None], positions.shape)
        hits = (then.draw(logits, depths, None, width - 1) == take(positions + 1)) & ready[:, None]
        return hits.sum() / (width * jnp.maximum(ready.sum(), 1)).astype(jnp.float32)
