"""An MLP whose inner width is cut into experts, over those experts that some row of a step weighs."""

from specjax.kernels.union_mlp.api import union_mlp as union_mlp
from specjax.kernels.union_mlp.api import union_size as union_size
