"""A draft model of the target's tokens whose tables are padded otherwise, as Qwen's are (151,936 rows against 152,064)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import CONFIG, complete, params, plain, same
from support.published import toy
from support.shapes import changed

import specjax
from specjax.assembly.registry import build_drafter
from specjax.draft.padded import PaddedLM
from specjax.expand import TopK
from specjax.models.llama import LlamaLM

V = CONFIG.vocab_size
WORDS = {f"w{i}": i for i in range(V - 6)}  # the target's last rows are padding as well


def words(vocab):
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="w0"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, unk_token="w0")


def draft(rows):
    """The target's lower layers with a table of `rows`: what is cut off or put after are rows of no token."""
    lm = LlamaLM(changed(CONFIG, num_hidden_layers=2, vocab_size=rows))
    own = params()["target"]
    table = np.asarray(own["embed"]["embedding"])
    more = 5 * np.random.default_rng(0).standard_normal((max(rows - V, 0), table.shape[1]))  # would win, were they read
    table = np.concatenate([table[:rows], more.astype(np.float32)])
    return lm, {**own, "layers": {i: own["layers"][i] for i in range(2)}, "embed": {"embedding": jnp.asarray(table)}}


def built(folder, rows, vocab=WORDS, target_vocab=WORDS, line="length=3", kind="draft"):
    lm, own = draft(rows)
    specjax.models.save(folder, lm, own, tokenizer=words(vocab))
    target = dataclasses.replace(toy(), tokenizer=words(target_vocab))
    return build_drafter(f"{kind}:model={folder},{line}", target)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [V + 32, V - 4])
def test_a_draft_with_other_padding_is_built_and_drafts(rows, tmp_path):
    drafter, own = built(tmp_path / "draft", rows)
    assert isinstance(drafter.lm, PaddedLM) and drafter.lm.vocab_size == V
    got, state = complete(drafter, model={"target": params()["target"], "draft": own})
    same(got, plain())
    assert int(np.asarray(state.stats.steps).sum()) < 0.8 * sum(map(len, got))


def test_a_padded_distribution_has_the_targets_columns():
    from specjax.lm import Block, Wants

    block = Block(np.asarray([[5, 7, V - 1]]), np.arange(3)[None], np.zeros((1,), np.int32))
    whole = LlamaLM.__call__(*draft(V), block, None, wants=Wants(logits=True)).logits
    for rows in (V + 32, V - 4):
        lm, own = draft(rows)
        found = PaddedLM(lm, V)(own, block, None, wants=Wants(logits=True, topk=2, final=True))
        assert found.logits.shape == (1, 3, V) and found.final.shape == (1, 3, CONFIG.hidden_size)
        np.testing.assert_allclose(found.logits[:, :2, : V - 4], whole[:, :2, : V - 4], rtol=1e-5, atol=1e-5)
        assert (np.asarray(found.logits)[..., min(rows, V) :] == -np.inf).all()
        np.testing.assert_array_equal(found.topk[0], jax.lax.top_k(found.logits, 2)[0])


@pytest.mark.slow
@pytest.mark.parametrize("rows", [V + 32, V - 4])
def test_a_padded_draft_grows_trees(rows, tmp_path):
    drafter, own = built(tmp_path / "draft", rows, line="expander=top_k,k=3,depth=3,nodes=8")
    assert isinstance(drafter.expander, TopK)
    got, _ = complete(drafter, model={"target": params()["target"], "draft": own})
    same(got, plain())


def test_more_than_padding_is_refused(tmp_path):
    one_more = {**WORDS, "more": V - 6}
    with pytest.raises(ValueError, match=r"not all that differ are padding: token 90 of 'toy' is 'more'"):
        built(tmp_path / "draft", V - 6, target_vocab=one_more, kind="s2d")
    with pytest.raises(ValueError, match=r"another vocabulary than 'toy', and no tokens can be shared"):
        built(tmp_path / "draft", V - 6, target_vocab=one_more)
    with pytest.raises(ValueError, match="another vocabulary than 'toy'"):
        built(tmp_path / "other", V + 32, {f"v{i}": i for i in range(1, V - 6)} | {"w0": 0})
    lm, own = draft(V + 32)
    specjax.models.save(tmp_path / "bare", lm, own)
    with pytest.raises(ValueError, match="must share one vocabulary"):
        build_drafter(f"draft:model={tmp_path / 'bare'}", toy())
