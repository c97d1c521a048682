"""lm-evaluation-harness over specjax's decoders: `python -m specjax.evaluate.lm_eval` adds a model `specjax` to its
command.

Needs the extra `eval`. Texts are tokenised and shortened as in the harness's own model `hf`, so results are comparable.
"""

import functools
import itertools
import logging
from collections.abc import Sequence
from typing import Any, cast

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from specjax.models.messages import checked
from specjax.sampling_fields import SamplingFields
from specjax.serve.engine import Engine
from specjax.serve.request import Request
from specjax.serve.score import Pair, Scorer
from specjax.serve.scorers import scorer_of
from specjax.serve.slots import in_order

_LOG = logging.getLogger(__name__)
_TOLD = ("do_sample", "until", "max_gen_toks", "skip_special_tokens", "spaces_between_special_tokens")


@register_model("specjax")
class SpecjaxLM(TemplateLM):
    """A model and a decoder of specjax for the harness.

    Args:
      model: see `specjax.serve.engine.Engine`.
      batch_size: rows read or decoded together.
      max_gen_toks: the limit of new tokens if a task sets none.
      seed: the seed of tasks that sample.
      samples: masks of a text, see `specjax.score`.
      max_batch_size: passed by the harness; ignored.
      device: passed by the harness; ignored, since JAX or `mesh` chooses.
      **options: options of `Engine`, such as `decode`, `drafter`, `dtype` and `mesh`.

    Raises:
      ValueError: on arguments that `Engine` refuses, or a model without a tokenizer.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        batch_size: int | str = 8,
        max_gen_toks: int = 256,
        seed: int = 0,
        samples: int | None = None,
        max_batch_size: Any = None,
        device: Any = None,
        **options: Any,
    ):
        super().__init__()
        if not str(batch_size).isdigit() or not int(batch_size):
            raise ValueError(f"batch_size must be a number of rows, got {batch_size!r}")
        self.batch_size, self.max_gen_toks, self.seed = int(batch_size), max_gen_toks, seed
        self.samples = None if samples is None else int(samples)
        options.setdefault("rows", self.batch_size)
        self.engine = Engine(model, **options)
        self.tokenizer = self.engine.model.tokenizer
        if self.tokenizer is None:
            raise ValueError(f"{self.engine.model.name} has no tokenizer, and tasks are texts")

    @functools.cached_property
    def scorer(self) -> Scorer:
        """The scorer; bounds for a masked-diffusion model."""
        return scorer_of(self.engine, self.samples)

    @property
    def eot_token_id(self) -> int | None:
        eos = self.engine.model.eos_ids
        return eos[0] if eos else self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        first = self.eot_token_id if bos is None else bos
        if first is None:
            raise ValueError(
                f"{self.engine.model.name} has neither BOS nor EOS, and texts without a context begin with one"
            )
        return first

    @property
    def tokenizer_name(self) -> str:
        """The name under which the harness caches requests."""
        return self.engine.model.name.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        """Messages as text, by the model's chat template."""
        return self.tokenizer.apply_chat_template(
            checked(self.tokenizer, chat_history, self.engine.model.name),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids. A text that already begins with BOS gets no second one."""
        bos = self.tokenizer.bos_token
        special = not (bos and string.startswith(bos)) if add_special_tokens is None else add_special_tokens
        return self.tokenizer.encode(string, add_special_tokens=special, verbose=False)

    def _loglikelihood_tokens(self, requests: Sequence[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        pairs = [self._pair(context, after) for _, context, after in requests]
        scores = list(self.scorer.run(pairs, batch_size=self.batch_size))
        answers = [(cast(float, score.logprob), score.greedy) for score in scores]
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def _pair(self, context: Sequence[int], after: Sequence[int]) -> Pair:
        """A pair whose context is cut at the beginning if too long. The last token is not read, so it needs no
        position."""
        room = self.engine.max_length + 1 - len(after)
        if room < 1:
            raise ValueError(
                f"a continuation of {len(after)} tokens is more than the {self.engine.max_length} positions of "
                f"{self.engine.model.name}: leave the task out"
            )
        kept = tuple(context[-room:])
        return Pair(None, None, kept + tuple(after), len(kept))

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts. Parts of a long text get as much context as fits."""
        texts = [request.args[0] for request in requests]
        split = []
        for text in texts:
            windows = get_rolling_token_windows(
                self.tok_encode(text, add_special_tokens=False), self.prefix_token_id, self.engine.max_length, 1
            )
            split.append([(None, *make_disjoint_window(window)) for window in windows])
        each = iter(self._loglikelihood_tokens([window for windows in split for window in windows]))
        totals = [sum(logprob for logprob, _ in itertools.islice(each, len(windows))) for windows in split]
        for text, total in zip(texts, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """New texts up to the first of the strings that a task names."""
        made = [self._request(*request.args) for request in requests]
        if line := self.engine.left_out({"temperature": 0.0, "max_new_tokens": 0}, made):  # tasks set these
            _LOG.warning(line)
        turns = self.engine.turns(made, slots=min(self.batch_size, max(len(made), 1)))
        texts = [record.text or "" for record in in_order(turns)]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _request(self, context: str, given: dict[str, Any]) -> Request:
        options: dict[str, Any] = dict(normalize_gen_kwargs(given, self.max_gen_toks))
        count, stop = options["max_gen_toks"], tuple(s for s in options["until"] if s)
        sampling = {name: value for name, value in options.items() if name not in _TOLD}
        unknown = [name for name in sampling if name not in SamplingFields.__dataclass_fields__]
        if unknown:
            raise ValueError(
                f"generate_until has no option {unknown[0]!r}; take it out of the task's generation_kwargs"
            )
        room = self.engine.max_length - count
        if room < 1:
            raise ValueError(
                f"{count} new tokens leave no room for a prompt in the {self.engine.max_length} positions of "
                f"{self.engine.model.name}: lower the task's max_gen_toks"
            )
        ids = (self.tok_encode(context) or [self.prefix_token_id])[-room:]
        return self.engine.request(ids, max_new_tokens=count, seed=self.seed, stop=stop, **sampling)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
