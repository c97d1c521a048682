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
from specjax.lm import LM, Wants
from specjax.models.on_disk import replace
from specjax.objectives.base import Batch, read
from specjax.objectives.losses import ForwardKL, Loss
from specjax.serve.engine import Engine
from specjax.settings import settled

Array = jax.Array
PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Watched:
    """The state of a `Watching` drafter.

    Attributes:
      draft: the `ModelDrafter`'s.
      missed: `[B, L]` bool, tokens of the text where the target corrected the draft.
    """

    draft: Any
    missed: Any


@dataclasses.dataclass(frozen=True)
class Watching(ModelDrafter):
    """A `ModelDrafter` that records its corrections: a step's last token, unless the whole depth was accepted."""

    def init(self, params, batch, capacity) -> Any:
        return Watched(super().init(params, batch, capacity), jnp.zeros((batch, capacity), bool))

    def axes(self, draft) -> Any:
        return Watched(super().axes(draft.draft), ("batch", None))

    def prefill(self, params, draft, chunk, output) -> Any:
        return dataclasses.replace(draft, draft=super().prefill(params, draft.draft, chunk, output))

    def propose(self, params, draft, view, sampler):
        proposal = super().propose(params, draft.draft, view, sampler)
        return dataclasses.replace(proposal, draft=dataclasses.replace(draft, draft=proposal.draft))

    def observe(self, params, draft, proposal, output, verdict):
        corrected = (verdict.accepted < self.depth) & (verdict.accepted < verdict.committed)
        # by the end of `propose` the draft has read the whole text before the step
        at = jnp.where(corrected, draft.draft.length + verdict.accepted, draft.missed.shape[1])
        missed = draft.missed.at[jnp.arange(at.shape[0]), at].set(True, mode="drop")
        return dataclasses.replace(draft, missed=missed)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=(5,))
@settled
def update(
    target: LM,
    draft: LM,
    divergence: Loss,
    learning_rate: float,
    params: PyTree,
    optimizer: PyTree,
    target_params: PyTree,
    tokens: Array,
    missed: Array,
) -> tuple[PyTree, PyTree, Array]:
    """One step of AdamW on the corrected tokens only. `optimizer` is donated; `params` are not, since they may be
    serving.

    Args:
      target: the teacher.
      draft: the model that learns.
      divergence: the loss between both distributions of every corrected token, from the logits one place before it.
      learning_rate: constant.
      params: the draft's.
      optimizer: optax's state.
      target_params: the target's.
      tokens: `[I, S]` int32 texts.
      missed: `[I, S]` bool, at least one of them beyond slot 0.

    Returns:
      New parameters, the optimizer's new state, and the loss.
    """
    text = Batch(tokens, missed)
    taught = read(target, target_params, text, Wants(logits=True)).logits[:, :-1]

    def loss(params):
        own = read(draft, params, text, Wants(logits=True)).logits[:, :-1]
        return divergence(taught, own, missed[:, 1:], tokens[:, 1:])

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
      draft: what `specjax.models.load` returned for the draft.
      expander: the expander of the draft's tree; None: a chain.
      decode: the way to decode, whose drafter is replaced; None: the usual verifier.
      interval: requests between updates.
      learning_rate: constant.
      divergence: the loss on corrected tokens; None is the forward KL, whose gradient is the cross-entropy's.
      length: the number of tokens of a text to learn from, its last ones.
      options: of `Engine`.

    Attributes:
      losses: one per update so far.
      draft_params: the draft's parameters in float32.

    Raises:
      ValueError: see `Engine`; or on an interval, rate or length out of range.
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
        drafter = Watching(draft.lm, expander or Chain()), draft.params
        super().__init__(model, dataclasses.replace(decode or Speculate(), drafter=drafter), **options)
        self.draft, self.divergence = draft.lm, divergence or ForwardKL()
        self.interval, self.learning_rate, self.length = interval, learning_rate, length
        self.losses: list[float] = []
        self.draft_params = jax.tree.map(lambda x: x.astype(jnp.float32), draft.params)
        self._moments = _optimizer(learning_rate).init(self.draft_params)
        self._buffer: list[tuple[np.ndarray, np.ndarray]] = []

    def finished(self, rows, state):
        tokens, lengths, missed = jax.device_get((state.tokens, state.length, state.draft.missed))
        for row in rows:
            end = int(lengths[row])
            kept = slice(max(0, end - self.length), end)
            pad = (0, self.length - (kept.stop - kept.start))
            self._buffer.append((np.pad(tokens[row, kept], pad), np.pad(missed[row, kept], pad)))
        while len(self._buffer) >= self.interval:
            taken, self._buffer = self._buffer[: self.interval], self._buffer[self.interval :]
            self._learn(*map(np.stack, zip(*taken, strict=True)))

    def _learn(self, tokens: np.ndarray, missed: np.ndarray) -> None:
        if not missed[:, 1:].any():  # nothing to learn from
            return
        self.draft_params, self._moments, loss = update(
            self.model.lm, self.draft, self.divergence, self.learning_rate,
            self.draft_params, self._moments, self.model.params, *jax.device_put((tokens, missed)),
        )  # fmt: skip
        self.losses.append(float(loss))
        self._publish()

    def _publish(self) -> None:
        # with the type and devices of those they replace, so that decoding is not recompiled
        serve = lambda new, old: jax.device_put(new.astype(old.dtype), old.sharding)
        self.params = {**self.params, "draft": jax.tree.map(serve, self.draft_params, self.params["draft"])}

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
        grows = ("losses", "tokens", "missed")  # their first axis depends on what was served
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
        self._buffer = list(zip(found["tokens"], found["missed"], strict=True))
        self._publish()

    def _trained(self) -> dict[str, PyTree]:
        return {"draft": self.draft_params, "optimizer": self._moments}

    def _learnt(self) -> dict[str, Any]:
        """All that a file holds, by name."""
        leaves = jax.tree_util.tree_flatten_with_path(self._trained())[0]
        tokens, missed = zip(*self._buffer, strict=True) if self._buffer else ((), ())
        return {jax.tree_util.keystr(path): leaf for path, leaf in leaves} | {
            "losses": np.asarray(self.losses, np.float64),
            "tokens": np.asarray(tokens, np.int32).reshape(-1, self.length),
            "missed": np.asarray(missed, bool).reshape(-1, self.length),
        }
