"""Warpers: changes of the distribution that a token is drawn from. One line per method, in the order of application.

The order is `transformers`': first the logit warpers, which apply to greedy rows too; then, for sampled rows, the
temperature and the cuts.
"""
# isort: skip_file

from specjax.warpers.base import Cut, Text, Warper, parameter

from specjax.warpers.logit_bias import LogitBias as LogitBias
from specjax.warpers.repetition_penalty import RepetitionPenalty as RepetitionPenalty
from specjax.warpers.frequency_penalty import FrequencyPenalty as FrequencyPenalty
from specjax.warpers.dry import Dry as Dry
from specjax.warpers.banned import BadWordsIds as BadWordsIds
from specjax.warpers.banned import MinLength as MinLength
from specjax.warpers.forced import Forced as Forced
from specjax.warpers.banned import SuppressTokens as SuppressTokens
from specjax.warpers.constraint import Constraint as Constraint
from specjax.warpers.guide import Guided as Guided
from specjax.warpers.momentum import Momentum as Momentum
from specjax.warpers.temperature import Temperature as Temperature
from specjax.warpers.mirostat import Mirostat as Mirostat
from specjax.warpers.top_h import TopH as TopH
from specjax.warpers.top_k_top_p import TopKTopP as TopKTopP
from specjax.warpers.min_p import MinP as MinP
from specjax.warpers.typical_p import TypicalP as TypicalP
from specjax.warpers.cutoffs import EpsilonCutoff as EpsilonCutoff
from specjax.warpers.cutoffs import EtaCutoff as EtaCutoff
from specjax.warpers.xtc import Xtc as Xtc

WARPERS: tuple[Warper, ...] = tuple(
    each() for each in list(vars().values()) if isinstance(each, type) and issubclass(each, Warper) and each.about
)
"""Every warper, in the order of application: options, states, flags and listings are made from it."""

__all__ = ["WARPERS", "Cut", "Text", "Warper", "parameter"]
