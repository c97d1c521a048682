"""Exact extraction against every span of a passage, scored one by one."""

import jax
import numpy as np
import pytest
from support.conformance import MIXED, TARGET, params
from support.margin import teacher_forced
from support.table_lm import Table

from specjax.search import exact_extract

TABLE = jax.random.normal(jax.random.key(4), (4, 4, 4)) * 2


@pytest.mark.parametrize(("longest", "eos"), ((3, (3,)), (40, (0, 3))))
def test_it_is_the_best_of_all_spans(longest, eos):
    """Of a passage that takes two rounds of rows, with one EOS and with two."""
    dists = np.asarray(jax.nn.log_softmax(TABLE), np.float64)
    passage, prompt = np.random.default_rng(1).integers(1, 3, 21).tolist(), [2, 0, 1]
    wanted = {}
    for start in range(len(passage)):
        text, total = list(prompt), 0.0
        for stop in range(start + 1, min(start + longest, len(passage)) + 1):
            total += dists[text[-2], text[-1], passage[stop - 1]]
            text.append(passage[stop - 1])
            wanted[start, stop] = total + np.logaddexp.reduce(dists[text[-2], text[-1], list(eos)])
    got = exact_extract(Table(), TABLE, prompt, passage, eos=eos, longest=longest, count=len(wanted) + 5)
    assert len(got) == len(wanted) == len({(span.start, span.stop) for span in got})
    np.testing.assert_allclose([span.log_prob for span in got], [wanted[s.start, s.stop] for s in got], atol=1e-4)
    assert [span.log_prob for span in got] == sorted((span.log_prob for span in got), reverse=True)
    assert exact_extract(Table(), TABLE, prompt, passage, eos=eos, longest=longest) == got[:1]


@pytest.mark.slow
def test_a_span_of_a_transformer_has_the_probability_of_a_whole_pass():
    model, prompt, passage = params("none")["target"], list(MIXED.prompts[1]), list(MIXED.prompts[2][:6])
    got = exact_extract(TARGET, model, prompt, passage, eos=(7,), longest=4, count=18)
    assert len(got) == 18
    dists = np.asarray(jax.nn.log_softmax(teacher_forced(TARGET, model, prompt + passage[2:6]), axis=-1), np.float64)
    for span in got:
        if span.start == 2:
            at = len(prompt) - 1
            own = sum(dists[at + i, passage[2 + i]] for i in range(span.stop - 2)) + dists[at + span.stop - 2, 7]
            assert span.log_prob == pytest.approx(own, rel=1e-4)
    assert sorted(span.stop for span in got if span.start == 2) == [3, 4, 5, 6]


def test_what_it_needs():
    for own in ({"prompt": []}, {"passage": []}, {"eos": ()}, {"longest": 0}, {"count": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            exact_extract(Table(), TABLE, **{"prompt": [1, 2], "passage": [1], "eos": (3,), **own})
    for own in ({"prompt": [1, 4]}, {"passage": [-1]}, {"eos": (9,)}):
        with pytest.raises(ValueError, match="outside the vocabulary of 4 tokens"):
            exact_extract(Table(), TABLE, **{"prompt": [1, 2], "passage": [1], "eos": (3,), **own})


def test_passages_and_prompts_of_about_one_length_share_their_programs(caplog):
    ask = lambda prompt, passage: exact_extract(Table(), TABLE, prompt, passage, eos=(3,), longest=3)
    ask([2, 0, 1], [1, 2, 1, 2, 0])
    with jax.log_compiles():
        ask([2, 0, 1, 1, 0, 2], [1, 2, 1, 0])
    assert not [record for record in caplog.records if record.getMessage().startswith("Compiling jit(")]
