"""LongSpec: its layer, drafts and loss against numbers of the authors' own code (sail-sg/LongSpec, `LlamaGlideDecoderLayer`),
run with torch over weights from a seed; only its calls of flash attention were replaced by plain products."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from support.conformance import Rows, ended

import specjax
from specjax.draft import LongSpec, ModelDrafter
from specjax.draft.heads.folder import read_head
from specjax.draft.heads.published import drafter_of
from specjax.draft.longspec.network import Seen
from specjax.draft.longspec.objective import TrainLongSpec
from specjax.expand import Chain, TopK
from specjax.lm import Block, Output, Wants
from specjax.models import AttentionConfig, LlamaLM, ModelError, llama_config
from specjax.models.caches import GEAR
from specjax.models.kv import KVDelta, Slots, init_kv, stack_past
from specjax.objectives.base import Batch

V, E, INNER, KV, H = 24, 16, 24, 1, 8
B, T = 2, 530
CONFIG = {
    "architectures": ["LlamaGlideDecoderLayer"], "model_type": "llama", "hidden_size": E, "intermediate_size": INNER,
    "vocab_size": V, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": KV, "head_dim": H,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "rope_theta": 10000.0,
}  # fmt: skip
TARGET = LlamaLM(llama_config(V, E, INNER, 2, 2, KV, H, max_position_embeddings=2048, rms_norm_eps=1e-5))
TRAINED = [0.376584, 5.019184, 4.477978, 5.708075, -1.664242, 6.316267, -2.004685, -9.071143]
BLIND = [0.902957, 1.936131, -4.01014, 2.890335, 0.24041, 1.336005, -1.812709, -0.116399]
ROOT = [1.928881, 3.237178, -0.096322, 1.78654, 1.569812, -0.536845, 0.888867, -1.735104]
FIRST = [-2.251062, -0.8199, 6.430612, 2.18835, 2.04591, -1.754447, -10.167768, -7.927641]
SECOND = [6.056324, -1.022393, -3.598105, 1.507645, 0.354964, 2.473577, -3.701086, 12.961257]
LOSS = 31.490685
SLOPES = {
    "attention.q.kernel": -0.244987, "attention.q.bias": -0.779647, "attention.k.kernel": 6.04674,
    "attention.k.bias": -0.813101, "attention.v.kernel": -2.870234, "attention.v.bias": -5.004895,
    "attention.o.kernel": 16.803772, "cross.q.kernel": -0.3653, "cross.q.bias": 0.039187, "cross.o.kernel": -0.395616,
    "mlp.gate.kernel": 0.298292, "mlp.up.kernel": -16.072212, "mlp.down.kernel": 5.96834, "attention_norm.scale": -1.175466,
    "cross_norm.scale": 1.599727, "mlp_norm.scale": 43.606277,
}  # fmt: skip


def drawn(seed):
    """Numbers for every tensor of a published file."""
    rng, shapes = np.random.default_rng(seed), {}
    for at in ("self_attn", "cross_attn"):
        for name, out in (("q", E), ("k", KV * H), ("v", KV * H)):
            shapes |= {f"{at}.{name}_proj.weight": (out, E), f"{at}.{name}_proj.bias": (out,)}
        shapes[f"{at}.o_proj.weight"] = (E, E)
    shapes |= {f"mlp.{n}_proj.weight": (E, INNER) if n == "down" else (INNER, E) for n in ("gate", "up", "down")}
    norms = ("input_layernorm", "post_self_attention_layernorm", "post_cross_attention_layernorm")
    shapes |= {f"{name}.weight": (E,) for name in norms}
    made = {name: 0.4 * rng.standard_normal(shape) for name, shape in sorted(shapes.items())}
    return {name: (x + ("norm" in name)).astype(np.float32) for name, x in made.items()}


@functools.cache
def text():
    """The target's table and head, its layer's keys and values, and two rows of tokens."""
    rng = np.random.default_rng(7)
    embed, head = rng.standard_normal((V, E)), 0.8 * rng.standard_normal((V, E))
    keys = rng.standard_normal((2, B, T, KV, H))
    return *(x.astype(np.float32) for x in (embed, head, keys)), rng.integers(1, V, (B, T))


def target():
    embed, head, _, _ = text()
    params = {"embed": {"embedding": jnp.asarray(embed)}, "head": {"kernel": jnp.asarray(head.T)}}
    return specjax.models.Model(TARGET, params, None, (), "toy", None, np.dtype("float32"))


def write(folder, tensors, **changes):
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("longspec"), drawn(1))


@pytest.fixture(scope="module")
def loaded(folder):
    found = read_head(folder, "longspec", LongSpec, target())
    return found.drafter, jax.tree.map(jnp.asarray, found.params)


def test_a_published_file_is_recognised_and_read(folder, loaded):
    assert drafter_of(folder) == "longspec"
    drafter, params = loaded
    assert drafter.window == 513 and drafter.layer == 1
    assert set(params["cross"]) == {
        "q",
        "o",
    }  # the authors' class has products of keys and values there, which are never used


def test_files_of_other_sizes_are_refused(tmp_path):
    with pytest.raises(ModelError, match="hidden_size: the head is 32 wide"):
        read_head(write(tmp_path, drawn(1), hidden_size=32), "longspec", LongSpec, target())
    less = {name: x for name, x in drawn(1).items() if name != "cross_attn.o_proj.weight"}
    with pytest.raises(ModelError, match=r"missing cross_attn.o_proj.weight \[16, 16\]"):
        read_head(write(tmp_path, less), "longspec", LongSpec, target())


class Fixed(TrainLongSpec):
    """With the positions and the lag that the numbers were made with."""

    def drawn(self, batch, key):
        at = batch.positions
        return jnp.where(at >= 3, at + 700, at), jnp.full((len(at),), 3)


def batch_of():
    return Batch(jnp.asarray(text()[3], jnp.int32), jnp.ones((B, T), bool))


def learned(params, drafter):
    """The outputs of training, and the mean cross-entropy of the text's tokens under the target's head."""
    key, value = text()[2]
    own, batch = {"target": target().params, "draft": params}, batch_of()
    objective = Fixed(drafter)
    positions, lag = objective.drawn(batch, None)
    # the first layer's keys are wrong, so that a reader of the wrong layer is found
    delta = KVDelta((0 * jnp.asarray(key), jnp.asarray(key)), (jnp.asarray(value),) * 2, positions)
    h = objective.outputs(own, batch, Output(delta), positions, lag)
    logits = jax.nn.log_softmax(drafter.logits(own, h[:, :-1]))
    return -jnp.take_along_axis(logits, batch.tokens[:, 1:, None], axis=2).mean(), h


@pytest.mark.slow
def test_outputs_of_training_are_the_originals(loaded):
    """The last token of 530 sees neither all of its own layer's keys nor the last two of the target's."""
    drafter, params = loaded
    loss, h = jax.jit(learned, static_argnums=1)(params, drafter)
    np.testing.assert_allclose(h[1, -1, :8], TRAINED, atol=2e-5)
    np.testing.assert_allclose(h[0, 1, :8], BLIND, atol=2e-5)
    assert float(loss) == pytest.approx(LOSS, rel=1e-5)
    wide = dataclasses.replace(drafter, config=drafter.config.every(AttentionConfig, window=514))
    assert np.abs(learned(params, wide)[1][1, -1, :8] - np.asarray(TRAINED)).max() > 1e-3


@pytest.mark.slow
def test_the_gradient_is_the_originals(loaded):
    """How fast the loss changes as each tensor moves along numbers that are drawn for it."""
    drafter, params = loaded
    along = params_of(drawn(2))
    grads = jax.jit(jax.grad(lambda p: learned(p, drafter)[0]))(params)
    flat = lambda tree: {".".join(k.key for k in path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}
    slopes = {name: float((g * flat(along)[name]).sum()) for name, g in flat(grads).items()}
    assert slopes == pytest.approx(SLOPES, rel=1e-4, abs=1e-4)


def params_of(tensors):
    """Our parameters."""
    norms = {
        "attention": "input_layernorm",
        "cross": "post_self_attention_layernorm",
        "mlp": "post_cross_attention_layernorm",
    }
    made = {f"{ours}_norm": {"scale": jnp.asarray(tensors[f"{theirs}.weight"])} for ours, theirs in norms.items()}
    for at, own, names in (("self_attn", "attention", "qkvo"), ("cross_attn", "cross", "qo")):
        made[own] = {n: {"kernel": jnp.asarray(tensors[f"{at}.{n}_proj.weight"].T)} for n in names}
        for n in set(names) - {"o"}:
            made[own][n]["bias"] = jnp.asarray(tensors[f"{at}.{n}_proj.bias"])
    made["mlp"] = {n: {"kernel": jnp.asarray(tensors[f"mlp.{n}_proj.weight"].T)} for n in ("gate", "up", "down")}
    return made


@pytest.mark.slow
def test_drafts_are_the_originals(loaded):
    """The root after a prompt of 40 tokens, three nodes below it, and two below those: authors' flash over the prefix, merged
    with a dense tree by log-sum-exp, is one attention here."""
    drafter, params = loaded
    embed, _, (key, value), tokens = (jnp.asarray(x) for x in text())
    at = lambda first, count: jnp.broadcast_to(jnp.arange(first, first + count)[None], (B, count))
    length, none = jnp.full((B,), 40), jnp.zeros((B,), jnp.int32)
    past = drafter.head.keys(params, embed[tokens[:, :40]], at(0, 40))
    by_slots = lambda x: jnp.pad(
        x[:, :40].transpose(0, 2, 1, 3), ((0, 0), (0, 0), (0, 8), (0, 0)), constant_values=99.0
    )
    seen = Seen(length, Slots(by_slots(key), by_slots(value)))
    run = lambda ids, where, past, mask: drafter.head(
        params, embed[ids], Block(ids, where, none, mask), None, seen, past
    )

    def sees(*rows):
        mask = np.asarray([[1] * 40 + row for row in rows], bool)
        return jnp.broadcast_to(jnp.asarray(mask)[None], (B, *mask.shape))

    root, own = run(tokens[:, 40:41], at(40, 1), past, sees([1]))
    past = stack_past(past, own)
    ids = jnp.asarray([[5, 6, 7], [8, 9, 10]])
    first, own = run(ids, jnp.full((B, 3), 41), past, sees([1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]))
    past = stack_past(past, own)
    ids = jnp.asarray([[11, 12], [13, 14]])
    second, _ = run(ids, jnp.full((B, 2), 42), past, sees([1, 0, 1, 0, 1, 0], [1, 1, 0, 0, 0, 1]))
    np.testing.assert_allclose(root[1, 0, :8], ROOT, atol=2e-5)
    np.testing.assert_allclose(first[1, 2, :8], FIRST, atol=2e-5)
    np.testing.assert_allclose(second[1, 0, :8], SECOND, atol=2e-5)


SMALL = LlamaLM(llama_config(32, 16, 24, 2, 4, 2, 8, max_position_embeddings=256))


@functools.cache
def both(window=9, chain=False):
    drafter = LongSpec(Chain(3) if chain else TopK(2, 2, 5), window).bind(SMALL)
    own = SMALL.init(jax.random.key(0))
    return drafter, {"target": own, "draft": drafter.init_params(jax.random.key(1), own)}


PROMPTS = tuple(tuple(1 + (7 * i + j) % 30 for i in range(count)) for j, count in enumerate((150, 90, 3)))


@pytest.mark.slow
def test_the_ring_drafts_what_the_whole_text_does():
    """Texts that go round a window of 9 several times; prompts come in chunks of more tokens than the ring has room for."""
    drafter, params = both(9, chain=True)
    rows, found = Rows(PROMPTS, ("a", "b", "c"), ({},) * 3, 40), []
    for one in (drafter, Unringed(**{name: getattr(drafter, name) for name in vars(drafter)})):
        decoder = specjax.speculative(SMALL, one)
        _, state = ended(decoder, params, rows, capacity=200, width=160)
        found.append((np.asarray(state.stats.accepted), np.asarray(state.stats.steps)))
        assert state.draft.cache.key[0].shape[2] == (9 + 64 if one is drafter else 200)
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_array_equal(found[0][1], found[1][1])
    assert found[0][0][1:].sum() > 0


@dataclasses.dataclass(frozen=True)
class Unringed(LongSpec):
    """The same layer with a cache that keeps every token."""

    def init(self, params, batch, capacity):
        made = super().init(params, batch, capacity)
        return dataclasses.replace(made, cache=init_kv(self.config, batch, capacity, jnp.float32))


def test_its_memory_does_not_grow():
    """From 1k to 16k tokens, while that of a draft model of one layer does."""
    drafter, params = both(513)
    model = ModelDrafter(LlamaLM(llama_config(32, 16, 24, 1, 4, 2, 8)))
    size = lambda one, own, capacity: sum(
        x.size for x in jax.tree.leaves(jax.eval_shape(lambda: one.init(own, 1, capacity)))
    )
    own = {"draft": jax.eval_shape(model.lm.init, jax.random.key(0))}
    assert size(drafter, params, 1024) == size(drafter, params, 16384) == 2 * 2 * 8 * (513 + 64) + 1
    assert size(model, own, 16384) > 15 * size(model, own, 1024)


@pytest.mark.slow
def test_the_loss_is_of_the_texts_tokens():
    drafter, params = both()
    batch = Batch(jnp.asarray(np.arange(24).reshape(2, 12) % 30 + 1, jnp.int32), jnp.ones((2, 12), bool))
    objective = TrainLongSpec(drafter, reach=0, lag=1)
    loss, metrics = objective.loss(params["draft"], params["target"], batch, jax.random.key(2))
    output = SMALL(params["target"], batch.block(), None, wants=Wants(final=True))
    h = objective.outputs(params, batch, output, batch.positions, jnp.ones((2,), jnp.int32))
    logits = jax.nn.log_softmax(drafter.logits(params, h[:, :-1]))
    wanted = -jnp.take_along_axis(logits, batch.tokens[:, 1:, None], axis=2).mean()
    assert float(loss) == pytest.approx(float(wanted), rel=1e-5)
    assert metrics["weight"] == 22 and 0 < metrics["acceptance"] < 1


def test_rows_are_moved_by_one_number_each():
    """Their first tokens are not, and long rows neither; 1,000 positions of the target stay free."""
    far = LlamaLM(llama_config(32, 16, 24, 1, 4, 2, 8, max_position_embeddings=5000))
    objective = TrainLongSpec(LongSpec().bind(far))
    batch = Batch(jnp.ones((64, 40), jnp.int32), jnp.ones((64, 40), bool))
    positions, lag = (np.asarray(x) for x in objective.drawn(batch, jax.random.key(0)))
    moved = positions - np.arange(40)
    for row in moved:
        assert set(row) == {0, row[-1]} or set(row) == {row[-1]}
    assert {(row == 0).sum() for row in moved if row[-1]} == {0, 1, 2, 3, 4}
    assert 0 <= moved.min() and 3000 < positions.max() < 4000 and set(lag) == {1, 2, 3, 4}
    assert (
        np.asarray(TrainLongSpec(objective.drafter, short=39).drawn(batch, jax.random.key(0))[0]) == np.arange(40)
    ).all()


def test_what_it_cannot_serve():
    """One line each."""
    windows = LlamaLM(SMALL.config.every(AttentionConfig, window=8))
    with pytest.raises(ValueError, match="plain attention to the whole text and keys of its own, and it has none"):
        LongSpec().bind(windows)
    with pytest.raises(ValueError, match=r"layer=5 is none, choose one of \[0, 1\]"):
        LongSpec(layer=5).bind(SMALL)
    with pytest.raises(ValueError, match="window has at least 2 tokens, got window=1"):
        LongSpec(window=1).bind(SMALL)
    with pytest.raises(ValueError, match="the cache GEAR forgets: leave one out"):
        LongSpec().bind(dataclasses.replace(SMALL, ahead=32, old=GEAR()))
    with pytest.raises(ValueError, match="3 query heads of width 8 do not go with the 2 of width 8"):
        LongSpec(config=llama_config(32, 16, 24, 1, 3, 3, 8)).bind(SMALL)
    with pytest.raises(ValueError, match="the layer is 24 wide, and the target's embeddings are 16 wide"):
        LongSpec(config=llama_config(32, 24, 24, 1, 4, 2, 8)).bind(SMALL)
    drafter, _ = both()
    with pytest.raises(ValueError, match="lag is at least 1, got 0"):
        TrainLongSpec(drafter, lag=0)
    with pytest.raises(ValueError, match="reach must not be negative, got -1"):
        TrainLongSpec(drafter, reach=-1)


def test_the_layer_that_is_read_sees_the_whole_text():
    """The last of such a target; it may be one without positions, and then queries have none."""
    mixed = SMALL.config.each(
        lambda i, layer: dataclasses.replace(
            layer, mixer=dataclasses.replace(layer.mixer, **({"rope": None} if i == 0 else {"window": 8}))
        )
    )
    drafter = LongSpec().bind(LlamaLM(mixed))
    assert drafter.layer == 0 and drafter.head.cross.rope is None and drafter.config.attention().rope is not None
