"""Soft thinking: a decoder whose rows read mixtures of tokens while they think, and its mixers.

One line per method, in the order in which they are listed.
"""
# isort: skip_file

from specjax.soft.gumbel import GumbelSoftmax as GumbelSoftmax
from specjax.soft.dirichlet import Dirichlet as Dirichlet
from specjax.soft.mean import Mean as Mean

# the decoder
from specjax.soft.decoder import SoftThinkingDecoder as SoftThinkingDecoder
from specjax.soft.decoder import SoftState as SoftState
from specjax.soft.decoder import soft_thinking as soft_thinking

# the contract
from specjax.soft.base import Mixer as Mixer
from specjax.soft.base import Mixed as Mixed
