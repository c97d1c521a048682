"""`specjax plan` over models with experts or windows that are used on many chips: they fit, and move what they must."""

import json

import jax
import pytest
from support.planned import skip_without_compiler

from specjax import cli

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "topology", "most"),
    (
        ("meta-llama/Llama-3.2-1B", "v5e:1x1", 1.04),
        ("google/gemma-3-27b-it", "v5p:2x2x1", 1.05),
        ("openai/gpt-oss-120b", "v5p:2x2x1", 1.05),
        ("meta-llama/Llama-3.1-8B", "h100:8", 1.05),
        ("openai/gpt-oss-120b", "h100:8", 1.08),
        ("EleutherAI/pythia-6.9b", "v5e:2x2", 1.03),
        ("Qwen/Qwen3-235B-A22B", "v5p:2x2x2", 1.05),
    ),
)
def test_a_step_moves_little_more_than_it_must(name, topology, most, capsys):
    skip_without_compiler(topology)
    with jax.default_matmul_precision("default"):  # as users compile it
        assert cli.main(["plan", "--model", name, "--topology", topology, "--drafter", "none", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["fits"] and 0.98 < record["bytes_over_ideal"] < most
    assert set(record["collectives"]) == ({"all-reduce"} if record["chips"] > 1 else set())
