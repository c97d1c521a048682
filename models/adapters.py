"""LoRA adapters of PEFT (Hu et al. 2021, arXiv:2106.09685), merged into a model's matrices when it is loaded.

A folder has `adapter_config.json` and `adapter_model.safetensors`. The latter holds two matrices for each linear layer
that was trained: A `[r, in]` and B `[out, r]`. The layer's matrix W `[out, in]` becomes `W + s B A`, where `s` is
`lora_alpha / r`, or `lora_alpha / sqrt(r)` with `use_rslora` (arXiv:2312.03732). Sums are computed in float32 and
rounded once to the parameters' type.
"""

import dataclasses
import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.errors import ModelError
from specjax.models.fields import flag, is_size, positive, shown
from specjax.models.json_file import read_json
from specjax.models.tensors import FLOATS, Tensor, read_header
from specjax.models.weights import Layout, Names, Part, cut_array, listed, shape_of, stored_parts

Array = jax.Array

# Fields that do not affect the merge, or that are read here. Any other field must be off.
_NEUTRAL = frozenset(
    "peft_type task_type base_model_name_or_path revision inference_mode r lora_alpha use_rslora lora_dropout target_modules "
    "exclude_modules layers_to_transform layers_pattern auto_mapping peft_version megatron_core init_lora_weights eva_config "
    "loftq_config corda_config qalora_group_size runtime_config fan_in_fan_out bias".split()
)
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the model's own matrices as they were."""
_PAIR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


@dataclasses.dataclass(frozen=True)
class Adapter:
    """The adapter matrices of a folder, not read yet.

    Attributes:
      folder: its path.
      scale: s.
      pairs: A and B, by the name of the tensor that they change.
    """

    folder: Path
    scale: float
    pairs: dict[str, tuple[Tensor, Tensor]]


def read(folder: str | os.PathLike[str]) -> Adapter:
    """Finds the adapter of a folder.

    Raises:
      ModelError: if there is no such folder, or if it holds more than LoRA's two matrices per linear layer.
    """
    folder = Path(folder).expanduser()
    file, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    if not file.is_file():
        raise ModelError(f"{folder} has no adapter_config.json; give the folder of a PEFT LoRA adapter")
    if not weights.is_file():
        hint = "; convert its .bin to safetensors first" if (folder / "adapter_model.bin").is_file() else ""
        raise ModelError(f"{folder} has no adapter_model.safetensors{hint}")
    scale, rank = _scale(file, read_json(file))
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in read_header(weights).items():
        pair = _PAIR.fullmatch(name)
        if pair is None:
            raise ModelError(f"{weights}: {name} is no LoRA matrix of a linear layer; only those are merged")
        found.setdefault(f"{pair[1]}.weight", {})[pair[2]] = tensor
    if not found:
        raise ModelError(f"{weights} holds no LoRA matrices")
    problems = [f"{name} has no lora_{'B' if 'A' in own else 'A'}" for name, own in found.items() if len(own) < 2]
    pairs = {name: (own["A"], own["B"]) for name, own in found.items() if len(own) == 2}
    for name, (a, b) in pairs.items():
        if {a.dtype, b.dtype} - set(FLOATS):
            problems.append(f"{name} has types {a.dtype} and {b.dtype}, not {', '.join(FLOATS)}")
        elif not (len(a.shape) == len(b.shape) == 2 and a.shape[0] == b.shape[1] == rank):
            problems.append(f"{name} has matrices {list(a.shape)} and {list(b.shape)}, which are not of rank r={rank}")
    if problems:
        raise ModelError(f"{weights}: {listed(problems)}")
    return Adapter(folder, scale, pairs)


def _scale(file: Path, config: dict[str, Any]) -> tuple[float, int]:
    """s, and r."""
    kind, rank = config.get("peft_type"), config.get("r")
    if kind != "LORA":
        raise ModelError(f"{file}: peft_type {shown(kind)} is not supported; only LORA can be merged")
    odd = [name for name, value in config.items() if name not in _NEUTRAL and value not in (None, False, [], {}, "")]
    odd += [name for name, off in (("bias", "none"), ("fan_in_fan_out", False)) if config.get(name, off) != off]
    start = config.get("init_lora_weights")
    odd += [] if any(start is plain or start == plain for plain in _PLAIN_STARTS) else ["init_lora_weights"]
    if odd:
        said = ", ".join(f"{name} {shown(config[name])}" for name in odd)
        raise ModelError(f"{file}: {said} is not supported; only plain LoRA of linear layers can be merged")
    if not is_size(rank):
        raise ModelError(f"{file}: r must be a positive integer, not {shown(rank)}")
    alpha = positive("lora_alpha", config.get("lora_alpha"))
    return alpha / (rank**0.5 if flag("use_rslora", config.get("use_rslora")) else rank), rank


def merged(params: Any, adapter: Adapter, names: Names, layout: Layout) -> Any:
    """The parameters with the adapter added. The arrays that it changes are given up.

    Args:
      params: of the model, as they are stored (without copies of kv-heads).
      adapter: what `read` returned.
      names: see `specjax.models.weights.Names`.
      layout: see `specjax.models.weights.Layout`.

    Raises:
      ModelError: naming every layer that the model lacks or has in another size.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(params)
    stored, problems = stored_parts(leaves, names, layout), []
    changes: list[tuple[Part, np.ndarray, np.ndarray]] = []
    for name, (a, b) in adapter.pairs.items():
        parts = stored.get(name, [])
        sizes = shape_of(parts) if parts else ()
        if not parts or not all(part.transposed and len(part.shape) == 2 for part in parts):
            problems.append(f"{name} is no linear layer of the model")
        elif sizes != (b.shape[0], a.shape[1]):
            problems.append(f"{name} is {list(sizes)}, and the adapter's is {[b.shape[0], a.shape[1]]}")
        else:
            changes += [(part, a.array(), part.ours(own)) for part, own in zip(parts, cut_array(b.array(), parts), strict=True)]
    if problems:
        raise ModelError(f"{adapter.folder}: the adapter does not fit the model: {listed(problems)}")
    arrays = [leaf for _, leaf in leaves]
    for part, a, b in changes:
        index = None if part.index is None else jnp.int32(part.index)
        kernel, matrices = arrays[part.leaf], (np.asarray(x, np.float32) for x in (a, b))
        arrays[part.leaf] = _adder(kernel.sharding)(kernel, index, adapter.scale, *matrices)
    return jax.tree.unflatten(tree, arrays)


@functools.cache
def _adder(place: jax.sharding.Sharding) -> Callable[..., Array]:
    """Adds to a kernel `[in, out]`, or to one of several, `[X, in, out]`, and leaves it where it lies."""

    def added(kernel: Array, index: Array | None, scale: Array, a: Array, b: Array) -> Array:
        own = kernel if index is None else kernel[index]
        product = jnp.einsum("ri,or->io", a, b, precision="highest")
        summed = (own.astype(jnp.float32) + scale * product).astype(kernel.dtype)
        return summed if index is None else kernel.at[index].set(summed)

    return jax.jit(added, donate_argnums=0, out_shardings=place)
