"""A product of rows that are sorted by group, each with the matrix of its group."""

from specjax.kernels.grouped_dot.api import grouped_dot as grouped_dot
