"""Training of any-subset models: orders and loss against loops, shares that grow, the command, and what is refused."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import cli, models
from specjax.models import Gaps, xlnet
from specjax.objectives.any_subset import AnySubsetLoss
from specjax.objectives.base import Batch

V, T = 12, 9
LM = xlnet.XlnetLM(xlnet.XlnetConfig(V, 16, 2, 2, 24, 8))
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, V, (3, T)))
FREE = jnp.asarray([[1] * 9, [0] * 3 + [1] * 6, [1] * 6 + [0] * 3], bool)
"""A text, one with a prompt, and one that is padded."""
BATCH = Batch(TOKENS, FREE)
SHARE = {"low": 0.6, "high": 0.6, "first": 0.6}


def sets(objective, seed):
    """Open positions of each row, as a list, and what each position sees, as sets."""
    opened, sees = (np.asarray(x) for x in objective.orders(BATCH, jax.random.key(seed)))
    places = [np.flatnonzero(row).tolist() for row in opened]
    return places, [[set(np.flatnonzero(row).tolist()) for row in rows] for rows in sees]


@pytest.mark.parametrize("parallel", [False, True])
def test_orders_are_those_of_a_loop(parallel):
    drawn = set()
    for seed in range(12):
        found, sees = sets(AnySubsetLoss(LM, **SHARE, parallel=parallel), seed)
        for row, places in enumerate(found):
            free = np.flatnonzero(FREE[row]).tolist()
            length = free[-1] + 1
            assert set(places) <= set(free) and len(places) == int(0.6 * len(free))
            known = set(range(length)) - set(places)
            for place in range(T):
                before = set() if parallel else {other for other in places if other < place}
                want = set() if place >= length else known | before if place in places else known
                assert sees[row][place] == want
        drawn.add(tuple(map(tuple, found)))
    assert len(drawn) == 12


def test_one_position_at_least_is_known_and_one_is_open():
    for share in (0.01, 0.99):
        objective = AnySubsetLoss(LM, low=share, high=share, first=share)
        for seed in range(4):
            found, sees = sets(objective, seed)
            for row, places in enumerate(found):
                assert places and all(sees[row][place] for place in places)


def test_the_share_grows_to_its_bounds():
    objective = AnySubsetLoss(LM, low=0.6, high=0.9, first=0.2, warmup=0.5)
    at = lambda done, drawn: float(objective.share(jnp.full((1,), done), jnp.full((1,), drawn))[0])
    np.testing.assert_allclose(
        [at(0.0, 0.0), at(0.0, 1.0), at(0.25, 0.0), at(0.25, 1.0)], [0.2, 0.2, 0.4, 0.55], rtol=1e-5
    )
    np.testing.assert_allclose([at(0.5, 0.0), at(1.0, 1.0)], [0.6, 0.9], rtol=1e-5)
    np.testing.assert_allclose(objective.share(None, jnp.asarray([0.5])), [0.75], rtol=1e-5)  # held-out text


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [False, True])
def test_the_loss_is_a_loop_over_tokens(parallel):
    """Each token's probability from a pass of its own over what it sees, in which all other tokens are another one."""
    params = jax.jit(LM.init)(jax.random.key(1))
    params = jax.tree.map(lambda x: 20 * x if x.ndim > 1 else x, params)
    objective = AnySubsetLoss(LM, **SHARE, parallel=parallel)
    key = jax.random.key(4)
    loss, metrics = jax.jit(objective.loss)(params, None, BATCH, key)
    opened, sees = objective.orders(BATCH, key)
    ask = jax.jit(lambda *given: jax.nn.log_softmax(LM(params, *given)[0, 0]))
    nats, right = [], []
    for row, place in zip(*np.nonzero(np.asarray(opened)), strict=True):
        seen = np.asarray(sees[row, place])
        tokens = jnp.where(seen, TOKENS[row], (TOKENS[row] + 1) % V)[None]
        log_probs = ask(tokens, sees[row][None], jnp.asarray([[place]]))
        nats.append(-float(log_probs[TOKENS[row, place]]))
        right.append(int(jnp.argmax(log_probs)) == int(TOKENS[row, place]))
    np.testing.assert_allclose(loss, np.mean(nats), rtol=1e-4)
    np.testing.assert_allclose(metrics["accuracy"], np.mean(right), rtol=1e-5)
    assert int(metrics["weight"]) == len(nats) and max(nats) > 2 * min(nats)


@pytest.mark.parametrize(
    "fields", [{"low": 0.9, "high": 0.8}, {"high": 1.0}, {"first": 0.0}, {"warmup": 1.5}, {"low": float("nan")}]
)
def test_fields_out_of_range(fields):
    (name, value), *_ = fields.items()
    with pytest.raises(ValueError, match=rf"any_subset needs 0 < low <= high < 1.* got .*{name}={value}"):
        AnySubsetLoss(LM, **fields)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The config of a small model, one of another family, and data that repeats itself."""
    folder = tmp_path_factory.mktemp("files")
    shape = {"model_type": "xlnet", "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24}
    (folder / "small.json").write_text(json.dumps(shape))
    (folder / "other.json").write_text(json.dumps(shape | {"model_type": "llama"}))
    (folder / "sized.json").write_text(json.dumps(shape | {"vocab_size": 7}))
    (folder / "list.json").write_text("[1]")
    (folder / "broken.json").write_text("{")
    lm = models.LlamaLM(models.llama_config(V, 16, 24, 1, 2, 2, 8, max_position_embeddings=64))
    models.save(folder / "plain", lm, jax.jit(lm.init)(jax.random.key(0)))
    models.save(folder / "gaps", LM, jax.jit(LM.init)(jax.random.key(0)), diffusion=Gaps(V - 1, False))
    lines = [{"tokens": [3, 4, 5, 6] * 2}] * 16
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def words(files, tmp_path, line, *more):
    own = ["train", line, "--data", files / "data.jsonl", "--output", tmp_path / "out", *more]
    return [str(word) for word in own]


@pytest.mark.slow
@pytest.mark.parametrize("begins", ["new", "trained"])
def test_training_makes_a_model_that_is_read_back_and_fills_in(files, tmp_path, capsys, begins):
    new = ["--target", files / "plain", "--draft-config", files / "small.json"]
    options = ["--steps", 150, "--batch-size", 8, "--length", 8, "--learning-rate", 0.01, "--checkpoint-every", 150]
    more = new if begins == "new" else ["--target", files / "gaps"]
    assert cli.main(words(files, tmp_path, "any_subset", *more, *options)) == 0
    lines = (tmp_path / "out" / "training" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert np.mean(losses[-10:]) < 0.3 * np.mean(losses[:5])
    from specjax.serve.engine import Engine

    for line in ("assd", "assd:drafter=context_ngram"):
        engine = Engine(str(tmp_path / "out"), decode=line)
        assert engine.model.masked == Gaps(-1 if begins == "new" else V - 1, False)
        (record,) = engine.run([engine.request([3, -1, -1, 6, 3, -1, 5, -1])])
        assert record.tokens == [4, 5, 6, 3, 4, 5, 6] and record.new_tokens == 4
    capsys.readouterr()


REFUSED = {
    "another model": (
        ["--target", "plain"],
        "any_subset",
        r"plain'? is an autoregressive model: give a folder of XLNet",
    ),
    "a draft": (["--target", "gaps", "--draft", "plain"], "any_subset", "--draft is not for any_subset"),
    "another family": (
        ["--target", "plain", "--draft-config", "other.json"],
        "any_subset",
        "of a model 'llama', not xlnet",
    ),
    "a vocabulary": (
        ["--target", "plain", "--draft-config", "sized.json"],
        "any_subset",
        "vocab_size must be the 12 of",
    ),
    "a list": (["--target", "plain", "--draft-config", "list.json"], "any_subset", "must hold a JSON object"),
    "no JSON": (["--target", "plain", "--draft-config", "broken.json"], "any_subset", "is not valid JSON"),
    "no file": (["--target", "plain", "--draft-config", "absent.json"], "any_subset", "No such file"),
    "a field": (["--target", "gaps"], "any_subset:rate=0.5", "rate"),
    "its loss": (["--target", "gaps"], "diffusion", "gaps is an any-subset model: train any_subset"),
    "as a target": (["--target", "gaps"], "lm", "gaps is an any-subset model"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_does_not_suit_is_one_line(files, tmp_path, capsys, name):
    more, line, message = REFUSED[name]
    more = [word if word.startswith("--") else files / word for word in more]
    assert cli.main(words(files, tmp_path, line, *more, "--steps", "1", "--length", "8")) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search(message, said), said
