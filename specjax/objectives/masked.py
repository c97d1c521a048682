"""Training of masked-diffusion models: LLaDA's loss, LLaDA2.0's with confidence, and dParallel's certainty forcing.

In the shape descriptions `B` denotes rows, `T` tokens per row, `V` the vocabulary.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp

from specjax.lm import Block, Wants
from specjax.objectives.base import OfTarget, each_row
from specjax.objectives.means import MEAN

if TYPE_CHECKING:
    from specjax.models import LlamaLM

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class MaskedObjective(OfTarget):
    """A loss of a masked-diffusion model's own parameters.

    Attributes:
      lm: the model.
      mask_id: the id of an open position.
      shift: see `specjax.diffusion.DiffusionDecoder`.
      block: the length of the model's blocks, which see themselves and earlier ones; None or 0: it sees everything.
      align: where blocks count from: `text`, the default, or `prompt_end`.
    """

    blockwise: ClassVar[bool] = True
    """Whether it trains models with blocks."""

    lm: "LlamaLM"
    mask_id: int
    shift: bool
    block: int | None = dataclasses.field(default=None, kw_only=True)
    align: str | None = dataclasses.field(default=None, kw_only=True)

    def logits(self, params, tokens: Array, real: Array, batch: Any = None) -> Array:
        """For every position of `tokens` `[B, T]`, of which the `real` `[B, T]` are seen: `[B, T, V]`, without the mask
        token.

        A model with blocks sees the text of the `batch` as it is before a block, and `tokens` within it.
        """
        if self.block and batch is not None:
            begin = jnp.argmax(batch.mask, axis=1) if self.align == "prompt_end" else jnp.zeros(len(tokens), jnp.int32)
            logits = self._by_blocks(params, tokens, real, batch.tokens, self.block, begin)
        else:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
            block = Block(tokens, positions, jnp.zeros(tokens.shape[:1], jnp.int32), real[:, None, :], causal=False)
            logits = self.lm(params, block, None, wants=Wants(logits=True)).logits
        if self.shift:
            logits = jnp.concatenate([logits[:, :1], logits[:, :-1]], axis=1)
        return logits.at[:, :, self.mask_id].set(-jnp.inf)

    def _by_blocks(self, params, tokens, real, clean, size, begin):
        """Both texts in one pass, the masked one first (BD3-LM, arXiv:2503.09573, section 3.2). A masked block sees itself and
        earlier clean ones; clean blocks see themselves and earlier ones. A block begins at `begin` `[B]`."""
        rows, width = tokens.shape
        both = jnp.where(jnp.tile(real, (1, 2)), jnp.concatenate([tokens, clean], axis=1), -1)
        at = jnp.tile(jnp.arange(width, dtype=jnp.int32), 2)
        of, whole = (at[None] + -begin[:, None] % size) // size, (jnp.arange(2 * width) >= width)[None]
        earlier = whole[:, None] & (of[:, None] < of[:, :, None])
        sees = earlier | ((of[:, None] == of[:, :, None]) & (whole[:, None] == whole[:, :, None]))
        block = Block(
            both, jnp.broadcast_to(at[None], both.shape), jnp.zeros((rows,), jnp.int32),
            sees & jnp.tile(real, (1, 2))[:, None, :], causal=False,
        )  # fmt: skip
        final = self.lm(params, block, None, wants=Wants(final=True)).final
        return self.lm.unembed(params, final[:, :width])


def surprise(logits: Array, tokens: Array) -> Array:
    """Nats `[B, T]` of tokens `[B, T]` under logits `[B, T, V]`."""
    picked = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def entropies(logits: Array) -> Array:
    """Nats `[B, T]` of the distributions of logits `[B, T, V]`; an entry of -inf counts for nothing, as does its gradient."""
    dist = jax.nn.log_softmax(logits, axis=-1)
    dist = jnp.where(jnp.isfinite(dist), dist, -1e9)
    return -jnp.sum(jnp.exp(dist) * dist, axis=-1)


@dataclasses.dataclass(frozen=True)
class MaskedDiffusion(MaskedObjective):
    """LLaDA's loss (arXiv:2502.09992, equation 3): tokens masked at a rate drawn for each row, weighted by one over that rate.

    The prompt is never masked. Padding is neither seen nor learned.

    Attributes:
      eps: the lowest rate.
    """

    eps: float = 1e-3

    def loss(self, params, target_params, batch, key, mean=MEAN):
        return self._read(params, batch, key, mean)[:2]

    def _read(self, params, batch, key, mean):
        """The loss and its metrics, and of the same pass the logits `[B, T, V]` and what was masked `[B, T]`."""
        rows, width = batch.tokens.shape
        drawn = each_row(lambda key: jax.random.uniform(key, (width + 1,)), key, rows)
        rate = self.eps + (1 - self.eps) * drawn[:, 0]
        masked = batch.mask & (drawn[:, 1:] < rate[:, None])
        logits = self.logits(params, jnp.where(masked, self.mask_id, batch.tokens), seen(batch), batch)
        each = jnp.where(masked, surprise(logits, batch.tokens), 0.0)
        count = batch.mask.sum()
        metrics = {
            "accuracy": mean((jnp.argmax(logits, axis=-1) == batch.tokens).astype(jnp.float32), masked),
            "weight": count,
        }
        return mean(each / rate[:, None], batch.mask), metrics, logits, masked


@dataclasses.dataclass(frozen=True)
class Conversion(MaskedDiffusion):
    """The loss that makes a diffusion model of an autoregressive one (A2D, github.com/ZHZisZZ/dllm).

    Without blocks it is LLaDA's, with blocks that of block diffusion (BD3-LM). The published training counts blocks from a
    row's beginning, and the published sampler from the prompt's end.
    """

    block: int | None = 0
    align: str | None = "prompt_end"

    def __post_init__(self):
        if (self.block or 0) < 0 or not 0 < self.eps < 1 or self.align not in ("prompt_end", "text"):
            raise ValueError(
                f"a2d needs block >= 0, eps in (0, 1) and align prompt_end or text, got block={self.block}, eps={self.eps}, "
                f"align={self.align}"
            )


@dataclasses.dataclass(frozen=True)
class ConfidenceAware(MaskedDiffusion):
    """LLaDA2.0's training for parallel decoding (CAP, arXiv:2512.15745): LLaDA's loss, plus the entropy where it is right.

    The second term is the mean entropy of masked predictions whose likeliest token is the text's, times `weight`. It makes
    them surer, so that more are committed at once, and has no gradient anywhere else.

    Attributes:
      weight: lambda. The report gives no number.
    """

    weight: float = 1.0

    def __post_init__(self):
        if not self.weight >= 0:
            raise ValueError(f"cap needs a weight of at least 0, got {self.weight}")

    def loss(self, params, target_params, batch, key, mean=MEAN):
        loss, metrics, logits, masked = self._read(params, batch, key, mean)
        right = masked & (jnp.argmax(logits, axis=-1) == batch.tokens)
        entropy = mean(entropies(logits), right)
        return loss + self.weight * entropy, metrics | {"entropy": entropy}


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

    blockwise: ClassVar[bool] = False

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
        entropy = entropies(logits / self.temperature)
        return surprise(logits, batch.tokens), entropy, masked & (jnp.argmax(logits, axis=-1) == batch.tokens)


def seen(batch) -> Array:
    """The prompt and the answer `[B, T]` bool: everything up to the last token that is to be predicted."""
    return jnp.cumsum(batch.mask[:, ::-1], axis=1)[:, ::-1] > 0
