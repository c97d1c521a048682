"""Products of a few float32 rows with a large matrix, for CPUs."""

from specjax.kernels.few_rows.api import few_rows as few_rows
from specjax.kernels.few_rows.api import takes as takes
