"""Every warper that is exported writes the same text under speculation, at every node of a tree, as in plain decoding, and
leaves out none of its rows."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import CAPACITY, DRAFTERS, MIXED, TARGET, but_slow, params_of, same, texts
from support.guarantees import held

import specjax
from specjax.assembly import registry
from specjax.constrain import Hmm, Table
from specjax.draft import NoDrafter
from specjax.prompts import Prompts
from specjax.sampling import SamplingArrays, row_keys
from specjax.sampling_params import SamplingOptions, form_of, is_set
from specjax.warpers import WARPERS
from specjax.warpers.completing import guided

LANGUAGE = Table.of(
    "a circle of four",
    np.asarray([[1, 0], [2, -1], [3, 3], [0, -1]]),
    np.arange(96) % 2,
    np.asarray([1, 0, 0, 1], bool),
    [11],
    np.asarray([-1, 6, 5, 8]),
)
"""Odd and even tokens take turns as in no text of chance."""
GUIDE = guided(
    Hmm.of("of chance", *(np.random.default_rng(0).dirichlet(np.ones(n), m) for m, n in ((None, 3), (3, 3), (3, 96)))),
    LANGUAGE,
    24,
)
MIROSTAT = {"mirostat": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.5}
OPTIONS = (
    {"typical_p": 0.6, "temperature": 1.5, "bad_words_ids": [[3], [7, 5]]},
    {"temperature": 1.0, "epsilon_cutoff": 0.02, "frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"temperature": 1.0, "eta_cutoff": 0.1, "dry_multiplier": 2.0, "dry_sequence_breakers": [4]},
    {"frequency_penalty": 2.0, "logit_bias": {5: 3.0, "9": -100}, "constraint": LANGUAGE},
    {"temperature": 0.9, "top_h": 0.5, "suppress_tokens": [1, 2, 3, 4], "constraint": LANGUAGE, "guide": GUIDE},
    {"temperature": 2.0, "xtc_probability": 0.5, "xtc_threshold": 0.05, "xtc_special_tokens": [8], "top_k": 8}
    | MIROSTAT,
    {
        "forced_bos_token_id": 3,
        "forced_eos_token_id": 4,
        "begin_suppress_tokens": [5, 6],
        "min_new_tokens": 6,
        "dry_multiplier": 1.0,
        "logit_bias": {11: 5},
        "momentum_alpha": 0.2,
    },
    {
        "temperature": 1.0,
        "min_length": 34,
        "logit_bias": {11: 5},
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
    },
)
DEFAULTS = ("dry_base", "dry_allowed_length", "momentum_k")
ROWS = [SamplingOptions(**own) for own in OPTIONS]
EOS = 11


def written(drafter, rows=ROWS, new_tokens=24):
    prompts = Prompts.of(MIXED.prompts, new_tokens, keys=row_keys(0, MIXED.names), eos=[EOS])
    sampling = jax.tree.map(jnp.asarray, SamplingArrays.of_rows(rows, form_of(ROWS)))
    decoder = specjax.speculative(TARGET, drafter)
    state = decoder.init(params_of(drafter), dataclasses.replace(prompts, sampling=sampling), capacity=CAPACITY)
    return texts(specjax.run(decoder, params_of(drafter), state))


@functools.cache
def plain():
    return written(NoDrafter())


@pytest.mark.parametrize("name", registry.WARPERS)
def test_a_warper_declares_the_same_text(name):
    held("warper", name, registry.WARPERS[name], {"same text": test_same_text_as_plain})


def test_every_sampler_is_in_use_and_matters():
    used = {name for own in ROWS for name in vars(own) if is_set(name, getattr(own, name))}
    assert used == {name for each in WARPERS for name in vars(each) if name not in DEFAULTS}
    bare = written(NoDrafter(), [SamplingOptions(temperature=own.temperature) for own in ROWS])
    assert all(a != b for a, b in zip(plain(), bare, strict=True))
    for row in (3, 4):  # the texts are in the language, up to their end and where the limit cuts them
        tokens = [token for token in plain()[row] if token != EOS]
        assert LANGUAGE.distance[functools.reduce(LANGUAGE.next, tokens, 0)] == 0
    assert not {1, 2, 3, 4} & set(plain()[4]) and 3 not in plain()[0] and 9 not in plain()[3]
    assert len(plain()[6]) >= 6 and EOS not in plain()[6][:6] and len(plain()[7]) + len(MIXED.prompts[7]) >= 34


@pytest.mark.parametrize(
    "name",
    but_slow(
        ("token_recycling", "forced", "prompt_lookup", "draft-top_k", "medusa", "kangaroo"),
        "forced",
        "prompt_lookup",
        "draft-top_k",
        "medusa",
        "kangaroo",
    ),
)
def test_same_text_as_plain(name):
    same(written(DRAFTERS[name]), plain())
