"""Models with an encoder: sources beside texts, in every decoder, and prompts of a user that are sources."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.source_lm import KINDS, Reads, reads_params
from support.table_lm import Table

import specjax
from specjax import cli, models
from specjax import decoder as decoding
from specjax.draft import (
    Aded,
    DiffusionDrafter,
    InputGuided,
    Jacobi,
    Lookahead,
    ModelDrafter,
    NgramMod,
    NoDrafter,
    Online,
    PromptLookup,
    Sam,
    Stand,
    Suffix,
    TokenRecycling,
    adaptive,
    fuse,
)
from specjax.draft.prompt_lookup import lookup
from specjax.lm import Source
from specjax.models import Model
from specjax.models.contrastive import Contrastive
from specjax.models.guided import Guided, GuidedBy
from specjax.models.tabular import TabularLM
from specjax.models.token_ids import several
from specjax.prompts import Prompts
from specjax.search.entropy_adaptive import EntropyAdaptiveDecoder
from specjax.serve.engine import Engine

LM, EOS, START, NEW = Reads(), 2, 0, 20
PARAMS = reads_params()
SOURCES = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [7, 8, 9], [10, 11, 12, 13, 14, 15, 16, 3, 1, 4, 1, 5, 9, 2, 6], [20]]
LOOKUP = PromptLookup(length=3, min_ngram=1)
OPTIONS = {
    "temperature": [0.0, 0.9, 0.0, 0.7],
    "forced_bos_token_id": [-1, 5, -1, 6],
    "forced_eos_token_id": [-1, -1, 3, EOS],
    "begin_suppress_tokens": [[], [9, 5], [18, 14], [20]],
}
DRAFTERS = {
    "prompt_lookup": LOOKUP,
    "suffix": Suffix(3, span=6, matches=4, pieces=4, piece=8),
    "sam": Sam(3, min_match=1),
    "ngram_mod": NgramMod(3, ngram=1, slots=256),
    "aded": Aded(paths=3, length=3, rounds=6, k=3, slots=256),
    "jacobi": Jacobi(3),
    "lookahead": Lookahead(window=2, guesses=2, nodes=5),
    "stand": Stand(tree="2 | 1 1 | 1", k=4, slots=256),
    "token_recycling": TokenRecycling(k=4, tree="2 | 1 1"),
    "draft": ModelDrafter(LM),
    "fused": fuse(ModelDrafter(LM), LOOKUP),
    "adaptive": adaptive(ModelDrafter(LM), Online(), 3),
}
OWN = {
    "draft": PARAMS,
    "fused": (PARAMS, None),
    "adaptive": {"drafter": PARAMS, "rule": None},
}


def model(lm=LM, **fields):
    return Model(lm, PARAMS, starts=(START,), eos_ids=(EOS,), **fields)


def prompts(rows=range(4)):
    own = {name: [values[row] for row in rows] for name, values in OPTIONS.items()}
    sources = [SOURCES[row] for row in rows]
    return Prompts.of([[START]] * len(sources), NEW, source=sources, eos=[EOS], seed=3, **own)


def params_of(name):
    return {"target": PARAMS, "draft": OWN.get(name)}


def texts(state):
    tokens, length = jax.device_get((state.tokens, state.length))
    return [row[:count].tolist() for row, count in zip(tokens, length, strict=True)]


def run(decoder, given, params=None):
    params = params or params_of("none")
    return decoding.run(decoder, params, decoder.init(params, given, capacity=64))


@pytest.fixture(scope="module")
def plain():
    return texts(run(specjax.speculative(LM), prompts()))


def logits_after(source, last, position):
    """The model's definition in numpy."""
    tables = {name: np.asarray(table) for name, table in PARAMS.items()}
    kind = sum((token + 1) * (at + 1) for at, token in enumerate(source)) % KINDS
    logits = tables["last"][last] + tables["kind"][kind] + tables["place"][position % 4]
    copied = {after for token, after in itertools.pairwise(source) if token == last}
    return logits + LM.copies * np.isin(np.arange(LM.vocab_size), [*copied])


def greedy(source, count=NEW):
    text = [START]
    while len(text) <= count and text[-1] != EOS:
        text.append(int(np.argmax(logits_after(source, text[-1], len(text) - 1))))
    return text[1:]


def test_plain_text_is_the_models_and_forced_tokens_stand_where_they_must(plain):
    assert plain[0] == [START, *greedy(SOURCES[0])]
    assert plain[1][1] == 5 and plain[3][1] == 6 and plain[2][-1] == 3 and plain[2][1] not in (18, 14)
    assert 20 not in plain[3][2:3] and len(plain[2]) == NEW + 1


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "prompt_lookup" else pytest.mark.slow) for name in DRAFTERS]
)
def test_every_drafter_keeps_the_text(plain, name):
    """Ragged sources in one batch, and a row that is filled again while others run."""
    decoder, params = specjax.speculative(LM, DRAFTERS[name]), params_of(name)
    state = decoder.init(params, prompts(), capacity=64)
    state = decoding.run(decoder, params, state, 2)
    again = decoding.insert(decoder, params, state, np.asarray([1]), prompts([1]))
    done = decoding.run(decoder, params, again)
    assert texts(done) == plain
    assert np.asarray(done.stats.steps).sum() < sum(len(text) - 1 for text in plain)
    if name == "prompt_lookup":
        assert [texts(run(decoder, prompts([row] * 4)))[0] for row in (1, 2)] == plain[1:3]


@pytest.mark.slow
def test_an_input_that_is_copied_takes_few_steps():
    """A model that copies has the source's tokens from where it enters the source to the last; each stands there once."""
    lm = dataclasses.replace(LM, copies=100.0)
    source = [int(token) for token in np.random.default_rng(1).permutation(np.arange(3, LM.vocab_size))]
    given = Prompts.of([[START]] * 2, NEW, source=[source, source[::-1]], eos=[EOS], seed=3, temperature=[0.0, 0.9])
    plain, copied = (run(specjax.speculative(lm, drafter), given) for drafter in (NoDrafter(), InputGuided(5)))
    assert texts(copied) == texts(plain)
    rights, steps = np.asarray(copied.stats.accepted)[:, 5], np.asarray(copied.stats.steps)
    assert rights.sum() and (steps < np.asarray(plain.stats.steps)).all()


def test_a_look_up_finds_the_source_and_stops_at_its_end():
    source = jnp.asarray([[5, 6, 7, 8, -1, -1], [5, 6, 7, 6, 9, 6]])
    text = jnp.asarray([[1, 6, 0], [1, 6, 0]])
    joined = jnp.concatenate([jnp.pad(source, ((0, 0), (0, 1)), constant_values=-1), text], axis=1)
    start, matched = lookup(joined, jnp.asarray([9, 9]), 3, 1, 7)
    assert start.tolist() == [2, 4] and matched.tolist() == [1, 1]  # of equal ones the latest that goes on
    view = specjax.draft.base.View(text, jnp.asarray([2, 2]), jnp.ones(2, bool), None, 4, source=source)
    tree = PromptLookup(length=4, min_ngram=1, factor=9.0).propose({}, (), view, None).tree
    assert tree.tokens[0].tolist() == [6, 7, 8, -1, -1] and tree.valid[0].tolist() == [True] * 3 + [False] * 2
    assert tree.tokens[1, :3].tolist() == [6, 9, 6] and tree.valid[1].tolist() == [True] * 3 + [False] * 2


def test_what_tables_learn_of_a_source():
    """The pool and the memory hold the source's n-grams before any text."""
    tokens = jnp.asarray([[3, 4, 5, 6, -1]])
    drafter = Lookahead(window=2, guesses=2, nodes=5).bind(LM)
    read = lambda drafter: jax.jit(lambda tokens: drafter.encode({}, drafter.init({}, 1, 8), None, tokens))(tokens)
    pool = read(drafter).pool
    assert pool[0, 3, 0].tolist() == [3, 4, 5, 6] and int((pool >= 0).sum()) == 4
    drafter = DRAFTERS["stand"].bind(LM)
    memory = read(drafter)
    assert {tuple(key) for key in memory.keys.tolist()} >= {(3, 4, 5), (-1, 4, 5), (-1, -1, 5)}
    assert int((memory.seen > 0).sum()) == 6 and memory.tail.tolist() == [[-1] * 3]


@pytest.mark.slow
def test_a_search_finds_the_best_of_all_texts():
    """So many beams that nothing is left out, for two sources at once; `fork` leaves what belongs to a source."""
    lm = Reads(vocab_size=4, copies=2.0)
    tables = reads_params(1, lm)
    sources = [[1, 3, 1], [2]]
    own = Model(lm, tables, starts=(START,))
    records = specjax.generate(own, sources, decode="beam:num_beams=16,length_penalty=0", max_new_tokens=3)
    for source, record in zip(sources, records, strict=True):
        every = [list(text) for text in itertools.product(range(4), repeat=3)]
        scores = [score.logprob for score in specjax.score(own, [source] * len(every), every)]
        assert record.tokens == every[int(np.argmax(scores))]
        np.testing.assert_allclose(record.score, max(scores), rtol=1e-5)


@pytest.mark.slow
def test_two_models_that_both_read_the_source(plain):
    """Entropy-adaptive decoding and contrastive decoding with the model itself write its own text."""
    params = {"target": PARAMS, "small": PARAMS}
    decoder = EntropyAdaptiveDecoder(LM, LM)
    assert texts(run(decoder, prompts(), params)) == plain
    contrasted = Contrastive(LM, LM, alpha=0.01)
    params = {"target": {"lm": PARAMS, "amateur": PARAMS}, "draft": None}
    assert texts(run(specjax.speculative(contrasted, LOOKUP), prompts([0]), params))[0] == plain[0]


@pytest.mark.slow
def test_a_guide_without_an_encoder_reads_the_text_alone():
    """As of a caption: what the text itself makes likely counts less, and the source is the condition; by a loop."""
    guide = TabularLM(LM.vocab_size)
    table = jax.device_get(guide.init(jax.random.key(1))["table"])
    want = [START]
    while len(want) <= NEW and want[-1] != EOS:
        own = jax.nn.log_softmax(logits_after(SOURCES[0], want[-1], len(want) - 1))
        want.append(int(np.argmax(2 * own - jax.nn.log_softmax(table[want[-1]]))))
    params = {"target": {"lm": PARAMS, "guide": {"table": jnp.asarray(table)}}, "draft": None}
    for drafter in (None, LOOKUP):
        found = run(specjax.speculative(GuidedBy(LM, 2.0, guide=guide), drafter), prompts([0]), params)
        assert texts(found)[0] == want
    assert want != [START, *greedy(SOURCES[0])]


def test_prompts_of_a_user_are_sources():
    """Records keep them; log-probabilities and scores of texts agree; features say the same as their tokens."""
    records = specjax.generate(model(), SOURCES[:3], drafter="prompt_lookup:length=3,min_ngram=1", max_new_tokens=NEW)
    assert [record.tokens for record in records] == [greedy(source) for source in SOURCES[:3]]
    assert [record.prompt for record in records] == SOURCES[:3] and records[0].steps < NEW
    scores = specjax.score(model(), SOURCES[:2], [record.tokens[:6] for record in records[:2]])
    for source, score in zip(SOURCES, scores, strict=False):
        before = [START, *score.tokens]
        dists = [jax.nn.log_softmax(logits_after(source, last, at)) for at, last in enumerate(before[:-1])]
        wanted = [float(dist[token]) for dist, token in zip(dists, score.tokens, strict=True)]
        np.testing.assert_allclose(score.logprobs, wanted, rtol=1e-4, atol=1e-5)
        assert score.greedy


@pytest.mark.slow
def test_sources_of_features():
    frames = [np.eye(LM.vocab_size, dtype=np.float32)[source] for source in SOURCES[:2]]
    records = specjax.generate(model(Reads(features=True)), frames, drafter="none", max_new_tokens=NEW)
    assert [record.tokens for record in records] == [greedy(source) for source in SOURCES[:2]]
    again = specjax.generate(model(Reads(features=True)), frames[0], drafter="none", max_new_tokens=NEW)
    assert again == records[:1] and json.loads(json.dumps(dataclasses.asdict(again[0])))["prompt"].startswith(
        "features ["
    )
    assert len(several(np.zeros((2, 3, 4), np.float32))) == 2
    assert (Source.of(frames).inputs.shape, Source.of(frames).is_tokens) == ((2, 11, LM.vocab_size), False)


@pytest.mark.slow
def test_completions_and_refilled_rows_are_those_of_each_prompt_alone():
    how = {"temperature": 1.0, "num_return_sequences": 3, "max_new_tokens": 8, "drafter": "prompt_lookup:length=3"}
    together = specjax.generate(model(), SOURCES, batch_size=2, **how)
    alone = [record for source in SOURCES for record in specjax.generate(model(), [source], batch_size=3, **how)]
    assert [record.tokens for record in together] == [record.tokens for record in alone]
    assert len({tuple(record.tokens) for record in together}) > len(SOURCES)
    other = Prompts.of([[START]] * 2, 1, source=[[3], [4]])
    keys = jax.random.key_data(other.keys).tolist()
    assert keys[0] != keys[1] and keys[0] == jax.random.key_data(Prompts.of([[3, START]], 1).keys).tolist()[0]


class Letters:
    """A tokenizer of lower-case letters; id 1 ends a source, as T5's does."""

    bos_token_id = None

    def encode(self, text, add_special_tokens=True, verbose=True):
        return [ord(letter) - 94 for letter in text] + [1] * add_special_tokens

    def decode(self, ids, skip_special_tokens=False, clean_up_tokenization_spaces=False):
        return "".join(chr(token + 94) if token > 2 else "" if skip_special_tokens else "<s>" for token in ids)


@pytest.mark.slow
def test_text_is_read_with_special_tokens_and_written_without_the_prompt(tmp_path, monkeypatch):
    """In one call, in a stream and in a job."""
    own = model(tokenizer=Letters(), path=specjax.load("tiny").path)
    record = specjax.generate(own, "abcde", max_new_tokens=8, drafter="none")[0]
    assert record.tokens == greedy([*range(3, 8), 1], 8) and record.text == Letters().decode(record.tokens, True)
    stream = Engine(own, drafter="none").stream("abcde", max_new_tokens=8)
    assert "".join(stream) == record.text
    scores = specjax.score(own, "abcde", ["bc", "de"])
    assert scores[0].tokens == [4, 5] and scores[0].logprob is not None
    (tmp_path / "in.jsonl").write_text(
        '{"prompt": "abcde"}\n{"prompt": "abcd", "suffix": "x"}\n{"prompt": [3, 4, 1]}\n'
    )
    monkeypatch.setattr(models, "load", lambda *args, **how: own)
    out = tmp_path / "out.jsonl"
    job = ["generate", "--input", str(tmp_path / "in.jsonl"), "--output", str(out), "--drafter", "none"]
    assert cli.main([*job, "--max-new-tokens", "8"]) == 1  # the second line has an error
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert lines[0]["text"] == record.text and "cannot fill in before a suffix" in lines[1]["error"]
    assert lines[2]["tokens"] == greedy([3, 4, 1], 8)


def one(source, **fields):
    return dataclasses.replace(Prompts.of([[START]], 4), source=source, **fields)


@pytest.mark.parametrize(
    ("given", "said"),
    (
        (one(None), "the target has an encoder, and the prompts have no source"),
        (one(Source.of([[3]], 65)), "room for 65 tokens, which a capacity of 64 does not hold"),
        (one(Source.of([[]], 2)), "the source of prompt 0 is said to have 0 tokens"),
        (one(Source(np.zeros((2, 3), np.int32), np.ones(2, np.int32))), r"give token ids \[1, S\]"),
        (one(Source(np.zeros((1, 3), np.float32), np.ones(1, np.int32))), "not float32"),
    ),
)
def test_sources_that_do_not_fit(given, said):
    with pytest.raises(ValueError, match=said):
        specjax.speculative(LM).init(params_of("none"), given, capacity=64)


def test_what_models_with_an_encoder_refuse():
    table = Table()
    refused = {
        "the prompts have a source, and the target has no encoder": lambda: specjax.speculative(table).init(
            {"target": jnp.zeros((4, 4, 4)), "draft": None}, one(Source.of([[3]])), capacity=64
        ),
        "the target has an encoder and the draft model has none": lambda: ModelDrafter(Table(24)).bind(LM),
        "the draft model has an encoder and the target has none": lambda: ModelDrafter(LM).bind(Table(24)),
        "the target has an encoder and the diffusion model has none": lambda: DiffusionDrafter(Table(24), 0).bind(LM),
        "guidance leaves out the prompt": lambda: Guided(LM, 1.5),
        "guidance leaves out the prompt, and this": lambda: GuidedBy(LM, 1.5, guide=LM),
        "the target has an encoder and the amateur has none": lambda: Contrastive(LM, Table(24)),
        "share no prefix": lambda: specjax.speculative(LM).read_prefix(params_of("none"), None, jnp.zeros(3, jnp.int32)),
        "nothing says how its texts begin": lambda: Engine(Model(LM, PARAMS)),
        "leave starts out": lambda: Engine(Model(table, PARAMS, starts=(0,))),
        "goes back in one text": lambda: Engine(model(), "self_agreement"),
        "leave the shared prefix out": lambda: Engine(model()).shared_prefix([]),
        "gives prompts no log-probabilities": lambda: specjax.generate(model(), [[3]], logprobs="prompt"),
        "reads tokens, not features": lambda: specjax.generate(model(), np.ones((3, 4), np.float32)),
        "give each prompt, from Python, as an array": lambda: specjax.generate(model(Reads(features=True)), [[3]]),
        "outside the vocabulary of 24 tokens": lambda: Engine(model()).request([3], forced_bos_token_id=30),
        "of features with one F": lambda: Source.of([[3], np.ones((2, 2))]),
        "give a source per prompt": lambda: Prompts.of([[0]], 1, source=[[3], [4]]),
    }  # fmt: skip
    for said, make in refused.items():
        with pytest.raises(ValueError, match=said):
            make()


def test_programs_without_a_source_have_none():
    """A target without an encoder sees no source: neither in its programs' inputs nor in what drafters read."""
    plain = specjax.speculative(Table(24), NoDrafter())
    given = Prompts.of([[1, 2]], 4)
    assert given.source is None and not plain.encodes
    params = {"target": jnp.zeros((24, 24, 24)), "draft": None}
    state = plain.init(params, given, capacity=64)
    assert plain._begun(state)[0].source is None
