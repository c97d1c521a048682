"""Files of DFlash 2 as z-lab and SpecForge write them, against its layers and its selector written out in float64."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from support.chains import ALPHA
from support.published import E, V, draw, toy, write
from support.published_blocks import MASK, TEXT, Given, behind, proposed, reference, view_of, zlab

from specjax.draft import DFlash, DFlash2
from specjax.draft.dflash.objective import Blocks, outputs
from specjax.draft.dflash2.objective import TrainDFlash2
from specjax.draft.heads.folder import read_head
from specjax.draft.heads.published import drafter_of
from specjax.expand import Chain
from specjax.models import ModelError
from specjax.models.model_config import EmbeddingConfig, HeadConfig
from specjax.objectives.base import Batch
from specjax.reference import statistics
from specjax.sampling import Sampler

SIZES = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 5}


def second(block=4, window=None, nested=(), **config):
    """z-lab's DFlash 2: its DFlash's file with convolutions and a selector; the block's size is nested."""
    own, tensors = zlab(block=block, window=window)
    del own["block_size"]
    own["dflash_config"] |= {"block_size": block, **SIZES, **dict(nested)}
    shapes = {f"candidate_selector.{name}_codebook": (V, 6) for name in ("predecessor", "successor")}
    shapes |= {"candidate_selector.hidden_projection.weight": (6, E)}
    for i in range(2):
        for name in ("attention_conv", "mlp_conv"):
            shapes |= {f"layers.{i}.{name}.base_kernel": (2, 2, E)}
            shapes |= {f"layers.{i}.{name}.kernel_projection.weight": (2 * 2 * E // 4, E)}
    loud = {name: x * 8 for name, x in draw(13, shapes).items()}
    return {**own, "architectures": ["DFlash2DraftModel"], **config}, {**tensors, **loud}


def around(t, group=4):
    """A function that convolves what a sublayer reads or writes, for `reference`."""
    t = {name: np.asarray(x, np.float64) for name, x in t.items() if "conv" in name}

    def convolve(name, side, x, read):
        base = t[f"{name}.base_kernel"][side]
        own = (read @ t[f"{name}.kernel_projection.weight"].T).reshape(len(x), 2, len(base), -1)[:, side]
        own = np.repeat(own, group, axis=-1)
        return np.stack(
            [
                sum((base[back] + own[slot, back]) * x[slot - back] for back in range(min(slot + 1, len(base))))
                for slot in range(len(x))
            ]
        )

    return convolve


def scored(t, logits, h, text, top=5):
    """Scores of a block's slots along the tokens before them, in float64: -inf but for the likeliest."""
    t = {name: np.asarray(x, np.float64) for name, x in t.items() if "selector" in name}
    dists = np.full(logits.shape, -np.inf)
    for j, (hj, token) in enumerate(zip(h, text, strict=False)):
        gate = t["candidate_selector.predecessor_codebook"][token] * (
            t["candidate_selector.hidden_projection.weight"] @ hj
        )
        best = np.argsort(-logits[j])[:top]
        dists[j, best] = logits[j, best] + t["candidate_selector.successor_codebook"][best] @ gate
    return dists


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 6])
def test_a_block_and_its_walk_are_the_published_ones(window, tmp_path):
    """Outputs of the block, distributions step by step as in decoding, and both all at once as in training."""
    factors = {"input_embedding_scale": 1.5, "output_multiplier": 3.0, "final_logit_softcapping": 2.0}
    config, tensors = second(window=window, nested=factors, **({} if window is None else {"is_causal": False}))
    head = read_head(write(tmp_path, config, tensors), "dflash2", DFlash2, toy())
    drafter, drafted = head.drafter, (11, 40, 3)
    assert (drafter.block, drafter.drafts, drafter_of(tmp_path)) == (4, 3, "dflash2")
    assert (drafter.reach, drafter.group, drafter.rank, drafter.candidates) == (2, 4, 6, 5)
    model, features, draft = behind(head, TEXT)
    h = drafter.outputs(model, draft, view_of(TEXT))
    table = np.asarray(toy().params["embed"]["embedding"], np.float64)
    slots = 1.5 * table[[TEXT[-1], MASK, MASK, MASK]]
    wanted = reference(tensors, np.asarray(features[0], np.float64), slots, window, both=True, around=around(tensors))
    np.testing.assert_allclose(h[0], wanted[1:], rtol=1e-3, atol=1e-4)
    bare = np.asarray(toy().lm.unembed(toy().params, jnp.asarray(wanted[None, 1:], jnp.float32))[0], np.float64)
    dists = scored(tensors, 2 * np.tanh(1.5 * bare), wanted[1:], (TEXT[-1], *drafted))
    given = dataclasses.replace(drafter, expander=Given(drafted))
    given.propose(model, draft, view_of(TEXT), Sampler(None, None, None, None, None))
    np.testing.assert_allclose([dist for dist, _ in given.expander.seen], dists, rtol=1e-3, atol=1e-3)
    more = jnp.pad(features, ((0, 0), (0, 4), (0, 0)), constant_values=1e3)  # what lies after a block is not seen
    text, at = jnp.asarray([[*TEXT, 1, 2, 3]]), jnp.asarray([[3, len(TEXT) - 1]])
    past = drafter.head.context(head.params, more, jnp.arange(15)[None])
    taught = outputs(drafter, model, past, Batch(text, jnp.ones_like(text, bool)), at)
    np.testing.assert_allclose(taught[0, 1], h[0], rtol=1e-3, atol=1e-4)
    blocks = Blocks(jnp.asarray([[(TEXT[-1], *drafted)]]), None, None, None, None, jnp.zeros((1, 1, 3), jnp.int32))
    objective = TrainDFlash2(drafter)
    logits, _ = objective.dists(model, h[:, None], blocks)
    np.testing.assert_allclose(logits[0, 0], 2 * np.tanh(1.5 * bare), rtol=1e-3, atol=1e-3)
    along = objective.drafted(model, h[:, None], blocks, logits)
    np.testing.assert_allclose(along[0, 0], dists, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_token_is_drawn_from_the_candidates_scores(temperature, tmp_path):
    """What a verifier is told of a draft is the softmax of its slot's scores after the token that was drawn before."""
    config, tensors = second()
    head = read_head(write(tmp_path, config, tensors), "dflash2", DFlash2, toy(), expander=Chain(3))
    model, _, draft = behind(head, TEXT)
    tree = proposed(head.drafter, model, draft, temperature)
    path = tree.tokens[0].tolist()
    h = head.drafter.outputs(model, draft, view_of(TEXT))[0]
    logits = np.asarray(head.drafter.logits(model, h[None])[0], np.float64)
    scores = scored(tensors, logits, np.asarray(h, np.float64), path)
    if temperature:
        q = np.exp((scores - scores.max(-1, keepdims=True)) / temperature)
        np.testing.assert_allclose(np.exp(tree.log_q[0, :3]), q / q.sum(-1, keepdims=True), rtol=1e-3, atol=1e-5)
        assert (np.asarray(tree.log_q[0, :3] > -np.inf).sum(axis=1) == 5).all()
    else:
        assert path[1:] == scores.argmax(-1).tolist() != logits.argmax(-1).tolist()


@pytest.mark.slow
def test_pairs_of_drafts_have_the_distributions_that_verifiers_are_told(tmp_path):
    """In 4,000 rows, with five candidates of each slot: the second token's distribution depends on the first token."""
    head = read_head(write(tmp_path, *second()), "dflash2", DFlash2, toy(), expander=Chain(2))
    model, _, draft = behind(head, TEXT)
    tree = proposed(head.drafter, model, draft, 2.0, rows=4000)
    drawn, told = np.asarray(tree.tokens[:, 1:]), np.exp(np.asarray(tree.log_q, np.float64))
    counts, joint = np.zeros((V, V)), np.zeros((V, V))
    np.add.at(counts, tuple(drawn.T), 1)
    for token in np.unique(drawn[:, 0]):
        joint[token] = told[0, 0, token] * told[np.argmax(drawn[:, 0] == token), 1]
    assert 3 <= len(np.unique(drawn[:, 0])) <= 5 and abs(1 - joint.sum()) < 0.01
    assert statistics.chi_square(counts, joint) > ALPHA
    told_apart = told[[np.argmax(drawn[:, 0] == token) for token in np.unique(drawn[:, 0])[:2]], 1]
    assert np.abs(told_apart[0] - told_apart[1]).max() > 0.05
    shared = np.where(joint > 0, counts.sum(axis=0) * told[0, 0][:, None], 0)
    assert statistics.chi_square(counts, shared) < ALPHA, "it cannot tell a selector that ignores the token before"


def test_factors_of_a_file_are_of_the_bare_tables(tmp_path):
    """A target that scales its embeddings or caps its logits does so for the head too; a cap is not applied twice."""
    config, tensors = second(nested={"final_logit_softcapping": 30.0})
    folder = write(tmp_path / "a", config, tensors)
    factors = lambda head: (head.drafter.input_scale, head.drafter.multiplier, head.drafter.soft_cap)
    assert factors(read_head(folder, "dflash2", DFlash2, toy())) == (1.0, 1.0, 30.0)
    lm = toy().lm
    scaled = lm.config.every(EmbeddingConfig, scale=4.0).every(HeadConfig, logits_scaling=2.0)
    assert factors(read_head(folder, "dflash2", DFlash2, toy(dataclasses.replace(lm, config=scaled)))) == (0.25, 2, 30)
    capped = toy(dataclasses.replace(lm, config=lm.config.every(HeadConfig, soft_cap=30.0)))
    assert factors(read_head(folder, "dflash2", DFlash2, capped)) == (1.0, 1.0, 0.0)
    with pytest.raises(ModelError, match="final_logit_softcapping is None and 'toy' caps its own logits at 30.0"):
        read_head(write(tmp_path / "b", *second()), "dflash2", DFlash2, capped)


def test_bad_dflash2_files_are_one_line_each(tmp_path):
    """Tables that torch's own saving names are read; a DFlash is not."""
    config, tensors = second()
    late = {f"{name}.weight" if "_codebook" in name else name: x for name, x in tensors.items()}
    assert read_head(write(tmp_path / "late", config, late), "dflash2", DFlash2, toy()).drafter.rank == 6
    for message, nested in {
        "selector_rank is None, and must be a size above 0": {"selector_rank": None},
        "conv_group_size 5 does not divide the 64 channels": {"conv_group_size": 5},
        "conv_kernel_size 5 is more than a block's 4 slots": {"conv_kernel_size": 5},
        "base_kernel has shape .2, 2, 64., expected .2, 3, 64.": {"conv_kernel_size": 3},
        "successor_codebook has shape .96, 6., expected .96, 7.": {"selector_rank": 7},
        "output_multiplier must be a number above 0, not 'x'": {"output_multiplier": "x"},
    }.items():
        with pytest.raises(ValueError, match=message) as caught:
            read_head(write(tmp_path, *second(nested=nested)), "dflash2", DFlash2, toy())
        assert "\n" not in str(caught.value)
    with pytest.raises(ModelError, match="conv_kernel_size is None, and must be .*it is a dflash"):
        read_head(write(tmp_path, *zlab()), "dflash2", DFlash2, toy())
    with pytest.raises(ModelError, match="a head with convolutions is for another drafter than dflash"):
        read_head(write(tmp_path, *second(architectures=["DFlashDraftModel"])), "dflash", DFlash, toy())
    for factor in ({"input_embedding_scale": 2.0}, {"output_multiplier": 0.5}, {"final_logit_softcapping": 30.0}):
        with pytest.raises(ModelError, match=f"{next(iter(factor))} is .*: only heads of dflash2 have factors"):
            read_head(write(tmp_path, *zlab(**factor)), "dflash", DFlash, toy())
    lm = toy().lm
    capped = toy(dataclasses.replace(lm, config=lm.config.every(HeadConfig, soft_cap=30.0)))
    same = zlab(final_logit_softcapping=30.0, output_multiplier=1.0)
    assert read_head(write(tmp_path, *same), "dflash", DFlash, capped).drafter.block == 4
