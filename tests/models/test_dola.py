"""DoLa: transformers' rule over the same layers by a definition in numpy, and one text whatever is drafted."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import CAPACITY, DRAFTERS, MIXED, TARGET, params_of, same, texts

import specjax
from specjax.decode import LayerContrast, Plain
from specjax.draft import NoDrafter
from specjax.lm import Block, Wants
from specjax.models import HeadConfig
from specjax.models.dola import Dola, contrasted, layers_of
from specjax.prompts import Prompts
from specjax.sampling import row_keys
from specjax.serve.engine import Engine

EARLY, ALPHA, NEW = (-1, 0, 1), 0.2, 12


def written(drafter):
    heats = [0.0, 0.8] * (len(MIXED.prompts) // 2)
    prompts = Prompts.of(MIXED.prompts, NEW, keys=row_keys(0, MIXED.names), temperature=heats)
    decoder, params = specjax.speculative(Dola(TARGET, EARLY, ALPHA), drafter), params_of(drafter)
    state = decoder.init(params, prompts, capacity=CAPACITY)
    return texts(specjax.run(decoder, params, state))


@functools.cache
def plain():
    return written(NoDrafter())


def log_softmax(x):
    return x - np.logaddexp.reduce(x, axis=-1)[:, None]


@pytest.mark.slow
def test_the_rule():
    params, row, bare, used = params_of(NoDrafter())["target"], 2, 0, set()
    ids = [*MIXED.prompts[row], *plain()[row]]
    tokens = jnp.asarray([ids], jnp.int32)
    block = Block(tokens, jnp.arange(len(ids))[None], jnp.zeros((1,), jnp.int32))
    output = TARGET(params, block, None, wants=Wants(logits=True, hidden=EARLY[1:]))
    head = lambda h: np.asarray(TARGET.unembed(params, h)[0], float)
    final = log_softmax(np.asarray(output.logits[0], float))
    streams = [TARGET.embed(params, tokens), *(output.hidden[layer] for layer in EARLY[1:])]
    early = [log_softmax(head(stream)) for stream in streams]
    for at in range(len(MIXED.prompts[row]), len(ids)):
        p, others = final[at - 1], [dist[at - 1] for dist in early]
        far = []
        for q in others:
            m = np.log((np.exp(p) + np.exp(q)) / 2)
            far.append(np.exp(m) @ (2 * m - p - q))
        used.add(int(np.argmax(far)))
        scores = np.where(np.exp(p - p.max()) < ALPHA, -np.inf, p - others[int(np.argmax(far))])
        assert ids[at] == scores.argmax()
        bare += ids[at] != p.argmax()
    assert bare > 2


def test_the_scores_are_those_of_transformers():
    """What its rule (4.51.3) makes of these logits: the first layer is farthest, by Jensen and Shannon another one."""
    final = [0.7, 0.8, -2.5, 0.4, -0.6, -3.8]
    early = [[1.9, -0.7, -1.7, -0.8, 0.3, 3.0], [-0.3, 0.9, 2.7, 1.1, 2.1, -1.0], [1.5, -0.1, 2.1, -2.0, -1.6, 2.5]]
    dist = lambda logits: jax.nn.log_softmax(jnp.asarray(logits))[None, None]
    got = contrasted(dist(final), [dist(logits) for logits in early], 0.1)[0, 0]
    np.testing.assert_allclose(got, [0.322021, 3.022021, -np.inf, 2.722021, 0.622021, -np.inf], atol=2e-5)


@pytest.mark.parametrize("name", ["token_recycling", pytest.param("kangaroo", marks=pytest.mark.slow)])
def test_same_text_as_plain(name):
    same(written(DRAFTERS[name]), plain())


def test_refused():
    model = TARGET, params_of(NoDrafter())["target"]
    for layers in ([3], [], "middle"):
        with pytest.raises(ValueError, match="dola_layers must be low, high or counts of layers"):
            Engine(model, decode=Plain(steer=LayerContrast(layers)))
    with pytest.raises(ValueError, match="steer is one of guidance, contrastive, dola, scmoe as an object or a line"):
        Engine(model, Plain(steer=("guidance", "dola")))


def test_layers_by_name():
    of = lambda count: types.SimpleNamespace(num_layers=count)
    assert layers_of("low", of(8)) == (1,) and layers_of("high", of(8)) == (3, 5)  # after 2, and after 4 and 6 layers
    assert layers_of("low", of(3)) == (1,) and layers_of([1, 2], of(3)) == (0, 1)
    assert layers_of("high", of(48)) == tuple(range(27, 47, 2)) and layers_of("low", of(48)) == tuple(range(1, 19, 2))
    apart = types.SimpleNamespace(head=HeadConfig(tied=False))  # then the embeddings are the first
    of = lambda count: types.SimpleNamespace(num_layers=count, config=apart)
    assert layers_of("low", of(32)) == (-1, 1, 3, 5, 7, 9, 11, 13) and layers_of("high", of(4)) == (1,)
    assert layers_of("low", of(48)) == tuple(range(-1, 19, 2)) and layers_of([0, 2], of(8)) == (-1, 1)
