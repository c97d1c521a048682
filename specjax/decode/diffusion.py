"""Diffusion decoding: an unmask policy commits tokens of a canvas, pass after pass."""

import dataclasses
from typing import Any

from specjax.about import About
from specjax.assembly.companions import Stored
from specjax.assembly.registry import make_cache, make_sampler, make_unmask
from specjax.decoder import Decode
from specjax.diffusion import CanvasDiffusion, EntropyRenoise, NoCache, Unmask, diffusion
from specjax.diffusion.cache import Cache
from specjax.models.masked import LLADA_EOT, LLADA_MASK, published_threshold

PyTree = Any

DEFAULT_UNMASK = "threshold"
WINDOW_UNMASK = {False: "entropy:bound=0.4,penalty=0.02", True: "longest_prefix"}
"""The policies of WeDLM's engine and, with shifted logits, of SDLM's."""
DEFAULT_SAMPLER = "entropy_renoise"  # for models without a mask
DEFAULT_CACHE = "prefix"
DEFAULT_BLOCK = 32
ENDS = ("never", "doubted")


@dataclasses.dataclass(frozen=True)
class Diffusion(Decode):
    """Decoding of a diffusion model. A field that is None takes the model's own value, or otherwise a default.

    In a line, a policy's own name implies this way: `credit+threshold:threshold=0.8,cache=dual`.

    Attributes:
      unmask: a line such as `"credit+threshold:threshold=0.8"`, a policy, or a pair of a policy and a dict of its
        parameters; for a model without a mask its sampler.
      cache: what is recomputed: a policy (`specjax.diffusion.cache`) or its line.
      block_length: positions that are decoded together.
      sub_block: for a model whose blocks do not see later ones, the length of a block's parts, which are finished from
        left to right; 0 for none.
      guidance: classifier-free guidance (LLaDA's `cfg_scale`), which reads two canvases per row; 0 is off.
      ends: how predicted ends of text are treated, words of `ENDS` separated by spaces. "never": they are not predicted
        (LLaDA's `logits_eos_inf`). "doubted": they, and ends of a turn (`<|eot_id|>`), count as the least sure of all
        (`confidence_eos_eot_inf`). Empty: they are ordinary tokens.
      align: for a model whose blocks do not see later ones, where these are counted from, `text` or `prompt_end`; see
        `specjax.diffusion.BlockDiffusion`.
      shift: whether the model's output at a position is for the next one, if its kind does not already say so.

    Raises:
      ValueError: for words that are not in `ENDS`.
    """

    about = About(
        "diffusion", "an unmask policy commits tokens of a canvas, pass after pass", "arXiv:2502.09992",
        fields=("unmask", "cache", "block_length", "sub_block", "guidance", "ends", "align", "shift"),
    )  # fmt: skip

    unmask: Any = None
    cache: "str | Cache | None" = None
    block_length: int | None = None
    sub_block: int | None = None
    guidance: float = 0.0
    ends: str = ""
    align: str | None = None
    shift: bool = False

    def __post_init__(self):
        if wrong := [word for word in self.ends.split() if word not in ENDS]:
            raise ValueError(f"ends takes the words {' and '.join(ENDS)}, not {wrong[0]!r}")

    def mode(self, model: Any) -> Any:
        """See `Decode.mode`."""
        return getattr(model, "diffusing", model)

    def bind(self, model: Any, *, mesh: Any = None, rows: int = 1, logprobs: bool = False) -> tuple[Any, PyTree]:
        """See `Decode.bind`."""
        model = self.mode(model)
        if model.any_subset:
            raise ValueError(f"{model.name} is an any-subset model, whose positions read no mask: decode it with assd")
        if not model.masked:
            raise ValueError(
                f"{model.name} is an autoregressive model, which has no canvas to unmask: decode with a drafter, such as "
                "drafter=prompt_lookup (see `specjax drafters`), or in another way (see `specjax searches`)"
            )
        if logprobs:
            raise ValueError(
                f"{model.name} is {model.kind}, whose records have no log-probabilities: leave logprobs out"
            )
        return (self._canvas if model.canvas else self._masked)(model, mesh)

    def _canvas(self, model, mesh):
        canvas = model.canvas
        cache = make_cache(self.cache) if isinstance(self.cache, str) else self.cache
        if self.guidance or not isinstance(cache, (NoCache, type(None))):
            raise ValueError(
                f"{model.name} keeps an exact cache of its text and cannot read a second canvas: choose the cache none, and "
                f"guidance 0"
            )
        if asked := [name for name in ("sub_block", "align", "shift", "ends") if getattr(self, name)]:
            raise ValueError(f"{model.name} has canvases of random tokens and no mask: leave {asked[0]} out")
        if self.block_length not in (None, canvas.block):
            raise ValueError(
                f"{model.name} was made for canvases of {canvas.block} tokens, not of {self.block_length}: leave the block "
                "length out"
            )
        usual = EntropyRenoise(**dict(canvas.sampling))
        sampler = usual if self.unmask is None else self.unmask
        if isinstance(sampler, str):
            sampler = make_sampler(sampler, usual)
        if not isinstance(sampler, EntropyRenoise):
            raise ValueError(
                f"{model.name} has canvases of random tokens and no mask: unmask must be an EntropyRenoise, or its line of text"
            )
        return CanvasDiffusion(model.lm, sampler, canvas.block, mesh).checked(), {"target": model.params}

    def _masked(self, model, mesh):
        policy, besides = _policy(model, usual_unmask(model) if self.unmask is None else self.unmask, mesh)
        params = {"target": model.params} | besides
        cache = self.cache
        if cache is None:
            keeps_none = policy.decoder is not None or policy.edits or self.guidance or model.masked.block
            cache = "none" if keeps_none else model.masked.cache or DEFAULT_CACHE
        usual = policy.width or model.masked.block or DEFAULT_BLOCK
        decoder = diffusion(
            model.lm,
            model.masked.mask_id,
            policy,
            make_cache(cache) if isinstance(cache, str) else cache,
            block_length=usual if self.block_length is None else self.block_length,
            shift=model.masked.shift or self.shift,
            causal_blocks=model.masked.block > 0,
            causal_context=model.masked.causal_context,
            cfg_scale=self.guidance,
            sub_block=self._parts(model),
            align=self.align or model.masked.align,
            reordered=model.masked.reordered,
            mesh=mesh,
            never=_ends(model) if "never" in self.ends.split() else (),
            doubted=(*_ends(model), *_ends_of_turn(model)) if "doubted" in self.ends.split() else (),
            warped=model.masked.warped,
        )
        return decoder, params

    def _parts(self, model):
        if self.sub_block is not None:
            return self.sub_block
        usual = model.masked.usual_sub_block
        return usual if self.block_length is None or usual == 0 or self.block_length % usual == 0 else 0


def usual_unmask(model: Any) -> str:
    """The line of a diffusion model's policy if the user names none: its folder's, or its published sampler's threshold."""
    if model.canvas:
        return DEFAULT_SAMPLER
    if model.masked.reordered:
        return model.masked.unmask or WINDOW_UNMASK[model.masked.shift]
    threshold = published_threshold(getattr(model.lm, "config", None), model.masked)
    usual = f"{DEFAULT_UNMASK}:threshold={threshold}" if threshold else DEFAULT_UNMASK
    usual = "levenshtein" if model.masked.delete_id >= 0 else usual
    return model.masked.unmask or usual


def _policy(model, unmask, mesh):
    """A policy for a model, and its additional parameters by name."""
    unmask = make_unmask(unmask) if isinstance(unmask, str) else unmask
    if isinstance(unmask, Stored):
        unmask, own = unmask.load(model, mesh)
        unmask = unmask, dict.fromkeys(unmask.needs, own)
    policy, besides = unmask if isinstance(unmask, tuple) and len(unmask) == 2 else (unmask, {})
    if not isinstance(policy, Unmask) or not isinstance(besides, dict):
        raise ValueError(
            "unmask must be a line of text, a policy, or a pair of a policy and a dict of the parameters it needs"
        )
    if missing := [name for name in policy.needs if name not in besides]:
        raise ValueError(
            f"{type(policy).__name__} needs parameters of its own: give unmask=(policy, {{{missing[0]!r}: params}}), or a line "
            "that names a folder"
        )
    return policy.for_model(model.masked), besides


def _ends_of_turn(model):
    """The id of `<|eot_id|>`, if the model has that token and does not end texts with it; without a tokenizer, LLaDA's."""
    eot = LLADA_EOT if model.masked.mask_id == LLADA_MASK else None
    if model.tokenizer is not None:
        eot = model.tokenizer.get_vocab().get("<|eot_id|>", eot)
    return () if eot is None or eot in model.eos_ids else (eot,)


def _ends(model):
    if not model.eos_ids:
        raise ValueError(f"{model.name} names no end of text: leave ends out")
    return tuple(model.eos_ids)
