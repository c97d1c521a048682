"""A model reads parameters of another library where they are: its logits, its gradients, and one program for all of them."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import jax_libraries, other_models, small_target
from support.passes import logits

import specjax
from specjax import decoder as decoding
from specjax.lm import Block, Wants
from specjax.models import LlamaLM, Mapped, ModelError, load, of_library, save
from specjax.testing import check_lm

LM = small_target.TARGET
IDS = np.random.default_rng(0).integers(0, 24, (2, 12))
PROMPTS = [[3, 1, 4, 1, 5], [2, 7]]
SCALED = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


def theirs(params):
    """The tree of LM as another library might have it: under other names, transposed, and in a stack of layers."""
    own = [params["layers"][i] for i in range(LM.num_layers)]
    return {
        "table": params["embed"]["embedding"].T,
        "end": params["norm"]["scale"],
        "heads": jnp.stack([layer["attention"]["q"]["kernel"].reshape(32, 4, 8) for layer in own], axis=1),
        "rest": [jax.tree.map(lambda x: x, {**layer, "attention": {**layer["attention"], "q": {}}}) for layer in own],
    }


def of(p):
    layer = lambda i, own: {**own, "attention": {**own["attention"], "q": {"kernel": p["heads"][:, i]}}}
    layers = [layer(i, own) for i, own in enumerate(p["rest"])]
    return {"embed": {"embedding": p["table"].T}, "layers": layers, "norm": {"scale": p["end"]}}


MAPPED = Mapped(LM, of)


def loss(lm, params, ids):
    """The mean log-probability of each text's tokens, of a pass without a cache."""
    slots = jnp.broadcast_to(jnp.arange(ids.shape[1])[None], ids.shape)
    block = Block(jnp.asarray(ids, jnp.int32), slots, jnp.zeros(len(ids), jnp.int32))
    dist = jax.nn.log_softmax(lm(params, block, None, wants=Wants(logits=True)).logits[:, :-1])
    return jnp.take_along_axis(dist, jnp.asarray(ids)[:, 1:, None], axis=2).mean()


def texts(lm, params, drafter="prompt_lookup"):
    records = specjax.generate((lm, params), PROMPTS, drafter=drafter, max_new_tokens=8, batch_size=2)
    return [record.tokens for record in records]


def test_texts_and_gradients_of_a_tree_of_ones_own():
    """Of other parameters too, by the same programs; another object of the same mapping has them as well."""
    first, second = (LM.init(jax.random.key(seed)) for seed in (0, 1))
    assert texts(MAPPED, theirs(first)) == texts(LM, first, "none")
    compiled = decoding.run_program._cache_size()
    assert texts(Mapped(LM, of), theirs(second)) == texts(LM, second, "none") != texts(LM, first, "none")
    assert decoding.run_program._cache_size() == compiled
    slope = jax.jit(jax.grad(loss, 1), static_argnums=0)
    chex.assert_trees_all_close(slope(MAPPED, theirs(first), IDS), theirs(slope(LM, first, IDS)), atol=1e-5)


def test_what_does_not_fit_is_named():
    p = theirs(LM.init(jax.random.key(0)))
    embed = lambda lm: jax.eval_shape(lm.embed, p, IDS)
    with pytest.raises(ModelError, match=r"missing norm.scale \[32\]; unknown end \[32\]"):
        embed(Mapped(LM, lambda p: {**{k: v for k, v in of(p).items() if k != "norm"}, "end": p["end"]}))
    with pytest.raises(ModelError, match=r"embed.embedding has shape \[32, 24\], the model says \[24, 32\]"):
        embed(Mapped(LM, lambda p: {**of(p), "embed": {"embedding": p["table"]}}))
    with pytest.raises(ModelError, match=r"of no library of MaxText, Tunix, the library gemma \(end; heads; rest/0/"):
        of_library(p, LM.config)


def made(folder, family, **fields):
    """A small model of a family, and its parameters, which are saved in a folder."""
    lm = LlamaLM(other_models.config_of(family, **fields))
    params = other_models.drawn(lm.init(jax.random.key(0)))
    save(folder, lm, params)
    return lm, params


TREES = {
    "maxtext apart": lambda folder: jax_libraries.maxtext(folder, "apart"),
    "maxtext scanned": lambda folder: jax_libraries.maxtext(folder, "scanned")["params"],
    "gemma flat": lambda folder: jax_libraries.gemma(folder, "flat", transposed=False),
    "gemma nested": lambda folder: jax_libraries.gemma(folder, "nested", transposed=True),
    "gemma stacked": lambda folder: jax_libraries.gemma(folder, "stacked 2", transposed=False),
    "tunix": jax_libraries.tunix,
}
FAST = (("llama", "maxtext scanned", {"rope_parameters": SCALED}), ("qwen3", "tunix", {}))
OF_GEMMA = ("gemma2", "gemma stacked", {})
EXACT = {"hidden_size": 64}
"""MaxText multiplies Gemma's embeddings by the root of it in bfloat16: 8, without rounding."""
SLOW = (
    OF_GEMMA,
    ("llama", "maxtext apart", {"rope_parameters": SCALED}), ("llama", "tunix", {}), ("qwen2", "maxtext scanned", {}),
    ("qwen2", "tunix", {}), ("qwen3", "maxtext apart", {}), ("qwen3_moe", "tunix", {}), ("gemma", "maxtext scanned", EXACT),
    ("gemma", "gemma flat", {}), ("gemma", "tunix", {}), ("gemma2", "maxtext scanned", {}), ("gemma2", "tunix", {}),
    ("gemma3_text", "maxtext apart", EXACT), ("gemma3_text", "gemma nested", {}), ("gemma3_text", "tunix", {}),
)  # fmt: skip


def named(case):
    return f"{case[0]}-{case[1].replace(' ', '-')}"


def same_logits(mapped, tree, lm, params):
    found, wanted = logits(mapped, tree, IDS), logits(lm, params, IDS)
    np.testing.assert_allclose(found, wanted, atol=1e-4 * float(jnp.abs(wanted).max()))


@pytest.mark.covers("mapped", "jax_folders")
@pytest.mark.parametrize("case", [*FAST, *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)], ids=named)
def test_logits_of_a_library_that_is_known(tmp_path, case):
    family, form, fields = case
    lm, params = made(tmp_path, family, **fields)
    tree = TREES[form](tmp_path)
    same_logits(of_library(tree, lm.config), tree, lm, params)


@pytest.mark.slow
@pytest.mark.covers("mapped", "jax_folders", "testing")
@pytest.mark.parametrize("case", [*FAST, OF_GEMMA], ids=named)
def test_they_keep_the_contract(tmp_path, case):
    family, form, fields = case
    lm, params = made(tmp_path, family, **fields)
    tree = jax.tree.map(jnp.asarray, TREES[form](tmp_path))
    mapped = of_library(tree, lm.config)
    assert check_lm(mapped, tree, length=12).lacks == {}
    assert texts(mapped, tree, "token_recycling") == texts(lm, params, "none")
    compiled = decoding.run_program._cache_size()
    other = jax.tree.map(lambda x: x * 1.5, tree)
    texts(of_library(other, lm.config), other, "token_recycling")
    assert decoding.run_program._cache_size() == compiled
    slope = jax.jit(jax.grad(loss, 1), static_argnums=0)(mapped, tree, IDS)
    chex.assert_trees_all_equal_shapes(slope, tree)
    used = [(name, float(jnp.abs(x).max())) for name, x in flat(slope) if not unread(name)]
    assert min(size for _, size in used) > 0, [name for name, size in used if not size]


def flat(tree):
    return [(jax.tree_util.keystr(path), x) for path, x in jax.tree_util.tree_leaves_with_path(tree)]


def unread(name):
    """Whether an array is of images, or of an optimizer."""
    return any(word in name for word in ("mm_input", "vision", "SigLiP", "opt_state", "step"))


def test_a_library_whose_arrays_do_not_fit(tmp_path):
    lm, _ = made(tmp_path, "qwen3")
    tree = jax_libraries.tunix(tmp_path)
    tree["layers"]["0"]["attn"]["q_proj"]["w_lora_a"] = np.zeros((32, 2), np.float32)
    with pytest.raises(ModelError, match=r"do not fit the config: unused layers/0/attn/q_proj/w_lora_a \[32, 2\]"):
        of_library(tree, lm.config)
    with pytest.raises(ModelError, match="the checkpoint has 2 layers, and config.json says 3"):
        of_library(tree, other_models.config_of("qwen3", num_hidden_layers=3))
    with pytest.raises(ModelError, match="Tunix's models of llama, .* are read, and the config is of ''"):
        of_library(tree, LM.config)


@pytest.mark.slow
@pytest.mark.covers("jax_folders", "models")
def test_a_folder_of_tunix(tmp_path):
    lm, params = made(tmp_path / "hf", "qwen3")
    tree = jax.tree.map(lambda x: {"value": x}, jax_libraries.tunix(tmp_path / "hf"))
    jax_libraries.write(tmp_path / "tunix", tree)
    model = load(tmp_path / "tunix", config=tmp_path / "hf")
    assert model.lm == lm
    chex.assert_trees_all_close(model.params, params)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of Tunix
@pytest.mark.covers("mapped", "jax_folders")
@pytest.mark.parametrize("family", other_models.OF_TUNIX)
def test_logits_of_tunix_itself(family):
    config, params, forward = other_models.tunix(family)
    mapped = of_library(params, config)
    with jax.numpy_rank_promotion("allow"):
        wanted = np.asarray(jax.jit(forward)(params, jnp.asarray(IDS)))
    np.testing.assert_allclose(logits(mapped, params, IDS), wanted, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of its library
@pytest.mark.covers("mapped", "jax_folders")
@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_logits_of_the_library_gemma_itself(family):
    config, params, forward = other_models.gemma(family)
    mapped, ids = of_library(params, config), IDS + 1  # it takes 0 for padding
    with jax.numpy_rank_promotion("allow"):
        wanted = np.asarray(forward(params, jnp.asarray(ids)))
    np.testing.assert_allclose(logits(mapped, params, ids), wanted, atol=1e-4 * np.abs(wanted).max())


FORWARD = {
    "from flax import nnx": lambda names, params, ids: names["nnx"].merge(names["graph"], params)(ids),
    "from flax import linen as nn": lambda names, params, ids: names["net"].apply(params, ids),
    "import equinox as eqx": lambda names, params, ids: jax.vmap(names["eqx"].combine(params, names["net"]))(ids),
}


@pytest.mark.slow
@pytest.mark.covers("mapped", "other_libraries")
@pytest.mark.parametrize("library", FORWARD)
def test_the_pages_modules(library):
    """Their logits are those of the module, and so are gradients with respect to the module's parameters."""
    if "equinox" in library:
        pytest.importorskip("equinox", reason="equinox is not installed: pip install equinox")
    names = other_models.of_page(library)
    lm, ids = names["lm"], jnp.asarray(IDS)
    if "nnx" in library:
        names["graph"] = names["nnx"].split(names["net"])[0]
    params = other_models.drawn(names["params"])
    forward = lambda params: FORWARD[library](names, params, ids)
    wanted = forward(params)
    np.testing.assert_allclose(logits(lm, params, IDS), wanted, atol=1e-4 * float(jnp.abs(wanted).max()))

    def own(params):
        dist = jax.nn.log_softmax(forward(params)[:, :-1])
        return jnp.take_along_axis(dist, ids[:, 1:, None], axis=2).mean()

    found = jax.jit(jax.grad(loss, 1), static_argnums=0)(lm, params, IDS)
    chex.assert_trees_all_close(found, jax.jit(jax.grad(own))(params), atol=1e-4)
    assert check_lm(lm, params, length=12).lacks == {}


def test_its_caches_are_those_of_the_model():
    """What reads no parameters is the model's own."""
    assert (MAPPED.vocab_size, MAPPED.num_layers, MAPPED.config) == (LM.vocab_size, LM.num_layers, LM.config)
    assert hash(MAPPED) == hash(dataclasses.replace(MAPPED))
    chex.assert_trees_all_equal_shapes(MAPPED.init_cache(2, 8), LM.init_cache(2, 8))
