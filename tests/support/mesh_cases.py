"""What the tests on meshes share: parameters where the engine puts them, and programs whose text is read before they
run."""

import collections
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from support.compiled import optimised
from support.conformance import CAPACITY, DRAFTERS, MIXED, OVER, TARGET, TWINS, params, same, start, texts
from support.shapes import changed

import specjax
from specjax import decoder as decoding
from specjax.draft import DiffuSpec, Rasd, Rest, Switch, Trained
from specjax.draft.adaptive import Adaptive
from specjax.draft.datastore import build
from specjax.draft.fuse import Fused
from specjax.models.llama import LlamaLM
from specjax.plan.moved import moved_weights
from specjax.prompts import Prompts
from specjax.sampling import SamplingArrays, row_keys
from specjax.sharding import make_mesh, shardings

MESHES = {"2x4": "data=2,model=4", "1x8": "data=1,model=8", "8x1": "data=8,model=1", "4x2": "data=4,model=2"}
HEATS = (0.0, 0.5, 2.0, 0.0, 1.0, 1.0, 0.7, 1.0)
HOT = dataclasses.replace(MIXED, options=tuple({"temperature": heat} for heat in HEATS), new_tokens=16)
"""Greedy rows beside sampled ones. Filters and penalties are known to be off when the program is compiled, which saves
a third of its time; on a mesh they are tested with fewer drafters."""


SHALLOW = LlamaLM(changed(TARGET.config, num_hidden_layers=2))
SMALLER = LlamaLM(changed(TARGET.config, num_hidden_layers=1))
DEEP = ("hidden_transfer", "swift", "del", "s2d", "easyspec", "tli", "slem", "omnidraft")
"""Drafters that leave out, choose or group layers, have the first, or whose model is made for the table's target; two layers
are enough for the others, and compile sooner."""


def decoder_on(spec, name):
    """A drafter of the table on a mesh; its target and its draft have a layer less than the table's, where two do."""
    if name in DEEP:
        return specjax.speculative(TARGET, DRAFTERS[name], mesh=make_mesh(spec))
    return specjax.speculative(SHALLOW, _shallow(DRAFTERS[name]), mesh=make_mesh(spec))


def _shallow(drafter):
    if isinstance(drafter, Fused):
        return dataclasses.replace(drafter, a=_shallow(drafter.a), b=_shallow(drafter.b))
    if isinstance(drafter, Switch):
        return dataclasses.replace(drafter, members=tuple(map(_shallow, drafter.members)))
    if isinstance(drafter, Adaptive):
        return dataclasses.replace(drafter, drafter=_shallow(drafter.drafter))
    return dataclasses.replace(drafter, lm=SMALLER) if hasattr(drafter, "lm") else drafter


@functools.cache
def weights(name):
    """The parameters for `decoder_on`: the lower layers of the table's."""
    if name in DEEP:
        return params(name)
    whole = params("none")["target"]
    target, draft = ({**whole, "layers": {i: whole["layers"][i] for i in range(count)}} for count in (2, 1))
    drafter = DRAFTERS[name]
    if isinstance(drafter, Trained):
        own = drafter.bind(SHALLOW).init_params(jax.random.key(8), target)
    elif isinstance(drafter, Rest | Rasd):
        said = [(*prompt, *text) for prompt, text in zip(HOT.prompts, alone(), strict=True)]
        store = jax.tree.map(jnp.asarray, build(said[::2], SHALLOW.vocab_size))
        own = (draft, store) if isinstance(drafter, Rasd) else store
    elif isinstance(drafter, DiffuSpec):
        own = {"model": draft, "trigrams": None}
    elif isinstance(drafter, Switch):
        own = tuple(draft if member.needs_params else None for member in drafter.members)
    elif isinstance(drafter, Adaptive):
        own = {**params(name)["draft"], "drafter": draft}
    else:
        own = (None, draft) if isinstance(drafter, Fused) else draft if drafter.needs_params else None
    return {"target": target, "draft": own}


@functools.cache
def alone(deep=False):
    """What one device says."""
    decoder = specjax.speculative(TARGET if deep else SHALLOW)
    model = weights("swift" if deep else "none")
    return texts(decoding.run(decoder, model, start(decoder, HOT, model=model)))


def placed(decoder, model):
    """Parameters where the decoder wants them."""
    return jax.device_put(model, decoder.param_shardings(model))


def checked(function, params, *args, compiled=lambda lowered: lowered.compile()):
    """A function of params and arrays, compiled; no collective in it moves a weight, a single vector of them aside."""
    program = compiled(jax.jit(function).lower(params, *args))
    found = moved_weights(program.as_text())
    shapes = [(one, one.op.value[0].dims) for one in found]
    moved = [one for one, dims in shapes if math.prod(dims) > max(dims, default=1)]  # P-EAGLE's mask is a vector
    assert not moved, f"{len(moved)} collectives move weights: {moved[0]}"
    return program


def begun(decoder, model):
    """A state of `HOT`'s rows; its leaves are numpy arrays, and the key its data."""
    lengths = np.asarray([len(prompt) for prompt in HOT.prompts], np.int32)
    prompts = np.zeros((len(lengths), lengths.max()), np.int32)
    for row, prompt in zip(prompts, HOT.prompts, strict=True):
        row[: len(prompt)] = prompt

    def init(params, prompts, lengths, keys):
        given = Prompts(prompts, lengths, keys, lengths + HOT.new_tokens, SamplingArrays.make(len(HEATS), HEATS))
        state = decoder.init(params, given, capacity=CAPACITY)
        return dataclasses.replace(state, key=jax.random.key_data(state.key))

    given = jnp.asarray(prompts), jnp.asarray(lengths), row_keys(0, HOT.names)
    return jax.device_get(checked(init, model, *given)(model, *given))


def run(decoder, params, state):
    """Steps until all rows are done; filters and penalties are off."""

    def step(state):
        hot = SamplingArrays.make(len(HEATS)).replace(temperature=state.sampling.temperature)
        new, _ = decoder.step(params, dataclasses.replace(state, sampling=hot))
        return dataclasses.replace(new, sampling=state.sampling)

    return jax.lax.while_loop(lambda state: jnp.any(~state.done), step, state)


LESS = ("diffusion_draft", "eagle1", "eagle3")
"""Drafters that another line has with more: weights, or nodes ranked by their odds."""

SPLIT = [
    name for name in DRAFTERS if name not in (*TWINS, *LESS, *OVER) or name in ("draft-top_k", "draft-iid", "eagle2")
]
"""What is tried on meshes: of drafters that differ by their expander alone one that takes the best and one that draws, and
none that needs another target."""

OPTIMISED = ("prompt_lookup", "draft-top_k", "eagle2", "fuse")
"""One of each kind, whose steps are compiled as users do on a first mesh."""


def kind(drafter) -> str:
    """Of which sort a drafter is, by what it drafts with."""
    if isinstance(drafter, Fused | Adaptive | Switch):
        return "of several"
    if isinstance(drafter, Trained):
        return "a head"
    return "a model" if hasattr(drafter, "lm") else "the text and the target"


def chosen_meshes() -> dict[str, tuple[str, ...]]:
    """A mesh a drafter, by name, that splits rows and weights; two of a kind meet those that split one of them
    alone."""
    seen = collections.Counter()
    chosen = {}
    for name, drafter in ((name, DRAFTERS[name]) for name in SPLIT):
        count = seen[kind(drafter)]
        chosen[name] = (("2x4", "8x1"), ("4x2", "1x8"))[count % 2][: 2 if count < 2 else 1]
        seen[kind(drafter)] += 1
    assert min(seen.values()) >= 2, f"a kind with one drafter leaves out two meshes: {seen}"
    assert {kind(DRAFTERS[name]) for name in OPTIMISED} == set(seen)
    return chosen


def keeps_the_text(name, optimise=False):
    """On its meshes a drafter gives the rows that one device gives, and no weight crosses from chip to chip.

    `optimise` compiles the first mesh's steps as users do.
    """
    host = None
    for spec in chosen_meshes()[name]:
        decoder = decoder_on(MESHES[spec], name)
        model = placed(decoder, weights(name))
        how = {"compiled": optimised} if optimise and host is None else {}
        host = begun(decoder, model) if host is None else host
        state = dataclasses.replace(host, key=jax.random.wrap_key_data(host.key, impl="threefry2x32"))
        state = jax.device_put(state, shardings(decoder.mesh, decoder.axes(state), state))
        steps = lambda params, state, decoder=decoder: run(decoder, params, state)
        state = checked(steps, model, state, **how)(model, state)
        same(texts(state), alone(name in DEEP))
        assert state.tokens.sharding.shard_shape(state.tokens.shape)[0] == len(HEATS) // decoder.mesh.shape["data"]
