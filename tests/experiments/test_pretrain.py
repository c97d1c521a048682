"""The recipe of the models that answer: its batches, that it goes on exactly, and that its folders are what they say."""

import itertools
import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.pretrain import tokenizer as words
from experiments.pretrain.data import Pools, batch_of, gap_of, row_of, shares
from experiments.pretrain.induction import induce
from experiments.pretrain.model import Model, load
from experiments.pretrain.objectives import Diffusion, Draft, Probe, Target
from experiments.pretrain.train import HERE, Run, folder_of
from specjax.models import llama_config
from specjax.models import load as load_folder
from specjax.tasks import FAMILIES, Mixture, generate
from specjax.tasks.generate import keys

MODEL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rope_theta": 1000.0,
}
RECIPE = {
    "seed": 3,
    "induction": False,
    "pools": 4,
    "questions": 12,
    "update_tokens": 1024,
    "batch_tokens": 512,
    "prompt_weight": 0.1,
    "echo": 0.5,
    "echo_until": 0.3,
    "warmup_steps": 2,
    "decay_from": 0.5,
    "muon_rate": 0.02,
    "adam_rate": 0.004,
    "weight_decay": 0.05,
    "parts": [
        {"share": 0.7, "levels": [1], "families": ["lists", "code"]},
        {"share": 0.3, "levels": [2], "families": ["math"], "from": 0.5},
    ],
    "model": MODEL,
    "room": 32,
    "blocks": [4, 8],
    "uniform": 0.5,
    "fill_weight": 0.1,
    "distill": 0.5,
}


@pytest.fixture(scope="module")
def tokenizer():
    return words.train(vocab_size=640, questions=150, seed=1)


@pytest.fixture(scope="module")
def ids(tokenizer):
    return {name: tokenizer.token_to_id(text) for name, text in words.SPECIAL.items()}


@pytest.fixture(scope="module")
def recipe(tokenizer):
    return RECIPE | {"vocab_size": tokenizer.get_vocab_size()}


def pools_of(recipe, tokenizer, ids):
    return Pools(recipe, tokenizer, ids["pad"], first_word=ids["end"] + 1)


def test_the_tokenizer_gives_back_every_text_with_single_digits_and_one_token_on_both_sides_of_a_copy(tokenizer):
    for name in FAMILIES:
        question = Mixture(2, (name,))[0]
        for text in (question.prompt, question.answers[0], "Grüße, ½ + x_y\n\n  end"):
            assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    pieces = tokenizer.encode("[ red, cup ] 4037").tokens
    assert pieces[-4:] == ["Ġ4", "0", "3", "7"]
    assert set(tokenizer.encode('" red"').ids) >= set(tokenizer.encode(" red").ids)


def test_a_pool_is_the_same_whenever_it_is_drawn_and_rests_on_training_questions_only(recipe, tokenizer, ids):
    again = [list(pools_of(recipe, tokenizer, ids).updates(3)) for _ in range(2)]
    assert sum(len(batch.lengths) for update in again[0] for batch in update) == recipe["questions"]
    for one, other in zip(*map(itertools.chain.from_iterable, again), strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.weights, other.weights)
    pools = pools_of(recipe, tokenizer, ids)
    asked = [mixture[i] for mixture in pools.mixtures for i in range(40)]
    held = [q for name in ("lists", "code", "math") for q in generate(name, 2, seed=900, count=20)]
    assert not keys(asked) & keys(held)


def test_an_answer_weighs_the_root_of_its_length(tokenizer):
    row = row_of(tokenizer, Mixture(0, ("edit",))[0], prompt_weight=0.1)
    answer = row.weights[row.answer :]
    assert np.isclose(answer.sum(), len(answer) ** 0.5)
    assert np.allclose(row.weights[: row.answer], 0.1 * answer[0])
    assert tokenizer.decode(row.tokens[row.answer - 1 : row.answer], skip_special_tokens=False) == "<|assistant|>"
    assert tokenizer.decode(row.tokens[-1:], skip_special_tokens=False) == words.END


@pytest.mark.parametrize("kind", [Target, Diffusion])
def test_a_run_goes_on_exactly(kind, recipe, tokenizer, ids, tmp_path):
    pools = pools_of(recipe, tokenizer, ids)

    def run():
        return Run(recipe, kind(recipe, ids), tmp_path / "run.pt", compiled=False)

    whole = run()
    for _ in range(4):
        whole.learn(pools)
    first = run()
    for _ in range(2):
        first.learn(pools)
    first.keep()
    second = run()
    assert second.pool == 2
    for _ in range(2):
        second.learn(pools)
    assert second.tokens == whole.tokens and second.step == whole.step
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name]), name


def test_an_induced_model_continues_random_tokens_that_it_sees_again():
    shape = llama_config(512, 256, 32, 2, 8, 4, 32, max_position_embeddings=128, rope_theta=1000.0)
    model = Model(shape)
    model.start(0)
    rows = torch.randint(512, (8, 24), generator=torch.Generator().manual_seed(0)).repeat(1, 2)
    right = lambda: float((model(rows[:, :-1])[:, 24:].argmax(-1) == rows[:, 25:]).float().mean())
    with torch.no_grad():
        assert right() < 0.1
        induce(model, 0, copy=6.0)
        assert right() > 0.9


def test_a_draft_learns_its_targets_distributions(recipe, tokenizer, ids):
    target = Run(recipe, Target(recipe, ids), checkpoint=_nowhere(), compiled=False).model
    draft = Draft(recipe | {"distill": 1.0}, ids, target.requires_grad_(False))
    batch = next(pools_of(recipe, tokenizer, ids).updates(3))[0]
    arrays = draft.arrays(batch, np.random.default_rng(0))
    own = draft.lost(target, *arrays)
    entropy = -(arrays[1] * arrays[1].clamp_min(1e-30).log()).sum(-1)
    torch.testing.assert_close(own, (entropy * arrays[-1]).sum(), rtol=1e-4, atol=1e-4)


def _nowhere():
    import pathlib

    return pathlib.Path("no checkpoint here")


def test_diffusion_masks_answers_only_and_learns_what_it_masks(recipe, tokenizer, ids):
    objective = Diffusion(recipe, ids)
    rng = np.random.default_rng(0)
    seen = set()
    for pool in range(3):
        for batch in itertools.chain.from_iterable(pools_of(recipe, tokenizer, ids).updates(pool)):
            inputs, tokens, weights = (x.numpy() for x in objective.arrays(batch, rng))
            at = np.arange(tokens.shape[1])[None]
            masked = inputs == ids["mask"]
            assert not (masked & (at < batch.answers[:, None])).any()
            assert (masked | (weights == 0)).all() and (inputs == tokens)[~masked].all()
            assert (tokens == ids["end"])[at >= batch.lengths[:, None]].all()
            assert (weights.sum(1) > 0).all()
            seen |= set((masked & (weights == 0)).any(1).tolist())
    assert seen == {True, False}  # rows with an unknown part after their block, and rows without


def test_a_gap_is_masked_between_what_is_known(tokenizer, ids):
    question = next(q for q in generate("fill", 1, seed=0, count=20) if q.infill)
    row = gap_of(tokenizer, question)
    left, gap, right = row.tokens[: row.answer], row.tokens[row.answer : -row.known], row.tokens[-row.known :]
    assert [tokenizer.decode(part) for part in (left, gap, right)] == [
        question.infill[0],
        f" {question.answers[0]}",
        f" {question.infill[1]}",
    ]
    batch = batch_of([row] * 40, ids["pad"])
    objective = Diffusion({"room": 32, "blocks": [2], "uniform": 0.0, "fill_weight": 0.1, "model": MODEL}, ids)
    inputs, _, weights = (x.numpy() for x in objective.arrays(batch, np.random.default_rng(0)))
    masked = inputs == ids["mask"]
    where = np.flatnonzero(masked.any(0))
    assert where.min() == row.answer and where.max() == len(row.tokens) - row.known - 1
    np.testing.assert_array_equal(masked, weights > 0)
    np.testing.assert_allclose(weights.sum(1), len(gap) ** 0.5, rtol=1e-5)


def test_processes_share_an_updates_batches_evenly(recipe, tokenizer, ids):
    for update in pools_of(recipe, tokenizer, ids).updates(0):
        taken = shares(update, 2)
        assert sorted(i for own in taken for i in own) == list(range(len(update)))
        low, high = sorted(sum(update[i].tokens.size for i in own) for own in taken)
        assert high - low <= max(batch.tokens.size for batch in update)


@pytest.mark.parametrize("convolutions", ([], [0]), ids=("attention", "hybrid"))
def test_folders_are_read_by_transformers_with_the_same_logits(recipe, tokenizer, ids, tmp_path, convolutions):
    recipe = recipe | {"model": recipe["model"] | {"convolutions": convolutions}}
    run = Run(recipe, Target(recipe, ids), tmp_path / "run.pt", compiled=False)
    folder_of(tmp_path / "tiny", run.model, tokenizer, ids, {})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny", dtype=torch.float32).eval()
    load(run.model, tmp_path / "tiny")  # float16 as written
    tokens = torch.randint(6, recipe["vocab_size"], (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(run.model(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
    read = AutoTokenizer.from_pretrained(tmp_path / "tiny")
    assert read.eos_token_id == ids["end"] and read.chat_template
    ours = load_folder(tmp_path / "tiny")
    assert ours.lm.config == run.model.shape and ours.eos_ids == (ids["end"],)


def test_a_diffusion_folder_says_what_it_is(recipe, tokenizer, ids, tmp_path):
    run = Run(recipe, Diffusion(recipe, ids), _nowhere(), compiled=False)
    folder_of(tmp_path / "tiny-diffusion", run.model, tokenizer, ids, {"unmask": "fixed"})
    ours = load_folder(tmp_path / "tiny-diffusion")
    assert ours.lm.config == run.model.shape
    assert (ours.masked.mask_id, ours.masked.shift, ours.masked.block) == (ids["mask"], False, 0)
    assert ours.masked.unmask == "fixed"


def test_a_probe_counts_answers_that_are_right_in_every_token(recipe, tokenizer, ids):
    objective = Target(recipe, ids)
    run = Run(recipe, objective, _nowhere(), compiled=False)
    assert set(Probe(tokenizer, ids["pad"], 2, families=("code", "lists"))(objective, run.model)) == {"code", "lists"}

    class Oracle:
        def __call__(self, tokens):
            logits = torch.zeros(*tokens.shape, recipe["vocab_size"])
            return logits.scatter_(-1, self.answers[:, 1:, None], 1.0)

    oracle = Oracle()
    probe = Probe(tokenizer, ids["pad"], 2, families=("code",))
    oracle.answers = torch.from_numpy(probe.batches[0][1].tokens)
    assert probe(objective, oracle) == {"code": 1.0}
    oracle.answers = oracle.answers.clone()
    oracle.answers[0, -1 - int((oracle.answers[0] == ids["pad"]).sum())] = 7
    assert probe(objective, oracle) == {"code": 0.5}


def test_the_page_says_what_was_measured_on_the_hybrid():
    page = (HERE / "README.md").read_text()
    rows = lambda file: {row["decoder"].partition(":")[0]: row for row in json.loads(file.read_text())["rows"]}
    tiny = rows(HERE.parent / "drafters" / "greedy.json")
    for name, row in rows(HERE / "hybrid_bench.json").items():
        shares = " ".join(f"{share:.2f}" for share in row["acceptance_by_depth"])
        said = f"| `{name}` | {row['tokens_per_step']:.2f} | {shares} | {tiny[name]['tokens_per_step']:.2f} |"
        assert row["identical_text"] and said in page
    found = json.loads((HERE / "hybrid_eval.json").read_text())["families"]
    assert all(name == "judge" or own["accuracy"] == 0 for name, own in found.items())
    judged = found["judge"]
    assert f"{judged['accuracy']:.0%} of `judge`" in page
