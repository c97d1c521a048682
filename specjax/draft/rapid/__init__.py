"""RAPID: drafts over a prompt that retrieval has shortened (Chen et al. 2025, arXiv:2502.20330)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import Proposal, TreeDrafter, View
from specjax.draft.model import ModelDraft, ModelDrafter
from specjax.draft.rapid.retrieval import Shortening
from specjax.expand import EarlyStop, Expander
from specjax.lm import Block, Output, Wants

Array = jax.Array

WIDEST = 256
"""The most tokens of a shortened prompt that a pass reads."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RapidDraft:
    """The draft's own text: a shortened prompt, then what was emitted.

    Attributes:
      model: the draft model's cache, and how much of that text it holds.
      prompt: `[B]` int32, the prompt's tokens before the first root.
      text: `[B, M]` int32, the shortened prompt.
      size: `[B]` int32, its tokens; 0 before it is made.
    """

    model: ModelDraft
    prompt: Any
    text: Any
    size: Any


@dataclasses.dataclass(frozen=True)
class Rapid(TreeDrafter):
    """The target, or another model, drafts over a prompt made short, with positions and a cache of its own; training-free.

    The shortened prompt is the prompt's first `sinks` tokens, those of its chunks that resemble the question most, in
    their order, and its last `question` tokens, which are taken for the question. It is made in the first step after a
    prompt, on the device, and emitted tokens go on after it. A prompt keeps max(length / (chunk shorten), min(least,
    length) / chunk) chunks, rounded up, whose similarity is at least `similarity`. So up to `least` tokens only
    dissimilar chunks are left out.

    The published code embeds chunks and question with BGE-M3 and compares by cosine. Here BM25 over token ids stands for
    that (`specjax.draft.rapid.retrieval.similarities`), and the threshold is the published number on another scale. It
    cuts chunks at ends of sentences and joins all of them by blank lines. Here they are cut by count, so a blank line
    stands only where something was left out.

    A draft by the target costs all of its weights. So it pays if a step reads more cache than weights.

    Attributes:
      lm: the draft model; None for the target itself.
      chunk: tokens of a chunk.
      least: how many tokens a prompt keeps of its chunks, if it is not longer than `shorten` times that.
      shorten: by how much the chunks of longer prompts are fewer.
      similarity: what a chunk must reach.
      question: how many of the prompt's last tokens are the question.
      sinks: how many of its first tokens are kept.
      new: for how many tokens after a prompt the draft's cache has room; a row that has written more goes on undrafted.
      joint: the tokens of a blank line; a line of text takes the target's.
      expander: turns next-token distributions into a tree. By default a chain of 10 that ends below a confidence of 0.1.
      target: filled in by `bind`.
    """

    about = About(
        "rapid",
        "the target itself, or a model of the same vocabulary, over the prompt's chunks that resemble its question",
        "arXiv:2502.20330",
        fields=("chunk", "least", "shorten", "similarity", "question", "sinks", "new"),
        expander="early_stop:length=10,threshold=0.1",
        loads="self_or_model",
    )

    lm: Any = None
    chunk: int = 128
    least: int = 4096
    shorten: int = 32
    similarity: float = 0.1
    question: int = 64
    sinks: int = 4
    new: int = 4096
    joint: tuple[int, ...] = ()
    expander: Expander = EarlyStop(10, 0.1)
    target: Any = None

    def __post_init__(self):
        super().__post_init__()
        ones = ("chunk", "least", "shorten", "question", "new")
        if any(getattr(self, name) < 1 for name in ones) or self.sinks < 0 or not self.similarity >= 0:
            raise ValueError(f"rapid needs {', '.join(ones)} >= 1 and sinks, similarity >= 0, got {self}")

    @property
    def needs_params(self):
        return self.lm is not None

    def bind(self, target):
        from specjax import models  # flax is slow to import
        from specjax.models.paired import Paired

        if any(not 0 <= token < target.vocab_size for token in self.joint):
            raise ValueError(f"rapid: {self.joint}, a blank line, is outside the target's {target.vocab_size} tokens")
        if self.lm is not None:
            bound = dataclasses.replace(self, target=self.lm)
            bound._own.bind(target)
            return bound
        if isinstance(target, Paired):
            raise ValueError(
                f"rapid drafts with its target's own pass over a shorter text, and a {type(target).__name__} has two: name "
                "a draft model, as in rapid:model=FOLDER"
            )
        if isinstance(target, models.LlamaLM):  # what its cache drops, the draft's need not
            target = dataclasses.replace(target, ahead=None, old=None)
        return dataclasses.replace(self, target=target)

    @property
    def _own(self) -> ModelDrafter:
        return ModelDrafter(self.target, self.expander)

    @property
    def _shortening(self) -> Shortening:
        names = (field.name for field in dataclasses.fields(Shortening))
        return Shortening(**{name: getattr(self, name) for name in names})

    def _of(self, params: Any) -> Any:
        """The parameters in the form of a draft model's."""
        return params if self.needs_params else {**params, "draft": params["target"]}

    def _slots(self, capacity: int) -> int:
        """How long the draft's text may become, where a text has `capacity` tokens."""
        own = self._shortening
        return min(own.room(capacity) + self.new, capacity + own.blank(capacity))

    def init(self, params, batch, capacity):
        zeros = lambda *shape: jnp.zeros((batch, *shape), jnp.int32)
        room = self._shortening.room(capacity)
        model = self._own.init(self._of(params), batch, self._slots(capacity) + max(min(room, WIDEST), self.depth + 1))
        return RapidDraft(model, zeros(), zeros(room), zeros())

    def axes(self, draft):
        return RapidDraft(self._own.axes(draft.model), ("batch",), ("batch", None), ("batch",))

    def param_shardings(self, mesh, params):
        return self._own.param_shardings(mesh, params) if self.needs_params else super().param_shardings(mesh, params)

    def encode(self, params, draft, source, tokens):
        return dataclasses.replace(draft, model=self._own.encode(self._of(params), draft.model, source, tokens))

    def prefill(self, params, draft, chunk, output):
        return dataclasses.replace(draft, prompt=draft.prompt + chunk.real.sum(axis=1, dtype=jnp.int32))

    def propose(self, params, draft, view, sampler):
        params, width = self._of(params), view.max_depth + 1
        draft = self._shortened(draft, view)
        end = draft.size + view.length - draft.prompt - 1
        most = jnp.minimum(end, self._slots(view.tokens.shape[1]))
        left = lambda own: jnp.where(view.live, most - own.model.length, 0)
        broad = min(draft.text.shape[1], WIDEST)
        # the last token is left for the pass that drafts
        read = lambda own: self._read(params, own, view, broad, jnp.clip(left(own) - 1, 0, broad), Wants())[0]
        draft = jax.lax.while_loop(lambda own: jnp.any(left(own) > width), read, draft)
        count = left(draft)
        draft, output = self._read(params, draft, view, width, count, Wants(final=True))
        last = jnp.clip(count - 1, 0, width - 1)
        final = jnp.take_along_axis(output.final, last[:, None, None], axis=1)
        logits = self.target.unembed(params["draft"], final)[:, 0]
        tree = self._own.grown(params, draft.model, logits, final, view, sampler)
        drafted = (end == most)[:, None] | (jnp.arange(tree.nodes)[None] == 0)
        return Proposal(dataclasses.replace(tree, valid=tree.valid & drafted), draft)

    def hidden(self, carry):
        """See `ModelDrafter.hidden`."""
        return self._own.hidden(carry)

    def _shortened(self, draft: RapidDraft, view: View) -> RapidDraft:
        """The state with shortened prompts of all live rows."""
        made = (draft.size > 0) | ~view.live

        def make():
            text, size = self._shortening.shortened(view.tokens, draft.prompt + 1)
            return jnp.where(made[:, None], draft.text, text), jnp.where(made, draft.size, size)

        text, size = jax.lax.cond(jnp.all(made), lambda: (draft.text, draft.size), make)
        return dataclasses.replace(draft, text=text, size=size)

    def _read(
        self, params: Any, draft: RapidDraft, view: View, width: int, count: Array, wants: Wants
    ) -> tuple[RapidDraft, Output]:
        """The state with the next `count` `[B]` tokens of its text in the cache, at most `width`, and the pass's output."""
        lm, model = self.target, draft.model
        at = model.length[:, None] + jnp.arange(width)[None]
        take = lambda x, at: jnp.take_along_axis(x, at, axis=1, mode="clip")
        emitted = take(view.tokens, at - draft.size[:, None] + draft.prompt[:, None] + 1)
        tokens = jnp.where(at < draft.size[:, None], take(draft.text, at), emitted)
        output = lm(params["draft"], Block(tokens, at, model.length), model.cache, wants=wants)
        # The write depends on the reads, so that the cache is updated in place, as in `specjax.draft.model`.
        firsts = [x[:, :1].reshape(x.shape[0], -1)[:, 0] for x in jax.tree.leaves(output.delta)]
        after = jnp.where(jnp.isnan(sum(x.astype(jnp.float32) for x in firsts)), 0, model.length)
        cache = lm.commit(model.cache, output.delta, None, after, count)
        return dataclasses.replace(draft, model=ModelDraft(cache, model.length + count)), output
