"""Oracle for masked-diffusion decoding: one row, plain loops, float64 scores."""

from collections.abc import Callable, Sequence

import numpy as np

Distribution = np.ndarray
"""`[V]` probabilities."""
Guesses = dict[int, tuple[int, Distribution, float]]
"""{position: (token, distribution, uniform)} of a block's open positions."""
Picker = Callable[[Guesses, int, int], set[int] | tuple[set[int], set[int]]]
"""From a block's guesses, the passes over it so far and the number of positions open when it began, to the positions to
commit.

It may return these and the positions to open again afterwards. It may change the guesses.
"""


def score(rule: str, token: int, dist: Distribution, uniform: float) -> float:
    """Oracle: how sure a prediction is."""
    if rule == "low_confidence":
        return float(dist[token])
    if rule == "margin":
        first, second = np.sort(dist)[::-1][:2]
        return float(first - second)
    if rule == "entropy":
        some = dist[dist > 0]
        return float((some * np.log(some)).sum())
    return uniform


def surest(scores: dict[int, float], count: int) -> set[int]:
    """Oracle: the `count` positions of the largest scores, ties to the lower position."""
    return set(sorted(scores, key=lambda at: (-scores[at], at))[:count])


def fixed(steps: int, rule: str) -> Picker:
    """Oracle: LLaDA's schedule, `steps` passes per block (0: one token per pass)."""

    def pick(guesses, step, entry):
        passes = steps or entry
        count = entry // passes + (1 if step < entry % passes else 0)
        return surest({at: score(rule, *guess) for at, guess in guesses.items()}, count)

    return pick


def threshold(tau: float, steps: int = 0) -> Picker:
    """Oracle: every prediction of at least `tau`; with `steps`, at least as many of the surest as in LLaDA's schedule."""

    def pick(guesses, step, entry):
        sure = {at for at, (token, dist, _) in guesses.items() if dist[token] >= tau}
        least = fixed(steps, "low_confidence")(guesses, step, entry) if steps else set()
        return sure if len(sure) >= len(least) else least

    return pick


def factor(f: float, published: bool = False) -> Picker:
    """Oracle: the n surest while (n + 1)(1 - c_n) <= f; if published, also the last one when all others pass."""

    def pick(guesses, step, entry):
        scores = {at: float(dist[token]) for at, (token, dist, _) in guesses.items()}
        n = 0
        for c in sorted(scores.values(), reverse=True):
            if (n + 2) * (1 - c) > f:
                break
            n += 1
        n = max(n, 1)
        return surest(scores, n + (published and n == len(scores) - 1))

    return pick


def entropy_bound(bound: float) -> Picker:
    """Oracle: every prediction of at most this entropy, and at least the one with the least."""

    def pick(guesses, step, entry):
        scores = {at: score("entropy", *guess) for at, guess in guesses.items()}
        return {at for at, value in scores.items() if -value <= bound} or surest(scores, 1)

    return pick


def entropy_budget(gamma: float, rule: str) -> Picker:
    """Oracle: the largest set of the surest whose entropies, without the largest, sum to at most `gamma`."""

    def pick(guesses, step, entry):
        scores = {at: score(rule, *guess) for at, guess in guesses.items()}
        entropies = {at: -score("entropy", *guess) for at, guess in guesses.items()}
        sets = (surest(scores, count) for count in range(len(scores), 0, -1))
        loss = ((chosen, [entropies[at] for at in chosen]) for chosen in sets)
        return next(chosen for chosen, each in loss if sum(each) - max(each) <= gamma)

    return pick


def local_leap(anchor: float, relaxed: float, radius: int) -> Picker:
    """Oracle: anchors, and nearly as sure predictions around them."""

    def pick(guesses, step, entry):
        scores = {at: float(dist[token]) for at, (token, dist, _) in guesses.items()}
        anchors = {at for at, c in scores.items() if c >= anchor}
        near = {at for at, c in scores.items() if c >= relaxed and any(abs(at - a) <= radius for a in anchors)}
        return anchors | near

    return pick


def credit(inner: Picker, alpha: float, beta: float, gamma: float) -> Picker:
    """Oracle: distributions raised by the tokens that earlier passes found likeliest."""
    credits: dict[int, np.ndarray] = {}

    def pick(guesses, step, entry):
        if step == 0:
            credits.clear()
        for at, (_, dist, uniform) in list(guesses.items()):
            kept = credits.get(at, np.zeros(len(dist))) * beta
            kept[int(np.argmax(dist))] += dist.max() ** gamma
            credits[at] = kept
            raised = dist * (1 + kept) ** alpha
            guesses[at] = int(np.argmax(raised)), raised / raised.sum(), uniform
        return inner(guesses, step, entry)

    return pick


def prophet(inner: Picker, early: float, middle: float, late: float) -> Picker:
    """Oracle: the whole block once its smallest gap between two likeliest logits is wide enough."""

    def pick(guesses, step, entry):
        gap = min(float(np.diff(np.log(np.sort(dist)[-2:]))[0]) for _, dist, _ in guesses.values())
        asked = early if step / entry < 0.33 else middle if step / entry < 0.67 else late
        return set(guesses) if gap >= asked else inner(guesses, step, entry)

    return pick


def hierarchy(tau: float, low: float) -> Picker:
    """Oracle: sure predictions, and the surest of each run of open positions."""

    def pick(guesses, step, entry):
        scores = {at: float(dist[token]) for at, (token, dist, _) in guesses.items()}
        runs: list[dict[int, float]] = []
        for at in sorted(scores):
            if at - 1 not in scores:
                runs.append({})
            runs[-1][at] = scores[at]
        first = {at for run in runs for at in surest(run, 1)}
        return {at for at, c in scores.items() if c >= tau or (at in first and c >= low)}

    return pick


def slow_fast(explore: int, reach: float, rest: float, tau: float) -> Picker:
    """Oracle: cycles of exploring passes, then of passes that go on until everything before the cycle's end is known.

    Positions that a pass does not see make no difference here: this one sees the whole canvas.
    """
    state: dict = {}

    def pick(guesses, step, entry):
        if step == 0:
            state.update(start=min(guesses), begin=min(guesses), passes=0, ends=[], fast=False, settled=False)
        scores = {at: float(dist[token]) for at, (token, dist, _) in guesses.items() if at >= state["begin"]}
        if not state["fast"] and not state["settled"]:
            state["ends"].append(max([at + 1 for at, c in scores.items() if c >= reach] + [state["begin"] + 1]))
            last = [end - state["start"] for end in state["ends"][-2:]]
            state["settled"] = len(last) == 2 and np.std(last) < rest
            state["end"] = state["start"] + (last[-1] if state["settled"] else int(np.mean(last)))
        inside = {at: c for at, c in scores.items() if at < state["end"] or not state["fast"]}
        sure = {at for at, c in inside.items() if c >= tau}
        chosen = sure if len(sure) > 1 else surest(inside, 1)
        state["passes"] += 1
        if state["fast"] or state["passes"] >= explore:
            over = not any(at < state["end"] for at in set(guesses) - chosen)
            if over:
                state.update(begin=state["end"], passes=0, ends=[], settled=False)
            state["fast"] = not over
        return chosen

    return pick


def dream(steps: int, rule: str, eps: float, alg_temp: float = 0.0, least: int = 1) -> Picker:
    """Oracle: Dream's linear schedule; with `alg_temp` above 0, positions are drawn by exponential races. `least` per
    pass at least.
    """
    times = np.linspace(1, eps, steps + 1)

    def pick(guesses, step, entry):
        share = 1.0 if step >= steps - 1 else 1 - times[step + 1] / times[step]
        if rule == "origin":
            chosen = {at for at, (_, _, uniform) in guesses.items() if uniform < share}
            return chosen or surest({at: -uniform for at, (_, _, uniform) in guesses.items()}, 1)
        scores = {at: score(rule, *guess) for at, guess in guesses.items()}
        if alg_temp:  # in races at rates exp(score / alg_temp), the first ones to end are a draw without replacement
            ends = {at: -np.log(guess[2]) * np.exp(-scores[at] / alg_temp) for at, guess in guesses.items()}
            scores = {at: -end for at, end in ends.items()}
        return surest(scores, max(least, int(len(scores) * share + 1e-4)))

    return pick


def dream_threshold(steps: int, tau: float) -> Picker:
    """Oracle: the surest, as many as the schedule's and those left over; of these the first and all that are sure enough."""
    left = {"over": 0}

    def pick(guesses, step, entry):
        if step == 0:
            left["over"] = 0
        scores = {at: float(dist[token]) for at, (token, dist, _) in guesses.items()}
        looked = surest(scores, max(1, left["over"] + (entry // steps if step < steps else 0)))
        chosen = surest(scores, 1) | {at for at in looked if scores[at] >= tau}
        left["over"] = len(looked - chosen)
        return chosen

    return pick


def redo(extra: int, count: int, at: float) -> Picker:
    """Oracle: one token per pass, and late in a block passes that redo the least sure."""
    written: dict[int, float] = {}

    def pick(guesses, step, entry):
        if step == 0:
            written.clear()
        first = min(max(int(at * entry), 1), max(entry - 1, 1))
        scores = {at: float(dist[token]) for at, (token, dist, _) in guesses.items()}
        chosen = surest(scores, count if first <= step < first + extra else 1)
        written.update({at: scores[at] for at in chosen})
        again: set[int] = set()
        if first <= step + 1 < first + extra:
            again = surest({at: -c for at, c in written.items()}, count)
            for at_ in again:
                del written[at_]
        return chosen, again

    return pick


def running_confidence(steps: int) -> Picker:
    """Oracle: writes all, then reopens the least sure, in earlier blocks too. For one text: it remembers all of it."""
    written: dict[int, float] = {}

    def pick(guesses, step, entry):
        written.update({at: float(dist[token]) for at, (token, dist, _) in guesses.items()})
        passes = steps or entry
        left = int(np.floor(entry * (1 - (step + 1) / passes))) if step + 1 < passes else 0
        again = surest({at: -c for at, c in written.items()}, left)
        for at in again:
            del written[at]
        return set(guesses), again

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
    idle: bool = False,
) -> tuple[list[int], int]:
    """Oracle: greedy semi-autoregressive unmasking.

    Args:
      logits_of: from a canvas of L tokens to logits `[L, V]`.
      canvas: known tokens, and the mask id at positions to fill in.
      mask_id: never predicted.
      block_length: of a block; the first begins at the first open position.
      pick: the policy; if it picks nothing, the most probable prediction is committed.
      shift: whether the logits of i - 1 are for i.
      uniforms: the noise of a position in a pass over its block.
      eos: ids that end the text once everything before them is known.
      cfg_scale: guidance away from the logits without the given tokens.
      idle: whether a pass may commit nothing.

    Returns:
      The text, up to the first of `eos`, and how many forward passes it took.
    """
    canvas = list(canvas)
    start, passes = canvas.index(mask_id), 0
    given = [token != mask_id for token in canvas]
    for low in range(start, len(canvas), block_length):
        block = range(low, min(low + block_length, len(canvas)))
        entry, step = sum(canvas[at] == mask_id for at in block), 0
        known = range(start, block[-1] + 1)  # an earlier block is only open again if a policy opens it
        while any(canvas[at] == mask_id for at in known):
            logits = np.array(logits_of(canvas), np.float64)
            if cfg_scale:
                blind = [mask_id if known else token for known, token in zip(given, canvas, strict=True)]
                without = np.asarray(logits_of(blind), np.float64)
                logits = without + (1 + cfg_scale) * (logits - without)
            logits[:, mask_id] = -np.inf
            guesses = {}
            for at in known:
                if canvas[at] == mask_id:
                    row = logits[max(at - 1, 0) if shift else at]
                    dist = np.exp(row - row.max())
                    guesses[at] = int(np.argmax(row)), dist / dist.sum(), uniforms(at, step)
            picked = pick(guesses, step, entry)
            chosen, again = picked if isinstance(picked, tuple) else (picked, set())
            for at in chosen or (set() if idle else surest({at: float(g[1][g[0]]) for at, g in guesses.items()}, 1)):
                canvas[at] = guesses[at][0]
            for at in again:
                canvas[at] = mask_id
            passes, step = passes + 1, step + 1
        ends = [at + 1 for at in known if canvas[at] in eos]
        if ends:
            return canvas[: ends[0]], passes
    return canvas, passes
