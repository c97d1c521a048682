"""DFlash's files as z-lab and SpecForge write them, its layers written out in float64, and what tests of blocks read."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from support.published import E, V, decoder_layer, draw, llama, toy
from support.steps_seen import read_text

from specjax.draft import View
from specjax.draft.feature import FeatureDraft
from specjax.expand.base import Expander, Level
from specjax.models.kv import commit_kv, init_kv
from specjax.sampling import Sampler, SamplingArrays, row_keys

MASK = 7
TEXT = tuple(np.random.default_rng(2).integers(1, V, 12).tolist())


def zlab(layers=2, block=4, window=None, **config):
    """z-lab's and SpecForge's DFlash: Qwen3 layers, what it reads in `dflash_config`, neither embedding nor head."""
    shapes = {"fc.weight": (E, 2 * E), "hidden_norm.weight": (E,), "norm.weight": (E,)}
    for i in range(layers):
        shapes |= {**decoder_layer(f"layers.{i}", E), f"layers.{i}.input_layernorm.weight": (E,)}
        shapes |= {f"layers.{i}.self_attn.{name}.weight": (8,) for name in ("q_norm", "k_norm")}
    nested = {"mask_token_id": MASK, "target_layer_ids": [0, 2]}
    own = llama(model_type="qwen3", architectures=["DFlashDraftModel"], num_hidden_layers=layers, num_target_layers=3)
    kinds = ["full_attention" if window is None or i else "sliding_attention" for i in range(layers)]
    own |= {"block_size": block, "dflash_config": nested, "layer_types": kinds, "sliding_window": window}
    tensors = draw(5, shapes)
    return {**own, **config}, {name: x * 4 if "_proj" in name else x for name, x in tensors.items()}


def norm(x, w):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * w


def rope(x, at):
    angle = at[:, None, None] / 10000 ** (np.arange(0, 8, 2) / 8)
    a, b, c, s = x[..., :4], x[..., 4:], np.cos(angle), np.sin(angle)
    return np.concatenate([a * c - b * s, b * c + a * s], -1)


def reference(
    t, taps, slots, window=None, both=False, from_start=False, causal=False, around=lambda name, side, x, read: x
):
    """Normed outputs of a block after `taps`: of every layer, keys are those of the features and then the block's own.

    In the first layer, which has the window, slots see later ones where `both`, and the window before the block `from_start`.
    Where `causal`, slots see no later one in any layer. `around` changes what a sublayer reads (side 0) and writes (1); it
    is also given what the sublayer would read.
    """
    t = {name: np.asarray(x, np.float64) for name, x in t.items()}
    c, n = norm(taps @ t["fc.weight"].T, t["hidden_norm.weight"]), len(taps)
    at, z = np.arange(n + len(slots)), slots
    for i in range(2):
        own = lambda name, x, i=i: x @ t[f"layers.{i}.{name}.weight"].T
        read = norm(z, t[f"layers.{i}.input_layernorm.weight"])
        u = around(f"layers.{i}.attention_conv", 0, read, read)
        head = lambda x, name, i=i: norm(x.reshape(len(x), -1, 8), t[f"layers.{i}.self_attn.{name}.weight"])
        q = rope(head(own("self_attn.q_proj", u), "q_norm"), at[n:])
        k, v = (own(f"self_attn.{name}_proj", np.concatenate([c, u])) for name in "kv")
        k, v = (np.repeat(x, 2, axis=1) for x in (rope(head(k, "k_norm"), at), v.reshape(len(at), -1, 8)))
        gap = at[n:, None] - at[None]
        near = at[None] >= n - window if from_start else gap < (window or 0)
        near = np.where(at[None] < n, near, (gap >= 0) | both)
        seen = np.ones_like(gap, bool) if window is None or i else near
        seen = seen & (gap >= 0) if causal else seen
        weight = np.where(seen, np.exp(np.einsum("qhd,khd->hqk", q, k) / np.sqrt(8)), 0)
        out = np.einsum("hqk,khd->qhd", weight / weight.sum(-1, keepdims=True), v).reshape(len(z), -1)
        z = z + around(f"layers.{i}.attention_conv", 1, own("self_attn.o_proj", out), read)
        read = norm(z, t[f"layers.{i}.post_attention_layernorm.weight"])
        m = around(f"layers.{i}.mlp_conv", 0, read, read)
        gate = own("mlp.gate_proj", m)
        out = own("mlp.down_proj", gate / (1 + np.exp(-gate)) * own("mlp.up_proj", m))
        z = z + around(f"layers.{i}.mlp_conv", 1, out, read)
    return norm(z, t["norm.weight"])


def behind(head, text):
    """A bound DFlash, its parameters beside the target's, and its state after all of `text` but the last token."""
    model = {"target": toy().params, "draft": head.params}
    wants = head.drafter.feature_wants
    features = head.drafter.features(read_text(text, wants))[:, :-1]
    at = jnp.arange(len(text) - 1)[None]
    delta = head.drafter.head.context(head.params, features, at)
    cache = commit_kv(init_kv(head.drafter.config, 1, 32, jnp.float32), delta, None, jnp.zeros((1,), jnp.int32))
    return model, features, FeatureDraft(cache, jnp.asarray([len(text) - 1]), jnp.zeros((1, 1)))


def view_of(text):
    tokens = jnp.zeros((1, 32), jnp.int32).at[0, : len(text)].set(jnp.asarray(text))
    return View(tokens, jnp.asarray([len(text)]), jnp.ones((1,), bool), None, 4)


def proposed(drafter, model, draft, temperature, rows=1):
    """The trees below TEXT in some rows, each with its own noise, and the distributions of their draws."""
    many = lambda x: jnp.repeat(x, rows, axis=0)
    draft, view = jax.tree.map(many, (draft, view_of(TEXT)))
    keys = row_keys(0, [str(row) for row in range(rows)])
    sampling = SamplingArrays.make(rows, temperature=temperature)
    sampler = Sampler(keys, view.tokens, view.length, view.live, sampling)
    return drafter.propose(model, draft, dataclasses.replace(view, keep_q=True), sampler).tree


@dataclasses.dataclass(frozen=True)
class Given(Expander):
    """An expander that drafts the tokens it is given, and keeps what it was told on the way."""

    tokens: tuple[int, ...]
    seen: list = dataclasses.field(default_factory=list, compare=False)

    nodes = property(lambda self: 1 + len(self.tokens))
    depth = property(lambda self: len(self.tokens))

    def __call__(self, root, logits, grow, carry, sampler, *, keep_q=False):
        self.seen.append((logits[0], carry))
        for depth, token in enumerate(self.tokens[:-1], start=1):
            visible = jnp.ones((1, 1, depth), bool)
            carry, dists = grow(carry, Level(jnp.asarray([[token]]), jnp.asarray([[depth - 2]]), visible, depth))
            self.seen.append((dists[0, 0], carry))
