"""What share of one node's children is accepted, for every rule, kind of children and number of them, beside the optimum.

python experiments/acceptance/measure.py        # writes results.json, acceptance.png and the tables of README.md
"""

import argparse
import functools
import json
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import specjax
from specjax.lm import Block, Wants
from specjax.tasks import FAMILIES, generate, messages
from specjax.verify import Recursive, RecursiveWOR, k_seq
from specjax.verify.bounds import greedy_acceptance, optimal_acceptance
from specjax.verify.optimal import line_over
from specjax.verify.top_down import Rule, TakenAsTheyAre

Array = jax.Array
HERE = pathlib.Path(__file__).resolve().parent
COUNTS = (1, 2, 4, 8)
TEMPERATURES = (0.3, 0.7, 1.0)
MARKED = re.compile(r"<!-- measured -->\n.*?<!-- end -->", re.DOTALL)
PAIRS = {
    "coupled, static": "without replacement",
    "recursive_wor, without_replacement": "without replacement",
    "greedy_multi, greedy_draft": "greedy",
    "coupled, eagle2": "target",
    "k_seq, iid": "i.i.d.",
    "recursive, iid": "i.i.d.",
    "optimal, iid": "i.i.d.",
    "coupled, without_replacement": "without replacement",
}
"""Verifier and expander, and which optimum there is for such children; of the likeliest, whatever the rule, their mass in p."""

GAPS = (
    ("coupled, static", "recursive_wor, without_replacement"),
    ("coupled, eagle2", "recursive_wor, without_replacement"),
    ("greedy_multi, greedy_draft", "recursive_wor, without_replacement"),
    ("optimal, iid", "recursive, iid"),
    ("optimal, iid", "k_seq, iid"),
)
"""Of which pairs of lines it is said where they cross."""


# ---- distributions
# -------------------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=0)
def _logits(lm: Any, params: Any, tokens: Array) -> Array:
    block = Block(tokens[None], jnp.arange(len(tokens))[None], jnp.zeros((1,), jnp.int32))
    return lm(params, block, None, wants=Wants(logits=True)).logits[0]


def logits_of(names: tuple[str, ...], questions: int, places: int, seed: int = 0) -> list[np.ndarray]:
    """Logits `[M, V]` of every model at the same places of reference answers to held-out questions of level 2.

    Args:
      names: of models with one tokenizer, the first of which writes the chat.
      questions: of each family.
      places: of each answer, drawn.
      seed: of questions and places.
    """
    models = [specjax.models.load(name) for name in names]
    tokenizer, rng = models[0].tokenizer, np.random.default_rng(seed)
    found: list[list[np.ndarray]] = [[] for _ in models]
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
    for family in FAMILIES:
        for question in generate(family, 2, seed=seed, count=questions):
            asked = encode(
                tokenizer.apply_chat_template(messages(question), add_generation_prompt=True, tokenize=False)
            )
            whole = encode(tokenizer.apply_chat_template(messages(question, answered=True), tokenize=False))
            at = rng.choice(
                np.arange(len(asked) - 1, len(whole) - 1), min(places, len(whole) - len(asked)), replace=False
            )
            padded = jnp.asarray(np.pad(whole, (0, -len(whole) % 128)))
            for model, rows in zip(models, found, strict=True):
                rows.append(np.asarray(_logits(model.lm, model.params, padded))[np.sort(at)])
    return [np.concatenate(rows).astype(np.float64) for rows in found]


def distribution_of(logits: np.ndarray, temperature: float) -> np.ndarray:
    scaled = logits / temperature
    dist = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    return dist / dist.sum(axis=-1, keepdims=True)


# ---- rates ------------------------------------------------------------------------------------------------------------


def passed(rule: Rule, p: Array, log_q: Array, children: Array) -> Array:
    """The chance `[S, k]` that one of the first 1, 2, ... k children `[S, k]` passes, given what they are; p, log_q `[V]`."""
    wide = lambda dist: jnp.broadcast_to(dist, (len(children), len(dist)))
    count = jnp.full(children.shape[:1], children.shape[1], jnp.int32)

    def one(carry, tokens):
        state, none = carry
        none = none * (1 - rule.chance(state, tokens))
        return (rule.rejected(state, tokens), none), 1 - none

    start = rule.enter(wide(p), wide(log_q), count), jnp.ones(len(children), p.dtype)
    return jax.lax.scan(one, start, children.T)[1].T


@functools.partial(jax.jit, static_argnums=2)
def sampled(p: Array, q: Array, samples: int, key: Array) -> dict[str, Array]:
    """Acceptance `[M, max(COUNTS)]` of what has no closed form, in the mean of `samples` draws of children; p, q `[M, V]`."""
    most = max(COUNTS)

    def one(at):
        p, q, key = at
        log_p, log_q = jnp.log(p), jnp.log(q)
        shared, own, again = jax.random.split(key, 3)
        noise = jax.random.gumbel(shared, (4 * samples, len(p)))
        token = jnp.argmax(log_p[None] + noise, axis=1)
        scores = log_q[None] + noise
        place = (scores > jnp.take_along_axis(scores, token[:, None], axis=1)).sum(axis=1)
        wor = jax.lax.top_k(log_q[None] + jax.random.gumbel(own, (samples, len(p))), most)[1]
        iid = jax.random.categorical(again, log_q, shape=(samples, most))
        return {
            "coupled, static": (place[:, None] < 1 + jnp.arange(most)[None]).mean(axis=0),
            "recursive_wor, without_replacement": passed(RecursiveWOR(), p, log_q, wor).mean(axis=0),
            "recursive, iid": passed(Recursive(), p, log_q, iid).mean(axis=0),
            "coupled, without_replacement": passed(TakenAsTheyAre(), p, log_q, wor).mean(axis=0),
        }

    return jax.lax.map(one, (p, q, jax.random.split(key, len(p))))


def closed(p: np.ndarray, q: np.ndarray, count: int) -> dict[str, np.ndarray]:
    """Acceptance `[M]` of what has a formula; p, q `[M, V]`."""
    with jax.enable_x64(True):
        dists, drafts = (jnp.asarray(p), jnp.asarray(q)), jnp.full(len(p), float(count))
        beta = k_seq.overlap(*dists, k_seq.factor(*dists, drafts))
        found = {"k_seq, iid": np.asarray(k_seq.some_pass(beta, drafts))}
        found["optimal, iid"] = np.asarray(line_over(*dists, drafts)[1].kept.sum(axis=1))
    likeliest = np.argsort(-q, axis=1, kind="stable")[:, :count]
    found["greedy_multi, greedy_draft"] = np.asarray(
        [greedy_acceptance(*dists, count) for dists in zip(p, q, strict=True)]
    )
    found["coupled, eagle2"] = np.take_along_axis(p, likeliest, axis=1).sum(axis=1)
    if count == 1:
        one = np.minimum(p, q).sum(axis=1)
        found |= {"recursive_wor, without_replacement": one, "recursive, iid": one}
        found["coupled, static"] = np.asarray([agreement(*dists) for dists in zip(p, q, strict=True)])
    return found


def agreement(p: np.ndarray, q: np.ndarray) -> float:
    """The chance that log p and log q with the same Gumbel noise have their maximum at one token: of x it is the inverse of the
    sum of max(p / p(x), q / q(x))."""
    able = np.flatnonzero((p > 1e-9) & (q > 1e-9))
    return float(sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in able))


def limit(p: np.ndarray, q: np.ndarray, count: int) -> float:
    """`optimal_acceptance` of draws without replacement, over the tokens that matter: the others have less than 1e-8 each."""
    if count == 1:
        return optimal_acceptance(p, q)
    able = (p > 1e-8) | (q > 1e-8)
    p, q = p[able], q[able]
    return optimal_acceptance(p / p.sum(), q / q.sum(), count)


def measure(logits: list[np.ndarray], samples: int, seed: int = 0) -> dict[str, Any]:
    """Rows of the mean acceptance over all places, and how far that of `coupled` is from that of recursive rejection."""
    rows, crossing = [], []
    for temperature in TEMPERATURES:
        p, q = (distribution_of(values, temperature) for values in logits)
        rates = sampled(jnp.asarray(p, jnp.float32), jnp.asarray(q, jnp.float32), samples, jax.random.key(seed))
        rates = {name: np.asarray(values, np.float64) for name, values in rates.items()}
        for count in COUNTS:
            own = {name: values[:, count - 1] for name, values in rates.items()}
            exact = closed(p, q, count)
            own |= exact
            dists = list(zip(p, q, strict=True))
            best = {
                "without replacement": np.asarray([limit(*pair, count) for pair in dists]),
                "i.i.d.": np.asarray([optimal_acceptance(*pair, count, replacement=True) for pair in dists]),
                "greedy": exact["greedy_multi, greedy_draft"],
                "target": exact["coupled, eagle2"],
            }
            for name, kind in PAIRS.items():
                verifier, expander = name.split(", ")
                rate, most = own[name].mean(), best[kind].mean()
                rows.append(
                    {
                        "temperature": temperature, "children": count, "verifier": verifier, "expander": expander,
                        "acceptance": rate, "optimum": most, "of_optimum": rate / most,
                        "error": 0.0 if name in exact else error(own[name], samples * (4 if name == "coupled, static" else 1)),
                        "of_best_draws": rate / best["without replacement"].mean(),
                    }
                )  # fmt: skip
            for one, other in GAPS:
                gap = own[one] - own[other]
                crossing.append(
                    {
                        "temperature": temperature, "children": count, "of": one, "and": other,
                        "difference": gap.mean(), "error": gap.std() / np.sqrt(len(gap)),
                    }
                )  # fmt: skip
    return {"places": len(logits[0]), "samples": samples, "rows": rows, "crossing": crossing}


def error(rates: np.ndarray, draws: int) -> float:
    """At most the standard error that the mean has for the draws of children at these places, each of a chance in [0, 1]."""
    return float(np.sqrt((rates * (1 - rates)).clip(0).sum() / draws) / len(rates))


# ---- what is said of them ---------------------------------------------------------------------------------------------


def tables(report: Mapping[str, Any]) -> Iterator[str]:
    """The tables of the README, and where the two lines cross."""
    for temperature in TEMPERATURES:
        yield f"\nTemperature {temperature}: acceptance, and what share of the optimum of such children that is\n"
        yield "| verifier | children | " + " | ".join(f"k = {count}" for count in COUNTS) + " |"
        yield "| --- | --- |" + " --- |" * len(COUNTS)
        mine = [row for row in report["rows"] if row["temperature"] == temperature]
        for name in PAIRS:
            verifier, expander = name.split(", ")
            cells = [
                f"{row['acceptance']:.3f} ({100 * row['of_optimum']:.1f}%)"
                for row in mine
                if (row["verifier"], row["expander"]) == (verifier, expander)
            ]
            yield f"| `{verifier}` | `{expander}` | " + " | ".join(cells) + " |"
        for expander in ("without_replacement", "iid"):
            most = {row["children"]: row["optimum"] for row in mine if row["expander"] == expander}
            yield f"| the best there is | `{expander}` | " + " | ".join(f"{most[k]:.3f}" for k in COUNTS) + " |"
    for one, other in GAPS:
        named = [" on ".join(f"`{word}`" for word in name.split(", ")) for name in (one, other)]
        yield f"\nBy how much {named[0]} accepts more than {named[1]}, with the standard error over places:\n"
        yield "| temperature | " + " | ".join(f"k = {count}" for count in COUNTS) + " | |"
        yield "| --- |" + " --- |" * (len(COUNTS) + 1)
        for temperature in TEMPERATURES:
            mine = [
                row
                for row in report["crossing"]
                if (row["temperature"], row["of"], row["and"]) == (temperature, one, other)
            ]
            cells = [f"{row['difference']:+.4f} ± {row['error']:.4f}" for row in mine]
            yield f"| {temperature} | " + " | ".join(cells) + f" | {crossed(mine)} |"


def crossed(rows: list[Mapping[str, float]]) -> str:
    """Where the first of two lines is behind the second and where ahead, by more than two standard errors."""
    said = {"behind": [], "ahead": [], "no difference of two standard errors": []}
    for row in rows:
        gap, noise = row["difference"], 2 * row["error"] + 1e-9
        word = "behind" if gap < -noise else "ahead" if gap > noise else "no difference of two standard errors"
        said[word].append(str(row["children"]))
    return "; ".join(f"{word} at k = {', '.join(counts)}" for word, counts in said.items() if counts)


def written(page: str, report: Mapping[str, Any]) -> str:
    """A page with the tables of a report between its marks."""
    return MARKED.sub(lambda _: "\n".join(["<!-- measured -->", *tables(report), "", "<!-- end -->"]), page)


def picture(report: Mapping[str, Any], path: pathlib.Path) -> None:
    figure = Figure(figsize=(12, 4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, temperature in zip(figure.subplots(1, len(TEMPERATURES), sharey=True), TEMPERATURES, strict=True):
        for name in PAIRS:
            mine = [row for row in report["rows"] if row["temperature"] == temperature]
            mine = [row for row in mine if f"{row['verifier']}, {row['expander']}" == name]
            axes.plot(range(len(COUNTS)), [row["of_best_draws"] for row in mine], marker="o", label=name)
        axes.axhline(1, color="grey", linewidth=0.8)
        axes.set_xticks(range(len(COUNTS)), [str(count) for count in COUNTS])
        axes.set_title(f"temperature {temperature}")
        axes.set_xlabel("children of a node")
    figure.axes[0].set_ylabel("acceptance / best of draws w/o replacement")
    figure.axes[-1].legend(fontsize=7)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--draft", default="tiny-draft")
    parser.add_argument("--questions", type=int, default=5, help="of each family")
    parser.add_argument("--places", type=int, default=5, help="of each answer")
    parser.add_argument("--samples", type=int, default=256, help="draws of children per place")
    parser.add_argument("--output", type=pathlib.Path, default=HERE)
    asked = parser.parse_args()
    logits = logits_of((asked.model, asked.draft), asked.questions, asked.places)
    report = {"model": asked.model, "draft": asked.draft} | measure(logits, asked.samples)
    (asked.output / "results.json").write_text(json.dumps(report, indent=1) + "\n")
    picture(report, asked.output / "acceptance.png")
    page = asked.output / "README.md"
    if page.exists():
        page.write_text(written(page.read_text(), report))
    print("\n".join(tables(report)))


if __name__ == "__main__":
    main()
