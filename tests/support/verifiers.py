"""Registered verifiers with fields that fit small models, and trees that they judge."""

import dataclasses

from specjax.assembly import line
from specjax.assembly.companions import Stored
from specjax.assembly.registry import EXPANDERS, VERIFIERS, tree_of
from specjax.expand import Expander
from specjax.verify import Verifier

FIELDS = {
    "fly": {"window": 1},
    "lantern": {"neighbours": 1},
    "kl_judge": {"threshold": 5.0},
    "rapid": {"eta": 10.0},
    "reflective": {"prompt": (1, 2, 3)},
}
"""What fits a vocabulary of four tokens and short trees, where a verifier's defaults do not."""


def verifier_of(name: str) -> Verifier:
    """A registered verifier with its defaults; one that something is loaded for has parameters of chance."""
    made, fields = VERIFIERS[name].make(), FIELDS.get(name, {})
    made = made.kind(**made.fields) if isinstance(made, Stored) else made
    return dataclasses.replace(made, **fields)


def expander_for(verifier: Verifier) -> Expander:
    """The verifier's own tree: two levels, of two children and of one or two; or one that is deeper."""
    asked = line.read_line(tree_of(verifier).format(depth=2) or "static:tree=2 | 1 1 | 1")
    fields = asked.fields
    if "tree" in EXPANDERS[asked.name].fields:
        fields = {"tree": fields.get("tree", "2 | 1 2")}
    if "length" in fields:
        fields = {"length": int(fields["length"])}
    return EXPANDERS[asked.name].make(**fields)
