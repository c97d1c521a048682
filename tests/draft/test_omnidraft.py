"""OmniDraft: n-grams of the draft model that are one token of the target. Its distribution is compared with an enumeration of
what the draft model may write, and texts under rejection with the target's own distribution."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.chains import ALPHA
from support.conformance import CONFIG
from support.other_tokens import words
from support.shapes import changed

import specjax
from specjax import decoder as decoding
from specjax.draft import Acceptance, ModelDrafter, OmniDraft, Slem, Tli, View, adaptive
from specjax.draft.vocabularies import SharedLM
from specjax.draft.vocabularies.grams import Chosen, Known, chosen, learnt, merged
from specjax.draft.vocabularies.spelling import Spelt
from specjax.draft.vocabularies.tables import Words, tables
from specjax.expand import Chain, TopK
from specjax.lm import Block, Wants
from specjax.models.llama import LlamaLM
from specjax.prompts import Prompts
from specjax.reference import rejection as oracle
from specjax.reference import statistics
from specjax.sampling import Sampler, SamplingArrays
from specjax.verify import Rejection

TARGET_WORDS, DRAFT_WORDS = Words([b"a", b"b", b"ab", b"abb", b"ba"]), Words([b"b", b"x", b"a"])
V, OWN = 5, 3
DIRECT = {0: 1, 2: 0}
"""The target's token of each draft token that both have; x is the draft model's alone."""
GRAMS = {(2, 0): 2, (2, 0, 0): 3, (0, 2): 4}
"""The target's other tokens, as the draft model spells them."""
PROMPT = (2, 3, 4, 0, 1)
SMALL = changed(
    CONFIG, num_hidden_layers=1, hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1
)


@functools.cache
def toy():
    """A target of five tokens, a draft model of three, and the parameters of both."""
    target, own = LlamaLM(changed(SMALL, vocab_size=V)), LlamaLM(changed(SMALL, vocab_size=OWN))
    made = tables(TARGET_WORDS, DRAFT_WORDS)
    sharp = lambda lm, seed: jax.tree.map(lambda x: 3 * x if x.ndim > 1 else x, lm.init(jax.random.key(seed)))
    arrays = {name: jnp.asarray(array) for name, array in made.arrays.items()}
    return target, SharedLM.of(own, made), {"target": sharp(target, 1), "draft": {"lm": sharp(own, 2), **arrays}}


def written(chance, known, context=()):
    """The distribution of the target's next token `[V]`, before it is restricted to these, by enumeration of draft tokens.

    Args:
      chance: from draft tokens to the next one's distribution.
      known: the n-grams, by their draft tokens.
      context: draft tokens before.
    """
    found = np.zeros(V)
    longest = max(map(len, known), default=1)
    for text in itertools.product(range(OWN), repeat=longest):
        mass = np.prod([chance((*context, *text[:i]))[token] for i, token in enumerate(text)])
        sizes = [size for size in range(longest, 1, -1) if text[:size] in known]
        token = known[text[: sizes[0]]] if sizes else DIRECT.get(text[0])
        if token is not None:
            found[token] += mass
    return found


@pytest.mark.parametrize("known", [{}, GRAMS, {(2, 0, 0): 3}, {(1, 2): 4, (1, 2, 0): 2, (2, 0, 0): 3}])
def test_chances_are_those_of_drawing_and_merging(known):
    """n-grams that begin one another, and one that begins with a token that the target lacks; the sum is at most 1."""
    rng = np.random.default_rng(len(known))
    table = {text: rng.dirichlet(np.ones(OWN)) for n in range(4) for text in itertools.product(range(OWN), repeat=n)}
    chance = table.__getitem__
    rows = [*known, *[(0, 0)] * (4 - len(known))]
    grams = Chosen(
        jnp.asarray([[known.get(row, 0) for row in rows]]),
        jnp.asarray([[(*row, 0)[:3] for row in rows]]),
        jnp.asarray([list(map(len, rows))]),
        jnp.asarray([[row in known for row in rows]]),
    )
    rest = [sum(np.log(chance(row[:i])[row[i]]) for i in range(1, len(row))) for row in rows]
    logits, own = merged(jnp.log(jnp.asarray(chance(())))[None], grams, jnp.asarray([rest]))
    found = np.zeros(V)
    for token, place in DIRECT.items():
        found[place] = np.exp(logits[0, token])
    for row, score in zip(rows, own[0].tolist(), strict=True):
        found[known.get(row, 0)] += np.exp(score)
    wanted = written(chance, known)
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    assert found.sum() <= 1 + 1e-6
    assert jnp.exp(logits).sum() + jnp.exp(own).sum() == pytest.approx(1, abs=1e-5)


def test_a_cache_keeps_the_newest_token_of_a_slot():
    grams = jnp.full((2, 4), -1, jnp.int32)
    tokens = jnp.asarray([[5, 9, 6, 2], [1, 7, 3, 5]])
    new = jnp.asarray([[True, True, True, True], [True, False, True, False]])
    assert learnt(grams, tokens, new).tolist() == [[-1, 9, 2, -1], [-1, 1, -1, 3]]


@pytest.mark.slow
def test_a_text_is_learnt_whatever_its_pieces():
    """Only tokens that two to `longest` draft tokens spell, and the same by one chunk as by many."""
    _, lm, params = toy()
    own, tokens = params["draft"], jnp.asarray([[0, 2, 3, 1, 4], [1, 3, 0, 0, 0]])
    begin = lambda longest: Known.of(Spelt.empty(lm.lm, 2, 20, jnp.float32), jnp.full((2, 8), -1, jnp.int32), longest)
    real = jnp.asarray([[True] * 5, [True] * 3 + [False] * 2])
    whole = begin(3).spelling(own, tokens, real)
    assert [sorted(set(row) - {-1}) for row in whole.grams.tolist()] == [[2, 3, 4], [3]]
    state = begin(3)
    for at in range(5):
        state = state.spelling(own, tokens[:, at : at + 1], real[:, at : at + 1])
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.all(a == b)), state, whole))
    assert sorted(set(begin(2).spelling(own, tokens, real).grams[0].tolist())) == [-1, 2, 4]


def test_equal_spellings_are_weighed_once():
    own = {"spelling": jnp.asarray([[0, 1], [0, 1], [1, 0]]), "counts": jnp.asarray([2, 2, 2])}
    state = Known(None, None, None, None, None, None, jnp.asarray([[0, 1, 2, -1]]), 2)
    found = chosen(state, own, jnp.asarray([[1.0, 2.0]]), 4)
    assert found.ids.tolist() == [[2, 0, 1, 0]] and found.real.tolist() == [[True, True, False, False]]


def proposed(drafter, params, tokens, rows=1, temperature=1.0):
    """The proposal after a text `[L]` of the target's, of which all but the last token were read as its prompt."""
    text, length = jnp.broadcast_to(jnp.asarray(tokens), (rows, len(tokens))), jnp.full((rows,), len(tokens))
    live = jnp.ones(rows, bool)
    view = View(text, length, live, (), max_depth=drafter.depth, keep_q=True)
    state = drafter.catch_up(params, drafter.init(params, rows, 64), view)
    keys = jax.random.split(jax.random.key(0, impl="threefry2x32"), rows)
    sampler = Sampler(keys, text, length, live, SamplingArrays.make(rows, temperature=[temperature] * rows))
    return jax.jit(drafter.propose)(params, state, view, sampler)


@pytest.mark.slow
def test_tokens_are_drawn_from_what_they_are_said_to_be():
    """Two levels: the recorded distributions are those of an enumeration of draft tokens, and the draws' frequencies too."""
    _, lm, params = toy()
    own, rows = params["draft"], 4000
    tree = proposed(OmniDraft(lm, Chain(2)).bind(toy()[0]), params, PROMPT, rows).tree
    spell = lambda tokens: [own["spelling"][t, i].item() for t in tokens for i in range(own["counts"][t].item())]

    room = jnp.arange(16)[None]
    whole = jax.jit(
        lambda tokens: lm.lm(own["lm"], Block(tokens, room, jnp.zeros(1, jnp.int32)), None, wants=Wants(logits=True))
    )

    @functools.cache
    def chance(text):
        tokens = np.zeros((1, 16), np.int32)
        tokens[0, : len(text)] = text
        return np.asarray(jax.nn.softmax(whole(tokens).logits[0, len(text) - 1]))

    first = written(chance, GRAMS, tuple(spell(PROMPT)))
    assert first.sum() < 1 and min(first) > 0
    np.testing.assert_allclose(np.exp(tree.log_q[0, 0]), first / first.sum(), atol=1e-5)
    assert bool(jnp.all(jnp.abs(tree.log_q[:, 0] - tree.log_q[:1, 0]) < 1e-5)) and bool(tree.valid.all())
    seen = np.asarray(tree.tokens)
    joint = np.zeros((V, V))
    for token in range(V):
        after = written(chance, GRAMS, tuple(spell((*PROMPT, token))))
        joint[token] = first[token] / first.sum() * after / after.sum()
        row = np.flatnonzero(seen[:, 1] == token)[0]
        np.testing.assert_allclose(np.exp(tree.log_q[row, 1]), after / after.sum(), atol=1e-5)
    counts = np.zeros((V, V))
    np.add.at(counts, (seen[:, 1], seen[:, 2]), 1)
    assert statistics.chi_square(counts, joint) > ALPHA


@pytest.mark.slow
def test_texts_under_rejection_have_the_targets_distribution():
    """20,000 texts of 125 kinds, after a prompt that has every n-gram; tokens that n-grams spell are kept and refused."""
    target, lm, params = toy()
    rows, new, size = 20_000, 3, len(PROMPT)
    texts = np.array([(*PROMPT, *text) for text in itertools.product(range(V), repeat=new - 1)])
    block = Block(
        jnp.asarray(texts), jnp.broadcast_to(jnp.arange(texts.shape[1]), texts.shape), jnp.zeros(len(texts), jnp.int32)
    )
    whole = jax.nn.softmax(target(params["target"], block, None, wants=Wants(logits=True)).logits[:, size - 1 :])
    dists = np.asarray(whole, np.float64).reshape((V,) * (new - 1) + (new, V))
    wanted = oracle.joint([dists[(slice(None),) * i + (0,) * (new - 1 - i) + (i,)] for i in range(new)])
    decoder = dataclasses.replace(specjax.speculative(target, OmniDraft(lm, Chain(2)), Rejection()), whole=True)
    many = lambda number: jnp.full((rows,), number, jnp.int32)
    keys = jax.random.split(jax.random.key(0, impl="threefry2x32"), rows)
    tokens = jnp.broadcast_to(jnp.asarray(PROMPT), (rows, size))
    sampling = SamplingArrays({"temperature": jnp.ones((rows,))})
    prompts = Prompts(tokens, many(size), keys, many(size + new), sampling, width=size - 1)
    state = decoder.init(params, prompts, capacity=16, cache_dtype=jnp.float32)
    state = decoding.run(decoder, params, state)
    counts = np.zeros((V,) * new)
    np.add.at(counts, tuple(np.asarray(state.tokens)[:, size : size + new].T), 1)
    assert statistics.chi_square(counts, wanted) > ALPHA
    accepted = np.asarray(state.stats.accepted).sum(axis=0)
    assert accepted[1:].sum() and accepted[:-1].sum()


@pytest.mark.slow
def test_of_the_same_tokens_it_drafts_as_a_draft_model():
    """Nothing is spelt by several tokens, so the cache stays empty."""
    target, _, params = toy()
    made = tables(TARGET_WORDS, TARGET_WORDS)
    lm = SharedLM.of(target, made)
    own = {"lm": params["target"], **{name: jnp.asarray(array) for name, array in made.arrays.items()}}
    ours = proposed(OmniDraft(lm, Chain(3)), {"draft": own}, PROMPT, 8)
    plain = ModelDrafter(target, Chain(3))
    theirs = proposed(plain, {"draft": params["target"]}, PROMPT, 8)
    assert made.ids.tolist() == made.columns.tolist() == list(range(V)) and bool((ours.draft.grams == -1).all())
    assert ours.tree.tokens.tolist() == theirs.tree.tokens.tolist()
    np.testing.assert_allclose(ours.tree.log_q[:, :-1], theirs.tree.log_q[:, :-1], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_rule_ends_its_chains():
    """One that reads the draft's features: the text is plain decoding's."""
    target, lm, params = toy()
    rule = Acceptance(0.5, shortest=1, layers=1).bind(lm)
    head = rule.init_params(jax.random.key(3), params["draft"])
    write = lambda drafter, own: np.asarray(_written(target, drafter, {**params, "draft": own}).tokens)[:, :20]
    plain = write(specjax.draft.NoDrafter(), None)
    ruled = adaptive(OmniDraft(lm), rule, 2)
    assert write(ruled, {"drafter": params["draft"], "rule": head}).tolist() == plain.tolist()


def _written(target, drafter, params):
    decoder = dataclasses.replace(specjax.speculative(target, drafter), whole=True)
    size = len(PROMPT)
    one = lambda number: jnp.full((1,), number, jnp.int32)
    keys = jax.random.split(jax.random.key(0, impl="threefry2x32"), 1)
    sampling = SamplingArrays({"temperature": jnp.ones((1,))})
    prompts = Prompts(jnp.asarray([PROMPT]), one(size), keys, one(20), sampling, width=size - 1)
    return decoding.run(decoder, params, decoder.init(params, prompts, capacity=32, cache_dtype=jnp.float32))


def test_what_cannot_draft_is_refused():
    target, lm, _ = toy()
    with pytest.raises(ValueError, match="omnidraft drafts chains: choose the expander chain"):
        OmniDraft(lm, TopK(k=2, depth=2, nodes=5))
    for wrong in ({"guesses": 0}, {"guesses": 5, "slots": 4}, {"longest": 1}):
        with pytest.raises(ValueError, match="needs 1 <= guesses <= slots and longest >= 2, got"):
            OmniDraft(lm, **wrong)
    with pytest.raises(ValueError, match="drafts with a SharedLM"):
        OmniDraft(target).bind(target)
    with pytest.raises(ValueError, match="not trimmed further: leave trim out"):
        OmniDraft(lm).trimmed(None, None, np.arange(2))
    assert len(words(V)[0].texts) == V and Tli.about.loads == OmniDraft.about.loads != Slem.about.loads
