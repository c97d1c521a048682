"""How the weights of published heads come: from the hub, in torch's own format, in shards."""

import fnmatch
import json
import shutil

import numpy as np
import pytest
from support.published import BF16, E, V, decoder_layer, draw, llama, specforge, toy, write

from specjax.draft import Eagle, Eagle3, Medusa
from specjax.draft.heads.files import read_tensors
from specjax.draft.heads.folder import load_head
from specjax.models import ModelError

torch = pytest.importorskip("torch")


def tensor(array):
    """As torch holds it: bfloat16 has no numpy type."""
    return torch.from_numpy(array.astype(np.float32)).bfloat16() if array.dtype == BF16 else torch.from_numpy(array)


def publish(folder, config, tensors, file):
    """A hub's repository as its authors uploaded it, with what their training left there."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    torch.save({name: tensor(array) for name, array in tensors.items()}, folder / file)
    for name in ("optimizer.pt", "scheduler.pt", "training_args.bin", "rng_state_0.pth"):
        (folder / name).write_bytes(b"large, and of no use")
    return folder


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub of local repositories: `snapshot_download` copies the files that its patterns allow."""
    import huggingface_hub

    fetched = []

    def snapshot_download(name, allow_patterns, **_):
        to = tmp_path / "cache" / name
        to.mkdir(parents=True, exist_ok=True)
        for file in sorted((tmp_path / "hub" / name).iterdir()):
            if any(fnmatch.fnmatch(file.name, pattern) for pattern in allow_patterns):
                shutil.copy(file, to)
                fetched.append(file.name)
        return str(to)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return tmp_path / "hub", fetched


def medusa():
    """Medusa's: a residual block and a head without a bias for every position, saved by `torch.save`."""
    shapes = {}
    for i in range(3):
        shapes |= {f"{i}.0.linear.weight": (E, E), f"{i}.0.linear.bias": (E,), f"{i}.1.weight": (V, E)}
    config = {
        "medusa_num_heads": 3,
        "medusa_num_layers": 1,
        "base_model_name_or_path": "x",
        "transformers_version": "4.34",
    }
    return config, draw(1, shapes), "medusa_lm_head.pt"


def eagle1():
    """EAGLE-1's: `fc` with a bias, one layer and a copy of the target's embedding."""
    tensors = draw(3, {"fc.weight": (E, 2 * E), "fc.bias": (E,), **decoder_layer("layers.0", E)})
    table = np.asarray(toy().params["embed"]["embedding"]).astype(BF16)
    return llama(architectures=["LlamaForCausalLM"]), {**tensors, "embed_tokens.weight": table}, "pytorch_model.bin"


def eagle3():
    return *specforge(**{"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}), "pytorch_model.bin"


CASES = {"medusa": (medusa, Medusa), "eagle1": (eagle1, Eagle), "eagle3": (eagle3, Eagle3)}


@pytest.mark.parametrize("name", CASES)
def test_a_hub_id_brings_the_torch_file_of_a_head_and_nothing_of_its_training(name, hub):
    repositories, fetched = hub
    make, kind = CASES[name]
    config, tensors, file = make()
    publish(repositories / "lab" / "head", config, tensors, file)
    drafter, own = load_head("lab/head", name, kind, toy())
    assert {*fetched} == {"config.json", file}
    if name == "medusa":
        np.testing.assert_array_equal(own["heads"][2]["kernel"], tensors["2.1.weight"].astype(np.float32).T)
    else:
        np.testing.assert_array_equal(own["fc"]["kernel"], tensors["fc.weight"].astype(np.float32).T)


def test_a_hub_id_with_safetensors_brings_no_torch_file(hub):
    repositories, fetched = hub
    config, tensors, file = eagle3()
    write(publish(repositories / "lab" / "both", config, tensors, file), config, tensors)
    load_head("lab/both", "eagle3", Eagle3, toy())
    assert {*fetched} == {"config.json", "model.safetensors"}


def halves(tensors):
    names = sorted(tensors)
    parts = (names[::2], names[1::2])
    return [{name: tensors[name] for name in part} for part in parts]


def test_sharded_safetensors_are_read(tmp_path):
    config, tensors, _ = eagle3()
    places = {}
    for i, part in enumerate(halves(tensors), 1):
        shard = f"model-0000{i}-of-00002.safetensors"
        write(tmp_path, config, part, shard)
        places |= dict.fromkeys(part, shard)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    _, own = load_head(tmp_path, "eagle3", Eagle3, toy())
    np.testing.assert_array_equal(own["norm"]["scale"], tensors["norm.weight"].astype(np.float32))
    np.testing.assert_array_equal(own["ids"], np.arange(40) * 2 + 5)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match="names files that are not in the folder: model-00002-of-00002.safetensors"):
        load_head(tmp_path, "eagle3", Eagle3, toy())


def test_sharded_torch_files_are_read_from_the_hub(hub):
    repositories, fetched = hub
    config, tensors, _ = eagle3()
    first, second = halves(tensors)
    folder = publish(repositories / "lab" / "shards", config, first, "pytorch_model-00001-of-00002.bin")
    torch.save({name: tensor(array) for name, array in second.items()}, folder / "pytorch_model-00002-of-00002.bin")
    places = dict.fromkeys(first, "pytorch_model-00001-of-00002.bin")
    places |= dict.fromkeys(second, "pytorch_model-00002-of-00002.bin")
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    _, own = load_head("lab/shards", "eagle3", Eagle3, toy())
    np.testing.assert_array_equal(own["norm"]["scale"], tensors["norm.weight"].astype(np.float32))
    assert "optimizer.pt" not in fetched
    for content, message in (
        ({"weight_map": {"fc.weight": "../outside.bin"}}, "not in the folder: ../outside.bin"),
        ({}, "needs a weight_map"),
    ):
        index.write_text(json.dumps(content))
        with pytest.raises(ModelError, match=message):
            read_tensors(folder)
