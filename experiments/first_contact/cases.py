"""What is decoded: a line a way, with what its texts are compared with. `{draft}`, `{datastore}` and `{hmm}` are made first."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

SAME = "same"
"""Texts are those of plain decoding, greedy and drawn."""
GREEDY = "greedy"
"""Greedy texts are those of plain decoding; drawn ones are others."""

WARPED: tuple[Mapping[str, Any], ...] = (
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.1},
    {"temperature": 0.9, "typical_p": 0.9, "epsilon_cutoff": 3e-4, "eta_cutoff": 3e-4, "presence_penalty": 0.4},
    {"temperature": 0.8, "top_h": 0.5, "xtc_probability": 0.5, "frequency_penalty": 0.3, "dry_multiplier": 0.8},
    {"temperature": 0.7, "mirostat": 2, "logit_bias": [[28, -2.0]], "bad_words_ids": [[2837]]},
    {"momentum_alpha": 0.2, "min_new_tokens": 20, "suppress_tokens": [30], "begin_suppress_tokens": [30]},
    {"temperature": 0.8, "constraint": "regex:[A-Z][a-z, ]+\\.", "guide": "{hmm}"},
)
"""Options of one call, a prompt each: every warper there is."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A way to decode.

    Attributes:
      group: the table that it stands in.
      line: of `decode`.
      meant: `SAME` or `GREEDY`, or why texts are others.
      like: the line of the same group whose texts are `SAME`'s; None: plain decoding's.
      load: options of `specjax.load`.
      samplings: of the prompts, in turn; None: greedy, and drawn at a temperature of 0.8.
      options: of `Engine.generate` besides.
      devices: it is a job of the command line, on so many virtual devices, and `line` are its flags; 0: it is not.
    """

    group: str
    line: str
    meant: str = SAME
    like: str | None = None
    load: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    samplings: tuple[Mapping[str, Any], ...] | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    devices: int = 0

    @property
    def name(self) -> str:
        """What tells rows apart."""
        return " ".join([*(f"{name}={value}" for name, value in self.load.items()), self.line])


DRAFTERS = (
    "prompt_lookup", "suffix", "sam", "ngram_mod", "iad", "forced", "token_recycling", "aded", "stand", "jacobi", "lookahead",
    "rest:datastore={datastore}", "swift", "del", "small_cache", "magicdec", "rapid", "rapid:model={draft}",
    "prompt_lookup+token_recycling", "switch:drafters=(suffix+draft:model={draft})", "cascade:model={draft}",
    "draft:model={draft}", "draft:model={draft},rule=goodput", "draft:model={draft},rule=utility",
    "draft:model={draft},expander=early_stop,length=6,threshold=0.3", "draft:model={draft},expander=top_k,k=3,depth=3,nodes=10",
    "rasd:draft={draft},datastore={datastore}", "rasd:draft={draft},retriever=prompt_lookup",
    "diffuspec:model=tiny-diffusion", "diffusion_draft:model=tiny-diffusion", "draft:model=tiny-draft",
    "tli:model={draft}", "slem:model={draft}", "omnidraft:model={draft}", "s2d:model={draft}", "easyspec:model=tiny",
    "pearl:model={draft}", "saguaro:model={draft}", "mirror_sd:model={draft}", "pard:model={draft}", "pard2:model={draft}",
    "lud:pad=2,alpha=0.2", "self_diffusion:mask=2,length=4",
)  # fmt: skip
"""All but `gad` and `main_experts`, for targets with an encoder and with experts; no shipped model has either."""
VERIFIERS = {
    "typical": GREEDY, "ears": GREEDY, "lenient": GREEDY, "rapid": GREEDY, "fly": "keeps another token where it is unsure",
    "gad_plus": "keeps likely tokens",
    "lantern": "keeps near tokens", "reflective": "asks the model about the draft",
    "reverse": "keeps what is possible", "judge": "has a trained head",
}  # fmt: skip
"""Lossy ones, with drafts that are looked up."""
OF_MODEL = (
    "rejection",
    "block",
    "multi_step",
    "recursive",
    "recursive_wor",
    "k_seq",
    "optimal",
    "greedy_multi",
    "traversal",
    "best",
    "kl_judge",
)
"""Those that keep the distribution or need the draft's, with drafts of a model."""
SEARCHES = {
    "beam": "the likeliest text", "diverse_beam": "the likeliest texts of groups",
    "stochastic_beam": "texts without replacement", "superposed": "drafts of one pass",
    "entropy_adaptive:small={draft},threshold=0": SAME,
    "spec_reason:small={draft},score=likelihood,threshold=2,separator=.": GREEDY,
    "speculative_thinking:small={draft}": "two models take turns", "astar": "the cheapest of drawn steps",
    "self_agreement:samples=2": "an answer after others",
}  # fmt: skip
DRAWN = ("stochastic_beam", "astar", "self_agreement")
"""Beginnings of lines that draw."""
STEERED = ("guidance:scale=1.5", "contrastive:amateur={draft}", "dola")
MIXERS = ("gumbel:n=4", "mean:n=4")


def of_search(line: str) -> tuple[Mapping[str, Any], ...]:
    """The sampling of its prompts."""
    return ({"temperature": 0.8 if line.startswith(DRAWN) else 0.0},)


def cases() -> Iterator[Case]:
    """Every one, in order."""
    yield Case("drafters", "none")
    for line in DRAFTERS:
        yield Case("drafters", line)
    yield Case("samplers", "none", "all warpers", samplings=WARPED)
    yield Case("samplers", "prompt_lookup+token_recycling", like="none", samplings=WARPED)
    for steer in STEERED:
        own = f"plain:steer=({steer})"
        yield Case("steering", own, "leads the model's distribution elsewhere")
        yield Case("steering", f"prompt_lookup:steer=({steer})", like=own)
    for line, meant in SEARCHES.items():
        yield Case("searches", line, meant, samplings=of_search(line))
    for line in MIXERS:
        yield Case("soft thinking", line, "reads mixtures of tokens", samplings=({"temperature": 0.8},))
    for select in ("majority", "first_finish"):
        several = {"num_return_sequences": 2, "select": select}
        own = ({"temperature": 0.8},)
        yield Case("selections", f"prompt_lookup, {select} of two", "one of two", options=several, samplings=own)
    for line in ("plain:cache=(ems)", "plain:cache=(gear)", "plain:cache=(spatten)"):
        yield Case("caches", line, "keeps less of older tokens")
    yield Case("types", "none", load={"weights": "packed"})
    for load in (
        {"dtype": "bfloat16"}, {"weights": "int8"}, {"weights": "int4:group=32"}, {"weights": "fp8"},
        {"weights": "dfloat11", "dtype": "bfloat16"}, {"cache_dtype": "int8"}, {"cache_dtype": "float8_e4m3fn"},
    ):  # fmt: skip
        yield Case("types", "none", "other numbers", load=load)
        if "int8" in load.values():
            yield Case("types", "prompt_lookup+token_recycling", like="none", load=load)
    yield Case("command line", "--drafter prompt_lookup", devices=1)
    for mesh in ("data=8", "data=2,model=4", "model=2,context=4"):
        yield Case("command line", f"--drafter prompt_lookup+token_recycling --mesh {mesh}", devices=8)
    for name, meant in VERIFIERS.items():
        yield Case("verifiers", f"prompt_lookup:verifier={name}", meant)
    for name in OF_MODEL:
        yield Case("verifiers", f"draft:model={{draft}},verifier={name}", GREEDY)
