"""The training loop: any objective, optax, Orbax checkpoints, and exact resumption of stopped runs."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from specjax.models.on_disk import replace
from specjax.objectives.base import Batch, Objective
from specjax.objectives.means import MEAN, Counted, Parts, counts
from specjax.settings import settled
from specjax.sharding.ambient import under
from specjax.sharding.distributed import is_first, says_lost, to_host, to_places
from specjax.train.held_out import Best, HeldOut
from specjax.train.options import COMPUTE_DTYPES
from specjax.train.placing import gathered, optimizer_places, param_places, rounded, spread

Array = jax.Array
PyTree = Any


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the optimiser: clipped gradients, AdamW, a linear warm-up and a cosine decay to 0.

    Attributes:
      steps: the number of updates.
      learning_rate: the highest learning rate.
      warmup: the number of steps until it is reached.
      weight_decay: of AdamW.
      clip: the bound of a gradient's norm or of its entries.
      clip_by: the choice between these, `norm` or `value`.
      accumulate: the number of parts into which a batch is split; they are processed one after the other, to save
        memory.
      compute_dtype: the type of the parameters as a pass reads them, and so of its products: `bfloat16` or `float32`.
        Parameters, moments, sums over a batch and losses are always float32. Only for an objective that
        `follows_dtype`.
      seed: the seed of the parameters, the batches and the objective's draws.
    """

    steps: int
    learning_rate: float = 1e-3
    warmup: int = 0
    weight_decay: float = 0.0
    clip: float = 1.0
    clip_by: str = "norm"
    accumulate: int = 1
    compute_dtype: str = "float32"
    seed: int = 0

    def __post_init__(self):
        for name in ("steps", "accumulate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("learning_rate", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a positive number, got {getattr(self, name)}")
        if not 0 <= self.warmup < self.steps:
            raise ValueError(f"warmup must lie between 0 and the {self.steps} steps, got {self.warmup}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must not be negative, got {self.weight_decay}")
        if self.clip_by not in ("norm", "value"):
            raise ValueError(f"clip_by must be norm or value, got {self.clip_by!r}")
        if self.compute_dtype not in COMPUTE_DTYPES:
            raise ValueError(f"compute_dtype must be {' or '.join(COMPUTE_DTYPES)}, got {self.compute_dtype!r}")

    @property
    def schedule(self) -> Callable[[Any], Any]:
        """The learning rate of updates 0, 1, ...; neither the first nor the last is 0."""
        rate = optax.warmup_cosine_decay_schedule(0.0, self.learning_rate, self.warmup, self.steps + 1)
        return lambda count: rate(count + 1)

    @property
    def optimizer(self) -> optax.GradientTransformation:
        return optax.chain(
            optax.clip(self.clip) if self.clip_by == "value" else optax.clip_by_global_norm(self.clip),
            optax.adamw(self.schedule, b1=0.9, b2=0.95, weight_decay=self.weight_decay),
        )


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Settings)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state that a training step takes and returns.

    Attributes:
      step: int32 scalar, the number of updates so far.
      params: the objective's.
      optimizer: optax's state.
    """

    step: Array
    params: PyTree
    optimizer: PyTree

    @classmethod
    def begun(cls, settings: Settings, params: PyTree) -> "TrainState":
        """The state before the first update."""
        return cls(jnp.int32(0), params, settings.optimizer.init(params))

    def places(self, objective: Objective, settings: Settings, mesh: jax.sharding.Mesh) -> "TrainState":
        """A sharding for every leaf; see `specjax.train.placing`."""
        params = param_places(objective, mesh, self.params)
        moments = optimizer_places(objective, settings.optimizer, mesh, self.params, self.optimizer)
        everywhere: Any = NamedSharding(mesh, PartitionSpec())
        return TrainState(everywhere, params, moments)


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames=("mesh",), donate_argnums=(2,))
@settled
def update(
    objective: Objective,
    settings: Settings,
    state: TrainState,
    frozen: PyTree,
    batch: Batch,
    mesh: jax.sharding.Mesh | None = None,
) -> tuple[TrainState, dict[str, Array]]:
    """Makes one update. `state` is donated and keeps its layout; on a mesh, that of `TrainState.places`."""
    key = jax.random.fold_in(jax.random.key(settings.seed), state.step)
    done = jnp.full((len(batch.tokens),), state.step / settings.steps, jnp.float32)
    batch = dataclasses.replace(batch, done=done)
    grads, metrics, weight = gradients(
        objective, state.params, frozen, batch, key, settings.accumulate, mesh, settings.compute_dtype
    )
    changes, optimizer = settings.optimizer.update(grads, state.optimizer, state.params)
    changes = _at_rates(changes, objective.rates)
    metrics |= {
        "lr": jnp.asarray(settings.schedule(state.step), jnp.float32),
        "grad_norm": optax.tree.norm(grads),
        "tokens": weight,
    }
    new = TrainState(state.step + 1, optax.apply_updates(state.params, changes), optimizer)
    if mesh is not None:
        new = jax.lax.with_sharding_constraint(new, new.places(objective, settings, mesh))
    return new, metrics


def _at_rates(changes: PyTree, rates: Mapping[str, float]) -> PyTree:
    """An update whose entries have their own multiples of the learning rate, in which it is linear."""
    if not rates:
        return changes
    return {name: optax.tree.scale(rates.get(name, 1.0), own) for name, own in changes.items()}


@settled
def gradients(
    objective: Objective,
    params: PyTree,
    frozen: PyTree,
    batch: Batch,
    key: Array,
    accumulate: int = 1,
    mesh: jax.sharding.Mesh | None = None,
    compute_dtype: str = "float32",
) -> tuple[PyTree, dict[str, Array], Array]:
    """The gradients and metrics of a batch.

    A batch in parts is read twice: the first time counts the denominators of its means. So the parts' gradients, losses
    and metrics add up to those of the whole batch.

    Args:
      objective: the objective.
      params: the objective's.
      frozen: its `target_params`.
      batch: `[B, T]`.
      key: a key from which every row's own key is split.
      accumulate: the number of parts, processed one after the other; it divides B.
      mesh: the mesh over which parameters and gradients are split.
      compute_dtype: the type in which a pass reads the parameters; gradients have the parameters' own type.

    Returns:
      The gradients, the metrics (including the loss), and the number of tokens.
    """
    keys = jax.random.split(key, len(batch.tokens))
    read = lambda params: gathered(objective, mesh, rounded(params, compute_dtype))

    def part(mean, piece, keys):
        def loss_of(params):
            with under(mesh):
                loss, metrics = objective.loss(read(params), frozen, piece, keys, mean)
            weight = jnp.asarray(metrics.get("weight", piece.due(1).sum()), jnp.float32)
            kept = {name: jnp.asarray(value, jnp.float32) for name, value in metrics.items() if name != "weight"}
            return loss, (kept | {"loss": loss}, weight)

        grads, (metrics, weight) = jax.grad(loss_of, has_aux=True)(params)
        mean.done()
        return spread(objective, mesh, grads), metrics, weight

    def count(choices):
        def counted(number, piece, keys):
            mean = Counted(number, accumulate, choices)
            with under(mesh):
                objective.loss(read(params), frozen, piece, keys, mean)
            return mean.kept

        return _summed(counted, (jnp.arange(accumulate), *parts))

    if accumulate == 1:
        return part(MEAN, batch, keys)
    # strided parts: each holds rows of every shard
    split = lambda x: x.reshape(-1, accumulate, *x.shape[1:]).swapaxes(0, 1)
    parts = jax.tree.map(split, (batch, keys))
    found = counts(count)
    return _summed(lambda *each: part(Parts(found), *each), parts)


def _summed(of: Callable[..., PyTree], parts: tuple[Any, ...]) -> PyTree:
    """The sum of a function's results for the parts, computed one after the other."""
    shapes = jax.eval_shape(of, *jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.scan(lambda total, each: (jax.tree.map(jnp.add, total, of(*each)), None), zeros, parts)[0]


@dataclasses.dataclass
class Kept:
    """The checkpoints to keep: some of the latest, and the best one.

    Attributes:
      latest: how many of the latest to keep.
      best: the step of the best one; 0: there is none.
    """

    latest: int
    best: int = 0

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Which of all checkpoints, in order, to keep; Orbax calls this."""
        first = len(checkpoints) - self.latest
        return [number >= first or info.step == self.best for number, info in enumerate(checkpoints)]


class NotFinite(ValueError):
    """The loss or its gradient became NaN or infinite."""


class NotSaved(OSError):
    """A checkpoint could not be written."""


class Run:
    """A training run in a folder: `checkpoints/`, `metrics.jsonl`.

    Checkpoints are written in the background, one at a time, and each is complete or absent. A checkpoint holds
    everything that a run needs to resume.

    Args:
      folder: created where needed.
      about: JSON values on which the run's numbers depend; a run can only be resumed with equal values.
      keep: how many of the latest checkpoints to keep, besides the best one.
      resume: whether to resume the run in the folder.

    Raises:
      ValueError: without `resume`, if the folder has a run; with it, if there is no run or a different one.
    """

    def __init__(self, folder: Path, about: dict[str, Any], *, keep: int = 2, resume: bool = False):
        import orbax.checkpoint as ocp

        self.folder = Path(folder).absolute()
        self.about = json.loads(json.dumps(about))
        self.position: dict[str, Any] = {}
        self._args = ocp.args
        self._kept = Kept(keep)
        options = ocp.CheckpointManagerOptions(preservation_policy=self._kept, cleanup_tmp_directories=True)
        had = (self.folder / "checkpoints").is_dir()
        if resume and not had:
            raise ValueError(f"nothing to resume: there are no checkpoints in {str(self.folder)!r}")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._manager = ocp.CheckpointManager(self.folder / "checkpoints", options=options)
        self.latest: int | None = self._manager.latest_step()
        if self.latest is not None and not resume:
            raise ValueError(
                f"{str(self.folder)!r} has a run stopped after step {self.latest}: resume it, or choose another folder"
            )
        if resume:
            self._take_up()

    def _take_up(self) -> None:
        if self.latest is None:
            raise ValueError(f"nothing to resume: there are no checkpoints in {str(self.folder)!r}")
        args = self._args.Composite(run=self._args.JsonRestore())
        self.position = self._manager.restore(self.latest, args=args)["run"]
        earlier = self.position["about"]
        for name in sorted({*self.about, *earlier}):
            unsaid = _DEFAULTS.get(name)  # a run from before this setting used its default
            before, now = earlier.get(name, unsaid), self.about.get(name, unsaid)
            if before != now:
                was, is_now = _differing(repr(before), repr(now))
                raise ValueError(
                    f"cannot resume the run in {str(self.folder)!r}: its {name} was {was} and is {is_now} now"
                )

    @property
    def best(self) -> Best:
        """The best checkpoint, as of the latest one that was begun."""
        return Best(**self.position.get("best", {}))

    @property
    def metrics_file(self) -> Path:
        return self.folder / "metrics.jsonl"

    def save(self, state: TrainState, position: dict[str, Any]) -> None:
        """Copies the state, and begins to write it once the previous checkpoint is written.

        The state may be donated afterwards.

        Args:
          state: at this step.
          position: JSON values from which to resume; `best` is read from the last ones.

        Raises:
          NotSaved: if the previous checkpoint could not be written.
        """
        self.position = position
        self._kept.best = self.best.step
        args = self._args.Composite(
            state=self._args.StandardSave(state), run=self._args.JsonSave(position | {"about": self.about})
        )
        with self._writing():
            self._manager.save(int(state.step), args=args)

    def check(self) -> None:
        """Raises NotSaved if a checkpoint could not be written; does not wait."""
        if not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Waits until the checkpoint that was begun is written.

        Raises:
          NotSaved: if it could not be written.
        """
        with self._writing():
            self._manager.wait_until_finished()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # storage drivers may raise anything
            if says_lost(error):
                raise
            kept = self._manager.latest_step()
            rest = (
                "there is none before it"
                if kept is None
                else f"the one of step {kept} is kept, and --resume goes on from it"
            )
            why = str(error).strip().split("\n")[0]
            raise NotSaved(
                f"a checkpoint could not be written to {str(self.folder / 'checkpoints')!r} ({why}); {rest}"
            ) from error

    def restore(self, like: TrainState, step: int | None = None) -> TrainState:
        """A checkpoint's state, laid out like `like`; without a step, the latest checkpoint's."""
        args = self._args.Composite(state=self._args.StandardRestore(like))
        return self._manager.restore(self.latest if step is None else step, args=args)["state"]

    def close(self) -> None:
        """Waits for the checkpoint being written.

        Raises:
          NotSaved: if it could not be written.
        """
        with self._writing():
            self._manager.close()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        with contextlib.nullcontext() if error is None else contextlib.suppress(NotSaved):  # the first error says more
            self.close()


@settled
def fit(
    objective: Objective,
    params: PyTree,
    frozen: PyTree,
    batches: Any,
    settings: Settings,
    run: Run,
    *,
    checkpoint_every: int = 500,
    held_out: HeldOut | None = None,
    mesh: jax.sharding.Mesh | None = None,
    on_step: Callable[[dict[str, float]], None] | None = None,
) -> PyTree:
    """Trains to the last step and returns the parameters; with held-out text, those of the best checkpoint.

    A stopped run resumes from its latest checkpoint, with the same losses as an uninterrupted run. Parameters,
    optimizer and the position in the data are restored bit by bit, and keys are derived from the step's number.

    Args:
      objective: the objective to fit.
      params: the initial parameters; they are copied.
      frozen: the objective's `target_params`.
      batches: from `data.batches`.
      settings: of the updates.
      run: the run's folder.
      checkpoint_every: steps between checkpoints; the last step always makes one.
      held_out: the text evaluated at each checkpoint.
      mesh: splits each batch's rows over the axis `data`; `specjax.train.placing` places parameters.
      on_step: called with each step's metrics, which are also the lines of `metrics.jsonl`.

    Raises:
      NotFinite: (a ValueError) naming the step; earlier checkpoints are kept.
      NotSaved: soon after a checkpoint could not be written.
    """
    state = TrainState.begun(settings, jax.tree.map(jnp.copy, params))
    if mesh is not None:
        state = to_places(state, state.places(objective, settings, mesh))
    start = tokens = 0
    if run.latest is not None:
        state, start, tokens = run.restore(state), run.latest, run.position["tokens"]
        batches.set_state(run.position["batches"])
    best = run.best
    lines = run.metrics_file.read_bytes().splitlines(keepends=True) if start and run.metrics_file.exists() else []
    first = is_first()
    written = run.metrics_file if first else Path(os.devnull)
    if first:  # lines that a killed run wrote after its checkpoint, or wrote in part, come again
        whole = (line for line in lines if line.endswith(b"\n"))
        replace(written, [line for line in whole if json.loads(line)["step"] <= start])
    pending: tuple[int, dict[str, Array]] | None = None
    with written.open("a") as log, _progress(settings.steps, start, first) as advance:

        def settle(**held):
            nonlocal tokens, pending
            if pending is None:
                return
            step, metrics = pending[0], {name: float(value) for name, value in to_host(pending[1]).items()}
            metrics |= held
            pending = None
            watched = {"loss": "loss", "grad_norm": "gradient", "held_out_loss": "held-out loss"}
            bad = [name for name in watched if not math.isfinite(metrics.get(name, 0.0))]
            if bad:
                what = watched[bad[0]]
                raise NotFinite(
                    f"the {what} of step {step} is not finite (NaN or infinite), so training stopped; checkpoints before it "
                    "are kept. Lower the learning rate, or look at the data"
                )
            tokens += int(metrics["tokens"])
            record = {"step": step, **metrics, "tokens": tokens}
            log.write(json.dumps(record) + "\n")
            log.flush()
            advance(record)
            if on_step is not None:
                on_step(record)

        for step in range(start + 1, settings.steps + 1):
            if held_out is not None and held_out.patience is not None and best.stale >= held_out.patience:
                break
            batch = Batch.placed(_whole(next(batches), settings.accumulate), mesh)
            state, metrics = update(objective, settings, state, frozen, batch, mesh=mesh)
            settle()  # the previous step's, while the device works on this one
            run.check()
            pending = step, metrics
            if step % checkpoint_every == 0 or step == settings.steps:
                held = {}
                if held_out is not None:
                    key = jax.random.fold_in(jax.random.key(settings.seed), settings.steps)  # of no update
                    as_read = rounded(state.params, settings.compute_dtype)
                    held = held_out.metrics(objective, as_read, frozen, key, mesh)
                    best = best.after(step, held["held_out_merit"])
                settle(**held)
                found = {"best": dataclasses.asdict(best)} if best.step else {}
                run.save(state, {"tokens": tokens, "batches": batches.get_state(), **found})
    run.wait()
    return run.restore(state, best.step).params if best.step not in (0, int(state.step)) else state.params


def _whole(arrays: dict[str, Any], parts: int) -> dict[str, Any]:
    rows = len(arrays["tokens"])
    if rows % parts:
        raise ValueError(f"a batch of {rows} rows cannot be split into {parts} equal parts")
    return arrays


def _differing(before: str, now: str, width: int = 160) -> tuple[str, str]:
    """Readable excerpts of two texts, from a little before the first difference.

    >>> _differing("a" * 200 + "bc", "a" * 200 + "d", 20)
    ('...aaaaaaaaaabc', '...aaaaaaaaaad')
    """
    begin = max(0, len(os.path.commonprefix([before, now])) - width // 2)
    cut = lambda text: ("..." if begin else "") + text[begin : begin + width] + "..." * (len(text) > begin + width)
    return cut(before), cut(now)


@contextlib.contextmanager
def _progress(total: int, done: int, shown: bool) -> Iterator[Callable[[dict[str, float]], None]]:
    if not shown or not sys.stderr.isatty():
        yield lambda record: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("train", total=total, completed=done)

        def advance(record):
            words = [f"{name} {record[name]:.4f}" for name in ("loss", "acceptance") if name in record]
            progress.update(task, completed=record["step"], description="  ".join(words))

        yield advance
