"""A joint distribution of a few tokens under the any-subset contract, with exact conditionals; the oracle for tests."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class JointDistribution:
    """An any-subset model (`specjax.diffusion.assd.AnySubset`) of texts with `size` tokens.

    Params: `{"log_probs": [V ** size]}` float32, in the order of `itertools.product`; impossible texts have -inf.
    """

    vocab_size: int
    size: int

    def texts(self) -> np.ndarray:
        """Every text, `[V ** size, size]` int32."""
        return np.asarray(list(itertools.product(range(self.vocab_size), repeat=self.size)), np.int32)

    def __call__(self, params, tokens: Array, sees: Array, at: Array) -> Array:
        """Log-probabilities `[B, K, V]`; see `AnySubset`."""
        texts = jnp.asarray(self.texts())

        def row(tokens, sees, at):
            agrees = jnp.all((texts == tokens[None])[None] | ~sees[at][:, None], axis=2)  # [K, texts]
            weights = jnp.where(agrees, jnp.exp(params["log_probs"])[None], 0.0)
            ones = jax.nn.one_hot(texts[:, at], self.vocab_size)  # [texts, K, V]
            return jnp.log(jnp.einsum("kt,tkv->kv", weights, ones))

        return jax.nn.log_softmax(jax.vmap(row)(tokens, sees, at), axis=-1)
