"""`Block.mixture`: every LM reads a mixture of tokens by its own table; what cannot is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import TARGET, params
from support.shapes import changed
from support.table_lm import Table

from specjax.lm import Block, Mixture, Wants, check_mixtures
from specjax.models.contrastive import Contrastive
from specjax.models.llama import LlamaLM
from specjax.models.tabular import TabularLM
from specjax.search import Superposed, SuperposedSearch
from specjax.soft import soft_thinking

TOKENS = jnp.asarray([[3, 5, 2, 7]])
TABULAR = TabularLM(12)


def weights(lm, dtype=jnp.float32):
    drawn = params("none")["target"] if lm is TARGET else lm.init(jax.random.key(1))
    return jax.tree.map(lambda x: x.astype(dtype), drawn)


def logits(lm, own, mixture=None, embeddings=None, tokens=TOKENS):
    length = tokens.shape[1]
    everyone = None if embeddings is None else jnp.ones((1, length), bool)
    block = Block(tokens, jnp.arange(length)[None], jnp.zeros((1,), jnp.int32), None, embeddings, everyone)
    block = dataclasses.replace(block, mixture=mixture)
    return np.asarray(lm(own, block, None, wants=Wants(logits=True)).logits)


def one_hot(tokens, mixed=True):
    """Each token with weight 1 between two others with weight 0."""
    ids = jnp.stack([tokens + 1, tokens, tokens + 2], axis=2)
    return Mixture(ids, jnp.broadcast_to(jnp.asarray([0.0, 1.0, 0.0]), ids.shape), jnp.full(tokens.shape, mixed))


@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16), ids=("float32", "bfloat16"))
@pytest.mark.parametrize("lm", (TARGET, TABULAR), ids=("llama", "tabular"))
def test_a_weight_of_one_is_the_token(lm, dtype):
    """Bit by bit; so is a slot that is not mixed, whatever its weights, and other ones are not."""
    own = weights(lm, dtype)
    wanted = logits(lm, own)
    np.testing.assert_array_equal(logits(lm, own, one_hot(TOKENS), tokens=TOKENS + 1), wanted)
    np.testing.assert_array_equal(logits(lm, own, one_hot(TOKENS + 1, mixed=False)), wanted)
    assert not np.array_equal(logits(lm, own, one_hot(TOKENS + 1)), wanted)


def halves(tokens):
    """A third of each token, and twice a third of the next one, in two parts."""
    ids = jnp.stack([tokens, tokens + 1, tokens + 1], axis=2)
    return Mixture(ids, jnp.full(ids.shape, 1 / 3), jnp.ones(tokens.shape, bool))


@pytest.mark.parametrize("lm", (TARGET, TABULAR), ids=("llama", "tabular"))
def test_a_mixture_is_the_sum_of_embeddings(lm):
    own = weights(lm)
    mean = (lm.embed(own, TOKENS) + 2 * lm.embed(own, TOKENS + 1)) / 3
    np.testing.assert_allclose(logits(lm, own, halves(TOKENS)), logits(lm, own, embeddings=mean), atol=1e-5, rtol=1e-5)


def test_each_of_a_pair_mixes_its_own_table():
    """An amateur of another width, which could not read the model's vectors."""
    small = LlamaLM(changed(TARGET.config, num_hidden_layers=1, hidden_size=32))
    own, other = weights(TARGET), small.init(jax.random.key(2))
    pair = Contrastive(TARGET, small, beta=1.0, alpha=1e-9)
    got = logits(pair, {"lm": own, "amateur": other}, halves(TOKENS))
    dist = lambda lm, of: np.asarray(jax.nn.log_softmax(logits(lm, of, halves(TOKENS)), axis=-1))
    wanted = 2 * dist(TARGET, own) - dist(small, other)
    near = got > -np.inf
    assert near.mean() > 0.5
    np.testing.assert_allclose(got[near], wanted[near], atol=1e-4)


def test_what_reads_tokens_alone_is_refused():
    """It would pass the mixture over, and write plain decoding's text."""
    for made in (
        lambda: check_mixtures(Table()),
        lambda: soft_thinking(Table()),
        lambda: SuperposedSearch(Table(), Superposed()),
    ):
        with pytest.raises(ValueError, match="Table reads tokens only, .* set `reads_mixtures`"):
            made()
    assert not Contrastive(TARGET, dataclasses.replace(Table(), vocab_size=96)).reads_mixtures
