"""Trained drafters on disk: a folder of `config.json` (which drafter, its fields, its target) and `model.safetensors`."""

import dataclasses
import hashlib
import logging
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.draft.base import Trained
from specjax.draft.head import check_ids
from specjax.draft.heads.files import config_file, torch_files, write_files
from specjax.draft.heads.published import read_published, stems_of
from specjax.models import hub
from specjax.models.errors import ModelError
from specjax.models.fields import an_object
from specjax.models.json_file import read_json
from specjax.models.model import resolve_dtype
from specjax.models.tensors import read_folder
from specjax.sharding.distributed import is_first, to_host
from specjax.sharding.rules import placed

_LOG = logging.getLogger(__name__)
_SHIPPED = Path(hub.__file__).resolve().parent / "pretrained" / "heads"


def shipped_heads() -> dict[str, Path]:
    """The heads that come with the package, from name to folder."""
    return {file.parent.name: file.parent for file in sorted(_SHIPPED.glob("*/config.json"))}


def _first_numbers(target: Any) -> tuple[np.ndarray, np.ndarray]:
    embed = target.lm.embed(target.params, jnp.arange(min(16, target.lm.vocab_size), dtype=jnp.int32)[None])
    config = getattr(target.lm, "config", None)
    probe = jnp.ones((1, 1, getattr(config, "stream_size", embed.shape[-1])), embed.dtype)
    if getattr(getattr(config, "norm", None), "mean", False):
        probe = jnp.cumsum(probe, axis=-1)  # of equal numbers, a layer norm leaves nothing
    return to_host((embed, target.lm.norm(target.params, probe)))


def fingerprint(target: Any) -> str:
    """Tells a target from others of its shape: a hash of its final norm and first embeddings, in float16."""
    data = b"".join(np.asarray(x, np.float16).tobytes() for x in _first_numbers(target))
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def sample(target: Any) -> list[float]:
    """A part of the input of `fingerprint`, by which a target is also recognised in a type of fewer bits."""
    embed, norm = (np.asarray(x, np.float32) for x in _first_numbers(target))
    return [float(f"{x:.5g}") for x in (*embed[0, :4, :8].ravel(), *norm[0, 0, :8])]


def _is_same(target: Any, made_for: dict[str, Any]) -> bool:
    """Whether a target is the one that a head was made for; if its numbers are rounded, as far as those tell."""
    if made_for.get("fingerprint") == fingerprint(target):
        return True
    known, own = np.asarray(made_for.get("sample", ())), np.asarray(sample(target))
    rounded = jnp.finfo(target.dtype).bits < 32 and known.shape == own.shape
    return rounded and np.allclose(own, known, rtol=2**-7, atol=1e-6)


def save_head(
    folder: str | os.PathLike[str], name: str, fields: dict[str, Any], params: Any, target: Any, dtype: Any = "float32"
) -> None:
    """Writes a trained drafter; an older one in the folder is replaced. All processes call this, and the first one writes.

    Args:
      folder: created if needed.
      name: the drafter's registry name.
      fields: the drafter's fields on which its parameters depend: numbers, words, lists.
      params: nested dicts and lists of arrays; integer arrays keep their type.
      target: from `specjax.models.load`.
      dtype: the type to write.

    Raises:
      ModelError: if `folder` is a file, or for a bad `dtype`.
    """
    kind = resolve_dtype(dtype)
    tensors = {}
    for path, array in jax.tree_util.tree_flatten_with_path(to_host(params))[0]:
        tensors[_name(path)] = np.ascontiguousarray(array.astype(kind if array.dtype.kind != "i" else np.int32))
    config = {
        "drafter": name,
        "fields": fields,
        "target": {
            "name": target.name,
            "vocab_size": target.lm.vocab_size,
            "fingerprint": fingerprint(target),
            "sample": sample(target),
        },
        "torch_dtype": kind.name,
    }
    if is_first():
        write_files(folder, config, tensors)


@dataclasses.dataclass(frozen=True)
class Head:
    """A loaded head.

    Attributes:
      drafter: bound to its target.
      params: its parameters.
      format: the folder's layout: `specjax`, or a published one's name.
      notes: how a published file was read, one sentence each; empty for our own.
    """

    drafter: Any
    params: Any
    format: str = "specjax"
    notes: tuple[str, ...] = ()


def load_head(
    asked: str | os.PathLike[str],
    name: str,
    kind: type[Any],
    target: Any,
    mesh: Any = None,
    **chosen: Any,
) -> tuple[Any, Any]:
    """A trained drafter (or unmask policy), bound to its target, and its parameters in the target's type; see `read_head`."""
    head = read_head(asked, name, kind, target, mesh, **chosen)
    return head.drafter, head.params


def read_head(
    asked: str | os.PathLike[str], name: str, kind: type[Any], target: Any, mesh: Any = None, *,
    published: dict[str, Any] | None = None, **chosen: Any,
) -> Head:  # fmt: skip
    """A trained drafter (or unmask policy), bound to its target, with its parameters in the target's type.

    Args:
      asked: a folder, the name of a shipped head, or a hub id; in our own or a published layout.
      name: the drafter's registry name.
      kind: its class, with `bind(lm)` and `init_params(key, target_params)`.
      target: from `specjax.models.load`.
      mesh: where to place the parameters, as its class says (`param_shardings`).
      published: the fields in place of `chosen` for a published head; None: the same.
      chosen: fields that the user set, including the expander. A published head does not say how its layers are
        counted, so for it `taps` take precedence over the file.

    Raises:
      ModelError: (a ValueError) if there is no such head; it belongs to another drafter or target; a tensor is missing,
        misshapen or unknown; or its vocabulary does not fit the target's.
    """
    known = kind.layout() if issubclass(kind, Trained) else None
    stems = stems_of(known)
    title, folder = hub.find(asked, shipped_heads(), f"head for {name}", stems, torch_files(stems))
    config = read_json(config_file(folder))
    layout, notes = "specjax", ()
    if "drafter" not in config:
        chosen = chosen if published is None else published
        found = read_published(folder, name, known, config, target, chosen)
        fields, params, layout, notes = found.fields, found.params, found.format, found.notes
        if published is not None:
            chosen = _cut(chosen, fields)
    else:
        if config["drafter"] != name:
            raise ModelError(f"{title} is a head for {config['drafter']}, not for {name}")
        fields = an_object("fields", config.get("fields"))
        fields = {key: tuple(v) if isinstance(v, list) else v for key, v in fields.items()}
        check_target(title, folder / "config.json", an_object("target", config.get("target")), target)
        params = None
        if chosen.get("mask", -1) != -1:
            raise ModelError(
                f"{title} has the embedding of its mask, which was trained: leave mask={chosen['mask']} out"
            )
    stay = fields.keys() - set(getattr(kind, "open_fields", ()))
    wrong = sorted(key for key in chosen if key in stay and chosen[key] != fields[key])
    if wrong:
        raise ModelError(f"{title} was made with {wrong[0]}={fields[wrong[0]]!r}, so it cannot be {chosen[wrong[0]]!r}")
    unknown = sorted(set(fields) - {f.name for f in dataclasses.fields(kind)})
    if unknown:
        raise ModelError(f"{folder / 'config.json'}: {name} has no field {unknown[0]!r}")
    try:
        drafter: Any = kind(**{**fields, **chosen}).bind(target.lm)
        anew = [f"{key}={value}" for key, value in chosen.items() if fields.get(key) != value and key != "expander"]
        asked = f"{title} with {', '.join(anew)}" if anew else title
        params = _read(asked, folder, drafter, target) if params is None else params
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise ModelError(f"{folder / 'config.json'} has a field of the wrong kind: {error}") from error
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: np.asarray(x).astype(_kind(path, x, target.dtype)), params
    )
    if isinstance(drafter, Trained):
        params = drafter.completed(params, target.params)
    for note in notes:
        _LOG.info("%s %s", title, note)
    params = jax.device_put(params, None if mesh is None else drafter.param_shardings(mesh, params))
    return Head(drafter, params, layout, notes)


def _kind(path: tuple[Any, ...], x: Any, dtype: Any) -> Any:
    """The type of a parameter: int32 for ids, float32 for a router's bias (`specjax.models.experts.Router`)."""
    if np.asarray(x).dtype.kind == "i":
        return jnp.int32
    of_router = [getattr(key, "key", None) for key in path[-2:]] == ["router", "bias"]
    return jnp.float32 if of_router else dtype


def _cut(chosen: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """The published tree, no deeper than the number of heads or the drafted block."""
    if "block" in fields:
        most = max(fields["block"] - 1 + fields["from_anchor"], 1)
    else:
        most = fields.get("heads")
    tree = chosen.get("expander")
    return {**chosen, "expander": tree.cut(most)} if most and tree is not None else chosen


def abstract_head(kind: type[Any], target: Any, mesh: Any = None, **chosen: Any) -> tuple[Any, Any]:
    """An untrained drafter (or unmask policy) for a target without weights.

    Its parameters are `ShapeDtypeStruct`s, with the sharding that `load_head` gives.

    Args:
      kind: see `load_head`.
      target: from `specjax.models.abstract`.
      mesh: see `load_head`.
      chosen: fields of the drafter.
    """
    drafter: Any = kind(**chosen).bind(target.lm)
    shapes = jax.eval_shape(drafter.init_params, jax.eval_shape(lambda: jax.random.key(0)), target.params)
    if isinstance(drafter, Trained):
        shapes = jax.eval_shape(drafter.completed, shapes, target.params)
    kind_of = lambda x: target.dtype if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, kind_of(x)), shapes)
    return drafter, params if mesh is None else placed(params, drafter.param_shardings(mesh, params))


def check_target(title: str, file: Path, made_for: dict[str, Any], target: Any) -> None:
    """Raises ModelError unless the head was made for this target; without weights, only the vocabulary is compared."""
    same = target.abstract or _is_same(target, made_for)
    if made_for.get("vocab_size") != target.lm.vocab_size or not same:
        raise ModelError(
            f"{title} was trained for the target {made_for.get('name')!r}, and {target.name!r} is another model (target in "
            f"{file}): train a head for it (`specjax train`), or give its folder with model=FOLDER"
        )


def _read(title: str, folder: Path, drafter: Trained, target: Any) -> Any:
    stored = read_folder(folder)
    ids = None
    if "ids" in stored:
        try:
            ids = check_ids(stored["ids"].array(), target.lm.vocab_size)
        except ValueError as error:
            raise ModelError(f"{title}: {error}") from error
    key = jax.eval_shape(lambda: jax.random.key(0))
    shapes = jax.eval_shape(drafter.init_params, key, target.params)
    if ids is not None:
        shapes = jax.eval_shape(lambda p, t: drafter.trimmed(p, t, ids)[1], shapes, target.params)
    return fitted(title, stored, shapes)


def fitted(title: str, stored: dict[str, Any], shapes: Any) -> Any:
    """Parameters of the given shapes from a folder's tensors by name, in the types in which they are stored.

    Raises:
      ModelError: naming tensors that are missing, misshapen or unknown.
    """
    stored, problems = dict(stored), []

    def find(path, leaf):
        own = _name(path)
        found = stored.pop(own, None)
        if found is None:
            problems.append(f"missing {own} {list(leaf.shape)}")
        elif found.shape != leaf.shape:
            problems.append(f"{own} has shape {list(found.shape)}, this drafter and target need {list(leaf.shape)}")
        else:
            return found.array()

    params = jax.tree_util.tree_map_with_path(find, shapes)
    problems += [f"unknown {own} {list(tensor.shape)}" for own, tensor in stored.items()]
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ModelError(f"{title} does not fit: {'; '.join(problems[:8])}{more}")
    return params


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(str(getattr(key, "key", getattr(key, "idx", None))) for key in path)
