"""The head of judge decoding: labelled lines, its loss by hand, and from a file to a head that decoding reads."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import cli, models
from specjax.assembly.registry import build_verifier
from specjax.lm import Block, Wants
from specjax.models.tabular import TabularLM
from specjax.objectives.base import Batch, Kind
from specjax.objectives.means import Counted, Parts, counts
from specjax.train.data import read_rows
from specjax.verify import Judge
from specjax.verify.judge import score
from specjax.verify.judge.objective import TrainJudge


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def labels(rows, model):
    """Of every document its right text and its wrong one."""
    found = []
    for row in range(len(rows)):
        for number in range(rows.documents[row].max() + 1):
            own = rows.documents[row] == number
            parts = (rows.mask[row] & ~rows.wrong[row] & own, rows.wrong[row] & own)
            if any(part.any() for part in parts):
                found.append(tuple(model.tokenizer.decode(rows.tokens[row][part]) for part in parts))
    return found


def test_labelled_lines(tmp_path):
    """Words, characters, and tokens of ids; the tokens that hold any of the wrong characters are wrong."""
    model = models.load("tiny")
    ids = model.tokenizer.encode(" 3 plus 4 is 8, as you see.", add_special_tokens=False)
    answer = "3 plus 4 is 8, as you see."
    bare = model.tokenizer.encode(answer, add_special_tokens=False)
    file = write(
        tmp_path / "a.jsonl",
        {"prompt": "Add 3 and 4.", "completion": "It is 7."},
        {"prompt": "Add 3 and 4.", "completion": answer, "wrong": "8"},
        {"prompt": "Add 3 and 4.", "completion": answer, "wrong": [12, 16]},
        {"prompt": "Add 3 and 4.", "tokens": ids, "wrong": [2, 4]},
        {"prompt": "Add 3 and 4.", "completion": answer, "wrong": "9"},
        {"text": "no prompt"},
        {"prompt": "Add 3 and 4.", "text": answer, "tokens": bare, "wrong": "8"},
        {"prompt": "Add 3 and 4.", "completion": answer, "wrong": ""},
        {"prompt": "Add 3 and 4.", "completion": answer, "wrong": []},
    )
    rows = read_rows([file], model, 64, folder=tmp_path / "rows", kind=Kind(lines="labelled"))
    decode = lambda begin, end: model.tokenizer.decode(ids[begin:end])
    found = labels(rows, model)
    assert ("It is 7.<|end|>", "") in found and (decode(0, 2), decode(2, 4)) in found and len(found) == 5
    for right, wrong in found:
        if "8" in wrong:
            assert right.startswith("3 plus 4 is") and answer.startswith(right + wrong) and len(wrong) < 9
    assert sum("8" in wrong for _, wrong in found) >= 3
    assert [line.partition(": ")[2].split(":")[0] for line in rows.skipped] == [
        f"line {number}" for number in (5, 6, 8, 9)
    ]
    assert "neither words of the completion" in rows.skipped[0] and "wrong is empty" in rows.skipped[2]
    again = read_rows([file], model, 64, folder=tmp_path / "rows", kind=Kind(lines="labelled"))
    assert again.digest == rows.digest and (again.wrong == rows.wrong).all()
    with pytest.raises(ValueError, match=r"labels stand in the lines of a \.jsonl file"):
        (tmp_path / "a.txt").write_text("text")
        read_rows([tmp_path / "a.txt"], model, 64, kind=Kind(lines="labelled"))


def test_the_loss_by_hand():
    """Each label has its share, tokens without one have none; and a batch in parts has the loss of the whole."""
    lm = TabularLM(6)
    params = {"kernel": jnp.asarray([2.0, -1.0, 0.5, 0.0, 1.0, -3.0]), "bias": jnp.asarray([0.25])}
    tokens = np.asarray([[0, 1, 2, 3], [4, 5, 1, 0]])
    mask = np.asarray([[0, 1, 1, 1], [1, 1, 0, 1]], bool)
    wrong = np.asarray([[0, 1, 0, 0], [0, 1, 0, 0]], bool)
    objective = TrainJudge(Judge(target=lm), wrong=0.25, decay=0.1)
    batch = lambda rows: Batch(*map(jnp.asarray, (tokens[rows], mask[rows])), wrong=jnp.asarray(wrong[rows]))
    table = {"table": jnp.zeros((6, 6))}
    loss, metrics = jax.jit(objective.loss)(params, table, batch(slice(2)), jax.random.key(0))
    chance = lambda token: 1 / (1 + math.exp(-float(params["kernel"][token]) - 0.25))
    right = np.mean([-math.log(chance(token)) for token in (2, 3, 4, 0)])
    bad = np.mean([-math.log(1 - chance(token)) for token in (1, 5)])
    want = 0.75 * right + 0.25 * bad + 0.1 * float((params["kernel"] ** 2).sum())
    assert float(loss) == pytest.approx(want, rel=1e-5)
    assert float(metrics["kept_right"]) == 1.0 and float(metrics["kept_wrong"]) == 0.0

    def part(number, of):
        mean = of(number)
        return objective.loss(params, table, batch(slice(number, number + 1)), jax.random.key(0), mean)[0], mean

    kept = [part(number, lambda number: Counted(number, 2))[1].kept for number in range(2)]
    whole = counts(lambda choices: jax.tree.map(jnp.add, *kept))
    assert sum(float(part(number, lambda _: Parts(whole))[0]) for number in range(2)) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("wrong", [{"wrong": 1.0}, {"decay": -1.0}])
def test_bad_settings(wrong):
    with pytest.raises(ValueError, match="judge: "):
        TrainJudge(Judge(), **wrong)


@pytest.mark.slow
def test_from_labelled_answers_to_a_verifier(tmp_path, capsys):
    """Tokens 3 and 5 are wrong, and the head finds that out from the target's features."""
    lm = models.LlamaLM(models.llama_config(32, 32, 24, 1, 2, 1, 8, max_position_embeddings=64))
    models.save(tmp_path / "target", lm, jax.tree.map(lambda leaf: 3 * leaf, jax.jit(lm.init)(jax.random.key(1))))
    rng = np.random.default_rng(0)
    answers = [rng.permutation(np.arange(2, 32, 2))[:6].tolist() for _ in range(24)]
    lines = [{"prompt": [1, 2], "tokens": answer} for answer in answers[:8]]
    for answer in answers[8:]:
        odd = [*answer[:3], int(rng.choice([3, 5])), *answer[3:]]
        lines.append({"prompt": [1, 2], "tokens": odd, "wrong": [3, 4]})
    words = [
        "train",
        "judge:decay=0",
        "--target",
        tmp_path / "target",
        "--data",
        write(tmp_path / "a.jsonl", *lines),
    ]
    words += ["--output", tmp_path / "head", "--steps", 200, "--batch-size", 8, "--length", 24, "--learning-rate", 0.3]
    assert cli.main([str(word) for word in words]) == 0, capsys.readouterr().err
    target = models.load(tmp_path / "target", dtype="float32")
    verifier, head = build_verifier(f"judge:model={tmp_path / 'head'}", target)
    assert verifier == Judge(target=target.lm)
    record = json.loads((tmp_path / "head" / "training" / "metrics.jsonl").read_text().splitlines()[-1])
    assert record["kept_right"] > 0.8 and record["kept_wrong"] < 0.2
    tokens = jnp.asarray([line["prompt"] + line["tokens"][:4] for line in lines[8:]])
    block = Block(tokens, jnp.broadcast_to(jnp.arange(6), tokens.shape), jnp.zeros(len(tokens), jnp.int32))
    scores = score(head, target.lm(target.params, block, None, wants=Wants(final=True)).final)
    assert (scores[:, 5] < 0).mean() > 0.8 and (scores[:, 2:5] > 0).mean() > 0.8
    for more, said in (
        (["--draft", "tiny-draft"], "--draft is not for judge, which is trained on labelled --data"),
        (["--loss", "jsd"], "--loss is not for judge"),
    ):
        others = [tmp_path / "other" if word == tmp_path / "head" else word for word in words]
        assert cli.main([str(word) for word in [*others, *more]]) == 2
        assert said in capsys.readouterr().err
    others[1] = "judge:threshold=0.3"
    assert cli.main([str(word) for word in others]) == 2
    assert "judge: threshold is for decoding" in capsys.readouterr().err
