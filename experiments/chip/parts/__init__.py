"""The parts of a run, in their order: a part is one file, and one line here."""

from experiments.chip.parts import attention, kernels, operations, rates, steps, texts, weights

PARTS = (texts.PART, kernels.PART, rates.PART, attention.PART, operations.PART, steps.PART, weights.PART)
