"""The contract of a token mixer with a running state, by the smallest there is: a mean over the committed text."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.random_weights import drawn

import specjax
from specjax import decoder as decoding
from specjax.draft import ModelDrafter, NoDrafter, TokenRecycling
from specjax.expand import Static
from specjax.lm import Block, Wants
from specjax.models import LlamaLM, Mixer, StateMixerConfig, llama_config
from specjax.models.both import BothConfig
from specjax.models.linear import Linear
from specjax.models.mixers import committed
from specjax.prompts import Prompts
from specjax.sampling import SamplingArrays, row_keys


@dataclasses.dataclass(frozen=True)
class MeanConfig(StateMixerConfig):
    """What a token reads is the mean of a product of every token up to itself. The state is their sum; how many they are is the
    length of the text."""

    name: ClassVar[str] = "mean"

    def build(self, width, dtype, rngs, kernel=None):
        return Mean(width, dtype, rngs)

    def init(self, width, batch, dtype):
        return jnp.zeros((batch, width), jnp.float32)

    def commit(self, state, delta, count):
        real = jnp.arange(delta.shape[1])[None] < count[:, None]
        return state + jnp.where(real[:, :, None], delta, 0).sum(axis=1)


class Mean(Mixer):
    def __init__(self, width, dtype, rngs):
        linear = lambda: Linear(width, width, use_bias=False, param_dtype=dtype, dtype=dtype, rngs=rngs)
        self.v, self.o = linear(), linear()

    def __call__(self, x, tables, block: Block, cache, past, positions, shared=None):
        own = self.v(x).astype(jnp.float32)
        every = own if past is None else jnp.concatenate([past, own], axis=1)
        size = every.shape[1]
        before = jnp.tril(jnp.ones((own.shape[1], size), bool), size - own.shape[1])[None]
        seen = jnp.broadcast_to(before if block.visible is None else block.visible, (len(x), *before.shape[1:]))
        total = jnp.where(seen[..., None], every[:, None], 0).sum(axis=2)
        total = total if cache is None else total + cache[:, None]
        count = block.length[:, None, None] + seen.sum(axis=2, keepdims=True)
        return self.o((total / count).astype(x.dtype)), own


PLAIN = llama_config(24, 32, 48, 3, 4, 2, 8, max_position_embeddings=64, tie_word_embeddings=True)
MEANS = PLAIN.each(lambda i, layer: layer if i == 1 else dataclasses.replace(layer, mixer=MeanConfig()))
LM, DRAFT = LlamaLM(MEANS), LlamaLM(MEANS.first(2))
BOTH = BothConfig(PLAIN.near, MeanConfig(), (0.7, 1.3), (1.2, 0.6))
PARTS = (
    {"mixer": BOTH}, {"mixer": None}, {"feed": None}, {"mixer": MeanConfig(), "feed": None}, {"mixer": BOTH, "feed": None},
)  # fmt: skip
APART = LlamaLM(
    dataclasses.replace(PLAIN, layers=tuple(dataclasses.replace(PLAIN.layers[0], **parts) for parts in PARTS))
)
PROMPTS, LENGTHS = jnp.asarray([[3, 1, 4, 1, 5, 3, 1, 4], [9, 2, 6, 0, 0, 0, 0, 0]], jnp.int32), jnp.asarray([8, 3])
NEW, CAPACITY = 16, 40
TREE = Static(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
DRAFTERS = {"none": NoDrafter(), "token_recycling": TokenRecycling(k=4), "itself": ModelDrafter(DRAFT, TREE)}


def params():
    target = jax.tree.map(jnp.asarray, drawn(LM.init(jax.random.key(3)), seed=5))
    return {"target": target, "draft": {**target, "layers": {i: target["layers"][i] for i in range(2)}}}


def decoded(drafter, width=8):
    """The state of a batch of two when its texts are written."""
    decoder = specjax.speculative(LM, drafter)
    given = params() if drafter.needs_params else params() | {"draft": None}
    state = decoding.empty(decoder, given, 2, CAPACITY, jnp.float32, 1)
    keys = row_keys(0, ["a", "b"])
    prompts = Prompts(PROMPTS, LENGTHS, keys, LENGTHS + NEW, SamplingArrays.make(2), width=width)
    return specjax.run(decoder, given, decoding.insert(decoder, given, state, jnp.arange(2), prompts))


def whole(tokens):
    """Logits `[B, T, V]` of a pass without a cache, and what its layers of means have added."""
    at = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    block = Block(tokens, at, jnp.zeros(len(tokens), jnp.int32))
    out = jax.jit(lambda given: LM(given, block, None, wants=Wants(logits=True)))(params()["target"])
    return out.logits, out.delta.states


@pytest.fixture(scope="module")
def plain():
    return decoded(DRAFTERS["none"])


@pytest.mark.parametrize("name", DRAFTERS)
def test_texts_are_those_of_whole_passes_whatever_was_drafted(name, plain):
    """And what a row keeps is the sum over its text, up to the root, which no cache has: rejected nodes leave nothing."""
    state = plain if name == "none" else decoded(DRAFTERS[name])
    texts = np.asarray(state.tokens)
    logits, added = whole(state.tokens)
    for row, (length, end) in enumerate(zip(LENGTHS, LENGTHS + NEW, strict=True)):
        assert int(state.length[row]) == end
        want = np.asarray(logits[row].argmax(axis=1))[length - 1 : end - 1]
        np.testing.assert_array_equal(texts[row, length:end], want)
        for kept, each in zip(state.cache.states, added, strict=True):
            np.testing.assert_allclose(kept[row], each[row, : end - 1].sum(axis=0), rtol=1e-4, atol=1e-4)
    assert len(state.cache.states) == 2 and len(state.cache.key) == 1
    if name != "none":
        steps = np.asarray(state.stats.steps)
        assert (steps < NEW).any() and np.asarray(state.stats.accepted)[:, 0].any()  # some accepted, some rejected


def test_a_prompt_in_chunks_is_one_that_is_read_whole(plain):
    chunks = decoded(DRAFTERS["none"], width=3)
    np.testing.assert_array_equal(chunks.tokens, plain.tokens)
    for a, b in zip(chunks.cache.states, plain.cache.states, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_commit_is_made_of_its_path_alone():
    """Of four nodes the path 0, 2: `[1, 0] + [1, 2] + [3, 4]`. What was rejected may be anything, and a row of none stays."""
    state = jnp.asarray([[1.0, 0.0], [0.1, 0.2]])
    delta = jnp.asarray([[[1.0, 2.0], [1e6, 1e6], [3.0, 4.0], [-1e6, 1e6]]] * 2)
    src, dst = jnp.asarray([[0, 2, 1], [1, 1, 3]]), jnp.asarray([5, 7])
    after = committed(MeanConfig(), state, delta, src, dst, jnp.asarray([2, 0]))
    np.testing.assert_array_equal(after, np.asarray([[5.0, 6.0], state[1]], np.float32))


def test_a_layer_keeps_slots_a_state_both_or_neither():
    """A text in two passes, then one of two nodes, is a text in one; what is left out is as if it were not there."""
    lm, tokens = APART, jnp.asarray([[3, 1, 4, 1, 5, 9]])
    given = jax.tree.map(jnp.asarray, drawn(lm.init(jax.random.key(1)), seed=2))
    assert [sorted(layer) for layer in given["layers"].values()] == [
        ["attention_norm", "both", "mlp", "mlp_norm"], ["mlp", "mlp_norm"], ["attention", "attention_norm"],
        ["attention_norm", "mean"], ["attention_norm", "both"],
    ]  # fmt: skip
    block = lambda lo, hi: Block(tokens[:, lo:hi], jnp.arange(lo, hi)[None], jnp.asarray([lo]))

    @jax.jit
    def runs(given):
        whole = lm(given, block(0, 6), None, wants=Wants(logits=True)).logits
        cache, parts = lm.init_cache(1, 8), []
        for lo, hi in ((0, 3), (3, 4)):
            out = lm(given, block(lo, hi), cache, wants=Wants(logits=True))
            cache = lm.commit(cache, out.delta, None, jnp.asarray([lo]), jnp.asarray([hi - lo]))
            parts.append(out.logits)
        tree = Block(
            jnp.asarray([[5, 7, 9]]), jnp.asarray([[4, 4, 5]]), jnp.asarray([4]),
            visible=jnp.asarray([[[1, 0, 0], [0, 1, 0], [1, 0, 1]]], bool),
        )  # fmt: skip
        parts.append(lm(given, tree, cache, wants=Wants(logits=True)).logits[:, ::2])
        h = lm.embed(given, tokens)
        skip = jnp.asarray([[False, True], [True, True], [True, False], [True, True], [False, True]])
        left = lm.layers(given, h, 0, 5, block(0, 6), None, skip=skip)[0]
        return whole, jnp.concatenate(parts, axis=1), left

    whole, parts, left = runs(given)
    np.testing.assert_allclose(parts, whole, rtol=1e-4, atol=1e-4)
    bare = dataclasses.replace(PLAIN, layers=(dataclasses.replace(PLAIN.layers[0], mixer=BOTH, feed=None),) * 2)
    own = given | {
        "layers": {
            i: {name: given["layers"][at][name] for name in ("both", "attention_norm")} for i, at in ((0, 0), (1, 4))
        }
    }
    want = LlamaLM(bare).layers(own, LlamaLM(bare).embed(own, tokens), 0, 2, block(0, 6), None)[0]
    np.testing.assert_allclose(left, want, rtol=1e-5, atol=1e-5)
    cache = lm.init_cache(1, 8)
    assert len(cache.key) == 3 and len(cache.states) == 3


def test_what_writes_slots_again_is_refused():
    delta, dst = jnp.zeros((1, 2, 4)), jnp.asarray([3])
    for given in ((None, dst, None), (None, jnp.asarray([[3, 4]]), jnp.asarray([2]))):
        with pytest.raises(
            ValueError, match="cannot be written again in layers with a running state: this commit names slots"
        ):
            committed(MeanConfig(), jnp.zeros((1, 4)), delta, *given)
