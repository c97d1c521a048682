"""What a plan says of experts: how many a step touches, and their bytes. In all tests but one nothing is compiled."""

import dataclasses
import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.planned import FullChain, skip_without_compiler

from specjax import models
from specjax.decode import Diffusion, Plain, Speculate
from specjax.kernels.grouped_dot import loop
from specjax.plan import hlo, report, step
from specjax.plan.experts import Chosen, grouped, rounds, touched
from specjax.plan.held import chip_bytes
from specjax.sharding import aot, make_mesh

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 48, "hidden_size": 32,
    "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "mlp_only_layers": [1],
    "max_position_embeddings": 512,
}  # fmt: skip
CHIP = aot.chip_of("v5e:2x2")


@pytest.mark.parametrize(("count", "each", "tokens"), ((4, 2, 3), (5, 1, 4), (3, 3, 2)))
def test_touched_is_the_mean_over_all_choices(count, each, tokens):
    own = list(itertools.combinations(range(count), each))
    found = [len(set().union(*choice)) for choice in itertools.product(own, repeat=tokens)]
    assert touched(count, each, tokens) == pytest.approx(np.mean(found))


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """By drafter, of 4 rows over two chips of rows and two of the model: the setup, and the record without costs."""
    file = tmp_path_factory.mktemp("plan") / "config.json"
    file.write_text(json.dumps(CONFIG))
    mesh = make_mesh("data=2,model=2", jax.devices()[:4])
    model = models.abstract("any", mesh=mesh, config=file)
    made = {}
    for drafter in ("none", "prompt_lookup:length=7"):
        setup = step.prepare(model, Speculate(drafter), mesh, 4, 256)
        asked = {
            "model": "any",
            "dtype": "bfloat16",
            "weights": None,
            "topology": "v5e:2x2",
            "batch": 4,
            "context": 256,
        }
        asked |= {"decoding": drafter}
        made[drafter] = setup, report.record(asked, CHIP, mesh, setup, step.sizes(setup), None, 1.0, (), None)
    return made


def test_a_tree_touches_more_experts_than_a_token(records):
    (alone, one), (setup, tree) = records.values()
    own = tree["experts"]
    # two layers, three matrices of 32 x 12 in bfloat16, of a half of the experts; two rows per chip
    down = setup.params["target"]["layers"][0]["mlp"]["experts"]["down"]["kernel"]
    assert down.sharding.shard_shape(down.shape) == (8, 12, 32)
    assert (own["count"], own["per_token"], own["layers"], own["bytes"]) == (16, 2, 2, 2 * 16 * 3 * 32 * 12 * 2 // 2)
    for part, tokens in (("one_node", 2), ("step", 16)):
        share = 1 - (1 - 2 / 16) ** tokens
        assert own[part] == {"touched": round(16 * share, 2), "bytes": round(own["bytes"] * share)}
    assert one["experts"]["step"] == one["experts"]["one_node"] == own["one_node"]
    assert own["step"]["bytes"] > 3 * own["one_node"]["bytes"]
    for record, made in ((one, alone), (tree, setup)):
        memory = record["bytes_per_chip"]
        live = memory["cache"] * made.live // 256
        rest = chip_bytes(made.params) - own["bytes"]
        assert memory["weights"] == rest + own["bytes"]  # all of them lie on the chip
        looked_up = 48 * 32 * 2 // 2  # the table of embeddings, which is no head
        assert record["ideal_bytes"] == rest - looked_up + record["experts"]["step"]["bytes"] + live


def test_the_tables_say_so(records):
    one, tree = (record for _, record in records.values())
    single = report.table([tree], CHIP)
    assert "experts    16 in each of 2 layers, 0.000 GB per chip, 2 per token" in single
    assert "one node per row about 3.8" in single and "8 nodes per row about 14.1" in single
    head, first, second, _ = report.table([one, tree], CHIP).splitlines()
    assert head.endswith("experts") and first.endswith("4 of 16") and second.endswith("4 to 14 of 16")


def test_without_experts_nothing_is_said():
    mesh = make_mesh("data=1,model=1", jax.devices()[:1])
    setup = step.prepare(models.abstract("tiny-draft", mesh=mesh), Plain(), mesh, 1, 256)
    held = step.sizes(setup)
    record = report.record({}, CHIP, mesh, setup, held, None, 1.0, (), None)
    assert setup.experts is None and "experts" not in record and "head" not in setup.params["target"]
    assert held.ideal == held.weights + held.cache * setup.live // 256


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "inner", "whole"), (("v5e:2x2", 2048, False), ("v5e:2x2", 1408, True), ("h100:4", 1408, True))
)
def test_traffic_and_ideal_count_the_same_experts(topology, inner, whole, tmp_path):
    """Of a compiled step: more nodes add as many bytes to one as to the other, whether a mesh splits experts or not. The
    matrices are too large for a TPU's compiler to keep all of them on the chip, which it would read whole."""
    skip_without_compiler(topology)
    file = tmp_path / "config.json"
    sizes = {"hidden_size": 2048, "num_experts": 256, "moe_intermediate_size": inner, "num_key_value_heads": 4}
    file.write_text(json.dumps(CONFIG | sizes | {"head_dim": 128, "num_hidden_layers": 2}))
    mesh = make_mesh("model=4", aot.devices(topology))
    model = models.abstract("any", "bfloat16", mesh, config=file)
    setup = step.prepare(model, Plain(), mesh, 4, 256)
    kernel = setup.params["target"]["layers"][0]["mlp"]["experts"]["up"]["kernel"]
    assert (kernel.sharding.shard_shape(kernel.shape)[0] == 64) == whole
    with jax.default_matmul_precision("default"):  # as users compile it
        text = step.compiled(setup)[0].as_text()
    few, many = (dataclasses.replace(setup.experts, nodes=nodes) for nodes in (1, 8))
    moved = [hlo.traffic(text, grouped(own, lambda op, operands: None)).bytes for own in (few, many)]
    assert moved[1] - moved[0] == pytest.approx(many.read(8) - few.read(1), rel=1e-4)


@pytest.mark.slow
def test_a_chip_moves_no_rows_of_other_chips_experts(tmp_path):
    """Of a compiled step of 8 rows of 8 nodes on sixteen chips: 640 pairs of a token and an expert, of which a chip takes 80
    at a time. Arrays of all of them are in no memory, and the step moves little more than it must."""
    skip_without_compiler("v5p:2x2x4")
    sizes = {"hidden_size": 2048, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512}
    heads = {"head_dim": 128, "num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 2}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG | sizes | heads | {"mlp_only_layers": []}))
    mesh = make_mesh("model=16", aot.devices("v5p:2x2x4"))
    model = models.abstract("any", "bfloat16", mesh, config=file)
    with jax.default_matmul_precision("default"):  # as users compile it
        setup = step.prepare(model, Speculate(FullChain(length=7)), mesh, 8, 256)
        found = step.compiled(setup)[1]
    shapes = {buffer.dims for access in found.accesses for buffer in access.op.value}
    assert (80, 2048) in shapes and (80, 512) in shapes
    assert not [dims for dims in shapes if math.prod(dims) > 640 and (640 in dims or {64, 10} <= {*dims})]
    assert found.unbounded == () and found.bytes < 1.15 * step.sizes(setup).ideal


HLO = """
ENTRY main (a: f32[8,32], b: bf16[16,32,12], c: s32[17]) -> f32[8,12] {
  %a = f32[8,32]{1,0} parameter(0)
  %b = bf16[16,32,12]{2,1,0} parameter(1)
  %c = s32[17]{0} parameter(2)
  %ragged-dot-metadata = s32[17]{0} custom-call(%c), custom_call_target="tpu_custom_call"
  %ragged-dot-none.1 = f32[8,12]{1,0} custom-call(%ragged-dot-metadata, %a, %b), custom_call_target="tpu_custom_call"
  ROOT %other = f32[8,12]{1,0} custom-call(%ragged-dot-none.1, %b), custom_call_target="tpu_custom_call"
}
"""
ON_A_GPU = """
ENTRY main (a: f32[8,32], b: bf16[8,32,12], c: s32[8]) -> f32[8,12] {
  %a = f32[8,32]{1,0} parameter(0)
  %b = bf16[8,32,12]{2,1,0} parameter(1)
  %c = s32[8]{0} parameter(2)
  ROOT %one = f32[8,12]{1,0} custom-call(%a, %b, %c), metadata={op_name="jit(f)/shard_map/grouped_dot/pallas_call"}
}
"""


def test_a_grouped_product_reads_touched_experts():
    own = Chosen(count=16, each=2, layers=1, bytes=16 * 32 * 12 * 2, rows=2, nodes=2)
    found = hlo.traffic(HLO, grouped(own, lambda op, operands: (1000, 1, 0))).accesses
    read = own.read(2)
    assert 0.4 < read / own.bytes < 0.45  # four tokens
    sizes = [(access.op.name, access.read, access.written) for access in found]
    product = ("ragged-dot-none.1", 17 * 4 + 8 * 32 * 4 + read, 8 * 12 * 4)
    assert sizes == [("ragged-dot-metadata", 17 * 4, 17 * 4), product, ("other", 1000, 1)]
    # a half of the experts lies here: the kernel reads a half of the touched ones, and multiplies a half of the tokens
    (found,) = hlo.traffic(ON_A_GPU, grouped(own, lambda op, operands: None)).accesses
    assert (found.read, found.written) == (8 * 4 + 8 * 32 * 4 + read // 2, 8 * 12 * 4)
    assert found.kernel_flops == 2 * (8 // 2) * 32 * 12


def test_a_loop_over_groups_runs_once_for_a_touched_expert():
    """6.6 of 16 are touched by four tokens that choose two each."""
    own = Chosen(count=16, each=2, layers=1, bytes=16 * 32 * 12 * 4, rows=2, nodes=2)
    text = (
        jax.jit(loop.dot).lower(jnp.ones((8, 32)), jnp.ones((16, 32, 12)), jnp.ones(16, jnp.int32)).compile().as_text()
    )
    once, found = hlo.traffic(text), hlo.traffic(text, rounds=rounds(own))
    assert len(once.unbounded) == 1 and loop.SCOPE in once.unbounded[0] and found.unbounded == ()
    assert min(access.times for access in found.accesses if access.times > 1) == 7  # others are loops inside


@pytest.mark.parametrize(
    ("name", "layers", "parameters"),
    (
        ("Qwen/Qwen3-235B-A22B", 94, (235.1, 22.2)),
        ("inclusionAI/LLaDA2.0-mini", 19, (16.3, 1.4)),  # the first layer has none, and a shared one is read by all
    ),
)
def test_published_sizes(name, layers, parameters):
    """In billions, all of them and those that a token reads."""
    mesh = make_mesh("data=1,model=1", jax.devices()[:1])
    setup = step.prepare(models.abstract(name, mesh=mesh), Plain() if "Qwen" in name else Diffusion(), mesh, 1, 256)
    held, own = step.sizes(setup), setup.experts
    assert own is not None and own.layers == layers
    count = (held.weights / 2e9, (held.weights - own.bytes + own.read(1)) / 2e9)
    assert count == pytest.approx(parameters, abs=0.05)
