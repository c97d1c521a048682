"""Tiny models with experts beside transformers': their folders, passes of both, and blocks decoded without a cache."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np

from specjax.lm import Block, Wants


def edited(source, folder, drop=(), **changes):
    """A copy of a folder with another config."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    kept = {name: value for name, value in config.items() if name not in drop}
    (folder / "config.json").write_text(json.dumps(kept | changes))
    return folder


def ours(model, ids, visible=None, causal=False):
    """Logits `[B, T, V]` of ids `[B, T]`, of which each sees what is `visible` `[T, T]`; None: all, or none later."""
    at = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    see = None if visible is None else jnp.broadcast_to(jnp.asarray(visible), (*ids.shape, ids.shape[1]))
    block = Block(jnp.asarray(ids), at, jnp.zeros(len(ids), jnp.int32), see, causal=causal)
    return jax.jit(lambda p: model.lm(p, block, None, wants=Wants(logits=True)).logits)(model.params)


def theirs(model, ids, visible=None):
    """transformers'; `visible` is None for causal."""
    import torch

    mask = None if visible is None else torch.where(torch.as_tensor(visible), 0.0, -1e9)[None, None].float()
    with torch.no_grad():
        return model(torch.as_tensor(ids), attention_mask=mask).logits.numpy()


def blocks(size, length):
    """Who sees whom `[T, T]` among `size` tokens in blocks of `length`."""
    of = np.arange(size) // length
    return of[:, None] >= of[None]


def decoded(model, prompt, new, length, mask):
    """New ids, the surest of a block in every pass, each of which reads the whole text in transformers."""
    text = np.asarray([prompt + [mask] * (-(-(len(prompt) + new) // length) * length - len(prompt))])
    visible = blocks(text.shape[1], length)
    for begin in range(len(prompt) // length * length, text.shape[1], length):
        while (text[0, begin : begin + length] == mask).any():
            dist = theirs(model, text, visible)[0].astype(np.float64)
            dist[:, mask] = -np.inf
            dist = np.exp(dist - dist.max(1, keepdims=True))
            dist /= dist.sum(1, keepdims=True)
            sure = np.where(text[0] == mask, dist.max(1), -1)[begin : begin + length]
            at = begin + int(sure.argmax())
            text[0, at] = dist[at].argmax()
    return text[0, len(prompt) : len(prompt) + new].tolist()
