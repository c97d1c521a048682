"""Text in, text out: `generate` for notebooks, and the engine under it and under the command line."""

import dataclasses
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decoder as decoding
from specjax.draft import Drafter
from specjax.registry import build_drafter, make_verifier
from specjax.request import Record, Request
from specjax.sampling import Sampling, row_keys
from specjax.sharding import make_mesh, shardings
from specjax.speculative import prefill_width, speculative
from specjax.state import Finish
from specjax.text import encode_text, find_stop, new_text
from specjax.verify import Verifier

DEFAULT_MODEL = "pycode"
DEFAULT_DRAFTER = "prompt_lookup"
STEPS_PER_CALL = 8
REASONS = {Finish.EOS: "eos", Finish.LENGTH: "length", Finish.STOP: "stop", Finish.ERROR: "error"}

OnText = Callable[[int, str], None]


@dataclasses.dataclass
class Timing:
    """What an engine has spent: decoding steps only, compilation and prefill apart."""

    decode_seconds: float = 0.0
    prefill_seconds: float = 0.0
    compile_seconds: float = 0.0
    new_tokens: int = 0
    steps: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.decode_seconds if self.decode_seconds else 0.0


class Engine:
    """A model with a drafter and a verifier, ready to complete requests.

    Args:
      model: what `specjax.models.load` returned, a folder, a shipped name or hub id, or None for the shipped target.
      drafter: a registry line such as `"prompt_lookup:length=8"`, a drafter, or a pair of drafter and its parameters.
      verifier: a registry line or a verifier.
      dtype: of the parameters; None is float32 on a CPU and bfloat16 elsewhere.
      mesh: a mesh, or a line such as `"data=2,model=4"`.
      logprobs: whether records carry log-probabilities.

    Raises:
      ValueError: one line that says what cannot be used, and what can.
    """

    def __init__(
        self,
        model: Any = None,
        drafter: str | Drafter | tuple[Drafter, Any] = DEFAULT_DRAFTER,
        verifier: str | Verifier = "coupled",
        *,
        dtype: Any = None,
        mesh: Any = None,
        logprobs: bool = False,
    ):
        from specjax import models

        self.mesh = make_mesh(mesh)
        if isinstance(verifier, str):
            verifier = make_verifier(verifier)
        if not isinstance(model, models.Model):
            model = models.load(DEFAULT_MODEL if model is None else model, dtype=dtype, mesh=self.mesh)
        elif dtype is not None and models.resolve_dtype(dtype) != model.dtype:
            kind = models.resolve_dtype(dtype)
            model = dataclasses.replace(model, params=jax.tree.map(lambda x: x.astype(kind), model.params), dtype=kind)
        if self.mesh is not None:
            axes = shardings(self.mesh, model.lm.axes(model.params), model.params, model.lm.axis_counts())
            model = dataclasses.replace(model, params=jax.device_put(model.params, axes))
        self.model = model
        drafter, draft_params = build_drafter(drafter or "none", model, mesh=self.mesh)
        self.decoder = speculative(model.lm, drafter, verifier, logprobs=logprobs, mesh=self.mesh)
        self.params = {"target": model.params, "draft": draft_params}
        self.timing = Timing()

    @property
    def max_length(self) -> int:
        """The longest text, prompt and output, that the model was made for."""
        return self.model.lm.config.max_position_embeddings

    def encode(self, prompt: str | Sequence[Any]) -> tuple[int, ...]:
        """A prompt's token ids, special tokens added as the tokenizer does.

        Args:
          prompt: text, token ids, or chat messages (`{"role": ..., "content": ...}`) for the tokenizer's chat template.

        Raises:
          ValueError: on an empty prompt, ids outside the vocabulary, text without a tokenizer, messages without a chat
            template, or a prompt that leaves no room for a token.
        """
        if not isinstance(prompt, (str, list, tuple, np.ndarray)):
            raise ValueError(f"a prompt is a string, a list of token ids or a list of chat messages, not {prompt!r}")
        if isinstance(prompt, str) or (len(prompt) and isinstance(prompt[0], dict)):
            if self.model.tokenizer is None:
                raise ValueError(f"{self.model.name} has no tokenizer: give prompts as lists of token ids")
            ids = encode_text(self.model.tokenizer, prompt, self.model.name)
        else:
            try:
                ids = [operator.index(i) for i in prompt]
            except TypeError as error:
                raise ValueError("a prompt is a string, a list of token ids or a list of chat messages") from error
        if not ids:
            raise ValueError("the prompt is empty: give at least one token")
        vocab = self.model.lm.vocab_size
        outside = [i for i in ids if not 0 <= i < vocab]
        if outside:
            raise ValueError(f"prompt id {outside[0]} is outside the vocabulary of {vocab} tokens")
        if len(ids) >= self.max_length:
            raise ValueError(
                f"the prompt has {len(ids)} tokens, which is more than {self.model.name} has room for: its capacity is "
                f"{self.max_length} positions, prompt and output together; shorten the prompt"
            )
        return tuple(ids)

    def request(self, prompt: str | Sequence[Any], **options: Any) -> Request:
        """A checked request; options are the fields of `Request`.

        Raises:
          ValueError: on an unusable prompt or option.
        """
        check_options(options)
        return Request(prompt, self.encode(prompt), **options)

    def capacity(self, requests: Sequence[Request]) -> int:
        """Text buffer slots that hold the longest of these requests, rounded up so that few sizes compile."""
        longest = max(min(len(r.ids) + r.max_new_tokens, self.max_length) for r in requests)
        return -(-(longest + self.decoder.slack) // 128) * 128

    def check_stop(self, stop: Sequence[str]) -> None:
        """Raises ValueError on stop strings without a tokenizer, or empty ones."""
        if stop and self.model.tokenizer is None:
            raise ValueError(f"{self.model.name} has no tokenizer, so stop strings cannot be found in its output")
        if "" in stop:
            raise ValueError("a stop string must not be empty")

    def run(
        self,
        requests: Sequence[Request],
        *,
        batch_size: int = 8,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        on_text: OnText | None = None,
        capacity: int | None = None,
    ) -> Iterator[Record]:
        """Completes requests in order, `batch_size` rows at a time.

        A record's text depends on the model, its prompt (or id), its options and its seed, not on the batch.

        Args:
          requests: what to complete.
          batch_size: rows decoded together.
          stop: strings that end a text; they are left out of it.
          ignore_eos: whether to go on after EOS.
          on_text: called with a request's index and new text, every few steps.
          capacity: at least `self.capacity(requests)`; equal capacities share one compiled program.

        Raises:
          ValueError: see `check_stop`.
        """
        self.check_stop(stop)
        capacity = capacity or (self.capacity(requests) if requests else 0)
        return self._groups(requests, batch_size, tuple(stop), ignore_eos, on_text, capacity)

    def _groups(self, requests, batch_size, stop, ignore_eos, on_text, capacity) -> Iterator[Record]:
        if not requests:
            return
        keys = row_keys([r.seed for r in requests], [r.id if r.id is not None else r.ids for r in requests])
        batch = min(batch_size, len(requests))
        if self.mesh is not None:
            batch = -(-batch // self.mesh.shape["data"]) * self.mesh.shape["data"]
        eos = () if ignore_eos else self.model.eos_ids
        for start in range(0, len(requests), batch):
            group = list(requests[start : start + batch])
            state = self._fill(group, keys[start : start + batch], batch, capacity, eos)
            yield from self._decode(group, state, start, stop, eos, on_text)

    def _fill(self, group, keys, batch, capacity, eos):
        """A state that holds the group; records of one prefill width go in together."""
        began = time.perf_counter()
        dtype = jax.tree.leaves(self.model.params)[0].dtype
        state = decoding.empty(self.decoder, self.params, batch, capacity, dtype, max(len(eos), 1))
        widths = [prefill_width(len(r.ids)) for r in group]
        for width in sorted(set(widths)):
            chosen = [i for i, w in enumerate(widths) if w == width]
            size = max(len(group[i].ids) - 1 for i in chosen)
            size = 1 + -(-size // width) * width
            # one compiled shape a width: unused places repeat the first prompt and are dropped
            places = chosen + [batch] * (batch - len(chosen))
            requests = [group[i] for i in chosen] + [group[chosen[0]]] * (batch - len(chosen))
            prompts = np.zeros((batch, size), np.int32)
            for row, request in enumerate(requests):
                prompts[row, : len(request.ids)] = request.ids
            lengths = np.asarray([len(r.ids) for r in requests], np.int32)
            limit = [min(len(r.ids) + r.max_new_tokens, self.max_length) for r in requests]
            state = decoding.insert(
                self.decoder,
                self.params,
                state,
                jnp.asarray(places),
                jnp.asarray(prompts),
                jnp.asarray(lengths),
                keys[jnp.asarray([i if i < batch else chosen[0] for i in places])],
                limit=jnp.asarray(limit, jnp.int32),
                sampling=_sampling(requests),
                eos=jnp.broadcast_to(jnp.asarray(eos or (-1,), jnp.int32)[None], (batch, max(len(eos), 1))),
                width=width,
            )
        jax.block_until_ready(state)
        self.timing.prefill_seconds += time.perf_counter() - began
        return state

    def _decode(self, group, state, start, stop, eos, on_text) -> Iterator[Record]:
        began = time.perf_counter()
        state = decoding.run(self.decoder, self.params, state, 0)  # compiles: the timing sees only decoding
        jax.block_until_ready(state)
        compiled = time.perf_counter()
        self.timing.compile_seconds += compiled - began
        if stop or on_text:
            state = self._watch(group, state, start, stop, on_text)
        else:
            state = decoding.run(self.decoder, self.params, state)
        host = jax.device_get(dataclasses.replace(state, cache=None, draft=None, key=None))
        self.timing.decode_seconds += time.perf_counter() - compiled
        self.finished(group, state)
        for row, request in enumerate(group):
            record = self._record(request, host, row, stop)
            self.timing.new_tokens += record.new_tokens
            self.timing.steps += record.steps
            yield record

    def finished(self, group: Sequence[Request], state: Any) -> None:
        """Called with every group of requests and their final state, whose first rows are theirs; does nothing here."""

    def _watch(self, group, state, start, stop, on_text):
        """Decodes a few steps a call, finding stop strings and handing out text as it comes."""
        tokens: list[list[int]] = [[] for _ in group]
        shown = [0] * len(group)
        stream = decoding.stream(self.decoder, self.params, state, STEPS_PER_CALL)
        progress = next(stream, None)
        while progress is not None:
            state = progress.state
            stopped = np.zeros(len(progress.finish), bool)
            for row, request in enumerate(group):
                tokens[row] += progress.tokens[row]
                text = new_text(self.model.tokenizer, request.ids, tokens[row])
                running = progress.finish[row] == Finish.RUNNING
                cut = find_stop(text, stop)
                stopped[row] = running and cut is not None
                if on_text and text is not None:
                    # a stop string may be half written, and so may a character
                    held = max((len(s) for s in stop), default=1) - 1 if running and cut is None else 0
                    end = len(text) - held if cut is None else cut
                    if running and cut is None:
                        end = min(end, len(text.rstrip("\ufffd")))
                    if end > shown[row]:
                        on_text(start + row, text[shown[row] : end])
                        shown[row] = end
            if stopped.any():
                finish = jnp.where(jnp.asarray(stopped), int(Finish.STOP), state.finish)
                state = dataclasses.replace(state, finish=finish)
                progress = _advance(stream, state)
            else:
                progress = next(stream, None)
        return state

    def _record(self, request: Request, host: Any, row: int, stop: Sequence[str]) -> Record:
        begin, end = int(host.prompt_length[row]), int(host.length[row])
        tokens = host.tokens[row, begin:end].tolist()
        reason = REASONS[Finish(int(host.finish[row]))]
        text = new_text(self.model.tokenizer, request.ids, tokens)
        cut = find_stop(text, stop)
        if cut is not None:
            reason = "stop"
            # the tokens end where the stop string is complete, however far the last call went on
            count = next(
                n for n in range(1, len(tokens) + 1)
                if find_stop(new_text(self.model.tokenizer, request.ids, tokens[:n]), stop) is not None
            )  # fmt: skip
            tokens = tokens[:count]
            text = new_text(self.model.tokenizer, request.ids, tokens) or ""
            text = text[: find_stop(text, stop)]
        steps = int(host.stats.steps[row])
        error = None
        if reason == "error":
            error = f"the model's logits were not finite (NaN or infinite) after {len(tokens)} new tokens"
        probs = host.logprobs
        span = slice(begin, begin + len(tokens))
        return Record(
            prompt=request.prompt,
            text=text,
            tokens=tokens,
            finish_reason=reason,
            new_tokens=len(tokens),
            steps=steps,
            tokens_per_step=round((end - begin) / steps, 4) if steps else 0.0,
            id=request.id,
            line=request.line,
            logprobs=None if probs is None else probs.raw[row, span].tolist(),
            warped_logprobs=None if probs is None else probs.warped[row, span].tolist(),
            accepted=host.stats.accepted[row].tolist(),
            error=error,
        )


def _sampling(requests: Sequence[Request]) -> Sampling:
    return Sampling.make(len(requests), **{n: [getattr(r, n) for r in requests] for n in _SAMPLING})


_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def check_options(options: dict[str, Any]) -> None:
    """Checks the options of a request.

    Raises:
      ValueError: naming the option that is out of range, and its range.
    """
    count, seed = options.get("max_new_tokens", 1), options.get("seed", 0)
    if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 1:
        raise ValueError(f"max_new_tokens must be an integer >= 1, got {count!r}")
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise ValueError(f"seed must be an integer, got {seed!r}")
    chosen = {name: options[name] for name in _SAMPLING if name in options}
    for name, value in chosen.items():  # before they are rounded to 32 bits
        large = 2**31 if name == "top_k" else 1e38
        if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not abs(value) < large:
            raise ValueError(f"{name} must be a finite number below {large:g}, got {value!r:.40}")
    Sampling.make(1, **chosen)


def _advance(stream, state):
    try:
        return stream.send(state)
    except StopIteration:
        return None


def generate(
    model: Any = None,
    prompts: str | Sequence[Any] = (),
    *,
    drafter: str | Drafter | tuple[Drafter, Any] = DEFAULT_DRAFTER,
    verifier: str | Verifier = "coupled",
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    num_return_sequences: int = 1,
    stop: str | Sequence[str] = (),
    ignore_eos: bool = False,
    batch_size: int = 8,
    logprobs: bool = False,
    dtype: Any = None,
    mesh: Any = None,
) -> list[Record]:
    """Completes prompts and returns a record for each, in order.

    With the default verifier the same seed gives the same text, whatever the drafter, the batch or the mesh.

    Args:
      model: what `specjax.models.load` returned, a folder, a shipped name or hub id, or None for the shipped target.
      prompts: a string, a list of strings, or lists of token ids.
      drafter: a registry line such as `"prompt_lookup:length=8"`, a drafter, or a pair of drafter and its parameters.
      verifier: a registry line or a verifier.
      max_new_tokens: at least 1.
      temperature: 0 is greedy.
      top_k: 0 is off.
      top_p: 1 is off.
      min_p: 0 is off.
      repetition_penalty: 1 is off.
      seed: with the prompt it decides the noise.
      num_return_sequences: independent completions of each prompt, one after the other.
      stop: strings that end a text; they are left out of it.
      ignore_eos: whether to go on after EOS.
      batch_size: rows decoded together; changes speed, never text.
      logprobs: whether records carry log-probabilities of their tokens, raw and after warping.
      dtype: of the parameters; None is float32 on a CPU and bfloat16 elsewhere.
      mesh: a mesh, or a line such as `"data=2,model=4"`.

    Raises:
      ValueError: one line that says what cannot be used, before any work is done.

    >>> import specjax
    >>> record = specjax.generate(None, "def add(a, b):", max_new_tokens=4)[0]
    >>> record.new_tokens, record.finish_reason
    (4, 'length')
    """
    if num_return_sequences < 1 or batch_size < 1:
        raise ValueError(
            f"num_return_sequences and batch_size must be at least 1, got {num_return_sequences}, {batch_size}"
        )
    engine = Engine(model, drafter, verifier, dtype=dtype, mesh=mesh, logprobs=logprobs)
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], (int, np.integer, dict))):
        prompts = [prompts]
    options = dict(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty, seed=seed,
    )  # fmt: skip
    requests = [engine.request(p, **options) for p in prompts for _ in range(num_return_sequences)]
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    return list(engine.run(requests, batch_size=batch_size, stop=stop, ignore_eos=ignore_eos))
