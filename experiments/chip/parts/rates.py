"""What the chip does at best: bytes and products per second, and what it takes to start something."""

import functools

import jax
import jax.numpy as jnp

from experiments.chip.base import Part, Record, Run, Setting, Shown, numbers, seconds_of, table

CHAIN = 256
"""Kernels of the program whose launches are timed."""

NAMES = {
    "copy": ("bytes/s, read and written", "hbm_bandwidth"),
    "read": ("bytes/s, read", "hbm_bandwidth"),
    "product": ("bfloat16 operations/s of a product of 8192 x 8192 x 8192", "flops"),
    "launch": (f"seconds of a kernel that does next to nothing, {CHAIN} of them in a program", "launch"),
    "call": ("seconds of a call of a program that does next to nothing", None),
}
"""What a case measures, and the field of `specjax.sharding.aot.Chip` that is published or assumed for it."""


def made(setting: Setting, case: str) -> Run:
    small = setting.pick(1, 64)
    if case in ("copy", "read"):
        array = numbers((2**22 // small, 256), jnp.float32, 1)
        if case == "copy":
            program = jax.jit(lambda x: x + 1, donate_argnums=0)
            return lambda: {"rate": 2 * array.nbytes / seconds_of(program, array, [()], 0.05)}
        total = jax.jit(lambda found, array: found + array.sum())
        return lambda: {"rate": array.nbytes / seconds_of(total, jnp.zeros(()), [(array,)], 0.05)}
    if case == "product":
        size = 8192 // small
        left, right = (numbers((size, size), jnp.bfloat16, seed, size**-0.5) for seed in (1, 2))
        dot = jax.jit(lambda x, y: (x @ y) * 0.5, donate_argnums=0)
        return lambda: {"rate": 2 * size**3 / seconds_of(dot, left, [(right,)], 0.05)}
    chain = CHAIN if case == "launch" else 1
    matrix = numbers((64, 64), jnp.float32, 1, 0.1)
    steps = jax.jit(lambda x: functools.reduce(lambda x, _: x @ matrix, range(chain), x) if chain > 1 else x + 1)
    return lambda: {"rate": seconds_of(steps, numbers((64, 64), jnp.float32, 2, 0.1), [()], 0.02) / chain}


def shown(records: list[Record], context: Shown) -> str:
    chip, rows = context.setting.chip, []
    for record in records:
        words, field = NAMES[record["case"]]
        known = "" if chip is None or field is None else f"{getattr(chip, field):.4g}"
        rows.append([record["case"], words, f"{record['rate']:.4g}", known])
    return table(["", "what", "measured", "published or assumed"], rows)


PART = Part("rates", "What the chip does at best", 1.0, lambda setting: list(NAMES), made, shown, ahead=1)
