"""Deco-G against enumeration: probabilities of completed texts, the aligned distribution where the model is the hidden Markov
model itself, and the same text under drafters."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import chains
from support.aligned import EOS, NEW, language
from support.verifiers import expander_for, verifier_of

from specjax.constrain import Hmm, Table
from specjax.draft import ModelDrafter
from specjax.reference import statistics
from specjax.sampling import Sampler, SamplingArrays
from specjax.sampling.warp import walked
from specjax.sampling_params import SamplingOptions, begun, check_walked, form_of
from specjax.tree import Topology, Tree
from specjax.warpers import completing
from specjax.warpers.completing import guide_of, guided
from specjax.warpers.guide import Guided

V, H = 4, 3


def random_hmm(seed=0, hidden=H, vocab=V, sharp=1.0):
    rng = np.random.default_rng(seed)
    rows = lambda *shape: rng.dirichlet(np.full(shape[-1], sharp), shape[:-1])
    return Hmm.of("random", rows(hidden), rows(hidden, hidden), rows(hidden, vocab))


def chance(hmm, text):
    """The probability that a hidden Markov model begins with these tokens, in float64."""
    own = hmm.initial.astype(float)
    for token in text:
        own = (own * hmm.emission[:, token].astype(float)) @ hmm.transition.astype(float)
    return own.sum()


def completions(table, state, room):
    """What can follow within the language: texts that an end of text or the room ends, in a text of the language."""
    if room == 0:
        return [()]
    found = []
    for token in np.flatnonzero(table.allowed(state, room)).tolist():
        rest = [()] if token == EOS else completions(table, table.next(state, token), room - 1)
        found += [(token, *own) for own in rest]
    return found


def prefixes(table):
    """Every beginning of a text of the language that does not end it."""
    whole = completions(table, 0, NEW)
    return sorted({text[:n] for text in whole for n in range(NEW) if EOS not in text[:n] and n < len(text)})


def sampler_of(table, texts, hmm, prompt=2, **of_guide):
    """A row for each text, under the constraint and its guide."""
    options = SamplingOptions(temperature=1.0, constraint=table, guide=guided(hmm, table, NEW), **of_guide)
    rows = [options] * len(texts)
    params = jax.tree.map(jnp.asarray, SamplingArrays.of_rows(rows, form_of(rows)))
    tokens = np.zeros((len(texts), prompt + NEW), np.int32)
    for row, text in enumerate(texts):
        tokens[row, prompt : prompt + len(text)] = text
    length = jnp.asarray([prompt + len(text) for text in texts])
    return Sampler(
        jax.random.split(jax.random.key(0), len(texts)), jnp.asarray(tokens), length, jnp.ones(len(texts), bool), params,
        begin=jnp.full(len(texts), prompt), limit=jnp.full(len(texts), prompt + NEW), eos=jnp.full((len(texts), 1), EOS),
    )  # fmt: skip


after = jax.jit(lambda params, tokens, count: walked(params, begun(params), tokens, count))
penalised = jax.jit(lambda sampler, logits: sampler.penalised(logits))
at_nodes = jax.jit(lambda sampler, logits, tree: sampler.penalised(logits, tree.path_tokens))


def wanted(hmm, table, text):
    """The logarithm of the probability that a text is completed after each token `[V]`, by all continuations."""
    state, room, out = 0, NEW - len(text), np.full(V, -np.inf)
    for token in text:
        state = table.next(state, token)
    for own in completions(table, state, room):
        out[own[0]] = np.logaddexp(out[own[0]], np.log(chance(hmm, (*text, *own)) / chance(hmm, (*text, own[0]))))
    return out


def test_logits_gain_what_all_continuations_say():
    hmm, table, rng = random_hmm(), language(), np.random.default_rng(1)
    texts = prefixes(table)
    logits = rng.normal(size=(len(texts), 1, V)).astype(np.float32)
    got = np.asarray(penalised(sampler_of(table, texts, hmm), jnp.asarray(logits)))
    want = np.stack([logits[row, 0] + wanted(hmm, table, text) for row, text in enumerate(texts)])
    assert len(texts) > 8 and np.isfinite(want).sum() > 12
    np.testing.assert_allclose(got[:, 0], want, atol=1e-5)


def test_nodes_of_a_tree_gain_the_same():
    hmm, table, rng = random_hmm(3, hidden=8), language(), np.random.default_rng(2)
    topology, known = Topology.from_counts("2 | 2 1 | 1 1 1"), set(prefixes(table))
    texts = sorted(text for text in known if len(text) <= 1)
    drafted = jnp.asarray(rng.integers(0, V, (len(texts), len(topology.parents))))
    tree = Tree.of(topology, drafted, jnp.ones(drafted.shape, bool))
    logits = jnp.asarray(rng.normal(size=(*drafted.shape, V)), jnp.float32)
    sampler = sampler_of(table, texts, hmm)
    carried = after(sampler.params, sampler.tokens[:, 2:], sampler.length - 2)
    paths, seen = np.asarray(tree.path_tokens()), []
    got = np.asarray(at_nodes(dataclasses.replace(sampler, carried=carried), logits, tree))
    for row, node in itertools.product(range(len(texts)), range(drafted.shape[1])):
        text = (*texts[row], *(int(token) for token in paths[row, node] if token >= 0))
        if text in known:
            np.testing.assert_allclose(got[row, node], logits[row, node] + wanted(hmm, table, text), atol=1e-5)
            seen.append((row, node, text))
    assert len(seen) > 10
    rows, nodes, texts = zip(*seen, strict=True)
    alone = np.asarray(penalised(sampler_of(table, texts, hmm), logits[rows, nodes][:, None]))[:, 0]
    np.testing.assert_array_equal(got[rows, nodes], alone)  # so drafters change no bit


@pytest.mark.parametrize("hidden", (8, 33))
def test_a_state_has_the_same_bits_however_many_nodes_a_step_has(hidden):
    hmm, table, rng = random_hmm(4, hidden), language(), np.random.default_rng(6)
    own = sampler_of(table, [(), ()], hmm).params.columns
    states = Guided().start(own, 2)
    tokens = jnp.asarray(rng.integers(0, V, (2, 6)), jnp.int32)
    beliefs = jnp.asarray(rng.dirichlet(np.ones(states["belief"].shape[-1]), (2, 6)), jnp.float32)
    at = lambda nodes: {"state": jnp.zeros((2, len(nodes)), jnp.int32), "belief": beliefs[:, nodes]}
    moved = jax.jit(lambda states, tokens: Guided().moved(own, states, tokens))
    whole = moved(at(np.arange(6)), tokens)
    for nodes in ([0], [1, 2], [0, 2, 4], [5, 4, 3, 1]):
        part = moved(at(np.asarray(nodes)), tokens[:, np.asarray(nodes)])
        np.testing.assert_array_equal(part["belief"], whole["belief"][:, np.asarray(nodes)])


def test_texts_of_a_hidden_markov_model_have_the_aligned_distribution():
    hmm, table = random_hmm(5), language()
    texts = prefixes(table)
    ours = np.log([[chance(hmm, (*text, v)) / chance(hmm, text) for v in range(V)] for text in texts])
    scores = penalised(sampler_of(table, texts, hmm), jnp.asarray(ours, jnp.float32)[:, None])
    steps = np.asarray(jax.nn.softmax(scores))
    local = np.where(np.isfinite(steps[:, 0]) & (steps[:, 0] > 0), np.exp(ours), 0)
    local /= local.sum(axis=1, keepdims=True)
    along = lambda p, text: np.prod([p[texts.index(text[:n]), text[n]] for n in range(len(text))])
    whole = completions(table, 0, NEW)
    exact = np.asarray([chance(hmm, text) for text in whole])
    exact /= exact.sum()
    np.testing.assert_allclose([along(steps[:, 0], text) for text in whole], exact, atol=1e-5)
    assert np.abs(np.asarray([along(local, text) for text in whole]) - exact).sum() > 0.1  # the local rule differs


def test_long_texts_neither_vanish_nor_grow():
    """In a language of one text of 400 tokens that the model hardly writes, probabilities are far below float32's."""
    count = 400
    following = np.full((count + 1, 3), -1)
    following[np.arange(count), np.arange(count) % 2] = np.arange(1, count + 1)
    table = Table.of("long", following, np.asarray([0, 1, 2, 2]), np.arange(count + 1) == count, (EOS,))
    hmm = random_hmm(7, sharp=0.3)
    guide = guided(hmm, table, count)
    belief = hmm.initial * hmm.emission[:, 0] / (hmm.initial * hmm.emission[:, 0]).sum()
    got = np.log((belief * guide.ahead[-1, 1]).sum()) + guide.scale[-1, 1]
    own, want = belief.astype(float), 0.0
    for at in range(1, count):
        own = (own @ hmm.transition.astype(float)) * hmm.emission[:, at % 2]
        want, own = want + np.log(own.sum()), own / own.sum()
    assert len(guide.ahead) == count and want < -200
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_what_no_longer_changes_is_kept_once():
    following = np.asarray([[1, -1], [-1, 2], [-1, -1]])
    table = Table.of("two tokens", following, np.asarray([0, 1, 1, 1]), np.asarray([False, False, True]), (EOS,))
    found = [guided(random_hmm(), table, room) for room in (200, 2, 256, 255)]
    lengths = [len(each.ahead) for each in found]
    assert lengths[1] == 2 < lengths[0] < 6 and lengths[0] == lengths[2] == lengths[3]
    assert found[0] == found[2] == found[3] != found[1]  # by digest
    assert all(np.shares_memory(found[0].ahead, each.ahead) for each in found[2:])


def test_tables_of_about_one_size_share_a_program():
    sizes = set()
    for states in (9, 12):
        following = np.full((states, 2), -1)
        following[: states - 1, 1], following[states - 2, 0] = np.arange(1, states), states - 1
        table = Table.of(
            f"{states} states", following, np.asarray([0, 1, 1, 1]), np.arange(states) >= states - 2, (EOS,)
        )
        assert len(guided(random_hmm(), table, 30).ahead) > 1
        sizes.add(completing.longer._cache_size())
    assert len(sizes) == 1


def test_a_refusal_names_what_forbids_and_not_the_guide():
    table = language()
    guide = guided(random_hmm(), table, NEW)
    check_walked(SamplingOptions(temperature=1.0, guide=guide), "this", obeys=False)  # it forbids nothing
    with pytest.raises(ValueError, match="^this may write tokens that a constraint forbids: leave constraint out"):
        check_walked(SamplingOptions(temperature=1.0, guide=guide, constraint=table), "this", obeys=False)


def test_what_cannot_be_guided_is_refused(monkeypatch):
    table, other = language(), random_hmm(vocab=5)

    class Words:
        name, size = "small", V

    with pytest.raises(ValueError, match="^a guide leads to texts of a constraint: give one, or leave guide out$"):
        guide_of(other, Words, NEW, {})
    with pytest.raises(ValueError, match=r"random is of another vocabulary than small \(5 tokens, and 4\): make one"):
        guide_of(other, Words, NEW, {"constraint": table})
    with pytest.raises(
        ValueError, match="^there is no hidden Markov model in 'nowhere' .hmm.json.: `specjax train hmm`"
    ):
        guide_of("nowhere", Words, NEW, {"constraint": table})
    made = guided(random_hmm(), table, NEW)
    assert guide_of(made, Words, NEW, {"constraint": table}) is made
    with pytest.raises(
        ValueError, match="^constraint other: the guide was made for another constraint: give the folder of its hidden"
    ):
        guide_of(made, Words, NEW, {"constraint": dataclasses.replace(table, line="other", digest="other")})
    with pytest.raises(ValueError, match="is not compiled: specjax.warpers.completing.guided makes one for a table$"):
        SamplingArrays.make(1, guide=["folder"])
    monkeypatch.setattr(completing, "MOST_ENTRIES", 20)
    with pytest.raises(ValueError, match="a guide has more than 20 numbers: lower max_new_tokens, train fewer states"):
        guided(random_hmm(11), table, NEW)
    monkeypatch.undo()
    monkeypatch.setattr(completing, "MOST_OF_BATCH", 2000)
    guide = [guided(random_hmm(11), table, NEW)]
    assert SamplingArrays.make(2, guide=guide * 2)
    with pytest.raises(
        ValueError, match="^the guides of 60 rows have .* numbers, more than 2000: take a smaller batch"
    ):
        SamplingArrays.make(60, guide=guide * 60)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ("rejection", "coupled"))
def test_drawn_texts_have_the_guided_distribution(rule):
    """Of a model, a draft model and a language that have nothing to do with the hidden Markov model, by counting."""
    hmm, heat = random_hmm(9, vocab=chains.V, sharp=0.4), 1.4
    following, room = np.asarray([[0, 1, -1, 2], [-1, 2, 0, -1], [1, 0, 2, 2]]), chains.NEW
    table = Table.of("three states", following, np.arange(chains.V), np.asarray([False, False, True]), ())
    whole = [text for text in itertools.product(range(chains.V), repeat=room) if table.accepts(text)]
    likely = {text: chance(hmm, text) for text in whole}
    exact = np.zeros((chains.V,) * room)
    for text in whole:
        p = 1.0
        for n in range(room):
            context = np.concatenate([chains.PROMPT, text[:n]]).astype(int)[None]
            scores = np.asarray(chains.TARGET.next_log_probs(chains.PARAMS["target"], context), float)[0]
            gains = np.full(chains.V, -np.inf)
            for other, own in likely.items():
                if other[:n] == text[:n]:
                    gains[other[n]] = np.logaddexp(gains[other[n]], np.log(own))
            starts = [chance(hmm, (*text[:n], token)) for token in range(chains.V)]
            weights = np.exp((scores + gains - np.log(starts)) / heat)
            p *= weights[text[n]] / weights.sum()
        exact[text] = p
    verifier = verifier_of(rule)
    drafter = chains.MODEL if rule == "rejection" else ModelDrafter(chains.MODEL.lm, expander_for(verifier))
    given = {
        "temperature": heat,
        "constraint": [table] * chains.ROWS,
        "guide": [guided(hmm, table, room)] * chains.ROWS,
    }
    found = np.asarray(chains.generate(drafter, verifier, optimise=True, **given).tokens)
    counts, begin = np.zeros_like(exact), len(chains.PROMPT)
    np.add.at(counts, tuple(found[:, begin : begin + room].T), 1)
    assert counts[exact == 0].sum() == 0 and abs(exact.sum() - 1) < 1e-5
    assert statistics.chi_square(counts[exact > 0], exact[exact > 0]) > chains.ALPHA
