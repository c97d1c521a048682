"""Parameters as an Orbax checkpoint: the part `params/` of a folder whose other files describe the model.

Orbax writes under another name and renames when everything is written, and `config.json` comes last. So an interrupted
save does not load. The checkpoint holds parameters under our own names, without copies of kv-heads, so it fits every
mesh.
"""

import collections
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from specjax.models import checksums
from specjax.models.errors import ModelError
from specjax.models.weights import listed

PARAMS = "params"
_CHUNK = 4 << 20  # bytes that are read together: small enough that other meshes' slices do not read much in vain
_IN_FLIGHT = 64 << 20  # bytes being read at a time, at least
_NOT_OF_THE_FILE = (MemoryError, jax.errors.JaxRuntimeError)  # no room for it, or another process died


def is_one(folder: Path) -> bool:
    """Whether a model folder has its weights in an Orbax checkpoint, even a partly written one."""
    begun = (folder / PARAMS, *folder.glob(f"{PARAMS}.orbax-*"))  # other models have a file params.json
    return not any(folder.glob("model.safetensors*")) and any(path.is_dir() for path in begun)


def check_whole(folder: Path) -> None:
    """Raises ModelError if saving was interrupted."""
    if is_one(folder) and not ((folder / PARAMS).is_dir() and (folder / "config.json").is_file()):
        raise ModelError(f"{folder} is half written: saving it was interrupted; delete it and save the model again")


def write(folder: Path, params: Any, dtype: Any) -> None:
    """Writes the checkpoint; one process that has a shard writes it, once.

    Args:
      folder: a folder without `params/` that all processes see.
      params: without copies of kv-heads.
      dtype: the type to write; None keeps each parameter's own.
    """
    import orbax.checkpoint as ocp

    how = ocp.SaveArgs(dtype=dtype, chunk_byte_size=_CHUNK)
    nested = _nested(_by_name(params))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False)) as checkpointer:
        checkpointer.save(
            (folder / PARAMS).absolute(),
            args=ocp.args.PyTreeSave(nested, save_args=jax.tree.map(lambda _: how, nested)),
        )
    checksums.write(folder, PARAMS)


def restore(folder: Path, abstract: Any, places: Any = None) -> Any:
    """Reads every parameter onto its sharding, shard by shard.

    Args:
      folder: the folder that contains `params/`.
      abstract: the params pytree as `ShapeDtypeStruct`s.
      places: a pytree of shardings like `abstract`; None: the default device.

    Raises:
      ModelError: naming every parameter that is missing, misshapen or unknown; or if the checkpoint is damaged.
    """
    import orbax.checkpoint as ocp

    check_whole(folder)
    path = (folder / PARAMS).absolute()
    wanted = _by_name(abstract)
    alone = jax.device_put(0).sharding
    where = dict.fromkeys(wanted, alone) if places is None else _by_name(places)
    devices = next(iter(where.values())).device_set
    checksums.check(folder, PARAMS, {device.process_index for device in devices})  # before Orbax prints its own errors
    try:
        stored = _stored(ocp, path)
    except _NOT_OF_THE_FILE:
        raise
    except Exception as error:  # a damaged file raises errors of tensorstore, JSON or Orbax
        raise _unreadable(path, error) from error
    _check(stored, wanted)
    found = {}
    try:
        for limit, names in _groups(wanted, stored, where).items():
            found |= _read(ocp, path, limit, {name: wanted[name] for name in names}, where)
    except _NOT_OF_THE_FILE:
        raise
    except Exception as error:
        raise _unreadable(path, error) from error
    return jax.tree_util.tree_map_with_path(lambda path, _: found[_name(path)], abstract)


def _read(ocp: Any, path: Path, limit: int, wanted: dict[str, Any], where: dict[str, Any]) -> dict[str, Any]:
    """Reads some of the arrays; `limit` bounds the bytes in flight."""
    args = {
        name: ocp.ArrayRestoreArgs(sharding=where[name], dtype=leaf.dtype, global_shape=leaf.shape)
        for name, leaf in wanted.items()
    }
    given = ocp.args.PyTreeRestore(_nested(wanted), restore_args=_nested(args), partial_restore=True)
    handler = ocp.BasePyTreeCheckpointHandler(restore_concurrent_bytes=limit)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(handler_impl=handler)) as checkpointer:
        return flatten_dict(checkpointer.restore(path, args=given), sep=".")


def _groups(wanted: dict[str, Any], stored: dict[str, Any], where: dict[str, Any]) -> dict[int, list[str]]:
    """Groups of names by the bytes that may be in flight, which take memory besides the shards.

    A group may have a 16th of the bytes of the process with the most devices. A larger array counts in full, because
    Orbax asks for that much room when chunks cross its shards. All processes use the same groups, since they wait for
    each other after each."""
    devices = next(iter(where.values())).device_set
    count = max(collections.Counter(device.process_index for device in devices).values())
    held = lambda name: count * math.prod(where[name].shard_shape(wanted[name].shape))
    own = sum(held(name) * jnp.dtype(leaf.dtype).itemsize for name, leaf in wanted.items())
    groups: dict[int, list[str]] = {}
    for name, leaf in wanted.items():
        wide = max(jnp.dtype(kind).itemsize for kind in (leaf.dtype, stored[name].dtype))
        limit = max(_IN_FLIGHT, own // 16, math.prod(leaf.shape) * wide + 1)
        groups.setdefault(limit, []).append(name)
    return groups


def _stored(ocp: Any, path: Path) -> dict[str, Any]:
    """The shape and type of every array in a checkpoint, by name."""
    check_database(path)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return flatten_dict(checkpointer.metadata(path).item_metadata.tree, sep=".")


def check_database(path: Path) -> None:
    """Raises what tensorstore raises if the database of a checkpoint's arrays is damaged. Later every array would complain
    by itself."""
    if (path / "manifest.ocdbt").exists():
        import tensorstore

        base = {"driver": "file", "path": f"{path}/"}
        tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result().list().result()


def _check(stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    problems = [f"missing {name} {list(leaf.shape)}" for name, leaf in wanted.items() if name not in stored]
    for name, own in stored.items():
        if name not in wanted:
            problems.append(f"unknown {name} {list(own.shape)}")
        elif tuple(own.shape) != wanted[name].shape:
            problems.append(f"{name} has shape {list(own.shape)}, config.json says {list(wanted[name].shape)}")
        elif not jnp.issubdtype(own.dtype, jnp.floating):
            problems.append(f"{name} has type {own.dtype}, weights are floating-point numbers")
    if problems:
        raise ModelError(f"the checkpoint does not fit config.json: {listed(problems)}")


def _unreadable(path: Path, error: Exception) -> ModelError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ModelError(f"{path} is not a whole Orbax checkpoint ({reason[:200]}); save the model again")


def _by_name(tree: Any) -> dict[str, Any]:
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(str(key.key) for key in path)


def _nested(by_name: dict[str, Any]) -> Any:
    return unflatten_dict(by_name, sep=".")
