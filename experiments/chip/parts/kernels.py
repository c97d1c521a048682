"""Whether every kernel computes what its definition says: in float64 or slot by slot, on the host."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from experiments.chip.base import Part, Record, Run, Setting, Shown, compiled, table
from experiments.chip.parts.texts import conformance, exact
from specjax.kernels import exponents, grouped_dot, kv_commit, scaled_dot, tree_attention, verify
from specjax.kernels.exponents import xla as plain_exponents
from specjax.kernels.grouped_dot import loop
from specjax.kernels.kv_commit.reference import commit
from specjax.kernels.scaled_dot import xla as plain_scaled
from specjax.kernels.tree_attention.reference import reference
from specjax.kernels.verify.reference import argmax
from specjax.models.dfloat11 import encoded
from specjax.sampling import row_keys
from specjax.sampling.noise import keys_at

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.03}
"""Of what a kernel finds, beside 1 and beside what the definition finds; of float32 in full precision."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
      program: jitted, of `given`.
      given: arrays.
      wanted: makes what the definition says, a tree of arrays like the program's.
      tolerance: 0 where every bit counts.
    """

    program: Callable[..., Any]
    given: tuple[Any, ...]
    wanted: Callable[[], Any]
    tolerance: float


def _attention(way: str, form: str, kind: str) -> Check:
    conformance()
    from support import attention as made

    dtype, options, settings, more = jnp.dtype(kind), {}, {}, {}
    capacity, lengths = 256, (256, 5, 131)
    if form == "ragged":
        capacity, lengths, more = 320, (0, 129, 320), {"group": 4}
    elif form == "one query":
        capacity, lengths, more = 640, (40, 129, 600), {"block": 1, "heads": 1, "group": 8}
    elif form.startswith("width "):
        more = {"width": int(form.split()[1]), "heads": 1}
    elif form in ("past, window, cap, holes", "ring, sinks"):
        more = {"past": 61, "group": 1}
    more = {"width": 64} | more
    operands, options = made.world(capacity, lengths, dtype=dtype, **more)
    heads = operands[0].shape[2]
    if form == "past, window, cap, holes":
        options["unseen"], settings = made.holes(capacity), {"window": 100, "soft_cap": 2.0}
    if form == "ring, sinks":
        ends = (40, 300, 1000)
        operands = *operands[:5], jnp.minimum(jnp.asarray(ends), capacity)
        positions = jnp.asarray(ends)[:, None] + jnp.arange(operands[1].shape[1])[None]
        options |= {"query_positions": positions[:, 61:], "key_positions": positions, "sinks": made.sinks(heads)}
        options["cache_positions"], settings = made.ring(capacity, ends), {"window": 200}
    if form in ("int8", "float8_e4m3fn"):
        whole = (jnp.clip(x.astype(jnp.float32), -1e9, 1e9) for x in operands[3:5])
        (key, options["key_scale"]), (value, options["value_scale"]) = (
            made.quantised(x, jnp.dtype(form)) for x in whole
        )
        operands = *operands[:3], key, value, operands[5]
    settings["scale"] = operands[0].shape[3] ** -0.5
    # what finite garbage lies beyond a row's length is half of what is tried
    attend = functools.partial(tree_attention.tree_attention, **settings, implementation=way)
    program = jax.jit(lambda operands, options: attend(*operands, **options))
    return Check(program, (operands, options), lambda: reference(*operands, **options, **settings), TOLERANCE[kind])


def _commit(way: str, form: str, kind: str) -> Check:
    rng, dtype = np.random.default_rng(0), jnp.dtype(kind)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) * 50, dtype)
    caches, news = [draw(3, 2, 256, 128) for _ in range(2)], [draw(3, 5, 2, 128) for _ in range(2)]
    src = jnp.asarray([[0, 2, 4], [0, 1, 3], [0, 0, 0]], jnp.int32)
    dst = jnp.asarray([[5, 256, 3], [0, 99, 400], [1, -1, -2]] if form == "named" else [6, 127, 253], jnp.int32)
    program = jax.jit(functools.partial(kv_commit.kv_commit, implementation=way))
    wanted = lambda: tuple(commit(cache, new, src, dst) for cache, new in zip(caches, news, strict=True))
    return Check(program, (caches, news, src, dst), wanted, 0.0)


def _argmax(way: str, form: str, kind: str) -> Check:
    rng = np.random.default_rng(0)
    batch, nodes, count, vocab = (3, 7, 3, 1000) if form == "tree" else (2, 4, 4, 530)
    positions = np.arange(5, 5 + batch)[:, None] + np.arange(count)[None]
    keys = keys_at(row_keys(0, list("abc")[:batch]), jnp.asarray(positions), 0)
    scores = rng.normal(size=(batch, nodes, vocab)).astype(np.float32) * 2
    scores[rng.random(scores.shape) < 0.2] = -np.inf
    which = jnp.asarray(rng.integers(0, count, (batch, nodes)), jnp.int32)
    given = jnp.asarray(scores), keys, which, jnp.arange(batch) != 1
    program = jax.jit(lambda *given: verify.gumbel_argmax(*given, implementation=way)[0])

    def wanted():
        with jax.default_device(jax.devices("cpu")[0]):
            scores, keys, *rest = (
                np.asarray(x) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in given
            )
            words = np.asarray(jax.random.key_data(keys))
            return argmax(scores, jax.random.wrap_key_data(words, impl="threefry2x32"), *rest)[0]

    return Check(program, given, wanted, 0.0)


def _scaled(way: str, form: str, kind: str) -> Check:
    rng = np.random.default_rng(0)
    dtype = jnp.int4 if form.startswith("int4") else jnp.int8
    rows, groups, size, outputs = 70, 3, 64, 138
    x = jnp.asarray(rng.normal(size=(rows, groups * size)), jnp.dtype(kind))
    values = rng.integers(*((-8, 8) if dtype == jnp.int4 else (-128, 128)), (groups * size, outputs))
    scale = jnp.asarray(rng.normal(size=(groups, outputs)) / 16, jnp.float32)
    exactly = lambda x: np.asarray(x).astype(np.float64)
    wanted = lambda: exactly(x) @ (values * np.repeat(exactly(scale), size, axis=0))
    dot = scaled_dot.scaled_dot if way == "default" else plain_scaled.dot
    spread = float(np.abs(values).mean()) * (groups * size) ** 0.5
    return Check(jax.jit(dot), (x, jnp.asarray(values, dtype), scale), wanted, TOLERANCE[kind] * max(spread / 16, 1))


def _grouped(way: str, form: str, kind: str) -> Check:
    rng, sizes = np.random.default_rng(0), np.asarray([0, 40, 0, 1, 9, 0, 30], np.int32)
    x = jnp.asarray(rng.normal(size=(sizes.sum(), 192)), jnp.dtype(kind))
    kernels = jnp.asarray(rng.normal(size=(7, 192, 138)) / 14, jnp.dtype(kind))
    exactly = lambda x: np.asarray(x).astype(np.float64)

    def wanted():
        groups = np.repeat(np.arange(7), sizes)
        return np.stack([row @ exactly(kernels)[group] for row, group in zip(exactly(x), groups, strict=True)])

    usual = functools.partial(jax.lax.ragged_dot, precision="highest" if kind == "float32" else "default")
    ways = {"default": grouped_dot.grouped_dot, "ragged": usual, "loop": loop.dot}
    return Check(jax.jit(ways[way]), (x, kernels, jnp.asarray(sizes)), wanted, 2 * TOLERANCE[kind])


def _exponents(way: str, form: str, kind: str) -> Check:
    every = np.arange(2**16, dtype=np.uint16).reshape(128, 512).T.view(ml_dtypes.bfloat16)
    matrix = (
        every if form == "every bit pattern" else np.random.default_rng(0).normal(size=(288, 130)).astype(every.dtype)
    )
    coded = encoded(matrix, -2, 32, np.float32)
    made = exponents.numbers if way == "default" else plain_exponents.numbers
    bits = jax.jit(lambda *parts: jax.lax.bitcast_convert_type(made(*parts), jnp.uint16))
    return Check(bits, (coded.rest, coded.codes, coded.table), lambda: matrix.view(np.uint16), 0.0)


FORMS: dict[str, tuple[Callable[[str, str, str], Check], tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "tree attention": (
        _attention,
        ("pallas", "mosaic_gpu", "xla", "blocked"),
        (
            "ragged", "one query", "past, window, cap, holes", "ring, sinks", "int8", "float8_e4m3fn", "width 80",
            "width 96", "width 128",
        ),
        ("bfloat16", "float32"),
    ),
    "cache write": (_commit, ("pallas", "xla"), ("run", "named"), ("bfloat16", "float32")),
    "drawn argmax": (_argmax, ("pallas", "xla"), ("tree", "chain"), ("float32",)),
    "scaled product": (_scaled, ("default", "xla"), ("int4", "int8"), ("bfloat16", "float32")),
    "grouped product": (_grouped, ("default", "ragged", "loop"), ("seven groups",), ("bfloat16", "float32")),
    "coded exponents": (_exponents, ("default", "xla"), ("every bit pattern", "uneven"), ("bfloat16",)),
}  # fmt: skip
"""Of every operation its checks, the ways that it is computed (`default`: what the library picks), forms and types."""


def _serves(setting: Setting, operation: str, way: str, form: str, kind: str) -> bool:
    """Whether there is such a way at all on the platform."""
    if way == "mosaic_gpu":
        return (
            setting.platform == "gpu"
            and kind == "bfloat16"
            and form not in ("int8", "float8_e4m3fn", "width 80", "width 96")
        )
    if way == "pallas" and form == "named":
        return False  # it writes runs
    if way == "pallas":
        return setting.platform == "tpu" or (setting.platform == "gpu" and operation == "tree attention")
    return True


def _all(setting: Setting) -> Iterator[tuple[str, str, str, str]]:
    for operation, (_, ways, forms, kinds) in FORMS.items():
        for form in setting.pick(forms, forms[:1]):
            for kind in setting.pick(kinds, kinds[-1:]):
                for way in ways:
                    if _serves(setting, operation, way, form, kind):
                        yield operation, way, form, kind


def cases(setting: Setting) -> list[str]:
    return ["; ".join(case) for case in _all(setting)]


def made(setting: Setting, case: str) -> Run:
    operation, way, form, kind = case.split("; ")
    with exact():
        check = FORMS[operation][0](way, form, kind)
        program = compiled(check.program, *check.given)

    def run() -> Record:
        found = jax.tree.leaves(jax.device_get(program(*check.given)))
        wanted = jax.tree.leaves(check.wanted())
        errors = [_error(got, want, check.tolerance) for got, want in zip(found, wanted, strict=True)]
        return {"error_over_tolerance" if check.tolerance else "different": max(errors)}

    return run


def _error(got: Any, want: Any, tolerance: float) -> float:
    """How far off a number is at most, as a share of what is allowed; or how many differ, where every bit counts."""
    got = np.asarray(got)
    if not tolerance:
        return float((got != np.asarray(want).astype(got.dtype)).sum())
    got, want = got.astype(np.float64), np.asarray(want, np.float64)
    off = np.abs(got - want) / (tolerance * (1 + np.abs(want)))
    return float(np.where(np.isfinite(got), off, np.inf).max(initial=0.0))


def shown(records: list[Record], context: Shown) -> str:
    """By operation and way, and whatever is wrong."""
    kinds: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        operation, way, *_ = record["case"].split("; ")
        kinds.setdefault((operation, way), []).append(record)
    rows, wrong = [], []
    for (operation, way), own in kinds.items():
        bad = [record for record in own if record.get("error_over_tolerance", 0) > 1 or record.get("different", 0)]
        off = [record["error_over_tolerance"] for record in own if "error_over_tolerance" in record]
        words = f"{max(off):.2f} of what is allowed" if off else "every bit"
        name = "what the library picks" if way == "default" else f"`{way}`"
        rows.append([operation, name, f"{len(own) - len(bad)} of {len(own)}", words])
        wrong += [f"- **differs**: {record['case']}: {_said(record)}" for record in bad]
    return "\n".join([table(["operation", "way", "right", "at most off"], rows), "", *wrong]).rstrip()


def _said(record: Record) -> str:
    if "different" in record:
        return f"{record['different']:.0f} numbers"
    return f"{record['error_over_tolerance']:.3g} times what is allowed"


PART = Part("kernels", "Kernels against their definitions", 1.0, cases, made, shown, alone=False, ahead=4)
