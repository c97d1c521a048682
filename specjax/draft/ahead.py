"""What drafters share whose next block is drafted while the target reads the present one.

In the shape descriptions `B` denotes rows, `K` the tokens of a block, `P` the points after which branches begin, `F` the
branches of a point, `W` the slots of the pass that reads the text, `V` the target's vocabulary.
"""

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from specjax.about import abouts
from specjax.draft.base import Drafter, Proposal, View, ladder
from specjax.draft.model import ModelDraft, ModelDrafter
from specjax.draft.trim import TrimmedLM
from specjax.lm import LM, Block, Wants
from specjax.sampling import Sampler
from specjax.sampling.sampler import best
from specjax.tree import OfTopology, Topology, Tree

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AheadDraft(ModelDraft):
    """The state of the draft model, and the branches that it drafted in the last step.

    Attributes:
      cache: the draft LM's cache, made of committed tokens only.
      length: `[B]` int32, tokens in the cache.
      start: `[B]` int32, the text's length in that step.
      pending: `[B, K]` int32, the tokens that were proposed then; -1 where there were none.
      point: `[B, P]` int32, after how many of these tokens the branches of a point begin; -1 for no branches.
      first: `[B, P, F]` int32, the guesses of the target's token there.
      rest: `[B, P, F, K]` int32, what the draft model writes after each guess.
      log_q: `[B, P, F, K, V]` float32, the distributions of `rest`; None if no verifier reads them.
    """

    start: Any
    pending: Any
    point: Any
    first: Any
    rest: Any
    log_q: Any


@dataclasses.dataclass(frozen=True)
class Ahead(OfTopology, Drafter):
    """Proposes a chain that was drafted in the last step, and drafts branches for the next step.

    Neither the target's pass nor the draft model's passes of a step wait for the other, so a machine may run them at the
    same time. A branch is what the draft model writes after a possible verdict: some tokens of the block are accepted,
    and then comes a guess of the target's own token. The next step finds the branch that the text has taken. It needs
    only the text, so any other drafter or verifier may have written it. A text without a branch is a miss.

    Text never depends on branches, since the target judges every token that is proposed. Tokens of a branch are drawn
    with the noise of their positions. A guess has the noise with which the verifier draws after accepted tokens: that of
    the position, or that of residuals if the verifier reads distributions. Neither noise is that of a later position, so
    `log_q` is the distribution of what is proposed.

    Attributes:
      lm: the draft model.
      keep_q: whether the verifier reads the distributions; filled in by `recording`.
      vocab_size: V, filled in from the target.
    """

    tiles = True
    needs_params = True
    skips = False
    target_guesses: ClassVar[bool] = False
    """Whether `guesses` runs layers of the target, and then needs no logits of the draft model."""
    lm: LM
    keep_q: bool = dataclasses.field(default=False, kw_only=True)
    vocab_size: int = dataclasses.field(default=0, kw_only=True)

    @property
    @abc.abstractmethod
    def block(self) -> int:
        """Static: K."""

    @property
    def guessed(self) -> int:
        """Static: F."""
        return 1

    @abc.abstractmethod
    def points(self, count: Array) -> Array:
        """After how many tokens branches begin, `[B, P]` int32, -1 for none, if `count` `[B]` are proposed."""

    @property
    def topology(self) -> Topology:
        return Topology.chain(self.block)

    @property
    def children(self):
        return "coupled"

    @property
    def rungs(self) -> tuple[int, ...]:
        return ladder(self.nodes)

    @property
    def _model(self) -> ModelDrafter:
        return ModelDrafter(self.lm)

    def bind(self, target):
        self._model.bind(target)
        tokens = getattr(self.lm, "kept", self.lm.vocab_size)
        if self.guessed >= tokens:
            name = abouts(type(self))[0].name
            raise ValueError(
                f"{name} guesses {self.guessed} tokens and the draft model has {tokens}: choose a smaller fan"
            )
        return dataclasses.replace(self, vocab_size=target.vocab_size)

    def recording(self, keep_q):
        return dataclasses.replace(self, keep_q=keep_q)

    def trimmed(self, params, target_params, ids):
        model, params = self._model.trimmed(params, target_params, ids)
        return dataclasses.replace(self, lm=model.lm), params

    def init(self, params, batch, capacity):
        model = self._model.init(params, batch, capacity)
        points = jax.eval_shape(self.points, model.length).shape[1]
        none = lambda *shape: jnp.full((batch, *shape), -1, jnp.int32)
        rest = none(points, self.guessed, self.block)
        log_q = jnp.zeros((*rest.shape, self.vocab_size)) if self.keep_q else None
        branches = none(self.block), none(points), none(points, self.guessed), rest, log_q
        return AheadDraft(model.cache, model.length, jnp.zeros((batch,), jnp.int32), *branches)

    def axes(self, draft):
        names = super().axes(draft)
        log_q = None if draft.log_q is None else ("batch", None, None, None, "vocab")
        return dataclasses.replace(names, cache=self.lm.cache_axes(draft.cache), log_q=log_q)

    def param_shardings(self, mesh, params):
        return self._model.param_shardings(mesh, params)

    def encode(self, params, draft, source, tokens):
        return self._model.encode(params, draft, source, tokens)

    def prefill(self, params, draft, chunk, output):
        model = self._model.prefill(params, ModelDraft(draft.cache, draft.length), chunk, output)
        return dataclasses.replace(draft, cache=model.cache, length=model.length)

    def points_of(self, tree: Tree) -> Array:
        """After how many tokens of a proposed tree branches begin, `[B, P]` int32, -1 for none."""
        return self.points(tree.valid[:, 1:].sum(axis=1, dtype=jnp.int32))

    def taken(self, draft: AheadDraft, view: View) -> tuple[Array, Array | None, Array]:
        """The branch that the text has taken: its tokens `[B, K]`, -1 without one, their `log_q` `[B, K, V]`, and whether
        there is one, `[B]`.
        """
        batch, places = view.length.shape[0], jnp.arange(self.block)[None]
        accepted = view.length - draft.start - 1  # without the target's own token, which is the root now
        text = jnp.take_along_axis(view.tokens, draft.start[:, None] + places, axis=1, mode="clip")
        same = jnp.all((text == draft.pending) | (places >= accepted[:, None]), axis=1)
        here = (draft.point == accepted[:, None]) & (draft.point >= 0) & same[:, None]
        hits = (here[:, :, None] & (draft.first == view.root[:, None, None])).reshape(batch, -1)
        found, index = hits.any(axis=1), jnp.argmax(hits, axis=1)
        pick = lambda x: jnp.take_along_axis(x, index.reshape(batch, *[1] * (x.ndim - 1)), axis=1)[:, 0]
        merged = lambda x: x.reshape(batch, -1, *x.shape[3:])
        tokens = jnp.where(found[:, None], pick(merged(draft.rest)), -1)
        return tokens, None if draft.log_q is None else pick(merged(draft.log_q)), found

    def missed(self, params: Any, draft: Any, view: View, sampler: Sampler, block: Any, found: Array) -> Any:
        """The block `(tokens, log_q)` of rows that found a branch, and what the others propose; by default nothing."""
        return block

    def guesses(self, params: Any, tree: Tree, view: View, sampler: Sampler, points: Array, logits: Array) -> Any:
        """The guesses of the target's tokens `[B, P, F]`, and a head start for the target or None.

        Args:
          params: the parameters.
          tree: what is proposed.
          view: the step's.
          sampler: the step's.
          points: `[B, P]`.
          logits: `[B, P, V]`, the draft model's after each point; None if the target guesses (`target_guesses`).
        """
        if isinstance(self.lm, TrimmedLM):
            sampler = sampler.restricted(params["draft"]["ids"], self.lm.vocab_size)
        return self.likeliest(tree, sampler, points, logits), None

    def likeliest(self, tree: Tree, sampler: Sampler, points: Array, logits: Array) -> Array:
        """The F best tokens `[B, P, F]` after every point, the token that is proposed there aside."""
        pending, depth = tree.tokens[:, 1:], jnp.maximum(points, 0)
        paths = lambda: along(pending, depth, jnp.full((*depth.shape, 1), -1))
        following = jnp.take_along_axis(jnp.pad(pending, ((0, 0), (0, 1)), constant_values=-1), depth, axis=1)
        columns = jnp.arange(logits.shape[2])
        proposed = sampler.tokens_of(columns)[None, None] == following[:, :, None]
        scores = jnp.where(proposed, -jnp.inf, self._noisy(sampler, logits, depth, paths))
        if self.guessed == 1:
            found = best(scores)[:, :, None]
            possible = found >= 0
        else:
            values, found = jax.lax.top_k(scores, self.guessed)
            possible = values > -jnp.inf
        tokens = sampler.tokens_of(jnp.maximum(found, 0))
        return jnp.where(possible & (points >= 0)[:, :, None], tokens, -1).astype(jnp.int32)

    def _noisy(self, sampler, logits, depth, paths):
        if not self.keep_q:
            return sampler.scores(logits, depth, paths, self.block)
        scores = sampler.warped(logits, paths)
        if sampler.greedy:
            return scores
        noise = jnp.stack([sampler.residual_noise(at, self.vocab_size) for at in depth.T], axis=1)
        noise = noise if sampler.ids is None else noise[..., sampler.ids]
        return jnp.where((sampler.params.temperature > 0)[:, None, None], scores + noise, scores)

    def propose(self, params, draft, view, sampler):
        return self.ahead(params, draft, view, sampler, self.known(params, draft, view, sampler))

    def known(self, params: Any, draft: AheadDraft, view: View, sampler: Sampler) -> Tree:
        """What a step proposes: the branch that the text has taken, or what is proposed after a miss."""
        tokens, log_q, found = self.taken(draft, view)
        tokens, log_q = self.missed(params, draft, view, sampler, (tokens, log_q), found)
        nodes = jnp.concatenate([view.root[:, None], tokens], axis=1)
        end = lambda x: jnp.pad(x, ((0, 0), (0, 1), (0, 0)), constant_values=-jnp.inf)
        shown = None if log_q is None else end(log_q)
        return Tree.of(self.topology, nodes, nodes >= 0, log_q=shown, children=self.children)

    def ahead(
        self, params: Any, draft: AheadDraft, view: View, sampler: Sampler, tree: Tree, first: Array | None = None
    ) -> Proposal:
        """The proposal of a tree, whose state has new branches below it.

        Args:
          params: the parameters.
          draft: the state.
          view: the step's.
          sampler: the step's.
          tree: from `known`.
          first: the guesses `[B, P, F]`, if they were made elsewhere (`guesses`); otherwise they are made here.
        """
        weights, width = params["draft"], view.max_depth + 1
        pending, points = tree.tokens[:, 1:], self.points_of(tree)
        read = self._read(weights, draft, view, pending)
        ends = jnp.clip(view.length - 1 - draft.length, 0, width - 1)[:, None] + jnp.maximum(points, 0)
        partial = None
        if first is None:
            final = jnp.take_along_axis(read.final, ends[:, :, None], axis=1)
            first, partial = self.guesses(params, tree, view, sampler, points, self.lm.unembed(weights, final))
        if isinstance(self.lm, TrimmedLM):
            sampler = sampler.restricted(weights["ids"], self.lm.vocab_size)
        rest, log_q = self._written(weights, draft, view, sampler, pending, points, first, read.delta, ends)
        # as in `ModelDrafter.begun`: the write depends on the reads, so that the cache is updated in place
        after = jnp.where(jnp.isnan(read.final[:, 0, 0]) | (rest[:, 0, 0, 0] < -1), 0, draft.length)
        delta = jax.tree.map(lambda x: x[:, :width], read.delta)
        cache = self.lm.commit(draft.cache, delta, None, after, view.length - draft.length)
        own = AheadDraft(cache, view.length, view.length, pending, points, first, rest, log_q)
        return Proposal(tree, own, partial=partial)

    def _read(self, weights, draft, view, pending):
        """One pass over what the last step committed and the proposed tokens after it, `[B, W]`."""
        at = draft.length[:, None] + jnp.arange(view.max_depth + 1 + self.block)[None]
        text = jnp.take_along_axis(view.tokens, at, axis=1, mode="clip")
        new = jnp.take_along_axis(pending, jnp.clip(at - view.length[:, None], 0, self.block - 1), axis=1)
        block = Block(jnp.where(at < view.length[:, None], text, new), at, draft.length)
        return self.lm(weights, block, draft.cache, wants=Wants(final=True))

    def _written(self, weights, draft, view, sampler, pending, points, first, past, ends):
        """K more tokens after every guess, `[B, P, F, K]`, and their distributions, one pass for each token of all
        branches.
        """
        batch, branches = first.shape[0], first.shape[1] * first.shape[2]
        spread = lambda x: jnp.repeat(x, self.guessed, axis=1)
        depth, slots = spread(jnp.maximum(points, 0)), jnp.arange(jax.tree.leaves(past)[0].shape[1])
        seen = slots[None, None] <= spread(ends)[:, :, None]
        own = jnp.broadcast_to(jnp.eye(branches, dtype=bool)[None], (batch, branches, branches))
        tokens, dists = [first.reshape(batch, branches)], []
        for step in range(self.block):
            seen = jnp.concatenate([seen, own], axis=2)
            block = Block(tokens[-1], view.length[:, None] + depth + step, draft.length, seen)
            output = self.lm(weights, block, draft.cache, wants=Wants(logits=True), past=past)
            past = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), past, output.delta)
            written = jnp.stack(tokens, axis=2)
            paths = lambda written=written: along(pending, depth, written)
            drawn = sampler.draw(output.logits, depth + step + 1, paths, 2 * self.block)
            if self.keep_q:
                dists.append(sampler.full(sampler.log_probs(output.logits, paths)))
            possible = (tokens[-1] >= 0) & (drawn >= 0)
            tokens.append(jnp.where(possible, sampler.tokens_of(jnp.maximum(drawn, 0)), -1).astype(jnp.int32))
        shape = (*first.shape, self.block)
        log_q = jnp.stack(dists, axis=2).reshape(*shape, -1) if self.keep_q else None
        return jnp.stack(tokens[1:], axis=2).reshape(shape), log_q


def along(pending: Array, depth: Array, own: Array) -> Array:
    """The paths of branches below the root, `[B, T, K + M]`: the first `depth` `[B, T]` tokens of `pending` `[B, K]`, and then
    `own` `[B, T, M]`; -1 after that.
    """
    count, more = pending.shape[1], own.shape[2]
    at = jnp.arange(count + more)[None, None]
    before = jnp.broadcast_to(jnp.pad(pending, ((0, 0), (0, more)))[:, None], (*depth.shape, count + more))
    later = at - depth[:, :, None]
    mine = jnp.take_along_axis(own, jnp.clip(later, 0, more - 1), axis=2)
    return jnp.where(later < 0, before, jnp.where(later < more, mine, -1))
