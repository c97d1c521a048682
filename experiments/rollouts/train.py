"""The shipped target learns its own tasks by GRPO, and every decoder writes each update's samples once, with a clock.

OMP_NUM_THREADS=1 taskset -c 0 python -m experiments.rollouts.train    # results.json, rollouts.png, tables of README.md
python -m experiments.rollouts.train --show                            # the picture and the tables again

Seconds are those that this process had the processor for: other work on the machine hardly changes them.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import specjax
from experiments.rollouts.report import HERE, finish, shown
from specjax import tasks
from specjax.draft.eagle3.objective import TrainEagle3
from specjax.models.model import Model
from specjax.objectives.base import Batch
from specjax.rollouts import Rollout, token_logprobs
from specjax.train.loop import Settings, TrainState
from specjax.train.loop import update as fit

PyTree = Any
Asked = list[tuple[tasks.Question, list[int]]]
"""Questions, and the ids of their prompts."""

FAMILIES, LEVELS = ("lists", "fill"), (2, 3)
RATE = 2e-5
"""Of the target."""
HEAD = Settings(10**6, learning_rate=2e-4)
"""Of the head: so many steps that its rate stays."""
DECODERS = {"plain": "none", "suffix": "suffix:piece=64", "eagle3, stale": "eagle3", "eagle3, refreshed": "eagle3"}
"""The drafter of each."""
REFRESHED = "eagle3, refreshed"
UNTIMED = 2
"""The first updates, in which programs are compiled."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a run.

    Attributes:
      updates: of the target.
      prompts: questions of an update.
      group: samples of each.
      new: tokens of a sample at most.
      longest: tokens of a prompt at most; no longer one is asked.
      every: updates between two refreshes of the head.
      fits: steps of a refresh.
      held_out: batches of held-out questions, before and after.
    """

    updates: int = 22
    prompts: int = 4
    group: int = 8
    new: int = 48
    longest: int = 64
    every: int = 5
    fits: int = 2
    held_out: int = 8

    @property
    def rows(self) -> int:
        """Samples of an update."""
        return self.prompts * self.group

    @property
    def columns(self) -> int:
        """Tokens of the longest text."""
        return self.longest + self.new


# ---- questions --------------------------------------------------------------------------------------------------------


def asked_of(questions: Iterable[tasks.Question], count: int, tokenizer: Any, longest: int) -> Asked:
    """The first questions whose prompts are short enough."""
    found: Asked = []
    for question in questions:
        chat = tasks.messages(question)
        ids = list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])
        found += [(question, ids)] if len(ids) <= longest else []
        if len(found) == count:
            return found
    raise ValueError(f"fewer than {count} questions have at most {longest} tokens")


def prompts_of(asked: Asked, group: int, seed: int, model: Model, sizes: Sizes) -> specjax.Prompts:
    """Rows for `group` samples of every question, always of as many columns."""
    ids = [own for _, own in asked for _ in range(group)]
    prompts = specjax.Prompts.of(ids, sizes.new, seed=seed, eos=model.eos_ids, temperature=1.0)
    wide = jnp.pad(prompts.tokens, ((0, 0), (0, sizes.longest - prompts.tokens.shape[1])))
    return dataclasses.replace(prompts, tokens=wide)


def rewards_of(found: Rollout, asked: Asked, tokenizer: Any, sizes: Sizes) -> np.ndarray:
    """`[questions, samples]`: 1 for a right answer, otherwise 0."""
    own = found.completions(sizes.new, end=False)
    counted = zip(*jax.device_get((own.tokens, own.mask.sum(axis=1))), strict=True)
    texts = [tokenizer.decode(row[:count].tolist()) for row, count in counted]
    group = len(texts) // len(asked)
    right = [tasks.check(asked[i // group][0], text) for i, text in enumerate(texts)]
    return np.asarray(right, np.float32).reshape(-1, group)


# ---- what learns ------------------------------------------------------------------------------------------------------

optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(RATE))


@functools.partial(jax.jit, static_argnums=(0,))
def update(lm: Any, target: PyTree, moments: PyTree, batch: Batch, rewards: jax.Array) -> tuple[PyTree, PyTree]:
    """One step of GRPO: the target and its moments after it.

    It is the only one on its samples, so every ratio of new to old probabilities is 1, and nothing is clipped.

    Args:
      lm: the model.
      target: its parameters.
      moments: the optimiser's state.
      batch: samples `[R, L]`.
      rewards: `[questions, samples]`.
    """
    means, spread = rewards.mean(axis=1, keepdims=True), rewards.std(axis=1, keepdims=True)
    advantages = ((rewards - means) / (spread + 1e-4)).reshape(-1, 1)

    def loss(target):
        gain = advantages * token_logprobs(lm, target, batch.tokens)
        return -jnp.sum(jnp.where(batch.mask, gain, 0.0)) / jnp.sum(batch.mask)

    changes, moments = optimizer.update(jax.grad(loss)(target), moments, target)
    return optax.apply_updates(target, changes), moments


class Refresher:
    """Fits a head to the newest target, on the samples since the last time."""

    def __init__(self, drafter: Any, draft: PyTree):
        self.objective = TrainEagle3(drafter=drafter, unroll=3)
        self.state = TrainState.begun(HEAD, jax.tree.map(lambda x: jnp.array(x, jnp.float32), draft))
        self.kept: list[Batch] = []

    def refreshed(self, target: PyTree, steps: int) -> PyTree:
        """The head's parameters after some steps on the samples that were kept."""
        for number in range(steps):
            self.state, _ = fit(self.objective, HEAD, self.state, target, self.kept[number % len(self.kept)])
        self.kept.clear()
        return jax.tree.map(jnp.copy, self.state.params)  # the next step takes its own away


# ---- what is measured -------------------------------------------------------------------------------------------------


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """What a call returns, and the seconds of this process until it is there."""
    began = time.process_time()
    found = jax.block_until_ready(call())
    return found, time.process_time() - began


@dataclasses.dataclass
class Contestant:
    """A decoder, its drafter's parameters and what its rows have learnt."""

    decoder: Any
    draft: PyTree
    learnt: PyTree = None

    def rollout(self, target: PyTree, prompts: specjax.Prompts, group: int, sizes: Sizes) -> Rollout:
        """Samples of the prompts."""
        capacity = self.decoder.buffer(sizes.columns + self.decoder.slack)
        params = {"target": target, "draft": self.draft}
        return specjax.rollout(self.decoder, params, prompts, group=group, capacity=capacity, learnt=self.learnt)


def contestants_of(model: Model) -> dict[str, Contestant]:
    """The decoders, all over the same target."""
    engines = {line: specjax.Engine(model, drafter=line) for line in set(DECODERS.values())}
    return {name: Contestant(engines[line].decoder, engines[line].params["draft"]) for name, line in DECODERS.items()}


def held_out(plain: Contestant, target: PyTree, model: Model, sizes: Sizes) -> list[int]:
    """Of each held-out question, whether a sample answers it."""
    count = sizes.held_out * sizes.rows
    pools = [tasks.generate(name, level=level, seed=3, count=count // 2) for name in FAMILIES for level in LEVELS]
    mixed = (question for questions in zip(*pools, strict=True) for question in questions)
    asked, right = asked_of(mixed, count, model.tokenizer, sizes.longest), []
    for number in range(sizes.held_out):
        part = asked[number * sizes.rows : (number + 1) * sizes.rows]
        found = plain.rollout(target, prompts_of(part, 1, number, model, sizes), 1, sizes)
        right += rewards_of(found, part, model.tokenizer, sizes).ravel().astype(int).tolist()
    return right


def sampled(
    every: dict[str, Contestant], target: PyTree, prompts: specjax.Prompts, number: int, sizes: Sizes
) -> tuple[Rollout, dict[str, Any]]:
    """Plain decoding's samples, and what each decoder needed for the same; they take turns at being first."""
    names, found, seconds = list(every), {}, {}
    for name in names[number % len(names) :] + names[: number % len(names)]:
        one = every[name]
        found[name], seconds[name] = timed(lambda one=one: one.rollout(target, prompts, sizes.group, sizes))
        one.learnt = found[name].learnt
    plain, rows = found["plain"], {}
    for name in names:
        own = found[name]
        new, width = own.lengths - own.prompt_lengths, sizes.columns
        rows[name] = {
            "seconds": round(seconds[name], 4),
            "passes": int(own.steps.max()),
            "tokens_per_step": round(float(new.sum() / own.steps.sum()), 4),
            "other_texts": int((own.tokens[:, :width] != plain.tokens[:, :width]).any(axis=1).sum()),
        }
    return plain, rows


def measured(sizes: Sizes) -> dict[str, Any]:
    """A row for each update, with rewards, seconds and steps; and the right answers before and after."""
    model = specjax.load("tiny", dtype="float32")
    target, moments, every, rows = model.params, optimizer.init(model.params), contestants_of(model), []
    refresher = Refresher(every[REFRESHED].decoder.drafter, every[REFRESHED].draft)
    before = held_out(every["plain"], target, model, sizes)
    for number in range(sizes.updates):
        questions = tasks.Mixture(7, FAMILIES, LEVELS).stream(number * 100)
        asked = asked_of(questions, sizes.prompts, model.tokenizer, sizes.longest)
        prompts = prompts_of(asked, sizes.group, number, model, sizes)
        found, decoders = sampled(every, target, prompts, number, sizes)
        rewards = rewards_of(found, asked, model.tokenizer, sizes)
        batch = Batch(found.tokens[:, : sizes.columns], found.mask[:, : sizes.columns])
        row: dict[str, Any] = {"update": number, "reward": float(rewards.mean()), "decoders": decoders}
        step = functools.partial(update, model.lm, target, moments, batch, jnp.asarray(rewards))
        (target, moments), row["update_seconds"] = timed(step)
        refresher.kept.append(batch)
        if len(refresher.kept) == sizes.every:
            refresh = functools.partial(refresher.refreshed, target, sizes.fits)
            every[REFRESHED].draft, row["refresh_seconds"] = timed(refresh)
        rows.append(row)
        spent = ", ".join(f"{name} {own['seconds']:.2f} s" for name, own in decoders.items())
        print(f"{number:3d}: reward {row['reward']:.3f}, {spent}", flush=True)
    right = {"before": before, "after": held_out(every["plain"], target, model, sizes)}
    return {"sizes": dataclasses.asdict(sizes), "untimed": UNTIMED, "held_out": right, "rows": rows}


def main() -> None:
    """Trains, and writes what it measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=Sizes.updates)
    parser.add_argument("--output", type=Path, default=HERE, help="folder of results.json, rollouts.png and README.md")
    parser.add_argument("--show", action="store_true", help="measure nothing")
    asked = parser.parse_args()
    if asked.show:
        return shown(asked.output)
    finish(asked.output, measured(Sizes(updates=asked.updates)))


if __name__ == "__main__":
    main()
