"""Options of `specjax bench`."""

import dataclasses
from typing import Any

from specjax.serve.options import ModelOptions, PromptOptions, option, same

TOKENS, SPEC_TOKENS = 128, 1024
SUITES = (
    "parallel: ParallelBench's list tasks; order: in which step each position behind the first prompt became known; "
    "profile: a step's time by part; spec: Spec-Bench's protocol over its questions"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """See the help of each."""

    suite: str = option(
        "speed", SUITES, choices=("speed", "parallel", "order", "profile", "spec"), nargs="?", positional=True
    )
    model: str | None = same(ModelOptions, "model")
    dtype: str | None = same(ModelOptions, "dtype")
    mesh: str | None = same(ModelOptions, "mesh")
    adapter: str | None = same(ModelOptions, "adapter")
    weights: str | None = same(ModelOptions, "weights")
    cache_dtype: str | None = same(ModelOptions, "cache_dtype")
    reduce_dtype: str | None = same(ModelOptions, "reduce_dtype")
    temperature: float | None = same(PromptOptions, "temperature")
    seed: int = same(PromptOptions, "seed")
    max_new_tokens: int | None = option(
        None, f"new tokens a text, at most (default: {TOKENS}; of the suite spec {SPEC_TOKENS})", metavar="N"
    )
    tasks: str | None = option(
        None, "of the suite parallel; or families of questions, see specjax eval (default: all)", metavar="A,B,..."
    )
    ignore_eos: bool = option(False, "every text goes on to --max-new-tokens")
    samples: int = option(100, "questions a task of the suites parallel and spec", metavar="N", least=1)
    answers: str | None = option(
        None, "of the suite spec: where to write a file a decoder, as its own scripts read them", metavar="FOLDER"
    )
    drafter: tuple[str, ...] = option(
        (), "may be repeated or a comma list; all: every one; plain is always run", metavar="LINE"
    )
    decode: tuple[str, ...] = option(
        (),
        "likewise other ways to decode, such as threshold:cache=dual; all: every policy (default of a diffusion model: "
        "threshold "
        "with the caches none, prefix and dual)",
        metavar="LINE",
    )
    widen: int | None = option(
        None, "model, drafts and heads so many times as wide, with the same text (default: 1)", metavar="K", least=1
    )
    prompts: int = option(
        20,
        "how many: questions of every family in turn where the model chats, else held-out functions; or lines of --input",
        metavar="N",
        least=1,
    )
    input: str | None = option(None, "prompts, or Spec-Bench's questions, from a file", metavar="FILE.jsonl")
    peer: tuple[str, ...] = option(
        (),
        "other libraries over the same weights, plainly and with their own speculation: transformers, llama.cpp",
        metavar="NAME",
    )
    repeats: int = option(3, "rounds", least=1)
    batch_size: int = option(1, "rows decoded together", least=1)
    json: bool = option(False, "print one line of JSON; of the suite profile one a decoder, as it ends")
    plot: str | None = option(None, "write a picture of speeds and acceptance by depth", metavar="FILE.png")

    @property
    def new_tokens(self) -> int:
        """The most new tokens of a text."""
        usual = SPEC_TOKENS if self.suite == "spec" else TOKENS
        return usual if self.max_new_tokens is None else self.max_new_tokens

    @property
    def of_prompts(self) -> dict[str, Any]:
        """Options of every prompt."""
        return {"max_new_tokens": self.new_tokens, "temperature": self.temperature, "seed": self.seed}
