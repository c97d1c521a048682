"""The Llama family gives the logits of transformers, in one pass, in chunks through a cache, and over trees."""

import copy
import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny_families
from support.conformance import but_slow
from support.tiny_families import OLDER

from specjax import models
from specjax.lm import Block, Partial, Wants
from specjax.models.kv_heads import merged

STORIES = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "stories260K"
TOLERANCE = 1e-4
LOGITS = Wants(logits=True)
LENGTHS = np.array([23, 1, 14])  # beyond every sliding window, and one row of nothing but its root


@functools.cache
def load(folder):
    return models.load(folder, dtype="float32")


@functools.partial(jax.jit, static_argnames=("lm", "wants"))
def forward(lm, params, block, cache=None, past=None, wants=LOGITS):
    return lm(params, block, cache, wants=wants, past=past)


commit = jax.jit(lambda lm, *arguments: lm.commit(*arguments), static_argnums=0)


def ragged(lengths, seed=0):
    """Right-padded random ids `[B, T]`, -1 where padded."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 128, (len(lengths), lengths.max()))
    return np.where(np.arange(ids.shape[1]) < lengths[:, None], ids, -1)


def plain(ids, start=0):
    """A causal block `[B, T]` at `start` after `start` committed tokens."""
    ids = jnp.asarray(ids, jnp.int32)
    positions = jnp.broadcast_to(start + jnp.arange(ids.shape[1])[None], ids.shape)
    return Block(ids, positions, jnp.full(ids.shape[0], start, jnp.int32))


@pytest.mark.parametrize("name", but_slow(tiny_families.FAMILIES, *tiny_families.ALIKE))
def test_logits_of_ragged_rows(references, name):
    reference = references(name)
    model, ids = load(reference.folder), ragged(LENGTHS)
    got = np.asarray(forward(model.lm, model.params, plain(ids)).logits)
    assert got.dtype == np.float32
    for row, length in enumerate(LENGTHS):
        want = reference.logits(ids[row : row + 1, :length])[0]
        assert want.std() > 0.3
        np.testing.assert_allclose(got[row, :length], want, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "seed"), [(name, seed) for name in tiny_families.FAMILIES for seed in range(1 + 2 * (name in OLDER))]
)
def test_odd_sizes_and_switches(oddly, name, seed, tmp_path):
    """Head widths that are not width over heads, biases, tied tables, windows and several ends, drawn by seed."""
    reference, ids = oddly(name, seed), ragged(LENGTHS, seed=4)
    model = models.load(reference.folder, dtype="float32")
    got = np.asarray(forward(model.lm, model.params, plain(ids)).logits)
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(got[row, :length], reference.logits(ids[row : row + 1, :length])[0], atol=TOLERANCE)
    ends = reference.torch.config.eos_token_id
    assert model.eos_ids == tuple(ends if isinstance(ends, list) else [ends])
    models.save(tmp_path / "ours", model.lm, model.params, eos_ids=model.eos_ids)
    again = models.load(tmp_path / "ours", dtype="float32")
    assert (again.lm, again.eos_ids, again.lm.config.family) == (model.lm, model.eos_ids, model.lm.config.family)
    assert all(map(np.array_equal, jax.tree.leaves(again.params), jax.tree.leaves(model.params)))
    opened = dataclasses.replace(reference, torch=type(reference.torch).from_pretrained(tmp_path / "ours").eval())
    np.testing.assert_allclose(opened.logits(ids[:1]), reference.logits(ids[:1]), atol=2e-5)


def test_sixteen_bits_round_parameters_alone(references):
    rounds_parameters_alone(references("llama3"))


@pytest.mark.slow
def test_sixteen_bits_round_parameters_alone_in_every_family(reference):
    rounds_parameters_alone(reference)


def rounds_parameters_alone(reference):
    """What is computed with them is float32 from the embeddings on: logits are those of transformers for rounded parameters."""
    ids = ragged(LENGTHS)[:1]
    rounded = copy.deepcopy(reference.torch)
    for name, stored in rounded.state_dict().items():
        wide = ("e_score_correction_bias", "router.bias", "A_log", "dt_bias", ".D")
        if not name.endswith(wide):  # float32 in a model of 16 bits too
            stored.copy_(stored.bfloat16().float())
    model = models.load(reference.folder, dtype="bfloat16")
    got = forward(model.lm, model.params, plain(ids)).logits
    np.testing.assert_allclose(got, dataclasses.replace(reference, torch=rounded).logits(ids), atol=3 * TOLERANCE)


WHOLE = {
    "mistral3": "MistralForCausalLM", "llama4": "Llama4ForCausalLM", "qwen2_5_vl": "Qwen2ForCausalLM",
    "qwen3_vl": "Qwen3ForCausalLM", "qwen3_5": "Qwen3_5ForCausalLM",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_the_text_of_a_model_that_reads_images(references, tmp_path, name):
    """Its other tensors are left out, and `save` writes the text alone, as its family."""
    import torch
    import transformers

    reference, ids = references(name), ragged(LENGTHS)[:1]
    if name == "llama4":  # whose whole fails without an image in transformers 5.24
        reference = dataclasses.replace(reference, torch=reference.torch.language_model)
    model, want = load(reference.folder), reference.logits(ids)
    assert want.std() > 0.3
    np.testing.assert_allclose(forward(model.lm, model.params, plain(ids)).logits, want, atol=TOLERANCE)
    models.save(tmp_path / "text", model.lm, model.params)
    text = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text", dtype="float32").eval()
    assert type(text).__name__ == WHOLE[name]
    with torch.no_grad():
        np.testing.assert_allclose(text(torch.as_tensor(ids)).logits, want, atol=TOLERANCE)


CHUNK = 6
PARENT, DEPTH = [-1, 0, 0, 1, 2, 2], np.array([0, 1, 1, 2, 2, 2])


def prefill(model):
    """Ragged prompts committed chunk by chunk; the last token of each is the root of the row's tree."""
    ids = ragged(LENGTHS, seed=1)
    ids = np.pad(ids, [(0, 0), (0, -ids.shape[1] % CHUNK)], constant_values=-1)
    cache = model.lm.init_cache(len(ids), ids.shape[1] + 8)
    for start in range(0, ids.shape[1], CHUNK):
        block = plain(ids[:, start : start + CHUNK], start)
        counts = jnp.asarray(np.clip(LENGTHS - 1 - start, 0, CHUNK), jnp.int32)
        cache = commit(model.lm, cache, forward(model.lm, model.params, block, cache).delta, None, block.length, counts)
    return ids, cache


def grow(ids, lo=0, hi=6):
    """Slots `[lo, hi)` of a tree of six nodes after each prompt: its tokens `[B, 6]` and the block."""
    tree = np.random.default_rng(2).integers(0, 128, (len(ids), 6))
    tree[:, 0] = ids[np.arange(len(ids)), LENGTHS - 1]
    visible = np.eye(6, dtype=bool)
    for node in range(1, 6):
        visible[node] |= visible[PARENT[node]]
    mask = jnp.asarray(np.broadcast_to(visible[lo:hi, :hi], (len(ids), hi - lo, hi)))
    positions = (LENGTHS - 1)[:, None] + DEPTH
    block = Block(jnp.asarray(tree[:, lo:hi]), jnp.asarray(positions[:, lo:hi]), jnp.asarray(LENGTHS - 1), visible=mask)
    return tree, block


@pytest.mark.slow
def test_chunked_prefill_then_tree_equals_every_path(reference):
    model = load(reference.folder)
    ids, cache = prefill(model)
    tree, block = grow(ids)
    out = forward(model.lm, model.params, block, cache)
    rows, roots = range(len(ids)), LENGTHS - 1
    for row in rows:
        for path in ([0, 1, 3], [0, 2, 4], [0, 2, 5]):
            text = np.concatenate([ids[row, : roots[row]], tree[row, path]])[None]
            want = reference.logits(text)[0, roots[row] :]
            np.testing.assert_allclose(out.logits[row, np.array(path)], want, atol=TOLERANCE)

    # the accepted path, committed by its slots, continues the text
    path = np.array([0, 2, 5])
    src, counts = jnp.tile(path[None], (len(ids), 1)), jnp.full(len(ids), 3)
    cache = commit(model.lm, cache, out.delta, src, jnp.asarray(roots), counts)
    more = np.random.default_rng(3).integers(0, 128, (len(ids), CHUNK))
    starts = jnp.asarray(roots + 3)
    after = Block(jnp.asarray(more, jnp.int32), (starts[:, None] + jnp.arange(CHUNK)[None]).astype(jnp.int32), starts)
    got = forward(model.lm, model.params, after, cache).logits
    for row in rows:
        text = np.concatenate([ids[row, : roots[row]], tree[row, path], more[row]])[None]
        np.testing.assert_allclose(got[row], reference.logits(text)[0, -CHUNK:], atol=TOLERANCE)


@pytest.mark.parametrize(
    "name",
    but_slow(["llama3", "mistral", "jamba", "falcon_h1", "qwen3_next"], "mistral", "jamba", "falcon_h1", "qwen3_next"),
)
def test_a_tree_grown_in_two_blocks(references, name):
    """The second block sees the first through `past`, as when a tree is drafted level by level."""
    model = load(references(name).folder)
    ids, cache = prefill(model)
    whole = forward(model.lm, model.params, grow(ids)[1], cache)
    first = forward(model.lm, model.params, grow(ids, 0, 3)[1], cache)
    second = forward(model.lm, model.params, grow(ids, 3, 6)[1], cache, first.delta)
    np.testing.assert_allclose(np.concatenate([first.logits, second.logits], axis=1), whole.logits, atol=TOLERANCE)


def test_hidden_states_and_partial_stacks(references):
    import torch

    reference = references("qwen2")
    model, ids = load(reference.folder), ragged(np.array([11, 11]), seed=3)
    lm, params, block = model.lm, model.params, plain(ids)
    out = forward(lm, params, block, wants=Wants(logits=True, hidden=(0, 1), final=True, topk=3))
    with torch.no_grad():
        want = reference.torch(torch.as_tensor(ids), output_hidden_states=True)
    for layer in (0, 1):
        np.testing.assert_allclose(out.hidden[layer], want.hidden_states[layer + 1].numpy(), atol=TOLERANCE)
    np.testing.assert_allclose(out.final, want.hidden_states[-1].numpy(), atol=TOLERANCE)
    np.testing.assert_allclose(out.topk[0], np.sort(want.logits.numpy())[..., :-4:-1], atol=TOLERANCE)

    @jax.jit
    def in_parts(params):
        h, delta = lm.layers(params, lm.embed(params, block.tokens), 0, 2, block, None)
        return lm(params, block, None, wants=LOGITS, partial=Partial(h, delta, 2))

    parts = in_parts(params)
    np.testing.assert_allclose(parts.logits, out.logits, atol=TOLERANCE)
    assert jax.tree.structure(parts.delta) == jax.tree.structure(out.delta)


FAST_ON_MESHES = ("llama3", "gemma4_small")


@pytest.mark.parametrize("name", but_slow(tiny_families.FAMILIES, *(set(tiny_families.FAMILIES) - {*FAST_ON_MESHES})))
def test_mesh_gives_the_same_logits(references, name):
    reference = references(name)
    from jax.sharding import AxisType

    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    model, ids = load(reference.folder), ragged(LENGTHS)
    sharded = models.load(reference.folder, dtype="float32", mesh=mesh)
    found = jax.tree_util.tree_leaves_with_path(sharded.params["layers"])
    own = ("q", "q_b", "x")  # the last matrix of queries, or one of a state space
    split = next(x for path, x in found if path[-2].key in own and path[-1].key == "kernel")
    assert split.sharding.mesh == mesh and split.addressable_shards[0].data.shape == (len(split), split.shape[1] // 4)
    once = merged(sharded.params, sharded.lm.config, sharded.lm.kv_copies)  # four chips share two kv-heads
    same = jax.tree.map(lambda a, b: bool((np.asarray(a) == np.asarray(b)).all()), model.params, once)
    assert all(jax.tree.leaves(same))
    want = np.asarray(forward(model.lm, model.params, plain(ids)).logits)
    got = np.asarray(forward(sharded.lm, sharded.params, plain(ids)).logits)
    np.testing.assert_allclose(got[ids >= 0], want[ids >= 0], atol=2 * TOLERANCE)  # chips sum in another order


@pytest.mark.skipif(not STORIES.is_dir(), reason="needs the folder stories260K in shared/data beside this checkout")
def test_a_trained_model_repeats_its_known_answers():
    model = load(STORIES)
    known = json.loads((STORIES / "known_answers.json").read_text())["greedy_ids"]
    logits = forward(model.lm, model.params, plain([known])).logits
    assert np.asarray(logits[0, :-1]).argmax(-1).tolist() == known[1:]
    assert model.eos_ids == (2,) and model.tokenizer.decode(known[1:30]).strip()
