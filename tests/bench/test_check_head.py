"""`specjax check-head`: what is read, without weights too, acceptance by depth, and a verdict that names likely causes."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import CONFIG, TARGET, params
from support.published import specforge, speculators, toy, with_table, write

import specjax
from specjax import cli
from specjax.assembly.registry import build_drafter
from specjax.bench.check_head import verdict
from specjax.draft import Eagle3, Medusa
from specjax.draft.heads.folder import load_head, save_head
from specjax.lm import Block, Output
from specjax.models.hf_config import to_hf

TAPS = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """The table's target in a folder, and a folder that has its config.json alone."""
    folder = tmp_path_factory.mktemp("target")
    specjax.models.save(folder / "whole", TARGET, params()["target"])
    (folder / "bare").mkdir()
    (folder / "bare" / "config.json").write_text(json.dumps(to_hf(CONFIG)))
    return folder


def run(capsys, *words):
    assert cli.main(["check-head", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_a_config_alone_is_enough_to_say_what_is_read(target, tmp_path, capsys):
    head = write(tmp_path / "head", *specforge(**TAPS))
    for model in (target / "bare", target / "bare" / "config.json", target / "whole"):
        said = json.loads(run(capsys, model, head, "--json"))
        assert (said["drafter"], said["format"], said["taps"], said["vocabulary"]) == (
            "eagle3",
            "eagle3",
            [0, 1, 2],
            40,
        )
        assert "acceptance" not in said and "verdict" not in said
    text = run(capsys, target / "bare", head)
    assert "the outputs of layers 0, 1, 2 of 3" in text and "40 of the target's 96 tokens" in text


def test_taps_are_those_of_the_drafter_that_generate_builds(target, tmp_path, capsys):
    config, tensors = speculators(eagle_aux_hidden_state_layer_ids=[1, 2, 3], fc_norm=True)
    head = write(tmp_path / "head", config, with_table(tensors))
    line = f"eagle3:model={head}"
    said = json.loads(run(capsys, target / "whole", head, "--json"))
    drafter, _ = build_drafter(line, toy())
    assert (said["format"], tuple(said["taps"])) == ("speculators", drafter.taps) and said["norms"]["fc_norm"]
    assert cli.main(["check-head", str(target / "bare"), f"{line},taps=0 1", "--json"]) == 2
    assert "fc.weight has shape [64, 192]" in capsys.readouterr().err


@pytest.mark.slow
def test_every_tap_that_is_named_reaches_the_drafts(tmp_path):
    """NaN in one of the features that the taps name, and in no other, leaves nothing of the head's output."""
    config, tensors = specforge(taps=2, eagle_aux_hidden_state_layer_ids=[1, 3])
    drafter, own = load_head(write(tmp_path / "head", config, tensors), "eagle3", Eagle3, toy())
    assert drafter.taps == (0, 2)
    model = {"target": toy().params, "draft": own}
    block = Block(jnp.asarray([[5, 7, 9]]), jnp.arange(3)[None], jnp.zeros((1,), jnp.int32))
    clean = jnp.ones((1, 3, CONFIG.hidden_size))
    for layer in range(3):
        hidden = {tap: clean * (jnp.nan if tap == layer else 1.0) for tap in range(3)}
        h, _ = drafter.read(model, drafter.features(Output(None, hidden=hidden)), block, None)
        assert bool(jnp.isnan(drafter.logits(model, h)).all()) == (layer in drafter.taps)


@pytest.mark.slow
def test_acceptance_by_depth_and_its_verdict(target, tmp_path, capsys):
    """Medusa's first head is the target's own distribution of the token after the next: its drafts are hardly ever
    right."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": [5 + i, 7, 9]}) + "\n" for i in range(2)))
    model = toy()
    medusa = Medusa(heads=2).bind(TARGET)
    own = medusa.init_params(jax.random.key(0), model.params)
    save_head(tmp_path / "medusa", "medusa", {"heads": 2, "layers": 1}, own, model)
    words = [target / "whole", f"medusa:model={tmp_path / 'medusa'},expander=chain,length=2", prompts]
    said = json.loads(run(capsys, *words, "--max-new-tokens", "12", "--batch-size", "2", "--json"))
    assert (said["drafter"], said["format"], said["taps"], said["vocabulary"]) == ("medusa", "specjax", [], 96)
    assert len(said["acceptance"]) == 2 and said["acceptance"][0] >= said["acceptance"][1]
    assert said["steps"] * (1 + sum(said["acceptance"])) == pytest.approx(24, abs=4)
    assert said["verdict"].startswith(f"acceptance at depth 1 is {said['acceptance'][0]:.2f}: ")


def test_the_verdict_names_what_to_try():
    said = {"format": "eagle3", "taps": [1, 15, 28], "target": {"layers": 32}, "norms": {"norm_output": True}}
    low = verdict((0.02, 0.0), said)
    assert low.startswith(
        "acceptance at depth 1 is 0.02: a head that fits its target has more than 0.5; likely causes: "
    )
    assert "taps=0 14 27 or taps=2 16 29" in low and "norm_output=false" in low and "another target" in low
    assert verdict((0.71, 0.5), said) == "acceptance at depth 1 is 0.71: the head fits its target"
    assert "taps" not in verdict((0.02,), {**said, "taps": [], "norms": {}})
    assert "trained too little" in verdict((0.02,), {**said, "format": "specjax"})


@pytest.mark.parametrize(
    "words,message",
    [
        (("bare", "nowhere"), "unknown head 'nowhere'"),
        (("bare", "prompt_lookup"), "is not a drafter with a trained head"),
        (("bare", "HEAD", "a prompt"), "bare has neither model.safetensors nor"),
        (("whole", "HEAD", "a prompt"), "whole has no tokenizer: give prompts as lists of token ids"),
        (("nowhere", "HEAD"), "unknown model"),
        (("bare", "OTHER"), "does not say which drafter it is for"),
    ],
)
def test_what_cannot_be_checked_is_one_line(words, message, target, tmp_path, capsys):
    config, tensors = specforge(**TAPS)
    heads = {"HEAD": write(tmp_path / "head", config, tensors)}
    heads["OTHER"] = write(tmp_path / "other", {"hidden_size": 64}, {"a": np.zeros((1,), np.float32)})
    model, *others = words
    found = [str(target / model), *(str(heads.get(word, word)) for word in others)]
    assert cli.main(["check-head", *found]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_which_drafter_a_folder_is_for(tmp_path):
    from specjax.assembly.heads import head_line

    config, tensors = specforge(**TAPS)
    named = write(tmp_path / "named", config, tensors)
    assert head_line(str(named)) == f"eagle3:model={named}"
    for key in ("architectures", "draft_vocab_size", *TAPS):
        config.pop(key)
    assert head_line(str(write(tmp_path / "tensors", config, tensors))).startswith("eagle3:")
    assert head_line("eagle1:model=x,length=2") == "eagle1:model=x,length=2"
    one = {"fc.weight": np.zeros((2, 4), np.float32)}
    assert head_line(str(write(tmp_path / "one", config, one))).startswith("eagle1:")
    assert head_line(str(write(tmp_path / "hydra", {"hydra_num_heads": 2}, one))).startswith("hydra:")
