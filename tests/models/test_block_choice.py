"""Experts that a block of tokens chooses: the numbers of a case by hand, ragged rows, parts of a pass, meshes, refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.small_experts import blocks, ours

import specjax
from specjax import models
from specjax.decode import Diffusion
from specjax.lm import Block, Wants
from specjax.models import LlamaLM, Masked
from specjax.models.block_choice import leaders
from specjax.models.experts import ExpertsConfig, route
from specjax.models.routing import routed
from specjax.plan.experts import Chosen, touched
from specjax.serve.sampling import Sampling
from specjax.sharding import make_mesh, shardings

SIZE, MASK = 4, 47
CONFIG = {
    "architectures": ["LLaDA2MoeModelLM"], "model_type": "llada2_moe", "vocab_size": 48, "hidden_size": 32,
    "intermediate_size": 40, "moe_intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 0,
    "expert_capacity": 3, "first_k_dense_replace": 0, "max_position_embeddings": 64, "rope_theta": 600.0,
    "mask_token_id": MASK, "block_size": SIZE, "score_function": "sigmoid", "norm_topk_prob": True,
    "moe_router_enable_expert_bias": True, "num_nextn_predict_layers": 0, "use_bias": False,
}  # fmt: skip
LOGITS = np.array([[2, 1, 0, -1], [-1, 0.5, 1.5, 0]], np.float32)
BIAS = np.array([0, 0.1, -0.2, 0.3], np.float32)
IDS = np.random.default_rng(0).integers(0, MASK, (2, 12))


@pytest.fixture(scope="module")
def model():
    """A model whose router decides: its kernels are wide, and its biases are not 0."""
    config, masked = models.masked.from_hf(CONFIG)
    lm, keys = LlamaLM(config), iter(jax.random.split(jax.random.key(1), 200))
    params = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(next(keys), x.shape), lm.init(jax.random.key(0)))
    return models.Model(lm, params, masked=masked)


def whole(slots, at=None, ids=None, visible=None, **fields):
    at = np.arange(slots)[None] if at is None else np.asarray(at)
    ids = np.ones(at.shape, np.int32) if ids is None else np.asarray(ids)
    return Block(jnp.asarray(ids), jnp.asarray(at), jnp.zeros(len(at), jnp.int32), visible, causal=False, **fields)


@pytest.mark.parametrize(
    ("capacity", "experts", "weights"),
    (
        (2, [[0, 1], [1, 0]], [[1.3661, 1.1339], [1.7457, 0.7543]]),
        (3, [[0, 1], [3, 1]], [[1.3661, 1.1339], [1.1136, 1.3864]]),
    ),
)
def test_two_tokens_by_hand(capacity, experts, weights):
    config = ExpertsConfig(4, 2, 8, "sigmoid", routed_scaling_factor=2.5, capacity=capacity, block_size=2)
    got, chosen = route(jnp.asarray(LOGITS), jnp.asarray(BIAS), config, whole(2))
    assert chosen.tolist() == experts
    np.testing.assert_allclose(got, weights, atol=1e-4)


def test_all_experts_as_capacity_are_a_plain_choice():
    config = ExpertsConfig(4, 2, 8, "sigmoid", capacity=4, block_size=2)
    plain = dataclasses.replace(config, capacity=0)
    both = [route(jnp.asarray(LOGITS), jnp.asarray(BIAS), c, whole(2)) for c in (config, plain)]
    jax.tree.map(np.testing.assert_array_equal, *both)


def test_who_chooses_together():
    """By positions, whatever the row's first one; padding with nobody; versions of a block apart."""
    at = [[2, 3, 4, 5, 6], [0, 1, 2, 3, 4]]
    assert leaders(whole(0, at), 4).tolist() == [[0, 0, 2, 2, 2], [0, 0, 0, 0, 4]]
    padded = leaders(whole(0, at, [[-1, 1, 1, 1, 1], [1, -1, 1, 1, 1]]), 4)
    assert padded.tolist() == [[1, 1, 2, 2, 2], [0, 0, 0, 0, 4]]
    versions = np.repeat(np.repeat(np.eye(2, dtype=bool), 2, 0), 2, 1)[None]
    assert leaders(whole(0, [[4, 5, 4, 5]], visible=jnp.asarray(versions)), 4).tolist() == [[0, 0, 2, 2]]


def test_padding_never_joins_a_block(model):
    """A row whose length is no multiple, beside one that makes up the difference, has the logits that it has alone."""
    padded = np.full((2, 8), -1)
    padded[0, :5], padded[1, :3] = IDS[0, :5], IDS[1, :3]
    seen = blocks(8, SIZE)[None] & (padded >= 0)[:, None] | np.eye(8, dtype=bool)[None]
    together = ours(model, padded, seen)
    np.testing.assert_allclose(together[0, :5], ours(model, IDS[:1, :5], blocks(5, SIZE))[0], atol=1e-5)
    np.testing.assert_allclose(together[1, :3], ours(model, IDS[1:, :3], blocks(3, SIZE))[0], atol=1e-5)


def test_a_pass_over_one_block_is_that_of_the_text(model):
    """After the cache of two blocks, the third chooses what it chooses in a pass over all."""
    lm, params = model.lm, model.params
    at = jnp.broadcast_to(jnp.arange(12)[None], IDS.shape)
    want = ours(model, IDS, blocks(12, SIZE))
    assert want.std() > 0.5
    seen = jnp.broadcast_to(jnp.asarray(blocks(8, SIZE))[None], (2, 8, 8))

    @jax.jit
    def read(params, ids):
        first = Block(ids[:, :8], at[:, :8], jnp.zeros(2, jnp.int32), seen, causal=False)
        cache = lm.init_cache(2, 12)
        cache = lm.commit(cache, lm(params, first, cache, wants=Wants()).delta, None, at[:, :8])
        last = Block(ids[:, 8:], at[:, 8:], jnp.full(2, 8), causal=False)
        return lm(params, last, cache, wants=Wants(logits=True)).logits

    np.testing.assert_allclose(read(params, jnp.asarray(IDS)), want[:, 8:], atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("decode", ["threshold:threshold=0.1", "free_dave:steps=3,drafts=2"])
def test_rows_of_a_batch_are_their_own(model, decode):
    prompts = [IDS[0, :5].tolist(), IDS[1, :3].tolist(), IDS[1, :12].tolist()]
    sampling = Sampling(ignore_eos=True)
    say = lambda given: [
        r.tokens for r in specjax.generate(model, given, max_new_tokens=9, sampling=sampling, decode=decode)
    ]
    together = say(prompts)
    assert together == [say([prompt])[0] for prompt in prompts] and len(together[0]) == 9


def test_a_mesh_changes_nothing(model):
    want = ours(model, IDS, blocks(12, SIZE))
    mesh = make_mesh("data=2,model=2", jax.devices()[:4])
    places = shardings(mesh, model.lm.axes(model.params), model.params, model.lm.axis_counts())
    assert places["layers"][0]["mlp"]["experts"]["up"]["kernel"].spec[0] == "model"  # whole experts
    placed = jax.device_put(model.params, places)
    with jax.sharding.set_mesh(mesh):
        got = ours(models.Model(model.lm, placed, masked=model.masked), IDS, blocks(12, SIZE))
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_a_later_rank_is_one_of_the_blocks(model):
    other = routed(model.lm, 2, 2, "this test")
    assert other.config.experts.first_rank == 2
    with pytest.raises(ValueError, match="asks for expert 4 of a token, and this model's choose from 3"):
        routed(model.lm, 3, 2, "this test")


def test_a_plan_counts_what_blocks_choose():
    """A block of a row reads its 48 experts at most; two blocks of it, or of two rows, fewer than twice as many."""
    own = Chosen(count=256, each=8, layers=1, bytes=256, rows=1, nodes=32, capacity=48, block_size=32)
    assert 47 < own.touched(32) < 48 < own.touched(64) < 96 and own.touched(1) == pytest.approx(8)
    assert dataclasses.replace(own, rows=2).touched(32) == own.touched(64)
    assert touched(256, 8, 32) > 160  # tokens that choose by themselves


@pytest.mark.parametrize(
    ("options", "said"),
    (
        ({"block_length": 6}, "in blocks of 4, which a pass holds whole: decode it in blocks of 4 or a multiple"),
        ({"align": "prompt_end"}, "counted from the beginning of the text"),
    ),
)
def test_parts_of_blocks_are_refused(model, options, said):
    with pytest.raises(ValueError, match=said):
        Diffusion(**options).bind(model)


def test_other_ways_to_read_are_refused(model):
    canvas = dataclasses.replace(model, masked=Masked(MASK, shift=False))
    with pytest.raises(ValueError, match="which a pass holds whole"):
        Diffusion().bind(canvas)
    with pytest.raises(ValueError, match="this way of reading goes from left to right"):
        ours(model, IDS, causal=True)
    config = ExpertsConfig(4, 2, 8, "sigmoid", capacity=2, block_size=2)
    with pytest.raises(ValueError, match="it is not said where they are"):
        route(jnp.asarray(LOGITS), jnp.asarray(BIAS), config)
