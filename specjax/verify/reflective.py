"""Reflective verification (Wang et al. 2025, arXiv:2505.18629), lossy: the target reads the draft, is asked to think
about it, and reads it again; its second answer counts too.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.lm import Wants
from specjax.tree import Extra
from specjax.verify.base import Verdict, Verifier
from specjax.verify.top_down import at

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Reflective(Verifier):
    """A chain's token passes if it is the draw from p', which mixes p with the target's second distribution.

    The second distribution is at the same place of a copy of the draft, after the draft itself and a prompt that asks
    the target to reflect on it. The draw from p passes too. The chain is kept up to the first token that does not pass,
    and the target's own draw from p follows.

    One pass reads the chain's N nodes, R tokens of the prompt and N of the copy, which are never committed. The copy
    begins with the root, so that it has a place that predicts its first drafted token. Distributions are mixed as the
    model has them, before filters and temperature. With a weight of 0 it is `Coupled`.

    Lossy in greedy rows too, but only in what passes: every written token is either drafted or the target's own.
    Choices of this library: mixing distributions or logits, the weight, the prompt, and testing p' by draws with the
    noise of p.

    Attributes:
      prompt: its token ids, R of them; a line of text gives it as words.
      weight: of the second distribution, in [0, 1].
      mix: "probs": p' = (1 - weight) p + weight p_2; "logits": the same with their logarithms.
    """

    about = About(
        "reflective",
        "keep the draw from p, or from p mixed with what the target says of a second copy of the draft; chains only",
        "arXiv:2505.18629",
        "lossy",
        fields=("weight", "mix"),
        loads="prompt",
        tree="chain:length={depth}",
    )

    wants = Wants(logits=True, draw=True)
    keeps_greedy = False

    prompt: tuple[int, ...] = ()
    weight: float = 0.3
    mix: str = "probs"

    def __post_init__(self):
        if not 0 <= self.weight <= 1 or self.mix not in ("probs", "logits"):
            raise ValueError(f"reflective needs a weight in [0, 1], and mix=probs or mix=logits, got {self}")

    def check(self, drafter):
        super().check(drafter)
        if not drafter.is_chain or not drafter.plain_tree:
            raise ValueError(
                "the reflective verifier takes chains that are read whole and alone, and this drafter proposes "
                f"{'more than its tokens' if drafter.is_chain else 'a tree'}: choose another drafter, a chain expander, or the "
                "coupled verifier"
            )

    def extra(self, tree, sampler):
        """The prompt and the copy, `[B, R + N]`; each slot sees those before it and the drafted tokens."""
        if tree.max_depth == 0:
            return None
        if not tree.is_chain:
            raise ValueError("the reflective verifier takes chains, and this tree is not one: choose a chain expander")
        prompt = jnp.broadcast_to(jnp.asarray(self.prompt, jnp.int32), (len(tree.tokens), len(self.prompt)))
        tokens = jnp.concatenate([prompt, tree.tokens], axis=1)
        rows, slots = tokens.shape
        # the prompt follows at once after a chain that stopped early
        positions = (sampler.length - 1 + tree.valid.sum(axis=1))[:, None] + jnp.arange(slots)[None]
        draft = jnp.broadcast_to(tree.valid[:, None], (rows, slots, tree.nodes))
        itself = jnp.broadcast_to(jnp.tril(jnp.ones((slots, slots), bool)), (rows, slots, slots))
        return Extra(tokens, positions.astype(jnp.int32), jnp.concatenate([draft, itself], axis=2))

    def __call__(self, output, tree, sampler):
        draw = output.draw[:, : tree.nodes]
        passes = tree.tokens[:, 1:] == draw[:, :-1]
        if tree.max_depth:
            again = output.logits[:, tree.nodes + len(self.prompt) :]
            logits = mixed(output.logits[:, : tree.nodes], again, self.weight, self.mix)
            reflected = sampler.draw(logits, tree.depth, tree.path_tokens, tree.max_depth)
            passes = passes | (tree.tokens[:, 1:] == reflected[:, :-1])
        passes = passes & tree.valid[:, 1:] & (draw[:, :-1] >= 0)
        accepted = jnp.cumprod(passes.astype(jnp.int32), axis=1).sum(axis=1)
        steps = jnp.arange(tree.max_depth + 1)[None]
        return Verdict(jnp.where(steps <= accepted[:, None], steps, -1), accepted, at(draw, accepted))


def mixed(logits: Array, again: Array, weight: float, mix: str) -> Array:
    """Logits `[..., V]` of the distribution p' (see `Reflective`); those of p if the weight is 0. Tokens that p rules
    out stay so.

    They are computed as the first ones plus a difference. So mixed distributions keep their scale, on which penalties
    depend.

    Args:
      logits: `[..., V]` of p.
      again: `[..., V]` of the second distribution.
      weight: of the second.
      mix: see `Reflective`.
    """
    ratio = jax.nn.log_softmax(again, axis=-1) - jax.nn.log_softmax(logits, axis=-1)
    if mix == "logits":
        more = weight * ratio
    else:
        more = jnp.logaddexp(jnp.log1p(-weight), jnp.log(weight) + ratio)
    return jnp.where(jnp.isfinite(logits), logits + more, logits)
