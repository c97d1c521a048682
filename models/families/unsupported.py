"""Requested architectures that are not supported, and the reasons."""

UNSUPPORTED = {
    ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "DeepseekV4ForCausalLM"):
    "sparse attention (DSA): an index chooses the tokens that a query sees",
}  # fmt: skip
"""The unsupported part of each architecture, by its names."""


def reason(named: list[str]) -> str | None:
    """The reason why a model with one of these names (architectures, or a `model_type`) is not supported; None if
    unknown."""
    asked = {_bare(name) for name in named}
    return next((why for names, why in UNSUPPORTED.items() if asked & {_bare(name) for name in names}), None)


def _bare(name: str) -> str:
    """The common part of an architecture's name and its `model_type`.

    >>> _bare("Qwen3NextForCausalLM") == _bare("qwen3_next")
    True
    """
    bare = name.lower().replace("_", "")
    return bare.removesuffix("forcausallm").removesuffix("forconditionalgeneration").removesuffix("lmheadmodel")
