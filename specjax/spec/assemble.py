"""From a loaded model and lines of text to its decoder and parameters, whichever kind of model it is."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from specjax.draft import Drafter
from specjax.sampling import Processor
from specjax.spec.companions import Stored
from specjax.spec.registry import build_drafter, make_cache, make_sampler, make_unmask, make_verifier
from specjax.speculative import speculative
from specjax.verify import Verifier

DEFAULT_DRAFTER = "prompt_lookup"
DEFAULT_VERIFIER = "coupled"
DEFAULT_UNMASK = "threshold"
DEFAULT_CACHE = "prefix"
DEFAULT_BLOCK = 32


def _setting(default: Any, help: str, **more: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, **more})  # as a command line shows it


@dataclasses.dataclass(frozen=True)
class Plan:
    """How to decode, as the user said it; what is None takes the default of the model's kind.

    Attributes:
      drafter: of an autoregressive model: a registry line, a drafter, or a pair of drafter and its parameters.
      verifier: of an autoregressive model: a registry line or a verifier.
      unmask: of a diffusion model: a registry line, a policy, or a pair of policy and the parameters it needs besides; where it
        has no mask, its sampler.
      cache: of a diffusion model: a registry line or a policy.
      block_length: of a diffusion model.
      cfg_scale: of a diffusion model.
      sub_block: of a diffusion model whose blocks do not see later ones: the length of a block's parts; 0: none.
      filter: of a diffusion model: the folder of a filter, for the policy `learn2pd`.
      logits_eos_inf: of a diffusion model: whether an end of text is never predicted (LLaDA).
      confidence_eos_eot_inf: of a diffusion model: whether a predicted end of text is the least sure of all (LLaDA).
      logprobs: whether records carry log-probabilities; of an autoregressive model.
      logits_processors: the user's own warpers (`specjax.sampling.Processor`); of an autoregressive model.
    """

    drafter: "str | Drafter | tuple[Drafter, Any] | None" = _setting(
        None, f"name:field=value,...; see `specjax drafters`; a+b fuses two (default: {DEFAULT_DRAFTER})"
    )
    verifier: "str | Verifier | None" = _setting(None, f"see `specjax verifiers` (default: {DEFAULT_VERIFIER})")
    unmask: Any = _setting(
        None, f"of a diffusion model: see `specjax policies` (default: {DEFAULT_UNMASK})", metavar="POLICY"
    )
    cache: Any = _setting(
        None, f"of a diffusion model: see `specjax policies` (default: {DEFAULT_CACHE})", metavar="POLICY"
    )
    block_length: int | None = _setting(None, f"of a diffusion model (default: {DEFAULT_BLOCK})", metavar="N")
    cfg_scale: float | None = _setting(
        None, "of a diffusion model: classifier-free guidance (default: off)", metavar="S"
    )
    sub_block: int | None = _setting(
        None, "of a block-diffusion model: parts of a block from left to right (default: the model's)", metavar="N"
    )
    filter: str | None = _setting(None, "of a diffusion model: a filter's folder, for learn2pd", metavar="FOLDER")
    logits_eos_inf: bool = _setting(False, "of a diffusion model: an end of text is never predicted")
    confidence_eos_eot_inf: bool = _setting(
        False, "of a diffusion model: a predicted end of text is the least sure of all"
    )
    logprobs: bool = _setting(False, "records carry log-probabilities of their tokens")
    logits_processors: Sequence[Processor] = _setting((), "", hidden=True)


@dataclasses.dataclass(frozen=True)
class _Kind:
    """A kind of model.

    Attributes:
      words: what an error calls it.
      settings: the fields of a `Plan` that are for it alone.
    """

    words: str
    settings: tuple[str, ...]


_AUTOREGRESSIVE = _Kind("an autoregressive", ("drafter", "verifier", "logprobs", "logits_processors"))
_DIFFUSION = _Kind("a diffusion", (
    "unmask", "cache", "block_length", "cfg_scale", "sub_block", "filter", "logits_eos_inf", "confidence_eos_eot_inf",
))  # fmt: skip


def assemble(model: Any, plan: Plan, mesh: Any = None) -> tuple[Any, Any]:
    """A decoder and its parameters.

    Args:
      model: what `specjax.models.load` returned.
      plan: how to decode.
      mesh: where parameters lie.

    Raises:
      ValueError: one line that says what cannot be used, and what can; a setting of the other kind of model among it.
    """
    kind, other = (_DIFFUSION, _AUTOREGRESSIVE) if model.masked else (_AUTOREGRESSIVE, _DIFFUSION)
    asked = lambda value: not (value is None or value is False or isinstance(value, tuple) and not value)
    wrong = [field for field in other.settings if asked(getattr(plan, field))]
    if wrong:
        raise ValueError(
            f"{model.name} is {kind.words} model: {wrong[0]} is a setting of {other.words} one; it takes "
            f"{', '.join(kind.settings)}"
        )
    make = _canvas if model.canvas else _diffusion if model.masked else _autoregressive
    return make(model, plan, mesh)


def _autoregressive(model, plan, mesh):
    verifier = DEFAULT_VERIFIER if plan.verifier is None else plan.verifier
    if isinstance(verifier, str):
        verifier = make_verifier(verifier)
    chosen = DEFAULT_DRAFTER if plan.drafter is None else plan.drafter or "none"
    drafter, draft_params = build_drafter(chosen, model, mesh=mesh)
    decoder = speculative(
        model.lm, drafter, verifier, logprobs=plan.logprobs, mesh=mesh, logits_processors=plan.logits_processors
    )
    params = {"target": model.params, "draft": draft_params}
    if mesh is not None and not model.abstract:
        params = jax.device_put(params, decoder.param_shardings(params))
    return decoder, params


def _canvas(model, plan, mesh):
    from specjax.diffusion import CanvasDiffusion, EntropyRenoise, NoCache

    canvas = model.canvas
    cache = make_cache(plan.cache) if isinstance(plan.cache, str) else plan.cache
    if plan.cfg_scale or not isinstance(cache, (NoCache, type(None))):
        raise ValueError(
            f"{model.name} keeps an exact cache of its text, and reads no second canvas: choose the cache none, and cfg_scale 0"
        )
    of_masks = ("sub_block", "filter", "logits_eos_inf", "confidence_eos_eot_inf")
    if asked := [name for name in of_masks if getattr(plan, name)]:
        raise ValueError(f"{model.name} has canvases of random tokens and no mask: leave {asked[0]} out")
    if plan.block_length not in (None, canvas.block):
        raise ValueError(
            f"{model.name} was made for canvases of {canvas.block} tokens, not of {plan.block_length}: leave the block length "
            "out"
        )
    sampler = EntropyRenoise(**dict(canvas.sampling)) if plan.unmask is None else plan.unmask
    if isinstance(sampler, str):
        sampler = make_sampler(sampler, EntropyRenoise(**dict(canvas.sampling)))
    if not isinstance(sampler, EntropyRenoise):
        raise ValueError(
            f"{model.name} has canvases of random tokens and no mask: unmask must be an EntropyRenoise, or its line of text"
        )
    return CanvasDiffusion(model.lm, sampler, canvas.block, mesh).checked(), {"target": model.params}


def _diffusion(model, plan, mesh):
    from specjax.diffusion import Unmask, diffusion

    unmask = DEFAULT_UNMASK if plan.unmask is None else plan.unmask
    unmask = make_unmask(unmask) if isinstance(unmask, str) else unmask
    if plan.filter is not None:
        unmask = _filtered(unmask, plan.filter)
    params = {"target": model.params}
    if isinstance(unmask, Stored):
        unmask, own = unmask.load(model, mesh)
        unmask = unmask, dict.fromkeys(unmask.needs, own)
    unmask, besides = unmask if isinstance(unmask, tuple) and len(unmask) == 2 else (unmask, {})
    if not isinstance(unmask, Unmask) or not isinstance(besides, dict):
        raise ValueError(
            "unmask must be a line of text, a policy, or a pair of a policy and a dict of the parameters it needs"
        )
    params |= besides
    missing = [name for name in unmask.needs if name not in params]
    if missing:
        raise ValueError(
            f"{type(unmask).__name__} needs parameters of its own: give unmask=(policy, {{{missing[0]!r}: params}}), or a line "
            "that names a folder"
        )
    cache = plan.cache
    if cache is None:
        cache = (
            "none"
            if unmask.decoder is not None or unmask.edits or plan.cfg_scale or model.masked.block
            else DEFAULT_CACHE
        )
    usual = unmask.width or model.masked.block or DEFAULT_BLOCK
    decoder = diffusion(
        model.lm,
        model.masked.mask_id,
        unmask,
        make_cache(cache) if isinstance(cache, str) else cache,
        block_length=usual if plan.block_length is None else plan.block_length,
        shift=model.masked.shift,
        causal_blocks=model.masked.block > 0,
        cfg_scale=plan.cfg_scale or 0.0,
        sub_block=_sub_block(model, plan),
        mesh=mesh,
        never=_ends(model) if plan.logits_eos_inf else (),
        doubted=_ends(model) if plan.confidence_eos_eot_inf else (),
    )
    return decoder, params


def _filtered(unmask, folder):
    if not (isinstance(unmask, Stored) and unmask.name == "learn2pd"):
        raise ValueError("filter is for the unmask policy learn2pd: choose it, or leave the filter out")
    return dataclasses.replace(unmask, asked=folder)


def _sub_block(model, plan):
    if plan.sub_block is not None:
        return plan.sub_block
    usual = model.masked.usual_sub_block
    return usual if plan.block_length is None or usual == 0 or plan.block_length % usual == 0 else 0


def _ends(model):
    if not model.eos_ids:
        raise ValueError(f"{model.name} names no end of text: leave logits_eos_inf and confidence_eos_eot_inf out")
    return tuple(model.eos_ids)
