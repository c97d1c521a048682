"""Widened models, drafts and heads: the plain ones' logits, texts and drafts, at the sizes that are stated."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import but_slow
from support.margin import Margin, teacher_forced
from support.shapes import changed

import specjax
from specjax import decoder as decoding
from specjax import models
from specjax.draft import (
    MTP,
    PPD,
    Acceptance,
    Cascade,
    Chimera,
    Clover,
    Clover2,
    DFlash,
    DFlash2,
    DiffusionDrafter,
    DiffuSpec,
    Domino,
    Dovetail,
    DSpark,
    Eagle,
    Eagle3,
    Falcon,
    Fspad,
    Griffin,
    Gumiho,
    HiddenTransfer,
    Hydra,
    JetSpec,
    Kangaroo,
    LSTMSpeculator,
    Medusa,
    MLPSpeculator,
    ModelDrafter,
    PEagle,
    PromptLookup,
    Switch,
    Trained,
    View,
    adaptive,
    fuse,
)
from specjax.draft.dspark.network import sureness
from specjax.draft.heads.widening import widen_head
from specjax.draft.trim import trimmed_model
from specjax.expand import BestFirst, Chain, TopK
from specjax.models import LlamaLM, Masked, Model, ModelError, TabularLM, llama_config
from specjax.models.attention import AttentionConfig
from specjax.models.layer import LayerConfig
from specjax.models.mlp import MLPConfig
from specjax.models.model_config import EmbeddingConfig, HeadConfig, PositionsConfig
from specjax.models.norms import NormConfig
from specjax.models.transform import TransformConfig
from specjax.models.widening import tiled, wider_lm
from specjax.prompts import Prompts
from specjax.sampling import Sampler, SamplingArrays, row_keys

PLAIN = llama_config(
    vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, max_position_embeddings=64, tie_word_embeddings=True,
)  # fmt: skip
of = lambda **fields: LlamaLM(changed(PLAIN, **fields))
FAMILIES = {
    "tied": (of(), 4),
    "untied": (of(tie_word_embeddings=False), 3),
    "biases": (of(qkv_bias=True, o_bias=True, mlp_bias=True), 2),
    "qk_norm": (of(qk_norm=True, tie_word_embeddings=False), 2),
    "norms over all heads": (of(qk_wide_norm=True, pre_norms=False, post_norms=True, residual_multiplier=0.5), 2),
    "one kv-head": (of(num_key_value_heads=1, sliding_window=4, head_dim=12), 3),
    "every head its own": (of(num_key_value_heads=4), 2),
    "copies of kv-heads": (dataclasses.replace(of(), kv_copies=2), 2),
}
NORM = NormConfig(1e-5, "wide", mean=True, bias=True)
OLDER = PLAIN.every(NormConfig, mean=True, bias=True).every(MLPConfig, hidden_act="relu2", bias=True, gated=False)
OLDER = OLDER.every(EmbeddingConfig, positions=PositionsConfig(62, 2), norm=NORM).every(
    LayerConfig, parallel="one_norm"
)
OLDER = OLDER.every(HeadConfig, bias=True, transform=TransformConfig("gelu", NORM, bias=True))
FAMILIES["older"] = LlamaLM(OLDER.every(AttentionConfig, qk_norm=NORM, rope=None)), 2
IDS = np.random.default_rng(0).integers(1, 40, 30).tolist()


def moved(params, seed=0):
    """Parameters with noise on all of them, biases and norms too, and sharpened: what is dropped or misplaced shows."""
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    noise = lambda x: 0.3 * rng.standard_normal(x.shape).astype(np.float32)
    return jax.tree.unflatten(tree, [(3 * x if x.ndim > 1 else x) + noise(x) for x in leaves])


@functools.cache
def model_of(name="tied"):
    lm, k = FAMILIES[name]
    plain = Model(lm, moved(lm.init(jax.random.key(1))), name=name, dtype=jnp.dtype("float32"))
    return plain, models.widen(plain, k), k


def rounding(plain, wide, ids=IDS):
    """The margin between two models over a text, and the plain one's logits.

    Sums over k times as many numbers round in another order, and a third is no binary number: 1e-5 to 3e-5 of the logits'
    spread here, with sharpened weights. A `Margin` refuses more than 1e-4 of it; misplaced or unscaled parts exceed that far.
    """
    logits, other = (teacher_forced(m.lm, m.params, ids) for m in (plain, wide))
    return Margin(float(np.abs(logits - other).max()), float(logits.std())), logits


@pytest.mark.parametrize(
    "name",
    but_slow(
        FAMILIES,
        "biases",
        "qk_norm",
        "norms over all heads",
        "one kv-head",
        "every head its own",
        "copies of kv-heads",
        "older",
    ),
)
def test_logits_are_the_plain_ones(name):
    plain, wide, _ = model_of(name)
    _, logits = rounding(plain, wide)
    assert logits.std(axis=1).min() > 0.1  # they say something


def unscaled(path, x):
    """One kernel that does not divide."""
    return 4 * x if "[1]['mlp']['down']" in jax.tree_util.keystr(path) else x


def swapped(path, x):
    """Queries that read another kv-head."""
    return jnp.roll(x, PLAIN.near.head_dim, axis=-1) if path[-2].key == "k" else x


@pytest.mark.parametrize("fault", ["a kernel", "the way out", "the heads"])
def test_a_planted_fault_is_more_than_rounding(fault):
    plain, wide, _ = model_of()
    if fault == "the way out":
        undivided = changed(wide.lm.config, logits_scaling=1.0)
        wide = dataclasses.replace(wide, lm=LlamaLM(undivided))
    else:
        change = {"a kernel": unscaled, "the heads": swapped}[fault]
        wide = dataclasses.replace(wide, params=jax.tree_util.tree_map_with_path(change, wide.params))
    with pytest.raises(AssertionError, match="more than rounding"):
        rounding(plain, wide)


@pytest.mark.parametrize("name", FAMILIES)
def test_kernels_of_layers_grow_as_k_squared_and_tables_as_k(name):
    lm, k = FAMILIES[name]
    before = lm.abstract()
    after = jax.eval_shape(lambda params: tiled(params, k, lm.config.hidden_size), before)
    assert jax.tree.map(lambda x: x.shape, after) == jax.tree.map(lambda x: x.shape, wider_lm(lm, k).abstract())
    kernels = lambda params: [x.size for x in jax.tree.leaves(params["layers"]) if x.ndim == 2]
    assert kernels(after) == [k * k * size for size in kernels(before)]
    vocabulary = lambda x: x.ndim == 2 and lm.vocab_size in x.shape
    parts = lambda params: jax.tree.leaves([params["embed"], params.get("head")])
    tables = lambda params: [x.size for x in parts(params) if vocabulary(x)]
    assert tables(after) == [k * size for size in tables(before)] and len(tables(before)) == 2 - lm.config.head.tied
    assert lm.config.near.head_dim == wider_lm(lm, k).config.near.head_dim


DRAFT = of(num_hidden_layers=1)
DRAFTERS = {
    "draft over fewer tokens": ModelDrafter(DRAFT, Chain(2)),
    "diffusion_draft": DiffusionDrafter(DRAFT, 39, Chain(2)),
    "diffuspec": DiffuSpec(DRAFT, 39, length=3, least=1, most=4),
    "medusa": Medusa(layers=2),
    "hydra": Hydra(TopK(k=2, depth=2, nodes=4), layers=2, prefix_layer=True),
    "mlp_speculator": MLPSpeculator(heads=2),
    "lstm_speculator": LSTMSpeculator(TopK(k=2, depth=2, nodes=4), inner=24),
    "eagle1": Eagle(TopK(k=2, depth=2, nodes=4)),
    "eagle3": Eagle3(TopK(k=2, depth=2, nodes=4), norm_before_fc=True),
    "mtp": MTP(TopK(k=2, depth=2, nodes=4)),
    "fspad": Fspad(TopK(k=2, depth=2, nodes=4)),
    "griffin": Griffin(TopK(k=2, depth=2, nodes=4)),
    "dovetail": Dovetail(TopK(k=2, depth=2, nodes=4), layers=2),
    "falcon": Falcon(TopK(k=2, depth=4, nodes=6), carries=True),
    "gumiho": Gumiho(TopK(k=2, depth=3, nodes=6), mlps=1),
    "peagle": PEagle(Chain(2), norm_before_fc=True),
    "dflash": DFlash(TopK(k=2, depth=2, nodes=4), layers=2, block=4),
    "dflash2": DFlash2(TopK(k=2, depth=2, nodes=4), layers=2, block=4, group=4, rank=4, candidates=5),
    "jetspec": JetSpec(BestFirst(k=2, depth=2, nodes=4), layers=2, block=4),
    "dspark": DSpark(TopK(k=2, depth=2, nodes=4), block=4, markov="rnn", rank=4),
    "dspark, gated": DSpark(TopK(k=2, depth=2, nodes=4), block=4, markov="gated", rank=4),
    "clover": Clover(TopK(k=2, depth=2, nodes=4)),
    "chimera": Chimera(TopK(k=2, depth=2, nodes=4), heads=2),
    "domino": Domino(TopK(k=2, depth=2, nodes=4), block=4, state=6, rank=4),
    "clover2": Clover2(TopK(k=2, depth=2, nodes=4), layers=1),
    "kangaroo": Kangaroo(exit_layer=1, length=2, threshold=0.0),
    "ppd": PPD("2 @ 2 1x2; 1 | 1 @ 2 1x2"),
    "hidden_transfer": HiddenTransfer(),
    "acceptance": adaptive(ModelDrafter(DRAFT), Acceptance(0.2), 3),
    "fuse": fuse(PromptLookup(length=2, min_ngram=1), Eagle(Chain(2))),
    "cascade": Cascade(DRAFT, PromptLookup(length=2, min_ngram=1), 2, 1),
    "switch": Switch((Eagle3(Chain(2), norm_before_fc=True), ModelDrafter(DRAFT), PromptLookup(length=2))),
}


def own_params(name, target):
    """A drafter bound to the target, and parameters away from where training starts them."""
    drafter, seeds = DRAFTERS[name].bind(target.lm), jax.random.key(5)
    lower = {**target.params, "layers": {0: target.params["layers"][0]}}
    if name == "draft over fewer tokens":
        lm, lower = trimmed_model(DRAFT, lower, np.arange(0, 40, 2))
        return dataclasses.replace(drafter, lm=lm), lower
    if name == "diffuspec":
        return drafter, {"model": lower, "trigrams": None}
    if name == "acceptance":
        return drafter, {"drafter": lower, "rule": moved(drafter.rule.bind(DRAFT).init_params(seeds, lower))}
    if name == "fuse":
        return drafter, (None, moved(drafter.b.init_params(seeds, target.params)))
    if name == "switch":
        return drafter, (moved(drafter.members[0].init_params(seeds, target.params)), lower, None)
    return drafter, moved(drafter.init_params(seeds, target.params)) if isinstance(drafter, Trained) else lower


PROMPTS, LENGTHS = jnp.asarray([IDS[:6], IDS[6:12]]), jnp.asarray([6, 4])
ROOM = LENGTHS + 12


def begun(decoder, params, insert):
    """Two greedy rows, prefilled."""
    prompts = Prompts(PROMPTS, LENGTHS, row_keys(0, ["a", "b"]), ROOM, SamplingArrays.make(2, temperature=0.0))
    return insert(decoder, params, decoding.empty(decoder, params, 2, 32, None, 1), jnp.arange(2), prompts)


def drafted(model, drafter, own):
    """The tokens of the tree after the prompts, and what the head made of them: all in one program."""
    decoder = specjax.speculative(model.lm, drafter)

    def program(params):
        state = begun(decoder, params, lambda decoder, *args: decoder.insert(*args))
        view = View(state.tokens, state.length, ~state.done, state.cache, max_depth=decoder.drafter.depth)
        sampler = Sampler(state.key, state.tokens, state.length, ~state.done, state.sampling)
        tree = decoder.drafter.propose(params, state.draft, view, sampler).tree
        feature = getattr(state.draft, "feature", jnp.zeros((2, 0)))
        return tree.tokens, feature if feature.shape[1] > 1 else jnp.zeros((2, 0))  # DFlash's is no feature

    return program, {"target": model.params, "draft": own}


def check(got, wanted, k):
    """The same drafts, from the same features k times over."""
    np.testing.assert_array_equal(got[0], wanted[0])
    vectors = np.asarray(wanted[1]).reshape(2, -1, PLAIN.hidden_size)  # FSPAD has two
    many = np.tile(vectors, k).reshape(2, -1)
    np.testing.assert_allclose(got[1], many, rtol=1e-3, atol=1e-4 * np.abs(many).max(initial=0.0))


SLOW = (
    "draft over fewer tokens", "diffusion_draft", "diffuspec", "medusa", "hydra", "mlp_speculator",
    "lstm_speculator", "eagle3", "fspad", "griffin", "dovetail",
    "falcon", "gumiho", "mtp", "peagle", "dflash", "dflash2", "jetspec",
    "dspark", "dspark, gated", "domino", "clover", "chimera", "clover2", "kangaroo", "ppd", "hidden_transfer", "acceptance",
    "fuse", "cascade", "switch",
)  # fmt: skip


@pytest.mark.parametrize("name", but_slow(DRAFTERS, *SLOW))
def test_drafts_are_the_plain_ones(name):
    plain, wide, k = model_of()
    drafter, own = own_params(name, plain)
    program, params = drafted(plain, drafter, own)
    wanted = jax.jit(program)(params)
    wider, tiles = widen_head(drafter, own, k)
    program, params = drafted(wide, wider, tiles)
    program = jax.jit(program)
    check(program(params), wanted, k)
    if name == "eagle1":  # embedding and feature tiled as one vector do not line up
        params["draft"] = {**tiles, **tiled({"fc": own["fc"]}, k, 2 * PLAIN.hidden_size)}
        with pytest.raises(AssertionError):
            check(program(params), wanted, k)


def test_a_block_is_as_sure_as_the_plain_one():
    plain, _, k = model_of()
    drafter, own = own_params("dspark", plain)
    _, wide = widen_head(drafter, own, k)
    h, before = jax.random.normal(jax.random.key(0), (3, PLAIN.hidden_size)), jnp.ones((3, 4))
    got = sureness(wide["confidence"], jnp.tile(h, (1, k)), before)
    np.testing.assert_allclose(got, sureness(own["confidence"], h, before), rtol=1e-4)
    assert np.abs(got).min() > 0


@pytest.mark.parametrize("name", but_slow(("draft over fewer tokens", "eagle3"), "eagle3"))
def test_texts_are_the_plain_ones(name):
    """Greedy text of the widened target, against the plain one's, a token at a time."""
    plain, wide, k = model_of()
    drafter, own = own_params(name, plain)
    wider, params = widen_head(drafter, own, k)
    decoder, params = specjax.speculative(wide.lm, wider), {"target": wide.params, "draft": params}
    state = decoding.run(decoder, params, begun(decoder, params, decoding.insert))
    for row, prompt in enumerate(LENGTHS.tolist()):
        text = PROMPTS[row, :prompt].tolist()
        while len(text) < ROOM[row]:
            text.append(int(teacher_forced(plain.lm, plain.params, text)[-1].argmax()))
        margin, logits = rounding(plain, wide, text)
        margin.compare(state.tokens[row, prompt : len(text)].tolist(), text[prompt:], logits, prompt)
        margin.close()


def test_what_else_a_model_says_stays():
    plain, _, _ = model_of()
    masked = dataclasses.replace(plain, masked=Masked(39, False), eos_ids=(3,), longest=32)
    wide = models.widen(masked, 2)
    assert (wide.masked, wide.eos_ids, wide.max_length) == (masked.masked, (3,), 32)
    assert wide.name == "tied widened 2 times" and models.widen(plain, 1) is plain


def test_it_is_saved_as_one_that_divides_its_logits(tmp_path):
    _, wide, _ = model_of()
    models.save(tmp_path / "wide", wide.lm, wide.params)
    again = models.load(tmp_path / "wide", dtype="float32")
    assert again.lm == wide.lm and (tmp_path / "wide" / "config.json").read_text().count("GraniteForCausalLM") == 1
    assert all(map(np.array_equal, jax.tree.leaves(again.params), jax.tree.leaves(wide.params)))


def test_what_cannot_be_widened_says_so(tmp_path):
    plain, wide, _ = model_of()
    for k in (0, -1, 1.5, True):
        with pytest.raises(ModelError, match=f"a whole number of times, at least 1, not {k}"):
            models.widen(plain, k)
    with pytest.raises(ModelError, match="your model cannot be widened: .* this is a TabularLM"):
        models.widen(Model(TabularLM(8, 1), {}), 2)
    with pytest.raises(ModelError, match="shapes has no weights to widen"):
        models.widen(Model(plain.lm, plain.lm.abstract(), name="shapes"), 2)
    wide_bias = dataclasses.replace(wide.lm, config=changed(wide.lm.config, o_bias=True))
    with pytest.raises(
        ModelError, match="no supported architecture has layers.mixer.o_bias=True with the rest of this model; Granite"
    ):
        models.save(tmp_path / "wide", wide_bias, wide.params)

    class Own(Medusa):
        pass

    with pytest.raises(ValueError, match="no rule widens the parameters of Own; `tiles = True` in its class"):
        widen_head(Own().bind(plain.lm), {"heads": []}, 2)
    with pytest.raises(ValueError, match="Medusa cannot be widened: it is not bound to a target yet"):
        widen_head(Medusa(), {"heads": []}, 2)
    with pytest.raises(ModelError, match="no rule widens the parameter .'mlp'..'odd'."):
        tiled({"mlp": {"odd": jnp.ones((16, 16))}}, 2, 16)
    with pytest.raises(ModelError, match="reads or writes 24 numbers, which is not a multiple of the width 16"):
        tiled({"fc": {"kernel": jnp.ones((24, 16))}}, 2, 16)
