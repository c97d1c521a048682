"""The base of methods that go step by step: prompts, steps, results, and rows that stop at a step's end.

In the shape descriptions `B` denotes rows, `W` tokens that are read together, `V` the vocabulary.
"""

import abc
import dataclasses
import functools
import logging
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import numpy as np

from specjax.about import abouts
from specjax.decoder import Decode
from specjax.lm import check_both_encode, encodes
from specjax.models.generation import defaults, left_out
from specjax.models.text import encoded
from specjax.pretty import short
from specjax.sampling import row_keys
from specjax.sampling_params import FIELDS, SamplingArrays, SamplingOptions, worded
from specjax.warpers import WARPERS

PyTree = Any
_LOG = logging.getLogger(__name__)


class Stepwise(Decode):
    """A method that reads each finished step of a text and then continues it, in several ways or with another model.

    Called with a model and prompts, it returns `Written` texts. It decides on the host: `bind` returns the method
    itself, ready for its model, in place of a decoder.
    """

    num_texts: ClassVar[int] = 1
    fills_in: ClassVar[bool] = False
    slack: ClassVar[int] = 0
    usual: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """The sampling options of the method's authors, used if no temperature is given."""

    @property
    def draws(self) -> int:
        """The number of keys per prompt, the same as for that many completions."""
        return 1

    def published(self, sampling: Mapping[str, Any]) -> dict[str, Any]:
        """The user's options on top of `usual`, which is left out if a temperature is given."""
        return dict(sampling) if "temperature" in sampling else {**self.usual, **sampling}

    def bind(self, model: Any, *, mesh: Any = None, rows: int = 1, logprobs: bool = False) -> tuple["Stepwise", PyTree]:
        """See `Decode.bind`."""
        check_alone(self, model, mesh, logprobs)
        return self, {"target": model.params}

    @abc.abstractmethod
    def __call__(
        self,
        model: Any,
        prompts: Sequence[Any],
        *,
        max_new_tokens: int,
        seed: int,
        batch_size: int,
        keys: np.ndarray | None = None,
        **sampling: Any,
    ) -> "list[Written]":
        """Writes a text after every prompt, in order.

        Args:
          model: from `specjax.load`.
          prompts: a list of texts, lists of token ids or lists of chat messages.
          max_new_tokens: the most new tokens for each.
          seed: determines the noise, together with a prompt.
          batch_size: prompts side by side.
          keys: see `Asked.of`.
          **sampling: as in `specjax.Sampling`.
        """


@dataclasses.dataclass(frozen=True)
class PairSettings(Decode):
    """A way to decode with two models.

    Attributes:
      small: the small model, of the same vocabulary: a result of `specjax.load`, or its argument.
    """

    small: Any = None

    def partner_of(self, model: Any, mesh: Any = None, logprobs: bool = False) -> Any:
        """The small model, loaded in the same way as the large one.

        Raises:
          ValueError: if none is named; also see `check_pair` and `check_alone`.
        """
        from specjax import models

        if self.small is None:
            raise ValueError(f"{_name(self)} needs two models: name the small one with small=MODEL")
        check_alone(self, model, mesh, logprobs)
        small = models.Model(*self.small) if isinstance(self.small, tuple) else self.small
        if not isinstance(small, models.Model):
            small = (models.abstract if model.abstract else models.load)(small, model.dtype, mesh)
        check_pair([model, small])
        return small


class StepwisePair(PairSettings, Stepwise):
    """A stepwise method with two models."""

    def bind(
        self, model: Any, *, mesh: Any = None, rows: int = 1, logprobs: bool = False
    ) -> tuple["StepwisePair", PyTree]:
        """See `Decode.bind`."""
        return dataclasses.replace(self, small=self.partner_of(model, mesh, logprobs)), {"target": model.params}


def check_alone(method: Decode, model: Any, mesh: Any, logprobs: bool) -> None:
    """Raises ValueError for what a step-by-step method does not support: a mesh, log-probabilities, a diffusion model."""
    check_pair([model])
    if encodes(model.lm) and isinstance(method, Stepwise):
        raise ValueError(
            f"{_name(method)} goes back in one text, and {model.name} reads a source beside it: decode otherwise"
        )
    if mesh is not None and isinstance(method, Stepwise):
        raise ValueError(f"{_name(method)} goes step by step on one device: leave the mesh out, or decode otherwise")
    if logprobs:
        raise ValueError(
            f"records of {_name(method)} carry no log-probabilities: leave logprobs out, or decode otherwise"
        )


def _name(method: Decode) -> str:
    return next((about.name for about in abouts(type(method))), type(method).__name__)


@dataclasses.dataclass(frozen=True)
class Step:
    """A part of a text that was written in one go.

    Attributes:
      tokens: its ids.
      text: the same as text; None without a tokenizer.
      by: its writer, "large" or "small"; with a single model, "large".
      score: its value to the method, or None.
    """

    tokens: tuple[int, ...]
    text: str | None
    by: str = "large"
    score: float | None = None


@dataclasses.dataclass(frozen=True, repr=False)
class Written:
    """The text that a step-by-step method wrote after a prompt.

    Attributes:
      prompt: as given.
      text: the new text; None without a tokenizer.
      tokens: the new ids, EOS included.
      finish_reason: eos; length; stop, if the method finds that it is done; budget, if it may go no further; error, if
        logits were not finite.
      passes: the large model's passes over rows of this prompt, discarded ones included: one per token, and one per
        block of tokens that is read. Passes that read the prompt do not count.
      small_passes: the same for the small model, if there is one.
      steps: the steps of the text.
      score: the method's value of the whole text, or None.
      error: what went wrong if `finish_reason` is error and it was not the logits.
    """

    prompt: Any
    text: str | None
    tokens: list[int]
    finish_reason: str
    passes: int
    small_passes: int = 0
    steps: tuple[Step, ...] = ()
    score: float | None = None
    error: str | None = None

    def __repr__(self) -> str:
        shown = self.text if self.text is not None else self.tokens
        about = f"{self.finish_reason}, {len(self.tokens)} tokens, {self.passes} passes"
        return f"Written({short(self.prompt, 40)} -> {short(shown, 40)}, {about})"


@dataclasses.dataclass(frozen=True)
class Asked:
    """Checked prompts, and how to continue them.

    Attributes:
      prompts: as given.
      ids: their token ids.
      keys: `[N, 2]` uint32, key data of their rows, the same as in `specjax.generate` at this seed. For a method that
        draws D times `[N, D, 2]`, the keys of D completions.
      max_new_tokens: the most new tokens for each.
      sampling: options of all of them.
    """

    prompts: tuple[Any, ...]
    ids: tuple[tuple[int, ...], ...]
    keys: np.ndarray
    max_new_tokens: int
    sampling: dict[str, Any]

    @classmethod
    def of(
        cls,
        models: Sequence[Any],
        prompts: Any,
        max_new_tokens: int,
        seed: int,
        sampling: dict[str, Any],
        keys: np.ndarray | None = None,
        draws: int = 1,
    ) -> "Asked":
        """Checks a user's prompts and options.

        Args:
          models: all that write, `specjax.models.Model`; all use the first one's tokenizer.
          prompts: a list of texts, lists of token ids or lists of chat messages.
          max_new_tokens: at least 1.
          seed: determines the noise, together with a prompt.
          sampling: options of `specjax.sampling_params.SamplingOptions`; the others come from the first model's
            `generation_config.json`.
          keys: see `Asked`; for a part of a longer list, that part of the list's keys. None: from the seed.
          draws: D.

        Raises:
          ValueError: for diffusion models, models with different vocabularies, anything that is not a prompt, or a
            prompt that leaves no room.
        """
        check_pair(models)
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise ValueError(f"prompts are a list of texts, of lists of token ids or of chats, not {prompts!r:.60}")
        for name, value, least in (("max_new_tokens", max_new_tokens, 1), ("seed", seed, -math.inf)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
                raise ValueError(f"{name} must be a whole number{' from 1 on' if least == 1 else ''}, got {value!r}")
        if unknown := sampling.keys() - FIELDS.keys():
            raise ValueError(f"there is no option {min(unknown)!r}: see `specjax samplers`")
        ids, smallest = [], min(models, key=lambda model: model.max_length)
        for number, prompt in enumerate(prompts):
            try:
                ids.append(encoded(models[0], prompt))
                encoded(smallest, ids[-1])
            except ValueError as error:
                raise ValueError(f"prompt {number}: {error}") from error
        ids, sampling = tuple(ids), defaults(models[0]) | sampling
        if line := left_out(models[0], {*sampling, "max_new_tokens"}, bool(sampling.get("temperature"))):
            _LOG.warning(line)
        sampling = sampling | worded(SamplingOptions(**sampling), models[0].tokenizer)
        keys = keys_of_prompts([seed] * len(ids), ids, draws) if keys is None else keys
        asked = cls(tuple(prompts), ids, keys, int(max_new_tokens), sampling)
        state = [each for each in WARPERS if each.carries or each.walks]
        kept = [each.switches[0] for each in state if sampling.keys() & vars(each).keys()]
        if kept:
            raise ValueError(
                f"texts that are continued in several ways do not keep what {kept[0]} reads: leave {kept[0]} out"
            )
        return asked

    def sampling_of(self, rows: int) -> SamplingArrays:
        """The options for so many rows.

        Raises:
          ValueError: for an option that is out of range.
        """
        listed = {name for name in self.sampling if "shape" in FIELDS[name].metadata}
        options = {name: [value] * rows if name in listed else value for name, value in self.sampling.items()}
        return SamplingArrays.make(rows, **options)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.ids))

    def parts(self, size: int) -> "list[Asked]":
        """So many prompts at a time.

        Raises:
          ValueError: for fewer than one.
        """
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
            raise ValueError(f"batch_size must be a whole number from 1 on, got {size!r}")
        cuts = (slice(at, at + size) for at in range(0, len(self.ids), size))
        return [
            dataclasses.replace(self, prompts=self.prompts[cut], ids=self.ids[cut], keys=self.keys[cut]) for cut in cuts
        ]


def keys_of_prompts(seeds: Sequence[int], names: Sequence[Any], draws: int) -> np.ndarray:
    """Key data of prompts on the host, see `Asked.keys`; equal prompts are told apart by their order.

    Args:
      seeds: of each.
      names: of each, see `specjax.sampling.row_keys`.
      draws: D.
    """
    if not names:
        return np.zeros((0, 2), np.uint32)
    each = lambda own: [one for one in own for _ in range(draws)]
    keys = jax.device_get(jax.random.key_data(row_keys(each(seeds), each(names))))
    return keys if draws == 1 else keys.reshape(len(names), draws, 2)


def check_pair(models: Sequence[Any]) -> None:
    """Raises ValueError for diffusion models, and for models that do not write the same tokens."""
    first = models[0]
    for model in models:
        if model.masked or model.canvas:
            raise ValueError(f"{model.name} is {model.kind}, which does not write from left to right: take another")
        words = [getattr(own.tokenizer, "get_vocab", dict)() for own in (first, model)]
        if model.lm.vocab_size != first.lm.vocab_size or (all(words) and words[0] != words[1]):
            raise ValueError(f"{model.name} and {first.name} have different vocabularies: choose two that share one")
        check_both_encode(model.lm, first.lm, model.name)


def partner(model: Any, small: Any) -> Any:
    """The small model with the large one's ends of text and tokenizer, so that it can write at the large one's text."""
    return dataclasses.replace(small, tokenizer=model.tokenizer, eos_ids=model.eos_ids)


def words_of(model: Any, text: str) -> tuple[int, ...]:
    """Ids of a text in the middle of another one, without special tokens.

    Raises:
      ValueError: if there is no tokenizer.
    """
    if model.tokenizer is None:
        raise ValueError(f"{model.name} has no tokenizer to read a text with: choose another model")
    return tuple(model.tokenizer.encode(text, add_special_tokens=False))


def step_ends(model: Any, separator: str | Sequence[int]) -> tuple[int, ...]:
    """Tokens that end a step.

    Args:
      model: its tokenizer tells which tokens these are.
      separator: a text that such a token contains, or the ids themselves.

    Raises:
      ValueError: if no token contains it, there is no tokenizer, or ids are outside the vocabulary.
    """
    vocab = model.lm.vocab_size
    if not isinstance(separator, str):
        ids = tuple(int(token) for token in separator)
        if not ids or not all(0 <= token < vocab for token in ids):
            raise ValueError(f"a separator is a text or ids below {vocab}, at least one, got {separator!r}")
        return ids
    if model.tokenizer is None:
        raise ValueError(f"{model.name} has no tokenizer: give the separator as token ids")
    found = _holders(model.tokenizer, vocab, separator) if separator else ()
    if not found:
        raise ValueError(
            f"no token of {model.name} holds {separator!r}: choose a separator that is a token's, or part of one"
        )
    return found


@functools.lru_cache(maxsize=16)
def _holders(tokenizer, vocab, text):
    return tuple(token for token in range(vocab) if text in tokenizer.decode([token]))
