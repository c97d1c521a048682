"""Tokens per step of the toy drafter, and how many texts are others: `python -m experiments.gad.measure FOLDER`."""

import json
import sys
from pathlib import Path
from typing import Any

import specjax
from experiments.gad.toy import WIDE
from specjax import models

HERE = Path(__file__).parent
LINES = (
    ("", 0.0), ("recent=0", 0.0), ("recent=200", 0.0), ("verifier=gad_plus", 0.0),
    ("verifier=(gad_plus:beta=3,tau=1)", 0.0), ("", 1.0), ("verifier=rejection", 1.0),
)  # fmt: skip
"""Fields of `gad`, and temperatures."""


def measured(target: Any, sources: list[list[int]], line: str, heat: float) -> dict[str, Any]:
    """The texts of a line, and how many tokens of them a step has committed."""
    found = specjax.generate(
        target, sources, decode=line, temperature=heat, max_new_tokens=WIDE - 2, batch_size=32, progress=False
    )
    tokens, steps = sum(len(one.tokens) for one in found), sum(one.steps for one in found)
    return {"texts": [list(one.tokens) for one in found], "tokens_per_step": tokens / steps, "tokens": tokens}


def main(folder: Path) -> None:
    """Decodes the held-out sources, and writes `results.json` and a table."""
    target = models.load(folder / "target", dtype="float32")
    lines = (folder / "held_out.jsonl").read_text().splitlines()
    sources = [json.loads(line)["prompt"] for line in lines]
    plain = {heat: measured(target, sources, "none", heat)["texts"] for heat in (0.0, 1.0)}
    rows = []
    for fields, heat in LINES:
        extra = f",{fields}" if fields else ""
        found = measured(target, sources, f"gad:model={folder / 'drafter'}{extra}", heat)
        other = sum(a != b for a, b in zip(found["texts"], plain[heat], strict=True)) / len(sources)
        rows.append({
            "line": f"gad:{fields}".rstrip(":"), "temperature": heat, "other_texts": other,
            "tokens_per_step": round(found["tokens_per_step"], 2), "tokens": found["tokens"],
        })  # fmt: skip
        print(rows[-1], flush=True)
    (HERE / "results.json").write_text(json.dumps({"sources": len(sources), "rows": rows}, indent=1) + "\n")
    print("| line | temperature | tokens per step | other texts than plain decoding's |\n| --- | --- | --- | --- |")
    for row in rows:
        print(f"| `{row['line']}` | {row['temperature']:g} | {row['tokens_per_step']:.2f} | {row['other_texts']:.0%} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
