"""Merged prompts: which pairs are merged, the inputs of merged tokens, texts after them, and the trained network."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import transformers
from support.two_models import LARGE
from support.two_tokenizers import pair

import specjax
from specjax import cli, models
from specjax.lm import Block, Wants
from specjax.models import ModelError
from specjax.objectives.base import Batch, read
from specjax.search import MergedPrompts, Merger
from specjax.search.merged_prompts import embedder
from specjax.search.merged_prompts.objective import TrainMergedPrompts


def byte_level(words, special="<s>"):
    """A tokenizer of these tokens that splits texts as GPT-2's does."""
    core = tokenizers.Tokenizer(tokenizers.models.BPE({word: i for i, word in enumerate([special, *words])}, []))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, bos_token=special)


WORDS = ("Ġri", "bo", "nu", "Ġis", "Ġm", "R", "NA", "Ċ", "Ġ", ".", "Ã", "©", "a", "b")
ROWS = [["Ġri", "bo", "nu", "Ġis", "Ġri", "bo"], ["Ġm", "R", "NA", "Ġri", "bo", "nu", "Ġm", "R"]]


def test_pairs_are_merged_as_by_the_authors_program():
    merger = Merger(byte_level(WORDS))
    states = [
        ROWS,
        [["Ġribo", "nu", "Ġis", "Ġribo"], ["Ġm", "R", "NA", "Ġribo", "nu", "Ġm", "R"]],
        [["Ġribonu", "Ġis", "Ġribo"], ["Ġm", "R", "NA", "Ġribonu", "Ġm", "R"]],
        [["Ġribonu", "Ġis", "Ġribo"], ["ĠmR", "NA", "Ġribonu", "ĠmR"]],
        [["Ġribonu", "Ġis", "Ġribo"], ["ĠmRNA", "Ġribonu", "ĠmR"]],
    ]
    for merges, wanted in enumerate([*states, states[-1]]):
        assert merger.merged(ROWS, merges) == wanted


@pytest.mark.parametrize(
    ("boundary", "units", "may"),
    [
        ("pretokens", "a b", True),
        ("pretokens", "a .", False),
        ("word", "a .", True),
        ("sentence", "a .", True),
        ("sentence", "a Ġb", False),
        ("pretokens", "Ċ Ċ", False),
        ("word", "Ġ Ġ", False),  # no word at all, to a splitter at white space
        ("pretokens", "Ġ Ġ", True),
        ("pretokens", "Ã ©", True),
        ("word", "Ã a", True),  # no whole characters yet
    ],
)
def test_merged_tokens_keep_within_the_boundary(boundary, units, may):
    assert Merger(byte_level(WORDS), boundary).allowed(*units.split()) is may


def test_a_row_is_merged_from_left_to_right_and_special_tokens_never_are():
    merger = Merger(byte_level(WORDS))
    assert merger.merged([["a"] * 5], 1) == [["aa", "aa", "a"]]
    assert merger.units([0, 13]) == [0, "a"] and not merger.allowed(0, "a")
    plan = merger([[0, 13, 14, 13, 14], [0, 14]], 1, 40)
    assert plan.rows == ((0, 40, 40), (0, 14)) and plan.parts == ((13, 14),)


PROMPTS = ["the the cat the hab", "hab the", "xyab the cat"]


def target():
    return pair()[0]


def width():
    return target().lm.config.hidden_size


def network():
    shapes = {"into": (2, width(), 6), "bias": (6,), "out": (6, width())}
    return {name: 0.5 * jax.random.normal(jax.random.key(len(name)), shape) for name, shape in shapes.items()}


def slow_inputs(parts, trained):
    """By numpy, of one merged token."""
    own = np.asarray(target().lm.embed(target().params, jnp.asarray([parts])))[0]
    if not trained:
        return own.mean(axis=0)
    into, bias, out = (np.asarray(network()[name]) for name in embedder.NAMES)
    total = sum(own[i] @ into[i] for i in range(min(len(own), len(into))))
    return own.mean(axis=0) + np.asarray(jax.nn.gelu(jnp.asarray(total + bias))) @ out


@pytest.mark.parametrize(
    "trained", [pytest.param(False, id="mean", marks=pytest.mark.slow), pytest.param(True, id="trained")]
)
def test_texts_are_those_of_whole_passes(trained, tmp_path):
    model = target()
    embedder.save_network(tmp_path / "net", network(), "float32")
    method = MergedPrompts(4, str(tmp_path / "net") if trained else None)
    found = method(model, PROMPTS, max_new_tokens=6, temperature=0.0, batch_size=3)
    ids = [model.tokenizer.encode(prompt) for prompt in PROMPTS]
    plan = Merger(model.tokenizer)(ids, 4, model.lm.vocab_size)
    assert sum(map(len, plan.rows)) < sum(map(len, ids)) and max(map(len, plan.parts)) > 2
    said = jax.jit(lambda block: model.lm(model.params, block, None, wants=Wants(logits=True)).logits)
    for own, row, one in zip(ids, plan.rows, found, strict=True):
        assert (one.prompt_tokens, one.prompt_read) == (len(own), len(row))
        text, new = list(row), []
        while len(new) < len(one.tokens):
            size = 32
            tokens, inputs = np.zeros((1, size), np.int32), np.zeros((1, size, width()), np.float32)
            merged = np.zeros((1, size), bool)
            for at, token in enumerate(text):
                if token < model.lm.vocab_size:
                    tokens[0, at] = token
                else:
                    inputs[0, at] = slow_inputs(plan.parts[token - model.lm.vocab_size], trained)
                    merged[0, at] = True
            block = Block(tokens, np.arange(size, dtype=np.int32)[None], np.zeros(1, np.int32), None, inputs, merged)
            new.append(int(np.argmax(said(jax.device_put(block))[0, len(text) - 1])))
            text.append(new[-1])
        assert one.tokens == new


@pytest.mark.slow
def test_without_merges_it_is_plain_decoding():
    model = target()
    options = {"max_new_tokens": 8, "temperature": 1.0, "seed": 2, "batch_size": 2}
    plain = specjax.generate(model, PROMPTS, drafter="none", progress=False, **options)
    (line,) = [specjax.generate(model, PROMPTS, decode="merged_prompts:merges=0", progress=False, **options)]
    assert [one.tokens for one in line] == [one.tokens for one in plain]


def test_wrong_uses_are_one_line(tmp_path):
    model = target()
    with pytest.raises(ValueError, match="merges must be a whole number from 0 on, got -1"):
        MergedPrompts(-1)
    with pytest.raises(ValueError, match="boundary must be one of pretokens, word, sentence, got 'page'"):
        specjax.generate(model, PROMPTS, decode="merged_prompts:boundary=page")
    with pytest.raises(ValueError, match="and this model has another kind of tokenizer"):
        MergedPrompts()(LARGE, [[1, 2]])
    with pytest.raises(ValueError, match="and this model has no tokenizer"):
        MergedPrompts()(dataclasses.replace(model, tokenizer=None), [[1, 2]])
    missing = f"merged_prompts:embedder={tmp_path / 'gone'}"
    with pytest.raises(ModelError, match="gone holds no inputs of merged tokens: `specjax train merged_prompts`"):
        specjax.generate(model, PROMPTS, decode=missing)
    embedder.save_network(tmp_path / "net", embedder.fresh(jax.random.key(0), width() + 1, 2, 3), "float32")
    with pytest.raises(ModelError, match=f"net is for a model of width {width() + 1}, and this one has {width()}"):
        specjax.generate(model, PROMPTS, decode=f"merged_prompts:embedder={tmp_path / 'net'}")
    (tmp_path / "net" / "config.json").write_text(
        json.dumps({"merged_prompts": {"parts": 3, "rank": 3, "hidden_size": width()}})
    )
    with pytest.raises(ModelError, match="into must be a tensor of shape"):
        specjax.generate(model, PROMPTS, decode=f"merged_prompts:embedder={tmp_path / 'net'}")


def rows():
    """Two texts, the first with a prompt of six tokens; the letters of a word may be merged."""
    tokens = np.asarray(
        [target().tokenizer.encode(text)[:12] for text in ("efghijk the efg hij", "klmnopqrstu v")], np.int32
    )
    mask = np.ones(tokens.shape, bool)
    mask[0, :6] = False
    return Batch.placed({"tokens": tokens, "mask": mask}, None)


def frozen():
    begins, ends = Merger(target().tokenizer).edges(target().lm.vocab_size)
    return {"lm": target().params, "begins": jnp.asarray(begins), "ends": jnp.asarray(ends)}


@pytest.mark.slow
def test_training_compares_with_the_prompt_itself():
    """The loss by whole passes over one row after the other, whose merged tokens `inputs_of` makes."""
    lm, batch = target().lm, rows()
    objective = TrainMergedPrompts(lm, parts=3, rank=6)
    params = jax.tree.map(lambda x: x + 0.3, objective.init(jax.random.key(0), frozen()))
    joins, cut = (np.asarray(x) for x in objective.joins(frozen(), batch, jax.random.key(4)))
    assert cut[0] == 6 and joins.any() and not joins[:, 0].any()
    loss, told = objective.loss(params, frozen(), batch, jax.random.key(4))
    plain = jax.nn.log_softmax(read(lm, target().params, batch, Wants(logits=True)).logits, axis=-1)
    total, count, shorter = 0.0, 0, 0.0
    for row in range(2):
        units = []
        for token, joined in zip(np.asarray(batch.tokens)[row].tolist(), joins[row], strict=True):
            units = [*units[:-1], [*units[-1], token]] if joined else [*units, [token]]
        assert max(map(len, units)) <= 3
        ids = np.asarray([[*own, *[-1] * (3 - len(own))] for own in units], np.int32)
        inputs = embedder.inputs_of(lm, target().params, params, jnp.asarray(ids))
        size = len(units)
        block = Block(
            jnp.asarray([[own[-1] for own in units]]), jnp.arange(size)[None], jnp.zeros(1, jnp.int32), None, inputs[None],
            jnp.asarray([[len(own) > 1 for own in units]]),
        )  # fmt: skip
        said = jax.nn.log_softmax(lm(target().params, block, None, wants=Wants(logits=True)).logits, axis=-1)[0]
        for slot in range(cut[row] - 1, 11):
            own = plain[row, slot]
            other = said[int((~joins[row, : slot + 1]).sum()) - 1]
            total, count = total + float((jnp.exp(own) * (own - other)).sum()), count + 1
            shorter += joins[row].sum() / cut[row]
    assert float(loss) == pytest.approx(total / count, rel=1e-4)
    assert float(told["shorter"]) == pytest.approx(shorter / count, rel=1e-5)


def test_edges_are_where_words_end():
    words = [*LETTERS, "Ġt", "the", "Ġ"]
    begins, ends = Merger(byte_level([*words, "x"])).edges(len(words) + 4)
    assert dict(zip(words, begins[1:], strict=False)) == {"a": False, ".": True, "Ġt": True, "the": False, "Ġ": True}
    assert begins[0] and ends[0] and begins[-1] and not ends[1] and ends[2]


LETTERS = ("a", ".")


@pytest.mark.slow
def test_the_command_trains_what_the_decoder_reads(tmp_path, capsys):
    model = target()
    models.save(tmp_path / "target", model.lm, model.params, tokenizer=model.tokenizer, eos_ids=model.eos_ids)
    lines = [{"prompt": "efgh ij", "completion": " the abc"}, {"prompt": "klm", "completion": "nop qr"}]
    (tmp_path / "data.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    words = ["--target", tmp_path / "target", "--data", tmp_path / "data.jsonl", "--steps", 3, "--batch-size", 2]
    words += ["--length", 16, "--output", tmp_path / "out"]
    run = lambda *more: cli.main([str(word) for word in ("train", *more, *words)])
    for own, said in (
        (("merged_prompts:parts=1",), "parts must be at least 2"),
        (("merged_prompts:rank=0",), "rank must be at least 1"),
        (("merged_prompts", "--loss", "tvd"), "--loss is not for merged_prompts"),
    ):
        assert run(*own) == 2
        assert said in capsys.readouterr().err
    assert run("merged_prompts:rank=4,parts=3") == 0
    found = embedder.read_network(str(tmp_path / "out"), width())
    assert found["into"].shape == (3, width(), 4) and np.abs(found["out"]).max() > 0
    own = specjax.load(tmp_path / "target")
    line = f"merged_prompts:merges=3,embedder={tmp_path / 'out'}"
    (record,) = specjax.generate(own, ["efgh efgh"], decode=line, max_new_tokens=4, progress=False)
    assert record.new_tokens
