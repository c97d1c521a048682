"""DiffuSpec: its search against enumeration, its causal model against counts and an ARPA file, its rule against the paper's."""

import dataclasses
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import CONFIG, DRAFT, TARGET, params
from support.head_start import proposed, running
from support.shapes import changed

from specjax import models
from specjax.assembly import registry
from specjax.draft import DiffuSpec
from specjax.draft.datastore import build
from specjax.draft.diffuspec import DiffuSpecDraft
from specjax.draft.heads.datastore import save_datastore
from specjax.draft.heads.trigrams import read_arpa
from specjax.draft.lattice import best_path, lattice
from specjax.draft.trigrams import counted, in_tables, in_text
from specjax.models import Masked
from specjax.models.errors import ModelError
from specjax.reference import diffuspec as oracle

V, K, MASS, MOST = 7, 4, 0.7, 4
ENDS = ((), (5,), (5, 2), (0,))
LENGTHS = (4, 4, 3, 2)


def distributions(seed):
    """Log-probabilities `[4, K, V]` of four rows."""
    return np.log(np.random.default_rng(seed).dirichlet(np.full(V, 0.4), (4, K))).astype(np.float32)


CAUSAL = np.log(np.random.default_rng(9).dirichlet(np.full(V, 0.5), (V + 1, V + 1))).astype(np.float32)
CONTEXT = ((-1, 3), (4, 4), (0, 1), (6, 2))


@jax.jit
def made(log_p):
    eos = jnp.asarray([[*ends, -1, -1][:2] for ends in ENDS])
    return lattice(log_p, eos, jnp.asarray(LENGTHS), MASS, MOST)


def search(beams, weight):
    causal = lambda context, tokens: jnp.asarray(CAUSAL)[context[:, :, :1], context[:, :, 1:], tokens[:, None]]
    return jax.jit(lambda given: best_path(given, jnp.asarray(CONTEXT), causal, beams, weight))


def sets(log_p, row):
    """A row's candidates by the oracle."""
    many, _ = oracle.slots(log_p[row], ENDS[row], LENGTHS[row])
    return [oracle.candidates(slot.tolist(), ENDS[row], MASS, MOST) for slot in log_p[row][:many]]


def causal_of(row):
    return lambda path, token: float(CAUSAL[((*CONTEXT[row], *path)[-2], (*CONTEXT[row], *path)[-1])][token])


def test_candidates_are_the_smallest_sets_and_an_end_of_text():
    stopped = 0
    for seed in range(20):
        log_p = distributions(seed)
        given = jax.tree.map(np.asarray, made(log_p))
        for row in range(4):
            many, generated = oracle.slots(log_p[row], ENDS[row], LENGTHS[row])
            assert (given.slots[row], given.generated[row]) == (many, generated)
            stopped += many < LENGTHS[row]
            for slot, want in enumerate(sets(log_p, row)):
                real = given.log_p[row, slot] > -np.inf
                got = dict(zip(given.tokens[row, slot][real].tolist(), given.log_p[row, slot][real], strict=True))
                assert got == pytest.approx(want) and real.sum() == len(want)
                assert set(given.tokens[row, slot][real & given.ends[row, slot]].tolist()) == {*ENDS[row]} & {*want}
    assert stopped


def test_a_wide_beam_finds_the_best_of_all_paths_and_a_narrow_one_what_is_left_of_it():
    """Against every path, and against a beam of three by lists."""
    wide, narrow, ended, missed = search(500, 0.5), search(3, 0.5), 0, 0
    for seed in range(12):
        log_p = distributions(seed)
        (all_paths, _), (few, many) = wide(made(log_p)), narrow(made(log_p))
        for row in range(4):
            rows, causal = sets(log_p, row), causal_of(row)
            worth = lambda path, rows=rows, causal=causal: oracle.worth(path, rows, causal, 0.5)
            best = max(oracle.paths(rows, ENDS[row]), key=worth)
            assert tuple(token for token in all_paths[row].tolist() if token >= 0) == best
            want = oracle.beam(rows, ENDS[row], causal, 3, 0.5)
            assert few[row].tolist() == [*want, *[-1] * (K - len(want))] and many[row] == len(want)
            ended += len(want) < len(rows)
            missed += want != best
    assert ended and missed


def test_without_the_causal_model_and_in_a_beam_of_one_it_is_the_likeliest_tokens():
    log_p = distributions(0)
    path, _ = search(1, 1.0)(made(log_p))
    assert path[0].tolist() == log_p[0].argmax(axis=1).tolist()


def test_counts_in_a_text_and_tables_of_a_corpus_are_the_smoothed_counts():
    rng = np.random.default_rng(0)
    text = rng.integers(0, 4, (2, 30))
    contexts = [[-1, -1], [-1, 2], [0, 1], [3, 3], [1, 6]]
    size, after = (30, 17), list(range(7))
    args = jnp.asarray([contexts] * 2), jnp.asarray([after] * 2)
    got = jax.jit(in_text, static_argnums=(4, 5))(jnp.asarray(text), jnp.asarray(size), *args, V, 2.5)
    texts = [row[:end].tolist() for row, end in zip(text, size, strict=True)]
    store = build(texts, V)
    tables = jax.tree.map(jnp.asarray, counted(store["tokens"], V, 2.5))
    looked_up = jax.jit(in_tables)(tables, *args)[0]
    for at, context in enumerate(contexts):
        known = [token for token in context if token >= 0]
        for token in after:
            for row in range(2):
                want = oracle.chance(texts[row : row + 1], known, token, V, 2.5)
                assert float(got[row, at, token]) == pytest.approx(math.log(want), abs=1e-5)
            want = oracle.chance(texts, known, token, V, 2.5)
            assert float(looked_up[at, token]) == pytest.approx(math.log(want), abs=1e-5)


ARPA = """\\data\\
ngram 1=5
ngram 2=3
ngram 3=2

\\1-grams:
-1.5\t<unk>
-99\t<s>\t-0.4
-0.5\ta\t-0.25
-0.75\tb\t-0.125
-1.0\t</s>

\\2-grams:
-0.3\t<s> a\t-0.1
-0.25\tb a
-0.5\ta b\t-0.75

\\3-grams:
-0.125\t<s> a b
-0.0625\ta b a

\\end\\
"""


def test_an_arpa_file_is_a_back_off_model(tmp_path):
    """Known n-grams, one order less, two orders less, and a token that the file does not have; in decimal logarithms."""
    file = tmp_path / "own.arpa"
    file.write_text(ARPA)
    tables = jax.tree.map(jnp.asarray, read_arpa(file, {"a": 0, "b": 1, "c": 2}, 3))
    contexts = jnp.asarray([[[0, 1], [1, 0], [2, 1], [-1, 2]]])
    got = jax.jit(in_tables)(tables, contexts, jnp.asarray([[0, 1, 2]]))[0] / math.log(10)
    want = [
        [-0.0625, -0.75 - 0.125 - 0.75, -0.75 - 0.125 - 1.5],
        [-0.25 - 0.5, -0.5, -0.25 - 1.5],
        [-0.25, -0.125 - 0.75, -0.125 - 1.5],
        [-0.5, -0.75, -1.5],
    ]
    np.testing.assert_allclose(got, want, atol=1e-6)
    numbers = ARPA.replace("\ta", "\t0").replace(" a", " 0").replace("\tb", "\t1").replace(" b", " 1")
    file.write_text(numbers)
    again = read_arpa(file, {}, 3)
    assert all(np.array_equal(again[name], tables[name]) for name in tables)


@pytest.mark.parametrize(
    ("text", "said"),
    (
        (ARPA, "the word 'b', which is no token of the target"),
        ("nothing", "is not an ARPA file"),
        ("\\1-grams:\n-1 a b c\n", "'-1 a b c' is not a line of 1-grams"),
        ("\\4-grams:\n-1 a a a a\n", "has 4-grams: make a file of order 3"),
    ),
)
def test_bad_files(text, said, tmp_path):
    (tmp_path / "bad.arpa").write_text(text)
    with pytest.raises(ModelError, match=said):
        read_arpa(tmp_path / "bad.arpa", {"a": 0}, 3)


def test_the_length_of_a_block_follows_what_was_generated_and_accepted():
    """The paper's rule by hand, from averages of 0 and a block of the most tokens; a row that is done keeps its own."""
    drafter = DiffuSpec(DRAFT, 95)
    two = lambda value, kind=jnp.float32: jnp.full((2,), value, kind)
    draft = DiffuSpecDraft(None, None, two(0, jnp.int32), two(0), two(0), two(30, jnp.int32))
    blocks = []
    for generated, accepted in ((28, 28), (30, 30), (30, 12), (24, 24)):
        verdict = SimpleNamespace(committed=jnp.asarray([1, 0]), accepted=two(accepted))
        draft = dataclasses.replace(draft, proposed=two(generated, jnp.int32))
        draft = drafter.observe(None, draft, None, None, verdict)
        blocks.append(draft.block.tolist())
    assert blocks == [[24, 30], [30, 30], [26, 30], [25, 30]]
    for seed in range(3):  # any history keeps it between the two
        rng = np.random.default_rng(seed)
        verdict = SimpleNamespace(committed=two(1), accepted=jnp.asarray(rng.integers(0, 31, 2)))
        draft = dataclasses.replace(draft, proposed=jnp.asarray(rng.integers(0, 31, 2)))
        draft = drafter.observe(None, draft, None, None, verdict)
        assert all(20 <= block <= 30 for block in draft.block.tolist())


@pytest.mark.slow
def test_masks_beyond_the_block_are_not_seen():
    """A block of two has the tokens of a drafter with blocks of two at most."""
    model = params("diffuspec")
    long, short = (DiffuSpec(DRAFT, 95, length=length, least=1, most=4) for length in (4, 2))
    decoder, state = running(long, model)
    blocks = lambda size: dataclasses.replace(state.draft, block=jnp.full_like(state.draft.block, size))
    two, four = (dataclasses.replace(state, draft=blocks(size)) for size in (2, 4))
    cut, whole = proposed(decoder, model, two), proposed(decoder, model, four)
    assert not cut.tree.valid[:, 3:].any()
    decoder = dataclasses.replace(decoder, drafter=short)
    want = proposed(decoder, model, two)
    live = np.asarray(~state.done)
    np.testing.assert_array_equal(cut.tree.tokens[:, :3][live], want.tree.tokens[live])
    assert (whole.tree.valid.sum(axis=1)[live] == 5).any()
    assert (whole.tree.tokens[:, :3][live] != cut.tree.tokens[:, :3][live]).any(), "masks that are seen change them"


@pytest.mark.slow
def test_a_line_reads_trigrams(tmp_path):
    plain, folder, store, file = (tmp_path / name for name in ("plain", "diffusion", "store", "own.arpa"))
    models.save(plain, TARGET, params()["target"])
    lm = models.LlamaLM(changed(CONFIG, num_hidden_layers=1))
    models.save(folder, lm, lm.init(jax.random.key(0)), diffusion=Masked(95, shift=False))
    target = models.load(plain, dtype="float32")
    save_datastore(store, build([[1, 2, 3, 1, 2, 4]], 96), "plain", 96, None)
    file.write_text("\\1-grams:\n-1 5\n-2 6\n\n\\end\\\n")
    drafter, own = registry.build_drafter(f"diffuspec:model={folder},length=6,least=3", target)
    assert (drafter.depth, drafter.least, drafter.most, drafter.beams) == (6, 3, 15, 3) and own["trigrams"] is None
    _, own = registry.build_drafter(f"diffuspec:model={folder},trigrams={store}", target)
    assert own["trigrams"]["third"].tolist() == [3, 4, 1, 2]
    _, own = registry.build_drafter(f"diffuspec:model={folder},trigrams={file}", target)
    assert own["trigrams"]["unigram"][5:7].tolist() == pytest.approx([-math.log(10), -2 * math.log(10)])
    with pytest.raises(ValueError, match="trigrams, which a configuration does not describe"):
        registry.build_drafter(f"diffuspec:model={folder},trigrams={file}", models.abstract(plain))


@pytest.mark.parametrize(
    ("make", "said"),
    (
        (lambda: DiffuSpec(DRAFT, 95, length=10), "least <= length"),
        (lambda: DiffuSpec(DRAFT, 95, mass=0.0), "mass in"),
        (lambda: DiffuSpec(DRAFT, 95, most=96).bind(TARGET), "96 candidates are taken of a distribution"),
        (lambda: DiffuSpec(DRAFT, 96).bind(TARGET), "mask_id 96 is outside the vocabulary of 96"),
    ),
)
def test_bad_settings(make, said):
    with pytest.raises(ValueError, match=said):
        make()
