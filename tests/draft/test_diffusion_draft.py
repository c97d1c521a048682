"""DiffusionDrafter: its distributions against one plain pass, the causal counts against Python, and how far it reaches."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import CONFIG, DRAFT, MIXED, TARGET, params, start
from support.head_start import proposed, running
from support.shapes import changed

import specjax
from specjax import models
from specjax.assembly import registry
from specjax.draft import DiffusionDrafter, Verdict
from specjax.draft.diffusion_draft import followers
from specjax.expand import Chain
from specjax.lm import Block, Wants
from specjax.models import Masked

MASK = 95
ROWS = dataclasses.replace(MIXED.pick(1, 4, 6), options=({"temperature": 0.0},) * 3)


def plain_dist(model, prompt, shift, ahead):
    """The diffusion model's likeliest tokens after a prompt, from one pass without a cache: the prompt but for its last
    token sees itself; that token and the masks see everything."""
    tokens = jnp.asarray([[*prompt, *[MASK] * ahead]])
    size = tokens.shape[1]
    at = np.arange(size)
    known = len(prompt) - 1
    visible = (at[None] < known) | (at[:, None] >= known)
    block = Block(tokens, jnp.arange(size)[None], jnp.zeros(1, jnp.int32), jnp.asarray(visible)[None])
    logits = np.array(DRAFT(model["draft"], block, None, wants=Wants(logits=True)).logits[0])
    logits[:, MASK] = -np.inf
    first = known if shift else known + 1
    return logits[first : first + ahead].argmax(axis=1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("shift", [False, True], ids=["own", "shifted"])
def test_one_pass_gives_the_distributions_ahead(shift):
    drafter = DiffusionDrafter(DRAFT, MASK, Chain(4), shift=shift, prior=1e9)
    model = params("diffusion_draft")
    decoder = specjax.speculative(TARGET, drafter)
    state = start(decoder, ROWS, model=model)
    tree = proposed(decoder, model, state).tree
    for row, prompt in enumerate(ROWS.prompts):
        assert tree.tokens[row].tolist() == [prompt[-1], *plain_dist(model, prompt, shift, 4)]


@pytest.fixture(scope="module")
def midway():
    """A state in mid-text, of a drafter that trusts the text's own pairs and reaches one token beyond what was accepted."""
    drafter = DiffusionDrafter(DRAFT, MASK, Chain(4), prior=1e-6, decay=0.5, ahead=1)
    return running(drafter, params("diffusion_draft"), steps=2, rows=ROWS)


@pytest.mark.slow
def test_what_followed_a_token_counts_against_the_prior(midway):
    """With next to no prior, the draft walks along pairs of the row's own text."""
    decoder, state = midway
    tree = proposed(decoder, params("diffusion_draft"), state).tree
    for row in range(3):
        text = np.asarray(state.tokens[row, : state.length[row]]).tolist()
        pairs = collections.defaultdict(collections.Counter)
        for a, b in zip(text, text[1:], strict=False):
            pairs[a][b] += 1
        path = tree.tokens[row].tolist()
        for parent, token in zip(path, path[1:], strict=False):
            if pairs[parent]:
                assert pairs[parent][token] == max(pairs[parent].values())


def test_followers_are_counted():
    rng = np.random.default_rng(0)
    before, after, parents = (rng.integers(-1, 5, shape) for shape in ((2, 30), (2, 30), (2, 3)))
    real = rng.random((2, 30)) < 0.7
    after = np.maximum(after, 0)
    got = np.asarray(followers(*map(jnp.asarray, (before, after, real, parents)), 5))
    for row in range(2):
        for node, parent in enumerate(parents[row]):
            pairs = zip(before[row], after[row], real[row], strict=True)
            want = collections.Counter(int(b) for a, b, counts in pairs if counts and a == parent)
            assert got[row, node].tolist() == [want[v] for v in range(5)]


@pytest.mark.slow
def test_it_reaches_a_little_beyond_what_was_accepted(midway):
    decoder, state = midway
    draft = dataclasses.replace(state.draft, reach=jnp.asarray([0.0, 2.0, 4.0]))
    proposal = proposed(decoder, params("diffusion_draft"), dataclasses.replace(state, draft=draft))
    assert (proposal.tree.valid.sum(axis=1) - 1).tolist() == [1, 3, 4]
    verdict = Verdict(jnp.zeros((3, 5), jnp.int32), jnp.asarray([1, 2, 3]), jnp.zeros(3), jnp.asarray([2, 0, 4]))
    seen = decoder.drafter.observe(None, proposal.draft, proposal, None, verdict)
    assert seen.reach.tolist() == [0.5, 2.0, 3.5]  # the second row took nothing: it is not live


@pytest.mark.slow
def test_what_lies_behind_the_text_is_not_read(midway):
    decoder, state = midway
    want = proposed(decoder, params("diffusion_draft"), state).tree.tokens
    behind = jnp.arange(state.tokens.shape[1])[None] >= state.length[:, None]
    spoilt = dataclasses.replace(state, tokens=jnp.where(behind, 17, state.tokens))
    assert (proposed(decoder, params("diffusion_draft"), spoilt).tree.tokens == want).all()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("draft") / "diffusion"
    config = changed(CONFIG, tie_word_embeddings=False, qkv_bias=True)
    lm = models.LlamaLM(config)
    models.save(path, lm, lm.init(jax.random.key(0)), diffusion=Masked(MASK, shift=True))
    return path


def test_the_registry_reads_a_diffusion_folder(folder, tmp_path):
    plain = tmp_path / "plain"
    models.save(plain, TARGET, params()["target"])
    target = models.load(plain, dtype="float32")
    drafter, own = registry.build_drafter(f"diffusion_draft:model={folder},length=3,prior=2", target)
    assert (drafter.mask_id, drafter.shift, drafter.prior, drafter.depth) == (MASK, True, 2.0, 3) and own is not None
    with pytest.raises(ValueError, match="'plain' is autoregressive"):
        registry.build_drafter(f"diffusion_draft:model={plain}", target)
    with pytest.raises(ValueError, match="is a diffusion model: pick an autoregressive one"):
        registry.build_drafter(f"draft:model={folder}", target)


@pytest.mark.parametrize(
    ("make", "said"),
    (
        (lambda: DiffusionDrafter(DRAFT, MASK, prior=0.0), "prior > 0"),
        (lambda: DiffusionDrafter(DRAFT, MASK, ahead=0), "ahead >= 1"),
        (lambda: DiffusionDrafter(DRAFT, 96).bind(TARGET), "mask_id 96 is outside the vocabulary of 96"),
        (lambda: DiffusionDrafter(models.LlamaLM(changed(CONFIG, vocab_size=95)), 3).bind(TARGET), "95 tokens"),
    ),
)
def test_bad_settings(make, said):
    with pytest.raises(ValueError, match=said):
        make()
