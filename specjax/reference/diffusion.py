"""Oracle for masked-diffusion decoding: one row, plain loops, float64 scores."""

from collections.abc import Callable, Sequence

import numpy as np

Law = np.ndarray
"""`[V]` probabilities."""
Picker = Callable[[dict[int, tuple[int, Law, float]], int, int], set[int]]
"""From {position: (token, law, uniform)} of a block's open positions, the passes over it so far and how many were open when it
began, to the positions to commit."""


def score(rule: str, token: int, law: Law, uniform: float) -> float:
    """Oracle: how sure a prediction is."""
    if rule == "low_confidence":
        return float(law[token])
    if rule == "margin":
        first, second = np.sort(law)[::-1][:2]
        return float(first - second)
    if rule == "entropy":
        some = law[law > 0]
        return float((some * np.log(some)).sum())
    return uniform


def surest(scores: dict[int, float], count: int) -> set[int]:
    """Oracle: the `count` positions of the largest scores, ties to the lower position."""
    return set(sorted(scores, key=lambda at: (-scores[at], at))[:count])


def fixed(steps: int, rule: str) -> Picker:
    """Oracle: LLaDA's schedule, `steps` passes a block (0: one token a pass)."""

    def pick(guesses, step, entry):
        passes = steps or entry
        count = entry // passes + (1 if step < entry % passes else 0)
        return surest({at: score(rule, *guess) for at, guess in guesses.items()}, count)

    return pick


def threshold(tau: float) -> Picker:
    """Oracle: every prediction of at least `tau`."""
    return lambda guesses, step, entry: {at for at, (token, law, _) in guesses.items() if law[token] >= tau}


def factor(f: float) -> Picker:
    """Oracle: the n surest while (n + 1)(1 - c_n) <= f."""

    def pick(guesses, step, entry):
        scores = {at: float(law[token]) for at, (token, law, _) in guesses.items()}
        n = 0
        for c in sorted(scores.values(), reverse=True):
            if (n + 2) * (1 - c) > f:
                break
            n += 1
        return surest(scores, n)

    return pick


def entropy_bound(bound: float) -> Picker:
    """Oracle: every prediction of at most so much entropy, at least the one of the least."""

    def pick(guesses, step, entry):
        scores = {at: score("entropy", *guess) for at, guess in guesses.items()}
        return {at for at, value in scores.items() if -value <= bound} or surest(scores, 1)

    return pick


def local_leap(anchor: float, relaxed: float, radius: int) -> Picker:
    """Oracle: anchors, and what is nearly as sure around them."""

    def pick(guesses, step, entry):
        scores = {at: float(law[token]) for at, (token, law, _) in guesses.items()}
        anchors = {at for at, c in scores.items() if c >= anchor}
        near = {at for at, c in scores.items() if c >= relaxed and any(abs(at - a) <= radius for a in anchors)}
        return anchors | near

    return pick


def generate(
    logits_of: Callable[[Sequence[int]], np.ndarray],
    canvas: Sequence[int],
    mask_id: int,
    block_length: int,
    pick: Picker,
    *,
    shift: bool = False,
    uniforms: Callable[[int, int], float] = lambda at, step: 0.0,
    eos: Sequence[int] = (),
) -> tuple[list[int], int]:
    """Oracle: greedy semi-autoregressive unmasking.

    Args:
      logits_of: from a canvas of L tokens to logits `[L, V]`.
      canvas: known tokens, and the mask id where there is something to fill in.
      mask_id: never predicted.
      block_length: of a block; the first begins at the first open position.
      pick: the policy; where it picks nothing the most probable prediction is committed.
      shift: whether the logits of i - 1 are for i.
      uniforms: the noise of a position in a pass over its block.
      eos: ids that end the text once all before them is known.

    Returns:
      The text, up to the first of `eos`, and how many forward passes it took.
    """
    canvas = list(canvas)
    start, passes = canvas.index(mask_id), 0
    for low in range(start, len(canvas), block_length):
        block = range(low, min(low + block_length, len(canvas)))
        entry, step = sum(canvas[at] == mask_id for at in block), 0
        while any(canvas[at] == mask_id for at in block):
            logits = np.asarray(logits_of(canvas), np.float64)
            logits[:, mask_id] = -np.inf
            guesses = {}
            for at in block:
                if canvas[at] == mask_id:
                    row = logits[max(at - 1, 0) if shift else at]
                    law = np.exp(row - row.max())
                    guesses[at] = int(np.argmax(row)), law / law.sum(), uniforms(at, step)
            chosen = pick(guesses, step, entry) or surest({at: float(g[1][g[0]]) for at, g in guesses.items()}, 1)
            for at in chosen:
                canvas[at] = guesses[at][0]
            passes, step = passes + 1, step + 1
        known = canvas[start : block[-1] + 1]
        ends = [start + i + 1 for i, token in enumerate(known) if token in eos]
        if ends:
            return canvas[: ends[0]], passes
    return canvas, passes
