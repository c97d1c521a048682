"""The other kernels timed at an 8B model's sizes: their bytes per second, as a share of those that the chip copies."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from experiments.chip.base import (
    Part,
    Record,
    Run,
    Setting,
    Shown,
    compiled,
    numbers,
    seconds_of,
    table,
)
from specjax.kernels.exponents import numbers as coded_numbers
from specjax.kernels.exponents import xla as plain_exponents
from specjax.kernels.grouped_dot import grouped_dot, loop
from specjax.kernels.kv_commit import kv_commit
from specjax.kernels.scaled_dot import scaled_dot
from specjax.kernels.scaled_dot import xla as plain_scaled
from specjax.kernels.verify import gumbel_argmax
from specjax.models.dfloat11 import encoded

ROWS, NODES, DEPTH = 8, 16, 5
"""Of a batch, of a tree, and of a path through it."""


@dataclasses.dataclass(frozen=True)
class Timed:
    """What is timed.

    Attributes:
      program: jitted; takes a state that it may consume and the rest, and returns the next state.
      given: makes the state and several sets of the rest.
      bytes: the fewest that a call moves.
    """

    program: Callable[..., Any]
    given: Callable[[], tuple[Any, list[tuple[Any, ...]]]]
    bytes: int


def _commit(setting: Setting, way: str, form: str) -> Timed:
    layers, slots = setting.pick((32, 4096), (2, 128))
    shape, new = (ROWS, 8, slots, 128), (ROWS, NODES, 8, 128)
    at = jnp.arange(1, ROWS + 1) * (slots // (2 * ROWS))
    src = jnp.broadcast_to(jnp.arange(0, 3 * DEPTH, 3)[None], (ROWS, DEPTH))

    def given():
        caches = tuple(numbers(shape, jnp.bfloat16, i) for i in range(2 * layers))
        return caches, [(tuple(numbers(new, jnp.bfloat16, 99 + i) for i in range(2 * layers)), src, at)]

    write = functools.partial(kv_commit, implementation=None if way == "default" else way)
    return Timed(jax.jit(write, donate_argnums=0), given, 2 * layers * ROWS * DEPTH * 8 * 128 * 2 * 2)


def _argmax(setting: Setting, way: str, form: str) -> Timed:
    vocab = setting.pick(128256, 512)

    def given():
        scores = [numbers((ROWS, NODES, vocab), jnp.float32, i, 5.0) for i in range(4)]
        which = jnp.broadcast_to(jnp.arange(NODES)[None] % DEPTH, (ROWS, NODES))
        words = jax.random.bits(jax.random.key(0), (ROWS, DEPTH, 2), jnp.uint32)
        return jnp.zeros((ROWS, NODES), jnp.int32), [(one, words, which, jnp.ones(ROWS, bool)) for one in scores]

    def draw(drawn, scores, words, which, noisy):
        keys = jax.random.wrap_key_data(words, impl="threefry2x32")
        return gumbel_argmax(scores, keys, which, noisy, implementation=None if way == "default" else way)[0]

    return Timed(jax.jit(draw), given, ROWS * NODES * vocab * 4)


def _after(x: jax.Array, product: jax.Array) -> jax.Array:
    """The next rows, which all of a product is needed for, so that no call begins before the last one has ended."""
    return x + (product.sum(axis=-1, keepdims=True) * 1e-9).astype(x.dtype)


def _scaled(setting: Setting, way: str, form: str) -> Timed:
    dtype, rows = jnp.dtype(form.split(", ")[0]), int(form.split()[1])
    inputs, outputs = setting.pick((4096, 14336), (256, 64))
    bits = jnp.iinfo(dtype).bits

    def given():
        rest = [
            (numbers((inputs, outputs), dtype, i), numbers((inputs // 128, outputs), jnp.bfloat16, i, 0.01))
            for i in range(8)
        ]
        return numbers((rows, inputs), jnp.bfloat16, 99), rest

    dot = scaled_dot if way == "default" else plain_scaled.dot
    follow = jax.jit(lambda x, *rest: _after(x, dot(x, *rest)))
    return Timed(follow, given, inputs * outputs * bits // 8 + inputs // 128 * outputs * 2)


def _grouped(setting: Setting, way: str, form: str) -> Timed:
    rows, count = int(form.split()[0]), setting.pick(32, 4)
    inputs, outputs = setting.pick((2880, 2880), (128, 64))
    sizes = np.bincount(np.random.default_rng(0).integers(0, count, rows), minlength=count).astype(np.int32)

    def given():
        rest = [(numbers((count, inputs, outputs), jnp.bfloat16, i, 0.02), jnp.asarray(sizes)) for i in range(2)]
        return numbers((rows, inputs), jnp.bfloat16, 99), rest

    ways = {"default": grouped_dot, "ragged": jax.lax.ragged_dot, "loop": loop.dot}
    follow = jax.jit(lambda x, *rest: _after(x, ways[way](x, *rest)))
    return Timed(follow, given, int((sizes > 0).sum()) * inputs * outputs * 2)


def _exponents(setting: Setting, way: str, form: str) -> Timed:
    inputs, outputs = setting.pick((4096, 14336), (256, 64))
    few = np.random.default_rng(0).normal(size=(inputs, 64)).astype(np.float32) * 0.02
    coded = encoded(few.astype(ml_dtypes.bfloat16), -2, 128, np.float32)
    parts = [np.tile(x, (1,) * (x.ndim - 1) + (outputs // 64,)) for x in (coded.rest, coded.codes)]
    made = coded_numbers if way == "default" else plain_exponents.numbers

    def given():
        rest = [(*map(jnp.asarray, parts), jnp.asarray(coded.table)) for _ in range(4)]
        return jnp.zeros((inputs, outputs), jnp.bfloat16), rest

    return Timed(jax.jit(lambda _, *rest: made(*rest)), given, sum(x.nbytes for x in parts) + 2 * inputs * outputs)


FORMS: dict[str, tuple[Callable[[Setting, str, str], Timed], dict[str, tuple[str, ...]], tuple[str, ...]]] = {
    "cache write": (_commit, {"": ("default", "xla")}, ("32 layers",)),
    "drawn argmax": (_argmax, {"": ("default",), "tpu": ("default", "pallas")}, ("128256 tokens",)),
    "scaled product": (
        _scaled,
        {"": ("default", "xla"), "cpu": ("default",)},
        ("int4, 8 rows", "int8, 8 rows", "int4, 128 rows", "int8, 128 rows"),
    ),
    "grouped product": (_grouped, {"": ("default", "ragged", "loop")}, ("32 rows", "512 rows")),
    "coded exponents": (_exponents, {"": ("default", "xla")}, ("4096 x 14336",)),
}
"""Of every operation what times it, its ways by platform, and forms."""


def cases(setting: Setting) -> list[str]:
    found = []
    for operation, (_, ways, forms) in FORMS.items():
        for form in setting.pick(forms, forms[:1]):
            found += [f"{operation}; {form}; {way}" for way in ways.get(setting.platform, ways[""])]
    return found


def made(setting: Setting, case: str) -> Run:
    operation, form, way = case.split("; ")
    timed = FORMS[operation][0](setting, way, form)
    shapes, sets = jax.eval_shape(timed.given)
    program = compiled(timed.program, shapes, *sets[0])

    def run() -> Record:
        return {"seconds": seconds_of(program, *timed.given(), setting.pick(0.02, 0.001)), "bytes": timed.bytes}

    return run


def shown(records: list[Record], context: Shown) -> str:
    copies, rows = context.rate("copy"), []
    for record in records:
        share = "-" if copies is None else f"{record['bytes'] / record['seconds'] / copies:.0%}"
        rows.append([*record["case"].split("; "), f"{record['seconds'] * 1e6:.1f}", share])
    return table(["operation", "form", "way", "us", "of the copy's bandwidth"], rows)


PART = Part("operations", "Other kernels, timed", 1.0, cases, made, shown, ahead=8)
