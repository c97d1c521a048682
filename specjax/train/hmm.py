"""`specjax train hmm`: a hidden Markov model of a model's texts, by expectation maximisation (Baum and Welch).

In shapes `H` denotes hidden states, `V` the vocabulary, `N` texts, `R` texts of a batch, `T` tokens of a text.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import models, programs
from specjax.arrays import Array
from specjax.constrain import Hmm, Vocabulary
from specjax.constrain.hmm import words_of
from specjax.models import DEFAULT_MODEL
from specjax.objectives.base import Kind
from specjax.serve.options import check_least
from specjax.serve.record_bar import bar_fits
from specjax.settings import settled
from specjax.sharding import make_mesh
from specjax.terminal import bad_input, flag, note
from specjax.train import data, prompts
from specjax.train.options import HmmOptions, length_of
from specjax.train.task import check_encoder
from specjax.warpers.lists import rounded

SMOOTH = 1e-3
"""The share of each distribution that is spread evenly, so that nothing is impossible."""
_EXACT = jax.lax.Precision.HIGHEST


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counts:
    """Expected counts over texts, from which the next parameters follow.

    Attributes:
      initial: `[H]`.
      transition: `[H, H]`.
      emission: `[V, H]`.
      log_likelihood: `[]`, of all tokens, of the parameters that counted.
    """

    initial: Array
    transition: Array
    emission: Array
    log_likelihood: Array


def start(texts: list[np.ndarray], states: int, vocab: int, seed: int) -> tuple[Array, Array, Array]:
    """The first parameters: each state writes tokens nearly as often as the texts do, with noise by which states differ."""
    rng = np.random.default_rng(seed)
    rows = lambda x: jnp.asarray(x / x.sum(axis=-1, keepdims=True), jnp.float32)
    counts = np.bincount(np.concatenate(texts), minlength=vocab)
    return (
        rows(rng.gamma(1.0, size=states)),
        rows(rng.gamma(1.0, size=(states, states))),
        rows((counts + 1 / vocab) * rng.gamma(1.0, size=(states, vocab))),
    )


@jax.jit
def counted(initial: Array, transition: Array, emission: Array, tokens: Array, length: Array) -> Counts:
    """The expectation step for some texts, with each forward and backward sum scaled to 1.

    Args:
      initial: `[H]`.
      transition: `[H, H]`.
      emission: `[H, V]`.
      tokens: `[R, T]` int32.
      length: `[R]` int32; 0 for a row without a text.
    """
    written = emission.T[tokens]  # [R, T, H]
    real = jnp.arange(tokens.shape[1])[None] < length[:, None]
    dot = functools.partial(jnp.matmul, precision=_EXACT)

    def forward(before, given):
        own, here = given
        joint = before * own
        scale = jnp.maximum(joint.sum(axis=1), jnp.finfo(jnp.float32).tiny)
        filtered = joint / scale[:, None]
        after = jnp.where(here[:, None], dot(filtered, transition), before)
        return after, (filtered, jnp.where(here, jnp.log(scale), 0.0), before)

    begin = jnp.broadcast_to(initial, (tokens.shape[0], len(initial)))
    steps = jnp.swapaxes(written, 0, 1), real.T
    _, (filtered, gains, expected) = jax.lax.scan(forward, begin, steps)

    def backward(later, given):
        """`later`: `[R, H]`, the share of what follows that each state of this token foresees."""
        own, here, goes_on, now, before = given
        share = jnp.where(goes_on[:, None], now * later, now)
        share = jnp.where(here[:, None], share / jnp.maximum(share.sum(axis=1, keepdims=True), 1e-30), 0.0)
        ratio = jnp.where(before > 0, share / jnp.where(before > 0, before, 1.0), 0.0)  # [R, H]
        return dot(ratio, transition.T), (share, ratio)

    goes_on = jnp.concatenate([real[:, 1:], jnp.zeros_like(real[:, :1])], axis=1).T
    nothing = jnp.zeros_like(begin)
    given = (*steps, goes_on, filtered, expected)
    _, (shares, ratios) = jax.lax.scan(backward, nothing, given, reverse=True)
    pairs = jnp.einsum("trh,trk->hk", filtered[:-1], ratios[1:], precision=_EXACT) * transition
    return Counts(
        shares[0].sum(axis=0),
        pairs,
        jnp.zeros(emission.T.shape).at[tokens.T].add(shares),
        gains.sum(),
    )


def improved(counts: Counts, transition: Array, emission: Array) -> tuple[Array, Array, Array]:
    """The maximisation step; a state that no text is in keeps what it has."""
    shares = lambda x, old: jnp.where(
        x.sum(axis=-1, keepdims=True) > 0, x / jnp.maximum(x.sum(-1, keepdims=True), 1e-30), old
    )
    return (
        counts.initial / counts.initial.sum(),
        shares(counts.transition, transition),
        shares(counts.emission.T, emission),
    )


Batches = list[tuple[Array, Array]]
"""Texts on the device: tokens `[R, T]` int32 and lengths `[R]` int32, 0 for a row without a text."""


def batched(texts: list[np.ndarray], batch: int) -> Batches:
    """Texts in batches of R, the shortest first, each padded to a power of two of its own."""
    batches, ordered = [], sorted(texts, key=len)
    batch = min(batch, len(texts))
    for begin in range(0, len(ordered), batch):
        part = ordered[begin : begin + batch]
        tokens, length = np.zeros((batch, rounded(len(part[-1]))), np.int32), np.zeros(batch, np.int32)
        for row, text in enumerate(part):
            tokens[row, : len(text)], length[row] = text, len(text)
        batches.append((tokens, length))
    return jax.device_put(batches)


def total(batches: Batches, params: tuple[Array, Array, Array]) -> Counts:
    """The expected counts of all texts."""
    return functools.reduce(functools.partial(jax.tree.map, jnp.add), (counted(*params, *own) for own in batches))


def rounds(batches: Batches, params: tuple[Array, Array, Array]) -> Iterator[tuple[Any, float]]:
    """Rounds of expectation maximisation over all texts, without end.

    Args:
      batches: at least one.
      params: `[H]`, `[H, H]` and `[H, V]`.

    Yields:
      The parameters after a round, and the log-likelihood of all texts before it.
    """
    while True:
        counts = total(batches, params)
        params = improved(counts, *params[1:])
        yield params, float(counts.log_likelihood)


def smoothed(params: tuple[Array, Array, Array]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The distributions with `SMOOTH` of each spread evenly, in float32 on the host."""
    initial, transition, emission = (
        (1 - SMOOTH) * np.asarray(own) + np.float32(SMOOTH / own.shape[-1]) for own in params
    )
    return initial, transition, emission


def command(options: HmmOptions) -> int:
    """`specjax train hmm`."""
    programs.keep()
    try:
        with bad_input():
            texts, target, words = _prepared(options)
    except prompts.Stopped as stopped:
        return stopped.status
    count = sum(map(len, texts))
    number = "1 text" if len(texts) == 1 else f"{len(texts)} texts"
    note(f"{number} of {target.name}, {count} tokens; {options.states} hidden states")
    batches = batched(texts, options.batch_size)
    learned, seen = start(texts, options.states, target.lm.vocab_size, options.seed), [-math.inf]
    with _progress(options.rounds) as advance:
        for params, found in itertools.islice(rounds(batches, learned), options.rounds):
            learned = params
            seen.append(found / count)
            advance(seen[-1])
            if seen[-1] - seen[-2] < options.tolerance:
                break
    written, done = smoothed(learned), len(seen) - 1
    reached = float(total(batches, jax.device_put(written)).log_likelihood) / count
    note(
        f"log-likelihood of a token: {seen[1]:.4f} nats before the first round, {reached:.4f} as written, after {done}"
    )
    about = {"target": target.name, "texts": len(texts), "tokens": count, "rounds": done, "seed": options.seed}
    Hmm.of(options.output, *written, words=words).save(options.output, **about, log_likelihood=reached)
    note(f"written to {options.output}; use it with --constraint ... --sampling guide={options.output}")
    return 0


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[float], None]]:
    """A bar on stderr if that is a terminal; the function takes what a round found."""
    if not bar_fits():
        yield lambda own: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("rounds"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda own: progress.update(task, advance=1, description=f"log-likelihood {own:.4f}")


@settled
def _prepared(options: HmmOptions) -> tuple[list[np.ndarray], Any, str]:
    """The texts, the target, and a digest of its vocabulary.

    Raises:
      ValueError: on anything unusable, before the target writes.
    """
    check_least(options, flag)
    prompts.check_sources(options)
    output = Path(options.output)
    if output.is_file():
        raise ValueError(f"--output {options.output!r} is a file; give a folder")
    if (output / "config.json").exists():
        raise ValueError(f"--output {options.output!r} holds a model already; choose another folder")
    target = models.load(
        options.target or DEFAULT_MODEL, dtype=options.dtype, mesh=make_mesh(options.mesh), weights=options.weights
    )
    check_encoder(target, "text", "hmm")
    if target.masked is not None:
        raise ValueError(f"{target.name} is {target.kind}, whose texts follow no constraint: give another --target")
    own = Vocabulary(target.tokenizer, target.lm.vocab_size, tuple(target.eos_ids), target.name)
    own.check()
    words = words_of(own)
    files = prompts.written(options, target, output / "training")
    rows = data.read_rows(files, target, length_of(options), options.seed, Kind(packed=False))
    texts = [np.asarray(tokens)[np.asarray(mask)] for tokens, mask in zip(rows.tokens, rows.mask, strict=True)]
    return [text for text in texts if len(text)], target, words
