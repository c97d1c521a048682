"""States, trees and models print shapes and types, whatever they hold: numbers, tracers, donated buffers, shapes alone."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from support.conformance import CONFIG, TARGET

import specjax
from specjax import diffusion, search, soft
from specjax.draft import TokenRecycling
from specjax.models import Model
from specjax.pretty import WIDTH, pretty
from specjax.serve.request import Record
from specjax.serve.score import Score
from specjax.tree import Topology, Tree

DECODER = specjax.speculative(TARGET, TokenRecycling(k=4))
PARAMS = {"target": TARGET.abstract(), "draft": None}
STATE = jax.eval_shape(lambda params: DECODER.empty(params, 4, 96), PARAMS)


def test_a_state_is_its_shapes_a_line_a_field():
    text = repr(STATE)
    lines = text.splitlines()
    assert lines[0] == "DecodeState(" and lines[-1] == ")" and max(map(len, lines)) <= WIDTH
    assert "  tokens=int32[4,96]," in lines and "  key=key[4]," in lines and "  logprobs=None," in lines
    cache = f"float32[4,{CONFIG.near.num_key_value_heads},96,{CONFIG.near.head_dim}]"
    assert f"  cache=KVCache(key=(3 x {cache}), value=(3 x {cache}), states=(), source=None)," in lines
    assert len(lines) == 2 + len(dataclasses.fields(STATE)) + 8  # the sampling's five columns and their brackets


def test_what_a_step_says_has_its_tree():
    info = jax.eval_shape(DECODER.step, PARAMS, STATE)[1]
    nodes = DECODER.drafter.nodes
    assert info.tree.tokens.shape == (4, nodes) and info.tree.log_q is None
    assert f"tokens=int32[4,{nodes}]" in repr(info) and "verdict=Verdict(" in repr(info)


def test_values_are_not_read():
    """A donated buffer has none, and a tracer has none yet."""
    tree = Tree.of(Topology.chain(1), jnp.ones((1, 2), jnp.int32), jnp.ones((1, 2), bool))
    text = repr(tree)
    assert "Array" not in text and "tokens=int32[1,2]" in text and "parents=(-1, 0)" in text
    seen = []
    jax.make_jaxpr(lambda tree: seen.append(repr(tree)) or tree.tokens)(tree)
    tree.tokens.delete()
    assert repr(tree) == text == seen[0]


@pytest.mark.parametrize(
    ("value", "text"),
    (
        ({"a": [jnp.zeros(2), jnp.zeros(2), None]}, "{a: [2 x float32[2], None]}"),
        (((1, 2), "x"), "((1, 2), 'x')"),
        (jax.random.key(0), "key[]"),
        (tuple(range(100)), "(0, 1, 2, 3, 4, 5, 6, 7, 8, 9,...96, 97, 98, 99)"),
    ),
)
def test_parts(value, text):
    assert pretty(value) == text


def test_a_class_may_say_it_otherwise_and_its_heirs_too():
    @dataclasses.dataclass(frozen=True)
    class Own(specjax.pretty.Pretty):
        x: int = 1

    @dataclasses.dataclass(frozen=True)
    class Heir(Own):
        y: int = 2

    @dataclasses.dataclass(frozen=True)
    class Other(Own):
        def __repr__(self):
            return "other"

    assert (repr(Own()), repr(Heir()), repr(Other())) == (f"{Own.__name__}(x=1)", "Heir(x=1, y=2)", "other")


def test_a_decoder_is_a_line_a_part():
    """Of each what is not at its default, as far as a line has room."""
    lines = repr(DECODER).splitlines()
    assert lines[0] == "Speculative(" and lines[-1] == ")" and len(lines) == 5 and max(map(len, lines)) <= WIDTH
    assert lines[1].startswith(f"  target=LlamaLM(config=ModelConfig(hidden_size={CONFIG.hidden_size}, ")
    assert lines[1].endswith(", ...)),") and lines[1].count("(") == lines[1].count(")")
    assert lines[2:4] == ["  drafter=TokenRecycling(k=4, vocab_size=96),", "  verifier=Coupled(),"]
    assert repr(dataclasses.replace(DECODER, logprobs=True)).splitlines()[-2] == "  logprobs=True,"
    unmask = diffusion.diffusion(TARGET, 3, diffusion.Threshold(0.5)), diffusion.BlockDiffusion(TARGET, 3)
    for decoder in (*unmask, search.BeamSearch(TARGET, search.Beam(2)), soft.soft_thinking(TARGET)):
        said = repr(decoder)
        assert said.startswith(f"{type(decoder).__name__}(") and said.endswith(")") and said.count("\n") <= 5
    assert "  policy=Threshold(threshold=0.5)," in repr(unmask[0])


def test_a_record_is_a_table_in_a_notebook():
    record = Record("<b>1 & 2</b>", "three\n</td><script>", [1, 2], "eos", 2, 1, 2.0)
    cells = re.findall(r"<tr><th>(.*?)</th><td[^>]*>(.*?)</td></tr>", record._repr_html_(), re.DOTALL)
    assert cells == [
        ("prompt", "&lt;b&gt;1 &amp; 2&lt;/b&gt;"),
        ("text", "three\n&lt;/td&gt;&lt;script&gt;"),
        ("finish reason", "eos"),
        ("tokens per step", "2.00 (2 tokens in 1 steps)"),
    ]
    failed = Record([{"role": "user"}], None, [7] * 900, "error", 0, 0, 0.0, error="too <long>")._repr_html_()
    assert "[{&#x27;role&#x27;: &#x27;user&#x27;}]" in failed and "error: too &lt;long&gt;" in failed
    assert len(failed) < 2000 and failed.count("<tr>") == 4


def test_a_model_says_its_name_and_size():
    assert repr(Model(TARGET, TARGET.abstract(), name="mine")).startswith("Model('mine', LlamaLM, 0.1")
    assert repr(Model(TARGET, TARGET.abstract(), dtype=jnp.bfloat16)).endswith("M parameters, bfloat16)")


def test_a_score_says_what_it_is_of():
    score = Score("a" * 60, "b", -1.25, [-1.0, -0.25], [3, 4], True)
    assert repr(score) == f"Score('{'a' * 19}...{'a' * 9}' -> 'b', logprob -1.2500 of 2 tokens)"
    assert repr(Score.failed("a", "b", "too long")) == "Score('a' -> 'b', too long)"
