"""Training of EAGLE's layer, once over the target's features or unrolled over its own (arXiv:2401.15077, 2503.01840)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax.models.kv import stack_past
from specjax.objectives.base import Batch, Recipe, each_row
from specjax.objectives.losses import ForwardKL
from specjax.objectives.means import MEAN
from specjax.objectives.teacher import Guess, HeadObjective, Teacher, score, teach

Array = jax.Array

HASS = {"unroll": 3, "decay": 1.0, "detached": True, "divergence": ForwardKL(10, 10.0)}
"""HASS (Zhang et al. 2024, arXiv:2408.15766): 1.0 smooth L1 + 0.1 CE + 1.0 CE of the target's ten likeliest tokens."""


@dataclasses.dataclass(frozen=True)
class TrainEagle(HeadObjective):
    """The target is frozen; the layer is unrolled over its own outputs.

    Pass s of `unroll` reads the previous pass's output in place of the target's feature, as a draft at depth s + 1
    does. It is weighted `decay ** s`. This is EAGLE-3's training-time test; EAGLE-1 has one pass, and HASS three
    (`preset=hass`).

    Attributes:
      unroll: passes.
      decay: see above.
      feature_weight: of the smooth L1 distance between an output and the target's next feature.
      distribution_weight: of the distributions' divergence.
      noise: half-width of the uniform noise on the features of texts of 512 tokens; for other lengths it is inversely
        proportional to the length (EAGLE-1's code).
      detached: whether a pass learns nothing through the outputs that it reads (HASS).
      aligned: see `specjax.objectives.teacher.score`; 0: every token counts in every pass.
    """

    recipe = Recipe(0.5, clip_by="value", weight_decay=0.01)
    presets = {"hass": HASS}

    unroll: int = 1
    decay: float = 0.8
    feature_weight: float = 1.0
    distribution_weight: float = 0.1
    noise: float = 0.1
    detached: bool = False
    aligned: int = 0

    def __post_init__(self):
        least = self.noise, self.decay, self.feature_weight, self.distribution_weight, self.aligned
        if self.unroll < 1 or not all(x >= 0 for x in least):
            raise ValueError(
                "heads of the EAGLE kind need unroll >= 1, and noise, decay, feature_weight, distribution_weight and aligned "
                f">= 0, got unroll={self.unroll}, noise={self.noise}, decay={self.decay}, "
                f"feature_weight={self.feature_weight}, distribution_weight={self.distribution_weight}, "
                f"aligned={self.aligned}"
            )

    def loss(self, params, target_params, batch, key, mean=MEAN):
        drafter, own = self.drafter, {"target": target_params, "draft": params}
        teacher, features, noisy = taught(self, target_params, batch, key)
        dist = functools.partial(drafter.logits, own)
        width = batch.tokens.shape[1] - 1  # pairs (feature t, token t + 1)
        past, h, guesses = None, features[:, :-1], []
        for s in range(self.unroll):
            # a pass's output and keys are kept for the gradient, and the rest is computed again
            if s == 0:
                h, delta = jax.checkpoint(drafter.read)(own, noisy[:, :-1], batch.pairs(), None)
            else:
                h, delta = jax.checkpoint(self.later)(own, h, batch.pairs(s), past)
            past = stack_past(past, delta)
            # pair t's output stands for feature t + 1; the first s pairs had nothing to read
            told, besides, weight = h[:, s : width - 1], None, self.decay**s
            if self.feature_weight:
                besides = self.feature_weight * weight * smooth_l1(drafter.fed(told), features[:, s + 1 : -1])
            guesses.append(Guess(told, dist, s + 1, self.distribution_weight * weight, besides))
        return score(teacher, guesses, self.divergence, mean, self.aligned)

    def held_out(self, target_params):
        return dataclasses.replace(self, noise=0.0, aligned=0), target_params

    def later(self, own, h, block, past):
        """Pass s > 0, after outputs `[B, W, F]`: its own outputs, and its keys and values."""
        h = jax.lax.stop_gradient(h) if self.detached else h
        return self.drafter.reread(own, jnp.pad(h[:, :-1], ((0, 0), (1, 0), (0, 0))), block, None, past)


def taught(objective: Any, target_params: Any, batch: Batch, key: Array) -> tuple[Teacher, Array, Array]:
    """What a head over features learns from: a batch as the target reads it, its features, and these with the objective's
    noise, which the head reads."""
    drafter = objective.drafter
    teacher = teach(drafter, target_params, batch, objective.ids, drafter.feature_wants)
    features = drafter.features(teacher.output)
    return teacher, features, _with_noise(objective.noise, features, batch, key) if objective.noise else features


def _with_noise(most: float, features: Array, batch: Batch, key: Array) -> Array:
    """Features `[B, T, ...]` with uniform noise of half-width `most` times 512 over the size of each slot's document."""
    drawn = lambda key: jax.random.uniform(key, features.shape[1:], features.dtype, -1.0, 1.0)
    scale = (most * 512 / batch.sizes).astype(features.dtype)
    return features + scale.reshape(*scale.shape, *[1] * (features.ndim - 2)) * each_row(drawn, key, len(features))


def smooth_l1(a: Array, b: Array) -> Array:
    """The mean over the last axis of the smooth L1 distance (threshold 1)."""
    gap = jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32))
    return jnp.where(gap < 1, 0.5 * gap * gap, gap - 0.5).mean(axis=-1)
