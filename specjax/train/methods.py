"""Tasks for methods with trained parameters: heads, unmask policies of diffusion models, and rules with a head over a
draft."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.assembly.companions import Stored, drafter_to_train
from specjax.diffusion.unmask import Unmask
from specjax.draft.adaptive import Rule
from specjax.draft.base import Trained
from specjax.draft.head import most_frequent
from specjax.draft.heads.folder import save_head
from specjax.train.options import TrainOptions
from specjax.train.task import Read, Task, check_length, check_masked, divergence_of, fields_of, refuse, with_preset
from specjax.verify import Verifier


@dataclasses.dataclass(frozen=True)
class HeadTask:
    """Makes the task of a head on the target's features.

    The objective is a dataclass whose field `drafter` is the bound drafter. Its fields `divergence` (the loss) and
    `ids` (the draft's vocabulary) are optional. A line can set fields of objective and drafter that are numbers, words
    or switches.

    Attributes:
      name: the drafter's name.
      kind: the drafter's class.
      objective: the class of the objective.
    """

    name: str
    kind: type[Trained]
    objective: type[Any]

    def __call__(self, target: Any, options: TrainOptions, read: Read) -> Task:
        made = self.made(target, options, read)
        if options.start is None:
            params = made.init(jax.random.key(options.seed), target.params)
        else:
            made, params = self._going_on(options.start, made, target, options)

        def start(x):  # small updates would be lost in the target's own type
            return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x

        params = jax.tree.map(start, params)

        def save(folder: Path, params: Any) -> None:
            save_head(folder, self.name, made.fields, made.export(params), target, options.save_dtype)

        return Task(made, params, target.params, save)

    def _going_on(self, start: str, made: Any, target: Any, options: TrainOptions) -> tuple[Any, Any]:
        """The objective and parameters of an existing head, with its fields and vocabulary."""
        if options.draft_vocabulary is not None:
            raise ValueError("--draft-vocabulary is for new heads: the head of --start has its own")
        own, _ = fields_of(options.drafter, type(made.drafter), type(made))
        full = dataclasses.replace(target, dtype="float32")  # not rounded to the target's type
        drafter, params = Stored(type(made.drafter), start, own).load(full)
        given = {"drafter": drafter}
        if "ids" in params:
            given["ids"] = tuple(np.asarray(params["ids"]).tolist())
        made = dataclasses.replace(made, **given)
        trained = jax.eval_shape(made.init, jax.random.key(0), target.params)
        params = {name: value for name, value in params.items() if name in trained}  # not ids, nor what is the target's
        fields = {name: tuple(value) if isinstance(value, list) else value for name, value in made.fields.items()}
        fresh = type(drafter)(**fields).bind(target.lm)
        sizes = lambda objective: jax.tree.map(
            jnp.shape, jax.eval_shape(objective.init, jax.random.key(0), target.params)
        )
        same = dataclasses.replace(drafter, expander=fresh.expander) == fresh
        if not same or sizes(made) != jax.tree.map(jnp.shape, params):
            raise ValueError(
                f"cannot go on from {start!r}: its layers differ from those of {self.name} for {target.name}, and a trained "
                "head's folder can describe no others"
            )
        return made, params

    def made(self, target: Any, options: TrainOptions, read: Read) -> Any:
        """The objective. The target may be without weights.

        Raises:
          ValueError: on a target or options that it cannot use.
        """
        name = self.name
        if target.masked is not None:
            raise ValueError(f"{name} is a head for an autoregressive model, and {target.name} is {target.kind}")
        if options.draft or options.draft_config or options.reference:
            raise ValueError(f"--draft, --draft-config and --reference are for draft models, not for {name}")
        known = {field.name for field in dataclasses.fields(self.objective)}
        own, of_objective = fields_of(options.drafter, self.kind, self.objective)
        for option, field in (("loss", "divergence"), ("draft_vocabulary", "ids")):
            if getattr(options, option) is not None and field not in known:
                raise ValueError(f"--{option.replace('_', '-')} is not for {name}")
        bound = self.kind(**own).bind(target.lm)
        settings = with_preset(name, self.objective, of_objective) | divergence_of(options)
        if options.draft_vocabulary is not None:
            counts = read().counts(target.lm.vocab_size)
            settings["ids"] = tuple(most_frequent(counts, options.draft_vocabulary, target.eos_ids).tolist())
        return self.objective(drafter=bound, **settings)


def policy_task(
    name: str, kind: type[Unmask], objective: type[Any], target: Any, options: TrainOptions, read: Read
) -> Task:
    """The task of an unmask policy; the diffusion model is not changed."""
    from specjax.draft.heads.folder import save_head

    check_masked(name, target, options)
    of_policy, of_objective = fields_of(options.drafter, kind, objective)
    made = objective(target.lm, target.masked.mask_id, target.masked.shift, policy=kind(**of_policy), **of_objective)

    def save(folder: Path, params: Any) -> None:
        save_head(folder, name, made.fields, made.export(params), target, options.save_dtype)

    return Task(made, made.init(jax.random.key(options.seed), target.params), target.params, save)


def verifier_task(
    name: str, kind: type[Verifier], objective: type[Any], target: Any, options: TrainOptions, read: Read
) -> Task:
    """The task of a verifier's head over the target's features; the target is not changed."""
    names = ("draft", "draft_config", "reference", "loss", "draft_vocabulary", "start", "prompts", "features")
    refuse(options, names, f"{name}, which is trained on labelled --data")
    if target.masked is not None:
        raise ValueError(f"{name} judges drafts for an autoregressive model, and {target.name} is {target.kind}")
    of_verifier, of_objective = fields_of(options.drafter, kind, objective)
    made = objective(kind(**of_verifier).bind(target.lm), **of_objective)
    if lost := of_verifier.keys() - made.fields.keys():
        raise ValueError(f"{name}: {min(lost)} is for decoding, and training does not read it: leave it out")

    def save(folder: Path, params: Any) -> None:
        save_head(folder, name, made.fields, params, target, options.save_dtype)

    return Task(made, made.init(jax.random.key(options.seed), target.params), target.params, save)


def rule_task(
    name: str, kind: type[Rule], objective: type[Any], target: Any, options: TrainOptions, read: Read
) -> Task:
    """The task of a rule's head over a draft model; target and draft are not changed."""
    from specjax.draft.heads.folder import save_head

    refuse(options, ("draft_config", "reference", "loss", "draft_vocabulary", "start"), name)
    if options.draft is None:
        raise ValueError(f"{name} needs --draft, the model that drafts")
    if target.masked is not None:
        raise ValueError(f"{name} judges drafts for an autoregressive model, and {target.name} is {target.kind}")
    of_rule, of_objective = fields_of(options.drafter, kind, objective)
    drafter, draft_params = drafter_to_train(options.draft, target)
    check_length(options, drafter.lm)
    made = objective(target.lm, drafter.lm, rule=kind(**of_rule), **of_objective)
    frozen = (target.params, draft_params)
    draft = dataclasses.replace(target, lm=drafter.lm, params=draft_params, name=options.draft)

    def save(folder: Path, params: Any) -> None:
        save_head(folder, name, made.fields, params, draft, options.save_dtype)

    return Task(made, made.init(jax.random.key(options.seed), frozen), frozen, save)
