"""The figures of a CPU that a chip's texts are compared with: `python -m experiments.chip.cpu` writes `cpu.json`."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from experiments.chip.parts import texts


def gaps(lines: Any, model: str, state: Any) -> list[list[float]]:
    """By how much each new token's score, noise included, is above that of the next best one.

    Args:
      lines: the conformance table.
      model: of it.
      state: what plain decoding left.
    """
    from specjax.lm import Block, Wants, encodes
    from specjax.sampling.sampler import Sampler

    target, params = lines.MODELS.get(model, lines.TARGET), lines._target(model)
    tokens = jnp.maximum(state.tokens, 0)
    block = Block(
        tokens, jnp.tile(jnp.arange(tokens.shape[1])[None], (len(tokens), 1)), jnp.zeros(len(tokens), jnp.int32)
    )
    cache = state.cache if encodes(target) else None  # no slot of the text is read, and all of a source
    read = jax.jit(lambda params, block, cache: target(params, block, cache, wants=Wants(logits=True)).logits)
    logits = read(params, block, cache)

    @jax.jit
    def gap(length):
        sampler = Sampler(
            state.key, state.tokens, length, length > 0, state.sampling, begin=state.prompt_length, eos=state.eos
        )
        last = jnp.take_along_axis(logits, (length - 1)[:, None, None], axis=1)
        scores, ids = jax.lax.top_k(sampler.scores(last, 0)[:, 0], 2)
        return scores[:, 0] - scores[:, 1], ids[:, 0]

    begin, end, found = np.asarray(state.prompt_length), np.asarray(state.length), []
    for step in range(int((end - begin).max())):
        margin, best = (np.asarray(x) for x in gap(jnp.asarray(np.minimum(begin + step, end - 1))))
        live = begin + step < end
        drawn = np.asarray(state.tokens)[np.arange(len(end)), np.minimum(begin + step, end - 1)]
        assert (best == drawn)[live].all(), "the scores do not lead to the text"
        found.append(np.where(live, margin, np.nan))
    return [[float(f"{x:.4g}") for x in row if not np.isnan(x)] for row in np.stack(found, axis=1)]


def figures() -> dict[str, Any]:
    """All of `cpu.json`."""
    lines, models = texts.conformance(), {}
    for model in ("", *lines.MODELS):
        with texts.exact():
            decoder = specjax.speculative(lines.MODELS.get(model, lines.TARGET))
            found, state = lines.ended(decoder, {"target": lines._target(model), "draft": None})
            models[model] = {"texts": found, "gaps": gaps(lines, model, state)}
    shipped = {case: texts.shipped_texts(case) for case in texts.SHIPPED}
    return {"jax": jax.__version__, "models": models, "shipped": shipped}


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    made = json.dumps(figures(), separators=(",", ":"))
    texts.FIGURES.write_text(made.replace('"models"', '\n"models"').replace('"shipped"', '\n"shipped"') + "\n")
