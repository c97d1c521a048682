"""The model that is meant where none is named."""

DEFAULT_MODEL = "tiny"
"""A shipped target; what is shipped beside a target has its name in front."""
