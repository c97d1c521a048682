"""Requests that come while a job runs go first, and every text is that of its request alone."""

import dataclasses
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from specjax import Sampling, models
from specjax.decode import Diffusion
from specjax.draft import ModelDrafter
from specjax.expand import Chain
from specjax.models import LlamaLM, Masked, llama_config
from specjax.serve.beside import Beside
from specjax.serve.disaggregated import DisaggregatedEngine
from specjax.serve.engine import Engine
from specjax.serve.prefix_cache import PrefixCache

CONFIG = llama_config(24, 16, 24, 1, 2, 1, 8, max_position_embeddings=128)
JOB = [[1 + (3 * i + n) % 20 for n in range(4 + i)] for i in range(5)]


def toy(masked=None):
    lm = LlamaLM(CONFIG)
    weights = jax.tree.map(lambda x: 4 * x, lm.init(jax.random.key(0)))
    return models.Model(lm, weights, None, (), "toy", Path(), np.dtype("float32"), masked)


def engine(name):
    if name == "diffusion":
        return Engine(toy(Masked(23, False, 0)), Diffusion(unmask="sequential"))
    lm = LlamaLM(CONFIG)
    draft = ModelDrafter(lm, Chain(length=2)), lm.init(jax.random.key(0))
    return Engine(toy(), drafter=draft if name == "draft" else name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none", "draft", "diffusion"])
def test_texts_are_those_of_each_alone(name):
    """Two rows are full; what comes ends before them, and the row that made room goes on where it was."""
    own = engine(name)
    size = 24 if name != "diffusion" else 48
    made = [own.request(p, max_new_tokens=size, temperature=i % 2, seed=3) for i, p in enumerate(JOB)]
    alone = lambda request: next(iter(own.run([request], batch_size=1)))
    parts = lambda record: (record.tokens, record.accepted, record.steps, record.finish_reason)
    want = [parts(record) for record in own.run(made, batch_size=2)]
    both = Beside(own, made, longest=24, batch_size=2)
    first, found, answers, order = True, {}, [], []
    for turn in both.turns():
        found |= {number: parts(record) for number, record in turn.finished}
        order += [number for number, _ in turn.finished]
        if first:
            assert not turn.finished
            ask = lambda temperature: both.ask([5, 6, 7], max_new_tokens=4, temperature=temperature, seed=1)
            answers = [ask(0.0), ask(0.7), ask(0.0)]  # one more than there are rows
            first = False
        elif len(order) == 0:
            order += ["answered"] * all(answer.done() for answer in answers)
    assert found == dict(enumerate(want))
    assert order[0] == "answered"
    for answer, temperature in zip(answers, (0.0, 0.7, 0.0), strict=True):
        one = alone(own.request([5, 6, 7], max_new_tokens=4, temperature=temperature, seed=1))
        assert parts(answer.result(0)) == parts(one)


@pytest.mark.slow
def test_another_thread_asks_and_reads_the_text_as_it_comes():
    own = Engine("tiny", drafter="none")
    job = [own.request("[ hen, dog,", max_new_tokens=40, seed=i, temperature=1.0) for i in range(3)]
    both, pieces, answers = Beside(own, job, longest=64, batch_size=1), [], []

    def asking():
        answers.append(both.ask("[ red, blue,", max_new_tokens=12, on_text=pieces.append, stop=["zzz"]))

    thread = threading.Thread(target=asking)
    records = {}
    for i, turn in enumerate(both.turns()):
        records |= dict(turn.finished)
        if i == 0:
            thread.start()
            thread.join()
    assert set(records) == {0, 1, 2}
    assert "".join(pieces) == answers[0].result(0).text == own.generate("[ red, blue,", max_new_tokens=12)[0].text
    with pytest.raises(RuntimeError, match="the job has ended: Engine.generate"):
        both.ask("a", max_new_tokens=2)


@pytest.mark.slow
def test_what_is_cancelled_or_left_is_said():
    own = engine("none")
    both = Beside(own, [own.request(p, max_new_tokens=24) for p in JOB], longest=24, batch_size=1)
    cancelled, left = both.ask([1, 2], max_new_tokens=2), both.ask([3, 4], max_new_tokens=22)
    assert cancelled.cancel()
    turns = both.turns()
    next(turns)
    later = both.ask([5, 6], max_new_tokens=2)
    turns.close()
    for answer in (left, later):
        with pytest.raises(RuntimeError, match="ended before this was answered"):
            answer.result(0)


@pytest.mark.slow
def test_more_questions_than_rows_at_the_end_are_all_answered():
    """A listener that fails has its own answer fail; the job's turns are read once."""
    own = Engine("tiny", drafter="none")
    both = Beside(own, [own.request("[ hen,", max_new_tokens=2)], longest=32, batch_size=1)

    def breaks(text):
        raise OSError("the socket is closed")

    answers = [both.ask("[ red,", max_new_tokens=4, on_text=on_text) for on_text in (None, breaks, None)]
    assert sum(len(turn.finished) for turn in both.turns()) == 1
    assert answers[0].result(0).tokens == answers[2].result(0).tokens
    with pytest.raises(OSError, match="the socket is closed"):
        answers[1].result(0)
    with pytest.raises(RuntimeError, match="the turns were read before"):
        next(both.turns())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["constraint", "prefix cache", "mesh"])
def test_with_what_else_an_engine_has(kind):
    """A state that walks a language, rows read block by block, and rows over devices."""
    more = {"prefix cache": {"prefix_cache": PrefixCache("2MB", 16)}, "mesh": {"mesh": "data=4,model=2"}}.get(kind, {})
    own = Engine("tiny", drafter="draft", logprobs=True, **more)
    given = {"constraint": "regex:[a-f ]{9}", "repetition_penalty": 1.3} if kind == "constraint" else {}
    job = [
        own.request(f"[ hen, {word},", max_new_tokens=20, temperature=1.0, **given) for word in ("dog", "owl", "cat")
    ]
    parts = lambda record: (record.tokens, record.logprobs, record.accepted)
    want = [parts(record) for record in own.run(job, batch_size=2)]
    both = Beside(own, job, longest=48, batch_size=2)
    found, answers = {}, []
    for turn in both.turns():
        found |= {number: parts(record) for number, record in turn.finished}
        if not answers:
            answers = [both.ask("[ red,", max_new_tokens=4) for _ in range(2)]
    assert [own[0] for own in want] == [found[i][0] for i in range(3)]
    if kind != "mesh":
        assert found == dict(enumerate(want))
    assert answers[0].result(0).tokens == answers[1].result(0).tokens


def test_wrong_inputs_are_said_in_one_line():
    own = engine("none")
    request = own.request([1, 2], max_new_tokens=4)
    with pytest.raises(ValueError, match="a job needs at least one request"):
        Beside(own, [], longest=8)
    with pytest.raises(ValueError, match="cannot wait on the host"):
        Beside(Engine(toy(), "beam:num_beams=2"), [request], longest=8)
    with pytest.raises(ValueError, match="cannot wait on the host"):
        Beside(DisaggregatedEngine(toy(), drafter="none", mesh="model=1", prefill_mesh="model=1"), [request], longest=8)
    for wrong in ({"longest": 1}, {"longest": 1000}, {"longest": 8, "batch_size": 0}):
        with pytest.raises(
            ValueError, match="Beside needs a row at least, and longest from 2 to the 128 tokens of toy"
        ):
            Beside(own, [request], **wrong)
    both = Beside(own, [request], longest=8, sampling=Sampling(temperature=0.0))
    with pytest.raises(ValueError, match="give a larger longest, or ask for less"):
        both.ask([1] * 68, max_new_tokens=60)
    with pytest.raises(ValueError, match="no column for temperature, or a narrower one: give sampling="):
        both.ask([1], max_new_tokens=2, temperature=1.0)
    with pytest.raises(ValueError, match="no column for frequency_penalty"):
        both.ask([1], max_new_tokens=2, frequency_penalty=1.0)
    with pytest.raises(ValueError, match="toy has no tokenizer, so there is no text to show"):
        both.ask([1], max_new_tokens=2, on_text=print)
    with pytest.raises(ValueError, match="ask takes one prompt, and these are 2"):
        both.ask([[1], [2]], max_new_tokens=2)
    assert not dataclasses.asdict(own.timing)["steps"]
