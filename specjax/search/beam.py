"""Beam search and diverse beam search (Vijayakumar et al. 2016): the texts with the highest log-probability that they find.

In the shape descriptions `B` denotes rows (prompts), `G` groups, `W` beams of a group, `K = G W` beams, `C` candidates,
`L` the text buffer, `V` the vocabulary.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.lm import LM
from specjax.search.base import Beams, Found, Search, SearchSettings, SearchState
from specjax.search.fork import chosen, merged, parted
from specjax.sharding.ambient import on_mesh
from specjax.state import Finish

Array = jax.Array
PyTree = Any


@dataclasses.dataclass(frozen=True)
class Beam(SearchSettings):
    """`transformers`' beam search, with the same sequences, scores and meanings of all options.

    Every step continues the beams of a group in all ways and keeps the likeliest. Texts that end among the `W`
    likeliest candidates are kept apart, scored by their log-probability over a power of their length.

    With several groups a step takes them in turn. A token that earlier groups have chosen costs a later group
    `diversity_penalty`, as often as it was chosen. That is part of the scores (the scorer of transformers 4, which
    transformers 5 no longer has).

    Attributes:
      num_beams: K.
      num_beam_groups: G, which divides K.
      diversity_penalty: nats; 0 leaves all groups alike.
      length_penalty: the power of the length (new tokens, EOS included); above 0 it favours longer texts.
      early_stopping: True: a group ends with W texts. False: it ends if its best beam, were it to end now, would be no
        better than the worst of W texts. "never": it ends if no beam can become better.

    Raises:
      ValueError: for numbers out of range, or if the groups do not divide K.
    """

    about = (
        About(
            "beam", "the likeliest of K texts that grow side by side", "transformers", "own text",
            fields=("num_beams", "length_penalty", "early_stopping"),
        ),
        About(
            "diverse_beam", "groups of beams, the later ones away from the earlier", "arXiv:1610.02424, transformers 4",
            "own text", defaults={"num_beam_groups": 2, "diversity_penalty": 0.5},
            fields=("num_beams", "num_beam_groups", "diversity_penalty", "length_penalty", "early_stopping"),
        ),
    )  # fmt: skip

    num_beams: int = 4
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self):
        beams, groups = self.num_beams, self.num_beam_groups
        if not all(isinstance(count, int) and count >= 1 for count in (beams, groups)):
            raise ValueError(f"num_beams and num_beam_groups must be whole numbers from 1 on, got {beams} and {groups}")
        if beams % groups:
            raise ValueError(f"{beams} beams cannot be shared out to {groups} groups: give a multiple of {groups}")
        if self.early_stopping not in (True, False, "never"):
            raise ValueError(f'early_stopping must be true, false or "never", got {self.early_stopping!r}')
        if not 0 <= self.diversity_penalty < float("inf"):
            raise ValueError(f"diversity_penalty must be 0 or more, got {self.diversity_penalty}")
        if self.diversity_penalty and groups == 1:
            raise ValueError("diversity_penalty keeps groups of beams apart: set num_beam_groups to 2 or more")
        if not abs(self.length_penalty) < float("inf"):
            raise ValueError(f"length_penalty must be a finite number, got {self.length_penalty}")

    @property
    def per_token(self) -> str:
        return f" of the best texts, a step of all {self.num_beams} beams for each"

    def decoder(self, target: LM, mesh: Any) -> "BeamSearch":
        return BeamSearch(target, self, mesh)


@dataclasses.dataclass(frozen=True)
class BeamSearch(Search):
    """The decoder of `Beam`."""

    how: Beam

    @property
    def obeys(self) -> bool:
        """See `Decoder.obeys`."""
        return True

    @property
    def num_texts(self) -> int:
        return self.how.num_beams

    @property
    def num_groups(self) -> int:
        return self.how.num_beam_groups

    @on_mesh
    def step(self, params: PyTree, state: SearchState) -> tuple[SearchState, None]:
        """One target pass over all beams: each grows by one token."""
        live = ~state.done
        length = state.prompt_length + state.stats.steps
        logits, delta = self._read(params, state, length)
        log_probs = jax.nn.log_softmax(logits, axis=-1)
        groups, taken = [], jnp.zeros((state.length.shape[0], log_probs.shape[-1]))
        for index in range(self.how.num_beam_groups):
            open = state.open[:, index] & live
            group = self._advance(state, index, log_probs, taken, length, open)
            groups.append(group)
            taken = group.add_to(taken, open)
        beams, found, source, open, failed = _side_by_side(groups)
        with jax.named_scope("fork"):
            cache = self._forked(state, delta, source, length, live)
        over = ~open.any(axis=1) | (length + 1 >= state.limit) | failed.any(axis=1)
        return self._after(state, over, failed.any(axis=1), beams, found, open, cache), None

    def _advance(self, state, index, log_probs, taken, length, open) -> "_Group":
        """A step of one group, from the log-probabilities of all beams and the tokens `[B, V]` that earlier groups chose."""
        width = self.how.num_beams // self.how.num_beam_groups
        own = slice(index * width, (index + 1) * width)
        beams, found = jax.tree.map(lambda x: x[:, own], (state.beams, state.found))
        batch, _, capacity = beams.tokens.shape
        vocab = log_probs.shape[-1]
        scores = log_probs[:, own] - self.how.diversity_penalty * taken[:, None]
        scores = self._warped(state, scores, beams.tokens, length, open) + beams.scores[:, :, None]
        # so many that at least W of them do not end
        count = min((1 + state.eos.shape[1]) * width, width * vocab)
        top, flat = jax.lax.top_k(scores.reshape(batch, -1), count)
        parent, token = flat // vocab, flat % vocab
        texts = jnp.where(
            jnp.arange(capacity)[None, None] == length[:, None, None], token[:, :, None], chosen(beams.tokens, parent)
        )
        eos = (token[:, :, None] == state.eos[:, None, :]).any(axis=2)
        ends = eos | (length + 1 >= state.limit)[:, None]

        power = lambda tokens: tokens.astype(jnp.float32) ** self.how.length_penalty
        # computed once: a text that is found now and is also the best candidate must have the same score in both places below
        worth = jax.lax.optimization_barrier(top[:, :width] / power(length + 1 - state.prompt_length)[:, None])
        ended = jnp.where(ends[:, :width] & open[:, None], worth, -jnp.inf)
        finish = jnp.where(eos[:, :width], Finish.EOS, Finish.LENGTH).astype(jnp.int32)
        new = Found(texts[:, :width], jnp.broadcast_to(length[:, None] + 1, ended.shape), ended, finish)
        both = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), found, new)
        best = jax.lax.top_k(both.scores, width)[1]
        found = jax.tree.map(lambda x: chosen(x, best), both)

        going, picked = jax.lax.top_k(jnp.where(eos, -jnp.inf, top), width)
        patient = self.how.early_stopping == "never" and self.how.length_penalty > 0
        most = power((state.limit if patient else length + 1) - state.prompt_length)
        if (
            self.how.num_beam_groups == 1
        ):  # transformers 5 looks at the best continuing candidate, transformers 4 at the best candidate
            hope = going[:, 0] / most
        else:
            hope = top[:, 0] / most if patient else worth[:, 0]
        worst = found.scores.min(axis=1)
        better = (self.how.early_stopping is not True) & (hope > worst)
        still = open & jnp.isfinite(going[:, 0]) & (better | ~jnp.isfinite(worst))
        return _Group(
            Beams(chosen(texts, picked), going),
            found,
            index * width + chosen(parent, picked),
            chosen(token, picked),
            still,
            open & jnp.isnan(top).any(axis=1),
        )

    def _warped(self, state, scores, texts, length, open):
        """Log-probabilities `[B, W, V]` after the warpers that change greedy texts too, computed as for so many rows."""
        sampler = self._sampler(state, texts, length, open)
        return parted(sampler.penalised(merged(scores)[:, None]), scores.shape[1])[:, :, 0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Group:
    """The result of one group's step.

    Attributes:
      beams: that go on.
      found: texts.
      source: `[B, W]` int32, the beam of the row that each one continues.
      tokens: `[B, W]` int32, the token that continues each.
      open: `[B]` bool.
      failed: `[B]` bool, whether scores were not finite.
    """

    beams: Beams
    found: Found
    source: Array
    tokens: Array
    open: Array
    failed: Array

    def add_to(self, taken: Array, open: Array) -> Array:
        """How often tokens were chosen `[B, V]`, including this group's choices if it is open."""
        rows = jnp.arange(taken.shape[0])[:, None]
        return taken.at[rows, self.tokens].add(open[:, None].astype(taken.dtype))


def _side_by_side(groups: list[_Group]) -> tuple[Beams, Found, Array, Array, Array]:
    """Beams, found texts, sources `[B, K]`, and which groups are open and which have failed `[B, G]`."""
    join = lambda *parts: jnp.concatenate(parts, axis=1)
    beams, found, source = jax.tree.map(join, *[(group.beams, group.found, group.source) for group in groups])
    flags = lambda name: jnp.stack([getattr(group, name) for group in groups], axis=1)
    return beams, found, source, flags("open"), flags("failed")
