"""Random numbers that are the same on every platform."""

import jax
import numpy as np

STEPS = 2**10


def whole_numbers(shape, seed):
    """Even random numbers between -1 and 1 whose 1,024-fold are whole, so that every platform has the same ones."""
    return np.random.default_rng(seed).integers(-STEPS, STEPS + 1, shape).astype(np.float32) / STEPS


def drawn(made, seed=0):
    """Parameters like those that were made, of which drawn ones are `whole_numbers` times a power of two."""
    leaves, structure = jax.tree.flatten(jax.device_get(made))

    def again(number, x):
        spread = float(np.std(x)) if np.issubdtype(x.dtype, np.floating) else 0.0
        if not spread:
            return np.asarray(x)  # whole numbers, and what is the same everywhere
        return whole_numbers(x.shape, (seed, number)) * np.float32(2.0 ** np.round(np.log2(spread * 3**0.5)))

    return jax.tree.unflatten(structure, [again(number, x) for number, x in enumerate(leaves)])


def noisy(target):
    """A draft model that is often right: the target's weights, a little different."""
    return jax.tree.map(lambda x: x * (1 + whole_numbers(x.shape, x.size) / 4), target)
