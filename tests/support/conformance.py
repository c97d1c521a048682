"""What the end-to-end tests share: small models, prompts, decoders by name, and the margin rule for near-ties."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.other_tokens import other_params, other_tokens
from support.random_weights import drawn, noisy, whole_numbers
from support.table_models import CONFIG, DEEPER, DRAFT, MODELS, TARGET

import specjax
from specjax.draft import (
    MTP,
    PPD,
    S2D,
    Aded,
    Cascade,
    Chimera,
    Clover,
    Clover2,
    DFlash,
    DFlash2,
    DiffusionDrafter,
    DiffuSpec,
    Domino,
    Dovetail,
    Drafter,
    DSpark,
    DynamicExit,
    Eagle,
    Eagle3,
    EasySpec,
    Falcon,
    Forced,
    Fspad,
    Gad,
    Gemma4Assistant,
    Goodput,
    Griffin,
    Gumiho,
    HiddenTransfer,
    Hydra,
    InputGuided,
    Jacobi,
    JetSpec,
    Kangaroo,
    LongSpec,
    Lookahead,
    LSTMSpeculator,
    Lud,
    MagicDec,
    MainExperts,
    Medusa,
    MirrorSD,
    MLPSpeculator,
    ModelDrafter,
    NgramMod,
    NoDrafter,
    OmniDraft,
    Pard,
    Pard2,
    PEagle,
    Pearl,
    PromptLookup,
    Rapid,
    Rasd,
    Rest,
    Saguaro,
    Sam,
    SelfDiffusion,
    Slem,
    SmallCache,
    Stand,
    Suffix,
    Swift,
    Switch,
    Tli,
    TokenRecycling,
    Trained,
    adaptive,
    fuse,
)
from specjax.draft.datastore import build
from specjax.expand import (
    IID,
    BestFirst,
    Chain,
    DySpec,
    EarlyStop,
    GreedyDraft,
    Static,
    StochasticBeam,
    TopK,
    WithoutReplacement,
)
from specjax.lm import Source, encodes
from specjax.prompts import Prompts
from specjax.sampling import SamplingArrays, row_keys
from specjax.verify import (
    Best,
    Block,
    Coupled,
    Ears,
    Fly,
    GadPlus,
    GreedyMulti,
    Judge,
    KLJudge,
    KSeq,
    Lantern,
    Lenient,
    MultiStep,
    Optimal,
    RapidTransfer,
    Recursive,
    RecursiveWOR,
    Reflective,
    Rejection,
    Reverse,
    Traversal,
    Typical,
    Verifier,
)

CAPACITY = 96


DRAFTERS: dict[str, Drafter] = {
    "none": NoDrafter(),
    "prompt_lookup": PromptLookup(length=3, min_ngram=1),
    "suffix": Suffix(2, span=5, matches=3, pieces=0),
    "suffix-tree": Suffix(3, span=6, matches=4, pieces=0, tree=True),
    "suffix-shared": Suffix(3, span=6, matches=4, pieces=12, piece=8),
    "sam": Sam(3, min_match=1),
    "ngram_mod": NgramMod(3, ngram=1, slots=256),
    "iad": InputGuided(3),
    "forced": Forced(length=3),
    "token_recycling": TokenRecycling(k=4),
    "aded": Aded(paths=3, length=3, rounds=6, k=3, slots=256),
    "stand": Stand("3 | 2 1 | 1", k=4, slots=64),
    "rest": Rest(nodes=8, length=4, matches=16),
    "jacobi": Jacobi(3),
    "draft-chain": ModelDrafter(DRAFT, Chain(3)),
    "draft-static": ModelDrafter(DRAFT, Static(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))),
    "draft-top_k": ModelDrafter(DRAFT, TopK(k=3, depth=3, nodes=8)),
    "draft-eagle2": ModelDrafter(DRAFT, TopK(k=3, depth=3, nodes=8, coupled=False)),
    "draft-early_stop": ModelDrafter(DRAFT, EarlyStop(3, 0.3)),
    "draft-iid": ModelDrafter(DRAFT, IID(tree="3 | 2 1 1 | 1")),
    "draft-without_replacement": ModelDrafter(DRAFT, WithoutReplacement(tree="3 | 2 1 1 | 1")),
    "draft-greedy_draft": ModelDrafter(DRAFT, GreedyDraft(tree="3 | 2 1 1 | 1")),
    "draft-stochastic_beam": ModelDrafter(DRAFT, StochasticBeam(k=2, depth=3)),
    "draft-dyspec": ModelDrafter(DRAFT, DySpec(k=3, depth=3, nodes=8)),
    "draft-opt_tree": ModelDrafter(DRAFT, TopK(k=4, depth=3, nodes=5, coupled=False, threshold=0.5)),
    "s2d": S2D(DRAFT, Chain(2), exits=(1, 2), thresholds=(0.7,), queue=5),
    "easyspec": EasySpec(DEEPER, Chain(2), group=2),
    "pearl": Pearl(DRAFT, length=3),
    "saguaro": Saguaro(DRAFT, length=2, fan=2),
    "mirror_sd": MirrorSD(DRAFT, length=2, fan=2),
    "tli": Tli(other_tokens(DRAFT), Chain(3)),
    "slem": Slem(lm=other_tokens(DRAFT), length=3),
    "omnidraft": OmniDraft(other_tokens(DRAFT), Chain(3), slots=16, guesses=3),
    "pard": Pard(DRAFT, Chain(3), mask_id=95),
    "pard2": Pard2(DRAFT, Chain(3), mask_id=95),
    "gad": Gad(DRAFT, 95, Chain(3), recent=4),
    "diffusion_draft": DiffusionDrafter(DRAFT, 95, Chain(3)),
    "diffusion_draft-top_k": DiffusionDrafter(DRAFT, 95, TopK(k=3, depth=3, nodes=8), shift=True),
    "diffuspec": DiffuSpec(DRAFT, 95, length=4, least=2, more=2, most=4),
    "lookahead": Lookahead(level=3, window=3, guesses=3, nodes=6, buckets=40),
    "ppd": PPD("3 @ 3 1x3; 2 | 1 @ 2x2 1x2; 1 | 1 | 1 @ 1 0 2x2"),
    "lud": Lud(95, unit=3, alpha=0.0),
    "self_diffusion": SelfDiffusion(95, Chain(3), threshold=0.3),
    "self_diffusion-top_k": SelfDiffusion(95, TopK(k=3, depth=3, nodes=8)),
    "hidden_transfer": HiddenTransfer(layers=(1, 2, 2)),
    "medusa": Medusa(),
    "hydra-prefix": Hydra(TopK(k=2, depth=3, nodes=6), prefix_layer=True),
    "mlp_speculator": MLPSpeculator(TopK(k=2, depth=3, nodes=6), tied=False),
    "lstm_speculator": LSTMSpeculator(inner=48),
    "chimera": Chimera(TopK(k=2, depth=3, nodes=6)),
    "eagle1": Eagle(Static(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))),
    "eagle2": Eagle(TopK(k=3, depth=3, nodes=8)),
    "eagle3": Eagle3(Chain(3)),
    "eagle3-top_k": Eagle3(
        TopK(k=3, depth=3, nodes=8), norm_before_fc=True, norm_before_residual=True, norm_output=True
    ),
    "fspad": Fspad(TopK(k=2, depth=2, nodes=5)),
    "griffin": Griffin(TopK(k=2, depth=2, nodes=5)),
    "dovetail": Dovetail(TopK(k=2, depth=2, nodes=5), layers=2),
    "falcon": Falcon(TopK(k=2, depth=4, nodes=8)),
    "gumiho": Gumiho(TopK(k=2, depth=4, nodes=7), mlps=2),
    "peagle": PEagle(Chain(3)),
    "dflash": DFlash(TopK(k=2, depth=3, nodes=6), layers=2, block=5),
    "dflash2": DFlash2(TopK(k=2, depth=3, nodes=6), layers=2, block=5, group=4, rank=8),
    "dspark": DSpark(TopK(k=2, depth=3, nodes=6), block=4, markov="rnn", rank=8),
    "domino": Domino(TopK(k=2, depth=3, nodes=6), block=4, state=12, rank=8, plain=2),
    "jetspec-best_first": JetSpec(BestFirst(k=2, depth=3, nodes=8), layers=2, block=5),
    "mtp": MTP(TopK(k=2, depth=3, nodes=6)),
    "gemma4_assistant": Gemma4Assistant(TopK(k=2, depth=3, nodes=6)),
    "gemma4_assistant-clusters": Gemma4Assistant(Chain(3), layers=2, clusters=12, top=5),
    "longspec": LongSpec(TopK(k=2, depth=3, nodes=6), window=9),
    "clover": Clover(TopK(k=2, depth=3, nodes=6)),
    "clover2": Clover2(TopK(k=2, depth=3, nodes=6)),
    "kangaroo": Kangaroo(exit_layer=1, length=3, threshold=0.3),
    "swift": Swift(2, 0.3, share=0.5, window=8, patience=6, guess_every=3, history=8),
    "del": DynamicExit((1, 2), length=2),
    "small_cache": SmallCache(expander=Chain(3)),
    "magicdec": MagicDec("streaming", budget=2, sinks=1),
    "magicdec-snapkv": MagicDec(budget=33, recent=2, expander=TopK(k=2, depth=2, nodes=5)),
    "rapid": Rapid(chunk=2, least=1, question=1, sinks=1, joint=(2,), expander=Chain(2)),
    "main_experts": MainExperts(expander=Chain(3)),
    "cascade": Cascade(DRAFT, PromptLookup(length=2, min_ngram=1), 3, 1),
    "switch": Switch((PromptLookup(length=3, min_ngram=1), ModelDrafter(DRAFT, Chain(2))), pool=0),
    "adaptive-goodput": adaptive(ModelDrafter(DRAFT), Goodput(0.3, 0.0, 1.0, 0.01, 0.03), 2),
    "fuse": fuse(TokenRecycling(k=4, tree="2 | 1 1"), ModelDrafter(DRAFT, Chain(2))),
    "rasd": Rasd(ModelDrafter(DRAFT, TopK(k=2, depth=2, nodes=5)), Rest(nodes=6, length=4, matches=8), limit=8),
}
"""The conformance table: one line per drafter and expander."""


OVER = {"main_experts": "experts"}
"""Lines of the table that need another of `MODELS` than `TARGET`."""

AHEAD = 32
"""What their rings have besides a window: few slots, so that texts go round them."""

ON_MODELS: dict[str, Drafter] = {
    **{f"{name}@experts": DRAFTERS[name] for name in ("token_recycling", "medusa", "eagle2", "swift")},
    "draft@experts": ModelDrafter(MODELS["experts"], TopK(k=2, depth=2, nodes=5)),
    **{f"{name}@sinks": DRAFTERS[name] for name in ("prompt_lookup", "lookahead", "eagle3-top_k", "kangaroo")},
    "draft@sinks": ModelDrafter(MODELS["sinks"], EarlyStop(2, 0.3)),
    **{f"{name}@shared": DRAFTERS[name] for name in ("hydra-prefix", "gemma4_assistant", "swift")},
    "del@shared": DynamicExit((1, 3), length=2),
    "draft@shared": ModelDrafter(MODELS["shared"], Static(((0,), (1,), (0, 0)))),
    **{f"{name}@latent": DRAFTERS[name] for name in ("prompt_lookup", "token_recycling", "mtp", "swift")},
    "draft@latent": ModelDrafter(MODELS["latent"], TopK(k=2, depth=2, nodes=5)),
    **{f"{name}@encoder": DRAFTERS[name] for name in ("prompt_lookup", "token_recycling", "medusa", "swift")},
    "draft@encoder": ModelDrafter(MODELS["encoder"], Static(((0,), (1,), (0, 0)))),
    "gad@encoder": Gad(MODELS["encoder"], 95, Chain(3), recent=4),
}
"""The same properties over other models, five or six drafters of different kinds each."""

SLOW = (
    "token_recycling@experts", "eagle2@experts", "swift@experts", "draft@experts", "lookahead@sinks", "eagle3-top_k@sinks",
    "kangaroo@sinks", "draft@sinks", "hydra-prefix@shared", "swift@shared", "del@shared", "draft@shared", "medusa@experts",
    "gemma4_assistant@shared", "prompt_lookup@latent", "token_recycling@latent", "swift@latent", "draft@latent",
    "mtp@latent", "prompt_lookup@encoder", "token_recycling@encoder", "medusa@encoder", "swift@encoder",
    "draft@encoder", "gad@encoder",
)  # fmt: skip
"""Lines over other models that are in the slow set. `guarantees/test_drafters.py` has every drafter, over a smaller target."""

VERIFIERS: dict[str, Verifier] = {
    "coupled": Coupled(),
    "rejection": Rejection(),
    "block": Block(),
    "multi_step": MultiStep(),
    "recursive": Recursive(),
    "recursive_wor": RecursiveWOR(),
    "k_seq": KSeq(),
    "optimal": Optimal(),
    "greedy_multi": GreedyMulti(),
    "typical": Typical(),
    "fly": Fly(window=1),
    "gad_plus": GadPlus(),
    "ears": Ears(),
    "lenient": Lenient(),
    "lantern": Lantern(),
    "judge": Judge(),
    "kl_judge": KLJudge(),
    "rapid": RapidTransfer(),
    "reflective": Reflective((5, 17, 3)),
    "reverse": Reverse(),
    "traversal": Traversal(),
    "best": Best(),
}
"""One line per verifier. The first is the default, which the whole table of drafters is judged by."""

TWINS = (
    "draft-static",
    "draft-top_k",
    "draft-eagle2",
    "draft-early_stop",
    "draft-iid",
    "draft-without_replacement",
    "draft-greedy_draft",
    "draft-stochastic_beam",
    "draft-dyspec",
    "draft-opt_tree",
    "eagle2",
)
"""They differ from another line by their expander alone, so what they know of a prompt is the same."""

EACH_KIND = (
    "none",
    "prompt_lookup",
    "token_recycling",
    "draft-chain",
    "draft-early_stop",
    "draft-top_k",
    "draft-iid",
    "draft-without_replacement",
    "draft-greedy_draft",
    "draft-dyspec",
    "diffusion_draft",
    "medusa",
    "eagle3",
    "kangaroo",
    "fuse",
)
"""Chains and trees of every kind of drafter; any other verifier is tried with those of them that it can judge."""


def judged(verifier: Verifier, names=EACH_KIND) -> list[str]:
    """The drafters that a verifier says it can judge."""

    def can(name):
        try:
            verifier.check(DRAFTERS[name].bind(TARGET))
        except ValueError:
            return False
        return True

    return [name for name in names if can(name)]


def but_slow(values, *slow):
    """Test parameters, all fast but those that are listed as `slow`."""
    return [pytest.param(v, marks=pytest.mark.slow) if v in slow else v for v in values]


def draft_model(target, lm=DRAFT):
    """A draft LM's parameters: the target's lower layers, the last of them again if the draft has more."""
    last = len(target["layers"]) - 1
    return {**target, "layers": {i: target["layers"][min(i, last)] for i in range(lm.num_layers)}}


def store():
    """A datastore of what every other row will say."""
    texts = [(*prompt, *text) for prompt, text in zip(MIXED.prompts, plain(), strict=True)]
    return jax.tree.map(jnp.asarray, build(texts[::2], CONFIG.vocab_size))


PARAMS: dict[str, Callable[[dict], Any]] = {
    **{
        name: draft_model
        for name in DRAFTERS
        if name.startswith(("draft", "s2d", "pard", "gad", "diffusion", "cascade", "pearl", "saguaro", "mirror_sd"))
    },
    "tli": lambda target: other_params(TARGET, draft_model(target)),
    "slem": lambda target: other_params(TARGET, draft_model(target)),
    "omnidraft": lambda target: other_params(TARGET, draft_model(target)),
    "pard2": lambda target: {"lm": draft_model(target), "fc": {"kernel": jnp.asarray(whole_numbers((3 * 64, 64), 5))}},
    "diffuspec": lambda target: {"model": draft_model(target), "trigrams": None},
    "adaptive-goodput": lambda target: {"drafter": draft_model(target), "rule": None},
    "switch": lambda target: (None, draft_model(target)),
    "fuse": lambda target: (None, draft_model(target)),
    "easyspec": lambda target: draft_model(target, DEEPER),
    "rest": lambda target: store(),
    "rasd": lambda target: (draft_model(target), store()),
}
"""From the target's parameters to a drafter's, by its name; trained drafters make their own."""


def model_of(name: str) -> str:
    """Which of `MODELS` a line is over; nothing: `TARGET`."""
    return name.partition("@")[2] or OVER.get(name, "")


def target_of(name: str):
    """The model that a line is over."""
    return MODELS.get(model_of(name), TARGET)


@functools.cache
def _target(model: str = ""):
    target = drawn(MODELS.get(model, TARGET).init(jax.random.key(7)))
    if model:  # norms, biases and sinks of their own
        target = jax.tree.map(lambda x: x + whole_numbers(x.shape, x.size) / 2 if x.ndim == 1 else x, target)
    return jax.tree.map(lambda x: jnp.asarray(x * 2 if x.ndim > 1 else x), target)


@functools.cache
def params(name: str = "draft-chain"):
    """Random weights, sharpened so that greedy text has structure, and those of the drafter of that name."""
    model = model_of(name)
    target = _target(model)
    drafter = (DRAFTERS | ON_MODELS)[name]
    if isinstance(drafter, Trained):
        made = drafter.bind(MODELS.get(model, TARGET)).init_params(jax.random.key(8), target)
        draft = jax.tree.map(jnp.asarray, drawn(made, seed=1))
    elif model:
        draft = noisy(target) if isinstance(drafter, ModelDrafter | Gad) else None
    else:
        draft = PARAMS.get(name, lambda target: None)(target)
    return {"target": target, "draft": draft}


def params_of(drafter: Drafter):
    """The parameters of a drafter of the table; a draft LM's for any other."""
    found = (name for name, known in DRAFTERS.items() if drafter in (known, known.bind(target_of(name))))
    return params(next(found, "draft-chain"))


@dataclasses.dataclass(frozen=True)
class Rows:
    """A ragged batch: prompts, how to sample, and how far to go."""

    prompts: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    options: tuple[dict, ...]
    new_tokens: int = 32

    def __hash__(self):
        return hash((self.prompts, self.names, self.new_tokens, str(self.options)))

    def pick(self, *rows: int) -> "Rows":
        take = lambda x: tuple(x[i] for i in rows)
        return dataclasses.replace(self, prompts=take(self.prompts), names=take(self.names), options=take(self.options))


def _prompts(lengths):
    rng = np.random.default_rng(3)
    # a repeating motif gives the lookup drafters something to find
    return tuple(tuple(np.resize(rng.integers(1, 96, 5 + n % 4), n).tolist()) for n in lengths)


MIXED = Rows(
    _prompts((1, 7, 17, 30, 12, 16, 2, 25)),
    tuple(f"row-{i}" for i in range(8)),
    (
        {"temperature": 0.0},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_p": 0.9},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 5, "min_p": 0.05},
        {"temperature": 0.7, "repetition_penalty": 1.2},
        {"temperature": 1.0, "top_p": 0.5},
    ),
)
"""Greedy rows beside sampled ones, every warper in use."""


PREFIX = 18
ALIKE = dataclasses.replace(
    MIXED, prompts=tuple((*np.resize(MIXED.prompts[7], PREFIX).tolist(), *p[:12]) for p in ((), *MIXED.prompts[1:]))
)
"""The same rows with prompts that begin alike: `PREFIX` tokens, of which one is the whole, and up to 12 of their own."""


def start(decoder, rows: Rows, *, model=None, eos=(), seed=0, capacity=CAPACITY, width=16, prefix=0, among=None):
    """A filled state; the first `prefix` tokens of the prompts are read once.

    `among` another batch the rows take the first slots of a state of its size, padded as it is: the other slots stay free,
    and no program is compiled anew.
    """
    own, whole = len(rows.prompts), among or rows
    count = len(whole.prompts)
    tokens = np.zeros((count, max(map(len, whole.prompts))), np.int32)
    for i, prompt in enumerate(rows.prompts):
        tokens[i, : len(prompt)] = prompt
    spare = count - own
    lengths = jnp.asarray([len(p) for p in rows.prompts] + [1] * spare, jnp.int32)
    off = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    options = (*rows.options, *[{}] * spare)
    sampling = SamplingArrays.make(count, **{n: [o.get(n, none) for o in options] for n, none in off.items()})
    model = params_of(decoder.drafter) if model is None else model
    state = specjax.decoder.empty(decoder, model, count, capacity, jnp.float32, max(len(eos), 1))
    shared = None
    if prefix:
        state, shared = specjax.decoder.read_prefix(decoder, model, state, jnp.asarray(tokens[0, :prefix]))
    prompts = Prompts(
        jnp.asarray(tokens),
        lengths,
        row_keys(seed, (*rows.names, *[""] * spare)),
        lengths + rows.new_tokens,
        sampling,
        jnp.broadcast_to(jnp.asarray(eos or (-1,), jnp.int32)[None], (count, max(len(eos), 1))),
        width,
    )
    if encodes(decoder.target):
        prompts = dataclasses.replace(prompts, source=source_of([*rows.prompts, *[(1,)] * spare], tokens.shape[1]))
    slots = jnp.where(jnp.arange(count) < own, jnp.arange(count), count)
    return specjax.decoder.insert(decoder, model, state, slots, prompts, prefix=shared)


def source_of(prompts, width: int) -> Source:
    """A source for each prompt: it backwards, and its beginning again. `width` is the longest prompt that there may be."""
    return jax.tree.map(jnp.asarray, Source.of([(*prompt[::-1], *prompt[:4]) for prompt in prompts], width + 4))


def texts(state) -> list[list[int]]:
    """New tokens of every row."""
    tokens, begin, end = (np.asarray(x) for x in (state.tokens, state.prompt_length, state.length))
    return [tokens[i, begin[i] : end[i]].tolist() for i in range(len(begin))]


def complete(drafter, rows: Rows = MIXED, verifier=None, *, model=None, mesh=None, **options):
    """Runs a decoder to the end. Returns the rows' new tokens and the final state."""
    decoder = specjax.speculative(TARGET, drafter, verifier, mesh=mesh)
    model = params_of(drafter) if model is None else model
    verify = decoder.verifier.init_params(jax.random.key(9), model["target"])
    model = model if verify is None else {"verify": verify} | model
    return ended(decoder, model, rows, **options)


def ended(decoder, model, rows: Rows = MIXED, **options):
    """The rows' new tokens and the final state."""
    state = specjax.decoder.run(decoder, model, start(decoder, rows, model=model, **options))
    return texts(state)[: len(rows.prompts)], state


def decoder_of(name: str):
    """The decoder of a line of `DRAFTERS` or `ON_MODELS`; layers with a window have rings."""
    target = target_of(name)
    decoder = specjax.speculative(target, (DRAFTERS | ON_MODELS)[name])
    if not target.has_windows:
        return decoder
    ahead = AHEAD + int(decoder.drafter.looks_back)
    return dataclasses.replace(decoder, target=dataclasses.replace(target, ahead=ahead))


def line(name: str, rows: Rows = MIXED, **options):
    """`complete` of a line's decoder."""
    return ended(decoder_of(name), params(name), rows, **options)


@functools.cache
def plain(rows: Rows = MIXED, model: str = "") -> list[list[int]]:
    """Plain decoding's text, the reference of every property; caches are whole."""
    decoder = specjax.speculative(MODELS.get(model, TARGET))
    return ended(decoder, {"target": _target(model), "draft": None}, rows)[0]


def same(got, wanted) -> None:
    """Rows must agree token for token. These models have no near-ties at these seeds; real ones go by `margin`."""
    for row, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert a == b, f"row {row}: {a} is not {b}"
