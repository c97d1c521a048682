"""Speculative decoding, and plain decoding, which is the same without a drafter."""

import dataclasses
from typing import Any

import jax

from specjax.about import About
from specjax.assembly.models_beside import shipped_name
from specjax.assembly.registry import build_drafter, build_verifier, make_old, tree_of
from specjax.decode.steer import Steer, steered
from specjax.decoder import Decode
from specjax.draft import Drafter
from specjax.models.caches import Old
from specjax.models.kv_bits import LARGEST
from specjax.sampling import Processor
from specjax.speculative import Speculative, has_rings, speculative
from specjax.verify import Verifier

PyTree = Any

DEFAULT_DRAFTER = "prompt_lookup"
DEFAULT_VERIFIER = "coupled"


@dataclasses.dataclass(frozen=True)
class Speculate(Decode):
    """A drafter proposes tokens, and one pass of the model verifies them. With the default verifier the text is plain
    decoding's.

    In a line, a drafter's own name implies this way: `eagle3:taps=1 15 28,verifier=typical`.

    Attributes:
      drafter: a line such as `"prompt_lookup:length=8"`, a drafter, or a pair of a drafter and its parameters; `a+b`
        fuses two. None: see `usual_drafter`.
      verifier: a line, a verifier, or a pair of a verifier and its trained parameters.
      steer: a change of the model's distribution (`specjax.decode.Steer`), or its line; None for no change.
      cache: which older tokens are kept (`specjax.models.caches`), which is lossy, or its line; None keeps all.
      processors: your own warpers, functions `(tokens, length, logits) -> logits` of one text
        (`specjax.sampling.Processor`).
    """

    about = About(
        "speculate", "a drafter proposes tokens, and one pass verifies them", "arXiv:2211.17192, arXiv:2302.01318",
        fields=("drafter", "verifier", "steer", "cache"),
    )  # fmt: skip

    drafter: "str | Drafter | tuple[Drafter, Any] | None" = None
    verifier: "str | Verifier | tuple[Verifier, Any]" = DEFAULT_VERIFIER
    steer: "str | Steer | None" = None
    cache: "str | Old | None" = None
    processors: tuple[Processor, ...] = ()

    def bind(
        self, model: Any, *, mesh: Any = None, rows: int = 1, logprobs: bool = False
    ) -> tuple[Speculative, PyTree]:
        """See `Decode.bind`."""
        if model.masked or model.canvas:
            usual = "decode=assd" if model.any_subset else "a policy, such as decode=threshold (see `specjax policies`)"
            raise ValueError(
                f"{model.name} is {model.kind}, and drafts are verified by an autoregressive one: decode with {usual}"
            )
        verifier, verify_params = build_verifier(self.verifier, model)
        chosen = self.drafter or "none"
        if self.drafter is None:  # if the text depends on the drafter, the number of rows must not choose it
            chosen = usual_drafter(model, 1 if verifier.text_follows_draft else rows)
        drafter, draft_params = build_drafter(chosen, model, mesh=mesh, tree=tree_of(verifier))
        target, target_params = steered(model, self.steer, mesh)
        target = target if self.cache is None else _forgetful(target, self.cache)
        decoder = speculative(
            target,
            drafter,
            verifier,
            logprobs=logprobs,
            mesh=mesh,
            processors=self.processors,
        )
        decoder = decoder.with_rings() if has_rings(target) else decoder
        params = {"target": target_params, "draft": draft_params}
        params |= {} if verify_params is None else {"verify": verify_params}
        if mesh is not None and not model.abstract:
            params = jax.device_put(params, decoder.param_shardings(params))
        return decoder, params


@dataclasses.dataclass(frozen=True)
class Plain(Decode):
    """One token per pass. The attributes are those of `Speculate`."""

    about = About("plain", "a token per pass", "-", "same text", fields=("steer", "cache"))

    steer: "str | Steer | None" = None
    cache: "str | Old | None" = None
    processors: tuple[Processor, ...] = ()

    def bind(
        self, model: Any, *, mesh: Any = None, rows: int = 1, logprobs: bool = False
    ) -> tuple[Speculative, PyTree]:
        """See `Decode.bind`."""
        own = Speculate("none", steer=self.steer, cache=self.cache, processors=self.processors)
        return own.bind(model, mesh=mesh, rows=rows, logprobs=logprobs)


def usual_drafter(model: Any, rows: int = 1) -> str:
    """The default drafter of an autoregressive model; the default verifier's text is the same with any.

    Several rows keep a CPU busy, and a look-up's wrong guesses in one row take time from the others. So there it is the
    draft model that is shipped with the target, or no drafter (`experiments/defaults` has the figures).

    Args:
      model: from `specjax.load`.
      rows: how many are decoded together.
    """
    from specjax import models

    if rows == 1 or jax.default_backend() != "cpu":
        return DEFAULT_DRAFTER
    return "draft" if f"{shipped_name(model)}-draft" in models.shipped() else "none"


def _forgetful(target, cache):
    old = make_old(cache) if isinstance(cache, str) else cache
    if not isinstance(old, Old):
        raise ValueError("cache of an autoregressive model must be one of specjax.models.caches, or its line of text")
    if not has_rings(target) or target.cache_dtype in LARGEST:
        what = f"in {target.cache_dtype}" if has_rings(target) else f"of a {type(target).__name__}"
        raise ValueError(f"the cache {type(old).__name__} is for plain caches of models that load() reads, not {what}")
    return dataclasses.replace(target, old=old)
