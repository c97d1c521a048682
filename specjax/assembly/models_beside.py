"""Models that are loaded beside a target: their names, and whether they fit it."""

from typing import Any

from specjax.draft.padded import PaddedLM
from specjax.models import DEFAULT_MODEL

TARGET = "TARGET"
"""Stands for the target's name in the default of what is loaded."""


def shipped_name(target: Any) -> str:
    """The name under which a model is shipped, or found in a package, whatever the name of a user's folder; or nothing."""
    from specjax import models
    from specjax.models.gguf.finding import PACKAGES

    if target.path is None:
        return ""
    folder = target.path.resolve()
    ours = (name for name, own in models.shipped().items() if own.resolve() == folder)
    return next(ours, next((name for name, package in PACKAGES.items() if package.file == folder.name), ""))


def beside(asked: str, target: str = DEFAULT_MODEL) -> str:
    """What is loaded; a line that named nothing gets what would be shipped with the target.

    Args:
      asked: a folder, shipped name or hub id, or `TARGET-draft` and the like.
      target: its `shipped_name`; for one of another name, the companions are those of `DEFAULT_MODEL`.
    """
    from specjax import models
    from specjax.models.gguf.finding import PACKAGES

    first, dash, what = asked.partition("-")
    if first != TARGET:
        return asked
    name = target if target in {**models.shipped(), **PACKAGES} else DEFAULT_MODEL
    return f"{name.partition('-')[0]}{dash}{what}"


def companion(name: str, target: Any, mesh: Any) -> Any:
    """Another model, loaded as the target was: without weights if the target has none."""
    from specjax import models

    return (models.abstract if target.abstract else models.load)(name, dtype=target.dtype, mesh=mesh)


def check_vocabulary(other: Any, target: Any, besides: int = -1, what: str = "draft model") -> None:
    """Raises ValueError if two tokenizers differ in a token other than id `besides`. `what` is the other model's part."""
    if target.tokenizer is None or other.tokenizer is None:
        return
    theirs, ours = ({i: t for t, i in model.tokenizer.get_vocab().items() if i != besides} for model in (other, target))
    if any(theirs[i] != ours[i] for i in theirs.keys() & ours.keys()):
        raise ValueError(
            f"the {what} {other.name!r} has another vocabulary than {target.name!r} (other tokens): pick one with the target's "
            "tokenizer"
        )


def padded(draft: Any, target: Any) -> Any:
    """The draft's LM for a target whose tables have other padding: the same tokens, then rows without tokens.

    Raises:
      ValueError: if the tables differ by more than padding, as far as the tokenizers tell.
    """
    sizes = draft.lm.vocab_size, target.lm.vocab_size
    if sizes[0] == sizes[1] or draft.tokenizer is None or target.tokenizer is None:
        return draft.lm
    for model in (draft, target):
        token, last = max(model.tokenizer.get_vocab().items(), key=lambda item: item[1])
        if last >= min(sizes):
            raise ValueError(
                f"the draft model {draft.name!r} has {sizes[0]} tokens and the target {target.name!r} {sizes[1]}, and not "
                f"all that differ are padding: token {last} of {model.name!r} is {token!r}; pick a draft with the target's "
                "tokenizer"
            )
    return PaddedLM(draft.lm, sizes[1])


def draft_model(name: str, target: Any, mesh: Any, wanted: str = "an autoregressive one") -> Any:
    """A draft model that is no diffusion model, with caches of the target's type; `wanted` is what the error advises."""
    from specjax import models

    draft = companion(name, target, mesh)
    if draft.masked is not None:
        raise ValueError(f"the draft model {draft.name!r} is {draft.kind}: pick {wanted}")
    return models.cached(draft, target.cache_dtype) if isinstance(draft.lm, models.LlamaLM) else draft


def fitting(draft: Any, target: Any, mask: int) -> Any:
    """The draft's LM with the target's columns; its mask may have one row more than these. See `padded`."""
    tokens = target.lm.vocab_size
    return PaddedLM(draft.lm, tokens) if mask == tokens == draft.lm.vocab_size - 1 else padded(draft, target)
