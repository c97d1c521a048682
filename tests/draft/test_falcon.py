"""Falcon: its network, training and trees against numbers of the authors' code (`support/eagles.py` says how they were made).

Their LSTM was given one row at a time, as in their drafting, and the first of what it returns. Where it carries, torch's own
ran over every block. Training's second pass read the pairs that are named here, at a temperature of 1, and the drawn token of
its hard loss was replaced by its expectation.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.eagles import CONFIG, TARGET, T, drawn, loss_and_slopes, params_of, target, text
from support.published import write

from specjax.draft import Chunk, Falcon, View
from specjax.draft.falcon import objective as training
from specjax.draft.falcon.objective import TrainFalcon, glanced, relaxed
from specjax.draft.heads.folder import read_head
from specjax.draft.heads.published import drafter_of
from specjax.expand import Static
from specjax.lm import Block, Output
from specjax.models import ModelError
from specjax.objectives.base import Batch
from specjax.sampling import Sampler, SamplingArrays

KINDS = {"falcon": False, "falcon_carries": True}
H = {
    "falcon": [
        -0.260991,
        0.920443,
        1.239841,
        0.188057,
        -1.051146,
        0.68064,
        -0.882374,
        0.365215,
        -0.179939,
        0.262832,
        0.285656,
        0.06268,
        -0.104328,
        -0.368608,
        -0.092433,
        -0.212061,
    ],
    "falcon_carries": [
        -0.307464,
        2.139811,
        2.007013,
        0.196808,
        -1.929916,
        1.475067,
        -1.90538,
        1.302432,
        -0.197251,
        0.290333,
        0.263089,
        0.082821,
        -0.13802,
        -0.426189,
        -0.08118,
        -0.208946,
    ],
}
TRAINED = {
    ("falcon", False): (
        0.75146,
        {
            "layers.0.mlp.down_proj.weight": -0.073516,
            "layers.0.mlp.gate_proj.weight": -0.045433,
            "layers.0.mlp.up_proj.weight": 0.245386,
            "layers.0.post_attention_layernorm.weight": 1.028033,
            "layers.0.self_attn.k_proj.weight": -5.4e-05,
            "layers.0.self_attn.o_proj.weight": -0.039009,
            "layers.0.self_attn.q_proj.weight": 8.9e-05,
            "layers.0.self_attn.v_proj.weight": 0.383804,
            "lstm.weight_ih_l0": 0.048794,
            "lstm.weight_ih_l1": -0.126136,
            "lstm.bias_l0": -0.068563,
            "lstm.bias_l1": 0.312039,
        },
    ),
    ("falcon_carries", False): (
        0.874874,
        {
            "layers.0.mlp.down_proj.weight": -0.120254,
            "layers.0.mlp.gate_proj.weight": -0.108103,
            "layers.0.mlp.up_proj.weight": 0.338656,
            "layers.0.post_attention_layernorm.weight": 1.618404,
            "layers.0.self_attn.k_proj.weight": -0.000225,
            "layers.0.self_attn.o_proj.weight": 0.117223,
            "layers.0.self_attn.q_proj.weight": 0.000431,
            "layers.0.self_attn.v_proj.weight": 0.792634,
            "lstm.weight_hh_l0": 0.00797,
            "lstm.weight_hh_l1": -0.012927,
            "lstm.weight_ih_l0": 0.095961,
            "lstm.weight_ih_l1": -0.171914,
            "lstm.bias_l0": -0.037629,
            "lstm.bias_l1": 0.707811,
        },
    ),
    ("falcon", True): (
        0.673256,
        {
            "layers.0.mlp.down_proj.weight": -0.039324,
            "layers.0.mlp.gate_proj.weight": 0.001252,
            "layers.0.mlp.up_proj.weight": 0.169143,
            "layers.0.post_attention_layernorm.weight": 0.699951,
            "layers.0.self_attn.k_proj.weight": -0.000192,
            "layers.0.self_attn.o_proj.weight": 0.089462,
            "layers.0.self_attn.q_proj.weight": 0.000147,
            "layers.0.self_attn.v_proj.weight": 0.245317,
            "lstm.weight_ih_l0": 0.04015,
            "lstm.weight_ih_l1": -0.041927,
            "lstm.bias_l0": -0.067014,
            "lstm.bias_l1": 0.041463,
        },
    ),
    ("falcon_carries", True): (
        0.796757,
        {
            "layers.0.mlp.down_proj.weight": -0.075378,
            "layers.0.mlp.gate_proj.weight": -0.036227,
            "layers.0.mlp.up_proj.weight": 0.27176,
            "layers.0.post_attention_layernorm.weight": 1.158915,
            "layers.0.self_attn.k_proj.weight": 1e-06,
            "layers.0.self_attn.o_proj.weight": 0.265268,
            "layers.0.self_attn.q_proj.weight": 5.5e-05,
            "layers.0.self_attn.v_proj.weight": 0.370149,
            "lstm.weight_hh_l0": 0.012656,
            "lstm.weight_hh_l1": 0.0149,
            "lstm.weight_ih_l0": 0.074743,
            "lstm.weight_ih_l1": -0.063338,
            "lstm.bias_l0": -0.068368,
            "lstm.bias_l1": -0.051021,
        },
    ),
}
GLANCED = [[4], [2, 6]]
TREE = (
    (0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0, 0, 0), (0, 0, 0, 1),
    (0, 1, 0, 0), (1, 0, 0, 0), (0, 0, 0, 0, 0), (0, 0, 0, 0, 1), (0, 0, 0, 0, 0, 0),
)  # fmt: skip
DRAFTED = [10, 1, 14, 10, 1, 14, 1, 1, 14, 1, 14, 14, 1, 14, 1, 1, 1, 14, 1]


def made(kind, scale=0.4, **fields):
    """A drafter, and all parameters."""
    drafter = Falcon(carries=KINDS[kind], **fields).bind(TARGET)
    return drafter, {"target": target().params, "draft": params_of(kind, drawn(kind, 1, scale))}


def pairs(tokens):
    """The block of a row's pairs, in blocks from its beginning."""
    return relaxed(Batch(jnp.asarray(tokens, jnp.int32), jnp.ones(tokens.shape, bool)), 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_the_originals(kind):
    drafter, params = made(kind)
    said = text()
    h, _ = jax.jit(drafter.read)(params, jnp.asarray(said["final"][:, :-1]), pairs(said["tokens"]), None)
    np.testing.assert_allclose(h[1, -2:].reshape(-1), H[kind], atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradient_are_the_originals(kind, replaced, monkeypatch):
    """The second pass reads the pairs that the originals did."""
    seen = np.zeros((2, T - 1), bool)
    for row, places in enumerate(GLANCED):
        seen[row, places] = replaced
    monkeypatch.setattr(training, "glanced", lambda *_: jnp.asarray(seen))
    loss, _, slopes = loss_and_slopes(kind, TrainFalcon(Falcon(carries=KINDS[kind]).bind(TARGET), noise=0.0))
    wanted, along = TRAINED[kind, replaced]
    assert loss == pytest.approx(wanted, rel=1e-5)
    slopes = {name.replace("bias_ih", "bias"): x for name, x in slopes.items() if "bias_hh" not in name}
    assert slopes == pytest.approx(along, rel=1e-5, abs=1e-5 * max(map(abs, along.values())))


def state_of(drafter, params, count, chunks):
    """The state after the first `count` pairs of row 0, read in pieces."""
    said, draft = text(), drafter.init(params, 1, 32)
    for begin, end in zip((0, *chunks), (*chunks, count), strict=True):
        take = lambda x, begin=begin, end=end: jnp.asarray(x[:1, begin:end])
        block = Block(take(said["tokens"]), jnp.arange(begin, end)[None], draft.length)
        chunk = Chunk(block, jnp.ones((1, end - begin), bool), take(said["tokens"][:, 1:]))
        draft = jax.jit(drafter.prefill)(params, draft, chunk, Output(None, final=take(said["final"])))
    return draft


@pytest.mark.slow
def test_a_tree_is_the_originals():
    """Three passes below a text of whole blocks.

    Every block of the tree has nodes below all of its levels: in other trees the authors' code takes other blocks' tokens.
    """
    drafter, params = made("falcon", 1.2, expander=Static(TREE, coupled=False))
    draft = state_of(drafter, params, 8, (3,))
    said = text()["tokens"][:1]
    view = View(jnp.asarray(said, jnp.int32), jnp.asarray([9]), jnp.ones((1,), bool), None, 6)
    greedy = SamplingArrays.make(1, temperature=0.0)
    key = jax.random.key(0)[None]
    sampler = Sampler(key, view.tokens, view.length, view.live, greedy)
    tree = jax.jit(lambda draft: drafter.propose(params, draft, view, sampler).tree)(draft)
    assert tree.tokens[0].tolist() == DRAFTED


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_a_texts_last_block_ends_with_its_last_pair(count):
    """However the pairs came: as one pass over all of them, in blocks that are counted back from the last one.

    Without carrying, a pair's keys and values do not depend on its block.
    """
    drafter, params = made("falcon")
    said = text()
    odd = count % 2
    at = jnp.arange(count)
    blocks = (at + odd) // 2
    block = Block(
        jnp.asarray(said["tokens"][:1, 1 : count + 1], jnp.int32), at[None], jnp.zeros((1,), jnp.int32),
        (blocks[None] <= blocks[:, None])[None],
    )  # fmt: skip
    h, _ = drafter.read(params, jnp.asarray(said["final"][:1, :count]), block, None)
    for chunks in ((), (1,), (count - 1,)):
        if all(0 < cut < count for cut in chunks):
            draft = state_of(drafter, params, count, chunks)
            assert int(draft.length[0]) == count
            np.testing.assert_allclose(draft.outputs[0, -min(2, count) :], h[0, -2:], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_pair_sees_its_block_and_what_is_before(kind):
    drafter, params = made(kind)
    said = text()
    read = jax.jit(lambda tokens, final: drafter.read(params, final[:, :-1], pairs(tokens), None)[0])
    before = read(said["tokens"], said["final"])
    for changed in range(T - 1):
        tokens = said["tokens"].copy()
        tokens[:, changed + 1] = 1 + tokens[:, changed + 1] % 23
        moved = np.abs(read(tokens, said["final"]) - before).max(axis=(0, 2)) > 1e-6
        assert moved.tolist() == [pair >= changed - changed % 2 for pair in range(T - 1)]


def test_glanced_pairs():
    """They begin random blocks, as many as wanted, and end before a block does; a row depends on its own key alone."""
    due = jnp.asarray([[False] * 4 + [True] * 17 + [False] * 3, [True] * 24])
    places, keys = jnp.broadcast_to(jnp.arange(24) % 3, (2, 24)), jax.random.split(jax.random.key(0))
    count = jnp.asarray([2, 30])
    found = np.asarray(glanced(due, places, count, 3, keys)).reshape(2, 8, 3)
    assert (found.any(axis=2).sum(axis=1) == [2, 8]).all() and not found[:, :, 2].any()
    assert not (found[:, :, 1] & ~found[:, :, 0]).any() and found[1, :, 1].any() and not found[1, :, 1].all()
    assert not found[0, :2].any() and not found[0, 7].any()
    alone = glanced(due[1:], places[1:], count[1:], 3, keys[1:])
    np.testing.assert_array_equal(np.asarray(alone).reshape(1, 8, 3), found[1:])


@pytest.mark.slow
def test_published_files_are_read(tmp_path):
    tensors, config = drawn("falcon", 1), CONFIG | {"k_mask": 3}
    own = tensors | {"embed_tokens.weight": np.asarray(target().params["embed"]["embedding"])}
    folder = write(tmp_path, config, own)
    assert drafter_of(folder) == "falcon"
    head = read_head(folder, "falcon", Falcon, target())
    assert (head.drafter.block, head.drafter.carries) == (3, False)
    jax.tree.map(np.testing.assert_array_equal, head.params, params_of("falcon", tensors))
    for changed, message in (
        (CONFIG, "k_mask, the tokens of a block, must be a whole number of at least 2, not None"),
        (config | {"frob": 1}, "unknown flag 'frob'"),
    ):
        write(tmp_path, changed, own)
        with pytest.raises(ModelError, match=message):
            read_head(folder, "falcon", Falcon, target())
    write(tmp_path, config, {name: x for name, x in own.items() if name != "lstm.weight_hh_l1"})
    with pytest.raises(ModelError, match="missing lstm.weight_hh_l1"):
        read_head(folder, "falcon", Falcon, target())


def test_fields_out_of_range():
    with pytest.raises(ValueError, match="falcon: a block has at least 2 tokens, got block=1"):
        Falcon(block=1)
    with pytest.raises(ValueError, match="falcon: glance must not be negative, got -1.0"):
        TrainFalcon(Falcon(), glance=-1.0)
    assert dataclasses.replace(TrainFalcon(Falcon()), glance=0.5).held_out(None)[0].glance == 0
