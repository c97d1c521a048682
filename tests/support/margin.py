"""The margin rule: programs of other shapes round differently, so near-ties may go either way, and are counted."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax.lm import Block, Wants


@functools.partial(jax.jit, static_argnums=0)
def _logits(lm, params, block):
    return lm(params, block, None, wants=Wants(logits=True)).logits


def teacher_forced(lm, params, ids) -> np.ndarray:
    """Logits `[T, V]` of one text in a single causal pass; texts of up to 64, 128, ... tokens share a program."""
    tokens = np.zeros((1, -(-len(ids) // 64) * 64), np.int32)
    tokens[0, : len(ids)] = ids
    block = Block(jnp.asarray(tokens), jnp.arange(tokens.shape[1])[None], jnp.zeros((1,), jnp.int32))
    return np.asarray(_logits(lm, params, block)[0, : len(ids)])


@dataclasses.dataclass
class Margin:
    """Compares greedy texts; a first divergence is excused where the reference's top-2 gap is at most 2 eps.

    Attributes:
      eps: the largest difference of logits between the two programs, measured on the test's own tokens.
      spread: the standard deviation of those logits.
    """

    eps: float
    spread: float
    compared: int = 0
    excused: int = 0

    def __post_init__(self):
        assert self.eps <= 1e-4 * max(1.0, self.spread), f"eps {self.eps} is more than rounding"

    def compare(self, got: list[int], wanted: list[int], logits: np.ndarray, prompt_length: int) -> None:
        """`logits` are teacher-forced over the prompt and `wanted`."""
        for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
            if a != b:
                top = np.sort(logits[prompt_length - 1 + i])[-2:]
                assert top[1] - top[0] <= 2 * self.eps, f"token {i}: {a} is not {b}, with a gap of {top[1] - top[0]}"
                self.excused += 1
                return
            self.compared += 1

    def close(self) -> None:
        print(f"{self.compared} tokens compared, {self.excused} near-ties excused, eps {self.eps:.1e}")
        assert self.excused * 20000 <= max(self.compared, 20000)
