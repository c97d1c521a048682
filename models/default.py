"""The default model."""

DEFAULT_MODEL = "tiny"
"""A shipped target. The names of drafters and heads shipped with it begin with its name."""
