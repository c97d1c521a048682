"""Expectation maximisation of a hidden Markov model, against a plain one by hand and a model that wrote the texts."""

import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.cli import main
from specjax.constrain import Hmm
from specjax.train import hmm as training

PLANTED = (
    np.asarray([0.9, 0.1]),
    np.asarray([[0.8, 0.2], [0.3, 0.7]]),
    np.asarray([[0.7, 0.25, 0.0, 0.05], [0.0, 0.1, 0.8, 0.1]]),
)
"""Its last token ends a text."""


def written(count, longest, seed=0):
    """Texts of the planted model, on many rows at once."""
    rng, texts = np.random.default_rng(seed), []
    initial, transition, emission = PLANTED
    for _ in range(count):
        state, text = rng.choice(2, p=initial), []
        while len(text) < longest and text[-1:] != [3]:
            text.append(int(rng.choice(4, p=emission[state])))
            state = rng.choice(2, p=transition[state])
        texts.append(np.asarray(text))
    return texts


def log_likelihood(texts, initial, transition, emission):
    total = 0.0
    for text in texts:
        own = np.asarray(initial, float)
        for token in text:
            own = own * np.asarray(emission, float)[:, token]
            total, own = total + np.log(own.sum()), own / own.sum() @ np.asarray(transition, float)
    return total


def test_expected_counts_are_those_of_all_ways():
    rng = np.random.default_rng(3)
    rows = lambda *shape: rng.dirichlet(np.ones(shape[-1]), shape[:-1]).astype(np.float32)
    params, text = (rows(3), rows(3, 3), rows(3, 4)), [1, 3, 0, 2]
    want = [np.zeros(3), np.zeros((3, 3)), np.zeros((4, 3))]
    whole = np.exp(log_likelihood([text], *params))
    for way in itertools.product(range(3), repeat=4):
        p = params[0][way[0]] * np.prod([params[1][a, b] for a, b in itertools.pairwise(way)])
        p *= np.prod([params[2][state, token] for state, token in zip(way, text, strict=True)]) / whole
        want[0][way[0]] += p
        for a, b in itertools.pairwise(way):
            want[1][a, b] += p
        for state, token in zip(way, text, strict=True):
            want[2][token, state] += p
    tokens = jnp.asarray([[*text, 0, 0], [0] * 6])  # padded, beside a row without a text
    got = training.counted(*map(jnp.asarray, params), tokens, jnp.asarray([4, 0]))
    for own, each in zip((got.initial, got.transition, got.emission), want, strict=True):
        np.testing.assert_allclose(own, each, atol=1e-5)
    assert abs(float(got.log_likelihood) - np.log(whole)) < 1e-4


def test_each_round_is_likelier_and_the_planted_model_is_reached():
    texts, others = written(256, 24), written(256, 24, seed=1)
    params = training.start(texts, 2, 4, seed=1)
    seen = [own for own in itertools.islice(training.rounds(training.batched(texts, 100), params), 80)]
    likelihoods = [found for _, found in seen]
    assert all(b > a - 0.05 for a, b in itertools.pairwise(likelihoods)) and likelihoods[-1] > likelihoods[0] + 300
    np.testing.assert_allclose(
        likelihoods[:2], [log_likelihood(texts, *own) for own in (params, seen[0][0])], rtol=1e-4
    )
    count, learned = sum(map(len, others)), training.smoothed(seen[-1][0])
    assert log_likelihood(others, *learned) / count > log_likelihood(others, *PLANTED) / count - 0.01
    again = list(
        itertools.islice(training.rounds(training.batched(texts, 100), training.start(texts, 2, 4, seed=1)), 3)
    )
    assert [found for _, found in again] == likelihoods[:3]


def test_batches_are_as_long_as_their_texts_need():
    texts = written(50, 24)
    batches = training.batched(texts, 16)
    shapes = [tokens.shape for tokens, _ in batches]
    lengths = np.concatenate([np.asarray(length) for _, length in batches])
    assert len(batches) == 4 and {rows for rows, _ in shapes} == {16} and len(set(shapes)) > 1
    assert sorted(lengths[lengths > 0]) == sorted(map(len, texts))
    assert all(width < 2 * length.max() for (_, width), (_, length) in zip(shapes, batches, strict=True))
    assert training.batched(texts[:3], 16)[0][0].shape[0] == 3
    params = tuple(map(jnp.asarray, PLANTED))
    np.testing.assert_allclose(
        training.total(batches, params).log_likelihood, log_likelihood(texts, *PLANTED), rtol=1e-5
    )


def test_a_folder_keeps_it(tmp_path):
    own = Hmm.of("made", *PLANTED, words="abc")
    own.save(tmp_path / "hmm", target="small")
    read = Hmm.load(tmp_path / "hmm")
    assert (read.digest, read.words, len(read)) == (own.digest, "abc", 2)
    np.testing.assert_array_equal(read.emission, own.emission)
    assert json.loads((tmp_path / "hmm" / "hmm.json").read_text())["target"] == "small"
    (tmp_path / "hmm" / "hmm.safetensors").write_bytes(b"nothing")
    (tmp_path / "hmm" / "hmm.json").touch()
    with pytest.raises(ValueError, match="is damaged"):
        Hmm.load(tmp_path / "hmm")
    with pytest.raises(ValueError, match=r"must be \[H\], \[H, H\] and \[H, V\]"):
        Hmm.of("made", PLANTED[0], PLANTED[2], PLANTED[1])
    with pytest.raises(ValueError, match="each row of its arrays must be a distribution"):
        Hmm.of("made", PLANTED[0], PLANTED[1] * 2, PLANTED[2])


@pytest.mark.slow
def test_trained_by_command_it_guides_the_shipped_model(tmp_path, capsys):
    prompts, folder = tmp_path / "prompts.jsonl", tmp_path / "hmm"
    chat = lambda text: {"messages": [{"role": "user", "content": text}]}
    asked = [f"A counter shows {20 + i}. Subtract {3 + i % 9}. What does it show?" for i in range(24)]
    prompts.write_text("".join(json.dumps(chat(text)) + "\n" for text in asked))
    words = ["--states", "8", "--rounds", "8", "--max-new-tokens", "24", "--output", str(folder)]
    assert main(["train", "hmm", "--target", "tiny", "--prompts", str(prompts), *words]) == 0
    said = json.loads((folder / "hmm.json").read_text())
    assert (said["states"], said["texts"], said["target"]) == (8, 24, "tiny") and said["log_likelihood"] > -4
    told = capsys.readouterr().err
    assert "24 texts of tiny" in told and f"{said['log_likelihood']:.4f} as written" in told
    assert "" not in told.splitlines()
    first = Hmm.load(folder).digest
    assert main(["train", "hmm", "--target", "tiny", "--data", str(folder / "training/answers.jsonl"), *words]) == 0
    assert Hmm.load(folder).digest == first  # the same texts and seed give the same model
    asked = ["generate", "--model", "tiny", "--chat", "--temperature", "1", "--json", "--drafter", "none"]
    asked += ["--constraint", "choice: Step 9| Step 1: 99"]
    capsys.readouterr()
    # the local rule writes the other one, of which the second part is unlikely
    assert main([*asked, "--sampling", f"guide={folder}", "A counter shows 24. Subtract 17. What does it show?"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["text"] == " Step 9"
    assert main([*asked, "--sampling", f"guide={tmp_path}", "A counter shows 24."]) == 2
    assert "there is no hidden Markov model in" in capsys.readouterr().err
