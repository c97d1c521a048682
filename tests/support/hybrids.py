"""Small models whose first layer keeps a running state, a line for every kind of mixer with one."""

import dataclasses

import jax.numpy as jnp
from support import small_target

from specjax.lm import BaseLM, Block, Output, answered, inputs
from specjax.models import LlamaLM, StateMixerConfig
from specjax.models.states.gated_delta import GatedDeltaConfig
from specjax.models.states.kda import KimiDeltaConfig
from specjax.models.states.lightning import LightningConfig
from specjax.models.states.mamba import MambaConfig
from specjax.models.states.mamba2 import Mamba2Config
from specjax.models.states.short_conv import ShortConvConfig

MIXERS: dict[str, StateMixerConfig] = {
    "short_conv": ShortConvConfig(),
    "gated_delta": GatedDeltaConfig(2, 4, 8, 6, kernel_size=3),
    "kimi_delta": KimiDeltaConfig(2, 2, 8, 8),
    "mamba": MambaConfig(32, 4, 3),
    "mamba2": Mamba2Config(4, 8, 6, groups=2),
    "lightning": LightningConfig(4, 8, 0.5),
}
"""The table: a line for every kind of mixer."""


def _hybrid(mixer: StateMixerConfig) -> LlamaLM:
    first, *rest = small_target.TARGET.config.layers
    layers = (dataclasses.replace(first, mixer=mixer), *rest)
    return LlamaLM(dataclasses.replace(small_target.TARGET.config, layers=layers, max_position_embeddings=256))


MODELS: dict[str, LlamaLM] = {name: _hybrid(mixer) for name, mixer in MIXERS.items()}
"""A layer of each kind under one of attention; as their own draft models, the first one alone."""


@dataclasses.dataclass(frozen=True)
class Reread(BaseLM):
    """A model that reads the whole text in every pass: its cache is what its first layer reads, so no state can be wrong.

    It takes blocks of text alone, without trees."""

    reads_mixtures = True

    lm: LlamaLM

    @property
    def vocab_size(self) -> int:
        return self.lm.vocab_size

    @property
    def num_layers(self) -> int:
        return self.lm.num_layers

    def init_cache(self, batch, capacity, dtype=None):
        return jnp.zeros((batch, capacity, self.lm.config.hidden_size), jnp.float32)

    def embed(self, params, tokens):
        return self.lm.embed(params, tokens)

    def __call__(self, params, block, cache, *, wants, draw=None, past=None, partial=None):
        lm, size, own = self.lm, block.tokens.shape[1], inputs(self, params, block)
        cache = self.init_cache(len(own), 0) if cache is None else cache
        text = self.commit(jnp.pad(cache, ((0, 0), (0, size), (0, 0))), own, None, block.length)
        at = jnp.broadcast_to(jnp.arange(text.shape[1])[None], text.shape[:2])
        whole = Block(at, at, jnp.zeros_like(block.length))
        h, _ = lm.layers(params, text, 0, lm.num_layers, whole, None)
        mine = block.length[:, None] + jnp.arange(size)[None]
        h = jnp.take_along_axis(h, mine[:, :, None], axis=1)
        logits = lm.unembed(params, lm.norm(params, h))
        return answered(Output(delta=own), logits, wants, draw)
