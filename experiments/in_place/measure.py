"""What it takes to read another library's parameters where they are: bytes that a program holds besides its arguments.

python experiments/in_place/measure.py              # compiled for the CPU
python experiments/in_place/measure.py v5e:1x1      # for a chip that is not here (`specjax plan`'s topologies)

A program is a loop of plain steps (`specjax.decoder.run_program`), of a model cut to a few layers. Nothing is run. Beside each
layout stands the program of the same model with specjax's own parameters, and the bytes of all matrices of the layers.
"""

import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

import specjax
from specjax import decoder as decoding
from specjax.models import LlamaLM, abstract, of_library
from specjax.models.jax_folders import gemma, maxtext
from specjax.models.model_config import ModelConfig
from specjax.sharding import aot

MODELS = {"Qwen/Qwen3-8B": 2, "meta-llama/Llama-3.2-1B": 4, "google/gemma-3-27b-it": 2}
"""Published configs, and the layers that are left of them."""


def placed(tree: Any, dtype: Any, place: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype, sharding=place), tree)


def shapes_of(layout: Any, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """A library's arrays for a model, with layers apart."""
    own = jax.tree_util.tree_leaves_with_path(LlamaLM(config).abstract())
    wanted = {".".join(str(key.key) for key in path): leaf.shape for path, leaf in own}
    return {part.name: part.shape for part in layout.parts({}, wanted, config).values()}


def scanned(shapes: dict[str, tuple[int, ...]], layers: int) -> dict[str, tuple[int, ...]]:
    """MaxText's arrays with layers on their second axis."""
    found = {}
    for name, shape in shapes.items():
        stacked = re.sub(r"layers_\d+/", "layers/", name)
        found[stacked] = shape if stacked == name else (shape[0], layers, *shape[1:])
    return found


def trees(config: ModelConfig) -> dict[str, dict[str, tuple[int, ...]]]:
    """Each library's arrays, by a name for it."""
    found = {}
    if config.family in maxtext.FAMILIES:
        found["MaxText"] = shapes_of(maxtext, config)
        found["MaxText, scanned"] = scanned(found["MaxText"], config.num_hidden_layers)
    if config.family in gemma.FAMILIES:
        found["gemma"] = shapes_of(gemma, config)
    return found


def temporary(lm: Any, params: Any, place: Any) -> int:
    """Bytes of a loop's program besides its arguments and results."""
    decoder, params = specjax.speculative(lm, None), {"target": params, "draft": ()}
    state = jax.eval_shape(lambda params: decoder.empty(params, 1, 128), params)
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state)
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=place)
    program = jax.jit(
        lambda params, state, count: decoding.run_program(decoder, params, state, count), donate_argnums=1
    )
    lowered = program.lower(params, state, count) if place is None else aot.lowered(program, params, state, count)
    compiled = lowered.compile() if place is None else aot.compiled(lowered)
    found = compiled.memory_analysis()
    assert found is not None, "this backend's compiler says nothing of memory"
    return found.temp_size_in_bytes


def main(topology: str | None = None) -> None:
    place = None if topology is None else SingleDeviceSharding(aot.devices(topology)[0])
    dtype = jnp.float32 if topology is None else jnp.bfloat16
    print(
        f"| model, layers | parameters | matrices of layers, MB | temporary, MB ({topology or 'CPU'}) |\n|---|---|---|---|"
    )
    for name, layers in MODELS.items():
        config = abstract(name).lm.config.first(layers)
        own = placed(LlamaLM(config).abstract(), dtype, place)
        matrices = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(own["layers"])) / 1e6
        models: dict[str, tuple[Any, Any]] = {"specjax's": (LlamaLM(config), own)}
        for library, shapes in trees(config).items():
            tree = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=place) for name, shape in shapes.items()}
            models[library] = of_library(tree, config), tree
        for library, model in models.items():
            size = temporary(*model, place) / 1e6
            print(f"| {name}, {layers} | {library} | {matrices:.0f} | {size:.1f} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
