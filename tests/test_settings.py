"""JAX's own settings change no text, score or loss: over every class of decoders, the searches that a host steps, and training.

Most programs are kept by the settings that they are made under, but not by the kind of keys."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import but_slow
from support.every_decoder import LINES, STEPWISE, kinds, line
from support.objectives import DRAWN, FIXED, frozen, packed
from support.two_models import LARGE

import specjax
from specjax.assembly import registry
from specjax.train.loop import Settings, TrainState, update

SETTINGS = {
    "x64": lambda: jax.enable_x64(True),
    "strict": lambda: jax.numpy_dtype_promotion("strict"),
    "guard": lambda: jax.transfer_guard("disallow"),
    "key_reuse": lambda: jax.debug_key_reuse(True),
    "rbg": lambda: jax.default_prng_impl("rbg"),
    "unsafe_rbg": lambda: jax.default_prng_impl("unsafe_rbg"),
    "not_partitionable": lambda: jax.threefry_partitionable(False),
}
ALONE = ("x64",), ("strict",), ("guard",), ("not_partitionable",), ("key_reuse", "rbg")
"""With `key_reuse` programs are made anew, which is when the kind of keys would matter."""
TOGETHER = "x64", "strict", "guard", "key_reuse", "unsafe_rbg", "not_partitionable"


@contextlib.contextmanager
def under(names):
    """These settings."""
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(SETTINGS[name]())
        yield


def everywhere(give):
    """Holds what is given under every setting to what is given under none."""
    wanted = give()
    for names in ALONE:
        with under(names):
            assert give() == wanted, names


@pytest.mark.slow
def test_every_kind_has_a_line():
    apart = {kind for kind in kinds() if kind.__module__ == "specjax.pipelined"}  # the parts of one over two meshes
    assert {type(line(name).decoder) for name in LINES} == kinds() - apart
    asking = {"verbalized", "plan_search"}  # their replies are whole texts of the rows that `self_agreement` has
    assert registry.STEPWISE.keys() == STEPWISE.keys() | asking | {"entropy_adaptive"}


@pytest.mark.slow
@pytest.mark.parametrize("name", LINES)
def test_a_decoder(name):
    everywhere(line(name).written)


@pytest.mark.parametrize("name", but_slow(LINES, *list(LINES)[1:]))
def test_a_decoder_in_a_program_of_the_callers_own(name):
    wanted = line(name).written()
    with under(TOGETHER):
        assert line(name).by_hand() == wanted


@pytest.mark.slow
def test_parameters_of_64_bits_are_read_in_32():
    own = line("plain")
    wanted = own.written()
    with under(["x64"]):
        wide = jax.device_put(jax.tree.map(lambda leaf: np.asarray(leaf, float), own.model))
        assert {leaf.dtype for leaf in jax.tree.leaves(wide)} == {np.dtype("float64")}
        assert dataclasses.replace(own, model=wide).written() == wanted


def streamed():
    own = line("tree")
    state = own.decoder.init(own.model, own.rows(), capacity=own.capacity)
    return [progress.tokens for progress in specjax.stream(own.decoder, own.model, state, 2)]


def scored():
    return [score.to_json() for score in specjax.score(LARGE, [[3, 8, 13], [1, 2]], [[4, 5], [20]])]


def generated():
    """Several completions of a prompt, of which the first alone is read."""
    options = {"drafter": "prompt_lookup:length=1", "num_return_sequences": 2, "temperature": 0.9, "max_new_tokens": 8}
    return [record.tokens for record in specjax.generate(LARGE, [[3, 8, 13], [1, 2]], progress=False, **options)]


HOST = {"stream": streamed, "score": scored, "generate": generated}


@pytest.mark.slow
@pytest.mark.parametrize("name", (*HOST, *STEPWISE))
def test_what_a_host_steps(name):
    everywhere(HOST[name] if name in HOST else lambda: [(own.tokens, own.passes) for own in STEPWISE[name]()])


OBJECTIVES = FIXED | DRAWN


@pytest.mark.slow
@pytest.mark.covers("train")
@pytest.mark.parametrize("name", ("medusa", "acceptance"))
def test_two_updates(name):
    """Of one objective that draws and one that does not."""
    objective, settings = OBJECTIVES[name], Settings(steps=4, warmup=1)
    known, batch = frozen(name), jax.device_put(packed())
    begun = TrainState.begun(settings, objective.init(jax.random.key(0), known))

    def losses():
        state, found = jax.tree.map(jnp.copy, begun), []
        for _ in range(2):
            state, metrics = update(objective, settings, state, known, batch)
            found.append({metric: value.tolist() for metric, value in jax.device_get(metrics).items()})
        return found

    everywhere(losses)


ENVIRONMENT = {
    "JAX_ENABLE_X64": "1", "JAX_NUMPY_DTYPE_PROMOTION": "strict", "JAX_DEFAULT_PRNG_IMPL": "rbg", "JAX_DEBUG_KEY_REUSE": "1",
    "JAX_TRANSFER_GUARD": "disallow",
}  # fmt: skip
OPTIONS = {"max_new_tokens": 4, "temperature": 1.0, "progress": False}
CODE = f"import specjax; print(specjax.generate(None, ['3 + 4 ='], **{OPTIONS})[0].tokens)"


@pytest.mark.slow
def test_a_process_without_docstrings_and_checks_that_starts_with_all_of_them():
    """A model is loaded there, too."""
    command = [sys.executable, "-OO", "-c", CODE]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (record,) = specjax.generate(None, ["3 + 4 ="], **OPTIONS)
    assert json.loads(done.stdout) == record.tokens
