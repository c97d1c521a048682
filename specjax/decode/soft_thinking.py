"""Soft thinking as a way to decode: settings of `specjax.soft`."""

import dataclasses
from typing import Any

import jax

from specjax.about import About
from specjax.assembly.registry import make_mixer
from specjax.decode.steer import Steer, steered
from specjax.decoder import Decode
from specjax.sampling import Processor
from specjax.soft import Mixer, SoftThinkingDecoder, soft_thinking

PyTree = Any
THINK = "</think>"
"""The token that ends thinking by default, in vocabularies that have it."""


@dataclasses.dataclass(frozen=True)
class SoftThinking(Decode):
    """A row thinks in mixtures of tokens, and is then decoded plainly.

    In a line, a mixer's own name implies this way: `gumbel:n=8,tau=0.5,end_of_think=</think>`.

    Attributes:
      mixer: a line or a `specjax.soft.Mixer`.
      end_of_think: the token that ends thinking, an id or a text; None for `</think>`, if the vocabulary has it.
      steer: see `specjax.decode.Speculate`.
      processors: see `specjax.decode.Speculate`.
    """

    about = About(
        "soft_thinking", "a row thinks in mixtures of tokens", "arXiv:2505.15778", "own text",
        fields=("mixer", "end_of_think", "steer"),
    )  # fmt: skip

    mixer: "str | Mixer" = "gumbel"
    end_of_think: "int | str | None" = None
    steer: "str | Steer | None" = None
    processors: tuple[Processor, ...] = ()

    def bind(
        self, model: Any, *, mesh: Any = None, rows: int = 1, logprobs: bool = False
    ) -> tuple[SoftThinkingDecoder, PyTree]:
        """See `Decode.bind`."""
        if model.masked:
            raise ValueError(f"{model.name} is {model.kind}, and soft thinking needs an autoregressive one")
        mixer = make_mixer(self.mixer) if isinstance(self.mixer, str) else self.mixer
        if not isinstance(mixer, Mixer):
            raise ValueError("the mixer of soft thinking must be a line of text or a mixer (`specjax.soft`)")
        target, target_params = steered(model, self.steer, mesh)
        decoder = soft_thinking(
            target,
            mixer,
            end_of_think=_end(model, self.end_of_think),
            logprobs=logprobs,
            mesh=mesh,
            processors=self.processors,
        )
        params = {"target": target_params, "draft": None}
        if mesh is not None and not model.abstract:
            params = jax.device_put(params, decoder.param_shardings(params))
        return decoder, params


def _end(model, asked) -> int:
    """The id of the token that ends thinking; -1 if there is none."""
    words = model.tokenizer
    if asked is None:
        return -1 if words is None else words.get_vocab().get(THINK, -1)
    if isinstance(asked, int) and not isinstance(asked, bool):
        if not 0 <= asked < model.lm.vocab_size:
            raise ValueError(f"end_of_think {asked} is outside the vocabulary of {model.lm.vocab_size} tokens")
        return asked
    if words is None or not isinstance(asked, str):
        raise ValueError("end_of_think is a token: give its id, or its text where the model has a tokenizer")
    ids = words.encode(asked, add_special_tokens=False, verbose=False)
    if len(ids) != 1:
        raise ValueError(
            f"end_of_think must be one token, and {asked!r} is {len(ids)} of {model.name}: give the id of one"
        )
    return ids[0]
