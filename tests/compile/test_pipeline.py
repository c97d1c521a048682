"""The estimate of a draft model beside its target, beside runs of coins; and who waits for whom in a program's text."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import specjax
from specjax import pipelined
from specjax.draft import ModelDrafter, Pearl
from specjax.expand import Chain
from specjax.models import LlamaLM, llama_config
from specjax.plan.hlo import parse
from specjax.plan.order import apart, in_sequence
from specjax.plan.pipeline import Pipeline
from specjax.sharding import make_mesh, shardings
from specjax.sharding.aot import compiled, devices
from specjax.sharding.rules import placed

STEPS = 40_000


def tokens_by_coins(length, accepted, rng):
    """Tokens a step of serial drafting and of PEARL, the mean of many steps with a coin for every drafted token."""
    first = lambda coins: int(np.argmin([*coins, False]))  # how many are accepted
    serial = np.mean([1 + first(rng.random(length) < accepted) for _ in range(STEPS)])
    written, after = 0, False
    for _ in range(STEPS):
        coins = rng.random(length if after else 1) < accepted
        written += 1 + min(first(coins), length - 1) if after else 1
        after = bool(coins.all())
    return serial, written / STEPS


@pytest.mark.parametrize(("length", "accepted"), [(4, 0.8), (2, 0.3), (6, 0.95)])
def test_rates_are_those_of_coins(length, accepted):
    pair = Pipeline(draft=0.01, target=0.05, length=length, accepted=accepted)
    serial, pearl = tokens_by_coins(length, accepted, np.random.default_rng(0))
    np.testing.assert_allclose(pair.serial * (length * 0.01 + 0.05), serial, rtol=0.02)
    np.testing.assert_allclose(pair.pearl * max(length * 0.01, 0.05), pearl, rtol=0.02)


def test_the_ends():
    sure, never = (Pipeline(draft=1.0, target=4.0, length=4, accepted=chance) for chance in (1.0, 0.0))
    assert (sure.plain, sure.serial, sure.pearl) == (0.25, 5 / 8, 1.0)
    assert (never.serial, never.pearl) == (1 / 8, 0.25)
    assert sure.saguaro(branch=0.5, hits=1.0) == 5 / 4 and sure.saguaro(branch=0.5, hits=0.0) == 5 / 8


@pytest.mark.parametrize(
    "fields", [(0.0, 1.0, 4, 0.5), (1.0, -1.0, 4, 0.5), (1.0, 1.0, 0, 0.5), (1.0, 1.0, 4, 1.5)]
)  # fmt: skip
def test_what_is_refused(fields):
    with pytest.raises(ValueError, match="a pipeline needs positive seconds, a length of at least 1 and a chance"):
        Pipeline(*fields)
    with pytest.raises(ValueError, match="branches need positive seconds and a chance from 0 to 1, got 0.1 and 2"):
        Pipeline(1.0, 1.0, 4, 0.5).saguaro(branch=0.1, hits=2)


TEXT = """HloModule m

ENTRY %main (a: f32[4], b: f32[4]) -> (f32[4], f32[4]) {
  %a = f32[4]{0} parameter(0), metadata={op_name="a"}
  %b = f32[4]{0} parameter(1), metadata={op_name="b"}
  %one = f32[4]{0} all-reduce(%a), to_apply=%add, metadata={op_name="x/one"}
  %two = f32[4]{0} all-reduce(%b), to_apply=%add, metadata={op_name="x/two"}
  %three = f32[4]{0} all-gather-start(%one), metadata={op_name="x/one"}
  %four = f32[4]{0} all-gather-done(%three), metadata={op_name="x/one"}
  %five = f32[4]{0} add(%four, %two), metadata={op_name="x/two"}
  ROOT %out = (f32[4]{0}, f32[4]{0}) tuple(%five, %two)
}
"""


def test_who_waits_for_whom():
    part = lambda name: lambda op: name in op.source
    assert in_sequence(TEXT) == 2
    found = apart(TEXT, part("two"), part("one"))
    assert (found.waits, found.awaited, found.free, found.collectives) == (("five",), (), ("two",), 1)
    assert apart(TEXT, part("one"), part("two")).awaited == ("one", "three", "four")
    with pytest.raises(ValueError, match="a part of the program has no operations"):
        apart(TEXT, part("one"), part("nothing"))


NEEDS_LIBTPU = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu, TPUs' compiler: pip install 'specjax[aot]'"
)


@pytest.mark.slow
@NEEDS_LIBTPU
def test_on_a_slice_the_exchanges_of_both_models_travel_together():
    """Three tokens are drafted in a step. Each of the target's exchanges is one operation with one of the draft model's, so
    that fewer follow one another than if the target waits."""
    target, draft = (LlamaLM(llama_config(1024, 512, 1024, n, 8, 4, 64, tie_word_embeddings=True)) for n in (2, 1))
    mesh = make_mesh("data=1,model=4", devices("v5e:2x2"))

    def step_of(drafter):
        decoder = dataclasses.replace(specjax.speculative(target, drafter, mesh=mesh), whole=True, greedy=True)
        model = {"target": target.abstract(jnp.bfloat16), "draft": draft.abstract(jnp.bfloat16)}
        model = placed(model, decoder.param_shardings(model))
        bare = dataclasses.replace(decoder, mesh=None)
        state = jax.eval_shape(lambda model: bare.empty(model, 4, 256, jnp.bfloat16), model)
        state = placed(state, shardings(mesh, decoder.axes(state), state))
        return compiled(jax.jit(decoder.step, donate_argnums=1).lower(model, state)).as_text()

    text, waiting = step_of(Pearl(draft, length=3)), step_of(ModelDrafter(draft, Chain(3)))
    program = parse(text)
    here = program.computations[program.entry]
    sums = [op for op in here.ops.values() if op.opcode == "all-reduce"]
    sides = [{"draft" if "/draft/" in user.source else "target" for user in here.users[op.name]} for op in sums]
    assert {"draft", "target"} in sides and {"target"} not in sides
    assert in_sequence(text) <= 0.8 * in_sequence(waiting)


@pytest.mark.slow
@NEEDS_LIBTPU
def test_on_two_parts_of_a_slice_no_program_waits_for_the_other_model():
    """Two chips hold the target and two the draft model. The block is known without an exchange. The rest of a step is one
    program on each pair, with the exchanges of its own model alone; what crosses are a few hundred bytes for each row.
    """
    target, draft = (LlamaLM(llama_config(1024, 512, 1024, n, 8, 4, 64, tie_word_embeddings=True)) for n in (2, 1))
    chips = devices("v5e:2x2")
    mesh, side = make_mesh("model=2", chips[:2]), make_mesh("model=2", chips[2:])
    whole = dataclasses.replace(specjax.speculative(target, Pearl(draft, length=3), mesh=mesh), whole=True, greedy=True)
    own = {field.name: getattr(whole, field.name) for field in dataclasses.fields(whole)}
    decoder = pipelined.Pipelined(**own, draft_mesh=side)
    judging, drafting = decoder.judging, decoder.drafting

    def laid(part, model, **more):
        bare = dataclasses.replace(part, mesh=None)
        state = jax.eval_shape(lambda model: bare.empty(model, 4, 256, jnp.bfloat16), model)
        return placed(state, shardings(part.mesh, part.axes(state), state))

    weights = target.abstract(jnp.bfloat16)
    judged = {"target": placed(weights, shardings(mesh, target.axes(weights), weights, target.axis_counts()))}
    drafts = {"target": None, "draft": draft.abstract(jnp.bfloat16)}
    drafts["draft"] = placed(drafts["draft"], decoder.drafter.param_shardings(side, drafts["draft"]))
    rows, state = laid(drafting, drafts), laid(judging, judged | {"draft": None})
    everywhere = lambda mesh, tree: placed(tree, jax.tree.map(lambda leaf: NamedSharding(mesh, PartitionSpec()), tree))
    tree = jax.eval_shape(lambda *given: dataclasses.replace(drafting, mesh=None).known(*given), drafts, rows)
    known = compiled(pipelined._known.lower(drafting, drafts, rows)).as_text()
    ahead = compiled(pipelined._ahead.lower(drafting, drafts, rows, everywhere(side, tree), None)).as_text()
    given = judged | {"draft": (everywhere(mesh, tree), None)}
    judge = compiled(pipelined._judged.lower(judging, given, state)).as_text()
    assert in_sequence(known) == 0 < in_sequence(judge)
    serial = in_sequence(judge) + in_sequence(ahead)
    assert max(in_sequence(judge), in_sequence(ahead)) < 0.8 * serial
    told = jax.eval_shape(lambda *given: dataclasses.replace(judging, mesh=None).judged(*given), given, state)[2]
    crossing = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((tree, told)))
    print(
        "in sequence: known",
        in_sequence(known),
        "judge",
        in_sequence(judge),
        "ahead",
        in_sequence(ahead),
        "bytes",
        crossing,
    )
    assert crossing < 4 * 256
