"""Products with matrices of few bits that have scales for groups of inputs."""

from specjax.kernels.scaled_dot.api import scaled_dot as scaled_dot
from specjax.kernels.scaled_dot.api import scaled_dot_of as scaled_dot_of
