"""A draft model of other tokens: tables of two vocabularies, the text that it reads, and drafts, beside transformers' own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small_target as small
from support.conformance import CONFIG, DRAFT, TARGET, complete, draft_model, params, plain, same
from support.conformance import texts as texts_of
from support.other_tokens import other_params, other_tokens
from support.published import toy
from support.shapes import changed
from support.two_tokenizers import pair

import specjax
from specjax import decoder as decoding
from specjax import models
from specjax.assembly.companions import drafter_to_train
from specjax.assembly.other_vocabulary import shared
from specjax.assembly.registry import build_drafter
from specjax.draft import (
    Confidence,
    ModelDrafter,
    PromptLookup,
    Slem,
    Switch,
    Tli,
    View,
    adaptive,
)
from specjax.draft.vocabularies import SharedLM
from specjax.draft.vocabularies.pieces import LONGEST, piece_arrays, pieces
from specjax.draft.vocabularies.spelling import Spelt
from specjax.draft.vocabularies.tables import Words, tables
from specjax.expand import Chain, TopK
from specjax.lm import Block, Wants
from specjax.models.llama import LlamaLM
from specjax.sampling import Sampler, SamplingArrays, row_keys


def test_what_two_vocabularies_share():
    """Tokens of the same bytes, and special ones of the same name; what is not shared is spelt by the longest that fit."""
    target = Words([None, b"a", b"b", b"ab", b"abc", b"\xc3", None, b"a"], {"<end>": 0, "<odd>": 6})
    draft = Words([b"b", b"ab", b"c", b"a", b"bc", None], {"<end>": 5}, end=5)
    made = tables(target, draft)
    assert made.ids.tolist() == [0, 2, 3, 7] and made.columns.tolist() == [5, 0, 1, 3]
    spelt = [row[:count].tolist() for row, count in zip(made.spelling, made.counts, strict=True)]
    assert spelt == [[5], [3], [0], [1], [1, 2], [5], [5], [3]]
    with pytest.raises(ValueError, match="no token in common"):
        tables(Words([b"x"]), Words([b"y"]))


def test_a_long_spelling_keeps_its_end():
    made = tables(Words([b"ab" * 20, b"a"]), Words([b"a", b"b"]))
    assert (
        made.spelling.shape == (2, 16) and made.spelling[0].tolist() == [0, 1] * 8 and made.counts.tolist() == [16, 1]
    )


@pytest.mark.slow
def test_the_tables_are_transformers_own():
    """`AssistantToTargetTranslator`'s map, and its logits over the target's tokens."""
    torch = pytest.importorskip("torch")
    from transformers.generation.candidate_generator import AssistantToTargetTranslator

    target, draft = pair()
    size = target.lm.vocab_size
    theirs = AssistantToTargetTranslator(target.tokenizer, draft.tokenizer, size)
    lm, own = shared(draft, target)
    back = dict(zip(own["ids"].tolist(), own["columns"].tolist(), strict=True))
    assert theirs.target_to_assistant_input_ids == back and len(back) == lm.kept == 32
    forth = np.asarray(theirs._assistant_to_target_input_ids)
    assert {int(forth[d]): d for d in np.flatnonzero(forth >= 0)} == back
    block = Block(jnp.asarray([[3, 5, 1]]), jnp.arange(3)[None], jnp.zeros(1, jnp.int32))
    ours = lm(own, block, None, wants=Wants(logits=True)).logits
    read = dataclasses.replace(block, tokens=own["columns"][jnp.searchsorted(own["ids"], block.tokens)])
    whole = draft.lm(draft.params, read, None, wants=Wants(logits=True)).logits
    wanted = np.asarray(theirs.get_target_logits(torch.tensor(np.asarray(whole))))
    np.testing.assert_array_equal(ours, wanted[..., np.asarray(own["ids"])])
    assert (wanted > theirs.FILTER_VALUE).sum() == 3 * lm.kept


def drafted(drafter, own, tokens):
    """What follows a text `[L]` of the target's, by one proposal after its prompt was read."""
    text, length = jnp.asarray([tokens]), jnp.asarray([len(tokens)])
    live = jnp.ones(1, bool)
    view = View(text, length, live, (), max_depth=drafter.depth)
    state = drafter.catch_up({"draft": own}, drafter.init({"draft": own}, 1, 96), view)
    sampler = Sampler(row_keys(0, "a"), text, length, live, SamplingArrays.make(1, temperature=[0.0]))
    return jax.jit(drafter.propose)({"draft": own}, state, view, sampler)


@pytest.mark.slow
def test_drafts_are_those_of_transformers(tmp_path):
    """`UniversalSpeculativeDecodingGenerator`, over texts whose tokens the draft model has, or spells in two."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    from transformers.generation import candidate_generator as theirs

    target, draft = pair()
    models.save(tmp_path / "draft", draft.lm, draft.params, tokenizer=draft.tokenizer)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "draft", dtype=torch.float32)
    config = model.generation_config
    config.num_assistant_tokens, config.assistant_confidence_threshold, config.eos_token_id = 4, 0.0, None
    lm, own = shared(draft, target)
    drafter = Tli(lm, Chain(4)).bind(target.lm)
    for text in ("abcd thxyz", "zy", "cdcdab t", "a"):
        ids = target.tokenizer.encode(text)
        asked = transformers.GenerationConfig(max_length=80, min_length=0, do_sample=False)
        generator = theirs.UniversalSpeculativeDecodingGenerator(
            torch.tensor([ids]), model, target.tokenizer, draft.tokenizer, asked, {},
            theirs.AssistantToTargetTranslator(target.tokenizer, draft.tokenizer, target.lm.vocab_size),
        )  # fmt: skip
        wanted, _ = generator.get_candidates(torch.tensor([ids]))
        tree = drafted(drafter, own, ids).tree
        assert tree.tokens[0].tolist() == [ids[-1], *wanted[0, len(ids) :].tolist()] and tree.valid.all()


def test_text_is_cut_into_the_longest_tokens():
    """As by a loop over bytes; a token without a text ends it, and what has no token, too."""
    target = [b"t", b"h", b"e", b"the", b" the", b" ", b"ma", b"m", b"a", b"t ", b"a very long token of the target's"]
    draft = [b" t", b"he m", b"at", None, b"at ", b"?", b"a very long token of the draft's"]
    arrays = {name: jnp.asarray(array) for name, array in piece_arrays(target, draft).items()}
    tokens = jnp.asarray([[0, 1, 2, 4], [0, 1, 3, 2], [2, 5, 2, 2], [6, 0, 0, 0]])
    found = jax.jit(pieces, static_argnums=2)(arrays, tokens, 6)
    assert found.tolist() == [
        [4, 5, 6, 0, 8, 9],
        [4, 5, 7, -1, -1, -1],
        [8, 0, -1, -1, -1, -1],
        [-1] * 6,
    ]


@pytest.mark.slow
def test_many_tokens_are_found_by_their_polynomials():
    rng = np.random.default_rng(0)
    texts = list({rng.integers(0, 256, size).astype(np.uint8).tobytes() for size in rng.integers(1, LONGEST, 500)})
    arrays = {name: jnp.asarray(array) for name, array in piece_arrays(texts, texts).items()}
    tokens = jnp.arange(len(texts))[:, None]
    known = {text: token for token, text in enumerate(texts)}
    found = np.asarray(pieces(arrays, tokens, 1))[:, 0].tolist()
    longest = lambda text: next(known[text[:size]] for size in range(min(len(text), 8), 0, -1) if text[:size] in known)
    assert found[:50] == [known.get(text, -1) if len(text) <= 8 else found[i] for i, text in enumerate(texts[:50])]
    assert all(found[i] == longest(text) for i, text in enumerate(texts) if len(text) <= 8)


def test_a_text_is_spelt_token_by_token():
    """At the end of what is there, whatever rows are beside it; what does not fit is left out and remembered."""
    made = tables(Words([b"a", b"ab", b"abc"]), Words([b"a", b"b", b"c"]))
    own = {name: jnp.asarray(array) for name, array in made.arrays.items()}
    state = Spelt.empty(LlamaLM(changed(CONFIG, vocab_size=3, num_hidden_layers=1)), 2, 5, jnp.float32)
    state = state.spelling(own, jnp.asarray([[1, 0], [2, 2]]), jnp.asarray([[True, True], [True, False]]))
    assert state.tokens[:, :3].tolist() == [[0, 1, 0], [0, 1, 2]] and state.count.tolist() == [3, 3]
    assert state.seen.tolist() == [2, 1] and not state.cut.any()
    state = state.spelling(own, jnp.asarray([[1], [2]]), jnp.asarray([[True], [True]]))
    assert state.tokens.tolist() == [[0, 1, 0, 0, 1], [0, 1, 2, 0, 1]] and state.count.tolist() == [5, 5]
    assert state.cut.tolist() == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tli", "slem"])
def test_a_text_that_has_outgrown_its_room_is_written_without_drafts(kind):
    lm = dataclasses.replace(other_tokens(DRAFT), stretch=1)
    drafter = Tli(lm, TopK(k=2, depth=2, nodes=5)) if kind == "tli" else Slem(lm=lm, length=2)
    model = {"target": params()["target"], "draft": other_params(TARGET, draft_model(params()["target"]))}
    drafter = _short(drafter)
    got, state = complete(drafter, model=model)
    same(got, plain())
    assert state.draft.cut.any() and not state.draft.cut.all()


def _short(drafter):
    """The drafter with room for 48 tokens of its model."""
    kind = type(drafter)
    fields = {field.name: getattr(drafter, field.name) for field in dataclasses.fields(drafter)}
    short = dataclasses.dataclass(frozen=True)(
        type("Short", (kind,), {"init": lambda self, own, batch, capacity: kind.init(self, own, batch, 48)})
    )
    return short(**fields)


@pytest.mark.slow
def test_lines_draft_with_models_of_other_tokens(tmp_path):
    """`draft` finds out by itself; texts are plain decoding's, greedy and drawn."""
    target, draft = pair()
    for model in (target, draft):
        models.save(tmp_path / model.name, model.lm, model.params, tokenizer=model.tokenizer)
    target, other = specjax.load(tmp_path / "target"), tmp_path / "draft"
    drafter, own = build_drafter(f"draft:model={other},expander=top_k,k=3,depth=2,nodes=7", target)
    assert type(drafter) is Tli and isinstance(drafter.expander, TopK) and isinstance(drafter.lm, SharedLM)
    assert type(build_drafter(f"draft:model={tmp_path / 'target'}", target)[0]) is ModelDrafter
    shapes = build_drafter(f"slem:model={other}", models.abstract(tmp_path / "target"))[1]
    real = build_drafter(f"slem:model={other}", target)[1]
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, real)
    heats = {"the cat": 0.0, "abcdxy": 1.0, "hi thefé": 0.7}
    prompts = [{"prompt": prompt, "temperature": heat} for prompt, heat in heats.items()]
    write = lambda line: [
        record.tokens for record in specjax.generate(target, prompts, decode=line, max_new_tokens=12, seed=1)
    ]
    wanted = write("none")
    for line in (f"draft:model={other}", f"slem:model={other},length=3"):
        assert write(line) == wanted


@pytest.mark.slow
def test_what_cannot_draft_is_refused(tmp_path):
    target, draft = pair()
    lm, _ = shared(draft, target)
    with pytest.raises(ValueError, match="has no tokenizer, so nothing tells which tokens"):
        shared(draft, toy())
    odd = dataclasses.replace(draft, tokenizer=_undecodable())
    with pytest.raises(ValueError, match=r"another vocabulary than 'target', and no tokens can be shared \(.*no rule"):
        shared(odd, target)
    with pytest.raises(ValueError, match="drafts with a SharedLM: make one with SharedLM.of"):
        Tli(DRAFT).bind(TARGET)
    with pytest.raises(ValueError, match=rf"tables are for {lm.vocab_size} tokens, and the target has 96"):
        Tli(lm).bind(TARGET)
    with pytest.raises(ValueError, match="slem needs length >= 1, got 0"):
        Slem(lm=lm, length=0).bind(target.lm)
    with pytest.raises(ValueError, match="takes 40 candidates per node and the draft model has only 32 tokens"):
        Tli(lm, TopK(k=40, depth=1)).bind(target.lm)
    with pytest.raises(ValueError, match="is not trimmed further: leave trim out"):
        specjax.draft.trim(Tli(lm), {"target": None, "draft": {}}, np.arange(8), target.lm.vocab_size)
    smollm2 = dataclasses.replace(target, name="smollm2")
    with pytest.raises(ValueError, match="has the tokens of its target: use draft:model=smollm2-draft"):
        build_drafter("tli:model=smollm2-draft", smollm2)
    models.save(tmp_path / "draft", draft.lm, draft.params, tokenizer=draft.tokenizer)
    with pytest.raises(ValueError, match="has other tokens than 'target': it drafts as it is"):
        drafter_to_train(str(tmp_path / "draft"), target)
    with pytest.raises(ValueError, match="another vocabulary than 'target'|not all that differ are padding"):
        build_drafter(f"s2d:model={tmp_path / 'draft'}", target)


def _undecodable():
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rule", "switch"])
def test_others_are_made_of_it(name):
    """A chain that ends by a rule, and steps that leave it out."""
    lm = small.with_layers(small.TARGET, 1)
    part = Tli(other_tokens(lm), Chain(2))
    weights = small.params_of(part, small.TARGET, ())
    own = weights["draft"]
    drafter, model = {
        "rule": (adaptive(part, Confidence(0.1), 3), {"drafter": own, "rule": None}),
        "switch": (Switch((PromptLookup(length=3, min_ngram=1), part), pool=0), (None, own)),
    }[name]
    decoder = specjax.speculative(small.TARGET, drafter)
    state = small.begin(decoder, {**weights, "draft": model})
    state = decoding.run(decoder, {**weights, "draft": model}, state)
    assert texts_of(state) == [list(text) for text in small.free_texts(small.TARGET)]
    assert sum(np.sum(state.stats.accepted, axis=0)[1:]) > 0
