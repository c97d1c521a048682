"""Measures models by tasks: `specjax eval`, its Python function `evaluate`, and the adapter for
lm-evaluation-harness."""

from specjax.evaluate.evaluation import Evaluation as Evaluation
from specjax.evaluate.options import EvalOptions as EvalOptions
from specjax.evaluate.run import evaluate as evaluate
