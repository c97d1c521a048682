"""FreeDave: several steps of static decoding from one pass, verified by the next (arXiv:2510.00294).

What static decoding would commit next is guessed from the predictions at hand: the n surest now, then the next n, and so on.
One pass reads all of these canvases; each is kept as long as static decoding, from the one before, would have made it. So the
text is that of static decoding, in fewer passes.

In the shape descriptions `K` denotes the canvases of a pass.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.diffusion.common import first_open
from specjax.diffusion.decoder import Diffusion, DiffusionInfo, DiffusionState
from specjax.diffusion.unmask.base import RULES, Choice, Guess, ranks
from specjax.diffusion.unmask.fixed import Fixed
from specjax.sharding.ambient import on_mesh
from specjax.state import Stats, finish_rows

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class FreeDave(Fixed):
    """`Fixed`, several steps a pass: the same text, whatever `drafts` is.

    Attributes:
      drafts: K.
    """

    about = About("free_dave", "fixed, several steps a pass: the same text; no cache", "arXiv:2510.00294", "same text")

    drafts: int = 4

    def __post_init__(self):
        super().__post_init__()
        if self.drafts < 1:
            raise ValueError(f"drafts must be at least 1, got {self.drafts}")

    @property
    def decoder(self):
        return FreeDaveDecoder


@dataclasses.dataclass(frozen=True)
class FreeDaveDecoder(Diffusion):
    """A `Diffusion` decoder whose policy is `FreeDave`.

    Its state's `memory` holds what the last pass predicted for the active block: `tokens` and `score` `[B, W]`, and whether
    there was one (`ready` `[B]`). A pass over the last canvas is left out, since nothing depends on it: a row that fills
    its canvas never takes more passes than static decoding.
    """

    policy: FreeDave = FreeDave()

    def checked(self):
        if self.cache.keeps or self.cfg_scale:
            raise ValueError("free_dave takes neither a cache nor guidance yet: choose the cache none and cfg_scale 0")
        return super().checked()

    def blank(self, batch, capacity):
        """See `Diffusion.blank`."""
        shape = (batch, self.block_length)
        return {"tokens": jnp.zeros(shape, jnp.int32), "score": jnp.zeros(shape), "ready": jnp.zeros((batch,), bool)}

    @on_mesh
    def step(self, params, state):
        """One pass over K canvases: a row commits as many steps of static decoding as they hold."""
        at, masked = self._masked(state)
        live, ready = ~state.done, state.memory["ready"]
        masked = masked & live[:, None]
        batch = state.tokens.shape[0]

        # the canvases: what static decoding commits in 1, 2, ... K steps, if its predictions stay as they are
        counts = jnp.stack(
            [self.policy.count(state.step + ahead, state.entry) for ahead in range(self.policy.drafts)], axis=1
        )
        rank = ranks(state.memory["score"], masked)
        commit = (rank[:, None] < jnp.cumsum(counts, axis=1)[:, :, None]) & (masked & ready[:, None])[:, None]
        block = jnp.take_along_axis(state.tokens, at, axis=1, mode="clip")
        drafts = jnp.where(commit, state.memory["tokens"][:, None], block[:, None])  # [B, K, W]
        canvases = jax.vmap(
            lambda row, at, drafts: jax.vmap(lambda new: row.at[at].set(new, mode="drop"))(drafts)
        )(state.tokens, at, drafts)  # fmt: skip

        last = ready & (first_open(canvases[:, 0], state.limit, self.mask_id) >= state.limit)
        wanted = live & ~last
        read = lambda: self._read_all(params["target"], state, canvases)
        skipped = jax.eval_shape(read)
        final = jax.lax.cond(jnp.any(wanted), read, lambda: jnp.zeros(skipped.shape, skipped.dtype))

        # how far static decoding agrees: from canvas i it makes canvas i + 1
        left = masked[:, None] & ~commit
        steps = state.step[:, None] + jnp.arange(1, self.policy.drafts + 1)[None]
        source = jnp.maximum(at - 1, 0) if self.shift else at
        guesses = [
            self._expect(params, state, at, left[:, j], steps[:, j], self._take(final[:, j], source))
            for j in range(self.policy.drafts - 1)
        ]
        agree = []
        for j, guess in enumerate(guesses):
            following = ranks(RULES[self.policy.rule](guess), left[:, j]) < counts[:, j + 1, None]
            made = jnp.where(following & left[:, j], guess.tokens, drafts[:, j])
            same = jnp.all(made == drafts[:, j + 1], axis=1) & ~jnp.any(left[:, j] & (guess.tokens < 0), axis=1)
            agree.append(same & left[:, j].any(axis=1))
        chain = jnp.cumprod(jnp.stack([*agree, jnp.zeros((batch,), bool)], axis=1).astype(jnp.int32), axis=1).sum(
            axis=1
        )
        kept = jnp.where(ready & ~last, chain, 0)
        pick = lambda x: jnp.take_along_axis(x, kept.reshape(-1, *[1] * (x.ndim - 1)), axis=1)[:, 0]

        chosen = Choice(pick(commit), state.memory["score"], state.memory["tokens"])
        new = self._commit(state, at, masked, chosen.commit, chosen, state.memory, jnp.zeros((batch,), bool))
        entered = live & ready & ~jnp.any(masked & ~chosen.commit, axis=1)
        new = dataclasses.replace(
            new,
            step=jnp.where(entered, 0, jnp.where(ready, state.step + kept + 1, state.step)),
            stats=Stats(
                state.stats.steps + wanted, jnp.where(ready[:, None], new.stats.accepted, state.stats.accepted)
            ),
        )
        return self._remember(params, new, pick(final)), DiffusionInfo(at[:, 0], chosen.commit, chosen)

    def _read_all(self, weights, state, canvases):
        """Features `[B, K, L, E]` of the canvases `[B, K, L]`."""
        flat = canvases.reshape(-1, canvases.shape[-1])
        final = self._final(weights, flat, jnp.repeat(state.limit, self.policy.drafts)).final
        return final.reshape(*canvases.shape, -1)

    def _take(self, final, source):
        return jnp.take_along_axis(final, source[:, :, None], axis=1, mode="clip")

    def _expect(self, params, state, at, masked, step, features) -> Guess:
        logits = self._possible(self.target.unembed(params["target"], features))
        return self._guess(dataclasses.replace(state, step=step), at, masked, logits)

    def _remember(self, params, state: DiffusionState, final) -> DiffusionState:
        """The state with predictions for its active block, from the features `[B, L, E]` of its canvas."""
        at, masked = self._masked(state)
        source = jnp.maximum(at - 1, 0) if self.shift else at
        guess = self._expect(params, state, at, masked, state.step, self._take(final, source))
        failed = ~state.done & jnp.any(masked & (guess.tokens < 0), axis=1)
        memory = {"tokens": guess.tokens, "score": RULES[self.policy.rule](guess), "ready": ~state.done}
        finish = finish_rows(state, state.length, jnp.zeros_like(failed), failed)
        return dataclasses.replace(state, memory=memory, finish=finish)
