"""Constraints: languages that texts must belong to, as tables that tokens walk on the device (`specjax.warpers.constraint`)."""

from specjax.constrain.grammar import Grammar
from specjax.constrain.hmm import Hmm
from specjax.constrain.line import compiled, named_file, read
from specjax.constrain.table import Table
from specjax.constrain.vocabulary import Vocabulary

__all__ = ["Grammar", "Hmm", "Table", "Vocabulary", "compiled", "named_file", "read"]
