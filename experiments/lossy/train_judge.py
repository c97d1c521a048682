"""Trains the head of `judge` for a target that answers `specjax.tasks`:
`python experiments/lossy/train_judge.py --output FOLDER`.

Along the target's own right answers the draft model says at every token what it would have written, its likeliest token and a
drawn one. Where that is another token than the target's, the target goes on greedily after it, and the task's checker
says whether the answer is right all the same: that is the token's label. The head is fitted to what the target makes of
these tokens by cross-entropy, each of the two labels with half of the weight.
"""

import argparse
import dataclasses
import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from specjax import Engine, models
from specjax.draft.heads.folder import save_head
from specjax.evaluate.statistics import auroc
from specjax.lm import Block, Wants
from specjax.tasks import Mixture, check, messages
from specjax.verify import Judge
from specjax.verify.judge import score

PROMPT, ANSWER, ROWS = 160, 64, 16
"""Tokens of the longest prompt and answer that are used, and texts that are read together."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """A question whose answers can be checked.

    Attributes:
      family: its kind, for statistics.
      messages: what is asked.
      right: whether a text is a right answer.
    """

    family: str
    messages: list[dict[str, str]]
    right: Callable[[str], bool]


@dataclasses.dataclass(frozen=True)
class Token:
    """A drafted token that is not the target's.

    Attributes:
      question: whose answer it stands in.
      prompt: that question's tokens.
      before: the answer's tokens before it.
      token: its id.
      feature: `[E]`, what the target makes of it, after the final norm.
    """

    question: Asked
    prompt: tuple[int, ...]
    before: tuple[int, ...]
    token: int
    feature: np.ndarray


def right_answers(engine: Engine, questions: list[Asked]) -> list[tuple[Asked, tuple[int, ...], list[int]]]:
    """Questions that the target answers rightly: question, prompt and answer, EOS included."""
    asked = [(question, engine.encode(question.messages)) for question in questions]
    asked = [(question, ids) for question, ids in asked if len(ids) <= PROMPT]
    requests = [engine.request(list(ids), max_new_tokens=ANSWER) for _, ids in asked]
    records = engine.run(requests, batch_size=32)
    done = ((*each, record) for each, record in zip(asked, records, strict=True))
    return [
        (question, ids, record.tokens)
        for question, ids, record in done
        if record.finish_reason == "eos" and question.right(record.text)
    ]


def other_tokens(engine: Engine, draft: tuple[Any, Any], answers: list, key: jax.Array) -> list[Token]:
    """What the draft, a model and its parameters, would have written along the answers, and the target did not."""
    drafts, drafted_by = draft
    lm, params = engine.model.lm, engine.model.params

    @jax.jit
    def read(tokens, first, key):
        """Drafted tokens `[B, A, 2]` in place of those after the slots `first` `[B]`, `first` + 1 and so on of texts
        `[B, T]`, and the target's features `[B, A, 2, E]` at them."""
        rows, length = tokens.shape
        slots = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
        text = Block(tokens, slots, jnp.zeros((rows,), jnp.int32))
        at = first[:, None] + jnp.arange(ANSWER)
        q = drafts(drafted_by, text, None, wants=Wants(logits=True)).logits
        q = jnp.take_along_axis(q, at[:, :, None], axis=1)
        drafted = jnp.stack([jnp.argmax(q, axis=-1), jax.random.categorical(key, q)], axis=2).astype(jnp.int32)
        # a drafted token sees the text up to its slot, and itself
        at, flat = jnp.repeat(at, 2, axis=1), drafted.reshape(rows, -1)
        before = slots[:, None] <= at[:, :, None]
        itself = jnp.broadcast_to(jnp.eye(2 * ANSWER, dtype=bool), (rows, 2 * ANSWER, 2 * ANSWER))
        block = Block(flat, at + 1, text.length, jnp.concatenate([before, itself], axis=2))
        past = lm(params, text, None, wants=Wants()).delta
        features = lm(params, block, None, wants=Wants(final=True), past=past).final
        return drafted, features.reshape(*drafted.shape, -1)

    found = []
    for first in range(0, len(answers), ROWS):
        part = answers[first : first + ROWS]
        tokens, begins = np.zeros((ROWS, PROMPT + ANSWER), np.int32), np.zeros((ROWS,), np.int32)
        for row, (_, ids, answer) in enumerate(part):
            tokens[row, : len(ids) + len(answer)] = (*ids, *answer)
            begins[row] = len(ids) - 1
        drafted, features = jax.device_get(read(tokens, begins, jax.random.fold_in(key, first)))
        for row, (question, ids, answer) in enumerate(part):
            for at, own in enumerate(answer):
                others = {int(token): which for which, token in enumerate(drafted[row, at]) if token != own}
                for token, which in others.items():
                    found.append(Token(question, ids, tuple(answer[:at]), token, features[row, at, which]))
    return found


def labels(engine: Engine, tokens: list[Token]) -> np.ndarray:
    """Whether the answer is right that the target gives after each token, `[M]` bool."""
    ends = set(engine.model.eos_ids)
    decode = lambda ids: engine.model.tokenizer.decode([i for i in ids if i not in ends])
    going_on = [index for index, each in enumerate(tokens) if each.token not in ends]
    requests = [
        engine.request([*each.prompt, *each.before, each.token], max_new_tokens=ANSWER)
        for each in (tokens[index] for index in going_on)
    ]
    behind: dict[int, list[int]] = dict(
        zip(going_on, (record.tokens for record in engine.run(requests, batch_size=32)), strict=True)
    )
    texts = [decode([*each.before, each.token, *behind.get(index, ())]) for index, each in enumerate(tokens)]
    return np.array([each.question.right(text) for each, text in zip(tokens, texts, strict=True)])


def fit(features: np.ndarray, right: np.ndarray, steps: int, decay: float) -> Any:
    """The head's parameters, from features `[M, E]` and labels `[M]`."""
    weight = jnp.asarray(np.where(right, 0.5 / right.mean(), 0.5 / (1 - right.mean())), jnp.float32)
    x, y = jnp.asarray(features, jnp.float32), jnp.asarray(right, jnp.float32)
    params = {"kernel": jnp.zeros(x.shape[1:]), "bias": jnp.zeros((1,))}
    optimiser = optax.adam(optax.cosine_decay_schedule(0.02, steps))

    def loss(params):
        each = optax.sigmoid_binary_cross_entropy(score(params, x), y)
        return jnp.mean(weight * each) + decay * jnp.sum(params["kernel"] ** 2)

    @jax.jit
    def run(params):
        def step(carry, _):
            params, state = carry
            value, gradient = jax.value_and_grad(loss)(params)
            change, state = optimiser.update(gradient, state)
            return (optax.apply_updates(params, change), state), value

        return jax.lax.scan(step, (params, optimiser.init(params)), length=steps)

    (params, _), losses = run(params)
    print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}")
    return params


def trained(
    engine: Engine,
    draft: tuple[Any, Any],
    questions: list[Asked],
    most: int = 1600,
    steps: int = 1000,
    decay: float = 1e-2,
    seed: int = 7,
) -> Any:
    """The head's parameters; says on the way what it was fitted to, and how well it judges questions that it did not see.

    Args:
      engine: the target's.
      draft: a draft model and its parameters.
      questions: what is asked.
      most: tokens that are labelled at most.
      steps: of the fit.
      decay: weight of the kernel's square.
      seed: of drawn tokens, and of those that are labelled.
    """
    answers = right_answers(engine, questions)
    print(f"{len(answers)} of {len(questions)} questions are short enough and answered rightly", flush=True)
    tokens = other_tokens(engine, draft, answers, jax.random.key(seed))
    print(f"{len(tokens)} drafted tokens are not the target's", flush=True)
    tokens = random.Random(seed).sample(tokens, min(most, len(tokens)))
    right = labels(engine, tokens)
    features = np.stack([each.feature for each in tokens])
    # every fifth question is judged by a head that was fitted to the others; the one that is kept is fitted to all
    numbers = {id(question): number for number, question in enumerate(questions)}
    fold = np.array([numbers[id(each.question)] % 5 for each in tokens])
    chance = np.zeros(len(tokens))
    for number in range(5):
        others = fit(features[fold != number], right[fold != number], steps, decay)
        chance[fold == number] = jax.nn.sigmoid(score(others, features[fold == number]))
    print(
        f"{len(tokens)} tokens, {right.mean():.1%} right; by heads that did not see their questions: {auroc(chance, right)}"
    )
    for family in dict.fromkeys(question.family for question in questions):
        own = np.array([each.question.family == family for each in tokens])
        print(f"  {family}: {own.sum()} tokens, {right[own].mean():.1%} right" if own.any() else f"  {family}: none")
    for threshold in (0.5, 0.7, 0.9):
        kept = chance > threshold
        print(f"  above {threshold}: {kept.mean():.1%} kept, {right[kept].mean():.1%} of them right")
    return fit(features, right, steps, decay)


def main() -> None:
    """Asks, labels, fits and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, help="folder of the head")
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--draft", default="tiny-draft")
    parser.add_argument("--questions", type=int, default=600)
    parser.add_argument("--tokens", type=int, default=1600, help="at most so many are labelled")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--decay", type=float, default=1e-2, help="weight of the kernel's square")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    engine = Engine(options.target, drafter=f"draft:model={options.draft}", dtype="float32")
    draft = models.load(options.draft, dtype="float32")
    drawn = itertools.islice(Mixture(options.seed, levels=(1, 2)).stream(), options.questions)
    questions = [Asked(each.family, messages(each), partial(check, each)) for each in drawn]
    how = options.tokens, options.steps, options.decay, options.seed
    params = trained(engine, (draft.lm, draft.params), questions, *how)
    save_head(options.output, Judge.about.name, {}, params, engine.model, "float16")


if __name__ == "__main__":
    main()
