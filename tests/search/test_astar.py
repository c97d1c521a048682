"""A*: against Dijkstra on graphs, and its texts against whole passes of the model."""

import dataclasses
import heapq

import jax
import numpy as np
import pytest
from support.margin import teacher_forced

import specjax
from specjax import cli
from specjax.models import LlamaLM, Model, llama_config
from specjax.search import AStar, Partial, Step, steps_ahead
from specjax.search.frontier import Frontier, Node, best_first
from specjax.search.writer import Writer

PROMPTS = [[3, 8, 13], [1, 2, 3, 4, 5], [20] * 18, [11, 12]]
STOPS = (4, 5, 6)
OPTIONS = {"max_new_tokens": 24, "temperature": 1.0, "seed": 3}
METHOD = AStar(samples=3, budget=12, width=4, separator=STOPS, step_tokens=6)


def graph(seed, unit):
    """Edges of a random graph whose last place can be reached, by where they begin."""
    rng = np.random.default_rng(seed)
    edges = {at: {} for at in range(30)}
    for at in range(29):
        edges[at][at + 1] = 1 if unit else 9
        for to in rng.integers(0, 30, 3):
            edges[at][int(to)] = 1 if unit else int(rng.integers(1, 10))
    return edges


def dijkstra(edges):
    """The cost of the cheapest way from the first place to the last."""
    heap, known = [(0, 0)], {}
    while heap:
        cost, at = heapq.heappop(heap)
        if at not in known:
            known[at] = cost
            for to, more in edges[at].items():
                heapq.heappush(heap, (cost + more, to))
    return known[29]


def walked(graphs, kind=Frontier, width=None, ahead=lambda at: 0.0):
    frontiers = [kind(width) for _ in graphs]
    for frontier in frontiers:
        frontier.push(Node(0, 0.0, ahead(0)))

    def expand(chosen):
        return [
            [Node(to, node.cost + more, ahead(to), to == 29) for to, more in graphs[which][node.state].items()]
            for which, node in chosen
        ]

    return best_first(frontiers, expand, 1000)


class Deepest(Frontier):
    """A fault: the newest node goes on."""

    def peek(self, goals=False):
        return max(self.open.values(), default=(0, None), key=lambda pair: pair[0])[1]


@pytest.mark.parametrize("unit", (True, False))
def test_without_a_heuristic_it_is_dijkstra(unit):
    graphs = [graph(seed, unit) for seed in range(6)]
    wanted = [dijkstra(edges) for edges in graphs]
    got = walked(graphs)
    assert [outcome.node.cost for outcome in got] == wanted and all(outcome.found for outcome in got)
    assert [outcome.node.cost for outcome in walked(graphs, Deepest)] != wanted
    # a heuristic that never says too much finds the same, with no more expanded
    least = 1 / 29  # an edge goes at most from one end to the other
    told = walked(graphs, ahead=lambda at: least * (29 - at))
    assert [outcome.node.cost for outcome in told] == wanted
    assert sum(o.expanded for o in told) <= sum(o.expanded for o in got)


def test_a_narrow_frontier_drops_the_worst():
    dropped = []
    frontier = Frontier(2, dropped.append)
    for state, cost in (("a", 3.0), ("b", 1.0), ("c", 2.0), ("b", 5.0), ("b", 0.5)):
        frontier.push(Node(state, cost))
    assert [(node.state, node.cost) for node in dropped] == [("a", 3.0), ("b", 5.0), ("b", 1.0)]
    assert [frontier.pop().cost, frontier.pop().cost, frontier.pop()] == [0.5, 2.0, None]


@pytest.fixture(scope="module")
def toy():
    """A model of random weights that ends texts and steps after a few tokens."""
    lm = LlamaLM(llama_config(24, 16, 24, 1, 2, 1, 8, max_position_embeddings=256))
    params = jax.tree.map(lambda x: 2 * x, lm.init(jax.random.key(0)))
    return Model(lm, params, None, (7, 9), "toy", None, np.dtype("float32"))


@pytest.fixture(scope="module")
def found(toy):
    return METHOD(toy, PROMPTS, batch_size=2, **OPTIONS)


def judged(toy, record, prompt):
    """The cost of a record's text by one whole pass, and the largest difference to what its steps say."""
    ids = [*prompt, *record.tokens]
    dists = np.asarray(jax.nn.log_softmax(teacher_forced(toy.lm, toy.params, ids), axis=-1))
    at, total, worst = len(prompt), 0.0, 0.0
    for step in record.steps:
        own = -np.mean([dists[i - 1, ids[i]] for i in range(at, at + len(step.tokens))])
        total, worst, at = total + own, max(worst, abs(own - step.score)), at + len(step.tokens)
    assert at == len(ids)
    return total, worst


@pytest.mark.slow
def test_caches_are_those_of_the_texts(toy, found, monkeypatch):
    """What steps cost is what the model gives them after all that is before them; in a pool that mixes rows up it is not."""
    assert sum(len(record.steps) > 2 for record in found) >= 2
    for record, prompt in zip(found, PROMPTS, strict=True):
        total, worst = judged(toy, record, prompt)
        assert worst < 1e-4 and record.score == pytest.approx(-total, abs=1e-3)
        assert all(set(step.tokens[:-1]).isdisjoint({*STOPS, 7, 9}) for step in record.steps)
        assert record.finish_reason == ("eos" if record.tokens[-1] in (7, 9) else "budget")
        assert record.passes >= len(record.tokens)
    keep = Writer.keep
    monkeypatch.setattr(Writer, "keep", lambda self, pool, slots: keep(self, pool, np.roll(slots, 1)))
    mixed = METHOD(toy, PROMPTS, batch_size=2, **OPTIONS)
    assert max(judged(toy, record, prompt)[1] for record, prompt in zip(mixed, PROMPTS, strict=True)) > 1e-2


@pytest.mark.slow
def test_texts_depend_on_the_seed_and_not_on_the_batch(toy, found):
    said = lambda records: [(record.tokens, record.passes, len(record.steps)) for record in records]
    assert said(METHOD(toy, PROMPTS[1:], batch_size=2, **OPTIONS)) == said(found[1:])  # other neighbours, other rows
    other = METHOD(toy, PROMPTS, batch_size=2, **{**OPTIONS, "seed": 4})
    assert [record.tokens for record in other] != [record.tokens for record in found]


@pytest.mark.slow
def test_one_greedy_sample_is_plain_decoding(toy):
    """Step by step the text is the one that is written in one go."""
    method = dataclasses.replace(METHOD, samples=1, budget=100)
    greedy = {"max_new_tokens": 40}
    wanted = specjax.generate(toy, PROMPTS, drafter="none", progress=False, **greedy)
    got = method(toy, PROMPTS, **greedy)
    ended = [(a, b) for a, b in zip(got, wanted, strict=True) if b.finish_reason == "eos"]
    assert ended and all(a.tokens == b.tokens and a.passes == b.steps for a, b in ended)


def test_steps_ahead_is_the_mean_of_those_so_far():
    steps = (Step((1,), None), Step((2,), None))
    partial = Partial("", None, steps, 3.0, (), (), False)
    assert steps_ahead(6.0)([partial, dataclasses.replace(partial, ended=True)]) == [6.0, 0.0]
    assert steps_ahead(1.0)([partial]) == [0.0]


@pytest.mark.slow
def test_a_users_own_values(toy, found):
    """A cost that asks for one token, and a heuristic that wants long texts; and what they are given."""
    seen = []

    def cost(partials):
        seen.extend(partials)
        return [0.01 if 11 in p.steps[-1].tokens else 1.0 for p in partials]

    liked = dataclasses.replace(METHOD, cost=cost, budget=20)(toy, PROMPTS, batch_size=2, **OPTIONS)
    share = lambda records: np.mean([11 in step.tokens for record in records for step in record.steps])
    assert share(liked) > share(found)
    assert all(len(p.logprobs) == len(p.certainty) == len(p.steps[-1].tokens) for p in seen)
    first = [record.steps[0].tokens for record in found]
    far = lambda partials: [50.0 if p.steps[0].tokens in first else 0.0 for p in partials]
    ahead = dataclasses.replace(METHOD, heuristic=far, budget=20)(toy, PROMPTS, batch_size=2, **OPTIONS)
    assert any(record.steps[0].tokens not in first for record in ahead)
    with pytest.raises(ValueError, match="the cost must give one number per partial solution"):
        dataclasses.replace(METHOD, cost=lambda partials: [])(toy, PROMPTS[:1], **OPTIONS)


REFUSED = (
    ({"samples": 0}, {}, "samples must be a whole number from 1 on"),
    ({"cost": "prm"}, {}, "unknown cost 'prm'; choose nll, nll_sum, certainty"),
    ({}, {"temperature": 0.0}, "set a temperature, or samples to 1"),
    ({"separator": "."}, {}, "give the separator as token ids"),
    ({"separator": (24,)}, {}, "ids below 24"),
    ({}, {"prompts": "abc"}, "prompts are a list of texts"),
    ({}, {"prompts": [[1], []]}, "prompt 1: the prompt is empty"),
    ({}, {"prompts": [[99]]}, "prompt id 99 is outside the vocabulary of 24 tokens"),
    ({}, {"prompts": [[1] * 300]}, "prompt 0: the prompt has 300 tokens, .* capacity is 256"),
    ({}, {"max_new_tokens": 0}, "max_new_tokens must be a whole number from 1 on"),
    ({}, {"batch_size": 0}, "batch_size must be a whole number from 1 on"),
    ({}, {"mirostat_tau": 3.0}, "leave mirostat out"),
    ({}, {"seed": 0.5}, "seed must be a whole number, got 0.5"),
    ({}, {"heat": 3.0}, "there is no option 'heat'"),
    ({}, {"temperature": -1.0}, "temperature must be"),
)


@pytest.mark.parametrize(("fields", "options", "said"), REFUSED, ids=lambda case: str(case)[:40])
def test_what_it_does_not_take(toy, fields, options, said):
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(METHOD, **fields)(toy, **{"prompts": PROMPTS, **OPTIONS, **options})


def test_it_is_listed(capsys):
    assert cli.main(["searches"]) == 0
    said = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("astar"))
    assert "uniform-cost search without a heuristic" in said and AStar().heuristic is None


@pytest.mark.slow
def test_it_answers_a_question():
    model = specjax.models.load("tiny", dtype="float32")
    said = "A counter shows 24. Subtract 17. Add 9. What does the counter show? Show each step and end with the answer."
    method = AStar(samples=2, separator=".", heuristic=steps_ahead(4.0))
    (record,) = method(model, [[{"role": "user", "content": said}]], temperature=0.7)
    assert record.finish_reason == "eos" and "".join(step.text for step in record.steps) == record.text
    assert record.text.startswith(" Step 1: 24 - 17 =")
    with pytest.raises(ValueError, match="no token of tiny holds 'qqq'"):
        dataclasses.replace(method, separator="qqq")(model, ["a"], temperature=0.7)
