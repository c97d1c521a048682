"""Our own heads on disk: written and read back the same, and refused where they do not belong."""

import dataclasses
import json

import chex
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.conformance import TARGET, params

import specjax
from specjax.assembly.registry import build_drafter
from specjax.draft import (
    MTP,
    Chimera,
    Clover,
    Clover2,
    DFlash,
    DFlash2,
    Domino,
    Dovetail,
    DSpark,
    Eagle,
    Eagle3,
    Falcon,
    Fspad,
    Gemma4Assistant,
    Griffin,
    Gumiho,
    Hydra,
    JetSpec,
    LongSpec,
    LSTMSpeculator,
    Medusa,
    MLPSpeculator,
    PEagle,
)
from specjax.draft.heads.folder import load_head, save_head
from specjax.expand import Chain
from specjax.models import ModelError

KINDS = {
    "medusa": (Medusa(layers=2), {"heads": 3, "layers": 2}),
    "hydra": (Hydra(prefix_layer=True), {"prefix_layer": True}),
    "mlp_speculator": (MLPSpeculator(tied=False, inner=24), {"tied": False, "inner": 24}),
    "lstm_speculator": (LSTMSpeculator(one_table=False), {"one_table": False}),
    "eagle1": (Eagle(), {}),
    "eagle3": (Eagle3(taps=(0, 2)), {"taps": [0, 2]}),
    "fspad": (Fspad(), {}),
    "griffin": (Griffin(), {}),
    "dovetail": (Dovetail(layers=2), {"layers": 2}),
    "falcon": (Falcon(carries=True), {"block": 2, "carries": True}),
    "gumiho": (Gumiho(layers=3, mlps=2), {"layers": 3, "mlps": 2}),
    "peagle": (PEagle(taps=(0, 2)), {"taps": [0, 2]}),
    "dflash": (DFlash(layers=2, block=5), {"layers": 2, "block": 5}),
    "dflash2": (DFlash2(block=5, group=4, candidates=9), {"block": 5, "group": 4, "candidates": 9}),
    "jetspec": (JetSpec(layers=2, block=5), {"layers": 2, "block": 5, "causal": True}),
    "dspark": (DSpark(block=3, rank=4, markov="gated"), {"block": 3, "rank": 4, "markov": "gated"}),
    "domino": (Domino(block=3, state=8, rank=4, plain=0), {"block": 3, "state": 8, "rank": 4, "plain": 0}),
    "gemma4_assistant": (Gemma4Assistant(layers=2), {"layers": 2}),
    "mtp": (MTP(), {}),
    "longspec": (LongSpec(window=9), {"window": 9, "layer": 2}),
    "clover": (Clover(), {"layers": 1, "heads": 3}),
    "clover2": (Clover2(), {"layers": 2}),
    "chimera": (Chimera(heads=3), {"heads": 3}),
}
IDS = np.arange(0, 96, 3)


@pytest.fixture(scope="module")
def target():
    return specjax.models.Model(TARGET, params()["target"], None, (), "toy", None, np.dtype("float32"))


def saved(folder, name, target, ids=None, dtype="float32"):
    drafter, fields = KINDS[name]
    drafter = drafter.bind(TARGET)
    own = drafter.init_params(jax.random.key(5), target.params)
    if ids is not None:
        own = drafter.trimmed(own, target.params, ids)[1]
    save_head(folder, name, fields, own, target, dtype)
    return own


@pytest.mark.parametrize("ids", [None, IDS], ids=["whole", "trimmed"])
@pytest.mark.parametrize("name", KINDS)
def test_round_trip(name, ids, target, tmp_path):
    own = saved(tmp_path, name, target, ids)
    drafter, read = load_head(tmp_path, name, type(KINDS[name][0]), target, expander=Chain(2))
    assert drafter.depth == 2 and drafter.target == TARGET
    chex.assert_trees_all_equal(read, own)


def test_a_registry_line_reads_a_folder(target, tmp_path):
    saved(tmp_path, "eagle1", target, dtype="float16")
    drafter, read = build_drafter(f"eagle1:model={tmp_path},expander=top_k,k=2,depth=3,nodes=6", target)
    assert (drafter.nodes, drafter.depth) == (6, 3) and read["fc"]["kernel"].dtype == np.float32
    same, _ = build_drafter(f"eagle2:model={tmp_path}", target)  # EAGLE-2 shares EAGLE-1's weights
    assert dataclasses.replace(same, expander=drafter.expander) == drafter
    fused, both = build_drafter(f"token_recycling:k=4+eagle1:model={tmp_path}", target)
    assert both[0] is None and both[1]["fc"] is not None and fused.nodes > drafter.nodes


def test_what_does_not_belong_is_refused(target, tmp_path):
    saved(tmp_path, "eagle1", target)
    with pytest.raises(ModelError, match="is a head for eagle1, not for medusa"):
        load_head(tmp_path, "medusa", Medusa, target)
    changed = jax.tree.map(lambda x: x * 1.01, target.params)
    with pytest.raises(ModelError, match="was trained for the target 'toy', and 'other' is another model"):
        load_head(tmp_path, "eagle1", Eagle, dataclasses.replace(target, params=changed, name="other"))
    with pytest.raises(ModelError, match="unknown head for eagle1 'nowhere'"):
        load_head("nowhere", "eagle1", Eagle, target)
    saved(tmp_path / "m", "medusa", target)
    with pytest.raises(ModelError, match="was made with layers=2, so it cannot be 3"):
        load_head(tmp_path / "m", "medusa", Medusa, target, layers=3)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_a_target_of_fewer_bits_is_known(dtype, target, tmp_path):
    """By some of its numbers, as near as they are rounded; another one is refused as in float32."""
    saved(tmp_path, "eagle1", target)
    _, read = load_head(tmp_path, "eagle1", Eagle, specjax.models.retyped(target, dtype))
    assert read["fc"]["kernel"].dtype == dtype
    changed = dataclasses.replace(target, params=jax.tree.map(lambda x: x * 1.02, target.params), name="other")
    with pytest.raises(ModelError, match="was trained for the target 'toy', and 'other' is another model"):
        load_head(tmp_path, "eagle1", Eagle, specjax.models.retyped(changed, dtype))


def change(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    "edit,message",
    [
        (lambda t: t.pop("fc.bias"), r"missing fc.bias \[64\]"),
        (lambda t: t.update(more=np.zeros(2, np.float32)), r"unknown more \[2\]"),
        (lambda t: t.update({"fc.bias": np.zeros(3, np.float32)}), r"fc.bias has shape \[3\]"),
        (lambda t: t.update(ids=t["ids"][::-1].copy()), "must be increasing target ids"),
        (lambda t: t.update(ids=t["ids"] + 9), "names token 102, the target has 0 to 95"),
    ],
)
def test_tensors_that_do_not_fit(edit, message, target, tmp_path):
    saved(tmp_path, "eagle1", target, IDS)
    change(tmp_path, edit)
    with pytest.raises(ModelError, match=message):
        load_head(tmp_path, "eagle1", Eagle, target)


def test_unknown_fields_are_named(target, tmp_path):
    saved(tmp_path, "eagle1", target)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "fields": {"frob": 1}}))
    with pytest.raises(ModelError, match="eagle1 has no field 'frob'"):
        load_head(tmp_path, "eagle1", Eagle, target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fields": [1]}, "fields must be an object"),
        ({"fields": "x"}, "fields must be an object"),
        ({"target": "tiny"}, "target must be an object"),
        ({"target": None}, "was trained for the target None"),
        ({"fields": {"layers": "x"}}, "has a field of the wrong kind"),
        ({"drafter": {}}, "is a head for {}, not for medusa"),
    ],
)
def test_a_config_of_the_wrong_kind(changes, message, target, tmp_path):
    saved(tmp_path, "medusa", target)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError) as error:
        load_head(tmp_path, "medusa", Medusa, target)
    assert message in str(error.value) and "\n" not in str(error.value)
