"""Inputs of merged tokens, from those of their parts, and the model that reads them.

In the shape descriptions `M` denotes merged tokens, `E` the model width, `V` the vocabulary, `P` parts that the
network reads, `r` its rank, `N` parts of the longest merged token.
"""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.draft.heads.files import read_tensors, write_files
from specjax.lm import LM
from specjax.models.errors import ModelError
from specjax.models.json_file import read_json
from specjax.settings import settled

Array = jax.Array
PyTree = Any
NAMES = "into", "bias", "out"


def fresh(key: Array, width: int, parts: int, rank: int) -> PyTree:
    """Parameters that change nothing yet, float32: {`into` `[P, E, r]`, `bias` `[r]`, `out` `[r, E]`}."""
    into = jax.random.normal(key, (parts, width, rank)) * (parts * width) ** -0.5
    return {"into": into, "bias": jnp.zeros((rank,)), "out": jnp.zeros((rank, width))}


def bent(network: PyTree, total: Array) -> Array:
    """What is added to the mean of the parts' embeddings, `[..., E]`.

    Args:
      network: from `fresh`, trained.
      total: `[..., r]`, the sum over parts of their embeddings times `into` at their places.
    """
    bias = network["bias"].reshape((1,) * (total.ndim - 1) + (-1,))
    return jnp.einsum("...r,re->...e", jax.nn.gelu(total + bias), network["out"], precision="highest")


@functools.partial(jax.jit, static_argnums=0)
@settled
def inputs_of(lm: LM, params: PyTree, network: PyTree | None, parts: Array) -> Array:
    """The inputs of merged tokens, `[M, E]` float32.

    Args:
      lm: the model.
      params: its parameters.
      network: the trained network; None: the mean of the parts' embeddings alone.
      parts: `[M, N]` int32 ids, -1 after the last one.
    """
    there = (parts >= 0)[..., None]
    each = jnp.where(there, lm.embed(params, jnp.maximum(parts, 0)).astype(jnp.float32), 0.0)
    mean = each.sum(axis=1) / jnp.maximum(there.sum(axis=1), 1)
    if network is None:
        return mean
    places = min(len(network["into"]), each.shape[1])
    total = jnp.einsum("mpe,per->mr", each[:, :places], network["into"][:places], precision="highest")
    return mean + bent(network, total)


@dataclasses.dataclass(frozen=True)
class WithMerged:
    """An LM around another, which reads ids from V on as merged tokens and writes its own tokens alone.

    Parameters are {`lm`: the model's, `merged`: {`inputs` `[M, E]`, `last` `[M]` int32, the last part of each}}.

    Attributes:
      lm: the model; its pass begins with `specjax.lm.inputs`.
    """

    lm: LM

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.lm, name)

    def __call__(self, params, block, cache, *, wants, draw=None, past=None, partial=None):
        merged = block.tokens >= self.lm.vocab_size
        at = jnp.where(merged, block.tokens - self.lm.vocab_size, 0)
        own = params["merged"]
        block = dataclasses.replace(
            block,
            tokens=jnp.where(merged, own["last"][at], block.tokens),
            embeddings=own["inputs"][at],
            embedded=merged,
        )
        return self.lm(params["lm"], block, cache, wants=wants, draw=draw, past=past, partial=partial)

    def begin(self, params, cache, lengths):
        return self.lm.begin(params["lm"], cache, lengths)


def with_inputs(lm: LM, params: PyTree, network: PyTree | None, parts: Sequence[Sequence[int]], room: int) -> PyTree:
    """The parameters of `WithMerged`.

    Args:
      lm: the model.
      params: its parameters.
      network: see `inputs_of`.
      parts: of every merged token.
      room: for how many merged tokens there are rows, at least as many as there are.
    """
    longest = 1 << max(max(map(len, parts), default=1) - 1, 0).bit_length()  # few sizes, so few programs
    ids = np.full((room, longest), -1, np.int32)
    last = np.zeros(room, np.int32)
    for number, own in enumerate(parts):
        ids[number, : len(own)], last[number] = own, own[-1]
    ids, last = jax.device_put((ids, last))
    return {"lm": params, "merged": {"inputs": inputs_of(lm, params, network, ids), "last": last}}


def save_network(folder: Path, network: PyTree, dtype: Any) -> None:
    """Writes a trained network: `config.json` and `model.safetensors`."""
    parts, width, rank = network["into"].shape
    config = {"merged_prompts": {"parts": parts, "rank": rank, "hidden_size": width}}
    write_files(folder, config, {name: np.asarray(network[name], dtype) for name in NAMES})


def read_network(folder: str, width: int) -> PyTree:
    """A network that `specjax train merged_prompts` wrote, float32.

    Raises:
      ModelError: if there is none, or it was made for a model of another width.
    """
    file = Path(folder) / "config.json"
    own = read_json(file).get("merged_prompts") if file.is_file() else None
    if not isinstance(own, dict):
        raise ModelError(f"{folder} holds no inputs of merged tokens: `specjax train merged_prompts` makes some")
    if own.get("hidden_size") != width:
        raise ModelError(f"{folder} is for a model of width {own.get('hidden_size')}, and this one has {width}")
    tensors = read_tensors(Path(folder))
    shapes = {
        "into": (own.get("parts"), width, own.get("rank")),
        "bias": (own.get("rank"),),
        "out": (own.get("rank"), width),
    }
    for name, shape in shapes.items():
        if name not in tensors or tensors[name].shape != shape:
            raise ModelError(f"{folder}: {name} must be a tensor of shape {list(shape)}")
    return jax.device_put({name: np.asarray(tensors[name], np.float32) for name in NAMES})
