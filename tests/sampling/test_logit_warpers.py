"""Warpers that read the text, or change logits, equal to transformers and to definitions, at every node of a tree."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.reference import trees
from specjax.reference import warpers as oracle
from specjax.sampling import Sampler, SamplingArrays
from specjax.sampling.noise import COIN, uniform
from specjax.sampling_params import SamplingOptions, form_of
from specjax.tree import Topology, Tree

V, EOS = 12, (5, 9)
TOPOLOGY = Topology.from_counts("3 | 2 1 | 1 1 | 1")
NODES = len(TOPOLOGY.parents)
EACH = [
    {},
    {"logit_bias": {3: -100, "7": 2.5, 0: 1}},
    {"repetition_penalty": 1.4},
    {"frequency_penalty": 0.7},
    {"presence_penalty": -1.5},
    {"frequency_penalty": -0.3, "presence_penalty": 1.1},
    {"bad_words_ids": [[4], [9], [1, 2], [0, 1, 2], [3, 3, 3, 3, 3], [2, 0]]},
    {"bad_words_ids": [[i, j] for i in range(4) for j in range(3)]},
    {"suppress_tokens": [0, 11, 4]},
    {"min_length": 12},
    {"min_new_tokens": 4},
    {"begin_suppress_tokens": [0, 5]},
    {"forced_eos_token_id": 5},
    {"forced_eos_token_id": 3, "bad_words_ids": [[3]]},
    {"forced_bos_token_id": 3, "begin_suppress_tokens": [0, 5]},
    {
        "logit_bias": {2: 4},
        "repetition_penalty": 0.8,
        "presence_penalty": 1.0,
        "suppress_tokens": [1],
        "min_length": 99,
    },
]
ROWS = len(EACH)
LENGTHS, BEGIN = np.resize([10, 4, 1, 7], ROWS), np.resize([6, 2, 1, 7], ROWS)


def transformers_logits(options, text, begin, limit, logits):
    """The processors in the order of `GenerationMixin._get_logits_processor`, OpenAI's penalties after that of
    repetitions."""
    torch = pytest.importorskip("torch")
    made = pytest.importorskip("transformers.generation.logits_process")
    ids, eos = torch.tensor(text)[None], list(EOS)
    chain = {
        "logit_bias": lambda bias: made.SequenceBiasLogitsProcessor({(int(i),): float(b) for i, b in bias.items()}),
        "repetition_penalty": made.RepetitionPenaltyLogitsProcessor,
        "frequency_penalty": lambda by: lambda _, x: x - by * torch.tensor(np.bincount(text[begin:], minlength=V)),
        "presence_penalty": lambda by: lambda _, x: x - by * (torch.tensor(np.bincount(text[begin:], minlength=V)) > 0),
        "bad_words_ids": lambda words: made.NoBadWordsLogitsProcessor(words, eos),
        "min_length": lambda least: made.MinLengthLogitsProcessor(least, eos),
        "min_new_tokens": lambda least: made.MinNewTokensLengthLogitsProcessor(begin, least, eos),
        "forced_bos_token_id": made.ForcedBOSTokenLogitsProcessor,
        "forced_eos_token_id": lambda token: made.ForcedEOSTokenLogitsProcessor(limit, token),
        "suppress_tokens": made.SuppressTokensLogitsProcessor,
        "begin_suppress_tokens": lambda ids: made.SuppressTokensAtBeginLogitsProcessor(
            ids, begin if begin > 1 or "forced_bos_token_id" not in options else begin + 1
        ),
    }
    scores = torch.tensor(logits)[None]
    for name, make in chain.items():
        if name in options:
            scores = make(options[name])(ids, scores)
    return scores[0].numpy()


def sampler(rng, options, lengths=LENGTHS, begin=BEGIN, live=True, vocab=V):
    """Rows of random texts, and a tree below them."""
    rows = len(options)
    lengths, begin = lengths[:rows], begin[:rows]
    text, drafted = rng.integers(0, 4, (rows, 10)), rng.integers(0, 4, (rows, NODES))
    drafted[:, 0] = text[np.arange(rows), lengths - 1]
    tree = Tree.of(TOPOLOGY, jnp.asarray(drafted), jnp.asarray(rng.random((rows, NODES)) < 0.9))
    filled = [SamplingOptions(**{"temperature": 1.0, **own}) for own in options]
    params = SamplingArrays.of_rows(filled, form_of(filled))
    keys = jax.random.split(jax.random.key(0), rows)
    eos = jnp.broadcast_to(jnp.asarray([*EOS, -1]), (rows, 3))
    made = Sampler(
        keys, jnp.asarray(text), jnp.asarray(lengths), jnp.full(rows, live), jax.tree.map(jnp.asarray, params),
        begin=jnp.asarray(begin), eos=eos, limit=jnp.asarray(lengths) + 2,
    )  # fmt: skip
    return made, tree


def texts(made, tree, row):
    """What stands before each node's next token."""
    begins = np.asarray(made.tokens)[row, : int(made.length[row])].tolist()
    for node in range(NODES):
        path = np.asarray(tree.tokens)[row, trees.path_to(TOPOLOGY.parents, node)[1:]]
        yield node, begins + [int(token) for token in path if token >= 0]


penalised = jax.jit(lambda made, tree, logits: made.penalised(logits, tree.path_tokens))


def test_equal_to_transformers_at_every_node():
    rng = np.random.default_rng(0)
    made, tree = sampler(rng, EACH)
    logits = rng.normal(size=(ROWS, NODES, V)).astype(np.float32)
    got, changed = np.asarray(penalised(made, tree, jnp.asarray(logits))), np.zeros(ROWS)
    for row, options in enumerate(EACH):
        for node, text in texts(made, tree, row):
            want = transformers_logits(options, text, int(BEGIN[row]), int(LENGTHS[row]) + 2, logits[row, node])
            np.testing.assert_allclose(got[row, node], want, rtol=1e-5, atol=1e-6, err_msg=f"{options} after {text}")
            changed[row] += (want != logits[row, node]).sum()
    assert changed[0] == 0 and (changed[1:] > 0).all()


def test_dead_rows_and_unused_columns_change_nothing():
    made, tree = sampler(np.random.default_rng(1), EACH, live=False)
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(ROWS, NODES, V)), jnp.float32)
    np.testing.assert_array_equal(penalised(made, tree, logits), logits)


def test_forms():
    """Widths are powers of two that hold every row's lists; rows that do not fit a form are refused."""
    rows = [SamplingOptions(**own) for own in EACH]
    form = dict(form_of(rows))
    assert (form["logit_bias"], form["bad_words_ids"], form["suppress_tokens"]) == ((4,), (16, 8), (4,))
    assert "typical_p" not in form and SamplingArrays.of_rows(rows, tuple(form.items())).form == tuple(form.items())
    for bare in (rows[6], rows[8]):
        with pytest.raises(ValueError, match="no column that holds (bad_words_ids|suppress_tokens)"):
            SamplingArrays.of_rows([bare], form_of([SamplingOptions(suppress_tokens=[1])]))
    with pytest.raises(ValueError, match="suppress_tokens of 3 rows needs as many values"):
        SamplingArrays.make(3, suppress_tokens=[[1]])
    assert SamplingArrays.make(2, suppress_tokens=[[1], []])["suppress_tokens"].tolist() == [[1], [-1]]


DRY = [
    {"dry_multiplier": 0.8},
    {"dry_multiplier": 0.8, "dry_base": 1.2, "dry_allowed_length": 1},
    {"dry_multiplier": 2.0, "dry_allowed_length": 3},
    {"dry_multiplier": 1.0, "dry_allowed_length": 1, "dry_sequence_breakers": [2]},
]


def test_dry_is_its_definition_at_every_node():
    rng, rows = np.random.default_rng(3), DRY * 3
    made, tree = sampler(rng, rows, np.resize([10, 9, 8, 10, 1], len(rows)))
    made = dataclasses.replace(made, tokens=(made.tokens % 3).at[0].set(0))  # texts that repeat
    logits = rng.normal(size=(len(rows), NODES, V)).astype(np.float32)
    got, most = np.asarray(penalised(made, tree, jnp.asarray(logits))), 0.0
    for row, options in enumerate(rows):
        for node, text in texts(made, tree, row):
            want = oracle.dry(logits[row, node], text, **{name[4:]: value for name, value in options.items()})
            np.testing.assert_allclose(got[row, node], want, rtol=1e-5, atol=1e-5, err_msg=f"{options} after {text}")
            most = max(most, (logits[row, node] - want).max())
    assert most > 5  # of long repetitions too


@pytest.mark.parametrize(
    ("text", "breakers", "penalties"),
    [
        ([1, 2, 3, 4, 1, 2, 3], [], {4: 1.4}),
        ([1, 2, 3, 4, 1, 2, 3], [2], {}),
        ([1, 2, 3, 4, 1, 2, 3], [4], {}),
        ([7, 1, 2, 3, 9, 2, 3], [], {9: 0.8}),
        ([5] * 300, [], {5: 370609309139.9}),
        ([1, 2] * 150, [], {1: 370609309139.9}),
    ],
    ids=str,
)
def test_dry_is_the_source_of_it(text, breakers, penalties):
    """What the class of text-generation-webui subtracts, at a multiplier of 0.8."""
    params = SamplingArrays.make(1, dry_multiplier=0.8, dry_sequence_breakers=[breakers])
    made = Sampler(
        jax.random.split(jax.random.key(0), 1), jnp.asarray([text]), jnp.asarray([len(text)]), jnp.ones(1, bool), params
    )
    got = np.asarray(made.penalised(jnp.zeros((1, 1, V))))[0, 0]
    np.testing.assert_allclose(-got, [penalties.get(token, 0) for token in range(V)], rtol=1e-5)
    np.testing.assert_allclose(got, oracle.dry(np.zeros(V), text, 0.8, sequence_breakers=breakers), rtol=1e-5)


XTC = [
    (0.099, (), (), {0, 1, 2}), (0.099, (0,), (), set()), (0.099, (), (0, -1), set()), (0.099, (3,), (), {0, 1, 2}),
    (0.2, (), (), {0}), (0.04, (), (3,), set()),
]  # fmt: skip


@pytest.mark.parametrize(("threshold", "special", "eos", "removed"), XTC, ids=str)
def test_xtc_is_the_source_of_it(threshold, special, eos, removed):
    """What the class of text-generation-webui removes where its coin lets it, by tokens that must not be removed."""
    scores = np.log(np.float32([0.4, 0.3, 0.15, 0.1, 0.05]))
    params = SamplingArrays.make(
        1, 1.0, xtc_probability=1.0, xtc_threshold=threshold, xtc_special_tokens=[list(special)]
    )
    made = Sampler(
        jax.random.split(jax.random.key(0), 1), jnp.zeros((1, 4), jnp.int32), jnp.ones(1, jnp.int32), jnp.ones(1, bool), params,
        eos=jnp.asarray([eos], jnp.int32) if eos else None,
    )  # fmt: skip
    got = np.asarray(made.warped(jnp.asarray(scores)[None, None]))[0, 0]
    assert {int(token) for token in np.flatnonzero(np.isneginf(got))} == removed
    np.testing.assert_array_equal(got, oracle.xtc(scores, threshold, {*special, *eos}))


def test_xtc_keeps_the_last_of_equal_ones():
    scores = np.log(np.float32([0.25, 0.25, 0.25, 0.25]))
    np.testing.assert_array_equal(oracle.xtc(scores, 0.1), [-np.inf] * 3 + [scores[3]])
    made = Sampler(
        jax.random.split(jax.random.key(0), 1), jnp.zeros((1, 4), jnp.int32), jnp.ones(1, jnp.int32), jnp.ones(1, bool),
        SamplingArrays.make(1, 1.0, xtc_probability=1.0),
    )  # fmt: skip
    np.testing.assert_array_equal(made.warped(jnp.asarray(scores)[None, None])[0, 0], oracle.xtc(scores, 0.1))


def test_xtc_is_its_definition_where_its_coin_says_so():
    rng = np.random.default_rng(4)
    rows = [{"xtc_probability": p, "xtc_threshold": t} for p in (0.5, 1.0, 0.0) for t in (0.05, 0.15, 0.6, 0.2)]
    rows[4]["xtc_special_tokens"] = [2, 7]
    made, tree = sampler(rng, rows)
    logits = 2 * rng.normal(size=(len(rows), NODES, V)).astype(np.float32)
    warped = jax.jit(lambda made, tree, logits: made.warped(logits, tree.path_tokens))
    got, acted = np.asarray(warped(made, tree, jnp.asarray(logits))), np.zeros((3, 2), int)
    coins = np.asarray(uniform(made.key, jnp.broadcast_to(jnp.arange(20), (len(rows), 20)), COIN))
    for row, options in enumerate(rows):
        for node, text in texts(made, tree, row):
            acts = coins[row, len(text)] < options["xtc_probability"]
            special = (*EOS, *options.get("xtc_special_tokens", ()))
            want = oracle.xtc(logits[row, node], options["xtc_threshold"], special) if acts else logits[row, node]
            np.testing.assert_array_equal(got[row, node], want, err_msg=f"{options} after {text}")
            acted[row // 4, int(acts)] += 1
    assert (acted[0] > 0).all() and acted[1, 0] == 0 and acted[2, 1] == 0
