"""Texts that carry a message, and the message that a text carries (arXiv:2405.19540)."""

import abc
import dataclasses
import hashlib
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from specjax.about import About
from specjax.models.text import new_text
from specjax.search.coupling.factors import Factors
from specjax.search.coupling.rows import Text
from specjax.search.stepwise import Asked, Stepwise, Written, words_of

USUAL = MappingProxyType({"temperature": 1.0, "top_k": 50})
"""How the authors' example draws."""


class _Carried(Stepwise):
    """What sender and reader have in common."""

    usual = USUAL

    @abc.abstractmethod
    def _check_given(self) -> None:
        """Raises ValueError if a field without a default was not given."""

    def bind(self, model: Any, *, mesh: Any = None, rows: int = 1, logprobs: bool = False) -> tuple[Stepwise, Any]:
        """See `Decode.bind`."""
        self._check_given()
        return super().bind(model, mesh=mesh, rows=rows, logprobs=logprobs)

    def _asked(self, model, prompts, max_new_tokens, seed, keys, sampling) -> list[Asked]:
        """The prompts one by one.

        Raises:
          ValueError: see `Asked.of`; also for a temperature of 0, at which nothing is drawn, and for a field that is not
            given.
        """
        self._check_given()
        asked = Asked.of([model], prompts, max_new_tokens, seed, self.published(sampling), keys)
        if not asked.sampling.get("temperature"):
            raise ValueError("what a text carries is in its draws, and greedy texts have none: set a temperature")
        return asked.parts(1)


@dataclasses.dataclass(frozen=True)
class HideMessage(_Carried):
    """Writes a text that carries a message, and has the distribution of plain texts.

    The message's bytes are masked by bytes of the secret and the prompt, so to all who do not know the secret they are
    evenly distributed. Each token is drawn from a coupling of little entropy between the model's distribution and the byte
    of which the text so far tells least. So over all masks the text has exactly the distribution that plain decoding draws
    from with these options, and what it tells about the message is as much as a greedy coupling gives.

    A text that ends too early carries only a part. Then, or if its words are other tokens when they are read, the record is
    an error; it holds the text and the ids all the same. `score` is the log-probability of the message for a reader of the
    text.

    Attributes:
      message: what the text carries, in UTF-8.
      secret: known to sender and reader alone; for one message after each prompt. Empty: the message is not masked, and
        should be evenly distributed itself.
      size: how many bytes are carried; None: as many as the message has. A shorter message ends with zeros, which the reader
        takes off.

    Raises:
      ValueError: for a message longer than `size`; when bound or called, for none.
    """

    about = About(
        "hide_message", "a text that carries a message, of plain decoding's distribution", "arXiv:2405.19540",
        "own text", fields=("message", "secret", "size"),
    )  # fmt: skip

    message: str = ""
    secret: str = ""
    size: int | None = None

    def __post_init__(self):
        if not isinstance(self.message, str):
            raise ValueError(f"message must be a text, got {self.message!r:.60}")
        _check_size(self.size)
        _check_secret(self.secret)
        if self.message.endswith("\0"):
            raise ValueError("a message cannot end with a NUL character, which a reader takes off: leave it out")
        own = len(self.message.encode())
        if self.size is not None and own > self.size:
            raise ValueError(f"the message has {own} bytes, and size is {self.size}: raise size or shorten the message")

    def _check_given(self):
        if not self.message:
            raise ValueError("hide_message carries a message, and there is none: give message=TEXT")

    def __call__(
        self,
        model: Any,
        prompts: Sequence[Any],
        *,
        max_new_tokens: int = 128,
        seed: int = 0,
        batch_size: int = 8,
        keys: np.ndarray | None = None,
        **sampling: Any,
    ) -> list[Written]:
        """A text that carries the message, for every prompt in order.

        Args:
          model: from `specjax.load`.
          prompts: a list of texts, lists of token ids or chats.
          max_new_tokens: the most new tokens for each.
          seed: determines the draws, together with a prompt.
          batch_size: of no effect; prompts are written one by one, so that a reader's numbers are the same.
          keys: see `Asked.of`.
          **sampling: as in `specjax.generate`; without a temperature, 1.0 and a `top_k` of 50.

        Raises:
          ValueError: see `Asked.of`; for a temperature of 0.
        """
        return [
            self._written(model, asked) for asked in self._asked(model, prompts, max_new_tokens, seed, keys, sampling)
        ]

    def _written(self, model: Any, asked: Asked) -> Written:
        said = self.message.encode()
        said = said.ljust(len(said) if self.size is None else self.size, b"\0")
        (ids,), rng = asked.ids, np.random.default_rng(asked.keys[0])
        values = [own ^ mask for own, mask in zip(said, _mask(self.secret, ids, len(said)), strict=True)]
        beliefs = known = Factors([256] * len(said))
        draw = lambda tokens, weights: rng.choice(len(weights), p=weights)
        text, reason = Text(model, asked), "length"
        while len(text.tokens) < text.room:
            if (dist := text.next()) is None:
                reason = "error"
                break
            known = beliefs.copy()
            token = beliefs.step(*dist, draw, values)
            assert token is not None  # a draw finds one
            text.tokens.append(token)
            if token in model.eos_ids:
                reason, beliefs = "eos", known  # a reader does not see the end
                break
        tokens, words = text.tokens, new_text(model.tokenizer, ids, text.tokens)
        found = Written(asked.prompts[0], words, tokens, reason, len(tokens), score=beliefs.log_prob(values))
        error = self._unread(model, found, beliefs.likeliest != values, ids)
        return (
            found
            if reason == "error" or error is None
            else dataclasses.replace(found, finish_reason="error", error=error)
        )

    def _unread(self, model, found, lost, ids):
        """Why a reader does not find the message in a text; None if he does."""
        if lost:
            return (
                f"the text ends after {len(found.tokens)} tokens, before it carries the whole message: allow more new "
                "tokens, take another seed, or raise the temperature"
            )
        own = found.tokens[:-1] if found.finish_reason == "eos" else found.tokens
        if found.text is not None and list(_ids_of(model, found.prompt, ids, found.text)) != own:
            return "the text's words are other tokens when they are read: pass on its ids, or take another seed"
        return None


@dataclasses.dataclass(frozen=True)
class ReadMessage(_Carried):
    """Reads the message that a text carries, see `HideMessage`.

    Model, prompt, secret, size, sampling options, type and kind of device must be those with which the text was written;
    seed and batch do not matter. The record's text is the message, and `score` its log-probability given the text.

    Attributes:
      text: what was written after the prompt, without the end of text; or its token ids.
      size: how many bytes it carries.
      secret: as it was written.

    Raises:
      ValueError: for fewer than one byte; when bound or called, without a text or a size.
    """

    about = About(
        "read_message", "the message that a text carries which `hide_message` wrote", "arXiv:2405.19540",
        "own text", fields=("text", "size", "secret"),
    )  # fmt: skip

    text: str | tuple[int, ...] = ""
    size: int | None = None
    secret: str = ""

    def __post_init__(self):
        if not isinstance(self.text, (str, tuple, list)):
            raise ValueError(f"text must be a text or its token ids, got {self.text!r:.60}")
        if not isinstance(self.text, str) and any(not isinstance(token, (int, np.integer)) for token in self.text):
            raise ValueError(f"the token ids of a text are whole numbers, got {self.text!r:.60}")
        _check_size(self.size)
        _check_secret(self.secret)
        if isinstance(self.text, list):
            object.__setattr__(self, "text", tuple(self.text))

    def _check_given(self):
        if not self.text or self.size is None:
            raise ValueError("read_message needs the text and how many bytes it carries: give text=TEXT and size=BYTES")

    def __call__(
        self,
        model: Any,
        prompts: Sequence[Any],
        *,
        max_new_tokens: int = 128,
        seed: int = 0,
        batch_size: int = 8,
        keys: np.ndarray | None = None,
        **sampling: Any,
    ) -> list[Written]:
        """The message that the text carries after each prompt, in order.

        Args:
          model: from `specjax.load`.
          prompts: a list of texts, lists of token ids or chats, usually one.
          max_new_tokens: as the text was written.
          seed: of no effect.
          batch_size: of no effect.
          keys: of no effect.
          **sampling: as the text was written.

        Raises:
          ValueError: see `Asked.of`; for a temperature of 0; for ids outside the vocabulary, or a text for a model
            without a tokenizer.
        """
        return [self._read(model, asked) for asked in self._asked(model, prompts, max_new_tokens, seed, keys, sampling)]

    def _read(self, model: Any, asked: Asked) -> Written:
        (prompt,), (ids,) = asked.prompts, asked.ids
        tokens = _ids_of(model, prompt, ids, self.text) if isinstance(self.text, str) else self.text
        if outside := [token for token in tokens if not 0 <= token < model.lm.vocab_size]:
            raise ValueError(f"the text holds the id {outside[0]}, outside the {model.lm.vocab_size} of {model.name}")
        beliefs, text = Factors([256] * (self.size or 0)), Text(model, asked)
        failed = lambda error: Written(prompt, None, [], "error", len(text.tokens), error=error)
        if len(tokens) > text.room:
            return failed(f"the text has {len(tokens)} tokens, and max_new_tokens leaves {text.room}: raise it")
        for token in tokens:
            if (dist := text.next()) is None:
                return failed(None)
            if beliefs.step(*dist, _only(token)) is None:
                return failed(
                    f"token {len(text.tokens) + 1} of the text is impossible here: read it with the model, the prompt and "
                    "the sampling options that wrote it"
                )
            text.tokens.append(token)
        values = beliefs.likeliest
        said = bytes(own ^ mask for own, mask in zip(values, _mask(self.secret, ids, len(values)), strict=True)).rstrip(
            b"\0"
        )
        try:
            words = said.decode()
        except UnicodeDecodeError:
            return failed(
                "what the text carries is no message: secret, size, prompt, model or sampling options are others, or the "
                "text does not carry the whole message"
            )
        return Written(prompt, words, [], "stop", len(tokens), score=beliefs.log_prob(values))


def _only(token: int):
    """Chooses this token."""

    def choose(tokens, weights):
        at = int(np.searchsorted(tokens, token))
        return at if at < len(tokens) and tokens[at] == token else None

    return choose


def _ids_of(model: Any, prompt: Any, ids: Sequence[int], text: str) -> tuple[int, ...]:
    """The tokens of a text after a prompt: those of both together, where these begin with the prompt's."""
    if isinstance(prompt, str):
        whole = tuple(model.tokenizer.encode(prompt + text, verbose=False))
        if whole[: len(ids)] == tuple(ids):
            return whole[len(ids) :]
    return words_of(model, text)


def _mask(secret: str, prompt: Sequence[int], size: int) -> bytes:
    """The bytes that a message after this prompt is masked with."""
    if not secret:
        return bytes(size)
    return hashlib.shake_256(secret.encode() + b"\0" + np.asarray(prompt, "<i4").tobytes()).digest(size)


def _check_secret(secret: Any) -> None:
    if not isinstance(secret, str):
        raise ValueError(f"secret must be a text, got {secret!r:.60}")


def _check_size(size: Any) -> None:
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ValueError(f"size must be a whole number of bytes from 1 on, got {size!r}")
