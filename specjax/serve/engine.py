"""A model and how to decode with it: the engine of `generate` and of the command line."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from specjax import programs
from specjax.about import abouts
from specjax.constrain import Vocabulary
from specjax.decode import Decode, Diffusion, Plain, SoftThinking, Speculate
from specjax.decode.lines import decode_of, usual_decode
from specjax.decoder import Needs
from specjax.draft import Drafter
from specjax.lm import encodes
from specjax.models.generation import defaults, left_out
from specjax.models.paired import Paired
from specjax.models.text import Chat, check_starts, encoded, source_of
from specjax.models.token_ids import one, shown
from specjax.names import check_keywords, named
from specjax.prompts import identity
from specjax.sampling import row_keys
from specjax.sampling_params import check_walked, form_of, in_use, listed_ids, made, worded
from specjax.search import Search, Selection, Stepwise
from specjax.search.stepwise import keys_of_prompts
from specjax.serve.call import Call
from specjax.serve.gaps import filled_in, gaps_of
from specjax.serve.prefix_cache import TWICE, PrefixCache, check_shares
from specjax.serve.prefix_cache import Reader as PrefixReader
from specjax.serve.prompt_logprobs import with_prompt_logprobs
from specjax.serve.race import Race
from specjax.serve.request import Record, Request, common_beginning, needed_by, needs_of, rows_of
from specjax.serve.sampling import Sampling, check_options, check_stop
from specjax.serve.slots import Loop, Served, Slots, Timing, Turn, in_order
from specjax.serve.stepwise import stepwise_options, stepwise_turns
from specjax.serve.stream import TextStream
from specjax.serve.text_reader import Reader, power_of_two
from specjax.serve.watch import OnText, Watch
from specjax.sharding import distributed, make_mesh
from specjax.warpers import WARPERS

_OF_REQUESTS = [field.name for field in dataclasses.fields(Request) if field.name not in ("prompt", "ids", "source")]
SHORTEST_PREFIX = 16  # tokens: a shorter prefix is at most one chunk of prefill, and not worth a separate one


class Engine:
    """A model and how to decode with it, loaded once and ready to complete requests.

    Args:
      model: what `specjax.load` returned, or an argument for it; None is the shipped target.
      decode: a way to decode (`specjax.decode`) or its line, such as `"beam:num_beams=4"`; None: with a drafter, or by
        the policy of a diffusion model.
      drafter: an alternative to `decode`: a drafter's line such as `"eagle3:verifier=typical"`, a drafter, or a pair of
        a drafter and its parameters; None: the default one (`specjax.decode.speculate.usual_drafter`).
      dtype: the type of the parameters; see `specjax.load`.
      mesh: a mesh, or a line such as `"data=2,model=4"`.
      logprobs: whether records carry log-probabilities of their tokens.
      rows: how many texts are decoded together, which decides the default drafter.
      prefix_cache: keeps what was read of prompts for later ones that begin equally: a
        `specjax.serve.prefix_cache.PrefixCache`, or its size, such as `"256MB"`.

    Raises:
      ValueError: one line that says what cannot be used, and what can.
    """

    @named
    def __init__(
        self,
        model: Any = None,
        decode: str | Decode | None = None,
        *,
        drafter: str | Drafter | tuple[Drafter, Any] | None = None,
        dtype: Any = None,
        mesh: Any = None,
        logprobs: bool = False,
        rows: int = 1,
        prefix_cache: Any = None,
    ):
        from specjax import models

        programs.keep()
        asked = decode_of(decode, drafter)
        self.mesh = make_mesh(mesh)
        if self.mesh is not None and jax.process_count() > 1:
            distributed.meet(self.mesh)  # before one process compiles for longer than the others wait
        model = models.load(model, dtype, self.mesh)
        if self.mesh is not None:
            lm, params = models.spread(model.lm, model.params, self.mesh)
            model = dataclasses.replace(model, lm=lm, params=params)
        check_starts(model)
        self.decode = usual_decode(model) if asked is None else asked
        self.model = self.decode.mode(model)
        self.decoder, self.params = self.decode.bind(model, mesh=self.mesh, rows=rows, logprobs=logprobs)
        self.timing = Timing()
        self.prefix_cache = PrefixCache.of_engine(prefix_cache, self)

    def __repr__(self) -> str:
        own = self.decoder
        drafts = isinstance(self.decode, (Speculate, Plain))
        how = own.drafter if drafts else own.policy if isinstance(self.decode, Diffusion) else own
        return f"Engine({self.model.name!r}, {type(how).__name__}, {self.model.dtype_name})"

    @property
    def _how(self) -> str:
        """What an error calls the way to decode."""
        if isinstance(self.decode, (Speculate, Plain)):
            return f"the {next(about.name for about in abouts(type(self.decoder.verifier)))} verifier"
        return self.decoder.called if self.searches else type(self.decode).__name__

    @property
    def encodes(self) -> bool:
        """Whether the model has an encoder, which reads the prompts; texts then begin with `Model.starts`."""
        return encodes(self.model.lm)

    @property
    def writes_steps(self) -> bool:
        """Whether it decodes by a method that runs step by step on the host."""
        return isinstance(self.decoder, Stepwise)

    @property
    def searches(self) -> bool:
        """Whether it searches for texts instead of sampling them."""
        return isinstance(self.decoder, Search)

    @property
    def thinks(self) -> bool:
        """Whether its rows use soft thinking."""
        return isinstance(self.decode, SoftThinking)

    @property
    def drafter(self) -> str:
        """The registry name of its drafter, `none` for plain decoding; for autoregressive models."""
        drafter = self.decoder.drafter
        return next((about.name for about in abouts(type(drafter))), type(drafter).__name__)

    @property
    def max_length(self) -> int:
        """The length of the longest text, prompt and output, that the model was made for."""
        return self.model.max_length

    def encode(self, prompt: str | Sequence[Any], what: str = "prompt") -> tuple[int, ...]:
        """A prompt's token ids; see `specjax.models.text.encoded`."""
        return encoded(self.model, prompt, what)

    def filled(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a prompt, filled with the model's defaults."""
        return defaults(self.model) | {name: value for name, value in options.items() if value is not None}

    def left_out(self, options: Mapping[str, Any], requests: Sequence[Any]) -> str | None:
        """A line naming the settings of the model's `generation_config.json` that are not applied; None if there are
        none.

        Args:
          options: the prompts' options, as the user gave them.
          requests: the requests made with them.
        """
        chosen = {name for name, value in options.items() if value is not None}
        if self.searches:
            own = {
                field.name
                for field in dataclasses.fields(cast(Any, self.decode))
                if getattr(self.decode, field.name) != field.default
            }
            chosen |= own | {"num_beams"}
        chosen |= {"guidance_scale", "dola_layers"} if getattr(self.decode, "steer", None) is not None else set()
        sampled = all(request.temperature for request in requests if isinstance(request, Request))
        return left_out(self.model, chosen, sampled)

    def request(
        self, prompt: str | Sequence[Any], *, suffix: Any = None, chat: bool | Chat = False, **options: Any
    ) -> Request:
        """A checked request.

        Args:
          prompt: see `encode`.
          suffix: the text after the new text: a string or token ids. Diffusion and any-subset models fill in between.
          chat: how messages are written; see `specjax.models.text.Chat`.
          **options: fields of `Request`; one that is None or absent takes the value of the model's
            `generation_config.json`.

        Raises:
          ValueError: on an unusable prompt, suffix or option.
        """
        check_keywords("Engine.request", options, ["suffix", "chat", *_OF_REQUESTS])
        check_options(options)
        if self.writes_steps:
            options = stepwise_options(self.decoder, options, chat)
        prompt, how = one(prompt), chat if isinstance(chat, Chat) else None
        gaps = gaps_of(self.model, prompt, how, suffix, options)
        options = self.filled(options) | gaps
        vocab = self.model.lm.vocab_size
        for name, ids in listed_ids(options).items():
            if outside := [token for token in ids if token >= vocab]:
                raise ValueError(f"{name} holds the token {outside[0]}, outside the vocabulary of {vocab} tokens")
        options["stop"] = self.check_stop(options.get("stop", ()))
        request = Request(shown(prompt), **({} if gaps else self._read(prompt, how)), **options)
        request = dataclasses.replace(request, **worded(request, self.model.tokenizer))
        request = filled_in(self, request, suffix) if self.model.masked else self._causal_request(request, suffix)
        return dataclasses.replace(request, **self._made(request))

    def _causal_request(self, request: Request, suffix: Any) -> Request:
        if self.searches and self.decoder.draws and not request.temperature:
            raise ValueError(f"{self.decoder.called} draws its texts: set a temperature, or decode otherwise")
        if self.thinks and not request.temperature:
            raise ValueError(
                "soft thinking mixes the tokens of a distribution, and a greedy row's is one token: set a temperature, or "
                "decode otherwise"
            )
        drawn = [each for each in WARPERS if not each.of_logits and in_use(each, request)]
        if self.searches and not self.decoder.draws and drawn:
            name = drawn[0].switches[0]
            raise ValueError(f"{self.decoder.called} draws no token: leave {name} out, or decode otherwise")
        if choosing := [each for each in WARPERS if each.chooses and in_use(each, request)]:
            name = choosing[0].switches[0]
            if self.searches:
                raise ValueError(
                    f"{name} chooses the token itself: leave it out, or decode otherwise than by {self.decoder.called}"
                )
            if request.temperature:
                raise ValueError(f"{name} chooses the token itself: leave the temperature at 0, or leave {name} out")
        if suffix is not None:
            raise ValueError(f"{self.model.name} is an autoregressive model, which cannot fill in before a suffix")
        return request

    def _made(self, request: Request) -> dict[str, Any]:
        """The options of a request that the model's vocabulary makes tables of."""
        aligns = self.searches and self.decoder.aligns
        check_walked(request, self._how, not self.writes_steps and self.decoder.obeys, aligns)
        room = min(request.max_new_tokens, self.max_length - len(request.ids))
        own = dataclasses.replace(self.vocabulary, eos=()) if request.ignore_eos else self.vocabulary
        return made(request, own, room)

    @property
    def vocabulary(self) -> Vocabulary:
        """What a constraint must know of the model."""
        own, never = self.model, getattr(self.decoder, "never", ())
        eos = tuple(token for token in own.eos_ids if token not in never)
        meshed, gaps = self.mesh is not None, own.masked is not None
        return Vocabulary(own.tokenizer, own.lm.vocab_size, eos, own.name, meshed, gaps)

    def _read(self, prompt: Any, chat: Chat | None) -> dict[str, Any]:
        """The beginning of a request's text, and its source."""
        if not self.encodes:
            return {"ids": encoded(self.model, prompt, chat=chat)}
        return {"ids": self.model.starts, "source": source_of(self.model, prompt, chat)}

    def served(self) -> Served:
        """The part of this engine that `specjax.serve.slots` needs."""
        eos = self.model.eos_ids
        mask_id = None if self.model.masked is None else self.model.masked.mask_id
        reader = None if self.prefix_cache is None else PrefixReader(self.prefix_cache, self.timing)
        return Served(self.decoder, self.params, self.max_length, self.model.tokenizer, eos, mask_id, self.mesh, reader)

    def capacity(self, requests: Sequence[Request]) -> int:
        """The text buffer slots for the longest of these requests: one of a few sizes, see `Decoder.buffer`."""
        return 0 if self.writes_steps else self.decoder.buffer(self._needed(requests))

    def _needed(self, requests: Sequence[Request]) -> int:
        return max(needed_by(request, self.max_length, self.decoder.slack) for request in requests)

    def shared_prefix(self, requests: Sequence[Request]) -> tuple[int, ...]:
        """The ids with which all these prompts begin; empty if they are too few to be worth a separate prefill.

        Raises:
          ValueError: with a prefix cache, and for models that `specjax.serve.prefix_cache.check_shares` refuses.
        """
        check_shares(self, "shared prefix")
        if self.prefix_cache is not None:
            raise ValueError(TWICE)
        prefix = common_beginning(requests)
        return prefix if len(requests) > 1 and len(prefix) >= SHORTEST_PREFIX else ()

    def reader(self) -> Reader:
        """The reader that computes log-probabilities of texts with this model.

        Raises:
          ValueError: for a diffusion model.
        """
        params, target = self.params["target"], getattr(self.decoder, "target", None)
        return Reader(self.model, target.own(params) if isinstance(target, Paired) else params, self.mesh)

    def prompt_reader(self) -> Reader:
        """The reader for log-probabilities of prompts.

        Raises:
          ValueError: for a diffusion model, and for a model with an encoder.
        """
        if self.encodes:
            raise ValueError(
                f"{self.model.name} has an encoder, which gives prompts no log-probabilities: leave them out"
            )
        return self.reader()

    def check_stop(self, stop: Sequence[str]) -> tuple[str, ...]:
        """The stop strings of a prompt.

        Raises:
          ValueError: if they are invalid, without a tokenizer, and for a search or a stepwise method.
        """
        if not stop:
            return ()
        check_stop(stop)
        if self.searches or self.writes_steps:
            called = self.decoder.called if self.searches else type(self.decoder).__name__
            raise ValueError(
                f"{called} has texts that end by themselves: leave the stop strings out, or decode otherwise"
            )
        if self.model.tokenizer is None:
            raise ValueError(f"{self.model.name} has no tokenizer, so stop strings cannot be found in its output")
        return (stop,) if isinstance(stop, str) else tuple(stop)

    @named
    def run(
        self,
        requests: Sequence[Request],
        *,
        batch_size: int = 8,
        on_text: OnText | None = None,
        capacity: int | None = None,
        shared_prefix: bool = False,
        prompt_logprobs: bool = False,
    ) -> Iterator[Record]:
        """Completes requests and yields their records in order. A row whose request ended takes the next one at once.

        A record's text depends on the model, its prompt (or id), its options and its seed, but not on the batch.

        Args:
          requests: the requests to complete.
          batch_size: rows decoded together.
          on_text: called every few steps with a request's index and its new text.
          capacity: at least `self.capacity(requests)`; equal capacities share one compiled program.
          shared_prefix: whether to prefill the common beginning of all prompts once; see `shared_prefix`.
          prompt_logprobs: whether records carry log-probabilities of their prompts, which are then read once more.

        Raises:
          ValueError: see `shared_prefix` and `reader`; on a capacity that is too small for a request.
        """
        slots = self.slots(requests, batch_size)
        prefix = self.shared_prefix(requests) if shared_prefix else ()
        return in_order(
            self.turns(
                requests,
                slots=slots,
                on_text=on_text,
                capacity=capacity,
                prefix=prefix,
                prompt_logprobs=prompt_logprobs,
            )
        )

    @named
    def turns(
        self,
        requests: Sequence[Request],
        *,
        slots: int = 8,
        on_text: OnText | None = None,
        capacity: int | None = None,
        keys: np.ndarray | None = None,
        prefix: Sequence[int] = (),
        prompt_logprobs: bool = False,
        needs: Needs | None = None,
        race: bool = False,
    ) -> Iterator[Turn]:
        """Yields the result of every call on the device, with records as they finish.

        Args:
          requests: see `run`.
          slots: rows of the batch, whatever the number of requests.
          on_text: see `run`.
          capacity: see `run`.
          keys: `self.keys` of these requests. For a part of a longer list, that part of the list's keys, so that equal
            prompts differ as in the whole list.
          prefix: ids with which every prompt begins, to prefill once: `self.shared_prefix` of these requests or of the
            longer list.
          prompt_logprobs: see `run`.
          needs: `specjax.serve.request.needs_of` these requests or the longer list; None: the needs of a long job.
          race: whether only the shortest of the adjacent completions of a prompt is wanted; the others then stop at its
            length.

        Raises:
          ValueError: see `reader`; on fewer than one row, on a capacity that is too small for a request, or on a prompt
            that does not begin with the prefix.
        """
        if prefix and any(request.ids[: len(prefix)] != tuple(prefix) for request in requests):
            raise ValueError(f"a prompt does not begin with the shared prefix of {len(prefix)} tokens")
        if not requests:
            return iter(())
        if slots < 1:
            raise ValueError(f"at least one row must decode, got {slots}")
        if not self.writes_steps and capacity is not None and capacity < self._needed(requests):
            raise ValueError(
                f"a capacity of {capacity} does not hold these requests: the longest one needs {self._needed(requests)} slots, "
                f"{self.decoder.slack} of them for tokens that a step writes ahead: give at least that, or leave capacity out"
            )
        reader = self.prompt_reader() if prompt_logprobs else None
        if self.writes_steps:
            if prompt_logprobs:
                raise ValueError(f"{type(self.decoder).__name__} keeps no log-probabilities: leave prompt_logprobs out")
            keys = self.keys(requests) if keys is None else keys
            return stepwise_turns(self.decoder, self.model, requests, keys, self.timing, slots=slots, on_text=on_text)
        needs = dataclasses.replace(needs_of(requests), brief=False) if needs is None else needs
        loop = Loop(
            Slots(self.served(), slots, capacity or self.capacity(requests), needs.form),
            requests,
            self.keys(requests) if keys is None else keys,
            needs,
            timing=self.timing,
            prefix=prefix,
            watch=Watch.of(self.model.tokenizer, requests, on_text),
            race=Race(requests) if race else None,
            on_end=self._ended,
        )
        turns = loop.turns()
        return turns if reader is None else with_prompt_logprobs(turns, reader, requests, slots)

    def stream(
        self, prompt: Any, *, sampling: Sampling | None = None, chat: bool | Chat = False, **options: Any
    ) -> TextStream:
        """Completes one prompt, and yields its text in pieces as it comes.

        The text equals that of `generate` with the same options; a piece comes every few steps. No piece ends within a
        character or within a possible stop string. A search or a stepwise method yields its text at the end, as one
        piece.

        Args:
          prompt: a prompt as for `generate`.
          sampling: see `generate`.
          chat: see `generate`.
          **options: options of `specjax.Sampling`; they take precedence over `sampling`.

        Raises:
          ValueError: as for `generate`, and without a tokenizer; before any work is done.

        >>> from specjax.serve.engine import Engine
        >>> stream = Engine().stream("Repeat the list. [ hen, dog, deer, olive, mouse, mango ]", chat=True)
        >>> "".join(stream) == stream.record.text
        True
        """
        if self.model.tokenizer is None:
            raise ValueError(
                f"{self.model.name} has no tokenizer, so there is no text to stream: specjax.generate has ids"
            )
        call = Call.of(prompt, sampling=sampling, chat=chat, options=options)
        if len(call.prompts) != 1:
            raise ValueError(f"stream completes one prompt, and these are {len(call.prompts)}: generate takes several")
        requests = call.requests(self)
        pieces: list[str] = []
        on_text = lambda _, text: pieces.append(text)
        turns = self.turns(requests, slots=1, on_text=on_text, needs=needs_of(requests))
        return TextStream(turns, pieces)

    @named
    def generate(
        self,
        prompts: Any,
        *,
        sampling: Sampling | Sequence[Sampling] | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        constraint: Any = None,
        num_return_sequences: int = 1,
        select: str | Selection | None = None,
        chat: bool | Chat = False,
        prompt_logprobs: bool = False,
        batch_size: int = 8,
        progress: bool | None = None,
    ) -> list[Record]:
        """Completes prompts and returns a record for each, in order; see `specjax.generate`.

        With `prompt_logprobs`, records also carry log-probabilities of their prompts' tokens.
        """
        options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
        options |= {"max_new_tokens": max_new_tokens, "stop": stop, "constraint": constraint}
        how = {"num_return_sequences": num_return_sequences, "select": select, "chat": chat}
        call = Call.of(prompts, sampling=sampling, options=options, **how)
        return call.records(self, batch_size=batch_size, prompt_logprobs=prompt_logprobs, progress=progress)

    def score(self, prompts: Any, continuations: Any, *, batch_size: int = 8, samples: int | None = None) -> list[Any]:
        """Log-probabilities of continuations of prompts; see `specjax.score`."""
        from specjax.serve.scorers import score_with

        return score_with(self, prompts, continuations, batch_size, samples)

    def update(self, params: Any) -> None:
        """Replaces the model's parameters, for example during training; compiled programs are kept.

        Args:
          params: like `engine.model.params`, with the same shapes and types.

        Raises:
          ValueError: if shapes or types differ, or if matrices of the model or of a second model are not plain.
        """
        own = self.params["target"]
        shapes = lambda tree: jax.tree.map(lambda x: (x.shape, jnp.dtype(x.dtype).name), tree)
        if isinstance(getattr(self.decoder, "target", None), Paired) or jax.tree.structure(
            params
        ) != jax.tree.structure(own):
            raise ValueError("these parameters have not the structure of those that this engine decodes with")
        if wrong := [
            a
            for a, b in zip(*(jax.tree.leaves(shapes(each), is_leaf=_is_shape) for each in (params, own)), strict=True)
            if a != b
        ]:
            raise ValueError(
                f"a parameter of shape and type {wrong[0]} has another place: give those of {self.model.name}"
            )
        places = jax.tree.map(lambda x: x.sharding, own)
        params = jax.device_put(params, places)
        self.model = dataclasses.replace(self.model, params=params)
        self.params = {**self.params, "target": params}

    def check_completions(self, count: int) -> None:
        """Raises ValueError if a search has fewer texts per prompt than requested."""
        if self.searches and count > self.decoder.num_texts:
            raise ValueError(
                f"num_return_sequences is {count}, and {self.decoder.called} keeps only {self.decoder.num_texts} texts: let it "
                "keep more, or lower num_return_sequences"
            )

    def rows(self, requests: Sequence[Request]) -> int:
        """The number of rows for these requests: one each, or in a search one for all completions of a prompt."""
        return len(rows_of(requests, self.decoder.num_texts))

    def slots(self, requests: Sequence[Request], batch_size: int) -> int:
        """The rows of a batch for these requests: `batch_size`, or for fewer requests 1, 4, 8, 16 and so on.

        A program is compiled for each number of rows, which takes as long as thousands of steps. Spare rows stay empty.
        """
        count = self.rows(requests)
        return min(batch_size, 1 if count == 1 else max(4, power_of_two(count)))

    def start(self, requests: Sequence[Request]) -> Any:
        """A state with these requests, one per row, for programs that make the steps themselves."""
        slots = Slots(self.served(), len(requests), self.capacity(requests), form_of(requests))
        return slots.insert(slots.empty(), range(len(requests)), list(requests), self.keys(requests))

    def keys(self, requests: Sequence[Request]) -> np.ndarray:
        """Key data `[R, 2]` of the requests' row keys, on the host.

        Equal requests get different keys by their order. A stepwise method that draws D times has `[R, D, 2]`."""
        given, spare = self.served().given, power_of_two(max(len(requests), 8)) - len(requests)
        names = (identity(given(r), r.source) if r.id is None else str(r.id) for r in requests)
        if self.writes_steps:
            return keys_of_prompts([r.seed for r in requests], list(names), self.decoder.draws)
        padded = itertools.chain(names, itertools.repeat((), spare))  # to a few sizes
        keys = row_keys([*[r.seed for r in requests], *[0] * spare], padded)
        return jax.device_get(jax.random.key_data(keys))[: len(requests)]

    def finished(self, rows: Sequence[int], state: Any) -> None:
        """Called with the rows of `state` whose requests have just ended; may replace `params`. Does nothing here."""

    def _ended(self, rows: Sequence[int], state: Any) -> Any:
        self.finished(rows, state)
        return self.params


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple)
