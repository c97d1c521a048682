"""A drafter for the drafter: the model's tokens are those that it writes alone, in fewer passes; then come copied ones."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.assembly.companions import Stored
from specjax.assembly.registry import DRAFTERS, parse
from specjax.draft import (
    Cascade,
    InputGuided,
    Jacobi,
    Lookahead,
    ModelDrafter,
    NoDrafter,
    PromptLookup,
    Switch,
    TokenRecycling,
)
from specjax.expand import Chain
from specjax.models.tabular import TabularLM, random
from specjax.prompts import Prompts
from specjax.sampling import row_keys
from specjax.verify import Coupled, Rejection

V = 12
LM = TabularLM(V, order=2)
TABLES = {"target": random(jax.random.key(0), V, 2, concentration=0.2)}
TABLES["draft"] = jax.tree.map(lambda x: x + 0.7 * jax.random.normal(jax.random.key(1), x.shape), TABLES["target"])
PASSES: list[int] = []


@dataclasses.dataclass(frozen=True)
class Heard:
    """A draft model that says how many tokens each of its passes reads."""

    lm: TabularLM

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.lm, name)

    def __call__(self, params, block, cache, **options):
        jax.debug.callback(lambda width: PASSES.append(int(width)), block.tokens.shape[1])
        return self.lm(params, block, cache, **options)


def run(drafter, verifier=None, new=30):
    """Texts, accepted tokens by their number, every step's trees, and the passes of the draft model."""
    decoder = dataclasses.replace(specjax.speculative(LM, drafter, verifier or Coupled()), whole=True)
    keys = row_keys(0, "abc")
    prompts = Prompts.of([[1, 2, 3, 1, 2], [3, 4], [5]], [new] * 3, keys=keys, temperature=[0.0, 1.0, 0.7])
    state = jax.jit(lambda params: decoder.init(params, prompts, capacity=new + 16))(TABLES)
    step, trees = jax.jit(decoder.step), []
    jax.effects_barrier()
    PASSES.clear()
    while not bool(state.done.all()):
        live = np.asarray(~state.done)
        state, info = step(TABLES, state)
        trees.append((np.asarray(info.tree.tokens), live))
    jax.effects_barrier()
    return np.asarray(state.tokens)[:, :new], np.asarray(state.stats.accepted), trees, list(PASSES)


def alone(length, **options):
    return run(ModelDrafter(Heard(LM), Chain(length)), **options)


def cascaded(by, length, tail=0, **options):
    return run(Cascade(Heard(LM), by, length, tail), **options)


@pytest.mark.slow
@pytest.mark.parametrize("verifier", [Rejection(), Coupled()], ids=["rejection", "coupled"])
def test_the_models_tokens_are_those_that_it_writes_alone(verifier):
    """So texts and accepted tokens are `draft`'s, by the rule that reads distributions too."""
    text, accepted, trees, passes = alone(4, verifier=verifier)
    lookup = PromptLookup(length=9, ngram=3, min_ngram=1)
    again, same, others, fewer = cascaded(lookup, 4, verifier=verifier)
    np.testing.assert_array_equal(again, text)
    np.testing.assert_array_equal(same, accepted)
    for (ours, live), (theirs, _) in zip(others, trees, strict=True):
        np.testing.assert_array_equal(ours[live], theirs[live])
    assert len(passes) == 4 * len(trees) >= len(fewer)
    assert len(fewer) < len(passes) or isinstance(verifier, Rejection)  # no row repeats itself in that one's texts
    assert {*fewer} == {
        5,
        4,
    }  # it reads up to five committed tokens, then its last token and three of nine proposed ones


@pytest.mark.slow
def test_without_a_cheaper_drafter_nothing_is_saved():
    _, accepted, trees, passes = alone(3)
    _, same, _, ours = cascaded(NoDrafter(), 3)
    np.testing.assert_array_equal(same, accepted)
    assert len(ours) == len(passes) == 3 * len(trees) and {*ours} == {4, 1}


@pytest.mark.slow
def test_the_tail_is_what_the_lookup_finds_after_the_models_tokens():
    lookup = PromptLookup(length=2, ngram=3, min_ngram=1)
    text, _, trees, _ = cascaded(lookup, 2, 3)
    whole = [[1, 2, 3, 1, 2], [3, 4], [5]]
    found = 0
    for (tree, live), row in ((each, row) for each in trees for row in range(3)):
        if not live[row]:
            continue
        so_far = [*whole[row], *tree[row, 1:3].tolist()]
        copied = _copied(so_far, 3, 1, 2)
        assert tree[row, 3:].tolist() == (copied + [-1] * 3)[:3]
        found += bool(copied)
        at = len(whole[row])  # the row goes on as its text does
        matched = 0
        while matched < 5 and at + matched < text.shape[1] and tree[row, 1 + matched] == text[row, at + matched]:
            matched += 1
        whole[row] = text[row, : at + matched + 1].tolist()
    assert found


def _copied(text, most, least, length):
    """What followed the latest longest earlier occurrence of the text's end."""
    for size in range(most, least - 1, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[-size:]:
                period = len(text) - end
                return [text[end + i % period] for i in range(min(length, 3 * size))]
    return []


def test_sizes_lines_and_what_it_refuses():
    made = Cascade(LM, PromptLookup(length=2), 3, 2).bind(LM)
    assert (made.nodes, made.depth, made.rungs, made.alone) == (6, 5, (4, 6), True)
    stored = parse("drafter", DRAFTERS, "cascade:by=(prompt_lookup:length=3),length=5,tail=0")
    assert isinstance(stored, Stored) and stored.fields == {"by": PromptLookup(length=3), "length": 5, "tail": 0}
    plain = parse("drafter", DRAFTERS, "cascade")
    assert isinstance(plain, Stored) and plain.fields["by"] == Cascade(LM).by
    faults = {
        TokenRecycling(): "TokenRecycling grows a tree",
        Lookahead(): "Lookahead reads slots of its own",
        InputGuided(): "InputGuided must draft in every step",
        Jacobi(): "Jacobi must draft in every step",
        ModelDrafter(LM): "ModelDrafter has parameters",
        Switch((NoDrafter(), PromptLookup())): "Switch learns from how its own drafts are judged",
    }
    for by, fault in faults.items():
        with pytest.raises(ValueError, match=f"takes a look-up of chains .*; {fault}"):
            Cascade(LM, by).bind(LM)
    for wrong in ({"length": 0}, {"tail": -1}):
        with pytest.raises(ValueError, match="needs length >= 1 and tail >= 0"):
            Cascade(LM, **wrong)
    assert jnp.asarray(Cascade(LM).topology.parents).shape == (9,)
