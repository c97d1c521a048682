"""The shapes that annotations say are those of the arrays of a step: one size by name, for every kind of decoder."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import pytest
from support.conformance import TARGET

import specjax
from specjax import diffusion, draft, expand, search
from specjax.lm import Block, Output, Wants

PARAMS = {"target": TARGET.abstract(), "draft": None}
KINDS = {"bool": jnp.bool_, "int": jnp.integer, "float": jnp.floating, "key": jax.dtypes.prng_key}


def said(hint):
    """Kind and axes of an annotation, through `| None`; None where it says none."""
    options = typing.get_args(hint) if hint and type(None) in typing.get_args(hint) else (hint,)
    found = [option.__metadata__ for option in options if typing.get_origin(option) is typing.Annotated]
    return found[0] if found else None


def held(value, sizes, seen):
    """Holds every array of a dataclass, and of those in it, against its annotation.

    Args:
      value: of arrays or their shapes.
      sizes: by axis; those that are not there yet are noted.
      seen: `Class.field`s that were held against one, added to.
    """
    hints = typing.get_type_hints(type(value), include_extras=True)
    for field in dataclasses.fields(value):
        part, (kind, axes) = getattr(value, field.name), said(hints[field.name]) or (None, None)
        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            held(part, sizes, seen)
        if kind is None or part is None:
            continue
        where = f"{type(value).__name__}.{field.name}: {kind} {axes!r} and {part.dtype}{part.shape}"
        assert jnp.issubdtype(part.dtype, KINDS[kind]), where
        assert len(axes.split()) == part.ndim, where
        for axis, size in zip(axes.split(), part.shape, strict=True):
            name, _, more = axis.partition("+")
            given = int(name) if name.isdecimal() else sizes.setdefault(name, size - int(more or 0))
            assert given + int(more or 0) == size, where
        seen.add(f"{type(value).__name__}.{field.name}")


def stepped(decoder, params=PARAMS, batch=3, capacity=96):
    state = jax.eval_shape(lambda params: decoder.empty(params, batch, capacity, None, 2), params)
    return jax.eval_shape(decoder.step, params, state)


CHAIN, TREE = draft.PromptLookup(length=4), draft.ModelDrafter(TARGET, expand.TopK(k=2, depth=3, nodes=6))


@pytest.mark.parametrize("drafter", [CHAIN, TREE], ids=["chain", "tree"])
def test_of_an_autoregressive_step(drafter):
    decoder, params = specjax.speculative(TARGET, drafter, logprobs=True), PARAMS | {"draft": TARGET.abstract()}
    state, info = stepped(decoder, params)
    sizes = {"B": 3, "L": 96, "D": drafter.depth, "N": drafter.nodes, "K": 2}
    seen = set()
    held(state, dict(sizes), seen)
    held(info, dict(sizes), seen)
    wanted = {"DecodeState.tokens", "DecodeState.eos", "DecodeState.key", "Stats.accepted", "LogProbs.raw"}
    assert wanted | {"Verdict.path", "Verdict.emitted", "Tree.parent", "Tree.valid"} <= seen


def test_of_a_pass_and_what_goes_into_it():
    wants = Wants(logits=True, final=True, draw=True, hidden=(0,), topk=2)
    block = Block(jnp.zeros((2, 4), jnp.int32), jnp.zeros((2, 4), jnp.int32), jnp.zeros(2, jnp.int32))
    run = lambda params: TARGET(params, block, None, wants=wants, draw=lambda logits: logits.argmax(-1))
    output, seen = jax.eval_shape(run, PARAMS["target"]), set()
    sizes = {"B": 2, "T": 4, "V": TARGET.vocab_size}
    held(block, sizes, seen)
    held(output, sizes, seen)
    assert {"Block.length", "Output.logits", "Output.draw", "Output.final"} <= seen
    assert Output(None, None).logits is None


def test_of_steps_of_diffusion_and_search():
    seen = set()
    unmask = diffusion.diffusion(TARGET, 3, diffusion.Threshold(0.9), block_length=8)
    for part in stepped(unmask):
        held(part, {"B": 3, "L": 96, "W": 8}, seen)
    beams, _ = stepped(search.BeamSearch(TARGET, search.Beam(4)))
    held(beams.beams, {"B": 3, "K": 4, "L": 96}, seen)
    held(beams.found, {"B": 3, "K": 4, "L": 96}, seen)
    wanted = {
        "DiffusionState.opened",
        "DiffusionInfo.committed",
        "Choice.commit",
        "Choice.score",
        "Beams.scores",
        "Found.length",
    }
    assert wanted <= seen


def test_a_wrong_shape_is_seen():
    good = specjax.tree.root_only(jnp.zeros(3, jnp.int32))
    held(good, {"B": 3, "N": 1}, set())
    for bad in (
        {"valid": jnp.zeros((3, 1))},
        {"depth": jnp.zeros(3, jnp.int32)},
        {"parent": jnp.zeros((2, 1), jnp.int32)},
    ):
        with pytest.raises(AssertionError, match=f"Tree.{next(iter(bad))}: "):
            held(dataclasses.replace(good, **bad), {"B": 3, "N": 1}, set())
