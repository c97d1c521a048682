"""Mirror-SD: an early exit of the target says which tokens the draft model goes on from (arXiv:2510.13161)."""

import dataclasses
from typing import Any

import jax

from specjax.about import About
from specjax.draft.base import Proposal
from specjax.draft.saguaro import Saguaro
from specjax.lm import Partial


@dataclasses.dataclass(frozen=True)
class MirrorSD(Saguaro):
    """`Saguaro` whose guesses are the target's own: the best tokens of an early exit, under the target's norm and head.

    The first layers read the block, and their best tokens go to the draft model. It writes its branches while the
    target's other layers read the block. A step computes the first layers once, since they are the target's head start.

    The paper's draft model also writes several tokens in a pass (speculative streaming), which needs training and is not
    here.

    Attributes:
      length: the tokens of a block.
      fan: the guesses after each token.
      exit: after how many of the target's layers; 0: half of them.
    """

    about = About(
        "mirror_sd",
        "a small model that writes a block for each of the best tokens of an early exit of the target",
        "arXiv:2510.13161",
        fields=("length", "fan", "exit"),
        loads="model",
    )
    tiles = True

    length: int = 4
    fan: int = 4
    exit: int = 0
    target: Any = dataclasses.field(default=None, kw_only=True)
    """Filled in by `bind`."""

    plain_tree = False
    target_guesses = True

    def bind(self, target):
        layers = self.exit or target.num_layers // 2
        if not 0 < layers < target.num_layers:
            raise ValueError(
                f"mirror_sd leaves the target after some of its {target.num_layers} layers, not after {layers}: choose exit "
                f"from 1 to {target.num_layers - 1}"
            )
        if self.fan > target.vocab_size - 1:
            raise ValueError(f"mirror_sd: fan={self.fan} is too many of the target's {target.vocab_size} tokens")
        return dataclasses.replace(super().bind(target), exit=layers, target=target)

    def guesses(self, params, tree, view, sampler, points, logits):
        lm, weights = self.target, params["target"]
        block = Proposal(tree, None).block(view)
        with jax.named_scope("exit"):
            h, delta = lm.layers(weights, lm.embed(weights, tree.tokens), 0, self.exit, block, view.cache)
            early = lm.unembed(weights, lm.norm(weights, h))
        return self.likeliest(tree, sampler, points, early), Partial(h, delta, self.exit)
