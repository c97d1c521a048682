"""Which layers an EAGLE-3 head reads: every engine's own, over configurations that people have published."""

import dataclasses
import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import MIXED, TARGET, start
from support.head_start import proposed
from support.published import specforge, toy, write

import specjax
from specjax import cli
from specjax.assembly.heads import named_head, record
from specjax.decode import Speculate
from specjax.draft import Eagle3
from specjax.draft.heads.folder import load_head, read_head
from specjax.draft.heads.taps import read_taps
from specjax.models import ModelError

IDS = "eagle_aux_hidden_state_layer_ids"


def nested(*ids, **more):
    return {"eagle_config": {IDS: list(ids), **more}}


def speculators(*ids):
    return {"speculators_model_type": "eagle3", IDS: list(ids)}


MODELOPT = {
    "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
    "use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1,
}  # fmt: skip

# What is published, the target's layers, and the layers after which its own engine keeps the residual stream.
REAL = {
    "SafeAILab, Llama 3.1 8B: no ids": ({}, 32, (1, 15, 28)),
    "SafeAILab, Llama 3.3 70B: no ids": ({}, 80, (1, 39, 76)),
    "SpecForge, Qwen3 30B-A3B: no ids": ({"eagle_config": None}, 48, (1, 23, 44)),
    "SpecForge's default, written out": (nested(1, 17, 32, use_aux_hidden_state=True), 36, (1, 17, 32)),
    "SpecForge, gpt-oss 20B": (nested(1, 11, 21), 24, (1, 11, 21)),
    "SpecForge, Gemma 4 26B-A4B: its full layers": (nested(5, 17, 29), 30, (5, 17, 29)),
    "SGLang, MiniMax M2.5": (nested(1, 30, 58, use_aux_hidden_state=True), 62, (1, 30, 58)),
    "TorchSpec, Kimi K2.5": (nested(2, 30, 58, use_aux_hidden_state=True), 61, (1, 29, 57)),
    "NVIDIA, gpt-oss 120B v3": (nested(24, 30, 36, **MODELOPT), 36, (23, 29, 35)),
    "ModelOpt's default": (nested(1, 15, 28, **MODELOPT), 32, (1, 15, 28)),
    "ModelOpt, layers of its own": (nested(8, 16, 24, **MODELOPT), 32, (7, 15, 23)),
    "speculators, Qwen3 8B": (speculators(2, 18, 33), 36, (1, 17, 32)),
    "speculators, Qwen3 235B: four": (speculators(2, 46, 91, 93), 94, (1, 45, 90, 92)),
    "speculators, the last boundary": (speculators(2, 18, 36), 36, (1, 17, 35)),
    "speculators, Llama 4 Maverick": (speculators(1, 23, 44), 48, (0, 22, 43)),
    "vLLM, top level": ({IDS: [2, 16, 29]}, 32, (1, 15, 28)),
    "in no order": ({IDS: [33, 2, 18]}, 36, (1, 17, 32)),
    "DeepSpec": ({"target_layer_ids": [1, 9, 17, 25, 33]}, 36, (1, 9, 17, 25, 33)),
}


@pytest.mark.parametrize("name", REAL)
def test_each_published_configuration_taps_what_its_own_engine_does(name):
    config, layers, wanted = REAL[name]
    assert read_taps(config, layers).layers == wanted


def test_what_looks_like_the_other_way_to_count_is_said():
    assert "set taps" in read_taps(speculators(1, 23, 44), 48).why
    assert "set taps" not in read_taps(speculators(2, 18, 33), 36).why


@pytest.mark.parametrize(
    "config,message",
    [
        ({IDS: [2, 16, 33]}, "has 33, and this target has 1 to 32"),
        ({IDS: [0, 16, 29]}, "has 0, the embedding"),
        ({"target_layer_ids": [-1, 4]}, "has -1, the embedding"),
        (nested(1, 2, 2), "different layers"),
        (nested(1, 2, "3"), "different layers"),
        ({IDS: 7}, "different layers"),
    ],
)
def test_ids_that_are_no_layers_are_named(config, message):
    with pytest.raises(ValueError, match=message):
        read_taps(config, 32)


def test_a_file_whose_ids_are_outputs_is_read_so_and_taps_override_it(tmp_path):
    config, tensors = specforge(taps=2, **nested(1, 2))
    write(tmp_path, config, tensors)
    head = read_head(tmp_path, "eagle3", Eagle3, toy())
    assert head.drafter.taps == (1, 2)
    assert any("1, 2 of 3" in note and "since the first is 1" in note for note in head.notes)
    drafter, own = load_head(tmp_path, "eagle3", Eagle3, toy(), taps=(0, 1))
    assert drafter.taps == (0, 1) and drafter.feature_wants.hidden == (0, 1)
    np.testing.assert_array_equal(own["fc"]["kernel"], tensors["fc.weight"].astype(np.float32).T)
    with pytest.raises(ModelError, match=r"fc.weight has shape \[64, 128\]"):
        load_head(tmp_path, "eagle3", Eagle3, toy(), taps=(0, 1, 2))


def test_the_command_line_sets_taps_and_says_which_they_are(tmp_path, capsys):
    model = toy()
    specjax.models.save(tmp_path / "target", model.lm, model.params)
    head = write(tmp_path / "head", *specforge(taps=2, **nested(1, 2)))
    words = ["drafters", "--model", str(tmp_path / "target"), "--drafter"]
    assert cli.main([*words, f"eagle3:model={head}"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["drafter"], said["format"], said["taps"]) == ("eagle3", "eagle3", [1, 2])
    assert (said["vocabulary"], said["target"]["vocabulary"]) == (40, 96) and any(
        "outputs" in note for note in said["notes"]
    )
    assert cli.main([*words, f"eagle3:model={head},taps=0 1"]) == 0
    assert json.loads(capsys.readouterr().out)["taps"] == [0, 1]
    assert cli.main([*words, f"eagle3:model={head},taps=0-1"]) == 2
    assert "whole numbers with spaces" in capsys.readouterr().err
    assert cli.main([*words, "prompt_lookup"]) == 2
    assert "not a drafter with a trained head" in capsys.readouterr().err


def test_verbose_says_how_a_head_is_read(tmp_path, capsys):
    model = toy()
    specjax.models.save(tmp_path / "target", model.lm, model.params)
    head = write(tmp_path / "head", *specforge(taps=2, **nested(1, 2)))
    (tmp_path / "prompts.jsonl").write_text(
        '{"prompt": [500]}\n'
    )  # no line is valid: what is loaded is all that happens
    words = ["generate", "--model", str(tmp_path / "target"), "--drafter", f"eagle3:model={head},length=1"]
    words += ["--input", str(tmp_path / "prompts.jsonl")]
    assert cli.main([*words, "--verbose"]) == 2
    assert "head taps the outputs of layers 1, 2 of 3" in capsys.readouterr().err
    assert cli.main(words) == 2
    assert "taps" not in capsys.readouterr().err


@dataclasses.dataclass(frozen=True)
class Poisoned:
    """A target whose residual streams have `params["poison"]` `[L]` added on their way out, and nowhere else."""

    lm: Any = TARGET

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.lm, name)

    def __call__(self, params, block, cache, *, wants, **more):
        every = dataclasses.replace(wants, hidden=tuple(range(3)) if wants.hidden else ())
        out = self.lm(params["lm"], block, cache, wants=every, **more)
        hidden = {layer: h + params["poison"][layer] for layer, h in (out.hidden or {}).items()}
        return dataclasses.replace(out, hidden=hidden or None)

    def embed(self, params, tokens):
        return self.lm.embed(params["lm"], tokens)

    def unembed(self, params, h):
        return self.lm.unembed(params["lm"], h)


@pytest.mark.slow
def test_a_poisoned_tap_is_seen_in_the_drafts_of_generate(tmp_path):
    """The taps that a record names are those whose layers reach the drafts: of the others NaN changes no token of them."""
    line = f"eagle3:model={write(tmp_path, *specforge(taps=2, **nested(1, 2)))},length=2"
    target = toy(Poisoned(), {"lm": toy().params, "poison": jnp.zeros((3,))})
    decoder, model = Speculate(line).bind(target)
    taps = record(*named_head(line, toy()))["taps"]
    rows = MIXED.pick(1, 3)

    def drafted(poison):
        own = {**model, "target": {**model["target"], "poison": poison}}
        state = start(decoder, rows, model=own)
        return np.asarray(proposed(decoder, own, state).tree.tokens[:, 1:]), np.asarray(state.draft.feature)

    clean, _ = drafted(jnp.zeros((3,)))
    for layer in range(3):
        tokens, feature = drafted(jnp.where(jnp.arange(3) == layer, jnp.nan, 0.0))
        assert np.isnan(feature).all() == (layer in taps) and (tokens == clean).all() == (layer not in taps)
