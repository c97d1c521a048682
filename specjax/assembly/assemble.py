"""From a loaded model and lines of text to its decoder and parameters, whichever kind of model it is."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from specjax.assembly.companions import Stored, shipped_name
from specjax.assembly.passes import SETTINGS, target_of
from specjax.assembly.registry import (
    build_drafter,
    build_verifier,
    make_cache,
    make_old,
    make_sampler,
    make_unmask,
    tree_of,
)
from specjax.assembly.searching import NAMES, asked, searching, thinking, way_of
from specjax.draft import Drafter
from specjax.models.caches import Old
from specjax.models.kv_bits import LARGEST
from specjax.models.masked import LLADA_EOT, LLADA_MASK, published_threshold
from specjax.sampling import Processor
from specjax.soft import Mixer
from specjax.speculative import has_rings, speculative
from specjax.verify import Verifier

DEFAULT_DRAFTER = "prompt_lookup"
DEFAULT_VERIFIER = "coupled"
DEFAULT_UNMASK = "threshold"
DEFAULT_SAMPLER = "entropy_renoise"  # of models without a mask
DEFAULT_CACHE = "prefix"
DEFAULT_BLOCK = 32


def _setting(default: Any, help: str, **more: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, **more})  # as a command line shows it


def _token(text: str) -> "int | str":
    """A token's id, or its text."""
    return int(text) if text.isdecimal() else text


def _early_stopping(text: str) -> "bool | str":
    """A value of `early_stopping` from its words; `BeamSearch` refuses others."""
    return {"true": True, "false": False}.get(text.lower(), text.lower())


@dataclasses.dataclass(frozen=True)
class Plan:
    """How to decode, as the user said it; what is None takes the default of the model's kind.

    Attributes:
      drafter: of an autoregressive model: a registry line such as `"prompt_lookup:length=8"`, a drafter, or a pair of drafter
        and its parameters.
      verifier: of an autoregressive model: a registry line, a verifier, or a pair of verifier and its trained parameters.
      unmask: of a diffusion model: a registry line such as `"credit+threshold:threshold=0.8"`, a policy, or a pair of policy
        and the parameters it needs besides; where it has no mask, its sampler.
      cache: a registry line or a policy: of a diffusion model what is computed anew, of an autoregressive one what is kept of
        older tokens (`specjax.models.caches`), which is lossy.
      block_length: of a diffusion model: positions that are decoded together.
      cfg_scale: of a diffusion model: classifier-free guidance; 0 is off.
      sub_block: of a diffusion model whose blocks do not see later ones: the length of a block's parts, which are finished from
        left to right; 0: none.
      align: of such a model: where its blocks are counted from, `text` or `prompt_end`; see `specjax.diffusion.BlockDiffusion`.
      shift: of a diffusion model: whether its output at a position is for the next one, where its kind does not say so already.
      filter: of a diffusion model: the folder of a filter, for the policy `learn2pd`.
      logits_eos_inf: of a diffusion model: whether an end of text is never predicted (LLaDA).
      confidence_eos_eot_inf: of a diffusion model: whether a predicted end of text, or of a turn (`<|eot_id|>`), is the least
        sure of all (LLaDA).
      num_beams: of an autoregressive model: how many texts of a prompt a beam search keeps; 1: no search.
      num_beam_groups: of a beam search: in how many groups, for diverse beam search.
      diversity_penalty: of several groups: what a token costs that an earlier group chose in the same step.
      length_penalty: of a beam search: log-probabilities are over this power of the length.
      early_stopping: of a beam search: True, False or "never", see `specjax.search.BeamSearch`.
      guidance_scale: of an autoregressive model: classifier-free guidance, as in `transformers`; 1 is off. Log-probabilities
        are then of the guided law, those of prompts of the model's own.
      negative_prompt: of guidance: a text or token ids, what it leads away from; None: a prompt's last token.
      amateur: of an autoregressive model: a weaker one, for contrastive decoding (`specjax.models.contrastive`).
      contrast_alpha: of an amateur: what share of the likeliest token's probability a token needs; None: 0.1.
      contrast_beta: of an amateur: how much of what it says is taken away; None: 0.5.
      dola_layers: of an autoregressive model: DoLa's early layers (`specjax.models.dola`): "low", "high" or counts of layers.
      stochastic_beams: of an autoregressive model: how many texts of a prompt are drawn without replacement; 0: no such search.
      superposed_drafts: of an autoregressive model: how many drafts one pass reads, see `specjax.search.Superposed`; 0: no
        superposed decoding.
      superposed_tokens: of superposed decoding: how many tokens go on from a draft.
      superposed_temperature: of superposed decoding: what logits are divided by.
      superposed_alpha: of superposed decoding: the share of n-grams.
      superposed_ngrams: of superposed decoding: the datastore of n-grams: a folder, a shipped name or a hub id; None: none.
      soft_thinking: of an autoregressive model: a registry line or a `specjax.soft.Mixer`; None: tokens alone are read.
      end_of_think: of soft thinking: the token that ends it, an id or a text; None: `</think>`, where there is one.
      logprobs: whether records carry log-probabilities of their tokens, raw and after warping; of an autoregressive model.
      logits_processors: of an autoregressive model: your own warpers, functions `(tokens, length, logits) -> logits` of one
        text (`specjax.sampling.Processor`).
    """

    drafter: "str | Drafter | tuple[Drafter, Any] | None" = _setting(
        None,
        f"name:field=value,...; see `specjax drafters`; a+b fuses two (default: {DEFAULT_DRAFTER}; for several "
        "rows on a CPU draft where one is shipped, else none)",
    )
    verifier: "str | Verifier | tuple[Verifier, Any] | None" = _setting(
        None, f"see `specjax verifiers` (default: {DEFAULT_VERIFIER})"
    )
    unmask: Any = _setting(
        None,
        f"of a diffusion model: see `specjax policies` (default: the model's own, else {DEFAULT_UNMASK})",
        metavar="POLICY",
    )
    cache: Any = _setting(
        None,
        f"see `specjax policies` (default: all of it is kept; of a diffusion model its own, else {DEFAULT_CACHE})",
        metavar="POLICY",
    )
    block_length: int | None = _setting(None, f"of a diffusion model (default: {DEFAULT_BLOCK})", metavar="N")
    cfg_scale: float | None = _setting(
        None, "of a diffusion model: classifier-free guidance (default: off)", metavar="S"
    )
    sub_block: int | None = _setting(
        None, "of a block-diffusion model: parts of a block from left to right (default: the model's)", metavar="N"
    )
    align: str | None = _setting(
        None, "of a block-diffusion model: where blocks are counted from, text or prompt_end (default: the model's)",
        metavar="WHERE",
    )  # fmt: skip
    shift: bool = _setting(
        False, "of a diffusion model: its output at a position is for the next one (Dream's always is)"
    )
    filter: str | None = _setting(None, "of a diffusion model: a filter's folder, for learn2pd", metavar="FOLDER")
    logits_eos_inf: bool = _setting(False, "of a diffusion model: an end of text is never predicted")
    confidence_eos_eot_inf: bool = _setting(
        False, "of a diffusion model: a predicted end of text is the least sure of all"
    )
    num_beams: int = _setting(1, "beam search over so many texts (see `specjax searches`)", metavar="K", least=1)
    num_beam_groups: int = _setting(
        1, "of a beam search: groups of beams, for diverse beam search", metavar="G", least=1
    )
    diversity_penalty: float = _setting(
        0.0, "of several groups: what a token costs, in nats, that an earlier one chose in the same step", metavar="X"
    )
    length_penalty: float = _setting(
        1.0, "of a beam search: log-probabilities are over this power of the length", metavar="X"
    )
    early_stopping: "bool | str" = _setting(
        False, "of a beam search: true (when K texts have ended), false (by a guess) or never (when none can be better)",
        metavar="WHEN", parse=_early_stopping,
    )  # fmt: skip
    guidance_scale: float = _setting(
        1.0, "of an autoregressive model: classifier-free guidance, a second pass a step; 1 is off", metavar="S"
    )
    negative_prompt: "str | Sequence[int] | None" = _setting(
        None, "what guidance leads away from (default: the prompt's last token)", metavar="TEXT"
    )
    amateur: str | None = _setting(
        None,
        "contrastive decoding: folder, shipped name or hub id of a weaker model of the same vocabulary",
        metavar="MODEL",
    )
    contrast_alpha: float | None = _setting(
        None, "of an amateur: the share of the likeliest token's probability that one needs (default: 0.1)", metavar="A"
    )
    contrast_beta: float | None = _setting(
        None, "of an amateur: how much of what it says is taken away (default: 0.5)", metavar="B"
    )
    dola_layers: "str | Sequence[int] | None" = _setting(
        None, "DoLa: low or high, the early layers that are taken from the last one's law", metavar="WHICH"
    )
    stochastic_beams: int = _setting(
        0, "stochastic beam search: so many texts, drawn without replacement", metavar="K", least=0
    )
    superposed_drafts: int = _setting(
        0, "superposed decoding: so many drafts, which one pass reads", metavar="K", least=0
    )
    superposed_tokens: int = _setting(
        9, "of superposed decoding: so many tokens go on from a draft", metavar="M", least=1
    )
    superposed_temperature: float = _setting(0.06, "of superposed decoding: what logits are divided by", metavar="T")
    superposed_alpha: float = _setting(0.54, "of superposed decoding: the share of n-grams", metavar="A")
    superposed_ngrams: str | None = _setting(
        None, "of superposed decoding: a datastore of n-grams, see `specjax datastore`", metavar="FOLDER"
    )
    soft_thinking: "str | Mixer | None" = _setting(
        None,
        "a row thinks in mixtures of tokens: a line of `specjax samplers`, such as gumbel:n=8,tau=0.5",
        metavar="MIXER",
    )
    end_of_think: "int | str | None" = _setting(
        None, "of soft thinking: the token that ends it, its id or text (default: </think>, where there is one)",
        metavar="TOKEN", parse=_token,
    )  # fmt: skip
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


_AUTOREGRESSIVE = _Kind(
    "an autoregressive",
    ("drafter", "verifier", "cache", "logprobs", "logits_processors", *SETTINGS, *NAMES),
)
_DIFFUSION = _Kind("a diffusion", (
    "unmask", "cache", "block_length", "cfg_scale", "sub_block", "align", "shift", "filter", "logits_eos_inf",
    "confidence_eos_eot_inf",
))  # fmt: skip


def usual_drafter(model: Any, rows: int = 1) -> str:
    """The drafter of an autoregressive model where none is named; the default verifier's text is the same with any.

    Several rows fill a CPU, and what a look-up guesses wrong in one takes time from the others: there it is the draft model
    that is shipped beside the target, or no drafter (`experiments/defaults` has the figures).

    Args:
      model: what `specjax.models.load` returned.
      rows: how many are decoded together.
    """
    from specjax import models

    if rows == 1 or jax.default_backend() != "cpu":
        return DEFAULT_DRAFTER
    return "draft" if f"{shipped_name(model)}-draft" in models.shipped() else "none"


def assemble(model: Any, plan: Plan, mesh: Any = None, rows: int = 1) -> tuple[Any, Any]:
    """A decoder and its parameters.

    Args:
      model: what `specjax.models.load` returned.
      plan: how to decode.
      mesh: where parameters lie.
      rows: how many are decoded together, where the default drafter follows from it.

    Raises:
      ValueError: one line that says what cannot be used, and what can; a setting of the other kind of model among it.
    """
    kind, other = (_DIFFUSION, _AUTOREGRESSIVE) if model.masked else (_AUTOREGRESSIVE, _DIFFUSION)
    if wrong := [name for name in other.settings if name not in kind.settings and asked(plan, name)]:
        raise ValueError(
            f"{model.name} is {kind.words} model: {wrong[0]} is a setting of {other.words} one; it takes "
            f"{', '.join(kind.settings)}"
        )
    way = way_of(plan)
    if way and plan.cache is not None:
        raise ValueError(f"{way} keeps all of the cache: leave cache out")
    if way:
        return (thinking if way == "soft_thinking" else searching)(model, plan, mesh)
    if model.canvas or model.masked:
        return (_canvas if model.canvas else _diffusion)(model, plan, mesh)
    return _autoregressive(model, plan, mesh, rows)


def _autoregressive(model, plan, mesh, rows):
    verifier, verify_params = build_verifier(DEFAULT_VERIFIER if plan.verifier is None else plan.verifier, model)
    chosen = plan.drafter or "none"
    if plan.drafter is None:  # where a text rests on the drafter, the number of rows must not choose it
        chosen = usual_drafter(model, 1 if verifier.text_follows_draft else rows)
    drafter, draft_params = build_drafter(chosen, model, mesh=mesh, tree=tree_of(verifier))
    target, target_params = target_of(model, plan, mesh)
    target = target if plan.cache is None else _forgetful(target, plan.cache)
    decoder = speculative(
        target,
        drafter,
        verifier,
        logprobs=plan.logprobs,
        mesh=mesh,
        processors=plan.logits_processors,
    )
    decoder = decoder.with_rings() if has_rings(target) else decoder
    params = {"target": target_params, "draft": draft_params}
    params |= {} if verify_params is None else {"verify": verify_params}
    if mesh is not None and not model.abstract:
        params = jax.device_put(params, decoder.param_shardings(params))
    return decoder, params


def _forgetful(target, cache):
    old = make_old(cache) if isinstance(cache, str) else cache
    if not isinstance(old, Old):
        raise ValueError("cache of an autoregressive model must be one of specjax.models.caches, or its line of text")
    if not has_rings(target) or target.cache_dtype in LARGEST:
        what = f"in {target.cache_dtype}" if has_rings(target) else f"of a {type(target).__name__}"
        raise ValueError(f"the cache {type(old).__name__} keeps plain numbers of a model that load() reads, not {what}")
    return dataclasses.replace(target, old=old)


def _canvas(model, plan, mesh):
    from specjax.diffusion import CanvasDiffusion, EntropyRenoise, NoCache

    canvas = model.canvas
    cache = make_cache(plan.cache) if isinstance(plan.cache, str) else plan.cache
    if plan.cfg_scale or not isinstance(cache, (NoCache, type(None))):
        raise ValueError(
            f"{model.name} keeps an exact cache of its text, and reads no second canvas: choose the cache none, and cfg_scale 0"
        )
    of_masks = ("sub_block", "align", "shift", "filter", "logits_eos_inf", "confidence_eos_eot_inf")
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

    unmask = usual_unmask(model) if plan.unmask is None else plan.unmask
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
            else model.masked.cache or DEFAULT_CACHE
        )
    usual = unmask.width or model.masked.block or DEFAULT_BLOCK
    decoder = diffusion(
        model.lm,
        model.masked.mask_id,
        unmask,
        make_cache(cache) if isinstance(cache, str) else cache,
        block_length=usual if plan.block_length is None else plan.block_length,
        shift=model.masked.shift or plan.shift,
        causal_blocks=model.masked.block > 0,
        cfg_scale=plan.cfg_scale or 0.0,
        sub_block=_sub_block(model, plan),
        align=plan.align or model.masked.align,
        mesh=mesh,
        never=_ends(model) if plan.logits_eos_inf else (),
        doubted=(*_ends(model), *_ends_of_turn(model)) if plan.confidence_eos_eot_inf else (),
        warped=model.masked.warped,
    )
    return decoder, params


def usual_unmask(model: Any) -> str:
    """The line of the policy that a diffusion model is decoded with where the user names none: what its folder names, or the
    threshold of its published sampler."""
    if model.canvas:
        return DEFAULT_SAMPLER
    threshold = published_threshold(getattr(model.lm, "config", None), model.masked)
    usual = f"{DEFAULT_UNMASK}:threshold={threshold}" if threshold else DEFAULT_UNMASK
    return model.masked.unmask or usual


def _filtered(unmask, folder):
    if not (isinstance(unmask, Stored) and unmask.name == "learn2pd"):
        raise ValueError("filter is for the unmask policy learn2pd: choose it, or leave the filter out")
    return dataclasses.replace(unmask, asked=folder)


def _ends_of_turn(model):
    """The id of `<|eot_id|>`, where the model has that token and does not end texts with it; LLaDA's without a tokenizer."""
    eot = LLADA_EOT if model.masked.mask_id == LLADA_MASK else None
    if model.tokenizer is not None:
        eot = model.tokenizer.get_vocab().get("<|eot_id|>", eot)
    return () if eot is None or eot in model.eos_ids else (eot,)


def _sub_block(model, plan):
    if plan.sub_block is not None:
        return plan.sub_block
    usual = model.masked.usual_sub_block
    return usual if plan.block_length is None or usual == 0 or plan.block_length % usual == 0 else 0


def _ends(model):
    if not model.eos_ids:
        raise ValueError(f"{model.name} names no end of text: leave logits_eos_inf and confidence_eos_eot_inf out")
    return tuple(model.eos_ids)
