"""`specjax plan --on-host`, and drafts of fewer experts in plans: bytes by hand, and what is refused. Nothing is compiled."""

import json
import re

import jax
import pytest

from specjax import cli, models
from specjax.decode import Speculate
from specjax.plan import hlo, memory, step
from specjax.plan.experts import Chosen, drafting, grouped
from specjax.plan.on_host import OnHost
from specjax.sharding import aot, make_mesh

CONFIG = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def plan(capsys, tmp_path):
    """Runs the command on a small Mixtral for a T4 and gives its exit status, stdout and stderr."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))

    def go(*words):
        asked = ("--model", "any", "--config", str(file), "--topology", "t4:1", "--context", "256", "--batch", "1")
        status = cli.main(["plan", *asked, "--drafter", "none", *words])
        return status, *capsys.readouterr()

    return go


def test_bytes_by_hand(plan):
    """Of three layers of eight experts of three matrices of 32 x 48, in float16 and int4, whose scales are float16."""
    status, out, _ = plan("--on-host", "hits=0/0.5,high=0.5,low=0.25,link=2", "--json")
    r = json.loads(out)
    numbers = 3 * 32 * 48
    # 48 inputs of down and 32 of the others form one group each
    few = numbers // 2 + 2 * (48 + 48 + 32)
    assert status == 0 and r["expert_bytes"] == {"many": 2 * numbers, "few": few}
    assert r["host_bytes"] == {"many": 24 * 2 * numbers, "few": 24 * few}
    attention, norms, router = 32 * 32 * 2 + 2 * 32 * 16, 2 * 32, 32 * 8
    weights = 2 * (3 * (attention + norms + router) + 2 * 64 * 32 + 32)
    cache = 3 * 2 * 256 * 16 * 2
    assert r["cache_bytes"] == cache and 0 <= r["device_bytes"] - weights - cache < 4096, "besides is the state"
    assert r["limit"] - r["device_bytes"] > 24 * 2 * numbers and r["room"] == {"many": 24, "few": 24}
    each = 3 * 2  # two experts in each layer
    mixed = round(each * (0.5 * 2 * numbers + 0.25 * few))
    want = {"hits": 0.0, "whole": each * 2 * numbers, "given": mixed, "few": each * few}
    assert r["moved"] == [want, {"hits": 0.5, **{way: round(want[way] / 2) for way in ("whole", "given", "few")}}]


def test_in_words(plan):
    status, out, _ = plan("--on-host", "hits=0.5,link=2")
    assert status == 0
    assert "experts in the host's memory in float16 and int4" in out
    assert "uses about 2.0 of 8 experts in each of 3 layers" in out
    assert "GB moved, all in many bits" in out and "50%" in out and "(0.0 ms)" in out
    assert "shares of hits and of precisions are given, not measured" in out
    assert "ms" not in plan("--on-host", "default")[1].split("shares of hits")[0].split("GB moved")[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--on-host", "hits=1.5"), "shares from 0 to 1"),
        (("--on-host", "high=0.8,low=0.5"), "high, low and high \\+ low are shares"),
        (("--on-host", "speed=2"), "'speed=2' is no field with a value .its fields are hits, high, low, bits, link."),
        (("--on-host", "hits=often"), "'hits=often' is no field with a value"),
        (("--on-host", "bits=dfloat11"), "bits is one of int8, int4 and fp8"),
        (("--on-host", "link=-1"), "link is GB per second, at least 0"),
        (("--on-host", "bits=int4:group=7"), "groups of 7 inputs do not divide every matrix"),
        (("--on-host", "default", "--memory", "1GB"), "leave --memory out"),
        (("--on-host", "default", "--whole"), "leave --whole and --sampled out"),
        (("--on-host", "default", "--topology", "h100:2"), "--on-host is for one chip, and h100:2 has 2"),
        (("--weights", "hobbit"), "a plan of experts in two precisions is --on-host"),
    ],
)
def test_what_is_refused(plan, words, said):
    status, _, err = plan(*words)
    assert status == 2
    assert re.search(said, err), err


def test_a_model_without_experts(capsys):
    words = ("--model", "tiny", "--topology", "t4:1", "--context", "256", "--on-host", "default")
    assert cli.main(["plan", *words]) == 2
    assert "--on-host is for mixtures of experts, and tiny has none" in capsys.readouterr().err
    assert OnHost.read("default") == OnHost()


DRAFT = """
ENTRY main (a: f32[2,32], b: bf16[16,32,12], c: s32[16]) -> f32[2,12] {
  %a = f32[2,32]{1,0} parameter(0)
  %b = bf16[16,32,12]{2,1,0} parameter(1)
  %c = s32[16]{0} parameter(2)
  %one = f32[2,12]{1,0} custom-call(%a, %b, %c), metadata={op_name="jit(f)/draft/layer_0/grouped_dot/pallas_call"}
  ROOT %two = f32[2,12]{1,0} custom-call(%a, %b, %c), metadata={op_name="jit(f)/target/layer_0/grouped_dot/pallas_call"}
}
"""


def prepared(tmp_path, drafter):
    """A step on one device over two rows, with a drafter, and its model."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    mesh = make_mesh("data=1,model=1", jax.devices()[:1])
    model = models.abstract("any", mesh=mesh, config=file)
    return step.prepare(model, Speculate(drafter), mesh, 2, 256), model


def test_drafts_read_the_experts_that_they_keep(tmp_path):
    """A pass of `main_experts` over two rows reads one expert for each, the target's two for each of four nodes."""
    setup = prepared(tmp_path, "main_experts:length=3")[0]
    own, drafts = setup.experts, setup.drafts
    assert own is not None and drafts is not None and (own.each, own.nodes) == (2, 4)
    assert (drafts.each, drafts.nodes, drafts.rows, drafts.bytes) == (1, 1, 2, own.bytes)
    assert drafts.touched(1) == pytest.approx(8 * (1 - (7 / 8) ** 2))
    assert prepared(tmp_path, "prompt_lookup:length=3")[0].drafts is None and drafting(None, own) is None
    target = Chosen(16, 2, 1, 16 * 32 * 12 * 2, 2, 4)
    few = Chosen(16, 1, 1, 16 * 32 * 12 * 2, 2, 1)
    found = hlo.traffic(DRAFT, grouped(target, lambda op, operands: None, few)).accesses
    rest = 2 * 32 * 4 + 16 * 4
    assert [access.read for access in found] == [rest + few.read(1), rest + target.read(4)]
    alone = hlo.traffic(DRAFT, grouped(target, lambda op, operands: None)).accesses
    assert [access.read for access in alone] == [rest + target.read(4)] * 2


def test_a_search_pays_for_such_drafts(tmp_path):
    """Three passes over the main experts, the rest of the weights and the cache; what is looked up takes no time."""
    times, chip = {}, aot.chip_of("v5e:1x1")
    for line in ("main_experts:length=3", "prompt_lookup:length=3"):
        setup, model = prepared(tmp_path, line)
        search = memory.Search(chip, None, {}, 0, 256, 0.7, (2,))  # without operations, so that bytes decide
        times[line] = search.seconds(model, setup, memory.held(setup), 2)
    setup, _ = prepared(tmp_path, "main_experts:length=3")
    assert setup.experts is not None and setup.drafts is not None
    held = memory.held(setup)
    read = (
        held["weights"] - 2 * 64 * 32 - setup.experts.bytes + setup.drafts.read(1) + held["cache"] * setup.live // 256
    )
    took = times["main_experts:length=3"] - times["prompt_lookup:length=3"]
    assert took == pytest.approx(3 * read / chip.hbm_bandwidth, rel=1e-6)
