"""Superposed decoding: against a slow reference, greedy decoding where there is one draft, and whole passes over mixtures."""

import collections
import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import MIXED, Rows, params, same, start
from support.conformance import texts as new_tokens
from support.mesh_cases import SMALLER as TARGET

import specjax
from specjax import cli
from specjax import decoder as decoding
from specjax.draft.datastore import build
from specjax.lm import Block, Wants
from specjax.models.tabular import TabularLM
from specjax.search import Superposed, SuperposedSearch
from specjax.search.ngrams import WEIGHTS, shares
from specjax.serve.engine import Engine
from specjax.sharding import make_mesh
from specjax.state import Finish

VOCAB, EOS = 12, (3, 7)
CHAIN = TabularLM(VOCAB)
TABLE = 0.5 * jax.random.normal(jax.random.key(4), (VOCAB, VOCAB))
TABLE = TABLE + jax.nn.one_hot((5 * jnp.arange(VOCAB) + 1) % VOCAB, VOCAB)
"""A wandering distribution: where it settles, texts that differ in their order alone are worth the same."""
PROMPTS = (4, 1, 5, 1, 2, 8), (2,), (9, 9, 4, 10)
ROWS = Rows(PROMPTS, ("a", "b", "c"), ({},) * 3, 9)
DOCUMENTS = [np.random.default_rng(seed).integers(0, VOCAB - 1, 400).tolist() for seed in range(3)]
GREEDY = dataclasses.replace(MIXED, options=({},) * 8, new_tokens=12)
WHOLE = params("none")["target"]
MODEL = {"target": {**WHOLE, "layers": {0: WHOLE["layers"][0]}}}


def store(documents=DOCUMENTS):
    return jax.tree.map(jnp.asarray, build(documents, VOCAB))


def searched(search, rows=ROWS, model=None, **options):
    model = {"target": {"table": TABLE}, "ngrams": store()} if model is None else model
    state = decoding.run(search, model, start(search, rows, model=model, **options))
    return ranked(state), state


def ranked(state):
    """All texts of every row, the best first, and their scores."""
    found, begin = jax.device_get(state.found), np.asarray(state.prompt_length)
    rows = []
    for row, scores in enumerate(found.scores):
        order = [at for at in np.argsort(-scores, kind="stable") if scores[at] > -np.inf]
        cut = lambda at, row=row: found.tokens[row, at, begin[row] : found.length[row, at]].tolist()
        rows.append([(cut(at), float(scores[at])) for at in order])
    return rows


@functools.cache
def counted():
    """How often each token stood after each run of tokens, in the way of a datastore: what ends a document ends a
    context."""
    behind, after = collections.Counter(), collections.Counter()
    for text in DOCUMENTS:
        for at in range(1, len(text)):
            for size in range(1, min(at, 5) + 1):
                behind[tuple(text[at - size : at])] += 1
                after[tuple(text[at - size : at]), text[at]] += at < len(text) - 1
    return behind, after


def share_of(text, token):
    behind, after = counted()
    runs = [(weight, tuple(text[-size:])) for size, weight in enumerate(WEIGHTS, 1) if size <= len(text)]
    return sum(weight * after[run, token] / behind[run] for weight, run in runs if behind[run])


def reference(prompt, dist, *, drafts=3, kept=5, heat=0.6, alpha=0.0, new=9, eos=EOS):
    """Slow and to a row's limit. `dist` has logits `[V]` after inputs: (tokens, weights) of each place so far."""
    alive, found, read = [(list(prompt), 0.0)], [], [([token], [1.0]) for token in prompt[:-1]]
    for step in range(1, new + 1):
        weights = np.exp([score - alive[0][1] for _, score in alive])
        read.append(([text[-1] for text, _ in alive], weights / weights.sum()))
        z = np.asarray(dist(read), np.float64) / heat
        ids = np.argsort(-z, kind="stable")[:kept]
        log_p = z[ids] - np.logaddexp.reduce(z[ids])
        candidates = []
        for text, score in alive:
            gained = log_p
            if alpha:
                share = np.asarray([0.0 if token in eos else share_of(text, token) for token in ids])
                if share.any():
                    share = np.where(np.isin(ids, eos), sum(WEIGHTS) * np.exp(log_p), share)
                    with np.errstate(divide="ignore"):
                        gained = (1 - alpha) * log_p + alpha * np.log(share)
                else:
                    gained = (1 - alpha) * log_p - 200
            candidates += [([*text, token], score + more) for token, more in zip(ids.tolist(), gained, strict=True)]
        candidates = sorted(candidates, key=lambda pair: -pair[1])[: (1 + len(eos)) * drafts]
        ended = [(text, score / step) for text, score in candidates if text[-1] in eos and score > -np.inf]
        found = sorted(found + ended, key=lambda pair: -pair[1])[:drafts]
        alive = [pair for pair in candidates if pair[0][-1] not in eos and pair[1] > -np.inf][:drafts]
        if not alive:
            break
    found += [(text, score / new) for text, score in alive]
    return [(text[len(prompt) :], score) for text, score in sorted(found, key=lambda pair: -pair[1])[:drafts]]


def by_table(read):
    tokens, weights = read[-1]
    return np.asarray(weights) @ np.asarray(TABLE, np.float64)[list(tokens)]


def agree(got, wanted):
    for row, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
        assert [text for text, _ in mine] == [text for text, _ in theirs], row
        np.testing.assert_allclose([score for _, score in mine], [score for _, score in theirs], rtol=2e-4, atol=2e-5)


def settings(alpha):
    own = Superposed(3, 5, 0.6)
    return dataclasses.replace(own, superposed_alpha=alpha, superposed_ngrams="counted") if alpha else own


@dataclasses.dataclass(frozen=True)
class Even(SuperposedSearch):
    """A fault: all drafts weigh as much in what is read next."""

    def _kept(self, state, logits, length, live):
        last = jnp.take_along_axis(state.beams.tokens, (length - 1)[:, None, None], axis=2)[:, :, 0]
        grows = (state.beams.scores > -jnp.inf)[..., None]
        logits = jnp.where(grows, TABLE[last], 0).sum(axis=1) / grows.sum(axis=1)
        return super()._kept(state, logits, length, live)


@pytest.mark.parametrize("alpha", (0.0, 0.54))
def test_against_a_slow_reference(alpha):
    """All texts of ragged rows and their scores; a row that is done before its limit has what it would have there."""
    got, state = searched(SuperposedSearch(CHAIN, settings(alpha)), eos=EOS)
    wanted = [reference(prompt, by_table, alpha=alpha) for prompt in PROMPTS]
    agree(got, wanted)
    ends = [text[-1] in EOS for row in got for text, _ in row]
    assert {len(row) for row in got} == {3} and any(ends)
    assert new_tokens(state) == [row[0][0] for row in got]
    if not alpha:
        with pytest.raises(AssertionError):
            agree(searched(Even(CHAIN, settings(alpha)), eos=EOS)[0], wanted)


def test_it_ends_when_nothing_can_become_better():
    """Long before a far limit, and with what it would have found there."""
    far, often = dataclasses.replace(ROWS, new_tokens=40), tuple(range(0, VOCAB, 2))
    search = SuperposedSearch(CHAIN, Superposed(superposed_temperature=0.2))
    got, state = searched(search, far, eos=often)
    agree(got, [reference(prompt, by_table, new=40, heat=0.2, kept=9, eos=often) for prompt in PROMPTS])
    assert (np.asarray(state.stats.steps) < 40).any() and np.isfinite(state.beams.scores).all()


def test_shares_of_next_tokens():
    """By counting, of contexts that are shorter than the longest, that never came, and of tokens that never did."""
    rng = np.random.default_rng(0)
    texts = [
        DOCUMENTS[0][:40],
        DOCUMENTS[1][5:9],
        [3],
        [5, 11],
        [1, 1, 1, 1, 1, 1, 1],
        DOCUMENTS[2][-6:],
        rng.integers(0, VOCAB, 9).tolist(),
    ]
    tokens = np.zeros((len(texts), 48), np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
        row[len(text) :] = 5
    asked = np.broadcast_to(np.arange(VOCAB), (len(texts), VOCAB))
    got = jax.jit(shares)(store(), jnp.asarray(tokens), jnp.asarray([len(text) for text in texts]), jnp.asarray(asked))
    wanted = [[share_of(text, token) for token in range(VOCAB)] for text in texts]
    np.testing.assert_allclose(got, wanted, atol=1e-6)
    sums = np.asarray(got).sum(axis=1)
    assert (sums <= sum(WEIGHTS) + 1e-6).all() and sums.max() > 0.4 and (np.asarray(got) == 0).any()


def plain(rows):
    decoder, model = specjax.speculative(TARGET), MODEL | {"draft": None}
    return new_tokens(decoding.run(decoder, model, start(decoder, rows, model=model)))


@pytest.mark.slow
def test_one_draft_of_one_token_is_greedy_decoding():
    """Of more drafts the others have nothing to say where one token goes on."""
    wanted = plain(GREEDY)
    for drafts in (1, 3):
        search = SuperposedSearch(TARGET, Superposed(drafts, superposed_tokens=1))
        got, state = searched(search, GREEDY, MODEL)
        same(new_tokens(state), wanted)
        assert [len(row) for row in got] == [1] * 8
    other = new_tokens(searched(SuperposedSearch(TARGET, Superposed(superposed_temperature=1.0)), GREEDY, MODEL)[1])
    assert other != wanted


@pytest.mark.slow
def test_the_cache_is_of_the_mixtures():
    """The reference with a model that reads all places anew, in one pass without a cache, as vectors."""
    table, size = np.asarray(WHOLE["embed"]["embedding"]), 40

    @jax.jit
    def whole(vectors):
        at, zero = jnp.arange(size)[None], jnp.zeros((1,), jnp.int32)
        block = Block(jnp.zeros_like(at), at, zero, None, vectors[None], jnp.ones((1, size), bool))
        return TARGET(MODEL["target"], block, None, wants=Wants(logits=True)).logits[0]

    def dist(read):
        vectors = np.stack([np.asarray(weights) @ table[list(tokens)] for tokens, weights in read])
        return np.asarray(whole(np.pad(vectors, ((0, size - len(read)), (0, 0))).astype(np.float32)))[len(read) - 1]

    rows = dataclasses.replace(GREEDY, new_tokens=6)
    got, _ = searched(SuperposedSearch(TARGET, Superposed(superposed_temperature=1.0)), rows, MODEL)
    same_dist = functools.partial(reference, dist=dist, kept=9, heat=1.0, new=6, eos=())
    agree([got[row] for row in (1, 2)], [same_dist(rows.prompts[row]) for row in (1, 2)])


@pytest.mark.slow
def test_warpers_read_what_each_draft_says():
    """A penalty on what its own text has: the reference's distribution is then each draft's, so one draft is
    compared."""
    rows = dataclasses.replace(GREEDY, options=({"repetition_penalty": 1.4},) * 8)
    same(new_tokens(searched(SuperposedSearch(TARGET, Superposed(1, 1)), rows, MODEL)[1]), plain(rows))
    assert new_tokens(searched(SuperposedSearch(TARGET, Superposed()), rows, MODEL)[1]) != new_tokens(
        searched(SuperposedSearch(TARGET, Superposed()), GREEDY, MODEL)[1]
    )


@pytest.mark.slow
def test_a_row_does_not_depend_on_the_others_nor_on_the_mesh():
    search = SuperposedSearch(TARGET, Superposed(superposed_temperature=1.0))
    together, _ = searched(search, GREEDY, MODEL, eos=(5, 9))
    for row in (0, 3):
        agree(searched(search, GREEDY.pick(row), MODEL, eos=(5, 9), among=GREEDY)[0][:1], [together[row]])
    on_mesh = dataclasses.replace(search, mesh=make_mesh("data=2,model=4"))
    placed = jax.device_put(MODEL, on_mesh.param_shardings(MODEL))
    agree(searched(on_mesh, GREEDY, placed, eos=(5, 9))[0], together)
    with_store = SuperposedSearch(
        CHAIN, Superposed(superposed_ngrams="counted", superposed_temperature=1.0), on_mesh.mesh
    )
    model = {"target": {"table": TABLE}, "ngrams": store()}
    rows = Rows((*PROMPTS, PROMPTS[0]), tuple("abcd"), ({},) * 4, 9)
    alone = searched(dataclasses.replace(with_store, mesh=None), rows, model, eos=EOS)[0]
    agree(searched(with_store, rows, jax.device_put(model, with_store.param_shardings(model)), eos=EOS)[0], alone)


@pytest.mark.slow
def test_rows_are_refilled_and_nothing_is_traced_twice():
    model, own = (TARGET, MODEL["target"]), {"max_new_tokens": 9, "num_return_sequences": 3, "decode": "superposed"}
    prompts = [list(prompt) for prompt in MIXED.prompts[:5]]
    wanted = [record.tokens for prompt in prompts for record in specjax.generate(model, [prompt], batch_size=1, **own)]
    got = specjax.generate(model, prompts, batch_size=2, progress=False, **own)
    assert [record.tokens for record in got] == wanted and [record.sample for record in got] == [0, 1, 2] * 5
    engine = Engine(model, decode=Superposed(superposed_drafts=3))
    ask = lambda some: [engine.request(prompt, max_new_tokens=9) for prompt in some]
    first = list(engine.run(ask(prompts), batch_size=2))
    compiled = decoding.run_program._cache_size(), decoding.insert_program._cache_size()
    assert [record.tokens for record in engine.run(ask(prompts[::-1]), batch_size=2)] == [r.tokens for r in first[::-1]]
    assert (decoding.run_program._cache_size(), decoding.insert_program._cache_size()) == compiled


def test_what_is_no_number_fails_its_row():
    spoilt = {"target": {"table": TABLE.at[4].set(jnp.nan)}}
    rows = Rows(((1, 4), (4,)), ("a", "b"), ({}, {}), 3)
    state = searched(SuperposedSearch(CHAIN, Superposed()), rows, spoilt)[1]
    assert state.finish.tolist() == [Finish.ERROR] * 2 and new_tokens(state) == [[], []]


@pytest.mark.slow
def test_generate_and_the_command_line(capsys):
    """With the n-grams that are shipped."""
    own = {
        "decode": "superposed:superposed_drafts=3,superposed_ngrams=tiny-rest",
        "num_return_sequences": 3,
        "max_new_tokens": 8,
    }
    records = specjax.generate("tiny", "Once upon", **own)
    assert len({tuple(record.tokens) for record in records}) == 3
    assert records[0].score >= records[1].score >= records[2].score
    words = [word for name, value in own.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert cli.main(["generate", "--model", "tiny", *words, "--json", "Once upon"]) == 0
    said = capsys.readouterr()
    lines = [json.loads(line) for line in said.out.splitlines()]
    assert [line["tokens"] for line in lines] == [record.tokens for record in records]
    assert "a step that reads all 3 drafts as one" in said.err


REFUSED = (
    ({"temperature": 0.5}, "superposed decoding draws no token: leave temperature out"),
    ({"drafter": "prompt_lookup"}, "leave drafter out"),
    ({"decode": "superposed:num_beams=2"}, "decode 'superposed' has no field 'num_beams'; it has superposed_drafts"),
    ({"decode": "superposed:steer=(guidance:scale=2)"}, "decode 'superposed' has no field 'steer'"),
    (
        {"num_return_sequences": 3},
        "superposed decoding keeps only 2 texts: .* or lower num_return_sequences",
    ),
    ({"logprobs": True}, "records of superposed decoding carry a score"),
    ({"stop": "."}, "leave the stop strings out"),
    ({"decode": "superposed:superposed_alpha=0.2"}, "superposed_alpha is the share of n-grams: name a datastore"),
    ({"decode": "superposed:superposed_temperature=0"}, "superposed_temperature must be a finite number above 0"),
    ({"decode": "superposed:superposed_drafts=2,superposed_tokens=0"}, "must be whole numbers from 1 on, got 2 and 0"),
    ({"decode": "superposed:superposed_ngrams=nothing"}, "unknown datastore 'nothing'"),
    ({"superposed_tokens": 3}, "it is in decode here, such as superposed:superposed_tokens="),
    ({"model": "tiny-diffusion"}, "a diffusion model, and superposed decoding writes from left to right"),
)


@pytest.mark.parametrize(("options", "said"), REFUSED, ids=lambda case: str(case)[:60])
def test_what_it_does_not_go_with(options, said):
    with pytest.raises((ValueError, TypeError), match=said):
        specjax.generate(**{"model": "tiny", "prompts": ["a"], "decode": Superposed(2), **options})


def test_it_is_listed(capsys):
    assert cli.main(["searches"]) == 0
    said = capsys.readouterr().out
    assert (
        "\nsuperposed" in said
        and "    superposed:superposed_drafts=3,superposed_tokens=9,superposed_temperature=0.06" in said
    )
