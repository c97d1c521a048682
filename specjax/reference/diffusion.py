"""Oracle for masked-diffusion decoding: one row, plain loops, float64 scores."""

from collections.abc import Callable, Sequence

import numpy as np

Law = np.ndarray
"""`[V]` probabilities."""
Guesses = dict[int, tuple[int, Law, float]]
"""{position: (token, law, uniform)} of a block's open positions."""
Picker = Callable[[Guesses, int, int], set[int] | tuple[set[int], set[int]]]
"""From a block's guesses, the passes over it so far and how many positions were open when it began, to the positions to commit,
or to those and the committed ones to open again. It may change the guesses."""


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


def credit(inner: Picker, alpha: float, beta: float, gamma: float) -> Picker:
    """Oracle: laws raised by what earlier passes found likeliest."""
    credits: dict[int, np.ndarray] = {}

    def pick(guesses, step, entry):
        if step == 0:
            credits.clear()
        for at, (_, law, uniform) in list(guesses.items()):
            kept = credits.get(at, np.zeros(len(law))) * beta
            kept[int(np.argmax(law))] += law.max() ** gamma
            credits[at] = kept
            raised = law * (1 + kept) ** alpha
            guesses[at] = int(np.argmax(raised)), raised / raised.sum(), uniform
        return inner(guesses, step, entry)

    return pick


def prophet(inner: Picker, early: float, middle: float, late: float) -> Picker:
    """Oracle: the whole block once its smallest gap between two likeliest logits is wide enough."""

    def pick(guesses, step, entry):
        gap = min(float(np.diff(np.log(np.sort(law)[-2:]))[0]) for _, law, _ in guesses.values())
        third = 3 * step // entry
        return set(guesses) if gap >= (early, middle, late)[min(third, 2)] else inner(guesses, step, entry)

    return pick


def hierarchy(tau: float, low: float) -> Picker:
    """Oracle: what is sure, and the surest of each run of open positions."""

    def pick(guesses, step, entry):
        scores = {at: float(law[token]) for at, (token, law, _) in guesses.items()}
        runs: list[dict[int, float]] = []
        for at in sorted(scores):
            if at - 1 not in scores:
                runs.append({})
            runs[-1][at] = scores[at]
        first = {at for run in runs for at in surest(run, 1)}
        return {at for at, c in scores.items() if c >= tau or (at in first and c >= low)}

    return pick


def slow_fast(explore: int, reach: float, rest: float, tau: float) -> Picker:
    """Oracle: cycles of one token a pass, then of all that is sure before the cycle's end."""
    state = {"explored": 0, "ends": [0, 0], "end": None}

    def pick(guesses, step, entry):
        if step == 0:
            state.update(explored=0, ends=[0, 0], end=None, start=min(guesses))
        scores = {at: float(law[token]) for at, (token, law, _) in guesses.items()}
        far = max([at + 1 for at, c in scores.items() if c >= reach] + [min(scores) + 1])
        if state["end"] is None:
            chosen = surest(scores, 1)
            state["explored"] += 1
            state["ends"] = [state["ends"][1], far]
            if state["explored"] >= explore and np.std(state["ends"]) < rest:
                if any(at < far for at in set(scores) - chosen):
                    state["end"] = far
            return chosen
        inside = {at: c for at, c in scores.items() if at < state["end"]}
        sure = {at for at, c in inside.items() if c >= tau}
        chosen = sure if len(sure) > 1 else surest(inside, 1)
        state["explored"] = 0
        if not set(inside) - chosen:
            state["end"] = None
        return chosen

    return pick


def dream(steps: int, rule: str, eps: float, alg_temp: float = 0.0) -> Picker:
    """Oracle: Dream's linear schedule, with positions drawn by exponential races where `alg_temp` is above 0."""
    times = np.linspace(1, eps, steps + 1)

    def pick(guesses, step, entry):
        share = 1.0 if step >= steps - 1 else 1 - times[step + 1] / times[step]
        if rule == "origin":
            chosen = {at for at, (_, _, uniform) in guesses.items() if uniform < share}
            return chosen or surest({at: -uniform for at, (_, _, uniform) in guesses.items()}, 1)
        scores = {at: score(rule, *guess) for at, guess in guesses.items()}
        if alg_temp:  # of races at rates exp(score / alg_temp) the first ones to end are a draw without replacement
            ends = {at: -np.log(guess[2]) * np.exp(-scores[at] / alg_temp) for at, guess in guesses.items()}
            scores = {at: -end for at, end in ends.items()}
        return surest(scores, max(1, int(len(scores) * share + 1e-4)))

    return pick


def remdm(extra: int, count: int, at: float) -> Picker:
    """Oracle: one token a pass, and late in a block passes that redo the least sure."""
    written: dict[int, float] = {}

    def pick(guesses, step, entry):
        if step == 0:
            written.clear()
        first = min(max(int(at * entry), 1), max(entry - 1, 1))
        scores = {at: float(law[token]) for at, (token, law, _) in guesses.items()}
        chosen = surest(scores, count if first <= step < first + extra else 1)
        written.update({at: scores[at] for at in chosen})
        again: set[int] = set()
        if first <= step + 1 < first + extra:
            again = surest({at: -c for at, c in written.items()}, count)
            for at_ in again:
                del written[at_]
        return chosen - again, again - chosen

    return pick


def running_confidence(steps: int) -> Picker:
    """Oracle: writes all, then opens the least sure again."""
    written: dict[int, float] = {}

    def pick(guesses, step, entry):
        if step == 0:
            written.clear()
        written.update({at: float(law[token]) for at, (token, law, _) in guesses.items()})
        passes = steps or entry
        left = sum(entry // passes + (1 if t < entry % passes else 0) for t in range(step + 1, passes))
        again = surest({at: -c for at, c in written.items()}, left)
        return set(guesses) - again, again - set(guesses)

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
    cfg_scale: float = 0.0,
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
      cfg_scale: guidance away from the logits without what was given.

    Returns:
      The text, up to the first of `eos`, and how many forward passes it took.
    """
    canvas = list(canvas)
    start, passes = canvas.index(mask_id), 0
    given = [token != mask_id for token in canvas]
    for low in range(start, len(canvas), block_length):
        block = range(low, min(low + block_length, len(canvas)))
        entry, step = sum(canvas[at] == mask_id for at in block), 0
        while any(canvas[at] == mask_id for at in block):
            logits = np.array(logits_of(canvas), np.float64)
            if cfg_scale:
                blind = [mask_id if known else token for known, token in zip(given, canvas, strict=True)]
                without = np.asarray(logits_of(blind), np.float64)
                logits = without + (1 + cfg_scale) * (logits - without)
            logits[:, mask_id] = -np.inf
            guesses = {}
            for at in block:
                if canvas[at] == mask_id:
                    row = logits[max(at - 1, 0) if shift else at]
                    law = np.exp(row - row.max())
                    guesses[at] = int(np.argmax(row)), law / law.sum(), uniforms(at, step)
            picked = pick(guesses, step, entry)
            chosen, again = picked if isinstance(picked, tuple) else (picked, set())
            for at in chosen or surest({at: float(g[1][g[0]]) for at, g in guesses.items()}, 1):
                canvas[at] = guesses[at][0]
            for at in again:
                canvas[at] = mask_id
            passes, step = passes + 1, step + 1
        known = canvas[start : block[-1] + 1]
        ends = [start + i + 1 for i, token in enumerate(known) if token in eos]
        if ends:
            return canvas[: ends[0]], passes
    return canvas, passes
