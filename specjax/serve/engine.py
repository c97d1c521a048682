"""Text in, text out: `generate` for notebooks, and the engine under it and under the command line."""

import dataclasses
import logging
import os.path
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specjax import programs
from specjax.about import abouts
from specjax.assembly.assemble import Plan, assemble
from specjax.assembly.companions import DEFAULT_MODEL
from specjax.decoder import Needs
from specjax.draft import Drafter
from specjax.models.generation import defaults, left_out
from specjax.models.paired import Paired
from specjax.models.text import check_unicode, encoded
from specjax.models.token_ids import one
from specjax.names import check_keywords, named
from specjax.sampling import row_keys
from specjax.sampling_params import FIELDS, form_of, in_use, is_set, listed_ids, worded
from specjax.search import Search
from specjax.serve.options import (
    DecodeOptions,
    PromptOptions,
    RunOptions,
    check_least,
    check_options,
    take,
    with_keywords,
)
from specjax.serve.prompt_logprobs import with_prompt_logprobs
from specjax.serve.prompts import read_prompts
from specjax.serve.race import Race
from specjax.serve.record_bar import Speed, bar_fits, in_notebook, record_bar
from specjax.serve.request import Record, Request, needs_of, rows_of, several
from specjax.serve.selecting import Chooser, selected
from specjax.serve.slots import Loop, Served, Slots, Timing, Turn, in_order
from specjax.serve.stream import TextStream
from specjax.serve.text import user_turn
from specjax.serve.text_reader import Reader, power_of_two
from specjax.serve.watch import OnText, Watch
from specjax.sharding import distributed, make_mesh
from specjax.soft import SoftThinking
from specjax.verify import Verifier
from specjax.warpers import WARPERS

_LOG = logging.getLogger(__name__)
_OF_REQUESTS = [field.name for field in dataclasses.fields(Request) if field.name not in ("prompt", "ids")]
SHORTEST_PREFIX = 16  # tokens: a shorter prefix is a chunk or less of prefill, and not worth its own


@with_keywords("plan", Plan)
class Engine:
    """A model and how to decode with it, ready to complete requests.

    Drafter, verifier and log-probabilities are for autoregressive models; unmask and cache policy and the block length for
    diffusion models. What is None takes its default (`specjax.assembly.assemble`).

    Args:
      model: what `specjax.models.load` returned, a folder, a shipped name or hub id, or None for the shipped target; a model of
        your own as a `specjax.models.Model`, or as a pair of an LM (`specjax.lm.BaseLM`) and its parameters.
      **plan:
      dtype: of the parameters; None is float32 on a CPU and bfloat16 elsewhere; see `specjax.models.load` for "layercast".
      mesh: a mesh, or a line such as `"data=2,model=4"`.
      adapter: the folder of a PEFT LoRA adapter, or its hub id, for a model that is loaded; see `specjax.models.load`.
      longest: how many positions a model that is loaded is used for; see `specjax.models.load`.
      weights: a format that the model's matrices are kept in, such as "int8" or "int4:group=32"; see `specjax.models.load`.
      cache_dtype: the type of its caches, such as "int8" or "float8_e4m3fn"; see `specjax.models.load`.
      reduce_dtype: in which products are summed over a mesh, such as "bfloat16"; see `specjax.models.load`.
      rows: how many texts are decoded together, where no drafter is named: see `specjax.assembly.assemble.usual_drafter`.

    Raises:
      ValueError: one line that says what cannot be used, and what can.
    """

    def __init__(
        self,
        model: Any = None,
        drafter: str | Drafter | tuple[Drafter, Any] | None = None,
        verifier: str | Verifier | tuple[Verifier, Any] | None = None,
        *,
        dtype: Any = None,
        mesh: Any = None,
        adapter: Any = None,
        longest: int | None = None,
        weights: str | None = None,
        cache_dtype: Any = None,
        reduce_dtype: Any = None,
        rows: int = 1,
        **plan: Any,
    ):
        from specjax import models

        programs.keep()
        self.mesh = make_mesh(mesh)
        if isinstance(model, tuple):
            model = models.Model(*model)
        if self.mesh is not None and jax.process_count() > 1:
            distributed.meet(self.mesh)  # before one of them compiles for longer than the others wait
        if not isinstance(model, models.Model):
            name = DEFAULT_MODEL if model is None else model
            how: dict[str, Any] = {"adapter": adapter, "longest": longest, "weights": weights}
            how |= {"cache_dtype": cache_dtype, "reduce_dtype": reduce_dtype}
            model = models.load(name, dtype=dtype, mesh=self.mesh, **how)
        elif adapter is not None or longest is not None:
            raise ValueError(
                "adapter and longest are for a model that is loaded here: give them to specjax.models.load"
            )
        else:
            model = model if dtype is None else models.retyped(model, dtype)
            model = model if weights is None else models.quantised(model, weights)
            model = model if cache_dtype is None else models.cached(model, cache_dtype)
            model = model if reduce_dtype is None else models.reduced(model, reduce_dtype)
        if self.mesh is not None:
            lm, params = models.spread(model.lm, model.params, self.mesh)
            model = dataclasses.replace(model, lm=lm, params=params)
        self.model = model
        plan["logits_processors"] = tuple(plan["logits_processors"])
        asked = Plan(drafter=drafter, verifier=verifier, **plan)
        self._chosen = {f.name for f in dataclasses.fields(Plan) if getattr(asked, f.name) != f.default}
        self.decoder, self.params = assemble(model, asked, self.mesh, rows)
        self.timing = Timing()

    def __repr__(self) -> str:
        own = self.decoder
        how = own if self.searches or self.thinks else own.policy if self.model.masked else own.drafter
        return f"Engine({self.model.name!r}, {type(how).__name__}, {self.model.dtype_name})"

    @property
    def searches(self) -> bool:
        """Whether it searches for texts, and draws none."""
        return isinstance(self.decoder, Search)

    @property
    def thinks(self) -> bool:
        """Whether its rows think softly."""
        return isinstance(self.decoder, SoftThinking)

    @property
    def drafter(self) -> str:
        """Its drafter's name in the registry, `none` for plain decoding; of an autoregressive model."""
        drafter = self.decoder.drafter
        return next((about.name for about in abouts(type(drafter))), type(drafter).__name__)

    @property
    def max_length(self) -> int:
        """The longest text, prompt and output, that the model was made for."""
        return self.model.max_length

    def encode(self, prompt: str | Sequence[Any], what: str = "prompt") -> tuple[int, ...]:
        """A prompt's token ids, see `specjax.models.text.encoded`."""
        return encoded(self.model, prompt, what)

    def filled(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Options of a prompt with those that the model sets and the user does not."""
        return defaults(self.model) | {name: value for name, value in options.items() if value is not None}

    def left_out(self, options: Mapping[str, Any], requests: Sequence[Any]) -> str | None:
        """A line that says what the model's `generation_config.json` asks for and is not applied; None where there is nothing.

        Args:
          options: of prompts, as the user gave them.
          requests: made with these.
        """
        chosen = {name for name, value in options.items() if value is not None} | self._chosen
        sampled = all(request.temperature for request in requests if isinstance(request, Request))
        return left_out(self.model, chosen, sampled)

    def request(self, prompt: str | Sequence[Any], *, suffix: Any = None, **options: Any) -> Request:
        """A checked request; options are the fields of `Request`.

        Args:
          prompt: see `encode`.
          suffix: what follows the new text: a string or token ids. Diffusion models fill in between.
          **options: of `Request`; one that is None, or not there, is what the model's `generation_config.json` says.

        Raises:
          ValueError: on an unusable prompt, suffix or option.
        """
        check_keywords("Engine.request", options, ["suffix", *_OF_REQUESTS])
        check_options(options)
        options = self.filled(options)
        vocab = self.model.lm.vocab_size
        for name, ids in listed_ids(options).items():
            if outside := [token for token in ids if token >= vocab]:
                raise ValueError(f"{name} holds the token {outside[0]}, outside the vocabulary of {vocab} tokens")
        options["stop"] = self._own_stop(options.get("stop", ()))
        prompt = one(prompt)
        request = Request(prompt, self.encode(prompt), **options)
        request = dataclasses.replace(request, **worded(request, self.model.tokenizer))
        if self.model.masked:
            return self._masked_request(request, suffix)
        if self.searches and self.decoder.draws and not request.temperature:
            raise ValueError(
                "a stochastic beam search draws its texts: set a temperature, or leave stochastic_beams out"
            )
        if self.thinks and not request.temperature:
            raise ValueError(
                "soft thinking mixes the tokens of a law, and a greedy row's is one token: set a temperature, or leave "
                "soft_thinking out"
            )
        if (
            self.searches
            and not self.decoder.draws
            and (drawn := [each for each in WARPERS if not each.of_logits and in_use(each, request)])
        ):
            how = self.decoder
            raise ValueError(f"{how.called} draws no token: leave {drawn[0].switches[0]} out, or {how.off}")
        if choosing := [each for each in WARPERS if each.chooses and in_use(each, request)]:
            wrong = self.decoder.off if self.searches else "the temperature at 0" if request.temperature else ""
            if wrong:
                raise ValueError(f"{choosing[0].switches[0]} chooses the token itself: leave {wrong}, or it out")
        if suffix is not None:
            raise ValueError(f"{self.model.name} is an autoregressive model, which cannot fill in before a suffix")
        return request

    def _masked_request(self, request: Request, suffix: Any) -> Request:
        for warper in WARPERS:
            if (warper.of_logits or warper.reads_text) and in_use(warper, request):
                name = next(name for name in warper.switches if is_set(name, getattr(request, name)))
                usual = "leave it out" if FIELDS[name].default == () else f"leave it at {FIELDS[name].default:g}"
                raise ValueError(f"diffusion models have no {name}: {usual}")
        if suffix is None:
            end = min(len(request.ids) + request.max_new_tokens, self.max_length)
            self.decoder.check_row(np.asarray(request.ids), end)
            return request
        if not self.decoder.fills_in:
            raise ValueError(
                f"{self.model.name} with {type(self.decoder).__name__} writes from left to right: it cannot fill in before a "
                "suffix"
            )
        tokenizer = self.model.tokenizer
        if isinstance(suffix, str):
            check_unicode(suffix, "suffix")
        if isinstance(suffix, str) and tokenizer is not None:  # in the middle of a text: no special tokens
            after = self.encode(tokenizer.encode(suffix, add_special_tokens=False, verbose=False), "suffix")
        else:
            after = self.encode(suffix, "suffix")
        total = len(request.ids) + request.max_new_tokens + len(after)
        if total > self.max_length:
            raise ValueError(
                f"the suffix is too long: {len(request.ids)} tokens of prompt, {request.max_new_tokens} new ones and "
                f"{len(after)} of suffix are more than the {self.max_length} positions of {self.model.name}"
            )
        self.decoder.check_row(np.asarray(request.ids), total)
        return dataclasses.replace(request, suffix=suffix, suffix_ids=after)

    def served(self, ignore_eos: bool = False) -> Served:
        """What `specjax.serve.slots` needs of this engine."""
        eos = () if ignore_eos else self.model.eos_ids
        mask_id = None if self.model.masked is None else self.model.masked.mask_id
        return Served(self.decoder, self.params, self.max_length, self.model.tokenizer, eos, mask_id, self.mesh)

    def capacity(self, requests: Sequence[Request]) -> int:
        """Text buffer slots that hold the longest of these requests: one of few sizes, see `Decoder.buffer`."""
        return self.decoder.buffer(self._needed(requests))

    def _needed(self, requests: Sequence[Request]) -> int:
        longest = max(min(len(r.ids) + r.max_new_tokens + len(r.suffix_ids), self.max_length) for r in requests)
        return longest + self.decoder.slack

    def shared_prefix(self, requests: Sequence[Request]) -> tuple[int, ...]:
        """The ids that all these prompts begin with, where there are enough to be worth reading apart; else none.

        Raises:
          ValueError: for a diffusion model.
        """
        if self.model.masked:
            if self.model.canvas or self.model.masked.block:
                why = "only the prompts of autoregressive models can share one"
            else:
                why = "it reads a text in both directions, so what it computes for a prefix depends on what follows"
            raise ValueError(f"{self.model.name} is a diffusion model without a shared prefix: {why}; leave it off")
        prefix = tuple(os.path.commonprefix([request.ids for request in requests]))
        return prefix if len(requests) > 1 and len(prefix) >= SHORTEST_PREFIX else ()

    def reader(self) -> Reader:
        """What reads texts with this model for their log-probabilities.

        Raises:
          ValueError: for a diffusion model.
        """
        params, target = self.params["target"], getattr(self.decoder, "target", None)
        return Reader(self.model, target.own(params) if isinstance(target, Paired) else params, self.mesh)

    def _own_stop(self, stop: Any) -> tuple[str, ...]:
        stop = (stop,) if isinstance(stop, str) else stop
        if not isinstance(stop, (list, tuple)) or not all(isinstance(own, str) for own in stop):
            raise ValueError(f"stop must be a string or a list of strings, got {stop!r:.40}")
        self.check_stop(stop)
        return tuple(stop)

    def check_stop(self, stop: Sequence[str]) -> None:
        """Raises ValueError on stop strings without a tokenizer, of a search, or empty ones."""
        if stop and self.searches:
            raise ValueError(
                f"{self.decoder.called} ranks texts that end by themselves: leave the stop strings out, or {self.decoder.off}"
            )
        if stop and self.model.tokenizer is None:
            raise ValueError(f"{self.model.name} has no tokenizer, so stop strings cannot be found in its output")
        if "" in stop:
            raise ValueError("a stop string must not be empty")

    @named
    def run(
        self,
        requests: Sequence[Request],
        *,
        batch_size: int = 8,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        on_text: OnText | None = None,
        capacity: int | None = None,
        shared_prefix: bool = False,
        prompt_logprobs: bool = False,
    ) -> Iterator[Record]:
        """Completes requests and yields their records in order. A row whose request ended takes up the next one at once.

        A record's text depends on the model, its prompt (or id), its options and its seed, not on the batch.

        Args:
          requests: what to complete.
          batch_size: rows decoded together.
          stop: strings that end a text; they are left out of it.
          ignore_eos: whether to go on after EOS.
          on_text: called with a request's index and new text, every few steps.
          capacity: at least `self.capacity(requests)`; equal capacities share one compiled program.
          shared_prefix: whether to prefill what all prompts begin with once, see `shared_prefix`.
          prompt_logprobs: whether records carry log-probabilities of their prompts, for which these are read once more.

        Raises:
          ValueError: see `check_stop`, `shared_prefix` and `reader`; on a capacity that does not hold every request.
        """
        slots = self.slots(requests, batch_size)
        prefix = self.shared_prefix(requests) if shared_prefix else ()
        return in_order(
            self.turns(
                requests,
                slots=slots,
                stop=stop,
                ignore_eos=ignore_eos,
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
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        on_text: OnText | None = None,
        capacity: int | None = None,
        keys: np.ndarray | None = None,
        prefix: Sequence[int] = (),
        prompt_logprobs: bool = False,
        needs: Needs | None = None,
        race: bool = False,
    ) -> Iterator[Turn]:
        """`run` as it happens: what every call on the device brought, with records as they finish.

        Args:
          requests: see `run`.
          slots: rows of the batch, however few requests there are.
          stop: see `run`.
          ignore_eos: see `run`.
          on_text: see `run`.
          capacity: see `run`.
          keys: `self.keys` of these requests. Those of a part of a longer list are that part of the list's keys, so that
            equal prompts are told apart as they are in the whole.
          prefix: ids to prefill once, with which every prompt begins: `self.shared_prefix` of these requests, or of the
            longer list.
          prompt_logprobs: see `run`.
          needs: `specjax.serve.request.needs_of` these requests, or of the longer list; None: as of a long job.
          race: whether of several completions of a prompt, which stand next to each other, the shortest is wanted: the others
            are then written no further than that.

        Raises:
          ValueError: see `check_stop` and `reader`; on fewer than one row, a capacity that does not hold every request, or a
            prompt that does not begin with the prefix.
        """
        self.check_stop(stop)
        if any(request.ids[: len(prefix)] != tuple(prefix) for request in requests):
            raise ValueError(f"a prompt does not begin with the shared prefix of {len(prefix)} tokens")
        if not requests:
            return iter(())
        if slots < 1:
            raise ValueError(f"at least one row must decode, got {slots}")
        if capacity is not None and capacity < self._needed(requests):
            raise ValueError(
                f"a capacity of {capacity} does not hold these requests: the longest one needs {self._needed(requests)}, "
                f"{self.decoder.slack} of them for what a step writes ahead; leave it out, or give at least that"
            )
        reader = self.reader() if prompt_logprobs else None
        needs = dataclasses.replace(needs_of(requests), brief=False) if needs is None else needs
        loop = Loop(
            Slots(self.served(ignore_eos), slots, capacity or self.capacity(requests), needs.form),
            list(requests),
            self.keys(requests) if keys is None else keys,
            needs,
            timing=self.timing,
            prefix=prefix,
            watch=Watch.of(self.model.tokenizer, requests, tuple(stop), on_text),
            race=Race(requests) if race else None,
            on_end=self._ended,
        )
        turns = loop.turns()
        return turns if reader is None else with_prompt_logprobs(turns, reader, requests, slots)

    def stream(
        self,
        prompt: str | Sequence[Any],
        *,
        chat: bool = False,
        suffix: Any = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        **options: Any,
    ) -> TextStream:
        """Completes one prompt, and yields its text as it comes: what `specjax.generate` gives with the same options, every few
        steps a piece. No piece ends within a character, or within what may become a stop string. A search has its text at the
        end, as one piece.

        Args:
          prompt: see `encode`.
          chat: whether a prompt that is a text is a user's turn of the model's chat template.
          suffix: see `request`.
          stop: a string or several that end the text; they are left out of it.
          ignore_eos: whether to go on after EOS.
          **options: see `request`.

        Raises:
          ValueError: on what `request` and `check_stop` refuse, and without a tokenizer, before any work is done.

        >>> from specjax.serve.engine import Engine
        >>> stream = Engine().stream("Repeat the list. [ hen, dog, deer, olive, mouse, mango ]", chat=True)
        >>> "".join(stream) == stream.record.text
        True
        """
        if self.model.tokenizer is None:
            raise ValueError(
                f"{self.model.name} has no tokenizer, so there is no text to stream: specjax.generate has ids"
            )
        request = self.request(user_turn(prompt, chat), suffix=suffix, **options)
        if line := self.left_out(options, [request]):
            _LOG.warning(line)
        pieces: list[str] = []
        turns = self.turns(
            [request],
            slots=1,
            stop=(stop,) if isinstance(stop, str) else stop,
            ignore_eos=ignore_eos,
            on_text=lambda _, text: pieces.append(text),
            needs=needs_of([request]),
        )
        return TextStream(turns, pieces)

    def check_completions(self, count: int) -> None:
        """Raises ValueError where a search has fewer texts of a prompt than are asked for."""
        if self.searches and count > self.decoder.num_texts:
            raise ValueError(
                f"num_return_sequences is {count}, and {self.decoder.called} of {self.decoder.num_texts} finds no more texts "
                f"than these: raise {self.decoder.off.split()[0]}, or lower num_return_sequences"
            )

    def rows(self, requests: Sequence[Request]) -> int:
        """How many rows hold these requests: one each, but of a search one for all completions of a prompt."""
        return len(rows_of(requests, self.decoder.num_texts))

    def slots(self, requests: Sequence[Request], batch_size: int) -> int:
        """Rows of a batch for these requests: `batch_size`, or where they are fewer 1, 4, 8, 16 and so on.

        Programs are compiled for so many rows, which takes as long as thousands of steps. The rows that are left hold nothing.
        """
        count = self.rows(requests)
        return min(batch_size, 1 if count == 1 else max(4, power_of_two(count)))

    @named
    def start(self, requests: Sequence[Request], *, ignore_eos: bool = False) -> Any:
        """A state that holds these requests, one a row: for programs that step it themselves."""
        slots = Slots(self.served(ignore_eos), len(requests), self.capacity(requests), form_of(requests))
        return slots.insert(slots.empty(), range(len(requests)), list(requests), self.keys(requests))

    def keys(self, requests: Sequence[Request]) -> np.ndarray:
        """Key data `[R, 2]` of the requests' row keys, on the host. Equal requests differ by their order."""
        given, spare = self.served().given, power_of_two(max(len(requests), 8)) - len(requests)
        names = [given(r) if r.id is None else str(r.id) for r in requests]
        keys = row_keys([*[r.seed for r in requests], *[0] * spare], [*names, *[()] * spare])  # of few sizes
        return jax.device_get(jax.random.key_data(keys))[: len(requests)]

    def finished(self, rows: Sequence[int], state: Any) -> None:
        """Called with the rows of `state` whose requests have just ended; may replace `params`. Does nothing here."""

    def _ended(self, rows: Sequence[int], state: Any) -> Any:
        self.finished(rows, state)
        return self.params


@with_keywords("options", DecodeOptions, PromptOptions, RunOptions)
def generate(model: Any = None, prompts: Any = None, *, progress: bool | None = None, **options: Any) -> list[Record]:
    """Completes prompts and returns a record for each, in order.

    With the default verifier the same seed gives the same text, whatever the drafter, the batch or the mesh. Beside the options
    below there are the parameters of the warpers, such as `temperature` (0, the default, is greedy), `top_k` or `top_p`: see
    `specjax samplers`. Those that are not given are what the model's `generation_config.json` says, all but the temperature; a
    warning of the logger `specjax` says what else of that file is not applied.

    Args:
      model: what `specjax.models.load` returned, a folder, a shipped name or hub id, or None for the shipped target; a model of
        your own as a `specjax.models.Model`, or as a pair of an LM (`specjax.lm.BaseLM`) and its parameters.
      prompts: a string, token ids (a list, an array, or what a tokenizer returns, whose padding is left out), chat messages, or
        an iterable of such. A dict instead, like a line of an input file, has `prompt` or `messages`, and may set `id`,
        `suffix`, `stop`, `max_new_tokens`, `seed` and parameters of the warpers for itself.
      **options:
      progress: whether a bar of records is shown on stderr; None: for several prompts on a terminal or in a notebook.

    Raises:
      ValueError: one line that says what cannot be used, before any work is done.

    >>> import specjax
    >>> record = specjax.generate(None, "Repeat the list. [ hen, dog, deer, olive, mouse, mango ]", chat=True)[0]
    >>> record.text, record.finish_reason
    (' [ hen, dog, deer, olive, mouse, mango ]', 'eos')
    """
    stop = options["stop"]
    given = options | {"model": model, "stop": (stop,) if isinstance(stop, str) else tuple(stop)}
    run, common = take(RunOptions, given), take(PromptOptions, given).given
    check_least(run)
    check_options(common)
    chooser = Chooser.of(run, options["logprobs"])
    asked = read_prompts(model, prompts)
    decode = take(DecodeOptions, given)
    rows = min(run.batch_size, len(asked) * run.num_return_sequences)
    engine = Engine(**vars(decode if chooser is None else chooser.kept_by(decode)), rows=rows)
    engine.check_completions(run.num_return_sequences)
    requests: Any = [
        one
        for prompt, own in asked
        for one in several(
            engine.request(user_turn(prompt, run.chat), **{"suffix": run.suffix, **common, **own}),
            run.num_return_sequences,
        )
    ]
    if chooser is not None:
        chooser.check(engine, requests)
    if line := engine.left_out(common, requests):
        _LOG.warning(line)
    turns = engine.turns(
        requests,
        slots=engine.slots(requests, run.batch_size),
        stop=run.stop,
        ignore_eos=run.ignore_eos,
        prefix=engine.shared_prefix(requests) if run.shared_prefix else (),
        prompt_logprobs=run.prompt_logprobs,
        needs=needs_of(requests),
        race=chooser is not None and chooser.races,
    )
    count = len(requests)
    if chooser is not None:
        turns, count = selected(turns, requests, chooser), len(asked)
    if progress is None:
        progress = count > 1 and (bar_fits() or in_notebook())
    return list(in_order(_with_bar(turns, count, engine.timing) if progress else turns))


def _with_bar(turns: Iterator[Turn], total: int, timing: Timing) -> Iterator[Turn]:
    speed = Speed(timing)
    with record_bar(total) as advance:
        for turn in turns:
            advance(len(turn.finished), speed(turn))
            yield turn
