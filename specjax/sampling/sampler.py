"""A step's sampler: warpers and noise bound to the rows' text, shared by the drafter and the verifier."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from specjax.arrays import Array, Bool, Float, Int, Key
from specjax.kernels.verify import gumbel_argmax
from specjax.sampling.noise import ACCEPT, CHILDREN, COIN, GUMBEL, RESIDUAL, STEP, gumbel, gumbel_at, keys_at, uniform
from specjax.sampling.processors import Processor, process
from specjax.sampling.warp import carried, guessed, penalise, penalised_rows, walks, warp
from specjax.sampling_params import SamplingArrays
from specjax.warpers import Text

Paths = Callable[[], Int[Array, "B T D"]]
"""Makes `[B, T, D]` int32, the tokens of each node's path below the root (-1: none). Called only if needed."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampler:
    """Everything that determines a draw in one step.

    Depth 0 is the root: the token drawn there becomes the token at position `length`.

    Attributes:
      key: `[B]` typed row keys.
      tokens: `[B, L]` int32, the rows' text.
      length: `[B]` int32.
      live: `[B]` bool, rows still decoding; the others never switch a costly branch on.
      params: the rows' sampling parameters.
      ids: `[U]` int32, the target ids of the columns of every `[..., U]` array, for a draft head over fewer tokens;
        None if columns are ids.
      vocab: static, V, set together with `ids`.
      processors: static, the user's own warpers.
      drafting: static, whether what is drawn is a draft.
      greedy: static, whether it is known that no row uses a warper: then no warper is traced.
      begin: `[B]` int32, how much of the text is the prompt; None: nothing.
      eos: `[B, K]` int32, ids that end a row, padded with -1; None: none.
      place_key: `[B]` typed row keys of noise that is part of a place's distribution, if that is not `key`.
      carried: the sums of the warpers that carry one, `[B]` float32 each, and the states of those that walk,
        `[B, ...]`; None: sums begin here, and states follow from the text.
      limit: `[B]` int32, the length at which each row stops; None: not known.
    """

    key: Key[Array, " B"]
    tokens: Int[Array, "B L"]
    length: Int[Array, " B"]
    live: Bool[Array, " B"]
    params: SamplingArrays
    ids: Int[Array, " U"] | None = None
    vocab: int = dataclasses.field(default=0, metadata={"static": True})
    processors: tuple[Processor, ...] = dataclasses.field(default=(), metadata={"static": True})
    greedy: bool = dataclasses.field(default=False, metadata={"static": True})
    begin: Int[Array, " B"] | None = None
    eos: Int[Array, "B K"] | None = None
    place_key: Key[Array, " B"] | None = None
    carried: Mapping[str, Any] | None = None
    limit: Int[Array, " B"] | None = None
    drafting: bool = dataclasses.field(default=False, metadata={"static": True})

    def restricted(self, ids: Int[Array, " U"] | None, vocab: int) -> "Sampler":
        """The same sampler for logits over the columns `ids` `[U]` of V tokens: same noise, same penalties."""
        return self if ids is None else dataclasses.replace(self, ids=ids, vocab=vocab)

    def once(self) -> "Sampler":
        """The same distributions with noise that no other step uses: a row's text grows in every step."""
        key = keys_at(self.key, self.length[:, None], STEP)[:, 0]
        return dataclasses.replace(self, key=key, place_key=self.key if self.place_key is None else self.place_key)

    def tokens_of(self, columns: Array) -> Array:
        """Target ids of columns."""
        return columns if self.ids is None else self.ids[columns]

    def full(self, log_probs: Array) -> Array:
        """A distribution `[..., U]` over the columns as one over the vocabulary, `[..., V]`; other tokens are impossible."""
        if self.ids is None:
            return log_probs
        return jnp.full((*log_probs.shape[:-1], self.vocab), -jnp.inf).at[..., self.ids].set(log_probs)

    def each(self, logits: Array, nodes: int, paths: Paths | None) -> tuple[Array, Paths | None]:
        """The logits of a level's nodes that may share one distribution, and the paths for its warpers.

        What nodes share is warped once, for the committed text alone. If a warper walks along paths, it is not shared.

        Args:
          logits: `[B, F, V]`, or `[B, 1, V]` if F nodes share them.
          nodes: F.
          paths: makes the tokens of each node's path.
        """
        if logits.shape[1] == nodes:
            return logits, paths
        if self.greedy or not walks(self.params):
            return logits, None
        return jnp.broadcast_to(logits, (logits.shape[0], nodes, logits.shape[2])), paths

    def _columns(self, full: Array) -> Array:
        return full if self.ids is None else full[..., self.ids]

    def penalised(
        self, logits: Float[Array, "B T V"], paths: Paths | None = None, known: bool = True
    ) -> Float[Array, "B T V"]:
        """Logits `[B, T, V]` after the processors and the warpers that apply to greedy rows too; `paths` makes each
        node's own tokens, which are otherwise none, or not `known`.
        """
        text, penalised = self.text(paths, known), logits
        if not self.greedy:
            within = lambda work: lambda scores: self._columns(work(self.full(scores)))
            penalised = penalise(logits, self.params, self.live, text, within)
        if not self.processors:
            return penalised
        return self._columns(process(self.processors, self.full(penalised), text))

    def guessed(self, count: int) -> Int[Array, "B count"]:
        """Tokens `[B, count]` that warpers nearly leave no choice about, from the root on; -1 after the last of them."""
        if self.greedy:
            return jnp.full((self.length.shape[0], count), -1, jnp.int32)
        return guessed(self.params, self.text(None), count)

    def text(self, paths: Paths | None, known: bool = True) -> Text:
        """The text before the positions that `paths` lead to; without paths, before the next position."""
        key = self.key if self.place_key is None else self.place_key
        coins = lambda positions: uniform(key, positions, COIN)
        partial = self.ids is not None
        own = (self.tokens, self.length, self.begin, self.eos)
        return Text(*own, paths, coins, self.carried, partial, self.limit, known, self.drafting, self.live)

    def warped(self, logits: Float[Array, "B T V"], paths: Paths | None = None) -> Float[Array, "B T V"]:
        """Scores `[B, T, V]` whose softmax is the distribution of the next token; greedy rows keep their penalised logits."""
        penalised = self.penalised(logits, paths)
        return penalised if self.greedy else warp(penalised, self.params, self.live, self.text(paths))

    def after(
        self, logits: Float[Array, "B T V"], paths: Paths, tokens: Int[Array, "B T"], count: Int[Array, " B"]
    ) -> Mapping[str, Any] | None:
        """`carried` after a step.

        Args:
          logits: `[B, T, V]` float32 along the path that was taken, from the root on.
          paths: makes the tokens of each of those nodes' paths.
          tokens: `[B, T]` int32, the token drawn at each.
          count: `[B]` int32, how many of them were committed.
        """
        return carried(self.penalised(logits, paths), self.params, self.live, self.text(paths), tokens, count)

    def log_probs(self, logits: Float[Array, "B T V"], paths: Paths | None = None) -> Float[Array, "B T V"]:
        """The distribution of the next token as log-probabilities `[B, T, V]`; one-hot in greedy rows that are live."""
        warped = self.warped(logits, paths)
        dist, greedy = jax.nn.log_softmax(warped, axis=-1), self.params.temperature == 0

        def one_hot():
            top = jax.nn.one_hot(best(warped), logits.shape[-1], dtype=bool)
            return jnp.where(greedy[:, None, None], jnp.where(top, 0.0, -jnp.inf), dist)

        return jax.lax.cond(jnp.any(self.live & greedy), one_hot, lambda: dist)

    def scores(
        self,
        logits: Float[Array, "B T V"],
        depth: Int[Array, "B T"] | int,
        paths: Paths | None = None,
        max_depth: int = 0,
    ) -> Float[Array, "B T V"]:
        """Scores `[B, T, V]` whose argmax is the draw: warped scores plus the shared Gumbel noise of that depth.

        A greedy batch makes no noise and runs no warper.

        Args:
          logits: `[B, T, V]` float32.
          depth: `[B, T]` int32, or one static depth for all slots. Slots of equal depth share one noise vector.
          paths: makes the tokens of each node's path, or None.
          max_depth: static bound on an array `depth`.
        """

        def noisy():
            vocab = self.vocab or logits.shape[-1]
            if isinstance(depth, int):
                g = self._columns(gumbel(self.key, self.length[:, None] + depth, vocab))
            else:
                g = gumbel(self.key, self.length[:, None] + jnp.arange(max_depth + 1)[None], vocab)
                g = jnp.take_along_axis(self._columns(g), depth[:, :, None], axis=1)
            sampled = (self.params.temperature > 0)[:, None, None]
            penalised = self.penalised(logits, paths, known)
            return jnp.where(sampled, warp(penalised, self.params, self.live, self.text(paths)) + g, penalised)

        known = paths is not None or isinstance(depth, int) and depth == 0
        if self.greedy:
            return self.penalised(logits, paths, known)
        sampled = jnp.any(self.live & (self.params.temperature > 0))
        return jax.lax.cond(sampled, noisy, lambda: self.penalised(logits, paths, known))

    def scores_at(self, log_q: Array, ids: Array, depth: int) -> Array:
        """Scores as in `scores`, but for only C candidates per node, and of the warpers only with the temperature.

        Args:
          log_q: `[B, F, C]` float32 log-probabilities; -inf where there is no candidate.
          ids: `[B, F, C]` int32, their tokens; anything where there is none.
          depth: static, of all F nodes.
        """
        sampled = (self.params.temperature > 0)[:, None, None]

        def noisy():
            g = gumbel_at(self.key, self.length[:, None] + depth, ids.reshape(ids.shape[0], 1, -1))
            heat = jnp.where(sampled, self.params.temperature[:, None, None], 1)
            return jnp.where(sampled, log_q / heat + g.reshape(ids.shape), log_q)

        if self.greedy:
            return log_q
        return jax.lax.cond(jnp.any(self.live & (self.params.temperature > 0)), noisy, lambda: log_q)

    def draw(
        self,
        logits: Float[Array, "B T V"],
        depth: Int[Array, "B T"] | int,
        paths: Paths | None = None,
        max_depth: int = 0,
    ) -> Int[Array, "B T"]:
        """Tokens `[B, T]` int32, the coupled draw at every slot; -1 where no score is finite (NaN or all removed).

        The argmax of `scores`, whose noise is never an array.
        """
        hot = self.params.temperature > 0

        def noisy():
            depths = jnp.full(logits.shape[:2], depth) if isinstance(depth, int) else depth
            first, count = (depth, 1) if isinstance(depth, int) else (0, max_depth + 1)
            keys = keys_at(self.key, self.length[:, None] + first + jnp.arange(count)[None], GUMBEL)
            return gumbel_argmax(self.warped(logits, paths), keys, depths - first, hot, columns=self.ids)[0]

        def slow():
            return jax.lax.cond(jnp.any(self.live & hot), noisy, lambda: best(self.penalised(logits, paths)))

        if self.greedy:
            return best(self.penalised(logits, paths))
        if self.processors:
            return slow()
        uses = hot | penalised_rows(self.params)
        return jax.lax.cond(jnp.any(self.live & uses), slow, lambda: best(logits))

    def children_noise(self, depth: int, draws: int, columns: int) -> Float[Array, "B draws columns"]:
        """Gumbel noise `[B, draws, columns]` for draws of the tokens below nodes of a depth, separate from the shared
        noise.
        """
        ids = jnp.arange(draws * columns)[None, None]
        g = gumbel_at(self.key, self.length[:, None] + depth, ids, CHILDREN)
        return g.reshape(g.shape[0], draws, columns)

    def uniform(self, count: int) -> Float[Array, "B count"]:
        """Acceptance uniforms `[B, count]` for positions length, length + 1, ..."""
        return uniform(self.key, self.length[:, None] + jnp.arange(count)[None], ACCEPT)

    def uniform_of(self, tree_depth: Int[Array, "B N"], purpose: int = ACCEPT) -> Float[Array, "B N"]:
        """Uniforms `[B, N]` of a tree's nodes, each for its token's position; the root's is not used.

        Args:
          tree_depth: `[B, N]` int32, the nodes' depths.
          purpose: what they decide.
        """
        nodes = jnp.broadcast_to(jnp.arange(tree_depth.shape[1])[None], tree_depth.shape)
        keys = keys_at(self.key, self.length[:, None] + tree_depth - 1, purpose)
        draw = jax.vmap(jax.vmap(lambda key, node: jax.random.uniform(jax.random.fold_in(key, node), (), jnp.float32)))
        return draw(keys, nodes)

    def residual_noise(self, depth: Int[Array, " B"], vocab: int) -> Float[Array, "B V"]:
        """Gumbel noise `[B, V]` for a residual drawn at `depth` `[B]`, separate from the shared noise."""
        return gumbel(self.key, (self.length + depth)[:, None], vocab, RESIDUAL)[:, 0]


def best(scores: Float[Array, "B T V"]) -> Int[Array, "B T"]:
    """Argmax `[B, T]` with ties to the lowest id; -1 if the largest score is not finite (NaN counts as the largest).

    It makes two plain reductions: they vectorise on a CPU, where `jnp.argmax` compares pairs one by one. XLA's maximum
    over many numbers may lose a NaN there, so the second reduction looks for it.
    """
    peak = scores.max(axis=-1, keepdims=True)
    ids = jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    rest = jnp.where(jnp.isnan(scores), -1, scores.shape[-1])
    index = jnp.where(scores == peak, ids, rest).min(axis=-1)
    return jnp.where(jnp.isfinite(peak[..., 0]), index, -1)
