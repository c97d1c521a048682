"""The product of each row with the matrix of its group; rows are sorted by group."""

from specjax.kernels.grouped_dot.api import grouped_dot as grouped_dot
