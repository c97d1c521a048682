"""XLNet's two streams: distributions equal to transformers', what a position does not see, ASSD with it, what is read
and refused."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import models
from specjax.diffusion.assd import Assd
from specjax.models import Gaps, ModelError, xlnet
from specjax.prompts import Prompts
from specjax.sampling import SamplingArrays

V, L = 40, 9


@pytest.fixture(scope="module")
def theirs():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.XLNetConfig(
        vocab_size=V, d_model=16, n_layer=3, n_head=2, d_inner=24, initializer_range=0.4, clamp_len=5
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.XLNetLMHeadModel(config).eval()


@pytest.fixture(scope="module")
def folder(theirs, tmp_path_factory):
    path = tmp_path_factory.mktemp("xlnet")
    theirs.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(folder):
    loaded = models.load(folder)
    return loaded.lm, loaded.params


@pytest.fixture(scope="module")
def dists(model):
    lm, params = model
    return jax.jit(lambda tokens, sees, at: lm(params, tokens, sees, at))


RANKS = np.asarray([[3, 0, 5, 1, 8, 2, 7, 4, 6], [0, 1, 2, 3, 4, 5, 6, 7, 8]])
AT = np.asarray([[4, 0, 8], [6, 1, 3]])
TOKENS = np.random.default_rng(0).integers(0, V, (2, L))
BEFORE = RANKS[:, None, :] < RANKS[:, :, None]
"""What every position sees in that order; the first one of each sees nothing."""


def test_the_distributions_are_transformers(theirs, dists):
    torch = pytest.importorskip("torch")
    mapping = np.eye(L, dtype=np.float32)[AT]
    with torch.no_grad():
        want = theirs(
            torch.tensor(TOKENS),
            perm_mask=torch.tensor(~BEFORE, dtype=torch.float32),
            target_mapping=torch.tensor(mapping),
        ).logits.numpy()
    np.testing.assert_allclose(dists(TOKENS, BEFORE, AT), want, rtol=1e-4, atol=1e-4)


def test_a_distribution_is_of_what_is_seen_alone(dists):
    """Another token changes the distributions of the positions after it, and of no other; neither its own."""
    every = np.broadcast_to(np.arange(L)[None], (2, L))
    changed = np.where(np.arange(L)[None] == 3, (TOKENS + 1) % V, TOKENS)
    moved = np.abs(dists(TOKENS, BEFORE, every) - dists(changed, BEFORE, every)).max(axis=2) > 1e-6
    first = RANKS == 0  # its distribution is an average over all of the content
    np.testing.assert_array_equal(moved[~first], (RANKS > RANKS[:, 3:4])[~first])


@pytest.mark.slow
@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_drafts_are_sequential_decodings_text(temperature):
    """Which it is only where a known token sees the same in every pass: exact distributions do not tell, a network's
    do."""
    lm, rng = xlnet.XlnetLM(xlnet.XlnetConfig(V, 16, 3, 2, 24, 8)), np.random.default_rng(0)
    random = lambda shape: jnp.asarray(0.4 * rng.normal(size=shape), jnp.float32)
    params = jax.tree.map(random, lm.shapes(), is_leaf=lambda node: isinstance(node, tuple))
    given = np.asarray([[1, 0, 0, 1, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0, 0, 1]], bool)
    keys = jax.random.split(jax.random.key(3, impl="threefry2x32"), 2)
    prompts, limit = jnp.where(given, TOKENS, -1), jnp.full((2,), L)

    def complete(drafts):
        decoder = Assd(lm, drafts)
        given = Prompts(prompts, limit, keys, limit, SamplingArrays.make(2, temperature=temperature))
        state = decoder.init({"target": params}, given, capacity=L)
        return specjax.run(decoder, {"target": params}, state)

    drafted, alone = complete(4), complete(1)
    np.testing.assert_array_equal(drafted.tokens, alone.tokens)
    assert (drafted.stats.steps < alone.stats.steps).all() and alone.stats.steps.tolist() == [7, 5]
    np.testing.assert_array_equal(np.asarray(drafted.tokens)[given], TOKENS[given])


@pytest.mark.parametrize(
    ("change", "says"),
    (
        ({"mask_token_id": V}, f"mask_token_id must be a token of the vocabulary, not {V}"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"attn_type": "uni"}, "attn_type"),
        ({"ff_activation": "relu"}, "ff_activation"),
        ({"n_layer": 0}, "positive integers for: n_layer"),
        ({"d_inner": 8}, r"layer.0.ff.layer_1.weight has shape \[24, 16\], config.json says \[8, 16\]"),
        ({"n_layer": 2}, "unused transformer.layer.2"),
        ({"n_layer": 4}, "missing transformer.layer.3"),
        ({"clamp_len": "far"}, "clamp_len"),
        (None, "has no config.json"),
    ),
)
def test_what_does_not_fit_is_one_line(folder, tmp_path, change, says):
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    if change is not None:
        raw = json.loads((folder / "config.json").read_text()) | change
        (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=says) as error:
        models.load(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_what_is_saved_is_read_back_here_and_by_transformers(model, folder, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    for tied in (True, False):
        lm = dataclasses.replace(model[0], config=dataclasses.replace(model[0].config, tied=tied))
        params = dict(model[1])
        if not tied:
            params["head"] = params["head"] | {"weight": params["embed"] + 1}
        models.save(tmp_path / str(tied), lm, params, diffusion=Gaps(3, False))
        again = models.load(tmp_path / str(tied))
        assert again.lm == lm and again.masked == Gaps(3, False) and again.any_subset
        jax.tree.map(np.testing.assert_array_equal, again.params, params)
        net = transformers.XLNetLMHeadModel.from_pretrained(tmp_path / str(tied)).eval()
        with torch.no_grad():
            mask = torch.tensor(~BEFORE, dtype=torch.float32)
            want = net(
                torch.tensor(TOKENS), perm_mask=mask, target_mapping=torch.tensor(np.eye(L, dtype=np.float32)[AT])
            )
        np.testing.assert_allclose(lm(params, TOKENS, BEFORE, AT), want.logits.numpy(), rtol=1e-4, atol=1e-4)
    with pytest.raises(ModelError, match="saved with its gaps"):
        models.save(tmp_path / "no", model[0], model[1])


def test_new_parameters_are_drawn_as_in_transformers(model):
    """Norms are ones, biases of matrices zeros, everything else is normal with the deviation 0.02."""
    params = jax.jit(model[0].init)(jax.random.key(0))
    layer = params["layers"][0]
    assert (
        (layer["norm"]["weight"] == 1).all()
        and (layer["up"]["bias"] == 0).all()
        and (params["head"]["bias"] == 0).all()
    )
    for one in (params["embed"], layer["q"], layer["down"]["weight"], layer["r_r_bias"]):
        assert 0.014 < float(one.std()) < 0.026
    assert not np.array_equal(layer["q"], layer["k"])
