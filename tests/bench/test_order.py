"""The order in which positions become known, and the command that shows it."""

import json

import jax
import pytest

from specjax import cli, models
from specjax.bench.order import unmask_order
from specjax.diffusion import Fixed, Redo, diffusion
from specjax.models import LlamaLM, Masked, llama_config
from specjax.prompts import Prompts
from specjax.sampling import row_keys

LM = LlamaLM(llama_config(16, 16, 16, 1, 2, 1, 8, max_position_embeddings=64, tie_word_embeddings=True))


@pytest.mark.parametrize("policy", (Fixed(2), Redo(2, 1, 0.5)))
def test_every_open_position_has_the_pass_that_wrote_it_last(policy):
    made = diffusion(LM, 15, policy, block_length=4)
    params = {"target": LM.init(jax.random.key(0))}
    state = made.init(params, Prompts.of([[3, 4, 5]], 8, keys=row_keys(0, ["a"])), capacity=16)
    order, end = unmask_order(made, params, state)
    passes = int(end.stats.steps[0])
    assert (
        passes == order.max() and passes == 4 if isinstance(policy, Fixed) else passes > 8
    )  # some token was written twice
    first, second = order[0, 3:7], order[0, 7:11]
    assert (order[0, :3] == 0).all() and (order[0, 11:] == 0).all() and first.min() > 0
    assert first.max() <= passes // 2 < second.min()
    if isinstance(policy, Fixed):
        assert sorted(first) == [1, 1, 2, 2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("order") / "tiny"
    models.save(path, LM, LM.init(jax.random.key(0)), diffusion=Masked(15, False))
    (path.parent / "in.jsonl").write_text(json.dumps({"prompt": [1, 2, 3], "suffix": [4]}) + "\n")
    return path


@pytest.mark.slow
def test_the_command_prints_and_draws(folder, capsys):
    picture = folder.parent / "order.png"
    words = [
        "bench",
        "order",
        "--model",
        str(folder),
        "--input",
        str(folder.parent / "in.jsonl"),
        "--max-new-tokens",
        "6",
    ]
    words += ["--decode", "fixed:steps=2,cache=none,block_length=8"]
    assert cli.main([*words, "--json", "--plot", str(picture)]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["decoder"], row["passes"]) for row in rows] == [
        ("fixed:cache=none,block_length=8", 6), ("fixed:steps=2,cache=none,block_length=8", 2),
    ]  # fmt: skip
    assert sorted(rows[0]["order"]) == [0, 1, 2, 3, 4, 5, 6] and rows[0]["order"][-1] == 0  # the suffix was given
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert cli.main(words) == 0 and "fixed:steps=2,cache=none,block_length=8" in capsys.readouterr().out


def test_it_is_for_diffusion_models(capsys):
    assert cli.main(["bench", "order", "--model", "tiny-draft", "--drafter", "none"]) == 2
    assert "the suite order is for diffusion models" in capsys.readouterr().err
