"""A*-decoding (arXiv:2505.13672): the partial solution in steps with the lowest cost so far and ahead is extended next.

Without a heuristic, which needs a reward model, this is uniform-cost search.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from specjax.about import About
from specjax.models.text import new_text
from specjax.sampling.noise import keys_of
from specjax.search.frontier import Frontier, Node, best_first
from specjax.search.stepwise import Asked, Step, Stepwise, Written, step_ends
from specjax.search.writer import Writer
from specjax.settings import settled
from specjax.sharding.distributed import to_host


@dataclasses.dataclass(frozen=True)
class Partial:
    """The beginning of a text, for value functions.

    Attributes:
      prompt: as given.
      text: the text after it so far; None without a tokenizer.
      steps: the same, step by step.
      cost: the total cost of the steps; when the last step is to be valued, of those before it.
      logprobs: of the last step's tokens, under the model's own softmax.
      certainty: at the same places, in nats, how far the model's distribution is from the uniform one.
      ended: whether the text has ended.
    """

    prompt: Any
    text: str | None
    steps: tuple[Step, ...]
    cost: float
    logprobs: tuple[float, ...]
    certainty: tuple[float, ...]
    ended: bool


Value = Callable[[Sequence[Partial]], Sequence[float]]
"""From partial solutions, which may belong to several prompts, to a number for each."""

COSTS: dict[str, Value] = {
    "nll": lambda partials: [-math.fsum(p.logprobs) / len(p.logprobs) for p in partials],
    "nll_sum": lambda partials: [-math.fsum(p.logprobs) for p in partials],
    "certainty": lambda partials: [math.exp(-math.fsum(p.certainty) / len(p.certainty)) for p in partials],
}
"""A step's cost without a reward model: its negative log-likelihood per token, or in total, or `exp(-self-certainty)`."""


def steps_ahead(steps: float) -> Value:
    """A heuristic: for up to so many further steps, each costs the average of the steps so far.

    It may overestimate, so the first solution found need not be the cheapest.
    """

    def ahead(partials: Sequence[Partial]) -> list[float]:
        return [0.0 if p.ended else p.cost / len(p.steps) * max(0.0, steps - len(p.steps)) for p in partials]

    return ahead


@dataclasses.dataclass(frozen=True)
class AStar(Stepwise):
    """Takes the partial solution with the lowest `f = g + h` and draws several next steps for it, until it takes a
    complete one.

    `g` is the cost of its steps, and `h` a heuristic's estimate of the cost ahead. The paper's is `1 - r`, with r in
    [0, 1] from a process reward model, which is not shipped here. Without a `heuristic` h is 0, and this is
    uniform-cost search. The paper's g could not be determined; the `COSTS` are this library's.

    Every partial solution keeps its cache, so that a step costs only its own tokens. Equal steps are merged. A text's
    noise comes from the seed, the prompt and the number of draws that its search has made, so it does not depend on the
    batch.

    Attributes:
      samples: next steps that are drawn for a partial solution.
      budget: how many partial solutions of a prompt are extended, at most.
      width: how many wait, at most; if there are more, the worst are dropped.
      cost: of a step: a key of `COSTS`, or a function, which may ask a reward model. It must not be below 0, or a goal
        may be missed.
      heuristic: h. None is 0, so that the result is the cheapest text of all that were drawn (uniform-cost search).
        Otherwise from `steps_ahead`, or a function such as `lambda partials: [1 - r for r in rewards(partials)]`.
      separator: a text that the last token of a step contains, or the ids of such tokens.
      step_tokens: tokens of a step, at most.

    Raises:
      ValueError: for counts below 1, or an unknown cost.
    """

    about = About(
        "astar", "partial solutions in steps, the best goes on; uniform-cost search without a heuristic", "arXiv:2505.13672",
        "own text",
    )  # fmt: skip

    samples: int = 4
    budget: int = 32
    width: int = 16
    cost: str | Value = "nll"
    heuristic: Value | None = None
    separator: str | tuple[int, ...] = "\n\n"
    step_tokens: int = 64

    def __post_init__(self):
        for name in ("samples", "budget", "width", "step_tokens"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name} must be a whole number from 1 on, got {getattr(self, name)!r}")
        if isinstance(self.cost, str) and self.cost not in COSTS:
            raise ValueError(f"unknown cost {self.cost!r}; choose {', '.join(COSTS)}, or give a function")

    def __call__(
        self,
        model: Any,
        prompts: Sequence[Any],
        *,
        max_new_tokens: int = 128,
        seed: int = 0,
        batch_size: int = 4,
        keys: np.ndarray | None = None,
        **sampling: Any,
    ) -> list[Written]:
        """Searches for a text for every prompt and returns them in order; `score` is their negative cost.

        A prompt whose budget is spent gets the cheapest complete text that waits, or otherwise a partial one;
        `finish_reason` says so.

        Args:
          model: from `specjax.models.load`.
          prompts: a list of texts, lists of token ids or chats.
          max_new_tokens: the most new tokens for each.
          seed: determines the noise, together with a prompt.
          batch_size: prompts that are searched side by side, each with `samples` rows and `width + samples` caches.
          keys: see `Asked.of`.
          **sampling: as in `specjax.generate`; several samples need a temperature.

        Raises:
          ValueError: see `Asked.of` and `step_ends`; also for several samples of greedy steps, which would all be
            equal.
        """
        if self.samples > 1 and not sampling.get("temperature"):
            raise ValueError("several samples of a greedy step are one: set a temperature, or samples to 1")
        asked = Asked.of([model], prompts, max_new_tokens, seed, sampling, keys)
        stops, parts = step_ends(model, self.separator), asked.parts(batch_size)
        if not parts:
            return []
        lanes = len(parts[0].ids)
        writer = Writer(model, lanes * self.samples, asked, stops, logprobs=True)
        return [found for part in parts for found in _Search(self, writer, part, lanes).run()]


class _Search:
    """The searches of some prompts side by side."""

    def __init__(self, method: AStar, writer: Writer, asked: Asked, lanes: int):
        self.method, self.writer, self.asked = method, writer, asked
        self.places = method.width + method.samples  # per search, in the pool of caches
        count = len(asked.ids)
        writer.enter(asked)
        self.pool = writer.blank(lanes * self.places)
        outside = lanes * self.places
        self.pool = writer.keep(self.pool, [r * self.places if r < count else outside for r in range(writer.rows)])
        self.most = [int(most) for most in writer.most[:count]]
        self.free = [set(range(lane * self.places, (lane + 1) * self.places)) for lane in range(count)]
        self.draws, self.passes = [0] * count, [0] * count
        self.frontiers = [
            Frontier(method.width, lambda node, lane=lane: self._drop(lane, node)) for lane in range(count)
        ]
        for lane, frontier in enumerate(self.frontiers):
            self.free[lane].remove(lane * self.places)
            first = Partial(asked.prompts[lane], "", (), 0.0, (), (), False)
            frontier.push(Node((), 0.0, own=(first, lane * self.places)))

    def _drop(self, lane, node):
        self.free[lane].add(node.own[1])

    def run(self) -> list[Written]:
        """Runs all of them to their end."""
        outcomes = best_first(self.frontiers, self.expand, self.method.budget)
        found = []
        for lane, outcome in enumerate(outcomes):
            node = outcome.node
            partial = None if node is None else node.own[0]
            tokens = [] if node is None else list(node.state)
            reason = "budget" if partial is None or not partial.ended else "eos"
            score = None if node is None else -node.cost
            text = new_text(self.writer.model.tokenizer, self.asked.ids[lane], tokens)
            steps = () if partial is None else partial.steps
            found.append(
                Written(self.asked.prompts[lane], text, tokens, reason, self.passes[lane], steps=steps, score=score)
            )
        return found

    def expand(self, chosen: list[tuple[int, Node]]) -> list[list[Node]]:
        """Draws the next steps for one node of every search, values them, and keeps their caches."""
        writer, samples = self.writer, self.method.samples
        slots, ordinals = np.zeros(writer.rows, np.int64), np.zeros(writer.rows, np.int64)
        rows = np.zeros(writer.rows, bool)
        for lane, node in chosen:
            own = slice(lane * samples, (lane + 1) * samples)
            rows[own], slots[own], writer.most[own] = True, node.own[1], self.most[lane]
            ordinals[own] = (
                self.draws[lane] + 1 + np.arange(samples)
            )  # from 1 on, because 0 would give the prompt's key
            self.draws[lane] += samples
            self._drop(lane, node)  # its cache lives on in its children's
        keys = np.repeat(self.asked.keys, samples, axis=0)
        keys = np.concatenate([keys, np.zeros((writer.rows - len(keys), 2), np.uint32)])
        writer.fork(self.pool, slots, jax.device_get(_folded(*jax.device_put((keys, ordinals.astype(np.uint32))))))
        before = writer.length.copy()
        written = writer.write(rows, self.method.step_tokens)
        children = self._children(chosen, written, before)
        places = np.full(writer.rows, self.pool.length.shape[0])
        for own in children:
            for row, _, node in own:
                places[row] = node.own[1]
        self.pool = writer.keep(self.pool, places)
        return [[node for _, _, node in own] for own in children]

    def _children(self, chosen, written, before):
        """The new children of every chosen node: row, search and node.

        A child that can go no further without having ended its text is dropped, and equal children are merged.
        """
        writer, method = self.writer, self.method
        probs = to_host({name: getattr(writer.state.logprobs, name) for name in ("raw", "certainty")})
        fresh: list[tuple[int, int, tuple, Partial]] = []
        for lane, node in chosen:
            seen = set()
            for row in range(lane * method.samples, (lane + 1) * method.samples):
                tokens = tuple(written[row])
                self.passes[lane] += len(tokens)
                dead = not tokens or writer.failed[row] or (writer.over(row) and not writer.ended(row))
                if dead or tokens in seen:
                    continue
                seen.add(tokens)
                fresh.append((row, lane, tokens, self._partial(node, lane, row, tokens, before[row], probs)))
        cost = COSTS[method.cost] if isinstance(method.cost, str) else method.cost
        costs = _numbers("cost", cost, [partial for *_, partial in fresh])
        wholes = [
            dataclasses.replace(
                partial,
                cost=partial.cost + own,
                steps=(*partial.steps[:-1], dataclasses.replace(partial.steps[-1], score=own)),
            )
            for (*_, partial), own in zip(fresh, costs, strict=True)
        ]
        ahead = _numbers("heuristic", method.heuristic, wholes) if method.heuristic else [0.0] * len(wholes)
        parents = dict(chosen)
        found: dict[int, list] = {lane: [] for lane, _ in chosen}
        for (row, lane, tokens, _), whole, h in zip(fresh, wholes, ahead, strict=True):
            state = (*parents[lane].state, *tokens)
            node = Node(state, whole.cost, h, whole.ended, (whole, self.free[lane].pop()))
            found[lane].append((row, lane, node))
        return list(found.values())

    def _partial(self, node, lane, row, tokens, begin, probs):
        old, model, writer = node.own[0], self.writer.model, self.writer
        step = Step(tokens, new_text(model.tokenizer, (*self.asked.ids[lane], *node.state), tokens))
        text = new_text(model.tokenizer, self.asked.ids[lane], (*node.state, *tokens))
        span = slice(int(begin), int(begin) + len(tokens))
        own = (tuple(map(float, probs[name][row, span])) for name in ("raw", "certainty"))
        return Partial(old.prompt, text, (*old.steps, step), old.cost, *own, ended=writer.ended(row))


def _numbers(what, value, partials):
    """The numbers that a value function returns.

    Raises:
      ValueError: if that is not one number for each.
    """
    found = [float(number) for number in value(partials)] if partials else []
    if len(found) != len(partials) or any(math.isnan(number) for number in found):
        raise ValueError(
            f"the {what} must give one number per partial solution: {len(found)} for {len(partials)}, or NaN"
        )
    return found


@jax.jit
@settled
def _folded(keys, ordinals):
    """Key data `[B, 2]` of keys, each folded with a number."""
    fold = lambda key, number: jax.random.fold_in(keys_of(key), number)
    return jax.random.key_data(jax.vmap(fold)(keys, ordinals))
