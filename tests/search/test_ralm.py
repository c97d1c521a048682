"""Retrieval while decoding: whatever is guessed and whenever it is checked, the text is that of a loop that guesses nothing."""

import contextlib
import dataclasses
import logging
import sys
import threading
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.two_models import EOS, LARGE, LETTERS, PROMPTS

import specjax
from specjax import cli
from specjax import decoder as decoding
from specjax.models.text import encoded
from specjax.sampling.noise import keys_of
from specjax.search import Bm25, Dense, Faiss, Ralm, Ranks, writer
from specjax.search.ralm import best_ahead, match_rate, round_seconds, rows
from specjax.search.ralm.documents import Corpus, read_documents
from specjax.search.ralm.strides import Pace
from specjax.search.stepwise import keys_of_prompts
from specjax.speculative import speculative

NEW, STRIDE = 30, 4
DOCUMENTS = ["abcab", "n3", "9876543210kk", "ddc", "m", "0a1b2c3d4e5f", "jlnjln", "65"]


@dataclasses.dataclass
class Hashed:
    """A retriever without sense: the end of a query decides. A short end makes its answers last.

    Attributes:
      end: how many letters count.
      calls: the number of queries and of documents in each call.
    """

    end: int = 2
    calls: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def order(self, query):
        return sorted(range(len(DOCUMENTS)), key=lambda i: zlib.crc32(f"{query[-self.end :]}{i}".encode()))

    def __call__(self, queries, k):
        self.calls.append((len(queries), k))
        return [self.order(query)[:k] for query in queries]


class Knowing(Hashed):
    """The same, and it ranks: with all documents known, every guess is right."""

    def among(self, queries, documents):
        return [next(i for i in self.order(query) if i in own) for query, own in zip(queries, documents, strict=True)]


class Stubborn(Hashed):
    """The same, and every guess is the worst of the known documents."""

    def among(self, queries, documents):
        return [
            next(i for i in self.order(query)[::-1] if i in own) for query, own in zip(queries, documents, strict=True)
        ]


def loop(prompt, retrieve, new=NEW, query_tokens=32):
    """The greedy text of plain retrieval: every stride is read anew, with nothing kept."""
    text, documents = [], []
    while len(text) < new and not (text and text[-1] in EOS):
        words = "".join(LETTERS[token] for token in [*prompt, *text][-query_tokens:] if token not in EOS)
        ((best,),) = retrieve([words], 1)
        documents.append(best)
        whole = [*map(LETTERS.index, DOCUMENTS[best] + "n"), *prompt, *text]
        (record,) = specjax.generate(
            LARGE, [whole], drafter="none", max_new_tokens=min(STRIDE, new - len(text)), progress=False
        )
        text += record.tokens
    return text, tuple(documents)


def way(retriever, **fields):
    return Ralm(DOCUMENTS, retriever, stride=STRIDE, separator="n", **fields)


@contextlib.contextmanager
def warnings_of(name):
    """What a logger says."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger(name).addHandler(handler)
    yield lines
    logging.getLogger(name).removeHandler(handler)


def said(records):
    return [(own.tokens, own.documents, own.text, own.finish_reason) for own in records]


PACES = (
    {"ahead": 3},
    {"ahead": 3, "overlap": True},
    {"ahead": 2, "prefetch": 1},
    {"ahead": "os3"},
    {"ahead": 1, "overlap": True},
)


def test_plain_retrieval_is_the_loop_that_keeps_nothing():
    """And it asks once for all prompts before each stride."""
    retriever = Hashed()
    records = way(retriever, ahead=1)(LARGE, PROMPTS, max_new_tokens=NEW)
    assert (records[1].tokens, records[1].documents) == loop(PROMPTS[1], Hashed())
    assert len({own for record in records for own in record.documents}) > 3
    strides = max(len(own.documents) for own in records)
    assert len(retriever.calls) in (strides, strides + 1) and all(k == 1 for _, k in retriever.calls)


def rounds(records):
    """Guesses, right ones, and the calls in which the first prompt had queries."""
    return sum(own.guesses for own in records), sum(own.matches for own in records), records[0].retrievals


DRAWN = {"temperature": 1.3, "seed": 4}


@pytest.mark.parametrize(
    "options", [pytest.param({}, id="greedy"), pytest.param(DRAWN, id="drawn", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "kind", [*(pytest.param(kind, marks=pytest.mark.slow) for kind in (Knowing, Hashed)), Stubborn]
)
def test_guessed_documents_change_no_text(kind, options):
    """Whether guesses are always right, as often as documents last, or always wrong, where there is a choice."""
    wanted = way(kind(), ahead=1)(LARGE, PROMPTS, max_new_tokens=NEW, **options)
    for pace in PACES:
        retriever = kind()
        found = way(retriever, **pace)(LARGE, PROMPTS, max_new_tokens=NEW, **options)
        assert said(found) == said(wanted), pace
        guesses, right, calls = rounds(found)
        if kind is Knowing and pace.get("prefetch") != 1:
            assert right == guesses and (calls < wanted[0].retrievals or pace["ahead"] == 1)
        if kind is Stubborn and pace.get("prefetch") != 1:
            assert right == 0 < guesses
        if pace == {"ahead": 2, "prefetch": 1}:
            assert all(k == 1 for _, k in retriever.calls)
        assert kind is not Hashed or 0 < right < guesses


@pytest.mark.slow
def test_a_fault_in_the_check_is_seen(monkeypatch):
    """Without the way back, wrong guesses stay in the text."""
    wanted = way(Stubborn(), ahead=1)(LARGE, PROMPTS, max_new_tokens=NEW)
    monkeypatch.setattr(rows.Rows, "_back", lambda self, row, length, document: None)
    assert said(way(Stubborn())(LARGE, PROMPTS, max_new_tokens=NEW)) != said(wanted)


@pytest.mark.slow
def test_texts_do_not_depend_on_what_is_beside_them():
    options = {"max_new_tokens": NEW, "temperature": 1.3, "seed": 4}
    wanted = way(Hashed())(LARGE, PROMPTS, batch_size=4, **options)
    assert said(way(Hashed())(LARGE, PROMPTS, batch_size=3, **options)) == said(wanted)


@pytest.mark.slow
def test_a_prompt_has_the_noise_of_its_text():
    """With a stride as long as the text, it is what `generate` draws after document and prompt with the prompt's key."""
    method = dataclasses.replace(way(lambda queries, k: [[2]] * len(queries)), stride=NEW)
    model = dataclasses.replace(LARGE, eos_ids=())
    (own,) = method(model, [PROMPTS[1]], max_new_tokens=NEW, temperature=1.3, seed=4)
    whole = [*map(LETTERS.index, DOCUMENTS[2] + "n"), *PROMPTS[1]]
    prompts = specjax.Prompts.of([whole], NEW, temperature=1.3)
    prompts = dataclasses.replace(prompts, keys=keys_of(keys_of_prompts([4], [tuple(PROMPTS[1])], 1)))
    decoder, params = speculative(LARGE.lm), {"target": LARGE.params, "draft": None}
    state = decoding.run(decoder, params, decoder.init(params, prompts, capacity=128))
    assert own.tokens == state.tokens[0, len(whole) : int(state.length[0])].tolist()


@pytest.mark.slow
def test_strides_at_the_same_positions_have_noise_of_their_own():
    """A document that is a stride shorter than the one before brings the next stride to the positions of the last."""
    even = dataclasses.replace(LARGE, params=jax.tree.map(jnp.zeros_like, LARGE.params), eos_ids=(), tokenizer=None)
    documents = [[3] * (40 - STRIDE * number) for number in range(8)]
    shorter = lambda queries, k: [[min(len(query) - 2, 28) // STRIDE] for query in queries]
    method = Ralm(documents, shorter, stride=STRIDE, ahead=1, separator="")
    (own,) = method(even, [[5, 6]], max_new_tokens=8 * STRIDE, temperature=1.0)
    assert own.documents == tuple(range(8))
    assert len({step.tokens for step in own.steps}) == 8


@pytest.mark.slow
def test_a_critic_ends_retrieval():
    """Always yes: nothing is retrieved, and the text is `generate`'s. Always no: as without it. In between, as in the loop."""
    retriever = Hashed()
    never = way(retriever, critic=lambda prompt, text, documents: True)(LARGE, PROMPTS, max_new_tokens=NEW)
    plain = specjax.generate(LARGE, PROMPTS, drafter="none", max_new_tokens=NEW, progress=False)
    assert [own.tokens for own in never] == [own.tokens for own in plain] and not retriever.calls
    assert {own.documents for own in never} == {(-1,)}
    always = way(Hashed(), critic=lambda prompt, text, documents: False)(LARGE, PROMPTS, max_new_tokens=NEW)
    assert said(always) == said(way(Hashed())(LARGE, PROMPTS, max_new_tokens=NEW))
    some = lambda prompt, text, documents: len(documents) > 1 and documents[-1] % 2 == 0
    found = [
        way(Stubborn(), critic=some, **pace)(LARGE, PROMPTS, max_new_tokens=NEW) for pace in ({"ahead": 1}, *PACES)
    ]
    assert all(said(own) == said(found[0]) for own in found)
    assert found[0] != always and any(len(own.documents) > 2 for own in found[0])


@pytest.mark.slow
def test_a_check_runs_beside_the_next_stride(monkeypatch):
    """The checks after three and after six strides wait until the fourth and the seventh are written."""
    model, written, calls = dataclasses.replace(LARGE, eos_ids=()), {4: threading.Event(), 7: threading.Event()}, []
    write, count = writer.Writer.write, iter(range(1, 99))

    def counted(self, *args, **options):
        tokens = write(self, *args, **options)
        if (number := next(count)) in written:
            written[number].set()
        return tokens

    def waiting(queries, k):
        calls.append(len(queries))
        if (number := 3 * len(calls) - 2) in written:
            assert written[number].wait(60), f"stride {number} was not written beside the check"
        return [[2]] * len(queries)

    monkeypatch.setattr(writer.Writer, "write", counted)
    (found,) = way(waiting, overlap=True)(model, PROMPTS[:1], max_new_tokens=NEW)
    assert calls == [1, 3, 3, 1] and found.matches == found.guesses == 7


@pytest.mark.slow
def test_an_object_and_its_line_write_what_a_direct_call_does(tmp_path):
    """Completions of a prompt have noise of their own."""
    pytest.importorskip("bm25s")
    file = tmp_path / "own.txt"
    file.write_text("\n".join(DOCUMENTS))
    texts = ["".join(LETTERS[token] for token in prompt) for prompt in PROMPTS[:2]]
    options = {"max_new_tokens": NEW, "seed": 3, "temperature": 1.3}
    method = Ralm(DOCUMENTS, stride=STRIDE, separator="n")
    wanted = method(LARGE, [text for text in texts for _ in range(2)], **options)
    for decode in (
        method,
        f"ralm:documents={file},stride={STRIDE},separator=n",
        f"ralm:documents={file},ahead=2,separator=n",
    ):
        records = specjax.generate(LARGE, texts, decode=decode, num_return_sequences=2, progress=False, **options)
        assert [own.tokens for own in records] == [own.tokens for own in wanted]
    assert wanted[0].tokens != wanted[1].tokens


@pytest.mark.slow
def test_in_a_chat_a_document_begins_the_last_message():
    """A long one is cut, until the message has no more tokens than there is room for."""
    model = specjax.load("tiny")
    documents = ["Clara lives in Quito.", "Felix has a kite and an olive." * 9]
    chat = [
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Where?"},
    ]
    ids, corpus = encoded(model, chat), Corpus(model, documents, 12, "\n")
    assert corpus.before(None, chat, ids) == ids
    said = [model.tokenizer.decode(corpus.before(number, chat, ids)) for number in (0, 1)]
    assert all(own.count("Hello.") == own.count("Where?") == 1 for own in said)
    assert said[0].index("Yes.") < said[0].index("Clara lives in Quito.\nWhere?")
    assert 0 < said[1].count("olive") < 9 and len(corpus.before(1, chat, ids)) <= len(ids) + corpus.room
    answer = lambda queries, k: [[len(query) % 2, 0, 1][:k] for query in queries]
    method = Ralm(documents, answer, stride=2, document_tokens=12, prefetch=2)
    wanted = dataclasses.replace(method, ahead=1)(model, [chat], max_new_tokens=12)
    assert [own.tokens for own in method(model, [chat], max_new_tokens=12)] == [own.tokens for own in wanted]


@pytest.mark.slow
def test_rounds_compile_nothing_new():
    """Once a few prompts were written, other strides, documents and paces run the same programs."""
    asked = {"max_new_tokens": NEW}
    way(Hashed())(LARGE, PROMPTS, **asked)
    way(Stubborn(), ahead=2)(LARGE, PROMPTS, **asked)
    way(Knowing(), ahead=3, overlap=True)(LARGE, PROMPTS[::-1], **asked)  # rows are read alone, or together
    with jax.log_compiles(), warnings_of("jax") as said_of_jax:
        way(Stubborn(), ahead=5, prefetch=3)(LARGE, PROMPTS[::-1], **asked)
        way(Knowing(), ahead="os3", overlap=True)(LARGE, PROMPTS, **asked)
    assert not [line for line in said_of_jax if "Compiling" in line]


WORDS = ["red kite over the harbour", "a green boat in the harbour", "the green boat", "the green boat", "snow"]


@pytest.mark.slow
def test_bm25_is_the_packages_score_and_ranks_as_it_retrieves():
    pytest.importorskip("bm25s")
    retriever = Bm25(WORDS)
    queries = ["green boat boat", "harbour kite", "nothing known", "snow snow kite"]
    found = retriever(queries, 5)
    assert [own[:2] for own in found[:2]] == [[2, 3], [0, 1]] and found[2] == [0, 1, 2, 3, 4]
    assert retriever(queries, 2) == [own[:2] for own in found]
    for own, query in zip(found, queries, strict=True):
        known = [word for word in query.split() if word in retriever.index.vocab_dict]
        scores = retriever.index.get_scores(known) if known else np.zeros(5)
        assert own == sorted(range(5), key=lambda i: (-scores[i], i))
        assert [retriever.among([query], [own[at:][::-1]])[0] for at in range(5)] == own


def vectors():
    rng = np.random.default_rng(0)
    own = rng.standard_normal((300, 16)).astype(np.float32)
    own[200:] = own[:100]  # each twice
    return own, lambda queries: np.stack([np.random.default_rng(len(query)).standard_normal(16) for query in queries])


@pytest.mark.parametrize("kind", ["dense", pytest.param("faiss", marks=pytest.mark.slow)])
def test_vectors_are_found_and_ranked_by_their_products(kind):
    """Equal ones by their ids, in a query alone as among others."""
    own, embed = vectors()
    if kind == "faiss":
        faiss = pytest.importorskip("faiss")
        index = faiss.IndexFlatIP(16)
        index.add(own)
        retriever = Faiss(index, embed)
    else:
        retriever = Dense(own, embed)
    queries = ["a" * number for number in range(1, 30)]
    scores = np.asarray(embed(queries), np.float32).astype(np.float64) @ own.T.astype(np.float64)
    found = retriever(queries, 7)
    assert isinstance(retriever, Ranks)
    for query, each, wanted in zip(queries, found, scores, strict=True):
        assert each == np.lexsort((np.arange(300), -wanted.round(9)))[:7].tolist()
        assert retriever([query], 1) == [each[:1]]
        assert retriever.among([query], [each[::-1]]) == each[:1]


def test_the_schedule_is_the_authors_and_the_best_of_all():
    """Numbers of their program; and no number of strides verifies more in a second."""
    cases = (
        (1, 40, 0.6, False),
        (1, 1, 0.6, False),
        (1, 4, 0.9, False),
        (1, 40, 0.6, True),
        (1, 0.5, 0.6, True),
        (1, 1, 0.9, True),
    )
    assert [best_ahead(a, b, g, overlap=overlap) for a, b, g, overlap in cases] == [6, 2, 8, 6, 1, 1]
    assert match_rate([3, 4, 3, 2], [1, 4, 2, 0]) == 0.6 and match_rate([3, 4, 3, 2], [1, 4, 2, 0], 0.9) == 0.7
    assert match_rate([3, 3], [1, 0]) == 1 / 3
    rng = np.random.default_rng(0)
    for a, b, g in np.stack(
        [*(10 ** rng.uniform([[-3], [-3]], [[0], [1]], (2, 200))), rng.uniform(0.01, 0.9, 200)], axis=1
    ):
        for overlap in (False, True):
            rate = [(1 - g**s) / (1 - g) / round_seconds(s, a, b, g, overlap=overlap) for s in range(1, 65)]
            assert rate[best_ahead(a, b, g, overlap=overlap) - 1] >= max(rate) * (1 - 1e-9)


def test_the_pace_follows_what_it_hears():
    fixed, pace = Pace(2, False), Pace("os3", False)
    for each in (fixed, pace):
        each.heard([3, 3], [3, 3], 1.0, 40.0)
    assert (fixed.ahead, pace.ahead) == (2, 6)
    for _ in range(5):
        pace.heard([3, 3], [0, 0], 1.0, 40.0)
    assert pace.ahead == 1


@pytest.mark.slow
def test_documents_from_files(tmp_path):
    lines, text = tmp_path / "own.jsonl", tmp_path / "own.txt"
    lines.write_text('{"text": "abcab"}\n"n3"\n\n{"title": "T", "text": "b"}\n')
    text.write_text("abcab\nn3\n")
    assert read_documents(str(lines)) == ["abcab", "n3", "T\nb"] and read_documents(str(text)) == ["abcab", "n3"]
    made = dataclasses.replace(way(Hashed()), documents=str(text), retriever=lambda queries, k: [[1]] * len(queries))
    listed = dataclasses.replace(made, documents=["abcab", "n3"])
    assert said(made(LARGE, PROMPTS, max_new_tokens=6)) == said(listed(LARGE, PROMPTS, max_new_tokens=6))
    for content, error in (
        ("", "holds no documents"),
        ("{", "document 1: not JSON"),
        ("3", 'object with the string "text"'),
    ):
        lines.write_text(content)
        with pytest.raises(ValueError, match=error):
            read_documents(str(lines))


REFUSED = (
    ({"documents": None}, {}, "there are none: give documents=FILE"),
    ({"documents": "nowhere.jsonl"}, {}, "there is no file of documents 'nowhere.jsonl'"),
    ({"documents": []}, {}, "there are no documents to retrieve"),
    (
        {"documents": [[1], [99]], "retriever": lambda queries, k: [[1]] * len(queries)},
        {},
        "document 1 holds the token 99",
    ),
    ({"documents": [[1, 2]], "retriever": "bm25"}, {}, "BM25 reads words"),
    ({"retriever": "bm26"}, {}, "retriever must be bm25 or a function"),
    ({"retriever": lambda queries, k: [[]] * len(queries)}, {}, "of which 4 are empty"),
    ({"retriever": lambda queries, k: [[8]] * len(queries)}, {}, "got the id 8"),
    ({"retriever": lambda queries, k: [[0.5]] * len(queries)}, {}, "got the id 0.5"),
    ({"retriever": lambda queries, k: [[1]]}, {}, "for each of 4 queries"),
    ({"critic": "yes"}, {}, "critic must be a function"),
    ({"stride": 0}, {}, "stride must be a whole number from 1 on, got 0"),
    ({"ahead": "os4"}, {}, "ahead must be a whole number from 1 on, or os3, got 'os4'"),
    ({"prefetch": True}, {}, "prefetch must be a whole number"),
    ({"document_tokens": 480}, {}, "lower document_tokens or max_new_tokens"),
)


@pytest.mark.parametrize(("fields", "options", "said"), REFUSED, ids=[said for *_, said in REFUSED])
def test_what_it_does_not_take(fields, options, said):
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(way(Hashed()), **fields)(LARGE, PROMPTS, **{"max_new_tokens": NEW, **options})


def test_what_vectors_do_not_take():
    own, embed = vectors()
    with pytest.raises(ValueError, match=r"vectors must be a matrix \[N, E\], got \[16\]"):
        Dense(own[0], embed)
    with pytest.raises(ValueError, match="set candidates to 65 or more"):
        Dense(own, embed)(["a"], 65)
    with pytest.raises(ValueError, match=r"embed must give finite vectors \[1, 16\], got \[2, 16\]"):
        Dense(own, lambda queries: own[:2])(["a"], 1)


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(ValueError, match="pip install"):
        Bm25(WORDS)


@pytest.mark.slow
def test_the_loop_of_the_other_prompts():
    for records, kind in (
        (way(kind(), ahead=1)(LARGE, PROMPTS, max_new_tokens=NEW), kind) for kind in (Hashed, Stubborn)
    ):
        assert [(own.tokens, own.documents) for own in records] == [loop(prompt, kind()) for prompt in PROMPTS]


@pytest.mark.slow
def test_it_is_in_the_listing(capsys):
    assert cli.main(["searches"]) == 0 and "\nralm" in capsys.readouterr().out
