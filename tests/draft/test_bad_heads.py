"""What cannot be served is one line that names the file and the key in it."""

import dataclasses

import jax
import numpy as np
import pytest
from support.conformance import TARGET
from support.published import E, specforge, speculators, toy, with_table, write

from specjax.draft import Eagle3, Medusa
from specjax.draft.heads.folder import read_head, save_head
from specjax.models import ModelError

TAPS = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}


def offsets_that_fall(config, tensors):
    tensors["d2t"] = tensors["d2t"][::-1].copy()


BAD = {
    "another width": (lambda c, t: c.update(hidden_size=32), "config.json", "hidden_size"),
    "of a wider target": (lambda c, t: c.update(target_hidden_size=128), "config.json", "target_hidden_size"),
    "another vocabulary": (lambda c, t: c.update(vocab_size=97), "config.json", "vocab_size"),
    "layers it does not have": (
        lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[1, 2, 9]),
        "config.json",
        "layer_ids",
    ),
    "both norms": (
        lambda c, t: c.update(norm_before_fc=True, fc_norm=True),
        "config.json",
        "norm_before_fc and fc_norm",
    ),
    "a map that falls": (offsets_that_fall, "head", "d2t"),
    "a map of ids": (lambda c, t: t.update(d2t=np.flatnonzero(t["t2d"]).astype(np.int64)), "head", "d2t"),
    "a map of another mask": (lambda c, t: t.update(t2d=~t["t2d"]), "head", "t2d"),
    "another kind": (lambda c, t: c.update(architectures=["DFlashDraftModel"]), "config.json", "architectures"),
    "a flag that nobody knows": (lambda c, t: c.update(frob=1), "config.json", "'frob'"),
    "a tensor that nobody knows": (lambda c, t: t.update(frob=np.zeros(1, np.float32)), "head", "frob"),
    "a tensor less": (lambda c, t: t.pop("midlayer.hidden_norm.weight"), "head", "midlayer.hidden_norm.weight"),
}


def refused(folder, name, kind, target, *words):
    with pytest.raises(ModelError) as error:
        read_head(folder, name, kind, target)
    text = str(error.value)
    assert "\n" not in text and text.startswith(str(folder)) and all(word in text for word in words)


@pytest.mark.parametrize("name", BAD)
def test_a_published_head_that_cannot_be_served(name, tmp_path):
    change, *words = BAD[name]
    config, tensors = specforge(**TAPS)
    change(config, tensors)
    refused(write(tmp_path / "head", config, tensors), "eagle3", Eagle3, toy(), *words)


@pytest.mark.parametrize("change", [{"speculators_model_type": "dflash"}, {"norm_before_fc": True, "fc_norm": True}])
def test_a_file_of_speculators_that_cannot_be_served(change, tmp_path):
    config, tensors = speculators(**change)
    refused(write(tmp_path / "head", config, with_table(tensors)), "eagle3", Eagle3, toy(), "config.json", min(change))


def test_a_head_of_our_own_for_another_target(tmp_path):
    """The hash tells targets of one shape apart."""
    medusa = Medusa(heads=1).bind(TARGET)
    save_head(tmp_path, "medusa", {"heads": 1}, medusa.init_params(jax.random.key(0), toy().params), toy())
    table = toy().params["embed"]["embedding"]
    other = dataclasses.replace(toy(), params={**toy().params, "embed": {"embedding": table + 1}}, name="other")
    assert table.shape[1] == E
    with pytest.raises(ModelError, match="the target 'toy', and 'other' is another model .target in .*config.json"):
        read_head(tmp_path, "medusa", Medusa, other)
