"""Steps of the 8B model with its matrices in few bits, and without loss as DFloat11: time and memory."""

from experiments.chip.base import Part, Record, Setting, Shown, table
from experiments.chip.parts import steps

FORMATS = "int8", "int4:group=128", "dfloat11"


def cases(setting: Setting) -> list[str]:
    return [str(step) for step in steps_of(setting)]


def steps_of(setting: Setting) -> list[steps.Step]:
    if setting.rehearse:
        return [steps.Step("tiny", 1, 2, "int8")]
    several = [steps.Step("8B", nodes, batch, form) for nodes, batch in ((1, 1), (16, 8)) for form in FORMATS]
    return [*several, *(steps.Step("8B", 1, 8, form) for form in FORMATS)]


def shown(records: list[Record], context: Shown) -> str:
    """Beside what the same step took in bfloat16."""
    plain = {r["case"]: r["seconds"] for r in context.records.get("steps", ()) if "seconds" in r}
    rows = []
    for record, line in zip(records, steps.lines_of(records, context), strict=True):
        model, _, rest = record["case"].partition(", ")
        usual = plain.get(f"{model.split()[0]}, {rest}")
        rows.append([*line, "-" if usual is None else f"{usual / record['seconds']:.2f}"])
    return table([*steps.HEAD, "times as fast as bfloat16"], rows)


PART = Part(
    "weights", "Weights in few bits", 1.5, cases, lambda setting, case: steps.made(setting, case, steps_of), shown,
    ahead=3, longest=150.0,
)  # fmt: skip
