"""A model that is any function from tokens to logits, without a cache of keys and values: slow, and for every library."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.lm import BaseLM, Block, Output, answered

Array = jax.Array
PyTree = Any


@dataclasses.dataclass(frozen=True)
class FunctionLM(BaseLM):
    """A language model as one function, such as the forward pass of a model of flax, equinox or your own.

    Its cache holds tokens, and every pass reads the whole text anew. So each step costs a pass over the text's whole
    buffer, and a tree of N nodes N of them. Texts, drafters that look tokens up and verifiers are those of any other
    model. Write an `specjax.lm.LM` once that is too slow.

    Attributes:
      function: from parameters and tokens `[B, T]` int32 to logits `[B, T, V]`, which are those of each next token. Logits may
        depend on earlier tokens alone, and on no other row. Pass the same function again, since programs are kept by it.
      vocab_size: V.

    >>> lm = FunctionLM(lambda params, tokens: params[tokens], vocab_size=3)
    >>> block = Block(jnp.asarray([[0, 2]]), jnp.asarray([[0, 1]]), jnp.asarray([0]))
    >>> from specjax.lm import Wants
    >>> lm(jnp.eye(3), block, None, wants=Wants(logits=True)).logits[0].tolist()
    [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    """

    function: Callable[[PyTree, Array], Array]
    vocab_size: int

    def init_cache(self, batch, capacity, dtype=None):
        """`[B, S]`, the tokens of the text."""
        return jnp.zeros((batch, capacity), jnp.int32)

    def __call__(self, params, block, cache, *, wants, draw=None, past=None, partial=None):
        if block.embeddings is not None or block.unseen is not None or not block.causal:
            raise ValueError(
                "FunctionLM reads tokens from left to right: write an `specjax.lm.LM` for embeddings or canvases"
            )
        own = jnp.maximum(block.tokens, 0)
        text = jnp.zeros((len(own), 0), jnp.int32) if cache is None else cache
        if block.visible is None and past is None:
            logits = self._of_run(params, text, own, block.length)
        else:
            logits = self._of_tree(params, text, own, block, past)
        return answered(Output(own), logits, wants, draw)

    def _logits(self, params: PyTree, tokens: Array) -> Array:
        logits = self.function(params, tokens)
        if logits.shape != (*tokens.shape, self.vocab_size):
            raise ValueError(
                f"the function of a FunctionLM gives logits [B, T, V] = {(*tokens.shape, self.vocab_size)}, and these have "
                f"the shape {logits.shape}"
            )
        return logits.astype(jnp.float32)

    def _of_run(self, params: PyTree, text: Array, own: Array, length: Array) -> Array:
        """Logits `[B, T, V]` of a block that follows the first `length` `[B]` tokens of the text `[B, S]`."""
        at = length[:, None] + jnp.arange(own.shape[1])[None]
        whole = self.commit(jnp.pad(text, ((0, 0), (0, own.shape[1]))), own, None, length)
        return jnp.take_along_axis(self._logits(params, whole), at[:, :, None], axis=1)

    def _of_tree(self, params: PyTree, text: Array, own: Array, block: Block, past: Array | None) -> Array:
        """The same of a block whose tokens see some of it, and of the `past` `[B, P]`: each as the end of its own text."""
        rows, count = own.shape
        every = own if past is None else jnp.concatenate([past, own], axis=1)
        size = every.shape[1]
        visible = block.visible
        if visible is None:
            visible = jnp.tril(jnp.ones((1, count, size), bool), size - count)
        visible = jnp.broadcast_to(visible, (rows, count, size))
        room = jnp.pad(text, ((0, 0), (0, size)))

        def of_node(seen):  # seen: [B, P + T]
            last = block.length + seen.sum(axis=1) - 1
            at = jnp.where(seen, block.length[:, None] + jnp.cumsum(seen, axis=1) - 1, room.shape[1])
            logits = self._logits(params, self.commit(room, every, None, at))
            return jnp.take_along_axis(logits, last[:, None, None], axis=1)[:, 0]

        return jnp.swapaxes(jax.lax.map(of_node, jnp.swapaxes(visible, 0, 1)), 0, 1)
