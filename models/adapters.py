"""LoRA adapters of PEFT (Hu et al. 2021, arXiv:2106.09685), which `specjax.models.adapter_merge` merges into a model.

A folder has `adapter_config.json` and `adapter_model.safetensors`. The latter holds two matrices for each layer that was
trained: A `[r, in]` and B `[out, r]`. The layer's matrix W `[out, in]` becomes `V = W + s B A`, where `s` is
`lora_alpha / r`, or `lora_alpha / sqrt(r)` with `use_rslora` (arXiv:2312.03732). With DoRA (arXiv:2402.09353) there is a
vector m `[out]` too, and W becomes `m V / |V|`, where each row has its own norm. An adapter may also replace tensors.
Sums are computed in float32 and rounded once to the parameters' type.
"""

import dataclasses
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from specjax.models.byte_ranges import equal
from specjax.models.errors import ModelError
from specjax.models.fields import an_object, flag, is_size, positive, shown
from specjax.models.json_file import read_json
from specjax.models.tensors import FLOATS, Tensor, read_header
from specjax.models.weights import listed

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
# Fields that do not affect the merge, or that are read here. Any other field must be off.
_NEUTRAL = frozenset(
    "peft_type task_type base_model_name_or_path revision inference_mode r lora_alpha use_rslora lora_dropout target_modules "
    "exclude_modules layers_to_transform layers_pattern auto_mapping peft_version megatron_core init_lora_weights eva_config "
    "loftq_config corda_config qalora_group_size runtime_config fan_in_fan_out bias rank_pattern alpha_pattern use_dora "
    "modules_to_save target_parameters ensure_weight_tying".split()
)
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the model's own matrices as they were."""
_NAME = re.compile(r"base_model\.model\.(.+)")
_LORA = re.compile(r"(.+?)((?:\.base_layer)*)\.lora_(embedding_)?(A|B|magnitude_vector)(?:\.weight)?")
PARAMETERS = ("gate_up_proj", "down_proj")
"""The matrices of all experts of a layer, as transformers names them and in the order in which its modules have them."""


@dataclasses.dataclass(frozen=True)
class Change:
    """The trained matrices for one matrix of the model, or for those of all experts of a layer; not read yet.

    Attributes:
      a: A, `[r, in]`; of X experts `[X r, in]`, one expert after the other.
      b: B, `[out, r]`; of X experts `[out, r X]`, in which the experts alternate.
      magnitude: m of DoRA, or None.
      rank: r.
      scale: s.
      kind: `linear`; `embedding`, whose `in` are tokens; or `parameter`, a matrix that is named itself and not by its
        module.
    """

    a: Tensor
    b: Tensor
    magnitude: Tensor | None
    rank: int
    scale: float
    kind: str


@dataclasses.dataclass(frozen=True)
class Adapter:
    """The changes that a folder holds, not read yet.

    Attributes:
      folder: its path.
      changes: by the name of the tensor that they change.
      whole: tensors that replace those of the model, by name.
    """

    folder: Path
    changes: Mapping[str, Change]
    whole: Mapping[str, Tensor]

    def unties(self, head: str, table: str) -> bool:
        """Whether a head that is the table of embeddings becomes one of its own: if not both change alike.

        Args:
          head: the name of the head's tensor.
          table: that of the table of embeddings.
        """
        return not (_alike(self.whole, head, table, equal) and _alike(self.changes, head, table, _transposed))

    def without(self, name: str) -> "Adapter":
        """The adapter without what it has for a tensor."""
        own = lambda found: {key: x for key, x in found.items() if key != name}
        return dataclasses.replace(self, changes=own(self.changes), whole=own(self.whole))

    def renamed(self, text: Callable[[dict[str, Any]], dict[str, Any]]) -> "Adapter":
        """The adapter with other names; see `specjax.models.families.base.Family.text`."""
        return dataclasses.replace(self, changes=text(dict(self.changes)), whole=text(dict(self.whole)))


def folders(
    adapter: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None,
) -> tuple[str | os.PathLike[str], ...]:
    """The argument `adapter` of `specjax.load` as a tuple."""
    return () if adapter is None else (adapter,) if isinstance(adapter, str | os.PathLike) else tuple(adapter)


def read_all(places: Iterable[str | os.PathLike[str]]) -> list[Adapter]:
    """The adapters of several folders, and a warning where one replaces what an earlier one changes.

    Raises:
      ModelError: see `read`.
    """
    found, changed = [], set()
    for adapter in map(read, places):
        lost = sorted(changed & {*adapter.whole})
        if lost:
            _LOG.warning("%s replaces what an adapter before it changes: %s", adapter.folder, listed(lost))
        found.append(adapter)
        changed |= {*adapter.changes, *adapter.whole}
    return found


def read(folder: str | os.PathLike[str]) -> Adapter:
    """Finds the adapter of a folder.

    Raises:
      ModelError: if there is no such folder, or if it holds more than what is merged here.
    """
    folder = Path(folder).expanduser()
    file, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    if not file.is_file():
        raise ModelError(f"{folder} has no adapter_config.json; give the folder of a PEFT LoRA adapter")
    if not weights.is_file():
        hint = "; convert its .bin to safetensors first" if (folder / "adapter_model.bin").is_file() else ""
        raise ModelError(f"{folder} has no adapter_model.safetensors{hint}")
    settings = _Settings.read(file)
    found: dict[tuple[str, int], dict[str, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    embeddings = set()
    for name, tensor in read_header(weights).items():
        own = _NAME.fullmatch(name)
        if own is None:
            raise ModelError(f"{weights}: {name} is no LoRA matrix, and no tensor of a module; only those are merged")
        lora = _LORA.fullmatch(own[1])
        if lora is None:
            whole[own[1].replace(".base_layer.", ".")] = tensor
        else:
            key = lora[1], lora[2].count(".")
            found.setdefault(key, {})[lora[4]] = tensor
            embeddings |= {key} if lora[3] else set()
    if not found and not whole:
        raise ModelError(f"{weights} holds no LoRA matrices")
    made, problems, depths = {}, [], dict(sorted(found))  # by module, its largest depth
    for (module, depth), own in found.items():
        name, key, named = settings.tensor(module, depth, depths[module])
        problems += settings.problems(name, own)
        kind = "embedding" if (module, depth) in embeddings else "parameter" if named else "linear"
        made[name] = own, settings.of(key), kind
    if problems:
        raise ModelError(f"{weights}: {listed(problems)}")
    changes = {
        name: Change(own["A"], own["B"], own.get("magnitude_vector"), rank, scale, kind)
        for name, (own, (rank, scale), kind) in made.items()
    }
    problems = settings.unsaved(whole)
    problems += [problem for name, change in changes.items() for problem in _misshapen(name, change)]
    problems += [
        f"{name} has type {x.dtype}, not {', '.join(FLOATS)}" for name, x in whole.items() if x.dtype not in FLOATS
    ]
    if problems:
        raise ModelError(f"{weights}: {listed(problems)}")
    return Adapter(folder, changes, whole)


def _alike(own: Mapping[str, T], head: str, table: str, same: Callable[[T, T], bool]) -> bool:
    """Whether there are entries for both names that are the same, or for neither."""
    first, second = own.get(head), own.get(table)
    return first is second if first is None or second is None else same(first, second)


def _transposed(head: Change, table: Change) -> bool:
    """Whether the change of a table of embeddings is the transpose of that of the head."""
    if (head.kind, table.kind, head.scale, table.magnitude) != ("linear", "embedding", table.scale, head.magnitude):
        return False
    pairs = (head.a, table.b), (head.b, table.a)
    return head.magnitude is None and all(np.array_equal(own.array(), other.array().T) for own, other in pairs)


def _misshapen(name: str, change: Change) -> list[str]:
    """What is wrong with the matrices of a change, as far as the file and its settings say."""
    a, b, rank = change.a, change.b, change.rank
    odd = {x.dtype for x in (a, b, change.magnitude) if x is not None} - set(FLOATS)
    if odd:
        return [f"{name} has types {a.dtype} and {b.dtype}, not {', '.join(FLOATS)}"]
    shapes = f"{name} has matrices {list(a.shape)} and {list(b.shape)}"
    if not (len(a.shape) == len(b.shape) == 2 and a.shape[0] == b.shape[1]):
        return [f"{shapes}, which are not of rank r={rank}"]
    several = change.kind == "parameter" and a.shape[0] % rank == 0
    return [] if a.shape[0] == rank or several else [f"{shapes}, which are not of rank r={rank}"]


@dataclasses.dataclass(frozen=True)
class _Settings:
    """What `adapter_config.json` says about the merge."""

    rank: int
    alpha: float
    ranks: Mapping[str, Any]
    alphas: Mapping[str, Any]
    rslora: bool
    dora: bool
    saved: tuple[str, ...]
    parameters: tuple[str, ...]

    @classmethod
    def read(cls, file: Path) -> "_Settings":
        """The settings of a file.

        Raises:
          ModelError: on fields that are wrong, or that ask for more.
        """
        config = read_json(file)
        kind, rank = config.get("peft_type"), config.get("r")
        if kind != "LORA":
            raise ModelError(f"{file}: peft_type {shown(kind)} is not supported; only LORA can be merged")
        odd = [
            name for name, value in config.items() if name not in _NEUTRAL and value not in (None, False, [], {}, "")
        ]
        odd += ["fan_in_fan_out"] if config.get("fan_in_fan_out", False) is not False else []
        start = config.get("init_lora_weights")
        odd += [] if any(start is plain or start == plain for plain in _PLAIN_STARTS) else ["init_lora_weights"]
        if odd:
            said = ", ".join(f"{name} {shown(config[name])}" for name in odd)
            raise ModelError(f"{file}: {said} is not supported; LoRA, DoRA and whole modules can be merged")
        if not is_size(rank):
            raise ModelError(f"{file}: r must be a positive integer, not {shown(rank)}")
        saved, parameters = (config.get(name) or [] for name in ("modules_to_save", "target_parameters"))
        for field, own in (("modules_to_save", saved), ("target_parameters", parameters)):
            if not isinstance(own, list) or not all(isinstance(name, str) for name in own):
                raise ModelError(f"{file}: {field} must be a list of names, not {shown(own)}")
        ranks, alphas = (an_object(name, config.get(name)) for name in ("rank_pattern", "alpha_pattern"))
        wrong = [f"rank_pattern {shown(value)}" for value in ranks.values() if not is_size(value)]
        wrong += [f"the expression {shown(own)}" for own in (*ranks, *alphas) if not _is_pattern(own)]
        if wrong:
            raise ModelError(
                f"{file}: {wrong[0]} cannot be used: give module names, or regular expressions, and positive integers"
            )
        for value in alphas.values():
            positive("alpha_pattern", value)
        alpha = positive("lora_alpha", config.get("lora_alpha"))
        rslora, dora = (flag(name, config.get(name)) for name in ("use_rslora", "use_dora"))
        return cls(rank, alpha, ranks, alphas, rslora, dora, tuple(saved), tuple(parameters))

    def of(self, module: str) -> tuple[int, float]:
        """r and s of a module, or of a parameter, by its name."""
        first = lambda each, usual: next((x for own, x in each.items() if re.match(rf"(.*\.)?({own})$", module)), usual)
        rank, alpha = first(self.ranks, self.rank), first(self.alphas, self.alpha)
        return rank, alpha / (rank**0.5 if self.rslora else rank)

    def tensor(self, module: str, depth: int, deepest: int) -> tuple[str, str, bool]:
        """The tensor that a module's matrices change, the name by which `of` knows it, and whether the file names a
        parameter.

        PEFT wraps a module once for each of its parameters, so the last parameter's matrices have the shortest name.

        Args:
          module: its name.
          depth: how many wrappers are around it.
          deepest: the most of these in the file.
        """
        named = [name.rpartition(".") for name in self.parameters]
        own = {last for at, _, last in named if not at or module == at or module.endswith(f".{at}")}
        order = sorted(own, key=lambda last: PARAMETERS.index(last) if last in PARAMETERS else len(PARAMETERS))
        if own == {"weight"} or not own:
            return f"{module}.weight", f"{module}.weight" if own else module, bool(own)
        parameter = order[deepest - depth] if len(order) == deepest + 1 else ", ".join(order)
        return f"{module}.{parameter}", f"{module}.{parameter}", True

    def problems(self, name: str, own: Mapping[str, Tensor]) -> list[str]:
        """Which of a tensor's trained matrices are missing, and which are unexpected."""
        wanted = ("A", "B", "magnitude_vector") if self.dora else ("A", "B")
        missing = [f"{name} has no lora_{part}" for part in wanted if part not in own]
        return missing + [f"{name} has a lora_{part}, and use_dora is false" for part in own if part not in wanted]

    def unsaved(self, whole: Mapping[str, Tensor]) -> list[str]:
        """The saved modules of which the file has no tensor."""
        parents = {name[: dot.start()] for name in whole for dot in re.finditer(r"\.", name)}
        lacking = [name for name in self.saved if not any(parent.endswith(name) for parent in parents)]
        return [f"modules_to_save names {name}, of which the file has no tensor" for name in lacking]


def _is_pattern(pattern: Any) -> bool:
    """Whether it is a regular expression."""
    try:
        re.compile(pattern)
    except (re.error, TypeError):
        return False
    return True
