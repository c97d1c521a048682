"""Rings: layers with a window keep that and a little more in the cache, and texts are those of caches that keep everything."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import Rows, but_slow, start, texts
from support.shapes import small
from support.table_lm import Table

import specjax
from specjax.decode import Beam, Speculate, speculate
from specjax.draft import (
    Confidence,
    Gemma4Assistant,
    ModelDrafter,
    NoDrafter,
    PromptLookup,
    Swift,
    TokenRecycling,
    Trained,
    adaptive,
    fuse,
)
from specjax.expand import Static
from specjax.models import LlamaLM, hf_config
from specjax.models.experts import ExpertsConfig
from specjax.models.families import base
from specjax.models.kv import KVDelta
from specjax.serve.engine import Engine

SIZES = (64, 32, 48, 4, 4, 2, 8, 256)
OSS = ExpertsConfig(4, 2, 16, scoring="chosen", swiglu_limit=1.0)
MODELS = {
    "gpt_oss": small(
        *SIZES, sliding_window=7, sliding_layers=(True, False) * 2, attention_sinks=True, experts=OSS, norm="wide"
    ),
    "shared": base.mixers(
        small(*SIZES, sliding_window=5, sliding_layers=(True, False) * 2),
        lambda i: ({"head_dim": 16, "num_key_value_heads": 1} if i % 2 else {}) | {"source": i - 2 if i > 1 else None},
    ),
    "mistral": small(*SIZES, sliding_window=9),
    "llama4": base.mixers(
        small(*SIZES, sliding_window=9, sliding_layers=(True, False) * 2), lambda i: {"chunked": i % 2 == 0}
    ),
}
DRAFTERS = {
    "none": NoDrafter(),
    "token_recycling": TokenRecycling(k=4),
    "static": Static(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))),
}
AHEAD, WIDTH = 8, 8
LENGTHS = (3, 9, 41, 21, 1)


def batch():
    """Ragged prompts, some longer than every window and read in several parts; the second and fourth row are sampled."""
    rng = np.random.default_rng(0)
    prompts = tuple(tuple(rng.integers(0, 64, n).tolist()) for n in LENGTHS)
    options = tuple({"temperature": 0.7} if i % 2 else {} for i in range(len(LENGTHS)))
    return Rows(prompts, tuple(map(str, LENGTHS)), options, 30)


def made(name):
    lm = LlamaLM(MODELS[name])
    params = lm.init(jax.random.key(1))
    for i, layer in params["layers"].items():
        if "sinks" in layer["attention"]:
            layer["attention"]["sinks"] = jax.random.normal(jax.random.key(i), (4,))
    return lm, params


def written(lm, params, name, ahead, *, mesh=None, **options):
    """Texts of a batch, and the final state."""
    drafter = ModelDrafter(lm, DRAFTERS[name]) if name == "static" else DRAFTERS[name]
    noise = lambda x: x * (1 + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape))
    both = {"target": params, "draft": jax.tree.map(noise, params) if name == "static" else None}
    decoder = specjax.speculative(lm, drafter, mesh=mesh)
    decoder = dataclasses.replace(decoder, target=dataclasses.replace(lm, ahead=ahead))
    state = start(decoder, batch(), model=both, capacity=96, width=WIDTH, **options)
    state = specjax.decoder.run(decoder, both, state)
    return texts(state), state


PAIRS = [("gpt_oss", name) for name in DRAFTERS] + [("shared", "static"), ("mistral", "static"), ("llama4", "static")]
"""Others are held to the text of whole caches by the conformance tests, on two models with windows."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "pair", but_slow(PAIRS, ("gpt_oss", "none"), ("gpt_oss", "token_recycling"), ("mistral", "static")), ids="-".join
)
def test_texts_are_those_of_whole_caches(pair):
    model, drafter = pair
    lm, params = made(model)
    want, _ = written(lm, params, drafter, None)
    got, state = written(lm, params, drafter, AHEAD)
    window = MODELS[model].near.window
    assert {x.shape[2] for x in state.cache.key} <= {window + AHEAD, 96} and state.cache.key[0].shape[
        2
    ] == window + AHEAD
    assert got == want and len({token for text in want for token in text}) > 10
    if drafter == "static":
        accepted = state.stats.accepted.sum(axis=0)
        assert int(accepted[0]) > 5 < int(accepted[2:].sum())  # rejected slots and long paths were written


@pytest.mark.slow
def test_a_prefix_that_rows_go_on_from():
    lm, params = made("gpt_oss")
    prompts = batch().prompts
    rows = dataclasses.replace(batch(), prompts=tuple(prompts[2][:30] + own for own in prompts))
    both, found = {"target": params, "draft": None}, []
    for ahead, prefix in ((None, 0), (32, 30)):  # a prefix of thirty tokens is read in one part
        decoder = specjax.speculative(lm, DRAFTERS["none"])
        decoder = dataclasses.replace(decoder, target=dataclasses.replace(lm, ahead=ahead))
        state = start(decoder, rows, model=both, capacity=128, width=WIDTH, prefix=prefix)
        found.append(texts(specjax.decoder.run(decoder, both, state)))
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "mesh"), [("gpt_oss", "context=3"), ("gpt_oss", "data=2,model=2"), ("llama4", "context=3")]
)
def test_texts_on_a_mesh(model, mesh):
    """Slots of a ring are split as others are, here fifteen or seventeen over three devices."""
    from specjax.sharding import make_mesh

    lm, params = made(model)
    count = {"context=3": 3, "data=2,model=2": 4}[mesh]
    got, _ = written(lm, params, "token_recycling", AHEAD, mesh=make_mesh(mesh, jax.devices()[:count]))
    assert got == written(lm, params, "token_recycling", None)[0]


@pytest.mark.slow
def test_what_a_commit_leaves_is_what_the_next_block_sees():
    """After any commits that write as far ahead as they may, slot for slot, with named slots among them."""
    config = small(8, 8, 8, 1, 1, 1, 4, sliding_window=5)
    rng, capacity = np.random.default_rng(3), 64
    ring, whole = (LlamaLM(config, ahead=ahead).init_cache(2, capacity) for ahead in (4, None))
    length = np.array([0, 0])
    for i in range(36):
        new = [jnp.asarray(rng.normal(size=(2, 4, 1, 4)), jnp.float32) for _ in range(2)]
        delta = KVDelta((new[0],), (new[1],), jnp.zeros((2, 4), jnp.int32))
        src = None if i % 3 else jnp.asarray(rng.integers(0, 4, (2, 4)))
        dst = jnp.asarray(length if i % 2 else np.where(np.arange(4) < 3, length[:, None] + np.arange(4), capacity))
        ring, whole = (LlamaLM(config).commit(cache, delta, src, dst) for cache in (ring, whole))
        length = length + rng.integers(0, 3, 2)
        key, value, positions, *_ = ring.layer(0, jnp.asarray(length))
        for row, end in enumerate(length):
            near = range(max(end - 4, 0), end)
            slots = [int(np.flatnonzero(positions[row] == p)[0]) for p in near]
            np.testing.assert_array_equal(key[row, :, slots], whole.key[0][row, :, list(near)])
            np.testing.assert_array_equal(value[row, :, slots], whole.value[0][row, :, list(near)])
    assert length.min() > 18  # it went round twice


def test_it_writes_no_further_ahead_than_it_keeps():
    lm, params = made("mistral")
    with pytest.raises(ValueError, match="keep 7 slots besides it, and are written as many tokens at a time, not 8"):
        written(lm, params, "none", 7)


def test_a_model_without_rings_says_so():
    with pytest.raises(ValueError, match="a Table keeps all of every layer's cache: leave rings out"):
        specjax.speculative(Table()).with_rings()


def test_who_has_rings():
    """What commands assemble where rows only go on, and not what forks rows or reads a second text."""
    lm, params = made("mistral")
    model = specjax.models.Model(lm, params)
    ahead = lambda decode: getattr(decode.bind(model)[0].target, "ahead", None)
    assert ahead(Speculate("prompt_lookup")) == ahead(Speculate()) == 256
    assert ahead(Beam(2)) is None and ahead(Speculate(steer="guidance:scale=2.0")) is None


def ringed(decoder, rings):
    return decoder.with_rings() if rings else decoder


@pytest.mark.parametrize(
    ("kind", "given", "window"),
    [
        ("gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32}, 128),
        ("gemma3_text", {"sliding_window": 1024, "num_hidden_layers": 62, "num_attention_heads": 32}, 1024),
        ("gemma4_text", {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 10, "global_head_dim": 512}, 512),
    ],
)
def test_bytes_at_32k(kind, given, window):
    """Each layer that owns keys: two arrays of its heads times its slots, 32,768 or the window and 256."""
    lm = LlamaLM(hf_config.from_hf({"model_type": kind} | given))
    sizes = []
    for rings in (False, True):
        decoder = ringed(specjax.speculative(lm, PromptLookup(length=6)), rings)
        cache = jax.eval_shape(lambda decoder=decoder: decoder.target.init_cache(1, 32768, jnp.bfloat16))
        sizes.append(sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)))
        want = 0
        for i in (i for i in range(lm.num_layers) if lm.config.source(i) == i):
            heads = lm.config.attention(i)
            slots = window + 256 if rings and lm.config.window(i) else 32768
            want += 2 * heads.num_key_value_heads * slots * heads.head_dim * 2
        assert sizes[-1] == want
    assert sizes[1] < sizes[0] * 0.55


FAR = {
    "gemma4_assistant": Gemma4Assistant(layers=2),
    "swift": Swift(2, 0.1, share=0.6, window=9, guess_every=3, history=8),
}
"""Drafters that read more of a target's cache than a step does."""


@pytest.mark.slow
@pytest.mark.parametrize("name", but_slow(FAR, "swift"))
def test_rings_hold_what_a_drafter_looks_back_for(name, monkeypatch):
    """Its drafts, step by step, are those over a whole cache: from the first on, where the parts of longer prompts were written
    as far ahead of a row's text as they may be."""
    monkeypatch.setattr(sys.modules[specjax.Speculative.__module__], "PREFILL_WIDTHS", (WIDTH,))
    lm = LlamaLM(small(*SIZES, sliding_window=5, sliding_layers=(True, False) * 2))
    both, found = {"target": lm.init(jax.random.key(1)), "draft": None}, []
    for rings in (False, True):
        decoder = ringed(specjax.speculative(lm, FAR[name]), rings)
        if isinstance(decoder.drafter, Trained):
            both["draft"] = decoder.drafter.init_params(jax.random.key(2), both["target"])
        state, step = start(decoder, batch(), model=both, capacity=96, width=WIDTH), jax.jit(decoder.step)
        assert state.cache.key[0].shape[2] == (5 + WIDTH + decoder.drafter.looks_back if rings else 96)
        for _ in range(24):
            state, info = step(both, state)
            tree = info.tree
            found.append(np.where(tree.valid, tree.tokens, -1).tolist())
    assert found[:24] == found[24:]


def test_who_may_look_anywhere_has_no_rings():
    """The first generated tokens stay where they are, however long a text becomes."""
    lm, bound = LlamaLM(MODELS["mistral"]), lambda drafter: specjax.speculative(lm, drafter).with_rings().target.ahead
    assert bound(Swift(first=True)) is None and bound(Swift(window=40)) == 296
    assert bound(Gemma4Assistant()) == bound(fuse(PromptLookup(), Gemma4Assistant())) == 258
    assert bound(adaptive(Gemma4Assistant(), Confidence(0.1))) == 258


@pytest.mark.slow
def test_an_engine_beyond_the_rings(monkeypatch):
    """Prompts and texts that are longer than a ring, more of them than rows, two samples of each: as with whole caches."""
    config = dataclasses.replace(MODELS["mistral"], max_position_embeddings=512)
    lm = LlamaLM(config)
    model = specjax.models.Model(lm, lm.init(jax.random.key(3)), name="windows", dtype=jnp.dtype("float32"))
    rng, found = np.random.default_rng(5), []
    prompts = [rng.integers(0, 64, n).tolist() for n in (300, 5, 150, 282, 40)]
    for rings in (True, False):
        monkeypatch.setattr(speculate, "has_rings", lambda target, rings=rings: rings)
        line = "prompt_lookup:length=4,min_ngram=1"
        assert Engine(model, drafter=line).decoder.target.ahead == (256 if rings else None)
        options = {"max_new_tokens": 60, "temperature": 0.8, "seed": 3, "num_return_sequences": 2}
        records = specjax.generate(model, prompts, drafter=line, batch_size=3, progress=False, **options)
        found.append([record.tokens for record in records])
    assert found[0] == found[1] and len(found[0]) == len(prompts) * 2
