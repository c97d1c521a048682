"""Goodput chooses a draft's length from the load: how it chooses, what a choice costs, and that the text stays."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import DRAFT, MIXED, TARGET, params, plain, same, start, texts

import specjax
from specjax import decoder as decoding
from specjax.assembly.registry import DRAFTERS as REGISTRY
from specjax.assembly.registry import build_drafter, parse
from specjax.draft import Goodput, ModelDrafter, Online, View, adaptive
from specjax.models.llama import LlamaLM
from specjax.tree import Topology, Tree
from specjax.verify import Rejection

LENGTHS = (0, 1, 2, 4, 8)


def best(rule, rate, batch, context=0, lengths=LENGTHS):
    return int(rule.best(jnp.full((batch,), rate), jnp.ones((batch,), bool), jnp.asarray(context), lengths))


def test_the_load_shortens_the_draft():
    """For one acceptance, a larger batch never drafts more; 64 rows of 0.7 draft nothing where one drafts four tokens."""
    rule = Goodput(draft_pass=0.5, draft_row=0.1, target_pass=8.0, target_token=0.5)
    for rate in (0.3, 0.5, 0.7, 0.9, 0.99):
        found = [best(rule, rate, batch) for batch in (1, 4, 16, 64)]
        assert found == sorted(found, reverse=True), (rate, found)
    assert best(rule, 0.7, 1) == 4 and best(rule, 0.7, 64) == 0


def test_acceptance_at_its_ends():
    rule = Goodput()
    assert best(rule, 0.0, 4) == 0 and best(rule, 1.0, 4) == 8
    found = [best(rule, rate, 4) for rate in np.linspace(0, 1, 11)]
    assert found == sorted(found) and len(set(found)) > 3


def test_it_is_the_maximum_of_tokens_over_time():
    """Over the live rows, each of its own rate; ended ones cost time all the same."""
    rule, context = Goodput(1.0, 0.2, 4.0, 0.01, 0.4), 300
    rates, live = np.asarray([0.9, 0.2, 0.8, 0.5], np.float32), np.asarray([True, True, True, False])

    def goodput(k):
        tokens = sum((1 - a ** (k + 1)) / (1 - a) for a in rates[live].tolist())
        return tokens / (k * (1.0 + 0.2 * 4) + 4.0 + 0.01 * context + 0.4 * 4 * (k + 1))

    got = rule.best(jnp.asarray(rates), jnp.asarray(live), jnp.asarray(context), LENGTHS)
    assert int(got) == max(LENGTHS, key=goodput) == 2


def test_evidence_fades_where_nothing_is_drafted():
    rule = Goodput(decay=0.5, prior=0.5)
    tree = Tree.of(Topology.chain(2), jnp.ones((2, 3), jnp.int32), jnp.ones((2, 3), bool))
    live = jnp.asarray([True, True])
    state = rule.observe(rule.init(2), tree, jnp.asarray([0, 2]), live)
    np.testing.assert_array_equal(state, [[0, 2], [1, 2]])
    none = dataclasses.replace(tree, valid=tree.valid.at[:, 1:].set(False))
    np.testing.assert_array_equal(rule.observe(state, none, jnp.asarray([0, 0]), live), [[0, 1], [0.5, 1]])


SEEN: dict[str, list] = {"target": [], "draft": []}


@dataclasses.dataclass(frozen=True)
class Counted(LlamaLM):
    """Says how many tokens per row each of its passes read, when it runs."""

    name: str = "target"

    def layers(self, params, h, *where, **more):
        jax.debug.callback(SEEN[self.name].append, h.shape[1])
        return super().layers(params, h, *where, **more)


RULE = Goodput(draft_pass=1.5, draft_row=0.0, target_pass=1.0, target_context=0.01, target_token=0.05, prior=0.6)
DRAFTER = adaptive(ModelDrafter(Counted(DRAFT.config, name="draft")), RULE, 4)
MODEL = {"target": params()["target"], "draft": {"drafter": params()["draft"], "rule": None}}


@pytest.fixture(scope="module")
def decoder():
    return specjax.speculative(Counted(TARGET.config), DRAFTER)


def chosen(state):
    """How many tokens the next step drafts."""
    view = View(state.tokens, state.length, ~state.done, state.cache, max_depth=4)
    goes_on = RULE.start(None, state.draft[1], view, 4, None)
    return sum(int(goes_on(depth, jnp.ones(8), None)[0]) for depth in range(4))


def step(decoder, state):
    """A step, and the tokens per row of every pass of target and draft."""
    for passes in SEEN.values():
        passes.clear()
    state = decoding.run(decoder, MODEL, state, 1)
    jax.effects_barrier()
    return state, {name: [int(size) for size in passes] for name, passes in SEEN.items()}


@pytest.mark.slow
def test_a_shorter_draft_costs_less(decoder):
    """k tokens take k draft passes, the first one over what was committed, and the target reads k + 1; none take none."""
    state = start(decoder, MIXED, model=MODEL)
    for k in (0, 1, 2, 4):
        rates = np.linspace(0, 1, 201)
        rule = [best(RULE, rate, 8, int(state.length.sum()), (0, 1, 2, 4)) for rate in rates]
        count = jnp.full((8,), 1e6, jnp.float32)
        sure = (count * rates[rule.index(k)], count)
        now = dataclasses.replace(jax.tree.map(jnp.copy, state), draft=(jax.tree.map(jnp.copy, state.draft[0]), sure))
        _, passes = step(decoder, now)
        assert passes == {"target": [k + 1], "draft": [5, *[1] * (k - 1)] if k else []}


@pytest.mark.slow
def test_the_text_stays_whatever_is_drafted(decoder):
    """Nothing at first, until the context makes target passes dear; by then the draft model is many tokens after."""
    state = start(decoder, MIXED, model=MODEL)
    lengths, behind = [], []
    while not bool(state.done.all()):
        lengths.append(chosen(state))
        behind.append(int(jnp.max(state.length - state.draft[0].length)))
        state, passes = step(decoder, state)
        assert passes["target"] == [lengths[-1] + 1] and (passes["draft"] == []) == (lengths[-1] == 0)
    same(texts(state), plain())
    first = np.argmax(np.asarray(lengths) > 0)
    assert first > 5 and behind[first] == first + 1 > 5


def test_what_it_cannot_be():
    with pytest.raises(ValueError, match="goodput needs times of at least 0"):
        Goodput(draft_pass=-1.0)
    with pytest.raises(ValueError, match="rejection verifier takes drafters whose rows draft on their own"):
        specjax.speculative(TARGET, adaptive(ModelDrafter(DRAFT), Goodput(), 4), Rejection())


def test_its_line_of_text():
    """The rule's fields stand beside the drafter's; what neither has is refused. A look-up's preset chooses no tree."""
    made = parse("drafter", REGISTRY, "sam:preset=paper,rule=goodput,draft_pass=0")
    assert made.drafter.fields["length"] == 59 and made.rule == Goodput(draft_pass=0.0)
    made = parse("drafter", REGISTRY, "draft:model=tiny-draft,rule=goodput,length=4,target_pass=3")
    assert (made.rule, made.length, made.drafter.asked) == (Goodput(target_pass=3.0), 4, "tiny-draft")
    for line, why in (
        ("draft:rule=frob", "unknown rule 'frob'; choose confidence, online, goodput"),
        ("draft:rule=goodput,cost=1", "has no field 'cost'; it has model, rule, length, draft_pass"),
        ("draft:rule=goodput,expander=top_k", "has no field 'expander'"),
        ("diffusion_draft:rule=goodput", "both have a field 'decay'"),
        ("prompt_lookup:rule=goodput,expander=chain", "has no field 'expander'"),
    ):
        with pytest.raises(ValueError, match=why):
            parse("drafter", REGISTRY, line)


@pytest.mark.slow
def test_a_line_loads():
    model = specjax.models.load("tiny")
    drafter, own = build_drafter("eagle1:rule=online,length=3", model)
    assert drafter == adaptive(drafter.drafter, Online(), 3) and own["rule"] is None and "head" not in own
