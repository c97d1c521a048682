"""Whether the chip writes what a CPU wrote: every drafter of the conformance table, masked diffusion, and a search.

Models are tiny, in float32 and at full precision. `cpu.json` has the text of plain decoding, and for each of its tokens the gap
between its score, noise included, and the next one. Every drafter has to write that text. Where a row parts from it, that is a
near-tie if the gap is at most twice the largest difference of the two machines' logits.
"""

import contextlib
import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.chip.base import Part, Record, Run, Setting, Shown, table

FIGURES = Path(__file__).parents[1] / "cpu.json"
ASKED = (
    "A counter shows 24. Subtract 17. Add 9. What does the counter show?",
    "Repeat the list. [ hen, dog, deer, olive ]",
)
SHIPPED: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny, plain": ("tiny", {"drafter": "none"}),
    "tiny, eagle3 at temperature 1": ("tiny", {"drafter": "eagle3", "temperature": 1.0}),
    "tiny, three beams": ("tiny", {"decode": "beam:num_beams=3"}),
    "masked diffusion": ("tiny-diffusion", {}),
}
"""Shipped models and keywords of `specjax.generate`."""
FEW = ("prompt_lookup",)
"""The drafter of a rehearsal."""


def conformance() -> Any:
    """The table of the tests, which a checkout has beside this folder."""
    tests = str(Path(__file__).parents[3] / "tests")
    if tests not in sys.path:
        sys.path.append(tests)
    from support import conformance

    return conformance


@contextlib.contextmanager
def exact() -> Iterator[None]:
    """Products of float32 in full precision, as figures of a CPU have them."""
    with jax.default_matmul_precision("highest"):
        yield


def cases(setting: Setting) -> list[str]:
    """Rounding first, by which differences are judged; then a drafter of each kind, and the others."""
    lines = conformance()
    drafters = {*lines.DRAFTERS, *lines.ON_MODELS}
    usual = [name for name in lines.EACH_KIND if name in drafters]
    names = [*usual, *(name for name in [*lines.DRAFTERS, *lines.ON_MODELS] if name not in usual)]
    models = ["", *lines.MODELS]
    return [
        *(f"rounding@{model}" for model in setting.pick(models, models[:1])),
        *(setting.pick(list(SHIPPED), list(SHIPPED)[:1])),
        *(setting.pick(names, FEW)),
    ]


def made(setting: Setting, case: str) -> Run:
    if case in SHIPPED:
        return lambda: {"differs": _different(shipped_texts(case), _figures()["shipped"][case])}
    if case.startswith("rounding@"):
        model = case.partition("@")[2]
        return lambda: {"eps": float(np.max(np.abs(forced_logits(model) - _cpu(forced_logits, model))))}
    lines = conformance()

    def run() -> Record:
        with exact():
            found, state = lines.line(case)
        known = _figures()["models"][lines.model_of(case)]
        steps, new = np.asarray(state.stats.steps), np.asarray(state.length - state.prompt_length)
        return {
            "differs": _different(found, known["texts"], known["gaps"]),
            "tokens_per_step": round(float(new.sum() / steps.sum()), 3),
        }

    return run


def shipped_texts(case: str) -> list[list[int]]:
    """New tokens of the questions."""
    import specjax

    model, options = SHIPPED[case]
    with exact():
        records = specjax.generate(model, list(ASKED), chat=True, max_new_tokens=32, dtype="float32", **options)
    return [list(map(int, record.tokens)) for record in records]


def forced_logits(model: str) -> np.ndarray:
    """`[B, V]` logits after the prompts of the table's rows."""
    lines = conformance()
    rows, target = lines.MIXED, lines.MODELS.get(model, lines.TARGET)
    from specjax.lm import Block, Wants, encodes

    longest = max(map(len, rows.prompts))
    tokens = np.zeros((len(rows.prompts), longest), np.int32)
    for i, prompt in enumerate(rows.prompts):
        tokens[i, : len(prompt)] = prompt
    block = Block(
        jnp.asarray(tokens), jnp.tile(jnp.arange(longest)[None], (len(tokens), 1)), jnp.zeros(len(tokens), jnp.int32)
    )

    @jax.jit
    def read(params, block):
        cache = None
        if encodes(target):
            cache = target.init_cache(len(tokens), lines.CAPACITY)
            cache = target.encode(params, cache, lines.source_of(rows.prompts, longest))
        return target(params, block, cache, wants=Wants(logits=True)).logits

    with exact():
        logits = np.asarray(read(lines._target(model), block))
    return np.stack([own[len(prompt) - 1] for own, prompt in zip(logits, rows.prompts, strict=True)])


def _cpu(function: Any, *given: Any) -> Any:
    with jax.default_device(jax.devices("cpu")[0]):
        return function(*given)


@functools.cache
def _figures() -> dict[str, Any]:
    return json.loads(FIGURES.read_text())


def _different(
    found: list[list[int]], wanted: list[list[int]], gaps: list[list[float]] | None = None
) -> list[dict[str, Any]]:
    """Of every row that differs, the first place where it does."""
    places = []
    for row, (got, want) in enumerate(zip(found, wanted, strict=True)):
        if got == want:
            continue
        at = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want)))
        gap = None if gaps is None or at >= len(gaps[row]) else gaps[row][at]
        places.append({"row": row, "at": at, "got": got[at : at + 1], "want": want[at : at + 1], "gap": gap})
    return places


def shown(records: list[Record], context: Shown) -> str:
    """How many decoders wrote the CPU's text, and every row that parts from it."""
    eps = {record["case"].partition("@")[2]: record["eps"] for record in records if "eps" in record}
    texts = [record for record in records if "differs" in record]
    rows = []
    for record in texts:
        near = 2 * eps.get(record["case"].partition("@")[2], 0.0)
        for place in record["differs"]:
            gap = place["gap"]
            margin = "-" if gap is None else f"{gap:.2e}"
            words = "near-tie" if gap is not None and gap <= near else "**differs**"
            where = (str(place[name]) for name in ("row", "at", "got", "want"))
            rows.append([record["case"], *where, margin, words])
    same, ties = sum(not record["differs"] for record in texts), sum(row[-1] == "near-tie" for row in rows)
    lines = [
        f"{same} of {len(texts)} decoders wrote the CPU's texts, token for token; {ties} rows part from it at a near-tie, "
        f"{len(rows) - ties} elsewhere."
    ]
    if eps:
        rounding = ", ".join(f"{value:.1e}{f' ({model})' * bool(model)}" for model, value in eps.items())
        lines.append(f"Logits differ from those of this machine's CPU by at most {rounding}.")
    if rows:
        lines += ["", table(["decoder", "row", "token", "here", "CPU", "margin", ""], rows)]
    return "\n".join(lines)


PART = Part("texts", "Texts against a CPU's", 3.0, cases, made, shown, alone=False, ahead=1, longest=150.0)
