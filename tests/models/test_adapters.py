"""LoRA adapters in PEFT's layout, against the formula; and those that are more than that."""

import json

import jax
import numpy as np
import pytest

import specjax
from experiments.costs import jobs
from specjax import models
from specjax.bench import goodput
from specjax.models import ModelError
from specjax.serve.sampling import Sampling
from specjax.sharding import make_mesh
from specjax.train.command import prepare
from specjax.train.options import TrainOptions

safetensors = pytest.importorskip("safetensors.numpy")
CONFIG = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "x", "r": 3, "lora_alpha": 6, "bias": "none",
    "lora_dropout": 0.1, "target_modules": ["q_proj"], "use_rslora": False, "use_dora": False, "modules_to_save": None,
    "rank_pattern": {}, "alpha_pattern": {}, "init_lora_weights": True, "fan_in_fan_out": False, "inference_mode": True,
    "layers_to_transform": None, "loftq_config": {}, "megatron_core": "megatron.core", "layer_replication": None,
}  # fmt: skip
MODULES = {
    "llama3": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj"),
    "phi3": ("self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj"),
    "gpt_neox": ("attention.query_key_value", "mlp.dense_4h_to_h"),
    "ernie4_5": ("self_attn.k_proj", "self_attn.v_proj"),  # rows of keys lie otherwise in the file
    "mixtral": ("self_attn.v_proj", "block_sparse_moe.experts.3.w2", "block_sparse_moe.experts.0.w1"),
}
RANK = 3


def adapter(folder, shapes, rng=None, **config):
    """Matrices for tensors of these shapes, in PEFT's layout; returns them by the tensor's name."""
    rng, pairs, arrays = rng or np.random.default_rng(0), {}, {}
    for name, (outputs, inputs) in shapes.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        a, b = (rng.normal(0, 0.3, shape).astype(np.float32) for shape in ((RANK, inputs), (outputs, RANK)))
        pairs[name] = a, b
        arrays |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    safetensors.save_file(arrays, folder / "adapter_model.safetensors")
    return pairs


def shapes_of(folder, modules, layer=1):
    stored = safetensors.load_file(folder / "model.safetensors")
    first = "gpt_neox" if folder.name == "gpt_neox" else "model"
    names = (f"{first}.layers.{layer}.{module}.weight" for module in modules)
    return {name: stored[name].shape for name in names}, stored


def summed(folder, to, stored, pairs, scale):
    """The folder with the sums in its tensors."""
    to.mkdir()
    (to / "config.json").write_text((folder / "config.json").read_text())
    changed = {name: stored[name] + np.float32(scale) * b @ a for name, (a, b) in pairs.items()}
    safetensors.save_file(stored | changed, to / "model.safetensors")
    return to


@pytest.mark.parametrize(
    ("name", "rslora"),
    (
        ("llama3", False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("phi3", True), ("mixtral", False), ("ernie4_5", False), ("gpt_neox", False))
        ),
    ),
)
def test_it_is_the_formula(references, tmp_path, name, rslora):
    folder = references(name).folder
    shapes, stored = shapes_of(folder, MODULES[name])
    pairs = adapter(tmp_path / "lora", shapes, use_rslora=rslora)
    scale = 6 / 3**0.5 if rslora else 2.0
    want = models.load(summed(folder, tmp_path / "sum", stored, pairs, scale), dtype="float32")
    got = models.load(folder, dtype="float32", adapter=tmp_path / "lora")
    plain = models.load(folder, dtype="float32")
    moved = 0
    for own, theirs, before in zip(*(jax.tree.leaves(x.params) for x in (got, want, plain)), strict=True):
        np.testing.assert_allclose(own, theirs, atol=1e-5)
        moved += not np.array_equal(own, before)
    kinds = {"llama3": 4, "phi3": 6, "mixtral": 3, "ernie4_5": 2, "gpt_neox": 4}
    assert moved == kinds[name] and got.adapter == (tmp_path / "lora",)
    models.save(tmp_path / "whole", got.lm, got.params)
    again = models.load(tmp_path / "whole", dtype="float32")
    assert all(map(np.array_equal, jax.tree.leaves(again.params), jax.tree.leaves(got.params)))


@pytest.mark.slow
def test_on_a_mesh_with_copies_and_from_an_orbax_folder(references, tmp_path):
    folder = references("llama3").folder
    pairs = adapter(tmp_path / "lora", shapes_of(folder, MODULES["llama3"])[0])
    assert pairs
    want = models.load(folder, dtype="float32", adapter=tmp_path / "lora")
    mesh = make_mesh("data=2,model=4")
    placed = models.load(folder, dtype="float32", mesh=mesh, adapter=tmp_path / "lora")
    plain = models.load(folder, dtype="float32", mesh=mesh)
    assert placed.lm.kv_copies == 2
    spread = models.spread(want.lm, want.params, mesh)[1]
    for own, theirs, before in zip(*(jax.tree.leaves(x) for x in (placed.params, spread, plain.params)), strict=True):
        np.testing.assert_allclose(own, theirs, atol=1e-6)
        assert own.sharding == before.sharding
    base = models.load(folder, dtype="float32")
    models.save(tmp_path / "orbax", base.lm, base.params, layout="orbax")
    again = models.load(tmp_path / "orbax", dtype="float32", adapter=tmp_path / "lora")
    assert all(map(np.array_equal, jax.tree.leaves(again.params), jax.tree.leaves(want.params)))


def test_sums_are_rounded_once(references, tmp_path):
    folder = references("llama3").folder
    shapes, stored = shapes_of(folder, ("mlp.up_proj",))
    ((name, (a, b)),) = adapter(tmp_path / "lora", shapes, lora_alpha=0.02).items()
    got = models.load(folder, dtype="bfloat16", adapter=str(tmp_path / "lora")).params["layers"][1]["mlp"]["up"][
        "kernel"
    ]
    half = jax.numpy.bfloat16
    want = (stored[name].astype(half).astype(np.float32) + 0.02 / 3 * b @ a).astype(half).T
    assert got.dtype == half and (np.asarray(got) == want).mean() > 0.999


@pytest.mark.slow
def test_it_writes_as_the_model_does_that_has_it(references, tmp_path):
    """As `load` merges it."""
    folder = references("llama3").folder
    shapes, stored = shapes_of(folder, MODULES["llama3"])
    pairs = adapter(tmp_path / "lora", shapes)
    whole = summed(folder, tmp_path / "sum", stored, pairs, 2.0)
    ask = dict(prompts=[[5, 6, 7, 8]], max_new_tokens=12, drafter="none", sampling=Sampling(ignore_eos=True))
    (got,) = specjax.generate(models.load(str(folder), adapter=tmp_path / "lora"), **ask)
    assert got.tokens == specjax.generate(str(whole), **ask)[0].tokens != specjax.generate(str(folder), **ask)[0].tokens
    with pytest.raises(ValueError, match="adapter, longest, revision and config have no effect on a loaded model"):
        models.load(models.load(folder), adapter=tmp_path / "lora")


@pytest.mark.slow
def test_the_commands_take_it(references, tmp_path, capsys):
    from specjax import cli

    folder = references("llama3").folder
    adapter(tmp_path / "lora", shapes_of(folder, MODULES["llama3"])[0])
    run = lambda *words: (cli.main([str(word) for word in words]), capsys.readouterr().err)
    words = ("--adapter", tmp_path / "lora", "--layout", "safetensors", "--dtype", "float32")
    assert run("convert", folder, tmp_path / "whole", *words)[0] == 0
    adapter(tmp_path / "more", shapes_of(folder, ("mlp.up_proj",))[0])
    assert run("convert", folder, tmp_path / "both", *words, "--adapter", tmp_path / "more")[0] == 0
    for made, added in (("whole", tmp_path / "lora"), ("both", [tmp_path / "lora", str(tmp_path / "more")])):
        whole, merged = models.load(tmp_path / made), models.load(folder, adapter=added)
        assert all(map(np.array_equal, jax.tree.leaves(whole.params), jax.tree.leaves(merged.params)))
    (tmp_path / "scored.jsonl").write_text('{"prompt": [5], "continuation": [6]}')
    (tmp_path / "lines.jsonl").write_text('{"prompt": [5], "max_new_tokens": 2}')
    here = ("--model", folder, "--adapter")
    job = ("generate", "--input", tmp_path / "lines.jsonl", "--output", tmp_path / "out.jsonl", "--max-new-tokens", 2)
    assert run(*job, *here, tmp_path / "lora")[0] == 0 and run(*job, *here, tmp_path / "lora")[0] == 0
    status, err = run(*job, "--model", folder)  # what was begun with it does not go on without
    assert status == 2 and "adapter" in err, err
    for words, said in (
        (("generate", *here, tmp_path / "lora", "--adapter", tmp_path / "none", "x"), "unknown adapter"),
        (("score", *here, tmp_path, "--input", tmp_path / "scored.jsonl"), "has no adapter_config.json"),
        (("bench", *here, tmp_path, "--peer", "transformers"), "--adapter: other engines would read"),
        (
            ("convert", "medusa", tmp_path / "y", "--format", "eagle3", "--adapter", "x"),
            "--adapter and --config are for models",
        ),
    ):
        status, err = run(*words)
        assert status == 2 and said in err, err


def test_heads_are_trained_and_checked_for_the_merged_model(tmp_path, capsys):
    """The run remembers it, and so does not go on without. Programs that measure a target take it too."""
    from specjax import cli

    folder, lora, data = models.shipped()["tiny-draft"], tmp_path / "lora", tmp_path / "data.jsonl"
    adapter(lora, shapes_of(folder, MODULES["llama3"])[0])
    data.write_text('{"prompt": [5, 6], "tokens": [7, 8, 9]}\n' * 8)
    fits = {
        "drafter": "medusa",
        "target": str(folder),
        "data": (str(data),),
        "output": str(tmp_path / "head"),
        "length": 8,
    }
    task, *_, run, _, _ = prepare(TrainOptions(**fits, adapter=(str(lora),)))
    merged = models.load(folder, adapter=lora)
    assert all(map(np.array_equal, jax.tree.leaves(task.frozen), jax.tree.leaves(merged.params)))
    assert run.about["adapter"] == [str(lora)]
    none = ("--adapter", str(tmp_path / "none"))
    trained = ("--target", str(folder), "--data", str(data), "--output", str(tmp_path / "new"))
    for program, words in (
        (cli.main, ("train", "medusa", *trained)),
        (cli.main, ("check-head", str(folder), "medusa")),
        (goodput.main, ()),
        (jobs.main, ()),
    ):
        assert program([*words, *none]) == 2
        assert "unknown adapter" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "said"),
    (
        ({"peft_type": "LOHA"}, "peft_type 'LOHA' is not supported; only LORA can be merged"),
        ({"use_dora": True}, "q_proj.weight has no lora_magnitude_vector"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save names lm_head, of which the file has no tensor"),
        ({"modules_to_save": "lm_head"}, "modules_to_save must be a list of names, not 'lm_head'"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern must be a positive number, not 'x'"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern 0 cannot be used"),
        ({"rank_pattern": {"q(": 3}}, r"the expression 'q\(' cannot be used"),
        (
            {"rank_pattern": {"q_proj": 4}},
            r"q_proj.weight has matrices \[3, 64\] and \[64, 3\], which are not of rank r=4",
        ),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' is not supported"),
        (
            {"layer_replication": [[0, 2]], "fan_in_fan_out": True},
            r"layer_replication \[\[0, 2\]\], fan_in_fan_out True is not supported; LoRA, DoRA and whole modules",
        ),
        ({"r": 0}, "r must be a positive integer, not 0"),
        ({"r": 4}, r"q_proj.weight has matrices \[3, 64\] and \[64, 3\], which are not of rank r=4"),
        ({"lora_alpha": "x"}, "lora_alpha must be a positive number, not 'x'"),
        ({"use_rslora": 1}, "use_rslora must be true or false, not 1"),
    ),
)
def test_what_is_more_than_lora_is_named(references, tmp_path, config, said):
    folder = references("llama3").folder
    adapter(tmp_path / "lora", shapes_of(folder, ("self_attn.q_proj",))[0], **config)
    with pytest.raises(ModelError, match=said) as error:
        models.load(folder, adapter=tmp_path / "lora")
    assert "\n" not in str(error.value)


def test_matrices_that_do_not_fit_are_named(references, tmp_path):
    folder = references("llama3").folder
    wrong = {"model.layers.0.self_attn.q_proj.weight": (60, 64), "model.layers.7.mlp.up_proj.weight": (96, 64)}
    wrong |= {"model.embed_tokens.weight": (128, 64), "model.layers.0.input_layernorm.weight": (1, 64)}
    adapter(tmp_path / "lora", wrong)
    with pytest.raises(ModelError, match=r"q_proj.weight is \[64, 64\], and the adapter's is \[60, 64\]") as error:
        models.load(folder, adapter=tmp_path / "lora")
    for name in list(wrong)[1:]:
        assert f"{name} is no linear layer of the model" in str(error.value)


@pytest.mark.parametrize(
    ("change", "said"),
    (
        (
            lambda own: own.update({"base_model.model.model.embed_tokens.lora_embedding_A": own["a"]}),
            "embed_tokens.weight has no lora_B",
        ),
        (
            lambda own: own.pop("base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"),
            "up_proj.weight has no lora_B",
        ),
        (
            lambda own: own.pop("base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"),
            "up_proj.weight has no lora_A",
        ),
        (
            lambda own: own.clear() or own.update(x=np.ones(1, np.float32)),
            "x is no LoRA matrix, and no tensor of a module",
        ),
        (lambda own: own.clear(), "holds no LoRA matrices"),
    ),
)
def test_files_of_other_tensors(references, tmp_path, change, said):
    folder = references("llama3").folder
    adapter(tmp_path / "lora", shapes_of(folder, ("mlp.up_proj",))[0])
    file = tmp_path / "lora" / "adapter_model.safetensors"
    arrays = safetensors.load_file(file)
    if "embed" in said:
        arrays["a"] = np.ones((3, 4), np.float32)
    change(arrays)
    arrays.pop("a", None)
    safetensors.save_file(arrays, file)
    with pytest.raises(ModelError, match=said):
        models.load(folder, adapter=tmp_path / "lora")


def test_folders_that_are_none(references, tmp_path):
    folder = references("llama3").folder
    with pytest.raises(ModelError, match="unknown adapter"):
        models.load(folder, adapter=tmp_path / "none")
    with pytest.raises(ModelError, match="has no adapter_config.json; give the folder of a PEFT LoRA adapter"):
        models.load(folder, adapter=folder)
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match="no adapter_model.safetensors; convert its .bin to safetensors first"):
        models.load(folder, adapter=tmp_path)
