"""Bounds of a masked-diffusion model's log-probabilities, against sums over all masks, read one by one."""

import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.diffusion_traces import FOLDER

import specjax
from specjax import cli, models
from specjax.decode import Diffusion
from specjax.lm import Block, Wants
from specjax.models import LlamaLM, Masked, llama_config
from specjax.serve.engine import Engine
from specjax.serve.masked_scores import masks_of

MASK = 23
LM = LlamaLM(llama_config(24, 16, 24, 1, 2, 1, 8, max_position_embeddings=128))
PROMPT, TEXT = [1, 5, 9], [4, 7, 2, 11]


def toy(shift=False, block=0, **more):
    weights = jax.tree.map(lambda x: 4 * x, LM.init(jax.random.key(0)))
    return models.Model(LM, weights, name="toy", masked=Masked(MASK, shift, block, **more), dtype=jnp.float32)


@pytest.fixture(scope="module")
def read():
    """Log-probabilities `[W, V]` of a canvas; `sees` `[W, W]`: everything."""

    @jax.jit
    def run(params, canvas, sees):
        at = jnp.arange(canvas.shape[1], dtype=jnp.int32)[None]
        block = Block(canvas, at, jnp.zeros(1, jnp.int32), sees[None], causal=False)
        final = LM(params, block, None, wants=Wants(final=True)).final
        return jax.nn.log_softmax(LM.unembed(params, final))[0]

    def apart(model, canvas, sees=None):
        sees = np.ones((len(canvas), len(canvas)), bool) if sees is None else sees
        return np.asarray(run(model.params, jnp.asarray([canvas], jnp.int32), jnp.asarray(sees)))

    return apart


def bound(logprobs_of, text, first):
    """The sum over all masks of a text from `first` on; `logprobs_of` a canvas gives the row of each of its places."""
    places, total = range(first, len(text)), 0.0
    for r in range(1, len(places) + 1):
        subsets = list(itertools.combinations(places, r))
        for subset in subsets:
            rows = logprobs_of([MASK if i in subset else token for i, token in enumerate(text)])
            total += sum(rows[i, text[i]] for i in subset) / (r * len(subsets))
    return total


@pytest.mark.slow
@pytest.mark.parametrize("shift", [False, True], ids=["at", "before"])
def test_with_few_tokens_every_mask_is_read(read, shift):
    model = toy(shift)
    rows = lambda canvas: np.roll(read(model, canvas), 1, axis=0) if shift else read(model, canvas)
    found = specjax.score(model, [PROMPT, PROMPT], [TEXT, TEXT[:1]])
    want = [bound(rows, [*PROMPT, *TEXT], 3), rows([*PROMPT, MASK])[3, TEXT[0]]]
    assert [score.logprob for score in found] == pytest.approx(want, abs=2e-4)
    assert [score.standard_error for score in found] == [0, 0]
    assert found[0].tokens == TEXT and found[0].logprobs == [] and not found[0].greedy


@pytest.mark.slow
@pytest.mark.parametrize("align", ["text", "prompt_end"])
def test_a_model_with_blocks_has_a_bound_for_each(read, align):
    """The prompt's end lies in a block; a block that counts from the text's beginning is read with masks at its end."""
    model, text = toy(block=4, align=align), [*PROMPT, 2, 6, *TEXT]
    first, skew = 5, -5 % 4 if align == "prompt_end" else 0
    size = 12 if align == "text" else len(text)
    of = (np.arange(size) + skew) // 4
    total = 0.0
    for block in range(of[first], of[len(text) - 1] + 1):
        begin = max(first, block * 4 - skew)
        end = min((block + 1) * 4 - skew, len(text))
        seen = (block + 1) * 4 if align == "text" else end
        sees = (of[None] <= of[:, None])[:seen, :seen]
        pads = [MASK] * (seen - end)
        rows = lambda canvas, pads=pads, sees=sees: read(model, [*canvas, *pads], sees)
        total += bound(rows, text[:end], begin)
    (found,) = specjax.score(model, [text[:5]], [text[5:]])
    assert found.logprob == pytest.approx(total, abs=2e-4)


@pytest.mark.slow
def test_with_many_tokens_masks_are_drawn(read):
    """The mean of several estimates is the sum over all masks; they err as they say, and not by the batch."""
    model, text = toy(), [3, 8, 1, 6, 2, 9, 5]
    want = bound(lambda canvas: read(model, canvas), [*PROMPT, *text], 3)
    engine = Engine(model)
    (exact,), (found,), (again,) = (
        engine.score([PROMPT], [text], samples=samples, batch_size=size)
        for samples, size in ((127, 8), (64, 8), (64, 3))
    )
    assert exact.logprob == pytest.approx(want, abs=2e-4) and exact.standard_error == 0
    assert again.logprob == pytest.approx(found.logprob, abs=1e-4)
    assert 0 < found.standard_error < 0.2 * abs(want) and abs(found.logprob - want) < 4 * found.standard_error


def test_drawn_masks_weigh_what_all_masks_do():
    """Each size's share of the weights, and each token's, within the error of the draws."""
    masks, weights, groups = masks_of(20, 4096)
    assert groups == 256 and masks.shape == (4096, 20) and masks.any(axis=1).all()
    np.testing.assert_allclose((weights[:, None] * masks).sum(axis=0), 1, atol=0.1)
    np.testing.assert_allclose((weights * masks.sum(axis=1)).sum(), 20)
    counts = np.bincount(masks.sum(axis=1), minlength=21)[1:]
    assert counts.min() > 140 and counts.max() < 270
    short, _, _ = masks_of(19, 4096)
    assert (short.sum(axis=1) > 0).all()
    whole, weights, groups = masks_of(3, 7)
    assert groups == 1 and len(whole) == 7
    assert weights.tolist() == [1 / (r * math.comb(3, r)) for r in (1, 1, 1, 2, 2, 2, 3)]


@pytest.mark.slow
def test_guidance_reads_the_canvas_without_its_prompt(read):
    model = toy()
    engine = Engine(model, Diffusion(unmask="sequential", guidance=1.5))

    def rows(canvas):
        known, blind = read(model, canvas), read(model, [MASK] * 3 + canvas[3:])
        return np.asarray(jax.nn.log_softmax(blind + 2.5 * (known - blind)))

    (found,) = engine.score([PROMPT], [TEXT[:2]])
    assert found.logprob == pytest.approx(bound(rows, [*PROMPT, *TEXT[:2]], 3), abs=5e-4)


@pytest.mark.slow
def test_the_numbers_of_the_published_function():
    if not (FOLDER / "llada").is_dir():
        pytest.skip("needs the folder diffusion_traces in shared/data beside this checkout")
    found = specjax.score(str(FOLDER / "llada"), [[5, 9, 33]] * 3, [[17], [17, 7], [17, 7, 2]])
    assert [score.logprob for score in found] == pytest.approx([-3.8502, -15.4836, -30.9267], abs=1e-3)


@pytest.mark.slow
def test_the_command(tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text(
        json.dumps({"prompt": "Repeat the list. [ hen,", "continuation": " dog ]"}) + "\n"
    )
    words = ["score", "--model", "tiny-diffusion", "--input", str(tmp_path / "in.jsonl"), "--samples", "4"]
    assert cli.main(words) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["logprob"] < 0 <= record["standard_error"] and record["logprobs"] == []


def test_wrong_inputs_are_said_in_one_line():
    plain = models.Model(LM, toy().params, name="plain", dtype=jnp.float32)
    with pytest.raises(ValueError, match="plain has no masks: samples are for masked-diffusion models"):
        Engine(plain, drafter="none").score([[1]], [[2]], samples=8)
    with pytest.raises(ValueError, match="a text needs at least one mask, got samples=0"):
        Engine(toy()).score([[1]], [[2]], samples=0)


def test_a_long_text_has_masks_too():
    masks, weights, _ = masks_of(1100, 4)
    assert masks.shape == (4, 1100) and masks.any(axis=1).all() and np.isfinite(weights).all()
