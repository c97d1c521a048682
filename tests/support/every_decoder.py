"""One line per kind of decoder, over models that compile in no time, and the searches that a host steps: what each
writes."""

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support.small_diffusion import GUIDE, LM, MASK
from support.small_diffusion import everything as of_diffusion
from support.small_target import TARGET, line_of, params_of, said_by, weights, with_layers
from support.two_models import LARGE, SMALL, STOPS
from support.two_tokenizers import pair

import specjax
from specjax import decoder as decoding
from specjax.decoder import Decoder
from specjax.diffusion import CanvasDiffusion, EntropyRenoise, Fixed, FreeDave, Guided, Prefix, Wino, diffusion
from specjax.diffusion.assd import Assd
from specjax.models.diffusion_gemma import DiffusionGemmaLM
from specjax.models.gemma_config import DiffusionGemmaConfig, Heads
from specjax.models.joint import JointDistribution
from specjax.prompts import Prompts
from specjax.sampling import SamplingArrays, row_keys
from specjax.search import (
    Asap,
    AsapSearch,
    AStar,
    Beam,
    BeamSearch,
    Chops,
    ELang,
    EntropyAdaptive,
    EntropyAdaptiveDecoder,
    HideMessage,
    MergedPrompts,
    Ralm,
    ReadMessage,
    SelfAgreement,
    Smc,
    SmcSearch,
    SpecReason,
    SpeculativeThinking,
    StochasticBeam,
    StochasticBeamSearch,
    Superposed,
    SuperposedSearch,
    XMbr,
)
from specjax.soft import Dirichlet, GumbelSoftmax, soft_thinking
from specjax.verify import Rejection

CANVAS = DiffusionGemmaLM(
    DiffusionGemmaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
        sliding_layers=(True, False), sliding_window=3, sliding=Heads(4, 2, 1e4, 2), full=Heads(8, 1, 1e6, 1), num_experts=2,
        top_k_experts=1, moe_intermediate_size=4,
    )
)  # fmt: skip
JOINT = JointDistribution(3, 4)


@dataclasses.dataclass(frozen=True)
class Line:
    """A decoder, its model, and rows for it: prompts, how far they go, and their temperatures."""

    decoder: Any
    model: Any
    prompts: tuple[tuple[int, ...], ...] = ((3, 1, 4, 1, 5, 3, 1, 4), (2, 7))
    new: int = 8
    heats: tuple[float, ...] = (0.0, 0.8)
    capacity: int = 32

    def rows(self) -> Prompts:
        """What a caller gives `init`, on the device; integers are as wide as JAX makes them."""
        tokens = np.zeros((len(self.prompts), max(map(len, self.prompts))), int)
        for row, prompt in zip(tokens, self.prompts, strict=True):
            row[: len(prompt)] = prompt
        lengths = np.asarray([len(prompt) for prompt in self.prompts])
        given = tokens, lengths, lengths + self.new, np.ones((len(tokens), 1), int)
        tokens, lengths, limit, eos = jax.device_put(given)
        sampling = SamplingArrays.make(len(tokens), temperature=self.heats)
        return Prompts(tokens, lengths, row_keys(3, ["a", "b"]), limit, sampling, eos)

    def written(self) -> dict[str, Any]:
        """What its rows hold when they are done, by the programs of the package."""
        state = self.decoder.init(self.model, self.rows(), capacity=self.capacity)
        return held(decoding.run(self.decoder, self.model, state))

    def by_hand(self) -> dict[str, Any]:
        """The same in a program of the caller's own."""

        def whole(model, rows):
            state = self.decoder.init(model, rows, capacity=self.capacity)
            return jax.lax.while_loop(
                lambda state: ~jnp.all(state.done), lambda state: self.decoder.step(model, state)[0], state
            )

        return held(jax.jit(whole)(self.model, self.rows()))


def held(state: Any) -> dict[str, Any]:
    """Every row's text, why it ends, and in how many steps."""
    tokens, *counts = jax.device_get((state.tokens, state.length, state.finish, state.stats.steps))
    length, finish, steps = (count.tolist() for count in counts)
    texts = [row[:end].tolist() for row, end in zip(tokens, length, strict=True)]
    return {"texts": texts, "finish": finish, "steps": steps}


def _speculative(name, verifier=None):
    drafter = line_of(name)
    return Line(specjax.speculative(TARGET, drafter, verifier), params_of(drafter, TARGET, said_by(TARGET)))


def _of_target(decoder, **fields):
    return Line(decoder, {"target": weights(), "draft": None}, **fields)


def _diffusion(policy, cache=None, **fields):
    return Line(diffusion(LM, MASK, policy, cache, block_length=8, **fields), of_diffusion())


def _adaptive():
    small = with_layers(TARGET, 1)
    own = {"target": weights(), "small": jax.tree.map(lambda x: x * 1.5, weights(small))}
    return Line(EntropyAdaptiveDecoder(TARGET, small, EntropyAdaptive(threshold=1.5, window=2, least=1, block=4)), own)


def _canvas():
    return Line(CanvasDiffusion(CANVAS, EntropyRenoise(steps=3), 4), {"target": CANVAS.init(jax.random.key(2))})


def _joint():
    dist = np.random.default_rng(0).dirichlet(np.full(JOINT.vocab_size**JOINT.size, 0.5)).astype(np.float32)
    return Line(
        Assd(JOINT, 2), {"target": {"log_probs": jnp.log(dist)}}, ((1, -1, 2), (-1, 0, -1)), 1, capacity=JOINT.size
    )


LINES = {
    "plain": lambda: _of_target(specjax.speculative(TARGET)),
    "tree": lambda: _speculative("draft-top_k"),
    "rejection": lambda: _speculative("draft-chain", Rejection()),
    "beam": lambda: _of_target(BeamSearch(TARGET, Beam(3)), heats=(0.0, 0.0)),
    "stochastic_beam": lambda: _of_target(StochasticBeamSearch(TARGET, StochasticBeam(2)), heats=(0.7, 0.8)),
    "superposed": lambda: _of_target(SuperposedSearch(TARGET, Superposed(2)), heats=(0.0, 0.0)),
    "smc": lambda: _of_target(SmcSearch(TARGET, Smc(2)), heats=(0.7, 0.8)),
    "asap": lambda: _of_target(AsapSearch(TARGET, Asap(2, 8)), heats=(0.7, 0.8)),
    "gumbel": lambda: _of_target(soft_thinking(TARGET, GumbelSoftmax(), end_of_think=5)),
    "dirichlet": lambda: _of_target(soft_thinking(TARGET, Dirichlet(), end_of_think=5)),
    "entropy_adaptive": _adaptive,
    "fixed": lambda: _diffusion(Fixed(), Prefix()),
    "wino": lambda: _diffusion(Wino()),
    "free_dave": lambda: _diffusion(FreeDave()),
    "free_dave_blocks": lambda: _diffusion(FreeDave(), causal_blocks=True),
    "guided": lambda: _diffusion(Guided(GUIDE, 4)),
    "block": lambda: _diffusion(Fixed(), causal_blocks=True),
    "canvas": _canvas,
    "assd": _joint,
}
"""A line a class of decoders; of the first one and soft thinking a line for each way of drawing."""


@functools.cache
def line(name: str) -> Line:
    """The line of that name."""
    return LINES[name]()


def kinds(kind: type = Decoder) -> set[type]:
    """Every class of decoders in the package."""
    own = {kind} if kind.__module__.startswith("specjax.") and not inspect.isabstract(kind) else set()
    return own.union(*map(kinds, kind.__subclasses__())) - {Decoder}


WARM = {"max_new_tokens": 8, "temperature": 1.0, "seed": 3}
STEPS = {"separator": STOPS, "step_tokens": 4}
THINKING = SpeculativeThinking(
    SMALL, STOPS, reflect=("c", "8"), affirm=("a",), verify=("B", "j"), peek=2, turn=2, long_turn=3, longest_long_turn=4,
    help="nlm",
)  # fmt: skip
ANSWER = lambda queries, k: [[len(query) % 2, 0][:k] for query in queries]
STEPWISE = {
    "ralm": lambda: Ralm(["abc", "dnnm"], ANSWER, ahead=2, separator="n")(LARGE, [[3, 8, 13]], **WARM),
    "astar": lambda: AStar(samples=2, budget=4, width=2, **STEPS)(LARGE, [[3, 8, 13]], **WARM),
    "spec_reason": lambda: SpecReason(SMALL, 0.00025, "likelihood", "nnm", **STEPS)(LARGE, [[3, 8, 13]], **WARM),
    "self_agreement": lambda: SelfAgreement(
        2, before="n", each="m{answer}", after="l", answer="([a-m])", reply="k{answer}"
    )(LARGE, ["dim"], **WARM),
    "chops": lambda: Chops(
        2, checklist="n", checklist_tokens=3, before="l{checklist}", each="m{answer}", after="l", reply="k{number}"
    )(LARGE, ["dim"], **WARM),
    "x_mbr": lambda: XMbr(2, languages="a", foreign=1, ask="n{language}")(LARGE, ["dim"], **WARM),
    "e_lang": lambda: ELang(SMALL, 10.0)(LARGE, [[3, 8, 13], [1, 2]], **WARM),
    "hide_message": lambda: HideMessage("a")(LARGE, [[3, 8, 13]], **WARM),
    "read_message": lambda: ReadMessage((3, 8, 1), 1)(LARGE, [[3, 8, 13]], **WARM | {"top_k": 24}),
    "speculative_thinking": lambda: THINKING(LARGE, [[3, 8, 13]], **WARM),
    "merged_prompts": lambda: MergedPrompts(2)(pair()[0], [[3, 8, 13, 3, 8]], **WARM),
}
"""The searches that a host steps."""
