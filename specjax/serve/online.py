"""Online speculative decoding: the draft model learns from the target's corrections while serving (arXiv:2310.07177).

The text never changes: the verifier decides it, and the draft's parameters only affect speed. Parameters are replaced
when requests end. A row that is still running keeps the draft cache written by older parameters until its own request
ends.
"""

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors import SafetensorError
from safetensors.numpy import load, save

from specjax.decode import Speculate
from specjax.draft import ModelDrafter
from specjax.expand import Chain, Expander
from specjax.lm import LM
from specjax.models.on_disk import replace
from specjax.objectives.losses import Loss
from specjax.serve.engine import Engine
from specjax.serve.students import Student, student_of
from specjax.settings import settled

Array = jax.Array
PyTree = Any


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(5,))
@settled
def update(
    target: LM,
    student: Student,
    learning_rate: float,
    params: PyTree,
    fixed: PyTree,
    optimizer: PyTree,
    target_params: PyTree,
    texts: dict[str, Array],
) -> tuple[PyTree, PyTree, Array]:
    """One step of AdamW on a student's loss. `optimizer` is donated; `params` are not, since they may be serving.

    Args:
      target: the teacher.
      student: what learns.
      learning_rate: constant.
      params: those that learn (`Student.learns`).
      fixed: see `Student.fixed`.
      optimizer: optax's state.
      target_params: the target's.
      texts: see `Student.loss`; `Student.due` is true of them.

    Returns:
      New parameters, the optimizer's new state, and the loss.
    """
    loss = lambda params: student.loss(target, params, fixed, target_params, texts)
    value, grads = jax.value_and_grad(loss)(params)
    changes, optimizer = _optimizer(learning_rate).update(grads, optimizer, params)
    return optax.apply_updates(params, changes), optimizer, value


def _optimizer(learning_rate: float) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(learning_rate, weight_decay=0.0))


class OnlineEngine(Engine):
    """An engine whose draft model is updated after every `interval` completed requests.

    Completions are the same as with any other engine. To keep what was learnt, keep `params["draft"]` or save
    `draft_params`. To go on learning in another process, use `save` and `resume`.

    Args:
      model: as for `Engine`.
      draft: what `specjax.models.load` returned for a draft model with the target's tokens; or a pair of a drafter and its
        parameters, see `specjax.serve.students.student_of`.
      expander: the expander of a loaded draft's tree; None: a chain.
      decode: the way to decode, whose drafter is replaced; None: the usual verifier.
      interval: requests between updates.
      learning_rate: constant.
      divergence: the loss on corrected tokens; None is the forward KL, whose gradient is the cross-entropy's, and the
        reverse KL for a draft model with tokens of its own.
      length: the number of tokens of a text to learn from, its last ones.
      options: of `Engine`.

    Attributes:
      student: what learns.
      losses: one per update so far.
      draft_params: the draft model's parameters in float32.

    Raises:
      ValueError: see `Engine`; or on an interval, rate or length out of range, or a drafter that does not learn.
    """

    def __init__(
        self,
        model: Any,
        draft: Any,
        expander: Expander | None = None,
        *,
        decode: Speculate | None = None,
        interval: int = 8,
        learning_rate: float = 1e-4,
        divergence: Loss | None = None,
        length: int = 512,
        **options: Any,
    ):
        if interval < 1 or length < 2 or not learning_rate > 0:
            raise ValueError(
                f"online: interval must be at least 1, length at least 2 and learning_rate positive, got {interval}, {length} "
                f"and {learning_rate}"
            )
        pair = draft if isinstance(draft, tuple) else (ModelDrafter(draft.lm, expander or Chain()), draft.params)
        self.student = student_of(pair[0], divergence)
        served = self.student.drafter, pair[1]
        super().__init__(model, dataclasses.replace(decode or Speculate(), drafter=served), **options)
        self.interval, self.learning_rate, self.length = interval, learning_rate, length
        self.losses: list[float] = []
        self.draft_params = jax.tree.map(lambda x: x.astype(jnp.float32), self.student.learns(pair[1]))
        self._moments = _optimizer(learning_rate).init(self.draft_params)
        self._buffer: list[dict[str, np.ndarray]] = []

    def finished(self, rows, state):
        arrays = {"tokens": state.tokens, **self.student.watched(state.draft)}
        lengths, arrays = jax.device_get((state.length, arrays))
        for row in rows:
            end = int(lengths[row])
            kept = slice(max(0, end - self.length), end)
            pad = (0, self.length - (kept.stop - kept.start))
            self._buffer.append({name: np.pad(array[row, kept], pad) for name, array in arrays.items()})
        while len(self._buffer) >= self.interval:
            taken, self._buffer = self._buffer[: self.interval], self._buffer[self.interval :]
            self._learn({name: np.stack([text[name] for text in taken]) for name in taken[0]})

    def _learn(self, texts: dict[str, np.ndarray]) -> None:
        if not self.student.due(texts):
            return
        fixed = self.student.fixed(self.params["draft"])
        self.draft_params, self._moments, loss = update(
            self.model.lm, self.student, self.learning_rate,
            self.draft_params, fixed, self._moments, self.model.params, jax.device_put(texts),
        )  # fmt: skip
        self.losses.append(float(loss))
        self._publish()

    def _publish(self) -> None:
        # with the type and devices of those they replace, so that decoding is not recompiled
        serve = lambda new, old: jax.device_put(new.astype(old.dtype), old.sharding)
        served = self.params["draft"]
        learnt = jax.tree.map(serve, self.draft_params, self.student.learns(served))
        self.params = {**self.params, "draft": self.student.joined(served, learnt)}

    def save(self, file: str | os.PathLike[str]) -> None:
        """Writes all that was learnt as one safetensors file, atomically: the draft's parameters in float32, the
        optimizer's state, the losses, and the texts that wait for an update. It replaces an older file.

        Args:
          file: its folder must exist.

        Raises:
          OSError: if it cannot be written.
        """
        replace(file, [save(jax.device_get(self._learnt()))])

    def resume(self, file: str | os.PathLike[str]) -> None:
        """Goes on from what `save` wrote. The next update is the one that the saving engine would have made.

        Args:
          file: of an engine whose draft has the same shape, with the same `length`.

        Raises:
          ValueError: if the file is missing, damaged, or of another draft or length. The engine is then as before.
        """
        try:
            found = load(Path(file).read_bytes())
        except (OSError, SafetensorError) as error:
            raise ValueError(f"cannot read what a draft learnt from {str(file)!r}: {error}") from error
        grows = ("losses", *self._kinds)  # their first axis depends on what was served
        shape = lambda name, array: (array.shape[1:] if name in grows else array.shape, array.dtype)
        shapes = lambda arrays: {name: shape(name, array) for name, array in arrays.items()}
        own, read = shapes(self._learnt()), shapes(found)
        if wrong := sorted(name for name in own | read if own.get(name) != read.get(name)):
            raise ValueError(
                f"{str(file)!r} is of another draft model or length (they differ in {wrong[0]}): "
                "give the draft and length of the engine that wrote it"
            )
        paths, tree = jax.tree_util.tree_flatten_with_path(self._trained())
        # an array bound to no device stays so: `update` is not recompiled, and the optimizer's count fits a mesh
        put = lambda new, old: jax.device_put(new, old.sharding) if old.committed else jnp.asarray(new)
        trained = jax.tree.unflatten(tree, [put(found[jax.tree_util.keystr(path)], old) for path, old in paths])
        self.draft_params, self._moments = trained["draft"], trained["optimizer"]
        self.losses = found["losses"].tolist()
        self._buffer = [{name: found[name][at] for name in self._kinds} for at in range(len(found["tokens"]))]
        self._publish()

    def _trained(self) -> dict[str, PyTree]:
        return {"draft": self.draft_params, "optimizer": self._moments}

    def _learnt(self) -> dict[str, Any]:
        """All that a file holds, by name."""
        leaves = jax.tree_util.tree_flatten_with_path(self._trained())[0]
        waiting = {
            name: np.asarray([text[name] for text in self._buffer], kind).reshape(-1, self.length)
            for name, kind in self._kinds.items()
        }
        kept = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
        return kept | {"losses": np.asarray(self.losses, np.float64)} | waiting

    @property
    def _kinds(self) -> dict[str, Any]:
        """The types of the arrays of a text that waits, by name."""
        return {"tokens": np.int32, **self.student.watches}
