"""The loop: exact resume, exact means over parts of a batch, and what must stop it."""

import dataclasses
import datetime
import functools
import json
import re
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore
from orbax.checkpoint.checkpoint_manager import CheckpointInfo
from support import slow_disk
from support import small_training as tiny
from support.objectives import DRAWN, FIXED
from support.shapes import changed

from specjax.draft import Eagle3, Medusa
from specjax.draft.medusa.objective import TrainMedusa
from specjax.expand import Chain
from specjax.models import ExpertsConfig, LlamaLM
from specjax.objectives.base import Batch, Objective, each_row
from specjax.objectives.means import MEAN
from specjax.plan.held import chip_bytes
from specjax.sharding import make_mesh
from specjax.sharding.rules import placed
from specjax.train.data import batches
from specjax.train.held_out import Best, HeldOut
from specjax.train.loop import Kept, NotFinite, NotSaved, Run, Settings, TrainState, fit, update

SETTINGS = Settings(steps=9, learning_rate=0.1, warmup=3, weight_decay=0.01, clip=0.5)


@dataclasses.dataclass(frozen=True)
class Bigram(Objective):
    """A table of next-token logits, with noise so that keys matter, and a place where it breaks."""

    noise: float = 0.0
    breaks: float = 0.0  # the loss below which it is NaN

    def init(self, key, target_params):
        return {"table": jax.random.normal(key, (32, 32))}

    def loss(self, params, target_params, batch, key, mean=MEAN):
        logits = params["table"][batch.tokens[:, :-1]]
        noise = each_row(lambda key: jax.random.normal(key, logits.shape[1:]), key, len(logits))
        logits = logits + self.noise * noise + target_params
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch.tokens[:, 1:])
        value = mean(each, batch.mask[:, 1:])
        return jnp.where(value < self.breaks, jnp.nan, value), {"acceptance": mean(jnp.exp(-each), batch.mask[:, 1:])}


@dataclasses.dataclass(frozen=True)
class Scheduled(Bigram):
    """It says how much of the run is done."""

    def loss(self, params, target_params, batch, key, mean=MEAN):
        value, metrics = super().loss(params, target_params, batch, key, mean)
        return value, metrics | {"done": mean(batch.done[:, None], batch.mask[:, :1] >= 0)}


def train(
    folder,
    objective,
    *,
    frozen=0.0,
    settings=SETTINGS,
    resume=False,
    stop=None,
    rows=None,
    size=6,
    told=None,
    **options,
):
    """Runs to the end, or dies in a step. Returns the parameters and every step's metrics, which `told` hears of."""
    rows = rows or tiny.rows()
    seen = []

    def on_step(record):
        seen.append(record)
        if told is not None:
            told(record)
        if record["step"] == stop:
            raise KeyboardInterrupt

    params = objective.init(jax.random.key(settings.seed), frozen)
    with Run(folder, dataclasses.asdict(settings) | {"data": rows.digest}, resume=resume) as run:
        stream = batches(rows, size, settings.seed)
        frozen = jax.tree.map(jnp.float32, frozen)
        params = fit(objective, params, frozen, stream, settings, run, checkpoint_every=2, on_step=on_step, **options)
    return params, seen


def log(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_killed_run_goes_on_bit_by_bit(tmp_path, accumulate):
    objective, settings = Bigram(noise=0.3), dataclasses.replace(SETTINGS, accumulate=accumulate)
    whole, losses = train(tmp_path / "whole", objective, settings=settings)
    assert len(losses) == 9 == len(log(tmp_path / "whole"))
    for stop in (5, 8):  # after the checkpoints of steps 4 and 6
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "killed", objective, settings=settings, stop=stop, resume=stop > 5)
        assert log(tmp_path / "killed")[-1]["step"] == stop
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')  # the end came within a line
    resumed, rest = train(tmp_path / "killed", objective, settings=settings, resume=True)
    assert [record["step"] for record in rest] == [7, 8, 9]
    assert rest == losses[6:]
    assert log(tmp_path / "killed") == log(tmp_path / "whole") == losses
    assert np.array_equal(resumed["table"], whole["table"])
    again, none = train(tmp_path / "killed", objective, settings=settings, resume=True)  # a finished run
    assert not none and np.array_equal(again["table"], whole["table"])


def test_an_update_knows_how_much_of_the_run_is_done(tmp_path):
    settings = dataclasses.replace(SETTINGS, steps=4, accumulate=2)
    records = train(tmp_path, Scheduled(), settings=settings)[1]
    assert [record["done"] for record in records] == [0, 0.25, 0.5, 0.75]


def test_updates_go_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    """And what is written is the state of before them, though each donates the one that it was given."""
    settings = dataclasses.replace(SETTINGS, steps=4)
    _, losses = train(tmp_path / "whole", Bigram(noise=0.3), settings=settings)
    go_on, kept = threading.Event(), tmp_path / "slow" / "checkpoints"
    under_way = []

    def told(record):
        if record["step"] == 3:
            under_way.append(not (kept / "2").exists())
            go_on.set()

    with monkeypatch.context() as patched:
        patched.setattr(tensorstore, "open", slow_disk.behind(lambda spec: go_on.wait(10) or go_on.set()))
        params, _ = train(tmp_path / "slow", Bigram(noise=0.3), settings=settings, told=told)
    assert under_way == [True] and log(tmp_path / "slow") == losses
    assert sorted(path.name for path in kept.iterdir()) == ["2", "4"]
    shutil.rmtree(kept / "4")
    resumed, rest = train(tmp_path / "slow", Bigram(noise=0.3), settings=settings, resume=True)
    assert rest == losses[2:] and np.array_equal(resumed["table"], params["table"])


def test_a_checkpoint_that_cannot_be_written_ends_the_run(tmp_path, monkeypatch):
    full = lambda spec: "/4." in spec and slow_disk.full(spec)
    with monkeypatch.context() as patched:
        patched.setattr(tensorstore, "open", slow_disk.behind(full))
        with pytest.raises(NotSaved, match=r"checkpoints' \(.*No space left.*the one of step 2 is kept, and --resume"):
            train(tmp_path, Bigram())
    assert [path.name for path in (tmp_path / "checkpoints").glob("?")] == ["2"]
    _, rest = train(tmp_path, Bigram(), resume=True)
    assert [record["step"] for record in rest] == [3, 4, 5, 6, 7, 8, 9]


HELD = HeldOut(tiny.rows(7, seed=1), batch_size=3)


@pytest.mark.slow
def test_held_out_text_is_one_batch(tmp_path):
    """Its figures are those of all its rows together, the last batch filled up, and stand in the metrics of a checkpoint."""
    params, seen = train(tmp_path, Bigram(), held_out=HELD)
    assert [record["step"] for record in seen if "held_out_loss" in record] == [2, 4, 6, 8, 9]
    best = max((record for record in seen if "held_out_loss" in record), key=lambda record: record["held_out_merit"])
    whole = Batch(jnp.asarray(HELD.rows.tokens), jnp.asarray(HELD.rows.mask))
    loss, metrics = Bigram().loss(params, jnp.float32(0), whole, jax.random.key(0))  # the best one's parameters
    assert best["held_out_loss"] == pytest.approx(float(loss), rel=1e-5)
    assert best["held_out_acceptance"] == pytest.approx(float(metrics["acceptance"]), rel=1e-5)


DISTURBED = {
    "eagle1": lambda: (dataclasses.replace(FIXED["eagle1"], noise=0.5), tiny.target_params()),
    "distill": lambda: (
        dataclasses.replace(FIXED["distill"], on_policy=1.0, prompt=3, keep=0.4),
        (tiny.target_params(), tiny.draft_params()),
    ),
}


@pytest.mark.parametrize("name", DISTURBED)
def test_held_out_text_is_read_without_what_training_draws(name):
    """Noise, a draft's own texts, and a choice of tokens."""
    objective, target = DISTURBED[name]()
    params = objective.init(jax.random.key(0), target)
    one, other = (HELD.metrics(objective, params, target, jax.random.key(seed)) for seed in (1, 2))
    plain = HELD.metrics(FIXED[name], params, tiny.target_params(), jax.random.key(1))
    assert one == other == plain


class Breaking(Bigram):
    def held_out(self, target_params):
        return dataclasses.replace(self, breaks=1e9), target_params


def test_a_held_out_loss_that_is_not_finite_ends_the_run(tmp_path):
    with pytest.raises(NotFinite, match="the held-out loss of step 2 is not finite"):
        train(tmp_path, Breaking(), held_out=HELD)
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_better_checkpoint_takes_the_place_of_the_best():
    best = Best().after(2, -1.0).after(4, -2.0)
    assert best == Best(2, -1.0, stale=1) and best.after(6, -0.5) == Best(6, -0.5)
    steps = [CheckpointInfo(step=step, time=datetime.datetime.now(), metrics=None) for step in (2, 4, 6, 8, 9)]
    kept = Kept(2, best=2)
    assert kept.should_preserve(steps, context=None) == [True, False, False, True, True]
    kept.best = 6
    assert kept.should_preserve(steps, context=None) == [False, False, True, True, True]


def test_merit_is_what_a_draft_would_have_accepted():
    told = {"loss": 3.0, "acceptance": 0.5, "acceptance_2": 0.4, "acceptance_3": 0.1, "agreement_4": 1.0}
    assert Bigram().merit(told) == pytest.approx(0.5 + 0.2 + 0.02)
    assert Bigram().merit({"loss": 3.0}) == DRAWN["acceptance"].merit(told) == -3.0


RISING = dataclasses.replace(SETTINGS, steps=12, learning_rate=3.0, warmup=0)
"""Much too fast: what is held out gets worse."""


@pytest.mark.slow
def test_the_best_checkpoint_is_kept_and_no_more_patience_ends_it(tmp_path):
    held_out = dataclasses.replace(HELD, patience=2)
    params, seen = train(tmp_path / "whole", Bigram(), settings=RISING, held_out=held_out)
    told = {record["step"]: record["held_out_merit"] for record in seen if "held_out_merit" in record}
    best = max(told, key=told.get)
    assert seen[-1]["step"] == best + 4 < 12  # two checkpoints without a better one
    steps = sorted(int(path.name) for path in (tmp_path / "whole" / "checkpoints").iterdir())
    assert steps == [best, best + 2, best + 4]
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "killed", Bigram(), settings=RISING, held_out=held_out, stop=best + 3)
    again, rest = train(tmp_path / "killed", Bigram(), settings=RISING, held_out=held_out, resume=True)
    assert log(tmp_path / "killed") == log(tmp_path / "whole") and rest[-1] == seen[-1]
    assert np.array_equal(again["table"], params["table"])
    ended, none = train(tmp_path / "killed", Bigram(), settings=RISING, held_out=held_out, resume=True)
    assert not none and np.array_equal(ended["table"], params["table"])
    with pytest.raises(ValueError, match="patience must be at least 1"):
        HeldOut(HELD.rows, patience=0)


def test_what_cannot_be_resumed(tmp_path):
    with pytest.raises(ValueError, match="nothing to resume: there are no checkpoints in"):
        train(tmp_path / "a", Bigram(), resume=True)
    train(tmp_path / "a", Bigram())
    with pytest.raises(ValueError, match="has a run stopped after step 9: resume it, or choose another folder"):
        train(tmp_path / "a", Bigram())
    with pytest.raises(ValueError, match=r"its learning_rate was 0\.1 and is 0\.2 now"):
        train(tmp_path / "a", Bigram(), settings=dataclasses.replace(SETTINGS, learning_rate=0.2), resume=True)
    with pytest.raises(ValueError, match="its data was '.*' and is '.*' now"):
        train(tmp_path / "a", Bigram(), rows=tiny.rows(seed=1), resume=True)


def test_two_checkpoints_stay(tmp_path):
    train(tmp_path, Bigram())
    assert sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == [8, 9]


def test_nan_stops_before_the_checkpoint(tmp_path):
    losses = [record["loss"] for record in train(tmp_path / "whole", Bigram())[1]]
    bad = next(i for i in range(4, 9) if losses[i] < min(losses[:i])) + 1  # a step that is lower than all before
    threshold = (losses[bad - 1] + min(losses[: bad - 1])) / 2
    tmp_path = tmp_path / "broken"
    with pytest.raises(
        NotFinite, match=r"the loss of step \d is not finite .* checkpoints before it are kept"
    ) as error:
        train(tmp_path, Bigram(breaks=threshold))
    assert f"step {bad} " in str(error.value)
    kept = sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    assert kept[-1] == (bad - 1) // 2 * 2
    assert log(tmp_path)[-1]["step"] == bad - 1
    with Run(tmp_path, dataclasses.asdict(SETTINGS) | {"data": tiny.rows().digest}, resume=True) as run:
        like = TrainState(jnp.int32(0), params := Bigram().init(jax.random.key(0), 0), SETTINGS.optimizer.init(params))
        assert np.isfinite(run.restore(like).params["table"]).all()


def one_update(settings, objective=None, rows=slice(None), mesh=None):
    source = tiny.rows(12)
    batch = Batch(jnp.asarray(source.tokens[rows]), jnp.asarray(source.mask[rows]))
    params = {"table": jax.random.normal(jax.random.key(3), (32, 32))}
    state = TrainState(jnp.int32(0), params, settings.optimizer.init(params))
    return update(objective or Bigram(), settings, state, jnp.float32(0), batch)


def test_parts_of_a_batch_give_the_mean_over_its_tokens():
    settings = Settings(steps=10, clip=1e9)
    (whole, one), (parts, four) = one_update(settings), one_update(dataclasses.replace(settings, accumulate=4))
    counts = tiny.rows(12).mask[:, 1:].sum(axis=1)
    assert len({int(counts[i::4].sum()) for i in range(4)}) > 1  # a mean of means would be another number
    assert one["tokens"] == four["tokens"] == counts.sum()
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(one[name], four[name], rtol=1e-5)
    np.testing.assert_allclose(whole.params["table"], parts.params["table"], atol=1e-6)


@pytest.mark.slow
def test_the_update_is_adamw_behind_a_clipped_gradient():
    settings = Settings(steps=10, learning_rate=0.1, warmup=2, weight_decay=0.1, clip=0.01)
    state, metrics = one_update(settings)
    params = {"table": jax.random.normal(jax.random.key(3), (32, 32))}
    source = tiny.rows(12)
    batch = Batch(jnp.asarray(source.tokens), jnp.asarray(source.mask))
    grads = jax.grad(lambda p: Bigram().loss(p, 0.0, batch, jax.random.key(0))[0])(params)["table"]
    norm = jnp.sqrt(jnp.square(grads).sum())
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    clipped = grads * 0.01 / norm
    # Adam's first step is the sign of the gradient, but for its epsilon
    wanted = params["table"] - 0.05 * (clipped / (jnp.abs(clipped) + 1e-8) + 0.1 * params["table"])
    np.testing.assert_allclose(state.params["table"], wanted, atol=1e-5)
    assert metrics["lr"] == np.float32(0.05) and state.step == 1


def test_entries_are_clipped_each_on_its_own():
    state, metrics = one_update(Settings(steps=10, clip=0.001, clip_by="value"))
    moments = state.optimizer[1][0].mu["table"]  # a tenth of the gradient
    assert float(jnp.abs(moments).max()) == pytest.approx(1e-4, rel=1e-5)
    assert 0.1 * float(metrics["grad_norm"]) > 2 * float(jnp.sqrt(jnp.square(moments).sum())) > 1e-4


def test_the_rate_warms_up_and_falls_to_almost_nothing():
    rates = [float(SETTINGS.schedule(step)) for step in range(9)]
    np.testing.assert_allclose(rates[:3], [0.1 / 3, 0.2 / 3, 0.1], rtol=1e-6)
    assert all(a > b > 0 for a, b in zip(rates[2:], rates[3:], strict=False))


HEAD = dataclasses.replace(FIXED["eagle3"], unroll=2, ids=tuple(range(0, 32, 2)))


@pytest.mark.slow
def test_a_mesh_changes_nothing_but_rounding(tmp_path):
    """Nor does going on on another one."""
    target = tiny.target_params()
    settings = Settings(steps=4, learning_rate=1e-3, accumulate=2)
    run = functools.partial(train, objective=HEAD, frozen=target, settings=settings, size=8, held_out=HELD)
    plain, losses = run(tmp_path / "plain")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "mesh", mesh=make_mesh("data=4,model=2"), stop=3)
    moved, rest = run(tmp_path / "mesh", mesh=make_mesh("data=2,model=4"), resume=True)
    for name in ("loss", "grad_norm", "acceptance", "held_out_loss"):
        told = [[record[name] for record in file if name in record] for file in (losses, log(tmp_path / "mesh"))]
        np.testing.assert_allclose(*told, rtol=1e-5)
    assert [record["step"] for record in rest] == [3, 4]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), plain, moved)


@pytest.mark.slow
def test_every_device_holds_its_own_part():
    """Of parameters and moments; and an update leaves them there."""
    mesh = make_mesh("data=4,model=2")
    target = tiny.target_params()
    settings = Settings(steps=4)
    state = jax.eval_shape(lambda: TrainState.begun(settings, HEAD.init(jax.random.key(0), target)))
    places = state.places(HEAD, settings, mesh)
    source = tiny.rows(8)
    batch = Batch.placed({"tokens": source.tokens, "mask": source.mask}, mesh)
    program = update.lower(HEAD, settings, placed(state, places), target, batch, mesh=mesh).compile()
    assert jax.tree.all(jax.tree.map(lambda a, b: a.is_equivalent_to(b, 2), program.output_shardings[0], places))
    assert chip_bytes(placed(state, places)) < chip_bytes(state) / 6  # one matrix is split over rows alone


@pytest.mark.slow
def test_the_experts_of_a_target_stay_where_they_are():
    """A mesh that gives every device some of them whole is known where an update, or held-out text, is traced."""
    target = LlamaLM(changed(tiny.TARGET.config, experts=ExpertsConfig(4, 2, 24)))
    params = jax.jit(target.init)(jax.random.key(1))
    head, settings, mesh = (
        TrainMedusa(Medusa(Chain(2), heads=2).bind(target)),
        Settings(steps=4),
        make_mesh("data=4,model=2"),
    )
    start = head.init(jax.random.key(0), params)
    begun = lambda: TrainState.begun(settings, jax.tree.map(jnp.copy, start))
    source = tiny.rows(8)
    batch = Batch(jnp.asarray(source.tokens), jnp.asarray(source.mask))
    assert "psum" in str(update.trace(head, settings, begun(), params, batch, mesh=mesh).jaxpr)
    losses = [update(head, settings, begun(), params, batch, mesh=where)[1]["loss"] for where in (None, mesh)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    held = [HeldOut(source).metrics(head, start, params, jax.random.key(0), where) for where in (None, mesh)]
    assert held[0] == pytest.approx(held[1], rel=1e-5)


def test_no_scores_of_a_whole_long_row():
    """Neither of the target nor of the head, forward or for the gradient."""
    length = 1100
    config = dataclasses.replace(tiny.TARGET.config, max_position_embeddings=length)
    head = dataclasses.replace(HEAD, drafter=Eagle3().bind(LlamaLM(config)))
    abstract = jax.eval_shape(lambda: TrainState.begun(SETTINGS, head.init(jax.random.key(0), tiny.target_params())))
    rows = jax.ShapeDtypeStruct((2, length), jnp.int32)
    batch = Batch(rows, jax.ShapeDtypeStruct(rows.shape, bool), rows)
    text = str(update.trace(head, SETTINGS, abstract, tiny.target_params(), batch).jaxpr)
    shapes = [tuple(map(int, shape.split(","))) for shape in re.findall(r"f32\[([\d,]+)\]", text)]
    assert max(max(shape, default=0) for shape in shapes) > length  # a chunk's scores are here
    assert not [shape for shape in shapes if sum(size >= length for size in shape) > 1]


def test_the_callers_parameters_stay(tmp_path):
    objective = Bigram()
    params = objective.init(jax.random.key(0), 0.0)
    before = np.asarray(params["table"]).copy()
    with Run(tmp_path, {}) as run:
        stream = batches(tiny.rows(), 6, 0)
        fit(objective, params, jnp.float32(0), stream, Settings(steps=1), run)
    assert np.array_equal(params["table"], before)
    with Run(tmp_path, {"clip_by": "norm"}, resume=True) as run:  # the default of what an older run did not say
        assert run.latest == 1
    with pytest.raises(ValueError, match="its clip_by was 'norm' and is 'value' now"):
        Run(tmp_path, {"clip_by": "value"}, resume=True)


def test_updates_do_not_compile_again():
    before = update._cache_size()
    settings = Settings(steps=11)
    state = one_update(settings)[0]
    source = tiny.rows(12)
    batch = Batch(jnp.asarray(source.tokens), jnp.asarray(source.mask))
    for _ in range(2):
        state, _ = update(Bigram(), settings, state, jnp.float32(0), batch)
    assert update._cache_size() == before + 1


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"steps": 0}, "steps must be at least 1"),
        ({"accumulate": 0}, "accumulate must be at least 1"),
        ({"learning_rate": 0.0}, "learning_rate must be a positive number"),
        ({"learning_rate": float("nan")}, "learning_rate must be a positive number"),
        ({"clip": float("inf")}, "clip must be a positive number"),
        ({"warmup": 5}, "warmup must lie between 0 and the 5 steps"),
        ({"weight_decay": -1.0}, "weight_decay must not be negative"),
        ({"compute_dtype": "float16"}, "compute_dtype must be float32 or bfloat16, got 'float16'"),
        ({"clip_by": "entry"}, "clip_by must be norm or value"),
    ],
)
def test_settings_out_of_range(fields, said):
    with pytest.raises(ValueError, match=said):
        Settings(**({"steps": 5} | fields))
