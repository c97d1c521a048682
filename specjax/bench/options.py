"""Options of `specjax bench`."""

import dataclasses
from typing import Any

from specjax.serve.options import ModelOptions, PromptOptions, option, same

TOKENS, SPEC_TOKENS, SCHEMA_TOKENS = 128, 1024, 500
SUITES = (
    "parallel: ParallelBench's tasks; order: the step in which each position after the first prompt became known; "
    "profile: a step's time by part; schema: JSONSchemaBench's protocol on a folder of schemas; spec: Spec-Bench's "
    "on its questions; tree: the fastest tree for a drafter, by what is accepted"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of `specjax bench`; see the help of each."""

    suite: str = option(
        "speed",
        SUITES,
        choices=("speed", "parallel", "order", "profile", "schema", "spec", "tree"),
        nargs="?",
        positional=True,
    )
    model: str | None = same(ModelOptions, "model")
    dtype: str | None = same(ModelOptions, "dtype")
    mesh: str | None = same(ModelOptions, "mesh")
    adapter: tuple[str, ...] = same(ModelOptions, "adapter")
    weights: str | None = same(ModelOptions, "weights")
    cache_dtype: str | None = same(ModelOptions, "cache_dtype")
    reduce_dtype: str | None = same(ModelOptions, "reduce_dtype")
    temperature: float | None = same(PromptOptions, "temperature")
    seed: int = same(PromptOptions, "seed")
    max_new_tokens: int | None = option(
        None,
        f"most new tokens per text (default: {TOKENS}; spec: {SPEC_TOKENS}; schema: {SCHEMA_TOKENS})",
        metavar="N",
    )
    tasks: str | None = option(None, "tasks of parallel, or families of eval (default: all)", metavar="A,B,...")
    beside: tuple[str, ...] = option(
        (), "suite parallel: also answer with these autoregressive models, decoded plainly, repeated", metavar="MODEL"
    )
    ignore_eos: bool = option(False, "continue every text to --max-new-tokens")
    samples: int = option(
        100,
        "questions per task, in the suites parallel and spec; schemas per dataset, in the suite schema",
        metavar="N",
        least=1,
    )
    compare: bool = option(False, "suite schema: also write free texts, and compare speeds with theirs")
    kind: str | None = option(
        None, "suite schema: the kind of constraint, json or grammar (default: json)", choices=("json", "grammar")
    )
    coverage: bool = option(False, "suite schema: count coverage and write no texts")
    alone: str | None = option(
        None,
        "suite schema: also these engines without a model, llguidance, outlines-core or both with a comma",
        metavar="A,B",
    )
    compile_limit: int | None = option(
        None,
        "suite schema: seconds for a constraint; one that takes longer counts as refused (default: 40)",
        metavar="N",
        least=1,
    )
    text_limit: int | None = option(
        None,
        "suite schema: seconds for a text; one that takes longer counts as invalid (default: 60)",
        metavar="N",
        least=1,
    )
    answers: str | None = option(
        None, "suite spec: write a file per decoder here, for Spec-Bench's own scripts", metavar="FOLDER"
    )
    drafter: tuple[str, ...] = option(
        (), "drafters to run, repeated or in a comma list; all: every one; plain decoding always runs", metavar="LINE"
    )
    decode: tuple[str, ...] = option(
        (),
        "other ways to decode, such as threshold:cache=dual, listed likewise; all: every policy (default for a diffusion "
        "model: threshold with the caches none, prefix and dual)",
        metavar="LINE",
    )
    widen: int | None = option(
        None, "make model, drafts and heads K times as wide; the text stays the same (default: 1)", metavar="K", least=1
    )
    prompts: int = option(
        20,
        "number of prompts: lines of --input, or questions of every family in turn, or held-out functions if the model has "
        "no chat template",
        metavar="N",
        least=1,
    )
    input: str | None = option(
        None,
        "prompts, or Spec-Bench's questions; schema: a folder",
        metavar="FILE.jsonl",
    )
    peer: tuple[str, ...] = option(
        (),
        "also run transformers or llama.cpp on the same weights, plain and with its own speculation",
        metavar="NAME",
    )
    repeats: int = option(3, "timed rounds", least=1)
    batch_size: int = option(1, "rows decoded together", least=1)
    json: bool = option(False, "print one line of JSON; in the suite profile, one per decoder as it ends")
    plot: str | None = option(None, "write a picture of speeds and acceptance by depth", metavar="FILE.png")

    @property
    def new_tokens(self) -> int:
        """The most new tokens of a text."""
        usual = {"spec": SPEC_TOKENS, "schema": SCHEMA_TOKENS}.get(self.suite, TOKENS)
        return usual if self.max_new_tokens is None else self.max_new_tokens

    @property
    def of_prompts(self) -> dict[str, Any]:
        """The options of every prompt."""
        return {"max_new_tokens": self.new_tokens, "temperature": self.temperature, "seed": self.seed}
