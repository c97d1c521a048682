"""What `specjax train` can train: one line a drafter."""

import dataclasses
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import models
from specjax.assembly.companions import Stored
from specjax.assembly.line import read_line
from specjax.assembly.registry import Entry, parse, plain_fields
from specjax.diffusion import Learn2PD
from specjax.draft import Acceptance, ModelDrafter
from specjax.draft.head import most_frequent
from specjax.expand import Chain
from specjax.objectives.base import Objective
from specjax.objectives.losses import LOSSES, Loss
from specjax.sharding.distributed import is_first
from specjax.train.distill import Distill
from specjax.train.options import TrainOptions, length_of

if TYPE_CHECKING:
    from specjax.train.data import Rows


@dataclasses.dataclass(frozen=True)
class Task:
    """What to train.

    Attributes:
      objective: the loss.
      params: where it starts.
      frozen: what the objective takes as `target_params`.
      save: writes trained parameters, numpy arrays, to a folder. Of many processes all call it, and the first writes.
    """

    objective: Objective
    params: Any
    frozen: Any
    save: Callable[[Path, Any], None]


Make = Callable[[Any, TrainOptions, Callable[[], "Rows"]], Task]


def make_loss(line: str) -> Loss:
    """A loss from its line of text, such as `jsd:beta=0.1`.

    Raises:
      ValueError: on an unknown name or field, naming those there are.
    """
    return parse("loss", {name: Entry(kind, plain_fields(kind)) for name, kind in LOSSES.items()}, line)


def _fields(line: str, *kinds: type) -> tuple[dict[str, Any], ...]:
    """The fields that a line sets, for each of the dataclasses those that are its own."""
    own = [_settable(kind) for kind in kinds]
    known = {name: value for fields in own for name, value in fields.items()}
    chosen = parse("drafter", {read_line(line).name: Entry(dict, known)}, line)
    return tuple({name: value for name, value in chosen.items() if name in fields} for fields in own)


def _settable(kind: type) -> dict[str, Any]:
    """The fields that a line may set: of an objective no lists, which follow from the target and other options."""
    fields = plain_fields(kind)
    if not issubclass(kind, Objective):
        return fields
    own = {name: value for name, value in fields.items() if value != ()}
    return own | {"preset": ""} if kind.presets else own


def _with_preset(name: str, kind: type[Objective], fields: dict[str, Any]) -> dict[str, Any]:
    """A line's fields of an objective, on top of those of the preset that it names.

    Raises:
      ValueError: on a preset that there is not.
    """
    preset = fields.pop("preset", "")
    if preset and preset not in kind.presets:
        raise ValueError(f"the training of {name} has the presets {', '.join(kind.presets)}, not {preset!r}")
    return {**kind.presets.get(preset, {}), **fields}


def _divergence(options: TrainOptions) -> dict[str, Any]:
    return {} if options.loss is None else {"divergence": make_loss(options.loss)}


def _distill(target: Any, options: TrainOptions, read: Callable[[], "Rows"]) -> Task:
    if options.draft_vocabulary is not None:
        raise ValueError("--draft-vocabulary is for heads; a draft model has the target's vocabulary")
    if options.start is not None:
        raise ValueError("--start is for heads; a draft model starts from --draft")
    if target.masked is not None:
        raise ValueError(f"distill teaches a draft of an autoregressive model, and {target.name} is a diffusion model")
    (fields,) = _fields(options.drafter, Distill)
    if (options.draft is None) == (options.draft_config is None):
        raise ValueError("distill needs one of --draft (a small model) and --draft-config (a small model's shape)")
    if (fields.get("keep", 1.0) < 1) != (options.reference is not None):
        raise ValueError("distill: keep below 1 and --reference (a distilled copy of the draft) need each other")
    full = dataclasses.replace(target, dtype="float32")  # the target's own type would swallow small updates
    if options.draft is not None:
        drafter, params = Stored(ModelDrafter, options.draft, {"expander": Chain()}).load(full)
        lm: Any = drafter.lm
    else:
        lm = _shape(str(options.draft_config), target)
        params = lm.init(jax.random.key(options.seed))
    _check_length(options, lm)
    frozen = target.params
    if options.reference is not None:
        reference, reference_params = Stored(ModelDrafter, options.reference, {"expander": Chain()}).load(full)
        if reference.lm != lm:
            raise ValueError(f"--reference {options.reference!r} is not a model of the draft's shape")
        frozen = (target.params, reference_params)
    objective = Distill(target.lm, lm, eos_ids=target.eos_ids, **fields, **_divergence(options))

    def save(folder: Path, params: Any) -> None:
        if is_first():
            models.save(folder, lm, params, options.save_dtype, target.tokenizer, target.eos_ids)

    return Task(objective, params, frozen, save)


def _check_length(options: TrainOptions, lm: Any) -> None:
    """Raises ValueError where rows are longer than what the draft model was made for."""
    longest = lm.config.max_position_embeddings
    if length_of(options) > longest:
        raise ValueError(f"--length {length_of(options)} is more than the draft's {longest} positions")


def _shape(file: str, target: Any) -> Any:
    """The model of a config.json; its vocabulary and positions are the target's where it does not say."""
    from specjax.models import LlamaLM, hf_config

    try:
        given = json.loads(Path(file).read_text())
    except OSError as error:
        raise ValueError(f"--draft-config {file!r}: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"--draft-config {file!r} is not valid JSON: {error}") from error
    if not isinstance(given, dict):
        raise ValueError(f"--draft-config {file!r} must hold a JSON object")
    config = target.lm.config
    shared = {"vocab_size": config.vocab_size, "max_position_embeddings": config.max_position_embeddings}
    lm = LlamaLM(hf_config.from_hf({"model_type": "llama", "hidden_act": "silu"} | shared | given))
    return ModelDrafter(lm).bind(target.lm).lm


@dataclasses.dataclass(frozen=True)
class HeadTask:
    """Makes the task of a head on the target's features.

    The objective is a dataclass whose field `drafter` is the bound drafter; `divergence`, where it has that, is the loss,
    and `ids` the draft's vocabulary. Fields of both that are numbers, words or switches can be set in the line.

    Attributes:
      name: the drafter's.
      drafter: `module:class`, imported when it is trained.
      objective: likewise.
    """

    name: str
    drafter: str
    objective: str

    @property
    def starts_from_layers(self) -> bool:
        """Whether the head's first parameters are made of the target's layers."""
        return _imported(self.objective).starts_from_layers

    def __call__(self, target: Any, options: TrainOptions, read: Callable[[], "Rows"]) -> Task:
        made = self.made(target, options, read)
        if options.start is None:
            params = made.init(jax.random.key(options.seed), target.params)
        else:
            made, params = self._going_on(options.start, made, target, options)

        def start(x):  # the target's own type would swallow small updates
            return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x

        params = jax.tree.map(start, params)

        def save(folder: Path, params: Any) -> None:
            from specjax.draft.heads.folder import save_head

            save_head(folder, self.name, made.fields, made.export(params), target, options.save_dtype)

        return Task(made, params, target.params, save)

    def _going_on(self, start: str, made: Any, target: Any, options: TrainOptions) -> tuple[Any, Any]:
        """The objective and the parameters of a head that there is, whose fields and vocabulary stay."""
        if options.draft_vocabulary is not None:
            raise ValueError("--draft-vocabulary is of new heads: that of --start has its own")
        own, _ = _fields(options.drafter, type(made.drafter), type(made))
        full = dataclasses.replace(target, dtype="float32")  # not rounded to the target's type
        drafter, params = Stored(type(made.drafter), start, own).load(full)
        given = {"drafter": drafter}
        if "ids" in params:
            given["ids"] = tuple(np.asarray(params["ids"]).tolist())
            params = {name: value for name, value in params.items() if name != "ids"}
        made = dataclasses.replace(made, **given)
        fields = {name: tuple(value) if isinstance(value, list) else value for name, value in made.fields.items()}
        fresh = type(drafter)(**fields).bind(target.lm)
        sizes = lambda objective: jax.tree.map(
            jnp.shape, jax.eval_shape(objective.init, jax.random.key(0), target.params)
        )
        same = dataclasses.replace(drafter, expander=fresh.expander) == fresh
        if not same or sizes(made) != jax.tree.map(jnp.shape, params):
            raise ValueError(
                f"cannot go on from {start!r}: its layers are not those that {self.name} has for {target.name}, which is all "
                "that a trained head's folder can say"
            )
        return made, params

    def made(self, target: Any, options: TrainOptions, read: Callable[[], "Rows"]) -> Any:
        """The objective; the target may be one without weights.

        Raises:
          ValueError: on a target or options that it cannot use.
        """
        name = self.name
        if target.masked is not None:
            raise ValueError(f"{name} is a head for an autoregressive model, and {target.name} is a diffusion model")
        if options.draft or options.draft_config or options.reference:
            raise ValueError(f"--draft, --draft-config and --reference are for draft models, not for {name}")
        drafter_kind, kind = _imported(self.drafter), _imported(self.objective)
        known = {field.name for field in dataclasses.fields(kind)}
        own, of_objective = _fields(options.drafter, drafter_kind, kind)
        for option, field in (("loss", "divergence"), ("draft_vocabulary", "ids")):
            if getattr(options, option) is not None and field not in known:
                raise ValueError(f"--{option.replace('_', '-')} is not for {name}")
        bound = drafter_kind(**own).bind(target.lm)
        settings = _with_preset(name, kind, of_objective) | _divergence(options)
        if options.draft_vocabulary is not None:
            counts = read().counts(target.lm.vocab_size)
            settings["ids"] = tuple(most_frequent(counts, options.draft_vocabulary, target.eos_ids).tolist())
        return kind(bound, **settings)


def masked(name: str, objective: str) -> Make:
    """A diffusion model's own parameters; the objective is a `specjax.objectives.masked.MaskedObjective`."""

    def make(target: Any, options: TrainOptions, read: Callable[[], "Rows"]) -> Task:
        _check_masked(name, target, options)
        kind = _imported(objective)
        (fields,) = _fields(options.drafter, kind)
        made = kind(target.lm, target.masked.mask_id, target.masked.shift, **fields)
        params = jax.tree.map(lambda x: x.astype(jnp.float32), target.params)  # small updates must not be swallowed

        def save(folder: Path, params: Any) -> None:
            if is_first():
                models.save(
                    folder, target.lm, params, options.save_dtype, target.tokenizer, target.eos_ids, target.masked,
                    generation=target.generation,
                )  # fmt: skip

        return Task(made, params, None, save)

    return make


def _check_masked(name: str, target: Any, options: TrainOptions) -> None:
    """Raises ValueError on options or a target that the training of a diffusion model cannot use."""
    foreign = ("draft", "draft_config", "reference", "loss", "draft_vocabulary", "start")
    given = [option for option in foreign if getattr(options, option) is not None]
    if given:
        raise ValueError(f"--{given[0].replace('_', '-')} is not for {name}")
    if target.masked is None:
        raise ValueError(f"{name} trains a diffusion model, and {target.name} is an autoregressive one")
    if target.masked.block:
        raise ValueError(f"{name} trains models that see the whole canvas, and the blocks of {target.name} do not")


def _learn2pd(target: Any, options: TrainOptions, read: Callable[[], "Rows"]) -> Task:
    """The filter of a diffusion model, which stays as it is."""
    from specjax.draft.heads.folder import save_head
    from specjax.train.filter import TrainFilter

    _check_masked("learn2pd", target, options)
    of_policy, of_objective = _fields(options.drafter, Learn2PD, TrainFilter)
    made = TrainFilter(
        target.lm, target.masked.mask_id, target.masked.shift, policy=Learn2PD(**of_policy), **of_objective
    )

    def save(folder: Path, params: Any) -> None:
        save_head(folder, "learn2pd", made.fields, made.export(params), target, options.save_dtype)

    return Task(made, made.init(jax.random.key(options.seed), target.params), target.params, save)


def _acceptance(target: Any, options: TrainOptions, read: Callable[[], "Rows"]) -> Task:
    """SpecDec++'s head over a draft model; both models stay as they are."""
    from specjax.draft.heads.folder import save_head
    from specjax.train.heads.acceptance import TrainAcceptance

    names = ("draft_config", "reference", "loss", "draft_vocabulary", "start")
    foreign = [name for name in names if getattr(options, name)]
    if foreign:
        raise ValueError(f"--{foreign[0].replace('_', '-')} is not for acceptance")
    if options.draft is None:
        raise ValueError("acceptance needs --draft, the model that drafts")
    if target.masked is not None:
        raise ValueError(
            f"acceptance judges drafts for an autoregressive model, and {target.name} is a diffusion model"
        )
    of_rule, of_objective = _fields(options.drafter, Acceptance, TrainAcceptance)
    drafter, draft_params = Stored(ModelDrafter, options.draft, {"expander": Chain()}).load(target)
    _check_length(options, drafter.lm)
    made = TrainAcceptance(target.lm, drafter.lm, Acceptance(**of_rule), **of_objective)
    frozen = (target.params, draft_params)
    draft = dataclasses.replace(target, lm=drafter.lm, params=draft_params, name=options.draft)

    def save(folder: Path, params: Any) -> None:
        save_head(folder, "acceptance", made.fields, params, draft, options.save_dtype)

    return Task(made, made.init(jax.random.key(options.seed), frozen), frozen, save)


def _imported(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


OBJECTIVES: dict[str, Make] = {
    "distill": _distill,
    "medusa": HeadTask("medusa", "specjax.draft:Medusa", "specjax.train.heads.medusa:TrainMedusa"),
    "hydra": HeadTask("hydra", "specjax.draft:Hydra", "specjax.train.heads.hydra:TrainHydra"),
    "eagle1": HeadTask("eagle1", "specjax.draft:Eagle", "specjax.train.heads.eagle:TrainEagle"),
    "eagle3": HeadTask("eagle3", "specjax.draft:Eagle3", "specjax.train.heads.eagle:TrainEagle3"),
    "peagle": HeadTask("peagle", "specjax.draft:PEagle", "specjax.train.heads.eagle:TrainPEagle"),
    "dflash": HeadTask("dflash", "specjax.draft:DFlash", "specjax.train.heads.dflash:TrainDFlash"),
    "dspark": HeadTask("dspark", "specjax.draft:DSpark", "specjax.train.heads.dflash:TrainDSpark"),
    "mtp": HeadTask("mtp", "specjax.draft:MTP", "specjax.train.heads.eagle:TrainMTP"),
    "gemma4_assistant": HeadTask(
        "gemma4_assistant",
        "specjax.draft:Gemma4Assistant",
        "specjax.train.heads.gemma4_assistant:TrainGemma4Assistant",
    ),
    "ppd": HeadTask("ppd", "specjax.draft:PPD", "specjax.train.heads.ppd:TrainPPD"),
    "clover2": HeadTask("clover2", "specjax.draft:Clover2", "specjax.train.heads.clover2:TrainClover2"),
    "acceptance": _acceptance,
    "diffusion": masked("diffusion", "specjax.objectives.masked:MaskedDiffusion"),
    "learn2pd": _learn2pd,
    "dparallel": masked("dparallel", "specjax.objectives.masked:CertaintyForcing"),
    "kangaroo": HeadTask("kangaroo", "specjax.draft:Kangaroo", "specjax.train.heads.kangaroo:TrainKangaroo"),
}
"""Makes the task from a loaded target, the command's options and the data; for heads see `HeadTask`."""
