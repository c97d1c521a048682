"""Where the digits of a key stand among a prompt's tokens: `python -m experiments.long_context.ranks --tokens 1024`.

Tokens are ranked in the last layer's first head (0: the most important), as `ems` weighs them: by the mean of their attention
over all queries, over the last 32, by the larger of both, and by that over five neighbours. A cache that forgets keeps the
first ranks.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

from experiments.long_context.text import Writer, told
from specjax import models
from specjax.draft.magicdec.picking import Asked
from specjax.lm import Block, Wants
from specjax.models.caches.ems import importance

LAST, POOL, DIGITS = 32, 5, 4


def weights(model: models.Model, ids: list[int]) -> jax.Array:
    """Attention `[N, N]` of the prompt's tokens in the last layer's first head, the mean over the queries that share it."""
    lm, tokens = model.lm, jnp.asarray(ids)[None]
    block = Block(tokens, jnp.arange(len(ids))[None], jnp.zeros((1,), jnp.int32))
    delta = lm(model.params, block, Asked(lm.init_cache(1, 8)), wants=Wants()).delta
    keys, queries = delta.key[-1][0], delta.query[-1][0]
    queries = queries.reshape(len(ids), keys.shape[1], -1, keys.shape[2])
    scores = jnp.einsum("wgh,sh->gws", queries[:, 0], keys[:, 0])
    return jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((len(ids),) * 2, bool)), scores, -jnp.inf), axis=-1).mean(axis=0)


def ranks(attention: jax.Array) -> dict[str, np.ndarray]:
    """The rank `[N - LAST]` of every token but the last ones, by each way to weigh them."""
    size = attention.shape[0] - LAST
    every, last = attention.sum(axis=0)[None, None, :size], attention[-LAST:].mean(axis=0)[None, None, :size]
    both = importance(every, last, jnp.asarray([attention.shape[0]]))
    near = jax.lax.reduce_window(both, 0.0, jax.lax.add, (1, 1, POOL), (1, 1, 1), "SAME")
    ways = {"all queries": every, "the last 32": last, "the larger": both, "five neighbours": near}
    return {name: np.argsort(np.argsort(-np.asarray(worth)[0, 0])) for name, worth in ways.items()}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--tokens", type=int, default=1024, help="of a prompt (default: 1024)")
    options.add_argument("--texts", type=int, default=3, help="texts, each with four keys (default: 3)")
    chosen = options.parse_args()
    model, writer = models.load("tiny-keys"), Writer.shipped()
    print("| text | all queries | the last 32 | the larger | five neighbours |\n|---|---|---|---|---|")
    for text in range(chosen.texts):
        prompt = writer.prompts(f"test {text}", chosen.tokens, 4)[0]
        ids = list(model.tokenizer.encode(prompt.text))[:-1]  # the last token is not read before a step
        line = list(writer.ids(told(prompt.owners[0], prompt.keys[0])))
        at = next(i for i in range(len(ids)) if ids[i : i + len(line)] == line)
        digits = [at + i for i, token in enumerate(line) if model.tokenizer.decode([token]).strip().isdigit()][-DIGITS:]
        found = ranks(weights(model, ids))
        print(f"| {text} | " + " | ".join(" ".join(str(own[i]) for i in digits) for own in found.values()) + " |")


if __name__ == "__main__":
    main()
