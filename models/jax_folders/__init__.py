"""Parameters as other JAX libraries name and shape them: MaxText, Tunix and Google DeepMind's library `gemma`. Their Orbax
checkpoints are read, and their live trees."""
