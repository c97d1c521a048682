"""A model and warpers of your own: the page's example in every drafter that it promises, and processors in trees."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import DRAFTERS, MIXED, TARGET, but_slow, params_of, same, start, texts

import specjax
from specjax import decoder as decoding
from specjax.decode import Speculate
from specjax.lm import LM
from specjax.models import Model
from specjax.sampling import Sampler, SamplingArrays
from specjax.sampling.processors import process
from specjax.warpers import Text

PAGE = Path(__file__).parents[1] / "docs/own_model.md"
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 1, 4], [7, 7, 8]]


@pytest.fixture(scope="module")
def own():
    """The page's model and its parameters; its own run of `generate` is left to the test of the pages."""
    block = next(b for b in re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL) if "BaseLM" in b)
    names: dict = {}
    exec(compile(block[: block.index("records =")], "own_model.md", "exec"), names)
    lm: LM = names["Own"]()
    return lm, names["params"]


def continued(own, prompts, count, size=16):
    """Greedy text by whole passes without a cache's prefix."""
    lm, params = own
    rows = []

    @jax.jit
    def read(tokens):
        block = specjax.lm.Block(tokens, jnp.arange(size)[None], jnp.zeros((1,), jnp.int32))
        return lm(params, block, lm.init_cache(1, 0), wants=specjax.lm.Wants(logits=True)).logits[0].argmax(axis=1)

    for prompt in prompts:
        text = list(prompt)
        for _ in range(count):
            following = read(jnp.asarray([text + [0] * (size - len(text))]))
            text.append(int(following[len(text) - 1]))
        rows.append(text[len(prompt) :])
    return rows


@pytest.mark.slow
def test_own_models_decode_plainly_and_by_look_up(own):
    """A pair as well as a `Model`; a batch of one or two; the tokens are those of whole passes."""
    wanted = continued(own, PROMPTS, 4)
    for drafter in ("none", "prompt_lookup:length=3,min_ngram=1"):
        records = specjax.generate(own, PROMPTS, drafter=drafter, max_new_tokens=24)
        assert [r.tokens[:4] for r in records] == wanted and records[0].text is None
        if drafter == "none":
            plain = [r.tokens for r in records]
    assert [r.tokens for r in records] == plain and records[0].steps < 24
    bounded = Model(*own, longest=13)
    first = specjax.generate(bounded, PROMPTS[:1])[0]
    assert (first.finish_reason, first.new_tokens) == ("length", 1)
    with pytest.raises(ValueError, match="your model has room for: its capacity is 13 positions"):
        specjax.generate(bounded, [[1] * 13])


def test_what_an_own_model_lacks_is_named(own):
    with pytest.raises(ValueError, match="Own has no `embed`, which this way of decoding needs"):
        own[0].embed(own[1], jnp.zeros((1, 1), jnp.int32))


def odd_behind_even(tokens, length, logits):
    """Only even ids after odd ones and the other way round: of every node another mask, by the path above it."""
    ids = jnp.arange(logits.shape[0])
    return jnp.where(ids % 2 == tokens[length - 1] % 2, -jnp.inf, logits)


def no_repeat(tokens, length, logits):
    """Bans what the text's last four tokens hold: they may lie in the row's text and in the path."""
    at = jnp.maximum(length - 1 - jnp.arange(4), 0)
    return logits.at[tokens[at]].set(-jnp.inf)


@pytest.mark.parametrize("name", but_slow(["prompt_lookup", "draft-top_k"], "draft-top_k"))
def test_processors_keep_the_text_whatever_the_drafter(name):
    """Greedy and sampled rows beside each other; every token is one that the processor allows."""
    rows = MIXED.pick(0, 1, 3, 4, 5)

    def run(drafter):
        decoder = specjax.speculative(TARGET, drafter, processors=[odd_behind_even, no_repeat])
        model = params_of(drafter)
        first = decoding.run(decoder, model, start(decoder, rows, model=model))
        compiled = decoding.run_program._cache_size()
        again = specjax.speculative(TARGET, drafter, processors=[odd_behind_even, no_repeat])
        decoding.run(again, model, start(again, rows, model=model, seed=1))
        assert decoding.run_program._cache_size() == compiled
        return texts(first), first

    wanted, _ = run(DRAFTERS["none"])
    got, state = run(DRAFTERS[name])
    same(got, wanted)
    assert int(state.stats.accepted[:, 1:].sum()) > 0
    for prompt, text in zip(rows.prompts, wanted, strict=True):
        whole = [*prompt, *text]
        for at in range(len(prompt), len(whole)):
            assert whole[at] % 2 != whole[at - 1] % 2 and whole[at] not in whole[max(0, at - 4) : at]


def test_a_node_is_processed_with_its_own_text():
    """Node by node, against the processor on a plain array."""
    rng = np.random.default_rng(0)
    tokens, length = rng.integers(0, 12, (2, 9)), np.asarray([9, 6])
    paths = np.asarray([[[-1, -1], [3, -1], [3, 8]], [[-1, -1], [5, -1], [4, 1]]])
    logits = rng.normal(size=(2, 3, 12)).astype(np.float32)
    text = Text(jnp.asarray(tokens), jnp.asarray(length), paths=lambda: jnp.asarray(paths))
    got = process((odd_behind_even, no_repeat), jnp.asarray(logits), text)
    for row in range(2):
        for node in range(3):
            text = jnp.asarray([*tokens[row, : length[row]], *[t for t in paths[row, node] if t >= 0]])
            one = odd_behind_even(text, len(text), jnp.asarray(logits[row, node]))
            np.testing.assert_array_equal(got[row, node], no_repeat(text, len(text), one))


def test_processors_of_a_head_over_fewer_tokens_see_the_whole_vocabulary():
    keys = jax.random.split(jax.random.key(0, impl="threefry2x32"), 1)
    tokens, length = jnp.asarray([[1, 2, 3]]), jnp.asarray([3])
    sampler = Sampler(keys, tokens, length, length > 0, SamplingArrays.make(1), processors=(odd_behind_even,))
    ids = jnp.asarray([2, 5, 6])
    got = sampler.restricted(ids, 12).penalised(jnp.zeros((1, 1, 3)))
    assert got.tolist() == [[[0.0, -jnp.inf, 0.0]]]


@pytest.mark.slow
def test_logprobs_are_those_of_the_processed_logits():
    decoder = specjax.speculative(TARGET, None, logprobs=True, processors=[odd_behind_even])
    rows = MIXED.pick(4)
    state = decoding.run(decoder, params_of(DRAFTERS["none"]), start(decoder, rows))
    begin, end = int(state.prompt_length[0]), int(state.length[0])
    raw, warped = (np.asarray(getattr(state.logprobs, kind)[0, begin:end]) for kind in ("raw", "warped"))
    assert (warped > raw).all() and np.isfinite(warped).all()


@pytest.mark.parametrize(
    ("wrong", "message"),
    (
        (lambda tokens, length, logits: logits[:3], "must return such"),
        (lambda tokens, length, logits: logits > 0, "must return such"),
        ([], "is a hashable function"),
        ("ban", "is a hashable function"),
    ),
)
def test_bad_processors_are_refused(wrong, message):
    model = Model(TARGET, params_of(DRAFTERS["none"])["target"])
    with pytest.raises(ValueError, match=message):
        specjax.generate(model, [[1, 2, 3]], decode=Speculate(processors=[wrong]))


def test_diffusion_models_take_no_processors():
    from support.small_diffusion import LM as MASKED
    from support.small_diffusion import MASK, params

    from specjax.models import Masked

    model = Model(MASKED, params()["target"], masked=Masked(MASK, False))
    with pytest.raises(ValueError, match="is a diffusion model, and drafts are verified by an autoregressive one"):
        specjax.generate(model, [[1, 2, 3]], decode=Speculate(processors=[no_repeat]))
