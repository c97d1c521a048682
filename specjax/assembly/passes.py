"""The target of a plan that asks for more than the model's own pass."""

from typing import Any

from specjax.assembly.companions import check_vocabulary, companion
from specjax.models.contrastive import Contrastive
from specjax.models.dola import Dola, layers_of
from specjax.models.guided import Guided
from specjax.warpers.lists import tokens

SETTINGS = ("guidance_scale", "negative_prompt", "amateur", "contrast_alpha", "contrast_beta", "dola_layers")
"""Those of a plan that make its law of more than the model's last layer."""


def target_of(model: Any, plan: Any, mesh: Any = None) -> tuple[Any, Any]:
    """The model's LM and its parameters, with a second pass where one is asked for.

    Args:
      model: what `specjax.models.load` returned.
      plan: a `specjax.assembly.assemble.Plan`.
      mesh: where parameters lie.

    Raises:
      ValueError: one line that says what cannot be used, and what can.
    """
    if plan.guidance_scale == 1 and plan.negative_prompt is not None:
        raise ValueError(
            "negative_prompt is what guidance leads away from: set guidance_scale (1 is off), or leave it out"
        )
    chosen = [name for name in ("guidance_scale", "amateur", "dola_layers") if getattr(plan, name) not in (None, 1)]
    if len(chosen) > 1:
        raise ValueError(f"each of these makes the law in a way of its own: leave {chosen[0]} out, or {chosen[1]}")
    shares = {"alpha": plan.contrast_alpha, "beta": plan.contrast_beta}
    given = {name: share for name, share in shares.items() if share is not None}
    if plan.amateur is not None:
        return _contrasted(model, plan, given, mesh)
    if given:
        raise ValueError(f"contrast_{next(iter(given))} is of contrastive decoding: name an amateur, or leave it out")
    if plan.dola_layers is not None:
        return Dola(model.lm, layers_of(plan.dola_layers, model.lm)), model.params
    if plan.guidance_scale == 1:
        return model.lm, model.params
    return Guided(model.lm, plan.guidance_scale, _negative(model, plan.negative_prompt)), model.params


def _contrasted(model, plan, shares, mesh):
    if mesh is not None:
        raise ValueError("a model and its amateur lie on one device: leave the mesh out, or the amateur")
    amateur = companion(plan.amateur, model, None)
    if amateur.masked is not None:
        raise ValueError(f"the amateur {amateur.name!r} is a diffusion model: pick an autoregressive one")
    check_vocabulary(amateur, model, what="amateur")
    return Contrastive(model.lm, amateur.lm, **shares), {"lm": model.params, "amateur": amateur.params}


def _negative(model, prompt):
    if prompt is None:
        return ()
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise ValueError(f"{model.name} has no tokenizer: give negative_prompt as a list of token ids")
        prompt = model.tokenizer.encode(prompt, verbose=False) if prompt else []
    try:
        ids = tokens(prompt)
    except (TypeError, ValueError) as error:
        raise ValueError("negative_prompt is a string or a list of token ids") from error
    if not ids or max(ids) >= model.lm.vocab_size:
        what = "is empty: give at least one token" if not ids else f"has a token that {model.name} does not know"
        raise ValueError(f"negative_prompt {what}")
    return ids
