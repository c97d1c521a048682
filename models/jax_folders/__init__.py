"""Orbax checkpoints that other JAX libraries write: MaxText's, and those of Google DeepMind's library `gemma`."""
