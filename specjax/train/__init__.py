"""Training: the loop in `loop`, data in `data`, the command in `command`. `specjax.objectives` has the objectives."""
