"""Couplings of least entropy, also under a rate, and texts that carry a message by them."""

from specjax.search.coupling.bottleneck import BottleneckCoupling as BottleneckCoupling
from specjax.search.coupling.bottleneck import bottleneck_coupling as bottleneck_coupling
from specjax.search.coupling.bottleneck import compressed as compressed
from specjax.search.coupling.greedy import entropy as entropy
from specjax.search.coupling.greedy import greedy_coupling as greedy_coupling
from specjax.search.coupling.greedy import mutual_information as mutual_information
from specjax.search.coupling.method import HideMessage as HideMessage
from specjax.search.coupling.method import ReadMessage as ReadMessage
