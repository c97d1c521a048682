"""The page and the JSON of a run, made of its records."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from experiments.chip import records
from experiments.chip.base import Part, Record, Setting, Shown, failures, table

REHEARSAL = """\
**This is a rehearsal on a CPU.** It shows that the command works and what its page looks like. Shapes are small, few cases are
tried, and no figure below is one of a chip.
"""


@dataclasses.dataclass(frozen=True)
class Report:
    """What a run found so far.

    Attributes:
      parts: of the run.
      folder: of the records.
      minutes: that it was given.
      rehearse: whether it is a rehearsal.
    """

    parts: Sequence[Part]
    folder: Path
    minutes: float
    rehearse: bool

    def name(self, device: Record) -> str:
        """Of the files: the chip's, or what JAX calls the device, in letters and digits."""
        if self.rehearse:
            return "REHEARSAL"
        chip = self._setting(device).chip
        return chip.name.upper() if chip else "".join(c if c.isalnum() else "_" for c in device["kind"])

    def write(self) -> Path | None:
        """Both files anew; the page, or None before a process has found the device."""
        found = records.read(self.folder)
        device = records.about(found)
        if device is None:
            return None
        name, setting = self.name(device), self._setting(device)
        by_part = {part.name: records.of_part(found, part.name) for part in self.parts}
        left = {part.name: _left(part, setting, by_part[part.name]) for part in self.parts}
        content = {
            "device": device, "rehearsal": self.rehearse, "minutes": self.minutes, "rates": rates(setting, by_part),
            "left": {part: len(cases) for part, cases in left.items()}, "parts": by_part,
        }  # fmt: skip
        records.write(self.folder / f"{name}.json", json.dumps(content, indent=1) + "\n")
        page = self.folder / f"{name}.md"
        records.write(page, self._page(device, setting, by_part, left))
        return page

    def _setting(self, device: Record) -> Setting:
        return Setting(device["platform"], device["kind"], self.rehearse)

    def _page(self, device, setting, by_part, left) -> str:
        done = sum(map(len, by_part.values()))
        every = done + sum(map(len, left.values()))
        memory = f", {device['memory'] / 1e9:.1f} GB" if device["memory"] else ""
        capability = f", compute capability {device['capability']}" if device["capability"] else ""
        lines = [
            f"# {'Rehearsal' if self.rehearse else self.name(device)}",
            *([REHEARSAL] if self.rehearse else []),
            f"{device['kind']}{memory}{capability}; one of {device['devices']} devices; {device['cores']} cores. "
            f"jax {device['jax']}, jaxlib {device['jaxlib']}, Python {device['python']}; {device['runtime']}. "
            f"{device['date']}.",
            "",
            f"`python -m experiments.chip{' --rehearse' * self.rehearse} --minutes {self.minutes:g}` came to {done} of {every} "
            "cases.",
        ]
        context = Shown(setting, by_part)
        for part in self.parts:
            lines += ["", f"## {part.title}", ""]
            lines += [_section(part, by_part[part.name], context)]
            if missing := left[part.name]:
                lines.append(f"\nNot reached: {_some(missing)}.")
        lines += ["", "## Compile seconds", "", compiling(self.parts, by_part)]
        return "\n".join(lines).rstrip() + "\n"


def _section(part: Part, own: Sequence[Record], context: Shown) -> str:
    """What came of a part's cases, and why nothing came of others."""
    good = [record for record in own if "error" not in record]
    try:
        text = part.shown(good, context) if good else ""
    except Exception as error:  # what was measured must not be lost with the words for it
        text = f"This section could not be written: {type(error).__name__}: {error}."
    return "\n\n".join(filter(None, [text, failures(own)]))


def _left(part: Part, setting: Setting, own: Sequence[Record]) -> list[str]:
    done = {record["case"] for record in own}
    return [case for case in part.cases(setting) if case not in done]


def _some(cases: Sequence[str], most: int = 6) -> str:
    shown = ", ".join(f"`{case}`" for case in cases[:most])
    return shown if len(cases) <= most else f"{shown} and {len(cases) - most} more"


def rates(setting: Setting, by_part: dict[str, list[Record]]) -> dict[str, dict[str, float]]:
    """What was measured in the place of what is published or assumed of the chip, for `specjax plan --rates`."""
    if setting.chip is None:
        return {}
    found = {record["case"]: record["rate"] for record in by_part.get("rates", []) if "rate" in record}
    fields = {"hbm_bandwidth": "read", "flops": "product", "launch": "launch"}
    own = {field: found[case] for field, case in fields.items() if case in found}
    return {setting.chip.name: own} if own else {}


def compiling(parts: Sequence[Part], by_part: dict[str, list[Record]]) -> str:
    """By part, and the programs that took longest; several compile at once, so that each may wait for the others."""
    rows, every = [], []
    for part in parts:
        taken = sorted(record["compile_seconds"] for record in by_part[part.name] if "compile_seconds" in record)
        if not taken:
            continue
        every += [(r["compile_seconds"], part.name, r["case"]) for r in by_part[part.name] if "compile_seconds" in r]
        rows.append(
            [part.name, str(len(taken)), f"{taken[len(taken) // 2]:.1f}", f"{taken[-1]:.1f}", f"{sum(taken):.0f}"]
        )
    longest = [[f"{seconds:.1f}", part, case] for seconds, part, case in sorted(every, reverse=True)[:8]]
    tables = [
        table(["part", "cases", "median", "longest", "all"], rows),
        "",
        table(["seconds", "part", "case"], longest),
    ]
    return "\n".join(
        [*tables, "", "What the compiler took for the programs of a case, while it worked on those of other cases too."]
    )
