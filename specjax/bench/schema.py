"""JSONSchemaBench (Geng et al. 2025, arXiv:2501.10868): its folders of schemas, and its measures of coverage.

A schema is declared if a constraint is made of it, and covered empirically if the text under that constraint is valid.
It is covered truly if the constraint agrees with all instances of the schema: every valid one can be written, and no
invalid one. Files of its MaskBench and of the JSON Schema Test Suite have instances.
"""

import dataclasses
import functools
import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specjax.constrain import Grammar, Table, Vocabulary, compiled
from specjax.constrain.table import shown

SEPARATORS = ((", ", ": "), (",", ":"))
"""How instances are written: a constraint takes one if it takes one of these texts."""
COMPILE_LIMIT, TEXT_LIMIT = 40, 60
"""Seconds for a schema's constraint and for its text, as published."""
KEYWORD = "unsupported keyword: "
NO_VALUE = "allows no value"


@dataclasses.dataclass(frozen=True)
class Instance:
    """A value, and whether it is valid under its schema."""

    value: Any
    valid: bool

    @property
    def texts(self) -> list[str]:
        return [json.dumps(self.value, ensure_ascii=False, separators=own) for own in SEPARATORS]


@dataclasses.dataclass(frozen=True)
class Schema:
    """A schema, the dataset that it is of, and instances that its file has."""

    name: str
    dataset: str
    content: Any
    instances: tuple[Instance, ...] = ()

    def line(self, kind: str) -> str:
        """The line of its constraint, `json:...` or `grammar:...`."""
        content = self.content
        if kind == "grammar" and isinstance(content, bool):
            content = {} if content else {"not": {}}  # where a grammar stands, a word would be a file
        return f"{kind}:{json.dumps(content, ensure_ascii=False)}"


def read(path: str | Path, most: int) -> list[Schema]:
    """The schemas of a folder, at most `most` of each dataset.

    The folder has files `.json`, and folders of such files, one for each dataset. A file has one of these forms:

    - a schema;
    - an object with `schema` and `tests`, as in MaskBench; the dataset is what stands before `---` in its name, if anything;
    - a list of such objects, as in the JSON Schema Test Suite; the dataset is the file's name.

    Raises:
      ValueError: if there is no schema, or naming the first file that has none of these forms.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"there is no folder {str(path)!r} with schemas")
    files = [*sorted(folder.glob("*.json")), *sorted(folder.glob("*/*.json"))]
    taken: Counter[str] = Counter()
    schemas = []
    for file in files:
        for schema in _of_file(file):
            taken[schema.dataset] += 1
            if taken[schema.dataset] <= most:
                schemas.append(schema)
    if not schemas:
        raise ValueError(f"the folder {str(path)!r} has no file .json with a schema")
    return schemas


def _of_file(file: Path) -> Iterator[Schema]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if isinstance(content, list):
        for case in content:
            yield _with_tests(file, case, file.stem, str(case.get("description")) if isinstance(case, dict) else "")
    elif isinstance(content, dict) and isinstance(content.get("tests"), list):
        dataset, apart, _ = file.stem.partition("---")
        yield _with_tests(file, content, dataset if apart else file.parent.name, file.stem)
    elif isinstance(content, dict | bool):
        yield Schema(file.stem, file.parent.name, content)
    else:
        raise ValueError(f"{file} is no schema: it should hold an object, or a list of objects with schema and tests")


def _with_tests(file: Path, case: Any, dataset: str, name: str) -> Schema:
    try:
        instances = tuple(Instance(test["data"], bool(test["valid"])) for test in case["tests"])
        return Schema(name, dataset, case["schema"], instances)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file} has a part without schema, or tests without data and valid ({error})") from error


@dataclasses.dataclass(frozen=True)
class Made:
    """What became of a schema.

    Attributes:
      schema: the schema.
      constraint: made of it; None if it was refused, or is not needed any more.
      why: what was wrong if it was refused, in one line.
      seconds: how long it took until the first tokens were known.
      wrong: how many invalid instances can be written.
      missed: how many valid instances cannot be written.
    """

    schema: Schema
    constraint: Table | Grammar | None
    why: str
    seconds: float
    wrong: int = 0
    missed: int = 0

    @property
    def declared(self) -> bool:
        return not self.why

    @property
    def true(self) -> bool | None:
        """None if nothing tells, since the schema has no instances."""
        return None if not self.schema.instances else self.declared and not self.wrong and not self.missed

    @property
    def reason(self) -> str:
        """Why it was refused, in a word or a few."""
        said = self.why.partition(KEYWORD)[2]
        if said:
            return said.replace(";", " ").split()[0]
        return NO_VALUE if NO_VALUE in self.why else re.sub(r"[0-9]+", "N", self.why.partition(": ")[0])[:80]


def make(schema: Schema, kind: str, vocabulary: Vocabulary, limit: float) -> Made:
    """Makes the constraint of a schema, and tries the schema's instances.

    Args:
      schema: the schema.
      kind: of the constraint, json or grammar.
      vocabulary: the model's.
      limit: seconds; a constraint that took longer counts as refused.
    """
    began = time.perf_counter()
    try:
        found = compiled(schema.line(kind), vocabulary)
        _ = found.allowed(0) if isinstance(found, Table) else found.first_mask()
    except ValueError as error:
        line = shown(schema.line(kind))
        return Made(schema, None, str(error).removeprefix(f"{line}: "), time.perf_counter() - began)
    except Exception as error:  # a fault, which counts as the benchmark counts it and ends no run of hours
        return Made(schema, None, f"fault, {type(error).__name__}", time.perf_counter() - began)
    seconds = time.perf_counter() - began
    if seconds > limit:
        return Made(schema, None, f"it took more than {limit:g} seconds", seconds)
    takes = [
        any(tokens is not None and found.accepts(tokens) for tokens in map(vocabulary.spelled, one.texts))
        for one in schema.instances
    ]
    pairs = list(zip(takes, schema.instances, strict=True))
    wrong = sum(taken and not one.valid for taken, one in pairs)
    return Made(schema, found, "", seconds, wrong, sum(one.valid and not taken for taken, one in pairs))


def validator(schema: Schema) -> Any:
    """A function that says whether a text is a valid value: a validator of draft 2020-12 that checks formats too.

    Raises:
      ValueError: without the package jsonschema.
    """
    package = jsonschema()
    from jsonschema_specifications import REGISTRY

    own, formats = package.Draft202012Validator, package.FormatChecker()

    def valid(text: str | None) -> bool:
        try:
            own.check_schema(schema.content)
            return own(schema.content, format_checker=formats, registry=REGISTRY).is_valid(json.loads(text or ""))
        except Exception:  # no JSON, a schema that is none, or a reference to the network, which is not asked
            return False

    return valid


@functools.cache
def jsonschema() -> Any:
    """The package with which texts are validated.

    Raises:
      ValueError: if it is not there.
    """
    try:
        import jsonschema
    except ImportError as error:
        raise ValueError("bench schema validates texts with jsonschema: pip install jsonschema") from error
    return jsonschema


def coverage(made: Sequence[Made], valid: Sequence[bool] | None = None) -> dict[str, Any]:
    """The measures of a dataset, or of all.

    Args:
      made: of each schema.
      valid: whether the text of each is valid; None: none was written.
    """
    with_instances = [one for one in made if one.true is not None]
    declared = sum(one.declared for one in made)
    found: dict[str, Any] = {"schemas": len(made), "declared": share(declared, len(made))}
    if valid is not None:
        found |= {"empirical": share(sum(valid), len(made)), "compliance": share(sum(valid), declared)}
    return found | {
        "true": share(sum(bool(one.true) for one in with_instances), len(with_instances)),
        "wrong": sum(one.wrong > 0 for one in made),
        "missed": sum(one.missed > 0 for one in made),
    }


def share(part: int, whole: int) -> float | None:
    """A share; None of nothing."""
    return round(part / whole, 4) if whole else None


def by_dataset(made: Sequence[Made], valid: Sequence[bool] | None = None) -> dict[str, dict[str, Any]]:
    """`coverage` of every dataset, and of all under `overall`."""
    found = {}
    for name in (*dict.fromkeys(one.schema.dataset for one in made), "overall"):
        at = [i for i, one in enumerate(made) if name in ("overall", one.schema.dataset)]
        found[name] = coverage([made[i] for i in at], None if valid is None else [valid[i] for i in at])
    return found


def refused(made: Sequence[Made]) -> dict[str, int]:
    """How many schemas were refused for each reason, the most frequent first."""
    return dict(Counter(one.reason for one in made if not one.declared).most_common())


def quantiles(made: Sequence[Made]) -> dict[str, float]:
    """Seconds until the first tokens were known, of schemas that were not refused; no entries if all were."""
    found = sorted(one.seconds for one in made if one.declared)
    at = lambda part: round(found[min(int(part * len(found)), len(found) - 1)], 6)
    return {"median": at(0.5), "p95": at(0.95), "most": at(1.0)} if found else {}
