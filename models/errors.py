"""The one error of this package."""


class ModelError(ValueError):
    """A model folder, name or configuration that cannot be used; the message says what was wrong and what to do."""
