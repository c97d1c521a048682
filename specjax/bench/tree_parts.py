"""The trees that the suite `tree` tries: made of what the target accepts on some prompts."""

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np

from specjax.assembly.line import read_line, spelt
from specjax.assembly.registry import DRAFTERS, EXPANDERS
from specjax.decode import Speculate
from specjax.draft.counted import Counted
from specjax.draft.ppd.objective import TrainPPD
from specjax.draft.ppd.trees import search_states, tokens_per_step
from specjax.expand.search import most_accepted
from specjax.objectives.base import Batch
from specjax.serve.engine import Engine
from specjax.serve.request import Request, needs_of
from specjax.serve.slots import Loop, Slots
from specjax.tree import Topology

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
"""Slots beside the root that a step of a tried tree reads."""
RANKS, CUTS = 10, 32
"""Candidates of each prompt token that are counted, and at how many places of a text."""


@dataclasses.dataclass(frozen=True)
class Tried:
    """A tree to try.

    Attributes:
      line: of the drafter with this tree.
      nodes: slots that a step reads beside the root: drafted nodes, and prompt tokens of `ppd`.
      expected: tokens per step, by what was counted.
    """

    line: str
    nodes: int
    expected: float


def tried(
    asked: str, plain: Engine, drafting: Engine, requests: Sequence[Request], rows: int
) -> tuple[list[Tried], str]:
    """The trees to try, and what they are made of.

    Args:
      asked: the drafter's line.
      plain: the engine without a drafter.
      drafting: the engine with it.
      requests: on which is counted what the target accepts.
      rows: decoded together.

    Raises:
      ValueError: if the drafter's trees have no fixed shape.
    """
    of_states = "trees" in DRAFTERS[read_line(asked).name].fields
    return (of_prompt_tokens if of_states else of_nodes)(asked, plain, drafting, requests, rows)


def of_nodes(
    asked: str, plain: Engine, drafting: Engine, requests: Sequence[Request], rows: int
) -> tuple[list[Tried], str]:
    """Parts of the drafter's own tree, made of the nodes that are accepted most often; see `tried`."""
    counted = Counted(drafting.decoder.drafter)
    topology = counted.topology
    how = dataclasses.replace(cast(Speculate, drafting.decode), drafter=(counted, drafting.params["draft"]))
    accepted = tally(Engine(plain.model, decode=how, mesh=plain.mesh), requests, rows)
    steps, index = int(accepted[0]), {path: node for node, path in enumerate(topology.paths)}
    sizes = dict.fromkeys((*(size for size in SIZES if size < counted.nodes - 1), counted.nodes - 1))
    found = []
    for size in sizes:
        part = most_accepted(topology, accepted.tolist(), size + 1)
        expected = float(sum(accepted[index[path]] for path in part.paths) / steps)
        found.append(Tried(with_tree(asked, part), len(part.parents) - 1, round(expected, 4)))
    return found, f"accepted nodes counted in {steps} steps of {len(requests)} prompts"


def of_prompt_tokens(
    asked: str, plain: Engine, drafting: Engine, requests: Sequence[Request], rows: int
) -> tuple[list[Tried], str]:
    """Trees for every state of `ppd` within some numbers of slots, split between nodes and prompt tokens as is best by the
    accuracy of its prompt tokens (arXiv:2405.18628, section 4); see `tried`."""
    drafter, name = drafting.decoder.drafter, read_line(asked)
    accuracy, places = accuracy_of(drafter, drafting.params, texts(plain, requests, rows), rows)
    found: dict[str, Tried] = {}
    for size in SIZES:
        room = size + 1 - drafter.prompts * drafter.ensembles
        splits = [(nodes, (size + 1 - nodes) // drafter.ensembles) for nodes in range(2, room + 1)]
        lines = [search_states(accuracy, nodes, slots) for nodes, slots in splits]
        if lines:
            trees = max(lines, key=lambda trees: tokens_per_step(trees, accuracy))
            fields = {**name.fields, "trees": trees}
            line = f"{name.name}:" + ",".join(f"{field}={spelt(value)}" for field, value in fields.items())
            found.setdefault(trees, Tried(line, size, round(tokens_per_step(trees, accuracy), 4)))
    counted = f"candidates of {drafter.prompts} prompt tokens counted at {places} places of {len(requests)} texts"
    return list(found.values()), counted


def texts(plain: Engine, requests: Sequence[Request], rows: int) -> dict[str, np.ndarray]:
    """Prompts and what the target writes after them, as rows of a `Batch`; the written tokens are predicted."""
    records = plain.run(list(requests), batch_size=rows)
    every = [[*request.ids, *record.tokens] for request, record in zip(requests, records, strict=True)]
    shape = len(every), max(map(len, every))
    tokens, mask, documents = np.zeros(shape, np.int32), np.zeros(shape, bool), np.ones(shape, np.int32)
    for row, (ids, request) in enumerate(zip(every, requests, strict=True)):
        tokens[row, : len(ids)], documents[row, : len(ids)] = ids, 0
        mask[row, len(request.ids) : len(ids)] = True
    return {"tokens": tokens, "mask": mask, "documents": documents}


def accuracy_of(drafter: Any, params: Any, rows: dict[str, np.ndarray], size: int) -> tuple[np.ndarray, int]:
    """How often a rank's candidate of each prompt token is the target's token `[m, R]`, and at how many places."""
    objective = TrainPPD(drafter, cuts=min(CUTS, rows["tokens"].shape[1]))
    ranks = min(RANKS, drafter.target.vocab_size)
    count = jax.jit(lambda own, batch, key: objective.accuracy(own["draft"], own["target"], batch, key, ranks))
    hits, cases = np.zeros((drafter.prompts, ranks)), np.zeros(drafter.prompts)
    for at in range(0, len(rows["tokens"]), size):
        part = {name: np.resize(x[at : at + size], (size, x.shape[1])) for name, x in rows.items()}
        part["mask"][len(rows["tokens"]) - at :] = False  # a part that was filled up repeats rows
        own = count(params, Batch.placed(part, None), jax.random.key(at))
        hits, cases = hits + np.asarray(own[0]), cases + np.asarray(own[1])
    return hits / np.maximum(cases, 1)[:, None], int(cases[0])


def with_tree(line: str, topology: Topology) -> str:
    """A drafter's line with this tree in place of its own.

    >>> with_tree("stand:k=4,tree=2 | 1", Topology.from_counts("1 | 1"))
    'stand:k=4,tree=1 | 1'
    >>> with_tree("medusa:verifier=(typical:epsilon=0.3,delta=0.1)", Topology.from_counts("2"))
    'medusa:verifier="typical:epsilon=0.3,delta=0.1",expander=static,tree=2'
    """
    asked = read_line(line)
    entry = DRAFTERS[asked.name]
    given = {**(entry.published if asked.fields.get("preset") == "paper" else {}), **asked.fields}
    of_tree = {"preset", "tree", "expander"}
    if entry.expander:
        of_tree |= EXPANDERS[given.get("expander", read_line(entry.expander).name)].fields.keys() - {"coupled"}
    own = {name: value for name, value in given.items() if name not in of_tree}
    fields = own | ({"expander": "static"} if entry.expander else {}) | {"tree": topology.counts}
    return f"{asked.name}:" + ",".join(f"{name}={spelt(value)}" for name, value in fields.items())


def tally(engine: Engine, requests: Sequence[Request], rows: int) -> np.ndarray:
    """By node, how often it was accepted over all requests, `[N]`; the root's is the number of steps.

    Args:
      engine: whose drafter is a `Counted`.
      requests: to decode.
      rows: decoded together.
    """
    slots = Slots(engine.served(), rows, engine.capacity(requests), needs_of(requests).form)
    needs = dataclasses.replace(needs_of(requests), brief=False)
    loop = Loop(slots, list(requests), engine.keys(requests), needs)
    for _ in loop.turns():
        pass
    return np.asarray(loop.state.draft.accepted)
