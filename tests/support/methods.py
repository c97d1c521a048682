"""The names of all methods and families that there are."""

from specjax.assembly import registry
from specjax.models.families.table import FAMILIES as TABLE

FAMILIES = frozenset(TABLE)
METHODS = frozenset(
    name
    for own, table in vars(registry).items()
    if own.isupper() and isinstance(table, dict) and table is not registry.LOADERS
    for name in table
    if isinstance(name, str)
)
