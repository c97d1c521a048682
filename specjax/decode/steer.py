"""Settings that steer a model's distribution by making another target: guidance, contrastive decoding, DoLa and SCMoE."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from specjax.about import About, Named, abouts
from specjax.assembly.models_beside import check_vocabulary, companion
from specjax.assembly.registry import entry_of, parse
from specjax.models.contrastive import Contrastive, SelfContrastive
from specjax.models.dola import Dola, layers_of
from specjax.models.guided import Guided, GuidedBy
from specjax.warpers.lists import tokens

PyTree = Any


class Steer(abc.ABC):
    """Settings that make a target from a model. Implementations are frozen dataclasses."""

    about: ClassVar[Named] = None
    """Its names in a line of text."""

    @abc.abstractmethod
    def target(self, model: Any, mesh: Any) -> tuple[Any, PyTree]:
        """The LM and its parameters.

        Args:
          model: from `specjax.load`.
          mesh: where parameters lie.

        Raises:
          ValueError: one line that says what cannot be used, and what can.
        """


@dataclasses.dataclass(frozen=True)
class Guidance(Steer):
    """Classifier-free guidance of text, as in `transformers`: a second pass per step.

    Log-probabilities of new tokens are then of the guided distribution, those of prompts of the model's own.

    Attributes:
      scale: transformers' `guidance_scale`; 1 is off.
      negative_prompt: a text or token ids to steer away from; None for a prompt's last token.
      model: another model of the same vocabulary, which reads the text without the prompt: a folder, a shipped name or a
        hub id; None: the model itself.
      away: with another model, its weight: the distribution is then `own ** scale / other ** away`, divided by its sum;
        -1: `scale - 1`, as without another model.

    Raises:
      ValueError: for a negative prompt without guidance, a weight without another model, or a negative one but -1.
    """

    about = About(
        "guidance", "away from what follows without the prompt, or after another", "arXiv:2306.17806, arXiv:2307.16686",
        "own text", fields=("scale", "negative_prompt", "model", "away"),
    )  # fmt: skip

    scale: float = 1.5
    negative_prompt: "str | Sequence[int] | None" = None
    model: str | None = None
    away: float = -1.0

    def __post_init__(self):
        if self.away != -1 and not self.away >= 0:
            raise ValueError(f"away of guidance must be at least 0, or -1 for scale - 1, got {self.away!r}")
        if self.away != -1 and self.model is None:
            raise ValueError("away is the weight of another model: name it with model=MODEL, or set scale alone")
        if self.off and self.negative_prompt is not None:
            raise ValueError("negative_prompt is what guidance leads away from: set scale (1 is off), or leave it out")

    @property
    def off(self) -> bool:
        """Whether it changes nothing."""
        return self.scale == 1 and self.away in (-1, 0)

    def target(self, model, mesh):
        if self.off:
            return model.lm, model.params
        if self.model is not None:
            guide, away = beside(self.model, model, mesh, "guide"), None if self.away == -1 else self.away
            lm = GuidedBy(model.lm, self.scale, _ids(model, self.negative_prompt), guide.lm, away)
            return lm, {"lm": model.params, "guide": guide.params}
        return Guided(model.lm, self.scale, _ids(model, self.negative_prompt)), model.params


@dataclasses.dataclass(frozen=True)
class Contrast(Steer):
    """Contrastive decoding: steers away from what a weaker model also predicts.

    Attributes:
      amateur: the weaker model, of the same vocabulary: a folder, a shipped name or a hub id.
      alpha: the share of the likeliest token's probability that a token needs.
      beta: how much of the amateur's prediction is subtracted.
    """

    about = About(
        "contrastive", "away from what a weaker model says as well", "arXiv:2210.15097, arXiv:2309.09117", "own text",
        fields=("amateur", "alpha", "beta"),
    )  # fmt: skip

    amateur: str | None = None
    alpha: float = 0.1
    beta: float = 0.5

    def target(self, model, mesh):
        if self.amateur is None:
            raise ValueError("contrastive decoding needs an amateur, a weaker model: name it with amateur=MODEL")
        amateur = beside(self.amateur, model, mesh, "amateur")
        lm = Contrastive(model.lm, amateur.lm, self.alpha, self.beta)
        return lm, {"lm": model.params, "amateur": amateur.params}


@dataclasses.dataclass(frozen=True)
class LayerContrast(Steer):
    """DoLa: steers away from the prediction of an early layer.

    Attributes:
      layers: transformers' `dola_layers`: "low", "high" or counts of layers.
    """

    about = About(
        "dola", "away from what the model's own early layers say", "arXiv:2309.03883", "own text", fields=("layers",)
    )

    layers: "str | Sequence[int]" = "low"

    def target(self, model, mesh):
        asked = self.layers.split() if isinstance(self.layers, str) and self.layers[:1].isdigit() else self.layers
        return Dola(model.lm, layers_of(asked, model.lm)), model.params


@dataclasses.dataclass(frozen=True)
class ExpertContrast(Steer):
    """SCMoE: contrastive decoding of a mixture of experts with itself, where tokens take an expert that was not chosen.

    The second pass reads the same text with the same weights, and only the expert of one rank. Experts that every token
    uses stay in it.

    Attributes:
      rank: the weak pass' expert, counted from 1, the best; the authors' example has 3, for a model of two experts per token.
      alpha: as in `Contrast`.
      beta: as in `Contrast`.
    """

    about = About(
        "scmoe", "away from what an expert says that was not chosen", "arXiv:2405.14507", "own text",
        fields=("rank", "alpha", "beta"),
    )  # fmt: skip

    rank: int = 3
    alpha: float = 0.1
    beta: float = 0.5

    def target(self, model, mesh):
        from specjax.models.routing import routed  # flax is slow to import

        weak = routed(model.lm, self.rank, 1, "scmoe")
        return SelfContrastive(model.lm, weak, self.alpha, self.beta), model.params


STEERS = {
    about.name: entry_of(kind, about)
    for kind in (Guidance, Contrast, LayerContrast, ExpertContrast)
    for about in abouts(kind)
}


def steered(model: Any, steer: "str | Steer | None", mesh: Any) -> tuple[Any, PyTree]:
    """The target of a model and its parameters, steered if that is asked for.

    Raises:
      ValueError: one line that says what cannot be used, and what can.
    """
    if steer is None:
        return model.lm, model.params
    made = parse("steer", STEERS, steer) if isinstance(steer, str) else steer
    if not isinstance(made, Steer):
        raise ValueError(f"steer is one of {', '.join(STEERS)} as an object or a line, not {steer!r:.60}")
    return made.target(model, mesh)


def beside(name: str, model: Any, mesh: Any, what: str) -> Any:
    """A second model of the same vocabulary, whose distributions a target reads; `what` is its part.

    Raises:
      ValueError: on a mesh, for a model that is not autoregressive, and for other tokens.
    """
    if mesh is not None:
        raise ValueError(f"a model and its {what} lie on one device: leave the mesh out, or the {what}")
    found = companion(name, model, None)
    if found.masked is not None:
        raise ValueError(f"the {what} {found.name!r} is {found.kind}: pick an autoregressive one")
    check_vocabulary(found, model, what=what)
    return found


def _ids(model, prompt):
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
