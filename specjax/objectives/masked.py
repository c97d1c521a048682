"""Training of masked-diffusion models: LLaDA's loss, and dParallel's certainty-forcing distillation.

In the shape descriptions `B` denotes rows, `T` tokens per row, `V` the vocabulary.
"""

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from specjax.lm import Block, Wants
from specjax.objectives.base import Objective, each_row
from specjax.objectives.means import MEAN
from specjax.sharding import shardings

if TYPE_CHECKING:
    from specjax.models import LlamaLM

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class MaskedObjective(Objective):
    """A loss of a masked-diffusion model's own parameters.

    Attributes:
      lm: the model.
      mask_id: the id of an open position.
      shift: see `specjax.diffusion.DiffusionDecoder`.
    """

    lm: "LlamaLM"
    mask_id: int
    shift: bool

    @property
    def packed(self):
        """Rates and blocks are drawn per row, and a row is one document."""
        return False

    def param_shardings(self, mesh, params):
        return shardings(mesh, self.lm.axes(params), params, self.lm.axis_counts())

    def init(self, key, target_params):
        """The target's parameters, from which training continues."""
        return target_params

    def logits(self, params, tokens: Array, real: Array) -> Array:
        """For every position of `tokens` `[B, T]`, of which the `real` `[B, T]` are seen: `[B, T, V]`, without the mask
        token.
        """
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
        block = Block(tokens, positions, jnp.zeros(tokens.shape[:1], jnp.int32), real[:, None, :], causal=False)
        return self.aligned(self.lm(params, block, None, wants=Wants(logits=True)).logits)

    def aligned(self, logits: Array) -> Array:
        """Logits `[B, T, V]` of the positions that they are for, without the mask token."""
        if self.shift:
            logits = jnp.concatenate([logits[:, :1], logits[:, :-1]], axis=1)
        return logits.at[:, :, self.mask_id].set(-jnp.inf)


def surprise(logits: Array, tokens: Array) -> Array:
    """Nats `[B, T]` of tokens `[B, T]` under logits `[B, T, V]`."""
    picked = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


@dataclasses.dataclass(frozen=True)
class MaskedDiffusion(MaskedObjective):
    """LLaDA's loss (arXiv:2502.09992, equation 3): tokens masked at a rate drawn for each row, weighted by one over that rate.

    The prompt is never masked. Padding is neither seen nor learned.

    Attributes:
      eps: the lowest rate.
    """

    eps: float = 1e-3

    def loss(self, params, target_params, batch, key, mean=MEAN):
        rows, width = batch.tokens.shape
        drawn = each_row(lambda key: jax.random.uniform(key, (width + 1,)), key, rows)
        rate = self.eps + (1 - self.eps) * drawn[:, 0]
        masked = batch.mask & (drawn[:, 1:] < rate[:, None])
        logits = self.predicted(params, batch, jnp.where(masked, self.mask_id, batch.tokens))
        each = jnp.where(masked, surprise(logits, batch.tokens), 0.0)
        count = batch.mask.sum()
        metrics = {
            "accuracy": mean((jnp.argmax(logits, axis=-1) == batch.tokens).astype(jnp.float32), masked),
            "weight": count,
        }
        return mean(each / rate[:, None], batch.mask), metrics

    def predicted(self, params, batch, noisy: Array) -> Array:
        """Logits `[B, T, V]` of the rows, as they are after masking, `[B, T]`."""
        return self.logits(params, noisy, seen(batch))


@dataclasses.dataclass(frozen=True)
class Conversion(MaskedDiffusion):
    """The loss that makes a diffusion model of an autoregressive one (A2D, github.com/ZHZisZZ/dllm).

    Without blocks it is LLaDA's. With blocks it is that of block diffusion (BD3-LM, arXiv:2503.09573): a row is read as
    [noisy | clean]. A noisy token sees its own block and the clean tokens of earlier blocks. A clean one sees the clean
    tokens of its own block and of earlier ones. A row has one rate.

    Attributes:
      block: the length of a block; 0: the model sees the whole canvas.
      align: where blocks count from: `prompt_end`, as the published sampler does, or `text`, a row's beginning, as the
        published training does.
    """

    block: int = 0
    align: str = "prompt_end"

    def __post_init__(self):
        if self.block < 0 or not 0 < self.eps < 1 or self.align not in ("prompt_end", "text"):
            raise ValueError(
                f"a2d needs block >= 0, eps in (0, 1) and align prompt_end or text, got block={self.block}, eps={self.eps}, "
                f"align={self.align}"
            )

    def predicted(self, params, batch, noisy):
        if not self.block:
            return super().predicted(params, batch, noisy)
        rows, width = noisy.shape
        both = jnp.concatenate([noisy, batch.tokens], axis=1)
        at = jnp.broadcast_to(jnp.tile(jnp.arange(width, dtype=jnp.int32), 2)[None], both.shape)
        begin = jnp.argmax(batch.mask, axis=1)[:, None] if self.align == "prompt_end" else 0
        of, clean = (at + -begin % self.block) // self.block, (jnp.arange(2 * width) >= width)[None]
        own = (of[:, :, None] == of[:, None]) & (clean[:, :, None] == clean[:, None])
        visible = (own | ((of[:, :, None] > of[:, None]) & clean[:, None])) & jnp.tile(seen(batch), 2)[:, None]
        block = Block(both, at, jnp.zeros(rows, jnp.int32), visible, causal=False)
        final = self.lm(params, block, None, wants=Wants(final=True)).final[:, :width]
        return self.aligned(self.lm.unembed(params, final))


@dataclasses.dataclass(frozen=True)
class CertaintyForcing(MaskedObjective):
    """dParallel's distillation (arXiv:2509.26488, section 3.2): makes right predictions certain, so that they are
    committed at once.

    In one block of each row's answer, half of the positions are masked. Everything after the block is masked, and
    nothing before it. Then the other half is masked. The loss is the cross-entropy of both, plus `weight` times the
    entropy of the masked predictions that are already right.

    Attributes:
      block_length: of a block; 0 takes the whole answer (Dream's recipe).
      share: how much of the block is masked first.
      weight: lambda.
      temperature: divides the logits whose entropy is lowered.
    """

    block_length: int = 32
    share: float = 0.5
    weight: float = 2.0
    temperature: float = 0.5

    def __post_init__(self):
        if self.block_length < 0 or not 0 < self.share < 1 or self.weight < 0 or not self.temperature > 0:
            raise ValueError(
                "dparallel needs block_length >= 0, share in (0, 1), weight >= 0 and a positive temperature, got "
                f"block_length={self.block_length}, share={self.share}, weight={self.weight}, "
                f"temperature={self.temperature}"
            )

    def loss(self, params, target_params, batch, key, mean=MEAN):
        rows, width = batch.tokens.shape
        drawn = each_row(lambda key: jax.random.uniform(key, (width + 1,)), key, rows)
        inside, after = self.parts(batch.mask, drawn[:, 0])
        first = inside & (drawn[:, 1:] < self.share)
        terms = [self.term(params, batch, masked, after) for masked in (first, inside & ~first)]
        entropy = mean(jnp.stack([t[1] for t in terms]), jnp.stack([t[2] for t in terms]))
        crossed = mean(terms[0][0], first) + mean(terms[1][0], inside & ~first)
        return crossed + self.weight * entropy, {"entropy": entropy, "weight": inside.sum()}

    def parts(self, mask: Array, drawn: Array) -> tuple[Array, Array]:
        """A block of each row's answer, and the rest of the answer after it, `[B, T]` bool each; `drawn` `[B]`, in [0,
        1), chooses.
        """
        if not self.block_length:
            return mask, jnp.zeros_like(mask)
        place = jnp.cumsum(mask, axis=1) - 1
        blocks = -(-mask.sum(axis=1) // self.block_length)
        chosen = jnp.floor(drawn * blocks).astype(jnp.int32)[:, None]
        number = place // self.block_length
        return mask & (number == chosen), mask & (number > chosen)

    def term(self, params, batch, masked, after) -> tuple[Array, Array, Array]:
        """Cross-entropy `[B, T]`, entropy `[B, T]`, and which masked predictions are right `[B, T]`."""
        logits = self.logits(params, jnp.where(masked | after, self.mask_id, batch.tokens), seen(batch))
        dist = jax.nn.log_softmax(logits / self.temperature, axis=-1)
        dist = jnp.where(
            jnp.isfinite(dist), dist, -1e9
        )  # the mask's column: neither it nor its gradient is anything but 0
        entropy = -jnp.sum(jnp.exp(dist) * dist, axis=-1)
        return surprise(logits, batch.tokens), entropy, masked & (jnp.argmax(logits, axis=-1) == batch.tokens)


def seen(batch) -> Array:
    """The prompt and the answer `[B, T]` bool: everything up to the last token that is to be predicted."""
    return jnp.cumsum(batch.mask[:, ::-1], axis=1)[:, ::-1] > 0
