"""`python experiments/cache_size/report.py` draws `cache_size.png` of the JSON files here, and prints their tables."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from specjax import models
from specjax.assembly.line import settings
from specjax.assembly.registry import make_old
from specjax.decode.lines import read_decode
from specjax.plan.held import chip_bytes
from specjax.speculative import speculative
from specjax.viz.picture import Picture

FOLDER = Path(__file__).parent
TOKENS = {1: 448, 2: 704}
"""Of a text with its answer, about the longest of a level."""


def called(decoder: str) -> str:
    """The line of its cache, or the type."""
    given = settings(decoder)
    return read_decode(given["decode"]).cache if "decode" in given else given["cache_dtype"]


def kilobytes(decoder: str, tokens: int) -> float:
    """What the cache of a row of so many tokens takes."""
    lm, given = models.abstract("tiny", "float32").lm, settings(decoder)
    made = models.cached(models.Model(lm, None), given.get("cache_dtype")).lm
    if "decode" in given:
        made = type(lm)(lm.config, old=make_old(read_decode(given["decode"]).cache))
    target = speculative(made, rings=True).target
    return chip_bytes(jax.eval_shape(lambda: target.init_cache(1, tokens, jnp.float32))) / 1e3


def rows(level: int) -> list[dict[str, Any]]:
    """What was measured of a level, the whole cache first.

    Raises:
      ValueError: where two files do not agree on that.
    """
    files = [json.loads(file.read_text()) for file in sorted(FOLDER.glob(f"level_{level}_*.json"))]
    if any(found["accuracy"] != files[0]["accuracy"] or found["about"] != files[0]["about"] for found in files):
        raise ValueError(f"the files of level {level} are not of the same questions")
    every = [files[0], *(one for found in files for one in found["decoders"])]
    against = {one["decoder"]: one for found in files for one in found["comparisons"]}
    points = lambda one: [100 * one[key] for key in ("low", "high")] if one else []
    return [
        {**row, "kilobytes": kilobytes(row["decoder"], TOKENS[level]), "points": points(against.get(row["decoder"]))}
        for row in every
    ]


def main() -> None:
    """A panel a level."""
    figure = Picture(5 * len(TOKENS), 5.5)
    for axes, level in zip(figure.subplots(1, len(TOKENS)), TOKENS, strict=True):
        print(
            f"\nlevel {level}, {TOKENS[level]} tokens\n\n| cache | kB a row | right | points, 95% |\n| --- | --- | --- | --- |"
        )
        for row in rows(level):
            name = called(row["decoder"]) if row["points"] else "float32"
            low, middle, high = (100 * row[key] for key in ("low", "accuracy", "high"))
            points = "{:+.1f} to {:+.1f}".format(*row["points"]) if row["points"] else ""
            print(
                f"| `{name}` | {row['kilobytes']:.0f} | {middle:.0f}% of {row['n']} ({low:.0f} to {high:.0f}) | {points} |"
            )
            bars = [[middle - low], [high - middle]]
            axes.errorbar(row["kilobytes"], middle, yerr=bars, fmt="o", capsize=3, label=name)
        axes.set_xlabel("kB a row")
        axes.set_ylabel("right answers, % (Wilson, 95%)")
        axes.set_title(f"retrieve, level {level}: texts up to about {TOKENS[level]} tokens", fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
    figure.savefig(str(FOLDER / "cache_size.png"), dpi=100)


if __name__ == "__main__":
    main()
