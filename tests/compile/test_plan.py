"""`specjax plan`: real programs of the TPU compiler, which needs the extra `aot`; without it those tests are skipped."""

import dataclasses
import importlib.util
import json

import jax
import pytest
from support.planned import needs_libtpu

from specjax import cli, models
from specjax.decode import Diffusion, Plain, Speculate
from specjax.models import gemma_config, loading
from specjax.models.diffusion_gemma import DiffusionGemmaConfig
from specjax.models.gemma_heads import Heads
from specjax.plan import fit, report, step
from specjax.plan.serial import PARTS, Serial
from specjax.sharding import aot, make_mesh


@pytest.fixture
def plan(capsys):
    """Runs the command and gives its exit status, stdout and stderr."""

    def go(*words):
        status = cli.main(["plan", *map(str, words)])
        return status, *capsys.readouterr()

    return go


TINY = ("--model", "tiny-draft", "--topology", "v5e:1x1", "--context", 256)


@needs_libtpu
def test_the_command_prints_json_and_draws(plan, tmp_path):
    picture = tmp_path / "plan.png"
    status, out, err = plan(
        *TINY, "--drafter", "none", "--batch", "4,16", "--json", "--tokens-per-step", 2, "--plot", picture
    )
    assert status == 0, err
    few, many = map(json.loads, out.splitlines())
    for record in (few, many):
        memory = record["bytes_per_chip"]
        assert record["fits"] and record["chips"] == 1 and record["nodes"] == 1 and record["collectives"] == {}
        assert memory["total"] == sum(memory[part] for part in ("weights", "cache", "state", "padding", "temporaries"))
        seconds = record["seconds"]
        assert seconds["memory"] == pytest.approx(record["bytes_accessed"] / 819e9, rel=1e-3)
        assert record["tokens_per_second"] == pytest.approx(record["batch"] * 2 / seconds["step"], rel=1e-3)
        serial = record["serial_seconds"]
        assert serial["step"] > seconds["step"]
        assert serial["step"] == pytest.approx(sum(serial[part] for part in PARTS), rel=1e-6)
        least = record["batch"] * 2 / serial["step"]
        assert record["tokens_per_second_least"] == pytest.approx(least, rel=1e-3)
        assert record["launches"] > 20 and record["unbounded_loops"] == []
        assert record["compile_seconds"] > 0 and record["rungs"] == [1]
    assert many["bytes_per_chip"]["cache"] == 4 * few["bytes_per_chip"]["cache"]
    assert many["flops"] > 2 * few["flops"] and many["ideal_bytes"] > few["ideal_bytes"]
    assert picture.stat().st_size > 1000


@needs_libtpu
def test_a_cache_split_by_its_slots(plan):
    """A chip holds a quarter of it, and exchanges what is as long as the queries."""
    words = ("--model", "tiny-draft", "--drafter", "none", "--batch", 2, "--context", 512, "--json")
    split, whole = (json.loads(plan(*words, *more)[1]) for more in (
        ("--topology", "v5e:2x2", "--mesh", "context=4"), ("--topology", "v5e:1x1"),
    ))  # fmt: skip
    memory, alone = split["bytes_per_chip"], whole["bytes_per_chip"]
    assert 4 * memory["cache"] == alone["cache"] and memory["weights"] == alone["weights"]
    assert set(split["collectives"]) == {"all-reduce"}
    assert split["collectives"]["all-reduce"]["bytes"] < memory["cache"] / 8


@needs_libtpu
def test_an_accelerator_compiles_fewer_rungs():
    """The root alone and the whole tree, where a CPU has those between; a drafter that weighs them keeps them."""
    model, rungs, goodput = models.abstract("tiny"), {}, "draft:model=tiny-draft,rule=goodput,length=4"
    for devices in (aot.devices("v5e:1x1"), jax.devices()[:1]):
        mesh = make_mesh("model=1", devices)
        for line in ("none", "prompt_lookup:length=15", goodput):
            rungs[line, devices[0].platform] = Speculate(line).bind(model, mesh=mesh)[0].rungs
    assert rungs["none", "tpu"] == rungs["none", "cpu"] == (1,)
    assert rungs["prompt_lookup:length=15", "cpu"] == (1, 4, 8, 16)
    assert rungs["prompt_lookup:length=15", "tpu"] == (1, 16)
    assert rungs[goodput, "tpu"] == rungs[goodput, "cpu"]
    assert len(rungs[goodput, "tpu"]) > 2


@needs_libtpu
@pytest.mark.slow
def test_sums_in_bfloat16_spare_what_the_plan_says(plan):
    words = (
        "--model",
        "tiny-draft",
        "--topology",
        "v5e:2x2",
        "--mesh",
        "model=4",
        "--drafter",
        "none",
        "--context",
        256,
    )
    wide, half = (json.loads(plan(*words, "--json", *more)[1]) for more in ((), ("--reduce-dtype", "bfloat16")))
    spared = wide["seconds"]["collectives"] - half["seconds"]["collectives"]
    assert wide["reduce_dtype_spares"] == pytest.approx(spared, rel=1e-3) and spared > 0
    assert half["reduce_dtype_spares"] == 0 and half["reduce_dtype"] == "bfloat16" and wide["reduce_dtype"] is None
    assert {kind: entry["count"] for kind, entry in half["collectives"].items()} == {
        kind: entry["count"] for kind, entry in wide["collectives"].items()
    }


@needs_libtpu
def test_canvases_of_random_tokens_are_planned(plan, tmp_path):
    """DiffusionGemma, from its config alone: a pass over a canvas, after a cache of what is final."""
    shape = DiffusionGemmaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        sliding_layers=(True, False), sliding_window=64, sliding=Heads(128, 2, 1e4, 64), full=Heads(128, 1, 1e6, 32),
        num_experts=4, top_k_experts=2, moe_intermediate_size=128, max_position_embeddings=256,
    )  # fmt: skip
    config = tmp_path / "config.json"
    config.write_text(json.dumps(gemma_config.to_hf(shape, models.Canvas(-1, False, 32))[0]))
    words = ("--model", "canvases", "--config", config, "--topology", "v5e:1x1", "--context", 256, "--batch", 2)
    status, out, err = plan(*words, "--dtype", "float32", "--json")
    assert status == 0, err
    record = json.loads(out)
    assert record["decoding"] == "entropy_renoise" and record["nodes"] == 32 and record["fits"]


@needs_libtpu
def test_what_does_not_fit_says_what_does(plan):
    status, out, err = plan("--model", "meta-llama/Llama-3.1-8B", "--topology", "v5e:1x1", "--json")
    record = json.loads(out)
    assert status == 2 and not record["fits"] and "bytes_accessed" not in record
    assert record["bytes_per_chip"]["total"] > record["bytes_per_chip"]["limit"]
    assert err.count("\n") == 1 and "--topology v5e:2x2 --mesh data=1,model=4" in err and "--batch 1" in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--topology", "v9:1"), "v5e, v5p, v6e, h100"),
        (("--topology", "v5e:2x2x2"), "not a slice of v5e"),
        (("--topology", "t4:2"), "not a slice of t4; slices are 1"),
        (("--model", "no/such"), "meta-llama/Llama-3.1-8B"),
        (("--mesh", "data=1,model=8"), "give data=1,model=4"),
        (("--mesh", "rows=4"), "data, model, context"),
        (("--mesh", "context=8"), "give data=1,model=4"),
        (("--mesh", "model=2,context=4"), "give data=1,model=4"),
        (("--mesh", "data=4,model=1", "--batch", 6), "give 8"),
        (("--batch", "many"), "1,8,32"),
        (("--context", 10**6), "131072"),
        (("--tokens-per-step", 0), "--tokens-per-step"),
        (("--config", "nowhere.json"), "nowhere.json"),
        (("--drafter", "frob"), "unknown drafter 'frob'; choose none"),
        (("--decode", "beam"), "a plan needs a step with a drafter or a policy, and 'beam' has no such step"),
        (("--decode", "frob"), "unknown way to decode 'frob'; choose plain"),
    ],
    ids=lambda words: " ".join(map(str, words)) if isinstance(words, tuple) else "",
)
def test_bad_input_is_one_line(plan, words, says):
    usual = {"--model": "meta-llama/Llama-3.1-8B", "--topology": "v5e:2x2"}
    usual |= dict(zip(words[::2], words[1::2], strict=True))
    status, out, err = plan(*(word for pair in usual.items() for word in pair))
    assert (status, out) == (2, "") and err.startswith("specjax: error: ") and err.count("\n") == 1 and says in err


def test_links_are_those_of_the_slice():
    """A slice of v5e is closed to rings at 16 x 16 alone; its chips have four links, those of v5p six."""
    shares = {"v5e:1x1": 0, "v5e:2x2": 2 / 4, "v5e:1x4": 1 / 4, "v5e:8x16": 2 / 4, "v6e:16x16": 1, "v5p:2x2x1": 2 / 6}
    shares |= {"v5p:2x4x4": 3 / 6, "v5p:4x4x8": 1, "h100:4": 1}
    for topology, share in shares.items():
        chip = aot.chip_of(topology)
        assert chip.links(topology) == pytest.approx(share * chip.ici_bandwidth)
    cost = step.Cost(0, 819e6, 0, {"all-reduce": {"count": 2, "bytes": 10**6}})
    found = report.roofline(aot.chip_of("v5e:2x2"), cost, 4, "v5e:2x2")
    assert found == pytest.approx({"memory": 1e-3, "compute": 0, "collectives": 1.5e-5, "step": 1.015e-3})


def test_what_nothing_compiles_for_is_counted(plan):
    words = (
        "--model",
        "meta-llama/Llama-3.1-8B",
        "--topology",
        "t4:1",
        "--batch",
        4,
        "--drafter",
        "none",
        "--weights",
        "int4",
    )
    status, out, _ = plan(*words)
    assert status == 0 and "float16, weights in int4" in out and "not compiled: memory is that of" in out
    status, _, err = plan(*words[:-2])
    assert status == 2 and "it needs 20.4 GB per chip and t4:1 has 16.0" in err
    record = json.loads(plan(*words, "--json")[1])
    assert record["fits"] and "seconds" not in record and "temporaries" not in record["bytes_per_chip"]
    assert record["bytes_per_chip"]["cache"] == 4 * 8192 * 32 * 8 * 128 * 2 * 2


def test_a_missing_compiler_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    aot._devices.cache_clear()
    with pytest.raises(ValueError, match=r"pip install 'specjax\[aot\]'"):
        aot.devices("v6e:2x2")
    with pytest.raises(ValueError, match=r"pip install 'specjax\[aot\]'"):
        aot.devices("h100:8")


def test_heads_divide_over_the_default_mesh():
    heads = models.abstract("tiny").lm.axis_counts()["heads"]
    assert fit.check_mesh(None, "v5e:4x4", heads, 8) == "data=2,model=8"
    with pytest.raises(ValueError, match="8 attention heads do not divide over model=16: give data=2,model=8"):
        fit.check_mesh("model=16", "v5e:4x4", heads, 8)


@pytest.mark.parametrize("name", ("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B"))
def test_built_in_configurations(name):
    """Their published numbers of parameters, in billions."""
    wanted = {"meta-llama/Llama-3.1-8B": 8.03, "Qwen/Qwen3-8B": 8.19}
    count = sum(leaf.size for leaf in jax.tree.leaves(models.abstract(name).params))
    assert count / 1e9 == pytest.approx(wanted[name], abs=0.01)


def test_deeper_programs_are_compiled_where_more_layers_cost_less():
    asked = []

    def of(layers, turn):
        asked.append(layers)
        own = layers if layers >= turn else 4 * turn  # the compiler finds a better program from `turn` layers on
        return step.Cost(10, 100 * own, 10 * own, {"all-reduce": {"count": own, "bytes": own}})

    found, at = step.from_few_layers(lambda layers: of(layers, 4), (2, 4), 32)
    assert (found.bytes, found.flops, at, asked) == (3200, 320, (4, 6), [2, 4, 6])
    found, at = step.from_few_layers(lambda layers: of(layers, 4), (2, 4), 5)
    assert (found.bytes, at) == (500, (5,))


@pytest.mark.parametrize(
    ("name", "depth", "at"),
    (
        ("openai/gpt-oss-20b", 24, (2, 4)),
        ("openai/gpt-oss-20b", 23, (3, 5)),
        ("openai/gpt-oss-20b", 4, (4,)),
        ("google/gemma-3-27b-it", 62, (8, 14)),  # two with a window, and five and a full one by turns
        ("inclusionAI/LLaDA2.0-mini", 20, (3, 5)),  # the first has no experts
    ),
)
def test_layers_lie_on_a_line_where_their_kinds_take_turns(name, depth, at, monkeypatch):
    mesh = make_mesh("data=1,model=1", jax.devices()[:1])
    model = loading.with_layers(models.abstract(name, mesh=mesh), depth, mesh)
    way = Diffusion() if "LLaDA" in name else Plain()
    costs = lambda setup, chip, topology, sampled: step.Cost(10, 100 * len(setup.params["target"]["layers"]), 7, {})
    monkeypatch.setattr(step, "measured", costs)
    setup = step.prepare(model, way, mesh, 1, 256)
    cost, found = step.model_cost(model, way, mesh, aot.chip_of("v5e:1x1"), "v5e:1x1", setup, False, False)
    assert (cost.bytes, found) == (100 * depth, at)
    assert step.depths([0, 1, 2, 3, 4, 5, 6, 7]) is None


def test_costs_are_extrapolated_on_a_line():
    low = step.Cost(10, 100, 1000, {"all-reduce": {"count": 7, "bytes": 70}}, compile_seconds=3)
    more = {"collectives": {"all-reduce": {"count": 11, "bytes": 110}}, "compile_seconds": 5}
    low = dataclasses.replace(low, serial=Serial(kernels=1.0, waits=0.5, launches=20))
    more["serial"] = Serial(kernels=1.5, waits=0.5, launches=30)
    high = dataclasses.replace(low, bytes=160, flops=1800, **more)
    found = step.extrapolated([low, high], (2, 4), 32)
    assert (found.bytes, found.flops, found.temporaries) == (100 + 15 * 60, 1000 + 15 * 800, 10)
    assert found.compile_seconds == 3 + 15 * 2
    assert found.collectives == {"all-reduce": {"count": 67, "bytes": 670}}
    assert found.serial == Serial(kernels=1 + 15 * 0.5, waits=0.5, launches=20 + 15 * 10)
