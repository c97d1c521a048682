"""Hidden Transfer: what its pseudo slots say, from a row's first proposal on, and that no node sees them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import CONFIG, MODELS, TARGET, params
from support.head_start import bindings, proposed, running
from support.pseudo_slots import after
from support.shapes import changed

from specjax.draft import HiddenTransfer
from specjax.draft.hidden_transfer import usual_layers
from specjax.expand import Chain, Static
from specjax.lm import Block, Partial, Wants
from specjax.models import EmbeddingConfig, LlamaLM
from specjax.reference import trees

TREE = Static(((0,), (1,), (0, 0), (1, 0), (0, 0, 0)))
DRAFTER = HiddenTransfer(TREE, (1, 2, 2))
MODEL = params("hidden_transfer")
M, N, WIDE = 3, 6, 48


@jax.jit
def said(text, length):
    return after(TARGET, DRAFTER.layers, MODEL["target"], MODEL["draft"]["maps"], text, length)


def check(got, text):
    """What pseudo slots say against the oracle's, whose slots follow this text."""
    want = said(np.resize(text, WIDE), len(text))
    np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-3)


@functools.cache
def state_after(steps):
    """The decoder and its rows after so many steps, and what it proposes then."""
    decoder, state = running(DRAFTER, MODEL, steps)
    return decoder, state, proposed(decoder, MODEL, state)


@functools.partial(jax.jit, static_argnums=0)
def read(decoder, model, state, proposal):
    """The target's output over nodes and slots, from the head start."""
    view, _ = bindings(decoder, state)
    wants = Wants(logits=True, final=True)
    return TARGET(model["target"], proposal.block(view), view.cache, wants=wants, partial=proposal.partial)


@functools.partial(jax.jit, static_argnums=0)
def read_alone(decoder, model, state, proposal):
    """The target's logits over the nodes without slots and without a head start."""
    view, _ = bindings(decoder, state)
    block = proposal.block(view).first(N)
    return TARGET(model["target"], block, view.cache, wants=Wants(logits=True))


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 3])
def test_a_row_knows_what_the_slots_of_its_last_token_but_one_say(steps):
    """Of a prompt, and of what steps have committed: the accepted node's slots are those of the text so far. A prompt of
    one token has no such token."""
    _, state, proposal = state_after(steps)
    lengths = state.length.tolist()
    assert (min(lengths) == 1) == (steps == 0)
    for row, length in enumerate(lengths):
        if length > 1:
            check(proposal.draft.final[row], state.tokens[row, : length - 1])
        else:
            assert not proposal.draft.final[row].any()
    assert not proposal.draft.fresh.any()


@pytest.mark.slow
def test_every_slot_says_what_the_oracles_slots_say_after_its_nodes_path():
    decoder, state, proposal = state_after(0)
    output, tree = read(decoder, MODEL, state, proposal), jax.device_get(proposal.tree)
    checked = 0
    for row, length in enumerate(state.length.tolist()):
        paths = trees.path_tokens(tree.tokens[row], tree.parent[row], M)
        for node in np.flatnonzero(tree.valid[row]):
            check(
                output.final[row, N + node :: N], [*state.tokens[row, :length].tolist(), *paths[node][paths[node] >= 0]]
            )
            checked += 1
    assert checked == 4 * N


@pytest.mark.slow
def test_nodes_are_those_of_a_pass_without_slots():
    """With other maps they are the same bit for bit, and the slots are not."""
    decoder, state, proposal = state_after(0)
    output = read(decoder, MODEL, state, proposal)
    plain = read_alone(decoder, MODEL, state, proposal)
    first = output.first(N)
    np.testing.assert_allclose(first.logits, plain.logits, rtol=1e-5, atol=3e-5)
    for got, want in zip(jax.tree.leaves(first.delta), jax.tree.leaves(plain.delta), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=3e-5)
    view, _ = bindings(decoder, state)
    other = {**MODEL, "draft": jax.tree.map(lambda x: -x, MODEL["draft"])}
    entering = jax.jit(decoder.drafter.entering)(other, proposal.block(view), view.cache)
    moved = read(decoder, MODEL, state, dataclasses.replace(proposal, partial=entering))
    assert (moved.logits[:, :N] == output.logits[:, :N]).all()
    assert (moved.logits[:, N:] != output.logits[:, N:]).any(axis=2).all()


def test_slots_below_their_layer_are_zeros():
    block = Block(
        jnp.ones((1, 3), jnp.int32), jnp.arange(3)[None], jnp.zeros(1, jnp.int32), jnp.tri(3, dtype=bool)[None]
    )

    @jax.jit
    def program(weights):
        start = Partial(TARGET.embed(weights, block.tokens[:, :2]), None, 0)
        first = start.through(TARGET, weights, 1, block.first(2), None)
        return first, first.beside(jnp.ones((1, 1, 64)))

    first, both = program(MODEL["target"])
    assert both.through(TARGET, MODEL["target"], 1, block, None) is both
    for grown, leaf in zip(jax.tree.leaves(both.delta), jax.tree.leaves(first.delta), strict=True):
        assert (grown[:, :2] == leaf).all() and not grown[:, 2:].any() and grown.shape[1] == 3
    assert (both.h[:, 2] == 1).all() and (both.h[:, :2] == first.h).all()


def test_maps_begin_as_the_identity_at_layers_of_the_last_third():
    drafter = HiddenTransfer().bind(TARGET)
    assert (drafter.layers, drafter.nodes, drafter.depth) == ((2, 2, 2), 5, 3)
    maps = drafter.init_params(jax.random.key(0), MODEL["target"])["maps"]
    assert len(maps) == 3 and all((own["kernel"] == jnp.eye(64)).all() for own in maps)
    assert usual_layers(80) == (54, 62, 71)


def test_what_does_not_fit_is_refused():
    for layers, message in (((2, 1), "must not descend"), ((1,), "depth 2 needs as many layers, there are 1")):
        with pytest.raises(ValueError, match=message):
            HiddenTransfer(Chain(2), layers)
    assert HiddenTransfer(layers=(1, 2)).depth == 2
    for layer in (0, 3):
        with pytest.raises(ValueError, match=f"cannot begin at layer {layer} of a target of 3: choose 1 to 2"):
            HiddenTransfer(layers=(layer,)).bind(TARGET)
    with pytest.raises(ValueError, match="layer 2 reads the keys of layer 0"):
        HiddenTransfer(layers=(1,)).bind(MODELS["shared"])
    streams = LlamaLM(changed(CONFIG).every(EmbeddingConfig, streams=2))
    with pytest.raises(ValueError, match="this target has several"):
        HiddenTransfer(layers=(1,)).bind(streams)
    short = {**MODEL, "draft": {"maps": MODEL["draft"]["maps"][:2]}}
    with pytest.raises(ValueError, match="need 3 of"):
        DRAFTER.bind(TARGET).init(short, 2, 8)
