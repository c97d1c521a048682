"""Guided diffusion against a plain loop, and its two ends."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.shapes import changed
from support.small_diffusion import GUIDE, LIMITS, LM, MASK, PROMPTS, begin, everything, forward, params, texts

import specjax
from specjax import models
from specjax.assembly import registry
from specjax.decode import Diffusion
from specjax.diffusion import Dual, Guided, Prefix, diffusion
from specjax.lm import Block, Wants
from specjax.models import LlamaLM, Masked
from specjax.serve.engine import Engine
from specjax.state import Finish

ROWS = (0, 1, 2)  # a guide does not fill in
LOW = (0.02, 0.005)  # a threshold and a share that some tokens have


def make(top=1, block_length=8, rule="top", **settings):
    return diffusion(LM, MASK, Guided(GUIDE, top, rule, *LOW), block_length=block_length, **settings)


@functools.cache
def _guide(size):
    block = lambda tokens: Block(tokens[None], jnp.arange(size)[None], jnp.zeros(1, int))
    return jax.jit(lambda tokens: GUIDE(everything()["guide"], block(tokens), None, wants=Wants(logits=True)).logits[0])


def slow(row, top, rule="top"):
    """Plain Python: both models read everything anew."""
    text, canvas = list(PROMPTS[row]), [*PROMPTS[row], *[MASK] * (LIMITS[row] - len(PROMPTS[row]))]
    passes = 0
    while len(text) < LIMITS[row]:
        logits = np.array(forward(canvas))
        logits[:, MASK] = -np.inf
        drafts = logits[len(text) :].argmax(axis=1).tolist()
        says = np.asarray(_guide(LIMITS[row])(jnp.asarray([*text, *drafts])), np.float64)
        count = 0
        for i, token in enumerate(drafts):
            dist = np.exp(says[len(text) + i - 1])
            dist /= dist.sum()
            among = (dist > dist[token]).sum() < top
            share = dist[token] / dist.max()
            accepted = {"top": among, "threshold": dist[token] > LOW[0], "relative": among and share >= LOW[1]}
            if not accepted[rule]:
                break
            count += 1
        text += drafts[: max(count, 1)]
        canvas[: len(text)] = text
        passes += 1
    return text, passes


@pytest.mark.parametrize(
    ("top", "rule"),
    ((1, "top"), (6, "top"), (1, "threshold"), pytest.param(8, "relative", marks=pytest.mark.slow)),
)
def test_equal_to_a_plain_loop(top, rule):
    """In blocks of three, across which it accepts."""
    decoder = make(top, 3, rule)
    state = specjax.run(decoder, everything(), begin(decoder, ROWS, model=everything()))
    results = [slow(row, top, rule) for row in ROWS]
    assert [(t, n) for t, n in zip(texts(state), state.stats.steps.tolist(), strict=True)] == results
    saved = [len(t) - len(PROMPTS[row]) - n for row, (t, n) in zip(ROWS, results, strict=True)]
    assert any(saved) or (top, rule) == (1, "top")  # these two never agree on the likeliest token


@pytest.mark.slow
@pytest.mark.parametrize(("cache", "passes"), ((None, [1, 1, 1]), (Dual(), [1, 1, 1])), ids=("none", "dual"))
def test_a_guide_that_agrees_with_all_takes_one_pass(cache, passes):
    """Over all blocks: the pass that enters a text predicts all of it, with a cache too."""
    decoder = make(MASK + 1, 3, cache=cache)
    state = specjax.run(decoder, everything(), begin(decoder, ROWS, model=everything()))
    assert state.stats.steps.tolist() == passes
    logits = [np.array(forward([*PROMPTS[r], *[MASK] * (LIMITS[r] - len(PROMPTS[r]))]))[:, :MASK] for r in ROWS]
    want = [[*PROMPTS[r], *dist[len(PROMPTS[r]) :].argmax(axis=1)] for r, dist in zip(ROWS, logits, strict=True)]
    assert texts(state) == want


@pytest.mark.parametrize(
    ("rule", "want"), (("top", [1, 1, 1, 0]), ("threshold", [1, 1, 0, 1]), ("relative", [1, 0, 0, 0]))
)
def test_what_is_accepted(rule, want):
    """Of the guide's two likeliest; of more than a tenth; of the two, at least half as likely as the likeliest."""
    dist = np.log([[0.6, 0.3, 0.1], [0.65, 0.3, 0.05], [0.91, 0.06, 0.03], [0.5, 0.3, 0.2]])[None]
    tokens = jnp.asarray([[0, 1, 1, 2]])
    assert Guided(GUIDE, 2, rule).accepts(jnp.asarray(dist), tokens)[0].tolist() == [bool(x) for x in want]


@pytest.mark.slow
def test_rows_and_caches():
    """A row alone is a row in a batch, with a cache of the diffusion model too."""
    decoder = make(4, cache=Prefix())
    together = texts(specjax.run(decoder, everything(), begin(decoder, ROWS, model=everything())))
    alone = texts(specjax.run(decoder, everything(), begin(decoder, (2,), model=everything())))
    assert alone == [together[2]]


@pytest.mark.slow
def test_a_broken_guide_ends_its_rows():
    decoder = make(4)
    spoilt = {**everything(), "guide": jax.tree.map(lambda x: x * jnp.nan, everything()["guide"])}
    state = specjax.run(decoder, spoilt, begin(decoder, ROWS, model=everything()))
    assert (state.finish == Finish.ERROR).all() and texts(state) == [list(PROMPTS[row]) for row in ROWS]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    path = tmp_path_factory.mktemp("guided")
    models.save(path / "diffusion", LM, params()["target"], diffusion=Masked(MASK, False))
    models.save(path / "guide", GUIDE, everything()["guide"])
    return path


@pytest.mark.slow
def test_a_line_of_text_names_the_guide(folders):
    model = models.load(folders / "diffusion", dtype="float32")
    engine = Engine(model, decode=Diffusion(unmask=f"guided:model={folders / 'guide'},top=4", block_length=8))
    assert isinstance(engine.decoder.policy, Guided) and engine.decoder.policy.top == 4
    (record,) = engine.run([engine.request(list(PROMPTS[0]), max_new_tokens=16, ignore_eos=True)])
    assert [*PROMPTS[0], *record.tokens] == slow(0, 4)[0]
    given = Engine(model, decode=Diffusion(unmask=(Guided(GUIDE, 4), {"guide": everything()["guide"]}), block_length=8))
    (again,) = given.run([given.request(list(PROMPTS[0]), max_new_tokens=16, ignore_eos=True)])
    assert again.tokens == record.tokens
    with pytest.raises(ValueError, match="Guided needs parameters of its own"):
        Engine(model, decode=Diffusion(unmask=Guided(GUIDE)))
    with pytest.raises(ValueError, match="writes from left to right"):
        engine.request([1, 2], suffix=[3], max_new_tokens=8)
    with pytest.raises(ValueError, match="is a diffusion model: pick an autoregressive one"):
        Engine(model, decode=Diffusion(unmask=f"guided:model={folders / 'diffusion'}"))
    with pytest.raises(ValueError, match="put no policy before it"):
        registry.make_unmask("credit+guided")


def test_bad_settings():
    with pytest.raises(ValueError, match="top >= 1"):
        Guided(GUIDE, 0)
    with pytest.raises(ValueError, match="a rule of top, threshold, relative, got 'frob'"):
        Guided(GUIDE, rule="frob")
    with pytest.raises(ValueError, match="threshold >= 0 and relative >= 0"):
        Guided(GUIDE, threshold=-0.1)
    other = LlamaLM(changed(LM.config, vocab_size=9))
    with pytest.raises(ValueError, match="the guide has 9 tokens and the model 24"):
        diffusion(LM, MASK, Guided(other))
